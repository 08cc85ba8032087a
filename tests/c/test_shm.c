// Shared memory between ranks of one host: every kind of operation, in arenas and other memory, contiguous and
// scattered. Also failures to share memory, and a rank that leaves.
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "base/arena.h"
#include "base/dtype.h"
#include "base/error.h"
#include "base/fdpass.h"
#include "base/fork.h"
#include "engine/shared_fold.h"
#include "sums.h"
#include "transport/shm.h"
#include "transport/shm_pipe.h"

enum { MANY = 40, MANY_COUNT = 3001 };

// More concurrent operations than slots, some of them in arenas. Each rank submits them in a different order.
static void more_operations_than_slots(struct test_rank *me, char *base, const char *heap) {
    struct nb_work *works[MANY];
    struct nb_segment all[MANY];
    for (int round = 0; round < 3; round++) {
        for (int k = 0; k < MANY; k++) {
            int which = (k * 7 + me->rank * 11 + round) % MANY;
            char name[32];
            snprintf(name, sizeof name, "many.%d", which);
            char *memory = which % 3 == 0 ? (char *)(uintptr_t)heap : base;
            memory += (size_t)which * MANY_COUNT;
            for (size_t i = 0; i < MANY_COUNT; i++) {
                memory[i] = (char)input_value(me->rank, i + (size_t)which);
            }
            all[which] = (struct nb_segment){.base = memory, .bytes = MANY_COUNT};
            struct nb_op op = test_op(name, NB_OP_ALLREDUCE, &all[which]);
            op.dtype = NB_U8;
            op.priority = which % 5;
            works[which] = test_submit(me, op);
        }
        for (int which = 0; which < MANY; which++) {
            test_done(me, works[which]);
            for (size_t i = 0; i < MANY_COUNT; i++) {
                int got = ((unsigned char *)all[which].base)[i];
                int want = (int)reduce_inputs(NB_SUM, me->size, i + (size_t)which);
                CHECK(got == want, "rank %d, many %d: [%zu] is %d, not %d", me->rank, which, i, got, want);
            }
        }
    }
}

static void operations_in_all_memory(struct test_rank *me) {
    char *base = arena_share(me);
    char *heap = malloc(ARENA_BYTES);
    CHECK(heap != NULL, "memory");
    check_all_kinds(me, base, "arena");
    check_all_sizes(me, base, "arena");
    check_scale_factors(me, (float *)(void *)base, "arena");
    struct nb_job_info info = job_info(me);
    CHECK(info.shm_bytes > 0 && info.shm_staged_bytes == 0, "%llu of %llu bytes were staged",
          (unsigned long long)info.shm_staged_bytes, (unsigned long long)info.shm_bytes);
    check_all_kinds(me, heap, "heap");
    check_all_sizes(me, heap, "heap");
    check_scale_factors(me, (float *)(void *)heap, "heap");
    CHECK(job_info(me).shm_staged_bytes == job_info(me).shm_bytes - info.shm_bytes,
          "an operation in heap memory was not staged");
    check_all_sizes(me, me->rank == 0 ? base : heap, "one rank in an arena"); // staged, because the heap is not mapped
    more_operations_than_slots(me, base, heap);
    info = job_info(me);
    CHECK(strcmp(info.shm, "on") == 0 && info.bytes_out + info.bytes_in == 0, "%llu bytes were sent over the network",
          (unsigned long long)(info.bytes_out + info.bytes_in));
    free(heap);
}

// Buffers that are staged: one in more pieces than a description holds, and memory that its owner could still shrink.
static void undescribed_buffers_are_staged(struct test_rank *me) {
    char *base = arena_share(me);
    const struct layout cut = {.pieces = 300, .gap = 4};
    struct nb_op op = {.name = "cut", .kind = NB_OP_ALLREDUCE, .dtype = NB_F32};
    check_operation(me, op, base, KINDS_COUNT, cut);
    uint64_t cut_bytes = job_info(me).shm_staged_bytes;
    CHECK(cut_bytes > 0, "a buffer in 300 pieces was not staged");
    struct nb_error err = {0};
    struct nb_arena shrinkable = {.bytes = 1 << 20, .fd = memfd_create("loose", MFD_CLOEXEC)};
    CHECK(shrinkable.fd >= 0 && ftruncate(shrinkable.fd, (off_t)shrinkable.bytes) == 0, "memory: %m");
    shrinkable.base = mmap(NULL, shrinkable.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, shrinkable.fd, 0);
    CHECK(shrinkable.base != MAP_FAILED && nb_job_map_arena(me->job, &shrinkable, &err) == 0, "map: %s", err.text);
    test_barrier(me, "mapped");
    test_barrier(me, "known");
    check_operation(me, op, shrinkable.base, KINDS_COUNT, contiguous);
    CHECK(job_info(me).shm_staged_bytes > cut_bytes, "other ranks have mapped memory that may shrink");
    nb_arena_close(&shrinkable);
}

// Arenas beyond the file size limit, as in a container, are staged, and one notice reports this.
static void arenas_over_the_limit_are_staged(struct test_rank *me) {
    enum { LIMIT = 64 << 20 };
    struct nb_op op = {.name = "large", .kind = NB_OP_ALLREDUCE, .dtype = NB_F32};
    struct nb_arena large[2];
    struct nb_error err = {0};
    char text[NB_ERROR_TEXT] = "";
    for (int i = 0; i < 2; i++) {
        CHECK(nb_arena_open(&large[i], LIMIT + 1, &err) == 0 && large[i].fd == -1 && large[i].why == -EFBIG, "%d: %s",
              large[i].why, err.text);
        CHECK(nb_job_map_arena(me->job, &large[i], &err) == 0, "map: %s", err.text);
    }
    test_barrier(me, "mapped");
    check_operation(me, op, large[0].base, KINDS_COUNT, contiguous);
    CHECK(job_info(me).shm_staged_bytes > 0, "rank %d: nothing was staged", me->rank);
    CHECK(nb_job_notice(me->job, text, sizeof text) && strstr(text, "File too large (ulimit -f is lower)") != NULL,
          "rank %d: notice: %s", me->rank, text);
    CHECK(!nb_job_notice(me->job, text, sizeof text), "rank %d: second notice: %s", me->rank, text);
    test_barrier(me, "finished");
    nb_job_close(me->job);
    me->job = NULL;
    nb_arena_close(&large[0]);
    nb_arena_close(&large[1]);
}

static void works_over_the_network(struct test_rank *me) {
    static char data[TEST_RANKS_MAX][KINDS_COUNT];
    check_operation(me, (struct nb_op){.name = "sum", .kind = NB_OP_ALLREDUCE, .dtype = NB_U8}, data[me->rank],
                    KINDS_COUNT, contiguous);
    CHECK(strncmp(job_info(me).shm, "off: ", 5) == 0 && strstr(job_info(me).shm, me->arg) != NULL, "shm is %s, not %s",
          job_info(me).shm, (char *)me->arg);
    CHECK(job_info(me).bytes_out > 0 && job_info(me).shm_bytes == 0, "the network was not used");
}

static void works_without_notice(struct test_rank *me) {
    char text[NB_ERROR_TEXT];
    works_over_the_network(me);
    CHECK(!nb_job_notice(me->job, text, sizeof text), "unexpected notice: %s", text);
}

static void works_with_notice(struct test_rank *me) {
    char text[NB_ERROR_TEXT] = "";
    works_over_the_network(me);
    bool noticed = nb_job_notice(me->job, text, sizeof text);
    CHECK(noticed == (me->rank == 0), "rank %d: notice: %s", me->rank, text);
    CHECK(!noticed || strstr(text, me->arg) != NULL, "the notice lacks the reason: %s", text);
}

static void fail_if_run(struct test_rank *me) {
    CHECK(false, "rank %d runs without shared memory, which was required", me->rank);
}

static const struct test_rank two_ranks = {
    .size = 2, .transport = "tcp", .streams = 1, .timeout_ms = 20000, .shm = NB_SHM_REQUIRED, .host = "host a"};

// The rendezvous fails with this code on rank 1; 0: it does not.
static _Atomic int rendezvous_failure;

int __real_nb_shm_rendezvous(struct nb_shm *shm, const char (*names)[NB_FDPASS_NAME], const struct nb_boot *boot,
                             int wake_fd, int64_t deadline_ns, struct nb_error *err);
int __wrap_nb_shm_rendezvous(struct nb_shm *shm, const char (*names)[NB_FDPASS_NAME], const struct nb_boot *boot,
                             int wake_fd, int64_t deadline_ns, struct nb_error *err);
int __wrap_nb_shm_rendezvous(struct nb_shm *shm, const char (*names)[NB_FDPASS_NAME], const struct nb_boot *boot,
                             int wake_fd, int64_t deadline_ns, struct nb_error *err) {
    int rc = __real_nb_shm_rendezvous(shm, names, boot, wake_fd, deadline_ns, err);
    int code = boot->rank == 1 ? atomic_load(&rendezvous_failure) : 0;
    return rc == 0 && code < 0 ? nb_fail(err, code, "test failure") : rc;
}

// If one rank cannot map the shared memory, all ranks use the network, and a notice on rank 0 gives the reason.
static void without_rendezvous(void) {
    static char why[] = "rank 1: test failure";
    struct test_rank template = two_ranks;
    template.shm = NB_SHM_AUTO;
    template.run = works_with_notice;
    template.arg = why;
    atomic_store(&rendezvous_failure, -EPERM);
    CHECK(test_job(&template) == 0, "a failed rendezvous");
    atomic_store(&rendezvous_failure, 0);
}

// An interrupted rank opens no job, over the network either.
static void with_interrupted_rendezvous(void) {
    struct test_rank template = two_ranks;
    struct test_rank ranks[TEST_RANKS_MAX];
    template.shm = NB_SHM_AUTO;
    template.run = fail_if_run;
    atomic_store(&rendezvous_failure, -EINTR);
    test_run(&template, ranks);
    atomic_store(&rendezvous_failure, 0);
    CHECK(ranks[1].rc == -EINTR, "%d %s", ranks[1].rc, ranks[1].err.text);
    CHECK(ranks[0].rc == NB_EPEER && ranks[0].err.peer == 1, "%d %s", ranks[0].rc, ranks[0].err.text);
}

// A writer that found too little room is woken by the first byte that is read, and not again.
static void pipe_wakes_writer_once(void) {
    static struct nb_shm_pipe pipe;
    static char data[NB_SHM_PIPE_BYTES];
    bool writer_waits = true;
    CHECK(nb_shm_pipe_write(&pipe, data, sizeof data) == sizeof data, "an empty pipe does not take NB_SHM_PIPE_BYTES");
    CHECK(nb_shm_pipe_read(&pipe, data, 1, &writer_waits) == 1 && !writer_waits, "a writer is reported as waiting");
    CHECK(nb_shm_pipe_write(&pipe, data, 2) == 1, "a pipe with room for one byte did not take one byte");
    CHECK(nb_shm_pipe_read(&pipe, data, 0, &writer_waits) == 0 && !writer_waits, "a writer is woken without new room");
    CHECK(nb_shm_pipe_read(&pipe, data, 1, &writer_waits) == 1 && writer_waits, "the waiting writer is not woken");
    CHECK(nb_shm_pipe_read(&pipe, data, 1, &writer_waits) == 1 && !writer_waits, "the writer is woken twice");
}

// In a process that may not call memfd_create.
static void without_memfd(enum nb_shm_mode mode, void (*run)(struct test_rank *me)) {
    pid_t child = fork();
    CHECK(child >= 0, "fork: %m");
    if (child == 0) {
        struct sock_filter code[] = {
            {.code = BPF_LD | BPF_W | BPF_ABS, .k = offsetof(struct seccomp_data, nr)},
            {.code = BPF_JMP | BPF_JEQ | BPF_K, .jf = 1, .k = SYS_memfd_create},
            {.code = BPF_RET | BPF_K, .k = SECCOMP_RET_ERRNO | EPERM},
            {.code = BPF_RET | BPF_K, .k = SECCOMP_RET_ALLOW},
        };
        struct sock_fprog program = {.len = sizeof code / sizeof code[0], .filter = code};
        CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0,
              "seccomp: %m");
        static char why[] = "Operation not permitted";
        struct test_rank template = two_ranks;
        template.shm = mode;
        template.run = run;
        template.arg = why;
        if (mode == NB_SHM_AUTO) {
            CHECK(test_job(&template) == 0, "two ranks");
        } else {
            test_job_fails(&template, -EOPNOTSUPP, why);
        }
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0, "without memfd: status %x", status);
}

// In a process with a file size limit of 64 MiB.
static void with_file_size_limit(void) {
    pid_t child = fork();
    CHECK(child >= 0, "fork: %m");
    if (child == 0) {
        const struct rlimit limit = {.rlim_cur = 64 << 20, .rlim_max = 64 << 20};
        struct test_rank template = two_ranks;
        CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0, "setrlimit: %m");
        template.run = arenas_over_the_limit_are_staged;
        CHECK(test_job(&template) == 0, "two ranks");
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0, "with a file size limit: status %x", status);
}

static void sharing_is_off(void) {
    static char disabled[] = "rank 1 disables it (NETBOTTLENECK_SHM=0)";
    static char hosts[] = "ranks 0 and 1 are on different hosts";
    static char nameless[] = "its host has no identifier";
    struct test_rank template = two_ranks;
    template.shm = NB_SHM_AUTO;
    template.run = works_without_notice;
    template.overrides = &(struct test_override){.rank = 1, .shm = NB_SHM_OFF, .host = "host a"};
    template.arg = disabled;
    CHECK(test_job(&template) == 0, "one rank disables sharing");
    template.overrides = &(struct test_override){.rank = 1, .shm = NB_SHM_AUTO, .host = "host b"};
    template.arg = hosts;
    CHECK(test_job(&template) == 0, "two hosts");
    template.overrides = NULL;
    template.host = NULL;
    template.run = works_with_notice;
    template.arg = nameless;
    CHECK(test_job(&template) == 0, "no host identifier");
    template = two_ranks;
    template.run = fail_if_run;
    template.overrides = &(struct test_override){.rank = 1, .shm = NB_SHM_AUTO, .host = "host b"};
    test_job_fails(&template, -EOPNOTSUPP, hosts);
}

// Rank 1 leaves before it submits the operation that rank 0 waits for.
static void rank_leaves(struct test_rank *me) {
    char *base = arena_share(me);
    struct nb_segment all = {.base = base, .bytes = 1 << 20};
    struct nb_error err = {0};
    if (me->rank == 1) {
        return;
    }
    int rc = test_try(me, test_op("late", NB_OP_ALLREDUCE, &all), &err);
    CHECK(rc == NB_EPEER && err.peer == 1, "%d, rank %d: %s", rc, err.peer, err.text);
}

static _Atomic(char *) detach_now; // arena that rank 0 detaches during its next direct reduction

void __real_nb_fold_direct(struct shared *l, struct nb_work *work, struct nb_range range);
void __wrap_nb_fold_direct(struct shared *l, struct nb_work *work, struct nb_range range);
void __wrap_nb_fold_direct(struct shared *l, struct nb_work *work, struct nb_range range) {
    char *memory = l->rank == 0 ? atomic_exchange(&detach_now, NULL) : NULL;
    CHECK(memory == NULL || nb_arena_detach(memory, ARENA_BYTES) == 0, "detach");
    __real_nb_fold_direct(l, work, range);
}

// Rank 0's process detaches an arena, between two operations and during one.
static void arena_detached(struct test_rank *me) {
    struct nb_op op = {.name = "sum", .kind = NB_OP_ALLREDUCE, .dtype = NB_F32};
    struct nb_error err = {0};
    char *first = arena_share(me);
    char *second = arena_share(me);
    check_operation(me, op, first, KINDS_COUNT, contiguous);
    uint64_t direct = job_info(me).shm_staged_bytes;
    test_barrier(me, "before");
    CHECK(me->rank != 0 || nb_arena_detach(first, ARENA_BYTES) == 0, "detach");
    check_operation(me, op, first, KINDS_COUNT, contiguous);
    CHECK(job_info(me).shm_staged_bytes > direct, "other ranks use a detached arena");
    struct nb_segment all = {.base = second, .bytes = 1 << 20};
    memset(second, 0, all.bytes);
    test_barrier(me, "filled");
    if (me->rank == 0) {
        atomic_store(&detach_now, second);
    }
    int rc = test_try(me, test_op("late", NB_OP_ALLREDUCE, &all), &err);
    CHECK(me->rank != 0 || (rc == -EBUSY && strstr(err.text, "withdrawn") != NULL), "rank 0: %d %s", rc, err.text);
    CHECK(rc == 0 || rc == -EBUSY, "rank %d: %d %s", me->rank, rc, err.text); // another rank's result may be complete
}

static _Atomic bool lose_next; // the next arena that arrives is lost, as where no descriptor is free

int __real_nb_fdpass_receive(int fd, void *message, size_t bytes, int *fds, int count);
int __wrap_nb_fdpass_receive(int fd, void *message, size_t bytes, int *fds, int count);
int __wrap_nb_fdpass_receive(int fd, void *message, size_t bytes, int *fds, int count) {
    int rc = __real_nb_fdpass_receive(fd, message, bytes, fds, count);
    if (rc == 0 && atomic_exchange(&lose_next, false)) {
        nb_fork_close(fds[0]);
        return NB_EWIRE;
    }
    return rc;
}

// An arena is lost on its way. Its operations are staged, and later arenas arrive.
static void arena_lost(struct test_rank *me) {
    struct nb_op op = {.name = "sum", .kind = NB_OP_ALLREDUCE, .dtype = NB_F32};
    test_barrier(me, "before");
    atomic_store(&lose_next, true);
    char *lost = arena_share(me);
    CHECK(!atomic_load(&lose_next), "no arena arrives");
    check_operation(me, op, lost, KINDS_COUNT, contiguous);
    uint64_t staged = job_info(me).shm_staged_bytes;
    CHECK(staged > 0, "a lost arena is used");
    check_operation(me, op, arena_share(me), KINDS_COUNT, contiguous);
    CHECK(job_info(me).shm_staged_bytes == staged, "no arena arrives after a lost one");
}

int main(void) {
    struct test_rank template = two_ranks;
    without_memfd(NB_SHM_AUTO, works_with_notice); // first, because a process with threads should not fork
    without_memfd(NB_SHM_REQUIRED, fail_if_run);
    with_file_size_limit();
    for (template.size = 2; template.size <= 5; template.size += template.size - 1) { // 2, 3, 5
        template.run = operations_in_all_memory;
        CHECK(test_job(&template) == 0, "%d ranks", template.size);
        printf("%d ranks\n", template.size);
    }
    template = two_ranks;
    template.run = undescribed_buffers_are_staged;
    CHECK(test_job(&template) == 0, "undescribed buffers");
    template.run = arena_detached;
    CHECK(test_job(&template) == 0, "a detached arena");
    template.run = arena_lost;
    CHECK(test_job(&template) == 0, "a lost arena");
    template.run = rank_leaves;
    CHECK(test_job(&template) == 0, "a rank that leaves");
    sharing_is_off();
    without_rendezvous();
    with_interrupted_rendezvous();
    pipe_wakes_writer_once();
    return 0;
}
