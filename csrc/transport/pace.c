// How fast each lane delivers, and how much of what is left it may take: guided self-scheduling, weighted by the lanes'
// rates. A lane's share of what is left shrinks with it, and what it has before it counts, so that no lane is still at
// work when the others are done; and a segment is never so short that handling it costs more than carrying it. Before a lane
// is what it has under way, and what was sent and lies in this host still: of a slow interface that may be more.
#include <stddef.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/list.h"
#include "transport/lanes.h"
#include "transport/lanes_internal.h"

enum {
    KNOWN_BYTES = 512 * 1024,   // less tells of buffers, not of the network
    KNOWN_NS = 2 * 1000 * 1000, // or of how many requests end in one turn
    IDLE_NS = 1000 * 1000,      // a lane without work for less than this is counted as busy
    HELD_NS = 1000 * 1000,      // a lane is not asked more often what it still has
    HANDLING_NS = 100 * 1000,   // the least time that a segment should be worth, of all lanes together
    SEGMENT_LEAST = 16 * 1024,
    SEGMENT_UNKNOWN = 64 * 1024 // the least, while a lane's rate is not known
};

static const double FADE_NS = 300e6; // what is this old counts for a third

void nb_pace_posted(struct path *path, size_t bytes) {
    struct pace *pace = &path->pace;
    if (path->in_flight == 0) {
        int64_t now = nb_now_ns();
        pace->since_ns = now - pace->sent_ns > IDLE_NS ? now : pace->since_ns;
    }
    path->in_flight += bytes;
}

void nb_pace_refused(struct path *path, size_t bytes) {
    path->in_flight -= bytes;
}

// Requests may end many at a time: bytes and time are added up, and what is old fades.
void nb_pace_sent(const struct nb_lanes *lanes, struct path *path, size_t bytes) {
    struct pace *pace = &path->pace;
    int64_t now = nb_now_ns();
    path->in_flight -= bytes;
    pace->held += lanes->config.ops->held != NULL ? bytes : 0;
    pace->sent_ns = now;
    double ns = (double)(now - pace->since_ns);
    double keep = FADE_NS / (FADE_NS + ns);
    pace->bytes = pace->bytes * keep + (double)bytes;
    pace->ns = pace->ns * keep + ns;
    pace->since_ns = now;
    if (pace->bytes >= KNOWN_BYTES && pace->ns >= KNOWN_NS) {
        pace->rate = pace->bytes / pace->ns;
    }
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

// What this lane has to be rid of before the next bytes.
static double before(const struct path *path) {
    return (double)path->in_flight + (double)path->pace.held;
}

static double before_all(const struct peer *peer) {
    double bytes = 0;
    for (int i = 0; i < peer->reach; i++) {
        bytes += peer->paths[i].open ? before(&peer->paths[i]) : 0;
    }
    return bytes;
}

static void held_ask(struct nb_lanes *lanes, struct peer *peer) {
    int64_t now = nb_now_ns();
    for (int i = 0; i < peer->reach; i++) {
        struct pace *pace = &peer->paths[i].pace;
        if (pace->held > 0 && now - pace->held_ns >= HELD_NS) {
            pace->held = lanes->config.ops->held(lanes->lane[i], (int)(peer - lanes->peers));
            pace->held_ns = now;
        }
    }
}

// The lane that would be done first with so many bytes more.
static int soonest(const struct nb_lanes *lanes, const struct peer *peer, double bytes) {
    int first = -1;
    double least = 0;
    for (int i = 0; i < peer->reach; i++) {
        if (peer->paths[i].open) {
            double done = (before(&peer->paths[i]) + bytes) / part_of(lanes, peer, i);
            if (first < 0 || done < least) {
                first = i;
                least = done;
            }
        }
    }
    return first;
}

static size_t between(double value, size_t least, size_t most) {
    size_t more = value > (double)least ? (size_t)value : least;
    return more < most ? more : most;
}

size_t nb_pace_segment(struct nb_lanes *lanes, struct peer *peer, int lane, int *sooner) {
    const struct path *path = &peer->paths[lane];
    size_t most = lanes->config.segment_bytes;
    if (lanes->used == 1) {
        return most;
    }
    double rate = path->pace.rate;
    double part = part_of(lanes, peer, lane);
    double enough = (2 * (double)most + before(path)) / part;
    double left = (double)bytes_left(peer, (size_t)enough);
    if (left < enough) {
        held_ask(lanes, peer);
    }
    double all = rate / part; // one thread handles the segments of all lanes
    size_t least = between(all * HANDLING_NS, rate > 0 ? SEGMENT_LEAST : SEGMENT_UNKNOWN, most);
    double room = part * (left + before_all(peer)) - before(path);
    if (before(path) > 0 && room < (double)least && sooner != NULL) {
        int first = soonest(lanes, peer, (double)least);
        if (first != lane) {
            *sooner = first;
            return 0; // it would be at work for longer than the others
        }
    }
    double half = part * left / 2;
    return between(half < room ? half : room, least, most);
}
