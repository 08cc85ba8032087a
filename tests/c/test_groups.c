// Communicators of a subset of ranks: every operation is exact, also concurrently with other communicators and in any
// order. Invalid communicators are refused. Ranks outside a communicator neither delay nor end its operations.
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "sums.h"

enum { BYTES = 8 << 20, CONCURRENT = 12, CONCURRENT_COUNT = 30001, LEAVER = 3 };

// Makes the core's locks error-checking: a thread may unlock only what it has locked.
int __real_pthread_mutex_init(pthread_mutex_t *lock, const pthread_mutexattr_t *how);
int __wrap_pthread_mutex_init(pthread_mutex_t *lock, const pthread_mutexattr_t *how);
int __real_pthread_mutex_unlock(pthread_mutex_t *lock);
int __wrap_pthread_mutex_unlock(pthread_mutex_t *lock);

int __wrap_pthread_mutex_init(pthread_mutex_t *lock, const pthread_mutexattr_t *how) {
    pthread_mutexattr_t checked;
    CHECK(how == NULL && pthread_mutexattr_init(&checked) == 0, "the lock has attributes already");
    CHECK(pthread_mutexattr_settype(&checked, PTHREAD_MUTEX_ERRORCHECK) == 0, "set error checking");
    int rc = __real_pthread_mutex_init(lock, &checked);
    (void)pthread_mutexattr_destroy(&checked);
    return rc;
}

int __wrap_pthread_mutex_unlock(pthread_mutex_t *lock) {
    int rc = __real_pthread_mutex_unlock(lock);
    CHECK(rc == 0, "unlock by a thread that does not hold the lock, from %p: %d", __builtin_return_address(0), rc);
    return rc;
}

struct group {
    uint32_t id;
    int count;
    int ranks[TEST_RANKS_MAX];
};

static const struct group groups[] = {
    {.id = 7, .count = 2, .ranks = {0, 2}},       {.id = 8, .count = 2, .ranks = {1, 3}},
    {.id = 3, .count = 3, .ranks = {1, 2, 3}},    {.id = 9, .count = 1, .ranks = {2}},
    {.id = 1, .count = 4, .ranks = {0, 1, 2, 3}}, {.id = 70000, .count = 3, .ranks = {0, 1, 2}},
};
enum { GROUPS = sizeof groups / sizeof groups[0] };

static int rank_in(const struct group *group, int rank) {
    for (int i = 0; i < group->count; i++) {
        if (group->ranks[i] == rank) {
            return i;
        }
    }
    return -1;
}

// Initialises `member` for this rank in a group. False: this rank is not a member.
static bool as_member(struct test_rank *me, const struct group *group, struct test_rank *member) {
    struct nb_error err = {0};
    int position = rank_in(group, me->rank);
    if (position < 0) {
        return false;
    }
    *member = *me;
    member->comm = nb_comm_find(me->job, group->id);
    if (member->comm == NULL) {
        CHECK(nb_comm_make(me->job, group->id, group->ranks, group->count, &err) == 0, "rank %d: %s", me->rank,
              err.text);
        member->comm = nb_comm_find(me->job, group->id);
    }
    member->rank = nb_comm_rank(member->comm);
    member->size = nb_comm_size(member->comm);
    CHECK(member->rank == position && member->size == group->count, "rank %d is %d of %d in comm %u", me->rank,
          member->rank, member->size, group->id);
    return true;
}

static char *allocate(size_t bytes) {
    char *base = malloc(bytes);
    CHECK(base != NULL, "memory");
    return base;
}

// Runs the groups in sequence; ranks outside a group skip it.
static void groups_in_sequence(struct test_rank *me) {
    char *base = allocate(ARENA_BYTES);
    for (int round = 0; round < 2; round++) {
        for (int g = 0; g < GROUPS; g++) {
            struct test_rank member;
            if (as_member(me, &groups[(g + me->rank) % GROUPS], &member)) {
                continue; // each rank makes them in a different order
            }
        }
        for (int g = 0; g < GROUPS; g++) {
            struct test_rank member;
            if (as_member(me, &groups[g], &member)) {
                check_all_kinds(&member, base, "kinds");
                check_all_sizes(&member, base, "sizes");
                check_scale_factors(&member, (float *)(void *)base, "scaled");
            }
        }
        check_all_kinds(me, base, "all");
    }
    free(base);
}

// Concurrent operations with the same names in all groups and in the job. Each rank submits them in a different order.
static void concurrent_operations(struct test_rank *me) {
    float *memory = (float *)(void *)allocate((size_t)CONCURRENT * (GROUPS + 1) * CONCURRENT_COUNT * sizeof(float));
    struct nb_work *works[CONCURRENT][GROUPS + 1] = {0};
    struct nb_segment segments[CONCURRENT][GROUPS + 1];
    struct test_rank members[GROUPS + 1];
    for (int i = 0; i < CONCURRENT * (GROUPS + 1); i++) {
        int at = (i * 5 + me->rank * 11) % (CONCURRENT * (GROUPS + 1));
        int k = at / (GROUPS + 1);
        int g = at % (GROUPS + 1);
        members[g] = *me;
        if (g < GROUPS && !as_member(me, &groups[g], &members[g])) {
            continue;
        }
        float *data = memory + (size_t)at * CONCURRENT_COUNT;
        size_t count = k % 3 == 0 ? 5 : CONCURRENT_COUNT;
        char name[32];
        snprintf(name, sizeof name, "concurrent.%d", k);
        segments[k][g] = (struct nb_segment){.base = data, .bytes = count * sizeof *data};
        struct pattern p = pattern_of_input(NB_F32, members[g].rank);
        pattern_write(&p, &segments[k][g], 0, count);
        struct nb_op op = test_op(name, NB_OP_ALLREDUCE, &segments[k][g]);
        op.priority = k % 4;
        works[k][g] = test_submit(&members[g], op);
    }
    for (int k = 0; k < CONCURRENT; k++) {
        for (int g = 0; g <= GROUPS; g++) {
            if (works[k][g] == NULL) {
                continue;
            }
            test_done(&members[g], works[k][g]);
            const float *data = segments[k][g].base;
            size_t count = segments[k][g].bytes / sizeof *data;
            struct pattern p = pattern_of_result(NB_F32, NB_SUM, members[g].size);
            size_t at = pattern_compare(&p, &segments[k][g], 0, count);
            CHECK(at == count, "rank %d, comm %d, operation %d: [%zu] is %g", me->rank, g, k, at, (double)data[at]);
        }
    }
    free(memory);
}

static void repeated_concurrent_operations(struct test_rank *me) {
    for (int round = 0; round < 3; round++) { // later rounds use cached numbers instead of names
        concurrent_operations(me);
    }
}

static void invalid_communicators(struct test_rank *me) {
    struct nb_error err = {0};
    const int descending[] = {2, 1};
    const int twice[] = {me->rank, me->rank};
    const int beyond[] = {me->rank, me->size};
    const int without[] = {(me->rank + 1) % me->size};
    const int mine[] = {me->rank};
    CHECK(nb_comm_make(me->job, 5, descending, 2, &err) == -EINVAL, "descending ranks are accepted");
    err = (struct nb_error){0};
    CHECK(nb_comm_make(me->job, 5, twice, 2, &err) == -EINVAL, "a repeated rank is accepted");
    err = (struct nb_error){0};
    CHECK(nb_comm_make(me->job, 5, beyond, 2, &err) == -EINVAL, "an unknown rank is accepted");
    CHECK(strstr(err.text, "rank 4 of communicator 5") != NULL, "%s", err.text);
    CHECK(nb_comm_make(me->job, 5, without, 1, &err) == -EINVAL, "a communicator without this rank is accepted");
    CHECK(nb_comm_make(me->job, 0, mine, 1, &err) == -EINVAL, "number 0 is accepted");
    CHECK(nb_comm_make(me->job, 5, mine, 0, &err) == -EINVAL, "an empty communicator is accepted");
    CHECK(nb_comm_find(me->job, 5) == NULL && nb_comm_find(me->job, 0) == nb_job_world(me->job),
          "nb_comm_find returns a wrong communicator");
    CHECK(nb_comm_make(me->job, 50 + (uint32_t)me->rank, mine, 1, &err) == 0, "%s", err.text);
    CHECK(nb_comm_make(me->job, 50 + (uint32_t)me->rank, mine, 1, &err) == -EEXIST, "a number is accepted twice");
    // A root is a rank in the communicator.
    struct test_rank member;
    struct nb_work *work;
    if (as_member(me, &groups[2], &member)) {
        struct nb_op op = test_op("root", NB_OP_BROADCAST, NULL);
        op.root = 3;
        CHECK(nb_submit(member.comm, &op, &work, &err) == -EINVAL, "root 3 of 3 ranks is accepted");
    }
    // A mismatch between ranks of a communicator fails only that operation.
    if (as_member(me, &groups[2], &member)) {
        float data[4] = {0};
        struct nb_segment all = {.base = data, .bytes = me->rank == 3 ? 8 : 16};
        err = (struct nb_error){0};
        int rc = test_try(&member, test_op("mismatch", NB_OP_ALLREDUCE, &all), &err);
        CHECK(rc == NB_EMISMATCH && strstr(err.text, "mismatched sizes of 'mismatch'") != NULL, "%d %s", rc, err.text);
        all.bytes = sizeof data;
        struct nb_op op = test_op("shaped", NB_OP_ALLREDUCE, &all);
        op.shape = me->rank == 3 ? 31 : 13;
        rc = test_try(&member, op, &err);
        CHECK(rc == NB_EMISMATCH && strstr(err.text, "mismatched shapes of 'shaped'") != NULL, "%d %s", rc, err.text);
    }
    test_barrier(me, "after");
}

// The ranks define communicator 6 differently: the job fails, and the error names it.
static void different_definitions(struct test_rank *me) {
    const int mine[2][3] = {{0, 1, 2}, {0, 1, 3}};
    struct nb_error err = {0};
    int which = me->rank == 3;
    if (me->rank == 2) {
        CHECK(test_try(me, test_op("all", NB_OP_BARRIER, NULL), &err) == NB_EMISMATCH, "%s", err.text);
        return;
    }
    CHECK(nb_comm_make(me->job, 6, mine[which], 3, &err) == 0, "%s", err.text);
    struct test_rank member = *me;
    member.comm = nb_comm_find(me->job, 6);
    int rc = test_try(&member, test_op("mismatch", NB_OP_BARRIER, NULL), &err);
    CHECK(rc == NB_EMISMATCH && strstr(err.text, "communicator 6 has different ranks on rank") != NULL, "%d %s", rc,
          err.text);
}

// A rank leaves while a communicator without it continues. Then an operation that needs the rank fails and names it.
static void rank_outside_leaves(struct test_rank *me) {
    struct test_rank member;
    struct nb_error err = {0};
    char *base = allocate(BYTES);
    if (me->rank == LEAVER) {
        free(base);
        return;
    }
    CHECK(as_member(me, &groups[GROUPS - 1], &member), "rank %d", me->rank);
    for (int round = 0; round < 20; round++) {
        struct nb_op op = {.name = "on", .kind = NB_OP_ALLREDUCE, .dtype = NB_F32};
        check_operation(&member, op, base, BYTES / sizeof(float) / 8, contiguous);
    }
    test_barrier(&member, "done"); // so that rank 0 completes it before it reports the failure
    int rc = test_try(me, test_op("all", NB_OP_BARRIER, NULL), &err);
    CHECK(rc == NB_EPEER && err.peer == LEAVER, "rank %d: %d, rank %d: %s", me->rank, rc, err.peer, err.text);
    free(base);
}

// A rank that is late for an operation in one communicator does not delay other communicators.
static void late_rank_delays_no_other(struct test_rank *me) {
    struct test_rank member;
    struct nb_work *late = NULL;
    if (me->rank != LEAVER && as_member(me, &groups[2], &member)) {
        late = test_submit(&member, test_op("late", NB_OP_BARRIER, NULL));
    }
    if (as_member(me, &groups[0], &member)) {
        test_barrier(&member, "meanwhile");
    }
    test_barrier(me, "all");
    int code;
    CHECK(late == NULL || !nb_work_test(late, &code), "the barrier finished without rank %d", LEAVER);
    test_barrier(me, "seen");
    if (me->rank == LEAVER && as_member(me, &groups[2], &member)) {
        test_barrier(&member, "late");
    }
    if (late != NULL) {
        test_done(me, late);
    }
    test_barrier(me, "finished"); // after rank 0 leaves, no operation can start
}

static int run(struct test_rank template, void (*what)(struct test_rank *me)) {
    template.size = 4;
    template.run = what;
    return test_job(&template);
}

static void barrier_of_two(struct test_rank *me) {
    struct test_rank member;
    test_barrier(me, "all");
    if (as_member(me, &groups[0], &member)) {
        test_barrier(&member, "two");
    }
    test_barrier(me, "done");
}

// An operation is recorded with the number of ranks of its communicator; 0 stands for all.
static void test_recorded_ranks(struct test_rank template) {
    char file[] = "/tmp/netbottleneck-groups-XXXXXX";
    int fd = mkstemp(file);
    CHECK(fd >= 0, "temporary file: %m");
    close(fd);
    struct nb_ring ring;
    struct nb_error err = {0};
    CHECK(nb_ring_open(&ring, file, 1024, 0, &err) == 0, "open ring: %s", err.text);
    template.ring = &ring;
    CHECK(run(template, barrier_of_two) == 0, "barrier of two");
    int of_all = 0, of_two = 0;
    for (uint64_t i = 0; i < atomic_load(&ring.header->taken); i++) {
        const struct nb_event *event = &ring.events[i];
        if (event->kind == NB_EV_OP_SUBMIT && (uint32_t)event->d == 0) {
            CHECK(event->d >> 32 == 0, "an operation of all ranks has %u", (unsigned)(event->d >> 32));
            of_all++;
        } else if (event->kind == NB_EV_OP_SUBMIT) {
            CHECK((uint32_t)event->d == groups[0].id && event->d >> 32 == 2, "comm %u has %u ranks", (unsigned)event->d,
                  (unsigned)(event->d >> 32));
            of_two++;
        }
    }
    CHECK(of_all >= 2 && of_two == 1, "%d operations of all ranks, %d of two", of_all, of_two);
    nb_ring_close(&ring);
    unlink(file);
}

// Without rank 0, the coordinator, no operation starts in any communicator.
static void rank_0_leaves(struct test_rank *me) {
    struct test_rank member;
    struct nb_error err = {0};
    test_barrier(me, "all");
    if (!as_member(me, &groups[1], &member)) {
        return;
    }
    int rc = 0;
    while (rc == 0) { // until rank 0 has left
        rc = test_try(&member, test_op("on", NB_OP_BARRIER, NULL), &err);
    }
    CHECK(rc == NB_EPEER && err.peer == 0, "rank %d: %d, rank %d: %s", me->rank, rc, err.peer, err.text);
}

int main(int argc, char **argv) {
    static const enum nb_algorithm_id pins[] = {NB_ALGORITHM_NONE, NB_ALGORITHM_RING, NB_ALGORITHM_DOUBLING,
                                                NB_ALGORITHM_HALVING, NB_ALGORITHM_INLINE};
    struct test_rank template = test_on(argc > 1 ? argv[1] : "tcp");
    for (size_t i = 0; i < sizeof pins / sizeof pins[0]; i++) {
        template.algorithm = pins[i];
        int rc = run(template, groups_in_sequence);
        if (rc != 0) {
            return rc;
        }
    }
    template.algorithm = NB_ALGORITHM_NONE;
    CHECK(run(template, repeated_concurrent_operations) == 0, "concurrent operations");
    CHECK(run(template, invalid_communicators) == 0, "invalid communicators");
    CHECK(run(template, rank_outside_leaves) == 0, "rank leaves");
    CHECK(run(template, late_rank_delays_no_other) == 0, "late rank");
    CHECK(run(template, rank_0_leaves) == 0, "rank 0 leaves");
    CHECK(run(template, different_definitions) == 0, "different ranks");
    test_recorded_ranks(template);
    return 0;
}
