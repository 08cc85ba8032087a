// Descriptors pass between processes of one user; connections of other processes are dropped; revoked memory is no
// longer written to.
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
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
    CHECK(listener >= 0 && second >= 0 && strcmp(name, other) != 0, "two names: %s, %s: %s", name, other, err.text);
    close(second);
    CHECK(nb_fdpass_connect(other, &err) == -ECONNREFUSED && strstr(err.text, other) != NULL, "text: %s", err.text);
    CHECK(nb_fdpass_accept(listener) == -EAGAIN, "no connection waits");
    int there = nb_fdpass_connect(name, &err);
    int here = nb_fdpass_accept(listener);
    CHECK(there >= 0 && here >= 0, "connect: %d, %d", there, here);
    int before = open_fds();
    int pipes[2];
    int got[2];
    uint32_t message = 0;
    CHECK(pipe(pipes) == 0, "pipe: %m");
    CHECK(nb_fdpass_receive(here, &message, sizeof message, got, 2) == -EAGAIN, "no message has arrived");
    CHECK(nb_fdpass_send(there, &(uint32_t){77}, sizeof message, pipes, 2) == 0, "send: %m");
    CHECK(nb_fdpass_receive(here, &message, sizeof message, got, 2) == 0 && message == 77, "%u", message);
    char byte = 0;
    CHECK(write(got[1], "x", 1) == 1 && read(pipes[0], &byte, 1) == 1 && byte == 'x', "the pipe is the same");
    CHECK((fcntl(got[0], F_GETFD) & FD_CLOEXEC) != 0, "closed on exec");
    close(got[0]);
    close(got[1]);
    // Not what was expected: nothing of it stays open.
    CHECK(nb_fdpass_send(there, "short", 2, pipes, 2) == 0, "send: %m");
    CHECK(nb_fdpass_receive(here, &message, sizeof message, got, 2) == NB_EWIRE, "too short");
    CHECK(nb_fdpass_send(there, "too long a message", 18, pipes, 1) == 0, "send: %m");
    CHECK(nb_fdpass_receive(here, &message, sizeof message, got, 1) == NB_EWIRE, "too long");
    CHECK(nb_fdpass_send(there, &message, sizeof message, pipes, 1) == 0, "send: %m");
    CHECK(nb_fdpass_receive(here, &message, sizeof message, got, 2) == NB_EWIRE, "one descriptor instead of two");
    close(pipes[0]);
    close(pipes[1]);
    CHECK(open_fds() == before, "%d descriptors, %d before", open_fds(), before);
    close(there);
    CHECK(nb_fdpass_receive(here, &message, sizeof message, got, 2) == -ECONNRESET, "the end");
    close(here);
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

static void *member_meet(void *arg) {
    struct member *m = arg;
    m->rc = nb_shm_rendezvous(m->shm, (const char (*)[NB_FDPASS_NAME])m->names, &m->boot, m->wake_fd,
                              test_deadline_ns(), &m->err);
    return NULL;
}

static void members_open(struct member *members, char (*names)[NB_FDPASS_NAME]) {
    for (int r = 0; r < RANKS; r++) {
        struct member *m = &members[r];
        *m = (struct member){.rank = r, .names = names, .wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)};
        m->boot = (struct nb_boot){.rank = r, .size = RANKS, .session = "the same for all"};
        static const int all[RANKS] = {0, 1, 2};
        CHECK(nb_shm_open(&m->shm, RANKS, &m->err) == 0, "rank %d: %s", r, m->err.text);
        nb_shm_group(m->shm, all, RANKS, r);
        memcpy(names[r], m->shm->name, NB_FDPASS_NAME);
    }
}

static void members_meet(struct member *members) {
    for (int r = 0; r < RANKS; r++) {
        CHECK(pthread_create(&members[r].thread, NULL, member_meet, &members[r]) == 0, "thread");
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

static bool woken(const struct member *m) {
    uint64_t count;
    return read(m->wake_fd, &count, sizeof count) == (ssize_t)sizeof count;
}

static void *keep_off(void *arg) {
    struct member *m = arg;
    nb_shm_revoke(m->shm, test_deadline_ns());
    return NULL;
}

// Between ranks that have met.
static void test_keeping_off(struct member *members) {
    struct nb_shm *first = members[0].shm;
    struct nb_shm *last = members[2].shm;
    nb_shm_wake(first);
    CHECK(!woken(&members[2]), "no rank sleeps");
    nb_shm_mark_asleep(last);
    nb_shm_wake(first);
    nb_shm_wake(first);
    CHECK(woken(&members[2]) && !woken(&members[2]) && !woken(&members[1]), "a sleeping rank is woken once");
    CHECK(nb_shm_write_begin(first), "no rank has revoked it");
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, keep_off, &members[2]) == 0, "thread");
    while (atomic_load(&first->peers[2].area->revoked) == 0) {
        (void)poll(NULL, 0, 1);
    }
    // Whoever writes may still write: the other waits for that.
    CHECK(atomic_load(&first->peers[0].area->busy) == 1 && pthread_tryjoin_np(thread, NULL) == EBUSY,
          "it did not wait");
    nb_shm_write_end(first);
    CHECK(pthread_join(thread, NULL) == 0, "join");
    CHECK(!nb_shm_write_begin(first) && atomic_load(&first->peers[0].area->busy) == 0, "from now on it is kept off");
}

static void test_meeting(void) {
    struct member members[RANKS];
    char names[RANKS][NB_FDPASS_NAME];
    struct nb_error err = {0};
    int before = open_fds();
    members_open(members, names);
    // Somebody else comes first and says nothing, or what makes no sense.
    int silent = nb_fdpass_connect(names[0], &err);
    int rude = nb_fdpass_connect(names[0], &err);
    CHECK(silent >= 0 && rude >= 0 && nb_fdpass_send(rude, "hello", 6, &rude, 1) == 0, "other processes: %s", err.text);
    members_meet(members);
    for (int r = 0; r < RANKS; r++) {
        CHECK(members[r].rc == 0, "rank %d: %s", r, members[r].err.text);
        for (int peer = 0; peer < RANKS; peer++) {
            CHECK(members[r].shm->peers[peer].area != NULL, "rank %d has not mapped rank %d", r, peer);
        }
    }
    atomic_store(&members[1].shm->peers[1].area->ready, 5);
    CHECK(atomic_load(&members[2].shm->peers[1].area->ready) == 5, "it is the same memory");
    test_keeping_off(members);
    members_close(members);
    close(silent);
    close(rude);
    CHECK(open_fds() == before, "%d descriptors, %d before", open_fds(), before);
}

// A process that does not know the session has taken rank 2's place.
static void test_impostor(void) {
    struct member members[RANKS];
    char names[RANKS][NB_FDPASS_NAME];
    members_open(members, names);
    members[2].boot.session[0] ^= 1;
    nb_shm_close(members[1].shm); // nor is rank 1 there
    members[1].shm = NULL;
    CHECK(pthread_create(&members[2].thread, NULL, member_meet, &members[2]) == 0, "thread");
    struct nb_error err = {0};
    int64_t soon = nb_now_ns() + 300 * (int64_t)1000000;
    int rc = nb_shm_rendezvous(members[0].shm, (const char (*)[NB_FDPASS_NAME])names, &members[0].boot,
                               members[0].wake_fd, soon, &err);
    CHECK(rc == NB_ETIMEOUT && err.peer == 1 && members[0].shm->peers[2].area == NULL, "%d: %s", rc, err.text);
    CHECK(pthread_join(members[2].thread, NULL) == 0, "join");
    CHECK(members[2].rc < 0, "rank 2 was taken for one of them");
    members_close(members);
}

int main(void) {
    test_descriptors();
    test_meeting();
    test_impostor();
    return 0;
}
