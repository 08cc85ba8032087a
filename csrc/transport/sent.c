// Out flows between the last byte that left and the peer's word that it is there: which run left on which lane, so that
// a lost lane's are sent again, and copies of small flows, which are over as soon as they were sent.
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/bits.h"
#include "base/error.h"
#include "base/list.h"
#include "base/pool.h"
#include "transport/lanes.h"
#include "transport/lanes_internal.h"
#include "transport/transport.h"

static size_t copy_op_bytes(const struct nb_flow *flow, uint32_t first, uint32_t count) {
    const struct nb_copy *copy = flow->owner;
    return (size_t)copy->start[first + count] - copy->start[first];
}

static uint32_t copy_op_run_limit(const struct nb_flow *flow, uint32_t first, uint32_t count) {
    (void)flow;
    (void)first;
    (void)count;
    return 1; // where a step ends is not known any more
}

static int copy_op_memory(const struct nb_flow *flow, uint32_t first, uint32_t count,
                          struct iovec iov[NB_LANE_IOV_MAX]) {
    struct nb_copy *copy = flow->owner;
    iov[0] = (struct iovec){.iov_base = copy->data + copy->start[first], .iov_len = copy_op_bytes(flow, first, count)};
    return 1;
}

static const struct nb_flow_ops copy_ops = {
    .bytes = copy_op_bytes, .run_limit = copy_op_run_limit, .memory = copy_op_memory};

static bool is_copy(const struct nb_flow *flow) {
    return flow->ops == &copy_ops;
}

static void forget_all(struct nb_lanes *lanes, struct nb_list *flows) {
    NB_LIST_EACH_SAFE(it, nx, flows) {
        nb_sent_forget(lanes, NB_CONTAINER(it, struct nb_flow, link));
    }
}

static size_t copy_stride(const struct nb_lanes *lanes) {
    return (sizeof(struct nb_copy) + lanes->config.copy_bytes + 63) / 64 * 64;
}

int nb_sent_init(struct nb_lanes *lanes, struct nb_error *err) {
    nb_pool_init(&lanes->runs, sizeof(struct nb_run));
    if (lanes->config.copy_bytes == 0) {
        return 0;
    }
    lanes->copies = malloc(NB_COPIES_MAX * copy_stride(lanes));
    return lanes->copies != NULL ? 0 : nb_fail(err, -ENOMEM, "copies of %d small flows", NB_COPIES_MAX);
}

void nb_sent_fini(struct nb_lanes *lanes) {
    for (int p = 0; lanes->peers != NULL && p < lanes->config.lane.size; p++) {
        forget_all(lanes, &lanes->peers[p].out);
        forget_all(lanes, &lanes->peers[p].kept);
    }
    nb_pool_fini(&lanes->runs);
    free(lanes->copies);
}

static struct nb_copy *copy_get(struct nb_lanes *lanes) {
    struct nb_copy *copy = lanes->copies_idle;
    if (copy != NULL) {
        lanes->copies_idle = copy->next;
    } else if (lanes->copies_used < NB_COPIES_MAX) {
        copy = (struct nb_copy *)(void *)(lanes->copies + (size_t)lanes->copies_used++ * copy_stride(lanes));
    }
    return copy;
}

static void copy_give(struct nb_lanes *lanes, struct nb_copy *copy) {
    copy->next = lanes->copies_idle;
    lanes->copies_idle = copy;
}

// Where each block lies in the copy; false: the flow is too large for one.
static bool copy_plan(const struct nb_lanes *lanes, const struct nb_flow *flow, struct nb_copy *copy) {
    size_t at = 0;
    for (uint32_t i = 0; i < flow->blocks; i++) {
        copy->start[i] = (uint16_t)at;
        at += flow->ops->bytes(flow, i, 1);
        if (at > lanes->config.copy_bytes) {
            return false;
        }
    }
    copy->start[flow->blocks] = (uint16_t)at;
    return true;
}

static struct nb_copy *copy_make(struct nb_lanes *lanes, const struct nb_flow *flow) {
    bool may = lanes->config.copy_bytes > 0 && flow->blocks <= NB_COPY_BLOCKS;
    struct nb_copy *copy = may ? copy_get(lanes) : NULL;
    if (copy != NULL && !copy_plan(lanes, flow, copy)) {
        copy_give(lanes, copy);
        copy = NULL;
    }
    if (copy != NULL) {
        memset(copy->taken, 0, nb_bits_words(flow->blocks) * sizeof copy->taken[0]);
        nb_list_init(&copy->flow.link);
    }
    return copy;
}

// A run for each block that can be under way: blocks that leave need ask for no memory.
static void runs_reserve(struct nb_lanes *lanes, struct nb_flow *flow) {
    bool longer = flow->copy != NULL && flow->blocks > lanes->copied_blocks;
    flow->reserved = flow->copy != NULL ? 0 : flow->blocks;
    lanes->runs_reserved += flow->reserved;
    lanes->copied_blocks = longer ? flow->blocks : lanes->copied_blocks;
    (void)nb_pool_reserve(&lanes->runs, lanes->runs_reserved + (size_t)NB_COPIES_MAX * lanes->copied_blocks);
}

void nb_sent_begin(struct nb_lanes *lanes, struct nb_flow *flow) {
    flow->runs = NULL;
    flow->acked = false;
    flow->listed = lanes->peers[flow->peer].hearing; // the report may have told of it before it was there
    flow->copy = copy_make(lanes, flow);
    runs_reserve(lanes, flow);
}

bool nb_sent_copy(struct nb_flow *flow, uint32_t first, uint32_t count, struct nb_request *req) {
    struct nb_copy *copy = flow->copy;
    struct iovec iov[NB_LANE_IOV_MAX];
    for (uint32_t i = first; i < first + count; i++) {
        if (nb_bits_get(copy->taken, i)) {
            continue; // it left before; by now its memory may hold something else
        }
        unsigned char *to = copy->data + copy->start[i];
        int pieces = flow->ops->memory(flow, i, 1, iov);
        if (nb_iov_bytes(iov, pieces) != (size_t)copy->start[i + 1] - copy->start[i]) {
            return false;
        }
        for (int p = 0; p < pieces; p++) {
            memcpy(to, iov[p].iov_base, iov[p].iov_len);
            to += iov[p].iov_len;
        }
        nb_bits_set(copy->taken, i);
    }
    req->iov[0] = (struct iovec){.iov_base = copy->data + copy->start[first],
                                 .iov_len = (size_t)copy->start[first + count] - copy->start[first]};
    req->iov_count = 1;
    return true;
}

void nb_sent_add(struct nb_lanes *lanes, struct nb_flow *flow, int lane, const struct nb_request *req) {
    struct nb_run *run = nb_pool_get(&lanes->runs);
    if (run == NULL) {
        return; // should this lane be lost too, the deadline names the peer
    }
    *run = (struct nb_run){.next = flow->runs,
                           .offset = req->remote_offset,
                           .block = req->frame.block,
                           .tag = req->frame.tag,
                           .blocks = req->frame.blocks,
                           .lane = (uint16_t)lane,
                           .slot = req->frame.slot,
                           .region = req->remote_region};
    flow->runs = run;
}

// The caller's flow is over; from now on the copy stands for it.
static void copy_stand_in(struct nb_lanes *lanes, struct nb_flow *flow) {
    struct nb_copy *copy = flow->copy;
    copy->flow = (struct nb_flow){.ops = &copy_ops,
                                  .dir = NB_FLOW_OUT,
                                  .peer = flow->peer,
                                  .op = flow->op,
                                  .priority = flow->priority,
                                  .blocks = flow->blocks,
                                  .block_bytes = flow->block_bytes,
                                  .map = copy->map,
                                  .owner = copy,
                                  .cursor = flow->blocks,
                                  .moved_ns = flow->moved_ns,
                                  .runs = flow->runs,
                                  .copy = copy,
                                  .listed = flow->listed};
    memset(copy->map, 0, nb_bits_words(flow->blocks) * sizeof copy->map[0]);
    nb_list_init(&copy->flow.link);
    nb_list_insert(&lanes->peers[flow->peer].kept, &copy->flow.link);
    copy->waits = true;
    flow->runs = NULL;
    flow->copy = NULL;
}

void nb_sent_forget(struct nb_lanes *lanes, struct nb_flow *flow) {
    while (flow->runs != NULL) {
        struct nb_run *run = flow->runs;
        flow->runs = run->next;
        nb_pool_give(&lanes->runs, run);
    }
    lanes->runs_reserved -= flow->reserved;
    flow->reserved = 0;
    struct nb_copy *copy = flow->copy;
    flow->copy = NULL;
    if (copy != NULL) {
        copy_give(lanes, copy);
    }
}

static void over(struct nb_lanes *lanes, struct nb_flow *flow) {
    nb_list_remove(&flow->link);
    nb_grants_out_over(lanes, flow);
    bool callers = !is_copy(flow);
    nb_sent_forget(lanes, flow); // what stood in is gone
    if (callers) {
        flow->ops->finished(flow);
    }
}

static void copy_wait(struct nb_lanes *lanes, struct nb_flow *flow) {
    if (!flow->copy->waits) {
        nb_grants_out_over(lanes, flow);
        nb_list_remove(&flow->link);
        nb_list_insert(&lanes->peers[flow->peer].kept, &flow->link);
        flow->copy->waits = true;
    }
}

bool nb_sent_settle(struct nb_lanes *lanes, struct nb_flow *flow) {
    if (flow->left > 0 || flow->in_flight > 0) {
        return false;
    }
    if (flow->acked) {
        over(lanes, flow);
        return true;
    }
    if (is_copy(flow)) {
        copy_wait(lanes, flow);
        return false;
    }
    if (flow->copy != NULL) {
        copy_stand_in(lanes, flow);
        over(lanes, flow);
        return true;
    }
    if (flow->blocks <= NB_COPY_BLOCKS && flow->bytes_moved <= lanes->config.copy_bytes) {
        nb_repair_ask(lanes, flow->peer); // the peer takes it for one that was copied
    }
    return false;
}

struct nb_flow *nb_sent_find(struct nb_lanes *lanes, int peer, uint64_t op) {
    struct nb_flow *flow = nb_lanes_find(lanes, peer, NB_FLOW_OUT, op);
    if (flow != NULL) {
        return flow;
    }
    NB_LIST_EACH(it, &lanes->peers[peer].kept) {
        flow = NB_CONTAINER(it, struct nb_flow, link);
        if (flow->op == op) {
            return flow;
        }
    }
    return NULL;
}

static void take_back(struct nb_lanes *lanes, struct nb_flow *flow, const struct nb_run *run) {
    for (uint32_t i = 0; i < run->blocks; i++) {
        nb_bits_set(flow->map, run->block + i);
    }
    flow->cursor = run->block < flow->cursor ? run->block : flow->cursor;
    flow->left += run->blocks;
    flow->available += run->blocks;
    nb_grants_again(lanes, flow, run);
}

void nb_sent_again(struct nb_lanes *lanes, struct nb_flow *flow, uint64_t on_lanes, uint32_t first, uint32_t count) {
    struct nb_run **at = &flow->runs;
    uint64_t end = (uint64_t)first + count;
    bool any = false;
    while (*at != NULL) {
        struct nb_run *run = *at;
        bool here = run->block < end && (uint64_t)run->block + run->blocks > first;
        if (!here || (on_lanes >> run->lane & 1) == 0) {
            at = &run->next;
            continue;
        }
        *at = run->next;
        take_back(lanes, flow, run);
        nb_pool_give(&lanes->runs, run);
        any = true;
    }
    if (any && is_copy(flow)) {
        nb_list_remove(&flow->link);
        nb_lanes_put(lanes, flow);
        flow->copy->waits = false;
    }
}

void nb_sent_landed(struct nb_lanes *lanes, struct nb_flow *flow, uint64_t on_lanes) {
    struct nb_run **at = &flow->runs;
    while (*at != NULL) {
        struct nb_run *run = *at;
        if ((on_lanes >> run->lane & 1) == 0) {
            at = &run->next;
            continue;
        }
        *at = run->next;
        nb_pool_give(&lanes->runs, run);
    }
}

static void drop_copies(struct nb_lanes *lanes, struct nb_list *flows) {
    NB_LIST_EACH_SAFE(it, nx, flows) {
        struct nb_flow *flow = NB_CONTAINER(it, struct nb_flow, link);
        if (is_copy(flow)) {
            nb_list_remove(it);
            nb_grants_out_over(lanes, flow);
            nb_sent_forget(lanes, flow);
        }
    }
}

void nb_sent_drop(struct nb_lanes *lanes, int peer) {
    drop_copies(lanes, &lanes->peers[peer].kept);
    drop_copies(lanes, &lanes->peers[peer].out);
}
