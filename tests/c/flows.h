// Seeded random flows between a few ranks, with the invariants of any network. Every block lands exactly once and
// byte-exact. Nothing outside the buffer is written. After a flow finishes, the scheduler does not touch its buffer.
#ifndef NB_TEST_FLOWS_H
#define NB_TEST_FLOWS_H

#include <errno.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bits.h"
#include "base/clock.h"
#include "base/loop.h"
#include "check.h"
#include "mem/mem.h"
#include "transport/lanes.h"

enum {
    FLOWS_RANKS_MAX = 4,
    FLOWS_MAX = 8,
    FLOWS_PIECES_MAX = 4,
    FLOWS_GAP = 24,       // guard bytes between two pieces of a buffer
    FLOWS_DEADLINE_S = 90 // of one scenario: only a hang takes this long
};

#define FLOWS_GUARD 0xee

static inline uint64_t flows_draw(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static inline uint32_t flows_below(uint64_t *state, uint32_t n) {
    return (uint32_t)(flows_draw(state) % n);
}

// Properties of a flow that both its ends know.
struct flow_spec {
    int from;
    int to;
    uint64_t op;
    int priority;
    uint32_t blocks;
    uint32_t full; // blocks that have bytes; the blocks after them are empty and are never sent
    size_t block_bytes;
    size_t bytes;
    uint32_t step;    // no run crosses a multiple of this many blocks
    bool staged;      // the receiver gives no destination memory: consume() gets the bytes
    bool ready_first; // every block is available before the flow is added
};

struct flow_plan {
    uint64_t seed;
    int size;
    int lanes;
    size_t segment_bytes;
    bool mapped;       // RMA: peers write to the final memory, without staging
    size_t copy_bytes; // flows up to this size finish when they are sent
    int count;
    struct flow_spec specs[FLOWS_MAX];
};

struct flow_node;

// One rank's end of a flow.
struct flow_side {
    struct nb_flow flow;
    const struct flow_spec *spec;
    struct flow_node *node;
    unsigned char *memory; // the pieces, with guard bytes before, between and after them
    size_t memory_bytes;
    size_t cut[FLOWS_PIECES_MAX + 1]; // offset of each piece in the buffer
    int pieces;
    unsigned char *seen; // by block: how often it has landed
    uint32_t *order;     // out: the order in which blocks become ready
    uint32_t ready;
    uint32_t landed;
    bool added;
    bool finished;
};

struct flow_node {
    int rank;
    uint64_t random;
    const struct flow_plan *plan;
    struct nb_loop loop;
    struct nb_lanes *lanes;
    unsigned char *arena;
    size_t arena_bytes;
    struct flow_side sides[FLOWS_MAX];
    int sides_count;
    int finished;
    int lost; // calls of lane_lost
    bool may_fail;
    int failed;              // flows that could not be sent
    struct nb_error failure; // the last failure
    int left_last;           // lanes_left of the last call of lane_lost
    bool may_lose;
    uint64_t landing[FLOWS_MAX * 2]; // operations in the order in which they finished
    void (*on_consume)(struct flow_side *side, uint32_t first, uint32_t count);
    void *on_consume_ctx;
};

struct flow_world {
    const struct nb_lane_ops *ops;
    struct flow_plan plan;
    struct nb_mem_net *net;
    char net_name[NB_MEM_NAME];
    struct nb_boot *boots; // by rank; NULL if the network needs none
    struct nb_sockaddr bind;
    const char *provider;
    const char *library; // path of libfabric; NULL: the default paths
    int timeout_ms;      // 0: the deadline of a scenario
    struct flow_node nodes[FLOWS_RANKS_MAX];
};

// Plans one flow of equal blocks in each direction between two ranks: op 1 from rank 0, op 2 from rank 1.
static inline void flows_plan_crossed(struct flow_plan *plan, uint32_t blocks, size_t block_bytes, bool staged) {
    plan->count = 2;
    for (int i = 0; i < 2; i++) {
        plan->specs[i] = (struct flow_spec){.from = i,
                                            .to = 1 - i,
                                            .op = 1 + (uint64_t)i,
                                            .blocks = blocks,
                                            .full = blocks,
                                            .block_bytes = block_bytes,
                                            .bytes = (size_t)blocks * block_bytes,
                                            .step = blocks,
                                            .staged = staged};
    }
}

NO_TSAN static inline unsigned char flows_byte(uint64_t op, size_t at) {
    return (unsigned char)((op * 37 + at * 11 + at / 253) % 251);
}

// Bytes of an operation's data from offset `at` on.
struct flows_bytes {
    size_t n;
    unsigned char data[4096];
};

// Makes the first of `left` bytes of an operation's data from offset `at` on, as many as there is room for.
NO_TSAN static inline void flows_make(struct flows_bytes *made, uint64_t op, size_t at, size_t left) {
    made->n = left < sizeof made->data ? left : sizeof made->data;
    for (size_t i = 0; i < made->n; i++) {
        made->data[i] = flows_byte(op, at + i);
    }
}

static inline size_t flows_offset(const struct flow_spec *spec, uint32_t block) {
    size_t at = block * spec->block_bytes;
    return at < spec->bytes ? at : spec->bytes;
}

static inline struct flow_side *flows_side(const struct nb_flow *flow) {
    return flow->owner;
}

static inline size_t flows_op_bytes(const struct nb_flow *flow, uint32_t first, uint32_t count) {
    const struct flow_spec *spec = flows_side(flow)->spec;
    CHECK(first + count <= spec->blocks, "blocks %u + %u of %u", first, count, spec->blocks);
    return flows_offset(spec, first + count) - flows_offset(spec, first);
}

static inline uint32_t flows_op_run_limit(const struct nb_flow *flow, uint32_t first, uint32_t count) {
    const struct flow_spec *spec = flows_side(flow)->spec;
    uint32_t left = spec->step - first % spec->step;
    return count < left ? count : left;
}

// Address of byte `at` of the buffer, which lies in piece `piece`.
static inline unsigned char *flows_memory(const struct flow_side *side, int piece, size_t at) {
    return side->memory + (size_t)(piece + 1) * FLOWS_GAP + at;
}

static inline int flows_pieces(const struct flow_side *side, size_t begin, size_t end, struct iovec *iov) {
    int n = 0;
    for (int p = 0; p < side->pieces; p++) {
        size_t low = begin > side->cut[p] ? begin : side->cut[p];
        size_t high = end < side->cut[p + 1] ? end : side->cut[p + 1];
        if (low < high) {
            iov[n++] = (struct iovec){.iov_base = flows_memory(side, p, low), .iov_len = high - low};
        }
    }
    return n;
}

static inline int flows_op_memory(const struct nb_flow *flow, uint32_t first, uint32_t count, struct iovec *iov) {
    const struct flow_side *side = flows_side(flow);
    if (flow->dir == NB_FLOW_IN && side->spec->staged) {
        return 0;
    }
    return flows_pieces(side, flows_offset(side->spec, first), flows_offset(side->spec, first + count), iov);
}

static inline void flows_fill(struct flow_side *side, bool right) {
    memset(side->memory, FLOWS_GUARD, side->memory_bytes);
    for (int p = 0; p < side->pieces && right; p++) {
        struct flows_bytes made;
        for (size_t at = side->cut[p]; at < side->cut[p + 1]; at += made.n) {
            flows_make(&made, side->spec->op, at, side->cut[p + 1] - at);
            memcpy(flows_memory(side, p, at), made.data, made.n);
        }
    }
}

static inline void flows_check(const struct flow_side *side, uint32_t first, uint32_t count) {
    struct iovec iov[FLOWS_PIECES_MAX];
    size_t at = flows_offset(side->spec, first);
    int n = flows_pieces(side, at, flows_offset(side->spec, first + count), iov);
    for (int p = 0; p < n; p++) {
        const unsigned char *bytes = iov[p].iov_base;
        struct flows_bytes want;
        for (size_t done = 0; done < iov[p].iov_len; done += want.n, at += want.n) {
            flows_make(&want, side->spec->op, at, iov[p].iov_len - done);
            size_t i = 0;
            while (memcmp(bytes + done, want.data, want.n) != 0 && bytes[done + i] == want.data[i]) {
                i++;
            }
            CHECK(memcmp(bytes + done, want.data, want.n) == 0,
                  "seed %llu: rank %d, op %llu, byte %zu is %02x, not %02x", (unsigned long long)side->node->plan->seed,
                  side->node->rank, (unsigned long long)side->spec->op, at + i, bytes[done + i], want.data[i]);
        }
    }
}

static inline void flows_check_guards(const struct flow_side *side) {
    for (int p = 0; p <= side->pieces; p++) {
        const unsigned char *gap = side->memory + (size_t)p * FLOWS_GAP + side->cut[p];
        for (int i = 0; i < FLOWS_GAP; i++) {
            CHECK(gap[i] == FLOWS_GUARD, "seed %llu: rank %d, op %llu: guard bytes of piece %d were overwritten",
                  (unsigned long long)side->node->plan->seed, side->node->rank, (unsigned long long)side->spec->op, p);
        }
    }
}

static inline void flows_op_consume(struct nb_flow *flow, uint32_t first, uint32_t count, const void *data,
                                    size_t bytes) {
    struct flow_side *side = flows_side(flow);
    unsigned long long seed = (unsigned long long)side->node->plan->seed;
    CHECK(!side->finished && side->added, "seed %llu: op %llu landed before it was added or after it finished", seed,
          (unsigned long long)flow->op);
    CHECK(bytes == flows_op_bytes(flow, first, count), "seed %llu: %zu bytes", seed, bytes);
    CHECK((data != NULL) == side->spec->staged, "seed %llu: consume of op %llu %s", seed, (unsigned long long)flow->op,
          data != NULL ? "got an unexpected buffer" : "got no buffer");
    for (uint32_t i = 0; i < count; i++) {
        CHECK(++side->seen[first + i] == 1, "seed %llu: op %llu block %u landed twice", seed,
              (unsigned long long)flow->op, first + i);
    }
    if (data != NULL) {
        struct iovec iov[FLOWS_PIECES_MAX];
        size_t at = flows_offset(side->spec, first);
        int n = flows_pieces(side, at, at + bytes, iov);
        const unsigned char *from = data;
        for (int p = 0; p < n; p++) {
            memcpy(iov[p].iov_base, from, iov[p].iov_len);
            from += iov[p].iov_len;
        }
    }
    flows_check(side, first, count);
    side->landed += count;
    if (side->node->on_consume != NULL) {
        side->node->on_consume(side, first, count);
    }
}

static inline void flows_op_finished(struct nb_flow *flow) {
    struct flow_side *side = flows_side(flow);
    CHECK(!side->finished, "seed %llu: op %llu finished twice", (unsigned long long)side->node->plan->seed,
          (unsigned long long)flow->op);
    CHECK(flow->dir == NB_FLOW_OUT || side->landed == side->spec->full,
          "seed %llu: op %llu finished with %u of %u blocks", (unsigned long long)side->node->plan->seed,
          (unsigned long long)flow->op, side->landed, side->spec->full);
    side->finished = true;
    side->node->landing[side->node->finished++] = flow->op;
    flows_check_guards(side);
    if (flow->dir == NB_FLOW_OUT) {
        memset(side->memory, 0x55, side->memory_bytes); // its owner may write to it again
    } else {
        flows_check(side, 0, side->spec->blocks);
    }
}

static inline const struct nb_flow_ops *flows_ops(void) {
    static const struct nb_flow_ops ops = {.bytes = flows_op_bytes,
                                           .run_limit = flows_op_run_limit,
                                           .memory = flows_op_memory,
                                           .consume = flows_op_consume,
                                           .finished = flows_op_finished};
    return &ops;
}

// Draws a random plan: blocks of up to `block_max` bytes, up to `blocks_max` blocks for each flow.
static inline void flows_plan(struct flow_plan *plan, uint64_t seed, size_t block_max, uint32_t blocks_max) {
    uint64_t random = seed * 2 + 1;
    *plan = (struct flow_plan){.seed = seed};
    plan->size = 2 + (int)flows_below(&random, 2);
    plan->lanes = 1 << flows_below(&random, 3);
    plan->mapped = flows_below(&random, 2) == 0;
    plan->copy_bytes = flows_below(&random, 2) * flows_below(&random, 2 * (uint32_t)block_max);
    plan->count = 1 + (int)flows_below(&random, FLOWS_MAX);
    size_t block = block_max >> flows_below(&random, 3);
    plan->segment_bytes = block * (1 + flows_below(&random, 6));
    for (int i = 0; i < plan->count; i++) {
        struct flow_spec *spec = &plan->specs[i];
        spec->op = (uint64_t)i + 1;
        spec->from = (int)flows_below(&random, (uint32_t)plan->size);
        spec->to = (spec->from + 1 + (int)flows_below(&random, (uint32_t)plan->size - 1)) % plan->size;
        spec->priority = (int)flows_below(&random, 3);
        spec->block_bytes = block;
        spec->blocks = 1 + flows_below(&random, blocks_max);
        spec->full = flows_below(&random, 4) == 0 ? 1 + flows_below(&random, spec->blocks) : spec->blocks;
        spec->bytes = spec->full * block - flows_below(&random, (uint32_t)block); // the last block may be short
        spec->step = 1 + flows_below(&random, spec->blocks);
        spec->staged = flows_below(&random, 2) == 0;
        spec->ready_first = flows_below(&random, 3) == 0;
    }
}

static inline void flows_shuffle(uint32_t *order, uint32_t count, uint64_t *random) {
    for (uint32_t i = 0; i < count; i++) {
        order[i] = i;
    }
    for (uint32_t i = count; i > 1; i--) {
        uint32_t j = flows_below(random, i);
        uint32_t kept = order[i - 1];
        order[i - 1] = order[j];
        order[j] = kept;
    }
}

static inline void flows_side_open(struct flow_node *node, const struct flow_spec *spec, size_t *arena_at) {
    struct flow_side *side = &node->sides[node->sides_count++];
    bool out = spec->from == node->rank;
    *side = (struct flow_side){.spec = spec, .node = node};
    side->pieces = 1 + (int)flows_below(&node->random, FLOWS_PIECES_MAX);
    for (int p = 1; p < side->pieces; p++) {
        size_t before = side->cut[p - 1];
        side->cut[p] = before + flows_below(&node->random, (uint32_t)(spec->bytes - before) + 1);
    }
    side->cut[side->pieces] = spec->bytes;
    side->memory = node->arena + *arena_at;
    side->memory_bytes = spec->bytes + (size_t)(side->pieces + 1) * FLOWS_GAP;
    *arena_at += (spec->bytes + (FLOWS_PIECES_MAX + 1) * FLOWS_GAP + 63) / 64 * 64;
    flows_fill(side, out);
    side->seen = calloc(spec->blocks, 1);
    side->order = calloc(spec->blocks, sizeof *side->order);
    side->flow.map = calloc(nb_bits_words(spec->blocks), sizeof(uint64_t));
    CHECK(side->seen != NULL && side->order != NULL && side->flow.map != NULL, "memory");
    flows_shuffle(side->order, spec->full, &node->random);
    side->flow.ops = flows_ops();
    side->flow.dir = out ? NB_FLOW_OUT : NB_FLOW_IN;
    side->flow.peer = out ? spec->to : spec->from;
    side->flow.op = spec->op;
    side->flow.priority = spec->priority;
    side->flow.blocks = spec->blocks;
    side->flow.left = spec->full;
    for (uint32_t i = spec->full; i < spec->blocks && !out; i++) {
        nb_bits_set(side->flow.map, i);
    }
    side->flow.block_bytes = spec->block_bytes;
    side->flow.staged_only = spec->staged && !out;
    side->flow.owner = side;
}

static inline void flows_lane_lost(void *ctx, int peer, int lane, const struct nb_error *why, int lanes_left) {
    struct flow_node *node = ctx;
    CHECK(node->may_lose, "seed %llu: rank %d lost lane %d to %d: %s", (unsigned long long)node->plan->seed, node->rank,
          lane, peer, why->text);
    node->lost++;
    node->left_last = lanes_left;
}

static inline void flows_failed(void *ctx, const struct nb_error *why) {
    struct flow_node *node = ctx;
    CHECK(node->may_fail, "seed %llu: rank %d: %s", (unsigned long long)node->plan->seed, node->rank, why->text);
    node->failure = *why;
    node->failed++;
}

// Returns 0, or the error of nb_lanes_open.
static inline int flows_node_open(struct flow_world *world, int rank, struct nb_error *err) {
    struct flow_node *node = &world->nodes[rank];
    const struct flow_plan *plan = &world->plan;
    *node = (struct flow_node){.rank = rank, .plan = plan, .random = plan->seed * 31 + (uint64_t)rank};
    CHECK(nb_loop_init(&node->loop, err) == 0, "%s", err->text);
    struct nb_lanes_config config = {.ops = world->ops,
                                     .lanes = plan->lanes,
                                     .binds = &world->bind,
                                     .bind_count = 1,
                                     .segment_bytes = plan->segment_bytes,
                                     .in_flight_max = 8 * plan->segment_bytes,
                                     .copy_bytes = plan->copy_bytes,
                                     .lane_lost = flows_lane_lost,
                                     .failed = flows_failed,
                                     .ctx = node};
    config.lane =
        (struct nb_lane_config){.rank = rank,
                                .size = plan->size,
                                .loop = &node->loop,
                                .boot = world->boots != NULL ? &world->boots[rank] : NULL,
                                .timeout_ms = world->timeout_ms > 0 ? world->timeout_ms : FLOWS_DEADLINE_S * 1000,
                                .provider = world->provider,
                                .library = world->net != NULL ? world->net_name : world->library};
    int rc = nb_lanes_open(&node->lanes, &config, err);
    if (rc < 0) {
        return rc;
    }
    for (int i = 0; i < plan->count; i++) {
        node->arena_bytes += (plan->specs[i].bytes + (FLOWS_PIECES_MAX + 1) * FLOWS_GAP + 63) / 64 * 64;
    }
    node->arena = aligned_alloc(4096, (node->arena_bytes / 4096 + 1) * 4096);
    CHECK(node->arena != NULL, "memory");
    size_t at = 0;
    for (int i = 0; i < plan->count; i++) {
        if (plan->specs[i].from == rank || plan->specs[i].to == rank) {
            flows_side_open(node, &plan->specs[i], &at);
        }
    }
    if (plan->mapped) {
        rc = nb_lanes_map(node->lanes, node->arena, node->arena_bytes, err);
        CHECK(rc == 0, "map: %s", err->text);
    }
    return 0;
}

static inline void flows_node_close(struct flow_node *node) {
    node->may_lose = true; // closing one peer of a lane may lose the other peers
    nb_lanes_close(node->lanes);
    node->lanes = NULL;
    for (int i = 0; i < node->sides_count; i++) {
        free(node->sides[i].seen);
        free(node->sides[i].order);
        free(node->sides[i].flow.map);
    }
    free(node->arena);
    nb_loop_fini(&node->loop);
}

// Opens every rank's lanes and peers. The caller sets ops, plan, boots, bind and provider of `world`. Returns 0 or an
// error.
static inline int flows_open(struct flow_world *world, struct nb_error *err) {
    const struct flow_plan *plan = &world->plan;
    bool is_mem = world->ops == nb_mem_ops(NB_LANE_STREAM) || world->ops == nb_mem_ops(NB_LANE_RMA);
    if (is_mem) {
        world->net = nb_mem_net_open(plan->size, plan->lanes, plan->seed);
        CHECK(world->net != NULL, "memory");
        nb_mem_net_name(world->net, world->net_name);
    }
    for (int rank = 0; rank < plan->size; rank++) {
        int rc = flows_node_open(world, rank, err);
        if (rc < 0) {
            return rc;
        }
    }
    for (int from = 0; from < plan->size; from++) {
        size_t bytes = nb_lanes_address_bytes(world->nodes[from].lanes);
        unsigned char *address = malloc(bytes);
        CHECK(address != NULL, "memory");
        nb_lanes_address(world->nodes[from].lanes, address);
        for (int to = 0; to < plan->size; to++) {
            if (to != from) {
                int rc = nb_lanes_peer_open(world->nodes[to].lanes, from, address, err);
                CHECK(rc == 0, "peer %d of %d: %s", from, to, err->text);
            }
        }
        free(address);
    }
    return 0;
}

static inline void flows_close(struct flow_world *world) {
    for (int rank = 0; rank < world->plan.size; rank++) {
        if (world->nodes[rank].lanes != NULL) {
            flows_node_close(&world->nodes[rank]);
        }
    }
    nb_mem_net_close(world->net);
    world->net = NULL;
}

static inline void flows_add(struct flow_side *side) {
    struct flow_node *node = side->node;
    side->added = true;
    if (side->flow.dir == NB_FLOW_OUT && side->spec->ready_first) {
        for (uint32_t i = 0; i < side->spec->full; i++) {
            nb_bits_set(side->flow.map, i);
        }
        side->ready = side->spec->full;
    }
    nb_lanes_add(node->lanes, &side->flow, nb_now_ns());
}

static inline void flows_ready(struct flow_side *side, uint32_t count) {
    for (; count > 0 && side->ready < side->spec->full; count--) {
        nb_lanes_ready(side->node->lanes, &side->flow, side->order[side->ready++]);
    }
    nb_lanes_push(side->node->lanes, side->flow.peer);
}

// Runs one progress pass and one poll of the loop, without waiting.
static inline void flows_progress(struct flow_node *node) {
    (void)nb_lanes_progress(node->lanes);
    (void)nb_loop_wait(&node->loop, 0);
}

// Runs one pass and, at random, adds the next flow or makes blocks ready. True while this rank has more to start.
static inline bool flows_step(struct flow_node *node) {
    bool more = false;
    flows_progress(node);
    for (int i = 0; i < node->sides_count; i++) {
        struct flow_side *side = &node->sides[i];
        if (!side->added) {
            if (flows_below(&node->random, 3) == 0) {
                flows_add(side);
            }
            return true; // flows of one peer must be added in the order of their operations
        }
        if (side->flow.dir == NB_FLOW_OUT && side->ready < side->spec->full) {
            more = true;
            if (flows_below(&node->random, 2) == 0) {
                flows_ready(side, 1 + flows_below(&node->random, 8));
            }
        }
    }
    return more;
}

static inline bool flows_done(const struct flow_node *node) {
    return node->finished == node->sides_count;
}

static inline int64_t flows_deadline(void) {
    return nb_now_ns() + (int64_t)FLOWS_DEADLINE_S * 1000000000;
}

#endif
