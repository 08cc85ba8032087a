// What a step and a byte cost on this job's lanes: measured once, at its first all-reduce that leaves a choice, by a few
// sums of its own in a ring, one after the other. Rank 0 orders them and tells all ranks what came out.
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
    SMALL_SUMS = 9, // and one before them that is not counted
    LARGE_SUMS = 5,
    ADD_COUNT = 16 * 1024, // float32
    ADDS = 8,
    TRIES = 4 // then the larger ones count whole
};

struct costs { // of rank 0
    bool busy;
    bool done;
    int sums; // that are over, of the size that is measured
    bool large;
    int tries;
    int64_t began_ns;
    int64_t small_ns[SMALL_SUMS];
    int64_t large_ns[LARGE_SUMS];
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
           desc->bytes > 0 && desc->bytes < PROBE_FROM_BYTES && !nb_local_everywhere(job);
}

bool nb_costs_busy(const struct nb_job *job) {
    return job->costs->busy;
}

static void order(struct nb_job *job) {
    struct costs *c = job->costs;
    uint64_t small = (uint64_t)SMALL_PART * (uint64_t)job->size;
    c->began_ns = nb_now_ns();
    nb_probe_order(job, nb_lanes_used(job->lanes), 0, c->large ? (uint64_t)LARGE_BYTES : small);
}

void nb_costs_begin(struct nb_job *job) {
    job->costs->busy = true;
    job->costs->sums = -1;
    order(job);
}

// What else runs on these hosts only adds to a time.
static double least(const int64_t *values, int count) {
    int64_t lowest = values[0];
    for (int i = 1; i < count; i++) {
        lowest = values[i] < lowest ? values[i] : lowest;
    }
    return (double)lowest;
}

// A byte added to another, in this rank's caches.
static double adding_ns(void) {
    float *memory = calloc((size_t)2 * ADD_COUNT, sizeof(float));
    nb_reduce_fn add = nb_reduce_kernel(nb_reduce_best(), NB_F32, NB_SUM);
    int64_t best = INT64_MAX;
    for (int i = 0; memory != NULL && i < ADDS; i++) {
        int64_t began = nb_now_ns();
        add(memory, &memory[ADD_COUNT], ADD_COUNT);
        int64_t took = nb_now_ns() - began;
        best = took < best ? took : best;
    }
    free(memory);
    return best == INT64_MAX ? 0 : (double)best / (ADD_COUNT * (double)sizeof(float));
}

static void conclude(struct nb_job *job) {
    struct costs *c = job->costs;
    double p = (double)job->size;
    double small = least(c->small_ns, SMALL_SUMS);
    double large = least(c->large_ns, LARGE_SUMS);
    if (large <= small && ++c->tries < TRIES) { // too much else runs: once more
        c->large = false;
        c->sums = -1;
        order(job);
        return;
    }
    double bytes_ns = large > small ? large - small : large;        // at most
    struct nb_costs found = {.alpha_ns = small / (2 * (p - 1) + 1), // the order is a step too
                             .beta_ns = bytes_ns / (2 * (p - 1) / p * (double)LARGE_BYTES),
                             .gamma_ns = adding_ns()};
    c->busy = false;
    nb_control_broadcast(job, CTL_COSTS, &found, sizeof found);
    nb_costs_heard(job, &found);
    nb_agree_release(job);
}

void nb_costs_finished(struct nb_job *job) {
    struct costs *c = job->costs;
    int64_t took = nb_now_ns() - c->began_ns;
    int last = c->large ? LARGE_SUMS : SMALL_SUMS;
    if (c->sums >= 0) {
        (c->large ? c->large_ns : c->small_ns)[c->sums] = took;
    }
    c->sums++;
    if (c->sums == last && c->large) {
        conclude(job);
        return;
    }
    if (c->sums == last) {
        c->large = true;
        c->sums = -1;
    }
    order(job);
}

void nb_costs_heard(struct nb_job *job, const struct nb_costs *found) {
    job->costs->done = true;
    pthread_mutex_lock(&job->lock);
    job->info.costs = *found;
    pthread_mutex_unlock(&job->lock);
}

// The probe of streams has measured the wire better.
void nb_costs_wire(struct nb_job *job, double bytes_per_ns) {
    pthread_mutex_lock(&job->lock);
    job->info.costs.beta_ns = bytes_per_ns > 0 ? 1 / bytes_per_ns : job->info.costs.beta_ns;
    pthread_mutex_unlock(&job->lock);
}

enum nb_algorithm nb_costs_choose(struct nb_job *job, size_t bytes) {
    enum nb_algorithm asked = job->config.algorithm;
    if (asked == NB_ALGORITHM_STAR && (bytes == 0 || bytes > NB_STAR_MAX)) {
        return NB_ALGORITHM_RING;
    }
    if (asked != NB_ALGORITHM_NONE && asked != NB_ALGORITHM_TWO_LEVEL) {
        return asked;
    }
    if (nb_local_two_level(job, bytes)) {
        return NB_ALGORITHM_TWO_LEVEL;
    }
    pthread_mutex_lock(&job->lock);
    struct nb_costs costs = job->info.costs;
    pthread_mutex_unlock(&job->lock);
    return nb_local_everywhere(job) ? NB_ALGORITHM_RING : nb_choose(&costs, job->size, bytes);
}
