// Staging: moves device buffers through a bounded amount of pinned host memory, chunk by chunk, without blocking.
//
// A transfer takes parts of a device buffer to the host, and parts of the result back:
//   1. nb_staging_start. From now on the buffer holds its values.
//   2. nb_staging_poll gives memory to chunks, and copies their outgoing parts to the host on the stream `out`.
//   3. nb_staging_take hands out a chunk that has arrived. Its memory now belongs to the user, who puts the result there.
//   4. nb_staging_return copies the parts that go back on the stream `back`. The memory is used again after that copy.
//   5. After the last chunk the callers' streams wait on an event, and `done` is set: work that a caller submits to such
//      a stream from now on sees the result. The host waits for nothing.
//
// Small pieces of a chunk are copied by a kernel, all together, if the staging has kernels; others by the copy engine.
//
// A buffer consists of equal parts, one after the other. A chunk is a slice of every part, so it is a small buffer of the
// same shape: what an operation does to a whole buffer, it can do chunk by chunk.
//
// Transfers get memory in the order in which they were started, and the chunks of one in the order of their offsets.
// Ranks that start the same transfers in the same order therefore never wait for each other in a circle.
//
// One thread at a time uses a staging. No function blocks, except nb_staging_close and a nb_staging_cancel after a
// failure, which wait for the two streams, and copies of memory that could not be pinned. The first failure of the driver
// sticks: every later call returns it.
#ifndef NB_CUDA_STAGING_H
#define NB_CUDA_STAGING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/arena.h"
#include "base/error.h"
#include "base/list.h"
#include "cuda/driver.h"

enum { // the engine's pinned memory for a device, unless a job says otherwise
    NB_STAGING_CHUNK_BYTES = 4 * 1024 * 1024,
    NB_STAGING_CHUNKS = 16
};

struct nb_staging;

struct nb_staging_config {
    size_t chunk_bytes;
    int chunks;          // pinned memory: chunks * chunk_bytes
    size_t gather_bytes; // a chunk's parts of pieces of at most this size are copied by one kernel; 0: none
    const void *image;   // of the kernels; NULL: there are none
    struct CUstream_st *out;
    struct CUstream_st *back; // may be the same as `out`; two streams copy both ways at once
};

struct nb_staging_piece {
    nb_cuda_address base;
    size_t bytes;
};

// Some parts of a buffer: `count` of them from `first` on; part 0 follows the last one.
struct nb_staging_parts {
    int first;
    int count;
};

// How a buffer is cut into chunks.
struct nb_staging_cut {
    size_t part_bytes;
    size_t slice_bytes; // of a part in a chunk. The last chunk has the rest
    size_t chunks;
};

struct nb_staging_request {
    const struct nb_staging_piece *pieces; // the buffer; stays until the transfer is done or cancelled
    int piece_count;
    int parts;
    size_t element_bytes;
    struct nb_staging_parts out;        // copied to the host
    struct nb_staging_parts back;       // copied to the device
    struct CUstream_st *const *callers; // wait for the result; stay as long as the pieces
    int caller_count;
};

// In the user's memory, from nb_staging_start until it is done or cancelled. The user reads `done` and `result` only.
struct nb_staging_transfer {
    bool done;
    uint64_t number;
    struct nb_staging_request request;
    struct nb_staging_cut cut;
    size_t granted; // chunks that have memory, or had it
    size_t returned;
    struct CUevent_st *result; // of the staging: once done, a wait for it covers all copies back; NULL: there are none
    struct nb_list waiting;    // in the staging's list until all chunks are granted
    struct nb_list arrived;    // chunks
};

struct nb_staging_chunk {
    int index;
    size_t number;      // in the transfer
    size_t slice_bytes; // of each part. The slices are one after the other
    void *memory;
};

// Cuts a buffer of `parts` equal parts. Depends on nothing else, so all ranks cut alike. Errors: -EINVAL if a chunk has
// no room for an element of each part.
int nb_staging_cut(struct nb_staging_cut *cut, size_t bytes, int parts, size_t element_bytes, size_t chunk_bytes,
                   struct nb_error *err);

// `device` and the streams must outlive the staging. Errors: -EBUSY if a capture refuses a call: open it again later.
int nb_staging_open(struct nb_staging **staging, const struct nb_cuda_device *device,
                    const struct nb_staging_config *config, struct nb_error *err);
// Waits until the copies under way are done.
void nb_staging_close(struct nb_staging *staging);
// The memory of all chunks. A forked process does not have it if it is private.
const struct nb_arena *nb_staging_memory(const struct nb_staging *staging);
// Why the memory is not pinned, so that copies block; NULL: it is pinned.
const char *nb_staging_unpinned(const struct nb_staging *staging);
// Why the copy engine copies small pieces although `gather_bytes` is set; NULL: it does not.
const char *nb_staging_ungathered(const struct nb_staging *staging);
// True if nb_staging_poll has something to look at or to start.
bool nb_staging_polls(const struct nb_staging *staging);

// Starts a transfer. One of 0 bytes is done at once. Errors: those of nb_staging_cut().
int nb_staging_start(struct nb_staging *staging, struct nb_staging_transfer *transfer,
                     const struct nb_staging_request *request, struct nb_error *err);

// Looks at copies, and starts what can start. Returns how many copies were started or seen done.
int nb_staging_poll(struct nb_staging *staging, struct nb_error *err);

// Hands out an arrived chunk. Returns 1, or 0 if there is none now.
int nb_staging_take(struct nb_staging *staging, struct nb_staging_transfer *transfer, struct nb_staging_chunk *chunk,
                    struct nb_error *err);

// Takes a chunk back with its result. Chunks may be returned in any order. Errors: -EINVAL if it was not handed out,
// -EBUSY if a caller's stream is captured by now, so that it cannot wait.
int nb_staging_return(struct nb_staging *staging, struct nb_staging_transfer *transfer, int index,
                      struct nb_error *err);

// Ends a transfer that is not done; no effect on one that is done. Handed-out chunks must have no writer any more. The
// callers' streams wait for the copies that are under way, so the buffer may be freed in their order.
void nb_staging_cancel(struct nb_staging *staging, struct nb_staging_transfer *transfer);

#endif
