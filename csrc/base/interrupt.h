// Interrupts: the caller of a blocking function can end its waits, for example after a signal.
#ifndef NB_BASE_INTERRUPT_H
#define NB_BASE_INTERRUPT_H

#include <poll.h>
#include <stdbool.h>
#include <stdint.h>

// The waiting thread calls `pending` about every 100 ms. If it returns true, the wait fails with -EINTR.
struct nb_interrupt {
    bool (*pending)(void *ctx);
    void *ctx;
    int64_t asked_ns; // time of the last call; 0: none yet
};

// True if the wait must end. Calls `pending` if its last call is at least 100 ms old. NULL: never true.
bool nb_interrupted(struct nb_interrupt *interrupt);

// poll() until deadline_ns of nb_now_ns(); a signal alone does not end it. Returns the number of ready descriptors, 0
// after the deadline, -EINTR if interrupted, or -errno.
int nb_interrupt_poll(struct pollfd *polled, nfds_t count, int64_t deadline_ns, struct nb_interrupt *interrupt);

#endif
