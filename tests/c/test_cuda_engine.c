// Device operations over the fake driver: every collective of ranks with buffers in device memory gives the right result
// whatever the streams' delays, each wait is needed, and failures end the job on every rank.
#include <errno.h>
#include <sched.h>
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

enum { CHUNK = 4096, CHUNKS = 4, DELAY_NS = 20000, PIECES = 3, YIELDS = 2000 };

static const struct fake_controls *fake;

// A rank's GPU: half of the ranks have the first one.
struct gpu {
    struct nb_cuda_driver driver;
    struct nb_cuda_device device;
    struct CUstream_st *stream;
};

static void succeed(unsigned result, const char *what) {
    CHECK(result == NB_CUDA_SUCCESS, "%s: %u", what, result);
}

static void gpu_open(struct gpu *gpu, const struct test_rank *me) {
    struct nb_error err = {0};
    CHECK(nb_cuda_driver_open(&gpu->driver, fake_path(), &err) == 0, "%s", err.text);
    CHECK(nb_cuda_device_open(&gpu->device, &gpu->driver, me->rank % FAKE_DEVICES, &err) == 0, "%s", err.text);
    CHECK(nb_cuda_enter(&gpu->device, &err) == 0, "%s", err.text);
    succeed(gpu->driver.stream_create(&gpu->stream, NB_CUDA_STREAM_NON_BLOCKING), "cuStreamCreate");
}

static void gpu_close(struct gpu *gpu) {
    succeed(gpu->driver.stream_destroy(gpu->stream), "cuStreamDestroy");
    nb_cuda_leave(&gpu->device);
    nb_cuda_device_close(&gpu->device);
}

// A buffer in pieces of device memory, and what it is filled from and read into.
struct buffer {
    size_t bytes;
    unsigned char *host;
    struct nb_segment pieces[PIECES];
    int count;
};

static void buffer_open(struct gpu *gpu, struct buffer *buffer, size_t bytes, size_t element, int pieces) {
    size_t each = bytes / element / (size_t)pieces * element;
    *buffer = (struct buffer){.bytes = bytes, .host = malloc(bytes)};
    CHECK(buffer->host != NULL, "memory");
    succeed(gpu->driver.host_register(buffer->host, bytes, 0), "cuMemHostRegister");
    for (int i = 0; i < pieces; i++) {
        size_t take = i == pieces - 1 ? bytes - (size_t)i * each : each;
        nb_cuda_address address = 0;
        if (take > 0) {
            succeed(gpu->driver.mem_alloc(&address, take), "cuMemAlloc");
            buffer->pieces[buffer->count++] = (struct nb_segment){(void *)(uintptr_t)address, take};
        }
    }
}

static void buffer_close(struct gpu *gpu, struct buffer *buffer) {
    succeed(gpu->driver.stream_synchronize(gpu->stream), "cuStreamSynchronize");
    succeed(gpu->driver.host_unregister(buffer->host), "cuMemHostUnregister");
    for (int i = 0; i < buffer->count; i++) {
        succeed(gpu->driver.mem_free((uintptr_t)buffer->pieces[i].base), "cuMemFree");
    }
    free(buffer->host);
}

// Copies on the rank's stream, in the order of what else it has been given.
static void buffer_copy(struct gpu *gpu, const struct buffer *buffer, bool out) {
    size_t at = 0;
    for (int i = 0; i < buffer->count; i++) {
        const struct nb_segment *piece = &buffer->pieces[i];
        const nb_cuda_address address = (uintptr_t)piece->base;
        unsigned result = out ? gpu->driver.copy_to_host(buffer->host + at, address, piece->bytes, gpu->stream)
                              : gpu->driver.copy_to_device(address, buffer->host + at, piece->bytes, gpu->stream);
        succeed(result, "a copy");
        at += piece->bytes;
    }
}

static struct nb_op on_device(const struct gpu *gpu, const struct buffer *buffer, struct nb_op op) {
    op.segments = buffer->pieces;
    op.segment_count = buffer->count;
    op.device = gpu->device.ordinal + 1;
    op.streams = &gpu->stream;
    op.stream_count = 1;
    return op;
}

// What element i is after the operation; -1: of no matter.
static double result_of(const struct test_rank *me, const struct nb_op *op, size_t i, size_t count) {
    const size_t each = count / (2 * (size_t)me->size);
    if (op->kind != NB_OP_ALLTOALL) {
        return wanted(me, op, i, count);
    }
    return i < count / 2 ? given(me->rank, i) : given((int)(i / each) - me->size, (size_t)me->rank * each + i % each);
}

static void check_result(const struct test_rank *me, const struct nb_op *op, const unsigned char *host, size_t count) {
    for (size_t i = 0; i < count; i++) {
        double want = result_of(me, op, i, count);
        double got = element_get((const char *)host + i * nb_dtype_size(op->dtype), op->dtype);
        CHECK(want < 0 || got == want, "rank %d of %d, %s: [%zu] of %zu is %g, not %g", me->rank, me->size, op->name, i,
              count, got, want);
    }
}

static void fill(const struct test_rank *me, const struct nb_op *op, struct buffer *buffer, size_t count) {
    for (size_t i = 0; i < count; i++) {
        element_put((char *)buffer->host + i * nb_dtype_size(op->dtype), op->dtype, given(me->rank, i));
    }
}

static size_t count_for(const struct test_rank *me, enum nb_op_kind kind, size_t count) {
    size_t parts = kind == NB_OP_ALLGATHER || kind == NB_OP_REDUCESCATTER ? (size_t)me->size : 1;
    parts = kind == NB_OP_ALLTOALL ? 2 * (size_t)me->size : parts;
    return (count + parts - 1) / parts * parts;
}

static void collective(struct test_rank *me, struct gpu *gpu, struct nb_op op, size_t count, int pieces) {
    char name[NB_NAME_MAX];
    struct buffer buffer;
    count = count_for(me, op.kind, count);
    snprintf(name, sizeof name, "%d %s %s %zu", (int)op.kind, nb_dtype_name(op.dtype), nb_redop_name(op.redop), count);
    op.name = name;
    buffer_open(gpu, &buffer, count * nb_dtype_size(op.dtype), nb_dtype_size(op.dtype), pieces);
    fill(me, &op, &buffer, count);
    buffer_copy(gpu, &buffer, false);
    test_done(me, test_submit(me, on_device(gpu, &buffer, op)));
    buffer_copy(gpu, &buffer, true);
    succeed(gpu->driver.stream_synchronize(gpu->stream), "cuStreamSynchronize");
    check_result(me, &op, buffer.host, count);
    buffer_close(gpu, &buffer);
}

static const enum nb_op_kind kinds[] = {NB_OP_ALLREDUCE, NB_OP_BROADCAST, NB_OP_ALLGATHER, NB_OP_REDUCESCATTER,
                                        NB_OP_ALLTOALL};
enum { KINDS = sizeof kinds / sizeof kinds[0] };

static void run_kinds(struct test_rank *me) {
    static const int dtypes[] = {NB_U8, NB_I64, NB_BF16, NB_F32, NB_F64};
    static const size_t counts[] = {1, 7, CHUNK / 4, 3 * CHUNK + 1};
    struct gpu gpu;
    gpu_open(&gpu, me);
    for (int k = 0; k < KINDS; k++) {
        for (size_t d = 0; d < sizeof dtypes / sizeof dtypes[0]; d++) {
            for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
                const struct nb_op op = {
                    .kind = kinds[k], .dtype = dtypes[d], .redop = c % 2 == 0 ? NB_SUM : NB_MAX, .root = me->size - 1};
                collective(me, &gpu, op, counts[c], 1 + (int)(c % PIECES));
            }
        }
    }
    gpu_close(&gpu);
}

static struct test_rank ranks_on(const char *network, int size) {
    struct test_rank like = test_on(network);
    like.size = size;
    like.cuda_library = fake_path();
    like.device_chunk_bytes = CHUNK;
    like.device_chunks = CHUNKS;
    return like;
}

static void check_nothing_left(void) {
    struct fake_alive alive = fake->alive();
    CHECK(alive.contexts == 0 && alive.streams == 0 && alive.events == 0 && alive.registrations == 0,
          "%d contexts, %d streams, %d events, %d registrations", alive.contexts, alive.streams, alive.events,
          alive.registrations);
}

static void job_over(const struct test_rank *like, uint64_t seed, int64_t delay_max_ns,
                     void (*run)(struct test_rank *me)) {
    struct test_rank ranks = *like;
    fake->reset(seed, delay_max_ns);
    ranks.run = run;
    CHECK(test_job(&ranks) == 0, "the job");
    check_nothing_left();
}

static void test_kinds(const char *network) {
    for (int size = 1; size <= 3; size++) {
        struct test_rank like = ranks_on(network, size);
        job_over(&like, (uint64_t)size, 0, run_kinds);
    }
}

// Operations on host and device memory by turns, some of them under way together.
static void run_mixed(struct test_rank *me) {
    enum { ROUNDS = 6, COUNT = 5 * CHUNK / 4 + 3 };
    struct gpu gpu;
    struct buffer buffers[ROUNDS];
    struct nb_work *works[2 * ROUNDS];
    static float host[TEST_RANKS_MAX][ROUNDS][COUNT];
    char names[2 * ROUNDS][16];
    const struct nb_op like = {.kind = NB_OP_ALLREDUCE, .dtype = NB_F32, .name = "mixed"};
    gpu_open(&gpu, me);
    for (int i = 0; i < ROUNDS; i++) {
        buffer_open(&gpu, &buffers[i], COUNT * sizeof(float), sizeof(float), PIECES);
        fill(me, &like, &buffers[i], COUNT);
        memcpy(host[me->rank][i], buffers[i].host, COUNT * sizeof(float));
        buffer_copy(&gpu, &buffers[i], false);
        struct nb_op op = on_device(&gpu, &buffers[i], like);
        snprintf(names[2 * i], sizeof names[0], "device %d", i);
        snprintf(names[2 * i + 1], sizeof names[0], "host %d", i);
        op.name = names[2 * i];
        works[2 * i] = test_submit(me, op);
        struct nb_segment segment = {host[me->rank][i], i % 2 == 0 ? sizeof(float) : COUNT * sizeof(float)};
        works[2 * i + 1] = test_submit(me, test_op(names[2 * i + 1], NB_OP_ALLREDUCE, &segment));
    }
    for (int i = 2 * ROUNDS - 1; i >= 0; i--) {
        test_done(me, works[i]);
    }
    for (int i = 0; i < ROUNDS; i++) {
        check_result(me, &like, (const unsigned char *)host[me->rank][i], i % 2 == 0 ? 1 : COUNT);
        buffer_copy(&gpu, &buffers[i], true);
        succeed(gpu.driver.stream_synchronize(gpu.stream), "cuStreamSynchronize");
        check_result(me, &like, buffers[i].host, COUNT);
        buffer_close(&gpu, &buffers[i]);
    }
    gpu_close(&gpu);
}

static void test_seeds(const char *network, int seeds) {
    for (int seed = 0; seed < seeds; seed++) {
        struct test_rank like = ranks_on(network, 2 + seed % 2);
        like.device_chunks = 1 + seed % 5;
        job_over(&like, (uint64_t)seed, DELAY_NS, run_mixed);
    }
}

// What orders the use of memory. Each of these is switched off in the driver below, and a result must be wrong.
enum rule { NONE, FENCE, ARRIVAL, REUSE, CALLER_WAITS, RULES };

struct experiment {
    enum rule held;   // whose stream of rank 0 stands still
    enum rule broken; // NONE: the stream goes on when the operation has had time to go wrong
    bool right;       // out: the result of rank 0
};

// The stream of the engine that copies to the host, or back.
static struct CUstream_st *engine_stream(const struct gpu *gpu, enum fake_kind kind) {
    static struct fake_entry entries[4096];
    size_t count = fake->log(0, entries, 4096);
    for (size_t i = 0; i < count && i < 4096; i++) {
        struct CUstream_st *stream = (struct CUstream_st *)(uintptr_t)entries[i].stream;
        bool here = stream != gpu->stream && gpu->driver.stream_synchronize(stream) == NB_CUDA_SUCCESS; // its context
        if (entries[i].kind == kind && here) {
            return stream;
        }
    }
    CHECK(false, "no copy of the engine");
    return NULL;
}

static void let_others_run(void) {
    for (int i = 0; i < YIELDS; i++) {
        (void)sched_yield();
    }
}

static void run_rule(struct test_rank *me) {
    struct experiment *experiment = me->arg;
    enum { COUNT = 3 * CHUNK / 4 + 5 };
    struct gpu gpu;
    struct buffer buffer;
    struct nb_op op = {.kind = NB_OP_ALLREDUCE, .dtype = NB_F32, .name = "rule"};
    gpu_open(&gpu, me);
    collective(me, &gpu, op, COUNT, 1);
    if (experiment->held == CALLER_WAITS) { // nothing waits on rank 1
        op.kind = NB_OP_BROADCAST;
        op.root = 1;
    }
    buffer_open(&gpu, &buffer, COUNT * sizeof(float), sizeof(float), 1);
    fill(me, &op, &buffer, COUNT);
    test_barrier(me, "before");
    if (me->rank > 0) {
        buffer_copy(&gpu, &buffer, false);
        test_done(me, test_submit(me, on_device(&gpu, &buffer, op)));
        test_barrier(me, "after");
        buffer_close(&gpu, &buffer);
        gpu_close(&gpu);
        return;
    }
    const bool breaks = experiment->broken != NONE;
    struct CUstream_st *const out = engine_stream(&gpu, FAKE_TO_HOST);
    struct CUstream_st *const back = engine_stream(&gpu, FAKE_TO_DEVICE);
    struct CUstream_st *const streams[RULES] = {
        [FENCE] = gpu.stream, [ARRIVAL] = out, [REUSE] = back, [CALLER_WAITS] = back};
    struct CUstream_st *const held = streams[experiment->held];
    fake->hold(held, true);
    fake->hasten(breaks && experiment->broken != CALLER_WAITS ? held : NULL);
    fake->drop_wait(experiment->broken == CALLER_WAITS);
    buffer_copy(&gpu, &buffer, false);
    struct nb_work *work = test_submit(me, on_device(&gpu, &buffer, op));
    if (!breaks) {
        let_others_run();
        fake->hold(held, false);
    }
    test_done(me, work);
    if (experiment->broken == CALLER_WAITS) { // else the wait itself makes this late
        buffer_copy(&gpu, &buffer, true);
        succeed(gpu.driver.stream_synchronize(gpu.stream), "cuStreamSynchronize");
    }
    fake->hasten(NULL);
    fake->hold(held, false);
    if (experiment->broken != CALLER_WAITS) {
        buffer_copy(&gpu, &buffer, true);
    }
    succeed(gpu.driver.stream_synchronize(out), "cuStreamSynchronize");
    succeed(gpu.driver.stream_synchronize(back), "cuStreamSynchronize");
    succeed(gpu.driver.stream_synchronize(gpu.stream), "cuStreamSynchronize");
    experiment->right = true;
    for (size_t i = 0; i < COUNT; i++) {
        double got = element_get((const char *)buffer.host + i * sizeof(float), NB_F32);
        experiment->right = experiment->right && got == wanted(me, &op, i, COUNT);
    }
    test_barrier(me, "after");
    buffer_close(&gpu, &buffer);
    gpu_close(&gpu);
}

static void test_each_rule_is_needed(void) {
    for (int rule = FENCE; rule < RULES; rule++) {
        for (int broken = 0; broken < 2; broken++) {
            struct experiment experiment = {.held = (enum rule)rule, .broken = broken ? (enum rule)rule : NONE};
            struct test_rank like = ranks_on("tcp", 2);
            like.device_chunks = rule == REUSE ? 1 : 8;
            like.arg = &experiment;
            job_over(&like, 1, 0, run_rule);
            CHECK(experiment.right == !broken, "rule %d, broken: %d, right: %d", rule, broken, experiment.right);
        }
    }
}

// An operation whose fence is not reached holds up no other, and no rank counts as silent.
static void run_late(struct test_rank *me) {
    enum { COUNT = 2 * CHUNK / 4 + 1 };
    struct gpu gpu;
    struct buffer late;
    struct nb_op op = {.kind = NB_OP_ALLREDUCE, .dtype = NB_F32, .name = "late"};
    gpu_open(&gpu, me);
    struct CUstream_st *first = gpu.stream;
    succeed(gpu.driver.stream_create(&gpu.stream, NB_CUDA_STREAM_NON_BLOCKING), "cuStreamCreate");
    fake->hold(gpu.stream, me->rank == 0);
    buffer_open(&gpu, &late, COUNT * sizeof(float), sizeof(float), 2);
    fill(me, &op, &late, COUNT);
    buffer_copy(&gpu, &late, false);
    struct nb_work *work = test_submit(me, on_device(&gpu, &late, op));
    struct gpu other = {.driver = gpu.driver, .device = gpu.device, .stream = first};
    for (int i = 0; i < 5; i++) {
        collective(me, &other, (struct nb_op){.kind = kinds[i % KINDS], .dtype = NB_F32}, COUNT + (size_t)i, 1);
    }
    int code;
    CHECK(!nb_work_test(work, &code), "rank %d: the operation did not wait for its fence", me->rank);
    test_barrier(me, "tested");
    fake->hold(gpu.stream, false);
    test_done(me, work);
    buffer_copy(&gpu, &late, true);
    succeed(gpu.driver.stream_synchronize(gpu.stream), "cuStreamSynchronize");
    check_result(me, &op, late.host, COUNT);
    buffer_close(&gpu, &late);
    succeed(gpu.driver.stream_destroy(first), "cuStreamDestroy");
    gpu_close(&gpu);
}

static void test_a_late_fence(void) {
    struct test_rank like = ranks_on("shm", 2);
    job_over(&like, 1, 0, run_late);
}

// The buffers of several streams, and a fence of the caller's own.
static void run_streams(struct test_rank *me) {
    enum { COUNT = CHUNK / 4 + 1 };
    struct gpu gpu;
    struct buffer buffer;
    struct CUevent_st *fence = NULL;
    struct CUstream_st *streams[NB_OP_STREAMS_MAX];
    struct nb_op op = {.kind = NB_OP_ALLREDUCE, .dtype = NB_F32, .name = "streams"};
    gpu_open(&gpu, me);
    streams[0] = gpu.stream;
    for (int i = 1; i < NB_OP_STREAMS_MAX; i++) {
        succeed(gpu.driver.stream_create(&streams[i], NB_CUDA_STREAM_NON_BLOCKING), "cuStreamCreate");
    }
    buffer_open(&gpu, &buffer, COUNT * sizeof(float), sizeof(float), PIECES);
    for (int own = 0; own < 2; own++) {
        const int last = NB_OP_STREAMS_MAX - 1;
        fill(me, &op, &buffer, COUNT);
        gpu.stream = streams[last];
        buffer_copy(&gpu, &buffer, false);
        struct nb_op several = on_device(&gpu, &buffer, op);
        several.streams = streams;
        several.stream_count = NB_OP_STREAMS_MAX;
        if (own > 0) {
            succeed(gpu.driver.event_create(&fence, NB_CUDA_EVENT_DISABLE_TIMING), "cuEventCreate");
            succeed(gpu.driver.event_record(fence, gpu.stream), "cuEventRecord");
            several.fence = fence;
        }
        test_done(me, test_submit(me, several));
        gpu.stream = streams[own];
        buffer_copy(&gpu, &buffer, true);
        succeed(gpu.driver.stream_synchronize(gpu.stream), "cuStreamSynchronize");
        check_result(me, &op, buffer.host, COUNT);
    }
    succeed(gpu.driver.event_destroy(fence), "cuEventDestroy");
    gpu.stream = streams[0];
    buffer_close(&gpu, &buffer);
    for (int i = 1; i < NB_OP_STREAMS_MAX; i++) {
        succeed(gpu.driver.stream_destroy(streams[i]), "cuStreamDestroy");
    }
    gpu_close(&gpu);
}

static void test_streams(void) {
    for (uint64_t seed = 0; seed < 20; seed++) {
        struct test_rank like = ranks_on("tcp", 2);
        job_over(&like, seed, DELAY_NS, run_streams);
    }
}

// Rank 0 has the gradient on its GPU, the others in host memory.
static void run_mismatch(struct test_rank *me) {
    struct gpu gpu;
    struct buffer buffer;
    struct nb_error err = {0};
    float host[4] = {0};
    struct nb_segment segment = {host, sizeof host};
    gpu_open(&gpu, me);
    buffer_open(&gpu, &buffer, sizeof host, sizeof(float), 1);
    struct nb_op op = test_op("w", NB_OP_ALLREDUCE, &segment);
    int rc = test_try(me, me->rank == 0 ? on_device(&gpu, &buffer, op) : op, &err);
    CHECK(rc == NB_EMISMATCH, "rank %d: %d", me->rank, rc);
    CHECK(strcmp(err.text, "gradient w: rank 0 has it on cuda, rank 1 on cpu") == 0, "rank %d: %s", me->rank, err.text);
    collective(me, &gpu, op, 5, 1); // the job goes on
    buffer_close(&gpu, &buffer);
    gpu_close(&gpu);
}

static void test_mismatch(void) {
    struct test_rank like = ranks_on("tcp", 2);
    job_over(&like, 1, 0, run_mismatch);
}

// What is refused at once, on this rank alone.
static int refused(struct test_rank *me, struct nb_op op, struct nb_error *err) {
    *err = (struct nb_error){0};
    return test_try(me, op, err);
}

static void run_refusals(struct test_rank *me) {
    struct gpu gpu;
    struct buffer buffer;
    struct nb_error err = {0};
    gpu_open(&gpu, me);
    buffer_open(&gpu, &buffer, 16, 4, 1);
    const struct nb_op right = on_device(&gpu, &buffer, test_op("w", NB_OP_ALLREDUCE, NULL));
    struct nb_op op = right;
    op.stream_count = 0;
    CHECK(refused(me, op, &err) == -EINVAL && strstr(err.text, "w: 0 streams") != NULL, "%s", err.text);
    op = right;
    op.device = FAKE_DEVICES + 1;
    CHECK(refused(me, op, &err) == -ENODEV && strstr(err.text, "there is no device 2") != NULL, "%s", err.text);
    op = right;
    op.kind = NB_OP_BARRIER;
    CHECK(refused(me, op, &err) == -EINVAL, "%s", err.text);
    fake->capture(gpu.stream, true);
    CHECK(refused(me, right, &err) == -EINVAL &&
              strcmp(err.text, "gradient w was made while its stream is captured into a CUDA graph: keep backward out "
                               "of the capture") == 0,
          "%s", err.text);
    fake->capture(gpu.stream, false);
    collective(me, &gpu, right, 5, 1); // nothing of it is left
    buffer_close(&gpu, &buffer);
    gpu_close(&gpu);
}

static void test_refusals(void) {
    struct test_rank like = ranks_on("tcp", 1);
    job_over(&like, 1, 0, run_refusals);
    like = ranks_on("tcp", 2);
    job_over(&like, 1, 0, run_refusals);
}

int main(void) {
    static const char *const networks[] = {"tcp", "shm"};
    fake = fake_controls_get();
    test_each_rule_is_needed();
    test_a_late_fence();
    test_streams();
    test_mismatch();
    test_refusals();
    for (int i = 0; i < 2; i++) {
        test_kinds(networks[i]);
        test_seeds(networks[i], 20);
    }
    fake->reset(0, 0);
    return 0;
}
