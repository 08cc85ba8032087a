// Event loop of the simulation: advances ranks, operations and the rule's timer to the next event.
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "sim/internal.h"
#include "sim/shape.h"
#include "sim/sim.h"

static int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static int64_t divided_up(int64_t a, int64_t b) {
    return a / b + (a % b != 0);
}

// ---- operations in progress

static void phase_begin(struct flight *flight) {
    const struct nb_sim_phase *phase = &flight->plan[flight->phase];
    flight->delay_ns = phase->delay_ns;
    for (int i = 0; i < phase->uses; i++) {
        flight->left[i] = phase->use[i].ns * SHARES;
    }
}

static bool phase_over(const struct flight *flight) {
    bool over = flight->delay_ns == 0;
    for (int i = 0; i < flight->plan[flight->phase].uses; i++) {
        over = over && flight->left[i] == 0;
    }
    return over;
}

static void op_start(struct sim *sim, int number) {
    struct nb_sim_op *op = &sim->result->ops[number];
    struct flight *flight = &sim->flights[sim->flying++];
    op->start_ns = sim->now;
    *flight = (struct flight){.op = number};
    flight->phases = nb_sim_phases(sim->cost, op->bytes, op->members, flight->plan);
    if (flight->phases < 0) {
        sim->failed = nb_fail(sim->err, -EOVERFLOW, "an operation of %lld bytes among %d ranks would take over %lld s",
                              (long long)op->bytes, sim->cost->size, (long long)(NB_SIM_NS_MAX / 1000000000));
    }
    if (flight->phases > 0) {
        phase_begin(flight);
    }
}

// Skips phases that take no time. True if the operation is done.
static bool flight_done(struct flight *flight) {
    while (flight->phase < flight->phases && phase_over(flight)) {
        flight->phase++;
        if (flight->phase < flight->phases) {
            phase_begin(flight);
        }
    }
    return flight->phase >= flight->phases;
}

static bool flights_end(struct sim *sim) {
    int kept = 0;
    for (int i = 0; i < sim->flying; i++) {
        if (flight_done(&sim->flights[i])) {
            sim->result->ops[sim->flights[i].op].done_ns = sim->now;
            sim->done_ops++;
        } else {
            if (kept < i) {
                sim->flights[kept] = sim->flights[i];
            }
            kept++;
        }
    }
    bool ended = kept < sim->flying;
    sim->flying = kept;
    return ended;
}

static bool flights_start(struct sim *sim) {
    bool started = false;
    while (sim->flying < sim->plan->in_flight && sim->queued < sim->result->count &&
           sim->result->ops[sim->queued].agreed_ns <= sim->now) {
        op_start(sim, sim->queued++);
        started = true;
    }
    return started;
}

static bool is_used(const struct flight *flight, int use) {
    return flight->delay_ns == 0 && use < flight->plan[flight->phase].uses && flight->left[use] > 0;
}

static void count_users(const struct sim *sim, int users[NB_SIM_RESOURCES]) {
    memset(users, 0, NB_SIM_RESOURCES * sizeof *users);
    for (int i = 0; i < sim->flying; i++) {
        const struct flight *flight = &sim->flights[i];
        for (int use = 0; use < NB_SIM_USES; use++) {
            for (int r = 0; r < NB_SIM_RESOURCES && is_used(flight, use); r++) {
                users[r] += (flight->plan[flight->phase].use[use].resources >> r & 1) != 0;
            }
        }
    }
}

// Work that a use does per ns: the least of its shares.
static int64_t share_of(unsigned resources, const int users[NB_SIM_RESOURCES]) {
    int most = 1;
    for (int r = 0; r < NB_SIM_RESOURCES; r++) {
        if ((resources >> r & 1) != 0 && users[r] > most) {
            most = users[r];
        }
    }
    return SHARES / most;
}

static int64_t flights_next(const struct sim *sim, const int users[NB_SIM_RESOURCES]) {
    int64_t next = INT64_MAX;
    for (int i = 0; i < sim->flying; i++) {
        const struct flight *flight = &sim->flights[i];
        if (flight->delay_ns > 0) {
            next = least(next, flight->delay_ns);
        }
        for (int use = 0; use < NB_SIM_USES; use++) {
            if (is_used(flight, use)) {
                int64_t share = share_of(flight->plan[flight->phase].use[use].resources, users);
                next = least(next, divided_up(flight->left[use], share));
            }
        }
    }
    return next;
}

static void flights_advance(struct sim *sim, const int users[NB_SIM_RESOURCES], int64_t dt) {
    for (int i = 0; i < sim->flying; i++) {
        struct flight *flight = &sim->flights[i];
        if (flight->delay_ns > 0) {
            flight->delay_ns -= dt;
            continue;
        }
        for (int use = 0; use < NB_SIM_USES; use++) {
            if (is_used(flight, use)) {
                int64_t share = share_of(flight->plan[flight->phase].use[use].resources, users);
                int64_t took = dt > flight->left[use] / share ? flight->left[use] : dt * share;
                flight->left[use] -= took;
            }
        }
    }
}

// ---- ranks

static void item_load(struct sim *sim, struct rank *rank) {
    if (rank->at < rank->end) {
        rank->left = sim->program->work_ns[rank->at] * sim->cost->contention;
    }
}

static bool may_continue(const struct sim *sim, const struct rank *rank) {
    return rank->step < sim->step ||
           (sim->sent == sim->program->tensors && sim->done_ops == sim->result->count - sim->first_op);
}

static void step_end(struct sim *sim, struct rank *rank) {
    rank->step++;
    rank->begin_ns = sim->now;
    if (rank->step > sim->step && rank->step < sim->program->steps) {
        rule_step(sim, rank->step);
    }
}

// Completes one item; false if it has to wait.
static bool item_end(struct sim *sim, int number) {
    struct rank *rank = &sim->ranks[number];
    int code = sim->program->codes[rank->at];
    if (!rank->waiting) {
        sim->result->reached_ns[rank->at] = sim->now;
    }
    rank->waiting = code == NB_SIM_WAIT && !may_continue(sim, rank);
    if (rank->waiting) {
        return false;
    }
    sim->result->passed_ns[rank->at] = sim->now;
    if (code >= 0) {
        rule_ready(sim, number, code);
    } else if (code == NB_SIM_END) {
        step_end(sim, rank);
    } else if (code == NB_SIM_BACKWARD) {
        rule_backward(sim);
    }
    rank->at++;
    item_load(sim, rank);
    return true;
}

static bool ranks_resume(struct sim *sim) {
    bool any = false;
    for (int number = 0; number < sim->program->ranks; number++) {
        struct rank *rank = &sim->ranks[number];
        while (rank->at < rank->end && (rank->waiting ? may_continue(sim, rank) : rank->left == 0) &&
               item_end(sim, number)) {
            any = true;
        }
    }
    return any;
}

static int64_t compute_rate(const struct sim *sim) {
    return sim->flying > 0 ? NB_SIM_CONTENTION_ONE : sim->cost->contention;
}

static int64_t ranks_next(const struct sim *sim) {
    int64_t next = INT64_MAX;
    for (int number = 0; number < sim->program->ranks; number++) {
        const struct rank *rank = &sim->ranks[number];
        if (rank->at < rank->end && !rank->waiting) {
            next = least(next, divided_up(rank->left, compute_rate(sim)));
        }
    }
    return next;
}

static void ranks_advance(struct sim *sim, int64_t dt) {
    int64_t rate = compute_rate(sim);
    for (int number = 0; number < sim->program->ranks; number++) {
        struct rank *rank = &sim->ranks[number];
        if (rank->at < rank->end && !rank->waiting) {
            rank->left = dt > rank->left / rate ? 0 : rank->left - dt * rate;
        }
    }
}

// ---- the loop

static void moment(struct sim *sim) {
    bool more = true;
    while (more) {
        while (flights_end(sim) || ranks_resume(sim)) {
        }
        bool sent = rule_tick(sim);
        more = flights_start(sim) || sent;
    }
}

static bool is_over(const struct sim *sim) {
    for (int number = 0; number < sim->program->ranks; number++) {
        if (sim->ranks[number].at < sim->ranks[number].end) {
            return false;
        }
    }
    return true;
}

static int run(struct sim *sim) {
    for (int number = 0; number < sim->program->ranks; number++) {
        struct rank *rank = &sim->ranks[number];
        rank->at = sim->program->starts[number];
        rank->end = sim->program->starts[number + 1];
        item_load(sim, rank);
    }
    rule_step(sim, 0);
    moment(sim);
    while (sim->failed == 0 && !is_over(sim)) {
        int users[NB_SIM_RESOURCES];
        count_users(sim, users);
        int64_t dt = least(flights_next(sim, users), ranks_next(sim));
        if (sim->tick_ns != INT64_MAX) {
            dt = least(dt, sim->tick_ns - sim->now);
        }
        if (sim->queued < sim->result->count && sim->flying < sim->plan->in_flight) {
            dt = least(dt, sim->result->ops[sim->queued].agreed_ns - sim->now);
        }
        if (dt == INT64_MAX || sim->now > INT64_MAX / 4) {
            return nb_fail(sim->err, -EOVERFLOW, "the simulated run does not end, or exceeds the range of its clock");
        }
        flights_advance(sim, users, dt);
        ranks_advance(sim, dt);
        sim->now += dt;
        moment(sim);
    }
    return sim->failed;
}

static int open_memory(struct sim *sim) {
    size_t ranks = (size_t)sim->program->ranks;
    size_t tensors = (size_t)sim->program->tensors;
    size_t buckets = (size_t)sim->plan->buckets;
    sim->ranks = calloc(ranks, sizeof *sim->ranks);
    sim->arrived = calloc(tensors + 1, sizeof *sim->arrived);
    sim->pending = calloc(tensors + 1, sizeof *sim->pending);
    sim->ready_ns = calloc(tensors * ranks + 1, sizeof *sim->ready_ns);
    sim->missing = calloc(buckets * ranks + 1, sizeof *sim->missing);
    sim->submitted = calloc(buckets + 1, sizeof *sim->submitted);
    sim->submitted_ns = calloc(buckets * ranks + 1, sizeof *sim->submitted_ns);
    bool all = sim->ranks != NULL && sim->arrived != NULL && sim->pending != NULL && sim->ready_ns != NULL &&
               sim->missing != NULL && sim->submitted != NULL && sim->submitted_ns != NULL;
    return all ? 0
               : nb_fail(sim->err, -ENOMEM, "cannot allocate a simulation of %zu ranks and %zu tensors", ranks,
                         tensors);
}

static void close_memory(struct sim *sim) {
    free(sim->ranks);
    free(sim->arrived);
    free(sim->pending);
    free(sim->ready_ns);
    free(sim->missing);
    free(sim->submitted);
    free(sim->submitted_ns);
}

int nb_sim_run(const struct nb_sim_program *program, const struct nb_sim_plan *plan, const struct nb_sim_cost *cost,
               struct nb_sim_result *result, struct nb_error *err) {
    struct sim sim = {.program = program, .plan = plan, .cost = cost, .result = result, .err = err};
    int rc = check_input(program, plan, cost, err);
    if (rc < 0) {
        return rc;
    }
    result->count = 0;
    rc = open_memory(&sim);
    rc = rc == 0 ? run(&sim) : rc;
    close_memory(&sim);
    return rc;
}
