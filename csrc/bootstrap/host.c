// How does rank 0 let in who knows the secret, and nobody else, without ever being held up?
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
#include "base/list.h"
#include "base/sha256.h"
#include "base/sock.h"
#include "bootstrap/bootstrap.h"
#include "bootstrap/internal.h"

enum {
    GUESTS = NB_PENDING_MAX + 1, // the last one to come, and the one that it replaces
    WRITE_MS = 2000,
    POLL_MOST_MS = 60000,
    TICK_MS = 50,       // while a guest is there
    DOOR_PAUSE_MS = 100 // after which a door that could not be opened is tried again
};

static const int64_t MS = 1000000;

// A connection that has not proved the secret yet.
struct guest {
    int fd; // -1: this place is free
    struct host *host;
    struct nb_pending pending;
    size_t got; // bytes of the message that is awaited
    enum { AWAIT_HELLO, AWAIT_PROOF, AWAIT_END } state;
    struct nb_shake shake;
    struct nb_proof proof;
};

// A rank that has proved it.
struct member {
    int fd; // -1: none
    struct nb_shake shake;
};

struct host {
    const struct nb_boot_config *config;
    const struct nb_listener *listener;
    int64_t deadline_ns;
    struct nb_admission admission;
    struct guest guests[GUESTS];
    struct member *members; // by rank
    uint64_t *came;         // bit by rank; rank 0 came first
    int came_count;
    int strangers;
    int door_error;          // errno of the last accept, where it failed
    int64_t door_ns;         // when the next may be tried
    struct nb_error failure; // of the join; whoever comes is told
    struct pollfd *polled;   // the listener, then the guests, then the members
};

static void fill_verdict(struct nb_verdict *verdict, int code, int peer, const char *text, const unsigned char *salt) {
    memset(verdict, 0, sizeof *verdict);
    verdict->code = code;
    verdict->peer = peer;
    (void)snprintf(verdict->text, sizeof verdict->text, "%s", text);
    if (salt != NULL) {
        memcpy(verdict->salt, salt, sizeof verdict->salt);
    }
}

static int send_verdict(const struct host *host, int fd, const struct nb_shake *shake, struct nb_verdict *verdict) {
    nb_shake_verdict(shake, host->config, verdict);
    return nb_sock_write_all(fd, verdict, sizeof *verdict, nb_now_ns() + WRITE_MS * MS);
}

static void tell_failure(const struct host *host, int fd, const struct nb_shake *shake) {
    struct nb_verdict verdict;
    fill_verdict(&verdict, host->failure.code, host->failure.peer, host->failure.text, NULL);
    (void)send_verdict(host, fd, shake, &verdict); // it may have left: it has failed then, too
}

// The join has failed: who has come is told, and so is who comes within the grace.
static void dismiss(struct host *host) {
    for (int rank = 1; rank < host->config->size; rank++) {
        struct member *member = &host->members[rank];
        if (member->fd >= 0) {
            tell_failure(host, member->fd, &member->shake);
            close(member->fd);
            member->fd = -1;
        }
    }
    int64_t grace_ns = nb_now_ns() + NB_BOOT_GRACE_MS * MS;
    if (grace_ns < host->deadline_ns) {
        host->deadline_ns = grace_ns;
    }
}

// Its place is free; the descriptor is closed, or somebody else's.
static void release(struct guest *guest) {
    guest->fd = -1;
    nb_admission_remove(&guest->host->admission, &guest->pending);
}

static void drop(struct guest *guest) {
    close(guest->fd);
    release(guest);
}

// It did not prove the secret.
static void drop_unproved(struct nb_pending *pending) {
    struct guest *guest = NB_CONTAINER(pending, struct guest, pending);
    guest->host->strangers += guest->state != AWAIT_END;
    drop(guest);
}

// Both tags from just before the point where they part, so that a long one shows it.
static void check_tag(struct host *host, const struct nb_hello *hello) {
    const char *mine = host->config->tag != NULL ? host->config->tag : "";
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
    (void)nb_fail_peer(&host->failure, NB_EMISMATCH, rank, "rank %d runs with '%s%.*s', rank 0 with '%s%.*s'", rank,
                       cut, (int)(theirs_bytes < 190 ? theirs_bytes : 190), hello->tag + from, cut,
                       (int)(mine_bytes - from < 190 ? mine_bytes - from : 190), mine + from);
}

static void check_claim(struct host *host, const struct nb_hello *hello) {
    int size = host->config->size;
    struct nb_error *failure = &host->failure;
    if (hello->size != (uint32_t)size) {
        (void)nb_fail_peer(failure, NB_EMISMATCH, (int)hello->rank, "rank %u runs in a job of %u ranks, rank 0 of %d",
                           hello->rank, hello->size, size);
    } else if (hello->rank == 0 || hello->rank >= (uint32_t)size) {
        (void)nb_fail_peer(failure, NB_EMISMATCH, (int)hello->rank,
                           "a process came as rank %u: ranks 1 to %d were expected", hello->rank, size - 1);
    } else if (nb_bits_get(host->came, hello->rank)) {
        (void)nb_fail_peer(failure, NB_EMISMATCH, (int)hello->rank, "two processes came as rank %u", hello->rank);
    } else {
        check_tag(host, hello);
    }
}

// The guest knows the secret: it becomes a member, or the reason why the join fails.
static void admit(struct host *host, struct guest *guest) {
    const struct nb_hello *hello = &guest->shake.hello;
    bool failed_before = host->failure.code != 0;
    check_claim(host, hello);
    if (hello->rank < (uint32_t)host->config->size && !nb_bits_get(host->came, hello->rank)) {
        nb_bits_set(host->came, hello->rank);
        host->came_count++;
    }
    if (host->failure.code == 0) {
        struct member *member = &host->members[hello->rank];
        nb_sock_tune(guest->fd, host->config->timeout_ms);
        member->fd = guest->fd;
        member->shake = guest->shake;
        release(guest);
        return;
    }
    tell_failure(host, guest->fd, &guest->shake);
    drop(guest);
    if (!failed_before) {
        dismiss(host);
    }
}

// Says no, and keeps the connection until the other end has read it and closed.
static void turn_away(struct host *host, struct guest *guest) {
    host->strangers++;
    guest->state = AWAIT_END;
    (void)shutdown(guest->fd, SHUT_WR);
}

// Messages this small always fit the buffer of a new connection. False: drop it.
static bool reply(const struct guest *guest, const void *message, size_t bytes) {
    return send(guest->fd, message, bytes, MSG_NOSIGNAL) == (ssize_t)bytes;
}

static bool take_hello(struct host *host, struct guest *guest) {
    guest->state = AWAIT_PROOF;
    guest->got = 0;
    if (nb_shake_challenge(&guest->shake, &host->failure) != 0 ||
        !reply(guest, &guest->shake.challenge, sizeof guest->shake.challenge)) {
        return false;
    }
    if (guest->shake.hello.version != NB_BOOT_PROTOCOL) {
        turn_away(host, guest);
        return true;
    }
    return guest->shake.hello.tag_bytes <= NB_BOOT_TAG_MAX;
}

// True where the guest has proved the secret and has been answered.
static bool take_proof(struct host *host, struct guest *guest) {
    struct nb_proof expected;
    struct nb_answer answer = {0};
    nb_shake_proof(&guest->shake, host->config, &expected);
    bool known = nb_bytes_equal(expected.mac, guest->proof.mac, sizeof expected.mac);
    if (known) {
        int64_t left_ms = (host->deadline_ns - nb_now_ns()) / MS;
        answer.left_ms = left_ms > 0 ? (uint32_t)left_ms : 0;
        nb_shake_answer(&guest->shake, host->config, &answer);
    }
    bool sent = reply(guest, &answer, sizeof answer);
    if (!known) {
        turn_away(host, guest);
    }
    return known && sent;
}

static void *awaited(struct guest *guest, size_t *bytes) {
    if (guest->state == AWAIT_HELLO) {
        *bytes = sizeof guest->shake.hello;
        return &guest->shake.hello;
    }
    *bytes = sizeof guest->proof;
    return &guest->proof;
}

// Reads what a guest sent. One that speaks another language is dropped at its first byte.
static void hear(struct host *host, struct guest *guest) {
    size_t bytes;
    char *message = awaited(guest, &bytes);
    if (guest->state == AWAIT_END) {
        guest->got = 0; // nothing is awaited but the end; what comes is overwritten
    }
    ssize_t n = recv(guest->fd, message + guest->got, bytes - guest->got, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        return;
    }
    if (n <= 0) {
        drop_unproved(&guest->pending);
        return;
    }
    guest->got += (size_t)n;
    bool keep = true;
    if (guest->state == AWAIT_HELLO) {
        size_t seen = guest->got < NB_BOOT_MAGIC_BYTES ? guest->got : NB_BOOT_MAGIC_BYTES;
        keep = memcmp(guest->shake.hello.magic, NB_BOOT_MAGIC, seen) == 0;
        if (keep && guest->got == bytes) {
            keep = take_hello(host, guest);
        }
    } else if (guest->state == AWAIT_PROOF && guest->got == bytes) {
        if (take_proof(host, guest)) {
            admit(host, guest);
            return;
        }
        keep = guest->state == AWAIT_END;
    }
    if (!keep) {
        host->strangers++;
        drop(guest);
    }
}

static struct guest *place(struct host *host) {
    int i = 0;
    while (i < GUESTS - 1 && host->guests[i].fd >= 0) {
        i++;
    }
    return &host->guests[i];
}

// Lets in who waits at the door. Where that fails, for want of descriptors or memory or by the caller's own fault, the
// door is left alone for a while: what is wrong may pass, and is told at the deadline where it does not.
static int welcome(struct host *host, struct nb_error *err) {
    while (nb_admission_may(&host->admission)) {
        int fd = nb_sock_accept(host->listener->fd);
        if (fd < 0 && errno == EAGAIN) {
            return 0;
        }
        if (fd < 0 && (errno == EBADF || errno == ENOTSOCK || errno == EINVAL)) { // no listener, and never will be
            return nb_fail(err, -errno, "rank 0: accept: %m");
        }
        host->door_error = fd < 0 ? errno : 0;
        if (fd < 0) {
            host->door_ns = nb_now_ns() + DOOR_PAUSE_MS * MS;
            return 0;
        }
        struct guest *guest = place(host);
        *guest = (struct guest){.fd = fd, .host = host, .pending.drop = drop_unproved};
        nb_admission_add(&host->admission, &guest->pending);
    }
    return 0;
}

// A member has nothing to say before the verdict: it has left.
static void miss(struct host *host, int rank) {
    struct member *member = &host->members[rank];
    close(member->fd);
    member->fd = -1;
    (void)nb_fail_peer(&host->failure, NB_EPEER, rank, "rank %d left before all ranks had come", rank);
    dismiss(host);
}

static int fill_poll(struct host *host, int *timeout_ms) {
    int n = 0;
    int64_t now = nb_now_ns();
    int64_t next_ns = host->deadline_ns;
    bool shut = host->door_ns > now;
    bool full = !nb_admission_may(&host->admission);
    int64_t tick_ns = now + TICK_MS * MS;
    next_ns = shut && host->door_ns < next_ns ? host->door_ns : next_ns;
    next_ns = host->admission.count > 0 && tick_ns < next_ns ? tick_ns : next_ns;
    host->polled[n++] = (struct pollfd){.fd = shut || full ? -1 : host->listener->fd, .events = POLLIN};
    for (int i = 0; i < GUESTS; i++) {
        host->polled[n++] = (struct pollfd){.fd = host->guests[i].fd, .events = POLLIN};
    }
    for (int rank = 1; rank < host->config->size; rank++) {
        host->polled[n++] = (struct pollfd){.fd = host->members[rank].fd, .events = POLLIN};
    }
    int64_t left_ms = (next_ns - now + MS - 1) / MS;
    left_ms = left_ms < POLL_MOST_MS ? left_ms : POLL_MOST_MS;
    *timeout_ms = left_ms > 0 ? (int)left_ms : 0;
    return n;
}

// One round: members, then guests, then who waits at the door.
static int turn(struct host *host, struct nb_error *err) {
    int timeout_ms;
    int n = fill_poll(host, &timeout_ms);
    if (poll(host->polled, (nfds_t)n, timeout_ms) < 0) {
        return errno == EINTR ? 0 : nb_fail(err, -errno, "rank 0: poll: %m");
    }
    for (int rank = 1; rank < host->config->size; rank++) {
        if (host->members[rank].fd >= 0 && host->polled[GUESTS + rank].revents != 0) {
            miss(host, rank);
        }
    }
    for (int i = 0; i < GUESTS; i++) {
        if (host->guests[i].fd >= 0 && host->polled[1 + i].revents != 0) {
            hear(host, &host->guests[i]);
        }
    }
    nb_admission_tick(&host->admission, nb_now_ns());
    return host->polled[0].revents != 0 ? welcome(host, err) : 0;
}

// Who is missing at the deadline, and what may be the reason.
static void fail_missing(struct host *host) {
    char ranks[NB_RANKS_TEXT];
    char strangers[80] = "";
    char door[80] = "";
    int first = nb_ranks_missing(host->came, host->config->size, ranks);
    if (host->strangers > 0) {
        (void)snprintf(strangers, sizeof strangers, "; %d connection%s did not prove to know the job's secret",
                       host->strangers, host->strangers == 1 ? "" : "s");
    }
    if (host->door_error != 0) {
        errno = host->door_error;
        (void)snprintf(door, sizeof door, "; rank 0 could not accept a connection: %m");
    }
    (void)nb_fail_peer(&host->failure, -ETIMEDOUT, first, "%s did not come within %g s%s%s", ranks,
                       host->config->timeout_ms / 1000.0, strangers, door);
}

static int gather(struct host *host, struct nb_error *err) {
    while (host->came_count < host->config->size && nb_now_ns() < host->deadline_ns) {
        int rc = turn(host, &host->failure);
        if (rc != 0) {
            break;
        }
    }
    if (host->failure.code == 0 && host->came_count < host->config->size) {
        fail_missing(host);
    }
    if (host->failure.code != 0) {
        dismiss(host);
        return nb_fail_peer(err, host->failure.code, host->failure.peer, "%s", host->failure.text);
    }
    return 0;
}

// Everybody is there: tells them so, with the bytes from which the session follows.
static int proclaim(struct host *host, struct nb_boot *boot, struct nb_error *err) {
    unsigned char salt[NB_SHA256_BYTES];
    struct nb_verdict verdict;
    int rc = nb_random(salt, sizeof salt);
    if (rc != 0) {
        errno = -rc;
        return nb_fail(err, rc, "getrandom: %m");
    }
    nb_shake_session(host->config, salt, boot->session);
    fill_verdict(&verdict, 0, NB_NO_PEER, "", salt);
    for (int rank = 1; rank < boot->size; rank++) {
        const struct member *member = &host->members[rank];
        rc = send_verdict(host, member->fd, &member->shake, &verdict);
        if (rc != 0) {
            errno = -rc;
            return nb_fail_peer(err, NB_EPEER, rank, "rank %d left as all ranks had come: %m", rank);
        }
    }
    boot->self.len = sizeof boot->self.in6;
    if (getsockname(host->members[1].fd, &boot->self.any, &boot->self.len) != 0) {
        return nb_fail(err, -errno, "getsockname: %m");
    }
    return 0;
}

static struct host *host_open(const struct nb_boot_config *config, const struct nb_listener *listener) {
    size_t size = (size_t)config->size;
    struct host *host = calloc(1, sizeof *host);
    if (host == NULL) {
        return NULL;
    }
    host->config = config;
    host->listener = listener;
    host->deadline_ns = nb_now_ns() + config->timeout_ms * MS;
    host->members = calloc(size, sizeof *host->members);
    host->came = calloc(nb_bits_words(size), sizeof *host->came);
    nb_admission_init(&host->admission);
    for (int i = 0; i < GUESTS; i++) {
        host->guests[i].fd = -1;
    }
    host->polled = calloc(1 + GUESTS + size, sizeof *host->polled);
    for (size_t rank = 0; host->members != NULL && rank < size; rank++) {
        host->members[rank].fd = -1;
    }
    if (host->came != NULL) {
        nb_bits_set(host->came, 0);
        host->came_count = 1;
    }
    return host;
}

static void host_close(struct host *host) {
    for (int i = 0; i < GUESTS; i++) {
        if (host->guests[i].fd >= 0) {
            close(host->guests[i].fd);
        }
    }
    for (int rank = 1; host->members != NULL && rank < host->config->size; rank++) {
        if (host->members[rank].fd >= 0) {
            close(host->members[rank].fd);
        }
    }
    free(host->polled);
    free(host->came);
    free(host->members);
    free(host);
}

int nb_join_host(struct nb_boot *boot, const struct nb_boot_config *config, const struct nb_listener *listener,
                 struct nb_error *err) {
    int rc;
    int *control = calloc((size_t)config->size, sizeof *control);
    struct host *host = host_open(config, listener);
    if (control == NULL || host == NULL || host->members == NULL || host->came == NULL || host->polled == NULL) {
        (void)nb_fail(err, -ENOMEM, "memory for %d ranks", config->size);
        rc = -ENOMEM;
    } else {
        rc = gather(host, err);
    }
    if (rc == 0) {
        rc = proclaim(host, boot, err);
    }
    if (rc == 0) {
        control[0] = -1;
        for (int rank = 1; rank < config->size; rank++) {
            control[rank] = host->members[rank].fd;
            host->members[rank].fd = -1;
        }
        boot->control = control;
        control = NULL;
    }
    if (host != NULL) {
        host_close(host);
    }
    free(control);
    return rc;
}
