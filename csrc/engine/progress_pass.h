// Progress pass: one pass over everything in a job that can make progress. For the progress owner (progress_owner.h).
#ifndef NB_ENGINE_PROGRESS_PASS_H
#define NB_ENGINE_PROGRESS_PASS_H

#include "base/error.h"
#include "engine/engine.h"

typedef void nb_progress_sleep_fn(struct nb_job *job, int sleep_ms);

// Runs one pass. Sleeps at most sleep_ms if nothing moves and `awaited` (or NULL) is not done: by `sleep`, or, if that
// is NULL, until a descriptor is ready.
void nb_progress_pass(struct nb_job *job, const struct nb_work *awaited, int sleep_ms, nb_progress_sleep_fn *sleep);
// Handles the requests of callers.
void nb_progress_take_requests(struct nb_job *job);
// Fails every operation.
void nb_progress_fail_all(struct nb_job *job, const struct nb_error *why);

#endif
