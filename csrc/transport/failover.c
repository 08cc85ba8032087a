// Failover: gives a lane to a peer up if it fails, if its interface is down, if it is silent while other lanes are
// alive, or if writes that are complete at the peer have not arrived. Its segments are sent again over the remaining
// lanes (retransmit.c).
//
// A libfabric provider may connect again without a word after a connection was reset. What was on its way is lost then,
// and the sender may take it for complete. So a lane on which nothing moves is pinged early and again: a lost message
// shows as a gap in the messages' numbers (ofi.c), a lost write in the count of the pong.
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/admission.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/list.h"
#include "base/sock.h"
#include "base/wire.h"
#include "transport/credits.h"
#include "transport/lanes.h"
#include "transport/lanes_internal.h"
#include "transport/transport.h"

enum {
    STILL_NS = 250 * 1000 * 1000, // a lane's interface is checked after nothing moves for this long
    DOWN_NS = 1000 * 1000 * 1000, // an interface is down for this long before its lane is given up
    PING_NS = 50 * 1000 * 1000,   // after nothing moves for this long a lane is pinged; the time doubles with each ping
    PINGS_DOUBLED = 6,
    PING_PART = 8,        // of timeout_ms: time without a sign before a lane is suspected, then until it is given up
    PING_LIMIT_MS = 30000 // upper limit of timeout_ms here: other lanes show that the peer is alive
};

static void ping_send(struct nb_lanes *lanes, int peer_rank, int lane) {
    struct path *path = &lanes->peers[peer_rank].paths[lane];
    const struct nb_lane_ops *ops = lanes->lane[lane]->ops;
    const struct wire_lane_pong pong = {.type = NB_MESSAGE_PONG, .writes = path->writes_out};
    if (path->pong_due && ops->message(lanes->lane[lane], peer_rank, &pong, sizeof pong) == 0) {
        path->pong_due = false;
    }
    const struct wire_empty ping = {.type = NB_MESSAGE_PING};
    if (path->ping_due && ops->message(lanes->lane[lane], peer_rank, &ping, sizeof ping) == 0) {
        path->ping_due = false;
    }
}

void nb_failover_flush(struct nb_lanes *lanes, int peer_rank) {
    struct peer *peer = &lanes->peers[peer_rank];
    for (int i = 0; i < lanes->config.lanes; i++) {
        if (peer->paths[i].open && (peer->paths[i].pong_due || peer->paths[i].ping_due)) {
            ping_send(lanes, peer_rank, i);
        }
    }
    if (peer->started_due) {
        nb_lanes_tell_started(lanes, peer_rank);
    }
    nb_retransmit_flush(lanes, peer_rank);
}

void nb_failover_lost(struct nb_lanes *lanes, int peer_rank, int lane, const struct nb_error *why) {
    struct peer *peer = &lanes->peers[peer_rank];
    struct path *path = &peer->paths[lane];
    if (!path->open) {
        return;
    }
    path->open = false;
    path->held = false;
    path->ping_ns = 0;
    path->ping_due = false;
    path->pong_due = false;
    if (path->placing != NULL) {
        nb_flow_unclaim(path->placing, &path->placing_frame);
        path->placing = NULL;
    }
    if (peer->left) { // expected. An endpoint that serves all peers continues to serve the others
        nb_lanes_update_reach(lanes, peer_rank);
        if (!nb_is_rma(lanes)) { // a segment of it may be half read, and the flow's memory is given back
            lanes->lane[lane]->ops->peer_close(lanes->lane[lane], peer_rank);
        }
        if (nb_lanes_left(lanes, peer_rank) == 0) {
            lanes->config.lane_lost(lanes->config.ctx, peer_rank, lane, why, 0);
        }
        return;
    }
    peer->lost |= (uint64_t)1 << lane;
    peer->report = NB_REPORT_DUE; // this lane may have lost part of the last report: report everything again
    nb_lanes_update_reach(lanes, peer_rank);
    // No late byte may land in data that are sent again. An endpoint that serves all peers is lost for all of them.
    lanes->lane[lane]->ops->peer_close(lanes->lane[lane], peer_rank);
    int left = nb_lanes_left(lanes, peer_rank);
    lanes->config.lane_lost(lanes->config.ctx, peer_rank, lane, why, left);
    if (left == 0) {
        nb_retransmit_drop(lanes, peer_rank);
        return;
    }
    nb_credits_lost(lanes, peer_rank);
    peer->started_due = true;
    nb_failover_flush(lanes, peer_rank);
}

// Handles the begin of the peer's report: gives up the lanes that are lost there.
static void lost_received(struct nb_lanes *lanes, int peer_rank, const struct wire_lost *message) {
    nb_retransmit_report_received(lanes, peer_rank, message);
    for (int i = 0; i < lanes->config.lanes; i++) {
        if ((message->lanes >> i & 1) != 0 && lanes->peers[peer_rank].paths[i].open) {
            struct nb_error why = {0};
            nb_fail_peer(&why, NB_EPEER, peer_rank, "lane %d to rank %d: lost at rank %d", i, peer_rank, peer_rank);
            nb_failover_lost(lanes, peer_rank, i, &why);
        }
    }
}

// Gives a lane up if writes of the peer that were complete at its last pong have not landed: they are lost.
static void pong_received(struct nb_lanes *lanes, int peer_rank, int lane, const struct wire_lane_pong *message) {
    struct path *path = &lanes->peers[peer_rank].paths[lane];
    int32_t missing = (int32_t)(path->writes_owed - path->writes_in);
    path->writes_owed = message->writes;
    if (path->open && nb_is_rma(lanes) && missing > 0) {
        struct nb_error why = {0};
        nb_fail_peer(&why, NB_EPEER, peer_rank, "lane %d to rank %d: %d writes were lost", lane, peer_rank, missing);
        nb_failover_lost(lanes, peer_rank, lane, &why);
    }
}

bool nb_failover_message(struct nb_lanes *lanes, int lane, int peer_rank, const void *data, size_t bytes) {
    struct path *path = &lanes->peers[peer_rank].paths[lane];
    uint8_t word = *(const uint8_t *)data;
    struct wire_lost lost;
    struct wire_lane_pong pong;
    path->moved_ns = nb_now_ns();
    if (word == NB_MESSAGE_PING) {
        path->pong_due = true;
    } else if (word == NB_MESSAGE_PONG && bytes == sizeof pong) {
        memcpy(&pong, data, sizeof pong);
        pong_received(lanes, peer_rank, lane, &pong);
    } else if (word == NB_MESSAGE_STARTED) {
        return true;
    } else if (word == NB_MESSAGE_LEAVE) {
        nb_lanes_peer_left(lanes, peer_rank);
    } else if (word == NB_MESSAGE_LOST && bytes == sizeof lost) {
        memcpy(&lost, data, sizeof lost);
        lost_received(lanes, peer_rank, &lost);
    } else {
        return nb_retransmit_message(lanes, peer_rank, data, bytes);
    }
    return false;
}

static bool other_lane_moved(const struct nb_lanes *lanes, const struct peer *peer, int64_t since_ns) {
    for (int i = 0; i < lanes->config.lanes; i++) {
        if (peer->paths[i].open && peer->paths[i].moved_ns > since_ns) {
            return true;
        }
    }
    return false;
}

// Since when a lane's interface is down; 0: it is up. Queries it once per tick, for all peers.
static int64_t down_since(struct nb_lanes *lanes, int lane, int64_t now_ns) {
    struct lane_interface *interface = &lanes->interfaces[lane];
    if (interface->queried_ns != now_ns) {
        bool known = interface->down_ns != 0 && now_ns - interface->queried_ns < DOWN_NS; // it may have been up since
        bool down = nb_sock_interface_down(interface->name);
        interface->down_ns = !down ? 0 : known ? interface->down_ns : now_ns;
        interface->queried_ns = now_ns;
    }
    return interface->down_ns;
}

static bool another_is_up(struct nb_lanes *lanes, const struct peer *peer, int64_t now_ns) {
    for (int i = 0; i < lanes->config.lanes; i++) {
        if (peer->paths[i].open && down_since(lanes, i, now_ns) == 0) {
            return true;
        }
    }
    return false;
}

static bool lane_still(const struct nb_lanes *lanes, int lane, int64_t now_ns) {
    bool open = false;
    for (int p = 0; p < lanes->config.lane.size; p++) {
        const struct path *path = lanes->peers[p].paths != NULL ? &lanes->peers[p].paths[lane] : NULL;
        if (path != NULL && path->open) {
            open = true;
            if (now_ns - path->moved_ns < STILL_NS) {
                return false;
            }
        }
    }
    return open;
}

// Queries the interfaces of lanes on which nothing moves, also where nothing has to move: ranks that wait for each other
// must not find out one after another, each a second after it has something to send.
static void interfaces_tick(struct nb_lanes *lanes, int64_t now_ns) {
    for (int i = 0; i < lanes->config.lanes; i++) {
        if (lane_still(lanes, i, now_ns)) {
            (void)down_since(lanes, i, now_ns);
        }
    }
}

// Gives a lane up if nothing moves on it and its interface is down, while another lane's interface is up. A link that
// comes back at once costs nothing, and the only link may come back before the deadline. An interface counts as down
// for all peers, and a lane whose interface has long been down is given up as soon as something has to move on it.
static void down_tick(struct nb_lanes *lanes, int peer_rank, int lane, int64_t now_ns) {
    struct peer *peer = &lanes->peers[peer_rank];
    struct path *path = &peer->paths[lane];
    if (!path->open || now_ns - path->moved_ns < STILL_NS) {
        return;
    }
    int64_t down_ns = down_since(lanes, lane, now_ns);
    if (down_ns != 0 && now_ns - down_ns >= DOWN_NS && another_is_up(lanes, peer, now_ns)) {
        struct nb_error why = {0};
        nb_fail_peer(&why, NB_ETIMEOUT, peer_rank, "lane %d to rank %d: interface %s is down", lane, peer_rank,
                     lanes->interfaces[lane].name);
        nb_failover_lost(lanes, peer_rank, lane, &why);
    }
}

static void ping_now(struct nb_lanes *lanes, int peer_rank, int lane, int64_t now_ns) {
    struct path *path = &lanes->peers[peer_rank].paths[lane];
    path->pings++;
    path->pinged_ns = now_ns;
    path->ping_due = true;
    ping_send(lanes, peer_rank, lane);
}

// Pings a lane on which no data move, less and less often.
static void ping_tick(struct nb_lanes *lanes, int peer_rank, int lane, int64_t since_ns, int64_t now_ns) {
    const struct path *path = &lanes->peers[peer_rank].paths[lane];
    int64_t wait_ns = (int64_t)PING_NS << (path->pings < PINGS_DOUBLED ? path->pings : PINGS_DOUBLED);
    if (now_ns - since_ns >= (int64_t)PING_NS && now_ns - path->pinged_ns >= wait_ns) {
        ping_now(lanes, peer_rank, lane, now_ns);
    }
}

static void path_tick(struct nb_lanes *lanes, int peer_rank, int lane, int64_t now_ns) {
    struct peer *peer = &lanes->peers[peer_rank];
    struct path *path = &peer->paths[lane];
    int timeout_ms = lanes->config.lane.timeout_ms;
    int64_t part = (int64_t)(timeout_ms < PING_LIMIT_MS ? timeout_ms : PING_LIMIT_MS) * 1000000 / PING_PART;
    int64_t since = path->moved_ns > peer->busy_ns ? path->moved_ns : peer->busy_ns;
    down_tick(lanes, peer_rank, lane, now_ns);
    if (!path->open || path->moved_ns > path->ping_ns) {
        path->ping_ns = 0;
        path->other_moved_ns = 0;
    }
    if (path->open) {
        ping_tick(lanes, peer_rank, lane, since, now_ns);
    }
    if (!path->open || now_ns - since < part) {
        return;
    }
    if (path->ping_ns == 0) {
        path->ping_ns = now_ns;
        ping_now(lanes, peer_rank, lane, now_ns);
    } else if (path->other_moved_ns == 0) {
        path->other_moved_ns = other_lane_moved(lanes, peer, path->ping_ns) ? now_ns : 0;
    } else if (now_ns - path->other_moved_ns > part) {
        struct nb_error why = {0};
        nb_fail_peer(&why, NB_ETIMEOUT, peer_rank,
                     "lane %d to rank %d: no answer to a ping for %.1f s while other lanes moved", lane, peer_rank,
                     (double)(now_ns - since) / 1e9);
        nb_failover_lost(lanes, peer_rank, lane, &why);
    }
}

void nb_lanes_tick(struct nb_lanes *lanes, int64_t now_ns) {
    nb_admission_tick(&lanes->admission, now_ns);
    interfaces_tick(lanes, now_ns);
    for (int p = 0; p < lanes->config.lane.size; p++) {
        struct peer *peer = &lanes->peers[p];
        if (peer->paths == NULL) {
            continue;
        }
        bool busy = !nb_list_empty(&peer->out) || !nb_list_empty(&peer->in);
        peer->busy_ns = !busy ? 0 : peer->busy_ns == 0 ? now_ns : peer->busy_ns;
        nb_retransmit_done_send(lanes, p);
        nb_failover_flush(lanes, p);
        for (int i = 0; busy && lanes->config.lane.timeout_ms > 0 && i < lanes->config.lanes; i++) {
            path_tick(lanes, p, i, now_ns);
        }
    }
}

void nb_lanes_announce_leave(struct nb_lanes *lanes) {
    const struct wire_empty message = {.type = NB_MESSAGE_LEAVE};
    for (int p = 0; p < lanes->config.lane.size; p++) {
        for (int i = 0; lanes->peers[p].paths != NULL && i < lanes->config.lanes; i++) {
            if (lanes->peers[p].paths[i].open) { // on every lane: a lane may be closing because of another peer
                (void)lanes->lane[i]->ops->message(lanes->lane[i], p, &message, sizeof message);
            }
        }
    }
}
