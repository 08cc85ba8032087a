// GPUs of the fake driver, for ranks that are threads: device buffers, operations on them, and the expected results.
#ifndef NB_TEST_GPU_H
#define NB_TEST_GPU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../cuda/fake.h"
#include "base/dtype.h"
#include "base/error.h"
#include "check.h"
#include "cuda/driver.h"
#include "engine/engine.h"
#include "job.h"
#include "sums.h"

enum { CHUNK = 4096, CHUNKS = 4, PIECES = 3 };

static const struct fake_controls *fake;

// A rank's GPU. The ranks are spread over the fake driver's devices.
struct gpu {
    struct nb_cuda_driver driver;
    struct nb_cuda_device device;
    struct CUstream_st *stream;
};

static inline void check_success(unsigned result, const char *what) {
    CHECK(result == NB_CUDA_SUCCESS, "%s: %u", what, result);
}

static inline void gpu_open(struct gpu *gpu, const struct test_rank *me) {
    struct nb_error err = {0};
    CHECK(nb_cuda_driver_open(&gpu->driver, fake_path(), &err) == 0, "%s", err.text);
    CHECK(nb_cuda_device_open(&gpu->device, &gpu->driver, me->rank % FAKE_DEVICES, &err) == 0, "%s", err.text);
    CHECK(nb_cuda_enter(&gpu->device, &err) == 0, "%s", err.text);
    check_success(gpu->driver.stream_create(&gpu->stream, NB_CUDA_STREAM_NON_BLOCKING), "cuStreamCreate");
}

static inline void gpu_close(struct gpu *gpu) {
    check_success(gpu->driver.stream_destroy(gpu->stream), "cuStreamDestroy");
    nb_cuda_leave(&gpu->device);
    nb_cuda_device_close(&gpu->device);
}

// A buffer in pieces of device memory, with host memory to fill it from and read it into.
struct buffer {
    size_t bytes;
    unsigned char *host;
    struct nb_segment pieces[PIECES];
    int count;
};

static inline void buffer_open(struct gpu *gpu, struct buffer *buffer, size_t bytes, size_t element, int pieces) {
    size_t each = bytes / element / (size_t)pieces * element;
    *buffer = (struct buffer){.bytes = bytes, .host = malloc(bytes)};
    CHECK(buffer->host != NULL, "memory");
    check_success(gpu->driver.host_register(buffer->host, bytes, 0), "cuMemHostRegister");
    for (int i = 0; i < pieces; i++) {
        size_t take = i == pieces - 1 ? bytes - (size_t)i * each : each;
        nb_cuda_address address = 0;
        if (take > 0) {
            check_success(gpu->driver.mem_alloc(&address, take), "cuMemAlloc");
            buffer->pieces[buffer->count++] = (struct nb_segment){(void *)(uintptr_t)address, take};
        }
    }
}

static inline void buffer_close(struct gpu *gpu, struct buffer *buffer) {
    check_success(gpu->driver.stream_synchronize(gpu->stream), "cuStreamSynchronize");
    check_success(gpu->driver.host_unregister(buffer->host), "cuMemHostUnregister");
    for (int i = 0; i < buffer->count; i++) {
        check_success(gpu->driver.mem_free((uintptr_t)buffer->pieces[i].base), "cuMemFree");
    }
    free(buffer->host);
}

// Copies on the rank's stream, in stream order.
static inline void buffer_copy(struct gpu *gpu, const struct buffer *buffer, bool out) {
    size_t at = 0;
    for (int i = 0; i < buffer->count; i++) {
        const struct nb_segment *piece = &buffer->pieces[i];
        const nb_cuda_address address = (uintptr_t)piece->base;
        unsigned result = out ? gpu->driver.copy_to_host(buffer->host + at, address, piece->bytes, gpu->stream)
                              : gpu->driver.copy_to_device(address, buffer->host + at, piece->bytes, gpu->stream);
        check_success(result, "copy");
        at += piece->bytes;
    }
}

static inline struct nb_op on_device(const struct gpu *gpu, const struct buffer *buffer, struct nb_op op) {
    op.segments = buffer->pieces;
    op.segment_count = buffer->count;
    op.device = gpu->device.ordinal + 1;
    op.streams = &gpu->stream;
    op.stream_count = 1;
    return op;
}

// Expected element i after the operation; -1: not checked.
static inline double result_of(const struct test_rank *me, const struct nb_op *op, size_t i, size_t count) {
    const size_t each = count / (2 * (size_t)me->size);
    if (op->kind != NB_OP_ALLTOALL) {
        return expected_value(me, op, i, count);
    }
    return i < count / 2 ? input_value(me->rank, i)
                         : input_value((int)(i / each) - me->size, (size_t)me->rank * each + i % each);
}

static inline void check_result(const struct test_rank *me, const struct nb_op *op, const unsigned char *host,
                                size_t count) {
    for (size_t i = 0; i < count; i++) {
        double want = result_of(me, op, i, count);
        double got = element_get((const char *)host + i * nb_dtype_size(op->dtype), op->dtype);
        CHECK(want < 0 || got == want, "rank %d of %d, %s: [%zu] of %zu is %g, not %g", me->rank, me->size, op->name, i,
              count, got, want);
    }
}

static inline void fill(const struct test_rank *me, const struct nb_op *op, struct buffer *buffer, size_t count) {
    for (size_t i = 0; i < count; i++) {
        element_put((char *)buffer->host + i * nb_dtype_size(op->dtype), op->dtype, input_value(me->rank, i));
    }
}

static inline size_t count_for(const struct test_rank *me, enum nb_op_kind kind, size_t count) {
    size_t parts = kind == NB_OP_ALLGATHER || kind == NB_OP_REDUCESCATTER ? (size_t)me->size : 1;
    parts = kind == NB_OP_ALLTOALL ? 2 * (size_t)me->size : parts;
    return (count + parts - 1) / parts * parts;
}

// An operation in progress on a rank's GPU.
struct flight {
    struct nb_op op;
    char name[NB_NAME_MAX];
    size_t count;
    struct buffer buffer;
    struct nb_work *work;
};

static inline void flight_prepare(struct test_rank *me, struct gpu *gpu, struct flight *flight, struct nb_op op,
                                  size_t count, int pieces) {
    count = count_for(me, op.kind, count);
    snprintf(flight->name, sizeof flight->name, "%d %s %s %zu", (int)op.kind, nb_dtype_name(op.dtype),
             nb_redop_name(op.redop), count);
    op.name = op.name != NULL ? op.name : flight->name;
    buffer_open(gpu, &flight->buffer, count * nb_dtype_size(op.dtype), nb_dtype_size(op.dtype), pieces);
    fill(me, &op, &flight->buffer, count);
    buffer_copy(gpu, &flight->buffer, false);
    flight->count = count;
    flight->op = on_device(gpu, &flight->buffer, op);
}

static inline void flight_end(struct test_rank *me, struct gpu *gpu, struct flight *flight) {
    test_done(me, flight->work);
    buffer_copy(gpu, &flight->buffer, true);
    check_success(gpu->driver.stream_synchronize(gpu->stream), "cuStreamSynchronize");
    check_result(me, &flight->op, flight->buffer.host, flight->count);
    buffer_close(gpu, &flight->buffer);
}

static inline void collective(struct test_rank *me, struct gpu *gpu, struct nb_op op, size_t count, int pieces) {
    struct flight flight;
    op.name = NULL;
    flight_prepare(me, gpu, &flight, op, count, pieces);
    flight.work = test_submit(me, flight.op);
    flight_end(me, gpu, &flight);
}

static const enum nb_op_kind kinds[] = {NB_OP_ALLREDUCE, NB_OP_BROADCAST, NB_OP_ALLGATHER, NB_OP_REDUCESCATTER,
                                        NB_OP_ALLTOALL};
enum { KINDS = sizeof kinds / sizeof kinds[0] };

static inline struct test_rank ranks_on(const char *network, int size) {
    struct test_rank template = test_on(network);
    template.size = size;
    template.cuda_library = fake_path();
    template.cuda_image = fake_image;
    template.device_chunk_bytes = CHUNK;
    template.device_chunks = CHUNKS;
    return template;
}

static inline void check_no_live_objects(void) {
    struct fake_live_objects left = fake->live_objects();
    CHECK(left.contexts == 0 && left.streams == 0 && left.events == 0 && left.registrations == 0 && left.modules == 0,
          "%d contexts, %d streams, %d events, %d registrations, %d modules", left.contexts, left.streams, left.events,
          left.registrations, left.modules);
}

// Returns 0, or 77 if the network is not available.
static inline int run_job(const struct test_rank *template, uint64_t seed, int64_t delay_max_ns,
                          void (*run)(struct test_rank *me)) {
    struct test_rank ranks = *template;
    fake->reset(seed, delay_max_ns);
    ranks.run = run;
    int rc = test_job(&ranks);
    check_no_live_objects();
    return rc;
}

// Finds the engine's stream for copies of this kind.
static inline struct CUstream_st *engine_stream(const struct gpu *gpu, enum fake_kind kind) {
    static struct fake_entry entries[4096];
    size_t count = fake->log(0, entries, 4096);
    for (size_t i = 0; i < count && i < 4096; i++) {
        struct CUstream_st *stream = (struct CUstream_st *)(uintptr_t)entries[i].stream;
        bool here = stream != gpu->stream && gpu->driver.stream_synchronize(stream) == NB_CUDA_SUCCESS; // its context
        if (entries[i].kind == kind && here) {
            return stream;
        }
    }
    CHECK(false, "the engine made no copy");
    return NULL;
}

#endif
