// Clock: CLOCK_MONOTONIC in integer nanoseconds, and a pause for spin loops.
#ifndef NB_BASE_CLOCK_H
#define NB_BASE_CLOCK_H

#include <stdint.h>
#include <time.h>

static inline int64_t nb_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

// Pauses between two polls of memory that another processor is about to change.
static inline void nb_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

#endif
