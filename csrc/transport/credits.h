// State of the credits of RMA lanes, for credits.c and tests.
#ifndef NB_CREDITS_H
#define NB_CREDITS_H

#include <stddef.h>

#include "base/arena.h"
#include "base/wire.h"
#include "transport/lanes_internal.h"

enum {
    STAGING_BUFFERS = 32, // of one segment each, per peer
    MAPPED_MAX = NB_REGIONS_MAX - 1,
    STAGING_REGION = 0, // region 0 of a peer; registered memory is 1 + its index
    REGION_BITS = 4,    // a region's number in a credit; the bits above hold its life, see struct mapped
    REGION_LIVES = 1 << (16 - REGION_BITS),
    CREDITS_PER_PEER = 2 * STAGING_BUFFERS, // reserved from the start
    TAGS_DRAWN = 256                        // at a time: a credit needs no system call
};

_Static_assert(NB_REGIONS_MAX <= 1 << REGION_BITS, "a region's number fits");

// A credit from the peer: it may receive blocks [first, first + count) of an operation at an offset of a region.
struct credit {
    struct wire_credit wire;
    uint32_t left; // blocks not used
    struct credit *next;
};

struct buffer {
    struct nb_flow *flow; // NULL: free
    uint32_t first;
    uint32_t count;
    uint32_t left;
    uint32_t tag; // of the credit; a reused buffer gets a new one
};

struct rma_peer {
    struct nb_arena staging;
    struct nb_region staging_region[NB_LANES_MAX];
    struct buffer buffers[STAGING_BUFFERS];
    struct remote_region remote[NB_REGIONS_MAX][NB_LANES_MAX];
    struct credit *orphans;    // for operations that this rank has not started
    struct wire_credit *queue; // credits to be sent
    size_t queue_count;
    size_t queue_room;
    uint64_t announced[NB_REGIONS_MAX]; // one bit per lane: announced to the peer
};

// Registered memory. Its number is reused after it is unregistered. A credit may arrive before the announcement on
// another lane; the life in the credit tells which memory it means.
struct mapped {
    char *base; // NULL: the number is free
    size_t bytes;
    uint32_t life; // how often the number was assigned, below REGION_LIVES
    struct nb_region region[NB_LANES_MAX];
};

struct rma {
    struct mapped mapped[MAPPED_MAX];
    int mapped_count;
    struct nb_list inbound; // flows with a slot or waiting for one, in the order in which they were added
    struct nb_flow *slots[NB_SLOTS];
    struct nb_pool credits;
    size_t buffer_bytes;
    uint32_t tags[TAGS_DRAWN]; // random numbers that no credit has had
    int tags_left;
};

static inline bool nb_is_rma(const struct nb_lanes *lanes) {
    return lanes->config.ops->kind == NB_LANE_RMA;
}

// A region's name in a credit, and its two parts.
static inline uint16_t nb_region_name(int number, uint32_t life) {
    return (uint16_t)(life << REGION_BITS | (uint32_t)number);
}

static inline int nb_region_number(uint16_t name) {
    return name & ((1 << REGION_BITS) - 1);
}

static inline uint32_t nb_region_life(uint16_t name) {
    return (uint32_t)name >> REGION_BITS;
}

#endif
