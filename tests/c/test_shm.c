// Ranks of one host with shared memory: every kind of operation, in arenas and elsewhere, contiguous and scattered.
// Also failures to share memory, and a rank that leaves.
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
#include "base/fdpass.h"
#include "engine/shared_fold.h"
#include "sums.h"
#include "transport/shm.h"
#include "transport/shm_pipe.h"

enum { MANY = 40, MANY_COUNT = 3001 };

// More at once than there are slots, some in arenas and some not, submitted in another order by each rank.
static void many(struct test_rank *me, char *base, const char *elsewhere) {
    struct nb_work *works[MANY];
    struct nb_segment all[MANY];
    for (int round = 0; round < 3; round++) {
        for (int k = 0; k < MANY; k++) {
            int which = (k * 7 + me->rank * 11 + round) % MANY;
            char name[32];
            snprintf(name, sizeof name, "many.%d", which);
            char *memory = which % 3 == 0 ? (char *)(uintptr_t)elsewhere : base;
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

static void all_of_it(struct test_rank *me) {
    char *base = arena_share(me);
    char *elsewhere = malloc(ARENA_BYTES);
    CHECK(elsewhere != NULL, "memory");
    check_all_kinds(me, base, "arena");
    check_all_sizes(me, base, "arena");
    check_scale_factors(me, (float *)(void *)base, "arena");
    struct nb_job_info info = job_info(me);
    CHECK(info.shm_bytes > 0 && info.shm_staged_bytes == 0, "%llu of %llu bytes were staged",
          (unsigned long long)info.shm_staged_bytes, (unsigned long long)info.shm_bytes);
    check_all_kinds(me, elsewhere, "elsewhere");
    check_all_sizes(me, elsewhere, "elsewhere");
    check_scale_factors(me, (float *)(void *)elsewhere, "elsewhere");
    CHECK(job_info(me).shm_staged_bytes == job_info(me).shm_bytes - info.shm_bytes, "nothing else was staged");
    check_all_sizes(me, me->rank == 0 ? base : elsewhere, "of one rank"); // staged where one rank's memory has to be
    many(me, base, elsewhere);
    info = job_info(me);
    CHECK(strcmp(info.shm, "on") == 0 && info.bytes_out + info.bytes_in == 0, "%llu bytes took the network",
          (unsigned long long)(info.bytes_out + info.bytes_in));
    free(elsewhere);
}

// A line in more pieces than a description holds, and memory that its owner could still take away.
static void not_described(struct test_rank *me) {
    char *base = arena_share(me);
    const struct layout cut = {.pieces = 300, .gap = 4};
    struct nb_op op = {.name = "cut", .kind = NB_OP_ALLREDUCE, .dtype = NB_F32};
    check_operation(me, op, base, KINDS_COUNT, cut);
    uint64_t cut_bytes = job_info(me).shm_staged_bytes;
    CHECK(cut_bytes > 0, "a line in 300 pieces is staged");
    struct nb_error err = {0};
    struct nb_arena loose = {.bytes = 1 << 20, .fd = memfd_create("loose", MFD_CLOEXEC)};
    CHECK(loose.fd >= 0 && ftruncate(loose.fd, (off_t)loose.bytes) == 0, "memory: %m");
    loose.base = mmap(NULL, loose.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, loose.fd, 0);
    CHECK(loose.base != MAP_FAILED && nb_job_map_arena(me->job, &loose, &err) == 0, "map: %s", err.text);
    test_barrier(me, "mapped");
    test_barrier(me, "known");
    check_operation(me, op, loose.base, KINDS_COUNT, contiguous);
    CHECK(job_info(me).shm_staged_bytes > cut_bytes, "memory that may shrink is not mapped by others");
    nb_arena_close(&loose);
}

// What does not fit a limit, as a container may have one, is copied on its way, and this is logged once.
static void limited(struct test_rank *me) {
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
    CHECK(job_info(me).shm_staged_bytes > 0, "rank %d: others use memory that they cannot map", me->rank);
    CHECK(nb_job_notice(me->job, text, sizeof text) && strstr(text, "File too large (ulimit -f is lower)") != NULL,
          "rank %d reports: %s", me->rank, text);
    CHECK(!nb_job_notice(me->job, text, sizeof text), "rank %d reports again: %s", me->rank, text);
    test_barrier(me, "over");
    nb_job_close(me->job);
    me->job = NULL;
    nb_arena_close(&large[0]);
    nb_arena_close(&large[1]);
}

static void works(struct test_rank *me) {
    static char data[TEST_RANKS_MAX][KINDS_COUNT];
    check_operation(me, (struct nb_op){.name = "sum", .kind = NB_OP_ALLREDUCE, .dtype = NB_U8}, data[me->rank],
                    KINDS_COUNT, contiguous);
    CHECK(strncmp(job_info(me).shm, "off: ", 5) == 0 && strstr(job_info(me).shm, me->arg) != NULL, "shm is %s, not %s",
          job_info(me).shm, (char *)me->arg);
    CHECK(job_info(me).bytes_out > 0 && job_info(me).shm_bytes == 0, "the network was used");
}

static void works_quietly(struct test_rank *me) {
    char text[NB_ERROR_TEXT];
    works(me);
    CHECK(!nb_job_notice(me->job, text, sizeof text), "an unneeded notice: %s", text);
}

static void works_loudly(struct test_rank *me) {
    char text[NB_ERROR_TEXT] = "";
    works(me);
    bool noticed = nb_job_notice(me->job, text, sizeof text);
    CHECK(noticed == (me->rank == 0), "rank %d reports: %s", me->rank, text);
    CHECK(!noticed || strstr(text, me->arg) != NULL, "the reason is not in: %s", text);
}

static void must_not_run(struct test_rank *me) {
    CHECK(false, "rank %d runs without shared memory, which was required", me->rank);
}

static const struct test_rank two = {
    .size = 2, .transport = "tcp", .streams = 1, .timeout_ms = 20000, .shm = NB_SHM_REQUIRED, .host = "here"};

// While this is set, rank 1 fails to meet the others.
static _Atomic bool meeting_fails;

int __real_nb_shm_rendezvous(struct nb_shm *shm, const char (*names)[NB_FDPASS_NAME], const struct nb_boot *boot,
                             int wake_fd, int64_t deadline_ns, struct nb_error *err);
int __wrap_nb_shm_rendezvous(struct nb_shm *shm, const char (*names)[NB_FDPASS_NAME], const struct nb_boot *boot,
                             int wake_fd, int64_t deadline_ns, struct nb_error *err);
int __wrap_nb_shm_rendezvous(struct nb_shm *shm, const char (*names)[NB_FDPASS_NAME], const struct nb_boot *boot,
                             int wake_fd, int64_t deadline_ns, struct nb_error *err) {
    int rc = __real_nb_shm_rendezvous(shm, names, boot, wake_fd, deadline_ns, err);
    return rc == 0 && boot->rank == 1 && atomic_load(&meeting_fails) ? nb_fail(err, -EPERM, "a wall") : rc;
}

// If one rank cannot map the shared memory, all ranks use the network, and rank 0 says why.
static void without_meeting(void) {
    static char why[] = "rank 1: a wall";
    struct test_rank template = two;
    template.shm = NB_SHM_AUTO;
    template.run = works_loudly;
    template.arg = why;
    atomic_store(&meeting_fails, true);
    CHECK(test_job(&template) == 0, "ranks that do not meet");
    atomic_store(&meeting_fails, false);
}

// The first byte that is read wakes a writer that found too little room. Later bytes wake nobody.
static void pipe_wakes_writer(void) {
    static struct nb_shm_pipe pipe;
    static char data[NB_SHM_PIPE_BYTES];
    bool writer_waits = true;
    CHECK(nb_shm_pipe_write(&pipe, data, sizeof data) == sizeof data, "it is as large as that");
    CHECK(nb_shm_pipe_read(&pipe, data, 1, &writer_waits) == 1 && !writer_waits, "nobody waits");
    CHECK(nb_shm_pipe_write(&pipe, data, 2) == 1, "there is room for one");
    CHECK(nb_shm_pipe_read(&pipe, data, 0, &writer_waits) == 0 && !writer_waits, "there is no more room than before");
    CHECK(nb_shm_pipe_read(&pipe, data, 1, &writer_waits) == 1 && writer_waits, "the writer waits for room");
    CHECK(nb_shm_pipe_read(&pipe, data, 1, &writer_waits) == 1 && !writer_waits, "it was woken before");
}

// In a process of its own, which may not make memory that can be passed on.
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
        struct test_rank template = two;
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

// In a process of its own, whose files may not be longer than 64 MB.
static void with_a_limit(void) {
    pid_t child = fork();
    CHECK(child >= 0, "fork: %m");
    if (child == 0) {
        const struct rlimit limit = {.rlim_cur = 64 << 20, .rlim_max = 64 << 20};
        struct test_rank template = two;
        CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0, "setrlimit: %m");
        template.run = limited;
        CHECK(test_job(&template) == 0, "two ranks");
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0, "with a limit: status %x", status);
}

static void where_it_is_off(void) {
    static char noticed[] = "rank 1 disables it (NETBOTTLENECK_SHM=0)";
    static char hosts[] = "ranks 0 and 1 are on different hosts";
    static char nameless[] = "its host has no identifier";
    struct test_rank template = two;
    template.shm = NB_SHM_AUTO;
    template.run = works_quietly;
    template.overrides = &(struct test_override){.rank = 1, .shm = NB_SHM_OFF, .host = "here"};
    template.arg = noticed;
    CHECK(test_job(&template) == 0, "one rank does not share");
    template.overrides = &(struct test_override){.rank = 1, .shm = NB_SHM_AUTO, .host = "there"};
    template.arg = hosts;
    CHECK(test_job(&template) == 0, "two hosts");
    template.overrides = NULL;
    template.host = NULL;
    template.run = works_loudly;
    template.arg = nameless;
    CHECK(test_job(&template) == 0, "no host");
    template = two;
    template.run = must_not_run;
    template.overrides = &(struct test_override){.rank = 1, .shm = NB_SHM_AUTO, .host = "there"};
    test_job_fails(&template, -EOPNOTSUPP, hosts);
}

// Rank 1 goes, in good order, before it has submitted what rank 0 waits for.
static void leaves(struct test_rank *me) {
    char *base = arena_share(me);
    struct nb_segment all = {.base = base, .bytes = 1 << 20};
    struct nb_error err = {0};
    if (me->rank == 1) {
        return;
    }
    int rc = test_try(me, test_op("late", NB_OP_ALLREDUCE, &all), &err);
    CHECK(rc == NB_EPEER && err.peer == 1, "%d, rank %d: %s", rc, err.peer, err.text);
}

static _Atomic(char *) detach_in; // an operation of rank 0, which has described this

void __real_nb_fold_direct(struct shared *l, struct nb_work *work, struct nb_range range);
void __wrap_nb_fold_direct(struct shared *l, struct nb_work *work, struct nb_range range);
void __wrap_nb_fold_direct(struct shared *l, struct nb_work *work, struct nb_range range) {
    char *memory = l->rank == 0 ? atomic_exchange(&detach_in, NULL) : NULL;
    CHECK(memory == NULL || nb_arena_detach(memory, ARENA_BYTES) == 0, "detach");
    __real_nb_fold_direct(l, work, range);
}

// Another communicator of rank 0's process takes an arena back, between two operations and in the middle of one.
static void taken_back(struct test_rank *me) {
    struct nb_op op = {.name = "sum", .kind = NB_OP_ALLREDUCE, .dtype = NB_F32};
    struct nb_error err = {0};
    char *first = arena_share(me);
    char *second = arena_share(me);
    check_operation(me, op, first, KINDS_COUNT, contiguous);
    uint64_t direct = job_info(me).shm_staged_bytes;
    test_barrier(me, "before");
    CHECK(me->rank != 0 || nb_arena_detach(first, ARENA_BYTES) == 0, "detach");
    check_operation(me, op, first, KINDS_COUNT, contiguous);
    CHECK(job_info(me).shm_staged_bytes > direct, "others use memory that was taken from them");
    struct nb_segment all = {.base = second, .bytes = 1 << 20};
    memset(second, 0, all.bytes);
    test_barrier(me, "filled");
    if (me->rank == 0) {
        atomic_store(&detach_in, second);
    }
    int rc = test_try(me, test_op("late", NB_OP_ALLREDUCE, &all), &err);
    CHECK(me->rank != 0 || (rc == -EBUSY && strstr(err.text, "withdrawn") != NULL), "rank 0: %d %s", rc, err.text);
    CHECK(rc == 0 || rc == -EBUSY, "rank %d: %d %s", me->rank, rc, err.text); // its own line is whole
}

int main(void) {
    struct test_rank template = two;
    without_memfd(NB_SHM_AUTO, works_loudly); // first: a process with threads should not fork
    without_memfd(NB_SHM_REQUIRED, must_not_run);
    with_a_limit();
    for (template.size = 2; template.size <= 5; template.size += template.size - 1) { // 2, 3, 5
        template.run = all_of_it;
        CHECK(test_job(&template) == 0, "%d ranks", template.size);
        printf("%d ranks\n", template.size);
    }
    template = two;
    template.run = not_described;
    CHECK(test_job(&template) == 0, "what is not described");
    template.run = taken_back;
    CHECK(test_job(&template) == 0, "an arena that is taken back");
    template.run = leaves;
    CHECK(test_job(&template) == 0, "a rank that leaves");
    where_it_is_off();
    without_meeting();
    pipe_wakes_writer();
    return 0;
}
