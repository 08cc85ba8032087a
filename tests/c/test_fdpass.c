// Descriptor passing between processes of one user, and the rendezvous of shared memory. Connections of other processes
// are dropped, and no rank writes to revoked memory.
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fdpass.h"
#include "check.h"
#include "transport/shm.h"

enum { RANKS = 3, LIMIT_MS = 60000 };

static int64_t test_deadline_ns(void) {
    return nb_now_ns() + LIMIT_MS * (int64_t)1000000;
}

static int open_fds(void) {
    int count = 0;
    for (int fd = 0; fd < 256; fd++) {
        count += fcntl(fd, F_GETFD) >= 0;
    }
    return count;
}

static void test_descriptors(void) {
    struct nb_error err = {0};
    char name[NB_FDPASS_NAME];
    char other[NB_FDPASS_NAME];
    int listener = nb_fdpass_listen(name, 4, &err);
    int second = nb_fdpass_listen(other, 4, &err);
    CHECK(listener >= 0 && second >= 0 && strcmp(name, other) != 0, "listen: %s, %s: %s", name, other, err.text);
    close(second);
    CHECK(nb_fdpass_connect(other, &err) == -ECONNREFUSED && strstr(err.text, other) != NULL, "text: %s", err.text);
    CHECK(nb_fdpass_accept(listener) == -EAGAIN, "accepted without a connection");
    int sender = nb_fdpass_connect(name, &err);
    int receiver = nb_fdpass_accept(listener);
    CHECK(sender >= 0 && receiver >= 0, "connect: %d, %d", sender, receiver);
    int before = open_fds();
    int pipes[2];
    int got[2];
    uint32_t message = 0;
    CHECK(pipe(pipes) == 0, "pipe: %m");
    CHECK(nb_fdpass_receive(receiver, &message, sizeof message, got, 2) == -EAGAIN, "received without a message");
    CHECK(nb_fdpass_send(sender, &(uint32_t){77}, sizeof message, pipes, 2) == 0, "send: %m");
    CHECK(nb_fdpass_receive(receiver, &message, sizeof message, got, 2) == 0 && message == 77, "%u", message);
    char byte = 0;
    CHECK(write(got[1], "x", 1) == 1 && read(pipes[0], &byte, 1) == 1 && byte == 'x',
          "the received pipe is not the one that was sent");
    CHECK((fcntl(got[0], F_GETFD) & FD_CLOEXEC) != 0, "FD_CLOEXEC is not set");
    close(got[0]);
    close(got[1]);
    // Unexpected messages are refused, and their descriptors are closed.
    CHECK(nb_fdpass_send(sender, "short", 2, pipes, 2) == 0, "send: %m");
    CHECK(nb_fdpass_receive(receiver, &message, sizeof message, got, 2) == NB_EWIRE, "a short message is accepted");
    CHECK(nb_fdpass_send(sender, "too long a message", 18, pipes, 1) == 0, "send: %m");
    CHECK(nb_fdpass_receive(receiver, &message, sizeof message, got, 1) == NB_EWIRE, "a long message is accepted");
    CHECK(nb_fdpass_send(sender, &message, sizeof message, pipes, 1) == 0, "send: %m");
    CHECK(nb_fdpass_receive(receiver, &message, sizeof message, got, 2) == NB_EWIRE,
          "one descriptor instead of two is accepted");
    // Where no descriptor is free, the sender is not to blame.
    struct rlimit usual;
    int first_free = dup(pipes[0]);
    close(first_free);
    CHECK(getrlimit(RLIMIT_NOFILE, &usual) == 0, "getrlimit: %m");
    CHECK(nb_fdpass_send(sender, &message, sizeof message, pipes, 2) == 0, "send: %m");
    CHECK(setrlimit(RLIMIT_NOFILE, &(struct rlimit){(rlim_t)first_free + 1, usual.rlim_max}) == 0, "setrlimit: %m");
    int rc = nb_fdpass_receive(receiver, &message, sizeof message, got, 2);
    CHECK(setrlimit(RLIMIT_NOFILE, &usual) == 0, "setrlimit: %m");
    CHECK(rc == -EMFILE, "%d where one descriptor of two was free", rc);
    close(pipes[0]);
    close(pipes[1]);
    CHECK(open_fds() == before, "%d descriptors, %d before", open_fds(), before);
    close(sender);
    CHECK(nb_fdpass_receive(receiver, &message, sizeof message, got, 2) == -ECONNRESET,
          "the closed connection is not reported");
    close(receiver);
    close(listener);
}

struct member {
    int rank;
    int wake_fd;
    int rc;
    struct nb_shm *shm;
    struct nb_boot boot;
    struct nb_error err;
    char (*names)[NB_FDPASS_NAME];
    pthread_t thread;
};

static void *member_rendezvous(void *arg) {
    struct member *m = arg;
    m->rc = nb_shm_rendezvous(m->shm, (const char (*)[NB_FDPASS_NAME])m->names, &m->boot, m->wake_fd,
                              test_deadline_ns(), &m->err);
    return NULL;
}

static void members_open(struct member *members, char (*names)[NB_FDPASS_NAME]) {
    for (int r = 0; r < RANKS; r++) {
        struct member *m = &members[r];
        *m = (struct member){.rank = r, .names = names, .wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)};
        m->boot = (struct nb_boot){.rank = r, .size = RANKS, .session = "one session"};
        static const int all[RANKS] = {0, 1, 2};
        CHECK(nb_shm_open(&m->shm, RANKS, &m->err) == 0, "rank %d: %s", r, m->err.text);
        nb_shm_group(m->shm, all, RANKS, r);
        memcpy(names[r], m->shm->name, NB_FDPASS_NAME);
    }
}

static void members_rendezvous(struct member *members) {
    for (int r = 0; r < RANKS; r++) {
        CHECK(pthread_create(&members[r].thread, NULL, member_rendezvous, &members[r]) == 0, "thread");
    }
    for (int r = 0; r < RANKS; r++) {
        CHECK(pthread_join(members[r].thread, NULL) == 0, "join");
    }
}

static void members_close(struct member *members) {
    for (int r = 0; r < RANKS; r++) {
        nb_shm_close(members[r].shm);
        close(members[r].wake_fd);
    }
}

static bool was_woken(const struct member *m) {
    uint64_t count;
    return read(m->wake_fd, &count, sizeof count) == (ssize_t)sizeof count;
}

static void *revoke_access(void *arg) {
    struct member *m = arg;
    nb_shm_revoke(m->shm, test_deadline_ns());
    return NULL;
}

// Wakes and revocation between ranks after their rendezvous.
static void check_wake_and_revoke(struct member *members) {
    struct nb_shm *first = members[0].shm;
    struct nb_shm *last = members[2].shm;
    int revoker = -1;
    nb_shm_wake(first);
    CHECK(!was_woken(&members[2]), "a rank that does not sleep is woken");
    nb_shm_mark_asleep(last);
    nb_shm_wake(first);
    nb_shm_wake(first);
    CHECK(was_woken(&members[2]) && !was_woken(&members[2]) && !was_woken(&members[1]),
          "a sleeping rank is not woken exactly once");
    CHECK(nb_shm_write_begin(first, &revoker), "write access is refused before it is revoked");
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, revoke_access, &members[2]) == 0, "thread");
    while (atomic_load(&first->peers[2].area->revoked) == 0) {
        (void)poll(NULL, 0, 1);
    }
    // A write in progress continues, and the revocation waits for it.
    CHECK(atomic_load(&first->peers[0].area->busy) == 1 && pthread_tryjoin_np(thread, NULL) == EBUSY,
          "the revocation does not wait for the writer");
    nb_shm_write_end(first);
    CHECK(pthread_join(thread, NULL) == 0, "join");
    CHECK(!nb_shm_write_begin(first, &revoker) && revoker == 2 && atomic_load(&first->peers[0].area->busy) == 0,
          "write access is granted after it was revoked");
}

static void test_rendezvous(void) {
    struct member members[RANKS];
    char names[RANKS][NB_FDPASS_NAME];
    struct nb_error err = {0};
    int before = open_fds();
    members_open(members, names);
    // Other processes connect first; one sends nothing, the other an invalid message.
    int silent = nb_fdpass_connect(names[0], &err);
    int garbage = nb_fdpass_connect(names[0], &err);
    CHECK(silent >= 0 && garbage >= 0 && nb_fdpass_send(garbage, "hello", 6, &garbage, 1) == 0, "other processes: %s",
          err.text);
    members_rendezvous(members);
    for (int r = 0; r < RANKS; r++) {
        CHECK(members[r].rc == 0, "rank %d: %s", r, members[r].err.text);
        for (int peer = 0; peer < RANKS; peer++) {
            CHECK(members[r].shm->peers[peer].area != NULL, "rank %d has not mapped rank %d", r, peer);
        }
    }
    atomic_store(&members[1].shm->peers[1].area->ready, 5);
    CHECK(atomic_load(&members[2].shm->peers[1].area->ready) == 5, "the ranks have not mapped the same memory");
    check_wake_and_revoke(members);
    members_close(members);
    close(silent);
    close(garbage);
    CHECK(open_fds() == before, "%d descriptors, %d before", open_fds(), before);
}

// Rank 2 is replaced by a process that does not know the session.
static void test_impostor(void) {
    struct member members[RANKS];
    char names[RANKS][NB_FDPASS_NAME];
    members_open(members, names);
    members[2].boot.session[0] ^= 1;
    nb_shm_close(members[1].shm); // rank 1 is missing, too
    members[1].shm = NULL;
    CHECK(pthread_create(&members[2].thread, NULL, member_rendezvous, &members[2]) == 0, "thread");
    struct nb_error err = {0};
    int64_t soon = nb_now_ns() + 300 * (int64_t)1000000;
    int rc = nb_shm_rendezvous(members[0].shm, (const char (*)[NB_FDPASS_NAME])names, &members[0].boot,
                               members[0].wake_fd, soon, &err);
    CHECK(rc == NB_ETIMEOUT && err.peer == 1 && members[0].shm->peers[2].area == NULL, "%d: %s", rc, err.text);
    CHECK(pthread_join(members[2].thread, NULL) == 0, "join");
    CHECK(members[2].rc < 0, "the impostor was accepted as rank 2");
    members_close(members);
}

int main(void) {
    test_descriptors();
    test_rendezvous();
    test_impostor();
    return 0;
}
