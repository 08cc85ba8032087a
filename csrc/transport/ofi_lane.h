// Inside the libfabric lane: what ofi.c (peers, writes, completions), ofi_message.c (short messages) and
// ofi_endpoint.c (libfabric's objects, memory) share. One thread drives a lane and all of this.
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
#include "transport/ofi.h"
#include "transport/ofi_lib.h"
#include "transport/transport.h"

enum {
    NB_OFI_BOUNCES = 8, // staging buffers of a lane, made when they are first needed
    NB_OFI_CQ_SIZE = 4096,
    NB_OFI_CQ_BATCH = 16,
    NB_OFI_SENDS = 64,    // messages on their way out
    NB_OFI_RECEIVES = 64, // posted for messages, and two more for each rank
    NB_OFI_MAC = 16       // bytes of HMAC-SHA256 that a message shows
};

enum nb_ofi_kind { NB_OFI_WRITE = 1, NB_OFI_SEND, NB_OFI_RECEIVE };

// What libfabric gives back with a completion; its first bytes are libfabric's while the operation is under way. That
// of a write lies in nb_request.lane_private, that of a message in its slot.
struct nb_ofi_op {
    struct fi_context2 context;
    struct nb_list link;
    uint32_t kind;
    int32_t peer;
    struct nb_ofi_bounce *bounce;
};

struct nb_ofi_bounce {
    void *memory;
    size_t bytes;      // there are
    size_t used;       // of a request
    struct fid_mr *mr; // NULL where the provider needs none
    bool busy;
};

// A message as it travels. What the MAC proves of one with a single grant fits one block of SHA-256.
struct nb_ofi_message {
    unsigned char mac[NB_OFI_MAC]; // of what follows, by the key of this lane from the sender to this rank
    // Counts the messages of its sender to this rank on this lane: a gap is a connection that was lost, and a number
    // that was there before is a replay.
    uint64_t number;
    uint32_t rank; // of the sender
    uint8_t bytes;
    uint8_t kind; // enum nb_ofi_message_kind
    unsigned char data[NB_LANE_MESSAGE_MAX];
};

_Static_assert(NB_LANE_MESSAGE_MAX <= UINT8_MAX, "its length is a byte");

enum nb_ofi_message_kind { NB_OFI_OF_LANES, NB_OFI_OF_ARRIVALS };

enum {
    NB_OFI_HEADER = offsetof(struct nb_ofi_message, data),
    NB_OFI_PROVEN = offsetof(struct nb_ofi_message, number) // from here on the MAC proves it
};

struct nb_ofi_slot {
    struct nb_ofi_op op;
    size_t got; // bytes that came; of a message kept until its sender is known
    struct nb_ofi_message message;
    unsigned char spare[16]; // a longer message is a stranger's
};

// nb_region.handle.
struct nb_ofi_region {
    struct nb_list link;
    struct fid_mr *mr; // NULL once the lane is dead
    void *desc;
};

struct nb_ofi_peer {
    bool open;
    bool blocked; // told -EAGAIN; `writable` is owed
    bool failing; // something failed: nothing more is taken, and `lost` follows when nothing is under way
    bool told;    // `lost` was called
    bool keyed;   // the keys are there
    uint64_t messages_out;
    uint64_t messages_in;
    uint32_t under_way;
    fi_addr_t addr;
    uint64_t bytes_out;
    struct nb_list landed;  // writes that have landed there, and of which it has not been told
    struct nb_hmac key_out; // of messages to it, at their beginning
    struct nb_hmac key_in;
    struct nb_error why;
};

struct nb_ofi_lane {
    struct nb_lane base;
    struct nb_lane_config config; // its texts are NULL: they are not kept
    struct nb_ofi_lib lib;
    char name[2 * NB_OFI_NAME]; // "net/1.17"
    bool dead;                  // the endpoint is closed; only the memory is left
    bool delivery;              // writes complete when they have landed
    bool tells;                 // completion data are too short to prove an arrival: a message tells of it
    bool local;                 // memory must be registered to be sent from
    bool virtual_addr;          // a remote address is a pointer, else an offset
    bool own_keys;              // the keys are drawn here
    bool endpoint_mr;           // registered memory is bound to the endpoint
    size_t iov_limit;
    size_t inject_max;
    uint64_t key_mask;
    struct fi_info *info;
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    struct fid_av *av;
    struct fid_wait *wait_set; // NULL where the queue itself can be slept on
    struct fid_cq *cq;
    struct fid_ep *ep;
    struct nb_watch watch; // fd -1: this provider has nothing to wait on
    struct nb_list regions;
    struct nb_list writes; // under way
    int landed;            // in the peers' lists
    struct nb_ofi_bounce bounces[NB_OFI_BOUNCES];
    struct nb_ofi_slot *slots; // NB_OFI_SENDS for sending, then the rest for receiving
    int slot_count;
    struct fid_mr *slots_mr;
    struct nb_list send_free;
    struct nb_list idle;  // receive slots to be posted again
    struct nb_list held;  // receive slots with a message of a peer that is not open yet
    bool held_ready;      // one of those has been opened since
    bool lost_due;        // a failing peer has nothing under way any more
    bool armed;           // nothing was asked of the lane since the thread could sleep on its watch
    unsigned passed_over; // calls of progress since
    int blocked;          // peers
    uint64_t bytes_out;
    uint64_t bytes_in;
    struct nb_ofi_peer peers[]; // by rank
};

// ofi_endpoint.c

// Makes the endpoint on the lane's interface, on the first free port of its range. lane->lib is loaded.
int nb_ofi_endpoint_open(struct nb_ofi_lane *lane, const struct nb_lane_config *config, struct nb_error *err);
// Closes all of libfabric's objects. When it returns, nothing lands and nothing completes any more.
void nb_ofi_endpoint_close(struct nb_ofi_lane *lane);
// Whether a thread may sleep on the watch now: 0, or -EAGAIN when the queue must be read first, or always where the
// provider has nothing to wait on.
int nb_ofi_queue_arm(struct nb_ofi_lane *lane);

int nb_ofi_map(struct nb_lane *lane, void *base, size_t bytes, struct nb_region *region, struct nb_error *err);
void nb_ofi_unmap(struct nb_lane *lane, struct nb_region *region);

// Memory that only this side uses. NULL where libfabric asks for no registration.
int nb_ofi_register_local(struct nb_ofi_lane *lane, void *base, size_t bytes, uint64_t access, struct fid_mr **mr,
                          struct nb_error *err);

// A copy of the pieces in memory that can be sent from. -EAGAIN: all buffers are in use.
int nb_ofi_bounce_take(struct nb_ofi_lane *lane, const struct nb_request *request, struct nb_ofi_bounce **bounce);
static inline void nb_ofi_bounce_give(struct nb_ofi_bounce *bounce) {
    if (bounce != NULL) {
        bounce->busy = false;
    }
}

// ofi_message.c

int nb_ofi_messages_open(struct nb_ofi_lane *lane, struct nb_error *err);
void nb_ofi_messages_close(struct nb_ofi_lane *lane);
int nb_ofi_message(struct nb_lane *lane, int peer, const void *data, size_t bytes);
// The same, of either kind.
int nb_ofi_say(struct nb_ofi_lane *lane, int peer, enum nb_ofi_message_kind kind, const void *data, size_t bytes);
void nb_ofi_sent(struct nb_ofi_lane *lane, struct nb_ofi_slot *slot);
void nb_ofi_received(struct nb_ofi_lane *lane, struct nb_ofi_slot *slot, size_t bytes);
// Posts idle receives again; 0, or what libfabric says.
int nb_ofi_receives_post(struct nb_ofi_lane *lane);
// Hands on what came before its sender was opened.
void nb_ofi_held_deliver(struct nb_ofi_lane *lane);
// Derives the peer's keys, once.
void nb_ofi_keys(struct nb_ofi_lane *lane, int peer);

// ofi.c

static inline struct nb_ofi_lane *nb_ofi_lane_of(struct nb_lane *lane) {
    return NB_CONTAINER(lane, struct nb_ofi_lane, base);
}

// Whether a request for this peer can be taken: 0, or why not.
int nb_ofi_peer_check(const struct nb_ofi_lane *lane, int peer);
// Notes that `writable` is owed; returns -EAGAIN.
int nb_ofi_peer_block(struct nb_ofi_lane *lane, int peer);
// Notes that something for this peer failed with libfabric's code; returns the code for the caller.
int nb_ofi_peer_fail(struct nb_ofi_lane *lane, int peer, int fi_code, const char *what);
// A proven message of a peer tells that its writes have landed.
void nb_ofi_arrivals(struct nb_ofi_lane *lane, int peer, const void *data, size_t bytes);
// One operation less is under way.
void nb_ofi_peer_done(struct nb_ofi_lane *lane, int peer);

#endif
