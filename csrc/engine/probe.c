// streams=auto: what 1, 2, 4, 8, 16 lanes of this job move, measured once, at its first large transfer, by sums of its
// own over memory of its own. Rank 0 orders, by the rule of tally.h; what that chooses is used from then on.
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/arena.h"
#include "base/clock.h"
#include "base/dtype.h"
#include "base/error.h"
#include "base/list.h"
#include "coll/choose.h"
#include "engine/engine.h"
#include "engine/internal.h"
#include "engine/local.h"
#include "engine/tally.h"
#include "trace/event.h"
#include "trace/ring.h"
#include "transport/lanes.h"
#include "transport/transport.h"

enum {
    PROBE_SLOTS = 2,                    // sums under way at once, so that lanes never run dry between two
    PROBE_BYTES_MAX = 16 * 1024 * 1024, // together more than caches hold, as gradients are
    PROBE_BYTES_MIN = 1024 * 1024,
    WINDOW_NS = 50 * 1000 * 1000
};

struct probe {
    struct nb_arena arena;
    bool mapped;
    bool busy;
    bool done;
    // rank 0
    struct nb_tally tally;
    bool counting;     // in the window that counts, not in the one before it
    bool over;         // the window is; what is still under way lands
    int under_way;     // sums
    uint64_t bytes;    // of a sum
    uint64_t landed;   // bytes of the sums that are over
    uint64_t begun;    // bytes that had landed when the window began
    int64_t turn_ns;   // when this turn began
    int64_t window_ns; // and this window
};

int nb_probe_open(struct nb_job *job, struct nb_error *err) {
    job->probe = calloc(1, sizeof *job->probe);
    if (job->probe == NULL) {
        return nb_fail(err, -ENOMEM, "the probe");
    }
    job->probe->arena.fd = -1;
    return 0;
}

void nb_probe_close(struct nb_job *job) {
    if (job->probe != NULL) {
        nb_arena_close(&job->probe->arena);
        free(job->probe);
    }
}

bool nb_probe_wanted(const struct nb_job *job, uint64_t bytes) {
    return job->config.streams == NB_STREAMS_AUTO && !job->probe->done && bytes >= PROBE_FROM_BYTES &&
           !nb_local_everywhere(job);
}

bool nb_probe_busy(const struct nb_job *job) {
    return job->probe->busy;
}

void nb_probe_order(struct nb_job *job, struct wire_probe *sum) {
    sum->seq = nb_agree_next_seq(job);
    nb_control_broadcast(job, CTL_PROBE, sum, sizeof *sum);
    nb_probe_run(job, sum);
}

static void order(struct nb_job *job, uint32_t slot) {
    struct probe *p = job->probe;
    struct wire_probe sum = {
        .lanes = (uint32_t)nb_tally_lanes(&p->tally), .slot = slot, .bytes = p->bytes, .algorithm = NB_ALGORITHM_RING};
    p->under_way++;
    nb_probe_order(job, &sum);
}

static void turn_begin(struct nb_job *job) {
    struct probe *p = job->probe;
    p->counting = false;
    p->over = false;
    p->turn_ns = nb_now_ns();
    p->window_ns = p->turn_ns;
    for (uint32_t slot = 0; slot < PROBE_SLOTS && !job->failed; slot++) {
        order(job, slot);
    }
}

void nb_probe_begin(struct nb_job *job) {
    struct probe *p = job->probe;
    p->busy = true;
    p->bytes = PROBE_BYTES_MIN;
    nb_tally_begin(&p->tally, job->info.streams_open);
    turn_begin(job);
}

// Memory of its own, which the lanes know, and the ranks of this host.
static int memory_open(struct nb_job *job, struct nb_error *err) {
    struct nb_arena *arena = &job->probe->arena;
    if (arena->base != NULL) {
        return 0;
    }
    int rc = nb_arena_open(arena, (size_t)PROBE_SLOTS * PROBE_BYTES_MAX, err);
    rc = rc == 0 ? nb_lanes_map(job->lanes, arena->base, arena->bytes, err) : rc;
    rc = rc == -ENOSPC ? 0 : rc; // it travels through staging
    if (rc == 0 && nb_local_hosts(job) > 1) {
        nb_local_map(job, arena->base, arena->bytes, nb_arena_pass(arena));
    }
    return rc;
}

static bool is_possible(struct nb_job *job, const struct wire_probe *sum) {
    bool way = sum->algorithm == NB_ALGORITHM_RING ||
               (sum->algorithm == NB_ALGORITHM_TWO_LEVEL && nb_local_hosts(job) > 1 && sum->bytes > 0);
    return way && sum->slot < PROBE_SLOTS && sum->bytes <= PROBE_BYTES_MAX && sum->bytes % 4 == 0 &&
           nb_member_next(job, sum->seq);
}

void nb_probe_run(struct nb_job *job, const struct wire_probe *sum) {
    struct nb_error why = {0};
    if (!is_possible(job, sum)) {
        nb_job_wire_fail(job, 0, "an impossible probe");
        return;
    }
    int rc = memory_open(job, &why);
    struct nb_segment segment = {.bytes = sum->bytes};
    if (rc == 0) {
        segment.base = (char *)job->probe->arena.base + sum->slot * (size_t)PROBE_BYTES_MAX;
    }
    struct nb_op op = {
        .name = "probe", .kind = NB_OP_ALLREDUCE, .dtype = NB_F32, .segments = &segment, .segment_count = 1};
    struct nb_work *work = NULL;
    if (rc == 0) {
        rc = nb_work_make(&job->world, &op, &work, &why);
    }
    if (rc == 0 && work->algorithm != sum->algorithm) {
        rc = nb_run_prepare(work, (enum nb_algorithm)sum->algorithm, &why);
    }
    if (rc == 0) {
        rc = nb_run_peers(work, &why);
    }
    if (rc < 0 || work == NULL) {
        nb_job_fail(job, &why, true);
        return;
    }
    work->refs = 1;
    work->quiet = true;
    work->bucket = sum->slot;
    nb_lanes_use(job->lanes, sum->lanes <= NB_LANES_MAX ? (int)sum->lanes : NB_LANES_MAX);
    nb_run_start(work, sum->seq);
}

static void probe_end(struct nb_job *job) {
    struct probe *p = job->probe;
    struct wire_streams result = {.count = (uint32_t)p->tally.count, .used = (uint32_t)nb_tally_choose(&p->tally)};
    for (int i = 0; i < p->tally.count; i++) {
        result.points[i] = nb_tally_point(&p->tally, i);
    }
    p->busy = false;
    nb_control_broadcast(job, CTL_STREAMS, &result, sizeof result);
    nb_probe_streams(job, &result);
    nb_agree_release(job);
}

// A turn is over, and nothing is under way: the next one is of the next count that is not known yet.
static void turn_end(struct nb_job *job) {
    if (nb_tally_next(&job->probe->tally, nb_now_ns() - job->probe->turn_ns)) {
        turn_begin(job);
    } else {
        probe_end(job);
    }
}

// Bytes that have landed here, those of unfinished sums too: sums end in bunches, bytes do not.
static uint64_t landed_now(const struct nb_job *job) {
    uint64_t bytes = job->probe->landed;
    for (struct nb_list *it = job->running.next; it != &job->running; it = it->next) {
        const struct nb_work *work = NB_CONTAINER(it, struct nb_work, link);
        bytes += work->quiet ? work->in.bytes_moved : 0;
    }
    return bytes;
}

// The first window of a turn does not count: it may live on credit that shapers and buffers had saved.
static void window_end(struct nb_job *job, int64_t now) {
    struct probe *p = job->probe;
    uint64_t landed = landed_now(job);
    if (p->counting) {
        nb_tally_window(&p->tally, landed - p->begun, now - p->window_ns);
    }
    p->over = p->counting;
    p->counting = true;
    p->begun = landed;
    p->window_ns = now;
}

void nb_probe_finished(struct nb_job *job, struct nb_work *work) {
    struct probe *p = job->probe;
    uint64_t landed = work->in.bytes_moved;
    uint32_t slot = work->bucket;
    nb_work_finish(work, NULL);
    if (job->rank != 0 || job->failed) {
        return;
    }
    if (nb_costs_busy(job)) {
        nb_costs_finished(job);
        return;
    }
    int64_t now = nb_now_ns();
    p->under_way--;
    p->landed += landed;
    if (!p->over && now - p->window_ns >= WINDOW_NS) {
        window_end(job, now);
    } else if (!p->counting && p->bytes < PROBE_BYTES_MAX) {
        p->bytes *= 2; // a sum that is over this soon is too small to fill the lanes
    }
    if (!p->over) {
        order(job, slot);
    } else if (p->under_way == 0) {
        turn_end(job);
    }
}

void nb_probe_streams(struct nb_job *job, const struct wire_streams *streams) {
    struct probe *p = job->probe;
    p->done = true;
    nb_lanes_use(job->lanes, streams->used <= NB_LANES_MAX ? (int)streams->used : NB_LANES_MAX);
    pthread_mutex_lock(&job->lock);
    job->info.streams_used = (int)streams->used;
    job->info.probe_count = (int)(streams->count < NB_PROBE_MAX ? streams->count : NB_PROBE_MAX);
    memcpy(job->info.probe, streams->points, sizeof job->info.probe);
    pthread_mutex_unlock(&job->lock);
    double best = 0;
    for (int i = 0; i < job->info.probe_count; i++) {
        const struct nb_probe_point *at = &streams->points[i];
        double rate = nb_probe_rate(at);
        best = rate > best ? rate : best;
        nb_ring_put(job->config.ring, NB_EV_PROBE, 0, (uint64_t)at->lanes, at->bytes, (uint64_t)at->ns, 0, 0);
    }
    nb_costs_wire(job, best);
}
