// Stalls: operations that only some of their ranks have submitted.
#ifndef NB_ENGINE_STALL_H
#define NB_ENGINE_STALL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "engine/communicator.h"
#include "engine/descriptor.h"

enum { NB_STALLS_KEPT = 16 };

struct nb_stalls { // the last reports, in a ring buffer. Under the job's lock
    struct wire_stall kept[NB_STALLS_KEPT];
    uint32_t count;
};

struct stalled {
    const struct op_descriptor *desc;
    const struct nb_group *group; // its communicator; NULL: all ranks
    const uint64_t *have;         // bitmap of the ranks that have submitted it
    int64_t waited_ns;
    uint32_t round;
    bool reported;
};

// Rank 0: reports the stall, or ends the job, by the configured limits. Returns true once it has been reported.
bool nb_stall_tick(struct nb_job *job, const struct stalled *stalled);
// True if the operation's own limit has passed; then writes the missing ranks to text and the first of them to *peer.
bool nb_stall_over(const struct nb_job *job, const struct stalled *stalled, int32_t *peer, char text[NB_ERROR_TEXT]);
// Handles rank 0's report of a stall.
void nb_stall_receive(struct nb_job *job, const unsigned char *body, size_t bytes);

#endif
