// A rank that has finished may leave while other ranks still process its data: their operation completes. A rank
// that leaves before an operation completes fails it, and the failure names that rank.
//
// Three ranks share memory. Rank 2 moves only where time passes (nb_shared_tick), and rank 1 holds the last part back until
// rank 2 has done its own: so ranks 0 and 1 are over, and rank 0 has left, before rank 2 takes what lies ready for it.
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

#include "base/clock.h"
#include "engine/context.h"
#include "engine/shared.h"
#include "engine/shared_fold.h"
#include "job.h"

enum { SIZE = 3, HOLDS = 1, SLOW = 2, WORDS = 1000 };

static _Atomic bool slow_is_ready; // rank 2 has done its part, and stands outside of the operation

static _Atomic bool holds_sits; // rank 1 starts operations and makes no progress on them

static bool sits(const struct nb_job *job) {
    return job->rank == HOLDS && atomic_load(&holds_sits);
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
    return job->rank != SLOW && !sits(job) && __real_nb_shared_progress(job);
}

bool __wrap_nb_shared_arm(struct nb_job *job) {
    return job->rank == SLOW || sits(job) || __real_nb_shared_arm(job);
}

void __wrap_nb_shared_tick(struct nb_job *job, int64_t now) {
    if (sits(job)) {
        return;
    }
    __real_nb_shared_tick(job, now);
    if (job->rank == SLOW && atomic_load(&nb_shared_area(job->shared, SLOW)->reduced) > 0) {
        atomic_store(&slow_is_ready, true);
    }
}

void __wrap_nb_fold_reduce(struct shared *l, struct nb_work *work, uint64_t window) {
    int64_t until = nb_now_ns() + (int64_t)TEST_LIMIT_MS * 1000000;
    while (l->rank == HOLDS && l->size == SIZE && !atomic_load(&slow_is_ready)) {
        CHECK(nb_now_ns() < until, "rank %d does not do its part", SLOW);
        nb_pause();
    }
    __real_nb_fold_reduce(l, work, window);
}

static void cast_and_leave(struct test_rank *me) {
    int32_t line[WORDS];
    struct nb_segment all = {.base = line, .bytes = sizeof line};
    for (int i = 0; i < WORDS; i++) {
        line[i] = me->rank == 0 ? i : -1;
    }
    struct nb_op op = test_op("last", NB_OP_BROADCAST, &all);
    op.dtype = NB_I32;
    test_do(me, op);
    for (int i = 0; i < WORDS; i++) {
        CHECK(line[i] == i, "rank %d: [%d] is %d", me->rank, i, line[i]);
    }
}

// Rank 1 leaves in the middle of a staged operation. Rank 0 has done its own part and names rank 1 in the failure.
static void leave_inside(struct test_rank *me) {
    int64_t until = nb_now_ns() + (int64_t)TEST_LIMIT_MS * 1000000;
    float line[WORDS] = {0};
    struct nb_segment all = {.base = line, .bytes = sizeof line};
    struct nb_error err = {0};
    test_barrier(me, "both are here");
    struct nb_work *work = test_submit(me, test_op("half", NB_OP_ALLREDUCE, &all));
    if (me->rank == HOLDS) {
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
    CHECK(rc == NB_EPEER && err.peer == HOLDS && strstr(err.text, "left the job before 'half'") != NULL, "%d %s", rc,
          err.text);
}

int main(void) {
    struct test_rank like = test_on("shm");
    like.size = SIZE;
    like.run = cast_and_leave;
    int rc = test_job(&like);
    atomic_store(&holds_sits, true);
    like.size = 2;
    like.run = leave_inside;
    return rc == 0 ? test_job(&like) : rc;
}
