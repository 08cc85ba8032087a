// TCP listener of a lane: accepts a connection, authenticates its rank, and makes it that rank's incoming connection.
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/admission.h"
#include "base/error.h"
#include "base/list.h"
#include "base/loop.h"
#include "base/sock.h"
#include "transport/tcp_internal.h"
#include "transport/transport.h"

enum {
    BACKLOG = 64,
    PAUSE_MS = 100 // after an accept that failed for lack of descriptors or memory
};

// A connection that has not authenticated.
struct incoming {
    struct nb_watch watch;
    struct tcp_lane *lane;
    struct nb_list link;
    struct nb_pending pending;
    bool answered; // its hello was valid: awaits its proof
    struct tcp_handshake handshake;
};

static void incoming_drop(struct nb_pending *pending) {
    struct incoming *incoming = NB_CONTAINER(pending, struct incoming, pending);
    struct tcp_lane *lane = incoming->lane;
    nb_list_remove(&incoming->link);
    nb_tcp_shut(lane, &incoming->watch);
    nb_admission_remove(lane->config.admission, pending);
    free(incoming);
}

// Admits an authenticated connection: its descriptor becomes the incoming connection of its rank.
static void incoming_admit(struct incoming *incoming, struct conn *conn) {
    struct tcp_lane *lane = incoming->lane;
    int fd = incoming->watch.fd;
    nb_loop_remove(lane->config.loop, &incoming->watch);
    incoming->watch.fd = -1;
    incoming_drop(&incoming->pending);
    conn->in_watch.fd = fd;
    struct nb_error err = {0};
    if (nb_loop_add(lane->config.loop, &conn->in_watch, EPOLLIN, &err) < 0) {
        nb_tcp_lost(conn, -ECONNRESET, "handshake failed");
    }
}

static void incoming_refuse(struct incoming *incoming, int why) {
    incoming->lane->base.refused += why == NB_EAUTH;
    incoming_drop(&incoming->pending);
}

static void incoming_read(struct incoming *incoming) {
    struct tcp_lane *lane = incoming->lane;
    if (!incoming->answered) {
        int begun = nb_tcp_read_hello(lane, incoming->watch.fd, &incoming->handshake);
        incoming->answered = begun > 0;
        if (begun < 0) {
            incoming_refuse(incoming, begun);
        }
        return;
    }
    int rc = nb_tcp_read_proof(incoming->watch.fd, &incoming->handshake);
    if (rc == 0) {
        return;
    }
    struct conn *known = rc > 0 ? &lane->conns[incoming->handshake.hello.rank] : NULL;
    if (known == NULL || known->gone || known->in_watch.fd >= 0) {
        incoming_refuse(incoming, known == NULL ? rc : NB_ECLOSED);
        return;
    }
    incoming_admit(incoming, known);
}

// Its proof may have arrived. A hello is not read: an answer that a close follows would tell the peer nothing.
static void incoming_read_proof(struct nb_pending *pending) {
    struct incoming *incoming = NB_CONTAINER(pending, struct incoming, pending);
    if (incoming->answered) {
        incoming_read(incoming);
    }
}

static void incoming_ready(struct nb_watch *watch, uint32_t events) {
    (void)events;
    incoming_read(NB_CONTAINER(watch, struct incoming, watch));
}

static void gate_open(struct nb_gate *gate) {
    struct tcp_lane *lane = NB_CONTAINER(gate, struct tcp_lane, gate);
    nb_loop_change(lane->config.loop, &lane->listener, EPOLLIN);
}

// Leaves connections in the backlog for `for_ns`; 0: until there is a place for one.
static void gate_shut(struct tcp_lane *lane, int64_t for_ns) {
    nb_loop_change(lane->config.loop, &lane->listener, 0);
    nb_admission_shut(lane->config.admission, &lane->gate, for_ns);
}

// Returns the connection; NULL: the descriptor is closed.
static struct incoming *incoming_open(struct tcp_lane *lane, int fd) {
    struct incoming *incoming = calloc(1, sizeof *incoming);
    struct nb_error err = {0};
    if (incoming == NULL) {
        close(fd);
        return NULL;
    }
    nb_tcp_tune(lane, fd);
    incoming->lane = lane;
    incoming->pending.drop = incoming_drop;
    incoming->pending.read = incoming_read_proof;
    incoming->watch = (struct nb_watch){.fd = fd, .ready = incoming_ready};
    if (nb_loop_add(lane->config.loop, &incoming->watch, EPOLLIN, &err) < 0) {
        close(fd);
        free(incoming);
        return NULL;
    }
    nb_list_insert(&lane->incoming, &incoming->link);
    nb_admission_add(lane->config.admission, &incoming->pending);
    return incoming;
}

static void listener_ready(struct nb_watch *watch, uint32_t events) {
    (void)events;
    struct tcp_lane *lane = NB_CONTAINER(watch, struct tcp_lane, listener);
    if (!nb_admission_may(lane->config.admission)) {
        gate_shut(lane, 0);
        return;
    }
    int fd = nb_sock_accept(watch->fd);
    if (fd < 0) {
        if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
            lane->base.accept_error = -errno;
            gate_shut(lane, (int64_t)PAUSE_MS * 1000000);
        }
        return;
    }
    lane->base.accept_error = 0;
    struct incoming *incoming = incoming_open(lane, fd);
    if (incoming != NULL) {
        incoming_read(incoming); // most have sent their first bytes by now
    }
}

int nb_tcp_listen(struct tcp_lane *lane, struct nb_error *err) {
    lane->addr = lane->config.bind;
    lane->listener.ready = listener_ready;
    lane->listener.fd = nb_sock_listen(&lane->addr, lane->config.ports, BACKLOG, err);
    lane->gate.open = gate_open;
    nb_list_init(&lane->gate.link);
    nb_list_init(&lane->incoming);
    return lane->listener.fd < 0 ? lane->listener.fd : nb_loop_add(lane->config.loop, &lane->listener, EPOLLIN, err);
}

void nb_tcp_listen_close(struct tcp_lane *lane) {
    nb_list_remove(&lane->gate.link);
    NB_LIST_EACH_SAFE(it, nx, &lane->incoming) {
        incoming_drop(&NB_CONTAINER(it, struct incoming, link)->pending);
    }
    nb_tcp_shut(lane, &lane->listener);
}
