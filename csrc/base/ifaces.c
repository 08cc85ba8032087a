// Network interfaces: finds those that a spec in NCCL_SOCKET_IFNAME's syntax selects.
#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/error.h"
#include "base/sock.h"

enum { NAMES_TEXT = 256 };

// The selection: every interface (empty list), those of the list, or all but those.
struct spec {
    const char *list; // "eth0,eth1"
    bool exact;
    bool except;
    int family; // the only one of the addresses; AF_UNSPEC: none
};

struct entry {
    const char *name;
    size_t length;
    bool exact;
};

static const char *after_blanks(const char *text) {
    return text + strspn(text, " \t");
}

static struct spec read_spec(const char *text) {
    struct spec spec = {.list = after_blanks(text != NULL ? text : "")};
    if (*spec.list == '^') {
        spec.except = true;
        spec.list = after_blanks(spec.list + 1);
    }
    if (*spec.list == '=') {
        spec.exact = true;
        spec.list = after_blanks(spec.list + 1);
    }
    return spec;
}

// Reads the next entry, without blanks around it; false at the end. `at` starts as the list.
static bool next_entry(const struct spec *spec, const char **at, struct entry *entry) {
    const char *from = *at + strspn(*at, ", \t");
    const char *end = from + strcspn(from, ",");
    *at = end;
    if (from == end) {
        return false;
    }
    entry->exact = spec->exact || *from == '=';
    entry->name = *from == '=' ? after_blanks(from + 1) : from;
    while (end > entry->name && (end[-1] == ' ' || end[-1] == '\t')) {
        end--;
    }
    entry->length = end > entry->name ? (size_t)(end - entry->name) : 0;
    return true;
}

static bool matches(const struct entry *entry, const char *name) {
    return entry->length > 0 && strncmp(name, entry->name, entry->length) == 0 &&
           (!entry->exact || name[entry->length] == '\0');
}

// Position of a name in the list, from 1; 0: not in it.
static int in_list(const struct spec *spec, const char *name) {
    const char *at = spec->list;
    struct entry entry;
    for (int place = 1; next_entry(spec, &at, &entry); place++) {
        if (matches(&entry, name)) {
            return place;
        }
    }
    return 0;
}

// True if the list selects this interface by its exact name.
static bool is_named(const struct spec *spec, const char *name) {
    const char *at = spec->list;
    struct entry entry;
    while (!spec->except && next_entry(spec, &at, &entry)) {
        if (entry.exact && matches(&entry, name)) {
            return true;
        }
    }
    return false;
}

// What a spec that names no interface to use selects: each is added only if nothing before it is there.
enum reach { NICS, LINK_LOCAL, BRIDGES, LOOPBACK, REACHES };

// True for 169.254.0.0/16, which reaches one link only: usually that to a management controller of this host.
static bool is_link_local(const struct sockaddr *addr) {
    return addr->sa_family == AF_INET &&
           ntohl(((const struct sockaddr_in *)(const void *)addr)->sin_addr.s_addr) >> IN_CLASSB_NSHIFT == 0xa9fe;
}

// True for the bridges to containers and virtual machines of this host, which lead to no other host.
static bool is_host_bridge(const char *name) {
    return strncmp(name, "docker", 6) == 0 || strncmp(name, "virbr", 5) == 0;
}

static bool wanted(const struct spec *spec, const struct ifaddrs *it, enum reach reach) {
    bool listed = in_list(spec, it->ifa_name) > 0;
    if (!spec->except && *spec->list != '\0') {
        return listed;
    }
    if (spec->except && listed) {
        return false;
    }
    if ((it->ifa_flags & IFF_LOOPBACK) != 0) {
        return reach >= LOOPBACK;
    }
    if (is_link_local(it->ifa_addr)) {
        return reach >= LINK_LOCAL;
    }
    return reach >= BRIDGES || spec->except || !is_host_bridge(it->ifa_name);
}

// `named`: the interface is given by its exact name.
static bool usable(const struct ifaddrs *it, int family, bool named) {
    // An idle docker0 is up but carries nothing. An interface that is named may have no carrier yet.
    const unsigned up = named ? IFF_UP : IFF_UP | IFF_RUNNING;
    if (it->ifa_addr == NULL || it->ifa_addr->sa_family != family || (it->ifa_flags & up) != up) {
        return false;
    }
    // A link-local address is useless to another host, which needs a scope of its own for it.
    return family == AF_INET || !IN6_IS_ADDR_LINKLOCAL(&((struct sockaddr_in6 *)(void *)it->ifa_addr)->sin6_addr);
}

static bool has_name(char (*names)[IF_NAMESIZE], int count, const char *name) {
    for (int i = 0; i < count; i++) {
        if (strncmp(names[i], name, IF_NAMESIZE) == 0) {
            return true;
        }
    }
    return false;
}

// Collects one address per interface, IPv4 if it has one.
static int collect(const struct spec *spec, const struct ifaddrs *all, enum reach reach, struct nb_sockaddr *addrs,
                   char (*names)[IF_NAMESIZE], int max) {
    static const int families[] = {AF_INET, AF_INET6};
    int count = 0;
    for (size_t f = 0; f < sizeof families / sizeof families[0]; f++) {
        bool left_out = spec->family != AF_UNSPEC && spec->family != families[f];
        for (const struct ifaddrs *it = left_out ? NULL : all; it != NULL && count < max; it = it->ifa_next) {
            if (!usable(it, families[f], is_named(spec, it->ifa_name)) || !wanted(spec, it, reach) ||
                has_name(names, count, it->ifa_name)) {
                continue;
            }
            addrs[count] = (struct nb_sockaddr){0};
            addrs[count].len = families[f] == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
            memcpy(&addrs[count].any, it->ifa_addr, addrs[count].len);
            (void)snprintf(names[count], IF_NAMESIZE, "%s", it->ifa_name);
            count++;
        }
    }
    return count;
}

// Sorts by the order of the list; interfaces of one prefix stay in the system's order.
static void put_in_order(const struct spec *spec, struct nb_sockaddr *addrs, char (*names)[IF_NAMESIZE], int count) {
    for (int i = 1; i < count && !spec->except; i++) {
        for (int k = i; k > 0 && in_list(spec, names[k]) < in_list(spec, names[k - 1]); k--) {
            struct nb_sockaddr addr = addrs[k];
            char name[IF_NAMESIZE];
            addrs[k] = addrs[k - 1];
            addrs[k - 1] = addr;
            memcpy(name, names[k], IF_NAMESIZE);
            memcpy(names[k], names[k - 1], IF_NAMESIZE);
            memcpy(names[k - 1], name, IF_NAMESIZE);
        }
    }
}

static bool is_up(const struct ifaddrs *it) {
    return usable(it, AF_INET, false) || usable(it, AF_INET6, false);
}

// getifaddrs() returns a row per address: counts a name only at its first row.
static bool named_before(const struct ifaddrs *all, const struct ifaddrs *it) {
    for (const struct ifaddrs *before = all; before != it; before = before->ifa_next) {
        if (is_up(before) && strcmp(before->ifa_name, it->ifa_name) == 0) {
            return true;
        }
    }
    return false;
}

static void list_names(const struct ifaddrs *all, char text[NAMES_TEXT]) {
    size_t used = 0;
    text[0] = '\0';
    for (const struct ifaddrs *it = all; it != NULL; it = it->ifa_next) {
        if (!is_up(it) || named_before(all, it)) {
            continue;
        }
        int n = snprintf(text + used, NAMES_TEXT - used, "%s%s", used > 0 ? ", " : "", it->ifa_name);
        if (n < 0 || (size_t)n >= NAMES_TEXT - used) {
            text[used] = '\0';
            return;
        }
        used += (size_t)n;
    }
}

// Fails for a spec that selects nothing, or for one entry of it.
static int no_match(const char *text, const struct spec *spec, const struct entry *entry, const struct ifaddrs *all,
                    struct nb_error *err) {
    const char *family = spec->family == AF_INET ? " by IPv4" : spec->family == AF_INET6 ? " by IPv6" : "";
    char there[NAMES_TEXT];
    list_names(all, there);
    const char *names = there[0] != '\0' ? there : "none";
    if (entry == NULL) {
        return nb_fail(err, -ENODEV, "no interface that is up%s matches '%s'; there is: %s", family, text, names);
    }
    return nb_fail(err, -ENODEV, "no interface that is up%s matches '%.*s' of '%s'; there is: %s", family,
                   (int)entry->length, entry->name, text, names);
}

static bool is_there(const struct spec *spec, const struct entry *entry, const struct ifaddrs *all) {
    for (const struct ifaddrs *it = all; it != NULL; it = it->ifa_next) {
        bool four = spec->family != AF_INET6 && usable(it, AF_INET, entry->exact);
        bool six = spec->family != AF_INET && usable(it, AF_INET6, entry->exact);
        if (matches(entry, it->ifa_name) && (four || six)) {
            return true;
        }
    }
    return false;
}

static int check_entries(const char *text, const struct spec *spec, const struct ifaddrs *all, struct nb_error *err) {
    const char *at = spec->list;
    struct entry entry;
    while (!spec->except && next_entry(spec, &at, &entry)) {
        if (!is_there(spec, &entry, all)) {
            return no_match(text, spec, &entry, all, err);
        }
    }
    return 0;
}

int nb_sock_interfaces(const char *spec, unsigned choice, struct nb_sockaddr *addrs, char (*names)[IF_NAMESIZE],
                       int max, struct nb_error *err) {
    const char *text = spec != NULL ? spec : "";
    struct spec what = read_spec(text);
    what.family = (choice & NB_SOCK_IPV4) != 0 ? AF_INET : (choice & NB_SOCK_IPV6) != 0 ? AF_INET6 : AF_UNSPEC;
    struct ifaddrs *all;
    if (getifaddrs(&all) != 0) {
        return nb_fail(err, -errno, "getifaddrs: %m");
    }
    int count = 0;
    for (int reach = NICS; reach < REACHES && count == 0; reach++) {
        count = collect(&what, all, (enum reach)reach, addrs, names, max);
    }
    int rc = count == 0 ? no_match(text, &what, NULL, all, err) : 0;
    rc = rc == 0 && (choice & NB_SOCK_ALTERNATIVES) == 0 ? check_entries(text, &what, all, err) : rc;
    freeifaddrs(all);
    put_in_order(&what, addrs, names, count);
    return rc < 0 ? rc : count;
}

static bool same_host(const struct sockaddr *a, const struct nb_sockaddr *b) {
    if (a == NULL || a->sa_family != b->any.sa_family) {
        return false;
    }
    if (a->sa_family == AF_INET) {
        return ((const struct sockaddr_in *)(const void *)a)->sin_addr.s_addr == b->in4.sin_addr.s_addr;
    }
    return a->sa_family == AF_INET6 && memcmp(&((const struct sockaddr_in6 *)(const void *)a)->sin6_addr,
                                              &b->in6.sin6_addr, sizeof b->in6.sin6_addr) == 0;
}

void nb_sock_interface_of(const struct nb_sockaddr *addr, char name[IF_NAMESIZE]) {
    struct ifaddrs *all;
    name[0] = '\0';
    if (getifaddrs(&all) != 0) {
        return;
    }
    for (const struct ifaddrs *it = all; it != NULL; it = it->ifa_next) {
        if (same_host(it->ifa_addr, addr)) {
            (void)snprintf(name, IF_NAMESIZE, "%s", it->ifa_name);
            break;
        }
    }
    freeifaddrs(all);
}

bool nb_sock_interface_down(const char *name) {
    struct ifreq request = {0};
    int fd = name[0] != '\0' ? socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0) : -1;
    if (fd < 0) {
        return false;
    }
    (void)snprintf(request.ifr_name, sizeof request.ifr_name, "%s", name);
    bool gone = ioctl(fd, SIOCGIFFLAGS, &request) != 0;
    bool down = gone ? errno == ENODEV : (request.ifr_flags & (IFF_UP | IFF_RUNNING)) != (IFF_UP | IFF_RUNNING);
    close(fd);
    return down;
}
