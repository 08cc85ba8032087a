// In-process network: state that ranks share. Links, the packets on them, and the random conditions.
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/loop.h"
#include "mem/mem.h"
#include "mem/mem_internal.h"
#include "transport/transport.h"

struct link *nb_mem_link(const struct nb_mem_net *net, int index, int a, int b) {
    int low = a < b ? a : b;
    int high = a < b ? b : a;
    return &net->links[(index * net->size + low) * net->size + high];
}

struct mem_lane *nb_mem_lane(const struct nb_mem_net *net, int rank, int index) {
    return net->lane[rank * net->lanes + index];
}

void nb_mem_wake(const struct nb_mem_net *net, int rank, int index) {
    const struct mem_lane *lane = nb_mem_lane(net, rank, index);
    if (lane != NULL && lane->config.loop != NULL) {
        nb_loop_wake(lane->config.loop);
    }
}

static void queue_push(struct queue *queue, struct packet *packet) {
    packet->next = NULL;
    if (queue->head == NULL) {
        queue->head = packet;
    } else {
        queue->tail->next = packet;
    }
    queue->tail = packet;
    queue->count++;
}

static struct packet *queue_pop(struct queue *queue) {
    struct packet *packet = queue->head;
    queue->head = packet->next;
    queue->count--;
    return packet;
}

static void queue_purge(struct queue *queue) {
    while (queue->head != NULL) {
        free(queue_pop(queue));
    }
}

void nb_mem_push(struct link *link, int side, struct packet *packet, bool is_rma) {
    struct overtaking *at = &link->overtaking[side];
    if (is_rma && packet->is_message) {
        packet->after = at->before;
        at->before = at->announced;
        queue_push(&link->messages[side], packet);
        return;
    }
    at->announced++;
    queue_push(&link->data[side], packet);
}

struct packet *nb_mem_take(struct link *link, int side, bool message) {
    struct queue *queue = message ? &link->messages[side] : &link->data[side];
    struct overtaking *at = &link->overtaking[side];
    if (queue->head == NULL || link->stalled || (message && at->taken < queue->head->after)) {
        return NULL;
    }
    if (queue->head->delay-- > 0) {
        return NULL;
    }
    at->taken += !message;
    return queue_pop(queue);
}

void nb_mem_down(struct link *link) {
    for (int side = 0; side < 2; side++) {
        link->is_open[side] = false;
        queue_purge(&link->data[side]);
        queue_purge(&link->messages[side]);
        link->overtaking[side] = (struct overtaking){0};
    }
}

bool nb_mem_up(const struct link *link) {
    return link->is_open[0] && link->is_open[1];
}

void nb_mem_break(struct nb_mem_net *net, int from, int to, int lane) {
    pthread_mutex_lock(&net->lock);
    nb_mem_down(nb_mem_link(net, lane, from, to));
    nb_mem_wake(net, from, lane);
    nb_mem_wake(net, to, lane);
    pthread_mutex_unlock(&net->lock);
}

void nb_mem_stall(struct nb_mem_net *net, int from, int to, int lane) {
    pthread_mutex_lock(&net->lock);
    nb_mem_link(net, lane, from, to)->stalled = true;
    pthread_mutex_unlock(&net->lock);
}

static uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

struct nb_mem_net *nb_mem_net_open(int size, int lanes, uint64_t seed) {
    static const int delays[] = {0, 1, 3, 8};
    static const int refusals[] = {0, 8, 3, 2};
    size_t ranks = (size_t)size;
    size_t per_rank = (size_t)lanes;
    uint64_t conditions = mix(seed + 0x9e3779b97f4a7c15u);
    struct nb_mem_net *net = calloc(1, sizeof *net);
    if (net == NULL) {
        return NULL;
    }
    *net = (struct nb_mem_net){.size = size, .lanes = lanes, .seed = conditions};
    net->delay_max = delays[conditions % 4];
    net->refuse_one_in = refusals[conditions / 4 % 4];
    net->posts_max = 1 + (int)(conditions / 16 % 4);
    net->in_pieces = conditions / 64 % 2 == 0;
    net->lane = calloc(ranks * per_rank, sizeof *net->lane);
    net->links = calloc(ranks * ranks * per_rank, sizeof *net->links);
    if (net->lane == NULL || net->links == NULL || pthread_mutex_init(&net->lock, NULL) != 0) {
        free(net->lane);
        free(net->links);
        free(net);
        return NULL;
    }
    return net;
}

void nb_mem_net_close(struct nb_mem_net *net) {
    if (net == NULL) {
        return;
    }
    for (int i = 0; i < net->lanes * net->size * net->size; i++) {
        nb_mem_down(&net->links[i]);
    }
    pthread_mutex_destroy(&net->lock);
    free(net->lane);
    free(net->links);
    free(net);
}

void nb_mem_net_name(const struct nb_mem_net *net, char name[NB_MEM_NAME]) {
    (void)snprintf(name, NB_MEM_NAME, "%p", (const void *)net);
}

struct nb_mem_net *nb_mem_find(const char *name) {
    void *net = NULL;
    return name != NULL && sscanf(name, "%p", &net) == 1 ? net
                                                         : NULL; // NOLINT(cert-err34-c): nb_mem_net_name() wrote it
}

char *nb_mem_remote(const struct mem_lane *lane, const struct nb_request *request) {
    const struct mem_lane *remote = nb_mem_lane(lane->net, request->peer, lane->base.index);
    for (const struct region *r = remote != NULL ? remote->regions : NULL; r != NULL; r = r->next) {
        if (r->key == request->remote_key && request->remote_addr >= r->addr) {
            uint64_t offset = request->remote_addr - r->addr;
            return offset + request->frame.bytes <= r->bytes ? r->base + offset : NULL;
        }
    }
    return NULL;
}

int nb_mem_map(struct nb_lane *base, void *memory, size_t bytes, struct nb_region *region, struct nb_error *err) {
    struct mem_lane *lane = nb_mem_lane_of(base);
    if (!nb_mem_is_rma(lane)) {
        *region = (struct nb_region){.addr = (uint64_t)(uintptr_t)memory};
        return 0;
    }
    struct region *known = malloc(sizeof *known);
    if (known == NULL) {
        return nb_fail(err, -ENOMEM, "region of %zu bytes", bytes);
    }
    uint64_t key = nb_mem_draw(&lane->random, UINT32_MAX) | (uint64_t)nb_mem_draw(&lane->random, UINT32_MAX) << 32;
    uint64_t addr = key % 2 == 0 ? 0 : (uint64_t)(uintptr_t)memory; // libfabric providers use either form
    *known = (struct region){.key = key, .addr = addr, .base = memory, .bytes = bytes};
    pthread_mutex_lock(&lane->net->lock);
    known->next = lane->regions;
    lane->regions = known;
    pthread_mutex_unlock(&lane->net->lock);
    *region = (struct nb_region){.handle = known, .key = key, .addr = addr};
    return 0;
}

void nb_mem_unmap(struct nb_lane *base, struct nb_region *region) {
    struct mem_lane *lane = nb_mem_lane_of(base);
    if (region->handle == NULL) {
        return;
    }
    pthread_mutex_lock(&lane->net->lock);
    struct region **at = &lane->regions;
    while (*at != region->handle) {
        at = &(*at)->next;
    }
    *at = (*at)->next;
    pthread_mutex_unlock(&lane->net->lock);
    free(region->handle);
    region->handle = NULL;
}

// Advances *iov and *skip to the piece that contains byte *skip. Returns how many of `bytes` the piece holds.
static size_t piece_at(const struct iovec **iov, size_t *skip, size_t bytes) {
    while (*skip >= (*iov)->iov_len) {
        *skip -= (*iov)->iov_len;
        (*iov)++;
    }
    size_t room = (*iov)->iov_len - *skip;
    return room < bytes ? room : bytes;
}

void nb_mem_gather(const struct iovec *iov, size_t skip, void *data, size_t bytes) {
    char *to = data;
    while (bytes > 0) {
        size_t part = piece_at(&iov, &skip, bytes);
        memcpy(to, (const char *)iov->iov_base + skip, part);
        to += part;
        skip += part;
        bytes -= part;
    }
}

void nb_mem_scatter(const struct iovec *iov, size_t skip, const void *data, size_t bytes) {
    const char *from = data;
    while (bytes > 0) {
        size_t part = piece_at(&iov, &skip, bytes);
        memcpy((char *)iov->iov_base + skip, from, part);
        from += part;
        skip += part;
        bytes -= part;
    }
}

struct nb_held nb_mem_held(const struct nb_lane *base, int peer) {
    (void)peer;
    return (struct nb_held){.bytes = nb_mem_draw(&nb_mem_lane_of(base)->random, 1024 * 1024)};
}
