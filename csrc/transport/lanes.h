// Pull scheduler: assigns blocks of many operations to many lanes to many peers. A pure state machine over the contract
// of transport.h: no descriptor, no clock of its own, one thread.
//
// A flow is what one operation sends to one peer (out) or expects from it (in), in blocks. An out flow's blocks become
// available one by one. Any lane to that peer with free window takes the next run of them, so no lane waits for the
// slowest. An in flow keeps a bitmap: a block that has already landed is refused before its payload lands.
//
// A lost lane costs its bandwidth. The scheduler remembers the runs that left on a lane until the peer reports the
// operation complete. A side that loses a lane tells the other, over another lane, what it still misses, and exactly
// that is sent again over the remaining lanes. So an out flow finishes when its peer has all of it. A small flow
// finishes when it is sent: its bytes are copied as they leave.
#ifndef NB_LANES_H
#define NB_LANES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/list.h"
#include "transport/transport.h"

enum { NB_COPY_MAX = 16 * 1024 };

// Operations are numbered in two series; this is the first number of the second. Within a series, flows to and from a
// peer are added in the order of their numbers; between the two series there is no order.
static const uint64_t NB_OP_SECOND = (uint64_t)1 << 63;

struct nb_lanes;
struct nb_flow;
struct nb_run;
struct nb_copy;
struct credit;

// Callbacks of a flow's owner (the engine; a test). A run never crosses a boundary given by `run_limit`.
struct nb_flow_ops {
    // Payload bytes of blocks [first, first + count).
    size_t (*bytes)(const struct nb_flow *flow, uint32_t first, uint32_t count);
    // How many blocks from `first` on may travel together, at most `count`. In: only the end of a step limits it, as
    // the receiver must accept every cut that the sender's memory causes.
    uint32_t (*run_limit)(const struct nb_flow *flow, uint32_t first, uint32_t count);
    // Where the run lies in memory. Out: all its bytes, to read them, perhaps again after a lane is lost. Until the
    // flow is finished, only a change that implies that the block has landed is allowed. In: the destination; 0 pieces:
    // the scheduler passes the bytes to consume() in a buffer of its own.
    int (*memory)(const struct nb_flow *flow, uint32_t first, uint32_t count, struct iovec iov[NB_LANE_IOV_MAX]);
    // In: the run has landed. data: the scheduler's buffer, or NULL if the run went to memory().
    void (*consume)(struct nb_flow *flow, uint32_t first, uint32_t count, const void *data, size_t bytes);
    // Out: every block is at the peer or copied, and its memory is free again. In: every block has landed. Called once.
    void (*finished)(struct nb_flow *flow);
};

enum nb_flow_dir { NB_FLOW_OUT, NB_FLOW_IN };

struct nb_flow {
    // Set by the owner before nb_lanes_add, and unchanged until the flow is finished or cancelled.
    const struct nb_flow_ops *ops;
    enum nb_flow_dir dir;
    int peer;
    uint64_t op;     // the same number on both sides of an operation
    int priority;    // higher first; equal: the lower op first
    uint32_t blocks; // ≥ 1
    size_t block_bytes;
    uint64_t *map;    // nb_bits_words(blocks), zeroed. Out: available blocks. In: landed blocks
    bool staged_only; // in, RMA lanes: memory() returns no memory for any run
    // Out: runs go to what memory() gives; in, RMA: the region the final memory is mapped in, per lane, or NULL.
    void *owner;
    // Set by the scheduler.
    struct nb_list link;
    uint32_t cursor;
    uint32_t left;      // out: blocks not taken; in: blocks not landed
    uint32_t available; // out: blocks that may be sent and are not taken
    uint32_t in_flight; // out: blocks taken and not yet sent
    uint64_t bytes_moved;
    int64_t moved_ns; // when a block last moved
    int64_t first_ns; // when the first block landed
    uint64_t lane_bytes[NB_LANES_MAX];
    struct credit *credits;  // RMA, out: credits from the peer
    struct nb_list granting; // RMA, in: in the order in which they were added, until complete
    uint32_t granted;        // RMA, in: blocks before this one are granted
    int slot;                // RMA, in: -1: none yet
    uint32_t tag;            // RMA, in: tag of the credits of its own memory, as long as it has the slot
    uint32_t reserved;       // out: number of runs reserved for it
    struct nb_run *runs;     // out: runs that left and are not known to have landed
    struct nb_copy *copy;    // out: the copy from which a small flow is sent
    bool acked;              // out: the peer has all of it
    bool listed;             // out: listed as missing in the report that is being received
};

struct nb_lanes_config {
    const struct nb_lane_ops *ops;
    struct nb_lane_config lane;      // index, bind, up and up_ctx are set per lane
    int lanes;                       // number of lanes to open
    const struct nb_sockaddr *binds; // the interfaces over which the lanes are spread
    int bind_count;
    size_t segment_bytes; // the largest segment: NETBOTTLENECK_SEGMENT_BYTES
    size_t in_flight_max; // bytes in flight to one peer over all lanes
    size_t copy_bytes;    // flows up to this size are copied: at most NB_COPY_MAX, the same on all ranks
    bool watched_later;   // RMA: opening leaves the loop alone, which another thread may use; see nb_lanes_watch()
    // A lane is lost. Its segments move to the other lanes to that peer, if any is left.
    void (*lane_lost)(void *ctx, int peer, int lane, const struct nb_error *why, int lanes_left);
    // A flow cannot be sent because of an error of its owner. The scheduler sends nothing more of it.
    void (*failed)(void *ctx, const struct nb_error *why);
    void *ctx;
};

enum { NB_LANES_AWAITED_TEXT = 192 };

// Opens the lanes, without any peer.
int nb_lanes_open(struct nb_lanes **lanes, const struct nb_lanes_config *config, struct nb_error *err);
// Lanes wake their loop from now on. Opening does that, unless they are to be watched later.
int nb_lanes_watch(struct nb_lanes *lanes, struct nb_error *err);
void nb_lanes_close(struct nb_lanes *lanes);

// The addresses for all other ranks: lanes × (NB_LANE_ADDR_MAX + 8) bytes, written and read by the functions below.
size_t nb_lanes_address_bytes(const struct nb_lanes *lanes);
void nb_lanes_address(const struct nb_lanes *lanes, void *out);
int nb_lanes_peer_open(struct nb_lanes *lanes, int peer, const void *address, struct nb_error *err);
bool nb_lanes_peer_ready(const struct nb_lanes *lanes, int peer);
// The lanes that are not connected to an opened peer, a bit for each.
uint64_t nb_lanes_peer_missing(const struct nb_lanes *lanes, int peer);
// Closes the listeners of the lanes: every peer is ready, and no other is opened later.
void nb_lanes_listen_end(struct nb_lanes *lanes);
// Which end's connect the first lane that is not connected to an opened peer waits for, as text; "" if it is not known.
void nb_lanes_peer_awaited(const struct nb_lanes *lanes, int peer, char text[NB_LANES_AWAITED_TEXT]);
// Why connecting peers could not be accepted, or 0.
int nb_lanes_accept_error(const struct nb_lanes *lanes);
// Number of lanes to an opened peer that are not lost.
int nb_lanes_left(const struct nb_lanes *lanes, int peer);

// From now on only the first `count` lanes that are not lost take new segments.
void nb_lanes_use(struct nb_lanes *lanes, int count);
int nb_lanes_used(const struct nb_lanes *lanes);

// From now on, data of an operation leave only once their receiver has added its flow. Without it, a receiver that is not
// ready for one operation reads nothing more from that lane, so an earlier operation's data may wait behind it. Every
// rank calls this before the first operation that a rank may start late. No effect on RMA lanes: they have credits.
void nb_lanes_await_starts(struct nb_lanes *lanes);

void nb_lanes_add(struct nb_lanes *lanes, struct nb_flow *flow, int64_t now_ns);
// Out: allows block `block` to be sent. Cheap; call nb_lanes_push() once after a batch.
void nb_lanes_ready(struct nb_lanes *lanes, struct nb_flow *flow, uint32_t block);
void nb_lanes_push(struct nb_lanes *lanes, int peer);
// Cancels a flow before it is finished. After it returns nothing touches the flow's memory. RMA lanes may have to be
// closed for that: then all flows of the peer are lost.
void nb_lanes_cancel(struct nb_lanes *lanes, struct nb_flow *flow);

// Registers memory that many operations will use (an arena), once per lane. No effect on STREAM lanes. -ENOSPC: too
// much is registered already. After any error the memory travels through staging.
int nb_lanes_map(struct nb_lanes *lanes, void *base, size_t bytes, struct nb_error *err);
// Unregisters memory. Every operation over it must be over.
void nb_lanes_unmap(struct nb_lanes *lanes, void *base);

int nb_lanes_progress(struct nb_lanes *lanes);
int nb_lanes_arm(struct nb_lanes *lanes);
// Checks the lanes; call it regularly. Drops connections that do not authenticate in time. If nothing moves on a lane
// for an eighth of the lanes' timeout_ms (of at most 30 s), sends the peer a ping on it. If no answer comes for
// another eighth while another lane to that peer is alive, gives the lane up. If all lanes are silent, the network is
// down, and no lane is given up. A lane on which nothing moves and whose interface is down is given up after about a
// second, if another lane's interface is up.
void nb_lanes_tick(struct nb_lanes *lanes, int64_t now_ns);
// For an orderly close: true if the peers have all that was sent. Asks those that have not confirmed it; call it again
// after progress.
bool nb_lanes_settle(struct nb_lanes *lanes);
// Tells the peers on every lane that this rank leaves. Call once nb_lanes_settle() is true, before closing.
void nb_lanes_announce_leave(struct nb_lanes *lanes);
// Marks a peer that left in good order: it has all that it needs, and sends nothing more.
void nb_lanes_peer_left(struct nb_lanes *lanes, int peer);

// Number of connections, arrivals and messages that failed authentication and were dropped: from strangers, or late.
uint64_t nb_lanes_refused(const struct nb_lanes *lanes);
void nb_lanes_stats(const struct nb_lanes *lanes, int peer, int lane, struct nb_lane_stats *stats);
const char *nb_lanes_describe(const struct nb_lanes *lanes);
// The port at which a lane accepts TCP connections; 0 if it is not known, as with libfabric.
uint16_t nb_lanes_port(const struct nb_lanes *lanes, int lane);

#endif
