// The sender's side of credits on RMA lanes: what peers granted, and what is left of it.
#include <stdint.h>
#include <string.h>

#include "base/pool.h"
#include "transport/grants_internal.h"
#include "transport/lanes.h"
#include "transport/lanes_internal.h"
#include "transport/transport.h"

static void grants_put(struct nb_lanes *lanes, struct grant **head, const struct wire_grant *wire) {
    struct grant *grant = nb_pool_get(&lanes->rma->grants);
    if (grant == NULL) {
        return; // nothing is sent there: the deadline reports it
    }
    *grant = (struct grant){.wire = *wire, .left = wire->count};
    while (*head != NULL) {
        head = &(*head)->next;
    }
    *head = grant;
}

void nb_grants_out_added(struct nb_lanes *lanes, struct nb_flow *flow) {
    if (!nb_is_rma(lanes)) {
        return;
    }
    struct grant **at = &lanes->peers[flow->peer].rma->orphans;
    struct grant **end = &flow->grants;
    while (*at != NULL) {
        struct grant *grant = *at;
        if (grant->wire.op != flow->op) {
            at = &grant->next;
            continue;
        }
        *at = grant->next;
        grant->next = NULL;
        *end = grant;
        end = &grant->next;
    }
}

// The local memory as the lane knows it.
static void *local_handle(const struct nb_lanes *lanes, int lane, const struct nb_request *req) {
    int m = nb_mapped_find(lanes, req->iov[0].iov_base, req->iov[0].iov_len);
    for (int i = 1; i < req->iov_count; i++) {
        m = nb_mapped_find(lanes, req->iov[i].iov_base, req->iov[i].iov_len) == m ? m : -1;
    }
    return m >= 0 ? lanes->rma->mapped[m].region[lane].handle : NULL;
}

bool nb_grants_use(struct nb_lanes *lanes, struct nb_flow *flow, int lane, uint32_t first, uint32_t *count,
                   struct nb_request *req) {
    struct rma_peer *rma = lanes->peers[flow->peer].rma;
    for (struct grant *g = flow->grants; g != NULL; g = g->next) {
        const struct remote_region *remote = &rma->remote[nb_region_number(g->wire.region)][lane];
        bool known = remote->known && remote->life == nb_region_life(g->wire.region);
        if (first < g->wire.first || first >= g->wire.first + g->wire.count || !known) {
            continue;
        }
        uint32_t room = g->wire.first + g->wire.count - first;
        *count = *count < room ? *count : room;
        g->left -= *count;
        req->remote_offset = g->wire.offset + (first - g->wire.first) * flow->block_bytes;
        req->remote_region = g->wire.region;
        req->remote_addr = remote->addr + req->remote_offset;
        req->remote_key = remote->key;
        req->frame.slot = g->wire.slot;
        req->frame.tag = g->wire.tag;
        return true;
    }
    return false;
}

void nb_grants_local(struct nb_lanes *lanes, int lane, struct nb_request *req) {
    req->local_region[0] = nb_is_rma(lanes) ? local_handle(lanes, lane, req) : NULL;
}

static struct grant *grant_of(const struct nb_flow *flow, uint32_t block) {
    struct grant *g = flow->grants;
    while (g != NULL && (block < g->wire.first || block >= g->wire.first + g->wire.count)) {
        g = g->next;
    }
    return g;
}

void nb_grants_unuse(struct nb_lanes *lanes, struct nb_flow *flow, struct nb_request *req) {
    struct grant *grant = nb_is_rma(lanes) ? grant_of(flow, req->frame.block) : NULL;
    if (grant != NULL) {
        grant->left += req->frame.blocks;
    }
}

void nb_grants_sent(struct nb_lanes *lanes, struct nb_flow *flow) {
    struct grant **at = &flow->grants;
    while (nb_is_rma(lanes) && *at != NULL) {
        struct grant *grant = *at;
        if (grant->left == 0) {
            *at = grant->next;
            nb_pool_give(&lanes->rma->grants, grant);
        } else {
            at = &grant->next;
        }
    }
}

void nb_grants_again(struct nb_lanes *lanes, struct nb_flow *flow, const struct nb_run *run) {
    for (uint32_t i = 0; nb_is_rma(lanes) && i < run->blocks; i++) {
        struct grant *grant = grant_of(flow, run->block + i);
        const struct wire_grant wire = {.op = flow->op,
                                        .offset = run->offset + i * flow->block_bytes,
                                        .first = run->block + i,
                                        .count = 1,
                                        .slot = run->slot,
                                        .region = run->region,
                                        .tag = run->tag};
        if (grant != NULL) {
            grant->left++; // it must not end before its other blocks have left
        } else {
            grants_put(lanes, &flow->grants, &wire);
        }
    }
}

void nb_grants_out_over(struct nb_lanes *lanes, struct nb_flow *flow) {
    while (nb_is_rma(lanes) && flow->grants != NULL) {
        struct grant *grant = flow->grants;
        flow->grants = grant->next;
        nb_pool_give(&lanes->rma->grants, grant);
    }
}

static void region_known(struct nb_lanes *lanes, int lane, int peer_rank, const struct wire_region *message) {
    if (message->region < NB_REGIONS_MAX && message->lane == lane) {
        lanes->peers[peer_rank].rma->remote[message->region][lane] =
            (struct remote_region){.key = message->key, .addr = message->addr, .life = message->life, .known = true};
    }
}

static void grants_known(struct nb_lanes *lanes, int peer_rank, const struct wire_grants *message) {
    struct rma_peer *rma = lanes->peers[peer_rank].rma;
    for (int i = 0; i < message->count && i < GRANTS_PER_MESSAGE; i++) {
        const struct wire_grant *wire = &message->grants[i];
        if (nb_region_number(wire->region) >= NB_REGIONS_MAX || wire->slot >= NB_SLOTS) {
            continue;
        }
        struct nb_flow *flow = nb_lanes_find(lanes, peer_rank, NB_FLOW_OUT, wire->op);
        if (flow == NULL && wire->op <= lanes->peers[peer_rank].out_floor[nb_series(wire->op)]) {
            continue; // told again after a lane was lost, of an operation that is over here
        }
        grants_put(lanes, flow != NULL ? &flow->grants : &rma->orphans, wire);
    }
}

void nb_grants_message(struct nb_lanes *lanes, int lane, int peer_rank, const void *data, size_t bytes) {
    if (!nb_is_rma(lanes) || bytes < 1 || lanes->peers[peer_rank].rma == NULL) {
        return;
    }
    uint8_t type = *(const uint8_t *)data;
    if (type == NB_WORD_REGION && bytes == sizeof(struct wire_region)) {
        struct wire_region message;
        memcpy(&message, data, sizeof message);
        region_known(lanes, lane, peer_rank, &message);
    } else if (type == NB_WORD_GRANTS && bytes >= WIRE_GRANTS_BYTES(1) && bytes <= sizeof(struct wire_grants)) {
        struct wire_grants message = {0};
        memcpy(&message, data, bytes);
        if (bytes == WIRE_GRANTS_BYTES((size_t)message.count)) {
            grants_known(lanes, peer_rank, &message);
        }
    }
    nb_lanes_push(lanes, peer_rank, 0);
}
