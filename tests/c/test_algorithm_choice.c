// Choice of the all-reduce algorithm: it has the lowest cost by the documented formulas, and it depends on the size.
#include <stddef.h>

#include "check.h"
#include "coll/choose.h"

static const struct nb_costs typical = {.alpha_ns = 30000, .beta_ns = 0.4, .gamma_ns = 0.05};

static void test_costs_by_hand(void) {
    // 4 ranks, 1000 bytes. Ring: 6 x 30000 + 1.5 x 400. Doubling: 2 x (30000 + 480 + 50) + 100. Halving: 4 x 30000 +
    // 720 + 37.5.
    double ring = nb_cost_ns(&typical, NB_ALGORITHM_RING, 4, 1, 1000);
    double doubling = nb_cost_ns(&typical, NB_ALGORITHM_DOUBLING, 4, 1, 1000);
    double halving = nb_cost_ns(&typical, NB_ALGORITHM_HALVING, 4, 1, 1000);
    CHECK(ring > 180599 && ring < 180601, "ring: %f", ring);
    CHECK(doubling > 61159 && doubling < 61161, "doubling: %f", doubling);
    CHECK(halving > 120757 && halving < 120758, "halving: %f", halving);
    // Inline: 2 x 3 x (400 + 50).
    double inline_ns = nb_cost_ns(&typical, NB_ALGORITHM_INLINE, 4, 1, 1000);
    CHECK(inline_ns > 2699 && inline_ns < 2701, "inline: %f", inline_ns);
    // 3 ranks: one rank sends its buffer to a neighbour and gets the result back: 2 x 30000 + 2 x 400 + 50 more.
    double three_ranks = nb_cost_ns(&typical, NB_ALGORITHM_DOUBLING, 3, 1, 1000);
    CHECK(three_ranks > 30000 + 480 + 50 + 100 + 60850 - 1 && three_ranks < 30000 + 480 + 50 + 100 + 60850 + 1, "%f",
          three_ranks);
}

// Halving saves steps but no bytes, so it is never chosen for large buffers.
static void test_ring_for_large_buffers(void) {
    const struct nb_costs slow_link = {.alpha_ns = 150000, .beta_ns = 8, .gamma_ns = 0.1};
    CHECK(nb_choose(&slow_link, 4, 1, 16000000) == NB_ALGORITHM_RING, "16 MB");
    CHECK(nb_choose(&slow_link, 8, 1, 4000000) == NB_ALGORITHM_RING, "4 MB");
}

static void check_lowest_cost(int size, size_t bytes) {
    static const enum nb_algorithm_id all[] = {NB_ALGORITHM_RING, NB_ALGORITHM_DOUBLING, NB_ALGORITHM_HALVING};
    double chosen = nb_cost_ns(&typical, nb_choose(&typical, size, 1, bytes), size, 1, bytes);
    for (int i = 0; i < 3; i++) {
        CHECK(chosen <= nb_cost_ns(&typical, all[i], size, 1, bytes), "%d ranks, %zu bytes: %d is cheaper", size, bytes,
              all[i]);
    }
}

// Two-level all-reduce has a high fixed cost and a low cost per byte: it is chosen from some size on, with several
// hosts only.
static void test_two_level(void) {
    struct nb_costs costs = typical;
    costs.levels_ns = 1e6;
    costs.levels_byte_ns = 0.01;
    // 4 ranks on 2 hosts, 1000 bytes: 10^6 + 10 + 400.
    double cost = nb_cost_ns(&costs, NB_ALGORITHM_TWO_LEVEL, 4, 2, 1000);
    CHECK(cost > 1000409 && cost < 1000411, "two levels: %f", cost);
    CHECK(nb_choose(&costs, 4, 2, 64 * 1024) != NB_ALGORITHM_TWO_LEVEL, "two-level is chosen for 64 KiB");
    // Compared with a ring: 820 000 ns more fixed cost, 0.19 ns less per byte.
    CHECK(nb_choose(&costs, 4, 2, 6000000) == NB_ALGORITHM_TWO_LEVEL, "6 MB");
    CHECK(nb_choose(&costs, 4, 1, 6000000) == NB_ALGORITHM_RING, "one level");
    CHECK(nb_choose(&typical, 4, 2, 6000000) == NB_ALGORITHM_RING, "two-level is chosen without a measurement");
    costs.levels_byte_ns = 0.3;
    CHECK(nb_choose(&costs, 4, 2, (size_t)1 << 36) == NB_ALGORITHM_RING,
          "two-level is chosen although memory is slower than the network");
    CHECK(nb_choose(&costs, 4, 2, 0) != NB_ALGORITHM_TWO_LEVEL, "two-level is chosen for 0 bytes");
}

int main(void) {
    const struct nb_costs unknown = {0};
    test_costs_by_hand();
    test_two_level();
    test_ring_for_large_buffers();
    for (int size = 2; size <= 1024; size = size < 16 ? size + 1 : size * 2) {
        for (size_t bytes = 4; bytes < (size_t)1 << 32; bytes *= 3) {
            check_lowest_cost(size, bytes);
            CHECK(nb_choose(&unknown, size, 1, bytes) == NB_ALGORITHM_RING, "not the ring without costs");
        }
        CHECK(nb_choose(&typical, size, 1, 8) == NB_ALGORITHM_INLINE, "%d ranks, 8 bytes: %d", size,
              nb_choose(&typical, size, 1, 8));
        CHECK(nb_choose(&typical, size, 1, (size_t)1 << 36) == NB_ALGORITHM_RING, "%d ranks, 64 GiB: %d", size,
              nb_choose(&typical, size, 1, (size_t)1 << 36));
    }
    CHECK(nb_choose(&typical, 4, 1, NB_INLINE_MAX + 4) == NB_ALGORITHM_DOUBLING, "4 ranks, too large for inline: %d",
          nb_choose(&typical, 4, 1, NB_INLINE_MAX + 4));
    CHECK(nb_choose(&typical, 512, 1, NB_INLINE_MAX) == NB_ALGORITHM_DOUBLING, "512 ranks, inline limit: %d",
          nb_choose(&typical, 512, 1, NB_INLINE_MAX));
    CHECK(nb_choose(&typical, 8, 1, 256 * 1024) == NB_ALGORITHM_HALVING, "8 ranks, 256 KiB: %d",
          nb_choose(&typical, 8, 1, 256 * 1024));
    return 0;
}
