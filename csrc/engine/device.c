// Device operations: fences, windows and copies of operations on CUDA memory.
#include "engine/device.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/dtype.h"
#include "base/error.h"
#include "base/list.h"
#include "coll/choose.h"
#include "cuda/driver.h"
#include "cuda/staging.h"
#include "engine/algorithms.h"
#include "engine/buffer.h"
#include "engine/communicator.h"
#include "engine/context.h"
#include "engine/descriptor.h"
#include "engine/engine.h"
#include "engine/negotiation.h"
#include "engine/operation.h"
#include "engine/watchdog.h"

enum {
    CHUNK_BYTES = 4 * 1024 * 1024, // of pinned memory for a window
    CHUNKS = 16,                   // pinned memory of a device: CHUNKS * CHUNK_BYTES
    PAUSE_NS = 20 * 1000           // between two looks at fences and copies
};

struct device { // of this rank
    struct device *next;
    struct nb_cuda_device cuda;
    struct CUstream_st *out;
    struct CUstream_st *back;
    struct nb_staging *staging; // NULL in a job of one rank
};

struct nb_device_op {
    struct device *device; // NULL: zeros of a joined rank
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

struct window {
    int chunk; // of the staging
    size_t number;
    size_t slice_bytes;
    void *memory;
};

static size_t chunk_bytes(const struct nb_job *job) {
    return job->config.device_chunk_bytes > 0 ? job->config.device_chunk_bytes : (size_t)CHUNK_BYTES;
}

static int chunk_count(const struct nb_job *job) {
    return job->config.device_chunks > 0 ? job->config.device_chunks : (int)CHUNKS;
}

void nb_devices_init(struct nb_devices *devices) {
    pthread_mutex_init(&devices->lock, NULL);
    nb_list_init(&devices->unready);
    nb_list_init(&devices->order);
}

// ---- devices

static void device_free(struct device *device) {
    const struct nb_cuda_driver *driver = device->cuda.driver;
    struct nb_error ignored = {0};
    nb_staging_close(device->staging);
    if (device->cuda.context != NULL && nb_cuda_enter(&device->cuda, &ignored) == 0) {
        if (device->out != NULL) {
            (void)driver->stream_destroy(device->out);
        }
        if (device->back != NULL) {
            (void)driver->stream_destroy(device->back);
        }
        nb_cuda_leave(&device->cuda);
    }
    nb_cuda_device_close(&device->cuda);
    free(device);
}

void nb_devices_close(struct nb_job *job) {
    struct device *device = atomic_load(&job->devices.opened);
    while (device != NULL) {
        struct device *next = device->next;
        device_free(device);
        device = next;
    }
    pthread_mutex_destroy(&job->devices.lock);
}

static int streams_create(struct device *device, struct nb_error *err) {
    const struct nb_cuda_driver *driver = device->cuda.driver;
    int rc = nb_cuda_enter(&device->cuda, err);
    if (rc < 0) {
        return rc;
    }
    rc = nb_cuda_check(&device->cuda, driver->stream_create(&device->out, NB_CUDA_STREAM_NON_BLOCKING),
                       "cuStreamCreate", 0, err);
    if (rc == 0) {
        rc = nb_cuda_check(&device->cuda, driver->stream_create(&device->back, NB_CUDA_STREAM_NON_BLOCKING),
                           "cuStreamCreate", 0, err);
    }
    nb_cuda_leave(&device->cuda);
    return rc;
}

// Opens the pinned memory, and lets the lanes and the ranks of this host use it in place.
static int staging_open(struct nb_job *job, struct device *device, struct nb_error *err) {
    int rc = streams_create(device, err);
    if (rc < 0) {
        return rc;
    }
    const struct nb_staging_config config = {
        .chunk_bytes = chunk_bytes(job), .chunks = chunk_count(job), .out = device->out, .back = device->back};
    if ((rc = nb_staging_open(&device->staging, &device->cuda, &config, err)) < 0) {
        return rc;
    }
    const char *why = nb_staging_unpinned(device->staging);
    if (why != NULL) {
        char text[NB_ERROR_TEXT];
        snprintf(text, sizeof text, "staging memory cannot be pinned, so copies of device %d block (%.300s)",
                 device->cuda.ordinal, why);
        nb_job_notify(job, text);
    }
    return nb_job_map_arena(job, nb_staging_memory(device->staging), err);
}

// With the lock of the devices.
static int device_open(struct nb_job *job, int ordinal, struct device **out, struct nb_error *err) {
    struct nb_devices *devices = &job->devices;
    int rc = devices->loaded ? 0 : nb_cuda_driver_open(&devices->driver, job->config.cuda_library, err);
    if (rc < 0) {
        return rc;
    }
    devices->loaded = true;
    struct device *device = calloc(1, sizeof *device);
    if (device == NULL) {
        return nb_fail(err, -ENOMEM, "cannot allocate CUDA device %d", ordinal);
    }
    rc = nb_cuda_device_open(&device->cuda, &devices->driver, ordinal, err);
    if (rc == 0 && job->size > 1) {
        rc = staging_open(job, device, err);
    }
    if (rc < 0) {
        device_free(device);
        return rc;
    }
    device->next = atomic_load(&devices->opened);
    atomic_store(&devices->opened, device);
    *out = device;
    return 0;
}

static struct device *device_find(const struct nb_job *job, int ordinal) {
    struct device *device = atomic_load(&job->devices.opened);
    while (device != NULL && device->cuda.ordinal != ordinal) {
        device = device->next;
    }
    return device;
}

static int device_get(struct nb_job *job, int ordinal, struct device **out, struct nb_error *err) {
    int rc = 0;
    *out = device_find(job, ordinal);
    if (*out == NULL) {
        pthread_mutex_lock(&job->devices.lock);
        *out = device_find(job, ordinal);
        rc = *out == NULL ? device_open(job, ordinal, out, err) : 0;
        pthread_mutex_unlock(&job->devices.lock);
    }
    return rc;
}

// A failed call of the driver ends the job.
static void fail(struct nb_job *job, const struct nb_error *failure) {
    struct nb_error why = {0};
    nb_fail_peer(&why, failure->code, job->rank, "rank %d: %s", job->rank, failure->text);
    nb_job_fail(job, &why, true);
}

// ---- submission

static int parts_of(int kind, int size) {
    int parts = kind == NB_OP_ALLGATHER || kind == NB_OP_REDUCESCATTER ? size : 1;
    return kind == NB_OP_ALLTOALL ? 2 * size : parts;
}

int nb_device_check(const struct nb_comm *comm, const struct nb_op *op, struct nb_error *err) {
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
    return nb_staging_cut(&cut, nb_op_bytes(op), parts_of((int)op->kind, comm->size), nb_dtype_size(op->dtype),
                          chunk_bytes(comm->job), err);
}

uint64_t nb_device_windows(const struct nb_job *job, const struct op_descriptor *desc, int size, size_t *bytes) {
    struct nb_staging_cut cut = {0};
    *bytes = desc->bytes;
    if (desc->device == 0) {
        return 1;
    }
    int parts = parts_of(desc->kind, size);
    int rc = nb_staging_cut(&cut, desc->bytes, parts, nb_dtype_size(desc->dtype), chunk_bytes(job), NULL);
    *bytes = (size_t)parts * cut.slice_bytes;
    return rc == 0 && cut.chunks > 0 ? cut.chunks : 1;
}

// Refuses a stream that is captured into a graph: its work runs later, perhaps often, or never.
static int check_capture(const struct device *device, const struct nb_op *op, struct nb_error *err) {
    const struct nb_cuda_driver *driver = device->cuda.driver;
    for (int i = 0; i < op->stream_count; i++) {
        unsigned status = 0;
        unsigned result = driver->stream_is_capturing(op->streams[i], &status);
        if (status != 0 || result == NB_CUDA_CAPTURE_IMPLICIT) {
            return nb_fail(err, -EINVAL,
                           "gradient %s was made while its stream is captured into a CUDA graph: keep backward out of "
                           "the capture",
                           op->name);
        }
        int rc = nb_cuda_check(&device->cuda, result, "cuStreamIsCapturing", 0, err);
        if (rc < 0) {
            return rc;
        }
    }
    return 0;
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
            rc = nb_cuda_check(cuda, driver->event_record(event, op->streams[i]), "cuEventRecord", 0, err);
        }
    }
    return rc;
}

static struct nb_device_op *op_make(struct nb_work *work, struct nb_error *err) {
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

int nb_device_attach(struct nb_work *work, const struct nb_op *op, struct nb_error *err) {
    if (op->device == 0) {
        return 0;
    }
    struct nb_device_op *made = op_make(work, err);
    int rc = made != NULL ? device_get(work->comm->job, op->device - 1, &made->device, err) : -ENOMEM;
    if (rc < 0 || (rc = nb_cuda_enter(&made->device->cuda, err)) < 0) {
        return rc;
    }
    made->stream_count = op->stream_count;
    for (int i = 0; i < op->stream_count; i++) {
        made->streams[i] = op->streams[i];
    }
    rc = check_capture(made->device, op, err);
    if (rc == 0 && op->fence != NULL) {
        made->fences[made->fence_count++] = op->fence;
    } else if (rc == 0) {
        rc = record_fences(made, err);
    }
    nb_cuda_leave(&made->device->cuda);
    return rc;
}

int nb_device_attach_zeros(struct nb_work *work, struct nb_error *err) {
    int rc = op_make(work, err) != NULL ? nb_work_prepare(work, &nb_device, err) : -ENOMEM;
    return rc;
}

static void fences_drop(struct nb_device_op *op, int from) {
    for (int i = from; op->fences_ours && i < op->fence_count; i++) {
        (void)op->device->cuda.driver->event_destroy(op->fences[i]);
    }
    op->fence_count = from;
}

// 1: the memory holds its values; 0: not yet; negative: a failure of the driver.
static int fences_reached(struct nb_device_op *op, struct nb_error *err) {
    const struct nb_cuda_device *cuda = &op->device->cuda;
    int rc = nb_cuda_enter(cuda, err);
    if (rc < 0) {
        return rc;
    }
    while (rc == 0 && op->fence_count > 0) {
        struct CUevent_st *last = op->fences[op->fence_count - 1];
        rc = nb_cuda_check(cuda, cuda->driver->event_query(last), "cuEventQuery", 0, err);
        if (rc == 0) {
            fences_drop(op, op->fence_count - 1);
        }
    }
    nb_cuda_leave(cuda);
    return rc == -EAGAIN ? 0 : rc < 0 ? rc : 1;
}

bool nb_device_is_unready(const struct nb_work *work) {
    return work->device != NULL && work->device->fence_count > 0;
}

static bool submit_if_ready(struct nb_job *job, struct nb_work *work) {
    struct nb_error err = {0};
    int ready = fences_reached(work->device, &err);
    if (ready < 0) {
        fail(job, &err);
    } else if (ready > 0) {
        nb_list_remove(&work->order);
        nb_list_remove(&work->link);
        nb_negotiation_submit(job, work);
    }
    return ready > 0;
}

void nb_device_submit(struct nb_job *job, struct nb_work *work) {
    if (work->device == NULL) {
        nb_negotiation_submit(job, work);
    } else {
        nb_list_insert(&job->ops.waiting, &work->link);
        nb_list_insert(&job->devices.unready, &work->order);
        (void)submit_if_ready(job, work);
    }
}

// ---- windows

static void add_lanes(struct nb_flow *sum, const struct nb_flow *flow, int lanes) {
    for (int i = 0; i < lanes; i++) {
        sum->lane_bytes[i] += flow->lane_bytes[i];
    }
    bool first = flow->first_ns != 0 && (sum->first_ns == 0 || flow->first_ns < sum->first_ns);
    sum->first_ns = first ? flow->first_ns : sum->first_ns;
    sum->bytes_moved += flow->bytes_moved;
}

// Adds what a window has moved to the whole.
static void add_window(struct nb_work *work, struct nb_work *window) {
    const int lanes = work->comm->job->info.streams_open;
    for (int i = 0; i < window->flow_count; i += 2) {
        add_lanes(&work->in, nb_work_flow(window, i), lanes);
        add_lanes(&work->out, nb_work_flow(window, i + 1), lanes);
    }
    work->shared.staged = work->shared.staged || window->shared.staged;
    work->shared.bytes_in += window->shared.bytes_in;
    work->shared.bytes_out += window->shared.bytes_out;
}

static void window_over(struct nb_work *window) {
    struct nb_work *work = window->whole;
    struct nb_device_op *op = work->device;
    struct nb_job *job = work->comm->job;
    struct nb_error err = {0};
    const int chunk = window->chunk;
    add_window(work, window);
    nb_work_discard(window);
    int rc = op->device != NULL ? nb_staging_return(op->device->staging, &op->transfer, chunk, &err) : 0;
    if (rc < 0) {
        fail(job, &err);
    } else if (++op->over == op->cut.chunks) {
        nb_work_finish(work, NULL);
    }
}

// Makes the operation of a window of `bytes` at `memory`.
static int window_make(struct nb_work *work, void *memory, size_t bytes, struct nb_work **out, struct nb_error *err) {
    const struct op_descriptor *desc = &work->desc;
    const struct nb_segment segment = {.base = memory, .bytes = bytes};
    const struct nb_op op = {.name = desc->name,
                             .key = desc->key,
                             .kind = (enum nb_op_kind)desc->kind,
                             .dtype = desc->dtype,
                             .redop = desc->redop,
                             .root = desc->root,
                             .priority = desc->priority,
                             .prescale = desc->prescale,
                             .postscale = desc->postscale,
                             .segments = &segment,
                             .segment_count = 1};
    int rc = nb_work_make(work->comm, &op, work->device->algorithm, out, err);
    if (rc == 0) {
        struct nb_work *window = *out;
        window->refs = 1; // nobody waits for it
        window->ring = NULL;
        window->whole = work;
        window->on_flows_done = window_over;
    }
    return rc;
}

// Starts a window. The whole work may be over when this returns.
static void window_start(struct nb_work *work, const struct window *at) {
    struct nb_job *job = work->comm->job;
    struct nb_work *window = NULL;
    struct nb_error why = {0};
    const size_t parts = (size_t)parts_of(work->desc.kind, work->comm->size);
    if (window_make(work, at->memory, parts * at->slice_bytes, &window, &why) < 0) {
        nb_job_fail(job, &why, true);
        return;
    }
    window->chunk = at->chunk;
    nb_work_start(window, work->seq + at->number);
}

// Takes the next window that has arrived: 1; 0: none now; negative: a failure.
static int window_take(struct nb_work *work, struct window *out, struct nb_error *err) {
    struct nb_device_op *op = work->device;
    if (op->device != NULL) {
        struct nb_staging_chunk chunk;
        int rc = nb_staging_take(op->device->staging, &op->transfer, &chunk, err);
        if (rc > 0) {
            *out = (struct window){chunk.index, chunk.number, chunk.slice_bytes, chunk.memory};
        }
        return rc;
    }
    const size_t offset = op->started * op->cut.slice_bytes; // zeros are of one part
    const size_t left = op->cut.part_bytes - offset;
    *out = (struct window){.number = op->started,
                           .slice_bytes = left < op->cut.slice_bytes ? left : op->cut.slice_bytes,
                           .memory = (char *)work->zeros + offset};
    return 1;
}

// Starts the windows of a work that have arrived. True if all have started: the work may be over.
static bool windows_start(struct nb_work *work, int *moved) {
    struct nb_job *job = work->comm->job;
    struct nb_device_op *op = work->device;
    const size_t count = op->cut.chunks;
    size_t started = op->started;
    while (started < count && !job->failed) {
        struct window window;
        struct nb_error err = {0};
        int rc = window_take(work, &window, &err);
        if (rc < 0) {
            fail(job, &err);
        }
        if (rc <= 0) {
            return false;
        }
        started = ++op->started;
        if (started == count) {
            nb_list_remove(&work->order);
        }
        window_start(work, &window);
        ++*moved;
    }
    return started == count;
}

// Starts what may start, in the agreed order. Returns how much has started.
static int start_next(struct nb_job *job) {
    int moved = 0;
    while (!job->failed && !nb_list_empty(&job->devices.order)) {
        struct nb_work *work = NB_CONTAINER(job->devices.order.next, struct nb_work, order);
        if (work->device == NULL) {
            nb_list_remove(&work->order);
            nb_work_start(work, work->seq);
            moved++;
        } else if (!windows_start(work, &moved)) {
            break;
        }
    }
    return moved;
}

int nb_device_prepare(struct nb_work *work, const struct nb_algorithm *algorithm, struct nb_error *err) {
    if (work->device == NULL) {
        int rc = nb_work_prepare(work, algorithm, err);
        return rc < 0 ? rc : nb_work_peers(work, err);
    }
    struct nb_work *window = NULL;
    size_t bytes;
    work->device->algorithm = algorithm;
    (void)nb_device_windows(work->comm->job, &work->desc, work->comm->size, &bytes);
    int rc = window_make(work, NULL, bytes, &window, err); // the largest one has the peers of all
    if (rc == 0) {
        rc = nb_work_peers(window, err);
        nb_work_discard(window);
    }
    return rc;
}

void nb_device_start(struct nb_work *work, uint64_t seq) {
    struct nb_job *job = work->comm->job;
    if (work->device != NULL || nb_list_empty(&job->devices.order)) {
        nb_work_start(work, seq);
        return;
    }
    work->seq = seq;
    nb_list_remove(&work->link);
    nb_list_insert(&job->ops.running, &work->link);
    nb_list_insert(&job->devices.order, &work->order);
}

int nb_device_progress(struct nb_job *job) {
    struct nb_devices *devices = &job->devices;
    int moved = 0;
    for (struct device *it = atomic_load(&devices->opened); it != NULL && !job->failed; it = it->next) {
        struct nb_error err = {0};
        int rc = it->staging != NULL && nb_staging_polls(it->staging) ? nb_staging_poll(it->staging, &err) : 0;
        if (rc < 0) {
            fail(job, &err);
        }
        moved += rc > 0 ? rc : 0;
    }
    bool submitted = false;
    NB_LIST_EACH_SAFE(it, nx, &devices->unready) {
        submitted = (!job->failed && submit_if_ready(job, NB_CONTAINER(it, struct nb_work, order))) || submitted;
    }
    if (submitted) {
        nb_watchdog_check(job);
    }
    return moved + submitted + start_next(job);
}

bool nb_device_polls(struct nb_job *job) {
    bool polls = !nb_list_empty(&job->devices.unready);
    for (struct device *it = atomic_load(&job->devices.opened); it != NULL; it = it->next) {
        polls = polls || (it->staging != NULL && nb_staging_polls(it->staging));
    }
    if (!polls || job->failed) {
        return false;
    }
    const struct timespec pause = {.tv_nsec = PAUSE_NS};
    (void)nanosleep(&pause, NULL);
    return true;
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
    if (op == NULL || op->stream_count == 0) {
        return 0;
    }
    const struct nb_cuda_device *cuda = &op->device->cuda;
    struct CUevent_st *event = NULL;
    int rc = nb_cuda_enter(cuda, err);
    if (rc < 0) {
        return rc;
    }
    unsigned result = cuda->driver->event_create(&event, NB_CUDA_EVENT_DISABLE_TIMING);
    rc = nb_cuda_check(cuda, result, "cuEventCreate", 0, err);
    if (rc == 0) {
        result = cuda->driver->event_record(event, op->streams[0]);
        rc = nb_cuda_check(cuda, result, "cuEventRecord", 0, err);
        result = rc == 0 ? cuda->driver->stream_wait_event(stream, event, 0) : result;
        rc = rc < 0 ? rc : nb_cuda_check(cuda, result, "cuStreamWaitEvent", 0, err);
        (void)cuda->driver->event_destroy(event); // the stream still waits for it
    }
    nb_cuda_leave(cuda);
    return rc;
}

// ---- a communicator of one rank

static bool changes(const struct op_descriptor *desc) {
    bool scales = desc->kind == NB_OP_ALLREDUCE || desc->kind == NB_OP_REDUCESCATTER;
    return desc->kind == NB_OP_ALLTOALL || (scales && (desc->prescale != 1 || desc->postscale != 1));
}

// Copies the buffer to host memory or back, and waits for it.
static int alone_copy(struct nb_device_op *op, int pieces, char *memory, bool out, struct nb_error *err) {
    const struct nb_cuda_device *cuda = &op->device->cuda;
    const struct nb_cuda_driver *driver = cuda->driver;
    struct CUstream_st *stream = op->streams[0];
    int rc = 0;
    for (int i = 0; rc == 0 && i < pieces; i++) {
        const struct nb_staging_piece *piece = &op->pieces[i];
        unsigned result = out ? driver->copy_to_host(memory, piece->base, piece->bytes, stream)
                              : driver->copy_to_device(piece->base, memory, piece->bytes, stream);
        rc = nb_cuda_check(cuda, result, out ? "cuMemcpyDtoHAsync" : "cuMemcpyHtoDAsync", piece->bytes, err);
        memory += piece->bytes;
    }
    return rc < 0 ? rc : nb_cuda_check(cuda, driver->stream_synchronize(stream), "cuStreamSynchronize", 0, err);
}

// Runs an operation of one rank in host memory. Only this waits for a stream: there is nothing to do meanwhile.
static int alone_run(struct nb_work *work, struct nb_error *err) {
    struct nb_device_op *op = work->device;
    struct nb_work *window = NULL;
    const size_t bytes = nb_buffer_all(work).bytes;
    char *memory = malloc(bytes);
    if (memory == NULL) {
        return nb_fail(err, -ENOMEM, "%s: cannot allocate %zu bytes", work->desc.name, bytes);
    }
    op->algorithm = &nb_alone;
    int rc = nb_cuda_enter(&op->device->cuda, err);
    if (rc == 0) {
        for (int i = 1; rc == 0 && i < op->stream_count; i++) {
            unsigned result = op->device->cuda.driver->stream_synchronize(op->streams[i]);
            rc = nb_cuda_check(&op->device->cuda, result, "cuStreamSynchronize", 0, err);
        }
        rc = rc < 0 ? rc : alone_copy(op, work->piece_count, memory, true, err);
        rc = rc < 0 ? rc : window_make(work, memory, bytes, &window, err);
        if (rc == 0) {
            window->on_flows_done = nb_work_discard;
            nb_work_alone(window);
            rc = alone_copy(op, work->piece_count, memory, false, err);
        }
        nb_cuda_leave(&op->device->cuda);
    }
    free(memory);
    return rc;
}

static void alone_start(struct nb_work *work) {
    struct nb_error why = {0};
    bool runs = changes(&work->desc) && work->desc.bytes > 0;
    bool failed = runs && alone_run(work, &why) < 0;
    nb_work_finish(work, failed ? &why : NULL);
}

// ---- the table

// What travels, as this rank sees it.
static struct nb_staging_request request_of(const struct nb_work *work) {
    const struct nb_device_op *op = work->device;
    const int size = work->comm->size;
    const int rank = work->comm->rank;
    const bool root = work->desc.root == rank;
    struct nb_staging_request request = {.pieces = op->pieces,
                                         .piece_count = work->piece_count,
                                         .parts = parts_of(work->desc.kind, size),
                                         .element_bytes = work->element_bytes,
                                         .out = {0, 1},
                                         .back = {0, 1},
                                         .callers = op->streams,
                                         .caller_count = op->stream_count};
    switch (work->desc.kind) {
    case NB_OP_BROADCAST:
        request.out.count = root;
        request.back.count = !root;
        break;
    case NB_OP_ALLGATHER:
        request.out = (struct nb_staging_parts){rank, 1};
        request.back = (struct nb_staging_parts){rank + 1, size - 1};
        break;
    case NB_OP_REDUCESCATTER:
        request.out.count = size;
        request.back.first = rank;
        break;
    case NB_OP_ALLTOALL:
        request.out.count = size;
        request.back = (struct nb_staging_parts){size, size};
        break;
    default:
        break;
    }
    return request;
}

static int begin(struct nb_work *work, struct nb_error *err) {
    struct nb_device_op *op = work->device;
    const struct nb_staging_request request = request_of(work);
    int rc = nb_staging_cut(&op->cut, work->desc.bytes, request.parts, request.element_bytes,
                            chunk_bytes(work->comm->job), err);
    if (rc == 0 && op->device != NULL) {
        rc = nb_staging_start(op->device->staging, &op->transfer, &request, err);
        op->transfers = rc == 0;
    }
    return rc;
}

static void start(struct nb_work *work, int64_t now_ns) {
    struct nb_job *job = work->comm->job;
    struct nb_error err = {0};
    (void)now_ns;
    if (work->comm->size == 1) {
        alone_start(work);
        return;
    }
    nb_work_set_running(work);
    if (begin(work, &err) < 0) {
        fail(job, &err);
    } else if (work->device->cut.chunks == 0) {
        nb_work_finish(work, NULL);
    } else {
        nb_list_insert(&job->devices.order, &work->order);
        (void)start_next(job);
    }
}

static int prepare(struct nb_work *work, struct nb_error *err) {
    (void)err;
    work->in = (struct nb_flow){.dir = NB_FLOW_IN};
    work->out = (struct nb_flow){.dir = NB_FLOW_OUT};
    work->flow_count = 2; // for the trace: sums over the windows
    work->block_bytes = 0;
    return 0;
}

static void release(struct nb_work *work) {
    free(work->device);
    work->device = NULL;
}

static bool is_possible(const struct nb_work *work) {
    (void)work;
    return false; // ranks agree on the algorithm of the windows
}

static bool waits_for(struct nb_work *work, int peer, int64_t *moved_ns) {
    (void)work;
    (void)peer;
    (void)moved_ns;
    return false; // its windows do
}

static enum nb_algorithm_id record(struct nb_work *work, uint64_t *sent, uint64_t *received) {
    const struct nb_algorithm *algorithm = work->device->algorithm;
    if (algorithm == NULL) {
        return NB_ALGORITHM_NONE;
    }
    enum nb_algorithm_id id = algorithm->record(work, sent, received);
    return id == nb_device.id ? algorithm->id : id;
}

const struct nb_algorithm nb_device = {.id = NB_ALGORITHM_NONE,
                                       .possible = is_possible,
                                       .prepare = prepare,
                                       .release = release,
                                       .start = start,
                                       .cancel = nb_device_end,
                                       .waits_for = waits_for,
                                       .record = record};
