// Submissions: from a call on any thread to the inbox of the progress owner.
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/float_mode.h"
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
    nb_work_take_round(work);
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
        uint64_t mine = nb_float_mode_set(job->progress.float_mode);
        work->algorithm->start(work, work->times.submit_ns);
        (void)nb_float_mode_set(mine);
    }
    return 0;
}
