// Accepted connections that have not authenticated yet: one limit for all listeners of a job. At most NB_PENDING_MAX are held at a
// time, and each is dropped NB_PENDING_MS after it was accepted, whatever it sends. Where all places are taken, a new
// connection replaces the oldest one that is older than NB_PENDING_SAFE_MS. Until there is one, connections stay in the
// listen backlog, and no listener is polled.
//
// A pure state machine: descriptors are the caller's, and time passes by its ticks alone. A tick counts for at most
// NB_PENDING_STEP_MS: where this thread was descheduled, what came meanwhile is read before anything is dropped. One thread.
#ifndef NB_BASE_ADMISSION_H
#define NB_BASE_ADMISSION_H

#include <stdbool.h>
#include <stdint.h>

#include "base/list.h"

enum { NB_PENDING_MAX = 8, NB_PENDING_MS = 2000, NB_PENDING_SAFE_MS = 1000, NB_PENDING_STEP_MS = 250 };

// Embedded in what stands for a connection. `drop` closes it and calls nb_admission_remove().
struct nb_pending {
    struct nb_list link;
    int64_t age_ns;
    void (*drop)(struct nb_pending *pending);
};

// Embedded in what stands for a listener that is not polled now. `open` polls it again.
struct nb_gate {
    struct nb_list link; // initialised by its owner
    int64_t left_ns;     // until it is opened; 0: as soon as there is a place
    void (*open)(struct nb_gate *gate);
};

struct nb_admission {
    struct nb_list pending; // oldest first
    struct nb_list shut;    // gates, in the order in which they were shut
    int count;              // of pending
    int64_t ticked_ns;      // 0: not yet
};

void nb_admission_init(struct nb_admission *admission);
// Whether a connection may be accepted: there is a place, or the oldest connection may be replaced.
bool nb_admission_may(const struct nb_admission *admission);
// After a connection was accepted. Drops the oldest one where all places are taken.
void nb_admission_add(struct nb_admission *admission, struct nb_pending *pending);
// A connection has authenticated or is closed: its place is free, and one gate is opened for it.
void nb_admission_remove(struct nb_admission *admission, struct nb_pending *pending);
// A listener is not polled any more for so long; 0: until there is a place.
void nb_admission_shut(struct nb_admission *admission, struct nb_gate *gate, int64_t for_ns);
// Several times a second where a connection is pending or a gate is shut, after what has come was read: drops what is too
// old, and opens the gates whose time has come.
void nb_admission_tick(struct nb_admission *admission, int64_t now_ns);

#endif
