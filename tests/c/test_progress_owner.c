// Waiting callers run progress: one at a time, any of them, and the thread resumes when none is left. A wait that
// times out or whose job ends returns. Operations without a waiter complete.
#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <unistd.h>

#include "base/clock.h"
#include "engine/context.h"
#include "job.h"

enum { CALLERS = 4, ROUNDS = 200, N = 256 };

struct caller {
    struct test_rank *me;
    int number;
};

static void sum_once(struct test_rank *me, const char *name, int32_t *line, int round) {
    struct nb_segment all = {.base = line, .bytes = N * sizeof *line};
    struct nb_op op = test_op(name, NB_OP_ALLREDUCE, &all);
    op.dtype = NB_I32;
    for (int i = 0; i < N; i++) {
        line[i] = i + round + me->rank;
    }
    test_do(me, op);
    for (int i = 0; i < N; i++) {
        int32_t want = me->size * (i + round) + me->size * (me->size - 1) / 2;
        CHECK(line[i] == want, "rank %d, %s, round %d: [%d] is %d, not %d", me->rank, name, round, i, line[i], want);
    }
}

static void *caller_main(void *arg) {
    const struct caller *caller = arg;
    int32_t line[N];
    char name[32];
    snprintf(name, sizeof name, "caller.%d", caller->number);
    for (int round = 0; round < ROUNDS; round++) {
        sum_once(caller->me, name, line, round);
    }
    return NULL;
}

// Several callers of a rank wait for operations of their own.
static void together(struct test_rank *me) {
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

static bool driven_by_callers(struct nb_job *job) {
    pthread_mutex_lock(&job->lock);
    bool lent = job->progress.takeovers > 0;
    pthread_mutex_unlock(&job->lock);
    return lent;
}

// After callers have driven, what nobody waits for is done all the same, small or large.
static void nobody_waits(struct test_rank *me) {
    int32_t *line = malloc((size_t)(1 << 20) * sizeof *line);
    for (int round = 0; round < 20; round++) {
        sum_once(me, "waited", line, round);
        struct nb_segment all = {.base = line, .bytes = (round % 2 == 0 ? 16 : 1 << 20) * sizeof *line};
        struct nb_work *work = test_submit(me, test_op("left", NB_OP_ALLREDUCE, &all));
        int64_t until = nb_now_ns() + (int64_t)TEST_LIMIT_MS * 1000000;
        int code = -1;
        while (!nb_work_test(work, &code)) {
            CHECK(nb_now_ns() < until, "rank %d, round %d: it is not done", me->rank, round);
            usleep(50);
        }
        CHECK(code == 0, "code %d", code);
        nb_work_release(work);
    }
    CHECK(driven_by_callers(me->job), "rank %d: no caller ever drove", me->rank);
    free(line);
}

// Rank 0 waits a while for what rank 1 submits only afterwards.
static void in_vain(struct test_rank *me) {
    int32_t line[N];
    struct nb_segment all = {.base = line, .bytes = sizeof line};
    memset(line, 0, sizeof line);
    sum_once(me, "warm", line, 0);
    if (me->rank == 0) {
        struct nb_work *work = test_submit(me, test_op("late", NB_OP_ALLREDUCE, &all));
        CHECK(nb_work_wait(work, 0, NULL) == -EAGAIN, "no other rank has submitted");
        for (int ms = 1; ms < 100; ms *= 7) {
            int64_t began = nb_now_ns();
            CHECK(nb_work_wait(work, ms, NULL) == -EAGAIN, "no other rank has submitted");
            CHECK(nb_now_ns() - began >= (int64_t)ms * 1000000, "it returned before its timeout");
        }
        test_barrier(me, "now");
        test_done(me, work);
    } else {
        test_barrier(me, "now");
        test_do(me, test_op("late", NB_OP_ALLREDUCE, &all));
    }
}

static void *waits_main(void *arg) {
    struct nb_error err = {0};
    int code = nb_work_wait(arg, -1, &err);
    CHECK(code == NB_ECLOSED || code == NB_EPEER, "%d %s", code, err.text);
    return NULL;
}

// A rank closes its job while a caller drives it.
static void closed(struct test_rank *me) {
    int32_t line[N];
    struct nb_segment all = {.base = line, .bytes = sizeof line};
    struct nb_work *work = NULL;
    pthread_t thread;
    memset(line, 0, sizeof line);
    for (int round = 0; round < 5; round++) {
        sum_once(me, "warm", line, round);
    }
    struct nb_error err = {0};
    if (me->rank != 0) { // they do their part of it and leave
        // A third rank may still be at it when rank 0's next sum ends the job.
        int rc = test_try(me, test_op("last", NB_OP_ALLREDUCE, &all), &err);
        CHECK(rc == 0 || rc == NB_EPEER, "rank %d: %d %s", me->rank, rc, err.text);
        return;
    }
    test_do(me, test_op("last", NB_OP_ALLREDUCE, &all));
    struct nb_op op = test_op("never", NB_OP_ALLREDUCE, &all);
    if (nb_submit(nb_job_world(me->job), &op, &work, &err) < 0) {
        CHECK(err.code == NB_EPEER, "%s", err.text); // the others have left already
        return;
    }
    CHECK(pthread_create(&thread, NULL, waits_main, work) == 0, "a thread");
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

static _Atomic int first_is_closed; // rank 0 has closed its job

static void *closed_main(void *arg) {
    struct nb_error err = {0};
    int code = nb_work_wait(arg, -1, &err);
    CHECK(code == NB_ECLOSED, "the wait ends early: %d %s", code, err.text);
    return NULL;
}

static bool caller_drives(struct nb_job *job) {
    pthread_mutex_lock(&job->lock);
    bool drives = job->progress.owner == NB_PROGRESS_CALLER;
    pthread_mutex_unlock(&job->lock);
    return drives;
}

// Rank 0 closes its job while a caller runs progress and all other ranks are still there. The caller gets the code of its
// operation, not -EAGAIN.
static void closed_inside(struct test_rank *me) {
    int64_t until = nb_now_ns() + (int64_t)TEST_LIMIT_MS * 1000000;
    int32_t line[N];
    struct nb_segment all = {.base = line, .bytes = sizeof line};
    pthread_t thread;
    memset(line, 0, sizeof line);
    sum_once(me, "warm", line, 0);
    if (me->rank != 0) {
        while (atomic_load(&first_is_closed) == 0) {
            CHECK(nb_now_ns() < until, "rank 0 is not closed");
            usleep(50);
        }
        return;
    }
    struct nb_work *work = test_submit(me, test_op("never", NB_OP_ALLREDUCE, &all));
    CHECK(pthread_create(&thread, NULL, closed_main, work) == 0, "a thread");
    while (!caller_drives(me->job)) {
        CHECK(nb_now_ns() < until, "no caller owns progress");
        usleep(50);
    }
    nb_job_close(me->job);
    me->job = NULL;
    pthread_join(thread, NULL);
    atomic_store(&first_is_closed, 1);
    nb_work_release(work);
}

int main(void) {
    static void (*const runs[])(struct test_rank *) = {together, nobody_waits, in_vain, closed, closed_inside};
    static const char *const networks[] = {"tcp", "shm", "ofi"};
    int rc = 0;
    for (int n = 0; n < 3 && (rc == 0 || rc == 77); n++) {
        for (size_t i = 0; i < sizeof runs / sizeof runs[0] && rc == 0; i++) {
            struct test_rank template = test_on(networks[n]);
            template.size = i == 2 ? 2 : 3;
            template.run = runs[i];
            atomic_store(&first_is_closed, 0);
            rc = test_job(&template);
            template.size = 2;
            atomic_store(&first_is_closed, 0);
            rc = rc == 0 ? test_job(&template) : rc;
        }
    }
    return rc;
}
