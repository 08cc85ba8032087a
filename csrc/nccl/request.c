// Requests on the lanes: each is a flow, whose memory is the caller's. A flow without a receiver ends in a sink.
#include "nccl/request.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#include "base/bits.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/list.h"
#include "nccl/net.h"
#include "transport/lanes.h"
#include "transport/transport.h"

// A flow whose receiving comm was closed: its bytes are read and dropped.
struct sink {
    struct nb_flow flow;
    struct nb_list link;
    size_t bytes;
    uint64_t map[];
};

static struct nb_net_request *request_of(const struct nb_flow *flow) {
    return NB_CONTAINER(flow, struct nb_net_request, flow);
}

static size_t span(size_t total, uint32_t first, uint32_t count) {
    size_t begin = (size_t)first * NB_NET_BLOCK;
    size_t end = begin + (size_t)count * NB_NET_BLOCK;
    return (end < total ? end : total) - begin;
}

static size_t flow_bytes(const struct nb_flow *flow, uint32_t first, uint32_t count) {
    return span(request_of(flow)->bytes, first, count);
}

static uint32_t flow_run_limit(const struct nb_flow *flow, uint32_t first, uint32_t count) {
    (void)flow;
    (void)first;
    return count;
}

static int flow_memory(const struct nb_flow *flow, uint32_t first, uint32_t count, struct iovec iov[NB_LANE_IOV_MAX]) {
    const struct nb_net_request *request = request_of(flow);
    iov[0] = (struct iovec){.iov_base = request->data + (size_t)first * NB_NET_BLOCK,
                            .iov_len = flow_bytes(flow, first, count)};
    return 1;
}

static void flow_consume(struct nb_flow *flow, uint32_t first, uint32_t count, const void *data, size_t bytes) {
    (void)flow;
    (void)first;
    (void)count;
    (void)data;
    (void)bytes;
}

void nb_request_finish(struct nb_net_request *request, int state) {
    nb_list_remove(&request->link);
    if (request->comm->link != NULL) {
        request->comm->link->moved_ns = nb_now_ns();
    }
    atomic_store_explicit(&request->state, state, memory_order_release);
}

static void flow_finished(struct nb_flow *flow) {
    struct nb_link *link = request_of(flow)->comm->link;
    link->flows--;
    link->heard_ns = nb_now_ns(); // a send has the peer's report, a receive its last bytes
    nb_request_finish(request_of(flow), NB_REQUEST_DONE);
}

static const struct nb_flow_ops flow_ops = {.bytes = flow_bytes,
                                            .run_limit = flow_run_limit,
                                            .memory = flow_memory,
                                            .consume = flow_consume,
                                            .finished = flow_finished};

static size_t sink_bytes(const struct nb_flow *flow, uint32_t first, uint32_t count) {
    return span(NB_CONTAINER(flow, const struct sink, flow)->bytes, first, count);
}

static int sink_memory(const struct nb_flow *flow, uint32_t first, uint32_t count, struct iovec iov[NB_LANE_IOV_MAX]) {
    (void)flow;
    (void)first;
    (void)count;
    (void)iov;
    return 0;
}

static void sink_finished(struct nb_flow *flow) {
    struct sink *sink = NB_CONTAINER(flow, struct sink, flow);
    nb_list_remove(&sink->link);
    free(sink);
}

static const struct nb_flow_ops sink_ops = {.bytes = sink_bytes,
                                            .run_limit = flow_run_limit,
                                            .memory = sink_memory,
                                            .consume = flow_consume,
                                            .finished = sink_finished};

static uint32_t blocks_of(size_t bytes) {
    return (uint32_t)((bytes + NB_NET_BLOCK - 1) / NB_NET_BLOCK);
}

static struct nb_flow flow_of(const struct nb_link *link, const struct nb_flow_ops *ops, uint64_t op, size_t bytes,
                              uint64_t *map) {
    return (struct nb_flow){.ops = ops,
                            .dir = link->outgoing ? NB_FLOW_OUT : NB_FLOW_IN,
                            .peer = link->outgoing ? 1 : 0,
                            .op = op,
                            .blocks = blocks_of(bytes),
                            .block_bytes = NB_NET_BLOCK,
                            .map = map};
}

void nb_request_no_memory(struct nb_link *link, size_t bytes) {
    struct nb_error why = {0};
    nb_fail(&why, -ENOMEM, "cannot allocate a transfer of %zu bytes", bytes);
    nb_link_fail(link, &why);
}

bool nb_request_flow(struct nb_link *link, struct nb_net_request *request, uint64_t op) {
    size_t words = nb_bits_words(blocks_of(request->bytes));
    if (words > NB_NET_MAP_WORDS && words > request->long_words) {
        free(request->long_map);
        request->long_map = calloc(words, sizeof *request->long_map);
        request->long_words = request->long_map != NULL ? words : 0;
        if (request->long_map == NULL) {
            nb_request_no_memory(link, request->bytes);
            return false;
        }
    }
    uint64_t *map = words > NB_NET_MAP_WORDS ? request->long_map : request->map;
    memset(map, 0, words * sizeof *map);
    request->flow = flow_of(link, &flow_ops, op, request->bytes, map);
    for (uint32_t i = 0; link->outgoing && i < request->flow.blocks; i++) {
        nb_bits_set(map, i);
    }
    request->flow.left = request->flow.blocks;
    nb_list_init(&request->flow.link);
    nb_list_init(&request->flow.granting);
    nb_list_remove(&request->link);
    nb_list_insert(&request->comm->active, &request->link);
    link->moved_ns = nb_now_ns();
    link->flows++;
    nb_lanes_add(link->lanes, &request->flow, link->moved_ns);
    return true;
}

bool nb_sink_start(struct nb_link *link, uint64_t op, size_t bytes) {
    size_t words = nb_bits_words(blocks_of(bytes));
    struct sink *sink = calloc(1, sizeof *sink + words * sizeof sink->map[0]);
    if (sink == NULL) {
        return false;
    }
    sink->bytes = bytes;
    sink->flow = flow_of(link, &sink_ops, op, bytes, sink->map);
    sink->flow.left = sink->flow.blocks;
    sink->flow.staged_only = true;
    nb_list_init(&sink->flow.link);
    nb_list_init(&sink->flow.granting);
    nb_list_insert(&link->sinks, &sink->link);
    nb_lanes_add(link->lanes, &sink->flow, nb_now_ns());
    return true;
}

void nb_sinks_drop(struct nb_link *link) {
    NB_LIST_EACH_SAFE(it, nx, &link->sinks) {
        sink_finished(&NB_CONTAINER(it, struct sink, link)->flow);
    }
}
