// The profiler, called as NCCL calls it, on a clock that the test sets: what it records is known to the nanosecond. Each
// case is a process, as a process has one profiler.
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

// The clock, and the calls that no function may make after opening.
static _Atomic int64_t clock_ns;
static _Thread_local bool hot;
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
    CHECK(!hot, "malloc");
    return __real_malloc(bytes);
}

void *__wrap_calloc(size_t count, size_t bytes) {
    CHECK(!hot, "calloc");
    return __real_calloc(count, bytes);
}

void __wrap_free(void *memory) {
    CHECK(!hot, "free");
    __real_free(memory);
}

int __wrap_pthread_mutex_lock(pthread_mutex_t *mutex) {
    CHECK(!hot, "a lock");
    return __real_pthread_mutex_lock(mutex);
}

static void pass(int64_t ms) {
    atomic_fetch_add(&clock_ns, ms * MS);
}

// The ring of this process.
static char path[PATH_BYTES];

struct record {
    const struct nb_ring_header *header;
    const struct nb_event *events;
};

static struct record record_open(void) {
    struct stat status;
    FILE *file = fopen(path, "rb");
    CHECK(file != NULL && fstat(fileno(file), &status) == 0, "%s: %s", path, strerror(errno));
    const char *base = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_SHARED, fileno(file), 0);
    CHECK(base != MAP_FAILED, "mmap");
    (void)fclose(file);
    return (struct record){.header = (const void *)base, .events = (const void *)(base + NB_RING_HEADER)};
}

static uint64_t taken(const struct record *record) {
    return atomic_load(&record->header->taken);
}

// The nth event of a kind; NULL: there are fewer.
static const struct nb_event *nth(const struct record *record, enum nb_event_kind kind, int n) {
    for (uint64_t i = 0; i < taken(record) && i < EVENTS; i++) {
        if (record->events[i].kind == kind && n-- == 0) {
            return &record->events[i];
        }
    }
    return NULL;
}

static const struct nb_event *event_of(const struct record *record, enum nb_event_kind kind, int n) {
    const struct nb_event *event = nth(record, kind, n);
    CHECK(event != NULL, "there are not %d events of kind %d", n + 1, (int)kind);
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

static struct profiled opened(int version) {
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

// A send whose waits are for the GPU, the peer and the wire, and a receive whose waits are for arrival, flush and GPU.
static void waits_of_known_length(int version) {
    struct profiled nccl = opened(version);
    CHECK(nccl.mask != 0, "no events requested");
    hot = true;
    void *group = profiled_group(&nccl);
    void *task = profiled_all_reduce(&nccl, group, 7, 1000, 2, 99);
    profiled_stop(&nccl, task); // enqueued
    void *send = profiled_op(&nccl, task, 1, 0, 1, getpid());
    pass(1);
    void *step = profiled_step(&nccl, send, 3);
    profiled_state(&nccl, step, NCCL_STATE_SEND_GPU_WAIT, 111);
    pass(40);
    profiled_state(&nccl, step, NCCL_STATE_SEND_PEER_WAIT, 111);
    pass(15);
    profiled_state(&nccl, step, NCCL_STATE_SEND_PEER_WAIT, 111); // NCCL tries again
    pass(5);
    profiled_state(&nccl, step, NCCL_STATE_SEND_WAIT, 4000);
    pass(30);
    profiled_stop(&nccl, step);
    profiled_stop(&nccl, send);
    void *receive = profiled_op(&nccl, task, 1, 0, 0, getpid());
    step = profiled_step(&nccl, receive, 4);
    profiled_state(&nccl, step, NCCL_STATE_RECV_WAIT, 111);
    pass(25);
    profiled_state(&nccl, step, NCCL_STATE_RECV_FLUSH_WAIT, 2000);
    pass(5);
    profiled_state(&nccl, step, NCCL_STATE_RECV_GPU_WAIT, 2000);
    pass(10);
    profiled_stop(&nccl, step);
    profiled_stop(&nccl, receive);
    void *kernel = profiled_kernel(&nccl, task, 1, 5000);
    pass(2);
    profiled_kernel_stop(&nccl, kernel, 95000);
    hot = false;

    struct record record = record_open();
    const struct nb_event *comm = event_of(&record, NB_EV_NCCL_COMM, 0);
    CHECK(comm->key == 0xfeedu && comm->b == (1 | (uint64_t)2 << 32) && memcmp(&comm->d, "data parallel", 13) == 0,
          "the communicator");
    const struct nb_event *event = event_of(&record, NB_EV_NCCL_TASK, 0);
    uint64_t number = event->key;
    CHECK(number != 0 && event->b == 4000 && event->d == 7, "the task");
    CHECK(event->c == (1 | 7 << 8 | 2 << 16 | 3 << 24 | (uint64_t)2 << 32), "what it is: %llx",
          (unsigned long long)event->c);
    CHECK(event->e == (version == 7 ? 99 : 0), "its tag: %llu", (unsigned long long)event->e);
    const struct nb_event *sent = event_of(&record, NB_EV_NCCL_STEP, 0);
    check_step(sent, 40, 20, 30);
    CHECK(sent->key == number && sent->a == 3 && sent->b == (1 | 1 << 8 | 4000 << 16), "the step sent");
    const struct nb_event *received = event_of(&record, NB_EV_NCCL_STEP, 1);
    check_step(received, 25, 5, 10);
    CHECK(received->key == number && received->a == 4 && received->b == (1 | 2000 << 16), "the step received");
    const struct nb_event *channel = event_of(&record, NB_EV_NCCL_KERNEL, 0);
    CHECK(channel->key == number && channel->a == 1 && channel->c == 5000 && channel->d == 95000, "the kernel");
    CHECK(channel->b == 2 * MS, "what the host saw of it");
    CHECK(nth(&record, NB_EV_NCCL_STEP, 2) == NULL && taken(&record) == 5, "more events than NCCL's");
    CHECK(profiled_finalize(&nccl) == NCCL_SUCCESS, "finalize");
}

// Steps overlap, as NCCL keeps several messages in flight: each has its own waits.
static void steps_in_flight(int version) {
    struct profiled nccl = opened(version);
    void *task = profiled_all_reduce(&nccl, NULL, 0, 8, 1, 0);
    void *op = profiled_op(&nccl, task, 0, 0, 1, getpid());
    void *steps[IN_FLIGHT];
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < IN_FLIGHT; i++) {
            steps[i] = profiled_step(&nccl, op, round * IN_FLIGHT + i);
            profiled_state(&nccl, steps[i], NCCL_STATE_SEND_GPU_WAIT, 0);
        }
        for (int i = 0; i < IN_FLIGHT; i++) {
            pass(1);
            profiled_state(&nccl, steps[i], NCCL_STATE_SEND_PEER_WAIT, 0);
            profiled_state(&nccl, steps[i], NCCL_STATE_SEND_WAIT, 8);
        }
        for (int i = 0; i < IN_FLIGHT; i++) {
            pass(1);
            profiled_stop(&nccl, steps[i]);
        }
    }
    struct record record = record_open();
    for (int n = 0; n < 3 * IN_FLIGHT; n++) {
        int i = n % IN_FLIGHT;
        const struct nb_event *step = event_of(&record, NB_EV_NCCL_STEP, n);
        CHECK(step->a == (uint64_t)n, "step %llu is event %d", (unsigned long long)step->a, n);
        check_step(step, i + 1, 0, IN_FLIGHT);
    }
}

// NCCL starts the step again at each attempt to post its receive; one step has waited all the time.
static void receive_that_is_not_accepted(int version) {
    struct profiled nccl = opened(version);
    void *task = profiled_all_reduce(&nccl, NULL, 0, 8, 1, 0);
    void *op = profiled_op(&nccl, task, 0, 0, 0, getpid());
    void *step = profiled_step(&nccl, op, 0);
    pass(3);
    step = profiled_step(&nccl, op, 0);
    pass(4);
    profiled_state(&nccl, step, NCCL_STATE_RECV_WAIT, 0);
    pass(5);
    profiled_state(&nccl, step, NCCL_STATE_RECV_FLUSH_WAIT, 32);
    profiled_state(&nccl, step, NCCL_STATE_RECV_GPU_WAIT, 32);
    pass(6);
    profiled_stop(&nccl, step);
    struct record record = record_open();
    check_step(event_of(&record, NB_EV_NCCL_STEP, 0), 12, 0, 6);
    CHECK(nth(&record, NB_EV_NCCL_STEP, 1) == NULL, "recorded twice");
}

// With PXN, a proxy moves what another process enqueued: the parent means nothing here.
static void task_of_another_process(int version) {
    struct profiled nccl = opened(version);
    void *task = profiled_all_reduce(&nccl, NULL, 0, 8, 1, 0);
    void *op = profiled_op(&nccl, task, 0, 0, 1, getpid() + 1);
    void *step = profiled_step(&nccl, op, 0);
    pass(1);
    profiled_stop(&nccl, step);
    struct record record = record_open();
    const struct nb_event *event = event_of(&record, NB_EV_NCCL_STEP, 0);
    CHECK(event->key == 0, "taken for a task of this process");
    check_step(event, 1, 0, 0); // no state was reported: all of it is the first
}

// Handles that ended, that were never given, and events below what was dropped.
static void handles_that_name_nothing(int version) {
    struct profiled nccl = opened(version);
    void *task = profiled_all_reduce(&nccl, NULL, 0, 8, 1, 0);
    void *op = profiled_op(&nccl, task, 0, 0, 1, getpid());
    void *step = profiled_step(&nccl, op, 0);
    profiled_stop(&nccl, step);
    profiled_stop(&nccl, step);
    profiled_stop(&nccl, op);
    profiled_state(&nccl, step, NCCL_STATE_SEND_WAIT, 8);
    profiled_stop(&nccl, step);
    profiled_stop(&nccl, op);
    CHECK(profiled_step(&nccl, op, 1) == NULL && profiled_step(&nccl, NULL, 1) == NULL, "a step of nothing");
    CHECK(profiled_step(&nccl, task, 1) == NULL, "a step of a collective");
    for (uintptr_t handle = 0; handle < 1 << 18; handle++) {
        profiled_state(&nccl, (void *)(handle * 61), NCCL_STATE_KERNEL_STOP, 8);
        (void)profiled_table(&nccl)->stop_event((void *)(handle * 61));
    }
    CHECK(profiled_table(&nccl)->record_state(NULL, NCCL_STATE_SEND_WAIT, NULL) == NCCL_SUCCESS, "state of NULL");
    struct record record = record_open();
    CHECK(nth(&record, NB_EV_NCCL_STEP, 1) == NULL, "a step was recorded twice");
}

// As many operations as there is room for; the next is dropped and counted; NCCL gets no handle, and no error.
static void more_than_there_is_room_for(int version) {
    struct profiled nccl = opened(version);
    static void *ops[POOL];
    void *task = profiled_all_reduce(&nccl, NULL, 0, 8, 1, 0);
    for (int i = 0; i < POOL; i++) {
        ops[i] = profiled_op(&nccl, task, 0, 0, 1, getpid());
        CHECK(ops[i] != NULL, "operation %d was dropped", i);
    }
    struct record record = record_open();
    uint64_t before = taken(&record);
    CHECK(profiled_op(&nccl, task, 0, 0, 1, getpid()) == NULL, "there was room");
    CHECK(taken(&record) == before + 1 && record.events[before].kind == NB_EV_NONE, "not counted as dropped");
    profiled_stop(&nccl, ops[17]);
    CHECK(profiled_op(&nccl, task, 0, 0, 1, getpid()) != NULL, "no room after one has ended");

    // A communicator that is aborted leaves its operations: closing it makes room.
    CHECK(profiled_finalize(&nccl) == NCCL_SUCCESS, "finalize");
    nccl = opened(version);
    CHECK(profiled_op(&nccl, NULL, 0, 0, 1, getpid()) != NULL, "no room after the communicator was closed");
}

struct worker {
    struct profiled nccl;
    int rank;
};

static void *work(void *arg) {
    struct worker *worker = arg;
    const struct profiled *nccl = &worker->nccl;
    for (int round = 0; round < ROUNDS; round++) {
        void *task = profiled_all_reduce(nccl, NULL, (uint64_t)round, 8, worker->rank, 0);
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

// Communicators have threads of their own; a step keeps its own collective.
static void several_threads(int version) {
    struct worker workers[THREADS];
    pthread_t threads[THREADS];
    uint64_t comms[THREADS];
    for (int i = 0; i < THREADS; i++) {
        workers[i] = (struct worker){.nccl = opened(version), .rank = i};
    }
    for (int i = 0; i < THREADS; i++) {
        CHECK(pthread_create(&threads[i], NULL, work, &workers[i]) == 0, "thread");
    }
    for (int i = 0; i < THREADS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0, "join");
    }
    struct record record = record_open();
    CHECK(taken(&record) == THREADS + THREADS * ROUNDS * 3, "%llu events", (unsigned long long)taken(&record));
    static uint64_t comm_of[EVENTS];
    for (int i = 0; i < THREADS; i++) {
        comms[i] = event_of(&record, NB_EV_NCCL_COMM, i)->a;
    }
    for (int n = 0; n < THREADS * ROUNDS; n++) {
        const struct nb_event *task = event_of(&record, NB_EV_NCCL_TASK, n);
        comm_of[task->key] = task->a;
        CHECK((task->c >> 32) < THREADS && comms[task->c >> 32] == task->a, "a task of another communicator");
    }
    for (int n = 0; n < THREADS * ROUNDS; n++) {
        const struct nb_event *step = event_of(&record, NB_EV_NCCL_STEP, n);
        CHECK(comm_of[step->key] == comms[step->b & 0xff], "a step of another communicator");
    }
}

// The record is the parent's.
static void forked_child(int version) {
    struct profiled nccl = opened(version);
    void *task = profiled_all_reduce(&nccl, NULL, 0, 8, 1, 0);
    void *op = profiled_op(&nccl, task, 0, 0, 1, getpid());
    struct record record = record_open();
    uint64_t before = taken(&record);
    pid_t pid = fork();
    CHECK(pid >= 0, "fork");
    if (pid == 0) {
        CHECK(profiled_step(&nccl, op, 0) == NULL && profiled_all_reduce(&nccl, NULL, 1, 8, 1, 0) == NULL, "recorded");
        profiled_stop(&nccl, op);
        CHECK(profiled_finalize(&nccl) == NCCL_SUCCESS, "finalize");
        _exit(0);
    }
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0, "the child ended with %d", status);
    CHECK(taken(&record) == before, "the child has written");
    CHECK(profiled_step(&nccl, op, 0) != NULL, "the parent has lost its operation");
}

// Loaded without a request for events: NCCL reports nothing.
static void not_asked_for(int version) {
    struct profiled nccl = table_of(version);
    CHECK(unsetenv("NETBOTTLENECK_NCCL_EVENTS") == 0, "unsetenv");
    CHECK(profiled_init(&nccl, 1, NULL, 2, 0, log_nothing) == NCCL_SUCCESS, "init");
    CHECK(nccl.mask == 0 && nccl.ctx == NULL, "events are requested");
    CHECK(profiled_all_reduce(&nccl, NULL, 0, 8, 1, 0) == NULL, "an event");
}

static int warnings;
static void log_warnings(int level, unsigned long subsystems, const char *file, int line, const char *fmt, ...) {
    (void)subsystems;
    (void)file;
    (void)line;
    (void)fmt;
    warnings += level == NCCL_LOG_WARN;
}

// What is not possible is a warning in NCCL's log, and never NCCL's failure.
static void impossible_settings(int version) {
    struct profiled nccl = table_of(version);
    CHECK(setenv("NETBOTTLENECK_NCCL_EVENTS", "/nonexistent/%h-%p.ring", 1) == 0, "setenv");
    CHECK(setenv("NETBOTTLENECK_NCCL_PROFILER", "nonexistent", 1) == 0, "setenv");
    CHECK(profiled_init(&nccl, 1, "x", 2, 0, log_warnings) == NCCL_SUCCESS, "init");
    CHECK(nccl.mask == 0 && nccl.ctx == NULL && warnings == 2, "%d warnings", warnings);
}

static void run(const char *name, void (*one)(int), int version) {
    pid_t pid = fork();
    CHECK(pid >= 0, "fork");
    if (pid == 0) {
        (void)snprintf(path, sizeof path, "/tmp/test_nccl_profiler-%d.ring", (int)getpid());
        CHECK(setenv("NETBOTTLENECK_NCCL_EVENTS", "/tmp/test_nccl_profiler-%p.ring", 1) == 0, "setenv");
        one(version);
        (void)unlink(path);
        _exit(0);
    }
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0, "%s, version %d, ended with %d", name, version, status);
}

int main(void) {
    static const struct {
        const char *name;
        void (*run)(int);
    } cases[] = {
        {"waits_of_known_length", waits_of_known_length},
        {"steps_in_flight", steps_in_flight},
        {"receive_that_is_not_accepted", receive_that_is_not_accepted},
        {"task_of_another_process", task_of_another_process},
        {"handles_that_name_nothing", handles_that_name_nothing},
        {"more_than_there_is_room_for", more_than_there_is_room_for},
        {"several_threads", several_threads},
        {"forked_child", forked_child},
        {"not_asked_for", not_asked_for},
        {"impossible_settings", impossible_settings},
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
