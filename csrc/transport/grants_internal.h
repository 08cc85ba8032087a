// What grants.c (receiver: credits given) and grants_use.c (sender: credits used) share. Nobody else includes this.
#ifndef NB_GRANTS_INTERNAL_H
#define NB_GRANTS_INTERNAL_H

#include <stddef.h>

#include "base/arena.h"
#include "transport/lanes_internal.h"

enum {
    STAGING_BUFFERS = 32, // of one segment each, per peer
    MAPPED_MAX = NB_REGIONS_MAX - 1,
    STAGING_REGION = 0, // in what a peer calls a region; mapped memory is 1 + its index
    REGION_BITS = 4,    // of a region in a grant: its number; above them its life, see struct mapped
    REGION_LIVES = 1 << (16 - REGION_BITS),
    GRANTS_PER_MESSAGE = 3,
    GRANTS_PER_PEER = 2 * STAGING_BUFFERS, // that there is room for from the start
    TAGS_DRAWN = 256                       // at a time: a grant needs no system call
};

struct wire_region {
    uint8_t type;
    uint8_t region;
    uint16_t lane;
    uint32_t life;
    uint64_t key;
    uint64_t addr;
};

struct wire_grant {
    uint64_t op;
    uint64_t offset;
    uint32_t first;
    uint32_t count;
    uint16_t slot;
    uint16_t region;
    uint32_t tag; // never 0. An arrival that does not bring it back is dropped
};

struct wire_grants {
    uint8_t type;
    uint8_t count;
    uint16_t zero[3];
    struct wire_grant grants[GRANTS_PER_MESSAGE];
};

// Of a message with so many grants.
#define WIRE_GRANTS_BYTES(count) (offsetof(struct wire_grants, grants) + (count) * sizeof(struct wire_grant))

_Static_assert(NB_REGIONS_MAX <= 1 << REGION_BITS, "a region's number fits");
_Static_assert(sizeof(struct wire_region) == 24, "crosses the wire");
_Static_assert(sizeof(struct wire_grants) == 104 && sizeof(struct wire_grants) <= NB_LANE_MESSAGE_MAX, "fits");

// What the peer allowed us: blocks [first, first + count) of an operation go to offset of a region.
struct grant {
    struct wire_grant wire;
    uint32_t left; // blocks not used
    struct grant *next;
};

struct buffer {
    struct nb_flow *flow; // NULL: free
    uint32_t first;
    uint32_t count;
    uint32_t left;
    uint32_t tag; // of the grant; what is given back is granted with another
};

struct rma_peer {
    struct nb_arena staging;
    struct nb_region staging_region[NB_LANES_MAX];
    struct buffer buffers[STAGING_BUFFERS];
    struct remote_region remote[NB_REGIONS_MAX][NB_LANES_MAX];
    struct grant *orphans;    // for operations that this rank has not started
    struct wire_grant *queue; // grants to be sent
    size_t queue_count;
    size_t queue_room;
    uint64_t announced[NB_REGIONS_MAX]; // bit per lane: the peer was told
};

// Memory that was mapped, and whose number may be given out again once it is not: a grant says by its life which memory
// it means, as it may arrive before the announcement on another lane does.
struct mapped {
    char *base; // NULL: its number is free
    size_t bytes;
    uint32_t life; // how often the number was given out, below REGION_LIVES
    struct nb_region region[NB_LANES_MAX];
};

struct rma {
    struct mapped mapped[MAPPED_MAX];
    int mapped_count;
    struct nb_list inbound; // flows with a slot, or waiting for one, in the order they were added
    struct nb_flow *slots[NB_SLOTS];
    struct nb_pool grants;
    size_t buffer_bytes;
    uint32_t tags[TAGS_DRAWN]; // random numbers that no grant has had
    int tags_left;
};

static inline bool nb_is_rma(const struct nb_lanes *lanes) {
    return lanes->config.ops->kind == NB_LANE_RMA;
}

// A region as a grant names it, and the two parts of it.
static inline uint16_t nb_region_name(int number, uint32_t life) {
    return (uint16_t)(life << REGION_BITS | (uint32_t)number);
}

static inline int nb_region_number(uint16_t name) {
    return name & ((1 << REGION_BITS) - 1);
}

static inline uint32_t nb_region_life(uint16_t name) {
    return (uint32_t)name >> REGION_BITS;
}

// The mapped memory a range lies in, or -1.
int nb_mapped_find(const struct nb_lanes *lanes, const void *base, size_t bytes);

#endif
