// NCCL's calls to a profiler's table of any version, in the order of NCCL 2.30. The sequence follows NCCL's source; it
// is not a recording of a run on a GPU.
#ifndef NB_TEST_NCCL_PROFILED_H
#define NB_TEST_NCCL_PROFILED_H

#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include "nccl/profiler_abi.h"

struct profiled {
    int version;
    const void *table;
    void *ctx;
    int mask;
    int rank;
};

static inline const struct nccl_profiler_v5 *profiled_table(const struct profiled *profiled) {
    return profiled->table; // the tables differ only in init
}

static inline int profiled_init(struct profiled *profiled, uint64_t comm_id, const char *name, int ranks, int rank,
                                nccl_logger log) {
    profiled->rank = rank;
    if (profiled->version == 4) {
        const struct nccl_profiler_v4 *v4 = profiled->table;
        return v4->init(&profiled->ctx, &profiled->mask, name, comm_id, ranks, ranks, rank, log);
    }
    return profiled_table(profiled)->init(&profiled->ctx, comm_id, &profiled->mask, name, ranks, ranks, rank, log);
}

static inline int profiled_finalize(const struct profiled *profiled) {
    return profiled_table(profiled)->finalize(profiled->ctx);
}

// Begins an event in the format of the table's version. Fields of later versions hold garbage.
static inline void *profiled_start(const struct profiled *profiled, const struct nccl_event_v7 *event) {
    union {
        struct nccl_event_v4 v4;
        struct nccl_event_v7 v7;
        unsigned char bytes[sizeof(struct nccl_event_v7)];
    } described;
    size_t bytes = profiled->version == 4   ? sizeof(struct nccl_event_v4)
                   : profiled->version == 7 ? sizeof(struct nccl_event_v7)
                                            : sizeof(struct nccl_event_v5);
    void *handle = NULL;
    memset(described.bytes, 0xa5, sizeof described.bytes);
    memcpy(described.bytes, event, bytes);
    described.v7.rank = profiled->rank;
    if (profiled->version == 4) {
        memset(described.bytes, 0xa5, sizeof described.v4.parent);
        described.v4.type = (uint8_t)event->type;
        if (event->type == NCCL_PROFILE_COLL) {
            described.v4.parent = event->coll.v5.group;
        }
    }
    return profiled_table(profiled)->start_event(profiled->ctx, &handle, &described) == NCCL_SUCCESS ? handle : NULL;
}

static inline void profiled_stop(const struct profiled *profiled, void *handle) {
    if (handle != NULL) { // as NCCL checks
        (void)profiled_table(profiled)->stop_event(handle);
    }
}

static inline void profiled_state(const struct profiled *profiled, void *handle, int state, size_t bytes) {
    union nccl_state_args args = {.bytes = bytes};
    if (handle != NULL) {
        (void)profiled_table(profiled)->record_state(handle, state, &args);
    }
}

static inline void *profiled_group(const struct profiled *profiled) {
    const struct nccl_event_v7 event = {.type = NCCL_PROFILE_GROUP};
    return profiled_start(profiled, &event);
}

// An all-reduce of float32, by the ring algorithm. With a table of version 4, NCCL 2.27 reports none of a group without a
// handle.
static inline void *profiled_all_reduce(const struct profiled *profiled, void *group, uint64_t sequence, size_t count,
                                        int channels, uint64_t tag) {
    const struct nccl_event_v7 event = {.type = NCCL_PROFILE_COLL,
                                        .coll = {.v5 = {.v4 = {.sequence = sequence,
                                                               .function = "AllReduce",
                                                               .count = count,
                                                               .type = "ncclFloat32",
                                                               .channels = (uint8_t)channels,
                                                               .warps = 16,
                                                               .algorithm = "RING",
                                                               .protocol = "SIMPLE"},
                                                        .group = group},
                                                 .tag = tag}};
    if (profiled->version == 4 && group == NULL) {
        return NULL;
    }
    return profiled_start(profiled, &event);
}

static inline void *profiled_op(const struct profiled *profiled, void *task, int channel, int peer, int sends,
                                pid_t pid) {
    const struct nccl_event_v7 event = {
        .type = NCCL_PROFILE_PROXY_OP,
        .parent = task,
        .proxy_op = {
            .pid = pid, .channel = (uint8_t)channel, .peer = peer, .steps = 1, .step_bytes = 1 << 20, .sends = sends}};
    return profiled_start(profiled, &event);
}

static inline void *profiled_step(const struct profiled *profiled, void *op, int number) {
    const struct nccl_event_v7 event = {
        .type = NCCL_PROFILE_PROXY_STEP, .parent = op, .proxy_step = {.number = number}};
    return profiled_start(profiled, &event);
}

static inline void *profiled_kernel(const struct profiled *profiled, void *task, int channel, uint64_t timer) {
    const struct nccl_event_v7 event = {
        .type = NCCL_PROFILE_KERNEL_CH, .parent = task, .kernel_ch = {.channel = (uint8_t)channel, .timer = timer}};
    return profiled_start(profiled, &event);
}

static inline void profiled_kernel_stop(const struct profiled *profiled, void *kernel, uint64_t timer) {
    union nccl_state_args args = {.timer = timer};
    if (kernel != NULL) {
        (void)profiled_table(profiled)->record_state(kernel, NCCL_STATE_KERNEL_STOP, &args);
    }
    profiled_stop(profiled, kernel);
}

#endif
