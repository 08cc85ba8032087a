// Fuzzes two libfabric lanes, over a double of libfabric, while flows run. The input is that of a broken peer of the
// job and of an unauthenticated sender. The first byte chooses the length of completion data, the second the seed of
// random delays. Commands follow: type, length, bytes.
#include <stdint.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

#ifdef NB_HAVE_OFI
#define CHECK(cond, ...)                                                                                               \
    do {                                                                                                               \
        if (!(cond)) {                                                                                                 \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

#include <string.h>

#include "../ofi_double.h"
#include "../raw_endpoint.h"
#include "side.h"
#include "transport/credits.h"

enum { FLOWS = 4, COMMANDS_MAX = 64, PASSES = 6 };

// The first byte of a command.
enum command {
    PEER_MESSAGE,
    UNAUTHENTICATED_MESSAGE,
    UNAUTHENTICATED_ARRIVAL,
    FLOW_BEGIN,
    PEER_WRITE,
    VALID_TAG,
    WRITE_FAILURE,
    PROGRESS
};

struct world {
    struct nb_loop loop;
    struct nb_boot boot;
    struct nb_lanes *lanes;
    struct raw_endpoint peer[LANES]; // rank 1
    uint64_t ids[LANES];             // of this rank's endpoints
    unsigned char *arena;
    struct side sides[FLOWS];
    int begun;
};

static void progress(struct world *world) {
    for (int i = 0; i < PASSES; i++) {
        (void)nb_lanes_progress(world->lanes);
        (void)nb_loop_wait(&world->loop, 0);
        for (int lane = 0; lane < LANES; lane++) {
            (void)nb_ofi_ops.progress(world->peer[lane].lane);
        }
    }
}

// Flows 0 and 3 are outgoing, 1 and 2 incoming.
static void flow_begin(struct world *world) {
    int i = world->begun;
    if (i < FLOWS) {
        world->begun++;
        side_begin(&world->sides[i], world->lanes, i, i % 3 == 0 ? NB_FLOW_OUT : NB_FLOW_IN,
                   world->arena + (size_t)i * BLOCKS * BLOCK, 1);
    }
}

// The tag of the credit for a block of a slot; 0: no flow has the slot.
static uint32_t tag_of(const struct world *world, int slot, uint32_t block) {
    const struct nb_flow *flow = world->lanes->rma->slots[slot];
    for (int i = 0; flow != NULL && i < STAGING_BUFFERS; i++) {
        const struct buffer *buffer = &world->lanes->peers[1].rma->buffers[i];
        if (buffer->flow == flow && block >= buffer->first && block < buffer->first + buffer->count) {
            return buffer->tag;
        }
    }
    return flow != NULL ? flow->tag : 0;
}

// Sends an arrival with a valid tag; its other fields are the fuzzer's.
static void send_valid_tag(struct world *world, const uint8_t *data, size_t bytes) {
    uint8_t bytes_in[4] = {0};
    memcpy(bytes_in, data, bytes < sizeof bytes_in ? bytes : sizeof bytes_in);
    struct nb_frame frame = {.slot = bytes_in[0] % 3, .block = bytes_in[1], .blocks = (uint16_t)(bytes_in[2] + 1)};
    frame.tag = tag_of(world, frame.slot, frame.block);
    uint64_t arrival[2] = {nb_frame_pack(&frame), bytes_in[3]};
    if (double_state.data_bytes == sizeof arrival[0]) {
        double_arrive(world->ids[bytes_in[3] % LANES], arrival[0], FI_REMOTE_CQ_DATA);
    } else {
        (void)nb_ofi_send_message(nb_ofi_lane_of(world->peer[bytes_in[3] % LANES].lane), 0, NB_WIRE_OFI_OF_ARRIVALS,
                                  arrival, sizeof arrival);
    }
}

static void peer_write(struct world *world, const uint8_t *data, size_t bytes) {
    static unsigned char source[4 * BLOCK];
    uint8_t bytes_in[4] = {0};
    memcpy(bytes_in, data, bytes < sizeof bytes_in ? bytes : sizeof bytes_in);
    struct raw_endpoint *peer = &world->peer[bytes_in[0] % LANES];
    struct nb_request *request = &peer->requests[bytes_in[1] % RAW_ENDPOINT_REQUESTS];
    const struct nb_region *region = &world->lanes->peers[1].rma->staging_region[bytes_in[0] % LANES];
    if (peer->busy[bytes_in[1] % RAW_ENDPOINT_REQUESTS]) {
        return;
    }
    *request = (struct nb_request){.frame = {.block = bytes_in[2], .blocks = 1, .bytes = 4 * BLOCK},
                                   .peer = 0,
                                   .iov_count = 1,
                                   .iov = {{.iov_base = source, .iov_len = sizeof source}},
                                   .remote_addr = region->addr + (uint64_t)bytes_in[3] * BLOCK,
                                   .remote_key = region->key};
    peer->busy[bytes_in[1] % RAW_ENDPOINT_REQUESTS] = nb_ofi_ops.post(peer->lane, request) == 0;
}

static void peer_message(struct world *world, const uint8_t *data, size_t bytes) {
    size_t length = bytes > 1 ? bytes - 1 : 0;
    struct nb_ofi_lane *lane = nb_ofi_lane_of(world->peer[(bytes > 0 ? data[0] : 0) / 2 % LANES].lane);
    enum wire_ofi_kind kind = bytes > 0 && data[0] % 2 != 0 ? NB_WIRE_OFI_OF_ARRIVALS : NB_WIRE_OFI_OF_LANES;
    (void)nb_ofi_send_message(lane, 0, kind, bytes > 1 ? data + 1 : data,
                              length < NB_LANE_MESSAGE_MAX ? length : NB_LANE_MESSAGE_MAX);
}

static void run_command(struct world *world, enum command command, const uint8_t *data, size_t bytes) {
    uint64_t bits = 0;
    memcpy(&bits, data, bytes < sizeof bits ? bytes : sizeof bits);
    if (command == PEER_MESSAGE) {
        peer_message(world, data, bytes);
    } else if (command == UNAUTHENTICATED_MESSAGE) {
        double_send_message(world->ids[bits % LANES], data, bytes);
    } else if (command == UNAUTHENTICATED_ARRIVAL) {
        double_arrive(world->ids[bits % LANES], bits, bytes % 2 != 0 ? FI_REMOTE_CQ_DATA : 0);
    } else if (command == FLOW_BEGIN) {
        flow_begin(world);
    } else if (command == PEER_WRITE) {
        peer_write(world, data, bytes);
    } else if (command == VALID_TAG) {
        send_valid_tag(world, data, bytes);
    } else if (command == WRITE_FAILURE) {
        double_fail(DOUBLE_WRITE_DONE, 1 + (int)(bits % 8));
    }
    progress(world);
}

static void connect_lanes(struct world *world) {
    struct wire_lane_address mine[LANES];
    struct wire_lane_address its[LANES] = {0};
    struct nb_error err = {0};
    nb_lanes_address(world->lanes, mine);
    for (int i = 0; i < LANES; i++) {
        size_t bytes = 0;
        CHECK(raw_endpoint_open(&world->peer[i], i, 1, 2, world->boot.session, &err) == 0, "open a lane");
        nb_ofi_ops.address(world->peer[i].lane, its[i].addr, &bytes);
        its[i].bytes = (uint32_t)bytes;
        CHECK(nb_ofi_ops.peer_open(world->peer[i].lane, 0, mine[i].addr, mine[i].bytes, &err) == 0, "open peer 0");
        world->ids[i] = nb_ofi_lane_of(world->peer[i].lane)->peers[0].addr;
    }
    CHECK(nb_lanes_peer_open(world->lanes, 1, its, &err) == 0, "open peer 1");
}

static void world_close(struct world *world) {
    for (int i = 0; i < world->begun; i++) {
        if (!world->sides[i].finished) {
            nb_lanes_cancel(world->lanes, &world->sides[i].flow);
            world->sides[i].finished = true;
        }
    }
    progress(world);
    nb_lanes_close(world->lanes);
    for (int i = 0; i < LANES; i++) {
        nb_ofi_ops.close(world->peer[i].lane);
    }
    free(world->arena);
    nb_loop_fini(&world->loop);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    struct world world = {.boot = {.rank = 0, .size = 2}};
    struct nb_error err = {0};
    if (bytes < 2 || nb_loop_init(&world.loop, &err) < 0) {
        return 0;
    }
    double_begin(data[1], data[0] % 2 == 0 ? 8 : 4);
    struct nb_lanes_config config = {.ops = &nb_ofi_ops, .lanes = LANES, .segment_bytes = 4 * BLOCK};
    config.lane =
        (struct nb_lane_config){.rank = 0, .size = 2, .loop = &world.loop, .boot = &world.boot, .timeout_ms = 1000};
    CHECK(nb_sock_parse("127.0.0.1:0", &config.lane.bind, &err) == 0, "parse an address");
    config.binds = &config.lane.bind;
    config.bind_count = 1;
    config.in_flight_max = 1 << 20;
    config.copy_bytes = (data[0] & 2) != 0 ? NB_COPY_MAX : 0;
    config.lane_lost = side_lane_lost;
    world.arena = calloc(FLOWS * BLOCKS, BLOCK);
    CHECK(world.arena != NULL && nb_lanes_open(&world.lanes, &config, &err) == 0, "lanes");
    CHECK(nb_lanes_map(world.lanes, world.arena, (size_t)FLOWS * BLOCKS * BLOCK, &err) == 0, "memory");
    connect_lanes(&world);
    size_t at = 2;
    for (int n = 0; at + 2 <= bytes && n < COMMANDS_MAX; n++) {
        size_t length = data[at + 1] < bytes - at - 2 ? data[at + 1] : bytes - at - 2;
        run_command(&world, (enum command)(data[at] % (PROGRESS + 1)), data + at + 2, length);
        at += 2 + length;
    }
    world_close(&world);
    double_end();
    return 0;
}
#else
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    (void)data;
    (void)bytes;
    return 0;
}
#endif
