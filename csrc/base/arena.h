// Arena: gradient memory, page-aligned and zeroed. A memfd backs it where the kernel allows one, so that another rank
// of this host can map it. Else the memory is private: `fd` is -1, and `why` holds the reason.
//
// In a forked child an arena is private: only the child sees what it writes. The child sees the parent's contents,
// later changes included, until it writes to a page itself; from then on it has its own copy of that page. A child that
// needs the values at the moment of the fork must copy them first. A snapshot at each fork would copy all gradients for
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
    int why;      // of private memory: -errno
};

int nb_arena_open(struct nb_arena *arena, size_t bytes, struct nb_error *err);
void nb_arena_close(struct nb_arena *arena);

// Returns a descriptor of the arena to pass on, which the caller closes, or -errno if there is none. -EBUSY: the arena
// was detached.
int nb_arena_pass(const struct nb_arena *arena);

// Detaches the arenas that overlap with [base, base + bytes) from the memory that other processes have mapped, in place
// and for good. Addresses and contents stay. Other processes keep the old pages, which this process no longer reads.
// Their later writes reach no page of [base, base + bytes); the other pages of an arena are copied when this process
// writes to them. Threads of this process may read and write the arenas meanwhile. Leaves other memory alone. Returns 0
// or -errno.
int nb_arena_detach(void *base, size_t bytes);
// True if an arena that overlaps with the range was detached. Other processes may have written to its old pages since.
bool nb_arena_is_detached(const void *base, size_t bytes);

// Opens shared memory and returns its descriptor, by which other processes can map it, or -errno. Nobody can change its
// size. `there`: allocates all pages now, so that a limit shows as an error here and not as a signal later.
int nb_arena_shared(size_t bytes, bool there, void **base);

#endif
