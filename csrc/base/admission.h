// Admission: one limit for all listeners of a job on accepted connections that have not authenticated yet. It holds at
// most NB_PENDING_MAX at a time. It drops each one NB_PENDING_MS after the accept, whatever the connection sends. When
// all places are taken, a new connection replaces the oldest one that is older than NB_PENDING_SAFE_MS. Until there is
// such a connection, new ones stay in the listen backlog and no listener is polled.
//
// A pure state machine: the caller owns the descriptors, and only ticks advance time. A tick counts for at most
// NB_PENDING_STEP_MS: after this thread was descheduled, the caller reads what arrived before anything is dropped. For
// one thread.
#ifndef NB_BASE_ADMISSION_H
#define NB_BASE_ADMISSION_H

#include <stdbool.h>
#include <stdint.h>

#include "base/list.h"

enum { NB_PENDING_MAX = 8, NB_PENDING_MS = 2000, NB_PENDING_SAFE_MS = 1000, NB_PENDING_STEP_MS = 250 };

// Embedded in the owner of a connection. `drop` closes it and calls nb_admission_remove(). `read` reads what has
// arrived, which may end the connection or admit it; NULL: nothing is read.
struct nb_pending {
    struct nb_list link;
    int64_t age_ns;
    void (*drop)(struct nb_pending *pending);
    void (*read)(struct nb_pending *pending);
};

// Embedded in the owner of a listener that is not polled now. `open` polls it again.
struct nb_gate {
    struct nb_list link; // initialised by its owner
    int64_t left_ns;     // until it opens; 0: it opens as soon as there is a place
    void (*open)(struct nb_gate *gate);
};

struct nb_admission {
    struct nb_list pending; // oldest first
    struct nb_list shut;    // gates, in the order in which they were shut
    int count;              // of pending
    int64_t ticked_ns;      // 0: no tick yet
};

void nb_admission_init(struct nb_admission *admission);
// True if a connection may be accepted: there is a place, or the oldest connection may be replaced.
bool nb_admission_may(const struct nb_admission *admission);
// Call after an accept. If all places are taken, reads from the oldest connection, whose proof may have arrived, and
// drops it if it is still pending.
void nb_admission_add(struct nb_admission *admission, struct nb_pending *pending);
// Call when a connection has authenticated or is closed: frees its place and opens one gate.
void nb_admission_remove(struct nb_admission *admission, struct nb_pending *pending);
// Stops polling a listener for `for_ns`; 0: until there is a place.
void nb_admission_shut(struct nb_admission *admission, struct nb_gate *gate, int64_t for_ns);
// Drops connections that are too old, and opens the gates that are due. Call it several times a second while a
// connection is pending or a gate is shut, after reading what has arrived.
void nb_admission_tick(struct nb_admission *admission, int64_t now_ns);

#endif
