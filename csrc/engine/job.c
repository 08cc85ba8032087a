// A job from open to close: lanes, control connections, the communication thread, and what happens when one fails.
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/list.h"
#include "base/loop.h"
#include "engine/engine.h"
#include "engine/internal.h"
#include "trace/event.h"
#include "trace/ring.h"
#include "transport/lanes.h"

enum {
    GRACE_NS = 250 * 1000 * 1000, // a broken lane waits this long for rank 0 to say who is dead
    FAREWELL_NS = 200 * 1000 * 1000
};

struct nb_comm *nb_job_world(struct nb_job *job) {
    return &job->world;
}

int nb_comm_rank(const struct nb_comm *comm) {
    return comm->rank;
}

int nb_comm_size(const struct nb_comm *comm) {
    return comm->size;
}

void nb_job_notify(struct nb_job *job, const char *text) {
    pthread_mutex_lock(&job->lock);
    if (job->notice_count < (int)(sizeof job->notices / sizeof job->notices[0])) {
        snprintf(job->notices[job->notice_count++], NB_ERROR_TEXT, "%s", text);
    }
    pthread_mutex_unlock(&job->lock);
}

bool nb_job_notice(struct nb_job *job, char *text, size_t text_bytes) {
    pthread_mutex_lock(&job->lock);
    bool any = job->notice_count > 0;
    if (any) {
        snprintf(text, text_bytes, "%s", job->notices[0]);
        job->notice_count--;
        memmove(job->notices[0], job->notices[1], (size_t)job->notice_count * sizeof job->notices[0]);
    }
    pthread_mutex_unlock(&job->lock);
    return any;
}

int nb_job_failure(struct nb_job *job, struct nb_error *err) {
    pthread_mutex_lock(&job->lock);
    *err = job->failure;
    pthread_mutex_unlock(&job->lock);
    return err->code;
}

void nb_job_info(struct nb_job *job, struct nb_job_info *info) {
    pthread_mutex_lock(&job->lock);
    *info = job->info;
    pthread_mutex_unlock(&job->lock);
}

static void works_fail(struct nb_list *works, const struct nb_error *why) {
    while (!nb_list_empty(works)) {
        struct nb_work *work = NB_CONTAINER(works->next, struct nb_work, link);
        nb_run_cancel(work);
        nb_work_finish(work, why);
    }
}

// Takes what callers have submitted since.
static void inbox_drain(struct nb_job *job) {
    pthread_mutex_lock(&job->lock);
    while (!nb_list_empty(&job->inbox)) {
        struct nb_work *work = NB_CONTAINER(job->inbox.next, struct nb_work, link);
        nb_list_remove(&work->link);
        pthread_mutex_unlock(&job->lock);
        nb_member_submit(job, work);
        pthread_mutex_lock(&job->lock);
    }
    pthread_mutex_unlock(&job->lock);
}

void nb_job_fail(struct nb_job *job, const struct nb_error *why, bool tell) {
    if (job->failed) {
        return;
    }
    job->failed = true;
    pthread_mutex_lock(&job->lock);
    job->failure = *why;
    pthread_mutex_unlock(&job->lock);
    struct wire_failure message = {.code = why->code, .peer = why->peer};
    memcpy(message.text, why->text, sizeof message.text);
    if (job->rank == 0) {
        nb_control_broadcast(job, CTL_ABORT, &message, sizeof message);
    } else if (tell) {
        nb_control_send(&job->controls[0], CTL_FAIL, &message, sizeof message);
    }
}

// After a failure every operation ends with it, from the thread's loop: never from inside a lane's callback.
static void failed_sweep(struct nb_job *job) {
    inbox_drain(job);
    works_fail(&job->running, &job->failure);
    works_fail(&job->waiting, &job->failure);
}

static void peer_left_fail(struct nb_job *job, int rank, const char *name) {
    struct nb_error why = {0};
    nb_fail_peer(&why, NB_EPEER, rank, "rank %d left the job before '%s' was over", rank, name);
    nb_job_fail(job, &why, true);
}

void nb_job_peer_left(struct nb_job *job, int rank) {
    job->peer_left[rank] = true;
    if (!nb_list_empty(&job->waiting)) {
        peer_left_fail(job, rank, NB_CONTAINER(job->waiting.next, struct nb_work, link)->desc.name);
    }
}

// What a rank that left in good order still owed is in the kernel; only an operation that its end cuts short fails.
static void cut_short(struct nb_job *job, int peer) {
    NB_LIST_EACH(it, &job->running) {
        const struct nb_work *work = NB_CONTAINER(it, struct nb_work, link);
        bool in = work->in.peer == peer && work->in.left > 0;
        bool out = work->out.peer == peer && work->out.left + work->out.in_flight > 0;
        if (in || out) {
            peer_left_fail(job, peer, work->desc.name);
            return;
        }
    }
}

void nb_job_lane_lost(void *ctx, int peer, int lane, const struct nb_error *why, int lanes_left) {
    struct nb_job *job = ctx;
    (void)lanes_left;
    if (job->failed) {
        return;
    }
    if (job->peer_left[peer]) {
        cut_short(job, peer);
        return;
    }
    nb_ring_put(job->config.ring, NB_EV_LANE_LOST, 0, (uint64_t)peer, (uint64_t)lane, (uint64_t)(int64_t)why->code, 0,
                0);
    pthread_mutex_lock(&job->lock);
    job->info.dropped++;
    pthread_mutex_unlock(&job->lock);
    if (!job->suspicion.raised) {
        job->suspicion = (struct suspicion){.raised = true, .until_ns = nb_now_ns() + GRACE_NS, .why = *why};
    }
}

static void suspicion_tick(struct nb_job *job, int64_t now) {
    struct suspicion *s = &job->suspicion;
    if (!s->raised || now < s->until_ns) {
        return;
    }
    if (job->peer_left[s->why.peer]) {
        s->raised = false;
        cut_short(job, s->why.peer);
    } else if (!nb_list_empty(&job->running) || !nb_list_empty(&job->waiting)) {
        nb_job_fail(job, &s->why, true);
    }
}

static void ping_tick(struct nb_job *job, int64_t now) {
    if (job->rank > 0 && now >= job->next_ping_ns) {
        int64_t quarter = (int64_t)job->config.timeout_ms * 1000000 / 4;
        job->next_ping_ns = now + (quarter < 1000000000 ? quarter : 1000000000);
        nb_control_send(&job->controls[0], CTL_PING, &now, sizeof now);
    }
}

static void silence_tick(struct nb_job *job, int64_t now) {
    int64_t limit = (int64_t)job->config.timeout_ms * 1000000;
    bool waits = !nb_list_empty(&job->running) || !nb_list_empty(&job->waiting);
    for (int i = 0; i < job->control_count; i++) {
        struct control *c = &job->controls[i];
        if (c->job != NULL && c->watch.fd >= 0 && !c->left && waits && now - c->heard_ns > limit) {
            struct nb_error why = {0};
            nb_fail_peer(&why, NB_ETIMEOUT, c->peer, "rank %d has been silent for %.1f s (NETBOTTLENECK_TIMEOUT_S)",
                         c->peer, (double)(now - c->heard_ns) / 1e9);
            nb_job_fail(job, &why, true);
        }
    }
}

// Granted bytes that do not move. A rank that is silent shows first by its control connection, and is named.
static void movement_tick(struct nb_job *job, int64_t now) {
    int64_t limit = (int64_t)job->config.timeout_ms * 1250000;
    NB_LIST_EACH(it, &job->running) {
        struct nb_work *work = NB_CONTAINER(it, struct nb_work, link);
        int64_t in = work->in.moved_ns;
        int64_t moved = work->out.moved_ns > in ? work->out.moved_ns : in;
        if (moved > 0 && now - moved > limit) {
            int peer = work->in.left > 0 ? work->in.peer : work->out.peer;
            struct nb_error why = {0};
            nb_fail_peer(&why, NB_ETIMEOUT, peer, "'%s': no byte moved between rank %d and rank %d for %.1f s",
                         work->desc.name, job->rank, peer, (double)(now - moved) / 1e9);
            nb_job_fail(job, &why, true);
        }
    }
}

static void tick(struct nb_job *job, int64_t now) {
    ping_tick(job, now);
    silence_tick(job, now);
    suspicion_tick(job, now);
    movement_tick(job, now);
    if (job->rank == 0) {
        nb_agree_tick(job, now);
    }
}

static void maps_drain(struct nb_job *job) {
    pthread_mutex_lock(&job->lock);
    while (!nb_list_empty(&job->maps)) {
        struct map_request *request = NB_CONTAINER(job->maps.next, struct map_request, link);
        nb_list_remove(&request->link);
        pthread_mutex_unlock(&job->lock);
        struct nb_error err = {0};
        if (nb_lanes_map(job->lanes, request->base, request->bytes, &err) < 0) {
            nb_job_notify(job, err.text); // it travels through staging
        }
        free(request);
        pthread_mutex_lock(&job->lock);
    }
    pthread_mutex_unlock(&job->lock);
}

int nb_job_map(struct nb_job *job, void *base, size_t bytes, struct nb_error *err) {
    if (job->size == 1) {
        return 0;
    }
    struct map_request *request = calloc(1, sizeof *request);
    if (request == NULL) {
        return nb_fail(err, -ENOMEM, "a request to map %zu bytes", bytes);
    }
    request->base = base;
    request->bytes = bytes;
    pthread_mutex_lock(&job->lock);
    nb_list_insert(&job->maps, &request->link);
    pthread_mutex_unlock(&job->lock);
    nb_loop_wake(&job->loop);
    return 0;
}

static bool stop_asked(struct nb_job *job) {
    pthread_mutex_lock(&job->lock);
    bool stop = job->stop;
    struct nb_error why = job->abort_why;
    bool abort = job->aborting;
    job->aborting = false;
    pthread_mutex_unlock(&job->lock);
    if (abort) {
        nb_job_fail(job, &why, true);
    }
    return stop;
}

static void farewell(struct nb_job *job) {
    int64_t until = nb_now_ns() + FAREWELL_NS;
    for (int i = 0; i < job->control_count; i++) {
        struct control *c = &job->controls[i];
        if (c->job != NULL && c->watch.fd >= 0) {
            nb_control_send(c, CTL_BYE, NULL, 0);
            nb_control_drain(c, until);
        }
    }
}

void *nb_job_main(void *arg) {
    struct nb_job *job = arg;
    int64_t next_tick = 0;
    while (!stop_asked(job)) {
        maps_drain(job);
        inbox_drain(job);
        nb_member_flush(job);
        if (job->rank == 0) {
            nb_agree_release(job);
        }
        int moved = nb_lanes_progress(job->lanes, 0);
        int timeout = moved > 0 || nb_lanes_arm(job->lanes) == -EAGAIN ? 0 : TICK_MS;
        nb_loop_wait(&job->loop, timeout);
        int64_t now = nb_now_ns();
        if (now >= next_tick) {
            next_tick = now + (int64_t)TICK_MS * 1000000;
            tick(job, now);
        }
        if (job->failed) {
            failed_sweep(job);
        }
    }
    const struct nb_error closed = {
        .code = NB_ECLOSED, .peer = NB_NO_PEER, .text = "the job was shut down before the operation was over"};
    inbox_drain(job);
    works_fail(&job->running, &closed);
    works_fail(&job->waiting, &closed);
    farewell(job);
    return NULL;
}

void nb_job_close(struct nb_job *job) {
    if (job == NULL) {
        return;
    }
    pthread_mutex_lock(&job->lock);
    job->stop = true;
    pthread_mutex_unlock(&job->lock);
    if (job->thread_runs) {
        nb_loop_wake(&job->loop);
        pthread_join(job->thread, NULL);
    }
    nb_job_free(job);
}

void nb_job_abort(struct nb_job *job, const char *why) {
    pthread_mutex_lock(&job->lock);
    job->aborting = true;
    job->abort_why = (struct nb_error){0};
    nb_fail_peer(&job->abort_why, NB_EPEER, job->rank, "rank %d gave up: %s", job->rank, why);
    pthread_mutex_unlock(&job->lock);
    nb_loop_wake(&job->loop);
}
