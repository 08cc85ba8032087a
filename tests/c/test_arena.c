// Gradient memory is aligned, zeroed and shareable, and is there even where no memfd is.
#include <errno.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include "base/arena.h"
#include "check.h"

static void check_memory(const struct nb_arena *arena, size_t asked) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    unsigned char *bytes = arena->base;
    CHECK((uintptr_t)arena->base % page == 0, "aligned to a page: %p", arena->base);
    CHECK(arena->bytes % page == 0 && arena->bytes >= asked && arena->bytes - asked <= page, "%zu for %zu",
          arena->bytes, asked);
    for (size_t i = 0; i < arena->bytes; i++) {
        CHECK(bytes[i] == 0, "byte %zu is %d", i, bytes[i]);
        bytes[i] = (unsigned char)i;
    }
}

static void test_shared(void) {
    struct nb_arena arena;
    CHECK(nb_arena_open(&arena, 100001, NULL) == 0, "open: %m");
    check_memory(&arena, 100001);
    CHECK(arena.fd >= 0, "a memfd");
    const unsigned char *second = mmap(NULL, arena.bytes, PROT_READ, MAP_SHARED, arena.fd, 0);
    CHECK(second != MAP_FAILED, "mmap: %m");
    ((unsigned char *)arena.base)[77777] = 200;
    CHECK(second[77777] == 200 && second[5] == 5, "a second mapping sees the same memory");
    CHECK(munmap((void *)second, arena.bytes) == 0, "munmap: %m");
    nb_arena_close(&arena);
    CHECK(arena.base == NULL && arena.fd == -1, "closed");
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
    CHECK(rc == 0 && arena.fd == -1 && arena.why == -EMFILE, "without a descriptor the memory is private: %d, %d", rc,
          arena.why);
    check_memory(&arena, 1);
    nb_arena_close(&arena);
}

static void test_limits(void) {
    static const size_t huge[] = {SIZE_MAX, (size_t)PTRDIFF_MAX, (size_t)1 << 60};
    struct nb_arena arena;
    CHECK(nb_arena_open(&arena, 0, NULL) == 0, "nothing is a page");
    check_memory(&arena, 0);
    nb_arena_close(&arena);
    for (size_t i = 0; i < sizeof huge / sizeof huge[0]; i++) {
        struct nb_error err = {0};
        CHECK(nb_arena_open(&arena, huge[i], &err) == -ENOMEM && err.text[0] != '\0', "%zu bytes: %d", huge[i],
              err.code);
    }
}

int main(void) {
    test_shared();
    test_private();
    test_limits();
    return 0;
}
