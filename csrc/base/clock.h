// The one clock: CLOCK_MONOTONIC, in integer nanoseconds.
#ifndef NB_BASE_CLOCK_H
#define NB_BASE_CLOCK_H

#include <stdint.h>
#include <time.h>

static inline int64_t nb_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

#endif
