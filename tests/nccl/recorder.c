// A profiler plugin for NCCL that writes down each of NCCL's calls, and makes the same call to another profiler, ours.
// replay.c makes the calls again.
//
//   RECORDED_PROFILER   the library of the other profiler, whose handles NCCL gets
//   RECORDING           the file to write, with %p for the process's id
//
// A line is a call. It has the time by CLOCK_MONOTONIC in ns, the thread, the call's name, and its values:
//   init      context, communicator, nodes, ranks, rank, mask of events, version of the table
//   start     handle, context, type, parent, and for
//             an operation   group, function, elements, their type, channels, tag; then of a collective its sequence,
//                            algorithm, protocol and root; of a message its peer
//             a proxy's operation   1 if of this process, channel, peer, steps, bytes of a step, 1 if it sends
//             a step of it          number
//             a kernel's channel    channel, start by the GPU's clock
//   state     handle, state, the value that comes with it
//   stop      handle
//   finalize  context
// Numbers are decimal, a missing text is "-". After MOST calls it only passes them on.
#include <dlfcn.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "nccl/profiler_abi.h"

#define EXPORT __attribute__((visibility("default")))
#define MISSING(text) ((text) != NULL ? (text) : "-")

enum { MOST = 20000, PATH_BYTES = 4096, OPERATION = NCCL_PROFILE_COLL | NCCL_PROFILE_P2P };

static struct {
    pthread_once_t once;
    pthread_mutex_t lock; // a call is written and passed on in one piece, so that lines are in the order of the calls
    const void *tables[NCCL_PROFILER_NEWEST + 1];
    FILE *out;
    int written;
} recorder = {.once = PTHREAD_ONCE_INIT, .lock = PTHREAD_MUTEX_INITIALIZER};

static void open_once(void) {
    char path[PATH_BYTES];
    const char *name = getenv("RECORDED_PROFILER");
    const char *file = getenv("RECORDING");
    void *library = name != NULL ? dlopen(name, RTLD_NOW | RTLD_LOCAL) : NULL;
    const char *process = file != NULL ? strstr(file, "%p") : NULL;
    if (library == NULL || file == NULL) {
        (void)fprintf(stderr, "recorder: RECORDED_PROFILER and RECORDING are needed\n");
        abort();
    }
    int head = process != NULL ? (int)(process - file) : (int)strlen(file);
    if (process != NULL) {
        (void)snprintf(path, sizeof path, "%.*s%d%s", head, file, (int)getpid(), process + 2);
    } else {
        (void)snprintf(path, sizeof path, "%s", file);
    }
    recorder.out = fopen(path, "w");
    for (int version = NCCL_PROFILER_OLDEST; version <= NCCL_PROFILER_NEWEST; version++) {
        char symbol[32];
        (void)snprintf(symbol, sizeof symbol, "ncclProfiler_v%d", version);
        recorder.tables[version] = dlsym(library, symbol);
    }
}

// The functions other than init have the same place and type in every version.
static const struct nccl_profiler_v5 *table_of(int version) {
    return recorder.tables[version];
}

static uint64_t number(const void *pointer) {
    return (uintptr_t)pointer;
}

// The lock is held from here to done().
static int64_t begin(void) {
    struct timespec now;
    pthread_mutex_lock(&recorder.lock);
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

__attribute__((format(printf, 1, 2))) static void put(const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    if (recorder.out != NULL && recorder.written < MOST) {
        (void)vfprintf(recorder.out, fmt, args);
    }
    va_end(args);
}

static void put_call(int64_t at_ns, const char *name) {
    put("%" PRId64 " %d %s", at_ns, (int)gettid(), name);
}

static int done(int result) {
    put("\n");
    recorder.written++;
    pthread_mutex_unlock(&recorder.lock);
    return result;
}

static void put_operation(int version, uint64_t type, const void *event) {
    const struct nccl_event_v7 *any = event; // of which only the fields of `version` are read
    uint64_t tag = 0;
    if (type == NCCL_PROFILE_COLL) {
        const struct nccl_coll_v4 *coll = &any->coll.v5.v4;
        tag = version >= 7 ? any->coll.tag : 0;
        put(" %" PRIu64 " %s %zu %s %u %" PRIu64, number(version == 4 ? any->parent : any->coll.v5.group),
            MISSING(coll->function), coll->count, MISSING(coll->type), coll->channels, tag);
        put(" %" PRIu64 " %s %s %d", coll->sequence, MISSING(coll->algorithm), MISSING(coll->protocol), coll->root);
        return;
    }
    const struct nccl_p2p_v5 *p2p = &any->p2p.v5;
    tag = version >= 7 ? any->p2p.tag : 0;
    put(" %" PRIu64 " %s %zu %s %u %" PRIu64 " %d", number(version == 4 ? any->parent : p2p->group),
        MISSING(p2p->function), p2p->count, MISSING(p2p->type), p2p->channels, tag, p2p->peer);
}

static void put_event(int version, uint64_t type, const void *event) {
    const struct nccl_event_v7 *any = event;
    if ((type & OPERATION) != 0) {
        put_operation(version, type, event);
    } else if (type == NCCL_PROFILE_PROXY_OP) {
        const struct nccl_proxy_op *op = &any->proxy_op;
        put(" %d %u %d %d %d %d", op->pid == getpid(), op->channel, op->peer, op->steps, op->step_bytes, op->sends);
    } else if (type == NCCL_PROFILE_PROXY_STEP) {
        put(" %d", any->proxy_step.number);
    } else if (type == NCCL_PROFILE_KERNEL_CH) {
        put(" %u %" PRIu64, any->kernel_ch.channel, any->kernel_ch.timer);
    }
}

static int start_event(int version, void *ctx, void **handle, void *event) {
    const struct nccl_event_v5 *later = event;
    const struct nccl_event_v4 *v4 = event;
    uint64_t type = version == 4 ? v4->type : later->type;
    int64_t at_ns = begin();
    int result = table_of(version)->start_event(ctx, handle, event);
    put_call(at_ns, "start");
    put(" %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64, number(*handle), number(ctx), type, number(later->parent));
    put_event(version, type, event);
    return done(result);
}

static int stop_event(int version, void *handle) {
    int64_t at_ns = begin();
    put_call(at_ns, "stop");
    put(" %" PRIu64, number(handle));
    return done(table_of(version)->stop_event(handle));
}

static int record_state(int version, void *handle, int state, union nccl_state_args *args) {
    int64_t at_ns = begin();
    put_call(at_ns, "state");
    put(" %" PRIu64 " %d %" PRIu64, number(handle), state, args != NULL ? args->timer : 0);
    return done(table_of(version)->record_state(handle, state, args));
}

static int finalize(int version, void *ctx) {
    int64_t at_ns = begin();
    put_call(at_ns, "finalize");
    put(" %" PRIu64, number(ctx));
    int result = done(table_of(version)->finalize(ctx));
    (void)fflush(recorder.out);
    return result;
}

static int initialized(int version, void *const *ctx, const int *mask, const uint64_t numbers[4], int64_t at_ns) {
    put_call(at_ns, "init");
    put(" %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 " %d %d", number(*ctx), numbers[0], numbers[1],
        numbers[2], numbers[3], *mask, version);
    return done(NCCL_SUCCESS);
}

static int init_v4(void **ctx, int *mask, const char *name, uint64_t comm, int nodes, int ranks, int rank,
                   nccl_logger log) {
    pthread_once(&recorder.once, open_once);
    const struct nccl_profiler_v4 *table = recorder.tables[4];
    const uint64_t numbers[] = {comm, (uint64_t)nodes, (uint64_t)ranks, (uint64_t)rank};
    int64_t at_ns = begin();
    (void)table->init(ctx, mask, name, comm, nodes, ranks, rank, log);
    return initialized(4, ctx, mask, numbers, at_ns);
}

// Versions 5 to 7 have one init, and all have one form of the other functions.
#define FUNCTIONS(version_)                                                                                            \
    static int start_v##version_(void *ctx, void **handle, void *event) {                                              \
        return start_event(version_, ctx, handle, event);                                                              \
    }                                                                                                                  \
    static int stop_v##version_(void *handle) {                                                                        \
        return stop_event(version_, handle);                                                                           \
    }                                                                                                                  \
    static int state_v##version_(void *handle, int state, union nccl_state_args *args) {                               \
        return record_state(version_, handle, state, args);                                                            \
    }                                                                                                                  \
    static int finalize_v##version_(void *ctx) {                                                                       \
        return finalize(version_, ctx);                                                                                \
    }

#define TABLE(kind_, version_)                                                                                         \
    EXPORT const struct nccl_profiler_v##kind_ ncclProfiler_v##version_ = {                                            \
        "Recorder", init_v##version_, start_v##version_, stop_v##version_, state_v##version_, finalize_v##version_}

#define FROM_V5(version_)                                                                                              \
    static int init_v##version_(void **ctx, uint64_t comm, int *mask, const char *name, int nodes, int ranks,          \
                                int rank, nccl_logger log) {                                                           \
        pthread_once(&recorder.once, open_once);                                                                       \
        const uint64_t numbers[] = {comm, (uint64_t)nodes, (uint64_t)ranks, (uint64_t)rank};                           \
        int64_t at_ns = begin();                                                                                       \
        (void)table_of(version_)->init(ctx, comm, mask, name, nodes, ranks, rank, log);                                \
        return initialized(version_, ctx, mask, numbers, at_ns);                                                       \
    }                                                                                                                  \
    FUNCTIONS(version_)                                                                                                \
    TABLE(5, version_)

FUNCTIONS(4)
TABLE(4, 4);
FROM_V5(5);
FROM_V5(6);
FROM_V5(7);
