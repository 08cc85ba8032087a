// The handshake of a TCP lane: data recorded from one connection is useless for another, and neither side accepts a
// wrong proof. A replayed, altered or reflected handshake is refused and counted; ranks of the job still connect.
#include <limits.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/wire.h"
#include "flows.h"
#include "transport/transport.h"

enum { LANES = 2, STRIDE = NB_LANE_ADDR_MAX + 8, LANE_AT = 8, SEEN_MAX = 512, TURNS = 200 };

// What rank 1 sends to the port that is observed.
static struct {
    uint16_t port;
    unsigned char bytes[SEEN_MAX];
    size_t count;
    size_t first; // of the first message
} seen;

ssize_t __real_send(int fd, const void *data, size_t bytes, int flags);
ssize_t __wrap_send(int fd, const void *data, size_t bytes, int flags);

// So many answers of listeners are lost, as if the connection had been dropped for being late.
static int answers_to_lose;
// So many connections end behind the answer, which arrives.
static int answers_to_end;

ssize_t __wrap_send(int fd, const void *data, size_t bytes, int flags) {
    struct wire_tcp_hello hello;
    bool answer = bytes == sizeof(struct wire_tcp_answer);
    memcpy(&hello, data, bytes < sizeof hello ? bytes : sizeof hello);
    answer = answer && !(bytes == sizeof hello && hello.magic == NB_WIRE_TCP_MAGIC);
    if (answer && answers_to_lose > 0) {
        answers_to_lose--;
        errno = ECONNRESET;
        return -1;
    }
    struct nb_sockaddr to = {.len = sizeof to.in6};
    ssize_t n = __real_send(fd, data, bytes, flags);
    if (answer && answers_to_end > 0) {
        answers_to_end--;
        (void)shutdown(fd, SHUT_RDWR);
    }
    if (seen.port != 0 && n > 0 && getpeername(fd, &to.any, &to.len) == 0 && nb_sock_port(&to) == seen.port &&
        seen.count + (size_t)n <= SEEN_MAX) {
        memcpy(seen.bytes + seen.count, data, (size_t)n);
        seen.count += (size_t)n;
        seen.first = seen.first == 0 ? (size_t)n : seen.first;
    }
    return n;
}

struct pair {
    struct flow_world world;
    struct nb_boot boots[2];
    unsigned char addresses[2][LANES * STRIDE];
};

// Rank 0 at any ports, or, with one lane, at that one; rank 1, where it is to be there, at any.
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

static void pair_turn(struct pair *pair) {
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

static void meet(struct pair *pair, int from, int to) {
    struct nb_error err = {0};
    CHECK(nb_lanes_peer_open(pair->world.nodes[to].lanes, from, pair->addresses[from], &err) == 0, "%s", err.text);
}

static void all_ready(struct pair *pair) {
    int64_t deadline = flows_deadline();
    while (!nb_lanes_peer_ready(pair->world.nodes[0].lanes, 1) || !nb_lanes_peer_ready(pair->world.nodes[1].lanes, 0)) {
        pair_turn(pair);
        CHECK(nb_now_ns() < deadline, "two ranks never meet");
    }
    CHECK(pair->world.nodes[0].lost == 0 && pair->world.nodes[1].lost == 0, "a lane was lost");
}

// Another port in a lane's place: what connects there does not come to the rank.
static int trap_open(struct pair *pair, int rank, int lane) {
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

static int outsider(struct pair *pair, const struct nb_sockaddr *port) {
    int fd = nb_sock_connect(port, NULL, NULL, NULL);
    struct pollfd poller = {.fd = fd, .events = POLLOUT};
    CHECK(fd >= 0 && poll(&poller, 1, 10000) == 1 && nb_sock_connected(fd) == 0, "connect: %m");
    pair_turn(pair);
    return fd;
}

// Says what was seen, waiting for an answer where one was waited for. True: it was hung up on, so it came to nothing.
static bool replay(struct pair *pair, int fd, const unsigned char *bytes) {
    char heard[256];
    bool over = false;
    (void)__real_send(fd, bytes, seen.first, MSG_NOSIGNAL);
    for (int turn = 0; turn < TURNS && recv(fd, heard, sizeof heard, MSG_DONTWAIT) < 0 && errno == EAGAIN; turn++) {
        pair_turn(pair);
    }
    (void)__real_send(fd, bytes + seen.first, seen.count - seen.first, MSG_NOSIGNAL);
    for (int turn = 0; turn < TURNS && !over; turn++) {
        pair_turn(pair);
        ssize_t n = recv(fd, heard, sizeof heard, MSG_DONTWAIT);
        over = n == 0 || (n < 0 && errno != EAGAIN);
    }
    close(fd);
    return over;
}

// Rank 1 connects to lane 0 of rank 0 alone, and all that it says there is seen.
static void observe(struct pair *pair) {
    unsigned char before[LANES * STRIDE];
    memcpy(before, pair->addresses[0], sizeof before);
    struct nb_sockaddr port = port_of(pair, 0, 0);
    int trap = trap_open(pair, 0, 1);
    memset(&seen, 0, sizeof seen);
    seen.port = nb_sock_port(&port);
    meet(pair, 0, 1);
    for (int turn = 0; turn < TURNS; turn++) {
        pair_turn(pair);
    }
    seen.port = 0;
    CHECK(seen.count > 0, "nothing was seen");
    close(trap);
    memcpy(pair->addresses[0], before, sizeof before);
}

static void test_observed(void) {
    struct pair *pair = malloc(sizeof *pair);
    unsigned char other[SEEN_MAX];
    CHECK(pair != NULL, "memory");
    pair_open(pair);
    observe(pair);
    struct nb_sockaddr first = port_of(pair, 0, 0);
    struct nb_sockaddr second = port_of(pair, 0, 1);
    memcpy(other, seen.bytes, seen.count);
    other[LANE_AT] = 1;
    CHECK(replay(pair, outsider(pair, &second), other), "a proof of lane 0 is replayed on lane 1");
    CHECK(replay(pair, outsider(pair, &second), seen.bytes), "lane 0's handshake is taken at lane 1");
    CHECK(replay(pair, outsider(pair, &first), seen.bytes), "a handshake is taken twice");
    CHECK(nb_lanes_refused(pair->world.nodes[0].lanes) == 3, "%llu were counted",
          (unsigned long long)nb_lanes_refused(pair->world.nodes[0].lanes));
    flows_close(&pair->world);
    free(pair);
}

// The same ranks, session, lane and address: all that differs is when.
static void test_observed_before(void) {
    struct pair *pair = malloc(sizeof *pair);
    char text[NB_SOCK_TEXT];
    CHECK(pair != NULL, "memory");
    pair_open(pair);
    observe(pair);
    struct nb_sockaddr port = port_of(pair, 0, 0);
    nb_sock_format(&port, text);
    flows_close(&pair->world);
    pair_begin(pair, 1, text, 1);
    CHECK(replay(pair, outsider(pair, &port), seen.bytes), "a handshake of the past is taken");
    flows_close(&pair->world);
    free(pair);
}

// Any bit that differs.
static void test_altered(void) {
    struct pair *pair = malloc(sizeof *pair);
    CHECK(pair != NULL, "memory");
    pair_open(pair);
    observe(pair);
    struct nb_sockaddr port = port_of(pair, 0, 1);
    for (size_t at = 0; at < seen.count; at++) {
        unsigned char altered[SEEN_MAX];
        memcpy(altered, seen.bytes, seen.count);
        altered[LANE_AT] = 1;
        altered[at] ^= 0x10;
        CHECK(replay(pair, outsider(pair, &port), altered), "byte %zu may be another", at);
    }
    flows_close(&pair->world);
    free(pair);
}

// What answers at a lane's address in its place: bytes at random, or the hello itself.
static void test_false_listener(bool reflects) {
    struct pair *pair = malloc(sizeof *pair);
    unsigned char bytes[64] = {0};
    CHECK(pair != NULL, "memory");
    pair_open(pair);
    int trap = trap_open(pair, 0, 1);
    meet(pair, 0, 1);
    int fd = -1;
    for (int turn = 0; turn < TURNS && pair->world.nodes[1].lost == 0; turn++) {
        pair_turn(pair);
        fd = fd < 0 ? accept4(trap, NULL, NULL, SOCK_NONBLOCK) : fd;
        ssize_t n = fd >= 0 ? recv(fd, bytes, sizeof bytes, MSG_DONTWAIT) : 0;
        if (n > 0) {
            memset(bytes, reflects ? bytes[0] : 7, reflects ? 1 : (size_t)n);
            (void)__real_send(fd, bytes, (size_t)n, MSG_NOSIGNAL);
        }
    }
    CHECK(pair->world.nodes[1].lost == 1, "a listener that proves nothing is taken for rank 0");
    close(fd);
    close(trap);
    flows_close(&pair->world);
    free(pair);
}

static void test_ranks_meet(void) {
    struct pair *pair = malloc(sizeof *pair);
    CHECK(pair != NULL, "memory");
    pair_open(pair);
    meet(pair, 0, 1);
    meet(pair, 1, 0);
    all_ready(pair);
    CHECK(nb_lanes_refused(pair->world.nodes[0].lanes) == 0, "a rank was refused");
    flows_close(&pair->world);
    free(pair);
}

// A rank that answers late is dropped while others wait for its place. It connects again, and no lane is lost.
static void test_dropped_while_late(void) {
    struct pair *pair = malloc(sizeof *pair);
    CHECK(pair != NULL, "memory");
    pair_open(pair);
    answers_to_lose = 5;
    answers_to_end = 5;
    meet(pair, 0, 1);
    meet(pair, 1, 0);
    all_ready(pair);
    CHECK(answers_to_lose == 0 && answers_to_end == 0, "%d answers were never sent", answers_to_lose + answers_to_end);
    flows_close(&pair->world);
    free(pair);
}

// It gives up in the end.
static void test_dropped_each_time(void) {
    struct pair *pair = malloc(sizeof *pair);
    int64_t deadline = flows_deadline();
    CHECK(pair != NULL, "memory");
    pair_open(pair);
    answers_to_lose = INT_MAX;
    meet(pair, 0, 1);
    meet(pair, 1, 0);
    while (pair->world.nodes[0].lost < LANES || pair->world.nodes[1].lost < LANES) {
        pair_turn(pair);
        CHECK(nb_now_ns() < deadline, "a connection is tried without end");
    }
    answers_to_lose = 0;
    flows_close(&pair->world);
    free(pair);
}

int main(void) {
    test_ranks_meet();
    test_dropped_while_late();
    test_dropped_each_time();
    test_observed();
    test_observed_before();
    test_altered();
    test_false_listener(false);
    test_false_listener(true);
    return 0;
}
