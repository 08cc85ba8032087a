// The arithmetic of operations in shared memory: which part is whose, who is read, who is written. local.c and twolevel.c
// decide when. A rank is its number among those of this host, unless it is called job_rank.
#ifndef NB_ENGINE_LOCAL_SHARE_H
#define NB_ENGINE_LOCAL_SHARE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/list.h"
#include "coll/sched.h"
#include "engine/engine.h"
#include "engine/internal.h"
#include "transport/shm.h"

enum {
    FOLD_BYTES = 16 * 1024, // folded at a time: with what is read, it stays in the nearest cache
    LOCAL_OPEN = 4          // operations that move at a time
};

// A line as it lies in this process.
struct line {
    int count;
    const struct nb_segment *pieces;
    const size_t *starts; // count + 1 prefix sums
};

struct line_room { // where a line that a rank has described is noted
    struct nb_segment pieces[NB_SHM_PIECES];
    size_t starts[NB_SHM_PIECES + 1];
};

struct rails;

struct local {
    struct nb_job *job;
    struct nb_shm *shm;
    int rank;
    int size;
    int hosts;           // that the job runs on
    int host;            // this one's number
    int parts;           // of a line. Part i is rank i's; ranks beyond have none
    struct rails *rails; // between several hosts; NULL: there is one
    bool broken;         // operations were given up: nothing moves any more
    bool late;           // then: a rank of this host may still write to the memory of operations
    bool private_told;   // that an arena is copied
    bool limit_told;     // the same, as many are shared
    struct nb_list queue;
    uint64_t started;
    uint64_t described;
    uint64_t windows; // of staging, given to operations so far
    int64_t moved_ns;
    uint64_t pulses;         // of all ranks, when they were last looked at
    uint64_t rail_bytes;     // that rings had moved then
    struct line *lines;      // of the operations that move: see line_of()
    struct line_room *rooms; // as many
    char *sum;               // FOLD_BYTES
    char *term;              // FOLD_BYTES
};

// Where a rank's line lies in this process, and the room to note it in.
static inline size_t nb_line_slot(const struct local *l, const struct nb_work *work, int rank) {
    return (size_t)(work->local.index % LOCAL_OPEN) * (size_t)l->size + (size_t)rank;
}

// The counters by which ranks follow each other: only the rank itself moves its own, and wakes the others.
static inline struct nb_shm_area *nb_local_area(const struct local *l, int rank) {
    return l->shm->peers[rank].area;
}

static inline void nb_local_advance(const struct local *l, _Atomic uint64_t *counter) {
    uint64_t next = atomic_load_explicit(counter, memory_order_relaxed) + 1;
    atomic_store_explicit(counter, next, memory_order_release);
    nb_shm_wake(l->shm);
}

// The lowest of the first `ranks` ranks' counters that lie `offset` bytes into their areas.
static inline uint64_t nb_local_least(const struct local *l, int ranks, size_t offset) {
    uint64_t lowest = UINT64_MAX;
    for (int r = 0; r < ranks; r++) {
        const char *at = (const char *)nb_local_area(l, r) + offset;
        uint64_t count = atomic_load_explicit((const _Atomic uint64_t *)(const void *)at, memory_order_acquire);
        lowest = count < lowest ? count : lowest;
    }
    return lowest;
}

#define NB_LEAST(local, ranks, counter) nb_local_least(local, ranks, offsetof(struct nb_shm_area, counter))

// This rank's part of the line.
struct nb_range nb_share_part(const struct local *local, const struct nb_work *work);
// Does this rank's share of `range`, which lies in its part, in everybody's memory.
void nb_share_direct(struct local *local, struct nb_work *work, struct nb_range range);

// A part is cut into blocks, which are its windows where it goes through staging: the same on all hosts of the job.
size_t nb_share_block_bytes(const struct local *local);
struct nb_range nb_share_block(const struct local *local, const struct nb_work *work, uint64_t block);
uint64_t nb_share_windows(const struct local *local, const struct nb_work *work);
void nb_share_fill(struct local *local, struct nb_work *work, uint64_t window);
void nb_share_reduce(struct local *local, struct nb_work *work, uint64_t window);
void nb_share_empty(struct local *local, struct nb_work *work, uint64_t window);

// Between several hosts: what the ranks of this one have in a block of this rank's part is added up in its own line, and
// what came of it on all hosts goes to the others' lines, or to staging.
void nb_share_fold(struct local *local, struct nb_work *work, uint64_t block);
void nb_share_spread(struct local *local, struct nb_work *work, uint64_t block);

#endif
