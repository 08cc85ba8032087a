// Engine over real networks: every kind of operation, on 1 to 5 ranks, in any order of submission.
#include <errno.h>
#include <stdint.h>
#include <unistd.h>

#include "sums.h"

static float sum_of_inputs(int size, size_t i) {
    return (float)reduce_inputs(NB_SUM, size, i);
}

static void check_allreduce(struct test_rank *me, size_t count, int pieces) {
    char name[NB_NAME_MAX];
    float *data = malloc((count + 1) * sizeof *data);
    struct nb_segment segments[8];
    size_t at = 0;
    for (int p = 0; p < pieces; p++) {
        size_t n = p == pieces - 1 ? count - at : count / (size_t)pieces;
        segments[p] = (struct nb_segment){.base = data + at, .bytes = n * sizeof *data};
        at += n;
    }
    const struct pattern input = pattern_of_input(NB_F32, me->rank);
    double sums[PERIOD];
    for (size_t i = 0; i < PERIOD; i++) {
        sums[i] = 2 * reduce_inputs(NB_SUM, me->size, i);
    }
    const struct pattern want = pattern_of(NB_F32, sums);
    for (int round = 0; round < 3; round++) {
        pattern_write(&input, segments, 0, count);
        snprintf(name, sizeof name, "sum.%zu.%d", count, pieces);
        struct nb_op op = {.name = name,
                           .kind = NB_OP_ALLREDUCE,
                           .dtype = NB_F32,
                           .segments = segments,
                           .segment_count = pieces,
                           .scaled = true,
                           .prescale = 1,
                           .postscale = 2};
        test_done(me, test_submit(me, op));
        at = pattern_compare(&want, segments, 0, count);
        CHECK(at == count, "rank %d of %d, %zu in %d: [%zu] is %g, not %g", me->rank, me->size, count, pieces, at,
              (double)data[at], sums[at % PERIOD]);
    }
    free(data);
}

static void allreduce_of_all_sizes(struct test_rank *me) {
    static const size_t counts[] = {0, 1, 2, 5, 1000, 4096, 65537, 300001, 2000003};
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        check_allreduce(me, counts[i], 1);
        check_allreduce(me, counts[i], 3);
    }
}

static void other_kinds(struct test_rank *me) {
    size_t n = 50021;
    size_t size = (size_t)me->size;
    int32_t *data = calloc(n * size, sizeof *data);
    struct nb_segment all = {.base = data, .bytes = n * size * sizeof *data};
    for (size_t i = 0; i < n; i++) {
        data[(size_t)me->rank * n + i] = (int32_t)((size_t)me->rank * 100000 + i);
    }
    struct nb_op op = {
        .name = "gather", .kind = NB_OP_ALLGATHER, .dtype = NB_I32, .segments = &all, .segment_count = 1};
    test_done(me, test_submit(me, op));
    for (size_t i = 0; i < n * size; i++) {
        CHECK(data[i] == (int32_t)(i / n * 100000 + i % n), "rank %d, all-gather: %d at %zu", me->rank, data[i], i);
    }
    for (int root = 0; root < me->size; root++) {
        for (size_t i = 0; i < n * size; i++) {
            data[i] = me->rank == root ? (int32_t)(i ^ (size_t)root) : -1;
        }
        op = (struct nb_op){.name = "cast",
                            .kind = NB_OP_BROADCAST,
                            .dtype = NB_I32,
                            .root = root,
                            .segments = &all,
                            .segment_count = 1};
        test_done(me, test_submit(me, op));
        for (size_t i = 0; i < n * size; i++) {
            CHECK(data[i] == (int32_t)(i ^ (size_t)root), "rank %d, broadcast: %d at %zu", me->rank, data[i], i);
        }
    }
    for (size_t i = 0; i < n * size; i++) {
        data[i] = (int32_t)i + me->rank;
    }
    op = (struct nb_op){
        .name = "scatter", .kind = NB_OP_REDUCESCATTER, .dtype = NB_I32, .segments = &all, .segment_count = 1};
    test_done(me, test_submit(me, op));
    for (size_t i = 0; i < n; i++) {
        size_t at = (size_t)me->rank * n + i;
        int32_t want = (int32_t)(at * size + size * (size - 1) / 2);
        CHECK(data[at] == want, "rank %d, reduce-scatter: element %zu is %d, not %d", me->rank, i, data[at], want);
    }
    op = (struct nb_op){.name = "barrier", .kind = NB_OP_BARRIER};
    test_done(me, test_submit(me, op));
    free(data);
}

enum { MANY = 50, MANY_COUNT = 3001 };

static void operations_in_any_order(struct test_rank *me) {
    static const char *const names[] = {"a", "b", "c", "d", "e"};
    float *data = malloc(MANY * MANY_COUNT * sizeof *data);
    struct nb_work *works[MANY];
    unsigned seed = 17u * (unsigned)(me->rank + 1);
    for (int round = 0; round < 6; round++) {
        int order[MANY];
        for (int i = 0; i < MANY; i++) {
            order[i] = i;
        }
        for (int i = MANY - 1; i > 0; i--) {
            int j = (int)(rand_r(&seed) % (unsigned)(i + 1));
            int swap = order[i];
            order[i] = order[j];
            order[j] = swap;
        }
        for (int k = 0; k < MANY; k++) {
            int which = order[k];
            float *mine = data + (size_t)which * MANY_COUNT;
            char name[32];
            snprintf(name, sizeof name, "%s.%d", names[which % 5], which);
            for (size_t i = 0; i < MANY_COUNT; i++) {
                mine[i] = input_value(me->rank, i + (size_t)which);
            }
            struct nb_segment segment = {.base = mine, .bytes = MANY_COUNT * sizeof *mine};
            struct nb_op op = {.name = name,
                               .kind = NB_OP_ALLREDUCE,
                               .dtype = NB_F32,
                               .segments = &segment,
                               .segment_count = 1,
                               .priority = which % 3};
            works[which] = test_submit(me, op);
        }
        for (int which = 0; which < MANY; which++) {
            test_done(me, works[which]);
            for (size_t i = 0; i < MANY_COUNT; i++) {
                float got = data[(size_t)which * MANY_COUNT + i];
                CHECK(got == sum_of_inputs(me->size, i + (size_t)which), "rank %d, operation %d", me->rank, which);
            }
        }
    }
    free(data);
}

static void mismatches(struct test_rank *me) {
    float data[64] = {0};
    struct nb_error err = {0};
    struct nb_segment segment = {.base = data, .bytes = me->rank == 1 ? 128 : 256};
    struct nb_op op = {
        .name = "odd", .kind = NB_OP_ALLREDUCE, .dtype = NB_F32, .segments = &segment, .segment_count = 1};
    struct nb_work *work = test_submit(me, op);
    CHECK(nb_work_wait(work, 20000, &err) == NB_EMISMATCH, "rank %d: %s", me->rank, err.text);
    CHECK(strstr(err.text, "256 bytes") != NULL && strstr(err.text, "128 bytes") != NULL, "text: %s", err.text);
    nb_work_release(work);
    check_allreduce(me, 100, 1); // the job continues
    struct nb_op twice = {.name = "twice", .kind = NB_OP_BARRIER};
    struct nb_op after = {.name = "after", .kind = NB_OP_BARRIER};
    if (me->rank == 0) { // the other ranks submit "twice" after "after" has completed
        struct nb_error dup = {0};
        struct nb_work *first = test_submit(me, twice);
        struct nb_work *second = NULL;
        CHECK(nb_submit(nb_job_world(me->job), &twice, &second, &dup) == -EEXIST, "duplicate: %s", dup.text);
        test_done(me, test_submit(me, after));
        test_done(me, first);
    } else {
        test_done(me, test_submit(me, after));
        test_done(me, test_submit(me, twice));
    }
}

static int test_network(const char *transport) {
    bool shared = strcmp(transport, "shm") == 0; // test_shm.c tests more of it
    for (int size = 1; size <= 5; size++) {
        for (int streams = 1; streams <= (shared ? 1 : 4); streams += 3) {
            struct test_rank template = test_on(transport);
            template.size = size;
            template.streams = streams;
            template.run = allreduce_of_all_sizes;
            int rc = test_job(&template);
            if (rc != 0) {
                return rc;
            }
            template.run = other_kinds;
            test_job(&template);
            template.run = operations_in_any_order;
            test_job(&template);
            template.run = mismatches;
            if (size > 1) {
                test_job(&template);
            }
            printf("%s: %d ranks, %d streams\n", transport, size, streams);
        }
    }
    return 0;
}

// Usage: test_engine shm|tcp|ofi
int main(int argc, char **argv) {
    CHECK(argc == 2, "name one network");
    return test_network(argv[1]);
}
