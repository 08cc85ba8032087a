// Links of the NCCL net plugin that do not open: what both sides' calls return, and their logs say.
#include <stdatomic.h>

#include "nccl_sides.h"
#include "transport/lanes.h"

static atomic_bool lanes_held;    // opening lanes does not return
static atomic_int lanes_code;     // it fails with this code; 0: it does not
static atomic_bool lanes_blocked; // lanes 2 and 3 do not connect
static atomic_bool one_more;      // the variable selects one interface more

uint64_t __real_nb_lanes_peer_missing(const struct nb_lanes *lanes, int peer);
uint64_t __wrap_nb_lanes_peer_missing(const struct nb_lanes *lanes, int peer);
int __real_nb_lanes_open(struct nb_lanes **lanes, const struct nb_lanes_config *config, struct nb_error *err);
int __wrap_nb_lanes_open(struct nb_lanes **lanes, const struct nb_lanes_config *config, struct nb_error *err);
int __real_nb_sock_interfaces(const char *spec, unsigned choice, struct nb_sockaddr *addrs, char (*names)[IF_NAMESIZE],
                              int max, struct nb_error *err);
int __wrap_nb_sock_interfaces(const char *spec, unsigned choice, struct nb_sockaddr *addrs, char (*names)[IF_NAMESIZE],
                              int max, struct nb_error *err);

int __wrap_nb_sock_interfaces(const char *spec, unsigned choice, struct nb_sockaddr *addrs, char (*names)[IF_NAMESIZE],
                              int max, struct nb_error *err) {
    int count = __real_nb_sock_interfaces(spec, choice, addrs, names, max, err);
    if (count > 0 && count < max && atomic_load(&one_more)) {
        addrs[count] = addrs[0];
        memcpy(names[count], names[0], IF_NAMESIZE);
        count++;
    }
    return count;
}

uint64_t __wrap_nb_lanes_peer_missing(const struct nb_lanes *lanes, int peer) {
    return atomic_load(&lanes_blocked) ? 12 : __real_nb_lanes_peer_missing(lanes, peer);
}

int __wrap_nb_lanes_open(struct nb_lanes **lanes, const struct nb_lanes_config *config, struct nb_error *err) {
    while (atomic_load(&lanes_held)) {
    }
    int code = atomic_load(&lanes_code);
    return code != 0 ? nb_fail(err, code, "the lanes do not open") : __real_nb_lanes_open(lanes, config, err);
}

// Connects, and accepts, until that fails. Both logs name `text`.
static void expect_failed_link(struct side *side, struct pair *pair, const char *text) {
    void *comm = NULL;
    for (int rc = 0; rc == 0;) {
        rc = side->index == 0 ? proxy_connect(&side->proxy, 0, pair->handle, &comm)
                              : proxy_accept(&side->proxy, pair->listener, &comm);
        CHECK(comm == NULL, "connected");
        check_time(side, "an error");
    }
    CHECK(strstr(proxy_warning, text) != NULL, "the log has no '%s': %s", text, proxy_warning);
}

// The accepting side cannot open its lanes: both sides name the reason, and the connecting one does not try again.
static void case_accept_fails(struct side *side) {
    struct pair pair;
    atomic_store(&lanes_code, side->index == 1 ? -EMFILE : 0);
    open_listener(side, &pair);
    expect_failed_link(side, &pair,
                       side->index == 1 ? "the lanes do not open: see `ulimit -n`" : "the lanes do not open");
    barrier();
    CHECK(proxy_close_listen(&side->proxy, pair.listener) == 0, "closeListen");
}

// The connecting side cannot: both name the reason and the peer.
static void case_connect_fails(struct side *side) {
    struct pair pair;
    atomic_store(&lanes_code, side->index == 0 ? -EADDRINUSE : 0);
    open_listener(side, &pair);
    expect_failed_link(side, &pair, "(process ");
    const char *reason =
        side->index == 0 ? "the lanes do not open: widen NETBOTTLENECK_PORTS" : "the lanes do not open";
    CHECK(strstr(proxy_warning, reason) != NULL, "no reason: %s", proxy_warning);
    barrier();
    CHECK(proxy_close_listen(&side->proxy, pair.listener) == 0, "closeListen");
}

// The sides have different settings: both name those of both. The log of each has its own from the beginning.
static void different(struct side *side, const char *first, const char *second) {
    struct pair pair;
    const char *mine = side->index == 0 ? first : second;
    CHECK(proxy_finalize(&side->proxy) == 0, "finalize");
    CHECK(proxy_init(&side->proxy, 77) == 0, "init");
    CHECK(strstr(proxy_info, mine) != NULL, "the log has no '%s': %s", mine, proxy_info);
    open_listener(side, &pair);
    expect_failed_link(side, &pair, second);
    CHECK(strstr(proxy_warning, first) != NULL, "the log does not name both: %s", proxy_warning);
    barrier();
    CHECK(proxy_close_listen(&side->proxy, pair.listener) == 0, "closeListen");
}

static void case_different_settings(struct side *side) {
    if (side->index == 1) {
        setenv("NETBOTTLENECK_STREAMS", "2", 1);
    }
    different(side, "4 lanes", "2 lanes");
}

// Lane i goes from the i-th interface of one side to the i-th of the other.
static void case_different_interfaces(struct side *side) {
    atomic_store(&one_more, side->index == 1);
    different(side, "interfaces: 1", "interfaces: 2");
}

// Two lanes do not connect in time: the log names them.
static void case_lanes_blocked(struct side *side) {
    struct pair pair;
    atomic_store(&lanes_blocked, side->index == 0);
    open_listener(side, &pair);
    if (side->index == 0) {
        expect_failed_link(side, &pair, "lanes 2, 3 are not open");
    }
    barrier();
    CHECK(proxy_close_listen(&side->proxy, pair.listener) == 0, "closeListen");
}

// Ends the incoming link that waits for the peer's lanes.
static void end_joining(struct side *side, struct pair *pair) {
    struct nb_net *net = nb_net_current(NB_NET_PLAIN);
    const struct nb_net_listener *listener = pair->listener;
    for (bool failed = false; !failed;) {
        CHECK(proxy_accept(&side->proxy, pair->listener, &pair->recv) == 0, "accept: %s", proxy_warning);
        pthread_mutex_lock(&net->lock);
        NB_LIST_EACH(it, &net->links) {
            const struct nb_link *link = NB_CONTAINER(it, const struct nb_link, at_net);
            if (link->state == NB_LINK_JOIN) {
                CHECK(shutdown(link->watch.fd, SHUT_RDWR) == 0, "shutdown: %s", strerror(errno));
            }
        }
        failed = listener->failure.code != 0;
        pthread_mutex_unlock(&net->lock);
        check_time(side, "the end of the link");
    }
}

// The peer's link ends while it opens, and the peer tries again: accept returns no error.
static void case_comes_again(struct side *side) {
    struct pair pair = {.send = NULL, .recv = NULL};
    open_listener(side, &pair);
    if (side->index == 0) {
        atomic_store(&lanes_held, true);
        CHECK(proxy_connect(&side->proxy, 0, pair.handle, &pair.send) == 0, "connect: %s", proxy_warning);
        barrier(); // the other side has seen the end of the link
        atomic_store(&lanes_held, false);
    } else {
        end_joining(side, &pair);
        barrier();
    }
    while (pair.send == NULL && pair.recv == NULL) {
        CHECK(side->index == 0 ? proxy_connect(&side->proxy, 0, pair.handle, &pair.send) == 0
                               : proxy_accept(&side->proxy, pair.listener, &pair.recv) == 0,
              "%s", proxy_warning);
        check_time(side, "connecting");
    }
    barrier();
    CHECK(side->index == 0 ? proxy_close_send(&side->proxy, pair.send) == 0
                           : proxy_close_recv(&side->proxy, pair.recv) == 0,
          "close");
    CHECK(proxy_close_listen(&side->proxy, pair.listener) == 0, "closeListen");
}

// The host lacks what a variable names: init fails, and its log names the variable and the value. Without it, init opens.
static void case_not_there(struct side *side) {
    static const struct {
        const char *network;
        const char *variable;
        const char *value;
        const char *remedy;
    } wrong[] = {{"tcp", "NETBOTTLENECK_CONGESTION", "nosuch", "this host allows: "},
                 {"ofi", "NETBOTTLENECK_LIBFABRIC", "/nonexistent/libfabric.so", "correct or unset it"},
                 {"ofi", "NETBOTTLENECK_PROVIDER", "nosuch", "it has: "}};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        const char *before = getenv(wrong[i].variable);
        char *kept = before != NULL ? strdup(before) : NULL;
        char named[96];
        if (strcmp(wrong[i].network, getenv("NETBOTTLENECK_TRANSPORT")) != 0) {
            continue;
        }
        CHECK(proxy_finalize(&side->proxy) == 0, "finalize");
        setenv(wrong[i].variable, wrong[i].value, 1);
        CHECK(proxy_init(&side->proxy, 77) != 0, "%s is accepted", wrong[i].variable);
        snprintf(named, sizeof named, "%s='%s'", wrong[i].variable, wrong[i].value);
        CHECK(strstr(proxy_warning, named) != NULL && strstr(proxy_warning, wrong[i].remedy) != NULL,
              "the log has no '%s', '%s': %s", named, wrong[i].remedy, proxy_warning);
        setenv(wrong[i].variable, kept != NULL ? kept : "", 1);
        free(kept);
        CHECK(proxy_init(&side->proxy, 77) == 0, "init: %s", proxy_warning);
    }
}

// NCCL_SOCKET_FAMILY selects the family of the listener's address; values that NCCL does not know say nothing.
static void case_family(struct side *side) {
    static const struct {
        const char *value;
        int family;
    } wanted[] = {{"AF_INET", AF_INET}, {"AF_INET6", AF_INET6}, {"inet6", AF_INET}, {"", AF_INET}};
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++) {
        struct nb_net_handle handle;
        struct pair pair;
        CHECK(proxy_finalize(&side->proxy) == 0, "finalize");
        setenv("NCCL_SOCKET_FAMILY", wanted[i].value, 1);
        bool there = proxy_init(&side->proxy, 77) == 0;
        if (!there && wanted[i].family == AF_INET6 &&
            strstr(proxy_warning, "no interface that is up by IPv6") != NULL) {
            setenv("NCCL_SOCKET_FAMILY", "", 1); // lo has no such address
            CHECK(proxy_init(&side->proxy, 77) == 0, "init: %s", proxy_warning);
            continue;
        }
        CHECK(there, "init: %s", proxy_warning);
        open_pair(side, &pair);
        memcpy(&handle, pair.handle, sizeof handle);
        CHECK(handle.family == wanted[i].family, "'%s': family %d", wanted[i].value, handle.family);
        barrier();
        close_pair(side, &pair);
    }
}

// True if all links of a net are open.
static bool all_ready(struct nb_net *net) {
    bool ready = true;
    pthread_mutex_lock(&net->lock);
    NB_LIST_EACH(it, &net->links) {
        ready = ready && NB_CONTAINER(it, const struct nb_link, at_net)->state == NB_LINK_READY;
    }
    pthread_mutex_unlock(&net->lock);
    return ready;
}

// An open link has connections, and no listener of its own: the process keeps the one that takes new links.
static void case_listeners(struct side *side) {
    struct pair pair;
    open_pair(side, &pair);
    while (!all_ready(nb_net_current(NB_NET_PLAIN))) {
        check_time(side, "opening all lanes");
    }
    int listeners = 0;
    for (int fd = SOCKET + 1; fd < 1024; fd++) {
        int listens = 0;
        socklen_t bytes = sizeof listens;
        listeners += getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &bytes) == 0 && listens != 0;
    }
    CHECK(listeners == 1, "%d listeners", listeners);
    barrier();
    close_pair(side, &pair);
}

static const struct test_case cases[] = {
    {.name = "accept_fails", .run = case_accept_fails, .timeout_s = "2"},
    {.name = "connect_fails", .run = case_connect_fails, .timeout_s = "2"},
    {.name = "different_settings", .run = case_different_settings, .timeout_s = "2"},
    {.name = "different_interfaces", .run = case_different_interfaces, .timeout_s = "2"},
    {.name = "lanes_blocked", .run = case_lanes_blocked, .timeout_s = "4"},
    {.name = "comes_again", .run = case_comes_again},
    {.name = "not_there", .run = case_not_there},
    {.name = "family", .run = case_family},
    {.name = "listeners", .run = case_listeners, .tcp_only = true},
};

int main(int argc, char **argv) {
    return run_cases(argc, argv, cases, sizeof cases / sizeof cases[0]);
}
