// A lane's listener: who connects proves that it is a rank of this job, and becomes that rank's incoming connection.
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
    PAUSE_MS = 100 // after an accept that failed for want of descriptors or memory
};

// A connection that has not authenticated.
struct stranger {
    struct nb_watch watch;
    struct tcp_lane *lane;
    struct nb_list link;
    struct nb_pending pending;
    bool answered; // its hello was right: its proof is awaited
    struct greeting greeting;
};

static void stranger_drop(struct nb_pending *pending) {
    struct stranger *stranger = NB_CONTAINER(pending, struct stranger, pending);
    struct tcp_lane *lane = stranger->lane;
    nb_list_remove(&stranger->link);
    nb_tcp_shut(lane, &stranger->watch);
    nb_admission_remove(lane->config.admission, pending);
    free(stranger);
}

// It has authenticated: its descriptor is the incoming connection of its rank.
static void stranger_admit(struct stranger *stranger, struct conn *conn) {
    struct tcp_lane *lane = stranger->lane;
    int fd = stranger->watch.fd;
    nb_loop_remove(lane->config.loop, &stranger->watch);
    stranger->watch.fd = -1;
    stranger_drop(&stranger->pending);
    conn->in_watch.fd = fd;
    struct nb_error err = {0};
    if (nb_loop_add(lane->config.loop, &conn->in_watch, EPOLLIN, &err) < 0) {
        nb_tcp_lost(conn, -ECONNRESET, "handshake failed");
    }
}

static void stranger_refuse(struct stranger *stranger, int why) {
    stranger->lane->base.refused += why == NB_EAUTH;
    stranger_drop(&stranger->pending);
}

static void stranger_hear(struct stranger *stranger) {
    struct tcp_lane *lane = stranger->lane;
    if (!stranger->answered) {
        int begun = nb_tcp_welcome(lane, stranger->watch.fd, &stranger->greeting);
        stranger->answered = begun > 0;
        if (begun < 0) {
            stranger_refuse(stranger, begun);
        }
        return;
    }
    int rc = nb_tcp_welcomed(stranger->watch.fd, &stranger->greeting);
    if (rc == 0) {
        return;
    }
    struct conn *known = rc > 0 ? &lane->conns[stranger->greeting.hello.rank] : NULL;
    if (known == NULL || known->gone || known->in_watch.fd >= 0) {
        stranger_refuse(stranger, known == NULL ? rc : NB_EAUTH);
        return;
    }
    stranger_admit(stranger, known);
}

static void stranger_ready(struct nb_watch *watch, uint32_t events) {
    (void)events;
    stranger_hear(NB_CONTAINER(watch, struct stranger, watch));
}

static void gate_open(struct nb_gate *gate) {
    struct tcp_lane *lane = NB_CONTAINER(gate, struct tcp_lane, gate);
    nb_loop_change(lane->config.loop, &lane->listener, EPOLLIN);
}

// Connections wait in the backlog for so long; 0: until there is a place for one.
static void gate_shut(struct tcp_lane *lane, int64_t for_ns) {
    nb_loop_change(lane->config.loop, &lane->listener, 0);
    nb_admission_shut(lane->config.admission, &lane->gate, for_ns);
}

// Returns the connection, or NULL: then the descriptor is closed.
static struct stranger *stranger_open(struct tcp_lane *lane, int fd) {
    struct stranger *stranger = calloc(1, sizeof *stranger);
    struct nb_error err = {0};
    if (stranger == NULL) {
        close(fd);
        return NULL;
    }
    nb_tcp_tune(lane, fd);
    stranger->lane = lane;
    stranger->pending.drop = stranger_drop;
    stranger->watch = (struct nb_watch){.fd = fd, .ready = stranger_ready};
    if (nb_loop_add(lane->config.loop, &stranger->watch, EPOLLIN, &err) < 0) {
        close(fd);
        free(stranger);
        return NULL;
    }
    nb_list_insert(&lane->strangers, &stranger->link);
    nb_admission_add(lane->config.admission, &stranger->pending);
    return stranger;
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
            lane->base.door = -errno;
            gate_shut(lane, (int64_t)PAUSE_MS * 1000000);
        }
        return;
    }
    lane->base.door = 0;
    struct stranger *stranger = stranger_open(lane, fd);
    if (stranger != NULL) {
        stranger_hear(stranger); // most have sent their first bytes by now
    }
}

int nb_tcp_listen(struct tcp_lane *lane, struct nb_error *err) {
    lane->addr = lane->config.bind;
    lane->listener.ready = listener_ready;
    lane->listener.fd = nb_sock_listen(&lane->addr, lane->config.ports, BACKLOG, err);
    lane->gate.open = gate_open;
    nb_list_init(&lane->gate.link);
    nb_list_init(&lane->strangers);
    return lane->listener.fd < 0 ? lane->listener.fd : nb_loop_add(lane->config.loop, &lane->listener, EPOLLIN, err);
}

void nb_tcp_listen_close(struct tcp_lane *lane) {
    nb_list_remove(&lane->gate.link);
    NB_LIST_EACH_SAFE(it, nx, &lane->strangers) {
        stranger_drop(&NB_CONTAINER(it, struct stranger, link)->pending);
    }
    nb_tcp_shut(lane, &lane->listener);
}
