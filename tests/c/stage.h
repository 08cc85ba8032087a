// Cases of a few ranks: what they share, how one is run, what they wait for.
#ifndef NB_TESTS_STAGE_H
#define NB_TESTS_STAGE_H

#include <stdint.h>
#include <time.h>

#include "base/clock.h"
#include "job.h"

// What the ranks of one case share.
struct stage {
    pthread_barrier_t meet;
    int round;
};

enum { LARGE = 700 * 1000 };

// False: the network is not there.
static inline bool run_case_of(int size, const char *transport, void (*run)(struct test_rank *me), int round,
                               int streams, int timeout_ms) {
    struct stage stage = {.round = round};
    struct test_rank like = {.transport = transport, .streams = streams, .timeout_ms = timeout_ms, .size = size};
    like.run = run;
    like.arg = &stage;
    pthread_barrier_init(&stage.meet, NULL, (unsigned)size);
    bool there = test_job(&like) == 0;
    pthread_barrier_destroy(&stage.meet);
    return there;
}

// Three ranks over TCP.
static inline void run_case(void (*run)(struct test_rank *me), int round, int streams, int timeout_ms) {
    (void)run_case_of(3, "tcp", run, round, streams, timeout_ms);
}

// Waits until the job has logged that lanes were lost and what became of their segments.
static inline void heard_of_lanes(struct test_rank *me, int peer) {
    struct timespec pause = {.tv_nsec = 10 * 1000 * 1000};
    int64_t until = nb_now_ns() + (int64_t)TEST_LIMIT_MS * 1000000;
    char text[NB_ERROR_TEXT] = "";
    char want[64];
    snprintf(want, sizeof want, "lanes to rank %d lost", peer);
    while (strstr(text, want) == NULL) {
        CHECK(nb_now_ns() < until, "rank %d does not say that lanes to rank %d were lost: %s", me->rank, peer, text);
        if (!nb_job_notice(me->job, text, sizeof text)) {
            nanosleep(&pause, NULL);
        }
    }
    struct nb_job_info info = {0};
    nb_job_info(me->job, &info);
    CHECK(info.dropped > 0, "rank %d counts no lost lane", me->rank);
}

#endif
