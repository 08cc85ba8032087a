// What lanes.c (scheduling), sent.c (what left and is not known to be there), repair.c (lanes that are lost) and grants.c
// (credits of RMA lanes) share. Nobody else includes this.
#ifndef NB_LANES_INTERNAL_H
#define NB_LANES_INTERNAL_H

#include "base/admission.h"
#include "base/pool.h"
#include "transport/lanes.h"

enum {
    NB_FRAME_BLOCKS_MAX = 256,    // what 8 bits carry
    NB_SCRATCH_SLACK = 64 * 1024, // a segment is cut on whole blocks, which may be larger than it
    NB_REQUESTS_PER_PATH = 64,
    NB_SLOTS = 64,       // in flows that RMA arrivals can name
    NB_REGIONS_MAX = 16, // regions of one peer that are known here
    NB_COPY_BLOCKS = 256,
    NB_COPIES_MAX = 64
};

// The first byte of a message between two schedulers.
enum nb_word {
    NB_WORD_REGION = 1, // grants.c
    NB_WORD_GRANTS,     //
    NB_WORD_DONE,       // these operations have landed whole
    NB_WORD_ASK,        // say at once which have
    NB_WORD_LOST,       // these lanes are lost here; what is missing follows
    NB_WORD_MISSING,    // runs of one operation
    NB_WORD_LOST_END,   // that was all
    NB_WORD_ECHO,       // a sign is asked for, on this lane
    NB_WORD_ECHOED,
    NB_WORD_BYE // this rank leaves, and has all that it needs
};

// What a segment may need, in whole pages.
#define NB_SCRATCH_BYTES(segment_bytes) (((segment_bytes) + NB_SCRATCH_SLACK + 4095) / 4096 * 4096)

// A lane's address as bootstrap carries it.
struct nb_lane_address {
    uint32_t bytes;
    uint32_t zero;
    unsigned char addr[NB_LANE_ADDR_MAX];
};

// One lane to one peer.
struct path {
    bool open;
    bool refused; // post said -EAGAIN; writable() will come
    bool held;    // the lane stopped reading: a segment of an operation not known yet
    bool pulling; // no recursion through sent()
    bool placing_scratch;
    bool echo_due;    // a sign is owed to the peer
    bool ask_due;     // one is asked for, but the lane did not take the question
    int64_t moved_ns; // when something last came or went
    int64_t asked_ns; // since when a sign is waited for; 0: it is not
    int64_t rival_ns; // since when another lane is known to have been alive after that
    size_t in_flight; // bytes
    struct pace {
        int64_t since_ns; // what was sent before this is counted
        int64_t sent_ns;  // when a request was last finished
        double bytes;     // that were sent
        double ns;        // while there was work
        double rate;      // bytes per ns; 0: not known yet
        size_t held;      // bytes that were sent and that the lane still had when it was asked, and those sent since
        int64_t held_ns;  // when it was
    } pace;
    struct nb_request *requests;
    struct nb_request *idle;
    struct nb_flow *placing; // STREAM: the flow of the segment that is being read
    struct nb_frame placing_frame;
    void *scratch;
};

// Memory of the peer, as one lane may write to it.
struct remote_region {
    uint64_t key;
    uint64_t addr;
    uint32_t life; // of the number, as its owner counts
    bool known;
};

// A run that left on a lane and is not known to have landed.
struct nb_run {
    struct nb_run *next;
    uint64_t offset; // RMA: where it went
    uint32_t block;
    uint32_t tag; // RMA: of the grant
    uint16_t blocks;
    uint16_t lane;
    uint16_t slot;
    uint16_t region;
};

// What a small flow was sent from. Once the caller's flow is over it stands for it.
struct nb_copy {
    struct nb_flow flow;
    uint64_t map[NB_COPY_BLOCKS / 64];
    uint64_t taken[NB_COPY_BLOCKS / 64]; // blocks that were copied
    uint16_t start[NB_COPY_BLOCKS + 1];
    bool waits; // it is among the peer's kept
    struct nb_copy *next;
    unsigned char data[]; // the lanes' copy_bytes
};

_Static_assert(NB_COPY_MAX <= UINT16_MAX, "start[] holds it");

enum { NB_SERIES = 2 };

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
    struct nb_list kept;          // copies that wait for the peer's word alone
    uint64_t in_floor[NB_SERIES]; // the highest operation expected so far: an older one that is not in the list is over
    uint64_t out_floor[NB_SERIES]; // the highest operation owed so far
    struct path *paths;            // by lane; NULL: not opened
    int next_lane;
    int reach;            // lanes before this one take new segments, where they are open
    struct rma_peer *rma; // NULL on STREAM lanes
    // repair.c
    uint64_t *done; // operations that landed whole, to be told
    size_t done_count;
    size_t done_room;
    bool left; // it leaves, or has left, in good order: its lanes end, and nothing is owed to it
    bool done_urgent;
    bool ask_due;
    bool asked;
    uint64_t lost;       // lanes, a bit each
    uint64_t lost_there; // by the report that is being heard
    bool hearing;        // its end has not come
    enum nb_report report;
    uint64_t report_floor[NB_SERIES]; // of in_floor, when it began
    uint64_t report_op;               // the next to be told of
    uint32_t report_block;
    int64_t busy_ns; // since when there are flows; 0: there are none
};

// The interface that a lane is bound to.
struct lane_interface {
    char name[IF_NAMESIZE]; // "": not known
    int64_t down_ns;        // since when it is known to be down; 0: it is up
    int64_t asked_ns;       // when that was found out
};

struct nb_lanes {
    struct nb_lanes_config config;
    struct lane_interface interfaces[NB_LANES_MAX]; // by lane
    struct nb_lane *lane[NB_LANES_MAX];
    struct nb_admission admission;
    int used;
    size_t window_bytes; // of one path
    struct peer *peers;
    struct rma *rma;
    struct nb_pool runs;
    size_t runs_reserved;   // for flows that are not copied
    uint32_t copied_blocks; // of the longest flow that was
    char *copies;           // NB_COPIES_MAX, each memory that nobody touches before it is used
    int copies_used;        // of these
    struct nb_copy *copies_idle;
};

// What the lanes tell the scheduler.
extern const struct nb_lane_up nb_lanes_up;

struct nb_flow *nb_lanes_find(struct nb_lanes *lanes, int peer, enum nb_flow_dir dir, uint64_t op);
// Whether a run may land: 0, -EALREADY (some of it is there), or NB_EWIRE.
int nb_lanes_check(const struct nb_lanes *lanes, const struct nb_flow *flow, const struct nb_frame *frame);
// Hands an RMA arrival that was checked to its flow.
void nb_lanes_arrived(struct nb_lanes *lanes, struct nb_flow *flow, int lane, const struct nb_frame *frame,
                      const void *data);

// Sends an answer, a question or a list over the lowest lane that is left. As nb_lane_ops.message.
int nb_lanes_say(struct nb_lanes *lanes, int peer, const void *data, size_t bytes);
void nb_lanes_put(struct nb_lanes *lanes, struct nb_flow *flow);
void nb_lanes_reach(struct nb_lanes *lanes, int peer);
// Marks a run as one that did not land.
void nb_lanes_unclaim(struct nb_flow *flow, const struct nb_frame *frame);

// sent.c: out flows between the last byte that left and the peer's word that it is there.
int nb_sent_init(struct nb_lanes *lanes, struct nb_error *err);
void nb_sent_fini(struct nb_lanes *lanes);
// A flow begins: it gets a copy when it is small and there is one.
void nb_sent_begin(struct nb_lanes *lanes, struct nb_flow *flow);
// Puts blocks into the flow's copy, and the request's pieces there. False: the flow does not say where all their bytes lie.
bool nb_sent_copy(struct nb_flow *flow, uint32_t first, uint32_t count, struct nb_request *req);
// Remembers what a request carried.
void nb_sent_add(struct nb_lanes *lanes, struct nb_flow *flow, int lane, const struct nb_request *req);
// Ends the flow where nothing keeps it any more. True: it is gone.
bool nb_sent_settle(struct nb_lanes *lanes, struct nb_flow *flow);
void nb_sent_forget(struct nb_lanes *lanes, struct nb_flow *flow);
// An out flow, or the copy that stands for it.
struct nb_flow *nb_sent_find(struct nb_lanes *lanes, int peer, uint64_t op);
// What left on these lanes of blocks [first, first + count) is to be sent again.
void nb_sent_again(struct nb_lanes *lanes, struct nb_flow *flow, uint64_t on_lanes, uint32_t first, uint32_t count);
// What left on these lanes has landed.
void nb_sent_landed(struct nb_lanes *lanes, struct nb_flow *flow, uint64_t on_lanes);
// No copy stands for a flow to this peer any more.
void nb_sent_drop(struct nb_lanes *lanes, int peer);

// repair.c
void nb_repair_fini(struct nb_lanes *lanes);
// A lane to a peer is gone, or is given up. Once per lane and peer.
void nb_repair_lost(struct nb_lanes *lanes, int peer, int lane, const struct nb_error *why);
// An operation has landed whole.
void nb_repair_done(struct nb_lanes *lanes, const struct nb_flow *flow);
// A flow waits for the peer's word and may wait for long.
void nb_repair_ask(struct nb_lanes *lanes, int peer);
void nb_repair_message(struct nb_lanes *lanes, int lane, int peer, const void *data, size_t bytes);
// Sends what could not be sent before.
void nb_repair_flush(struct nb_lanes *lanes, int peer);

// pace.c: how fast each lane delivers, and how much it may take at once.
void nb_pace_posted(struct path *path, size_t bytes);
void nb_pace_refused(struct path *path, size_t bytes);
void nb_pace_sent(const struct nb_lanes *lanes, struct path *path, size_t bytes);
// The largest segment that is worth its length on this lane now; 0: another lane would be done with one before, which is
// put to *sooner. sooner NULL: this lane takes it whatever others would do.
size_t nb_pace_segment(struct nb_lanes *lanes, struct peer *peer, int lane, int *sooner);

// grants.c. On STREAM lanes each of these does nothing (use: true).
int nb_grants_init(struct nb_lanes *lanes, struct nb_error *err);
void nb_grants_fini(struct nb_lanes *lanes);
int nb_grants_peer_open(struct nb_lanes *lanes, int peer, struct nb_error *err);
void nb_grants_in_added(struct nb_lanes *lanes, struct nb_flow *flow);
void nb_grants_out_added(struct nb_lanes *lanes, struct nb_flow *flow);
void nb_grants_cancel(struct nb_lanes *lanes, struct nb_flow *flow);
// Finds room at the peer for blocks from `first` on; may shorten *count; fills the remote fields of the request. False:
// no grant covers `first` (then *count blocks may be skipped).
bool nb_grants_use(struct nb_lanes *lanes, struct nb_flow *flow, int lane, uint32_t first, uint32_t *count,
                   struct nb_request *req);
// Where the lane knows the request's local memory.
void nb_grants_local(struct nb_lanes *lanes, int lane, struct nb_request *req);
void nb_grants_unuse(struct nb_lanes *lanes, struct nb_flow *flow, struct nb_request *req);
void nb_grants_sent(struct nb_lanes *lanes, struct nb_flow *flow);
// Grants a run anew that did not land.
void nb_grants_again(struct nb_lanes *lanes, struct nb_flow *flow, const struct nb_run *run);
void nb_grants_out_over(struct nb_lanes *lanes, struct nb_flow *flow);
// What was granted may have been told on the lane that is lost.
void nb_grants_lost(struct nb_lanes *lanes, int peer);
// An arrival that says it is of `peer` (NB_NO_PEER: of nobody). One that no grant allows is dropped and counted.
void nb_grants_landed(struct nb_lanes *lanes, int lane, int peer, const struct nb_frame *frame);
void nb_grants_message(struct nb_lanes *lanes, int lane, int peer, const void *data, size_t bytes);
// Sends what could not be sent before.
void nb_grants_flush(struct nb_lanes *lanes, int peer);

#endif
