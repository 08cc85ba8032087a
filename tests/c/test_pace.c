// How much one lane may take at once: by its rate, by what is left, never so little that handling costs more.
#include <stdint.h>
#include <string.h>

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

static void test_fast_lanes_take_no_crumbs(void) {
    struct world world;
    const double rates[] = {2, 2};
    world_make(&world, rates, 2);
    size_t least = segment(&world, 0, BLOCK);
    CHECK(least > 150 * 1024 && least <= SEGMENT, "a lane of 2 GB/s takes %zu bytes", least);
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

static void test_a_rate_is_what_was_sent_while_there_was_work(void) {
    struct path path = {.open = true};
    nb_pace_posted(&path, 64 * 1024);
    nb_pace_sent(&path, 64 * 1024);
    CHECK(path.in_flight == 0 && path.pace.rate == 0, "one short segment tells a rate");
    nb_pace_posted(&path, 1 << 20);
    nb_pace_posted(&path, 1 << 20);
    nb_pace_refused(&path, 1 << 20);
    CHECK(path.in_flight == 1 << 20, "%zu bytes in flight", path.in_flight);
    nb_pace_sent(&path, 1 << 20);
    CHECK(path.in_flight == 0 && path.pace.rate > 0, "a MiB tells no rate");
}

int main(void) {
    test_one_lane_needs_no_care();
    test_a_slow_lane_ends_with_the_others();
    test_fast_lanes_take_no_crumbs();
    test_a_lane_that_is_not_known_counts_like_any();
    test_a_rate_is_what_was_sent_while_there_was_work();
    return 0;
}
