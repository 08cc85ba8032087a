// Jobs with many communicators, and with many names of operations.
#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "engine/context.h"
#include "engine/descriptor.h"
#include "engine/negotiation.h"
#include "job.h"

enum {
    GROUPS = 64 * 1024, // that a rank may make
    MANY = 40000,       // two ranks together make more than that
    ROUNDS = 3
};

static _Atomic bool by_number; // rank 1 has submitted an operation by its number since this was cleared

void __real_nb_negotiation_flush(struct nb_job *job);
void __wrap_nb_negotiation_flush(struct nb_job *job);

void __wrap_nb_negotiation_flush(struct nb_job *job) {
    if (nb_negotiation_submitted(job).mask_words > 0) {
        atomic_store(&by_number, true);
    }
    __real_nb_negotiation_flush(job);
}

static void groups_make(struct test_rank *me, uint32_t from, int count) {
    struct nb_error err = {0};
    for (int i = 0; i < count; i++) {
        CHECK(nb_comm_make(me->job, from + (uint32_t)i, &me->rank, 1, &err) == 0, "%d: %s", i, err.text);
    }
}

// Each rank alone is in many communicators: no rank has too many, and rank 0 keeps the record of all of them.
static void many_groups_of_two_ranks(struct test_rank *me) {
    groups_make(me, 1 + (uint32_t)me->rank * MANY, MANY);
    test_barrier(me, "announced");
}

static void too_many_groups_of_a_rank(struct test_rank *me) {
    struct nb_error err = {0};
    groups_make(me, 1, GROUPS);
    int rc = nb_comm_make(me->job, 1 + GROUPS, &me->rank, 1, &err);
    CHECK(rc == -ENOSPC && strstr(err.text, "a rank can have at most 65536") != NULL, "%d, %s", rc, err.text);
    CHECK(nb_comm_find(me->job, GROUPS) != NULL && nb_comm_find(me->job, 1 + GROUPS) == NULL, "find");
    test_barrier(me, "after");
}

// Broadcasts of many names, as of parameters, leave numbers for all-reduces.
static void all_reduce_after_many_broadcasts(struct test_rank *me) {
    float data = 1;
    struct nb_segment all = {.base = &data, .bytes = sizeof data};
    for (int i = 0; i < ROUNDS * (IDS_MAX + 1); i++) {
        char name[32];
        snprintf(name, sizeof name, "parameter.%d", i / ROUNDS);
        test_do(me, test_op(name, NB_OP_BROADCAST, &all));
    }
    for (int i = 0; i < ROUNDS; i++) {
        test_barrier(me, "before");
        atomic_store(&by_number, false);
        test_do(me, test_op("gradient", NB_OP_ALLREDUCE, &all));
    }
    CHECK(me->rank == 0 || atomic_load(&by_number), "the all-reduce has no number");
}

int main(void) {
    struct test_rank template = {.size = 2, .transport = "tcp", .streams = 1, .timeout_ms = 60000};
    template.algorithm = NB_ALGORITHM_RING;
    template.shm = NB_SHM_OFF;
    template.run = all_reduce_after_many_broadcasts;
    test_job(&template);
    template.run = many_groups_of_two_ranks;
    test_job(&template);
    template.size = 1;
    template.run = too_many_groups_of_a_rank;
    test_job(&template);
    return 0;
}
