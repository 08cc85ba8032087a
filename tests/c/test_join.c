// Join: ranks without further data join, and the others' all-reduces use zeros for them until all ranks have joined.
// All ranks get the rank that joined last, and continue together.
#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "engine/context.h"
#include "engine/coordinator.h"
#include "engine/negotiation.h"
#include "engine/operation.h"
#include "sums.h"

enum { SIZE = 4, EACH = 4, BYTES = 4 << 20 };

// Number of all-reduces of a rank before it joins: a multiple of EACH, rotated between ranks by `round`.
static int sums_before_join(int rank, int round) {
    return EACH * ((rank + round) % SIZE + 1);
}

static struct nb_work *join_submit(struct test_rank *me, int32_t *last) {
    struct nb_segment all = {.base = last, .bytes = sizeof *last};
    struct nb_op op = test_op("join", NB_OP_JOIN, &all);
    op.dtype = NB_I32;
    return test_submit(me, op);
}

static int join(struct test_rank *me) {
    int32_t last = -1;
    test_done(me, join_submit(me, &last));
    return last;
}

static struct nb_work *sum_submit(struct test_rank *me, const char *name, float *data, size_t count) {
    struct nb_segment all = {.base = data, .bytes = count * sizeof *data};
    struct pattern input = pattern_of_input(NB_F32, me->rank);
    pattern_write(&input, &all, 0, count);
    struct nb_op op = test_op(name, NB_OP_ALLREDUCE, &all);
    op.scaled = true;
    op.prescale = 2;
    op.postscale = 1;
    op.priority = -1;
    return test_submit(me, op);
}

// `ranks`: those that contribute, one bit each; the others contribute zeros.
static void sum_finish(struct test_rank *me, struct nb_work *work, float *data, size_t count, unsigned ranks) {
    struct nb_segment all = {.base = data, .bytes = count * sizeof *data};
    test_done(me, work);
    double values[PERIOD] = {0};
    for (int r = 0; r < me->size; r++) {
        for (size_t i = 0; i < PERIOD && (ranks >> r & 1) != 0; i++) {
            values[i] += 2 * input_value(r, i);
        }
    }
    struct pattern want = pattern_of(NB_F32, values);
    size_t at = pattern_compare(&want, &all, 0, count);
    CHECK(at == count, "rank %d, sum of ranks %x: [%zu] is %g, not %g", me->rank, ranks, at, (double)data[at],
          values[at % PERIOD]);
}

static void sum(struct test_rank *me, int round, int k, float *data, size_t count) {
    char name[32];
    unsigned ranks = 0;
    snprintf(name, sizeof name, "sum.%d", k);
    for (int r = 0; r < me->size; r++) {
        ranks |= (unsigned)(sums_before_join(r, round) > k) << r;
    }
    sum_finish(me, sum_submit(me, name, data, count), data, count, ranks);
}

static void ranks_join_in_turn(struct test_rank *me) {
    static const size_t counts[] = {1, 1000, 5003, BYTES / sizeof(float) - 3};
    float *data = malloc(BYTES);
    CHECK(data != NULL, "memory");
    for (int round = 0; round < 2 * SIZE; round++) { // from the third round on, names have cached numbers
        for (int k = 0; k < sums_before_join(me->rank, round); k++) {
            sum(me, round, k, data, counts[k % 4]);
        }
        int last = join(me);
        CHECK(sums_before_join(last, round) == EACH * SIZE, "round %d: rank %d cannot have joined last", round, last);
        test_barrier(me, "together");
    }
    free(data);
}

// The rank whose submissions leave in one batch, once it joins.
static _Atomic int batched_rank = -1;

static bool batch_is_complete(const struct nb_job *job) {
    struct nb_submitted submitted = nb_negotiation_submitted(job);
    bool complete = atomic_load(&batched_rank) != job->rank;
    for (size_t i = 0; i < submitted.fresh_count; i++) {
        complete = complete || submitted.fresh[i].kind == NB_OP_JOIN;
    }
    return complete;
}

void __real_nb_negotiation_flush(struct nb_job *job);
void __wrap_nb_negotiation_flush(struct nb_job *job);
void __real_nb_coordinator_collect(struct nb_job *job);
void __wrap_nb_coordinator_collect(struct nb_job *job);

void __wrap_nb_negotiation_flush(struct nb_job *job) {
    if (batch_is_complete(job)) {
        __real_nb_negotiation_flush(job);
    }
}

void __wrap_nb_coordinator_collect(struct nb_job *job) {
    if (batch_is_complete(job)) {
        __real_nb_coordinator_collect(job);
    }
}

enum { OWN_COUNT = 5003, CACHED_ROUNDS = 3 };
enum join_order { JOINS_FIRST, JOINS_FIRST_ALONE, JOINS_LAST, JOIN_ORDERS };

// Submits an all-reduce and joins, in one batch.
static void sum_and_join(struct test_rank *me, const char *name, float *data, unsigned ranks) {
    int32_t last = -1;
    atomic_store(&batched_rank, me->rank);
    struct nb_work *own = sum_submit(me, name, data, OWN_COUNT);
    struct nb_work *joins = join_submit(me, &last);
    sum_finish(me, own, data, OWN_COUNT, ranks);
    test_done(me, joins);
    atomic_store(&batched_rank, -1);
}

static void join_in_order(struct test_rank *me, const char *name, int joiner, enum join_order order, float *data) {
    unsigned everyone = (1U << me->size) - 1;
    bool shared = order == JOINS_FIRST;
    struct nb_work *work = shared && me->rank != joiner ? sum_submit(me, name, data, OWN_COUNT) : NULL;
    if (shared || (me->rank == joiner) == (order == JOINS_LAST)) {
        test_barrier(me, "in order"); // it ends when the other ranks have submitted the sum, or have joined
    }
    if (me->rank == joiner) {
        sum_and_join(me, name, data, shared ? everyone : 1U << joiner);
    } else {
        if (work != NULL) {
            sum_finish(me, work, data, OWN_COUNT, everyone);
        }
        (void)join(me);
    }
    test_barrier(me, "together");
}

// Each rank joins while its own all-reduce is outstanding, under a cached and under a new name: the all-reduce comes
// first. It joins before the others, who submit the all-reduce or do not, or after them.
static void join_behind_own_operation(struct test_rank *me) {
    float data[OWN_COUNT];
    for (int k = 0; k < CACHED_ROUNDS; k++) {
        sum_finish(me, sum_submit(me, "cached", data, OWN_COUNT), data, OWN_COUNT, (1U << me->size) - 1);
    }
    for (int joiner = 0; joiner < me->size; joiner++) {
        for (int order = 0; order < JOIN_ORDERS; order++) {
            char name[32];
            snprintf(name, sizeof name, "new.%d.%d", joiner, order);
            join_in_order(me, "cached", joiner, (enum join_order)order, data);
            join_in_order(me, name, joiner, (enum join_order)order, data);
        }
    }
}

// Operations that need data of a joined rank are refused. Barriers of the other ranks and later operations succeed.
static void operations_that_need_all_ranks(struct test_rank *me) {
    static const enum nb_op_kind kinds[] = {NB_OP_ALLGATHER, NB_OP_BROADCAST, NB_OP_REDUCESCATTER, NB_OP_ALLTOALL};
    float data[2 * SIZE] = {0};
    struct nb_error err = {0};
    for (int k = 0; k < 4 && me->rank > 0; k++) {
        struct nb_segment all = {.base = data, .bytes = sizeof data};
        int rc = test_try(me, test_op("needs all", kinds[k], &all), &err);
        CHECK(rc == NB_EMISMATCH && strstr(err.text, "after rank 0 has joined") != NULL, "%d: %s", rc, err.text);
    }
    if (me->rank > 0) { // under a name of this rank only: it is refused without other submissions
        char name[32];
        snprintf(name, sizeof name, "needs all.%d", me->rank);
        struct nb_segment all = {.base = data, .bytes = sizeof data};
        int rc = test_try(me, test_op(name, NB_OP_ALLGATHER, &all), &err);
        CHECK(rc == NB_EMISMATCH && strstr(err.text, "after rank 0 has joined") != NULL, "%s", err.text);
        test_barrier(me, "without rank 0");
    }
    int last = join(me);
    CHECK(last > 0, "rank %d joined last", last);
    test_barrier(me, "after");
}

// A rank joins: all-reduces in a communicator with it use zeros.
static void communicator_with_joined_rank(struct test_rank *me) {
    const int ranks[] = {0, 2};
    struct nb_error err = {0};
    if (me->rank % 2 == 0) {
        CHECK(nb_comm_make(me->job, 4, ranks, 2, &err) == 0, "%s", err.text);
    }
    test_barrier(me, "made");
    if (me->rank == 0) {
        struct test_rank member = *me;
        float data[3] = {1, 2, 3};
        struct nb_segment all = {.base = data, .bytes = sizeof data};
        member.comm = nb_comm_find(me->job, 4);
        for (int round = 0; round < 4; round++) {
            test_do(&member, test_op("of two", NB_OP_ALLREDUCE, &all));
            CHECK(data[0] == 1 && data[2] == 3, "wrong sum with zeros: %g %g", (double)data[0], (double)data[2]);
        }
    }
    CHECK(join(me) != 2, "rank 2 cannot have joined last");
}

// Rank 0 does not submit this operation: its engine submits it with zeros after rank 0 has joined.
static const char too_large[] = "too large";

int __real_nb_work_make(struct nb_comm *comm, const struct nb_op *op, const struct nb_algorithm *algorithm,
                        struct nb_work **out, struct nb_error *err);
int __wrap_nb_work_make(struct nb_comm *comm, const struct nb_op *op, const struct nb_algorithm *algorithm,
                        struct nb_work **out, struct nb_error *err);
int __wrap_nb_work_make(struct nb_comm *comm, const struct nb_op *op, const struct nb_algorithm *algorithm,
                        struct nb_work **out, struct nb_error *err) {
    if (nb_comm_rank(comm) == 0 && strcmp(op->name, too_large) == 0) {
        return nb_fail(err, -ENOMEM, "%s: no memory for it", op->name);
    }
    return __real_nb_work_make(comm, op, algorithm, out, err);
}

// If the engine of a joined rank cannot submit the operation with zeros, the job fails on all ranks and no memory
// leaks.
static void contribution_fails(struct test_rank *me) {
    int32_t last = -1;
    float data[SIZE] = {0};
    struct nb_segment all = {.base = me->rank == 0 ? (void *)&last : data, .bytes = me->rank == 0 ? 4 : sizeof data};
    struct nb_op op = test_op(me->rank == 0 ? "join" : too_large, me->rank == 0 ? NB_OP_JOIN : NB_OP_ALLREDUCE, &all);
    struct nb_error err = {0};
    op.dtype = me->rank == 0 ? NB_I32 : NB_F32;
    int rc = test_try(me, op, &err);
    CHECK(rc == -ENOMEM && strstr(err.text, "no memory for it") != NULL, "rank %d: %d %s", me->rank, rc, err.text);
}

static void invalid_join(struct test_rank *me) {
    float data[3] = {0};
    struct nb_segment all = {.base = data, .bytes = sizeof data};
    struct nb_error err = {0};
    CHECK(test_try(me, test_op("join", NB_OP_JOIN, &all), &err) == -EINVAL, "%s", err.text);
    test_barrier(me, "after");
}

int main(int argc, char **argv) {
    static const enum nb_algorithm_id pins[] = {NB_ALGORITHM_NONE, NB_ALGORITHM_RING, NB_ALGORITHM_HALVING};
    void (*const parts[])(struct test_rank *) = {ranks_join_in_turn,
                                                 join_behind_own_operation,
                                                 operations_that_need_all_ranks,
                                                 communicator_with_joined_rank,
                                                 contribution_fails,
                                                 invalid_join};
    struct test_rank template = test_on(argc > 1 ? argv[1] : "tcp");
    template.size = SIZE;
    for (size_t i = 0; i < sizeof pins / sizeof pins[0]; i++) {
        for (size_t p = 0; p < sizeof parts / sizeof parts[0]; p++) {
            template.algorithm = pins[i];
            template.run = parts[p];
            int rc = test_job(&template);
            if (rc != 0) {
                return rc;
            }
        }
    }
    template.size = 1;
    template.run = invalid_join;
    return test_job(&template);
}
