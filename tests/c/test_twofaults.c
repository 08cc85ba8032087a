// Ranks, each a process, that die, fall silent or lose a lane at a chosen point of a two-level all-reduce. The sum
// is right, or an error names the rank; the same holds for the next operation. The linker replaces the functions
// that fold, reduce and spread (ctest.py, WRAPPED).
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
enum blow { KILL, STOP, CUT }; // CUT: a lane to the next host is reset

static const char *const phases[] = {"fold", "ring", "spread"};
static const char *const blows[] = {"killed", "stopped", "a lane reset"};

enum { RANKS = 4, COUNT = 1 << 20, QUICK_MS = 1500, LONG_MS = 20000 };

struct plan {
    enum phase phase;
    int before; // how often that is done well first
    enum blow blow;
    int victim;
    bool elsewhere; // memory that is not shared
    const char *transport;
    int streams;
};

// Of this process: where the communication thread is struck.
static struct {
    _Atomic bool armed;
    enum phase phase;
    enum blow blow;
    _Atomic int left;
    int fd; // of a lane
} trap;

static void pass(enum phase phase) {
    static const struct sockaddr nowhere = {.sa_family = AF_UNSPEC};
    if (!atomic_load(&trap.armed) || phase != trap.phase || atomic_fetch_sub(&trap.left, 1) != 0) {
        return;
    }
    atomic_store(&trap.armed, false);
    if (trap.blow == CUT) {
        CHECK(connect(trap.fd, &nowhere, sizeof nowhere) == 0, "reset: %m");
    } else {
        CHECK(raise(trap.blow == KILL ? SIGKILL : SIGSTOP) == 0, "raise: %m"); // this thread goes no step further
    }
}

void __real_nb_fold_sum(struct shared *local, struct nb_work *work, uint64_t block);
void __wrap_nb_fold_sum(struct shared *local, struct nb_work *work, uint64_t block);
void __real_nb_fold_spread(struct shared *local, struct nb_work *work, uint64_t block);
void __wrap_nb_fold_spread(struct shared *local, struct nb_work *work, uint64_t block);
void __real_nb_buffer_reduce(const struct nb_work *work, struct nb_range range, const void *data);
void __wrap_nb_buffer_reduce(const struct nb_work *work, struct nb_range range, const void *data);

void __wrap_nb_fold_sum(struct shared *local, struct nb_work *work, uint64_t block) {
    pass(FOLD);
    __real_nb_fold_sum(local, work, block);
}

void __wrap_nb_fold_spread(struct shared *local, struct nb_work *work, uint64_t block) {
    pass(SPREAD);
    __real_nb_fold_spread(local, work, block);
}

void __wrap_nb_buffer_reduce(const struct nb_work *work, struct nb_range range, const void *data) {
    if (work->shared.piece != NULL) {
        pass(RING);
    }
    __real_nb_buffer_reduce(work, range, data);
}

// The owner of the same part on the other host.
static int partner(const struct test_rank *me) {
    return (me->rank + RANKS / 2) % RANKS;
}

static void arm(struct test_rank *me, const struct plan *plan) {
    trap.phase = plan->phase;
    trap.blow = plan->blow;
    trap.left = plan->before;
    if (plan->blow == CUT) {
        int peer = partner(me);
        const struct tcp_lane *lane =
            NB_CONTAINER(me->job->lanes->lane[me->job->info.streams_open - 1], struct tcp_lane, base);
        trap.fd = lane->conns[peer].out_watch.fd;
        CHECK(trap.fd >= 0, "no lane to rank %d", peer);
    }
    atomic_store(&trap.armed, true);
}

static void fill(const struct test_rank *me, float *data) {
    for (size_t i = 0; i < COUNT; i++) {
        data[i] = given(me->rank, i);
    }
}

static void check_sum(const struct test_rank *me, const float *data) {
    for (size_t i = 0; i < COUNT; i++) {
        CHECK((double)data[i] == fold(NB_SUM, me->size, i), "rank %d: [%zu] is %g", me->rank, i, (double)data[i]);
    }
}

// The errors that may come of it: the victim's name, within the requested deadline.
static bool is_told(const struct plan *plan, int rc, const struct nb_error *err) {
    if (plan->blow == CUT) { // the only lane: each of its ends may blame the other
        return rc == NB_EPEER && err->peer % (RANKS / 2) == plan->victim % (RANKS / 2);
    }
    return err->peer == plan->victim && (rc == NB_EPEER || (plan->blow == STOP && rc == NB_ETIMEOUT));
}

static void struck(struct test_rank *me) {
    const struct plan *plan = me->arg;
    struct nb_error err = {0};
    bool harmless = plan->blow == CUT && plan->streams > 1;
    bool mate = me->rank / (RANKS / 2) == plan->victim / (RANKS / 2); // its host's
    float *data = (float *)(void *)(plan->elsewhere ? malloc(COUNT * sizeof(float)) : arena_share(me));
    struct nb_segment all = {.base = data, .bytes = COUNT * sizeof *data};
    for (int round = 0; round < 2; round++) { // peers are connected
        fill(me, data);
        test_done(me, test_submit(me, test_op("before", NB_OP_ALLREDUCE, &all)));
        check_sum(me, data);
    }
    fill(me, data);
    if (me->rank == plan->victim) {
        arm(me, plan);
    }
    int rc = test_try(me, test_op("sum", NB_OP_ALLREDUCE, &all), &err);
    if (rc == 0) {
        check_sum(me, data);
        // A lane may be reset when all has arrived; a rank that does not go on is missed.
        CHECK(plan->blow == CUT || !mate, "rank %d has a sum without rank %d", me->rank, plan->victim);
        fill(me, data);
        rc = test_try(me, test_op("after", NB_OP_ALLREDUCE, &all), &err);
    }
    if (harmless) {
        CHECK(rc == 0, "rank %d: %d %s", me->rank, rc, err.text);
        check_sum(me, data);
        if (me->rank % (RANKS / 2) == plan->victim % (RANKS / 2)) {
            heard_of_lanes(me, partner(me));
        }
        test_barrier(me, "heard");
    } else {
        CHECK(is_told(plan, rc, &err), "rank %d: %d, peer %d, %s", me->rank, rc, err.peer, err.text);
    }
    CHECK(me->rank != plan->victim || !atomic_load(&trap.armed), "nothing struck rank %d", me->rank);
    if (plan->elsewhere) {
        nb_job_close(me->job); // from here on nobody touches the memory
        me->job = NULL;
        free(data);
    }
}

static pid_t start(const struct test_rank *like, int rank, struct nb_listener *listener) {
    (void)fflush(stdout); // or each rank would print it too
    pid_t pid = fork();
    if (pid == 0) {
        struct test_rank me = *like;
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

// Waits for a rank, which ends by itself. A rank that does not is ended by who runs this program.
static void check_end_of(const struct plan *plan, int rank, pid_t pid) {
    int status = 0;
    bool killed = plan->blow == KILL && rank == plan->victim;
    CHECK(waitpid(pid, &status, 0) == pid, "waitpid: %m");
    if (WIFEXITED(status) && WEXITSTATUS(status) == CHECK_SKIPPED) {
        SKIP("rank %d has no libfabric", rank);
    }
    CHECK(killed ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL : WIFEXITED(status) && WEXITSTATUS(status) == 0,
          "rank %d, rank %d %s in %s %d, %s memory: status %x", rank, plan->victim, blows[plan->blow],
          phases[plan->phase], plan->before, plan->elsewhere ? "any" : "shared", status);
}

static void run_plan(struct plan plan) {
    struct test_rank like = {.transport = plan.transport,
                             .algorithm = NB_ALGORITHM_TWO_LEVEL,
                             .size = RANKS,
                             .streams = plan.streams,
                             .timeout_ms = plan.blow == STOP ? QUICK_MS : LONG_MS,
                             .shm = NB_SHM_REQUIRED,
                             .hosts = "aabb",
                             .run = struck,
                             .arg = &plan};
    pid_t pids[RANKS];
    struct nb_listener listener = {.fd = -1};
    struct nb_error err = {0};
    struct nb_boot_config config = {.size = RANKS, .ifname = "lo", .secret = test_secret, .secret_bytes = 32};
    CHECK(nb_listener_open(&listener, &config, NULL, &err) == 0, "listen: %s", err.text);
    test_listener_for_child(&listener);
    for (int r = 0; r < RANKS; r++) {
        pids[r] = start(&like, r, &listener);
    }
    nb_listener_close(&listener);
    if (plan.blow == STOP) {
        int status = 0;
        CHECK(waitpid(pids[plan.victim], &status, WUNTRACED) == pids[plan.victim] && WIFSTOPPED(status),
              "rank %d does not stop: status %x", plan.victim, status);
    }
    for (int r = 0; r < RANKS; r++) {
        if (r != plan.victim) {
            check_end_of(&plan, r, pids[r]);
        }
    }
    if (plan.blow == STOP) {
        CHECK(kill(pids[plan.victim], SIGCONT) == 0, "kill: %m");
    }
    check_end_of(&plan, plan.victim, pids[plan.victim]);
}

static void in_all_phases(struct plan plan) {
    for (int phase = FOLD; phase < PHASES; phase++) {
        for (int elsewhere = 0; elsewhere < 2; elsewhere++) {
            plan.phase = (enum phase)phase;
            plan.elsewhere = elsewhere == 1;
            run_plan(plan);
        }
    }
    printf("rank %d %s, %d before, %d streams over %s\n", plan.victim, blows[plan.blow], plan.before, plan.streams,
           plan.transport);
}

// What a word says.
int main(int argc, char **argv) {
    const char *word = argc > 1 ? argv[1] : "kill";
    if (strcmp(word, "kill") == 0) {
        for (int victim = 0; victim < RANKS; victim++) {
            in_all_phases(
                (struct plan){.blow = KILL, .victim = victim, .before = victim % 3, .transport = "tcp", .streams = 2});
        }
    } else if (strcmp(word, "ofi") == 0) {
        in_all_phases((struct plan){.blow = KILL, .victim = 1, .before = 1, .transport = "ofi", .streams = 2});
    } else if (strcmp(word, "stop") == 0) {
        in_all_phases((struct plan){.blow = STOP, .victim = 3, .before = 1, .transport = "tcp", .streams = 2});
    } else {
        for (int victim = 0; victim < RANKS; victim += 3) {
            in_all_phases(
                (struct plan){.blow = CUT, .victim = victim, .before = victim / 3, .transport = "tcp", .streams = 3});
            in_all_phases(
                (struct plan){.blow = CUT, .victim = victim, .before = victim / 3, .transport = "tcp", .streams = 1});
        }
    }
    return 0;
}
