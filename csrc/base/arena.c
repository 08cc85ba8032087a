// Where does gradient memory come from?
#include "base/arena.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

#include "base/error.h"

static void *map_shared(size_t bytes, int *fd) {
    int memory = memfd_create("netbottleneck", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (memory < 0) {
        return MAP_FAILED;
    }
    void *base = MAP_FAILED;
    if (ftruncate(memory, (off_t)bytes) == 0) {
        base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    }
    if (base == MAP_FAILED) {
        close(memory);
        return MAP_FAILED;
    }
    (void)fcntl(memory, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW); // whoever maps it can rely on its size
    *fd = memory;
    return base;
}

int nb_arena_open(struct nb_arena *arena, size_t bytes, struct nb_error *err) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (bytes > (size_t)PTRDIFF_MAX - page) {
        return nb_fail(err, -ENOMEM, "no room for an arena of %zu bytes", bytes);
    }
    size_t whole = bytes == 0 ? page : (bytes + page - 1) / page * page;
    int fd = -1;
    void *base = map_shared(whole, &fd);
    if (base == MAP_FAILED) {
        base = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    }
    if (base == MAP_FAILED) {
        return nb_fail(err, -errno, "arena of %zu bytes: %m", whole);
    }
    (void)madvise(base, whole, MADV_HUGEPAGE);
    arena->base = base;
    arena->bytes = whole;
    arena->fd = fd;
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
