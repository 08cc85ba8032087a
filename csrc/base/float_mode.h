// Float mode of a thread: how its floating-point unit rounds, and whether it flushes denormal numbers to zero. A new
// thread inherits the mode of the thread that starts it.
#ifndef NB_BASE_FLOAT_MODE_H
#define NB_BASE_FLOAT_MODE_H

#include <stdint.h>

// The control register of the calling thread: MXCSR or FPCR. 0 on other processors.
static inline uint64_t nb_float_mode(void) {
#if defined(__x86_64__)
    return __builtin_ia32_stmxcsr();
#elif defined(__aarch64__)
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
#else
    return 0;
#endif
}

// Sets the mode of the calling thread, and returns the one before.
static inline uint64_t nb_float_mode_set(uint64_t mode) {
    uint64_t before = nb_float_mode();
#if defined(__x86_64__)
    __builtin_ia32_ldmxcsr((uint32_t)mode);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(mode) : "memory");
#else
    (void)mode;
#endif
    return before;
}

#endif
