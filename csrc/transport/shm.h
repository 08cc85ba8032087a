// Memory that the ranks of one host share. Each rank has an area: counters that it alone moves forward and all others
// read, descriptions of its operations, and a bounded staging place. Arenas of the core are mapped by all ranks; memory
// of other origin goes through staging. Nothing is assumed: a rank that cannot make, pass or map memory says so.
//
// The ranks that share are a group: in all that follows a rank is its number in the group, unless it is called job_rank.
//
// Counters only grow, so a rank that looks late misses nothing. A rank that sleeps says so in its area first; whoever
// moves a counter wakes it by its loop's eventfd. No lock, no allocation, no system call where nobody sleeps.
#ifndef NB_SHM_H
#define NB_SHM_H

#include <stdalign.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/handover.h"
#include "base/loop.h"
#include "bootstrap/bootstrap.h"
#include "transport/shm_pipe.h"

enum {
    NB_SHM_RANKS_MAX = 64,
    NB_SHM_SLOTS = 16,   // operations that are described at a time
    NB_SHM_PIECES = 128, // of a description: what lies in more goes through staging
    NB_SHM_ARENAS = 64,  // of a rank
    NB_SHM_STAGES = 2,
    NB_SHM_STAGE_BYTES = 256 * 1024, // small enough to stay in a processor's caches
    NB_SHM_LINE = 64                 // of the cache
};

static const uint32_t NB_SHM_STAGED = UINT32_MAX;

// Where a piece of a line lies, in the words that all ranks understand.
struct nb_shm_piece {
    uint32_t arena;
    uint32_t zero;
    uint64_t offset;
    uint64_t bytes;
};

struct nb_shm_slot {
    alignas(NB_SHM_LINE) uint32_t count; // of pieces, or NB_SHM_STAGED: the line is not in arenas that all have mapped
    struct nb_shm_piece pieces[NB_SHM_PIECES];
};

struct nb_shm_area {
    // How many operations this rank has described, and of how many its share is done.
    alignas(NB_SHM_LINE) _Atomic uint64_t ready;
    _Atomic uint64_t done;
    // How many windows of staging it has filled, reduced its part of, and emptied everybody's of.
    _Atomic uint64_t filled;
    _Atomic uint64_t reduced;
    _Atomic uint64_t emptied;
    _Atomic uint64_t
        folded; // two levels: read what others had filled in; it is `reduced` when the sum of all hosts is there
    alignas(NB_SHM_LINE) _Atomic uint64_t pulse;   // grows while it moves bytes
    _Atomic uint32_t busy;                         // it may be writing to others' memory
    alignas(NB_SHM_LINE) _Atomic uint32_t revoked; // nobody may write to its memory any more
    alignas(NB_SHM_LINE) _Atomic uint32_t asleep;  // written by all
    // How often each number of an arena of this rank was given out and taken back: odd while there is such an arena.
    alignas(NB_SHM_LINE) _Atomic uint32_t lives[NB_SHM_ARENAS];
    // Which of these lives of each rank's arenas this one has mapped; 0: none.
    alignas(NB_SHM_LINE) _Atomic uint32_t mapped[NB_SHM_RANKS_MAX][NB_SHM_ARENAS];
    struct nb_shm_slot slots[NB_SHM_SLOTS];
    struct nb_shm_pipe to_first; // for whoever agrees what is done: to the group's rank 0, and from it
    struct nb_shm_pipe from_first;
    alignas(4096) unsigned char stage[NB_SHM_STAGES][NB_SHM_STAGE_BYTES];
};

struct nb_shm;

struct nb_shm_peer { // [this rank]: its own area, and its own arenas where they are
    struct nb_watch watch;
    struct nb_shm *shm;
    int rank;
    int job_rank;
    int wake_fd;
    struct nb_shm_area *area;
    uint32_t arena_count;
    char *arenas[NB_SHM_ARENAS];
    size_t arena_bytes[NB_SHM_ARENAS];
    uint32_t arena_lives[NB_SHM_ARENAS]; // of what is mapped
};

struct nb_shm {
    int rank;
    int size; // 0: the group is not known yet
    int area_fd;
    int listener;
    char name[NB_HANDOVER_NAME];
    struct nb_shm_area *area;             // this rank's
    struct nb_loop *loop;                 // NULL: its peers are not watched yet
    uint64_t arena_inodes[NB_SHM_ARENAS]; // of this rank's
    struct nb_shm_peer peers[];           // by rank
};

// Makes this rank's area and the socket that up to ranks_max others come to.
int nb_shm_open(struct nb_shm **shm, int ranks_max, struct nb_error *err);
// The same of a rank that has no others: it meets nobody, and needs no memory that can be passed on.
int nb_shm_alone(struct nb_shm **shm, int job_rank, struct nb_error *err);
void nb_shm_close(struct nb_shm *shm);

// Who shares: job_ranks by rank, as many as the others that may come at most; this one is at `index`.
void nb_shm_group(struct nb_shm *shm, const int *job_ranks, int size, int index);

// Meets the others of the group, given the names of their sockets by rank, and maps their areas. Blocks until deadline_ns
// at most. wake_fd: what wakes this rank.
int nb_shm_meet(struct nb_shm *shm, const char (*names)[NB_HANDOVER_NAME], const struct nb_boot *boot, int wake_fd,
                int64_t deadline_ns, struct nb_error *err);

// From now on others' arenas come in by the loop.
int nb_shm_watch(struct nb_shm *shm, struct nb_loop *loop, struct nb_error *err);

// Passes memory to all others; `fd` stays the caller's. Memory that they know already is not passed again. -ENOSPC: as
// many arenas of this rank are shared as can be.
int nb_shm_offer(struct nb_shm *shm, void *base, size_t bytes, int fd, struct nb_error *err);
// Takes back memory that was passed, of which every operation is over: the others unmap it by nb_shm_tidy(), and its
// number is free. Without a message.
void nb_shm_withdraw(struct nb_shm *shm, const void *base);
// Unmaps what others have withdrawn.
void nb_shm_tidy(struct nb_shm *shm);

// This rank's arena that holds all of a piece and that all others have mapped; false: there is none.
bool nb_shm_find(const struct nb_shm *shm, const void *base, size_t bytes, struct nb_shm_piece *piece);

// Where a piece that a rank described is in this process; NULL: no such memory was ever passed.
char *nb_shm_memory(const struct nb_shm *shm, int rank, const struct nb_shm_piece *piece);

// To be called after a counter has moved.
void nb_shm_wake(struct nb_shm *shm);
// The same for one rank, of which alone it is known.
void nb_shm_wake_one(struct nb_shm *shm, int rank);
// From now on a counter that moves wakes this rank; what has moved before has to be looked for after it.
void nb_shm_sleep(struct nb_shm *shm);
void nb_shm_rouse(struct nb_shm *shm);

// Around writes to others' memory: false where somebody has revoked it.
bool nb_shm_enter(struct nb_shm *shm);
void nb_shm_leave(struct nb_shm *shm);
// From now on no rank begins to write to this one's memory. Waits for those that do so now, until deadline_ns at most.
// False: one of them is still at it, or was stopped in the middle, and may write whenever it goes on.
bool nb_shm_revoke(struct nb_shm *shm, int64_t deadline_ns);

#endif
