// Progress owner: waiting callers run progress, any of them, one at a time; the thread resumes when none is left. A
// wait returns on timeout and when its job ends. Operations without a waiter complete. A caller computes in the job's
// float mode.
#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/float_mode.h"
#include "engine/context.h"
#include "job.h"

enum { CALLERS = 4, ROUNDS = 200, N = 256 };

struct caller {
    struct test_rank *me;
    int number;
};

static void sum_once(struct test_rank *me, const char *name, int32_t *data, int round) {
    struct nb_segment all = {.base = data, .bytes = N * sizeof *data};
    struct nb_op op = test_op(name, NB_OP_ALLREDUCE, &all);
    op.dtype = NB_I32;
    for (int i = 0; i < N; i++) {
        data[i] = i + round + me->rank;
    }
    test_do(me, op);
    for (int i = 0; i < N; i++) {
        int32_t want = me->size * (i + round) + me->size * (me->size - 1) / 2;
        CHECK(data[i] == want, "rank %d, %s, round %d: [%d] is %d, not %d", me->rank, name, round, i, data[i], want);
    }
}

static void *caller_main(void *arg) {
    const struct caller *caller = arg;
    int32_t data[N];
    char name[32];
    snprintf(name, sizeof name, "caller.%d", caller->number);
    for (int round = 0; round < ROUNDS; round++) {
        sum_once(caller->me, name, data, round);
    }
    return NULL;
}

// Several callers of a rank wait, each for its own operations.
static void several_callers_wait(struct test_rank *me) {
    pthread_t threads[CALLERS];
    struct caller callers[CALLERS];
    for (int i = 0; i < CALLERS; i++) {
        callers[i] = (struct caller){.me = me, .number = i};
        CHECK(pthread_create(&threads[i], NULL, caller_main, &callers[i]) == 0, "thread %d", i);
    }
    for (int i = 0; i < CALLERS; i++) {
        pthread_join(threads[i], NULL);
    }
}

static bool callers_took_over(struct nb_job *job) {
    pthread_mutex_lock(&job->lock);
    bool took_over = job->progress.takeovers > 0;
    pthread_mutex_unlock(&job->lock);
    return took_over;
}

// After callers have owned progress, operations that no caller waits for still complete, small or large.
static void operations_without_waiter(struct test_rank *me) {
    int32_t *data = malloc((size_t)(1 << 20) * sizeof *data);
    for (int round = 0; round < 20; round++) {
        sum_once(me, "waited", data, round);
        struct nb_segment all = {.base = data, .bytes = (round % 2 == 0 ? 16 : 1 << 20) * sizeof *data};
        struct nb_work *work = test_submit(me, test_op("left", NB_OP_ALLREDUCE, &all));
        int64_t until = nb_now_ns() + (int64_t)TEST_LIMIT_MS * 1000000;
        int code = -1;
        while (!nb_work_test(work, &code)) {
            CHECK(nb_now_ns() < until, "rank %d, round %d: the operation is not done", me->rank, round);
            usleep(50);
        }
        CHECK(code == 0, "code %d", code);
        nb_work_release(work);
    }
    CHECK(callers_took_over(me->job), "rank %d: no caller ever owned progress", me->rank);
    free(data);
}

// Waits time out while rank 1 has not submitted the operation.
static void waits_time_out(struct test_rank *me) {
    int32_t data[N];
    struct nb_segment all = {.base = data, .bytes = sizeof data};
    memset(data, 0, sizeof data);
    sum_once(me, "warm", data, 0);
    if (me->rank == 0) {
        struct nb_work *work = test_submit(me, test_op("late", NB_OP_ALLREDUCE, &all));
        CHECK(nb_work_wait(work, 0, NULL) == -EAGAIN, "the wait did not time out");
        for (int ms = 1; ms < 100; ms *= 7) {
            int64_t began = nb_now_ns();
            CHECK(nb_work_wait(work, ms, NULL) == -EAGAIN, "the wait did not time out");
            CHECK(nb_now_ns() - began >= (int64_t)ms * 1000000, "the wait returned before its timeout");
        }
        test_barrier(me, "now");
        test_done(me, work);
    } else {
        test_barrier(me, "now");
        test_do(me, test_op("late", NB_OP_ALLREDUCE, &all));
    }
}

static void *wait_until_the_job_ends(void *arg) {
    struct nb_error err = {0};
    int code = nb_work_wait(arg, -1, &err);
    CHECK(code == NB_ECLOSED || code == NB_EPEER, "%d %s", code, err.text);
    return NULL;
}

// Rank 0 closes its job while a caller waits.
static void close_with_waiting_caller(struct test_rank *me) {
    int32_t data[N];
    struct nb_segment all = {.base = data, .bytes = sizeof data};
    struct nb_work *work = NULL;
    pthread_t thread;
    memset(data, 0, sizeof data);
    for (int round = 0; round < 5; round++) {
        sum_once(me, "warm", data, round);
    }
    struct nb_error err = {0};
    if (me->rank != 0) { // run the last operation and leave
        // On a third rank it may still be running when rank 0's next operation ends the job.
        int rc = test_try(me, test_op("last", NB_OP_ALLREDUCE, &all), &err);
        CHECK(rc == 0 || rc == NB_EPEER, "rank %d: %d %s", me->rank, rc, err.text);
        return;
    }
    test_do(me, test_op("last", NB_OP_ALLREDUCE, &all));
    struct nb_op op = test_op("never", NB_OP_ALLREDUCE, &all);
    if (nb_submit(nb_job_world(me->job), &op, &work, &err) < 0) {
        CHECK(err.code == NB_EPEER, "%s", err.text); // the other ranks have left already
        return;
    }
    CHECK(pthread_create(&thread, NULL, wait_until_the_job_ends, work) == 0, "thread");
    for (int inside = 0; inside == 0;) {
        pthread_mutex_lock(&me->job->lock);
        inside = me->job->progress.waiters;
        pthread_mutex_unlock(&me->job->lock);
        int code;
        inside += nb_work_test(work, &code);
    }
    nb_job_close(me->job);
    me->job = NULL;
    pthread_join(thread, NULL);
    nb_work_release(work);
}

static _Atomic int rank_0_closed; // rank 0 has closed its job

static void *wait_until_closed(void *arg) {
    struct nb_error err = {0};
    int code = nb_work_wait(arg, -1, &err);
    CHECK(code == NB_ECLOSED, "wrong result of the wait: %d %s", code, err.text);
    return NULL;
}

static bool caller_owns_progress(struct nb_job *job) {
    pthread_mutex_lock(&job->lock);
    bool owned = job->progress.owner == NB_PROGRESS_CALLER;
    pthread_mutex_unlock(&job->lock);
    return owned;
}

// Rank 0 closes its job while a caller owns progress and no other rank has left. The wait returns the operation's code,
// not -EAGAIN.
static void close_while_a_caller_owns_progress(struct test_rank *me) {
    int64_t until = nb_now_ns() + (int64_t)TEST_LIMIT_MS * 1000000;
    int32_t data[N];
    struct nb_segment all = {.base = data, .bytes = sizeof data};
    pthread_t thread;
    memset(data, 0, sizeof data);
    sum_once(me, "warm", data, 0);
    if (me->rank != 0) {
        while (atomic_load(&rank_0_closed) == 0) {
            CHECK(nb_now_ns() < until, "rank 0 does not close its job");
            usleep(50);
        }
        return;
    }
    struct nb_work *work = test_submit(me, test_op("never", NB_OP_ALLREDUCE, &all));
    CHECK(pthread_create(&thread, NULL, wait_until_closed, work) == 0, "thread");
    while (!caller_owns_progress(me->job)) {
        CHECK(nb_now_ns() < until, "no caller owns progress");
        usleep(50);
    }
    nb_job_close(me->job);
    me->job = NULL;
    pthread_join(thread, NULL);
    atomic_store(&rank_0_closed, 1);
    nb_work_release(work);
}

// Bits of a thread's float mode with which it flushes denormal numbers to zero, as after torch.set_flush_denormal().
#if defined(__x86_64__)
static const uint64_t flushing = 0x8040; // MXCSR: flush to zero, and denormals are zero
#elif defined(__aarch64__)
static const uint64_t flushing = 1 << 24; // FPCR: flush to zero
#else
static const uint64_t flushing = 0;
#endif

static struct nb_job *_Atomic flushing_job; // rank 0's, while its caller waits

// Rank 0's caller flushes denormal numbers to zero. It computes as the communication threads do: the result, a denormal
// number, has the same bits on all ranks. Its mode is as before afterwards.
static void caller_computes_as_the_thread_does(struct test_rank *me) {
    const int64_t until = nb_now_ns() + (int64_t)TEST_LIMIT_MS * 1000000;
    const uint32_t want = UINT32_C(1) << 22; // 2^-127
    const uint64_t before = nb_float_mode();
    float data[N];
    uint32_t bits[N];
    struct nb_segment all = {.base = data, .bytes = sizeof data};
    struct nb_op op = test_op("small", NB_OP_ALLREDUCE, &all);
    op.scaled = true;
    op.prescale = 1;
    op.postscale = 0.5 / me->size;
    op.awaited = true;
    for (int i = 0; i < N; i++) {
        data[i] = 0x1p-126F;
    }
    if (me->rank == 0) {
        (void)nb_float_mode_set(before | flushing);
        atomic_store(&flushing_job, me->job);
    }
    while (me->rank != 0 && (atomic_load(&flushing_job) == NULL || !caller_owns_progress(flushing_job))) {
        CHECK(nb_now_ns() < until, "no caller of rank 0 owns progress");
        usleep(50);
    }
    const uint64_t during = nb_float_mode();
    test_do(me, op);
    CHECK((nb_float_mode() & flushing) == (during & flushing), "rank %d: the float mode has changed", me->rank);
    (void)nb_float_mode_set(before);
    memcpy(bits, data, sizeof bits);
    for (int i = 0; i < N; i++) {
        CHECK(bits[i] == want, "rank %d of %d: [%d] is %x, not %x", me->rank, me->size, i, (unsigned)bits[i],
              (unsigned)want);
    }
}

static void check_float_mode(void) {
    struct test_rank template = test_on("tcp");
    template.algorithm = NB_ALGORITHM_DOUBLING; // each rank computes the whole result
    template.run = caller_computes_as_the_thread_does;
    for (template.size = 1; template.size <= 2; template.size++) {
        atomic_store(&flushing_job, NULL);
        CHECK(test_job(&template) == 0, "tcp is not available");
    }
}

// Usage: test_progress_owner shm|tcp|ofi
int main(int argc, char **argv) {
    static void (*const runs[])(struct test_rank *) = {several_callers_wait, operations_without_waiter, waits_time_out,
                                                       close_with_waiting_caller, close_while_a_caller_owns_progress};
    CHECK(argc == 2, "name one network");
    int rc = 0;
    check_float_mode();
    for (size_t i = 0; i < sizeof runs / sizeof runs[0] && rc == 0; i++) {
        struct test_rank template = test_on(argv[1]);
        template.size = i == 2 ? 2 : 3;
        template.run = runs[i];
        atomic_store(&rank_0_closed, 0);
        rc = test_job(&template);
        template.size = 2;
        atomic_store(&rank_0_closed, 0);
        rc = rc == 0 ? test_job(&template) : rc;
    }
    return rc;
}
