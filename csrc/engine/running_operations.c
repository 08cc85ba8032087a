// Running operations: what algorithms call between start and completion.
#include <stdbool.h>
#include <stdint.h>

#include "base/list.h"
#include "coll/choose.h"
#include "coll/ring_schedule.h"
#include "engine/buffer.h"
#include "engine/communicator.h"
#include "engine/context.h"
#include "engine/engine.h"
#include "engine/operation.h"
#include "trace/event.h"
#include "trace/ring.h"
#include "transport/lanes.h"

void nb_work_flow_ready(struct nb_work *work, struct nb_flow *flow, const struct nb_flow_ops *ops, int step) {
    flow->ops = ops;
    flow->op = work->seq << STEP_BITS | (uint64_t)step;
    flow->priority = work->desc.priority;
    flow->block_bytes = work->block_bytes;
    flow->owner = work;
    nb_list_init(&flow->link);
}

static bool has_blocks(struct nb_work *work) {
    for (int i = 0; i < work->flow_count; i++) {
        if (nb_work_flow(work, i)->blocks > 0) {
            return true;
        }
    }
    return false;
}

static bool has_scale(const struct nb_work *work) {
    return work->desc.kind == NB_OP_ALLREDUCE || work->desc.kind == NB_OP_REDUCESCATTER;
}

void nb_work_alone(struct nb_work *work) {
    struct nb_range all = nb_buffer_all(work);
    if (has_scale(work)) {
        nb_buffer_scale(work, all, work->desc.prescale);
        nb_buffer_scale(work, all, work->desc.postscale);
    }
    if (work->desc.kind == NB_OP_ALLTOALL) {
        nb_buffer_move(work, (struct nb_range){0, all.bytes / 2}, (struct nb_range){all.bytes / 2, all.bytes / 2});
    }
    nb_work_moved(work);
}

void nb_work_set_running(struct nb_work *work) {
    nb_list_remove(&work->link);
    nb_list_insert(&work->comm->job->ops.running, &work->link);
    work->running = true;
}

bool nb_work_begin(struct nb_work *work) {
    if (!has_blocks(work)) {
        nb_work_alone(work);
        return false;
    }
    if (has_scale(work)) {
        nb_buffer_scale(work, nb_buffer_all(work), work->desc.prescale);
    }
    nb_work_set_running(work);
    return true;
}

void nb_work_moved(struct nb_work *work) {
    if (work->on_flows_done != NULL) {
        work->on_flows_done(work);
    } else {
        nb_work_finish(work, NULL);
    }
}

void nb_work_flow_done(struct nb_work *work) {
    if (--work->flows_left == 0) {
        nb_work_moved(work);
    }
}

void nb_work_cancel(struct nb_work *work) {
    if (work->running) {
        work->algorithm->cancel(work);
    }
}

void nb_flows_cancel(struct nb_work *work) {
    for (int i = 0; i < work->flow_count; i++) {
        struct nb_flow *flow = nb_work_flow(work, i);
        if (flow->blocks > 0 && !nb_list_empty(&flow->link)) {
            nb_lanes_cancel(work->comm->job->lanes, flow);
        }
    }
}

bool nb_flows_wait_for(struct nb_work *work, int peer, int64_t *moved_ns) {
    bool found = false;
    for (int i = 0; i < work->flow_count; i++) {
        const struct nb_flow *flow = nb_work_flow(work, i);
        // An outgoing flow is done only when its peer has all of it.
        if (flow->blocks > 0 && flow->peer == peer && !nb_list_empty(&flow->link)) {
            *moved_ns = flow->moved_ns > *moved_ns ? flow->moved_ns : *moved_ns;
            found = true;
        }
    }
    return found;
}

enum nb_algorithm_id nb_flows_record(struct nb_work *work, uint64_t *sent, uint64_t *received) {
    struct nb_job *job = work->comm->job;
    for (int lane = 0; work->running && job->lanes != NULL && lane < job->info.streams_open; lane++) {
        uint64_t out = 0;
        uint64_t in = 0;
        for (int i = 0; i < work->flow_count; i += 2) {
            in += nb_work_flow(work, i)->lane_bytes[lane];
            out += nb_work_flow(work, i + 1)->lane_bytes[lane];
        }
        *sent += out;
        *received += in;
        if (out + in > 0) {
            nb_ring_put(work->ring, NB_EV_OP_LANE, work->desc.key, work->round, (uint64_t)lane, out, in, 0);
        }
    }
    return work->algorithm->id;
}
