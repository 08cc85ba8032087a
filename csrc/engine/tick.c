// What happens to a job by time alone: heartbeats, ranks that are silent, bytes that do not move, lanes that broke.
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "base/error.h"
#include "base/list.h"
#include "engine/engine.h"
#include "engine/internal.h"
#include "trace/event.h"
#include "trace/ring.h"
#include "transport/lanes.h"
#include "transport/transport.h"

enum { GRACE_NS = 250 * 1000 * 1000 }; // a broken lane waits this long for rank 0 to say who is dead

static int64_t later(int64_t a, int64_t b) {
    return a > b ? a : b;
}

// A flow that is not over: one that was sent is not before its peer has all of it.
static bool is_open(const struct nb_flow *flow, int peer) {
    return flow->peer == peer && !nb_list_empty(&flow->link);
}

// Whether an operation under way waits for a peer; *moved_ns: when a block last moved between the two.
static bool needs(struct nb_work *work, int peer, int64_t *moved_ns) {
    bool found = false;
    if (work->local.taken) { // in shared memory: nb_local_tick() says who is late
        found = work->in.left > 0 && (work->in.peer == peer || work->out.peer == peer);
        *moved_ns = found ? later(*moved_ns, work->in.moved_ns) : *moved_ns;
        return found;
    }
    for (int i = 0; i < work->flow_count; i++) {
        const struct nb_flow *flow = nb_work_flow(work, i);
        if (flow->blocks > 0 && is_open(flow, peer)) {
            *moved_ns = later(*moved_ns, flow->moved_ns);
            found = true;
        }
    }
    return found;
}

// The first operation under way that needs a peer, or NULL.
static const struct nb_work *needed(const struct nb_job *job, int peer, int64_t *moved_ns) {
    const struct nb_work *found = NULL;
    for (const struct nb_list *it = job->running.next; it != &job->running; it = it->next) {
        struct nb_work *work = NB_CONTAINER(it, struct nb_work, link);
        found = needs(work, peer, moved_ns) && found == NULL ? work : found;
    }
    return found;
}

// What a rank that left in good order still owed is in the kernel, on any of its lanes: an operation is cut short when
// all of them have ended, or when nothing comes any more.
static void left_tick(struct nb_job *job, int peer, int64_t now) {
    struct suspicion *s = &job->suspicions[peer];
    int64_t moved = s->since_ns;
    int64_t quiet_ns = (int64_t)job->config.timeout_ms * 1000000 / 4;
    const struct nb_work *work = needed(job, peer, &moved);
    bool gone = nb_lanes_left(job->lanes, peer) == 0 || now - moved > quiet_ns;
    if (work == NULL) {
        s->raised = false;
    } else if (gone) {
        struct nb_error why = {0};
        nb_fail_peer(&why, NB_EPEER, peer, "rank %d left the job before '%s' was over", peer, work->desc.name);
        nb_job_fail(job, &why, true);
    }
}

// A lane to a rank that has not left and is not dead: its segments went to the others.
static void lanes_tell(struct nb_job *job, int peer) {
    struct suspicion *s = &job->suspicions[peer];
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
    nb_job_notify(job, text);
    pthread_mutex_lock(&job->lock);
    job->info.dropped += (uint64_t)count;
    pthread_mutex_unlock(&job->lock);
    s->lanes = 0;
    s->raised = false;
}

// A rank that lost lanes and has not left: where one is left, they are missed and no more.
static void broken_tick(struct nb_job *job, int peer, int64_t now) {
    struct suspicion *s = &job->suspicions[peer];
    int64_t moved = s->since_ns;
    if (now - s->since_ns < GRACE_NS) {
        return;
    }
    if (nb_lanes_left(job->lanes, peer) > 0) {
        lanes_tell(job, peer);
        return;
    }
    if (job->peer_left[0]) { // nobody tells any more who else has left in good order
        nb_lanes_forgive(job->lanes, peer);
    }
    if (needed(job, peer, &moved) != NULL || !nb_list_empty(&job->waiting)) {
        nb_job_fail(job, &s->why, true);
    }
}

static void suspicion_tick(struct nb_job *job, int64_t now) {
    for (int peer = 0; peer < job->size && !job->failed; peer++) {
        if (!job->suspicions[peer].raised) {
            continue;
        }
        if (job->peer_left[peer]) {
            left_tick(job, peer, now);
        } else {
            broken_tick(job, peer, now);
        }
    }
}

static void ping_tick(struct nb_job *job, int64_t now) {
    struct control *control = &job->controls[0];
    if (job->rank > 0 && now >= job->next_ping_ns && control->out_bytes == 0) {
        int64_t quarter = (int64_t)job->config.timeout_ms * 1000000 / 4;
        job->next_ping_ns = now + (quarter < 1000000000 ? quarter : 1000000000);
        nb_control_send(control, CTL_PING, &now, sizeof now);
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

// The peer of the first flow that is not over: of those that arrive, then of those that leave.
static int waited_for(struct nb_work *work) {
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

// What strangers sent to the lanes' ports: counted, told of once, and without effect on anything else.
static void strangers_tick(struct nb_job *job) {
    uint64_t refused = nb_lanes_refused(job->lanes);
    uint64_t before = job->info.refused; // this thread alone writes it
    if (refused == before) {
        return;
    }
    pthread_mutex_lock(&job->lock);
    job->info.refused = refused;
    pthread_mutex_unlock(&job->lock);
    if (before == 0) {
        nb_job_notify(job,
                      "connections, arrivals or messages on the lanes of this rank proved no right to be taken and "
                      "were dropped: a process outside this job may reach its ports. The job goes on");
    }
}

// Granted bytes that do not move: an operation that waits for its turn on a busy network is none of them. A rank that
// is silent shows first by its control connection, and is named.
static void movement_tick(struct nb_job *job, int64_t now) {
    int64_t limit = (int64_t)job->config.timeout_ms * 1250000;
    int64_t moved = 0;
    NB_LIST_EACH(it, &job->running) {
        struct nb_work *work = NB_CONTAINER(it, struct nb_work, link);
        for (int i = 0; i < work->flow_count; i++) {
            moved = later(moved, nb_work_flow(work, i)->moved_ns);
        }
    }
    if (moved == 0 || now - moved <= limit) {
        return;
    }
    struct nb_work *work = NB_CONTAINER(job->running.next, struct nb_work, link);
    int peer = waited_for(work);
    struct nb_error why = {0};
    nb_fail_peer(&why, NB_ETIMEOUT, peer, "'%s': no byte moved between rank %d and rank %d for %.1f s", work->desc.name,
                 job->rank, peer, (double)(now - moved) / 1e9);
    nb_job_fail(job, &why, true);
}

// `away` more of patience for what was last seen at *seen_ns; 0: never.
static void excuse(int64_t *seen_ns, int64_t away, int64_t now) {
    if (*seen_ns != 0) {
        *seen_ns = *seen_ns + away < now ? *seen_ns + away : now;
    }
}

// This thread was not here (stopped, or kept from a core): what came meanwhile lies unread, so it is nobody's silence.
static void away_tick(struct nb_job *job, int64_t now) {
    int64_t away = job->ticked_ns == 0 ? 0 : now - job->ticked_ns - (int64_t)job->config.timeout_ms * 1000000 / 4;
    job->ticked_ns = now;
    if (away <= 0) {
        return;
    }
    for (int i = 0; i < job->control_count; i++) {
        excuse(&job->controls[i].heard_ns, away, now);
    }
    for (int peer = 0; peer < job->size; peer++) {
        excuse(&job->suspicions[peer].since_ns, away, now);
    }
    NB_LIST_EACH(it, &job->running) {
        struct nb_work *work = NB_CONTAINER(it, struct nb_work, link);
        for (int i = 0; i < work->flow_count; i++) {
            excuse(&nb_work_flow(work, i)->moved_ns, away, now);
        }
    }
}

void nb_job_tick(struct nb_job *job, int64_t now) {
    away_tick(job, now);
    nb_lanes_tick(job->lanes, now);
    ping_tick(job, now);
    silence_tick(job, now);
    suspicion_tick(job, now);
    movement_tick(job, now);
    strangers_tick(job);
    if (job->rank == 0) {
        nb_agree_tick(job, now);
    }
}
