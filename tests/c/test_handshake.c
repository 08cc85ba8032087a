// Handshake of a TCP lane: neither side accepts a wrong proof, and a handshake is valid for one connection only.
// Replayed, altered and reflected handshakes are refused and counted. Ranks of the job still connect.
#include <limits.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/wire.h"
#include "flows.h"
#include "transport/transport.h"

enum { LANES = 2, STRIDE = NB_LANE_ADDR_MAX + 8, LANE_AT = 8, RECORDED_MAX = 512, PASSES = 200 };

// Bytes that rank 1 sends to the recorded port.
static struct {
    uint16_t port;
    unsigned char bytes[RECORDED_MAX];
    size_t count;
    size_t first; // of the first message
} recorded;

ssize_t __real_send(int fd, const void *data, size_t bytes, int flags);
ssize_t __wrap_send(int fd, const void *data, size_t bytes, int flags);

// How many of the listeners' next answers fail to be sent, as if the connection had been dropped for being late.
static int failing_answers;
// How many of the next answers arrive but are followed by closing the connection.
static int closing_answers;

ssize_t __wrap_send(int fd, const void *data, size_t bytes, int flags) {
    struct wire_tcp_hello hello;
    bool answer = bytes == sizeof(struct wire_tcp_answer);
    memcpy(&hello, data, bytes < sizeof hello ? bytes : sizeof hello);
    answer = answer && !(bytes == sizeof hello && hello.magic == NB_WIRE_TCP_MAGIC);
    if (answer && failing_answers > 0) {
        failing_answers--;
        errno = ECONNRESET;
        return -1;
    }
    struct nb_sockaddr to = {.len = sizeof to.in6};
    ssize_t n = __real_send(fd, data, bytes, flags);
    if (answer && closing_answers > 0) {
        closing_answers--;
        (void)shutdown(fd, SHUT_RDWR);
    }
    if (recorded.port != 0 && n > 0 && getpeername(fd, &to.any, &to.len) == 0 && nb_sock_port(&to) == recorded.port &&
        recorded.count + (size_t)n <= RECORDED_MAX) {
        memcpy(recorded.bytes + recorded.count, data, (size_t)n);
        recorded.count += (size_t)n;
        recorded.first = recorded.first == 0 ? (size_t)n : recorded.first;
    }
    return n;
}

struct pair {
    struct flow_world world;
    struct nb_boot boots[2];
    unsigned char addresses[2][LANES * STRIDE];
};

// Opens the lanes of the first `ranks` ranks. `bind` may name the port, if there is one rank with one lane.
static void pair_begin(struct pair *pair, int lanes, const char *bind, int ranks) {
    struct nb_error err = {0};
    memset(pair, 0, sizeof *pair);
    pair->world.ops = nb_transport_find("tcp");
    pair->world.plan = (struct flow_plan){.size = 2, .lanes = lanes, .segment_bytes = 4096};
    pair->world.boots = pair->boots;
    CHECK(nb_sock_parse(bind, &pair->world.bind, &err) == 0, "%s", err.text);
    for (int rank = 0; rank < ranks; rank++) {
        pair->boots[rank] = (struct nb_boot){.rank = rank, .size = 2};
        CHECK(flows_node_open(&pair->world, rank, &err) == 0, "%s", err.text);
        pair->world.nodes[rank].may_lose = true;
        nb_lanes_address(pair->world.nodes[rank].lanes, pair->addresses[rank]);
    }
}

static void pair_open(struct pair *pair) {
    pair_begin(pair, LANES, "127.0.0.1:0", 2);
}

static void pair_progress(struct pair *pair) {
    for (int rank = 0; rank < 2; rank++) {
        if (pair->world.nodes[rank].lanes != NULL) {
            flows_progress(&pair->world.nodes[rank]);
        }
    }
}

static struct nb_sockaddr port_of(const struct pair *pair, int rank, int lane) {
    struct nb_sockaddr port;
    struct nb_error err = {0};
    CHECK(nb_sock_parse((const char *)pair->addresses[rank] + (size_t)lane * STRIDE + 8, &port, &err) == 0, "%s",
          err.text);
    return port;
}

static void connect_rank(struct pair *pair, int from, int to) {
    struct nb_error err = {0};
    CHECK(nb_lanes_peer_open(pair->world.nodes[to].lanes, from, pair->addresses[from], &err) == 0, "%s", err.text);
}

static void await_ready(struct pair *pair) {
    int64_t deadline = flows_deadline();
    while (!nb_lanes_peer_ready(pair->world.nodes[0].lanes, 1) || !nb_lanes_peer_ready(pair->world.nodes[1].lanes, 0)) {
        pair_progress(pair);
        CHECK(nb_now_ns() < deadline, "the ranks do not connect");
    }
    CHECK(pair->world.nodes[0].lost == 0 && pair->world.nodes[1].lost == 0, "a lane was lost");
}

// The text of a late opening names the listener that the missing connect should reach: the peer's, or this rank's own.
static void test_late_connect_is_told_from_a_late_peer(void) {
    struct pair pair;
    pair_open(&pair);
    const struct nb_lanes *mine = pair.world.nodes[0].lanes;
    char text[NB_LANES_AWAITED_TEXT];
    char peers[NB_SOCK_TEXT];
    char own[NB_SOCK_TEXT];
    struct nb_sockaddr port = port_of(&pair, 1, 0);
    nb_sock_format(&port, peers);
    port = port_of(&pair, 0, 0);
    nb_sock_format(&port, own);
    connect_rank(&pair, 1, 0);
    nb_lanes_peer_awaited(mine, 1, text);
    CHECK(strstr(text, "this rank's connection to") != NULL && strstr(text, peers) != NULL, "%s", text);
    int64_t deadline = flows_deadline();
    while (strstr(text, own) == NULL) {
        pair_progress(&pair);
        nb_lanes_peer_awaited(mine, 1, text);
        CHECK(nb_now_ns() < deadline, "still%s", text);
    }
    CHECK(strstr(text, "where this rank listens, did not arrive") != NULL, "%s", text);
    connect_rank(&pair, 0, 1);
    await_ready(&pair);
    nb_lanes_peer_awaited(mine, 1, text);
    CHECK(text[0] == '\0', "a connected peer is awaited%s", text);
    flows_close(&pair.world);
}

// Replaces a lane's port in the exchanged address by that of a fake listener. Returns its descriptor.
static int fake_listener_open(struct pair *pair, int rank, int lane) {
    struct nb_sockaddr port;
    struct nb_error err = {0};
    CHECK(nb_sock_parse("127.0.0.1:0", &port, &err) == 0, "%s", err.text);
    int fd = nb_sock_listen(&port, (struct nb_port_range){0, 0}, 8, &err);
    CHECK(fd >= 0, "%s", err.text);
    unsigned char *at = pair->addresses[rank] + (size_t)lane * STRIDE;
    nb_sock_format(&port, (char *)at + 8);
    uint32_t bytes = (uint32_t)strlen((char *)at + 8) + 1;
    memcpy(at, &bytes, sizeof bytes);
    return fd;
}

static int attacker_connect(struct pair *pair, const struct nb_sockaddr *port) {
    int fd = nb_sock_connect(port, NULL, NULL, NULL);
    struct pollfd poller = {.fd = fd, .events = POLLOUT};
    CHECK(fd >= 0 && poll(&poller, 1, 10000) == 1 && nb_sock_connected(fd) == 0, "connect: %m");
    pair_progress(pair);
    return fd;
}

// Replays the recorded bytes, and waits for an answer where the recorded rank waited. True: the connection was closed,
// so the handshake was refused.
static bool replay(struct pair *pair, int fd, const unsigned char *bytes) {
    char answer[256];
    bool closed = false;
    (void)__real_send(fd, bytes, recorded.first, MSG_NOSIGNAL);
    for (int pass = 0; pass < PASSES && recv(fd, answer, sizeof answer, MSG_DONTWAIT) < 0 && errno == EAGAIN; pass++) {
        pair_progress(pair);
    }
    (void)__real_send(fd, bytes + recorded.first, recorded.count - recorded.first, MSG_NOSIGNAL);
    for (int pass = 0; pass < PASSES && !closed; pass++) {
        pair_progress(pair);
        ssize_t n = recv(fd, answer, sizeof answer, MSG_DONTWAIT);
        closed = n == 0 || (n < 0 && errno != EAGAIN);
    }
    close(fd);
    return closed;
}

// Records all bytes that rank 1 sends on lane 0 of rank 0. It cannot reach lane 1.
static void record_handshake(struct pair *pair) {
    unsigned char before[LANES * STRIDE];
    memcpy(before, pair->addresses[0], sizeof before);
    struct nb_sockaddr port = port_of(pair, 0, 0);
    int fake_listener = fake_listener_open(pair, 0, 1);
    memset(&recorded, 0, sizeof recorded);
    recorded.port = nb_sock_port(&port);
    connect_rank(pair, 0, 1);
    for (int pass = 0; pass < PASSES; pass++) {
        pair_progress(pair);
    }
    recorded.port = 0;
    CHECK(recorded.count > 0, "nothing was recorded");
    close(fake_listener);
    memcpy(pair->addresses[0], before, sizeof before);
}

static void test_replay_is_refused(void) {
    struct pair *pair = malloc(sizeof *pair);
    unsigned char other[RECORDED_MAX];
    CHECK(pair != NULL, "memory");
    pair_open(pair);
    record_handshake(pair);
    struct nb_sockaddr first = port_of(pair, 0, 0);
    struct nb_sockaddr second = port_of(pair, 0, 1);
    memcpy(other, recorded.bytes, recorded.count);
    other[LANE_AT] = 1;
    CHECK(replay(pair, attacker_connect(pair, &second), other), "a proof of lane 0 is replayed on lane 1");
    CHECK(replay(pair, attacker_connect(pair, &second), recorded.bytes), "lane 0's handshake is accepted on lane 1");
    CHECK(replay(pair, attacker_connect(pair, &first), recorded.bytes), "a handshake is accepted twice");
    CHECK(nb_lanes_refused(pair->world.nodes[0].lanes) == 3, "%llu refusals were counted",
          (unsigned long long)nb_lanes_refused(pair->world.nodes[0].lanes));
    flows_close(&pair->world);
    free(pair);
}

// A handshake recorded earlier, with the same ranks, session, lane and address, is refused.
static void test_replay_on_a_later_lane_is_refused(void) {
    struct pair *pair = malloc(sizeof *pair);
    char text[NB_SOCK_TEXT];
    CHECK(pair != NULL, "memory");
    pair_open(pair);
    record_handshake(pair);
    struct nb_sockaddr port = port_of(pair, 0, 0);
    nb_sock_format(&port, text);
    flows_close(&pair->world);
    pair_begin(pair, 1, text, 1);
    CHECK(replay(pair, attacker_connect(pair, &port), recorded.bytes), "an earlier handshake is accepted");
    flows_close(&pair->world);
    free(pair);
}

// A handshake with one bit changed in any byte is refused.
static void test_altered_handshake_is_refused(void) {
    struct pair *pair = malloc(sizeof *pair);
    CHECK(pair != NULL, "memory");
    pair_open(pair);
    record_handshake(pair);
    struct nb_sockaddr port = port_of(pair, 0, 1);
    for (size_t at = 0; at < recorded.count; at++) {
        unsigned char altered[RECORDED_MAX];
        memcpy(altered, recorded.bytes, recorded.count);
        altered[LANE_AT] = 1;
        altered[at] ^= 0x10;
        CHECK(replay(pair, attacker_connect(pair, &port), altered), "a handshake with byte %zu changed is accepted",
              at);
    }
    flows_close(&pair->world);
    free(pair);
}

// Answers a rank's connection with wrong bytes, or reflects its hello, until the rank gives up the lane.
static void fake_listener_answer(struct pair *pair, int fake_listener, int rank, bool reflect) {
    unsigned char bytes[64] = {0};
    int fd = -1;
    for (int pass = 0; pass < PASSES && pair->world.nodes[rank].lost == 0; pass++) {
        pair_progress(pair);
        fd = fd < 0 ? accept4(fake_listener, NULL, NULL, SOCK_NONBLOCK) : fd;
        ssize_t n = fd >= 0 ? recv(fd, bytes, sizeof bytes, MSG_DONTWAIT) : 0;
        if (n > 0) {
            memset(bytes, reflect ? bytes[0] : 7, reflect ? 1 : (size_t)n);
            (void)__real_send(fd, bytes, (size_t)n, MSG_NOSIGNAL);
        }
    }
    CHECK(pair->world.nodes[rank].lost == 1, "rank %d accepts a fake listener", rank);
    close(fd);
    close(fake_listener);
}

// A fake listener at a lane's address answers with wrong bytes, or reflects the hello.
static void test_fake_listener_is_refused(bool reflect) {
    struct pair *pair = malloc(sizeof *pair);
    CHECK(pair != NULL, "memory");
    pair_open(pair);
    int fake_listener = fake_listener_open(pair, 0, 1);
    connect_rank(pair, 0, 1);
    fake_listener_answer(pair, fake_listener, 1, reflect);
    flows_close(&pair->world);
    free(pair);
}

// A rank that connects on a lane which its peer has lost is dropped, but does not count as a process outside the job.
static void test_rank_on_a_lost_lane_is_not_counted(void) {
    struct pair *pair = malloc(sizeof *pair);
    CHECK(pair != NULL, "memory");
    pair_begin(pair, 1, "127.0.0.1:0", 2); // another lane would inform rank 1 of the loss
    int fake_listener = fake_listener_open(pair, 1, 0);
    connect_rank(pair, 1, 0);
    fake_listener_answer(pair, fake_listener, 0, false);
    connect_rank(pair, 0, 1);
    int64_t deadline = flows_deadline();
    while (pair->world.nodes[1].lost == 0) {
        pair_progress(pair);
        CHECK(nb_now_ns() < deadline, "rank 1 is not dropped");
    }
    CHECK(nb_lanes_refused(pair->world.nodes[0].lanes) == 0, "a rank of the job counts as an outsider");
    flows_close(&pair->world);
    free(pair);
}

static void test_ranks_connect(void) {
    struct pair *pair = malloc(sizeof *pair);
    CHECK(pair != NULL, "memory");
    pair_open(pair);
    connect_rank(pair, 0, 1);
    connect_rank(pair, 1, 0);
    await_ready(pair);
    CHECK(nb_lanes_refused(pair->world.nodes[0].lanes) == 0, "a rank was refused");
    flows_close(&pair->world);
    free(pair);
}

// A rank that answers late is dropped, as if other connections needed its place. It reconnects, and no lane is lost.
static void test_dropped_rank_reconnects(void) {
    struct pair *pair = malloc(sizeof *pair);
    CHECK(pair != NULL, "memory");
    pair_open(pair);
    failing_answers = 5;
    closing_answers = 5;
    connect_rank(pair, 0, 1);
    connect_rank(pair, 1, 0);
    await_ready(pair);
    CHECK(failing_answers == 0 && closing_answers == 0, "%d answers were not sent", failing_answers + closing_answers);
    flows_close(&pair->world);
    free(pair);
}

// A rank that is dropped each time gives up.
static void test_reconnection_is_limited(void) {
    struct pair *pair = malloc(sizeof *pair);
    int64_t deadline = flows_deadline();
    CHECK(pair != NULL, "memory");
    pair_open(pair);
    failing_answers = INT_MAX;
    connect_rank(pair, 0, 1);
    connect_rank(pair, 1, 0);
    while (pair->world.nodes[0].lost < LANES || pair->world.nodes[1].lost < LANES) {
        pair_progress(pair);
        CHECK(nb_now_ns() < deadline, "the ranks reconnect without a limit");
    }
    failing_answers = 0;
    flows_close(&pair->world);
    free(pair);
}

int main(void) {
    test_ranks_connect();
    test_late_connect_is_told_from_a_late_peer();
    test_dropped_rank_reconnects();
    test_reconnection_is_limited();
    test_replay_is_refused();
    test_replay_on_a_later_lane_is_refused();
    test_altered_handshake_is_refused();
    test_fake_listener_is_refused(false);
    test_fake_listener_is_refused(true);
    test_rank_on_a_lost_lane_is_not_counted();
    return 0;
}
