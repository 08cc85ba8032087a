// Ranks without further data join: the others' all-reduces continue with zeros for them until all ranks have joined.
// All learn which rank joined last, and continue together.
#include <errno.h>
#include <stdint.h>
#include <string.h>

#include "engine/operation.h"
#include "sums.h"

enum { SIZE = 4, EACH = 4, BYTES = 4 << 20 };

// Of rank r: EACH × (r + 1) sums, in the order that `turn` gives.
static int owed(int rank, int turn) {
    return EACH * ((rank + turn) % SIZE + 1);
}

static int join(struct test_rank *me) {
    int32_t last = -1;
    struct nb_segment all = {.base = &last, .bytes = sizeof last};
    struct nb_op op = test_op("join", NB_OP_JOIN, &all);
    op.dtype = NB_I32;
    test_do(me, op);
    return last;
}

static void sum(struct test_rank *me, int turn, int k, float *line, size_t count) {
    struct nb_segment all = {.base = line, .bytes = count * sizeof *line};
    char name[32];
    snprintf(name, sizeof name, "sum.%d", k);
    for (size_t i = 0; i < count; i++) {
        line[i] = input_value(me->rank, i);
    }
    struct nb_op op = test_op(name, NB_OP_ALLREDUCE, &all);
    op.prescale = 2;
    test_do(me, op);
    for (size_t i = 0; i < count; i++) {
        double want = 0;
        for (int r = 0; r < me->size; r++) {
            want += owed(r, turn) > k ? 2 * input_value(r, i) : 0;
        }
        CHECK((double)line[i] == want, "rank %d, turn %d, %s: [%zu] is %g, not %g", me->rank, turn, name, i,
              (double)line[i], want);
    }
}

static void uneven(struct test_rank *me) {
    static const size_t counts[] = {1, 1000, 5003, BYTES / sizeof(float) - 3};
    float *line = malloc(BYTES);
    CHECK(line != NULL, "memory");
    for (int turn = 0; turn < 2 * SIZE; turn++) { // from the third on by number
        for (int k = 0; k < owed(me->rank, turn); k++) {
            sum(me, turn, k, line, counts[k % 4]);
        }
        int last = join(me);
        CHECK(owed(last, turn) == EACH * SIZE, "turn %d: rank %d did not come last", turn, last);
        test_barrier(me, "together");
    }
    free(line);
}

// What needs data of a rank that has joined is refused; sums and barriers of the others are not, nor is what follows.
static void refused(struct test_rank *me) {
    static const enum nb_op_kind kinds[] = {NB_OP_ALLGATHER, NB_OP_BROADCAST, NB_OP_REDUCESCATTER, NB_OP_ALLTOALL};
    float line[2 * SIZE] = {0};
    struct nb_error err = {0};
    for (int k = 0; k < 4 && me->rank > 0; k++) {
        struct nb_segment all = {.base = line, .bytes = sizeof line};
        int rc = test_try(me, test_op("needs all", kinds[k], &all), &err);
        CHECK(rc == NB_EMISMATCH && strstr(err.text, "after rank 0 has joined") != NULL, "%d: %s", rc, err.text);
    }
    if (me->rank > 0) { // each under a name that the others do not use: nobody waits for these
        char name[32];
        snprintf(name, sizeof name, "needs all.%d", me->rank);
        struct nb_segment all = {.base = line, .bytes = sizeof line};
        int rc = test_try(me, test_op(name, NB_OP_ALLGATHER, &all), &err);
        CHECK(rc == NB_EMISMATCH && strstr(err.text, "after rank 0 has joined") != NULL, "%s", err.text);
        test_barrier(me, "without rank 0");
    }
    int last = join(me);
    CHECK(last > 0, "rank %d joined last", last);
    test_barrier(me, "all is well");
}

// In a comm of some ranks, too.
static void in_a_group(struct test_rank *me) {
    const int ranks[] = {0, 2};
    struct nb_error err = {0};
    if (me->rank % 2 == 0) {
        CHECK(nb_comm_make(me->job, 4, ranks, 2, &err) == 0, "%s", err.text);
    }
    test_barrier(me, "made");
    if (me->rank == 0) {
        struct test_rank member = *me;
        float line[3] = {1, 2, 3};
        struct nb_segment all = {.base = line, .bytes = sizeof line};
        member.comm = nb_comm_find(me->job, 4);
        for (int round = 0; round < 4; round++) {
            test_do(&member, test_op("of two", NB_OP_ALLREDUCE, &all));
            CHECK(line[0] == 1 && line[2] == 3, "with zeros: %g %g", (double)line[0], (double)line[2]);
        }
    }
    CHECK(join(me) != 2, "rank 2 did not come last");
}

// Rank 0 never submits an operation of this name: it only makes the stand-in for it.
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

// A rank that has joined and cannot make its stand-in fails the job on all ranks, and leaks no memory.
static void cannot_stand_in(struct test_rank *me) {
    int32_t last = -1;
    float line[SIZE] = {0};
    struct nb_segment all = {.base = me->rank == 0 ? (void *)&last : line, .bytes = me->rank == 0 ? 4 : sizeof line};
    struct nb_op op = test_op(me->rank == 0 ? "join" : too_large, me->rank == 0 ? NB_OP_JOIN : NB_OP_ALLREDUCE, &all);
    struct nb_error err = {0};
    op.dtype = me->rank == 0 ? NB_I32 : NB_F32;
    int rc = test_try(me, op, &err);
    CHECK(rc == -ENOMEM && strstr(err.text, "no memory for it") != NULL, "rank %d: %d %s", me->rank, rc, err.text);
}

static void bad(struct test_rank *me) {
    float line[3] = {0};
    struct nb_segment all = {.base = line, .bytes = sizeof line};
    struct nb_error err = {0};
    CHECK(test_try(me, test_op("join", NB_OP_JOIN, &all), &err) == -EINVAL, "%s", err.text);
    test_barrier(me, "all is well");
}

int main(int argc, char **argv) {
    static const enum nb_algorithm_id pins[] = {NB_ALGORITHM_NONE, NB_ALGORITHM_RING, NB_ALGORITHM_HALVING};
    void (*const parts[])(struct test_rank *) = {uneven, refused, in_a_group, cannot_stand_in, bad};
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
    template.run = bad;
    return test_job(&template);
}
