// Gradient memory: page-aligned, zeroed, backed by a memfd where the kernel allows one, so that another rank of this
// host can map it. Falls back to private memory, and says which and why.
//
// In a forked child an arena is private: what the child writes, it alone sees. The child sees what its parent has there,
// later changes included, until it writes to a page itself: that page is its own from then on. A child that needs the
// values of the moment of the fork copies them before. To take a snapshot at each fork would copy all gradients for
// each worker of a DataLoader, and stop the training meanwhile.
#ifndef NB_BASE_ARENA_H
#define NB_BASE_ARENA_H

#include <stdbool.h>
#include <stddef.h>

#include "base/error.h"

struct nb_arena {
    void *base;
    size_t bytes; // rounded up to whole pages
    int fd;       // -1: private memory
    int why;      // then: -errno
};

int nb_arena_open(struct nb_arena *arena, size_t bytes, struct nb_error *err);
void nb_arena_close(struct nb_arena *arena);

// A descriptor of the arena to pass on, which the caller closes, or why there is none (-errno). -EBUSY: the arena was
// detached.
int nb_arena_pass(const struct nb_arena *arena);

// Detaches the arenas that overlap with [base, base + bytes) from the memory that other processes have mapped, in place,
// for good: addresses and contents stay, and other processes keep the old pages, which nobody reads any more. What they
// write from now on reaches no page of [base, base + bytes); all other pages follow when this process writes to them.
// Threads of this process may read and write the arenas meanwhile. 0 or -errno; memory of other origin is left alone.
int nb_arena_detach(void *base, size_t bytes);
// True if an arena that overlaps with it was detached. Others may have written to its old pages since.
bool nb_arena_is_detached(const void *base, size_t bytes);

// Memory that other processes can map by its descriptor, which is returned, and whose size nobody can change. `there`: all
// of it exists before anybody relies on it, so that a limit shows here and not as a signal later. Else -errno.
int nb_arena_shared(size_t bytes, bool there, void **base);

#endif
