// The size of one lane's next segment: by its rate and by the bytes left, and never so small that the handling costs
// more.
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/clock.h"
#include "base/list.h"
#include "check.h"
#include "transport/lanes.h"
#include "transport/lanes_internal.h"

enum { LANES = 4, BLOCK = 4096, SEGMENT = 256 * 1024 };

// A network that reports the bytes that each lane still holds.
static size_t held_by[LANES];
static int queries;

static size_t held(const struct nb_lane *lane, int peer) {
    (void)peer;
    queries++;
    return held_by[lane->index];
}

static const struct nb_lane_ops ops = {.name = "reporting", .held = held};
static const struct nb_lane_ops silent = {.name = "silent"};

struct world {
    struct nb_lane lane[LANES];
    struct nb_lanes lanes;
    struct peer peer;
    struct path paths[LANES];
    struct nb_flow flow;
};

// Rates in bytes per ns, that is in GB/s.
static void world_make(struct world *world, const double *rates, int used) {
    memset(world, 0, sizeof *world);
    memset(held_by, 0, sizeof held_by);
    queries = 0;
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

static size_t segment_or(struct world *world, int lane, size_t left, int *sooner) {
    *sooner = -1;
    world->flow.left = (uint32_t)(left / BLOCK);
    return nb_rate_segment(&world->lanes, &world->peer, lane, sooner);
}

static size_t segment(struct world *world, int lane, size_t left) {
    int sooner = -1;
    return segment_or(world, lane, left, &sooner);
}

static void test_one_lane_needs_no_care(void) {
    struct world world;
    const double rates[] = {0.05};
    world_make(&world, rates, 1);
    CHECK(segment(&world, 0, BLOCK) == SEGMENT, "one lane was cut short");
}

static void test_a_slow_lane_ends_with_the_others(void) {
    struct world world;
    const double rates[] = {0.05, 0.05, 0.05, 0.0125};
    world_make(&world, rates, LANES);
    CHECK(segment(&world, 3, 64 << 20) == SEGMENT, "with much left, a slow lane takes long segments too");
    size_t left = 4 << 20;
    size_t before = SEGMENT;
    while (left > 16 * BLOCK) {
        size_t slow = segment(&world, 3, left);
        size_t fast = segment(&world, 0, left);
        double all_ns = (double)left / 0.1625;
        CHECK(slow <= before && slow <= fast, "%zu left: slow %zu, fast %zu, before %zu", left, slow, fast, before);
        CHECK(slow <= 16 * 1024 || (double)slow / rates[3] <= all_ns,
              "%zu left: the slow lane works for longer than all together", left);
        before = slow;
        left -= left / 8;
    }
    CHECK(before == 16 * 1024, "the last segment of the slow lane has %zu bytes", before);
}

// Pulls for all lanes in turn until none takes anything, with nothing ever sent: what is under way at the end.
static void test_what_is_under_way_counts(void) {
    struct world world;
    const double rates[] = {0.05, 0.05, 0.05, 0.0125};
    size_t left = 8 << 20;
    size_t total = left;
    bool took = true;
    world_make(&world, rates, LANES);
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
        CHECK(part_ns < (double)total / 0.1625 * 1.1, "lane %d has work for %.1f ms, all for %.1f", i, part_ns / 1e6,
              (double)total / 0.1625 / 1e6);
    }
    CHECK(left < 8 * SEGMENT, "%zu bytes were assigned to no lane", left);
    world.paths[3].in_flight = 1 << 20;
    CHECK(segment(&world, 3, 1 << 20) == 0, "a lane with too much under way takes more");
    world.paths[3].in_flight = 0;
    CHECK(segment(&world, 3, BLOCK) > 0, "a lane with nothing under way takes nothing");
}

// A slow lane has nothing under way, but this host still has what it sent.
static void test_what_this_host_still_has_counts(void) {
    struct world world;
    const double rates[] = {0.05, 0.05, 0.05, 0.0125};
    int sooner = -1;
    world_make(&world, rates, LANES);
    CHECK(segment(&world, 3, 512 * 1024) > 0, "a lane with nothing before it takes nothing");
    world.paths[3].in_flight = 1 << 20;
    nb_rate_sent(&world.lanes, &world.paths[3], 1 << 20);
    CHECK(world.paths[3].rate.held == 1 << 20, "of what was sent %zu bytes count", world.paths[3].rate.held);
    world.paths[3].rate.bytes_per_ns = rates[3];
    held_by[3] = 1 << 20;
    CHECK(segment_or(&world, 3, 512 * 1024, &sooner) == 0, "a lane that has 84 ms of work before it takes more");
    CHECK(sooner >= 0 && sooner < 3, "lane %d is predicted to finish sooner", sooner);
    CHECK(segment(&world, sooner, 512 * 1024) > 0, "and it takes nothing");
    CHECK(segment(&world, 3, 64 << 20) > 0, "far from the end it takes nothing");
    held_by[3] = 0;
    world.paths[3].rate.held_ns = 0; // the answer is old
    CHECK(segment(&world, 3, 512 * 1024) > 0, "once that has gone it takes nothing still");
}

// However much lies before each of them: one lane takes what is left, and the others name it.
static void test_what_is_left_is_never_left(void) {
    struct world world;
    const double rates[] = {0.05, 0.02, 0.07, 0.0125};
    unsigned seed = 1;
    world_make(&world, rates, LANES);
    for (int trial = 0; trial < 2000; trial++) {
        size_t left = BLOCK * (size_t)(1 + trial % 200);
        int sooner[LANES];
        size_t takes[LANES];
        for (int i = 0; i < LANES; i++) {
            seed = seed * 1103515245u + 12345u;
            world.paths[i].rate.held = held_by[i] = (seed >> 8) % (trial % 3 == 0 ? 4096 : 2 << 20);
        }
        for (int i = 0; i < LANES; i++) {
            takes[i] = segment_or(&world, i, left, &sooner[i]);
        }
        for (int i = 0; i < LANES; i++) {
            CHECK(takes[i] > 0 || (sooner[i] >= 0 && sooner[i] != i && takes[sooner[i]] > 0),
                  "trial %d: lane %d leaves %zu bytes to lane %d, which leaves them", trial, i, left, sooner[i]);
            world.flow.left = (uint32_t)(left / BLOCK);
            CHECK(nb_rate_segment(&world.lanes, &world.peer, i, NULL) > 0, "lane %d leaves what it must take", i);
        }
    }
}

static void test_lanes_are_asked_near_the_end_only(void) {
    struct world world;
    const double rates[] = {0.05, 0.05, 0.05, 0.05};
    world_make(&world, rates, LANES);
    for (int i = 0; i < LANES; i++) {
        world.paths[i].rate.held = 1;
    }
    (void)segment(&world, 0, 64 << 20);
    CHECK(queries == 0, "with 64 MiB left %d lanes were queried", queries);
    (void)segment(&world, 0, 1 << 20);
    CHECK(queries == LANES, "with 1 MiB left %d lanes were queried", queries);
}

static void test_fast_lanes_take_no_crumbs(void) {
    struct world world;
    const double rates[] = {2, 2};
    world_make(&world, rates, 2);
    size_t least = segment(&world, 0, BLOCK);
    CHECK(least > 150 * 1024 && least <= SEGMENT, "a lane of 2 GB/s takes %zu bytes", least);
}

static void test_no_segment_is_longer_than_what_was_asked_for(void) {
    struct world world;
    const double rates[] = {2, 0};
    world_make(&world, rates, 2);
    world.lanes.config.segment_bytes = BLOCK;
    CHECK(segment(&world, 0, 1 << 20) == BLOCK && segment(&world, 1, 1 << 20) == BLOCK, "a segment is longer");
}

static void test_a_lane_that_is_not_known_counts_like_any(void) {
    struct world world;
    const double rates[] = {1, 0};
    world_make(&world, rates, 2);
    CHECK(segment(&world, 1, 512 * 1024) == 128 * 1024, "it takes %zu bytes of 512 KiB",
          segment(&world, 1, 512 * 1024));
    world.paths[1].open = false;
    CHECK(segment(&world, 0, 512 * 1024) == SEGMENT, "a lost lane keeps a part for itself");
}

static const struct nb_lanes quiet = {.config = {.ops = &silent}};

static void sent_after(struct path *path, int64_t ns, size_t bytes) {
    path->rate.since_ns = nb_now_ns() - ns; // as if it had been posted then
    nb_rate_sent(&quiet, path, bytes);
}

static void test_a_rate_is_what_was_sent_while_there_was_work(void) {
    struct path path = {.open = true};
    nb_rate_posted(&path, 64 * 1024);
    sent_after(&path, 10 * 1000 * 1000, 64 * 1024);
    CHECK(path.in_flight == 0 && path.rate.bytes_per_ns == 0, "one short segment gives a rate");
    nb_rate_posted(&path, 1 << 20);
    nb_rate_posted(&path, 1 << 20);
    nb_rate_refused(&path, 1 << 20);
    CHECK(path.in_flight == 1 << 20, "%zu bytes in flight", path.in_flight);
    sent_after(&path, 10 * 1000 * 1000, 1 << 20);
    CHECK(path.in_flight == 0 && path.rate.bytes_per_ns > 0, "a MiB gives no rate");
}

static void test_requests_that_end_together_tell_no_other_rate(void) {
    struct path path = {.open = true};
    for (int burst = 0; burst < 100; burst++) {
        nb_rate_posted(&path, 4 << 20);
        sent_after(&path, 100 * 1000 * 1000, 1 << 20); // that is 42 MB/s for all four
        nb_rate_sent(&quiet, &path, 1 << 20);
        nb_rate_sent(&quiet, &path, 1 << 20);
        nb_rate_sent(&quiet, &path, 1 << 20);
        // The machine may have been elsewhere for a while, which makes it less, never more.
        CHECK(path.rate.bytes_per_ns < 0.042, "burst %d: the rate is %.3f bytes a ns", burst, path.rate.bytes_per_ns);
    }
    CHECK(path.rate.bytes_per_ns > 0, "400 MiB give no rate");
}

static void test_an_old_rate_fades(void) {
    struct path path = {.open = true};
    for (int i = 0; i < 100; i++) {
        nb_rate_posted(&path, 1 << 20);
        sent_after(&path, 100 * 1000 * 1000, 1 << 20);
    }
    double slow = path.rate.bytes_per_ns;
    for (int i = 0; i < 20; i++) {
        nb_rate_posted(&path, 8 << 20);
        sent_after(&path, 100 * 1000 * 1000, 8 << 20);
    }
    CHECK(path.rate.bytes_per_ns > 4 * slow, "after two seconds at eight times the rate it is %.1f times as high",
          path.rate.bytes_per_ns / slow);
}

int main(void) {
    test_one_lane_needs_no_care();
    test_a_slow_lane_ends_with_the_others();
    test_what_is_under_way_counts();
    test_what_this_host_still_has_counts();
    test_what_is_left_is_never_left();
    test_lanes_are_asked_near_the_end_only();
    test_fast_lanes_take_no_crumbs();
    test_no_segment_is_longer_than_what_was_asked_for();
    test_a_lane_that_is_not_known_counts_like_any();
    test_a_rate_is_what_was_sent_while_there_was_work();
    test_requests_that_end_together_tell_no_other_rate();
    test_an_old_rate_fades();
    return 0;
}
