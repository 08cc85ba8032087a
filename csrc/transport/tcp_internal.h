// What tcp.c (lanes, greetings) and tcp_stream.c (bytes of one connection) share. Nobody else includes this.
#ifndef NB_TRANSPORT_TCP_INTERNAL_H
#define NB_TRANSPORT_TCP_INTERNAL_H

#include "base/list.h"
#include "bootstrap/bootstrap.h"
#include "transport/tcp.h"

enum { MESSAGES = 64 }; // queued to one peer

struct hello {
    uint32_t magic;
    uint32_t rank;
    uint32_t lane;
    uint32_t zero;
    unsigned char token[NB_TOKEN_BYTES];
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
_Static_assert(sizeof(struct header) == 24, "crosses the wire");

struct message {
    size_t bytes;
    unsigned char data[NB_LANE_MESSAGE_MAX];
};

enum state { NONE, CONNECTING, GREETING, OPEN, STRANGER };

// A cursor over scattered memory.
struct pieces {
    struct iovec iov[NB_LANE_IOV_MAX + 1];
    int count;
    int at;
};

struct conn {
    struct nb_watch watch;
    struct tcp_lane *lane;
    struct nb_list link; // among the lane's strangers
    enum state state;
    int peer;
    struct nb_sockaddr to;
    int64_t retry_until_ns;
    struct hello hello; // being read
    size_t hello_got;
    // out
    struct nb_request *request;
    struct header out_header;
    struct pieces out;
    struct message *messages;
    unsigned message_head;
    unsigned message_count;
    bool out_is_message;
    bool refused; // post said -EAGAIN: writable() is owed
    bool mute;    // sending failed
    bool writing; // the loop has called for more
    size_t ahead; // bytes written since the loop last told of this connection
    // in
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
    struct nb_lane_config config;
    struct nb_watch listener;
    struct nb_sockaddr addr;
    struct nb_list strangers;
    int stranger_count;
    struct conn *conns; // by rank
};

// Whether a segment or a message is on its way out.
bool nb_tcp_pending(const struct conn *conn);
// Asks the loop for what the connection waits for now.
void nb_tcp_want(struct conn *conn);
// Takes the descriptor away.
void nb_tcp_shut(struct conn *conn);
// As shut, and forgets what was half read and half written.
void nb_tcp_reset(struct conn *conn);
// The flow is gone: who waits for it is told once.
void nb_tcp_lost(struct conn *conn, int code, const char *what);
void nb_tcp_read(struct conn *conn);
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
