// Settings of the net plugin, from the environment. A value that is not understood is an error that names its variable.
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/sha256.h"
#include "base/sock.h"
#include "nccl/net.h"
#include "nccl/variable.h"
#include "transport/transport.h"

enum {
    LANES_DEFAULT = 4, // for NETBOTTLENECK_STREAMS=auto
    SEGMENT_DEFAULT = 512 * 1024,
    SEGMENT_LEAST = NB_NET_BLOCK,
    TIMEOUT_DEFAULT_MS = 30000,
    TIMEOUT_LEAST_MS = 100,
    TIMEOUT_MOST_S = 2147483, // milliseconds are counted in 32 bits
    SECRET_LEAST = 16
};

static int copy(const char *name, char *to, size_t room, struct nb_error *err) {
    const char *text = nb_variable(name);
    int n = snprintf(to, room, "%s", text != NULL ? text : "");
    return n >= 0 && (size_t)n < room ? 0 : nb_variable_invalid(name, "a shorter text", err);
}

// Returns the name that the first `bytes` are, blanks around it aside; NULL: none. alone: they may be "auto". After that,
// the names are SELECTABLE in python/netbottleneck/trace/transports.py.
static const char *transport_name(const char *text, size_t bytes, bool alone) {
    static const char *const names[] = {"auto", "stock", "tcp", "ofi", "nccl+tcp", "nccl+ofi", "null", "bare"};
    while (bytes > 0 && strchr(NB_BLANKS, text[bytes - 1]) != NULL) {
        bytes--;
    }
    size_t blanks = bytes > 0 ? strspn(text, NB_BLANKS) : 0;
    text += blanks;
    bytes -= blanks;
    for (size_t i = alone ? 0 : 1; i < sizeof names / sizeof names[0]; i++) {
        if (strlen(names[i]) == bytes && memcmp(names[i], text, bytes) == 0) {
            return names[i];
        }
    }
    return NULL;
}

// Of a list, the first name with nccl+ counts, else the first of tcp and ofi. The others say nothing about this plugin.
static int transport_set(struct nb_net_settings *settings, enum nb_net_kind kind, struct nb_error *err) {
    static const char name[] = "NETBOTTLENECK_TRANSPORT";
    static const char prefix[] = "nccl+";
    const char *list = kind == NB_NET_PLAIN ? nb_variable(name) : NULL;
    const char *over_nccl = NULL;
    const char *plain = NULL;
    for (const char *at = list; at != NULL; at = strchr(at, ',') != NULL ? strchr(at, ',') + 1 : NULL) {
        const char *word = transport_name(at, strcspn(at, ","), strchr(list, ',') == NULL);
        if (word == NULL) {
            return nb_variable_invalid(name, "auto, or a list of stock, tcp, ofi, nccl+tcp, nccl+ofi, null, bare", err);
        }
        if (strncmp(word, prefix, sizeof prefix - 1) == 0) {
            over_nccl = over_nccl != NULL ? over_nccl : word + sizeof prefix - 1;
        } else if (strcmp(word, "tcp") == 0 || strcmp(word, "ofi") == 0) {
            plain = plain != NULL ? plain : word;
        }
    }
    const char *chosen = over_nccl != NULL ? over_nccl : plain != NULL ? plain : "tcp";
    settings->transport = nb_transport_find(kind == NB_NET_OFI ? "ofi" : chosen);
    return settings->transport != NULL ? 0 : nb_variable_invalid(name, "a transport of this build: tcp", err);
}

static int lanes_set(struct nb_net_settings *settings, struct nb_error *err) {
    static const char name[] = "NETBOTTLENECK_STREAMS";
    const char *text = nb_variable(name);
    long lanes = LANES_DEFAULT;
    int rc = text != NULL && strcmp(text, "auto") != 0 ? nb_variable_number(name, 1, NB_LANES_MAX, &lanes, err) : 0;
    settings->lanes = (int)lanes;
    return rc;
}

// Bytes: K, M and G are powers of 1000, Ki, Mi and Gi of 1024; B may follow.
static int segment_set(struct nb_net_settings *settings, struct nb_error *err) {
    static const char name[] = "NETBOTTLENECK_SEGMENT_BYTES";
    static const char units[] = "KMG";
    const char *text = nb_variable(name);
    char *end = NULL;
    settings->segment_bytes = SEGMENT_DEFAULT; // also for 0
    double value = text != NULL ? strtod(text, &end) : 0;
    if (text == NULL) {
        return 0;
    }
    bool is_default = value == 0 && end != text;
    end += *end == ' ';
    const char *unit = *end != 0 ? strchr(units, *end) : NULL;
    double base = unit != NULL && end[1] == 'i' ? 1024 : 1000;
    for (int i = 0; unit != NULL && i <= unit - units; i++) {
        value *= base;
    }
    end += unit != NULL ? 1 + (end[1] == 'i') : 0;
    end += *end == 'B';
    bool is_size = value >= SEGMENT_LEAST && value <= (double)NB_SEGMENT_MAX / 2;
    if (*end != 0 || !(is_default || is_size)) {
        return nb_variable_invalid(name, "0, or 16Ki to 2Mi", err);
    }
    settings->segment_bytes = is_default ? SEGMENT_DEFAULT : (size_t)value;
    return 0;
}

static int timeout_set(struct nb_net_settings *settings, struct nb_error *err) {
    static const char name[] = "NETBOTTLENECK_TIMEOUT_S";
    const char *text = nb_variable(name);
    char *end = NULL;
    settings->timeout_ms = TIMEOUT_DEFAULT_MS;
    if (text == NULL) {
        return 0;
    }
    double seconds = strtod(text, &end);
    if (end == text || end[strspn(end, NB_BLANKS)] != 0 || !(seconds * 1000 >= TIMEOUT_LEAST_MS) ||
        !(seconds <= TIMEOUT_MOST_S)) {
        return nb_variable_invalid(name, "seconds, 0.1 to 2147483", err);
    }
    settings->timeout_ms = (int)(seconds * 1000);
    return 0;
}

static int ports_set(struct nb_net_settings *settings, struct nb_error *err) {
    static const char name[] = "NETBOTTLENECK_PORTS";
    const char *text = nb_variable(name);
    char *end = NULL;
    char *last = NULL;
    if (text == NULL) {
        return 0;
    }
    long low = strtol(text, &end, 10);
    long high = *end == '-' ? strtol(end + 1, &last, 10) : 0;
    if (last == NULL || *last != 0 || low < 1 || low > high || high > UINT16_MAX) {
        return nb_variable_invalid(name, "LOW-HIGH, two ports from 1 to 65535", err);
    }
    settings->ports = (struct nb_port_range){.low = (uint16_t)low, .high = (uint16_t)high};
    return 0;
}

static int secret_set(struct nb_net_settings *settings, struct nb_error *err) {
    const char *text = nb_variable("NETBOTTLENECK_SECRET");
    if (text == NULL && nb_variable("NETBOTTLENECK_SECRET_FILE") != NULL) {
        return nb_fail(err, -EINVAL, "NETBOTTLENECK_SECRET_FILE is not read here: set NETBOTTLENECK_SECRET");
    }
    if (text == NULL) {
        return 0;
    }
    if (strlen(text) < SECRET_LEAST) {
        return nb_fail(err, -EINVAL, "NETBOTTLENECK_SECRET is too short: expected at least %d bytes", SECRET_LEAST);
    }
    struct nb_sha256 sha;
    nb_sha256_init(&sha);
    nb_sha256_add(&sha, text, strlen(text));
    nb_sha256_final(&sha, settings->secret);
    settings->secret_bytes = sizeof settings->secret;
    return 0;
}

// As NCCL reads it: any other value says nothing.
static unsigned family(void) {
    const char *text = nb_variable("NCCL_SOCKET_FAMILY");
    bool four = text != NULL && strcmp(text, "AF_INET") == 0;
    bool six = text != NULL && strcmp(text, "AF_INET6") == 0;
    return four ? NB_SOCK_IPV4 : six ? NB_SOCK_IPV6 : 0;
}

// Interfaces that were named all carry lanes. Else the first one does: the others may lead elsewhere.
static int binds_set(struct nb_net_settings *settings, struct nb_error *err) {
    const char *own = nb_variable("NETBOTTLENECK_IFNAME");
    const char *spec = own != NULL ? own : nb_variable("NCCL_SOCKET_IFNAME");
    unsigned choice = family() | (own == NULL ? NB_SOCK_ALTERNATIVES : 0);
    int count = nb_sock_interfaces(spec, choice, settings->binds, settings->names, NB_NET_BINDS, err);
    if (count < 0) {
        return count;
    }
    settings->bind_count = spec != NULL ? count : 1;
    return count > 0 ? 0 : nb_fail(err, -ENODEV, "no network interface has an address");
}

int nb_net_settings_read(struct nb_net_settings *settings, enum nb_net_kind kind, struct nb_error *err) {
    *settings = (struct nb_net_settings){0};
    int rc = transport_set(settings, kind, err);
    rc = rc == 0 ? lanes_set(settings, err) : rc;
    rc = rc == 0 ? segment_set(settings, err) : rc;
    rc = rc == 0 ? timeout_set(settings, err) : rc;
    rc = rc == 0 ? ports_set(settings, err) : rc;
    rc = rc == 0 ? secret_set(settings, err) : rc;
    rc = rc == 0 ? copy("NETBOTTLENECK_PROVIDER", settings->provider, sizeof settings->provider, err) : rc;
    rc = rc == 0 ? copy("NETBOTTLENECK_LIBFABRIC", settings->library, sizeof settings->library, err) : rc;
    rc = rc == 0 ? copy("NETBOTTLENECK_CONGESTION", settings->congestion, sizeof settings->congestion, err) : rc;
    rc = rc == 0 ? binds_set(settings, err) : rc;
    snprintf(settings->tag, sizeof settings->tag, "%s, %d lanes, interfaces: %d, segments of %zu bytes, version %s",
             rc == 0 ? settings->transport->name : "", settings->lanes, settings->bind_count, settings->segment_bytes,
             NB_VERSION);
    return rc;
}

struct nb_lane_config nb_net_settings_lane(const struct nb_net_settings *settings) {
    return (struct nb_lane_config){.bind = settings->binds[0],
                                   .ports = settings->ports,
                                   .timeout_ms = settings->timeout_ms,
                                   .provider = settings->provider[0] != 0 ? settings->provider : NULL,
                                   .library = settings->library[0] != 0 ? settings->library : NULL,
                                   .congestion = settings->congestion[0] != 0 ? settings->congestion : NULL};
}

int nb_net_settings_check(const struct nb_net_settings *settings, struct nb_error *err) {
    const struct nb_lane_config lane = nb_net_settings_lane(settings);
    bool stream = settings->transport->kind == NB_LANE_STREAM;
    struct nb_error why = {0};
    int rc = settings->transport->check != NULL ? settings->transport->check(&lane, &why) : 0;
    const char *name = stream            ? "NETBOTTLENECK_CONGESTION"
                       : rc == NB_ENOLIB ? "NETBOTTLENECK_LIBFABRIC"
                                         : "NETBOTTLENECK_PROVIDER";
    const char *value = stream ? lane.congestion : rc == NB_ENOLIB ? lane.library : lane.provider;
    if (rc == 0) {
        return 0;
    }
    if (value == NULL) {
        return nb_fail(err, rc, "%.300s; set %s, or NETBOTTLENECK_TRANSPORT to tcp", why.text, name);
    }
    return nb_fail(err, rc, "%s='%.80s' is not possible: %.300s; correct or unset it", name, value, why.text);
}
