// Bootstrap exchanges (all-gather, barrier, clock): all ranks get the same result, or the same error that names the
// missing rank.
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "boot.h"
#include "bootstrap/bootstrap.h"
#include "check.h"

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

static struct nb_error own_failures[RANKS_MAX]; // what a rank brings to an agreement

static void *agree(void *arg) {
    struct rank *rank = arg;
    rank->err = own_failures[rank->boot.rank];
    rank->rc = nb_boot_agree(&rank->boot, rank->err.code, &rank->err);
    return NULL;
}

static void *get_clock(void *arg) {
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
    run_all_but(job, gather, -1);
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
    run_all_but(job, get_clock, -1);
    for (int i = 0; i < job->size; i++) {
        const struct rank *rank = &job->ranks[i];
        CHECK(rank->rc == 0, "rank %d: %s", i, rank->err.text);
        CHECK(i == 0 ? rank->trip_ns == 0 : rank->trip_ns > 0, "round trip %lld", (long long)rank->trip_ns);
        // The ranks share a clock, so the error of the offset is at most half of the round trip.
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
    CHECK(memcmp(here, there, sizeof here) == 0, "the two sides compute different tokens");
    nb_boot_token(last, "lane", 1, 0, there);
    CHECK(memcmp(here, there, sizeof here) != 0, "both directions have the same token");
    nb_boot_token(last, "lane", 0, 2, there);
    CHECK(memcmp(here, there, sizeof here) != 0, "another pair has the same token");
    nb_boot_token(last, "lanes", 0, 1, there);
    CHECK(memcmp(here, there, sizeof here) != 0, "another purpose has the same token");
}

static void check_control(const struct job *job) {
    for (int i = 1; i < job->size; i++) {
        const int fds[] = {job->ranks[0].boot.control[i], job->ranks[i].boot.control[0]};
        for (int side = 0; side < 2; side++) {
            int on = 0;
            socklen_t len = sizeof on;
            CHECK(getsockopt(fds[side], IPPROTO_TCP, TCP_NODELAY, &on, &len) == 0 && on != 0, "TCP_NODELAY is not set");
            CHECK((fcntl(fds[side], F_GETFL) & O_NONBLOCK) != 0, "O_NONBLOCK is not set");
            CHECK((fcntl(fds[side], F_GETFD) & FD_CLOEXEC) != 0, "FD_CLOEXEC is not set");
        }
    }
}

static void test_sizes(void) {
    static const int sizes[] = {1, 2, 5};
    unsigned char sessions[3][32];
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        struct job job;
        job_open(&job, sizes[i]);
        run_all_but(&job, join, -1);
        check_joined(&job);
        check_control(&job);
        check_allgather(&job, 1);
        check_allgather(&job, NB_BOOT_BLOB_MAX);
        run_all_but(&job, barrier, -1);
        CHECK(job.ranks[sizes[i] - 1].rc == 0, "barrier: %s", job.ranks[sizes[i] - 1].err.text);
        check_clock(&job);
        check_tokens(&job);
        memcpy(sessions[i], job.ranks[0].boot.session, 32);
        job_close(&job);
    }
    CHECK(memcmp(sessions[0], sessions[1], 32) != 0 && memcmp(sessions[1], sessions[2], 32) != 0,
          "two jobs have the same session");
}

// Gathers `bytes` from every rank, but `rank_1_bytes` from rank 1.
static void run_gather(struct job *job, size_t bytes, size_t rank_1_bytes, int absent) {
    static const char in[16];
    char out[RANKS_MAX][RANKS_MAX * sizeof in];
    for (int i = 0; i < job->size; i++) {
        job->ranks[i].in = in;
        job->ranks[i].bytes = i == 1 ? rank_1_bytes : bytes;
        job->ranks[i].out = out[i];
    }
    run_all_but(job, gather, absent);
}

static void test_failed_exchanges(void) {
    struct job job;
    job_open(&job, 4);
    run_all_but(&job, join, -1);
    check_joined(&job);
    run_gather(&job, 8, 9, -1);
    check_failed(&job, -1, NB_EMISMATCH, 1, "an all-gather of 9 bytes on rank 1, of 8 on this rank");
    job_close(&job);

    job_open(&job, 4);
    run_all_but(&job, join, -1);
    check_joined(&job);
    nb_boot_close(&job.ranks[2].boot);
    run_gather(&job, 8, 8, 2);
    check_failed(&job, 2, NB_EPEER, 2, "rank 2 left");
    job_close(&job);

    job_open(&job, 4);
    run_all_but(&job, join, -1);
    check_joined(&job);
    job.ranks[0].boot.timeout_ms = 1000;
    run_all_but(&job, barrier, 3);
    check_failed(&job, 3, NB_ETIMEOUT, 3, "rank 3 of 4 did not arrive within 1 s");
    job_close(&job);

    job_open(&job, 3);
    run_all_but(&job, join, -1);
    check_joined(&job);
    nb_boot_close(&job.ranks[1].boot);
    run_all_but(&job, get_clock, 1);
    check_failed(&job, 1, NB_EPEER, 1, "rank 1 left");
    job_close(&job);

    job_open(&job, 3);
    run_all_but(&job, join, -1);
    start(&job.ranks[0], barrier);
    start(&job.ranks[1], barrier);
    start(&job.ranks[2], get_clock);
    for (int i = 0; i < 3; i++) {
        finish(&job.ranks[i]);
    }
    check_failed(&job, -1, NB_EMISMATCH, 2, "rank 2 is in clock while this rank is in a barrier");
    job_close(&job);
}

static void test_agreement(void) {
    struct job job;
    job_open(&job, 4);
    run_all_but(&job, join, -1);
    run_all_but(&job, agree, -1);
    check_joined(&job); // no rank failed
    nb_fail_peer(&own_failures[2], NB_EPEER, 1, "no lane to rank 1");
    run_all_but(&job, agree, -1);
    check_failed(&job, -1, NB_EPEER, 1, "rank 2: no lane to rank 1");
    job_close(&job);
    memset(own_failures, 0, sizeof own_failures);

    job_open(&job, 4); // rank 0 saw what followed from rank 2's failure
    run_all_but(&job, join, -1);
    check_joined(&job);
    nb_fail_peer(&own_failures[0], NB_EPEER, 2, "rank 2 is gone");
    nb_fail_peer(&own_failures[2], NB_ETIMEOUT, 1, "no lane to rank 1");
    run_all_but(&job, agree, -1);
    check_failed(&job, -1, NB_ETIMEOUT, 1, "rank 2: no lane to rank 1");
    job_close(&job);
    memset(own_failures, 0, sizeof own_failures);

    job_open(&job, 3); // a rank keeps its own failure
    run_all_but(&job, join, -1);
    check_joined(&job);
    nb_fail(&own_failures[1], -ENOMEM, "no memory");
    run_all_but(&job, agree, -1);
    CHECK(strcmp(job.ranks[1].err.text, "no memory") == 0, "rank 1: %s", job.ranks[1].err.text);
    check_failed(&job, 1, -ENOMEM, NB_NO_PEER, "rank 1: no memory");
    job_close(&job);
}

int main(void) {
    test_sizes();
    test_failed_exchanges();
    test_agreement();
    return 0;
}
