// Folds: the data movement of operations in shared memory. It knows which part belongs to which rank, what is read and
// what is written. shared_operations.c and two_level.c decide when. "Rank" means the local rank here, except in
// job_rank.
#ifndef NB_ENGINE_SHARED_FOLD_H
#define NB_ENGINE_SHARED_FOLD_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/list.h"
#include "coll/ring_schedule.h"
#include "engine/context.h"
#include "engine/engine.h"
#include "transport/shm.h"

enum {
    FOLD_BYTES = 16 * 1024, // folded at a time: with its inputs, it stays in the L1 cache
    LOCAL_OPEN = 4          // operations that run concurrently
};

// A rank's buffer as mapped in this process.
struct buffer_view {
    int count;
    const struct nb_segment *pieces;
    const size_t *starts; // count + 1 prefix sums
};

struct buffer_view_room { // storage for a buffer that a rank has described
    struct nb_segment pieces[NB_SHM_PIECES];
    size_t starts[NB_SHM_PIECES + 1];
};

struct rails;

struct shared {
    struct nb_job *job;
    struct nb_shm *shm;
    int rank;
    int size;
    int hosts;           // of the job
    int host;            // number of this host
    int parts;           // of a buffer. Rank i owns part i; ranks beyond have none
    struct rails *rails; // between hosts; NULL: one host
    size_t piece_bytes;  // two levels: size of a full piece
    bool broken;         // operations were cancelled: nothing moves any more
    int revoker;         // the rank that revoked this rank's writes to its memory; -1: none
    bool peer_may_write; // if so: a rank of this host may still write to the memory of operations
    bool private_told;   // reported: an arena is copied
    bool limit_reported; // reported: the limit of shared arenas
    struct nb_list queue;
    uint64_t started;
    uint64_t described;
    uint64_t windows; // windows of staging given to operations so far
    int64_t moved_ns;
    uint64_t pulses;                // sum over all ranks at the last tick
    uint64_t rail_bytes;            // bytes moved by rings at the last tick
    struct buffer_view *views;      // buffers of the running operations: see view_of()
    struct buffer_view_room *rooms; // the same number
    char *sum;                      // FOLD_BYTES
    char *term;                     // FOLD_BYTES
};

// Index into views and rooms for a rank's buffer.
static inline size_t nb_buffer_slot(const struct shared *l, const struct nb_work *work, int rank) {
    return (size_t)(work->shared.index % LOCAL_OPEN) * (size_t)l->size + (size_t)rank;
}

// The counters by which ranks follow each other. Each rank advances only its own, and wakes the others.
static inline struct nb_shm_area *nb_shared_area(const struct shared *l, int rank) {
    return l->shm->peers[rank].area;
}

static inline void nb_shared_advance(const struct shared *l, _Atomic uint64_t *counter) {
    uint64_t next = atomic_load_explicit(counter, memory_order_relaxed) + 1;
    atomic_store_explicit(counter, next, memory_order_release);
    nb_shm_wake(l->shm);
}

// Returns the lowest counter of the first `ranks` ranks, at `offset` bytes into their areas.
static inline uint64_t nb_shared_least(const struct shared *l, int ranks, size_t offset) {
    uint64_t lowest = UINT64_MAX;
    for (int r = 0; r < ranks; r++) {
        const char *at = (const char *)nb_shared_area(l, r) + offset;
        uint64_t count = atomic_load_explicit((const _Atomic uint64_t *)(const void *)at, memory_order_acquire);
        lowest = count < lowest ? count : lowest;
    }
    return lowest;
}

#define NB_LEAST(shared, ranks, counter) nb_shared_least(shared, ranks, offsetof(struct nb_shm_area, counter))

// This rank's part of the buffer.
struct nb_range nb_fold_part(const struct shared *shared, const struct nb_work *work);
// Does this rank's share of `range`, which lies in its part, in all ranks' memory.
void nb_fold_direct(struct shared *shared, struct nb_work *work, struct nb_range range);

// A part is cut into blocks; through staging, these are its windows. The block size is the same on all hosts of the
// job.
size_t nb_fold_block_bytes(const struct shared *shared);
struct nb_range nb_fold_block(const struct shared *shared, const struct nb_work *work, uint64_t block);
uint64_t nb_fold_windows(const struct shared *shared, const struct nb_work *work);
void nb_fold_fill(struct shared *shared, struct nb_work *work, uint64_t window);
void nb_fold_reduce(struct shared *shared, struct nb_work *work, uint64_t window);
void nb_fold_empty(struct shared *shared, struct nb_work *work, uint64_t window);

// Between several hosts: sum() adds up a block of this rank's part over the ranks of this host, in its own buffer.
// spread() copies the result of all hosts to the other ranks' buffers, or to staging.
void nb_fold_sum(struct shared *shared, struct nb_work *work, uint64_t block);
void nb_fold_spread(struct shared *shared, struct nb_work *work, uint64_t block);

#endif
