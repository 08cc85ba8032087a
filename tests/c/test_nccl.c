// NCCL net plugin, called as NCCL's proxy calls it: transfers in both directions, closes, faults and strangers.
#include <arpa/inet.h>
#include <pthread.h>
#include <signal.h>

#include "nccl_sides.h"

enum { SLACK = 1000 };

// Concurrent messages in both directions; each receive is larger than its send.
struct exchange {
    int count;
    size_t (*size)(int message);
    size_t most;
    int depth;     // in flight
    int broken_fd; // shut down halfway; 0: none
};

static void exchange(struct side *side, const struct pair *pair, const struct exchange *plan) {
    struct proxy_queue out = {.comm = pair->send, .sends = true};
    struct proxy_queue in = {.comm = pair->recv};
    size_t room = plan->most + SLACK;
    unsigned char *sent = malloc((size_t)plan->depth * room);
    unsigned char *got = malloc((size_t)plan->depth * room);
    void *mhandles[2] = {NULL, NULL};
    CHECK(sent != NULL && got != NULL, "memory");
    CHECK(proxy_register(&side->proxy, pair->send, sent, (size_t)plan->depth * room, &mhandles[0]) == 0, "regMr");
    CHECK(proxy_register(&side->proxy, pair->recv, got, (size_t)plan->depth * room, &mhandles[1]) == 0, "regMr");
    int result = 0;
    int bytes = -1;
    int posted[2] = {0, 0};
    int done[2] = {0, 0};
    bool broken = plan->broken_fd == 0;
    while (done[0] < plan->count || done[1] < plan->count) {
        if (!broken && posted[0] > plan->count / 2) {
            CHECK(shutdown(plan->broken_fd, SHUT_RDWR) == 0, "shutdown");
            broken = true;
        }
        size_t slot = (size_t)(posted[0] % plan->depth) * room;
        if (posted[0] < plan->count && posted[0] - done[0] < plan->depth) {
            size_t size = plan->size(posted[0]);
            fill(sent + slot, side->index, posted[0], size);
            posted[0] += proxy_post(&side->proxy, &out, sent + slot, size, &result);
            CHECK(result == 0, "isend: %d", result);
        }
        slot = (size_t)(posted[1] % plan->depth) * room;
        if (posted[1] < plan->count && posted[1] - done[1] < plan->depth) {
            posted[1] += proxy_post(&side->proxy, &in, got + slot, plan->size(posted[1]) + SLACK, &result);
            CHECK(result == 0, "irecv: %d", result);
        }
        done[0] += proxy_poll(&side->proxy, &out, &bytes, &result);
        CHECK(result == 0, "test of a send: %d", result);
        if (proxy_poll(&side->proxy, &in, &bytes, &result)) {
            size_t size = plan->size(done[1]);
            CHECK(bytes == (int)size, "message %d: %d bytes reported, not %zu", done[1], bytes, size);
            check_bytes(got + (size_t)(done[1] % plan->depth) * room, !side->index, done[1], size);
            done[1]++;
        }
        CHECK(result == 0, "test of a receive: %d", result);
        check_time(side, "an exchange");
    }
    CHECK(proxy_deregister(&side->proxy, pair->send, mhandles[0]) == 0, "deregMr");
    CHECK(proxy_deregister(&side->proxy, pair->recv, mhandles[1]) == 0, "deregMr");
    free(sent);
    free(got);
}

static size_t all_sizes(int message) {
    static const size_t sizes[] = {0, 1, 7, 4095, 4096, 4097, 16384, 16385, 65536, 1048579, 524288, 8388608, 3, 0};
    return sizes[(size_t)message % (sizeof sizes / sizeof sizes[0])];
}

static size_t mixed_sizes(int message) {
    return (size_t)message * 7919 % 40000;
}

static size_t equal_sizes(int message) {
    (void)message;
    return 256 * 1024;
}

static void case_sizes(struct side *side) {
    static const struct exchange plan = {.count = 14, .size = all_sizes, .most = 8388608, .depth = 2};
    struct pair pair;
    open_pair(side, &pair);
    exchange(side, &pair, &plan);
    barrier();
    close_pair(side, &pair);
}

static void case_in_flight(struct side *side) {
    static const struct exchange plan = {.count = 320, .size = mixed_sizes, .most = 40000, .depth = PROXY_REQUESTS};
    struct pair pair;
    open_pair(side, &pair);
    exchange(side, &pair, &plan);
    barrier();
    close_pair(side, &pair);
}

// Several comms of one handle share a link; closing one does not affect the others.
static void case_one_handle(struct side *side) {
    enum { COMMS = 4 };
    static const struct exchange plan = {.count = 12, .size = mixed_sizes, .most = 40000, .depth = 8};
    struct pair pairs[COMMS];
    open_pair(side, &pairs[0]);
    for (int i = 1; i < COMMS; i++) {
        pairs[i] = pairs[0];
        open_comms(side, &pairs[i]);
    }
    for (int i = 0; i < COMMS; i++) {
        exchange(side, &pairs[i], &plan);
        CHECK(proxy_close_send(&side->proxy, pairs[i].send) == 0, "closeSend");
        CHECK(proxy_close_recv(&side->proxy, pairs[i].recv) == 0, "closeRecv");
    }
    CHECK(proxy_close_listen(&side->proxy, pairs[0].listener) == 0, "closeListen");
}

// The plugin accepts at least 32 requests, then returns NULL without an error, and accepts requests again afterwards.
static void case_null_request(struct side *side) {
    struct pair pair;
    open_pair(side, &pair);
    char byte = 'x';
    void *requests[NB_NET_REQUESTS + 1];
    int count = 0;
    void *request = &byte;
    void *comm = side->index == 0 ? pair.recv : pair.send;
    if (side->index == 1) {
        barrier(); // side 0 has tested its first receive
    }
    while (request != NULL) {
        CHECK(count <= NB_NET_REQUESTS, "the plugin accepts too many requests");
        request = NULL;
        int rc = side->index == 0 ? proxy_irecv(&side->proxy, comm, &byte, 1, &request)
                                  : proxy_isend(&side->proxy, comm, &byte, 1, &request);
        CHECK(rc == 0, "post: %d", rc);
        requests[count] = request;
        count += request != NULL;
        CHECK(count > 0, "the plugin accepts no request");
        if (count == 1 && request != NULL && side->index == 0) { // nothing was sent yet: the receive is pending
            int done = 1;
            CHECK(proxy_test(&side->proxy, request, &done, NULL) == 0 && !done, "a receive without a send is done");
            barrier();
        }
        if (count == 1 && side->index == 1 && request != NULL) {
            break;
        }
    }
    if (side->index == 0) {
        CHECK(count >= PROXY_REQUESTS, "only %d requests were accepted", count);
    } else {
        for (; count < NB_NET_REQUESTS; count += requests[count] != NULL) {
            CHECK(proxy_isend(&side->proxy, comm, &byte, 1, &requests[count]) == 0, "isend");
        }
    }
    for (int i = 0; i < count; i++) {
        int done = 0;
        while (!done) {
            CHECK(proxy_test(&side->proxy, requests[i], &done, NULL) == 0, "test");
            check_time(side, "a transfer");
        }
    }
    barrier();
    close_pair(side, &pair);
}

struct worker {
    struct side side;
    struct pair pair;
    pthread_t thread;
};

static void *worker_main(void *arg) {
    static const struct exchange plan = {.count = 48, .size = mixed_sizes, .most = 40000, .depth = 16};
    struct worker *worker = arg;
    exchange(&worker->side, &worker->pair, &plan);
    return NULL;
}

// Several proxies in one process, one for each GPU: each thread has its own comms, and all threads share a link.
static void case_threads(struct side *side) {
    enum { WORKERS = 3 };
    struct worker workers[WORKERS];
    for (int i = 0; i < WORKERS; i++) {
        workers[i].side = *side;
        open_pair(side, &workers[i].pair);
    }
    for (int i = 0; i < WORKERS; i++) {
        CHECK(pthread_create(&workers[i].thread, NULL, worker_main, &workers[i]) == 0, "thread");
    }
    for (int i = 0; i < WORKERS; i++) {
        pthread_join(workers[i].thread, NULL);
    }
    barrier();
    for (int i = 0; i < WORKERS; i++) {
        close_pair(side, &workers[i].pair);
    }
}

// Two communicators between the same processes (version 11 and later): aborting one does not affect the other.
static void case_two_communicators(struct side *side) {
    static const struct exchange plan = {.count = 12, .size = equal_sizes, .most = 256 * 1024, .depth = 4};
    struct side other = *side;
    struct pair pairs[2];
    int result = 0;
    CHECK(proxy_init(&other.proxy, 78) == 0, "init");
    open_pair(side, &pairs[0]);
    open_pair(&other, &pairs[1]);
    char *data = calloc(1, BIG);
    CHECK(data != NULL, "memory");
    struct proxy_queue queue = {.comm = side->index == 0 ? pairs[0].send : pairs[0].recv, .sends = side->index == 0};
    CHECK(proxy_post(&side->proxy, &queue, data, BIG, &result), "post");
    barrier();
    close_pair(side, &pairs[0]);
    exchange(&other, &pairs[1], &plan);
    barrier();
    close_pair(&other, &pairs[1]);
    CHECK(proxy_finalize(&other.proxy) == 0, "finalize");
    free(data);
}

// A traffic class of ours names the transport of its communicator alone, and each kind is counted.
static void case_kinds(struct side *side) {
    static const struct exchange plan = {.count = 12, .size = equal_sizes, .most = 256 * 1024, .depth = 4};
    static const char *const transports[NB_NET_KINDS] = {[NB_NET_TCP] = "tcp", [NB_NET_OFI] = "ofi"};
    const struct nb_net_counters *counters = ncclNetPlugin_v6.counters;
    struct side others[NB_NET_KINDS];
    struct pair pairs[NB_NET_KINDS];
    for (int kind = NB_NET_TCP; kind < NB_NET_KINDS; kind++) {
        struct nb_net_settings settings;
        struct nb_error err = {0};
        others[kind] = *side;
        others[kind].proxy.traffic_class = NB_NET_TRAFFIC_CLASS + kind;
        if (nb_transport_find(transports[kind]) == NULL) {
            CHECK(proxy_init(&others[kind].proxy, 78) != 0, "%s is not in this build", transports[kind]);
            continue;
        }
        CHECK(nb_net_settings_read(&settings, (enum nb_net_kind)kind, &err) == 0, "%s", err.text);
        CHECK(strcmp(settings.transport->name, transports[kind]) == 0, "%s", settings.transport->name);
        CHECK(proxy_init(&others[kind].proxy, 78) == 0, "init");
        open_pair(&others[kind], &pairs[kind]);
        exchange(&others[kind], &pairs[kind], &plan);
        CHECK(counters[kind].contexts == 1, "%d contexts", (int)counters[kind].contexts);
        CHECK(counters[kind].bytes == plan.count * plan.most, "%zu bytes", (size_t)counters[kind].bytes);
        barrier();
        close_pair(&others[kind], &pairs[kind]);
        CHECK(proxy_finalize(&others[kind].proxy) == 0, "finalize");
    }
    static const char *const lists[][2] = {{"stock,ofi,nccl+tcp", "tcp"}, {"ofi,tcp", "ofi"},
                                           {"stock,tcp", "tcp"},          {"stock, ofi", "ofi"},
                                           {"stock,nccl+ofi ", "ofi"},    {" nccl+ofi , stock", "ofi"}};
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++) {
        struct nb_net_settings settings;
        struct nb_error err = {0};
        setenv("NETBOTTLENECK_TRANSPORT", lists[i][0], 1);
        if (nb_transport_find(lists[i][1]) != NULL) {
            CHECK(nb_net_settings_read(&settings, NB_NET_PLAIN, &err) == 0, "%s", err.text);
            CHECK(strcmp(settings.transport->name, lists[i][1]) == 0, "%s: %s", lists[i][0], settings.transport->name);
        }
    }
    uint64_t before = *ncclNetPlugin_v6.queries;
    struct nccl_props_v6 props;
    CHECK(ncclNetPlugin_v6.table.get_properties(0, &props) == 0, "getProperties");
    CHECK(*ncclNetPlugin_v6.queries == before + 1, "a query is not counted");
    CHECK(counters[NB_NET_PLAIN].contexts == 1 && counters[NB_NET_PLAIN].bytes == 0,
          "the other kinds are counted here");
}

// New listeners and connections after earlier ones are closed.
static void case_reconnect(struct side *side) {
    static const struct exchange plan = {.count = 4, .size = equal_sizes, .most = 256 * 1024, .depth = 4};
    for (int i = 0; i < 5; i++) {
        struct pair pair;
        open_pair(side, &pair);
        exchange(side, &pair, &plan);
        close_pair(side, &pair); // returns although the other side may still be busy
    }
}

// One side closes with transfers in flight; the other side gets an error, and both reconnect.
static void case_close_in_flight(struct side *side) {
    static const struct exchange plan = {.count = 4, .size = equal_sizes, .most = 256 * 1024, .depth = 4};
    struct pair pair;
    open_pair(side, &pair);
    char *data = calloc(1, BIG);
    void *mhandle = NULL;
    int result = 0;
    CHECK(data != NULL, "memory");
    struct proxy_queue queue = {.comm = side->index == 0 ? pair.send : pair.recv, .sends = side->index == 0};
    CHECK(proxy_register(&side->proxy, queue.comm, data, BIG, &mhandle) == 0, "regMr");
    if (queue.sends) {
        send_slowly();
    }
    CHECK(proxy_post(&side->proxy, &queue, data, BIG, &result), "post");
    barrier();
    if (side->index == 0) {
        int bytes = 0;
        CHECK(!proxy_poll(&side->proxy, &queue, &bytes, &result) && result == 0, "the transfer is not in flight");
        CHECK(proxy_deregister(&side->proxy, pair.send, mhandle) == 0, "deregMr");
        close_pair(side, &pair);
        memset(data, 1, BIG); // the plugin does not read it after the close
        free(data);
    } else {
        while (!has_failed(side, &queue)) {
        }
        close_pair(side, &pair);
        CHECK(proxy_deregister(&side->proxy, queue.comm, mhandle) == 0, "deregMr after the close");
        free(data);
    }
    barrier();
    open_pair(side, &pair);
    exchange(side, &pair, &plan);
    barrier();
    close_pair(side, &pair);
}

// The receiver deregisters memory of a receive whose data are in flight, or were not sent yet. Nothing is written to it
// afterwards.
static void case_deregister(struct side *side) {
    struct pair pair;
    int result = 0;
    int bytes = 0;
    char *data = calloc(1, BIG);
    void *mhandle = NULL;
    CHECK(data != NULL, "memory");
    for (int waiting = 0; waiting < 2; waiting++) {
        open_pair(side, &pair);
        struct proxy_queue queue = {.comm = side->index == 0 ? pair.recv : pair.send, .sends = side->index == 1};
        if (side->index == 0) {
            CHECK(proxy_register(&side->proxy, queue.comm, data, BIG, &mhandle) == 0, "regMr");
            CHECK(proxy_post(&side->proxy, &queue, data, BIG, &result), "irecv");
            volatile char *last = data + 64 * 1024;
            while (!waiting && *last == 0) { // until bytes land
                CHECK(!proxy_poll(&side->proxy, &queue, &bytes, &result) && result == 0, "test: %d", result);
                check_time(side, "the first bytes");
            }
            CHECK(proxy_deregister(&side->proxy, queue.comm, mhandle) == 0, "deregMr");
            memset(data, 7, BIG);
            barrier();
            CHECK(!proxy_poll(&side->proxy, &queue, &bytes, &result) && result != 0,
                  "the receive of deregistered memory has no error");
            barrier();
            for (size_t i = 0; i < BIG; i++) {
                CHECK(data[i] == 7, "byte %zu was written after the deregistration", i);
            }
        } else {
            memset(data, 1, BIG);
            if (waiting) {
                barrier();
            } else {
                send_slowly();
            }
            (void)proxy_post(&side->proxy, &queue, data, BIG, &result);
            while (!waiting && !has_failed(side, &queue)) {
            }
            if (!waiting) {
                barrier();
            }
            for (int i = 0; waiting && i < 1000; i++) { // the receiver discards the data
                (void)proxy_poll(&side->proxy, &queue, &bytes, &result);
            }
            barrier();
        }
        close_pair(side, &pair);
        barrier();
    }
    free(data);
}

// A comm closes with a pending receive, on the receiver's or the sender's side. Neither side blocks.
static void case_close_waiting(struct side *side) {
    struct pair pair;
    char byte = 0;
    int result = 0;
    open_pair(side, &pair);
    struct proxy_queue in = {.comm = pair.recv};
    CHECK(proxy_post(&side->proxy, &in, &byte, 1, &result), "irecv");
    barrier();
    if (side->index == 0) {
        close_pair(side, &pair);
        barrier();
        return;
    }
    while (!has_failed(side, &in)) {
    }
    void *request = NULL;
    while (proxy_isend(&side->proxy, pair.send, &byte, 1, &request) == 0) {
        int done = 0;
        if (request != NULL && proxy_test(&side->proxy, request, &done, NULL) != 0) {
            break;
        }
        check_time(side, "an error of a send");
    }
    barrier();
    close_pair(side, &pair);
}

// A forked child cannot use the comms, and closing them there does not affect the parent.
static void case_fork(struct side *side) {
    static const struct exchange plan = {.count = 8, .size = equal_sizes, .most = 256 * 1024, .depth = 4};
    struct pair pair;
    char byte = 0;
    open_pair(side, &pair);
    struct proxy_queue in = {.comm = pair.recv};
    int result = 0;
    pid_t child = fork();
    CHECK(child >= 0, "fork");
    if (child == 0) {
        bool refused = !proxy_post(&side->proxy, &in, &byte, 1, &result) && result != 0;
        (void)proxy_close_recv(&side->proxy, pair.recv);
        (void)proxy_close_send(&side->proxy, pair.send);
        (void)proxy_close_listen(&side->proxy, pair.listener);
        _exit(refused ? 0 : 1);
    }
    exchange(side, &pair, &plan);
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0, "the child ended with status %d", status);
    exchange(side, &pair, &plan);
    barrier();
    close_pair(side, &pair);
}

// Side 1 is killed or stopped during a transfer.
static void fault_in_flight(struct side *side, int signal_number) {
    struct pair pair;
    int result = 0;
    pid_t pid = getpid();
    open_pair(side, &pair);
    char *data = calloc(1, BIG);
    CHECK(data != NULL, "memory");
    struct proxy_queue in = {.comm = pair.recv};
    struct proxy_queue out = {.comm = pair.send, .sends = true};
    CHECK(proxy_post(&side->proxy, &in, data, BIG, &result), "irecv");
    if (side->index == 1) {
        send_bytes(&pid, sizeof pid);
        CHECK(proxy_post(&side->proxy, &out, data, 8192, &result), "isend");
        for (int bytes = 0;;) {
            (void)proxy_poll(&side->proxy, &out, &bytes, &result);
            (void)proxy_poll(&side->proxy, &in, &bytes, &result);
        }
    }
    receive_bytes(&pid, sizeof pid);
    CHECK(proxy_post(&side->proxy, &out, data, BIG, &result), "isend");
    int bytes = 0;
    while (!proxy_poll(&side->proxy, &in, &bytes, &result)) {
        CHECK(result == 0, "test: %d", result);
        check_time(side, "the first transfer");
    }
    CHECK(proxy_post(&side->proxy, &in, data, BIG, &result), "irecv");
    CHECK(kill(pid, signal_number) == 0, "kill");
    while (!has_failed(side, &in)) {
    }
    char named[32];
    snprintf(named, sizeof named, "(process %d)", (int)pid);
    CHECK(strstr(proxy_warning, named) != NULL, "the log does not name the peer: %s", proxy_warning);
    (void)kill(pid, SIGKILL);
    close_pair(side, &pair);
    free(data);
}

static void case_kill(struct side *side) {
    fault_in_flight(side, SIGKILL);
}

static void case_stop(struct side *side) {
    fault_in_flight(side, SIGSTOP);
}

static int connect_to(const struct nb_net_handle *handle) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(handle->port)};
    CHECK(handle->family == AF_INET, "not IPv4");
    memcpy(&to.sin_addr, handle->address, sizeof to.sin_addr);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0 && connect(fd, (struct sockaddr *)&to, sizeof to) == 0, "connect: %s", strerror(errno));
    return fd;
}

// A hello with everything that an unauthenticated client may know: all but the token. Its proof is invalid.
static void unauthenticated_hello(const struct nb_net_handle *handle, unsigned char hello[152]) {
    const uint32_t head[4] = {0x4e424e4c, 4, 0, 1}; // magic, version, reserved, process
    memcpy(hello, head, sizeof head);
    memcpy(hello + 48, &handle->listener, sizeof handle->listener);
}

// Unauthenticated clients at the listener can only delay the ranks.
static void case_unauthenticated_clients(struct side *side) {
    enum { CLIENTS = 16 };
    static const struct exchange plan = {.count = 8, .size = equal_sizes, .most = 256 * 1024, .depth = 4};
    struct pair pair;
    struct nb_net_handle handle;
    int fds[CLIENTS];
    unsigned char noise[4096];
    open_listener(side, &pair);
    memcpy(&handle, pair.handle, sizeof handle);
    fill(noise, 1, 5, sizeof noise);
    for (int i = 0; i < CLIENTS; i++) {
        fds[i] = connect_to(&handle);
        unsigned char data[sizeof noise];
        size_t bytes = i % 4 == 0 ? 0 : i % 4 == 1 ? 17 : sizeof noise;
        memcpy(data, noise, sizeof data);
        if (i % 4 == 3) {
            unauthenticated_hello(&handle, data);
        }
        (void)!send(fds[i], data, bytes, MSG_NOSIGNAL);
    }
    open_comms(side, &pair);
    exchange(side, &pair, &plan);
    barrier();
    for (int i = 0; i < CLIENTS; i++) {
        close(fds[i]);
    }
    close_pair(side, &pair);
}

// A peer violates the protocol after the handshake: an error, and no write beyond a receive's memory.
static void case_protocol_violation(struct side *side) {
    enum { ROUNDS = 24 };
    struct {
        uint32_t type;
        uint32_t comm;
        uint64_t op;
        uint64_t bytes;
        unsigned char rest[2 * NB_NET_INLINE];
    } message;
    for (int i = 0; i < ROUNDS; i++) {
        struct pair pair;
        struct nb_net_handle handle;
        unsigned char data[64] = {0};
        int result = 0;
        open_pair(side, &pair);
        memcpy(&handle, pair.handle, sizeof handle);
        struct proxy_queue in = {.comm = pair.recv};
        CHECK(proxy_post(&side->proxy, &in, data, 32, &result), "irecv");
        barrier();
        if (side->index == 0) {
            int control = find_connection(handle.port, 0, false);
            CHECK(control >= 0, "control connection not found");
            memset(&message, 0, sizeof message);
            fill(message.rest, 0, i, sizeof message.rest);
            message.type = (uint32_t)(i % 8);
            message.comm = (uint32_t)(i / 8 % 2 + 1);
            message.op = i / 2 % 2 == 0 ? 0 : (uint64_t)(i * 7);
            message.bytes = i % 3 == 0 ? 33 : i % 3 == 1 ? NB_NET_INLINE + 1 : 1 << 20;
            CHECK(write(control, &message, sizeof message) > 0, "write: %s", strerror(errno));
        } else {
            while (!has_failed(side, &in)) {
            }
            for (size_t at = 32; at < sizeof data; at++) {
                CHECK(data[at] == 0, "round %d wrote beyond the receive", i);
            }
        }
        barrier();
        close_pair(side, &pair);
        barrier();
    }
}

// A lane breaks during an exchange: the other lanes carry its segments.
static void case_lost_lane(struct side *side) {
    static const struct exchange plan = {.count = 64, .size = equal_sizes, .most = 256 * 1024, .depth = 8};
    struct pair pair;
    open_pair(side, &pair);
    exchange(side, &pair, &plan);
    barrier();
    struct nb_net_handle handle;
    memcpy(&handle, pair.handle, sizeof handle);
    uint16_t mine = 0;
    struct exchange broken = plan;
    send_bytes(&handle.port, sizeof handle.port);
    receive_bytes(&mine, sizeof mine); // port of this side's listener
    if (side->index == 0) {
        broken.broken_fd = find_connection(handle.port, mine, true);
        CHECK(broken.broken_fd > 0, "lane not found");
    }
    exchange(side, &pair, &broken);
    exchange(side, &pair, &plan);
    barrier();
    close_pair(side, &pair);
}

// The two sides have different secrets: they do not connect.
static void case_different_secrets(struct side *side) {
    struct pair pair;
    void *comm = NULL;
    int rc = 0;
    open_listener(side, &pair);
    while (rc == 0) {
        rc = proxy_connect(&side->proxy, 0, pair.handle, &comm);
        CHECK(comm == NULL, "connected with a different secret");
        void *accepted = NULL;
        CHECK(proxy_accept(&side->proxy, pair.listener, &accepted) == 0 && accepted == NULL,
              "accepted a peer with a different secret");
        check_time(side, "an error");
    }
    char mine = 'm';
    send_bytes(&mine, 1);
    int flags = fcntl(SOCKET, F_GETFL);
    CHECK(fcntl(SOCKET, F_SETFL, flags | O_NONBLOCK) == 0, "fcntl");
    while (read(SOCKET, &mine, 1) != 1) { // this side's listener must still answer the other side
        void *accepted = NULL;
        CHECK(proxy_accept(&side->proxy, pair.listener, &accepted) == 0 && accepted == NULL,
              "accepted a peer with a different secret");
        check_time(side, "the other side");
    }
    CHECK(proxy_close_listen(&side->proxy, pair.listener) == 0, "closeListen");
}

static const struct test_case cases[] = {
    {.name = "sizes", .run = case_sizes, .all_versions = true},
    {.name = "in_flight", .run = case_in_flight, .all_versions = true},
    {.name = "one_handle", .run = case_one_handle},
    {.name = "threads", .run = case_threads},
    {.name = "two_communicators", .run = case_two_communicators},
    {.name = "kinds", .run = case_kinds},
    {.name = "null_request", .run = case_null_request},
    {.name = "reconnect", .run = case_reconnect, .all_versions = true},
    {.name = "close_in_flight", .run = case_close_in_flight},
    {.name = "deregister", .run = case_deregister},
    {.name = "close_waiting", .run = case_close_waiting},
    {.name = "fork", .run = case_fork},
    {.name = "kill", .run = case_kill, .killed = SIGKILL},
    {.name = "stop", .run = case_stop, .killed = SIGKILL, .timeout_s = "5"},
    {.name = "unauthenticated_clients", .run = case_unauthenticated_clients},
    {.name = "protocol_violation", .run = case_protocol_violation, .tcp_only = true},
    {.name = "lost_lane", .run = case_lost_lane, .tcp_only = true},
    {.name = "different_secrets",
     .run = case_different_secrets,
     .secrets = {"the secret of this job", "another job's secret"}},
    {.name = "same_secret", .run = case_reconnect, .secrets = {"the secret of this job", "the secret of this job"}},
};

int main(int argc, char **argv) {
    return run_cases(argc, argv, cases, sizeof cases / sizeof cases[0]);
}
