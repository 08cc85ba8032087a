// Short messages of the libfabric lane: a pool of buffers to send from, a pool of posted ones to receive into, and
// what came from a peer before this side had opened it. A message whose MAC or number is wrong is dropped and counted.
#ifdef NB_HAVE_OFI

#include <errno.h>
#include <rdma/fi_errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/list.h"
#include "base/sha256.h"
#include "bootstrap/bootstrap.h"
#include "transport/ofi_lane.h"
#include "transport/transport.h"

void nb_ofi_keys(struct nb_ofi_lane *lane, int peer) {
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

static void mac_of(const struct nb_hmac *key, const struct nb_ofi_message *message, unsigned char mac[NB_OFI_MAC]) {
    struct nb_hmac hmac = *key;
    unsigned char digest[NB_SHA256_BYTES];
    nb_hmac_add(&hmac, (const unsigned char *)message + NB_OFI_PROVEN, NB_OFI_HEADER - NB_OFI_PROVEN + message->bytes);
    nb_hmac_final(&hmac, digest);
    memcpy(mac, digest, NB_OFI_MAC);
}

static void *slot_desc(const struct nb_ofi_lane *lane) {
    return lane->slots_mr != NULL ? fi_mr_desc(lane->slots_mr) : NULL;
}

int nb_ofi_messages_open(struct nb_ofi_lane *lane, struct nb_error *err) {
    int count = NB_OFI_SENDS + NB_OFI_RECEIVES + 2 * lane->config.size;
    lane->slots = calloc((size_t)count, sizeof *lane->slots);
    if (lane->slots == NULL) {
        return nb_fail(err, -ENOMEM, "lane %d: %d messages", lane->base.index, count);
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
    rc = nb_ofi_receives_post(lane);
    return rc < 0 ? nb_fail(err, rc, "lane %d: post receives with %s: %s", lane->base.index, lane->name,
                            lane->lib.strerror(-rc))
                  : 0;
}

void nb_ofi_messages_close(struct nb_ofi_lane *lane) {
    free(lane->slots);
    lane->slots = NULL;
}

int nb_ofi_receives_post(struct nb_ofi_lane *lane) {
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

int nb_ofi_message(struct nb_lane *base, int peer, const void *data, size_t bytes) {
    return nb_ofi_say(nb_ofi_lane_of(base), peer, NB_OFI_OF_LANES, data, bytes);
}

int nb_ofi_say(struct nb_ofi_lane *lane, int peer, enum nb_ofi_message_kind kind, const void *data, size_t bytes) {
    int rc = nb_ofi_peer_check(lane, peer);
    lane->armed = false;
    if (rc < 0) {
        return rc;
    }
    if (bytes > NB_LANE_MESSAGE_MAX) {
        return -EMSGSIZE;
    }
    struct nb_ofi_peer *to = &lane->peers[peer];
    bool small = NB_OFI_HEADER + bytes <= lane->inject_max;
    if (!small && nb_list_empty(&lane->send_free)) {
        return nb_ofi_peer_block(lane, peer);
    }
    struct nb_ofi_message message = {.rank = (uint32_t)lane->config.rank,
                                     .bytes = (uint8_t)bytes,
                                     .kind = (uint8_t)kind,
                                     .number = to->messages_out};
    memcpy(message.data, data, bytes);
    mac_of(&to->key_out, &message, message.mac);
    ssize_t sent;
    if (small) {
        sent = fi_inject(lane->ep, &message, NB_OFI_HEADER + bytes, to->addr);
    } else {
        struct nb_ofi_slot *slot = NB_CONTAINER(lane->send_free.next, struct nb_ofi_slot, op.link);
        slot->message = message;
        sent = fi_send(lane->ep, &slot->message, NB_OFI_HEADER + bytes, slot_desc(lane), to->addr, &slot->op);
        if (sent == 0) {
            nb_list_remove(&slot->op.link);
            slot->op.peer = peer;
            to->under_way++;
        }
    }
    if (sent == -FI_EAGAIN) {
        return nb_ofi_peer_block(lane, peer);
    }
    if (sent < 0) {
        return nb_ofi_peer_fail(lane, peer, (int)sent, "message");
    }
    to->messages_out++;
    return 0;
}

void nb_ofi_sent(struct nb_ofi_lane *lane, struct nb_ofi_slot *slot) {
    nb_list_insert(&lane->send_free, &slot->op.link);
    nb_ofi_peer_done(lane, slot->op.peer);
}

// The rank it is from, or NB_NO_PEER for what is no message of this job.
static int sender_of(struct nb_ofi_lane *lane, const struct nb_ofi_slot *slot, size_t bytes) {
    const struct nb_ofi_message *message = &slot->message;
    if (bytes < NB_OFI_HEADER || message->bytes > NB_LANE_MESSAGE_MAX ||
        bytes != (size_t)NB_OFI_HEADER + message->bytes || message->rank >= (uint32_t)lane->config.size ||
        message->rank == (uint32_t)lane->config.rank) {
        return NB_NO_PEER;
    }
    int rank = (int)message->rank;
    unsigned char mac[NB_OFI_MAC];
    nb_ofi_keys(lane, rank);
    mac_of(&lane->peers[rank].key_in, message, mac);
    return nb_bytes_equal(mac, message->mac, sizeof mac) ? rank : NB_NO_PEER;
}

// Whether a proven message is the next of its sender. An older one is a replay. A provider may make a connection anew
// without a word; what was under way on the old one is gone then.
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
    struct nb_ofi_message message = slot->message;
    nb_list_insert(&lane->idle, &slot->op.link);
    if (message.kind == NB_OFI_OF_LANES) {
        lane->config.up->message(lane->config.up_ctx, &lane->base, rank, message.data, message.bytes);
    } else if (message.kind == NB_OFI_OF_ARRIVALS) {
        nb_ofi_arrivals(lane, rank, message.data, message.bytes);
    }
}

void nb_ofi_received(struct nb_ofi_lane *lane, struct nb_ofi_slot *slot, size_t bytes) {
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

// No message overtakes an earlier one of its peer: from the opening of a peer to the end of this, all that comes is
// held, and `arm` does not let the thread sleep.
void nb_ofi_held_deliver(struct nb_ofi_lane *lane) {
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

#else
typedef int nb_ofi_message_is_empty; // ISO C wants a declaration in every file
#endif
