// Arenas that are mapped and unmapped within one job: every rank unmaps them, and their numbers are reused. If more
// arenas are in use than can be shared, one notice reports it.
#include <time.h>

#include "base/clock.h"
#include "sums.h"
#include "transport/shm.h"

enum {
    ROUNDS = 3 * NB_SHM_ARENAS,
    BYTES = 1 << 16,
    MANY = NB_SHM_ARENAS + 3 // more than any network can map
};

struct test_arena {
    struct nb_arena arena;
    _Atomic int gone;
};

static void gone(void *ctx) {
    struct test_arena *at = ctx;
    nb_arena_close(&at->arena);
    atomic_fetch_add(&at->gone, 1);
}

static void arena_map(struct test_rank *me, struct test_arena *at) {
    struct nb_error err = {0};
    at->gone = 0;
    CHECK(nb_arena_open(&at->arena, BYTES, &err) == 0, "open arena: %s", err.text);
    CHECK(nb_job_map_arena(me->job, &at->arena, &err) == 0, "map: %s", err.text);
}

static void arena_unmap(struct test_rank *me, struct test_arena *at) {
    struct nb_error err = {0};
    CHECK(nb_job_unmap(me->job, at->arena.base, gone, at, &err) == 0, "unmap: %s", err.text);
}

static void await_gone(struct test_arena *at) {
    struct timespec pause = {.tv_nsec = 1000 * 1000};
    int64_t until = nb_now_ns() + (int64_t)TEST_LIMIT_MS * 1000000;
    while (at->gone == 0) {
        CHECK(nb_now_ns() < until, "gone() was not called");
        nanosleep(&pause, NULL);
    }
    CHECK(at->gone == 1, "gone() was called %d times", at->gone);
}

static void sum_in(struct test_rank *me, struct test_arena *at) {
    const struct nb_op op = {.name = "sum", .kind = NB_OP_ALLREDUCE, .dtype = NB_U8};
    check_operation(me, op, at->arena.base, KINDS_COUNT, contiguous);
}

static void check_no_notice(struct test_rank *me) {
    char text[NB_ERROR_TEXT] = "";
    CHECK(!nb_job_notice(me->job, text, sizeof text), "rank %d: unexpected notice: %s", me->rank, text);
}

// Arenas in sequence, many more than can be mapped at a time.
static void arenas_in_sequence(struct test_rank *me) {
    struct test_arena at;
    bool shared = strcmp(job_info(me).shm, "on") == 0;
    for (int i = 0; i < ROUNDS; i++) {
        arena_map(me, &at);
        test_barrier(me, "mapped");
        test_barrier(me, "known");
        uint64_t staged = job_info(me).shm_staged_bytes;
        sum_in(me, &at);
        CHECK(!shared || job_info(me).shm_staged_bytes == staged, "rank %d: arena %d is not mapped by all ranks",
              me->rank, i);
        arena_unmap(me, &at);
        await_gone(&at);
    }
    check_no_notice(me);
    test_barrier(me, "finished");
}

// Too many arenas at a time: all results are right, and one notice reports that some are copied. After they are
// unmapped, others can be mapped.
static void too_many_arenas(struct test_rank *me) {
    static struct test_arena all[TEST_RANKS_MAX][MANY];
    struct test_arena *mine = all[me->rank];
    char text[NB_ERROR_TEXT] = "";
    bool streams = strcmp(job_info(me).shm, "on") != 0 && strcmp(me->transport, "tcp") == 0; // TCP maps nothing
    for (int i = 0; i < MANY; i++) {
        arena_map(me, &mine[i]);
    }
    test_barrier(me, "mapped");
    test_barrier(me, "known");
    for (int i = 0; i < MANY; i++) {
        sum_in(me, &mine[i]);
    }
    bool noticed = nb_job_notice(me->job, text, sizeof text);
    CHECK(noticed != streams && (streams || strstr(text, "further models are copied") != NULL), "rank %d: notice: %s",
          me->rank, text);
    check_no_notice(me);
    for (int i = 0; i < MANY; i++) {
        arena_unmap(me, &mine[i]);
    }
    for (int i = 0; i < MANY; i++) {
        await_gone(&mine[i]);
    }
    arenas_in_sequence(me);
}

// Closing the job completes an unmapping.
static void close_after_unmap(struct test_rank *me) {
    static struct test_arena at[TEST_RANKS_MAX];
    arena_map(me, &at[me->rank]);
    test_barrier(me, "mapped");
    arena_unmap(me, &at[me->rank]);
    nb_job_close(me->job);
    me->job = NULL;
    CHECK(at[me->rank].gone == 1, "gone() was called %d times", at[me->rank].gone);
}

// Usage: test_arena_mapping shm|tcp|ofi
int main(int argc, char **argv) {
    CHECK(argc == 2, "name one network");
    int rc = 0;
    for (int size = 2; size <= 3 && rc == 0; size++) {
        struct test_rank template = test_on(argv[1]);
        template.size = size;
        template.run = size == 2 ? too_many_arenas : arenas_in_sequence;
        rc = test_job(&template);
        template.run = close_after_unmap;
        rc = rc == 0 ? test_job(&template) : rc;
    }
    return rc;
}
