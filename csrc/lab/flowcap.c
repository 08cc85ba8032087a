// Flow cap: caps every TCP flow of a process from inside. A preloaded library that sets SO_MAX_PACING_RATE. The cap is
// exact, needs no privilege and no queueing discipline, and is the same for every library that reaches the network
// through libc.
//
// A socket gets the first rate at socket(), so that nothing travels uncapped. It gets its own rate at connect() or
// listen(), before the call: this covers a non-blocking connect, and accepted sockets inherit their listener's rate.
//
//   NBFLOWCAP_BPS      rates in bits per second, dealt in turn: "400000000,100000000"
//   NBFLOWCAP_PORTS    "LOW-HIGH": a flow to or from a listener in this range gets the rate of its port instead
//   NBFLOWCAP_CONTROL  IPv4 address of rank 0, whose port LOW is the control connection's: not capped
//   NBFLOWCAP_FREE     ports that are not capped: "29500,29501"
//
// The only mutable state: two counters and libc's own functions, which a preloaded library cannot keep elsewhere.
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

enum { MAX_RATES = 64, MAX_FREE = 16, TYPE_MASK = 0xf, BITS = 8 };

static struct {
    pthread_once_t once;
    int (*socket)(int, int, int);
    int (*connect)(int, const struct sockaddr *, socklen_t);
    int (*listen)(int, int);
    unsigned long rate[MAX_RATES]; // bytes per second
    unsigned rates;
    unsigned long low;
    unsigned long high;
    unsigned long free_port[MAX_FREE];
    unsigned free_ports;
    in_addr_t control;
    atomic_uint connected;
    atomic_uint listening;
} cap = {.once = PTHREAD_ONCE_INIT};

static unsigned read_list(const char *text, unsigned long *out, unsigned max) {
    unsigned n = 0;
    while (text != NULL && *text != '\0' && n < max) {
        char *end;
        unsigned long value = strtoul(text, &end, 10);
        if (end == text) {
            break;
        }
        out[n++] = value;
        text = *end == ',' ? end + 1 : end;
    }
    return n;
}

static void start(void) {
    *(void **)&cap.socket = dlsym(RTLD_NEXT, "socket");
    *(void **)&cap.connect = dlsym(RTLD_NEXT, "connect");
    *(void **)&cap.listen = dlsym(RTLD_NEXT, "listen");
    cap.rates = read_list(getenv("NBFLOWCAP_BPS"), cap.rate, MAX_RATES);
    for (unsigned i = 0; i < cap.rates; i++) {
        cap.rate[i] /= BITS;
    }
    const char *ports = getenv("NBFLOWCAP_PORTS");
    const char *dash = ports != NULL ? strchr(ports, '-') : NULL;
    if (dash != NULL) {
        cap.low = strtoul(ports, NULL, 10);
        cap.high = strtoul(dash + 1, NULL, 10);
    }
    const char *control = getenv("NBFLOWCAP_CONTROL");
    if (control != NULL) {
        struct in_addr address;
        cap.control = inet_pton(AF_INET, control, &address) == 1 ? address.s_addr : 0;
    }
    cap.free_ports = read_list(getenv("NBFLOWCAP_FREE"), cap.free_port, MAX_FREE);
}

// False for a family other than IPv4 and IPv6. The address of a plain IPv6 peer reads as 0.
static bool endpoint(const struct sockaddr *addr, socklen_t len, in_addr_t *host, unsigned long *port) {
    if (addr != NULL && addr->sa_family == AF_INET && len >= sizeof(struct sockaddr_in)) {
        struct sockaddr_in in4;
        memcpy(&in4, addr, sizeof in4);
        *host = in4.sin_addr.s_addr;
        *port = ntohs(in4.sin_port);
        return true;
    }
    if (addr != NULL && addr->sa_family == AF_INET6 && len >= sizeof(struct sockaddr_in6)) {
        struct sockaddr_in6 in6;
        memcpy(&in6, addr, sizeof in6);
        *host = 0;
        if (IN6_IS_ADDR_V4MAPPED(&in6.sin6_addr)) {
            memcpy(host, &in6.sin6_addr.s6_addr[12], sizeof *host);
        }
        *port = ntohs(in6.sin6_port);
        return true;
    }
    return false;
}

static unsigned long rate_of(in_addr_t host, unsigned long port, atomic_uint *dealt) {
    for (unsigned i = 0; i < cap.free_ports; i++) {
        if (cap.free_port[i] == port) {
            return ~0UL;
        }
    }
    if (cap.low != 0 && port >= cap.low && port <= cap.high) {
        bool beside_control = cap.control != 0 && host == cap.control;
        if (beside_control && port == cap.low) {
            return ~0UL;
        }
        return cap.rate[(port - cap.low - beside_control) % cap.rates];
    }
    return cap.rate[atomic_fetch_add(dealt, 1) % cap.rates];
}

static void pace(int fd, unsigned long rate) {
    int saved = errno;
    setsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &rate, sizeof rate);
    errno = saved;
}

static bool is_stream(int fd) {
    int saved = errno;
    int type = 0;
    socklen_t len = sizeof type;
    bool stream = getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &len) == 0 && type == SOCK_STREAM;
    errno = saved;
    return stream;
}

int socket(int domain, int type, int protocol) {
    pthread_once(&cap.once, start);
    int fd = cap.socket(domain, type, protocol);
    if (fd >= 0 && cap.rates > 0 && (domain == AF_INET || domain == AF_INET6) && (type & TYPE_MASK) == SOCK_STREAM) {
        pace(fd, cap.rate[0]);
    }
    return fd;
}

int connect(int fd, const struct sockaddr *addr, socklen_t len) {
    pthread_once(&cap.once, start);
    in_addr_t host;
    unsigned long port;
    if (cap.rates > 0 && endpoint(addr, len, &host, &port) && is_stream(fd)) {
        pace(fd, rate_of(host, port, &cap.connected));
    }
    return cap.connect(fd, addr, len);
}

int listen(int fd, int backlog) {
    pthread_once(&cap.once, start);
    struct sockaddr_storage local = {0};
    socklen_t len = sizeof local;
    in_addr_t host;
    unsigned long port;
    int saved = errno;
    if (cap.rates > 0 && getsockname(fd, (struct sockaddr *)&local, &len) == 0 &&
        endpoint((struct sockaddr *)&local, len, &host, &port)) {
        pace(fd, rate_of(host, port, &cap.listening));
    }
    errno = saved;
    return cap.listen(fd, backlog);
}
