// Bootstrap: ranks (threads) join whatever other processes send to rank 0's port, and every rank gets the reason of a
// failed join.
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

#include "base/interrupt.h"
#include "base/sock.h"
#include "boot.h"
#include "bootstrap/bootstrap.h"
#include "bootstrap/internal.h"
#include "check.h"

static const unsigned char other_secret[] = "another sixteen bytes";

// Replaces accept4 of libc: it fails `accept_failures` times with `accept_errno`, and counts its calls.
static _Atomic int accept_errno;
static _Atomic int accept_failures;
static _Atomic int accept_calls;
static _Atomic int accepted; // successful calls

int accept_with_failures(int fd, void *addr, void *len, int flags) __asm__("accept4");

int accept_with_failures(int fd, void *addr, void *len, int flags) {
    atomic_fetch_add(&accept_calls, 1);
    if (atomic_load(&accept_failures) > 0) {
        atomic_fetch_sub(&accept_failures, 1);
        errno = atomic_load(&accept_errno);
        return -1;
    }
    int fd_in = (int)syscall(SYS_accept4, fd, addr, len, flags);
    atomic_fetch_add(&accepted, fd_in >= 0);
    return fd_in;
}

// Replaces close of libc: fails the test if a descriptor is closed twice, because the second close may hit a reused
// one. ThreadSanitizer must intercept close itself.
#ifndef __SANITIZE_THREAD__
int close_once(int fd) __asm__("close");

int close_once(int fd) {
    int rc = (int)syscall(SYS_close, fd);
    CHECK(rc == 0 || fd < 0, "descriptor %d is closed twice: %m", fd);
    return rc;
}
#endif

// Replaces recv of libc: fails repeatedly with EAGAIN or EINTR, because a socket that poll reported as readable may
// have no data.
static _Atomic int empty_reads;

ssize_t recv_without_data(int fd, void *data, size_t bytes, int flags) __asm__("recv");

ssize_t recv_without_data(int fd, void *data, size_t bytes, int flags) {
    int left = atomic_load(&empty_reads);
    if (left > 0 && left % 3 != 0) {
        atomic_fetch_sub(&empty_reads, 1);
        errno = left % 3 == 1 ? EAGAIN : EINTR;
        return -1;
    }
    if (left > 0) {
        atomic_fetch_sub(&empty_reads, 1);
    }
    return syscall(SYS_recvfrom, fd, data, bytes, flags, NULL, NULL);
}

// Replaces poll of libc: fails this many times with EINTR, as if a signal arrived.
static _Thread_local int interrupted_polls;

int poll_interrupted(struct pollfd *polled, nfds_t count, int timeout_ms) __asm__("poll");

int poll_interrupted(struct pollfd *polled, nfds_t count, int timeout_ms) {
    struct timespec left = {.tv_sec = timeout_ms / 1000, .tv_nsec = timeout_ms % 1000 * 1000000L};
    if (interrupted_polls > 0) {
        interrupted_polls--;
        errno = EINTR;
        return -1;
    }
    return (int)syscall(SYS_ppoll, polled, count, timeout_ms < 0 ? NULL : &left, NULL, 0);
}

static void fail_accept(int code, int times) {
    atomic_store(&accept_errno, code);
    atomic_store(&accept_failures, times);
    atomic_store(&accept_calls, 0);
}

static void *barrier(void *arg) {
    struct rank *rank = arg;
    rank->rc = nb_boot_barrier(&rank->boot, &rank->err);
    return NULL;
}

// Checks that the connections carry data.
static void check_barrier(struct job *job) {
    run_all_but(job, barrier, -1);
    for (int i = 0; i < job->size; i++) {
        CHECK(job->ranks[i].rc == 0, "rank %d: %s", i, job->ranks[i].err.text);
    }
}

static int connect_client(const struct job *job) {
    int fd = nb_sock_connect(&job->listener.addr, NULL, NULL, NULL);
    CHECK(fd >= 0, "connect: %m");
    struct pollfd poller = {.fd = fd, .events = POLLOUT};
    CHECK(poll(&poller, 1, LIMIT_MS) == 1 && nb_sock_connected(fd) == 0, "connect");
    return fd;
}

static void send_bytes(int fd, const void *what, size_t bytes) {
    CHECK(nb_sock_write_all(fd, what, bytes, test_deadline_ns(), NULL) == 0, "write to rank 0: %m");
}

static void check_closed(int fd) {
    char byte;
    CHECK(nb_sock_read_all(fd, &byte, 1, test_deadline_ns(), NULL) == -ECONNRESET,
          "rank 0 does not close the connection");
    close(fd);
}

// More unauthenticated clients than rank 0 serves at a time, all connected before the first rank.
static void test_unauthenticated_clients(void) {
    enum { SILENT = 20 };
    static const char garbage[] = "GET / HTTP/1.1\r\nHost: rank0\r\n\r\n";
    struct job job;
    int silent[SILENT];
    job_open(&job, 2);
    int sends_garbage = connect_client(&job);
    send_bytes(sends_garbage, garbage, sizeof garbage - 1);
    int sends_magic = connect_client(&job);
    send_bytes(sends_magic, NB_WIRE_JOIN_MAGIC, NB_WIRE_JOIN_MAGIC_BYTES);
    close(connect_client(&job));
    for (int i = 0; i < SILENT; i++) {
        silent[i] = connect_client(&job);
    }
    run_all_but(&job, join, -1);
    check_joined(&job);
    check_closed(sends_garbage);
    check_closed(sends_magic);
    check_closed(silent[0]);
    for (int i = 1; i < SILENT; i++) {
        close(silent[i]);
    }
    check_barrier(&job);
    job_close(&job);
}

static void test_wrong_secret(void) {
    struct job job;
    job_open(&job, 2);
    struct rank client = job.ranks[1];
    client.config.secret = other_secret;
    start(&job.ranks[0], join);
    start(&client, join);
    finish(&client);
    CHECK(client.rc == NB_EAUTH && client.err.peer == 0, "%d %s", client.rc, client.err.text);
    CHECK(strstr(client.err.text, "NETBOTTLENECK_SECRET") != NULL, "%s", client.err.text);
    start(&job.ranks[1], join);
    finish(&job.ranks[1]);
    finish(&job.ranks[0]);
    check_joined(&job);
    job_close(&job);
}

// A client handshake whose messages the test builds, as a foreign program might. It stays connected after rank 0's
// answer.
struct raw {
    struct nb_boot_config config;
    struct nb_shake shake;
    struct wire_join_answer answer;
    int fd;
};

static void raw_hello(struct raw *raw, const struct job *job, int rank) {
    raw->config = job->ranks[rank].config;
    raw->fd = connect_client(job);
    CHECK(nb_shake_hello(&raw->shake, &raw->config, NULL) == 0, "hello");
}

static void raw_challenge(struct raw *raw) {
    send_bytes(raw->fd, &raw->shake.hello, sizeof raw->shake.hello);
    CHECK(nb_sock_read_all(raw->fd, &raw->shake.challenge, sizeof raw->shake.challenge, test_deadline_ns(), NULL) == 0,
          "challenge");
}

static void raw_proof(struct raw *raw, const struct wire_join_proof *proof) {
    send_bytes(raw->fd, proof, sizeof *proof);
    CHECK(nb_sock_read_all(raw->fd, &raw->answer, sizeof raw->answer, test_deadline_ns(), NULL) == 0, "answer");
}

static void raw_join(struct raw *raw, const struct job *job, int rank) {
    struct wire_join_proof proof;
    raw_hello(raw, job, rank);
    raw_challenge(raw);
    nb_shake_proof(&raw->shake, &raw->config, &proof);
    raw_proof(raw, &proof);
    struct wire_join_answer expected = raw->answer;
    nb_shake_answer(&raw->shake, &raw->config, &expected);
    CHECK(memcmp(expected.mac, raw->answer.mac, sizeof expected.mac) == 0, "rank 0's answer does not prove the secret");
}

// Refuses a replayed proof, an altered proof, a field out of bounds and another version. None of them blocks the ranks.
static void test_forged_handshakes(void) {
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
    CHECK(memcmp(raw.answer.mac, zero, sizeof zero) == 0, "a replayed proof is accepted");
    check_closed(raw.fd);

    proof.mac[31] ^= 1;
    raw_proof(&honest, &proof);
    CHECK(memcmp(honest.answer.mac, zero, sizeof zero) == 0, "an altered proof is accepted");
    check_closed(honest.fd);

    raw_hello(&raw, &job, 1);
    raw.shake.hello.tag_bytes = NB_WIRE_JOIN_TAG_MAX + 1;
    send_bytes(raw.fd, &raw.shake.hello, sizeof raw.shake.hello);
    CHECK(nb_sock_read_all(raw.fd, &raw.shake.challenge, sizeof raw.shake.challenge, test_deadline_ns(), NULL) == 0,
          "challenge");
    check_closed(raw.fd);

    raw_hello(&raw, &job, 1);
    raw.shake.hello.version = NB_WIRE_JOIN_VERSION + 1;
    raw_challenge(&raw);
    CHECK(raw.shake.challenge.version == NB_WIRE_JOIN_VERSION, "rank 0 does not send its version");
    check_closed(raw.fd);

    start(&job.ranks[1], join);
    start(&job.ranks[2], join);
    for (int i = 0; i < 3; i++) {
        finish(&job.ranks[i]);
    }
    check_joined(&job);
    job_close(&job);
}

// A fake rank 0 that does not know the secret and reflects the client's messages.
static void *reflecting_rank_0(void *arg) {
    const struct nb_listener *listener = arg;
    struct pollfd poller = {.fd = listener->fd, .events = POLLIN};
    struct nb_shake shake;
    struct wire_join_answer answer = {0};
    CHECK(poll(&poller, 1, LIMIT_MS) == 1, "no connection arrived");
    int fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    CHECK(fd >= 0 && nb_sock_read_all(fd, &shake.hello, sizeof shake.hello, test_deadline_ns(), NULL) == 0, "hello");
    CHECK(nb_shake_challenge(&shake, NULL) == 0, "challenge");
    memcpy(shake.challenge.nonce, shake.hello.nonce, sizeof shake.challenge.nonce);
    send_bytes(fd, &shake.challenge, sizeof shake.challenge);
    CHECK(nb_sock_read_all(fd, answer.mac, sizeof answer.mac, test_deadline_ns(), NULL) == 0, "proof");
    send_bytes(fd, &answer, sizeof answer);
    check_closed(fd);
    return NULL;
}

static void test_fake_rank_0(void) {
    struct job job;
    pthread_t thread;
    job_open(&job, 2);
    CHECK(pthread_create(&thread, NULL, reflecting_rank_0, &job.listener) == 0, "thread");
    start(&job.ranks[1], join);
    finish(&job.ranks[1]);
    CHECK(pthread_join(thread, NULL) == 0, "join");
    CHECK(job.ranks[1].rc == NB_EAUTH, "%d %s", job.ranks[1].rc, job.ranks[1].err.text);
    job_close(&job);
}

// Rank 0 closes the first connection and stops listening for a while: the client reconnects.
static void test_client_reconnects(void) {
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

// A rank that waited in vain names where rank 0 listens, and the variable that selects it.
static void check_names_address(const struct job *job, int rank) {
    const char *text = job->ranks[rank].err.text;
    CHECK(strstr(text, job->address) != NULL && strstr(text, "set NETBOTTLENECK_IFNAME") != NULL, "%s", text);
}

static void test_missing_rank(void) {
    struct job job;
    job_open(&job, 4);
    job.ranks[0].config.timeout_ms = 2000;
    int client = connect_client(&job);
    send_bytes(client, "??", 2);
    run_all_but(&job, join, 2);
    check_failed(&job, 2, -ETIMEDOUT, 2, "rank 2 of 4 did not join within 2 s; 1 connection did not prove");
    CHECK(strstr(job.ranks[0].err.text, "accept") == NULL, "%s", job.ranks[0].err.text);
    check_names_address(&job, 0);
    close(client);
    job_close(&job);

    job_open(&job, 2);
    job.ranks[1].config.timeout_ms = 300;
    struct nb_sockaddr none = job.listener.addr;
    nb_listener_close(&job.listener);
    nb_sock_set_port(&none, 0);
    int holder = socket(none.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0); // occupies a port without listening
    CHECK(bind(holder, &none.any, none.len) == 0 && getsockname(holder, &none.any, &none.len) == 0, "bind: %m");
    nb_sock_format(&none, job.address);
    start(&job.ranks[1], join);
    finish(&job.ranks[1]);
    close(holder);
    check_names_address(&job, 1);
    CHECK(job.ranks[1].rc == -ETIMEDOUT && strstr(job.ranks[1].err.text, job.address) != NULL, "without rank 0: %d %s",
          job.ranks[1].rc, job.ranks[1].err.text);
    job_close(&job);
}

static void test_reads_without_data(void) {
    struct job job;
    job_open(&job, 4);
    atomic_store(&empty_reads, 30);
    atomic_store(&accepted, 0);
    run_all_but(&job, join, -1);
    atomic_store(&empty_reads, 0);
    check_joined(&job);
    CHECK(atomic_load(&accepted) == 3, "%d connections for 3 ranks", atomic_load(&accepted));
    job_close(&job);
}

// Temporary failures of accept() do not fail the join.
static void test_temporary_accept_failures(void) {
    static const int codes[] = {EMFILE, ENFILE,   ENOBUFS,      ENOMEM,      ECONNABORTED, EINTR,
                                EPROTO, ENETDOWN, EHOSTUNREACH, ENOPROTOOPT, ETIMEDOUT,    EPERM};
    for (size_t i = 0; i < sizeof codes / sizeof codes[0]; i++) {
        struct job job;
        job_open(&job, 2);
        fail_accept(codes[i], 2);
        run_all_but(&job, join, -1);
        check_joined(&job);
        CHECK(atomic_load(&accept_calls) > 2, "%s: accept did not fail", strerror(codes[i]));
        job_close(&job);
    }
}

// If such a failure persists, rank 0 retries at intervals until the deadline, and the error contains the reason.
static void test_persistent_accept_failure(void) {
    static const int codes[] = {EMFILE, ECONNABORTED, EPERM};
    for (size_t i = 0; i < sizeof codes / sizeof codes[0]; i++) {
        struct job job;
        job_open(&job, 2);
        job.ranks[0].config.timeout_ms = 600;
        int client = connect_client(&job);
        fail_accept(codes[i], INT32_MAX);
        start(&job.ranks[0], join);
        finish(&job.ranks[0]);
        check_failed(&job, 1, -ETIMEDOUT, 1, "rank 1 of 2 did not join within 0.6 s; rank 0 could not accept");
        CHECK(strstr(job.ranks[0].err.text, strerror(codes[i])) != NULL, "%s", job.ranks[0].err.text);
        int calls = atomic_load(&accept_calls);
        CHECK(calls > 1 && calls < 60, "%s: tried %d times", strerror(codes[i]), calls);
        fail_accept(0, 0);
        close(client);
        job_close(&job);
    }
}

// EINVAL means that the listener is invalid: the join fails at once.
static void test_invalid_listener(void) {
    struct job job;
    job_open(&job, 2);
    int client = connect_client(&job);
    fail_accept(EINVAL, INT32_MAX);
    start(&job.ranks[0], join);
    finish(&job.ranks[0]);
    check_failed(&job, 1, -EINVAL, NB_NO_PEER, "rank 0: accept");
    CHECK(atomic_load(&accept_calls) == 1, "tried %d times", atomic_load(&accept_calls));
    fail_accept(0, 0);
    close(client);
    job_close(&job);
}

static void test_different_tags(void) {
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

static void test_wrong_size_and_rank(void) {
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

static void test_rank_leaves_during_join(void) {
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
    interrupted_polls = 3;
    (void)barrier(arg);
    const struct rank *rank = arg;
    CHECK(rank->rc == 0, "rank %d: %s", rank->config.rank, rank->err.text);
    CHECK(rank->config.rank != 0 || interrupted_polls == 0, "rank 0's waits were not interrupted");
    return NULL;
}

// Signals do not interrupt a barrier.
static void test_signals(void) {
    struct job job;
    job_open(&job, 3);
    run_all_but(&job, join, -1);
    check_joined(&job);
    run_all_but(&job, barrier_with_signals, -1);
    job_close(&job);
}

static _Atomic bool interrupts; // every wait with an interrupt ends

static bool interrupt_pending(void *ctx) {
    (void)ctx;
    return atomic_load(&interrupts);
}

// A member of an interrupted rank 0 sees the connection close.
static void test_interrupt_of_rank_0(void) {
    struct nb_interrupt interrupt = {.pending = interrupt_pending};
    struct job job;
    struct raw raw;
    job_open(&job, 3);
    job.ranks[0].config.interrupt = &interrupt;
    start(&job.ranks[0], join);
    raw_join(&raw, &job, 1);
    atomic_store(&interrupts, true);
    finish(&job.ranks[0]);
    atomic_store(&interrupts, false);
    CHECK(job.ranks[0].rc == -EINTR, "%d %s", job.ranks[0].rc, job.ranks[0].err.text);
    check_closed(raw.fd);
    job_close(&job);
}

// Rank 0's side of a join until the member waits for the verdict. Then the member is interrupted.
static void *answering_rank_0(void *arg) {
    const struct job *job = arg;
    struct pollfd poller = {.fd = job->listener.fd, .events = POLLIN};
    struct nb_shake shake;
    struct wire_join_proof proof;
    struct wire_join_answer answer = {.left_ms = LIMIT_MS};
    CHECK(poll(&poller, 1, LIMIT_MS) == 1, "no connection arrived");
    int fd = accept4(job->listener.fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    CHECK(fd >= 0 && nb_sock_read_all(fd, &shake.hello, sizeof shake.hello, test_deadline_ns(), NULL) == 0, "hello");
    CHECK(nb_shake_challenge(&shake, NULL) == 0, "challenge");
    send_bytes(fd, &shake.challenge, sizeof shake.challenge);
    CHECK(nb_sock_read_all(fd, &proof, sizeof proof, test_deadline_ns(), NULL) == 0, "proof");
    nb_shake_answer(&shake, &job->ranks[0].config, &answer);
    send_bytes(fd, &answer, sizeof answer);
    atomic_store(&interrupts, true);
    check_closed(fd);
    return NULL;
}

static void test_interrupt_of_member(void) {
    struct nb_interrupt interrupt = {.pending = interrupt_pending};
    struct job job;
    pthread_t thread;
    job_open(&job, 2);
    job.ranks[1].config.interrupt = &interrupt;
    CHECK(pthread_create(&thread, NULL, answering_rank_0, &job) == 0, "thread");
    start(&job.ranks[1], join);
    finish(&job.ranks[1]);
    CHECK(pthread_join(thread, NULL) == 0, "join");
    CHECK(job.ranks[1].rc == -EINTR, "%d %s", job.ranks[1].rc, job.ranks[1].err.text);

    nb_listener_close(&job.listener); // the member retries
    start(&job.ranks[1], join);
    finish(&job.ranks[1]);
    atomic_store(&interrupts, false);
    CHECK(job.ranks[1].rc == -EINTR, "without rank 0: %d %s", job.ranks[1].rc, job.ranks[1].err.text);
    job_close(&job);
}

static void *barrier_and_leave(void *arg) {
    struct rank *rank = arg;
    (void)barrier(arg);
    nb_boot_close(&rank->boot);
    return NULL;
}

// A member that waits for an interrupted rank 0 gets the error of a rank that has left.
static void test_interrupt_of_barrier(void) {
    struct nb_interrupt interrupt = {.pending = interrupt_pending};
    struct job job;
    job_open(&job, 3);
    job.ranks[0].config.interrupt = &interrupt;
    run_all_but(&job, join, -1);
    check_joined(&job);
    atomic_store(&interrupts, true);
    start(&job.ranks[0], barrier_and_leave);
    start(&job.ranks[1], barrier);
    finish(&job.ranks[0]);
    finish(&job.ranks[1]);
    atomic_store(&interrupts, false);
    CHECK(job.ranks[0].rc == -EINTR, "%d %s", job.ranks[0].rc, job.ranks[0].err.text);
    CHECK(job.ranks[1].rc == NB_EPEER && job.ranks[1].err.peer == 0, "%d %s", job.ranks[1].rc, job.ranks[1].err.text);
    job_close(&job);
}

static void test_invalid_config(void) {
    struct job job;
    struct nb_listener listener;
    struct nb_boot boot;
    struct nb_error err = {0};
    char tag[NB_WIRE_JOIN_TAG_MAX + 2];
    job_open(&job, 2);
    struct nb_boot_config config = job.ranks[1].config;
    config.secret_bytes = 15;
    CHECK(nb_listener_open(&listener, &config, NULL, &err) == -EINVAL, "a short secret is accepted");
    CHECK(strstr(err.text, "NETBOTTLENECK_SECRET") != NULL, "%s", err.text);
    CHECK(nb_boot_join(&boot, &config, NULL, job.address, NULL) == -EINVAL, "a short secret is accepted");
    config = job.ranks[1].config;
    config.secret = NULL;
    CHECK(nb_boot_join(&boot, &config, NULL, job.address, NULL) == -EINVAL, "no secret is accepted");
    config = job.ranks[1].config;
    config.rank = 2;
    CHECK(nb_boot_join(&boot, &config, NULL, job.address, NULL) == -EINVAL, "rank 2 of 2 is accepted");
    config = job.ranks[1].config;
    memset(tag, 'x', sizeof tag);
    tag[sizeof tag - 1] = '\0';
    config.tag = tag;
    CHECK(nb_boot_join(&boot, &config, NULL, job.address, NULL) == -EINVAL, "a long tag is accepted");
    config = job.ranks[1].config;
    CHECK(nb_boot_join(&boot, &config, NULL, NULL, NULL) == -EINVAL, "a client without an address is accepted");
    CHECK(nb_boot_join(&boot, &config, NULL, "rank0:80", NULL) == -EINVAL, "a name instead of an address is accepted");
    CHECK(nb_boot_join(&boot, &job.ranks[0].config, NULL, NULL, NULL) == -EINVAL,
          "rank 0 without a listener is accepted");
    CHECK(nb_listener_open(&listener, &config, "nowhere", NULL) == -EINVAL, "a name instead of an address is accepted");
    config.ifname = "=no-such-if";
    CHECK(nb_listener_open(&listener, &config, NULL, NULL) == -ENODEV, "an unknown interface is accepted");
    job_close(&job);
    nb_listener_close(NULL);
    nb_boot_close(NULL);
}

// An impossible clock value of rank 0 is refused before it is used.
static void test_clock_out_of_range(void) {
    int fds[2];
    struct nb_boot boot = {.rank = 1, .size = 2, .timeout_ms = 1000};
    struct nb_error err = {0};
    struct wire_exchange pong = {.kind = NB_WIRE_PONG, .value = (uint64_t)1 << 62};
    int64_t offset = 7;
    int64_t trip = 7;
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds) == 0, "socketpair: %m");
    boot.control = calloc(2, sizeof *boot.control);
    boot.control[0] = fds[0];
    boot.control[1] = -1;
    send_bytes(fds[1], &pong, sizeof pong);
    CHECK(nb_boot_clock(&boot, &offset, &trip, &err) == NB_EMISMATCH, "accepted: offset %lld", (long long)offset);
    CHECK(strstr(err.text, "rank 0's clock reads 4611686018427387904 ns") != NULL, "%s", err.text);
    CHECK(offset == 7 && trip == 7, "outputs are set in spite of the failure");
    nb_boot_close(&boot);
    close(fds[1]);
}

int main(void) {
    test_unauthenticated_clients();
    test_wrong_secret();
    test_forged_handshakes();
    test_fake_rank_0();
    test_client_reconnects();
    test_missing_rank();
    test_reads_without_data();
    test_temporary_accept_failures();
    test_persistent_accept_failure();
    test_invalid_listener();
    test_different_tags();
    test_wrong_size_and_rank();
    test_rank_leaves_during_join();
    test_signals();
    test_interrupt_of_rank_0();
    test_interrupt_of_member();
    test_interrupt_of_barrier();
    test_clock_out_of_range();
    test_invalid_config();
    return 0;
}
