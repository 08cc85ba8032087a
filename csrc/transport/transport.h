// Transport: the contract of a network. A lane is one ordered flow to each peer: one TCP connection, or one libfabric
// endpoint in its own domain. A new network is one file, one line in nb_transports[], and passes the common test suite.
//
// There are two kinds of lane. On a STREAM lane a header announces a segment, and the receiver then says where its
// bytes go. On an RMA lane the sender writes to an address that the receiver granted before, and the receiver gets 64
// bits with the completion. lanes.c uses both; only lanes.c decides which blocks travel.
//
// One thread makes progress on a lane; nothing here blocks. Every function returns 0 or a count, -EAGAIN, or a failure.
#ifndef NB_TRANSPORT_H
#define NB_TRANSPORT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "base/error.h"
#include "base/loop.h"
#include "base/sock.h"
#include "base/wire.h"
#include "bootstrap/bootstrap.h"

enum {
    NB_LANE_IOV_MAX = 8, // pieces of memory of one segment
    NB_LANES_MAX = 64,
    NB_SEGMENT_MAX = 4 * 1024 * 1024
};

struct nb_admission;
struct nb_lane;

// A segment to send. The caller must keep it until `sent` is called with it.
struct nb_request {
    struct nb_frame frame;
    int peer;
    int iov_count;
    struct iovec iov[NB_LANE_IOV_MAX];
    uint64_t remote_addr; // RMA lanes: from the credit
    uint64_t remote_key;
    void *local_region[1]; // RMA lanes: map()'s handle of iov's memory, or NULL (the lane registers or stages it)
    unsigned char lane_private[96]; // the lane's own data: its context, its place in a queue
};

// Callbacks of a lane to lanes.c, on the progress thread, from inside progress(), post() or a watch of the loop.
struct nb_lane_up {
    // STREAM: a header arrived. Fills iov with exactly frame->bytes of memory and returns the count. -EAGAIN: not known
    // yet, the lane stops reading from this peer until resume(). Any other failure: the lane is given up.
    int (*place)(void *ctx, struct nb_lane *lane, int peer, const struct nb_frame *frame,
                 struct iovec iov[NB_LANE_IOV_MAX]);
    // The bytes have landed. RMA: only slot, block, blocks and tag of the frame are set, and they are not
    // authenticated: anybody may have sent them. peer is NB_NO_PEER, or the rank whose authenticated message reported
    // the arrival. After `sent` of a write, the second message on that lane does not overtake its arrival.
    void (*landed)(void *ctx, struct nb_lane *lane, int peer, const struct nb_frame *frame);
    // A request is finished: 0, or the failure. Its memory may be reused (RMA with delivery: the data have landed).
    void (*sent)(void *ctx, struct nb_lane *lane, struct nb_request *request, int code);
    // The lane can take another request for this peer.
    void (*writable)(void *ctx, struct nb_lane *lane, int peer);
    // A message of up to NB_LANE_MESSAGE_MAX bytes.
    void (*message)(void *ctx, struct nb_lane *lane, int peer, const void *data, size_t bytes);
    // The flow to the peer is lost. `sent` was called before for its requests in flight, with the same code.
    void (*lost)(void *ctx, struct nb_lane *lane, int peer, const struct nb_error *why);
};

struct nb_lane_config {
    int index; // of this lane
    int rank;
    int size;
    struct nb_loop *loop;           // STREAM lanes register their descriptors here; RMA lanes the one that they wait on
    const struct nb_boot *boot;     // for tokens and self's address
    struct nb_admission *admission; // shared by all lanes: connections that have not authenticated
    struct nb_sockaddr bind;        // the interface this lane uses, port 0
    struct nb_port_range ports;
    int timeout_ms;
    const char *provider;   // ofi: NULL: the best available
    const char *library;    // ofi: NULL: the usual paths
    const char *congestion; // tcp: name of the congestion control; NULL: the host's, without pacing on loopback
    const struct nb_lane_up *up;
    void *up_ctx;
};

struct nb_lane_stats {
    uint64_t bytes_out; // payload of finished requests
    uint64_t bytes_in;  // payload that has landed
};

// Memory that is registered with one lane. STREAM lanes need none.
struct nb_region {
    void *handle;  // for nb_request.local_region
    uint64_t key;  // for the peer
    uint64_t addr; // address of the first byte for the peer's writes
};

enum { NB_LANE_STREAM = 0, NB_LANE_RMA = 1 };

// Bytes of finished requests that a host has not given up yet.
struct nb_held {
    size_t bytes;
    size_t late_bytes;     // so many of them may be at the peer, which confirms them late
    int64_t round_trip_ns; // the least time until the peer has confirmed a byte
};

struct nb_lane_ops {
    const char *name; // "tcp", "ofi", "mem"
    int kind;         // NB_LANE_STREAM or NB_LANE_RMA
    // Loads what the first open() would load, which takes long. Fails if this host lacks what the config's provider,
    // library and congestion name, at its bind. NULL: there is nothing to load or to name.
    int (*check)(const struct nb_lane_config *config, struct nb_error *err);
    // Opens the lane and fills in its address. Sets err on failure.
    int (*open)(const struct nb_lane_config *config, struct nb_lane **lane, struct nb_error *err);
    void (*address)(const struct nb_lane *lane, unsigned char addr[NB_LANE_ADDR_MAX], size_t *bytes);
    // Starts the flow to a peer; returns at once.
    int (*peer_open)(struct nb_lane *lane, int peer, const unsigned char *addr, size_t bytes, struct nb_error *err);
    bool (*peer_ready)(const struct nb_lane *lane, int peer);
    // Gives up the listener: every peer is ready, and none is opened later. NULL: the lane has no listener of its own.
    void (*listen_end)(struct nb_lane *lane);
    // Of a peer that is not ready: true if this rank's own connect is unfinished, and `where` is the peer's listener.
    // False if the peer's connect is missing, and `where` is this rank's listener. NULL: a connect has no such ends.
    bool (*connecting)(const struct nb_lane *lane, int peer, char where[NB_SOCK_TEXT]);
    // Ends the flow at once: no byte of this peer lands after it returns. Requests in flight get `sent` with
    // NB_ECLOSED.
    void (*peer_close)(struct nb_lane *lane, int peer);
    int (*map)(struct nb_lane *lane, void *base, size_t bytes, struct nb_region *region, struct nb_error *err);
    void (*unmap)(struct nb_lane *lane, struct nb_region *region);
    // 0: accepted, `sent` will be called (possibly before it returns). -EAGAIN: no room, `writable` will be called.
    int (*post)(struct nb_lane *lane, struct nb_request *request);
    // Sends a short message, in order with the other messages of this lane and peer. Copies it. -EAGAIN as for post.
    int (*message)(struct nb_lane *lane, int peer, const void *data, size_t bytes);
    // Resumes reading from a peer that `place` had put off.
    void (*resume)(struct nb_lane *lane, int peer);
    // Handles completions and returns their number. STREAM lanes work from the loop and return 0.
    int (*progress)(struct nb_lane *lane);
    // RMA: wakes the loop from now on. NULL: the lane is polled, or STREAM.
    int (*watch)(struct nb_lane *lane, struct nb_error *err);
    // Call before the thread sleeps in the loop: 0, or -EAGAIN if progress must run first.
    int (*arm)(struct nb_lane *lane);
    void (*stats)(const struct nb_lane *lane, int peer, struct nb_lane_stats *stats);
    // What this host still holds of finished requests, as far as known. NULL: finished bytes are at the peer.
    struct nb_held (*held)(const struct nb_lane *lane, int peer);
    // "provider/version" for the record; "" if there is none.
    const char *(*describe)(const struct nb_lane *lane);
    void (*close)(struct nb_lane *lane);
};

// First member of every lane.
struct nb_lane {
    const struct nb_lane_ops *ops;
    int index;
    int accept_error; // why a connecting peer could not be accepted, or 0
    uint64_t refused; // connections, arrivals and messages that failed authentication and were dropped
};

// The networks of this build, NULL at the end: tcp, ofi. (mem is for tests and not listed.)
extern const struct nb_lane_ops *const nb_transports[];
const struct nb_lane_ops *nb_transport_find(const char *name);

#endif
