// Search for the lane count (streams=auto) with given rates: which count is measured next, when a measurement is
// sufficient, and which count is chosen.
#include <stdbool.h>
#include <stdint.h>

#include "check.h"
#include "engine/lane_search.h"

enum { WINDOW_NS = 50000000, ROUND_NS = 100000000 }; // a round: one window that is discarded and one that is measured

// Runs the search with given rates by index, in bytes per ns. Every second window of a count is slower by
// `slower_percent`. Returns the chosen lane count; rounds[index]: number of windows of each count.
static int run_search(const double *rates, int count, int slower_percent, int rounds[NB_PROBE_MAX]) {
    struct nb_lane_search search;
    bool more = true;
    nb_lane_search_begin(&search, 1 << (count - 1));
    CHECK(search.count == count && nb_lane_search_lanes(&search) == 1, "%d counts", search.count);
    for (int i = 0; i < NB_PROBE_MAX; i++) {
        rounds[i] = 0;
    }
    for (int round = 0; more; round++) {
        CHECK(round < 6 * NB_PROBE_MAX, "the search does not end");
        int index = search.at;
        CHECK(nb_lane_search_lanes(&search) == 1 << index, "%d lanes at %d", nb_lane_search_lanes(&search), index);
        double off = rounds[index]++ % 2 == 0 ? 1 : 1 - slower_percent / 100.0;
        nb_lane_search_window(&search, (uint64_t)(rates[index] * off * WINDOW_NS), WINDOW_NS);
        more = nb_lane_search_next(&search, ROUND_NS);
    }
    return nb_lane_search_choose(&search);
}

static void test_smallest_count_within_2_percent(void) {
    static const struct {
        double rates[5];
        int lanes;
    } cases[] = {{{1, 1, 1, 1, 1}, 1},
                 {{0.5, 1, 2, 2, 2}, 4},
                 {{0.979, 1, 1, 1, 1}, 2},       // 2.1 % below the best
                 {{0.981, 1, 1, 1, 1}, 1},       // 1.9 %
                 {{1, 0.9, 0.8, 0.7, 1.03}, 16}, // the last count is the best
                 {{1, 0.9, 0.8, 0.7, 1.01}, 1},
                 {{0.06, 0.12, 0.24, 0.48, 0.96}, 16},
                 {{0, 0, 0, 0, 0}, 1}}; // nothing moved
    int rounds[NB_PROBE_MAX];
    for (unsigned i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int lanes = run_search(cases[i].rates, 5, 0, rounds);
        CHECK(lanes == cases[i].lanes, "case %u: %d lanes", i, lanes);
    }
}

static void test_windows_per_count(void) {
    static const double rates[] = {1, 2, 4, 4, 4};
    int rounds[NB_PROBE_MAX];
    (void)run_search(rates, 5, 4, rounds);
    for (int i = 0; i < 5; i++) {
        CHECK(rounds[i] == 2, "windows 4 %% apart: count %d had %d rounds", i, rounds[i]);
    }
    (void)run_search(rates, 5, 6, rounds); // a third window is as fast as the first
    for (int i = 0; i < 5; i++) {
        CHECK(rounds[i] == 3, "windows 6 %% apart: count %d had %d rounds", i, rounds[i]);
    }
    static const double nothing[] = {0, 0};
    (void)run_search(nothing, 2, 0, rounds);
    CHECK(rounds[0] == 5 && rounds[1] == 5, "windows without data: %d and %d rounds", rounds[0], rounds[1]);
}

// A temporary slowdown does not count: the result of a count is its two fastest windows.
static void test_temporary_slowdown(void) {
    static const uint64_t windows[] = {10, 100, 20, 99};
    struct nb_lane_search search;
    nb_lane_search_begin(&search, 1);
    for (unsigned i = 0; i < 4; i++) {
        nb_lane_search_window(&search, windows[i], 10);
        CHECK(nb_lane_search_next(&search, ROUND_NS) == (i < 3), "after %u windows", i + 1);
    }
    struct nb_probe_point point = nb_lane_search_point(&search, 0);
    CHECK(point.lanes == 1 && point.bytes == 199 && point.ns == 20, "%llu bytes in %lld ns",
          (unsigned long long)point.bytes, (long long)point.ns);
}

static void test_counts_up_to_the_open_lanes(void) {
    static const int open[][2] = {{1, 1}, {2, 2}, {3, 2}, {15, 4}, {16, 5}, {64, 7}};
    struct nb_lane_search search;
    for (unsigned i = 0; i < sizeof open / sizeof open[0]; i++) {
        nb_lane_search_begin(&search, open[i][0]);
        CHECK(search.count == open[i][1], "%d lanes are open: %d counts", open[i][0], search.count);
    }
}

int main(void) {
    test_smallest_count_within_2_percent();
    test_windows_per_count();
    test_temporary_slowdown();
    test_counts_up_to_the_open_lanes();
    return 0;
}
