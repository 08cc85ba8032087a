// Links: the control connection between two processes from its opening to its end, the messages that arrive on it, and
// the lanes beside it (see net.h).
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <unistd.h>

#include "base/admission.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/list.h"
#include "base/loop.h"
#include "base/sock.h"
#include "nccl/abi.h"
#include "nccl/link.h"
#include "nccl/net.h"
#include "transport/lanes.h"
#include "transport/transport.h"

enum {
    BACKLOG = 128,
    READS_MAX = 16, // of one event
    TICK_NS = 10 * 1000 * 1000,
    PING_MAX_NS = 1000 * 1000 * 1000,
    LOST_NS = 250 * 1000 * 1000,   // a peer that dies also ends the control connection, which gives a better reason
    GAP_NS = 500 * 1000 * 1000,    // a longer time between ticks: this process was descheduled
    POLL_NS = 100 * 1000,          // between two progress passes of idle lanes
    GONE_NS = 1000 * 1000 * 1000,  // for the last bytes of a process that is gone
    LEAVE_NS = 2000 * 1000 * 1000, // for the peer to end the link, or to report what has landed
    PAUSE_MS = 100,                // after an accept that failed for lack of descriptors or memory
    READ_BYTES = 8192,             // at once at the begin of a message: the rest of a long one goes to its memory
    POLL_SLEEP_MS = 1,
    BUSY_SLEEP_MS = 10,
    SLEEP_MS = 250,
    OBSTACLE_TEXT = 256
};

_Static_assert(NB_LINK_IN_ROOM >= NB_NET_LONE + (int)sizeof(struct wire_ctl), "an inline send fits");

static void link_free(struct nb_link *link) {
    nb_list_remove(&link->at_net);
    free(link->shake);
    free(link->in);
    free(link->out);
    free(link);
}

// True if no comm shows the failure: the link is the authenticated peer's, and is not open.
static bool shown_by_none(const struct nb_link *link) {
    return !link->outgoing && link->admitted && link->state < NB_LINK_READY && nb_list_empty(&link->comms) &&
           link->failure.code != NB_ECLOSED;
}

// Closes the lanes and the control connection, and reports the failure to the comms and the listening comm.
static void link_end(struct nb_link *link) {
    struct nb_net *net = link->net;
    bool logged = shown_by_none(link);
    struct nb_net_listener *listener = nb_links_listener(net, link->shake->hello.listener);
    if (logged) {
        nb_net_log(net, NCCL_LOG_WARN, link->failure.text);
    }
    if (!link->outgoing && link->admitted && link->failure.code != NB_ECLOSED && listener != NULL) {
        listener->failure = link->failure;
        listener->logged = logged;
        listener->failed_ns = nb_now_ns();
        memcpy(listener->failed_process, link->process, sizeof listener->failed_process);
    }
    if (!link->outgoing && !link->admitted) {
        nb_admission_remove(&net->admission, &link->pending);
        link->admitted = true;
    }
    nb_link_close_lanes(link);
    nb_link_shut(net, &link->watch);
    link->state = NB_LINK_ENDED;
    net->up->ended(link);
}

// Control messages

static bool ctl_handle(struct nb_link *link, const struct wire_ctl *ctl, const void *payload) {
    const struct nb_link_up *up = link->net->up;
    if (ctl->type == NB_CTL_PING) {
        return true;
    }
    if (ctl->type == NB_CTL_CLOSE) {
        up->closed(link, ctl->comm);
        return true;
    }
    if (link->outgoing) {
        return ctl->type == NB_CTL_GRANT && up->granted(link, ctl->comm, ctl->bytes);
    }
    switch (ctl->type) {
    case NB_CTL_OPEN:
        return up->opened(link, ctl->comm, ctl->op);
    case NB_CTL_SEND:
        return up->sent(link, ctl->comm, ctl->op, ctl->bytes, ctl->op == 0 ? payload : NULL);
    case NB_CTL_WANT:
        up->wanted(link, ctl->comm);
        return true;
    case NB_CTL_LEAVE:
        link->left = true;
        nb_link_release(link);
        return true;
    default:
        return false;
    }
}

// Gives an inline send of which the first bytes are here its memory. Returns the bytes taken, 0 if it has none.
static int direct_begin(struct nb_link *link, const struct wire_ctl *ctl, const char *data, size_t bytes) {
    link->direct = link->net->up->arriving(link, ctl->comm, ctl->bytes, data, bytes);
    if (link->direct == NULL) {
        return 0;
    }
    link->direct_left = ctl->bytes - bytes;
    link->direct_comm = ctl->comm;
    return (int)(sizeof *ctl + bytes);
}

// Handles one message: its bytes, 0 if it is not complete, or NB_EWIRE.
static int ctl_step(struct nb_link *link, const char *data, size_t bytes) {
    struct wire_ctl ctl;
    if (bytes < sizeof ctl) {
        return 0;
    }
    memcpy(&ctl, data, sizeof ctl);
    size_t payload = ctl.type == NB_CTL_SEND && ctl.op == 0 ? ctl.bytes : 0;
    if (payload > NB_NET_LONE || ctl.bytes > NB_NET_BYTES_MAX) {
        return NB_EWIRE;
    }
    if (bytes < sizeof ctl + payload) {
        return payload <= NB_NET_INLINE || link->outgoing
                   ? 0
                   : direct_begin(link, &ctl, data + sizeof ctl, bytes - sizeof ctl);
    }
    return ctl_handle(link, &ctl, data + sizeof ctl) ? (int)(sizeof ctl + payload) : NB_EWIRE;
}

static void message_invalid(struct nb_link *link, int code, struct nb_error *err) {
    nb_fail(err, code, "%s sent what the protocol does not allow", link->peer);
    nb_link_fail(link, err);
}

// Handles the complete messages of the input.
static void parse(struct nb_link *link) {
    size_t at = 0;
    int n = 1;
    while (n > 0 && !link->failing) {
        struct nb_error err = {0};
        bool shaking = link->state < NB_LINK_LANES;
        n = shaking ? nb_link_shake_step(link, link->in + at, link->in_bytes - at, &err)
                    : ctl_step(link, link->in + at, link->in_bytes - at);
        if (link->state == NB_LINK_CONNECT) {
            return; // the connection is gone, and its input with it
        }
        if (n < 0) {
            message_invalid(link, n, &err);
        }
        at += n > 0 ? (size_t)n : 0;
    }
    link->in_bytes -= at;
    if (at > 0 && link->in_bytes > 0) {
        memmove(link->in, link->in + at, link->in_bytes);
    }
}

// Takes what was received: into the memory of an inline send, or into the input.
static void take(struct nb_link *link, size_t bytes) {
    link->heard_ns = nb_now_ns();
    if (link->direct_left == 0) {
        link->in_bytes += bytes;
        parse(link);
        return;
    }
    link->direct += bytes;
    link->direct_left -= bytes;
    link->moved_ns = link->heard_ns;
    if (link->direct_left == 0) {
        link->net->up->arrived(link, link->direct_comm);
    }
}

void nb_link_drop(struct nb_link *link) {
    link->direct = link->in; // has room for it, and is empty until all of it has come
}

static void link_read(struct nb_link *link) {
    for (int i = 0; i < READS_MAX && !link->failing && link->watch.fd >= 0; i++) {
        bool direct = link->direct_left > 0;
        size_t room = NB_LINK_IN_ROOM - link->in_bytes;
        room = direct ? link->direct_left : link->in_bytes == 0 ? READ_BYTES : room;
        char *to = direct ? link->direct : link->in + link->in_bytes;
        ssize_t n = recv(link->watch.fd, to, room, MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
            return;
        }
        if (n <= 0) {
            nb_link_control_ended(link, n < 0 ? -errno : link->send_code);
            return;
        }
        take(link, (size_t)n);
        if ((size_t)n < room) {
            return; // the loop reports later data and the end
        }
    }
}

void nb_link_poll(struct nb_link *link) {
    if (link->state == NB_LINK_READY && !link->failing && nb_link_lanes_idle(link)) {
        link_read(link);
    }
}

static void link_ready(struct nb_watch *watch, uint32_t events) {
    struct nb_link *link = NB_CONTAINER(watch, struct nb_link, watch);
    if (link->failing) {
        return;
    }
    if (link->state == NB_LINK_CONNECT) {
        int rc = nb_sock_connected(watch->fd);
        rc = rc == 0 ? nb_link_shake_hello(link) : rc;
        if (rc < 0) {
            nb_link_connect_later(link, rc);
        }
        return;
    }
    if ((events & EPOLLOUT) != 0) {
        nb_link_flush(link);
    }
    if (!link->failing && watch->fd >= 0 && (events & ~(uint32_t)EPOLLOUT) != 0) {
        link_read(link);
    }
}

// Opening

static struct nb_link *link_new(struct nb_net *net, bool outgoing) {
    struct nb_link *link = calloc(1, sizeof *link);
    if (link == NULL) {
        return NULL;
    }
    link->in = malloc(NB_LINK_IN_ROOM);
    link->shake = calloc(1, sizeof *link->shake);
    if (link->in == NULL || link->shake == NULL) {
        free(link->in);
        free(link->shake);
        free(link);
        return NULL;
    }
    link->net = net;
    link->outgoing = outgoing;
    link->watch = (struct nb_watch){.fd = -1, .ready = link_ready};
    link->opened_ns = nb_now_ns();
    link->heard_ns = link->opened_ns;
    link->back_ns = NB_LINK_BACK_LEAST_NS;
    nb_list_init(&link->comms);
    nb_list_init(&link->sinks);
    nb_list_insert(&net->links, &link->at_net);
    return link;
}

// Begins to connect. A failure may pass, as a lack of descriptors does.
static void connect_begin(struct nb_link *link) {
    struct nb_net *net = link->net;
    int fd = nb_sock_connect(&link->to, NULL, NULL, NULL);
    int rc = fd;
    if (fd >= 0) {
        nb_sock_tune(fd, net->settings.timeout_ms);
        link->watch.fd = fd;
        rc = nb_loop_add(&net->loop, &link->watch, EPOLLOUT, NULL);
    }
    if (fd >= 0 && rc < 0) {
        close(fd);
        link->watch.fd = -1;
    }
    if (rc < 0) {
        nb_link_connect_later(link, rc);
    }
}

int nb_link_find(struct nb_net *net, uint64_t domain, const struct nb_net_handle *handle, struct nb_link **out,
                 struct nb_error *err) {
    NB_LIST_EACH(it, &net->links) {
        struct nb_link *link = NB_CONTAINER(it, struct nb_link, at_net);
        bool usable = !link->leaving && link->over_ns == 0 && !link->failing && link->state != NB_LINK_ENDED;
        if (link->outgoing && usable && link->domain == domain &&
            memcmp(link->process, handle->process, sizeof link->process) == 0) {
            link->opened_ns = link->state < NB_LINK_READY ? nb_now_ns() : link->opened_ns; // its comm may wait as long
            *out = link;
            return 0;
        }
    }
    struct nb_link *link = link_new(net, true);
    if (link == NULL) {
        return nb_fail(err, -ENOMEM, "cannot allocate a link");
    }
    link->domain = domain;
    int rc = nb_link_shake_aim(link, handle, err);
    if (rc < 0) {
        link_free(link);
        return rc;
    }
    connect_begin(link);
    *out = link;
    return 0;
}

// Listening

static void pending_drop(struct nb_pending *pending) {
    struct nb_link *link = NB_CONTAINER(pending, struct nb_link, pending);
    struct nb_error why = {0};
    nb_fail(&why, NB_ECLOSED, "%s did not prove in time that it belongs to this job", link->peer);
    nb_link_fail(link, &why);
    nb_admission_remove(&link->net->admission, pending);
    link->admitted = true; // counted no more
    nb_link_shut(link->net, &link->watch);
}

static void pending_read(struct nb_pending *pending) {
    struct nb_link *link = NB_CONTAINER(pending, struct nb_link, pending);
    if (link->state == NB_LINK_PROOF) {
        link_read(link);
    }
}

static void gate_open(struct nb_gate *gate) {
    struct nb_net *net = NB_CONTAINER(gate, struct nb_net, gate);
    nb_loop_change(&net->loop, &net->listener, EPOLLIN);
}

static void gate_shut(struct nb_net *net, int64_t for_ns) {
    nb_loop_change(&net->loop, &net->listener, 0);
    nb_admission_shut(&net->admission, &net->gate, for_ns);
}

static void link_accept(struct nb_net *net, int fd) {
    struct nb_link *link = link_new(net, false);
    struct nb_error err = {0};
    if (link == NULL) {
        close(fd);
        return;
    }
    struct nb_sockaddr from = {.len = sizeof from - offsetof(struct nb_sockaddr, any)};
    if (getpeername(fd, &from.any, &from.len) == 0) {
        char at[NB_SOCK_TEXT];
        nb_sock_format(&from, at);
        snprintf(link->peer, sizeof link->peer, "%s", at);
    }
    nb_sock_tune(fd, net->settings.timeout_ms);
    link->state = NB_LINK_HELLO;
    link->pending.drop = pending_drop;
    link->pending.read = pending_read;
    link->watch.fd = fd;
    if (nb_loop_add(&net->loop, &link->watch, EPOLLIN, &err) < 0) {
        close(fd);
        link_free(link);
        return;
    }
    nb_admission_add(&net->admission, &link->pending);
    link_read(link); // most have sent their hello by now
}

static void listener_ready(struct nb_watch *watch, uint32_t events) {
    (void)events;
    struct nb_net *net = NB_CONTAINER(watch, struct nb_net, listener);
    if (!nb_admission_may(&net->admission)) {
        gate_shut(net, 0);
        return;
    }
    int fd = nb_sock_accept(watch->fd);
    if (fd >= 0) {
        link_accept(net, fd);
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        gate_shut(net, (int64_t)PAUSE_MS * 1000000);
    }
}

int nb_links_listen(struct nb_net *net, struct nb_error *err) {
    if (net->listener.fd >= 0) {
        return 0;
    }
    net->address = net->settings.binds[0];
    nb_sock_set_port(&net->address, 0);
    int fd = nb_sock_listen(&net->address, net->settings.ports, BACKLOG, err);
    if (fd < 0) {
        return fd;
    }
    net->listener = (struct nb_watch){.fd = fd, .ready = listener_ready};
    net->gate.open = gate_open;
    int rc = nb_loop_add(&net->loop, &net->listener, EPOLLIN, err);
    if (rc < 0) {
        close(fd);
        net->listener.fd = -1;
    }
    return rc;
}

void nb_links_listen_end(struct nb_net *net) {
    nb_list_remove(&net->gate.link);
    nb_link_shut(net, &net->listener);
}

// Ticks

// Why the lanes are not open: one accepts no connection, or those of these numbers do not connect.
static void lanes_obstacle(const struct nb_link *link, char text[OBSTACLE_TEXT]) {
    uint64_t missing = nb_lanes_peer_missing(link->lanes, nb_link_other_rank(link));
    int code = nb_lanes_accept_error(link->lanes);
    size_t used = 0;
    char list[OBSTACLE_TEXT / 2] = "";
    if (code != 0) {
        (void)snprintf(text, OBSTACLE_TEXT, "this process cannot accept the connections of its lanes (%s%s)",
                       nb_code_name(code), code == -EMFILE ? ": see `ulimit -n`" : "");
        return;
    }
    for (int i = 0; i < NB_LANES_MAX && used + 8 < sizeof list; i++) {
        if ((missing >> i & 1) != 0) {
            used += (size_t)snprintf(list + used, sizeof list - used, "%s%d", used > 0 ? ", " : "", i);
        }
    }
    (void)snprintf(text, OBSTACLE_TEXT, "connected, but lanes %s are not open: is a firewall between? %s", list,
                   "NETBOTTLENECK_PORTS sets their ports");
}

// Why the link is not open.
static void obstacle(const struct nb_link *link, char text[OBSTACLE_TEXT]) {
    const char *reason = "connected, but the lanes are not open";
    if (link->state == NB_LINK_LANES) {
        lanes_obstacle(link, text);
        return;
    }
    if (link->state == NB_LINK_CONNECT) {
        reason = link->connect_code != 0 ? nb_code_name(link->connect_code) : "nothing answers there";
    } else if (link->state == NB_LINK_ANSWER) {
        reason = "connected, but the process does not answer";
    } else if (link->state == NB_LINK_WELCOME || link->state == NB_LINK_JOIN) {
        reason = "connected, but the lanes there are not open";
    }
    (void)snprintf(text, OBSTACLE_TEXT, "%s", reason);
}

// NCCL may have given up all comms but the newest, and closed what they should connect to.
static void connect_again(struct nb_link *link) {
    if (!nb_list_empty(&link->comms)) {
        (void)nb_link_shake_aim(link, &NB_CONTAINER(link->comms.prev, struct nb_net_comm, at_link)->to, NULL);
    }
    connect_begin(link);
}

static void handshake_tick(struct nb_link *link, int64_t now) {
    int64_t limit_ns = (int64_t)link->net->settings.timeout_ms * 1000000;
    struct nb_error why = {0};
    if (now - link->opened_ns > limit_ns) {
        char text[OBSTACLE_TEXT];
        obstacle(link, text);
        nb_fail(&why, NB_ETIMEOUT, "no link %s %s within %.1f s (NETBOTTLENECK_TIMEOUT_S): %s",
                link->outgoing ? "to" : "from", link->peer, (double)limit_ns / 1e9, text);
        nb_link_fail(link, &why);
        return;
    }
    if (link->state == NB_LINK_CONNECT && link->watch.fd < 0 && now >= link->retry_ns) {
        connect_again(link);
    }
}

static void ping_tick(struct nb_link *link, int64_t now) {
    int64_t quarter = (int64_t)link->net->settings.timeout_ms * 1000000 / 4;
    if (now - link->pinged_ns >= (quarter < PING_MAX_NS ? quarter : (int64_t)PING_MAX_NS) && !link->blocked) {
        link->pinged_ns = now;
        nb_link_put_ctl(link, (struct wire_ctl){.type = NB_CTL_PING}, NULL, 0);
    }
}

static int64_t latest(int64_t a, int64_t b) {
    return a > b ? a : b;
}

// True if nothing more comes over the lanes: all are lost, or the peer has ended the link and nothing moves. A peer that
// has not closed its comms is gone, and what it had sent arrives soon.
static bool lanes_over(const struct nb_link *link, int64_t moved, int64_t now) {
    int64_t still_ns = now - latest(moved, link->over_ns);
    int64_t most_ns = link->net->up->all_closed(link) ? LEAVE_NS : GONE_NS;
    bool ended = link->over_ns != 0 && (link->flows == 0 || link->lost_ns != 0 || still_ns > most_ns);
    return ended || (link->lost_ns != 0 && now - link->lost_ns > LOST_NS);
}

// Judges a peer that is silent, lanes that are lost, and bytes that do not move.
static void silence_tick(struct nb_link *link, int64_t now) {
    int64_t limit_ns = (int64_t)link->net->settings.timeout_ms * 1000000;
    const struct nb_link_activity activity = link->net->up->activity(link);
    int64_t resumed = link->net->resumed_ns; // this process was descheduled until then: no silence of the peer
    int64_t heard = latest(latest(link->heard_ns, activity.heard_ns), resumed); // not what begins or leaves here
    if (activity.moved_ns == 0 || activity.first != link->first) {
        link->first = activity.first;
        link->first_ns = now;
    }
    int64_t moved = latest(latest(activity.first_moved_ns, link->first_ns), resumed);
    struct nb_error why = {0};
    if (lanes_over(link, latest(activity.moved_ns, resumed), now)) {
        why = link->failure;
        nb_link_fail(link, &why);
    } else if (activity.pending && now - heard > limit_ns) {
        nb_fail(&why, NB_ETIMEOUT, "%s has been silent for %.1f s (NETBOTTLENECK_TIMEOUT_S)", link->peer,
                (double)(now - heard) / 1e9);
        nb_link_fail(link, &why);
    } else if (activity.moved_ns != 0 && now - moved > limit_ns / 4 * 5) {
        nb_fail(&why, NB_ETIMEOUT, "no byte of a transfer with %s has moved for %.1f s", link->peer,
                (double)(now - moved) / 1e9);
        nb_link_fail(link, &why);
    } else if (link->leaving && now - link->leave_ns > (nb_link_unsent(link) > 0 ? limit_ns : (int64_t)LEAVE_NS)) {
        nb_fail(&why, NB_ECLOSED, "closed");
        nb_link_fail(link, &why);
    }
}

static void tick(struct nb_net *net, int64_t now) {
    net->resumed_ns = now - net->ticked_ns > GAP_NS ? now : net->resumed_ns;
    net->ticked_ns = now;
    nb_admission_tick(&net->admission, now);
    net->up->expire(net, now);
    NB_LIST_EACH(it, &net->links) {
        struct nb_link *link = NB_CONTAINER(it, struct nb_link, at_net);
        if (link->failing || link->state == NB_LINK_ENDED) {
            continue;
        }
        if (link->state < NB_LINK_READY && (link->outgoing || link->admitted)) {
            handshake_tick(link, now);
        }
        if (link->lanes != NULL && link->state >= NB_LINK_LANES) {
            nb_lanes_tick(link->lanes, now);
            ping_tick(link, now);
            silence_tick(link, now);
        }
    }
}

// Ends the links that failed, and frees those that no comm refers to.
static void reap(struct nb_net *net) {
    NB_LIST_EACH_SAFE(it, nx, &net->links) {
        struct nb_link *link = NB_CONTAINER(it, struct nb_link, at_net);
        if (link->failing && link->state != NB_LINK_ENDED) {
            link_end(link);
        }
        if (link->state == NB_LINK_ENDED && nb_list_empty(&link->comms) && link != net->opening) {
            link_free(link);
        }
    }
}

static struct nb_link *next_proven(const struct nb_net *net) {
    NB_LIST_EACH(it, &net->links) {
        struct nb_link *link = NB_CONTAINER(it, struct nb_link, at_net);
        if (link->state == NB_LINK_PROVEN && !link->failing) {
            return link;
        }
    }
    return NULL;
}

// One link in a pass: the proofs of other links are not delayed by more.
void nb_links_open(struct nb_net *net) {
    struct nb_link *link = next_proven(net);
    struct nb_error err = {0};
    if (link != NULL) {
        link->state = NB_LINK_OPENING;
        net->opening = link;
        int rc = nb_link_shake_open(link, &err);
        net->opening = NULL;
        if (rc < 0) {
            nb_link_fail(link, &err);
        } else if (link->state != NB_LINK_ENDED) {
            parse(link); // the peer's next message may be here
        }
    }
    atomic_store_explicit(&net->open_due, next_proven(net) != NULL, memory_order_relaxed);
}

void nb_links_progress(struct nb_net *net) {
    nb_loop_wait(&net->loop, 0);
    int64_t now = nb_now_ns();
    NB_LIST_EACH(it, &net->links) {
        struct nb_link *link = NB_CONTAINER(it, struct nb_link, at_net);
        if (link->lanes == NULL || link->failing) {
            continue;
        }
        (void)nb_link_lone_look(link, now);
        if (link->flush_due && !link->blocked) {
            nb_link_flush(link);
        }
        if (link->state == NB_LINK_READY && nb_link_lanes_idle(link) && now - link->polled_ns < POLL_NS) {
            continue;
        }
        link->polled_ns = now;
        nb_lanes_progress(link->lanes);
        if (link->state == NB_LINK_LANES && nb_lanes_peer_missing(link->lanes, nb_link_other_rank(link)) == 0) {
            link->state = NB_LINK_READY;
            nb_lanes_listen_end(link->lanes); // a lane that is lost later is not opened again
        }
    }
    if (now - net->ticked_ns >= TICK_NS) {
        tick(net, now);
    }
    reap(net);
}

bool nb_links_opening(const struct nb_net *net, const unsigned char process[NB_NET_ID_BYTES]) {
    NB_LIST_EACH(it, &net->links) {
        const struct nb_link *link = NB_CONTAINER(it, const struct nb_link, at_net);
        if (!link->outgoing && link->admitted && link->state < NB_LINK_READY && !link->failing &&
            memcmp(link->process, process, sizeof link->process) == 0) {
            return true;
        }
    }
    return false;
}

int nb_links_arm(const struct nb_net *net) {
    int sleep_ms = SLEEP_MS; // always: a call may take the event that should wake the sleeper
    NB_LIST_EACH(it, &net->links) {
        const struct nb_link *link = NB_CONTAINER(it, struct nb_link, at_net);
        bool pending = link->state < NB_LINK_READY;
        bool polled = link->lanes != NULL && nb_lanes_arm(link->lanes) == -EAGAIN;
        if (link->state == NB_LINK_PROVEN || (polled && !nb_link_lanes_idle(link))) {
            return 0;
        }
        pending = pending || net->up->activity(link).pending;
        int most_ms = pending || link->failing || link->leaving ? BUSY_SLEEP_MS : SLEEP_MS;
        most_ms = polled ? POLL_SLEEP_MS : most_ms;
        sleep_ms = most_ms < sleep_ms ? most_ms : sleep_ms;
    }
    return sleep_ms;
}

// Ending

void nb_link_release(struct nb_link *link) {
    if (!nb_list_empty(&link->comms) || link->state == NB_LINK_ENDED) {
        return;
    }
    struct nb_error why = {0};
    if (link->outgoing && link->state == NB_LINK_READY && link->over_ns == 0) {
        nb_link_put_ctl(link, (struct wire_ctl){.type = NB_CTL_LEAVE}, NULL, 0);
        link->leaving = true;
        link->leave_ns = nb_now_ns();
    } else if (link->outgoing || link->left) {
        nb_fail(&why, NB_ECLOSED, "closed");
        nb_link_fail(link, &why);
    }
}

bool nb_links_unsent(const struct nb_net *net) {
    NB_LIST_EACH(it, &net->links) {
        const struct nb_link *link = NB_CONTAINER(it, const struct nb_link, at_net);
        if (link->outgoing && link->state == NB_LINK_READY && !link->failing && nb_link_unsent(link) > 0) {
            return true;
        }
    }
    return false;
}

bool nb_links_leaving(const struct nb_net *net, bool *unsent) {
    bool leaving = false;
    *unsent = false;
    NB_LIST_EACH(it, &net->links) {
        const struct nb_link *link = NB_CONTAINER(it, struct nb_link, at_net);
        if (link->leaving && link->state != NB_LINK_ENDED) {
            leaving = true;
            *unsent = *unsent || nb_link_unsent(link) > 0;
        }
    }
    return leaving;
}

void nb_links_close(struct nb_net *net) {
    nb_links_listen_end(net);
    NB_LIST_EACH_SAFE(it, nx, &net->links) {
        struct nb_link *link = NB_CONTAINER(it, struct nb_link, at_net);
        if (link->state != NB_LINK_ENDED) {
            nb_fail(&link->failure, NB_ECLOSED, "closed");
            link_end(link);
        }
        link_free(link);
    }
}
