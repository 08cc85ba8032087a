// Completion: records and counts a finished operation, wakes its waiters, and frees it with its last reference.
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/list.h"
#include "coll/choose.h"
#include "engine/communicator.h"
#include "engine/context.h"
#include "engine/engine.h"
#include "engine/operation.h"
#include "trace/event.h"
#include "trace/ring.h"
#include "transport/lanes.h"

struct nb_flow *nb_work_flow(struct nb_work *work, int index) {
    if (index >= 2) {
        return &work->more[index - 2];
    }
    return index == 0 ? &work->in : &work->out;
}

void nb_work_unprepare(struct nb_work *work) {
    if (work->algorithm != NULL) {
        work->algorithm->release(work);
    }
    work->algorithm = NULL;
    work->flow_count = 0;
}

// Adds to refs. The thread that drops the last reference frees the work.
static void refs_add(struct nb_work *work, int change) {
    if ((atomic_fetch_add(&work->refs, change) + change) % WORK_DONE > 0) {
        return;
    }
    free(work->fused);
    free(work->stand_in);
    nb_work_unprepare(work);
    free(work->pieces);
    free(work->starts);
    free(work);
}

void nb_work_unref(struct nb_work *work) {
    refs_add(work, -1);
}

void nb_work_record_pack(const struct nb_work *work, int64_t begin_ns, bool parted) {
    nb_ring_put_at(work->ring, begin_ns, NB_EV_OP_PACK, work->desc.key, work->round, work->desc.bytes, parted,
                   (uint64_t)(nb_now_ns() - begin_ns), 0);
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
    nb_work_record_pack(work, begin_ns, true);
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

// Records the operation's bytes by lane, and its end.
static void work_record(struct nb_work *work) {
    uint64_t key = work->desc.key;
    uint64_t sent = 0;
    uint64_t received = 0;
    if (work->ring == NULL) {
        return;
    }
    uint64_t algorithm = (uint64_t)work->algorithm->record(work, &sent, &received);
    if (work->times.first_byte_ns != 0) {
        nb_ring_put_at(work->ring, work->times.first_byte_ns, NB_EV_OP_FIRST_BYTE, key, work->round, 0, 0, 0, 0);
    }
    nb_ring_put_at(work->ring, work->times.done_ns, NB_EV_OP_DONE, key, work->round, sent, received, algorithm,
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
    info->shm_bytes += work->shared.bytes_in + work->shared.bytes_out;
    info->shm_staged_bytes += work->shared.staged ? work->shared.bytes_in : 0;
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
    pthread_mutex_lock(&job->lock);
    if (why == NULL) {
        bytes_count(work, &job->info);
    }
    nb_list_remove(&work->by_key.link);
    if (work->algorithm->retire != NULL) {
        work->algorithm->retire(work);
    }
    refs_add(work, WORK_DONE - 1); // in one step: a waiting caller then holds the last reference and frees the work
    pthread_cond_broadcast(&job->finished);
    pthread_mutex_unlock(&job->lock);
}

void nb_work_discard(struct nb_work *work) {
    nb_list_remove(&work->link);
    nb_work_unref(work);
}

bool nb_work_test(const struct nb_work *work, int *code) {
    if (atomic_load_explicit(&work->refs, memory_order_acquire) < WORK_DONE) {
        return false;
    }
    *code = work->failure.code;
    return true;
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
