// Memory of device operations: what device_windows.c and device_progress.c use of device_memory.c.
#ifndef NB_ENGINE_DEVICE_MEMORY_H
#define NB_ENGINE_DEVICE_MEMORY_H

#include <stdbool.h>
#include <stddef.h>

#include "base/error.h"
#include "base/list.h"
#include "cuda/driver.h"
#include "cuda/staging.h"
#include "engine/engine.h"

struct nb_algorithm;
struct nb_job;
struct nb_work;

struct nb_device { // of this rank
    struct nb_device *next;
    struct nb_cuda_device cuda;
    struct CUstream_st *out;
    struct CUstream_st *back;
    struct nb_staging *staging; // NULL in a job of one rank
};

struct nb_device_op {
    struct nb_device *device; // NULL: zeros of a joined rank
    struct CUstream_st *streams[NB_OP_STREAMS_MAX];
    int stream_count;
    struct CUevent_st *fences[NB_OP_STREAMS_MAX]; // not reached yet
    int fence_count;
    bool fences_ours;
    const struct nb_algorithm *algorithm; // of the windows
    struct nb_staging_cut cut;
    size_t started; // windows
    size_t over;
    struct nb_staging_transfer transfer;
    bool transfers; // started, and not ended
    struct nb_staging_piece pieces[];
};

// Pinned memory of a window, in bytes.
size_t nb_device_chunk_bytes(const struct nb_job *job);
// The number of parts of the buffer of an operation of this kind.
int nb_device_parts(int kind, int size);
// Gives a work its device operation, on no device. NULL: out of memory.
struct nb_device_op *nb_device_op_make(struct nb_work *work, struct nb_error *err);
// Drops the reached fences of those works that are on the device. `works`: by `order`, as they were submitted.
int nb_device_look(const struct nb_device *device, struct nb_list *works, struct nb_error *err);
// A failed call of the driver ends the job.
void nb_device_fail(struct nb_job *job, const struct nb_error *failure);
// The same from any thread. Adds this rank to the failure.
void nb_device_abort(struct nb_job *job, struct nb_error *failure);

#endif
