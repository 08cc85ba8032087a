// Watchdog: heartbeats, silent or lost ranks, broken lanes, bytes that do not move.
#include "engine/watchdog.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/list.h"
#include "engine/communicator.h"
#include "engine/context.h"
#include "engine/control.h"
#include "engine/engine.h"
#include "engine/operation.h"
#include "trace/event.h"
#include "trace/ring.h"
#include "transport/lanes.h"
#include "transport/transport.h"

enum { GRACE_NS = 250 * 1000 * 1000 }; // time for rank 0 to report which rank is dead after a lane breaks

static int64_t max_ns(int64_t a, int64_t b) {
    return a > b ? a : b;
}

// Returns the first running operation that needs a peer, or NULL. Raises *moved_ns to the last movement.
static const struct nb_work *waiting_operation(const struct nb_job *job, int peer, int64_t *moved_ns) {
    const struct nb_work *found = NULL;
    for (const struct nb_list *it = job->ops.running.next; it != &job->ops.running; it = it->next) {
        struct nb_work *work = NB_CONTAINER(it, struct nb_work, link);
        found = work->algorithm->waits_for(work, peer, moved_ns) && found == NULL ? work : found;
    }
    return found;
}

// True if an operation that has not started needs the peer.
static bool is_awaited(const struct nb_job *job, int peer) {
    NB_LIST_EACH(it, &job->ops.waiting) {
        if (nb_comm_has(NB_CONTAINER(it, struct nb_work, link)->comm, peer)) {
            return true;
        }
    }
    return false;
}

// Handles a rank that left in good order. Its last data is in the kernel, on any of its lanes. So an operation fails
// only when all these lanes have ended, or when nothing arrives any more.
static void left_tick(struct nb_job *job, int peer, int64_t now) {
    struct suspicion *s = &job->watchdog.suspicions[peer];
    int64_t moved = s->since_ns;
    int64_t silence_ns = (int64_t)job->config.timeout_ms * 1000000 / 4;
    const struct nb_work *work = waiting_operation(job, peer, &moved);
    bool data_ended = nb_lanes_left(job->lanes, peer) == 0 || now - moved > silence_ns;
    if (work == NULL) {
        s->raised = false;
    } else if (data_ended) {
        struct nb_error why = {0};
        nb_fail_peer(&why, NB_EPEER, peer, "rank %d left the job before '%s' completed", peer, work->desc.name);
        nb_job_fail(job, &why, true);
    }
}

// Reports lost lanes to a rank that is alive and has not left: other lanes have taken over their segments.
static void lost_lanes_report(struct nb_job *job, int peer) {
    struct suspicion *s = &job->watchdog.suspicions[peer];
    char text[NB_ERROR_TEXT];
    int count = __builtin_popcountll(s->lanes);
    for (int lane = 0; lane < NB_LANES_MAX; lane++) {
        if ((s->lanes >> lane & 1) != 0) {
            nb_ring_put(job->config.ring, NB_EV_LANE_LOST, 0, (uint64_t)peer, (uint64_t)lane,
                        (uint64_t)(int64_t)s->why.code, 0, 0);
        }
    }
    snprintf(text, sizeof text, "%d of %d lanes to rank %d lost, their segments went over the others (%.300s)", count,
             count + nb_lanes_left(job->lanes, peer), peer, s->why.text);
    pthread_mutex_lock(&job->lock);
    job->info.dropped += (uint64_t)count; // before the notice, whose reader may ask for the count
    pthread_mutex_unlock(&job->lock);
    nb_job_notify(job, text);
    s->lanes = 0;
    s->raised = false;
}

// Handles a rank with broken lanes that has not left, or whose departure rank 0 has not announced yet. If a lane is
// left, this is only a notice.
static void broken_tick(struct nb_job *job, int peer, int64_t now) {
    struct suspicion *s = &job->watchdog.suspicions[peer];
    int64_t moved = s->since_ns;
    if (now - s->since_ns < GRACE_NS) {
        return;
    }
    if (nb_lanes_left(job->lanes, peer) > 0) {
        lost_lanes_report(job, peer);
        return;
    }
    if (job->watchdog.peer_left[0]) { // no rank announces any more which others have left
        nb_lanes_peer_left(job->lanes, peer);
    }
    if (waiting_operation(job, peer, &moved) != NULL || is_awaited(job, peer)) {
        nb_job_fail(job, &s->why, true);
    }
}

static void suspicion_tick(struct nb_job *job, int64_t now) {
    for (int peer = 0; peer < job->size && !job->failed; peer++) {
        if (!job->watchdog.suspicions[peer].raised) {
            continue;
        }
        if (job->watchdog.peer_left[peer]) {
            left_tick(job, peer, now);
        } else {
            broken_tick(job, peer, now);
        }
    }
}

static void ping_tick(struct nb_job *job, int64_t now) {
    struct control *control = &job->controls[0];
    bool due = now >= job->watchdog.next_ping_ns || atomic_exchange(&job->clock.due, false);
    if (job->rank > 0 && due && control->out_bytes == 0) {
        int64_t quarter = (int64_t)job->config.timeout_ms * 1000000 / 4;
        job->watchdog.next_ping_ns = now + (quarter < 1000000000 ? quarter : 1000000000);
        nb_control_send(control, CTL_PING, &now, sizeof now);
    }
}

bool nb_watchdog_is_silent(const struct nb_job *job, int rank, int64_t now) {
    const struct control *c = &job->controls[rank];
    int64_t limit = (int64_t)job->config.timeout_ms * 1000000;
    return c->job != NULL && c->watch.fd >= 0 && !c->left && now - c->received_ns > limit;
}

void nb_watchdog_silent(struct nb_job *job, int rank, int64_t now) {
    const struct control *c = &job->controls[rank];
    struct nb_error why = {0};
    nb_fail_peer(&why, NB_ETIMEOUT, rank, "rank %d has been silent for %.1f s (NETBOTTLENECK_TIMEOUT_S)", rank,
                 (double)(now - c->received_ns) / 1e9);
    nb_job_fail(job, &why, true);
}

static void silence_tick(struct nb_job *job, int64_t now) {
    bool waits = !nb_list_empty(&job->ops.running) || !nb_list_empty(&job->ops.waiting);
    for (int rank = 0; waits && rank < job->control_count; rank++) {
        if (nb_watchdog_is_silent(job, rank, now)) {
            nb_watchdog_silent(job, rank, now);
        }
    }
}

// Returns the peer of the first flow that is not done: incoming flows first, then outgoing ones.
static int awaited_peer(struct nb_work *work) {
    for (int i = 0; i < work->flow_count; i += 2) {
        if (nb_work_flow(work, i)->left > 0) {
            return nb_work_flow(work, i)->peer;
        }
    }
    for (int i = 1; i < work->flow_count; i += 2) {
        if (nb_work_flow(work, i)->blocks > 0 && !nb_list_empty(&nb_work_flow(work, i)->link)) {
            return nb_work_flow(work, i)->peer;
        }
    }
    return NB_NO_PEER;
}

// Counts and reports once what processes outside the job sent to the lanes' ports. It has no other effect.
static void refused_tick(struct nb_job *job) {
    uint64_t refused = nb_lanes_refused(job->lanes);
    uint64_t before = job->info.refused; // only the progress owner writes it
    if (refused == before) {
        return;
    }
    pthread_mutex_lock(&job->lock);
    job->info.refused = refused;
    pthread_mutex_unlock(&job->lock);
    if (before == 0) {
        nb_job_notify(job, "this rank dropped connections, arrivals or messages on its lanes that failed "
                           "authentication: a process outside this job may reach its ports. The job continues");
    }
}

// Reports once that this rank cannot accept connections. Without them lanes are lost, or operations fail, and these
// errors name only the other rank.
static void accept_tick(struct nb_job *job) {
    int code = nb_lanes_accept_error(job->lanes);
    if (code == 0 || job->watchdog.accept_reported) {
        return;
    }
    char text[NB_ERROR_TEXT];
    snprintf(text, sizeof text,
             "this rank could not accept connections of its lanes (%s%s): lanes may be lost, or the job may end",
             nb_code_name(code), nb_code_remedy(code));
    job->watchdog.accept_reported = true;
    nb_job_notify(job, text);
}

// Fails the job if granted bytes do not move. An operation that waits for its turn on a busy network does not count. A
// silent rank shows first on its control connection, which names it.
static void movement_tick(struct nb_job *job, int64_t now) {
    int64_t limit = (int64_t)job->config.timeout_ms * 1250000;
    int64_t moved = 0;
    NB_LIST_EACH(it, &job->ops.running) {
        struct nb_work *work = NB_CONTAINER(it, struct nb_work, link);
        for (int i = 0; i < work->flow_count; i++) {
            moved = max_ns(moved, nb_work_flow(work, i)->moved_ns);
        }
    }
    if (moved == 0 || now - moved <= limit) {
        return;
    }
    NB_LIST_EACH(it, &job->ops.running) {
        struct nb_work *work = NB_CONTAINER(it, struct nb_work, link);
        int peer = work->running ? awaited_peer(work) : NB_NO_PEER;
        if (peer != NB_NO_PEER) { // else its windows await one, or it has not started
            struct nb_error why = {0};
            nb_fail_peer(&why, NB_ETIMEOUT, peer, "'%s': no byte moved between rank %d and rank %d for %.1f s",
                         work->desc.name, job->rank, peer, (double)(now - moved) / 1e9);
            nb_job_fail(job, &why, true);
            return;
        }
    }
}

// Extends a deadline that counts from *seen_ns by `away`. A *seen_ns of 0 stays 0.
static void deadline_extend(int64_t *seen_ns, int64_t away, int64_t now) {
    if (*seen_ns != 0) {
        *seen_ns = *seen_ns + away < now ? *seen_ns + away : now;
    }
}

// The thread was stopped or descheduled: messages have arrived unread, so do not count this time as peer silence.
static void descheduled_tick(struct nb_job *job, int64_t now) {
    int64_t away = job->watchdog.ticked_ns == 0
                       ? 0
                       : now - job->watchdog.ticked_ns - (int64_t)job->config.timeout_ms * 1000000 / 4;
    job->watchdog.ticked_ns = now;
    if (away <= 0) {
        return;
    }
    for (int i = 0; i < job->control_count; i++) {
        deadline_extend(&job->controls[i].received_ns, away, now);
    }
    for (int peer = 0; peer < job->size; peer++) {
        deadline_extend(&job->watchdog.suspicions[peer].since_ns, away, now);
    }
    NB_LIST_EACH(it, &job->ops.running) {
        struct nb_work *work = NB_CONTAINER(it, struct nb_work, link);
        for (int i = 0; i < work->flow_count; i++) {
            deadline_extend(&nb_work_flow(work, i)->moved_ns, away, now);
        }
    }
}

void nb_watchdog_tick(struct nb_job *job, int64_t now) {
    descheduled_tick(job, now);
    nb_lanes_tick(job->lanes, now);
    ping_tick(job, now);
    silence_tick(job, now);
    suspicion_tick(job, now);
    movement_tick(job, now);
    refused_tick(job);
    accept_tick(job);
}

static int left_member(const struct nb_comm *comm) {
    const struct nb_job *job = comm->job;
    if (job->watchdog.peer_left[0]) { // rank 0 has left: no operation can start
        return 0;
    }
    if (comm->ranks == NULL) {
        return job->watchdog.left_rank;
    }
    for (int i = 0; i < comm->size; i++) {
        if (job->watchdog.peer_left[comm->ranks[i]]) {
            return comm->ranks[i];
        }
    }
    return NB_NO_PEER;
}

void nb_watchdog_check(struct nb_job *job) {
    if (job->watchdog.left_rank == NB_NO_PEER) {
        return;
    }
    NB_LIST_EACH(it, &job->ops.waiting) {
        const struct nb_work *work = NB_CONTAINER(it, struct nb_work, link);
        int rank = left_member(work->comm);
        if (rank != NB_NO_PEER) {
            struct nb_error why = {0};
            nb_fail_peer(&why, NB_EPEER, rank, "rank %d left the job before '%s' completed", rank, work->desc.name);
            nb_job_fail(job, &why, true);
            return;
        }
    }
}

void nb_watchdog_left(struct nb_job *job, int rank) {
    struct suspicion *s = &job->watchdog.suspicions[rank];
    job->watchdog.peer_left[rank] = true;
    job->watchdog.left_rank = rank;
    nb_lanes_peer_left(job->lanes, rank); // its confirmation may have been lost with its lanes
    *s = (struct suspicion){.raised = true, .since_ns = nb_now_ns()}; // running operations may still need it
    nb_watchdog_check(job);
}

// Records a broken lane. Later messages show if the peer is dead, has left, or lost only this lane.
void nb_watchdog_lane_lost(void *ctx, int peer, int lane, const struct nb_error *why, int lanes_left) {
    struct nb_job *job = ctx;
    struct suspicion *s = &job->watchdog.suspicions[peer];
    (void)lanes_left;
    if (job->failed) {
        return;
    }
    if (why->code == NB_EWIRE) { // a dead peer does not explain this
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

void nb_watchdog_lanes_failed(void *ctx, const struct nb_error *why) {
    nb_job_fail(ctx, why, true);
}

int nb_watchdog_open(struct nb_job *job, struct nb_error *err) {
    struct nb_watchdog *w = &job->watchdog;
    w->peer_left = calloc((size_t)job->size, sizeof *w->peer_left);
    w->suspicions = calloc((size_t)job->size, sizeof *w->suspicions);
    w->left_rank = NB_NO_PEER;
    bool there = w->peer_left != NULL && w->suspicions != NULL;
    return there ? 0 : nb_fail(err, -ENOMEM, "cannot allocate the watchdog state of %d ranks", job->size);
}

void nb_watchdog_close(struct nb_job *job) {
    free(job->watchdog.peer_left);
    free(job->watchdog.suspicions);
}
