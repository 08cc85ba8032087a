// Retransmission after a lost lane, message by message: the report of missing segments, retransmission from a copy, and
// the lifetime of copies. There is one rank. The test plays its peer and implements its lanes.
#include "base/bits.h"
#include "base/clock.h"
#include "check.h"
#include "transport/credits.h"
#include "transport/lanes_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { LANES = 3, BLOCK = 64, BLOCKS_MAX = 64, POSTS_MAX = 64, RECEIVED_MAX = 64, RUNS = 13, SELF = 0, PEER = 1 };

// Messages in wire format.
struct report {
    uint8_t type;
    uint8_t count;
    uint8_t zero[6];
    uint64_t first; // bitmap of lanes, or the operation
    union {
        uint64_t floor[NB_SERIES];
        struct {
            uint32_t first;
            uint32_t count;
        } runs[RUNS];
    };
};

_Static_assert(sizeof(struct report) == 120, "the size of a report of missing runs");

struct post {
    struct nb_request *request;
    int lane;
    uint32_t block;
    bool completed;
    unsigned char bytes[BLOCK];
};

static struct post posts[POSTS_MAX];
static int post_count;
static struct report received[RECEIVED_MAX];
static int received_count;
static int received_room;
static struct nb_lanes *lanes;
static const struct nb_lane_ops *network;

static int manual_open(const struct nb_lane_config *config, struct nb_lane **lane, struct nb_error *err) {
    struct nb_lane *made = calloc(1, sizeof *made);
    (void)err;
    CHECK(made != NULL, "memory");
    *made = (struct nb_lane){.ops = network, .index = config->index};
    *lane = made;
    return 0;
}

static void manual_address(const struct nb_lane *lane, unsigned char addr[NB_LANE_ADDR_MAX], size_t *bytes) {
    (void)lane;
    addr[0] = 0;
    *bytes = 1;
}

static int manual_peer_open(struct nb_lane *lane, int peer, const unsigned char *addr, size_t bytes,
                            struct nb_error *err) {
    (void)lane;
    (void)peer;
    (void)addr;
    (void)bytes;
    (void)err;
    return 0;
}

static bool manual_peer_ready(const struct nb_lane *lane, int peer) {
    (void)lane;
    (void)peer;
    return true;
}

static void complete_posts(struct nb_lane *lane, int code) {
    for (int i = 0; i < post_count; i++) {
        if (posts[i].lane == lane->index && !posts[i].completed) {
            posts[i].completed = true;
            nb_lanes_up.sent(lanes, lane, posts[i].request, code);
        }
    }
}

static void manual_peer_close(struct nb_lane *lane, int peer) {
    (void)peer;
    complete_posts(lane, NB_ECLOSED);
}

static int manual_map(struct nb_lane *lane, void *base, size_t bytes, struct nb_region *region, struct nb_error *err) {
    (void)lane;
    (void)bytes;
    (void)err;
    *region = (struct nb_region){.addr = (uint64_t)(uintptr_t)base};
    return 0;
}

static void manual_unmap(struct nb_lane *lane, struct nb_region *region) {
    (void)lane;
    (void)region;
}

static int manual_post(struct nb_lane *lane, struct nb_request *request) {
    CHECK(post_count < POSTS_MAX && request->frame.blocks == 1 && request->iov[0].iov_len == BLOCK, "unexpected post");
    posts[post_count] = (struct post){.request = request, .lane = lane->index, .block = request->frame.block};
    memcpy(posts[post_count++].bytes, request->iov[0].iov_base, BLOCK);
    return 0;
}

static int manual_message(struct nb_lane *lane, int peer, const void *data, size_t bytes) {
    (void)lane;
    (void)peer;
    if (received_count == received_room) {
        return -EAGAIN;
    }
    memset(&received[received_count], 0, sizeof received[0]);
    memcpy(&received[received_count++], data, bytes < sizeof received[0] ? bytes : sizeof received[0]);
    return 0;
}

static void manual_resume(struct nb_lane *lane, int peer) {
    (void)lane;
    (void)peer;
}

static int manual_idle(struct nb_lane *lane) {
    (void)lane;
    return 0;
}

static void manual_stats(const struct nb_lane *lane, int peer, struct nb_lane_stats *stats) {
    (void)lane;
    (void)peer;
    *stats = (struct nb_lane_stats){0};
}

static struct nb_held manual_held(const struct nb_lane *lane, int peer) {
    (void)lane;
    (void)peer;
    return (struct nb_held){0};
}

static void manual_close(struct nb_lane *lane) {
    free(lane);
}

static struct nb_lane_ops manual_ops(int kind) {
    return (struct nb_lane_ops){.name = "manual",
                                .kind = kind,
                                .open = manual_open,
                                .address = manual_address,
                                .peer_open = manual_peer_open,
                                .peer_ready = manual_peer_ready,
                                .peer_close = manual_peer_close,
                                .map = manual_map,
                                .unmap = manual_unmap,
                                .post = manual_post,
                                .message = manual_message,
                                .resume = manual_resume,
                                .progress = manual_idle,
                                .arm = manual_idle,
                                .stats = manual_stats,
                                .held = manual_held,
                                .close = manual_close};
}

struct side {
    struct nb_flow flow;
    uint64_t map[1];
    unsigned char memory[BLOCKS_MAX * BLOCK];
    bool finished;
};

static size_t side_bytes(const struct nb_flow *flow, uint32_t first, uint32_t count) {
    (void)flow;
    (void)first;
    return (size_t)count * BLOCK;
}

static uint32_t side_run_limit(const struct nb_flow *flow, uint32_t first, uint32_t count) {
    (void)flow;
    (void)first;
    (void)count;
    return 1;
}

static int side_memory(const struct nb_flow *flow, uint32_t first, uint32_t count, struct iovec *iov) {
    struct side *side = flow->owner;
    iov[0] = (struct iovec){.iov_base = side->memory + (size_t)first * BLOCK, .iov_len = (size_t)count * BLOCK};
    return 1;
}

static void side_consume(struct nb_flow *flow, uint32_t first, uint32_t count, const void *data, size_t bytes) {
    (void)flow;
    (void)first;
    (void)count;
    (void)data;
    (void)bytes;
}

static void side_finished(struct nb_flow *flow) {
    struct side *side = flow->owner;
    CHECK(!side->finished, "finished twice");
    side->finished = true;
    memset(side->memory, 0x55, sizeof side->memory); // its owner may write to it again
}

static const struct nb_flow_ops side_ops = {.bytes = side_bytes,
                                            .run_limit = side_run_limit,
                                            .memory = side_memory,
                                            .consume = side_consume,
                                            .finished = side_finished};

static void side_add(struct side *side, enum nb_flow_dir dir, uint64_t op, uint32_t blocks) {
    memset(side, 0, sizeof *side);
    side->flow = (struct nb_flow){.ops = &side_ops,
                                  .dir = dir,
                                  .peer = PEER,
                                  .op = op,
                                  .blocks = blocks,
                                  .left = blocks,
                                  .block_bytes = BLOCK,
                                  .map = side->map,
                                  .owner = side};
    for (uint32_t i = 0; i < blocks && dir == NB_FLOW_OUT; i++) {
        nb_bits_set(side->map, i);
        memset(side->memory + (size_t)i * BLOCK, (int)(op * 10 + i), BLOCK);
    }
    nb_list_init(&side->flow.link);
    nb_lanes_add(lanes, &side->flow, nb_now_ns());
}

static void lane_lost(void *ctx, int peer, int lane, const struct nb_error *why, int left) {
    (void)ctx;
    (void)peer;
    (void)lane;
    (void)why;
    (void)left;
}

static void failed(void *ctx, const struct nb_error *why) {
    (void)ctx;
    CHECK(false, "%s", why->text);
}

static void begin(const struct nb_lane_ops *ops) {
    unsigned char addresses[LANES * (NB_LANE_ADDR_MAX + 8)] = {0};
    struct nb_error err = {0};
    struct nb_lanes_config config = {.ops = ops,
                                     .lane = {.rank = SELF, .size = 2, .timeout_ms = 10000},
                                     .lanes = LANES,
                                     .segment_bytes = BLOCK,
                                     .in_flight_max = (size_t)LANES * 4 * BLOCK,
                                     .copy_bytes = NB_COPY_MAX,
                                     .lane_lost = lane_lost,
                                     .failed = failed};
    network = ops;
    post_count = 0;
    received_count = 0;
    received_room = RECEIVED_MAX;
    CHECK(nb_lanes_open(&lanes, &config, &err) == 0, "%s", err.text);
    CHECK(nb_lanes_peer_open(lanes, PEER, addresses, &err) == 0, "%s", err.text);
}

static void deliver(struct report report) {
    size_t bytes = report.type == NB_MESSAGE_MISSING ? sizeof report : report.type == NB_MESSAGE_DONE ? 16 : 32;
    for (int lane = 0; lane < LANES; lane++) {
        if (lanes->peers[PEER].paths[lane].open) {
            nb_lanes_up.message(lanes, lanes->lane[lane], PEER, &report, bytes);
            return;
        }
    }
}

static void send_lost(uint64_t on) {
    deliver((struct report){.type = NB_MESSAGE_LOST, .first = on});
}

static void send_lost_end(uint64_t on, uint64_t floor) {
    deliver((struct report){.type = NB_MESSAGE_LOST_END, .first = on, .floor = {floor}});
}

// Reports as missing the blocks of posts from `from` on that were sent on these lanes.
static void send_missing(uint64_t op, uint64_t on, int from) {
    struct report report = {.type = NB_MESSAGE_MISSING, .first = op};
    for (int i = from; i < post_count; i++) {
        if ((on >> posts[i].lane & 1) != 0) {
            report.runs[report.count].first = posts[i].block;
            report.runs[report.count++].count = 1;
        }
    }
    CHECK(report.count > 0, "nothing was sent on those lanes");
    deliver(report);
}

static void send_done(uint64_t op) {
    deliver((struct report){.type = NB_MESSAGE_DONE, .count = 1, .first = op});
}

static void lose(int lane) {
    struct nb_error why = {.code = NB_EPEER, .peer = PEER};
    complete_posts(lanes->lane[lane], NB_EPEER);
    nb_lanes_up.lost(lanes, lanes->lane[lane], PEER, &why);
}

static void complete_all_posts(void) {
    for (int i = 0; i < post_count; i++) {
        if (!posts[i].completed) {
            posts[i].completed = true;
            nb_lanes_up.sent(lanes, lanes->lane[posts[i].lane], posts[i].request, 0);
        }
    }
}

static uint64_t blocks_on(int lane, int from, int to) {
    uint64_t blocks = 0;
    for (int i = from; i < to; i++) {
        blocks |= posts[i].lane == lane ? (uint64_t)1 << posts[i].block : 0;
    }
    return blocks;
}

// Bitmap of the blocks posted from `from` on. Checks that each has its owner's bytes.
static uint64_t blocks_sent_again(int from, uint64_t op) {
    uint64_t blocks = 0;
    for (int i = from; i < post_count; i++) {
        blocks |= (uint64_t)1 << posts[i].block;
        CHECK(posts[i].bytes[0] == (unsigned char)(op * 10 + posts[i].block) &&
                  posts[i].bytes[BLOCK - 1] == posts[i].bytes[0],
              "block %u is sent again with wrong bytes", posts[i].block);
    }
    return blocks;
}

static void end(void) {
    nb_lanes_close(lanes);
}

// One flow has more missing runs than a message holds, and the lane accepts few messages at a time.
static void test_report_of_many_messages(int room) {
    const struct nb_lane_ops ops = manual_ops(NB_LANE_STREAM);
    static struct side in;
    int reported[BLOCKS_MAX] = {0};
    bool completed = false;
    begin(&ops);
    side_add(&in, NB_FLOW_IN, 4, BLOCKS_MAX);
    for (uint32_t block = 0; block < BLOCKS_MAX; block += 2) {
        struct nb_frame frame = {.op = 4, .block = block, .blocks = 1, .bytes = BLOCK};
        struct iovec iov[NB_LANE_IOV_MAX];
        CHECK(nb_lanes_up.place(lanes, lanes->lane[0], PEER, &frame, iov) == 1, "place");
        nb_lanes_up.landed(lanes, lanes->lane[0], PEER, &frame);
    }
    received_room = room;
    lose(1);
    for (int pass = 0; !completed; pass++) {
        CHECK(pass < 20, "the report does not end");
        for (int i = 0; i < received_count; i++) {
            completed = completed || received[i].type == NB_MESSAGE_LOST_END;
            for (int run = 0; received[i].type == NB_MESSAGE_MISSING && run < received[i].count; run++) {
                for (uint32_t k = 0; k < received[i].runs[run].count; k++) {
                    reported[received[i].runs[run].first + k]++;
                }
            }
        }
        received_count = 0;
        nb_lanes_up.writable(lanes, lanes->lane[0], PEER);
    }
    for (int block = 0; block < BLOCKS_MAX; block++) {
        CHECK(reported[block] == block % 2, "block %d was reported %d times", block, reported[block]);
    }
    nb_lanes_cancel(lanes, &in.flow);
    end();
}

// A small flow finishes when it is sent. The peer reports missing blocks of it; then another lane that carried some of
// it is lost.
static void test_copy_reported_then_lost(void) {
    const struct nb_lane_ops ops = manual_ops(NB_LANE_STREAM);
    static struct side out;
    begin(&ops);
    side_add(&out, NB_FLOW_OUT, 5, 6);
    complete_all_posts();
    int sent = post_count;
    CHECK(sent == 6 && out.finished, "%d blocks were sent, and the flow is %s", sent,
          out.finished ? "finished" : "not finished");
    uint64_t on_1 = blocks_on(1, 0, sent);
    uint64_t on_2 = blocks_on(2, 0, sent);
    CHECK(on_1 != 0 && on_2 != 0, "a lane carries nothing");
    send_lost(1 << 2);
    send_missing(5, 1 << 1 | 1 << 2, 0);
    send_lost_end(1 << 2, 5);
    CHECK(blocks_sent_again(sent, 5) == on_2, "not exactly the blocks of the lost lane are sent again");
    int again = post_count;
    on_1 |= blocks_on(1, sent, again);
    complete_all_posts();
    CHECK(!nb_lanes_settle(lanes), "settled before the peer has confirmed the flow");
    lose(1);
    send_lost(1 << 1 | 1 << 2);
    send_missing(5, 1 << 1, 0);
    send_lost_end(1 << 1 | 1 << 2, 5);
    CHECK(blocks_sent_again(again, 5) == on_1, "the copy was freed before the peer confirmed the flow");
    complete_all_posts();
    send_done(5);
    CHECK(nb_lanes_settle(lanes), "not settled after the peer has confirmed the flow");
    end();
}

// The report begins while the last blocks are being sent: after the flow finishes, its copy serves the rest of the
// report.
static void test_flow_finishes_during_a_report(void) {
    const struct nb_lane_ops ops = manual_ops(NB_LANE_STREAM);
    static struct side out;
    begin(&ops);
    side_add(&out, NB_FLOW_OUT, 5, 4);
    send_lost(1 << 2);
    deliver((struct report){.type = NB_MESSAGE_MISSING, .count = 1, .first = 5, .runs = {{.first = 0, .count = 4}}});
    complete_all_posts();
    CHECK(out.finished, "the flow is not finished after it was sent");
    send_lost_end(1 << 2, 5);
    complete_all_posts();
    CHECK(!nb_lanes_settle(lanes), "the copy was freed before the peer confirmed the flow");
    send_done(5);
    CHECK(nb_lanes_settle(lanes), "not settled after the peer has confirmed the flow");
    end();
}

// The report names the flow before the flow is added.
static void test_flow_added_during_a_report(void) {
    const struct nb_lane_ops ops = manual_ops(NB_LANE_STREAM);
    static struct side out;
    begin(&ops);
    send_lost(1 << 2);
    deliver((struct report){.type = NB_MESSAGE_MISSING, .count = 1, .first = 6, .runs = {{.first = 0, .count = 4}}});
    side_add(&out, NB_FLOW_OUT, 6, 4);
    send_lost_end(1 << 2, 6);
    complete_all_posts();
    CHECK(!nb_lanes_settle(lanes), "the flow counts as landed");
    send_done(6);
    CHECK(nb_lanes_settle(lanes), "not settled after the peer has confirmed the flow");
    end();
}

// A rank settles only after the peer has confirmed the last block, also if a lane is lost meanwhile.
static void test_lane_lost_while_settling(void) {
    const struct nb_lane_ops ops = manual_ops(NB_LANE_STREAM);
    static struct side out;
    bool requested = false;
    begin(&ops);
    side_add(&out, NB_FLOW_OUT, 5, 6);
    complete_all_posts();
    int sent = post_count;
    CHECK(out.finished && !nb_lanes_settle(lanes), "settled before the peer has confirmed the flow");
    for (int i = 0; i < received_count; i++) {
        requested = requested || received[i].type == NB_MESSAGE_DONE_REQUEST;
    }
    CHECK(requested, "the peer gets no request for confirmation");
    uint64_t on_1 = blocks_on(1, 0, sent);
    lose(1);
    CHECK(!nb_lanes_settle(lanes), "settled after a lane was lost and before the peer has confirmed the flow");
    send_lost(1 << 1);
    send_missing(5, 1 << 1, 0);
    send_lost_end(1 << 1, 5);
    CHECK(on_1 != 0 && blocks_sent_again(sent, 5) == on_1, "missing blocks are not sent again");
    CHECK(!nb_lanes_settle(lanes), "settled while blocks are in flight");
    complete_all_posts();
    CHECK(!nb_lanes_settle(lanes), "settled after the retransmission and before the peer has confirmed the flow");
    send_done(5);
    CHECK(nb_lanes_settle(lanes), "not settled after the peer has confirmed the flow");
    end();
}

static void send_credit(uint64_t op, uint32_t count) {
    struct wire_credits message = {.type = NB_MESSAGE_CREDITS, .count = 1};
    message.credits[0].op = op;
    message.credits[0].count = count;
    nb_lanes_up.message(lanes, lanes->lane[0], PEER, &message, NB_WIRE_CREDITS_BYTES(1));
}

// A credit for the newest operation arrives again after a lost lane. The operation is complete, so the credit is
// dropped.
static void test_credit_for_a_finished_operation_is_dropped(void) {
    const struct nb_lane_ops ops = manual_ops(NB_LANE_RMA);
    static struct side out;
    begin(&ops);
    for (uint16_t lane = 0; lane < LANES; lane++) {
        struct wire_region region = {.type = NB_MESSAGE_REGION, .lane = lane, .addr = 4096};
        nb_lanes_up.message(lanes, lanes->lane[lane], PEER, &region, sizeof region);
    }
    side_add(&out, NB_FLOW_OUT, 5, 4);
    send_credit(5, 4);
    complete_all_posts();
    send_done(5);
    CHECK(out.finished && nb_lanes_settle(lanes), "the flow is not finished and settled");
    const struct rma_peer *rma = lanes->peers[PEER].rma;
    send_credit(5, 4);
    CHECK(rma->orphans == NULL, "a credit for a finished operation is kept");
    send_credit(6, 4);
    CHECK(rma->orphans != NULL, "a credit for the next operation is dropped");
    end();
}

static void send_pong(int lane, uint32_t writes) {
    const struct wire_lane_pong pong = {.type = NB_MESSAGE_PONG, .writes = writes};
    nb_lanes_up.message(lanes, lanes->lane[lane], PEER, &pong, sizeof pong);
}

// Lets the first block that has a credit land.
static void land_first_block(int lane) {
    struct wire_credits granted = {0};
    for (int i = 0; i < received_count && granted.count == 0; i++) {
        if (received[i].type == NB_MESSAGE_CREDITS) {
            memcpy(&granted, &received[i], sizeof granted);
        }
    }
    CHECK(granted.count > 0, "no credit was sent");
    const struct wire_credit *credit = &granted.credits[0];
    const struct nb_frame frame = {.op = credit->op,
                                   .block = credit->first,
                                   .blocks = 1,
                                   .bytes = BLOCK,
                                   .slot = credit->slot,
                                   .tag = credit->tag};
    nb_lanes_up.landed(lanes, lanes->lane[lane], NB_NO_PEER, &frame);
}

// A write that completed at the sender was lost, because the lane reconnected silently. A single pong may count a write
// that has not landed yet.
static void test_lane_with_a_lost_write_is_given_up(void) {
    const struct nb_lane_ops ops = manual_ops(NB_LANE_RMA);
    static struct side in;
    begin(&ops);
    side_add(&in, NB_FLOW_IN, 5, 4);
    land_first_block(2);
    send_pong(1, 1);
    send_pong(2, 1);
    CHECK(lanes->peers[PEER].paths[1].open,
          "the lane is given up after one pong, but a write may land after the pong that counts it");
    send_pong(2, 1);
    CHECK(lanes->peers[PEER].paths[2].open, "a lane is lost whose writes have all landed");
    received_count = 0;
    send_pong(1, 1);
    CHECK(!lanes->peers[PEER].paths[1].open, "a write was lost and its lane is still open");
    CHECK(lanes->peers[PEER].paths[0].open && lanes->peers[PEER].paths[2].open, "another lane is lost");
    bool reported = false;
    for (int i = 0; i < received_count; i++) {
        reported = reported || (received[i].type == NB_MESSAGE_LOST && received[i].first == 1 << 1);
    }
    CHECK(reported, "the peer gets no report of the lost lane");
    nb_lanes_cancel(lanes, &in.flow);
    end();
}

static int pings_received(void) {
    int count = 0;
    for (int i = 0; i < received_count; i++) {
        count += received[i].type == NB_MESSAGE_PING;
    }
    received_count = 0;
    return count;
}

// Pings repeat at rising intervals, because a ping may be lost with its connection and only a later message detects it.
static void test_ping_intervals(void) {
    const struct nb_lane_ops ops = manual_ops(NB_LANE_RMA);
    const int64_t ms = 1000 * 1000, start = nb_now_ns();
    static const struct {
        int at_ms, pings;
    } ticks[] = {{0, 0}, {40, 0}, {60, LANES}, {150, 0}, {170, LANES}, {350, 0}, {380, LANES}};
    static struct side in;
    begin(&ops);
    side_add(&in, NB_FLOW_IN, 5, 4);
    pings_received();
    for (size_t i = 0; i < sizeof ticks / sizeof ticks[0]; i++) {
        nb_lanes_tick(lanes, start + ticks[i].at_ms * ms);
        int pings = pings_received();
        CHECK(pings == ticks[i].pings, "%d pings after %d ms", pings, ticks[i].at_ms);
    }
    nb_lanes_cancel(lanes, &in.flow);
    end();
}

int main(void) {
    test_report_of_many_messages(RECEIVED_MAX);
    test_report_of_many_messages(2);
    test_copy_reported_then_lost();
    test_flow_finishes_during_a_report();
    test_flow_added_during_a_report();
    test_lane_lost_while_settling();
    test_credit_for_a_finished_operation_is_dropped();
    test_lane_with_a_lost_write_is_given_up();
    test_ping_intervals();
    return 0;
}
