// Simulation input: checks a program, a plan and a cost.
#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "sim/internal.h"
#include "sim/sim.h"

// Progress of the check through the items of a rank.
struct reading {
    int *seen_in; // per tensor: the last step in which it was ready
    int step;
    int ready;
    bool waited;
};

// Returns what is wrong with a rank's next item, or NULL.
static const char *wrong_item(const struct nb_sim_program *program, struct reading *r, int64_t work_ns, int code) {
    if (r->step >= program->steps || work_ns < 0 || work_ns > NB_SIM_NS_MAX || code >= program->tensors) {
        return "too many steps, an unknown tensor, or an invalid work time";
    }
    if (code >= 0) {
        bool again = r->waited || r->seen_in[code] == r->step;
        r->seen_in[code] = r->step;
        r->ready++;
        return again ? "a tensor is ready twice, or after the wait" : NULL;
    }
    if (code == NB_SIM_WAIT) {
        bool early = r->waited || r->ready != program->tensors;
        r->waited = true;
        return early ? "a second wait, or one before all tensors are ready" : NULL;
    }
    if (code == NB_SIM_END) {
        bool early = !r->waited;
        r->step++;
        r->ready = 0;
        r->waited = false;
        return early ? "an end without a wait" : NULL;
    }
    return NULL;
}

// Checks the items of one rank: every step is complete, and has every tensor once and before the wait.
static int check_items(const struct nb_sim_program *program, int rank, int *seen_in, struct nb_error *err) {
    struct reading r = {.seen_in = seen_in};
    int64_t end = program->starts[rank + 1];
    const char *wrong = NULL;
    memset(seen_in, 0xff, (size_t)program->tensors * sizeof *seen_in);
    for (int64_t i = program->starts[rank]; i < end && wrong == NULL; i++) {
        wrong = wrong_item(program, &r, program->work_ns[i], program->codes[i]);
    }
    bool whole = r.step == program->steps && program->codes[end - 1] == NB_SIM_END;
    if (wrong == NULL && whole) {
        return 0;
    }
    return nb_fail(err, -EINVAL, "rank %d, step %d of %d: %s", rank, r.step, program->steps,
                   wrong != NULL ? wrong : "the list of items ends before the step does");
}

static int check_buckets(const struct nb_sim_program *program, const struct nb_sim_plan *plan, struct nb_error *err) {
    for (int tensor = 0; tensor < program->tensors; tensor++) {
        if (plan->bucket_of[tensor] < 0 || plan->bucket_of[tensor] >= plan->buckets) {
            return nb_fail(err, -EINVAL, "tensor %d in bucket %d of %d", tensor, plan->bucket_of[tensor],
                           plan->buckets);
        }
    }
    return 0;
}

static int check_plan(const struct nb_sim_program *program, const struct nb_sim_plan *plan, struct nb_error *err) {
    if (plan->buckets < 0 || plan->buckets > program->tensors) {
        return nb_fail(err, -EINVAL, "%d buckets for %d tensors", plan->buckets, program->tensors);
    }
    if (plan->in_flight < 1 || plan->in_flight > NB_SIM_IN_FLIGHT_MAX) {
        return nb_fail(err, -EINVAL, "%d operations in flight", plan->in_flight);
    }
    switch (plan->rule) {
    case NB_SIM_EXPLICIT:
    case NB_SIM_DDP:
        return check_buckets(program, plan, err);
    case NB_SIM_HOROVOD:
    case NB_SIM_PAPER2020:
        break;
    default:
        return nb_fail(err, -EINVAL, "rule %d", (int)plan->rule);
    }
    bool good = plan->fusion_bytes > 0 && plan->cycle_ns > 0 && plan->cycle_ns < INT64_MAX / 1024;
    return good ? 0
                : nb_fail(err, -EINVAL, "fusion of %lld bytes every %lld ns", (long long)plan->fusion_bytes,
                          (long long)plan->cycle_ns);
}

static bool is_number(double x) {
    return x >= 0 && x <= 1e15;
}

static bool is_table(const struct nb_sim_table *table) {
    bool good = true;
    for (int i = 0; i < table->count; i++) {
        good = good && is_number(table->bytes[i]) && is_number(table->ns[i]) &&
               (i == 0 || table->bytes[i] > table->bytes[i - 1]);
    }
    return good;
}

static bool is_cost(const struct nb_sim_cost *cost) {
    const double numbers[] = {cost->alpha_ns,       cost->host_alpha_ns, cost->byte_ns,   cost->host_byte_ns,
                              cost->add_byte_ns,    cost->copy_byte_ns,  cost->launch_ns, cost->encode_byte_ns,
                              cost->decode_byte_ns, cost->fixed_ns,      cost->ratio};
    bool good = cost->size >= 1 && cost->ranks_per_host >= 1 && cost->ratio > 0 && is_table(&cost->add);
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        good = good && is_number(numbers[i]);
    }
    return good && (int)cost->algorithm >= 0 && cost->algorithm < NB_SIM_ALGORITHMS &&
           cost->contention >= NB_SIM_CONTENTION_ONE && cost->contention <= NB_SIM_CONTENTION_MAX;
}

static int check_cost(const struct nb_sim_program *program, const struct nb_sim_cost *cost, struct nb_error *err) {
    int64_t total = 0;
    if (!is_cost(cost)) {
        return nb_fail(err, -EINVAL, "an invalid cost for %d ranks", cost->size);
    }
    for (int tensor = 0; tensor < program->tensors; tensor++) {
        if (program->bytes[tensor] < 0 || program->bytes[tensor] > INT64_MAX / 2 - total) {
            return nb_fail(err, -EINVAL, "tensor %d of %lld bytes", tensor, (long long)program->bytes[tensor]);
        }
        total += program->bytes[tensor];
    }
    if (cost->launch_ns > (double)NB_SIM_NS_MAX) {
        return nb_fail(err, -EOVERFLOW, "the launch of an operation would take over %lld s",
                       (long long)(NB_SIM_NS_MAX / 1000000000));
    }
    return 0;
}

int check_input(const struct nb_sim_program *program, const struct nb_sim_plan *plan, const struct nb_sim_cost *cost,
                struct nb_error *err) {
    if (program->ranks < 1 || program->tensors < 1 || program->steps < 1 ||
        (int64_t)program->tensors * program->steps > INT32_MAX ||
        (int64_t)program->tensors * program->ranks > INT32_MAX) {
        return nb_fail(err, -EINVAL, "%d ranks, %d tensors, %d steps", program->ranks, program->tensors,
                       program->steps);
    }
    int *seen_in = calloc((size_t)program->tensors, sizeof *seen_in);
    if (seen_in == NULL) {
        return nb_fail(err, -ENOMEM, "cannot allocate a simulation of %d tensors", program->tensors);
    }
    int rc = 0;
    for (int rank = 0; rank < program->ranks && rc == 0; rank++) {
        if (program->starts[rank + 1] <= program->starts[rank]) {
            rc = nb_fail(err, -EINVAL, "rank %d has no items", rank);
            break;
        }
        rc = check_items(program, rank, seen_in, err);
    }
    free(seen_in);
    rc = rc == 0 ? check_plan(program, plan, err) : rc;
    return rc == 0 ? check_cost(program, cost, err) : rc;
}
