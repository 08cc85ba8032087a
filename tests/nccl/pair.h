// The two processes of a connection, which exchange handles and bytes over a socket of their own.
#ifndef NB_TEST_PAIR_H
#define NB_TEST_PAIR_H

#include <stdbool.h>
#include <stddef.h>
#include <unistd.h>

enum { SOCKET = 3 }; // to the other process

static inline bool pair_give(const void *data, size_t bytes) {
    return write(SOCKET, data, bytes) == (ssize_t)bytes;
}

// Returns false if the other process has ended.
static inline bool pair_take(void *data, size_t bytes) {
    size_t got = 0;
    while (got < bytes) {
        ssize_t n = read(SOCKET, (char *)data + got, bytes - got);
        if (n <= 0) {
            return false;
        }
        got += (size_t)n;
    }
    return true;
}

#endif
