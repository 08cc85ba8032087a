// The pull scheduler on a network of the imagination: thousands of seeded schedules, all ranks driven by one thread, so
// that a seed that fails fails again: test_lanes SEED runs that one alone.
#include "flows.h"

enum { SCHEDULES = 10000, BLOCK_MAX = 256, BLOCKS_MAX = 24, TURNS_MAX = 200000 };

static void run(int kind, uint64_t seed) {
    struct flow_world world = {.ops = nb_mem_ops(kind)};
    struct nb_error err = {0};
    flows_plan(&world.plan, seed, BLOCK_MAX, BLOCKS_MAX);
    int rc = flows_open(&world, &err);
    CHECK(rc == 0, "open: %s", err.text);
    uint64_t random = seed;
    int done = 0;
    for (int turn = 0; done < world.plan.size; turn++) {
        CHECK(turn < TURNS_MAX, "%s seed %llu never ends", world.ops->name, (unsigned long long)seed);
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
    for (int rank = 0; rank < world.plan.size; rank++) {
        for (int peer = 0; peer < world.plan.size; peer++) {
            for (int lane = 0; lane < world.plan.lanes && peer != rank; lane++) {
                struct nb_lane_stats stats;
                nb_lanes_stats(world.nodes[rank].lanes, peer, lane, &stats);
                sent += stats.bytes_out;
                landed += stats.bytes_in;
            }
        }
    }
    CHECK(sent == want && landed == want, "seed %llu: %llu bytes sent, %llu landed, of %llu", (unsigned long long)seed,
          (unsigned long long)sent, (unsigned long long)landed, (unsigned long long)want);
    flows_close(&world);
}

int main(int argc, char **argv) {
    if (argc > 1) {
        uint64_t seed = strtoull(argv[1], NULL, 10);
        run(seed % 2 == 0 ? NB_LANE_STREAM : NB_LANE_RMA, seed);
        return 0;
    }
    for (uint64_t seed = 0; seed < SCHEDULES; seed++) {
        run(seed % 2 == 0 ? NB_LANE_STREAM : NB_LANE_RMA, seed);
    }
    printf("%d schedules\n", SCHEDULES);
    return 0;
}
