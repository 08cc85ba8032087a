// Credits on RMA lanes: a sender writes only where the receiver granted memory. Data to be placed go straight to their
// final address if that memory is registered. Data to be reduced, and those without registered memory, go to a bounded
// staging pool of this rank, whose buffers are granted again after they are emptied.
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/arena.h"
#include "base/bits.h"
#include "base/error.h"
#include "base/list.h"
#include "base/pool.h"
#include "base/sha256.h"
#include "base/wire.h"
#include "transport/credits.h"
#include "transport/lanes.h"
#include "transport/lanes_internal.h"
#include "transport/transport.h"

int nb_credits_init(struct nb_lanes *lanes, struct nb_error *err) {
    if (!nb_is_rma(lanes)) {
        return 0;
    }
    lanes->rma = calloc(1, sizeof *lanes->rma);
    if (lanes->rma == NULL) {
        return nb_fail(err, -ENOMEM, "cannot allocate credits of %d lanes", lanes->config.lanes);
    }
    nb_list_init(&lanes->rma->inbound);
    nb_pool_init(&lanes->rma->credits, sizeof(struct credit));
    lanes->rma->buffer_bytes = NB_SCRATCH_BYTES(lanes->config.segment_bytes);
    return 0;
}

static void peer_fini(struct nb_lanes *lanes, struct rma_peer *rma) {
    for (int i = 0; i < lanes->config.lanes && lanes->lane[i] != NULL; i++) {
        if (rma->staging_region[i].handle != NULL) {
            lanes->lane[i]->ops->unmap(lanes->lane[i], &rma->staging_region[i]);
        }
    }
    free(rma->queue);
    nb_arena_close(&rma->staging);
    free(rma);
}

void nb_credits_fini(struct nb_lanes *lanes) {
    if (!nb_is_rma(lanes) || lanes->rma == NULL) {
        return;
    }
    for (int p = 0; lanes->peers != NULL && p < lanes->config.lane.size; p++) {
        for (int i = 0; lanes->peers[p].paths != NULL && i < lanes->config.lanes; i++) {
            lanes->lane[i]->ops->peer_close(lanes->lane[i], p);
        }
        if (lanes->peers[p].rma != NULL) {
            peer_fini(lanes, lanes->peers[p].rma);
        }
    }
    for (int m = 0; m < lanes->rma->mapped_count; m++) {
        nb_lanes_unmap(lanes, lanes->rma->mapped[m].base);
    }
    nb_pool_fini(&lanes->rma->credits);
    free(lanes->rma);
}

// Tells the peer, on each lane, how to write to a region over that lane.
static void announce(struct nb_lanes *lanes, int peer_rank, int region) {
    struct rma_peer *rma = lanes->peers[peer_rank].rma;
    const struct mapped *mapped = region == STAGING_REGION ? NULL : &lanes->rma->mapped[region - 1];
    const struct nb_region *local = mapped == NULL ? rma->staging_region : mapped->region;
    if (mapped != NULL && mapped->base == NULL) {
        return;
    }
    for (int i = 0; i < lanes->config.lanes; i++) {
        if ((rma->announced[region] >> i & 1) != 0 || !lanes->peers[peer_rank].paths[i].open) {
            continue;
        }
        struct wire_region message = {.type = NB_MESSAGE_REGION,
                                      .region = (uint8_t)region,
                                      .lane = (uint16_t)i,
                                      .life = mapped == NULL ? 0 : mapped->life,
                                      .key = local[i].key,
                                      .addr = local[i].addr};
        if (lanes->lane[i]->ops->message(lanes->lane[i], peer_rank, &message, sizeof message) == 0) {
            rma->announced[region] |= (uint64_t)1 << i;
        }
    }
}

static size_t queue_send(struct nb_lanes *lanes, int peer_rank) {
    struct rma_peer *rma = lanes->peers[peer_rank].rma;
    size_t sent = 0;
    while (sent < rma->queue_count) {
        struct wire_credits message = {.type = NB_MESSAGE_CREDITS};
        size_t n = rma->queue_count - sent;
        n = n < NB_WIRE_CREDITS ? n : NB_WIRE_CREDITS;
        message.count = (uint8_t)n;
        memcpy(message.credits, rma->queue + sent, n * sizeof message.credits[0]);
        if (nb_lanes_send_message(lanes, peer_rank, &message, NB_WIRE_CREDITS_BYTES(n)) < 0) {
            break;
        }
        sent += n;
    }
    return sent;
}

void nb_credits_flush(struct nb_lanes *lanes, int peer_rank) {
    if (!nb_is_rma(lanes) || lanes->peers[peer_rank].rma == NULL) {
        return;
    }
    struct rma_peer *rma = lanes->peers[peer_rank].rma;
    for (int region = 0; region <= lanes->rma->mapped_count; region++) {
        announce(lanes, peer_rank, region);
    }
    size_t sent = queue_send(lanes, peer_rank);
    rma->queue_count -= sent;
    if (rma->queue_count == 0) {
        return;
    }
    memmove(rma->queue, rma->queue + sent, rma->queue_count * sizeof rma->queue[0]);
}

static void queue_put(struct rma_peer *rma, struct wire_credit credit) {
    if (rma->queue == NULL || rma->queue_count == rma->queue_room) {
        size_t room = rma->queue_room == 0 ? 128 : rma->queue_room * 2;
        struct wire_credit *grown = realloc(rma->queue, room * sizeof *grown);
        if (grown == NULL) {
            return; // the deadline names the peer that got no credit
        }
        rma->queue = grown;
        rma->queue_room = room;
    }
    rma->queue[rma->queue_count++] = credit;
}

// Registers memory with a lane. A lost lane needs no registration.
static int lane_map(struct nb_lanes *lanes, int lane, void *base, size_t bytes, struct nb_region *region,
                    struct nb_error *err) {
    struct nb_error why = {0};
    *region = (struct nb_region){0};
    int rc = lanes->lane[lane]->ops->map(lanes->lane[lane], base, bytes, region, &why);
    return rc < 0 && rc != NB_ECLOSED ? nb_fail(err, rc, "%s", why.text) : 0;
}

int nb_credits_peer_open(struct nb_lanes *lanes, int peer_rank, struct nb_error *err) {
    if (!nb_is_rma(lanes)) {
        return 0;
    }
    struct rma_peer *rma = calloc(1, sizeof *rma);
    // A buffer may be granted again before this rank knows that the last write to it is over.
    if (rma == NULL || !nb_pool_reserve(&lanes->rma->credits, lanes->rma->credits.count + CREDITS_PER_PEER)) {
        free(rma);
        return nb_fail(err, -ENOMEM, "cannot allocate staging for rank %d", peer_rank);
    }
    lanes->peers[peer_rank].rma = rma;
    rma->staging.fd = -1;
    int rc = nb_arena_open(&rma->staging, STAGING_BUFFERS * lanes->rma->buffer_bytes, err);
    for (int i = 0; rc == 0 && i < lanes->config.lanes; i++) {
        rc = lane_map(lanes, i, rma->staging.base, rma->staging.bytes, &rma->staging_region[i], err);
    }
    if (rc == 0) {
        nb_credits_flush(lanes, peer_rank);
    }
    return rc;
}

// The index of the registered memory that contains a range, or -1.
static int mapped_find(const struct nb_lanes *lanes, const void *base, size_t bytes) {
    for (int m = 0; m < lanes->rma->mapped_count; m++) {
        const struct mapped *at = &lanes->rma->mapped[m];
        const char *low = base;
        if (low >= at->base && low + bytes <= at->base + at->bytes) {
            return m;
        }
    }
    return -1;
}

// A free index for memory to be registered, or -1.
static int mapped_free(const struct rma *rma) {
    int number = 0;
    while (number < rma->mapped_count && rma->mapped[number].base != NULL) {
        number++;
    }
    return number < MAPPED_MAX ? number : -1;
}

int nb_lanes_map(struct nb_lanes *lanes, void *base, size_t bytes, struct nb_error *err) {
    if (!nb_is_rma(lanes) || mapped_find(lanes, base, bytes) >= 0) {
        return 0;
    }
    int number = mapped_free(lanes->rma);
    if (number < 0) {
        return nb_fail(
            err, -ENOSPC,
            "memory of %d models is registered, the limit: gradients of further models are copied, which is slower",
            MAPPED_MAX);
    }
    struct mapped *at = &lanes->rma->mapped[number];
    uint32_t life = (at->life + 1) % REGION_LIVES;
    for (int i = 0; i < lanes->config.lanes; i++) {
        int rc = lane_map(lanes, i, base, bytes, &at->region[i], err);
        if (rc < 0) {
            while (--i >= 0) {
                lanes->lane[i]->ops->unmap(lanes->lane[i], &at->region[i]);
            }
            return rc;
        }
    }
    at->base = base;
    at->bytes = bytes;
    at->life = life;
    lanes->rma->mapped_count = number < lanes->rma->mapped_count ? lanes->rma->mapped_count : number + 1;
    for (int p = 0; p < lanes->config.lane.size; p++) {
        if (lanes->peers[p].rma != NULL) {
            lanes->peers[p].rma->announced[1 + number] = 0;
        }
        nb_credits_flush(lanes, p);
    }
    return 0;
}

void nb_lanes_unmap(struct nb_lanes *lanes, void *base) {
    for (int m = 0; nb_is_rma(lanes) && m < lanes->rma->mapped_count; m++) {
        struct mapped *at = &lanes->rma->mapped[m];
        if (at->base == NULL || at->base != base) {
            continue;
        }
        for (int i = 0; i < lanes->config.lanes; i++) {
            if (at->region[i].handle != NULL) {
                lanes->lane[i]->ops->unmap(lanes->lane[i], &at->region[i]);
            }
        }
        at->base = NULL;
        at->bytes = 0;
    }
}

// Draws a tag that no credit has had, or 0 without randomness: then nothing is granted, and the deadline names the
// peer.
static uint32_t tag_draw(struct rma *rma) {
    uint32_t tag = 0;
    while (tag == 0) {
        if (rma->tags_left == 0) {
            if (nb_random(rma->tags, sizeof rma->tags) < 0) {
                return 0;
            }
            rma->tags_left = TAGS_DRAWN;
        }
        tag = rma->tags[--rma->tags_left];
    }
    return tag;
}

static struct buffer *buffer_free(struct rma_peer *rma) {
    for (int b = 0; b < STAGING_BUFFERS; b++) {
        if (rma->buffers[b].flow == NULL) {
            return &rma->buffers[b];
        }
    }
    return NULL;
}

// The next run without a credit: blocks [*first, *first + count) that have not landed. 0: all are granted.
static uint32_t ungranted(const struct nb_lanes *lanes, struct nb_flow *flow, uint32_t *first) {
    while (flow->granted < flow->blocks && nb_bits_get(flow->map, flow->granted)) {
        flow->granted++;
    }
    if (flow->granted >= flow->blocks) {
        return 0;
    }
    *first = flow->granted;
    uint32_t most = (uint32_t)(lanes->config.segment_bytes / flow->block_bytes);
    most = most < 1 ? 1 : most;
    most = most < flow->blocks - *first ? most : flow->blocks - *first;
    most = flow->ops->run_limit(flow, *first, most);
    uint32_t count = 1;
    while (count < most && !nb_bits_get(flow->map, *first + count)) { // blocks without bytes count as landed
        count++;
    }
    return count;
}

// Queues a credit; extends the last one if it continues there.
static void queue_join(struct rma_peer *rma, const struct wire_credit *credit, size_t block_bytes) {
    struct wire_credit *last = rma->queue_count > 0 ? &rma->queue[rma->queue_count - 1] : NULL;
    if (credit->region != STAGING_REGION && last != NULL && last->op == credit->op && last->region == credit->region &&
        last->tag == credit->tag && last->first + last->count == credit->first &&
        last->offset + last->count * block_bytes == credit->offset) {
        last->count += credit->count;
    } else {
        queue_put(rma, *credit);
    }
}

// Sets the final address of a run in its credit. False: the run needs a staging buffer.
static bool credit_direct(const struct nb_lanes *lanes, const struct nb_flow *flow, struct wire_credit *credit) {
    struct iovec iov[NB_LANE_IOV_MAX];
    int pieces = flow->staged_only ? 0 : flow->ops->memory(flow, credit->first, credit->count, iov);
    int m = pieces == 1 ? mapped_find(lanes, iov[0].iov_base, iov[0].iov_len) : -1;
    if (m < 0) {
        return false;
    }
    credit->region = nb_region_name(1 + m, lanes->rma->mapped[m].life);
    credit->tag = flow->tag;
    credit->offset = (uint64_t)((char *)iov[0].iov_base - lanes->rma->mapped[m].base);
    return true;
}

static struct wire_credit buffer_credit(const struct nb_lanes *lanes, const struct nb_flow *flow,
                                        const struct buffer *buffer) {
    const struct rma_peer *rma = lanes->peers[flow->peer].rma;
    return (struct wire_credit){.op = flow->op,
                                .offset = (uint64_t)(buffer - rma->buffers) * lanes->rma->buffer_bytes,
                                .first = buffer->first,
                                .count = buffer->count,
                                .slot = (uint16_t)flow->slot,
                                .region = STAGING_REGION,
                                .tag = buffer->tag};
}

// Grants the next run of one flow. False: no buffer is free, or everything is granted.
static bool grant_next(struct nb_lanes *lanes, struct nb_flow *flow) {
    struct rma_peer *rma = lanes->peers[flow->peer].rma;
    uint32_t first = 0;
    uint32_t count = ungranted(lanes, flow, &first);
    if (count == 0) {
        return false;
    }
    struct wire_credit credit = {.op = flow->op, .first = first, .count = count, .slot = (uint16_t)flow->slot};
    if (!credit_direct(lanes, flow, &credit)) {
        struct buffer *buffer = buffer_free(rma);
        uint32_t tag = buffer != NULL ? tag_draw(lanes->rma) : 0;
        if (tag == 0) {
            return false;
        }
        *buffer = (struct buffer){.flow = flow, .first = first, .count = count, .left = count, .tag = tag};
        credit = buffer_credit(lanes, flow, buffer);
    }
    flow->granted += count;
    queue_join(rma, &credit, flow->block_bytes);
    return true;
}

void nb_credits_refill(struct nb_lanes *lanes, int peer_rank) {
    struct rma *rma = lanes->rma;
    int slot = 0;
    NB_LIST_EACH(it, &rma->inbound) {
        struct nb_flow *flow = NB_CONTAINER(it, struct nb_flow, granting);
        while (flow->slot < 0 && slot < NB_SLOTS && rma->slots[slot] != NULL) {
            slot++;
        }
        uint32_t tag = flow->slot < 0 && slot < NB_SLOTS ? tag_draw(rma) : 0;
        bool fresh = tag != 0;
        if (fresh) {
            flow->tag = tag;
            flow->slot = slot;
            rma->slots[slot] = flow;
        }
        int peer = flow->peer;
        if (fresh || (flow->slot >= 0 && peer == peer_rank)) {
            while (grant_next(lanes, flow)) {
            }
        }
        if (fresh && peer != peer_rank) {
            nb_credits_flush(lanes, peer);
        }
    }
    nb_credits_flush(lanes, peer_rank);
}

void nb_credits_in_added(struct nb_lanes *lanes, struct nb_flow *flow) {
    flow->granted = 0;
    flow->slot = -1;
    nb_list_insert(&lanes->rma->inbound, &flow->granting);
    nb_credits_refill(lanes, flow->peer);
}

static void inbound_drop(struct nb_lanes *lanes, struct nb_flow *flow) {
    if (flow->slot >= 0) {
        lanes->rma->slots[flow->slot] = NULL;
        flow->slot = -1;
    }
    nb_list_remove(&flow->granting);
}

// The staging buffer that a run landed in, or NULL: the run went to its final address.
static struct buffer *buffer_of(struct rma_peer *rma, const struct nb_flow *flow, uint32_t block) {
    for (int b = 0; b < STAGING_BUFFERS; b++) {
        struct buffer *at = &rma->buffers[b];
        if (at->flow == flow && block >= at->first && block < at->first + at->count) {
            return at;
        }
    }
    return NULL;
}

// Empties a run's staging buffer: copies to its final address and returns NULL, or returns its bytes if it has none.
static const void *unstage(const struct nb_lanes *lanes, struct nb_flow *flow, struct buffer *buffer,
                           const struct nb_frame *frame) {
    struct rma_peer *rma = lanes->peers[flow->peer].rma;
    size_t at = (size_t)(buffer - rma->buffers) * lanes->rma->buffer_bytes;
    const char *from = (const char *)rma->staging.base + at + (frame->block - buffer->first) * flow->block_bytes;
    const void *data = from;
    struct iovec iov[NB_LANE_IOV_MAX];
    int pieces = flow->staged_only ? 0 : flow->ops->memory(flow, frame->block, frame->blocks, iov);
    for (int i = 0; i < pieces; i++) {
        memcpy(iov[i].iov_base, from, iov[i].iov_len);
        from += iov[i].iov_len;
    }
    buffer->left -= frame->blocks;
    buffer->flow = buffer->left == 0 ? NULL : flow;
    return pieces > 0 ? NULL : data;
}

// Queues again all credits that are granted and unused: they may have been lost with a lane. The sender ignores
// duplicates.
static void credits_repeat(struct nb_lanes *lanes, struct nb_flow *flow) {
    struct rma_peer *rma = lanes->peers[flow->peer].rma;
    uint32_t end = flow->granted;
    uint32_t at = 0;
    while (at < end) {
        const struct buffer *buffer = buffer_of(rma, flow, at);
        struct wire_credit credit = {.op = flow->op, .first = at, .count = 1, .slot = (uint16_t)flow->slot};
        if (buffer != NULL) {
            credit = buffer_credit(lanes, flow, buffer);
            queue_put(rma, credit);
            at = buffer->first + buffer->count;
            continue;
        }
        if (!nb_bits_get(flow->map, at) && credit_direct(lanes, flow, &credit)) {
            queue_join(rma, &credit, flow->block_bytes);
        }
        at++;
    }
}

void nb_credits_lost(struct nb_lanes *lanes, int peer_rank) {
    struct rma_peer *rma = lanes->peers[peer_rank].rma;
    if (rma == NULL) {
        return;
    }
    rma->queue_count = 0;
    NB_LIST_EACH(it, &lanes->rma->inbound) {
        struct nb_flow *flow = NB_CONTAINER(it, struct nb_flow, granting);
        if (flow->slot >= 0 && flow->peer == peer_rank) {
            credits_repeat(lanes, flow);
        }
    }
    nb_credits_flush(lanes, peer_rank);
}

// True if a run without a staging buffer may land: its final memory was granted.
static bool is_direct(const struct nb_lanes *lanes, const struct nb_flow *flow, const struct nb_frame *frame) {
    struct wire_credit credit = {.first = frame->block, .count = 1};
    uint64_t end = (uint64_t)frame->block + frame->blocks;
    return end > frame->block && end <= flow->granted && credit_direct(lanes, flow, &credit);
}

// Claims the run if it uses a credit that its sender was given. Checks the tag first: the other fields may be forged.
static bool claim_granted(const struct nb_lanes *lanes, struct nb_flow *flow, const struct buffer *buffer,
                          const struct nb_frame *frame) {
    if (frame->tag != (buffer != NULL ? buffer->tag : flow->tag)) {
        return false;
    }
    bool granted = buffer != NULL ? (uint64_t)frame->block + frame->blocks <= (uint64_t)buffer->first + buffer->count
                                  : is_direct(lanes, flow, frame);
    return granted && nb_flow_accept(lanes, flow, frame) == 0;
}

struct nb_flow *nb_credits_landed(struct nb_lanes *lanes, int lane, int from, const struct nb_frame *frame,
                                  const void **data, bool *refill) {
    struct nb_flow *flow = frame->slot < NB_SLOTS ? lanes->rma->slots[frame->slot] : NULL;
    bool its = flow != NULL && (from == NB_NO_PEER || from == flow->peer);
    struct buffer *buffer = its ? buffer_of(lanes->peers[flow->peer].rma, flow, frame->block) : NULL;
    if (!its || !claim_granted(lanes, flow, buffer, frame)) {
        lanes->lane[lane]->refused++; // forged, or of an expired credit: not a failure of a peer
        return NULL;
    }
    *data = buffer != NULL ? unstage(lanes, flow, buffer, frame) : NULL;
    bool last = flow->left == frame->blocks;
    if (last) {
        inbound_drop(lanes, flow);
    }
    *refill = buffer != NULL || last;
    return flow;
}

void nb_credits_cancel(struct nb_lanes *lanes, struct nb_flow *flow) {
    if (!nb_is_rma(lanes)) {
        return;
    }
    if (flow->dir == NB_FLOW_OUT) {
        nb_credits_drop(lanes, flow);
        return;
    }
    struct rma_peer *rma = lanes->peers[flow->peer].rma;
    for (int b = 0; rma != NULL && b < STAGING_BUFFERS; b++) {
        rma->buffers[b].flow = rma->buffers[b].flow == flow ? NULL : rma->buffers[b].flow;
    }
    inbound_drop(lanes, flow);
}

// The sender's side: credits from peers, and what is left of them.

static void credits_put(struct nb_lanes *lanes, struct credit **head, const struct wire_credit *wire) {
    struct credit *credit = nb_pool_get(&lanes->rma->credits);
    if (credit == NULL) {
        return; // nothing is sent; the deadline reports it
    }
    *credit = (struct credit){.wire = *wire, .left = wire->count};
    while (*head != NULL) {
        head = &(*head)->next;
    }
    *head = credit;
}

void nb_credits_out_added(struct nb_lanes *lanes, struct nb_flow *flow) {
    if (!nb_is_rma(lanes)) {
        return;
    }
    struct credit **at = &lanes->peers[flow->peer].rma->orphans;
    struct credit **end = &flow->credits;
    while (*at != NULL) {
        struct credit *credit = *at;
        if (credit->wire.op != flow->op) {
            at = &credit->next;
            continue;
        }
        *at = credit->next;
        credit->next = NULL;
        *end = credit;
        end = &credit->next;
    }
}

// The lane's handle of the local memory.
static void *local_handle(const struct nb_lanes *lanes, int lane, const struct nb_request *req) {
    int m = mapped_find(lanes, req->iov[0].iov_base, req->iov[0].iov_len);
    for (int i = 1; i < req->iov_count; i++) {
        m = mapped_find(lanes, req->iov[i].iov_base, req->iov[i].iov_len) == m ? m : -1;
    }
    return m >= 0 ? lanes->rma->mapped[m].region[lane].handle : NULL;
}

bool nb_credits_use(struct nb_lanes *lanes, struct nb_flow *flow, int lane, uint32_t first, uint32_t *count,
                    struct assignment *at) {
    struct nb_request *req = &at->request;
    struct rma_peer *rma = lanes->peers[flow->peer].rma;
    for (struct credit *g = flow->credits; g != NULL; g = g->next) {
        const struct remote_region *remote = &rma->remote[nb_region_number(g->wire.region)][lane];
        bool known = remote->known && remote->life == nb_region_life(g->wire.region);
        if (first < g->wire.first || first >= g->wire.first + g->wire.count || !known) {
            continue;
        }
        uint32_t room = g->wire.first + g->wire.count - first;
        *count = *count < room ? *count : room;
        g->left -= *count;
        at->remote_offset = g->wire.offset + (first - g->wire.first) * flow->block_bytes;
        at->remote_region = g->wire.region;
        req->remote_addr = remote->addr + at->remote_offset;
        req->remote_key = remote->key;
        req->frame.slot = g->wire.slot;
        req->frame.tag = g->wire.tag;
        return true;
    }
    return false;
}

void nb_credits_local(struct nb_lanes *lanes, int lane, struct nb_request *req) {
    req->local_region[0] = nb_is_rma(lanes) ? local_handle(lanes, lane, req) : NULL;
}

static struct credit *credit_of(const struct nb_flow *flow, uint32_t block) {
    struct credit *g = flow->credits;
    while (g != NULL && (block < g->wire.first || block >= g->wire.first + g->wire.count)) {
        g = g->next;
    }
    return g;
}

void nb_credits_unuse(struct nb_lanes *lanes, struct nb_flow *flow, struct nb_request *req) {
    struct credit *credit = nb_is_rma(lanes) ? credit_of(flow, req->frame.block) : NULL;
    if (credit != NULL) {
        credit->left += req->frame.blocks;
    }
}

void nb_credits_sent(struct nb_lanes *lanes, struct nb_flow *flow) {
    struct credit **at = &flow->credits;
    while (nb_is_rma(lanes) && *at != NULL) {
        struct credit *credit = *at;
        if (credit->left == 0) {
            *at = credit->next;
            nb_pool_give(&lanes->rma->credits, credit);
        } else {
            at = &credit->next;
        }
    }
}

void nb_credits_again(struct nb_lanes *lanes, struct nb_flow *flow, const struct nb_run *run) {
    for (uint32_t i = 0; nb_is_rma(lanes) && i < run->blocks; i++) {
        struct credit *credit = credit_of(flow, run->block + i);
        const struct wire_credit wire = {.op = flow->op,
                                         .offset = run->offset + i * flow->block_bytes,
                                         .first = run->block + i,
                                         .count = 1,
                                         .slot = run->slot,
                                         .region = run->region,
                                         .tag = run->tag};
        if (credit != NULL) {
            credit->left++; // keep the credit until its other blocks have left
        } else {
            credits_put(lanes, &flow->credits, &wire);
        }
    }
}

void nb_credits_drop(struct nb_lanes *lanes, struct nb_flow *flow) {
    while (nb_is_rma(lanes) && flow->credits != NULL) {
        struct credit *credit = flow->credits;
        flow->credits = credit->next;
        nb_pool_give(&lanes->rma->credits, credit);
    }
}

static void region_known(struct nb_lanes *lanes, int lane, int peer_rank, const struct wire_region *message) {
    if (message->region < NB_REGIONS_MAX && message->lane == lane) {
        lanes->peers[peer_rank].rma->remote[message->region][lane] =
            (struct remote_region){.key = message->key, .addr = message->addr, .life = message->life, .known = true};
    }
}

static void credits_known(struct nb_lanes *lanes, int peer_rank, const struct wire_credits *message) {
    struct rma_peer *rma = lanes->peers[peer_rank].rma;
    for (int i = 0; i < message->count && i < NB_WIRE_CREDITS; i++) {
        const struct wire_credit *wire = &message->credits[i];
        if (nb_region_number(wire->region) >= NB_REGIONS_MAX || wire->slot >= NB_SLOTS) {
            continue;
        }
        struct nb_flow *flow = nb_flow_find(lanes, peer_rank, NB_FLOW_OUT, wire->op);
        if (flow == NULL && wire->op <= lanes->peers[peer_rank].out_floor[nb_series(wire->op)]) {
            continue; // a repeated credit, after a lane was lost, for an operation that is over here
        }
        credits_put(lanes, flow != NULL ? &flow->credits : &rma->orphans, wire);
    }
}

bool nb_credits_message(struct nb_lanes *lanes, int lane, int peer_rank, const void *data, size_t bytes) {
    if (!nb_is_rma(lanes) || bytes < 1 || lanes->peers[peer_rank].rma == NULL) {
        return false;
    }
    uint8_t type = *(const uint8_t *)data;
    if (type == NB_MESSAGE_REGION && bytes == sizeof(struct wire_region)) {
        struct wire_region message;
        memcpy(&message, data, sizeof message);
        region_known(lanes, lane, peer_rank, &message);
    } else if (type == NB_MESSAGE_CREDITS && bytes >= NB_WIRE_CREDITS_BYTES(1) &&
               bytes <= sizeof(struct wire_credits)) {
        struct wire_credits message = {0};
        memcpy(&message, data, bytes);
        if (bytes == NB_WIRE_CREDITS_BYTES((size_t)message.count)) {
            credits_known(lanes, peer_rank, &message);
        }
    }
    return true;
}
