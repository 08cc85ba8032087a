// What does a rank do that has joined, and how does rank 0 know?
#include "engine/join.h"

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bits.h"
#include "base/error.h"
#include "base/list.h"
#include "engine/engine.h"
#include "engine/internal.h"
#include "engine/line.h"

void nb_join_add(struct nb_job *job, int rank) {
    nb_bits_set(job->joined, (size_t)rank);
    job->joined_count++;
    job->joined_last = rank;
}

bool nb_join_has(const struct nb_job *job, int rank) {
    return job->joined_count > 0 && nb_bits_get(job->joined, (size_t)rank);
}

int nb_join_over(struct nb_job *job) {
    memset(job->joined, 0, nb_bits_words((size_t)job->size) * sizeof *job->joined);
    job->joined_count = 0;
    return job->joined_last;
}

bool nb_join_spares(int kind) {
    return kind == NB_OP_ALLREDUCE || kind == NB_OP_BARRIER;
}

void nb_join_refuse(const struct desc *desc, int rank, char *text, size_t room) {
    if (!nb_join_spares(desc->kind)) {
        snprintf(text, room, "%s '%s' is not possible after rank %d has joined: only all-reduces and barriers are",
                 nb_kind_name(desc->kind), desc->name, rank);
    }
}

// The work of an operation that nobody here waits for, over zeros of its own.
static struct nb_work *work_make(struct nb_comm *comm, const struct desc *desc, struct nb_error *err) {
    struct nb_segment line = {.base = calloc(1, desc->bytes + 1), .bytes = desc->bytes};
    struct nb_op op = {.name = desc->name,
                       .kind = (enum nb_op_kind)desc->kind,
                       .dtype = desc->dtype,
                       .redop = desc->redop,
                       .root = desc->root,
                       .shape = desc->shape,
                       .priority = desc->priority,
                       .prescale = desc->prescale,
                       .postscale = desc->postscale,
                       .segments = &line,
                       .segment_count = 1};
    struct nb_work *work = NULL;
    if (line.base == NULL) {
        nb_fail(err, -ENOMEM, "%s: %zu zeros in place of what was not submitted", desc->name, line.bytes);
        return NULL;
    }
    if (nb_work_make(comm, &op, &work, err) < 0) {
        free(line.base);
        return NULL;
    }
    work->desc.key = desc->key;
    work->stand_in = line.base;
    work->refs = 1;
    return work;
}

void nb_join_stand_in(struct nb_job *job, const struct desc *desc) {
    struct nb_error why = {0};
    struct nb_comm *comm = nb_comm_find(job, desc->comm);
    if (comm == NULL) {
        nb_job_wire_fail(job, 0, "an operation of a comm that this rank is not of");
        return;
    }
    struct nb_work *work = work_make(comm, desc, &why);
    if (work == NULL) {
        nb_job_fail(job, &why, true);
        return;
    }
    nb_list_insert(&job->waiting, &work->link);
}

void nb_join_end(struct nb_work *work, int last) {
    int32_t rank = last;
    nb_line_place(work, nb_line_all(work), &rank);
    nb_work_finish(work, NULL);
}
