// An agreed operation on the wire: its schedule turned into flows, its arrivals into sums.
#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "base/bits.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/list.h"
#include "coll/choose.h"
#include "coll/sched.h"
#include "coll/steps.h"
#include "engine/engine.h"
#include "engine/group.h"
#include "engine/internal.h"
#include "engine/join.h"
#include "engine/line.h"
#include "engine/local.h"
#include "engine/twolevel.h"
#include "trace/event.h"
#include "trace/ring.h"
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
               nb_line_memory(work, flow_range(flow, first, count), iov, NB_LANE_IOV_MAX) > NB_LANE_IOV_MAX) {
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
    int n = nb_line_memory(work, flow_range(flow, first, count), iov, NB_LANE_IOV_MAX);
    return n <= NB_LANE_IOV_MAX ? n : 0; // in: the sender's memory was not cut where this rank's is
}

static void flow_consume(struct nb_flow *flow, uint32_t first, uint32_t count, const void *data, size_t bytes) {
    struct nb_work *work = flow->owner;
    struct nb_job *job = work->comm->job;
    struct nb_range range = nb_sched_in(&work->sched, first, count);
    (void)bytes;
    if (data != NULL && nb_sched_reduces(&work->sched, first)) {
        nb_line_reduce(work, range, data);
    } else if (data != NULL) {
        nb_line_place(work, range, data);
    }
    if (nb_sched_completes(&work->sched, first)) {
        nb_line_scale(work, range, work->desc.postscale);
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
        nb_lanes_push(job->lanes, work->out.peer, 0);
    }
}

struct nb_flow *nb_work_flow(struct nb_work *work, int index) {
    if (index >= 2) {
        return &work->more[index - 2];
    }
    return index == 0 ? &work->in : &work->out;
}

void nb_run_flow_over(struct nb_work *work) {
    if (--work->flows_left > 0) {
        return;
    }
    if (work->local.piece != NULL) {
        nb_two_level_landed(work);
        return;
    }
    if (work->quiet) {
        nb_probe_finished(work->comm->job, work);
        return;
    }
    nb_work_finish(work, NULL);
}

static void flow_finished(struct nb_flow *flow) {
    nb_run_flow_over(flow->owner);
}

static const struct nb_flow_ops flow_ops = {.bytes = flow_bytes,
                                            .run_limit = flow_run_limit,
                                            .memory = flow_memory,
                                            .consume = flow_consume,
                                            .finished = flow_finished};

// Blocks past the end of a short step have no bytes: they are over before they begin. The count of the others.
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

void nb_run_flow(struct nb_work *work, struct nb_flow *flow, const struct nb_flow_ops *ops, int step) {
    flow->ops = ops;
    flow->op = work->seq << STEP_BITS | (uint64_t)step;
    flow->priority = work->desc.priority;
    flow->block_bytes = work->block_bytes;
    flow->owner = work;
    nb_list_init(&flow->link);
}

bool nb_run_pipeline(struct nb_work *work, int64_t now) {
    struct nb_job *job = work->comm->job;
    const struct nb_sched *sched = &work->sched;
    nb_run_flow(work, &work->in, &flow_ops, 0);
    nb_run_flow(work, &work->out, &flow_ops, 0);
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
    if (out) { // first: what lands may make blocks of it ready, and may even finish it
        nb_lanes_add(job->lanes, &work->out, now);
    }
    if (in) {
        nb_lanes_add(job->lanes, &work->in, now);
    }
    return in || out;
}

static int pipeline_make(struct nb_work *work, enum nb_sched_kind kind, struct nb_error *err) {
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
        return nb_fail(err, -ENOMEM, "%s: maps of %u blocks", work->desc.name, in + out);
    }
    return 0;
}

enum nb_algorithm nb_run_only(int kind) {
    static const enum nb_algorithm only[NB_OP_KINDS] = {[NB_OP_ALLGATHER] = NB_ALGORITHM_RING_ALLGATHER,
                                                        [NB_OP_REDUCESCATTER] = NB_ALGORITHM_RING_REDUCESCATTER,
                                                        [NB_OP_BROADCAST] = NB_ALGORITHM_CHAIN,
                                                        [NB_OP_ALLTOALL] = NB_ALGORITHM_PAIRWISE};
    return only[kind];
}

bool nb_run_possible(int kind, uint32_t algorithm) {
    if (kind == NB_OP_ALLREDUCE) {
        return algorithm == NB_ALGORITHM_RING || algorithm == NB_ALGORITHM_DOUBLING ||
               algorithm == NB_ALGORITHM_HALVING || algorithm == NB_ALGORITHM_TWO_LEVEL;
    }
    return algorithm == nb_run_only(kind);
}

void nb_run_unprepare(struct nb_work *work) {
    if (work->stepper == NULL) {
        free(work->in.map);
        free(work->out.map);
    }
    free(work->more);
    nb_stepper_free(work);
    work->more = NULL;
    work->in.map = NULL;
    work->out.map = NULL;
    work->flow_count = 0;
}

int nb_run_prepare(struct nb_work *work, enum nb_algorithm algorithm, struct nb_error *err) {
    nb_run_unprepare(work);
    work->algorithm = algorithm;
    switch (algorithm) {
    case NB_ALGORITHM_DOUBLING:
        return nb_stepper_make(work, NB_STEPS_DOUBLING, err);
    case NB_ALGORITHM_HALVING:
        return nb_stepper_make(work, NB_STEPS_HALVING, err);
    case NB_ALGORITHM_PAIRWISE:
        return nb_stepper_make(work, NB_STEPS_PAIRWISE, err);
    case NB_ALGORITHM_RING:
        return pipeline_make(work, NB_SCHED_RING_ALLREDUCE, err);
    case NB_ALGORITHM_RING_ALLGATHER:
        return pipeline_make(work, NB_SCHED_RING_ALLGATHER, err);
    case NB_ALGORITHM_RING_REDUCESCATTER:
        return pipeline_make(work, NB_SCHED_RING_REDUCESCATTER, err);
    case NB_ALGORITHM_CHAIN:
        return pipeline_make(work, NB_SCHED_CHAIN_BROADCAST, err);
    case NB_ALGORITHM_STAR:      // it takes no lane: star.c
    case NB_ALGORITHM_TWO_LEVEL: // its rings have what they need: twolevel.c
    case NB_ALGORITHM_NONE:
        break;
    }
    return pipeline_make(work, NB_SCHED_NONE, err);
}

static bool moves(struct nb_work *work) {
    for (int i = 0; i < work->flow_count; i++) {
        if (nb_work_flow(work, i)->blocks > 0) {
            return true;
        }
    }
    return false;
}

int nb_run_peers(struct nb_work *work, struct nb_error *err) {
    int rc = 0;
    for (int i = 0; rc == 0 && moves(work) && i < work->flow_count; i++) {
        const struct nb_flow *flow = nb_work_flow(work, i);
        bool needed = flow->blocks > 0 || work->stepper == NULL;
        rc = needed ? nb_job_peer_ready(work->comm->job, flow->peer, err) : 0;
    }
    return rc;
}

static bool has_scale(const struct nb_work *work) {
    return work->desc.kind == NB_OP_ALLREDUCE || work->desc.kind == NB_OP_REDUCESCATTER;
}

void nb_run_alone(struct nb_work *work) {
    struct nb_range all = nb_line_all(work);
    if (work->desc.kind == NB_OP_JOIN) {
        nb_join_end(work, 0);
        return;
    }
    if (has_scale(work)) {
        nb_line_scale(work, all, work->desc.prescale);
        nb_line_scale(work, all, work->desc.postscale);
    }
    if (work->desc.kind == NB_OP_ALLTOALL) {
        nb_line_move(work, (struct nb_range){0, all.bytes / 2}, (struct nb_range){all.bytes / 2, all.bytes / 2});
    }
    nb_work_finish(work, NULL);
}

static uint64_t femtoseconds(double ns) {
    return (uint64_t)(ns * 1e6 + 0.5);
}

// The record has what the choice of an operation's algorithm rested on. Only who drives the job writes info.costs.
static void keep_costs(struct nb_job *job) {
    const struct nb_costs *now = &job->info.costs;
    if (job->costs_new) {
        job->costs_new = false;
        nb_ring_put(job->config.ring, NB_EV_COSTS, 0, femtoseconds(now->alpha_ns), femtoseconds(now->beta_ns),
                    femtoseconds(now->gamma_ns), femtoseconds(now->levels_ns), femtoseconds(now->levels_byte_ns));
    }
}

void nb_run_start(struct nb_work *work, uint64_t seq) {
    struct nb_job *job = work->comm->job;
    int64_t now = nb_now_ns();
    work->seq = seq;
    work->times.agreed_ns = work->times.agreed_ns != 0 ? work->times.agreed_ns : now;
    work->times.start_ns = now;
    if (!work->quiet) {
        keep_costs(job);
        nb_ring_put_at(job->config.ring, now, NB_EV_OP_START, work->desc.key, work->round, 0, 0, 0, 0);
    }
    if (nb_local_start(work)) {
        return;
    }
    if (!moves(work)) {
        nb_run_alone(work);
        return;
    }
    if (has_scale(work)) {
        nb_line_scale(work, nb_line_all(work), work->desc.prescale);
    }
    nb_list_remove(&work->link);
    nb_list_insert(&job->running, &work->link);
    work->running = true;
    if (work->stepper != NULL) {
        nb_stepper_start(work, now);
    } else if (!nb_run_pipeline(work, now)) {
        nb_run_alone(work);
    }
}

void nb_run_cancel(struct nb_work *work) {
    struct nb_job *job = work->comm->job;
    if (!work->running) {
        return;
    }
    if (work->local.taken) {
        nb_local_cancel(work);
        return;
    }
    for (int i = 0; i < work->flow_count; i++) {
        struct nb_flow *flow = nb_work_flow(work, i);
        if (flow->blocks > 0 && !nb_list_empty(&flow->link)) {
            nb_lanes_cancel(job->lanes, flow);
        }
    }
}
