// Progress pass: one pass over everything in a job that can make progress.
#include "engine/progress_pass.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/list.h"
#include "base/loop.h"
#include "engine/communicator.h"
#include "engine/context.h"
#include "engine/control.h"
#include "engine/coordinator.h"
#include "engine/device.h"
#include "engine/engine.h"
#include "engine/negotiation.h"
#include "engine/operation.h"
#include "engine/progress_owner.h"
#include "engine/shared.h"
#include "engine/watchdog.h"
#include "transport/lanes.h"

enum {
    QUICK_NS = 60 * 1000,        // mean gap between movements below which a sleep takes as long
    GAP_MAX_NS = 400 * 1000,     // longer gaps count as this
    GAPS = 16,                   // gaps in the running mean
    SPIN_BYTES = 4 * 1024 * 1024 // largest awaited operation that is polled for
};

// Last first: the windows of a device operation, which write to its memory, are behind it.
static void works_fail(struct nb_list *works, const struct nb_error *why) {
    while (!nb_list_empty(works)) {
        struct nb_work *work = NB_CONTAINER(works->prev, struct nb_work, link);
        nb_work_cancel(work);
        nb_work_finish(work, why);
    }
}

void nb_progress_fail_all(struct nb_job *job, const struct nb_error *why) {
    works_fail(&job->ops.running, why);
    works_fail(&job->ops.waiting, why);
}

static void map_end(struct nb_job *job, struct map_request *request) {
    nb_lanes_unmap(job->lanes, request->base);
    nb_shared_unmap(job, request->base);
    request->gone(request->ctx);
    free(request);
}

static void map_make(struct nb_job *job, struct map_request *request) {
    nb_job_register(job, request->base, request->bytes);
    nb_shared_map(job, request->base, request->bytes, request->fd);
    if (request->why < 0) {
        nb_shared_private(job, request->bytes, request->why);
    }
    free(request);
}

// Handles the requests of callers. Takes no lock if there are none.
void nb_progress_take_requests(struct nb_job *job) {
    struct nb_list works;
    struct nb_list maps;
    struct nb_error why;
    if (!atomic_load_explicit(&job->inbox.filled, memory_order_acquire)) {
        return;
    }
    nb_list_init(&works);
    nb_list_init(&maps);
    pthread_mutex_lock(&job->lock);
    job->inbox.filled = false;
    nb_list_move(&job->inbox.works, &works);
    nb_list_move(&job->inbox.maps, &maps);
    bool abort = job->inbox.aborting;
    bool comms = job->comms.unannounced;
    why = job->inbox.abort_why;
    job->inbox.aborting = false;
    pthread_mutex_unlock(&job->lock);
    if (abort) {
        nb_job_fail(job, &why, true);
    }
    if (comms) {
        nb_groups_announce(job);
    }
    NB_LIST_EACH_SAFE(it, nx, &maps) {
        struct map_request *request = NB_CONTAINER(it, struct map_request, link);
        (request->gone == NULL ? map_make : map_end)(job, request);
    }
    NB_LIST_EACH_SAFE(it, nx, &works) {
        struct nb_work *work = NB_CONTAINER(it, struct nb_work, link);
        job->progress.moved_ns = work->times.submit_ns;
        nb_list_remove(&work->link);
        nb_device_submit(job, work);
    }
    nb_watchdog_check(job);
}

// After a failure, ends every operation with it: from the pass, never from inside a lane's callback.
static void failed_sweep(struct nb_job *job) {
    nb_progress_take_requests(job);
    nb_progress_fail_all(job, &job->failure);
}

// True if the awaited data may arrive so soon, being small or arriving fast, that sleeping costs more than it saves.
static bool spins(const struct nb_job *job) {
    const struct nb_list *list = nb_list_empty(&job->ops.running) ? &job->ops.waiting : &job->ops.running;
    if (nb_list_empty(list)) {
        return false;
    }
    const struct nb_work *work = NB_CONTAINER(list->next, struct nb_work, link);
    bool fast = job->progress.owner == NB_PROGRESS_CALLER &&
                job->progress.gap_ns < QUICK_NS; // the thread would take CPU time from the training
    bool soon = nb_shared_everywhere(job) || work->desc.bytes <= SPIN_BYTES || fast;
    return soon && nb_job_polls(job, job->progress.moved_ns);
}

static void moved_now(struct nb_job *job, int64_t now) {
    int64_t gap =
        now - job->progress.moved_ns < (int64_t)GAP_MAX_NS ? now - job->progress.moved_ns : (int64_t)GAP_MAX_NS;
    job->progress.gap_ns += (gap - job->progress.gap_ns) / GAPS;
    job->progress.moved_ns = now;
}

static bool is_done(const struct nb_work *work) {
    int code;
    return work != NULL && nb_work_test(work, &code);
}

/* Every TICK_MS: deadlines, and rank 0's missing announcements. */
static void tick(struct nb_job *job, int64_t now) {
    if (now < job->progress.next_tick_ns) {
        return;
    }
    job->progress.next_tick_ns = now + (int64_t)TICK_MS * 1000000;
    nb_shared_tick(job, now);
    nb_watchdog_tick(job, now);
    if (job->rank == 0) {
        nb_coordinator_tick(job, now);
    }
}

void nb_progress_pass(struct nb_job *job, const struct nb_work *awaited, int sleep_ms, nb_progress_sleep_fn *sleep) {
    nb_progress_take_requests(job);
    if (job->rank == 0) {
        nb_coordinator_collect(job);
        nb_coordinator_release(job);
    } else {
        nb_negotiation_flush(job);
    }
    int moved = nb_control_poll(job);
    moved += nb_lanes_progress(job->lanes);
    moved += nb_shared_progress(job);
    moved += nb_device_progress(job);
    bool stays =
        moved > 0 || is_done(awaited) || spins(job) || nb_lanes_arm(job->lanes) == -EAGAIN || !nb_shared_arm(job);
    stays = stays || !nb_control_arm(job) || job->failure_due; // the other ranks learn of a failure before a sleep
    stays = stays || nb_device_polls(job);
    if (!stays && sleep != NULL) {
        sleep(job, sleep_ms);
    }
    moved += nb_loop_wait(&job->loop, stays || sleep != NULL ? 0 : sleep_ms);
    int64_t now = nb_now_ns();
    if (moved > 0) {
        moved_now(job, now);
    }
    tick(job, now);
    if (job->failed) {
        nb_control_failed(job);
        failed_sweep(job);
    }
}
