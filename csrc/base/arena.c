// Where does gradient memory come from?
#include "base/arena.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/types.h>
#include <unistd.h>

#include "base/error.h"

// The kernel ends a process that makes a file longer than this, unless it asked for an error.
static bool beyond_limit(size_t bytes) {
    struct rlimit limit;
    return getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < bytes;
}

int nb_arena_shared(size_t bytes, bool there, void **base) {
    int fd = memfd_create("netbottleneck", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) {
        return -errno;
    }
    int rc = beyond_limit(bytes) ? -EFBIG : 0;
    if (rc == 0 && (ftruncate(fd, (off_t)bytes) != 0 || (there && fallocate(fd, 0, 0, (off_t)bytes) != 0) ||
                    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0)) {
        rc = -errno;
    }
    void *memory = rc == 0 ? mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
    if (memory == MAP_FAILED) {
        rc = rc < 0 ? rc : -errno;
        close(fd);
        return rc;
    }
    *base = memory;
    return fd;
}

int nb_arena_open(struct nb_arena *arena, size_t bytes, struct nb_error *err) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (bytes > (size_t)PTRDIFF_MAX - page) {
        return nb_fail(err, -ENOMEM, "no room for an arena of %zu bytes", bytes);
    }
    size_t whole = bytes == 0 ? page : (bytes + page - 1) / page * page;
    void *base = MAP_FAILED;
    int fd = nb_arena_shared(whole, false, &base);
    if (fd < 0) {
        base = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    }
    if (base == MAP_FAILED) {
        return nb_fail(err, -errno, "arena of %zu bytes: %m", whole);
    }
    (void)madvise(base, whole, MADV_HUGEPAGE);
    arena->base = base;
    arena->bytes = whole;
    arena->fd = fd < 0 ? -1 : fd;
    arena->why = fd < 0 ? fd : 0;
    return 0;
}

void nb_arena_close(struct nb_arena *arena) {
    if (arena == NULL || arena->base == NULL) {
        return;
    }
    (void)munmap(arena->base, arena->bytes);
    if (arena->fd >= 0) {
        close(arena->fd);
    }
    arena->base = NULL;
    arena->bytes = 0;
    arena->fd = -1;
}
