// Wire format: layouts, magic numbers, versions and types of all messages between ranks. The files named below write
// and read them. All fields are little-endian and are sent as they lie in memory. The assertions fix the layouts: a
// change to one needs another version or magic number.
#ifndef NB_WIRE_H
#define NB_WIRE_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/fdpass.h"
#include "base/sha256.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the messages are sent as they lie in memory");

enum { NB_TOKEN_BYTES = 16 }; // of a token that one rank shows another, see nb_boot_token()

// bootstrap/handshake.c: a rank joins at rank 0.
//
// hello ->, <- challenge, proof ->, <- answer; after all ranks have joined, or one cannot: <- verdict.
// Each proof is an HMAC, keyed by the secret, over a label, the hello, the challenge, and the rest of the message. So
// no message can be replayed, reflected or altered.

enum { NB_WIRE_JOIN_VERSION = 2, NB_WIRE_JOIN_MAGIC_BYTES = 8, NB_WIRE_JOIN_TAG_MAX = 256 };
#define NB_WIRE_JOIN_MAGIC "NBBOOT\r\n"

struct wire_join_hello {
    char magic[NB_WIRE_JOIN_MAGIC_BYTES];
    uint32_t version; // the first 12 bytes are the same in every version
    uint32_t rank;
    uint32_t size;
    uint32_t tag_bytes;
    unsigned char nonce[NB_SHA256_BYTES];
    char tag[NB_WIRE_JOIN_TAG_MAX]; // not terminated; zero after tag_bytes
};

struct wire_join_challenge {
    char magic[NB_WIRE_JOIN_MAGIC_BYTES];
    uint32_t version;
    uint32_t zero;
    unsigned char nonce[NB_SHA256_BYTES];
};

struct wire_join_proof {
    unsigned char mac[NB_SHA256_BYTES];
};

struct wire_join_answer {
    uint32_t left_ms; // the latest time until rank 0 gives its verdict
    uint32_t zero;
    unsigned char mac[NB_SHA256_BYTES]; // all zero: the proof was wrong
};

struct wire_join_verdict {
    int32_t code; // 0: all ranks have joined
    int32_t peer;
    unsigned char salt[NB_SHA256_BYTES]; // the session key is derived from it; zero if code is not 0
    char text[NB_ERROR_TEXT];
    unsigned char mac[NB_SHA256_BYTES];
};

_Static_assert(sizeof(struct wire_join_hello) == 312, "crosses the wire");
_Static_assert(sizeof(struct wire_join_challenge) == 48, "crosses the wire");
_Static_assert(sizeof(struct wire_join_proof) == 32, "crosses the wire");
_Static_assert(sizeof(struct wire_join_answer) == 40, "crosses the wire");
_Static_assert(sizeof(struct wire_join_verdict) == 8 + 32 + NB_ERROR_TEXT + 32, "crosses the wire");

// bootstrap/coordinator_links.c: exchanges through rank 0 during setup. A frame precedes every payload.

enum wire_exchange_kind {
    NB_WIRE_ALLGATHER = 1,
    NB_WIRE_BARRIER,
    NB_WIRE_PING,
    NB_WIRE_PONG,
    NB_WIRE_FAILED, // struct wire_exchange_failure
    NB_WIRE_EXCHANGE_KINDS
};

struct wire_exchange {
    uint32_t kind;
    int32_t code;   // of a failure
    uint64_t value; // bytes that follow, or rank 0's clock
};

struct wire_exchange_failure {
    struct wire_exchange frame;
    int32_t peer;
    uint32_t zero;
    char text[NB_ERROR_TEXT];
};

_Static_assert(sizeof(struct wire_exchange) == 16, "crosses the wire");
_Static_assert(sizeof(struct wire_exchange_failure) == 16 + 8 + NB_ERROR_TEXT, "crosses the wire");

// transport: limits of every lane

enum {
    NB_LANE_ADDR_MAX = 192,    // of a lane's address, as bootstrap exchanges it
    NB_LANE_MESSAGE_MAX = 128, // of a message between two schedulers
    NB_SERIES = 2              // series of operations, see NB_OP_SECOND
};

// A lane's address as bootstrap exchanges it.
struct wire_lane_address {
    uint32_t bytes;
    uint32_t zero;
    unsigned char addr[NB_LANE_ADDR_MAX];
};

_Static_assert(sizeof(struct wire_lane_address) == 8 + NB_LANE_ADDR_MAX, "crosses the wire");

// Identifies a segment on the wire: `blocks` blocks of operation `op`, from `block` on.
struct nb_frame {
    uint64_t op;
    uint32_t block;
    uint16_t blocks;
    uint16_t slot; // RMA lanes: the receiver's number for (op, sender), < 64; travels in the 64 bits
    uint32_t tag;  // RMA lanes: of the credit, random, chosen by the receiver; an arrival returns it
    uint32_t bytes;
};

// The 64 bits of an RMA arrival: tag 32, slot 6, block 18, blocks - 1 8.
static inline uint64_t nb_frame_pack(const struct nb_frame *frame) {
    return (uint64_t)frame->tag << 32 | (uint64_t)(frame->slot & 63) << 26 | (uint64_t)(frame->block & 0x3ffff) << 8 |
           (uint64_t)((frame->blocks - 1) & 0xff);
}

static inline void nb_frame_unpack(uint64_t bits, struct nb_frame *frame) {
    frame->tag = (uint32_t)(bits >> 32);
    frame->slot = (uint16_t)(bits >> 26 & 63);
    frame->block = (uint32_t)(bits >> 8 & 0x3ffff);
    frame->blocks = (uint16_t)((bits & 0xff) + 1);
}

enum { NB_FRAME_BLOCKS_MAX = 256 }; // the limit of 8 bits

// transport/tcp*: a connection of a TCP lane.
//
// hello ->, <- answer, proof ->; segments may follow the proof at once. Both MACs cover the transcript, so no message
// can be replayed, reflected or used for another lane.

enum { NB_WIRE_TCP_MAGIC = 0x4e424c42, NB_WIRE_TCP_NONCE_BYTES = 16, NB_WIRE_TCP_MAC_BYTES = 16 };

struct wire_tcp_hello {
    uint32_t magic;
    uint32_t rank;
    uint32_t lane;
    uint32_t zero;
    unsigned char nonce[NB_WIRE_TCP_NONCE_BYTES];
};

struct wire_tcp_answer {
    unsigned char nonce[NB_WIRE_TCP_NONCE_BYTES];
    unsigned char mac[NB_WIRE_TCP_MAC_BYTES];
};

struct wire_tcp_proof {
    unsigned char mac[NB_WIRE_TCP_MAC_BYTES];
};

// The data that the MACs cover.
struct wire_tcp_transcript {
    struct wire_tcp_hello hello; // the connecting side: its rank, the lane, its nonce
    uint32_t to;                 // the listening rank
    uint32_t port;
    unsigned char addr[16];
    unsigned char nonce[NB_WIRE_TCP_NONCE_BYTES]; // of the listening side
};

enum wire_tcp_type { NB_WIRE_TCP_SEGMENT = 1, NB_WIRE_TCP_MESSAGE = 2 };

struct wire_tcp_header {
    uint32_t type; // enum wire_tcp_type
    uint32_t bytes;
    uint64_t op;
    uint32_t block;
    uint16_t blocks;
    uint16_t zero;
};

_Static_assert(sizeof(struct wire_tcp_hello) == 32, "crosses the wire");
_Static_assert(sizeof(struct wire_tcp_answer) == 32, "crosses the wire");
_Static_assert(sizeof(struct wire_tcp_proof) == 16, "crosses the wire");
_Static_assert(sizeof(struct wire_tcp_transcript) == 72, "no padding is hashed");
_Static_assert(sizeof(struct wire_tcp_header) == 24, "crosses the wire");

// transport/ofi*: a libfabric lane.

enum {
    NB_WIRE_OFI_MAGIC = 0x31626f6e,
    NB_WIRE_OFI_LANE_BYTES = 80,
    NB_WIRE_OFI_NAME_BYTES = 104,
    NB_WIRE_OFI_MAC_BYTES = 16 // of HMAC-SHA256, truncated
};

// A lane's address, as a peer receives it.
struct wire_ofi_address {
    uint32_t magic;
    uint32_t bytes; // of name
    char lane[NB_WIRE_OFI_LANE_BYTES];
    unsigned char name[NB_WIRE_OFI_NAME_BYTES];
};

// A message on the wire. The part under the MAC fits one block of SHA-256 if the message carries a single credit.
struct wire_ofi_message {
    unsigned char mac[NB_WIRE_OFI_MAC_BYTES]; // of what follows, by this lane's key from the sender to this rank
    // Numbers the messages of its sender to this rank on this lane. A gap means a lost connection; a repeated number
    // means a replay.
    uint64_t number;
    uint32_t rank; // of the sender
    uint8_t bytes;
    uint8_t kind; // enum wire_ofi_kind
    unsigned char data[NB_LANE_MESSAGE_MAX];
};

enum wire_ofi_kind { NB_WIRE_OFI_OF_LANES, NB_WIRE_OFI_OF_ARRIVALS };

enum {
    NB_WIRE_OFI_HEADER = offsetof(struct wire_ofi_message, data),
    NB_WIRE_OFI_PROVEN = offsetof(struct wire_ofi_message, number) // the MAC covers the bytes from here on
};

// Describes one write, where completion data are too short to prove it.
struct wire_ofi_arrival {
    uint64_t frame; // packed by nb_frame_pack
    uint32_t bytes;
    uint32_t zero;
};

enum { NB_WIRE_OFI_ARRIVALS = NB_LANE_MESSAGE_MAX / sizeof(struct wire_ofi_arrival) };

_Static_assert(NB_LANE_MESSAGE_MAX <= UINT8_MAX, "its length is a byte");
_Static_assert(sizeof(struct wire_ofi_address) <= NB_LANE_ADDR_MAX, "an address fits what bootstrap carries");
_Static_assert(sizeof(struct wire_ofi_address) == 192 && NB_WIRE_OFI_HEADER == 30 && NB_WIRE_OFI_PROVEN == 16,
               "crosses the wire");
_Static_assert(sizeof(struct wire_ofi_arrival) == 16, "crosses the wire");

// transport/credits.c, retransmit.c, failover.c: messages between two schedulers. The first byte is the type.

enum nb_lane_message {
    NB_MESSAGE_REGION = 1,   // struct wire_region
    NB_MESSAGE_CREDITS,      // struct wire_credits
    NB_MESSAGE_DONE,         // struct wire_done: these operations have arrived completely
    NB_MESSAGE_DONE_REQUEST, // requests a NB_MESSAGE_DONE at once
    NB_MESSAGE_LOST,         // struct wire_lost: these lanes are lost here; begins a report of missing segments
    NB_MESSAGE_MISSING,      // struct wire_missing: missing runs of one operation
    NB_MESSAGE_LOST_END,     // struct wire_lost: ends the report
    NB_MESSAGE_PING,         // asks for a NB_MESSAGE_PONG on this lane
    NB_MESSAGE_PONG,         // struct wire_lane_pong
    NB_MESSAGE_LEAVE,        // this rank leaves, and needs nothing more
    NB_MESSAGE_STARTED       // struct wire_started
};

// A message without a body.
struct wire_empty {
    uint8_t type;
    uint8_t zero[7];
};

// Answers a ping.
struct wire_lane_pong {
    uint8_t type;
    uint8_t zero[3];
    uint32_t writes; // complete at the sender of this message, on this lane to this peer; modulo 2^32
};

// The highest operations, by series, for which the sender of this message expects data.
struct wire_started {
    uint8_t type;
    uint8_t zero[7];
    uint64_t ops[NB_SERIES];
};

// Lets a lane write to a region.
struct wire_region {
    uint8_t type;
    uint8_t region;
    uint16_t lane;
    uint32_t life;
    uint64_t key;
    uint64_t addr;
};

struct wire_credit {
    uint64_t op;
    uint64_t offset;
    uint32_t first;
    uint32_t count;
    uint16_t slot;
    uint16_t region;
    uint32_t tag; // never 0; an arrival that does not return it is dropped
};

enum { NB_WIRE_CREDITS = 3, NB_WIRE_DONES = 14, NB_WIRE_RUNS = 13 }; // in one message

struct wire_credits {
    uint8_t type;
    uint8_t count;
    uint16_t zero[3];
    struct wire_credit credits[NB_WIRE_CREDITS];
};

// Bytes of a message with `count` credits.
#define NB_WIRE_CREDITS_BYTES(count) (offsetof(struct wire_credits, credits) + (count) * sizeof(struct wire_credit))

struct wire_done {
    uint8_t type;
    uint8_t count;
    uint8_t zero[6];
    uint64_t ops[NB_WIRE_DONES];
};

// Begins and ends a report of missing segments.
struct wire_lost {
    uint8_t type;
    uint8_t zero[7];
    uint64_t lanes;
    uint64_t floor[NB_SERIES]; // highest operation that is known here: all of a later one is missing
};

struct wire_missing {
    uint8_t type;
    uint8_t count;
    uint8_t zero[6];
    uint64_t op;
    struct {
        uint32_t first;
        uint32_t count;
    } runs[NB_WIRE_RUNS];
};

_Static_assert(sizeof(struct wire_empty) == 8, "crosses the wire");
_Static_assert(sizeof(struct wire_lane_pong) == 8, "crosses the wire");
_Static_assert(sizeof(struct wire_region) == 24, "crosses the wire");
_Static_assert(sizeof(struct wire_credits) == 104 && sizeof(struct wire_credits) <= NB_LANE_MESSAGE_MAX, "fits");
_Static_assert(sizeof(struct wire_done) == 120 && sizeof(struct wire_done) <= NB_LANE_MESSAGE_MAX, "fits");
_Static_assert(sizeof(struct wire_lost) == 32, "crosses the wire");
_Static_assert(sizeof(struct wire_missing) == 120 && sizeof(struct wire_missing) <= NB_LANE_MESSAGE_MAX, "fits");

// transport/shm*: messages between ranks of one host, with descriptors.

enum { NB_WIRE_SHM_HELLO_MAGIC = 0x4e425348, NB_WIRE_SHM_ARENA_MAGIC = 0x4e425347 };

struct wire_shm_hello { // carries the descriptors of the shared area and of the rank's wake-up event
    uint32_t magic;
    int32_t rank; // within the group
    uint64_t area_bytes;
    unsigned char token[NB_TOKEN_BYTES];
};

struct wire_shm_arena { // carries the descriptor of an arena
    uint32_t magic;
    uint32_t arena;
    uint64_t bytes;
    uint32_t life;
    uint32_t zero;
};

_Static_assert(sizeof(struct wire_shm_hello) == 32, "passed to ranks of this host");
_Static_assert(sizeof(struct wire_shm_arena) == 24, "passed to ranks of this host");

// engine: limits of operations and probes

enum {
    NB_NAME_MAX = 96,    // of an operation, with its final zero
    NB_PROBE_MAX = 8,    // points of a probe
    NB_MISSING_MAX = 16, // missing ranks that a stall names
    NB_HOST_BYTES = 16
};

struct nb_probe_point {
    int lanes;
    uint64_t bytes; // moved per rank, one way
    int64_t ns;
};

// engine/preflight.c, engine/shared_open.c: all-gathered while a job opens.

enum { INTERFACES_TEXT = 64, WHY_BYTES = 160 };

// A rank's state when it joins a job.
struct preflight_report {
    int32_t code; // why this rank's lanes are not open, or 0
    int32_t interfaces;
    int32_t cpus; // how many CPUs are named for communication threads
    char names[INTERFACES_TEXT];
    unsigned char host[NB_HOST_BYTES];
};

// A rank's state before and after memory of its host is shared.
struct shm_offer {
    unsigned char host[NB_HOST_BYTES];
    char name[NB_FDPASS_NAME];
    int32_t mode; // enum nb_shm_mode
    int32_t code; // why it cannot share, or 0
    char why[WHY_BYTES];
};

struct shm_outcome {
    int32_t code;
    char why[WHY_BYTES];
};

_Static_assert(sizeof(struct preflight_report) == 12 + INTERFACES_TEXT + NB_HOST_BYTES, "crosses the wire");
_Static_assert(sizeof(struct shm_offer) == NB_HOST_BYTES + NB_FDPASS_NAME + 8 + WHY_BYTES, "crosses the wire");
_Static_assert(sizeof(struct shm_outcome) == 4 + WHY_BYTES, "crosses the wire");

// engine: control messages, a header and its body, on the connection that bootstrap made.

struct wire_control {
    uint32_t bytes; // of the body
    uint32_t type;  // enum control_type
};

enum control_type {
    CTL_SUBMIT = 1,    // to rank 0: struct op_descriptor each
    CTL_MASK,          // to rank 0: uint64_t words: one bit for each cached operation that was submitted
    CTL_GO,            // from rank 0: struct wire_go each
    CTL_REFUSE,        // from rank 0: struct wire_refuse
    CTL_PING,          // to rank 0: int64_t
    CTL_PONG,          // from rank 0: struct wire_pong
    CTL_FAIL,          // to rank 0: struct wire_failure
    CTL_ABORT,         // from rank 0: struct wire_failure
    CTL_BYE,           // both ways
    CTL_LEFT,          // from rank 0: int32_t rank
    CTL_PROBE,         // from rank 0: struct wire_probe
    CTL_STREAMS,       // from rank 0: struct wire_streams
    CTL_STALL,         // from rank 0: struct wire_stall, and its text
    CTL_COSTS,         // from rank 0: struct nb_costs
    CTL_STAND_IN,      // from rank 0: struct op_descriptor of the next operation, for a rank that has joined
    CTL_GROUP,         // to rank 0: int32_t each: the number of a comm, and its ranks
    CTL_INLINE,        // to rank 0: struct wire_inline and this rank's buffer
    CTL_INLINE_RESULT, // from rank 0: struct wire_go and the result
    CTL_DEVICE         // from rank 0: the first operation on device memory follows
};

// The properties of an operation; all ranks must submit the same ones under one key.
struct op_descriptor {
    uint64_t key;
    uint64_t bytes;
    uint64_t shape;
    double prescale;
    double postscale;
    uint8_t kind;
    uint8_t dtype;
    uint8_t redop;
    uint8_t device;
    int32_t root;
    int32_t priority;
    uint32_t comm;
    int32_t limit_ms; // of the first rank that submitted it
    uint32_t zero;
    char name[NB_NAME_MAX];
};

struct wire_go {
    uint64_t seq;
    uint64_t key;
    uint32_t id;        // names the key in a mask from now on, or NO_ID
    uint32_t algorithm; // enum nb_algorithm_id
    uint32_t detail;    // of a join: the last rank to join
    uint32_t zero;
};

struct wire_inline { // submits a cached operation
    uint32_t id;
    uint32_t zero;
};

struct wire_stall {
    uint64_t key;
    int32_t count; // of the missing ranks
    int32_t ranks[NB_MISSING_MAX];
};

struct wire_refuse {
    uint64_t key;
    int32_t code;
    int32_t peer;
    char text[NB_ERROR_TEXT];
};

struct wire_failure {
    int32_t code;
    int32_t peer;
    char text[NB_ERROR_TEXT];
};

struct wire_pong {
    int64_t sent_ns;
    int64_t here_ns;
};

struct wire_probe {
    uint64_t seq;
    uint32_t lanes;
    uint32_t slot;
    uint64_t bytes;
    uint32_t algorithm;
    uint32_t zero;
};

struct wire_streams {
    uint32_t used;
    uint32_t count;
    struct nb_probe_point points[NB_PROBE_MAX];
};

_Static_assert(sizeof(struct wire_control) == 8, "crosses the wire");
_Static_assert(sizeof(struct op_descriptor) == 64 + NB_NAME_MAX, "crosses the wire");
_Static_assert(sizeof(struct wire_started) == 24, "crosses the wire");
_Static_assert(sizeof(struct wire_go) == 32, "crosses the wire");
_Static_assert(sizeof(struct wire_inline) == 8, "crosses the wire");
_Static_assert(sizeof(struct wire_stall) == 16 + NB_MISSING_MAX * sizeof(int32_t), "crosses the wire");
_Static_assert(sizeof(struct wire_refuse) == 16 + NB_ERROR_TEXT, "crosses the wire");
_Static_assert(sizeof(struct wire_failure) == 8 + NB_ERROR_TEXT, "crosses the wire");
_Static_assert(sizeof(struct wire_pong) == 16, "crosses the wire");
_Static_assert(sizeof(struct wire_probe) == 32, "crosses the wire");
_Static_assert(sizeof(struct wire_streams) == 8 + NB_PROBE_MAX * 24, "crosses the wire");

#endif
