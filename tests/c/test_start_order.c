// Start order of operations that become ready at the same moment, when all ranks have submitted them: by priority, then
// by the order in which they became ready. All submissions of a rank reach rank 0 in one batch.
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "engine/context.h"
#include "engine/negotiation.h"
#include "job.h"

enum { OPERATIONS = 12, ORDER_RANKS = 3 };

void __real_nb_negotiation_flush(struct nb_job *job);
void __wrap_nb_negotiation_flush(struct nb_job *job);
void __real_nb_coordinator_collect(struct nb_job *job);
void __wrap_nb_coordinator_collect(struct nb_job *job);

// False while the progress pass has taken only some of this rank's operations.
static bool took_all_or_none(const struct nb_job *job) {
    size_t taken = nb_negotiation_submitted(job).fresh_count;
    return taken == 0 || taken == OPERATIONS;
}

// A rank sends its submissions only when it can send all of them.
void __wrap_nb_negotiation_flush(struct nb_job *job) {
    if (took_all_or_none(job)) {
        __real_nb_negotiation_flush(job);
    }
}

// Rank 0 collects its own submissions in the same way.
void __wrap_nb_coordinator_collect(struct nb_job *job) {
    if (took_all_or_none(job)) {
        __real_nb_coordinator_collect(job);
    }
}

// The operation that starts at position `position`.
static int expected_at(const int *priorities, int position) {
    for (int level = 3; level >= -1; level--) {
        for (int k = 0; k < OPERATIONS; k++) {
            if (priorities[k] == level && position-- == 0) {
                return k;
            }
        }
    }
    return -1;
}

static void check_start_order(struct test_rank *me) {
    static const int priorities[OPERATIONS] = {0, 0, 3, 0, 1, 0, 3, 1, 0, -1, 3, 0};
    static float data[ORDER_RANKS][OPERATIONS][4];
    struct nb_segment all[OPERATIONS];
    struct nb_work *works[OPERATIONS];
    struct nb_work_times times[OPERATIONS];
    struct nb_error err = {0};
    for (int k = 0; k < OPERATIONS; k++) {
        char name[16];
        snprintf(name, sizeof name, "op.%d", k);
        all[k] = (struct nb_segment){.base = data[me->rank][k], .bytes = sizeof data[me->rank][k]};
        struct nb_op op = test_op(name, NB_OP_ALLREDUCE, &all[k]);
        op.priority = priorities[k];
        works[k] = test_submit(me, op);
    }
    for (int k = 0; k < OPERATIONS; k++) {
        CHECK(nb_work_wait(works[k], TEST_LIMIT_MS, &err) == 0, "op.%d: %s", k, err.text);
        nb_work_times(works[k], &times[k]);
        nb_work_release(works[k]);
    }
    for (int position = 1; position < OPERATIONS; position++) {
        int before = expected_at(priorities, position - 1);
        int after = expected_at(priorities, position);
        CHECK(times[before].agreed_ns <= times[after].agreed_ns, "rank %d: op.%d started before op.%d", me->rank, after,
              before);
    }
}

int main(void) {
    struct test_rank template = {.size = ORDER_RANKS, .transport = "tcp", .streams = 1, .timeout_ms = 20000};
    template.algorithm = NB_ALGORITHM_RING;
    template.shm = NB_SHM_OFF;
    template.run = check_start_order;
    test_job(&template);
    return 0;
}
