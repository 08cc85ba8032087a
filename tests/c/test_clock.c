// Clock synchronisation: with clocks that differ by seconds, the offset to rank 0's clock is right within the round
// trip. Also the times that an operation records, with a clock that counts its readings.
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

enum { CLOCK_RANKS = 3, DATA_BYTES = 4 << 20, SEGMENT_BYTES = 16384, UNIT_NS = 1000 };

// Each rank's thread has its own clock.
static const int64_t shifts_ns[CLOCK_RANKS] = {0, 5000000000, -3000000000};
static _Thread_local int64_t shift_ns;

// Counting clock: each reading is UNIT_NS later than the previous one, from `began_ns` on.
static atomic_bool counting;
static atomic_llong readings;
static int64_t began_ns;

int __real_clock_gettime(clockid_t clock, struct timespec *now);
int __wrap_clock_gettime(clockid_t clock, struct timespec *now);

int __wrap_clock_gettime(clockid_t clock, struct timespec *now) {
    int rc = __real_clock_gettime(clock, now);
    int64_t ns = (int64_t)now->tv_sec * 1000000000 + now->tv_nsec + shift_ns;
    if (clock == CLOCK_MONOTONIC && atomic_load(&counting)) {
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

static void *get_shifted_clock(void *arg) {
    struct rank *rank = arg;
    shift_ns = shifts_ns[rank->config.rank];
    rank->rc = nb_boot_clock(&rank->boot, &rank->offset_ns, &rank->trip_ns, &rank->err);
    return NULL;
}

static void *run_barrier(void *arg) {
    struct rank *rank = arg;
    rank->rc = nb_boot_barrier(&rank->boot, &rank->err);
    return NULL;
}

// Offsets of shifted clocks. A barrier afterwards checks that the connections are still usable.
static void test_shifted_clocks(void) {
    struct job job;
    job_open(&job, CLOCK_RANKS);
    run_all_but(&job, join_shifted, -1);
    check_joined(&job);
    run_all_but(&job, get_shifted_clock, -1);
    for (int i = 0; i < CLOCK_RANKS; i++) {
        const struct rank *rank = &job.ranks[i];
        CHECK(rank->rc == 0, "rank %d: %s", i, rank->err.text);
        int64_t off_ns = rank->offset_ns - shifts_ns[i];
        CHECK(llabs(off_ns) <= rank->trip_ns / 2 + 1, "rank %d's clock is ahead by %lld ns; %lld ns were measured", i,
              (long long)shifts_ns[i], (long long)rank->offset_ns);
    }
    run_all_but(&job, run_barrier, -1);
    for (int i = 0; i < CLOCK_RANKS; i++) {
        CHECK(job.ranks[i].rc == 0, "rank %d: %s", i, job.ranks[i].err.text);
    }
    job_close(&job);
}

// Each landing segment reads the clock. So the number of readings after the first byte is at least the number of
// segments.
static void time_of_first_byte(struct test_rank *me) {
    char *data = calloc(1, DATA_BYTES);
    struct nb_segment all = {.base = data, .bytes = DATA_BYTES};
    struct nb_error err = {0};
    struct nb_work_times times;
    CHECK(data != NULL, "memory");
    struct nb_work *work = test_submit(me, test_op("cut", NB_OP_ALLREDUCE, &all));
    CHECK(nb_work_wait(work, TEST_LIMIT_MS, &err) == 0, "rank %d: %s", me->rank, err.text);
    nb_work_times(work, &times);
    nb_work_release(work);
    CHECK(times.submit_ns <= times.agreed_ns && times.agreed_ns <= times.start_ns, "rank %d", me->rank);
    CHECK(times.start_ns < times.first_byte_ns && times.first_byte_ns < times.done_ns, "rank %d", me->rank);
    int64_t after = (times.done_ns - times.first_byte_ns) / UNIT_NS;
    int64_t landed = DATA_BYTES / SEGMENT_BYTES * 2 * (me->size - 1) / me->size; // over all steps
    CHECK(after >= landed - 1, "rank %d: %lld readings from the first byte to the end, %lld segments", me->rank,
          (long long)after, (long long)landed);
    free(data);
}

// Ranks are processes, so each counts its own readings.
static void test_times_of_an_operation(enum nb_algorithm_id algorithm) {
    struct test_rank template = {
        .size = 4, .transport = "tcp", .streams = 1, .timeout_ms = 20000, .run = time_of_first_byte};
    struct nb_boot_config config = {.size = template.size, .ifname = "lo", .secret = test_secret, .secret_bytes = 32};
    struct nb_listener listener = {.fd = -1};
    struct nb_error err = {0};
    pid_t ranks[TEST_RANKS_MAX];
    template.algorithm = algorithm;
    template.segment_bytes = SEGMENT_BYTES;
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
        CHECK(waitpid(ranks[r], &status, 0) == ranks[r] && status == 0, "rank %d ended with status %d", r, status);
    }
}

int main(void) {
    test_shifted_clocks();
    struct timespec now;
    CHECK(__real_clock_gettime(CLOCK_MONOTONIC, &now) == 0, "clock: %m");
    began_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    atomic_store(&counting, true);
    test_times_of_an_operation(NB_ALGORITHM_RING);
    test_times_of_an_operation(NB_ALGORITHM_HALVING);
    return 0;
}
