// Inside of a link: what link.c, handshake.c and output.c share (see net.h).
#ifndef NB_NCCL_LINK_H
#define NB_NCCL_LINK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/list.h"
#include "base/loop.h"
#include "base/sha256.h"
#include "nccl/net.h"

enum {
    NB_LINK_IN_ROOM = 128 * 1024,
    NB_LINK_BACK_LEAST_NS = 1000 * 1000 // see nb_link.back_ns
};

// Wire format. All fields are little-endian, as they lie in memory.

// Hello and answer keep their sizes and the fields up to the nonce in all versions, so that a difference can be named.

struct wire_hello {
    uint32_t magic;
    uint32_t version; // of the wire format
    uint32_t reserved;
    uint32_t process_number;
    unsigned char process[NB_NET_ID_BYTES];
    unsigned char nonce[NB_NET_ID_BYTES];
    uint64_t listener;
    char tag[NB_NET_TAG];
};

struct wire_answer {
    int32_t code; // 0, or NB_EMISMATCH
    uint32_t version;
    unsigned char nonce[NB_NET_ID_BYTES];
    char tag[NB_NET_TAG];
    unsigned char mac[NB_SHA256_BYTES];
};

// Proof: a MAC. Join and welcome: a MAC, then this and the lanes' addresses, which it covers.
struct wire_opened {
    int32_t code; // 0, or why this side's lanes do not open: then there are no addresses
    uint32_t reserved;
    char text[NB_ERROR_TEXT];
};

enum nb_link_message {
    NB_CTL_OPEN = 1,
    NB_CTL_CLOSE,
    NB_CTL_GRANT,
    NB_CTL_SEND,
    NB_CTL_PING,
    NB_CTL_LEAVE,
    NB_CTL_WANT
};

struct wire_ctl {
    uint32_t type; // enum nb_link_message
    uint32_t comm;
    uint64_t op;    // send: the flow's number, 0: the payload follows. open: the listening comm
    uint64_t bytes; // send: the size. grant: the capacity
};

_Static_assert(sizeof(struct wire_hello) == 152 && sizeof(struct wire_answer) == 152, "crosses the wire");
_Static_assert(sizeof(struct wire_opened) == 488 && sizeof(struct wire_ctl) == 24, "crosses the wire");

struct nb_link_shake {
    struct wire_hello hello;
    struct wire_answer answer;
    struct nb_error refusal; // incoming: why the lanes do not open, for the welcome
};

// The peer's rank in the lanes.
static inline int nb_link_other_rank(const struct nb_link *link) {
    return link->outgoing ? 1 : 0;
}

static inline bool nb_link_lanes_idle(const struct nb_link *link) {
    return link->flows == 0 && nb_list_empty(&link->sinks);
}

// output.c

// Sends a message, after all that waits in the output. What the connection does not take stays there.
void nb_link_put(struct nb_link *link, const void *head, size_t head_bytes, const void *data, size_t bytes);
void nb_link_put_ctl(struct nb_link *link, struct wire_ctl ctl, const void *data, size_t bytes);
// Sends what is in the output, until the connection takes no more.
void nb_link_flush(struct nb_link *link);
// Bytes of what was put that the peer's kernel has not confirmed.
size_t nb_link_unsent(const struct nb_link *link);
// Looks how quickly lone sends drain; returns their bytes that have not. Slow ones keep the next ones off the control
// connection, for longer each time: a flow is capped, or the peer is far.
size_t nb_link_lone_look(struct nb_link *link, int64_t now);
// The control connection has ended (0) or failed: the link fails, connects again, or awaits the flows on its lanes.
void nb_link_control_ended(struct nb_link *link, int code);
// Outgoing: drops the control connection, to connect again. code: why; 0: the peer has ended it.
void nb_link_connect_later(struct nb_link *link, int code);
// Closes a descriptor of the net's loop, unless it is -1.
void nb_link_shut(struct nb_net *net, struct nb_watch *watch);
// Closes the lanes, if they are open.
void nb_link_close_lanes(struct nb_link *link);

// handshake.c

// Outgoing: takes the peer's address, its identity and the key from a handle. On failure nothing changes.
int nb_link_shake_aim(struct nb_link *link, const struct nb_net_handle *handle, struct nb_error *err);
// Outgoing: begins the handshake on a new control connection.
int nb_link_shake_hello(struct nb_link *link);
// Opens this side's lanes, once the state is NB_LINK_OPENING. May release the lock meanwhile: if the link fails or loses
// its control connection then, the lanes are closed. Returns 0 or a failure that ends the link.
int nb_link_shake_open(struct nb_link *link, struct nb_error *err);
// Handles one message of the handshake: its bytes, 0 if it is not complete, or a failure that ends the link. If the
// control connection is gone then, the state is NB_LINK_CONNECT.
int nb_link_shake_step(struct nb_link *link, const char *data, size_t bytes, struct nb_error *err);

#endif
