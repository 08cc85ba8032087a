// Device operations over the fake CUDA driver. Every collective on device buffers is right for any stream delays, and
// each wait is necessary. Mismatches and invalid arguments are refused.
#include <errno.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../cuda/fake.h"
#include "base/clock.h"
#include "base/dtype.h"
#include "base/error.h"
#include "check.h"
#include "cuda/driver.h"
#include "engine/engine.h"
#include "gpu.h"
#include "job.h"
#include "sums.h"

enum { DELAY_NS = 20000, YIELDS = 2000, SEEDS = 20 };

static void all_kinds(struct test_rank *me) {
    static const size_t counts[] = {1, 7, CHUNK / 4, 3 * CHUNK + 1};
    struct gpu gpu;
    gpu_open(&gpu, me);
    for (int k = 0; k < KINDS; k++) {
        for (int dtype = 0; dtype < NB_DTYPES; dtype++) {
            for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
                const struct nb_op op = {
                    .kind = kinds[k], .dtype = dtype, .redop = c % 2 == 0 ? NB_SUM : NB_MAX, .root = me->size - 1};
                collective(me, &gpu, op, counts[c], 1 + (int)(c % PIECES));
            }
        }
    }
    gpu_close(&gpu);
}

// Operations of a kind that a stream has executed; NULL: all streams together.
static int count_executed(enum fake_kind kind, const struct CUstream_st *stream) {
    enum { ROOM = 1 << 16 };
    struct fake_entry *entries = calloc(ROOM, sizeof *entries);
    CHECK(entries != NULL, "memory");
    const size_t count = fake->log(0, entries, ROOM);
    int found = 0;
    for (size_t i = 0; i < count && i < ROOM; i++) {
        found += entries[i].kind == kind && (stream == NULL || entries[i].stream == stream);
    }
    free(entries);
    return found;
}

// False: the network is not available.
static bool test_kinds(const char *network) {
    for (int size = 3; size >= 1; size--) {
        for (size_t gather_bytes = 0; gather_bytes <= CHUNK; gather_bytes += CHUNK) {
            struct test_rank template = ranks_on(network, size);
            template.device_gather_bytes = gather_bytes;
            if (run_job(&template, (uint64_t)size, 0, all_kinds) != 0) {
                return false;
            }
            const int kernels = count_executed(FAKE_KERNEL, NULL);
            CHECK((kernels > 0) == (gather_bytes > 0 && size > 1), "%d ranks, gather %zu: %d kernels", size,
                  gather_bytes, kernels);
        }
    }
    return true;
}

// Alternating operations on host and device memory, in progress concurrently.
static void host_and_device_operations(struct test_rank *me) {
    enum { ROUNDS = 6, COUNT = 5 * CHUNK / 4 + 3 };
    struct gpu gpu;
    struct buffer buffers[ROUNDS];
    struct nb_work *works[2 * ROUNDS];
    static float host[TEST_RANKS_MAX][ROUNDS][COUNT];
    char names[2 * ROUNDS][16];
    const struct nb_op template = {.kind = NB_OP_ALLREDUCE, .dtype = NB_F32, .name = "mixed"};
    gpu_open(&gpu, me);
    for (int i = 0; i < ROUNDS; i++) {
        buffer_open(&gpu, &buffers[i], COUNT * sizeof(float), sizeof(float), PIECES);
        fill(me, &template, &buffers[i], COUNT);
        memcpy(host[me->rank][i], buffers[i].host, COUNT * sizeof(float));
        buffer_copy(&gpu, &buffers[i], false);
        struct nb_op op = on_device(&gpu, &buffers[i], template);
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
        check_result(me, &template, (const unsigned char *)host[me->rank][i], i % 2 == 0 ? 1 : COUNT);
        buffer_copy(&gpu, &buffers[i], true);
        check_success(gpu.driver.stream_synchronize(gpu.stream), "cuStreamSynchronize");
        check_result(me, &template, buffers[i].host, COUNT);
        buffer_close(&gpu, &buffers[i]);
    }
    gpu_close(&gpu);
}

static uint64_t draw(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

// Operations in progress concurrently. The seed determines the kind, type and size of each.
static void drawn_operations(struct test_rank *me) {
    enum { FLIGHTS = 4 };
    const uint64_t seed = *(const uint64_t *)me->arg;
    uint64_t state = seed;
    char names[FLIGHTS][32];
    struct flight flights[FLIGHTS];
    struct gpu gpu;
    gpu_open(&gpu, me);
    for (int i = 0; i < FLIGHTS; i++) {
        struct nb_op op = {.name = names[i]};
        snprintf(names[i], sizeof names[i], "seed %llu, %d", (unsigned long long)seed, i);
        op.kind = kinds[draw(&state) % KINDS];
        op.dtype = (int)(draw(&state) % NB_DTYPES);
        op.redop = draw(&state) % 2 == 0 ? NB_SUM : NB_MAX;
        op.root = (int)(draw(&state) % (uint64_t)me->size);
        const size_t count = 1 + draw(&state) % (2 * CHUNK);
        flight_prepare(me, &gpu, &flights[i], op, count, 1 + (int)(draw(&state) % PIECES));
        flights[i].work = test_submit(me, flights[i].op);
    }
    for (int i = FLIGHTS - 1; i >= 0; i--) {
        flight_end(me, &gpu, &flights[i]);
    }
    gpu_close(&gpu);
}

static void seeded_operations(struct test_rank *me) {
    host_and_device_operations(me);
    drawn_operations(me);
}

static void test_seeds(const char *network, int seeds) {
    for (uint64_t seed = 0; seed < (uint64_t)seeds; seed++) {
        struct test_rank template = ranks_on(network, 2 + (int)(seed % 2));
        template.arg = &seed;
        template.device_chunks = 1 + (int)(seed % 5);
        template.device_gather_bytes = seed % 3 == 0 ? CHUNK : 0;
        CHECK(run_job(&template, seed, DELAY_NS, seeded_operations) == 0, "open the job");
    }
}

// Rules that order the use of memory. The fake driver disables each of them, and the result must then be wrong.
enum rule { NONE, FENCE, ARRIVAL, REUSE, CALLER_WAITS, RULES };

struct experiment {
    enum rule held;   // the stream of this rule is held on rank 0
    enum rule broken; // NONE: the stream is released after the operation had time to go wrong
    bool right;       // out: the result of rank 0 is right
};

static void yield_to_streams(void) {
    for (int i = 0; i < YIELDS; i++) {
        (void)sched_yield();
    }
}

static void result_with_rule(struct test_rank *me) {
    struct experiment *experiment = me->arg;
    enum { COUNT = 3 * CHUNK / 4 + 5 };
    struct gpu gpu;
    struct buffer buffer;
    struct nb_op op = {.kind = NB_OP_ALLREDUCE, .dtype = NB_F32, .name = "rule"};
    gpu_open(&gpu, me);
    collective(me, &gpu, op, COUNT, 1);
    if (experiment->held == CALLER_WAITS) { // rank 1, as root, makes no wait: drop_wait drops rank 0's
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
    fake->report_done(breaks && experiment->broken != CALLER_WAITS ? held : NULL);
    fake->drop_wait(experiment->broken == CALLER_WAITS);
    buffer_copy(&gpu, &buffer, false);
    struct nb_work *work = test_submit(me, on_device(&gpu, &buffer, op));
    if (!breaks) {
        yield_to_streams();
        fake->hold(held, false);
    }
    test_done(me, work);
    if (experiment->broken == CALLER_WAITS) { // otherwise the caller's own wait delays this copy
        buffer_copy(&gpu, &buffer, true);
        check_success(gpu.driver.stream_synchronize(gpu.stream), "cuStreamSynchronize");
    }
    fake->report_done(NULL);
    fake->hold(held, false);
    if (experiment->broken != CALLER_WAITS) {
        buffer_copy(&gpu, &buffer, true);
    }
    check_success(gpu.driver.stream_synchronize(out), "cuStreamSynchronize");
    check_success(gpu.driver.stream_synchronize(back), "cuStreamSynchronize");
    check_success(gpu.driver.stream_synchronize(gpu.stream), "cuStreamSynchronize");
    struct nb_segment result = {.base = buffer.host, .bytes = COUNT * sizeof(float)};
    op.segments = &result;
    experiment->right = result_compare(me, &op, COUNT) == COUNT;
    test_barrier(me, "after");
    buffer_close(&gpu, &buffer);
    gpu_close(&gpu);
}

static void test_each_rule_is_necessary(const char *network) {
    for (int rule = FENCE; rule < RULES; rule++) {
        for (int broken = 0; broken < 2; broken++) {
            struct experiment experiment = {.held = (enum rule)rule, .broken = broken ? (enum rule)rule : NONE};
            struct test_rank template = ranks_on(network, 2);
            template.device_chunks = rule == REUSE ? 1 : 8;
            template.arg = &experiment;
            CHECK(run_job(&template, 1, 0, result_with_rule) == 0, "open the job");
            CHECK(experiment.right == !broken, "rule %d, broken: %d, right: %d", rule, broken, experiment.right);
        }
    }
}

// An operation whose fence is not reached does not block other operations, and no rank counts as silent.
static void operation_with_late_fence(struct test_rank *me) {
    enum { COUNT = 2 * CHUNK / 4 + 1 };
    struct gpu gpu;
    struct buffer late;
    struct nb_op op = {.kind = NB_OP_ALLREDUCE, .dtype = NB_F32, .name = "late"};
    gpu_open(&gpu, me);
    struct CUstream_st *first = gpu.stream;
    check_success(gpu.driver.stream_create(&gpu.stream, NB_CUDA_STREAM_NON_BLOCKING), "cuStreamCreate");
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
    check_success(gpu.driver.stream_synchronize(gpu.stream), "cuStreamSynchronize");
    check_result(me, &op, late.host, COUNT);
    buffer_close(&gpu, &late);
    check_success(gpu.driver.stream_destroy(first), "cuStreamDestroy");
    gpu_close(&gpu);
}

// Copies must not queue behind the training's kernels.
static void copies_in_streams_of_priority(struct test_rank *me) {
    struct gpu gpu;
    gpu_open(&gpu, me);
    collective(me, &gpu, (struct nb_op){.kind = NB_OP_ALLREDUCE, .dtype = NB_F32}, CHUNK, 1);
    static const enum fake_kind copies[] = {FAKE_TO_HOST, FAKE_TO_DEVICE};
    test_barrier(me, "copied");
    for (int i = 0; i < 2 && me->rank == 0; i++) {
        int priority = fake->priority(engine_stream(&gpu, copies[i]));
        CHECK(priority == FAKE_PRIORITY_GREATEST, "a stream of copies has priority %d", priority);
    }
    gpu_close(&gpu);
}

static void test_priority(const char *network) {
    struct test_rank template = ranks_on(network, 2);
    CHECK(run_job(&template, 1, 0, copies_in_streams_of_priority) == 0, "open the job");
}

// ---- polling

static _Atomic int late_works;
static _Atomic int quiet_passes; // in which this many were late
static _Atomic int polls_max;    // of such a pass

int __real_nb_device_progress(struct nb_job *job);
int __wrap_nb_device_progress(struct nb_job *job);

int __wrap_nb_device_progress(struct nb_job *job) {
    const bool late = atomic_load(&late_works) > 0;
    const int before = fake->polls();
    const int moved = __real_nb_device_progress(job);
    const int polls = fake->polls() - before;
    if (late) {
        atomic_fetch_add(&quiet_passes, 1);
        if (polls > atomic_load(&polls_max)) {
            atomic_store(&polls_max, polls);
        }
    }
    return moved;
}

// Many operations behind one fence: each pass enters the context once, and queries the first fence alone.
static void many_operations_on_one_late_stream(struct test_rank *me) {
    enum { WORKS = 20, PASSES = 100, SIZE = 5 };
    struct gpu gpu;
    struct flight flights[WORKS];
    char names[WORKS][16];
    gpu_open(&gpu, me);
    collective(me, &gpu, (struct nb_op){.kind = NB_OP_ALLREDUCE, .dtype = NB_F32}, SIZE, 1);
    for (int i = 0; i < WORKS; i++) {
        snprintf(names[i], sizeof names[0], "late %d", i);
        const struct nb_op op = {.kind = NB_OP_ALLREDUCE, .dtype = NB_F32, .name = names[i]};
        flight_prepare(me, &gpu, &flights[i], op, SIZE, 1);
    }
    test_barrier(me, "prepared");
    fake->hold(gpu.stream, true);
    for (int i = 0; i < WORKS; i++) {
        flights[i].work = test_submit(me, flights[i].op);
    }
    test_barrier(me, "submitted"); // the engine has taken them
    atomic_fetch_add(&late_works, 1);
    while (atomic_load(&quiet_passes) < PASSES) {
        (void)sched_yield();
    }
    test_barrier(me, "polled");
    atomic_fetch_add(&late_works, -1);
    test_barrier(me, "measured");
    fake->hold(gpu.stream, false);
    for (int i = 0; i < WORKS; i++) {
        flight_end(me, &gpu, &flights[i]);
    }
    gpu_close(&gpu);
}

static void test_a_pass_makes_one_query_for_a_stream(const char *network) {
    struct test_rank template = ranks_on(network, 2);
    CHECK(run_job(&template, 1, 0, many_operations_on_one_late_stream) == 0, "open the job");
    CHECK(atomic_load(&polls_max) == 2, "%d calls in a pass, not a push and a query", atomic_load(&polls_max));
}

static void test_late_fence_blocks_no_other_operation(const char *network) {
    struct test_rank template = ranks_on(network, 2);
    CHECK(run_job(&template, 1, 0, operation_with_late_fence) == 0, "open the job");
}

// An operation with several streams, and with a fence event of the caller.
static void operation_with_several_streams(struct test_rank *me) {
    enum { COUNT = CHUNK / 4 + 1 };
    struct gpu gpu;
    struct buffer buffer;
    struct CUevent_st *fence = NULL;
    struct CUstream_st *streams[NB_OP_STREAMS_MAX];
    struct nb_op op = {.kind = NB_OP_ALLREDUCE, .dtype = NB_F32, .name = "streams"};
    gpu_open(&gpu, me);
    streams[0] = gpu.stream;
    for (int i = 1; i < NB_OP_STREAMS_MAX; i++) {
        check_success(gpu.driver.stream_create(&streams[i], NB_CUDA_STREAM_NON_BLOCKING), "cuStreamCreate");
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
            check_success(gpu.driver.event_create(&fence, NB_CUDA_EVENT_DISABLE_TIMING), "cuEventCreate");
            check_success(gpu.driver.event_record(fence, gpu.stream), "cuEventRecord");
            several.fence = fence;
        }
        test_done(me, test_submit(me, several));
        gpu.stream = streams[own];
        buffer_copy(&gpu, &buffer, true);
        check_success(gpu.driver.stream_synchronize(gpu.stream), "cuStreamSynchronize");
        check_result(me, &op, buffer.host, COUNT);
        for (int i = 0; i < NB_OP_STREAMS_MAX; i++) { // one for the first operation, none for each piece
            const int events = count_executed(FAKE_RECORD, streams[i]);
            CHECK(events == 1 + (own > 0 && i == last), "%d events in stream %d", events, i);
        }
    }
    check_success(gpu.driver.event_destroy(fence), "cuEventDestroy");
    gpu.stream = streams[0];
    buffer_close(&gpu, &buffer);
    for (int i = 1; i < NB_OP_STREAMS_MAX; i++) {
        check_success(gpu.driver.stream_destroy(streams[i]), "cuStreamDestroy");
    }
    gpu_close(&gpu);
}

static void test_streams(const char *network) {
    for (uint64_t seed = 0; seed < 20; seed++) {
        struct test_rank template = ranks_on(network, 2);
        CHECK(run_job(&template, seed, DELAY_NS, operation_with_several_streams) == 0, "open the job");
    }
}

// Makes a copy on another stream wait for the result, while the last copy back is held, and then later work of the
// operation's own stream.
static void follow_result(const struct gpu *gpu, struct gpu *other, struct CUstream_st *back,
                          const struct nb_work *work, const struct buffer *buffer) {
    struct nb_error err = {0};
    fake->hold(gpu->stream, true);
    CHECK(nb_work_follow(work, gpu->stream, &err) == 0 && nb_work_follow(work, other->stream, &err) == 0, "%s",
          err.text);
    buffer_copy(other, buffer, true);
    yield_to_streams();
    CHECK(fake->pending(other->stream) > 0, "the stream does not wait for the last copy");
    fake->hold(back, false);
    int64_t until_ns = nb_now_ns() + (int64_t)TEST_LIMIT_MS * 500000; // before rank 1 gives up
    while (fake->pending(other->stream) > 0) {
        CHECK(nb_now_ns() < until_ns, "the stream waits for later work of the operation's stream");
        (void)sched_yield();
    }
    fake->hold(gpu->stream, false);
    fake->capture(other->stream, true);
    CHECK(nb_work_follow(work, other->stream, &err) == -EBUSY &&
              strcmp(err.text, "gradient followed is waited for on a stream that is captured into a CUDA graph: wait "
                               "for it before the capture") == 0,
          "%s", err.text);
    CHECK(fake->refusals() == 0, "a call has ended the capture");
    fake->capture(other->stream, false);
}

static void result_on_another_stream(struct test_rank *me) {
    enum { COUNT = 3 * CHUNK / 4 + 1 };
    struct gpu gpu;
    struct buffer buffer;
    struct nb_error err = {0};
    const struct nb_op op = {.kind = NB_OP_ALLREDUCE, .dtype = NB_F32, .name = "followed"};
    gpu_open(&gpu, me);
    collective(me, &gpu, (struct nb_op){.kind = NB_OP_ALLREDUCE, .dtype = NB_F32}, COUNT, 1);
    struct gpu other = gpu;
    check_success(gpu.driver.stream_create(&other.stream, NB_CUDA_STREAM_NON_BLOCKING), "cuStreamCreate");
    buffer_open(&gpu, &buffer, COUNT * sizeof(float), sizeof(float), PIECES);
    fill(me, &op, &buffer, COUNT);
    buffer_copy(&gpu, &buffer, false);
    test_barrier(me, "prepared");
    struct CUstream_st *const back = me->rank == 0 ? engine_stream(&gpu, FAKE_TO_DEVICE) : NULL;
    if (me->rank == 0) {
        fake->hold(back, true);
    }
    struct nb_work *work = test_submit(me, on_device(&gpu, &buffer, op));
    CHECK(nb_work_wait(work, TEST_LIMIT_MS, &err) == 0, "rank %d: %s", me->rank, err.text);
    if (me->rank == 0) {
        follow_result(&gpu, &other, back, work, &buffer);
        check_result(me, &op, buffer.host, COUNT);
    }
    test_barrier(me, "followed");
    nb_work_release(work);
    buffer_close(&gpu, &buffer);
    check_success(gpu.driver.stream_destroy(other.stream), "cuStreamDestroy");
    gpu_close(&gpu);
}

static void test_another_stream(const char *network) {
    struct test_rank template = ranks_on(network, 2);
    CHECK(run_job(&template, 1, 0, result_on_another_stream) == 0, "open the job");
}

// Rank 0 has the gradient on its GPU, the other rank in host memory.
static void memory_kinds_differ(struct test_rank *me) {
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
    collective(me, &gpu, op, 5, 1); // the job continues
    buffer_close(&gpu, &buffer);
    gpu_close(&gpu);
}

static void test_mismatch(const char *network) {
    struct test_rank template = ranks_on(network, 2);
    CHECK(run_job(&template, 1, 0, memory_kinds_differ) == 0, "open the job");
}

// Submits an operation that must be refused on this rank alone.
static int submit_refused(struct test_rank *me, struct nb_op op, struct nb_error *err) {
    *err = (struct nb_error){0};
    return test_try(me, op, err);
}

static void invalid_operations(struct test_rank *me) {
    struct gpu gpu;
    struct buffer buffer;
    struct nb_error err = {0};
    gpu_open(&gpu, me);
    buffer_open(&gpu, &buffer, 16, 4, 1);
    const struct nb_op right = on_device(&gpu, &buffer, test_op("w", NB_OP_ALLREDUCE, NULL));
    struct nb_op op = right;
    op.stream_count = 0;
    CHECK(submit_refused(me, op, &err) == -EINVAL && strstr(err.text, "w: 0 streams") != NULL, "%s", err.text);
    op = right;
    struct CUstream_st *const per_thread = (struct CUstream_st *)(uintptr_t)2;
    op.streams = &per_thread;
    CHECK(submit_refused(me, op, &err) == -EINVAL && strstr(err.text, "use a stream of torch.cuda") != NULL, "%s",
          err.text);
    op = right;
    op.device = FAKE_DEVICES + 1;
    CHECK(submit_refused(me, op, &err) == -ENODEV && strstr(err.text, "there is no device 2") != NULL, "%s", err.text);
    op = right;
    op.kind = NB_OP_BARRIER;
    CHECK(submit_refused(me, op, &err) == -EINVAL, "%s", err.text);
    test_barrier(me, "prepared"); // a capture of one rank forbids the others to allocate memory
    const int registrations = fake->live_objects().registrations;
    fake->capture(gpu.stream, true);
    CHECK(submit_refused(me, right, &err) == -EINVAL &&
              strcmp(err.text, "gradient w was made while its stream is captured into a CUDA graph: keep backward out "
                               "of the capture") == 0,
          "%s", err.text);
    CHECK(fake->live_objects().registrations == registrations, "the device was opened in a capture");
    test_barrier(me, "refused");
    fake->capture(gpu.stream, false);
    test_barrier(me, "released");
    if (me->rank == 0 && me->size > 1) {
        fake->fail_named("cuMemHostRegister", 0, NB_CUDA_CAPTURE_UNSUPPORTED);
        CHECK(submit_refused(me, right, &err) == -EBUSY, "%s", err.text);
    }
    collective(me, &gpu, right, 5, 1); // the name can be used again
    test_barrier(me, "done");
    CHECK(fake->pageable_copies() == 0, "%d copies block", fake->pageable_copies());
    buffer_close(&gpu, &buffer);
    gpu_close(&gpu);
}

// The device is opened by an operation on one stream while another one is captured.
static void first_operation_beside_a_capture(struct test_rank *me) {
    struct gpu gpu;
    struct flight flight;
    struct CUstream_st *captured = NULL;
    char notice[NB_ERROR_TEXT];
    const struct nb_op op = {.kind = NB_OP_ALLREDUCE, .dtype = NB_F32};
    gpu_open(&gpu, me);
    check_success(gpu.driver.stream_create(&captured, NB_CUDA_STREAM_NON_BLOCKING), "cuStreamCreate");
    flight_prepare(me, &gpu, &flight, op, CHUNK, PIECES);
    test_barrier(me, "prepared");
    fake->capture(captured, true);
    flight.work = test_submit(me, flight.op);
    test_barrier(me, "submitted");
    fake->capture(captured, false);
    test_barrier(me, "released");
    flight_end(me, &gpu, &flight);
    CHECK(!nb_job_notice(me->job, notice, sizeof notice), "%s", notice);
    CHECK(fake->refusals() == 0, "a call has ended the capture");
    test_barrier(me, "done");
    CHECK(fake->pageable_copies() == 0, "%d copies block", fake->pageable_copies());
    check_success(gpu.driver.stream_destroy(captured), "cuStreamDestroy");
    gpu_close(&gpu);
}

static void test_first_operation_beside_a_capture(const char *network) {
    struct test_rank template = ranks_on(network, 2);
    template.device_gather_bytes = CHUNK;
    CHECK(run_job(&template, 1, 0, first_operation_beside_a_capture) == 0, "open the job");
}

static void test_refusals(const char *network) {
    struct test_rank template = ranks_on(network, 1);
    CHECK(run_job(&template, 1, 0, invalid_operations) == 0, "open the job");
    template = ranks_on(network, 2);
    CHECK(run_job(&template, 1, 0, invalid_operations) == 0, "open the job");
}

int main(int argc, char **argv) {
    const char *network = argc > 1 ? argv[1] : "tcp";
    const char *seeds = getenv("TEST_SEEDS"); // seeds of the streams' delays
    fake = fake_controls_get();
    if (!test_kinds(network)) {
        return CHECK_SKIPPED;
    }
    test_seeds(network, seeds != NULL ? atoi(seeds) : SEEDS);
    test_each_rule_is_necessary(network);
    test_late_fence_blocks_no_other_operation(network);
    test_priority(network);
    test_a_pass_makes_one_query_for_a_stream(network);
    test_streams(network);
    test_another_stream(network);
    test_mismatch(network);
    test_refusals(network);
    test_first_operation_beside_a_capture(network);
    fake->reset(0, 0);
    return 0;
}
