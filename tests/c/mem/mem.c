// Lanes of the in-process test network. State that two ranks share is in a link, under the net's lock. State of one
// rank's thread is in its lane. Callbacks are called without the lock.
#include "mem/mem.h"

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "mem/mem_internal.h"
#include "transport/transport.h"

static int draw_delay(struct mem_lane *lane) {
    return (int)nb_mem_draw(&lane->random, (uint32_t)lane->net->delay_max + 1);
}

// The peer's queue for this lane's messages or data.
static struct queue *queue_to(const struct mem_lane *lane, int peer, bool message) {
    struct link *link = link_of(lane, peer);
    int side = !side_of(lane, peer);
    return nb_mem_is_rma(lane) && message ? &link->messages[side] : &link->data[side];
}

static struct packet *packet_make(struct mem_lane *lane, size_t bytes) {
    struct packet *packet = malloc(sizeof *packet + bytes);
    if (packet != NULL) {
        *packet = (struct packet){.bytes = bytes, .delay = draw_delay(lane)};
    }
    return packet;
}

static void packet_send(struct mem_lane *lane, int peer, struct packet *packet) {
    struct nb_mem_net *net = lane->net;
    pthread_mutex_lock(&net->lock);
    if (nb_mem_up(link_of(lane, peer))) {
        nb_mem_push(link_of(lane, peer), !side_of(lane, peer), packet, nb_mem_is_rma(lane));
        nb_mem_wake(net, peer, lane->base.index);
        packet = NULL;
    }
    pthread_mutex_unlock(&net->lock);
    free(packet); // the link is down
}

static bool pipe_full(const struct mem_lane *lane, int peer, bool message) {
    pthread_mutex_lock(&lane->net->lock);
    bool full = queue_to(lane, peer, message)->count >= PIPE_MAX;
    pthread_mutex_unlock(&lane->net->lock);
    return full;
}

// Ends this side of a flow. A link that is down already may belong to a new flow.
static void peer_end(struct mem_lane *lane, int peer) {
    struct mem_peer *p = &lane->peers[peer];
    pthread_mutex_lock(&lane->net->lock);
    if (p->state != NONE && link_of(lane, peer)->is_open[side_of(lane, peer)]) {
        nb_mem_down(link_of(lane, peer));
        nb_mem_wake(lane->net, peer, lane->base.index);
    }
    pthread_mutex_unlock(&lane->net->lock);
    p->state = NONE;
    p->epoch++;
    p->refused = false;
    p->held = false;
    p->placed = false;
    free(p->current);
    p->current = NULL;
}

// Ends this side of a flow and completes requests in flight with `code`.
static void peer_drop(struct mem_lane *lane, int peer, int code) {
    struct mem_peer *p = &lane->peers[peer];
    peer_end(lane, peer);
    struct nb_request *request = p->out;
    p->out = NULL;
    p->out_count = 0;
    while (request != NULL) {
        struct nb_request *next = posted_of(request)->next;
        lane->config.up->sent(lane->config.up_ctx, &lane->base, request, code);
        request = next;
    }
}

static void peer_lost(struct mem_lane *lane, int peer, int code, const char *what) {
    struct nb_error why = {0};
    nb_fail_peer(&why, code, peer, "lane %d to rank %d: %s", lane->base.index, peer, what);
    peer_drop(lane, peer, code);
    lane->config.up->lost(lane->config.up_ctx, &lane->base, peer, &why);
}

static void out_done(struct mem_lane *lane, int peer, struct nb_request *request) {
    struct mem_peer *p = &lane->peers[peer];
    p->out = posted_of(request)->next;
    p->out_count--;
    p->stats.bytes_out += request->frame.bytes;
    lane->config.up->sent(lane->config.up_ctx, &lane->base, request, 0);
}

static size_t draw_chunk(struct mem_lane *lane, size_t left) {
    bool unsplit = !lane->net->in_pieces || left < 2 || nb_mem_draw(&lane->random, 3) == 0;
    return unsplit ? left : 1 + nb_mem_draw(&lane->random, (uint32_t)left);
}

static int stream_out(struct mem_lane *lane, int peer, struct nb_request *request) {
    struct packet *packet = pipe_full(lane, peer, false) ? NULL : packet_make(lane, request->frame.bytes);
    if (packet == NULL) {
        return 0;
    }
    packet->frame = request->frame;
    packet->frame.slot = 0;
    nb_mem_gather(request->iov, 0, packet->data, packet->bytes);
    packet_send(lane, peer, packet);
    out_done(lane, peer, request);
    return 1;
}

// Writes a piece. False: the peer refuses it, or the link is down.
static bool rma_write(struct mem_lane *lane, struct nb_request *request) {
    struct posted *posted = posted_of(request);
    size_t chunk = draw_chunk(lane, request->frame.bytes - posted->done);
    pthread_mutex_lock(&lane->net->lock);
    char *memory = nb_mem_up(link_of(lane, request->peer)) ? nb_mem_remote(lane, request) : NULL;
    if (memory != NULL) {
        nb_mem_gather(request->iov, posted->done, memory + posted->done, chunk);
        posted->done += chunk;
    }
    pthread_mutex_unlock(&lane->net->lock);
    return memory != NULL;
}

static int rma_out(struct mem_lane *lane, int peer, struct nb_request *request) {
    struct posted *posted = posted_of(request);
    if (posted->arrived) {
        out_done(lane, peer, request);
        return 1;
    }
    if (!rma_write(lane, request)) {
        peer_lost(lane, peer, NB_EPEER, "a write was refused");
        return 1;
    }
    if (posted->done < request->frame.bytes) {
        return 0;
    }
    struct packet *packet = packet_make(lane, 0);
    if (packet != NULL) {
        nb_frame_unpack(nb_frame_pack(&request->frame), &packet->frame);
        packet->frame.bytes = request->frame.bytes;
        posted->arrived = true;
        posted->delay = draw_delay(lane);
        packet_send(lane, peer, packet);
    }
    return 1;
}

static int out_progress(struct mem_lane *lane, int peer) {
    struct nb_request *request = lane->peers[peer].out;
    if (request == NULL || link_of(lane, peer)->stalled || posted_of(request)->delay-- > 0) {
        return 0;
    }
    posted_of(request)->delay = 0;
    return nb_mem_is_rma(lane) ? rma_out(lane, peer, request) : stream_out(lane, peer, request);
}

// Removes and returns the next packet that is due, or NULL.
static struct packet *in_take(struct mem_lane *lane, int peer, bool message) {
    pthread_mutex_lock(&lane->net->lock);
    struct packet *packet = nb_mem_take(link_of(lane, peer), side_of(lane, peer), message);
    if (packet != NULL) {
        nb_mem_wake(lane->net, peer, lane->base.index); // the queue has room again
    }
    pthread_mutex_unlock(&lane->net->lock);
    return packet;
}

// Asks the receiver for the segment's destination. Returns 0, -EAGAIN or another error.
static int segment_place(struct mem_lane *lane, int peer, const struct packet *packet) {
    struct mem_peer *p = &lane->peers[peer];
    int n = lane->config.up->place(lane->config.up_ctx, &lane->base, peer, &packet->frame, p->iov);
    if (n < 0) {
        return n;
    }
    size_t room = 0;
    for (int i = 0; i < n; i++) {
        room += p->iov[i].iov_len;
    }
    p->done = 0;
    return room == packet->bytes ? 0 : -EINVAL;
}

// Copies the next piece of a segment. The flow does not own the packet during a callback, which may close the flow.
static int segment_progress(struct mem_lane *lane, int peer, struct packet *packet) {
    struct mem_peer *p = &lane->peers[peer];
    uint64_t epoch = p->epoch;
    int rc = p->placed ? 0 : segment_place(lane, peer, packet);
    if (p->epoch != epoch) {
        free(packet);
        return 1;
    }
    if (rc < 0) {
        p->held = rc == -EAGAIN;
        p->current = packet;
        if (rc != -EAGAIN) {
            peer_lost(lane, peer, NB_EWIRE, "an invalid segment was announced");
        }
        return rc != -EAGAIN;
    }
    p->placed = true;
    size_t chunk = draw_chunk(lane, packet->bytes - p->done);
    nb_mem_scatter(p->iov, p->done, packet->data + p->done, chunk);
    p->done += chunk;
    if (p->done < packet->bytes) {
        p->current = packet;
        return 0;
    }
    p->placed = false;
    p->stats.bytes_in += packet->bytes;
    lane->config.up->landed(lane->config.up_ctx, &lane->base, peer, &packet->frame);
    free(packet);
    return 1;
}

static int packet_progress(struct mem_lane *lane, int peer, struct packet *packet) {
    const struct nb_lane_up *up = lane->config.up;
    if (packet->is_message) {
        up->message(lane->config.up_ctx, &lane->base, peer, packet->data, packet->bytes);
    } else if (nb_mem_is_rma(lane)) {
        lane->peers[peer].stats.bytes_in += packet->frame.bytes;
        packet->frame.bytes = 0;
        up->landed(lane->config.up_ctx, &lane->base, NB_NO_PEER, &packet->frame);
    } else {
        return segment_progress(lane, peer, packet);
    }
    free(packet);
    return 1;
}

static int in_progress(struct mem_lane *lane, int peer) {
    struct mem_peer *p = &lane->peers[peer];
    int done = 0;
    for (int i = 0; i < PACKETS_PER_PASS && p->state == OPEN && !p->held; i++) {
        struct packet *packet = p->current;
        p->current = NULL;
        if (packet == NULL) {
            packet = in_take(lane, peer, nb_mem_is_rma(lane) && i % 2 == 0);
        }
        done += packet != NULL ? packet_progress(lane, peer, packet) : 0;
    }
    return done;
}

static bool has_room(const struct mem_lane *lane, int peer) {
    return lane->peers[peer].out_count < lane->net->posts_max && !pipe_full(lane, peer, true);
}

static int peer_progress(struct mem_lane *lane, int peer) {
    struct mem_peer *p = &lane->peers[peer];
    if (p->state == NONE) {
        return 0;
    }
    pthread_mutex_lock(&lane->net->lock);
    bool up = nb_mem_up(link_of(lane, peer));
    bool gone = !link_of(lane, peer)->is_open[side_of(lane, peer)];
    pthread_mutex_unlock(&lane->net->lock);
    if (gone) {
        peer_lost(lane, peer, NB_EPEER, "the flow is gone");
        return 1;
    }
    bool waits = p->state == OPENING ? up : p->refused && has_room(lane, peer);
    if (waits && p->delay-- <= 0) {
        p->state = OPEN;
        p->refused = false;
        p->delay = 0;
        lane->config.up->writable(lane->config.up_ctx, &lane->base, peer);
        return 1;
    }
    int done = p->state == OPEN ? out_progress(lane, peer) : 0;
    return done + in_progress(lane, peer);
}

static int mem_progress(struct nb_lane *base) {
    struct mem_lane *lane = nb_mem_lane_of(base);
    uint32_t size = (uint32_t)lane->config.size;
    uint32_t start = nb_mem_draw(&lane->random, size);
    int done = 0;
    for (uint32_t i = 0; i < size; i++) {
        done += peer_progress(lane, (int)((start + i) % size));
    }
    return done;
}

// True if progress() has work without another event. The caller holds the lock.
static bool peer_pending(const struct mem_lane *lane, int peer) {
    const struct mem_peer *p = &lane->peers[peer];
    const struct link *link = link_of(lane, peer);
    int side = side_of(lane, peer);
    if (p->state == NONE || !link->is_open[side]) {
        return p->state != NONE;
    }
    if (p->state == OPENING) {
        return nb_mem_up(link);
    }
    bool full = queue_to(lane, peer, true)->count >= PIPE_MAX;
    bool writable = p->refused && p->out_count < lane->net->posts_max && !full;
    bool out = p->out != NULL && (nb_mem_is_rma(lane) || !full);
    bool in = p->current != NULL || link->data[side].head != NULL || link->messages[side].head != NULL;
    return writable || out || (in && !p->held);
}

static int mem_arm(struct nb_lane *base) {
    const struct mem_lane *lane = nb_mem_lane_of(base);
    bool pending = false;
    pthread_mutex_lock(&lane->net->lock);
    for (int peer = 0; peer < lane->config.size && !pending; peer++) {
        pending = peer_pending(lane, peer);
    }
    pthread_mutex_unlock(&lane->net->lock);
    return pending ? -EAGAIN : 0;
}

static int refuse(struct mem_lane *lane, int peer) {
    struct mem_peer *p = &lane->peers[peer];
    p->delay = p->refused || p->state != OPEN ? p->delay : draw_delay(lane);
    p->refused = true;
    return -EAGAIN;
}

static bool draw_refusal(struct mem_lane *lane) {
    int one_in = lane->net->refuse_one_in;
    return one_in > 0 && nb_mem_draw(&lane->random, (uint32_t)one_in) == 0;
}

static int mem_post(struct nb_lane *base, struct nb_request *request) {
    struct mem_lane *lane = nb_mem_lane_of(base);
    struct mem_peer *p = &lane->peers[request->peer];
    if (p->state != OPEN || p->out_count >= lane->net->posts_max || draw_refusal(lane)) {
        return refuse(lane, request->peer);
    }
    *posted_of(request) = (struct posted){.delay = draw_delay(lane)};
    struct nb_request **end = &p->out;
    while (*end != NULL) {
        end = &posted_of(*end)->next;
    }
    *end = request;
    p->out_count++;
    if (p->out == request && !nb_mem_is_rma(lane) && nb_mem_draw(&lane->random, 8) == 0) {
        stream_out(lane, request->peer, request); // calls sent() before post() returns
    }
    return 0;
}

static int mem_message(struct nb_lane *base, int peer, const void *data, size_t bytes) {
    struct mem_lane *lane = nb_mem_lane_of(base);
    if (bytes > NB_LANE_MESSAGE_MAX) {
        return -EMSGSIZE;
    }
    if (lane->peers[peer].state != OPEN || pipe_full(lane, peer, true) || draw_refusal(lane)) {
        return refuse(lane, peer);
    }
    struct packet *packet = packet_make(lane, bytes);
    if (packet == NULL) {
        return refuse(lane, peer);
    }
    packet->is_message = true;
    memcpy(packet->data, data, bytes);
    packet_send(lane, peer, packet);
    return 0;
}

static void mem_resume(struct nb_lane *base, int peer) {
    nb_mem_lane_of(base)->peers[peer].held = false;
}

static int mem_open(const struct nb_lane_config *config, const struct nb_lane_ops *ops, struct nb_lane **out,
                    struct nb_error *err) {
    struct nb_mem_net *net = nb_mem_find(config->library);
    if (net == NULL || config->size != net->size || config->index >= net->lanes) {
        return nb_fail(err, -EINVAL, "lane %d: library must name an in-process network with this lane", config->index);
    }
    struct mem_lane *lane = calloc(1, sizeof *lane);
    struct mem_peer *peers = calloc((size_t)config->size, sizeof *peers);
    if (lane == NULL || peers == NULL) {
        free(lane);
        free(peers);
        return nb_fail(err, -ENOMEM, "lane %d for %d ranks", config->index, config->size);
    }
    lane->base = (struct nb_lane){.ops = ops, .index = config->index};
    lane->config = *config;
    lane->net = net;
    lane->peers = peers;
    lane->random = net->seed + (uint64_t)(config->rank * NB_LANES_MAX + config->index) * 0x9e3779b97f4a7c15u;
    pthread_mutex_lock(&net->lock);
    net->lane[config->rank * net->lanes + config->index] = lane;
    pthread_mutex_unlock(&net->lock);
    *out = &lane->base;
    return 0;
}

static void mem_close(struct nb_lane *base) {
    if (base == NULL) {
        return;
    }
    struct mem_lane *lane = nb_mem_lane_of(base);
    for (int peer = 0; peer < lane->config.size; peer++) {
        peer_end(lane, peer);
    }
    pthread_mutex_lock(&lane->net->lock);
    lane->net->lane[lane->config.rank * lane->net->lanes + base->index] = NULL;
    pthread_mutex_unlock(&lane->net->lock);
    while (lane->regions != NULL) {
        struct region *next = lane->regions->next;
        free(lane->regions);
        lane->regions = next;
    }
    free(lane->peers);
    free(lane);
}

static void mem_address(const struct nb_lane *base, unsigned char addr[NB_LANE_ADDR_MAX], size_t *bytes) {
    const struct mem_lane *lane = nb_mem_lane_of(base);
    addr[0] = (unsigned char)lane->config.rank;
    addr[1] = (unsigned char)base->index;
    *bytes = 2;
}

static int mem_peer_open(struct nb_lane *base, int peer, const unsigned char *addr, size_t bytes,
                         struct nb_error *err) {
    struct mem_lane *lane = nb_mem_lane_of(base);
    struct mem_peer *p = &lane->peers[peer];
    if (bytes != 2 || addr[0] != (unsigned char)peer || addr[1] != (unsigned char)base->index) {
        return nb_fail_peer(err, NB_EWIRE, peer, "rank %d sent no address for lane %d", peer, base->index);
    }
    if (p->state != NONE) {
        return 0;
    }
    p->state = OPENING;
    p->delay = draw_delay(lane);
    pthread_mutex_lock(&lane->net->lock);
    link_of(lane, peer)->is_open[side_of(lane, peer)] = true;
    nb_mem_wake(lane->net, peer, base->index);
    pthread_mutex_unlock(&lane->net->lock);
    return 0;
}

static bool mem_peer_ready(const struct nb_lane *base, int peer) {
    return nb_mem_lane_of(base)->peers[peer].state == OPEN;
}

static void mem_peer_close(struct nb_lane *base, int peer) {
    peer_drop(nb_mem_lane_of(base), peer, NB_ECLOSED);
}

static void mem_stats(const struct nb_lane *base, int peer, struct nb_lane_stats *stats) {
    *stats = nb_mem_lane_of(base)->peers[peer].stats;
}

static const char *mem_describe(const struct nb_lane *base) {
    return base->ops->name;
}

static int stream_open(const struct nb_lane_config *config, struct nb_lane **lane, struct nb_error *err) {
    return mem_open(config, nb_mem_ops(NB_LANE_STREAM), lane, err);
}

static int rma_open(const struct nb_lane_config *config, struct nb_lane **lane, struct nb_error *err) {
    return mem_open(config, nb_mem_ops(NB_LANE_RMA), lane, err);
}

#define OPS(ops_name, ops_kind, ops_open)                                                                              \
    {.name = ops_name,                                                                                                 \
     .kind = ops_kind,                                                                                                 \
     .open = ops_open,                                                                                                 \
     .address = mem_address,                                                                                           \
     .peer_open = mem_peer_open,                                                                                       \
     .peer_ready = mem_peer_ready,                                                                                     \
     .peer_close = mem_peer_close,                                                                                     \
     .map = nb_mem_map,                                                                                                \
     .unmap = nb_mem_unmap,                                                                                            \
     .post = mem_post,                                                                                                 \
     .message = mem_message,                                                                                           \
     .resume = mem_resume,                                                                                             \
     .progress = mem_progress,                                                                                         \
     .arm = mem_arm,                                                                                                   \
     .stats = mem_stats,                                                                                               \
     .held = nb_mem_held,                                                                                              \
     .describe = mem_describe,                                                                                         \
     .close = mem_close}

const struct nb_lane_ops *nb_mem_ops(int kind) {
    static const struct nb_lane_ops ops[] = {[NB_LANE_STREAM] = OPS("mem", NB_LANE_STREAM, stream_open),
                                             [NB_LANE_RMA] = OPS("mem-rma", NB_LANE_RMA, rma_open)};
    return &ops[kind];
}
