// A rank that has finished may leave while others are still at what they have from it: their operation ends well all the same.
//
// Three ranks share memory. Rank 2 moves only where time passes (nb_local_tick), and rank 1 holds the last part back until
// rank 2 has done its own: so ranks 0 and 1 are over, and rank 0 has left, before rank 2 takes what lies ready for it.
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

#include "base/clock.h"
#include "engine/internal.h"
#include "engine/local.h"
#include "engine/local_share.h"
#include "job.h"

enum { SIZE = 3, HOLDS = 1, SLOW = 2, WORDS = 1000 };

static _Atomic bool slow_is_ready; // rank 2 has done its part, and stands outside of the operation

bool __real_nb_local_progress(struct nb_job *job);
bool __wrap_nb_local_progress(struct nb_job *job);
bool __real_nb_local_arm(struct nb_job *job);
bool __wrap_nb_local_arm(struct nb_job *job);
void __real_nb_local_tick(struct nb_job *job, int64_t now);
void __wrap_nb_local_tick(struct nb_job *job, int64_t now);
void __real_nb_share_reduce(struct local *l, struct nb_work *work, uint64_t window);
void __wrap_nb_share_reduce(struct local *l, struct nb_work *work, uint64_t window);

bool __wrap_nb_local_progress(struct nb_job *job) {
    return job->rank != SLOW && __real_nb_local_progress(job);
}

bool __wrap_nb_local_arm(struct nb_job *job) {
    return job->rank == SLOW || __real_nb_local_arm(job);
}

void __wrap_nb_local_tick(struct nb_job *job, int64_t now) {
    __real_nb_local_tick(job, now);
    if (job->rank == SLOW && atomic_load(&nb_local_area(job->local, SLOW)->reduced) > 0) {
        atomic_store(&slow_is_ready, true);
    }
}

void __wrap_nb_share_reduce(struct local *l, struct nb_work *work, uint64_t window) {
    int64_t until = nb_now_ns() + (int64_t)TEST_LIMIT_MS * 1000000;
    while (l->rank == HOLDS && !atomic_load(&slow_is_ready)) {
        CHECK(nb_now_ns() < until, "rank %d does not do its part", SLOW);
        nb_pause();
    }
    __real_nb_share_reduce(l, work, window);
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

int main(void) {
    struct test_rank like = test_on("shm");
    like.size = SIZE;
    like.run = cast_and_leave;
    return test_job(&like);
}
