// Inline all-reduce: each rank sends its buffer to rank 0 in place of the submission, and rank 0 answers with the
// result in place of the start message. For a few KiB this has the lowest latency: it needs no more messages than
// negotiation, and no lane.
#ifndef NB_ENGINE_INLINE_ALLREDUCE_H
#define NB_ENGINE_INLINE_ALLREDUCE_H

#include <stdbool.h>
#include <stddef.h>

#include "engine/context.h"

enum { NB_LANE_CONTROL = 65 }; // lane number of the control connections, in the trace

struct inline_buffers; // buffers of other ranks that rank 0 holds for one operation

// Rank 0: keeps a rank's buffer. False: out of memory, its size differs from the others', or the rank has already sent
// one.
bool nb_inline_store(struct nb_job *job, struct inline_buffers **parts, int rank, const void *buffer, size_t bytes);
// True if the buffers of all other ranks have arrived, with this size.
bool nb_inline_complete(const struct nb_job *job, const struct inline_buffers *parts, size_t bytes);
// Ends the round. Keeps the memory for the next round, unless the job's total exceeds a limit.
void nb_inline_reset(struct nb_job *job, struct inline_buffers **parts);
void nb_inline_free(struct nb_job *job, struct inline_buffers *parts);
// Rank 0: reduces the buffers into its own in the order of ranks, sends the result to all with `go`, and ends the
// operation.
void nb_inline_sum(struct nb_job *job, struct nb_work *work, const struct inline_buffers *parts,
                   const struct wire_go *go);
// Other ranks: takes the result and ends the operation.
void nb_inline_finish(struct nb_work *work, uint64_t seq, const void *buffer);

#endif
