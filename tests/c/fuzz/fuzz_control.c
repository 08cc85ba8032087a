// Fuzzes a job with control messages of a broken peer, between operations of its own. The first byte selects the job's
// rank and the inline all-reduce. Messages follow: type, two bytes of length, body. The body of a type above 21 is sent
// raw, without a header.
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "engine/autotune.h"
#include "engine/context.h"
#include "engine/coordinator.h"
#include "engine/negotiation.h"
#include "transport/tcp.h"

enum { SIZE = 3, WORKS = NB_OP_KINDS, TYPES = 22, SEGMENT = 256 * 1024, IN_FLIGHT = 8 * 1024 * 1024 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static void fail_all(struct nb_job *job, struct nb_list *works) {
    while (!nb_list_empty(works)) {
        struct nb_work *work = NB_CONTAINER(works->next, struct nb_work, link);
        nb_work_cancel(work);
        nb_work_finish(work, &job->failure);
    }
}

static void lane_lost(void *ctx, int peer, int lane, const struct nb_error *why, int lanes_left) {
    nb_watchdog_lane_lost(ctx, peer, lane, why, lanes_left);
}

static void job_tables(struct nb_job *job, struct nb_error *err) {
    nb_job_lists_init(job);
    pthread_mutex_init(&job->lock, NULL);
    pthread_cond_init(&job->finished, NULL);
    job->peer_open = calloc(SIZE, sizeof *job->peer_open);
    job->handle_control = job->rank == 0 ? nb_coordinator_message : nb_negotiation_message;
    if (nb_loop_init(&job->loop, err) < 0 || nb_watchdog_open(job, err) < 0 || nb_join_open(job, err) < 0 ||
        nb_negotiation_open(job, err) < 0 || nb_autotune_open(job, err) < 0 ||
        (job->rank == 0 && nb_coordinator_open(job, err) < 0)) {
        abort();
    }
}

// Makes a job like nb_job_open, but without a thread. remotes[i] is the remote end of control connection i.
static struct nb_job *job_make(int rank, int remotes[SIZE]) {
    struct nb_error err = {0};
    struct nb_job *job = calloc(1, sizeof *job);
    job->rank = rank;
    job->size = SIZE;
    job->boot = (struct nb_boot){.rank = rank, .size = SIZE};
    job->world = (struct nb_comm){.job = job, .rank = rank, .size = SIZE};
    job->config = (struct nb_job_config){.timeout_ms = 1000, .segment_bytes = SEGMENT, .streams = NB_STREAMS_AUTO};
    job_tables(job, &err);
    struct nb_lanes_config lanes = {.ops = &nb_tcp_ops, .lanes = 2, .segment_bytes = SEGMENT};
    lanes.lane = (struct nb_lane_config){.rank = rank, .size = SIZE, .loop = &job->loop, .boot = &job->boot};
    nb_sock_parse("127.0.0.1:0", &lanes.lane.bind, &err);
    lanes.binds = &lanes.lane.bind;
    lanes.bind_count = 1;
    lanes.in_flight_max = IN_FLIGHT;
    lanes.lane_lost = lane_lost;
    lanes.failed = nb_watchdog_lanes_failed;
    lanes.ctx = job;
    if (nb_lanes_open(&job->lanes, &lanes, &err) < 0) {
        abort();
    }
    job->info.streams_open = 2;
    size_t room = nb_lanes_address_bytes(job->lanes);
    job->addresses = calloc(SIZE, room);
    for (int r = 0; r < SIZE; r++) {
        nb_lanes_address(job->lanes, job->addresses + (size_t)r * room);
    }
    job->control_count = rank == 0 ? SIZE : 1;
    job->controls = calloc((size_t)job->control_count, sizeof *job->controls);
    job->controls[0].watch.fd = -1;
    for (int i = rank == 0; i < job->control_count; i++) {
        int pair[2];
        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) != 0 ||
            nb_control_init(&job->controls[i], job, i, pair[0], &err) < 0) {
            abort();
        }
        remotes[i] = pair[1];
    }
    return job;
}

static void drain(int fd) {
    char buffer[4096];
    while (fd >= 0 && recv(fd, buffer, sizeof buffer, MSG_DONTWAIT) > 0) {
    }
}

// One pass of the communication thread.
static void pass(struct nb_job *job) {
    while (!nb_list_empty(&job->inbox.works)) {
        struct nb_work *work = NB_CONTAINER(job->inbox.works.next, struct nb_work, link);
        nb_list_remove(&work->link);
        nb_negotiation_submit(job, work);
    }
    nb_watchdog_check(job);
    if (job->rank == 0) {
        nb_coordinator_collect(job);
        nb_coordinator_release(job);
    } else {
        nb_negotiation_flush(job);
    }
    nb_loop_wait(&job->loop, 0);
    nb_watchdog_tick(job, nb_now_ns());
    if (job->rank == 0) {
        nb_coordinator_tick(job, nb_now_ns());
    }
    if (job->failed) {
        nb_control_failed(job);
        fail_all(job, &job->ops.running);
        fail_all(job, &job->ops.waiting);
    }
}

static void submit(struct nb_job *job, int index, struct nb_work **works, float *memory) {
    static const char *const names[WORKS] = {"a", "b", "c", "d", "e", "f", "g"};
    static const size_t bytes[WORKS] = {[NB_OP_ALLGATHER] = 12000,
                                        [NB_OP_REDUCESCATTER] = 12000,
                                        [NB_OP_BROADCAST] = 12000,
                                        [NB_OP_ALLTOALL] = 12000,
                                        [NB_OP_JOIN] = 4};
    struct nb_segment segment = {.base = memory, .bytes = bytes[index]};
    struct nb_op op = {.name = names[index], .kind = (enum nb_op_kind)index, .dtype = NB_F32};
    op.key = (uint64_t)index + 1; // small, so that the fuzzer finds it
    op.segments = &segment;
    op.segment_count = 1;
    int code = 0;
    if (works[index] != NULL && !nb_work_test(works[index], &code)) {
        return;
    }
    nb_work_release(works[index]);
    works[index] = NULL;
    (void)nb_submit(&job->world, &op, &works[index], NULL);
}

static size_t send_message(int fd, const uint8_t *data, size_t bytes) {
    unsigned char out[8 + 2048];
    uint32_t type = data[0];
    uint32_t length = (uint32_t)(data[1] | (data[2] & 7) << 8);
    size_t body = bytes - 3 < length ? bytes - 3 : length;
    size_t skip = type < TYPES ? 8 : 0;
    memcpy(out, &length, 4);
    memcpy(out + 4, &type, 4);
    memset(out + skip, 0, length);
    memcpy(out + skip, data + 3, body);
    (void)send(fd, out, skip + length, MSG_DONTWAIT | MSG_NOSIGNAL);
    return 3 + body;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    if (bytes < 1) {
        return 0;
    }
    int remotes[SIZE] = {-1, -1, -1};
    struct nb_work *works[WORKS] = {NULL};
    float *memory = calloc(WORKS, 12000);
    struct nb_job *job = job_make(data[0] & 1, remotes);
    job->config.algorithm = (data[0] & 2) != 0 ? NB_ALGORITHM_INLINE : NB_ALGORITHM_NONE;
    for (int i = 0; i < WORKS; i++) {
        submit(job, i, works, memory + (size_t)i * 3000);
    }
    pass(job);
    size_t at = 1;
    for (int n = 0; at + 3 <= bytes && n < 32; n++) {
        int index = job->rank == 0 ? 1 + n % 2 : 0;
        at += send_message(remotes[index], data + at, bytes - at);
        pass(job);
        submit(job, n % WORKS, works, memory + (size_t)(n % WORKS) * 3000);
        for (int i = 0; i < SIZE; i++) {
            drain(remotes[i]);
        }
    }
    pass(job);
    const struct nb_error closed = {.code = NB_ECLOSED, .peer = NB_NO_PEER};
    job->failure = job->failure.code != 0 ? job->failure : closed;
    pass(job);
    fail_all(job, &job->ops.running);
    fail_all(job, &job->ops.waiting);
    for (int i = 0; i < WORKS; i++) {
        int code = 0;
        if (works[i] != NULL && !nb_work_test(works[i], &code)) {
            abort(); // an operation outlived its job
        }
        nb_work_release(works[i]);
    }
    nb_job_close(job);
    for (int i = 0; i < SIZE; i++) {
        if (remotes[i] >= 0) {
            close(remotes[i]);
        }
    }
    free(memory);
    return 0;
}
