// One rank's end of a flow whose lanes are fuzzed: every block lands once, and none after the flow has finished. Shared
// by fuzz_lanes.c and fuzz_ofi.c.
#ifndef NB_FUZZ_SIDE_H
#define NB_FUZZ_SIDE_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "transport/lanes.h"

enum { LANES = 2, BLOCK = 32, BLOCKS = 12, STEP = 6, NO_MEMORY = 2 };

struct side {
    struct nb_flow flow;
    uint64_t map[1];
    unsigned char *memory;
    int pieces;    // of a run's memory: 1 or 2
    uint32_t seen; // bitmap of blocks that have landed
    bool finished;
};

static inline void side_check(bool holds) {
    if (!holds) {
        abort();
    }
}

static inline size_t side_bytes(const struct nb_flow *flow, uint32_t first, uint32_t count) {
    (void)flow;
    side_check((uint64_t)first + count <= BLOCKS); // the lanes check ranges before they call this
    return (size_t)count * BLOCK;
}

static inline uint32_t side_limit(const struct nb_flow *flow, uint32_t first, uint32_t count) {
    (void)flow;
    uint32_t left = STEP - first % STEP;
    return count < left ? count : left;
}

// Flow NO_MEMORY has no destination memory.
static inline int side_memory(const struct nb_flow *flow, uint32_t first, uint32_t count,
                              struct iovec iov[NB_LANE_IOV_MAX]) {
    const struct side *side = flow->owner;
    unsigned char *at = side->memory + (size_t)first * BLOCK;
    size_t bytes = (size_t)count * BLOCK;
    size_t head = side->pieces == 2 ? bytes / 2 : bytes;
    if (flow->op == NO_MEMORY) {
        return 0;
    }
    iov[0] = (struct iovec){.iov_base = at, .iov_len = head};
    iov[side->pieces - 1] = (struct iovec){.iov_base = at + bytes - head, .iov_len = head};
    return side->pieces;
}

static inline void side_consume(struct nb_flow *flow, uint32_t first, uint32_t count, const void *data, size_t bytes) {
    struct side *side = flow->owner;
    uint32_t blocks = ((1u << count) - 1) << first;
    side_check(!side->finished && first + count <= BLOCKS && (side->seen & blocks) == 0);
    side->seen |= blocks;
    if (data != NULL) {
        memcpy(side->memory + (size_t)first * BLOCK, data, bytes);
    }
}

static inline void side_finished(struct nb_flow *flow) {
    struct side *side = flow->owner;
    side_check(!side->finished);
    side->finished = true;
}

// Begins flow `op` with rank 1, on memory of BLOCKS * BLOCK bytes.
static inline void side_begin(struct side *side, struct nb_lanes *lanes, int op, enum nb_flow_dir dir,
                              unsigned char *memory, int pieces) {
    static const struct nb_flow_ops ops = {.bytes = side_bytes,
                                           .run_limit = side_limit,
                                           .memory = side_memory,
                                           .consume = side_consume,
                                           .finished = side_finished};
    side->memory = memory;
    side->pieces = pieces;
    side->flow = (struct nb_flow){.ops = &ops,
                                  .dir = dir,
                                  .peer = 1,
                                  .op = (uint64_t)op,
                                  .blocks = BLOCKS,
                                  .block_bytes = BLOCK,
                                  .map = side->map,
                                  .left = BLOCKS,
                                  .staged_only = op == NO_MEMORY,
                                  .owner = side};
    nb_list_init(&side->flow.link);
    side->map[0] = dir == NB_FLOW_OUT ? (1u << BLOCKS) - 1 : 0;
    nb_lanes_add(lanes, &side->flow, nb_now_ns());
}

static inline void side_lane_lost(void *ctx, int peer, int lane, const struct nb_error *why, int lanes_left) {
    (void)ctx;
    side_check(peer == 1 && lane < LANES && why->code < 0 && lanes_left >= 0 && lanes_left < LANES);
}

#endif
