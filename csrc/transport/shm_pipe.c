// Shared memory pipe: two counters and a ring of bytes.
#include "transport/shm_pipe.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static size_t least(size_t a, size_t b) {
    return a < b ? a : b;
}

size_t nb_shm_pipe_write(struct nb_shm_pipe *pipe, const void *data, size_t bytes) {
    uint64_t written = atomic_load_explicit(&pipe->written, memory_order_relaxed);
    uint64_t used = written - atomic_load_explicit(&pipe->read, memory_order_acquire);
    if (used > NB_SHM_PIPE_BYTES) {
        return 0; // the reader is broken; its silence will be noticed
    }
    size_t room = NB_SHM_PIPE_BYTES - used;
    if (bytes > room) {
        atomic_store(&pipe->blocked, 1); // before the second check: a reader that makes room now sees it
        room = NB_SHM_PIPE_BYTES - (written - atomic_load(&pipe->read));
    }
    size_t take = least(bytes, least(room, NB_SHM_PIPE_BYTES));
    size_t at = written % NB_SHM_PIPE_BYTES;
    size_t straight = least(take, NB_SHM_PIPE_BYTES - at);
    memcpy(pipe->bytes + at, data, straight);
    memcpy(pipe->bytes, (const char *)data + straight, take - straight);
    atomic_store_explicit(&pipe->written, written + take, memory_order_release);
    return take;
}

long nb_shm_pipe_read(struct nb_shm_pipe *pipe, void *data, size_t room, bool *writer_waits) {
    uint64_t read = atomic_load_explicit(&pipe->read, memory_order_relaxed);
    uint64_t there = atomic_load_explicit(&pipe->written, memory_order_acquire) - read;
    *writer_waits = false;
    if (there > NB_SHM_PIPE_BYTES) {
        return -EPROTO;
    }
    size_t take = least(there, room);
    size_t at = read % NB_SHM_PIPE_BYTES;
    size_t straight = least(take, NB_SHM_PIPE_BYTES - at);
    memcpy(data, pipe->bytes + at, straight);
    memcpy((char *)data + straight, pipe->bytes, take - straight);
    atomic_store(&pipe->read, read + take);
    *writer_waits = take > 0 && atomic_load(&pipe->blocked) != 0 && atomic_exchange(&pipe->blocked, 0) != 0;
    return (long)take;
}

bool nb_shm_pipe_is_empty(const struct nb_shm_pipe *pipe) {
    return atomic_load_explicit(&pipe->written, memory_order_acquire) ==
           atomic_load_explicit(&pipe->read, memory_order_relaxed);
}
