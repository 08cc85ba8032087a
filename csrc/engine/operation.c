// Operations on this rank: checked, made from what the caller submits, prepared, started, and freed with their last
// reference.
#include "engine/operation.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
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
#include "engine/buffer.h"
#include "engine/communicator.h"
#include "engine/context.h"
#include "engine/device.h"
#include "engine/engine.h"
#include "trace/event.h"
#include "trace/ring.h"
#include "transport/lanes.h"

enum {
    BLOCK_SLACK = 64 * 1024, // room in the lanes' buffers beyond a segment
    ROUNDS_MAX = 16 * 1024   // keys with a round count; limited, because some names are used only once
};

struct key_rounds {
    struct nb_hash_node node;
    struct nb_list by_age;
    uint32_t count;
    bool named; // the trace has the name of the key
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

// Whether the memory can be split into the parts and elements of the operation.
static int parts_check(const struct nb_comm *comm, const struct nb_op *op, struct nb_error *err) {
    size_t element = nb_dtype_size(op->dtype);
    for (int i = 0; i < op->segment_count; i++) {
        if (op->segments[i].bytes % element != 0) {
            return nb_fail(err, -EINVAL, "%s: a segment of %zu bytes is not a whole number of %s elements", op->name,
                           op->segments[i].bytes, nb_dtype_name(op->dtype));
        }
    }
    size_t parts = op->kind == NB_OP_ALLGATHER || op->kind == NB_OP_REDUCESCATTER ? (size_t)comm->size : 1;
    parts = op->kind == NB_OP_ALLTOALL ? 2 * (size_t)comm->size : parts;
    size_t bytes = nb_op_bytes(op);
    if (op->kind == NB_OP_JOIN && (bytes != sizeof(int32_t) || comm->ranks != NULL)) {
        return nb_fail(err, -EINVAL, "%s: a join needs all ranks and %zu bytes", op->name, sizeof(int32_t));
    }
    if (bytes % (parts * element) != 0) {
        return nb_fail(err, -EINVAL, "%s: %zu bytes cannot be split into %zu equal parts", op->name, bytes, parts);
    }
    if (op->kind == NB_OP_ALLTOALL && comm->size > 1 << STEP_BITS) {
        return nb_fail(err, -EINVAL, "%s: an all-to-all of %d ranks: the limit is %d", op->name, comm->size,
                       1 << STEP_BITS);
    }
    return 0;
}

int nb_op_check(const struct nb_comm *comm, const struct nb_op *op, struct nb_error *err) {
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
    int rc = parts_check(comm, op, err);
    return rc < 0 ? rc : nb_device_check(comm, op, nb_op_bytes(op), err);
}

static void desc_fill(struct op_descriptor *desc, const struct nb_comm *comm, const struct nb_op *op) {
    memset(desc, 0, sizeof *desc);
    desc->key = nb_comm_key(comm, op->key != 0 ? op->key : nb_key(op->name));
    desc->bytes = nb_op_bytes(op);
    desc->shape = op->shape;
    desc->prescale = op->scaled ? op->prescale : 1;
    desc->postscale = op->scaled ? op->postscale : 1;
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

static void work_unprepare(struct nb_work *work) {
    if (work->algorithm != NULL) {
        work->algorithm->release(work);
    }
    work->algorithm = NULL;
    work->flow_count = 0;
}

static void work_free(struct nb_work *work) {
    work_unprepare(work);
    free(work->fused);
    free(work->zeros);
    free(work->pieces);
    free(work->starts);
    free(work);
}

int nb_work_prepare(struct nb_work *work, const struct nb_algorithm *algorithm, struct nb_error *err) {
    if (work->algorithm == algorithm) {
        return 0;
    }
    work_unprepare(work);
    work->algorithm = algorithm;
    return algorithm->prepare(work, err);
}

// Fills a new work from the caller's memory and the operation's type.
static void work_fill(struct nb_work *work, struct nb_comm *comm, const struct nb_op *op) {
    desc_fill(&work->desc, comm, op);
    work->comm = comm;
    work->ring = comm->job->config.ring;
    work->refs = 2;
    work->bucket = op->bucket;
    size_t at = 0;
    for (int i = 0; i < op->segment_count; i++) {
        work->segments[i] = op->segments[i];
        if (op->segments[i].bytes > 0) {
            work->starts[work->piece_count] = at;
            work->pieces[work->piece_count++] = op->segments[i];
            at += op->segments[i].bytes;
        }
    }
    work->starts[work->piece_count] = at;
    work->segment_count = op->segment_count;
    work->element_bytes = nb_dtype_size(op->dtype);
    enum nb_isa isa = nb_reduce_best();
    work->reduce = nb_reduce_kernel(isa, op->dtype, op->redop);
    work->scale = nb_scale_kernel(isa, op->dtype);
    nb_list_init(&work->link);
    nb_list_init(&work->order);
}

int nb_work_make(struct nb_comm *comm, const struct nb_op *op, const struct nb_algorithm *algorithm,
                 struct nb_work **out, struct nb_error *err) {
    struct nb_work *work = work_alloc(op->segment_count);
    if (work == NULL) {
        return nb_fail(err, -ENOMEM, "%s: cannot allocate %d pieces", op->name, op->segment_count);
    }
    work_fill(work, comm, op);
    size_t limit = comm->job->config.segment_bytes;
    int rc = nb_work_prepare(work, algorithm, err);
    if (rc == 0 && comm->size > 1 && work->desc.bytes > 0 && work->block_bytes > limit + BLOCK_SLACK) {
        rc = nb_fail(err, -EINVAL, "%s: %zu bytes exceed the limit for segments of %zu bytes", op->name,
                     (size_t)work->desc.bytes, limit);
    }
    rc = rc == 0 ? nb_buffer_pack(work, err) : rc;
    if (rc < 0) {
        work_free(work);
        return rc;
    }
    *out = work;
    return 0;
}

int nb_work_peers(struct nb_work *work, struct nb_error *err) {
    int rc = 0;
    for (int i = 0; rc == 0 && i < work->flow_count; i++) {
        const struct nb_flow *flow = nb_work_flow(work, i);
        rc = flow->blocks > 0 ? nb_job_peer_ready(work->comm->job, flow->peer, err) : 0;
    }
    return rc;
}

// The rounds of a key, now the most recently used ones. NULL: no memory.
static struct key_rounds *rounds_get(struct nb_operations *ops, uint64_t key) {
    struct nb_hash_node *node = nb_hash_get(&ops->rounds, key);
    bool full = node == NULL && ops->round_count == ROUNDS_MAX;
    struct key_rounds *found = NULL;
    if (node != NULL) {
        found = NB_CONTAINER(node, struct key_rounds, node);
    } else if (full) { // reuse the least recently used one
        found = NB_CONTAINER(ops->rounds_by_age.next, struct key_rounds, by_age);
    } else {
        found = calloc(1, sizeof *found);
    }
    if (found == NULL) {
        return NULL;
    }
    if (node == NULL) {
        nb_hash_remove(&found->node);
        nb_hash_put(&ops->rounds, &found->node, key);
        found->count = 0;
        found->named = false;
    }
    if (node != NULL || full) {
        nb_list_remove(&found->by_age);
    } else {
        ops->round_count++;
    }
    nb_list_insert(&ops->rounds_by_age, &found->by_age);
    return found;
}

void nb_work_take_round(struct nb_work *work) {
    struct key_rounds *rounds = rounds_get(&work->comm->job->ops, work->desc.key);
    work->names_key = work->ring != NULL && (rounds == NULL || !rounds->named);
    if (rounds != NULL) {
        work->round = rounds->count++;
        rounds->named = rounds->named || work->names_key;
    }
}

void nb_rounds_close(struct nb_job *job) {
    NB_LIST_EACH_SAFE(it, nx, &job->ops.rounds_by_age) {
        free(NB_CONTAINER(it, struct key_rounds, by_age));
    }
}

static uint64_t femtoseconds(double ns) {
    return (uint64_t)(ns * 1e6 + 0.5);
}

// Records the costs behind the choice of an algorithm. Only the progress owner writes info.costs.
static void costs_record(struct nb_job *job) {
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
        costs_record(work->comm->job);
        nb_ring_put_at(work->ring, now, NB_EV_OP_START, work->desc.key, work->round, 0, 0, 0, 0);
    }
    work->algorithm->start(work, now);
}

struct nb_flow *nb_work_flow(struct nb_work *work, int index) {
    if (index >= 2) {
        return &work->more[index - 2];
    }
    return index == 0 ? &work->in : &work->out;
}

// Adds to refs. The thread that drops the last reference frees the work.
static void refs_add(struct nb_work *work, int change) {
    if ((atomic_fetch_add(&work->refs, change) + change) % WORK_DONE == 0) {
        work_free(work);
    }
}

void nb_work_set_done(struct nb_work *work) {
    refs_add(work, WORK_DONE - 1);
}

void nb_work_discard(struct nb_work *work) {
    struct nb_job *job = work->comm->job;
    nb_list_remove(&work->link);
    if (work->algorithm->retire != NULL) {
        pthread_mutex_lock(&job->lock);
        work->algorithm->retire(work);
        pthread_mutex_unlock(&job->lock);
    }
    refs_add(work, -1);
}

void nb_work_release(struct nb_work *work) {
    if (work != NULL) {
        refs_add(work, -1);
    }
}

bool nb_work_test(const struct nb_work *work, int *code) {
    if (atomic_load_explicit(&work->refs, memory_order_acquire) < WORK_DONE) {
        return false;
    }
    *code = work->failure.code;
    return true;
}

void nb_work_times(const struct nb_work *work, struct nb_work_times *times) {
    int code;
    bool done = nb_work_test(work, &code);
    *times = done ? work->times : (struct nb_work_times){.submit_ns = work->times.submit_ns};
}

static void name_record(const struct nb_work *work, int64_t now_ns) {
    uint64_t part[4];
    _Static_assert(NB_NAME_MAX % sizeof part == 0, "a name is whole parts");
    size_t bytes = work->names_key ? strlen(work->desc.name) : 0;
    for (size_t at = 0; at < bytes; at += sizeof part) {
        memcpy(part, work->desc.name + at, sizeof part);
        nb_ring_put_at(work->comm->job->config.ring, now_ns, NB_EV_OP_NAME, work->desc.key, at, part[0], part[1],
                       part[2], part[3]);
    }
}

void nb_work_record_submit(const struct nb_work *work, int64_t now_ns) {
    const struct op_descriptor *d = &work->desc;
    uint64_t packed = (uint64_t)d->kind | (uint64_t)d->dtype << 8 | (uint64_t)(uint32_t)d->priority << 32;
    uint64_t ranks = work->comm->ranks == NULL ? 0 : (uint64_t)work->comm->size; // 0: all
    name_record(work, now_ns);
    nb_ring_put_event(work->comm->job->config.ring, &(struct nb_event){.time_ns = now_ns,
                                                                       .kind = NB_EV_OP_SUBMIT,
                                                                       .step = work->step,
                                                                       .key = d->key,
                                                                       .a = work->round,
                                                                       .b = d->bytes,
                                                                       .c = work->bucket,
                                                                       .d = d->comm | ranks << 32,
                                                                       .e = packed});
}
