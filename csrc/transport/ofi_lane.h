// libfabric lane internals: the state shared by ofi.c (peers, messages, writes, completions) and ofi_endpoint.c
// (libfabric's objects, memory). One thread makes progress on a lane and uses all of this.
#ifndef NB_OFI_LANE_H
#define NB_OFI_LANE_H

#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/list.h"
#include "base/loop.h"
#include "base/sha256.h"
#include "base/wire.h"
#include "transport/ofi.h"
#include "transport/ofi_lib.h"
#include "transport/transport.h"

enum {
    NB_OFI_BOUNCES = 8, // staging buffers of a lane, allocated on first use
    NB_OFI_CQ_SIZE = 4096,
    NB_OFI_CQ_BATCH = 16,
    NB_OFI_SENDS = 64,   // messages being sent
    NB_OFI_RECEIVES = 64 // posted for messages, and two more for each rank
};

enum nb_ofi_kind { NB_OFI_WRITE = 1, NB_OFI_SEND, NB_OFI_RECEIVE };

// The context that libfabric returns with a completion; libfabric uses its first bytes while the operation is in
// progress. A write's lies in nb_request.lane_private, a message's in its slot.
struct nb_ofi_op {
    struct fi_context2 context;
    struct nb_list link;
    uint32_t kind;
    int32_t peer;
    struct nb_ofi_bounce *bounce;
};

struct nb_ofi_bounce {
    void *memory;
    size_t bytes;      // allocated
    size_t used;       // by a request
    struct fid_mr *mr; // NULL if the provider needs none
    bool busy;
};

struct nb_ofi_slot {
    struct nb_ofi_op op;
    struct wire_ofi_message message;
    unsigned char spare[16]; // makes room to detect a longer message, which no rank sends
};

// nb_region.handle.
struct nb_ofi_region {
    struct nb_list link;
    struct fid_mr *mr; // NULL once the lane is dead
    void *desc;
};

struct nb_ofi_peer {
    bool open;
    bool blocked;       // it got -EAGAIN; `writable` is due
    bool failing;       // something failed: accepts nothing more, and `lost` follows when nothing is in progress
    bool lost_reported; // `lost` was called
    bool keyed;         // the keys are derived
    uint64_t messages_out;
    uint64_t messages_in;
    uint32_t under_way;
    fi_addr_t addr;
    uint64_t bytes_out;
    struct nb_list landed;  // writes that have landed there and are not reported to it yet
    struct nb_hmac key_out; // of messages to it; initial state
    struct nb_hmac key_in;
    struct nb_error why;
};

struct nb_ofi_lane {
    struct nb_lane base;
    struct nb_lane_config config; // its strings are NULL: they are not kept
    struct nb_ofi_lib lib;
    char name[2 * NB_OFI_NAME]; // "net/1.17"
    bool dead;                  // the endpoint is closed; only the memory is left
    bool delivery;              // writes complete when they have landed
    bool reports_arrivals;      // a message reports an arrival, not completion data
    bool local;                 // memory must be registered to be sent from
    bool virtual_addr;          // a remote address is a pointer, else an offset
    bool own_keys;              // this side chooses the keys
    bool endpoint_mr;           // registered memory is bound to the endpoint
    size_t iov_limit;
    size_t inject_max;
    uint64_t key_mask;
    struct fi_info *info;
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    struct fid_av *av;
    struct fid_wait *wait_set; // NULL if a thread can sleep on the queue itself
    struct fid_cq *cq;
    struct fid_ep *ep;
    struct nb_watch watch; // fd -1: this provider has no descriptor to wait on
    struct nb_list regions;
    struct nb_list writes; // in progress
    int landed;            // number of writes in the peers' `landed` lists
    struct nb_ofi_bounce bounces[NB_OFI_BOUNCES];
    struct nb_ofi_slot *slots; // NB_OFI_SENDS for sending, then the rest for receiving
    int slot_count;
    struct fid_mr *slots_mr;
    struct nb_list send_free;
    struct nb_list idle;  // receive slots to be posted again
    struct nb_list held;  // receive slots with a message of a peer that is not open yet
    bool held_ready;      // one of their peers has been opened since
    bool lost_due;        // a failing peer has nothing in progress any more
    bool armed;           // no call on the lane since the thread may sleep on its watch
    unsigned passed_over; // skipped calls of progress since then
    int blocked;          // number of blocked peers
    uint64_t bytes_out;
    uint64_t bytes_in;
    struct nb_ofi_peer peers[]; // by rank
};

// ofi_endpoint.c

// Opens the endpoint on the lane's interface, on the first free port of its range. lane->lib is loaded.
int nb_ofi_endpoint_open(struct nb_ofi_lane *lane, const struct nb_lane_config *config, struct nb_error *err);
// Closes all of libfabric's objects. After it returns, nothing lands and nothing completes.
void nb_ofi_endpoint_close(struct nb_ofi_lane *lane);
// Prepares a sleep on the watch: 0, or -EAGAIN if the queue must be read first; always -EAGAIN if the provider has no
// descriptor to wait on.
int nb_ofi_queue_arm(struct nb_ofi_lane *lane);

int nb_ofi_map(struct nb_lane *lane, void *base, size_t bytes, struct nb_region *region, struct nb_error *err);
void nb_ofi_unmap(struct nb_lane *lane, struct nb_region *region);

// Registers memory that only this side uses. NULL if libfabric needs no registration.
int nb_ofi_register_local(struct nb_ofi_lane *lane, void *base, size_t bytes, uint64_t access, struct fid_mr **mr,
                          struct nb_error *err);

// Copies the pieces into memory that can be sent from. -EAGAIN: all buffers are in use.
int nb_ofi_bounce_take(struct nb_ofi_lane *lane, const struct nb_request *request, struct nb_ofi_bounce **bounce);
static inline void nb_ofi_bounce_give(struct nb_ofi_bounce *bounce) {
    if (bounce != NULL) {
        bounce->busy = false;
    }
}

// ofi.c

static inline struct nb_ofi_lane *nb_ofi_lane_of(struct nb_lane *lane) {
    return NB_CONTAINER(lane, struct nb_ofi_lane, base);
}

// Sends a short message of either kind: as nb_lane_ops.message.
int nb_ofi_send_message(struct nb_ofi_lane *lane, int peer, enum wire_ofi_kind kind, const void *data, size_t bytes);
// Records that an operation for this peer failed with libfabric's code; returns the code for the caller.
int nb_ofi_peer_fail(struct nb_ofi_lane *lane, int peer, int fi_code, const char *what);

#endif
