// Simulation: replays a run under changed conditions, as discrete events in integer ns. Pure: no I/O, no clock, no
// random number; the same input gives the same output on every machine.
//
// Each rank executes a list of items in order: compute of a given length, after which a gradient is ready, the rank
// waits for the step's operations, or the step ends. The plan's rule combines gradients into operations. An operation
// is submitted when all ranks have submitted it. It is launched `launch_ns` later. It starts when fewer than in_flight
// operations are in progress, in the order of submission, and runs its phases (shape.h). Uses of a resource at the same
// time share it equally; a use of several resources runs at the least of its shares. Compute takes `contention` times
// as long while any operation is in progress. All ranks see the end of an operation at the same moment.
//
// Order within one moment: operations end, then ranks advance in order, until nothing changes; then the rule's timer
// runs; then operations start.
#ifndef NB_SIM_SIM_H
#define NB_SIM_SIM_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"

enum nb_sim_code { // codes of an item; 0 and above: this tensor's gradient is ready
    NB_SIM_WAIT = -1,
    NB_SIM_END = -2,      // of a step
    NB_SIM_BACKWARD = -3, // backward begins: NB_SIM_PAPER2020 counts time from here
    NB_SIM_MARK = -4      // this and all below: only records a moment
};

enum {
    NB_SIM_IN_FLIGHT_MAX = 16,
    NB_SIM_CONTENTION_ONE = 10000, // contention is a multiple of 1/10000
    NB_SIM_CONTENTION_MAX = 100 * NB_SIM_CONTENTION_ONE
};
#define NB_SIM_NS_MAX INT64_C(1000000000000) // limit of an item or a part of an operation: 1000 s

// In every step each rank has every tensor once, then one NB_SIM_WAIT, then NB_SIM_END. Other items may be anywhere.
struct nb_sim_program {
    int ranks;
    int tensors;
    int steps;
    const int64_t *starts;  // ranks + 1 values: rank r has items starts[r] up to starts[r + 1]
    const int64_t *work_ns; // compute before each item
    const int32_t *codes;
    const int64_t *bytes; // per tensor
    const int32_t *kinds; // type per tensor: NB_SIM_HOROVOD fuses equal ones
};

enum nb_sim_rule {
    NB_SIM_EXPLICIT, // a bucket is submitted when its last tensor is ready
    NB_SIM_DDP,      // and all buckets before it are submitted
    // Every cycle_ns from the step's begin on rank 0, until nothing is pending: fuses the first tensor that is ready on
    // all ranks with later ones of its type that fit within fusion_bytes. It skips a tensor that does not fit, and
    // stops when the skipped tensors would no longer fit either. Source: horovod/common/controller.cc, FuseResponses.
    NB_SIM_HOROVOD,
    // When a tensor becomes ready on all ranks: fuses all pending tensors if they reach fusion_bytes or cycle_ns have
    // passed since the last submission, and always at the step's last tensor. Source: the simulator of arXiv
    // 2006.10103.
    NB_SIM_PAPER2020
};

struct nb_sim_plan {
    enum nb_sim_rule rule;
    int in_flight;
    int buckets;              // of the first two rules
    const int32_t *bucket_of; // bucket of each tensor
    int64_t fusion_bytes;
    int64_t cycle_ns;
};

enum nb_sim_algorithm { NB_SIM_RING, NB_SIM_TWO_LEVEL, NB_SIM_TREE, NB_SIM_HALVING, NB_SIM_DIRECT, NB_SIM_ALGORITHMS };

// Times by size: linear between points, constant before the first, the last slope (or constant) after the last.
struct nb_sim_table {
    int count; // 0: none
    bool clamped;
    const double *bytes;
    const double *ns;
};

struct nb_sim_cost {
    enum nb_sim_algorithm algorithm;
    int size;
    int ranks_per_host;
    int contention;       // factor, in units of 1/NB_SIM_CONTENTION_ONE
    bool pipelined;       // sums, the link and transfers inside a host at the same time; else one after the other
    bool whole_sums;      // sums cover uncompressed bytes
    double alpha_ns;      // per step between hosts
    double host_alpha_ns; // per step inside a host
    double byte_ns;       // per byte on a host's link
    double host_byte_ns;  // per byte inside a host
    double add_byte_ns;   // per byte of a sum, if there is no table
    double copy_byte_ns;  // per byte into the fusion buffer, and again out of it, for more than one tensor
    double launch_ns;
    double fixed_ns;       // per operation, after it starts
    double ratio;          // bytes before compression over bytes after it
    double encode_byte_ns; // per uncompressed byte
    double decode_byte_ns;
    struct nb_sim_table add; // time of adding so many bytes
};

struct nb_sim_op {
    int64_t step;
    int64_t bucket; // -1 if the rule has no buckets
    int64_t members;
    int64_t bytes;
    int64_t wire_bytes; // bytes that leave a host
    int64_t agreed_ns;  // when all ranks have submitted it and it is launched
    int64_t start_ns;
    int64_t done_ns;
};

// In the caller's memory. Operations are numbered in the order of submission.
struct nb_sim_result {
    int64_t *reached_ns;   // per item: the end of its compute
    int64_t *passed_ns;    // per item: as reached_ns, but of a wait its end
    struct nb_sim_op *ops; // room for steps x tensors
    int32_t *op_of;        // steps x tensors
    int64_t *submit_ns;    // steps x tensors x ranks: of op o by rank r at o x ranks + r
    int count;             // of operations
};

// Runs a simulation and sets the whole result. 0, -EINVAL for an invalid input, -EOVERFLOW for times that are too long,
// or -ENOMEM.
int nb_sim_run(const struct nb_sim_program *program, const struct nb_sim_plan *plan, const struct nb_sim_cost *cost,
               struct nb_sim_result *result, struct nb_error *err);

#endif
