// The plain TCP network: a lane is one connection to each peer. Segments are pulled one at a time, with little unsent
// data in the kernel (TCP_NOTSENT_LOWAT), so that a slow connection never holds more than it can move.
#include "transport/tcp.h"

#include <errno.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/list.h"
#include "base/sha256.h"
#include "bootstrap/bootstrap.h"

enum {
    NOTSENT_BYTES = 128 * 1024, // of unsent data the kernel holds: research shows 64 to 128 KiB lose nothing
    READ_BUDGET = 2 * 1024 * 1024, // bytes of one connection in one turn of the loop
    WRITE_BUDGET = 2 * 1024 * 1024,
    BACKLOG = 64,
    MESSAGES = 64, // queued to one peer
    STRANGERS_MAX = 64,
    HELLO_MS = 2000,
    HELLO_MAGIC = 0x4e424c41, // "NBLA"
    TYPE_SEGMENT = 1,
    TYPE_MESSAGE = 2
};

struct hello {
    uint32_t magic;
    uint32_t rank;
    uint32_t lane;
    uint32_t zero;
    unsigned char token[NB_TOKEN_BYTES];
};

struct header {
    uint32_t type;
    uint32_t bytes;
    uint64_t op;
    uint32_t block;
    uint16_t blocks;
    uint16_t zero;
};

_Static_assert(sizeof(struct hello) == 32, "crosses the wire");
_Static_assert(sizeof(struct header) == 24, "crosses the wire");

struct message {
    size_t bytes;
    unsigned char data[NB_LANE_MESSAGE_MAX];
};

enum state { NONE, CONNECTING, GREETING, OPEN, STRANGER };

// A cursor over scattered memory.
struct pieces {
    struct iovec iov[NB_LANE_IOV_MAX + 1];
    int count;
    int at;
};

struct conn {
    struct nb_watch watch;
    struct tcp_lane *lane;
    struct nb_list link; // among the lane's strangers
    enum state state;
    int peer;
    struct nb_sockaddr to;
    int64_t retry_until_ns;
    struct hello hello; // being read
    size_t hello_got;
    // out
    struct nb_request *request;
    struct header out_header;
    struct pieces out;
    struct message *messages;
    unsigned message_head;
    unsigned message_count;
    bool out_is_message;
    bool refused; // post said -EAGAIN: writable() is owed
    // in
    struct header in_header;
    size_t header_got;
    bool in_payload;
    bool held; // place said -EAGAIN
    struct nb_frame frame;
    struct pieces in;
    size_t in_left;
    unsigned char in_message[NB_LANE_MESSAGE_MAX];
    struct nb_lane_stats stats;
};

struct tcp_lane {
    struct nb_lane base;
    struct nb_lane_config config;
    struct nb_watch listener;
    struct nb_sockaddr addr;
    struct nb_list strangers;
    int stranger_count;
    struct conn *conns; // by rank
};

static void conn_ready(struct nb_watch *watch, uint32_t events);
static void conn_write(struct conn *conn);

static size_t pieces_left(const struct pieces *p) {
    size_t bytes = 0;
    for (int i = p->at; i < p->count; i++) {
        bytes += p->iov[i].iov_len;
    }
    return bytes;
}

static void pieces_skip(struct pieces *p, size_t bytes) {
    while (p->at < p->count && bytes >= p->iov[p->at].iov_len) {
        bytes -= p->iov[p->at].iov_len;
        p->at++;
    }
    if (bytes > 0) {
        p->iov[p->at].iov_base = (char *)p->iov[p->at].iov_base + bytes;
        p->iov[p->at].iov_len -= bytes;
    }
}

static void conn_want(struct conn *conn) {
    uint32_t events = conn->held ? 0 : (uint32_t)EPOLLIN;
    if (conn->state == CONNECTING || (conn->state == OPEN && (conn->request != NULL || conn->out_is_message))) {
        events |= EPOLLOUT;
    }
    nb_loop_change(conn->lane->config.loop, &conn->watch, events);
}

static void conn_shut(struct conn *conn) {
    if (conn->watch.fd >= 0) {
        nb_loop_remove(conn->lane->config.loop, &conn->watch);
        close(conn->watch.fd);
        conn->watch.fd = -1;
    }
    conn->state = NONE;
}

static void conn_reset(struct conn *conn) {
    conn_shut(conn);
    conn->hello_got = 0;
    conn->out_is_message = false;
    conn->refused = false;
    conn->message_count = 0;
    conn->header_got = 0;
    conn->in_payload = false;
    conn->held = false;
}

// The flow is gone: who waits for it is told once.
static void conn_lost(struct conn *conn, int code, const char *what) {
    struct tcp_lane *lane = conn->lane;
    struct nb_error why = {0};
    errno = code > NB_EPEER ? -code : 0;
    nb_fail_peer(&why, code > NB_EPEER ? NB_EPEER : code, conn->peer, "lane %d to rank %d: %s (%s)", lane->base.index,
                 conn->peer, what, nb_code_name(code));
    struct nb_request *request = conn->request;
    conn->request = NULL;
    conn_reset(conn);
    if (request != NULL) {
        lane->config.up->sent(lane->config.up_ctx, &lane->base, request, why.code);
    }
    lane->config.up->lost(lane->config.up_ctx, &lane->base, conn->peer, &why);
}

static void tune(struct tcp_lane *lane, int fd) {
    int lowat = NOTSENT_BYTES;
    nb_sock_tune(fd, lane->config.timeout_ms);
    setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &lowat, sizeof lowat);
}

static void token_for(const struct tcp_lane *lane, int from, int to, unsigned char token[NB_TOKEN_BYTES]) {
    nb_boot_token(lane->config.boot, "tcp lane", from, to, token);
}

static int hello_send(struct tcp_lane *lane, int fd, int peer) {
    struct hello hello = {.magic = HELLO_MAGIC, .rank = (uint32_t)lane->config.rank, .lane = (uint32_t)lane->base.index};
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
    conn_shut(conn);
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
        conn_lost(known, -ECONNRESET, "greeting failed");
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
        conn_lost(conn, rc, "connect failed");
        return;
    }
    conn->state = GREETING;
    conn_want(conn);
}

static void greeting_ready(struct conn *conn) {
    struct tcp_lane *lane = conn->lane;
    int peer = NB_NO_PEER;
    int rc = hello_read(conn, &peer);
    if (rc < 0 || (rc > 0 && peer != conn->peer)) {
        conn_lost(conn, rc < 0 ? rc : NB_EAUTH, "greeting refused");
    } else if (rc > 0) {
        conn->state = OPEN;
        lane->config.up->writable(lane->config.up_ctx, &lane->base, conn->peer);
    }
}

// Where the bytes behind a complete header go. 0, -EAGAIN (held), or a failure.
static int payload_begin(struct conn *conn) {
    struct tcp_lane *lane = conn->lane;
    const struct header *h = &conn->in_header;
    conn->in.at = 0;
    if (h->type == TYPE_MESSAGE && h->bytes <= NB_LANE_MESSAGE_MAX) {
        conn->in.iov[0] = (struct iovec){.iov_base = conn->in_message, .iov_len = h->bytes};
        conn->in.count = 1;
    } else if (h->type == TYPE_SEGMENT && h->bytes <= NB_SEGMENT_MAX) {
        conn->frame = (struct nb_frame){.op = h->op, .block = h->block, .blocks = h->blocks, .bytes = h->bytes};
        int n = lane->config.up->place(lane->config.up_ctx, &lane->base, conn->peer, &conn->frame, conn->in.iov);
        if (n < 0) {
            return n;
        }
        conn->in.count = n;
    } else {
        return NB_EWIRE;
    }
    conn->in_left = h->bytes;
    conn->in_payload = true;
    return 0;
}

static void payload_end(struct conn *conn) {
    struct tcp_lane *lane = conn->lane;
    conn->in_payload = false;
    if (conn->in_header.type == TYPE_MESSAGE) {
        lane->config.up->message(lane->config.up_ctx, &lane->base, conn->peer, conn->in_message, conn->in_header.bytes);
        return;
    }
    conn->stats.bytes_in += conn->in_header.bytes;
    lane->config.up->landed(lane->config.up_ctx, &lane->base, conn->peer, &conn->frame);
}

// One receive: the rest of the payload, and the header behind it.
static ssize_t conn_recv(struct conn *conn) {
    struct iovec iov[NB_LANE_IOV_MAX + 1];
    int count = 0;
    for (int i = conn->in.at; conn->in_payload && i < conn->in.count; i++) {
        iov[count++] = conn->in.iov[i];
    }
    iov[count].iov_base = (char *)&conn->in_header + conn->header_got;
    iov[count].iov_len = sizeof conn->in_header - conn->header_got;
    struct header next = {0};
    if (conn->in_payload) { // the header under way is still needed
        iov[count].iov_base = &next;
        iov[count].iov_len = sizeof next;
    }
    struct msghdr msg = {.msg_iov = iov, .msg_iovlen = (size_t)count + 1};
    ssize_t n = recvmsg(conn->watch.fd, &msg, MSG_DONTWAIT);
    if (n <= 0) {
        return n;
    }
    size_t got = (size_t)n;
    if (conn->in_payload) {
        size_t payload = got < conn->in_left ? got : conn->in_left;
        pieces_skip(&conn->in, payload);
        conn->in_left -= payload;
        got -= payload;
        if (conn->in_left > 0) {
            return n;
        }
        payload_end(conn);
        if (conn->state != OPEN) {
            return n;
        }
        conn->header_got = 0;
        memcpy(&conn->in_header, &next, sizeof next);
    }
    conn->header_got += got;
    return n;
}

static void conn_read(struct conn *conn) {
    size_t budget = READ_BUDGET;
    while (conn->state == OPEN) {
        while (!conn->in_payload && conn->header_got == sizeof conn->in_header) {
            int rc = payload_begin(conn);
            if (rc == -EAGAIN) {
                conn->held = true;
                conn_want(conn);
                return;
            }
            if (rc < 0) {
                conn_lost(conn, rc, "an impossible segment was announced");
                return;
            }
            if (conn->in_left == 0) {
                payload_end(conn);
                conn->header_got = 0;
            }
        }
        if (conn->state != OPEN || budget == 0) {
            return;
        }
        ssize_t n = conn_recv(conn);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
            return;
        }
        if (n <= 0) {
            conn_lost(conn, n < 0 ? -errno : -ECONNRESET, "connection closed");
            return;
        }
        budget = (size_t)n < budget ? budget - (size_t)n : 0;
    }
}

static void out_begin(struct conn *conn, struct header header) {
    conn->out_header = header;
    conn->out.at = 0;
    conn->out.count = 1;
    conn->out.iov[0] = (struct iovec){.iov_base = &conn->out_header, .iov_len = sizeof conn->out_header};
}

// The next message, where no segment is under way.
static void message_begin(struct conn *conn) {
    struct message *message = &conn->messages[conn->message_head % MESSAGES];
    out_begin(conn, (struct header){.type = TYPE_MESSAGE, .bytes = (uint32_t)message->bytes});
    conn->out.iov[conn->out.count++] = (struct iovec){.iov_base = message->data, .iov_len = message->bytes};
    conn->out_is_message = true;
}

static void out_end(struct conn *conn) {
    struct tcp_lane *lane = conn->lane;
    if (conn->out_is_message) {
        conn->out_is_message = false;
        conn->message_head++;
        conn->message_count--;
        return;
    }
    struct nb_request *request = conn->request;
    conn->request = NULL;
    conn->stats.bytes_out += request->frame.bytes;
    if (conn->message_count > 0) {
        message_begin(conn);
    }
    lane->config.up->sent(lane->config.up_ctx, &lane->base, request, 0);
}

static bool out_pending(const struct conn *conn) {
    return conn->request != NULL || conn->out_is_message;
}

// Writes until the kernel has enough, pulling the next segment each time one is out.
static void conn_write(struct conn *conn) {
    size_t budget = WRITE_BUDGET;
    while (conn->state == OPEN && out_pending(conn) && budget > 0) {
        struct msghdr msg = {.msg_iov = &conn->out.iov[conn->out.at], .msg_iovlen = (size_t)(conn->out.count - conn->out.at)};
        ssize_t n = sendmsg(conn->watch.fd, &msg, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0 && errno != EAGAIN && errno != EINTR) {
            conn_lost(conn, -errno, "send failed");
            return;
        }
        if (n < 0) {
            break;
        }
        pieces_skip(&conn->out, (size_t)n);
        budget = (size_t)n < budget ? budget - (size_t)n : 0;
        if (pieces_left(&conn->out) > 0) {
            continue;
        }
        out_end(conn);
        if (conn->state == OPEN && conn->message_count > 0 && !out_pending(conn)) {
            message_begin(conn);
        }
        if (conn->state == OPEN && !out_pending(conn) && conn->refused) {
            conn->refused = false;
            conn->lane->config.up->writable(conn->lane->config.up_ctx, &conn->lane->base, conn->peer);
        }
    }
    if (conn->state == OPEN) {
        conn_want(conn);
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
        if ((events & EPOLLOUT) != 0) {
            conn_write(conn);
        }
        if (conn->state == OPEN && (events & (EPOLLIN | EPOLLERR | EPOLLHUP)) != 0) {
            conn_read(conn);
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
        conn_shut(&lane->conns[i]);
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
    conn_reset(conn);
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
    if (conn->state != OPEN || out_pending(conn)) {
        conn->refused = true;
        return -EAGAIN;
    }
    const struct nb_frame *frame = &request->frame;
    out_begin(conn, (struct header){.type = TYPE_SEGMENT,
                                    .bytes = frame->bytes,
                                    .op = frame->op,
                                    .block = frame->block,
                                    .blocks = frame->blocks});
    for (int i = 0; i < request->iov_count; i++) {
        conn->out.iov[conn->out.count++] = request->iov[i];
    }
    conn->request = request;
    // The write happens from the loop: the socket is writable, so it comes at once and never recurses.
    conn_want(conn);
    return 0;
}

static int tcp_message(struct nb_lane *base, int peer, const void *data, size_t bytes) {
    struct conn *conn = conn_of(base, peer);
    if (conn->messages == NULL) {
        conn->messages = calloc(MESSAGES, sizeof *conn->messages);
    }
    if (conn->messages == NULL || conn->state != OPEN || conn->message_count == MESSAGES ||
        bytes > NB_LANE_MESSAGE_MAX) {
        conn->refused = true;
        return -EAGAIN;
    }
    struct message *message = &conn->messages[(conn->message_head + conn->message_count) % MESSAGES];
    message->bytes = bytes;
    memcpy(message->data, data, bytes);
    conn->message_count++;
    if (!out_pending(conn)) {
        message_begin(conn);
    }
    conn_want(conn);
    return 0;
}

static void tcp_resume(struct nb_lane *base, int peer) {
    struct conn *conn = conn_of(base, peer);
    if (conn->state == OPEN && conn->held) {
        conn->held = false;
        conn_want(conn);
        conn_read(conn);
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
