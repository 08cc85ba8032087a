// Shared memory internals: functions that its files share.
#ifndef NB_SHM_INTERNAL_H
#define NB_SHM_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>

#include "base/fork.h"

enum { NB_SHM_INCOMING = 8 }; // waiting connections beyond those of the group

// True for memory that its owner cannot shrink after others have mapped it.
bool nb_shm_sealed(int fd, size_t bytes);

static inline void nb_shm_fd_close(int *fd) {
    if (*fd >= 0) {
        nb_fork_close(*fd);
    }
    *fd = -1;
}

#endif
