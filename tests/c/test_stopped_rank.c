// Stopped rank: a rank is stopped at each step of the shared-memory path in turn, like a frozen container or a migrated
// machine. The other ranks fail, get their memory back and fill it. Then the rank resumes, and must not change what
// they wrote.
#include <stdint.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "coll/choose.h"
#include "coll/reduce_pair.h"
#include "engine/context.h"
#include "engine/shared_fold.h"
#include "sums.h"
#include "transport/shm.h"
#include "transport/shm_pipe.h"

enum { COUNT = 1 << 20, RANKS_MAX_USED = 4, STOPPED = 1, FILL = 42 };

struct point {
    const char *step;
    bool staged;       // uses memory that other ranks have not mapped
    const char *hosts; // as in struct test_rank; NULL: two ranks on one host
};

static const struct point points[] = {
    {"arena offer", false, NULL},
    {"arena map", false, NULL},
    {"buffer description", false, NULL},
    {"buffer lookup", false, NULL},
    {"write section, begun", false, NULL},
    {"direct reduction, before", false, NULL},
    {"direct reduction, halfway", false, NULL},
    {"direct reduction, after", false, NULL},
    {"write section, ended", false, NULL},
    {"wake", false, NULL},
    {"pipe write", false, NULL},
    {"pipe read", false, NULL},
    {"fill, before", true, NULL},
    {"fill, after", true, NULL},
    {"reduce, before", true, NULL},
    {"reduce, after", true, NULL},
    {"empty, before", true, NULL},
    {"empty, after", true, NULL},
    {"fold, before", false, "aabb"},
    {"fold, after", false, "aabb"},
    {"spread, before", false, "aabb"},
    {"spread, after", false, "aabb"},
    {"fold, before", true, "aabb"},
    {"spread, before", true, "aabb"},
};

enum { POINTS = sizeof points / sizeof points[0] };

static const char *stop_at; // step at which this process stops; NULL: never
static _Atomic bool armed;

static void step(const char *name) {
    if (stop_at != NULL && atomic_load(&armed) && strcmp(stop_at, name) == 0) {
        atomic_store(&armed, false);
        CHECK(raise(SIGSTOP) == 0, "stop: %m");
    }
}

// --- wrapped functions of the core, each with its steps

int __real_nb_shm_offer(struct nb_shm *shm, void *base, size_t bytes, int fd, struct nb_error *err);
int __wrap_nb_shm_offer(struct nb_shm *shm, void *base, size_t bytes, int fd, struct nb_error *err);
int __wrap_nb_shm_offer(struct nb_shm *shm, void *base, size_t bytes, int fd, struct nb_error *err) {
    step("arena offer");
    return __real_nb_shm_offer(shm, base, bytes, fd, err);
}

int __real_nb_fdpass_receive(int fd, void *message, size_t bytes, int *fds, int count);
int __wrap_nb_fdpass_receive(int fd, void *message, size_t bytes, int *fds, int count);
int __wrap_nb_fdpass_receive(int fd, void *message, size_t bytes, int *fds, int count) {
    int rc = __real_nb_fdpass_receive(fd, message, bytes, fds, count);
    if (rc == 0) {
        step("arena map");
    }
    return rc;
}

bool __real_nb_shm_find(const struct nb_shm *shm, const void *base, size_t bytes, struct nb_shm_piece *piece);
bool __wrap_nb_shm_find(const struct nb_shm *shm, const void *base, size_t bytes, struct nb_shm_piece *piece);
bool __wrap_nb_shm_find(const struct nb_shm *shm, const void *base, size_t bytes, struct nb_shm_piece *piece) {
    step("buffer description");
    return __real_nb_shm_find(shm, base, bytes, piece);
}

char *__real_nb_shm_memory(const struct nb_shm *shm, int rank, const struct nb_shm_piece *piece);
char *__wrap_nb_shm_memory(const struct nb_shm *shm, int rank, const struct nb_shm_piece *piece);
char *__wrap_nb_shm_memory(const struct nb_shm *shm, int rank, const struct nb_shm_piece *piece) {
    step("buffer lookup");
    return __real_nb_shm_memory(shm, rank, piece);
}

bool __real_nb_shm_write_begin(struct nb_shm *shm, int *revoker);
bool __wrap_nb_shm_write_begin(struct nb_shm *shm, int *revoker);
bool __wrap_nb_shm_write_begin(struct nb_shm *shm, int *revoker) {
    bool allowed = __real_nb_shm_write_begin(shm, revoker);
    step("write section, begun");
    return allowed;
}

void __real_nb_shm_write_end(struct nb_shm *shm);
void __wrap_nb_shm_write_end(struct nb_shm *shm);
void __wrap_nb_shm_write_end(struct nb_shm *shm) {
    __real_nb_shm_write_end(shm);
    step("write section, ended");
}

void __real_nb_shm_wake(struct nb_shm *shm);
void __wrap_nb_shm_wake(struct nb_shm *shm);
void __wrap_nb_shm_wake(struct nb_shm *shm) {
    step("wake");
    __real_nb_shm_wake(shm);
}

size_t __real_nb_shm_pipe_write(struct nb_shm_pipe *pipe, const void *data, size_t bytes);
size_t __wrap_nb_shm_pipe_write(struct nb_shm_pipe *pipe, const void *data, size_t bytes);
size_t __wrap_nb_shm_pipe_write(struct nb_shm_pipe *pipe, const void *data, size_t bytes) {
    size_t wrote = __real_nb_shm_pipe_write(pipe, data, bytes);
    step("pipe write");
    return wrote;
}

long __real_nb_shm_pipe_read(struct nb_shm_pipe *pipe, void *data, size_t room, bool *writer_waits);
long __wrap_nb_shm_pipe_read(struct nb_shm_pipe *pipe, void *data, size_t room, bool *writer_waits);
long __wrap_nb_shm_pipe_read(struct nb_shm_pipe *pipe, void *data, size_t room, bool *writer_waits) {
    step("pipe read");
    return __real_nb_shm_pipe_read(pipe, data, room, writer_waits);
}

void __real_nb_fold_direct(struct shared *l, struct nb_work *work, struct nb_range range);
void __wrap_nb_fold_direct(struct shared *l, struct nb_work *work, struct nb_range range);
void __wrap_nb_fold_direct(struct shared *l, struct nb_work *work, struct nb_range range) {
    step("direct reduction, before");
    __real_nb_fold_direct(l, work, range);
    step("direct reduction, after");
}

nb_pair_fn __real_nb_pair_kernel(int dtype, int redop);
nb_pair_fn __wrap_nb_pair_kernel(int dtype, int redop);

static void pair_in_halves(void *one, void *two, const void *a, const void *b, size_t count, double scale) {
    size_t half = count / 2;
    size_t at = half * sizeof(float);
    nb_pair_fn both = __real_nb_pair_kernel(NB_F32, NB_SUM);
    both(one, two, a, b, half, scale);
    step("direct reduction, halfway");
    both((char *)one + at, (char *)two + at, (const char *)a + at, (const char *)b + at, count - half, scale);
}

nb_pair_fn __wrap_nb_pair_kernel(int dtype, int redop) {
    return dtype == NB_F32 && redop == NB_SUM ? pair_in_halves : __real_nb_pair_kernel(dtype, redop);
}

#define STOP_BEFORE_AND_AFTER(function, name)                                                                          \
    void __real_##function(struct shared *l, struct nb_work *work, uint64_t window);                                   \
    void __wrap_##function(struct shared *l, struct nb_work *work, uint64_t window);                                   \
    void __wrap_##function(struct shared *l, struct nb_work *work, uint64_t window) {                                  \
        step(name ", before");                                                                                         \
        __real_##function(l, work, window);                                                                            \
        step(name ", after");                                                                                          \
    }

STOP_BEFORE_AND_AFTER(nb_fold_fill, "fill")
STOP_BEFORE_AND_AFTER(nb_fold_reduce, "reduce")
STOP_BEFORE_AND_AFTER(nb_fold_empty, "empty")
STOP_BEFORE_AND_AFTER(nb_fold_sum, "fold")
STOP_BEFORE_AND_AFTER(nb_fold_spread, "spread")

// --- ranks; each is a process

static const struct point *point;
static float *buffer;
static pid_t stopped;      // the rank that stops, a child of rank 0
static int stopped_status; // its wait status when it stopped or ended

// Rank 0: aborts the job once the rank has stopped. No timeout is involved.
static void *abort_once_stopped(void *arg) {
    struct test_rank *me = arg;
    CHECK(waitpid(stopped, &stopped_status, WUNTRACED) == stopped, "wait: %m");
    nb_job_abort(me->job, "a rank stopped");
    return NULL;
}

// Runs all-reduces until one fails because a rank has stopped.
static void sum_until_failure(struct test_rank *me) {
    struct nb_error err = {0};
    char *arena = arena_share(me);
    buffer = point->staged ? calloc(COUNT, sizeof *buffer) : (float *)(void *)arena;
    struct nb_segment all = {.base = buffer, .bytes = COUNT * sizeof *buffer};
    test_do(me, test_op("sum", NB_OP_ALLREDUCE, &all));
    atomic_store(&armed, true);
    test_barrier(me, "armed");
    pthread_t watcher;
    CHECK(me->rank != 0 || pthread_create(&watcher, NULL, abort_once_stopped, me) == 0, "thread");
    struct nb_arena more;
    int rc = nb_arena_open(&more, 1 << 20, &err);
    rc = rc < 0 ? rc : nb_job_map_arena(me->job, &more, &err);
    while (rc == 0) {
        for (size_t i = 0; i < COUNT; i++) {
            buffer[i] = 1; // not 0: a late addition of it changes the filled memory
        }
        rc = test_try(me, test_op("sum", NB_OP_ALLREDUCE, &all), &err);
    }
    CHECK(me->rank != 0 || pthread_join(watcher, NULL) == 0, "join");
}

static struct test_rank template_for(const struct point *at) {
    struct test_rank template = test_on("shm");
    template.size = at->hosts == NULL ? 2 : (int)strlen(at->hosts);
    template.hosts = at->hosts;
    template.algorithm = at->hosts == NULL ? NB_ALGORITHM_NONE : NB_ALGORITHM_TWO_LEVEL;
    template.run = sum_until_failure;
    return template;
}

// Runs a rank until its job has failed and is closed. Then it fills its memory, waits until rank 0 closes the pipe, and
// checks the memory.
static void rank_run(struct test_rank *me, int end_pipe) {
    char byte;
    test_rank_main(me);
    if (me->rank == STOPPED) {
        _exit(0);
    }
    CHECK(buffer != NULL && me->rc == 0, "rank %d: %s", me->rank, me->err.text);
    for (size_t i = 0; i < COUNT; i++) {
        buffer[i] = FILL;
    }
    (void)!read(end_pipe, &byte, 1); // returns at the end of the pipe
    for (size_t i = 0; i < COUNT; i++) {
        CHECK(buffer[i] == FILL, "rank %d, stopped at '%s': [%zu] is %g, not %d", me->rank, point->step, i, buffer[i],
              FILL);
    }
}

// Runs a job that stops at one point. Rank 0 is this process; the other ranks are its children.
static void point_run(const struct point *at) {
    struct nb_listener listener = {.fd = -1};
    struct nb_error err = {0};
    struct nb_boot_config config = {.ifname = "lo", .secret = test_secret, .secret_bytes = sizeof test_secret};
    struct test_rank template = template_for(at);
    pid_t ranks[RANKS_MAX_USED] = {0};
    int end_pipe[2];
    int status;
    point = at;
    config.size = template.size;
    CHECK(pipe(end_pipe) == 0 && nb_listener_open(&listener, &config, NULL, &err) == 0, "listen: %s", err.text);
    nb_sock_format(&listener.addr, template.address);
    for (int r = 1; r < template.size; r++) {
        ranks[r] = fork();
        CHECK(ranks[r] >= 0, "fork: %m");
        if (ranks[r] == 0) {
            (void)prctl(PR_SET_PDEATHSIG, SIGKILL); // otherwise a stopped child survives a failure
            template.rank = r;
            stop_at = r == STOPPED ? at->step : NULL;
            close(end_pipe[1]);
            rank_run(&template, end_pipe[0]);
            _exit(0);
        }
    }
    template.listener = &listener;
    stopped = ranks[STOPPED];
    test_rank_main(&template);
    CHECK(buffer != NULL && template.rc == 0, "rank 0: %s", template.err.text);
    for (size_t i = 0; i < COUNT; i++) {
        buffer[i] = FILL;
    }
    CHECK(WIFSTOPPED(stopped_status), "rank did not stop at '%s': status %x", at->step, (unsigned)stopped_status);
    CHECK(kill(ranks[STOPPED], SIGCONT) == 0 && waitpid(ranks[STOPPED], &status, 0) == ranks[STOPPED] && status == 0,
          "rank %d, stopped at '%s', ended with status %x", STOPPED, at->step, (unsigned)status);
    close(end_pipe[1]);
    for (size_t i = 0; i < COUNT; i++) {
        CHECK(buffer[i] == FILL, "rank 0, stopped at '%s': [%zu] is %g, not %d", at->step, i, buffer[i], FILL);
    }
    for (int r = 1; r < template.size; r++) {
        CHECK(r == STOPPED || (waitpid(ranks[r], &status, 0) == ranks[r] && status == 0), "rank %d failed", r);
    }
}

int main(void) {
    pid_t runs[POINTS];
    bool failed = false;
    for (int i = 0; i < POINTS; i++) { // concurrently: most of the time is waiting
        runs[i] = fork();
        CHECK(runs[i] >= 0, "fork: %m");
        if (runs[i] == 0) {
            point_run(&points[i]);
            _exit(0);
        }
    }
    for (int i = 0; i < POINTS; i++) {
        int status;
        CHECK(waitpid(runs[i], &status, 0) == runs[i], "wait: %m");
        if (status != 0) {
            fprintf(stderr, "failed: point %d, stopped at '%s' (%s, %s): wait status %x\n", i, points[i].step,
                    points[i].staged ? "staged" : "direct", points[i].hosts != NULL ? "two hosts" : "one host",
                    (unsigned)status);
            failed = true;
        }
    }
    return failed;
}
