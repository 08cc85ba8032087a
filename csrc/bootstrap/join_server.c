// Join server: rank 0 admits each rank that proves the secret, and never waits for a single connection.
#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <unistd.h>

#include "base/admission.h"
#include "base/bits.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/interrupt.h"
#include "base/list.h"
#include "base/sha256.h"
#include "base/sock.h"
#include "base/wire.h"
#include "bootstrap/bootstrap.h"
#include "bootstrap/internal.h"

enum {
    CANDIDATES = NB_PENDING_MAX + 1, // one more, as a new connection comes before the one that it replaces is dropped
    WRITE_MS = 2000,
    TICK_MS = 50,         // while there is a candidate
    ACCEPT_PAUSE_MS = 100 // after an accept that failed
};

static const int64_t MS = 1000000;

// A connection that has not proved the secret yet.
struct candidate {
    int fd; // -1: this place is free
    struct server *server;
    struct nb_pending pending;
    size_t got; // bytes received of the awaited message
    enum { AWAIT_HELLO, AWAIT_PROOF, AWAIT_END } state;
    struct nb_shake shake;
    struct wire_join_proof proof;
};

// A rank that has proved the secret.
struct member {
    int fd; // -1: none yet
    struct nb_shake shake;
};

struct server {
    const struct nb_boot_config *config;
    const struct nb_listener *listener;
    int64_t deadline_ns;
    struct nb_admission admission;
    struct candidate candidates[CANDIDATES];
    struct member *members; // by rank
    uint64_t *joined;       // one bit per rank; rank 0's is set
    int joined_count;
    int unauthenticated;
    int accept_error;        // errno of the last accept, if it failed
    int64_t accept_ns;       // earliest time of the next accept
    struct nb_error failure; // of the join; reported to every rank that joins
    struct pollfd *polled;   // the listener, then the candidates, then the members
};

static void fill_verdict(struct wire_join_verdict *verdict, int code, int peer, const char *text,
                         const unsigned char *salt) {
    memset(verdict, 0, sizeof *verdict);
    verdict->code = code;
    verdict->peer = peer;
    (void)snprintf(verdict->text, sizeof verdict->text, "%s", text);
    if (salt != NULL) {
        memcpy(verdict->salt, salt, sizeof verdict->salt);
    }
}

static int send_verdict(const struct server *server, int fd, const struct nb_shake *shake,
                        struct wire_join_verdict *verdict) {
    nb_shake_verdict(shake, server->config, verdict);
    return nb_sock_write_all(fd, verdict, sizeof *verdict, nb_now_ns() + WRITE_MS * MS, NULL);
}

static void send_failure(const struct server *server, int fd, const struct nb_shake *shake) {
    struct wire_join_verdict verdict;
    fill_verdict(&verdict, server->failure.code, server->failure.peer, server->failure.text, NULL);
    (void)send_verdict(server, fd, shake, &verdict); // on failure the rank has left, and so has failed itself
}

// Ends a failed join: reports the failure to the ranks that have joined, and to those that join within the grace
// period.
static void fail_members(struct server *server) {
    for (int rank = 1; rank < server->config->size; rank++) {
        struct member *member = &server->members[rank];
        if (member->fd >= 0) {
            send_failure(server, member->fd, &member->shake);
            close(member->fd);
            member->fd = -1;
        }
    }
    int64_t grace_ns = nb_now_ns() + NB_BOOT_GRACE_MS * MS;
    if (grace_ns < server->deadline_ns) {
        server->deadline_ns = grace_ns;
    }
}

// Frees the candidate's place. The caller has closed the descriptor or given it away.
static void release(struct candidate *candidate) {
    candidate->fd = -1;
    nb_admission_remove(&candidate->server->admission, &candidate->pending);
}

static void drop(struct candidate *candidate) {
    close(candidate->fd);
    release(candidate);
}

// Drops a candidate that did not prove the secret.
static void drop_unauthenticated(struct nb_pending *pending) {
    struct candidate *candidate = NB_CONTAINER(pending, struct candidate, pending);
    candidate->server->unauthenticated += candidate->state != AWAIT_END;
    drop(candidate);
}

// Compares the tags. A failure shows both from just before their first difference, so that long ones fit.
static void check_tag(struct server *server, const struct wire_join_hello *hello) {
    const char *mine = server->config->tag != NULL ? server->config->tag : "";
    size_t mine_bytes = strlen(mine);
    if (mine_bytes == hello->tag_bytes && memcmp(mine, hello->tag, mine_bytes) == 0) {
        return;
    }
    size_t same = 0;
    while (same < mine_bytes && same < hello->tag_bytes && mine[same] == hello->tag[same]) {
        same++;
    }
    size_t from = same > 60 ? same - 40 : 0;
    size_t theirs_bytes = hello->tag_bytes - from;
    const char *cut = from > 0 ? "…" : "";
    int rank = (int)hello->rank;
    (void)nb_fail_peer(&server->failure, NB_EMISMATCH, rank, "rank %d runs with '%s%.*s', rank 0 with '%s%.*s'", rank,
                       cut, (int)(theirs_bytes < 190 ? theirs_bytes : 190), hello->tag + from, cut,
                       (int)(mine_bytes - from < 190 ? mine_bytes - from : 190), mine + from);
}

static void check_claim(struct server *server, const struct wire_join_hello *hello) {
    int size = server->config->size;
    struct nb_error *failure = &server->failure;
    if (hello->size != (uint32_t)size) {
        (void)nb_fail_peer(failure, NB_EMISMATCH, (int)hello->rank, "rank %u runs in a job of %u ranks, rank 0 of %d",
                           hello->rank, hello->size, size);
    } else if (hello->rank == 0 || hello->rank >= (uint32_t)size) {
        (void)nb_fail_peer(failure, NB_EMISMATCH, (int)hello->rank,
                           "a process joined as rank %u: ranks 1 to %d were expected", hello->rank, size - 1);
    } else if (nb_bits_get(server->joined, hello->rank)) {
        (void)nb_fail_peer(failure, NB_EMISMATCH, (int)hello->rank, "two processes joined as rank %u", hello->rank);
    } else {
        check_tag(server, hello);
    }
}

// Admits a candidate that knows the secret: it becomes a member, or the reason why the join fails.
static void admit(struct server *server, struct candidate *candidate) {
    const struct wire_join_hello *hello = &candidate->shake.hello;
    bool failed_before = server->failure.code != 0;
    check_claim(server, hello);
    if (hello->rank < (uint32_t)server->config->size && !nb_bits_get(server->joined, hello->rank)) {
        nb_bits_set(server->joined, hello->rank);
        server->joined_count++;
    }
    if (server->failure.code == 0) {
        struct member *member = &server->members[hello->rank];
        nb_sock_tune(candidate->fd, server->config->timeout_ms);
        member->fd = candidate->fd;
        member->shake = candidate->shake;
        release(candidate);
        return;
    }
    send_failure(server, candidate->fd, &candidate->shake);
    drop(candidate);
    if (!failed_before) {
        fail_members(server);
    }
}

// Refuses a candidate, and keeps the connection until the other end has read the refusal and closed.
static void refuse(struct server *server, struct candidate *candidate) {
    server->unauthenticated++;
    candidate->state = AWAIT_END;
    (void)shutdown(candidate->fd, SHUT_WR);
}

// Sends a message, small enough for the buffer of a new connection. False: drop the connection.
static bool send_reply(const struct candidate *candidate, const void *message, size_t bytes) {
    return send(candidate->fd, message, bytes, MSG_NOSIGNAL) == (ssize_t)bytes;
}

static bool handle_hello(struct server *server, struct candidate *candidate) {
    candidate->state = AWAIT_PROOF;
    candidate->got = 0;
    if (nb_shake_challenge(&candidate->shake, &server->failure) != 0 ||
        !send_reply(candidate, &candidate->shake.challenge, sizeof candidate->shake.challenge)) {
        return false;
    }
    if (candidate->shake.hello.version != NB_WIRE_JOIN_VERSION) {
        refuse(server, candidate);
        return true;
    }
    return candidate->shake.hello.tag_bytes <= NB_WIRE_JOIN_TAG_MAX;
}

// True if the candidate has proved the secret and the answer was sent.
static bool handle_proof(struct server *server, struct candidate *candidate) {
    struct wire_join_proof expected;
    struct wire_join_answer answer = {0};
    nb_shake_proof(&candidate->shake, server->config, &expected);
    bool known = nb_bytes_equal(expected.mac, candidate->proof.mac, sizeof expected.mac);
    if (known) {
        int64_t left_ms = (server->deadline_ns - nb_now_ns()) / MS;
        answer.left_ms = left_ms > 0 ? (uint32_t)left_ms : 0;
        nb_shake_answer(&candidate->shake, server->config, &answer);
    }
    bool sent = send_reply(candidate, &answer, sizeof answer);
    if (!known) {
        refuse(server, candidate);
    }
    return known && sent;
}

static void *awaited_message(struct candidate *candidate, size_t *bytes) {
    if (candidate->state == AWAIT_HELLO) {
        *bytes = sizeof candidate->shake.hello;
        return &candidate->shake.hello;
    }
    *bytes = sizeof candidate->proof;
    return &candidate->proof;
}

// Reads what a candidate sent. A candidate of another protocol is dropped at the first byte that differs.
static void candidate_read(struct server *server, struct candidate *candidate) {
    size_t bytes;
    char *message = awaited_message(candidate, &bytes);
    if (candidate->state == AWAIT_END) {
        candidate->got = 0; // awaits only the end; overwrites what arrives
    }
    ssize_t n = recv(candidate->fd, message + candidate->got, bytes - candidate->got, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        return;
    }
    if (n <= 0) {
        drop_unauthenticated(&candidate->pending);
        return;
    }
    candidate->got += (size_t)n;
    bool keep = true;
    if (candidate->state == AWAIT_HELLO) {
        size_t seen = candidate->got < NB_WIRE_JOIN_MAGIC_BYTES ? candidate->got : NB_WIRE_JOIN_MAGIC_BYTES;
        keep = memcmp(candidate->shake.hello.magic, NB_WIRE_JOIN_MAGIC, seen) == 0;
        if (keep && candidate->got == bytes) {
            keep = handle_hello(server, candidate);
        }
    } else if (candidate->state == AWAIT_PROOF && candidate->got == bytes) {
        if (handle_proof(server, candidate)) {
            admit(server, candidate);
            return;
        }
        keep = candidate->state == AWAIT_END;
    }
    if (!keep) {
        server->unauthenticated++;
        drop(candidate);
    }
}

static struct candidate *free_candidate(struct server *server) {
    int i = 0;
    while (i < CANDIDATES - 1 && server->candidates[i].fd >= 0) {
        i++;
    }
    return &server->candidates[i];
}

// Accepts the waiting connections. If accept fails (no descriptors, no memory), the next one waits for a while: the
// cause may pass. If it does not, the failure at the deadline names it.
static int accept_candidates(struct server *server, struct nb_error *err) {
    while (nb_admission_may(&server->admission)) {
        int fd = nb_sock_accept(server->listener->fd);
        if (fd < 0 && errno == EAGAIN) {
            return 0;
        }
        if (fd < 0 && (errno == EBADF || errno == ENOTSOCK || errno == EINVAL)) { // not a listener, for good
            return nb_fail(err, -errno, "rank 0: accept: %m");
        }
        server->accept_error = fd < 0 ? errno : 0;
        if (fd < 0) {
            server->accept_ns = nb_now_ns() + ACCEPT_PAUSE_MS * MS;
            return 0;
        }
        struct candidate *candidate = free_candidate(server);
        *candidate = (struct candidate){.fd = fd, .server = server, .pending.drop = drop_unauthenticated};
        nb_admission_add(&server->admission, &candidate->pending);
    }
    return 0;
}

// Handles data from a member before the verdict. A member sends none, so it has left.
static void member_left(struct server *server, int rank) {
    struct member *member = &server->members[rank];
    close(member->fd);
    member->fd = -1;
    (void)nb_fail_peer(&server->failure, NB_EPEER, rank, "rank %d left before all ranks had joined", rank);
    fail_members(server);
}

// Sets *until_ns to the time of the next round if nothing happens before. Returns the number of descriptors.
static int fill_poll(struct server *server, int64_t *until_ns) {
    int n = 0;
    int64_t now = nb_now_ns();
    int64_t next_ns = server->deadline_ns;
    bool shut = server->accept_ns > now;
    bool full = !nb_admission_may(&server->admission);
    int64_t tick_ns = now + TICK_MS * MS;
    next_ns = shut && server->accept_ns < next_ns ? server->accept_ns : next_ns;
    next_ns = server->admission.count > 0 && tick_ns < next_ns ? tick_ns : next_ns;
    server->polled[n++] = (struct pollfd){.fd = shut || full ? -1 : server->listener->fd, .events = POLLIN};
    for (int i = 0; i < CANDIDATES; i++) {
        server->polled[n++] = (struct pollfd){.fd = server->candidates[i].fd, .events = POLLIN};
    }
    for (int rank = 1; rank < server->config->size; rank++) {
        server->polled[n++] = (struct pollfd){.fd = server->members[rank].fd, .events = POLLIN};
    }
    *until_ns = next_ns;
    return n;
}

// One round: members, then candidates, then connections that wait for an accept.
static int poll_once(struct server *server, struct nb_error *err) {
    int64_t until_ns;
    int n = fill_poll(server, &until_ns);
    int ready = nb_interrupt_poll(server->polled, (nfds_t)n, until_ns, server->config->interrupt);
    if (ready < 0) {
        errno = -ready;
        return nb_fail(err, ready, "rank 0: poll: %m");
    }
    for (int rank = 1; rank < server->config->size; rank++) {
        if (server->members[rank].fd >= 0 && server->polled[CANDIDATES + rank].revents != 0) {
            member_left(server, rank);
        }
    }
    for (int i = 0; i < CANDIDATES; i++) {
        if (server->candidates[i].fd >= 0 && server->polled[1 + i].revents != 0) {
            candidate_read(server, &server->candidates[i]);
        }
    }
    nb_admission_tick(&server->admission, nb_now_ns());
    return server->polled[0].revents != 0 ? accept_candidates(server, err) : 0;
}

// Fails the join at the deadline: names the missing ranks and a likely reason.
static void fail_missing(struct server *server) {
    char ranks[NB_RANKS_TEXT];
    char unauthenticated[80] = "";
    char refused[80] = "";
    char here[NB_SOCK_TEXT];
    int first = nb_ranks_missing(server->joined, server->config->size, ranks);
    if (server->unauthenticated > 0) {
        (void)snprintf(unauthenticated, sizeof unauthenticated,
                       "; %d connection%s did not prove knowledge of the job's secret", server->unauthenticated,
                       server->unauthenticated == 1 ? "" : "s");
    }
    if (server->accept_error != 0) {
        errno = server->accept_error;
        (void)snprintf(refused, sizeof refused, "; rank 0 could not accept a connection: %m");
    }
    nb_sock_format(&server->listener->addr, here);
    (void)nb_fail_peer(
        &server->failure, -ETIMEDOUT, first,
        "%s did not join within %g s%s%s; rank 0 listens at %s: if other hosts do not reach it, " NB_ELSEWHERE, ranks,
        server->config->timeout_ms / 1000.0, unauthenticated, refused, here);
}

static int await_members(struct server *server, struct nb_error *err) {
    while (server->joined_count < server->config->size && nb_now_ns() < server->deadline_ns) {
        int rc = poll_once(server, &server->failure);
        if (rc != 0) {
            break;
        }
    }
    if (server->failure.code == 0 && server->joined_count < server->config->size) {
        fail_missing(server);
    }
    if (server->failure.code != 0) {
        if (server->failure.code != -EINTR) { // else the members see rank 0 leave
            fail_members(server);
        }
        return nb_fail_peer(err, server->failure.code, server->failure.peer, "%s", server->failure.text);
    }
    return 0;
}

// Completes the join: tells all ranks, with the bytes from which they derive the session.
static int send_verdicts(struct server *server, struct nb_boot *boot, struct nb_error *err) {
    unsigned char salt[NB_SHA256_BYTES];
    struct wire_join_verdict verdict;
    int rc = nb_random(salt, sizeof salt);
    if (rc != 0) {
        errno = -rc;
        return nb_fail(err, rc, "getrandom: %m");
    }
    nb_shake_session(server->config, salt, boot->session);
    fill_verdict(&verdict, 0, NB_NO_PEER, "", salt);
    for (int rank = 1; rank < boot->size; rank++) {
        const struct member *member = &server->members[rank];
        rc = send_verdict(server, member->fd, &member->shake, &verdict);
        if (rc != 0) {
            errno = -rc;
            return nb_fail_peer(err, NB_EPEER, rank, "rank %d left after all ranks had joined: %m", rank);
        }
    }
    boot->self.len = sizeof boot->self.in6;
    if (getsockname(server->members[1].fd, &boot->self.any, &boot->self.len) != 0) {
        return nb_fail(err, -errno, "getsockname: %m");
    }
    return 0;
}

static struct server *server_open(const struct nb_boot_config *config, const struct nb_listener *listener) {
    size_t size = (size_t)config->size;
    struct server *server = calloc(1, sizeof *server);
    if (server == NULL) {
        return NULL;
    }
    server->config = config;
    server->listener = listener;
    server->deadline_ns = nb_now_ns() + config->timeout_ms * MS;
    server->members = calloc(size, sizeof *server->members);
    server->joined = calloc(nb_bits_words(size), sizeof *server->joined);
    nb_admission_init(&server->admission);
    for (int i = 0; i < CANDIDATES; i++) {
        server->candidates[i].fd = -1;
    }
    server->polled = calloc(1 + CANDIDATES + size, sizeof *server->polled);
    for (size_t rank = 0; server->members != NULL && rank < size; rank++) {
        server->members[rank].fd = -1;
    }
    if (server->joined != NULL) {
        nb_bits_set(server->joined, 0);
        server->joined_count = 1;
    }
    return server;
}

static void server_close(struct server *server) {
    for (int i = 0; i < CANDIDATES; i++) {
        if (server->candidates[i].fd >= 0) {
            close(server->candidates[i].fd);
        }
    }
    for (int rank = 1; server->members != NULL && rank < server->config->size; rank++) {
        if (server->members[rank].fd >= 0) {
            close(server->members[rank].fd);
        }
    }
    free(server->polled);
    free(server->joined);
    free(server->members);
    free(server);
}

int nb_join_server(struct nb_boot *boot, const struct nb_boot_config *config, const struct nb_listener *listener,
                   struct nb_error *err) {
    int rc;
    int *control = calloc((size_t)config->size, sizeof *control);
    struct server *server = server_open(config, listener);
    if (control == NULL || server == NULL || server->members == NULL || server->joined == NULL ||
        server->polled == NULL) {
        (void)nb_fail(err, -ENOMEM, "cannot allocate memory for %d ranks", config->size);
        rc = -ENOMEM;
    } else {
        rc = await_members(server, err);
    }
    if (rc == 0) {
        rc = send_verdicts(server, boot, err);
    }
    if (rc == 0) {
        control[0] = -1;
        for (int rank = 1; rank < config->size; rank++) {
            control[rank] = server->members[rank].fd;
            server->members[rank].fd = -1;
        }
        boot->control = control;
        control = NULL;
    }
    if (server != NULL) {
        server_close(server);
    }
    free(control);
    return rc;
}
