// Steady state, in which the same operations repeat: the progress owner allocates and frees no memory. It takes a lock
// only to receive submissions, to complete an operation, and around its sleep. The linker replaces the watched
// functions (ctest.py, WRAPPED); calls inside libfabric are not counted.
#include <limits.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#include "engine/context.h"
#include "engine/progress_pass.h"
#include "stage.h"
#include "sums.h"

enum { WARM_UP = 3, ROUNDS = 5, MANY = 4, SMALL = 1000, MIDDLE = 30 * 1000, LONG = 100 * 1000, NOTED_MAX = 8 };

struct plan {
    const char *what;
    const char *network; // argument of test_on()
    const char *hosts;   // a letter for each rank's host; NULL: one host
    int size;
    int streams;
    enum nb_algorithm_id algorithm;
    bool heap; // buffers are not in an arena
    pthread_barrier_t barrier;
};

struct calls {
    _Atomic int count;
    void *_Atomic from[NOTED_MAX];
};

// Calls of progress owners after the warm-up rounds.
static struct {
    _Atomic bool enabled;
    struct calls memory;
    struct calls locks;
    _Atomic int completed; // operations
} counted;

// State of a thread that may be the progress owner.
static _Thread_local struct {
    struct nb_job *job; // whose passes it runs
    int locks;          // number of locks that it may take
    bool handing_over;  // it is in nb_progress_hand_over()
} owner;

extern const char __executable_start[];

static void count_call(struct calls *calls, void *from) {
    int at = atomic_fetch_add(&calls->count, 1);
    if (at < NOTED_MAX) {
        atomic_store(&calls->from[at], from);
    }
}

static void check_none(struct calls *calls, const char *what, const char *where, int operations) {
    int count = atomic_load(&calls->count);
    for (int i = 0; i < count && i < NOTED_MAX; i++) { // for addr2line
        printf("from %#tx\n", (const char *)atomic_load(&calls->from[i]) - __executable_start);
    }
    CHECK(count == 0, "%s: progress owners %s %d times in %d operations", where, what, count, operations);
}

static void count_memory(void *from) {
    if (owner.job != NULL && atomic_load(&counted.enabled)) {
        count_call(&counted.memory, from);
    }
}

static void count_lock(void *from) {
    if (owner.job == NULL || !atomic_load(&counted.enabled) || atomic_load(&owner.job->inbox.filled)) {
        return;
    }
    if (owner.handing_over &&
        owner.job->progress.wanted) { // a caller has requested progress: the thread sleeps in the hand-over
        owner.locks = INT_MAX;
    }
    if (owner.locks > 0) {
        owner.locks--;
    } else {
        count_call(&counted.locks, from);
    }
}

void *__real_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__real_realloc(void *memory, size_t bytes);
void *__wrap_realloc(void *memory, size_t bytes);
void *__real_aligned_alloc(size_t align, size_t bytes);
void *__wrap_aligned_alloc(size_t align, size_t bytes);
int __real_posix_memalign(void **memory, size_t align, size_t bytes);
int __wrap_posix_memalign(void **memory, size_t align, size_t bytes);
void __real_free(void *memory);
void __wrap_free(void *memory);
int __real_pthread_mutex_lock(pthread_mutex_t *lock);
int __wrap_pthread_mutex_lock(pthread_mutex_t *lock);
void *__real_nb_thread_main(void *job);
void *__wrap_nb_thread_main(void *job);
void __real_nb_progress_pass(struct nb_job *job, const struct nb_work *awaited, int sleep_ms,
                             nb_progress_sleep_fn *sleep);
void __wrap_nb_progress_pass(struct nb_job *job, const struct nb_work *awaited, int sleep_ms,
                             nb_progress_sleep_fn *sleep);
void __real_nb_work_finish(struct nb_work *work, const struct nb_error *why);
void __wrap_nb_work_finish(struct nb_work *work, const struct nb_error *why);
void __real_nb_progress_sleep(struct nb_job *job, int sleep_ms);
void __wrap_nb_progress_sleep(struct nb_job *job, int sleep_ms);
void __real_nb_progress_hand_over(struct nb_job *job);
void __wrap_nb_progress_hand_over(struct nb_job *job);

void *__wrap_malloc(size_t bytes) {
    count_memory(__builtin_return_address(0));
    return __real_malloc(bytes);
}

void *__wrap_calloc(size_t count, size_t bytes) {
    count_memory(__builtin_return_address(0));
    return __real_calloc(count, bytes);
}

void *__wrap_realloc(void *memory, size_t bytes) {
    count_memory(__builtin_return_address(0));
    return __real_realloc(memory, bytes);
}

void *__wrap_aligned_alloc(size_t align, size_t bytes) {
    count_memory(__builtin_return_address(0));
    return __real_aligned_alloc(align, bytes);
}

int __wrap_posix_memalign(void **memory, size_t align, size_t bytes) {
    count_memory(__builtin_return_address(0));
    return __real_posix_memalign(memory, align, bytes);
}

void __wrap_free(void *memory) {
    if (memory != NULL) {
        count_memory(__builtin_return_address(0));
    }
    __real_free(memory);
}

int __wrap_pthread_mutex_lock(pthread_mutex_t *lock) {
    count_lock(__builtin_return_address(0));
    return __real_pthread_mutex_lock(lock);
}

void *__wrap_nb_thread_main(void *job) {
    owner.job = job;
    return __real_nb_thread_main(job);
}

void __wrap_nb_progress_pass(struct nb_job *job, const struct nb_work *awaited, int sleep_ms,
                             nb_progress_sleep_fn *sleep) {
    struct nb_job *before = owner.job; // the thread itself sets this in nb_thread_main()
    owner.job = job;
    __real_nb_progress_pass(job, awaited, sleep_ms, sleep);
    owner.job = before;
}

void __wrap_nb_work_finish(struct nb_work *work, const struct nb_error *why) {
    if (owner.job != NULL && atomic_load(&counted.enabled)) {
        atomic_fetch_add(&counted.completed, 1);
    }
    owner.locks = 1;
    __real_nb_work_finish(work, why);
    owner.locks = 0;
}

void __wrap_nb_progress_sleep(struct nb_job *job, int sleep_ms) {
    owner.locks = INT_MAX;
    __real_nb_progress_sleep(job, sleep_ms);
    owner.locks = 0;
}

void __wrap_nb_progress_hand_over(struct nb_job *job) {
    owner.handing_over = true;
    __real_nb_progress_hand_over(job);
    owner.handing_over = false;
    owner.locks = 0;
}

// All-to-all with `each` elements for each rank.
static void run_alltoall(struct test_rank *me, float *data, size_t each) {
    size_t total = each * (size_t)me->size;
    struct nb_segment all = {.base = data, .bytes = 2 * total * sizeof *data};
    for (size_t i = 0; i < total; i++) {
        data[i] = input_value(me->rank, i);
    }
    test_do(me, test_op("exchange", NB_OP_ALLTOALL, &all));
    for (size_t i = 0; i < total; i++) {
        float want = input_value((int)(i / each), (size_t)me->rank * each + i % each);
        CHECK(data[total + i] == want, "rank %d: [%zu] is %g", me->rank, i, (double)data[total + i]);
    }
}

// Concurrent operations, which start and complete in any order.
static void run_concurrent(struct test_rank *me, char *base) {
    struct nb_work *works[MANY];
    for (int k = 0; k < MANY; k++) {
        int which = (k + me->rank) % MANY;
        struct nb_segment all = {.base = base + (size_t)which * LONG, .bytes = which % 2 == 0 ? SMALL : LONG};
        char name[32];
        snprintf(name, sizeof name, "concurrent.%d", which);
        memset(all.base, me->rank + 1, all.bytes);
        struct nb_op op = test_op(name, NB_OP_ALLREDUCE, &all);
        op.dtype = NB_U8;
        works[which] = test_submit(me, op);
    }
    for (int which = 0; which < MANY; which++) {
        test_done(me, works[which]);
        const char *data = base + (size_t)which * LONG;
        CHECK(data[SMALL - 1] == me->size * (me->size + 1) / 2, "rank %d, concurrent %d: %d", me->rank, which, data[0]);
    }
}

// Runs one round. Returns the number of its operations.
static int one_round(struct test_rank *me, char *base) {
    static const size_t enabled[] = {SMALL, MIDDLE, LONG};
    int done = 0;
    for (int kind = NB_OP_ALLREDUCE; kind <= NB_OP_BROADCAST; kind++) {
        for (size_t i = 0; i < sizeof enabled / sizeof enabled[0]; i++) {
            struct nb_op op = {.name = "again", .kind = (enum nb_op_kind)kind, .dtype = NB_F32, .root = 1};
            op.awaited = i % 2 == 0;
            check_operation(me, op, base, enabled[i], contiguous);
            done++;
        }
    }
    run_alltoall(me, (float *)(void *)base, SMALL);
    run_alltoall(me, (float *)(void *)base, SMALL);
    run_concurrent(me, base);
    test_barrier(me, "barrier");
    return done + 2 + MANY + 1;
}

static void rank_main(struct test_rank *me) {
    struct plan *plan = me->arg;
    char *memory = plan->heap ? malloc(ARENA_BYTES) : NULL;
    char *base = arena_share(me);
    int done = 0;
    base = plan->heap ? memory : base;
    for (int i = 0; i < WARM_UP; i++) {
        (void)one_round(me, base);
    }
    pthread_barrier_wait(&plan->barrier);
    atomic_store(&counted.enabled, true);
    pthread_barrier_wait(&plan->barrier);
    for (int i = 0; i < ROUNDS; i++) {
        done += one_round(me, base);
    }
    // If the flag stayed set for an empty inbox, each pass would take the lock.
    CHECK(!atomic_load(&me->job->inbox.filled), "%s: rank %d has an empty inbox marked as filled", plan->what,
          me->rank);
    pthread_barrier_wait(&plan->barrier);
    atomic_store(&counted.enabled, false);
    pthread_barrier_wait(&plan->barrier);
    done *= me->size;
    if (me->rank == 0) {
        CHECK(atomic_load(&counted.completed) == done, "%s: of %d operations, progress owners completed %d", plan->what,
              done, counted.completed);
        check_none(&counted.memory, "allocated or freed memory", plan->what, done);
        check_none(&counted.locks, "took a lock", plan->what, done);
    }
    pthread_barrier_wait(&plan->barrier);
    nb_job_close(me->job); // after this, no thread uses the memory
    me->job = NULL;
    free(memory);
}

// False: the network is not available.
static bool run_plan(struct plan plan) {
    struct test_rank template = test_on(plan.network);
    template.size = plan.size;
    template.streams = plan.streams;
    template.algorithm = plan.algorithm;
    template.shm = plan.hosts != NULL ? NB_SHM_REQUIRED : template.shm;
    template.hosts = plan.hosts;
    template.run = rank_main;
    template.arg = &plan;
    atomic_store(&counted.memory.count, 0);
    atomic_store(&counted.locks.count, 0);
    atomic_store(&counted.completed, 0);
    pthread_barrier_init(&plan.barrier, NULL, (unsigned)plan.size);
    bool available = test_job(&template) == 0;
    pthread_barrier_destroy(&plan.barrier);
    return available;
}

// False: the network is not available.
static bool test_algorithms(const char *network) {
    static const struct {
        enum nb_algorithm_id algorithm;
        const char *name;
    } pinned[] = {{NB_ALGORITHM_INLINE, "star"},
                  {NB_ALGORITHM_DOUBLING, "doubling"},
                  {NB_ALGORITHM_HALVING, "halving"},
                  {NB_ALGORITHM_RING, "ring"},
                  {NB_ALGORITHM_NONE, "measured choice"}};
    bool available = true;
    for (size_t i = 0; available && i < sizeof pinned / sizeof pinned[0]; i++) {
        struct plan plan = {.what = pinned[i].name, .network = network, .size = 3, .streams = 2};
        plan.algorithm = pinned[i].algorithm;
        plan.heap = i % 2 == 1;
        available = run_plan(plan);
    }
    return available;
}

// Argument: shm, hosts, or a network.
int main(int argc, char **argv) {
    const char *mode = argc > 1 ? argv[1] : "tcp";
    if (strcmp(mode, "shm") == 0) {
        struct plan plan = {.what = "shared memory", .network = "shm", .size = 3, .streams = 1};
        plan.algorithm = NB_ALGORITHM_RING;
        (void)run_plan(plan);
        plan.heap = true;
        (void)run_plan(plan);
    } else if (strcmp(mode, "hosts") == 0) {
        struct plan plan = {.what = "two levels", .network = "tcp", .hosts = "aab", .size = 3, .streams = 2};
        plan.algorithm = NB_ALGORITHM_TWO_LEVEL;
        (void)run_plan(plan);
        plan.heap = true;
        (void)run_plan(plan);
    } else if (!test_algorithms(mode)) {
        SKIP("libfabric is not available");
    }
    return 0;
}
