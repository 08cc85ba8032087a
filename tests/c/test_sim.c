// What-if engine: costs against closed forms, the limits of each fusion rule, conservation of bytes, and reproducible
// results.
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "base/error.h"
#include "check.h"
#include "sim/shape.h"
#include "sim/sim.h"

enum { TENSORS = 40, RANKS = 3, STEPS = 3, ITEMS = RANKS * STEPS * (TENSORS + 3), CELLS = STEPS * TENSORS };

struct scene {
    int64_t starts[RANKS + 1];
    int64_t work_ns[ITEMS];
    int32_t codes[ITEMS];
    int64_t bytes[TENSORS];
    int32_t kinds[TENSORS];
    int32_t bucket_of[TENSORS];
    int64_t reached_ns[ITEMS];
    int64_t passed_ns[ITEMS];
    struct nb_sim_op ops[CELLS];
    int32_t op_of[CELLS];
    int64_t submit_ns[CELLS * RANKS];
    struct nb_sim_program program;
    struct nb_sim_plan plan;
    struct nb_sim_cost cost;
    struct nb_sim_result result;
};

static uint32_t draw(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static void init_inputs(struct scene *s, int ranks, int tensors, int steps) {
    s->program = (struct nb_sim_program){ranks, tensors, steps, s->starts, s->work_ns, s->codes, s->bytes, s->kinds};
    s->plan = (struct nb_sim_plan){.rule = NB_SIM_EXPLICIT,
                                   .in_flight = 1,
                                   .buckets = tensors,
                                   .bucket_of = s->bucket_of,
                                   .fusion_bytes = 1000,
                                   .cycle_ns = 100};
    s->cost = (struct nb_sim_cost){
        .size = 4, .ranks_per_host = 1, .contention = NB_SIM_CONTENTION_ONE, .pipelined = true, .ratio = 1};
    s->result = (struct nb_sim_result){s->reached_ns, s->passed_ns, s->ops, s->op_of, s->submit_ns, 0};
}

// On each rank and in each step: one tensor after each work_ns, then the wait, then the end.
static void fill(struct scene *s, int ranks, int tensors, int steps, uint32_t seed) {
    int at = 0;
    memset(s, 0, sizeof *s);
    for (int rank = 0; rank < ranks; rank++) {
        s->starts[rank] = at;
        for (int step = 0; step < steps; step++) {
            for (int i = 0; i < tensors; i++) {
                s->work_ns[at] = seed > 0 ? draw(&seed) % 200 : 10;
                s->codes[at++] = tensors - 1 - i;
            }
            s->codes[at++] = NB_SIM_WAIT;
            s->work_ns[at] = 5;
            s->codes[at++] = NB_SIM_END;
        }
    }
    s->starts[ranks] = at;
    for (int i = 0; i < tensors; i++) {
        s->bytes[i] = seed > 0 ? draw(&seed) % 1500 : 1000;
        s->bucket_of[i] = i;
        s->kinds[i] = seed > 0 ? (int32_t)(draw(&seed) % 2) : 0;
    }
    init_inputs(s, ranks, tensors, steps);
}

static int run(struct scene *s) {
    struct nb_error err = {0};
    int rc = nb_sim_run(&s->program, &s->plan, &s->cost, &s->result, &err);
    CHECK((rc == 0) == (err.code == 0), "returned %d, but recorded %d: %s", rc, err.code, err.text);
    return rc;
}

static void run_successfully(struct scene *s) {
    int rc = run(s);
    CHECK(rc == 0, "failed: %d", rc);
}

// Runs a single bucket of 4000 bytes, submitted at 10 ns. Network: 7 ns per step, 2 ns per byte; reduction: 0.5 ns per
// byte. Returns the operation's time in ns.
static int64_t cost_of_one(enum nb_sim_algorithm algorithm, int size, int inside, bool pipelined) {
    static struct scene s;
    fill(&s, 1, 1, 1, 0);
    s.bytes[0] = 4000;
    s.cost.algorithm = algorithm;
    s.cost.size = size;
    s.cost.ranks_per_host = inside;
    s.cost.pipelined = pipelined;
    s.cost.alpha_ns = 7;
    s.cost.host_alpha_ns = 3;
    s.cost.byte_ns = 2;
    s.cost.host_byte_ns = 0.25;
    s.cost.add_byte_ns = 0.5;
    run_successfully(&s);
    CHECK(s.result.count == 1 && s.ops[0].start_ns == 10, "%d operations, the first at %lld", s.result.count,
          (long long)s.ops[0].start_ns);
    return s.ops[0].done_ns - s.ops[0].start_ns;
}

static void test_closed_forms(void) {
    const struct {
        const char *name;
        enum nb_sim_algorithm algorithm;
        int size;
        int inside;
        bool pipelined;
        int64_t ns;
    } forms[] = {
        {"ring", NB_SIM_RING, 4, 1, true, 6 * 7 + 12000},
        {"ring, serial", NB_SIM_RING, 4, 1, false, 6 * 7 + 12000 + 1500},
        {"ring over two hosts", NB_SIM_RING, 4, 2, true, 6 * 7 + 12000},
        {"ring in one host", NB_SIM_RING, 4, 4, true, 6 * 3 + 1500},
        {"one rank", NB_SIM_RING, 1, 1, true, 0},
        {"two levels", NB_SIM_TWO_LEVEL, 4, 2, true, 2 * 7 + 2 * 3 + 8000},
        {"two levels, serial", NB_SIM_TWO_LEVEL, 4, 2, false, 2 * 7 + 2 * 3 + 8000 + 1000 + 1000 + 500},
        {"tree", NB_SIM_TREE, 4, 1, true, 4 * 7 + 12000},
        {"tree of two hosts", NB_SIM_TREE, 16, 8, true, 2 * 7 + 14 * 3 + 8000},
        {"halving", NB_SIM_HALVING, 4, 1, false, 4 * 7 + 12000 + 1500},
        {"halving over two hosts", NB_SIM_HALVING, 4, 2, false, 2 * 7 + 2 * 3 + 8000 + 1000 + 1500},
        {"halving, three ranks", NB_SIM_HALVING, 3, 1, false, 4 * 7 + 8000 + 16000 + 1000 + 2000},
        {"direct", NB_SIM_DIRECT, 2, 1, false, 7 + 8000 + 2000},
        {"direct, eight ranks", NB_SIM_DIRECT, 8, 1, true, 3 * 7 + 24000},
        {"direct over two hosts", NB_SIM_DIRECT, 4, 2, true, 7 + 3 + 16000},
    };
    for (unsigned i = 0; i < sizeof forms / sizeof forms[0]; i++) {
        int64_t ns = cost_of_one(forms[i].algorithm, forms[i].size, forms[i].inside, forms[i].pipelined);
        CHECK(ns == forms[i].ns, "%s: %lld ns, closed form: %lld ns", forms[i].name, (long long)ns,
              (long long)forms[i].ns);
    }
}

// Costs other than steps and bytes: copies of fused tensors, a codec, a launch, and a table of reduction times.
static void test_other_costs(void) {
    static struct scene s;
    const double sizes[] = {0, 100, 1000};
    const double times[] = {40, 50, 500};
    fill(&s, 1, 2, 1, 0);
    s.plan.buckets = 1;
    s.bucket_of[1] = 0;
    s.cost.byte_ns = 1;
    s.cost.ratio = 4;
    s.cost.encode_byte_ns = 0.5;
    s.cost.decode_byte_ns = 0.25;
    s.cost.copy_byte_ns = 0.1;
    s.cost.launch_ns = 30;
    s.cost.fixed_ns = 11;
    s.cost.pipelined = false;
    s.cost.whole_sums = true;
    s.cost.add = (struct nb_sim_table){3, false, sizes, times};
    run_successfully(&s);
    // 2000 bytes. Copies and codec: 1200 in, 700 out. Fixed: 11. Wire: 3/4 of 500 bytes, twice. Three sums of 500
    // bytes: 250 each.
    CHECK(s.ops[0].agreed_ns == 50 && s.ops[0].done_ns == 50 + 1200 + 11 + 750 + 750 + 700, "%lld",
          (long long)s.ops[0].done_ns);
    CHECK(s.ops[0].wire_bytes == 750, "%lld", (long long)s.ops[0].wire_bytes);
    s.bytes[0] = 7000;
    s.cost.whole_sums = false;
    run_successfully(&s);
    // 2000 bytes after compression, so parts of 500 as before. Larger sums extrapolate the last slope of the table.
    CHECK(s.ops[0].done_ns == 50 + 4800 + 11 + 3000 + 750 + 2800, "%lld", (long long)s.ops[0].done_ns);
    s.cost.ratio = 1;
    s.cost.whole_sums = true;
    run_successfully(&s);
    CHECK(s.ops[0].done_ns == 50 + 4800 + 11 + 12000 + 3 * 1000 + 2800, "%lld", (long long)s.ops[0].done_ns);
    s.cost.add.clamped = true;
    run_successfully(&s);
    CHECK(s.ops[0].done_ns == 50 + 4800 + 11 + 12000 + 3 * 500 + 2800, "%lld", (long long)s.ops[0].done_ns);
}

// Two operations of 1500 ns on the wire, ready at 10 and 20.
static void test_link_sharing(void) {
    static struct scene s;
    fill(&s, 1, 2, 1, 0);
    s.cost.byte_ns = 1;
    run_successfully(&s);
    CHECK(s.ops[0].done_ns == 1510 && s.ops[1].start_ns == 1510 && s.ops[1].done_ns == 3010, "in sequence: %lld",
          (long long)s.ops[1].done_ns);
    s.plan.in_flight = 2;
    run_successfully(&s);
    CHECK(s.ops[1].start_ns == 20 && s.ops[0].done_ns == 3000 && s.ops[1].done_ns == 3010,
          "concurrently: %lld and %lld", (long long)s.ops[0].done_ns, (long long)s.ops[1].done_ns);
    s.cost.contention = 2 * NB_SIM_CONTENTION_ONE;
    s.work_ns[3] = 5;
    run_successfully(&s);
    CHECK(s.ops[1].start_ns == 30 && s.reached_ns[3] == s.ops[1].done_ns + 5,
          "compute takes twice as long during communication: %lld", (long long)s.ops[1].start_ns);
}

// Sharing a link between three operations gives fractions of a ns. An operation ends at the next whole ns, regardless
// of other events.
static void test_fractions_of_ns(void) {
    static struct scene s;
    fill(&s, 1, 3, 1, 0);
    s.cost.byte_ns = 1;
    s.plan.in_flight = 3;
    s.work_ns[2] = 5;
    s.work_ns[3] = 4462;
    run_successfully(&s);
    // Bytes left: 1490 and 1500 at 20, 1487.5 at 25. That takes 4462.5 ns more; the rank begins to wait after 4462 of
    // them.
    CHECK(s.ops[2].start_ns == 25 && s.reached_ns[3] == 4487 && s.ops[0].done_ns == 4488, "at %lld",
          (long long)s.ops[0].done_ns);
}

static void test_last_rank_starts_operations(void) {
    static struct scene s;
    fill(&s, 2, 1, 2, 0);
    s.cost.byte_ns = 1;
    s.work_ns[3] = 100;           // rank 0, second step
    s.work_ns[s.starts[1]] = 400; // rank 1, first step
    run_successfully(&s);
    CHECK(s.ops[0].start_ns == 400 && s.submit_ns[0] == 10 && s.submit_ns[1] == 400, "%lld",
          (long long)s.ops[0].start_ns);
    CHECK(s.ops[1].start_ns == 1905 + 100 && s.submit_ns[3] == 1905 + 10, "%lld", (long long)s.ops[1].start_ns);
}

// Every byte is sent once in each step, and each operation is submitted and awaited in its step.
static void check_conservation(const struct scene *s) {
    int64_t sent[STEPS] = {0};
    int64_t members = 0;
    int64_t all = 0;
    for (int i = 0; i < s->program.tensors; i++) {
        all += s->bytes[i];
    }
    for (int i = 0; i < s->result.count; i++) {
        const struct nb_sim_op *op = &s->ops[i];
        sent[op->step] += op->bytes;
        members += op->members;
        CHECK(op->members > 0 && op->agreed_ns <= op->start_ns && op->start_ns <= op->done_ns, "operation %d", i);
        CHECK(i == 0 || op->agreed_ns >= s->ops[i - 1].agreed_ns, "operation %d out of order", i);
    }
    for (int step = 0; step < s->program.steps; step++) {
        CHECK(sent[step] == all, "step %d: %lld bytes of %lld", step, (long long)sent[step], (long long)all);
    }
    CHECK(members == (int64_t)s->program.steps * s->program.tensors, "%lld tensors", (long long)members);
    for (int64_t i = 0; i < s->starts[s->program.ranks]; i++) {
        CHECK(s->passed_ns[i] >= s->reached_ns[i], "item %lld", (long long)i);
    }
}

static void test_rules(uint32_t seed) {
    static struct scene s;
    static struct scene again;
    fill(&s, RANKS, TENSORS, STEPS, seed);
    s.cost.byte_ns = 0.3;
    s.cost.alpha_ns = 11;
    s.plan.in_flight = 1 + (int)(seed % 3);
    for (int rule = NB_SIM_EXPLICIT; rule <= NB_SIM_PAPER2020; rule++) {
        s.plan.rule = (enum nb_sim_rule)rule;
        run_successfully(&s);
        check_conservation(&s);
        again = s;
        run_successfully(&s);
        CHECK(s.result.count == again.result.count &&
                  memcmp(s.ops, again.ops, (size_t)s.result.count * sizeof s.ops[0]) == 0,
              "rule %d: a repeated run has a different result", rule);
        for (int i = 0; i < s.result.count && rule == NB_SIM_HOROVOD; i++) {
            CHECK(s.ops[i].bytes <= s.plan.fusion_bytes || s.ops[i].members == 1, "%lld bytes of %lld tensors",
                  (long long)s.ops[i].bytes, (long long)s.ops[i].members);
        }
    }
}

static void check_fusion(const struct scene *s, int first, const int64_t *bytes, int count) {
    CHECK(s->result.count == first + count, "%d operations", s->result.count);
    for (int i = 0; i < count; i++) {
        CHECK(s->ops[first + i].bytes == bytes[i], "operation %d: %lld bytes", i, (long long)s->ops[first + i].bytes);
    }
}

// Tensors 7, 6, … 0 are ready at 10, 20, … 80; the timer is at 100.
static void test_horovod_rule(void) {
    static struct scene s;
    const int64_t sizes[] = {1200, 100, 300, 600, 400, 200, 500, 300}; // of tensors 0 to 7
    fill(&s, 1, 8, 1, 0);
    memcpy(s.bytes, sizes, sizeof sizes);
    s.plan.rule = NB_SIM_HOROVOD;
    run_successfully(&s);
    // Fused: 300 + 500 + 200; 400 + 600; 300 + 100, because 1200 exceeds the limit; 1200.
    check_fusion(&s, 0, (const int64_t[]){1000, 1000, 400, 1200}, 4);
    CHECK(s.ops[0].agreed_ns == 100 && s.ops[3].agreed_ns == 100, "at %lld", (long long)s.ops[0].agreed_ns);
    // 500 has another type. Fused: 300 + 200 + 400; 500; 600 + 300 + 100, because 500 + 600 exceeds the limit; 1200.
    s.kinds[6] = 1;
    run_successfully(&s);
    check_fusion(&s, 0, (const int64_t[]){900, 500, 1000, 1200}, 4);
    s.plan.cycle_ns = 35; // cycles end at 35 (300 + 500 + 200), 70 (400 + 600) and 105 (the rest)
    s.kinds[6] = 0;
    run_successfully(&s);
    check_fusion(&s, 0, (const int64_t[]){1000, 1000, 400, 1200}, 4);
    CHECK(s.ops[0].agreed_ns == 35 && s.ops[1].agreed_ns == 70 && s.ops[3].agreed_ns == 105,
          "not one operation in each cycle");
}

// Fusion looks beyond a tensor of another type as long as that tensor would fit: with 700 bytes it does, with 701 not.
static void test_fusion_looks_ahead(void) {
    static struct scene s;
    for (int more = 0; more < 2; more++) {
        const int64_t sizes[] = {200, 700 + more, 300}; // of tensors 0 to 2
        const int64_t separate[] = {500 - 200 * more, 700 + more, 200};
        fill(&s, 1, 3, 1, 0);
        memcpy(s.bytes, sizes, sizeof sizes);
        s.kinds[1] = 1;
        s.plan.rule = NB_SIM_HOROVOD;
        run_successfully(&s);
        check_fusion(&s, 0, separate, 2 + more);
    }
}

// Ranks submit tensors in different orders: a rank has submitted a fused operation when it has submitted its last
// tensor.
static void test_submit_times_of_fused_operations(void) {
    static struct scene s;
    fill(&s, 2, 2, 1, 0);
    for (size_t i = 0; i < sizeof s.submit_ns / sizeof s.submit_ns[0]; i++) {
        s.submit_ns[i] = INT64_MAX; // the output memory need not be initialised
    }
    s.codes[s.starts[1]] = 0; // rank 1: tensor 0 at 50, tensor 1 at 60; rank 0: tensor 1 at 10, tensor 0 at 20
    s.codes[s.starts[1] + 1] = 1;
    s.work_ns[s.starts[1]] = 50;
    s.plan.rule = NB_SIM_HOROVOD;
    s.plan.fusion_bytes = 4000;
    run_successfully(&s);
    check_fusion(&s, 0, (const int64_t[]){2000}, 1);
    CHECK(s.submit_ns[0] == 20 && s.submit_ns[1] == 60, "at %lld and %lld", (long long)s.submit_ns[0],
          (long long)s.submit_ns[1]);
}

// The limit is checked after each tensor is added. A late tensor does not cause earlier ones to be sent before it.
static void test_paper2020_rule(void) {
    static struct scene s;
    fill(&s, 1, 4, 1, 0);
    s.plan.rule = NB_SIM_PAPER2020;
    s.bytes[3] = 900;
    s.bytes[2] = 900;
    s.bytes[1] = 10;
    s.bytes[0] = 10;
    s.work_ns[3] = 500;
    run_successfully(&s);
    check_fusion(&s, 0, (const int64_t[]){1800, 20}, 2);
    CHECK(s.ops[0].agreed_ns == 20 && s.ops[1].agreed_ns == 530, "at %lld and %lld", (long long)s.ops[0].agreed_ns,
          (long long)s.ops[1].agreed_ns);
}

// A bucket that is complete before earlier buckets waits for them under the DDP rule, and does not under the explicit
// rule.
static void test_bucket_order(void) {
    static struct scene s;
    fill(&s, 1, 3, 1, 0);
    run_successfully(&s);
    CHECK(s.ops[0].bucket == 2 && s.ops[2].bucket == 0 && s.ops[0].agreed_ns == 10, "not in the order of readiness");
    s.plan.rule = NB_SIM_DDP;
    run_successfully(&s);
    CHECK(s.ops[0].bucket == 0 && s.ops[2].bucket == 2 && s.ops[0].agreed_ns == 30, "not in bucket order");
}

static void test_invalid_input(void) {
    static struct scene s;
    fill(&s, 1, 2, 1, 0);
    s.codes[1] = 1;
    CHECK(run(&s) == -EINVAL, "a repeated tensor is accepted");
    fill(&s, 1, 2, 1, 0);
    s.codes[2] = NB_SIM_MARK;
    CHECK(run(&s) == -EINVAL, "a step without a wait is accepted");
    fill(&s, 1, 2, 1, 0);
    s.program.steps = 2;
    CHECK(run(&s) == -EINVAL, "a missing step is accepted");
    fill(&s, 1, 2, 1, 0);
    s.bucket_of[0] = 2;
    CHECK(run(&s) == -EINVAL, "an unknown bucket is accepted");
    fill(&s, 1, 2, 1, 0);
    s.plan.in_flight = NB_SIM_IN_FLIGHT_MAX + 1;
    CHECK(run(&s) == -EINVAL, "too many operations in flight are accepted");
    fill(&s, 1, 2, 1, 0);
    s.cost.ratio = 0;
    CHECK(run(&s) == -EINVAL, "a compression ratio of 0 is accepted");
    fill(&s, 1, 2, 1, 0);
    s.bytes[0] = -1;
    CHECK(run(&s) == -EINVAL, "a negative size is accepted");
    fill(&s, 1, 2, 1, 0);
    s.cost.byte_ns = 1e15;
    CHECK(run(&s) == -EOVERFLOW, "a time beyond the limit is accepted");
}

// Steps times tensors may be as large as INT32_MAX; one more is refused.
static void test_cell_limit(void) {
    static struct scene s;
    struct nb_error most = {0};
    struct nb_error more = {0};
    fill(&s, 1, 1, 1, 0);
    s.program.steps = INT32_MAX;
    CHECK(nb_sim_run(&s.program, &s.plan, &s.cost, &s.result, &most) == -EINVAL,
          "items of one step are accepted for many");
    CHECK(strstr(most.text, "the list of items ends before the step does") != NULL, "%s", most.text);
    fill(&s, 1, 2, 1, 0);
    s.program.steps = INT32_MAX / 2 + 1;
    CHECK(nb_sim_run(&s.program, &s.plan, &s.cost, &s.result, &more) == -EINVAL, "a cell too many is accepted");
    CHECK(strstr(more.text, "2 tensors, 1073741824 steps") != NULL, "%s", more.text);
}

// Each part of an operation's cost can exceed the time limit.
static void test_time_limit(void) {
    static struct scene s;
    double *const costs[] = {&s.cost.fixed_ns,    &s.cost.alpha_ns,       &s.cost.host_alpha_ns,
                             &s.cost.byte_ns,     &s.cost.host_byte_ns,   &s.cost.copy_byte_ns,
                             &s.cost.add_byte_ns, &s.cost.encode_byte_ns, &s.cost.decode_byte_ns};
    for (size_t i = 0; i < sizeof costs / sizeof costs[0]; i++) {
        fill(&s, 1, 2, 1, 0);
        s.plan.buckets = 1;
        s.bucket_of[1] = 0;
        s.cost.algorithm = NB_SIM_TWO_LEVEL;
        s.cost.ranks_per_host = 2;
        run_successfully(&s);
        *costs[i] = (double)NB_SIM_NS_MAX + 1;
        int rc = run(&s);
        CHECK(rc == -EOVERFLOW, "part %zu: %d", i, rc);
    }
    fill(&s, 1, 1, 1, 0);
    s.cost.fixed_ns = (double)NB_SIM_NS_MAX;
    run_successfully(&s);
    CHECK(s.ops[0].done_ns - s.ops[0].start_ns == NB_SIM_NS_MAX, "%lld", (long long)s.ops[0].done_ns);
}

int main(void) {
    test_closed_forms();
    test_other_costs();
    test_link_sharing();
    test_fractions_of_ns();
    test_last_rank_starts_operations();
    test_horovod_rule();
    test_fusion_looks_ahead();
    test_submit_times_of_fused_operations();
    test_paper2020_rule();
    test_bucket_order();
    test_invalid_input();
    test_cell_limit();
    test_time_limit();
    for (uint32_t seed = 1; seed <= 40; seed++) {
        test_rules(seed);
    }
    return 0;
}
