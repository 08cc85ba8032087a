// Ranks (as threads) find each other whatever strangers do at rank 0's door, and every rank hears why a join failed.
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "base/clock.h"
#include "bootstrap/bootstrap.h"
#include "bootstrap/internal.h"
#include "check.h"

enum { RANKS_MAX = 8, LIMIT_MS = 15000 };

static const unsigned char secret[] = "sixteen bytes or more";
static const unsigned char other_secret[] = "another sixteen bytes";

struct rank {
    struct nb_boot_config config;
    struct nb_boot boot;
    struct nb_listener *listener;
    const char *address;
    struct nb_error err;
    int rc;
    pthread_t thread;
    // what a body needs and finds
    const void *in;
    size_t bytes;
    void *out;
    int64_t offset_ns;
    int64_t trip_ns;
};

struct job {
    int size;
    struct nb_listener listener;
    char address[NB_SOCK_TEXT];
    struct rank ranks[RANKS_MAX];
};

static int64_t in_limit(void) {
    return nb_now_ns() + LIMIT_MS * (int64_t)1000000;
}

static void job_open(struct job *job, int size) {
    memset(job, 0, sizeof *job);
    job->size = size;
    for (int i = 0; i < size; i++) {
        struct rank *rank = &job->ranks[i];
        rank->config = (struct nb_boot_config){.rank = i, .size = size, .timeout_ms = LIMIT_MS, .ifname = "=lo"};
        rank->config.secret = secret;
        rank->config.secret_bytes = sizeof secret;
        rank->config.tag = "1/tcp";
        rank->address = i == 0 ? NULL : job->address;
        rank->listener = i == 0 ? &job->listener : NULL;
    }
    if (size > 1) {
        CHECK(nb_listener_open(&job->listener, &job->ranks[0].config, NULL, NULL) == 0, "listener");
        CHECK(nb_sock_is_loopback(&job->listener.addr), "by the name of the interface");
        nb_sock_format(&job->listener.addr, job->address);
    }
}

static void job_close(struct job *job) {
    for (int i = 0; i < job->size; i++) {
        nb_boot_close(&job->ranks[i].boot);
    }
    nb_listener_close(&job->listener);
}

static void *join(void *arg) {
    struct rank *rank = arg;
    rank->rc = nb_boot_join(&rank->boot, &rank->config, rank->listener, rank->address, &rank->err);
    return NULL;
}

static void start(struct rank *rank, void *(*body)(void *)) {
    memset(&rank->err, 0, sizeof rank->err);
    CHECK(pthread_create(&rank->thread, NULL, body, rank) == 0, "thread");
}

static void finish(struct rank *rank) {
    CHECK(pthread_join(rank->thread, NULL) == 0, "join");
}

// All ranks but `absent` (-1: none) at once.
static void run_but(struct job *job, void *(*body)(void *), int absent) {
    for (int i = 0; i < job->size; i++) {
        if (i != absent) {
            start(&job->ranks[i], body);
        }
    }
    for (int i = 0; i < job->size; i++) {
        if (i != absent) {
            finish(&job->ranks[i]);
        }
    }
}

static void check_joined(const struct job *job) {
    for (int i = 0; i < job->size; i++) {
        const struct rank *rank = &job->ranks[i];
        CHECK(rank->rc == 0, "rank %d: %d %s", i, rank->rc, rank->err.text);
        CHECK(rank->boot.rank == i && rank->boot.size == job->size && rank->boot.control[0] >= -1, "rank %d", i);
        CHECK(nb_bytes_equal(rank->boot.session, job->ranks[0].boot.session, 32), "rank %d has another session", i);
        CHECK(nb_sock_is_loopback(&rank->boot.self), "rank %d came from another interface", i);
    }
}

// The ranks that were there say the same, and it contains `part`.
static void check_failed(const struct job *job, int absent, int code, int peer, const char *part) {
    for (int i = 0; i < job->size; i++) {
        const struct rank *rank = &job->ranks[i];
        if (i == absent) {
            continue;
        }
        CHECK(rank->rc == code && rank->err.code == code, "rank %d: %d %s", i, rank->rc, rank->err.text);
        CHECK(rank->err.peer == peer, "rank %d blames %d: %s", i, rank->err.peer, rank->err.text);
        CHECK(strcmp(rank->err.text, job->ranks[0].err.text) == 0, "rank %d: %s", i, rank->err.text);
        CHECK(strstr(rank->err.text, part) != NULL, "'%s' is not in: %s", part, rank->err.text);
    }
}

static void *gather(void *arg) {
    struct rank *rank = arg;
    rank->rc = nb_boot_allgather(&rank->boot, rank->in, rank->bytes, rank->out, &rank->err);
    return NULL;
}

static void *barrier(void *arg) {
    struct rank *rank = arg;
    rank->rc = nb_boot_barrier(&rank->boot, &rank->err);
    return NULL;
}

static void *ask_clock(void *arg) {
    struct rank *rank = arg;
    rank->rc = nb_boot_clock(&rank->boot, &rank->offset_ns, &rank->trip_ns, &rank->err);
    return NULL;
}

static void check_allgather(struct job *job, size_t bytes) {
    for (int i = 0; i < job->size; i++) {
        struct rank *rank = &job->ranks[i];
        unsigned char *in = malloc(bytes);
        CHECK(in != NULL && (rank->out = calloc((size_t)job->size, bytes)) != NULL, "memory");
        for (size_t k = 0; k < bytes; k++) {
            in[k] = (unsigned char)((size_t)i * 31 + k);
        }
        rank->in = in;
        rank->bytes = bytes;
    }
    run_but(job, gather, -1);
    for (int i = 0; i < job->size; i++) {
        struct rank *rank = &job->ranks[i];
        CHECK(rank->rc == 0, "rank %d: %s", i, rank->err.text);
        for (int from = 0; from < job->size; from++) {
            CHECK(memcmp((char *)rank->out + (size_t)from * bytes, job->ranks[from].in, bytes) == 0,
                  "%zu bytes of rank %d on rank %d", bytes, from, i);
        }
    }
    for (int i = 0; i < job->size; i++) {
        free((void *)job->ranks[i].in);
        free(job->ranks[i].out);
    }
}

static void check_clock(struct job *job) {
    run_but(job, ask_clock, -1);
    for (int i = 0; i < job->size; i++) {
        const struct rank *rank = &job->ranks[i];
        CHECK(rank->rc == 0, "rank %d: %s", i, rank->err.text);
        CHECK(i == 0 ? rank->trip_ns == 0 : rank->trip_ns > 0, "round trip %lld", (long long)rank->trip_ns);
        // One clock, two readings within a round trip: the halves differ by no more than half of it.
        CHECK(llabs((long long)rank->offset_ns) <= rank->trip_ns / 2 + 1, "rank %d is off by %lld ns in %lld", i,
              (long long)rank->offset_ns, (long long)rank->trip_ns);
    }
}

static void check_tokens(const struct job *job) {
    unsigned char here[NB_TOKEN_BYTES];
    unsigned char there[NB_TOKEN_BYTES];
    const struct nb_boot *last = &job->ranks[job->size - 1].boot;
    nb_boot_token(&job->ranks[0].boot, "lane", 0, 1, here);
    nb_boot_token(last, "lane", 0, 1, there);
    CHECK(memcmp(here, there, sizeof here) == 0, "both sides compute the same token");
    nb_boot_token(last, "lane", 1, 0, there);
    CHECK(memcmp(here, there, sizeof here) != 0, "the other direction has another");
    nb_boot_token(last, "lane", 0, 2, there);
    CHECK(memcmp(here, there, sizeof here) != 0, "another pair has another");
    nb_boot_token(last, "lanes", 0, 1, there);
    CHECK(memcmp(here, there, sizeof here) != 0, "another purpose has another");
}

static void test_sizes(void) {
    static const int sizes[] = {1, 2, 5};
    unsigned char sessions[3][32];
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        struct job job;
        job_open(&job, sizes[i]);
        run_but(&job, join, -1);
        check_joined(&job);
        check_allgather(&job, 1);
        check_allgather(&job, NB_BOOT_BLOB_MAX);
        run_but(&job, barrier, -1);
        CHECK(job.ranks[sizes[i] - 1].rc == 0, "barrier: %s", job.ranks[sizes[i] - 1].err.text);
        check_clock(&job);
        check_tokens(&job);
        memcpy(sessions[i], job.ranks[0].boot.session, 32);
        job_close(&job);
    }
    CHECK(memcmp(sessions[0], sessions[1], 32) != 0 && memcmp(sessions[1], sessions[2], 32) != 0,
          "no two jobs share a session");
}

static int knock(const struct job *job) {
    int fd = nb_sock_connect(&job->listener.addr, NULL, NULL);
    CHECK(fd >= 0, "connect: %m");
    struct pollfd poller = {.fd = fd, .events = POLLOUT};
    CHECK(poll(&poller, 1, LIMIT_MS) == 1 && nb_sock_connected(fd) == 0, "connect");
    return fd;
}

static void say(int fd, const void *what, size_t bytes) {
    CHECK(nb_sock_write_all(fd, what, bytes, in_limit()) == 0, "write to rank 0: %m");
}

static void check_hung_up(int fd) {
    char byte;
    CHECK(nb_sock_read_all(fd, &byte, 1, in_limit()) == -ECONNRESET, "rank 0 hangs up");
    close(fd);
}

// More of them than rank 0 listens to at a time, each in the way before the first rank comes.
static void test_strangers(void) {
    enum { SILENT = 70 };
    static const char garbage[] = "GET / HTTP/1.1\r\nHost: rank0\r\n\r\n";
    struct job job;
    int silent[SILENT];
    job_open(&job, 2);
    int loud = knock(&job);
    say(loud, garbage, sizeof garbage - 1);
    int polite = knock(&job);
    say(polite, NB_BOOT_MAGIC, NB_BOOT_MAGIC_BYTES);
    close(knock(&job));
    for (int i = 0; i < SILENT; i++) {
        silent[i] = knock(&job);
    }
    run_but(&job, join, -1);
    check_joined(&job);
    check_hung_up(loud);
    check_hung_up(polite);
    check_hung_up(silent[0]);
    for (int i = 1; i < SILENT; i++) {
        close(silent[i]);
    }
    check_allgather(&job, 8);
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
    struct nb_answer answer;
    int fd;
};

static void raw_hello(struct raw *raw, const struct job *job, int rank) {
    raw->config = job->ranks[rank].config;
    raw->fd = knock(job);
    CHECK(nb_shake_hello(&raw->shake, &raw->config, NULL) == 0, "hello");
}

static void raw_challenge(struct raw *raw) {
    say(raw->fd, &raw->shake.hello, sizeof raw->shake.hello);
    CHECK(nb_sock_read_all(raw->fd, &raw->shake.challenge, sizeof raw->shake.challenge, in_limit()) == 0, "challenge");
}

static void raw_proof(struct raw *raw, const struct nb_proof *proof) {
    say(raw->fd, proof, sizeof *proof);
    CHECK(nb_sock_read_all(raw->fd, &raw->answer, sizeof raw->answer, in_limit()) == 0, "answer");
}

static void raw_join(struct raw *raw, const struct job *job, int rank) {
    struct nb_proof proof;
    raw_hello(raw, job, rank);
    raw_challenge(raw);
    nb_shake_proof(&raw->shake, &raw->config, &proof);
    raw_proof(raw, &proof);
    struct nb_answer expected = raw->answer;
    nb_shake_answer(&raw->shake, &raw->config, &expected);
    CHECK(memcmp(expected.mac, raw->answer.mac, sizeof expected.mac) == 0, "rank 0 proves the secret too");
}

// A proof that was seen, one that is altered, a field past its bounds, another version: none gets in or holds up.
static void test_forged(void) {
    struct job job;
    struct raw honest;
    struct raw raw;
    struct nb_proof proof;
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
    CHECK(memcmp(honest.answer.mac, zero, sizeof zero) == 0, "an altered proof is none");
    check_hung_up(honest.fd);

    raw_hello(&raw, &job, 1);
    raw.shake.hello.tag_bytes = NB_BOOT_TAG_MAX + 1;
    say(raw.fd, &raw.shake.hello, sizeof raw.shake.hello);
    CHECK(nb_sock_read_all(raw.fd, &raw.shake.challenge, sizeof raw.shake.challenge, in_limit()) == 0, "challenge");
    check_hung_up(raw.fd);

    raw_hello(&raw, &job, 1);
    raw.shake.hello.version = NB_BOOT_PROTOCOL + 1;
    raw_challenge(&raw);
    CHECK(raw.shake.challenge.version == NB_BOOT_PROTOCOL, "rank 0 says which version it speaks");
    check_hung_up(raw.fd);

    start(&job.ranks[1], join);
    start(&job.ranks[2], join);
    for (int i = 0; i < 3; i++) {
        finish(&job.ranks[i]);
    }
    check_joined(&job);
    job_close(&job);
}

// What listens at the address does not know the secret, and sends the guest's own words back.
static void *mirror(void *arg) {
    const struct nb_listener *listener = arg;
    struct pollfd poller = {.fd = listener->fd, .events = POLLIN};
    struct nb_shake shake;
    struct nb_answer answer = {0};
    CHECK(poll(&poller, 1, LIMIT_MS) == 1, "nobody came");
    int fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    CHECK(fd >= 0 && nb_sock_read_all(fd, &shake.hello, sizeof shake.hello, in_limit()) == 0, "hello");
    CHECK(nb_shake_challenge(&shake, NULL) == 0, "challenge");
    memcpy(shake.challenge.nonce, shake.hello.nonce, sizeof shake.challenge.nonce);
    say(fd, &shake.challenge, sizeof shake.challenge);
    CHECK(nb_sock_read_all(fd, answer.mac, sizeof answer.mac, in_limit()) == 0, "proof");
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

// Rank 0 hangs up on the first attempt and is away for a while: the guest comes again.
static void test_comes_again(void) {
    struct job job;
    job_open(&job, 2);
    struct nb_sockaddr addr = job.listener.addr;
    struct pollfd poller = {.fd = job.listener.fd, .events = POLLIN};
    start(&job.ranks[1], join);
    CHECK(poll(&poller, 1, LIMIT_MS) == 1, "nobody came");
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
    run_but(&job, join, 2);
    check_failed(&job, 2, -ETIMEDOUT, 2, "rank 2 of 4 did not come within 2 s; 1 connection did not prove");
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

static void test_tags(void) {
    char mine[NB_BOOT_TAG_MAX + 1];
    char theirs[NB_BOOT_TAG_MAX + 1];
    struct job job;
    job_open(&job, 4);
    job.ranks[2].config.tag = "1/ofi";
    run_but(&job, join, -1);
    check_failed(&job, -1, NB_EMISMATCH, 2, "rank 2 runs with '1/ofi', rank 0 with '1/tcp'");
    job_close(&job);

    memset(mine, 'x', sizeof mine);
    mine[NB_BOOT_TAG_MAX] = '\0';
    memcpy(theirs, mine, sizeof theirs);
    theirs[NB_BOOT_TAG_MAX - 1] = 'y';
    job_open(&job, 2);
    job.ranks[0].config.tag = mine;
    job.ranks[1].config.tag = theirs;
    run_but(&job, join, -1);
    check_failed(&job, -1, NB_EMISMATCH, 1, "xxxxy', rank 0 with '");
    job_close(&job);
}

static void test_claims(void) {
    struct job job;
    struct raw raw;
    job_open(&job, 3);
    job.ranks[2].config.size = 4;
    run_but(&job, join, -1);
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
    check_failed(&job, -1, NB_EMISMATCH, 1, "two processes came as rank 1");
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
    check_failed(&job, 1, NB_EPEER, 1, "rank 1 left before all ranks had come");
    job_close(&job);
}

// Buffers of `bytes` for every rank; rank 1 gives `odd` bytes.
static void run_gather(struct job *job, size_t bytes, size_t odd, int absent) {
    static const char in[16];
    char out[RANKS_MAX][RANKS_MAX * sizeof in];
    for (int i = 0; i < job->size; i++) {
        job->ranks[i].in = in;
        job->ranks[i].bytes = i == 1 ? odd : bytes;
        job->ranks[i].out = out[i];
    }
    run_but(job, gather, absent);
}

static void test_exchange_fails(void) {
    struct job job;
    job_open(&job, 4);
    run_but(&job, join, -1);
    check_joined(&job);
    run_gather(&job, 8, 9, -1);
    check_failed(&job, -1, NB_EMISMATCH, 1, "an all-gather of 9 bytes on rank 1, of 8 on this rank");
    job_close(&job);

    job_open(&job, 4);
    run_but(&job, join, -1);
    check_joined(&job);
    nb_boot_close(&job.ranks[2].boot);
    run_gather(&job, 8, 8, 2);
    check_failed(&job, 2, NB_EPEER, 2, "rank 2 left");
    job_close(&job);

    job_open(&job, 4);
    job.ranks[0].config.timeout_ms = 1000;
    run_but(&job, join, -1);
    check_joined(&job);
    run_but(&job, barrier, 3);
    check_failed(&job, 3, NB_ETIMEOUT, 3, "rank 3 of 4 did not come within 1 s");
    job_close(&job);

    job_open(&job, 3);
    run_but(&job, join, -1);
    check_joined(&job);
    nb_boot_close(&job.ranks[1].boot);
    run_but(&job, ask_clock, 1);
    check_failed(&job, 1, NB_EPEER, 1, "rank 1 left");
    job_close(&job);

    job_open(&job, 3);
    run_but(&job, join, -1);
    start(&job.ranks[0], barrier);
    start(&job.ranks[1], barrier);
    start(&job.ranks[2], ask_clock);
    for (int i = 0; i < 3; i++) {
        finish(&job.ranks[i]);
    }
    check_failed(&job, -1, NB_EMISMATCH, 2, "rank 2 is at clock where this rank is at a barrier");
    job_close(&job);
}

static void test_config(void) {
    struct job job;
    struct nb_listener listener;
    struct nb_boot boot;
    struct nb_error err = {0};
    char tag[NB_BOOT_TAG_MAX + 2];
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
    CHECK(nb_boot_join(&boot, &config, NULL, "rank0:80", NULL) == -EINVAL, "a name is no address");
    CHECK(nb_boot_join(&boot, &job.ranks[0].config, NULL, NULL, NULL) == -EINVAL, "no listener");
    CHECK(nb_listener_open(&listener, &config, "nowhere", NULL) == -EINVAL, "a name is no address");
    config.ifname = "=no-such-if";
    CHECK(nb_listener_open(&listener, &config, NULL, NULL) == -ENODEV, "no such interface");
    job_close(&job);
    nb_listener_close(NULL);
    nb_boot_close(NULL);
}

int main(void) {
    test_sizes();
    test_strangers();
    test_wrong_secret();
    test_forged();
    test_false_rank_0();
    test_comes_again();
    test_missing();
    test_tags();
    test_claims();
    test_leaves_early();
    test_exchange_fails();
    test_config();
    return 0;
}
