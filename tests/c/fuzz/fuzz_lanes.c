// Fuzzes two TCP lanes with the bytes of a broken peer while flows run. The first byte modulo 3 selects the input. 0:
// segments and messages of an authenticated peer (lane, length, bytes). 1: the same, preceded by a handshake. 2: the
// address of a peer.
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/bits.h"
#include "base/clock.h"
#include "side.h"
#include "transport/lanes_internal.h"
#include "transport/tcp_internal.h"

enum { FLOWS = 3 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

// The remote ends of a lane's two connections with rank 1. `in`: the lane receives what is sent there. `out`: the lane
// sends there; -1: no such connection.
struct ends {
    int in;
    int out;
};

static void progress(struct nb_loop *loop, const struct ends *ends) {
    char buffer[4096];
    for (int i = 0; i < 4; i++) {
        nb_loop_wait(loop, 0);
    }
    for (int i = 0; i < LANES; i++) {
        while (recv(ends[i].in, buffer, sizeof buffer, MSG_DONTWAIT) > 0 ||
               (ends[i].out >= 0 && recv(ends[i].out, buffer, sizeof buffer, MSG_DONTWAIT) > 0)) {
        }
    }
}

static int connect_pair(struct nb_loop *loop, struct nb_watch *watch) {
    int pair[2];
    struct nb_error err = {0};
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) != 0) {
        abort();
    }
    watch->fd = pair[0];
    if (nb_loop_add(loop, watch, EPOLLIN, &err) < 0) {
        abort();
    }
    return pair[1];
}

// Replaces the lane's connections by socket pairs: both, or only the outgoing one, whose handshake is not finished.
static struct ends connect_pairs(struct nb_lanes *lanes, struct nb_loop *loop, int lane, bool authenticated) {
    struct conn *conn = &NB_CONTAINER(lanes->lane[lane], struct tcp_lane, base)->conns[1];
    nb_tcp_reset(conn);
    conn->gone = false;
    conn->state = authenticated ? OPEN : HANDSHAKE;
    int out = connect_pair(loop, &conn->out_watch);
    return authenticated ? (struct ends){connect_pair(loop, &conn->in_watch), out} : (struct ends){out, -1};
}

static void ends_close(struct ends *ends) {
    close(ends->in);
    if (ends->out >= 0) {
        close(ends->out);
    }
}

static void send_answer(struct nb_lanes *lanes, const struct nb_boot *boot, int fd, int lane) {
    const struct conn *conn = &NB_CONTAINER(lanes->lane[lane], struct tcp_lane, base)->conns[1];
    struct tcp_handshake handshake = {.hello = conn->handshake.hello};
    struct nb_tcp_macs macs;
    nb_tcp_macs(boot, &handshake, 1, &conn->to, &macs);
    memcpy(handshake.answer.mac, macs.answer, sizeof macs.answer);
    (void)send(fd, &handshake.answer, sizeof handshake.answer, MSG_DONTWAIT | MSG_NOSIGNAL);
}

static void fuzz_flows(struct nb_lanes *lanes, struct nb_loop *loop, const struct nb_boot *boot, const uint8_t *data,
                       size_t bytes) {
    struct side sides[FLOWS] = {0};
    struct ends ends[LANES];
    for (int i = 0; i < LANES; i++) {
        ends[i] = connect_pairs(lanes, loop, i, data[0] % 3 == 0);
        if (data[0] % 3 == 1 && (data[0] & 0x40) != 0) {
            send_answer(lanes, boot, ends[i].in, i);
        }
    }
    size_t at = 1;
    for (int n = 0; at + 2 <= bytes && n < 64; n++) {
        size_t length = data[at + 1] < bytes - at - 2 ? data[at + 1] : bytes - at - 2;
        (void)send(ends[data[at] % LANES].in, data + at + 2, length, MSG_DONTWAIT | MSG_NOSIGNAL);
        at += 2 + length;
        if (n < FLOWS) {
            side_begin(&sides[n], lanes, n, n == 0 ? NB_FLOW_OUT : NB_FLOW_IN, calloc(BLOCKS, BLOCK), 2);
        }
        progress(loop, ends);
    }
    ends_close(&ends[0]);
    nb_loop_wait(loop, 0);
    for (int i = 0; i < FLOWS; i++) {
        if (sides[i].memory != NULL && !sides[i].finished) {
            nb_lanes_cancel(lanes, &sides[i].flow);
        }
        free(sides[i].memory);
        sides[i].memory = NULL;
    }
    nb_loop_wait(loop, 0);
    ends_close(&ends[1]);
    nb_loop_wait(loop, 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    struct nb_loop loop;
    struct nb_error err = {0};
    struct nb_lanes *lanes = NULL;
    struct nb_boot boot = {.rank = 0, .size = 2};
    if (bytes < 1 || nb_loop_init(&loop, &err) < 0) {
        return 0;
    }
    struct nb_lanes_config config = {.ops = &nb_tcp_ops, .lanes = LANES, .segment_bytes = 4 * BLOCK};
    config.lane = (struct nb_lane_config){.rank = 0, .size = 2, .loop = &loop, .boot = &boot, .timeout_ms = 1000};
    nb_sock_parse("127.0.0.1:0", &config.lane.bind, &err);
    config.binds = &config.lane.bind;
    config.bind_count = 1;
    config.in_flight_max = 1 << 20;
    config.lane_lost = side_lane_lost;
    if (nb_lanes_open(&lanes, &config, &err) < 0) {
        abort();
    }
    unsigned char *address = calloc(1, nb_lanes_address_bytes(lanes));
    nb_lanes_address(lanes, address);
    if (data[0] % 3 == 2) {
        size_t room = nb_lanes_address_bytes(lanes);
        memcpy(address, data + 1, bytes - 1 < room ? bytes - 1 : room);
        (void)nb_lanes_peer_open(lanes, 1, address, &err);
    } else if (nb_lanes_peer_open(lanes, 1, address, &err) == 0) {
        fuzz_flows(lanes, &loop, &boot, data, bytes);
    }
    free(address);
    nb_lanes_close(lanes);
    nb_loop_fini(&loop);
    return 0;
}
