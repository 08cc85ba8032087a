// Sockets: addresses as text, interfaces by NCCL_SOCKET_IFNAME's syntax, ports from a range, whole reads and writes
// with a deadline. Listens only on addresses that the caller names.
#ifndef NB_BASE_SOCK_H
#define NB_BASE_SOCK_H

#include <net/if.h>
#include <netinet/in.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

#include "base/error.h"

struct nb_interrupt;

enum { NB_SOCK_TEXT = 64 }; // "[fe80::…]:65535"

struct nb_sockaddr {
    socklen_t len;
    union {
        struct sockaddr any;
        struct sockaddr_in in4;
        struct sockaddr_in6 in6;
    };
};

struct nb_port_range { // {0, 0}: any port
    uint16_t low;
    uint16_t high;
};

// Parses "10.0.0.1:4000" or "[::1]:4000"; looks up no name. Errors: -EINVAL.
int nb_sock_parse(const char *text, struct nb_sockaddr *addr, struct nb_error *err);
void nb_sock_format(const struct nb_sockaddr *addr, char text[NB_SOCK_TEXT]);
bool nb_sock_is_loopback(const struct nb_sockaddr *addr);
uint16_t nb_sock_port(const struct nb_sockaddr *addr);
void nb_sock_set_port(struct nb_sockaddr *addr, uint16_t port);

// IPV4, IPV6: only addresses of that family.
enum nb_sock_choice { NB_SOCK_ALTERNATIVES = 1, NB_SOCK_IPV4 = 2, NB_SOCK_IPV6 = 4 };

// The addresses of the interfaces that `spec` selects ("eth0,eth1": prefixes; "=eth0,eth1": exact names, also with a `=`
// before an entry; "^lo,docker": all but; NULL or "": every interface that is up, those with IPv4 first, except loopback
// and the bridges docker* and virbr*; if there is none, these bridges, else loopback). An address of 169.254.0.0/16 is
// the last choice before these bridges, unless the list names its interface. Blanks around entries are ignored. One address per interface, IPv4 if it has one, in the order of the list; interfaces of one prefix are in the
// system's order. An entry that matches nothing is an error, unless the entries are alternatives. `choice`: of the enum
// below, or 0. Returns how many it wrote. Errors: -ENODEV naming the spec, the entry and the interfaces of this host.
int nb_sock_interfaces(const char *spec, unsigned choice, struct nb_sockaddr *addrs, char (*names)[IF_NAMESIZE],
                       int max, struct nb_error *err);

// The name of the interface that has this address; "" if none has.
void nb_sock_interface_of(const struct nb_sockaddr *addr, char name[IF_NAMESIZE]);
// True if an interface was set down, has no carrier or is gone. False if that cannot be determined.
bool nb_sock_interface_down(const char *name);

// Opens a non-blocking, close-on-exec listener on addr's host and port (0: the first free one of the range). Sets
// addr's port. On loopback, accepted and connected sockets are not paced, whatever the host's congestion control.
// Errors: -EADDRINUSE naming the port or the range.
int nb_sock_listen(struct nb_sockaddr *addr, struct nb_port_range ports, int backlog, struct nb_error *err);

// Accepts the next connection of a listener: a non-blocking descriptor, or -1 with errno.
int nb_sock_accept(int listener);

// Starts a non-blocking connect, from `from` unless NULL. `congestion`: the congestion control of the data sent; NULL:
// the host's, and on loopback one that does not pace. Returns the descriptor.
int nb_sock_connect(const struct nb_sockaddr *to, const struct nb_sockaddr *from, const char *congestion,
                    struct nb_error *err);

// Checks that this process may use a congestion control of that name. Errors: -ENOENT, -EPERM naming those it may use.
int nb_sock_check_congestion(const char *congestion, struct nb_error *err);

// The pending error of a connect that became writable: 0 or -errno.
int nb_sock_connected(int fd);

// Sets TCP_NODELAY and keepalive. timeout_ms > 0: also TCP_USER_TIMEOUT, and where the kernel can, the longest interval
// of retransmissions: an eighth of timeout_ms, at least 1 s.
void nb_sock_tune(int fd, int timeout_ms);

// Write or read whole buffers on a non-blocking descriptor, until deadline_ns of nb_now_ns(). `interrupt` may be NULL.
// 0, -ETIMEDOUT, -ECONNRESET, -EINTR if interrupted, or -errno.
int nb_sock_write_all(int fd, const void *buf, size_t bytes, int64_t deadline_ns, struct nb_interrupt *interrupt);
int nb_sock_read_all(int fd, void *buf, size_t bytes, int64_t deadline_ns, struct nb_interrupt *interrupt);

#endif
