// Devices of a rank, their pinned memory, and the memory, streams and fences of device operations.
#include "engine/device_memory.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/dtype.h"
#include "base/error.h"
#include "base/list.h"
#include "cuda/driver.h"
#include "cuda/kernels.h"
#include "cuda/staging.h"
#include "engine/communicator.h"
#include "engine/context.h"
#include "engine/descriptor.h"
#include "engine/device.h"
#include "engine/engine.h"
#include "engine/operation.h"

size_t nb_device_chunk_bytes(const struct nb_job *job) {
    return job->config.device_chunk_bytes > 0 ? job->config.device_chunk_bytes : (size_t)NB_STAGING_CHUNK_BYTES;
}

static int chunk_count(const struct nb_job *job) {
    return job->config.device_chunks > 0 ? job->config.device_chunks : (int)NB_STAGING_CHUNKS;
}

// ---- devices

static void device_free(struct nb_device *device) {
    const struct nb_cuda_driver *driver = device->cuda.driver;
    struct nb_error ignored = {0};
    unsigned mode = 0;
    nb_staging_close(device->staging);
    if (device->cuda.context != NULL && nb_cuda_enter_relaxed(&device->cuda, &mode, &ignored) == 0) {
        if (device->out != NULL) {
            (void)driver->stream_destroy(device->out);
        }
        if (device->back != NULL) {
            (void)driver->stream_destroy(device->back);
        }
        nb_cuda_leave_relaxed(&device->cuda, mode);
    }
    nb_cuda_device_close(&device->cuda);
    free(device);
}

void nb_devices_close(struct nb_job *job) {
    struct nb_device *device = atomic_load(&job->devices.opened);
    while (device != NULL) {
        struct nb_device *next = device->next;
        device_free(device);
        device = next;
    }
}

static int stream_create(const struct nb_cuda_device *cuda, int priority, struct CUstream_st **out,
                         struct nb_error *err) {
    unsigned result = cuda->driver->stream_create_with_priority(out, NB_CUDA_STREAM_NON_BLOCKING, priority);
    return nb_cuda_check(cuda, result, "cuStreamCreateWithPriority", 0, err);
}

// Of the greatest priority, so that copies and their kernels do not queue behind the backward pass.
static int streams_create(struct nb_device *device, struct nb_error *err) {
    const struct nb_cuda_device *cuda = &device->cuda;
    unsigned mode = 0;
    int least = 0;
    int greatest = 0;
    int rc = nb_cuda_enter_relaxed(cuda, &mode, err);
    if (rc < 0) {
        return rc;
    }
    rc =
        nb_cuda_check(cuda, cuda->driver->context_priorities(&least, &greatest), "cuCtxGetStreamPriorityRange", 0, err);
    rc = rc < 0 ? rc : stream_create(cuda, greatest, &device->out, err);
    rc = rc < 0 ? rc : stream_create(cuda, greatest, &device->back, err);
    nb_cuda_leave_relaxed(cuda, mode);
    return rc;
}

// Opens the pinned memory, and lets the lanes and the ranks of this host use it in place.
static int staging_open(struct nb_job *job, struct nb_device *device, struct nb_error *err) {
    int rc = streams_create(device, err);
    if (rc < 0) {
        return rc;
    }
    const void *image = job->config.cuda_image;
    const struct nb_staging_config config = {.chunk_bytes = nb_device_chunk_bytes(job),
                                             .chunks = chunk_count(job),
                                             .gather_bytes = job->config.device_gather_bytes,
                                             .image = image != NULL ? image : nb_cuda_image(),
                                             .out = device->out,
                                             .back = device->back};
    if ((rc = nb_staging_open(&device->staging, &device->cuda, &config, err)) < 0) {
        return rc;
    }
    char text[NB_ERROR_TEXT];
    const char *why = nb_staging_unpinned(device->staging);
    if (why != NULL) {
        snprintf(text, sizeof text, "staging memory cannot be pinned, so copies of device %d block (%.300s)",
                 device->cuda.ordinal, why);
        nb_job_notify(job, text);
    }
    why = nb_staging_ungathered(device->staging);
    if (why != NULL) {
        snprintf(text, sizeof text, "small tensors of device %d are copied one by one (%.300s)", device->cuda.ordinal,
                 why);
        nb_job_notify(job, text);
    }
    return nb_job_map_arena(job, nb_staging_memory(device->staging), err);
}

// 1: a stream of the operation is captured.
static int is_captured(const struct nb_device *device, const struct nb_op *op, struct nb_error *err) {
    int rc = 0;
    for (int i = 0; rc == 0 && i < op->stream_count; i++) {
        rc = nb_cuda_is_captured(&device->cuda, op->streams[i], err);
    }
    return rc;
}

// The same, before the device is open.
static int begins_captured(const struct nb_device *device, const struct nb_op *op, struct nb_error *err) {
    int rc = nb_cuda_enter(&device->cuda, err);
    if (rc == 0) {
        rc = is_captured(device, op, err);
        nb_cuda_leave(&device->cuda);
    }
    return rc;
}

// With the lock of the devices. 1: a stream of the operation is captured, and the device is not opened.
static int device_open(struct nb_job *job, const struct nb_op *op, struct nb_device **out, struct nb_error *err) {
    const int ordinal = op->device - 1;
    struct nb_devices *devices = &job->devices;
    int rc = devices->loaded ? 0 : nb_cuda_driver_open(&devices->driver, job->config.cuda_library, err);
    if (rc < 0) {
        return rc;
    }
    devices->loaded = true;
    struct nb_device *device = calloc(1, sizeof *device);
    if (device == NULL) {
        return nb_fail(err, -ENOMEM, "cannot allocate CUDA device %d", ordinal);
    }
    rc = nb_cuda_device_open(&device->cuda, &devices->driver, ordinal, err);
    rc = rc < 0 ? rc : begins_captured(device, op, err);
    if (rc == 0 && job->size > 1) {
        rc = staging_open(job, device, err);
    }
    if (rc != 0) {
        device_free(device);
        return rc;
    }
    device->next = atomic_load(&devices->opened);
    atomic_store(&devices->opened, device);
    *out = device;
    return 0;
}

static struct nb_device *device_find(const struct nb_job *job, int ordinal) {
    struct nb_device *device = atomic_load(&job->devices.opened);
    while (device != NULL && device->cuda.ordinal != ordinal) {
        device = device->next;
    }
    return device;
}

// 1: as device_open().
static int device_get(struct nb_job *job, const struct nb_op *op, struct nb_device **out, struct nb_error *err) {
    int rc = 0;
    *out = device_find(job, op->device - 1);
    if (*out == NULL) {
        pthread_mutex_lock(&job->devices.lock);
        *out = device_find(job, op->device - 1);
        rc = *out == NULL ? device_open(job, op, out, err) : 0;
        pthread_mutex_unlock(&job->devices.lock);
    }
    return rc;
}

static struct nb_error of_this_rank(const struct nb_job *job, const struct nb_error *failure) {
    struct nb_error why = {0};
    nb_fail_peer(&why, failure->code, job->rank, "rank %d: %s", job->rank, failure->text);
    return why;
}

void nb_device_fail(struct nb_job *job, const struct nb_error *failure) {
    const struct nb_error why = of_this_rank(job, failure);
    nb_job_fail(job, &why, true);
}

void nb_device_abort(struct nb_job *job, struct nb_error *failure) {
    *failure = of_this_rank(job, failure);
    nb_job_abort_for(job, failure);
}

// ---- operations

int nb_device_parts(int kind, int size) {
    int parts = kind == NB_OP_ALLGATHER || kind == NB_OP_REDUCESCATTER ? size : 1;
    return kind == NB_OP_ALLTOALL ? 2 * size : parts;
}

int nb_device_check(const struct nb_comm *comm, const struct nb_op *op, size_t bytes, struct nb_error *err) {
    struct nb_staging_cut cut;
    if (op->device == 0) {
        return 0;
    }
    if (op->device < 0 || op->kind == NB_OP_BARRIER || op->kind == NB_OP_JOIN) {
        return nb_fail(err, -EINVAL, "%s: a %s has no memory on device %d", op->name, nb_kind_name((int)op->kind),
                       op->device - 1);
    }
    if (op->stream_count < 1 || op->stream_count > NB_OP_STREAMS_MAX) {
        return nb_fail(err, -EINVAL, "%s: %d streams, not 1 to %d", op->name, op->stream_count, NB_OP_STREAMS_MAX);
    }
    for (int i = 0; i < op->stream_count; i++) {
        if (nb_cuda_is_per_thread(op->streams[i])) { // on the communication thread it would be that thread's stream
            return nb_fail(err, -EINVAL,
                           "gradient %s was made on the per-thread default stream, for which no other thread can wait: "
                           "use a stream of torch.cuda",
                           op->name);
        }
    }
    return nb_staging_cut(&cut, bytes, nb_device_parts((int)op->kind, comm->size), nb_dtype_size(op->dtype),
                          nb_device_chunk_bytes(comm->job), err);
}

uint64_t nb_device_windows(const struct nb_job *job, const struct op_descriptor *desc, int size, size_t *bytes) {
    struct nb_staging_cut cut = {0};
    *bytes = desc->bytes;
    if (desc->device == 0) {
        return 1;
    }
    int parts = nb_device_parts(desc->kind, size);
    int rc = nb_staging_cut(&cut, desc->bytes, parts, nb_dtype_size(desc->dtype), nb_device_chunk_bytes(job), NULL);
    *bytes = (size_t)parts * cut.slice_bytes;
    return rc == 0 && cut.chunks > 0 ? cut.chunks : 1;
}

// Records an event in each of the streams.
static int record_fences(struct nb_device_op *op, struct nb_error *err) {
    const struct nb_cuda_device *cuda = &op->device->cuda;
    const struct nb_cuda_driver *driver = cuda->driver;
    int rc = 0;
    op->fences_ours = true;
    for (int i = 0; rc == 0 && i < op->stream_count; i++) {
        struct CUevent_st *event = NULL;
        rc = nb_cuda_check(cuda, driver->event_create(&event, NB_CUDA_EVENT_DISABLE_TIMING), "cuEventCreate", 0, err);
        if (rc == 0) {
            op->fences[op->fence_count++] = event;
            rc = nb_cuda_record(cuda, event, op->streams[i], err);
        }
    }
    return rc;
}

struct nb_device_op *nb_device_op_make(struct nb_work *work, struct nb_error *err) {
    const size_t pieces = (size_t)work->piece_count;
    struct nb_device_op *op = calloc(1, sizeof *op + pieces * sizeof op->pieces[0]);
    if (op == NULL) {
        nb_fail(err, -ENOMEM, "%s: cannot allocate a device operation", work->desc.name);
        return NULL;
    }
    for (size_t i = 0; i < pieces; i++) {
        op->pieces[i] = (struct nb_staging_piece){(uintptr_t)work->pieces[i].base, work->pieces[i].bytes};
    }
    work->device = op;
    work->desc.device = 1;
    return op;
}

// 1: a stream is captured.
static int attach_streams(struct nb_device_op *made, const struct nb_op *op, struct nb_error *err) {
    int rc = nb_cuda_enter(&made->device->cuda, err);
    if (rc < 0) {
        return rc;
    }
    made->stream_count = op->stream_count;
    for (int i = 0; i < op->stream_count; i++) {
        made->streams[i] = op->streams[i];
    }
    rc = is_captured(made->device, op, err);
    if (rc == 0 && op->fence != NULL) {
        made->fences[made->fence_count++] = op->fence;
    } else if (rc == 0) {
        rc = record_fences(made, err);
    }
    nb_cuda_leave(&made->device->cuda);
    return rc;
}

int nb_device_attach(struct nb_work *work, const struct nb_op *op, struct nb_error *err) {
    if (op->device == 0) {
        return 0;
    }
    struct nb_device_op *made = nb_device_op_make(work, err);
    if (made == NULL) {
        return -ENOMEM;
    }
    struct nb_job *job = work->comm->job;
    struct nb_error failure = {0};
    int rc = device_get(job, op, &made->device, &failure);
    if (rc == NB_ENOLIB || rc == -ENODEV || rc == -EBUSY) {
        return nb_fail(err, rc, "%s", failure.text);
    }
    rc = rc != 0 ? rc : attach_streams(made, op, &failure);
    if (rc == 1) {
        return nb_fail(err, -EINVAL,
                       "gradient %s was made while its stream is captured into a CUDA graph: keep backward out of "
                       "the capture",
                       op->name);
    }
    if (rc < 0) { // the other ranks may have submitted it already
        nb_device_abort(job, &failure);
        rc = nb_fail_peer(err, rc, failure.peer, "%s", failure.text);
    }
    return rc;
}

static void fences_drop(struct nb_device_op *op, int from) {
    for (int i = from; op->fences_ours && i < op->fence_count; i++) {
        (void)op->device->cuda.driver->event_destroy(op->fences[i]);
    }
    op->fence_count = from;
}

// Streams with a fence that is not reached. Fences of one stream are reached in the order in which they were recorded.
struct behind {
    const struct CUstream_st *streams[NB_OP_STREAMS_MAX];
    int count;
};

static bool is_behind(const struct behind *behind, const struct CUstream_st *stream) {
    int i = 0;
    while (i < behind->count && behind->streams[i] != stream) {
        i++;
    }
    return i < behind->count;
}

// A fence of the caller may be of any stream.
static int fences_look(struct nb_device_op *op, struct behind *behind, struct nb_error *err) {
    int rc = 1;
    while (rc > 0 && op->fence_count > 0) {
        const int last = op->fence_count - 1;
        const struct CUstream_st *stream = op->streams[last];
        if (op->fences_ours && is_behind(behind, stream)) {
            return 0;
        }
        rc = nb_cuda_is_passed(&op->device->cuda, op->fences[last], err);
        if (rc > 0) {
            fences_drop(op, last);
        } else if (rc == 0 && op->fences_ours && behind->count < NB_OP_STREAMS_MAX) {
            behind->streams[behind->count++] = stream;
        }
    }
    return rc < 0 ? rc : 0;
}

int nb_device_look(const struct nb_device *device, struct nb_list *works, struct nb_error *err) {
    struct behind behind = {.count = 0};
    unsigned mode = 0;
    int rc = nb_cuda_enter_relaxed(&device->cuda, &mode, err);
    if (rc < 0) {
        return rc;
    }
    NB_LIST_EACH(it, works) {
        struct nb_device_op *op = NB_CONTAINER(it, struct nb_work, order)->device;
        if (rc == 0 && op != NULL && op->device == device) {
            rc = fences_look(op, &behind, err);
        }
    }
    nb_cuda_leave_relaxed(&device->cuda, mode);
    return rc;
}

bool nb_device_is_unready(const struct nb_work *work) {
    return work->device != NULL && work->device->fence_count > 0;
}

void nb_device_end(struct nb_work *work) {
    struct nb_device_op *op = work->device;
    struct nb_error ignored = {0};
    if (op == NULL || op->device == NULL) {
        return;
    }
    if (op->fence_count > 0 && nb_cuda_enter(&op->device->cuda, &ignored) == 0) {
        fences_drop(op, 0);
        nb_cuda_leave(&op->device->cuda);
    }
    if (op->transfers) {
        op->transfers = false;
        nb_staging_cancel(op->device->staging, &op->transfer);
    }
}

int nb_work_follow(const struct nb_work *work, struct CUstream_st *stream, struct nb_error *err) {
    const struct nb_device_op *op = work->device;
    for (int i = 0; op != NULL && i < op->stream_count; i++) {
        if (op->streams[i] == stream) {
            return 0;
        }
    }
    if (op == NULL || op->transfer.result == NULL) {
        return 0; // the memory holds the result
    }
    const struct nb_cuda_device *cuda = &op->device->cuda;
    int rc = nb_cuda_enter(cuda, err);
    if (rc < 0) {
        return rc;
    }
    rc = nb_cuda_is_captured(cuda, stream, err);
    if (rc > 0) { // a wait for work outside of the graph would end the capture
        rc = nb_fail(err, -EBUSY,
                     "gradient %s is waited for on a stream that is captured into a CUDA graph: wait for it before the "
                     "capture",
                     work->desc.name);
    } else if (rc == 0) {
        unsigned result = cuda->driver->stream_wait_event(stream, op->transfer.result, 0);
        rc = nb_cuda_check(cuda, result, "cuStreamWaitEvent", 0, err);
    }
    nb_cuda_leave(cuda);
    return rc;
}
