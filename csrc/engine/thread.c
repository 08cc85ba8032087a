// Communication thread: runs progress passes until the job stops.
#include "engine/thread.h"

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
#include "engine/engine.h"
#include "engine/progress_owner.h"
#include "engine/progress_pass.h"
#include "engine/shared.h"
#include "engine/watchdog.h"
#include "transport/lanes.h"

enum {
    LEAVE_NS = 200 * 1000 * 1000,
    SETTLE_NS = 2000 * 1000 * 1000 // so that a live but descheduled peer does not lose the last data sent to it
};

static void send_leave(struct nb_job *job) {
    int64_t until = nb_now_ns() + LEAVE_NS;
    for (int i = 0; i < job->control_count; i++) {
        struct control *c = &job->controls[i];
        if (c->job != NULL && c->watch.fd >= 0) {
            nb_control_send(c, CTL_BYE, NULL, 0);
            nb_control_drain(c, until);
        }
    }
}

// True if the thread may end: operations are pending, the job has failed, peers have confirmed all data, or SETTLE_NS
// has passed.
static bool may_stop(struct nb_job *job, int64_t *until_ns) {
    if (!job->progress.stop) {
        return false;
    }
    nb_progress_take_requests(job); // it may hold an abort
    *until_ns = *until_ns == 0 ? nb_now_ns() + SETTLE_NS : *until_ns;
    bool works = !nb_list_empty(&job->ops.running) || !nb_list_empty(&job->ops.waiting);
    if (job->failed || works || nb_now_ns() > *until_ns) {
        return true;
    }
    bool settled = nb_lanes_settle(job->lanes);
    if (settled) {
        nb_lanes_announce_leave(job->lanes);
    }
    return settled;
}

void *nb_thread_main(void *arg) {
    struct nb_job *job = arg;
    int64_t stop_ns = 0;
    while (!may_stop(job, &stop_ns)) {
        nb_progress_pass(job, NULL, TICK_MS, nb_progress_sleep);
        nb_progress_hand_over(job);
    }
    const struct nb_error closed = {
        .code = NB_ECLOSED, .peer = NB_NO_PEER, .text = "the job was shut down before the operation completed"};
    nb_progress_take_requests(job);
    nb_control_failed(job);
    nb_progress_fail_all(job, &closed);
    send_leave(job);
    return NULL;
}
