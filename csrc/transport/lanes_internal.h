// Scheduler internals: its state, and the functions that its files share. Each file calls only those before it in
// this list: flows.c, usable_lanes.c, lane_rate.c, credits.c, retransmit.c, failover.c, lanes.c, lanes_open.c. No other
// file includes this header.
#ifndef NB_LANES_INTERNAL_H
#define NB_LANES_INTERNAL_H

#include "base/admission.h"
#include "base/pool.h"
#include "base/wire.h"
#include "transport/lanes.h"

enum {
    NB_SCRATCH_SLACK = 64 * 1024, // a segment consists of whole blocks, which may exceed segment_bytes
    NB_ASSIGNMENTS_PER_PATH = 64,
    NB_SLOTS = 64,       // in flows that RMA arrivals can name
    NB_REGIONS_MAX = 16, // known regions of one peer
    NB_COPY_BLOCKS = 256,
    NB_COPIES_MAX = 64
};

// Buffer size for one segment, in whole pages.
#define NB_SCRATCH_BYTES(segment_bytes) (((segment_bytes) + NB_SCRATCH_SLACK + 4095) / 4096 * 4096)

// A segment that is assigned to a lane: the lane's request, and the scheduler's own data.
struct assignment {
    struct nb_request request;
    struct nb_flow *flow; // NULL: cancelled meanwhile
    struct assignment *next;
    uint64_t remote_offset; // RMA: offset of the request's remote_addr in its region, the same on every lane
    uint16_t remote_region;
};

// One lane to one peer.
struct path {
    bool open;
    bool refused; // post returned -EAGAIN; writable() will follow
    bool held;    // the lane stopped reading at a segment of an unknown operation
    bool pulling; // prevents recursion through sent()
    bool placing_scratch;
    bool pong_due;          // the peer sent a ping: answer it
    bool ping_due;          // send a ping again: the lane did not accept it
    int pings;              // since data moved; each is asked for later than the one before
    int64_t pinged_ns;      // time of the last ping
    int64_t moved_ns;       // last time that something arrived or left
    int64_t ping_ns;        // since when the lane is suspected: the time of a ping without an answer; 0: it is not
    int64_t other_moved_ns; // since when another lane is known to be alive after ping_ns
    uint32_t writes_out;    // RMA: writes to the peer that are complete here
    uint32_t writes_in;     // RMA: writes of the peer that have landed
    uint32_t writes_owed;   // RMA: the peer's count in its last pong; all have landed by the next one
    size_t in_flight;       // in bytes
    struct lane_rate {
        int64_t since_ns;    // last time that a request finished, or the end of a pause since
        int64_t sent_ns;     // last time that a request finished
        int64_t begun_ns;    // end of the last pause
        size_t since_pause;  // bytes that finished since then
        double bytes;        // bytes that had to wait
        double ns;           // their time
        double bytes_per_ns; // 0: unknown
        size_t held;         // bytes sent that the lane still held at the last query, plus those sent since
        int64_t held_ns;     // time of the last query
        double reached;      // a rate that the lane has reached, perhaps only for a moment; 0: none
        struct backlog {
            size_t bytes; // that the lane held at since_ns
            size_t left;  // bytes that have left it since
            int64_t since_ns;
            int stays;           // looks in a row that found bytes of the one before
            double stay_bytes;   // bytes that left in their time
            double stay_ns;      // their time
            double bytes_per_ns; // 0: unknown
            size_t gone_bytes;   // of the backlogs that were gone at the next look, since one was not
        } backlog;
    } rate;
    struct assignment *assignments;
    struct assignment *idle;
    struct nb_flow *placing; // STREAM: the flow of the segment that is being read
    struct nb_frame placing_frame;
    void *scratch;
};

// A memory region of the peer, as one lane accesses it.
struct remote_region {
    uint64_t key;
    uint64_t addr;
    uint32_t life; // generation of the region's number, counted by its owner
    bool known;
};

// A run that left on a lane and is not known to have landed.
struct nb_run {
    struct nb_run *next;
    uint64_t offset; // RMA: destination in the region
    uint32_t block;
    uint32_t tag; // RMA: of the credit
    uint16_t blocks;
    uint16_t lane;
    uint16_t slot;
    uint16_t region;
};

// The copy from which a small flow is sent. After the caller's flow is over, it takes the flow's place.
struct nb_copy {
    struct nb_flow flow;
    uint64_t map[NB_COPY_BLOCKS / 64];
    uint64_t taken[NB_COPY_BLOCKS / 64]; // blocks that were copied
    uint16_t start[NB_COPY_BLOCKS + 1];
    bool waits; // it is in the peer's `kept` list
    struct nb_copy *next;
    unsigned char data[]; // the lanes' copy_bytes
};

_Static_assert(NB_COPY_MAX <= UINT16_MAX, "start[] holds it");

static inline size_t nb_iov_bytes(const struct iovec *iov, int count) {
    size_t bytes = 0;
    for (int i = 0; i < count; i++) {
        bytes += iov[i].iov_len;
    }
    return bytes;
}

static inline int nb_series(uint64_t op) {
    return op >= NB_OP_SECOND;
}

static inline void nb_floor_raise(uint64_t floors[NB_SERIES], uint64_t op) {
    uint64_t *at = &floors[nb_series(op)];
    *at = op > *at ? op : *at;
}

enum nb_report { NB_REPORT_NONE, NB_REPORT_DUE, NB_REPORT_BEGUN };

struct peer {
    struct nb_list out;
    struct nb_list in;
    struct nb_list kept;           // copies that only wait for the peer's confirmation
    uint64_t in_floor[NB_SERIES];  // highest operation expected so far: an earlier one that is not in the list is over
    uint64_t out_floor[NB_SERIES]; // highest operation sent so far
    uint64_t started[NB_SERIES];   // highest operation that the peer expects, by its last NB_MESSAGE_STARTED
    bool started_due;              // this rank's must be sent again: the lane did not accept it, or is lost
    struct path *paths;            // by lane; NULL: not opened
    int next_lane;
    int reach;            // open lanes before this one take new segments
    struct rma_peer *rma; // NULL on STREAM lanes
    // retransmit.c, failover.c
    uint64_t *done; // operations that have landed completely and are not reported yet
    size_t done_count;
    size_t done_room;
    bool left; // it leaves or has left in good order: its lanes end, and it needs nothing more
    bool done_urgent;
    bool done_request_due;
    bool done_requested;
    uint64_t lost;         // lost lanes, a bit each
    uint64_t lost_there;   // lanes lost at the peer, by the report that is being received
    bool receiving_report; // the end of that report has not arrived
    enum nb_report report;
    uint64_t report_floor[NB_SERIES]; // in_floor at the begin of the report
    uint64_t report_op;               // next operation to report
    uint32_t report_block;
    int64_t busy_ns; // since when there are flows; 0: there are none
};

// The interface that a lane is bound to.
struct lane_interface {
    char name[IF_NAMESIZE]; // "": unknown
    int64_t down_ns;        // since when it is known to be down; 0: it is up
    int64_t queried_ns;     // time of the last query
};

struct nb_lanes {
    struct nb_lanes_config config;
    struct lane_interface interfaces[NB_LANES_MAX]; // by lane
    struct nb_lane *lane[NB_LANES_MAX];
    struct nb_admission admission;
    int used;
    bool awaits_starts;
    size_t window_bytes; // of one path
    struct peer *peers;
    struct rma *rma;
    struct nb_pool runs;
    size_t runs_reserved;   // for flows without a copy
    uint32_t copied_blocks; // of the longest flow with a copy
    char *copies;           // NB_COPIES_MAX, each not touched before its first use
    int copies_used;        // number used so far
    struct nb_copy *copies_idle;
};

// flows.c

// Finds a flow that is not over, or NULL.
struct nb_flow *nb_flow_find(struct nb_lanes *lanes, int peer, enum nb_flow_dir dir, uint64_t op);
// Inserts a flow into its peer's list, in order.
void nb_flow_insert(struct nb_lanes *lanes, struct nb_flow *flow);
// Whether an announced run may land: 0, -EALREADY (part of it has landed), or NB_EWIRE.
int nb_flow_check(const struct nb_lanes *lanes, const struct nb_flow *flow, const struct nb_frame *frame);
// Claims a run, so that nothing lands there twice; or releases the claim of a run that did not land.
void nb_flow_claim(struct nb_flow *flow, const struct nb_frame *frame);
void nb_flow_unclaim(struct nb_flow *flow, const struct nb_frame *frame);
// Checks a run and claims it if it may land. As nb_flow_check().
int nb_flow_accept(const struct nb_lanes *lanes, struct nb_flow *flow, const struct nb_frame *frame);

// usable_lanes.c

// Tells the peer which operations this rank expects, if flows await that.
void nb_lanes_tell_started(struct nb_lanes *lanes, int peer);

// Updates `reach` of a peer after a lane was opened or lost.
void nb_lanes_update_reach(struct nb_lanes *lanes, int peer);
// Sends a message over the lowest open lane. As nb_lane_ops.message.
int nb_lanes_send_message(struct nb_lanes *lanes, int peer, const void *data, size_t bytes);

// lane_rate.c: measures how fast each lane delivers, and limits how much it may take at once.
void nb_rate_posted(const struct nb_lanes *lanes, struct path *path, size_t bytes);
void nb_rate_refused(struct path *path, size_t bytes);
void nb_rate_sent(const struct nb_lanes *lanes, struct path *path, size_t bytes);
// Counts bytes of a flow that a lane has moved, in either direction.
void nb_rate_moved(struct nb_lanes *lanes, struct nb_flow *flow, int lane, size_t bytes);
// The largest segment that this lane should take now. 0: another lane would be done with it sooner, which is set in
// *sooner. sooner NULL: this lane takes it in any case.
size_t nb_rate_segment(struct nb_lanes *lanes, struct peer *peer, int lane, int *sooner);

// credits.c. On STREAM lanes none of these has an effect (use: returns true).
int nb_credits_init(struct nb_lanes *lanes, struct nb_error *err);
void nb_credits_fini(struct nb_lanes *lanes);
int nb_credits_peer_open(struct nb_lanes *lanes, int peer, struct nb_error *err);
void nb_credits_in_added(struct nb_lanes *lanes, struct nb_flow *flow);
void nb_credits_out_added(struct nb_lanes *lanes, struct nb_flow *flow);
void nb_credits_cancel(struct nb_lanes *lanes, struct nb_flow *flow);
// Finds room at the peer for blocks from `first` on, may shorten *count, and fills the remote fields. False: no credit
// covers `first` (then *count blocks may be skipped).
bool nb_credits_use(struct nb_lanes *lanes, struct nb_flow *flow, int lane, uint32_t first, uint32_t *count,
                    struct assignment *at);
// Sets the lane's handle of the request's local memory.
void nb_credits_local(struct nb_lanes *lanes, int lane, struct nb_request *req);
void nb_credits_unuse(struct nb_lanes *lanes, struct nb_flow *flow, struct nb_request *req);
void nb_credits_sent(struct nb_lanes *lanes, struct nb_flow *flow);
// Restores the credit of a run that did not land.
void nb_credits_again(struct nb_lanes *lanes, struct nb_flow *flow, const struct nb_run *run);
void nb_credits_drop(struct nb_lanes *lanes, struct nb_flow *flow);
// Queues the credits again: some may have been lost with the lane.
void nb_credits_lost(struct nb_lanes *lanes, int peer);
// Finds the flow of an arrival that claims to be from `peer` (NB_NO_PEER: from nobody). NULL: no credit allows it; it
// is dropped and counted. Else the run is claimed. *data: its bytes, or NULL if they are in place. *refill: call
// nb_credits_refill() after the flow has consumed them.
struct nb_flow *nb_credits_landed(struct nb_lanes *lanes, int lane, int peer, const struct nb_frame *frame,
                                  const void **data, bool *refill);
// Assigns slots to waiting flows of all peers, and grants whatever there is room for, the oldest first.
void nb_credits_refill(struct nb_lanes *lanes, int peer);
// Handles a credit message. True: there may be room at the peer for more segments.
bool nb_credits_message(struct nb_lanes *lanes, int lane, int peer, const void *data, size_t bytes);
// Sends messages that could not be sent before.
void nb_credits_flush(struct nb_lanes *lanes, int peer);

// retransmit.c
int nb_retransmit_init(struct nb_lanes *lanes, struct nb_error *err);
void nb_retransmit_fini(struct nb_lanes *lanes);
// Begins an out flow: gives it a copy if it is small and one is free.
void nb_retransmit_begin(struct nb_lanes *lanes, struct nb_flow *flow);
// Copies blocks, and points the request at the copy. False: the flow does not give all their bytes.
bool nb_retransmit_copy(struct nb_flow *flow, uint32_t first, uint32_t count, struct nb_request *req);
// Records the run of an assignment.
void nb_retransmit_add(struct nb_lanes *lanes, int lane, const struct assignment *at);
// Finishes the flow if nothing is outstanding. True: it is gone.
bool nb_retransmit_settle(struct nb_lanes *lanes, struct nb_flow *flow);
void nb_retransmit_forget(struct nb_lanes *lanes, struct nb_flow *flow);
// Drops all copies for this peer.
void nb_retransmit_drop(struct nb_lanes *lanes, int peer);
// Records that an in flow has landed completely. Tells its sender; for a small flow, together with others.
void nb_retransmit_landed(struct nb_lanes *lanes, const struct nb_flow *flow);
// Reports now to the peer all operations that have landed completely.
void nb_retransmit_done_send(struct nb_lanes *lanes, int peer);
// Handles the begin of the peer's report of what it misses of its lost lanes.
void nb_retransmit_report_received(struct nb_lanes *lanes, int peer, const struct wire_lost *message);
// Handles a message. True: there may be blocks to send again.
bool nb_retransmit_message(struct nb_lanes *lanes, int peer, const void *data, size_t bytes);
// Sends messages that could not be sent before.
void nb_retransmit_flush(struct nb_lanes *lanes, int peer);

// failover.c

// Handles a lane to a peer that is lost or given up. Runs once per lane and peer.
void nb_failover_lost(struct nb_lanes *lanes, int peer, int lane, const struct nb_error *why);
// Handles any message but a credit. True: there may be blocks to send again.
bool nb_failover_message(struct nb_lanes *lanes, int lane, int peer, const void *data, size_t bytes);
// Sends messages that could not be sent before.
void nb_failover_flush(struct nb_lanes *lanes, int peer);

// lanes.c: the callbacks of the lanes.
extern const struct nb_lane_up nb_lanes_up;

#endif
