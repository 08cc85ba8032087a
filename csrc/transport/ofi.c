// libfabric lane: peers, short messages, writes in flight and completions of one endpoint.
#ifdef NB_HAVE_OFI

#include "transport/ofi.h"

#include <errno.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/fork.h"
#include "base/list.h"
#include "base/loop.h"
#include "base/sha256.h"
#include "base/wire.h"
#include "bootstrap/bootstrap.h"
#include "transport/ofi_lane.h"
#include "transport/ofi_lib.h"
#include "transport/transport.h"

enum { PROGRESS_ROUNDS = 8, ARMED_ROUNDS = 16 };

_Static_assert(sizeof(struct nb_ofi_op) <= sizeof(((struct nb_request *)0)->lane_private), "an op fits a request");
_Static_assert(offsetof(struct nb_request, lane_private) % _Alignof(struct nb_ofi_op) == 0, "and is aligned there");

static struct nb_ofi_op *op_of(struct nb_request *request) {
    return (struct nb_ofi_op *)(void *)request->lane_private;
}

static struct nb_request *request_of(struct nb_ofi_op *op) {
    return NB_CONTAINER(op, struct nb_request, lane_private);
}

// Peers

// Checks that a request for this peer can be accepted: 0, or the reason why not.
static int peer_check(const struct nb_ofi_lane *lane, int peer) {
    if (lane->dead) {
        return NB_ECLOSED;
    }
    if (peer < 0 || peer >= lane->config.size || !lane->peers[peer].open) {
        return -ENOTCONN;
    }
    return lane->peers[peer].failing ? lane->peers[peer].why.code : 0;
}

// Records that `writable` must be called; returns -EAGAIN.
static int peer_block(struct nb_ofi_lane *lane, int peer) {
    if (!lane->peers[peer].blocked) {
        lane->peers[peer].blocked = true;
        lane->blocked++;
    }
    return -EAGAIN;
}

int nb_ofi_peer_fail(struct nb_ofi_lane *lane, int peer, int fi_code, const char *what) {
    struct nb_ofi_peer *at = &lane->peers[peer];
    at->failing = true;
    lane->lost_due = lane->lost_due || at->under_way == 0;
    return nb_fail_peer(&at->why, NB_EPEER, peer, "lane %d (%s): %s to rank %d: %s", lane->base.index, lane->name, what,
                        peer, lane->lib.strerror(fi_code < 0 ? -fi_code : fi_code));
}

// Counts the end of one operation in progress.
static void peer_done(struct nb_ofi_lane *lane, int peer) {
    struct nb_ofi_peer *at = &lane->peers[peer];
    at->under_way--;
    lane->lost_due = lane->lost_due || (at->failing && at->under_way == 0);
}

// Derives the peer's keys, once.
static void peer_keys(struct nb_ofi_lane *lane, int peer) {
    struct nb_ofi_peer *at = &lane->peers[peer];
    unsigned char key[NB_TOKEN_BYTES];
    char purpose[32];
    if (at->keyed) {
        return;
    }
    snprintf(purpose, sizeof purpose, "ofi messages, lane %d", lane->base.index);
    nb_boot_token(lane->config.boot, purpose, lane->config.rank, peer, key);
    nb_hmac_init(&at->key_out, key, sizeof key);
    nb_boot_token(lane->config.boot, purpose, peer, lane->config.rank, key);
    nb_hmac_init(&at->key_in, key, sizeof key);
    explicit_bzero(key, sizeof key);
    at->keyed = true;
}

static void report_lost(struct nb_ofi_lane *lane) {
    lane->lost_due = false;
    for (int i = 0; i < lane->config.size && !lane->dead; i++) {
        struct nb_ofi_peer *at = &lane->peers[i];
        if (at->open && at->failing && !at->lost_reported && at->under_way == 0) {
            at->lost_reported = true;
            lane->config.up->lost(lane->config.up_ctx, &lane->base, i, &at->why);
        }
    }
}

// Completes writes that can no longer be reported to the peer.
static void landed_drop(struct nb_ofi_lane *lane, int peer, int code) {
    struct nb_list *landed = &lane->peers[peer].landed;
    while (!nb_list_empty(landed)) {
        struct nb_ofi_op *op = NB_CONTAINER(landed->next, struct nb_ofi_op, link);
        nb_list_remove(&op->link);
        lane->landed--;
        lane->config.up->sent(lane->config.up_ctx, &lane->base, request_of(op), code);
    }
}

// Closes the endpoint for all peers, and reports the loss to all but `silent`.
static void lane_kill(struct nb_ofi_lane *lane, int silent, int code, const char *text) {
    const struct nb_lane_up *up = lane->config.up;
    lane->dead = true;
    nb_ofi_endpoint_close(lane);
    nb_fork_disown_sockets(lane);
    while (!nb_list_empty(&lane->writes)) {
        struct nb_ofi_op *op = NB_CONTAINER(lane->writes.next, struct nb_ofi_op, link);
        nb_list_remove(&op->link);
        up->sent(lane->config.up_ctx, &lane->base, request_of(op), code);
    }
    for (int i = 0; i < lane->config.size; i++) {
        landed_drop(lane, i, code);
    }
    for (int i = 0; i < lane->config.size; i++) {
        struct nb_ofi_peer *at = &lane->peers[i];
        if (at->open && !at->lost_reported && i != silent) {
            at->lost_reported = true;
            nb_fail_peer(&at->why, code, i, "lane %d (%s): %s", lane->base.index, lane->name, text);
            up->lost(lane->config.up_ctx, &lane->base, i, &at->why);
        }
    }
}

static int peer_open(struct nb_lane *base, int peer, const unsigned char *addr, size_t bytes, struct nb_error *err) {
    struct nb_ofi_lane *lane = nb_ofi_lane_of(base);
    struct wire_ofi_address at;
    if (lane->dead) {
        return nb_fail_peer(err, NB_ECLOSED, peer, "lane %d is closed", base->index);
    }
    if (peer < 0 || peer >= lane->config.size || peer == lane->config.rank || lane->peers[peer].open) {
        return nb_fail(err, -EINVAL, "lane %d: rank %d cannot be opened", base->index, peer);
    }
    if (bytes != sizeof at) {
        return nb_fail_peer(err, NB_EWIRE, peer, "lane %d: rank %d's address has %zu bytes", base->index, peer, bytes);
    }
    memcpy(&at, addr, sizeof at);
    at.lane[sizeof at.lane - 1] = '\0';
    if (at.magic != NB_WIRE_OFI_MAGIC || at.bytes == 0 || at.bytes > sizeof at.name) {
        return nb_fail_peer(err, NB_EWIRE, peer, "lane %d: rank %d's address is not a libfabric address", base->index,
                            peer);
    }
    if (strncmp(at.lane, lane->name, sizeof at.lane - 1) != 0) {
        return nb_fail_peer(err, NB_EMISMATCH, peer, "lane %d: %s here, %s at rank %d", base->index, lane->name,
                            at.lane, peer);
    }
    struct nb_ofi_peer *to = &lane->peers[peer];
    int rc = fi_av_insert(lane->av, at.name, 1, &to->addr, 0, NULL);
    if (rc != 1) {
        return nb_fail_peer(err, rc < 0 ? rc : -EINVAL, peer, "lane %d (%s): rank %d's address: %s", base->index,
                            lane->name, peer, rc < 0 ? lane->lib.strerror(-rc) : "refused");
    }
    nb_fork_own_sockets(lane, at.name, at.bytes);
    peer_keys(lane, peer);
    to->open = true;
    lane->lost_due = lane->lost_due || to->failing; // some of its messages were lost before
    lane->held_ready = !nb_list_empty(&lane->held);
    lane->armed = false;
    return 0;
}

static bool peer_ready(const struct nb_lane *base, int peer) {
    return peer_check(NB_CONTAINER(base, const struct nb_ofi_lane, base), peer) == 0;
}

static void peer_close(struct nb_lane *base, int peer) {
    struct nb_ofi_lane *lane = nb_ofi_lane_of(base);
    if (lane->dead || peer < 0 || peer >= lane->config.size || !lane->peers[peer].open) {
        return;
    }
    char text[64];
    snprintf(text, sizeof text, "closed to end the flow with rank %d", peer);
    lane_kill(lane, peer, NB_ECLOSED, text);
}

// Messages: a pool of send buffers, and a pool of posted receive buffers

static void mac_of(const struct nb_hmac *key, const struct wire_ofi_message *message,
                   unsigned char mac[NB_WIRE_OFI_MAC_BYTES]) {
    struct nb_hmac hmac = *key;
    unsigned char digest[NB_SHA256_BYTES];
    nb_hmac_add(&hmac, (const unsigned char *)message + NB_WIRE_OFI_PROVEN,
                NB_WIRE_OFI_HEADER - NB_WIRE_OFI_PROVEN + message->bytes);
    nb_hmac_final(&hmac, digest);
    memcpy(mac, digest, NB_WIRE_OFI_MAC_BYTES);
}

static void *slot_desc(const struct nb_ofi_lane *lane) {
    return lane->slots_mr != NULL ? fi_mr_desc(lane->slots_mr) : NULL;
}

// Posts idle receive buffers again; 0, or libfabric's code.
static int receives_post(struct nb_ofi_lane *lane) {
    NB_LIST_EACH_SAFE(it, next, &lane->idle) {
        struct nb_ofi_slot *slot = NB_CONTAINER(it, struct nb_ofi_slot, op.link);
        size_t room = sizeof slot->message + sizeof slot->spare;
        ssize_t rc = fi_recv(lane->ep, &slot->message, room, slot_desc(lane), FI_ADDR_UNSPEC, &slot->op);
        if (rc < 0) {
            return rc == -FI_EAGAIN ? 0 : (int)rc;
        }
        nb_list_remove(it);
    }
    return 0;
}

static int messages_open(struct nb_ofi_lane *lane, struct nb_error *err) {
    int count = NB_OFI_SENDS + NB_OFI_RECEIVES + 2 * lane->config.size;
    lane->slots = calloc((size_t)count, sizeof *lane->slots);
    if (lane->slots == NULL) {
        return nb_fail(err, -ENOMEM, "lane %d: cannot allocate %d messages", lane->base.index, count);
    }
    lane->slot_count = count;
    for (int i = 0; i < count; i++) {
        struct nb_ofi_slot *slot = &lane->slots[i];
        slot->op.kind = i < NB_OFI_SENDS ? NB_OFI_SEND : NB_OFI_RECEIVE;
        nb_list_init(&slot->op.link);
        nb_list_insert(i < NB_OFI_SENDS ? &lane->send_free : &lane->idle, &slot->op.link);
    }
    int rc = nb_ofi_register_local(lane, lane->slots, (size_t)count * sizeof *lane->slots, FI_SEND | FI_RECV,
                                   &lane->slots_mr, err);
    if (rc < 0) {
        return rc;
    }
    rc = receives_post(lane);
    return rc < 0 ? nb_fail(err, rc, "lane %d: post receives with %s: %s", lane->base.index, lane->name,
                            lane->lib.strerror(-rc))
                  : 0;
}

static void messages_close(struct nb_ofi_lane *lane) {
    free(lane->slots);
    lane->slots = NULL;
}

int nb_ofi_send_message(struct nb_ofi_lane *lane, int peer, enum wire_ofi_kind kind, const void *data, size_t bytes) {
    int rc = peer_check(lane, peer);
    lane->armed = false;
    if (rc < 0) {
        return rc;
    }
    if (bytes > NB_LANE_MESSAGE_MAX) {
        return -EMSGSIZE;
    }
    struct nb_ofi_peer *to = &lane->peers[peer];
    bool small = NB_WIRE_OFI_HEADER + bytes <= lane->inject_max;
    if (!small && nb_list_empty(&lane->send_free)) {
        return peer_block(lane, peer);
    }
    struct wire_ofi_message message = {.rank = (uint32_t)lane->config.rank,
                                       .bytes = (uint8_t)bytes,
                                       .kind = (uint8_t)kind,
                                       .number = to->messages_out};
    memcpy(message.data, data, bytes);
    mac_of(&to->key_out, &message, message.mac);
    ssize_t sent;
    if (small) {
        sent = fi_inject(lane->ep, &message, NB_WIRE_OFI_HEADER + bytes, to->addr);
    } else {
        struct nb_ofi_slot *slot = NB_CONTAINER(lane->send_free.next, struct nb_ofi_slot, op.link);
        slot->message = message;
        sent = fi_send(lane->ep, &slot->message, NB_WIRE_OFI_HEADER + bytes, slot_desc(lane), to->addr, &slot->op);
        if (sent == 0) {
            nb_list_remove(&slot->op.link);
            slot->op.peer = peer;
            to->under_way++;
        }
    }
    if (sent == -FI_EAGAIN) {
        return peer_block(lane, peer);
    }
    if (sent < 0) {
        return nb_ofi_peer_fail(lane, peer, (int)sent, "message");
    }
    to->messages_out++;
    return 0;
}

static int message(struct nb_lane *base, int peer, const void *data, size_t bytes) {
    return nb_ofi_send_message(nb_ofi_lane_of(base), peer, NB_WIRE_OFI_OF_LANES, data, bytes);
}

static void message_sent(struct nb_ofi_lane *lane, struct nb_ofi_slot *slot) {
    nb_list_insert(&lane->send_free, &slot->op.link);
    peer_done(lane, slot->op.peer);
}

// Writes

struct write {
    struct fi_msg_rma msg;
    struct nb_ofi_bounce *bounce;
    struct iovec staged;
    void *desc[NB_LANE_IOV_MAX];
};

// Chooses the source of a write: the request's memory, or a copy if that memory is not registered or has more pieces
// than the provider accepts.
static int write_source(struct nb_ofi_lane *lane, const struct nb_request *request, struct write *write) {
    const struct nb_ofi_region *region = request->local_region[0];
    struct fi_msg_rma *msg = &write->msg;
    msg->msg_iov = request->iov;
    msg->iov_count = (size_t)request->iov_count;
    if (msg->iov_count <= lane->iov_limit && (region != NULL || !lane->local)) {
        for (size_t i = 0; region != NULL && i < msg->iov_count; i++) {
            write->desc[i] = region->desc;
        }
        return 0;
    }
    int rc = nb_ofi_bounce_take(lane, request, &write->bounce);
    if (rc < 0) {
        return rc;
    }
    write->staged = (struct iovec){.iov_base = write->bounce->memory, .iov_len = write->bounce->used};
    msg->msg_iov = &write->staged;
    msg->iov_count = 1;
    write->desc[0] = write->bounce->mr != NULL ? fi_mr_desc(write->bounce->mr) : NULL;
    return 0;
}

static uint64_t write_flags(const struct nb_ofi_lane *lane) {
    return FI_COMPLETION | (lane->reports_arrivals ? 0 : FI_REMOTE_CQ_DATA) |
           (lane->delivery ? FI_DELIVERY_COMPLETE : 0);
}

static int post(struct nb_lane *base, struct nb_request *request) {
    struct nb_ofi_lane *lane = nb_ofi_lane_of(base);
    int rc = peer_check(lane, request->peer);
    lane->armed = false;
    if (rc < 0) {
        return rc;
    }
    struct write write = {.bounce = NULL};
    rc = write_source(lane, request, &write);
    if (rc < 0) {
        return rc == -EAGAIN ? peer_block(lane, request->peer)
                             : nb_ofi_peer_fail(lane, request->peer, rc, "memory for a write");
    }
    struct nb_ofi_peer *to = &lane->peers[request->peer];
    struct fi_rma_iov remote = {.addr = request->remote_addr, .key = request->remote_key};
    for (size_t i = 0; i < write.msg.iov_count; i++) {
        remote.len += write.msg.msg_iov[i].iov_len;
    }
    struct nb_ofi_op *op = op_of(request);
    *op = (struct nb_ofi_op){.kind = NB_OFI_WRITE, .peer = request->peer, .bounce = write.bounce};
    write.msg.desc = write.desc;
    write.msg.addr = to->addr;
    write.msg.rma_iov = &remote;
    write.msg.rma_iov_count = 1;
    write.msg.context = op;
    write.msg.data = lane->reports_arrivals ? 0 : nb_frame_pack(&request->frame);
    ssize_t posted = fi_writemsg(lane->ep, &write.msg, write_flags(lane));
    if (posted < 0) {
        nb_ofi_bounce_give(write.bounce);
        return posted == -FI_EAGAIN ? peer_block(lane, request->peer)
                                    : nb_ofi_peer_fail(lane, request->peer, (int)posted, "write");
    }
    nb_list_init(&op->link);
    nb_list_insert(&lane->writes, &op->link);
    to->under_way++;
    return 0;
}

// Completes a write that is in no list any more.
static void write_over(struct nb_ofi_lane *lane, struct nb_ofi_op *op, int code) {
    struct nb_request *request = request_of(op);
    if (code == 0) {
        lane->peers[op->peer].bytes_out += request->frame.bytes;
        lane->bytes_out += request->frame.bytes;
    }
    peer_done(lane, op->peer);
    lane->config.up->sent(lane->config.up_ctx, &lane->base, request, code);
}

static void write_done(struct nb_ofi_lane *lane, struct nb_ofi_op *op, int fi_code) {
    int code = fi_code != 0 ? nb_ofi_peer_fail(lane, op->peer, fi_code, "write") : 0;
    nb_list_remove(&op->link);
    nb_ofi_bounce_give(op->bounce);
    if (code == 0 && lane->reports_arrivals) {
        nb_list_insert(&lane->peers[op->peer].landed, &op->link);
        lane->landed++;
        return;
    }
    write_over(lane, op, code);
}

// Reports to a peer which writes have landed there; they are complete once libfabric accepts the message.
static void peer_report(struct nb_ofi_lane *lane, int peer) {
    struct nb_list *landed = &lane->peers[peer].landed;
    while (!lane->dead && !nb_list_empty(landed)) {
        struct wire_ofi_arrival arrivals[NB_WIRE_OFI_ARRIVALS];
        size_t count = 0;
        NB_LIST_EACH(it, landed) {
            const struct nb_frame *frame = &request_of(NB_CONTAINER(it, struct nb_ofi_op, link))->frame;
            if (count == NB_WIRE_OFI_ARRIVALS) {
                break;
            }
            arrivals[count++] = (struct wire_ofi_arrival){.frame = nb_frame_pack(frame), .bytes = frame->bytes};
        }
        int rc = nb_ofi_send_message(lane, peer, NB_WIRE_OFI_OF_ARRIVALS, arrivals, count * sizeof arrivals[0]);
        if (rc == -EAGAIN) {
            return;
        }
        for (; count > 0 && !lane->dead; count--) {
            struct nb_ofi_op *op = NB_CONTAINER(landed->next, struct nb_ofi_op, link);
            nb_list_remove(&op->link);
            lane->landed--;
            write_over(lane, op, rc);
        }
    }
}

static void report_landed(struct nb_ofi_lane *lane) {
    for (int i = 0; i < lane->config.size && lane->landed > 0; i++) {
        peer_report(lane, i);
    }
}

static void arrived(struct nb_ofi_lane *lane, int peer, uint64_t bits, size_t bytes) {
    struct nb_frame frame = {0};
    uint64_t refused = lane->base.refused;
    nb_frame_unpack(bits, &frame);
    lane->config.up->landed(lane->config.up_ctx, &lane->base, peer, &frame);
    lane->bytes_in += lane->base.refused == refused ? bytes : 0;
}

// Handles a peer's authenticated message that its writes have landed.
static void arrivals(struct nb_ofi_lane *lane, int peer, const void *data, size_t bytes) {
    struct wire_ofi_arrival arrival;
    for (size_t at = 0; at + sizeof arrival <= bytes && !lane->dead; at += sizeof arrival) {
        memcpy(&arrival, (const char *)data + at, sizeof arrival);
        arrived(lane, peer, arrival.frame, arrival.bytes);
    }
}

// Received messages. One with a wrong MAC or number is dropped and counted

// The sender's rank, or NB_NO_PEER for a message that is not of this job.
static int sender_of(struct nb_ofi_lane *lane, const struct nb_ofi_slot *slot, size_t bytes) {
    const struct wire_ofi_message *message = &slot->message;
    if (bytes < NB_WIRE_OFI_HEADER || message->bytes > NB_LANE_MESSAGE_MAX ||
        bytes != (size_t)NB_WIRE_OFI_HEADER + message->bytes || message->rank >= (uint32_t)lane->config.size ||
        message->rank == (uint32_t)lane->config.rank) {
        return NB_NO_PEER;
    }
    int rank = (int)message->rank;
    unsigned char mac[NB_WIRE_OFI_MAC_BYTES];
    peer_keys(lane, rank);
    mac_of(&lane->peers[rank].key_in, message, mac);
    return nb_bytes_equal(mac, message->mac, sizeof mac) ? rank : NB_NO_PEER;
}

// True if an authenticated message is the next of its sender. An older one is a replay. A gap means that the provider
// has silently reconnected and lost what was in flight on the old connection.
static bool is_next(struct nb_ofi_lane *lane, int rank, uint64_t number) {
    struct nb_ofi_peer *at = &lane->peers[rank];
    if (number < at->messages_in) {
        lane->base.refused++;
        return false;
    }
    if (number > at->messages_in) {
        if (!at->failing) {
            nb_ofi_peer_fail(lane, rank, FI_ECONNABORTED, "messages were lost");
        }
        return false;
    }
    at->messages_in++;
    return true;
}

static void deliver(struct nb_ofi_lane *lane, struct nb_ofi_slot *slot, int rank) {
    struct wire_ofi_message message = slot->message;
    nb_list_insert(&lane->idle, &slot->op.link);
    if (message.kind == NB_WIRE_OFI_OF_LANES) {
        lane->config.up->message(lane->config.up_ctx, &lane->base, rank, message.data, message.bytes);
    } else if (message.kind == NB_WIRE_OFI_OF_ARRIVALS) {
        arrivals(lane, rank, message.data, message.bytes);
    }
}

static void message_received(struct nb_ofi_lane *lane, struct nb_ofi_slot *slot, size_t bytes) {
    int rank = sender_of(lane, slot, bytes);
    if (rank == NB_NO_PEER) {
        lane->base.refused++;
    }
    if (rank == NB_NO_PEER || !is_next(lane, rank, slot->message.number)) {
        nb_list_insert(&lane->idle, &slot->op.link);
    } else if (!lane->peers[rank].open || lane->held_ready) {
        slot->op.peer = rank;
        nb_list_insert(&lane->held, &slot->op.link);
    } else {
        deliver(lane, slot, rank);
    }
}

// Delivers held messages in order. From the opening of a peer to the end of this function, all messages that arrive are
// held, and `arm` does not let the thread sleep.
static void held_deliver(struct nb_ofi_lane *lane) {
    lane->held_ready = false;
    NB_LIST_EACH_SAFE(it, next, &lane->held) {
        struct nb_ofi_slot *slot = NB_CONTAINER(it, struct nb_ofi_slot, op.link);
        if (lane->peers[slot->op.peer].open) {
            nb_list_remove(it);
            deliver(lane, slot, slot->op.peer);
            if (lane->dead) {
                return;
            }
        }
    }
}

// Completions

static void complete(struct nb_ofi_lane *lane, const struct fi_cq_data_entry *entry) {
    if ((entry->flags & FI_REMOTE_WRITE) != 0) { // from anybody who knows this endpoint's address
        if ((entry->flags & FI_REMOTE_CQ_DATA) != 0 && !lane->reports_arrivals) {
            arrived(lane, NB_NO_PEER, entry->data, entry->len);
        } else {
            lane->base.refused++;
        }
        return;
    }
    struct nb_ofi_op *op = entry->op_context;
    if (op == NULL) {
        lane->base.refused++;
    } else if (op->kind == NB_OFI_WRITE) {
        write_done(lane, op, 0);
    } else if (op->kind == NB_OFI_SEND) {
        message_sent(lane, NB_CONTAINER(op, struct nb_ofi_slot, op));
    } else {
        message_received(lane, NB_CONTAINER(op, struct nb_ofi_slot, op), entry->len);
    }
}

// Reads one failure. A peer's write that failed on arrival has no operation here: its sender gets the error.
static int complete_error(struct nb_ofi_lane *lane) {
    union {
        struct fi_cq_err_entry entry;
        unsigned char room[2 * sizeof(struct fi_cq_err_entry)]; // a newer libfabric may have more fields
    } failure;
    memset(&failure, 0, sizeof failure);
    ssize_t rc = fi_cq_readerr(lane->cq, &failure.entry, 0);
    if (rc < 0) {
        return rc == -FI_EAGAIN ? 0 : (int)rc;
    }
    struct nb_ofi_op *op = failure.entry.op_context;
    int code = failure.entry.err != 0 ? failure.entry.err : FI_EOTHER;
    if (op == NULL || (failure.entry.flags & FI_REMOTE_WRITE) != 0) {
        return 1;
    }
    if (op->kind == NB_OFI_WRITE) {
        write_done(lane, op, code);
    } else if (op->kind == NB_OFI_SEND) {
        nb_ofi_peer_fail(lane, op->peer, code, "message");
        message_sent(lane, NB_CONTAINER(op, struct nb_ofi_slot, op));
    } else {
        lane->base.refused += code == FI_ETRUNC; // longer than any message of ours
        nb_list_insert(&lane->idle, &op->link);
    }
    return 1;
}

// Returns a count, or libfabric's code if the queue no longer works.
static int read_queue(struct nb_ofi_lane *lane) {
    struct fi_cq_data_entry entries[NB_OFI_CQ_BATCH];
    ssize_t count = fi_cq_read(lane->cq, entries, NB_OFI_CQ_BATCH);
    if (count == -FI_EAVAIL) {
        return complete_error(lane);
    }
    if (count < 0) {
        return count == -FI_EAGAIN ? 0 : (int)count;
    }
    for (ssize_t i = 0; i < count && !lane->dead; i++) {
        complete(lane, &entries[i]);
    }
    return (int)count;
}

static void report_writable(struct nb_ofi_lane *lane) {
    for (int i = 0; i < lane->config.size && lane->blocked > 0 && !lane->dead; i++) {
        if (lane->peers[i].blocked) {
            lane->peers[i].blocked = false;
            lane->blocked--;
            lane->config.up->writable(lane->config.up_ctx, &lane->base, i);
        }
    }
}

static int progress_now(struct nb_ofi_lane *lane) {
    int total = 0;
    lane->armed = false;
    int rc = 0;
    if (lane->held_ready && !lane->dead) {
        held_deliver(lane);
    }
    for (int i = 0; i < PROGRESS_ROUNDS && !lane->dead; i++) {
        rc = read_queue(lane);
        if (rc <= 0) {
            break;
        }
        total += rc;
    }
    if (rc >= 0 && !lane->dead) {
        rc = receives_post(lane);
    }
    if (lane->landed > 0 && !lane->dead) {
        report_landed(lane);
    }
    if (rc < 0 && !lane->dead) {
        lane_kill(lane, NB_NO_PEER, NB_EPEER, lane->lib.strerror(-rc));
    }
    if (lane->blocked > 0) {
        report_writable(lane);
    }
    if (lane->lost_due) {
        report_lost(lane);
    }
    return total;
}

// The watch of an armed lane reports work, so that idle lanes cost nothing beside busy ones. Now and then the lane is
// polled all the same: a provider may miss a wake-up, which must not stall a transfer.
static int progress(struct nb_lane *base) {
    struct nb_ofi_lane *lane = nb_ofi_lane_of(base);
    return lane->armed && ++lane->passed_over % ARMED_ROUNDS != 0 ? 0 : progress_now(lane);
}

static void ready(struct nb_watch *watch, uint32_t events) {
    struct nb_ofi_lane *lane = NB_CONTAINER(watch, struct nb_ofi_lane, watch);
    (void)events;
    if (progress_now(lane) == 0) {
        nb_loop_count_empty(lane->config.loop); // arming it clears the descriptor
    }
}

static int watch(struct nb_lane *base, struct nb_error *err) {
    struct nb_ofi_lane *lane = nb_ofi_lane_of(base);
    return lane->watch.fd < 0 ? 0 : nb_loop_add(lane->config.loop, &lane->watch, EPOLLIN, err);
}

// True if a peer accepts nothing although nothing is in flight to it: it is connecting. That causes no completion, and
// arming the queue may be what completes it, so the thread polls until then.
static bool is_connecting(const struct nb_ofi_lane *lane) {
    for (int i = 0; i < lane->config.size && lane->blocked > 0; i++) {
        if (lane->peers[i].blocked && lane->peers[i].under_way == 0) {
            return true;
        }
    }
    return false;
}

static int arm(struct nb_lane *base) {
    struct nb_ofi_lane *lane = nb_ofi_lane_of(base);
    if (lane->dead) {
        return 0;
    }
    bool owed = lane->held_ready || lane->lost_due || lane->landed > 0 || !nb_list_empty(&lane->idle);
    if (owed || is_connecting(lane)) {
        return -EAGAIN;
    }
    lane->armed = lane->armed || nb_ofi_queue_arm(lane) == 0;
    return lane->armed ? 0 : -EAGAIN;
}

// The lane

static void lane_close(struct nb_lane *base) {
    if (base == NULL) {
        return;
    }
    struct nb_ofi_lane *lane = nb_ofi_lane_of(base);
    lane->dead = true;
    nb_ofi_endpoint_close(lane);
    nb_fork_disown_sockets(lane);
    while (!nb_list_empty(&lane->regions)) {
        struct nb_region region = {.handle = NB_CONTAINER(lane->regions.next, struct nb_ofi_region, link)};
        nb_ofi_unmap(base, &region);
    }
    messages_close(lane);
    free(lane);
}

static int lane_check(const struct nb_lane_config *config, struct nb_error *err) {
    struct nb_ofi_lib lib;
    struct fi_info *info = NULL;
    bool delivery = false;
    int rc = nb_ofi_lib_open(&lib, config->library, err);
    if (rc < 0) {
        return rc;
    }
    rc = nb_ofi_info_get(&lib, config->provider, &config->bind, &info, &delivery, err);
    if (rc == 0) {
        lib.freeinfo(info);
    }
    return rc;
}

static int lane_open(const struct nb_lane_config *config, struct nb_lane **out, struct nb_error *err) {
    struct nb_ofi_lane *lane = calloc(1, sizeof *lane + (size_t)config->size * sizeof lane->peers[0]);
    if (lane == NULL) {
        return nb_fail(err, -ENOMEM, "cannot allocate lane %d", config->index);
    }
    lane->base = (struct nb_lane){.ops = &nb_ofi_ops, .index = config->index};
    lane->config = *config;
    lane->config.provider = NULL;
    lane->config.library = NULL;
    lane->config.congestion = NULL;
    lane->watch = (struct nb_watch){.fd = -1, .ready = ready};
    nb_list_init(&lane->regions);
    nb_list_init(&lane->writes);
    nb_list_init(&lane->send_free);
    nb_list_init(&lane->idle);
    nb_list_init(&lane->held);
    for (int i = 0; i < config->size; i++) {
        nb_list_init(&lane->peers[i].landed);
    }
    int rc = nb_ofi_lib_open(&lane->lib, config->library, err);
    if (rc == 0) {
        rc = nb_ofi_endpoint_open(lane, config, err);
    }
    if (rc == 0) {
        rc = messages_open(lane, err);
    }
    if (rc < 0) {
        lane_close(&lane->base);
        return rc;
    }
    *out = &lane->base;
    return 0;
}

static void address(const struct nb_lane *base, unsigned char addr[NB_LANE_ADDR_MAX], size_t *bytes) {
    const struct nb_ofi_lane *lane = NB_CONTAINER(base, const struct nb_ofi_lane, base);
    struct wire_ofi_address at = {.magic = NB_WIRE_OFI_MAGIC};
    size_t length = sizeof at.name;
    // An address that is missing or too long has zero bytes: the peers refuse it and name its rank.
    if (!lane->dead && fi_getname(&lane->ep->fid, at.name, &length) == 0 && length <= sizeof at.name) {
        at.bytes = (uint32_t)length;
        nb_fork_own_sockets(lane, at.name, length);
    }
    snprintf(at.lane, sizeof at.lane, "%.*s", (int)sizeof at.lane - 1, lane->name);
    memcpy(addr, &at, sizeof at);
    *bytes = sizeof at;
}

static void resume(struct nb_lane *base, int peer) {
    (void)base; // nothing is ever put off: the peer writes only what is granted
    (void)peer;
}

// Bytes that landed are known per peer only if there is one peer.
static void stats(const struct nb_lane *base, int peer, struct nb_lane_stats *out) {
    const struct nb_ofi_lane *lane = NB_CONTAINER(base, const struct nb_ofi_lane, base);
    bool known = peer >= 0 && peer < lane->config.size;
    bool alone = true;
    for (int i = 0; i < lane->config.size; i++) {
        alone = alone && (i == peer || !lane->peers[i].open);
    }
    out->bytes_out = known ? lane->peers[peer].bytes_out : lane->bytes_out;
    out->bytes_in = known && !alone ? 0 : lane->bytes_in;
}

static const char *describe(const struct nb_lane *base) {
    return NB_CONTAINER(base, const struct nb_ofi_lane, base)->name;
}

const struct nb_lane_ops nb_ofi_ops = {
    .name = "ofi",
    .kind = NB_LANE_RMA,
    .check = lane_check,
    .open = lane_open,
    .address = address,
    .peer_open = peer_open,
    .peer_ready = peer_ready,
    .peer_close = peer_close,
    .map = nb_ofi_map,
    .unmap = nb_ofi_unmap,
    .post = post,
    .message = message,
    .resume = resume,
    .progress = progress,
    .watch = watch,
    .arm = arm,
    .stats = stats,
    .describe = describe,
    .close = lane_close,
};

#else
typedef int nb_ofi_is_empty; // ISO C wants a declaration in every file
#endif
