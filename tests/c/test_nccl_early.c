// Inline sends of the NCCL net plugin: those that leave before their receives are posted, grants that are held back
// meanwhile, and payload that lands in a receive's memory piece by piece.
#include <pthread.h>

#include "nccl_sides.h"

enum { SLOT = NB_NET_LONE, PATIENCE = 2000 };

static void set_up(struct side *side, struct pair *pair, struct proxy_queue *queue) {
    open_pair(side, pair);
    *queue = (struct proxy_queue){.comm = side->index == 0 ? pair->send : pair->recv, .sends = side->index == 0};
}

static void post(struct side *side, struct proxy_queue *queue, void *data, size_t bytes) {
    int result = 0;
    CHECK(proxy_post(&side->proxy, queue, data, bytes, &result), "post: %d", result);
}

static void expect_done(struct side *side, struct proxy_queue *queue, size_t bytes) {
    int got = -1;
    int result = 0;
    while (!proxy_poll(&side->proxy, queue, &got, &result)) {
        CHECK(result == 0, "test: %d", result);
        check_time(side, "a transfer");
    }
    CHECK(queue->sends || got == (int)bytes, "%d bytes, not %zu", got, bytes);
}

static void expect_pending(struct side *side, struct proxy_queue *queue) {
    int bytes = 0;
    int result = 0;
    for (int i = 0; i < PATIENCE; i++) {
        CHECK(!proxy_poll(&side->proxy, queue, &bytes, &result) && result == 0, "the transfer does not wait");
    }
}

// An inline send, as it lies on the wire.
struct message {
    uint32_t type;
    uint32_t comm;
    uint64_t op;
    uint64_t bytes;
};

static void write_raw(const struct pair *pair, const void *data, size_t bytes) {
    struct nb_net_handle handle;
    memcpy(&handle, pair->handle, sizeof handle);
    CHECK(write(find_connection(handle.port, 0, false), data, bytes) == (ssize_t)bytes, "write: %s", strerror(errno));
}

// Sends until the connection has an error.
static void await_end(struct side *side, const struct pair *pair) {
    struct proxy_queue out = {.comm = pair->send, .sends = true};
    char byte = 0;
    int result = 0;
    while (result == 0 && !has_failed(side, &out)) {
        if (out.count < PROXY_REQUESTS) {
            (void)proxy_post(&side->proxy, &out, &byte, 1, &result);
        }
    }
}

// Waits until the receiving comm has no link any more.
static void await_link_end(struct side *side, const struct pair *pair) {
    struct nb_net *net = nb_net_current(NB_NET_PLAIN);
    const struct nb_net_comm *comm = pair->recv;
    for (bool ended = false; !ended;) {
        pthread_mutex_lock(&net->lock);
        nb_links_progress(net);
        ended = comm->link == NULL;
        pthread_mutex_unlock(&net->lock);
        check_time(side, "the end of a link");
    }
}

static size_t small_size(int message) {
    static const size_t sizes[] = {8, 0, 4096, 1, 100};
    return sizes[message % 5];
}

// Small sends are done before their receives are posted: as many as may be, no more. The receives get them in order.
static void case_limit(struct side *side) {
    struct pair pair;
    struct proxy_queue queue;
    unsigned char *data = calloc(NB_NET_EARLY + 1, SLOT);
    CHECK(data != NULL, "memory");
    set_up(side, &pair, &queue);
    for (int i = 0; side->index == 0 && i <= NB_NET_EARLY; i++) {
        fill(data + (size_t)i * SLOT, 0, i, small_size(i));
        post(side, &queue, data + (size_t)i * SLOT, small_size(i));
    }
    for (int i = 0; side->index == 0 && i < NB_NET_EARLY; i++) {
        expect_done(side, &queue, small_size(i));
    }
    if (side->index == 0) {
        expect_pending(side, &queue);
    }
    barrier();
    for (int i = 0; side->index == 1 && i <= NB_NET_EARLY; i++) {
        post(side, &queue, data + (size_t)i * SLOT, SLOT);
        expect_done(side, &queue, small_size(i));
        check_bytes(data + (size_t)i * SLOT, 0, i, small_size(i));
    }
    if (side->index == 0) {
        expect_done(side, &queue, small_size(NB_NET_EARLY));
    }
    barrier();
    close_pair(side, &pair);
    free(data);
}

// A lone send of NB_NET_LONE bytes leaves before its receive; one that takes the lanes does not.
static void case_lone(struct side *side) {
    struct pair pair;
    struct proxy_queue queue;
    unsigned char *data = calloc(2, BIG);
    CHECK(data != NULL, "memory");
    set_up(side, &pair, &queue);
    if (side->index == 0) {
        fill(data, 0, 0, NB_NET_LONE);
        fill(data + BIG, 0, 1, NB_NET_LONE + 1);
        post(side, &queue, data, NB_NET_LONE);
        expect_done(side, &queue, NB_NET_LONE);
        post(side, &queue, data + BIG, NB_NET_LONE + 1);
        expect_pending(side, &queue);
        barrier();
        expect_done(side, &queue, NB_NET_LONE + 1);
    } else {
        barrier();
        post(side, &queue, data, BIG);
        expect_done(side, &queue, NB_NET_LONE);
        check_bytes(data, 0, 0, NB_NET_LONE);
        post(side, &queue, data + BIG, BIG);
        expect_done(side, &queue, NB_NET_LONE + 1);
        check_bytes(data + BIG, 0, 1, NB_NET_LONE + 1);
    }
    barrier();
    close_pair(side, &pair);
    free(data);
}

// Runs of small messages, in which grants are held back, and large ones that need a grant. ahead: receives are posted
// before their messages.
static void runs(struct side *side, int ahead) {
    enum { MESSAGES = 300, LARGE = 300000 };
    struct pair pair;
    struct proxy_queue queue;
    unsigned char *data = calloc(PROXY_REQUESTS, LARGE);
    CHECK(data != NULL, "memory");
    set_up(side, &pair, &queue);
    int done = 0;
    for (int posted = 0; done < MESSAGES; posted++) {
        if (posted < MESSAGES) {
            size_t size = posted % 70 == 69 ? (size_t)LARGE : small_size(posted);
            unsigned char *slot = data + (size_t)(posted % PROXY_REQUESTS) * LARGE;
            if (side->index == 0) {
                fill(slot, 0, posted, size);
            }
            post(side, &queue, slot, side->index == 0 ? size : (size_t)LARGE);
        }
        if (posted >= ahead) {
            size_t size = done % 70 == 69 ? (size_t)LARGE : small_size(done);
            expect_done(side, &queue, size);
            if (side->index == 1) {
                check_bytes(data + (size_t)(done % PROXY_REQUESTS) * LARGE, 0, done, size);
            }
            done++;
        }
    }
    barrier();
    close_pair(side, &pair);
    free(data);
}

static void case_runs(struct side *side) {
    runs(side, 0);
    runs(side, side->index == 0 ? 0 : 7);
    runs(side, side->index == 0 ? 7 : 0);
    runs(side, 31);
}

// The sender closes its end after sends that nobody has received yet: the receiver still gets them, then an error.
static void case_close(struct side *side) {
    enum { COUNT = 3 };
    struct pair pair;
    struct proxy_queue queue;
    unsigned char data[64] = {0};
    int result = 0;
    set_up(side, &pair, &queue);
    if (side->index == 0) {
        for (int i = 0; i < COUNT; i++) {
            fill(data, 0, i, sizeof data);
            post(side, &queue, data, sizeof data);
            expect_done(side, &queue, sizeof data);
        }
        close_pair(side, &pair);
        CHECK(proxy_finalize(&side->proxy) == 0, "finalize"); // the connection ends, too
        barrier();
        barrier();
        CHECK(proxy_init(&side->proxy, 79) == 0, "init");
        return;
    }
    barrier();
    await_link_end(side, &pair);
    for (int i = 0; i < COUNT; i++) {
        post(side, &queue, data, sizeof data);
        expect_done(side, &queue, sizeof data);
        check_bytes(data, 0, i, sizeof data);
    }
    CHECK(!proxy_post(&side->proxy, &queue, data, sizeof data, &result) && result != 0, "a receive after the end");
    close_pair(side, &pair);
    barrier();
}

// The sender's process ends right after its last sends, without a close, and with grants unread: they arrive.
static void case_exit(struct side *side) {
    enum { COUNT = 400 };
    static unsigned char data[PROXY_REQUESTS][NB_NET_INLINE];
    struct pair pair;
    struct proxy_queue queue;
    set_up(side, &pair, &queue);
    if (side->index == 0) {
        struct nb_net_handle handle;
        int room = 2 * COUNT * NB_NET_INLINE; // the kernel takes all at once
        memcpy(&handle, pair.handle, sizeof handle);
        int control = find_connection(handle.port, 0, false);
        CHECK(setsockopt(control, SOL_SOCKET, SO_SNDBUF, &room, sizeof room) == 0, "sndbuf: %s", strerror(errno));
        send_slowly();
        for (int i = 0; i < COUNT; i++) {
            fill(data[0], 0, i, NB_NET_INLINE);
            post(side, &queue, data[0], NB_NET_INLINE);
            expect_done(side, &queue, NB_NET_INLINE);
        }
        exit(0);
    }
    for (int posted = 0, done = 0; done < COUNT; done++) {
        for (; posted < COUNT && posted < done + PROXY_REQUESTS; posted++) {
            post(side, &queue, data[posted % PROXY_REQUESTS], NB_NET_INLINE);
        }
        expect_done(side, &queue, NB_NET_INLINE);
        check_bytes(data[done % PROXY_REQUESTS], 0, done, NB_NET_INLINE);
    }
    close_pair(side, &pair);
}

// A sender closes before the receiver has accepted the connection.
static void case_close_before_accept(struct side *side) {
    struct pair pair = {0};
    unsigned char data[64] = {0};
    int result = 0;
    open_listener(side, &pair);
    if (side->index == 0) {
        while (pair.send == NULL) {
            CHECK(proxy_connect(&side->proxy, 0, pair.handle, &pair.send) == 0, "connect");
            check_time(side, "connecting");
        }
        struct proxy_queue queue = {.comm = pair.send, .sends = true};
        fill(data, 0, 0, sizeof data);
        post(side, &queue, data, sizeof data);
        expect_done(side, &queue, sizeof data);
        CHECK(proxy_close_send(&side->proxy, pair.send) == 0, "closeSend");
        CHECK(proxy_close_listen(&side->proxy, pair.listener) == 0, "closeListen");
        CHECK(proxy_finalize(&side->proxy) == 0, "finalize");
        barrier();
        barrier();
        CHECK(proxy_init(&side->proxy, 79) == 0, "init");
        return;
    }
    barrier();
    while (pair.recv == NULL) {
        CHECK(proxy_accept(&side->proxy, pair.listener, &pair.recv) == 0, "accept");
        check_time(side, "accepting");
    }
    struct proxy_queue queue = {.comm = pair.recv};
    post(side, &queue, data, sizeof data);
    expect_done(side, &queue, sizeof data);
    check_bytes(data, 0, 0, sizeof data);
    CHECK(!proxy_post(&side->proxy, &queue, data, sizeof data, &result) && result != 0, "a receive after the end");
    CHECK(proxy_close_recv(&side->proxy, pair.recv) == 0, "closeRecv");
    CHECK(proxy_close_listen(&side->proxy, pair.listener) == 0, "closeListen");
    barrier();
}

// An early send that its receive has no room for fails on both sides, and writes nothing.
static void case_too_long(struct side *side) {
    struct pair pair;
    struct proxy_queue queue;
    unsigned char data[64] = {0};
    set_up(side, &pair, &queue);
    if (side->index == 0) {
        memset(data, 1, sizeof data);
        post(side, &queue, data, sizeof data);
        expect_done(side, &queue, sizeof data);
        barrier();
        await_end(side, &pair);
    } else {
        barrier();
        post(side, &queue, data, 32);
        while (!has_failed(side, &queue)) {
        }
        CHECK(strstr(proxy_warning, "a send of 64 bytes") != NULL, "the log does not name the sizes: %s",
              proxy_warning);
        CHECK(data[0] == 0 && data[63] == 0, "bytes were written");
    }
    barrier();
    close_pair(side, &pair);
}

// A peer sends more than may be kept: an error.
static void case_flood(struct side *side) {
    static const struct message message = {.type = 4, .comm = 1};
    struct pair pair;
    int result = 0;
    char byte = 0;
    open_pair(side, &pair);
    for (int i = 0; side->index == 0 && i <= NB_NET_EARLY; i++) {
        write_raw(&pair, &message, sizeof message);
    }
    struct proxy_queue out = {.comm = pair.send, .sends = true};
    while (side->index == 1 && strstr(proxy_warning, "does not allow") == NULL) {
        (void)(out.count == 0 && proxy_post(&side->proxy, &out, &byte, 1, &result));
        (void)has_failed(side, &out); // makes progress
    }
    if (side->index == 0) {
        await_end(side, &pair);
    }
    barrier();
    close_pair(side, &pair);
}

// The first bytes of a lone send of comm 1 have landed when its memory is deregistered, or its comm is closed. Nothing
// is written to it afterwards, and the link lives on: another comm of it still works.
static void landing(struct side *side, bool closes) {
    enum { FIRST = 20000 };
    static const struct message message = {.type = 4, .comm = 1, .bytes = NB_NET_LONE};
    static unsigned char data[NB_NET_LONE];
    unsigned char other[100];
    struct pair pairs[2];
    struct proxy_queue queue;
    open_pair(side, &pairs[0]);
    pairs[1] = pairs[0];
    open_comms(side, &pairs[1]);
    queue = (struct proxy_queue){.comm = side->index == 0 ? pairs[1].send : pairs[1].recv, .sends = side->index == 0};
    memset(data, side->index == 0, sizeof data);
    fill(other, 0, 9, sizeof other);
    if (side->index == 0) {
        struct nb_net *net = nb_net_current(NB_NET_PLAIN);
        barrier();
        pthread_mutex_lock(&net->lock); // no message of the plugin comes between
        write_raw(&pairs[0], &message, sizeof message);
        write_raw(&pairs[0], data, FIRST);
        barrier();
        write_raw(&pairs[0], data + FIRST, sizeof data - FIRST);
        pthread_mutex_unlock(&net->lock);
        post(side, &queue, other, sizeof other);
        expect_done(side, &queue, sizeof other);
    } else {
        struct proxy_queue in = {.comm = pairs[0].recv};
        void *mhandle = NULL;
        int bytes = 0;
        int result = 0;
        CHECK(proxy_register(&side->proxy, in.comm, data, sizeof data, &mhandle) == 0, "regMr");
        post(side, &in, data, sizeof data);
        barrier();
        volatile unsigned char *last = data + FIRST - 1;
        while (*last == 0) {
            CHECK(!proxy_poll(&side->proxy, &in, &bytes, &result) && result == 0, "test: %d", result);
            check_time(side, "the first bytes");
        }
        if (closes) {
            CHECK(proxy_close_recv(&side->proxy, in.comm) == 0, "closeRecv");
        }
        CHECK(proxy_deregister(&side->proxy, in.comm, mhandle) == 0, "deregMr");
        memset(data, 7, sizeof data);
        CHECK(closes || has_failed(side, &in), "the receive has no error");
        barrier();
        post(side, &queue, other, sizeof other);
        expect_done(side, &queue, sizeof other);
        check_bytes(other, 0, 9, sizeof other);
        for (size_t i = 0; i < sizeof data; i++) {
            CHECK(data[i] == 7, "byte %zu was written after the deregistration", i);
        }
    }
    barrier();
    CHECK(proxy_close_send(&side->proxy, pairs[1].send) == 0, "closeSend");
    CHECK(proxy_close_recv(&side->proxy, pairs[1].recv) == 0, "closeRecv");
    CHECK(proxy_close_send(&side->proxy, pairs[0].send) == 0, "closeSend");
    if (!closes || side->index == 0) {
        CHECK(proxy_close_recv(&side->proxy, pairs[0].recv) == 0, "closeRecv");
    }
    CHECK(proxy_close_listen(&side->proxy, pairs[0].listener) == 0, "closeListen");
    barrier();
}

static void case_landing(struct side *side) {
    landing(side, false);
}

static void case_landing_closed(struct side *side) {
    landing(side, true);
}

static const struct test_case cases[] = {
    {.name = "limit", .run = case_limit, .all_versions = true},
    {.name = "lone", .run = case_lone},
    {.name = "runs", .run = case_runs},
    {.name = "close", .run = case_close},
    {.name = "exit", .run = case_exit, .all_versions = true}, // the kernel does not always drop data
    {.name = "close_before_accept", .run = case_close_before_accept},
    {.name = "too_long", .run = case_too_long},
    {.name = "flood", .run = case_flood, .tcp_only = true},
    {.name = "landing", .run = case_landing, .tcp_only = true},
    {.name = "landing_closed", .run = case_landing_closed, .tcp_only = true},
};

int main(int argc, char **argv) {
    return run_cases(argc, argv, cases, sizeof cases / sizeof cases[0]);
}
