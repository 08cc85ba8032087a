// Usable lanes: the open ones to a peer, those of them that take new segments, and messages over the lowest one, among
// them which operations have started.
#include <errno.h>
#include <stddef.h>
#include <string.h>

#include "base/error.h"
#include "base/wire.h"
#include "transport/lanes.h"
#include "transport/lanes_internal.h"
#include "transport/transport.h"

int nb_lanes_left(const struct nb_lanes *lanes, int peer) {
    int left = 0;
    for (int i = 0; lanes->peers[peer].paths != NULL && i < lanes->config.lanes; i++) {
        left += lanes->peers[peer].paths[i].open;
    }
    return left;
}

void nb_lanes_update_reach(struct nb_lanes *lanes, int peer_rank) {
    struct peer *peer = &lanes->peers[peer_rank];
    int open = 0;
    int reach = 0;
    while (peer->paths != NULL && reach < lanes->config.lanes && open < lanes->used) {
        open += peer->paths[reach++].open;
    }
    peer->reach = reach;
}

int nb_lanes_send_message(struct nb_lanes *lanes, int peer, const void *data, size_t bytes) {
    for (int i = 0; lanes->peers[peer].paths != NULL && i < lanes->config.lanes; i++) {
        if (lanes->peers[peer].paths[i].open) {
            return lanes->lane[i]->ops->message(lanes->lane[i], peer, data, bytes);
        }
    }
    return NB_EPEER;
}

void nb_lanes_tell_started(struct nb_lanes *lanes, int peer_rank) {
    struct peer *peer = &lanes->peers[peer_rank];
    struct wire_started message = {.type = NB_MESSAGE_STARTED};
    if (!lanes->awaits_starts || peer->paths == NULL) {
        return;
    }
    memcpy(message.ops, peer->in_floor, sizeof message.ops);
    peer->started_due = nb_lanes_send_message(lanes, peer_rank, &message, sizeof message) == -EAGAIN;
}

void nb_lanes_await_starts(struct nb_lanes *lanes) {
    lanes->awaits_starts = lanes->config.ops->kind == NB_LANE_STREAM;
    for (int p = 0; p < lanes->config.lane.size; p++) {
        nb_lanes_tell_started(lanes, p);
    }
}
