// Ranks that leave the job. A rank that has finished may leave while other ranks still process its data: their
// operation completes. A rank that leaves before an operation completes fails it, and the error names that rank. It
// does not fail an operation of a communicator without it.
//
// Three ranks share memory. Rank 2 makes progress only in nb_shared_tick. Rank 1 delays the last part until rank 2 has
// done its own part. So ranks 0 and 1 finish, and rank 0 leaves, before rank 2 reads the data that are ready for it.
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

#include "base/clock.h"
#include "engine/context.h"
#include "engine/shared.h"
#include "engine/shared_fold.h"
#include "job.h"
#include "sums.h"

enum { SIZE = 3, HOLDER = 1, SLOW = 2, WORDS = 1000 };

static _Atomic bool slow_is_ready; // rank 2 has done its part and makes no progress until its next tick

static _Atomic bool holder_idle; // rank 1 starts operations and makes no progress on them

static bool is_idle(const struct nb_job *job) {
    return job->rank == HOLDER && atomic_load(&holder_idle);
}

bool __real_nb_shared_progress(struct nb_job *job);
bool __wrap_nb_shared_progress(struct nb_job *job);
bool __real_nb_shared_arm(struct nb_job *job);
bool __wrap_nb_shared_arm(struct nb_job *job);
void __real_nb_shared_tick(struct nb_job *job, int64_t now);
void __wrap_nb_shared_tick(struct nb_job *job, int64_t now);
void __real_nb_fold_reduce(struct shared *l, struct nb_work *work, uint64_t window);
void __wrap_nb_fold_reduce(struct shared *l, struct nb_work *work, uint64_t window);

bool __wrap_nb_shared_progress(struct nb_job *job) {
    return job->rank != SLOW && !is_idle(job) && __real_nb_shared_progress(job);
}

bool __wrap_nb_shared_arm(struct nb_job *job) {
    return job->rank == SLOW || is_idle(job) || __real_nb_shared_arm(job);
}

void __wrap_nb_shared_tick(struct nb_job *job, int64_t now) {
    if (is_idle(job)) {
        return;
    }
    __real_nb_shared_tick(job, now);
    if (job->rank == SLOW && job->shared != NULL && atomic_load(&nb_shared_area(job->shared, SLOW)->reduced) > 0) {
        atomic_store(&slow_is_ready, true);
    }
}

void __wrap_nb_fold_reduce(struct shared *l, struct nb_work *work, uint64_t window) {
    int64_t until = nb_now_ns() + (int64_t)TEST_LIMIT_MS * 1000000;
    while (l->rank == HOLDER && l->size == SIZE && !atomic_load(&slow_is_ready)) {
        CHECK(nb_now_ns() < until, "rank %d does not do its part", SLOW);
        nb_pause();
    }
    __real_nb_fold_reduce(l, work, window);
}

enum { LEAVER = 2, WAITER = 1, GRACE_OVER_NS = 1000 * 1000 * 1000 };

static _Atomic bool leave_is_late;   // rank 0's announcement of the leaver does not arrive
static _Atomic bool grace_has_ended; // the waiter knows only that its lanes to the leaver are broken

void __real_nb_control_broadcast(struct nb_job *job, enum control_type type, const void *body, size_t bytes);
void __wrap_nb_control_broadcast(struct nb_job *job, enum control_type type, const void *body, size_t bytes);
void __real_nb_watchdog_tick(struct nb_job *job, int64_t now);
void __wrap_nb_watchdog_tick(struct nb_job *job, int64_t now);

void __wrap_nb_control_broadcast(struct nb_job *job, enum control_type type, const void *body, size_t bytes) {
    if (type != CTL_LEFT || !atomic_load(&leave_is_late)) {
        __real_nb_control_broadcast(job, type, body, bytes);
    }
}

void __wrap_nb_watchdog_tick(struct nb_job *job, int64_t now) {
    const struct suspicion *s = &job->watchdog.suspicions[LEAVER];
    bool over = job->rank == WAITER && job->size > LEAVER && s->raised && now - s->since_ns > GRACE_OVER_NS;
    __real_nb_watchdog_tick(job, now);
    if (over) {
        atomic_store(&grace_has_ended, true);
    }
}

// Rank 1 waits for rank 0 in a communicator without rank 2, which leaves meanwhile.
static void rank_outside_leaves(struct test_rank *me) {
    static const int ranks[] = {0, WAITER};
    int64_t until = nb_now_ns() + (int64_t)TEST_LIMIT_MS * 1000000;
    struct test_rank member = *me;
    struct nb_error err = {0};
    test_barrier(me, "all are here");
    if (me->rank == LEAVER) {
        return;
    }
    CHECK(nb_comm_make(me->job, 3, ranks, 2, &err) == 0, "%s", err.text);
    member.comm = nb_comm_find(me->job, 3);
    while (me->rank == 0 && !atomic_load(&grace_has_ended)) {
        CHECK(nb_now_ns() < until, "rank %d has not lost its lanes to rank %d", WAITER, LEAVER);
        sched_yield();
    }
    test_barrier(&member, "without the leaver");
}

static void broadcast_and_leave(struct test_rank *me) {
    int32_t data[WORDS];
    struct nb_segment all = {.base = data, .bytes = sizeof data};
    for (int i = 0; i < WORDS; i++) {
        data[i] = me->rank == 0 ? i : -1;
    }
    struct nb_op op = test_op("last", NB_OP_BROADCAST, &all);
    op.dtype = NB_I32;
    test_do(me, op);
    for (int i = 0; i < WORDS; i++) {
        CHECK(data[i] == i, "rank %d: [%d] is %d", me->rank, i, data[i]);
    }
}

// Rank 1 leaves during a staged operation. Rank 0 has done its own part, and its error names rank 1.
static void leave_during_operation(struct test_rank *me) {
    int64_t until = nb_now_ns() + (int64_t)TEST_LIMIT_MS * 1000000;
    float data[WORDS] = {0};
    struct nb_segment all = {.base = data, .bytes = sizeof data};
    struct nb_error err = {0};
    test_barrier(me, "both are here");
    struct nb_work *work = test_submit(me, test_op("half", NB_OP_ALLREDUCE, &all));
    if (me->rank == HOLDER) {
        while (atomic_load(&nb_shared_area(me->job->shared, 0)->filled) == 0) {
            CHECK(nb_now_ns() < until, "rank 0 does not do its part");
            nb_pause();
        }
        nb_job_close(me->job);
        me->job = NULL;
        CHECK(test_finish(work, &err) == NB_ECLOSED, "%s", err.text);
        return;
    }
    int rc = test_finish(work, &err);
    CHECK(rc == NB_EPEER && err.peer == HOLDER && strstr(err.text, "left the job before 'half'") != NULL, "%d %s", rc,
          err.text);
}

static _Atomic bool waits_for_leaver; // rank 0 is in the middle of its share until rank 1 leaves

void __real_nb_fold_direct(struct shared *l, struct nb_work *work, struct nb_range range);
void __wrap_nb_fold_direct(struct shared *l, struct nb_work *work, struct nb_range range);

void __wrap_nb_fold_direct(struct shared *l, struct nb_work *work, struct nb_range range) {
    int64_t until = nb_now_ns() + (int64_t)TEST_LIMIT_MS * 1000000;
    __real_nb_fold_direct(l, work, range);
    while (l->rank == 0 && atomic_load(&waits_for_leaver) && atomic_load(&nb_shared_area(l, HOLDER)->revoked) == 0) {
        CHECK(nb_now_ns() < until, "rank %d does not leave", HOLDER);
        nb_pause();
    }
}

// Rank 1 has done its share of an operation in shared arenas, and leaves. Rank 0 may not finish its own share, as it
// would write to rank 1's memory: its error names rank 1.
static void leave_after_own_share(struct test_rank *me) {
    int64_t until = nb_now_ns() + (int64_t)TEST_LIMIT_MS * 1000000;
    struct nb_segment all = {.base = arena_share(me), .bytes = ARENA_BYTES};
    struct nb_error err = {0};
    const _Atomic uint64_t *done = &nb_shared_area(me->job->shared, HOLDER)->done;
    uint64_t before = atomic_load(done);
    test_barrier(me, "both are here");
    atomic_store(&waits_for_leaver, true);
    struct nb_work *work = test_submit(me, test_op("direct", NB_OP_ALLREDUCE, &all));
    if (me->rank == HOLDER) {
        while (atomic_load(done) == before) {
            CHECK(nb_now_ns() < until, "rank %d does not do its share", HOLDER);
            nb_pause();
        }
        nb_job_close(me->job);
        me->job = NULL;
        CHECK(test_finish(work, &err) == NB_ECLOSED, "%s", err.text);
        return;
    }
    int rc = test_finish(work, &err);
    CHECK(rc == NB_EPEER && err.peer == HOLDER && strstr(err.text, "left the job before 'direct'") != NULL, "%d %s", rc,
          err.text);
}

int main(void) {
    struct test_rank template = test_on("shm");
    template.size = SIZE;
    template.run = broadcast_and_leave;
    int rc = test_job(&template);
    atomic_store(&holder_idle, true);
    template.size = 2;
    template.run = leave_during_operation;
    rc = rc == 0 ? test_job(&template) : rc;
    atomic_store(&holder_idle, false);
    template.run = leave_after_own_share;
    rc = rc == 0 ? test_job(&template) : rc;
    atomic_store(&leave_is_late, true);
    template = test_on("tcp");
    template.size = SIZE;
    template.run = rank_outside_leaves;
    return rc == 0 ? test_job(&template) : rc;
}
