// Inline all-reduces: exact bits, order of additions, scale factors, scattered memory, mismatches between ranks, and
// no lane traffic. From its third round on, a name has a cached number.
#include <errno.h>
#include <stdint.h>
#include <unistd.h>

#include "engine/inline_allreduce.h"
#include "job.h"

enum { ROUNDS = 5, FROM = 2 };

static uint64_t bytes_out(struct test_rank *me) {
    struct nb_job_info info;
    nb_job_info(me->job, &info);
    return info.bytes_out;
}

// What a rank of a star sends of a line.
static uint64_t owed(const struct test_rank *me, size_t bytes) {
    return me->rank == 0 ? (uint64_t)(me->size - 1) * bytes : bytes;
}

static float value(int rank, size_t i) {
    return 1.0F / (float)(3 + rank + (int)(i % 97)); // sums depend on their order
}

// The sum in the order of ranks, with the scale factors where a rank applies them.
static float expected(const struct test_rank *me, size_t i, double prescale, double postscale) {
    float sum = (float)(value(0, i) * prescale);
    for (int r = 1; r < me->size; r++) {
        sum += (float)(value(r, i) * prescale);
    }
    return (float)(sum * postscale);
}

static void one_size(struct test_rank *me, size_t n, double prescale, double postscale) {
    char name[NB_NAME_MAX];
    float *line = malloc(n * sizeof *line);
    struct nb_segment cut[3] = {{line, (n / 3) * sizeof *line}, {NULL, 0}, {line + n / 3, (n - n / 3) * sizeof *line}};
    CHECK(line != NULL, "memory");
    snprintf(name, sizeof name, "sum.%zu.%g.%g", n, prescale, postscale);
    for (int round = 0; round < ROUNDS; round++) {
        struct nb_op op = test_op(name, NB_OP_ALLREDUCE, cut);
        op.segment_count = 3;
        op.prescale = prescale;
        op.postscale = postscale;
        for (size_t i = 0; i < n; i++) {
            line[i] = value(me->rank, i);
        }
        uint64_t before = bytes_out(me);
        test_do(me, op);
        uint64_t sent = bytes_out(me) - before;
        CHECK(round < FROM || sent == owed(me, n * sizeof *line), "rank %d of %d, %s, round %d: %llu bytes", me->rank,
              me->size, name, round, (unsigned long long)sent);
        for (size_t i = 0; i < n && round >= FROM; i++) {
            float want = expected(me, i, prescale, postscale);
            CHECK(line[i] == want, "rank %d of %d, %s, round %d: [%zu] is %.9g, not %.9g", me->rank, me->size, name,
                  round, i, (double)line[i], (double)want);
        }
    }
    free(line);
}

static void sizes(struct test_rank *me) {
    one_size(me, 1, 1, 1);
    one_size(me, 1000, 1, 1);
    one_size(me, 1024, 0.5, 0.25);
    one_size(me, NB_INLINE_MAX / sizeof(float), 1, 3);
}

// One element too many: it takes lanes, whoever asks.
static void too_large(struct test_rank *me) {
    enum { N = NB_INLINE_MAX / sizeof(int32_t) + 1 };
    int32_t *line = malloc(N * sizeof *line);
    struct nb_segment all = {.base = line, .bytes = N * sizeof *line};
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < N; i++) {
            line[i] = i + me->rank;
        }
        struct nb_op op = test_op("large", NB_OP_ALLREDUCE, &all);
        op.dtype = NB_I32;
        test_do(me, op);
        for (int i = 0; i < N; i++) {
            CHECK(line[i] == me->size * i + me->size * (me->size - 1) / 2, "rank %d, round %d: [%d] is %d", me->rank,
                  round, i, line[i]);
        }
    }
    free(line);
}

// Several under way at once, submitted in another order by each rank, between others that take lanes.
static void crowd(struct test_rank *me) {
    enum { CROWD = 12, N = 500 };
    static int32_t lines[TEST_RANKS_MAX][CROWD][N];
    struct nb_error err = {0};
    for (int round = 0; round < ROUNDS; round++) {
        struct nb_work *works[CROWD];
        for (int i = 0; i < CROWD; i++) {
            int which = (i * 5 + me->rank * 7 + round) % CROWD;
            int32_t *line = lines[me->rank][which];
            struct nb_segment all = {.base = line, .bytes = sizeof lines[0][0]};
            char name[32];
            snprintf(name, sizeof name, "crowd.%d", which);
            for (int k = 0; k < N; k++) {
                line[k] = k * (which + 1) + me->rank + round;
            }
            struct nb_op op = test_op(name, which % 4 == 3 ? NB_OP_BROADCAST : NB_OP_ALLREDUCE, &all);
            op.dtype = NB_I32;
            CHECK(nb_submit(nb_job_world(me->job), &op, &works[which], &err) == 0, "%s: %s", name, err.text);
        }
        for (int i = 0; i < CROWD; i++) {
            CHECK(nb_work_wait(works[i], TEST_LIMIT_MS, &err) == 0, "crowd.%d: %s", i, err.text);
            nb_work_release(works[i]);
            for (int k = 0; k < N; k++) {
                int own = k * (i + 1) + round;
                int want = i % 4 == 3 ? own : me->size * own + me->size * (me->size - 1) / 2;
                CHECK(lines[me->rank][i][k] == want, "rank %d, round %d, crowd.%d: [%d] is %d, not %d", me->rank, round,
                      i, k, lines[me->rank][i][k], want);
            }
        }
    }
}

static int try_sum(struct test_rank *me, float *line, size_t n, double postscale, struct nb_error *err) {
    struct nb_segment all = {.base = line, .bytes = n * sizeof *line};
    struct nb_op op = test_op("same", NB_OP_ALLREDUCE, &all);
    op.postscale = postscale;
    return test_try(me, op, err);
}

// A rank that submits something else under a name that has a number: refused everywhere, and the job goes on.
static void disagree(struct test_rank *me) {
    float line[64] = {0};
    struct nb_error err = {0};
    for (int round = 0; round < 3 * ROUNDS; round++) {
        bool odd = round >= ROUNDS && round < 2 * ROUNDS; // a round of which one rank has another idea
        bool other = odd && me->rank == round % me->size;
        size_t n = round < 2 * ROUNDS ? 32 : 64; // in the end all change their minds
        for (size_t i = 0; i < n; i++) {
            line[i] = (float)(me->rank + (int)i);
        }
        int rc = try_sum(me, line, other && round % 2 == 0 ? 16 : n, other && round % 2 == 1 ? 2 : 1, &err);
        CHECK(rc == (odd ? NB_EMISMATCH : 0), "rank %d, round %d: %d %s", me->rank, round, rc, err.text);
        CHECK(!odd || strstr(err.text, "mismatched") != NULL, "rank %d, round %d: %s", me->rank, round, err.text);
        for (size_t i = 0; i < n; i++) { // a line that was refused is as it was
            float want = odd ? (float)(me->rank + (int)i) : (float)(me->size * (int)i + me->size * (me->size - 1) / 2);
            CHECK(line[i] == want, "rank %d, round %d: [%zu] is %g", me->rank, round, i, (double)line[i]);
        }
    }
}

int main(void) {
    static void (*const runs[])(struct test_rank *) = {sizes, too_large, crowd, disagree};
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
