// Communicators of a subset of a job's ranks. Each rank makes its own and tells rank 0 which ranks it has; rank 0 waits
// only for these ranks. A communicator lives until its job ends.
#ifndef NB_ENGINE_COMMUNICATOR_H
#define NB_ENGINE_COMMUNICATOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/hash.h"
#include "base/list.h"

struct nb_job;

struct nb_comm {
    struct nb_job *job;
    struct nb_list link;       // in the job's list, under its lock
    struct nb_hash_node by_id; //
    uint32_t id;               // 0: all ranks
    int rank;
    int size;
    bool announced;   // rank 0 knows it
    const int *ranks; // rank in the job, by rank here; NULL: the same
};

struct nb_comms {
    struct nb_list list;         // communicators of some of the ranks. Under the job's lock
    struct nb_hash by_id;        // the same
    int count;                   //
    bool unannounced;            // some are not announced to rank 0 yet
    struct nb_list groups;       // rank 0: the communicators that ranks have announced
    struct nb_hash groups_by_id; // the same
    int64_t group_count;
};

// Rank 0's record of a communicator.
struct nb_group {
    struct nb_list link;
    struct nb_hash_node by_id;
    uint32_t id;
    int first_rank; // the first rank that announced it
    int count;
    uint64_t members[]; // bitmap, by rank in the job
};

// Returns the rank in the job of a rank of the communicator.
int nb_comm_peer(const struct nb_comm *comm, int rank);
// True if it has all ranks of the job, so that ranks are the same in both.
bool nb_comm_is_whole(const struct nb_comm *comm);
bool nb_comm_has(const struct nb_comm *comm, int job_rank);
// Makes keys of operations in different communicators differ.
uint64_t nb_comm_key(const struct nb_comm *comm, uint64_t key);

// Progress owner: announces communicators made since the last call to rank 0.
void nb_groups_announce(struct nb_job *job);
// Rank 0: a rank announces a communicator. `body`: its number and its ranks, int32_t each.
void nb_groups_receive(struct nb_job *job, int rank, const unsigned char *body, size_t bytes);
// Rank 0: returns the record of a communicator, or NULL. Number 0, all ranks, has no record.
const struct nb_group *nb_groups_find(struct nb_job *job, uint32_t id);
// True if the rank is a member. group NULL: all ranks.
bool nb_group_has(const struct nb_group *group, int rank);
void nb_groups_close(struct nb_job *job);

#endif
