// Join: ranks that have joined submit nothing until all have, and contribute zeros to the others' all-reduces.
#ifndef NB_ENGINE_JOINED_RANKS_H
#define NB_ENGINE_JOINED_RANKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "engine/descriptor.h"

struct nb_job;

struct nb_joined {   // rank 0: the ranks that have joined
    uint64_t *ranks; // bitmap
    int count;
    int last;
};

int nb_join_open(struct nb_job *job, struct nb_error *err);
void nb_join_close(struct nb_job *job);
// Rank 0: records that the rank has joined.
void nb_join_add(struct nb_job *job, int rank);
bool nb_join_has(const struct nb_job *job, int rank);
// Rank 0: ends a join of all ranks, resets the record, and returns the rank that joined last.
int nb_join_over(struct nb_job *job);
// True if operations of this kind go on without ranks that have joined.
bool nb_join_permits(int kind);
// Writes why the operation is not possible without the rank; leaves text unchanged if it is possible.
void nb_join_refuse(const struct op_descriptor *desc, int rank, char *text, size_t room);
// Submits the operation for this rank, with zeros. It is the next one to start.
void nb_join_contribute(struct nb_job *job, const struct op_descriptor *desc);

#endif
