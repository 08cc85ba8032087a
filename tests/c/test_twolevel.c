// Two-level all-reduce: exact for any distribution of ranks over hosts, any type and any memory. Each byte crosses the
// network once per host, and other operations run concurrently.
#include <errno.h>
#include <stdint.h>
#include <string.h>

#include "base/dtype.h"
#include "engine/two_level.h"
#include "sums.h"

enum { EVEN_BYTES = 3 << 18, LARGE = 12 << 20, SMALL_COUNT = 1 << 16, REPEATED_COUNT = 300001, MIXED = 24, ROUNDS = 3 };

static pthread_mutex_t counts_lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t lane_bytes[2][26]; // by host

static const struct layout many_pieces = {.pieces = 100, .gap = 12};

// Large enough that every staging piece of the rings between hosts is reused.
static void check_large(struct test_rank *me, char *base, const char *where) {
    struct nb_op op = {.name = where, .kind = NB_OP_ALLREDUCE, .dtype = NB_F64};
    check_operation(me, op, base, LARGE / sizeof(double) - 5, contiguous);
    op.dtype = NB_U8;
    check_operation(me, op, base, LARGE / 16 - 1, many_pieces);
}

// Concurrent two-level all-reduces, small all-reduces, and broadcasts between all ranks.
static void concurrent_operations(struct test_rank *me, char *base, const char *heap) {
    static const enum nb_op_kind kinds[] = {NB_OP_ALLREDUCE, NB_OP_ALLREDUCE, NB_OP_BROADCAST, NB_OP_ALLREDUCE};
    struct nb_work *works[MIXED];
    struct nb_segment all[MIXED];
    for (int round = 0; round < ROUNDS; round++) {
        for (int k = 0; k < MIXED; k++) {
            int which = (k * 7 + me->rank * 5 + round) % MIXED;
            size_t bytes = which % 4 == 0 ? 1000 : 40000 + (size_t)which * 7001;
            char *memory = (which % 3 == 0 ? (char *)(uintptr_t)heap : base) + (size_t)which * 400000;
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

static void operations_in_all_memory(struct test_rank *me) {
    char *base = arena_share(me);
    char *heap = malloc(ARENA_BYTES);
    char text[64];
    CHECK(heap != NULL, "memory");
    int here = ranks_of_host(me, me->hosts[me->rank]);
    snprintf(text, sizeof text, "on: %d rank%s of this host", here, here > 1 ? "s" : "");
    CHECK(strcmp(job_info(me).shm, text) == 0, "shm is '%s', not '%s'", job_info(me).shm, text);
    check_all_kinds(me, base, "arena");
    check_scale_factors(me, (float *)(void *)base, "arena");
    CHECK(job_info(me).shm_staged_bytes == 0, "%llu bytes were staged",
          (unsigned long long)job_info(me).shm_staged_bytes);
    check_all_sizes(me, base,
                    "arena"); // a buffer in too many pieces for the lanes is copied, and is then not in an arena
    check_large(me, base, "large");
    check_all_kinds(me, heap, "heap");
    check_all_sizes(me, heap, "heap");
    check_scale_factors(me, (float *)(void *)heap, "heap");
    check_large(me, heap, "large heap");
    CHECK((job_info(me).shm_staged_bytes > 0) == (here > 1), "%d ranks, %llu bytes were staged", here,
          (unsigned long long)job_info(me).shm_staged_bytes);
    char *staged_on_a = me->hosts[me->rank] == 'a' && me->rank > 0 ? heap : base; // only host a uses staging
    check_all_sizes(me, staged_on_a, "one host");
    check_large(me, staged_on_a, "large, one host");
    concurrent_operations(me, base, heap);
    free(heap);
}

// The lanes of a host send the minimum for this number of hosts, whatever its number of ranks. EVEN is divisible by the
// numbers of hosts and ranks here.
static void count_lane_bytes(struct test_rank *me) {
    static const struct layout layouts[] = {{.pieces = 1}, {.pieces = 7}};
    static const size_t bytes[] = {EVEN_BYTES, LARGE / 4};
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

static void check_lane_bytes(const struct test_rank *template) {
    uint64_t hosts = 0;
    uint64_t all = 0;
    for (char h = 'a'; h <= 'z'; h++) {
        hosts += ranks_of_host(template, h) > 0;
    }
    for (char h = 'a'; h <= 'z'; h++) {
        uint64_t want = ranks_of_host(template, h) > 0 ? 2 * (hosts - 1) * EVEN_BYTES / hosts : 0;
        CHECK(lane_bytes[0][h - 'a'] == want, "%s: host %c sent %llu bytes, not %llu", template->hosts, h,
              (unsigned long long)lane_bytes[0][h - 'a'], (unsigned long long)want);
        all += lane_bytes[1][h - 'a'];
    }
    CHECK(all == 2 * (hosts - 1) * (LARGE / 4), "%s: all hosts sent %llu bytes", template->hosts,
          (unsigned long long)all);
    memset(lane_bytes, 0, sizeof lane_bytes);
}

// With numbers that float32 does not add exactly, the sum has the same bits in each run, in any memory and on each
// rank.
static void results_are_repeatable(struct test_rank *me) {
    static float first[REPEATED_COUNT];
    float *memory[2] = {(float *)(void *)arena_share(me), malloc(REPEATED_COUNT * sizeof(float))};
    CHECK(memory[1] != NULL, "memory");
    for (int round = 0; round < 6; round++) {
        float *data = memory[round % 2];
        struct nb_segment all = {.base = data, .bytes = REPEATED_COUNT * sizeof *data};
        for (size_t i = 0; i < REPEATED_COUNT; i++) {
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

static void small_operations(struct test_rank *me) {
    char *base = arena_share(me);
    uint64_t shared = job_info(me).shm_bytes;
    struct nb_op op = {.name = "small", .kind = NB_OP_ALLREDUCE, .dtype = NB_U8};
    op.kind = NB_OP_ALLGATHER;
    check_operation(me, op, base, SMALL_COUNT, contiguous);
    CHECK(job_info(me).shm_bytes == shared, "an all-gather uses shared memory");
    op.kind = NB_OP_ALLREDUCE;
    check_operation(me, op, base, SMALL_COUNT, contiguous);
    bool owner = ranks_of_host(me, me->hosts[me->rank]) > 1 && (me->rank == 0 || strcmp(me->hosts, "aabb") == 0);
    CHECK((job_info(me).shm_bytes > shared) == owner, "wrong use of shared memory in an all-reduce");
}

// No algorithm is configured: all ranks get the same measured costs, and the choice follows from them.
static void algorithm_is_chosen_by_cost(struct test_rank *me) {
    static struct nb_costs costs[TEST_RANKS_MAX];
    char *base = arena_share(me);
    char *heap = malloc(ARENA_BYTES);
    CHECK(heap != NULL, "memory");
    CHECK(job_info(me).costs.levels_ns == 0, "costs are measured before they are needed");
    for (size_t bytes = 1; bytes < LARGE; bytes *= 9) {
        struct nb_op op = {.name = "chosen", .kind = NB_OP_ALLREDUCE, .dtype = NB_U8};
        uint64_t shared = job_info(me).shm_bytes;
        check_operation(me, op, base, bytes, contiguous);
        struct nb_job_info info = job_info(me);
        enum nb_algorithm_id want = nb_choose(&info.costs, me->size, 2, bytes);
        bool owner = me->rank == 0 || me->rank == 2; // owns a part at any size
        CHECK((info.shm_bytes > shared) == (owner && want == NB_ALGORITHM_TWO_LEVEL) || !owner,
              "rank %d, %zu bytes: algorithm %d was expected", me->rank, bytes, want);
    }
    concurrent_operations(me, base, heap);
    costs[me->rank] = job_info(me).costs;
    CHECK(costs[me->rank].alpha_ns > 0 && costs[me->rank].levels_ns > 0, "the costs are not known");
    test_barrier(me, "costs");
    CHECK(memcmp(&costs[me->rank], &costs[0], sizeof costs[0]) == 0, "rank %d has different costs", me->rank);
    free(heap);
}

static void shm_is_off(struct test_rank *me) {
    static char data[TEST_RANKS_MAX][4 * KINDS_COUNT];
    struct nb_op op = {.name = "sum", .kind = NB_OP_ALLREDUCE, .dtype = NB_F32};
    check_operation(me, op, data[me->rank], KINDS_COUNT, contiguous);
    CHECK(strcmp(job_info(me).shm, me->arg) == 0, "shm is '%s', not '%s'", job_info(me).shm, (char *)me->arg);
    CHECK(job_info(me).shm_bytes == 0 && job_info(me).bytes_out > 0, "the network was not used");
}

static void fail_if_run(struct test_rank *me) {
    CHECK(false, "rank %d runs without shared memory, which was required", me->rank);
}

// Rank 2 leaves before it submits the operation that the others wait for.
static void rank_leaves(struct test_rank *me) {
    char *base = arena_share(me);
    struct nb_segment all = {.base = base, .bytes = 1 << 20};
    struct nb_error err = {0};
    if (me->rank == 2) {
        return;
    }
    int rc = test_try(me, test_op("late", NB_OP_ALLREDUCE, &all), &err);
    CHECK(rc == NB_EPEER && err.peer == 2, "%d, rank %d: %s", rc, err.peer, err.text);
}

static int run_on_hosts(struct test_rank template, const char *hosts, void (*run)(struct test_rank *me)) {
    template.hosts = hosts;
    template.size = (int)strlen(hosts);
    template.run = run;
    return test_job(&template);
}

static void test_shm_off(const struct test_rank *base) {
    static char reason[] = "off: rank 3 disables it (NETBOTTLENECK_SHM=0)";
    static char different_hosts[] = "off: ranks 0 and 1 are on different hosts";
    struct test_rank template = *base;
    template.shm = NB_SHM_AUTO;
    template.arg = different_hosts;
    CHECK(run_on_hosts(template, "abc", shm_is_off) == 0, "one rank on each host");
    template.overrides = &(struct test_override){.rank = 3, .shm = NB_SHM_OFF};
    template.arg = reason;
    CHECK(run_on_hosts(template, "aabb", shm_is_off) == 0, "sharing is off on all hosts because one rank disables it");
    CHECK(run_on_hosts(template, "aacb", small_operations) == 0, "one rank alone on its host");
    template.shm = NB_SHM_REQUIRED;
    template.hosts = "aabb";
    template.size = 4;
    template.run = fail_if_run;
    test_job_fails(&template, -EOPNOTSUPP, reason + 5);
}

static int test_hosts(struct test_rank template, const char *hosts) {
    template.hosts = hosts;
    int rc = run_on_hosts(template, hosts, count_lane_bytes);
    if (rc == 0) {
        check_lane_bytes(&template);
        CHECK(run_on_hosts(template, hosts, operations_in_all_memory) == 0, "%s", hosts);
        printf("%s over %s\n", hosts, template.transport);
    }
    return rc;
}

static int test_rest(const struct test_rank *template) {
    CHECK(run_on_hosts(*template, "aaabbb", results_are_repeatable) == 0, "repeated sums");
    CHECK(run_on_hosts(*template, "aabb", small_operations) == 0, "small operations");
    CHECK(run_on_hosts(*template, "aabb", rank_leaves) == 0, "rank leaves");
    struct test_rank open = *template;
    open.algorithm = NB_ALGORITHM_NONE;
    CHECK(run_on_hosts(open, "aabb", algorithm_is_chosen_by_cost) == 0, "measured choice");
    test_shm_off(template);
    return 0;
}

// Argument: the ranks' hosts, "ofi", or "rest". None: everything over TCP.
int main(int argc, char **argv) {
    static const char *const everywhere[] = {"aabb", "aab", "abab", "aabbcc", "aaab", "aabbb"};
    struct test_rank template = {.transport = "tcp",
                                 .streams = 2,
                                 .timeout_ms = 20000,
                                 .shm = NB_SHM_REQUIRED,
                                 .algorithm = NB_ALGORITHM_TWO_LEVEL};
    if (argc > 1 && strcmp(argv[1], "ofi") == 0) {
        template.transport = argv[1];
        return test_hosts(template, "aabb");
    }
    if (argc > 1) {
        return strcmp(argv[1], "rest") == 0 ? test_rest(&template) : test_hosts(template, argv[1]);
    }
    for (size_t i = 0; i < sizeof everywhere / sizeof everywhere[0]; i++) {
        CHECK(test_hosts(template, everywhere[i]) == 0, "%s", everywhere[i]);
    }
    return test_rest(&template);
}
