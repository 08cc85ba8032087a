// Join: rank 0's record of joined ranks, and the zeros that a joined rank contributes.
#include "engine/joined_ranks.h"

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bits.h"
#include "base/error.h"
#include "base/list.h"
#include "coll/choose.h"
#include "engine/algorithms.h"
#include "engine/buffer.h"
#include "engine/context.h"
#include "engine/descriptor.h"
#include "engine/device.h"
#include "engine/engine.h"
#include "engine/operation.h"

int nb_join_open(struct nb_job *job, struct nb_error *err) {
    job->joined.ranks = calloc(nb_bits_words((size_t)job->size), sizeof *job->joined.ranks);
    return job->joined.ranks != NULL ? 0
                                     : nb_fail(err, -ENOMEM, "cannot allocate the join state of %d ranks", job->size);
}

void nb_join_close(struct nb_job *job) {
    free(job->joined.ranks);
}

void nb_join_add(struct nb_job *job, int rank) {
    nb_bits_set(job->joined.ranks, (size_t)rank);
    job->joined.count++;
    job->joined.last = rank;
}

bool nb_join_has(const struct nb_job *job, int rank) {
    return job->joined.count > 0 && nb_bits_get(job->joined.ranks, (size_t)rank);
}

int nb_join_over(struct nb_job *job) {
    memset(job->joined.ranks, 0, nb_bits_words((size_t)job->size) * sizeof *job->joined.ranks);
    job->joined.count = 0;
    return job->joined.last;
}

bool nb_join_permits(int kind) {
    return kind == NB_OP_ALLREDUCE || kind == NB_OP_BARRIER;
}

void nb_join_refuse(const struct op_descriptor *desc, int rank, char *text, size_t room) {
    if (!nb_join_permits(desc->kind)) {
        snprintf(text, room,
                 "%s '%s' is not possible after rank %d has joined: only all-reduces and barriers are supported",
                 nb_kind_name(desc->kind), desc->name, rank);
    }
}

// Makes the work of an operation that no caller here waits for, over its own zeros. It is prepared when it starts.
static struct nb_work *work_make(struct nb_comm *comm, const struct op_descriptor *desc, struct nb_error *err) {
    struct nb_segment line = {.base = calloc(1, desc->bytes + 1), .bytes = desc->bytes};
    struct nb_op op = {.name = desc->name,
                       .kind = (enum nb_op_kind)desc->kind,
                       .dtype = desc->dtype,
                       .redop = desc->redop,
                       .root = desc->root,
                       .shape = desc->shape,
                       .priority = desc->priority,
                       .scaled = true,
                       .prescale = desc->prescale,
                       .postscale = desc->postscale,
                       .segments = &line,
                       .segment_count = 1};
    struct nb_work *work = NULL;
    if (line.base == NULL) {
        nb_fail(err, -ENOMEM, "%s: cannot allocate %zu zeros for a joined rank", desc->name, line.bytes);
        return NULL;
    }
    if (nb_op_check(comm, &op, err) < 0 || nb_work_make(comm, &op, &nb_alone, &work, err) < 0) {
        free(line.base);
        return NULL;
    }
    work->desc.key = desc->key;
    work->zeros = line.base;
    work->refs = 1;
    work->ring = NULL; // not recorded: it belongs to no step of this rank
    if (desc->device != 0 && nb_device_attach_zeros(work, err) < 0) {
        nb_work_discard(work);
        return NULL;
    }
    return work;
}

void nb_join_contribute(struct nb_job *job, const struct op_descriptor *desc) {
    struct nb_error why = {0};
    struct nb_comm *comm = nb_comm_find(job, desc->comm);
    if (comm == NULL) {
        nb_job_wire_fail(job, 0, "an operation of a communicator without this rank");
        return;
    }
    struct nb_work *work = work_make(comm, desc, &why);
    if (work == NULL) {
        nb_job_fail(job, &why, true);
        return;
    }
    pthread_mutex_lock(&job->lock);
    nb_work_take_round(work);
    pthread_mutex_unlock(&job->lock);
    nb_list_insert(&job->ops.waiting, &work->link);
}

static bool is_join(const struct nb_work *work) {
    return work->desc.kind == NB_OP_JOIN;
}

static int prepare(struct nb_work *work, struct nb_error *err) {
    (void)work;
    (void)err;
    return 0;
}

static void release(struct nb_work *work) {
    (void)work;
}

// All ranks have joined: the result is the rank that joined last.
static void start(struct nb_work *work, int64_t now_ns) {
    int32_t rank = (int32_t)work->detail;
    (void)now_ns;
    nb_buffer_place(work, nb_buffer_all(work), &rank);
    nb_work_finish(work, NULL);
}

const struct nb_algorithm nb_join = {.id = NB_ALGORITHM_JOIN,
                                     .possible = is_join,
                                     .prepare = prepare,
                                     .release = release,
                                     .start = start,
                                     .cancel = nb_flows_cancel,
                                     .waits_for = nb_flows_wait_for,
                                     .record = nb_flows_record};
