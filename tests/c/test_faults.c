// Ranks that leave, die or fall silent, at every moment of a job: the others fail with an error that names that
// rank, or continue. No rank waits forever, and no work outlives its memory.
#include <errno.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "engine/context.h"
#include "job.h"
#include "stage.h"

// Waits until the communication thread has been round its loop: what lay in its sockets before has been read then.
static void turn(struct test_rank *me) {
    struct timespec pause = {.tv_nsec = 1000 * 1000};
    int64_t until = nb_now_ns() + (int64_t)TEST_LIMIT_MS * 1000000;
    static char memory[64];
    for (int i = 0; i < 3; i++) {
        struct nb_error err = {0};
        CHECK(nb_job_map(me->job, memory, sizeof memory, &err) == 0, "map: %s", err.text);
        bool taken = false;
        while (!taken) {
            CHECK(nb_now_ns() < until, "rank %d: its thread does not come round", me->rank);
            nanosleep(&pause, NULL);
            pthread_mutex_lock(&me->job->lock);
            taken = nb_list_empty(&me->job->inbox.maps);
            pthread_mutex_unlock(&me->job->lock);
        }
    }
}

// A rank is gone before the others submit: neither rank 0 nor another may wait for it.
static void submit_after_leaving(struct test_rank *me, int leaver) {
    struct stage *stage = me->arg;
    struct nb_error err = {0};
    test_barrier(me, "before");
    if (me->rank == leaver) {
        nb_job_close(me->job);
        me->job = NULL;
        pthread_barrier_wait(&stage->meet);
        pthread_barrier_wait(&stage->meet);
        return;
    }
    pthread_barrier_wait(&stage->meet); // the leaver has announced it
    turn(me);
    pthread_barrier_wait(&stage->meet); // rank 0 has passed it on
    turn(me);
    int rc = test_try(me, test_op("after", NB_OP_BARRIER, NULL), &err);
    CHECK(rc == NB_EPEER && err.peer == leaver, "rank %d: %d, peer %d, %s", me->rank, rc, err.peer, err.text);
    CHECK(test_try(me, test_op("again", NB_OP_BARRIER, NULL), &err) == NB_EPEER, "a job that failed takes nothing");
}

static void rank_1_left_before(struct test_rank *me) {
    submit_after_leaving(me, 1);
}

static void rank_0_left_before(struct test_rank *me) {
    submit_after_leaving(me, 0);
}

// Submitted on some ranks when another leaves.
static void leaves_others_waiting(struct test_rank *me) {
    struct stage *stage = me->arg;
    struct nb_error err = {0};
    if (me->rank == 2) {
        test_barrier(me, "before");
        pthread_barrier_wait(&stage->meet);
        return;
    }
    test_barrier(me, "before");
    struct nb_work *work = test_submit(me, test_op("half", NB_OP_BARRIER, NULL));
    pthread_barrier_wait(&stage->meet);
    int rc = test_finish(work, &err);
    CHECK(rc == NB_EPEER && err.peer == 2, "rank %d: %d, peer %d, %s", me->rank, rc, err.peer, err.text);
    CHECK(strstr(err.text, "half") != NULL, "text: %s", err.text);
}

// Every rank leaves as soon as its own last operation is over; what it owed the others must still come.
static void leaves_at_once(struct test_rank *me) {
    struct stage *stage = me->arg;
    float *data = malloc(LARGE * sizeof *data);
    struct nb_error err = {0};
    struct nb_segment all = {.base = data, .bytes = LARGE * sizeof *data};
    struct nb_op op = test_op("last", NB_OP_ALLREDUCE, &all);
    bool cast = stage->round % 2 == 0;
    for (size_t i = 0; i < LARGE; i++) {
        data[i] = cast && me->rank != stage->round % me->size ? -1 : (float)(i % 97);
    }
    op.kind = cast ? NB_OP_BROADCAST : NB_OP_ALLREDUCE;
    op.root = stage->round % me->size;
    CHECK(test_finish(test_submit(me, op), &err) == 0, "round %d, rank %d: %s", stage->round, me->rank, err.text);
    for (size_t i = 0; i < LARGE; i++) {
        float want = (float)(i % 97) * (cast ? 1 : (float)me->size);
        CHECK(data[i] == want, "round %d, rank %d: [%zu] is %g", stage->round, me->rank, i, (double)data[i]);
    }
    free(data);
}

// The communication thread of one rank stands still: the others name it when the deadline is over.
static void silent(struct test_rank *me, int who) {
    struct stage *stage = me->arg;
    struct nb_error err = {0};
    test_barrier(me, "before");
    if (me->rank == who) {
        pthread_mutex_lock(&me->job->lock); // it needs that lock in every turn
        pthread_barrier_wait(&stage->meet);
        pthread_barrier_wait(&stage->meet);
        pthread_mutex_unlock(&me->job->lock);
        return;
    }
    pthread_barrier_wait(&stage->meet);
    int rc = test_finish(test_submit(me, test_op("after", NB_OP_BARRIER, NULL)), &err);
    CHECK(rc == NB_ETIMEOUT && err.peer == who, "rank %d: %d, peer %d, %s", me->rank, rc, err.peer, err.text);
    pthread_barrier_wait(&stage->meet);
}

static void rank_2_silent(struct test_rank *me) {
    silent(me, 2);
}

static void rank_0_silent(struct test_rank *me) {
    silent(me, 0);
}

// A rank that stood still hears, when it goes on, that it was the silent one, and accuses nobody.
static void stood_still(struct test_rank *me) {
    struct stage *stage = me->arg;
    struct nb_error err = {0};
    struct nb_work *work = NULL;
    test_barrier(me, "before");
    if (me->rank == 1) {
        work = test_submit(me, test_op("never", NB_OP_BARRIER, NULL));
        turn(me);
        test_freeze(me->job->progress.thread);
    }
    pthread_barrier_wait(&stage->meet);
    int rc = me->rank == 1 ? 0 : test_try(me, test_op("after", NB_OP_BARRIER, NULL), &err);
    pthread_barrier_wait(&stage->meet);
    if (me->rank == 1) {
        test_thaw();
        rc = test_finish(work, &err);
    }
    CHECK(rc == NB_ETIMEOUT && err.peer == 1, "rank %d: %d, peer %d, %s", me->rank, rc, err.peer, err.text);
    CHECK(strstr(err.text, "rank 1 has been silent") != NULL, "text: %s", err.text);
    pthread_barrier_wait(&stage->meet);
}

static void *wait_for(void *arg) {
    struct nb_error err = {0};
    int rc = nb_work_wait(arg, TEST_LIMIT_MS, &err);
    CHECK(rc == NB_ECLOSED, "%d: %s", rc, err.text);
    return NULL;
}

// Closed while operations wait and threads wait for them; polled again and released after that.
static void closed_with_pending(struct test_rank *me) {
    struct stage *stage = me->arg;
    struct nb_error err = {0};
    struct nb_work *works[3];
    pthread_t threads[3];
    if (me->rank == 1) {
        pthread_barrier_wait(&stage->meet);
        return;
    }
    for (int i = 0; i < 3; i++) {
        char name[16];
        snprintf(name, sizeof name, "never.%d", i);
        works[i] = test_submit(me, test_op(name, NB_OP_BARRIER, NULL));
        CHECK(pthread_create(&threads[i], NULL, wait_for, works[i]) == 0, "a thread");
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
        CHECK(times.done_ns >= times.submit_ns, "it has an end");
        nb_work_release(works[i]);
    }
    pthread_barrier_wait(&stage->meet);
}

static void gives_up(struct test_rank *me) {
    struct nb_error err = {0};
    test_barrier(me, "before");
    if (me->rank == 1) {
        nb_job_abort(me->job, "its data are bad");
        return; // and closes in the same moment
    }
    int rc = test_try(me, test_op("after", NB_OP_BARRIER, NULL), &err);
    CHECK(rc == NB_EPEER && err.peer == 1, "rank %d: %d, peer %d, %s", me->rank, rc, err.peer, err.text);
    CHECK(strstr(err.text, "its data are bad") != NULL, "text: %s", err.text);
}

// Closed, dead and failing all at once: rank 2's thread stands still, rank 1 gives up, rank 0 closes.
static void all_at_once(struct test_rank *me) {
    struct stage *stage = me->arg;
    float *data = calloc(LARGE, sizeof *data);
    struct nb_segment all = {.base = data, .bytes = LARGE * sizeof *data};
    test_barrier(me, "before");
    struct nb_work *work = test_submit(me, test_op("sum", NB_OP_ALLREDUCE, &all));
    pthread_barrier_wait(&stage->meet);
    if (me->rank == 1) {
        nb_job_abort(me->job, "at once");
    } else if (me->rank == 2) {
        pthread_mutex_lock(&me->job->lock);
        pthread_barrier_wait(&stage->meet);
        pthread_mutex_unlock(&me->job->lock);
    }
    nb_job_close(me->job);
    me->job = NULL;
    if (me->rank != 2) {
        pthread_barrier_wait(&stage->meet);
    }
    int code = 0;
    CHECK(nb_work_test(work, &code), "it is over with its job");
    nb_work_release(work);
    free(data);
}

// Ranks whose lanes do not open.
struct opening {
    int rank;
    struct nb_listener *listener;
    char address[NB_SOCK_TEXT];
    struct nb_port_range ports;
    struct nb_error err;
    int rc;
};

enum { OPENING = 4, NO_ROOM = 2 };

static void *opening_main(void *arg) {
    struct opening *me = arg;
    struct nb_boot boot = {0};
    struct nb_job *job = NULL;
    struct nb_boot_config config = {.rank = me->rank, .size = OPENING, .timeout_ms = TEST_LIMIT_MS, .ifname = "lo"};
    config.secret = test_secret;
    config.secret_bytes = sizeof test_secret;
    config.tag = "test";
    CHECK(nb_boot_join(&boot, &config, me->listener, me->rank == 0 ? NULL : me->address, &me->err) == 0, "%s",
          me->err.text);
    struct nb_job_config like = {.boot = &boot, .transport = "tcp", .streams = 2, .timeout_ms = TEST_LIMIT_MS};
    like.ports = me->ports;
    me->rc = nb_job_open(&job, &like, &me->err);
    CHECK(me->rc < 0, "rank %d has opened", me->rank);
    return NULL;
}

static void lanes_do_not_open(void) {
    struct opening ranks[OPENING];
    pthread_t threads[OPENING];
    struct nb_listener listener = {.fd = -1};
    struct nb_listener taken = {.fd = -1}; // a port that is not free
    struct nb_error err = {0};
    struct nb_boot_config config = {.size = OPENING, .ifname = "lo", .secret = test_secret, .secret_bytes = 32};
    CHECK(nb_listener_open(&listener, &config, NULL, &err) == 0, "listen: %s", err.text);
    CHECK(nb_listener_open(&taken, &config, NULL, &err) == 0, "listen: %s", err.text);
    uint16_t port = nb_sock_port(&taken.addr);
    for (int r = 0; r < OPENING; r++) {
        ranks[r] = (struct opening){.rank = r, .listener = r == 0 ? &listener : NULL};
        nb_sock_format(&listener.addr, ranks[r].address);
        ranks[r].ports = r == NO_ROOM ? (struct nb_port_range){port, port} : (struct nb_port_range){0, 0};
        CHECK(pthread_create(&threads[r], NULL, opening_main, &ranks[r]) == 0, "thread %d", r);
    }
    for (int r = 0; r < OPENING; r++) {
        pthread_join(threads[r], NULL);
    }
    nb_listener_close(&listener);
    nb_listener_close(&taken);
    for (int r = 0; r < OPENING; r++) {
        CHECK(ranks[r].rc == ranks[r].err.code, "rank %d: %d and %d", r, ranks[r].rc, ranks[r].err.code);
        if (r == NO_ROOM) {
            CHECK(ranks[r].rc == -EADDRINUSE, "rank %d: %s", r, ranks[r].err.text);
        } else {
            CHECK(ranks[r].rc == NB_EPEER && ranks[r].err.peer == NO_ROOM, "rank %d: peer %d, %s", r, ranks[r].err.peer,
                  ranks[r].err.text);
        }
    }
}

int main(void) {
    lanes_do_not_open();
    run_case(rank_1_left_before, 0, 1, 20000);
    run_case(rank_0_left_before, 0, 1, 20000);
    run_case(leaves_others_waiting, 0, 1, 20000);
    for (int round = 0; round < 12; round++) {
        run_case(leaves_at_once, round, 4, 20000);
    }
    run_case(rank_2_silent, 0, 1, 1500);
    run_case(rank_0_silent, 0, 1, 1500);
    run_case(stood_still, 0, 1, 1500);
    (void)run_case_of(2, "tcp", closed_with_pending, 0, 1, 20000);
    run_case(gives_up, 0, 1, 20000);
    run_case(all_at_once, 0, 2, 20000);
    return 0;
}
