// What a step and a byte cost on this job's lanes: measured once, at its first all-reduce that leaves a choice, by a few
// sums of its own, one after the other, in a ring and, where that is possible, in two levels. Rank 0 orders them and tells
// all ranks what came out.
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/dtype.h"
#include "base/error.h"
#include "coll/choose.h"
#include "coll/reduce.h"
#include "engine/engine.h"
#include "engine/internal.h"
#include "engine/local.h"
#include "transport/lanes.h"

enum {
    SMALL_PART = 64, // bytes a rank: a step and nothing else
    LARGE_BYTES = 256 * 1024,
    LEVELS_PIECES = 4,
    ADD_COUNT = 512 * 1024, // float32: more than a processor's own caches hold
    ADDS = 8,
    PASSES = 2, // at least, some time apart: ranks may share a processor for a while
    TRIES = 5   // then the larger ones count whole
};

// What is summed, in this order; the second of two is the larger one.
enum sums { RING_SMALL, RING_LARGE, LEVELS_SMALL, LEVELS_LARGE, SUMS };

struct costs { // of rank 0
    bool busy;
    bool done;
    enum sums now;
    int left;   // of these sums
    int passes; // of the two of which it is one
    int64_t began_ns;
    int64_t least_ns[SUMS]; // what else runs on these hosts only adds to a time
};

int nb_costs_open(struct nb_job *job, struct nb_error *err) {
    job->costs = calloc(1, sizeof *job->costs);
    return job->costs != NULL ? 0 : nb_fail(err, -ENOMEM, "what steps and bytes cost");
}

void nb_costs_close(struct nb_job *job) {
    free(job->costs);
}

bool nb_costs_wanted(const struct nb_job *job, const struct desc *desc) {
    return job->config.algorithm == NB_ALGORITHM_NONE && !job->costs->done && desc->kind == NB_OP_ALLREDUCE &&
           desc->bytes > 0 && (desc->bytes < PROBE_FROM_BYTES || nb_local_hosts(job) > 1) && !nb_local_everywhere(job);
}

bool nb_costs_busy(const struct nb_job *job) {
    return job->costs->busy;
}

static bool is_small(enum sums which) {
    return which == RING_SMALL || which == LEVELS_SMALL;
}

// Of each; the first is not counted.
static int number_of(enum sums which) {
    return is_small(which) ? 10 : 6;
}

// In two levels, so many that what is done in memory can hide behind the wire; in the ring as many, to compare.
static uint64_t large_bytes(const struct nb_job *job) {
    uint64_t pieces = LEVELS_PIECES * nb_local_piece_bytes(job);
    return pieces < LARGE_BYTES ? LARGE_BYTES : pieces < PROBE_FROM_BYTES ? pieces : PROBE_FROM_BYTES;
}

static void order(struct nb_job *job) {
    struct costs *c = job->costs;
    struct wire_probe sum = {.lanes = (uint32_t)nb_lanes_used(job->lanes),
                             .bytes = is_small(c->now) ? (uint64_t)SMALL_PART * (uint64_t)job->size : large_bytes(job),
                             .algorithm = c->now < LEVELS_SMALL ? NB_ALGORITHM_RING : NB_ALGORITHM_TWO_LEVEL};
    c->began_ns = nb_now_ns();
    nb_probe_order(job, &sum);
}

static void begin(struct nb_job *job, enum sums which) {
    struct costs *c = job->costs;
    c->now = which;
    c->left = number_of(which);
    order(job);
}

// The smaller ones, then the larger ones, and both again.
static void begin_pair(struct nb_job *job, enum sums small) {
    job->costs->passes = 0;
    job->costs->least_ns[small] = INT64_MAX;
    job->costs->least_ns[small + 1] = INT64_MAX;
    begin(job, small);
}

void nb_costs_begin(struct nb_job *job) {
    job->costs->busy = true;
    begin_pair(job, RING_SMALL);
}

// A byte added to another, in this rank's memory.
static double adding_ns(void) {
    const size_t bytes = ADD_COUNT * sizeof(float);
    float *memory = malloc(2 * bytes);
    nb_reduce_fn add = nb_reduce_kernel(nb_reduce_best(), NB_F32, NB_SUM);
    int64_t best = INT64_MAX;
    if (memory == NULL) {
        return 0;
    }
    memset(memory, 1, 2 * bytes); // what nobody has written may be one page of zeros, again and again
    for (int i = 0; i < ADDS; i++) {
        int64_t began = nb_now_ns();
        add(memory, &memory[ADD_COUNT], ADD_COUNT);
        int64_t took = nb_now_ns() - began;
        best = took < best ? took : best;
    }
    free(memory);
    return (double)best / (double)bytes;
}

// At most, where a step alone took longer.
static double beyond(int64_t large, int64_t small) {
    return (double)(large > small ? large - small : large);
}

static void conclude(struct nb_job *job) {
    struct costs *c = job->costs;
    double p = (double)job->size;
    double hosts = (double)nb_local_hosts(job);
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
    nb_costs_heard(job, &found);
    nb_agree_release(job);
}

static bool again(struct costs *c) {
    bool busy = c->least_ns[c->now] <= c->least_ns[c->now - 1]; // too much else runs
    c->passes++;
    return c->passes < (busy ? TRIES : PASSES);
}

void nb_costs_finished(struct nb_job *job) {
    struct costs *c = job->costs;
    int64_t took = nb_now_ns() - c->began_ns;
    if (c->left < number_of(c->now) && took < c->least_ns[c->now]) {
        c->least_ns[c->now] = took;
    }
    if (--c->left > 0) {
        order(job);
    } else if (is_small(c->now)) {
        begin(job, c->now + 1);
    } else if (again(c)) {
        begin(job, c->now - 1);
    } else if (c->now == RING_LARGE && nb_local_hosts(job) > 1) {
        begin_pair(job, LEVELS_SMALL);
    } else {
        conclude(job);
    }
}

void nb_costs_heard(struct nb_job *job, const struct nb_costs *found) {
    job->costs->done = true;
    pthread_mutex_lock(&job->lock);
    job->info.costs = *found;
    pthread_mutex_unlock(&job->lock);
    job->costs_new = true;
}

// The probe of streams has measured the wire better.
void nb_costs_wire(struct nb_job *job, double bytes_per_ns) {
    pthread_mutex_lock(&job->lock);
    if (bytes_per_ns > 0) {
        job->info.costs.beta_ns = 1 / bytes_per_ns;
        job->costs_new = job->info.costs.alpha_ns > 0;
    }
    pthread_mutex_unlock(&job->lock);
}

static enum nb_algorithm pinned(const struct nb_job *job, int hosts, size_t bytes) {
    enum nb_algorithm asked = job->config.algorithm;
    bool star = asked == NB_ALGORITHM_STAR && (bytes == 0 || bytes > NB_STAR_MAX);
    bool levels = asked == NB_ALGORITHM_TWO_LEVEL && (bytes == 0 || hosts == 1);
    return star || levels ? NB_ALGORITHM_RING : asked;
}

static enum nb_algorithm best_of(const struct nb_job *job, const struct nb_costs *costs, int size, size_t bytes) {
    bool whole = size == job->size;
    int hosts = whole ? nb_local_hosts(job) : 1;
    if (job->config.algorithm != NB_ALGORITHM_NONE) {
        return pinned(job, hosts, bytes);
    }
    if (whole && nb_local_everywhere(job)) {
        return NB_ALGORITHM_RING;
    }
    return nb_choose(costs, size, hosts, bytes);
}

static enum nb_algorithm choose(const struct nb_job *job, const struct nb_costs *costs, int size, size_t bytes) {
    enum nb_algorithm best = best_of(job, costs, size, bytes);
    bool star = best == NB_ALGORITHM_STAR && size < job->size; // rank 0 may not be one of them
    return star ? NB_ALGORITHM_DOUBLING : best;
}

enum nb_algorithm nb_costs_choose(const struct nb_job *job, int size, size_t bytes) {
    return choose(job, &job->info.costs, size, bytes); // which only who drives writes
}

enum nb_algorithm nb_costs_guess(struct nb_job *job, int size, size_t bytes) {
    pthread_mutex_lock(&job->lock);
    struct nb_costs costs = job->info.costs;
    pthread_mutex_unlock(&job->lock);
    return choose(job, &costs, size, bytes);
}
