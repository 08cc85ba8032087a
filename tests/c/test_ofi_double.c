// Failures of libfabric, over a test double. Each call fails in turn while a lane opens and while memory is mapped;
// writes fail at completion. No object is closed twice or left open, and all data are right. The double detects misuse.
#include "flows.h"
#ifdef NB_HAVE_OFI
#include "ofi_double.h"
#include "raw_endpoint.h"
#include "transport/lanes_internal.h"

enum { BLOCK = 512, BLOCKS = 64, LANES = 2, CALLS_MAX = 200, BREAKS = 40 };

// Opens a lane while the nth call of a kind fails. Returns true if that call was made.
static bool open_fails(enum double_call call, int nth) {
    struct raw_endpoint lane;
    struct nb_error err = {0};
    double_fail(call, nth);
    int rc = raw_endpoint_open(&lane, 0, 0, 2, NULL, &err);
    bool failed = double_state.failed;
    CHECK(rc == 0 || failed, "call %d, %d: %s", (int)call, nth, err.text);
    CHECK(rc == 0 || err.text[0] != '\0', "call %d, %d: the error has no text", (int)call, nth);
    double_fail(DOUBLE_NONE, 0);
    if (rc == 0) {
        nb_ofi_ops.close(lane.lane);
    }
    return failed;
}

// While a lane opens, every call fails once.
static void test_open_failures(void) {
    for (int call = DOUBLE_GETINFO; call < DOUBLE_INSERT; call++) {
        int nth = 1;
        do {
            double_begin((uint64_t)nth, 4);
        } while (open_fails((enum double_call)call, nth++) && nth < CALLS_MAX);
        CHECK(nth > 2 && nth < CALLS_MAX, "call %d was made %d times", call, nth);
        double_end();
    }
}

// A failed registration returns an error. The lane remains usable, and the next attempt maps the memory.
static void test_map_failures(void) {
    static const enum double_call calls[] = {DOUBLE_OPEN, DOUBLE_MR_BIND, DOUBLE_MR_ENABLE};
    static unsigned char memory[BLOCK];
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        struct raw_endpoint lane;
        struct nb_region region = {0};
        struct nb_error err = {0};
        double_begin(i, 4);
        CHECK(raw_endpoint_open(&lane, 0, 0, 2, NULL, &err) == 0, "%s", err.text);
        double_fail(calls[i], 1);
        int rc = nb_ofi_ops.map(lane.lane, memory, sizeof memory, &region, &err);
        CHECK(rc < 0 && region.handle == NULL && err.text[0] != '\0', "call %d: mapped in spite of the failure",
              (int)calls[i]);
        rc = nb_ofi_ops.map(lane.lane, memory, sizeof memory, &region, &err);
        CHECK(rc == 0, "call %d: %s", (int)calls[i], err.text);
        nb_ofi_ops.unmap(lane.lane, &region);
        nb_ofi_ops.close(lane.lane);
        double_end();
    }
}

static void progress_all(struct flow_world *world) {
    for (int rank = 0; rank < 2; rank++) {
        flows_progress(&world->nodes[rank]);
    }
}

// The nth write fails: both ranks lose its lane, and the other lane carries its segments.
static void test_failed_write_loses_its_lane(int nth, size_t data_bytes) {
    struct nb_boot boots[2] = {{.rank = 0, .size = 2}, {.rank = 1, .size = 2}};
    struct flow_world *world = calloc(1, sizeof *world);
    struct nb_error err = {0};
    CHECK(world != NULL, "memory");
    double_begin((uint64_t)nth, data_bytes);
    world->ops = &nb_ofi_ops;
    world->boots = boots;
    world->plan = (struct flow_plan){
        .seed = (uint64_t)nth, .size = 2, .lanes = LANES, .segment_bytes = 4 * BLOCK, .mapped = nth % 2 == 0};
    flows_plan_crossed(&world->plan, BLOCKS, BLOCK, nth % 3 == 0);
    CHECK(nb_sock_parse("127.0.0.1:0", &world->bind, &err) == 0, "%s", err.text);
    CHECK(flows_open(world, &err) == 0, "%s", err.text);
    double_fail(DOUBLE_WRITE_DONE, nth);
    for (int rank = 0; rank < 2; rank++) {
        world->nodes[rank].may_lose = true;
        flows_add(&world->nodes[rank].sides[0]);
        flows_add(&world->nodes[rank].sides[1]);
        flows_ready(&world->nodes[rank].sides[rank], BLOCKS);
    }
    int64_t deadline = flows_deadline();
    while (!flows_done(&world->nodes[0]) || !flows_done(&world->nodes[1])) {
        progress_all(world);
        CHECK(nb_now_ns() < deadline, "write %d failed: only %d and %d flows finished", nth, world->nodes[0].finished,
              world->nodes[1].finished);
    }
    CHECK(!double_state.failed || world->nodes[0].lost + world->nodes[1].lost > 0, "write %d failed: no lane is lost",
          nth);
    CHECK(nb_lanes_left(world->nodes[0].lanes, 1) >= LANES - 1, "write %d failed: both lanes are lost", nth);
    flows_close(world);
    double_end();
    free(world);
}

// Connects `from` to the endpoint of rank `peer`.
static void connect_to(struct raw_endpoint *from, const struct raw_endpoint *to, int peer) {
    unsigned char address[NB_LANE_ADDR_MAX];
    struct nb_error err = {0};
    size_t bytes = 0;
    nb_ofi_ops.address(to->lane, address, &bytes);
    CHECK(nb_ofi_ops.peer_open(from->lane, peer, address, bytes, &err) == 0, "%s", err.text);
}

// Writes have landed, but the message that reports their arrivals is not sent yet. A lane that closes or fails then
// still completes the writes.
static void test_close_before_arrival_report(bool peer_fails) {
    enum { WRITES = 8 };
    static unsigned char memory[BLOCK];
    static unsigned char source[BLOCK];
    struct raw_endpoint sender;
    struct raw_endpoint receiver;
    struct nb_region region = {0};
    struct nb_error err = {0};
    double_begin(0, 4);
    CHECK(raw_endpoint_open(&sender, 0, 0, 2, NULL, &err) == 0, "%s", err.text);
    CHECK(raw_endpoint_open(&receiver, 0, 1, 2, NULL, &err) == 0, "%s", err.text);
    CHECK(nb_ofi_ops.map(receiver.lane, memory, sizeof memory, &region, &err) == 0, "%s", err.text);
    connect_to(&sender, &receiver, 1);
    double_state.send_blocked = true;
    int64_t deadline = flows_deadline();
    for (int i = 0; i < WRITES;) {
        struct nb_request *request = &sender.requests[i];
        *request = (struct nb_request){.frame = {.blocks = 1, .bytes = BLOCK},
                                       .peer = 1,
                                       .iov_count = 1,
                                       .iov = {{.iov_base = source, .iov_len = BLOCK}},
                                       .remote_addr = region.addr,
                                       .remote_key = region.key};
        i += nb_ofi_ops.post(sender.lane, request) == 0;
        (void)nb_ofi_ops.progress(sender.lane);
        CHECK(nb_now_ns() < deadline, "only %d writes were accepted", i);
    }
    while (nb_ofi_lane_of(sender.lane)->landed < WRITES) {
        (void)nb_ofi_ops.progress(sender.lane);
        CHECK(nb_now_ns() < deadline, "only %d writes landed", nb_ofi_lane_of(sender.lane)->landed);
    }
    CHECK(sender.sent == 0 && nb_ofi_ops.arm(sender.lane) == -EAGAIN, "a write completed without a report");
    if (peer_fails) {
        (void)nb_ofi_peer_fail(nb_ofi_lane_of(sender.lane), 1, FI_EIO, "a test");
        while (!sender.lost) {
            (void)nb_ofi_ops.progress(sender.lane);
            CHECK(nb_now_ns() < deadline, "the failure is not reported");
        }
    } else {
        nb_ofi_ops.peer_close(sender.lane, 1);
    }
    CHECK(sender.sent == WRITES, "%llu of %d writes completed", (unsigned long long)sender.sent, WRITES);
    nb_ofi_ops.unmap(receiver.lane, &region);
    nb_ofi_ops.close(sender.lane);
    nb_ofi_ops.close(receiver.lane);
    double_end();
}

// A message from a peer that is not open yet is delivered once the peer opens, unless that flow was closed meanwhile.
static void test_message_before_opening(bool closes) {
    static const char word[] = "early";
    struct raw_endpoint sender;
    struct raw_endpoint receiver;
    struct nb_error err = {0};
    int64_t deadline = flows_deadline();
    double_begin(0, 4);
    CHECK(raw_endpoint_open(&sender, 0, 0, 2, NULL, &err) == 0, "%s", err.text);
    CHECK(raw_endpoint_open(&receiver, 0, 1, 2, NULL, &err) == 0, "%s", err.text);
    connect_to(&sender, &receiver, 1);
    for (bool sent = false; !sent || nb_list_empty(&nb_ofi_lane_of(receiver.lane)->held);) {
        sent = sent || nb_ofi_ops.message(sender.lane, 1, word, sizeof word) == 0;
        (void)nb_ofi_ops.progress(sender.lane);
        (void)nb_ofi_ops.progress(receiver.lane);
        CHECK(nb_now_ns() < deadline, "the message did not arrive");
    }
    CHECK(receiver.messages == 0, "a message is delivered before the peer is open");
    connect_to(&receiver, &sender, 0);
    if (closes) {
        nb_ofi_ops.peer_close(receiver.lane, 0);
    }
    (void)nb_ofi_ops.progress(receiver.lane);
    CHECK(receiver.messages == (closes ? 0 : 1), "a peer that is %s gets %llu messages delivered",
          closes ? "closed" : "open", (unsigned long long)receiver.messages);
    nb_ofi_ops.close(sender.lane);
    nb_ofi_ops.close(receiver.lane);
    double_end();
}

// The double's number of a lane's endpoint, from the address that peers get.
static uint64_t endpoint_of(const struct nb_lane *lane) {
    unsigned char address[NB_LANE_ADDR_MAX];
    struct wire_ofi_address at;
    uint64_t number;
    size_t bytes = 0;
    nb_ofi_ops.address(lane, address, &bytes);
    CHECK(bytes == sizeof at, "the address has %zu bytes", bytes);
    memcpy(&at, address, sizeof at);
    memcpy(&number, at.name, sizeof number);
    return number;
}

// Sends two arrivals to a lane, with completion data of 4 bytes: of the first blocks of slot 0, and with all bits set.
static void forge_arrivals(const struct nb_lane *lane) {
    const struct nb_frame frame = {.blocks = 4};
    double_arrive(endpoint_of(lane), nb_frame_pack(&frame), FI_REMOTE_CQ_DATA);
    double_arrive(endpoint_of(lane), UINT32_MAX, FI_REMOTE_CQ_DATA);
}

// The lane itself refuses them: it does not depend on the credits' tags.
static void test_short_completion_data_stops_at_the_lane(void) {
    struct raw_endpoint victim;
    struct raw_endpoint other;
    struct nb_error err = {0};
    int64_t deadline = flows_deadline();
    double_begin(0, 4);
    CHECK(raw_endpoint_open(&victim, 0, 0, 2, NULL, &err) == 0, "%s", err.text);
    CHECK(raw_endpoint_open(&other, 0, 1, 2, NULL, &err) == 0, "%s", err.text);
    forge_arrivals(victim.lane);
    while (victim.lane->refused + victim.landed < 2) {
        (void)nb_ofi_ops.progress(victim.lane);
        (void)nb_ofi_ops.progress(other.lane);
        CHECK(nb_now_ns() < deadline, "only %llu arrivals are refused", (unsigned long long)victim.lane->refused);
    }
    CHECK(victim.landed == 0, "%llu arrivals are accepted", (unsigned long long)victim.landed);
    CHECK(other.landed + other.lane->refused == 0, "an arrival goes to another lane");
    nb_ofi_ops.close(victim.lane);
    nb_ofi_ops.close(other.lane);
    double_end();
}

// Completion data of 4 bytes cannot be authenticated: such arrivals are refused, and the lane remains usable.
static void test_short_completion_data(void) {
    struct nb_boot boots[2] = {{.rank = 0, .size = 2}, {.rank = 1, .size = 2}};
    struct flow_world *world = calloc(1, sizeof *world);
    struct nb_error err = {0};
    CHECK(world != NULL, "memory");
    double_begin(0, 4);
    world->ops = &nb_ofi_ops;
    world->boots = boots;
    world->plan = (struct flow_plan){.size = 2, .lanes = 1, .segment_bytes = 4 * BLOCK, .mapped = true, .count = 1};
    world->plan.specs[0] = (struct flow_spec){.from = 0,
                                              .to = 1,
                                              .op = 1,
                                              .blocks = BLOCKS,
                                              .full = BLOCKS,
                                              .block_bytes = BLOCK,
                                              .bytes = (size_t)BLOCKS * BLOCK,
                                              .step = BLOCKS};
    CHECK(flows_open(world, &err) == 0, "%s", err.text);
    struct nb_lanes *lanes = world->nodes[1].lanes;
    forge_arrivals(lanes->lane[0]);
    flows_add(&world->nodes[1].sides[0]);
    int64_t deadline = flows_deadline();
    while (nb_lanes_refused(lanes) < 2) {
        progress_all(world);
        CHECK(world->nodes[1].sides[0].landed == 0, "an arrival was accepted");
        CHECK(nb_now_ns() < deadline, "only %llu arrivals are refused", (unsigned long long)nb_lanes_refused(lanes));
    }
    flows_add(&world->nodes[0].sides[0]);
    flows_ready(&world->nodes[0].sides[0], BLOCKS);
    while (!flows_done(&world->nodes[0]) || !flows_done(&world->nodes[1])) {
        progress_all(world);
        CHECK(nb_now_ns() < deadline, "the flow does not finish");
    }
    CHECK(nb_lanes_refused(lanes) == 2, "%llu arrivals are refused", (unsigned long long)nb_lanes_refused(lanes));
    CHECK(nb_lanes_refused(world->nodes[0].lanes) == 0, "an arrival went to the other rank");
    flows_close(world);
    double_end();
    free(world);
}

int main(void) {
    test_open_failures();
    test_map_failures();
    for (int nth = 1; nth <= BREAKS; nth++) {
        test_failed_write_loses_its_lane(nth, nth % 4 == 0 ? 8 : 4);
    }
    test_close_before_arrival_report(false);
    test_close_before_arrival_report(true);
    test_message_before_opening(false);
    test_message_before_opening(true);
    test_short_completion_data_stops_at_the_lane();
    test_short_completion_data();
    return 0;
}
#else
int main(void) {
    SKIP("built without libfabric's headers");
}
#endif
