// Assertions of C tests: CHECK(condition, "observed: %d", x) and SKIP("what is missing"). Usable in any thread.
#ifndef NB_TEST_CHECK_H
#define NB_TEST_CHECK_H

#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

enum { CHECK_FAILED = 1, CHECK_SKIPPED = 77 };

__attribute__((noreturn, format(printf, 4, 5), unused)) static void check_end(int status, const char *where,
                                                                              const char *what, const char *fmt, ...) {
    char text[1024];
    va_list args;
    va_start(args, fmt);
    (void)vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    (void)fflush(stdout);
    (void)fprintf(stderr, "%s: %s: %s\n", where, what, text);
    (void)fflush(stderr);
    _exit(status);
}

#define CHECK_STRING2(x) #x
#define CHECK_STRING(x) CHECK_STRING2(x)
#define CHECK_WHERE __FILE__ ":" CHECK_STRING(__LINE__)

#define CHECK(cond, ...)                                                                                               \
    do {                                                                                                               \
        if (!(cond)) {                                                                                                 \
            check_end(CHECK_FAILED, CHECK_WHERE, "failed: " #cond, __VA_ARGS__);                                       \
        }                                                                                                              \
    } while (0)

// A function that makes expected values in memory of its own thread, which are written with memcpy and compared with memcmp
// then: of those, TSan checks whole ranges, and not each byte.
#define NO_TSAN __attribute__((no_sanitize("thread")))

#define SKIP(...) check_end(CHECK_SKIPPED, CHECK_WHERE, "skipped", __VA_ARGS__)

#endif
