// What lanes.c (scheduling) and grants.c (credits of RMA lanes) share. Nobody else includes this.
#ifndef NB_LANES_INTERNAL_H
#define NB_LANES_INTERNAL_H

#include "transport/lanes.h"

enum {
    NB_FRAME_BLOCKS_MAX = 256,    // what 8 bits carry
    NB_SCRATCH_SLACK = 64 * 1024, // a segment is cut on whole blocks, which may be larger than it
    NB_REQUESTS_PER_PATH = 64,
    NB_SLOTS = 64,      // in flows that RMA arrivals can name
    NB_REGIONS_MAX = 16 // regions of one peer that are known here
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
    size_t in_flight; // bytes
    struct pace {
        int64_t since_ns; // of the present spell of work
        size_t bytes;     // that were sent in it
        double rate;      // bytes per ns; 0: not known yet
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
    bool known;
};

struct peer {
    struct nb_list out;
    struct nb_list in;
    uint64_t in_floor;  // the highest operation expected so far: an older one that is not in the list is over
    struct path *paths; // by lane; NULL: not opened
    int next_lane;
    struct rma_peer *rma; // NULL on STREAM lanes
};

struct nb_lanes {
    struct nb_lanes_config config;
    struct nb_lane *lane[NB_LANES_MAX];
    int used;
    size_t window_bytes; // of one path
    struct peer *peers;
    struct rma *rma;
};

// What the lanes tell the scheduler.
extern const struct nb_lane_up nb_lanes_up;

struct nb_flow *nb_lanes_find(struct nb_lanes *lanes, int peer, enum nb_flow_dir dir, uint64_t op);
// Whether a run may land: 0, -EALREADY (some of it is there), or NB_EWIRE.
int nb_lanes_check(const struct nb_lanes *lanes, const struct nb_flow *flow, const struct nb_frame *frame);
// Hands an RMA arrival that was checked to its flow.
void nb_lanes_arrived(struct nb_lanes *lanes, struct nb_flow *flow, int lane, const struct nb_frame *frame,
                      const void *data);

// pace.c: how fast each lane delivers, and how much it may take at once.
void nb_pace_posted(struct path *path, size_t bytes);
void nb_pace_refused(struct path *path, size_t bytes);
void nb_pace_sent(struct path *path, size_t bytes);
// The largest segment that is worth its length on this lane now.
size_t nb_pace_segment(const struct nb_lanes *lanes, const struct peer *peer, int lane);

// grants.c. On STREAM lanes each of these does nothing (use: true).
void nb_grants_init(struct nb_lanes *lanes);
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
void nb_grants_sent(struct nb_lanes *lanes, struct nb_flow *flow, struct nb_request *req);
void nb_grants_landed(struct nb_lanes *lanes, int lane, const struct nb_frame *frame);
void nb_grants_message(struct nb_lanes *lanes, int lane, int peer, const void *data, size_t bytes);
// Sends what could not be sent before.
void nb_grants_flush(struct nb_lanes *lanes, int peer);

#endif
