// Shared memory rendezvous: the ranks of one host find each other and exchange their areas.
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/fdpass.h"
#include "base/fork.h"
#include "base/interrupt.h"
#include "base/sha256.h"
#include "base/wire.h"
#include "bootstrap/bootstrap.h"
#include "transport/shm.h"
#include "transport/shm_internal.h"

struct rendezvous {
    struct nb_shm *shm;
    const struct nb_boot *boot;
    int wake_fd;
    int missing;
    int incoming_count; // connections that have not identified themselves
    int incoming[NB_SHM_RANKS_MAX + NB_SHM_INCOMING];
};

static int job_rank(const struct rendezvous *m, int rank) {
    return m->shm->peers[rank].job_rank;
}

static int hello_send(const struct rendezvous *m, int fd, int to, struct nb_error *err) {
    const struct nb_shm *shm = m->shm;
    struct wire_shm_hello hello = {
        .magic = NB_WIRE_SHM_HELLO_MAGIC, .rank = shm->rank, .area_bytes = sizeof(struct nb_shm_area)};
    int fds[2] = {shm->area_fd, m->wake_fd};
    nb_boot_token(m->boot, "shared memory", job_rank(m, shm->rank), job_rank(m, to), hello.token);
    int rc = nb_fdpass_send(fd, &hello, sizeof hello, fds, 2);
    to = job_rank(m, to);
    return rc == 0 ? 0 : nb_fail_peer(err, rc, to, "cannot pass memory to rank %d: %s", to, nb_code_name(rc));
}

// Takes over a peer's area. The descriptors are closed or become the peer's.
static int hello_accept(struct nb_shm_peer *peer, const struct wire_shm_hello *hello, int fds[2],
                        struct nb_error *err) {
    size_t bytes = sizeof(struct nb_shm_area);
    int flags = fcntl(fds[1], F_GETFL);
    if (hello->area_bytes != bytes || !nb_shm_sealed(fds[0], bytes) || flags < 0 || (flags & O_NONBLOCK) == 0) {
        return nb_fail_peer(err, NB_EWIRE, peer->job_rank, "rank %d passed invalid shared memory", peer->job_rank);
    }
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0);
    if (base == MAP_FAILED) {
        return nb_fail_peer(err, -errno, peer->job_rank, "cannot map the memory of rank %d: %m", peer->job_rank);
    }
    (void)madvise(base, bytes, MADV_DONTFORK);
    peer->area = base;
    peer->wake_fd = fds[1];
    fds[1] = -1;
    return 0;
}

// True if a hello is that of the rank that is expected, or of one that may come, and proves the job's secret.
static bool hello_known(const struct rendezvous *m, const struct wire_shm_hello *hello, int expected) {
    const struct nb_shm *shm = m->shm;
    unsigned char token[NB_TOKEN_BYTES];
    if (hello->magic != NB_WIRE_SHM_HELLO_MAGIC || hello->rank < 0 || hello->rank >= shm->size ||
        !(expected >= 0 ? hello->rank == expected : hello->rank > shm->rank) || shm->peers[hello->rank].area != NULL) {
        return false;
    }
    nb_boot_token(m->boot, "shared memory", job_rank(m, hello->rank), job_rank(m, shm->rank), token);
    return nb_bytes_equal(token, hello->token, sizeof token);
}

// Reads the hello of a connection. `expected`: the rank of the group to which this rank connected, or -1 for an
// accepted connection, which is from any rank above this one. Returns the rank, -EAGAIN, -EPERM for a process outside the job, or a
// failure with its text.
static int hello_receive(const struct rendezvous *m, int fd, int expected, struct nb_error *err) {
    struct nb_shm *shm = m->shm;
    struct wire_shm_hello hello;
    int fds[2];
    int whose = expected < 0 ? NB_NO_PEER : job_rank(m, expected);
    int rc = nb_fdpass_receive(fd, &hello, sizeof hello, fds, 2);
    if (rc == -EAGAIN) {
        return rc;
    }
    if (rc == -EMFILE) {
        return nb_fail(err, rc, "no free descriptor for the memory of another rank (ulimit -n)");
    }
    if (rc < 0) {
        return expected < 0
                   ? -EPERM
                   : nb_fail_peer(err, rc, whose, "rank %d did not pass its memory (%s)", whose, nb_code_name(rc));
    }
    bool known = hello_known(m, &hello, expected);
    rc = known ? hello_accept(&shm->peers[hello.rank], &hello, fds, err) : -EPERM;
    nb_shm_fd_close(&fds[0]);
    nb_shm_fd_close(&fds[1]);
    if (rc == -EPERM && expected >= 0) {
        return nb_fail_peer(err, rc, whose, "the socket of rank %d failed authentication", whose);
    }
    return rc < 0 ? rc : hello.rank;
}

static int incoming_accept(struct rendezvous *m, struct nb_error *err) {
    const int room = (int)(sizeof m->incoming / sizeof m->incoming[0]);
    for (;;) {
        int fd = nb_fdpass_accept(m->shm->listener);
        if (fd == -EAGAIN) {
            return 0;
        }
        if (fd == -EPERM || fd == -ECONNABORTED) {
            continue;
        }
        if (fd < 0) {
            return nb_fail(err, fd, "cannot accept ranks of this host: %s", nb_code_name(fd));
        }
        if (m->incoming_count == room) {
            nb_fork_close(fd);
            continue;
        }
        m->incoming[m->incoming_count++] = fd;
    }
}

static int incoming_receive(struct rendezvous *m, struct nb_error *err) {
    for (int i = 0; i < m->incoming_count;) {
        int fd = m->incoming[i];
        int rank = hello_receive(m, fd, -1, err);
        if (rank == -EAGAIN) {
            i++;
            continue;
        }
        m->incoming[i] = m->incoming[--m->incoming_count];
        if (rank < 0) {
            nb_fork_close(fd);
            if (rank != -EPERM) {
                return rank;
            }
            continue;
        }
        m->shm->peers[rank].watch.fd = fd;
        m->missing--;
        int rc = hello_send(m, fd, rank, err);
        if (rc < 0) {
            return rc;
        }
    }
    return 0;
}

// Reads the answers of the ranks to which this rank connected.
static int answers_receive(struct rendezvous *m, struct nb_error *err) {
    struct nb_shm *shm = m->shm;
    for (int r = 0; r < shm->rank; r++) {
        if (shm->peers[r].area != NULL) {
            continue;
        }
        int rc = hello_receive(m, shm->peers[r].watch.fd, r, err);
        if (rc < 0 && rc != -EAGAIN) {
            return rc;
        }
        m->missing -= rc >= 0;
    }
    return 0;
}

static int rendezvous_wait(const struct rendezvous *m, int64_t deadline_ns, struct nb_error *err) {
    struct pollfd polls[2 * NB_SHM_RANKS_MAX + NB_SHM_INCOMING + 1];
    const struct nb_shm *shm = m->shm;
    nfds_t n = 0;
    polls[n++] = (struct pollfd){.fd = shm->listener, .events = POLLIN};
    for (int i = 0; i < m->incoming_count; i++) {
        polls[n++] = (struct pollfd){.fd = m->incoming[i], .events = POLLIN};
    }
    for (int r = 0; r < shm->rank; r++) {
        if (shm->peers[r].area == NULL) {
            polls[n++] = (struct pollfd){.fd = shm->peers[r].watch.fd, .events = POLLIN};
        }
    }
    int ready = nb_interrupt_poll(polls, n, deadline_ns, m->boot->interrupt);
    if (ready < 0) {
        return nb_fail(err, ready, "cannot wait for ranks of this host: %s", nb_code_name(ready));
    }
    return 0;
}

static int connect_all(struct rendezvous *m, int64_t deadline_ns, struct nb_error *err) {
    struct nb_shm *shm = m->shm;
    for (;;) {
        int rc = incoming_accept(m, err);
        rc = rc < 0 ? rc : incoming_receive(m, err);
        rc = rc < 0 ? rc : answers_receive(m, err);
        if (rc < 0 || m->missing == 0) {
            return rc;
        }
        if (nb_now_ns() >= deadline_ns) {
            int r = 0;
            while (r == shm->rank || shm->peers[r].area != NULL) {
                r++;
            }
            r = job_rank(m, r);
            return nb_fail_peer(err, NB_ETIMEOUT, r, "rank %d did not pass its memory in time", r);
        }
        rc = rendezvous_wait(m, deadline_ns, err);
        if (rc < 0) {
            return rc;
        }
    }
}

int nb_shm_rendezvous(struct nb_shm *shm, const char (*names)[NB_FDPASS_NAME], const struct nb_boot *boot, int wake_fd,
                      int64_t deadline_ns, struct nb_error *err) {
    struct rendezvous m = {.shm = shm, .boot = boot, .wake_fd = wake_fd, .missing = shm->size - 1};
    int rc = 0;
    for (int r = 0; r < shm->rank && rc == 0; r++) {
        int fd = nb_fdpass_connect(names[r], err);
        shm->peers[r].watch.fd = fd < 0 ? -1 : fd;
        rc = fd < 0 ? fd : hello_send(&m, fd, r, err);
    }
    if (rc == 0) {
        rc = connect_all(&m, deadline_ns, err);
    }
    for (int i = 0; i < m.incoming_count; i++) {
        nb_fork_close(m.incoming[i]);
    }
    nb_shm_fd_close(&shm->listener);
    return rc;
}
