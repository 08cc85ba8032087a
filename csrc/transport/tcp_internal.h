// What tcp.c (lanes), tcp_accept.c (listeners), tcp_handshake.c and tcp_stream.c (bytes of one connection) share. Nobody else
// includes this.
#ifndef NB_TRANSPORT_TCP_INTERNAL_H
#define NB_TRANSPORT_TCP_INTERNAL_H

#include "base/admission.h"
#include "base/sha256.h"
#include "bootstrap/bootstrap.h"
#include "transport/tcp.h"

enum { MESSAGES = 64, CONGESTION_BYTES = 16 }; // queued to one peer; TCP_CA_NAME_MAX of the kernel

enum { NB_TCP_MAGIC = 0x4e424c42, NB_TCP_NONCE_BYTES = 16, NB_TCP_MAC_BYTES = 16 };

// The handshake: hello ->, <- answer, proof ->, and segments may follow the proof at once. Both MACs cover the ranks, the lane,
// the listener's address and both nonces (tcp_handshake.c), so none can be replayed, reflected or used for another lane.
struct hello {
    uint32_t magic;
    uint32_t rank;
    uint32_t lane;
    uint32_t zero;
    unsigned char nonce[NB_TCP_NONCE_BYTES];
};

struct answer {
    unsigned char nonce[NB_TCP_NONCE_BYTES];
    unsigned char mac[NB_TCP_MAC_BYTES];
};

struct proof {
    unsigned char mac[NB_TCP_MAC_BYTES];
};

struct header {
    uint32_t type;
    uint32_t bytes;
    uint64_t op;
    uint32_t block;
    uint16_t blocks;
    uint16_t zero;
};

_Static_assert(sizeof(struct hello) == 32, "crosses the wire");
_Static_assert(sizeof(struct answer) == 32, "crosses the wire");
_Static_assert(sizeof(struct proof) == 16, "crosses the wire");
_Static_assert(sizeof(struct header) == 24, "crosses the wire");

struct message {
    size_t bytes;
    unsigned char data[NB_LANE_MESSAGE_MAX];
};

enum state { NONE, CONNECTING, GREETING, OPEN };

// A cursor over scattered memory.
struct pieces {
    struct iovec iov[NB_LANE_IOV_MAX + 1];
    int count;
    int at;
};

// The two halves of one HMAC: what the side that accepted proves, and what the one that connected does.
struct nb_tcp_macs {
    unsigned char answer[NB_TCP_MAC_BYTES];
    unsigned char proof[NB_TCP_MAC_BYTES];
};

_Static_assert(sizeof(struct nb_tcp_macs) == NB_SHA256_BYTES, "halves");

// One connection's handshake, as one side knows it.
struct greeting {
    struct hello hello;
    struct answer answer;
    struct proof proof;
    struct nb_tcp_macs macs; // of the side that accepted: made with its answer
    size_t got;              // of the message that is awaited
};

// The two connections with a peer. What goes out travels on the one that this rank has made, what comes in on the one that
// the peer has made: where data goes one way only, no acknowledgement waits behind data, and the sender's estimate of the
// network is of the network.
struct conn {
    struct tcp_lane *lane;
    int peer;
    bool gone; // both are, for good
    // out
    struct nb_watch out_watch;
    enum state state;
    struct nb_sockaddr to;
    struct greeting greeting;
    struct nb_request *request;
    struct header out_header;
    struct pieces out;
    struct message *messages;
    unsigned message_head;
    unsigned message_count;
    bool out_is_message;
    bool refused; // post said -EAGAIN: writable() is owed
    bool mute;    // nothing can be sent any more; what the peer sent before is still read
    int failure;  // why, where it is a failure: the flow is lost once that has been read
    bool writing; // the loop has called for more
    size_t ahead; // bytes written since the loop last told of this peer
    // in
    struct nb_watch in_watch; // fd -1: the peer has not connected yet
    struct header in_header;
    size_t header_got;
    bool in_payload;
    bool held; // place said -EAGAIN
    struct nb_frame frame;
    struct pieces in;
    size_t in_left;
    unsigned char in_message[NB_LANE_MESSAGE_MAX];
    struct nb_lane_stats stats;
};

struct tcp_lane {
    struct nb_lane base;
    struct nb_lane_config config;      // its provider and library are NULL: they are not kept
    char congestion[CONGESTION_BYTES]; // what config.congestion points to
    struct nb_watch listener;
    struct nb_gate gate; // of the listener
    struct nb_sockaddr addr;
    struct nb_list strangers; // of this listener, that have not authenticated
    struct conn *conns;       // by rank
};

// Opens the listener, and accepts connections from the loop; ends that, and what has not authenticated.
int nb_tcp_listen(struct tcp_lane *lane, struct nb_error *err);
void nb_tcp_listen_close(struct tcp_lane *lane);
// Options of a connection of this lane.
void nb_tcp_tune(struct tcp_lane *lane, int fd);

// tcp_handshake.c. Each returns 1 when its step is done, 0: more is to come, or a failure (NB_EAUTH: not a rank of this job).
// The side that connects to rank `peer`, whose listener is at `to`.
int nb_tcp_greet(const struct tcp_lane *lane, int fd, struct greeting *greeting);
int nb_tcp_greeted(const struct tcp_lane *lane, int fd, struct greeting *greeting, int peer,
                   const struct nb_sockaddr *to);
// The side that accepted: reads the hello and answers it; reads the proof.
int nb_tcp_welcome(const struct tcp_lane *lane, int fd, struct greeting *greeting);
int nb_tcp_welcomed(int fd, struct greeting *greeting);
void nb_tcp_macs(const struct nb_boot *boot, const struct greeting *greeting, int to,
                 const struct nb_sockaddr *listener, struct nb_tcp_macs *macs);

// Whether a segment or a message is on its way out.
bool nb_tcp_pending(const struct conn *conn);
// Bytes of segments that were sent, and which the kernel still has: not sent, or not acknowledged.
size_t nb_tcp_held(const struct conn *conn);
// Ask the loop for what the connections wait for now.
void nb_tcp_want_out(struct conn *conn);
void nb_tcp_want_in(struct conn *conn);
// Takes a descriptor away.
void nb_tcp_shut(struct tcp_lane *lane, struct nb_watch *watch);
// Ends both connections, and forgets what was half read and half written.
void nb_tcp_reset(struct conn *conn);
// The flow is gone: who waits for it is told once.
void nb_tcp_lost(struct conn *conn, int code, const char *what);
void nb_tcp_read(struct conn *conn);
// The connection that goes out has ended: closed by the peer (0), which may have sent more before, or failed.
void nb_tcp_muted(struct conn *conn, int code);
// Writes until the kernel has enough, pulling the next segment each time one is out.
void nb_tcp_write(struct conn *conn);
// After a segment was put on its way: as much of it as the kernel takes now, so that it need not wait for the loop. `sent`
// may be called for it. Bounded: what comes in must be read as well.
void nb_tcp_write_ahead(struct conn *conn);
// Puts a segment, or the next message, on its way; nothing else may be.
void nb_tcp_segment(struct conn *conn, struct nb_request *request);
void nb_tcp_next_message(struct conn *conn);
// The next message, as much of it as the kernel takes now; no callback is made.
void nb_tcp_message_now(struct conn *conn);

#endif
