// Simulation state: the state of one run, shared by the files of this folder.
#ifndef NB_SIM_INTERNAL_H
#define NB_SIM_INTERNAL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "sim/shape.h"
#include "sim/sim.h"

// Resolution of work: the least common multiple of 1 to 16. So each share of up to NB_SIM_IN_FLIGHT_MAX users does a
// whole number of units per ns.
#define SHARES INT64_C(720720)

struct rank {
    int64_t at; // current item
    int64_t end;
    int64_t left;     // work left of it, in 1/contention ns
    int64_t begin_ns; // begin of the current step
    int step;
    int next; // next bucket, of NB_SIM_DDP
    bool waiting;
};

struct flight { // an operation in progress
    int op;
    int phases;
    int phase;
    struct nb_sim_phase plan[NB_SIM_PHASES];
    int64_t delay_ns;          // left of this phase
    int64_t left[NB_SIM_USES]; // work left of each use, in 1/SHARES ns
};

struct sim {
    const struct nb_sim_program *program;
    const struct nb_sim_plan *plan;
    const struct nb_sim_cost *cost;
    struct nb_sim_result *result;
    struct nb_error *err;
    int failed;
    int64_t now;
    struct rank *ranks;
    struct flight flights[NB_SIM_IN_FLIGHT_MAX];
    int flying;
    int queued; // the first operation that has not started
    // State of the current step: no rank begins a step before all operations of the previous one are done.
    int step;
    int first_op;
    int done_ops;
    int sent;              // tensors that are in an operation
    int *arrived;          // per tensor: ranks on which it is ready
    int64_t *ready_ns;     // per tensor and rank
    int *missing;          // per bucket and rank: tensors that are not ready
    int *submitted;        // per bucket: ranks that have submitted it
    int64_t *submitted_ns; // per bucket and rank
    int *pending;          // tensors that are ready on all ranks and not sent, in the order in which they became ready
    int pending_count;
    int64_t pending_bytes;
    int64_t last_send_ns;
    int64_t tick_ns; // time of the next cycle; INT64_MAX: nothing is pending
};

// ---- check.c

// 0, -EINVAL, -EOVERFLOW for a launch that takes too long, or -ENOMEM.
int check_input(const struct nb_sim_program *program, const struct nb_sim_plan *plan, const struct nb_sim_cost *cost,
                struct nb_error *err);

// ---- fusion_rules.c

void rule_step(struct sim *sim, int step); // a step begins
void rule_backward(struct sim *sim);       // backward begins on a rank
void rule_ready(struct sim *sim, int rank, int tensor);
bool rule_tick(struct sim *sim); // true if the timer expired

#endif
