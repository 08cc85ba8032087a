// Shared memory pipe: a byte stream between two ranks of a host, in memory that both have mapped. One writer, one
// reader.
#ifndef NB_SHM_PIPE_H
#define NB_SHM_PIPE_H

#include <stdalign.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { NB_SHM_PIPE_BYTES = 32 * 1024 };

struct nb_shm_pipe { // zeroed memory is an empty pipe
    alignas(64) _Atomic uint64_t written;
    _Atomic uint32_t blocked; // the writer waits for room
    alignas(64) _Atomic uint64_t read;
    alignas(64) unsigned char bytes[NB_SHM_PIPE_BYTES];
};

// Writes as much as there is room for, and returns how much. If that is not all, the reader must notify the writer when
// there is more room (see nb_shm_pipe_read).
size_t nb_shm_pipe_write(struct nb_shm_pipe *pipe, const void *data, size_t bytes);
// Reads up to `room` bytes, and returns how many; -EPROTO for an impossible state. *writer_waits: the writer waits for
// room and must be notified.
long nb_shm_pipe_read(struct nb_shm_pipe *pipe, void *data, size_t room, bool *writer_waits);
bool nb_shm_pipe_is_empty(const struct nb_shm_pipe *pipe);

#endif
