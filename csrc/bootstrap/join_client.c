// Join client: connects a rank to rank 0, proves the secret, waits for rank 0's answer.
#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/interrupt.h"
#include "base/sha256.h"
#include "base/sock.h"
#include "base/wire.h"
#include "bootstrap/bootstrap.h"
#include "bootstrap/internal.h"

enum {
    CONNECT_MS = 3000, // a connect without an answer is repeated after this time
    RETRY_FIRST_MS = 10,
    RETRY_MOST_MS = 200,
    LEFT_MOST_MS = 24 * 3600 * 1000,
    VERDICT_SLACK_MS = 2000
};

static const int64_t MS = 1000000;

struct client {
    const struct nb_boot_config *config;
    const char *address;
    struct nb_sockaddr to;
    int64_t deadline_ns;
    struct nb_shake shake;
};

// True for a socket connected to itself. This happens if no process listens and the kernel picks the same local port.
static bool is_own_echo(int fd) {
    struct nb_sockaddr here = {.len = sizeof here.in6};
    struct nb_sockaddr there = {.len = sizeof there.in6};
    if (getsockname(fd, &here.any, &here.len) != 0 || getpeername(fd, &there.any, &there.len) != 0) {
        return false;
    }
    return here.len == there.len && memcmp(&here.any, &there.any, here.len) == 0;
}

// Waits for a connect to finish: its descriptor, or -errno.
static int connect_once(const struct client *client) {
    int fd = nb_sock_connect(&client->to, NULL, NULL, NULL);
    if (fd < 0) {
        return fd;
    }
    int64_t now = nb_now_ns();
    int64_t until = now + CONNECT_MS * MS < client->deadline_ns ? now + CONNECT_MS * MS : client->deadline_ns;
    struct pollfd poller = {.fd = fd, .events = POLLOUT};
    int rc = nb_interrupt_poll(&poller, 1, until, client->config->interrupt);
    if (rc >= 0) {
        rc = rc > 0 ? nb_sock_connected(fd) : -ETIMEDOUT;
    }
    if (rc == 0 && is_own_echo(fd)) {
        rc = -ECONNREFUSED;
    }
    if (rc != 0) {
        close(fd);
        return rc;
    }
    return fd;
}

static int fail_version(const struct client *client, uint32_t version, struct nb_error *err) {
    return nb_fail_peer(err, NB_EMISMATCH, 0, "rank 0 at %s speaks version %u of the bootstrap, rank %d version %d",
                        client->address, version, client->config->rank, NB_WIRE_JOIN_VERSION);
}

static int fail_wire(const struct client *client, const char *what, struct nb_error *err) {
    return nb_fail_peer(err, NB_EWIRE, 0, "the listener at %s is not rank 0 of this job: %s", client->address, what);
}

// Proves the secret, and checks rank 0's proof. -errno without a text: the connection was lost, and may be retried.
static int shake_hands(struct client *client, int fd, struct wire_join_answer *answer, struct nb_error *err) {
    struct nb_interrupt *interrupt = client->config->interrupt;
    struct nb_shake *shake = &client->shake;
    struct wire_join_proof proof;
    int rc = nb_shake_hello(shake, client->config, err);
    if (rc == 0) {
        rc = nb_sock_write_all(fd, &shake->hello, sizeof shake->hello, client->deadline_ns, interrupt);
    }
    if (rc == 0) {
        rc = nb_sock_read_all(fd, &shake->challenge, sizeof shake->challenge, client->deadline_ns, interrupt);
    }
    if (rc != 0) {
        return rc;
    }
    if (memcmp(shake->challenge.magic, NB_WIRE_JOIN_MAGIC, sizeof shake->challenge.magic) != 0) {
        return fail_wire(client, "it sent an invalid challenge", err);
    }
    if (shake->challenge.version != NB_WIRE_JOIN_VERSION) {
        return fail_version(client, shake->challenge.version, err);
    }
    nb_shake_proof(shake, client->config, &proof);
    rc = nb_sock_write_all(fd, &proof, sizeof proof, client->deadline_ns, interrupt);
    if (rc == 0) {
        rc = nb_sock_read_all(fd, answer, sizeof *answer, client->deadline_ns, interrupt);
    }
    if (rc != 0) {
        return rc;
    }
    struct wire_join_answer expected = *answer;
    nb_shake_answer(shake, client->config, &expected);
    if (!nb_bytes_equal(expected.mac, answer->mac, sizeof answer->mac)) {
        return nb_fail_peer(err, NB_EAUTH, 0, "rank %d and rank 0 at %s have different secrets (NETBOTTLENECK_SECRET)",
                            client->config->rank, client->address);
    }
    return 0;
}

// True for a failure that may pass: rank 0 has not started yet, or is too busy to answer in time.
static bool is_transient(int code) {
    static const int passing[] = {ECONNREFUSED, ECONNRESET, ETIMEDOUT, EHOSTUNREACH, ENETUNREACH,
                                  EHOSTDOWN,    ENETDOWN,   EAGAIN,    EADDRNOTAVAIL};
    for (size_t i = 0; i < sizeof passing / sizeof passing[0]; i++) {
        if (code == -passing[i]) {
            return true;
        }
    }
    return false;
}

// Connects and authenticates, with retries until the deadline. Returns the descriptor.
static int reach(struct client *client, struct wire_join_answer *answer, struct nb_error *err) {
    int wait_ms = RETRY_FIRST_MS;
    for (;;) {
        int rc = connect_once(client);
        if (rc >= 0) {
            int fd = rc;
            struct nb_error fatal = {0};
            nb_sock_tune(fd, client->config->timeout_ms);
            rc = shake_hands(client, fd, answer, &fatal);
            if (rc == 0) {
                return fd;
            }
            close(fd);
            if (fatal.code != 0) {
                return nb_fail_peer(err, fatal.code, fatal.peer, "%s", fatal.text);
            }
        }
        if (is_transient(rc)) {
            int64_t again_ns = nb_now_ns() + wait_ms * MS;
            if (again_ns >= client->deadline_ns) {
                errno = -rc;
                return nb_fail_peer(err, -ETIMEDOUT, 0,
                                    "rank %d: rank 0 at %s did not answer within %g s (%m): if this host does not "
                                    "reach it, " NB_ELSEWHERE,
                                    client->config->rank, client->address, client->config->timeout_ms / 1000.0);
            }
            rc = nb_interrupt_poll(NULL, 0, again_ns, client->config->interrupt);
        }
        if (rc < 0) {
            errno = -rc;
            return nb_fail_peer(err, rc, 0, "rank %d: rank 0 at %s: %m", client->config->rank, client->address);
        }
        wait_ms = wait_ms * 2 < RETRY_MOST_MS ? wait_ms * 2 : RETRY_MOST_MS;
    }
}

// Waits for the verdict. Rank 0 has proved the secret, and waits left_ms for the other ranks.
static int await_verdict(const struct client *client, int fd, uint32_t left_ms, unsigned char session[NB_SHA256_BYTES],
                         struct nb_error *err) {
    struct wire_join_verdict verdict;
    int64_t wait_ms = (int64_t)(left_ms < LEFT_MOST_MS ? left_ms : LEFT_MOST_MS) + VERDICT_SLACK_MS;
    int rc = nb_sock_read_all(fd, &verdict, sizeof verdict, nb_now_ns() + wait_ms * MS, client->config->interrupt);
    if (rc == -EINTR) {
        return nb_fail(err, rc, "rank %d was interrupted before all ranks had joined", client->config->rank);
    }
    if (rc == -ETIMEDOUT) {
        return nb_fail_peer(err, rc, 0, "rank 0 at %s did not report whether all ranks joined", client->address);
    }
    if (rc != 0) {
        errno = -rc;
        return nb_fail_peer(err, NB_EPEER, 0, "rank 0 at %s left before all ranks had joined: %m", client->address);
    }
    struct wire_join_verdict expected = verdict;
    nb_shake_verdict(&client->shake, client->config, &expected);
    if (!nb_bytes_equal(expected.mac, verdict.mac, sizeof verdict.mac) || verdict.code > 0) {
        return fail_wire(client, "its verdict failed authentication", err);
    }
    if (verdict.code != 0) {
        verdict.text[sizeof verdict.text - 1] = '\0';
        return nb_fail_peer(err, verdict.code, verdict.peer, "%s", verdict.text);
    }
    nb_shake_session(client->config, verdict.salt, session);
    return 0;
}

int nb_join_client(struct nb_boot *boot, const struct nb_boot_config *config, const char *address,
                   struct nb_error *err) {
    struct client client = {.config = config, .address = address};
    struct wire_join_answer answer = {0};
    int rc = nb_sock_parse(address, &client.to, err);
    if (rc != 0) {
        return rc;
    }
    client.deadline_ns = nb_now_ns() + config->timeout_ms * MS;
    int fd = reach(&client, &answer, err);
    if (fd < 0) {
        return fd;
    }
    rc = await_verdict(&client, fd, answer.left_ms, boot->session, err);
    boot->self.len = sizeof boot->self.in6;
    if (rc == 0 && getsockname(fd, &boot->self.any, &boot->self.len) != 0) {
        rc = nb_fail(err, -errno, "getsockname: %m");
    }
    int *control = rc == 0 ? malloc(sizeof *control) : NULL;
    if (control == NULL) {
        close(fd);
        return rc != 0 ? rc : nb_fail(err, -ENOMEM, "cannot allocate memory for one connection");
    }
    control[0] = fd;
    boot->control = control;
    return 0;
}
