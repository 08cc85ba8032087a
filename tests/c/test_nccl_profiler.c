// NCCL profiler plugin, called as NCCL calls it. The test controls the clock, so recorded times are checked exactly.
// Each case runs in its own process, because a process has one profiler.
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../nccl/profiled.h"
#include "check.h"
#include "trace/event.h"
#include "trace/ring.h"

enum { EVENTS = 1 << 16, MS = 1000 * 1000, PATH_BYTES = 64, THREADS = 4, ROUNDS = 300, IN_FLIGHT = 8, POOL = 4096 };

// The simulated clock, and the functions that the profiler may not call after it is opened.
static _Atomic int64_t clock_ns;
static _Thread_local bool forbidden;
int __wrap_clock_gettime(clockid_t id, struct timespec *to);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void __wrap_free(void *memory);
int __wrap_pthread_mutex_lock(pthread_mutex_t *mutex);
void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void __real_free(void *memory);
int __real_pthread_mutex_lock(pthread_mutex_t *mutex);

int __wrap_clock_gettime(clockid_t id, struct timespec *to) {
    (void)id;
    int64_t now_ns = atomic_load(&clock_ns);
    *to = (struct timespec){.tv_sec = now_ns / 1000000000, .tv_nsec = now_ns % 1000000000};
    return 0;
}

void *__wrap_malloc(size_t bytes) {
    CHECK(!forbidden, "malloc");
    return __real_malloc(bytes);
}

void *__wrap_calloc(size_t count, size_t bytes) {
    CHECK(!forbidden, "calloc");
    return __real_calloc(count, bytes);
}

void __wrap_free(void *memory) {
    CHECK(!forbidden, "free");
    __real_free(memory);
}

int __wrap_pthread_mutex_lock(pthread_mutex_t *mutex) {
    CHECK(!forbidden, "pthread_mutex_lock");
    return __real_pthread_mutex_lock(mutex);
}

static void advance_clock(int64_t ms) {
    atomic_fetch_add(&clock_ns, ms * MS);
}

// Trace file of this process.
static char path[PATH_BYTES];

struct recording {
    const struct nb_ring_header *header;
    const struct nb_event *events;
};

static struct recording recording_open(void) {
    struct stat status;
    FILE *file = fopen(path, "rb");
    CHECK(file != NULL && fstat(fileno(file), &status) == 0, "%s: %s", path, strerror(errno));
    const char *base = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_SHARED, fileno(file), 0);
    CHECK(base != MAP_FAILED, "mmap");
    (void)fclose(file);
    return (struct recording){.header = (const void *)base, .events = (const void *)(base + NB_RING_HEADER)};
}

static uint64_t event_count(const struct recording *recording) {
    return atomic_load(&recording->header->taken);
}

// Returns the nth event of a kind, or NULL.
static const struct nb_event *find_event(const struct recording *recording, enum nb_event_kind kind, int n) {
    for (uint64_t i = 0; i < event_count(recording) && i < EVENTS; i++) {
        if (recording->events[i].kind == kind && n-- == 0) {
            return &recording->events[i];
        }
    }
    return NULL;
}

static const struct nb_event *expect_event(const struct recording *recording, enum nb_event_kind kind, int n) {
    const struct nb_event *event = find_event(recording, kind, n);
    CHECK(event != NULL, "fewer than %d events of kind %d", n + 1, (int)kind);
    return event;
}

static void log_nothing(int level, unsigned long subsystems, const char *file, int line, const char *fmt, ...) {
    (void)level;
    (void)subsystems;
    (void)file;
    (void)line;
    (void)fmt;
}

static struct profiled table_of(int version) {
    const void *const tables[] = {&ncclProfiler_v4, &ncclProfiler_v5, &ncclProfiler_v6, &ncclProfiler_v7};
    return (struct profiled){.version = version, .table = tables[version - NCCL_PROFILER_OLDEST]};
}

static struct profiled profiler_open(int version) {
    struct profiled nccl = table_of(version);
    CHECK(profiled_init(&nccl, 0xfeedu, "data parallel", 2, 1, log_nothing) == NCCL_SUCCESS, "init");
    CHECK(nccl.ctx != NULL, "no context");
    return nccl;
}

static void check_step(const struct nb_event *step, int64_t first_ms, int64_t second_ms, int64_t last_ms) {
    CHECK((int64_t)step->c == first_ms * MS && (int64_t)step->d == second_ms * MS && (int64_t)step->e == last_ms * MS,
          "waits of %llu, %llu and %llu ns", (unsigned long long)step->c, (unsigned long long)step->d,
          (unsigned long long)step->e);
}

// A send waits for the GPU, the peer and the wire; a receive waits for the arrival, the flush and the GPU. All waits
// are recorded exactly.
static void test_waits(int version) {
    struct profiled nccl = profiler_open(version);
    CHECK(nccl.mask != 0, "no events requested");
    forbidden = true;
    void *group = profiled_group(&nccl);
    void *task = profiled_all_reduce(&nccl, group, 7, 1000, 2, 99);
    profiled_stop(&nccl, task); // enqueued
    void *send = profiled_op(&nccl, task, 1, 0, 1, getpid());
    advance_clock(1);
    void *step = profiled_step(&nccl, send, 3);
    profiled_state(&nccl, step, NCCL_STATE_SEND_GPU_WAIT, 111);
    advance_clock(40);
    profiled_state(&nccl, step, NCCL_STATE_SEND_PEER_WAIT, 111);
    advance_clock(15);
    profiled_state(&nccl, step, NCCL_STATE_SEND_PEER_WAIT, 111); // NCCL retries
    advance_clock(5);
    profiled_state(&nccl, step, NCCL_STATE_SEND_WAIT, 4000);
    advance_clock(30);
    profiled_stop(&nccl, step);
    profiled_stop(&nccl, send);
    void *receive = profiled_op(&nccl, task, 1, 0, 0, getpid());
    step = profiled_step(&nccl, receive, 4);
    profiled_state(&nccl, step, NCCL_STATE_RECV_WAIT, 111);
    advance_clock(25);
    profiled_state(&nccl, step, NCCL_STATE_RECV_FLUSH_WAIT, 2000);
    advance_clock(5);
    profiled_state(&nccl, step, NCCL_STATE_RECV_GPU_WAIT, 2000);
    advance_clock(10);
    profiled_stop(&nccl, step);
    profiled_stop(&nccl, receive);
    void *kernel = profiled_kernel(&nccl, task, 1, 5000);
    advance_clock(2);
    profiled_kernel_stop(&nccl, kernel, 95000);
    forbidden = false;

    struct recording recording = recording_open();
    const struct nb_event *comm = expect_event(&recording, NB_EV_NCCL_COMM, 0);
    CHECK(comm->key == 0xfeedu && comm->b == (1 | (uint64_t)2 << 32) && memcmp(&comm->d, "data parallel", 13) == 0,
          "wrong event of the communicator");
    const struct nb_event *event = expect_event(&recording, NB_EV_NCCL_TASK, 0);
    uint64_t number = event->key;
    CHECK(number != 0 && event->b == 4000 && event->d == 7, "wrong event of the task");
    CHECK(event->c == (1 | 7 << 8 | 2 << 16 | 3 << 24 | (uint64_t)2 << 32), "wrong description: %llx",
          (unsigned long long)event->c);
    CHECK(event->e == (version == 7 ? 99 : 0), "wrong tag: %llu", (unsigned long long)event->e);
    const struct nb_event *sent = expect_event(&recording, NB_EV_NCCL_STEP, 0);
    check_step(sent, 40, 20, 30);
    CHECK(sent->key == number && sent->a == 3 && sent->b == (1 | 1 << 8 | 4000 << 16), "wrong event of the send step");
    const struct nb_event *received = expect_event(&recording, NB_EV_NCCL_STEP, 1);
    check_step(received, 25, 5, 10);
    CHECK(received->key == number && received->a == 4 && received->b == (1 | 2000 << 16),
          "wrong event of the receive step");
    const struct nb_event *channel = expect_event(&recording, NB_EV_NCCL_KERNEL, 0);
    CHECK(channel->key == number && channel->a == 1 && channel->c == 5000 && channel->d == 95000,
          "wrong event of the kernel");
    CHECK(channel->b == 2 * MS, "wrong duration on the host's clock");
    CHECK(find_event(&recording, NB_EV_NCCL_STEP, 2) == NULL && event_count(&recording) == 5,
          "unexpected events were recorded");
    CHECK(profiled_finalize(&nccl) == NCCL_SUCCESS, "finalize");
}

// Steps overlap, because NCCL keeps several messages in flight. Each step has its own waits.
static void test_overlapping_steps(int version) {
    struct profiled nccl = profiler_open(version);
    void *task = profiled_all_reduce(&nccl, profiled_group(&nccl), 0, 8, 1, 0);
    void *op = profiled_op(&nccl, task, 0, 0, 1, getpid());
    void *steps[IN_FLIGHT];
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < IN_FLIGHT; i++) {
            steps[i] = profiled_step(&nccl, op, round * IN_FLIGHT + i);
            profiled_state(&nccl, steps[i], NCCL_STATE_SEND_GPU_WAIT, 0);
        }
        for (int i = 0; i < IN_FLIGHT; i++) {
            advance_clock(1);
            profiled_state(&nccl, steps[i], NCCL_STATE_SEND_PEER_WAIT, 0);
            profiled_state(&nccl, steps[i], NCCL_STATE_SEND_WAIT, 8);
        }
        for (int i = 0; i < IN_FLIGHT; i++) {
            advance_clock(1);
            profiled_stop(&nccl, steps[i]);
        }
    }
    struct recording recording = recording_open();
    for (int n = 0; n < 3 * IN_FLIGHT; n++) {
        int i = n % IN_FLIGHT;
        const struct nb_event *step = expect_event(&recording, NB_EV_NCCL_STEP, n);
        CHECK(step->a == (uint64_t)n, "step %llu is event %d", (unsigned long long)step->a, n);
        check_step(step, i + 1, 0, IN_FLIGHT);
    }
}

// NCCL restarts the step at each attempt to post its receive. The attempts are recorded as one step with one wait.
static void test_repeated_receive_attempts(int version) {
    struct profiled nccl = profiler_open(version);
    void *task = profiled_all_reduce(&nccl, profiled_group(&nccl), 0, 8, 1, 0);
    void *op = profiled_op(&nccl, task, 0, 0, 0, getpid());
    void *step = profiled_step(&nccl, op, 0);
    advance_clock(3);
    step = profiled_step(&nccl, op, 0);
    advance_clock(4);
    profiled_state(&nccl, step, NCCL_STATE_RECV_WAIT, 0);
    advance_clock(5);
    profiled_state(&nccl, step, NCCL_STATE_RECV_FLUSH_WAIT, 32);
    profiled_state(&nccl, step, NCCL_STATE_RECV_GPU_WAIT, 32);
    advance_clock(6);
    profiled_stop(&nccl, step);
    struct recording recording = recording_open();
    check_step(expect_event(&recording, NB_EV_NCCL_STEP, 0), 12, 0, 6);
    CHECK(find_event(&recording, NB_EV_NCCL_STEP, 1) == NULL, "recorded twice");
}

// With PXN, a proxy moves data that another process enqueued, whose context and parent handle mean nothing in this
// process. The other process may have the same id, in another namespace.
static void test_task_of_another_process(int version) {
    struct profiled nccl = profiler_open(version);
    struct profiled other = nccl;
    const pid_t pids[] = {getpid() + 1, getpid()};
    other.ctx = (void *)(uintptr_t)0xdead00000040u; // no address of this process
    void *task = profiled_all_reduce(&nccl, profiled_group(&nccl), 0, 8, 1, 0);
    struct recording recording = recording_open();
    for (int i = 0; i < 2; i++) {
        void *op = profiled_op(&other, task, 0, 0, 1, pids[i]);
        void *step = profiled_step(&other, op, 0);
        advance_clock(1);
        profiled_stop(&other, step);
        profiled_stop(&other, op);
        const struct nb_event *event = expect_event(&recording, NB_EV_NCCL_STEP, i);
        CHECK(event->key == 0, "attributed to a task of this process");
        check_step(event, 1, 0, 0); // without reported states, all time counts as the first wait
    }
    CHECK(profiled_kernel(&other, task, 0, 1) == NULL && profiled_group(&other) == NULL,
          "an event of another process's communicator got a handle");
    CHECK(profiled_finalize(&other) == NCCL_SUCCESS, "finalize");
    CHECK(profiled_group(&nccl) != NULL, "another process's finalize closed the communicator");
}

// Calls with invalid handles are ignored: handles of ended events, random numbers, and NULL parents.
static void test_invalid_handles(int version) {
    struct profiled nccl = profiler_open(version);
    void *task = profiled_all_reduce(&nccl, profiled_group(&nccl), 0, 8, 1, 0);
    void *op = profiled_op(&nccl, task, 0, 0, 1, getpid());
    void *step = profiled_step(&nccl, op, 0);
    profiled_stop(&nccl, step);
    profiled_stop(&nccl, step);
    profiled_stop(&nccl, op);
    profiled_state(&nccl, step, NCCL_STATE_SEND_WAIT, 8);
    profiled_stop(&nccl, step);
    profiled_stop(&nccl, op);
    CHECK(profiled_step(&nccl, op, 1) == NULL && profiled_step(&nccl, NULL, 1) == NULL,
          "a step without an operation got a handle");
    CHECK(profiled_step(&nccl, task, 1) == NULL, "a step of a collective got a handle");
    for (uintptr_t handle = 0; handle < 1 << 18; handle++) {
        profiled_state(&nccl, (void *)(handle * 61), NCCL_STATE_KERNEL_STOP, 8);
        (void)profiled_table(&nccl)->stop_event((void *)(handle * 61));
    }
    CHECK(profiled_table(&nccl)->record_state(NULL, NCCL_STATE_SEND_WAIT, NULL) == NCCL_SUCCESS,
          "record_state of NULL failed");
    struct recording recording = recording_open();
    CHECK(find_event(&recording, NB_EV_NCCL_STEP, 1) == NULL, "a step was recorded twice");
}

// An operation beyond the limit is dropped and counted if all others are in use. NCCL gets a NULL handle and no error.
static void test_too_many_operations(int version) {
    struct profiled nccl = profiler_open(version);
    static void *ops[POOL];
    void *task = profiled_all_reduce(&nccl, profiled_group(&nccl), 0, 8, 1, 0);
    for (int i = 0; i < POOL; i++) {
        ops[i] = profiled_op(&nccl, task, 0, 0, 1, getpid());
        CHECK(profiled_step(&nccl, ops[i], 0) != NULL, "operation %d was dropped", i);
    }
    struct recording recording = recording_open();
    uint64_t before = event_count(&recording);
    CHECK(profiled_op(&nccl, task, 0, 0, 1, getpid()) == NULL, "an operation beyond the limit got a handle");
    CHECK(event_count(&recording) == before + 1 && recording.events[before].kind == NB_EV_NONE,
          "the drop was not counted");
    profiled_stop(&nccl, ops[17]);
    CHECK(profiled_op(&nccl, task, 0, 0, 1, getpid()) != NULL, "no room after one has ended");

    // An aborted communicator does not end its operations; closing it releases them.
    CHECK(profiled_finalize(&nccl) == NCCL_SUCCESS, "finalize");
    nccl = profiler_open(version);
    for (int i = 0; i < POOL; i++) {
        void *op = profiled_op(&nccl, NULL, 0, 0, 1, getpid());
        CHECK(profiled_step(&nccl, op, 0) != NULL, "no room after the communicator was closed");
    }

    // Those of other processes are released with the last communicator of this one.
    CHECK(profiled_finalize(&nccl) == NCCL_SUCCESS, "finalize");
    nccl = profiler_open(version);
    for (int i = 0; i < POOL; i++) {
        void *op = profiled_op(&nccl, NULL, 0, 0, 1, getpid() + 1);
        CHECK(profiled_step(&nccl, op, 0) != NULL, "no room for another process's operation");
    }
    CHECK(profiled_finalize(&nccl) == NCCL_SUCCESS, "finalize");
    nccl = profiler_open(version);
    CHECK(profiled_op(&nccl, NULL, 0, 0, 1, getpid()) != NULL, "no room after the last communicator was closed");
}

// NCCL ends the operations of its network transports only. Those of the others make room, the oldest first.
static void test_operations_that_never_end(int version) {
    struct profiled nccl = profiler_open(version);
    void *task = profiled_all_reduce(&nccl, profiled_group(&nccl), 0, 8, 1, 0);
    void *moving = profiled_op(&nccl, task, 0, 0, 1, getpid());
    void *step = profiled_step(&nccl, moving, 0);
    void *idle = profiled_op(&nccl, task, 1, 0, 1, getpid());
    for (int i = 0; i < 2 * POOL; i++) {
        CHECK(profiled_op(&nccl, task, 2, 0, 1, getpid()) != NULL, "operation %d was dropped", i);
    }
    CHECK(profiled_step(&nccl, idle, 0) == NULL, "the oldest operation without a step kept its room");
    void *newest = profiled_op(&nccl, task, 3, 0, 1, getpid());
    CHECK(profiled_step(&nccl, newest, 0) != NULL, "the newest operation has no room");
    profiled_stop(&nccl, idle);
    advance_clock(2);
    profiled_stop(&nccl, step);
    struct recording recording = recording_open();
    const struct nb_event *event = expect_event(&recording, NB_EV_NCCL_STEP, 0);
    CHECK((event->b & 0xff) == 0 && event->c == 2 * MS, "the wrong step was recorded");
}

// A handle of an ended event does not reach the event that has its room now.
static void test_reused_room(int version) {
    struct profiled nccl = profiler_open(version);
    void *task = profiled_all_reduce(&nccl, profiled_group(&nccl), 0, 8, 1, 0);
    void *old_op = profiled_op(&nccl, task, 0, 0, 1, getpid());
    void *old_step = profiled_step(&nccl, old_op, 0);
    void *old_kernel = profiled_kernel(&nccl, task, 0, 1);
    profiled_stop(&nccl, old_step);
    profiled_stop(&nccl, old_op);
    profiled_kernel_stop(&nccl, old_kernel, 2);
    void *op = profiled_op(&nccl, task, 0, 0, 1, getpid());
    void *step = profiled_step(&nccl, op, 0);
    void *kernel = profiled_kernel(&nccl, task, 0, 3);
    CHECK(op != old_op && step != old_step && kernel != old_kernel, "handles repeat");
    CHECK(profiled_step(&nccl, old_op, 1) == NULL, "an ended operation got a step");
    profiled_kernel_stop(&nccl, old_kernel, 4);
    profiled_stop(&nccl, old_step);
    profiled_stop(&nccl, old_op);
    advance_clock(1);
    profiled_stop(&nccl, step);
    profiled_kernel_stop(&nccl, kernel, 5);
    struct recording recording = recording_open();
    check_step(expect_event(&recording, NB_EV_NCCL_STEP, 1), 1, 0, 0);
    const struct nb_event *channel = expect_event(&recording, NB_EV_NCCL_KERNEL, 1);
    CHECK(channel->c == 3 && channel->d == 5, "wrong event of the kernel");
}

// A communicator that closes leaves the operations of the others.
static void test_closing_beside_another(int version) {
    struct profiled first = profiler_open(version);
    void *old = profiled_op(&first, NULL, 0, 0, 1, getpid());
    profiled_stop(&first, old);
    struct profiled second = profiler_open(version);
    void *op = profiled_op(&second, NULL, 0, 0, 1, getpid()); // in the room of the first one's
    CHECK(profiled_finalize(&first) == NCCL_SUCCESS, "finalize");
    CHECK(profiled_step(&second, op, 0) != NULL, "the operation is gone");
    CHECK(profiled_finalize(&first) == NCCL_SUCCESS, "finalize of a closed communicator");
    struct profiled third = profiler_open(version); // in the room of the first communicator
    CHECK(third.ctx != first.ctx && profiled_group(&first) == NULL, "contexts repeat");
    CHECK(profiled_group(&third) != NULL, "no events of the third communicator");
}

static void *open_and_close(void *arg) {
    const int version = *(const int *)arg;
    for (int round = 0; round < ROUNDS / 10; round++) {
        struct profiled nccl = profiler_open(version);
        void *op = profiled_op(&nccl, NULL, 0, 0, 1, getpid());
        CHECK(profiled_step(&nccl, op, 0) != NULL, "an operation is gone");
        CHECK(profiled_finalize(&nccl) == NCCL_SUCCESS, "finalize");
    }
    return NULL;
}

struct worker {
    struct profiled nccl;
    int rank;
};

static void *work(void *arg) {
    struct worker *worker = arg;
    const struct profiled *nccl = &worker->nccl;
    for (int round = 0; round < ROUNDS; round++) {
        void *task = profiled_all_reduce(nccl, profiled_group(nccl), (uint64_t)round, 8, worker->rank, 0);
        void *op = profiled_op(nccl, task, worker->rank, worker->rank, 1, getpid());
        void *kernel = profiled_kernel(nccl, task, worker->rank, (uint64_t)round);
        void *step = profiled_step(nccl, op, round);
        profiled_state(nccl, step, NCCL_STATE_SEND_WAIT, (size_t)worker->rank);
        profiled_stop(nccl, step);
        profiled_stop(nccl, op);
        profiled_kernel_stop(nccl, kernel, (uint64_t)round);
        profiled_stop(nccl, task);
    }
    return NULL;
}

// Each communicator has its own thread. Steps are attributed to the right communicator.
static void test_several_threads(int version) {
    struct worker workers[THREADS];
    pthread_t threads[THREADS];
    uint64_t comms[THREADS];
    for (int i = 0; i < THREADS; i++) {
        workers[i] = (struct worker){.nccl = profiler_open(version), .rank = i};
    }
    for (int i = 0; i < THREADS; i++) {
        CHECK(pthread_create(&threads[i], NULL, work, &workers[i]) == 0, "thread");
    }
    for (int i = 0; i < THREADS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0, "join");
    }
    struct recording recording = recording_open();
    CHECK(event_count(&recording) == THREADS + THREADS * ROUNDS * 3, "%llu events",
          (unsigned long long)event_count(&recording));
    static uint64_t comm_of[EVENTS];
    for (int i = 0; i < THREADS; i++) {
        comms[i] = expect_event(&recording, NB_EV_NCCL_COMM, i)->a;
    }
    for (int n = 0; n < THREADS * ROUNDS; n++) {
        const struct nb_event *task = expect_event(&recording, NB_EV_NCCL_TASK, n);
        comm_of[task->key] = task->a;
        CHECK((task->c >> 32) < THREADS && comms[task->c >> 32] == task->a,
              "a task is attributed to another communicator");
    }
    for (int n = 0; n < THREADS * ROUNDS; n++) {
        const struct nb_event *step = expect_event(&recording, NB_EV_NCCL_STEP, n);
        CHECK(comm_of[step->key] == comms[step->b & 0xff], "a step is attributed to another communicator");
    }
}

// Threads that leave operations to the closing of their communicators: each keeps its own until then.
static void test_closing_in_threads(int version) {
    struct worker worker = {.nccl = profiler_open(version), .rank = 0};
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) {
        int failed = i == 0 ? pthread_create(&threads[i], NULL, work, &worker)
                            : pthread_create(&threads[i], NULL, open_and_close, &version);
        CHECK(failed == 0, "thread");
    }
    for (int i = 0; i < THREADS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0, "join");
    }
    struct recording recording = recording_open();
    CHECK(find_event(&recording, NB_EV_NCCL_STEP, ROUNDS - 1) != NULL, "steps of the open communicator are missing");
}

// A forked child records nothing.
static void test_forked_child(int version) {
    struct profiled nccl = profiler_open(version);
    void *task = profiled_all_reduce(&nccl, profiled_group(&nccl), 0, 8, 1, 0);
    void *op = profiled_op(&nccl, task, 0, 0, 1, getpid());
    struct recording recording = recording_open();
    uint64_t before = event_count(&recording);
    pid_t pid = fork();
    CHECK(pid >= 0, "fork");
    if (pid == 0) {
        CHECK(profiled_step(&nccl, op, 0) == NULL &&
                  profiled_all_reduce(&nccl, profiled_group(&nccl), 1, 8, 1, 0) == NULL,
              "the child recorded an event");
        profiled_stop(&nccl, op);
        CHECK(profiled_finalize(&nccl) == NCCL_SUCCESS, "finalize");
        _exit(0);
    }
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0, "the child ended with status %d", status);
    CHECK(event_count(&recording) == before, "the child has recorded an event");
    CHECK(profiled_step(&nccl, op, 0) != NULL, "the parent's operation is gone");
}

// The plugin is loaded but recording is not requested: NCCL reports no events.
static void test_recording_not_requested(int version) {
    struct profiled nccl = table_of(version);
    CHECK(unsetenv("NETBOTTLENECK_NCCL_EVENTS") == 0, "unsetenv");
    CHECK(profiled_init(&nccl, 1, NULL, 2, 0, log_nothing) == NCCL_SUCCESS, "init");
    CHECK(nccl.mask == 0 && nccl.ctx == NULL, "the plugin requests events");
    CHECK(profiled_all_reduce(&nccl, profiled_group(&nccl), 0, 8, 1, 0) == NULL, "an event got a handle");
}

static int warnings;
static void log_warnings(int level, unsigned long subsystems, const char *file, int line, const char *fmt, ...) {
    (void)subsystems;
    (void)file;
    (void)line;
    (void)fmt;
    warnings += level == NCCL_LOG_WARN;
}

// Invalid settings cause a warning in NCCL's log; NCCL's init succeeds.
static void test_invalid_settings(int version) {
    struct profiled nccl = table_of(version);
    CHECK(setenv("NETBOTTLENECK_NCCL_EVENTS", "/nonexistent/%h-%p.ring", 1) == 0, "setenv");
    CHECK(setenv("NETBOTTLENECK_NCCL_PROFILER", "nonexistent", 1) == 0, "setenv");
    CHECK(profiled_init(&nccl, 1, "x", 2, 0, log_warnings) == NCCL_SUCCESS, "init");
    CHECK(nccl.mask == 0 && nccl.ctx == NULL && warnings == 2, "%d warnings", warnings);
}

static void run(const char *name, void (*run_case)(int), int version) {
    pid_t pid = fork();
    CHECK(pid >= 0, "fork");
    if (pid == 0) {
        (void)snprintf(path, sizeof path, "/tmp/test_nccl_profiler-%d.ring", (int)getpid());
        CHECK(setenv("NETBOTTLENECK_NCCL_EVENTS", "/tmp/test_nccl_profiler-%p.ring", 1) == 0, "setenv");
        run_case(version);
        (void)unlink(path);
        _exit(0);
    }
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0, "%s, version %d, ended with status %d", name, version,
          status);
}

int main(void) {
    static const struct {
        const char *name;
        void (*run)(int);
    } cases[] = {
        {"waits", test_waits},
        {"overlapping_steps", test_overlapping_steps},
        {"repeated_receive_attempts", test_repeated_receive_attempts},
        {"task_of_another_process", test_task_of_another_process},
        {"invalid_handles", test_invalid_handles},
        {"too_many_operations", test_too_many_operations},
        {"operations_that_never_end", test_operations_that_never_end},
        {"reused_room", test_reused_room},
        {"closing_beside_another", test_closing_beside_another},
        {"several_threads", test_several_threads},
        {"closing_in_threads", test_closing_in_threads},
        {"forked_child", test_forked_child},
        {"recording_not_requested", test_recording_not_requested},
        {"invalid_settings", test_invalid_settings},
    };
    char events[16];
    (void)snprintf(events, sizeof events, "%d", EVENTS);
    CHECK(setenv("NETBOTTLENECK_TRACE_EVENTS", events, 1) == 0, "setenv");
    atomic_store(&clock_ns, (int64_t)1000 * MS);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        for (int version = NCCL_PROFILER_OLDEST; version <= NCCL_PROFILER_NEWEST; version++) {
            run(cases[i].name, cases[i].run, version);
        }
    }
    return 0;
}
