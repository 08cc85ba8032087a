// THE contract of a network. A lane is one ordered flow to each peer: one TCP connection, or one libfabric endpoint in
// its own domain. A new network is one file, one line in nb_transports[], and passes the one suite.
//
// Two kinds of lane. On a STREAM lane a segment is announced by its header, and the receiver says at that moment where
// its bytes go. On an RMA lane the sender writes to an address that the receiver granted before, and the receiver gets
// 64 bits with the completion. lanes.c drives both; it alone knows which blocks travel.
//
// One thread drives a lane; nothing here blocks. Every function returns 0 or a count, -EAGAIN, or a failure.
#ifndef NB_TRANSPORT_H
#define NB_TRANSPORT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "base/error.h"
#include "base/loop.h"
#include "base/sock.h"
#include "bootstrap/bootstrap.h"

enum {
    NB_LANE_ADDR_MAX = 192, // of a lane's address, as bootstrap carries it
    NB_LANE_IOV_MAX = 8,    // pieces of one segment in memory
    NB_LANE_MESSAGE_MAX = 128,
    NB_LANES_MAX = 64,
    NB_SEGMENT_MAX = 4 * 1024 * 1024
};

// What a segment is called on the wire: `blocks` blocks from `block` on, of the operation `op`.
struct nb_frame {
    uint64_t op;
    uint32_t block;
    uint16_t blocks;
    uint16_t slot; // RMA lanes: the receiver's number for (op, sender), < 64; travels in the 64 bits
    uint32_t tag;  // RMA lanes: of the grant, drawn by the receiver; an arrival brings it back
    uint32_t bytes;
};

// The 64 bits of an RMA arrival: tag 32, slot 6, block 18, blocks - 1 8.
static inline uint64_t nb_frame_pack(const struct nb_frame *frame) {
    return (uint64_t)frame->tag << 32 | (uint64_t)(frame->slot & 63) << 26 | (uint64_t)(frame->block & 0x3ffff) << 8 |
           (uint64_t)((frame->blocks - 1) & 0xff);
}

static inline void nb_frame_unpack(uint64_t bits, struct nb_frame *frame) {
    frame->tag = (uint32_t)(bits >> 32);
    frame->slot = (uint16_t)(bits >> 26 & 63);
    frame->block = (uint32_t)(bits >> 8 & 0x3ffff);
    frame->blocks = (uint16_t)((bits & 0xff) + 1);
}

struct nb_admission;
struct nb_lane;

// A segment on its way out. The caller's memory until `sent` is called with it.
struct nb_request {
    struct nb_frame frame;
    int peer;
    int iov_count;
    struct iovec iov[NB_LANE_IOV_MAX];
    uint64_t remote_addr; // RMA lanes: from the grant
    uint64_t remote_key;
    void *local_region[1];  // RMA lanes: what map() gave for iov's memory, or NULL (the lane maps or stages by itself)
    uint64_t remote_offset; // lanes.c's own: where that is, whichever lane goes there
    uint16_t remote_region; // lanes.c's own
    void *owner;            // lanes.c's own
    void *next;             // lanes.c's own
    unsigned char lane_private[96]; // the lane's: its context, its place in a queue
};

// What a lane tells lanes.c, on the driving thread, from inside progress(), post() or a watch of the loop.
struct nb_lane_up {
    // STREAM: a header came. Fills iov with exactly frame->bytes of memory and returns the count; -EAGAIN: not known yet,
    // the lane stops reading from this peer until resume(); any other failure: the lane is given up.
    int (*place)(void *ctx, struct nb_lane *lane, int peer, const struct nb_frame *frame,
                 struct iovec iov[NB_LANE_IOV_MAX]);
    // The bytes are in place. RMA: only slot, block, blocks, tag of the frame are known, and none of them is proven:
    // anybody may have sent them. peer is NB_NO_PEER, or the rank whose authenticated message said so.
    void (*landed)(void *ctx, struct nb_lane *lane, int peer, const struct nb_frame *frame);
    // A request is finished: 0, or the failure. Its memory may be written again (RMA and delivery: it has landed).
    void (*sent)(void *ctx, struct nb_lane *lane, struct nb_request *request, int code);
    // The lane can take another request for this peer.
    void (*writable)(void *ctx, struct nb_lane *lane, int peer);
    // A message of up to NB_LANE_MESSAGE_MAX bytes.
    void (*message)(void *ctx, struct nb_lane *lane, int peer, const void *data, size_t bytes);
    // This lane's flow to the peer is gone; requests that were under way have had `sent` with the same code.
    void (*lost)(void *ctx, struct nb_lane *lane, int peer, const struct nb_error *why);
};

struct nb_lane_config {
    int index; // of this lane
    int rank;
    int size;
    struct nb_loop *loop;           // STREAM lanes register their descriptors here; RMA lanes the one they wait on
    const struct nb_boot *boot;     // for tokens and self's address
    struct nb_admission *admission; // of all lanes: who has connected and not authenticated
    struct nb_sockaddr bind;        // the interface this lane uses, port 0
    struct nb_port_range ports;
    int timeout_ms;
    const char *provider;   // ofi: NULL for the best there is
    const char *library;    // ofi: NULL for the usual places
    const char *congestion; // tcp: congestion control by its name; NULL: the host's, none that paces on loopback
    const struct nb_lane_up *up;
    void *up_ctx;
};

struct nb_lane_stats {
    uint64_t bytes_out; // payload whose request finished
    uint64_t bytes_in;  // payload that landed
};

// Memory known to one lane. STREAM lanes need none.
struct nb_region {
    void *handle;  // for nb_request.local_region
    uint64_t key;  // for the peer
    uint64_t addr; // what the peer writes to for the first byte
};

enum { NB_LANE_STREAM = 0, NB_LANE_RMA = 1 };

struct nb_lane_ops {
    const char *name; // "tcp", "ofi", "mem"
    int kind;         // NB_LANE_STREAM or NB_LANE_RMA
    // Makes the lane and fills in its address. A lane that cannot be opened says why in err.
    int (*open)(const struct nb_lane_config *config, struct nb_lane **lane, struct nb_error *err);
    void (*address)(const struct nb_lane *lane, unsigned char addr[NB_LANE_ADDR_MAX], size_t *bytes);
    // Starts the flow to a peer; returns at once.
    int (*peer_open)(struct nb_lane *lane, int peer, const unsigned char *addr, size_t bytes, struct nb_error *err);
    bool (*peer_ready)(const struct nb_lane *lane, int peer);
    // Ends the flow at once: no byte of this peer lands after it returns. Requests under way get `sent` with NB_ECLOSED.
    void (*peer_close)(struct nb_lane *lane, int peer);
    int (*map)(struct nb_lane *lane, void *base, size_t bytes, struct nb_region *region, struct nb_error *err);
    void (*unmap)(struct nb_lane *lane, struct nb_region *region);
    // 0: taken, `sent` will be called (perhaps before it returns). -EAGAIN: no room, `writable` will be called.
    int (*post)(struct nb_lane *lane, struct nb_request *request);
    // A short message, in order among the messages of this lane and peer. Copied. -EAGAIN as for post.
    int (*message)(struct nb_lane *lane, int peer, const void *data, size_t bytes);
    // Reads again from a peer that `place` had put off.
    void (*resume)(struct nb_lane *lane, int peer);
    // Completes what is complete; the count. STREAM lanes work from the loop and return 0.
    int (*progress)(struct nb_lane *lane);
    // Before the thread sleeps in the loop: 0, or -EAGAIN when progress must run first.
    int (*arm)(struct nb_lane *lane);
    void (*stats)(const struct nb_lane *lane, int peer, struct nb_lane_stats *stats);
    // Bytes of finished requests that this host still has, as far as it knows. NULL: what is finished is there.
    size_t (*held)(const struct nb_lane *lane, int peer);
    // "provider/version", for the record; "" where there is none.
    const char *(*describe)(const struct nb_lane *lane);
    void (*close)(struct nb_lane *lane);
};

// First member of every lane.
struct nb_lane {
    const struct nb_lane_ops *ops;
    int index;
    int door;         // why a peer that came could not be let in, or 0
    uint64_t refused; // connections, arrivals and messages that proved no right to be taken, and were dropped
};

// The networks that were built in, NULL at the end: tcp, ofi. (mem is for tests and not listed.)
extern const struct nb_lane_ops *const nb_transports[];
const struct nb_lane_ops *nb_transport_find(const char *name);

#endif
