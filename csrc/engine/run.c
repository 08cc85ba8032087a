// An agreed operation on the wire: its schedule turned into flows, its arrivals into sums.
#include <stdint.h>
#include <string.h>

#include "base/bits.h"
#include "base/clock.h"
#include "base/list.h"
#include "coll/sched.h"
#include "engine/engine.h"
#include "engine/internal.h"
#include "engine/local.h"
#include "trace/event.h"
#include "trace/ring.h"
#include "transport/lanes.h"
#include "transport/transport.h"

// The piece that holds byte `offset` of the line.
static int piece_at(const struct nb_work *work, size_t offset) {
    int low = 0;
    int high = work->piece_count - 1;
    while (low < high) {
        int mid = (low + high + 1) / 2;
        if (work->starts[mid] <= offset) {
            low = mid;
        } else {
            high = mid - 1;
        }
    }
    return low;
}

// The memory of a range, at most `max` pieces; the count, or max + 1 when it lies in more.
static int range_memory(const struct nb_work *work, struct nb_range range, struct iovec *iov, int max) {
    int n = 0;
    for (int p = piece_at(work, range.offset); range.bytes > 0; p++) {
        if (n == max) {
            return max + 1;
        }
        size_t skip = range.offset - work->starts[p];
        size_t room = work->pieces[p].bytes - skip;
        size_t take = room < range.bytes ? room : range.bytes;
        iov[n++] = (struct iovec){.iov_base = (char *)work->pieces[p].base + skip, .iov_len = take};
        range.offset += take;
        range.bytes -= take;
    }
    return n;
}

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
               range_memory(work, flow_range(flow, first, count), iov, NB_LANE_IOV_MAX) > NB_LANE_IOV_MAX) {
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
    int n = range_memory(work, flow_range(flow, first, count), iov, NB_LANE_IOV_MAX);
    return n <= NB_LANE_IOV_MAX ? n : 0; // in: the sender's memory was not cut where this rank's is
}

static void line_scale(const struct nb_work *work, struct nb_range range, double factor) {
    struct iovec iov[1] = {{0}};
    while (factor != 1 && range.bytes > 0) {
        range_memory(work, range, iov, 1);
        work->scale(iov[0].iov_base, iov[0].iov_len / work->element_bytes, factor);
        range.offset += iov[0].iov_len;
        range.bytes -= iov[0].iov_len;
    }
}

static void line_reduce(const struct nb_work *work, struct nb_range range, const char *data) {
    struct iovec iov[1] = {{0}};
    while (range.bytes > 0) {
        range_memory(work, range, iov, 1);
        work->reduce(iov[0].iov_base, data, iov[0].iov_len / work->element_bytes);
        data += iov[0].iov_len;
        range.offset += iov[0].iov_len;
        range.bytes -= iov[0].iov_len;
    }
}

static void line_place(const struct nb_work *work, struct nb_range range, const char *data) {
    struct iovec iov[1] = {{0}};
    while (range.bytes > 0) {
        if (range_memory(work, range, iov, 1) < 1) {
            return;
        }
        memcpy(iov[0].iov_base, data, iov[0].iov_len);
        data += iov[0].iov_len;
        range.offset += iov[0].iov_len;
        range.bytes -= iov[0].iov_len;
    }
}

static void flow_consume(struct nb_flow *flow, uint32_t first, uint32_t count, const void *data, size_t bytes) {
    struct nb_work *work = flow->owner;
    struct nb_job *job = work->comm->job;
    struct nb_range range = nb_sched_in(&work->sched, first, count);
    (void)bytes;
    if (data != NULL && nb_sched_reduces(&work->sched, first)) {
        line_reduce(work, range, data);
    } else if (data != NULL) {
        line_place(work, range, data);
    }
    if (nb_sched_completes(&work->sched, first)) {
        line_scale(work, range, work->desc.postscale);
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

static void flow_finished(struct nb_flow *flow) {
    struct nb_work *work = flow->owner;
    struct nb_job *job = work->comm->job;
    if (--work->flows_left > 0) {
        return;
    }
    if (work->quiet) {
        nb_probe_finished(job, work);
        return;
    }
    pthread_mutex_lock(&job->lock);
    job->info.bytes_out += work->out.bytes_moved;
    job->info.bytes_in += work->in.bytes_moved;
    pthread_mutex_unlock(&job->lock);
    nb_work_finish(work, NULL);
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

static void flow_prepare(struct nb_work *work, struct nb_flow *flow, enum nb_flow_dir dir, int peer) {
    flow->ops = &flow_ops;
    flow->dir = dir;
    flow->peer = peer;
    flow->op = work->seq;
    flow->priority = work->desc.priority;
    flow->block_bytes = work->sched.block_bytes;
    flow->owner = work;
    nb_list_init(&flow->link);
    flow->left = flow_skip_empty(flow, &work->sched);
    for (uint32_t i = 0; dir == NB_FLOW_OUT && i < flow->blocks; i++) {
        if (nb_sched_ready(&work->sched, i) && nb_sched_out(&work->sched, i, 1).bytes > 0) {
            nb_bits_set(flow->map, i);
        }
    }
}

static bool has_scale(const struct nb_work *work) {
    return work->desc.kind == NB_OP_ALLREDUCE || work->desc.kind == NB_OP_REDUCESCATTER;
}

void nb_run_alone(struct nb_work *work) {
    struct nb_range all = {.offset = 0, .bytes = work->starts[work->piece_count]};
    if (has_scale(work)) {
        line_scale(work, all, work->desc.prescale);
        line_scale(work, all, work->desc.postscale);
    }
    nb_work_finish(work, NULL);
}

void nb_run_start(struct nb_work *work, uint64_t seq) {
    struct nb_job *job = work->comm->job;
    int64_t now = nb_now_ns();
    work->seq = seq;
    work->times.agreed_ns = work->times.agreed_ns != 0 ? work->times.agreed_ns : now;
    work->times.start_ns = now;
    if (!work->quiet) {
        nb_ring_put_at(job->config.ring, now, NB_EV_OP_START, work->desc.key, work->round, 0, 0, 0, 0);
    }
    if (nb_local_start(work)) {
        return;
    }
    if (work->in.blocks == 0 && work->out.blocks == 0) {
        nb_run_alone(work);
        return;
    }
    struct nb_range all = {.offset = 0, .bytes = work->starts[work->piece_count]};
    if (has_scale(work)) {
        line_scale(work, all, work->desc.prescale);
    }
    flow_prepare(work, &work->in, NB_FLOW_IN, work->sched.from);
    flow_prepare(work, &work->out, NB_FLOW_OUT, work->sched.to);
    bool in = work->in.left > 0;
    bool out = work->out.left > 0;
    work->flows_left = in + out;
    nb_list_remove(&work->link);
    nb_list_insert(&job->running, &work->link);
    work->running = true;
    if (!in && !out) {
        nb_run_alone(work);
        return;
    }
    if (out) { // first: what lands may make blocks of it ready, and may even finish it
        nb_lanes_add(job->lanes, &work->out, now);
    }
    if (in) {
        nb_lanes_add(job->lanes, &work->in, now);
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
    if (!nb_list_empty(&work->in.link)) {
        nb_lanes_cancel(job->lanes, &work->in);
    }
    if (!nb_list_empty(&work->out.link)) {
        nb_lanes_cancel(job->lanes, &work->out);
    }
}
