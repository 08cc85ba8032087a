// Handshake of a link: hello, answer, proof, join and welcome, and the lanes that it opens (see net.h).
#include <errno.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
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
#include "nccl/link.h"
#include "nccl/net.h"
#include "transport/lanes.h"
#include "transport/transport.h"

enum { MAGIC = 0x4e424e4c, WIRE_VERSION = 5, IN_FLIGHT_MAX = 8 * 1024 * 1024 };

_Static_assert(NB_LINK_IN_ROOM >= NB_SHA256_BYTES + (int)sizeof(struct wire_opened) +
                                      NB_LANES_MAX * (int)sizeof(struct wire_lane_address),
               "a join or a welcome fits");

// Bytes behind the MAC of a join or a welcome.
static size_t opened_bytes(const struct nb_net *net) {
    return sizeof(struct wire_opened) + (size_t)net->settings.lanes * sizeof(struct wire_lane_address);
}

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

static int handle_address(const struct nb_net_handle *handle, struct nb_sockaddr *to) {
    *to = (struct nb_sockaddr){0};
    if (handle->family == AF_INET6) {
        to->len = sizeof to->in6;
        to->in6 = (struct sockaddr_in6){.sin6_family = AF_INET6};
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

int nb_link_shake_aim(struct nb_link *link, const struct nb_net_handle *handle, struct nb_error *err) {
    char at[NB_SOCK_TEXT];
    struct nb_sockaddr to;
    int rc = handle_address(handle, &to);
    if (rc < 0) {
        return nb_fail(err, rc, "the handle holds no address");
    }
    link->to = to;
    link->listener = handle->listener;
    memcpy(link->process, handle->process, sizeof link->process);
    key_derive(link, handle->token);
    nb_sock_format(&link->to, at);
    snprintf(link->peer, sizeof link->peer, "%s (process %u)", at, handle->process_number);
    return 0;
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
        if (!link->failing && link->over_ns == 0) { // kept for tick(), which waits for a better reason
            link->failure = (struct nb_error){.code = why->code, .peer = NB_NO_PEER};
            snprintf(link->failure.text, sizeof link->failure.text, "no lane to %s is left (%.300s)", link->peer,
                     why->text);
        }
    }
}

// Lanes know the peer by its rank only, which is the same for every link.
static void lanes_failed(void *ctx, const struct nb_error *why) {
    struct nb_link *link = ctx;
    struct nb_error named = {0};
    nb_fail(&named, why->code, "transfers with %s: %.300s", link->peer, why->text);
    nb_link_fail(link, &named);
}

static int not_opened(const struct nb_link *link, const struct nb_error *why, struct nb_error *err) {
    const char *remedy = why->code == -EMFILE       ? ": see `ulimit -n`"
                         : why->code == -EADDRINUSE ? ": widen NETBOTTLENECK_PORTS"
                                                    : "";
    return nb_fail(err, why->code, "no link %s %s: %.300s%s", link->outgoing ? "to" : "from", link->peer, why->text,
                   remedy);
}

// Opens the lanes, those over libfabric without the lock. Other threads handle the net's events meanwhile, so the net's
// loop watches these lanes once they are open.
static int lanes_open_with(struct nb_link *link, const struct nb_lanes_config *config, struct nb_error *err) {
    struct nb_net *net = link->net;
    struct nb_lanes *lanes = NULL;
    if (!config->watched_later) {
        return nb_lanes_open(&link->lanes, config, err); // takes 0.1 ms
    }
    pthread_mutex_unlock(&net->lock);
    int rc = nb_lanes_open(&lanes, config, err);
    pthread_mutex_lock(&net->lock);
    link->lanes = lanes;
    rc = rc == 0 ? nb_lanes_watch(lanes, err) : rc;
    if (rc < 0 || link->state != NB_LINK_OPENING) {
        nb_link_close_lanes(link);
    }
    return rc;
}

static int lanes_open(struct nb_link *link, struct nb_error *err) {
    const struct nb_net_settings *settings = &link->net->settings;
    link->boot = (struct nb_boot){.rank = link->outgoing ? 0 : 1, .size = 2, .timeout_ms = settings->timeout_ms};
    link->boot.self = settings->binds[0];
    mac_of(link, "session", "", 0, link->boot.session);
    struct nb_lane_config lane = nb_net_settings_lane(settings);
    lane.rank = link->boot.rank;
    lane.size = 2;
    lane.loop = &link->net->loop;
    lane.boot = &link->boot;
    const struct nb_lanes_config config = {.ops = settings->transport,
                                           .lane = lane,
                                           .lanes = settings->lanes,
                                           .binds = settings->binds,
                                           .bind_count = settings->bind_count,
                                           .segment_bytes = settings->segment_bytes,
                                           .in_flight_max = IN_FLIGHT_MAX,
                                           .watched_later = settings->transport->kind == NB_LANE_RMA,
                                           .lane_lost = lane_lost,
                                           .failed = lanes_failed,
                                           .ctx = link};
    return lanes_open_with(link, &config, err);
}

// Sends a MAC and what it covers: whether this side's lanes open, and their addresses. Without lanes these are zero.
static int opened_send(struct nb_link *link, const char *label, const struct nb_error *why, struct nb_error *err) {
    struct wire_opened opened = {.code = why->code};
    size_t bytes = opened_bytes(link->net);
    char *body = calloc(1, bytes);
    unsigned char mac[NB_SHA256_BYTES];
    if (body == NULL) {
        return nb_fail(err, -ENOMEM, "cannot allocate addresses of %d lanes", link->net->settings.lanes);
    }
    snprintf(opened.text, sizeof opened.text, "%s", why->text);
    memcpy(body, &opened, sizeof opened);
    if (link->lanes != NULL) {
        nb_lanes_address(link->lanes, body + sizeof opened);
    }
    mac_of(link, label, body, bytes, mac);
    nb_link_put(link, mac, sizeof mac, body, bytes);
    free(body);
    return 0;
}

int nb_link_shake_hello(struct nb_link *link) {
    struct wire_hello *hello = &link->shake->hello;
    *hello = (struct wire_hello){
        .magic = MAGIC, .version = WIRE_VERSION, .process_number = (uint32_t)getpid(), .listener = link->listener};
    memcpy(hello->process, link->net->process, sizeof hello->process);
    memcpy(hello->tag, link->net->settings.tag, sizeof hello->tag);
    int rc = nb_random(hello->nonce, sizeof hello->nonce);
    if (rc == 0) {
        link->state = NB_LINK_ANSWER;
        nb_link_put(link, hello, sizeof *hello, NULL, 0);
    }
    return rc;
}

struct nb_net_listener *nb_links_listener(const struct nb_net *net, uint64_t id) {
    NB_LIST_EACH(it, &net->listeners) {
        struct nb_net_listener *listener = NB_CONTAINER(it, struct nb_net_listener, at_net);
        if (listener->id == id) {
            return listener;
        }
    }
    return NULL;
}

static void proven(struct nb_link *link) {
    link->state = NB_LINK_PROVEN;
    atomic_store_explicit(&link->net->open_due, true, memory_order_relaxed);
    nb_loop_wake(&link->net->sleep);
}

// Each handler of the handshake returns 0, or a failure that ends the link.

static int hello_received(struct nb_link *link, const void *data) {
    struct wire_hello *hello = &link->shake->hello;
    struct wire_answer *answer = &link->shake->answer;
    const struct nb_net_settings *settings = &link->net->settings;
    memcpy(hello, data, sizeof *hello);
    const struct nb_net_listener *listener = nb_links_listener(link->net, hello->listener);
    if (hello->magic != MAGIC || listener == NULL) {
        return NB_EAUTH;
    }
    *answer = (struct wire_answer){.version = WIRE_VERSION};
    bool same = hello->version == WIRE_VERSION && memcmp(hello->tag, settings->tag, sizeof hello->tag) == 0;
    answer->code = same ? 0 : NB_EMISMATCH;
    memcpy(answer->tag, settings->tag, sizeof answer->tag);
    int rc = nb_random(answer->nonce, sizeof answer->nonce);
    key_derive(link, listener->token);
    mac_of(link, "answer", "", 0, answer->mac);
    memcpy(link->process, hello->process, sizeof link->process);
    size_t used = strlen(link->peer);
    snprintf(link->peer + used, sizeof link->peer - used, " (process %u)", hello->process_number);
    link->state = NB_LINK_PROOF;
    nb_link_put(link, answer, sizeof *answer, NULL, 0);
    return rc;
}

static int mismatch(const struct nb_link *link, uint32_t version, const char tag[NB_NET_TAG], struct nb_error *err) {
    return nb_fail(err, NB_EMISMATCH, "%s has other settings: '%.*s, protocol %u' there, '%s, protocol %d' here",
                   link->peer, NB_NET_TAG - 1, tag, version, link->net->settings.tag, WIRE_VERSION);
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
    proven(link);
    mac_of(link, "proof", "", 0, mac);
    nb_link_put(link, mac, sizeof mac, NULL, 0); // with it the peer, too, names a mismatch
    return answer->code != 0 ? mismatch(link, answer->version, answer->tag, err) : 0;
}

// Checks the MAC of a message against the `bytes` behind it.
static int mac_check(const struct nb_link *link, const char *label, const char *data, size_t bytes,
                     struct nb_error *err) {
    unsigned char mac[NB_SHA256_BYTES];
    mac_of(link, label, data + sizeof mac, bytes, mac);
    return nb_bytes_equal(mac, (const unsigned char *)data, sizeof mac)
               ? 0
               : nb_fail(err, NB_EAUTH, "%s does not know this job's secret", link->peer);
}

static int proof_received(struct nb_link *link, const char *data, struct nb_error *err) {
    int rc = mac_check(link, "proof", data, 0, err);
    if (rc < 0) {
        return rc;
    }
    nb_admission_remove(&link->net->admission, &link->pending);
    link->admitted = true;
    proven(link);
    const struct wire_hello *hello = &link->shake->hello;
    return link->shake->answer.code != 0 ? mismatch(link, hello->version, hello->tag, err) : 0;
}

int nb_link_shake_open(struct nb_link *link, struct nb_error *err) {
    struct nb_error why = {0};
    int rc = lanes_open(link, &why);
    if (link->state != NB_LINK_OPENING) {
        return 0; // it has ended, or connects again
    }
    if (!link->outgoing) {
        link->shake->refusal = why; // the welcome has it: the peer reads nothing before that
        link->state = NB_LINK_JOIN;
        return 0;
    }
    link->state = NB_LINK_WELCOME;
    int sent = opened_send(link, "join", &why, err);
    return rc < 0 ? not_opened(link, &why, err) : sent;
}

static int peer_open(struct nb_link *link, const char *addresses, struct nb_error *err) {
    return nb_lanes_peer_open(link->lanes, nb_link_other_rank(link), addresses, err);
}

// Checks the MAC of a join or a welcome. Fails, too, if the peer's lanes do not open.
static int opened_check(const struct nb_link *link, const char *label, const char *data, struct nb_error *err) {
    struct wire_opened opened;
    int rc = mac_check(link, label, data, opened_bytes(link->net), err);
    if (rc < 0) {
        return rc;
    }
    memcpy(&opened, data + NB_SHA256_BYTES, sizeof opened);
    return opened.code == 0
               ? 0
               : nb_fail(err, NB_EPEER, "%s does not open the link: %.*s", link->peer, NB_ERROR_TEXT - 1, opened.text);
}

static int join_received(struct nb_link *link, const char *data, struct nb_error *err) {
    struct nb_error *refusal = &link->shake->refusal;
    int rc = opened_check(link, "join", data, err);
    if (rc < 0) {
        return rc;
    }
    if (refusal->code == 0) {
        (void)peer_open(link, data + NB_SHA256_BYTES + sizeof(struct wire_opened), refusal);
    }
    if (refusal->code == 0) {
        link->state = NB_LINK_LANES;
    } else {
        not_opened(link, refusal, err);
    }
    rc = opened_send(link, "welcome", refusal, err);
    return refusal->code != 0 ? refusal->code : rc;
}

static int welcome_received(struct nb_link *link, const char *data, struct nb_error *err) {
    struct nb_error why = {0};
    int rc = opened_check(link, "welcome", data, err);
    if (rc < 0) {
        return rc;
    }
    if (peer_open(link, data + NB_SHA256_BYTES + sizeof(struct wire_opened), &why) < 0) {
        return not_opened(link, &why, err);
    }
    link->state = NB_LINK_LANES;
    return 0;
}

// Bytes of the message that the link awaits; 0: none.
static size_t awaited_bytes(const struct nb_link *link) {
    switch (link->state) {
    case NB_LINK_HELLO:
        return sizeof(struct wire_hello);
    case NB_LINK_ANSWER:
        return sizeof(struct wire_answer);
    case NB_LINK_PROOF:
        return NB_SHA256_BYTES;
    case NB_LINK_PROVEN:
    case NB_LINK_OPENING:
        return link->outgoing ? 0 : NB_SHA256_BYTES + opened_bytes(link->net);
    case NB_LINK_JOIN:
    case NB_LINK_WELCOME:
        return NB_SHA256_BYTES + opened_bytes(link->net);
    default:
        return 0;
    }
}

int nb_link_shake_step(struct nb_link *link, const char *data, size_t bytes, struct nb_error *err) {
    size_t need = awaited_bytes(link);
    if (need == 0 || bytes < need) {
        return 0;
    }
    int rc = NB_EWIRE;
    switch (link->state) {
    case NB_LINK_HELLO:
        rc = hello_received(link, data);
        break;
    case NB_LINK_PROOF:
        rc = proof_received(link, data, err);
        break;
    case NB_LINK_PROVEN:
    case NB_LINK_OPENING: // the join stays in the input, but a peer that has failed ends the connection behind it
        rc = opened_check(link, "join", data, err);
        need = 0;
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
