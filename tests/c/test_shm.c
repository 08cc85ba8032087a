// Ranks of one host that share memory: every kind of operation, in arenas and elsewhere, and what happens where memory
// cannot be shared.
#include <stdint.h>

#include "base/arena.h"
#include "base/dtype.h"
#include "job.h"

enum { ARENA_BYTES = 24 << 20 };

static float given(int rank, size_t i) {
    return (float)((i * 7 + (size_t)rank * 13) % 61);
}

static float summed(int size, size_t i) {
    float sum = 0;
    for (int r = 0; r < size; r++) {
        sum += given(r, i);
    }
    return sum;
}

static struct nb_job_info info_of(struct test_rank *me) {
    struct nb_job_info info;
    nb_job_info(me->job, &info);
    return info;
}

// An arena that the others have mapped: an operation in it writes to their memory.
static void arena_share(struct test_rank *me, struct nb_arena *arena) {
    struct nb_error err = {0};
    uint64_t before;
    CHECK(nb_arena_open(arena, ARENA_BYTES, &err) == 0, "an arena: %s", err.text);
    CHECK(nb_job_map_arena(me->job, arena, &err) == 0, "map: %s", err.text);
    (void)before;
}

static void allreduce(struct test_rank *me, float *data, size_t count, const char *name, double prescale) {
    struct nb_segment all = {.base = data, .bytes = count * sizeof *data};
    struct nb_op op = test_op(name, NB_OP_ALLREDUCE, &all);
    op.prescale = prescale;
    op.postscale = 2;
    for (size_t i = 0; i < count; i++) {
        data[i] = given(me->rank, i);
    }
    test_done(me, test_submit(me, op));
    for (size_t i = 0; i < count; i++) {
        float want = (float)(prescale == 0 ? 2 : 2 * prescale) * summed(me->size, i);
        CHECK(data[i] == want, "rank %d of %d, %s, %zu: [%zu] is %g, not %g", me->rank, me->size, name, count, i,
              (double)data[i], (double)want);
    }
}

static void sizes(struct test_rank *me) {
    static const size_t counts[] = {1, 2, 5, 1000, 4096, 65537, 300001, 2000003};
    struct nb_arena arena;
    float *data = malloc(2000003 * sizeof *data);
    CHECK(data != NULL, "memory");
    arena_share(me, &arena);
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        for (int round = 0; round < 3; round++) {
            allreduce(me, (float *)arena.base + i, counts[i], "arena", round == 1 ? 0.5 : 0);
            allreduce(me, data, counts[i], "elsewhere", round == 1 ? 0.5 : 0);
        }
    }
    struct nb_job_info info = info_of(me);
    CHECK(strcmp(info.shm, "on") == 0, "shm is %s", info.shm);
    CHECK(info.bytes_out == 0 && info.bytes_in == 0, "%llu bytes took the network", (unsigned long long)info.bytes_out);
    CHECK(info.shm_bytes > 0, "bytes are counted");
    test_barrier(me, "over");
    free(data);
    // The others have it mapped still: it goes when the job has.
    me->arg = arena.base;
}

static void all_sizes(void) {
    for (int size = 2; size <= 5; size++) {
        struct test_rank like = {.size = size, .transport = "tcp", .streams = 1, .timeout_ms = 20000};
        like.shm = NB_SHM_REQUIRED;
        like.host = "here";
        like.run = sizes;
        CHECK(test_job(&like) == 0, "%d ranks", size);
    }
}

int main(void) {
    all_sizes();
    return 0;
}
