// Interface failover: lanes whose interface goes down are given up within 2 s of tick time if another interface is up.
// They are kept if it is the only interface, if data still moves, or if the interface comes back within a second.
#include <time.h>

#include "flows.h"
#include "transport/lanes_internal.h"

enum { BLOCK = 1024, BLOCKS = 64, STEP_MS = 50, LANES = 2, TIMEOUT_MS = 24000, PASSES = 200, SEEDS = 4 };

static const int64_t MS = 1000000;
static int64_t clock_ns;
static bool is_down[2 * LANES]; // lane 0 and 1 of rank 0, then of rank 1

int __wrap_clock_gettime(clockid_t clock, struct timespec *time);
bool __wrap_nb_sock_interface_down(const char *name);

int __wrap_clock_gettime(clockid_t clock, struct timespec *time) {
    (void)clock;
    time->tv_sec = (time_t)(clock_ns / 1000000000);
    time->tv_nsec = (long)(clock_ns % 1000000000);
    return 0;
}

bool __wrap_nb_sock_interface_down(const char *name) {
    return is_down[name[0] - '0'];
}

static void step(struct flow_world *world) {
    clock_ns += STEP_MS * MS;
    for (int pass = 0; pass < PASSES; pass++) {
        for (int rank = 0; rank < 2; rank++) {
            flows_progress(&world->nodes[rank]);
        }
    }
    for (int rank = 0; rank < 2; rank++) {
        nb_lanes_tick(world->nodes[rank].lanes, clock_ns);
    }
}

static bool done(struct flow_world *world) {
    return flows_done(&world->nodes[0]) && flows_done(&world->nodes[1]);
}

// Opens two ranks that will have one flow in each direction. Each lane of each rank has its own interface.
static struct flow_world *begin(int kind, uint64_t seed) {
    struct flow_world *world = calloc(1, sizeof *world);
    struct nb_error err = {0};
    CHECK(world != NULL, "memory");
    memset(is_down, 0, sizeof is_down);
    clock_ns = 1000 * MS;
    world->ops = nb_mem_ops(kind);
    world->timeout_ms = TIMEOUT_MS;
    world->plan = (struct flow_plan){.seed = seed, .size = 2, .lanes = LANES, .segment_bytes = BLOCK};
    flows_plan_crossed(&world->plan, BLOCKS, BLOCK, false);
    CHECK(flows_open(world, &err) == 0, "open: %s", err.text);
    for (int rank = 0; rank < 2; rank++) {
        struct flow_node *node = &world->nodes[rank];
        for (int lane = 0; lane < LANES; lane++) {
            snprintf(node->lanes->interfaces[lane].name, IF_NAMESIZE, "%d", rank * LANES + lane);
        }
    }
    return world;
}

static void add_flows(struct flow_world *world) {
    for (int rank = 0; rank < 2; rank++) {
        for (int i = 0; i < 2; i++) {
            flows_add(&world->nodes[rank].sides[i]);
        }
    }
}

static void lane_down(int lane, bool on_both) {
    is_down[lane] = true;
    is_down[LANES + lane] = on_both;
}

static void send_more(struct flow_world *world, uint32_t blocks) {
    for (int rank = 0; rank < 2; rank++) {
        flows_ready(&world->nodes[rank].sides[rank], blocks);
    }
}

static void end(struct flow_world *world) {
    flows_close(world);
    free(world);
}

// The other lane carries the segments of the lane whose interface is down. Returns the number of lanes given up: 0 if
// the lane carried nothing.
static int test_failover(int kind, uint64_t seed) {
    struct flow_world *world = begin(kind, seed);
    add_flows(world);
    world->nodes[0].may_lose = true;
    world->nodes[1].may_lose = true;
    lane_down(1, seed % 2 == 0); // the other host need not detect it
    nb_mem_stall(world->net, 0, 1, 1);
    send_more(world, BLOCKS);
    int64_t down_ns = clock_ns;
    while (!done(world)) {
        step(world);
        CHECK(clock_ns - down_ns < 2000 * MS, "seed %llu: a dead interface delays the flows for %lld ms",
              (unsigned long long)seed, (long long)((clock_ns - down_ns) / MS));
    }
    int lost = world->nodes[0].lost;
    CHECK(lost <= 1 && (lost == 0 || world->nodes[0].left_last == 1), "%d lanes were given up", lost);
    end(world);
    return lost;
}

// An interface that has been down for a second before there is anything to send delays nothing by another second.
static int test_failover_of_idle_lane(int kind, uint64_t seed) {
    struct flow_world *world = begin(kind, seed);
    world->nodes[0].may_lose = true;
    world->nodes[1].may_lose = true;
    lane_down(1, seed % 2 == 0);
    nb_mem_stall(world->net, 0, 1, 1);
    for (int64_t ms = 0; ms < 2000; ms += STEP_MS) {
        step(world);
    }
    CHECK(world->nodes[0].lost + world->nodes[1].lost == 0, "a lane was given up that carried nothing");
    add_flows(world);
    send_more(world, BLOCKS);
    int64_t begin_ns = clock_ns;
    while (!done(world)) {
        step(world);
        CHECK(clock_ns - begin_ns < 300 * MS, "seed %llu: an interface known to be down delays the flows for %lld ms",
              (unsigned long long)seed, (long long)((clock_ns - begin_ns) / MS));
    }
    int lost = world->nodes[0].lost;
    end(world);
    return lost;
}

// No interface is up: the lanes are kept until the timeout.
static void test_lanes_kept_if_all_are_down(int kind, uint64_t seed) {
    struct flow_world *world = begin(kind, seed);
    add_flows(world);
    lane_down(0, true);
    lane_down(1, true);
    nb_mem_stall(world->net, 0, 1, 0);
    nb_mem_stall(world->net, 0, 1, 1);
    send_more(world, BLOCKS);
    for (int64_t ms = 0; ms < TIMEOUT_MS; ms += STEP_MS) {
        step(world);
    }
    CHECK(world->nodes[0].lost + world->nodes[1].lost == 0, "a lane was given up");
    end(world);
}

// The interface is down repeatedly, each time for less than a second.
static void test_lane_kept_after_short_outage(int kind, uint64_t seed) {
    struct flow_world *world = begin(kind, seed);
    add_flows(world);
    nb_mem_stall(world->net, 0, 1, 1);
    send_more(world, BLOCKS);
    for (int64_t ms = 0; ms < TIMEOUT_MS / 5; ms += STEP_MS) {
        is_down[1] = is_down[LANES + 1] = ms / 800 % 2 == 0;
        step(world);
    }
    CHECK(world->nodes[0].lost + world->nodes[1].lost == 0, "a lane was given up");
    end(world);
}

// The reported state of the interface does not matter while bytes arrive.
static void test_lane_kept_while_data_move(int kind, uint64_t seed) {
    struct flow_world *world = begin(kind, seed);
    add_flows(world);
    lane_down(1, true);
    while (!done(world)) {
        send_more(world, 2);
        step(world);
    }
    CHECK(clock_ns > 2400 * MS, "the test ran too short");
    end(world);
}

int main(void) {
    int lost = 0;
    int lost_idle = 0;
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        for (int kind = NB_LANE_STREAM; kind <= NB_LANE_RMA; kind++) {
            lost += test_failover(kind, seed);
            lost_idle += test_failover_of_idle_lane(kind, seed);
            test_lanes_kept_if_all_are_down(kind, seed);
            test_lane_kept_after_short_outage(kind, seed);
            test_lane_kept_while_data_move(kind, seed);
        }
    }
    CHECK(lost >= SEEDS && lost_idle >= SEEDS, "only %d and %d lanes failed over", lost, lost_idle);
    return 0;
}
