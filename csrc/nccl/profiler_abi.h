// NCCL profiler plugin ABI: the tables that NCCL looks up by name, versions 4 to 7 (NCCL 2.27 to 2.31), in our own words.
// NCCL tries the newest version that it knows first. A later version appends fields to an event's description and moves
// none, so a description may be read, and passed on, as that of an earlier version. Sizes and offsets are those of the
// versions' public headers.
#ifndef NB_NCCL_PROFILER_ABI_H
#define NB_NCCL_PROFILER_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "nccl/abi.h"

enum { NCCL_PROFILER_OLDEST = 4, NCCL_PROFILER_NEWEST = 7 };

// Types of events, which are also the bits of the mask of events that NCCL reports.
enum nccl_profile_type {
    NCCL_PROFILE_GROUP = 1 << 0,
    NCCL_PROFILE_COLL = 1 << 1,
    NCCL_PROFILE_P2P = 1 << 2,
    NCCL_PROFILE_PROXY_OP = 1 << 3,   // one channel and direction of a collective, as NCCL's proxy thread moves it
    NCCL_PROFILE_PROXY_STEP = 1 << 4, // one message of it
    NCCL_PROFILE_PROXY_CTRL = 1 << 5,
    NCCL_PROFILE_KERNEL_CH = 1 << 6, // one channel of the kernel
    NCCL_PROFILE_NET_PLUGIN = 1 << 7,
    NCCL_PROFILE_GROUP_API = 1 << 8, // from version 5 on
    NCCL_PROFILE_COLL_API = 1 << 9,
    NCCL_PROFILE_P2P_API = 1 << 10,
    NCCL_PROFILE_KERNEL_LAUNCH = 1 << 11,
    NCCL_PROFILE_CE_COLL = 1 << 12, // from version 6 on: collectives by copy engines
    NCCL_PROFILE_CE_SYNC = 1 << 13,
    NCCL_PROFILE_CE_BATCH = 1 << 14,
    NCCL_PROFILE_KERNEL_PHASE = 1 << 15 // from version 7 on
};

// States that an event enters.
enum nccl_profile_state {
    NCCL_STATE_SEND_GPU_WAIT = 8,    // the buffer is the GPU's to fill
    NCCL_STATE_SEND_WAIT = 9,        // the network has accepted the message
    NCCL_STATE_RECV_WAIT = 10,       // the network has accepted the receive
    NCCL_STATE_RECV_FLUSH_WAIT = 11, // the message has arrived
    NCCL_STATE_RECV_GPU_WAIT = 12,   // the GPU may read it
    NCCL_STATE_SEND_PEER_WAIT = 20,  // the GPU has filled the buffer; entered again at each attempt to send
    NCCL_STATE_KERNEL_STOP = 22,     // the last of version 4
    NCCL_STATE_GROUP_API_END = 24,   // the last of version 5
    NCCL_STATE_CE_BATCH_END = 30     // the last of version 6
};

struct nccl_coll_v4 {
    uint64_t sequence; // counts the calls of this function on this communicator
    const char *function;
    const void *send;
    void *recv;
    size_t count;
    int root;
    const char *type;
    uint8_t channels;
    uint8_t warps;
    const char *algorithm;
    const char *protocol;
};

struct nccl_coll_v5 {
    struct nccl_coll_v4 v4;
    void *group; // what version 4 has as parent
};

struct nccl_coll_v7 {
    struct nccl_coll_v5 v5;
    const char *kernel;
    bool symmetric;
    uint64_t tag; // the caller's own, 0: none
};

struct nccl_p2p_v4 {
    const char *function;
    void *data;
    const char *type;
    size_t count;
    int peer;
    uint8_t channels;
};

struct nccl_p2p_v5 {
    const char *function;
    void *data;
    const char *type;
    size_t count;
    int peer;
    uint8_t channels;
    void *group;
};

struct nccl_p2p_v7 {
    struct nccl_p2p_v5 v5;
    uint64_t tag;
};

struct nccl_proxy_op {
    pid_t pid; // of the process that called the collective; of another one, the parent is no address of this process
    uint8_t channel;
    int peer;
    int steps;
    int step_bytes;
    int sends;
};

struct nccl_proxy_step {
    int number;
};

struct nccl_kernel_ch {
    uint8_t channel;
    uint64_t timer; // start, in ns of the GPU's clock
};

// Copy engines' collectives are the largest description of version 6.
struct nccl_ce_coll {
    struct {
        uint64_t sequence;
        const char *function;
        const void *send;
        void *recv;
        size_t count;
        int root;
        const char *type;
        const char *strategy;
        bool syncs;
        uint32_t batch;
        uint32_t batches;
        uint32_t number;
        void *stream;
    } v6;
    uint64_t tag;
};

struct nccl_event_v4 {
    uint8_t type;
    void *parent; // what start_event gave for the event that this one belongs to; for a collective, its group
    int rank;
    union {
        struct nccl_coll_v4 coll;
        struct nccl_p2p_v4 p2p;
        struct nccl_proxy_op proxy_op;
        struct nccl_proxy_step proxy_step;
        struct nccl_kernel_ch kernel_ch;
    };
};

struct nccl_event_v5 {
    uint64_t type;
    void *parent;
    int rank;
    union {
        struct nccl_coll_v5 coll;
        struct nccl_p2p_v5 p2p;
        struct nccl_proxy_op proxy_op;
        struct nccl_proxy_step proxy_step;
        struct nccl_kernel_ch kernel_ch;
    };
};

struct nccl_event_v7 {
    uint64_t type;
    void *parent;
    int rank;
    union {
        struct nccl_coll_v7 coll;
        struct nccl_p2p_v7 p2p;
        struct nccl_proxy_op proxy_op;
        struct nccl_proxy_step proxy_step;
        struct nccl_kernel_ch kernel_ch;
        struct nccl_ce_coll ce_coll;
    };
};

// Comes with a state; which member is set depends on the state.
union nccl_state_args {
    size_t bytes; // of the message, with NCCL_STATE_SEND_WAIT and NCCL_STATE_RECV_FLUSH_WAIT
    int appended;
    void *data;
    uint64_t timer; // stop of the kernel, in ns of the GPU's clock
};

#define NCCL_PROFILER_EVENTS                                                                                           \
    int (*start_event)(void *ctx, void **handle, void *event);                                                         \
    int (*stop_event)(void *handle);                                                                                   \
    int (*record_state)(void *handle, int state, union nccl_state_args *args);                                         \
    int (*finalize)(void *ctx)

struct nccl_profiler_v4 {
    const char *name;
    int (*init)(void **ctx, int *mask, const char *comm_name, uint64_t comm_id, int nodes, int ranks, int rank,
                nccl_logger log);
    NCCL_PROFILER_EVENTS;
};

// Versions 5 to 7 differ in their events only.
struct nccl_profiler_v5 {
    const char *name;
    int (*init)(void **ctx, uint64_t comm_id, int *mask, const char *comm_name, int nodes, int ranks, int rank,
                nccl_logger log);
    NCCL_PROFILER_EVENTS;
};

_Static_assert(sizeof(struct nccl_event_v4) == 104 && offsetof(struct nccl_event_v4, coll) == 24, "v4");
_Static_assert(offsetof(struct nccl_event_v4, parent) == 8 && offsetof(struct nccl_event_v4, rank) == 16, "v4");
_Static_assert(offsetof(struct nccl_event_v4, coll.function) == 32, "v4");
_Static_assert(sizeof(struct nccl_event_v5) == 112 && offsetof(struct nccl_event_v5, coll) == 24, "v5, v6");
_Static_assert(offsetof(struct nccl_event_v5, parent) == 8 && offsetof(struct nccl_event_v5, rank) == 16, "v5, v6");
_Static_assert(offsetof(struct nccl_event_v5, coll.v4.count) == 56, "v5, v6");
_Static_assert(offsetof(struct nccl_event_v5, coll.v4.type) == 72, "v5, v6");
_Static_assert(offsetof(struct nccl_event_v5, coll.v4.channels) == 80, "v5, v6");
_Static_assert(offsetof(struct nccl_event_v5, coll.v4.algorithm) == 88, "v5, v6");
_Static_assert(offsetof(struct nccl_event_v5, coll.group) == 104, "v5, v6");
_Static_assert(offsetof(struct nccl_event_v5, p2p.count) == 48 && offsetof(struct nccl_event_v5, p2p.peer) == 56, "v5");
_Static_assert(offsetof(struct nccl_event_v5, p2p.group) == 64, "v5, v6");
_Static_assert(offsetof(struct nccl_event_v5, proxy_op.channel) == 28, "v5, v6");
_Static_assert(offsetof(struct nccl_event_v5, proxy_op.peer) == 32, "v5, v6");
_Static_assert(offsetof(struct nccl_event_v5, proxy_op.steps) == 36, "v5, v6");
_Static_assert(offsetof(struct nccl_event_v5, proxy_op.step_bytes) == 40, "v5, v6");
_Static_assert(offsetof(struct nccl_event_v5, proxy_op.sends) == 44, "v5, v6");
_Static_assert(offsetof(struct nccl_event_v5, kernel_ch.timer) == 32, "v5, v6");
_Static_assert(offsetof(struct nccl_event_v7, coll.v5.group) == 104, "v7");
_Static_assert(offsetof(struct nccl_event_v7, coll.tag) == 128, "v7");
_Static_assert(offsetof(struct nccl_event_v7, p2p.tag) == 72, "v7");
_Static_assert(sizeof(struct nccl_event_v7) == 136 && offsetof(struct nccl_event_v7, ce_coll.tag) == 112, "v7");
_Static_assert(sizeof(union nccl_state_args) == 8, "v4 to v7");
_Static_assert(sizeof(struct nccl_profiler_v4) == 6 * sizeof(void *), "v4");
_Static_assert(sizeof(struct nccl_profiler_v5) == 6 * sizeof(void *), "v5 to v7");

// The symbols that the library exports.
extern const struct nccl_profiler_v4 ncclProfiler_v4;
extern const struct nccl_profiler_v5 ncclProfiler_v5;
extern const struct nccl_profiler_v5 ncclProfiler_v6;
extern const struct nccl_profiler_v5 ncclProfiler_v7;

#endif
