// Operations between ranks of one host, in memory that they share. Of the communication thread alone.
//
// A line is cut into one part a rank. Rank r reads part r of every rank's line, in the order of ranks, and writes what
// comes out to every rank's: no byte is copied in between, and the order of additions is a function of ranks, size and
// op. Two counters carry an operation: "my memory is described", "my share is done".
//
// Where a line of some rank is not in arenas that all have mapped, the operation goes through staging instead, window by
// window: fill (others' parts of my line), reduce (my part, into my line and my staging), empty (others' parts into my
// line).
//
// In a job of several hosts, where some have several ranks, an all-reduce takes two levels: see twolevel.h. All other
// operations take the network between all ranks there.
#ifndef NB_ENGINE_LOCAL_H
#define NB_ENGINE_LOCAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/list.h"
#include "engine/engine.h"

enum {
    NB_LANE_SHARED = 64,      // in the record: the number that stands for shared memory in place of a lane
    NB_ALGORITHM_SHARED = 32, // in the record, beside the kinds of nb_sched
    NB_ALGORITHM_STAGED = 33  //
};

struct nb_comm;
struct nb_job;
struct nb_shm_pipe;
struct nb_work;

enum nb_local_stage { NB_LOCAL_QUEUED, NB_LOCAL_DESCRIBED, NB_LOCAL_RUNS, NB_LOCAL_SHARE_DONE };

// What an operation in shared memory is about.
struct nb_local_op {
    bool taken;
    bool staged;
    enum nb_local_stage stage;
    uint64_t index;      // among those of the job
    size_t at;           // direct: bytes of the share that are done
    uint64_t window;     // staged: the first one, counted over the job
    uint64_t windows;    //
    struct piece *piece; // of a ring between hosts: what it is of
    uint64_t pieces;     // two levels: of this rank's part
    uint64_t folded;     // of these: begun, and
    uint64_t spread;     // over
    uint64_t bytes_in;   // read from other ranks' memory
    uint64_t bytes_out;  // written to other ranks' memory, or to staging that they read
    struct nb_list link; // in the order of starts
};

// local_open.c. Finds out with all ranks whether they share memory; job->local is NULL where they do not. An error only
// where it was required.
int nb_local_open(struct nb_job *job, struct nb_error *err);
void nb_local_close(struct nb_job *job);
// Memory that many operations will use, as a descriptor that is closed here; -1: none.
void nb_local_map(struct nb_job *job, void *base, size_t bytes, int fd);
// Of which every operation is over.
void nb_local_unmap(struct nb_job *job, const void *base);
// An arena that has no descriptor, and why (-errno): it is told of once, as there may be many.
void nb_local_private(struct nb_job *job, size_t bytes, int why);

// local.c. Whether all ranks of the job are on this host and share memory.
bool nb_local_everywhere(const struct nb_job *job);
// Then: the ways between this rank and `peer`, of which one is rank 0.
void nb_local_pipes(const struct nb_job *job, int peer, struct nb_shm_pipe **in, struct nb_shm_pipe **out);
// Then: something has been written for that rank.
void nb_local_wake(const struct nb_job *job, int peer);
// Then: from now on others wake this rank.
void nb_local_sleep(const struct nb_job *job);
// Whether such operations stay in shared memory then; the others take the network.
bool nb_local_takes(const struct nb_comm *comm, enum nb_op_kind kind);
// The hosts of the job where an all-reduce can take two levels, else 1: alike on all ranks.
int nb_local_hosts(const struct nb_job *job);
// Of a line that takes two levels, what all owners of a host have under way in one ring each; 0 where none can.
size_t nb_local_piece_bytes(const struct nb_job *job);
// True: the operation is taken, and finishes by nb_local_progress().
bool nb_local_start(struct nb_work *work);
// Ends it here and keeps the others off its memory.
void nb_local_cancel(struct nb_work *work);
// Moves what can be moved, a few MiB at most. True: something has moved.
bool nb_local_progress(struct nb_job *job);
// Before the thread sleeps: false where something has moved since.
bool nb_local_arm(struct nb_job *job);
// Brings up to date what the deadlines look at.
void nb_local_tick(struct nb_job *job, int64_t now_ns);
// Records the bytes of an operation that is over which moved in memory. Returns its algorithm.
uint64_t nb_local_record(const struct nb_work *work);

#endif
