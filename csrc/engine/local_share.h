// The arithmetic of operations in shared memory: which part is whose, who is read, who is written. local.c decides when.
#ifndef NB_ENGINE_LOCAL_SHARE_H
#define NB_ENGINE_LOCAL_SHARE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/list.h"
#include "coll/sched.h"
#include "engine/engine.h"
#include "engine/internal.h"
#include "transport/shm.h"

enum { FOLD_BYTES = 16 * 1024 }; // folded at a time: with what is read, it stays in the nearest cache

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

struct local {
    struct nb_job *job;
    struct nb_shm *shm;
    int rank;
    int size;
    bool spins;  // a core for each rank of this host: a short wait need not sleep
    bool broken; // operations were given up: nothing moves any more
    struct nb_list queue;
    uint64_t started;
    uint64_t described;
    uint64_t windows; // of staging, given to operations so far
    int64_t moved_ns;
    uint64_t pulses;         // of all ranks, when they were last looked at
    struct line *lines;      // by rank, of the operation that runs
    struct line_room *rooms; // by rank
    char *sum;               // FOLD_BYTES
    char *term;              // FOLD_BYTES
};

// This rank's part of the line.
struct nb_range nb_share_part(const struct local *local, const struct nb_work *work);
// Does this rank's share of `range`, which lies in its part, in everybody's memory.
void nb_share_direct(struct local *local, struct nb_work *work, struct nb_range range);

// Staging, window by window of the operation.
uint64_t nb_share_windows(const struct local *local, const struct nb_work *work);
void nb_share_fill(struct local *local, struct nb_work *work, uint64_t window);
void nb_share_reduce(struct local *local, struct nb_work *work, uint64_t window);
void nb_share_empty(struct local *local, struct nb_work *work, uint64_t window);

#endif
