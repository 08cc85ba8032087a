// A stream of bytes from one rank of a host to another, in memory that both have mapped. One writer, one reader.
#ifndef NB_SHM_PIPE_H
#define NB_SHM_PIPE_H

#include <stdalign.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { NB_SHM_PIPE_BYTES = 32 * 1024 };

struct nb_shm_pipe { // zeroed memory is an empty one
    alignas(64) _Atomic uint64_t written;
    _Atomic uint32_t blocked; // the writer has more than there is room for
    alignas(64) _Atomic uint64_t read;
    alignas(64) unsigned char bytes[NB_SHM_PIPE_BYTES];
};

// Writes what there is room for, and returns how much. Where that is not all, the reader has to tell when there is more
// room: nb_shm_pipe_read() says so.
size_t nb_shm_pipe_write(struct nb_shm_pipe *pipe, const void *data, size_t bytes);
// Reads what is there, `room` bytes at most, and returns how much; -EPROTO for what no writer does. *tell: the writer
// waits for room.
long nb_shm_pipe_read(struct nb_shm_pipe *pipe, void *data, size_t room, bool *tell);
bool nb_shm_pipe_is_empty(const struct nb_shm_pipe *pipe);

#endif
