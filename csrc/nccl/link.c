// Links: the control connection between two processes from handshake to end, its messages, and the lanes beside it
// (see net.h).
#include <errno.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/admission.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/list.h"
#include "base/loop.h"
#include "base/sha256.h"
#include "base/sock.h"
#include "base/wire.h"
#include "bootstrap/bootstrap.h"
#include "nccl/abi.h"
#include "nccl/net.h"
#include "transport/lanes.h"
#include "transport/transport.h"

enum {
    MAGIC = 0x4e424e4c,
    WIRE_VERSION = 2,
    BACKLOG = 128,
    IN_ROOM = 128 * 1024,
    READS_MAX = 16, // of one event
    IN_FLIGHT_MAX = 8 * 1024 * 1024,
    TICK_NS = 10 * 1000 * 1000,
    RETRY_NS = 50 * 1000 * 1000,
    PING_MAX_NS = 1000 * 1000 * 1000,
    LOST_NS = 250 * 1000 * 1000, // a peer that dies also ends the control connection, which gives a better reason
    GAP_NS = 500 * 1000 * 1000,  // a longer time between ticks: this process was descheduled
    LONE_NS = 60 * 1000,         // a lone send that drains in less is sooner on the control connection
    POLL_NS = 100 * 1000,        // between two progress passes of idle lanes
    BACK_LEAST_NS = 1000 * 1000,
    BACK_MOST_NS = 1000 * 1000 * 1000,
    LEAVE_NS = 2000 * 1000 * 1000, // for the peer to read what was written before the end
    PAUSE_MS = 100,                // after an accept that failed for lack of descriptors or memory
    BUSY_SLEEP_MS = 10,
    SLEEP_MS = 250
};

// Wire format. All fields are little-endian, as they lie in memory.

struct wire_hello {
    uint32_t magic;
    uint32_t version;
    uint32_t lanes;
    uint32_t process_number;
    unsigned char process[NB_NET_ID_BYTES];
    unsigned char nonce[NB_NET_ID_BYTES];
    uint64_t listener;
    char tag[NB_NET_TAG];
};

struct wire_answer {
    int32_t code; // 0, or NB_EMISMATCH
    uint32_t reserved;
    unsigned char nonce[NB_NET_ID_BYTES];
    char tag[NB_NET_TAG];
    unsigned char mac[NB_SHA256_BYTES];
};

// Join and welcome: a MAC, then the lanes' addresses, which it covers.

enum link_message { LINK_OPEN = 1, LINK_CLOSE, LINK_GRANT, LINK_SEND, LINK_PING, LINK_LEAVE };

struct wire_ctl {
    uint32_t type; // enum link_message
    uint32_t comm;
    uint64_t op;    // send: the flow's number, 0: the payload follows. open: the listening comm
    uint64_t bytes; // send: the size. grant: the capacity
};

_Static_assert(sizeof(struct wire_hello) == 152 && sizeof(struct wire_answer) == 152, "crosses the wire");
_Static_assert(sizeof(struct wire_ctl) == 24, "crosses the wire");
_Static_assert(IN_ROOM >= NB_SHA256_BYTES + NB_LANES_MAX * (int)sizeof(struct wire_lane_address), "a join fits");
_Static_assert(IN_ROOM >= NB_NET_LONE + (int)sizeof(struct wire_ctl), "an inline send fits");

struct nb_link_shake {
    struct wire_hello hello;
    struct wire_answer answer;
};

static int other_rank(const struct nb_link *link) {
    return link->outgoing ? 1 : 0;
}

static size_t address_bytes(const struct nb_net *net) {
    return (size_t)net->settings.lanes * sizeof(struct wire_lane_address);
}

void nb_link_fail(struct nb_link *link, const struct nb_error *why) {
    if (!link->failing) {
        link->failing = true;
        link->failure = *why;
    }
}

static void shut(struct nb_net *net, struct nb_watch *watch) {
    if (watch->fd >= 0) {
        nb_loop_remove(&net->loop, watch);
        close(watch->fd);
        watch->fd = -1;
    }
}

static void link_free(struct nb_link *link) {
    nb_list_remove(&link->at_net);
    free(link->shake);
    free(link->in);
    free(link->out);
    free(link);
}

// Closes the lanes and the control connection, and reports the failure to the comms.
static void link_end(struct nb_link *link) {
    struct nb_net *net = link->net;
    if (!link->outgoing && !link->admitted) {
        nb_admission_remove(&net->admission, &link->pending);
        link->admitted = true;
    }
    nb_lanes_close(link->lanes);
    link->lanes = NULL;
    shut(net, &link->watch);
    link->state = NB_LINK_ENDED;
    net->up->ended(link);
}

// Writing

static void control_ended(struct nb_link *link, int code);

// Sends what is in the output, until the connection takes no more.
static void flush(struct nb_link *link) {
    link->flush_due = false;
    while (link->out_bytes > 0) {
        ssize_t n = send(link->watch.fd, link->out + link->out_begin, link->out_bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0 && errno != EAGAIN && errno != EINTR) {
            control_ended(link, -errno);
            return;
        }
        if (n < 0) {
            break;
        }
        link->out_begin += (size_t)n;
        link->out_bytes -= (size_t)n;
    }
    link->out_begin = link->out_bytes == 0 ? 0 : link->out_begin;
    link->blocked = link->out_bytes > 0;
    nb_loop_change(&link->net->loop, &link->watch, EPOLLIN | (link->blocked ? EPOLLOUT : 0));
}

static bool out_reserve(struct nb_link *link, size_t bytes) {
    if (link->out_begin + link->out_bytes + bytes <= link->out_room) {
        return true;
    }
    if (link->out_bytes > 0) {
        memmove(link->out, link->out + link->out_begin, link->out_bytes);
    }
    link->out_begin = 0;
    if (link->out_bytes + bytes <= link->out_room) {
        return true;
    }
    size_t room = 2 * (link->out_bytes + bytes);
    char *grown = realloc(link->out, room);
    if (grown == NULL) {
        struct nb_error why = {0};
        nb_fail(&why, -ENOMEM, "cannot allocate %zu bytes for messages to %s", room, link->peer);
        nb_link_fail(link, &why);
        return false;
    }
    link->out = grown;
    link->out_room = room;
    return true;
}

// Copies what is left of a part after its first `*sent` bytes, and takes those off.
static void out_append(struct nb_link *link, const struct iovec *part, size_t *sent) {
    size_t skip = *sent < part->iov_len ? *sent : part->iov_len;
    *sent -= skip;
    if (skip < part->iov_len) {
        memcpy(link->out + link->out_begin + link->out_bytes, (char *)part->iov_base + skip, part->iov_len - skip);
        link->out_bytes += part->iov_len - skip;
    }
}

// Sends a message, after all that waits in the output. What the connection does not take stays there.
static void put(struct nb_link *link, const void *head, size_t head_bytes, const void *data, size_t bytes) {
    if (link->failing || link->state == NB_LINK_ENDED) {
        return;
    }
    struct iovec iov[3] = {
        {.iov_base = link->out_bytes > 0 ? link->out + link->out_begin : NULL, .iov_len = link->out_bytes},
        {.iov_base = (void *)head, .iov_len = head_bytes},
        {.iov_base = (void *)data, .iov_len = bytes}};
    struct msghdr msg = {.msg_iov = iov, .msg_iovlen = 3};
    ssize_t n = link->blocked ? 0 : sendmsg(link->watch.fd, &msg, MSG_DONTWAIT | MSG_NOSIGNAL);
    size_t sent = n > 0 ? (size_t)n : 0; // flush() finds a failure again
    size_t waited = sent < link->out_bytes ? sent : link->out_bytes;
    link->out_begin += waited;
    link->out_bytes -= waited;
    sent -= waited;
    if (out_reserve(link, head_bytes + bytes - sent)) {
        out_append(link, &iov[1], &sent);
        out_append(link, &iov[2], &sent);
    }
    if (!link->blocked) {
        flush(link);
    }
}

static void put_ctl(struct nb_link *link, struct wire_ctl ctl, const void *data, size_t bytes) {
    put(link, &ctl, sizeof ctl, data, bytes);
}

void nb_link_open_comm(struct nb_link *link, uint32_t id, uint64_t listener) {
    put_ctl(link, (struct wire_ctl){.type = LINK_OPEN, .comm = id, .op = listener}, NULL, 0);
}

void nb_link_close_comm(struct nb_link *link, uint32_t id) {
    put_ctl(link, (struct wire_ctl){.type = LINK_CLOSE, .comm = id}, NULL, 0);
}

void nb_link_grant(struct nb_link *link, uint32_t id, size_t capacity, bool spare) {
    const struct wire_ctl ctl = {.type = LINK_GRANT, .comm = id, .bytes = capacity};
    if (!spare) {
        put_ctl(link, ctl, NULL, 0);
    } else if (!link->failing && link->state != NB_LINK_ENDED && out_reserve(link, sizeof ctl)) {
        memcpy(link->out + link->out_begin + link->out_bytes, &ctl, sizeof ctl);
        link->out_bytes += sizeof ctl;
        link->flush_due = true;
    }
}

// Looks whether the peer has all of a lone send. A slow one keeps the next ones off the control connection, for longer
// each time: a flow is capped, or the peer is far.
static void lone_look(struct nb_link *link, int64_t now) {
    int unsent = 0;
    if (link->lone_ns == 0 || link->blocked || ioctl(link->watch.fd, SIOCOUTQ, &unsent) < 0 || unsent > 0) {
        return;
    }
    if (now - link->lone_ns > LONE_NS) {
        link->back_ns = link->back_ns < BACK_MOST_NS / 2 ? 2 * link->back_ns : (int64_t)BACK_MOST_NS;
        link->lanes_ns = now + link->back_ns;
    } else {
        link->back_ns = BACK_LEAST_NS;
    }
    link->lone_ns = 0;
}

static bool lanes_idle(const struct nb_link *link) {
    return link->flows == 0 && nb_list_empty(&link->sinks);
}

bool nb_link_alone(struct nb_link *link) {
    int64_t now = nb_now_ns();
    lone_look(link, now);
    return lanes_idle(link) && !link->blocked && link->lone_ns == 0 && now >= link->lanes_ns;
}

void nb_link_send(struct nb_link *link, uint32_t id, uint64_t op, const void *data, size_t bytes) {
    const struct wire_ctl ctl = {.type = LINK_SEND, .comm = id, .op = op, .bytes = bytes};
    link->lone_ns = data != NULL && bytes > NB_NET_INLINE ? nb_now_ns() : link->lone_ns;
    put_ctl(link, ctl, data, data != NULL ? bytes : 0);
}

// Handshake

static void mac_of(const struct nb_link *link, const char *label, const void *more, size_t bytes,
                   unsigned char mac[NB_SHA256_BYTES]) {
    struct nb_hmac hmac;
    nb_hmac_init(&hmac, link->key, sizeof link->key);
    nb_hmac_add(&hmac, label, strlen(label) + 1);
    nb_hmac_add(&hmac, &link->shake->hello, sizeof link->shake->hello);
    nb_hmac_add(&hmac, &link->shake->answer, offsetof(struct wire_answer, mac));
    nb_hmac_add(&hmac, more, bytes);
    nb_hmac_final(&hmac, mac);
}

static void key_derive(struct nb_link *link, const unsigned char token[NB_NET_ID_BYTES]) {
    static const char label[] = "nccl link";
    const struct nb_net_settings *settings = &link->net->settings;
    struct nb_hmac hmac;
    nb_hmac_init(&hmac, settings->secret, settings->secret_bytes);
    nb_hmac_add(&hmac, label, sizeof label);
    nb_hmac_add(&hmac, token, NB_NET_ID_BYTES);
    nb_hmac_final(&hmac, link->key);
}

static void lane_lost(void *ctx, int peer, int lane, const struct nb_error *why, int left) {
    struct nb_link *link = ctx;
    char text[NB_ERROR_TEXT];
    (void)peer;
    if (left > 0 && !nb_list_empty(&link->comms)) {
        snprintf(text, sizeof text, "lane %d to %s is lost, %d are left (%.300s)", lane, link->peer, left, why->text);
        nb_net_log(link->net, NCCL_LOG_INFO, text);
    }
    if (left == 0 && link->lost_ns == 0) {
        link->lost_ns = nb_now_ns();
        if (!link->failing) { // kept for tick(), which waits for a better reason
            link->failure = (struct nb_error){.code = why->code, .peer = NB_NO_PEER};
            snprintf(link->failure.text, sizeof link->failure.text, "no lane to %s is left (%.300s)", link->peer,
                     why->text);
        }
    }
}

static void lanes_failed(void *ctx, const struct nb_error *why) {
    nb_link_fail(ctx, why);
}

static int lanes_open(struct nb_link *link, struct nb_error *err) {
    const struct nb_net_settings *settings = &link->net->settings;
    link->boot = (struct nb_boot){.rank = link->outgoing ? 0 : 1, .size = 2, .timeout_ms = settings->timeout_ms};
    link->boot.self = settings->binds[0];
    mac_of(link, "session", "", 0, link->boot.session);
    const struct nb_lanes_config config = {
        .ops = settings->transport,
        .lane = {.rank = link->boot.rank,
                 .size = 2,
                 .loop = &link->net->loop,
                 .boot = &link->boot,
                 .ports = settings->ports,
                 .timeout_ms = settings->timeout_ms,
                 .provider = settings->provider[0] != 0 ? settings->provider : NULL,
                 .library = settings->library[0] != 0 ? settings->library : NULL,
                 .congestion = settings->congestion[0] != 0 ? settings->congestion : NULL},
        .lanes = settings->lanes,
        .binds = settings->binds,
        .bind_count = settings->bind_count,
        .segment_bytes = settings->segment_bytes,
        .in_flight_max = IN_FLIGHT_MAX,
        .lane_lost = lane_lost,
        .failed = lanes_failed,
        .ctx = link};
    nb_lanes_close(link->lanes);
    link->lanes = NULL;
    return nb_lanes_open(&link->lanes, &config, err);
}

// Sends a MAC and the lanes' addresses, which it covers.
static int addresses_send(struct nb_link *link, const char *label, struct nb_error *err) {
    size_t bytes = address_bytes(link->net);
    char *addresses = malloc(bytes);
    unsigned char mac[NB_SHA256_BYTES];
    if (addresses == NULL) {
        return nb_fail(err, -ENOMEM, "cannot allocate addresses of %d lanes", link->net->settings.lanes);
    }
    nb_lanes_address(link->lanes, addresses);
    mac_of(link, label, addresses, bytes, mac);
    put(link, mac, sizeof mac, addresses, bytes);
    free(addresses);
    return 0;
}

static int hello_send(struct nb_link *link) {
    struct wire_hello *hello = &link->shake->hello;
    *hello = (struct wire_hello){.magic = MAGIC,
                                 .version = WIRE_VERSION,
                                 .lanes = (uint32_t)link->net->settings.lanes,
                                 .process_number = (uint32_t)getpid(),
                                 .listener = link->listener};
    memcpy(hello->process, link->net->process, sizeof hello->process);
    memcpy(hello->tag, link->net->settings.tag, sizeof hello->tag);
    int rc = nb_random(hello->nonce, sizeof hello->nonce);
    if (rc == 0) {
        link->state = NB_LINK_ANSWER;
        put(link, hello, sizeof *hello, NULL, 0);
    }
    return rc;
}

static const struct nb_net_listener *listener_of(const struct nb_net *net, uint64_t id) {
    NB_LIST_EACH(it, &net->listeners) {
        const struct nb_net_listener *listener = NB_CONTAINER(it, struct nb_net_listener, at_net);
        if (listener->id == id) {
            return listener;
        }
    }
    return NULL;
}

// Each handler of the handshake returns 0, or a failure that ends the link.

static int hello_received(struct nb_link *link, const void *data) {
    struct wire_hello *hello = &link->shake->hello;
    struct wire_answer *answer = &link->shake->answer;
    const struct nb_net_settings *settings = &link->net->settings;
    memcpy(hello, data, sizeof *hello);
    const struct nb_net_listener *listener = listener_of(link->net, hello->listener);
    if (hello->magic != MAGIC || hello->version != WIRE_VERSION || listener == NULL) {
        return NB_EAUTH;
    }
    *answer = (struct wire_answer){0};
    bool same = memcmp(hello->tag, settings->tag, sizeof hello->tag) == 0;
    answer->code = same ? 0 : NB_EMISMATCH;
    memcpy(answer->tag, settings->tag, sizeof answer->tag);
    int rc = nb_random(answer->nonce, sizeof answer->nonce);
    key_derive(link, listener->token);
    mac_of(link, "answer", "", 0, answer->mac);
    memcpy(link->process, hello->process, sizeof link->process);
    size_t used = strlen(link->peer);
    snprintf(link->peer + used, sizeof link->peer - used, " (process %u)", hello->process_number);
    link->state = NB_LINK_JOIN;
    put(link, answer, sizeof *answer, NULL, 0);
    return rc;
}

static int answer_received(struct nb_link *link, const void *data, struct nb_error *err) {
    struct wire_answer *answer = &link->shake->answer;
    unsigned char mac[NB_SHA256_BYTES];
    memcpy(answer, data, sizeof *answer);
    mac_of(link, "answer", "", 0, mac);
    if (!nb_bytes_equal(mac, answer->mac, sizeof mac)) {
        return nb_fail(err, NB_EAUTH, "%s does not know this job's secret: set NETBOTTLENECK_SECRET to the same text",
                       link->peer);
    }
    if (answer->code != 0) {
        return nb_fail(err, NB_EMISMATCH, "%s has other settings: '%.*s' there, '%s' here", link->peer,
                       (int)sizeof answer->tag - 1, answer->tag, link->net->settings.tag);
    }
    int rc = lanes_open(link, err);
    link->state = NB_LINK_WELCOME;
    return rc < 0 ? rc : addresses_send(link, "join", err);
}

// Checks the MAC of a join or a welcome, and opens the lanes to the addresses behind it.
static int addresses_received(struct nb_link *link, const char *label, const char *data, struct nb_error *err) {
    unsigned char mac[NB_SHA256_BYTES];
    mac_of(link, label, data + sizeof mac, address_bytes(link->net), mac);
    if (!nb_bytes_equal(mac, (const unsigned char *)data, sizeof mac)) {
        return nb_fail(err, NB_EAUTH, "%s does not know this job's secret", link->peer);
    }
    int rc = link->outgoing ? 0 : lanes_open(link, err);
    return rc < 0 ? rc : nb_lanes_peer_open(link->lanes, other_rank(link), data + sizeof mac, err);
}

static int join_received(struct nb_link *link, const char *data, struct nb_error *err) {
    int rc = addresses_received(link, "join", data, err);
    if (rc < 0) {
        return rc;
    }
    nb_admission_remove(&link->net->admission, &link->pending);
    link->admitted = true;
    link->state = NB_LINK_LANES;
    return addresses_send(link, "welcome", err);
}

static int welcome_received(struct nb_link *link, const char *data, struct nb_error *err) {
    int rc = addresses_received(link, "welcome", data, err);
    link->state = rc < 0 ? link->state : NB_LINK_LANES;
    return rc;
}

// Handles one message of the handshake: its bytes, 0 if it is not complete, or a failure.
static int shake_step(struct nb_link *link, const char *data, size_t bytes, struct nb_error *err) {
    bool addresses = link->state == NB_LINK_JOIN || link->state == NB_LINK_WELCOME;
    size_t need = addresses                      ? NB_SHA256_BYTES + address_bytes(link->net)
                  : link->state == NB_LINK_HELLO ? sizeof(struct wire_hello)
                                                 : sizeof(struct wire_answer);
    if (bytes < need) {
        return 0;
    }
    int rc = NB_EWIRE;
    switch (link->state) {
    case NB_LINK_HELLO:
        rc = hello_received(link, data);
        break;
    case NB_LINK_JOIN:
        rc = join_received(link, data, err);
        break;
    case NB_LINK_ANSWER:
        rc = answer_received(link, data, err);
        break;
    case NB_LINK_WELCOME:
        rc = welcome_received(link, data, err);
        break;
    default:
        break;
    }
    return rc < 0 ? rc : (int)need;
}

// Control messages

static bool ctl_handle(struct nb_link *link, const struct wire_ctl *ctl, const void *payload) {
    const struct nb_link_up *up = link->net->up;
    if (ctl->type == LINK_PING) {
        return true;
    }
    if (ctl->type == LINK_CLOSE) {
        up->closed(link, ctl->comm);
        return true;
    }
    if (link->outgoing) {
        return ctl->type == LINK_GRANT && up->granted(link, ctl->comm, ctl->bytes);
    }
    switch (ctl->type) {
    case LINK_OPEN:
        return up->opened(link, ctl->comm, ctl->op);
    case LINK_SEND:
        return up->sent(link, ctl->comm, ctl->op, ctl->bytes, ctl->op == 0 ? payload : NULL);
    case LINK_LEAVE:
        link->left = true;
        nb_link_release(link);
        return true;
    default:
        return false;
    }
}

// Handles one message: its bytes, 0 if it is not complete, or NB_EWIRE.
static int ctl_step(struct nb_link *link, const char *data, size_t bytes) {
    struct wire_ctl ctl;
    if (bytes < sizeof ctl) {
        return 0;
    }
    memcpy(&ctl, data, sizeof ctl);
    size_t payload = ctl.type == LINK_SEND && ctl.op == 0 ? ctl.bytes : 0;
    if (payload > NB_NET_LONE || ctl.bytes > NB_NET_BYTES_MAX) {
        return NB_EWIRE;
    }
    if (bytes < sizeof ctl + payload) {
        return 0;
    }
    return ctl_handle(link, &ctl, data + sizeof ctl) ? (int)(sizeof ctl + payload) : NB_EWIRE;
}

static void message_invalid(struct nb_link *link, int code, struct nb_error *err) {
    nb_fail(err, code, "%s sent what the protocol does not allow", link->peer);
    nb_link_fail(link, err);
}

// Handles the complete messages of the input.
static void parse(struct nb_link *link) {
    size_t at = 0;
    int n = 1;
    while (n > 0 && !link->failing) {
        struct nb_error err = {0};
        bool shaking = link->state < NB_LINK_LANES;
        n = shaking ? shake_step(link, link->in + at, link->in_bytes - at, &err)
                    : ctl_step(link, link->in + at, link->in_bytes - at);
        if (n < 0) {
            message_invalid(link, n, &err);
        }
        at += n > 0 ? (size_t)n : 0;
    }
    link->in_bytes -= at;
    if (at > 0 && link->in_bytes > 0) {
        memmove(link->in, link->in + at, link->in_bytes);
    }
}

static void connect_later(struct nb_link *link) {
    shut(link->net, &link->watch);
    nb_lanes_close(link->lanes);
    link->lanes = NULL;
    link->in_bytes = 0;
    link->out_bytes = 0;
    link->out_begin = 0;
    link->blocked = link->flush_due = false;
    link->state = NB_LINK_CONNECT;
    link->retry_ns = nb_now_ns() + RETRY_NS;
}

// The control connection has ended (0) or failed.
static void control_ended(struct nb_link *link, int code) {
    struct nb_error why = {0};
    if (link->outgoing && link->state < NB_LINK_LANES) {
        connect_later(link); // the peer may have dropped it because it was busy
        return;
    }
    if (link->leaving || link->left) {
        nb_fail(&why, NB_ECLOSED, "%s has closed its end", link->peer);
    } else if (code == 0 || code == -ECONNRESET || code == -EPIPE) {
        nb_fail(&why, NB_EPEER, "the connection to %s ended: its process is gone, or has closed it", link->peer);
    } else {
        nb_fail(&why, NB_EPEER, "the connection to %s failed (%s)", link->peer, nb_code_name(code));
    }
    nb_link_fail(link, &why);
}

static void link_read(struct nb_link *link) {
    for (int i = 0; i < READS_MAX && !link->failing && link->watch.fd >= 0; i++) {
        size_t room = IN_ROOM - link->in_bytes;
        ssize_t n = recv(link->watch.fd, link->in + link->in_bytes, room, MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
            return;
        }
        if (n <= 0) {
            control_ended(link, n < 0 ? -errno : 0);
            return;
        }
        link->in_bytes += (size_t)n;
        link->heard_ns = nb_now_ns();
        parse(link);
        if ((size_t)n < room) {
            return; // the loop reports later data and the end
        }
    }
}

void nb_link_poll(struct nb_link *link) {
    if (link->state == NB_LINK_READY && !link->failing && lanes_idle(link)) {
        link_read(link);
    }
}

static void link_ready(struct nb_watch *watch, uint32_t events) {
    struct nb_link *link = NB_CONTAINER(watch, struct nb_link, watch);
    if (link->failing) {
        return;
    }
    if (link->state == NB_LINK_CONNECT) {
        int rc = nb_sock_connected(watch->fd);
        rc = rc == 0 ? hello_send(link) : rc;
        if (rc < 0) {
            connect_later(link);
        }
        return;
    }
    if ((events & EPOLLOUT) != 0) {
        flush(link);
    }
    if (!link->failing && watch->fd >= 0 && (events & ~(uint32_t)EPOLLOUT) != 0) {
        link_read(link);
    }
}

// Opening

static struct nb_link *link_new(struct nb_net *net, bool outgoing) {
    struct nb_link *link = calloc(1, sizeof *link);
    if (link == NULL) {
        return NULL;
    }
    link->in = malloc(IN_ROOM);
    link->shake = calloc(1, sizeof *link->shake);
    if (link->in == NULL || link->shake == NULL) {
        free(link->in);
        free(link->shake);
        free(link);
        return NULL;
    }
    link->net = net;
    link->outgoing = outgoing;
    link->watch = (struct nb_watch){.fd = -1, .ready = link_ready};
    link->opened_ns = nb_now_ns();
    link->heard_ns = link->opened_ns;
    link->back_ns = BACK_LEAST_NS;
    nb_list_init(&link->comms);
    nb_list_init(&link->sinks);
    nb_list_insert(&net->links, &link->at_net);
    return link;
}

static int link_connect(struct nb_link *link, struct nb_error *err) {
    struct nb_net *net = link->net;
    int fd = nb_sock_connect(&link->to, NULL, NULL, err);
    if (fd < 0) {
        return fd;
    }
    nb_sock_tune(fd, net->settings.timeout_ms);
    link->watch.fd = fd;
    int rc = nb_loop_add(&net->loop, &link->watch, EPOLLOUT, err);
    if (rc < 0) {
        close(fd);
        link->watch.fd = -1;
    }
    return rc;
}

static int handle_address(const struct nb_net_handle *handle, struct nb_sockaddr *to) {
    *to = (struct nb_sockaddr){0};
    if (handle->family == AF_INET6) {
        to->len = sizeof to->in6;
        to->in6 = (struct sockaddr_in6){.sin6_family = AF_INET6, .sin6_scope_id = handle->scope};
        memcpy(&to->in6.sin6_addr, handle->address, sizeof to->in6.sin6_addr);
    } else if (handle->family == AF_INET) {
        to->len = sizeof to->in4;
        to->in4.sin_family = AF_INET;
        memcpy(&to->in4.sin_addr, handle->address, sizeof to->in4.sin_addr);
    } else {
        return -EINVAL;
    }
    nb_sock_set_port(to, handle->port);
    return 0;
}

int nb_link_find(struct nb_net *net, uint64_t domain, const struct nb_net_handle *handle, struct nb_link **out,
                 struct nb_error *err) {
    NB_LIST_EACH(it, &net->links) {
        struct nb_link *link = NB_CONTAINER(it, struct nb_link, at_net);
        if (link->outgoing && !link->leaving && !link->failing && link->state != NB_LINK_ENDED &&
            link->domain == domain && memcmp(link->process, handle->process, sizeof link->process) == 0) {
            *out = link;
            return 0;
        }
    }
    struct nb_link *link = link_new(net, true);
    if (link == NULL) {
        return nb_fail(err, -ENOMEM, "cannot allocate a link");
    }
    link->domain = domain;
    link->listener = handle->listener;
    memcpy(link->process, handle->process, sizeof link->process);
    key_derive(link, handle->token);
    int rc = handle_address(handle, &link->to);
    if (rc < 0) {
        nb_fail(err, rc, "the handle holds no address");
    } else {
        char at[NB_SOCK_TEXT];
        nb_sock_format(&link->to, at);
        snprintf(link->peer, sizeof link->peer, "%s (process %u)", at, handle->process_number);
        rc = link_connect(link, err);
    }
    if (rc < 0) {
        link_free(link);
        return rc;
    }
    *out = link;
    return 0;
}

// Listening

static void pending_drop(struct nb_pending *pending) {
    struct nb_link *link = NB_CONTAINER(pending, struct nb_link, pending);
    struct nb_error why = {0};
    nb_fail(&why, NB_ECLOSED, "%s did not prove in time that it belongs to this job", link->peer);
    nb_link_fail(link, &why);
    nb_admission_remove(&link->net->admission, pending);
    link->admitted = true; // counted no more
    shut(link->net, &link->watch);
}

static void pending_read(struct nb_pending *pending) {
    struct nb_link *link = NB_CONTAINER(pending, struct nb_link, pending);
    if (link->state == NB_LINK_JOIN) {
        link_read(link);
    }
}

static void gate_open(struct nb_gate *gate) {
    struct nb_net *net = NB_CONTAINER(gate, struct nb_net, gate);
    nb_loop_change(&net->loop, &net->listener, EPOLLIN);
}

static void gate_shut(struct nb_net *net, int64_t for_ns) {
    nb_loop_change(&net->loop, &net->listener, 0);
    nb_admission_shut(&net->admission, &net->gate, for_ns);
}

static void link_accept(struct nb_net *net, int fd) {
    struct nb_link *link = link_new(net, false);
    struct nb_error err = {0};
    if (link == NULL) {
        close(fd);
        return;
    }
    struct nb_sockaddr from = {.len = sizeof from - offsetof(struct nb_sockaddr, any)};
    if (getpeername(fd, &from.any, &from.len) == 0) {
        char at[NB_SOCK_TEXT];
        nb_sock_format(&from, at);
        snprintf(link->peer, sizeof link->peer, "%s", at);
    }
    nb_sock_tune(fd, net->settings.timeout_ms);
    link->state = NB_LINK_HELLO;
    link->pending.drop = pending_drop;
    link->pending.read = pending_read;
    link->watch.fd = fd;
    if (nb_loop_add(&net->loop, &link->watch, EPOLLIN, &err) < 0) {
        close(fd);
        link_free(link);
        return;
    }
    nb_admission_add(&net->admission, &link->pending);
    link_read(link); // most have sent their hello by now
}

static void listener_ready(struct nb_watch *watch, uint32_t events) {
    (void)events;
    struct nb_net *net = NB_CONTAINER(watch, struct nb_net, listener);
    if (!nb_admission_may(&net->admission)) {
        gate_shut(net, 0);
        return;
    }
    int fd = nb_sock_accept(watch->fd);
    if (fd >= 0) {
        link_accept(net, fd);
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        gate_shut(net, (int64_t)PAUSE_MS * 1000000);
    }
}

int nb_links_listen(struct nb_net *net, struct nb_error *err) {
    if (net->listener.fd >= 0) {
        return 0;
    }
    net->address = net->settings.binds[0];
    nb_sock_set_port(&net->address, 0);
    int fd = nb_sock_listen(&net->address, net->settings.ports, BACKLOG, err);
    if (fd < 0) {
        return fd;
    }
    net->listener = (struct nb_watch){.fd = fd, .ready = listener_ready};
    net->gate.open = gate_open;
    int rc = nb_loop_add(&net->loop, &net->listener, EPOLLIN, err);
    if (rc < 0) {
        close(fd);
        net->listener.fd = -1;
    }
    return rc;
}

void nb_links_listen_end(struct nb_net *net) {
    nb_list_remove(&net->gate.link);
    shut(net, &net->listener);
}

// Ticks

static void handshake_tick(struct nb_link *link, int64_t now) {
    int64_t limit_ns = (int64_t)link->net->settings.timeout_ms * 1000000;
    struct nb_error why = {0};
    if (now - link->opened_ns > limit_ns) {
        nb_fail(&why, NB_ETIMEOUT, "no link to %s within %.1f s (NETBOTTLENECK_TIMEOUT_S)", link->peer,
                (double)limit_ns / 1e9);
        nb_link_fail(link, &why);
        return;
    }
    bool due = link->state == NB_LINK_CONNECT && link->watch.fd < 0 && now >= link->retry_ns;
    if (due && link_connect(link, &why) < 0) {
        nb_link_fail(link, &why);
    }
}

static void ping_tick(struct nb_link *link, int64_t now) {
    int64_t quarter = (int64_t)link->net->settings.timeout_ms * 1000000 / 4;
    if (now - link->pinged_ns >= (quarter < PING_MAX_NS ? quarter : (int64_t)PING_MAX_NS) && !link->blocked) {
        link->pinged_ns = now;
        put_ctl(link, (struct wire_ctl){.type = LINK_PING}, NULL, 0);
    }
}

// Judges a peer that is silent, lanes that are lost, and bytes that do not move.
static void silence_tick(struct nb_link *link, int64_t now) {
    int64_t limit_ns = (int64_t)link->net->settings.timeout_ms * 1000000;
    bool pending = false;
    int64_t moved = link->net->up->moved(link, &pending);
    int64_t heard = link->heard_ns > moved ? link->heard_ns : moved;
    int64_t resumed = link->net->resumed_ns; // this process was descheduled until then: no silence of the peer
    heard = heard > resumed ? heard : resumed;
    moved = moved != 0 && moved < resumed ? resumed : moved;
    struct nb_error why = {0};
    if (link->lost_ns != 0 && now - link->lost_ns > LOST_NS) {
        why = link->failure;
        nb_link_fail(link, &why);
    } else if (pending && now - heard > limit_ns) {
        nb_fail(&why, NB_ETIMEOUT, "%s has been silent for %.1f s (NETBOTTLENECK_TIMEOUT_S)", link->peer,
                (double)(now - heard) / 1e9);
        nb_link_fail(link, &why);
    } else if (moved != 0 && now - moved > limit_ns / 4 * 5) {
        nb_fail(&why, NB_ETIMEOUT, "no byte of a transfer with %s has moved for %.1f s", link->peer,
                (double)(now - moved) / 1e9);
        nb_link_fail(link, &why);
    } else if (link->leaving && now - link->leave_ns > LEAVE_NS) {
        nb_fail(&why, NB_ECLOSED, "closed");
        nb_link_fail(link, &why);
    }
}

static void tick(struct nb_net *net, int64_t now) {
    net->resumed_ns = now - net->ticked_ns > GAP_NS ? now : net->resumed_ns;
    net->ticked_ns = now;
    nb_admission_tick(&net->admission, now);
    NB_LIST_EACH(it, &net->links) {
        struct nb_link *link = NB_CONTAINER(it, struct nb_link, at_net);
        if (link->failing || link->state == NB_LINK_ENDED) {
            continue;
        }
        if (link->state < NB_LINK_READY && (link->outgoing || link->admitted)) {
            handshake_tick(link, now);
        }
        if (link->lanes != NULL && link->state >= NB_LINK_LANES) {
            nb_lanes_tick(link->lanes, now);
            ping_tick(link, now);
            silence_tick(link, now);
        }
    }
}

// Ends the links that failed, and frees those that no comm refers to.
static void reap(struct nb_net *net) {
    NB_LIST_EACH_SAFE(it, nx, &net->links) {
        struct nb_link *link = NB_CONTAINER(it, struct nb_link, at_net);
        if (link->failing && link->state != NB_LINK_ENDED) {
            link_end(link);
        }
        if (link->state == NB_LINK_ENDED && nb_list_empty(&link->comms)) {
            link_free(link);
        }
    }
}

void nb_links_progress(struct nb_net *net) {
    nb_loop_wait(&net->loop, 0);
    int64_t now = nb_now_ns();
    NB_LIST_EACH(it, &net->links) {
        struct nb_link *link = NB_CONTAINER(it, struct nb_link, at_net);
        if (link->lanes == NULL || link->failing) {
            continue;
        }
        lone_look(link, now);
        if (link->flush_due && !link->blocked) {
            flush(link);
        }
        if (link->state == NB_LINK_READY && lanes_idle(link) && now - link->polled_ns < POLL_NS) {
            continue;
        }
        link->polled_ns = now;
        nb_lanes_progress(link->lanes, now);
        if (link->state == NB_LINK_LANES && nb_lanes_peer_ready(link->lanes, other_rank(link))) {
            link->state = NB_LINK_READY;
        }
    }
    if (now - net->ticked_ns >= TICK_NS) {
        tick(net, now);
    }
    reap(net);
}

int nb_links_arm(const struct nb_net *net) {
    int sleep_ms = net->listener.fd >= 0 ? (int)SLEEP_MS : -1;
    NB_LIST_EACH(it, &net->links) {
        const struct nb_link *link = NB_CONTAINER(it, struct nb_link, at_net);
        bool pending = link->state < NB_LINK_READY;
        if (link->lanes != NULL && nb_lanes_arm(link->lanes) == -EAGAIN) {
            return 0;
        }
        (void)net->up->moved(link, &pending);
        int most_ms = pending || link->failing || link->leaving ? BUSY_SLEEP_MS : SLEEP_MS;
        sleep_ms = sleep_ms < 0 || most_ms < sleep_ms ? most_ms : sleep_ms;
    }
    return sleep_ms;
}

// Ending

void nb_link_release(struct nb_link *link) {
    if (!nb_list_empty(&link->comms) || link->state == NB_LINK_ENDED) {
        return;
    }
    struct nb_error why = {0};
    if (link->outgoing && link->state == NB_LINK_READY) {
        put_ctl(link, (struct wire_ctl){.type = LINK_LEAVE}, NULL, 0);
        link->leaving = true;
        link->leave_ns = nb_now_ns();
    } else if (link->outgoing || link->left) {
        nb_fail(&why, NB_ECLOSED, "closed");
        nb_link_fail(link, &why);
    }
}

bool nb_links_leaving(const struct nb_net *net) {
    NB_LIST_EACH(it, &net->links) {
        const struct nb_link *link = NB_CONTAINER(it, struct nb_link, at_net);
        if (link->leaving && link->state != NB_LINK_ENDED) {
            return true;
        }
    }
    return false;
}

void nb_links_close(struct nb_net *net) {
    nb_links_listen_end(net);
    NB_LIST_EACH_SAFE(it, nx, &net->links) {
        struct nb_link *link = NB_CONTAINER(it, struct nb_link, at_net);
        if (link->state != NB_LINK_ENDED) {
            nb_fail(&link->failure, NB_ECLOSED, "closed");
            link_end(link);
        }
        link_free(link);
    }
}
