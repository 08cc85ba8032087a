// Is the input of a simulation one that can be?
#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "sim/internal.h"
#include "sim/shape.h"
#include "sim/sim.h"

// The items of one rank: every step whole, every tensor in it once and before the wait.
static int check_items(const struct nb_sim_program *program, int rank, int *seen_in, struct nb_error *err) {
    int step = 0;
    int ready = 0;
    bool waited = false;
    memset(seen_in, 0xff, (size_t)program->tensors * sizeof *seen_in);
    for (int64_t i = program->starts[rank]; i < program->starts[rank + 1]; i++) {
        int code = program->codes[i];
        if (program->work_ns[i] < 0 || program->work_ns[i] > NB_SIM_NS_MAX) {
            return nb_fail(err, -EINVAL, "rank %d, step %d: an item of %lld ns", rank, step,
                           (long long)program->work_ns[i]);
        }
        if (code >= program->tensors || step >= program->steps) {
            return nb_fail(err, -EINVAL, "rank %d, step %d: an item of code %d", rank, step, code);
        }
        if (code >= 0 && (waited || seen_in[code] == step)) {
            return nb_fail(err, -EINVAL, "rank %d, step %d: tensor %d is ready twice, or after the wait", rank, step,
                           code);
        }
        if ((code == NB_SIM_WAIT && (waited || ready != program->tensors)) || (code == NB_SIM_END && !waited)) {
            return nb_fail(err, -EINVAL, "rank %d, step %d: %d of %d tensors are ready at the wait, or no wait", rank,
                           step, ready, program->tensors);
        }
        if (code >= 0) {
            seen_in[code] = step;
            ready++;
        }
        waited = waited || code == NB_SIM_WAIT;
        if (code == NB_SIM_END) {
            step++;
            ready = 0;
            waited = false;
        }
    }
    bool whole = step == program->steps && program->starts[rank + 1] > program->starts[rank] &&
                 program->codes[program->starts[rank + 1] - 1] == NB_SIM_END;
    return whole ? 0 : nb_fail(err, -EINVAL, "rank %d has %d steps of %d", rank, step, program->steps);
}

static int check_plan(const struct nb_sim_program *program, const struct nb_sim_plan *plan, struct nb_error *err) {
    bool is_static = plan->rule == NB_SIM_EXPLICIT || plan->rule == NB_SIM_DDP;
    bool dynamic = plan->rule == NB_SIM_HOROVOD || plan->rule == NB_SIM_PAPER2020;
    if (!(is_static || dynamic) || plan->in_flight < 1 || plan->in_flight > NB_SIM_IN_FLIGHT_MAX) {
        return nb_fail(err, -EINVAL, "rule %d with %d operations in flight", (int)plan->rule, plan->in_flight);
    }
    if (dynamic && (plan->fusion_bytes < 1 || plan->cycle_ns < 1 || plan->cycle_ns > INT64_MAX / 1024)) {
        return nb_fail(err, -EINVAL, "fusion of %lld bytes every %lld ns", (long long)plan->fusion_bytes,
                       (long long)plan->cycle_ns);
    }
    if (plan->buckets < 0 || plan->buckets > program->tensors) {
        return nb_fail(err, -EINVAL, "%d buckets for %d tensors", plan->buckets, program->tensors);
    }
    for (int tensor = 0; tensor < program->tensors && is_static; tensor++) {
        if (plan->bucket_of[tensor] < 0 || plan->bucket_of[tensor] >= plan->buckets) {
            return nb_fail(err, -EINVAL, "tensor %d in bucket %d of %d", tensor, plan->bucket_of[tensor],
                           plan->buckets);
        }
    }
    return 0;
}

static bool is_number(double x) {
    return x >= 0 && x <= 1e15;
}

static int check_cost(const struct nb_sim_program *program, const struct nb_sim_cost *cost, struct nb_error *err) {
    const double numbers[] = {cost->alpha_ns,       cost->host_alpha_ns, cost->byte_ns,   cost->host_byte_ns,
                              cost->add_byte_ns,    cost->copy_byte_ns,  cost->launch_ns, cost->encode_byte_ns,
                              cost->decode_byte_ns, cost->fixed_ns};
    bool good = cost->size >= 1 && cost->ranks_per_host >= 1 && cost->ratio > 0 && isfinite(cost->ratio) &&
                (int)cost->algorithm >= 0 && cost->algorithm < NB_SIM_ALGORITHMS &&
                cost->contention >= NB_SIM_CONTENTION_ONE && cost->contention <= NB_SIM_CONTENTION_MAX;
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        good = good && is_number(numbers[i]);
    }
    for (int i = 0; i < cost->add.count; i++) {
        good = good && is_number(cost->add.bytes[i]) && is_number(cost->add.ns[i]) &&
               (i == 0 || cost->add.bytes[i] > cost->add.bytes[i - 1]);
    }
    if (!good) {
        return nb_fail(err, -EINVAL, "a cost that cannot be, for %d ranks", cost->size);
    }
    int64_t total = 0;
    for (int tensor = 0; tensor < program->tensors; tensor++) {
        if (program->bytes[tensor] < 0 || program->bytes[tensor] > INT64_MAX / 2 - total) {
            return nb_fail(err, -EINVAL, "tensor %d of %lld bytes", tensor, (long long)program->bytes[tensor]);
        }
        total += program->bytes[tensor];
    }
    struct nb_sim_phase phases[NB_SIM_PHASES];
    if (nb_sim_phases(cost, total, 2, phases) < 0 || cost->launch_ns > (double)NB_SIM_NS_MAX) {
        return nb_fail(err, -EOVERFLOW, "an operation of %lld bytes among %d ranks would take over %lld s",
                       (long long)total, cost->size, (long long)(NB_SIM_NS_MAX / 1000000000));
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
        return nb_fail(err, -ENOMEM, "a simulation of %d tensors", program->tensors);
    }
    int rc = 0;
    for (int rank = 0; rank < program->ranks && rc == 0; rank++) {
        rc = check_items(program, rank, seen_in, err);
    }
    free(seen_in);
    rc = rc == 0 ? check_plan(program, plan, err) : rc;
    return rc == 0 ? check_cost(program, cost, err) : rc;
}
