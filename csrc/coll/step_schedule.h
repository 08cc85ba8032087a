// Schedules of whole steps as arithmetic: in each step a rank sends a range of the buffer to one peer and receives one
// from another. The bytes of a step depend on all earlier steps. For latency-bound operations: few steps, many peers.
// (For bandwidth-bound ones, ring_schedule.h cuts the steps of a ring into pipelined blocks.)
//
// Recursive doubling: exchanges the whole buffer with ranks 1, 2, 4, … away. At 2 ranks: a direct exchange.
// Recursive halving and doubling: exchanges half of it, a quarter, …, then back (Rabenseifner).
// If the number of ranks is not a power of two, the first few hand their buffer to a neighbour and get the result back.
// Pairwise all-to-all: the buffer is n parts to send, then n to receive; step k is to rank + k and from rank - k.
#ifndef NB_COLL_STEP_SCHEDULE_H
#define NB_COLL_STEP_SCHEDULE_H

#include <stdbool.h>
#include <stddef.h>

#include "coll/ring_schedule.h"

enum nb_steps_kind { NB_STEPS_NONE, NB_STEPS_DOUBLING, NB_STEPS_HALVING, NB_STEPS_PAIRWISE };

enum { NB_NO_RANK = -1 };

struct nb_steps {
    enum nb_steps_kind kind;
    int rank;
    int size;
    size_t bytes;
    int count;    // number of steps, the same on all ranks
    int reducing; // number of first steps after which this rank's result (or its part of it) is complete
    int levels;   // number of doublings
    int folded;   // number of ranks that hand their buffer to a neighbour
    int place;    // index among the ranks that take part in the exchanges; NB_NO_RANK: this rank does not
};

struct nb_step {
    int to;   // NB_NO_RANK: nothing is sent
    int from; // NB_NO_RANK: nothing is received
    struct nb_range out;
    struct nb_range in;
    bool reduces; // arrivals are added, not placed
    bool lower;   // the sender's sum comes first in the addition, so that both ranks get the same bits
};

// No range cuts an element of up to 64 bytes. `bytes` of an all-to-all: 2 × size equal parts.
void nb_steps_init(struct nb_steps *steps, enum nb_steps_kind kind, int rank, int size, size_t bytes);
struct nb_step nb_steps_get(const struct nb_steps *steps, int step);
// Halving: returns the range that is complete on this rank after the reducing steps; empty if there is none.
struct nb_range nb_steps_own(const struct nb_steps *steps);
size_t nb_steps_bytes_out(const struct nb_steps *steps);

#endif
