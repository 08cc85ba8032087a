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
#include "nccl/variable.h"
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
    LOOKED_AT = 64, // operations that pool_evict looks at
    COMMS = 1024,   // open at once
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
    uint64_t task;
    uint8_t channel;
    int peer;
    bool sends;
    void *theirs;
    struct step steps[STEPS];
};

struct kernel {
    uint64_t task;
    uint8_t channel;
    int64_t seen_ns; // the proxy saw the start
    uint64_t start;  // on the GPU's clock
    uint64_t stop;
    void *theirs;
};

// Entries of a fixed table. An entry's turn grows when it is taken and when it is given back: it is odd while in use, and
// is part of its handles. HELD: it was used since it was taken, and stays until it is given back.
enum { HELD = 1 };

struct pool {
    _Atomic uint64_t used[WORDS]; // a bit each
    _Atomic uint64_t states[OPS]; // turn << 1 | HELD
    _Atomic uint64_t owners[OPS]; // context of the communicator; 0: another process's
    _Atomic unsigned hint;        // word where one was free last
    _Atomic unsigned hand;        // entry that pool_evict looks at next
};

struct nb_profile_comm {
    _Atomic uint64_t context; // what NCCL has for it; 0: not open
    uint64_t number;
    bool passed_on;
    void *theirs;
};

struct tables {
    _Atomic uint64_t last_task;
    struct pool op_pool;
    struct pool kernel_pool;
    struct task tasks[TASKS];
    struct op ops[OPS];
    struct kernel kernels[KERNELS];
    struct nb_profile_comm comms[COMMS];
};

// The process's profiler. It is made with the first communicator, and stays: NCCL may open others later.
static struct {
    pthread_mutex_t lock; // of opening and closing
    bool tried;
    bool guarded; // the fork handler is registered
    pid_t pid;
    uint64_t salt; // of contexts
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

// Names by code, which is the index plus 1; 0: another one. python/netbottleneck/trace/nccl_events.py has the same lists.
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

// Contexts. NCCL gives an event the context of the process that called the collective. That may be another one, so a
// context is a number that is looked up. It holds a number of the process, because two of one host may have the same id.

static void *context_of(uint64_t salt, uint64_t number, uint64_t index) {
    uint64_t low = (uint32_t)(number * COMMS + index);
    return (void *)(uintptr_t)(salt << 32 | low); // NOLINT(performance-no-int-to-ptr)
}

// NULL if it is another process's, or closed.
static struct nb_profile_comm *comm_of(const void *ctx) {
    uint64_t context = (uintptr_t)ctx;
    if (context == 0 || process.tables == NULL) {
        return NULL;
    }
    struct nb_profile_comm *comm = &process.tables->comms[context % COMMS];
    return atomic_load_explicit(&comm->context, memory_order_acquire) == context ? comm : NULL;
}

// Pools. An entry's number is its turn * OPS + its index, never 0.

// Begins the turn of an entry that the caller alone has.
static uint64_t pool_begin(struct pool *pool, unsigned index, uint64_t owner) {
    uint64_t turn = (atomic_load_explicit(&pool->states[index], memory_order_relaxed) >> 1) + 1;
    atomic_store_explicit(&pool->owners[index], owner, memory_order_relaxed);
    atomic_store_explicit(&pool->states[index], turn << 1 | HELD, memory_order_release);
    return turn * OPS + index;
}

// Ends the turn of an entry in that state; false if another thread did.
static bool pool_end(struct pool *pool, unsigned index, uint64_t state) {
    uint64_t next = ((state >> 1) + 1) << 1;
    return atomic_compare_exchange_strong_explicit(&pool->states[index], &state, next, memory_order_acq_rel,
                                                   memory_order_relaxed);
}

// NCCL does not end the operations of every transport. One that nothing refers to makes room for a new one, in about the
// order in which they were taken.
static uint64_t pool_evict(struct pool *pool, uint64_t owner) {
    for (int i = 0; i < LOOKED_AT; i++) {
        unsigned index = atomic_fetch_add_explicit(&pool->hand, 1, memory_order_relaxed) % OPS;
        uint64_t state = atomic_load_explicit(&pool->states[index], memory_order_relaxed);
        if ((state & HELD) == 0 && (state >> 1) % 2 == 1 && pool_end(pool, index, state)) {
            return pool_begin(pool, index, owner);
        }
    }
    return 0;
}

// Returns the number of an entry, 0 if there is no room.
static uint64_t pool_take(struct pool *pool, uint64_t owner) {
    unsigned first = atomic_load_explicit(&pool->hint, memory_order_relaxed);
    for (unsigned i = 0; i < WORDS; i++) {
        unsigned word = (first + i) % WORDS;
        uint64_t used = atomic_load_explicit(&pool->used[word], memory_order_relaxed);
        while (~used != 0) {
            unsigned bit = (unsigned)__builtin_ctzll(~used);
            uint64_t mine = (uint64_t)1 << bit;
            used = atomic_fetch_or_explicit(&pool->used[word], mine, memory_order_acquire);
            if ((used & mine) == 0) {
                atomic_store_explicit(&pool->hint, word, memory_order_relaxed);
                return pool_begin(pool, word * WORD + bit, owner);
            }
        }
    }
    return pool_evict(pool, owner);
}

// Lets an entry make room until it is used.
static void pool_let_go(struct pool *pool, uint64_t number) {
    atomic_store_explicit(&pool->states[number % OPS], number / OPS << 1, memory_order_release);
}

// Holds the entry of that number. False if it was given back, or has made room.
static bool pool_hold(struct pool *pool, uint64_t number) {
    _Atomic uint64_t *state = &pool->states[number % OPS];
    uint64_t turn = number / OPS;
    uint64_t found = atomic_load_explicit(state, memory_order_acquire);
    while (turn % 2 == 1 && found == turn << 1) {
        if (atomic_compare_exchange_weak_explicit(state, &found, found | HELD, memory_order_acq_rel,
                                                  memory_order_acquire)) {
            return true;
        }
    }
    return turn % 2 == 1 && found == (turn << 1 | HELD);
}

static void pool_give(struct pool *pool, unsigned index, uint64_t state) {
    if (pool_end(pool, index, state)) {
        uint64_t mine = (uint64_t)1 << (index % WORD);
        atomic_fetch_and_explicit(&pool->used[index / WORD], ~mine, memory_order_release);
    }
}

// Gives back one that is held.
static void pool_give_held(struct pool *pool, uint64_t number) {
    pool_give(pool, (unsigned)(number % OPS), number / OPS << 1 | HELD);
}

// Gives back those of an owner.
static void pool_give_all(struct pool *pool, uint64_t owner) {
    for (unsigned i = 0; i < OPS; i++) {
        uint64_t state = atomic_load_explicit(&pool->states[i], memory_order_acquire);
        bool in_use = (state >> 1) % 2 == 1;
        if (in_use && atomic_load_explicit(&pool->owners[i], memory_order_relaxed) == owner) {
            pool_give(pool, i, state);
        }
    }
}

// The entry of an event's handle; NULL if it is another kind's, or has ended.

// An operation's handle is that of its first step, but for the kind.
static uint64_t op_number(const void *handle) {
    return number_of(handle) / STEPS;
}

static struct op *op_of(const void *handle) {
    bool is_one = kind_of(handle) == KIND_OP || kind_of(handle) == KIND_STEP;
    if (process.tables == NULL || !is_one || !pool_hold(&process.tables->op_pool, op_number(handle))) {
        return NULL;
    }
    return &process.tables->ops[op_number(handle) % OPS];
}

static struct step *step_of(const void *handle) {
    struct op *op = kind_of(handle) == KIND_STEP ? op_of(handle) : NULL;
    struct step *step = op != NULL ? &op->steps[number_of(handle) % STEPS] : NULL;
    return step != NULL && step->open ? step : NULL;
}

static struct kernel *kernel_of(const void *handle) {
    uint64_t number = number_of(handle);
    bool is_one = kind_of(handle) == KIND_KERNEL;
    if (process.tables == NULL || !is_one || !pool_hold(&process.tables->kernel_pool, number)) {
        return NULL;
    }
    return &process.tables->kernels[number % KERNELS];
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

// comm: NULL if it is another process's; the event's parent then means nothing here.
static void *op_start(const struct nb_profile_comm *comm, const struct nccl_event_v7 *event, void *theirs) {
    struct tables *tables = process.tables;
    uint64_t owner = comm != NULL ? atomic_load_explicit(&comm->context, memory_order_relaxed) : 0;
    uint64_t number = pool_take(&tables->op_pool, owner);
    if (number == 0) {
        return NULL;
    }
    struct op *op = &tables->ops[number % OPS];
    op->task = comm != NULL ? task_number(event->parent) : 0;
    op->channel = event->proxy_op.channel;
    op->peer = event->proxy_op.peer;
    op->sends = event->proxy_op.sends != 0;
    op->theirs = theirs;
    for (int i = 0; i < STEPS; i++) {
        op->steps[i].open = false;
    }
    pool_let_go(&tables->op_pool, number);
    return handle_of(KIND_OP, number * STEPS);
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
    return handle_of(KIND_STEP, op_number(event->parent) * STEPS + slot);
}

static void *kernel_start(const struct nb_profile_comm *comm, const struct nccl_event_v7 *event, int64_t now_ns,
                          void *theirs) {
    struct tables *tables = process.tables;
    uint64_t owner = atomic_load_explicit(&comm->context, memory_order_relaxed);
    uint64_t number = pool_take(&tables->kernel_pool, owner);
    if (number == 0) {
        return NULL;
    }
    tables->kernels[number % KERNELS] = (struct kernel){.task = task_number(event->parent),
                                                        .channel = event->kernel_ch.channel,
                                                        .seen_ns = now_ns,
                                                        .start = event->kernel_ch.timer,
                                                        .theirs = theirs};
    return handle_of(KIND_KERNEL, number);
}

static void *pass_on(const struct nb_profile_comm *comm, int version, uint64_t type, const void *event) {
    const struct nccl_event_v7 *any = event;
    if (comm == NULL || !comm->passed_on || !nb_next_wants(&process.next, type)) {
        return NULL;
    }
    void *parent = theirs_of(any->parent);
    void *group = parent;
    if (version > 4 && (type == NCCL_PROFILE_COLL || type == NCCL_PROFILE_P2P)) {
        group = theirs_of(type == NCCL_PROFILE_COLL ? any->coll.v5.group : any->p2p.v5.group);
    }
    return nb_next_start(&process.next, comm->theirs, type, event, parent, group);
}

// The other profiler may change its mask while NCCL runs. Without a ring that is NCCL's mask.
static void mask_follow(void) {
    if (process.ring.header == NULL) {
        return;
    }
    int both = __atomic_load_n(&process.next.own_mask, __ATOMIC_RELAXED) | OURS;
    if (__atomic_load_n(process.mask, __ATOMIC_RELAXED) != both) {
        __atomic_store_n(process.mask, both, __ATOMIC_RELAXED);
    }
}

// An event that the ring does not have. NCCL 2.27 reports no task of a group that has no handle.
static void *other_start(uint64_t type, void *theirs) {
    bool has_tasks = type == NCCL_PROFILE_GROUP && process.ring.header != NULL;
    return theirs != NULL || has_tasks ? task_new(theirs) : NULL;
}

// The communicator of an event; NULL if it is another process's.
static struct nb_profile_comm *comm_of_event(const void *ctx, uint64_t type, const struct nccl_event_v7 *event) {
    bool far = type == NCCL_PROFILE_PROXY_OP && event->proxy_op.pid != process.pid;
    return far ? NULL : comm_of(ctx);
}

static bool is_by_proxy(uint64_t type) {
    return type == NCCL_PROFILE_PROXY_OP || type == NCCL_PROFILE_PROXY_STEP;
}

void *nb_profile_start(const void *ctx, int version, uint64_t type, const void *event) {
    const struct nb_profile_comm *comm = comm_of_event(ctx, type, event);
    if (process.tables == NULL || (comm == NULL && !is_by_proxy(type))) {
        return NULL;
    }
    int64_t now_ns = nb_now_ns();
    void *theirs = pass_on(comm, version, type, event);
    void *handle = NULL;
    if (comm != NULL && comm->passed_on) {
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
        return other_start(type, theirs);
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
        pool_give_held(&process.tables->kernel_pool, number_of(handle));
    } else if (kind_of(handle) == KIND_OP && op_of(handle) != NULL) {
        pool_give_held(&process.tables->op_pool, op_number(handle));
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

static int ring_open(int rank, struct nb_error *err) {
    char path[PATH_BYTES];
    long events = EVENTS_DEFAULT;
    const char *text = nb_variable(VARIABLE);
    if (text == NULL || strcmp(text, "0") == 0) {
        return 0;
    }
    if (strcmp(text, "1") == 0) {
        return nb_fail(err, -EINVAL,
                       VARIABLE "=1 is for scripts that import netbottleneck: name a file, such as "
                                "/tmp/nccl-%%h-%%p.ring");
    }
    size_t bytes = strlen(text);
    if (strchr(text, '/') == NULL && (bytes < 5 || strcmp(text + bytes - 5, ".ring") != 0)) {
        return nb_variable_invalid(VARIABLE, "0, or a path, such as /tmp/nccl-%h-%p.ring", err);
    }
    int rc = path_fill(text, path, err);
    rc = rc == 0 ? nb_variable_number("NETBOTTLENECK_TRACE_EVENTS", 1, INT32_MAX, &events, err) : rc;
    if (rc < 0) {
        return rc;
    }
    struct nb_error why = {0};
    rc = nb_ring_open(&process.ring, path, (uint64_t)events, rank, &why);
    const char *remedy = rc == -EBUSY ? ", with %p for the process's number in " VARIABLE : "";
    return rc < 0 ? nb_fail(err, rc, "%s%s", why.text, remedy) : 0;
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
    process.salt = (((uint64_t)nb_now_ns() ^ (uint64_t)process.pid << 32) * 0x9e3779b97f4a7c15u) >> 32;
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

// Returns a free entry, NULL if there is none. The lock is held.
static struct nb_profile_comm *comm_new(struct nb_error *err) {
    struct tables *tables = process.tables;
    for (int i = 0; tables != NULL && i < COMMS; i++) {
        if (atomic_load_explicit(&tables->comms[i].context, memory_order_relaxed) == 0) {
            tables->comms[i].number = process.numbers++;
            return &tables->comms[i];
        }
    }
    if (tables != NULL) {
        (void)nb_fail(err, -ENOSPC, "a communicator beyond %d open ones is not recorded", COMMS);
    }
    return NULL;
}

void nb_profile_open(void **ctx, const struct nb_profile_about *about, int *mask) {
    struct nb_error err = {0};
    *ctx = NULL;
    pthread_mutex_lock(&process.lock);
    if (!process.tried) {
        process_open(about);
    }
    struct nb_profile_comm *comm = comm_new(&err);
    if (comm != NULL) {
        comm->theirs = NULL;
        int *theirs = process.ring.header == NULL ? mask : NULL;
        comm->passed_on = nb_next_open_comm(&process.next, &comm->theirs, about, theirs);
        put_comm(comm, about);
        process.comms++;
        if (process.mask != mask) {
            process.mask = mask;
        }
        mask_follow();
        *ctx = context_of(process.salt, process.numbers, (uint64_t)(comm - process.tables->comms));
        atomic_store_explicit(&comm->context, (uintptr_t)*ctx, memory_order_release);
    }
    pthread_mutex_unlock(&process.lock);
    warn(about, &err);
}

void nb_profile_close(const void *ctx) {
    struct nb_profile_comm *comm = comm_of(ctx);
    if (comm == NULL) {
        return;
    }
    pool_give_all(&process.tables->op_pool, (uintptr_t)ctx);
    pool_give_all(&process.tables->kernel_pool, (uintptr_t)ctx);
    if (comm->passed_on) {
        nb_next_close_comm(&process.next, comm->theirs);
    }
    pthread_mutex_lock(&process.lock);
    process.comms--;
    if (process.comms == 0) { // of other processes: NCCL does not end what it aborts
        pool_give_all(&process.tables->op_pool, 0);
    }
    atomic_store_explicit(&comm->context, 0, memory_order_release);
    pthread_mutex_unlock(&process.lock);
}

// Shortens the file. With a communicator left open, NCCL's threads may still write.
__attribute__((destructor)) static void at_exit(void) {
    if (process.comms == 0) {
        nb_ring_close(&process.ring);
    }
}
