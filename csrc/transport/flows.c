// Flows: a peer's flows in order, and the check of runs that arrive.
#include <errno.h>
#include <stddef.h>
#include <stdint.h>

#include "base/bits.h"
#include "base/error.h"
#include "base/list.h"
#include "base/wire.h"
#include "transport/lanes.h"
#include "transport/lanes_internal.h"

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

int nb_flow_accept(const struct nb_lanes *lanes, struct nb_flow *flow, const struct nb_frame *frame) {
    int rc = nb_flow_check(lanes, flow, frame);
    if (rc == 0) {
        nb_flow_claim(flow, frame);
    }
    return rc;
}

void nb_flow_unclaim(struct nb_flow *flow, const struct nb_frame *frame) {
    for (uint32_t i = 0; i < frame->blocks; i++) {
        nb_bits_clear(flow->map, frame->block + i);
    }
}
