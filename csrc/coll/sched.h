// Schedules as arithmetic: which bytes travel to whom, in what order, and what each arrival makes possible.
//
// An operation's bytes form one line [0, bytes). A schedule is a number of steps; in each step a rank owes one
// neighbour a range of the line and is owed one by another. A range is cut into blocks, so every step has `per_step`
// blocks, and block g = step × per_step + i. A step may be shorter than its blocks: those past the end have no bytes.
// Landing of block g makes outgoing block nb_sched_next(g) possible: that is the whole of the pipeline.
#ifndef NB_COLL_SCHED_H
#define NB_COLL_SCHED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum nb_sched_kind {
    NB_SCHED_NONE,               // no byte moves: one rank, zero bytes, a barrier
    NB_SCHED_RING_ALLREDUCE,     // reduce-scatter, then all-gather, 2(n-1) steps
    NB_SCHED_RING_ALLGATHER,     // n-1 steps
    NB_SCHED_RING_REDUCESCATTER, // n-1 steps; rank r ends with part r
    NB_SCHED_CHAIN_BROADCAST     // one step: root, root + 1, …, each passes on what lands
};

enum { NB_BLOCK_MIN = 16 * 1024, NB_BLOCKS_MAX = 1 << 18, NB_NO_BLOCK = UINT32_MAX };

struct nb_sched {
    enum nb_sched_kind kind;
    int rank; // in the group
    int size;
    int root;
    size_t bytes;          // of the whole line
    size_t part_bytes;     // of one part of the ring (the last may be shorter); the whole line for a broadcast
    size_t block_bytes;    // a power of two, ≥ NB_BLOCK_MIN, so that there are at most NB_BLOCKS_MAX blocks
    uint32_t per_step;     // blocks
    uint32_t steps_out;    // this rank sends (0 for the last rank of a chain)
    uint32_t steps_in;     // this rank receives (0 for the root)
    uint32_t reduce_steps; // the first steps whose arrivals are added, not placed
    int to;                // rank in the group
    int from;              //
};

struct nb_range {
    size_t offset;
    size_t bytes;
};

// `element_bytes`: no block cuts an element (it divides NB_BLOCK_MIN). For an all-gather and a reduce-scatter `bytes`
// is that of the whole line, a multiple of size × element_bytes.
void nb_sched_init(struct nb_sched *sched, enum nb_sched_kind kind, int rank, int size, int root, size_t bytes,
                   size_t element_bytes);

uint32_t nb_sched_blocks_out(const struct nb_sched *sched);
uint32_t nb_sched_blocks_in(const struct nb_sched *sched);

// Where `count` blocks from `first` on lie; they are of one step.
struct nb_range nb_sched_out(const struct nb_sched *sched, uint32_t first, uint32_t count);
struct nb_range nb_sched_in(const struct nb_sched *sched, uint32_t first, uint32_t count);

// True for blocks that may be sent at once.
bool nb_sched_ready(const struct nb_sched *sched, uint32_t block);
// The outgoing block that an arrival makes possible, or NB_NO_BLOCK.
uint32_t nb_sched_next(const struct nb_sched *sched, uint32_t landed);
// Arrivals of this block are added to what is there; else they replace it.
bool nb_sched_reduces(const struct nb_sched *sched, uint32_t block);
// After this arrival the range is complete on this rank and is scaled before it travels on.
bool nb_sched_completes(const struct nb_sched *sched, uint32_t block);

// Bytes this rank sends by the schedule: what its traffic is checked against.
size_t nb_sched_bytes_out(const struct nb_sched *sched);

#endif
