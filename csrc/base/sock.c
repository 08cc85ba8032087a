// Sockets: addresses as text, listen, accept, connect, and whole reads and writes.
#include "base/sock.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/fork.h"
#include "base/interrupt.h"

enum {
    PORT_MAX = 65535,
    OPTION_RTO_MAX_MS = 44, // TCP_RTO_MAX_MS, since Linux 6.15; missing in older headers
    RTO_LEAST_MS = 1000     // the kernel refuses less
};

static bool parse_port(const char *text, uint16_t *port) {
    size_t digits = strspn(text, "0123456789");
    if (digits == 0 || digits > 5 || text[digits] != '\0') {
        return false;
    }
    long value = strtol(text, NULL, 10);
    *port = (uint16_t)value;
    return value <= PORT_MAX;
}

static bool parse_in6(char *host, struct sockaddr_in6 *in6) {
    char *scope = strchr(host, '%');
    if (scope != NULL) {
        *scope++ = '\0';
        in6->sin6_scope_id = if_nametoindex(scope);
        if (in6->sin6_scope_id == 0) {
            return false;
        }
    }
    in6->sin6_family = AF_INET6;
    return inet_pton(AF_INET6, host, &in6->sin6_addr) == 1;
}

int nb_sock_parse(const char *text, struct nb_sockaddr *addr, struct nb_error *err) {
    struct nb_sockaddr parsed = {0};
    char host[NB_SOCK_TEXT];
    bool six = text[0] == '[';
    const char *start = six ? text + 1 : text;
    const char *end = six ? strstr(start, "]:") : strchr(start, ':');
    uint16_t port = 0;
    bool ok = end != NULL && (size_t)(end - start) < sizeof host && parse_port(end + (six ? 2 : 1), &port);
    if (ok) {
        memcpy(host, start, (size_t)(end - start));
        host[end - start] = '\0';
        if (six) {
            parsed.len = sizeof parsed.in6;
            ok = parse_in6(host, &parsed.in6);
        } else {
            parsed.len = sizeof parsed.in4;
            parsed.in4.sin_family = AF_INET;
            ok = inet_pton(AF_INET, host, &parsed.in4.sin_addr) == 1;
        }
    }
    if (!ok) {
        return nb_fail(err, -EINVAL, "'%.80s' is not an address: expected 10.0.0.1:4000 or [fd00::1]:4000", text);
    }
    nb_sock_set_port(&parsed, port);
    *addr = parsed;
    return 0;
}

void nb_sock_format(const struct nb_sockaddr *addr, char text[NB_SOCK_TEXT]) {
    char host[INET6_ADDRSTRLEN] = "?";
    char scope[IF_NAMESIZE] = "";
    if (addr->any.sa_family == AF_INET6) {
        (void)inet_ntop(AF_INET6, &addr->in6.sin6_addr, host, sizeof host);
        bool scoped = addr->in6.sin6_scope_id != 0 && if_indextoname(addr->in6.sin6_scope_id, scope) != NULL;
        (void)snprintf(text, NB_SOCK_TEXT, "[%s%s%.15s]:%u", host, scoped ? "%" : "", scope, nb_sock_port(addr));
    } else {
        if (addr->any.sa_family == AF_INET) {
            (void)inet_ntop(AF_INET, &addr->in4.sin_addr, host, sizeof host);
        }
        (void)snprintf(text, NB_SOCK_TEXT, "%s:%u", host, nb_sock_port(addr));
    }
}

bool nb_sock_is_loopback(const struct nb_sockaddr *addr) {
    if (addr->any.sa_family == AF_INET6) {
        return IN6_IS_ADDR_LOOPBACK(&addr->in6.sin6_addr);
    }
    return addr->any.sa_family == AF_INET && (ntohl(addr->in4.sin_addr.s_addr) >> IN_CLASSA_NSHIFT) == IN_LOOPBACKNET;
}

uint16_t nb_sock_port(const struct nb_sockaddr *addr) {
    return ntohs(addr->any.sa_family == AF_INET6 ? addr->in6.sin6_port : addr->in4.sin_port);
}

void nb_sock_set_port(struct nb_sockaddr *addr, uint16_t port) {
    if (addr->any.sa_family == AF_INET6) {
        addr->in6.sin6_port = htons(port);
    } else {
        addr->in4.sin_port = htons(port);
    }
}

static int open_socket(int family) {
    nb_fork_hold();
    int fd = nb_fork_own(socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    return fd < 0 ? -errno : fd;
}

// Selects a congestion control without pacing on loopback. The host may have one that paces, for its network. On
// loopback nothing shares the path and the processor sets the rate, so pacing only arms a timer for every 64 KiB. Must
// run before the connection exists: pacing that has begun would continue.
static void pace_none(int fd, const struct nb_sockaddr *addr) {
    static const char plain[] = "reno"; // every kernel has it, and any process may select it
    if (nb_sock_is_loopback(addr)) {
        (void)setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, plain, sizeof plain - 1);
    }
}

static int pace_by(int fd, const char *congestion, struct nb_error *err) {
    if (setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, congestion, (socklen_t)strlen(congestion)) == 0) {
        return 0;
    }
    int code = -errno;
    char allowed[256] = "";
    int list = open("/proc/sys/net/ipv4/tcp_allowed_congestion_control", O_RDONLY | O_CLOEXEC);
    ssize_t n = list < 0 ? 0 : read(list, allowed, sizeof allowed - 1);
    if (list >= 0) {
        close(list);
    }
    allowed[n > 0 ? strcspn(allowed, "\n") : 0] = '\0';
    errno = -code;
    return nb_fail(err, code, "congestion control '%s': %m; this host allows: %s", congestion, allowed);
}

int nb_sock_check_congestion(const char *congestion, struct nb_error *err) {
    int fd = open_socket(AF_INET);
    if (fd < 0) {
        errno = -fd;
        return nb_fail(err, fd, "socket for congestion control '%s': %m", congestion);
    }
    int rc = pace_by(fd, congestion, err);
    close(fd);
    return rc;
}

static int listen_at(const struct nb_sockaddr *addr, int backlog) {
    int one = 1;
    int fd = open_socket(addr->any.sa_family);
    if (fd < 0) {
        return fd;
    }
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (addr->any.sa_family == AF_INET6) {
        (void)setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &one, sizeof one);
    }
    pace_none(fd, addr); // accepted sockets inherit it
    if (bind(fd, &addr->any, addr->len) != 0 || listen(fd, backlog) != 0) {
        int rc = -errno;
        close(fd);
        return rc;
    }
    return fd;
}

static int fail_listen(const struct nb_sockaddr *addr, int low, int high, int code, struct nb_error *err) {
    char text[NB_SOCK_TEXT];
    nb_sock_format(addr, text);
    char *colon = strrchr(text, ':');
    *colon = '\0';
    errno = -code;
    if (low == high) {
        return nb_fail(err, code, "listen on %s, port %d: %m", text, low);
    }
    if (code == -EADDRINUSE) {
        return nb_fail(err, code, "listen on %s: no port of %d-%d is free: %m", text, low, high);
    }
    return nb_fail(err, code, "listen on %s, a port of %d-%d: %m", text, low, high);
}

int nb_sock_listen(struct nb_sockaddr *addr, struct nb_port_range ports, int backlog, struct nb_error *err) {
    struct nb_sockaddr at = *addr;
    int low = nb_sock_port(addr) != 0 ? nb_sock_port(addr) : ports.low;
    int high = nb_sock_port(addr) != 0 ? low : ports.high;
    if (high < low) {
        return nb_fail(err, -EINVAL, "ports %d-%d: the range is empty", low, high);
    }
    if (low == 0 && high != 0) {
        low = 1;
    }
    int fd = -EADDRINUSE;
    for (int port = low; port <= high && fd == -EADDRINUSE; port++) {
        nb_sock_set_port(&at, (uint16_t)port);
        fd = listen_at(&at, backlog);
    }
    if (fd < 0) {
        return fail_listen(&at, low, high, fd, err);
    }
    at.len = sizeof at.in6;
    if (getsockname(fd, &at.any, &at.len) != 0) {
        int rc = nb_fail(err, -errno, "getsockname: %m");
        close(fd);
        return rc;
    }
    *addr = at;
    return fd;
}

int nb_sock_accept(int listener) {
    nb_fork_hold();
    return nb_fork_own(accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC));
}

static int fail_connect(const char *to, const struct nb_sockaddr *from, int code, struct nb_error *err) {
    bool no_path = code == -EINVAL || code == -ENETUNREACH || code == -EHOSTUNREACH || code == -EAFNOSUPPORT;
    char here[NB_SOCK_TEXT];
    if (from == NULL) {
        errno = -code;
        return nb_fail(err, code, "connect to %s: %m", to);
    }
    struct nb_sockaddr local = *from;
    nb_sock_set_port(&local, 0);
    nb_sock_format(&local, here);
    errno = -code;
    return nb_fail(err, code, "connect to %s from %s: %m%s", to, here,
                   no_path ? ": select interfaces of one network by NETBOTTLENECK_IFNAME" : "");
}

int nb_sock_connect(const struct nb_sockaddr *to, const struct nb_sockaddr *from, const char *congestion,
                    struct nb_error *err) {
    char text[NB_SOCK_TEXT];
    int one = 1;
    int rc;
    nb_sock_format(to, text);
    int fd = open_socket(to->any.sa_family);
    if (fd < 0) {
        errno = -fd;
        return nb_fail(err, fd, "socket for %s: %m", text);
    }
    pace_none(fd, to);
    rc = congestion != NULL ? pace_by(fd, congestion, err) : 0;
    if (rc < 0) {
        goto err_close;
    }
    if (from != NULL) {
        struct nb_sockaddr local = *from;
        nb_sock_set_port(&local, 0);
        (void)setsockopt(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &one, sizeof one);
        if (bind(fd, &local.any, local.len) != 0) {
            rc = fail_connect(text, from, -errno, err);
            goto err_close;
        }
    }
    if (connect(fd, &to->any, to->len) != 0 && errno != EINPROGRESS) {
        rc = fail_connect(text, from, -errno, err);
        goto err_close;
    }
    return fd;

err_close:
    close(fd);
    return rc;
}

int nb_sock_connected(int fd) {
    int pending = 0;
    socklen_t len = sizeof pending;
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &pending, &len) != 0) {
        return -errno;
    }
    return -pending;
}

void nb_sock_tune(int fd, int timeout_ms) {
    int one = 1;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
    if (timeout_ms <= 0) {
        return;
    }
    int third_s = timeout_ms / 3000 > 0 ? timeout_ms / 3000 : 1;
    int probes = 3;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &third_s, sizeof third_s);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &third_s, sizeof third_s);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout_ms, sizeof timeout_ms);
    // Intervals that only double would miss a link that comes back in the second half of the time limit.
    int rto_ms = timeout_ms / 8 > RTO_LEAST_MS ? timeout_ms / 8 : RTO_LEAST_MS;
    (void)setsockopt(fd, IPPROTO_TCP, OPTION_RTO_MAX_MS, &rto_ms, sizeof rto_ms);
}

// 0: the caller retries, and calls again if there was nothing.
static int wait_ready(int fd, short events, int64_t deadline_ns, struct nb_interrupt *interrupt) {
    if (nb_now_ns() >= deadline_ns) {
        return -ETIMEDOUT;
    }
    struct pollfd poller = {.fd = fd, .events = events};
    int rc = nb_interrupt_poll(&poller, 1, deadline_ns, interrupt);
    return rc < 0 ? rc : 0;
}

int nb_sock_write_all(int fd, const void *buf, size_t bytes, int64_t deadline_ns, struct nb_interrupt *interrupt) {
    const char *at = buf;
    while (bytes > 0) {
        ssize_t n = send(fd, at, bytes, MSG_NOSIGNAL);
        if (n >= 0) {
            at += n;
            bytes -= (size_t)n;
            continue;
        }
        int rc = errno == EPIPE ? -ECONNRESET : -errno;
        if (errno == EAGAIN || errno == EINTR) {
            rc = wait_ready(fd, POLLOUT, deadline_ns, interrupt);
        }
        if (rc != 0) {
            return rc;
        }
    }
    return 0;
}

int nb_sock_read_all(int fd, void *buf, size_t bytes, int64_t deadline_ns, struct nb_interrupt *interrupt) {
    char *at = buf;
    while (bytes > 0) {
        ssize_t n = recv(fd, at, bytes, 0);
        if (n > 0) {
            at += n;
            bytes -= (size_t)n;
            continue;
        }
        if (n == 0) {
            return -ECONNRESET;
        }
        int rc = -errno;
        if (errno == EAGAIN || errno == EINTR) {
            rc = wait_ready(fd, POLLIN, deadline_ns, interrupt);
        }
        if (rc != 0) {
            return rc;
        }
    }
    return 0;
}
