// Invalid control messages of a broken peer: each ends the job with an error that names the peer, and memory does
// not grow. An idle job's thread sleeps.
#include <errno.h>
#include <malloc.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "engine/context.h"
#include "engine/negotiation.h"
#include "job.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
size_t __sanitizer_get_current_allocated_bytes(void); // gcc ships no header that declares it
#endif

struct raw {
    const char *what;
    uint32_t type;
    uint32_t bytes; // as the header says
    size_t body;    // bytes that follow
    const void *data;
};

// Writes straight into a job's control connection, between two of its own messages.
static void inject(int fd, const struct raw *raw) {
    unsigned char buffer[4096];
    struct wire_control header = {.bytes = raw->bytes, .type = raw->type};
    memcpy(buffer, &header, sizeof header);
    memcpy(buffer + sizeof header, raw->data, raw->body);
    ssize_t n = send(fd, buffer, sizeof header + raw->body, MSG_NOSIGNAL);
    CHECK(n == (ssize_t)(sizeof header + raw->body), "%s: %m", raw->what);
}

// One rank's message to the other; both must report that it was invalid, and from which rank.
static void broken(struct test_rank *me, int victim) {
    const struct raw *raw = me->arg;
    struct nb_error err = {0};
    int fd = dup(me->job->controls[1 - me->rank].watch.fd); // rank 1 has one only, its first
    test_barrier(me, "before");
    if (me->rank != victim) {
        inject(fd, raw);
    }
    int rc = test_try(me, test_op(me->rank == 0 ? "a" : "b", NB_OP_BARRIER, NULL), &err); // neither is ever agreed
    CHECK(rc == NB_EWIRE && err.peer == 1 - victim, "rank %d, %s: %d, peer %d, %s", me->rank, raw->what, rc, err.peer,
          err.text);
    close(fd);
}

static void broken_member(struct test_rank *me) {
    broken(me, 0);
}

static void broken_root(struct test_rank *me) {
    broken(me, 1);
}

static void each(const struct raw *raws, size_t count, void (*run)(struct test_rank *me)) {
    for (size_t i = 0; i < count; i++) {
        struct raw raw = raws[i];
        struct test_rank template = {.size = 2, .transport = "tcp", .streams = 1, .timeout_ms = 20000, .arg = &raw};
        template.run = run;
        test_job(&template);
    }
}

// The same valid operation with one thing wrong in each.
static struct op_descriptor wrong_desc(int which) {
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

static void to_rank_0(void) {
    static const unsigned char zero[1024] = {0};
    static const uint64_t unknown[16] = {1};
    struct wire_failure fine = {.code = 0, .peer = 1, .text = "nothing happened"};
    struct wire_failure above = {.code = 5, .peer = 1, .text = "more than nothing"};
    struct wire_failure again = {.code = -EAGAIN, .peer = 1, .text = "not over"};
    static const int32_t twice[] = {7, 0, 1, 1}; // number, ranks
    static const int32_t beyond[] = {7, 1, 2};
    static const int32_t without[] = {7, 0};
    static const int32_t all[] = {0, 0, 1};
    const struct raw raws[] = {
        {"no type", 0, 0, 0, zero},
        {"a failure that is not over", CTL_FAIL, sizeof again, sizeof again, &again},
        {"an unknown type", 999, 8, 8, zero},
        {"a go", CTL_GO, sizeof(struct wire_go), sizeof(struct wire_go), zero},
        {"a cut submit", CTL_SUBMIT, sizeof(struct op_descriptor) - 1, sizeof(struct op_descriptor) - 1, zero},
        {"a cut mask", CTL_MASK, 3, 3, zero},
        {"a long mask", CTL_MASK, 136, 136, zero},
        {"a mask of nothing", CTL_MASK, sizeof unknown, sizeof unknown, unknown},
        {"a communicator without ranks", CTL_GROUP, 4, 4, twice},
        {"a communicator with a repeated rank", CTL_GROUP, sizeof twice, sizeof twice, twice},
        {"a communicator of rank 2", CTL_GROUP, sizeof beyond, sizeof beyond, beyond},
        {"a communicator without its sender", CTL_GROUP, sizeof without, sizeof without, without},
        {"another communicator of all ranks", CTL_GROUP, sizeof all, sizeof all, all},
        {"a failure without an error code", CTL_FAIL, sizeof fine, sizeof fine, &fine},
        {"a failure above", CTL_FAIL, sizeof above, sizeof above, &above},
        {"a cut failure", CTL_FAIL, 3, 3, zero},
        {"a cut ping", CTL_PING, 7, 7, zero},
        {"a long goodbye", CTL_BYE, 1, 1, zero},
        {"endless", CTL_SUBMIT, 0xffffffffu, 0, zero}};
    each(raws, sizeof raws / sizeof raws[0], broken_member);
    for (int i = 0; i < 9; i++) {
        struct op_descriptor desc = wrong_desc(i);
        struct raw raw = {"an invalid operation", CTL_SUBMIT, sizeof desc, sizeof desc, &desc};
        each(&raw, 1, broken_member);
    }
}

static void from_rank_0(void) {
    static const unsigned char zero[1024] = {0};
    const struct wire_go go = {.seq = 1000, .key = 42, .id = 5};
    const struct wire_failure fine = {.code = 0, .peer = 77, .text = "nothing happened"};
    const struct wire_failure again = {.code = -EAGAIN, .peer = 0, .text = "not over"};
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
    const struct raw raws[] = {
        {"an unknown type", 999, 8, 8, zero},
        {"a submit", CTL_SUBMIT, sizeof(struct op_descriptor), sizeof(struct op_descriptor), zero},
        {"a go of nothing", CTL_GO, sizeof go, sizeof go, &go},
        {"a cut go", CTL_GO, 5, 5, zero},
        {"a cut refusal", CTL_REFUSE, 8, 8, zero},
        {"a refusal without a reason", CTL_REFUSE, sizeof none, sizeof none, &none},
        {"a refusal for rank 99", CTL_REFUSE, sizeof beyond, sizeof beyond, &beyond},
        {"a failure without an error code", CTL_ABORT, sizeof fine, sizeof fine, &fine},
        {"a failure that is not over", CTL_ABORT, sizeof again, sizeof again, &again},
        {"a cut failure", CTL_ABORT, 3, 3, zero},
        {"a cut pong", CTL_PONG, 3, 3, zero},
        {"the end of rank 99", CTL_LEFT, sizeof high, sizeof high, &high},
        {"the end of rank -7", CTL_LEFT, sizeof low, sizeof low, &low},
        {"a slot", CTL_PROBE, sizeof slot, sizeof slot, &slot},
        {"an odd probe", CTL_PROBE, sizeof odd, sizeof odd, &odd},
        {"a large probe", CTL_PROBE, sizeof large, sizeof large, &large},
        {"an old probe", CTL_PROBE, sizeof past, sizeof past, &past},
        {"cut streams", CTL_STREAMS, 9, 9, zero},
        {"a long notice", CTL_STALL, 1000, 1000, zero},
        {"a cut notice", CTL_STALL, 8, 8, zero},
        {"a stall of too many", CTL_STALL, sizeof many, sizeof many, &many},
        {"a stall of rank -7", CTL_STALL, sizeof below, sizeof below, &below},
        {"a stall of rank 99", CTL_STALL, sizeof above, sizeof above, &above},
        {"endless", CTL_STALL, 0xffffffffu, 0, zero}};
    each(raws, sizeof raws / sizeof raws[0], broken_root);
}

// Strange, but within the protocol: the job goes on.
static void strange_streams(struct test_rank *me) {
    struct wire_streams streams = {.used = 0xffffffffu, .count = 0xffffffffu};
    struct raw raw = {"many streams", CTL_STREAMS, sizeof streams, sizeof streams, &streams};
    struct nb_job_info info;
    float data[1000];
    int fd = dup(me->job->controls[1 - me->rank].watch.fd);
    test_barrier(me, "before");
    if (me->rank == 0) {
        inject(fd, &raw);
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

// Operations in lists, each of which is possible, and more than rank 0 is to keep.
struct flood {
    int lists;
    int each;
    const char *words;
    _Atomic int over;
};

static int frozen_control(struct test_rank *me) {
    test_barrier(me, "before");
    test_freeze(me->job->progress.thread); // it must not write in the middle of what is written here
    return me->job->controls[0].watch.fd;
}

static int64_t test_deadline_ns(void) {
    return nb_now_ns() + (int64_t)TEST_LIMIT_MS * 1000000;
}

static void names_flood(struct test_rank *me) {
    const struct flood *flood = me->arg;
    struct nb_error err = {0};
    if (me->rank == 1) {
        int fd = frozen_control(me);
        struct op_descriptor *list = calloc((size_t)flood->each, sizeof *list);
        struct wire_control header = {.bytes = (uint32_t)((size_t)flood->each * sizeof *list), .type = CTL_SUBMIT};
        for (int at = 0; at < flood->lists; at++) {
            for (int i = 0; i < flood->each; i++) {
                list[i] =
                    (struct op_descriptor){.key = (uint64_t)(1 + at * flood->each + i), .prescale = 1, .postscale = 1};
                list[i].kind = NB_OP_BARRIER;
                snprintf(list[i].name, sizeof list[i].name, "flood.%d", at * flood->each + i);
            }
            CHECK(nb_sock_write_all(fd, &header, sizeof header, test_deadline_ns()) == 0 &&
                      nb_sock_write_all(fd, list, header.bytes, test_deadline_ns()) == 0,
                  "list %d: %m", at);
        }
        free(list);
        test_thaw();
    } else {
        test_barrier(me, "before");
    }
    int rc = test_try(me, test_op(me->rank == 0 ? "a" : "b", NB_OP_BARRIER, NULL), &err);
    CHECK(rc == NB_EWIRE && err.peer == 1 && strstr(err.text, flood->words) != NULL, "rank %d: %d, peer %d, %s",
          me->rank, rc, err.peer, err.text);
}

// Asks without end, and reads no answer.
static void answers_flood(struct test_rank *me) {
    struct flood *flood = me->arg;
    struct nb_error err = {0};
    if (me->rank == 0) {
        test_barrier(me, "before");
        int rc = test_try(me, test_op("a", NB_OP_BARRIER, NULL), &err);
        CHECK(rc == NB_EWIRE && err.peer == 1 && strstr(err.text, flood->words) != NULL, "%d, peer %d, %s", rc,
              err.peer, err.text);
        atomic_store(&flood->over, 1);
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
    int fd = frozen_control(me);
    int64_t until = test_deadline_ns();
    while (atomic_load(&flood->over) == 0) {
        CHECK(nb_now_ns() < until, "rank 0 keeps every answer");
        (void)nb_sock_write_all(fd, pings, sizeof pings, until); // rank 0 may close it meanwhile
    }
    test_thaw();
}

static void floods(void) {
    struct flood names = {
        .lists = PENDING_MAX / SUBMITS_MAX + 1, .each = SUBMITS_MAX, .words = "waited for other ranks"};
    struct flood one_list = {.lists = 1, .each = SUBMITS_MAX + 1, .words = "an unknown control message"};
    struct flood answers = {.words = "does not read"};
    struct test_rank template = {.size = 2, .transport = "tcp", .streams = 1, .timeout_ms = 20000};
    template.run = names_flood;
    template.arg = &names;
    test_job(&template);
    template.arg = &one_list;
    test_job(&template);
    template.run = answers_flood;
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
    CHECK(nb_submit(nb_job_world(me->job), &wrong, &work, &err) == -EINVAL, "an unknown kind");
    struct nb_segment huge = {.base = data, .bytes = (size_t)1 << 46};
    struct nb_op vast = {
        .name = "vast", .kind = NB_OP_ALLREDUCE, .dtype = NB_F32, .segments = &huge, .segment_count = 1};
    CHECK(nb_submit(nb_job_world(me->job), &vast, &work, &err) == -EINVAL, "blocks larger than the lanes' buffers");
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

// Bytes that are allocated now. A sanitizer's allocator has a call of its own for this, as glibc's heap is not in use there.
static size_t in_use(void) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return __sanitizer_get_current_allocated_bytes();
#else
    return mallinfo2().uordblks;
#endif
}

// Ever-new names, as Horovod gives to operations that have none.
static void names_without_end(struct test_rank *me) {
    enum { WARM = 24000, ALL = 34000 };
    size_t before = 0;
    for (int i = 0; i < ALL; i += BATCH) {
        if (i == WARM) {
            test_barrier(me, "warm");
            before = in_use();
        }
        batch_run(me, i);
    }
    test_barrier(me, "over");
    size_t after = in_use();
    CHECK(after < before + 256 * 1024, "rank %d: %zu bytes in use after %d names, %zu after %d", me->rank, before, WARM,
          after, ALL);
    CHECK(me->job->ops.round_count <= 16 * 1024, "%d keys are counted", me->job->ops.round_count);
}

// Many more than may wait for other ranks at a time: those that are agreed wait no more.
static void more_than_may_wait(struct test_rank *me) {
    for (int i = 0; i < 8 * me->pending_max; i += BATCH) {
        batch_run(me, i);
    }
    test_barrier(me, "over");
}

// After something has moved on every lane. Under a load of others this thread may get less than it asks for, never more.
static void sleeps_when_idle(struct test_rank *me) {
    struct timespec pause = {.tv_nsec = 600 * 1000 * 1000};
    struct timespec used[2];
    clockid_t clock;
    char *line = calloc(MOVED, 1);
    struct nb_segment all = {.base = line, .bytes = MOVED};
    test_do(me, test_op("moved", NB_OP_ALLREDUCE, &all));
    test_barrier(me, "before");
    CHECK(pthread_getcpuclockid(me->job->progress.thread, &clock) == 0, "a thread");
    clock_gettime(clock, &used[0]);
    nanosleep(&pause, NULL);
    clock_gettime(clock, &used[1]);
    int64_t ns = (used[1].tv_sec - used[0].tv_sec) * 1000000000 + used[1].tv_nsec - used[0].tv_nsec;
    CHECK(ns < 60 * 1000 * 1000, "rank %d: %.1f ms of work in 600 ms without any", me->rank, (double)ns / 1e6);
    test_barrier(me, "after");
    free(line);
}

// One name in each of many threads' turns: a thread submits and waits while another does.
struct turn {
    struct test_rank *me;
    int number;
};

static void *thread_run(void *arg) {
    struct turn *turn = arg;
    for (int round = 0; round < 40; round++) {
        float data[2000];
        char name[32];
        for (int i = 0; i < 2000; i++) {
            data[i] = (float)(turn->me->rank + i % 7);
        }
        struct nb_segment all = {.base = data, .bytes = sizeof data};
        struct nb_error err = {0};
        snprintf(name, sizeof name, "thread.%d", turn->number);
        CHECK(test_finish(test_submit(turn->me, test_op(name, NB_OP_ALLREDUCE, &all)), &err) == 0, "%s: %s", name,
              err.text);
        for (int i = 0; i < 2000; i++) {
            CHECK(data[i] == (float)(3 + 3 * (i % 7)), "%s: [%d] is %g", name, i, (double)data[i]);
        }
    }
    return NULL;
}

static void many_threads(struct test_rank *me) {
    pthread_t threads[4];
    struct turn turns[4];
    for (int i = 0; i < 4; i++) {
        turns[i] = (struct turn){.me = me, .number = i};
        CHECK(pthread_create(&threads[i], NULL, thread_run, &turns[i]) == 0, "a thread");
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
    }
}

int main(void) {
    static const char *const idle[] = {"tcp", "ofi", "shm"};
    struct test_rank template = {.size = 2, .transport = "tcp", .streams = 1, .timeout_ms = 20000};
    to_rank_0();
    from_rank_0();
    floods();
    template.run = strange_streams;
    test_job(&template);
    template.run = kinds_differ;
    test_job(&template);
    template.run = names_without_end;
    test_job(&template);
    template.pending_max = BATCH + 1;
    template.run = more_than_may_wait;
    test_job(&template);
    template.pending_max = 0;
    for (size_t i = 0; i < sizeof idle / sizeof idle[0]; i++) {
        struct test_rank resting = test_on(idle[i]);
        resting.size = 2;
        resting.streams = 4;
        resting.run = sleeps_when_idle;
        (void)test_job(&resting); // libfabric may not be there
    }
    template.size = 3;
    template.streams = 2;
    template.run = many_threads;
    test_job(&template);
    return 0;
}
