// Arena: allocates gradient memory, and detaches it from other processes.
#include "base/arena.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

#include "base/error.h"
#include "base/file.h"
#include "base/fork.h"
#include "base/list.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

// An arena that other processes can map. All are in a list, so that a forked child and nb_arena_detach() find them.
struct shared {
    struct nb_list link;
    char *base;
    size_t bytes;
    int fd; // -1 in a forked child
    bool detached;
};

// State of the process. It changes only while no thread can fork.
static struct {
    pthread_once_t once;
    struct nb_list all;
    _Atomic bool any_detached;
} arenas = {.once = PTHREAD_ONCE_INIT, .all = {&arenas.all, &arenas.all}};

// Replaces the shared mapping by a private mapping of the same file. The kernel replaces it in one step, and copies a
// page in one step when this process first writes to it. So a thread that writes meanwhile loses nothing; a copy
// followed by a remap could not promise that. (Protecting the pages first would kill such a thread by a signal. The
// kernel refuses a seal against writing while the file is mapped. userfaultfd needs a privilege that containers do not
// have.)
static int make_private(const struct shared *shared) {
    void *got = mmap(shared->base, shared->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE,
                     shared->fd, 0);
    return got == MAP_FAILED ? -errno : 0;
}

// Where memory cannot be private, a write kills the child: it must not change what its parent computes.
static void in_child(void) {
    NB_LIST_EACH(it, &arenas.all) {
        struct shared *shared = NB_CONTAINER(it, struct shared, link);
        if (!shared->detached && shared->fd >= 0 && make_private(shared) < 0) {
            (void)mprotect(shared->base, shared->bytes, PROT_READ);
        }
        shared->fd = -1; // closed in the child
    }
}

static void start(void) {
    nb_fork_handler(in_child);
}

int nb_arena_shared(size_t bytes, bool there, void **base) {
    nb_fork_hold();
    int fd = nb_fork_own(memfd_create("netbottleneck", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (fd < 0) {
        return -errno;
    }
    int rc = nb_file_extend(fd, bytes, there);
    if (rc == 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
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

// Opens a shared arena: sets the base, returns the descriptor or -errno.
static int shared_open(size_t bytes, void **base) {
    struct shared *shared = calloc(1, sizeof *shared);
    if (shared == NULL) {
        return -ENOMEM;
    }
    int fd = nb_arena_shared(bytes, false, base);
    if (fd < 0) {
        free(shared);
        return fd;
    }
    *shared = (struct shared){.base = *base, .bytes = bytes, .fd = fd};
    (void)pthread_once(&arenas.once, start);
    nb_fork_hold();
    nb_list_insert(&arenas.all, &shared->link);
    nb_fork_release();
    return fd;
}

// The first arena, from `it` on, that overlaps with a range, or NULL. The caller holds forks.
static struct shared *overlapping(struct nb_list *it, const void *base, size_t bytes) {
    const char *at = base;
    for (; it != &arenas.all; it = it->next) {
        struct shared *shared = NB_CONTAINER(it, struct shared, link);
        if (at < shared->base + shared->bytes && shared->base < at + bytes) {
            return shared;
        }
    }
    return NULL;
}

int nb_arena_open(struct nb_arena *arena, size_t bytes, struct nb_error *err) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (bytes > (size_t)PTRDIFF_MAX - page) {
        return nb_fail(err, -ENOMEM, "cannot allocate an arena of %zu bytes", bytes);
    }
    size_t whole = bytes == 0 ? page : (bytes + page - 1) / page * page;
    void *base = MAP_FAILED;
    int fd = shared_open(whole, &base);
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
    int fd = arena->fd;
    nb_fork_hold();
    struct shared *shared = overlapping(arenas.all.next, arena->base, arena->bytes);
    if (shared != NULL) {
        fd = shared->fd;
        nb_list_remove(&shared->link);
    }
    (void)munmap(arena->base, arena->bytes);
    nb_fork_release();
    free(shared);
    if (fd >= 0) {
        nb_fork_close(fd);
    }
    arena->base = NULL;
    arena->bytes = 0;
    arena->fd = -1;
}

int nb_arena_pass(const struct nb_arena *arena) {
    if (arena->fd < 0) {
        return arena->why < 0 ? arena->why : -EBADF;
    }
    if (nb_arena_is_detached(arena->base, arena->bytes)) {
        return -EBUSY;
    }
    nb_fork_hold();
    int fd = nb_fork_own(fcntl(arena->fd, F_DUPFD_CLOEXEC, 0));
    return fd < 0 ? -errno : fd;
}

// Makes a copy for this process of every page of a privately mapped range.
static void copy_pages(char *base, size_t bytes) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *first = base - (uintptr_t)base % page;
    char *end = base + bytes;
    size_t whole = ((size_t)(end - first) + page - 1) / page * page;
    if (madvise(first, whole, MADV_POPULATE_WRITE) == 0) {
        return;
    }
    for (char *at = first; at < end; at += page) { // Linux before 5.14
        (void)atomic_fetch_or((_Atomic unsigned char *)(void *)at, 0);
    }
}

static int detach(struct shared *shared) {
    if (shared->detached) {
        return 0;
    }
    atomic_store(&arenas.any_detached, true); // first: a thread that sees a foreign write go wrong sees this, too
    shared->detached = true;
    return make_private(shared);
}

int nb_arena_detach(void *base, size_t bytes) {
    char *const end = (char *)base + bytes;
    int rc = 0;
    nb_fork_hold();
    struct nb_list *it = arenas.all.next;
    for (struct shared *shared; (shared = overlapping(it, base, bytes)) != NULL; it = shared->link.next) {
        int code = detach(shared);
        rc = rc < 0 ? rc : code;
        char *from = (char *)base > shared->base ? base : shared->base;
        char *to = end < shared->base + shared->bytes ? end : shared->base + shared->bytes;
        if (code == 0) {
            copy_pages(from, (size_t)(to - from));
        }
    }
    nb_fork_release();
    return rc;
}

bool nb_arena_is_detached(const void *base, size_t bytes) {
    bool found = false;
    if (!atomic_load(&arenas.any_detached)) {
        return false;
    }
    nb_fork_hold();
    struct nb_list *it = arenas.all.next;
    for (struct shared *shared; !found && (shared = overlapping(it, base, bytes)) != NULL; it = shared->link.next) {
        found = shared->detached;
    }
    nb_fork_release();
    return found;
}
