// Pull scheduler (lanes.c) on a simulated network: thousands of seeded schedules. All ranks run in one thread, so a
// failing seed is reproducible. test_lanes SEED runs one seed.
#include "flows.h"
#include "lane_stubs.h"
#include "transport/credits.h"
#include "transport/lanes_internal.h"

#if defined(__SANITIZE_THREAD__)
enum { SCHEDULES = 2000 }; // fewer: with one thread there is no race to find
#else
enum { SCHEDULES = 10000 };
#endif
enum {
    BLOCK_MAX = 256,
    BREAKS = 3,
    BREAK_PASSES = 400,
    AWAIT_PASSES = 200,
    BLOCKS_MAX = 24,
    PASSES_MAX = 200000,
    BAD_BLOCK = 64,
    BAD_PASSES = 400
};

// Random breaks of lanes, between any pair of ranks, at any time. One lane never breaks.
struct breaks {
    uint64_t random;
    int safe;
    int left;
    int pass; // of the next break
    int done;
};

// Logarithmic distribution: early breaks are as likely as late ones.
static int breaks_wait(struct breaks *breaks) {
    return (int)flows_below(&breaks->random, (uint32_t)4 << flows_below(&breaks->random, 8));
}

static struct breaks breaks_plan(const struct flow_plan *plan) {
    struct breaks breaks = {.random = plan->seed * 7 + 5};
    breaks.safe = (int)flows_below(&breaks.random, (uint32_t)plan->lanes);
    breaks.left = plan->lanes > 1 ? (int)flows_below(&breaks.random, BREAKS + 1) : 0;
    breaks.pass = breaks_wait(&breaks);
    return breaks;
}

static void breaks_apply(struct breaks *breaks, struct flow_world *world, int pass) {
    if (breaks->left == 0 || pass < breaks->pass) {
        return;
    }
    uint32_t size = (uint32_t)world->plan.size;
    int from = (int)flows_below(&breaks->random, size);
    int to = (from + 1 + (int)flows_below(&breaks->random, size - 1)) % (int)size;
    int lane = (int)flows_below(&breaks->random, (uint32_t)world->plan.lanes);
    breaks->left--;
    breaks->pass = pass + breaks_wait(breaks);
    if (lane != breaks->safe) {
        nb_mem_break(world->net, from, to, lane);
        breaks->done++;
    }
}

// Adds up the lanes' counts of sent and landed bytes.
static void count_bytes(const struct flow_world *world, uint64_t *sent, uint64_t *landed) {
    for (int rank = 0; rank < world->plan.size; rank++) {
        for (int peer = 0; peer < world->plan.size; peer++) {
            for (int lane = 0; lane < world->plan.lanes && peer != rank; lane++) {
                struct nb_lane_stats stats;
                nb_lanes_stats(world->nodes[rank].lanes, peer, lane, &stats);
                *sent += stats.bytes_out;
                *landed += stats.bytes_in;
            }
        }
    }
}

// Runs a schedule. Returns the number of lanes that broke.
static int run(int kind, uint64_t seed) {
    struct flow_world world = {.ops = nb_mem_ops(kind)};
    struct nb_error err = {0};
    flows_plan(&world.plan, seed, BLOCK_MAX, BLOCKS_MAX);
    int rc = flows_open(&world, &err);
    CHECK(rc == 0, "open: %s", err.text);
    struct breaks breaks = breaks_plan(&world.plan);
    for (int rank = 0; rank < world.plan.size; rank++) {
        world.nodes[rank].may_lose = breaks.left > 0;
    }
    uint64_t random = seed;
    int done = 0;
    int awaits_from[FLOWS_RANKS_MAX]; // pass at which a rank begins to await starts
    for (int rank = 0; rank < FLOWS_RANKS_MAX; rank++) {
        awaits_from[rank] = seed % 4 < 2 ? PASSES_MAX : (int)flows_below(&random, AWAIT_PASSES);
    }
    for (int pass = 0; done < world.plan.size; pass++) {
        CHECK(pass < PASSES_MAX, "%s seed %llu does not finish", world.ops->name, (unsigned long long)seed);
        breaks_apply(&breaks, &world, pass);
        for (int rank = 0; rank < world.plan.size; rank++) {
            if (pass == awaits_from[rank]) {
                nb_lanes_await_starts(world.nodes[rank].lanes);
            }
        }
        flows_step(&world.nodes[flows_below(&random, (uint32_t)world.plan.size)]);
        done = 0;
        for (int rank = 0; rank < world.plan.size; rank++) {
            done += flows_done(&world.nodes[rank]);
        }
    }
    uint64_t sent = 0;
    uint64_t landed = 0;
    uint64_t want = 0;
    for (int i = 0; i < world.plan.count; i++) {
        want += world.plan.specs[i].bytes;
    }
    count_bytes(&world, &sent, &landed);
    // Segments of a lost lane may be sent twice, but no block lands twice.
    CHECK(landed == want && (sent == want || breaks.done > 0), "seed %llu: %llu bytes sent, %llu landed, of %llu",
          (unsigned long long)seed, (unsigned long long)sent, (unsigned long long)landed, (unsigned long long)want);
    flows_close(&world);
    return breaks.done;
}

// A sender that violates the protocol: a lane without a scheduler.
struct rogue {
    struct nb_lane *lane;
    bool lost;
    bool sent;
    struct wire_region region;   // RMA: the receiver's buffers
    struct wire_credits credits; // the first message of credits
};

static void rogue_sent(void *ctx, struct nb_lane *lane, struct nb_request *request, int code) {
    struct rogue *rogue = ctx;
    (void)lane;
    (void)request;
    rogue->sent = code == 0;
}

static void rogue_message(void *ctx, struct nb_lane *lane, int peer, const void *data, size_t bytes) {
    struct rogue *rogue = ctx;
    (void)lane;
    (void)peer;
    if (bytes == sizeof rogue->region) {
        memcpy(&rogue->region, data, bytes);
    } else if (((const unsigned char *)data)[0] == NB_MESSAGE_CREDITS && rogue->credits.count == 0) {
        memcpy(&rogue->credits, data, bytes);
    }
}

static void rogue_lost(void *ctx, struct nb_lane *lane, int peer, const struct nb_error *why) {
    struct rogue *rogue = ctx;
    (void)lane;
    (void)peer;
    (void)why;
    rogue->lost = true;
}

static void rogue_open(struct rogue *rogue, struct flow_world *world) {
    static const struct nb_lane_up up = {.place = stub_place,
                                         .landed = stub_landed,
                                         .sent = rogue_sent,
                                         .writable = stub_writable,
                                         .message = rogue_message,
                                         .lost = rogue_lost};
    unsigned char address[1024];
    size_t bytes = 0;
    struct nb_error err = {0};
    struct nb_lane_config config = {.size = 2, .library = world->net_name, .up = &up, .up_ctx = rogue};
    CHECK(world->ops->open(&config, &rogue->lane, &err) == 0, "%s", err.text);
    CHECK(nb_lanes_address_bytes(world->nodes[1].lanes) <= sizeof address, "one lane");
    nb_lanes_address(world->nodes[1].lanes, address); // 8 bytes of length, then the lane's address
    CHECK(world->ops->peer_open(rogue->lane, 1, address + 8, 2, &err) == 0, "%s", err.text);
    memset(address, 0, sizeof address);
    world->ops->address(rogue->lane, address + 8, &bytes);
    memcpy(address, &(uint32_t){(uint32_t)bytes}, sizeof(uint32_t));
    CHECK(nb_lanes_peer_open(world->nodes[1].lanes, 0, address, &err) == 0, "%s", err.text);
}

// Sends one frame with matching data. True: the segment was delivered and the lane is not lost.
static bool rogue_send(struct rogue *rogue, struct flow_world *world, struct nb_frame frame) {
    unsigned char data[16 * BAD_BLOCK];
    struct nb_request request = {
        .frame = frame, .peer = 1, .iov_count = 1, .remote_addr = rogue->region.addr, .remote_key = rogue->region.key};
    for (size_t i = 0; i < sizeof data; i++) {
        data[i] = flows_byte(frame.op, frame.block * (size_t)BAD_BLOCK + i);
    }
    request.iov[0] = (struct iovec){.iov_base = data, .iov_len = frame.bytes};
    bool posted = false;
    rogue->sent = false;
    for (int pass = 0; pass < BAD_PASSES; pass++) {
        posted = posted || (!rogue->lost && world->ops->post(rogue->lane, &request) == 0);
        (void)world->ops->progress(rogue->lane);
        flows_progress(&world->nodes[1]);
    }
    return rogue->sent && !rogue->lost;
}

// Opens the rogue as rank 0 and a real rank 1, which receives one flow of so many blocks. RMA: a second flow is added
// later.
static void rogue_world_open(struct flow_world *world, struct rogue *rogue, int kind, uint32_t blocks, uint64_t seed) {
    struct nb_error err = {0};
    *world = (struct flow_world){.ops = nb_mem_ops(kind)};
    *rogue = (struct rogue){0};
    world->plan = (struct flow_plan){.seed = seed, .size = 2, .lanes = 1, .segment_bytes = 4 * BAD_BLOCK, .count = 1};
    world->plan.specs[0] = (struct flow_spec){.from = 0,
                                              .to = 1,
                                              .op = 3,
                                              .blocks = blocks,
                                              .full = blocks,
                                              .block_bytes = BAD_BLOCK,
                                              .bytes = blocks * (size_t)BAD_BLOCK,
                                              .step = blocks,
                                              .staged = kind == NB_LANE_RMA};
    world->plan.specs[1] = world->plan.specs[0];
    world->plan.specs[1].op++;
    world->plan.count += kind == NB_LANE_RMA;
    world->net = nb_mem_net_open(2, 1, seed);
    CHECK(world->net != NULL, "memory");
    nb_mem_net_name(world->net, world->net_name);
    CHECK(flows_node_open(world, 1, &err) == 0, "%s", err.text);
    world->nodes[1].may_lose = true;
    rogue_open(rogue, world);
    flows_add(&world->nodes[1].sides[0]);
}

static void rogue_await_credits(struct rogue *rogue, struct flow_world *world) {
    for (int pass = 0; pass < BAD_PASSES; pass++) {
        (void)world->ops->progress(rogue->lane);
        flows_progress(&world->nodes[1]);
    }
    CHECK(rogue->region.type == NB_MESSAGE_REGION && rogue->credits.count > 0, "the rogue got no region or no credit");
}

// Sends an invalid arrival, and checks that it is dropped and counted and that no lane is lost.
static void check_refused(struct rogue *rogue, struct flow_world *world, struct nb_frame frame, const char *what) {
    const struct flow_node *node = &world->nodes[1];
    uint64_t refused = nb_lanes_refused(node->lanes);
    uint32_t landed = node->sides[0].landed + node->sides[1].landed;
    (void)rogue_send(rogue, world, frame);
    CHECK(node->sides[0].landed + node->sides[1].landed == landed, "%s was accepted", what);
    CHECK(node->lost == 0, "%s: a lane was lost", what);
    CHECK(nb_lanes_refused(node->lanes) == refused + 1, "%s was not counted", what);
}

// An arrival without the tag of the credit that it names changes no block and blames no rank.
static void test_arrivals_without_a_valid_credit(uint64_t seed) {
    enum { GRANTED = 4, BUFFERED = 32 * GRANTED };
    struct flow_world world;
    struct rogue rogue;
    rogue_world_open(&world, &rogue, NB_LANE_RMA, BUFFERED + 8, seed);
    struct flow_node *node = &world.nodes[1];
    rogue_await_credits(&rogue, &world);
    const struct wire_credit *credit = &rogue.credits.credits[0];
    const struct nb_frame right = {
        .op = 3, .blocks = GRANTED, .slot = credit->slot, .tag = credit->tag, .bytes = GRANTED * BAD_BLOCK};
    CHECK(credit->tag != 0 && credit->first == 0 && credit->count == GRANTED, "unexpected first credit");
    CHECK(credit->tag != rogue.credits.credits[1].tag, "two credits with one tag");
    struct nb_frame frame = right;
    frame.tag = 0;
    check_refused(&rogue, &world, frame, "no tag");
    frame.tag = right.tag ^ 1;
    check_refused(&rogue, &world, frame, "a wrong tag");
    frame.tag = rogue.credits.credits[1].tag;
    check_refused(&rogue, &world, frame, "another credit's tag");
    frame = right;
    frame.slot = (uint16_t)(right.slot + 1);
    check_refused(&rogue, &world, frame, "an unused slot");
    frame = right;
    frame.block = BUFFERED;
    frame.blocks = 1;
    check_refused(&rogue, &world, frame, "a block without a credit");
    frame.block = UINT16_MAX;
    check_refused(&rogue, &world, frame, "a block beyond the end");
    frame.block = right.block + 1;
    frame.blocks = right.blocks;
    check_refused(&rogue, &world, frame, "more blocks than the credit has");
    CHECK(rogue_send(&rogue, &world, right) && node->sides[0].landed == GRANTED, "the valid arrival was dropped");
    check_refused(&rogue, &world, right, "blocks that have landed");
    nb_lanes_cancel(node->lanes, &node->sides[0].flow);
    world.ops->close(rogue.lane);
    flows_close(&world);
}

// The tag of a finished operation is invalid for the next one, which reuses its slot and its buffers.
static void test_tag_of_a_finished_operation(uint64_t seed) {
    enum { BLOCKS = 4 };
    struct flow_world world;
    struct rogue rogue;
    rogue_world_open(&world, &rogue, NB_LANE_RMA, BLOCKS, seed);
    struct flow_node *node = &world.nodes[1];
    rogue_await_credits(&rogue, &world);
    struct wire_credit credit = rogue.credits.credits[0];
    struct nb_frame old = {
        .op = 3, .blocks = BLOCKS, .slot = credit.slot, .tag = credit.tag, .bytes = BLOCKS * BAD_BLOCK};
    CHECK(rogue_send(&rogue, &world, old) && node->sides[0].finished, "the first operation is not finished");
    check_refused(&rogue, &world, old, "an arrival between two operations");
    rogue.credits.count = 0;
    flows_add(&node->sides[1]);
    rogue_await_credits(&rogue, &world);
    CHECK(rogue.credits.credits[0].slot == credit.slot && rogue.credits.credits[0].offset == credit.offset,
          "the credit has other memory");
    old.op++;
    check_refused(&rogue, &world, old, "a tag of a finished operation");
    old.tag = rogue.credits.credits[0].tag;
    CHECK(rogue_send(&rogue, &world, old) && node->sides[1].finished, "the valid arrival was dropped");
    world.ops->close(rogue.lane);
    flows_close(&world);
}

// An invalid announcement is refused before a byte lands, and the lane is lost.
static void test_bad_announcements(uint64_t seed) {
    static const struct nb_frame bad[] = {
        {.op = 3, .block = 0, .blocks = 1, .bytes = BAD_BLOCK},     // has landed already
        {.op = 3, .block = 8, .blocks = 1, .bytes = BAD_BLOCK},     // beyond the end
        {.op = 3, .block = 6, .blocks = 4, .bytes = 4 * BAD_BLOCK}, // crosses the end
        {.op = 3, .block = 0xffffffff, .blocks = 2, .bytes = BAD_BLOCK},
        {.op = 3, .block = 2, .blocks = 1, .bytes = BAD_BLOCK - 1}, // too short
        {.op = 3, .block = 2, .blocks = 1, .bytes = BAD_BLOCK + 1}, // too long
        {.op = 3, .block = 2, .blocks = 0, .bytes = 0},             // empty
        {.op = 2, .block = 2, .blocks = 1, .bytes = BAD_BLOCK},     // a finished operation
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct flow_world world;
        struct rogue rogue;
        rogue_world_open(&world, &rogue, NB_LANE_STREAM, 8, seed);
        struct flow_node *node = &world.nodes[1];
        struct flow_side *side = &node->sides[0];
        nb_bits_set(side->flow.map, 0); // marks it as landed
        CHECK(!rogue_send(&rogue, &world, bad[i]), "announcement %zu was accepted", i);
        CHECK(node->lost == 1 && node->left_last == 0, "announcement %zu left the lane up", i);
        for (size_t at = 0; at < side->memory_bytes; at++) {
            CHECK(side->memory[at] == FLOWS_GUARD, "announcement %zu wrote byte %zu", i, at);
        }
        world.ops->close(rogue.lane);
        flows_close(&world);
    }
}

static int no_memory(const struct nb_flow *flow, uint32_t first, uint32_t count, struct iovec *iov) {
    enum { TORN = 5 }; // a block in more pieces than a segment carries
    return first <= TORN && first + count > TORN ? 0 : flows_op_memory(flow, first, count, iov);
}

// A block without readable memory is not announced. Other flows continue.
static void test_block_without_memory(int kind, size_t copy_bytes, uint64_t seed) {
    struct flow_world world = {.ops = nb_mem_ops(kind)};
    struct nb_error err = {0};
    struct nb_flow_ops ops = *flows_ops();
    ops.memory = no_memory;
    world.plan = (struct flow_plan){
        .seed = seed, .size = 2, .lanes = 2, .segment_bytes = BAD_BLOCK, .copy_bytes = copy_bytes, .count = 2};
    for (int i = 0; i < 2; i++) {
        world.plan.specs[i] = (struct flow_spec){.from = 0,
                                                 .to = 1,
                                                 .op = (uint64_t)i + 1,
                                                 .blocks = 12,
                                                 .full = 12,
                                                 .block_bytes = BAD_BLOCK,
                                                 .bytes = 12 * BAD_BLOCK,
                                                 .step = 12,
                                                 .ready_first = true};
    }
    CHECK(flows_open(&world, &err) == 0, "open: %s", err.text);
    struct flow_node *from = &world.nodes[0];
    from->may_fail = true;
    from->sides[0].flow.ops = &ops;
    for (int i = 0; i < 2; i++) {
        flows_add(&world.nodes[1].sides[i]);
        flows_add(&from->sides[i]);
    }
    for (int pass = 0; pass < PASSES_MAX && !world.nodes[1].sides[1].finished; pass++) {
        flows_progress(&world.nodes[pass % 2]);
    }
    CHECK(world.nodes[1].sides[1].finished, "the other flow does not finish");
    CHECK(from->failed == 1 && from->failure.code == -EFAULT && from->failure.peer == 1, "%d failures, %s",
          from->failed, from->failure.text);
    CHECK(world.nodes[1].sides[0].seen[5] == 0 && !from->sides[0].finished, "the block is reported as landed");
    flows_close(&world);
}

// Opens two ranks with one flow, which both have added.
static void pair_open(struct flow_world *world, int kind, struct flow_spec spec, uint64_t seed) {
    struct nb_error err = {0};
    *world = (struct flow_world){.ops = nb_mem_ops(kind)};
    world->plan = (struct flow_plan){.seed = seed, .size = 2, .lanes = 1, .segment_bytes = BAD_BLOCK, .count = 1};
    spec.to = 1;
    spec.op = 1;
    spec.full = spec.step = spec.blocks;
    spec.block_bytes = BAD_BLOCK;
    spec.bytes = (size_t)spec.blocks * BAD_BLOCK;
    world->plan.specs[0] = spec;
    CHECK(flows_open(world, &err) == 0, "open: %s", err.text);
    flows_add(&world->nodes[1].sides[0]);
    flows_add(&world->nodes[0].sides[0]);
}

static void pair_progress(struct flow_world *world) {
    for (int pass = 0; pass < BAD_PASSES; pass++) {
        flows_progress(&world->nodes[pass % 2]);
    }
}

static void pair_end(struct flow_world *world) {
    for (int pass = 0; pass < PASSES_MAX && !flows_done(&world->nodes[1]); pass++) {
        flows_progress(&world->nodes[pass % 2]);
    }
    CHECK(flows_done(&world->nodes[1]), "the flow does not finish");
    flows_close(world);
}

// A block without a credit does not delay later blocks that have one.
static void test_late_credit(uint64_t seed) {
    enum { BLOCKS = 6 };
    struct flow_world world;
    pair_open(&world, NB_LANE_RMA, (struct flow_spec){.blocks = BLOCKS, .staged = seed % 2 == 0}, seed);
    struct flow_side *from = &world.nodes[0].sides[0];
    struct flow_side *to = &world.nodes[1].sides[0];
    pair_progress(&world);
    struct credit *late = from->flow.credits;
    CHECK(late != NULL && late->next != NULL && late->wire.first == 0, "unexpected first credit");
    from->flow.credits = late->next;
    uint32_t held = late->wire.count;
    flows_ready(from, BLOCKS);
    pair_progress(&world);
    CHECK(to->landed == BLOCKS - held && to->seen[0] == 0, "%u blocks landed of %d with credits", to->landed,
          BLOCKS - (int)held);
    late->next = from->flow.credits;
    from->flow.credits = late;
    flows_ready(from, 0);
    pair_end(&world);
}

// If starts are awaited, a flow that its receiver has not started does not block an earlier flow on the lane.
static void test_flow_started_late_by_its_receiver(int awaits_first, uint64_t seed) {
    enum { BLOCKS = 6 };
    struct flow_world world = {.ops = nb_mem_ops(NB_LANE_STREAM)};
    struct nb_error err = {0};
    world.plan = (struct flow_plan){.seed = seed, .size = 2, .lanes = 1, .segment_bytes = BAD_BLOCK, .count = 2};
    for (int i = 0; i < 2; i++) {
        world.plan.specs[i] = (struct flow_spec){.to = 1,
                                                 .op = (uint64_t)i + 1,
                                                 .blocks = BLOCKS,
                                                 .full = BLOCKS,
                                                 .step = BLOCKS,
                                                 .block_bytes = BAD_BLOCK,
                                                 .bytes = (size_t)BLOCKS * BAD_BLOCK,
                                                 .ready_first = i == 1};
    }
    CHECK(flows_open(&world, &err) == 0, "open: %s", err.text);
    struct flow_side *to = world.nodes[1].sides;
    struct flow_side *from = world.nodes[0].sides;
    for (int i = 0; i < 2; i++) {
        nb_lanes_await_starts(world.nodes[(awaits_first + i) % 2].lanes);
    }
    flows_add(&to[0]);
    flows_add(&from[0]);
    flows_add(&from[1]);
    pair_progress(&world);
    flows_ready(&from[0], BLOCKS);
    pair_progress(&world);
    CHECK(to[0].finished && to[1].landed == 0, "seed %llu: the first flow waits behind one that is not started",
          (unsigned long long)seed);
    flows_add(&to[1]);
    pair_end(&world);
}

// A flow without a copy reserves one run for each of its blocks.
static void test_reserved_runs_of_a_long_flow(uint64_t seed) {
    enum { BLOCKS = 1000 };
    struct flow_world world;
    pair_open(&world, seed % 2 == 0 ? NB_LANE_STREAM : NB_LANE_RMA,
              (struct flow_spec){.blocks = BLOCKS, .ready_first = true}, seed);
    size_t runs = world.nodes[0].lanes->runs.count;
    CHECK(runs >= BLOCKS && runs < 2 * BLOCKS, "%zu runs for %d blocks", runs, BLOCKS);
    pair_end(&world);
}

int main(int argc, char **argv) {
    if (argc > 1) {
        uint64_t seed = strtoull(argv[1], NULL, 10);
        run(seed % 2 == 0 ? NB_LANE_STREAM : NB_LANE_RMA, seed);
        return 0;
    }
    for (uint64_t seed = 0; seed < 20; seed++) {
        test_bad_announcements(seed);
        test_arrivals_without_a_valid_credit(seed);
        test_tag_of_a_finished_operation(seed);
        test_late_credit(seed);
        test_reserved_runs_of_a_long_flow(seed);
        test_flow_started_late_by_its_receiver((int)(seed % 2), seed);
        test_block_without_memory(seed % 2 == 0 ? NB_LANE_STREAM : NB_LANE_RMA, seed % 4 < 2 ? 0 : 4096, seed);
    }
    int broken = 0;
    for (uint64_t seed = 0; seed < SCHEDULES; seed++) {
        broken += run(seed % 2 == 0 ? NB_LANE_STREAM : NB_LANE_RMA, seed) > 0;
    }
    CHECK(broken > SCHEDULES / 4, "a lane broke in only %d of %d schedules", broken, SCHEDULES);
    printf("%d schedules, a lane broke in %d\n", SCHEDULES, broken);
    return 0;
}
