// Lane search: chooses the next number of lanes to measure, and the one to use, by the rates measured so far.
#include "engine/lane_search.h"

#include <stdbool.h>
#include <stdint.h>

#include "engine/engine.h"

enum {
    COUNT_NS = 500 * 1000 * 1000, // limit of one count's measuring time, all its turns together
    AGREE_PERCENT = 5,
    GOOD_PERCENT = 2
};

void nb_lane_search_begin(struct nb_lane_search *search, int lanes) {
    *search = (struct nb_lane_search){.count = 0};
    while (search->count < NB_PROBE_MAX && 1 << search->count <= lanes) {
        search->count++;
    }
}

int nb_lane_search_lanes(const struct nb_lane_search *search) {
    return 1 << search->at;
}

double nb_probe_rate(const struct nb_probe_point *point) {
    return point->ns > 0 ? (double)point->bytes / (double)point->ns : 0;
}

void nb_lane_search_window(struct nb_lane_search *search, uint64_t bytes, int64_t ns) {
    struct nb_probe_point *fast = search->counts[search->at].fast;
    struct nb_probe_point window = {.bytes = bytes, .ns = ns};
    double rate = nb_probe_rate(&window);
    if (rate > nb_probe_rate(&fast[0])) {
        fast[1] = fast[0];
        fast[0] = window;
    } else if (rate > nb_probe_rate(&fast[1])) {
        fast[1] = window;
    }
}

static bool is_known(const struct nb_lane_search *search, int place) {
    const struct nb_probe_point *fast = search->counts[place].fast;
    double enough = nb_probe_rate(&fast[0]) * (100 - AGREE_PERCENT) / 100;
    return (fast[1].ns > 0 && nb_probe_rate(&fast[1]) >= enough) || search->counts[place].spent_ns >= COUNT_NS;
}

bool nb_lane_search_next(struct nb_lane_search *search, int64_t turn_ns) {
    search->counts[search->at].spent_ns += turn_ns;
    for (int i = 1; i <= search->count; i++) {
        int place = (search->at + i) % search->count;
        if (!is_known(search, place)) {
            search->at = place;
            return true;
        }
    }
    return false;
}

struct nb_probe_point nb_lane_search_point(const struct nb_lane_search *search, int place) {
    const struct nb_probe_point *fast = search->counts[place].fast;
    return (struct nb_probe_point){
        .lanes = 1 << place, .bytes = fast[0].bytes + fast[1].bytes, .ns = fast[0].ns + fast[1].ns};
}

static double rate_at(const struct nb_lane_search *search, int place) {
    struct nb_probe_point point = nb_lane_search_point(search, place);
    return nb_probe_rate(&point);
}

int nb_lane_search_choose(const struct nb_lane_search *search) {
    double best = 0;
    for (int place = 0; place < search->count; place++) {
        best = rate_at(search, place) > best ? rate_at(search, place) : best;
    }
    int place = 0;
    while (place < search->count - 1 && rate_at(search, place) < best * (100 - GOOD_PERCENT) / 100) {
        place++;
    }
    return 1 << place;
}
