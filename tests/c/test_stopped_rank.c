// A rank is stopped at each step of the shared-memory path in turn, like a frozen container or a migrated machine.
// The others fail, get their memory back and fill it; then the rank resumes. It changes nothing that they wrote.
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

enum { COUNT = 1 << 20, SIZE_MAX_HERE = 4, STOPPED = 1, FILL = 42 };

struct point {
    const char *step;
    bool staged;       // memory that others have not mapped
    const char *hosts; // as in struct test_rank; NULL: two ranks of one host
};

static const struct point points[] = {
    {"offer an arena", false, NULL},
    {"map an arena", false, NULL},
    {"describe", false, NULL},
    {"find a line", false, NULL},
    {"entered", false, NULL},
    {"share, before", false, NULL},
    {"share, in the middle", false, NULL},
    {"share, after", false, NULL},
    {"left", false, NULL},
    {"wake", false, NULL},
    {"pipe is written", false, NULL},
    {"pipe is read", false, NULL},
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

static const char *stop_at; // of this process; NULL: it is not to stop, or did
static _Atomic bool armed;

static void step(const char *name) {
    if (stop_at != NULL && atomic_load(&armed) && strcmp(stop_at, name) == 0) {
        atomic_store(&armed, false);
        CHECK(raise(SIGSTOP) == 0, "stop: %m");
    }
}

// --- the core's functions, each with its steps

int __real_nb_shm_offer(struct nb_shm *shm, void *base, size_t bytes, int fd, struct nb_error *err);
int __wrap_nb_shm_offer(struct nb_shm *shm, void *base, size_t bytes, int fd, struct nb_error *err);
int __wrap_nb_shm_offer(struct nb_shm *shm, void *base, size_t bytes, int fd, struct nb_error *err) {
    step("offer an arena");
    return __real_nb_shm_offer(shm, base, bytes, fd, err);
}

int __real_nb_fdpass_receive(int fd, void *message, size_t bytes, int *fds, int count);
int __wrap_nb_fdpass_receive(int fd, void *message, size_t bytes, int *fds, int count);
int __wrap_nb_fdpass_receive(int fd, void *message, size_t bytes, int *fds, int count) {
    int rc = __real_nb_fdpass_receive(fd, message, bytes, fds, count);
    if (rc == 0) {
        step("map an arena");
    }
    return rc;
}

bool __real_nb_shm_find(const struct nb_shm *shm, const void *base, size_t bytes, struct nb_shm_piece *piece);
bool __wrap_nb_shm_find(const struct nb_shm *shm, const void *base, size_t bytes, struct nb_shm_piece *piece);
bool __wrap_nb_shm_find(const struct nb_shm *shm, const void *base, size_t bytes, struct nb_shm_piece *piece) {
    step("describe");
    return __real_nb_shm_find(shm, base, bytes, piece);
}

char *__real_nb_shm_memory(const struct nb_shm *shm, int rank, const struct nb_shm_piece *piece);
char *__wrap_nb_shm_memory(const struct nb_shm *shm, int rank, const struct nb_shm_piece *piece);
char *__wrap_nb_shm_memory(const struct nb_shm *shm, int rank, const struct nb_shm_piece *piece) {
    step("find a line");
    return __real_nb_shm_memory(shm, rank, piece);
}

bool __real_nb_shm_write_begin(struct nb_shm *shm);
bool __wrap_nb_shm_write_begin(struct nb_shm *shm);
bool __wrap_nb_shm_write_begin(struct nb_shm *shm) {
    bool may = __real_nb_shm_write_begin(shm);
    step("entered");
    return may;
}

void __real_nb_shm_write_end(struct nb_shm *shm);
void __wrap_nb_shm_write_end(struct nb_shm *shm);
void __wrap_nb_shm_write_end(struct nb_shm *shm) {
    __real_nb_shm_write_end(shm);
    step("left");
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
    step("pipe is written");
    return wrote;
}

long __real_nb_shm_pipe_read(struct nb_shm_pipe *pipe, void *data, size_t room, bool *writer_waits);
long __wrap_nb_shm_pipe_read(struct nb_shm_pipe *pipe, void *data, size_t room, bool *writer_waits);
long __wrap_nb_shm_pipe_read(struct nb_shm_pipe *pipe, void *data, size_t room, bool *writer_waits) {
    step("pipe is read");
    return __real_nb_shm_pipe_read(pipe, data, room, writer_waits);
}

void __real_nb_fold_direct(struct shared *l, struct nb_work *work, struct nb_range range);
void __wrap_nb_fold_direct(struct shared *l, struct nb_work *work, struct nb_range range);
void __wrap_nb_fold_direct(struct shared *l, struct nb_work *work, struct nb_range range) {
    step("share, before");
    __real_nb_fold_direct(l, work, range);
    step("share, after");
}

nb_pair_fn __real_nb_pair_kernel(int dtype, int redop);
nb_pair_fn __wrap_nb_pair_kernel(int dtype, int redop);

static void in_halves(void *one, void *two, const void *a, const void *b, size_t count, double scale) {
    size_t half = count / 2;
    size_t at = half * sizeof(float);
    nb_pair_fn both = __real_nb_pair_kernel(NB_F32, NB_SUM);
    both(one, two, a, b, half, scale);
    step("share, in the middle");
    both((char *)one + at, (char *)two + at, (const char *)a + at, (const char *)b + at, count - half, scale);
}

nb_pair_fn __wrap_nb_pair_kernel(int dtype, int redop) {
    return dtype == NB_F32 && redop == NB_SUM ? in_halves : __real_nb_pair_kernel(dtype, redop);
}

#define BOTH_ENDS(function, name)                                                                                      \
    void __real_##function(struct shared *l, struct nb_work *work, uint64_t window);                                   \
    void __wrap_##function(struct shared *l, struct nb_work *work, uint64_t window);                                   \
    void __wrap_##function(struct shared *l, struct nb_work *work, uint64_t window) {                                  \
        step(name ", before");                                                                                         \
        __real_##function(l, work, window);                                                                            \
        step(name ", after");                                                                                          \
    }

BOTH_ENDS(nb_fold_fill, "fill")
BOTH_ENDS(nb_fold_reduce, "reduce")
BOTH_ENDS(nb_fold_empty, "empty")
BOTH_ENDS(nb_fold_sum, "fold")
BOTH_ENDS(nb_fold_spread, "spread")

// --- ranks, each a process

static const struct point *point;
static float *line;
static pid_t stopped;      // rank 0's child
static int stopped_status; // as it stopped, or ended before

// On rank 0: ends the job once the rank has stopped, and not before. No deadline decides.
static void *watch(void *arg) {
    struct test_rank *me = arg;
    CHECK(waitpid(stopped, &stopped_status, WUNTRACED) == stopped, "wait: %m");
    nb_job_abort(me->job, "a rank stopped");
    return NULL;
}

// All-reduces until the job fails, which it does once a rank has stopped in one of them.
static void sum_on(struct test_rank *me) {
    struct nb_error err = {0};
    char *arena = arena_share(me);
    line = point->staged ? calloc(COUNT, sizeof *line) : (float *)(void *)arena;
    struct nb_segment all = {.base = line, .bytes = COUNT * sizeof *line};
    test_do(me, test_op("sum", NB_OP_ALLREDUCE, &all));
    atomic_store(&armed, true);
    test_barrier(me, "all are armed");
    pthread_t watcher;
    CHECK(me->rank != 0 || pthread_create(&watcher, NULL, watch, me) == 0, "thread");
    struct nb_arena more;
    int rc = nb_arena_open(&more, 1 << 20, &err);
    rc = rc < 0 ? rc : nb_job_map_arena(me->job, &more, &err);
    while (rc == 0) {
        for (size_t i = 0; i < COUNT; i++) {
            line[i] = 1; // not zero: a late sum of it and the fill is not the fill
        }
        rc = test_try(me, test_op("sum", NB_OP_ALLREDUCE, &all), &err);
    }
    CHECK(me->rank != 0 || pthread_join(watcher, NULL) == 0, "join");
}

static struct test_rank rank_like(const struct point *at) {
    struct test_rank template = test_on("shm");
    template.size = at->hosts == NULL ? 2 : (int)strlen(at->hosts);
    template.hosts = at->hosts;
    template.algorithm = at->hosts == NULL ? NB_ALGORITHM_NONE : NB_ALGORITHM_TWO_LEVEL;
    template.run = sum_on;
    return template;
}

// Runs a rank until its job has failed and is closed; then it fills its memory, and after a word from rank 0 looks at it.
static void rank_run(struct test_rank *me, int ends) {
    char byte;
    test_rank_main(me);
    if (me->rank == STOPPED) {
        _exit(0);
    }
    CHECK(line != NULL && me->rc == 0, "rank %d: %s", me->rank, me->err.text);
    for (size_t i = 0; i < COUNT; i++) {
        line[i] = FILL;
    }
    (void)!read(ends, &byte, 1); // the end: rank 0 says nothing else
    for (size_t i = 0; i < COUNT; i++) {
        CHECK(line[i] == FILL, "rank %d, stopped at '%s': [%zu] is %g, not %d", me->rank, point->step, i, line[i],
              FILL);
    }
}

// Rank 0 is this process, which has the others as children.
static void point_run(const struct point *at) {
    struct nb_listener listener = {.fd = -1};
    struct nb_error err = {0};
    struct nb_boot_config config = {.ifname = "lo", .secret = test_secret, .secret_bytes = sizeof test_secret};
    struct test_rank template = rank_like(at);
    pid_t ranks[SIZE_MAX_HERE] = {0};
    int ends[2];
    int status;
    point = at;
    config.size = template.size;
    CHECK(pipe(ends) == 0 && nb_listener_open(&listener, &config, NULL, &err) == 0, "listen: %s", err.text);
    nb_sock_format(&listener.addr, template.address);
    for (int r = 1; r < template.size; r++) {
        ranks[r] = fork();
        CHECK(ranks[r] >= 0, "fork: %m");
        if (ranks[r] == 0) {
            (void)prctl(PR_SET_PDEATHSIG, SIGKILL); // stopped, it would stay after a failure
            template.rank = r;
            stop_at = r == STOPPED ? at->step : NULL;
            close(ends[1]);
            rank_run(&template, ends[0]);
            _exit(0);
        }
    }
    template.listener = &listener;
    stopped = ranks[STOPPED];
    test_rank_main(&template);
    CHECK(line != NULL && template.rc == 0, "rank 0: %s", template.err.text);
    for (size_t i = 0; i < COUNT; i++) {
        line[i] = FILL;
    }
    CHECK(WIFSTOPPED(stopped_status), "it did not stop at '%s': status %x", at->step, (unsigned)stopped_status);
    CHECK(kill(ranks[STOPPED], SIGCONT) == 0 && waitpid(ranks[STOPPED], &status, 0) == ranks[STOPPED] && status == 0,
          "rank %d, stopped at '%s', ended with %x", STOPPED, at->step, (unsigned)status);
    close(ends[1]);
    for (size_t i = 0; i < COUNT; i++) {
        CHECK(line[i] == FILL, "rank 0, stopped at '%s': [%zu] is %g, not %d", at->step, i, line[i], FILL);
    }
    for (int r = 1; r < template.size; r++) {
        CHECK(r == STOPPED || (waitpid(ranks[r], &status, 0) == ranks[r] && status == 0), "rank %d", r);
    }
}

int main(void) {
    pid_t runs[POINTS];
    bool failed = false;
    for (int i = 0; i < POINTS; i++) { // side by side: most of it is waiting
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
        failed = failed || status != 0;
    }
    return failed;
}
