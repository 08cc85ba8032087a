// Ranks (as threads) join whatever other processes send to rank 0's port, and every rank learns why a join failed.
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "boot.h"
#include "bootstrap/bootstrap.h"
#include "bootstrap/internal.h"
#include "check.h"

static const unsigned char other_secret[] = "another sixteen bytes";

// The door sticks: accept4, in libc's place, fails so many times with this errno, and counts its calls.
static _Atomic int door_errno;
static _Atomic int door_fails;
static _Atomic int door_calls;
static _Atomic int door_admitted; // whom it let in

int door_accept(int fd, void *addr, void *len, int flags) __asm__("accept4");

int door_accept(int fd, void *addr, void *len, int flags) {
    atomic_fetch_add(&door_calls, 1);
    if (atomic_load(&door_fails) > 0) {
        atomic_fetch_sub(&door_fails, 1);
        errno = atomic_load(&door_errno);
        return -1;
    }
    int fd_in = (int)syscall(SYS_accept4, fd, addr, len, flags);
    atomic_fetch_add(&door_admitted, fd_in >= 0);
    return fd_in;
}

// No descriptor is closed twice: the second time it may be another's. The thread sanitizer has to see close() itself.
#ifndef __SANITIZE_THREAD__
int close_once(int fd) __asm__("close");

int close_once(int fd) {
    int rc = (int)syscall(SYS_close, fd);
    CHECK(rc == 0 || fd < 0, "descriptor %d is closed twice: %m", fd);
    return rc;
}
#endif

// A socket that poll reported as readable may have no data: recv, in libc's place, fails with EAGAIN or EINTR now and then.
static _Atomic int vain_reads;

ssize_t recv_in_vain(int fd, void *data, size_t bytes, int flags) __asm__("recv");

ssize_t recv_in_vain(int fd, void *data, size_t bytes, int flags) {
    int left = atomic_load(&vain_reads);
    if (left > 0 && left % 3 != 0) {
        atomic_fetch_sub(&vain_reads, 1);
        errno = left % 3 == 1 ? EAGAIN : EINTR;
        return -1;
    }
    if (left > 0) {
        atomic_fetch_sub(&vain_reads, 1);
    }
    return syscall(SYS_recvfrom, fd, data, bytes, flags, NULL, NULL);
}

// Signals may interrupt a wait: poll, in libc's place, fails with EINTR this many times.
static _Thread_local int broken_waits;

int poll_broken(struct pollfd *polled, nfds_t count, int timeout_ms) __asm__("poll");

int poll_broken(struct pollfd *polled, nfds_t count, int timeout_ms) {
    struct timespec left = {.tv_sec = timeout_ms / 1000, .tv_nsec = timeout_ms % 1000 * 1000000L};
    if (broken_waits > 0) {
        broken_waits--;
        errno = EINTR;
        return -1;
    }
    return (int)syscall(SYS_ppoll, polled, count, timeout_ms < 0 ? NULL : &left, NULL, 0);
}

static void door_sticks(int code, int times) {
    atomic_store(&door_errno, code);
    atomic_store(&door_fails, times);
    atomic_store(&door_calls, 0);
}

static void *barrier(void *arg) {
    struct rank *rank = arg;
    rank->rc = nb_boot_barrier(&rank->boot, &rank->err);
    return NULL;
}

// Joined connections carry bytes.
static void check_barrier(struct job *job) {
    run_all_but(job, barrier, -1);
    for (int i = 0; i < job->size; i++) {
        CHECK(job->ranks[i].rc == 0, "rank %d: %s", i, job->ranks[i].err.text);
    }
}

static int knock(const struct job *job) {
    int fd = nb_sock_connect(&job->listener.addr, NULL, NULL, NULL);
    CHECK(fd >= 0, "connect: %m");
    struct pollfd poller = {.fd = fd, .events = POLLOUT};
    CHECK(poll(&poller, 1, LIMIT_MS) == 1 && nb_sock_connected(fd) == 0, "connect");
    return fd;
}

static void say(int fd, const void *what, size_t bytes) {
    CHECK(nb_sock_write_all(fd, what, bytes, test_deadline_ns()) == 0, "write to rank 0: %m");
}

static void check_hung_up(int fd) {
    char byte;
    CHECK(nb_sock_read_all(fd, &byte, 1, test_deadline_ns()) == -ECONNRESET, "rank 0 hangs up");
    close(fd);
}

// More of them than rank 0 listens to at a time, each in the way before the first rank comes.
static void test_strangers(void) {
    enum { SILENT = 20 };
    static const char garbage[] = "GET / HTTP/1.1\r\nHost: rank0\r\n\r\n";
    struct job job;
    int silent[SILENT];
    job_open(&job, 2);
    int loud = knock(&job);
    say(loud, garbage, sizeof garbage - 1);
    int polite = knock(&job);
    say(polite, NB_WIRE_JOIN_MAGIC, NB_WIRE_JOIN_MAGIC_BYTES);
    close(knock(&job));
    for (int i = 0; i < SILENT; i++) {
        silent[i] = knock(&job);
    }
    run_all_but(&job, join, -1);
    check_joined(&job);
    check_hung_up(loud);
    check_hung_up(polite);
    check_hung_up(silent[0]);
    for (int i = 1; i < SILENT; i++) {
        close(silent[i]);
    }
    check_barrier(&job);
    job_close(&job);
}

static void test_wrong_secret(void) {
    struct job job;
    job_open(&job, 2);
    struct rank stranger = job.ranks[1];
    stranger.config.secret = other_secret;
    start(&job.ranks[0], join);
    start(&stranger, join);
    finish(&stranger);
    CHECK(stranger.rc == NB_EAUTH && stranger.err.peer == 0, "%d %s", stranger.rc, stranger.err.text);
    CHECK(strstr(stranger.err.text, "NETBOTTLENECK_SECRET") != NULL, "%s", stranger.err.text);
    start(&job.ranks[1], join);
    finish(&job.ranks[1]);
    finish(&job.ranks[0]);
    check_joined(&job);
    job_close(&job);
}

// A handshake by hand, as a program other than ours might do it. The connection after rank 0's answer.
struct raw {
    struct nb_boot_config config;
    struct nb_shake shake;
    struct wire_join_answer answer;
    int fd;
};

static void raw_hello(struct raw *raw, const struct job *job, int rank) {
    raw->config = job->ranks[rank].config;
    raw->fd = knock(job);
    CHECK(nb_shake_hello(&raw->shake, &raw->config, NULL) == 0, "hello");
}

static void raw_challenge(struct raw *raw) {
    say(raw->fd, &raw->shake.hello, sizeof raw->shake.hello);
    CHECK(nb_sock_read_all(raw->fd, &raw->shake.challenge, sizeof raw->shake.challenge, test_deadline_ns()) == 0,
          "challenge");
}

static void raw_proof(struct raw *raw, const struct wire_join_proof *proof) {
    say(raw->fd, proof, sizeof *proof);
    CHECK(nb_sock_read_all(raw->fd, &raw->answer, sizeof raw->answer, test_deadline_ns()) == 0, "answer");
}

static void raw_join(struct raw *raw, const struct job *job, int rank) {
    struct wire_join_proof proof;
    raw_hello(raw, job, rank);
    raw_challenge(raw);
    nb_shake_proof(&raw->shake, &raw->config, &proof);
    raw_proof(raw, &proof);
    struct wire_join_answer expected = raw->answer;
    nb_shake_answer(&raw->shake, &raw->config, &expected);
    CHECK(memcmp(expected.mac, raw->answer.mac, sizeof expected.mac) == 0, "rank 0 proves the secret too");
}

// A proof that was seen, one that is altered, a field past its bounds, another version: none gets in or holds up.
static void test_forged(void) {
    struct job job;
    struct raw honest;
    struct raw raw;
    struct wire_join_proof proof;
    static const unsigned char zero[NB_SHA256_BYTES] = {0};
    job_open(&job, 3);
    start(&job.ranks[0], join);
    raw_hello(&honest, &job, 1);
    raw_challenge(&honest);
    nb_shake_proof(&honest.shake, &honest.config, &proof);

    raw_hello(&raw, &job, 1);
    raw.shake.hello = honest.shake.hello;
    raw_challenge(&raw);
    raw_proof(&raw, &proof); // replayed
    CHECK(memcmp(raw.answer.mac, zero, sizeof zero) == 0, "a proof is good for one connection");
    check_hung_up(raw.fd);

    proof.mac[31] ^= 1;
    raw_proof(&honest, &proof);
    CHECK(memcmp(honest.answer.mac, zero, sizeof zero) == 0, "an altered proof is refused");
    check_hung_up(honest.fd);

    raw_hello(&raw, &job, 1);
    raw.shake.hello.tag_bytes = NB_WIRE_JOIN_TAG_MAX + 1;
    say(raw.fd, &raw.shake.hello, sizeof raw.shake.hello);
    CHECK(nb_sock_read_all(raw.fd, &raw.shake.challenge, sizeof raw.shake.challenge, test_deadline_ns()) == 0,
          "challenge");
    check_hung_up(raw.fd);

    raw_hello(&raw, &job, 1);
    raw.shake.hello.version = NB_WIRE_JOIN_VERSION + 1;
    raw_challenge(&raw);
    CHECK(raw.shake.challenge.version == NB_WIRE_JOIN_VERSION, "rank 0 sends its version");
    check_hung_up(raw.fd);

    start(&job.ranks[1], join);
    start(&job.ranks[2], join);
    for (int i = 0; i < 3; i++) {
        finish(&job.ranks[i]);
    }
    check_joined(&job);
    job_close(&job);
}

// What listens at the address does not know the secret, and sends the client's own words back.
static void *mirror(void *arg) {
    const struct nb_listener *listener = arg;
    struct pollfd poller = {.fd = listener->fd, .events = POLLIN};
    struct nb_shake shake;
    struct wire_join_answer answer = {0};
    CHECK(poll(&poller, 1, LIMIT_MS) == 1, "no connection arrived");
    int fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    CHECK(fd >= 0 && nb_sock_read_all(fd, &shake.hello, sizeof shake.hello, test_deadline_ns()) == 0, "hello");
    CHECK(nb_shake_challenge(&shake, NULL) == 0, "challenge");
    memcpy(shake.challenge.nonce, shake.hello.nonce, sizeof shake.challenge.nonce);
    say(fd, &shake.challenge, sizeof shake.challenge);
    CHECK(nb_sock_read_all(fd, answer.mac, sizeof answer.mac, test_deadline_ns()) == 0, "proof");
    say(fd, &answer, sizeof answer);
    check_hung_up(fd);
    return NULL;
}

static void test_false_rank_0(void) {
    struct job job;
    pthread_t thread;
    job_open(&job, 2);
    CHECK(pthread_create(&thread, NULL, mirror, &job.listener) == 0, "thread");
    start(&job.ranks[1], join);
    finish(&job.ranks[1]);
    CHECK(pthread_join(thread, NULL) == 0, "join");
    CHECK(job.ranks[1].rc == NB_EAUTH, "%d %s", job.ranks[1].rc, job.ranks[1].err.text);
    job_close(&job);
}

// Rank 0 hangs up on the first attempt and is away for a while: the client comes again.
static void test_comes_again(void) {
    struct job job;
    job_open(&job, 2);
    struct nb_sockaddr addr = job.listener.addr;
    struct pollfd poller = {.fd = job.listener.fd, .events = POLLIN};
    start(&job.ranks[1], join);
    CHECK(poll(&poller, 1, LIMIT_MS) == 1, "no connection arrived");
    int fd = accept4(job.listener.fd, NULL, NULL, SOCK_CLOEXEC);
    CHECK(fd >= 0, "accept: %m");
    nb_listener_close(&job.listener);
    close(fd);
    job.ranks[0].config.ports = (struct nb_port_range){nb_sock_port(&addr), nb_sock_port(&addr)};
    struct nb_error err = {0};
    CHECK(nb_listener_open(&job.listener, &job.ranks[0].config, "127.0.0.1", &err) == 0, "%s", err.text);
    start(&job.ranks[0], join);
    finish(&job.ranks[0]);
    finish(&job.ranks[1]);
    check_joined(&job);
    job_close(&job);
}

static void test_missing(void) {
    struct job job;
    job_open(&job, 4);
    job.ranks[0].config.timeout_ms = 2000;
    int stranger = knock(&job);
    say(stranger, "??", 2);
    run_all_but(&job, join, 2);
    check_failed(&job, 2, -ETIMEDOUT, 2, "rank 2 of 4 did not join within 2 s; 1 connection did not prove");
    CHECK(strstr(job.ranks[0].err.text, "accept") == NULL, "%s", job.ranks[0].err.text);
    close(stranger);
    job_close(&job);

    job_open(&job, 2);
    job.ranks[1].config.timeout_ms = 300;
    nb_listener_close(&job.listener);
    start(&job.ranks[1], join);
    finish(&job.ranks[1]);
    CHECK(job.ranks[1].rc == -ETIMEDOUT && strstr(job.ranks[1].err.text, job.address) != NULL, "no rank 0: %d %s",
          job.ranks[1].rc, job.ranks[1].err.text);
    job_close(&job);
}

static void test_vain_reads(void) {
    struct job job;
    job_open(&job, 4);
    atomic_store(&vain_reads, 30);
    atomic_store(&door_admitted, 0);
    run_all_but(&job, join, -1);
    atomic_store(&vain_reads, 0);
    check_joined(&job);
    CHECK(atomic_load(&door_admitted) == 3, "%d connections of 3 ranks", atomic_load(&door_admitted));
    job_close(&job);
}

// What accept() may fail with passes, and the join goes on.
static void test_door_sticks(void) {
    static const int codes[] = {EMFILE, ENFILE,   ENOBUFS,      ENOMEM,      ECONNABORTED, EINTR,
                                EPROTO, ENETDOWN, EHOSTUNREACH, ENOPROTOOPT, ETIMEDOUT,    EPERM};
    for (size_t i = 0; i < sizeof codes / sizeof codes[0]; i++) {
        struct job job;
        job_open(&job, 2);
        door_sticks(codes[i], 2);
        run_all_but(&job, join, -1);
        check_joined(&job);
        CHECK(atomic_load(&door_calls) > 2, "%s: the door did not stick", strerror(codes[i]));
        job_close(&job);
    }
}

// Where it does not pass, rank 0 tries now and then until the deadline, and says why nobody could come.
static void test_door_is_stuck(void) {
    static const int codes[] = {EMFILE, ECONNABORTED, EPERM};
    for (size_t i = 0; i < sizeof codes / sizeof codes[0]; i++) {
        struct job job;
        job_open(&job, 2);
        job.ranks[0].config.timeout_ms = 600;
        int visitor = knock(&job);
        door_sticks(codes[i], INT32_MAX);
        start(&job.ranks[0], join);
        finish(&job.ranks[0]);
        check_failed(&job, 1, -ETIMEDOUT, 1, "rank 1 of 2 did not join within 0.6 s; rank 0 could not accept");
        CHECK(strstr(job.ranks[0].err.text, strerror(codes[i])) != NULL, "%s", job.ranks[0].err.text);
        int calls = atomic_load(&door_calls);
        CHECK(calls > 1 && calls < 60, "%s: tried %d times", strerror(codes[i]), calls);
        door_sticks(0, 0);
        close(visitor);
        job_close(&job);
    }
}

// A door that is none any more is not waited at.
static void test_door_is_gone(void) {
    struct job job;
    job_open(&job, 2);
    int visitor = knock(&job);
    door_sticks(EINVAL, INT32_MAX);
    start(&job.ranks[0], join);
    finish(&job.ranks[0]);
    check_failed(&job, 1, -EINVAL, NB_NO_PEER, "rank 0: accept");
    CHECK(atomic_load(&door_calls) == 1, "tried %d times", atomic_load(&door_calls));
    door_sticks(0, 0);
    close(visitor);
    job_close(&job);
}

static void test_tags(void) {
    char mine[NB_WIRE_JOIN_TAG_MAX + 1];
    char theirs[NB_WIRE_JOIN_TAG_MAX + 1];
    struct job job;
    job_open(&job, 4);
    job.ranks[2].config.tag = "1/ofi";
    run_all_but(&job, join, -1);
    check_failed(&job, -1, NB_EMISMATCH, 2, "rank 2 runs with '1/ofi', rank 0 with '1/tcp'");
    job_close(&job);

    memset(mine, 'x', sizeof mine);
    mine[NB_WIRE_JOIN_TAG_MAX] = '\0';
    memcpy(theirs, mine, sizeof theirs);
    theirs[NB_WIRE_JOIN_TAG_MAX - 1] = 'y';
    job_open(&job, 2);
    job.ranks[0].config.tag = mine;
    job.ranks[1].config.tag = theirs;
    run_all_but(&job, join, -1);
    check_failed(&job, -1, NB_EMISMATCH, 1, "xxxxy', rank 0 with '");
    job_close(&job);
}

static void test_claims(void) {
    struct job job;
    struct raw raw;
    job_open(&job, 3);
    job.ranks[2].config.size = 4;
    run_all_but(&job, join, -1);
    check_failed(&job, -1, NB_EMISMATCH, 2, "rank 2 runs in a job of 4 ranks, rank 0 of 3");
    job_close(&job);

    job_open(&job, 3);
    start(&job.ranks[0], join);
    raw_join(&raw, &job, 1);
    start(&job.ranks[1], join);
    finish(&job.ranks[1]);
    start(&job.ranks[2], join);
    finish(&job.ranks[2]);
    finish(&job.ranks[0]);
    check_failed(&job, -1, NB_EMISMATCH, 1, "two processes joined as rank 1");
    close(raw.fd);
    job_close(&job);

    for (uint32_t claimed = 0; claimed < UINT32_MAX - 9; claimed += UINT32_MAX / 2) {
        job_open(&job, 2);
        start(&job.ranks[0], join);
        job.ranks[1].config.rank = (int)claimed;
        raw_join(&raw, &job, 1);
        job.ranks[1].config.rank = 1;
        start(&job.ranks[1], join);
        finish(&job.ranks[1]);
        finish(&job.ranks[0]);
        check_failed(&job, -1, NB_EMISMATCH, (int)claimed, "ranks 1 to 1 were expected");
        close(raw.fd);
        job_close(&job);
    }
}

static void test_leaves_early(void) {
    struct job job;
    struct raw raw;
    job_open(&job, 3);
    start(&job.ranks[0], join);
    raw_join(&raw, &job, 1);
    close(raw.fd);
    start(&job.ranks[2], join);
    finish(&job.ranks[2]);
    finish(&job.ranks[0]);
    check_failed(&job, 1, NB_EPEER, 1, "rank 1 left before all ranks had joined");
    job_close(&job);
}

static void *barrier_with_signals(void *arg) {
    broken_waits = 3;
    (void)barrier(arg);
    const struct rank *rank = arg;
    CHECK(rank->rc == 0, "rank %d: %s", rank->config.rank, rank->err.text);
    CHECK(rank->config.rank != 0 || broken_waits == 0, "rank 0 did not wait");
    return NULL;
}

// A signal does not end an exchange.
static void test_signals(void) {
    struct job job;
    job_open(&job, 3);
    run_all_but(&job, join, -1);
    check_joined(&job);
    run_all_but(&job, barrier_with_signals, -1);
    job_close(&job);
}

static void test_config(void) {
    struct job job;
    struct nb_listener listener;
    struct nb_boot boot;
    struct nb_error err = {0};
    char tag[NB_WIRE_JOIN_TAG_MAX + 2];
    job_open(&job, 2);
    struct nb_boot_config config = job.ranks[1].config;
    config.secret_bytes = 15;
    CHECK(nb_listener_open(&listener, &config, NULL, &err) == -EINVAL, "a short secret");
    CHECK(strstr(err.text, "NETBOTTLENECK_SECRET") != NULL, "%s", err.text);
    CHECK(nb_boot_join(&boot, &config, NULL, job.address, NULL) == -EINVAL, "a short secret");
    config = job.ranks[1].config;
    config.secret = NULL;
    CHECK(nb_boot_join(&boot, &config, NULL, job.address, NULL) == -EINVAL, "no secret");
    config = job.ranks[1].config;
    config.rank = 2;
    CHECK(nb_boot_join(&boot, &config, NULL, job.address, NULL) == -EINVAL, "rank 2 of 2");
    config = job.ranks[1].config;
    memset(tag, 'x', sizeof tag);
    tag[sizeof tag - 1] = '\0';
    config.tag = tag;
    CHECK(nb_boot_join(&boot, &config, NULL, job.address, NULL) == -EINVAL, "a long tag");
    config = job.ranks[1].config;
    CHECK(nb_boot_join(&boot, &config, NULL, NULL, NULL) == -EINVAL, "no address");
    CHECK(nb_boot_join(&boot, &config, NULL, "rank0:80", NULL) == -EINVAL, "a name is not an address");
    CHECK(nb_boot_join(&boot, &job.ranks[0].config, NULL, NULL, NULL) == -EINVAL, "no listener");
    CHECK(nb_listener_open(&listener, &config, "nowhere", NULL) == -EINVAL, "a name is not an address");
    config.ifname = "=no-such-if";
    CHECK(nb_listener_open(&listener, &config, NULL, NULL) == -ENODEV, "no such interface");
    job_close(&job);
    nb_listener_close(NULL);
    nb_boot_close(NULL);
}

// A clock that no rank 0 can have is refused, before anything is computed from it.
static void test_clock_out_of_range(void) {
    int ends[2];
    struct nb_boot boot = {.rank = 1, .size = 2, .timeout_ms = 1000};
    struct nb_error err = {0};
    struct wire_exchange pong = {.kind = NB_WIRE_PONG, .value = (uint64_t)1 << 62};
    int64_t offset = 7;
    int64_t trip = 7;
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0, "socketpair: %m");
    boot.control = calloc(2, sizeof *boot.control);
    boot.control[0] = ends[0];
    boot.control[1] = -1;
    say(ends[1], &pong, sizeof pong);
    CHECK(nb_boot_clock(&boot, &offset, &trip, &err) == NB_EMISMATCH, "accepted: offset %lld", (long long)offset);
    CHECK(strstr(err.text, "rank 0's clock reads 4611686018427387904 ns") != NULL, "%s", err.text);
    CHECK(offset == 7 && trip == 7, "written in spite of the failure");
    nb_boot_close(&boot);
    close(ends[1]);
}

int main(void) {
    test_strangers();
    test_wrong_secret();
    test_forged();
    test_false_rank_0();
    test_comes_again();
    test_missing();
    test_vain_reads();
    test_door_sticks();
    test_door_is_stuck();
    test_door_is_gone();
    test_tags();
    test_claims();
    test_leaves_early();
    test_signals();
    test_clock_out_of_range();
    test_config();
    return 0;
}
