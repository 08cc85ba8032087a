// Completion: records and counts a finished operation, and wakes its waiters.
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/list.h"
#include "engine/buffer.h"
#include "engine/communicator.h"
#include "engine/context.h"
#include "engine/device.h"
#include "engine/engine.h"
#include "engine/operation.h"
#include "trace/event.h"
#include "trace/ring.h"
#include "transport/lanes.h"

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
    nb_device_end(work);
    if (why != NULL) {
        work->failure = *why;
    } else {
        nb_buffer_unpack(work);
    }
    work->times.first_byte_ns = first_byte(work);
    work->times.done_ns = nb_now_ns();
    work_record(work);
    nb_list_remove(&work->link);
    nb_list_remove(&work->order);
    pthread_mutex_lock(&job->lock);
    if (why == NULL) {
        bytes_count(work, &job->info);
    }
    nb_hash_remove(&work->by_key);
    if (work->algorithm->retire != NULL) {
        work->algorithm->retire(work);
    }
    nb_work_set_done(work);
    pthread_cond_broadcast(&job->finished);
    pthread_mutex_unlock(&job->lock);
}
