// Cases of a few ranks: what they share, and how one is run.
#ifndef NB_TESTS_STAGE_H
#define NB_TESTS_STAGE_H

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

#endif
