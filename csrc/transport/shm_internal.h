// What the files of shared memory have in common.
#ifndef NB_SHM_INTERNAL_H
#define NB_SHM_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>

#include "base/fork.h"

enum { NB_SHM_STRANGERS = 8 }; // connections beyond those of the group that may wait

// Memory that its owner can no longer take away from under those who have mapped it.
bool nb_shm_sealed(int fd, size_t bytes);

static inline void nb_shm_fd_close(int *fd) {
    if (*fd >= 0) {
        nb_fork_close(*fd);
    }
    *fd = -1;
}

#endif
