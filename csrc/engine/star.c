// What is sent, kept, added and placed where a sum travels with the agreement.
#include "engine/star.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "coll/choose.h"
#include "coll/sched.h"
#include "engine/engine.h"
#include "engine/internal.h"
#include "engine/line.h"
#include "trace/event.h"
#include "trace/ring.h"

enum {
    QUEUED_MAX = 1024 * 1024,  // of a control connection: what is not read in time must not pile up there
    KEPT_MAX = 8 * 1024 * 1024 // of the lines of all operations, where one that rests may keep its place
};

struct parts {
    size_t bytes; // of a line
    int count;
    bool *have; // by rank
    unsigned char *lines;
};

bool nb_star_give(struct nb_job *job, const struct nb_work *work, uint32_t id) {
    struct {
        struct wire_part head;
        unsigned char line[NB_STAR_MAX];
    } message;
    size_t bytes = work->desc.bytes;
    if (job->controls[0].out_bytes > QUEUED_MAX) {
        return false;
    }
    message.head = (struct wire_part){.id = id};
    nb_line_read(work, nb_line_all(work), message.line);
    if (work->desc.prescale != 1) {
        work->scale(message.line, bytes / work->element_bytes, work->desc.prescale);
    }
    nb_control_queue(&job->controls[0], CTL_PART, &message, sizeof message.head + bytes);
    return true;
}

static size_t lines_bytes(const struct nb_job *job, const struct parts *parts) {
    return (size_t)job->size * parts->bytes;
}

static struct parts *parts_make(struct nb_job *job, size_t bytes) {
    struct parts *parts = calloc(1, sizeof *parts);
    bool *have = calloc((size_t)job->size, sizeof *have);
    unsigned char *lines = malloc((size_t)job->size * bytes);
    if (parts == NULL || have == NULL || lines == NULL) {
        free(parts);
        free(have);
        free(lines);
        return NULL;
    }
    *parts = (struct parts){.bytes = bytes, .have = have, .lines = lines};
    job->star_bytes += lines_bytes(job, parts);
    return parts;
}

bool nb_star_keep(struct nb_job *job, struct parts **out, int rank, const void *line, size_t bytes) {
    struct parts *parts = *out;
    if (parts != NULL && parts->count == 0 && parts->bytes != bytes) { // another size than last time
        nb_star_forget(job, parts);
        parts = NULL;
    }
    *out = parts = parts != NULL ? parts : parts_make(job, bytes);
    if (parts == NULL || parts->bytes != bytes || parts->have[rank]) {
        return false;
    }
    memcpy(parts->lines + (size_t)rank * bytes, line, bytes);
    parts->have[rank] = true;
    parts->count++;
    return true;
}

bool nb_star_complete(const struct nb_job *job, const struct parts *parts, size_t bytes) {
    return parts != NULL && parts->count == job->size - 1 && parts->bytes == bytes;
}

void nb_star_forget(struct nb_job *job, struct parts *parts) {
    if (parts != NULL) {
        job->star_bytes -= lines_bytes(job, parts);
        free(parts->have);
        free(parts->lines);
        free(parts);
    }
}

void nb_star_rest(struct nb_job *job, struct parts **parts) {
    struct parts *p = *parts;
    if (p != NULL && job->star_bytes > KEPT_MAX) {
        nb_star_forget(job, p);
        *parts = NULL;
    } else if (p != NULL) {
        memset(p->have, 0, (size_t)job->size * sizeof *p->have);
        p->count = 0;
    }
}

static void over(struct nb_work *work, uint64_t seq, uint64_t sent, uint64_t received) {
    struct nb_job *job = work->comm->job;
    int64_t now = nb_now_ns();
    work->seq = seq;
    work->algorithm = NB_ALGORITHM_STAR;
    work->times.start_ns = work->times.agreed_ns;
    work->in.first_ns = now;
    work->in.bytes_moved = received;
    work->out.bytes_moved = sent;
    nb_ring_put_at(job->config.ring, work->times.start_ns, NB_EV_OP_START, work->desc.key, work->round, 0, 0, 0, 0);
    nb_work_finish(work, NULL);
}

void nb_star_sum(struct nb_job *job, struct nb_work *work, const struct parts *parts, const struct wire_go *go) {
    struct {
        struct wire_go head;
        unsigned char line[NB_STAR_MAX];
    } message;
    struct nb_range all = nb_line_all(work);
    uint64_t others = (uint64_t)job->size - 1;
    nb_line_scale(work, all, work->desc.prescale);
    for (int rank = 1; rank < job->size; rank++) {
        nb_line_reduce(work, all, parts->lines + (size_t)rank * parts->bytes);
    }
    nb_line_scale(work, all, work->desc.postscale);
    message.head = *go;
    nb_line_read(work, all, message.line);
    nb_control_broadcast(job, CTL_TOTAL, &message, sizeof message.head + all.bytes);
    over(work, go->seq, others * all.bytes, others * all.bytes);
}

void nb_star_land(struct nb_work *work, uint64_t seq, const void *line) {
    nb_line_place(work, nb_line_all(work), line);
    over(work, seq, work->desc.bytes, work->desc.bytes);
}
