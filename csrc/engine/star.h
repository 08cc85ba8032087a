// A sum that travels with the agreement: every rank sends its line to rank 0 in place of the word that it has submitted,
// and rank 0 answers with the result in place of the word to start. For a few KiB that is the soonest of all: not a
// message more than to agree takes, and no lane.
#ifndef NB_ENGINE_STAR_H
#define NB_ENGINE_STAR_H

#include <stdbool.h>
#include <stddef.h>

#include "engine/internal.h"

enum { NB_LANE_CONTROL = 65 }; // in the record: the number that stands for the control connections in place of a lane

struct parts; // lines that rank 0 holds of one operation

// A rank other than 0: sends its line, prescaled. False: not now, it is to be submitted without.
bool nb_star_give(struct nb_job *job, const struct nb_work *work, uint32_t id);
// Rank 0: keeps the line of a rank. False: there is no memory for it, or it has another length than others.
bool nb_star_keep(struct nb_job *job, struct parts **parts, int rank, const void *line, size_t bytes);
// Whether all other ranks' lines are there.
bool nb_star_complete(const struct nb_job *job, const struct parts *parts, size_t bytes);
// The round is over; its place is kept for the next one, unless those of the job take too much.
void nb_star_rest(struct nb_job *job, struct parts **parts);
void nb_star_forget(struct nb_job *job, struct parts *parts);
// Rank 0: adds the lines to its own in the order of ranks, sends the result to all with `go`, and ends the operation.
void nb_star_sum(struct nb_job *job, struct nb_work *work, const struct parts *parts, const struct wire_go *go);
// The others: the result is there.
void nb_star_land(struct nb_work *work, uint64_t seq, const void *line);

#endif
