// Two connected lanes without the scheduler: checks that a network keeps the contract of transport.h. One thread drives
// both.
#ifndef NB_TEST_PROBE_H
#define NB_TEST_PROBE_H

#include "base/admission.h"
#include "flows.h"

enum { PROBE_MESSAGES = 200, PROBE_REQUESTS = 40, PROBE_BYTES = 50000, PROBE_PASSES = 1000 };

struct probe_world;

struct probe_side {
    struct probe_world *world;
    struct nb_loop loop;
    struct nb_admission admission;
    struct nb_lane *lane;
    int rank;
    int messages_in;
    int messages_out;
    int placed;
    int deferrals; // how often place() still returns -EAGAIN
    int landed;
    int sent;
    int failed; // of the sent requests: those that were not delivered
    int lost;
    bool closed; // the peer may not deliver anything any more
    unsigned char *memory;
};

struct probe_world {
    const struct nb_lane_ops *ops;
    uint64_t seed;
    uint64_t random;
    struct nb_boot *boots;
    const char *bind;
    struct nb_mem_net *net;
    struct probe_side sides[2];
    struct probe_request {
        struct nb_request request;
        struct probe_side *owner; // NULL: not in flight
    } requests[PROBE_REQUESTS];
    unsigned char *source;
};

static inline size_t probe_message(int rank, int index, unsigned char *data) {
    size_t bytes = 1 + (size_t)(index * 29 + rank) % NB_LANE_MESSAGE_MAX;
    for (size_t i = 0; i < bytes; i++) {
        data[i] = flows_byte((uint64_t)index + 1000 * (uint64_t)rank, i);
    }
    return bytes;
}

// Size of a request; every tenth is empty.
static inline size_t probe_bytes(uint32_t index) {
    return index % 10 == 3 ? 0 : 1 + index * 7919u % PROBE_BYTES;
}

static inline int probe_split(unsigned char *base, size_t bytes, uint64_t *random, struct iovec iov[NB_LANE_IOV_MAX]) {
    int count = 0;
    while (bytes > 0) {
        size_t part = count == NB_LANE_IOV_MAX - 1 ? bytes : 1 + flows_below(random, (uint32_t)bytes);
        iov[count++] = (struct iovec){.iov_base = base, .iov_len = part};
        base += part;
        bytes -= part;
    }
    return count;
}

static inline int probe_up_place(void *ctx, struct nb_lane *lane, int peer, const struct nb_frame *frame,
                                 struct iovec iov[NB_LANE_IOV_MAX]) {
    struct probe_side *side = ctx;
    CHECK(lane == side->lane && peer == 1 - side->rank && !side->closed, "unexpected segment of rank %d", peer);
    CHECK(frame->block == (uint32_t)side->placed && frame->blocks == frame->block % 200 + 1 &&
              frame->op == (uint64_t)frame->block << 40,
          "got segment %u, expected %d", frame->block, side->placed);
    CHECK(frame->bytes == probe_bytes(frame->block), "segment %u has %u bytes", frame->block, frame->bytes);
    if (side->deferrals > 0) {
        side->deferrals--;
        return -EAGAIN;
    }
    side->placed++;
    memset(side->memory, FLOWS_GUARD, PROBE_BYTES + 2);
    return probe_split(side->memory + 1, frame->bytes, &side->world->random, iov);
}

static inline void probe_up_landed(void *ctx, struct nb_lane *lane, int peer, const struct nb_frame *frame) {
    struct probe_side *side = ctx;
    CHECK(lane == side->lane && peer == 1 - side->rank && !side->closed, "unexpected landing of rank %d", peer);
    CHECK(frame->block == (uint32_t)side->landed && side->placed == side->landed + 1, "segment %u landed out of order",
          frame->block);
    for (size_t i = 0; i < frame->bytes; i++) {
        CHECK(side->memory[1 + i] == flows_byte(frame->block, i), "segment %u is wrong at byte %zu", frame->block, i);
    }
    CHECK(side->memory[0] == FLOWS_GUARD && side->memory[1 + frame->bytes] == FLOWS_GUARD,
          "guard bytes were overwritten");
    side->landed++;
    side->deferrals = (int)flows_below(&side->world->random, 3);
}

static inline void probe_up_sent(void *ctx, struct nb_lane *lane, struct nb_request *request, int code) {
    struct probe_side *side = ctx;
    struct probe_request *at = NB_CONTAINER(request, struct probe_request, request);
    CHECK(lane == side->lane && at->owner == side, "request belongs to another lane or side");
    bool gone = side->world->sides[1 - side->rank].closed && code < 0;
    CHECK(code == 0 || gone || (side->closed && code == NB_ECLOSED), "request failed: %s", nb_code_name(code));
    at->owner = NULL;
    side->sent++;
    side->failed += code != 0;
}

static inline void probe_up_writable(void *ctx, struct nb_lane *lane, int peer) {
    struct probe_side *side = ctx;
    CHECK(peer == 1 - side->rank && (side->lane == NULL || lane == side->lane), "writable to %d", peer);
}

static inline void probe_up_message(void *ctx, struct nb_lane *lane, int peer, const void *data, size_t bytes) {
    struct probe_side *side = ctx;
    unsigned char want[NB_LANE_MESSAGE_MAX];
    CHECK(lane == side->lane && peer == 1 - side->rank && !side->closed, "unexpected message of rank %d", peer);
    size_t length = probe_message(peer, side->messages_in, want);
    CHECK(bytes == length && memcmp(data, want, bytes) == 0, "message %d of rank %d has wrong contents",
          side->messages_in, peer);
    side->messages_in++;
}

static inline void probe_up_lost(void *ctx, struct nb_lane *lane, int peer, const struct nb_error *why) {
    struct probe_side *side = ctx;
    CHECK(lane == side->lane && peer == 1 - side->rank, "unexpected loss of peer %d", peer);
    CHECK(side->world->sides[0].closed || side->world->sides[1].closed, "lost: %s", why->text);
    CHECK(why->peer == peer && why->code < 0, "lost without a reason: %d", why->code);
    side->lost++;
}

static inline const struct nb_lane_up *probe_up(void) {
    static const struct nb_lane_up up = {.place = probe_up_place,
                                         .landed = probe_up_landed,
                                         .sent = probe_up_sent,
                                         .writable = probe_up_writable,
                                         .message = probe_up_message,
                                         .lost = probe_up_lost};
    return &up;
}

static inline void probe_progress(struct probe_world *world) {
    for (int i = 0; i < 2; i++) {
        CHECK(world->ops->progress(world->sides[i].lane) >= 0, "progress of rank %d", i);
        (void)nb_loop_wait(&world->sides[i].loop, 0);
    }
}

static inline void probe_open(struct probe_world *world) {
    char name[NB_MEM_NAME];
    struct nb_error err = {0};
    struct nb_lane_config config = {.size = 2, .up = probe_up(), .timeout_ms = FLOWS_DEADLINE_S * 1000};
    bool is_mem = world->boots == NULL;
    CHECK(nb_sock_parse(world->bind, &config.bind, &err) == 0, "%s", err.text);
    world->random = world->seed;
    world->net = is_mem ? nb_mem_net_open(2, 1, world->seed) : NULL;
    world->source = malloc((size_t)PROBE_REQUESTS * PROBE_BYTES);
    CHECK(world->source != NULL && (world->net != NULL || !is_mem), "memory");
    config.library = getenv("NETBOTTLENECK_LIBFABRIC");
    config.provider = getenv("NETBOTTLENECK_PROVIDER");
    if (is_mem) {
        nb_mem_net_name(world->net, name);
        config.library = name;
    }
    for (int i = 0; i < 2; i++) {
        struct probe_side *side = &world->sides[i];
        *side = (struct probe_side){.world = world, .rank = i, .memory = malloc(PROBE_BYTES + 2)};
        CHECK(side->memory != NULL && nb_loop_init(&side->loop, &err) == 0, "%s", err.text);
        config.rank = i;
        nb_admission_init(&side->admission);
        config.loop = &side->loop;
        config.admission = &side->admission;
        config.boot = is_mem ? NULL : &world->boots[i];
        config.up_ctx = side;
        CHECK(world->ops->open(&config, &side->lane, &err) == 0, "%s", err.text);
    }
    for (int i = 0; i < 2; i++) {
        unsigned char addr[NB_LANE_ADDR_MAX];
        size_t bytes = 0;
        world->ops->address(world->sides[i].lane, addr, &bytes);
        CHECK(world->ops->peer_open(world->sides[1 - i].lane, i, addr, bytes, &err) == 0, "%s", err.text);
    }
    int64_t deadline = flows_deadline();
    while (!world->ops->peer_ready(world->sides[0].lane, 1) || !world->ops->peer_ready(world->sides[1].lane, 0)) {
        probe_progress(world);
        CHECK(nb_now_ns() < deadline, "%s: the lanes do not connect", world->ops->name);
    }
}

static inline void probe_fini(struct probe_world *world) {
    for (int i = 0; i < 2; i++) {
        world->ops->close(world->sides[i].lane);
        nb_loop_fini(&world->sides[i].loop);
        free(world->sides[i].memory);
    }
    free(world->source);
    nb_mem_net_close(world->net);
}

// Messages arrive complete and in order, in both directions.
static inline void probe_messages(struct probe_world *world) {
    unsigned char data[NB_LANE_MESSAGE_MAX];
    probe_open(world);
    int64_t deadline = flows_deadline();
    while (world->sides[0].messages_in < PROBE_MESSAGES || world->sides[1].messages_in < PROBE_MESSAGES) {
        for (int i = 0; i < 2; i++) {
            struct probe_side *side = &world->sides[i];
            size_t bytes = probe_message(i, side->messages_out, data);
            int rc =
                side->messages_out < PROBE_MESSAGES ? world->ops->message(side->lane, 1 - i, data, bytes) : -EAGAIN;
            CHECK(rc == 0 || rc == -EAGAIN, "message: %s", nb_code_name(rc));
            side->messages_out += rc == 0;
        }
        probe_progress(world);
        CHECK(nb_now_ns() < deadline, "%s: %d and %d messages arrived", world->ops->name, world->sides[0].messages_in,
              world->sides[1].messages_in);
    }
    probe_fini(world);
}

// Posts requests from `next` on until one is refused, at most PROBE_REQUESTS in flight. Returns the number posted so
// far.
static inline uint32_t probe_post(struct probe_world *world, uint32_t next, uint32_t end) {
    while (next < end) {
        struct probe_request *at = &world->requests[next % PROBE_REQUESTS];
        struct nb_request *request = &at->request;
        unsigned char *base = world->source + (size_t)(next % PROBE_REQUESTS) * PROBE_BYTES;
        size_t bytes = probe_bytes(next);
        for (size_t i = 0; i < bytes; i++) {
            base[i] = flows_byte(next, i);
        }
        *at = (struct probe_request){.request = {.peer = 1}, .owner = &world->sides[0]};
        request->frame = (struct nb_frame){
            .op = (uint64_t)next << 40, .block = next, .blocks = (uint16_t)(next % 200 + 1), .bytes = (uint32_t)bytes};
        request->iov_count = probe_split(base, bytes, &world->random, request->iov);
        int rc = world->ops->post(world->sides[0].lane, request);
        CHECK(rc == 0 || rc == -EAGAIN, "post: %s", nb_code_name(rc));
        if (rc != 0) {
            break;
        }
        next++;
    }
    return next;
}

// STREAM: scattered segments arrive in order in scattered memory, also if the receiver defers them.
static inline void probe_segments(struct probe_world *world) {
    probe_open(world);
    uint32_t posted = 0;
    int64_t deadline = flows_deadline();
    while (world->sides[1].landed < PROBE_REQUESTS || world->sides[0].sent < PROBE_REQUESTS) {
        posted = probe_post(world, posted, PROBE_REQUESTS);
        probe_progress(world);
        world->ops->resume(world->sides[1].lane, 0);
        CHECK(nb_now_ns() < deadline, "%s: %d segments arrived", world->ops->name, world->sides[1].landed);
    }
    struct nb_lane_stats out;
    struct nb_lane_stats in;
    size_t want = 0;
    for (uint32_t i = 0; i < PROBE_REQUESTS; i++) {
        want += probe_bytes(i);
    }
    world->ops->stats(world->sides[0].lane, 1, &out);
    world->ops->stats(world->sides[1].lane, 0, &in);
    CHECK(out.bytes_out == want && in.bytes_in == want, "%zu bytes, counted %llu and %llu", want,
          (unsigned long long)out.bytes_out, (unsigned long long)in.bytes_in);
    probe_fini(world);
}

// Runs only the receiver until this many segments have landed.
static inline void probe_receive(struct probe_world *world, int landed) {
    struct probe_side *to = &world->sides[1];
    int64_t deadline = flows_deadline();
    while (to->landed < landed) {
        (void)nb_loop_wait(&to->loop, 0);
        world->ops->resume(to->lane, 0);
        CHECK(nb_now_ns() < deadline, "%s: %d of %d segments arrived", world->ops->name, to->landed, landed);
    }
}

// TCP: post() itself writes what the kernel has room for, before the sender's loop runs. It does so a bounded number of
// times, because the loop must also read incoming data.
static inline void probe_immediate_sends(struct probe_world *world) {
    enum { MANY = 500 };
    probe_open(world);
    const struct probe_side *from = &world->sides[0];
    uint32_t posted = probe_post(world, 0, 1);
    CHECK(posted == 1 && from->sent == 1, "post() left a segment to the loop");
    probe_receive(world, from->sent);
    uint32_t before = 0;
    while (posted > before && from->sent == (int)posted && posted < MANY) {
        before = posted;
        posted = probe_post(world, posted, posted + 1);
        probe_receive(world, from->sent);
    }
    CHECK(posted < MANY, "post() sent %u segments before the loop ran", posted);
    int64_t deadline = flows_deadline();
    while (world->sides[1].landed < (int)posted || from->sent < (int)posted) {
        probe_progress(world);
        world->ops->resume(world->sides[1].lane, 0);
        CHECK(nb_now_ns() < deadline, "%s: %d of %u segments arrived", world->ops->name, world->sides[1].landed,
              posted);
    }
    probe_fini(world);
}

// peer_close ends a flow at once: each request in flight completes once, and nothing of the peer arrives afterwards.
static inline void probe_close(struct probe_world *world) {
    probe_open(world);
    bool stream = world->ops->kind == NB_LANE_STREAM;
    struct probe_side *closes = &world->sides[world->seed % 2];
    uint32_t posted = 0;
    unsigned char data[NB_LANE_MESSAGE_MAX];
    for (int pass = 0; pass < (int)(world->seed % 7); pass++) {
        posted = stream ? probe_post(world, posted, PROBE_REQUESTS) : 0;
        probe_progress(world);
    }
    for (int i = 0; i < 2; i++) {
        (void)world->ops->message(world->sides[i].lane, 1 - i, data, probe_message(i, 0, data));
    }
    closes->closed = true;
    world->ops->peer_close(closes->lane, 1 - closes->rank);
    CHECK(closes->rank == 1 || closes->sent == (int)posted, "%d of %u requests completed", closes->sent, posted);
    CHECK(!world->ops->peer_ready(closes->lane, 1 - closes->rank), "a closed flow is ready");
    world->sides[1 - closes->rank].closed = false;
    for (int pass = 0; pass < PROBE_PASSES; pass++) {
        probe_progress(world);
        if (stream) {
            world->ops->resume(world->sides[1].lane, 0);
        }
    }
    CHECK(closes->lost == 0, "the closing side gets lost()");
    probe_fini(world);
}

#endif
