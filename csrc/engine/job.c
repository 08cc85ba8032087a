// A job from open to close: lanes, control connections, the communication thread, and what happens when one fails.
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/arena.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/list.h"
#include "base/loop.h"
#include "engine/engine.h"
#include "engine/group.h"
#include "engine/internal.h"
#include "engine/local.h"
#include "transport/lanes.h"

enum {
    FAREWELL_NS = 200 * 1000 * 1000,
    QUICK_NS = 60 * 1000,          // between two movements: a sleep would take as long
    GAP_MAX_NS = 400 * 1000,       // a longer one counts as this
    GAPS = 16,                     // that the mean looks back on
    SPIN_BYTES = 4 * 1024 * 1024,  // of the operation that is waited for
    SETTLE_NS = 2000 * 1000 * 1000 // a peer that is alive and kept from a core must not lose what was sent to it last
};

struct nb_comm *nb_job_world(struct nb_job *job) {
    return &job->world;
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
    } else if (tell && job->controls != NULL) { // while the job opens, bootstrap tells
        nb_control_send(&job->controls[0], CTL_FAIL, &message, sizeof message);
    }
}

static void map_end(struct nb_job *job, struct map_request *request) {
    nb_lanes_unmap(job->lanes, request->base);
    nb_local_unmap(job, request->base);
    request->gone(request->ctx);
    free(request);
}

static void map_make(struct nb_job *job, struct map_request *request) {
    struct nb_error err = {0};
    int rc = nb_lanes_map(job->lanes, request->base, request->bytes, &err);
    if (rc < 0 && (rc != -ENOSPC || !job->limit_told)) {
        nb_job_notify(job, err.text); // it travels through staging
    }
    job->limit_told = job->limit_told || rc == -ENOSPC;
    nb_local_map(job, request->base, request->bytes, request->fd);
    if (request->why < 0) {
        nb_local_private(job, request->bytes, request->why);
    }
    free(request);
}

// Does what callers have asked for since. Where they have asked for nothing there is no lock to take.
static void asked_do(struct nb_job *job) {
    struct nb_list works;
    struct nb_list maps;
    struct nb_error why;
    if (!atomic_load_explicit(&job->asked, memory_order_acquire)) {
        return;
    }
    nb_list_init(&works);
    nb_list_init(&maps);
    pthread_mutex_lock(&job->lock);
    job->asked = false;
    nb_list_move(&job->inbox, &works);
    nb_list_move(&job->maps, &maps);
    bool abort = job->aborting;
    bool comms = job->comms_new;
    why = job->abort_why;
    job->aborting = false;
    pthread_mutex_unlock(&job->lock);
    if (abort) {
        nb_job_fail(job, &why, true);
    }
    if (comms) {
        nb_groups_tell(job);
    }
    NB_LIST_EACH_SAFE(it, nx, &maps) {
        struct map_request *request = NB_CONTAINER(it, struct map_request, link);
        (request->gone == NULL ? map_make : map_end)(job, request);
    }
    NB_LIST_EACH_SAFE(it, nx, &works) {
        struct nb_work *work = NB_CONTAINER(it, struct nb_work, link);
        job->moved_ns = work->times.submit_ns;
        nb_list_remove(&work->link);
        nb_member_submit(job, work);
    }
    nb_job_left_check(job);
}

// After a failure every operation ends with it, from the thread's loop: never from inside a lane's callback.
static void failed_sweep(struct nb_job *job) {
    asked_do(job);
    works_fail(&job->running, &job->failure);
    works_fail(&job->waiting, &job->failure);
}

void nb_job_wire_fail(struct nb_job *job, int peer, const char *what) {
    struct nb_error why = {0};
    nb_fail_peer(&why, NB_EWIRE, peer, "rank %d sent %s", peer, what);
    nb_job_fail(job, &why, true);
}

static int member_that_left(const struct nb_comm *comm) {
    const struct nb_job *job = comm->job;
    if (job->peer_left[0]) { // nobody says any more what starts
        return 0;
    }
    if (comm->ranks == NULL) {
        return job->left_rank;
    }
    for (int i = 0; i < comm->size; i++) {
        if (job->peer_left[comm->ranks[i]]) {
            return comm->ranks[i];
        }
    }
    return NB_NO_PEER;
}

void nb_job_left_check(struct nb_job *job) {
    if (job->left_rank == NB_NO_PEER) {
        return;
    }
    NB_LIST_EACH(it, &job->waiting) {
        const struct nb_work *work = NB_CONTAINER(it, struct nb_work, link);
        int rank = member_that_left(work->comm);
        if (rank != NB_NO_PEER) {
            struct nb_error why = {0};
            nb_fail_peer(&why, NB_EPEER, rank, "rank %d left the job before '%s' was over", rank, work->desc.name);
            nb_job_fail(job, &why, true);
            return;
        }
    }
}

void nb_job_peer_left(struct nb_job *job, int rank) {
    struct suspicion *s = &job->suspicions[rank];
    job->peer_left[rank] = true;
    job->left_rank = rank;
    nb_lanes_forgive(job->lanes, rank); // its word that all is there may have been lost with its lanes
    *s = (struct suspicion){.raised = true, .since_ns = nb_now_ns()}; // operations under way may need it still
    nb_job_left_check(job);
}

// Whether the peer is dead, or left, or only this lane is lost, shows a little later.
void nb_job_lane_lost(void *ctx, int peer, int lane, const struct nb_error *why, int lanes_left) {
    struct nb_job *job = ctx;
    struct suspicion *s = &job->suspicions[peer];
    (void)lanes_left;
    if (job->failed) {
        return;
    }
    if (why->code == NB_EWIRE) { // nobody's death explains that
        nb_job_fail(job, why, true);
        return;
    }
    s->lanes |= (uint64_t)1 << lane;
    if (!s->raised) {
        s->raised = true;
        s->since_ns = nb_now_ns();
        s->why = *why;
    }
}

void nb_job_lanes_failed(void *ctx, const struct nb_error *why) {
    nb_job_fail(ctx, why, true);
}

static void map_ask(struct nb_job *job, struct map_request *request) {
    pthread_mutex_lock(&job->lock);
    nb_list_insert(&job->maps, &request->link);
    job->asked = true;
    pthread_mutex_unlock(&job->lock);
    nb_loop_wake(&job->loop);
}

// `arena`: that it is, or NULL.
static int map_request(struct nb_job *job, void *base, size_t bytes, const struct nb_arena *arena,
                       struct nb_error *err) {
    if (job->size == 1) {
        return 0;
    }
    struct map_request *request = calloc(1, sizeof *request);
    if (request == NULL) {
        return nb_fail(err, -ENOMEM, "a request to map %zu bytes", bytes);
    }
    *request = (struct map_request){.base = base, .bytes = bytes, .fd = -1};
    if (arena != NULL && job->local != NULL) {
        request->fd = nb_arena_pass(arena);
        request->why = request->fd < 0 ? request->fd : 0;
    }
    map_ask(job, request);
    return 0;
}

int nb_job_unmap(struct nb_job *job, void *base, void (*gone)(void *ctx), void *ctx, struct nb_error *err) {
    if (job->size == 1) {
        gone(ctx);
        return 0;
    }
    struct map_request *request = calloc(1, sizeof *request);
    if (request == NULL) {
        return nb_fail(err, -ENOMEM, "a request to unmap memory");
    }
    *request = (struct map_request){.base = base, .fd = -1, .gone = gone, .ctx = ctx};
    map_ask(job, request);
    return 0;
}

int nb_job_map(struct nb_job *job, void *base, size_t bytes, struct nb_error *err) {
    return map_request(job, base, bytes, NULL, err);
}

int nb_job_map_arena(struct nb_job *job, const struct nb_arena *arena, struct nb_error *err) {
    return map_request(job, arena->base, arena->bytes, arena, err);
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

// Whether the thread may end: nobody waits for an answer of this rank, and what it sent last is there; or that took too
// long.
static bool may_stop(struct nb_job *job, int64_t *until_ns) {
    if (!job->stop) {
        return false;
    }
    asked_do(job); // it may be to abort
    *until_ns = *until_ns == 0 ? nb_now_ns() + SETTLE_NS : *until_ns;
    bool works = !nb_list_empty(&job->running) || !nb_list_empty(&job->waiting);
    if (job->failed || works || nb_now_ns() > *until_ns) {
        return true;
    }
    bool settled = nb_lanes_settle(job->lanes);
    if (settled) {
        nb_lanes_farewell(job->lanes);
    }
    return settled;
}

// Whether what is awaited may be here in no time, being small or because it comes fast: then sleeping would cost more than
// it saves.
static bool spins(const struct nb_job *job) {
    const struct nb_list *list = nb_list_empty(&job->running) ? &job->waiting : &job->running;
    if (nb_list_empty(list)) {
        return false;
    }
    const struct nb_work *work = NB_CONTAINER(list->next, struct nb_work, link);
    bool fast = job->driver == NB_DRIVER_CALLER && job->gap_ns < QUICK_NS; // the thread would take time from a training
    bool soon = nb_local_everywhere(job) || work->desc.bytes <= SPIN_BYTES || fast;
    return soon && nb_drive_looks(job, job->moved_ns);
}

static void moved_now(struct nb_job *job, int64_t now) {
    int64_t gap = now - job->moved_ns < (int64_t)GAP_MAX_NS ? now - job->moved_ns : (int64_t)GAP_MAX_NS;
    job->gap_ns += (gap - job->gap_ns) / GAPS;
    job->moved_ns = now;
}

static bool is_done(const struct nb_work *work) {
    int code;
    return work != NULL && nb_work_test(work, &code);
}

void nb_job_turn(struct nb_job *job, const struct nb_work *awaited, int sleep_ms) {
    asked_do(job);
    nb_member_flush(job);
    if (job->rank == 0) {
        nb_agree_release(job);
    }
    int moved = nb_control_poll(job);
    moved += nb_lanes_progress(job->lanes, 0);
    moved += nb_local_progress(job);
    bool stays =
        moved > 0 || is_done(awaited) || spins(job) || nb_lanes_arm(job->lanes) == -EAGAIN || !nb_local_arm(job);
    stays = stays || !nb_control_arm(job);
    if (!stays && awaited == NULL) {
        nb_drive_sleep(job, sleep_ms);
    }
    moved += nb_loop_wait(&job->loop, stays || awaited == NULL ? 0 : sleep_ms);
    int64_t now = nb_now_ns();
    if (moved > 0) {
        moved_now(job, now);
    }
    if (now >= job->next_tick_ns) {
        job->next_tick_ns = now + (int64_t)TICK_MS * 1000000;
        nb_local_tick(job, now);
        nb_job_tick(job, now);
    }
    if (job->failed) {
        failed_sweep(job);
    }
}

void *nb_job_main(void *arg) {
    struct nb_job *job = arg;
    int64_t stop_ns = 0;
    while (!may_stop(job, &stop_ns)) {
        nb_job_turn(job, NULL, TICK_MS);
        nb_drive_lend(job);
    }
    const struct nb_error closed = {
        .code = NB_ECLOSED, .peer = NB_NO_PEER, .text = "the job was shut down before the operation was over"};
    asked_do(job);
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
    nb_drive_end(job);
    pthread_mutex_unlock(&job->lock);
    if (job->thread_runs) {
        pthread_join(job->thread, NULL);
    }
    pthread_mutex_lock(&job->lock);
    while (job->waiters > 0) { // every work is over: they are on their way out
        pthread_cond_wait(&job->finished, &job->lock);
    }
    pthread_mutex_unlock(&job->lock);
    nb_job_free(job);
}

void nb_job_abort(struct nb_job *job, const char *why) {
    pthread_mutex_lock(&job->lock);
    job->asked = true;
    job->aborting = true;
    job->abort_why = (struct nb_error){0};
    nb_fail_peer(&job->abort_why, NB_EPEER, job->rank, "rank %d gave up: %s", job->rank, why);
    pthread_mutex_unlock(&job->lock);
    nb_loop_wake(&job->loop);
}
