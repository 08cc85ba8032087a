// Job context: a job's failure, notices, lanes to peers, and requests of callers.
#include "engine/context.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
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
#include "engine/progress_owner.h"
#include "trace/event.h"
#include "trace/ring.h"
#include "transport/lanes.h"

enum {
    YIELD_NS = 2 * 1000,
    SPIN_NS = 20 * 1000,
    CALLER_SPIN_NS = 150 * 1000 // a waiting caller has nothing else to do
};

uint64_t nb_job_next_seq(struct nb_job *job, uint64_t count) {
    job->ops.numbered += count;
    return job->ops.numbered - count + 1;
}

bool nb_job_accept_seq(struct nb_job *job, uint64_t seq) {
    bool next = seq > job->ops.last_seq;
    job->ops.last_seq = next ? seq : job->ops.last_seq;
    return next;
}

struct nb_comm *nb_job_world(struct nb_job *job) {
    return &job->world;
}

void nb_job_lists_init(struct nb_job *job) {
    nb_list_init(&job->inbox.works);
    nb_list_init(&job->inbox.maps);
    nb_list_init(&job->comms.list);
    nb_list_init(&job->comms.groups);
    nb_list_init(&job->ops.waiting);
    nb_list_init(&job->ops.running);
    nb_list_init(&job->ops.rounds_by_age);
    nb_list_init(&job->devices.unready);
    nb_list_init(&job->devices.order);
}

void nb_job_notify(struct nb_job *job, const char *text) {
    pthread_mutex_lock(&job->lock);
    if (job->notice_count < (int)NB_NOTICES_MAX) {
        snprintf(job->notices[job->notice_count++], NB_ERROR_TEXT, "%s", text);
    } else {
        job->notices_dropped++;
    }
    pthread_mutex_unlock(&job->lock);
}

void nb_job_clock_measured(struct nb_job *job, int64_t at_ns, uint64_t offset_ns, uint64_t trip_ns) {
    nb_ring_put_at(job->config.ring, at_ns, NB_EV_CLOCK, 0, offset_ns, trip_ns, 0, 0, 0);
    atomic_store(&job->clock.busy, true);
    nb_ring_put_at(atomic_load(&job->clock.ring), at_ns, NB_EV_CLOCK, 0, offset_ns, trip_ns, 0, 0, 0);
    atomic_store(&job->clock.busy, false);
}

void nb_job_record_clock(struct nb_job *job, struct nb_ring *ring) {
    atomic_store(&job->clock.ring, ring);
    while (atomic_load(&job->clock.busy)) { // one event of the earlier ring
        sched_yield();
    }
    if (ring != NULL) {
        atomic_store(&job->clock.due, true);
        nb_loop_wake(&job->loop);
    }
}

bool nb_job_notice(struct nb_job *job, char *text, size_t text_bytes) {
    pthread_mutex_lock(&job->lock);
    bool any = job->notice_count > 0 || job->notices_dropped > 0;
    if (job->notice_count > 0) {
        snprintf(text, text_bytes, "%s", job->notices[0]);
        job->notice_count--;
        memmove(job->notices[0], job->notices[1], (size_t)job->notice_count * sizeof job->notices[0]);
    } else if (any) {
        snprintf(text, text_bytes, "notices dropped for lack of room: %d", job->notices_dropped);
        job->notices_dropped = 0;
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

bool nb_job_polls(const struct nb_job *job, int64_t moved_ns) {
    int64_t quiet_ns = nb_now_ns() - moved_ns;
    if (!job->progress.may_spin || quiet_ns > (job->progress.owner == NB_PROGRESS_CALLER ? CALLER_SPIN_NS : SPIN_NS)) {
        return false;
    }
    if (quiet_ns > YIELD_NS) {
        sched_yield(); // the awaited rank may run on this very core, even if there are many
    }
    return true;
}

void nb_job_fail(struct nb_job *job, const struct nb_error *why, bool announce) {
    if (job->failed) {
        return;
    }
    job->failed = true;
    job->failure_due = announce || job->rank == 0;
    pthread_mutex_lock(&job->lock);
    job->failure = *why;
    pthread_mutex_unlock(&job->lock);
}

void nb_job_wire_fail(struct nb_job *job, int peer, const char *what) {
    struct nb_error why = {0};
    nb_fail_peer(&why, NB_EWIRE, peer, "rank %d sent %s", peer, what);
    nb_job_fail(job, &why, true);
}

int nb_job_peer_ready(struct nb_job *job, int peer, struct nb_error *err) {
    size_t bytes = nb_lanes_address_bytes(job->lanes);
    if (job->watchdog.peer_left[peer]) {
        return nb_fail_peer(err, NB_EPEER, peer, "rank %d left the job", peer);
    }
    if (job->peer_open[peer]) {
        return 0;
    }
    job->peer_open[peer] = true;
    return nb_lanes_peer_open(job->lanes, peer, job->addresses + (size_t)peer * bytes, err);
}

void nb_job_register(struct nb_job *job, void *base, size_t bytes) {
    struct nb_error err = {0};
    int rc = nb_lanes_map(job->lanes, base, bytes, &err);
    if (rc < 0 && (rc != -ENOSPC || !job->limit_reported)) {
        nb_job_notify(job, err.text);
    }
    job->limit_reported = job->limit_reported || rc == -ENOSPC;
}

static void map_ask(struct nb_job *job, struct map_request *request) {
    pthread_mutex_lock(&job->lock);
    nb_list_insert(&job->inbox.maps, &request->link);
    job->inbox.filled = true;
    pthread_mutex_unlock(&job->lock);
    nb_loop_wake(&job->loop);
}

// `arena`: the arena at this memory, or NULL.
static int map_request(struct nb_job *job, void *base, size_t bytes, const struct nb_arena *arena,
                       struct nb_error *err) {
    if (job->size == 1) {
        return 0;
    }
    struct map_request *request = calloc(1, sizeof *request);
    if (request == NULL) {
        return nb_fail(err, -ENOMEM, "cannot allocate a request to map %zu bytes", bytes);
    }
    *request = (struct map_request){.base = base, .bytes = bytes, .fd = -1};
    if (arena != NULL && job->shared != NULL) {
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
        return nb_fail(err, -ENOMEM, "cannot allocate a request to unmap memory");
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

void nb_job_abort_for(struct nb_job *job, const struct nb_error *why) {
    pthread_mutex_lock(&job->lock);
    job->inbox.filled = true;
    job->inbox.aborting = true;
    job->inbox.abort_why = *why;
    pthread_mutex_unlock(&job->lock);
    nb_loop_wake(&job->loop);
}

void nb_job_abort(struct nb_job *job, const char *why) {
    struct nb_error failure = {0};
    nb_fail_peer(&failure, NB_EPEER, job->rank, "rank %d gave up: %s", job->rank, why);
    nb_job_abort_for(job, &failure);
}
