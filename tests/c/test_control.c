// Control messages: each invalid message ends the job with an error that names its sender, and floods do not grow
// memory. Also tests limits of pending operations and that an idle communication thread sleeps.
#include <errno.h>
#include <malloc.h>
#include <netinet/tcp.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "engine/context.h"
#include "engine/control.h"
#include "engine/negotiation.h"
#include "engine/shared.h"
#include "engine/shared_fold.h"
#include "job.h"
#include "transport/shm_pipe.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
size_t __sanitizer_get_current_allocated_bytes(void); // gcc ships no header that declares it
#endif

struct raw_message {
    const char *what;
    uint32_t type;
    uint32_t bytes; // length in the header
    size_t body;    // bytes that are sent
    const void *data;
};

// Writes a message to a job's control connection, between two of the job's own messages.
static void send_raw(int fd, const struct raw_message *raw) {
    unsigned char buffer[4096];
    struct wire_control header = {.bytes = raw->bytes, .type = raw->type};
    memcpy(buffer, &header, sizeof header);
    memcpy(buffer + sizeof header, raw->data, raw->body);
    ssize_t n = send(fd, buffer, sizeof header + raw->body, MSG_NOSIGNAL);
    CHECK(n == (ssize_t)(sizeof header + raw->body), "%s: %m", raw->what);
}

// One rank sends an invalid message to the other. Both report an invalid message of that rank.
static void check_invalid_message(struct test_rank *me, int receiver) {
    const struct raw_message *raw = me->arg;
    struct nb_error err = {0};
    int fd = dup(me->job->controls[1 - me->rank].watch.fd); // rank 1 has only the connection to rank 0
    test_barrier(me, "before");
    if (me->rank != receiver) {
        send_raw(fd, raw);
    }
    int rc = test_try(me, test_op(me->rank == 0 ? "a" : "b", NB_OP_BARRIER, NULL), &err); // neither operation starts
    CHECK(rc == NB_EWIRE && err.peer == 1 - receiver, "rank %d, %s: %d, peer %d, %s", me->rank, raw->what, rc, err.peer,
          err.text);
    close(fd);
}

static void member_sends_invalid_message(struct test_rank *me) {
    check_invalid_message(me, 0);
}

static void rank_0_sends_invalid_message(struct test_rank *me) {
    check_invalid_message(me, 1);
}

static void run_each(const struct raw_message *messages, size_t count, void (*run)(struct test_rank *me)) {
    for (size_t i = 0; i < count; i++) {
        struct raw_message raw = messages[i];
        struct test_rank template = {.size = 2, .transport = "tcp", .streams = 1, .timeout_ms = 20000, .arg = &raw};
        template.run = run;
        test_job(&template);
    }
}

// A valid operation with one invalid field.
static struct op_descriptor invalid_descriptor(int which) {
    struct op_descriptor desc = {.key = 77, .prescale = 1, .postscale = 1, .name = "wrong"};
    switch (which) {
    case 0:
        desc.kind = 200;
        break;
    case 1:
        desc.dtype = 200;
        break;
    case 2:
        desc.redop = 99;
        break;
    case 3:
        desc.root = -5;
        break;
    case 4:
        desc.root = 2;
        break;
    case 5:
        desc.comm = 7;
        break;
    case 6:
        desc.device = 2;
        break;
    case 7:
        desc.limit_ms = -1;
        break;
    default:
        memset(desc.name, 'x', sizeof desc.name);
        break;
    }
    return desc;
}

static void test_invalid_messages_to_rank_0(void) {
    static const unsigned char zero[1024] = {0};
    static const uint64_t unknown[16] = {1};
    struct wire_failure fine = {.code = 0, .peer = 1, .text = "nothing happened"};
    struct wire_failure above = {.code = 5, .peer = 1, .text = "positive code"};
    struct wire_failure again = {.code = -EAGAIN, .peer = 1, .text = "not final"};
    static const int32_t twice[] = {7, 0, 1, 1}; // number, ranks
    static const int32_t beyond[] = {7, 1, 2};
    static const int32_t without[] = {7, 0};
    static const int32_t all[] = {0, 0, 1};
    const struct raw_message messages[] = {
        {"no type", 0, 0, 0, zero},
        {"a failure with -EAGAIN", CTL_FAIL, sizeof again, sizeof again, &again},
        {"an unknown type", 999, 8, 8, zero},
        {"a go", CTL_GO, sizeof(struct wire_go), sizeof(struct wire_go), zero},
        {"a truncated submit", CTL_SUBMIT, sizeof(struct op_descriptor) - 1, sizeof(struct op_descriptor) - 1, zero},
        {"a truncated mask", CTL_MASK, 3, 3, zero},
        {"a long mask", CTL_MASK, 136, 136, zero},
        {"a mask of unknown operations", CTL_MASK, sizeof unknown, sizeof unknown, unknown},
        {"a communicator without ranks", CTL_GROUP, 4, 4, twice},
        {"a communicator with a repeated rank", CTL_GROUP, sizeof twice, sizeof twice, twice},
        {"a communicator with rank 2", CTL_GROUP, sizeof beyond, sizeof beyond, beyond},
        {"a communicator without its sender", CTL_GROUP, sizeof without, sizeof without, without},
        {"another communicator of all ranks", CTL_GROUP, sizeof all, sizeof all, all},
        {"a failure without an error code", CTL_FAIL, sizeof fine, sizeof fine, &fine},
        {"a failure with a positive code", CTL_FAIL, sizeof above, sizeof above, &above},
        {"a truncated failure", CTL_FAIL, 3, 3, zero},
        {"a truncated ping", CTL_PING, 7, 7, zero},
        {"a long leave message", CTL_BYE, 1, 1, zero},
        {"a message of 4 GiB", CTL_SUBMIT, 0xffffffffu, 0, zero}};
    run_each(messages, sizeof messages / sizeof messages[0], member_sends_invalid_message);
    for (int i = 0; i < 9; i++) {
        struct op_descriptor desc = invalid_descriptor(i);
        struct raw_message raw = {"an invalid operation", CTL_SUBMIT, sizeof desc, sizeof desc, &desc};
        run_each(&raw, 1, member_sends_invalid_message);
    }
}

static void test_invalid_messages_from_rank_0(void) {
    static const unsigned char zero[1024] = {0};
    const struct wire_go go = {.seq = 1000, .key = 42, .id = 5};
    const struct wire_failure fine = {.code = 0, .peer = 77, .text = "nothing happened"};
    const struct wire_failure again = {.code = -EAGAIN, .peer = 0, .text = "not final"};
    const struct wire_refuse none = {.code = 0, .peer = 0, .text = "nothing is wrong"};
    const struct wire_refuse beyond = {.code = NB_ETIMEOUT, .peer = 99, .text = "not submitted it: 99"};
    const int32_t high = 99;
    const int32_t low = -7;
    const struct wire_stall many = {.count = NB_MISSING_MAX + 1};
    const struct wire_stall below = {.count = 1, .ranks = {-7}};
    const struct wire_stall above = {.count = 2, .ranks = {0, 99}};
    const struct wire_probe slot = {.seq = 1000, .lanes = 1, .slot = 0xffffffffu, .bytes = 4096};
    const struct wire_probe odd = {.seq = 1000, .lanes = 1, .slot = 0, .bytes = 3};
    const struct wire_probe large = {.seq = 1000, .lanes = 0xffffffffu, .slot = 0, .bytes = (uint64_t)1 << 40};
    const struct wire_probe past = {.seq = 0, .lanes = 1, .slot = 0, .bytes = 4096};
    const struct raw_message messages[] = {
        {"an unknown type", 999, 8, 8, zero},
        {"a submit", CTL_SUBMIT, sizeof(struct op_descriptor), sizeof(struct op_descriptor), zero},
        {"a go of an unknown operation", CTL_GO, sizeof go, sizeof go, &go},
        {"a truncated go", CTL_GO, 5, 5, zero},
        {"a truncated refusal", CTL_REFUSE, 8, 8, zero},
        {"a refusal without a reason", CTL_REFUSE, sizeof none, sizeof none, &none},
        {"a refusal for rank 99", CTL_REFUSE, sizeof beyond, sizeof beyond, &beyond},
        {"a failure without an error code", CTL_ABORT, sizeof fine, sizeof fine, &fine},
        {"a failure with -EAGAIN", CTL_ABORT, sizeof again, sizeof again, &again},
        {"a truncated failure", CTL_ABORT, 3, 3, zero},
        {"a truncated pong", CTL_PONG, 3, 3, zero},
        {"a leave of rank 99", CTL_LEFT, sizeof high, sizeof high, &high},
        {"a leave of rank -7", CTL_LEFT, sizeof low, sizeof low, &low},
        {"a probe with an invalid slot", CTL_PROBE, sizeof slot, sizeof slot, &slot},
        {"a probe of 3 bytes", CTL_PROBE, sizeof odd, sizeof odd, &odd},
        {"a large probe", CTL_PROBE, sizeof large, sizeof large, &large},
        {"a probe with an old number", CTL_PROBE, sizeof past, sizeof past, &past},
        {"truncated streams", CTL_STREAMS, 9, 9, zero},
        {"a long stall report", CTL_STALL, 1000, 1000, zero},
        {"a truncated stall report", CTL_STALL, 8, 8, zero},
        {"a stall of too many ranks", CTL_STALL, sizeof many, sizeof many, &many},
        {"a stall of rank -7", CTL_STALL, sizeof below, sizeof below, &below},
        {"a stall of rank 99", CTL_STALL, sizeof above, sizeof above, &above},
        {"a message of 4 GiB", CTL_STALL, 0xffffffffu, 0, zero}};
    run_each(messages, sizeof messages / sizeof messages[0], rank_0_sends_invalid_message);
}

// Implausible stream counts within the protocol: the job continues.
static void implausible_stream_counts(struct test_rank *me) {
    struct wire_streams streams = {.used = 0xffffffffu, .count = 0xffffffffu};
    struct raw_message raw = {"many streams", CTL_STREAMS, sizeof streams, sizeof streams, &streams};
    struct nb_job_info info;
    float data[1000];
    int fd = dup(me->job->controls[1 - me->rank].watch.fd);
    test_barrier(me, "before");
    if (me->rank == 0) {
        send_raw(fd, &raw);
    }
    for (int i = 0; i < 1000; i++) {
        data[i] = 1;
    }
    struct nb_segment all = {.base = data, .bytes = sizeof data};
    struct nb_error err = {0};
    CHECK(test_finish(test_submit(me, test_op("sum", NB_OP_ALLREDUCE, &all)), &err) == 0 && data[999] == 2,
          "rank %d: %s", me->rank, err.text);
    nb_job_info(me->job, &info);
    CHECK(info.probe_count <= NB_PROBE_MAX, "%d points", info.probe_count);
    close(fd);
}

// The join has another time limit than the job.
static void control_connection_has_limit_of_job(struct test_rank *me) {
    int limit_ms = 0;
    socklen_t len = sizeof limit_ms;
    int fd = me->job->controls[1 - me->rank].watch.fd;
    CHECK(getsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &limit_ms, &len) == 0, "TCP_USER_TIMEOUT: %m");
    CHECK(limit_ms == me->timeout_ms, "the limit of rank %d is %d ms, not %d", me->rank, limit_ms, me->timeout_ms);
    test_barrier(me, "after"); // no rank leaves before
}

// Lists of valid operations, together more than rank 0 keeps.
struct flood {
    int lists;
    int each;
    const char *message;
    _Atomic int ended;
};

static int freeze_and_get_control(struct test_rank *me) {
    test_barrier(me, "before");
    test_freeze(me->job->progress.thread); // so that the thread does not write to the connection meanwhile
    return me->job->controls[0].watch.fd;
}

static int64_t test_deadline_ns(void) {
    return nb_now_ns() + (int64_t)TEST_LIMIT_MS * 1000000;
}

static void flood_of_submissions(struct test_rank *me) {
    const struct flood *flood = me->arg;
    struct nb_error err = {0};
    if (me->rank == 1) {
        int fd = freeze_and_get_control(me);
        struct op_descriptor *list = calloc((size_t)flood->each, sizeof *list);
        struct wire_control header = {.bytes = (uint32_t)((size_t)flood->each * sizeof *list), .type = CTL_SUBMIT};
        for (int at = 0; at < flood->lists; at++) {
            for (int i = 0; i < flood->each; i++) {
                list[i] =
                    (struct op_descriptor){.key = (uint64_t)(1 + at * flood->each + i), .prescale = 1, .postscale = 1};
                list[i].kind = NB_OP_BARRIER;
                snprintf(list[i].name, sizeof list[i].name, "flood.%d", at * flood->each + i);
            }
            CHECK(nb_sock_write_all(fd, &header, sizeof header, test_deadline_ns(), NULL) == 0 &&
                      nb_sock_write_all(fd, list, header.bytes, test_deadline_ns(), NULL) == 0,
                  "list %d: %m", at);
        }
        free(list);
        test_thaw();
    } else {
        test_barrier(me, "before");
    }
    int rc = test_try(me, test_op(me->rank == 0 ? "a" : "b", NB_OP_BARRIER, NULL), &err);
    CHECK(rc == NB_EWIRE && err.peer == 1 && strstr(err.text, flood->message) != NULL, "rank %d: %d, peer %d, %s",
          me->rank, rc, err.peer, err.text);
}

// Rank 1 sends pings without end and reads no pong.
static void flood_of_pings(struct test_rank *me) {
    struct flood *flood = me->arg;
    struct nb_error err = {0};
    if (me->rank == 0) {
        test_barrier(me, "before");
        int rc = test_try(me, test_op("a", NB_OP_BARRIER, NULL), &err);
        CHECK(rc == NB_EWIRE && err.peer == 1 && strstr(err.text, flood->message) != NULL, "%d, peer %d, %s", rc,
              err.peer, err.text);
        atomic_store(&flood->ended, 1);
        return;
    }
    struct {
        struct wire_control header;
        int64_t now_ns;
    } pings[256];
    for (int i = 0; i < 256; i++) {
        pings[i].header = (struct wire_control){.bytes = sizeof pings[i].now_ns, .type = CTL_PING};
        pings[i].now_ns = 0;
    }
    int fd = freeze_and_get_control(me);
    int64_t until = test_deadline_ns();
    while (atomic_load(&flood->ended) == 0) {
        CHECK(nb_now_ns() < until, "rank 0 does not fail the job");
        (void)nb_sock_write_all(fd, pings, sizeof pings, until, NULL); // fails once rank 0 closes the connection
    }
    test_thaw();
}

static void test_floods(void) {
    struct flood names = {
        .lists = PENDING_MAX / SUBMITS_MAX + 1, .each = SUBMITS_MAX, .message = "waited for other ranks"};
    struct flood one_list = {.lists = 1, .each = SUBMITS_MAX + 1, .message = "an unknown control message"};
    struct flood answers = {.message = "does not read"};
    struct test_rank template = {.size = 2, .transport = "tcp", .streams = 1, .timeout_ms = 20000};
    template.run = flood_of_submissions;
    template.arg = &names;
    test_job(&template);
    template.arg = &one_list;
    test_job(&template);
    template.run = flood_of_pings;
    template.arg = &answers;
    test_job(&template);
}

static void kinds_differ(struct test_rank *me) {
    float data[64] = {0};
    struct nb_segment all = {.base = data, .bytes = sizeof data};
    struct nb_error err = {0};
    enum nb_op_kind kind = me->rank == 0 ? NB_OP_ALLREDUCE : NB_OP_BROADCAST;
    CHECK(test_finish(test_submit(me, test_op("odd", kind, &all)), &err) == NB_EMISMATCH, "rank %d: %s", me->rank,
          err.text);
    CHECK(strstr(err.text, "allreduce") != NULL && strstr(err.text, "broadcast") != NULL, "text: %s", err.text);
    struct nb_work *work = NULL;
    struct nb_op wrong = {.name = "no kind", .kind = (enum nb_op_kind)77};
    CHECK(nb_submit(nb_job_world(me->job), &wrong, &work, &err) == -EINVAL, "an unknown kind is accepted");
    struct nb_segment oversized_segment = {.base = data, .bytes = (size_t)1 << 46};
    struct nb_op oversized = {
        .name = "vast", .kind = NB_OP_ALLREDUCE, .dtype = NB_F32, .segments = &oversized_segment, .segment_count = 1};
    CHECK(nb_submit(nb_job_world(me->job), &oversized, &work, &err) == -EINVAL, "a buffer of 64 TiB is accepted");
    test_barrier(me, "after");
}

enum { BATCH = 100, MOVED = 8 * 1024 * 1024 };

static void batch_run(struct test_rank *me, int from) {
    static const size_t bytes = 64;
    float data[BATCH][16] = {{0}};
    struct nb_work *works[BATCH];
    struct nb_error err = {0};
    for (int i = 0; i < BATCH; i++) {
        char name[32];
        struct nb_segment all = {.base = data[i], .bytes = bytes};
        snprintf(name, sizeof name, "unnamed.%d", from + i);
        works[i] = test_submit(me, test_op(name, NB_OP_ALLREDUCE, &all));
    }
    for (int i = 0; i < BATCH; i++) {
        CHECK(test_finish(works[i], &err) == 0, "rank %d: %s", me->rank, err.text);
    }
}

// Bytes that are allocated now. Sanitizers replace glibc's heap and have their own function for this.
static size_t in_use(void) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return __sanitizer_get_current_allocated_bytes();
#else
    return mallinfo2().uordblks;
#endif
}

// Ever-new names, as Horovod gives to unnamed operations, do not grow memory.
static void unlimited_names(struct test_rank *me) {
    enum { WARM = 24000, ALL = 34000 };
    size_t before = 0;
    for (int i = 0; i < ALL; i += BATCH) {
        if (i == WARM) {
            test_barrier(me, "warm");
            before = in_use();
        }
        batch_run(me, i);
    }
    test_barrier(me, "finished");
    size_t after = in_use();
    test_barrier(me, "measured"); // a rank that frees its job meanwhile would change the sum
    CHECK(after < before + 256 * 1024, "rank %d: %zu bytes in use after %d names, %zu after %d", me->rank, before, WARM,
          after, ALL);
    CHECK(me->job->ops.round_count <= 16 * 1024, "%d keys are kept", me->job->ops.round_count);
}

// Many more operations in total than may be pending at a time: operations that have started do not count.
static void more_than_pending_max(struct test_rank *me) {
    for (int i = 0; i < 8 * me->pending_max; i += BATCH) {
        batch_run(me, i);
    }
    test_barrier(me, "finished");
}

enum { IDLE_MS = 600, IDLE_PASSES_MAX = 100 };

// Counts of a rank's event loop, from the first sleep that nothing ends: the operation before is over then.
static struct idle_loop {
    _Atomic int epoll_fd; // -1: does not count
    atomic_bool begun;
    _Atomic int passes;
    _Atomic int slept_ms;
    sem_t ended;
} idle_loops[2] = {{.epoll_fd = -1}, {.epoll_fd = -1}};

static void idle_loop_count(struct idle_loop *loop, int events, int timeout_ms) {
    bool slept = events == 0 && timeout_ms > 0;
    if (!atomic_load(&loop->begun)) {
        atomic_store(&loop->begun, slept);
        return;
    }
    atomic_fetch_add(&loop->passes, timeout_ms == 0); // each pass polls the loop once
    atomic_fetch_add(&loop->slept_ms, slept ? timeout_ms : 0);
    if (atomic_load(&loop->slept_ms) >= IDLE_MS || atomic_load(&loop->passes) > IDLE_PASSES_MAX) {
        atomic_store(&loop->epoll_fd, -1);
        (void)sem_post(&loop->ended);
    }
}

int __real_epoll_wait(int fd, struct epoll_event *events, int max, int timeout_ms);
int __wrap_epoll_wait(int fd, struct epoll_event *events, int max, int timeout_ms);
int __wrap_epoll_wait(int fd, struct epoll_event *events, int max, int timeout_ms) {
    int count = __real_epoll_wait(fd, events, max, timeout_ms);
    for (int r = 0; r < 2; r++) {
        if (atomic_load(&idle_loops[r].epoll_fd) == fd) {
            idle_loop_count(&idle_loops[r], count, timeout_ms);
        }
    }
    return count;
}

// After data have moved on every lane, the communication thread sleeps: it makes few passes besides its whole sleeps,
// as only heartbeats end a sleep early. Neither count depends on the speed of the machine.
static void thread_sleeps_when_idle(struct test_rank *me) {
    struct idle_loop *loop = &idle_loops[me->rank];
    pthread_barrier_t *both = me->arg;
    struct timespec until;
    char *data = calloc(MOVED, 1);
    struct nb_segment all = {.base = data, .bytes = MOVED};
    atomic_store(&loop->begun, false);
    atomic_store(&loop->passes, 0);
    atomic_store(&loop->slept_ms, 0);
    CHECK(sem_init(&loop->ended, 0, 0) == 0, "semaphore: %m");
    test_do(me, test_op("moved", NB_OP_ALLREDUCE, &all));
    test_barrier(me, "before");
    pthread_barrier_wait(both);
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += TEST_LIMIT_MS / 1000;
    atomic_store(&loop->epoll_fd, me->job->loop.epoll_fd);
    int rc;
    do {
        rc = sem_timedwait(&loop->ended, &until);
    } while (rc != 0 && errno == EINTR);
    CHECK(rc == 0, "rank %d: the thread has slept for only %d ms", me->rank, atomic_load(&loop->slept_ms));
    CHECK(atomic_load(&loop->passes) <= IDLE_PASSES_MAX, "rank %d: %d passes in %d ms of sleep", me->rank,
          atomic_load(&loop->passes), atomic_load(&loop->slept_ms));
    pthread_barrier_wait(both); // the next operation wakes the other rank
    test_barrier(me, "after");
    free(data);
}

static const struct nb_job *pipe_writer; // its peer reads at the last moment before it sleeps
static struct nb_shm_pipe written_pipe;

void __real_nb_shared_sleep(const struct nb_job *job);
void __wrap_nb_shared_sleep(const struct nb_job *job);
void __real_nb_shared_wake(const struct nb_job *job, int peer);
void __wrap_nb_shared_wake(const struct nb_job *job, int peer);

void __wrap_nb_shared_sleep(const struct nb_job *job) {
    static unsigned char read[NB_SHM_PIPE_BYTES];
    bool writer_waits;
    if (job != pipe_writer) {
        __real_nb_shared_sleep(job);
        return;
    }
    CHECK(nb_shm_pipe_read(&written_pipe, read, sizeof read, &writer_waits) == NB_SHM_PIPE_BYTES && writer_waits,
          "the pipe was not full");
}

void __wrap_nb_shared_wake(const struct nb_job *job, int peer) {
    if (job != pipe_writer) {
        __real_nb_shared_wake(job, peer);
    }
}

// The peer makes room in a full pipe while its writer is about to sleep: the writer does not sleep on queued bytes.
static void test_room_before_sleep(void) {
    static const unsigned char body[NB_SHM_PIPE_BYTES];
    static struct nb_shm_pipe empty_pipe;
    struct shared shared = {0};
    struct control control = {
        .watch = {.fd = STDIN_FILENO, .events = EPOLLIN}, .pipe_in = &empty_pipe, .pipe_out = &written_pipe};
    struct nb_job job = {.shared = &shared, .controls = &control, .control_count = 1};
    control.job = &job;
    pipe_writer = &job;
    nb_control_send(&control, CTL_PING, body, sizeof body);
    CHECK(control.out_bytes == sizeof(struct wire_control), "%zu bytes are queued", control.out_bytes);
    CHECK(!nb_control_arm(&job) && control.out_bytes == 0, "the writer sleeps with %zu bytes queued",
          control.out_bytes);
    pipe_writer = NULL;
    free(control.out);
}

static atomic_bool watch_fails; // of rank 1's control connection
static _Thread_local int unwatched_fd = -1;
static _Atomic int unwatched_closes;

int __real_nb_control_init(struct control *control, struct nb_job *job, int peer, int fd, struct nb_error *err);
int __wrap_nb_control_init(struct control *control, struct nb_job *job, int peer, int fd, struct nb_error *err);
int __real_close(int fd);
int __wrap_close(int fd);

int __wrap_nb_control_init(struct control *control, struct nb_job *job, int peer, int fd, struct nb_error *err) {
    int epoll_fd = job->loop.epoll_fd;
    if (job->rank == 1 && atomic_load(&watch_fails)) {
        unwatched_fd = fd;
        job->loop.epoll_fd = -1;
    }
    int rc = __real_nb_control_init(control, job, peer, fd, err);
    job->loop.epoll_fd = epoll_fd;
    return rc;
}

int __wrap_close(int fd) {
    if (fd >= 0 && fd == unwatched_fd) {
        atomic_fetch_add(&unwatched_closes, 1);
    }
    return __real_close(fd);
}

static void rank_1_does_not_open(struct test_rank *me) {
    struct nb_error err = {0};
    int rc = test_try(me, test_op("a", NB_OP_BARRIER, NULL), &err);
    CHECK(me->rank == 0 && rc == NB_EPEER && err.peer == 1, "rank %d: %d, peer %d, %s", me->rank, rc, err.peer,
          err.text);
}

// A descriptor that is closed twice may be another thread's the second time.
static void test_unwatched_connection_closes_once(void) {
    struct test_rank template = {.size = 2, .transport = "tcp", .streams = 1, .timeout_ms = 20000};
    struct test_rank ranks[TEST_RANKS_MAX];
    template.run = rank_1_does_not_open;
    atomic_store(&watch_fails, true);
    test_run(&template, ranks);
    atomic_store(&watch_fails, false);
    CHECK(ranks[0].rc == 0 && ranks[1].rc == -EBADF, "%d %s", ranks[1].rc, ranks[1].err.text);
    CHECK(atomic_load(&unwatched_closes) == 1, "the connection was closed %d times", atomic_load(&unwatched_closes));
}

// Several threads submit and wait concurrently; each thread uses one name.
struct submitter {
    struct test_rank *me;
    int number;
};

static void *thread_run(void *arg) {
    struct submitter *submitter = arg;
    for (int round = 0; round < 40; round++) {
        float data[2000];
        char name[32];
        for (int i = 0; i < 2000; i++) {
            data[i] = (float)(submitter->me->rank + i % 7);
        }
        struct nb_segment all = {.base = data, .bytes = sizeof data};
        struct nb_error err = {0};
        snprintf(name, sizeof name, "thread.%d", submitter->number);
        CHECK(test_finish(test_submit(submitter->me, test_op(name, NB_OP_ALLREDUCE, &all)), &err) == 0, "%s: %s", name,
              err.text);
        for (int i = 0; i < 2000; i++) {
            CHECK(data[i] == (float)(3 + 3 * (i % 7)), "%s: [%d] is %g", name, i, (double)data[i]);
        }
    }
    return NULL;
}

static void several_threads_submit(struct test_rank *me) {
    pthread_t threads[4];
    struct submitter submitters[4];
    for (int i = 0; i < 4; i++) {
        submitters[i] = (struct submitter){.me = me, .number = i};
        CHECK(pthread_create(&threads[i], NULL, thread_run, &submitters[i]) == 0, "thread");
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
    }
}

// The engine's thread sleeps on every network. Returns 0, or 77 if the network is not available.
static int test_idle(const char *network) {
    struct test_rank template = test_on(network);
    pthread_barrier_t both;
    pthread_barrier_init(&both, NULL, 2);
    template.size = 2;
    template.streams = 4;
    template.run = thread_sleeps_when_idle;
    template.arg = &both;
    int rc = test_job(&template);
    pthread_barrier_destroy(&both);
    return rc;
}

// Usage: test_control shm|tcp|ofi. Control messages use TCP on every network, so most tests run with it alone.
int main(int argc, char **argv) {
    CHECK(argc == 2, "name one network");
    int rc = test_idle(argv[1]);
    if (rc != 0 || strcmp(argv[1], "tcp") != 0) {
        return rc;
    }
    struct test_rank template = {.size = 2, .transport = "tcp", .streams = 1, .timeout_ms = 20000};
    test_invalid_messages_to_rank_0();
    test_invalid_messages_from_rank_0();
    test_floods();
    test_room_before_sleep();
    test_unwatched_connection_closes_once();
    template.run = control_connection_has_limit_of_job;
    test_job(&template);
    template.run = implausible_stream_counts;
    test_job(&template);
    template.run = kinds_differ;
    test_job(&template);
    template.run = unlimited_names;
    test_job(&template);
    template.pending_max = BATCH + 1;
    template.run = more_than_pending_max;
    test_job(&template);
    template.pending_max = 0;
    template.size = 3;
    template.streams = 2;
    template.run = several_threads_submit;
    test_job(&template);
    return 0;
}
