// Pipeline: rings and the chain, which pass the buffer from neighbour to neighbour in blocks.
#include "engine/pipeline.h"

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "base/bits.h"
#include "base/error.h"
#include "coll/choose.h"
#include "coll/ring_schedule.h"
#include "engine/algorithms.h"
#include "engine/buffer.h"
#include "engine/communicator.h"
#include "engine/context.h"
#include "engine/engine.h"
#include "engine/operation.h"
#include "transport/lanes.h"
#include "transport/transport.h"

static struct nb_range flow_range(const struct nb_flow *flow, uint32_t first, uint32_t count) {
    const struct nb_work *work = flow->owner;
    return flow->dir == NB_FLOW_IN ? nb_sched_in(&work->sched, first, count) : nb_sched_out(&work->sched, first, count);
}

static size_t flow_bytes(const struct nb_flow *flow, uint32_t first, uint32_t count) {
    return flow_range(flow, first, count).bytes;
}

static uint32_t flow_run_limit(const struct nb_flow *flow, uint32_t first, uint32_t count) {
    const struct nb_work *work = flow->owner;
    uint32_t step_left = work->sched.per_step - first % work->sched.per_step;
    count = count < step_left ? count : step_left;
    if (work->piece_count > 1 && flow->dir == NB_FLOW_OUT) {
        struct iovec iov[NB_LANE_IOV_MAX];
        while (count > 1 &&
               nb_buffer_memory(work, flow_range(flow, first, count), iov, NB_LANE_IOV_MAX) > NB_LANE_IOV_MAX) {
            count /= 2;
        }
    }
    return count;
}

static int flow_memory(const struct nb_flow *flow, uint32_t first, uint32_t count, struct iovec iov[NB_LANE_IOV_MAX]) {
    const struct nb_work *work = flow->owner;
    if (flow->dir == NB_FLOW_IN && nb_sched_reduces(&work->sched, first)) {
        return 0;
    }
    int n = nb_buffer_memory(work, flow_range(flow, first, count), iov, NB_LANE_IOV_MAX);
    return n <= NB_LANE_IOV_MAX ? n : 0; // in: the sender's pieces differ from this rank's
}

static void flow_consume(struct nb_flow *flow, uint32_t first, uint32_t count, const void *data, size_t bytes) {
    struct nb_work *work = flow->owner;
    struct nb_job *job = work->comm->job;
    struct nb_range range = nb_sched_in(&work->sched, first, count);
    (void)bytes;
    if (data != NULL && nb_sched_reduces(&work->sched, first)) {
        nb_buffer_reduce(work, range, data);
    } else if (data != NULL) {
        nb_buffer_place(work, range, data);
    }
    if (nb_sched_completes(&work->sched, first)) {
        nb_buffer_scale(work, range, work->desc.postscale);
    }
    bool more = false;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t next = nb_sched_next(&work->sched, first + i);
        if (next != NB_NO_BLOCK) {
            nb_lanes_ready(job->lanes, &work->out, next);
            more = true;
        }
    }
    if (more) {
        nb_lanes_push(job->lanes, work->out.peer);
    }
}

static void flow_finished(struct nb_flow *flow) {
    nb_work_flow_done(flow->owner);
}

static const struct nb_flow_ops flow_ops = {.bytes = flow_bytes,
                                            .run_limit = flow_run_limit,
                                            .memory = flow_memory,
                                            .consume = flow_consume,
                                            .finished = flow_finished};

// Marks blocks past the end of a short step as done, because they have no bytes. Returns the number of the others.
static uint32_t flow_skip_empty(struct nb_flow *flow, const struct nb_sched *sched) {
    uint32_t left = 0;
    for (uint32_t step = 0; step * sched->per_step < flow->blocks; step++) {
        uint32_t from = step * sched->per_step;
        size_t bytes = flow_range(flow, from, sched->per_step).bytes;
        uint32_t full = (uint32_t)((bytes + sched->block_bytes - 1) / sched->block_bytes);
        left += full;
        for (uint32_t i = full; flow->dir == NB_FLOW_IN && i < sched->per_step; i++) {
            nb_bits_set(flow->map, from + i);
        }
    }
    return left;
}

bool nb_pipeline_begin(struct nb_work *work, int64_t now) {
    struct nb_job *job = work->comm->job;
    const struct nb_sched *sched = &work->sched;
    nb_work_flow_ready(work, &work->in, &flow_ops, 0);
    nb_work_flow_ready(work, &work->out, &flow_ops, 0);
    work->in.left = flow_skip_empty(&work->in, sched);
    work->out.left = flow_skip_empty(&work->out, sched);
    for (uint32_t i = 0; i < work->out.blocks; i++) {
        if (nb_sched_ready(sched, i) && nb_sched_out(sched, i, 1).bytes > 0) {
            nb_bits_set(work->out.map, i);
        }
    }
    bool in = work->in.left > 0;
    bool out = work->out.left > 0;
    work->flows_left = in + out;
    if (out) { // first: an arrival may make its blocks ready, and may even finish it
        nb_lanes_add(job->lanes, &work->out, now);
    }
    if (in) {
        nb_lanes_add(job->lanes, &work->in, now);
    }
    return in || out;
}

int nb_pipeline_prepare(struct nb_work *work, enum nb_sched_kind kind, struct nb_error *err) {
    const struct nb_comm *comm = work->comm;
    struct nb_sched *sched = &work->sched;
    nb_sched_init(sched, kind, comm->rank, comm->size, work->desc.root, work->starts[work->piece_count],
                  work->element_bytes);
    work->block_bytes = sched->block_bytes;
    work->flow_count = 2;
    uint32_t in = nb_sched_blocks_in(sched);
    uint32_t out = nb_sched_blocks_out(sched);
    work->in = (struct nb_flow){.dir = NB_FLOW_IN, .peer = nb_comm_peer(comm, sched->from), .blocks = in};
    work->out = (struct nb_flow){.dir = NB_FLOW_OUT, .peer = nb_comm_peer(comm, sched->to), .blocks = out};
    work->in.map = calloc(nb_bits_words(in) + 1, sizeof(uint64_t));
    work->out.map = calloc(nb_bits_words(out) + 1, sizeof(uint64_t));
    if (work->in.map == NULL || work->out.map == NULL) {
        return nb_fail(err, -ENOMEM, "%s: cannot allocate maps of %u blocks", work->desc.name, in + out);
    }
    return 0;
}

void nb_pipeline_release(struct nb_work *work) {
    free(work->in.map);
    free(work->out.map);
    work->in.map = NULL;
    work->out.map = NULL;
}

void nb_pipeline_start(struct nb_work *work, int64_t now_ns) {
    if (nb_work_begin(work) && !nb_pipeline_begin(work, now_ns)) {
        nb_work_alone(work);
    }
}

static bool is_allreduce(const struct nb_work *work) {
    return work->desc.kind == NB_OP_ALLREDUCE;
}

static int allreduce_prepare(struct nb_work *work, struct nb_error *err) {
    return nb_pipeline_prepare(work, NB_SCHED_RING_ALLREDUCE, err);
}

static bool is_allgather(const struct nb_work *work) {
    return work->desc.kind == NB_OP_ALLGATHER;
}

static int allgather_prepare(struct nb_work *work, struct nb_error *err) {
    return nb_pipeline_prepare(work, NB_SCHED_RING_ALLGATHER, err);
}

static bool is_reducescatter(const struct nb_work *work) {
    return work->desc.kind == NB_OP_REDUCESCATTER;
}

static int reducescatter_prepare(struct nb_work *work, struct nb_error *err) {
    return nb_pipeline_prepare(work, NB_SCHED_RING_REDUCESCATTER, err);
}

static bool is_broadcast(const struct nb_work *work) {
    return work->desc.kind == NB_OP_BROADCAST;
}

static int broadcast_prepare(struct nb_work *work, struct nb_error *err) {
    return nb_pipeline_prepare(work, NB_SCHED_CHAIN_BROADCAST, err);
}

static bool is_barrier(const struct nb_work *work) {
    return work->desc.kind == NB_OP_BARRIER;
}

static int alone_prepare(struct nb_work *work, struct nb_error *err) {
    return nb_pipeline_prepare(work, NB_SCHED_NONE, err);
}

#define PIPELINE(number, asked_for, is_possible, make)                                                                 \
    {.id = (number),                                                                                                   \
     .name = (asked_for),                                                                                              \
     .possible = (is_possible),                                                                                        \
     .prepare = (make),                                                                                                \
     .release = nb_pipeline_release,                                                                                   \
     .start = nb_pipeline_start,                                                                                       \
     .cancel = nb_flows_cancel,                                                                                        \
     .waits_for = nb_flows_wait_for,                                                                                   \
     .record = nb_flows_record}

const struct nb_algorithm nb_ring_allreduce = PIPELINE(NB_ALGORITHM_RING, "ring", is_allreduce, allreduce_prepare);
const struct nb_algorithm nb_ring_allgather =
    PIPELINE(NB_ALGORITHM_RING_ALLGATHER, NULL, is_allgather, allgather_prepare);
const struct nb_algorithm nb_ring_reducescatter =
    PIPELINE(NB_ALGORITHM_RING_REDUCESCATTER, NULL, is_reducescatter, reducescatter_prepare);
const struct nb_algorithm nb_chain_broadcast = PIPELINE(NB_ALGORITHM_CHAIN, NULL, is_broadcast, broadcast_prepare);
// No byte moves: a barrier is complete once it is negotiated.
const struct nb_algorithm nb_alone = PIPELINE(NB_ALGORITHM_NONE, NULL, is_barrier, alone_prepare);
