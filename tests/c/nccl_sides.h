// Harness of the net plugin's tests. Each case has two processes, which call the plugin as NCCL's proxy does, and
// exchange handles over a socket. PROGRAM tcp|ofi runs all cases; PROGRAM tcp|ofi CASE VERSION runs one.
#ifndef NB_TEST_NCCL_SIDES_H
#define NB_TEST_NCCL_SIDES_H

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../nccl/pair.h"
#include "../nccl/proxy.h"
#include "base/clock.h"
#include "check.h"
#include "nccl/net.h"
#include "transport/transport.h"

extern char **environ;

enum { LIMIT_S = 60, BIG = 32 * 1024 * 1024 };

// One process of a case.
struct side {
    int index; // 0 or 1
    struct proxy proxy;
    int64_t until_ns;
};

// One comm in each direction.
struct pair {
    void *listener;
    unsigned char handle[NCCL_HANDLE_BYTES]; // of the other side's listener
    void *send;
    void *recv;
};

static inline void send_bytes(const void *data, size_t bytes) {
    CHECK(pair_send(data, bytes), "write: %s", strerror(errno));
}

static inline void receive_bytes(void *data, size_t bytes) {
    CHECK(pair_receive(data, bytes), "the other side has ended");
}

// Limits the send rate of this process's connections, so that BIG bytes are in flight for seconds.
static inline void send_slowly(void) {
    const unsigned long bytes_per_s = 8 * 1024 * 1024;
    int slowed = 0;
    for (int fd = SOCKET + 1; fd < 1024; fd++) {
        struct sockaddr_storage peer;
        socklen_t bytes = sizeof peer;
        if (getpeername(fd, (struct sockaddr *)&peer, &bytes) == 0 && peer.ss_family != AF_UNIX) {
            CHECK(setsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &bytes_per_s, sizeof bytes_per_s) == 0, "pacing: %s",
                  strerror(errno));
            slowed++;
        }
    }
    CHECK(slowed > 0, "no connection to pace");
}

// Waits until both sides have reached this point.
static inline void barrier(void) {
    char mine = 'm';
    send_bytes(&mine, 1);
    receive_bytes(&mine, 1);
}

static inline void check_time(const struct side *side, const char *what) {
    CHECK(nb_now_ns() < side->until_ns, "%s takes too long", what);
}

static inline void open_listener(struct side *side, struct pair *pair) {
    unsigned char handle[NCCL_HANDLE_BYTES];
    CHECK(proxy_listen(&side->proxy, 0, handle, &pair->listener) == 0, "listen");
    CHECK(pair->listener != NULL, "no listening comm");
    send_bytes(handle, sizeof handle);
    receive_bytes(pair->handle, sizeof pair->handle);
}

// Connects both directions from one thread, as NCCL does.
static inline void open_comms(struct side *side, struct pair *pair) {
    pair->send = NULL;
    pair->recv = NULL;
    while (pair->send == NULL || pair->recv == NULL) {
        if (pair->send == NULL) {
            CHECK(proxy_connect(&side->proxy, 0, pair->handle, &pair->send) == 0, "connect");
        }
        if (pair->recv == NULL) {
            CHECK(proxy_accept(&side->proxy, pair->listener, &pair->recv) == 0, "accept");
        }
        check_time(side, "connecting");
    }
}

static inline void open_pair(struct side *side, struct pair *pair) {
    open_listener(side, pair);
    open_comms(side, pair);
}

static inline void close_pair(struct side *side, struct pair *pair) {
    CHECK(proxy_close_send(&side->proxy, pair->send) == 0, "closeSend");
    CHECK(proxy_close_recv(&side->proxy, pair->recv) == 0, "closeRecv");
    CHECK(proxy_close_listen(&side->proxy, pair->listener) == 0, "closeListen");
}

// Makes bytes [at, at + n) of a message in memory that no other thread uses.
NO_TSAN static inline void make_bytes(unsigned char *made, int sender, int message, size_t at, size_t n) {
    for (size_t i = 0; i < n; i++) {
        made[i] = (unsigned char)((at + i) * 7 + ((at + i) >> 8) + (size_t)message * 31 + (size_t)sender * 101);
    }
}

static inline void fill(unsigned char *data, int sender, int message, size_t bytes) {
    unsigned char made[4096];
    for (size_t at = 0, n; at < bytes; at += n) {
        n = bytes - at < sizeof made ? bytes - at : sizeof made;
        make_bytes(made, sender, message, at, n);
        memcpy(data + at, made, n);
    }
}

static inline void check_bytes(const unsigned char *data, int sender, int message, size_t bytes) {
    unsigned char want[4096];
    for (size_t at = 0, n; at < bytes; at += n) {
        n = bytes - at < sizeof want ? bytes - at : sizeof want;
        make_bytes(want, sender, message, at, n);
        CHECK(memcmp(data + at, want, n) == 0, "message %d of %zu bytes differs in the %zu from %zu on", message, bytes,
              n, at);
    }
}

static inline bool has_failed(struct side *side, struct proxy_queue *queue) {
    int result = 0;
    int bytes = 0;
    while (proxy_poll(&side->proxy, queue, &bytes, &result) && result == 0) {
    }
    check_time(side, "an error");
    return result != 0;
}

// Finds a connected TCP socket of this process. lane: one that is neither to port `to` nor from port `mine`. Otherwise:
// the control connection, to port `to`.
static inline int find_connection(uint16_t to, uint16_t mine, bool lane) {
    for (int fd = SOCKET + 1; fd < 256; fd++) {
        struct sockaddr_in here = {0};
        struct sockaddr_in there = {0};
        socklen_t bytes = sizeof there;
        bool flow = getpeername(fd, (struct sockaddr *)&there, &bytes) == 0 && there.sin_family == AF_INET;
        bytes = sizeof here;
        flow = flow && getsockname(fd, (struct sockaddr *)&here, &bytes) == 0;
        bool control = ntohs(there.sin_port) == to;
        if (flow && (lane ? !control && ntohs(here.sin_port) != mine : control)) {
            return fd;
        }
    }
    return -1;
}

struct test_case {
    const char *name;
    void (*run)(struct side *side);
    bool all_versions;
    bool tcp_only;
    int killed;             // signal that ends side 1
    const char *timeout_s;  // NULL: the default
    const char *secrets[2]; // NULL: none
};

static const struct {
    int version;
    const void *table;
} tables[] = {{6, &ncclNetPlugin_v6},
              {8, &ncclNetPlugin_v8},
              {10, &ncclNetPlugin_v10},
              {11, &ncclNetPlugin_v11},
              {12, &ncclNetPlugin_v12}};

enum { TABLES = sizeof tables / sizeof tables[0] };

static inline int run_side(const struct test_case *test, int version, int index) {
    struct side side = {.index = index, .until_ns = nb_now_ns() + (int64_t)LIMIT_S * 1000000000};
    side.proxy.version = version;
    for (int i = 0; i < TABLES; i++) {
        side.proxy.table = tables[i].version == version ? tables[i].table : side.proxy.table;
    }
    int count = 0;
    CHECK(proxy_init(&side.proxy, 77) == 0, "init");
    CHECK(proxy_v6(&side.proxy)->devices(&count) == 0 && count == 1, "%d devices", count);
    test->run(&side);
    CHECK(proxy_finalize(&side.proxy) == 0, "finalize");
    return 0;
}

static inline pid_t start(const char *program, const char *network, const struct test_case *test, int version,
                          int index, int fd) {
    char numbers[2][8];
    snprintf(numbers[0], sizeof numbers[0], "%d", version);
    snprintf(numbers[1], sizeof numbers[1], "%d", index);
    char *argv[] = {(char *)program, (char *)network, (char *)test->name, numbers[0], numbers[1], NULL};
    posix_spawn_file_actions_t actions;
    pid_t pid = -1;
    setenv("NETBOTTLENECK_TRANSPORT", network, 1);
    setenv("NETBOTTLENECK_IFNAME", "lo", 1);
    setenv("NETBOTTLENECK_TIMEOUT_S", test->timeout_s != NULL ? test->timeout_s : "30", 1);
    setenv("NETBOTTLENECK_SECRET", test->secrets[index] != NULL ? test->secrets[index] : "", 1);
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, fd, SOCKET);
    CHECK(posix_spawn(&pid, program, &actions, NULL, argv, environ) == 0, "cannot start %s", program);
    posix_spawn_file_actions_destroy(&actions);
    return pid;
}

static inline void run_case(const char *program, const char *network, const struct test_case *test, int version) {
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "socketpair");
    int fds[2] = {fcntl(ends[0], F_DUPFD_CLOEXEC, 10), fcntl(ends[1], F_DUPFD_CLOEXEC, 10)};
    close(ends[0]);
    close(ends[1]);
    int64_t began = nb_now_ns();
    pid_t pids[2];
    for (int i = 0; i < 2; i++) {
        pids[i] = start(program, network, test, version, i, fds[i]);
    }
    close(fds[0]);
    close(fds[1]);
    for (int i = 0; i < 2; i++) {
        int status = -1;
        CHECK(waitpid(pids[i], &status, 0) == pids[i], "waitpid");
        bool as_planned = i == 1 && test->killed != 0 ? WIFSIGNALED(status) && WTERMSIG(status) == test->killed
                                                      : WIFEXITED(status) && WEXITSTATUS(status) == 0;
        CHECK(as_planned, "%s, version %d, over %s: side %d ended with status %#x", test->name, version, network, i,
              (unsigned)status);
    }
    printf("%s v%d %s: %.2f s\n", test->name, version, network, (double)(nb_now_ns() - began) / 1e9);
    fflush(stdout);
}

static inline int run_cases(int argc, char **argv, const struct test_case *cases, int count) {
    const char *network = argc > 1 ? argv[1] : "tcp";
    if (nb_transport_find(network) == NULL) {
        SKIP("%s left out of this build", network);
    }
    for (int i = 0; i < count; i++) {
        bool wanted = argc <= 2 || strcmp(argv[2], cases[i].name) == 0;
        if (wanted && argc == 5) {
            return run_side(&cases[i], atoi(argv[3]), atoi(argv[4]));
        }
        for (int t = 0; wanted && t < TABLES && !(cases[i].tcp_only && strcmp(network, "tcp") != 0); t++) {
            bool newest = t == TABLES - 1;
            bool all = cases[i].all_versions && strcmp(network, "tcp") == 0; // each network has the same tables
            if (argc > 3 ? tables[t].version == atoi(argv[3]) : all || newest) {
                run_case(argv[0], network, &cases[i], tables[t].version);
            }
        }
    }
    return 0;
}

#endif
