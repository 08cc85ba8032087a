// Shared memory of the ranks of one host. Each rank has an area: counters that only it increments and all others read,
// descriptions of its operations, and a bounded staging buffer. All ranks map the core's arenas; other memory goes
// through staging. A rank that cannot allocate, pass or map memory reports it.
//
// The ranks that share are a group. Here a rank is a number within the group, unless it is called job_rank.
//
// Counters only grow, so a rank that reads late misses nothing. A rank marks itself asleep in its area before it
// sleeps; a rank that advances a counter wakes it by its loop's eventfd. No lock, no allocation, and no system call
// while no rank sleeps.
#ifndef NB_SHM_H
#define NB_SHM_H

#include <stdalign.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/fdpass.h"
#include "base/loop.h"
#include "bootstrap/bootstrap.h"
#include "transport/shm_pipe.h"

enum {
    NB_SHM_RANKS_MAX = 64,
    NB_SHM_SLOTS = 16,   // operations described at a time
    NB_SHM_PIECES = 128, // per description; a buffer of more pieces goes through staging
    NB_SHM_ARENAS = 64,  // per rank
    NB_SHM_STAGES = 2,
    NB_SHM_STAGE_BYTES = 256 * 1024, // fits a processor's caches
    NB_SHM_LINE = 64                 // size of a cache line
};

static const uint32_t NB_SHM_STAGED = UINT32_MAX;

// A piece of an operation's buffer, as an offset in an arena that all ranks know.
struct nb_shm_piece {
    uint32_t arena;
    uint32_t zero;
    uint64_t offset;
    uint64_t bytes;
};

struct nb_shm_slot {
    alignas(NB_SHM_LINE) uint32_t count; // of pieces, or NB_SHM_STAGED: not in arenas that all ranks have mapped
    struct nb_shm_piece pieces[NB_SHM_PIECES];
};

struct nb_shm_area {
    // Number of operations that this rank has described, and of those whose share it has done.
    alignas(NB_SHM_LINE) _Atomic uint64_t ready;
    _Atomic uint64_t done;
    // Number of staging windows that it has filled, of those whose part it has reduced, and of those of which
    // it has emptied all ranks' parts.
    _Atomic uint64_t filled;
    _Atomic uint64_t reduced;
    _Atomic uint64_t emptied;
    // Two-level: windows of which it has read the other ranks' parts; `reduced` counts those with the sum of all hosts.
    _Atomic uint64_t folded;
    alignas(NB_SHM_LINE) _Atomic uint64_t pulse;   // grows while the rank moves bytes
    _Atomic uint32_t busy;                         // it may be writing to other ranks' memory
    alignas(NB_SHM_LINE) _Atomic uint32_t revoked; // no rank may write to its memory any more
    alignas(NB_SHM_LINE) _Atomic uint32_t asleep;  // written by all ranks
    // How often each arena number of this rank was assigned and released: odd while such an arena exists.
    alignas(NB_SHM_LINE) _Atomic uint32_t lives[NB_SHM_ARENAS];
    // The life of each rank's arenas that this rank has mapped; 0: none.
    alignas(NB_SHM_LINE) _Atomic uint32_t mapped[NB_SHM_RANKS_MAX][NB_SHM_ARENAS];
    struct nb_shm_slot slots[NB_SHM_SLOTS];
    struct nb_shm_pipe to_first; // messages about completion: to the group's rank 0, and from it
    struct nb_shm_pipe from_first;
    alignas(4096) unsigned char stage[NB_SHM_STAGES][NB_SHM_STAGE_BYTES];
};

struct nb_shm;

struct nb_shm_peer { // [this rank]: its own area and its own arenas
    struct nb_watch watch;
    struct nb_shm *shm;
    int rank;
    int job_rank;
    int wake_fd;
    struct nb_shm_area *area;
    uint32_t arena_count;
    char *arenas[NB_SHM_ARENAS];
    size_t arena_bytes[NB_SHM_ARENAS];
    uint32_t arena_lives[NB_SHM_ARENAS]; // of the mapped arenas
};

struct nb_shm {
    int rank;
    int size; // 0: group not set yet
    int area_fd;
    int listener;
    char name[NB_FDPASS_NAME];
    struct nb_shm_area *area;             // this rank's
    struct nb_loop *loop;                 // NULL: peers are not watched yet
    uint64_t arena_inodes[NB_SHM_ARENAS]; // of this rank's
    struct nb_shm_peer peers[];           // by rank
};

// Allocates this rank's area, and the socket to which up to ranks_max others connect.
int nb_shm_open(struct nb_shm **shm, int ranks_max, struct nb_error *err);
// The same for a rank without others: it has no peers, and needs no memory that can be shared.
int nb_shm_alone(struct nb_shm **shm, int job_rank, struct nb_error *err);
void nb_shm_close(struct nb_shm *shm);

// Sets the group: job_ranks by rank, at most ranks_max others; this rank is at `index`.
void nb_shm_group(struct nb_shm *shm, const int *job_ranks, int size, int index);

// Meets the others of the group, given the names of their sockets by rank, and maps their areas. Blocks until
// deadline_ns at most; -EINTR if boot's interrupt ends the wait. wake_fd: the eventfd that wakes this rank.
int nb_shm_rendezvous(struct nb_shm *shm, const char (*names)[NB_FDPASS_NAME], const struct nb_boot *boot, int wake_fd,
                      int64_t deadline_ns, struct nb_error *err);

// Receives other ranks' arenas by the loop from now on.
int nb_shm_watch(struct nb_shm *shm, struct nb_loop *loop, struct nb_error *err);

// Passes memory to all others; `fd` remains the caller's. Does not pass memory twice. -ENOSPC: too many arenas of this
// rank are shared already.
int nb_shm_offer(struct nb_shm *shm, void *base, size_t bytes, int fd, struct nb_error *err);
// Withdraws memory that was passed; every operation over it must be complete. The others unmap it in nb_shm_unmap_withdrawn(),
// without a message, and its number becomes free.
void nb_shm_withdraw(struct nb_shm *shm, const void *base);
// Unmaps arenas that other ranks have withdrawn.
void nb_shm_unmap_withdrawn(struct nb_shm *shm);

// Finds this rank's arena that contains a whole piece and that all others have mapped; false: there is none.
bool nb_shm_find(const struct nb_shm *shm, const void *base, size_t bytes, struct nb_shm_piece *piece);

// The address in this process of a piece that a rank described; NULL: no such memory was passed.
char *nb_shm_memory(const struct nb_shm *shm, int rank, const struct nb_shm_piece *piece);

// Wakes the sleeping ranks; call after a counter has advanced.
void nb_shm_wake(struct nb_shm *shm);
// Wakes one rank; for a counter that only this rank reads.
void nb_shm_wake_one(struct nb_shm *shm, int rank);
// Marks this rank asleep: from now on an advancing counter wakes it. Check for earlier advances after this call.
void nb_shm_mark_asleep(struct nb_shm *shm);
void nb_shm_mark_awake(struct nb_shm *shm);

// Enters and leaves a section of writes to other ranks' memory: false if a rank has revoked it, *revoker.
bool nb_shm_write_begin(struct nb_shm *shm, int *revoker);
void nb_shm_write_end(struct nb_shm *shm);
// Revokes write access: no rank begins to write to this rank's memory any more. Waits for writes in progress until
// deadline_ns at most. False: a rank is still writing, or was stopped in the middle and may continue later.
bool nb_shm_revoke(struct nb_shm *shm, int64_t deadline_ns);

#endif
