// Test cases of a few ranks: shared state, a runner, and a wait for the notice of lost lanes.
#ifndef NB_TESTS_STAGE_H
#define NB_TESTS_STAGE_H

#include <stdint.h>
#include <time.h>

#include "base/clock.h"
#include "job.h"

// State that the ranks of one case share.
struct stage {
    pthread_barrier_t barrier;
    int round;
};

enum { LARGE = 700 * 1000 };

// Runs a case on `size` ranks. False: the network is not available.
static inline bool run_case_of(int size, const char *transport, void (*run)(struct test_rank *me), int round,
                               int streams, int timeout_ms) {
    struct stage stage = {.round = round};
    struct test_rank template = {.transport = transport, .streams = streams, .timeout_ms = timeout_ms, .size = size};
    template.run = run;
    template.arg = &stage;
    pthread_barrier_init(&stage.barrier, NULL, (unsigned)size);
    bool available = test_job(&template) == 0;
    pthread_barrier_destroy(&stage.barrier);
    return available;
}

// Runs a case on three ranks over TCP.
static inline void run_case(void (*run)(struct test_rank *me), int round, int streams, int timeout_ms) {
    (void)run_case_of(3, "tcp", run, round, streams, timeout_ms);
}

// Waits for the notice that lanes to the peer were lost and that their segments moved to other lanes.
static inline void await_lane_notice(struct test_rank *me, int peer) {
    struct timespec pause = {.tv_nsec = 10 * 1000 * 1000};
    int64_t until = nb_now_ns() + (int64_t)TEST_LIMIT_MS * 1000000;
    char text[NB_ERROR_TEXT] = "";
    char want[64];
    snprintf(want, sizeof want, "lanes to rank %d lost", peer);
    while (strstr(text, want) == NULL) {
        CHECK(nb_now_ns() < until, "rank %d has no notice of lost lanes to rank %d: %s", me->rank, peer, text);
        if (!nb_job_notice(me->job, text, sizeof text)) {
            nanosleep(&pause, NULL);
        }
    }
    struct nb_job_info info = {0};
    nb_job_info(me->job, &info);
    CHECK(info.dropped > 0, "rank %d: the count of lost lanes is 0", me->rank);
}

#endif
