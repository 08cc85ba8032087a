// Inline all-reduce: sends, keeps, reduces and places the data that travels with negotiation.
#include "engine/inline_allreduce.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "coll/choose.h"
#include "coll/ring_schedule.h"
#include "engine/algorithms.h"
#include "engine/buffer.h"
#include "engine/context.h"
#include "engine/control.h"
#include "engine/engine.h"
#include "engine/operation.h"
#include "trace/event.h"
#include "trace/ring.h"
#include "transport/lanes.h"

enum {
    QUEUED_MAX = 1024 * 1024,  // limit of queued bytes on a control connection for sending data inline
    KEPT_MAX = 8 * 1024 * 1024 // limit of the memory of all kept buffers
};

struct inline_buffers {
    size_t bytes; // of one rank's buffer
    int count;
    bool *have; // by rank
    unsigned char *buffers;
};

static size_t buffers_bytes(const struct nb_job *job, const struct inline_buffers *parts) {
    return (size_t)job->size * parts->bytes;
}

static struct inline_buffers *parts_make(struct nb_job *job, size_t bytes) {
    struct inline_buffers *parts = calloc(1, sizeof *parts);
    bool *have = calloc((size_t)job->size, sizeof *have);
    unsigned char *buffers = malloc((size_t)job->size * bytes);
    if (parts == NULL || have == NULL || buffers == NULL) {
        free(parts);
        free(have);
        free(buffers);
        return NULL;
    }
    *parts = (struct inline_buffers){.bytes = bytes, .have = have, .buffers = buffers};
    job->inline_bytes += buffers_bytes(job, parts);
    return parts;
}

bool nb_inline_store(struct nb_job *job, struct inline_buffers **out, int rank, const void *buffer, size_t bytes) {
    struct inline_buffers *parts = *out;
    if (parts != NULL && parts->count == 0 && parts->bytes != bytes) { // the size differs from the last round
        nb_inline_free(job, parts);
        parts = NULL;
    }
    *out = parts = parts != NULL ? parts : parts_make(job, bytes);
    if (parts == NULL || parts->bytes != bytes || parts->have[rank]) {
        return false;
    }
    memcpy(parts->buffers + (size_t)rank * bytes, buffer, bytes);
    parts->have[rank] = true;
    parts->count++;
    return true;
}

bool nb_inline_complete(const struct nb_job *job, const struct inline_buffers *parts, size_t bytes) {
    return parts != NULL && parts->count == job->size - 1 && parts->bytes == bytes;
}

void nb_inline_free(struct nb_job *job, struct inline_buffers *parts) {
    if (parts != NULL) {
        job->inline_bytes -= buffers_bytes(job, parts);
        free(parts->have);
        free(parts->buffers);
        free(parts);
    }
}

void nb_inline_reset(struct nb_job *job, struct inline_buffers **parts) {
    struct inline_buffers *p = *parts;
    if (p != NULL && job->inline_bytes > KEPT_MAX) {
        nb_inline_free(job, p);
        *parts = NULL;
    } else if (p != NULL) {
        memset(p->have, 0, (size_t)job->size * sizeof *p->have);
        p->count = 0;
    }
}

static void over(struct nb_work *work, uint64_t seq, uint64_t sent, uint64_t received) {
    int64_t now = nb_now_ns();
    (void)nb_work_prepare(work, &nb_inline, NULL); // this prepare() cannot fail
    work->seq = seq;
    work->times.start_ns = work->times.agreed_ns;
    work->in.first_ns = now;
    work->in.bytes_moved = received;
    work->out.bytes_moved = sent;
    nb_ring_put_at(work->ring, work->times.start_ns, NB_EV_OP_START, work->desc.key, work->round, 0, 0, 0, 0);
    nb_work_finish(work, NULL);
}

void nb_inline_sum(struct nb_job *job, struct nb_work *work, const struct inline_buffers *parts,
                   const struct wire_go *go) {
    struct {
        struct wire_go head;
        unsigned char buffer[NB_INLINE_MAX];
    } message;
    struct nb_range all = nb_buffer_all(work);
    uint64_t others = (uint64_t)job->size - 1;
    nb_buffer_scale(work, all, work->desc.prescale);
    for (int rank = 1; rank < job->size; rank++) {
        nb_buffer_reduce(work, all, parts->buffers + (size_t)rank * parts->bytes);
    }
    nb_buffer_scale(work, all, work->desc.postscale);
    message.head = *go;
    nb_buffer_read(work, all, message.buffer);
    nb_control_broadcast(job, CTL_INLINE_RESULT, &message, sizeof message.head + all.bytes);
    over(work, go->seq, others * all.bytes, others * all.bytes);
}

void nb_inline_finish(struct nb_work *work, uint64_t seq, const void *buffer) {
    nb_buffer_place(work, nb_buffer_all(work), buffer);
    over(work, seq, work->desc.bytes, work->desc.bytes);
}

// Always false: rank 0 answers with the result, never with a start.
static bool is_possible(const struct nb_work *work) {
    (void)work;
    return false;
}

static bool announce(const struct nb_work *work, uint32_t id) {
    struct nb_job *job = work->comm->job;
    struct {
        struct wire_inline head;
        unsigned char buffer[NB_INLINE_MAX];
    } message;
    size_t bytes = work->desc.bytes;
    if (job->controls[0].out_bytes > QUEUED_MAX) {
        return false;
    }
    message.head = (struct wire_inline){.id = id};
    nb_buffer_read(work, nb_buffer_all(work), message.buffer);
    if (work->desc.prescale != 1) {
        work->scale(message.buffer, bytes / work->element_bytes, work->desc.prescale);
    }
    nb_control_queue(&job->controls[0], CTL_INLINE, &message, sizeof message.head + bytes);
    return true;
}

static enum nb_algorithm_id record(struct nb_work *work, uint64_t *sent, uint64_t *received) {
    *sent = work->out.bytes_moved;
    *received = work->in.bytes_moved;
    nb_ring_put(work->ring, NB_EV_OP_LANE, work->desc.key, work->round, NB_LANE_CONTROL, *sent, *received, 0);
    return NB_ALGORITHM_INLINE;
}

static int prepare(struct nb_work *work, struct nb_error *err) {
    (void)err;
    work->in = (struct nb_flow){.dir = NB_FLOW_IN};
    work->out = (struct nb_flow){.dir = NB_FLOW_OUT};
    work->flow_count = 2;              // for the trace: bytes received and sent
    work->block_bytes = NB_INLINE_MAX; // another algorithm may still send it over lanes
    return 0;
}

static void release(struct nb_work *work) {
    (void)work;
}

const struct nb_algorithm nb_inline = {.id = NB_ALGORITHM_INLINE,
                                       .possible = is_possible,
                                       .prepare = prepare,
                                       .release = release,
                                       .cancel = nb_flows_cancel,
                                       .waits_for = nb_flows_wait_for,
                                       .record = record,
                                       .announce = announce};
