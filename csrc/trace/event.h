// Event: the kinds of trace events and their fields. The only definition of the numbers;
// python/netbottleneck/trace/ring_reader.py reads them.
#ifndef NB_TRACE_EVENT_H
#define NB_TRACE_EVENT_H

#include <stdbool.h>
#include <stdint.h>

// `key` and a…e depend on the kind; a field that is not named is 0. Times are nb_now_ns() of this host.
enum nb_event_kind {
    NB_EV_NONE = 0,          // not written yet
    NB_EV_STEP_BEGIN = 1,    // a: block, b: transport (index into the run's list), c: 1 if modules are sampled,
                             // d: CPU time of the process so far in ns, 0 if unknown, e: of a device's time, ns from
                             // the host's time of the stamp to it (int64)
    NB_EV_STEP_END = 2,      // d, e: as above
    NB_EV_FORWARD_BEGIN = 3, // key: 0 for the whole model, else module index + 1; a: 1 without gradients (evaluation)
    NB_EV_FORWARD_END = 4,   // key: as above
    NB_EV_GRAD_READY = 5,    // key: parameter index
    NB_EV_OPTIMIZER_BEGIN = 6,
    NB_EV_OPTIMIZER_END = 7,
    NB_EV_WAIT_BEGIN = 8, // the training thread starts to wait. key: op key, or 0 for all
    NB_EV_WAIT_END = 9,   //
    // key: op key, a: round, b: tensor bytes, c: bucket + 1 (0: none), d: comm | ranks << 32 (0: all),
    // e: kind | dtype << 8 | phase << 16 | priority << 32 (phases, and kinds of the stock path from 32 on:
    // trace/ring_reader.py)
    NB_EV_OP_SUBMIT = 10,
    NB_EV_OP_AGREED = 11,     // key, a: round
    NB_EV_OP_START = 12,      // key, a: round; handed to the transport (stock: call returned), b: of a stock call, its
                              // ns on the host, 0: unknown, c: 1 + tensor bytes that a communication hook moved
                              // instead of those submitted, 0: these, 1: not seen, e: as of a step
    NB_EV_OP_FIRST_BYTE = 13, // key, a: round; first byte from a peer
    NB_EV_OP_DONE = 14,       // key, a: round, b: bytes sent, c: bytes received, d: algorithm, e: error code (0: none)
    NB_EV_OP_LANE = 15, // key, a: round, b: lane (64: shared memory, 65: control), c: bytes sent, d: bytes received
    NB_EV_CLOCK = 16,   // a: offset to rank 0's clock in ns (int64), b: round trip in ns
    NB_EV_PROBE = 17,   // a: lanes, b: bytes moved per rank, one way, c: ns
    NB_EV_STALL = 18,   // key, a: round, b: waited ns, c, d: bitmask of the missing ranks below 128, e: how many ranks
                        // are missing, 0: as many as in the bitmask
    NB_EV_PEER_LOST = 19, // a: peer, b: code
    NB_EV_LANE_LOST = 20, // a: peer, b: lane, c: code
    NB_EV_COSTS = 21,     // valid from here on, 0: not measured. In fs. a: a step, b: a byte, c: a byte added,
                          // d: two levels between hosts, e: a byte there without its time on the wire
    NB_EV_OP_NAME = 22,   // key, a: offset of the first byte, b…e: 32 bytes of the name, zero-padded. Precedes the
                          // first submit of the key on this rank
    NB_EV_OP_READY = 23,  // rank 0, in its communicators. key, a: rounds negotiated before, b: rank that has submitted
                          // it, c: comm, d: kind
    NB_EV_OP_PACK = 24,   // key, a: round (0 if c is 0), b: bytes, c: 0 pieces joined, 1 copied back, d: duration in ns
    // NCCL's events (csrc/nccl/profiler.h). A task is a collective, or a send or receive, that NCCL has enqueued.
    NB_EV_NCCL_COMM = 25, // key: NCCL's id of a communicator, a: its number in this process, b: rank | ranks << 32,
                          // c: hosts, d, e: first 16 bytes of its name
    NB_EV_NCCL_TASK = 26, // key: task, from 1 on, a: number of the communicator, b: NCCL's count x bytes of an element,
                          // c: function | type << 8 | algorithm << 16 | protocol << 24 | channels << 32 (codes:
                          // csrc/nccl/profiler.c), d: calls of this function before; of a send or receive the peer,
                          // e: caller's tag, 0: none
    // A channel of the kernel of a task; the time: its stop was seen. key: task, 0: another process's, a: channel, b: ns
    // since its start was seen, c, d: start and stop in ns of the GPU
    NB_EV_NCCL_KERNEL = 27,
    // A message of a task; the time: NCCL began to wait for it. key: task, 0: another process's, a: number | peer << 32,
    // b: channel | 1 if sent << 8 | bytes << 16, c, d, e: duration of its waits in ns. Sent: for the GPU to fill the
    // buffer, for the network to accept it, until sent. Received: until arrived, to flush, for the GPU to empty it
    NB_EV_NCCL_STEP = 28,
    NB_EV_GRADS_READY = 29, // ready times of ten parameters. key: index of the first, a…e: ns after the event's time,
                            // two numbers of 32 bits each, the first one low; 0: none
    NB_EV_CHECKPOINT_BEGIN = 30, // torch.save
    NB_EV_CHECKPOINT_END = 31,
    // The training's stamps are times of a device, on the host's clock. a: device, b: the largest error in ns until the
    // next such event, c: stamps lost so far
    NB_EV_DEVICE_CLOCK = 32,
    NB_EV_END // one above the last kind
};

// True for events that only a timeline needs: a ring without a timeline omits them.
static inline bool nb_event_for_timeline(enum nb_event_kind kind) {
    return kind == NB_EV_OP_NAME || kind == NB_EV_OP_READY || kind == NB_EV_OP_PACK;
}

// True for events that tell how long a step takes, and its waits.
static inline bool nb_event_of_step_time(enum nb_event_kind kind) {
    return kind == NB_EV_STEP_BEGIN || kind == NB_EV_STEP_END || kind == NB_EV_WAIT_BEGIN || kind == NB_EV_WAIT_END;
}

// True for rare events that count for all later steps.
static inline bool nb_event_lasts(enum nb_event_kind kind) {
    return kind == NB_EV_PROBE || kind == NB_EV_STALL || kind == NB_EV_PEER_LOST || kind == NB_EV_LANE_LOST ||
           kind == NB_EV_NCCL_COMM;
}

struct nb_event {
    int64_t time_ns;
    uint32_t kind; // written last
    uint32_t step; // the step in which it was recorded
    uint64_t key;
    uint64_t a, b, c, d, e;
};

enum { NB_GRADS_PER_EVENT = 10 }; // parameters of a GRADS_READY

_Static_assert(sizeof(struct nb_event) == 64, "an event is one cache line");

#endif
