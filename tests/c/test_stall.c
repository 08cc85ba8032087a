// Stall: one rank does not submit an operation. The other ranks report the missing rank, and the job continues once it
// submits. With a limit, the job ends on every rank, or only the operation fails.
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "engine/context.h"
#include "engine/joined_ranks.h"
#include "engine/stall.h"
#include "job.h"

enum { SIZE = 3, MANY = 256, LATE = 1, PUNCTUAL = (1 << SIZE) - 1 - (1 << LATE) };

bool __real_nb_stall_tick(struct nb_job *job, const struct stalled *stalled);
bool __wrap_nb_stall_tick(struct nb_job *job, const struct stalled *stalled);
bool __real_nb_stall_over(const struct nb_job *job, const struct stalled *stalled, int32_t *peer, char *text);
bool __wrap_nb_stall_over(const struct nb_job *job, const struct stalled *stalled, int32_t *peer, char *text);

// False while one of the punctual ranks has submitted the operation and the other has not.
static bool is_settled(const struct stalled *stalled) {
    uint64_t have = stalled->have[0] & PUNCTUAL;
    return have == 0 || have == PUNCTUAL;
}

// However late a punctual rank is, its operation stalls for the late rank alone.
bool __wrap_nb_stall_tick(struct nb_job *job, const struct stalled *stalled) {
    return is_settled(stalled) ? __real_nb_stall_tick(job, stalled) : stalled->reported;
}

bool __wrap_nb_stall_over(const struct nb_job *job, const struct stalled *stalled, int32_t *peer, char *text) {
    return is_settled(stalled) && __real_nb_stall_over(job, stalled, peer, text);
}

static pthread_barrier_t *barrier_of(struct test_rank *me) {
    return me->arg;
}

static void await_notice(struct test_rank *me) {
    struct timespec pause = {.tv_nsec = 1000 * 1000};
    int64_t until = nb_now_ns() + (int64_t)TEST_LIMIT_MS * 1000000;
    char text[NB_ERROR_TEXT] = "";
    while (!nb_job_notice(me->job, text, sizeof text)) {
        CHECK(nb_now_ns() < until, "rank %d does not report the stall", me->rank);
        nanosleep(&pause, NULL);
    }
    CHECK(strstr(text, "'x'") != NULL && strstr(text, "not submitted it: 1") != NULL, "rank %d: %s", me->rank, text);
    int32_t ranks[NB_MISSING_MAX] = {0};
    int count = nb_comm_missing(nb_job_world(me->job), "x", ranks);
    CHECK(count == 1 && ranks[0] == LATE, "rank %d: %d ranks are missing, first rank %d", me->rank, count, ranks[0]);
    CHECK(nb_comm_missing(nb_job_world(me->job), "another", ranks) == 0,
          "rank %d: ranks are missing for an unknown operation", me->rank);
}

static void stall_is_reported(struct test_rank *me) {
    struct nb_work *work = NULL;
    if (me->rank != LATE) {
        work = test_submit(me, test_op("x", NB_OP_BARRIER, NULL));
    }
    await_notice(me);
    (void)pthread_barrier_wait(barrier_of(me));
    if (me->rank == LATE) {
        work = test_submit(me, test_op("x", NB_OP_BARRIER, NULL));
    }
    test_done(me, work);
    test_barrier(me, "y");
}

static void job_ends_at_the_limit(struct test_rank *me) {
    struct nb_error err = {0};
    if (me->rank == LATE) {
        (void)pthread_barrier_wait(barrier_of(me)); // the other ranks have failed by now
    }
    int rc = test_try(me, test_op("x", NB_OP_BARRIER, NULL), &err);
    CHECK(rc == NB_ETIMEOUT && err.peer == LATE, "rank %d: %d, peer %d: %s", me->rank, rc, err.peer, err.text);
    CHECK(strstr(err.text, "'x'") != NULL && strstr(err.text, "not submitted it: 1") != NULL &&
              strstr(err.text, "NETBOTTLENECK_STALL_END_S") != NULL,
          "rank %d: %s", me->rank, err.text);
    if (me->rank != LATE) {
        (void)pthread_barrier_wait(barrier_of(me));
    }
}

// An operation with its own limit fails on the ranks that submitted it in time, and later on the late rank. The job
// continues.
static void operation_fails_at_its_limit(struct test_rank *me) {
    struct nb_error err = {0};
    struct nb_op op = test_op("z", NB_OP_BARRIER, NULL);
    op.limit_ms = 60;
    if (me->rank == LATE) {
        (void)pthread_barrier_wait(barrier_of(me));
    }
    int rc = test_try(me, op, &err);
    int other = me->rank == LATE ? 0 : LATE;
    CHECK(rc == NB_ETIMEOUT && err.peer == other, "rank %d: %d, peer %d: %s", me->rank, rc, err.peer, err.text);
    const char *missing = me->rank == LATE ? "not submitted it: 0 2" : "not submitted it: 1";
    CHECK(strstr(err.text, "'z'") != NULL && strstr(err.text, missing) != NULL, "rank %d: %s", me->rank, err.text);
    if (me->rank != LATE) {
        (void)pthread_barrier_wait(barrier_of(me));
    }
    test_barrier(me, "y");
    op.limit_ms = TEST_LIMIT_MS;
    CHECK(test_try(me, op, &err) == 0, "rank %d: again: %s", me->rank, err.text);
}

// A text has no room for all missing ranks of a large job: it says how many there are.
static void many_missing_ranks_are_counted(void) {
    struct nb_job *job = calloc(1, sizeof *job);
    struct nb_error err = {0};
    struct op_descriptor desc = {.name = "x", .limit_ms = 1};
    uint64_t have[MANY / 64] = {1};
    struct stalled stalled = {.desc = &desc, .have = have, .waited_ns = (int64_t)2000 * 1000000};
    char text[NB_ERROR_TEXT] = "";
    int32_t peer = NB_NO_PEER;
    CHECK(job != NULL, "memory");
    job->size = MANY;
    CHECK(nb_join_open(job, &err) == 0, "%s", err.text);
    CHECK(__real_nb_stall_over(job, &stalled, &peer, text) && peer == 1, "peer %d", peer);
    CHECK(strstr(text, "not submitted it: 1 2 3 ") != NULL, "%s", text);
    CHECK(strcmp(text + strlen(text) - strlen(" … (255 of 256)"), " … (255 of 256)") == 0, "%s", text);
    have[0] = ~(uint64_t)2;
    have[1] = have[2] = have[3] = ~(uint64_t)0;
    CHECK(__real_nb_stall_over(job, &stalled, &peer, text) && strstr(text, "it: 1") != NULL, "%s", text);
    CHECK(strstr(text, "256") == NULL, "one rank needs no number: %s", text);
    nb_join_close(job);
    free(job);
}

// Many stalls may be reported between two reads: those for which there is no room are counted.
static void notices_without_room_are_counted(void) {
    struct nb_job *job = calloc(1, sizeof *job);
    char text[NB_ERROR_TEXT] = "";
    CHECK(job != NULL && pthread_mutex_init(&job->lock, NULL) == 0, "memory");
    for (int i = 0; i < NB_NOTICES_MAX + 3; i++) {
        nb_job_notify(job, "a stall");
    }
    for (int i = 0; i < NB_NOTICES_MAX; i++) {
        CHECK(nb_job_notice(job, text, sizeof text) && strcmp(text, "a stall") == 0, "notice %d: %s", i, text);
    }
    CHECK(nb_job_notice(job, text, sizeof text), "the dropped notices are not counted");
    CHECK(strcmp(text, "notices dropped for lack of room: 3") == 0, "%s", text);
    CHECK(!nb_job_notice(job, text, sizeof text), "another notice: %s", text);
    (void)pthread_mutex_destroy(&job->lock);
    free(job);
}

static void run(void (*what)(struct test_rank *me), int stall_ms, int stall_end_ms) {
    pthread_barrier_t barrier;
    struct test_rank template = test_on("tcp");
    template.size = SIZE;
    template.stall_ms = stall_ms;
    template.stall_end_ms = stall_end_ms;
    template.arg = &barrier;
    template.run = what;
    CHECK(pthread_barrier_init(&barrier, NULL, SIZE) == 0, "barrier");
    CHECK(test_job(&template) == 0, "tcp is not available");
    (void)pthread_barrier_destroy(&barrier);
}

int main(void) {
    many_missing_ranks_are_counted();
    notices_without_room_are_counted();
    run(stall_is_reported, 50, 0);
    run(stall_is_reported, 50, TEST_LIMIT_MS);
    run(operation_fails_at_its_limit, 0, 0);
    run(operation_fails_at_its_limit, 50, TEST_LIMIT_MS);
    run(job_ends_at_the_limit, 0, 50);
    run(job_ends_at_the_limit, 50, 200);
    return 0;
}
