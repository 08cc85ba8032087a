// A run as it would have been: discrete events in integer ns. Pure: no I/O, no clock, no random number; the same input
// makes the same output on every machine.
//
// Each rank is a list of items, which it works off one after the other: so much compute, then a gradient is ready, or the
// rank waits for the step's operations, or the step ends. A rule (the plan) makes operations of gradients; an operation is
// submitted when all ranks have submitted it, starts `launch_ns` later if fewer than in_flight others are under way, else
// in the order of submission, and goes through its phases (shape.h). What uses a resource at the same time shares it
// equally; what uses several has the least of its shares. Compute takes `contention` times as long while any operation is
// under way. All ranks see an operation end at the same moment.
//
// Within one moment: operations end, then ranks go on in order, until nothing changes; then the rule's timer; then
// operations start.
#ifndef NB_SIM_SIM_H
#define NB_SIM_SIM_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"

enum nb_sim_code { // of an item; 0 and above: this tensor's gradient is ready
    NB_SIM_WAIT = -1,
    NB_SIM_END = -2,      // of a step
    NB_SIM_BACKWARD = -3, // begins: where the time of NB_SIM_PAPER2020 counts from
    NB_SIM_MARK = -4      // this and all below: a moment to be told, no more
};

enum {
    NB_SIM_IN_FLIGHT_MAX = 16,
    NB_SIM_CONTENTION_ONE = 10000, // contention is a multiple of 1/10000
    NB_SIM_CONTENTION_MAX = 100 * NB_SIM_CONTENTION_ONE
};
#define NB_SIM_NS_MAX INT64_C(1000000000000) // of an item or a part of an operation: 1000 s

// In every step each rank has every tensor once, then one NB_SIM_WAIT, then NB_SIM_END; other items anywhere.
struct nb_sim_program {
    int ranks;
    int tensors;
    int steps;
    const int64_t *starts;  // ranks + 1: rank r has items starts[r] up to starts[r + 1]
    const int64_t *work_ns; // of each item, before it
    const int32_t *codes;
    const int64_t *bytes; // of each tensor
    const int32_t *kinds; // its type: NB_SIM_HOROVOD fuses equal ones
};

enum nb_sim_rule {
    NB_SIM_EXPLICIT, // a bucket is submitted when its last tensor is ready
    NB_SIM_DDP,      // and all buckets before it are
    // Every cycle_ns from the step's begin on rank 0: of what is ready on all ranks the first, with those after it that
    // have its type and fit within fusion_bytes; those that do not are passed over while they too would fit; and again.
    // horovod/common/controller.cc, FuseResponses.
    NB_SIM_HOROVOD,
    // When a tensor is ready on all ranks: all that wait, if they have fusion_bytes or cycle_ns have passed since the last
    // submission; at the step's last tensor in any case. The simulator of arXiv 2006.10103.
    NB_SIM_PAPER2020
};

struct nb_sim_plan {
    enum nb_sim_rule rule;
    int in_flight;
    int buckets;              // of the first two rules
    const int32_t *bucket_of; // each tensor's
    int64_t fusion_bytes;
    int64_t cycle_ns;
};

enum nb_sim_algorithm { NB_SIM_RING, NB_SIM_TWO_LEVEL, NB_SIM_TREE, NB_SIM_HALVING, NB_SIM_DIRECT, NB_SIM_ALGORITHMS };

// Times by size: straight lines between points, flat before the first, by the last slope (or flat) after the last.
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
    int contention;       // times NB_SIM_CONTENTION_ONE
    bool pipelined;       // sums, the link and the host's inside at the same time; else one after the other
    bool whole_sums;      // sums are of uncompressed bytes
    double alpha_ns;      // of a step between hosts
    double host_alpha_ns; // of one inside
    double byte_ns;       // on a host's link
    double host_byte_ns;  // inside
    double add_byte_ns;   // of a byte added to another, where there is no table
    double copy_byte_ns;  // of a byte into the fusion buffer, and again out of it, of more than one tensor
    double launch_ns;
    double fixed_ns;       // of an operation, once it has its turn
    double ratio;          // bytes before over bytes after compression
    double encode_byte_ns; // of an uncompressed byte
    double decode_byte_ns;
    struct nb_sim_table add; // of so many bytes to as many
};

struct nb_sim_op {
    int64_t step;
    int64_t bucket; // -1 where the rule has none
    int64_t members;
    int64_t bytes;
    int64_t wire_bytes; // that leave a host
    int64_t agreed_ns;  // all have submitted it, and it was launched
    int64_t start_ns;
    int64_t done_ns;
};

// The caller's memory. Operations are numbered in the order of submission.
struct nb_sim_result {
    int64_t *reached_ns;   // of each item
    int64_t *passed_ns;    // the same, but the end of a wait
    struct nb_sim_op *ops; // room for steps x tensors
    int32_t *op_of;        // steps x tensors
    int64_t *submit_ns;    // steps x tensors x ranks: of op o by rank r at o x ranks + r
    int count;             // of operations
};

// 0, or -EINVAL for an input that cannot be, -EOVERFLOW for times that are too long, -ENOMEM. Sets the whole result.
int nb_sim_run(const struct nb_sim_program *program, const struct nb_sim_plan *plan, const struct nb_sim_cost *cost,
               struct nb_sim_result *result, struct nb_error *err);

#endif
