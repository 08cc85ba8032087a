// Retransmission: keeps each run of an out flow, with its lane, until the peer has the whole flow. Exchanges the
// message that an operation has landed completely, and the report of missing runs, after which exactly those are sent
// again. A small flow is over once it is sent: its bytes are copied as they leave.
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/bits.h"
#include "base/error.h"
#include "base/list.h"
#include "base/pool.h"
#include "base/wire.h"
#include "transport/lanes.h"
#include "transport/lanes_internal.h"
#include "transport/transport.h"

static bool done_put(struct peer *peer, uint64_t op) {
    if (peer->done_count == peer->done_room) {
        size_t room = peer->done_room == 0 ? 64 : peer->done_room * 2;
        uint64_t *grown = realloc(peer->done, room * sizeof *grown);
        if (grown == NULL) {
            return false; // the peer waits; its deadline names this rank
        }
        peer->done = grown;
        peer->done_room = room;
    }
    peer->done[peer->done_count++] = op;
    return true;
}

void nb_retransmit_done_send(struct nb_lanes *lanes, int peer_rank) {
    struct peer *peer = &lanes->peers[peer_rank];
    size_t reported = 0;
    while (reported < peer->done_count) {
        size_t n = peer->done_count - reported < NB_WIRE_DONES ? peer->done_count - reported : (size_t)NB_WIRE_DONES;
        struct wire_done message = {.type = NB_MESSAGE_DONE, .count = (uint8_t)n};
        memcpy(message.ops, peer->done + reported, n * sizeof message.ops[0]);
        size_t bytes = offsetof(struct wire_done, ops) + n * sizeof message.ops[0];
        if (nb_lanes_send_message(lanes, peer_rank, &message, bytes) < 0) {
            break;
        }
        reported += n;
    }
    peer->done_count -= reported;
    peer->done_urgent = peer->done_urgent && peer->done_count > 0;
    if (reported > 0 && peer->done_count > 0) {
        memmove(peer->done, peer->done + reported, peer->done_count * sizeof peer->done[0]);
    }
}

// Reports a large flow at once, as its sender waits; small flows have a copy, and are reported many at a time.
void nb_retransmit_landed(struct nb_lanes *lanes, const struct nb_flow *flow) {
    struct peer *peer = &lanes->peers[flow->peer];
    bool small = flow->blocks <= NB_COPY_BLOCKS && flow->bytes_moved <= lanes->config.copy_bytes;
    if (!done_put(peer, flow->op)) {
        return;
    }
    peer->done_urgent = peer->done_urgent || !small || peer->done_count >= NB_WIRE_DONES;
    if (peer->done_urgent) {
        nb_retransmit_done_send(lanes, flow->peer);
    }
}

static void done_request_send(struct nb_lanes *lanes, int peer_rank) {
    struct peer *peer = &lanes->peers[peer_rank];
    const struct wire_empty message = {.type = NB_MESSAGE_DONE_REQUEST};
    if (nb_lanes_send_message(lanes, peer_rank, &message, sizeof message) == 0) {
        peer->done_request_due = false;
        peer->done_requested = true;
    }
}

static void done_request(struct nb_lanes *lanes, int peer_rank) {
    lanes->peers[peer_rank].done_request_due = true;
    done_request_send(lanes, peer_rank);
}

static size_t copy_op_bytes(const struct nb_flow *flow, uint32_t first, uint32_t count) {
    const struct nb_copy *copy = flow->owner;
    return (size_t)copy->start[first + count] - copy->start[first];
}

static uint32_t copy_op_run_limit(const struct nb_flow *flow, uint32_t first, uint32_t count) {
    (void)flow;
    (void)first;
    (void)count;
    return 1; // the ends of steps are not known any more
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
        nb_retransmit_forget(lanes, NB_CONTAINER(it, struct nb_flow, link));
    }
}

static size_t copy_stride(const struct nb_lanes *lanes) {
    return (sizeof(struct nb_copy) + lanes->config.copy_bytes + 63) / 64 * 64;
}

int nb_retransmit_init(struct nb_lanes *lanes, struct nb_error *err) {
    nb_pool_init(&lanes->runs, sizeof(struct nb_run));
    if (lanes->config.copy_bytes == 0) {
        return 0;
    }
    lanes->copies = malloc(NB_COPIES_MAX * copy_stride(lanes));
    return lanes->copies != NULL ? 0 : nb_fail(err, -ENOMEM, "cannot allocate copies of %d small flows", NB_COPIES_MAX);
}

void nb_retransmit_fini(struct nb_lanes *lanes) {
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

// Computes where each block lies in the copy; false: the flow is too large for one.
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

// Reserves a run for each block that can be in flight, so that sending needs no allocation.
static void runs_reserve(struct nb_lanes *lanes, struct nb_flow *flow) {
    bool longer = flow->copy != NULL && flow->blocks > lanes->copied_blocks;
    flow->reserved = flow->copy != NULL ? 0 : flow->blocks;
    lanes->runs_reserved += flow->reserved;
    lanes->copied_blocks = longer ? flow->blocks : lanes->copied_blocks;
    (void)nb_pool_reserve(&lanes->runs, lanes->runs_reserved + (size_t)NB_COPIES_MAX * lanes->copied_blocks);
}

void nb_retransmit_begin(struct nb_lanes *lanes, struct nb_flow *flow) {
    flow->runs = NULL;
    flow->acked = false;
    flow->listed = lanes->peers[flow->peer].receiving_report; // the report may have passed its number already
    flow->copy = copy_make(lanes, flow);
    runs_reserve(lanes, flow);
}

bool nb_retransmit_copy(struct nb_flow *flow, uint32_t first, uint32_t count, struct nb_request *req) {
    struct nb_copy *copy = flow->copy;
    struct iovec iov[NB_LANE_IOV_MAX];
    for (uint32_t i = first; i < first + count; i++) {
        if (nb_bits_get(copy->taken, i)) {
            continue; // it left before; its memory may have changed since
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

void nb_retransmit_add(struct nb_lanes *lanes, int lane, const struct assignment *at) {
    const struct nb_frame *frame = &at->request.frame;
    struct nb_run *run = nb_pool_get(&lanes->runs);
    if (run == NULL) {
        return; // if this lane is lost, too, the deadline names the peer
    }
    *run = (struct nb_run){.next = at->flow->runs,
                           .offset = at->remote_offset,
                           .block = frame->block,
                           .tag = frame->tag,
                           .blocks = frame->blocks,
                           .lane = (uint16_t)lane,
                           .slot = frame->slot,
                           .region = at->remote_region};
    at->flow->runs = run;
}

// Replaces the caller's flow, which is over, by its copy.
static void copy_replace_flow(struct nb_lanes *lanes, struct nb_flow *flow) {
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

void nb_retransmit_forget(struct nb_lanes *lanes, struct nb_flow *flow) {
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
    nb_credits_drop(lanes, flow);
    bool callers = !is_copy(flow);
    nb_retransmit_forget(lanes, flow); // also frees the flow if it is a copy
    if (callers) {
        flow->ops->finished(flow);
    }
}

static void copy_wait(struct nb_lanes *lanes, struct nb_flow *flow) {
    if (!flow->copy->waits) {
        nb_credits_drop(lanes, flow);
        nb_list_remove(&flow->link);
        nb_list_insert(&lanes->peers[flow->peer].kept, &flow->link);
        flow->copy->waits = true;
    }
}

bool nb_retransmit_settle(struct nb_lanes *lanes, struct nb_flow *flow) {
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
        copy_replace_flow(lanes, flow);
        over(lanes, flow);
        return true;
    }
    if (flow->blocks <= NB_COPY_BLOCKS && flow->bytes_moved <= lanes->config.copy_bytes) {
        done_request(lanes, flow->peer); // the peer takes this flow for one with a copy, and would report it late
    }
    return false;
}

// Finds an out flow, or the copy that replaced it.
static struct nb_flow *out_find(struct nb_lanes *lanes, int peer, uint64_t op) {
    struct nb_flow *flow = nb_flow_find(lanes, peer, NB_FLOW_OUT, op);
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
    nb_credits_again(lanes, flow, run);
}

// Queues for retransmission what left on these lanes of blocks [first, first + count).
static void runs_queue(struct nb_lanes *lanes, struct nb_flow *flow, uint64_t on_lanes, uint32_t first,
                       uint32_t count) {
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
        nb_flow_insert(lanes, flow);
        flow->copy->waits = false;
    }
}

// Forgets the runs on these lanes: they have landed.
static void runs_landed(struct nb_lanes *lanes, struct nb_flow *flow, uint64_t on_lanes) {
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
            nb_credits_drop(lanes, flow);
            nb_retransmit_forget(lanes, flow);
        }
    }
}

void nb_retransmit_drop(struct nb_lanes *lanes, int peer) {
    drop_copies(lanes, &lanes->peers[peer].kept);
    drop_copies(lanes, &lanes->peers[peer].out);
}

static void done_received(struct nb_lanes *lanes, int peer_rank, const void *data, size_t bytes) {
    struct wire_done message = {0};
    size_t head = offsetof(struct wire_done, ops);
    memcpy(&message, data, bytes < sizeof message ? bytes : sizeof message);
    lanes->peers[peer_rank].done_requested = false;
    for (size_t i = 0; i < message.count && i < NB_WIRE_DONES && head + (i + 1) * sizeof(uint64_t) <= bytes; i++) {
        struct nb_flow *flow = out_find(lanes, peer_rank, message.ops[i]);
        if (flow != NULL) {
            flow->acked = true;
            nb_retransmit_settle(lanes, flow);
        }
    }
}

// The peer's next flow that is not reported yet.
static const struct nb_flow *report_flow(const struct peer *peer) {
    NB_LIST_EACH(it, &peer->in) {
        const struct nb_flow *flow = NB_CONTAINER(it, struct nb_flow, link);
        if (flow->op >= peer->report_op) {
            return flow;
        }
    }
    return NULL;
}

// Fills a message with as many missing runs as it holds; returns the block to continue with.
static uint32_t missing_runs(const struct nb_flow *flow, uint32_t from, struct wire_missing *message) {
    uint32_t at = from;
    while (message->count < NB_WIRE_RUNS) {
        while (at < flow->blocks && nb_bits_get(flow->map, at)) {
            at++;
        }
        uint32_t first = at;
        while (at < flow->blocks && !nb_bits_get(flow->map, at)) {
            at++;
        }
        if (at == first) {
            break;
        }
        message->runs[message->count].first = first;
        message->runs[message->count++].count = at - first;
    }
    return at;
}

static bool report_begin(struct nb_lanes *lanes, int peer_rank) {
    struct peer *peer = &lanes->peers[peer_rank];
    const struct wire_lost message = {.type = NB_MESSAGE_LOST, .lanes = peer->lost};
    if (nb_lanes_send_message(lanes, peer_rank, &message, sizeof message) < 0) {
        return false;
    }
    peer->report = NB_REPORT_BEGUN;
    memcpy(peer->report_floor, peer->in_floor, sizeof peer->report_floor);
    peer->report_op = 0;
    peer->report_block = 0;
    return true;
}

// Reports a flow even if nothing of it is missing: a segment that is being read may still be lost.
static bool report_missing(struct nb_lanes *lanes, int peer_rank, const struct nb_flow *flow) {
    struct peer *peer = &lanes->peers[peer_rank];
    struct wire_missing message = {.type = NB_MESSAGE_MISSING, .op = flow->op};
    uint32_t next = missing_runs(flow, peer->report_op == flow->op ? peer->report_block : 0, &message);
    if (nb_lanes_send_message(lanes, peer_rank, &message, sizeof message) < 0) {
        return false;
    }
    bool whole = next >= flow->blocks;
    peer->report_op = whole ? flow->op + 1 : flow->op;
    peer->report_block = whole ? 0 : next;
    return true;
}

static void report_send(struct nb_lanes *lanes, int peer_rank) {
    struct peer *peer = &lanes->peers[peer_rank];
    if (peer->report == NB_REPORT_DUE && !report_begin(lanes, peer_rank)) {
        return;
    }
    const struct nb_flow *flow = report_flow(peer);
    while (flow != NULL) {
        if (!report_missing(lanes, peer_rank, flow)) {
            return;
        }
        flow = report_flow(peer);
    }
    struct wire_lost message = {.type = NB_MESSAGE_LOST_END, .lanes = peer->lost};
    memcpy(message.floor, peer->report_floor, sizeof message.floor);
    if (nb_lanes_send_message(lanes, peer_rank, &message, sizeof message) == 0) {
        peer->report = NB_REPORT_NONE;
    }
}

void nb_retransmit_report_received(struct nb_lanes *lanes, int peer_rank, const struct wire_lost *message) {
    struct peer *peer = &lanes->peers[peer_rank];
    peer->lost_there = message->lanes;
    peer->receiving_report = true;
    NB_LIST_EACH(out, &peer->out) {
        NB_CONTAINER(out, struct nb_flow, link)->listed = false;
    }
    NB_LIST_EACH(kept, &peer->kept) {
        NB_CONTAINER(kept, struct nb_flow, link)->listed = false;
    }
}

static void missing_received(struct nb_lanes *lanes, int peer_rank, const struct wire_missing *message) {
    struct nb_flow *flow = out_find(lanes, peer_rank, message->op);
    if (flow == NULL) {
        return; // cancelled here
    }
    flow->listed = true;
    for (int i = 0; i < message->count && i < NB_WIRE_RUNS; i++) {
        runs_queue(lanes, flow, lanes->peers[peer_rank].lost_there, message->runs[i].first, message->runs[i].count);
    }
}

// Applies the end of a report to one flow. True: it is finished and gone.
static bool lost_end_flow(struct nb_lanes *lanes, struct nb_flow *flow, const struct wire_lost *message) {
    uint64_t there = message->lanes & lanes->peers[flow->peer].lost_there;
    if (flow->op > message->floor[nb_series(flow->op)]) {
        runs_queue(lanes, flow, there, 0, flow->blocks);
        return false;
    }
    runs_landed(lanes, flow, there);
    flow->acked = flow->acked || !flow->listed; // over at the peer: the message of it may have been lost
    return nb_retransmit_settle(lanes, flow);
}

// The owner of a finished flow may change the list, so that it is walked again from the start.
static void lost_end_list(struct nb_lanes *lanes, struct nb_list *flows, const struct wire_lost *message) {
    bool settled = true;
    while (settled) {
        settled = false;
        NB_LIST_EACH_SAFE(it, nx, flows) {
            settled = lost_end_flow(lanes, NB_CONTAINER(it, struct nb_flow, link), message);
            if (settled) {
                break;
            }
        }
    }
}

static void lost_end_received(struct nb_lanes *lanes, int peer_rank, const struct wire_lost *message) {
    struct peer *peer = &lanes->peers[peer_rank];
    peer->receiving_report = false;
    lost_end_list(lanes, &peer->kept, message);
    lost_end_list(lanes, &peer->out, message);
}

bool nb_retransmit_message(struct nb_lanes *lanes, int peer_rank, const void *data, size_t bytes) {
    uint8_t word = *(const uint8_t *)data;
    struct wire_missing missing;
    struct wire_lost lost;
    if (word == NB_MESSAGE_DONE) {
        done_received(lanes, peer_rank, data, bytes);
    } else if (word == NB_MESSAGE_DONE_REQUEST) {
        lanes->peers[peer_rank].done_urgent = true;
    } else if (word == NB_MESSAGE_MISSING && bytes == sizeof missing) {
        memcpy(&missing, data, sizeof missing);
        missing_received(lanes, peer_rank, &missing);
    } else if (word == NB_MESSAGE_LOST_END && bytes == sizeof lost) {
        memcpy(&lost, data, sizeof lost);
        lost_end_received(lanes, peer_rank, &lost);
        return true;
    }
    return false;
}

void nb_retransmit_flush(struct nb_lanes *lanes, int peer_rank) {
    struct peer *peer = &lanes->peers[peer_rank];
    if (peer->done_urgent) {
        nb_retransmit_done_send(lanes, peer_rank);
        peer->done_urgent = peer->done_count > 0;
    }
    if (peer->done_request_due) {
        done_request_send(lanes, peer_rank);
    }
    if (peer->report != NB_REPORT_NONE) {
        report_send(lanes, peer_rank);
    }
}

bool nb_lanes_settle(struct nb_lanes *lanes) {
    bool settled = true;
    for (int p = 0; p < lanes->config.lane.size; p++) {
        struct peer *peer = &lanes->peers[p];
        if (nb_lanes_left(lanes, p) == 0) {
            continue;
        }
        bool waits = !nb_list_empty(&peer->kept) || !nb_list_empty(&peer->out);
        if (waits && !peer->done_requested) {
            done_request_send(lanes, p);
        }
        nb_retransmit_done_send(lanes, p);
        settled = settled && !waits && peer->done_count == 0 && peer->report == NB_REPORT_NONE;
    }
    return settled;
}

void nb_lanes_peer_left(struct nb_lanes *lanes, int peer_rank) {
    struct peer *peer = &lanes->peers[peer_rank];
    const struct wire_lost nothing = {.floor = {UINT64_MAX, UINT64_MAX}};
    peer->left = true;
    NB_LIST_EACH(it, &peer->out) {
        NB_CONTAINER(it, struct nb_flow, link)->listed = false;
    }
    lost_end_list(lanes, &peer->out, &nothing);
    nb_retransmit_drop(lanes, peer_rank);
}
