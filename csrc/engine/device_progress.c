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
#include "engine/negotiation.h"
#include "engine/operation.h"
#include "engine/watchdog.h"

enum { PAUSE_NS = 20 * 1000 }; // between two looks at fences and copies

static bool submit_if_ready(struct nb_job *job, struct nb_work *work) {
    struct nb_error err = {0};
    int ready = nb_device_fences_reached(work->device, &err);
    if (ready < 0) {
        nb_device_fail(job, &err);
    } else if (ready > 0) {
        nb_list_remove(&work->order);
        nb_list_remove(&work->link);
        nb_work_record_submit(work, nb_now_ns());
        nb_negotiation_submit(job, work);
    }
    return ready > 0;
}

void nb_device_submit(struct nb_job *job, struct nb_work *work) {
    if (work->device == NULL) {
        nb_negotiation_submit(job, work);
    } else {
        nb_list_insert(&job->ops.waiting, &work->link);
        nb_list_insert(&job->devices.unready, &work->order);
        (void)submit_if_ready(job, work);
    }
}

int nb_device_progress(struct nb_job *job) {
    struct nb_devices *devices = &job->devices;
    int moved = 0;
    for (struct nb_device *it = atomic_load(&devices->opened); it != NULL && !job->failed; it = it->next) {
        struct nb_error err = {0};
        int rc = it->staging != NULL && nb_staging_polls(it->staging) ? nb_staging_poll(it->staging, &err) : 0;
        if (rc < 0) {
            nb_device_fail(job, &err);
        }
        moved += rc > 0 ? rc : 0;
    }
    bool submitted = false;
    NB_LIST_EACH_SAFE(it, nx, &devices->unready) {
        submitted = (!job->failed && submit_if_ready(job, NB_CONTAINER(it, struct nb_work, order))) || submitted;
    }
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
