// How much one lane may take at once: by its rate, by what is left, never so little that handling costs more.
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

struct world {
    struct nb_lanes lanes;
    struct peer peer;
    struct path paths[LANES];
    struct nb_flow flow;
};

// Rates in bytes per ns, that is in GB/s.
static void world_make(struct world *world, const double *rates, int used) {
    memset(world, 0, sizeof *world);
    world->lanes.config.segment_bytes = SEGMENT;
    world->lanes.used = used;
    world->peer.reach = used;
    world->peer.paths = world->paths;
    nb_list_init(&world->peer.out);
    nb_list_init(&world->flow.link);
    nb_list_insert(&world->peer.out, &world->flow.link);
    world->flow.block_bytes = BLOCK;
    for (int i = 0; i < used; i++) {
        world->paths[i].open = true;
        world->paths[i].pace.rate = rates[i];
    }
}

static size_t segment(struct world *world, int lane, size_t left) {
    world->flow.left = (uint32_t)(left / BLOCK);
    return nb_pace_segment(&world->lanes, &world->peer, lane);
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
    CHECK(left < 8 * SEGMENT, "%zu bytes were left to nobody", left);
    world.paths[3].in_flight = 1 << 20;
    CHECK(segment(&world, 3, 1 << 20) == 0, "a lane with too much under way takes more");
    world.paths[3].in_flight = 0;
    CHECK(segment(&world, 3, BLOCK) > 0, "a lane with nothing under way takes nothing");
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

static void sent_after(struct path *path, int64_t ns, size_t bytes) {
    path->pace.since_ns = nb_now_ns() - ns; // as if it had been posted then
    nb_pace_sent(path, bytes);
}

static void test_a_rate_is_what_was_sent_while_there_was_work(void) {
    struct path path = {.open = true};
    nb_pace_posted(&path, 64 * 1024);
    sent_after(&path, 10 * 1000 * 1000, 64 * 1024);
    CHECK(path.in_flight == 0 && path.pace.rate == 0, "one short segment tells a rate");
    nb_pace_posted(&path, 1 << 20);
    nb_pace_posted(&path, 1 << 20);
    nb_pace_refused(&path, 1 << 20);
    CHECK(path.in_flight == 1 << 20, "%zu bytes in flight", path.in_flight);
    sent_after(&path, 10 * 1000 * 1000, 1 << 20);
    CHECK(path.in_flight == 0 && path.pace.rate > 0, "a MiB tells no rate");
}

static void test_requests_that_end_together_tell_no_other_rate(void) {
    struct path path = {.open = true};
    for (int burst = 0; burst < 100; burst++) {
        nb_pace_posted(&path, 4 << 20);
        sent_after(&path, 100 * 1000 * 1000, 1 << 20); // that is 42 MB/s for all four
        nb_pace_sent(&path, 1 << 20);
        nb_pace_sent(&path, 1 << 20);
        nb_pace_sent(&path, 1 << 20);
        // The machine may have been elsewhere for a while, which makes it less, never more.
        CHECK(path.pace.rate < 0.042, "burst %d: the rate is %.3f bytes a ns", burst, path.pace.rate);
    }
    CHECK(path.pace.rate > 0, "400 MiB tell no rate");
}

static void test_an_old_rate_fades(void) {
    struct path path = {.open = true};
    for (int i = 0; i < 100; i++) {
        nb_pace_posted(&path, 1 << 20);
        sent_after(&path, 100 * 1000 * 1000, 1 << 20);
    }
    double slow = path.pace.rate;
    for (int i = 0; i < 20; i++) {
        nb_pace_posted(&path, 8 << 20);
        sent_after(&path, 100 * 1000 * 1000, 8 << 20);
    }
    CHECK(path.pace.rate > 4 * slow, "after two seconds at eight times the rate it is %.1f times as high",
          path.pace.rate / slow);
}

int main(void) {
    test_one_lane_needs_no_care();
    test_a_slow_lane_ends_with_the_others();
    test_what_is_under_way_counts();
    test_fast_lanes_take_no_crumbs();
    test_no_segment_is_longer_than_what_was_asked_for();
    test_a_lane_that_is_not_known_counts_like_any();
    test_a_rate_is_what_was_sent_while_there_was_work();
    test_requests_that_end_together_tell_no_other_rate();
    test_an_old_rate_fades();
    return 0;
}
