// Windows of device operations: an algorithm runs on each, in host memory.
#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "base/error.h"
#include "base/list.h"
#include "coll/choose.h"
#include "cuda/driver.h"
#include "cuda/staging.h"
#include "engine/algorithms.h"
#include "engine/buffer.h"
#include "engine/communicator.h"
#include "engine/context.h"
#include "engine/control.h"
#include "engine/device.h"
#include "engine/device_memory.h"
#include "engine/engine.h"
#include "engine/operation.h"
#include "transport/lanes.h"

struct window {
    int chunk; // of the staging
    size_t number;
    size_t slice_bytes;
    void *memory;
};

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
    if (rc == -EBUSY) {
        err = (struct nb_error){0};
        nb_fail(&err, rc,
                "gradient %s was under way when its stream began to be captured into a CUDA graph: wait for it before "
                "the capture",
                work->desc.name);
    }
    if (rc < 0) {
        nb_device_fail(job, &err);
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
                             .scaled = true,
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
    const size_t parts = (size_t)nb_device_parts(work->desc.kind, work->comm->size);
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
            nb_device_fail(job, &err);
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

void nb_device_announce(struct nb_job *job) {
    if (!job->devices.announced) {
        job->devices.announced = true;
        nb_control_broadcast(job, CTL_DEVICE, NULL, 0);
        nb_lanes_await_starts(job->lanes);
    }
}

int nb_device_start_next(struct nb_job *job) {
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

int nb_device_attach_zeros(struct nb_work *work, struct nb_error *err) {
    int rc = nb_device_op_make(work, err) != NULL ? nb_work_prepare(work, &nb_device, err) : -ENOMEM;
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
    unsigned mode = 0;
    int rc = nb_cuda_enter_relaxed(&op->device->cuda, &mode, err); // another thread may capture a graph
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
        nb_cuda_leave_relaxed(&op->device->cuda, mode);
    }
    free(memory);
    return rc;
}

static void alone_start(struct nb_work *work) {
    struct nb_error why = {0};
    bool runs = changes(&work->desc) && work->desc.bytes > 0;
    if (runs && alone_run(work, &why) < 0) {
        nb_device_abort(work->comm->job, &why);
        nb_work_finish(work, &why);
        return;
    }
    nb_work_finish(work, NULL);
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
                                         .parts = nb_device_parts(work->desc.kind, size),
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
                            nb_device_chunk_bytes(work->comm->job), err);
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
        nb_device_fail(job, &err);
    } else if (work->device->cut.chunks == 0) {
        nb_work_finish(work, NULL);
    } else {
        nb_list_insert(&job->devices.order, &work->order);
        (void)nb_device_start_next(job);
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
