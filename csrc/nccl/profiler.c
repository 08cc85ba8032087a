// Profiler: tables of unfinished events, and the events of the ring made from them (see profiler.h).
#include "nccl/profiler.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/fork.h"
#include "nccl/abi.h"
#include "nccl/profiler_abi.h"
#include "trace/event.h"
#include "trace/ring.h"

#define VARIABLE "NETBOTTLENECK_NCCL_EVENTS"

enum {
    OURS =
        NCCL_PROFILE_COLL | NCCL_PROFILE_P2P | NCCL_PROFILE_PROXY_OP | NCCL_PROFILE_PROXY_STEP | NCCL_PROFILE_KERNEL_CH,
    TASKS = 1 << 16, // events with others below them; the oldest makes room for the newest
    OPS = 4096,
    KERNELS = 4096,
    STEPS = 16, // NCCL has at most 8 of an operation in flight
    WORD = 64,
    WORDS = OPS / WORD,
    EVENTS_DEFAULT = 1 << 20,
    PATH_BYTES = 4096
};

_Static_assert(OPS == KERNELS, "one size of pool");

// A handle is KIND_BITS of these, and a number above them.
enum kind { KIND_NONE = 0, KIND_TASK = 1, KIND_OP = 2, KIND_STEP = 3, KIND_KERNEL = 4, KIND_BITS = 3 };

// Times at which a step's states end: see NB_EV_NCCL_STEP.
enum { BEGAN, FIRST, SECOND, LAST, MARKS };

struct task {
    _Atomic uint64_t number; // 0: being replaced
    _Atomic(void *) theirs;
};

struct step {
    bool open;
    int number;
    int64_t at_ns[MARKS]; // 0: not yet
    uint64_t bytes;
    void *theirs;
};

struct op {
    _Atomic(struct nb_profile_comm *) comm;
    uint64_t task;
    uint8_t channel;
    int peer;
    bool sends;
    void *theirs;
    struct step steps[STEPS];
};

struct kernel {
    _Atomic(struct nb_profile_comm *) comm;
    uint64_t task;
    uint8_t channel;
    int64_t seen_ns; // the proxy saw the start
    uint64_t start;  // on the GPU's clock
    uint64_t stop;
    void *theirs;
};

// Entries of a fixed table, a bit each while in use.
struct pool {
    _Atomic uint64_t used[WORDS];
    _Atomic unsigned hint; // word where one was free last
};

struct tables {
    _Atomic uint64_t last_task;
    struct pool op_pool;
    struct pool kernel_pool;
    struct task tasks[TASKS];
    struct op ops[OPS];
    struct kernel kernels[KERNELS];
};

struct nb_profile_comm {
    uint64_t number;
    bool passed_on;
    void *theirs;
};

// The process's profiler. It is made with the first communicator, and stays: NCCL may open others later.
static struct {
    pthread_mutex_t lock; // of opening and closing
    bool tried;
    bool guarded; // the fork handler is registered
    pid_t pid;
    int comms;
    uint64_t numbers; // of communicators
    int *mask;        // NCCL's
    struct tables *tables;
    struct nb_ring ring;
    struct nb_next next;
} process = {.lock = PTHREAD_MUTEX_INITIALIZER, .ring = {.fd = -1}};

static void in_child(void) {
    process.ring.header = NULL; // the mapping is the parent's record
    process.tables = NULL;      // no handle finds anything
    process.next.version = 0;
    pthread_mutex_init(&process.lock, NULL);
}

// Names by code, which is the index plus 1; 0: another one. python/netbottleneck/trace/recorder.py has the same lists.
// NCCL has no name for its uint8.
static const char *const functions[] = {"AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce",
                                        "AlltoAll",  "Send",      "Recv",          "SendRecv",  NULL};
static const char *const types[] = {"ncclInt8",       "ncclInt32",   "ncclUint32",  "ncclInt64",    "ncclUint64",
                                    "ncclFloat16",    "ncclFloat32", "ncclFloat64", "ncclBfloat16", "ncclFloat8e4m3",
                                    "ncclFloat8e5m2", "Unknown",     NULL};
static const uint8_t type_bytes[] = {0, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1, 1};
static const char *const algorithms[] = {"TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE",
                                         "PAT",  NULL};
static const char *const protocols[] = {"LL", "LL128", "SIMPLE", NULL};

static uint64_t code_of(const char *const *names, const char *name) {
    for (uint64_t i = 0; name != NULL && names[i] != NULL; i++) {
        if (strcmp(names[i], name) == 0) {
            return i + 1;
        }
    }
    return 0;
}

// Handles.

static void *handle_of(enum kind kind, uint64_t number) {
    return (void *)(uintptr_t)(number << KIND_BITS | kind); // NOLINT(performance-no-int-to-ptr)
}

static enum kind kind_of(const void *handle) {
    return (enum kind)((uintptr_t)handle & ((1u << KIND_BITS) - 1));
}

static uint64_t number_of(const void *handle) {
    return (uintptr_t)handle >> KIND_BITS;
}

// Returns the index of an entry, -1 if all are in use.
static int pool_take(struct pool *pool) {
    unsigned first = atomic_load_explicit(&pool->hint, memory_order_relaxed);
    for (unsigned i = 0; i < WORDS; i++) {
        unsigned word = (first + i) % WORDS;
        uint64_t used = atomic_load_explicit(&pool->used[word], memory_order_relaxed);
        while (~used != 0) {
            int bit = __builtin_ctzll(~used);
            uint64_t mine = (uint64_t)1 << bit;
            used = atomic_fetch_or_explicit(&pool->used[word], mine, memory_order_acquire);
            if ((used & mine) == 0) {
                atomic_store_explicit(&pool->hint, word, memory_order_relaxed);
                return (int)word * WORD + bit;
            }
        }
    }
    return -1;
}

static void pool_give(struct pool *pool, uint64_t index) {
    uint64_t mine = (uint64_t)1 << (index % WORD);
    atomic_fetch_and_explicit(&pool->used[index / WORD], ~mine, memory_order_release);
}

static bool pool_has(const struct pool *pool, uint64_t index) {
    uint64_t mine = (uint64_t)1 << (index % WORD);
    return index < OPS && (atomic_load_explicit(&pool->used[index / WORD], memory_order_relaxed) & mine) != 0;
}

// The entry of an event's handle; NULL if it is another kind's, or has ended.

static struct op *op_of(const void *handle) {
    uint64_t number = kind_of(handle) == KIND_STEP ? number_of(handle) / STEPS : number_of(handle);
    bool is_one = kind_of(handle) == KIND_OP || kind_of(handle) == KIND_STEP;
    return process.tables != NULL && is_one && pool_has(&process.tables->op_pool, number) ? &process.tables->ops[number]
                                                                                          : NULL;
}

static struct step *step_of(const void *handle) {
    struct op *op = kind_of(handle) == KIND_STEP ? op_of(handle) : NULL;
    struct step *step = op != NULL ? &op->steps[number_of(handle) % STEPS] : NULL;
    return step != NULL && step->open ? step : NULL;
}

static struct kernel *kernel_of(const void *handle) {
    uint64_t number = number_of(handle);
    return process.tables != NULL && kind_of(handle) == KIND_KERNEL && pool_has(&process.tables->kernel_pool, number)
               ? &process.tables->kernels[number]
               : NULL;
}

static void *task_new(void *theirs) {
    struct tables *tables = process.tables;
    uint64_t number = atomic_fetch_add_explicit(&tables->last_task, 1, memory_order_relaxed) + 1;
    struct task *task = &tables->tasks[number % TASKS];
    atomic_store_explicit(&task->number, 0, memory_order_relaxed);
    atomic_store_explicit(&task->theirs, theirs, memory_order_release);
    atomic_store_explicit(&task->number, number, memory_order_release);
    return handle_of(KIND_TASK, number);
}

// The other profiler's handle of a task; NULL if it has none, or the task is too old.
static void *task_theirs(const void *handle) {
    uint64_t number = number_of(handle);
    struct task *task = &process.tables->tasks[number % TASKS];
    if (atomic_load_explicit(&task->number, memory_order_acquire) != number) {
        return NULL;
    }
    void *theirs = atomic_load_explicit(&task->theirs, memory_order_acquire);
    return atomic_load_explicit(&task->number, memory_order_relaxed) == number ? theirs : NULL;
}

static void *theirs_of(const void *handle) {
    const struct op *op;
    const struct step *step;
    const struct kernel *kernel;
    if (process.tables == NULL) {
        return NULL;
    }
    switch (kind_of(handle)) {
    case KIND_TASK:
        return task_theirs(handle);
    case KIND_OP:
        op = op_of(handle);
        return op != NULL ? op->theirs : NULL;
    case KIND_STEP:
        step = step_of(handle);
        return step != NULL ? step->theirs : NULL;
    case KIND_KERNEL:
        kernel = kernel_of(handle);
        return kernel != NULL ? kernel->theirs : NULL;
    default:
        return NULL;
    }
}

static uint64_t task_number(const void *handle) {
    return kind_of(handle) == KIND_TASK ? number_of(handle) : 0;
}

// Starts. Each returns the handle, NULL if there is no room.

static void put_task(const struct nb_profile_comm *comm, int version, uint64_t type, const void *event,
                     const void *handle, int64_t now_ns) {
    const struct nccl_event_v7 *any = event; // of which only the fields of `version` are read
    uint64_t bytes;
    uint64_t what;
    uint64_t which;
    uint64_t tag = 0;
    if (type == NCCL_PROFILE_COLL) {
        const struct nccl_coll_v4 *coll = &any->coll.v5.v4;
        uint64_t element = code_of(types, coll->type);
        bytes = coll->count * type_bytes[element];
        what = code_of(functions, coll->function) | element << 8 | code_of(algorithms, coll->algorithm) << 16 |
               code_of(protocols, coll->protocol) << 24 | (uint64_t)coll->channels << 32;
        which = coll->sequence;
        tag = version >= 7 ? any->coll.tag : 0;
    } else {
        const struct nccl_p2p_v5 *p2p = &any->p2p.v5;
        uint64_t element = code_of(types, p2p->type);
        bytes = p2p->count * type_bytes[element];
        what = code_of(functions, p2p->function) | element << 8 | (uint64_t)p2p->channels << 32;
        which = (uint32_t)p2p->peer;
        tag = version >= 7 ? any->p2p.tag : 0;
    }
    nb_ring_put_at(&process.ring, now_ns, NB_EV_NCCL_TASK, task_number(handle), comm->number, bytes, what, which, tag);
}

static void *op_start(struct nb_profile_comm *comm, const struct nccl_event_v7 *event, void *theirs) {
    int index = pool_take(&process.tables->op_pool);
    if (index < 0) {
        return NULL;
    }
    struct op *op = &process.tables->ops[index];
    bool near = event->proxy_op.pid == process.pid;
    atomic_store_explicit(&op->comm, comm, memory_order_relaxed);
    op->task = near ? task_number(event->parent) : 0;
    op->channel = event->proxy_op.channel;
    op->peer = event->proxy_op.peer;
    op->sends = event->proxy_op.sends != 0;
    op->theirs = theirs;
    for (int i = 0; i < STEPS; i++) {
        op->steps[i].open = false;
    }
    return handle_of(KIND_OP, (uint64_t)index);
}

// A step is started again if the network did not accept its receive: it is the same one still.
static void *step_start(const struct nccl_event_v7 *event, int64_t now_ns, void *theirs) {
    struct op *op = kind_of(event->parent) == KIND_OP ? op_of(event->parent) : NULL;
    if (op == NULL) {
        return NULL;
    }
    int number = event->proxy_step.number;
    uint64_t slot = (uint64_t)number % STEPS;
    struct step *step = &op->steps[slot];
    if (!step->open || step->number != number) {
        *step = (struct step){.open = true, .number = number, .at_ns = {[BEGAN] = now_ns}};
    }
    step->theirs = theirs;
    return handle_of(KIND_STEP, number_of(event->parent) * STEPS + slot);
}

static void *kernel_start(struct nb_profile_comm *comm, const struct nccl_event_v7 *event, int64_t now_ns,
                          void *theirs) {
    int index = pool_take(&process.tables->kernel_pool);
    if (index < 0) {
        return NULL;
    }
    struct kernel *kernel = &process.tables->kernels[index];
    atomic_store_explicit(&kernel->comm, comm, memory_order_relaxed);
    kernel->task = task_number(event->parent);
    kernel->channel = event->kernel_ch.channel;
    kernel->seen_ns = now_ns;
    kernel->start = event->kernel_ch.timer;
    kernel->stop = 0;
    kernel->theirs = theirs;
    return handle_of(KIND_KERNEL, (uint64_t)index);
}

static void *pass_on(const struct nb_profile_comm *comm, int version, uint64_t type, const void *event) {
    const struct nccl_event_v7 *any = event;
    if (!comm->passed_on || !nb_next_wants(&process.next, type)) {
        return NULL;
    }
    bool far = type == NCCL_PROFILE_PROXY_OP && any->proxy_op.pid != process.pid;
    void *parent = far ? NULL : theirs_of(any->parent);
    void *group = parent;
    if (version > 4 && (type == NCCL_PROFILE_COLL || type == NCCL_PROFILE_P2P)) {
        group = theirs_of(type == NCCL_PROFILE_COLL ? any->coll.v5.group : any->p2p.v5.group);
    }
    return nb_next_start(&process.next, comm->theirs, type, event, parent, group);
}

// The other profiler may change its mask while NCCL runs.
static void mask_follow(void) {
    int both = __atomic_load_n(&process.next.mask, __ATOMIC_RELAXED) | (process.ring.header != NULL ? OURS : 0);
    if (__atomic_load_n(process.mask, __ATOMIC_RELAXED) != both) {
        __atomic_store_n(process.mask, both, __ATOMIC_RELAXED);
    }
}

void *nb_profile_start(struct nb_profile_comm *comm, int version, uint64_t type, const void *event) {
    if (comm == NULL || process.tables == NULL) {
        return NULL;
    }
    int64_t now_ns = nb_now_ns();
    void *theirs = pass_on(comm, version, type, event);
    void *handle = NULL;
    if (comm->passed_on) {
        mask_follow();
    }
    switch (type) {
    case NCCL_PROFILE_COLL:
    case NCCL_PROFILE_P2P:
        handle = task_new(theirs);
        put_task(comm, version, type, event, handle, now_ns);
        return handle;
    case NCCL_PROFILE_PROXY_OP:
        handle = op_start(comm, event, theirs);
        break;
    case NCCL_PROFILE_PROXY_STEP:
        handle = step_start(event, now_ns, theirs);
        break;
    case NCCL_PROFILE_KERNEL_CH:
        handle = kernel_start(comm, event, now_ns, theirs);
        break;
    default:
        return theirs != NULL ? task_new(theirs) : NULL;
    }
    if (handle == NULL) {
        nb_ring_drop(&process.ring);
        nb_next_stop(&process.next, theirs);
    }
    return handle;
}

// States.

static void mark(struct step *step, int which, int64_t now_ns) {
    if (step->at_ns[which] == 0) {
        step->at_ns[which] = now_ns;
    }
}

static void step_state(struct step *step, int state, const union nccl_state_args *args, int64_t now_ns) {
    switch (state) {
    case NCCL_STATE_SEND_PEER_WAIT:
        mark(step, FIRST, now_ns);
        break;
    case NCCL_STATE_SEND_WAIT:
        mark(step, SECOND, now_ns);
        step->bytes = args != NULL ? args->bytes : 0;
        break;
    case NCCL_STATE_RECV_FLUSH_WAIT:
        mark(step, FIRST, now_ns);
        step->bytes = args != NULL ? args->bytes : 0;
        break;
    case NCCL_STATE_RECV_GPU_WAIT:
        mark(step, SECOND, now_ns);
        break;
    default: // the first state begins with the step
        break;
    }
}

void nb_profile_state(void *handle, int state, const union nccl_state_args *args) {
    int64_t now_ns = nb_now_ns();
    void *theirs = theirs_of(handle);
    struct step *step = step_of(handle);
    struct kernel *kernel = kernel_of(handle);
    if (step != NULL) {
        step_state(step, state, args, now_ns);
    } else if (kernel != NULL && state == NCCL_STATE_KERNEL_STOP && args != NULL) {
        kernel->stop = args->timer;
    }
    nb_next_state(&process.next, theirs, state, args);
}

// Stops.

static void put_step(const struct op *op, struct step *step, int64_t now_ns) {
    int64_t *at_ns = step->at_ns;
    // A state that was not reported took no time.
    at_ns[LAST] = now_ns;
    at_ns[SECOND] = at_ns[SECOND] != 0 ? at_ns[SECOND] : now_ns;
    at_ns[FIRST] = at_ns[FIRST] != 0 ? at_ns[FIRST] : at_ns[SECOND];
    nb_ring_put_at(&process.ring, at_ns[BEGAN], NB_EV_NCCL_STEP, op->task,
                   (uint32_t)step->number | (uint64_t)(uint32_t)op->peer << 32,
                   op->channel | (uint64_t)op->sends << 8 | step->bytes << 16, (uint64_t)(at_ns[FIRST] - at_ns[BEGAN]),
                   (uint64_t)(at_ns[SECOND] - at_ns[FIRST]), (uint64_t)(at_ns[LAST] - at_ns[SECOND]));
    step->open = false;
}

static void put_kernel(const struct kernel *kernel, int64_t now_ns) {
    nb_ring_put_at(&process.ring, now_ns, NB_EV_NCCL_KERNEL, kernel->task, kernel->channel,
                   (uint64_t)(now_ns - kernel->seen_ns), kernel->start, kernel->stop, 0);
}

void nb_profile_stop(void *handle) {
    int64_t now_ns = nb_now_ns();
    void *theirs = theirs_of(handle);
    struct step *step = step_of(handle);
    struct kernel *kernel = kernel_of(handle);
    if (step != NULL) {
        put_step(op_of(handle), step, now_ns);
    } else if (kernel != NULL) {
        put_kernel(kernel, now_ns);
        pool_give(&process.tables->kernel_pool, number_of(handle));
    } else if (op_of(handle) != NULL) {
        pool_give(&process.tables->op_pool, number_of(handle));
    }
    nb_next_stop(&process.next, theirs);
}

// Opening.

// Writes `text` with %h as this host's name and %p as this process's id.
static int path_fill(const char *text, char path[PATH_BYTES], struct nb_error *err) {
    char host[256] = "";
    size_t at = 0;
    (void)gethostname(host, sizeof host - 1);
    for (; *text != 0 && at + sizeof host < PATH_BYTES; text++) {
        if (text[0] == '%' && (text[1] == 'h' || text[1] == 'p')) {
            int n = text[1] == 'h' ? snprintf(path + at, PATH_BYTES - at, "%s", host)
                                   : snprintf(path + at, PATH_BYTES - at, "%d", (int)getpid());
            at += (size_t)n;
            text++;
        } else {
            path[at++] = *text;
        }
    }
    path[at] = 0;
    return *text == 0 ? 0 : nb_fail(err, -ENAMETOOLONG, VARIABLE "=%.80s… is too long", path);
}

static int capacity(uint64_t *events, struct nb_error *err) {
    const char *text = getenv("NETBOTTLENECK_TRACE_EVENTS");
    char *end = NULL;
    *events = EVENTS_DEFAULT;
    if (text == NULL || text[0] == 0) {
        return 0;
    }
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (errno != 0 || *end != 0 || value < 1) {
        return nb_fail(err, -EINVAL,
                       "NETBOTTLENECK_TRACE_EVENTS='%.80s' is not possible: expected a whole number, at "
                       "least 1",
                       text);
    }
    *events = (uint64_t)value;
    return 0;
}

static int ring_open(int rank, struct nb_error *err) {
    char path[PATH_BYTES];
    uint64_t events = 0;
    const char *text = getenv(VARIABLE);
    if (text == NULL || text[0] == 0 || strcmp(text, "0") == 0) {
        return 0;
    }
    if (strcmp(text, "1") == 0) {
        return nb_fail(err, -EINVAL,
                       VARIABLE "=1 is for scripts that import netbottleneck: name a file, such as "
                                "/tmp/nccl-%%h-%%p.ring");
    }
    int rc = path_fill(text, path, err);
    rc = rc == 0 ? capacity(&events, err) : rc;
    return rc == 0 ? nb_ring_open(&process.ring, path, events, rank, err) : rc;
}

static void warn(const struct nb_profile_about *about, const struct nb_error *err) {
    if (about->log != NULL && err->code < 0) {
        about->log(NCCL_LOG_WARN, NCCL_LOG_INIT_NET, __FILE__, __LINE__, "PROFILER/NetBottleneck : %s", err->text);
    }
}

// Once in a process. What fails is left out, with a warning.
static void process_open(const struct nb_profile_about *about) {
    struct nb_error ring_error = {0};
    struct nb_error next_error = {0};
    const char *next = getenv("NETBOTTLENECK_NCCL_PROFILER");
    process.tried = true;
    process.pid = getpid();
    if (!process.guarded) {
        process.guarded = true;
        nb_fork_handler(in_child);
    }
    (void)ring_open(about->rank, &ring_error);
    if (next != NULL && next[0] != 0) {
        (void)nb_next_open(&process.next, next, about->version, &next_error);
    }
    if (process.ring.header != NULL || process.next.version != 0) {
        process.tables = calloc(1, sizeof *process.tables);
    }
    warn(about, &ring_error);
    warn(about, &next_error);
}

static void put_comm(const struct nb_profile_comm *comm, const struct nb_profile_about *about) {
    uint64_t name[2] = {0};
    if (about->name != NULL) {
        memcpy(name, about->name, strnlen(about->name, sizeof name));
    }
    nb_ring_put(&process.ring, NB_EV_NCCL_COMM, about->id, comm->number,
                (uint32_t)about->rank | (uint64_t)(uint32_t)about->ranks << 32, (uint32_t)about->hosts, name[0],
                name[1]);
}

void nb_profile_open(struct nb_profile_comm **out, const struct nb_profile_about *about, int *mask) {
    struct nb_profile_comm *comm = NULL;
    *out = NULL;
    pthread_mutex_lock(&process.lock);
    if (!process.tried) {
        process_open(about);
    }
    if (process.tables != NULL) {
        comm = calloc(1, sizeof *comm);
    }
    if (comm != NULL) {
        comm->number = process.numbers++;
        comm->passed_on = nb_next_open_comm(&process.next, &comm->theirs, about);
        put_comm(comm, about);
        process.comms++;
        if (process.mask != mask) {
            process.mask = mask;
        }
        mask_follow();
        *out = comm;
    }
    pthread_mutex_unlock(&process.lock);
}

void nb_profile_close(struct nb_profile_comm *comm) {
    struct tables *tables = process.tables;
    if (comm == NULL || tables == NULL) {
        return;
    }
    for (uint64_t i = 0; i < OPS; i++) {
        if (pool_has(&tables->op_pool, i) && atomic_load_explicit(&tables->ops[i].comm, memory_order_relaxed) == comm) {
            pool_give(&tables->op_pool, i);
        }
        if (pool_has(&tables->kernel_pool, i) &&
            atomic_load_explicit(&tables->kernels[i].comm, memory_order_relaxed) == comm) {
            pool_give(&tables->kernel_pool, i);
        }
    }
    if (comm->passed_on) {
        nb_next_close_comm(&process.next, comm->theirs);
    }
    pthread_mutex_lock(&process.lock);
    process.comms--;
    pthread_mutex_unlock(&process.lock);
    free(comm);
}

// Shortens the file. With a communicator left open, NCCL's threads may still write.
__attribute__((destructor)) static void at_exit(void) {
    if (process.comms == 0) {
        nb_ring_close(&process.ring);
    }
}
