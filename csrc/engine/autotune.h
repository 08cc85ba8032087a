// Autotuning of a job: the number of streams, and the costs that decide between algorithms.
#ifndef NB_ENGINE_AUTOTUNE_H
#define NB_ENGINE_AUTOTUNE_H

#include <stdbool.h>
#include <stddef.h>

#include "base/error.h"
#include "coll/choose.h"
#include "engine/descriptor.h"
#include "engine/engine.h"
#include "engine/operation.h"

int nb_autotune_open(struct nb_job *job, struct nb_error *err);
void nb_autotune_close(struct nb_job *job);

// Rank 0, before the operation `desc` of all ranks starts: starts a measurement if this operation needs one. True: it
// did, and the operation must wait.
bool nb_autotune_begin(struct nb_job *job, const struct op_descriptor *desc);
// Rank 0: true while a measurement runs and no operation may start.
bool nb_autotune_busy(const struct nb_job *job);

// Handle rank 0's messages: start a probe, and take its results.
void nb_autotune_run(struct nb_job *job, const struct wire_probe *sum);
void nb_autotune_streams(struct nb_job *job, const struct wire_streams *streams);
void nb_autotune_costs(struct nb_job *job, const struct nb_costs *costs);

// Choose the algorithm of an operation between `size` ranks of the job: the first for the progress owner, the second
// for any thread.
const struct nb_algorithm *nb_autotune_choose(const struct nb_job *job, int size, enum nb_op_kind kind, size_t bytes);
const struct nb_algorithm *nb_autotune_guess(struct nb_job *job, int size, enum nb_op_kind kind, size_t bytes);

#endif
