// Lanes from open to close: opens them, exchanges their addresses, and connects the paths to each peer.
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/admission.h"
#include "base/error.h"
#include "base/list.h"
#include "base/sock.h"
#include "base/wire.h"
#include "transport/lanes.h"
#include "transport/lanes_internal.h"
#include "transport/transport.h"

static void path_close(struct path *path) {
    free(path->scratch);
    free(path->assignments);
}

void nb_lanes_close(struct nb_lanes *lanes) {
    if (lanes == NULL) {
        return;
    }
    nb_credits_fini(lanes);
    nb_retransmit_fini(lanes);
    for (int i = 0; i < lanes->config.lanes; i++) {
        if (lanes->lane[i] != NULL) {
            lanes->lane[i]->ops->close(lanes->lane[i]);
        }
    }
    for (int p = 0; lanes->peers != NULL && p < lanes->config.lane.size; p++) {
        for (int i = 0; lanes->peers[p].paths != NULL && i < lanes->config.lanes; i++) {
            path_close(&lanes->peers[p].paths[i]);
        }
        free(lanes->peers[p].paths);
        free(lanes->peers[p].done);
    }
    free(lanes->peers);
    free(lanes);
}

static int lane_open(struct nb_lanes *lanes, int index, struct nb_error *err) {
    struct nb_lane_config config = lanes->config.lane;
    config.index = index;
    config.up = &nb_lanes_up;
    config.up_ctx = lanes;
    config.admission = &lanes->admission;
    if (lanes->config.bind_count > 0) {
        config.bind = lanes->config.binds[index % lanes->config.bind_count];
    }
    int first = lanes->config.bind_count > 0 ? index % lanes->config.bind_count : 0;
    if (first == index) {
        nb_sock_interface_of(&config.bind, lanes->interfaces[index].name);
    } else { // a lookup costs as much as opening a lane
        lanes->interfaces[index] = lanes->interfaces[first];
    }
    return lanes->config.ops->open(&config, &lanes->lane[index], err);
}

int nb_lanes_watch(struct nb_lanes *lanes, struct nb_error *err) {
    int rc = 0;
    for (int i = 0; rc == 0 && i < lanes->config.lanes; i++) {
        struct nb_lane *lane = lanes->lane[i];
        rc = lane->ops->watch != NULL ? lane->ops->watch(lane, err) : 0;
    }
    return rc;
}

int nb_lanes_open(struct nb_lanes **out, const struct nb_lanes_config *config, struct nb_error *err) {
    struct nb_lanes *lanes = calloc(1, sizeof *lanes);
    if (lanes == NULL) {
        return nb_fail(err, -ENOMEM, "cannot allocate %d lanes", config->lanes);
    }
    int rc = 0;
    lanes->config = *config;
    nb_admission_init(&lanes->admission);
    lanes->used = config->lanes;
    lanes->config.copy_bytes = config->copy_bytes < NB_COPY_MAX ? config->copy_bytes : NB_COPY_MAX;
    // With credits, half of the granted room is in use on the way there while the grants for the other half come back.
    size_t most = config->in_flight_max / (config->ops->kind == NB_LANE_RMA ? 2 : 1);
    size_t share = most / (size_t)config->lanes;
    lanes->window_bytes = share > 2 * config->segment_bytes ? share : 2 * config->segment_bytes;
    lanes->peers = calloc((size_t)config->lane.size, sizeof *lanes->peers);
    if (lanes->peers == NULL) {
        rc = nb_fail(err, -ENOMEM, "cannot allocate %d peers", config->lane.size);
        goto err_close;
    }
    for (int p = 0; p < config->lane.size; p++) {
        nb_list_init(&lanes->peers[p].in);
        nb_list_init(&lanes->peers[p].out);
        nb_list_init(&lanes->peers[p].kept);
    }
    rc = nb_retransmit_init(lanes, err);
    if (rc == 0) {
        rc = nb_credits_init(lanes, err);
    }
    for (int i = 0; rc == 0 && i < config->lanes; i++) {
        rc = lane_open(lanes, i, err);
    }
    if (rc == 0 && !config->watched_later) {
        rc = nb_lanes_watch(lanes, err);
    }
    if (rc < 0) {
        goto err_close;
    }
    *out = lanes;
    return 0;
err_close:
    nb_lanes_close(lanes);
    return rc;
}

size_t nb_lanes_address_bytes(const struct nb_lanes *lanes) {
    return (size_t)lanes->config.lanes * sizeof(struct wire_lane_address);
}

void nb_lanes_address(const struct nb_lanes *lanes, void *out) {
    struct wire_lane_address *address = out;
    memset(out, 0, nb_lanes_address_bytes(lanes));
    for (int i = 0; i < lanes->config.lanes; i++) {
        size_t bytes = 0;
        lanes->lane[i]->ops->address(lanes->lane[i], address[i].addr, &bytes);
        address[i].bytes = (uint32_t)bytes;
    }
}

uint16_t nb_lanes_port(const struct nb_lanes *lanes, int lane) {
    const struct nb_lane *base = lanes->lane[lane];
    unsigned char text[NB_LANE_ADDR_MAX] = {0};
    size_t bytes = 0;
    struct nb_sockaddr addr;
    struct nb_error not_text = {0};
    if (base->ops->kind != NB_LANE_STREAM) {
        return 0;
    }
    base->ops->address(base, text, &bytes);
    return nb_sock_parse((const char *)text, &addr, &not_text) < 0 ? 0 : nb_sock_port(&addr);
}

static int path_open(struct nb_lanes *lanes, struct path *path, struct nb_error *err) {
    bool reads = lanes->config.ops->kind == NB_LANE_STREAM; // scratch for segments without a final address
    path->assignments = calloc(NB_ASSIGNMENTS_PER_PATH, sizeof *path->assignments);
    path->scratch = reads ? aligned_alloc(4096, NB_SCRATCH_BYTES(lanes->config.segment_bytes)) : NULL;
    if (path->assignments == NULL || (reads && path->scratch == NULL)) {
        return nb_fail(err, -ENOMEM, "cannot allocate assignments of a lane");
    }
    for (int i = 0; i < NB_ASSIGNMENTS_PER_PATH; i++) {
        path->assignments[i].next = path->idle;
        path->idle = &path->assignments[i];
    }
    path->open = true;
    return 0;
}

// Connects a path. An endpoint that serves all peers may be lost because of another peer. Then the lane is lost for
// this peer, too, and the peer is notified.
static int path_connect(struct nb_lanes *lanes, int peer_rank, int lane, const struct wire_lane_address *address,
                        struct nb_error *err) {
    struct peer *peer = &lanes->peers[peer_rank];
    struct nb_error why = {0};
    int rc = lanes->lane[lane]->ops->peer_open(lanes->lane[lane], peer_rank, address->addr, address->bytes, &why);
    if (rc == NB_ECLOSED) {
        peer->paths[lane].open = false;
        peer->lost |= (uint64_t)1 << lane;
        peer->report = NB_REPORT_DUE;
        return 0;
    }
    if (rc == -EMFILE || rc == -ENFILE || rc == -ENOMEM || rc == -ENOBUFS) { // not the peer's fault
        return nb_fail(err, rc, "lane to rank %d: %s%s", peer_rank, why.text, nb_code_remedy(rc));
    }
    return rc < 0 ? nb_fail_peer(err, rc, peer_rank, "%s", why.text) : 0;
}

int nb_lanes_peer_open(struct nb_lanes *lanes, int peer_rank, const void *addresses, struct nb_error *err) {
    struct peer *peer = &lanes->peers[peer_rank];
    const struct wire_lane_address *address = addresses;
    if (peer->paths != NULL) {
        return 0;
    }
    peer->paths = calloc((size_t)lanes->config.lanes, sizeof *peer->paths);
    if (peer->paths == NULL) {
        return nb_fail(err, -ENOMEM, "cannot allocate lanes to rank %d", peer_rank);
    }
    for (int i = 0; i < lanes->config.lanes; i++) {
        int rc = path_open(lanes, &peer->paths[i], err);
        if (rc == 0 && address[i].bytes > NB_LANE_ADDR_MAX) {
            rc = nb_fail_peer(err, NB_EWIRE, peer_rank, "rank %d sent an invalid lane address", peer_rank);
        }
        if (rc == 0) {
            rc = path_connect(lanes, peer_rank, i, &address[i], err);
        }
        if (rc < 0) {
            return rc;
        }
    }
    if (nb_lanes_left(lanes, peer_rank) == 0) {
        return nb_fail_peer(err, NB_EPEER, peer_rank, "no lane to rank %d is left", peer_rank);
    }
    nb_lanes_update_reach(lanes, peer_rank);
    for (int i = 0; lanes->config.ops->kind == NB_LANE_STREAM && i < lanes->config.lanes; i++) {
        peer->paths[i].held = true; // the peer may have connected and sent before
    }
    return nb_credits_peer_open(lanes, peer_rank, err);
}

void nb_lanes_listen_end(struct nb_lanes *lanes) {
    for (int i = 0; i < lanes->config.lanes; i++) {
        if (lanes->lane[i]->ops->listen_end != NULL) {
            lanes->lane[i]->ops->listen_end(lanes->lane[i]);
        }
    }
}

int nb_lanes_accept_error(const struct nb_lanes *lanes) {
    int why = 0;
    for (int i = 0; i < lanes->config.lanes && why == 0; i++) {
        why = lanes->lane[i]->accept_error;
    }
    return why;
}

uint64_t nb_lanes_peer_missing(const struct nb_lanes *lanes, int peer) {
    uint64_t missing = 0;
    for (int i = 0; i < lanes->config.lanes; i++) {
        const struct path *paths = lanes->peers[peer].paths;
        if ((paths == NULL || paths[i].open) && !lanes->lane[i]->ops->peer_ready(lanes->lane[i], peer)) {
            missing |= (uint64_t)1 << i;
        }
    }
    return missing;
}

void nb_lanes_peer_awaited(const struct nb_lanes *lanes, int peer, char text[NB_LANES_AWAITED_TEXT]) {
    uint64_t missing = nb_lanes_peer_missing(lanes, peer);
    char where[NB_SOCK_TEXT];
    text[0] = '\0';
    if (missing == 0 || lanes->config.ops->connecting == NULL) {
        return;
    }
    const struct nb_lane *lane = lanes->lane[__builtin_ctzll(missing)];
    const char *format = lane->ops->connecting(lane, peer, where)
                             ? ": this rank's connection to %s did not open: does a firewall block that port?"
                             : ": that rank's connection to %s, where this rank listens, did not arrive: does a "
                               "firewall block that port?";
    (void)snprintf(text, NB_LANES_AWAITED_TEXT, format, where);
}

bool nb_lanes_peer_ready(const struct nb_lanes *lanes, int peer) {
    return nb_lanes_peer_missing(lanes, peer) == 0;
}
