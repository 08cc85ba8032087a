// Progress owner: hands progress from the communication thread to a waiting caller and back.
#include "engine/progress_owner.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/float_mode.h"
#include "base/list.h"
#include "base/loop.h"
#include "engine/context.h"
#include "engine/control.h"
#include "engine/coordinator.h"
#include "engine/engine.h"
#include "engine/operation.h"
#include "engine/progress_pass.h"

enum {
    GRACE_NS = 4000 * 1000, // progress stays free this long after a caller has left, for the next caller
    BRIEF_NS = 100 * 1000,  // the same if operations are pending
    LARGE_BYTES = 64 * 1024,
    SPIN_NS = 20 * 1000
};

static const int64_t SECOND_NS = 1000000000;

static struct timespec time_of(int64_t at_ns) {
    return (struct timespec){.tv_sec = (time_t)(at_ns / SECOND_NS), .tv_nsec = (long)(at_ns % SECOND_NS)};
}

void nb_progress_notify(struct nb_job *job, size_t bytes, bool awaited) {
    bool caller_follows = job->progress.callers_may_own && awaited &&
                          (job->progress.owner == NB_PROGRESS_NONE || job->progress.owner == NB_PROGRESS_ASLEEP);
    if (caller_follows) {
        return; // the caller is about to make progress itself
    }
    if (job->progress.owner != NB_PROGRESS_NONE || job->progress.thread_polls) {
        nb_loop_wake(&job->loop);
    } else if (bytes > LARGE_BYTES ||
               job->inbox.works.next != job->inbox.works.prev) { // not a single operation that its caller waits for
        job->progress.thread_due = true;
        pthread_cond_signal(&job->progress.thread_wakes);
    }
}

void nb_progress_end(struct nb_job *job) {
    job->progress.stop = true;
    pthread_cond_broadcast(&job->progress.thread_wakes);
    nb_loop_wake(&job->loop);
}

// For the thread, with the lock: true if it may make progress again.
static bool thread_may_resume(const struct nb_job *job) {
    return job->progress.owner == NB_PROGRESS_NONE &&
           (job->progress.stop || job->progress.thread_due || nb_now_ns() >= job->progress.free_ns);
}

// Waits while callers own progress. A caller that stays past the timed wait must signal when it leaves.
static void wait_for_callers(struct nb_job *job) {
    uint64_t takeovers = job->progress.takeovers;
    bool caller_owns = job->progress.owner == NB_PROGRESS_CALLER;
    struct timespec until = time_of(caller_owns ? nb_now_ns() + GRACE_NS : job->progress.free_ns);
    pthread_cond_timedwait(&job->progress.thread_wakes, &job->lock, &until);
    while (job->progress.owner == NB_PROGRESS_CALLER && job->progress.takeovers == takeovers) {
        job->progress.thread_sleeps = true;
        pthread_cond_wait(&job->progress.thread_wakes, &job->lock);
        job->progress.thread_sleeps = false;
    }
}

void nb_progress_sleep(struct nb_job *job, int sleep_ms) {
    pthread_mutex_lock(&job->lock);
    if (job->progress.callers_may_own) {
        job->progress.owner = NB_PROGRESS_ASLEEP;
    }
    job->progress.thread_polls = true;
    pthread_mutex_unlock(&job->lock);
    nb_loop_sleep(&job->loop, sleep_ms);
    pthread_mutex_lock(&job->lock);
    job->progress.thread_polls = false;
    while (job->progress.owner > NB_PROGRESS_ASLEEP && !thread_may_resume(job)) {
        wait_for_callers(job);
    }
    job->progress.owner = NB_PROGRESS_THREAD;
    job->progress.thread_due = false;
    pthread_mutex_unlock(&job->lock);
}

void nb_progress_hand_over(struct nb_job *job) {
    if (!job->progress.wanted) {
        return;
    }
    pthread_mutex_lock(&job->lock);
    if (job->progress.wanted && job->progress.waiters > 0 && !job->progress.stop) {
        job->progress.owner = NB_PROGRESS_NONE;
        job->progress.free_ns = nb_now_ns() + BRIEF_NS;
        pthread_cond_broadcast(&job->finished);
        while (!thread_may_resume(job)) {
            wait_for_callers(job);
        }
        job->progress.owner = NB_PROGRESS_THREAD;
        job->progress.thread_due = false;
    }
    job->progress.wanted = false;
    pthread_mutex_unlock(&job->lock);
}

// With the lock: true if this caller now owns progress. Else asks the thread for it.
static bool take_progress(struct nb_job *job) {
    if (!job->progress.callers_may_own || job->progress.stop) {
        return false;
    }
    if (job->progress.owner == NB_PROGRESS_NONE || job->progress.owner == NB_PROGRESS_ASLEEP) {
        job->progress.owner = NB_PROGRESS_CALLER;
        job->progress.takeovers++;
        return true;
    }
    if (job->progress.owner == NB_PROGRESS_THREAD && !job->progress.wanted) {
        job->progress.wanted = true;
        nb_loop_wake(&job->loop);
    }
    return false;
}

static void release_progress(struct nb_job *job) {
    bool left =
        !nb_list_empty(&job->ops.running) || !nb_list_empty(&job->ops.waiting) || !nb_list_empty(&job->inbox.works);
    job->progress.owner = NB_PROGRESS_NONE;
    job->progress.free_ns = nb_now_ns() + (left ? BRIEF_NS : GRACE_NS);
    if (left && job->progress.waiters > 1) {
        pthread_cond_broadcast(&job->finished); // one of them takes progress over
    }
    if (job->progress.thread_sleeps || left) {
        pthread_cond_signal(&job->progress.thread_wakes);
    }
    if (job->progress.thread_polls && (left || job->progress.stop)) {
        nb_loop_wake(&job->loop);
    }
}

static void run_progress(struct nb_job *job, const struct nb_work *work, int64_t until_ns) {
    int code;
    while (!nb_work_test(work, &code) && !job->progress.stop) {
        int64_t left_ms = until_ns == INT64_MAX ? TICK_MS : (until_ns - nb_now_ns() + 999999) / 1000000;
        if (left_ms <= 0) {
            return;
        }
        nb_progress_pass(job, work, left_ms < (int64_t)TICK_MS ? (int)left_ms : (int)TICK_MS, NULL);
    }
}

static void wait_until(struct nb_work *work, int64_t until_ns) {
    struct nb_job *job = work->comm->job;
    struct timespec until = time_of(until_ns);
    int code;
    int rc = 0;
    int64_t patient_ns = nb_now_ns() + SPIN_NS;
    pthread_mutex_lock(&job->lock);
    job->progress.waiters++;
    while (rc == 0 && !nb_work_test(work, &code)) {
        if (take_progress(job)) {
            pthread_mutex_unlock(&job->lock);
            uint64_t mine = nb_float_mode_set(job->progress.float_mode);
            run_progress(job, work, until_ns);
            (void)nb_float_mode_set(mine);
            pthread_mutex_lock(&job->lock);
            release_progress(job);
            rc = until_ns != INT64_MAX && nb_now_ns() >= until_ns ? ETIMEDOUT : 0;
        } else if (job->progress.may_spin && nb_now_ns() < patient_ns) { // a thread in a pass hands over soon
            pthread_mutex_unlock(&job->lock);
            nb_pause();
            pthread_mutex_lock(&job->lock);
        } else {
            rc = until_ns == INT64_MAX ? pthread_cond_wait(&job->finished, &job->lock)
                                       : pthread_cond_timedwait(&job->finished, &job->lock, &until);
        }
    }
    if (--job->progress.waiters == 0) {
        pthread_cond_broadcast(&job->finished);
    }
    pthread_mutex_unlock(&job->lock);
}

int nb_work_wait(struct nb_work *work, int timeout_ms, struct nb_error *err) {
    int code = 0;
    if (timeout_ms != 0 && !nb_work_test(work, &code)) { // a work that is done may outlive its job
        wait_until(work, timeout_ms < 0 ? INT64_MAX : nb_now_ns() + (int64_t)timeout_ms * 1000000);
    }
    if (!nb_work_test(work, &code)) {
        return -EAGAIN;
    }
    if (code != 0 && err != NULL) {
        *err = work->failure;
    }
    return code;
}
