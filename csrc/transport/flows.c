// Flows: a peer's flows in order, checks of runs that arrive, and the open lanes to a peer. Used by credits,
// retransmission, failover and the scheduler.
#include <errno.h>
#include <stddef.h>
#include <stdint.h>

#include "base/bits.h"
#include "base/error.h"
#include "base/list.h"
#include "base/wire.h"
#include "transport/lanes.h"
#include "transport/lanes_internal.h"
#include "transport/transport.h"

struct nb_flow *nb_flow_find(struct nb_lanes *lanes, int peer, enum nb_flow_dir dir, uint64_t op) {
    struct nb_list *head = dir == NB_FLOW_IN ? &lanes->peers[peer].in : &lanes->peers[peer].out;
    NB_LIST_EACH(it, head) {
        struct nb_flow *flow = NB_CONTAINER(it, struct nb_flow, link);
        if (flow->op == op) {
            return flow;
        }
    }
    return NULL;
}

// Out flows are ordered by priority, then by age.
static void out_insert(struct nb_list *head, struct nb_flow *flow) {
    struct nb_list *at = head;
    while (at->prev != head) {
        const struct nb_flow *before = NB_CONTAINER(at->prev, struct nb_flow, link);
        if (before->priority > flow->priority || (before->priority == flow->priority && before->op < flow->op)) {
            break;
        }
        at = at->prev;
    }
    nb_list_insert(at, &flow->link);
}

// In flows are ordered by number.
static void in_insert(struct nb_list *head, struct nb_flow *flow) {
    struct nb_list *at = head;
    while (at->prev != head && NB_CONTAINER(at->prev, struct nb_flow, link)->op > flow->op) {
        at = at->prev;
    }
    nb_list_insert(at, &flow->link);
}

void nb_flow_insert(struct nb_lanes *lanes, struct nb_flow *flow) {
    struct peer *peer = &lanes->peers[flow->peer];
    if (flow->dir == NB_FLOW_OUT) {
        out_insert(&peer->out, flow);
    } else {
        in_insert(&peer->in, flow);
    }
}

int nb_flow_check(const struct nb_lanes *lanes, const struct nb_flow *flow, const struct nb_frame *frame) {
    uint64_t end = (uint64_t)frame->block + frame->blocks;
    if (frame->blocks == 0 || frame->blocks > NB_FRAME_BLOCKS_MAX || end > flow->blocks) {
        return NB_EWIRE;
    }
    if (flow->ops->run_limit(flow, frame->block, frame->blocks) != frame->blocks) {
        return NB_EWIRE;
    }
    size_t bytes = flow->ops->bytes(flow, frame->block, frame->blocks);
    if (bytes == 0 || bytes > lanes->config.segment_bytes + flow->block_bytes) {
        return NB_EWIRE;
    }
    for (uint32_t i = 0; i < frame->blocks; i++) {
        if (nb_bits_get(flow->map, frame->block + i)) {
            return -EALREADY;
        }
    }
    return 0;
}

void nb_flow_claim(struct nb_flow *flow, const struct nb_frame *frame) {
    for (uint32_t i = 0; i < frame->blocks; i++) {
        nb_bits_set(flow->map, frame->block + i);
    }
}

void nb_flow_unclaim(struct nb_flow *flow, const struct nb_frame *frame) {
    for (uint32_t i = 0; i < frame->blocks; i++) {
        nb_bits_clear(flow->map, frame->block + i);
    }
}

int nb_lanes_left(const struct nb_lanes *lanes, int peer) {
    int left = 0;
    for (int i = 0; lanes->peers[peer].paths != NULL && i < lanes->config.lanes; i++) {
        left += lanes->peers[peer].paths[i].open;
    }
    return left;
}

void nb_lanes_update_reach(struct nb_lanes *lanes, int peer_rank) {
    struct peer *peer = &lanes->peers[peer_rank];
    int open = 0;
    int reach = 0;
    while (peer->paths != NULL && reach < lanes->config.lanes && open < lanes->used) {
        open += peer->paths[reach++].open;
    }
    peer->reach = reach;
}

int nb_lanes_send_message(struct nb_lanes *lanes, int peer, const void *data, size_t bytes) {
    for (int i = 0; lanes->peers[peer].paths != NULL && i < lanes->config.lanes; i++) {
        if (lanes->peers[peer].paths[i].open) {
            return lanes->lane[i]->ops->message(lanes->lane[i], peer, data, bytes);
        }
    }
    return NB_EPEER;
}
