// Pull scheduler: decides which blocks travel next, and on which lane (see lanes.h). credits.c serves RMA lanes
// (credits, slots, staging), retransmit.c keeps runs that may not have landed, failover.c handles lost lanes.
#include "transport/lanes.h"

#include <errno.h>
#include <stdint.h>
#include <string.h>

#include "base/bits.h"
#include "base/error.h"
#include "base/list.h"
#include "base/wire.h"
#include "transport/lanes_internal.h"
#include "transport/transport.h"

enum {
    UNGRANTED_RUNS = 8 // tried before a lane gives up on a flow
};

static struct path *path_of(struct nb_lanes *lanes, int peer, int lane) {
    return &lanes->peers[peer].paths[lane];
}

// Number of available blocks from `first` on that may travel as one segment.
static uint32_t run_length(const struct nb_flow *flow, uint32_t first, size_t segment_bytes) {
    uint32_t most = (uint32_t)(segment_bytes / flow->block_bytes);
    most = most < 1 ? 1 : most > NB_FRAME_BLOCKS_MAX ? NB_FRAME_BLOCKS_MAX : most;
    most = most < flow->blocks - first ? most : flow->blocks - first;
    most = flow->ops->run_limit(flow, first, most);
    uint32_t n = 1;
    while (n < most && nb_bits_get(flow->map, first + n)) {
        n++;
    }
    return n;
}

// Sets the memory of the request. False: bytes are missing, so the announced segment would never be complete.
static bool request_fill(struct nb_flow *flow, uint32_t first, uint32_t count, struct nb_request *req) {
    if (flow->copy != NULL) {
        return nb_retransmit_copy(flow, first, count, req);
    }
    req->iov_count = flow->ops->memory(flow, first, count, req->iov);
    return nb_iov_bytes(req->iov, req->iov_count) == req->frame.bytes;
}

static void flow_fail(struct nb_lanes *lanes, struct nb_flow *flow, uint32_t block) {
    struct nb_error why = {0};
    nb_fail_peer(&why, -EFAULT, flow->peer,
                 "operation %llu to rank %d: block %u does not lie in 1 to %d pieces of memory; join them first",
                 (unsigned long long)flow->op, flow->peer, block, NB_LANE_IOV_MAX);
    flow->available = 0;
    lanes->config.failed(lanes->config.ctx, &why);
}

// Assigns the next run of the flow; false if none may be sent.
static bool flow_take(struct nb_lanes *lanes, struct nb_flow *flow, int lane, size_t segment, struct assignment *at) {
    struct nb_request *req = &at->request;
    uint32_t first = (uint32_t)nb_bits_next(flow->map, flow->cursor, flow->blocks);
    uint32_t count = 0;
    int tried = 0;
    while (first < flow->blocks) {
        count = run_length(flow, first, segment);
        if (lanes->config.ops->kind == NB_LANE_STREAM || nb_credits_use(lanes, flow, lane, first, &count, at)) {
            break;
        }
        first =
            ++tried < UNGRANTED_RUNS ? (uint32_t)nb_bits_next(flow->map, first + count, flow->blocks) : flow->blocks;
    }
    if (first >= flow->blocks) {
        return false;
    }
    req->peer = flow->peer;
    at->flow = flow;
    req->frame.op = flow->op;
    req->frame.block = first;
    req->frame.blocks = (uint16_t)count;
    req->frame.bytes = (uint32_t)flow->ops->bytes(flow, first, count);
    if (!request_fill(flow, first, count, req)) {
        nb_credits_unuse(lanes, flow, req);
        flow_fail(lanes, flow, first);
        return false;
    }
    for (uint32_t i = 0; i < count; i++) {
        nb_bits_clear(flow->map, first + i);
    }
    flow->cursor = first == flow->cursor ? first + count : flow->cursor;
    flow->left -= count;
    flow->available -= count;
    flow->in_flight += count;
    nb_credits_local(lanes, lane, req);
    return true;
}

// Returns a run that no lane took.
static void flow_untake(struct nb_flow *flow, const struct nb_frame *frame) {
    for (uint32_t i = 0; i < frame->blocks; i++) {
        nb_bits_set(flow->map, frame->block + i);
    }
    flow->cursor = frame->block < flow->cursor ? frame->block : flow->cursor;
    flow->left += frame->blocks;
    flow->available += frame->blocks;
    flow->in_flight -= frame->blocks;
}

static bool peer_has_blocks(const struct peer *peer) {
    NB_LIST_EACH(it, &peer->out) {
        if (NB_CONTAINER(it, const struct nb_flow, link)->available > 0) {
            return true;
        }
    }
    return false;
}

static bool peer_take(struct nb_lanes *lanes, struct peer *peer, int lane, struct assignment *at, int *sooner) {
    if (!peer_has_blocks(peer)) {
        return false;
    }
    size_t segment = nb_rate_segment(lanes, peer, lane, sooner);
    NB_LIST_EACH(it, &peer->out) {
        struct nb_flow *flow = NB_CONTAINER(it, struct nb_flow, link);
        bool late = lanes->awaits_starts && flow->op > peer->started[nb_series(flow->op)];
        if (segment > 0 && flow->available > 0 && !late && flow_take(lanes, flow, lane, segment, at)) {
            return true;
        }
    }
    return false;
}

static bool path_has_window(const struct nb_lanes *lanes, const struct path *path) {
    return path->open && !path->refused && path->idle != NULL && path->in_flight < lanes->window_bytes;
}

// Posts one segment to the lane; false: the lane takes none, or there is none. *sooner: as for nb_rate_segment.
static bool path_post(struct nb_lanes *lanes, struct peer *peer, int lane, int *sooner) {
    struct path *path = &peer->paths[lane];
    struct assignment *at = path->idle;
    if (!path_has_window(lanes, path) || !peer_take(lanes, peer, lane, at, sooner)) {
        return false;
    }
    struct nb_request *req = &at->request;
    struct nb_flow *flow = at->flow;
    path->idle = at->next;
    nb_rate_posted(lanes, path, req->frame.bytes);
    if (lanes->lane[lane]->ops->post(lanes->lane[lane], req) >= 0) {
        return true;
    }
    nb_rate_refused(path, req->frame.bytes);
    at->next = path->idle;
    path->idle = at;
    nb_credits_unuse(lanes, flow, req);
    flow_untake(flow, &req->frame);
    path->refused = true;
    return false;
}

// Lets a lane take one segment, or the lane that would be done with it sooner. True if one was taken. A request that
// finishes inside post() also asks for the next segment; `pulling` defers that until the first is posted.
static bool path_pull(struct nb_lanes *lanes, struct peer *peer, int lane) {
    struct path *path = &peer->paths[lane];
    if (path->pulling) {
        return false;
    }
    path->pulling = true;
    int sooner = -1;
    bool took = path_post(lanes, peer, lane, &sooner);
    if (!took && sooner >= 0) {
        const struct path *other = &peer->paths[sooner];
        took = path_pull(lanes, peer, sooner) || (other->in_flight == 0 && !other->refused && !other->pulling &&
                                                  path_post(lanes, peer, lane, NULL)); // the other lane will not pull
    }
    path->pulling = false;
    return took;
}

void nb_lanes_push(struct nb_lanes *lanes, int peer_rank) {
    struct peer *peer = &lanes->peers[peer_rank];
    bool moved = !nb_list_empty(&peer->out);
    while (moved) {
        moved = false;
        int reach = peer->reach; // posting may lose a lane
        for (int i = 0; i < reach; i++) {
            int lane = (peer->next_lane + i) % reach;
            moved = path_pull(lanes, peer, lane) || moved;
        }
        peer->next_lane = moved && reach > 0 ? (peer->next_lane + 1) % reach : peer->next_lane;
    }
}

static void up_sent(void *ctx, struct nb_lane *lane, struct nb_request *req, int code) {
    struct nb_lanes *lanes = ctx;
    struct path *path = path_of(lanes, req->peer, lane->index);
    struct assignment *at = NB_CONTAINER(req, struct assignment, request);
    struct nb_flow *flow = at->flow;
    struct nb_frame frame = req->frame;
    int peer = req->peer;
    nb_rate_sent(lanes, path, frame.bytes);
    path->writes_out += code == 0;
    if (flow != NULL) {
        nb_retransmit_add(lanes, lane->index, at);
    }
    at->flow = NULL;
    at->next = path->idle;
    path->idle = at;
    if (flow == NULL) {
        return; // cancelled meanwhile
    }
    flow->in_flight -= frame.blocks;
    if (code == 0) {
        nb_credits_sent(lanes, flow);
        nb_rate_moved(lanes, flow, lane->index, frame.bytes);
    }
    if (code == 0 || flow->acked) { // else the lane is being lost: lost() follows, and the peer reports what is missing
        nb_retransmit_settle(lanes, flow);
    }
    // A request that finishes inside post() does not pull the next segment itself.
    while (code == 0 && lane->index < lanes->peers[peer].reach && path_pull(lanes, &lanes->peers[peer], lane->index) &&
           path->in_flight == 0) {
    }
}

static void up_writable(void *ctx, struct nb_lane *lane, int peer_rank) {
    struct nb_lanes *lanes = ctx;
    struct peer *peer = &lanes->peers[peer_rank];
    if (peer->paths == NULL) {
        return; // the peer connected before this rank opened it
    }
    struct path *path = &peer->paths[lane->index];
    path->refused = false;
    nb_failover_flush(lanes, peer_rank);
    nb_credits_flush(lanes, peer_rank);
    while (lane->index < peer->reach && path_pull(lanes, peer, lane->index)) {
    }
}

static int up_place(void *ctx, struct nb_lane *lane, int peer_rank, const struct nb_frame *frame,
                    struct iovec iov[NB_LANE_IOV_MAX]) {
    struct nb_lanes *lanes = ctx;
    if (lanes->peers[peer_rank].paths == NULL) {
        return -EAGAIN; // this rank has not opened it yet: nb_lanes_peer_open() resumes reading
    }
    if (!path_of(lanes, peer_rank, lane->index)->open) {
        return NB_EWIRE;
    }
    struct path *path = path_of(lanes, peer_rank, lane->index);
    struct nb_flow *flow = nb_flow_find(lanes, peer_rank, NB_FLOW_IN, frame->op);
    if (flow == NULL) {
        if (frame->op <= lanes->peers[peer_rank].in_floor[nb_series(frame->op)]) {
            return -EALREADY;
        }
        path->held = true;
        return -EAGAIN;
    }
    int rc = nb_flow_check(lanes, flow, frame);
    if (rc < 0 || frame->bytes != flow->ops->bytes(flow, frame->block, frame->blocks)) {
        return rc < 0 ? rc : NB_EWIRE;
    }
    rc = flow->ops->memory(flow, frame->block, frame->blocks, iov);
    if (rc == 0) {
        if (frame->bytes > lanes->config.segment_bytes + NB_SCRATCH_SLACK) {
            return -ENOMEM;
        }
        iov[0] = (struct iovec){.iov_base = path->scratch, .iov_len = frame->bytes};
        rc = 1;
        path->placing_scratch = true;
    } else {
        path->placing_scratch = false;
    }
    nb_flow_claim(flow, frame);
    path->placing = flow;
    path->placing_frame = *frame;
    return rc;
}

// The flow of a segment whose memory up_place() has given, or NULL: it was cancelled. *data: as for nb_credits_landed.
static struct nb_flow *placed_flow(struct path *path, const void **data) {
    struct nb_flow *flow = path->placing;
    path->placing = NULL;
    *data = path->placing_scratch ? path->scratch : NULL;
    return flow;
}

static void up_landed(void *ctx, struct nb_lane *lane, int from, const struct nb_frame *frame) {
    struct nb_lanes *lanes = ctx;
    bool placed = lanes->config.ops->kind == NB_LANE_STREAM;
    const void *data = NULL;
    bool refill = false;
    struct nb_flow *flow = placed ? placed_flow(path_of(lanes, from, lane->index), &data)
                                  : nb_credits_landed(lanes, lane->index, from, frame, &data, &refill);
    if (flow == NULL) {
        return;
    }
    int peer_rank = flow->peer;
    path_of(lanes, peer_rank, lane->index)->writes_in += !placed;
    size_t bytes = flow->ops->bytes(flow, frame->block, frame->blocks);
    nb_rate_moved(lanes, flow, lane->index, bytes);
    flow->first_ns = flow->first_ns != 0 ? flow->first_ns : flow->moved_ns;
    flow->left -= frame->blocks;
    bool last = flow->left == 0;
    flow->ops->consume(flow, frame->block, frame->blocks, data, bytes);
    if (last) {
        nb_list_remove(&flow->link);
        nb_retransmit_landed(lanes, flow);
        flow->ops->finished(flow);
    }
    if (refill) {
        nb_credits_refill(lanes, peer_rank);
    }
}

static void started_received(struct peer *peer, const void *data, size_t bytes) {
    struct wire_started message;
    if (bytes == sizeof message) {
        memcpy(&message, data, bytes);
        nb_floor_raise(peer->started, message.ops[0]);
        nb_floor_raise(peer->started, message.ops[1]);
    }
}

static void up_message(void *ctx, struct nb_lane *lane, int peer_rank, const void *data, size_t bytes) {
    struct nb_lanes *lanes = ctx;
    uint8_t word = bytes > 0 ? *(const uint8_t *)data : 0;
    if (word == NB_MESSAGE_STARTED) { // perhaps of a peer that this rank has not opened yet
        started_received(&lanes->peers[peer_rank], data, bytes);
    }
    if (bytes < 1 || lanes->peers[peer_rank].paths == NULL) {
        return;
    }
    bool more = word <= NB_MESSAGE_CREDITS ? nb_credits_message(lanes, lane->index, peer_rank, data, bytes)
                                           : nb_failover_message(lanes, lane->index, peer_rank, data, bytes);
    if (more) {
        nb_lanes_push(lanes, peer_rank);
    }
    if (word > NB_MESSAGE_CREDITS && word != NB_MESSAGE_LEAVE) {
        nb_failover_flush(lanes, peer_rank);
    }
}

// Resumes reading where a segment had to wait.
static void paths_resume(struct nb_lanes *lanes, int peer_rank) {
    for (int i = 0; i < lanes->config.lanes; i++) {
        struct path *path = path_of(lanes, peer_rank, i);
        if (path->held) {
            path->held = false;
            lanes->lane[i]->ops->resume(lanes->lane[i], peer_rank);
        }
    }
}

static void up_lost(void *ctx, struct nb_lane *lane, int peer_rank, const struct nb_error *why) {
    struct nb_lanes *lanes = ctx;
    if (lanes->peers[peer_rank].paths == NULL) {
        return;
    }
    nb_failover_lost(lanes, peer_rank, lane->index, why);
    nb_lanes_push(lanes, peer_rank);
}

const struct nb_lane_up nb_lanes_up = {.place = up_place,
                                       .landed = up_landed,
                                       .sent = up_sent,
                                       .writable = up_writable,
                                       .message = up_message,
                                       .lost = up_lost};

void nb_lanes_use(struct nb_lanes *lanes, int count) {
    lanes->used = count < 1 ? 1 : count > lanes->config.lanes ? lanes->config.lanes : count;
    for (int p = 0; p < lanes->config.lane.size; p++) {
        nb_lanes_update_reach(lanes, p);
    }
}

int nb_lanes_used(const struct nb_lanes *lanes) {
    return lanes->used;
}

void nb_lanes_add(struct nb_lanes *lanes, struct nb_flow *flow, int64_t now_ns) {
    struct peer *peer = &lanes->peers[flow->peer];
    int peer_rank = flow->peer;
    flow->cursor = 0;
    flow->in_flight = 0;
    flow->bytes_moved = 0;
    flow->moved_ns = now_ns;
    flow->first_ns = 0;
    flow->credits = NULL;
    memset(flow->lane_bytes, 0, sizeof flow->lane_bytes[0] * (size_t)lanes->config.lanes);
    if (flow->dir == NB_FLOW_OUT) {
        flow->available = nb_bits_count(flow->map, flow->blocks);
        nb_floor_raise(peer->out_floor, flow->op);
        nb_retransmit_begin(lanes, flow);
        nb_flow_insert(lanes, flow);
        nb_credits_out_added(lanes, flow);
        nb_lanes_push(lanes, flow->peer);
        return;
    }
    nb_flow_insert(lanes, flow);
    nb_floor_raise(peer->in_floor, flow->op);
    if (lanes->config.ops->kind == NB_LANE_RMA) {
        nb_credits_in_added(lanes, flow);
        return;
    }
    nb_lanes_tell_started(lanes, peer_rank);
    paths_resume(lanes, peer_rank); // the flow may be over and freed now
}

void nb_lanes_ready(struct nb_lanes *lanes, struct nb_flow *flow, uint32_t block) {
    (void)lanes;
    flow->available += !nb_bits_get(flow->map, block);
    nb_bits_set(flow->map, block);
    flow->cursor = block < flow->cursor ? block : flow->cursor;
}

void nb_lanes_cancel(struct nb_lanes *lanes, struct nb_flow *flow) {
    struct peer *peer = &lanes->peers[flow->peer];
    for (int i = 0; i < lanes->config.lanes; i++) {
        struct path *path = &peer->paths[i];
        bool used = path->placing == flow || lanes->config.ops->kind == NB_LANE_RMA;
        for (int a = 0; a < NB_ASSIGNMENTS_PER_PATH; a++) {
            bool its = path->assignments[a].flow == flow;
            used = used || its;
            path->assignments[a].flow = its ? NULL : path->assignments[a].flow;
        }
        if (used && path->open) {
            path->open = false;
            path->placing = NULL;
            lanes->lane[i]->ops->peer_close(lanes->lane[i], flow->peer);
        }
    }
    nb_credits_cancel(lanes, flow);
    if (flow->dir == NB_FLOW_OUT) {
        nb_retransmit_forget(lanes, flow);
    }
    nb_list_remove(&flow->link);
}

int nb_lanes_progress(struct nb_lanes *lanes) {
    int done = 0;
    for (int i = 0; i < lanes->config.lanes; i++) {
        int n = lanes->lane[i]->ops->progress(lanes->lane[i]);
        done += n > 0 ? n : 0;
    }
    return done;
}

int nb_lanes_arm(struct nb_lanes *lanes) {
    for (int i = 0; i < lanes->config.lanes; i++) {
        if (lanes->lane[i]->ops->arm(lanes->lane[i]) == -EAGAIN) {
            return -EAGAIN;
        }
    }
    return 0;
}

uint64_t nb_lanes_refused(const struct nb_lanes *lanes) {
    uint64_t refused = 0;
    for (int i = 0; i < lanes->config.lanes; i++) {
        refused += lanes->lane[i]->refused;
    }
    return refused;
}

void nb_lanes_stats(const struct nb_lanes *lanes, int peer, int lane, struct nb_lane_stats *stats) {
    lanes->lane[lane]->ops->stats(lanes->lane[lane], peer, stats);
}

const char *nb_lanes_describe(const struct nb_lanes *lanes) {
    return lanes->lane[0]->ops->describe(lanes->lane[0]);
}
