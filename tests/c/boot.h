// Bootstrap of a job whose ranks are threads of one program: joins it, runs a function on each rank, compares the
// results.
#ifndef NB_TEST_BOOT_H
#define NB_TEST_BOOT_H

#include <pthread.h>
#include <stdint.h>
#include <string.h>

#include "base/clock.h"
#include "base/sha256.h"
#include "bootstrap/bootstrap.h"
#include "check.h"

enum { RANKS_MAX = 8, LIMIT_MS = 60000 }; // only a hang takes this long, even on a loaded machine

static const unsigned char secret[] = "sixteen bytes or more";

struct rank {
    struct nb_boot_config config;
    struct nb_boot boot;
    struct nb_listener *listener;
    const char *address;
    struct nb_error err;
    int rc;
    pthread_t thread;
    // Input and output of the thread's function.
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

static inline int64_t test_deadline_ns(void) {
    return nb_now_ns() + LIMIT_MS * (int64_t)1000000;
}

static inline void job_open(struct job *job, int size) {
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
        CHECK(nb_sock_is_loopback(&job->listener.addr), "the listener is not on the named interface");
        nb_sock_format(&job->listener.addr, job->address);
    }
}

static inline void job_close(struct job *job) {
    for (int i = 0; i < job->size; i++) {
        nb_boot_close(&job->ranks[i].boot);
    }
    nb_listener_close(&job->listener);
}

static inline void *join(void *arg) {
    struct rank *rank = arg;
    rank->rc = nb_boot_join(&rank->boot, &rank->config, rank->listener, rank->address, &rank->err);
    return NULL;
}

static inline void start(struct rank *rank, void *(*body)(void *)) {
    memset(&rank->err, 0, sizeof rank->err);
    CHECK(pthread_create(&rank->thread, NULL, body, rank) == 0, "thread");
}

static inline void finish(struct rank *rank) {
    CHECK(pthread_join(rank->thread, NULL) == 0, "join");
}

// Runs body on all ranks concurrently, except on `absent` (-1: none).
static inline void run_all_but(struct job *job, void *(*body)(void *), int absent) {
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

static inline void check_joined(const struct job *job) {
    for (int i = 0; i < job->size; i++) {
        const struct rank *rank = &job->ranks[i];
        CHECK(rank->rc == 0, "rank %d: %d %s", i, rank->rc, rank->err.text);
        CHECK(rank->boot.rank == i && rank->boot.size == job->size && rank->boot.control[0] >= -1, "rank %d", i);
        CHECK(nb_bytes_equal(rank->boot.session, job->ranks[0].boot.session, 32), "rank %d has another session", i);
        CHECK(nb_sock_is_loopback(&rank->boot.self), "rank %d uses another interface", i);
    }
}

// All ranks but `absent` report the same error, and its text contains `part`.
static inline void check_failed(const struct job *job, int absent, int code, int peer, const char *part) {
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

#endif
