// Schedules of whole steps as arithmetic: in each step a rank owes one peer a range of the line and is owed one by
// another, and a step's bytes depend on those of the steps before it. For operations that latency rules: few steps, to
// many peers. (Where bandwidth rules, sched.h cuts a ring's steps into blocks that follow each other.)
//
// Recursive doubling: the whole line is exchanged with ranks 1, 2, 4, … away. At 2 ranks: a direct exchange.
// Recursive halving and doubling: half of it, a quarter, …, then back (Rabenseifner).
// Where ranks are no power of two, the first few hand their line to a neighbour and get the result back.
// Pairwise all-to-all: the line is n parts to send and n parts to receive; in step k to rank + k, from rank - k.
#ifndef NB_COLL_STEPS_H
#define NB_COLL_STEPS_H

#include <stdbool.h>
#include <stddef.h>

#include "coll/sched.h"

enum nb_steps_kind { NB_STEPS_NONE, NB_STEPS_DOUBLING, NB_STEPS_HALVING, NB_STEPS_PAIRWISE };

enum { NB_NOBODY = -1 };

struct nb_steps {
    enum nb_steps_kind kind;
    int rank;
    int size;
    size_t bytes;
    int count;    // of steps, the same on all ranks
    int reducing; // the first steps, after which this rank's result (or its part of it) is complete
    int levels;   // of doubling
    int folded;   // ranks that hand their line to a neighbour
    int place;    // among those that go on; NB_NOBODY: this rank does not
};

struct nb_step {
    int to;   // NB_NOBODY: nothing is sent
    int from; // NB_NOBODY: nothing is received
    struct nb_range out;
    struct nb_range in;
    bool reduces; // what arrives is added, not placed
    bool lower;   // the sender's sum goes before this rank's: both come to the same bits
};

// No range cuts an element of up to 64 bytes. `bytes` of an all-to-all: 2 × size equal parts.
void nb_steps_init(struct nb_steps *steps, enum nb_steps_kind kind, int rank, int size, size_t bytes);
struct nb_step nb_steps_get(const struct nb_steps *steps, int step);
// Halving: the range that is complete on this rank after the reducing steps; empty where there is none.
struct nb_range nb_steps_own(const struct nb_steps *steps);
size_t nb_steps_bytes_out(const struct nb_steps *steps);

#endif
