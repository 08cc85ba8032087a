// The event: what one stamp means. One place for the numbers; python/netbottleneck/trace/recorder.py reads them.
#ifndef NB_TRACE_EVENT_H
#define NB_TRACE_EVENT_H

#include <stdbool.h>
#include <stdint.h>

// `key` and a…e by kind; a field that is not named is 0. Times are nb_now_ns() of this host.
enum nb_event_kind {
    NB_EV_NONE = 0,          // not written yet
    NB_EV_STEP_BEGIN = 1,    // a: block, b: transport (index into the run's list), c: 1 when modules are sampled,
                             // d: ns of processor time that the process has used so far, 0 where it is not told
    NB_EV_STEP_END = 2,      // d: as above
    NB_EV_FORWARD_BEGIN = 3, // key: 0 for the whole model, else module index + 1
    NB_EV_FORWARD_END = 4,   // key: as above
    NB_EV_GRAD_READY = 5,    // key: parameter index
    NB_EV_OPTIMIZER_BEGIN = 6,
    NB_EV_OPTIMIZER_END = 7,
    NB_EV_WAIT_BEGIN = 8, // the training thread starts to wait. key: op key, or 0 for all
    NB_EV_WAIT_END = 9,   //
    // key: op key, a: round, b: tensor bytes, c: bucket + 1 (0: none), d: comm, e: kind | dtype << 8 | priority << 32
    NB_EV_OP_SUBMIT = 10,
    NB_EV_OP_AGREED = 11,     // key, a: round
    NB_EV_OP_START = 12,      // key, a: round; handed to the wire (stock: call returned)
    NB_EV_OP_FIRST_BYTE = 13, // key, a: round; first byte from a peer
    NB_EV_OP_DONE = 14,       // key, a: round, b: bytes sent, c: bytes received, d: algorithm, e: error code (0: none)
    NB_EV_OP_LANE = 15,   // key, a: round, b: lane (64: shared memory, 65: control), c: bytes sent, d: bytes received
    NB_EV_CLOCK = 16,     // a: offset to rank 0's clock in ns (int64), b: round trip in ns
    NB_EV_PROBE = 17,     // a: lanes, b: bytes moved a rank, one way, c: ns
    NB_EV_STALL = 18,     // key, a: round, b: waited ns, c: bitmask of the first 64 missing ranks
    NB_EV_PEER_LOST = 19, // a: peer, b: code
    NB_EV_LANE_LOST = 20, // a: peer, b: lane, c: code
    NB_EV_COSTS =
        21, // from here on. a: fs of a step, b: fs of a byte, c: fs of a byte that is added, d: fs of two levels
            // between hosts, e: fs of a byte there beside its time on the wire; 0: there are none
    NB_EV_OP_NAME = 22,  // key, a: place of the first byte, b…e: 32 bytes of the name, zeros after its end. Before the
                         // submit of a key's round 0
    NB_EV_OP_READY = 23, // on rank 0, of comms that it is in. key, a: rounds agreed before, b: rank that has submitted
                         // it, c: comm, d: kind
    NB_EV_OP_PACK = 24,  // key, a: round (0 where c is 0), b: bytes, c: 0 pieces joined, 1 parted again, d: ns it took
    NB_EV_END            // no event: the number after the last
};

// What only a timeline needs: a ring that is for none leaves it out.
static inline bool nb_event_for_timeline(enum nb_event_kind kind) {
    return kind == NB_EV_OP_NAME || kind == NB_EV_OP_READY || kind == NB_EV_OP_PACK;
}

struct nb_event {
    int64_t time_ns;
    uint32_t kind; // written last
    uint32_t step; // the step in which it was stamped
    uint64_t key;
    uint64_t a, b, c, d, e;
};

_Static_assert(sizeof(struct nb_event) == 64, "an event is one cache line");

#endif
