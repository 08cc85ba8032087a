// The pull scheduler: which blocks travel next, on which lane. See lanes.h. What only RMA lanes need (grants, slots,
// staging) is in grants.c, what left and may not have landed in sent.c, what a lost lane sets off in repair.c.
#include "transport/lanes.h"

#include <errno.h>
#include <stdint.h>
#include <string.h>

#include "base/bits.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/list.h"
#include "transport/lanes_internal.h"
#include "transport/transport.h"

enum {
    UNGRANTED_RUNS = 8 // looked at before a lane gives up on a flow
};

static struct path *path_of(struct nb_lanes *lanes, int peer, int lane) {
    return &lanes->peers[peer].paths[lane];
}

struct nb_flow *nb_lanes_find(struct nb_lanes *lanes, int peer, enum nb_flow_dir dir, uint64_t op) {
    struct nb_list *head = dir == NB_FLOW_IN ? &lanes->peers[peer].in : &lanes->peers[peer].out;
    NB_LIST_EACH(it, head) {
        struct nb_flow *flow = NB_CONTAINER(it, struct nb_flow, link);
        if (flow->op == op) {
            return flow;
        }
    }
    return NULL;
}

static void flow_moved(struct nb_lanes *lanes, struct nb_flow *flow, int lane, size_t bytes) {
    flow->bytes_moved += bytes;
    flow->lane_bytes[lane] += bytes;
    flow->moved_ns = nb_now_ns();
    path_of(lanes, flow->peer, lane)->moved_ns = flow->moved_ns;
}

// Available blocks from `first` on that may travel as one segment.
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

// Where the bytes of the request lie. False: not all of them are there; what was announced would never follow.
static bool request_fill(struct nb_flow *flow, uint32_t first, uint32_t count, struct nb_request *req) {
    if (flow->copy != NULL) {
        return nb_sent_copy(flow, first, count, req);
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

// Takes the next run off the flow into the request; false when there is none that may go.
static bool flow_take(struct nb_lanes *lanes, struct nb_flow *flow, int lane, size_t segment, struct nb_request *req) {
    uint32_t first = (uint32_t)nb_bits_next(flow->map, flow->cursor, flow->blocks);
    uint32_t count = 0;
    int tried = 0;
    while (first < flow->blocks) {
        count = run_length(flow, first, segment);
        if (lanes->config.ops->kind == NB_LANE_STREAM || nb_grants_use(lanes, flow, lane, first, &count, req)) {
            break;
        }
        first =
            ++tried < UNGRANTED_RUNS ? (uint32_t)nb_bits_next(flow->map, first + count, flow->blocks) : flow->blocks;
    }
    if (first >= flow->blocks) {
        return false;
    }
    req->peer = flow->peer;
    req->owner = flow;
    req->frame.op = flow->op;
    req->frame.block = first;
    req->frame.blocks = (uint16_t)count;
    req->frame.bytes = (uint32_t)flow->ops->bytes(flow, first, count);
    if (!request_fill(flow, first, count, req)) {
        nb_grants_unuse(lanes, flow, req);
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
    nb_grants_local(lanes, lane, req);
    return true;
}

// Puts a run back that no lane took.
static void flow_untake(struct nb_flow *flow, const struct nb_frame *frame) {
    for (uint32_t i = 0; i < frame->blocks; i++) {
        nb_bits_set(flow->map, frame->block + i);
    }
    flow->cursor = frame->block < flow->cursor ? frame->block : flow->cursor;
    flow->left += frame->blocks;
    flow->available += frame->blocks;
    flow->in_flight -= frame->blocks;
}

static bool peer_take(struct nb_lanes *lanes, struct peer *peer, int lane, struct nb_request *req, int *sooner) {
    size_t segment = nb_pace_segment(lanes, peer, lane, sooner);
    NB_LIST_EACH(it, &peer->out) {
        struct nb_flow *flow = NB_CONTAINER(it, struct nb_flow, link);
        if (segment > 0 && flow->available > 0 && flow_take(lanes, flow, lane, segment, req)) {
            return true;
        }
    }
    return false;
}

static bool path_has_window(const struct nb_lanes *lanes, const struct path *path) {
    return path->open && !path->refused && path->idle != NULL && path->in_flight < lanes->window_bytes;
}

// Gives the lane one request; false: it takes none, or there is none. *sooner: as for nb_pace_segment.
static bool path_post(struct nb_lanes *lanes, struct peer *peer, int lane, int *sooner) {
    struct path *path = &peer->paths[lane];
    struct nb_request *req = path->idle;
    if (!path_has_window(lanes, path) || !peer_take(lanes, peer, lane, req, sooner)) {
        return false;
    }
    struct nb_flow *flow = req->owner;
    path->idle = req->next;
    nb_pace_posted(path, req->frame.bytes);
    if (lanes->lane[lane]->ops->post(lanes->lane[lane], req) >= 0) {
        return true;
    }
    nb_pace_refused(path, req->frame.bytes);
    req->next = path->idle;
    path->idle = req;
    nb_grants_unuse(lanes, flow, req);
    flow_untake(flow, &req->frame);
    path->refused = true;
    return false;
}

// Lets one lane take what it can, or the one that is done with it sooner. True when something was taken. A request that is
// over while it is posted asks for the next one from within: that one is taken once the first is out of the way.
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
                                                  path_post(lanes, peer, lane, NULL)); // the other will not pull
    }
    path->pulling = false;
    return took;
}

void nb_lanes_push(struct nb_lanes *lanes, int peer_rank, int64_t now_ns) {
    (void)now_ns;
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
    struct nb_flow *flow = req->owner;
    struct nb_frame frame = req->frame;
    int peer = req->peer;
    nb_pace_sent(lanes, path, frame.bytes);
    if (flow != NULL) {
        nb_sent_add(lanes, flow, lane->index, req);
    }
    req->owner = NULL;
    req->next = path->idle;
    path->idle = req;
    if (flow == NULL) {
        return; // cancelled meanwhile
    }
    flow->in_flight -= frame.blocks;
    if (code == 0) {
        nb_grants_sent(lanes, flow);
        flow_moved(lanes, flow, lane->index, frame.bytes);
    }
    if (code == 0 || flow->acked) { // else the lane is going: lost() follows, and the peer says what did not land
        nb_sent_settle(lanes, flow);
    }
    // What is finished before post() returns pulls nothing itself.
    while (code == 0 && lane->index < lanes->peers[peer].reach && path_pull(lanes, &lanes->peers[peer], lane->index) &&
           path->in_flight == 0) {
    }
}

static void up_writable(void *ctx, struct nb_lane *lane, int peer_rank) {
    struct nb_lanes *lanes = ctx;
    struct peer *peer = &lanes->peers[peer_rank];
    if (peer->paths == NULL) {
        return; // the peer came before this rank has opened it
    }
    struct path *path = &peer->paths[lane->index];
    path->refused = false;
    nb_repair_flush(lanes, peer_rank);
    nb_grants_flush(lanes, peer_rank);
    while (lane->index < peer->reach && path_pull(lanes, peer, lane->index)) {
    }
}

// A run that a peer announces: of a flow that is expected, inside it, and none of it there already.
int nb_lanes_check(const struct nb_lanes *lanes, const struct nb_flow *flow, const struct nb_frame *frame) {
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

// Marks a run as taken care of, so that nothing lands there twice.
static void run_claim(struct nb_flow *flow, const struct nb_frame *frame) {
    for (uint32_t i = 0; i < frame->blocks; i++) {
        nb_bits_set(flow->map, frame->block + i);
    }
}

void nb_lanes_unclaim(struct nb_flow *flow, const struct nb_frame *frame) {
    for (uint32_t i = 0; i < frame->blocks; i++) {
        nb_bits_clear(flow->map, frame->block + i);
    }
}

static void run_landed(struct nb_lanes *lanes, struct nb_flow *flow, int lane, const struct nb_frame *frame,
                       const void *data) {
    size_t bytes = flow->ops->bytes(flow, frame->block, frame->blocks);
    flow_moved(lanes, flow, lane, bytes);
    flow->first_ns = flow->first_ns != 0 ? flow->first_ns : flow->moved_ns;
    flow->left -= frame->blocks;
    bool last = flow->left == 0;
    flow->ops->consume(flow, frame->block, frame->blocks, data, bytes);
    if (last) {
        nb_list_remove(&flow->link);
        nb_repair_done(lanes, flow);
        flow->ops->finished(flow);
    }
}

static int up_place(void *ctx, struct nb_lane *lane, int peer_rank, const struct nb_frame *frame,
                    struct iovec iov[NB_LANE_IOV_MAX]) {
    struct nb_lanes *lanes = ctx;
    if (lanes->peers[peer_rank].paths == NULL) {
        return -EAGAIN; // this rank has not opened it yet: nb_lanes_peer_open() reads on
    }
    if (!path_of(lanes, peer_rank, lane->index)->open) {
        return NB_EWIRE;
    }
    struct path *path = path_of(lanes, peer_rank, lane->index);
    struct nb_flow *flow = nb_lanes_find(lanes, peer_rank, NB_FLOW_IN, frame->op);
    if (flow == NULL) {
        if (frame->op <= lanes->peers[peer_rank].in_floor[nb_series(frame->op)]) {
            return -EALREADY;
        }
        path->held = true;
        return -EAGAIN;
    }
    int rc = nb_lanes_check(lanes, flow, frame);
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
    run_claim(flow, frame);
    path->placing = flow;
    path->placing_frame = *frame;
    return rc;
}

static void up_landed(void *ctx, struct nb_lane *lane, int peer_rank, const struct nb_frame *frame) {
    struct nb_lanes *lanes = ctx;
    if (lanes->config.ops->kind == NB_LANE_RMA) {
        nb_grants_landed(lanes, lane->index, peer_rank, frame);
        return;
    }
    struct path *path = path_of(lanes, peer_rank, lane->index);
    struct nb_flow *flow = path->placing;
    path->placing = NULL;
    if (flow != NULL) {
        run_landed(lanes, flow, lane->index, frame, path->placing_scratch ? path->scratch : NULL);
    }
}

// An RMA arrival, its slot resolved and its run checked by grants.c.
void nb_lanes_arrived(struct nb_lanes *lanes, struct nb_flow *flow, int lane, const struct nb_frame *frame,
                      const void *data) {
    run_claim(flow, frame);
    run_landed(lanes, flow, lane, frame, data);
}

static void up_message(void *ctx, struct nb_lane *lane, int peer_rank, const void *data, size_t bytes) {
    struct nb_lanes *lanes = ctx;
    if (bytes < 1 || lanes->peers[peer_rank].paths == NULL) {
        return;
    }
    if (*(const uint8_t *)data <= NB_WORD_GRANTS) {
        nb_grants_message(lanes, lane->index, peer_rank, data, bytes);
    } else {
        nb_repair_message(lanes, lane->index, peer_rank, data, bytes);
    }
}

// Reads on where a segment had to wait.
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
    nb_repair_lost(lanes, peer_rank, lane->index, why);
    nb_lanes_push(lanes, peer_rank, 0);
}

const struct nb_lane_up nb_lanes_up = {.place = up_place,
                                       .landed = up_landed,
                                       .sent = up_sent,
                                       .writable = up_writable,
                                       .message = up_message,
                                       .lost = up_lost};

void nb_lanes_reach(struct nb_lanes *lanes, int peer_rank) {
    struct peer *peer = &lanes->peers[peer_rank];
    int open = 0;
    int reach = 0;
    while (peer->paths != NULL && reach < lanes->config.lanes && open < lanes->used) {
        open += peer->paths[reach++].open;
    }
    peer->reach = reach;
}

void nb_lanes_use(struct nb_lanes *lanes, int count) {
    lanes->used = count < 1 ? 1 : count > lanes->config.lanes ? lanes->config.lanes : count;
    for (int p = 0; p < lanes->config.lane.size; p++) {
        nb_lanes_reach(lanes, p);
    }
}

int nb_lanes_used(const struct nb_lanes *lanes) {
    return lanes->used;
}

// Out flows stand by priority, then by age.
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

void nb_lanes_put(struct nb_lanes *lanes, struct nb_flow *flow) {
    out_insert(&lanes->peers[flow->peer].out, flow);
}

// In flows stand by their numbers.
static void in_insert(struct nb_list *head, struct nb_flow *flow) {
    struct nb_list *at = head;
    while (at->prev != head && NB_CONTAINER(at->prev, struct nb_flow, link)->op > flow->op) {
        at = at->prev;
    }
    nb_list_insert(at, &flow->link);
}

void nb_lanes_add(struct nb_lanes *lanes, struct nb_flow *flow, int64_t now_ns) {
    struct peer *peer = &lanes->peers[flow->peer];
    int peer_rank = flow->peer;
    flow->cursor = 0;
    flow->in_flight = 0;
    flow->bytes_moved = 0;
    flow->moved_ns = now_ns;
    flow->first_ns = 0;
    flow->grants = NULL;
    memset(flow->lane_bytes, 0, sizeof flow->lane_bytes[0] * (size_t)lanes->config.lanes);
    if (flow->dir == NB_FLOW_OUT) {
        flow->available = nb_bits_count(flow->map, flow->blocks);
        nb_floor_raise(peer->out_floor, flow->op);
        nb_sent_begin(lanes, flow);
        out_insert(&peer->out, flow);
        nb_grants_out_added(lanes, flow);
        nb_lanes_push(lanes, flow->peer, now_ns);
        return;
    }
    in_insert(&peer->in, flow);
    nb_floor_raise(peer->in_floor, flow->op);
    if (lanes->config.ops->kind == NB_LANE_RMA) {
        nb_grants_in_added(lanes, flow);
        return;
    }
    paths_resume(lanes, peer_rank); // the flow may be over, and freed, behind this
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
        for (int r = 0; r < NB_REQUESTS_PER_PATH; r++) {
            bool its = path->requests[r].owner == flow;
            used = used || its;
            path->requests[r].owner = its ? NULL : path->requests[r].owner;
        }
        if (used && path->open) {
            path->open = false;
            path->placing = NULL;
            lanes->lane[i]->ops->peer_close(lanes->lane[i], flow->peer);
        }
    }
    nb_grants_cancel(lanes, flow);
    if (flow->dir == NB_FLOW_OUT) {
        nb_sent_forget(lanes, flow);
    }
    nb_list_remove(&flow->link);
}

int nb_lanes_progress(struct nb_lanes *lanes, int64_t now_ns) {
    (void)now_ns;
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
