// Lane rates: measure how fast each lane delivers, and size its next segment by weighted guided self-scheduling. A
// lane's share of the remaining bytes shrinks as they do. The bytes already ahead of it count, so that all lanes finish
// at about the same time. A segment is never so short that handling it costs more than sending it. The bytes ahead of a
// lane are those in flight and those sent but still held by this host; on a slow interface the latter may be more.
//
// A rate is that of bytes which had to wait. The first ones after a pause go into the buffers of the kernel and of the
// network at once, and the bytes of a time with pauses follow from the lane's share: a rate from either would confirm any
// share, a wrong one too. So a rate is measured only once a lane was busy for a while.
// Where many lanes share little data, requests of some lanes never wait. The rates of all lanes are then those at which
// backlogs in the kernel's buffers shrink, as long as they last. Of a lane whose backlogs are soon gone, no rate is known,
// and it counts as the fastest. There the other kind of rate is an upper limit: a request that waits for the kernel's
// buffers may finish many times as fast as the network moves its bytes.
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/list.h"
#include "transport/lanes.h"
#include "transport/lanes_internal.h"
#include "transport/transport.h"

enum {
    KNOWN_BYTES = 512 * 1024,     // a smaller sample measures buffers, not the network
    KNOWN_NS = 2 * 1000 * 1000,   // a shorter sample measures how many requests finish in one pass
    BUFFERED_BYTES = 256 * 1024,  // of the bytes after a pause, those that may have gone into buffers
    BUSY_NS = 2 * 1000 * 1000,    // the same of its time: buffers may take more bytes, but soon
    PAUSE_NS = 20 * 1000,         // minimum length of a pause: less goes by while the thread handles other lanes
    IDLE_NS = 1000 * 1000,        // the same where a library sends on its own what it has taken
    HELD_NS = 1000 * 1000,        // minimum interval between queries of what a lane still holds
    STAY_LEAST = 4 * 1024,        // of a smaller backlog, a few late packets may be left
    STAYS = 4,                    // looks in a row that find a backlog: one alone finds a peer that was not running
    STAY_BYTES = 64 * 1024,       // of a smaller sample, a single packet of the largest size is a large part
    GONE_BYTES = 4 * 1024 * 1024, // after so many bytes of backlogs that are soon gone, a lane's rates are forgotten
    HANDLING_NS = 100 * 1000,     // minimum duration of a segment at the rate of all lanes together
    SEGMENT_LEAST = 16 * 1024,
    SEGMENT_UNKNOWN = 64 * 1024 // minimum segment while a lane's rate is unknown
};

static const double FADE_NS = 300e6; // a sample of this age counts for a third

// True if a finished request may still be in the kernel's buffers.
static bool is_buffered(const struct nb_lanes *lanes) {
    return lanes->config.ops->held != NULL;
}

void nb_rate_posted(const struct nb_lanes *lanes, struct path *path, size_t bytes) {
    struct lane_rate *rate = &path->rate;
    if (path->in_flight == 0) {
        int64_t now = nb_now_ns();
        if (now - rate->sent_ns > (is_buffered(lanes) ? PAUSE_NS : IDLE_NS)) {
            rate->since_ns = now;
            rate->begun_ns = now;
            rate->since_pause = 0;
        }
    }
    path->in_flight += bytes;
}

void nb_rate_refused(struct path *path, size_t bytes) {
    path->in_flight -= bytes;
}

// Adds up bytes and time, as many requests may finish at once; old samples fade.
static void add(double *bytes, double *ns, size_t more_bytes, double more_ns) {
    double keep = FADE_NS / (FADE_NS + more_ns);
    *bytes = *bytes * keep + (double)more_bytes;
    *ns = *ns * keep + more_ns;
}

void nb_rate_sent(const struct nb_lanes *lanes, struct path *path, size_t bytes) {
    struct lane_rate *rate = &path->rate;
    int64_t now = nb_now_ns();
    double ns = (double)(now - rate->since_ns);
    bool waited = rate->since_pause >= BUFFERED_BYTES && rate->since_ns - rate->begun_ns >= BUSY_NS;
    path->in_flight -= bytes;
    rate->sent_ns = now;
    rate->since_ns = now;
    if (is_buffered(lanes)) {
        rate->held += bytes;
        rate->since_pause += bytes;
        rate->backlog.bytes += now - rate->backlog.since_ns < HELD_NS ? bytes : 0;
        if (!waited) {
            return;
        }
    }
    add(&rate->bytes, &rate->ns, bytes, ns);
    rate->backlog.gone_bytes = 0;
    if (rate->bytes >= KNOWN_BYTES && rate->ns >= KNOWN_NS) {
        rate->bytes_per_ns = rate->bytes / rate->ns;
    }
}

void nb_rate_moved(struct nb_lanes *lanes, struct nb_flow *flow, int lane, size_t bytes) {
    struct path *path = &lanes->peers[flow->peer].paths[lane];
    flow->bytes_moved += bytes;
    flow->lane_bytes[lane] += bytes;
    flow->moved_ns = nb_now_ns();
    path->moved_ns = flow->moved_ns;
    path->pings = 0;
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

// True if requests of every lane have waited.
static bool all_waited(const struct peer *peer) {
    for (int i = 0; i < peer->reach; i++) {
        if (peer->paths[i].open && peer->paths[i].rate.bytes_per_ns <= 0) {
            return false;
        }
    }
    return true;
}

// The fastest rate of a backlog, or 0.
static double fastest_backlog(const struct peer *peer) {
    double most = 0;
    for (int i = 0; i < peer->reach; i++) {
        double rate = peer->paths[i].open ? peer->paths[i].rate.backlog.bytes_per_ns : 0;
        most = rate > most ? rate : most;
    }
    return most;
}

// The rate of a lane by its backlogs, which may be unknown. most: that of the fastest one.
static double of_backlog(const struct lane_rate *rate, double most) {
    const struct backlog *backlog = &rate->backlog;
    double found = backlog->bytes_per_ns;
    if (found <= 0) {
        // What a lane has reached may be the rate of a burst: backlogs that did stay tell more, even a few.
        found = backlog->stays >= STAYS / 2 ? backlog->stay_bytes / backlog->stay_ns : rate->reached;
        found = found > most ? found : most;
    }
    return rate->bytes_per_ns > 0 && rate->bytes_per_ns < found ? rate->bytes_per_ns : found;
}

// This lane's share of the rate of all lanes; equal shares while no rates can be compared. *rate: the lane's own, 0:
// unknown.
static double part_of(const struct nb_lanes *lanes, const struct peer *peer, int lane, double *rate) {
    bool waited = all_waited(peer);
    double most = waited ? 0 : fastest_backlog(peer);
    *rate = most > 0 ? peer->paths[lane].rate.backlog.bytes_per_ns : peer->paths[lane].rate.bytes_per_ns;
    if (!waited && most <= 0) {
        return 1.0 / lanes->used;
    }
    double sum = 0;
    for (int i = 0; i < peer->reach; i++) {
        const struct lane_rate *each = &peer->paths[i].rate;
        sum += !peer->paths[i].open ? 0 : waited ? each->bytes_per_ns : of_backlog(each, most);
    }
    double own = waited ? *rate : of_backlog(&peer->paths[lane].rate, most);
    return sum > 0 ? own / sum : 1.0;
}

// Bytes ahead of the next segment on this lane.
static double before(const struct path *path) {
    return (double)path->in_flight + (double)path->rate.held;
}

static double before_all(const struct peer *peer) {
    double bytes = 0;
    for (int i = 0; i < peer->reach; i++) {
        bytes += peer->paths[i].open ? before(&peer->paths[i]) : 0;
    }
    return bytes;
}

// Bytes of the backlog at the look before are still there after `ns`: the lane is slower than its share.
static void backlog_stays(struct backlog *backlog, double ns) {
    backlog->gone_bytes = 0;
    backlog->stays++;
    if (backlog->bytes_per_ns > 0) {
        add(&backlog->stay_bytes, &backlog->stay_ns, backlog->left, ns);
    } else {
        backlog->stay_bytes += (double)backlog->left;
        backlog->stay_ns += ns;
    }
    if (backlog->bytes_per_ns > 0 || (backlog->stays >= STAYS && backlog->stay_bytes >= STAY_BYTES)) {
        backlog->bytes_per_ns = backlog->stay_bytes / backlog->stay_ns;
    }
}

// The backlog of the look before is gone after `ns`. A lane that is never behind may be faster than a backlog's rate.
static void backlog_gone(struct lane_rate *rate, double ns) {
    struct backlog *backlog = &rate->backlog;
    double reached = (double)backlog->left / ns;
    if (ns >= KNOWN_NS && reached > rate->reached) {
        rate->reached = reached; // over less time it may be that of one burst
    }
    backlog->stays -= backlog->stays > 0;
    backlog->gone_bytes += backlog->bytes;
    if (backlog->gone_bytes >= GONE_BYTES) { // its rate may be that of a moment in which the network or the peer paused
        rate->bytes_per_ns = 0;
        rate->bytes = 0;
        rate->ns = 0;
    }
    bool known = backlog->bytes_per_ns > 0;
    if (known ? backlog->gone_bytes < GONE_BYTES : backlog->stays > 0) {
        return;
    }
    if (known) {
        rate->reached = 0;
        backlog->gone_bytes = 0;
    }
    backlog->bytes_per_ns = 0;
    backlog->stays = 0;
    backlog->stay_bytes = 0;
    backlog->stay_ns = 0;
}

static void backlog_look(struct lane_rate *rate, const struct nb_held *held, int64_t now) {
    struct backlog *backlog = &rate->backlog;
    int64_t ns = now - backlog->since_ns;
    backlog->left += rate->held > held->bytes ? rate->held - held->bytes : 0;
    rate->held = held->bytes;
    rate->held_ns = now;
    if (backlog->bytes > backlog->left + held->late_bytes + STAY_LEAST) {
        if (ns < KNOWN_NS || ns < 2 * held->round_trip_ns) {
            return; // too early to tell
        }
        backlog_stays(backlog, (double)ns);
    } else if (backlog->bytes > 0) {
        backlog_gone(rate, (double)ns);
    }
    backlog->bytes = held->bytes;
    backlog->left = 0;
    backlog->since_ns = now;
}

static void held_ask(struct nb_lanes *lanes, struct peer *peer) {
    int64_t now = nb_now_ns();
    for (int i = 0; i < peer->reach; i++) {
        struct lane_rate *rate = &peer->paths[i].rate;
        if (rate->held > 0 && now - rate->held_ns >= HELD_NS) {
            struct nb_held held = lanes->config.ops->held(lanes->lane[i], (int)(peer - lanes->peers));
            backlog_look(rate, &held, now);
        }
    }
}

// The lane that would finish first with so many more bytes.
static int soonest(const struct nb_lanes *lanes, const struct peer *peer, double bytes) {
    int first = -1;
    double least = 0;
    for (int i = 0; i < peer->reach; i++) {
        if (peer->paths[i].open) {
            double rate;
            double done = (before(&peer->paths[i]) + bytes) / part_of(lanes, peer, i, &rate);
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

size_t nb_rate_segment(struct nb_lanes *lanes, struct peer *peer, int lane, int *sooner) {
    const struct path *path = &peer->paths[lane];
    size_t most = lanes->config.segment_bytes;
    if (lanes->used == 1) {
        return most;
    }
    double rate;
    double part = part_of(lanes, peer, lane, &rate);
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
            return 0; // this lane would finish after the others
        }
    }
    double half = part * left / 2;
    return between(half < room ? half : room, least, most);
}
