// Interrupts: waits in slices, and asks the caller between two slices.
#include "base/interrupt.h"

#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/clock.h"

enum { SLICE_MS = 100 };

static const int64_t MS = 1000000;

bool nb_interrupted(struct nb_interrupt *interrupt) {
    if (interrupt == NULL) {
        return false;
    }
    int64_t now = nb_now_ns();
    if (now - interrupt->asked_ns < SLICE_MS * MS) {
        return false;
    }
    interrupt->asked_ns = now;
    return interrupt->pending(interrupt->ctx);
}

int nb_interrupt_poll(struct pollfd *polled, nfds_t count, int64_t deadline_ns, struct nb_interrupt *interrupt) {
    for (;;) {
        int64_t left_ms = (deadline_ns - nb_now_ns() + MS - 1) / MS;
        int slice_ms = left_ms < SLICE_MS ? (int)(left_ms > 0 ? left_ms : 0) : SLICE_MS;
        int ready = poll(polled, count, slice_ms);
        if (ready < 0 && errno != EINTR) {
            return -errno;
        }
        if (nb_interrupted(interrupt)) {
            return -EINTR;
        }
        if (ready > 0 || (ready == 0 && left_ms <= slice_ms)) {
            return ready;
        }
    }
}
