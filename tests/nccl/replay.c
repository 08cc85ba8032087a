// Makes the calls of a recording (recorder.c) to a profiler plugin, in their order and at their times: the plugin's clock
// is this program's clock_gettime, which gives the recorded times.
//
//   replay --plugin FILE RECORDING
//
// Prints one line of JSON: this process's id and the number of calls.
#include <dlfcn.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>

#include "profiled.h"

enum { COMMS = 64, HANDLES = 1 << 16, WORDS = 24, LINE_BYTES = 1024, DECIMAL = 10 };

// By hash of the recorded handle. A later event may have the handle of one that is over.
struct handle {
    uint64_t recorded; // 0: free
    void *own;
    const struct profiled *comm;
};

static struct {
    int64_t now_ns; // 0: the host's time
    struct handle handles[HANDLES];
    struct profiled comms[COMMS];
    uint64_t contexts[COMMS];
    const char *const *words; // of the line
    int words_count;
    int at; // word that is read next
    int line;
} replay;

int clock_gettime(clockid_t which, struct timespec *at) {
    if (which != CLOCK_MONOTONIC || replay.now_ns == 0) {
        return (int)syscall(SYS_clock_gettime, which, at);
    }
    *at = (struct timespec){.tv_sec = replay.now_ns / 1000000000, .tv_nsec = replay.now_ns % 1000000000};
    return 0;
}

__attribute__((noreturn)) static void malformed(const char *what) {
    (void)fprintf(stderr, "line %d of the recording: %s\n", replay.line, what);
    exit(1);
}

static const char *text(void) {
    if (replay.at >= replay.words_count) {
        malformed("a word is missing");
    }
    const char *word = replay.words[replay.at++];
    return strcmp(word, "-") == 0 ? NULL : word;
}

static uint64_t number(void) {
    const char *word = text();
    char *end = NULL;
    uint64_t value = word != NULL ? strtoull(word, &end, DECIMAL) : 0; // of a negative one too
    if (word == NULL || *end != '\0') {
        malformed("a word is no number");
    }
    return value;
}

static struct handle *place_of(uint64_t recorded) {
    uint64_t at = recorded * 0x9e3779b97f4a7c15u >> 48;
    for (int i = 0; i < HANDLES; i++) {
        struct handle *place = &replay.handles[(at + (uint64_t)i) % HANDLES];
        if (place->recorded == recorded || place->recorded == 0) {
            return place;
        }
    }
    malformed("there are too many handles");
}

static void *own(uint64_t recorded) {
    return recorded != 0 ? place_of(recorded)->own : NULL;
}

// The place of an event whose communicator is open.
static const struct handle *known(uint64_t recorded) {
    const struct handle *handle = place_of(recorded);
    if (handle->comm == NULL || handle->comm->table == NULL) {
        malformed("a handle is not known");
    }
    return handle;
}

static const struct profiled *comm_of(uint64_t context) {
    for (int i = 0; i < COMMS; i++) {
        if (replay.contexts[i] == context && replay.comms[i].table != NULL) {
            return &replay.comms[i];
        }
    }
    malformed("a context is not known");
}

static void make_init(void *plugin) {
    int at = 0;
    while (at < COMMS && replay.comms[at].table != NULL) {
        at++;
    }
    if (at == COMMS) {
        malformed("there are too many communicators");
    }
    struct profiled *comm = &replay.comms[at];
    replay.contexts[at] = number();
    uint64_t id = number();
    (void)number(); // nodes; profiled_init has as many as ranks
    int ranks = (int)number();
    int rank = (int)number();
    int mask = (int)number();
    comm->version = (int)number();
    char name[32];
    (void)snprintf(name, sizeof name, "ncclProfiler_v%d", comm->version);
    comm->table = dlsym(plugin, name);
    if (comm->table == NULL) {
        malformed("the plugin has no table of that version");
    }
    (void)profiled_init(comm, id, NULL, ranks, rank, NULL);
    if (comm->mask != mask) {
        malformed("the plugin wants other events than when this was recorded");
    }
}

static void read_operation(struct nccl_event_v7 *event) {
    void *group = own(number());
    const char *function = text();
    size_t count = number();
    const char *type = text();
    uint8_t channels = (uint8_t)number();
    uint64_t tag = number();
    if (event->type == NCCL_PROFILE_P2P) {
        event->p2p = (struct nccl_p2p_v7){.v5 = {.function = function,
                                                 .type = type,
                                                 .count = count,
                                                 .peer = (int)number(),
                                                 .channels = channels,
                                                 .group = group},
                                          .tag = tag};
        return;
    }
    struct nccl_coll_v4 coll = {.function = function, .count = count, .type = type, .channels = channels};
    coll.sequence = number();
    coll.algorithm = text();
    coll.protocol = text();
    coll.root = (int)number();
    event->coll = (struct nccl_coll_v7){.v5 = {.v4 = coll, .group = group}, .tag = tag};
}

static void make_start(void) {
    struct nccl_event_v7 event = {0};
    uint64_t handle = number();
    const struct profiled *comm = comm_of(number());
    event.type = number();
    event.parent = own(number());
    if (event.type == NCCL_PROFILE_COLL || event.type == NCCL_PROFILE_P2P) {
        read_operation(&event);
    } else if (event.type == NCCL_PROFILE_PROXY_OP) {
        event.proxy_op.pid = number() != 0 ? getpid() : 1;
        event.proxy_op.channel = (uint8_t)number();
        event.proxy_op.peer = (int)number();
        event.proxy_op.steps = (int)number();
        event.proxy_op.step_bytes = (int)number();
        event.proxy_op.sends = (int)number();
    } else if (event.type == NCCL_PROFILE_PROXY_STEP) {
        event.proxy_step.number = (int)number();
    } else if (event.type == NCCL_PROFILE_KERNEL_CH) {
        event.kernel_ch.channel = (uint8_t)number();
        event.kernel_ch.timer = number();
    }
    void *started = profiled_start(comm, &event);
    if ((started != NULL) != (handle != 0)) {
        malformed("the plugin gives a handle where it gave none, or none where it gave one");
    }
    if (handle != 0) {
        *place_of(handle) = (struct handle){.recorded = handle, .own = started, .comm = comm};
    }
}

static void make_call(void *plugin) {
    replay.now_ns = (int64_t)number();
    (void)number(); // the thread
    const char *name = text();
    if (name == NULL) {
        malformed("a call has no name");
    } else if (strcmp(name, "init") == 0) {
        make_init(plugin);
    } else if (strcmp(name, "start") == 0) {
        make_start();
    } else if (strcmp(name, "stop") == 0) {
        const struct handle *handle = known(number());
        profiled_stop(handle->comm, handle->own);
    } else if (strcmp(name, "state") == 0) {
        const struct handle *handle = known(number());
        int state = (int)number();
        profiled_state(handle->comm, handle->own, state, number());
    } else if (strcmp(name, "finalize") == 0) {
        struct profiled *comm = &replay.comms[comm_of(number()) - replay.comms];
        (void)profiled_finalize(comm);
        comm->table = NULL;
    } else {
        malformed("a call is not known");
    }
}

static int replay_all(FILE *recording, void *plugin) {
    char line[LINE_BYTES];
    for (; fgets(line, sizeof line, recording) != NULL; replay.line++) {
        const char *words[WORDS];
        char *rest = line;
        replay.words_count = 0;
        for (char *word; replay.words_count < WORDS && (word = strtok_r(rest, " \n", &rest)) != NULL;) {
            words[replay.words_count++] = word;
        }
        replay.words = words;
        replay.at = 0;
        make_call(plugin);
    }
    return replay.line;
}

int main(int argc, char **argv) {
    if (argc != 4 || strcmp(argv[1], "--plugin") != 0) {
        (void)fprintf(stderr, "usage: replay --plugin FILE RECORDING\n");
        return 2;
    }
    void *plugin = dlopen(argv[2], RTLD_NOW | RTLD_LOCAL);
    FILE *recording = fopen(argv[3], "r");
    if (plugin == NULL || recording == NULL) {
        (void)fprintf(stderr, "%s\n", plugin == NULL ? dlerror() : strerror(errno));
        return 1;
    }
    printf("{\"pid\": %d, \"calls\": %d}\n", (int)getpid(), replay_all(recording, plugin));
    (void)fclose(recording);
    return 0;
}
