// Coordinator (rank 0): tracks which rank has submitted what, and starts operations that all their ranks have
// submitted, in one order.
#ifndef NB_ENGINE_COORDINATOR_H
#define NB_ENGINE_COORDINATOR_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "engine/descriptor.h"

struct nb_job;

int nb_coordinator_open(struct nb_job *job, struct nb_error *err);
void nb_coordinator_close(struct nb_job *job);
void nb_coordinator_submit(struct nb_job *job, int rank, const struct op_descriptor *desc);
void nb_coordinator_mask(struct nb_job *job, int rank, const uint64_t *words, size_t count);
void nb_coordinator_message(struct nb_job *job, int rank, enum control_type type, const unsigned char *body,
                            size_t bytes);
// Takes the submissions of rank 0 itself.
void nb_coordinator_collect(struct nb_job *job);
// Starts operations that all their ranks have submitted.
void nb_coordinator_release(struct nb_job *job);
void nb_coordinator_tick(struct nb_job *job, int64_t now_ns);

#endif
