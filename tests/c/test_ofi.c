// Unauthenticated arrivals and messages on the libfabric lane are dropped and counted. They do not land, cost no
// lane and blame no rank. NETBOTTLENECK_LIBFABRIC and NETBOTTLENECK_PROVIDER choose the library and the provider.
#include "flows.h"
#ifdef NB_HAVE_OFI
#include "outsider.h"
#include "transport/credits.h"

enum { BLOCK = 4096, BLOCKS = 24, LANES = 2 };

static void boots_make(struct nb_boot boots[2]) {
    for (int rank = 0; rank < 2; rank++) {
        boots[rank] = (struct nb_boot){.rank = rank, .size = 2};
        memset(boots[rank].session, 0x5a, sizeof boots[rank].session);
    }
}

// Two ranks that owe each other a flow; the library is there.
static struct flow_world *world_make(struct nb_boot boots[2], bool staged) {
    struct flow_world *world = calloc(1, sizeof *world);
    struct nb_error err = {0};
    CHECK(world != NULL, "memory");
    boots_make(boots);
    world->ops = &nb_ofi_ops;
    world->library = getenv("NETBOTTLENECK_LIBFABRIC");
    world->provider = getenv("NETBOTTLENECK_PROVIDER");
    world->boots = boots;
    world->plan = (struct flow_plan){.seed = 1, .size = 2, .lanes = LANES, .segment_bytes = 4 * BLOCK, .mapped = true};
    flows_plan_crossed(&world->plan, BLOCKS, BLOCK, staged);
    CHECK(nb_sock_parse("127.0.0.1:0", &world->bind, &err) == 0, "%s", err.text);
    CHECK(flows_open(world, &err) == 0, "%s", err.text);
    return world;
}

static void world_free(struct flow_world *world) {
    flows_close(world);
    free(world);
}

static void turn_all(struct flow_world *world, struct outsider *outsider) {
    for (int rank = 0; rank < 2; rank++) {
        flows_turn(&world->nodes[rank]);
    }
    if (outsider != NULL) {
        (void)nb_ofi_ops.progress(outsider->lane);
    }
}

#define TURN_UNTIL(world, outsider, cond)                                                                              \
    for (int64_t deadline = flows_deadline(); !(cond);) {                                                              \
        turn_all(world, outsider);                                                                                     \
        CHECK(nb_now_ns() < deadline, "never: " #cond);                                                                \
    }

// Shows the outsider where a rank's lane is.
static void outsider_meet(struct outsider *outsider, const struct flow_world *world, int victim, int lane) {
    struct nb_error err = {0};
    struct wire_lane_address address[LANES];
    CHECK(nb_lanes_address_bytes(world->nodes[victim].lanes) == sizeof address, "%d lanes", LANES);
    nb_lanes_address(world->nodes[victim].lanes, address);
    int rc = nb_ofi_ops.peer_open(outsider->lane, victim, address[lane].addr, address[lane].bytes, &err);
    CHECK(rc == 0, "%s", err.text);
}

// Sends an arrival until it is counted as refused; nothing else changes.
static void arrival_refused(struct flow_world *world, struct outsider *outsider, struct nb_frame frame,
                            const char *what) {
    struct flow_node *victim = &world->nodes[1];
    uint64_t refused = nb_lanes_refused(victim->lanes);
    int rc = -EAGAIN;
    TURN_UNTIL(world, outsider, (rc = rc == -EAGAIN ? outsider_arrive(outsider, 1, frame) : rc) != -EAGAIN);
    CHECK(rc == 0, "%s: %s", what, nb_code_name(rc));
    TURN_UNTIL(world, outsider, nb_lanes_refused(victim->lanes) > refused || victim->sides[0].landed > 0);
    CHECK(victim->sides[0].landed == 0, "%s was taken", what);
    CHECK(nb_lanes_refused(victim->lanes) == refused + 1, "%s counts %llu times", what,
          (unsigned long long)(nb_lanes_refused(victim->lanes) - refused));
}

static void flows_go(struct flow_world *world, struct outsider *outsider) {
    for (int rank = 0; rank < 2; rank++) {
        flows_ready(&world->nodes[rank].sides[rank], BLOCKS);
    }
    TURN_UNTIL(world, outsider, flows_done(&world->nodes[0]) && flows_done(&world->nodes[1]));
}

// The flow is granted and its sender has sent nothing: whatever a stranger says of its blocks is not so.
static void test_forged_arrivals(bool staged) {
    struct nb_boot boots[2];
    struct outsider outsider;
    struct nb_error err = {0};
    struct flow_world *world = world_make(boots, staged);
    CHECK(outsider_open(&outsider, 0, 0, 2, NULL, &err) == 0, "%s", err.text);
    outsider_meet(&outsider, world, 1, 0);
    arrival_refused(world, &outsider, (struct nb_frame){.blocks = 1}, "an arrival before the flow");
    for (int rank = 0; rank < 2; rank++) {
        flows_add(&world->nodes[rank].sides[0]);
        flows_add(&world->nodes[rank].sides[1]);
    }
    arrival_refused(world, &outsider, (struct nb_frame){.blocks = 1}, "no tag");
    arrival_refused(world, &outsider, (struct nb_frame){.blocks = 4, .tag = 0x12345678}, "a guessed tag");
    arrival_refused(world, &outsider, (struct nb_frame){.blocks = 1, .slot = 63, .tag = 1}, "a wrong slot");
    arrival_refused(world, &outsider, (struct nb_frame){.block = 0x3ffff, .blocks = 256, .tag = 1}, "a wrong block");
    flows_go(world, &outsider);
    CHECK(world->nodes[0].lost == 0 && world->nodes[1].lost == 0, "a lane was lost");
    nb_ofi_ops.close(outsider.lane);
    world_free(world);
}

// The number that the victim waits for on a lane.
static uint64_t next_number(const struct flow_world *world, int lane) {
    return nb_ofi_lane_of(world->nodes[1].lanes->lane[lane])->peers[0].messages_in;
}

// Says something until it is refused.
static void message_refused(struct flow_world *world, struct outsider *outsider, const char *what) {
    unsigned char farewell[8] = {NB_MESSAGE_LEAVE}; // were it believed, the sender would have left
    struct flow_node *victim = &world->nodes[1];
    uint64_t refused = nb_lanes_refused(victim->lanes);
    int rc = -EAGAIN;
    TURN_UNTIL(world, outsider,
               (rc = rc == -EAGAIN ? nb_ofi_ops.message(outsider->lane, 1, farewell, sizeof farewell) : rc) != -EAGAIN);
    CHECK(rc == 0, "%s: %s", what, nb_code_name(rc));
    TURN_UNTIL(world, outsider, nb_lanes_refused(victim->lanes) > refused || victim->lanes->peers[0].left);
    CHECK(!victim->lanes->peers[0].left, "%s was accepted", what);
}

static void message_case(const char *what, const unsigned char *session, int index, bool replayed) {
    struct nb_boot boots[2];
    struct outsider outsider;
    struct nb_error err = {0};
    struct flow_world *world = world_make(boots, false);
    TURN_UNTIL(world, NULL, next_number(world, 0) >= 2);
    CHECK(outsider_open(&outsider, index, 0, 2, session, &err) == 0, "%s", err.text);
    outsider_meet(&outsider, world, 1, 0);
    for (int i = 0; i < 2; i++) {
        nb_ofi_lane_of(outsider.lane)->peers[1].messages_out = replayed ? (uint64_t)i : next_number(world, 0);
        message_refused(world, &outsider, what);
    }
    for (int rank = 0; rank < 2; rank++) {
        flows_add(&world->nodes[rank].sides[0]);
        flows_add(&world->nodes[rank].sides[1]);
    }
    flows_go(world, &outsider);
    CHECK(world->nodes[0].lost == 0 && world->nodes[1].lost == 0, "%s: a lane was lost", what);
    nb_ofi_ops.close(outsider.lane);
    world_free(world);
}

// Rank 0 has sent several messages on lane 0, so the first message of another rank 0 of the same session is a repetition.
static void test_forged_and_replayed_messages(void) {
    struct nb_boot boots[2];
    boots_make(boots);
    message_case("a message with another session's MAC", NULL, 0, false);
    message_case("a message of another lane", boots[0].session, 1, false);
    message_case("a replayed message", boots[0].session, 0, true);
}

int main(void) {
    struct outsider outsider;
    struct nb_error err = {0};
    int rc = outsider_open(&outsider, 0, 0, 2, NULL, &err);
    if (rc == NB_ENOLIB) {
        SKIP("%s", err.text);
    }
    CHECK(rc == 0, "%s", err.text);
    nb_ofi_ops.close(outsider.lane);
    test_forged_arrivals(false);
    test_forged_arrivals(true);
    test_forged_and_replayed_messages();
    return 0;
}
#else
int main(void) {
    SKIP("built without libfabric's headers");
}
#endif
