// An operation that one rank does not submit: the other ranks report which rank is missing, and the job continues
// once it submits. With a limit, the job ends on every rank, or only the operation fails.
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "job.h"

enum { SIZE = 3, LATE = 1 };

static pthread_barrier_t *meeting(struct test_rank *me) {
    return me->arg;
}

static void heard_of_late(struct test_rank *me) {
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
    CHECK(count == 1 && ranks[0] == LATE, "rank %d: %d ranks, %d first", me->rank, count, ranks[0]);
    CHECK(nb_comm_missing(nb_job_world(me->job), "another", ranks) == 0, "rank %d: of another", me->rank);
}

static void check_notice(struct test_rank *me) {
    struct nb_work *work = NULL;
    if (me->rank != LATE) {
        work = test_submit(me, test_op("x", NB_OP_BARRIER, NULL));
    }
    heard_of_late(me);
    (void)pthread_barrier_wait(meeting(me));
    if (me->rank == LATE) {
        work = test_submit(me, test_op("x", NB_OP_BARRIER, NULL));
    }
    test_done(me, work);
    test_barrier(me, "y");
}

static void ended(struct test_rank *me) {
    struct nb_error err = {0};
    if (me->rank == LATE) {
        (void)pthread_barrier_wait(meeting(me)); // by now the others have failed
    }
    int rc = test_try(me, test_op("x", NB_OP_BARRIER, NULL), &err);
    CHECK(rc == NB_ETIMEOUT && err.peer == LATE, "rank %d: %d, peer %d: %s", me->rank, rc, err.peer, err.text);
    CHECK(strstr(err.text, "'x'") != NULL && strstr(err.text, "not submitted it: 1") != NULL &&
              strstr(err.text, "NETBOTTLENECK_STALL_END_S") != NULL,
          "rank %d: %s", me->rank, err.text);
    if (me->rank != LATE) {
        (void)pthread_barrier_wait(meeting(me));
    }
}

// One that may not wait for long fails where it was submitted, and later where it comes late; nothing else does.
static void limited(struct test_rank *me) {
    struct nb_error err = {0};
    struct nb_op op = test_op("z", NB_OP_BARRIER, NULL);
    op.limit_ms = 60;
    if (me->rank == LATE) {
        (void)pthread_barrier_wait(meeting(me));
    }
    int rc = test_try(me, op, &err);
    int other = me->rank == LATE ? 0 : LATE;
    CHECK(rc == NB_ETIMEOUT && err.peer == other, "rank %d: %d, peer %d: %s", me->rank, rc, err.peer, err.text);
    const char *missing = me->rank == LATE ? "not submitted it: 0 2" : "not submitted it: 1";
    CHECK(strstr(err.text, "'z'") != NULL && strstr(err.text, missing) != NULL, "rank %d: %s", me->rank, err.text);
    if (me->rank != LATE) {
        (void)pthread_barrier_wait(meeting(me));
    }
    test_barrier(me, "y");
    op.limit_ms = TEST_LIMIT_MS;
    CHECK(test_try(me, op, &err) == 0, "rank %d: again: %s", me->rank, err.text);
}

static void run(void (*what)(struct test_rank *me), int stall_ms, int stall_end_ms) {
    pthread_barrier_t meet;
    struct test_rank template = test_on("tcp");
    template.size = SIZE;
    template.stall_ms = stall_ms;
    template.stall_end_ms = stall_end_ms;
    template.arg = &meet;
    template.run = what;
    CHECK(pthread_barrier_init(&meet, NULL, SIZE) == 0, "barrier");
    CHECK(test_job(&template) == 0, "tcp is not there");
    (void)pthread_barrier_destroy(&meet);
}

int main(void) {
    run(check_notice, 50, 0);
    run(check_notice, 50, TEST_LIMIT_MS);
    run(limited, 0, 0);
    run(limited, 50, TEST_LIMIT_MS);
    run(ended, 0, 50);
    run(ended, 50, 200);
    return 0;
}
