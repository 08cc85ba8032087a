// Links of the NCCL net plugin: how they open late, end and fail. Some cases reach into it, to fix the order of events.
#include <arpa/inet.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <time.h>

#include "nccl_sides.h"
#include "transport/lanes.h"

enum { HELLO_BYTES = 152, ANSWER_BYTES = 152, PROOF_BYTES = 32, READ_S = 20 };

static atomic_bool lanes_held;  // opening lanes does not return
static atomic_bool never_armed; // lanes cannot wake the helper thread
static atomic_int arms;         // calls of nb_lanes_arm
static atomic_int sleeps;
static atomic_bool sleep_held; // the helper thread does not begin to sleep
static atomic_bool sleep_entered;
static atomic_bool sleep_endless; // it sleeps until it is woken
static atomic_bool end_held;      // the end of a net does not return
static atomic_bool end_entered;
static atomic_bool map_fails; // memory cannot be registered

int __real_nb_lanes_map(struct nb_lanes *lanes, void *base, size_t bytes, struct nb_error *err);
int __wrap_nb_lanes_map(struct nb_lanes *lanes, void *base, size_t bytes, struct nb_error *err);
bool __real_nb_links_leaving(const struct nb_net *net, bool *unsent);
bool __wrap_nb_links_leaving(const struct nb_net *net, bool *unsent);
int __real_nb_lanes_arm(struct nb_lanes *lanes);
int __wrap_nb_lanes_arm(struct nb_lanes *lanes);
int __real_nb_loop_wait(struct nb_loop *loop, int timeout_ms);
int __wrap_nb_loop_wait(struct nb_loop *loop, int timeout_ms);
int __real_nanosleep(const struct timespec *duration, struct timespec *left);
int __wrap_nanosleep(const struct timespec *duration, struct timespec *left);

int __wrap_nb_lanes_map(struct nb_lanes *lanes, void *base, size_t bytes, struct nb_error *err) {
    return atomic_load(&map_fails) ? nb_fail(err, -ENOMEM, "not in this test")
                                   : __real_nb_lanes_map(lanes, base, bytes, err);
}

bool __wrap_nb_links_leaving(const struct nb_net *net, bool *unsent) {
    atomic_store(&end_entered, true);
    while (atomic_load(&end_held)) {
    }
    return __real_nb_links_leaving(net, unsent);
}

int __wrap_nb_lanes_arm(struct nb_lanes *lanes) {
    atomic_fetch_add(&arms, 1);
    return atomic_load(&never_armed) ? -EAGAIN : __real_nb_lanes_arm(lanes);
}

int __wrap_nb_loop_wait(struct nb_loop *loop, int timeout_ms) {
    if (timeout_ms == 0) {
        return __real_nb_loop_wait(loop, timeout_ms);
    }
    atomic_fetch_add(&sleeps, 1);
    while (atomic_load(&sleep_held)) {
        atomic_store(&sleep_entered, true);
    }
    return __real_nb_loop_wait(loop, atomic_load(&sleep_endless) ? -1 : timeout_ms);
}

int __wrap_nanosleep(const struct timespec *duration, struct timespec *left) {
    atomic_fetch_add(&sleeps, 1);
    return __real_nanosleep(duration, left);
}

int __real_nb_lanes_open(struct nb_lanes **lanes, const struct nb_lanes_config *config, struct nb_error *err);
int __wrap_nb_lanes_open(struct nb_lanes **lanes, const struct nb_lanes_config *config, struct nb_error *err);

int __wrap_nb_lanes_open(struct nb_lanes **lanes, const struct nb_lanes_config *config, struct nb_error *err) {
    while (atomic_load(&lanes_held)) {
    }
    return __real_nb_lanes_open(lanes, config, err);
}

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
    const struct timeval limit = {.tv_sec = READ_S};
    CHECK(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0, "timeout: %s", strerror(errno));
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
        struct nb_net *net = nb_net_current(NB_NET_PLAIN);
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

// The link that this process opens.
static struct nb_link *outgoing_link(struct nb_net *net) {
    NB_LIST_EACH(it, &net->links) {
        struct nb_link *link = NB_CONTAINER(it, struct nb_link, at_net);
        if (link->outgoing) {
            return link;
        }
    }
    CHECK(false, "no link");
    return NULL;
}

// A link of this process to itself, with this program between: opening its lanes does not return until lanes_held is false.
struct held_link {
    struct pair pair;
    int listener;
    int from; // the plugin's connection
    int peer; // to the plugin
};

// The proof leaves before the lanes are opened, which takes long: the peer waits for it for 2 s only.
static void hold_opening(struct side *side, struct held_link *held) {
    unsigned char hello[HELLO_BYTES];
    unsigned char answer[ANSWER_BYTES];
    unsigned char proof[PROOF_BYTES];
    struct nb_net_handle handle;
    memcpy(&handle, held->pair.handle, sizeof handle);
    held->listener = bind_in_place(held->pair.handle);
    CHECK(listen(held->listener, 2) == 0, "listen: %s", strerror(errno));
    expect_no_comm(side, held->pair.handle);
    held->from = accept_hello(held->listener, hello);
    held->peer = connect_to_handle(&handle); // gives the answer to this hello
    CHECK(send(held->peer, hello, sizeof hello, MSG_NOSIGNAL) == (ssize_t)sizeof hello, "send: %s", strerror(errno));
    read_bytes(held->peer, answer, sizeof answer);
    atomic_store(&lanes_held, true);
    CHECK(send(held->from, answer, sizeof answer, MSG_NOSIGNAL) == (ssize_t)sizeof answer, "send: %s", strerror(errno));
    read_bytes(held->from, proof, sizeof proof);
}

static void close_held(struct held_link *held) {
    close(held->from);
    close(held->peer);
    close(held->listener);
}

static void case_proof_before_lanes(struct side *side) {
    struct held_link held;
    open_listener(side, &held.pair);
    if (side->index == 0) {
        hold_opening(side, &held);
        atomic_store(&lanes_held, false);
        close_held(&held);
    }
    barrier();
    CHECK(proxy_close_listen(&side->proxy, held.pair.listener) == 0, "closeListen");
}

static bool opens_apart(void) {
    return nb_net_current(NB_NET_PLAIN)->settings.transport->kind == NB_LANE_RMA;
}

static void await_opening(struct side *side) {
    for (struct nb_net *net = nb_net_current(NB_NET_PLAIN);;) {
        pthread_mutex_lock(&net->lock);
        bool opening = net->opening != NULL;
        pthread_mutex_unlock(&net->lock);
        if (opening) {
            return;
        }
        check_time(side, "opening");
    }
}

// The connection ends while the lanes are opened: the link connects again, and these lanes are dropped.
static void case_reset_while_opening(struct side *side) {
    unsigned char hello[HELLO_BYTES];
    struct held_link held;
    open_listener(side, &held.pair);
    if (side->index == 0 && opens_apart()) {
        struct nb_net *net = nb_net_current(NB_NET_PLAIN);
        hold_opening(side, &held);
        await_opening(side);
        close(held.from);
        for (bool lost = false; !lost;) {
            expect_no_comm(side, held.pair.handle); // makes progress
            pthread_mutex_lock(&net->lock);
            lost = net->opening->state != NB_LINK_OPENING;
            pthread_mutex_unlock(&net->lock);
            check_time(side, "the end of the connection");
        }
        atomic_store(&lanes_held, false);
        held.from = accept_hello(held.listener, hello);
        for (bool opening = true; opening;) {
            pthread_mutex_lock(&net->lock);
            opening = net->opening != NULL;
            CHECK(outgoing_link(net)->lanes == NULL, "lanes of the lost connection");
            pthread_mutex_unlock(&net->lock);
            check_time(side, "opening");
        }
        close_held(&held);
    }
    barrier();
    CHECK(proxy_close_listen(&side->proxy, held.pair.listener) == 0, "closeListen");
}

// The link ends while its lanes are opened, as NCCL gives up the connection: it is freed later.
static void case_given_up_while_opening(struct side *side) {
    struct held_link held;
    open_listener(side, &held.pair);
    if (side->index == 0 && opens_apart()) {
        struct nb_net *net = nb_net_current(NB_NET_PLAIN);
        void *comm = NULL;
        hold_opening(side, &held);
        await_opening(side);
        for (bool ended = false, gone = false; !gone;) {
            (void)proxy_accept(&side->proxy, held.pair.listener, &comm); // makes progress
            pthread_mutex_lock(&net->lock);
            ended = ended || (net->opening != NULL && net->opening->state == NB_LINK_ENDED);
            gone = nb_list_empty(&net->links);
            pthread_mutex_unlock(&net->lock);
            CHECK(ended || !gone, "freed while its lanes are opened");
            atomic_store(&lanes_held, !ended);
            check_time(side, "the end of a connection that was given up");
        }
        close_held(&held);
    }
    barrier();
    CHECK(proxy_close_listen(&side->proxy, held.pair.listener) == 0, "closeListen");
}

// A peer with another version of the protocol gets an answer that names this side's.
static void case_other_protocol(struct side *side) {
    enum { OTHER = 99, HELLO_LISTENER = 48 };
    struct {
        int32_t code;
        uint32_t version;
        unsigned char rest[ANSWER_BYTES - 8];
    } answer = {0};
    const uint32_t head[2] = {0x4e424e4c, OTHER}; // magic, version
    unsigned char hello[HELLO_BYTES] = {0};
    struct pair pair;
    struct nb_net_handle handle;
    open_listener(side, &pair);
    memcpy(&handle, pair.handle, sizeof handle);
    memcpy(hello, head, sizeof head);
    memcpy(hello + HELLO_LISTENER, &handle.listener, sizeof handle.listener);
    int peer = connect_to_handle(&handle);
    CHECK(send(peer, hello, sizeof hello, MSG_NOSIGNAL) == (ssize_t)sizeof hello, "send: %s", strerror(errno));
    read_bytes(peer, &answer, sizeof answer);
    CHECK(answer.code == NB_EMISMATCH && answer.version != 0 && answer.version != OTHER, "code %d, version %u",
          answer.code, answer.version);
    close(peer);
    barrier();
    CHECK(proxy_close_listen(&side->proxy, pair.listener) == 0, "closeListen");
}

// A try to connect that fails at once, here for lack of descriptors, is followed by others.
static void case_no_descriptors(struct side *side) {
    unsigned char hello[HELLO_BYTES];
    struct rlimit limit;
    struct pair pair;
    open_listener(side, &pair);
    if (side->index == 0) {
        struct nb_net *net = nb_net_current(NB_NET_PLAIN);
        int listener = bind_in_place(pair.handle);
        CHECK(listen(listener, 2) == 0, "listen: %s", strerror(errno));
        expect_no_comm(side, pair.handle);
        int fd = accept_hello(listener, hello);
        CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0, "getrlimit: %s", strerror(errno));
        const struct rlimit none = {.rlim_cur = 0, .rlim_max = limit.rlim_max};
        CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0, "setrlimit: %s", strerror(errno));
        close(fd);
        for (int code = 0; code != -EMFILE;) {
            expect_no_comm(side, pair.handle);
            check_time(side, "a try without descriptors");
            pthread_mutex_lock(&net->lock);
            code = outgoing_link(net)->connect_code;
            pthread_mutex_unlock(&net->lock);
        }
        CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0, "setrlimit: %s", strerror(errno));
        close(accept_hello(listener, hello));
        close(listener);
    }
    barrier();
    CHECK(proxy_close_listen(&side->proxy, pair.listener) == 0, "closeListen");
}

// So is the first try.
static void case_no_descriptors_at_first(struct side *side) {
    unsigned char hello[HELLO_BYTES];
    struct rlimit limit;
    struct pair pair;
    open_listener(side, &pair);
    if (side->index == 0) {
        int listener = bind_in_place(pair.handle);
        CHECK(listen(listener, 2) == 0, "listen: %s", strerror(errno));
        CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0, "getrlimit: %s", strerror(errno));
        const struct rlimit none = {.rlim_cur = 0, .rlim_max = limit.rlim_max};
        CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0, "setrlimit: %s", strerror(errno));
        expect_no_comm(side, pair.handle);
        CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0, "setrlimit: %s", strerror(errno));
        close(accept_hello(listener, hello));
        close(listener);
    }
    barrier();
    CHECK(proxy_close_listen(&side->proxy, pair.listener) == 0, "closeListen");
}

// No link within NETBOTTLENECK_TIMEOUT_S: the log has the reason of the last try.
static void case_refused(struct side *side) {
    struct pair pair;
    void *comm = NULL;
    open_listener(side, &pair);
    int refusing = bind_in_place(pair.handle);
    for (int rc = 0; rc == 0;) {
        rc = proxy_connect(&side->proxy, 0, pair.handle, &comm);
        CHECK(comm == NULL, "connected");
        check_time(side, "an error");
    }
    CHECK(strstr(proxy_warning, strerror(ECONNREFUSED)) != NULL, "the log has no reason: %s", proxy_warning);
    close(refusing);
    barrier();
    CHECK(proxy_close_listen(&side->proxy, pair.listener) == 0, "closeListen");
}

// A connection that begins wakes the helper thread, although the call that begins it handles all events itself.
static void case_wakes_helper(struct side *side) {
    struct pair pair;
    open_listener(side, &pair);
    if (side->index == 0) {
        int refusing = bind_in_place(pair.handle);
        atomic_store(&sleep_endless, true);
        atomic_store(&sleep_held, true);
        while (!atomic_load(&sleep_entered)) {
            check_time(side, "the helper thread's sleep");
        }
        expect_no_comm(side, pair.handle);
        int slept = atomic_load(&sleeps);
        atomic_store(&sleep_held, false);
        while (atomic_load(&sleeps) == slept) {
            check_time(side, "the helper thread's next pass");
        }
        atomic_store(&sleep_endless, false);
        close(refusing);
    }
    barrier();
    CHECK(proxy_close_listen(&side->proxy, pair.listener) == 0, "closeListen");
}

// NCCL gives up a connection to a handle that nothing serves any more. The next one to the same process opens.
static void case_given_up(struct side *side) {
    unsigned char gone[NCCL_HANDLE_BYTES];
    struct pair pair;
    open_listener(side, &pair);
    memcpy(gone, pair.handle, sizeof gone);
    int refusing = bind_in_place(gone);
    expect_no_comm(side, gone);
    open_comms(side, &pair);
    close(refusing);
    barrier();
    close_pair(side, &pair);
}

// A connection that NCCL gives up is dropped, and with it its link.
static void case_given_up_alone(struct side *side) {
    struct pair pair;
    struct nb_net *net = nb_net_current(NB_NET_PLAIN);
    open_listener(side, &pair);
    int refusing = bind_in_place(pair.handle);
    expect_no_comm(side, pair.handle);
    for (bool dropped = false; !dropped;) {
        pthread_mutex_lock(&net->lock);
        dropped = nb_list_empty(&net->connecting) && nb_list_empty(&net->links);
        pthread_mutex_unlock(&net->lock);
        check_time(side, "the end of a connection that was given up");
    }
    close(refusing);
    barrier();
    CHECK(proxy_close_listen(&side->proxy, pair.listener) == 0, "closeListen");
}

static void expect_warning(int rc, const char *text) {
    CHECK(rc != 0, "accepted");
    CHECK(strstr(proxy_warning, text) != NULL, "the log has no '%s': %s", text, proxy_warning);
    proxy_warning[0] = '\0';
}

// What a call refuses is in the log.
static void case_refusals(struct side *side) {
    const size_t too_large = (size_t)NB_NET_BYTES_MAX + 1;
    struct pair pair;
    struct nb_net_handle handle;
    unsigned char opaque[NCCL_HANDLE_BYTES] = {0};
    void *comm = NULL;
    void *request = NULL;
    char byte = 0;
    expect_warning(proxy_connect(&side->proxy, 0, opaque, &comm), "not of this plugin");
    open_pair(side, &pair);
    memcpy(&handle, pair.handle, sizeof handle);
    handle.family = AF_UNSPEC;
    handle.process[0] ^= 1; // of which there is no link
    memcpy(opaque, &handle, sizeof handle);
    expect_warning(proxy_connect(&side->proxy, 0, opaque, &comm), "holds no address");
    expect_warning(proxy_isend(&side->proxy, pair.send, &byte, too_large, &request), "1073741825 bytes");
    expect_warning(proxy_irecv(&side->proxy, pair.recv, &byte, too_large, &request), "1073741825 bytes");
    barrier();
    if (side->index == 0) {
        close_pair(side, &pair);
        barrier();
        return;
    }
    struct nb_net *net = nb_net_current(NB_NET_PLAIN);
    for (bool ended = false; !ended;) {
        pthread_mutex_lock(&net->lock);
        ended = ((const struct nb_net_comm *)pair.send)->ended;
        pthread_mutex_unlock(&net->lock);
        check_time(side, "the end of the peer's comms");
    }
    expect_warning(proxy_isend(&side->proxy, pair.send, &byte, 1, &request), "has closed its end");
    barrier();
    close_pair(side, &pair);
}

// Slows the control connection to a listener down, so that most of what is sent waits in the plugin for a second.
static void slow_control(uint16_t port) {
    const int room = 8 * 1024;
    const unsigned long bytes_per_s = 128 * 1024;
    int fd = find_connection(port, 0, false);
    CHECK(fd >= 0, "control connection not found");
    CHECK(setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &room, sizeof room) == 0, "buffer: %s", strerror(errno));
    CHECK(setsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &bytes_per_s, sizeof bytes_per_s) == 0, "pacing: %s",
          strerror(errno));
}

static void finish(struct side *side, void *request) {
    for (int done = 0; !done;) {
        CHECK(proxy_test(&side->proxy, request, &done, NULL) == 0, "test: %s", proxy_warning);
        check_time(side, "a transfer");
    }
}

// Small sends over a slow control connection arrive, although their side closes and ends as soon as they are done.
static void case_end_after_slow_sends(struct side *side) {
    enum { MESSAGES = NB_NET_REQUESTS, BYTES = NB_NET_INLINE };
    static unsigned char data[MESSAGES][BYTES];
    struct pair pair;
    struct nb_net_handle handle;
    void *requests[MESSAGES] = {NULL};
    open_pair(side, &pair);
    memcpy(&handle, pair.handle, sizeof handle);
    for (int i = 0; side->index == 1 && i < MESSAGES; i++) {
        CHECK(proxy_irecv(&side->proxy, pair.recv, data[i], BYTES, &requests[i]) == 0, "irecv");
    }
    barrier();
    if (side->index == 0) {
        slow_control(handle.port);
    }
    for (int i = 0; side->index == 0 && i < MESSAGES; i++) {
        fill(data[i], 0, i, BYTES);
        CHECK(proxy_isend(&side->proxy, pair.send, data[i], BYTES, &requests[i]) == 0, "isend");
    }
    for (int i = 0; i < MESSAGES; i++) {
        CHECK(requests[i] != NULL, "request %d is refused", i);
        finish(side, requests[i]);
        check_bytes(data[i], 0, i, BYTES);
    }
    close_pair(side, &pair);
}

// The accepted control connection of this process's listener.
static int accepted_connection(uint16_t port) {
    for (int fd = SOCKET + 1; fd < 256; fd++) {
        struct sockaddr_in there = {0};
        struct sockaddr_in here = {0};
        socklen_t bytes = sizeof there;
        bool connected = getpeername(fd, (struct sockaddr *)&there, &bytes) == 0;
        bytes = sizeof here;
        if (connected && getsockname(fd, (struct sockaddr *)&here, &bytes) == 0 && ntohs(here.sin_port) == port) {
            return fd;
        }
    }
    return -1;
}

static void await_flow(struct side *side, void *request) {
    struct nb_net *net = nb_net_current(NB_NET_PLAIN);
    for (long flows = 0; flows == 0;) {
        int done = 0;
        CHECK(proxy_test(&side->proxy, request, &done, NULL) == 0 && !done, "the transfer is not in flight");
        pthread_mutex_lock(&net->lock);
        flows = outgoing_link(net)->flows;
        pthread_mutex_unlock(&net->lock);
        check_time(side, "the begin of a transfer");
    }
}

// A sender that sees the peer's end before the report that its last transfer has landed waits for the report.
static void end_before_report(struct side *side, bool orderly) {
    const struct {
        uint32_t type;
        uint32_t comm;
        uint64_t rest[2];
    } closed = {.type = 2, .comm = 1}; // the peer closes its end of the link's only comm
    struct pair pair;
    struct nb_net_handle handle;
    void *request = NULL;
    uint16_t port = 0; // of this side's listener
    open_pair(side, &pair);
    memcpy(&handle, pair.handle, sizeof handle);
    send_bytes(&handle.port, sizeof handle.port);
    receive_bytes(&port, sizeof port);
    unsigned char *data = calloc(1, BIG);
    CHECK(data != NULL, "memory");
    if (side->index == 1) {
        CHECK(proxy_irecv(&side->proxy, pair.recv, data, BIG, &request) == 0, "irecv");
        barrier();
        int control = accepted_connection(port);
        CHECK(control >= 0, "control connection not found");
        CHECK(!orderly || send(control, &closed, sizeof closed, MSG_NOSIGNAL) == (ssize_t)sizeof closed, "send");
        barrier();
    } else {
        fill(data, 0, 0, BIG);
        send_slowly();
        CHECK(proxy_isend(&side->proxy, pair.send, data, BIG, &request) == 0 && request != NULL, "isend");
        await_flow(side, request);
        barrier();
        barrier(); // the peer's message is here
        CHECK(shutdown(find_connection(handle.port, 0, false), SHUT_RD) == 0, "shutdown: %s", strerror(errno));
    }
    finish(side, request);
    check_bytes(data, 0, 0, BIG);
    barrier();
    close_pair(side, &pair);
    free(data);
}

static void case_end_before_report(struct side *side) {
    end_before_report(side, true);
}

// The peer's process exits without a close.
static void case_exit_before_report(struct side *side) {
    end_before_report(side, false);
}

// A comm that is closed with a transfer in flight ends the link of another comm: this side's log says so.
static void case_cut_off(struct side *side) {
    struct pair pairs[2];
    unsigned char byte = 0;
    int result = 0;
    open_pair(side, &pairs[0]);
    pairs[1] = pairs[0];
    open_comms(side, &pairs[1]);
    unsigned char *data = calloc(1, BIG);
    CHECK(data != NULL, "memory");
    struct proxy_queue large = {.comm = side->index == 0 ? pairs[0].send : pairs[0].recv, .sends = side->index == 0};
    struct proxy_queue small = {.comm = side->index == 0 ? pairs[1].send : pairs[1].recv, .sends = side->index == 0};
    if (side->index == 0) {
        send_slowly();
        for (int i = 0; i <= NB_NET_EARLY; i++) { // the last one has no receive
            CHECK(proxy_post(&side->proxy, &small, &byte, 1, &result), "isend");
        }
    }
    CHECK(proxy_post(&side->proxy, &large, data, BIG, &result), "post");
    if (side->index == 0) {
        await_flow(side, large.requests[0]);
        barrier();
        CHECK(proxy_close_send(&side->proxy, pairs[0].send) == 0, "closeSend");
        while (!has_failed(side, &small)) {
        }
        CHECK(strstr(proxy_warning, "a connection was closed with a transfer in flight") != NULL,
              "the log has no reason: %s", proxy_warning);
    } else {
        barrier();
        while (!has_failed(side, &large)) {
        }
        CHECK(proxy_close_send(&side->proxy, pairs[0].send) == 0, "closeSend");
    }
    CHECK(proxy_close_recv(&side->proxy, pairs[0].recv) == 0, "closeRecv");
    barrier();
    close_pair(side, &pairs[1]);
    free(data);
}

// Lanes that cannot wake the helper thread: it sleeps between its passes all the same, and transfers end.
static void case_no_wait(struct side *side) {
    enum { ARMS = 100 }; // two in a pass, as there are two links
    struct pair pair;
    void *request = NULL;
    unsigned char *data = calloc(1, BIG);
    CHECK(data != NULL, "memory");
    open_pair(side, &pair);
    atomic_store(&never_armed, true);
    for (int round = 0; round < 2; round++) {
        int until = atomic_load(&arms) + ARMS;
        int slept = atomic_load(&sleeps);
        while (atomic_load(&arms) < until) {
            check_time(side, "passes of the helper thread");
        }
        slept = atomic_load(&sleeps) - slept;
        CHECK(slept >= ARMS / 4, "%d sleeps for %d looks at lanes", slept, ARMS);
        if (round == 0) {
            barrier();
            fill(data, 0, 0, side->index == 0 ? BIG : 0);
            CHECK(side->index == 0 ? proxy_isend(&side->proxy, pair.send, data, BIG, &request) == 0
                                   : proxy_irecv(&side->proxy, pair.recv, data, BIG, &request) == 0,
                  "post");
        }
    }
    finish(side, request);
    check_bytes(data, 0, 0, BIG);
    barrier();
    close_pair(side, &pair);
    free(data);
}

// A transfer that was announced and does not move fails, although others on the link do.
static void case_one_stands_still(struct side *side) {
    enum { BYTES = 300 * 1000 };
    static unsigned char data[2][BYTES];
    struct pair pairs[2];
    struct nb_net_handle handle;
    int result = 0;
    open_pair(side, &pairs[0]);
    pairs[1] = pairs[0];
    open_comms(side, &pairs[1]);
    memcpy(&handle, pairs[0].handle, sizeof handle);
    struct proxy_queue still = {.comm = pairs[0].recv};
    struct proxy_queue moving = {.comm = side->index == 0 ? pairs[1].send : pairs[1].recv, .sends = side->index == 0};
    CHECK(side->index == 0 || proxy_post(&side->proxy, &still, data[0], BYTES, &result), "irecv");
    barrier();
    if (side->index == 0) {
        struct {
            uint32_t type;
            uint32_t comm;
            uint64_t op;
            uint64_t bytes;
        } announced = {.type = 4, .comm = 1, .bytes = BYTES};
        struct nb_net *net = nb_net_current(NB_NET_PLAIN);
        pthread_mutex_lock(&net->lock);
        announced.op = ++outgoing_link(net)->next_op; // which the lanes do not have
        CHECK(write(find_connection(handle.port, 0, false), &announced, sizeof announced) == sizeof announced, "write");
        pthread_mutex_unlock(&net->lock);
    }
    while (!has_failed(side, side->index == 0 ? &moving : &still)) {
        bool failed = moving.count < 2 && !proxy_post(&side->proxy, &moving, data[1], BYTES, &result) && result != 0;
        if (failed || (side->index == 1 && has_failed(side, &moving))) {
            break;
        }
    }
    CHECK(side->index == 0 || strstr(proxy_warning, "no byte of a transfer") != NULL, "the log has no reason: %s",
          proxy_warning);
    barrier();
    close_pair(side, &pairs[1]);
    CHECK(proxy_close_send(&side->proxy, pairs[0].send) == 0, "closeSend");
    CHECK(proxy_close_recv(&side->proxy, pairs[0].recv) == 0, "closeRecv");
}

// A stopped peer is silent since it stopped, not since the last send that this process's kernel took.
static void case_stop_before_send(struct side *side) {
    enum { BYTES = 64, SILENT_S = 4 };
    struct pair pairs[2];
    pid_t pid = getpid();
    int result = 0;
    int ignored;
    void *early = NULL;
    char *data = calloc(1, BIG);
    CHECK(data != NULL, "memory");
    open_pair(side, &pairs[0]);
    pairs[1] = pairs[0];
    open_comms(side, &pairs[1]);
    struct proxy_queue large = {.comm = side->index == 0 ? pairs[0].send : pairs[0].recv, .sends = side->index == 0};
    barrier();
    if (side->index == 1) {
        send_bytes(&pid, sizeof pid);
        CHECK(proxy_post(&side->proxy, &large, data, BIG, &result), "irecv");
        for (;;) {
            (void)proxy_poll(&side->proxy, &large, &ignored, &result);
        }
    }
    receive_bytes(&pid, sizeof pid);
    send_slowly();
    CHECK(proxy_post(&side->proxy, &large, data, BIG, &result), "isend");
    await_flow(side, large.requests[0]);
    int64_t stopped_ns = nb_now_ns();
    CHECK(kill(pid, SIGSTOP) == 0, "kill");
    while (nb_now_ns() - stopped_ns < (int64_t)1500 * 1000000) {
        CHECK(!has_failed(side, &large), "an error before the deadline");
    }
    int64_t sent_ns = nb_now_ns();
    CHECK(proxy_isend(&side->proxy, pairs[1].send, data, BYTES, &early) == 0, "isend");
    finish(side, early);
    while (!has_failed(side, &large)) {
    }
    double since_s = (double)(nb_now_ns() - sent_ns) / 1e9;
    double silent_s = 0;
    const char *found = strstr(proxy_warning, "has been silent for ");
    if (found == NULL && strstr(proxy_warning, "(Connection timed out)") != NULL) {
        silent_s = SILENT_S; // the kernel has the same limit, and may notice first
    } else {
        CHECK(found != NULL && sscanf(found, "has been silent for %lf s", &silent_s) == 1, "the log has no reason: %s",
              proxy_warning);
    }
    CHECK(silent_s > since_s, "silent for %.1f s, and a send left %.1f s ago", silent_s, since_s);
    (void)kill(pid, SIGKILL);
    close_pair(side, &pairs[0]);
    CHECK(proxy_close_send(&side->proxy, pairs[1].send) == 0, "closeSend");
    CHECK(proxy_close_recv(&side->proxy, pairs[1].recv) == 0, "closeRecv");
    free(data);
}

// A context serves after its finalize, as NCCL 2.28.3 uses it, while another of its kind is open.
static void case_finalized_context(struct side *side) {
    enum { BYTES = 100 * 1000 };
    struct side other = *side;
    struct pair pair;
    void *requests[2] = {NULL, NULL};
    static unsigned char sent[BYTES];
    static unsigned char got[BYTES];
    CHECK(proxy_init(&other.proxy, 78) == 0, "init");
    CHECK(proxy_finalize(&other.proxy) == 0, "finalize");
    open_pair(&other, &pair);
    fill(sent, side->index, 0, BYTES);
    CHECK(proxy_irecv(&other.proxy, pair.recv, got, BYTES, &requests[0]) == 0 && requests[0] != NULL, "irecv");
    CHECK(proxy_isend(&other.proxy, pair.send, sent, BYTES, &requests[1]) == 0 && requests[1] != NULL, "isend");
    finish(&other, requests[0]);
    finish(&other, requests[1]);
    check_bytes(got, !side->index, 0, BYTES);
    barrier();
    close_pair(&other, &pair);
}

// While the lanes of a link over libfabric are opened, the calls for another one do not wait.
static void case_others_go_on(struct side *side) {
    enum { BYTES = 100 * 1000 };
    struct side other = *side;
    struct pair pairs[2];
    void *requests[2] = {NULL, NULL};
    static unsigned char sent[BYTES];
    static unsigned char got[BYTES];
    if (!opens_apart()) {
        return;
    }
    open_pair(side, &pairs[0]);
    CHECK(proxy_init(&other.proxy, 78) == 0, "init"); // has links of its own
    atomic_store(&lanes_held, true);
    open_listener(&other, &pairs[1]);
    expect_no_comm(&other, pairs[1].handle);
    await_opening(side);
    fill(sent, side->index, 0, BYTES);
    CHECK(proxy_irecv(&side->proxy, pairs[0].recv, got, BYTES, &requests[0]) == 0 && requests[0] != NULL, "irecv");
    CHECK(proxy_isend(&side->proxy, pairs[0].send, sent, BYTES, &requests[1]) == 0 && requests[1] != NULL, "isend");
    finish(side, requests[0]);
    finish(side, requests[1]);
    check_bytes(got, !side->index, 0, BYTES);
    expect_no_comm(&other, pairs[1].handle);
    atomic_store(&lanes_held, false);
    open_comms(&other, &pairs[1]);
    barrier();
    close_pair(&other, &pairs[1]);
    close_pair(side, &pairs[0]);
    CHECK(proxy_finalize(&other.proxy) == 0, "finalize");
}

// Memory that the lanes cannot register is used all the same. The log says so once.
static void case_not_registered(struct side *side) {
    static unsigned char data[2][4096];
    struct pair pair;
    void *mhandles[2] = {NULL, NULL};
    open_pair(side, &pair);
    atomic_store(&map_fails, true);
    for (int i = 0; i < 2; i++) {
        CHECK(proxy_register(&side->proxy, pair.send, data[i], sizeof data[i], &mhandles[i]) == 0, "regMr");
        bool told = strstr(proxy_info, "ulimit -l") != NULL;
        CHECK(told == (i == 0), "the log has: %s", proxy_info);
        proxy_info[0] = '\0';
    }
    for (int i = 0; i < 2; i++) {
        CHECK(proxy_deregister(&side->proxy, pair.send, mhandles[i]) == 0, "deregMr");
    }
    barrier();
    close_pair(side, &pair);
}

static int is_libfabric(struct dl_phdr_info *info, size_t bytes, void *found) {
    (void)bytes;
    *(bool *)found = *(bool *)found || strstr(info->dlpi_name, "libfabric") != NULL;
    return 0;
}

// init, which may block, loads libfabric: connect and accept do not.
static void case_loaded_by_init(struct side *side) {
    bool loaded = false;
    dl_iterate_phdr(is_libfabric, &loaded);
    CHECK(loaded == (nb_net_current(NB_NET_PLAIN)->settings.transport->kind == NB_LANE_RMA), "libfabric is %sloaded",
          loaded ? "" : "not ");
    (void)side;
}

static void *finalize_main(void *arg) {
    CHECK(proxy_finalize(arg) == 0, "finalize");
    return NULL;
}

// A net that ends waits for its peers. Meanwhile other communicators open and close.
static void case_slow_end(struct side *side) {
    struct side others[2] = {*side, *side};
    pthread_t thread;
    others[0].proxy.traffic_class = NB_NET_TRAFFIC_CLASS + NB_NET_TCP;
    CHECK(proxy_init(&others[0].proxy, 78) == 0, "init");
    atomic_store(&end_held, true);
    alarm(LIMIT_S);
    CHECK(pthread_create(&thread, NULL, finalize_main, &others[0].proxy) == 0, "thread");
    while (!atomic_load(&end_entered)) {
        check_time(side, "the begin of an end");
    }
    CHECK(proxy_init(&others[1].proxy, 79) == 0, "init");
    CHECK(proxy_finalize(&others[1].proxy) == 0, "finalize");
    atomic_store(&end_held, false);
    CHECK(pthread_join(thread, NULL) == 0, "join");
    alarm(0);
}

static const struct test_case cases[] = {
    {.name = "reset_after_answer", .run = case_reset_after_answer},
    {.name = "proof_before_lanes", .run = case_proof_before_lanes},
    {.name = "reset_while_opening", .run = case_reset_while_opening},
    {.name = "given_up_while_opening", .run = case_given_up_while_opening, .timeout_s = "1"},
    {.name = "other_protocol", .run = case_other_protocol},
    {.name = "no_descriptors", .run = case_no_descriptors},
    {.name = "no_descriptors_at_first", .run = case_no_descriptors_at_first},
    {.name = "refused", .run = case_refused, .timeout_s = "1"},
    {.name = "wakes_helper", .run = case_wakes_helper},
    {.name = "given_up", .run = case_given_up, .timeout_s = "10"},
    {.name = "given_up_alone", .run = case_given_up_alone, .timeout_s = "1"},
    {.name = "refusals", .run = case_refusals},
    {.name = "end_after_slow_sends", .run = case_end_after_slow_sends},
    {.name = "end_before_report", .run = case_end_before_report, .tcp_only = true},
    {.name = "cut_off", .run = case_cut_off},
    {.name = "no_wait", .run = case_no_wait},
    {.name = "one_stands_still", .run = case_one_stands_still, .tcp_only = true, .timeout_s = "1"},
    {.name = "stop_before_send", .run = case_stop_before_send, .killed = SIGKILL, .timeout_s = "4"},
    {.name = "exit_before_report", .run = case_exit_before_report, .tcp_only = true},
    {.name = "slow_end", .run = case_slow_end},
    {.name = "others_go_on", .run = case_others_go_on},
    {.name = "not_registered", .run = case_not_registered},
    {.name = "loaded_by_init", .run = case_loaded_by_init},
    {.name = "finalized_context", .run = case_finalized_context},
};

int main(int argc, char **argv) {
    return run_cases(argc, argv, cases, sizeof cases / sizeof cases[0]);
}
