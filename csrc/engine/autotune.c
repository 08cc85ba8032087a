// Autotuning: measures how many streams the job should use, and the cost of a step and of a byte on its lanes.
//
// Streams (streams=auto): measures the throughput of 1, 2, 4, 8, 16 lanes once, at the job's first large transfer, or
// after many smaller ones. lane_search.h has the rule. Costs: measured once, at the first all-reduce with a choice of
// algorithms, by a few all-reduces in sequence: in a ring and, where possible, in two levels. Rank 0 orders these
// all-reduces, over memory of their own, and sends the results to all ranks.
#include "engine/autotune.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/arena.h"
#include "base/clock.h"
#include "base/dtype.h"
#include "base/error.h"
#include "base/list.h"
#include "coll/choose.h"
#include "coll/reduce.h"
#include "engine/algorithms.h"
#include "engine/context.h"
#include "engine/control.h"
#include "engine/device.h"
#include "engine/engine.h"
#include "engine/lane_search.h"
#include "engine/operation.h"
#include "engine/shared.h"
#include "trace/event.h"
#include "trace/ring.h"
#include "transport/lanes.h"
#include "transport/transport.h"

enum {
    PROBE_FROM_BYTES = 4 * 1024 * 1024, // the first transfer of this size starts the probe
    COUNTED_BYTES = 256 * 1024          // so do smaller ones from this size on, see PROBE_AFTER_NS
};

// Smaller transfers start the probe, which takes up to 2.5 s, once they have taken so long: then it pays. Their time is
// that of their bytes by the measured cost of a byte.
static const double PROBE_AFTER_NS = 10e9;

enum {
    PROBE_SLOTS = 2,                    // probes in flight, so that lanes never run dry between two
    PROBE_BYTES_MAX = 16 * 1024 * 1024, // together larger than the caches, as gradients are
    PROBE_BYTES_MIN = 1024 * 1024,
    WINDOW_NS = 50 * 1000 * 1000
};

struct probe {
    struct nb_arena arena;
    bool mapped;
    bool busy;
    bool done;
    // rank 0:
    double counted_ns; // time of transfers of COUNTED_BYTES or more, so far
    struct nb_lane_search search;
    bool counting;     // in the measured window, not in the warm-up before it
    bool over;         // the measured window has ended; probes in flight still complete
    int under_way;     // probes in flight
    uint64_t bytes;    // of a probe
    uint64_t landed;   // bytes of completed probes
    uint64_t begun;    // bytes landed at the start of the window
    int64_t turn_ns;   // start of this turn
    int64_t window_ns; // start of this window
};

enum {
    SMALL_PART = 64, // bytes a rank: the time of a step without that of its bytes
    LARGE_BYTES = 256 * 1024,
    LEVELS_PIECES = 4,
    ADD_COUNT = 512 * 1024, // float32: larger than a core's own caches
    ADDS = 8,
    PASSES = 2, // at least, spread over time: ranks may share a core for a while
    TRIES = 5   // then the time of the large ones counts in full
};

// All-reduces measured, in this order; the second of each pair is larger.
enum sums { RING_SMALL, RING_LARGE, LEVELS_SMALL, LEVELS_LARGE, SUMS };

struct cost_sums { // rank 0
    bool busy;
    bool done;
    enum sums now;
    int left;   // repetitions left
    int passes; // completed passes over the present pair
    int64_t began_ns;
    int64_t least_ns[SUMS]; // the minimum: other load on the hosts only adds to a time
};

struct autotune {
    struct probe probe;
    struct cost_sums costs;
};

int nb_autotune_open(struct nb_job *job, struct nb_error *err) {
    job->autotune = calloc(1, sizeof *job->autotune);
    if (job->autotune == NULL) {
        return nb_fail(err, -ENOMEM, "cannot allocate the state of autotuning");
    }
    job->autotune->probe.arena.fd = -1;
    return 0;
}

void nb_autotune_close(struct nb_job *job) {
    if (job->autotune != NULL) {
        nb_arena_close(&job->autotune->probe.arena);
        free(job->autotune);
    }
}

static void sum_over(struct nb_work *work);

static void order_sum(struct nb_job *job, struct wire_probe *sum) {
    sum->seq = nb_job_next_seq(job, 1);
    nb_control_broadcast(job, CTL_PROBE, sum, sizeof *sum);
    nb_autotune_run(job, sum);
}

static bool costs_wanted(const struct nb_job *job, const struct op_descriptor *desc) {
    return job->config.algorithm == NB_ALGORITHM_NONE && !job->autotune->costs.done && desc->kind == NB_OP_ALLREDUCE &&
           desc->bytes > 0 && (desc->bytes < PROBE_FROM_BYTES || nb_shared_hosts(job) > 1) &&
           !nb_shared_everywhere(job);
}

static bool is_small(enum sums which) {
    return which == RING_SMALL || which == LEVELS_SMALL;
}

// Repetitions of each; the first is not counted.
static int number_of(enum sums which) {
    return is_small(which) ? 10 : 6;
}

// Enough pieces for two levels to overlap memory work with the network; as many bytes in the ring, to compare.
static uint64_t large_bytes(const struct nb_job *job) {
    uint64_t pieces = LEVELS_PIECES * nb_shared_piece_bytes(job);
    return pieces < LARGE_BYTES ? LARGE_BYTES : pieces < PROBE_FROM_BYTES ? pieces : PROBE_FROM_BYTES;
}

static void sum_order(struct nb_job *job) {
    struct cost_sums *c = &job->autotune->costs;
    struct wire_probe sum = {.lanes = (uint32_t)nb_lanes_used(job->lanes),
                             .bytes = is_small(c->now) ? (uint64_t)SMALL_PART * (uint64_t)job->size : large_bytes(job),
                             .algorithm = c->now < LEVELS_SMALL ? NB_ALGORITHM_RING : NB_ALGORITHM_TWO_LEVEL};
    c->began_ns = nb_now_ns();
    order_sum(job, &sum);
}

static void sums_begin(struct nb_job *job, enum sums which) {
    struct cost_sums *c = &job->autotune->costs;
    c->now = which;
    c->left = number_of(which);
    sum_order(job);
}

// Measures the small all-reduces, then the large ones, and repeats both.
static void begin_pair(struct nb_job *job, enum sums small) {
    job->autotune->costs.passes = 0;
    job->autotune->costs.least_ns[small] = INT64_MAX;
    job->autotune->costs.least_ns[small + 1] = INT64_MAX;
    sums_begin(job, small);
}

static void costs_begin(struct nb_job *job) {
    job->autotune->costs.busy = true;
    begin_pair(job, RING_SMALL);
}

// Returns the ns to add one byte to another in this rank's memory.
static double adding_ns(void) {
    const size_t bytes = ADD_COUNT * sizeof(float);
    float *memory = malloc(2 * bytes);
    nb_reduce_fn add = nb_reduce_kernel(nb_reduce_best(), NB_F32, NB_SUM);
    int64_t best = INT64_MAX;
    if (memory == NULL) {
        return 0;
    }
    memset(memory, 1, 2 * bytes); // unwritten memory may map a single zero page repeatedly
    for (int i = 0; i < ADDS; i++) {
        int64_t began = nb_now_ns();
        add(memory, &memory[ADD_COUNT], ADD_COUNT);
        int64_t took = nb_now_ns() - began;
        best = took < best ? took : best;
    }
    free(memory);
    return (double)best / (double)bytes;
}

// The time beyond a step; an upper bound if the step alone took longer.
static double beyond(int64_t large, int64_t small) {
    return (double)(large > small ? large - small : large);
}

static void conclude(struct nb_job *job) {
    struct cost_sums *c = &job->autotune->costs;
    double p = (double)job->size;
    double hosts = (double)nb_shared_hosts(job);
    double bytes = (double)large_bytes(job);
    double ring_ns = beyond(c->least_ns[RING_LARGE], c->least_ns[RING_SMALL]);
    struct nb_costs found = {.alpha_ns = (double)c->least_ns[RING_SMALL] / (2 * (p - 1) + 1), // the order is a step too
                             .beta_ns = ring_ns / (2 * (p - 1) / p * bytes),
                             .gamma_ns = adding_ns()};
    if (hosts > 1) {
        double wire_ns = 2 * (hosts - 1) / hosts * bytes * found.beta_ns;
        double more_ns = beyond(c->least_ns[LEVELS_LARGE], c->least_ns[LEVELS_SMALL]) - wire_ns;
        found.levels_ns = (double)c->least_ns[LEVELS_SMALL];
        found.levels_byte_ns = more_ns > 0 ? more_ns / bytes : 0;
    }
    c->busy = false;
    nb_control_broadcast(job, CTL_COSTS, &found, sizeof found);
    nb_autotune_costs(job, &found);
}

static bool again(struct cost_sums *c) {
    bool busy = c->least_ns[c->now] <= c->least_ns[c->now - 1]; // too much other load
    c->passes++;
    return c->passes < (busy ? TRIES : PASSES);
}

static void cost_sum_over(struct nb_job *job) {
    struct cost_sums *c = &job->autotune->costs;
    int64_t took = nb_now_ns() - c->began_ns;
    if (c->left < number_of(c->now) && took < c->least_ns[c->now]) {
        c->least_ns[c->now] = took;
    }
    if (--c->left > 0) {
        sum_order(job);
    } else if (is_small(c->now)) {
        sums_begin(job, c->now + 1);
    } else if (again(c)) {
        sums_begin(job, c->now - 1);
    } else if (c->now == RING_LARGE && nb_shared_hosts(job) > 1) {
        begin_pair(job, LEVELS_SMALL);
    } else {
        conclude(job);
    }
}

void nb_autotune_costs(struct nb_job *job, const struct nb_costs *found) {
    job->autotune->costs.done = true;
    pthread_mutex_lock(&job->lock);
    job->info.costs = *found;
    pthread_mutex_unlock(&job->lock);
    job->costs_new = true;
}

// The stream probe has measured the cost of a byte more precisely.
static void costs_of_wire(struct nb_job *job, double bytes_per_ns) {
    pthread_mutex_lock(&job->lock);
    if (bytes_per_ns > 0) {
        job->info.costs.beta_ns = 1 / bytes_per_ns;
        job->costs_new = job->info.costs.alpha_ns > 0;
    }
    pthread_mutex_unlock(&job->lock);
}

static void order(struct nb_job *job, uint32_t slot) {
    struct probe *p = &job->autotune->probe;
    struct wire_probe sum = {.lanes = (uint32_t)nb_lane_search_lanes(&p->search),
                             .slot = slot,
                             .bytes = p->bytes,
                             .algorithm = NB_ALGORITHM_RING};
    p->under_way++;
    order_sum(job, &sum);
}

static void turn_begin(struct nb_job *job) {
    struct probe *p = &job->autotune->probe;
    p->counting = false;
    p->over = false;
    p->turn_ns = nb_now_ns();
    p->window_ns = p->turn_ns;
    for (uint32_t slot = 0; slot < PROBE_SLOTS && !job->failed; slot++) {
        order(job, slot);
    }
}

static void probe_begin(struct nb_job *job) {
    struct probe *p = &job->autotune->probe;
    p->busy = true;
    p->bytes = PROBE_BYTES_MIN;
    nb_lane_search_begin(&p->search, job->info.streams_open);
    turn_begin(job);
}

// Allocates the probes' memory and registers it with the lanes and the ranks of this host.
static int memory_open(struct nb_job *job, struct nb_error *err) {
    struct nb_arena *arena = &job->autotune->probe.arena;
    if (arena->base != NULL) {
        return 0;
    }
    int rc = nb_arena_open(arena, (size_t)PROBE_SLOTS * PROBE_BYTES_MAX, err);
    if (rc < 0) {
        return rc;
    }
    nb_job_register(job, arena->base, arena->bytes);
    if (nb_shared_hosts(job) > 1) {
        nb_shared_map(job, arena->base, arena->bytes, nb_arena_pass(arena));
    }
    return 0;
}

static bool is_possible(struct nb_job *job, const struct wire_probe *sum) {
    bool way = sum->algorithm == NB_ALGORITHM_RING ||
               (sum->algorithm == NB_ALGORITHM_TWO_LEVEL && nb_shared_hosts(job) > 1 && sum->bytes > 0);
    return way && sum->slot < PROBE_SLOTS && sum->bytes <= PROBE_BYTES_MAX && sum->bytes % 4 == 0 &&
           nb_job_accept_seq(job, sum->seq);
}

void nb_autotune_run(struct nb_job *job, const struct wire_probe *sum) {
    struct nb_error why = {0};
    if (!is_possible(job, sum)) {
        nb_job_wire_fail(job, 0, "an invalid probe");
        return;
    }
    int rc = memory_open(job, &why);
    struct nb_segment segment = {.bytes = sum->bytes};
    if (rc == 0) {
        segment.base = (char *)job->autotune->probe.arena.base + sum->slot * (size_t)PROBE_BYTES_MAX;
    }
    struct nb_op op = {
        .name = "probe", .kind = NB_OP_ALLREDUCE, .dtype = NB_F32, .segments = &segment, .segment_count = 1};
    struct nb_work *work = NULL;
    rc = rc == 0 ? nb_op_check(&job->world, &op, &why) : rc;
    if (rc == 0) {
        rc = nb_work_make(&job->world, &op, nb_algorithm_get(job, sum->algorithm), &work, &why);
    }
    if (rc == 0) {
        rc = nb_work_peers(work, &why);
    }
    if (rc < 0 || work == NULL) {
        nb_job_fail(job, &why, true);
        return;
    }
    work->refs = 1;
    work->ring = NULL; // not recorded
    work->on_flows_done = sum_over;
    work->bucket = sum->slot;
    nb_lanes_use(job->lanes, sum->lanes <= NB_LANES_MAX ? (int)sum->lanes : NB_LANES_MAX);
    nb_device_start(work, sum->seq);
}

static void probe_end(struct nb_job *job) {
    struct probe *p = &job->autotune->probe;
    struct wire_streams result = {.count = (uint32_t)p->search.count,
                                  .used = (uint32_t)nb_lane_search_choose(&p->search)};
    for (int i = 0; i < p->search.count; i++) {
        result.points[i] = nb_lane_search_point(&p->search, i);
    }
    p->busy = false;
    nb_control_broadcast(job, CTL_STREAMS, &result, sizeof result);
    nb_autotune_streams(job, &result);
}

// Ends a turn with no probe in flight: starts the turn of the next unsettled count, or ends the probe.
static void turn_end(struct nb_job *job) {
    if (nb_lane_search_next(&job->autotune->probe.search, nb_now_ns() - job->autotune->probe.turn_ns)) {
        turn_begin(job);
    } else {
        probe_end(job);
    }
}

// Bytes that have landed here, including unfinished probes: probes complete in bursts, bytes do not.
static uint64_t landed_now(const struct nb_job *job) {
    uint64_t bytes = job->autotune->probe.landed;
    for (struct nb_list *it = job->ops.running.next; it != &job->ops.running; it = it->next) {
        const struct nb_work *work = NB_CONTAINER(it, struct nb_work, link);
        bytes += work->on_flows_done == sum_over ? work->in.bytes_moved : 0;
    }
    return bytes;
}

// The first window of a turn does not count: it may profit from burst credit of traffic shapers and from empty buffers.
static void window_end(struct nb_job *job, int64_t now) {
    struct probe *p = &job->autotune->probe;
    uint64_t landed = landed_now(job);
    if (p->counting) {
        nb_lane_search_window(&p->search, landed - p->begun, now - p->window_ns);
    }
    p->over = p->counting;
    p->counting = true;
    p->begun = landed;
    p->window_ns = now;
}

static void sum_over(struct nb_work *work) {
    struct nb_job *job = work->comm->job;
    struct probe *p = &job->autotune->probe;
    uint64_t landed = work->in.bytes_moved;
    uint32_t slot = work->bucket;
    nb_work_discard(work);
    if (job->rank != 0 || job->failed) {
        return;
    }
    if (job->autotune->costs.busy) {
        cost_sum_over(job);
        return;
    }
    int64_t now = nb_now_ns();
    p->under_way--;
    p->landed += landed;
    if (!p->over && now - p->window_ns >= WINDOW_NS) {
        window_end(job, now);
    } else if (!p->counting && p->bytes < PROBE_BYTES_MAX) {
        p->bytes *= 2; // a probe that completes this fast is too small to fill the lanes
    }
    if (!p->over) {
        order(job, slot);
    } else if (p->under_way == 0) {
        turn_end(job);
    }
}

void nb_autotune_streams(struct nb_job *job, const struct wire_streams *streams) {
    struct probe *p = &job->autotune->probe;
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
    costs_of_wire(job, best);
}

bool nb_autotune_begin(struct nb_job *job, const struct op_descriptor *desc) {
    struct probe *p = &job->autotune->probe;
    p->counted_ns += desc->bytes >= COUNTED_BYTES ? (double)desc->bytes * job->info.costs.beta_ns : 0;
    bool due = desc->bytes >= PROBE_FROM_BYTES || p->counted_ns >= PROBE_AFTER_NS;
    if (due && job->config.streams == NB_STREAMS_AUTO && !p->done && !nb_shared_everywhere(job)) {
        probe_begin(job);
    } else if (costs_wanted(job, desc)) {
        costs_begin(job);
    } else {
        return false;
    }
    return true;
}

bool nb_autotune_busy(const struct nb_job *job) {
    return job->autotune->probe.busy || job->autotune->costs.busy;
}

const struct nb_algorithm *nb_autotune_choose(const struct nb_job *job, int size, enum nb_op_kind kind, size_t bytes) {
    return nb_algorithm_choose(job, &job->info.costs, size, kind, bytes); // only the progress owner writes the costs
}

const struct nb_algorithm *nb_autotune_guess(struct nb_job *job, int size, enum nb_op_kind kind, size_t bytes) {
    pthread_mutex_lock(&job->lock);
    struct nb_costs costs = job->info.costs;
    pthread_mutex_unlock(&job->lock);
    return nb_algorithm_choose(job, &costs, size, kind, bytes);
}
