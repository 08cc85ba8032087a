// Operations on this rank: made from what the caller submits, prepared, started and cancelled.
#include "engine/operation.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/dtype.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/list.h"
#include "coll/choose.h"
#include "coll/reduce.h"
#include "coll/sched.h"
#include "engine/buffer.h"
#include "engine/communicator.h"
#include "engine/context.h"
#include "engine/engine.h"
#include "trace/event.h"
#include "trace/ring.h"
#include "transport/lanes.h"
#include "transport/transport.h"

enum {
    PIECES_MAX = NB_LANE_IOV_MAX - 1, // pieces of memory of one block
    BLOCK_SLACK = 64 * 1024           // room in the lanes' buffers beyond a segment
};

uint64_t nb_key(const char *name) {
    uint64_t hash = 14695981039346656037u;
    for (const unsigned char *c = (const unsigned char *)name; *c != 0; c++) {
        hash = (hash ^ *c) * 1099511628211u;
    }
    return hash;
}

size_t nb_op_bytes(const struct nb_op *op) {
    size_t bytes = 0;
    for (int i = 0; i < op->segment_count; i++) {
        bytes += op->segments[i].bytes;
    }
    return bytes;
}

static int line_check(const struct nb_comm *comm, const struct nb_op *op, struct nb_error *err) {
    size_t element = nb_dtype_size(op->dtype);
    for (int i = 0; i < op->segment_count; i++) {
        if (op->segments[i].bytes % element != 0) {
            return nb_fail(err, -EINVAL, "%s: a segment of %zu bytes is not a whole number of %s elements", op->name,
                           op->segments[i].bytes, nb_dtype_name(op->dtype));
        }
    }
    size_t parts = op->kind == NB_OP_ALLGATHER || op->kind == NB_OP_REDUCESCATTER ? (size_t)comm->size : 1;
    parts = op->kind == NB_OP_ALLTOALL ? 2 * (size_t)comm->size : parts;
    if (op->kind == NB_OP_JOIN && (nb_op_bytes(op) != sizeof(int32_t) || comm->ranks != NULL)) {
        return nb_fail(err, -EINVAL, "%s: a join needs all ranks and %zu bytes", op->name, sizeof(int32_t));
    }
    if (nb_op_bytes(op) % (parts * element) != 0) {
        return nb_fail(err, -EINVAL, "%s: %zu bytes cannot be split into %zu equal parts", op->name, nb_op_bytes(op),
                       parts);
    }
    if (op->kind == NB_OP_ALLTOALL && comm->size > 1 << STEP_BITS) {
        return nb_fail(err, -EINVAL, "%s: an all-to-all of %d ranks: the limit is %d", op->name, comm->size,
                       1 << STEP_BITS);
    }
    return 0;
}

static int op_check(const struct nb_comm *comm, const struct nb_op *op, struct nb_error *err) {
    if (op->name == NULL || op->name[0] == 0 || strlen(op->name) >= NB_NAME_MAX) {
        return nb_fail(err, -EINVAL, "the name must have 1 to %d characters", NB_NAME_MAX - 1);
    }
    if ((int)op->kind < 0 || op->kind >= NB_OP_KINDS || op->segment_count < 0) {
        return nb_fail(err, -EINVAL, "%s: invalid operation kind %d or segment count %d", op->name, (int)op->kind,
                       op->segment_count);
    }
    if (nb_dtype_size(op->dtype) == 0) {
        return nb_fail(err, -EINVAL, "%s: unknown dtype %d", op->name, op->dtype);
    }
    if (op->redop < 0 || op->redop >= NB_REDOPS) {
        return nb_fail(err, -EINVAL, "%s: unknown reduction %d", op->name, op->redop);
    }
    if (op->root < 0 || op->root >= comm->size) {
        return nb_fail(err, -EINVAL, "%s: root %d is not among %d ranks", op->name, op->root, comm->size);
    }
    if (op->device != 0) {
        return nb_fail(err, -EINVAL, "%s: only host memory is supported, not device %d", op->name, op->device);
    }
    return line_check(comm, op, err);
}

static size_t line_starts(const struct nb_segment *pieces, int count, size_t *starts) {
    size_t at = 0;
    for (int i = 0; i < count; i++) {
        starts[i] = at;
        at += pieces[i].bytes;
    }
    starts[count] = at;
    return at;
}

// True if a block of the buffer lies in more pieces than one segment can carry.
static bool too_scattered(const struct nb_work *work) {
    size_t block = work->block_bytes;
    int first = 0;
    for (int i = 0; block > 0 && i < work->piece_count; i++) {
        while (work->starts[first + 1] + block <= work->starts[i]) {
            first++;
        }
        if (i - first + 1 > PIECES_MAX) {
            return true;
        }
    }
    return false;
}

// Copies the buffer to one piece of memory of the engine.
static int fuse(struct nb_work *work, struct nb_error *err) {
    int64_t begin_ns = nb_now_ns();
    size_t bytes = work->starts[work->piece_count];
    work->fused = malloc(bytes);
    if (work->fused == NULL) {
        return nb_fail(err, -ENOMEM, "%s: cannot allocate %zu bytes to join %d pieces", work->desc.name, bytes,
                       work->piece_count);
    }
    for (int i = 0; i < work->piece_count; i++) {
        memcpy((char *)work->fused + work->starts[i], work->pieces[i].base, work->pieces[i].bytes);
    }
    work->pieces[0] = (struct nb_segment){.base = work->fused, .bytes = bytes};
    work->piece_count = 1;
    work->starts[1] = bytes;
    nb_work_record_pack(work, begin_ns, false);
    return 0;
}

static void desc_fill(struct op_descriptor *desc, const struct nb_comm *comm, const struct nb_op *op) {
    memset(desc, 0, sizeof *desc);
    desc->key = nb_comm_key(comm, op->key != 0 ? op->key : nb_key(op->name));
    desc->bytes = nb_op_bytes(op);
    desc->shape = op->shape;
    desc->prescale = op->prescale == 0 ? 1 : op->prescale;
    desc->postscale = op->postscale == 0 ? 1 : op->postscale;
    desc->kind = (uint8_t)op->kind;
    desc->dtype = (uint8_t)op->dtype;
    desc->redop = (uint8_t)op->redop;
    desc->root = op->root;
    desc->priority = op->priority;
    desc->comm = comm->id;
    desc->limit_ms = op->limit_ms;
    strncpy(desc->name, op->name, NB_NAME_MAX - 1);
}

static struct nb_work *work_alloc(int segments) {
    size_t pieces = (size_t)segments + 1;
    struct nb_work *work = calloc(1, sizeof *work);
    struct nb_segment *memory = calloc(2 * pieces, sizeof *memory);
    size_t *starts = calloc(pieces + 1, sizeof *starts);
    if (work == NULL || memory == NULL || starts == NULL) {
        free(work);
        free(memory);
        free(starts);
        return NULL;
    }
    work->pieces = memory;
    work->segments = memory + pieces;
    work->starts = starts;
    return work;
}

int nb_work_prepare(struct nb_work *work, const struct nb_algorithm *algorithm, struct nb_error *err) {
    if (work->algorithm == algorithm) {
        return 0;
    }
    nb_work_unprepare(work);
    work->algorithm = algorithm;
    return algorithm->prepare(work, err);
}

static void work_over(struct nb_work *work) {
    nb_work_finish(work, NULL);
}

// Fills a new work from the caller's memory and the operation's type.
static void work_fill(struct nb_work *work, struct nb_comm *comm, const struct nb_op *op) {
    nb_list_init(&work->link);
    nb_list_init(&work->by_key.link);
    work->comm = comm;
    work->ring = comm->job->config.ring;
    work->on_flows_done = work_over;
    work->refs = 2;
    work->bucket = op->bucket;
    desc_fill(&work->desc, comm, op);
    for (int i = 0; i < op->segment_count; i++) {
        work->segments[i] = op->segments[i];
        if (op->segments[i].bytes > 0) {
            work->pieces[work->piece_count++] = op->segments[i];
        }
    }
    work->segment_count = op->segment_count;
    work->element_bytes = nb_dtype_size(op->dtype);
    enum nb_isa isa = nb_reduce_best();
    work->reduce = nb_reduce_kernel(isa, op->dtype, op->redop);
    work->scale = nb_scale_kernel(isa, op->dtype);
}

int nb_work_make(struct nb_comm *comm, const struct nb_op *op, const struct nb_algorithm *algorithm,
                 struct nb_work **out, struct nb_error *err) {
    int rc = op_check(comm, op, err);
    if (rc < 0) {
        return rc;
    }
    struct nb_work *work = work_alloc(op->segment_count);
    if (work == NULL) {
        return nb_fail(err, -ENOMEM, "%s: cannot allocate %d pieces", op->name, op->segment_count);
    }
    work_fill(work, comm, op);
    size_t bytes = line_starts(work->pieces, work->piece_count, work->starts);
    rc = nb_work_prepare(work, algorithm, err);
    if (rc == 0 && comm->size > 1 && bytes > 0 && work->block_bytes > comm->job->config.segment_bytes + BLOCK_SLACK) {
        rc = nb_fail(err, -EINVAL, "%s: %zu bytes exceed the limit for segments of %zu bytes", op->name, bytes,
                     comm->job->config.segment_bytes);
    }
    if (rc == 0 && work->piece_count > 1 && too_scattered(work)) {
        rc = fuse(work, err);
    }
    if (rc < 0) {
        work->refs = 1;
        nb_work_unref(work);
        return rc;
    }
    *out = work;
    return 0;
}

void nb_work_flow_ready(struct nb_work *work, struct nb_flow *flow, const struct nb_flow_ops *ops, int step) {
    flow->ops = ops;
    flow->op = work->seq << STEP_BITS | (uint64_t)step;
    flow->priority = work->desc.priority;
    flow->block_bytes = work->block_bytes;
    flow->owner = work;
    nb_list_init(&flow->link);
}

void nb_work_flow_done(struct nb_work *work) {
    if (--work->flows_left == 0) {
        work->on_flows_done(work);
    }
}

static bool has_blocks(struct nb_work *work) {
    for (int i = 0; i < work->flow_count; i++) {
        if (nb_work_flow(work, i)->blocks > 0) {
            return true;
        }
    }
    return false;
}

int nb_work_peers(struct nb_work *work, struct nb_error *err) {
    int rc = 0;
    for (int i = 0; rc == 0 && i < work->flow_count; i++) {
        const struct nb_flow *flow = nb_work_flow(work, i);
        rc = flow->blocks > 0 ? nb_job_peer_ready(work->comm->job, flow->peer, err) : 0;
    }
    return rc;
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
    nb_work_finish(work, NULL);
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

static uint64_t femtoseconds(double ns) {
    return (uint64_t)(ns * 1e6 + 0.5);
}

// Records the costs behind the choice of an algorithm. Only the progress owner writes info.costs.
static void keep_costs(struct nb_job *job) {
    const struct nb_costs *now = &job->info.costs;
    if (job->costs_new) {
        job->costs_new = false;
        nb_ring_put(job->config.ring, NB_EV_COSTS, 0, femtoseconds(now->alpha_ns), femtoseconds(now->beta_ns),
                    femtoseconds(now->gamma_ns), femtoseconds(now->levels_ns), femtoseconds(now->levels_byte_ns));
    }
}

void nb_work_start(struct nb_work *work, uint64_t seq) {
    int64_t now = nb_now_ns();
    work->seq = seq;
    work->times.agreed_ns = work->times.agreed_ns != 0 ? work->times.agreed_ns : now;
    work->times.start_ns = now;
    if (work->ring != NULL) {
        keep_costs(work->comm->job);
        nb_ring_put_at(work->ring, now, NB_EV_OP_START, work->desc.key, work->round, 0, 0, 0, 0);
    }
    work->algorithm->start(work, now);
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
