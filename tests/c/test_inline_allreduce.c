// Inline all-reduce: exact bits, order of additions, scale factors, scattered memory, mismatches between ranks, and no
// lane traffic. From its third round on, a name has a cached number.
#include <errno.h>
#include <stdint.h>
#include <unistd.h>

#include "engine/inline_allreduce.h"
#include "job.h"

enum { ROUNDS = 5, CACHED_FROM = 2 };

static uint64_t bytes_out(struct test_rank *me) {
    struct nb_job_info info;
    nb_job_info(me->job, &info);
    return info.bytes_out;
}

// Bytes that a rank sends: other ranks send their buffer to rank 0, which sends the result to each of them.
static uint64_t expected_bytes_out(const struct test_rank *me, size_t bytes) {
    return me->rank == 0 ? (uint64_t)(me->size - 1) * bytes : bytes;
}

static float value(int rank, size_t i) {
    return 1.0F / (float)(3 + rank + (int)(i % 97)); // the sum depends on the order of additions
}

// The sum in the order of ranks. Each rank applies prescale; postscale applies to the sum.
static float expected(const struct test_rank *me, size_t i, double prescale, double postscale) {
    float sum = (float)(value(0, i) * prescale);
    for (int r = 1; r < me->size; r++) {
        sum += (float)(value(r, i) * prescale);
    }
    return (float)(sum * postscale);
}

static void check_size(struct test_rank *me, size_t n, double prescale, double postscale) {
    char name[NB_NAME_MAX];
    float *data = malloc(n * sizeof *data);
    struct nb_segment cut[3] = {{data, (n / 3) * sizeof *data}, {NULL, 0}, {data + n / 3, (n - n / 3) * sizeof *data}};
    CHECK(data != NULL, "memory");
    snprintf(name, sizeof name, "sum.%zu.%g.%g", n, prescale, postscale);
    for (int round = 0; round < ROUNDS; round++) {
        struct nb_op op = test_op(name, NB_OP_ALLREDUCE, cut);
        op.segment_count = 3;
        op.scaled = true;
        op.prescale = prescale;
        op.postscale = postscale;
        for (size_t i = 0; i < n; i++) {
            data[i] = value(me->rank, i);
        }
        uint64_t before = bytes_out(me);
        test_do(me, op);
        uint64_t sent = bytes_out(me) - before;
        CHECK(round < CACHED_FROM || sent == expected_bytes_out(me, n * sizeof *data),
              "rank %d of %d, %s, round %d: %llu bytes were sent", me->rank, me->size, name, round,
              (unsigned long long)sent);
        for (size_t i = 0; i < n && round >= CACHED_FROM; i++) {
            float want = expected(me, i, prescale, postscale);
            CHECK(data[i] == want, "rank %d of %d, %s, round %d: [%zu] is %.9g, not %.9g", me->rank, me->size, name,
                  round, i, (double)data[i], (double)want);
        }
    }
    free(data);
}

static void check_sizes(struct test_rank *me) {
    check_size(me, 1, 1, 1);
    check_size(me, 1000, 1, 1);
    check_size(me, 1024, 0.5, 0.25);
    check_size(me, NB_INLINE_MAX / sizeof(float), 1, 3);
}

// One element more than the limit: the lanes carry it, in spite of the configured algorithm.
static void larger_than_inline(struct test_rank *me) {
    enum { N = NB_INLINE_MAX / sizeof(int32_t) + 1 };
    int32_t *data = malloc(N * sizeof *data);
    struct nb_segment all = {.base = data, .bytes = N * sizeof *data};
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < N; i++) {
            data[i] = i + me->rank;
        }
        struct nb_op op = test_op("large", NB_OP_ALLREDUCE, &all);
        op.dtype = NB_I32;
        test_do(me, op);
        for (int i = 0; i < N; i++) {
            CHECK(data[i] == me->size * i + me->size * (me->size - 1) / 2, "rank %d, round %d: [%d] is %d", me->rank,
                  round, i, data[i]);
        }
    }
    free(data);
}

// Concurrent inline all-reduces and broadcasts over lanes; each rank submits them in a different order.
static void concurrent_operations(struct test_rank *me) {
    enum { CONCURRENT = 12, N = 500 };
    static int32_t buffers[TEST_RANKS_MAX][CONCURRENT][N];
    struct nb_error err = {0};
    for (int round = 0; round < ROUNDS; round++) {
        struct nb_work *works[CONCURRENT];
        for (int i = 0; i < CONCURRENT; i++) {
            int which = (i * 5 + me->rank * 7 + round) % CONCURRENT;
            int32_t *data = buffers[me->rank][which];
            struct nb_segment all = {.base = data, .bytes = sizeof buffers[0][0]};
            char name[32];
            snprintf(name, sizeof name, "concurrent.%d", which);
            for (int k = 0; k < N; k++) {
                data[k] = k * (which + 1) + me->rank + round;
            }
            struct nb_op op = test_op(name, which % 4 == 3 ? NB_OP_BROADCAST : NB_OP_ALLREDUCE, &all);
            op.dtype = NB_I32;
            CHECK(nb_submit(nb_job_world(me->job), &op, &works[which], &err) == 0, "%s: %s", name, err.text);
        }
        for (int i = 0; i < CONCURRENT; i++) {
            CHECK(nb_work_wait(works[i], TEST_LIMIT_MS, &err) == 0, "concurrent.%d: %s", i, err.text);
            nb_work_release(works[i]);
            for (int k = 0; k < N; k++) {
                int own = k * (i + 1) + round;
                int want = i % 4 == 3 ? own : me->size * own + me->size * (me->size - 1) / 2;
                CHECK(buffers[me->rank][i][k] == want, "rank %d, round %d, concurrent.%d: [%d] is %d, not %d", me->rank,
                      round, i, k, buffers[me->rank][i][k], want);
            }
        }
    }
}

static int try_sum(struct test_rank *me, float *data, size_t n, double postscale, struct nb_error *err) {
    struct nb_segment all = {.base = data, .bytes = n * sizeof *data};
    struct nb_op op = test_op("same", NB_OP_ALLREDUCE, &all);
    op.scaled = true;
    op.prescale = 1;
    op.postscale = postscale;
    return test_try(me, op, err);
}

// One rank submits a different operation under a name with a cached number: refused on all ranks, and the job
// continues.
static void mismatch_with_cached_number(struct test_rank *me) {
    float data[64] = {0};
    struct nb_error err = {0};
    for (int round = 0; round < 3 * ROUNDS; round++) {
        bool mismatch = round >= ROUNDS && round < 2 * ROUNDS; // rounds with a mismatch
        bool differs = mismatch && me->rank == round % me->size;
        size_t n = round < 2 * ROUNDS ? 32 : 64; // at last, all ranks change the size
        for (size_t i = 0; i < n; i++) {
            data[i] = (float)(me->rank + (int)i);
        }
        int rc = try_sum(me, data, differs && round % 2 == 0 ? 16 : n, differs && round % 2 == 1 ? 2 : 1, &err);
        CHECK(rc == (mismatch ? NB_EMISMATCH : 0), "rank %d, round %d: %d %s", me->rank, round, rc, err.text);
        CHECK(!mismatch || strstr(err.text, "mismatched") != NULL, "rank %d, round %d: %s", me->rank, round, err.text);
        for (size_t i = 0; i < n; i++) { // a refused buffer is unchanged
            float want =
                mismatch ? (float)(me->rank + (int)i) : (float)(me->size * (int)i + me->size * (me->size - 1) / 2);
            CHECK(data[i] == want, "rank %d, round %d: [%zu] is %g", me->rank, round, i, (double)data[i]);
        }
    }
}

int main(void) {
    static void (*const runs[])(struct test_rank *) = {check_sizes, larger_than_inline, concurrent_operations,
                                                       mismatch_with_cached_number};
    int rc = 0;
    for (int size = 2; size <= 9 && rc == 0; size += 1 + 4 * (size == 4)) {
        for (size_t i = 0; i < sizeof runs / sizeof runs[0] && rc == 0; i++) {
            struct test_rank template = test_on("tcp");
            template.size = size;
            template.streams = 2;
            template.algorithm = NB_ALGORITHM_INLINE;
            template.run = runs[i];
            rc = test_job(&template);
        }
    }
    return rc;
}
