// streams=auto: what 1, 2, 4, 8, 16 lanes of this job move, measured once, at its first large transfer, by sums of its
// own over memory of its own. Rank 0 orders; the smallest count within 2 % of the best is used from then on.
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
#include "trace/event.h"
#include "trace/ring.h"
#include "transport/lanes.h"
#include "transport/transport.h"

enum {
    PROBE_SLOTS = 3, // sums under way at once, so that lanes never run dry between two
    PROBE_BYTES_MAX = 8 * 1024 * 1024,
    PROBE_BYTES_MIN = 1024 * 1024,
    WINDOW_NS = 50 * 1000 * 1000,
    COUNT_NS = 500 * 1000 * 1000, // the longest that one count is measured
    AGREE_PERCENT = 5,
    GOOD_PERCENT = 2
};

struct probe {
    struct nb_arena arena;
    bool mapped;
    bool busy;
    bool done;
    // rank 0
    int lanes; // being measured
    bool settled;
    int under_way;
    uint64_t bytes;              // of a sum
    uint64_t landed;             // bytes of the sums that are over
    uint64_t begun;              // bytes that had landed when the window began
    int64_t count_ns;            // when this count began
    int64_t window_ns;           // when this window began
    int windows;                 // of this count, so far
    struct nb_probe_point last;  // window
    struct nb_probe_point found; // the last two together
    struct wire_streams result;
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
        .lanes = (uint32_t)p->lanes, .slot = slot, .bytes = p->bytes, .algorithm = NB_ALGORITHM_RING};
    p->under_way++;
    nb_probe_order(job, &sum);
}

static void count_begin(struct nb_job *job, int lanes) {
    struct probe *p = job->probe;
    p->lanes = lanes;
    p->settled = false;
    p->last = (struct nb_probe_point){.lanes = lanes};
    p->windows = 0;
    p->count_ns = nb_now_ns();
    p->window_ns = p->count_ns;
    p->begun = p->landed;
    for (uint32_t slot = 0; slot < PROBE_SLOTS && !job->failed; slot++) {
        order(job, slot);
    }
}

void nb_probe_begin(struct nb_job *job) {
    job->probe->busy = true;
    job->probe->bytes = PROBE_BYTES_MIN;
    count_begin(job, 1);
}

// Memory of its own, which the lanes know, and the ranks of this host.
static int memory_open(struct nb_job *job, struct nb_error *err) {
    struct nb_arena *arena = &job->probe->arena;
    if (arena->base != NULL) {
        return 0;
    }
    int rc = nb_arena_open(arena, (size_t)PROBE_SLOTS * PROBE_BYTES_MAX, err);
    rc = rc == 0 ? nb_lanes_map(job->lanes, arena->base, arena->bytes, err) : rc;
    if (rc == 0 && nb_local_hosts(job) > 1 && arena->fd >= 0) {
        nb_local_map(job, arena->base, arena->bytes, fcntl(arena->fd, F_DUPFD_CLOEXEC, 0));
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

static double rate_of(const struct nb_probe_point *point) {
    return point->ns > 0 ? (double)point->bytes / (double)point->ns : 0;
}

// The smallest count that is nearly the best.
static uint32_t choose(const struct wire_streams *result) {
    double best = 0;
    for (uint32_t i = 0; i < result->count; i++) {
        double rate = rate_of(&result->points[i]);
        best = rate > best ? rate : best;
    }
    for (uint32_t i = 0; i < result->count; i++) {
        double rate = rate_of(&result->points[i]);
        if (rate >= best * (100 - GOOD_PERCENT) / 100) {
            return (uint32_t)result->points[i].lanes;
        }
    }
    return 1;
}

static void count_end(struct nb_job *job) {
    struct probe *p = job->probe;
    p->result.points[p->result.count++] = p->found;
    int next = p->lanes * 2;
    if (next <= job->info.streams_open && p->result.count < NB_PROBE_MAX) {
        count_begin(job, next);
        return;
    }
    p->result.used = choose(&p->result);
    p->busy = false;
    nb_control_broadcast(job, CTL_STREAMS, &p->result, sizeof p->result);
    nb_probe_streams(job, &p->result);
    nb_agree_release(job);
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

// A window ends: settled when it agrees with the one before, or when time is up; what the two have moved counts. The
// first is not compared: it may live on credit that shapers and buffers had saved.
static void window_end(struct nb_job *job, int64_t now) {
    struct probe *p = job->probe;
    uint64_t landed = landed_now(job);
    struct nb_probe_point window = {.lanes = p->lanes, .bytes = landed - p->begun, .ns = now - p->window_ns};
    double before = rate_of(&p->last);
    double low = before * (100 - AGREE_PERCENT) / 100;
    double high = before * (100 + AGREE_PERCENT) / 100;
    bool agrees = ++p->windows > 2 && rate_of(&window) >= low && rate_of(&window) <= high;
    p->settled = agrees || now - p->count_ns >= COUNT_NS;
    p->found = window;
    if (p->windows > 2) {
        p->found.bytes += p->last.bytes;
        p->found.ns += p->last.ns;
    }
    p->last = window;
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
    if (!p->settled && now - p->window_ns >= WINDOW_NS) {
        window_end(job, now);
    } else if (!p->settled && p->bytes < PROBE_BYTES_MAX && now - p->count_ns < WINDOW_NS) {
        p->bytes *= 2; // a sum that is over this soon is too small to fill the lanes
    }
    if (!p->settled) {
        order(job, slot);
    } else if (p->under_way == 0) {
        count_end(job);
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
        double rate = rate_of(at);
        best = rate > best ? rate : best;
        nb_ring_put(job->config.ring, NB_EV_PROBE, 0, (uint64_t)at->lanes, at->bytes, (uint64_t)at->ns, 0, 0);
    }
    nb_costs_wire(job, best);
}
