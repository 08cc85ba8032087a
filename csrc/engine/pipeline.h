// Pipeline: rings and the chain of whole operations, and what the rings between hosts (two_level.c) share with them.
#ifndef NB_ENGINE_PIPELINE_H
#define NB_ENGINE_PIPELINE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "coll/ring_schedule.h"
#include "engine/operation.h"

// Makes the schedule and the two flows to the neighbours.
int nb_pipeline_prepare(struct nb_work *work, enum nb_sched_kind kind, struct nb_error *err);
void nb_pipeline_release(struct nb_work *work);
void nb_pipeline_start(struct nb_work *work, int64_t now_ns);
// Puts the flows on the lanes. False: they have no bytes.
bool nb_pipeline_begin(struct nb_work *work, int64_t now_ns);

#endif
