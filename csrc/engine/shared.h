// Shared memory: operations between the ranks of one host. Once the job is open, only the progress owner uses it. Any
// thread may call nb_shared_everywhere(), nb_shared_hosts() and nb_shared_piece_bytes(), which return constants.
//
// A buffer is cut into one part per rank. Rank r reads part r of every rank's buffer, in the order of ranks, and writes
// the result to every rank's buffer. No byte is copied in between, and the order of additions depends only on ranks,
// size and operation. Two counters carry an operation: "my memory is described" and "my share is done".
//
// If a rank's buffer is not in arenas that all ranks have mapped, the operation goes through staging, window by window:
// fill (the other ranks' parts of my buffer), reduce (my part, into my buffer and my staging), empty (the other ranks'
// parts into my buffer).
//
// In a job of several hosts, some with several ranks, an all-reduce takes two levels: see two_level.h. All other
// operations use the network between all ranks there.
#ifndef NB_ENGINE_SHARED_H
#define NB_ENGINE_SHARED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/list.h"
#include "engine/engine.h"

enum {
    NB_LANE_SHARED = 64 // lane number of shared memory, in the trace
};

struct nb_comm;
struct nb_job;
struct nb_shm_pipe;
struct nb_work;

// shared_open.c. Tests with all ranks whether they share memory. job->shared is NULL if they do not. An error only
// where shared memory was required.
int nb_shared_open(struct nb_job *job, struct nb_error *err);
void nb_shared_close(struct nb_job *job);
// shared_memory.c. Offers memory that many operations will use to the other ranks. Closes fd; -1: there is none.
void nb_shared_map(struct nb_job *job, void *base, size_t bytes, int fd);
// Withdraws memory; all operations on it are done.
void nb_shared_unmap(struct nb_job *job, const void *base);
// Reports an arena without a descriptor, and why (-errno). Reports only the first, as there may be many.
void nb_shared_private(struct nb_job *job, size_t bytes, int why);

// True if all ranks of the job are on this host and share memory.
bool nb_shared_everywhere(const struct nb_job *job);
// If so: the pipes between this rank and `peer`, one of which is rank 0.
void nb_shared_pipes(const struct nb_job *job, int peer, struct nb_shm_pipe **in, struct nb_shm_pipe **out);
// If so: wakes a rank for which something has been written.
void nb_shared_wake(const struct nb_job *job, int peer);
// If so: from now on other ranks wake this rank.
void nb_shared_sleep(const struct nb_job *job);
// The number of hosts if an all-reduce can take two levels, else 1. The same on all ranks.
int nb_shared_hosts(const struct nb_job *job);
// Two levels: bytes of one piece in the rings of all owners of a host together; 0 if two levels are not possible.
size_t nb_shared_piece_bytes(const struct nb_job *job);
// shared_operations.c. Moves what can be moved, a few MiB at most. True: something has moved.
bool nb_shared_progress(struct nb_job *job);
// Call before the progress owner sleeps. False: something has moved meanwhile.
bool nb_shared_arm(struct nb_job *job);
// Updates what the deadlines depend on.
void nb_shared_tick(struct nb_job *job, int64_t now_ns);

#endif
