// Device operations' progress: submission of those whose memory holds its values, looks at fences and copies.
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <time.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/list.h"
#include "cuda/staging.h"
#include "engine/context.h"
#include "engine/device.h"
#include "engine/device_memory.h"
#include "engine/engine.h"
#include "engine/negotiation.h"
#include "engine/operation.h"
#include "engine/watchdog.h"

enum { PAUSE_NS = 20 * 1000 }; // between two looks at fences and copies

void nb_device_submit(struct nb_job *job, struct nb_work *work) {
    bool follows = work->desc.kind == NB_OP_JOIN && !nb_list_empty(&job->devices.unready);
    if (work->device == NULL && !follows) {
        nb_negotiation_submit(job, work);
    } else {
        nb_list_insert(&job->ops.waiting, &work->link);
        nb_list_insert(&job->devices.unready, &work->order);
    }
}

// Looks at the fences of a device once, and at the copies of its staging. Returns how much has moved.
static int look(struct nb_job *job, struct nb_device *device) {
    struct nb_error err = {0};
    struct nb_staging *staging = device->staging;
    int moved = staging != NULL && nb_staging_polls(staging) ? nb_staging_poll(staging, &err) : 0;
    int rc = moved < 0 ? moved : 0;
    if (rc == 0 && !nb_list_empty(&job->devices.unready)) {
        rc = nb_device_look(device, &job->devices.unready, &err);
    }
    if (rc < 0) {
        nb_device_fail(job, &err);
    }
    return rc < 0 ? 0 : moved;
}

// A join waits for the works before it, because a rank that has joined submits nothing.
static bool may_submit(const struct nb_job *job, const struct nb_work *work) {
    return work->device != NULL ? !nb_device_is_unready(work) : job->devices.unready.next == &work->order;
}

static bool submit_ready(struct nb_job *job) {
    bool submitted = false;
    NB_LIST_EACH_SAFE(it, nx, &job->devices.unready) {
        struct nb_work *work = NB_CONTAINER(it, struct nb_work, order);
        if (!job->failed && may_submit(job, work)) {
            nb_list_remove(&work->order);
            nb_list_remove(&work->link);
            if (work->device != NULL) {
                nb_work_record_submit(work, nb_now_ns());
            }
            nb_negotiation_submit(job, work);
            submitted = true;
        }
    }
    return submitted;
}

int nb_device_progress(struct nb_job *job) {
    int moved = 0;
    for (struct nb_device *it = atomic_load(&job->devices.opened); it != NULL && !job->failed; it = it->next) {
        moved += look(job, it);
    }
    const bool submitted = submit_ready(job);
    if (submitted) {
        nb_watchdog_check(job);
    }
    return moved + submitted + nb_device_start_next(job);
}

bool nb_device_polls(struct nb_job *job) {
    bool polls = !nb_list_empty(&job->devices.unready);
    for (struct nb_device *it = atomic_load(&job->devices.opened); it != NULL; it = it->next) {
        polls = polls || (it->staging != NULL && nb_staging_polls(it->staging));
    }
    if (!polls || job->failed) {
        return false;
    }
    const struct timespec pause = {.tv_nsec = PAUSE_NS};
    (void)nanosleep(&pause, NULL);
    return true;
}
