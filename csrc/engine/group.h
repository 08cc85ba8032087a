// Comms of some of a job's ranks. A rank makes one by itself and tells rank 0 which ranks it takes it to have; there
// operations wait for those ranks alone. A comm stays until its job ends.
#ifndef NB_ENGINE_GROUP_H
#define NB_ENGINE_GROUP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/list.h"

struct nb_job;

struct nb_comm {
    struct nb_job *job;
    struct nb_list link; // among the job's, under its lock
    uint32_t id;         // 0: all ranks
    int rank;
    int size;
    bool told;        // rank 0 knows it
    const int *ranks; // of the job, by rank in the comm; NULL: they are the same
};

// Rank 0's record of one.
struct nb_group {
    struct nb_list link;
    uint32_t id;
    int first_rank; // who told of it first
    int count;
    uint64_t members[]; // bits, by rank of the job
};

// A rank of the job.
int nb_comm_peer(const struct nb_comm *comm, int rank);
// Whether it has all ranks, so that their numbers are the job's.
bool nb_comm_is_whole(const struct nb_comm *comm);
bool nb_comm_has(const struct nb_comm *comm, int job_rank);
// The names of operations in different comms are different.
uint64_t nb_comm_key(const struct nb_comm *comm, uint64_t key);

// Whoever drives: tells rank 0 of comms that were made since.
void nb_groups_tell(struct nb_job *job);
// Rank 0: `body` is the number and the ranks, int32_t each.
void nb_groups_heard(struct nb_job *job, int rank, const unsigned char *body, size_t bytes);
// Rank 0: NULL: it was told of none of this number. 0 is that of all ranks, which needs no record.
const struct nb_group *nb_groups_find(const struct nb_job *job, uint32_t id);
// NULL: all ranks.
bool nb_group_has(const struct nb_group *group, int rank);
void nb_groups_close(struct nb_job *job);

#endif
