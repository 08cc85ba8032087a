// The pull scheduler: blocks of many operations over many lanes to many peers. A pure state machine over the contract
// of transport.h: no descriptor, no clock of its own, one thread.
//
// A flow is what one operation owes one peer (out) or expects from it (in), in blocks. An out flow's blocks become
// available one by one; any lane to that peer with window takes the next run of them, so no lane waits for the
// slowest. An in flow keeps a bitmap: a block that is there already is refused before a byte of payload lands.
//
// A lane that is lost costs its bandwidth. What left on it is remembered until the peer says that the operation is
// whole; each side that loses a lane tells the other, over another one, what it still misses, and exactly that is sent
// again over the lanes that are left. So an out flow is over when its peer has all of it. A small one is over when it
// was sent: its bytes are copied as they leave.
#ifndef NB_LANES_H
#define NB_LANES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/list.h"
#include "transport/transport.h"

enum { NB_COPY_MAX = 16 * 1024 };

// Operations are numbered in two series, this the first number of the second one. Within a series flows to and from a peer
// are added in the order of their numbers; between the two there is no order.
static const uint64_t NB_OP_SECOND = (uint64_t)1 << 63;

struct nb_lanes;
struct nb_flow;
struct nb_run;
struct nb_copy;
struct grant;

// What the owner of a flow (the engine; a test) answers. A run never crosses what `run_limit` allows.
struct nb_flow_ops {
    // Payload bytes of blocks [first, first + count).
    size_t (*bytes)(const struct nb_flow *flow, uint32_t first, uint32_t count);
    // How many blocks from `first` on may travel together, at most `count`. In: the end of a step, nothing else: what
    // the sender cuts by its own memory must be accepted.
    uint32_t (*run_limit)(const struct nb_flow *flow, uint32_t first, uint32_t count);
    // Where the run lies in memory. Out: all its bytes, where they are read, perhaps again after a lane was lost: until the
    // flow is finished it may change only by what implies that the block has landed. In: where it goes; 0 pieces: the bytes are to be
    // handed to consume() from a buffer of the lanes' own.
    int (*memory)(const struct nb_flow *flow, uint32_t first, uint32_t count, struct iovec iov[NB_LANE_IOV_MAX]);
    // In: the run is there. data: the lanes' buffer, or NULL when it went to memory().
    void (*consume)(struct nb_flow *flow, uint32_t first, uint32_t count, const void *data, size_t bytes);
    // Every block is at the peer or copied, and its memory is free again (out), or is there (in). Called once.
    void (*finished)(struct nb_flow *flow);
};

enum nb_flow_dir { NB_FLOW_OUT, NB_FLOW_IN };

struct nb_flow {
    // The owner's, set before nb_lanes_add and left alone until it is finished or cancelled.
    const struct nb_flow_ops *ops;
    enum nb_flow_dir dir;
    int peer;
    uint64_t op;     // both sides of an operation use one number
    int priority;    // the higher goes first; equal: the lower op
    uint32_t blocks; // ≥ 1
    size_t block_bytes;
    uint64_t *map;    // nb_bits_words(blocks), zeroed. Out: available blocks. In: landed blocks
    bool staged_only; // in, RMA lanes: no run has memory() of its own
    // Out: runs go to what memory() gives; in, RMA: the region the final memory is mapped in, per lane, or NULL.
    void *owner;
    // Of lanes.c.
    struct nb_list link;
    uint32_t cursor;
    uint32_t left;      // out: blocks not taken; in: blocks not landed. The owner's to begin with
    uint32_t available; // out: blocks that may be sent and are not taken
    uint32_t in_flight; // out: blocks taken and not yet sent
    uint64_t bytes_moved;
    int64_t moved_ns; // when a block last moved
    int64_t first_ns; // when the first one landed
    uint64_t lane_bytes[NB_LANES_MAX];
    struct grant *grants;    // RMA, out: room that the peer has given
    struct nb_list granting; // RMA, in: in the order they were added, until all is there
    uint32_t granted;        // RMA, in: blocks before this one are granted
    int slot;                // RMA, in: -1: none yet
    uint32_t tag;            // RMA, in: of the grants of its own memory, as long as it has the slot
    uint32_t reserved;       // out: how many runs are kept for it
    struct nb_run *runs;     // out: that left, and are not known to have landed
    struct nb_copy *copy;    // out: where small ones are sent from
    bool acked;              // out: the peer has all of it
    bool listed;             // out: the peer said that it does not, in the report that is being heard
};

struct nb_lanes_config {
    const struct nb_lane_ops *ops;
    struct nb_lane_config lane;      // index, bind, up and up_ctx are filled in per lane
    int lanes;                       // opened
    const struct nb_sockaddr *binds; // the interfaces to spread the lanes over
    int bind_count;
    size_t segment_bytes; // the largest segment: NETBOTTLENECK_SEGMENT_BYTES
    size_t in_flight_max; // bytes to one peer over all lanes
    size_t copy_bytes;    // flows of up to this many are copied: at most NB_COPY_MAX, alike on all ranks
    // A lane is gone. Its segments go to the others, while another lane to that peer is left.
    void (*lane_lost)(void *ctx, int peer, int lane, const struct nb_error *why, int lanes_left);
    // A flow cannot be sent, by the fault of its owner. Nothing more of it leaves.
    void (*failed)(void *ctx, const struct nb_error *why);
    void *ctx;
};

// Opens the lanes; no peer yet.
int nb_lanes_open(struct nb_lanes **lanes, const struct nb_lanes_config *config, struct nb_error *err);
void nb_lanes_close(struct nb_lanes *lanes);

// What every other rank must know: lanes × (NB_LANE_ADDR_MAX + 8) bytes, written to and read from these.
size_t nb_lanes_address_bytes(const struct nb_lanes *lanes);
void nb_lanes_address(const struct nb_lanes *lanes, void *out);
int nb_lanes_peer_open(struct nb_lanes *lanes, int peer, const void *address, struct nb_error *err);
bool nb_lanes_peer_ready(const struct nb_lanes *lanes, int peer);
// Why peers that came could not be let in, or 0.
int nb_lanes_door(const struct nb_lanes *lanes);
// How many lanes to a peer that was opened are not lost.
int nb_lanes_left(const struct nb_lanes *lanes, int peer);

// From now on only the first `count` lanes that are not lost take new segments.
void nb_lanes_use(struct nb_lanes *lanes, int count);
int nb_lanes_used(const struct nb_lanes *lanes);

void nb_lanes_add(struct nb_lanes *lanes, struct nb_flow *flow, int64_t now_ns);
// Out: block `block` may be sent. Cheap; nb_lanes_push() once after a batch.
void nb_lanes_ready(struct nb_lanes *lanes, struct nb_flow *flow, uint32_t block);
void nb_lanes_push(struct nb_lanes *lanes, int peer, int64_t now_ns);
// Takes a flow out before it is finished. After it returns nothing touches the flow's memory. RMA lanes may have to be
// closed for that: all flows of the peer are then lost.
void nb_lanes_cancel(struct nb_lanes *lanes, struct nb_flow *flow);

// Memory that many operations will use (an arena): mapped once per lane. STREAM lanes: nothing happens. -ENOSPC: as much
// is mapped as can be; it travels through staging then, as where an error says so.
int nb_lanes_map(struct nb_lanes *lanes, void *base, size_t bytes, struct nb_error *err);
// Of which every operation is over.
void nb_lanes_unmap(struct nb_lanes *lanes, void *base);

int nb_lanes_progress(struct nb_lanes *lanes, int64_t now_ns);
int nb_lanes_arm(struct nb_lanes *lanes);
// Now and then. A connection that has not authenticated in time is dropped. A lane on which nothing moves for an eighth of
// the lanes' timeout_ms (at most 30 s of it) is asked for a sign; one that gives none for another eighth, while another lane
// to that peer does, is given up. Where all are silent the network is, and none is. A lane on which nothing moves and whose
// interface is down is given up after about a second, where another lane's is up.
void nb_lanes_tick(struct nb_lanes *lanes, int64_t now_ns);
// Before they are closed in good order: whether the peers have all that was sent. Asks those that have not said so; call
// it again after progress.
bool nb_lanes_settle(struct nb_lanes *lanes);
// To be called once that is so, before they are closed: the peers are told on every lane.
void nb_lanes_farewell(struct nb_lanes *lanes);
// A peer that left in good order had all that it needed, and says nothing any more.
void nb_lanes_forgive(struct nb_lanes *lanes, int peer);

// Connections, arrivals and messages that proved no right to be taken, and were dropped: of strangers, or late.
uint64_t nb_lanes_refused(const struct nb_lanes *lanes);
void nb_lanes_stats(const struct nb_lanes *lanes, int peer, int lane, struct nb_lane_stats *stats);
const char *nb_lanes_describe(const struct nb_lanes *lanes);

#endif
