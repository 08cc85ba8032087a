// TCP internals: the state shared by tcp.c (lanes), tcp_accept.c (listeners), tcp_handshake.c and tcp_stream.c (bytes
// of one connection). No other file includes this header.
#ifndef NB_TRANSPORT_TCP_INTERNAL_H
#define NB_TRANSPORT_TCP_INTERNAL_H

#include "base/admission.h"
#include "base/sha256.h"
#include "base/wire.h"
#include "bootstrap/bootstrap.h"
#include "transport/tcp.h"

enum { MESSAGES = 64, CONGESTION_BYTES = 16 }; // queued to one peer; TCP_CA_NAME_MAX of the kernel

struct message {
    size_t bytes;
    unsigned char data[NB_LANE_MESSAGE_MAX];
};

enum state { NONE, CONNECTING, HANDSHAKE, OPEN };

// A cursor over scattered memory.
struct pieces {
    struct iovec iov[NB_LANE_IOV_MAX + 1];
    int count;
    int at;
};

// The two halves of one HMAC: the proof of the accepting side, and that of the connecting side.
struct nb_tcp_macs {
    unsigned char answer[NB_WIRE_TCP_MAC_BYTES];
    unsigned char proof[NB_WIRE_TCP_MAC_BYTES];
};

_Static_assert(sizeof(struct nb_tcp_macs) == NB_SHA256_BYTES, "halves");

// The handshake of one connection, as one side knows it.
struct tcp_handshake {
    struct wire_tcp_hello hello;
    struct wire_tcp_answer answer;
    struct wire_tcp_proof proof;
    struct nb_tcp_macs macs; // the accepting side computes them with its answer
    size_t got;              // bytes of the awaited message
};

// The two connections with a peer. Data go out on the connection that this rank opened, and come in on the one that the
// peer opened. So acknowledgements never wait behind data when data go one way only, and the sender's estimate measures
// the network alone.
struct conn {
    struct tcp_lane *lane;
    int peer;
    bool gone; // both are closed for good
    // out
    struct nb_watch out_watch;
    enum state state;
    struct nb_sockaddr to;
    struct tcp_handshake handshake;
    int retries; // of connecting, after the peer dropped a connection before it was open
    struct nb_request *request;
    struct wire_tcp_header out_header;
    struct pieces out;
    struct message *messages;
    unsigned message_head;
    unsigned message_count;
    bool out_is_message;
    bool refused;            // post returned -EAGAIN: writable() is due
    bool out_ended;          // nothing can be sent any more; data that the peer sent before are still read
    int failure;             // the failure behind `out_ended`, or 0: the flow is lost once those data are read
    bool writing;            // inside a write that the loop requested
    size_t ahead;            // bytes written since the loop last reported this peer
    struct nb_held measured; // its bytes are of no use
    int64_t measured_ns;     // 0: not measured
    // in
    struct nb_watch in_watch; // fd -1: the peer has not connected yet
    struct wire_tcp_header in_header;
    size_t header_got;
    bool in_payload;
    bool held; // place returned -EAGAIN
    struct nb_frame frame;
    struct pieces in;
    size_t in_left;
    unsigned char in_message[NB_LANE_MESSAGE_MAX];
    struct nb_lane_stats stats;
};

struct tcp_lane {
    struct nb_lane base;
    struct nb_lane_config config;      // its provider and library are NULL: they are not kept
    char congestion[CONGESTION_BYTES]; // the string behind config.congestion
    struct nb_watch listener;
    struct nb_gate gate; // of the listener
    struct nb_sockaddr addr;
    struct nb_list incoming; // connections of this listener that have not authenticated
    struct conn *conns;      // by rank
};

// Open the listener and accept connections from the loop; close it and all unauthenticated connections, if it is open.
int nb_tcp_listen(struct tcp_lane *lane, struct nb_error *err);
void nb_tcp_listen_close(struct tcp_lane *lane);

// tcp_handshake.c. Each returns 1 if its step is done, 0 if it needs more data, or a failure (NB_EAUTH: not a rank of
// this job).
// The side that connects to rank `peer`, whose listener is at `to`.
int nb_tcp_send_hello(const struct tcp_lane *lane, int fd, struct tcp_handshake *handshake);
int nb_tcp_read_answer(const struct tcp_lane *lane, int fd, struct tcp_handshake *handshake, int peer,
                       const struct nb_sockaddr *to);
// The accepting side: reads the hello and answers it; reads the proof.
int nb_tcp_read_hello(const struct tcp_lane *lane, int fd, struct tcp_handshake *handshake);
int nb_tcp_read_proof(int fd, struct tcp_handshake *handshake);
void nb_tcp_macs(const struct nb_boot *boot, const struct tcp_handshake *handshake, int to,
                 const struct nb_sockaddr *listener, struct nb_tcp_macs *macs);

static inline struct conn *nb_tcp_conn(const struct nb_lane *base, int peer) {
    return &NB_CONTAINER(base, struct tcp_lane, base)->conns[peer];
}

// Sets the options of a connection of this lane.
void nb_tcp_tune(struct tcp_lane *lane, int fd);
// Request from the loop the events that the connections wait for.
void nb_tcp_want_out(struct conn *conn);
void nb_tcp_want_in(struct conn *conn);
// Removes and closes a descriptor.
void nb_tcp_shut(struct tcp_lane *lane, struct nb_watch *watch);
// Closes both connections, and drops partly read and partly written data.
void nb_tcp_reset(struct conn *conn);
// Ends the flow, and reports it as lost once.
void nb_tcp_lost(struct conn *conn, int code, const char *what);
void nb_tcp_read(struct conn *conn);
// Handles the end of the outgoing connection: closed by the peer (0), which may have sent more before, or failed.
void nb_tcp_out_ended(struct conn *conn, int code);
// Writes until the kernel's buffer is full, and pulls the next segment each time one is sent.
void nb_tcp_write(struct conn *conn);
// Entries of nb_lane_ops. nb_tcp_post() writes as much of a segment as the kernel accepts now, so that it need not wait
// for the loop; it may call `sent` for it. Bounded, as incoming data must be read, too.
int nb_tcp_post(struct nb_lane *base, struct nb_request *request);
int nb_tcp_message(struct nb_lane *base, int peer, const void *data, size_t bytes);
void nb_tcp_resume(struct nb_lane *base, int peer);
// Bytes of sent segments that the kernel still holds, unsent or unacknowledged.
struct nb_held nb_tcp_held(const struct nb_lane *base, int peer);
// Fills in what the kernel knows of a connection: late_bytes and round_trip_ns.
void nb_tcp_measured(int fd, struct nb_held *held);

#endif
