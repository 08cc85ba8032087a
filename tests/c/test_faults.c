// Faults of ranks: a rank leaves, aborts, hangs or fails to open at various moments of a job. The other ranks fail with
// an error that names it, or continue. No rank waits forever, and a work stays valid until it is released.
#include <errno.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/interrupt.h"
#include "engine/context.h"
#include "job.h"
#include "stage.h"
#include "transport/lanes_internal.h"

// Waits until the communication thread has run several passes, so that it has read all data that were in its sockets.
static void await_passes(struct test_rank *me) {
    struct timespec pause = {.tv_nsec = 1000 * 1000};
    int64_t until = nb_now_ns() + (int64_t)TEST_LIMIT_MS * 1000000;
    static char memory[64];
    for (int i = 0; i < 3; i++) {
        struct nb_error err = {0};
        CHECK(nb_job_map(me->job, memory, sizeof memory, &err) == 0, "map: %s", err.text);
        bool taken = false;
        while (!taken) {
            CHECK(nb_now_ns() < until, "rank %d: its thread makes no progress", me->rank);
            nanosleep(&pause, NULL);
            pthread_mutex_lock(&me->job->lock);
            taken = nb_list_empty(&me->job->inbox.maps);
            pthread_mutex_unlock(&me->job->lock);
        }
    }
}

// A rank has left before the others submit: no rank waits for it.
static void submit_after_leaving(struct test_rank *me, int leaving_rank) {
    struct stage *stage = me->arg;
    struct nb_error err = {0};
    test_barrier(me, "before");
    if (me->rank == leaving_rank) {
        nb_job_close(me->job);
        me->job = NULL;
        pthread_barrier_wait(&stage->barrier);
        pthread_barrier_wait(&stage->barrier);
        return;
    }
    pthread_barrier_wait(&stage->barrier); // the leaving rank has announced it
    await_passes(me);
    pthread_barrier_wait(&stage->barrier); // rank 0 has forwarded it
    await_passes(me);
    int rc = test_try(me, test_op("after", NB_OP_BARRIER, NULL), &err);
    CHECK(rc == NB_EPEER && err.peer == leaving_rank, "rank %d: %d, peer %d, %s", me->rank, rc, err.peer, err.text);
    CHECK(test_try(me, test_op("again", NB_OP_BARRIER, NULL), &err) == NB_EPEER, "a failed job accepts an operation");
}

static void rank_1_left_before_submission(struct test_rank *me) {
    submit_after_leaving(me, 1);
}

static void rank_0_left_before_submission(struct test_rank *me) {
    submit_after_leaving(me, 0);
}

// A rank leaves after the other ranks have submitted an operation.
static void rank_leaves_after_submission(struct test_rank *me) {
    struct stage *stage = me->arg;
    struct nb_error err = {0};
    if (me->rank == 2) {
        test_barrier(me, "before");
        pthread_barrier_wait(&stage->barrier);
        return;
    }
    test_barrier(me, "before");
    struct nb_work *work = test_submit(me, test_op("half", NB_OP_BARRIER, NULL));
    pthread_barrier_wait(&stage->barrier);
    int rc = test_finish(work, &err);
    CHECK(rc == NB_EPEER && err.peer == 2, "rank %d: %d, peer %d, %s", me->rank, rc, err.peer, err.text);
    // Rank 0 decides it. Rank 1 may give up by itself, when its lanes to rank 2 have ended for long enough.
    CHECK(me->rank != 0 || strstr(err.text, "half") != NULL, "text: %s", err.text);
}

// Every rank leaves as soon as its own last operation finishes. The others still receive its data.
static void ranks_leave_after_last_operation(struct test_rank *me) {
    struct stage *stage = me->arg;
    float *data = malloc(LARGE * sizeof *data);
    struct nb_error err = {0};
    struct nb_segment all = {.base = data, .bytes = LARGE * sizeof *data};
    struct nb_op op = test_op("last", NB_OP_ALLREDUCE, &all);
    bool broadcast = stage->round % 2 == 0;
    for (size_t i = 0; i < LARGE; i++) {
        data[i] = broadcast && me->rank != stage->round % me->size ? -1 : (float)(i % 97);
    }
    op.kind = broadcast ? NB_OP_BROADCAST : NB_OP_ALLREDUCE;
    op.root = stage->round % me->size;
    CHECK(test_finish(test_submit(me, op), &err) == 0, "round %d, rank %d: %s", stage->round, me->rank, err.text);
    for (size_t i = 0; i < LARGE; i++) {
        float want = (float)(i % 97) * (broadcast ? 1 : (float)me->size);
        CHECK(data[i] == want, "round %d, rank %d: [%zu] is %g", stage->round, me->rank, i, (double)data[i]);
    }
    free(data);
}

// The communication thread of one rank hangs: after the deadline, the others name this rank.
static void hang(struct test_rank *me, int hung_rank) {
    struct stage *stage = me->arg;
    struct nb_error err = {0};
    test_barrier(me, "before");
    if (me->rank == hung_rank) {
        pthread_mutex_lock(&me->job->lock); // the thread needs this lock in every pass
        pthread_barrier_wait(&stage->barrier);
        pthread_barrier_wait(&stage->barrier);
        pthread_mutex_unlock(&me->job->lock);
        return;
    }
    pthread_barrier_wait(&stage->barrier);
    int rc = test_finish(test_submit(me, test_op("after", NB_OP_BARRIER, NULL)), &err);
    CHECK(rc == NB_ETIMEOUT && err.peer == hung_rank, "rank %d: %d, peer %d, %s", me->rank, rc, err.peer, err.text);
    pthread_barrier_wait(&stage->barrier);
}

static void rank_2_hangs(struct test_rank *me) {
    hang(me, 2);
}

static void rank_0_hangs(struct test_rank *me) {
    hang(me, 0);
}

// Rank 2 hangs, and only rank 1 waits for it, in a communicator without rank 0: rank 0 notices it, and the job ends.
static void rank_2_hangs_in_a_communicator(struct test_rank *me) {
    struct stage *stage = me->arg;
    const int members[] = {1, 2};
    struct nb_error err = {0};
    test_barrier(me, "before");
    if (me->rank == 2) {
        pthread_mutex_lock(&me->job->lock); // the thread needs this lock in every pass
    }
    pthread_barrier_wait(&stage->barrier);
    if (me->rank == 1) {
        struct test_rank member = *me;
        CHECK(nb_comm_make(me->job, 1, members, 2, &err) == 0, "%s", err.text);
        member.comm = nb_comm_find(me->job, 1);
        int rc = test_try(&member, test_op("after", NB_OP_BARRIER, NULL), &err);
        CHECK(rc == NB_ETIMEOUT && err.peer == 2, "%d, peer %d, %s", rc, err.peer, err.text);
        CHECK(strstr(err.text, "rank 2 has been silent") != NULL, "text: %s", err.text);
    }
    pthread_barrier_wait(&stage->barrier);
    if (me->rank == 2) {
        pthread_mutex_unlock(&me->job->lock);
    }
}

// A suspended rank that resumes learns that it was the silent rank, and blames no other rank.
static void suspended_rank_resumes(struct test_rank *me) {
    struct stage *stage = me->arg;
    struct nb_error err = {0};
    struct nb_work *work = NULL;
    test_barrier(me, "before");
    if (me->rank == 1) {
        work = test_submit(me, test_op("never", NB_OP_BARRIER, NULL));
        await_passes(me);
        test_freeze(me->job->progress.thread);
    }
    pthread_barrier_wait(&stage->barrier);
    int rc = me->rank == 1 ? 0 : test_try(me, test_op("after", NB_OP_BARRIER, NULL), &err);
    pthread_barrier_wait(&stage->barrier);
    if (me->rank == 1) {
        test_thaw();
        rc = test_finish(work, &err);
    }
    CHECK(rc == NB_ETIMEOUT && err.peer == 1, "rank %d: %d, peer %d, %s", me->rank, rc, err.peer, err.text);
    CHECK(strstr(err.text, "rank 1 has been silent") != NULL, "text: %s", err.text);
    pthread_barrier_wait(&stage->barrier);
}

static void *wait_until_closed(void *arg) {
    struct nb_error err = {0};
    int rc = nb_work_wait(arg, TEST_LIMIT_MS, &err);
    CHECK(rc == NB_ECLOSED, "%d: %s", rc, err.text);
    return NULL;
}

// The job closes while operations are pending and threads wait for them. Afterwards the works are tested and released.
static void close_with_pending_operations(struct test_rank *me) {
    struct stage *stage = me->arg;
    struct nb_error err = {0};
    struct nb_work *works[3];
    pthread_t threads[3];
    if (me->rank == 1) {
        pthread_barrier_wait(&stage->barrier);
        return;
    }
    for (int i = 0; i < 3; i++) {
        char name[16];
        snprintf(name, sizeof name, "never.%d", i);
        works[i] = test_submit(me, test_op(name, NB_OP_BARRIER, NULL));
        CHECK(pthread_create(&threads[i], NULL, wait_until_closed, works[i]) == 0, "thread");
    }
    int inside = 0;
    while (inside < 3) {
        struct timespec pause = {.tv_nsec = 1000 * 1000};
        nanosleep(&pause, NULL);
        pthread_mutex_lock(&me->job->lock);
        inside = me->job->progress.waiters;
        pthread_mutex_unlock(&me->job->lock);
    }
    nb_job_close(me->job);
    me->job = NULL;
    for (int i = 0; i < 3; i++) {
        int code = 0;
        struct nb_work_times times;
        pthread_join(threads[i], NULL);
        CHECK(nb_work_test(works[i], &code) && code == NB_ECLOSED, "code %d", code);
        CHECK(nb_work_wait(works[i], 0, &err) == NB_ECLOSED, "%s", err.text);
        nb_work_times(works[i], &times);
        CHECK(times.done_ns >= times.submit_ns, "done_ns is before submit_ns");
        nb_work_release(works[i]);
    }
    pthread_barrier_wait(&stage->barrier);
}

static void rank_aborts(struct test_rank *me) {
    struct nb_error err = {0};
    test_barrier(me, "before");
    if (me->rank == 1) {
        nb_job_abort(me->job, "its data are bad");
        return; // and closes at once
    }
    int rc = test_try(me, test_op("after", NB_OP_BARRIER, NULL), &err);
    CHECK(rc == NB_EPEER && err.peer == 1, "rank %d: %d, peer %d, %s", me->rank, rc, err.peer, err.text);
    CHECK(strstr(err.text, "its data are bad") != NULL, "text: %s", err.text);
}

// Three faults at once: rank 2's thread hangs, rank 1 aborts, rank 0 closes.
static void three_faults_at_once(struct test_rank *me) {
    struct stage *stage = me->arg;
    float *data = calloc(LARGE, sizeof *data);
    struct nb_segment all = {.base = data, .bytes = LARGE * sizeof *data};
    test_barrier(me, "before");
    struct nb_work *work = test_submit(me, test_op("sum", NB_OP_ALLREDUCE, &all));
    pthread_barrier_wait(&stage->barrier);
    if (me->rank == 1) {
        nb_job_abort(me->job, "at once");
    } else if (me->rank == 2) {
        pthread_mutex_lock(&me->job->lock);
        pthread_barrier_wait(&stage->barrier);
        pthread_mutex_unlock(&me->job->lock);
    }
    nb_job_close(me->job);
    me->job = NULL;
    if (me->rank != 2) {
        pthread_barrier_wait(&stage->barrier);
    }
    int code = 0;
    CHECK(nb_work_test(work, &code), "the work is not done after its job has closed");
    nb_work_release(work);
    free(data);
}

// A rank whose lanes do not open.
struct opening_rank {
    int rank;
    int size;
    struct nb_interrupt *interrupt;
    struct nb_listener *listener;
    char address[NB_SOCK_TEXT];
    struct nb_port_range ports;
    struct nb_error err;
    int rc;
};

enum { OPENING = 4, FAILS_TO_OPEN = 2 };

static void *opening_main(void *arg) {
    struct opening_rank *me = arg;
    struct nb_boot boot = {0};
    struct nb_job *job = NULL;
    struct nb_boot_config config = {.rank = me->rank, .size = me->size, .timeout_ms = TEST_LIMIT_MS, .ifname = "lo"};
    config.interrupt = me->interrupt;
    config.secret = test_secret;
    config.secret_bytes = sizeof test_secret;
    config.tag = "test";
    CHECK(nb_boot_join(&boot, &config, me->listener, me->rank == 0 ? NULL : me->address, &me->err) == 0, "%s",
          me->err.text);
    struct nb_job_config template = {.boot = &boot, .transport = "tcp", .streams = 2, .timeout_ms = TEST_LIMIT_MS};
    template.ports = me->ports;
    me->rc = nb_job_open(&job, &template, &me->err);
    CHECK(me->rc < 0, "rank %d opened the job", me->rank);
    return NULL;
}

// Opens a job on OPENING ranks, which fails. FAILS_TO_OPEN has only this port for its lanes; 0: any.
static void open_on_all(struct opening_rank ranks[OPENING], uint16_t port) {
    pthread_t threads[OPENING];
    struct nb_listener listener = {.fd = -1};
    struct nb_error err = {0};
    struct nb_boot_config config = {.size = OPENING, .ifname = "lo", .secret = test_secret, .secret_bytes = 32};
    CHECK(nb_listener_open(&listener, &config, NULL, &err) == 0, "listen: %s", err.text);
    for (int r = 0; r < OPENING; r++) {
        ranks[r] = (struct opening_rank){.rank = r, .size = OPENING, .listener = r == 0 ? &listener : NULL};
        nb_sock_format(&listener.addr, ranks[r].address);
        ranks[r].ports = r == FAILS_TO_OPEN ? (struct nb_port_range){port, port} : (struct nb_port_range){0, 0};
        CHECK(pthread_create(&threads[r], NULL, opening_main, &ranks[r]) == 0, "thread %d", r);
    }
    for (int r = 0; r < OPENING; r++) {
        pthread_join(threads[r], NULL);
        CHECK(ranks[r].rc == ranks[r].err.code, "rank %d: %d and %d", r, ranks[r].rc, ranks[r].err.code);
    }
    nb_listener_close(&listener);
}

static void lanes_do_not_open(void) {
    struct opening_rank ranks[OPENING];
    struct nb_listener taken = {.fd = -1}; // occupies a port
    struct nb_error err = {0};
    struct nb_boot_config config = {.size = OPENING, .ifname = "lo", .secret = test_secret, .secret_bytes = 32};
    CHECK(nb_listener_open(&taken, &config, NULL, &err) == 0, "listen: %s", err.text);
    open_on_all(ranks, nb_sock_port(&taken.addr));
    nb_listener_close(&taken);
    for (int r = 0; r < OPENING; r++) {
        if (r == FAILS_TO_OPEN) {
            CHECK(ranks[r].rc == -EADDRINUSE, "rank %d: %s", r, ranks[r].err.text);
        } else {
            CHECK(ranks[r].rc == NB_EPEER && ranks[r].err.peer == FAILS_TO_OPEN, "rank %d: peer %d, %s", r,
                  ranks[r].err.peer, ranks[r].err.text);
        }
    }
}

static _Atomic bool no_route_from_1_to_2;

// All ranks name the rank that could not be reached; none names the rank that noticed it and left.
static void a_neighbour_cannot_be_reached(void) {
    struct opening_rank ranks[OPENING];
    atomic_store(&no_route_from_1_to_2, true);
    open_on_all(ranks, 0);
    atomic_store(&no_route_from_1_to_2, false);
    for (int r = 0; r < OPENING; r++) {
        CHECK(ranks[r].rc == -EHOSTUNREACH && ranks[r].err.peer == 2, "rank %d: peer %d, %s", r, ranks[r].err.peer,
              ranks[r].err.text);
        CHECK(strstr(ranks[r].err.text, "no route to rank 2") != NULL, "rank %d: %s", r, ranks[r].err.text);
    }
}

// Rank 1 stops before it connects its lanes, until rank 0 has been interrupted.
static _Atomic bool rank_1_stops;
static _Atomic bool rank_1_stopped;
static sem_t rank_0_left;

int __real_nb_lanes_peer_open(struct nb_lanes *lanes, int peer, const void *addresses, struct nb_error *err);
int __wrap_nb_lanes_peer_open(struct nb_lanes *lanes, int peer, const void *addresses, struct nb_error *err);

int __wrap_nb_lanes_peer_open(struct nb_lanes *lanes, int peer, const void *addresses, struct nb_error *err) {
    if (peer == 2 && lanes->config.lane.rank == 1 && atomic_load(&no_route_from_1_to_2)) {
        return nb_fail_peer(err, -EHOSTUNREACH, peer, "no route to rank 2");
    }
    if (peer == 0 && atomic_exchange(&rank_1_stops, false)) {
        atomic_store(&rank_1_stopped, true);
        while (sem_wait(&rank_0_left) != 0) {
        }
    }
    return __real_nb_lanes_peer_open(lanes, peer, addresses, err);
}

static bool interrupt_pending(void *ctx) {
    (void)ctx;
    return atomic_load(&rank_1_stopped);
}

static void interrupted_while_lanes_open(void) {
    struct nb_interrupt interrupt = {.pending = interrupt_pending};
    struct opening_rank ranks[2];
    pthread_t threads[2];
    struct nb_listener listener = {.fd = -1};
    struct nb_error err = {0};
    struct nb_boot_config config = {.size = 2, .ifname = "lo", .secret = test_secret, .secret_bytes = 32};
    CHECK(nb_listener_open(&listener, &config, NULL, &err) == 0, "listen: %s", err.text);
    CHECK(sem_init(&rank_0_left, 0, 0) == 0, "semaphore: %m");
    atomic_store(&rank_1_stops, true);
    for (int r = 0; r < 2; r++) {
        ranks[r] = (struct opening_rank){.rank = r, .size = 2, .listener = r == 0 ? &listener : NULL};
        ranks[r].interrupt = r == 0 ? &interrupt : NULL;
        nb_sock_format(&listener.addr, ranks[r].address);
        CHECK(pthread_create(&threads[r], NULL, opening_main, &ranks[r]) == 0, "thread %d", r);
    }
    pthread_join(threads[0], NULL);
    CHECK(sem_post(&rank_0_left) == 0, "semaphore: %m");
    pthread_join(threads[1], NULL);
    nb_listener_close(&listener);
    CHECK(ranks[0].rc == -EINTR, "%d %s", ranks[0].rc, ranks[0].err.text);
    CHECK(ranks[1].rc < 0 && ranks[1].err.peer == 0, "%d %s", ranks[1].rc, ranks[1].err.text);
}

// No descriptors are left once the job is open, for connections that arrive or for ones that leave.
static _Atomic bool accept_fails;
static _Atomic bool connect_fails;

int __real_nb_sock_accept(int fd);
int __wrap_nb_sock_accept(int fd);
int __real_nb_sock_connect(const struct nb_sockaddr *to, const struct nb_sockaddr *from, const char *congestion,
                           struct nb_error *err);
int __wrap_nb_sock_connect(const struct nb_sockaddr *to, const struct nb_sockaddr *from, const char *congestion,
                           struct nb_error *err);

int __wrap_nb_sock_accept(int fd) {
    errno = EMFILE;
    return atomic_load(&accept_fails) ? -1 : __real_nb_sock_accept(fd);
}

int __wrap_nb_sock_connect(const struct nb_sockaddr *to, const struct nb_sockaddr *from, const char *congestion,
                           struct nb_error *err) {
    if (atomic_load(&connect_fails)) {
        errno = EMFILE;
        return nb_fail(err, -EMFILE, "socket: %m");
    }
    return __real_nb_sock_connect(to, from, congestion, err);
}

static int exchange(struct test_rank *me, struct nb_error *err) {
    char data[8] = {0};
    struct nb_segment all = {.base = data, .bytes = sizeof data};
    struct nb_op op = test_op("exchange", NB_OP_ALLTOALL, &all);
    op.dtype = NB_U8;
    return test_try(me, op, err);
}

// While ranks cannot accept connections, each of them reports why. Afterwards the lanes open.
static void *accept_again_once_reported(void *arg) {
    struct test_rank *me = arg;
    struct stage *stage = me->arg;
    struct timespec pause = {.tv_nsec = 1000 * 1000};
    int64_t until = nb_now_ns() + (int64_t)TEST_LIMIT_MS * 1000000;
    char text[NB_ERROR_TEXT] = "";
    while (!nb_job_notice(me->job, text, sizeof text)) {
        CHECK(nb_now_ns() < until, "rank %d does not report that it cannot accept connections", me->rank);
        nanosleep(&pause, NULL);
    }
    CHECK(strstr(text, "could not accept connections of its lanes (Too many open files: see `ulimit -n`)") != NULL,
          "rank %d: %s", me->rank, text);
    pthread_barrier_wait(&stage->barrier);
    atomic_store(&accept_fails, false);
    return NULL;
}

static void connections_are_not_accepted(struct test_rank *me) {
    struct stage *stage = me->arg;
    struct nb_error err = {0};
    pthread_t watcher;
    test_barrier(me, "before");
    pthread_barrier_wait(&stage->barrier);
    atomic_store(&accept_fails, true);
    pthread_barrier_wait(&stage->barrier);
    CHECK(pthread_create(&watcher, NULL, accept_again_once_reported, me) == 0, "thread");
    CHECK(exchange(me, &err) == 0, "rank %d: %s", me->rank, err.text);
    pthread_join(watcher, NULL);
}

static void connections_cannot_be_made(struct test_rank *me) {
    struct stage *stage = me->arg;
    struct nb_error err = {0};
    test_barrier(me, "before");
    pthread_barrier_wait(&stage->barrier);
    atomic_store(&connect_fails, true);
    pthread_barrier_wait(&stage->barrier);
    CHECK(exchange(me, &err) == -EMFILE, "rank %d: %s", me->rank, err.text);
    CHECK(strstr(err.text, "Too many open files: see `ulimit -n`") != NULL, "rank %d: %s", me->rank, err.text);
    pthread_barrier_wait(&stage->barrier);
    atomic_store(&connect_fails, false);
}

int main(void) {
    lanes_do_not_open();
    a_neighbour_cannot_be_reached();
    interrupted_while_lanes_open();
    run_case(rank_1_left_before_submission, 0, 1, 20000);
    run_case(rank_0_left_before_submission, 0, 1, 20000);
    run_case(rank_leaves_after_submission, 0, 1, 20000);
    for (int round = 0; round < 12; round++) {
        run_case(ranks_leave_after_last_operation, round, 4, 20000);
    }
    run_case(rank_2_hangs, 0, 1, 1500);
    run_case(rank_0_hangs, 0, 1, 1500);
    run_case(rank_2_hangs_in_a_communicator, 0, 1, 1500);
    run_case(suspended_rank_resumes, 0, 1, 1500);
    (void)run_case_of(2, "tcp", close_with_pending_operations, 0, 1, 20000);
    (void)run_case_of(4, "tcp", connections_are_not_accepted, 0, 1, 20000);
    (void)run_case_of(4, "tcp", connections_cannot_be_made, 0, 1, 20000);
    run_case(rank_aborts, 0, 1, 20000);
    run_case(three_faults_at_once, 0, 2, 20000);
    return 0;
}
