// Socket between the two processes of an NCCL test, over which they exchange handles.
#ifndef NB_TEST_PAIR_H
#define NB_TEST_PAIR_H

#include <stdbool.h>
#include <stddef.h>
#include <unistd.h>

enum { SOCKET = 3 }; // to the other process

static inline bool pair_send(const void *data, size_t bytes) {
    return write(SOCKET, data, bytes) == (ssize_t)bytes;
}

// Returns false if the other process has ended.
static inline bool pair_receive(void *data, size_t bytes) {
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
