// Clocks that differ by seconds: the offset to rank 0's clock has the right sign, within the round trip. Also the
// times that an operation records, by a clock that counts its readings.
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "boot.h"
#include "check.h"
#include "job.h"

enum { CLOCK_RANKS = 3, LINE_BYTES = 4 << 20, CUT_BYTES = 16384, UNIT_NS = 1000 };

// The clock of a rank is that of its thread.
static const int64_t shifts_ns[CLOCK_RANKS] = {0, 5000000000, -3000000000};
static _Thread_local int64_t shift_ns;

// Each reading is UNIT_NS later than the one before, from `began_ns` on.
static atomic_bool counts;
static atomic_llong readings;
static int64_t began_ns;

int __real_clock_gettime(clockid_t clock, struct timespec *now);
int __wrap_clock_gettime(clockid_t clock, struct timespec *now);

int __wrap_clock_gettime(clockid_t clock, struct timespec *now) {
    int rc = __real_clock_gettime(clock, now);
    int64_t ns = (int64_t)now->tv_sec * 1000000000 + now->tv_nsec + shift_ns;
    if (clock == CLOCK_MONOTONIC && atomic_load(&counts)) {
        ns = began_ns + (int64_t)atomic_fetch_add(&readings, 1) * UNIT_NS;
    }
    now->tv_sec = ns / 1000000000;
    now->tv_nsec = ns % 1000000000;
    return rc;
}

static void *join_shifted(void *arg) {
    shift_ns = shifts_ns[((struct rank *)arg)->config.rank];
    return join(arg);
}

static void *ask_shifted(void *arg) {
    struct rank *rank = arg;
    shift_ns = shifts_ns[rank->config.rank];
    rank->rc = nb_boot_clock(&rank->boot, &rank->offset_ns, &rank->trip_ns, &rank->err);
    return NULL;
}

static void *pass_barrier(void *arg) {
    struct rank *rank = arg;
    rank->rc = nb_boot_barrier(&rank->boot, &rank->err);
    return NULL;
}

// A barrier afterwards shows that the connections are still in step.
static void shifted(void) {
    struct job job;
    job_open(&job, CLOCK_RANKS);
    run_all_but(&job, join_shifted, -1);
    check_joined(&job);
    run_all_but(&job, ask_shifted, -1);
    for (int i = 0; i < CLOCK_RANKS; i++) {
        const struct rank *rank = &job.ranks[i];
        CHECK(rank->rc == 0, "rank %d: %s", i, rank->err.text);
        int64_t off_ns = rank->offset_ns - shifts_ns[i];
        CHECK(llabs(off_ns) <= rank->trip_ns / 2 + 1, "rank %d's clock is %lld ns ahead, not %lld", i,
              (long long)shifts_ns[i], (long long)rank->offset_ns);
    }
    run_all_but(&job, pass_barrier, -1);
    for (int i = 0; i < CLOCK_RANKS; i++) {
        CHECK(job.ranks[i].rc == 0, "rank %d: %s", i, job.ranks[i].err.text);
    }
    job_close(&job);
}

// Every segment that lands takes a reading of the clock: the first is as many readings before the end.
static void first_byte(struct test_rank *me) {
    char *line = calloc(1, LINE_BYTES);
    struct nb_segment all = {.base = line, .bytes = LINE_BYTES};
    struct nb_error err = {0};
    struct nb_work_times times;
    CHECK(line != NULL, "memory");
    struct nb_work *work = test_submit(me, test_op("cut", NB_OP_ALLREDUCE, &all));
    CHECK(nb_work_wait(work, TEST_LIMIT_MS, &err) == 0, "rank %d: %s", me->rank, err.text);
    nb_work_times(work, &times);
    nb_work_release(work);
    CHECK(times.submit_ns <= times.agreed_ns && times.agreed_ns <= times.start_ns, "rank %d", me->rank);
    CHECK(times.start_ns < times.first_byte_ns && times.first_byte_ns < times.done_ns, "rank %d", me->rank);
    int64_t after = (times.done_ns - times.first_byte_ns) / UNIT_NS;
    int64_t landed = LINE_BYTES / CUT_BYTES * 2 * (me->size - 1) / me->size; // of all steps together
    CHECK(after >= landed - 1, "rank %d: %lld readings from the first byte to the end, %lld segments", me->rank,
          (long long)after, (long long)landed);
    free(line);
}

// The ranks are processes: each counts its own readings.
static void processes(enum nb_algorithm_id algorithm) {
    struct test_rank template = {.size = 4, .transport = "tcp", .streams = 1, .timeout_ms = 20000, .run = first_byte};
    struct nb_boot_config config = {.size = template.size, .ifname = "lo", .secret = test_secret, .secret_bytes = 32};
    struct nb_listener listener = {.fd = -1};
    struct nb_error err = {0};
    pid_t ranks[TEST_RANKS_MAX];
    template.algorithm = algorithm;
    template.segment_bytes = CUT_BYTES;
    template.shm = NB_SHM_OFF;
    CHECK(nb_listener_open(&listener, &config, NULL, &err) == 0, "listen: %s", err.text);
    test_listener_for_child(&listener);
    nb_sock_format(&listener.addr, template.address);
    for (int r = 0; r < template.size; r++) {
        ranks[r] = fork();
        CHECK(ranks[r] >= 0, "fork: %m");
        if (ranks[r] == 0) {
            template.rank = r;
            template.listener = r == 0 ? &listener : NULL;
            test_rank_main(&template);
            CHECK(template.rc == 0, "rank %d: %s", r, template.err.text);
            _exit(0);
        }
    }
    nb_listener_close(&listener);
    for (int r = 0; r < template.size; r++) {
        int status = 0;
        CHECK(waitpid(ranks[r], &status, 0) == ranks[r] && status == 0, "rank %d ends with %d", r, status);
    }
}

int main(void) {
    shifted();
    struct timespec now;
    CHECK(__real_clock_gettime(CLOCK_MONOTONIC, &now) == 0, "clock: %m");
    began_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    atomic_store(&counts, true);
    processes(NB_ALGORITHM_RING);
    processes(NB_ALGORITHM_HALVING);
    return 0;
}
