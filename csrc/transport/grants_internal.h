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
    GRANTS_PER_MESSAGE = 3,
    GRANTS_PER_PEER = 2 * STAGING_BUFFERS, // that there is room for from the start
    TAGS_DRAWN = 256                       // at a time: a grant needs no system call
};

struct wire_region {
    uint8_t type;
    uint8_t region;
    uint16_t lane;
    uint32_t zero;
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

struct mapped {
    char *base;
    size_t bytes;
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

// The mapped memory a range lies in, or -1.
int nb_mapped_find(const struct nb_lanes *lanes, const void *base, size_t bytes);

#endif
