// TCP handshake: the two ends of a connection prove to each other that they are ranks of one job.
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
#include "base/wire.h"
#include "bootstrap/bootstrap.h"
#include "transport/tcp_internal.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the messages are sent as they lie in memory");

void nb_tcp_macs(const struct nb_boot *boot, const struct tcp_handshake *handshake, int to,
                 const struct nb_sockaddr *listener, struct nb_tcp_macs *macs) {
    struct wire_tcp_transcript transcript = {
        .hello = handshake->hello, .to = (uint32_t)to, .port = nb_sock_port(listener)};
    memcpy(transcript.nonce, handshake->answer.nonce, sizeof transcript.nonce);
    if (listener->any.sa_family == AF_INET6) {
        memcpy(transcript.addr, &listener->in6.sin6_addr, sizeof transcript.addr);
    } else {
        memcpy(transcript.addr, &listener->in4.sin_addr, sizeof listener->in4.sin_addr);
    }
    nb_boot_mac(boot, "tcp lane", &transcript, sizeof transcript, (unsigned char *)macs);
}

// Sends a message; the first bytes of a new connection always fit its buffer.
static int put(int fd, const void *message, size_t bytes) {
    return send(fd, message, bytes, MSG_DONTWAIT | MSG_NOSIGNAL) == (ssize_t)bytes ? 1 : -ECONNRESET;
}

// Reads no further than the message: segments may follow it.
static int take(int fd, struct tcp_handshake *handshake, void *message, size_t bytes) {
    ssize_t n = recv(fd, (char *)message + handshake->got, bytes - handshake->got, MSG_DONTWAIT);
    if (n <= 0) {
        return n < 0 && (errno == EAGAIN || errno == EINTR) ? 0 : -ECONNRESET;
    }
    handshake->got += (size_t)n;
    if (handshake->got < bytes) {
        return 0;
    }
    handshake->got = 0;
    return 1;
}

int nb_tcp_send_hello(const struct tcp_lane *lane, int fd, struct tcp_handshake *handshake) {
    struct wire_tcp_hello *hello = &handshake->hello;
    *handshake = (struct tcp_handshake){
        .hello = {.magic = NB_WIRE_TCP_MAGIC, .rank = (uint32_t)lane->config.rank, .lane = (uint32_t)lane->base.index}};
    int rc = nb_random(hello->nonce, sizeof hello->nonce);
    return rc < 0 ? rc : put(fd, hello, sizeof *hello);
}

int nb_tcp_read_answer(const struct tcp_lane *lane, int fd, struct tcp_handshake *handshake, int peer,
                       const struct nb_sockaddr *to) {
    struct nb_tcp_macs macs;
    int rc = take(fd, handshake, &handshake->answer, sizeof handshake->answer);
    if (rc <= 0) {
        return rc;
    }
    nb_tcp_macs(lane->config.boot, handshake, peer, to, &macs);
    if (!nb_bytes_equal(macs.answer, handshake->answer.mac, sizeof macs.answer)) {
        return NB_EAUTH;
    }
    char byte;
    if (recv(fd, &byte, 1, MSG_DONTWAIT | MSG_PEEK) == 0) {
        return -ECONNRESET; // the peer dropped the connection while it waited for the proof
    }
    memcpy(handshake->proof.mac, macs.proof, sizeof macs.proof);
    return put(fd, &handshake->proof, sizeof handshake->proof);
}

int nb_tcp_read_hello(const struct tcp_lane *lane, int fd, struct tcp_handshake *handshake) {
    const struct wire_tcp_hello *hello = &handshake->hello;
    int rc = take(fd, handshake, &handshake->hello, sizeof *hello);
    if (rc <= 0) {
        return rc;
    }
    if (hello->magic != NB_WIRE_TCP_MAGIC || hello->rank >= (uint32_t)lane->config.size ||
        hello->rank == (uint32_t)lane->config.rank || hello->lane != (uint32_t)lane->base.index) {
        return NB_EAUTH;
    }
    struct wire_tcp_answer *answer = &handshake->answer;
    rc = nb_random(answer->nonce, sizeof answer->nonce);
    if (rc < 0) {
        return rc;
    }
    nb_tcp_macs(lane->config.boot, handshake, lane->config.rank, &lane->addr, &handshake->macs);
    memcpy(answer->mac, handshake->macs.answer, sizeof answer->mac);
    return put(fd, answer, sizeof *answer);
}

int nb_tcp_read_proof(int fd, struct tcp_handshake *handshake) {
    int rc = take(fd, handshake, &handshake->proof, sizeof handshake->proof);
    if (rc <= 0) {
        return rc;
    }
    return nb_bytes_equal(handshake->macs.proof, handshake->proof.mac, sizeof handshake->proof.mac) ? 1 : NB_EAUTH;
}
