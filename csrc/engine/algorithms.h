// Algorithms: the list of all, and the choice for an operation.
#ifndef NB_ENGINE_ALGORITHMS_H
#define NB_ENGINE_ALGORITHMS_H

#include <stddef.h>

#include "coll/choose.h"
#include "engine/engine.h"
#include "engine/operation.h"

extern const struct nb_algorithm nb_alone;
extern const struct nb_algorithm nb_ring_allreduce;
extern const struct nb_algorithm nb_ring_allgather;
extern const struct nb_algorithm nb_ring_reducescatter;
extern const struct nb_algorithm nb_chain_broadcast;
extern const struct nb_algorithm nb_doubling;
extern const struct nb_algorithm nb_halving;
extern const struct nb_algorithm nb_pairwise;
extern const struct nb_algorithm nb_inline;
extern const struct nb_algorithm nb_join;
extern const struct nb_algorithm nb_shared;
extern const struct nb_algorithm nb_two_level;

// Returns the algorithm of a number: a built-in one or that of the job's configuration. NULL: there is none.
const struct nb_algorithm *nb_algorithm_get(const struct nb_job *job, uint32_t id);
// Chooses the algorithm of an operation between `size` ranks of the job, by the given costs.
const struct nb_algorithm *nb_algorithm_choose(const struct nb_job *job, const struct nb_costs *costs, int size,
                                               enum nb_op_kind kind, size_t bytes);

#endif
