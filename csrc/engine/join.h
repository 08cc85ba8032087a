// Ranks that have joined: they submit nothing any more until all have, and stand in for what the others all-reduce.
#ifndef NB_ENGINE_JOIN_H
#define NB_ENGINE_JOIN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/internal.h"

// Rank 0: the rank has joined.
void nb_join_add(struct nb_job *job, int rank);
bool nb_join_has(const struct nb_job *job, int rank);
// Rank 0: all have: the last one of them; nobody has any more.
int nb_join_over(struct nb_job *job);
// Whether an operation of this kind goes on without ranks that have joined.
bool nb_join_spares(int kind);
// Why an operation cannot go on without the rank; text stays as it is where it can.
void nb_join_refuse(const struct desc *desc, int rank, char *text, size_t room);
// Submits in place of this rank, with zeros: what starts next is this.
void nb_join_stand_in(struct nb_job *job, const struct desc *desc);
// Ends a join.
void nb_join_end(struct nb_work *work, int last);

#endif
