// The steady state, in which the same operations repeat: the progress owner allocates and frees no memory. It takes
// a lock only to receive submissions, to complete an operation, and around its sleep. The linker replaces the
// watched functions (ctest.py, WRAPPED); calls inside libfabric are not seen.
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
    const char *network; // as test_on() has it
    const char *hosts;   // a letter for each rank; NULL: one host
    int size;
    int streams;
    enum nb_algorithm_id algorithm;
    bool elsewhere; // memory that is not the arena's
    pthread_barrier_t meet;
};

struct calls {
    _Atomic int count;
    void *_Atomic from[NOTED_MAX];
};

// What drivers did between the rounds that warm up and the end.
static struct {
    _Atomic bool counts;
    struct calls memory;
    struct calls locks;
    _Atomic int over; // operations
} seen;

// Of a thread.
static _Thread_local struct {
    struct nb_job *job; // whose passes it runs
    int locks;          // that it may take
    bool lends;         // it is where it hands over the driving
} driver;

extern const char __executable_start[];

static void note(struct calls *calls, void *from) {
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

static void memory_seen(void *from) {
    if (driver.job != NULL && atomic_load(&seen.counts)) {
        note(&seen.memory, from);
    }
}

static void lock_seen(void *from) {
    if (driver.job == NULL || !atomic_load(&seen.counts) || atomic_load(&driver.job->inbox.filled)) {
        return;
    }
    if (driver.lends && driver.job->progress.wanted) { // a caller requested progress: the thread sleeps here
        driver.locks = INT_MAX;
    }
    if (driver.locks > 0) {
        driver.locks--;
    } else {
        note(&seen.locks, from);
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
    memory_seen(__builtin_return_address(0));
    return __real_malloc(bytes);
}

void *__wrap_calloc(size_t count, size_t bytes) {
    memory_seen(__builtin_return_address(0));
    return __real_calloc(count, bytes);
}

void *__wrap_realloc(void *memory, size_t bytes) {
    memory_seen(__builtin_return_address(0));
    return __real_realloc(memory, bytes);
}

void *__wrap_aligned_alloc(size_t align, size_t bytes) {
    memory_seen(__builtin_return_address(0));
    return __real_aligned_alloc(align, bytes);
}

int __wrap_posix_memalign(void **memory, size_t align, size_t bytes) {
    memory_seen(__builtin_return_address(0));
    return __real_posix_memalign(memory, align, bytes);
}

void __wrap_free(void *memory) {
    if (memory != NULL) {
        memory_seen(__builtin_return_address(0));
    }
    __real_free(memory);
}

int __wrap_pthread_mutex_lock(pthread_mutex_t *lock) {
    lock_seen(__builtin_return_address(0));
    return __real_pthread_mutex_lock(lock);
}

void *__wrap_nb_thread_main(void *job) {
    driver.job = job;
    return __real_nb_thread_main(job);
}

void __wrap_nb_progress_pass(struct nb_job *job, const struct nb_work *awaited, int sleep_ms,
                             nb_progress_sleep_fn *sleep) {
    struct nb_job *before = driver.job; // the thread's own are in nb_thread_main()
    driver.job = job;
    __real_nb_progress_pass(job, awaited, sleep_ms, sleep);
    driver.job = before;
}

void __wrap_nb_work_finish(struct nb_work *work, const struct nb_error *why) {
    if (driver.job != NULL && atomic_load(&seen.counts)) {
        atomic_fetch_add(&seen.over, 1);
    }
    driver.locks = 1;
    __real_nb_work_finish(work, why);
    driver.locks = 0;
}

void __wrap_nb_progress_sleep(struct nb_job *job, int sleep_ms) {
    driver.locks = INT_MAX;
    __real_nb_progress_sleep(job, sleep_ms);
    driver.locks = 0;
}

void __wrap_nb_progress_hand_over(struct nb_job *job) {
    driver.lends = true;
    __real_nb_progress_hand_over(job);
    driver.lends = false;
    driver.locks = 0;
}

// Each rank gives every other one a number, and to itself.
static void exchange(struct test_rank *me, float *line, size_t each) {
    size_t whole_line = each * (size_t)me->size;
    struct nb_segment all = {.base = line, .bytes = 2 * whole_line * sizeof *line};
    for (size_t i = 0; i < whole_line; i++) {
        line[i] = input_value(me->rank, i);
    }
    test_do(me, test_op("exchange", NB_OP_ALLTOALL, &all));
    for (size_t i = 0; i < whole_line; i++) {
        float want = input_value((int)(i / each), (size_t)me->rank * each + i % each);
        CHECK(line[whole_line + i] == want, "rank %d: [%zu] is %g", me->rank, i, (double)line[whole_line + i]);
    }
}

// Some at once: they are agreed, and over, in any order.
static void together(struct test_rank *me, char *base) {
    struct nb_work *works[MANY];
    for (int k = 0; k < MANY; k++) {
        int which = (k + me->rank) % MANY;
        struct nb_segment all = {.base = base + (size_t)which * LONG, .bytes = which % 2 == 0 ? SMALL : LONG};
        char name[32];
        snprintf(name, sizeof name, "together.%d", which);
        memset(all.base, me->rank + 1, all.bytes);
        struct nb_op op = test_op(name, NB_OP_ALLREDUCE, &all);
        op.dtype = NB_U8;
        works[which] = test_submit(me, op);
    }
    for (int which = 0; which < MANY; which++) {
        test_done(me, works[which]);
        const char *line = base + (size_t)which * LONG;
        CHECK(line[SMALL - 1] == me->size * (me->size + 1) / 2, "rank %d, together %d: %d", me->rank, which, line[0]);
    }
}

// Returns how many operations that were.
static int one_round(struct test_rank *me, char *base) {
    static const size_t counts[] = {SMALL, MIDDLE, LONG};
    int done = 0;
    for (int kind = NB_OP_ALLREDUCE; kind <= NB_OP_BROADCAST; kind++) {
        for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
            struct nb_op op = {.name = "again", .kind = (enum nb_op_kind)kind, .dtype = NB_F32, .root = 1};
            op.awaited = i % 2 == 0;
            check_operation(me, op, base, counts[i], contiguous);
            done++;
        }
    }
    exchange(me, (float *)(void *)base, SMALL);
    exchange(me, (float *)(void *)base, SMALL);
    together(me, base);
    test_barrier(me, "barrier");
    return done + 2 + MANY + 1;
}

static void rank_main(struct test_rank *me) {
    struct plan *plan = me->arg;
    char *memory = plan->elsewhere ? malloc(ARENA_BYTES) : NULL;
    char *base = arena_share(me);
    int done = 0;
    base = plan->elsewhere ? memory : base;
    for (int i = 0; i < WARM_UP; i++) {
        (void)one_round(me, base);
    }
    pthread_barrier_wait(&plan->meet);
    atomic_store(&seen.counts, true);
    pthread_barrier_wait(&plan->meet);
    for (int i = 0; i < ROUNDS; i++) {
        done += one_round(me, base);
    }
    // The inbox is empty: a pass that still looks into it would take a lock each time.
    CHECK(!atomic_load(&me->job->inbox.filled), "%s: rank %d still looks into its empty inbox", plan->what, me->rank);
    pthread_barrier_wait(&plan->meet);
    atomic_store(&seen.counts, false);
    pthread_barrier_wait(&plan->meet);
    done *= me->size;
    if (me->rank == 0) {
        CHECK(atomic_load(&seen.over) == done, "%s: of %d operations progress owners completed %d", plan->what, done,
              seen.over);
        check_none(&seen.memory, "allocated or freed memory", plan->what, done);
        check_none(&seen.locks, "took a lock", plan->what, done);
    }
    pthread_barrier_wait(&plan->meet);
    nb_job_close(me->job); // from here on nobody touches the memory
    me->job = NULL;
    free(memory);
}

// False: the network is not there.
static bool run_plan(struct plan plan) {
    struct test_rank template = test_on(plan.network);
    template.size = plan.size;
    template.streams = plan.streams;
    template.algorithm = plan.algorithm;
    template.shm = plan.hosts != NULL ? NB_SHM_REQUIRED : template.shm;
    template.hosts = plan.hosts;
    template.run = rank_main;
    template.arg = &plan;
    atomic_store(&seen.memory.count, 0);
    atomic_store(&seen.locks.count, 0);
    atomic_store(&seen.over, 0);
    pthread_barrier_init(&plan.meet, NULL, (unsigned)plan.size);
    bool there = test_job(&template) == 0;
    pthread_barrier_destroy(&plan.meet);
    return there;
}

// False: the network is not there.
static bool lanes(const char *network) {
    static const struct {
        enum nb_algorithm_id algorithm;
        const char *name;
    } pinned[] = {{NB_ALGORITHM_INLINE, "star"},
                  {NB_ALGORITHM_DOUBLING, "doubling"},
                  {NB_ALGORITHM_HALVING, "halving"},
                  {NB_ALGORITHM_RING, "ring"},
                  {NB_ALGORITHM_NONE, "as measured"}};
    bool there = true;
    for (size_t i = 0; there && i < sizeof pinned / sizeof pinned[0]; i++) {
        struct plan plan = {.what = pinned[i].name, .network = network, .size = 3, .streams = 2};
        plan.algorithm = pinned[i].algorithm;
        plan.elsewhere = i % 2 == 1;
        there = run_plan(plan);
    }
    return there;
}

// What a word says.
int main(int argc, char **argv) {
    const char *word = argc > 1 ? argv[1] : "tcp";
    if (strcmp(word, "shm") == 0) {
        struct plan plan = {.what = "shared memory", .network = "shm", .size = 3, .streams = 1};
        plan.algorithm = NB_ALGORITHM_RING;
        (void)run_plan(plan);
        plan.elsewhere = true;
        (void)run_plan(plan);
    } else if (strcmp(word, "hosts") == 0) {
        struct plan plan = {.what = "two levels", .network = "tcp", .hosts = "aab", .size = 3, .streams = 2};
        plan.algorithm = NB_ALGORITHM_TWO_LEVEL;
        (void)run_plan(plan);
        plan.elsewhere = true;
        (void)run_plan(plan);
    } else if (!lanes(word)) {
        SKIP("there is no libfabric");
    }
    return 0;
}
