// Lane rates: the size of a lane's next segment follows from its rate and from the bytes left. A segment is never so
// small that its overhead dominates.
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "base/list.h"
#include "check.h"
#include "transport/lanes.h"
#include "transport/lanes_internal.h"

enum { LANES = 4, BLOCK = 4096, SEGMENT = 256 * 1024 };

// The test's clock: it stands still unless a test advances it.
static int64_t clock_ns = INT64_C(1000000000000);

int __wrap_clock_gettime(clockid_t clock, struct timespec *now);
int __wrap_clock_gettime(clockid_t clock, struct timespec *now) {
    (void)clock;
    *now = (struct timespec){.tv_sec = clock_ns / 1000000000, .tv_nsec = clock_ns % 1000000000};
    return 0;
}

static bool near(double value, double want) {
    return value > want * 0.999999 && value < want * 1.000001;
}

// A network that reports how many sent bytes each lane still holds on this host.
static size_t held_by[LANES];
static int64_t round_trip_ns;
static int held_queries;

static struct nb_held held(const struct nb_lane *lane, int peer) {
    (void)peer;
    held_queries++;
    return (struct nb_held){.bytes = held_by[lane->index], .late_bytes = 3000, .round_trip_ns = round_trip_ns};
}

static const struct nb_lane_ops ops = {.name = "reporting", .held = held};
static const struct nb_lane_ops without_held = {.name = "silent"};

struct world {
    struct nb_lane lane[LANES];
    struct nb_lanes lanes;
    struct peer peer;
    struct path paths[LANES];
    struct nb_flow flow;
};

// Rates in bytes per ns (GB/s).
static void world_init(struct world *world, const double *rates, int used) {
    memset(world, 0, sizeof *world);
    memset(held_by, 0, sizeof held_by);
    round_trip_ns = 0;
    held_queries = 0;
    world->lanes.config.ops = &ops;
    world->lanes.peers = &world->peer;
    world->lanes.config.segment_bytes = SEGMENT;
    world->lanes.used = used;
    world->peer.reach = used;
    world->peer.paths = world->paths;
    nb_list_init(&world->peer.out);
    nb_list_init(&world->flow.link);
    nb_list_insert(&world->peer.out, &world->flow.link);
    world->flow.block_bytes = BLOCK;
    for (int i = 0; i < used; i++) {
        world->lane[i].index = i;
        world->lanes.lane[i] = &world->lane[i];
        world->paths[i].open = true;
        world->paths[i].rate.bytes_per_ns = rates[i];
    }
}

static size_t segment_with_alternative(struct world *world, int lane, size_t left, int *sooner) {
    *sooner = -1;
    world->flow.left = (uint32_t)(left / BLOCK);
    return nb_rate_segment(&world->lanes, &world->peer, lane, sooner);
}

static size_t segment(struct world *world, int lane, size_t left) {
    int sooner = -1;
    return segment_with_alternative(world, lane, left, &sooner);
}

static void test_single_lane_gets_full_segments(void) {
    struct world world;
    static const double rates[] = {0.05};
    world_init(&world, rates, 1);
    CHECK(segment(&world, 0, BLOCK) == SEGMENT, "a single lane gets a short segment");
}

static void test_slow_lane_finishes_with_the_others(void) {
    struct world world;
    static const double rates[] = {0.05, 0.05, 0.05, 0.0125};
    world_init(&world, rates, LANES);
    CHECK(segment(&world, 3, 64 << 20) == SEGMENT, "a slow lane gets short segments far from the end");
    size_t left = 4 << 20;
    size_t before = SEGMENT;
    while (left > 16 * BLOCK) {
        size_t slow = segment(&world, 3, left);
        size_t fast = segment(&world, 0, left);
        double all_ns = (double)left / 0.1625;
        CHECK(slow <= before && slow <= fast, "%zu left: slow %zu, fast %zu, before %zu", left, slow, fast, before);
        CHECK(slow <= 16 * 1024 || (double)slow / rates[3] <= all_ns,
              "%zu left: the slow lane needs longer than all lanes together", left);
        before = slow;
        left -= left / 8;
    }
    CHECK(before == 16 * 1024, "the last segment of the slow lane has %zu bytes", before);
}

// Pulls for all lanes in turn until none takes a segment, without completing any: checks the bytes in flight.
static void test_bytes_in_flight_count(void) {
    struct world world;
    static const double rates[] = {0.05, 0.05, 0.05, 0.0125};
    size_t left = 8 << 20;
    size_t total = left;
    bool took = true;
    world_init(&world, rates, LANES);
    while (took && left > 0) {
        took = false;
        for (int i = 0; i < LANES; i++) {
            size_t bytes = segment(&world, i, left);
            bytes = bytes / BLOCK * BLOCK < left ? bytes / BLOCK * BLOCK : left;
            world.paths[i].in_flight += bytes;
            left -= bytes;
            took = took || bytes > 0;
        }
    }
    for (int i = 0; i < LANES; i++) {
        double part_ns = (double)world.paths[i].in_flight / rates[i];
        CHECK(part_ns < (double)total / 0.1625 * 1.1, "lane %d has work for %.1f ms, all lanes for %.1f ms", i,
              part_ns / 1e6, (double)total / 0.1625 / 1e6);
    }
    CHECK(left < 8 * SEGMENT, "%zu bytes were assigned to no lane", left);
    world.paths[3].in_flight = 1 << 20;
    CHECK(segment(&world, 3, 1 << 20) == 0, "a lane with too much in flight takes more");
    world.paths[3].in_flight = 0;
    CHECK(segment(&world, 3, BLOCK) > 0, "a lane with nothing in flight takes nothing");
}

// A slow lane has no requests in flight, but this host still holds the bytes that it has sent.
static void test_bytes_held_on_this_host_count(void) {
    struct world world;
    static const double rates[] = {0.05, 0.05, 0.05, 0.0125};
    int sooner = -1;
    world_init(&world, rates, LANES);
    CHECK(segment(&world, 3, 512 * 1024) > 0, "an idle lane takes nothing");
    world.paths[3].in_flight = 1 << 20;
    nb_rate_sent(&world.lanes, &world.paths[3], 1 << 20);
    CHECK(world.paths[3].rate.held == 1 << 20, "%zu of the sent bytes are counted as held", world.paths[3].rate.held);
    world.paths[3].rate.bytes_per_ns = rates[3];
    held_by[3] = 1 << 20;
    CHECK(segment_with_alternative(&world, 3, 512 * 1024, &sooner) == 0,
          "a lane that still has 84 ms of work takes more");
    CHECK(sooner >= 0 && sooner < 3, "lane %d is predicted to finish sooner", sooner);
    CHECK(segment(&world, sooner, 512 * 1024) > 0, "the lane that finishes sooner takes nothing");
    CHECK(segment(&world, 3, 64 << 20) > 0, "the slow lane takes nothing far from the end");
    held_by[3] = 0;
    clock_ns += 999 * 1000;
    CHECK(segment(&world, 3, 512 * 1024) == 0, "the lane is queried again within 1 ms");
    clock_ns += 1000;
    CHECK(segment(&world, 3, 512 * 1024) > 0, "the lane takes nothing after its bytes have left");
}

// For any amounts of held bytes, one lane takes the bytes left, and the other lanes defer to it.
static void test_one_lane_takes_the_last_bytes(void) {
    struct world world;
    static const double rates[] = {0.05, 0.02, 0.07, 0.0125};
    unsigned seed = 1;
    world_init(&world, rates, LANES);
    for (int trial = 0; trial < 2000; trial++) {
        size_t left = BLOCK * (size_t)(1 + trial % 200);
        int sooner[LANES];
        size_t takes[LANES];
        for (int i = 0; i < LANES; i++) {
            seed = seed * 1103515245u + 12345u;
            world.paths[i].rate.held = held_by[i] = (seed >> 8) % (trial % 3 == 0 ? 4096 : 2 << 20);
        }
        for (int i = 0; i < LANES; i++) {
            takes[i] = segment_with_alternative(&world, i, left, &sooner[i]);
        }
        for (int i = 0; i < LANES; i++) {
            CHECK(takes[i] > 0 || (sooner[i] >= 0 && sooner[i] != i && takes[sooner[i]] > 0),
                  "trial %d: lane %d defers %zu bytes to lane %d, which takes none", trial, i, left, sooner[i]);
            world.flow.left = (uint32_t)(left / BLOCK);
            CHECK(nb_rate_segment(&world.lanes, &world.peer, i, NULL) > 0,
                  "lane %d takes nothing without an alternative", i);
        }
    }
}

static void test_held_bytes_are_queried_near_the_end(void) {
    struct world world;
    static const double rates[] = {0.05, 0.05, 0.05, 0.05};
    world_init(&world, rates, LANES);
    for (int i = 0; i < LANES; i++) {
        world.paths[i].rate.held = 1;
    }
    (void)segment(&world, 0, 64 << 20);
    CHECK(held_queries == 0, "with 64 MiB left %d lanes were queried", held_queries);
    (void)segment(&world, 0, 1 << 20);
    CHECK(held_queries == LANES, "with 1 MiB left %d lanes were queried", held_queries);
}

static void test_fast_lanes_take_no_tiny_segments(void) {
    struct world world;
    static const double rates[] = {2, 2};
    world_init(&world, rates, 2);
    size_t least = segment(&world, 0, BLOCK);
    CHECK(least > 150 * 1024 && least <= SEGMENT, "a lane of 2 GB/s takes %zu bytes", least);
}

static void test_segments_keep_the_configured_size(void) {
    struct world world;
    static const double rates[] = {2, 0};
    world_init(&world, rates, 2);
    world.lanes.config.segment_bytes = BLOCK;
    CHECK(segment(&world, 0, 1 << 20) == BLOCK && segment(&world, 1, 1 << 20) == BLOCK,
          "a segment exceeds the configured size");
}

static void test_lane_of_unknown_rate_counts_as_average(void) {
    struct world world;
    static const double rates[] = {1, 0};
    world_init(&world, rates, 2);
    CHECK(segment(&world, 1, 512 * 1024) == 128 * 1024, "the unknown lane takes %zu bytes of 512 KiB",
          segment(&world, 1, 512 * 1024));
    world.paths[1].open = false;
    CHECK(segment(&world, 0, 512 * 1024) == SEGMENT, "bytes are reserved for a lost lane");
}

static const struct nb_lanes idle_lanes = {.config = {.ops = &without_held}};

static void complete_after(struct path *path, int64_t ns, size_t bytes) {
    clock_ns += ns;
    nb_rate_sent(&idle_lanes, path, bytes);
}

static void test_rate_needs_enough_bytes(void) {
    struct path path = {.open = true};
    nb_rate_posted(&idle_lanes, &path, 64 * 1024);
    complete_after(&path, 10 * 1000 * 1000, 64 * 1024);
    CHECK(path.in_flight == 0 && path.rate.bytes_per_ns == 0, "a rate follows from one short segment");
    nb_rate_posted(&idle_lanes, &path, 1 << 20);
    nb_rate_posted(&idle_lanes, &path, 1 << 20);
    nb_rate_refused(&path, 1 << 20);
    CHECK(path.in_flight == 1 << 20, "%zu bytes in flight", path.in_flight);
    complete_after(&path, 10 * 1000 * 1000, 1 << 20);
    CHECK(path.in_flight == 0 && path.rate.bytes_per_ns > 0, "no rate follows from 1 MiB");
}

static void test_rate_needs_enough_time(void) {
    struct path path = {.open = true};
    nb_rate_posted(&idle_lanes, &path, 2 << 20);
    complete_after(&path, 1000 * 1000, 1 << 20);
    CHECK(path.rate.bytes_per_ns == 0, "a rate follows from 1 ms");
    complete_after(&path, 2 * 1000 * 1000, 1 << 20);
    CHECK(path.rate.bytes_per_ns > 0, "no rate follows from 3 ms");
}

static void test_requests_that_complete_together(void) {
    struct path path = {.open = true};
    for (int burst = 0; burst < 100; burst++) {
        nb_rate_posted(&idle_lanes, &path, 4 << 20);
        complete_after(&path, 100 * 1000 * 1000, 1 << 20);
        nb_rate_sent(&idle_lanes, &path, 1 << 20);
        nb_rate_sent(&idle_lanes, &path, 1 << 20);
        nb_rate_sent(&idle_lanes, &path, 1 << 20);
        CHECK(near(path.rate.bytes_per_ns, (4 << 20) / 100e6), "burst %d: the rate is %.6f bytes a ns", burst,
              path.rate.bytes_per_ns);
    }
}

static void test_old_rate_fades(void) {
    struct path path = {.open = true};
    const double slow = (1 << 20) / 100e6;
    for (int i = 0; i < 100; i++) {
        nb_rate_posted(&idle_lanes, &path, 1 << 20);
        complete_after(&path, 100 * 1000 * 1000, 1 << 20);
        CHECK(near(path.rate.bytes_per_ns, slow), "sample %d: the rate is %.6f bytes a ns", i, path.rate.bytes_per_ns);
    }
    for (int i = 0; i < 20; i++) {
        nb_rate_posted(&idle_lanes, &path, 8 << 20);
        complete_after(&path, 100 * 1000 * 1000, 8 << 20);
    }
    CHECK(path.rate.bytes_per_ns > 7.9 * slow && path.rate.bytes_per_ns < 8 * slow,
          "after 2 s at 8 times the rate, the estimate is %.3f times as high", path.rate.bytes_per_ns / slow);
}

static const struct nb_lanes buffering_lanes = {.config = {.ops = &ops}};

// Requests that the kernel takes at once, as of small all-reduces, with pauses that follow from the lane's share.
static void test_a_share_does_not_confirm_itself(void) {
    struct path path = {.open = true};
    for (int i = 0; i < 200; i++) {
        clock_ns += 500 * 1000;
        nb_rate_posted(&buffering_lanes, &path, 64 * 1024);
        clock_ns += 15 * 1000;
        nb_rate_sent(&buffering_lanes, &path, 64 * 1024);
    }
    CHECK(path.rate.bytes_per_ns == 0, "a rate of %.3f bytes a ns follows from the pauses", path.rate.bytes_per_ns);
}

// More than the kernel's buffer takes, but the network takes it soon: queues on the way hold a burst.
static void test_a_burst_into_buffers_is_no_rate(void) {
    struct path path = {.open = true};
    for (int burst = 0; burst < 200; burst++) {
        clock_ns += 4 * 1000 * 1000;
        nb_rate_posted(&buffering_lanes, &path, 12 * 64 * 1024);
        for (int i = 0; i < 12; i++) {
            clock_ns += 40 * 1000;
            nb_rate_sent(&buffering_lanes, &path, 64 * 1024);
        }
    }
    CHECK(path.rate.bytes_per_ns == 0, "a rate of %.3f bytes a ns follows from bursts", path.rate.bytes_per_ns);
}

static void test_bytes_that_waited_tell_the_rate(void) {
    struct path path = {.open = true};
    const double rate = 64 * 1024 / 1e6;
    for (int burst = 0; burst < 10; burst++) {
        clock_ns += 500 * 1000;
        nb_rate_posted(&buffering_lanes, &path, 20 * 64 * 1024);
        for (int i = 0; i < 20; i++) {
            clock_ns += i < 4 ? 10 * 1000 : 1000 * 1000; // the first 256 KiB go into buffers
            nb_rate_sent(&buffering_lanes, &path, 64 * 1024);
        }
        CHECK(near(path.rate.bytes_per_ns, rate), "burst %d: the rate is %.4f bytes a ns, not %.4f", burst,
              path.rate.bytes_per_ns, rate);
    }
    clock_ns += 10 * 1000; // the thread handled other lanes meanwhile
    nb_rate_posted(&buffering_lanes, &path, 2 << 20);
    clock_ns += INT64_C(10000) * 1000 * 1000;
    nb_rate_sent(&buffering_lanes, &path, 1 << 20);
    CHECK(path.rate.bytes_per_ns < 0.1 * rate, "what finished without a pause before does not count");
}

enum { PORTION = 64 * 1024, ROUND_NS = 10 * 1000 * 1000 };

static void rounds_init(struct world *world) {
    static const double unknown[LANES] = {0};
    world_init(world, unknown, LANES);
}

// Each round, every lane sends a portion, and lane i confirms confirmed[i] bytes of what it holds within 10 ms. No
// request ever waits, as the kernel takes all of them at once.
static void rounds_run(struct world *world, int count, const size_t *confirmed) {
    for (int round = 0; round < count; round++) {
        (void)segment(world, 0, 512 * 1024);
        for (int i = 0; i < LANES; i++) {
            nb_rate_posted(&world->lanes, &world->paths[i], PORTION);
            clock_ns += 15 * 1000;
            nb_rate_sent(&world->lanes, &world->paths[i], PORTION);
            held_by[i] += PORTION;
            held_by[i] -= held_by[i] < confirmed[i] ? held_by[i] : confirmed[i];
        }
        clock_ns += ROUND_NS - LANES * 15 * 1000;
    }
}

// By its backlog.
static double rate_of(const struct world *world, int lane) {
    return world->paths[lane].rate.backlog.bytes_per_ns;
}

static void test_a_backlog_that_stays_tells_the_rate(void) {
    struct world world;
    const size_t slow = 3 * PORTION / 4;
    const size_t confirmed[LANES] = {PORTION, PORTION, PORTION, slow};
    rounds_init(&world);
    rounds_run(&world, 3, confirmed);
    CHECK(rate_of(&world, 3) == 0, "a rate follows from 3 rounds");
    rounds_run(&world, 9, confirmed);
    double want = (double)slow / ROUND_NS;
    CHECK(rate_of(&world, 3) > 0.99 * want && rate_of(&world, 3) < 1.01 * want, "the rate is %.4f bytes a ns, not %.4f",
          rate_of(&world, 3), want);
    for (int i = 0; i < 3; i++) {
        CHECK(rate_of(&world, i) == 0, "lane %d is never behind, and has a rate of %.4f", i, rate_of(&world, i));
    }
    held_by[3] = 0;
    clock_ns += ROUND_NS;
    size_t first = segment(&world, 0, 512 * 1024);
    size_t last = segment(&world, 3, 512 * 1024);
    CHECK(last < first, "the slow lane takes %zu bytes, another one %zu", last, first);
}

static void test_a_peer_that_pauses_once_makes_no_lane_slow(void) {
    struct world world;
    const size_t all[LANES] = {8 * PORTION, 8 * PORTION, 8 * PORTION, 8 * PORTION};
    const size_t few[LANES] = {40 * 1024, 40 * 1024, 40 * 1024, 40 * 1024};
    rounds_init(&world);
    for (int pause = 0; pause < 50; pause++) {
        rounds_run(&world, 3, few);
        rounds_run(&world, 5, all);
    }
    for (int i = 0; i < LANES; i++) {
        CHECK(rate_of(&world, i) == 0, "lane %d has a rate of %.4f", i, rate_of(&world, i));
    }
}

// On a long way, what is not confirmed yet is no backlog.
static void test_bytes_on_a_long_way_are_no_backlog(void) {
    struct world world;
    const size_t confirmed[LANES] = {PORTION, PORTION, PORTION, 3 * PORTION / 4};
    rounds_init(&world);
    round_trip_ns = INT64_C(1000000000);
    rounds_run(&world, 30, confirmed);
    CHECK(rate_of(&world, 3) == 0, "a rate of %.4f follows from a long way", rate_of(&world, 3));
}

static void test_packets_that_are_confirmed_late_are_no_backlog(void) {
    struct world world;
    const size_t all[LANES] = {8 * PORTION, 8 * PORTION, 8 * PORTION, 8 * PORTION};
    rounds_init(&world);
    for (int round = 0; round < 50; round++) {
        rounds_run(&world, 1, all);
        held_by[3] = 3000;
    }
    CHECK(rate_of(&world, 3) == 0, "a rate of %.4f follows from late packets", rate_of(&world, 3));
}

static void test_a_lane_that_is_no_longer_behind_counts_as_others(void) {
    struct world world;
    const size_t confirmed[LANES] = {PORTION, PORTION, PORTION, PORTION / 2};
    const size_t all[LANES] = {8 * PORTION, 8 * PORTION, 8 * PORTION, 8 * PORTION};
    rounds_init(&world);
    rounds_run(&world, 20, confirmed);
    CHECK(rate_of(&world, 3) > 0, "no rate follows from 20 rounds");
    rounds_run(&world, 30, all);
    CHECK(rate_of(&world, 3) > 0, "the rate is forgotten after 2 MiB");
    rounds_run(&world, 50, all);
    CHECK(rate_of(&world, 3) == 0, "the rate is still %.4f after 5 MiB without a backlog", rate_of(&world, 3));
}

static void test_a_rate_of_bytes_that_waited_is_forgotten_once_none_wait(void) {
    struct world world;
    const size_t all[LANES] = {8 * PORTION, 8 * PORTION, 8 * PORTION, 8 * PORTION};
    const double *rate = &world.paths[3].rate.bytes_per_ns;
    rounds_init(&world);
    nb_rate_posted(&world.lanes, &world.paths[3], 20 * PORTION);
    for (int i = 0; i < 20; i++) {
        clock_ns += 1000 * 1000;
        nb_rate_sent(&world.lanes, &world.paths[3], PORTION);
    }
    double known = *rate;
    CHECK(known > 0, "no rate follows from bytes that waited");
    rounds_run(&world, 30, all);
    CHECK(near(*rate, known), "the rate is %.4f after 2 MiB of backlogs that were soon gone, not %.4f", *rate, known);
    rounds_run(&world, 50, all);
    CHECK(*rate == 0, "the rate is still %.4f after 5 MiB of backlogs that were soon gone", *rate);
}

static void backlogs_set(struct world *world, const double *rates) {
    for (int i = 0; i < LANES; i++) {
        world->paths[i].rate.backlog.bytes_per_ns = rates[i];
    }
}

// A request that waits for a buffer of the kernel's may finish at ten times the rate of the network.
static void test_a_rate_of_bytes_that_waited_limits_that_of_a_backlog(void) {
    struct world world;
    static const double waited[] = {0.1, 0.12, 0, 0};
    static const double of_backlogs[] = {0, 0, 0.01, 0.01};
    world_init(&world, waited, LANES);
    size_t alone = segment(&world, 0, 512 * 1024);
    CHECK(segment(&world, 2, 512 * 1024) == alone, "the rates of some lanes count");
    backlogs_set(&world, of_backlogs);
    CHECK(segment(&world, 0, 512 * 1024) == segment(&world, 2, 512 * 1024),
          "a rate of bytes that waited counts as the network's");
    world.paths[0].rate.bytes_per_ns = 0.002;
    CHECK(segment(&world, 0, 512 * 1024) < segment(&world, 1, 512 * 1024), "bytes that waited longer do not count");
    static const double all_waited[] = {0.1, 0.1, 0.1, 0.1};
    static const double slow[] = {0, 0, 0, 0.01};
    world_init(&world, all_waited, LANES);
    backlogs_set(&world, slow);
    CHECK(segment(&world, 3, 512 * 1024) == segment(&world, 0, 512 * 1024),
          "a backlog's rate counts where the requests of all lanes waited");
}

// What an equal lane has reached is the rate of a burst. It has been behind, too, if not as often.
static void test_a_lane_that_is_also_behind_is_not_faster(void) {
    struct world world;
    static const double unknown[LANES] = {0};
    static const double rates[LANES] = {0.1, 0, 0.1, 0.1};
    world_init(&world, unknown, LANES);
    backlogs_set(&world, rates);
    struct lane_rate *equal = &world.paths[1].rate;
    equal->reached = 0.2;
    CHECK(segment(&world, 1, 512 * 1024) > segment(&world, 0, 512 * 1024),
          "a lane that was never behind is not faster");
    equal->backlog.stays = 2;
    equal->backlog.stay_bytes = 0.09 * ROUND_NS;
    equal->backlog.stay_ns = ROUND_NS;
    CHECK(segment(&world, 1, 512 * 1024) == segment(&world, 0, 512 * 1024), "a lane that was behind counts by a burst");
}

static void test_a_lane_of_unknown_rate_counts_as_the_fastest(void) {
    struct world world;
    static const double unknown[LANES] = {0};
    static const double rates[] = {0.01, 0.04, 0, 0};
    world_init(&world, unknown, LANES);
    backlogs_set(&world, rates);
    size_t known = segment(&world, 1, 512 * 1024);
    CHECK(segment(&world, 2, 512 * 1024) == known, "an unknown lane takes %zu bytes, the fastest %zu",
          segment(&world, 2, 512 * 1024), known);
    world.paths[3].rate.reached = 0.08;
    size_t more = segment(&world, 3, 512 * 1024);
    CHECK(more > segment(&world, 2, 512 * 1024), "a lane that was twice as fast takes %zu bytes", more);
}

int main(void) {
    test_single_lane_gets_full_segments();
    test_slow_lane_finishes_with_the_others();
    test_bytes_in_flight_count();
    test_bytes_held_on_this_host_count();
    test_one_lane_takes_the_last_bytes();
    test_held_bytes_are_queried_near_the_end();
    test_fast_lanes_take_no_tiny_segments();
    test_segments_keep_the_configured_size();
    test_lane_of_unknown_rate_counts_as_average();
    test_rate_needs_enough_bytes();
    test_rate_needs_enough_time();
    test_requests_that_complete_together();
    test_old_rate_fades();
    test_a_share_does_not_confirm_itself();
    test_a_burst_into_buffers_is_no_rate();
    test_bytes_that_waited_tell_the_rate();
    test_a_backlog_that_stays_tells_the_rate();
    test_a_peer_that_pauses_once_makes_no_lane_slow();
    test_bytes_on_a_long_way_are_no_backlog();
    test_packets_that_are_confirmed_late_are_no_backlog();
    test_a_lane_that_is_no_longer_behind_counts_as_others();
    test_a_rate_of_bytes_that_waited_is_forgotten_once_none_wait();
    test_a_rate_of_bytes_that_waited_limits_that_of_a_backlog();
    test_a_lane_that_is_also_behind_is_not_faster();
    test_a_lane_of_unknown_rate_counts_as_the_fastest();
    return 0;
}
