// Submissions: from a call on any thread to the inbox of the progress owner.
#include "engine/submit.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/list.h"
#include "engine/autotune.h"
#include "engine/communicator.h"
#include "engine/context.h"
#include "engine/device.h"
#include "engine/engine.h"
#include "engine/operation.h"
#include "engine/progress_owner.h"
#include "trace/ring.h"

enum { ROUNDS_MAX = 16 * 1024 }; // keys with a round count; limited, because some names are used only once

struct key_rounds {
    struct nb_hash_node node;
    struct nb_list by_age;
    uint32_t count;
};

static uint32_t round_next(struct nb_job *job, uint64_t key) {
    struct nb_operations *ops = &job->ops;
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
        return 0;
    }
    if (node == NULL) {
        nb_hash_remove(&found->node);
        nb_hash_put(&ops->rounds, &found->node, key);
        found->count = 0;
    }
    if (node != NULL || full) {
        nb_list_remove(&found->by_age);
    } else {
        ops->round_count++;
    }
    nb_list_insert(&ops->rounds_by_age, &found->by_age);
    return found->count++;
}

void nb_submit_close(struct nb_job *job) {
    NB_LIST_EACH_SAFE(it, nx, &job->ops.rounds_by_age) {
        free(NB_CONTAINER(it, struct key_rounds, by_age));
    }
}

static int refuse(const struct nb_job *job, struct nb_error *err) {
    const struct nb_error closed = {.code = NB_ECLOSED, .peer = NB_NO_PEER, .text = "the job was shut down"};
    const struct nb_error *why = job->failure.code != 0 ? &job->failure : &closed;
    return nb_fail_peer(err, why->code, why->peer, "%s", why->text);
}

// Accepts a work, with the lock: gives it its round, and passes it to the progress owner.
static int enter(struct nb_job *job, struct nb_work *work, bool awaited, struct nb_error *err) {
    if (job->failure.code != 0 || job->progress.stop) {
        return refuse(job, err);
    }
    if (nb_hash_get(&job->ops.in_flight, work->desc.key) != NULL) {
        return nb_fail(err, -EEXIST, "%s: an operation of this name is still under way on rank %d", work->desc.name,
                       job->rank);
    }
    nb_hash_put(&job->ops.in_flight, &work->by_key, work->desc.key);
    work->round = round_next(job, work->desc.key);
    if (work->comm->size > 1) {
        nb_list_insert(&job->inbox.works, &work->link);
        job->inbox.filled = true;
        nb_progress_notify(job, work->desc.bytes, awaited);
    }
    return 0;
}

int nb_submit(struct nb_comm *comm, const struct nb_op *op, struct nb_work **out, struct nb_error *err) {
    struct nb_job *job = comm->job;
    struct nb_work *work = NULL;
    int rc = nb_op_check(comm, op, err);
    if (rc < 0) {
        return rc;
    }
    // This thread prepares the work for the algorithm that rank 0 will most likely choose.
    const struct nb_algorithm *likely =
        op->device != 0 ? &nb_device : nb_autotune_guess(job, comm->size, op->kind, nb_op_bytes(op));
    rc = nb_work_make(comm, op, likely, &work, err);
    if (rc < 0 || work == NULL) {
        return rc;
    }
    rc = nb_device_attach(work, op, err);
    if (rc == 0) {
        work->times.submit_ns = nb_now_ns();
        work->step = nb_ring_step(job->config.ring);
        pthread_mutex_lock(&job->lock);
        rc = enter(job, work, op->awaited, err);
        pthread_mutex_unlock(&job->lock);
    }
    if (rc < 0) {
        nb_device_end(work);
        nb_work_set_done(work);
        nb_work_release(work);
        return rc;
    }
    if (work->device == NULL || comm->size == 1) { // else its memory does not hold its values yet
        nb_work_record_submit(work, work->times.submit_ns);
    }
    *out = work;
    if (comm->size == 1) {
        work->algorithm->start(work, work->times.submit_ns);
    }
    return 0;
}
