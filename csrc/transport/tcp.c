// The plain TCP network: a lane is one connection to each peer. Segments are pulled one at a time, with little unsent
// data in the kernel (TCP_NOTSENT_LOWAT), so that a slow connection never holds more than it can move.
#include <errno.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/list.h"
#include "base/loop.h"
#include "base/sha256.h"
#include "base/sock.h"
#include "bootstrap/bootstrap.h"
#include "transport/tcp_internal.h"
#include "transport/transport.h"

enum {
    NOTSENT_BYTES = 128 * 1024, // of unsent data the kernel holds: more only makes a slow connection hold more
    BACKLOG = 64,
    STRANGERS_MAX = 64,
    HELLO_MS = 2000,
    HELLO_MAGIC = 0x4e424c41 // "NBLA"
};

static void conn_ready(struct nb_watch *watch, uint32_t events);

static void tune(struct tcp_lane *lane, int fd) {
    int lowat = NOTSENT_BYTES;
    nb_sock_tune(fd, lane->config.timeout_ms);
    setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &lowat, sizeof lowat);
}

static void token_for(const struct tcp_lane *lane, int from, int to, unsigned char token[NB_TOKEN_BYTES]) {
    nb_boot_token(lane->config.boot, "tcp lane", from, to, token);
}

static int hello_send(struct tcp_lane *lane, int fd, int peer) {
    struct hello hello = {
        .magic = HELLO_MAGIC, .rank = (uint32_t)lane->config.rank, .lane = (uint32_t)lane->base.index};
    token_for(lane, lane->config.rank, peer, hello.token);
    // The first bytes of a new connection always fit its buffer.
    ssize_t n = send(fd, &hello, sizeof hello, MSG_DONTWAIT | MSG_NOSIGNAL);
    return n == (ssize_t)sizeof hello ? 0 : -ECONNRESET;
}

// 1: the other side is rank *peer of this job; 0: more to come; negative: not one of us.
static int hello_read(struct conn *conn, int *peer) {
    struct tcp_lane *lane = conn->lane;
    char *at = (char *)&conn->hello + conn->hello_got;
    ssize_t n = recv(conn->watch.fd, at, sizeof conn->hello - conn->hello_got, MSG_DONTWAIT);
    if (n <= 0) {
        return n < 0 && (errno == EAGAIN || errno == EINTR) ? 0 : -ECONNRESET;
    }
    conn->hello_got += (size_t)n;
    if (conn->hello_got < sizeof conn->hello) {
        return 0;
    }
    const struct hello *hello = &conn->hello;
    if (hello->magic != HELLO_MAGIC || hello->rank >= (uint32_t)lane->config.size ||
        hello->lane != (uint32_t)lane->base.index) {
        return NB_EAUTH;
    }
    unsigned char token[NB_TOKEN_BYTES];
    token_for(lane, (int)hello->rank, lane->config.rank, token);
    if (!nb_bytes_equal(token, hello->token, sizeof token)) {
        return NB_EAUTH;
    }
    *peer = (int)hello->rank;
    return 1;
}

static void stranger_drop(struct conn *conn) {
    nb_list_remove(&conn->link);
    conn->lane->stranger_count--;
    nb_tcp_shut(conn);
    free(conn);
}

static void stranger_ready(struct conn *conn) {
    struct tcp_lane *lane = conn->lane;
    int peer = NB_NO_PEER;
    int rc = hello_read(conn, &peer);
    if (rc == 0) {
        return;
    }
    struct conn *known = rc > 0 ? &lane->conns[peer] : NULL;
    if (known == NULL || peer <= lane->config.rank || known->state != NONE) {
        stranger_drop(conn);
        return;
    }
    int fd = conn->watch.fd;
    nb_loop_remove(lane->config.loop, &conn->watch);
    conn->watch.fd = -1;
    stranger_drop(conn);
    known->watch.fd = fd;
    known->state = OPEN;
    struct nb_error err = {0};
    if (nb_loop_add(lane->config.loop, &known->watch, EPOLLIN, &err) < 0 || hello_send(lane, fd, peer) < 0) {
        nb_tcp_lost(known, -ECONNRESET, "greeting failed");
        return;
    }
    lane->config.up->writable(lane->config.up_ctx, &lane->base, peer);
}

static void listener_ready(struct nb_watch *watch, uint32_t events) {
    (void)events;
    struct tcp_lane *lane = NB_CONTAINER(watch, struct tcp_lane, listener);
    int64_t now = nb_now_ns();
    NB_LIST_EACH_SAFE(it, nx, &lane->strangers) {
        struct conn *old = NB_CONTAINER(it, struct conn, link);
        if (now > old->retry_until_ns) {
            stranger_drop(old);
        }
    }
    int fd = accept4(watch->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
        return;
    }
    struct conn *conn = lane->stranger_count < STRANGERS_MAX ? calloc(1, sizeof *conn) : NULL;
    if (conn == NULL) {
        close(fd);
        return;
    }
    struct nb_error err = {0};
    tune(lane, fd);
    conn->lane = lane;
    conn->peer = NB_NO_PEER;
    conn->state = STRANGER;
    conn->retry_until_ns = now + (int64_t)HELLO_MS * 1000000;
    conn->watch.fd = fd;
    conn->watch.ready = conn_ready;
    nb_list_insert(&lane->strangers, &conn->link);
    lane->stranger_count++;
    if (nb_loop_add(lane->config.loop, &conn->watch, EPOLLIN, &err) < 0) {
        close(fd);
        conn->watch.fd = -1;
        stranger_drop(conn);
    }
}

static int conn_connect(struct conn *conn, struct nb_error *err) {
    struct tcp_lane *lane = conn->lane;
    struct nb_sockaddr from = lane->config.bind;
    nb_sock_set_port(&from, 0);
    int fd = nb_sock_connect(&conn->to, &from, err);
    if (fd < 0) {
        return fd;
    }
    tune(lane, fd);
    conn->watch.fd = fd;
    conn->state = CONNECTING;
    conn->hello_got = 0;
    int rc = nb_loop_add(lane->config.loop, &conn->watch, EPOLLOUT, err);
    if (rc < 0) {
        close(fd);
        conn->watch.fd = -1;
        conn->state = NONE;
    }
    return rc;
}

static void connecting_ready(struct conn *conn) {
    int rc = nb_sock_connected(conn->watch.fd);
    if (rc == 0) {
        rc = hello_send(conn->lane, conn->watch.fd, conn->peer);
    }
    if (rc < 0) {
        nb_tcp_lost(conn, rc, "connect failed");
        return;
    }
    conn->state = GREETING;
    nb_tcp_want(conn);
}

static void greeting_ready(struct conn *conn) {
    struct tcp_lane *lane = conn->lane;
    int peer = NB_NO_PEER;
    int rc = hello_read(conn, &peer);
    if (rc < 0 || (rc > 0 && peer != conn->peer)) {
        nb_tcp_lost(conn, rc < 0 ? rc : NB_EAUTH, "greeting refused");
    } else if (rc > 0) {
        conn->state = OPEN;
        lane->config.up->writable(lane->config.up_ctx, &lane->base, conn->peer);
    }
}

static void conn_ready(struct nb_watch *watch, uint32_t events) {
    struct conn *conn = NB_CONTAINER(watch, struct conn, watch);
    switch (conn->state) {
    case NONE:
        break;
    case STRANGER:
        stranger_ready(conn);
        break;
    case CONNECTING:
        connecting_ready(conn);
        break;
    case GREETING:
        greeting_ready(conn);
        break;
    case OPEN:
        conn->ahead = 0;
        if ((events & EPOLLOUT) != 0) {
            nb_tcp_write(conn);
        }
        if (conn->state == OPEN && (events & (EPOLLIN | EPOLLERR | EPOLLHUP)) != 0) {
            nb_tcp_read(conn);
        }
        break;
    }
}

static void tcp_close(struct nb_lane *base) {
    if (base == NULL) {
        return;
    }
    struct tcp_lane *lane = NB_CONTAINER(base, struct tcp_lane, base);
    NB_LIST_EACH_SAFE(it, nx, &lane->strangers) {
        stranger_drop(NB_CONTAINER(it, struct conn, link));
    }
    for (int i = 0; i < lane->config.size; i++) {
        nb_tcp_shut(&lane->conns[i]);
        free(lane->conns[i].messages);
    }
    if (lane->listener.fd >= 0) {
        nb_loop_remove(lane->config.loop, &lane->listener);
        close(lane->listener.fd);
    }
    free(lane->conns);
    free(lane);
}

static int tcp_open(const struct nb_lane_config *config, struct nb_lane **out, struct nb_error *err) {
    struct tcp_lane *lane = calloc(1, sizeof *lane);
    struct conn *conns = calloc((size_t)config->size, sizeof *conns);
    if (lane == NULL || conns == NULL) {
        free(conns);
        free(lane);
        return nb_fail(err, -ENOMEM, "lane %d for %d ranks", config->index, config->size);
    }
    lane->base = (struct nb_lane){.ops = &nb_tcp_ops, .index = config->index};
    lane->config = *config;
    lane->conns = conns;
    lane->addr = config->bind;
    lane->listener.ready = listener_ready;
    nb_list_init(&lane->strangers);
    for (int i = 0; i < config->size; i++) {
        conns[i].lane = lane;
        conns[i].peer = i;
        conns[i].watch.fd = -1;
        conns[i].watch.ready = conn_ready;
        nb_list_init(&conns[i].link);
    }
    lane->listener.fd = nb_sock_listen(&lane->addr, config->ports, BACKLOG, err);
    if (lane->listener.fd < 0) {
        int rc = lane->listener.fd;
        tcp_close(&lane->base);
        return rc;
    }
    int rc = nb_loop_add(config->loop, &lane->listener, EPOLLIN, err);
    if (rc < 0) {
        tcp_close(&lane->base);
        return rc;
    }
    *out = &lane->base;
    return 0;
}

static struct conn *conn_of(const struct nb_lane *base, int peer) {
    return &NB_CONTAINER(base, struct tcp_lane, base)->conns[peer];
}

static void tcp_address(const struct nb_lane *base, unsigned char addr[NB_LANE_ADDR_MAX], size_t *bytes) {
    const struct tcp_lane *lane = NB_CONTAINER(base, struct tcp_lane, base);
    nb_sock_format(&lane->addr, (char *)addr);
    *bytes = strlen((char *)addr) + 1;
}

static int tcp_peer_open(struct nb_lane *base, int peer, const unsigned char *addr, size_t bytes,
                         struct nb_error *err) {
    struct conn *conn = conn_of(base, peer);
    if (bytes == 0 || bytes > NB_SOCK_TEXT || addr[bytes - 1] != 0) {
        return nb_fail_peer(err, NB_EWIRE, peer, "rank %d gave no address for lane %d", peer, base->index);
    }
    if (conn->messages == NULL) {
        conn->messages = calloc(MESSAGES, sizeof *conn->messages);
    }
    if (conn->messages == NULL) {
        return nb_fail_peer(err, -ENOMEM, peer, "lane %d: messages for rank %d", base->index, peer);
    }
    int rc = nb_sock_parse((const char *)addr, &conn->to, err);
    if (rc < 0 || peer > conn->lane->config.rank || conn->state != NONE) {
        return rc;
    }
    return conn_connect(conn, err);
}

static bool tcp_peer_ready(const struct nb_lane *base, int peer) {
    return conn_of(base, peer)->state == OPEN;
}

static void tcp_peer_close(struct nb_lane *base, int peer) {
    struct conn *conn = conn_of(base, peer);
    struct nb_request *request = conn->request;
    conn->request = NULL;
    nb_tcp_reset(conn);
    if (request != NULL) {
        conn->lane->config.up->sent(conn->lane->config.up_ctx, base, request, NB_ECLOSED);
    }
}

static int tcp_map(struct nb_lane *base, void *memory, size_t bytes, struct nb_region *region, struct nb_error *err) {
    (void)base;
    (void)bytes;
    (void)err;
    *region = (struct nb_region){.addr = (uint64_t)(uintptr_t)memory};
    return 0;
}

static void tcp_unmap(struct nb_lane *base, struct nb_region *region) {
    (void)base;
    (void)region;
}

static int tcp_post(struct nb_lane *base, struct nb_request *request) {
    struct conn *conn = conn_of(base, request->peer);
    if (conn->state != OPEN || conn->mute || nb_tcp_pending(conn)) {
        conn->refused = true;
        return -EAGAIN;
    }
    nb_tcp_segment(conn, request);
    nb_tcp_write_ahead(conn);
    return 0;
}

static int tcp_message(struct nb_lane *base, int peer, const void *data, size_t bytes) {
    struct conn *conn = conn_of(base, peer);
    if (conn->messages == NULL || conn->state != OPEN || conn->mute || conn->message_count == MESSAGES ||
        bytes > NB_LANE_MESSAGE_MAX) {
        conn->refused = true;
        return -EAGAIN;
    }
    struct message *message = &conn->messages[(conn->message_head + conn->message_count) % MESSAGES];
    message->bytes = bytes;
    memcpy(message->data, data, bytes);
    conn->message_count++;
    if (!nb_tcp_pending(conn)) {
        nb_tcp_message_now(conn);
    }
    nb_tcp_want(conn);
    return 0;
}

static void tcp_resume(struct nb_lane *base, int peer) {
    struct conn *conn = conn_of(base, peer);
    if (conn->state == OPEN && conn->held) {
        conn->held = false;
        nb_tcp_want(conn);
        nb_tcp_read(conn);
    }
}

static int tcp_progress(struct nb_lane *base) {
    (void)base;
    return 0;
}

static int tcp_arm(struct nb_lane *base) {
    (void)base;
    return 0;
}

static void tcp_stats(const struct nb_lane *base, int peer, struct nb_lane_stats *stats) {
    *stats = conn_of(base, peer)->stats;
}

static const char *tcp_describe(const struct nb_lane *base) {
    (void)base;
    return "tcp";
}

const struct nb_lane_ops nb_tcp_ops = {.name = "tcp",
                                       .kind = NB_LANE_STREAM,
                                       .open = tcp_open,
                                       .address = tcp_address,
                                       .peer_open = tcp_peer_open,
                                       .peer_ready = tcp_peer_ready,
                                       .peer_close = tcp_peer_close,
                                       .map = tcp_map,
                                       .unmap = tcp_unmap,
                                       .post = tcp_post,
                                       .message = tcp_message,
                                       .resume = tcp_resume,
                                       .progress = tcp_progress,
                                       .arm = tcp_arm,
                                       .stats = tcp_stats,
                                       .describe = tcp_describe,
                                       .close = tcp_close};
