// How fast each lane delivers, and how much of what is left it may take at once: guided self-scheduling, weighted by the
// lanes' rates. A lane's share of what is left shrinks with it, so that no lane is still busy with a long segment when
// the others are done, and a segment is never so short that handling it costs more than carrying it.
#include <stddef.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/list.h"
#include "transport/lanes.h"
#include "transport/lanes_internal.h"

enum {
    SPELL_BYTES = 512 * 1024, // a shorter spell of work tells of buffers, not of the network
    HANDLING_NS = 100 * 1000, // the least time that a segment should be worth
    SEGMENT_LEAST = 16 * 1024,
    SEGMENT_UNKNOWN = 64 * 1024 // the least, while a lane's rate is not known
};

static const double NEWER = 0.25; // weight of the latest spell

void nb_pace_posted(struct path *path, size_t bytes) {
    if (path->in_flight == 0) {
        path->pace.since_ns = nb_now_ns();
        path->pace.bytes = 0;
    }
    path->in_flight += bytes;
}

void nb_pace_refused(struct path *path, size_t bytes) {
    path->in_flight -= bytes;
}

void nb_pace_sent(struct path *path, size_t bytes) {
    struct pace *pace = &path->pace;
    path->in_flight -= bytes;
    pace->bytes += bytes;
    if (pace->bytes < SPELL_BYTES) {
        return;
    }
    int64_t now = nb_now_ns();
    if (now > pace->since_ns) {
        double rate = (double)pace->bytes / (double)(now - pace->since_ns);
        pace->rate = pace->rate > 0 ? (1 - NEWER) * pace->rate + NEWER * rate : rate;
    }
    pace->since_ns = now;
    pace->bytes = 0;
}

static size_t bytes_left(const struct peer *peer, size_t enough) {
    size_t left = 0;
    NB_LIST_EACH(it, &peer->out) {
        const struct nb_flow *flow = NB_CONTAINER(it, struct nb_flow, link);
        left += flow->left * flow->block_bytes;
        if (left >= enough) {
            break;
        }
    }
    return left;
}

// Of what all lanes deliver together; equal parts while one of them is not known.
static double part_of(const struct nb_lanes *lanes, const struct peer *peer, int lane) {
    double sum = 0;
    for (int i = 0; i < peer->reach; i++) {
        double rate = peer->paths[i].pace.rate;
        if (peer->paths[i].open && rate <= 0) {
            return 1.0 / lanes->used;
        }
        sum += peer->paths[i].open ? rate : 0;
    }
    return sum > 0 ? peer->paths[lane].pace.rate / sum : 1.0;
}

size_t nb_pace_segment(const struct nb_lanes *lanes, const struct peer *peer, int lane) {
    size_t most = lanes->config.segment_bytes;
    if (lanes->used == 1) {
        return most;
    }
    double rate = peer->paths[lane].pace.rate;
    double part = part_of(lanes, peer, lane);
    size_t left = bytes_left(peer, (size_t)(2 * (double)most / part));
    size_t least = rate > 0 ? (size_t)(rate * HANDLING_NS) : SEGMENT_UNKNOWN;
    least = least < SEGMENT_LEAST ? SEGMENT_LEAST : least;
    size_t half = (size_t)(part * (double)left / 2);
    half = half < least ? least : half;
    return half < most ? half : most;
}
