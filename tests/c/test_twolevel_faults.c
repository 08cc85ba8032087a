// Faults during a two-level all-reduce: a rank, which is a process, is killed, is stopped or loses a lane in a chosen
// phase. The result is right, or the error names the failed rank; the same holds for the next operation. The linker
// replaces the functions that fold, reduce and spread (ctest.py, WRAPPED).
#include <errno.h>
#include <stdatomic.h>
#include <sys/wait.h>

#include "engine/buffer.h"
#include "engine/shared_fold.h"
#include "stage.h"
#include "sums.h"
#include "transport/lanes_internal.h"
#include "transport/tcp_internal.h"

enum phase { FOLD, RING, SPREAD, PHASES };
enum fault { FAULT_KILL, FAULT_STOP, FAULT_RESET }; // FAULT_RESET: resets a lane to the next host

static const char *const phases[] = {"fold", "ring", "spread"};
static const char *const faults[] = {"killed", "stopped", "loses a lane"};

enum { RANKS = 4, COUNT = 1 << 20, SHORT_MS = 1500, LONG_MS = 20000 };

struct plan {
    enum phase phase;
    int skip; // calls of the phase before the fault
    enum fault fault;
    int target;    // rank
    bool unshared; // heap memory instead of a shared arena
    const char *transport;
    int streams;
};

// The fault to inject in this process, on the communication thread.
static struct {
    _Atomic bool armed;
    enum phase phase;
    enum fault fault;
    _Atomic int left;
    int fd; // FAULT_RESET: of the lane
} injection;

static void inject(enum phase phase) {
    static const struct sockaddr nowhere = {.sa_family = AF_UNSPEC};
    if (!atomic_load(&injection.armed) || phase != injection.phase || atomic_fetch_sub(&injection.left, 1) != 0) {
        return;
    }
    atomic_store(&injection.armed, false);
    if (injection.fault == FAULT_RESET) {
        CHECK(connect(injection.fd, &nowhere, sizeof nowhere) == 0, "reset: %m");
    } else {
        CHECK(raise(injection.fault == FAULT_KILL ? SIGKILL : SIGSTOP) == 0, "raise: %m"); // stops this thread at once
    }
}

void __real_nb_fold_sum(struct shared *local, struct nb_work *work, uint64_t block);
void __wrap_nb_fold_sum(struct shared *local, struct nb_work *work, uint64_t block);
void __real_nb_fold_spread(struct shared *local, struct nb_work *work, uint64_t block);
void __wrap_nb_fold_spread(struct shared *local, struct nb_work *work, uint64_t block);
void __real_nb_buffer_reduce(const struct nb_work *work, struct nb_range range, const void *data);
void __wrap_nb_buffer_reduce(const struct nb_work *work, struct nb_range range, const void *data);

void __wrap_nb_fold_sum(struct shared *local, struct nb_work *work, uint64_t block) {
    inject(FOLD);
    __real_nb_fold_sum(local, work, block);
}

void __wrap_nb_fold_spread(struct shared *local, struct nb_work *work, uint64_t block) {
    inject(SPREAD);
    __real_nb_fold_spread(local, work, block);
}

void __wrap_nb_buffer_reduce(const struct nb_work *work, struct nb_range range, const void *data) {
    if (work->shared.piece != NULL) {
        inject(RING);
    }
    __real_nb_buffer_reduce(work, range, data);
}

// The rank on the other host that owns the same part of the buffer.
static int partner(const struct test_rank *me) {
    return (me->rank + RANKS / 2) % RANKS;
}

static void arm(struct test_rank *me, const struct plan *plan) {
    injection.phase = plan->phase;
    injection.fault = plan->fault;
    injection.left = plan->skip;
    if (plan->fault == FAULT_RESET) {
        int peer = partner(me);
        const struct tcp_lane *lane =
            NB_CONTAINER(me->job->lanes->lane[me->job->info.streams_open - 1], struct tcp_lane, base);
        injection.fd = lane->conns[peer].out_watch.fd;
        CHECK(injection.fd >= 0, "no lane to rank %d", peer);
    }
    atomic_store(&injection.armed, true);
}

static void fill(const struct test_rank *me, float *data) {
    struct nb_segment all = {.base = data, .bytes = COUNT * sizeof *data};
    struct pattern p = pattern_of_input(NB_F32, me->rank);
    pattern_write(&p, &all, 0, COUNT);
}

static void check_sum(const struct test_rank *me, float *data) {
    struct nb_segment all = {.base = data, .bytes = COUNT * sizeof *data};
    struct pattern p = pattern_of_result(NB_F32, NB_SUM, me->size);
    size_t at = pattern_compare(&p, &all, 0, COUNT);
    CHECK(at == COUNT, "rank %d: [%zu] is %g", me->rank, at, (double)data[at]);
}

// True if the error is one that the fault may cause: it names the target rank.
static bool is_expected(const struct plan *plan, int rc, const struct nb_error *err) {
    if (plan->fault == FAULT_RESET) { // of the only lane: each of its ends may blame the other
        return rc == NB_EPEER && err->peer % (RANKS / 2) == plan->target % (RANKS / 2);
    }
    return err->peer == plan->target && (rc == NB_EPEER || (plan->fault == FAULT_STOP && rc == NB_ETIMEOUT));
}

static void sum_with_fault(struct test_rank *me) {
    const struct plan *plan = me->arg;
    struct nb_error err = {0};
    bool recoverable = plan->fault == FAULT_RESET && plan->streams > 1;
    bool same_host = me->rank / (RANKS / 2) == plan->target / (RANKS / 2);
    float *data = (float *)(void *)(plan->unshared ? malloc(COUNT * sizeof(float)) : arena_share(me));
    struct nb_segment all = {.base = data, .bytes = COUNT * sizeof *data};
    for (int round = 0; round < 2; round++) { // connects the peers
        fill(me, data);
        test_done(me, test_submit(me, test_op("before", NB_OP_ALLREDUCE, &all)));
        check_sum(me, data);
    }
    fill(me, data);
    if (me->rank == plan->target) {
        arm(me, plan);
    }
    int rc = test_try(me, test_op("sum", NB_OP_ALLREDUCE, &all), &err);
    if (rc == 0) {
        check_sum(me, data);
        // A lane may be reset after all data have arrived. A host cannot finish without its killed or stopped rank.
        CHECK(plan->fault == FAULT_RESET || !same_host, "rank %d has a sum without rank %d", me->rank, plan->target);
        fill(me, data);
        rc = test_try(me, test_op("after", NB_OP_ALLREDUCE, &all), &err);
    }
    if (recoverable) {
        CHECK(rc == 0, "rank %d: %d %s", me->rank, rc, err.text);
        check_sum(me, data);
        if (me->rank % (RANKS / 2) == plan->target % (RANKS / 2)) {
            await_lane_notice(me, partner(me));
        }
        test_barrier(me, "noticed");
    } else {
        CHECK(is_expected(plan, rc, &err), "rank %d: %d, peer %d, %s", me->rank, rc, err.peer, err.text);
    }
    CHECK(me->rank != plan->target || !atomic_load(&injection.armed), "the fault did not occur on rank %d", me->rank);
    if (plan->unshared) {
        nb_job_close(me->job); // after this, no thread uses the memory
        me->job = NULL;
        free(data);
    }
}

static pid_t start(const struct test_rank *template, int rank, struct nb_listener *listener) {
    (void)fflush(stdout); // otherwise each child prints it again
    pid_t pid = fork();
    if (pid == 0) {
        struct test_rank me = *template;
        me.rank = rank;
        me.listener = listener;
        nb_sock_format(&listener->addr, me.address);
        if (rank != 0) {
            nb_listener_close(listener);
            me.listener = NULL;
        }
        (void)test_rank_main(&me);
        if (me.rc == NB_ENOLIB) {
            SKIP("%s", me.err.text);
        }
        CHECK(me.rc == 0, "rank %d: %s", rank, me.err.text);
        exit(0);
    }
    CHECK(pid > 0, "fork: %m");
    return pid;
}

// Waits for a rank's process and checks its exit status. ctest.py kills a rank that hangs.
static void check_exit(const struct plan *plan, int rank, pid_t pid) {
    int status = 0;
    bool killed = plan->fault == FAULT_KILL && rank == plan->target;
    CHECK(waitpid(pid, &status, 0) == pid, "waitpid: %m");
    if (WIFEXITED(status) && WEXITSTATUS(status) == CHECK_SKIPPED) {
        SKIP("rank %d: libfabric is not available", rank);
    }
    CHECK(killed ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL : WIFEXITED(status) && WEXITSTATUS(status) == 0,
          "rank %d (fault: rank %d %s in %s %d, %s memory): status %x", rank, plan->target, faults[plan->fault],
          phases[plan->phase], plan->skip, plan->unshared ? "heap" : "shared", status);
}

static void run_plan(struct plan plan) {
    struct test_rank template = {.transport = plan.transport,
                                 .algorithm = NB_ALGORITHM_TWO_LEVEL,
                                 .size = RANKS,
                                 .streams = plan.streams,
                                 .timeout_ms = plan.fault == FAULT_STOP ? SHORT_MS : LONG_MS,
                                 .shm = NB_SHM_REQUIRED,
                                 .hosts = "aabb",
                                 .run = sum_with_fault,
                                 .arg = &plan};
    pid_t pids[RANKS];
    struct nb_listener listener = {.fd = -1};
    struct nb_error err = {0};
    struct nb_boot_config config = {.size = RANKS, .ifname = "lo", .secret = test_secret, .secret_bytes = 32};
    CHECK(nb_listener_open(&listener, &config, NULL, &err) == 0, "listen: %s", err.text);
    test_listener_for_child(&listener);
    for (int r = 0; r < RANKS; r++) {
        pids[r] = start(&template, r, &listener);
    }
    nb_listener_close(&listener);
    if (plan.fault == FAULT_STOP) {
        int status = 0;
        CHECK(waitpid(pids[plan.target], &status, WUNTRACED) == pids[plan.target] && WIFSTOPPED(status),
              "rank %d is not stopped: status %x", plan.target, status);
    }
    for (int r = 0; r < RANKS; r++) {
        if (r != plan.target) {
            check_exit(&plan, r, pids[r]);
        }
    }
    if (plan.fault == FAULT_STOP) {
        CHECK(kill(pids[plan.target], SIGCONT) == 0, "kill: %m");
    }
    check_exit(&plan, plan.target, pids[plan.target]);
}

static void run_all_phases(struct plan plan) {
    for (int phase = FOLD; phase < PHASES; phase++) {
        for (int unshared = 0; unshared < 2; unshared++) {
            plan.phase = (enum phase)phase;
            plan.unshared = unshared == 1;
            run_plan(plan);
        }
    }
    printf("rank %d %s after %d calls, %d streams over %s\n", plan.target, faults[plan.fault], plan.skip, plan.streams,
           plan.transport);
}

// Argument: kill, stop, reset or ofi.
int main(int argc, char **argv) {
    const char *mode = argc > 1 ? argv[1] : "kill";
    if (strcmp(mode, "kill") == 0) {
        for (int target = 0; target < RANKS; target++) {
            run_all_phases((struct plan){
                .fault = FAULT_KILL, .target = target, .skip = target % 3, .transport = "tcp", .streams = 2});
        }
    } else if (strcmp(mode, "ofi") == 0) {
        run_all_phases((struct plan){.fault = FAULT_KILL, .target = 1, .skip = 1, .transport = "ofi", .streams = 2});
    } else if (strcmp(mode, "stop") == 0) {
        run_all_phases((struct plan){.fault = FAULT_STOP, .target = 3, .skip = 1, .transport = "tcp", .streams = 2});
    } else {
        for (int target = 0; target < RANKS; target += 3) {
            run_all_phases((struct plan){
                .fault = FAULT_RESET, .target = target, .skip = target / 3, .transport = "tcp", .streams = 3});
            run_all_phases((struct plan){
                .fault = FAULT_RESET, .target = target, .skip = target / 3, .transport = "tcp", .streams = 1});
        }
    }
    return 0;
}
