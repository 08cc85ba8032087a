#include "engine/tally.h"

#include <stdbool.h>
#include <stdint.h>

#include "engine/engine.h"

enum {
    COUNT_NS = 500 * 1000 * 1000, // the longest that one count is measured, all its turns together
    AGREE_PERCENT = 5,
    GOOD_PERCENT = 2
};

void nb_tally_begin(struct nb_tally *tally, int lanes) {
    *tally = (struct nb_tally){.count = 0};
    while (tally->count < NB_PROBE_MAX && 1 << tally->count <= lanes) {
        tally->count++;
    }
}

int nb_tally_lanes(const struct nb_tally *tally) {
    return 1 << tally->at;
}

double nb_probe_rate(const struct nb_probe_point *point) {
    return point->ns > 0 ? (double)point->bytes / (double)point->ns : 0;
}

void nb_tally_window(struct nb_tally *tally, uint64_t bytes, int64_t ns) {
    struct nb_probe_point *fast = tally->counts[tally->at].fast;
    struct nb_probe_point window = {.bytes = bytes, .ns = ns};
    double rate = nb_probe_rate(&window);
    if (rate > nb_probe_rate(&fast[0])) {
        fast[1] = fast[0];
        fast[0] = window;
    } else if (rate > nb_probe_rate(&fast[1])) {
        fast[1] = window;
    }
}

static bool is_known(const struct nb_tally *tally, int place) {
    const struct nb_probe_point *fast = tally->counts[place].fast;
    double enough = nb_probe_rate(&fast[0]) * (100 - AGREE_PERCENT) / 100;
    return (fast[1].ns > 0 && nb_probe_rate(&fast[1]) >= enough) || tally->counts[place].spent_ns >= COUNT_NS;
}

bool nb_tally_next(struct nb_tally *tally, int64_t turn_ns) {
    tally->counts[tally->at].spent_ns += turn_ns;
    for (int i = 1; i <= tally->count; i++) {
        int place = (tally->at + i) % tally->count;
        if (!is_known(tally, place)) {
            tally->at = place;
            return true;
        }
    }
    return false;
}

struct nb_probe_point nb_tally_point(const struct nb_tally *tally, int place) {
    const struct nb_probe_point *fast = tally->counts[place].fast;
    return (struct nb_probe_point){
        .lanes = 1 << place, .bytes = fast[0].bytes + fast[1].bytes, .ns = fast[0].ns + fast[1].ns};
}

static double rate_at(const struct nb_tally *tally, int place) {
    struct nb_probe_point point = nb_tally_point(tally, place);
    return nb_probe_rate(&point);
}

int nb_tally_choose(const struct nb_tally *tally) {
    double best = 0;
    for (int place = 0; place < tally->count; place++) {
        best = rate_at(tally, place) > best ? rate_at(tally, place) : best;
    }
    int place = 0;
    while (place < tally->count - 1 && rate_at(tally, place) < best * (100 - GOOD_PERCENT) / 100) {
        place++;
    }
    return 1 << place;
}
