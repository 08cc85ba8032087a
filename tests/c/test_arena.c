// Arenas: aligned, zeroed and shareable. Without a memfd they are private.
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "base/arena.h"
#include "base/fork.h"
#include "check.h"

static void check_memory(const struct nb_arena *arena, size_t requested) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    unsigned char *bytes = arena->base;
    CHECK((uintptr_t)arena->base % page == 0, "not aligned to a page: %p", arena->base);
    CHECK(arena->bytes % page == 0 && arena->bytes >= requested && arena->bytes - requested <= page, "%zu for %zu",
          arena->bytes, requested);
    for (size_t i = 0; i < arena->bytes; i++) {
        CHECK(bytes[i] == 0, "byte %zu is %d", i, bytes[i]);
        bytes[i] = (unsigned char)i;
    }
}

static void test_shared(void) {
    struct nb_arena arena;
    CHECK(nb_arena_open(&arena, 100001, NULL) == 0, "open: %m");
    check_memory(&arena, 100001);
    CHECK(arena.fd >= 0, "the arena has no memfd");
    const unsigned char *second = mmap(NULL, arena.bytes, PROT_READ, MAP_SHARED, arena.fd, 0);
    CHECK(second != MAP_FAILED, "mmap: %m");
    ((unsigned char *)arena.base)[77777] = 200;
    CHECK(second[77777] == 200 && second[5] == 5, "a second mapping does not see the same memory");
    CHECK(munmap((void *)second, arena.bytes) == 0, "munmap: %m");
    nb_arena_close(&arena);
    CHECK(arena.base == NULL && arena.fd == -1, "the closed arena is not cleared");
    nb_arena_close(&arena);
    nb_arena_close(NULL);
}

static void test_private(void) {
    struct nb_arena arena;
    struct rlimit before;
    CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0, "getrlimit: %m");
    struct rlimit none = {.rlim_cur = 0, .rlim_max = before.rlim_max};
    CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0, "setrlimit: %m");
    int rc = nb_arena_open(&arena, 1, NULL);
    CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0, "setrlimit: %m");
    CHECK(rc == 0 && arena.fd == -1 && arena.why == -EMFILE, "without a descriptor the memory is not private: %d, %d",
          rc, arena.why);
    check_memory(&arena, 1);
    nb_arena_close(&arena);
}

static int interruptions; // of the next calls

int __real_posix_fallocate(int fd, off_t offset, off_t bytes);
int __wrap_posix_fallocate(int fd, off_t offset, off_t bytes);
int __wrap_posix_fallocate(int fd, off_t offset, off_t bytes) {
    sigset_t blocked;
    CHECK(pthread_sigmask(SIG_SETMASK, NULL, &blocked) == 0 && sigismember(&blocked, SIGPROF) == 1,
          "a signal can interrupt the allocation");
    return interruptions-- > 0 ? EINTR : __real_posix_fallocate(fd, offset, bytes);
}

// A timer of the program does not keep shared memory from its pages.
static void test_signals(void) {
    enum { BYTES = 1 << 20 };
    struct stat stat;
    sigset_t blocked;
    void *base = NULL;
    interruptions = 2;
    int fd = nb_arena_shared(BYTES, true, &base);
    CHECK(fd >= 0 && interruptions == -1, "interrupted: %d", fd);
    CHECK(pthread_sigmask(SIG_SETMASK, NULL, &blocked) == 0 && sigismember(&blocked, SIGPROF) == 0,
          "the signal stays blocked");
    CHECK(fstat(fd, &stat) == 0 && stat.st_size == BYTES && stat.st_blocks * 512 >= BYTES, "%lld blocks of %lld bytes",
          (long long)stat.st_blocks, (long long)stat.st_size);
    CHECK(munmap(base, BYTES) == 0, "munmap: %m");
    nb_fork_close(fd);
}

static void test_limits(void) {
    static const size_t huge[] = {SIZE_MAX, (size_t)PTRDIFF_MAX, (size_t)1 << 60};
    struct nb_arena arena;
    CHECK(nb_arena_open(&arena, 0, NULL) == 0, "an empty arena is refused");
    check_memory(&arena, 0);
    nb_arena_close(&arena);
    for (size_t i = 0; i < sizeof huge / sizeof huge[0]; i++) {
        struct nb_error err = {0};
        CHECK(nb_arena_open(&arena, huge[i], &err) == -ENOMEM && err.text[0] != '\0', "%zu bytes: %d", huge[i],
              err.code);
    }
}

enum { PAGE = 4096, PAGES = 512, WRITERS = 2, ROUNDS = 50, COUNTERS = 64 };

struct writer {
    _Atomic uint64_t *counters; // of this writer: one in each page
    _Atomic bool *stop;
    uint64_t wrote;
};

// Increments a counter in every page: a lost write is detected when the counter is read next.
static void *count_in_all_pages(void *arg) {
    struct writer *w = arg;
    while (!atomic_load(w->stop)) {
        for (size_t page = 0; page < PAGES; page++) {
            _Atomic uint64_t *counter = &w->counters[page * (PAGE / sizeof *w->counters)];
            uint64_t was = atomic_load(counter);
            CHECK(was == w->wrote, "page %zu: %llu was lost: it is %llu", page, (unsigned long long)w->wrote,
                  (unsigned long long)was);
            atomic_store(counter, was + 1);
        }
        w->wrote++;
    }
    return NULL;
}

// Detaches an arena from processes that have mapped it, while threads of this process write to it.
static void check_detached(void) {
    struct nb_arena arena;
    struct nb_arena other;
    struct writer writers[WRITERS];
    pthread_t threads[WRITERS];
    _Atomic bool stop = false;
    CHECK(nb_arena_open(&arena, (size_t)PAGES * PAGE, NULL) == 0 && arena.fd >= 0, "open: %m");
    CHECK(nb_arena_open(&other, PAGE, NULL) == 0, "open: %m");
    int fd = nb_arena_pass(&arena);
    CHECK(fd >= 0 && fd != arena.fd, "pass: %d", fd);
    char *peer_mapping = mmap(NULL, arena.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(peer_mapping != MAP_FAILED, "map: %m");
    nb_fork_close(fd);
    char *own_mapping = arena.base;
    for (int i = 0; i < WRITERS; i++) {
        writers[i] = (struct writer){.counters = (_Atomic uint64_t *)arena.base + i, .stop = &stop};
        CHECK(pthread_create(&threads[i], NULL, count_in_all_pages, &writers[i]) == 0, "thread");
    }
    peer_mapping[COUNTERS] = 1;
    peer_mapping[PAGE + COUNTERS] = 1;
    CHECK(!nb_arena_is_detached(arena.base, arena.bytes), "the arena is detached too early");
    CHECK(nb_arena_detach(own_mapping, PAGE / 2) == 0 && nb_arena_is_detached(own_mapping + PAGE, 1),
          "detach one page");
    peer_mapping[COUNTERS] = 2;
    CHECK(own_mapping[COUNTERS] == 1, "another process writes to detached memory: %d", own_mapping[COUNTERS]);
    CHECK(nb_arena_detach(own_mapping, arena.bytes) == 0, "detach all pages");
    peer_mapping[PAGE + COUNTERS] = 2;
    atomic_store(&stop, true);
    for (int i = 0; i < WRITERS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0, "join");
    }
    CHECK(own_mapping[PAGE + COUNTERS] == 1, "another process writes to detached memory: %d",
          own_mapping[PAGE + COUNTERS]);
    CHECK(nb_arena_pass(&arena) == -EBUSY && !nb_arena_is_detached(other.base, other.bytes), "pass");
    fd = nb_arena_pass(&other);
    CHECK(fd >= 0, "another arena cannot be passed: %d", fd);
    nb_fork_close(fd);
    int local = 0;
    CHECK(nb_arena_detach(&local, sizeof local) == 0, "detach memory that is not an arena");
    CHECK(munmap(peer_mapping, arena.bytes) == 0, "unmap: %m");
    nb_arena_close(&arena);
    nb_arena_close(&other);
}

int main(void) {
    for (int i = 0; i < ROUNDS; i++) {
        check_detached();
    }

    test_shared();
    test_private();
    test_signals();
    test_limits();
    return 0;
}
