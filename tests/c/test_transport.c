// Transport suite for all networks: mem (both kinds), tcp and ofi over IPv4 and IPv6. It also runs ofi over a test
// double of libfabric, with 4 and with 8 bytes of completion data. Usage: test_transport [NETWORK [SEED]].
// NETBOTTLENECK_LIBFABRIC and NETBOTTLENECK_PROVIDER choose the library and the provider.
#include <errno.h>
#include <pthread.h>

#include "flows.h"
#include "probe.h"
#ifdef NB_HAVE_OFI
#include "ofi_double.h"
#else
static void double_begin(uint64_t seed, size_t data_bytes) {
    (void)seed;
    (void)data_bytes;
}

static void double_end(void) {
}
#endif

enum { BLOCK = 16 * 1024, BLOCKS_MAX = 24, LONG_PASSES = 1000, BOOT_MS = 10000 };

struct network {
    const char *name;
    const char *ops;
    const char *bind;
    int seeds;      // of random flows
    int data_bytes; // of completion data, with the double of libfabric; 0: without it
};

struct suite {
    const struct nb_lane_ops *ops;
    const char *bind;
    bool is_mem;
    struct nb_boot boots[2][FLOWS_RANKS_MAX]; // of 2 and of 3 ranks
};

struct joiner {
    struct nb_boot *boot;
    struct nb_boot_config config;
    struct nb_listener *listener;
    char address[NB_SOCK_TEXT];
};

static void *join_main(void *arg) {
    struct joiner *joiner = arg;
    struct nb_error err = {0};
    bool first = joiner->config.rank == 0;
    int rc = nb_boot_join(joiner->boot, &joiner->config, first ? joiner->listener : NULL,
                          first ? NULL : joiner->address, &err);
    CHECK(rc == 0, "rank %d: %s", joiner->config.rank, err.text);
    return NULL;
}

static void boots_open(struct nb_boot *boots, int size) {
    static const unsigned char secret[] = "a secret of this test alone";
    struct joiner joiners[FLOWS_RANKS_MAX];
    pthread_t threads[FLOWS_RANKS_MAX];
    struct nb_listener listener;
    struct nb_error err = {0};
    for (int rank = 0; rank < size; rank++) {
        struct nb_boot_config config = {.rank = rank,
                                        .size = size,
                                        .timeout_ms = BOOT_MS,
                                        .secret = secret,
                                        .secret_bytes = sizeof secret,
                                        .tag = "test"};
        joiners[rank] = (struct joiner){.boot = &boots[rank], .config = config, .listener = &listener};
    }
    int rc = nb_listener_open(&listener, &joiners[0].config, "127.0.0.1", &err);
    CHECK(rc == 0, "listener: %s", err.text);
    for (int rank = 0; rank < size; rank++) {
        nb_sock_format(&listener.addr, joiners[rank].address);
        CHECK(pthread_create(&threads[rank], NULL, join_main, &joiners[rank]) == 0, "thread");
    }
    for (int rank = 0; rank < size; rank++) {
        CHECK(pthread_join(threads[rank], NULL) == 0, "thread");
    }
    nb_listener_close(&listener);
}

// Opens the ranks of a plan on the suite's network.
static struct flow_world *world_open(struct suite *suite, struct flow_plan plan) {
    struct flow_world *world = calloc(1, sizeof *world);
    struct nb_error err = {0};
    CHECK(world != NULL, "memory");
    world->ops = suite->ops;
    world->library = getenv("NETBOTTLENECK_LIBFABRIC");
    world->provider = getenv("NETBOTTLENECK_PROVIDER");
    world->plan = plan;
    world->boots = suite->is_mem ? NULL : suite->boots[plan.size - 2];
    CHECK(nb_sock_parse(suite->bind, &world->bind, &err) == 0, "%s", err.text);
    int rc = flows_open(world, &err);
    CHECK(rc == 0, "open: %s", err.text);
    return world;
}

static void world_close(struct flow_world *world) {
    flows_close(world);
    free(world);
}

struct runner {
    struct flow_world *world;
    struct flow_node *node;
    atomic_int *done;
};

static void *runner_main(void *arg) {
    const struct runner *runner = arg;
    struct flow_node *node = runner->node;
    int size = runner->world->plan.size;
    int64_t deadline = flows_deadline();
    bool counted = false;
    while (atomic_load(runner->done) < size) {
        bool more = flows_step(node);
        if (!counted && flows_done(node)) {
            counted = true;
            atomic_fetch_add(runner->done, 1);
            for (int rank = 0; rank < size; rank++) {
                nb_loop_wake(&runner->world->nodes[rank].loop);
            }
        }
        int64_t left_ms = (deadline - nb_now_ns()) / 1000000;
        CHECK(left_ms > 0, "%s seed %llu: rank %d hangs: %d of %d flows finished", runner->world->ops->name,
              (unsigned long long)node->plan->seed, node->rank, node->finished, node->sides_count);
        if (!more && atomic_load(runner->done) < size && nb_lanes_arm(node->lanes) == 0) {
            (void)nb_loop_wait(&node->loop, (int)left_ms);
        }
    }
    return NULL;
}

static void test_random_flows(struct suite *suite, uint64_t seed) {
    struct flow_plan plan;
    flows_plan(&plan, seed, BLOCK, BLOCKS_MAX);
    struct flow_world *world = world_open(suite, plan);
    struct runner runners[FLOWS_RANKS_MAX];
    pthread_t threads[FLOWS_RANKS_MAX];
    atomic_int done = 0;
    for (int rank = 0; rank < plan.size; rank++) {
        runners[rank] = (struct runner){.world = world, .node = &world->nodes[rank], .done = &done};
        CHECK(pthread_create(&threads[rank], NULL, runner_main, &runners[rank]) == 0, "thread");
    }
    for (int rank = 0; rank < plan.size; rank++) {
        CHECK(pthread_join(threads[rank], NULL) == 0, "thread");
    }
    world_close(world);
}

static void progress_all(struct flow_world *world) {
    for (int rank = 0; rank < world->plan.size; rank++) {
        if (world->nodes[rank].lanes != NULL) {
            flows_progress(&world->nodes[rank]);
        }
    }
}

static void progress_long(struct flow_world *world) {
    for (int i = 0; i < LONG_PASSES; i++) {
        progress_all(world);
    }
}

#define PROGRESS_UNTIL(world, cond)                                                                                    \
    for (int64_t deadline = flows_deadline(); !(cond);) {                                                              \
        progress_all(world);                                                                                           \
        CHECK(nb_now_ns() < deadline, "%s: timed out: " #cond, (world)->ops->name);                                    \
    }

static void progress_until_ready(struct flow_world *world) {
    PROGRESS_UNTIL(world,
                   nb_lanes_peer_ready(world->nodes[0].lanes, 1) && nb_lanes_peer_ready(world->nodes[1].lanes, 0));
}

static struct flow_spec spec_of(int from, int to, uint64_t op, uint32_t blocks) {
    return (struct flow_spec){.from = from,
                              .to = to,
                              .op = op,
                              .blocks = blocks,
                              .full = blocks,
                              .block_bytes = BLOCK,
                              .bytes = (size_t)blocks * BLOCK - 5,
                              .step = blocks};
}

static struct flow_plan plan_of(uint64_t seed, int lanes) {
    return (struct flow_plan){
        .seed = seed, .size = 2, .lanes = lanes, .segment_bytes = 2 * BLOCK, .mapped = seed % 2 == 0};
}

static void add_all(struct flow_node *node) {
    for (int i = 0; i < node->sides_count; i++) {
        flows_add(&node->sides[i]);
    }
}

static void test_higher_priority_finishes_first(struct suite *suite, uint64_t seed) {
    struct flow_plan plan = plan_of(seed, 1);
    plan.mapped = true;
    plan.count = 2;
    plan.specs[0] = spec_of(0, 1, 1, 48);
    plan.specs[1] = spec_of(0, 1, 2, 8);
    plan.specs[1].priority = 3;
    struct flow_world *world = world_open(suite, plan);
    struct flow_node *sender = &world->nodes[0];
    progress_until_ready(world);
    add_all(&world->nodes[1]);
    add_all(sender);
    progress_long(world); // RMA: receives the credits
    for (int i = 0; i < 2; i++) {
        for (uint32_t block = 0; block < sender->sides[i].spec->blocks; block++) {
            nb_lanes_ready(sender->lanes, &sender->sides[i].flow, block);
        }
    }
    nb_lanes_push(sender->lanes, 1);
    PROGRESS_UNTIL(world, flows_done(sender) && flows_done(&world->nodes[1]));
    CHECK(sender->landing[0] == 2 && world->nodes[1].landing[0] == 2, "op %llu finished before the urgent one",
          (unsigned long long)world->nodes[1].landing[0]);
    world_close(world);
}

static void remap(struct flow_node *node, struct flow_plan plan) {
    struct nb_error err = {0};
    nb_lanes_unmap(node->lanes, node->arena);
    CHECK(nb_lanes_map(node->lanes, node->arena, node->arena_bytes, &err) == 0, "seed %llu: map: %s",
          (unsigned long long)plan.seed, err.text);
}

// Memory is unmapped between operations and mapped again under the same number. A credit that arrives before the lane's
// announcement waits for it; it does not use the previous memory of that number.
static void test_remapped_memory(struct suite *suite, uint64_t seed) {
    struct flow_plan plan = plan_of(seed, 2);
    plan.mapped = true;
    plan.count = FLOWS_MAX;
    for (int i = 0; i < FLOWS_MAX; i++) {
        plan.specs[i] = spec_of(i % 2, 1 - i % 2, 1 + (uint64_t)i, 12);
    }
    struct flow_world *world = world_open(suite, plan);
    progress_until_ready(world);
    for (int i = 0; i < FLOWS_MAX; i++) {
        struct flow_side *out = &world->nodes[i % 2].sides[i];
        struct flow_side *in = &world->nodes[1 - i % 2].sides[i];
        flows_add(in);
        flows_add(out);
        flows_ready(out, 12);
        PROGRESS_UNTIL(world, out->finished && in->finished);
        remap(&world->nodes[0], plan);
        remap(&world->nodes[1], plan);
    }
    PROGRESS_UNTIL(world, flows_done(&world->nodes[0]) && flows_done(&world->nodes[1]));
    world_close(world);
}

// Too many mappings are refused with a message, and unmapped memory no longer counts.
static void test_limit_of_mapped_memory(struct suite *suite) {
    enum { PAGES = 64, PAGE = 4096 };
    struct flow_plan plan = plan_of(0, 1);
    plan.count = 1;
    plan.specs[0] = spec_of(0, 1, 1, 12);
    struct flow_world *world = world_open(suite, plan);
    struct nb_lanes *lanes = world->nodes[0].lanes;
    struct nb_error err = {0};
    char *memory = aligned_alloc(PAGE, (size_t)PAGES * PAGE);
    CHECK(memory != NULL, "memory");
    int mapped = 0;
    while (mapped < PAGES && nb_lanes_map(lanes, memory + (size_t)mapped * PAGE, PAGE, &err) == 0) {
        mapped++;
    }
    if (suite->ops->kind == NB_LANE_STREAM) {
        CHECK(mapped == PAGES, "%s", err.text);
    } else {
        CHECK(mapped < PAGES && err.code == -ENOSPC && strstr(err.text, "further models are copied") != NULL,
              "%d pages are mapped: %s", mapped, err.text);
    }
    for (int i = 0; i < PAGES && mapped < PAGES; i++) {
        nb_lanes_unmap(lanes, memory + (size_t)(i % mapped) * PAGE);
        CHECK(nb_lanes_map(lanes, memory + (size_t)(i % mapped) * PAGE, PAGE, &err) == 0, "again: %s", err.text);
    }
    for (int i = 0; i < mapped; i++) {
        nb_lanes_unmap(lanes, memory + (size_t)i * PAGE);
    }
    free(memory);
    world_close(world);
}

// Segments of an operation that the receiver has not started do not land before it starts.
static void test_late_receiver(struct suite *suite, uint64_t seed) {
    struct flow_plan plan = plan_of(seed, 2);
    plan.count = 2;
    plan.specs[0] = spec_of(0, 1, 1, 12);
    plan.specs[1] = spec_of(0, 1, 2, 12);
    plan.specs[1].staged = true;
    struct flow_world *world = world_open(suite, plan);
    struct flow_node *sender = &world->nodes[0];
    struct flow_node *receiver = &world->nodes[1];
    progress_until_ready(world);
    add_all(sender);
    flows_ready(&sender->sides[0], 12);
    flows_ready(&sender->sides[1], 12);
    progress_long(world);
    CHECK(receiver->sides[0].landed == 0 && receiver->sides[1].landed == 0, "blocks landed before the flow was added");
    flows_add(&receiver->sides[0]);
    PROGRESS_UNTIL(world, receiver->sides[0].finished || receiver->sides[0].landed > 0);
    flows_add(&receiver->sides[1]);
    PROGRESS_UNTIL(world, flows_done(sender) && flows_done(receiver));
    world_close(world);
}

// Returns a world of two ranks in which one flow, from rank 0 to rank 1, has started to land.
static struct flow_world *cancel_world(struct suite *suite, uint64_t seed, bool staged) {
    struct flow_plan plan = plan_of(seed, 2);
    plan.count = 1;
    plan.specs[0] = spec_of(0, 1, 1, 96);
    plan.specs[0].staged = staged;
    struct flow_world *world = world_open(suite, plan);
    struct flow_side *out = &world->nodes[0].sides[0];
    struct flow_side *in = &world->nodes[1].sides[0];
    world->nodes[0].may_lose = true;
    world->nodes[1].may_lose = true;
    progress_until_ready(world);
    flows_add(in);
    flows_add(out);
    flows_ready(out, 96);
    PROGRESS_UNTIL(world, in->landed >= 4);
    return world;
}

static void test_cancel_receiver(struct suite *suite, uint64_t seed) {
    struct flow_world *world = cancel_world(suite, seed, false);
    struct flow_side *in = &world->nodes[1].sides[0];
    if (!in->finished) {
        nb_lanes_cancel(world->nodes[1].lanes, &in->flow);
        in->finished = true; // consume() would fail on an arrival
        memset(in->memory, 0x77, in->memory_bytes);
        progress_long(world);
        for (size_t i = 0; i < in->memory_bytes; i++) {
            CHECK(in->memory[i] == 0x77, "seed %llu: byte %zu was written after cancel", (unsigned long long)seed, i);
        }
    }
    world_close(world);
}

static void test_cancel_sender(struct suite *suite, uint64_t seed) {
    struct flow_world *world = cancel_world(suite, seed, seed % 3 == 0);
    struct flow_side *out = &world->nodes[0].sides[0];
    if (!out->finished) {
        nb_lanes_cancel(world->nodes[0].lanes, &out->flow);
        memset(out->memory, 0x55, out->memory_bytes); // data in flight were read before this: consume() compares them
        progress_long(world);
    }
    world_close(world);
}

// A rank leaves during flows in both directions.
static void test_peer_leaves(struct suite *suite, uint64_t seed) {
    struct flow_plan plan = plan_of(seed, 2);
    plan.count = 2;
    plan.specs[0] = spec_of(0, 1, 1, 96);
    plan.specs[1] = spec_of(1, 0, 2, 96);
    struct flow_world *world = world_open(suite, plan);
    struct flow_node *staying = &world->nodes[0];
    struct flow_node *leaving = &world->nodes[1];
    staying->may_lose = true;
    leaving->may_lose = true;
    progress_until_ready(world);
    for (int rank = 0; rank < 2; rank++) {
        add_all(&world->nodes[rank]);
        flows_ready(&world->nodes[rank].sides[rank], 96);
    }
    PROGRESS_UNTIL(world, staying->sides[1].landed >= 4);
    flows_node_close(leaving);
    if (strcmp(suite->ops->name, "ofi") != 0) { // on libfabric, the control connection reports it
        PROGRESS_UNTIL(world, staying->lost == plan.lanes);
        CHECK(staying->left_last == 0, "%d lanes are reported as left", staying->left_last);
        uint32_t landed = staying->sides[1].landed;
        progress_long(world);
        CHECK(staying->sides[1].landed == landed, "blocks of a lost peer landed");
        CHECK(staying->lost == plan.lanes, "lane_lost was called %d times for %d lanes", staying->lost, plan.lanes);
    }
    progress_long(world);
    world_close(world);
}

// One of two lanes breaks while idle: both ranks are notified, and the other lane carries later data.
static void test_idle_lane_breaks(struct suite *suite, uint64_t seed) {
    struct flow_plan plan = plan_of(seed, 2);
    plan.count = 2;
    plan.specs[0] = spec_of(0, 1, 1, 12);
    plan.specs[1] = spec_of(1, 0, 2, 12);
    struct flow_world *world = world_open(suite, plan);
    progress_until_ready(world);
    progress_long(world);
    for (int rank = 0; rank < 2; rank++) {
        world->nodes[rank].may_lose = true;
    }
    nb_mem_break(world->net, 0, 1, (int)(seed % 2));
    PROGRESS_UNTIL(world, world->nodes[0].lost == 1 && world->nodes[1].lost == 1);
    CHECK(world->nodes[0].left_last == 1 && world->nodes[1].left_last == 1, "lanes_left is not 1");
    for (int rank = 0; rank < 2; rank++) {
        add_all(&world->nodes[rank]);
        flows_ready(&world->nodes[rank].sides[rank], 12);
    }
    PROGRESS_UNTIL(world, flows_done(&world->nodes[0]) && flows_done(&world->nodes[1]));
    world_close(world);
}

// A lane stops moving data without a notification: it is given up, and the other lane carries its segments. If both
// lanes stop, none is given up.
static void test_silent_lane_is_given_up(struct suite *suite, uint64_t seed, bool both) {
    enum { TIMEOUT_MS = 400, WAIT_MS = 600 };
    struct flow_world *world = calloc(1, sizeof *world);
    struct nb_error err = {0};
    CHECK(world != NULL, "memory");
    world->ops = suite->ops;
    world->library = getenv("NETBOTTLENECK_LIBFABRIC");
    world->provider = getenv("NETBOTTLENECK_PROVIDER");
    world->plan = plan_of(seed, 2);
    world->plan.count = 2;
    world->plan.specs[0] = spec_of(0, 1, 1, 96);
    world->plan.specs[1] = spec_of(1, 0, 2, 96);
    world->timeout_ms = TIMEOUT_MS;
    CHECK(flows_open(world, &err) == 0, "open: %s", err.text);
    progress_until_ready(world);
    for (int rank = 0; rank < 2; rank++) {
        world->nodes[rank].may_lose = !both;
        add_all(&world->nodes[rank]);
        flows_ready(&world->nodes[rank].sides[rank], 96);
    }
    PROGRESS_UNTIL(world, world->nodes[1].sides[0].landed >= 4);
    bool finished_early = flows_done(&world->nodes[0]) && flows_done(&world->nodes[1]);
    nb_mem_stall(world->net, 0, 1, (int)(seed % 2));
    if (both) {
        nb_mem_stall(world->net, 0, 1, 1 - (int)(seed % 2));
    }
    int64_t until = both ? nb_now_ns() + (int64_t)WAIT_MS * 1000000 : flows_deadline();
    while (nb_now_ns() < until && (both || !(flows_done(&world->nodes[0]) && flows_done(&world->nodes[1])))) {
        progress_all(world);
        for (int rank = 0; rank < 2; rank++) {
            nb_lanes_tick(world->nodes[rank].lanes, nb_now_ns());
        }
    }
    for (int rank = 0; rank < 2; rank++) {
        CHECK(both || flows_done(&world->nodes[rank]), "seed %llu: rank %d does not finish", (unsigned long long)seed,
              rank);
        CHECK(both || finished_early || world->nodes[rank].lost == 1, "rank %d lost %d lanes", rank,
              world->nodes[rank].lost);
    }
    world_close(world);
}

// Skips the program if this machine does not support the network.
static void require_network(struct suite *suite) {
    struct flow_world *world = calloc(1, sizeof *world);
    struct nb_error err = {0};
    CHECK(world != NULL, "memory");
    world->ops = suite->ops;
    world->library = getenv("NETBOTTLENECK_LIBFABRIC");
    world->provider = getenv("NETBOTTLENECK_PROVIDER");
    world->plan = plan_of(0, 1);
    world->boots = suite->is_mem ? NULL : suite->boots[0];
    CHECK(nb_sock_parse(suite->bind, &world->bind, &err) == 0, "%s", err.text);
    int rc = flows_open(world, &err);
    bool six = suite->bind[0] == '[' && (rc == -EADDRNOTAVAIL || rc == -EAFNOSUPPORT || rc == -ENODEV);
    CHECK(rc == 0 || rc == NB_ENOLIB || six, "%s at %s: %s", suite->ops->name, suite->bind, err.text);
    if (rc != 0) {
        SKIP("%s%s", six ? "no IPv6 on this machine: " : "", err.text);
    }
    world_close(world);
}

static void run_suite(struct suite *suite, int seeds, const char *seed) {
    if (seed != NULL) {
        test_random_flows(suite, strtoull(seed, NULL, 10));
        return;
    }
    int fewer_seeds = seeds / 6 + 1;
    test_limit_of_mapped_memory(suite);
    for (int i = 0; i < fewer_seeds; i++) {
        struct probe_world probe = {.ops = suite->ops, .bind = suite->bind, .seed = (uint64_t)i};
        probe.boots = suite->is_mem ? NULL : suite->boots[0];
        probe_messages(&probe);
        if (suite->ops->kind == NB_LANE_STREAM) {
            probe_segments(&probe);
        }
        if (strcmp(suite->ops->name, "tcp") == 0) {
            probe_immediate_sends(&probe);
        }
        probe_close(&probe);
        test_higher_priority_finishes_first(suite, (uint64_t)i);
        test_remapped_memory(suite, (uint64_t)i);
        test_late_receiver(suite, (uint64_t)i);
        test_cancel_receiver(suite, (uint64_t)i);
        test_cancel_sender(suite, (uint64_t)i);
        test_peer_leaves(suite, (uint64_t)i);
        if (suite->is_mem) {
            test_idle_lane_breaks(suite, (uint64_t)i);
            test_silent_lane_is_given_up(suite, (uint64_t)i, i % 4 == 3);
        }
    }
    for (int i = 0; i < seeds; i++) {
        test_random_flows(suite, (uint64_t)i);
    }
}

// Usage: test_transport NETWORK [SEED]
int main(int argc, char **argv) {
    static const struct network networks[] = {
        {"mem", "mem", "127.0.0.1:0", 40, 0},    {"mem-rma", "mem-rma", "127.0.0.1:0", 40, 0},
        {"tcp", "tcp", "127.0.0.1:0", 24, 0},    {"ofi", "ofi", "127.0.0.1:0", 10, 0},
        {"tcp6", "tcp", "[::1]:0", 12, 0},       {"ofi6", "ofi", "[::1]:0", 5, 0},
        {"double", "ofi", "127.0.0.1:0", 24, 4}, {"double8", "ofi", "127.0.0.1:0", 12, 8}};
    const size_t count = sizeof networks / sizeof *networks;
    size_t i = 0;
    CHECK(argc >= 2, "name one network");
    while (i < count && strcmp(argv[1], networks[i].name) != 0) {
        i++;
    }
    CHECK(i < count, "%s is unknown", argv[1]);
    struct suite *suite = calloc(1, sizeof *suite);
    CHECK(suite != NULL, "memory");
    suite->is_mem = i < 2;
    suite->ops = suite->is_mem ? nb_mem_ops(i == 0 ? NB_LANE_STREAM : NB_LANE_RMA) : nb_transport_find(networks[i].ops);
    suite->bind = networks[i].bind;
    CHECK(suite->ops != NULL, "%s is not built in", networks[i].name);
    for (int size = 2; size <= 3 && !suite->is_mem; size++) {
        boots_open(suite->boots[size - 2], size);
    }
    if (networks[i].data_bytes > 0) {
        double_begin(argc > 2 ? strtoull(argv[2], NULL, 10) : i, (size_t)networks[i].data_bytes);
    }
    require_network(suite);
    run_suite(suite, networks[i].seeds, argc > 2 ? argv[2] : NULL);
    if (networks[i].data_bytes > 0) {
        double_end();
    }
    for (int size = 2; size <= 3 && !suite->is_mem; size++) {
        for (int rank = 0; rank < size; rank++) {
            nb_boot_close(&suite->boots[size - 2][rank]);
        }
    }
    free(suite);
    return 0;
}
