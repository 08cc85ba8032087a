// How do the ranks of one host find each other, and pass each other their areas?
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/fork.h"
#include "base/handover.h"
#include "base/sha256.h"
#include "bootstrap/bootstrap.h"
#include "transport/shm.h"
#include "transport/shm_internal.h"

enum { HELLO_MAGIC = 0x4e425348 };

struct hello { // with the area and what wakes its rank
    uint32_t magic;
    int32_t rank; // in the group
    uint64_t area_bytes;
    unsigned char token[NB_TOKEN_BYTES];
};

struct meeting {
    struct nb_shm *shm;
    const struct nb_boot *boot;
    int wake_fd;
    int missing;
    int stranger_count; // connections that have not said who they are
    int strangers[NB_SHM_RANKS_MAX + NB_SHM_STRANGERS];
};

static int job_rank(const struct meeting *m, int rank) {
    return m->shm->peers[rank].job_rank;
}

static int hello_say(const struct meeting *m, int fd, int to, struct nb_error *err) {
    const struct nb_shm *shm = m->shm;
    struct hello hello = {.magic = HELLO_MAGIC, .rank = shm->rank, .area_bytes = sizeof(struct nb_shm_area)};
    int fds[2] = {shm->area_fd, m->wake_fd};
    nb_boot_token(m->boot, "shared memory", job_rank(m, shm->rank), job_rank(m, to), hello.token);
    int rc = nb_handover_send(fd, &hello, sizeof hello, fds, 2);
    to = job_rank(m, to);
    return rc == 0 ? 0 : nb_fail_peer(err, rc, to, "passing memory to rank %d: %s", to, nb_code_name(rc));
}

// Takes a peer's area over. The descriptors are closed, or the peer's.
static int hello_accept(struct nb_shm_peer *peer, const struct hello *hello, int fds[2], struct nb_error *err) {
    size_t bytes = sizeof(struct nb_shm_area);
    int flags = fcntl(fds[1], F_GETFL);
    if (hello->area_bytes != bytes || !nb_shm_sealed(fds[0], bytes) || flags < 0 || (flags & O_NONBLOCK) == 0) {
        return nb_fail_peer(err, NB_EWIRE, peer->job_rank, "rank %d passed memory that is not what it should be",
                            peer->job_rank);
    }
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0);
    if (base == MAP_FAILED) {
        return nb_fail_peer(err, -errno, peer->job_rank, "mapping the memory of rank %d: %m", peer->job_rank);
    }
    (void)madvise(base, bytes, MADV_DONTFORK);
    peer->area = base;
    peer->wake_fd = fds[1];
    fds[1] = -1;
    return 0;
}

// Reads who is at a connection. `expected`: the rank of the group that it was made to, or -1: it came by itself, from any
// rank above this one. Returns the rank, -EAGAIN, -EPERM for somebody who does not belong here, or a failure with its text.
static int hello_hear(const struct meeting *m, int fd, int expected, struct nb_error *err) {
    struct nb_shm *shm = m->shm;
    struct hello hello;
    unsigned char token[NB_TOKEN_BYTES];
    int fds[2];
    int whose = expected < 0 ? NB_NO_PEER : job_rank(m, expected);
    int rc = nb_handover_receive(fd, &hello, sizeof hello, fds, 2);
    if (rc == -EAGAIN) {
        return rc;
    }
    if (rc < 0) {
        return expected < 0
                   ? -EPERM
                   : nb_fail_peer(err, rc, whose, "rank %d did not pass its memory (%s)", whose, nb_code_name(rc));
    }
    bool known = hello.magic == HELLO_MAGIC && hello.rank >= 0 && hello.rank < shm->size &&
                 (expected >= 0 ? hello.rank == expected : hello.rank > shm->rank) &&
                 shm->peers[hello.rank].area == NULL;
    if (known) {
        nb_boot_token(m->boot, "shared memory", job_rank(m, hello.rank), job_rank(m, shm->rank), token);
        known = nb_bytes_equal(token, hello.token, sizeof token);
    }
    rc = known ? hello_accept(&shm->peers[hello.rank], &hello, fds, err) : -EPERM;
    nb_shm_fd_close(&fds[0]);
    nb_shm_fd_close(&fds[1]);
    if (rc == -EPERM && expected >= 0) {
        return nb_fail_peer(err, rc, whose, "the socket of rank %d is somebody else's", whose);
    }
    return rc < 0 ? rc : hello.rank;
}

static int strangers_accept(struct meeting *m, struct nb_error *err) {
    const int room = (int)(sizeof m->strangers / sizeof m->strangers[0]);
    for (;;) {
        int fd = nb_handover_accept(m->shm->listener);
        if (fd == -EAGAIN) {
            return 0;
        }
        if (fd == -EPERM || fd == -ECONNABORTED) {
            continue;
        }
        if (fd < 0) {
            return nb_fail(err, fd, "accepting ranks of this host: %s", nb_code_name(fd));
        }
        if (m->stranger_count == room) {
            nb_fork_close(fd);
            continue;
        }
        m->strangers[m->stranger_count++] = fd;
    }
}

static int strangers_hear(struct meeting *m, struct nb_error *err) {
    for (int i = 0; i < m->stranger_count;) {
        int fd = m->strangers[i];
        int rank = hello_hear(m, fd, -1, err);
        if (rank == -EAGAIN) {
            i++;
            continue;
        }
        m->strangers[i] = m->strangers[--m->stranger_count];
        if (rank < 0) {
            nb_fork_close(fd);
            if (rank != -EPERM) {
                return rank;
            }
            continue;
        }
        m->shm->peers[rank].watch.fd = fd;
        m->missing--;
        int rc = hello_say(m, fd, rank, err);
        if (rc < 0) {
            return rc;
        }
    }
    return 0;
}

// What the ranks that this one went to have answered.
static int answers_hear(struct meeting *m, struct nb_error *err) {
    struct nb_shm *shm = m->shm;
    for (int r = 0; r < shm->rank; r++) {
        if (shm->peers[r].area != NULL) {
            continue;
        }
        int rc = hello_hear(m, shm->peers[r].watch.fd, r, err);
        if (rc < 0 && rc != -EAGAIN) {
            return rc;
        }
        m->missing -= rc >= 0;
    }
    return 0;
}

static void meeting_wait(const struct meeting *m, int64_t deadline_ns) {
    struct pollfd polls[2 * NB_SHM_RANKS_MAX + NB_SHM_STRANGERS + 1];
    const struct nb_shm *shm = m->shm;
    nfds_t n = 0;
    polls[n++] = (struct pollfd){.fd = shm->listener, .events = POLLIN};
    for (int i = 0; i < m->stranger_count; i++) {
        polls[n++] = (struct pollfd){.fd = m->strangers[i], .events = POLLIN};
    }
    for (int r = 0; r < shm->rank; r++) {
        if (shm->peers[r].area == NULL) {
            polls[n++] = (struct pollfd){.fd = shm->peers[r].watch.fd, .events = POLLIN};
        }
    }
    int64_t left_ms = (deadline_ns - nb_now_ns()) / 1000000;
    (void)poll(polls, n, left_ms > 0 ? (int)left_ms + 1 : 0);
}

static int meet_all(struct meeting *m, int64_t deadline_ns, struct nb_error *err) {
    struct nb_shm *shm = m->shm;
    for (;;) {
        int rc = strangers_accept(m, err);
        rc = rc < 0 ? rc : strangers_hear(m, err);
        rc = rc < 0 ? rc : answers_hear(m, err);
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
        meeting_wait(m, deadline_ns);
    }
}

int nb_shm_meet(struct nb_shm *shm, const char (*names)[NB_HANDOVER_NAME], const struct nb_boot *boot, int wake_fd,
                int64_t deadline_ns, struct nb_error *err) {
    struct meeting m = {.shm = shm, .boot = boot, .wake_fd = wake_fd, .missing = shm->size - 1};
    int rc = 0;
    for (int r = 0; r < shm->rank && rc == 0; r++) {
        int fd = nb_handover_connect(names[r], err);
        shm->peers[r].watch.fd = fd < 0 ? -1 : fd;
        rc = fd < 0 ? fd : hello_say(&m, fd, r, err);
    }
    if (rc == 0) {
        rc = meet_all(&m, deadline_ns, err);
    }
    for (int i = 0; i < m.stranger_count; i++) {
        nb_fork_close(m.strangers[i]);
    }
    nb_shm_fd_close(&shm->listener);
    return rc;
}
