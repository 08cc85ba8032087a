// TCP network: a lane has two connections with each peer, one for each direction. It pulls one segment at a time, and
// keeps little unsent data in the kernel (TCP_NOTSENT_LOWAT), so that a slow connection never holds more than it can
// send.
#include <errno.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/error.h"
#include "base/list.h"
#include "base/loop.h"
#include "base/sock.h"
#include "base/wire.h"
#include "transport/tcp_internal.h"
#include "transport/transport.h"

enum { RETRIES_MAX = 16 }; // connects of one connection after the first

static void in_ready(struct nb_watch *watch, uint32_t events) {
    (void)events;
    struct conn *conn = NB_CONTAINER(watch, struct conn, in_watch);
    conn->ahead = 0;
    nb_tcp_read(conn);
}

static int conn_connect(struct conn *conn, struct nb_error *err) {
    struct tcp_lane *lane = conn->lane;
    struct nb_sockaddr from = lane->config.bind;
    nb_sock_set_port(&from, 0);
    int fd = nb_sock_connect(&conn->to, &from, lane->config.congestion, err);
    if (fd < 0) {
        return fd;
    }
    nb_tcp_tune(lane, fd);
    conn->out_watch.fd = fd;
    conn->state = CONNECTING;
    int rc = nb_loop_add(lane->config.loop, &conn->out_watch, EPOLLOUT, err);
    if (rc < 0) {
        close(fd);
        conn->out_watch.fd = -1;
        conn->state = NONE;
    }
    return rc;
}

static void connecting_ready(struct conn *conn) {
    int rc = nb_sock_connected(conn->out_watch.fd);
    if (rc == 0) {
        rc = nb_tcp_send_hello(conn->lane, conn->out_watch.fd, &conn->handshake);
    }
    if (rc < 0) {
        nb_tcp_lost(conn, rc, "connect failed");
        return;
    }
    conn->state = HANDSHAKE;
    nb_tcp_want_out(conn);
}

// Connects again: the peer may have dropped the connection only because this rank answered late.
static void connect_again(struct conn *conn, int why) {
    struct nb_error err = {0};
    nb_tcp_shut(conn->lane, &conn->out_watch);
    conn->state = NONE;
    if (++conn->retries > RETRIES_MAX) {
        nb_tcp_lost(conn, why, "handshake refused");
        return;
    }
    int rc = conn_connect(conn, &err);
    if (rc < 0) {
        nb_tcp_lost(conn, rc, "connecting again");
    }
}

static void handshake_ready(struct conn *conn) {
    struct tcp_lane *lane = conn->lane;
    int rc = nb_tcp_read_answer(lane, conn->out_watch.fd, &conn->handshake, conn->peer, &conn->to);
    if (rc == NB_EAUTH) {
        nb_tcp_lost(conn, rc, "handshake refused");
    } else if (rc < 0) {
        connect_again(conn, rc);
    } else if (rc > 0) {
        conn->state = OPEN;
        lane->config.up->writable(lane->config.up_ctx, &lane->base, conn->peer);
    }
}

// Handles an outgoing connection. The only input on it is its end.
static void open_ready(struct conn *conn, uint32_t events) {
    conn->ahead = 0;
    if ((events & EPOLLOUT) != 0) {
        nb_tcp_write(conn);
    }
    if (conn->state == OPEN && !conn->out_ended && (events & (EPOLLIN | EPOLLERR | EPOLLHUP)) != 0) {
        char byte;
        ssize_t n = recv(conn->out_watch.fd, &byte, 1, MSG_DONTWAIT);
        bool later = n < 0 && (errno == EAGAIN || errno == EINTR);
        if (!later) {
            nb_tcp_out_ended(conn, n < 0 ? -errno : n > 0 ? NB_EWIRE : 0);
        }
    }
}

static void out_ready(struct nb_watch *watch, uint32_t events) {
    struct conn *conn = NB_CONTAINER(watch, struct conn, out_watch);
    switch (conn->state) {
    case NONE:
        break;
    case CONNECTING:
        connecting_ready(conn);
        break;
    case HANDSHAKE:
        handshake_ready(conn);
        break;
    case OPEN:
        open_ready(conn, events);
        break;
    }
}

static void tcp_close(struct nb_lane *base) {
    if (base == NULL) {
        return;
    }
    struct tcp_lane *lane = NB_CONTAINER(base, struct tcp_lane, base);
    nb_tcp_listen_close(lane);
    for (int i = 0; i < lane->config.size; i++) {
        nb_tcp_shut(lane, &lane->conns[i].out_watch);
        nb_tcp_shut(lane, &lane->conns[i].in_watch);
        free(lane->conns[i].messages);
    }
    free(lane->conns);
    free(lane);
}

static int tcp_check(const struct nb_lane_config *config, struct nb_error *err) {
    return config->congestion != NULL ? nb_sock_check_congestion(config->congestion, err) : 0;
}

static int tcp_open(const struct nb_lane_config *config, struct nb_lane **out, struct nb_error *err) {
    int allowed = tcp_check(config, err);
    if (allowed < 0) {
        return allowed;
    }
    struct tcp_lane *lane = calloc(1, sizeof *lane);
    struct conn *conns = calloc((size_t)config->size, sizeof *conns);
    if (lane == NULL || conns == NULL) {
        free(conns);
        free(lane);
        return nb_fail(err, -ENOMEM, "cannot allocate lane %d for %d ranks", config->index, config->size);
    }
    lane->base = (struct nb_lane){.ops = &nb_tcp_ops, .index = config->index};
    lane->config = *config;
    lane->config.provider = NULL;
    lane->config.library = NULL;
    if (config->congestion != NULL) {
        snprintf(lane->congestion, sizeof lane->congestion, "%s", config->congestion);
        lane->config.congestion = lane->congestion;
    }
    lane->conns = conns;
    for (int i = 0; i < config->size; i++) {
        conns[i].lane = lane;
        conns[i].peer = i;
        conns[i].out_watch = (struct nb_watch){.fd = -1, .ready = out_ready};
        conns[i].in_watch = (struct nb_watch){.fd = -1, .ready = in_ready};
    }
    int rc = nb_tcp_listen(lane, err);
    if (rc < 0) {
        tcp_close(&lane->base);
        return rc;
    }
    *out = &lane->base;
    return 0;
}

static void tcp_address(const struct nb_lane *base, unsigned char addr[NB_LANE_ADDR_MAX], size_t *bytes) {
    const struct tcp_lane *lane = NB_CONTAINER(base, struct tcp_lane, base);
    nb_sock_format(&lane->addr, (char *)addr);
    *bytes = strlen((char *)addr) + 1;
}

static int tcp_peer_open(struct nb_lane *base, int peer, const unsigned char *addr, size_t bytes,
                         struct nb_error *err) {
    struct conn *conn = nb_tcp_conn(base, peer);
    if (bytes == 0 || bytes > NB_SOCK_TEXT || addr[bytes - 1] != 0) {
        return nb_fail_peer(err, NB_EWIRE, peer, "rank %d sent no address for lane %d", peer, base->index);
    }
    if (conn->messages == NULL) {
        conn->messages = calloc(MESSAGES, sizeof *conn->messages);
    }
    if (conn->messages == NULL) {
        return nb_fail_peer(err, -ENOMEM, peer, "lane %d: cannot allocate messages for rank %d", base->index, peer);
    }
    int rc = nb_sock_parse((const char *)addr, &conn->to, err);
    if (rc < 0 || conn->state != NONE) {
        return rc;
    }
    conn->retries = 0;
    conn->gone = false; // a peer that connected and left too early connects again, or is refused there
    return conn_connect(conn, err);
}

static bool tcp_peer_ready(const struct nb_lane *base, int peer) {
    const struct conn *conn = nb_tcp_conn(base, peer);
    return conn->state == OPEN && conn->in_watch.fd >= 0;
}

static void tcp_listen_end(struct nb_lane *base) {
    nb_tcp_listen_close(NB_CONTAINER(base, struct tcp_lane, base));
}

static bool tcp_connecting(const struct nb_lane *base, int peer, char where[NB_SOCK_TEXT]) {
    const struct conn *conn = nb_tcp_conn(base, peer);
    nb_sock_format(conn->state != OPEN ? &conn->to : &conn->lane->addr, where);
    return conn->state != OPEN;
}

static void tcp_peer_close(struct nb_lane *base, int peer) {
    struct conn *conn = nb_tcp_conn(base, peer);
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

static int tcp_progress(struct nb_lane *base) {
    (void)base;
    return 0;
}

static int tcp_arm(struct nb_lane *base) {
    (void)base;
    return 0;
}

static void tcp_stats(const struct nb_lane *base, int peer, struct nb_lane_stats *stats) {
    *stats = nb_tcp_conn(base, peer)->stats;
}

static const char *tcp_describe(const struct nb_lane *base) {
    (void)base;
    return "tcp";
}

const struct nb_lane_ops nb_tcp_ops = {.name = "tcp",
                                       .kind = NB_LANE_STREAM,
                                       .check = tcp_check,
                                       .open = tcp_open,
                                       .address = tcp_address,
                                       .peer_open = tcp_peer_open,
                                       .peer_ready = tcp_peer_ready,
                                       .listen_end = tcp_listen_end,
                                       .connecting = tcp_connecting,
                                       .peer_close = tcp_peer_close,
                                       .map = tcp_map,
                                       .unmap = tcp_unmap,
                                       .post = nb_tcp_post,
                                       .message = nb_tcp_message,
                                       .resume = nb_tcp_resume,
                                       .progress = tcp_progress,
                                       .arm = tcp_arm,
                                       .stats = tcp_stats,
                                       .held = nb_tcp_held,
                                       .describe = tcp_describe,
                                       .close = tcp_close};
