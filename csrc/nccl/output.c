// Output of a link: the messages that this side writes to the control connection, and the connection's end (see net.h).
#include <errno.h>
#include <linux/sockios.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/loop.h"
#include "nccl/link.h"
#include "nccl/net.h"
#include "transport/lanes.h"

enum {
    RETRY_NS = 50 * 1000 * 1000,
    LONE_NS = 60 * 1000,     // a lone send that drains in less is sooner on the control connection
    FLOW_NS = 25 * 1000,     // so are several that take less each: about what a flow costs both processes
    LONE_QUEUE = 128 * 1024, // of them in the kernel: with more, no further one leaves
    LONE_COUNT = 64,         // of them that one measurement lasts
    BACK_MOST_NS = 1000 * 1000 * 1000
};

void nb_link_fail(struct nb_link *link, const struct nb_error *why) {
    if (!link->failing) {
        link->failing = true;
        link->failure = *why;
    }
}

void nb_link_shut(struct nb_net *net, struct nb_watch *watch) {
    if (watch->fd >= 0) {
        nb_loop_remove(&net->loop, watch);
        close(watch->fd);
        watch->fd = -1;
    }
}

void nb_link_close_lanes(struct nb_link *link) {
    nb_lanes_close(link->lanes);
    link->lanes = NULL;
}

void nb_link_connect_later(struct nb_link *link, int code) {
    nb_link_shut(link->net, &link->watch);
    nb_link_close_lanes(link);
    link->in_bytes = 0;
    link->out_bytes = 0;
    link->out_begin = 0;
    link->blocked = link->flush_due = false;
    link->state = NB_LINK_CONNECT;
    link->retry_ns = nb_now_ns() + RETRY_NS;
    link->connect_code = code == 0 ? -ECONNRESET : code;
}

void nb_link_control_ended(struct nb_link *link, int code) {
    struct nb_error why = {0};
    const char *when = link->state < NB_LINK_READY ? " before all lanes were open" : "";
    if (link->outgoing && link->state < NB_LINK_LANES) {
        nb_link_connect_later(link, code); // the peer may have dropped it because it was busy
        return;
    }
    if (link->leaving || link->left) {
        nb_fail(&why, NB_ECLOSED, "%s has closed its end", link->peer);
    } else if (code == 0 || code == -ECONNRESET || code == -EPIPE) {
        nb_fail(&why, NB_EPEER, "the connection to %s ended%s: its process is gone, or has closed it", link->peer,
                when);
    } else {
        nb_fail(&why, NB_EPEER, "the connection to %s failed%s (%s)", link->peer, when, nb_code_name(code));
    }
    if (link->outgoing && link->flows > 0) {
        // The reports that these flows have landed may still be on the lanes, also from a process that has just exited.
        nb_loop_remove(&link->net->loop, &link->watch);
        link->over_ns = nb_now_ns();
        link->failure = why;
        return;
    }
    nb_link_fail(link, &why);
}

// Judges a failed send. The peer's last messages may still be unread: the read that follows the end of a connection
// judges it.
static void send_failed(struct nb_link *link, int code) {
    bool gone = code == -ECONNRESET || code == -EPIPE || code == -ETIMEDOUT;
    if ((!link->outgoing || link->flows > 0) && gone) {
        link->blocked = true;
        link->send_code = code;
        nb_loop_change(&link->net->loop, &link->watch, EPOLLIN);
    } else {
        nb_link_control_ended(link, code);
    }
}

void nb_link_flush(struct nb_link *link) {
    bool waited = link->blocked;
    link->flush_due = false;
    while (link->out_bytes > 0) {
        ssize_t n = send(link->watch.fd, link->out + link->out_begin, link->out_bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0 && errno != EAGAIN && errno != EINTR) {
            send_failed(link, -errno);
            return;
        }
        if (n < 0) {
            break;
        }
        link->out_begin += (size_t)n;
        link->out_bytes -= (size_t)n;
    }
    link->out_begin = link->out_bytes == 0 ? 0 : link->out_begin;
    link->blocked = link->out_bytes > 0;
    nb_loop_change(&link->net->loop, &link->watch, EPOLLIN | (link->blocked ? EPOLLOUT : 0));
    if (waited) {
        link->net->up->written(link);
    }
}

static bool out_reserve(struct nb_link *link, size_t bytes) {
    if (link->out_begin + link->out_bytes + bytes <= link->out_room) {
        return true;
    }
    if (link->out_bytes > 0) {
        memmove(link->out, link->out + link->out_begin, link->out_bytes);
    }
    link->out_begin = 0;
    if (link->out_bytes + bytes <= link->out_room) {
        return true;
    }
    size_t room = 2 * (link->out_bytes + bytes);
    char *grown = realloc(link->out, room);
    if (grown == NULL) {
        struct nb_error why = {0};
        nb_fail(&why, -ENOMEM, "cannot allocate %zu bytes for messages to %s", room, link->peer);
        nb_link_fail(link, &why);
        return false;
    }
    link->out = grown;
    link->out_room = room;
    return true;
}

// Copies what is left of a part after its first `*sent` bytes, and takes those off.
static void out_append(struct nb_link *link, const struct iovec *part, size_t *sent) {
    size_t skip = *sent < part->iov_len ? *sent : part->iov_len;
    *sent -= skip;
    if (skip < part->iov_len) {
        memcpy(link->out + link->out_begin + link->out_bytes, (char *)part->iov_base + skip, part->iov_len - skip);
        link->out_bytes += part->iov_len - skip;
    }
}

void nb_link_put(struct nb_link *link, const void *head, size_t head_bytes, const void *data, size_t bytes) {
    if (link->failing || link->over_ns != 0 || link->state == NB_LINK_ENDED) {
        return;
    }
    struct iovec iov[3] = {
        {.iov_base = link->out_bytes > 0 ? link->out + link->out_begin : NULL, .iov_len = link->out_bytes},
        {.iov_base = (void *)head, .iov_len = head_bytes},
        {.iov_base = (void *)data, .iov_len = bytes}};
    struct msghdr msg = {.msg_iov = iov, .msg_iovlen = 3};
    ssize_t n = link->blocked ? 0 : sendmsg(link->watch.fd, &msg, MSG_DONTWAIT | MSG_NOSIGNAL);
    size_t sent = n > 0 ? (size_t)n : 0; // nb_link_flush() finds a failure again
    size_t waited = sent < link->out_bytes ? sent : link->out_bytes;
    link->out_begin += waited;
    link->out_bytes -= waited;
    sent -= waited;
    if (out_reserve(link, head_bytes + bytes - sent)) {
        out_append(link, &iov[1], &sent);
        out_append(link, &iov[2], &sent);
    }
    link->put_bytes += head_bytes + bytes;
    if (!link->blocked) {
        nb_link_flush(link);
    }
}

void nb_link_put_ctl(struct nb_link *link, struct wire_ctl ctl, const void *data, size_t bytes) {
    nb_link_put(link, &ctl, sizeof ctl, data, bytes);
}

void nb_link_open_comm(struct nb_link *link, uint32_t id, uint64_t listener) {
    nb_link_put_ctl(link, (struct wire_ctl){.type = NB_CTL_OPEN, .comm = id, .op = listener}, NULL, 0);
}

void nb_link_close_comm(struct nb_link *link, uint32_t id) {
    nb_link_put_ctl(link, (struct wire_ctl){.type = NB_CTL_CLOSE, .comm = id}, NULL, 0);
}

void nb_link_want(struct nb_link *link, uint32_t id) {
    nb_link_put_ctl(link, (struct wire_ctl){.type = NB_CTL_WANT, .comm = id}, NULL, 0);
}

void nb_link_grant(struct nb_link *link, uint32_t id, size_t capacity, bool spare) {
    const struct wire_ctl ctl = {.type = NB_CTL_GRANT, .comm = id, .bytes = capacity};
    if (!spare) {
        nb_link_put_ctl(link, ctl, NULL, 0);
    } else if (!link->failing && link->state != NB_LINK_ENDED && out_reserve(link, sizeof ctl)) {
        memcpy(link->out + link->out_begin + link->out_bytes, &ctl, sizeof ctl);
        link->out_bytes += sizeof ctl;
        link->put_bytes += sizeof ctl;
        link->flush_due = true;
    }
}

size_t nb_link_unsent(const struct nb_link *link) {
    int bytes = 0;
    return link->out_bytes + (ioctl(link->watch.fd, SIOCOUTQ, &bytes) == 0 && bytes > 0 ? (size_t)bytes : 0);
}

// Restarts the measurement with what is left, so that it tells the rate of now.
static void lone_restart(struct nb_link *link, size_t left, double part, int64_t now) {
    link->lone_ns = now;
    link->lone_put = link->put_bytes - left;
    link->lone_count = 1 + (int)((1 - part) * link->lone_count);
}

size_t nb_link_lone_look(struct nb_link *link, int64_t now) {
    size_t put = link->put_bytes - link->lone_put;
    if (link->lone_ns == 0 || put == 0) {
        return 0;
    }
    size_t left = nb_link_unsent(link);
    double part = left < put ? 1 - (double)left / (double)put : 0; // of lone_count sends
    double flows_ns = part * link->lone_count * FLOW_NS;
    bool quick = (double)(now - link->lone_ns) <= (flows_ns > LONE_NS ? flows_ns : LONE_NS);
    if (left > 0 && !quick) {
        link->back_ns = link->back_ns < BACK_MOST_NS / 2 ? 2 * link->back_ns : (int64_t)BACK_MOST_NS;
        link->lanes_ns = now + link->back_ns;
        link->lone_quick = false;
        link->lone_ns = 0;
    } else if (left == 0) {
        link->back_ns = quick ? NB_LINK_BACK_LEAST_NS : link->back_ns; // else unknown: nobody has looked in time
        link->lone_quick = quick;
        link->lone_ns = 0;
    } else if (link->lone_count >= LONE_COUNT) {
        lone_restart(link, left, part, now);
    }
    return left;
}

bool nb_link_alone(struct nb_link *link) {
    int64_t now = nb_now_ns();
    size_t left = nb_link_lone_look(link, now);
    if (!nb_link_lanes_idle(link) || link->blocked || now < link->lanes_ns) {
        return false;
    }
    return link->lone_ns == 0 ? nb_link_unsent(link) < NB_NET_INLINE : link->lone_quick && left < LONE_QUEUE;
}

void nb_link_send(struct nb_link *link, uint32_t id, uint64_t op, const void *data, size_t bytes) {
    const struct wire_ctl ctl = {.type = NB_CTL_SEND, .comm = id, .op = op, .bytes = bytes};
    bool lone = data != NULL && bytes > NB_NET_INLINE;
    if (lone && link->lone_ns == 0) {
        link->lone_ns = nb_now_ns();
        link->lone_put = link->put_bytes;
        link->lone_count = 0;
    }
    link->lone_count += lone;
    nb_link_put_ctl(link, ctl, data, data != NULL ? bytes : 0);
}
