// Lane search of streams=auto, without I/O: which number of lanes to measure next, when to stop, and which to use.
//
// Counts of 1, 2, 4, … lanes take turns, one window each, so that a slow phase of a host or a link affects all counts
// alike. The two fastest windows of each count are used.
#ifndef NB_ENGINE_LANE_SEARCH_H
#define NB_ENGINE_LANE_SEARCH_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/engine.h"

struct nb_lane_search {
    int count; // number of lane counts: 1, 2, …, 1 << (count - 1)
    int at;    // index of the count whose turn it is
    struct {
        struct nb_probe_point fast[2]; // its two fastest windows, fastest first
        int64_t spent_ns;              // total time of its turns
    } counts[NB_PROBE_MAX];
};

// Starts with all counts up to `lanes` lanes. The first turn is that of one lane.
void nb_lane_search_begin(struct nb_lane_search *search, int lanes);
int nb_lane_search_lanes(const struct nb_lane_search *search);

// Adds a window of the present turn: the bytes that it moved.
void nb_lane_search_window(struct nb_lane_search *search, uint64_t bytes, int64_t ns);

// Ends the present turn. True: another count has its turn. A count is settled, and has no more turns, when its two
// fastest windows agree within 5 %, or its turns together took half a second.
bool nb_lane_search_next(struct nb_lane_search *search, int64_t turn_ns);

// Returns the two fastest windows of a count together, by the count's index.
struct nb_probe_point nb_lane_search_point(const struct nb_lane_search *search, int place);
// Bytes per ns; 0 for an empty window.
double nb_probe_rate(const struct nb_probe_point *point);
// Returns the smallest number of lanes whose rate is within 2 % of the best.
int nb_lane_search_choose(const struct nb_lane_search *search);

#endif
