// libfabric lanes: unauthenticated arrivals and messages are dropped and counted. No bytes land, no lane is lost and no
// rank is blamed. The fork guard forgets the address of a closed lane. A lane can close in the middle of a write.
// NETBOTTLENECK_LIBFABRIC and NETBOTTLENECK_PROVIDER choose the library and the provider.
#include "flows.h"
#ifdef NB_HAVE_OFI
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "raw_endpoint.h"
#include "transport/credits.h"

enum { BLOCK = 4096, BLOCKS = 24, LANES = 2, BIG = 32 << 20 };

static void boots_make(struct nb_boot boots[2]) {
    for (int rank = 0; rank < 2; rank++) {
        boots[rank] = (struct nb_boot){.rank = rank, .size = 2};
        memset(boots[rank].session, 0x5a, sizeof boots[rank].session);
    }
}

// Opens two ranks with one flow in each direction.
static struct flow_world *world_open(struct nb_boot boots[2], bool staged) {
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

static void world_close(struct flow_world *world) {
    flows_close(world);
    free(world);
}

static void progress_all(struct flow_world *world, struct raw_endpoint *attacker) {
    for (int rank = 0; rank < 2; rank++) {
        flows_progress(&world->nodes[rank]);
    }
    if (attacker != NULL) {
        (void)nb_ofi_ops.progress(attacker->lane);
    }
}

#define PROGRESS_UNTIL(world, attacker, cond)                                                                          \
    for (int64_t deadline = flows_deadline(); !(cond);) {                                                              \
        progress_all(world, attacker);                                                                                 \
        CHECK(nb_now_ns() < deadline, "timed out: " #cond);                                                            \
    }

// Connects the attacker to a rank's lane.
static void attacker_connect(struct raw_endpoint *attacker, const struct flow_world *world, int victim, int lane) {
    struct nb_error err = {0};
    struct wire_lane_address address[LANES];
    CHECK(nb_lanes_address_bytes(world->nodes[victim].lanes) == sizeof address, "%d lanes", LANES);
    nb_lanes_address(world->nodes[victim].lanes, address);
    int rc = nb_ofi_ops.peer_open(attacker->lane, victim, address[lane].addr, address[lane].bytes, &err);
    CHECK(rc == 0, "%s", err.text);
}

// Sends an arrival, and checks that it is counted as refused once and that no block lands.
static void check_arrival_refused(struct flow_world *world, struct raw_endpoint *attacker, struct nb_frame frame,
                                  const char *what) {
    struct flow_node *victim = &world->nodes[1];
    uint64_t refused = nb_lanes_refused(victim->lanes);
    int rc = -EAGAIN;
    PROGRESS_UNTIL(world, attacker, (rc = rc == -EAGAIN ? raw_endpoint_write(attacker, 1, frame) : rc) != -EAGAIN);
    CHECK(rc == 0, "%s: %s", what, nb_code_name(rc));
    PROGRESS_UNTIL(world, attacker, nb_lanes_refused(victim->lanes) > refused || victim->sides[0].landed > 0);
    CHECK(victim->sides[0].landed == 0, "%s was accepted", what);
    CHECK(nb_lanes_refused(victim->lanes) == refused + 1, "%s was counted %llu times", what,
          (unsigned long long)(nb_lanes_refused(victim->lanes) - refused));
}

static void flows_finish(struct flow_world *world, struct raw_endpoint *attacker) {
    for (int rank = 0; rank < 2; rank++) {
        flows_ready(&world->nodes[rank].sides[rank], BLOCKS);
    }
    PROGRESS_UNTIL(world, attacker, flows_done(&world->nodes[0]) && flows_done(&world->nodes[1]));
}

// The flow has credits and its sender has sent nothing. Every arrival that the attacker sends is forged.
static void test_forged_arrivals(bool staged) {
    struct nb_boot boots[2];
    struct raw_endpoint attacker;
    struct nb_error err = {0};
    struct flow_world *world = world_open(boots, staged);
    CHECK(raw_endpoint_open(&attacker, 0, 0, 2, NULL, &err) == 0, "%s", err.text);
    attacker_connect(&attacker, world, 1, 0);
    check_arrival_refused(world, &attacker, (struct nb_frame){.blocks = 1}, "an arrival before the flow");
    for (int rank = 0; rank < 2; rank++) {
        flows_add(&world->nodes[rank].sides[0]);
        flows_add(&world->nodes[rank].sides[1]);
    }
    check_arrival_refused(world, &attacker, (struct nb_frame){.blocks = 1}, "no tag");
    check_arrival_refused(world, &attacker, (struct nb_frame){.blocks = 4, .tag = 0x12345678}, "a guessed tag");
    check_arrival_refused(world, &attacker, (struct nb_frame){.blocks = 1, .slot = 63, .tag = 1}, "a wrong slot");
    check_arrival_refused(world, &attacker, (struct nb_frame){.block = 0x3ffff, .blocks = 256, .tag = 1},
                          "a wrong block");
    flows_finish(world, &attacker);
    CHECK(world->nodes[0].lost == 0 && world->nodes[1].lost == 0, "a lane was lost");
    nb_ofi_ops.close(attacker.lane);
    world_close(world);
}

// The message number that the victim expects next on a lane.
static uint64_t next_number(const struct flow_world *world, int lane) {
    return nb_ofi_lane_of(world->nodes[1].lanes->lane[lane])->peers[0].messages_in;
}

// Sends a leave message, and checks that the victim refuses it.
static void check_message_refused(struct flow_world *world, struct raw_endpoint *attacker, const char *what) {
    unsigned char leave[8] = {NB_MESSAGE_LEAVE}; // the peer counts as left if it is accepted
    struct flow_node *victim = &world->nodes[1];
    uint64_t refused = nb_lanes_refused(victim->lanes);
    int rc = -EAGAIN;
    PROGRESS_UNTIL(world, attacker,
                   (rc = rc == -EAGAIN ? nb_ofi_ops.message(attacker->lane, 1, leave, sizeof leave) : rc) != -EAGAIN);
    CHECK(rc == 0, "%s: %s", what, nb_code_name(rc));
    PROGRESS_UNTIL(world, attacker, nb_lanes_refused(victim->lanes) > refused || victim->lanes->peers[0].left);
    CHECK(!victim->lanes->peers[0].left, "%s was accepted", what);
}

static void check_forged_message(const char *what, const unsigned char *session, int index, bool replayed) {
    struct nb_boot boots[2];
    struct raw_endpoint attacker;
    struct nb_error err = {0};
    struct flow_world *world = world_open(boots, false);
    PROGRESS_UNTIL(world, NULL, next_number(world, 0) >= 2);
    CHECK(raw_endpoint_open(&attacker, index, 0, 2, session, &err) == 0, "%s", err.text);
    attacker_connect(&attacker, world, 1, 0);
    for (int i = 0; i < 2; i++) {
        nb_ofi_lane_of(attacker.lane)->peers[1].messages_out = replayed ? (uint64_t)i : next_number(world, 0);
        check_message_refused(world, &attacker, what);
    }
    for (int rank = 0; rank < 2; rank++) {
        flows_add(&world->nodes[rank].sides[0]);
        flows_add(&world->nodes[rank].sides[1]);
    }
    flows_finish(world, &attacker);
    CHECK(world->nodes[0].lost == 0 && world->nodes[1].lost == 0, "%s: a lane was lost", what);
    nb_ofi_ops.close(attacker.lane);
    world_close(world);
}

// Rank 0 has sent several messages on lane 0, so message 0 of another endpoint with the same session is a replay.
static void test_forged_and_replayed_messages(void) {
    struct nb_boot boots[2];
    boots_make(boots);
    check_forged_message("a message with another session's MAC", NULL, 0, false);
    check_forged_message("a message of another lane", boots[0].session, 1, false);
    check_forged_message("a replayed message", boots[0].session, 0, true);
}

// A user's socket at the address of a closed lane, which had no peer, stays open in a forked child.
static void test_address_of_closed_lane(void) {
    struct raw_endpoint lane;
    struct nb_error err = {0};
    unsigned char address[NB_LANE_ADDR_MAX];
    struct wire_ofi_address at;
    struct sockaddr_in user;
    size_t bytes;
    int status;
    const int on = 1;
    CHECK(raw_endpoint_open(&lane, 0, 0, 2, NULL, &err) == 0, "%s", err.text);
    nb_ofi_ops.address(lane.lane, address, &bytes);
    nb_ofi_ops.close(lane.lane);
    memcpy(&at, address, sizeof at);
    memcpy(&user, at.name, sizeof user);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0, "socket: %m");
    CHECK(bind(fd, (const struct sockaddr *)&user, sizeof user) == 0, "bind: %m");
    pid_t child = fork();
    if (child == 0) {
        _exit(fcntl(fd, F_GETFD) < 0);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child, "fork: %m");
    CHECK(status == 0, "the user's socket was closed in a child: %x", (unsigned)status);
    close(fd);
}

// Opens a lane of rank 0 and one of rank 1, connected, with BIG bytes of memory each that are mapped.
static void pair_open(struct raw_endpoint ends[2], char *memory[2], struct nb_region regions[2]) {
    struct nb_error err = {0};
    unsigned char address[2][NB_LANE_ADDR_MAX];
    size_t bytes[2];
    for (int rank = 0; rank < 2; rank++) {
        memory[rank] = calloc(1, BIG);
        CHECK(memory[rank] != NULL, "memory");
        CHECK(raw_endpoint_open(&ends[rank], 0, rank, 2, NULL, &err) == 0, "%s", err.text);
        CHECK(nb_ofi_ops.map(ends[rank].lane, memory[rank], BIG, &regions[rank], &err) == 0, "%s", err.text);
        nb_ofi_ops.address(ends[rank].lane, address[rank], &bytes[rank]);
    }
    for (int rank = 0; rank < 2; rank++) {
        int rc = nb_ofi_ops.peer_open(ends[rank].lane, 1 - rank, address[1 - rank], bytes[1 - rank], &err);
        CHECK(rc == 0, "%s", err.text);
    }
}

// The lane of `closing` closes while a write from rank 0 to rank 1 has arrived in part. The other lane continues.
static void test_close_in_mid_write(int closing) {
    enum { PASSES = 1000 }; // of progress, in which the other side notices that the connection has ended
    struct raw_endpoint ends[2];
    struct nb_region regions[2];
    char *memory[2];
    pair_open(ends, memory, regions);
    memset(memory[0], 1, BIG);
    struct nb_request *request = &ends[0].requests[0];
    *request = (struct nb_request){.frame = {.blocks = 1, .tag = 1, .bytes = BIG},
                                   .peer = 1,
                                   .iov_count = 1,
                                   .iov = {{.iov_base = memory[0], .iov_len = BIG}},
                                   .remote_addr = regions[1].addr,
                                   .remote_key = regions[1].key,
                                   .local_region = {regions[0].handle}};
    const volatile char *landing = memory[1];
    int64_t deadline = flows_deadline();
    int rc = -EAGAIN;
    while (landing[0] == 0) {
        rc = rc == -EAGAIN ? nb_ofi_ops.post(ends[0].lane, request) : rc;
        CHECK(rc == 0 || rc == -EAGAIN, "post: %s", nb_code_name(rc));
        (void)nb_ofi_ops.progress(ends[0].lane);
        (void)nb_ofi_ops.progress(ends[1].lane);
        CHECK(nb_now_ns() < deadline, "nothing lands");
    }
    CHECK(landing[BIG - 1] == 0, "the write is not in progress");
    nb_ofi_ops.peer_close(ends[closing].lane, 1 - closing);
    for (int i = 0; i < PASSES; i++) {
        (void)nb_ofi_ops.progress(ends[1 - closing].lane);
    }
    CHECK(ends[1].landed == 0, "the write is reported as landed");
    for (int rank = 0; rank < 2; rank++) {
        nb_ofi_ops.unmap(ends[rank].lane, &regions[rank]);
        nb_ofi_ops.close(ends[rank].lane);
        free(memory[rank]);
    }
}

int main(void) {
    struct raw_endpoint attacker;
    struct nb_error err = {0};
    int rc = raw_endpoint_open(&attacker, 0, 0, 2, NULL, &err);
    if (rc == NB_ENOLIB) {
        SKIP("%s", err.text);
    }
    CHECK(rc == 0, "%s", err.text);
    nb_ofi_ops.close(attacker.lane);
    test_forged_arrivals(false);
    test_forged_arrivals(true);
    test_forged_and_replayed_messages();
    test_address_of_closed_lane();
    test_close_in_mid_write(0);
    test_close_in_mid_write(1);
    return 0;
}
#else
int main(void) {
    SKIP("built without libfabric's headers");
}
#endif
