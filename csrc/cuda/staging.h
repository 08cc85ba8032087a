// Staging: moves device buffers through a bounded amount of pinned host memory, chunk by chunk, without blocking.
//
// A transfer takes a device buffer to the host and the result back:
//   1. nb_staging_start. The transfer waits for its fence, an event of the caller's stream after which the buffer holds
//      its values.
//   2. nb_staging_poll copies chunks to the host on the stream `out`, as far as there is memory.
//   3. nb_staging_take hands out a chunk that has arrived. Its memory now belongs to the user, who puts the result there.
//   4. nb_staging_return copies the result back on the stream `back`. The memory is used again after that copy.
//   5. After the last chunk the caller's stream waits on an event, and `done` is set: work that the caller submits to its
//      stream from now on sees the result. The host waits for nothing.
//
// The fence is polled. No stream waits for it: copies of other transfers behind such a wait would be held up, and the
// fence itself may come after one of them.
//
// Transfers get memory in the order in which they were started, and the chunks of one in the order of their offsets.
// Ranks that start the same transfers in the same order therefore never wait for each other in a circle.
//
// One thread at a time uses a staging. No function blocks, except nb_staging_close and a nb_staging_cancel after a
// failure, which wait for the two streams. The first failure of the driver sticks: every later call returns it.
#ifndef NB_CUDA_STAGING_H
#define NB_CUDA_STAGING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/list.h"
#include "cuda/driver.h"

struct nb_staging;

struct nb_staging_config {
    size_t chunk_bytes; // a multiple of the element size of every transfer
    int chunks;         // pinned memory: chunks * chunk_bytes
    struct CUstream_st *out;
    struct CUstream_st *back; // may be the same as `out`; two streams copy both ways at once
};

struct nb_staging_request {
    nb_cuda_address buffer;
    size_t bytes;
    struct CUevent_st *fence;   // recorded; stays until the transfer is done or cancelled
    struct CUstream_st *caller; // waits for the result
};

// In the user's memory, from nb_staging_start until it is done or cancelled. The user reads `done` only.
struct nb_staging_transfer {
    bool done;
    bool fenced;
    uint64_t number;
    struct nb_staging_request request;
    size_t granted_bytes; // have memory, or had it
    size_t returned_bytes;
    struct nb_list waiting; // in the staging's list until all bytes are granted
    struct nb_list arrived; // chunks
};

struct nb_staging_chunk {
    int index;
    size_t offset_bytes; // in the buffer
    size_t bytes;
    void *memory;
};

// `device` and the streams must outlive the staging.
int nb_staging_open(struct nb_staging **staging, const struct nb_cuda_device *device,
                    const struct nb_staging_config *config, struct nb_error *err);
// Waits until the copies under way are done.
void nb_staging_close(struct nb_staging *staging);

// Starts a transfer. One of 0 bytes is done at once. Errors: -EINVAL without a fence.
int nb_staging_start(struct nb_staging *staging, struct nb_staging_transfer *transfer,
                     const struct nb_staging_request *request, struct nb_error *err);

// Looks at fences and copies, and starts what can start. Returns how many copies were started or seen done.
int nb_staging_poll(struct nb_staging *staging, struct nb_error *err);

// Hands out an arrived chunk. Returns 1, or 0 if there is none now.
int nb_staging_take(struct nb_staging *staging, struct nb_staging_transfer *transfer, struct nb_staging_chunk *chunk,
                    struct nb_error *err);

// Takes a chunk back with its result. Chunks may be returned in any order. Errors: -EINVAL if it was not handed out.
int nb_staging_return(struct nb_staging *staging, struct nb_staging_transfer *transfer, int index,
                      struct nb_error *err);

// Ends a transfer that is not done; no effect on one that is done. Handed-out chunks must have no writer any more. The
// caller's stream waits for the copies that are under way, so the buffer may be freed in its order.
void nb_staging_cancel(struct nb_staging *staging, struct nb_staging_transfer *transfer);

#endif
