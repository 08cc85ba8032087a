// Faults of device operations, over the fake CUDA driver. A failed CUDA call ends the job on all ranks, and the error
// names it. A killed rank is an error on the others. Memory that cannot be pinned is used all the same. Also: joined
// ranks and groups.
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../cuda/fake.h"
#include "base/clock.h"
#include "base/dtype.h"
#include "base/error.h"
#include "bootstrap/bootstrap.h"
#include "check.h"
#include "cuda/driver.h"
#include "engine/context.h"
#include "engine/engine.h"
#include "gpu.h"
#include "job.h"
#include "sums.h"

enum { DELAY_NS = 20000, COUNT = 5 * CHUNK / 4 + 3, LONG_MS = 10 * TEST_LIMIT_MS };

static const struct nb_op sum_of_floats = {.kind = NB_OP_ALLREDUCE, .dtype = NB_F32};

// ---- a failed call

struct failing_call {
    const char *symbol;
    const char *message; // of the failure
    bool at_first_use;   // of the device
    bool own_fence;
};

static const struct failing_call failing_calls[] = {
    {"cuStreamIsCapturing", "cuStreamIsCapturing on device 1", false, false},
    {"cuEventCreate", "cuEventCreate on device 1", false, false},
    {"cuEventRecord", "cuEventRecord on device 1", false, false},
    {"cuEventRecord", "cuEventRecord of 4096 bytes on device 1", false, true},
    {"cuEventQuery", "cuEventQuery on device 1", false, false},
    {"cuMemcpyDtoHAsync", "cuMemcpyDtoHAsync of 4096 bytes on device 1", false, false},
    {"cuMemcpyHtoDAsync", "cuMemcpyHtoDAsync of 4096 bytes on device 1", false, false},
    {"cuStreamWaitEvent", "cuStreamWaitEvent on device 1", false, false},
    {"cuCtxGetStreamPriorityRange", "cuCtxGetStreamPriorityRange on device 1", true, false},
    {"cuStreamCreateWithPriority", "cuStreamCreateWithPriority on device 1", true, false},
};

// A call fails on rank 1, the only rank with device 1. Rank 0 may have finished before.
static void failing_call_of_rank_1(struct test_rank *me) {
    const struct failing_call *failing_call = me->arg;
    struct gpu gpu;
    struct flight flight;
    struct CUevent_st *fence = NULL;
    struct nb_error err = {0};
    char text[NB_ERROR_TEXT];
    gpu_open(&gpu, me);
    if (!failing_call->at_first_use) {
        collective(me, &gpu, sum_of_floats, 3, 1);
    }
    flight_prepare(me, &gpu, &flight, sum_of_floats, COUNT, 1);
    check_success(gpu.driver.event_create(&fence, NB_CUDA_EVENT_DISABLE_TIMING), "cuEventCreate");
    check_success(gpu.driver.event_record(fence, gpu.stream), "cuEventRecord");
    flight.op.fence = failing_call->own_fence ? fence : NULL;
    test_barrier(me, "prepared");
    if (me->rank == 1) {
        fake->fail_named(failing_call->symbol, 1, NB_CUDA_OUT_OF_MEMORY);
    }
    int rc = test_try(me, flight.op, &err);
    for (int again = 0; again < 2; again++) {
        snprintf(text, sizeof text, "rank 1: CUDA: %s: CUDA_ERROR_OUT_OF_MEMORY 2 (out of memory)",
                 failing_call->message);
        CHECK(rc == -ENOMEM || (rc == 0 && again == 0 && me->rank == 0), "rank %d, %s: %d %s", me->rank,
              failing_call->message, rc, err.text);
        CHECK(rc == 0 || (strcmp(err.text, text) == 0 && err.peer == 1), "rank %d: %s of rank %d, not: %s", me->rank,
              err.text, err.peer, text);
        err = (struct nb_error){0};
        rc = test_try(me, flight.op, &err);
    }
    check_success(gpu.driver.event_destroy(fence), "cuEventDestroy");
    buffer_close(&gpu, &flight.buffer);
    gpu_close(&gpu);
}

static int test_failed_calls(const char *network) {
    for (size_t i = 0; i < sizeof failing_calls / sizeof failing_calls[0]; i++) {
        struct test_rank template = ranks_on(network, 2);
        struct failing_call failing_call = failing_calls[i];
        template.arg = &failing_call;
        if (run_job(&template, i, DELAY_NS, failing_call_of_rank_1) == CHECK_SKIPPED) {
            return CHECK_SKIPPED;
        }
    }
    return 0;
}

// Rank 1 names a stream of another context than its device's primary one.
static void stream_of_another_context(struct test_rank *me) {
    struct gpu gpu;
    struct gpu other;
    struct flight flight;
    struct nb_error err = {0};
    const struct test_rank next = {.rank = me->rank + 1};
    gpu_open(&gpu, me);
    gpu_open(&other, &next);
    nb_cuda_leave(&other.device);
    flight_prepare(me, &gpu, &flight, sum_of_floats, COUNT, 1);
    flight.op.streams = me->rank == 1 ? &other.stream : &gpu.stream;
    CHECK(test_try(me, flight.op, &err) == -EINVAL && err.peer == 1, "rank %d: %s", me->rank, err.text);
    CHECK(strcmp(err.text, "rank 1: CUDA: cuEventRecord on device 1: the stream is not of the device's primary context "
                           "(400): use streams of torch.cuda, outside of green contexts and of contexts that the "
                           "script makes") == 0,
          "rank %d: %s", me->rank, err.text);
    CHECK(nb_cuda_enter(&other.device, &err) == 0, "%s", err.text);
    gpu_close(&other);
    buffer_close(&gpu, &flight.buffer);
    gpu_close(&gpu);
}

// A failed call in a job of one rank.
static void failing_call_of_one_rank(struct test_rank *me) {
    struct gpu gpu;
    struct flight flight;
    struct nb_error err = {0};
    gpu_open(&gpu, me);
    struct nb_op op = sum_of_floats;
    op.scaled = true;
    op.prescale = 1;
    op.postscale = 0.5;
    flight_prepare(me, &gpu, &flight, op, 7, 1);
    fake->fail_named("cuMemcpyHtoDAsync", 0, NB_CUDA_OUT_OF_MEMORY);
    CHECK(test_try(me, flight.op, &err) == -ENOMEM, "%s", err.text);
    CHECK(strstr(err.text, "rank 0: CUDA: cuMemcpyHtoDAsync of 28 bytes on device 0: ") == err.text, "%s", err.text);
    buffer_close(&gpu, &flight.buffer);
    gpu_close(&gpu);
}

// An operation fails the device after its call has succeeded: only later calls report it.
static void device_fails(struct test_rank *me) {
    struct gpu gpu;
    struct flight flight;
    struct nb_error err = {0};
    int rank = -1;
    gpu_open(&gpu, me);
    collective(me, &gpu, sum_of_floats, 3, 1);
    flight_prepare(me, &gpu, &flight, sum_of_floats, COUNT, 1);
    check_success(gpu.driver.stream_synchronize(gpu.stream), "cuStreamSynchronize");
    test_barrier(me, "prepared");
    if (me->rank == 0) {
        fake->break_operation(5);
    }
    test_barrier(me, "armed");
    int rc = test_try(me, flight.op, &err);
    CHECK(rc == -EIO && sscanf(err.text, "rank %d: CUDA: cu", &rank) == 1 && err.peer == rank, "%d %s", rc, err.text);
    CHECK(strstr(err.text, ": CUDA_ERROR_ILLEGAL_ADDRESS 700 (") != NULL, "%s", err.text);
    free(flight.buffer.host);
}

static void test_broken_device(const char *network) {
    struct test_rank template = ranks_on(network, 2);
    fake->reset(1, 0);
    template.run = device_fails;
    CHECK(test_job(&template) == 0, "open the job");
}

static _Atomic bool captures; // rank 0: which forbids rank 1 to free memory

// The stream of an operation on rank 0 is captured while the operation is under way.
static void stream_captured_under_way(struct test_rank *me) {
    struct gpu gpu;
    struct flight flight;
    struct nb_error err = {0};
    struct nb_op op = sum_of_floats;
    op.name = "weight";
    gpu_open(&gpu, me);
    collective(me, &gpu, sum_of_floats, COUNT, 1);
    flight_prepare(me, &gpu, &flight, op, COUNT, 1);
    check_success(gpu.driver.stream_synchronize(gpu.stream), "cuStreamSynchronize");
    atomic_store(&captures, true);
    test_barrier(me, "prepared");
    struct CUstream_st *out = me->rank == 0 ? engine_stream(&gpu, FAKE_TO_HOST) : NULL;
    if (me->rank == 0) {
        fake->hold(out, true);
    }
    flight.work = test_submit(me, flight.op);
    if (me->rank == 0) {
        fake->capture(gpu.stream, true);
        fake->hold(out, false);
    }
    int rc = test_finish(flight.work, &err);
    if (me->rank == 0) {
        fake->capture(gpu.stream, false);
        atomic_store(&captures, false);
    }
    CHECK((rc == 0 && me->rank == 1) ||
              (rc == -EBUSY && err.peer == 0 &&
               strcmp(err.text, "rank 0: gradient weight was under way when its stream began to be captured into a "
                                "CUDA graph: wait for it before the capture") == 0),
          "rank %d: %d %s", me->rank, rc, err.text);
    CHECK(fake->refusals() == 0, "a call has ended the capture");
    err = (struct nb_error){0};
    rc = test_try(me, flight.op, &err);
    CHECK(rc == -EBUSY, "rank %d goes on: %d %s", me->rank, rc, err.text);
    while (atomic_load(&captures)) {
        (void)sched_yield();
    }
    buffer_close(&gpu, &flight.buffer);
    gpu_close(&gpu);
}

// ---- a killed rank

struct kill_case {
    const char *network;
    enum fake_kind held; // rank 1 is killed while copies of this kind are pending
};

static void rank_is_killed(struct test_rank *me) {
    const struct kill_case *kill_case = me->arg;
    struct gpu gpu;
    struct flight flight;
    struct nb_error err = {0};
    gpu_open(&gpu, me);
    collective(me, &gpu, sum_of_floats, COUNT, 1);
    flight_prepare(me, &gpu, &flight, sum_of_floats, COUNT, 2);
    test_barrier(me, "prepared");
    if (me->rank == 1) {
        struct CUstream_st *held = engine_stream(&gpu, kill_case->held);
        fake->hold(held, true);
        flight.work = test_submit(me, flight.op);
        while (fake->pending(held) == 0) {
            (void)sched_yield();
        }
        (void)raise(SIGKILL);
    }
    int rc = test_try(me, flight.op, &err);
    CHECK(rc == NB_EPEER && err.peer == 1, "rank %d: %d %s", me->rank, rc, err.text);
    rc = test_try(me, flight.op, &err);
    CHECK(rc == NB_EPEER, "rank %d again: %d %s", me->rank, rc, err.text);
    buffer_copy(&gpu, &flight.buffer, true); // the survivor can use its memory and streams
    buffer_close(&gpu, &flight.buffer);
    gpu_close(&gpu);
}

// Runs a job whose ranks, except rank 0, are processes.
static int run_killed_job(struct kill_case *kill_case) {
    enum { SIZE = 3 };
    struct nb_listener listener = {.fd = -1};
    struct nb_error err = {0};
    struct nb_boot_config config = {.size = SIZE, .ifname = "lo", .secret = test_secret, .secret_bytes = 32};
    struct test_rank me = ranks_on(kill_case->network, SIZE);
    pid_t pids[SIZE] = {0};
    int pipes[SIZE][2];
    fake->reset(1, DELAY_NS);
    me.run = rank_is_killed;
    me.timeout_ms = LONG_MS; // too long for the deadline to detect the death
    me.arg = kill_case;
    for (int r = 1; r < SIZE; r++) {
        CHECK(pipe(pipes[r]) == 0, "pipe: %m");
        pids[r] = fork();
        CHECK(pids[r] >= 0, "fork: %m");
        if (pids[r] == 0) {
            CHECK(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0, "prctl: %m");
            CHECK(read(pipes[r][0], me.address, sizeof me.address) == sizeof me.address, "read the address");
            me.rank = r;
            test_rank_main(&me);
            CHECK(me.rc == 0 || me.rc == NB_ENOLIB, "rank %d: %s", r, me.err.text);
            if (me.rc == 0) {
                check_no_live_objects();
            }
            fake->reset(0, 0); // ends the threads of its streams
            _exit(0);
        }
    }
    CHECK(nb_listener_open(&listener, &config, NULL, &err) == 0, "listen: %s", err.text);
    nb_sock_format(&listener.addr, me.address);
    me.listener = &listener;
    for (int r = 1; r < SIZE; r++) {
        CHECK(write(pipes[r][1], me.address, sizeof me.address) == sizeof me.address, "write: %m");
    }
    test_rank_main(&me);
    CHECK(me.rc == 0 || me.rc == NB_ENOLIB, "rank 0: %s", me.err.text);
    for (int r = 1; r < SIZE; r++) {
        int status;
        CHECK(waitpid(pids[r], &status, 0) == pids[r], "wait: %m");
        bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
        bool ended = WIFEXITED(status) && WEXITSTATUS(status) == 0;
        CHECK(r == 1 && me.rc == 0 ? killed : ended, "rank %d ended with status %x", r, (unsigned)status);
        (void)close(pipes[r][0]);
        (void)close(pipes[r][1]);
    }
    nb_listener_close(&listener);
    if (me.rc == 0) {
        check_no_live_objects();
    }
    return me.rc == NB_ENOLIB ? CHECK_SKIPPED : 0;
}

static int test_killed_rank(const char *network) {
    struct kill_case out = {network, FAKE_TO_HOST};
    struct kill_case back = {network, FAKE_TO_DEVICE};
    int rc = run_killed_job(&out);
    return rc != 0 ? rc : run_killed_job(&back);
}

// ---- memory that cannot be pinned

static int count_notices(struct test_rank *me, const char *template) {
    char text[NB_ERROR_TEXT];
    int count = 0;
    while (nb_job_notice(me->job, text, sizeof text)) {
        count += strstr(text, template) == text;
    }
    return count;
}

static void memory_not_pinned(struct test_rank *me) {
    struct gpu gpu;
    struct flight flight;
    char text[NB_ERROR_TEXT];
    gpu_open(&gpu, me);
    flight_prepare(me, &gpu, &flight, sum_of_floats, COUNT, 2);
    if (me->rank == 0) {
        fake->fail_named("cuMemHostRegister", 0, NB_CUDA_OUT_OF_MEMORY);
    }
    flight.work = test_submit(me, flight.op);
    flight_end(me, &gpu, &flight);
    for (int i = 0; i < KINDS; i++) {
        const struct nb_op op = {.kind = kinds[i], .dtype = NB_F64};
        collective(me, &gpu, op, COUNT, 1);
    }
    snprintf(text, sizeof text,
             "staging memory cannot be pinned, so copies of device 0 block (CUDA: cuMemHostRegister of %d bytes on "
             "device 0: CUDA_ERROR_OUT_OF_MEMORY 2 (out of memory))",
             CHUNK * CHUNKS);
    int notices = count_notices(me, text);
    CHECK(notices == (me->rank == 0), "rank %d: %d notices", me->rank, notices);
    test_barrier(me, "checked");
    CHECK(fake->pageable_copies() > 0, "no copy was pageable");
    gpu_close(&gpu);
}

// ---- joined ranks

static struct nb_work *join_submit(struct test_rank *me, int32_t *last) {
    struct nb_segment all = {.base = last, .bytes = sizeof *last};
    struct nb_op join = test_op("join", NB_OP_JOIN, &all);
    join.dtype = NB_I32;
    return test_submit(me, join);
}

// Rank r runs 2 * (r + 1) all-reduces and then joins.
static void ranks_join(struct test_rank *me) {
    struct gpu gpu;
    gpu_open(&gpu, me);
    for (int round = 0; round < 2; round++) {
        for (int k = 0; k < 2 * (me->rank + 1); k++) {
            struct flight flight;
            char name[32];
            struct nb_op op = sum_of_floats;
            snprintf(name, sizeof name, "sum.%d", k);
            op.name = name;
            const int zeros = k / 2; // ranks below this one have joined
            flight_prepare(me, &gpu, &flight, op, k % 2 == 0 ? COUNT : 1, PIECES);
            test_done(me, test_submit(me, flight.op));
            buffer_copy(&gpu, &flight.buffer, true);
            check_success(gpu.driver.stream_synchronize(gpu.stream), "cuStreamSynchronize");
            for (size_t i = 0; i < flight.count; i++) {
                double want = 0;
                for (int r = zeros; r < me->size; r++) {
                    want += input_value(r, i);
                }
                double got = element_get((const char *)flight.buffer.host + i * sizeof(float), NB_F32);
                CHECK(got == want, "rank %d, %s: [%zu] is %g, not %g", me->rank, name, i, got, want);
            }
            buffer_close(&gpu, &flight.buffer);
        }
        int32_t last = -1;
        test_done(me, join_submit(me, &last));
        CHECK(last == me->size - 1, "rank %d joined last", last);
    }
    gpu_close(&gpu);
}

// Waits until the progress owner has taken everything that this rank has submitted.
static void await_taken(const struct test_rank *me) {
    int64_t until = nb_now_ns() + (int64_t)TEST_LIMIT_MS * 1000000;
    while (atomic_load(&me->job->inbox.filled)) {
        CHECK(nb_now_ns() < until, "rank %d: no progress", me->rank);
        sched_yield();
    }
}

// Submits an all-reduce whose fence is not reached, and joins. The others contribute zeros.
static void sum_and_join(struct test_rank *me, struct gpu *gpu) {
    struct flight flight;
    int32_t last = -1;
    struct nb_op op = sum_of_floats;
    op.name = "own";
    fake->hold(gpu->stream, true);
    flight_prepare(me, gpu, &flight, op, COUNT, PIECES);
    flight.work = test_submit(me, flight.op);
    struct nb_work *joins = join_submit(me, &last);
    await_taken(me);
    fake->hold(gpu->stream, false);
    test_done(me, flight.work);
    test_done(me, joins);
    buffer_copy(gpu, &flight.buffer, true);
    check_success(gpu->driver.stream_synchronize(gpu->stream), "cuStreamSynchronize");
    for (size_t i = 0; i < flight.count; i++) {
        double got = element_get((const char *)flight.buffer.host + i * sizeof(float), NB_F32);
        CHECK(got == input_value(me->rank, i), "rank %d: [%zu] is %g, not %d", me->rank, i, got,
              input_value(me->rank, i));
    }
    buffer_close(gpu, &flight.buffer);
}

// Each rank joins before the fence of its own all-reduce is reached: the all-reduce comes first. It joins before the
// others or after them.
static void join_behind_unreached_fence(struct test_rank *me) {
    struct gpu gpu;
    gpu_open(&gpu, me);
    for (int joiner = 0; joiner < me->size; joiner++) {
        for (int joins_last = 0; joins_last < 2; joins_last++) {
            if ((me->rank == joiner) == joins_last) {
                test_barrier(me, "in order"); // it ends when the other ranks have joined
            }
            if (me->rank == joiner) {
                sum_and_join(me, &gpu);
            } else {
                int32_t last = -1;
                test_done(me, join_submit(me, &last));
                CHECK(!joins_last || last == joiner, "rank %d joined last", last);
            }
            test_barrier(me, "together");
        }
    }
    gpu_close(&gpu);
}

// Operations that need data of a joined rank are refused, and the job continues.
static void operations_refused_after_join(struct test_rank *me) {
    struct gpu gpu;
    int32_t last = -1;
    gpu_open(&gpu, me);
    for (int k = 0; k < KINDS && me->rank > 0; k++) {
        struct flight flight;
        struct nb_error err = {0};
        const struct nb_op op = {.kind = kinds[k], .dtype = NB_F32, .name = "needs all"};
        if (kinds[k] == NB_OP_ALLREDUCE) {
            continue;
        }
        flight_prepare(me, &gpu, &flight, op, COUNT, 1);
        int rc = test_try(me, flight.op, &err);
        CHECK(rc == NB_EMISMATCH && strstr(err.text, "after rank 0 has joined") != NULL, "%d: %s", rc, err.text);
        buffer_close(&gpu, &flight.buffer);
    }
    test_done(me, join_submit(me, &last));
    collective(me, &gpu, sum_of_floats, COUNT, 1);
    gpu_close(&gpu);
}

// ---- groups

static const struct {
    uint32_t id;
    int count;
    int ranks[3];
} groups[] = {{5, 3, {0, 1, 2}}, {6, 2, {1, 3}}, {7, 2, {0, 3}}};
enum { GROUPS = sizeof groups / sizeof groups[0] };

static struct test_rank member_of(struct test_rank *me, int group) {
    struct test_rank member = *me;
    member.comm = nb_comm_find(me->job, groups[group].id);
    member.rank = member.comm != NULL ? nb_comm_rank(member.comm) : -1;
    member.size = groups[group].count;
    return member;
}

// Concurrent operations with the same name in all groups and in the job.
static void same_name_in_all_groups(struct test_rank *me) {
    struct gpu gpu;
    gpu_open(&gpu, me);
    for (int g = 0; g < GROUPS; g++) {
        for (int i = 0; i < groups[g].count; i++) {
            struct nb_error err = {0};
            if (groups[g].ranks[i] == me->rank) {
                CHECK(nb_comm_make(me->job, groups[g].id, groups[g].ranks, groups[g].count, &err) == 0, "%s", err.text);
            }
        }
    }
    for (int k = 0; k < KINDS; k++) {
        struct flight flights[GROUPS + 1];
        struct test_rank members[GROUPS + 1];
        for (int i = 0; i <= GROUPS; i++) {
            const int g = (i + me->rank) % (GROUPS + 1); // a different order on each rank
            const struct nb_op op = {.kind = kinds[k], .dtype = NB_F32, .name = "one name", .root = 1};
            members[g] = g == GROUPS ? *me : member_of(me, g);
            if (members[g].rank >= 0) {
                flight_prepare(&members[g], &gpu, &flights[g], op, COUNT + (size_t)g, 1 + g % PIECES);
                flights[g].work = test_submit(&members[g], flights[g].op);
            }
        }
        for (int g = 0; g <= GROUPS; g++) {
            if (members[g].rank >= 0) {
                flight_end(&members[g], &gpu, &flights[g]);
            }
        }
    }
    gpu_close(&gpu);
}

static void run_seeds(const char *network, int size, int chunks, void (*run)(struct test_rank *me)) {
    for (uint64_t seed = 0; seed < 3; seed++) {
        struct test_rank template = ranks_on(network, size);
        template.device_chunks = chunks;
        CHECK(run_job(&template, seed, DELAY_NS, run) == 0, "open the job");
    }
}

int main(int argc, char **argv) {
    const char *network = argc > 1 ? argv[1] : "tcp";
    fake = fake_controls_get();
    int rc = test_killed_rank(network);
    if (rc != 0 || (rc = test_failed_calls(network)) != 0) {
        return rc;
    }
    run_seeds(network, 2, CHUNKS, stream_of_another_context);
    run_seeds(network, 1, CHUNKS, failing_call_of_one_rank);
    test_broken_device(network);
    run_seeds(network, 2, CHUNKS, stream_captured_under_way);
    run_seeds(network, 2, CHUNKS, memory_not_pinned);
    run_seeds(network, 3, CHUNKS, ranks_join);
    run_seeds(network, 3, CHUNKS, join_behind_unreached_fence);
    run_seeds(network, 3, CHUNKS, operations_refused_after_join);
    run_seeds(network, 4, 1, same_name_in_all_groups);
    run_seeds(network, 4, CHUNKS, same_name_in_all_groups);
    fake->reset(0, 0);
    return 0;
}
