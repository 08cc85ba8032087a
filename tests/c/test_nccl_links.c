// Links of the NCCL net plugin: how they open, end and fail. Some cases reach into the plugin, to fix the order of events.
#include <arpa/inet.h>
#include <pthread.h>

#include "nccl_sides.h"

enum { HELLO_BYTES = 152, ANSWER_BYTES = 152 };

static int connect_to_handle(const struct nb_net_handle *handle) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(handle->port)};
    CHECK(handle->family == AF_INET, "not IPv4");
    memcpy(&to.sin_addr, handle->address, sizeof to.sin_addr);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0 && connect(fd, (struct sockaddr *)&to, sizeof to) == 0, "connect: %s", strerror(errno));
    return fd;
}

// Binds a socket, whose address the handle then has. Connections to it are refused until it listens.
static int bind_in_place(unsigned char opaque[NCCL_HANDLE_BYTES]) {
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_addr = {.s_addr = htonl(INADDR_LOOPBACK)}};
    socklen_t bytes = sizeof here;
    struct nb_net_handle handle;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0 && bind(fd, (struct sockaddr *)&here, sizeof here) == 0, "bind: %s", strerror(errno));
    CHECK(getsockname(fd, (struct sockaddr *)&here, &bytes) == 0, "getsockname: %s", strerror(errno));
    memcpy(&handle, opaque, sizeof handle);
    memcpy(handle.address, &here.sin_addr, sizeof here.sin_addr);
    handle.port = ntohs(here.sin_port);
    memcpy(opaque, &handle, sizeof handle);
    return fd;
}

static void read_bytes(int fd, void *data, size_t bytes) {
    CHECK(recv(fd, data, bytes, MSG_WAITALL) == (ssize_t)bytes, "recv: %s", strerror(errno));
}

// Accepts a connection of this process's plugin, whose helper thread makes progress meanwhile, and reads its hello.
static int accept_hello(int listener, unsigned char hello[HELLO_BYTES]) {
    int fd = accept(listener, NULL, NULL);
    CHECK(fd >= 0, "accept: %s", strerror(errno));
    read_bytes(fd, hello, HELLO_BYTES);
    return fd;
}

static void expect_no_comm(struct side *side, unsigned char handle[NCCL_HANDLE_BYTES]) {
    void *comm = NULL;
    CHECK(proxy_connect(&side->proxy, 0, handle, &comm) == 0, "connect: %s", proxy_warning);
    CHECK(comm == NULL, "connected");
}

// The peer answers the hello and resets the connection before the join is sent: the link connects again.
static void case_reset_after_answer(struct side *side) {
    const struct linger at_once = {.l_onoff = 1, .l_linger = 0};
    unsigned char hello[HELLO_BYTES];
    unsigned char answer[ANSWER_BYTES];
    struct pair pair;
    struct nb_net_handle handle;
    open_listener(side, &pair);
    memcpy(&handle, pair.handle, sizeof handle);
    if (side->index == 0) {
        int listener = bind_in_place(pair.handle);
        CHECK(listen(listener, 2) == 0, "listen: %s", strerror(errno));
        expect_no_comm(side, pair.handle);
        int fd = accept_hello(listener, hello);
        int peer = connect_to_handle(&handle); // gives the answer to this hello
        CHECK(send(peer, hello, sizeof hello, MSG_NOSIGNAL) == (ssize_t)sizeof hello, "send: %s", strerror(errno));
        read_bytes(peer, answer, sizeof answer);
        struct nb_net *net = nb_net_current();
        pthread_mutex_lock(&net->lock); // the plugin sees the answer and the reset together
        CHECK(send(fd, answer, sizeof answer, MSG_NOSIGNAL) == (ssize_t)sizeof answer, "send: %s", strerror(errno));
        CHECK(setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once) == 0, "linger: %s", strerror(errno));
        close(fd);
        pthread_mutex_unlock(&net->lock);
        fd = accept_hello(listener, hello);
        expect_no_comm(side, pair.handle);
        close(fd);
        close(peer);
        close(listener);
    }
    barrier();
    CHECK(proxy_close_listen(&side->proxy, pair.listener) == 0, "closeListen");
}

static const struct test_case cases[] = {
    {.name = "reset_after_answer", .run = case_reset_after_answer},
};

int main(int argc, char **argv) {
    return run_cases(argc, argv, cases, sizeof cases / sizeof cases[0]);
}
