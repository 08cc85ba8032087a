// File: extends a file without a signal that would kill the process.
#include "base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/resource.h>
#include <sys/types.h>
#include <unistd.h>

static bool beyond_limit(size_t bytes) {
    struct rlimit limit;
    return getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < bytes;
}

// Signals wait meanwhile: in memory, an interrupted call gives back what it has allocated, and a timer of the program
// would interrupt every attempt.
static int allocate(int fd, size_t bytes) {
    sigset_t all;
    sigset_t before;
    int code;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    do {
        code = posix_fallocate(fd, 0, (off_t)bytes);
    } while (code == EINTR); // also without a signal: of a debugger, say
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return -code;
}

int nb_file_extend(int fd, size_t bytes, bool reserve) {
    if (beyond_limit(bytes)) {
        return -EFBIG;
    }
    if (reserve) {
        return allocate(fd, bytes);
    }
    return ftruncate(fd, (off_t)bytes) == 0 ? 0 : -errno;
}
