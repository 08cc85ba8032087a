// What happens when a lane to a peer is lost, and what makes it harmless: the word that an operation has landed whole;
// the report of what has not, to which the peer sends exactly that again; the sign that tells a lane that is dead from
// one that has nothing to do. All of it travels as messages over the lowest lane that is left.
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/admission.h"
#include "base/bits.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/list.h"
#include "base/sock.h"
#include "transport/lanes.h"
#include "transport/lanes_internal.h"
#include "transport/transport.h"

enum {
    DONES_A_MESSAGE = 14,
    RUNS_A_MESSAGE = 13,
    STILL_NS = 250 * 1000 * 1000, // for which nothing moves before a lane's interface is looked at
    DOWN_NS = 1000 * 1000 * 1000, // for which it is down before the lane is given up
    SIGN_PART = 8,  // of timeout_ms: how long nothing moves before a lane is asked, and how long it may be silent then
    SIGN_MS = 30000 // a longer timeout_ms counts as this one here: other lanes show that the peer is there
};

struct wire_word {
    uint8_t word;
    uint8_t zero[7];
};

struct wire_done {
    uint8_t word;
    uint8_t count;
    uint8_t zero[6];
    uint64_t ops[DONES_A_MESSAGE];
};

// Begins and ends a report.
struct wire_lost {
    uint8_t word;
    uint8_t zero[7];
    uint64_t lanes;
    uint64_t floor[NB_SERIES]; // the highest operation that is known here: a later one misses everything
};

struct wire_missing {
    uint8_t word;
    uint8_t count;
    uint8_t zero[6];
    uint64_t op;
    struct {
        uint32_t first;
        uint32_t count;
    } runs[RUNS_A_MESSAGE];
};

_Static_assert(sizeof(struct wire_done) <= NB_LANE_MESSAGE_MAX, "fits");
_Static_assert(sizeof(struct wire_missing) <= NB_LANE_MESSAGE_MAX, "fits");

int nb_lanes_say(struct nb_lanes *lanes, int peer, const void *data, size_t bytes) {
    for (int i = 0; lanes->peers[peer].paths != NULL && i < lanes->config.lanes; i++) {
        if (lanes->peers[peer].paths[i].open) {
            return lanes->lane[i]->ops->message(lanes->lane[i], peer, data, bytes);
        }
    }
    return NB_EPEER;
}

void nb_repair_fini(struct nb_lanes *lanes) {
    for (int p = 0; lanes->peers != NULL && p < lanes->config.lane.size; p++) {
        free(lanes->peers[p].done);
    }
}

// What landed whole

static bool done_put(struct peer *peer, uint64_t op) {
    if (peer->done_count == peer->done_room) {
        size_t room = peer->done_room == 0 ? 64 : peer->done_room * 2;
        uint64_t *grown = realloc(peer->done, room * sizeof *grown);
        if (grown == NULL) {
            return false; // the peer waits; its deadline names this rank
        }
        peer->done = grown;
        peer->done_room = room;
    }
    peer->done[peer->done_count++] = op;
    return true;
}

static void done_send(struct nb_lanes *lanes, int peer_rank) {
    struct peer *peer = &lanes->peers[peer_rank];
    size_t told = 0;
    while (told < peer->done_count) {
        size_t n = peer->done_count - told < DONES_A_MESSAGE ? peer->done_count - told : (size_t)DONES_A_MESSAGE;
        struct wire_done message = {.word = NB_WORD_DONE, .count = (uint8_t)n};
        memcpy(message.ops, peer->done + told, n * sizeof message.ops[0]);
        size_t bytes = offsetof(struct wire_done, ops) + n * sizeof message.ops[0];
        if (nb_lanes_say(lanes, peer_rank, &message, bytes) < 0) {
            break;
        }
        told += n;
    }
    peer->done_count -= told;
    peer->done_urgent = peer->done_urgent && peer->done_count > 0;
    if (told > 0 && peer->done_count > 0) {
        memmove(peer->done, peer->done + told, peer->done_count * sizeof peer->done[0]);
    }
}

// A large flow's sender waits for this; that of a small one has a copy, and hears of many at once.
void nb_repair_done(struct nb_lanes *lanes, const struct nb_flow *flow) {
    struct peer *peer = &lanes->peers[flow->peer];
    bool small = flow->blocks <= NB_COPY_BLOCKS && flow->bytes_moved <= lanes->config.copy_bytes;
    if (!done_put(peer, flow->op)) {
        return;
    }
    peer->done_urgent = peer->done_urgent || !small || peer->done_count >= DONES_A_MESSAGE;
    if (peer->done_urgent) {
        done_send(lanes, flow->peer);
    }
}

static void ask_send(struct nb_lanes *lanes, int peer_rank) {
    struct peer *peer = &lanes->peers[peer_rank];
    const struct wire_word message = {.word = NB_WORD_ASK};
    if (nb_lanes_say(lanes, peer_rank, &message, sizeof message) == 0) {
        peer->ask_due = false;
        peer->asked = true;
    }
}

void nb_repair_ask(struct nb_lanes *lanes, int peer_rank) {
    lanes->peers[peer_rank].ask_due = true;
    ask_send(lanes, peer_rank);
}

static void done_heard(struct nb_lanes *lanes, int peer_rank, const void *data, size_t bytes) {
    struct wire_done message = {0};
    size_t head = offsetof(struct wire_done, ops);
    memcpy(&message, data, bytes < sizeof message ? bytes : sizeof message);
    lanes->peers[peer_rank].asked = false;
    for (size_t i = 0; i < message.count && i < DONES_A_MESSAGE && head + (i + 1) * sizeof(uint64_t) <= bytes; i++) {
        struct nb_flow *flow = nb_sent_find(lanes, peer_rank, message.ops[i]);
        if (flow != NULL) {
            flow->acked = true;
            nb_sent_settle(lanes, flow);
        }
    }
}

// What did not

// The next of the peer's flows that the report has not told of.
static const struct nb_flow *report_flow(const struct peer *peer) {
    NB_LIST_EACH(it, &peer->in) {
        const struct nb_flow *flow = NB_CONTAINER(it, struct nb_flow, link);
        if (flow->op >= peer->report_op) {
            return flow;
        }
    }
    return NULL;
}

// As many missing runs as a message holds; the block to go on with.
static uint32_t missing_runs(const struct nb_flow *flow, uint32_t from, struct wire_missing *message) {
    uint32_t at = from;
    while (message->count < RUNS_A_MESSAGE) {
        while (at < flow->blocks && nb_bits_get(flow->map, at)) {
            at++;
        }
        uint32_t first = at;
        while (at < flow->blocks && !nb_bits_get(flow->map, at)) {
            at++;
        }
        if (at == first) {
            break;
        }
        message->runs[message->count].first = first;
        message->runs[message->count++].count = at - first;
    }
    return at;
}

static bool report_begin(struct nb_lanes *lanes, int peer_rank) {
    struct peer *peer = &lanes->peers[peer_rank];
    const struct wire_lost message = {.word = NB_WORD_LOST, .lanes = peer->lost};
    if (nb_lanes_say(lanes, peer_rank, &message, sizeof message) < 0) {
        return false;
    }
    peer->report = NB_REPORT_BEGUN;
    memcpy(peer->report_floor, peer->in_floor, sizeof peer->report_floor);
    peer->report_op = 0;
    peer->report_block = 0;
    return true;
}

// A flow is told of even where nothing of it is missing: what is being read may still be lost.
static bool report_missing(struct nb_lanes *lanes, int peer_rank, const struct nb_flow *flow) {
    struct peer *peer = &lanes->peers[peer_rank];
    struct wire_missing message = {.word = NB_WORD_MISSING, .op = flow->op};
    uint32_t next = missing_runs(flow, peer->report_op == flow->op ? peer->report_block : 0, &message);
    if (nb_lanes_say(lanes, peer_rank, &message, sizeof message) < 0) {
        return false;
    }
    bool whole = next >= flow->blocks;
    peer->report_op = whole ? flow->op + 1 : flow->op;
    peer->report_block = whole ? 0 : next;
    return true;
}

static void report_send(struct nb_lanes *lanes, int peer_rank) {
    struct peer *peer = &lanes->peers[peer_rank];
    if (peer->report == NB_REPORT_DUE && !report_begin(lanes, peer_rank)) {
        return;
    }
    const struct nb_flow *flow = report_flow(peer);
    while (flow != NULL) {
        if (!report_missing(lanes, peer_rank, flow)) {
            return;
        }
        flow = report_flow(peer);
    }
    struct wire_lost message = {.word = NB_WORD_LOST_END, .lanes = peer->lost};
    memcpy(message.floor, peer->report_floor, sizeof message.floor);
    if (nb_lanes_say(lanes, peer_rank, &message, sizeof message) == 0) {
        peer->report = NB_REPORT_NONE;
    }
}

void nb_repair_lost(struct nb_lanes *lanes, int peer_rank, int lane, const struct nb_error *why) {
    struct peer *peer = &lanes->peers[peer_rank];
    struct path *path = &peer->paths[lane];
    if (!path->open) {
        return;
    }
    path->open = false;
    path->held = false;
    path->asked_ns = 0;
    path->ask_due = false;
    path->echo_due = false;
    if (path->placing != NULL) {
        nb_lanes_unclaim(path->placing, &path->placing_frame);
        path->placing = NULL;
    }
    if (peer->left) { // as it should be. The endpoint goes on for the other peers
        nb_lanes_reach(lanes, peer_rank);
        if (nb_lanes_left(lanes, peer_rank) == 0) {
            lanes->config.lane_lost(lanes->config.ctx, peer_rank, lane, why, 0);
        }
        return;
    }
    peer->lost |= (uint64_t)1 << lane;
    peer->report = NB_REPORT_DUE; // what was told may have been lost with this lane: all of it again
    nb_lanes_reach(lanes, peer_rank);
    // No late byte may land in what is sent again. Where an endpoint has all peers, it is lost for all.
    lanes->lane[lane]->ops->peer_close(lanes->lane[lane], peer_rank);
    int left = nb_lanes_left(lanes, peer_rank);
    lanes->config.lane_lost(lanes->config.ctx, peer_rank, lane, why, left);
    if (left == 0) {
        nb_sent_drop(lanes, peer_rank);
        return;
    }
    nb_grants_lost(lanes, peer_rank);
    nb_repair_flush(lanes, peer_rank);
}

static void lost_heard(struct nb_lanes *lanes, int peer_rank, const struct wire_lost *message) {
    struct peer *peer = &lanes->peers[peer_rank];
    peer->lost_there = message->lanes;
    peer->hearing = true;
    NB_LIST_EACH(out, &peer->out) {
        NB_CONTAINER(out, struct nb_flow, link)->listed = false;
    }
    NB_LIST_EACH(kept, &peer->kept) {
        NB_CONTAINER(kept, struct nb_flow, link)->listed = false;
    }
    for (int i = 0; i < lanes->config.lanes; i++) {
        if ((message->lanes >> i & 1) != 0 && peer->paths[i].open) {
            struct nb_error why = {0};
            nb_fail_peer(&why, NB_EPEER, peer_rank, "lane %d to rank %d: lost at rank %d", i, peer_rank, peer_rank);
            nb_repair_lost(lanes, peer_rank, i, &why);
        }
    }
}

static void missing_heard(struct nb_lanes *lanes, int peer_rank, const struct wire_missing *message) {
    struct nb_flow *flow = nb_sent_find(lanes, peer_rank, message->op);
    if (flow == NULL) {
        return; // cancelled here
    }
    flow->listed = true;
    for (int i = 0; i < message->count && i < RUNS_A_MESSAGE; i++) {
        nb_sent_again(lanes, flow, lanes->peers[peer_rank].lost_there, message->runs[i].first, message->runs[i].count);
    }
}

// One flow's part of the end of a report. True: it is settled, and gone.
static bool lost_end_flow(struct nb_lanes *lanes, struct nb_flow *flow, const struct wire_lost *message) {
    uint64_t there = message->lanes & lanes->peers[flow->peer].lost_there;
    if (flow->op > message->floor[nb_series(flow->op)]) {
        nb_sent_again(lanes, flow, there, 0, flow->blocks);
        return false;
    }
    nb_sent_landed(lanes, flow, there);
    flow->acked = flow->acked || !flow->listed; // it was over there: the word of it may have been lost
    return nb_sent_settle(lanes, flow);
}

// What the owner of a settled flow does may change the list: then it is gone through anew.
static void lost_end_list(struct nb_lanes *lanes, struct nb_list *flows, const struct wire_lost *message) {
    bool settled = true;
    while (settled) {
        settled = false;
        NB_LIST_EACH_SAFE(it, nx, flows) {
            settled = lost_end_flow(lanes, NB_CONTAINER(it, struct nb_flow, link), message);
            if (settled) {
                break;
            }
        }
    }
}

static void lost_end_heard(struct nb_lanes *lanes, int peer_rank, const struct wire_lost *message) {
    struct peer *peer = &lanes->peers[peer_rank];
    peer->hearing = false;
    lost_end_list(lanes, &peer->kept, message);
    lost_end_list(lanes, &peer->out, message);
    nb_lanes_push(lanes, peer_rank, 0);
}

// Signs of life

static void echo_send(struct nb_lanes *lanes, int peer_rank, int lane) {
    struct path *path = &lanes->peers[peer_rank].paths[lane];
    const struct nb_lane_ops *ops = lanes->lane[lane]->ops;
    struct wire_word message = {.word = NB_WORD_ECHOED};
    if (path->echo_due && ops->message(lanes->lane[lane], peer_rank, &message, sizeof message) == 0) {
        path->echo_due = false;
    }
    message.word = NB_WORD_ECHO;
    if (path->ask_due && ops->message(lanes->lane[lane], peer_rank, &message, sizeof message) == 0) {
        path->ask_due = false;
    }
}

static bool rival_moved(const struct nb_lanes *lanes, const struct peer *peer, int64_t since_ns) {
    for (int i = 0; i < lanes->config.lanes; i++) {
        if (peer->paths[i].open && peer->paths[i].moved_ns > since_ns) {
            return true;
        }
    }
    return false;
}

// Since when a lane's interface is down; 0: it is up. Asked once a tick, however many peers there are.
static int64_t down_since(struct nb_lanes *lanes, int lane, int64_t now_ns) {
    struct lane_interface *interface = &lanes->interfaces[lane];
    if (interface->asked_ns != now_ns) {
        bool known = interface->down_ns != 0 && now_ns - interface->asked_ns < DOWN_NS; // it may have been up meanwhile
        bool down = nb_sock_interface_down(interface->name);
        interface->down_ns = !down ? 0 : known ? interface->down_ns : now_ns;
        interface->asked_ns = now_ns;
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

// A lane on which nothing moves while its interface is down is given up where another lane has one that is up: a link that
// comes back at once costs nothing, and the only one that there is may still come back before the deadline. Peers that
// wait for each other do not wait one after another: an interface is down for all of them.
static void down_tick(struct nb_lanes *lanes, int peer_rank, int lane, int64_t now_ns) {
    struct peer *peer = &lanes->peers[peer_rank];
    struct path *path = &peer->paths[lane];
    int64_t since = path->moved_ns > peer->busy_ns ? path->moved_ns : peer->busy_ns;
    if (!path->open || now_ns - since < STILL_NS) {
        return;
    }
    int64_t down_ns = down_since(lanes, lane, now_ns);
    if (down_ns != 0 && now_ns - down_ns >= DOWN_NS && another_is_up(lanes, peer, now_ns)) {
        struct nb_error why = {0};
        nb_fail_peer(&why, NB_ETIMEOUT, peer_rank, "lane %d to rank %d: interface %s is down", lane, peer_rank,
                     lanes->interfaces[lane].name);
        nb_repair_lost(lanes, peer_rank, lane, &why);
    }
}

static void path_tick(struct nb_lanes *lanes, int peer_rank, int lane, int64_t now_ns) {
    struct peer *peer = &lanes->peers[peer_rank];
    struct path *path = &peer->paths[lane];
    int timeout_ms = lanes->config.lane.timeout_ms;
    int64_t part = (int64_t)(timeout_ms < SIGN_MS ? timeout_ms : SIGN_MS) * 1000000 / SIGN_PART;
    int64_t since = path->moved_ns > peer->busy_ns ? path->moved_ns : peer->busy_ns;
    down_tick(lanes, peer_rank, lane, now_ns);
    if (!path->open || path->moved_ns > path->asked_ns) {
        path->asked_ns = 0;
        path->rival_ns = 0;
    }
    if (!path->open || now_ns - since < part) {
        return;
    }
    if (path->asked_ns == 0) {
        path->asked_ns = now_ns;
        path->ask_due = true;
        echo_send(lanes, peer_rank, lane);
    } else if (path->rival_ns == 0) {
        path->rival_ns = rival_moved(lanes, peer, path->asked_ns) ? now_ns : 0;
    } else if (now_ns - path->rival_ns > part) {
        struct nb_error why = {0};
        nb_fail_peer(&why, NB_ETIMEOUT, peer_rank, "lane %d to rank %d: no sign for %.1f s, while other lanes moved",
                     lane, peer_rank, (double)(now_ns - since) / 1e9);
        nb_repair_lost(lanes, peer_rank, lane, &why);
    }
}

void nb_lanes_tick(struct nb_lanes *lanes, int64_t now_ns) {
    nb_admission_tick(&lanes->admission, now_ns);
    for (int p = 0; p < lanes->config.lane.size; p++) {
        struct peer *peer = &lanes->peers[p];
        if (peer->paths == NULL) {
            continue;
        }
        bool busy = !nb_list_empty(&peer->out) || !nb_list_empty(&peer->in);
        peer->busy_ns = !busy ? 0 : peer->busy_ns == 0 ? now_ns : peer->busy_ns;
        done_send(lanes, p);
        nb_repair_flush(lanes, p);
        for (int i = 0; busy && lanes->config.lane.timeout_ms > 0 && i < lanes->config.lanes; i++) {
            path_tick(lanes, p, i, now_ns);
        }
    }
}

// The words of a peer

void nb_repair_message(struct nb_lanes *lanes, int lane, int peer_rank, const void *data, size_t bytes) {
    struct peer *peer = &lanes->peers[peer_rank];
    struct path *path = &peer->paths[lane];
    uint8_t word = *(const uint8_t *)data;
    struct wire_missing missing;
    struct wire_lost lost;
    path->moved_ns = nb_now_ns();
    if (word == NB_WORD_DONE) {
        done_heard(lanes, peer_rank, data, bytes);
    } else if (word == NB_WORD_ASK) {
        peer->done_urgent = true;
    } else if (word == NB_WORD_ECHO) {
        path->echo_due = true;
    } else if (word == NB_WORD_BYE) {
        nb_lanes_forgive(lanes, peer_rank);
        return;
    } else if (word == NB_WORD_MISSING && bytes == sizeof missing) {
        memcpy(&missing, data, sizeof missing);
        missing_heard(lanes, peer_rank, &missing);
    } else if ((word == NB_WORD_LOST || word == NB_WORD_LOST_END) && bytes == sizeof lost) {
        memcpy(&lost, data, sizeof lost);
        if (word == NB_WORD_LOST) {
            lost_heard(lanes, peer_rank, &lost);
        } else {
            lost_end_heard(lanes, peer_rank, &lost);
        }
    }
    nb_repair_flush(lanes, peer_rank);
}

void nb_repair_flush(struct nb_lanes *lanes, int peer_rank) {
    struct peer *peer = &lanes->peers[peer_rank];
    for (int i = 0; i < lanes->config.lanes; i++) {
        if (peer->paths[i].open && (peer->paths[i].echo_due || peer->paths[i].ask_due)) {
            echo_send(lanes, peer_rank, i);
        }
    }
    if (peer->done_urgent) {
        done_send(lanes, peer_rank);
        peer->done_urgent = peer->done_count > 0;
    }
    if (peer->ask_due) {
        ask_send(lanes, peer_rank);
    }
    if (peer->report != NB_REPORT_NONE) {
        report_send(lanes, peer_rank);
    }
}

bool nb_lanes_settle(struct nb_lanes *lanes) {
    bool settled = true;
    for (int p = 0; p < lanes->config.lane.size; p++) {
        struct peer *peer = &lanes->peers[p];
        if (nb_lanes_left(lanes, p) == 0) {
            continue;
        }
        bool waits = !nb_list_empty(&peer->kept) || !nb_list_empty(&peer->out);
        if (waits && !peer->asked) {
            ask_send(lanes, p);
        }
        done_send(lanes, p);
        settled = settled && !waits && peer->done_count == 0 && peer->report == NB_REPORT_NONE;
    }
    return settled;
}

void nb_lanes_farewell(struct nb_lanes *lanes) {
    const struct wire_word message = {.word = NB_WORD_BYE};
    for (int p = 0; p < lanes->config.lane.size; p++) {
        for (int i = 0; lanes->peers[p].paths != NULL && i < lanes->config.lanes; i++) {
            if (lanes->peers[p].paths[i].open) { // on each: a lane may be on its way out, because of another peer
                (void)lanes->lane[i]->ops->message(lanes->lane[i], p, &message, sizeof message);
            }
        }
    }
}

void nb_lanes_forgive(struct nb_lanes *lanes, int peer_rank) {
    struct peer *peer = &lanes->peers[peer_rank];
    const struct wire_lost nothing = {.floor = {UINT64_MAX, UINT64_MAX}};
    peer->left = true;
    NB_LIST_EACH(it, &peer->out) {
        NB_CONTAINER(it, struct nb_flow, link)->listed = false;
    }
    lost_end_list(lanes, &peer->out, &nothing);
    nb_sent_drop(lanes, peer_rank);
}
