// Jobs whose ranks are threads: opens a job of `size` ranks on loopback and runs a function on each. Also helpers for
// such functions.
#ifndef NB_TESTS_JOB_H
#define NB_TESTS_JOB_H

#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bootstrap/bootstrap.h"
#include "check.h"
#include "engine/engine.h"
#include "trace/ring.h"

enum { TEST_RANKS_MAX = 16, TEST_LIMIT_MS = 90000 };

struct test_override { // settings of one rank that differ from the other ranks'
    int rank;
    enum nb_shm_mode shm;
    const char *host;
};

struct test_rank {
    int rank;
    int size;
    const char *transport;
    int streams;
    int timeout_ms;
    int pending_max; // 0: the default
    int stall_ms;
    int stall_end_ms;
    size_t segment_bytes; // 0: the default
    enum nb_algorithm_id algorithm;
    const struct nb_algorithm *more; // in addition to the built-in ones
    struct nb_ring *ring;            // for rank 0's events; NULL: no recording
    enum nb_shm_mode shm;
    const char *host;  // identifies the host; NULL: zeros
    const char *hosts; // a letter for the host of each rank; NULL: all are on `host`
    const struct test_override *overrides;
    int override_count; // 0: one, if overrides is set
    const int *cpus;
    int cpu_count;
    const char *cuda_library;
    size_t device_chunk_bytes; // 0: the default
    int device_chunks;         // 0: the default
    size_t device_gather_bytes;
    const void *cuda_image;
    struct nb_listener *listener;
    char address[NB_SOCK_TEXT];
    struct nb_job *job;
    struct nb_comm *comm; // of the operations, and of rank and size; NULL: all ranks
    struct nb_error err;
    int rc;
    void *arg;
    void (*run)(struct test_rank *me);
};

static const unsigned char test_secret[32] = "0123456789abcdef0123456789abcde";

// Prepares the listener for a rank 0 that is a forked child: the fork guard closes the core's descriptors there, but
// not a duplicate.
static inline void test_listener_for_child(struct nb_listener *listener) {
    int opened = listener->fd;
    listener->fd = dup(opened);
    CHECK(listener->fd >= 0, "dup: %m");
    close(opened);
}

static void *test_rank_main(void *arg) {
    struct test_rank *me = arg;
    struct nb_boot_config config = {.rank = me->rank,
                                    .size = me->size,
                                    .timeout_ms = TEST_LIMIT_MS,
                                    .ifname = "lo",
                                    .secret = test_secret,
                                    .secret_bytes = sizeof test_secret,
                                    .tag = "test"};
    struct nb_boot boot = {0};
    me->rc = nb_boot_join(&boot, &config, me->listener, me->rank == 0 ? NULL : me->address, &me->err);
    if (me->rc == 0) {
        struct nb_job_config job = {.boot = &boot,
                                    .transport = me->transport,
                                    .streams = me->streams,
                                    .timeout_ms = me->timeout_ms,
                                    .start_ms = TEST_LIMIT_MS,
                                    .pending_max = me->pending_max,
                                    .stall_ms = me->stall_ms,
                                    .stall_end_ms = me->stall_end_ms,
                                    .library = getenv("NETBOTTLENECK_LIBFABRIC"),
                                    .provider = getenv("NETBOTTLENECK_PROVIDER"),
                                    .segment_bytes = me->segment_bytes,
                                    .algorithm = me->algorithm,
                                    .shm = me->shm,
                                    .cpus = me->cpus,
                                    .cpu_count = me->cpu_count,
                                    .cuda_library = me->cuda_library,
                                    .device_chunk_bytes = me->device_chunk_bytes,
                                    .device_chunks = me->device_chunks,
                                    .device_gather_bytes = me->device_gather_bytes,
                                    .cuda_image = me->cuda_image};
        memcpy(job.host, me->host != NULL ? me->host : "", me->host != NULL ? strnlen(me->host, NB_HOST_BYTES) : 0);
        job.host[0] = me->hosts != NULL ? (unsigned char)me->hosts[me->rank] : job.host[0];
        job.more = me->more;
        job.ring = me->rank == 0 ? me->ring : NULL;
        me->rc = nb_job_open(&me->job, &job, &me->err);
    }
    if (me->rc == 0) {
        me->run(me);
    }
    nb_job_close(me->job);
    return NULL;
}

// Settings for a network by name; "shm": shared memory between all ranks, with TCP lanes.
static inline struct test_rank test_on(const char *network) {
    bool shared = strcmp(network, "shm") == 0;
    return (struct test_rank){.transport = shared ? "tcp" : network,
                              .streams = 1,
                              .timeout_ms = 20000,
                              .shm = shared ? NB_SHM_REQUIRED : NB_SHM_OFF,
                              .host = "host a"};
}

static inline void test_run(const struct test_rank *template, struct test_rank *ranks) {
    pthread_t threads[TEST_RANKS_MAX];
    struct nb_listener listener = {.fd = -1};
    struct nb_error err = {0};
    struct nb_boot_config config = {.size = template->size, .ifname = "lo", .secret = test_secret, .secret_bytes = 32};
    CHECK(nb_listener_open(&listener, &config, NULL, &err) == 0, "listen: %s", err.text);
    for (int r = 0; r < template->size; r++) {
        ranks[r] = *template;
        ranks[r].rank = r;
        for (int i = 0;
             template->overrides != NULL && i < (template->override_count > 0 ? template->override_count : 1); i++) {
            if (template->overrides[i].rank == r) {
                ranks[r].shm = template->overrides[i].shm;
                ranks[r].host = template->overrides[i].host;
            }
        }
        ranks[r].listener = r == 0 ? &listener : NULL;
        nb_sock_format(&listener.addr, ranks[r].address);
        CHECK(pthread_create(&threads[r], NULL, test_rank_main, &ranks[r]) == 0, "thread %d", r);
    }
    for (int r = 0; r < template->size; r++) {
        pthread_join(threads[r], NULL);
    }
    nb_listener_close(&listener);
}

// Runs the job on all ranks. Returns 0, or 77 if the transport is not available.
static inline int test_job(const struct test_rank *template) {
    struct test_rank ranks[TEST_RANKS_MAX];
    test_run(template, ranks);
    for (int r = 0; r < template->size; r++) {
        if (ranks[r].rc == NB_ENOLIB) {
            fprintf(stderr, "%s\n", ranks[r].err.text);
            return 77;
        }
        CHECK(ranks[r].rc == 0, "rank %d: %s", r, ranks[r].err.text);
    }
    return 0;
}

// All ranks fail to open the job, with the same code.
static inline void test_job_fails(const struct test_rank *template, int code, const char *part) {
    struct test_rank ranks[TEST_RANKS_MAX];
    test_run(template, ranks);
    for (int r = 0; r < template->size; r++) {
        CHECK(ranks[r].rc == code, "rank %d: %d %s", r, ranks[r].rc, ranks[r].err.text);
        CHECK(strstr(ranks[r].err.text, part) != NULL, "'%s' is not in: %s", part, ranks[r].err.text);
    }
}

static inline struct nb_op test_op(const char *name, enum nb_op_kind kind, struct nb_segment *all) {
    return (struct nb_op){
        .name = name, .kind = kind, .dtype = NB_F32, .segments = all, .segment_count = all != NULL ? 1 : 0};
}

static inline struct nb_work *test_submit(struct test_rank *me, struct nb_op op) {
    struct nb_work *work = NULL;
    struct nb_error err = {0};
    CHECK(nb_submit(me->comm != NULL ? me->comm : nb_job_world(me->job), &op, &work, &err) == 0,
          "rank %d submits %s: %s", me->rank, op.name, err.text);
    return work;
}

static inline int test_finish(struct nb_work *work, struct nb_error *err) {
    int rc = nb_work_wait(work, TEST_LIMIT_MS, err);
    nb_work_release(work);
    return rc;
}

// Runs an operation; the submission may fail because the job has failed already.
static inline int test_try(struct test_rank *me, struct nb_op op, struct nb_error *err) {
    struct nb_work *work = NULL;
    int rc = nb_submit(me->comm != NULL ? me->comm : nb_job_world(me->job), &op, &work, err);
    return rc == 0 ? test_finish(work, err) : rc;
}

static inline void test_done(struct test_rank *me, struct nb_work *work) {
    struct nb_error err = {0};
    CHECK(test_finish(work, &err) == 0, "rank %d waits: %s", me->rank, err.text);
}

static inline void test_do(struct test_rank *me, struct nb_op op) {
    test_done(me, test_submit(me, op));
}

static inline void test_barrier(struct test_rank *me, const char *name) {
    test_do(me, test_op(name, NB_OP_BARRIER, NULL));
}

// Suspends a thread at any point, as SIGSTOP suspends a process. One thread at a time.
static int test_thaw_pipe[2];
static sem_t test_frozen;
static _Atomic bool test_freeze_pending;

static inline void test_freeze_handler(int signum) {
    int before = errno;
    char byte;
    (void)signum;
    if (atomic_exchange(&test_freeze_pending, false)) {
        (void)sem_post(&test_frozen);
        while (read(test_thaw_pipe[0], &byte, 1) < 0 && errno == EINTR) {
        }
    }
    errno = before;
}

// Repeats the signal until the thread is suspended: ThreadSanitizer loses a signal to a thread that has just started.
static inline void test_freeze(pthread_t thread) {
    struct sigaction action = {.sa_handler = test_freeze_handler};
    CHECK(pipe(test_thaw_pipe) == 0 && sem_init(&test_frozen, 0, 0) == 0, "pipe: %m");
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0, "signal: %m");
    atomic_store(&test_freeze_pending, true);
    for (int left_ms = TEST_LIMIT_MS; left_ms > 0; left_ms -= 10) {
        CHECK(pthread_kill(thread, SIGUSR1) == 0, "signal: %m");
        struct timespec until;
        (void)clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += 10000000;
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        if (sem_timedwait(&test_frozen, &until) == 0) {
            return;
        }
    }
    CHECK(false, "the thread is not suspended");
}

static inline void test_thaw(void) {
    CHECK(write(test_thaw_pipe[1], "", 1) == 1, "write: %m");
}

#endif
