// What the files of this room share: the state of one run.
#ifndef NB_SIM_INTERNAL_H
#define NB_SIM_INTERNAL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "sim/shape.h"
#include "sim/sim.h"

// Work of a resource is counted so finely that each share of up to NB_SIM_IN_FLIGHT_MAX is a whole number a ns: the least
// common multiple of 1 to 16.
#define SHARES INT64_C(720720)

struct rank {
    int64_t at; // item
    int64_t end;
    int64_t left;     // of its work, in 1/contention ns
    int64_t begin_ns; // of its step
    int step;
    int next; // bucket, of NB_SIM_DDP
    bool waiting;
};

struct flight { // an operation under way
    int op;
    int phases;
    int phase;
    struct nb_sim_phase plan[NB_SIM_PHASES];
    int64_t delay_ns;          // left, of this phase
    int64_t left[NB_SIM_USES]; // in 1/SHARES ns
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
    // Of the step that is being sent: no rank begins one before all operations of the one before it are done.
    int step;
    int first_op;
    int done_ops;
    int sent;              // tensors
    int *arrived;          // of each tensor: ranks
    int64_t *ready_ns;     // of each tensor, by rank
    int *missing;          // of each bucket, by rank: tensors that are not ready
    int *submitted;        // of each bucket: ranks
    int64_t *submitted_ns; // of each bucket, by rank
    int *pending;          // tensors that are ready everywhere and not sent, in this order
    int pending_count;
    int64_t pending_bytes;
    int64_t last_send_ns;
    int64_t tick_ns; // INT64_MAX: nothing is pending
};

// ---- check.c

// 0, or -EINVAL.
int check_input(const struct nb_sim_program *program, const struct nb_sim_plan *plan, const struct nb_sim_cost *cost,
                struct nb_error *err);

// ---- rules.c

void rule_step(struct sim *sim, int step); // its first item is worked off
void rule_backward(struct sim *sim);       // begins on a rank
void rule_ready(struct sim *sim, int rank, int tensor);
bool rule_tick(struct sim *sim); // true where it is time, and something was sent

#endif
