// Communicators of a subset of ranks: every operation is exact in them, concurrently with other communicators, in
// any order. Invalid ones are refused; ranks outside a communicator neither delay nor end it.
#include <errno.h>
#include <stdint.h>
#include <string.h>

#include "sums.h"

enum { BYTES = 8 << 20, BESIDE = 12, BESIDE_COUNT = 30001, LEAVER = 3 };

// The core's locks check their owner: a thread may only unlock what it has locked.
int __real_pthread_mutex_init(pthread_mutex_t *lock, const pthread_mutexattr_t *how);
int __wrap_pthread_mutex_init(pthread_mutex_t *lock, const pthread_mutexattr_t *how);
int __real_pthread_mutex_unlock(pthread_mutex_t *lock);
int __wrap_pthread_mutex_unlock(pthread_mutex_t *lock);

int __wrap_pthread_mutex_init(pthread_mutex_t *lock, const pthread_mutexattr_t *how) {
    pthread_mutexattr_t checked;
    CHECK(how == NULL && pthread_mutexattr_init(&checked) == 0, "a lock with default attributes");
    CHECK(pthread_mutexattr_settype(&checked, PTHREAD_MUTEX_ERRORCHECK) == 0, "an error-checking lock");
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

static int place_in(const struct group *group, int rank) {
    for (int i = 0; i < group->count; i++) {
        if (group->ranks[i] == rank) {
            return i;
        }
    }
    return -1;
}

// This rank as one of a group. False: it is none.
static bool as_member(struct test_rank *me, const struct group *group, struct test_rank *member) {
    struct nb_error err = {0};
    int place = place_in(group, me->rank);
    if (place < 0) {
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
    CHECK(member->rank == place && member->size == group->count, "rank %d is %d of %d in comm %u", me->rank,
          member->rank, member->size, group->id);
    return true;
}

static char *memory_of(size_t bytes) {
    char *base = malloc(bytes);
    CHECK(base != NULL, "memory");
    return base;
}

// One group after the other; ranks that are in none of it go on to the next.
static void one_by_one(struct test_rank *me) {
    char *base = memory_of(ARENA_BYTES);
    for (int round = 0; round < 2; round++) {
        for (int g = 0; g < GROUPS; g++) {
            struct test_rank member;
            if (as_member(me, &groups[(g + me->rank) % GROUPS], &member)) {
                continue; // made in another order on each rank
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

// The same names under way in all groups and in the whole job at once, submitted in another order by each rank.
static void side_by_side(struct test_rank *me) {
    float *memory = (float *)(void *)memory_of((size_t)BESIDE * (GROUPS + 1) * BESIDE_COUNT * sizeof(float));
    struct nb_work *works[BESIDE][GROUPS + 1] = {0};
    struct nb_segment lines[BESIDE][GROUPS + 1];
    struct test_rank members[GROUPS + 1];
    for (int i = 0; i < BESIDE * (GROUPS + 1); i++) {
        int at = (i * 5 + me->rank * 11) % (BESIDE * (GROUPS + 1));
        int k = at / (GROUPS + 1);
        int g = at % (GROUPS + 1);
        members[g] = *me;
        if (g < GROUPS && !as_member(me, &groups[g], &members[g])) {
            continue;
        }
        float *line = memory + (size_t)at * BESIDE_COUNT;
        size_t count = k % 3 == 0 ? 5 : BESIDE_COUNT;
        char name[32];
        snprintf(name, sizeof name, "beside.%d", k);
        for (size_t n = 0; n < count; n++) {
            line[n] = input_value(members[g].rank, n);
        }
        lines[k][g] = (struct nb_segment){.base = line, .bytes = count * sizeof *line};
        struct nb_op op = test_op(name, NB_OP_ALLREDUCE, &lines[k][g]);
        op.priority = k % 4;
        works[k][g] = test_submit(&members[g], op);
    }
    for (int k = 0; k < BESIDE; k++) {
        for (int g = 0; g <= GROUPS; g++) {
            if (works[k][g] == NULL) {
                continue;
            }
            test_done(&members[g], works[k][g]);
            const float *line = lines[k][g].base;
            for (size_t n = 0; n < lines[k][g].bytes / sizeof *line; n++) {
                double want = reduce_inputs(NB_SUM, members[g].size, n);
                CHECK((double)line[n] == want, "rank %d, comm %d, beside %d: [%zu] is %g, not %g", me->rank, g, k, n,
                      (double)line[n], want);
            }
        }
    }
    free(memory);
}

static void all_at_once(struct test_rank *me) {
    for (int round = 0; round < 3; round++) { // by name, then by number
        side_by_side(me);
    }
}

static void refused(struct test_rank *me) {
    struct nb_error err = {0};
    const int falling[] = {2, 1};
    const int twice[] = {me->rank, me->rank};
    const int beyond[] = {me->rank, me->size};
    const int without[] = {(me->rank + 1) % me->size};
    const int mine[] = {me->rank};
    CHECK(nb_comm_make(me->job, 5, falling, 2, &err) == -EINVAL, "ranks that fall");
    err = (struct nb_error){0};
    CHECK(nb_comm_make(me->job, 5, twice, 2, &err) == -EINVAL, "a rank twice");
    err = (struct nb_error){0};
    CHECK(nb_comm_make(me->job, 5, beyond, 2, &err) == -EINVAL, "a rank that is not there");
    CHECK(strstr(err.text, "rank 4 of communicator 5") != NULL, "%s", err.text);
    CHECK(nb_comm_make(me->job, 5, without, 1, &err) == -EINVAL, "without this rank");
    CHECK(nb_comm_make(me->job, 0, mine, 1, &err) == -EINVAL, "number 0 is that of all ranks");
    CHECK(nb_comm_make(me->job, 5, mine, 0, &err) == -EINVAL, "nobody");
    CHECK(nb_comm_find(me->job, 5) == NULL && nb_comm_find(me->job, 0) == nb_job_world(me->job), "what there is");
    CHECK(nb_comm_make(me->job, 50 + (uint32_t)me->rank, mine, 1, &err) == 0, "%s", err.text);
    CHECK(nb_comm_make(me->job, 50 + (uint32_t)me->rank, mine, 1, &err) == -EEXIST, "a number twice");
    // A root counts in the comm.
    struct test_rank member;
    struct nb_work *work;
    if (as_member(me, &groups[2], &member)) {
        struct nb_op op = test_op("root", NB_OP_BROADCAST, NULL);
        op.root = 3;
        CHECK(nb_submit(member.comm, &op, &work, &err) == -EINVAL, "rank 3 of 3");
    }
    // What ranks of a comm submit unlike is refused there, and nowhere else.
    if (as_member(me, &groups[2], &member)) {
        float line[4] = {0};
        struct nb_segment all = {.base = line, .bytes = me->rank == 3 ? 8 : 16};
        err = (struct nb_error){0};
        int rc = test_try(&member, test_op("unlike", NB_OP_ALLREDUCE, &all), &err);
        CHECK(rc == NB_EMISMATCH && strstr(err.text, "mismatched sizes of 'unlike'") != NULL, "%d %s", rc, err.text);
        all.bytes = sizeof line;
        struct nb_op op = test_op("shaped", NB_OP_ALLREDUCE, &all);
        op.shape = me->rank == 3 ? 31 : 13;
        rc = test_try(&member, op, &err);
        CHECK(rc == NB_EMISMATCH && strstr(err.text, "mismatched shapes of 'shaped'") != NULL, "%d %s", rc, err.text);
    }
    test_barrier(me, "all is well");
}

// Ranks take comm 6 to have other ranks: the job fails, and says so.
static void differ(struct test_rank *me) {
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
    int rc = test_try(&member, test_op("unlike", NB_OP_BARRIER, NULL), &err);
    CHECK(rc == NB_EMISMATCH && strstr(err.text, "communicator 6 has different ranks on rank") != NULL, "%d %s", rc,
          err.text);
}

// A rank leaves while a comm that has it not works on; then what needs it fails, and names it.
static void leaves(struct test_rank *me) {
    struct test_rank member;
    struct nb_error err = {0};
    char *base = memory_of(BYTES);
    if (me->rank == LEAVER) {
        free(base);
        return;
    }
    CHECK(as_member(me, &groups[GROUPS - 1], &member), "rank %d", me->rank);
    for (int round = 0; round < 20; round++) {
        struct nb_op op = {.name = "on", .kind = NB_OP_ALLREDUCE, .dtype = NB_F32};
        check_operation(&member, op, base, BYTES / sizeof(float) / 8, contiguous);
    }
    test_barrier(&member, "done"); // rank 0's word of it comes before its word of what follows
    int rc = test_try(me, test_op("all", NB_OP_BARRIER, NULL), &err);
    CHECK(rc == NB_EPEER && err.peer == LEAVER, "rank %d: %d, rank %d: %s", me->rank, rc, err.peer, err.text);
    free(base);
}

// One rank of a comm has not come: another comm, and one that waits in a barrier, are not held up.
static void delayed(struct test_rank *me) {
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
    CHECK(late == NULL || !nb_work_test(late, &code), "rank %d has not come", LEAVER);
    test_barrier(me, "seen");
    if (me->rank == LEAVER && as_member(me, &groups[2], &member)) {
        test_barrier(&member, "late");
    }
    if (late != NULL) {
        test_done(me, late);
    }
    test_barrier(me, "over"); // nothing starts any more where rank 0 has left
}

// Rank 0 says what starts: without it nothing does, in no comm.
static void first_leaves(struct test_rank *me) {
    struct test_rank member;
    struct nb_error err = {0};
    test_barrier(me, "all");
    if (!as_member(me, &groups[1], &member)) {
        return;
    }
    int rc = 0;
    while (rc == 0) { // until it has left
        rc = test_try(&member, test_op("on", NB_OP_BARRIER, NULL), &err);
    }
    CHECK(rc == NB_EPEER && err.peer == 0, "rank %d: %d, rank %d: %s", me->rank, rc, err.peer, err.text);
}

static int run(struct test_rank template, void (*what)(struct test_rank *me)) {
    template.size = 4;
    template.run = what;
    return test_job(&template);
}

int main(int argc, char **argv) {
    static const enum nb_algorithm_id pins[] = {NB_ALGORITHM_NONE, NB_ALGORITHM_RING, NB_ALGORITHM_DOUBLING,
                                                NB_ALGORITHM_HALVING, NB_ALGORITHM_INLINE};
    struct test_rank template = test_on(argc > 1 ? argv[1] : "tcp");
    for (size_t i = 0; i < sizeof pins / sizeof pins[0]; i++) {
        template.algorithm = pins[i];
        int rc = run(template, one_by_one);
        if (rc != 0) {
            return rc;
        }
    }
    template.algorithm = NB_ALGORITHM_NONE;
    CHECK(run(template, all_at_once) == 0, "all at once");
    CHECK(run(template, refused) == 0, "refusals");
    CHECK(run(template, leaves) == 0, "a rank that leaves");
    CHECK(run(template, delayed) == 0, "a rank that is late");
    CHECK(run(template, first_leaves) == 0, "rank 0 leaves");
    CHECK(run(template, differ) == 0, "ranks that differ");
    return 0;
}
