// How the two ends of a lane's connection prove to each other that they are ranks of one job.
#include <errno.h>
#include <netinet/in.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>

#include "base/error.h"
#include "base/sha256.h"
#include "base/sock.h"
#include "bootstrap/bootstrap.h"
#include "transport/tcp_internal.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the messages are sent as they lie in memory");

// What the MACs are over.
struct transcript {
    struct hello hello; // who connects, the lane, its nonce
    uint32_t to;        // the rank that listens
    uint32_t port;
    unsigned char addr[16];
    unsigned char nonce[NB_TCP_NONCE_BYTES]; // of the side that listens
};

_Static_assert(sizeof(struct transcript) == 72, "no padding is hashed");

void nb_tcp_macs(const struct nb_boot *boot, const struct greeting *greeting, int to,
                 const struct nb_sockaddr *listener, struct nb_tcp_macs *macs) {
    struct transcript transcript = {.hello = greeting->hello, .to = (uint32_t)to, .port = nb_sock_port(listener)};
    memcpy(transcript.nonce, greeting->answer.nonce, sizeof transcript.nonce);
    if (listener->any.sa_family == AF_INET6) {
        memcpy(transcript.addr, &listener->in6.sin6_addr, sizeof transcript.addr);
    } else {
        memcpy(transcript.addr, &listener->in4.sin_addr, sizeof listener->in4.sin_addr);
    }
    nb_boot_mac(boot, "tcp lane", &transcript, sizeof transcript, (unsigned char *)macs);
}

// The first bytes of a new connection always fit its buffer.
static int put(int fd, const void *message, size_t bytes) {
    return send(fd, message, bytes, MSG_DONTWAIT | MSG_NOSIGNAL) == (ssize_t)bytes ? 1 : -ECONNRESET;
}

// Reads no more than the message: segments may lie behind it.
static int take(int fd, struct greeting *greeting, void *message, size_t bytes) {
    ssize_t n = recv(fd, (char *)message + greeting->got, bytes - greeting->got, MSG_DONTWAIT);
    if (n <= 0) {
        return n < 0 && (errno == EAGAIN || errno == EINTR) ? 0 : -ECONNRESET;
    }
    greeting->got += (size_t)n;
    if (greeting->got < bytes) {
        return 0;
    }
    greeting->got = 0;
    return 1;
}

int nb_tcp_greet(const struct tcp_lane *lane, int fd, struct greeting *greeting) {
    struct hello *hello = &greeting->hello;
    *greeting = (struct greeting){
        .hello = {.magic = NB_TCP_MAGIC, .rank = (uint32_t)lane->config.rank, .lane = (uint32_t)lane->base.index}};
    int rc = nb_random(hello->nonce, sizeof hello->nonce);
    return rc < 0 ? rc : put(fd, hello, sizeof *hello);
}

int nb_tcp_greeted(const struct tcp_lane *lane, int fd, struct greeting *greeting, int peer,
                   const struct nb_sockaddr *to) {
    struct nb_tcp_macs macs;
    int rc = take(fd, greeting, &greeting->answer, sizeof greeting->answer);
    if (rc <= 0) {
        return rc;
    }
    nb_tcp_macs(lane->config.boot, greeting, peer, to, &macs);
    if (!nb_bytes_equal(macs.answer, greeting->answer.mac, sizeof macs.answer)) {
        return NB_EAUTH;
    }
    memcpy(greeting->proof.mac, macs.proof, sizeof macs.proof);
    return put(fd, &greeting->proof, sizeof greeting->proof);
}

int nb_tcp_welcome(const struct tcp_lane *lane, int fd, struct greeting *greeting) {
    const struct hello *hello = &greeting->hello;
    int rc = take(fd, greeting, &greeting->hello, sizeof *hello);
    if (rc <= 0) {
        return rc;
    }
    if (hello->magic != NB_TCP_MAGIC || hello->rank >= (uint32_t)lane->config.size ||
        hello->rank == (uint32_t)lane->config.rank || hello->lane != (uint32_t)lane->base.index) {
        return NB_EAUTH;
    }
    struct answer *answer = &greeting->answer;
    rc = nb_random(answer->nonce, sizeof answer->nonce);
    if (rc < 0) {
        return rc;
    }
    nb_tcp_macs(lane->config.boot, greeting, lane->config.rank, &lane->addr, &greeting->macs);
    memcpy(answer->mac, greeting->macs.answer, sizeof answer->mac);
    return put(fd, answer, sizeof *answer);
}

int nb_tcp_welcomed(int fd, struct greeting *greeting) {
    int rc = take(fd, greeting, &greeting->proof, sizeof greeting->proof);
    if (rc <= 0) {
        return rc;
    }
    return nb_bytes_equal(greeting->macs.proof, greeting->proof.mac, sizeof greeting->proof.mac) ? 1 : NB_EAUTH;
}
