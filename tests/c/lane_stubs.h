// Lane callbacks that accept no data, for tests that open a lane without the scheduler.
#ifndef NB_TEST_LANE_STUBS_H
#define NB_TEST_LANE_STUBS_H

#include "transport/lanes_internal.h"

static inline int stub_place(void *ctx, struct nb_lane *lane, int peer, const struct nb_frame *frame,
                             struct iovec *iov) {
    (void)ctx;
    (void)lane;
    (void)peer;
    (void)frame;
    (void)iov;
    return NB_EWIRE;
}

static inline void stub_landed(void *ctx, struct nb_lane *lane, int peer, const struct nb_frame *frame) {
    (void)ctx;
    (void)lane;
    (void)peer;
    (void)frame;
}

static inline void stub_writable(void *ctx, struct nb_lane *lane, int peer) {
    (void)ctx;
    (void)lane;
    (void)peer;
}

#endif
