// Credits on RMA lanes: a sender writes only where the receiver told it to. Arrivals that are placed go straight to
// their final address where that memory is mapped; arrivals that are added, and those without mapped memory, go to a
// bounded staging pool of this rank, whose buffers are granted again when they are emptied.
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
#include "transport/grants_internal.h"
#include "transport/lanes.h"
#include "transport/lanes_internal.h"
#include "transport/transport.h"

int nb_grants_init(struct nb_lanes *lanes, struct nb_error *err) {
    if (!nb_is_rma(lanes)) {
        return 0;
    }
    lanes->rma = calloc(1, sizeof *lanes->rma);
    if (lanes->rma == NULL) {
        return nb_fail(err, -ENOMEM, "credits of %d lanes", lanes->config.lanes);
    }
    nb_list_init(&lanes->rma->inbound);
    nb_pool_init(&lanes->rma->grants, sizeof(struct grant));
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

void nb_grants_fini(struct nb_lanes *lanes) {
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
    nb_pool_fini(&lanes->rma->grants);
    free(lanes->rma);
}

// Tells the peer, on each lane, how that lane may be used to write to a region.
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
        struct wire_region message = {.type = NB_WORD_REGION,
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
        struct wire_grants message = {.type = NB_WORD_GRANTS};
        size_t n = rma->queue_count - sent;
        n = n < GRANTS_PER_MESSAGE ? n : GRANTS_PER_MESSAGE;
        message.count = (uint8_t)n;
        memcpy(message.grants, rma->queue + sent, n * sizeof message.grants[0]);
        if (nb_lanes_say(lanes, peer_rank, &message, WIRE_GRANTS_BYTES(n)) < 0) {
            break;
        }
        sent += n;
    }
    return sent;
}

void nb_grants_flush(struct nb_lanes *lanes, int peer_rank) {
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

static void queue_put(struct rma_peer *rma, struct wire_grant grant) {
    if (rma->queue == NULL || rma->queue_count == rma->queue_room) {
        size_t room = rma->queue_room == 0 ? 128 : rma->queue_room * 2;
        struct wire_grant *grown = realloc(rma->queue, room * sizeof *grown);
        if (grown == NULL) {
            return; // the deadline names the peer that got no grant
        }
        rma->queue = grown;
        rma->queue_room = room;
    }
    rma->queue[rma->queue_count++] = grant;
}

// A lane that is lost knows no memory, and needs none.
static int lane_map(struct nb_lanes *lanes, int lane, void *base, size_t bytes, struct nb_region *region,
                    struct nb_error *err) {
    struct nb_error why = {0};
    *region = (struct nb_region){0};
    int rc = lanes->lane[lane]->ops->map(lanes->lane[lane], base, bytes, region, &why);
    return rc < 0 && rc != NB_ECLOSED ? nb_fail(err, rc, "%s", why.text) : 0;
}

int nb_grants_peer_open(struct nb_lanes *lanes, int peer_rank, struct nb_error *err) {
    if (!nb_is_rma(lanes)) {
        return 0;
    }
    struct rma_peer *rma = calloc(1, sizeof *rma);
    // A buffer may be granted anew before it is known here that the last write to it is over.
    if (rma == NULL || !nb_pool_reserve(&lanes->rma->grants, lanes->rma->grants.count + GRANTS_PER_PEER)) {
        free(rma);
        return nb_fail(err, -ENOMEM, "staging for rank %d", peer_rank);
    }
    lanes->peers[peer_rank].rma = rma;
    rma->staging.fd = -1;
    int rc = nb_arena_open(&rma->staging, STAGING_BUFFERS * lanes->rma->buffer_bytes, err);
    for (int i = 0; rc == 0 && i < lanes->config.lanes; i++) {
        rc = lane_map(lanes, i, rma->staging.base, rma->staging.bytes, &rma->staging_region[i], err);
    }
    if (rc == 0) {
        nb_grants_flush(lanes, peer_rank);
    }
    return rc;
}

int nb_mapped_find(const struct nb_lanes *lanes, const void *base, size_t bytes) {
    for (int m = 0; m < lanes->rma->mapped_count; m++) {
        const struct mapped *at = &lanes->rma->mapped[m];
        const char *low = base;
        if (low >= at->base && low + bytes <= at->base + at->bytes) {
            return m;
        }
    }
    return -1;
}

// A number for memory to be mapped, or -1: all are taken.
static int mapped_free(const struct rma *rma) {
    int number = 0;
    while (number < rma->mapped_count && rma->mapped[number].base != NULL) {
        number++;
    }
    return number < MAPPED_MAX ? number : -1;
}

int nb_lanes_map(struct nb_lanes *lanes, void *base, size_t bytes, struct nb_error *err) {
    if (!nb_is_rma(lanes) || nb_mapped_find(lanes, base, bytes) >= 0) {
        return 0;
    }
    int number = mapped_free(lanes->rma);
    if (number < 0) {
        return nb_fail(
            err, -ENOSPC,
            "memory of %d models is registered, the most there can be: what further models send is copied on "
            "its way, which is slower",
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
        nb_grants_flush(lanes, p);
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

// A tag that no grant has had, or 0: there is no randomness, and nothing is granted; the deadline names the peer.
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

// The next run of a flow that has no grant: blocks [*first, *first + count) that are not there. 0: all is granted.
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
    while (count < most && !nb_bits_get(flow->map, *first + count)) { // blocks without bytes are there already
        count++;
    }
    return count;
}

// Puts a grant on the queue; one that goes on where the last one ends makes that one longer.
static void queue_join(struct rma_peer *rma, const struct wire_grant *grant, size_t block_bytes) {
    struct wire_grant *last = rma->queue_count > 0 ? &rma->queue[rma->queue_count - 1] : NULL;
    if (grant->region != STAGING_REGION && last != NULL && last->op == grant->op && last->region == grant->region &&
        last->tag == grant->tag && last->first + last->count == grant->first &&
        last->offset + last->count * block_bytes == grant->offset) {
        last->count += grant->count;
    } else {
        queue_put(rma, *grant);
    }
}

// Where a run goes without staging: false: it needs a buffer.
static bool grant_direct(const struct nb_lanes *lanes, const struct nb_flow *flow, struct wire_grant *grant) {
    struct iovec iov[NB_LANE_IOV_MAX];
    int pieces = flow->staged_only ? 0 : flow->ops->memory(flow, grant->first, grant->count, iov);
    int m = pieces == 1 ? nb_mapped_find(lanes, iov[0].iov_base, iov[0].iov_len) : -1;
    if (m < 0) {
        return false;
    }
    grant->region = nb_region_name(1 + m, lanes->rma->mapped[m].life);
    grant->tag = flow->tag;
    grant->offset = (uint64_t)((char *)iov[0].iov_base - lanes->rma->mapped[m].base);
    return true;
}

static struct wire_grant grant_of(const struct nb_lanes *lanes, const struct nb_flow *flow,
                                  const struct buffer *buffer) {
    const struct rma_peer *rma = lanes->peers[flow->peer].rma;
    return (struct wire_grant){.op = flow->op,
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
    struct wire_grant grant = {.op = flow->op, .first = first, .count = count, .slot = (uint16_t)flow->slot};
    if (!grant_direct(lanes, flow, &grant)) {
        struct buffer *buffer = buffer_free(rma);
        uint32_t tag = buffer != NULL ? tag_draw(lanes->rma) : 0;
        if (tag == 0) {
            return false;
        }
        *buffer = (struct buffer){.flow = flow, .first = first, .count = count, .left = count, .tag = tag};
        grant = grant_of(lanes, flow, buffer);
    }
    flow->granted += count;
    queue_join(rma, &grant, flow->block_bytes);
    return true;
}

// Gives slots to flows that wait for one, of any peer, and grants whatever there is room for, the oldest first.
static void pump(struct nb_lanes *lanes, int peer_rank) {
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
            nb_grants_flush(lanes, peer);
        }
    }
    nb_grants_flush(lanes, peer_rank);
}

void nb_grants_in_added(struct nb_lanes *lanes, struct nb_flow *flow) {
    flow->granted = 0;
    flow->slot = -1;
    nb_list_insert(&lanes->rma->inbound, &flow->granting);
    pump(lanes, flow->peer);
}

static void inbound_drop(struct nb_lanes *lanes, struct nb_flow *flow) {
    if (flow->slot >= 0) {
        lanes->rma->slots[flow->slot] = NULL;
        flow->slot = -1;
    }
    nb_list_remove(&flow->granting);
}

// The staging buffer that a run landed in, or NULL: it went straight to its place.
static struct buffer *buffer_of(struct rma_peer *rma, const struct nb_flow *flow, uint32_t block) {
    for (int b = 0; b < STAGING_BUFFERS; b++) {
        struct buffer *at = &rma->buffers[b];
        if (at->flow == flow && block >= at->first && block < at->first + at->count) {
            return at;
        }
    }
    return NULL;
}

// Takes a run out of its staging buffer: to its final address where it has one (then NULL), else its bytes.
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

// Tells of all that is granted and not there: it may have been told on a lane that is lost. The sender keeps what it
// knows twice.
static void grant_again(struct nb_lanes *lanes, struct nb_flow *flow) {
    struct rma_peer *rma = lanes->peers[flow->peer].rma;
    uint32_t end = flow->granted;
    uint32_t at = 0;
    while (at < end) {
        const struct buffer *buffer = buffer_of(rma, flow, at);
        struct wire_grant grant = {.op = flow->op, .first = at, .count = 1, .slot = (uint16_t)flow->slot};
        if (buffer != NULL) {
            grant = grant_of(lanes, flow, buffer);
            queue_put(rma, grant);
            at = buffer->first + buffer->count;
            continue;
        }
        if (!nb_bits_get(flow->map, at) && grant_direct(lanes, flow, &grant)) {
            queue_join(rma, &grant, flow->block_bytes);
        }
        at++;
    }
}

void nb_grants_lost(struct nb_lanes *lanes, int peer_rank) {
    struct rma_peer *rma = lanes->peers[peer_rank].rma;
    if (rma == NULL) {
        return;
    }
    rma->queue_count = 0;
    NB_LIST_EACH(it, &lanes->rma->inbound) {
        struct nb_flow *flow = NB_CONTAINER(it, struct nb_flow, granting);
        if (flow->slot >= 0 && flow->peer == peer_rank) {
            grant_again(lanes, flow);
        }
    }
    nb_grants_flush(lanes, peer_rank);
}

// Whether what lands in a run without a buffer may be there: its memory was granted itself.
static bool is_direct(const struct nb_lanes *lanes, const struct nb_flow *flow, const struct nb_frame *frame) {
    struct wire_grant grant = {.first = frame->block, .count = 1};
    return (uint64_t)frame->block + frame->blocks <= flow->granted && grant_direct(lanes, flow, &grant);
}

// Whether the grant that an arrival names is one that its sender was given: by its tag first, for what else it says may
// be of anybody.
static bool is_granted(const struct nb_lanes *lanes, const struct nb_flow *flow, const struct buffer *buffer,
                       const struct nb_frame *frame) {
    if (frame->tag != (buffer != NULL ? buffer->tag : flow->tag)) {
        return false;
    }
    bool inside = buffer == NULL || (uint64_t)frame->block + frame->blocks <= (uint64_t)buffer->first + buffer->count;
    return inside && nb_lanes_check(lanes, flow, frame) == 0 && (buffer != NULL || is_direct(lanes, flow, frame));
}

void nb_grants_landed(struct nb_lanes *lanes, int lane, int from, const struct nb_frame *frame) {
    struct nb_flow *flow = frame->slot < NB_SLOTS ? lanes->rma->slots[frame->slot] : NULL;
    bool its = flow != NULL && (from == NB_NO_PEER || from == flow->peer);
    struct buffer *buffer = its ? buffer_of(lanes->peers[flow->peer].rma, flow, frame->block) : NULL;
    if (!its || !is_granted(lanes, flow, buffer, frame)) {
        lanes->lane[lane]->refused++; // of a stranger, or of a grant that is over: it says nothing about any peer
        return;
    }
    int peer_rank = flow->peer;
    const void *data = buffer != NULL ? unstage(lanes, flow, buffer, frame) : NULL;
    bool last = flow->left == frame->blocks;
    if (last) {
        inbound_drop(lanes, flow);
    }
    nb_lanes_arrived(lanes, flow, lane, frame, data);
    if (buffer != NULL || last) {
        pump(lanes, peer_rank);
    }
}

void nb_grants_cancel(struct nb_lanes *lanes, struct nb_flow *flow) {
    if (!nb_is_rma(lanes)) {
        return;
    }
    if (flow->dir == NB_FLOW_OUT) {
        nb_grants_out_over(lanes, flow);
        return;
    }
    struct rma_peer *rma = lanes->peers[flow->peer].rma;
    for (int b = 0; rma != NULL && b < STAGING_BUFFERS; b++) {
        rma->buffers[b].flow = rma->buffers[b].flow == flow ? NULL : rma->buffers[b].flow;
    }
    inbound_drop(lanes, flow);
}
