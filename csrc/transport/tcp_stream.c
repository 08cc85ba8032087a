// TCP streams: posts, reads and writes segments and messages of one connection without blocking.
#include <errno.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <linux/sockios.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/list.h"
#include "base/loop.h"
#include "base/sock.h"
#include "base/wire.h"
#include "transport/tcp_internal.h"
#include "transport/transport.h"

enum {
    NOTSENT_BYTES = 128 * 1024,    // unsent data in the kernel: with more, a slow connection only holds more
    READ_BUDGET = 2 * 1024 * 1024, // bytes of one connection per pass of the loop
    WRITE_BUDGET = 2 * 1024 * 1024,
    MEASURED_NS = 100 * 1000 * 1000 // interval between measurements of a connection
};

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

// The loop reports the end of a connection even if no event is requested; edge-triggered, it does so only once.
static void want(struct conn *conn, struct nb_watch *watch, uint32_t events) {
    nb_loop_change(conn->lane->config.loop, watch, events == 0 ? (uint32_t)EPOLLET : events);
}

// True if a segment or a message is being sent.
static bool is_sending(const struct conn *conn) {
    return conn->request != NULL || conn->out_is_message;
}

void nb_tcp_want_out(struct conn *conn) {
    uint32_t events = conn->out_ended || conn->state == CONNECTING ? 0 : (uint32_t)EPOLLIN;
    bool writes = conn->state == OPEN && !conn->out_ended && is_sending(conn);
    if (conn->state == CONNECTING || writes) {
        events |= EPOLLOUT;
    }
    want(conn, &conn->out_watch, events);
}

void nb_tcp_want_in(struct conn *conn) {
    want(conn, &conn->in_watch, conn->held ? 0 : (uint32_t)EPOLLIN);
}

void nb_tcp_shut(struct tcp_lane *lane, struct nb_watch *watch) {
    if (watch->fd >= 0) {
        nb_loop_remove(lane->config.loop, watch);
        close(watch->fd);
        watch->fd = -1;
    }
}

void nb_tcp_reset(struct conn *conn) {
    nb_tcp_shut(conn->lane, &conn->out_watch);
    nb_tcp_shut(conn->lane, &conn->in_watch);
    conn->state = NONE;
    conn->gone = true;
    conn->handshake.got = 0;
    conn->out_is_message = false;
    conn->refused = false;
    conn->message_count = 0;
    conn->header_got = 0;
    conn->in_payload = false;
    conn->held = false;
    conn->out_ended = false;
    conn->failure = 0;
    conn->writing = false;
    conn->ahead = 0;
}

void nb_tcp_lost(struct conn *conn, int code, const char *what) {
    struct tcp_lane *lane = conn->lane;
    struct nb_error why = {0};
    errno = code > NB_EPEER ? -code : 0;
    nb_fail_peer(&why, code > NB_EPEER ? NB_EPEER : code, conn->peer, "lane %d to rank %d: %s (%s)", lane->base.index,
                 conn->peer, what, nb_code_name(code));
    struct nb_request *request = conn->request;
    conn->request = NULL;
    nb_tcp_reset(conn);
    if (request != NULL) {
        lane->config.up->sent(lane->config.up_ctx, &lane->base, request, why.code);
    }
    lane->config.up->lost(lane->config.up_ctx, &lane->base, conn->peer, &why);
}

// Sets the destination of the bytes that follow a complete header. 0, -EAGAIN (held), or a failure.
static int payload_begin(struct conn *conn) {
    struct tcp_lane *lane = conn->lane;
    const struct wire_tcp_header *h = &conn->in_header;
    conn->in.at = 0;
    if (h->type == NB_WIRE_TCP_MESSAGE && h->bytes <= NB_LANE_MESSAGE_MAX) {
        conn->in.iov[0] = (struct iovec){.iov_base = conn->in_message, .iov_len = h->bytes};
        conn->in.count = 1;
    } else if (h->type == NB_WIRE_TCP_SEGMENT && h->bytes <= NB_SEGMENT_MAX) {
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
    if (conn->in_header.type == NB_WIRE_TCP_MESSAGE) {
        lane->config.up->message(lane->config.up_ctx, &lane->base, conn->peer, conn->in_message, conn->in_header.bytes);
        return;
    }
    conn->stats.bytes_in += conn->in_header.bytes;
    lane->config.up->landed(lane->config.up_ctx, &lane->base, conn->peer, &conn->frame);
}

// Receives once: the rest of the payload, and the next header. *all: nothing more is available.
static ssize_t conn_recv(struct conn *conn, bool *all) {
    struct iovec iov[NB_LANE_IOV_MAX + 1];
    int count = 0;
    for (int i = conn->in.at; conn->in_payload && i < conn->in.count; i++) {
        iov[count++] = conn->in.iov[i];
    }
    iov[count].iov_base = (char *)&conn->in_header + conn->header_got;
    iov[count].iov_len = sizeof conn->in_header - conn->header_got;
    struct wire_tcp_header next = {0};
    if (conn->in_payload) { // the current header is still needed
        iov[count].iov_base = &next;
        iov[count].iov_len = sizeof next;
    }
    struct msghdr msg = {.msg_iov = iov, .msg_iovlen = (size_t)count + 1};
    size_t wanted = iov[count].iov_len + (conn->in_payload ? conn->in_left : 0);
    ssize_t n = recvmsg(conn->in_watch.fd, &msg, MSG_DONTWAIT);
    if (n <= 0) {
        return n;
    }
    size_t got = (size_t)n;
    *all = got < wanted;
    if (conn->in_payload) {
        size_t payload = got < conn->in_left ? got : conn->in_left;
        pieces_skip(&conn->in, payload);
        conn->in_left -= payload;
        got -= payload;
        if (conn->in_left > 0) {
            return n;
        }
        payload_end(conn);
        if (conn->gone) {
            return n;
        }
        conn->header_got = 0;
        memcpy(&conn->in_header, &next, sizeof next);
    }
    conn->header_got += got;
    return n;
}

static const char *refusal(int code) {
    return code == -EALREADY ? "a duplicate segment arrived" : "an invalid segment was announced";
}

// Handles complete headers. False: stop reading for now.
static bool headers_take(struct conn *conn) {
    while (!conn->in_payload && conn->header_got == sizeof conn->in_header) {
        int rc = payload_begin(conn);
        if (rc == -EAGAIN) {
            conn->held = true;
            nb_tcp_want_in(conn);
            return false;
        }
        if (rc < 0) {
            nb_tcp_lost(conn, rc, refusal(rc));
            return false;
        }
        if (conn->in_left == 0) {
            payload_end(conn);
            conn->header_got = 0;
        }
    }
    return !conn->gone;
}

// Handles the end of the available data.
static void read_empty(struct conn *conn) {
    if (conn->failure < 0) {
        nb_tcp_lost(conn, conn->failure, "send failed");
    }
}

void nb_tcp_read(struct conn *conn) {
    size_t budget = conn->out_ended ? SIZE_MAX : (size_t)READ_BUDGET;
    bool all = false;
    while (conn->in_watch.fd >= 0) {
        if (!headers_take(conn) || budget == 0 || (all && !conn->out_ended)) {
            return; // the loop reports later data and the end
        }
        ssize_t n = conn_recv(conn, &all);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
            read_empty(conn);
            return;
        }
        if (n <= 0) {
            nb_tcp_lost(conn, n < 0 ? -errno : -ECONNRESET, "connection closed");
            return;
        }
        budget = (size_t)n < budget ? budget - (size_t)n : 0;
    }
}

static void out_begin(struct conn *conn, struct wire_tcp_header header) {
    conn->out_header = header;
    conn->out.at = 0;
    conn->out.count = 1;
    conn->out.iov[0] = (struct iovec){.iov_base = &conn->out_header, .iov_len = sizeof conn->out_header};
}

static ssize_t out_send(struct conn *conn) {
    struct msghdr msg = {.msg_iov = &conn->out.iov[conn->out.at],
                         .msg_iovlen = (size_t)(conn->out.count - conn->out.at)};
    ssize_t n = sendmsg(conn->out_watch.fd, &msg, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n > 0) {
        pieces_skip(&conn->out, (size_t)n);
    }
    return n;
}

static void message_sent(struct conn *conn) {
    conn->out_is_message = false;
    conn->message_head++;
    conn->message_count--;
}

static void message_begin(struct conn *conn) {
    struct message *message = &conn->messages[conn->message_head % MESSAGES];
    out_begin(conn, (struct wire_tcp_header){.type = NB_WIRE_TCP_MESSAGE, .bytes = (uint32_t)message->bytes});
    conn->out.iov[conn->out.count++] = (struct iovec){.iov_base = message->data, .iov_len = message->bytes};
    conn->out_is_message = true;
}

// Sends as much of the next message as the kernel accepts now; calls no callback.
static void message_send(struct conn *conn) {
    message_begin(conn);
    (void)out_send(conn); // the loop's next write reports a failure again
    if (pieces_left(&conn->out) == 0) {
        message_sent(conn);
    }
}

static void out_end(struct conn *conn) {
    struct tcp_lane *lane = conn->lane;
    if (conn->out_is_message) {
        message_sent(conn);
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

// Starts what follows a finished segment or message: a queued message, else whatever the scheduler sends.
static void out_next(struct conn *conn) {
    out_end(conn);
    if (conn->state != OPEN || is_sending(conn)) {
        return;
    }
    if (conn->message_count > 0) {
        message_begin(conn);
    } else if (conn->refused) {
        conn->refused = false;
        conn->lane->config.up->writable(conn->lane->config.up_ctx, &conn->lane->base, conn->peer);
    }
}

void nb_tcp_out_ended(struct conn *conn, int code) {
    conn->out_ended = true;
    conn->failure = code;
    nb_tcp_want_out(conn);
    if (conn->in_watch.fd < 0) {
        nb_tcp_lost(conn, code < 0 ? code : -ECONNRESET, "connection closed");
    } else if (!conn->held) {
        nb_tcp_read(conn);
    }
}

void nb_tcp_write(struct conn *conn) {
    size_t budget = WRITE_BUDGET;
    conn->writing = true;
    while (conn->state == OPEN && is_sending(conn) && !conn->out_ended && budget > 0) {
        ssize_t n = out_send(conn);
        if (n < 0 && errno != EAGAIN && errno != EINTR) {
            conn->writing = false;
            nb_tcp_out_ended(conn, -errno);
            return;
        }
        if (n < 0) {
            break;
        }
        budget = (size_t)n < budget ? budget - (size_t)n : 0;
        if (pieces_left(&conn->out) == 0) {
            out_next(conn);
        }
    }
    conn->writing = false;
    if (conn->state == OPEN) {
        nb_tcp_want_out(conn);
    }
}

static void segment_begin(struct conn *conn, struct nb_request *request) {
    const struct nb_frame *frame = &request->frame;
    out_begin(conn, (struct wire_tcp_header){.type = NB_WIRE_TCP_SEGMENT,
                                             .bytes = frame->bytes,
                                             .op = frame->op,
                                             .block = frame->block,
                                             .blocks = frame->blocks});
    for (int i = 0; i < request->iov_count; i++) {
        conn->out.iov[conn->out.count++] = request->iov[i];
    }
    conn->request = request;
}

// Writes as much of a new segment as the kernel accepts now. May call `sent` for it.
static void write_ahead(struct conn *conn) {
    ssize_t n = conn->ahead < WRITE_BUDGET && !conn->writing ? out_send(conn) : 0;
    conn->ahead += n > 0 ? (size_t)n : 0;
    if (pieces_left(&conn->out) == 0) {
        out_end(conn);
    }
    if (conn->state == OPEN && !conn->writing) { // the loop's next write reports a failure again
        nb_tcp_want_out(conn);
    }
}

int nb_tcp_post(struct nb_lane *base, struct nb_request *request) {
    struct conn *conn = nb_tcp_conn(base, request->peer);
    if (conn->state != OPEN || conn->out_ended || is_sending(conn)) {
        conn->refused = true;
        return -EAGAIN;
    }
    segment_begin(conn, request);
    write_ahead(conn);
    return 0;
}

int nb_tcp_message(struct nb_lane *base, int peer, const void *data, size_t bytes) {
    struct conn *conn = nb_tcp_conn(base, peer);
    if (conn->messages == NULL || conn->state != OPEN || conn->out_ended || conn->message_count == MESSAGES ||
        bytes > NB_LANE_MESSAGE_MAX) {
        conn->refused = true;
        return -EAGAIN;
    }
    struct message *message = &conn->messages[(conn->message_head + conn->message_count) % MESSAGES];
    message->bytes = bytes;
    memcpy(message->data, data, bytes);
    conn->message_count++;
    if (!is_sending(conn)) {
        message_send(conn);
    }
    nb_tcp_want_out(conn);
    return 0;
}

void nb_tcp_resume(struct nb_lane *base, int peer) {
    struct conn *conn = nb_tcp_conn(base, peer);
    if (conn->in_watch.fd >= 0 && conn->held) {
        conn->held = false;
        nb_tcp_want_in(conn);
        nb_tcp_read(conn);
    }
}

struct nb_held nb_tcp_held(const struct nb_lane *base, int peer) {
    struct conn *conn = nb_tcp_conn(base, peer);
    int kernel = 0;
    if (conn->state != OPEN || ioctl(conn->out_watch.fd, SIOCOUTQ, &kernel) < 0 || kernel < 0) {
        return (struct nb_held){0};
    }
    int64_t now = nb_now_ns();
    if (conn->measured_ns == 0 || now - conn->measured_ns >= MEASURED_NS) {
        nb_tcp_measured(conn->out_watch.fd, &conn->measured);
        conn->measured_ns = now;
    }
    size_t begun = 0; // bytes of the segment in progress
    if (conn->request != NULL && !conn->out_is_message) {
        begun = sizeof conn->out_header + conn->request->frame.bytes - pieces_left(&conn->out);
    }
    struct nb_held held = conn->measured;
    held.bytes = (size_t)kernel > begun ? (size_t)kernel - begun : 0;
    return held;
}

void nb_tcp_tune(struct tcp_lane *lane, int fd) {
    int lowat = NOTSENT_BYTES;
    nb_sock_tune(fd, lane->config.timeout_ms);
    setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &lowat, sizeof lowat);
}
