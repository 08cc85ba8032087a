// Sockets: addresses are parsed and formatted consistently, ports come from their range, and a closed peer causes an
// error, not a signal. Also congestion control and the selection of interfaces.
#include <errno.h>
#include <ifaddrs.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/interrupt.h"
#include "base/sock.h"
#include "check.h"

enum { LIMIT_MS = 60000 };

// The host's interfaces; NULL: the real ones.
static struct ifaddrs *simulated;

int __real_getifaddrs(struct ifaddrs **all);
int __wrap_getifaddrs(struct ifaddrs **all);
void __real_freeifaddrs(struct ifaddrs *all);
void __wrap_freeifaddrs(struct ifaddrs *all);

int __wrap_getifaddrs(struct ifaddrs **all) {
    if (simulated == NULL) {
        return __real_getifaddrs(all);
    }
    *all = simulated;
    return 0;
}

void __wrap_freeifaddrs(struct ifaddrs *all) {
    if (all != simulated) {
        __real_freeifaddrs(all);
    }
}

static int64_t deadline_in_ms(int ms) {
    return nb_now_ns() + ms * (int64_t)1000000;
}

static void test_parse_and_format(void) {
    static const char *const good[] = {"127.0.0.1:4000", "0.0.0.0:0", "10.1.2.3:65535", "[::1]:4000", "[fd00::1:2]:1"};
    static const char *const bad[] = {"",
                                      "127.0.0.1",
                                      "127.0.0.1:",
                                      "127.0.0.1:65536",
                                      "127.0.0.1:-1",
                                      "host:80",
                                      "::1:4000",
                                      "[::1]4000",
                                      "[::1:4000",
                                      "127.0.0.1:1x",
                                      "[1.2.3.4]:1",
                                      "1.2.3:4000",
                                      "[fe80::1%no-such-if]:1",
                                      "[]:1",
                                      ":80"};
    struct nb_sockaddr addr;
    char text[NB_SOCK_TEXT];
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        CHECK(nb_sock_parse(good[i], &addr, NULL) == 0, "'%s'", good[i]);
        nb_sock_format(&addr, text);
        CHECK(strcmp(text, good[i]) == 0, "'%s' is formatted as '%s'", good[i], text);
    }
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct nb_error err = {0};
        CHECK(nb_sock_parse(bad[i], &addr, &err) == -EINVAL, "'%s' is accepted", bad[i]);
        CHECK(strstr(err.text, bad[i]) != NULL, "the error does not quote the text: %s", err.text);
    }
    CHECK(nb_sock_parse("[fe80::1%lo]:7", &addr, NULL) == 0, "an address with a scope is refused");
    nb_sock_format(&addr, text);
    CHECK(strcmp(text, "[fe80::1%lo]:7") == 0, "%s", text);
}

static void test_loopback_and_port(void) {
    static const struct {
        const char *text;
        bool loopback;
    } cases[] = {
        {"127.0.0.1:1", true}, {"127.9.9.9:1", true}, {"128.0.0.1:1", false}, {"[::1]:1", true}, {"[::2]:1", false}};
    struct nb_sockaddr addr;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        CHECK(nb_sock_parse(cases[i].text, &addr, NULL) == 0, "%s", cases[i].text);
        CHECK(nb_sock_is_loopback(&addr) == cases[i].loopback, "%s", cases[i].text);
        nb_sock_set_port(&addr, 54321);
        CHECK(nb_sock_port(&addr) == 54321, "%s: port %u", cases[i].text, nb_sock_port(&addr));
    }
}

static int listen_on(const char *text, uint16_t low, uint16_t high, struct nb_sockaddr *addr, struct nb_error *err) {
    CHECK(nb_sock_parse(text, addr, NULL) == 0, "%s", text);
    return nb_sock_listen(addr, (struct nb_port_range){low, high}, 8, err);
}

// Listens on two adjacent ports. Returns the lower one.
static uint16_t listen_on_two_ports(int fds[2]) {
    for (int i = 0; i < 1000; i++) {
        struct nb_sockaddr addr;
        fds[0] = listen_on("127.0.0.1:0", 0, 0, &addr, NULL);
        CHECK(fds[0] >= 0 && nb_sock_port(&addr) != 0, "listen on any port: %m");
        uint16_t port = nb_sock_port(&addr);
        fds[1] = port < UINT16_MAX ? listen_on("127.0.0.1:0", port + 1, port + 1, &addr, NULL) : -1;
        if (fds[1] >= 0) {
            return port;
        }
        close(fds[0]);
    }
    CHECK(false, "no two adjacent ports are free");
}

static void test_port_range(void) {
    struct nb_sockaddr addr;
    struct nb_error err = {0};
    char range[32];
    int fds[2];
    uint16_t port = listen_on_two_ports(fds);
    (void)snprintf(range, sizeof range, "%u-%u", port, port + 1);
    CHECK(listen_on("127.0.0.1:0", port, port + 1, &addr, &err) == -EADDRINUSE, "listened on a port in use");
    CHECK(strstr(err.text, range) != NULL && strstr(err.text, "127.0.0.1") != NULL, "%s", err.text);

    struct nb_error one = {0};
    (void)snprintf(range, sizeof range, "127.0.0.1:%u", port);
    CHECK(listen_on(range, 0, 0, &addr, &one) == -EADDRINUSE, "listened on the address's port, which is in use");
    (void)snprintf(range, sizeof range, "port %u", port);
    CHECK(strstr(one.text, range) != NULL, "%s", one.text);

    close(fds[1]);
    int fd = listen_on("127.0.0.1:0", port, port + 1, &addr, NULL);
    CHECK(fd >= 0 && nb_sock_port(&addr) == port + 1, "not the free port of the range: %u", nb_sock_port(&addr));
    CHECK(listen_on("127.0.0.1:0", 9, 8, &addr, NULL) == -EINVAL, "an empty range is accepted");
    close(fd);
    close(fds[0]);
}

static void wait_for(int fd, short events) {
    struct pollfd poller = {.fd = fd, .events = events};
    CHECK(poll(&poller, 1, LIMIT_MS) == 1, "descriptor %d was not ready in time", fd);
}

// Makes a connection through a listener at `text`. False: the host has no such address.
static bool connect_pair(const char *text, const char *from_text, int fds[2], struct nb_sockaddr *peer_address) {
    struct nb_sockaddr addr;
    struct nb_sockaddr from;
    int listener = listen_on(text, 0, 0, &addr, NULL);
    if (listener < 0) {
        return false;
    }
    CHECK(from_text == NULL || nb_sock_parse(from_text, &from, NULL) == 0, "parse the source address");
    fds[0] = nb_sock_connect(&addr, from_text != NULL ? &from : NULL, NULL, NULL);
    CHECK(fds[0] >= 0, "connect: %m");
    wait_for(fds[0], POLLOUT);
    CHECK(nb_sock_connected(fds[0]) == 0, "not connected");
    wait_for(listener, POLLIN);
    peer_address->len = sizeof peer_address->in6;
    fds[1] = accept4(listener, &peer_address->any, &peer_address->len, SOCK_NONBLOCK | SOCK_CLOEXEC);
    CHECK(fds[1] >= 0, "accept: %m");
    nb_sock_tune(fds[0], LIMIT_MS);
    nb_sock_tune(fds[1], 0);
    close(listener);
    return true;
}

// A connect that cannot start names the address it is bound to, and the variable that selects it.
static void test_connect_between_two_networks(void) {
    struct nb_sockaddr to;
    struct nb_sockaddr from;
    struct nb_error err = {0};
    CHECK(nb_sock_parse("192.0.2.1:9", &to, NULL) == 0 && nb_sock_parse("127.0.0.1:7", &from, NULL) == 0, "parse");
    int rc = nb_sock_connect(&to, &from, NULL, &err);
    CHECK(rc == -EINVAL || rc == -ENETUNREACH, "a loopback reaches another host: %d", rc);
    CHECK(strstr(err.text, "connect to 192.0.2.1:9 from 127.0.0.1:0: ") != NULL &&
              strstr(err.text, "NETBOTTLENECK_IFNAME") != NULL,
          "%s", err.text);
}

struct transfer {
    int fd;
    unsigned char *data;
    size_t bytes;
    int rc;
};

static void *write_transfer(void *arg) {
    struct transfer *transfer = arg;
    transfer->rc = nb_sock_write_all(transfer->fd, transfer->data, transfer->bytes, deadline_in_ms(LIMIT_MS), NULL);
    return NULL;
}

static bool always_pending(void *ctx) {
    (void)ctx;
    return true;
}

static void test_read_and_write_all(int fds[2]) {
    enum { BYTES = 8 << 20 };
    unsigned char *out = malloc(BYTES);
    unsigned char *in = malloc(BYTES);
    pthread_t thread;
    CHECK(out != NULL && in != NULL, "memory");
    for (size_t i = 0; i < BYTES; i++) {
        out[i] = (unsigned char)(i * 7 + i / 4096);
    }
    struct transfer transfer = {fds[0], out, BYTES, 1};
    CHECK(pthread_create(&thread, NULL, write_transfer, &transfer) == 0, "thread");
    CHECK(nb_sock_read_all(fds[1], in, BYTES, deadline_in_ms(LIMIT_MS), NULL) == 0, "read");
    CHECK(pthread_join(thread, NULL) == 0 && transfer.rc == 0, "write: %d", transfer.rc);
    CHECK(memcmp(in, out, BYTES) == 0, "the data differ");

    CHECK(nb_sock_read_all(fds[1], in, 1, nb_now_ns() - 1, NULL) == -ETIMEDOUT,
          "a read without data does not time out");
    struct nb_interrupt interrupt = {.pending = always_pending};
    CHECK(nb_sock_read_all(fds[1], in, 1, deadline_in_ms(LIMIT_MS), &interrupt) == -EINTR, "a read is not interrupted");
    CHECK(nb_sock_write_all(fds[0], out, 3, deadline_in_ms(LIMIT_MS), NULL) == 0, "write three bytes");
    CHECK(nb_sock_read_all(fds[1], in, 4, deadline_in_ms(50), NULL) == -ETIMEDOUT, "a short read does not time out");
    int rc = 0;
    while (rc == 0) {
        rc = nb_sock_write_all(fds[0], out, BYTES, nb_now_ns() - 1, NULL);
    }
    CHECK(rc == -ETIMEDOUT, "a write without a reader does not time out: %d", rc);
    free(out);
    free(in);
}

static void test_end_of_peer(int fds[2]) {
    char byte = 'x';
    CHECK(nb_sock_write_all(fds[1], &byte, 1, deadline_in_ms(LIMIT_MS), NULL) == 0, "write one byte");
    (void)shutdown(fds[1], SHUT_RDWR);
    CHECK(nb_sock_read_all(fds[0], &byte, 1, deadline_in_ms(LIMIT_MS), NULL) == 0, "data before the end are lost");
    CHECK(nb_sock_read_all(fds[0], &byte, 1, deadline_in_ms(LIMIT_MS), NULL) == -ECONNRESET,
          "the end is not reported as a reset");
    int rc = 0;
    while (rc == 0) {
        rc = nb_sock_write_all(fds[0], &byte, 1, deadline_in_ms(LIMIT_MS), NULL);
    }
    CHECK(rc == -ECONNRESET, "wrong error of a write to a closed peer: %d", rc);
    close(fds[0]);
    close(fds[1]);
}

static int tcp_option(int fd, int option) {
    int value = 0;
    socklen_t len = sizeof value;
    return getsockopt(fd, IPPROTO_TCP, option, &value, &len) == 0 ? value : -errno;
}

static void test_time_limits(int fd) {
    enum { OPTION_RTO_MAX_MS = 44 };
    nb_sock_tune(fd, 16000);
    CHECK(tcp_option(fd, TCP_USER_TIMEOUT) == 16000, "TCP_USER_TIMEOUT is %d", tcp_option(fd, TCP_USER_TIMEOUT));
    int rto_ms = tcp_option(fd, OPTION_RTO_MAX_MS);
    CHECK(rto_ms == 2000 || rto_ms == -ENOPROTOOPT, "TCP_RTO_MAX_MS is %d", rto_ms); // since Linux 6.15
    nb_sock_tune(fd, 500);
    rto_ms = tcp_option(fd, OPTION_RTO_MAX_MS);
    CHECK(rto_ms == 1000 || rto_ms == -ENOPROTOOPT, "TCP_RTO_MAX_MS is %d", rto_ms);
}

static void get_congestion(int fd, char name[16]) {
    socklen_t len = 15;
    memset(name, 0, 16);
    CHECK(getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &len) == 0, "TCP_CONGESTION: %m");
}

static void check_reno(const int fds[2]) {
    for (int i = 0; i < 2; i++) {
        char name[16];
        get_congestion(fds[i], name);
        CHECK(strcmp(name, "reno") == 0, "end %d on loopback uses %s", i, name);
    }
}

// A requested algorithm is used, even on loopback; an unknown one is refused with the list of those available.
static void test_congestion(void) {
    char host[16];
    char has[16];
    struct nb_sockaddr addr;
    struct nb_error err = {0};
    CHECK(nb_sock_parse("127.0.0.1:0", &addr, NULL) == 0, "parse");
    int listener = nb_sock_listen(&addr, (struct nb_port_range){0, 0}, 4, NULL);
    int plain = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    get_congestion(plain, host); // the host's default, which every user may select
    CHECK(nb_sock_check_congestion(host, &err) == 0, "%s", err.text);
    int fd = nb_sock_connect(&addr, NULL, host, &err);
    CHECK(fd >= 0, "%s", err.text);
    get_congestion(fd, has);
    CHECK(strcmp(has, host) == 0, "%s was requested, %s is used", host, has);
    CHECK(nb_sock_check_congestion("nosuch", &err) == -ENOENT, "%s", err.text);
    CHECK(strstr(err.text, "'nosuch'") != NULL && strstr(err.text, "this host allows: ") != NULL &&
              strstr(err.text, host) != NULL,
          "%s", err.text);
    CHECK(nb_sock_connect(&addr, NULL, "nosuch", &err) == -ENOENT, "%s", err.text);
    close(fd);
    close(plain);
    close(listener);
}

static void test_connections(void) {
    struct nb_sockaddr from;
    int fds[2];
    CHECK(connect_pair("127.0.0.1:0", NULL, fds, &from), "no IPv4 loopback");
    check_reno(fds);
    test_read_and_write_all(fds);
    test_time_limits(fds[0]);
    close(fds[0]);
    close(fds[1]);
    CHECK(connect_pair("127.0.0.1:0", "127.0.0.2:1", fds, &from), "cannot connect from 127.0.0.2");
    CHECK(ntohl(from.in4.sin_addr.s_addr) == 0x7f000002, "connected from %x", ntohl(from.in4.sin_addr.s_addr));
    test_end_of_peer(fds);
    if (connect_pair("[::1]:0", NULL, fds, &from)) {
        CHECK(nb_sock_is_loopback(&from) && from.any.sa_family == AF_INET6, "wrong address of an IPv6 peer");
        check_reno(fds);
        test_end_of_peer(fds);
    } else {
        (void)printf("test_sock: IPv6 is not tested: no IPv6 loopback\n");
    }
}

static void test_connection_refused(void) {
    struct nb_sockaddr addr;
    int holder = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0); // occupies a port without listening
    CHECK(nb_sock_parse("127.0.0.1:0", &addr, NULL) == 0 && bind(holder, &addr.any, addr.len) == 0, "bind: %m");
    CHECK(getsockname(holder, &addr.any, &addr.len) == 0, "getsockname: %m");
    int fd = nb_sock_connect(&addr, NULL, NULL, NULL);
    int rc = fd;
    if (fd >= 0) {
        wait_for(fd, POLLOUT);
        rc = nb_sock_connected(fd);
        close(fd);
    }
    CHECK(rc == -ECONNREFUSED, "wrong error without a listener: %d", rc);
    close(holder);
}

static void test_interfaces(void) {
    enum { MAX = 64 };
    struct nb_sockaddr addrs[MAX];
    char names[MAX][IF_NAMESIZE];
    static const char *const lo[] = {"lo", "=lo", "=lo,=nothing", "nothing,lo", "l"};
    for (size_t i = 0; i < sizeof lo / sizeof lo[0]; i++) {
        int n = nb_sock_interfaces(lo[i], NB_SOCK_ALTERNATIVES, addrs, names, MAX, NULL);
        CHECK(n >= 1 && strncmp(names[0], "l", 1) == 0, "'%s' selects no interface", lo[i]);
    }
    CHECK(nb_sock_interfaces("=lo", 0, addrs, names, MAX, NULL) == 1 && nb_sock_is_loopback(&addrs[0]),
          "not exactly one address of lo");
    int four = nb_sock_interfaces("=lo", NB_SOCK_IPV4, addrs, names, MAX, NULL);
    CHECK(four == 1 && addrs[0].any.sa_family == AF_INET, "lo by IPv4: %d", four);
    struct nb_error why = {0};
    int six = nb_sock_interfaces("=lo", NB_SOCK_IPV6, addrs, names, MAX, &why); // lo may have no such address
    CHECK(six == 1 ? addrs[0].any.sa_family == AF_INET6 : strstr(why.text, "up by IPv6 matches '=lo'") != NULL,
          "lo by IPv6: %d, %s", six, why.text);
    int all = nb_sock_interfaces(NULL, 0, addrs, names, MAX, NULL);
    CHECK(all >= 1 && nb_sock_interfaces("", 0, addrs, names, MAX, NULL) == all, "default selection: %d", all);
    bool others = strcmp(names[0], "lo") != 0;
    for (int i = 0; i < all; i++) {
        CHECK(!others || !nb_sock_is_loopback(&addrs[i]), "%s is loopback, which is not the only interface", names[i]);
        CHECK(i == 0 || addrs[i - 1].any.sa_family == AF_INET || addrs[i].any.sa_family == AF_INET6,
              "an IPv6 address precedes an IPv4 address");
    }
    if (others) { // the order is that of the list, not the system's
        char other[IF_NAMESIZE];
        char list[2 * IF_NAMESIZE + 4];
        memcpy(other, names[0], IF_NAMESIZE);
        for (int first = 0; first < 2; first++) {
            snprintf(list, sizeof list, "=%s,%s", first == 0 ? "lo" : other, first == 0 ? other : "lo");
            CHECK(nb_sock_interfaces(list, 0, addrs, names, MAX, NULL) == 2, "%s", list);
            CHECK(strcmp(names[first], "lo") == 0 && strcmp(names[1 - first], other) == 0, "%s: %s first", list,
                  names[0]);
            CHECK(nb_sock_is_loopback(&addrs[first]) && !nb_sock_is_loopback(&addrs[1 - first]),
                  "%s: addresses do not match the names", list);
        }
    }
    int rest = nb_sock_interfaces("^lo,docker,virbr", 0, addrs, names, MAX, NULL);
    CHECK(rest == (others ? all : -ENODEV), "without lo: %d of %d", rest, all);
    CHECK(nb_sock_interfaces("^nothing,docker,virbr", 0, addrs, names, MAX, NULL) == all,
          "excluding an unknown name changes the selection");
    CHECK(nb_sock_interfaces("lo", 0, addrs, names, 0, NULL) <= 0, "addresses are returned without room");

    struct nb_error err = {0};
    CHECK(nb_sock_interfaces("=l,nosuch", 0, addrs, names, MAX, &err) == -ENODEV, "an exact name matches as a prefix");
    CHECK(strstr(err.text, "'=l,nosuch'") != NULL && strstr(err.text, "lo") != NULL, "%s", err.text);
    // Usually lo has an address of each family.
    const char *list = strstr(err.text, "there is: ");
    CHECK(list != NULL, "%s", err.text);
    int count_of_lo = 0;
    for (const char *at = list + strlen("there is: "); at != NULL; at = strstr(at, ", ")) {
        at += strncmp(at, ", ", 2) == 0 ? 2 : 0;
        count_of_lo += strncmp(at, "lo", 2) == 0 && (at[2] == '\0' || at[2] == ',');
    }
    CHECK(count_of_lo == 1, "a name is not listed exactly once: %s", err.text);
}

static void check_selected(const char *spec, int expected) {
    struct nb_sockaddr addrs[4];
    char names[4][IF_NAMESIZE];
    int count = nb_sock_interfaces(spec, 0, addrs, names, 4, NULL);
    CHECK(count == expected, "'%s' selects %d", spec, count);
}

static void check_missing(const char *spec, const char *entry) {
    struct nb_sockaddr addrs[4];
    char names[4][IF_NAMESIZE];
    char expected[128];
    struct nb_error err = {0};
    snprintf(expected, sizeof expected, "no interface that is up matches '%s' of '%s'; there is: eth0, eth1", entry,
             spec);
    CHECK(nb_sock_interfaces(spec, 0, addrs, names, 4, &err) == -ENODEV, "'%s' is accepted", spec);
    CHECK(strcmp(err.text, expected) == 0, "'%s': %s", spec, err.text);
    int count = nb_sock_interfaces(spec, NB_SOCK_ALTERNATIVES, addrs, names, 4, NULL);
    CHECK(count > 0, "'%s' as alternatives: %d", spec, count);
}

static void test_entries_of_a_list(void) {
    static const char *const both[] = {"eth0,eth1",   "eth0, eth1", "=eth0, eth1",   "=eth0,=eth1", " =eth0 , =eth1 ",
                                       "eth0,,eth1,", "eth,eth1",   "\teth0\t,eth1", "eth0,=eth1"};
    static const char *const one[] = {"^lo, eth1", "^ eth1", "^=eth1 ,lo", "^nothing,eth1", "eth1,=eth1", " = eth0 "};
    char names[2][IF_NAMESIZE] = {"eth0", "eth1"};
    struct nb_sockaddr any;
    CHECK(nb_sock_parse("10.0.0.1:0", &any, NULL) == 0, "parse");
    struct ifaddrs last = {.ifa_name = names[1], .ifa_flags = IFF_UP | IFF_RUNNING, .ifa_addr = &any.any};
    struct ifaddrs first = last;
    first.ifa_name = names[0];
    first.ifa_next = &last;
    simulated = &first;
    for (size_t i = 0; i < sizeof both / sizeof both[0]; i++) {
        check_selected(both[i], 2);
    }
    for (size_t i = 0; i < sizeof one / sizeof one[0]; i++) {
        check_selected(one[i], 1);
    }
    check_missing("eth0,typo1", "typo1");
    check_missing("typo1 , eth0", "typo1");
    check_missing("eth0,=eth", "eth");
    check_missing("=eth0,eth", "eth");
    check_missing("eth0;eth1,eth", "eth0;eth1");
    simulated = NULL;
}

// An interface without carrier is selected only by its exact name.
static void test_interface_without_carrier(void) {
    char busy_name[] = "eth0";
    char idle_name[] = "eth1";
    struct nb_sockaddr any;
    CHECK(nb_sock_parse("10.0.0.1:0", &any, NULL) == 0, "parse");
    struct ifaddrs idle = {.ifa_name = idle_name, .ifa_flags = IFF_UP, .ifa_addr = &any.any};
    struct ifaddrs busy = {
        .ifa_next = &idle, .ifa_name = busy_name, .ifa_flags = IFF_UP | IFF_RUNNING, .ifa_addr = &any.any};
    simulated = &busy;
    check_selected("", 1);
    check_selected("eth", 1);
    check_selected("eth1", -ENODEV);
    check_selected("=eth1", 1);
    check_selected("=eth0,eth1", 2);
    check_selected("^docker0", 1);
    check_selected("^=docker0", 1);
    check_selected("^=eth0", -ENODEV);
    simulated = NULL;
}

// Checks that a spec selects these addresses, in this order.
static void check_addresses(const char *spec, const char *expected) {
    struct nb_sockaddr addrs[4];
    char names[4][IF_NAMESIZE];
    char found[4 * NB_SOCK_TEXT] = "";
    int count = nb_sock_interfaces(spec, 0, addrs, names, 4, NULL);
    for (int i = 0; i < count; i++) {
        char text[NB_SOCK_TEXT];
        nb_sock_format(&addrs[i], text);
        snprintf(found + strlen(found), sizeof found - strlen(found), "%s%s=%s", i > 0 ? " " : "", names[i], text);
    }
    CHECK(strcmp(found, expected) == 0, "'%s' selects '%s', not '%s'", spec, found, expected);
}

// As getifaddrs() gives them: each interface's own row, then those of IPv4 addresses, then those of IPv6.
static void simulate(int count, const char *const (*rows)[2], struct ifaddrs *all, struct nb_sockaddr *addrs) {
    for (int i = 0; i < count; i++) {
        unsigned flags = IFF_UP | IFF_RUNNING | (strcmp(rows[i][0], "lo") == 0 ? IFF_LOOPBACK : 0U);
        addrs[i] = (struct nb_sockaddr){.any = {.sa_family = AF_PACKET}};
        CHECK(rows[i][1] == NULL || nb_sock_parse(rows[i][1], &addrs[i], NULL) == 0, "%s", rows[i][1]);
        all[i] = (struct ifaddrs){.ifa_next = i + 1 < count ? &all[i + 1] : NULL,
                                  .ifa_name = (char *)rows[i][0],
                                  .ifa_flags = flags,
                                  .ifa_addr = &addrs[i].any};
    }
    simulated = all;
}

static void test_order_without_a_spec(void) {
    enum { MOST = 10 };
    static const char *const mixed[][2] = {{"lo", NULL},           {"docker0", NULL},       {"eth0", NULL},
                                           {"eth1", NULL},         {"lo", "127.0.0.1:0"},   {"docker0", "172.17.0.1:0"},
                                           {"eth1", "10.0.1.1:0"}, {"eth0", "[fe80::1]:0"}, {"eth0", "[fd00::1]:0"},
                                           {"eth1", "[fd01::1]:0"}};
    static const char *const older[][2] = {{"eth0", NULL},         {"eth1", NULL},
                                           {"virbr0", NULL},       {"eth0:1", "10.0.0.1:0"},
                                           {"eth1", "10.0.1.1:0"}, {"virbr0", "192.168.122.1:0"}};
    static const char *const bridges[][2] = {{"lo", "127.0.0.1:0"}, {"virbr0", "192.168.122.1:0"}, {"lo", "[::1]:0"}};
    static const char *const managed[][2] = {
        {"usb0", "169.254.3.1:0"}, {"docker0", "172.17.0.1:0"}, {"eth0", "169.254.0.9:0"}, {"eth0", "10.0.0.1:0"}};
    struct ifaddrs all[MOST];
    struct nb_sockaddr addrs[MOST];
    simulate(4, managed, all, addrs);
    check_addresses("", "eth0=10.0.0.1:0");
    check_addresses("^docker0", "eth0=10.0.0.1:0");
    check_addresses("usb", "usb0=169.254.3.1:0");
    simulate(2, managed, all, addrs);
    check_addresses("", "usb0=169.254.3.1:0");
    simulate(MOST, mixed, all, addrs);
    check_addresses("", "eth1=10.0.1.1:0 eth0=[fd00::1]:0");
    check_addresses("eth,docker", "eth1=10.0.1.1:0 eth0=[fd00::1]:0 docker0=172.17.0.1:0");
    check_addresses("^eth1", "docker0=172.17.0.1:0 eth0=[fd00::1]:0");
    simulate(6, older, all, addrs);
    check_addresses("", "eth0:1=10.0.0.1:0 eth1=10.0.1.1:0");
    simulate(3, bridges, all, addrs);
    check_addresses("", "virbr0=192.168.122.1:0");
    simulate(1, bridges, all, addrs);
    check_addresses("", "lo=127.0.0.1:0");
    simulated = NULL;
}

int main(void) {
    test_parse_and_format();
    test_loopback_and_port();
    test_port_range();
    test_connections();
    test_congestion();
    test_connection_refused();
    test_interfaces();
    test_entries_of_a_list();
    test_interface_without_carrier();
    test_order_without_a_spec();
    test_connect_between_two_networks();
    return 0;
}
