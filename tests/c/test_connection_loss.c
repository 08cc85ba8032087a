// Connections that close or are reset at any moment of a job. A lost lane costs its bandwidth and is reported. Losing
// the last lane or the control connection ends the job on every rank, with an error that names the peer.
#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "engine/context.h"
#include "job.h"
#include "stage.h"
#include "transport/lanes_internal.h"
#include "transport/tcp_internal.h"

// Duplicates one of a TCP lane's two connections: the one that this rank sends on, or the one that its peer sends on.
static int lane_descriptor(struct test_rank *me, int lane, int peer, bool out) {
    const struct tcp_lane *tcp = NB_CONTAINER(me->job->lanes->lane[lane], struct tcp_lane, base);
    const struct conn *conn = &tcp->conns[peer];
    return dup(out ? conn->out_watch.fd : conn->in_watch.fd);
}

// Port of a rank's libfabric lane, from the endpoint's name in its exchanged address.
static uint16_t ofi_port(struct test_rank *me, int lane, int rank) {
    enum { NAME_AT = 88 };
    size_t bytes = nb_lanes_address_bytes(me->job->lanes);
    const struct wire_lane_address *address = (const void *)(me->job->addresses + (size_t)rank * bytes);
    struct nb_sockaddr name = {0};
    memcpy(&name.in6, address[lane].addr + NAME_AT, sizeof name.in6);
    return nb_sock_port(&name);
}

// Shuts a connection down, or resets it, which loses bytes in flight.
static bool break_connection(int fd, bool reset) {
    static const struct sockaddr nowhere = {.sa_family = AF_UNSPEC};
    return reset ? connect(fd, &nowhere, sizeof nowhere) == 0 : shutdown(fd, SHUT_RDWR) == 0;
}

// Breaks every connection of this process to or from one of two ports. Returns their number.
static int break_ports(uint16_t one, uint16_t other, bool reset) {
    int done = 0;
    for (int fd = 3; fd < 1024; fd++) {
        struct nb_sockaddr here = {.len = sizeof here.in6};
        struct nb_sockaddr there = {.len = sizeof there.in6};
        if (getsockname(fd, &here.any, &here.len) != 0 || getpeername(fd, &there.any, &there.len) != 0) {
            continue;
        }
        uint16_t a = nb_sock_port(&here);
        uint16_t b = nb_sock_port(&there);
        if (a == one || a == other || b == one || b == other) {
            done += break_connection(fd, reset);
        }
    }
    return done;
}

// Breaks a lane between ranks 0 and 1 without involving either engine. `fd`: of a TCP lane, or -1.
static void break_lane(struct test_rank *me, int lane, int fd, bool reset) {
    if (fd >= 0) {
        CHECK(break_connection(fd, reset), "break: %m");
        close(fd);
    } else {
        CHECK(break_ports(ofi_port(me, lane, 0), ofi_port(me, lane, 1), reset) > 0, "lane %d has no connection", lane);
    }
}

// The only lane between two live ranks breaks.
static void only_lane_breaks(struct test_rank *me) {
    struct stage *stage = me->arg;
    float *data = calloc(LARGE, sizeof *data);
    struct nb_error err = {0};
    struct nb_segment all = {.base = data, .bytes = LARGE * sizeof *data};
    int fd = me->rank == 0 ? lane_descriptor(me, 0, 1, stage->round / 2 == 1) : -1;
    test_barrier(me, "before");
    if (me->rank == 0) {
        break_lane(me, 0, fd, stage->round % 2 == 1);
    }
    int rc = test_try(me, test_op("sum", NB_OP_ALLREDUCE, &all), &err);
    CHECK(rc == NB_EPEER && (err.peer == 0 || err.peer == 1), "rank %d: %d, peer %d, %s", me->rank, rc, err.peer,
          err.text);
    free(data);
}

// The control connection of rank 1 breaks during an all-reduce: all other ranks blame rank 1, and rank 1 blames rank 0.
static void control_connection_breaks(struct test_rank *me) {
    struct stage *stage = me->arg;
    float *data = calloc(LARGE, sizeof *data);
    struct nb_error err = {0};
    struct nb_segment all = {.base = data, .bytes = LARGE * sizeof *data};
    int fd = me->rank == 1 ? dup(me->job->controls[0].watch.fd) : -1;
    test_barrier(me, "before");
    pthread_barrier_wait(&stage->barrier);
    struct nb_work *work = test_submit(me, test_op("sum", NB_OP_ALLREDUCE, &all));
    pthread_barrier_wait(&stage->barrier);
    if (me->rank == 1) {
        CHECK(break_connection(fd, stage->round == 1), "break: %m");
        close(fd);
    }
    (void)test_finish(work, &err); // it may have finished already
    int rc = test_try(me, test_op("after", NB_OP_BARRIER, NULL), &err);
    CHECK(rc == NB_EPEER && err.peer == (me->rank == 1 ? 0 : 1), "rank %d: %d, peer %d, %s", me->rank, rc, err.peer,
          err.text);
    bool named = strstr(err.text, "control connection failed (Connection reset by peer)") != NULL;
    CHECK(me->rank > 1 || stage->round == 0 || named, "rank %d: %s", me->rank, err.text);
    free(data);
}

static void fill(float *data, size_t count) {
    for (size_t i = 0; i < count; i++) {
        data[i] = (float)(i % 97);
    }
}

static void check_sum(const struct test_rank *me, const float *data, size_t count) {
    for (size_t i = 0; i < count; i++) {
        CHECK(data[i] == (float)(i % 97) * (float)me->size, "rank %d: [%zu] is %g", me->rank, i, (double)data[i]);
    }
}

// By rank: the ranks whose lanes its engine has reported as lost, one bit each.
static _Atomic unsigned lost_to[TEST_RANKS_MAX];

void __real_nb_watchdog_lane_lost(void *ctx, int peer, int lane, const struct nb_error *why, int lanes_left);
void __wrap_nb_watchdog_lane_lost(void *ctx, int peer, int lane, const struct nb_error *why, int lanes_left);
void __wrap_nb_watchdog_lane_lost(void *ctx, int peer, int lane, const struct nb_error *why, int lanes_left) {
    atomic_fetch_or(&lost_to[((const struct nb_job *)ctx)->rank], 1U << peer);
    __real_nb_watchdog_lane_lost(ctx, peer, lane, why, lanes_left);
}

// The failure names the rank at the other end of the lane, from the end that found it.
static void check_lane_failure(const struct test_rank *me, int rc, const struct nb_error *err) {
    CHECK(err->peer == 0 || err->peer == 1, "rank %d: %d, peer %d, %s", me->rank, rc, err->peer, err->text);
    int finder = 1 - err->peer;
    char text[64];
    if (rc == NB_EPEER) {
        CHECK((atomic_load(&lost_to[finder]) >> err->peer & 1) != 0, "rank %d did not lose its lane to rank %d: %s",
              finder, err->peer, err->text);
        CHECK(strncmp(err->text, "lane 0 ", 7) == 0, "rank %d: %s", me->rank, err->text);
        snprintf(text, sizeof text, " to rank %d: ", err->peer);
    } else {
        CHECK(rc == NB_ETIMEOUT, "rank %d: %d, %s", me->rank, rc, err->text);
        snprintf(text, sizeof text, ": no byte moved between rank %d and rank %d for ", finder, err->peer);
    }
    CHECK(strstr(err->text, text) != NULL, "rank %d: '%s' is not in: %s", me->rank, text, err->text);
}

// The only libfabric lane between two ranks breaks during an all-reduce. Three outcomes are legitimate, as libfabric's
// provider decides what it reports. It reconnects before anything is lost: the sums are right. It reports an error, or a
// ping shows what was lost: the lane is lost. It reports nothing and delivers nothing: the deadline ends the job.
static void only_ofi_lane_breaks(struct test_rank *me) {
    struct stage *stage = me->arg;
    struct timespec pause = {.tv_nsec = stage->round * 300 * 1000};
    struct nb_error err = {0};
    struct nb_segment all = {.base = malloc(LARGE * sizeof(float)), .bytes = LARGE * sizeof(float)};
    fill(all.base, LARGE);
    atomic_store(&lost_to[me->rank], 0);
    test_barrier(me, "before");
    struct nb_work *work = test_submit(me, test_op("sum", NB_OP_ALLREDUCE, &all));
    if (me->rank == 0) {
        nanosleep(&pause, NULL);
        break_lane(me, 0, -1, stage->round % 2 == 1);
    }
    int rc = test_finish(work, &err);
    if (rc == 0) {
        check_sum(me, all.base, LARGE);
        fill(all.base, LARGE);
        rc = test_try(me, test_op("after", NB_OP_ALLREDUCE, &all), &err); // uses the same lane
    }
    if (rc == 0) {
        check_sum(me, all.base, LARGE);
    } else {
        check_lane_failure(me, rc, &err);
        struct nb_error again = {0};
        int later = test_try(me, test_op("later", NB_OP_BARRIER, NULL), &again);
        CHECK(later == rc && again.peer == err.peer, "rank %d: %d, peer %d, then %d, peer %d", me->rank, rc, err.peer,
              later, again.peer);
    }
    pthread_barrier_wait(&stage->barrier); // a rank that leaves would be another reason to fail
    free(all.base);
}

enum { LANE_OPS = 6 };

// One of several lanes breaks while operations run: all of them succeed.
static void one_of_several_lanes_breaks(struct test_rank *me) {
    struct stage *stage = me->arg;
    struct nb_error err = {0};
    struct nb_segment all[LANE_OPS];
    struct nb_work *works[LANE_OPS];
    struct timespec pause = {.tv_nsec = stage->round * 300 * 1000};
    bool tcp = strcmp(me->transport, "tcp") == 0;
    int fd = tcp && me->rank == 0 ? lane_descriptor(me, stage->round % 4, 1, stage->round / 8 == 1) : -1;
    test_barrier(me, "before");
    for (int i = 0; i < LANE_OPS; i++) {
        size_t count = i % 3 == 0 ? LARGE : 1000 * (size_t)i + 3;
        all[i] = (struct nb_segment){.base = malloc(count * sizeof(float)), .bytes = count * sizeof(float)};
        fill(all[i].base, count);
        if (stage->round % 2 == 0) { // registered memory: libfabric writes to the final place
            CHECK(nb_job_map(me->job, all[i].base, all[i].bytes, &err) == 0, "map: %s", err.text);
        }
    }
    for (int i = 0; i < LANE_OPS; i++) {
        char name[16];
        snprintf(name, sizeof name, "sum.%d", i);
        works[i] = test_submit(me, test_op(name, NB_OP_ALLREDUCE, &all[i]));
    }
    if (me->rank == 0) {
        nanosleep(&pause, NULL); // varies the moment of the fault
        break_lane(me, stage->round % 4, fd, stage->round / 4 % 2 == 1);
    }
    for (int i = 0; i < LANE_OPS; i++) {
        int rc = test_finish(works[i], &err);
        CHECK(rc == 0, "round %d, rank %d, sum %d: %s", stage->round, me->rank, i, err.text);
        check_sum(me, all[i].base, all[i].bytes / sizeof(float));
        free(all[i].base);
    }
    if (me->rank < 2 && tcp) { // libfabric reconnects without a notice if nothing was in flight
        await_lane_notice(me, 1 - me->rank);
    }
    pthread_barrier_wait(&stage->barrier);
}

// An idle lane breaks: the other lanes carry later operations.
static void idle_lane_breaks(struct test_rank *me) {
    struct stage *stage = me->arg;
    struct nb_error err = {0};
    int fd = me->rank == 0 ? lane_descriptor(me, 1, 1, stage->round / 2 == 1) : -1;
    test_barrier(me, "before");
    if (me->rank == 0) {
        break_lane(me, 1, fd, stage->round % 2 == 1);
    }
    if (me->rank < 2) {
        await_lane_notice(me, 1 - me->rank);
    }
    pthread_barrier_wait(&stage->barrier);
    float *data = calloc(LARGE, sizeof *data);
    struct nb_segment all = {.base = data, .bytes = LARGE * sizeof *data};
    CHECK(test_finish(test_submit(me, test_op("sum", NB_OP_ALLREDUCE, &all)), &err) == 0, "rank %d: %s", me->rank,
          err.text);
    free(data);
}

static int test_ofi(void) {
    for (int round = 0; round < 3; round++) {
        if (!run_case_of(2, "ofi", only_ofi_lane_breaks, round, 1, 4000)) {
            return CHECK_SKIPPED;
        }
    }
    for (int round = 0; round < 8; round++) {
        CHECK(run_case_of(2, "ofi", one_of_several_lanes_breaks, round, 4, 8000), "libfabric is gone");
    }
    return 0;
}

// Usage: test_connection_loss tcp|ofi
int main(int argc, char **argv) {
    CHECK(argc == 2, "name one network");
    if (strcmp(argv[1], "ofi") == 0) {
        return test_ofi();
    }
    for (int round = 0; round < 4; round++) {
        run_case(only_lane_breaks, round, 1, 20000);
    }
    run_case(control_connection_breaks, 0, 2, 20000);
    run_case(control_connection_breaks, 1, 2, 20000);
    for (int round = 0; round < 16; round++) {
        run_case(one_of_several_lanes_breaks, round, 4, 20000);
    }
    for (int round = 0; round < 4; round++) {
        run_case(idle_lane_breaks, round, 4, 20000);
    }
    return 0;
}
