// Who runs a job's turns: its thread, or in its place a caller that waits. A caller that does is not woken by another
// thread when its operation is over, and a small one is over before a thread would be awake.
//
// A caller takes the place of a thread that sleeps, which sees it when it wakes. One that is in a turn is told, and steps
// aside after it. The thread comes back a moment after the last caller has left. Whoever drives is the job's communication
// thread for as long, in all that is said of it.
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#include "base/clock.h"
#include "base/list.h"
#include "base/loop.h"
#include "engine/engine.h"
#include "engine/internal.h"

enum {
    GRACE_NS = 4000 * 1000, // for which nobody drives after a caller has left: the next one finds its place free
    BRIEF_NS = 100 * 1000,  // the same where it has left something to do
    HURRY_BYTES = 64 * 1024,
    YIELD_NS = 2 * 1000,
    SPIN_NS = 20 * 1000,
    CALLER_SPIN_NS = 150 * 1000 // it has nothing else to do
};

static const int64_t SECOND_NS = 1000000000;

static struct timespec time_of(int64_t at_ns) {
    return (struct timespec){.tv_sec = (time_t)(at_ns / SECOND_NS), .tv_nsec = (long)(at_ns % SECOND_NS)};
}

void nb_drive_tell(struct nb_job *job, const struct nb_op *op) {
    bool comes = job->lends && op->awaited && (job->driver == NB_DRIVER_NONE || job->driver == NB_DRIVER_ASLEEP);
    if (comes) {
        return; // to drive
    }
    if (job->driver != NB_DRIVER_NONE || job->thread_polls) {
        nb_loop_wake(&job->loop);
    } else if (nb_work_line(op) > HURRY_BYTES ||
               job->inbox.next != job->inbox.prev) { // not one that is waited for at once
        job->hurry = true;
        pthread_cond_signal(&job->aside);
    }
}

bool nb_drive_looks(const struct nb_job *job, int64_t moved_ns) {
    int64_t quiet_ns = nb_now_ns() - moved_ns;
    if (!job->spins || quiet_ns > (job->driver == NB_DRIVER_CALLER ? CALLER_SPIN_NS : SPIN_NS)) {
        return false;
    }
    if (quiet_ns > YIELD_NS) {
        sched_yield(); // who is waited for may be on this very core, however many there are
    }
    return true;
}

void nb_drive_end(struct nb_job *job) {
    job->stop = true;
    pthread_cond_broadcast(&job->aside);
    nb_loop_wake(&job->loop);
}

// With the lock, as the thread: whether it may drive again.
static bool is_free(const struct nb_job *job) {
    return job->driver == NB_DRIVER_NONE && (job->stop || job->hurry || nb_now_ns() >= job->free_ns);
}

// Callers come and go in no time, or one stays: only then need it tell when it leaves.
static void stand_aside(struct nb_job *job) {
    uint64_t drives = job->drives;
    bool lent = job->driver == NB_DRIVER_CALLER;
    struct timespec until = time_of(lent ? nb_now_ns() + GRACE_NS : job->free_ns);
    pthread_cond_timedwait(&job->aside, &job->lock, &until);
    while (job->driver == NB_DRIVER_CALLER && job->drives == drives) {
        job->thread_sleeps = true;
        pthread_cond_wait(&job->aside, &job->lock);
        job->thread_sleeps = false;
    }
}

void nb_drive_sleep(struct nb_job *job, int sleep_ms) {
    pthread_mutex_lock(&job->lock);
    if (job->lends) {
        job->driver = NB_DRIVER_ASLEEP;
    }
    job->thread_polls = true;
    pthread_mutex_unlock(&job->lock);
    nb_loop_sleep(&job->loop, sleep_ms);
    pthread_mutex_lock(&job->lock);
    job->thread_polls = false;
    while (job->driver > NB_DRIVER_ASLEEP && !is_free(job)) {
        stand_aside(job);
    }
    job->driver = NB_DRIVER_THREAD;
    job->hurry = false;
    pthread_mutex_unlock(&job->lock);
}

void nb_drive_lend(struct nb_job *job) {
    if (!job->wanted) {
        return;
    }
    pthread_mutex_lock(&job->lock);
    if (job->wanted && job->waiters > 0 && !job->stop) {
        job->driver = NB_DRIVER_NONE;
        job->free_ns = nb_now_ns() + BRIEF_NS;
        pthread_cond_broadcast(&job->finished);
        while (!is_free(job)) {
            stand_aside(job);
        }
        job->driver = NB_DRIVER_THREAD;
        job->hurry = false;
    }
    job->wanted = false;
    pthread_mutex_unlock(&job->lock);
}

// With the lock: whether this caller drives from now on.
static bool take(struct nb_job *job) {
    if (!job->lends || job->stop) {
        return false;
    }
    if (job->driver == NB_DRIVER_NONE || job->driver == NB_DRIVER_ASLEEP) {
        job->driver = NB_DRIVER_CALLER;
        job->drives++;
        return true;
    }
    if (job->driver == NB_DRIVER_THREAD && !job->wanted) {
        job->wanted = true;
        nb_loop_wake(&job->loop);
    }
    return false;
}

static void leave(struct nb_job *job) {
    bool left = !nb_list_empty(&job->running) || !nb_list_empty(&job->waiting) || !nb_list_empty(&job->inbox);
    job->driver = NB_DRIVER_NONE;
    job->free_ns = nb_now_ns() + (left ? BRIEF_NS : GRACE_NS);
    if (left && job->waiters > 1) {
        pthread_cond_broadcast(&job->finished); // one of them drives
    }
    if (job->thread_sleeps || left) {
        pthread_cond_signal(&job->aside);
    }
    if (job->thread_polls && (left || job->stop)) {
        nb_loop_wake(&job->loop);
    }
}

static void drive(struct nb_job *job, const struct nb_work *work, int64_t until_ns) {
    int code;
    while (!nb_work_test(work, &code) && !job->stop) {
        int64_t left_ms = until_ns == INT64_MAX ? TICK_MS : (until_ns - nb_now_ns() + 999999) / 1000000;
        if (left_ms <= 0) {
            return;
        }
        nb_job_turn(job, work, left_ms < (int64_t)TICK_MS ? (int)left_ms : (int)TICK_MS);
    }
}

void nb_drive_wait(struct nb_work *work, int64_t until_ns) {
    struct nb_job *job = work->comm->job;
    struct timespec until = time_of(until_ns);
    int code;
    int rc = 0;
    int64_t patient_ns = nb_now_ns() + SPIN_NS;
    pthread_mutex_lock(&job->lock);
    job->waiters++;
    while (rc == 0 && !nb_work_test(work, &code)) {
        if (take(job)) {
            pthread_mutex_unlock(&job->lock);
            drive(job, work, until_ns);
            pthread_mutex_lock(&job->lock);
            leave(job);
            rc = until_ns != INT64_MAX && nb_now_ns() >= until_ns ? ETIMEDOUT : 0;
        } else if (job->spins && nb_now_ns() < patient_ns) { // a thread in a turn steps aside soon
            pthread_mutex_unlock(&job->lock);
            nb_pause();
            pthread_mutex_lock(&job->lock);
        } else {
            rc = until_ns == INT64_MAX ? pthread_cond_wait(&job->finished, &job->lock)
                                       : pthread_cond_timedwait(&job->finished, &job->lock, &until);
        }
    }
    if (--job->waiters == 0) {
        pthread_cond_broadcast(&job->finished);
    }
    pthread_mutex_unlock(&job->lock);
}
