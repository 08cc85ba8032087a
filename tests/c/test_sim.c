// The what-if engine: closed forms by hand, the limits of each rule, conservation of bytes, and repeatable results.
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

static void wire_up(struct scene *s, int ranks, int tensors, int steps) {
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

// Each rank: every tensor after `work_ns`, the wait, the end.
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
    wire_up(s, ranks, tensors, steps);
}

static int go(struct scene *s) {
    struct nb_error err = {0};
    int rc = nb_sim_run(&s->program, &s->plan, &s->cost, &s->result, &err);
    CHECK((rc == 0) == (err.code == 0), "%d but %d: %s", rc, err.code, err.text);
    return rc;
}

static void play(struct scene *s) {
    int rc = go(s);
    CHECK(rc == 0, "failed: %d", rc);
}

// One bucket of 4000 bytes among 4 ranks, 2 ns a byte, 7 a step, 0.5 a byte added, all alone from 10 on.
static int64_t one(enum nb_sim_algorithm algorithm, int size, int inside, bool pipelined) {
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
    play(&s);
    CHECK(s.result.count == 1 && s.ops[0].start_ns == 10, "%d from %lld", s.result.count, (long long)s.ops[0].start_ns);
    return s.ops[0].done_ns - s.ops[0].start_ns;
}

static void closed_forms(void) {
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
        {"alone", NB_SIM_RING, 1, 1, true, 0},
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
        int64_t ns = one(forms[i].algorithm, forms[i].size, forms[i].inside, forms[i].pipelined);
        CHECK(ns == forms[i].ns, "%s: %lld ns, by hand %lld", forms[i].name, (long long)ns, (long long)forms[i].ns);
    }
}

// What an operation has beside steps and bytes: copies of more than one tensor, a codec, a launch, a table of sums.
static void parts(void) {
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
    play(&s);
    // 2000 bytes: in and out 1200 + 700, 11, three quarters of 500 twice, three sums of 500 bytes: 250 each
    CHECK(s.ops[0].agreed_ns == 50 && s.ops[0].done_ns == 50 + 1200 + 11 + 750 + 750 + 700, "%lld",
          (long long)s.ops[0].done_ns);
    CHECK(s.ops[0].wire_bytes == 750, "%lld", (long long)s.ops[0].wire_bytes);
    s.bytes[0] = 7000;
    s.cost.whole_sums = false;
    play(&s);
    // 2000 bytes after compression, 500 of them each: as before; then the last slope, beyond the table
    CHECK(s.ops[0].done_ns == 50 + 4800 + 11 + 3000 + 750 + 2800, "%lld", (long long)s.ops[0].done_ns);
    s.cost.ratio = 1;
    s.cost.whole_sums = true;
    play(&s);
    CHECK(s.ops[0].done_ns == 50 + 4800 + 11 + 12000 + 3 * 1000 + 2800, "%lld", (long long)s.ops[0].done_ns);
    s.cost.add.clamped = true;
    play(&s);
    CHECK(s.ops[0].done_ns == 50 + 4800 + 11 + 12000 + 3 * 500 + 2800, "%lld", (long long)s.ops[0].done_ns);
}

// Two of 1500 ns on the wire, ready at 10 and 20.
static void sharing(void) {
    static struct scene s;
    fill(&s, 1, 2, 1, 0);
    s.cost.byte_ns = 1;
    play(&s);
    CHECK(s.ops[0].done_ns == 1510 && s.ops[1].start_ns == 1510 && s.ops[1].done_ns == 3010,
          "one after the other: %lld", (long long)s.ops[1].done_ns);
    s.plan.in_flight = 2;
    play(&s);
    CHECK(s.ops[1].start_ns == 20 && s.ops[0].done_ns == 3000 && s.ops[1].done_ns == 3010, "together: %lld and %lld",
          (long long)s.ops[0].done_ns, (long long)s.ops[1].done_ns);
    s.cost.contention = 2 * NB_SIM_CONTENTION_ONE;
    s.work_ns[3] = 5;
    play(&s);
    CHECK(s.ops[1].start_ns == 30 && s.reached_ns[3] == s.ops[1].done_ns + 5, "twice the compute while it sends: %lld",
          (long long)s.ops[1].start_ns);
}

// A third of a link leaves fractions of a ns: an operation is over at the first whole one, whatever else happens before.
static void fractions(void) {
    static struct scene s;
    fill(&s, 1, 3, 1, 0);
    s.cost.byte_ns = 1;
    s.plan.in_flight = 3;
    s.work_ns[2] = 5;
    s.work_ns[3] = 4462;
    play(&s);
    // 1490 and 1500 are left at 20, 1487.5 at 25: 4462.5 more, of which 4462 have passed where the rank begins to wait
    CHECK(s.ops[2].start_ns == 25 && s.reached_ns[3] == 4487 && s.ops[0].done_ns == 4488, "at %lld",
          (long long)s.ops[0].done_ns);
}

static void last_rank(void) {
    static struct scene s;
    fill(&s, 2, 1, 2, 0);
    s.cost.byte_ns = 1;
    s.work_ns[3] = 100;           // rank 0, second step
    s.work_ns[s.starts[1]] = 400; // rank 1, first step
    play(&s);
    CHECK(s.ops[0].start_ns == 400 && s.submit_ns[0] == 10 && s.submit_ns[1] == 400, "%lld",
          (long long)s.ops[0].start_ns);
    CHECK(s.ops[1].start_ns == 1905 + 100 && s.submit_ns[3] == 1905 + 10, "%lld", (long long)s.ops[1].start_ns);
}

// Every byte travels once a step; operations of a step are submitted in it and waited for.
static void conserved(const struct scene *s) {
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

static void rules(uint32_t seed) {
    static struct scene s;
    static struct scene again;
    fill(&s, RANKS, TENSORS, STEPS, seed);
    s.cost.byte_ns = 0.3;
    s.cost.alpha_ns = 11;
    s.plan.in_flight = 1 + (int)(seed % 3);
    for (int rule = NB_SIM_EXPLICIT; rule <= NB_SIM_PAPER2020; rule++) {
        s.plan.rule = (enum nb_sim_rule)rule;
        play(&s);
        conserved(&s);
        again = s;
        play(&s);
        CHECK(s.result.count == again.result.count &&
                  memcmp(s.ops, again.ops, (size_t)s.result.count * sizeof s.ops[0]) == 0,
              "rule %d: another outcome of the same", rule);
        for (int i = 0; i < s.result.count && rule == NB_SIM_HOROVOD; i++) {
            CHECK(s.ops[i].bytes <= s.plan.fusion_bytes || s.ops[i].members == 1, "%lld bytes of %lld tensors",
                  (long long)s.ops[i].bytes, (long long)s.ops[i].members);
        }
    }
}

static void fuses(const struct scene *s, int first, const int64_t *bytes, int count) {
    CHECK(s->result.count == first + count, "%d operations", s->result.count);
    for (int i = 0; i < count; i++) {
        CHECK(s->ops[first + i].bytes == bytes[i], "operation %d: %lld bytes", i, (long long)s->ops[first + i].bytes);
    }
}

// Tensors 7, 6, … 0 are ready at 10, 20, … 80; the timer is at 100.
static void horovod(void) {
    static struct scene s;
    const int64_t sizes[] = {1200, 100, 300, 600, 400, 200, 500, 300}; // of 0 to 7
    fill(&s, 1, 8, 1, 0);
    memcpy(s.bytes, sizes, sizeof sizes);
    s.plan.rule = NB_SIM_HOROVOD;
    play(&s);
    // 300 + 500 + 200; 400 + 600; 300 + 100, for 1200 is more than all; 1200 alone
    fuses(&s, 0, (const int64_t[]){1000, 1000, 400, 1200}, 4);
    CHECK(s.ops[0].agreed_ns == 100 && s.ops[3].agreed_ns == 100, "at %lld", (long long)s.ops[0].agreed_ns);
    s.kinds[6] =
        1; // 300, then 500 of another type is passed over, 200, 400; and 500 alone, for 600 would pass the limit
    play(&s);
    fuses(&s, 0, (const int64_t[]){900, 500, 1000, 1200}, 4);
    s.plan.cycle_ns = 35; // 300 + 500 + 200 at 35; 400 + 600 + … at 70; the last at 105
    s.kinds[6] = 0;
    play(&s);
    fuses(&s, 0, (const int64_t[]){1000, 1000, 400, 1200}, 4);
    CHECK(s.ops[0].agreed_ns == 35 && s.ops[1].agreed_ns == 70 && s.ops[3].agreed_ns == 105, "three wakes");
}

// Looked for behind what is passed over, while that would still fit: 700 bytes of another type may, 701 may not.
static void look_ahead(void) {
    static struct scene s;
    for (int more = 0; more < 2; more++) {
        const int64_t sizes[] = {200, 700 + more, 300}; // of 0 to 2
        const int64_t apart[] = {500 - 200 * more, 700 + more, 200};
        fill(&s, 1, 3, 1, 0);
        memcpy(s.bytes, sizes, sizeof sizes);
        s.kinds[1] = 1;
        s.plan.rule = NB_SIM_HOROVOD;
        play(&s);
        fuses(&s, 0, apart, 2 + more);
    }
}

// Ranks have their tensors in another order: each has submitted what is fused with the last of its own.
static void fused_submits(void) {
    static struct scene s;
    fill(&s, 2, 2, 1, 0);
    for (size_t i = 0; i < sizeof s.submit_ns / sizeof s.submit_ns[0]; i++) {
        s.submit_ns[i] = INT64_MAX; // the caller's memory may hold anything
    }
    s.codes[s.starts[1]] = 0; // rank 1: tensor 0 at 50, tensor 1 at 60; rank 0: tensor 1 at 10, tensor 0 at 20
    s.codes[s.starts[1] + 1] = 1;
    s.work_ns[s.starts[1]] = 50;
    s.plan.rule = NB_SIM_HOROVOD;
    s.plan.fusion_bytes = 4000;
    play(&s);
    fuses(&s, 0, (const int64_t[]){2000}, 1);
    CHECK(s.submit_ns[0] == 20 && s.submit_ns[1] == 60, "at %lld and %lld", (long long)s.submit_ns[0],
          (long long)s.submit_ns[1]);
}

// Checked on arrival, after adding: above the limit; the gap of a late tensor does not send the others before it.
static void paper2020(void) {
    static struct scene s;
    fill(&s, 1, 4, 1, 0);
    s.plan.rule = NB_SIM_PAPER2020;
    s.bytes[3] = 900;
    s.bytes[2] = 900;
    s.bytes[1] = 10;
    s.bytes[0] = 10;
    s.work_ns[3] = 500;
    play(&s);
    fuses(&s, 0, (const int64_t[]){1800, 20}, 2);
    CHECK(s.ops[0].agreed_ns == 20 && s.ops[1].agreed_ns == 530, "at %lld and %lld", (long long)s.ops[0].agreed_ns,
          (long long)s.ops[1].agreed_ns);
}

// A bucket that is whole before those in front of it waits for them under one rule, and does not under the other.
static void order_of_buckets(void) {
    static struct scene s;
    fill(&s, 1, 3, 1, 0);
    play(&s);
    CHECK(s.ops[0].bucket == 2 && s.ops[2].bucket == 0 && s.ops[0].agreed_ns == 10, "as they are ready");
    s.plan.rule = NB_SIM_DDP;
    play(&s);
    CHECK(s.ops[0].bucket == 0 && s.ops[2].bucket == 2 && s.ops[0].agreed_ns == 30, "in order");
}

static void refused(void) {
    static struct scene s;
    fill(&s, 1, 2, 1, 0);
    s.codes[1] = 1;
    CHECK(go(&s) == -EINVAL, "a tensor twice");
    fill(&s, 1, 2, 1, 0);
    s.codes[2] = NB_SIM_MARK;
    CHECK(go(&s) == -EINVAL, "no wait");
    fill(&s, 1, 2, 1, 0);
    s.program.steps = 2;
    CHECK(go(&s) == -EINVAL, "a step too few");
    fill(&s, 1, 2, 1, 0);
    s.bucket_of[0] = 2;
    CHECK(go(&s) == -EINVAL, "no such bucket");
    fill(&s, 1, 2, 1, 0);
    s.plan.in_flight = NB_SIM_IN_FLIGHT_MAX + 1;
    CHECK(go(&s) == -EINVAL, "too many in flight");
    fill(&s, 1, 2, 1, 0);
    s.cost.ratio = 0;
    CHECK(go(&s) == -EINVAL, "nothing is left");
    fill(&s, 1, 2, 1, 0);
    s.bytes[0] = -1;
    CHECK(go(&s) == -EINVAL, "fewer than no bytes");
    fill(&s, 1, 2, 1, 0);
    s.cost.byte_ns = 1e15;
    CHECK(go(&s) == -EOVERFLOW, "centuries");
}

// Steps times tensors may be as large as INT32_MAX; one more is refused.
static void most_cells(void) {
    static struct scene s;
    struct nb_error most = {0};
    struct nb_error more = {0};
    fill(&s, 1, 1, 1, 0);
    s.program.steps = INT32_MAX;
    CHECK(nb_sim_run(&s.program, &s.plan, &s.cost, &s.result, &most) == -EINVAL, "the items are of one step");
    CHECK(strstr(most.text, "the list of items ends before the step does") != NULL, "%s", most.text);
    fill(&s, 1, 2, 1, 0);
    s.program.steps = INT32_MAX / 2 + 1;
    CHECK(nb_sim_run(&s.program, &s.plan, &s.cost, &s.result, &more) == -EINVAL, "one cell too many");
    CHECK(strstr(more.text, "2 tensors, 1073741824 steps") != NULL, "%s", more.text);
}

// Any part of an operation may be too long.
static void too_long(void) {
    static struct scene s;
    double *const parts_of[] = {&s.cost.fixed_ns,    &s.cost.alpha_ns,       &s.cost.host_alpha_ns,
                                &s.cost.byte_ns,     &s.cost.host_byte_ns,   &s.cost.copy_byte_ns,
                                &s.cost.add_byte_ns, &s.cost.encode_byte_ns, &s.cost.decode_byte_ns};
    for (size_t i = 0; i < sizeof parts_of / sizeof parts_of[0]; i++) {
        fill(&s, 1, 2, 1, 0);
        s.plan.buckets = 1;
        s.bucket_of[1] = 0;
        s.cost.algorithm = NB_SIM_TWO_LEVEL;
        s.cost.ranks_per_host = 2;
        play(&s);
        *parts_of[i] = (double)NB_SIM_NS_MAX + 1;
        int rc = go(&s);
        CHECK(rc == -EOVERFLOW, "part %zu: %d", i, rc);
    }
    fill(&s, 1, 1, 1, 0);
    s.cost.fixed_ns = (double)NB_SIM_NS_MAX;
    play(&s);
    CHECK(s.ops[0].done_ns - s.ops[0].start_ns == NB_SIM_NS_MAX, "%lld", (long long)s.ops[0].done_ns);
}

int main(void) {
    closed_forms();
    parts();
    sharing();
    fractions();
    last_rank();
    horovod();
    look_ahead();
    fused_submits();
    paper2020();
    order_of_buckets();
    refused();
    most_cells();
    too_long();
    for (uint32_t seed = 1; seed <= 40; seed++) {
        rules(seed);
    }
    return 0;
}
