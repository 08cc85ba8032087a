// streams=auto by numbers alone: which number of lanes is measured next, when it is known, and which one is taken.
//
// Counts of 1, 2, 4, … lanes take turns, a window each: a machine or a link that is slower for a second is so for all of
// them, and of each count the two fastest windows hold.
#ifndef NB_ENGINE_TALLY_H
#define NB_ENGINE_TALLY_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/engine.h"

struct nb_tally {
    int count; // of numbers of lanes: 1, 2, …, 1 << (count - 1)
    int at;    // whose turn it is
    struct {
        struct nb_probe_point fast[2]; // its two fastest windows, the faster one first
        int64_t spent_ns;              // in all its turns
    } counts[NB_PROBE_MAX];
};

// Those of up to `lanes` lanes; the first turn is that of one lane.
void nb_tally_begin(struct nb_tally *tally, int lanes);
int nb_tally_lanes(const struct nb_tally *tally);

// What a window of the present turn has moved.
void nb_tally_window(struct nb_tally *tally, uint64_t bytes, int64_t ns);

// The present turn is over, and took so long. True: another one has its turn. A count is known, and has no more turns,
// when its two fastest windows agree within 5 %, or its turns together took half a second.
bool nb_tally_next(struct nb_tally *tally, int64_t turn_ns);

// Of a count by its place: its two windows together.
struct nb_probe_point nb_tally_point(const struct nb_tally *tally, int place);
// Bytes a ns; 0 of nothing.
double nb_probe_rate(const struct nb_probe_point *point);
// The least number of lanes whose rate is within 2 % of the best.
int nb_tally_choose(const struct nb_tally *tally);

#endif
