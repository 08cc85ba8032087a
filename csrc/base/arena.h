// Gradient memory: page-aligned, zeroed, backed by a memfd where the kernel allows one, so that another rank of this
// host can map it. Falls back to private memory, and says which and why.
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

// Memory that other processes can map by its descriptor, which is returned, and whose size nobody can change. `there`: all
// of it exists before anybody relies on it, so that a limit shows here and not as a signal later. Else -errno.
int nb_arena_shared(size_t bytes, bool there, void **base);

#endif
