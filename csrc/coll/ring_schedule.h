// Schedules as arithmetic: which bytes go to which rank, in which order, and what each arrival allows to be sent.
//
// An operation's buffer is the range of bytes [0, bytes). A schedule has a number of steps. In each step a rank sends a
// range of the buffer to one neighbour and receives one from another. A range is cut into blocks: every step has
// `per_step` blocks, and block g = step × per_step + i. A step may be shorter than its blocks: those past the end have
// no bytes. When block g has landed, outgoing block nb_sched_next(g) may be sent: this forms the pipeline.
#ifndef NB_COLL_RING_SCHEDULE_H
#define NB_COLL_RING_SCHEDULE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum nb_sched_kind {
    NB_SCHED_NONE,               // no byte moves: one rank, zero bytes, a barrier
    NB_SCHED_RING_ALLREDUCE,     // reduce-scatter, then all-gather: 2(n-1) steps
    NB_SCHED_RING_ALLGATHER,     // n-1 steps
    NB_SCHED_RING_REDUCESCATTER, // n-1 steps; rank r ends with part r
    NB_SCHED_CHAIN_BROADCAST     // one step: root, root + 1, …; each rank forwards what lands
};

enum { NB_BLOCK_MIN = 16 * 1024, NB_BLOCKS_MAX = 1 << 18, NB_NO_BLOCK = UINT32_MAX };

struct nb_sched {
    enum nb_sched_kind kind;
    int rank; // in the group: a communicator, or the hosts of a two-level all-reduce
    int size;
    int root;
    size_t bytes;          // of the whole buffer
    size_t part_bytes;     // of one part of the ring (the last may be shorter); the whole buffer for a broadcast
    size_t block_bytes;    // a power of two ≥ NB_BLOCK_MIN that gives at most NB_BLOCKS_MAX blocks
    uint32_t per_step;     // blocks
    uint32_t steps_out;    // steps in which this rank sends (0 for the last rank of a chain)
    uint32_t steps_in;     // steps in which this rank receives (0 for the root)
    uint32_t reduce_steps; // the first steps: their arrivals are added, not placed
    int to;                // rank in the group
    int from;              //
};

struct nb_range {
    size_t offset;
    size_t bytes;
};

// `element_bytes` divides NB_BLOCK_MIN, so that no block cuts an element. For an all-gather and a reduce-scatter
// `bytes` is that of the whole buffer, a multiple of size × element_bytes.
void nb_sched_init(struct nb_sched *sched, enum nb_sched_kind kind, int rank, int size, int root, size_t bytes,
                   size_t element_bytes);

uint32_t nb_sched_blocks_out(const struct nb_sched *sched);
uint32_t nb_sched_blocks_in(const struct nb_sched *sched);

// Returns the range of `count` blocks from `first` on, all of one step.
struct nb_range nb_sched_out(const struct nb_sched *sched, uint32_t first, uint32_t count);
struct nb_range nb_sched_in(const struct nb_sched *sched, uint32_t first, uint32_t count);

// True for blocks that may be sent from the start.
bool nb_sched_ready(const struct nb_sched *sched, uint32_t block);
// Returns the outgoing block that an arrival allows to be sent, or NB_NO_BLOCK.
uint32_t nb_sched_next(const struct nb_sched *sched, uint32_t landed);
// True if arrivals of this block are added to the buffer; else they replace it.
bool nb_sched_reduces(const struct nb_sched *sched, uint32_t block);
// True if this arrival completes the range on this rank: it is scaled before it is sent on.
bool nb_sched_completes(const struct nb_sched *sched, uint32_t block);

// Returns the bytes that this rank sends by the schedule, to check its traffic against.
size_t nb_sched_bytes_out(const struct nb_sched *sched);

#endif
