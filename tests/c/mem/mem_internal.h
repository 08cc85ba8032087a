// In-process network: declarations shared by mem.c (lanes) and mem_net.c (state that ranks share).
#ifndef NB_MEM_INTERNAL_H
#define NB_MEM_INTERNAL_H

#include <pthread.h>

#include "mem/mem.h"

enum {
    PIPE_MAX = 4,        // packets in flight in one direction
    PACKETS_PER_PASS = 3 // packets that one call of progress() takes from one peer
};

// A complete segment, arrival or message in flight.
struct packet {
    struct packet *next;
    int delay;
    bool is_message;
    uint64_t after; // RMA: arrivals that this message does not overtake
    struct nb_frame frame;
    size_t bytes;
    unsigned char data[];
};

struct queue {
    struct packet *head;
    struct packet *tail;
    int count;
};

// RMA: a message may overtake only arrivals that were announced after the message before it.
struct overtaking {
    uint64_t announced; // arrivals put into the queue
    uint64_t before;    // of those, announced before the last message
    uint64_t taken;     // arrivals taken from the queue
};

// One lane between two ranks; [0] is the lower rank's side. A queue is indexed by the receiving side.
struct link {
    bool is_open[2]; // the side is open. The link is up when both are
    bool stalled;
    struct queue data[2];
    struct queue messages[2]; // RMA only: on STREAM lanes, messages are in the data queue
    struct overtaking overtaking[2];
};

struct region {
    struct region *next;
    uint64_t key;
    uint64_t addr;
    char *base;
    size_t bytes;
};

struct mem_lane;

struct nb_mem_net {
    pthread_mutex_t lock;
    int size;
    int lanes;
    uint64_t seed;
    int delay_max;
    int refuse_one_in; // 0: never
    int posts_max;     // requests in flight to one peer
    bool in_pieces;
    struct mem_lane **lane; // [rank × lanes + index]
    struct link *links;     // [(index × size + lower) × size + higher]
};

// The lane's state of a request, in nb_request.lane_private.
struct posted {
    struct nb_request *next;
    size_t done;
    int delay;
    bool arrived; // RMA: written and announced, not yet completed
};
_Static_assert(sizeof(struct posted) <= sizeof((struct nb_request *)0)->lane_private, "it fits the request");

enum state { NONE, OPENING, OPEN };

struct mem_peer {
    enum state state;
    uint64_t epoch; // changes when the flow ends, so that callers detect a callback that closed it
    int delay;      // until opened, or until writable
    bool refused;
    bool held;
    struct nb_request *out;
    int out_count;
    struct packet *current; // being received
    bool placed;
    struct iovec iov[NB_LANE_IOV_MAX];
    size_t done;
    struct nb_lane_stats stats;
};

struct mem_lane {
    struct nb_lane base;
    struct nb_lane_config config;
    struct nb_mem_net *net;
    uint64_t random;
    struct region *regions; // under the net's lock, because peers look up keys
    struct mem_peer *peers;
};

static inline struct mem_lane *nb_mem_lane_of(const struct nb_lane *base) {
    return (struct mem_lane *)(uintptr_t)base; // the first member
}

static inline bool nb_mem_is_rma(const struct mem_lane *lane) {
    return lane->base.ops->kind == NB_LANE_RMA;
}

static inline uint32_t nb_mem_draw(uint64_t *state, uint32_t below) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((*state >> 33) % below);
}

static inline struct posted *posted_of(struct nb_request *request) {
    return (struct posted *)(void *)request->lane_private;
}

// mem_net.c. The caller holds the lock.
struct link *nb_mem_link(const struct nb_mem_net *net, int index, int a, int b);
struct mem_lane *nb_mem_lane(const struct nb_mem_net *net, int rank, int index);
void nb_mem_wake(const struct nb_mem_net *net, int rank, int index);
// Queues a packet to one side of the link.
void nb_mem_push(struct link *link, int side, struct packet *packet, bool is_rma);
// Removes and returns the next packet to a side that is due, or NULL.
struct packet *nb_mem_take(struct link *link, int side, bool message);
bool nb_mem_up(const struct link *link);
void nb_mem_down(struct link *link);
// Destination of this request's write; NULL: the key is unknown, or the range exceeds its memory.
char *nb_mem_remote(const struct mem_lane *lane, const struct nb_request *request);

// The caller does not hold the lock.
int nb_mem_map(struct nb_lane *base, void *memory, size_t bytes, struct nb_region *region, struct nb_error *err);
void nb_mem_unmap(struct nb_lane *base, struct nb_region *region);
// nb_lane_ops.held with a random result: all bytes must arrive whatever a lane reports here.
struct nb_held nb_mem_held(const struct nb_lane *base, int peer);
// Copy between `data` and scattered memory, from byte `skip` of it on.
void nb_mem_gather(const struct iovec *iov, size_t skip, void *data, size_t bytes);
void nb_mem_scatter(const struct iovec *iov, size_t skip, const void *data, size_t bytes);
// Finds a network by a name from nb_mem_net_name(); NULL: none.
struct nb_mem_net *nb_mem_find(const char *name);

static inline struct link *link_of(const struct mem_lane *lane, int peer) {
    return nb_mem_link(lane->net, lane->base.index, lane->config.rank, peer);
}

// This rank's side of its link to the peer.
static inline int side_of(const struct mem_lane *lane, int peer) {
    return lane->config.rank > peer;
}

#endif
