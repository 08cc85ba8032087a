// An operation from submit to release, as the caller sees it.
#include <errno.h>
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/dtype.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/list.h"
#include "coll/choose.h"
#include "coll/reduce.h"
#include "engine/engine.h"
#include "engine/group.h"
#include "engine/internal.h"
#include "engine/local.h"
#include "engine/star.h"
#include "trace/event.h"
#include "trace/ring.h"
#include "transport/transport.h"

enum {
    PIECES_MAX = NB_LANE_IOV_MAX - 1, // of one block
    ROUNDS_MAX = 16 * 1024,           // keys whose rounds are counted: those of names used once must not add up
    BLOCK_SLACK = 64 * 1024           // of the lanes' buffers, beyond a segment
};

struct round {
    struct nb_hash_node node;
    struct nb_list by_age;
    uint32_t count;
};

uint64_t nb_key(const char *name) {
    uint64_t hash = 14695981039346656037u;
    for (const unsigned char *c = (const unsigned char *)name; *c != 0; c++) {
        hash = (hash ^ *c) * 1099511628211u;
    }
    return hash;
}

size_t nb_work_line(const struct nb_op *op) {
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
            return nb_fail(err, -EINVAL, "%s: a piece of %zu bytes is not whole %s elements", op->name,
                           op->segments[i].bytes, nb_dtype_name(op->dtype));
        }
    }
    size_t parts = op->kind == NB_OP_ALLGATHER || op->kind == NB_OP_REDUCESCATTER ? (size_t)comm->size : 1;
    parts = op->kind == NB_OP_ALLTOALL ? 2 * (size_t)comm->size : parts;
    if (op->kind == NB_OP_JOIN && (nb_work_line(op) != sizeof(int32_t) || comm->ranks != NULL)) {
        return nb_fail(err, -EINVAL, "%s: a join is of all ranks, and of %zu bytes", op->name, sizeof(int32_t));
    }
    if (nb_work_line(op) % (parts * element) != 0) {
        return nb_fail(err, -EINVAL, "%s: %zu bytes are not %zu equal parts", op->name, nb_work_line(op), parts);
    }
    if (op->kind == NB_OP_ALLTOALL && comm->size > 1 << STEP_BITS) {
        return nb_fail(err, -EINVAL, "%s: an all-to-all of %d ranks: %d at most", op->name, comm->size, 1 << STEP_BITS);
    }
    return 0;
}

static int op_check(const struct nb_comm *comm, const struct nb_op *op, struct nb_error *err) {
    if (op->name == NULL || op->name[0] == 0 || strlen(op->name) >= NB_NAME_MAX) {
        return nb_fail(err, -EINVAL, "a name of 1 to %d characters is needed", NB_NAME_MAX - 1);
    }
    if ((int)op->kind < 0 || op->kind >= NB_OP_KINDS || op->segment_count < 0) {
        return nb_fail(err, -EINVAL, "%s: no operation has the number %d and %d pieces", op->name, (int)op->kind,
                       op->segment_count);
    }
    if (nb_dtype_size(op->dtype) == 0) {
        return nb_fail(err, -EINVAL, "%s: no dtype has the number %d", op->name, op->dtype);
    }
    if (op->redop < 0 || op->redop >= NB_REDOPS) {
        return nb_fail(err, -EINVAL, "%s: no reduction has the number %d", op->name, op->redop);
    }
    if (op->root < 0 || op->root >= comm->size) {
        return nb_fail(err, -EINVAL, "%s: root %d is not among %d ranks", op->name, op->root, comm->size);
    }
    if (op->device != 0) {
        return nb_fail(err, -EINVAL, "%s: only host memory can travel, not device %d", op->name, op->device);
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

// True when some block of the line lies in more pieces than one segment can carry.
static bool too_scattered(const struct nb_work *work) {
    if (work->algorithm == NB_ALGORITHM_STAR) { // it may have to take lanes
        return work->piece_count > NB_LANE_IOV_MAX;
    }
    size_t block = work->block_bytes;
    int first = 0;
    for (int i = 0; i < work->piece_count; i++) {
        while (work->starts[first + 1] + block <= work->starts[i]) {
            first++;
        }
        if (i - first + 1 > PIECES_MAX) {
            return true;
        }
    }
    return false;
}

// That the pieces were joined, or parted again, from begin_ns until now.
static void pack_record(const struct nb_work *work, int64_t begin_ns, bool parted) {
    nb_ring_put_at(work->comm->job->config.ring, begin_ns, NB_EV_OP_PACK, work->desc.key, work->round, work->desc.bytes,
                   parted, (uint64_t)(nb_now_ns() - begin_ns), 0);
}

// The line as one piece of memory of the engine's own.
static int fuse(struct nb_work *work, struct nb_error *err) {
    int64_t begin_ns = nb_now_ns();
    size_t bytes = work->starts[work->piece_count];
    work->fused = malloc(bytes);
    if (work->fused == NULL) {
        return nb_fail(err, -ENOMEM, "%s: %zu bytes to join %d pieces", work->desc.name, bytes, work->piece_count);
    }
    for (int i = 0; i < work->piece_count; i++) {
        memcpy((char *)work->fused + work->starts[i], work->pieces[i].base, work->pieces[i].bytes);
    }
    work->pieces[0] = (struct nb_segment){.base = work->fused, .bytes = bytes};
    work->piece_count = 1;
    work->starts[1] = bytes;
    pack_record(work, begin_ns, false);
    return 0;
}

static void unfuse(const struct nb_work *work) {
    int64_t begin_ns = nb_now_ns();
    size_t at = 0;
    for (int i = 0; i < work->segment_count; i++) {
        if (work->segments[i].bytes > 0) {
            memcpy(work->segments[i].base, (char *)work->fused + at, work->segments[i].bytes);
        }
        at += work->segments[i].bytes;
    }
    pack_record(work, begin_ns, true);
}

static void desc_fill(struct desc *desc, const struct nb_comm *comm, const struct nb_op *op) {
    memset(desc, 0, sizeof *desc);
    desc->key = nb_comm_key(comm, op->key != 0 ? op->key : nb_key(op->name));
    desc->bytes = nb_work_line(op);
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

// The one that rank 0 will say, most probably: what it needs is made on the caller's thread.
static enum nb_algorithm algorithm_likely(const struct nb_comm *comm, const struct nb_op *op) {
    if (op->kind != NB_OP_ALLREDUCE) {
        return nb_run_only(op->kind);
    }
    return comm->size > 1 ? nb_costs_guess(comm->job, comm->size, nb_work_line(op)) : NB_ALGORITHM_RING;
}

int nb_work_make(struct nb_comm *comm, const struct nb_op *op, struct nb_work **out, struct nb_error *err) {
    int rc = op_check(comm, op, err);
    if (rc < 0) {
        return rc;
    }
    struct nb_work *work = work_alloc(op->segment_count);
    if (work == NULL) {
        return nb_fail(err, -ENOMEM, "%s: %d pieces", op->name, op->segment_count);
    }
    nb_list_init(&work->link);
    nb_list_init(&work->by_key.link);
    work->comm = comm;
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
    size_t bytes = line_starts(work->pieces, work->piece_count, work->starts);
    work->element_bytes = nb_dtype_size(op->dtype);
    enum nb_isa isa = nb_reduce_best();
    work->reduce = nb_reduce_kernel(isa, op->dtype, op->redop);
    work->scale = nb_scale_kernel(isa, op->dtype);
    rc = nb_run_prepare(work, algorithm_likely(comm, op), err);
    if (rc == 0 && comm->size > 1 && bytes > 0 && work->block_bytes > comm->job->config.segment_bytes + BLOCK_SLACK) {
        rc = nb_fail(err, -EINVAL, "%s: %zu bytes are too many for segments of %zu bytes", op->name, bytes,
                     comm->job->config.segment_bytes);
    }
    if (rc == 0 && !nb_local_takes(comm, op->kind) && work->piece_count > 1 && too_scattered(work)) {
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

// Adds to refs: whoever gives up the last of them frees the work.
static void refs_add(struct nb_work *work, int change) {
    if ((atomic_fetch_add(&work->refs, change) + change) % WORK_DONE > 0) {
        return;
    }
    free(work->fused);
    free(work->stand_in);
    nb_run_unprepare(work);
    free(work->pieces);
    free(work->starts);
    free(work);
}

void nb_work_unref(struct nb_work *work) {
    refs_add(work, -1);
}

static uint32_t round_next(struct nb_job *job, uint64_t key) {
    struct nb_hash_node *node = nb_hash_get(&job->rounds, key);
    struct round *round = node != NULL ? NB_CONTAINER(node, struct round, node) : NULL;
    if (round == NULL && job->round_count < ROUNDS_MAX) {
        round = calloc(1, sizeof *round);
        job->round_count += round != NULL;
    } else if (round == NULL) { // the one that was not used for longest
        round = NB_CONTAINER(job->rounds_by_age.next, struct round, by_age);
        round->count = 0;
        nb_list_remove(&round->node.link);
        nb_list_remove(&round->by_age);
    } else {
        nb_list_remove(&round->by_age);
    }
    if (round == NULL) {
        return 0;
    }
    if (node == NULL) {
        nb_hash_put(&job->rounds, &round->node, key);
    }
    nb_list_insert(&job->rounds_by_age, &round->by_age);
    return round->count++;
}

void nb_work_rounds_free(struct nb_job *job) {
    NB_LIST_EACH_SAFE(it, nx, &job->rounds_by_age) {
        free(NB_CONTAINER(it, struct round, by_age));
    }
}

// The name of a key, which all other events lack, where it is new.
static void name_record(const struct nb_work *work) {
    uint64_t part[4];
    _Static_assert(NB_NAME_MAX % sizeof part == 0, "a name is whole parts");
    size_t bytes = work->round == 0 ? strlen(work->desc.name) : 0;
    for (size_t at = 0; at < bytes; at += sizeof part) {
        memcpy(part, work->desc.name + at, sizeof part);
        nb_ring_put_at(work->comm->job->config.ring, work->times.submit_ns, NB_EV_OP_NAME, work->desc.key, at, part[0],
                       part[1], part[2], part[3]);
    }
}

int nb_submit(struct nb_comm *comm, const struct nb_op *op, struct nb_work **out, struct nb_error *err) {
    struct nb_job *job = comm->job;
    struct nb_work *work = NULL;
    int rc = nb_work_make(comm, op, &work, err);
    if (rc < 0 || work == NULL) {
        return rc;
    }
    work->times.submit_ns = nb_now_ns();
    pthread_mutex_lock(&job->lock);
    if (job->failure.code != 0 || job->stop) {
        const struct nb_error closed = {.code = NB_ECLOSED, .peer = NB_NO_PEER, .text = "the job was shut down"};
        const struct nb_error *why = job->failure.code != 0 ? &job->failure : &closed;
        rc = nb_fail_peer(err, why->code, why->peer, "%s", why->text);
    } else if (nb_hash_get(&job->in_flight, work->desc.key) != NULL) {
        rc = nb_fail(err, -EEXIST, "%s: an operation of this name is still under way on rank %d", op->name, job->rank);
    } else {
        nb_hash_put(&job->in_flight, &work->by_key, work->desc.key);
        work->round = round_next(job, work->desc.key);
        if (comm->size > 1) {
            nb_list_insert(&job->inbox, &work->link);
            job->asked = true;
            nb_drive_tell(job, op);
        }
    }
    pthread_mutex_unlock(&job->lock);
    if (rc < 0) {
        work->refs = 1;
        nb_work_unref(work);
        return rc;
    }
    name_record(work);
    const struct desc *d = &work->desc;
    uint64_t packed = (uint64_t)d->kind | (uint64_t)d->dtype << 8 | (uint64_t)(uint32_t)d->priority << 32;
    nb_ring_put_at(job->config.ring, work->times.submit_ns, NB_EV_OP_SUBMIT, d->key, work->round, d->bytes,
                   work->bucket, d->comm, packed);
    *out = work;
    if (comm->size == 1) {
        nb_run_alone(work);
    }
    return 0;
}

// Bytes of the operation by lane, and the end, into the ring.
static void work_record(struct nb_work *work) {
    struct nb_job *job = work->comm->job;
    uint64_t key = work->desc.key;
    uint64_t sent = 0;
    uint64_t received = 0;
    if (job->config.ring == NULL || work->quiet) {
        return;
    }
    for (int lane = 0; work->running && job->lanes != NULL && lane < job->info.streams_open; lane++) {
        uint64_t out = 0;
        uint64_t in = 0;
        for (int i = 0; i < work->flow_count; i += 2) {
            in += nb_work_flow(work, i)->lane_bytes[lane];
            out += nb_work_flow(work, i + 1)->lane_bytes[lane];
        }
        sent += out;
        received += in;
        if (out + in > 0) {
            nb_ring_put(job->config.ring, NB_EV_OP_LANE, key, work->round, (uint64_t)lane, out, in, 0);
        }
    }
    if (work->algorithm == NB_ALGORITHM_STAR) {
        sent = work->out.bytes_moved;
        received = work->in.bytes_moved;
        nb_ring_put(job->config.ring, NB_EV_OP_LANE, key, work->round, NB_LANE_CONTROL, sent, received, 0);
    }
    uint64_t algorithm = work->local.taken ? nb_local_record(work) : (uint64_t)work->algorithm;
    if (work->times.first_byte_ns != 0) {
        nb_ring_put_at(job->config.ring, work->times.first_byte_ns, NB_EV_OP_FIRST_BYTE, key, work->round, 0, 0, 0, 0);
    }
    nb_ring_put_at(job->config.ring, work->times.done_ns, NB_EV_OP_DONE, key, work->round, sent, received, algorithm,
                   (uint64_t)(int64_t)work->failure.code);
}

static int64_t first_byte(struct nb_work *work) {
    int64_t first = 0;
    for (int i = 0; i < work->flow_count; i += 2) {
        int64_t at = nb_work_flow(work, i)->first_ns;
        first = at != 0 && (first == 0 || at < first) ? at : first;
    }
    return first;
}

static void bytes_count(struct nb_work *work, struct nb_job_info *info) {
    for (int i = 0; i < work->flow_count; i += 2) {
        info->bytes_in += nb_work_flow(work, i)->bytes_moved;
        info->bytes_out += nb_work_flow(work, i + 1)->bytes_moved;
    }
    info->shm_bytes += work->local.bytes_in + work->local.bytes_out;
    info->shm_staged_bytes += work->local.staged ? work->local.bytes_in : 0;
}

void nb_work_finish(struct nb_work *work, const struct nb_error *why) {
    struct nb_job *job = work->comm->job;
    if (why != NULL) {
        work->failure = *why;
    } else if (work->fused != NULL) {
        unfuse(work);
    }
    work->times.first_byte_ns = first_byte(work);
    work->times.done_ns = nb_now_ns();
    work_record(work);
    nb_list_remove(&work->link);
    if (work->quiet) {
        nb_work_unref(work);
        return;
    }
    pthread_mutex_lock(&job->lock);
    if (why == NULL) {
        bytes_count(work, &job->info);
    }
    nb_list_remove(&work->by_key.link);
    nb_stepper_retire(work);
    refs_add(work, WORK_DONE - 1); // at once: a caller that waits for it is the last, and frees it
    pthread_cond_broadcast(&job->finished);
    pthread_mutex_unlock(&job->lock);
}

bool nb_work_test(const struct nb_work *work, int *code) {
    if (atomic_load_explicit(&work->refs, memory_order_acquire) < WORK_DONE) {
        return false;
    }
    *code = work->failure.code;
    return true;
}

int nb_work_wait(struct nb_work *work, int timeout_ms, struct nb_error *err) {
    int code = 0;
    if (timeout_ms != 0 && !nb_work_test(work, &code)) { // a work that is done may outlive its job
        nb_drive_wait(work, timeout_ms < 0 ? INT64_MAX : nb_now_ns() + (int64_t)timeout_ms * 1000000);
    }
    if (!nb_work_test(work, &code)) {
        return -EAGAIN;
    }
    if (code != 0 && err != NULL) {
        *err = work->failure;
    }
    return code;
}

void nb_work_release(struct nb_work *work) {
    if (work != NULL) {
        nb_work_unref(work);
    }
}

void nb_work_times(const struct nb_work *work, struct nb_work_times *times) {
    int code;
    bool done = nb_work_test(work, &code);
    *times = done ? work->times : (struct nb_work_times){.submit_ns = work->times.submit_ns};
}
