// Several hosts, some with several ranks: two-level all-reduces are exact for any hosts, types and memory, the
// network carries each byte once per host, and other operations run concurrently.
#include <errno.h>
#include <stdint.h>
#include <string.h>

#include "base/dtype.h"
#include "engine/two_level.h"
#include "sums.h"

enum { EVEN = 3 << 18, LARGE = 12 << 20, GATHERED = 1 << 16, REPEATED = 300001, MIXED = 24, ROUNDS = 3 };

static pthread_mutex_t counts_lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t lane_bytes[2][26]; // by host

static const struct layout cut = {.pieces = 100, .gap = 12};

// Large enough that every piece of memory between hosts is used again.
static void large_in(struct test_rank *me, char *base, const char *where) {
    struct nb_op op = {.name = where, .kind = NB_OP_ALLREDUCE, .dtype = NB_F64};
    check_operation(me, op, base, LARGE / sizeof(double) - 5, contiguous);
    op.dtype = NB_U8;
    check_operation(me, op, base, LARGE / 16 - 1, cut);
}

// Sums in two levels and small ones, gatherings and broadcasts on the network between all, all at once.
static void mixed(struct test_rank *me, char *base, const char *elsewhere) {
    static const enum nb_op_kind kinds[] = {NB_OP_ALLREDUCE, NB_OP_ALLREDUCE, NB_OP_BROADCAST, NB_OP_ALLREDUCE};
    struct nb_work *works[MIXED];
    struct nb_segment all[MIXED];
    for (int round = 0; round < ROUNDS; round++) {
        for (int k = 0; k < MIXED; k++) {
            int which = (k * 7 + me->rank * 5 + round) % MIXED;
            size_t bytes = which % 4 == 0 ? 1000 : 40000 + (size_t)which * 7001;
            char *memory = (which % 3 == 0 ? (char *)(uintptr_t)elsewhere : base) + (size_t)which * 400000;
            char name[32];
            snprintf(name, sizeof name, "mixed.%d", which);
            for (size_t i = 0; i < bytes; i++) {
                memory[i] = (char)input_value(me->rank, i + (size_t)which);
            }
            all[which] = (struct nb_segment){.base = memory, .bytes = bytes};
            struct nb_op op = test_op(name, kinds[which % 4], &all[which]);
            op.dtype = NB_U8;
            op.priority = which % 5;
            op.root = which % me->size;
            works[which] = test_submit(me, op);
        }
        for (int which = 0; which < MIXED; which++) {
            test_done(me, works[which]);
            for (size_t i = 0; i < all[which].bytes; i++) {
                size_t at = i + (size_t)which;
                bool sum = kinds[which % 4] == NB_OP_ALLREDUCE;
                int want = sum ? (int)reduce_inputs(NB_SUM, me->size, at) : input_value(which % me->size, at);
                int got = ((unsigned char *)all[which].base)[i];
                CHECK(got == want, "rank %d, mixed %d: [%zu] is %d, not %d", me->rank, which, i, got, want);
            }
        }
    }
}

static int ranks_of_host(const struct test_rank *me, char host) {
    int n = 0;
    for (const char *at = me->hosts; *at != 0; at++) {
        n += *at == host;
    }
    return n;
}

static void all_of_it(struct test_rank *me) {
    char *base = arena_share(me);
    char *elsewhere = malloc(ARENA_BYTES);
    char text[64];
    CHECK(elsewhere != NULL, "memory");
    int here = ranks_of_host(me, me->hosts[me->rank]);
    snprintf(text, sizeof text, "on: %d rank%s of this host", here, here > 1 ? "s" : "");
    CHECK(strcmp(job_info(me).shm, text) == 0, "shm is '%s', not '%s'", job_info(me).shm, text);
    check_all_kinds(me, base, "arena");
    check_scale_factors(me, (float *)(void *)base, "arena");
    CHECK(job_info(me).shm_staged_bytes == 0, "%llu bytes were staged",
          (unsigned long long)job_info(me).shm_staged_bytes);
    check_all_sizes(me, base,
                    "arena"); // what lies in too many pieces for the lanes is joined first, and then it is elsewhere
    large_in(me, base, "large");
    check_all_kinds(me, elsewhere, "elsewhere");
    check_all_sizes(me, elsewhere, "elsewhere");
    check_scale_factors(me, (float *)(void *)elsewhere, "elsewhere");
    large_in(me, elsewhere, "large elsewhere");
    CHECK((job_info(me).shm_staged_bytes > 0) == (here > 1), "%d ranks, %llu bytes were staged", here,
          (unsigned long long)job_info(me).shm_staged_bytes);
    char *overrides =
        me->hosts[me->rank] == 'a' && me->rank > 0 ? elsewhere : base; // one host goes through staging, others not
    check_all_sizes(me, overrides, "of one host");
    large_in(me, overrides, "large of one host");
    mixed(me, base, elsewhere);
    free(elsewhere);
}

// What the lanes of a host's ranks move is what the host owes, whatever the number of its ranks. EVEN can be cut evenly by
// all of the hosts and ranks here.
static void counts(struct test_rank *me) {
    static const struct layout layouts[] = {{.pieces = 1}, {.pieces = 7}};
    static const size_t bytes[] = {EVEN, LARGE / 4};
    char *base = arena_share(me);
    for (int i = 0; i < 2; i++) {
        uint64_t before = job_info(me).bytes_out;
        struct nb_op op = {.name = "counted", .kind = NB_OP_ALLREDUCE, .dtype = NB_F32};
        check_operation(me, op, base, bytes[i] / sizeof(float), layouts[i]);
        pthread_mutex_lock(&counts_lock);
        lane_bytes[i][me->hosts[me->rank] - 'a'] += job_info(me).bytes_out - before;
        pthread_mutex_unlock(&counts_lock);
    }
}

static void check_counts(const struct test_rank *template) {
    uint64_t hosts = 0;
    uint64_t all = 0;
    for (char h = 'a'; h <= 'z'; h++) {
        hosts += ranks_of_host(template, h) > 0;
    }
    for (char h = 'a'; h <= 'z'; h++) {
        uint64_t want = ranks_of_host(template, h) > 0 ? 2 * (hosts - 1) * EVEN / hosts : 0;
        CHECK(lane_bytes[0][h - 'a'] == want, "%s: host %c sent %llu bytes, not %llu", template->hosts, h,
              (unsigned long long)lane_bytes[0][h - 'a'], (unsigned long long)want);
        all += lane_bytes[1][h - 'a'];
    }
    CHECK(all == 2 * (hosts - 1) * (LARGE / 4), "%s: %llu bytes", template->hosts, (unsigned long long)all);
    memset(lane_bytes, 0, sizeof lane_bytes);
}

// Numbers that float32 does not add exactly: each time, in whatever memory, on each rank, the sum has the same bits.
static void repeats(struct test_rank *me) {
    static float first[REPEATED];
    float *memory[2] = {(float *)(void *)arena_share(me), malloc(REPEATED * sizeof(float))};
    CHECK(memory[1] != NULL, "memory");
    for (int round = 0; round < 6; round++) {
        float *data = memory[round % 2];
        struct nb_segment all = {.base = data, .bytes = REPEATED * sizeof *data};
        for (size_t i = 0; i < REPEATED; i++) {
            data[i] = 1.0f / (float)(i % 977 + (size_t)me->rank * 31 + 1);
        }
        test_done(me, test_submit(me, test_op("repeated", NB_OP_ALLREDUCE, &all)));
        if (round == 0 && me->rank == 0) {
            memcpy(first, data, sizeof first);
        }
        test_barrier(me, "kept");
        CHECK(memcmp(first, data, sizeof first) == 0, "rank %d, round %d", me->rank, round);
    }
    free(memory[1]);
}

static void small_ones(struct test_rank *me) {
    char *base = arena_share(me);
    uint64_t shared = job_info(me).shm_bytes;
    struct nb_op op = {.name = "small", .kind = NB_OP_ALLREDUCE, .dtype = NB_U8};
    op.kind = NB_OP_ALLGATHER;
    check_operation(me, op, base, GATHERED, contiguous);
    CHECK(job_info(me).shm_bytes == shared, "a gathering takes the network");
    op.kind = NB_OP_ALLREDUCE;
    check_operation(me, op, base, GATHERED, contiguous);
    bool owner = ranks_of_host(me, me->hosts[me->rank]) > 1 && (me->rank == 0 || strcmp(me->hosts, "aabb") == 0);
    CHECK((job_info(me).shm_bytes > shared) == owner, "a sum does not");
}

// Nothing is pinned: what two levels cost is measured, alike for all, and the choice follows from it.
static void chosen(struct test_rank *me) {
    static struct nb_costs costs[TEST_RANKS_MAX];
    char *base = arena_share(me);
    char *elsewhere = malloc(ARENA_BYTES);
    CHECK(elsewhere != NULL, "memory");
    CHECK(job_info(me).costs.levels_ns == 0, "nothing is measured before it is needed");
    for (size_t bytes = 1; bytes < LARGE; bytes *= 9) {
        struct nb_op op = {.name = "chosen", .kind = NB_OP_ALLREDUCE, .dtype = NB_U8};
        uint64_t shared = job_info(me).shm_bytes;
        check_operation(me, op, base, bytes, contiguous);
        struct nb_job_info info = job_info(me);
        enum nb_algorithm_id want = nb_choose(&info.costs, me->size, 2, bytes);
        bool owner = me->rank == 0 || me->rank == 2; // of a part, whatever the size
        CHECK((info.shm_bytes > shared) == (owner && want == NB_ALGORITHM_TWO_LEVEL) || !owner,
              "rank %d, %zu bytes: should take %d", me->rank, bytes, want);
    }
    mixed(me, base, elsewhere);
    costs[me->rank] = job_info(me).costs;
    CHECK(costs[me->rank].alpha_ns > 0 && costs[me->rank].levels_ns > 0, "what it costs is known");
    test_barrier(me, "costs");
    CHECK(memcmp(&costs[me->rank], &costs[0], sizeof costs[0]) == 0, "rank %d knows other costs", me->rank);
    free(elsewhere);
}

static void off(struct test_rank *me) {
    static char data[TEST_RANKS_MAX][4 * KINDS_COUNT];
    struct nb_op op = {.name = "sum", .kind = NB_OP_ALLREDUCE, .dtype = NB_F32};
    check_operation(me, op, data[me->rank], KINDS_COUNT, contiguous);
    CHECK(strcmp(job_info(me).shm, me->arg) == 0, "shm is '%s', not '%s'", job_info(me).shm, (char *)me->arg);
    CHECK(job_info(me).shm_bytes == 0 && job_info(me).bytes_out > 0, "the network was used");
}

static void must_not_run(struct test_rank *me) {
    CHECK(false, "rank %d runs without shared memory, which was required", me->rank);
}

// Rank 2 goes, in good order, before it has submitted what the others wait for.
static void leaves(struct test_rank *me) {
    char *base = arena_share(me);
    struct nb_segment all = {.base = base, .bytes = 1 << 20};
    struct nb_error err = {0};
    if (me->rank == 2) {
        return;
    }
    int rc = test_try(me, test_op("late", NB_OP_ALLREDUCE, &all), &err);
    CHECK(rc == NB_EPEER && err.peer == 2, "%d, rank %d: %s", rc, err.peer, err.text);
}

static int on_hosts(struct test_rank template, const char *hosts, void (*run)(struct test_rank *me)) {
    template.hosts = hosts;
    template.size = (int)strlen(hosts);
    template.run = run;
    return test_job(&template);
}

static void where_it_is_off(const struct test_rank *base) {
    static char reason[] = "off: rank 3 disables it (NETBOTTLENECK_SHM=0)";
    static char apart[] = "off: ranks 0 and 1 are on different hosts";
    struct test_rank template = *base;
    template.shm = NB_SHM_AUTO;
    template.arg = apart;
    CHECK(on_hosts(template, "abc", off) == 0, "one rank a host");
    template.overrides = &(struct test_override){.rank = 3, .shm = NB_SHM_OFF};
    template.arg = reason;
    CHECK(on_hosts(template, "aabb", off) == 0, "one host does not share, so no host does");
    CHECK(on_hosts(template, "aacb", small_ones) == 0, "a rank alone on its host has no rank to share with");
    template.shm = NB_SHM_REQUIRED;
    template.hosts = "aabb";
    template.size = 4;
    template.run = must_not_run;
    test_job_fails(&template, -EOPNOTSUPP, reason + 5);
}

static int everything_on(struct test_rank template, const char *hosts) {
    template.hosts = hosts;
    int rc = on_hosts(template, hosts, counts);
    if (rc == 0) {
        check_counts(&template);
        CHECK(on_hosts(template, hosts, all_of_it) == 0, "%s", hosts);
        printf("%s over %s\n", hosts, template.transport);
    }
    return rc;
}

static int the_rest(const struct test_rank *template) {
    CHECK(on_hosts(*template, "aaabbb", repeats) == 0, "the same bits each time");
    CHECK(on_hosts(*template, "aabb", small_ones) == 0, "what takes which way");
    CHECK(on_hosts(*template, "aabb", leaves) == 0, "a rank that leaves");
    struct test_rank open = *template;
    open.algorithm = NB_ALGORITHM_NONE;
    CHECK(on_hosts(open, "aabb", chosen) == 0, "nothing pinned");
    where_it_is_off(template);
    return 0;
}

// All of it, or what a word says: the ranks' hosts, "ofi", or "rest".
int main(int argc, char **argv) {
    static const char *const everywhere[] = {"aabb", "aab", "abab", "aabbcc", "aaab", "aabbb"};
    struct test_rank template = {.transport = "tcp",
                                 .streams = 2,
                                 .timeout_ms = 20000,
                                 .shm = NB_SHM_REQUIRED,
                                 .algorithm = NB_ALGORITHM_TWO_LEVEL};
    if (argc > 1 && strcmp(argv[1], "ofi") == 0) {
        template.transport = argv[1];
        return everything_on(template, "aabb");
    }
    if (argc > 1) {
        return strcmp(argv[1], "rest") == 0 ? the_rest(&template) : everything_on(template, argv[1]);
    }
    for (size_t i = 0; i < sizeof everywhere / sizeof everywhere[0]; i++) {
        CHECK(everything_on(template, everywhere[i]) == 0, "%s", everywhere[i]);
    }
    return the_rest(&template);
}
