// NCCL's profiler tables, version by version: they adapt arguments, and hold no logic. NCCL never sees a failure.
#include <stdint.h>

#include "nccl/abi.h"
#include "nccl/profiler.h"
#include "nccl/profiler_abi.h"

#define EXPORT __attribute__((visibility("default")))

static int opened(void **ctx, int *mask, const struct nb_profile_about *about) {
    nb_profile_open(ctx, about, mask);
    return NCCL_SUCCESS;
}

static int init_v4(void **ctx, int *mask, const char *comm_name, uint64_t comm_id, int nodes, int ranks, int rank,
                   nccl_logger log) {
    return opened(
        ctx, mask,
        &(struct nb_profile_about){
            .version = 4, .id = comm_id, .name = comm_name, .hosts = nodes, .ranks = ranks, .rank = rank, .log = log});
}

static int start_v4(void *ctx, void **handle, void *event) {
    const struct nccl_event_v4 *v4 = event;
    *handle = nb_profile_start(ctx, 4, v4->type, event);
    return NCCL_SUCCESS;
}

static int stop_event(void *handle) {
    nb_profile_stop(handle);
    return NCCL_SUCCESS;
}

static int record_state(void *handle, int state, union nccl_state_args *args) {
    nb_profile_state(handle, state, args);
    return NCCL_SUCCESS;
}

static int finalize(void *ctx) {
    nb_profile_close(ctx);
    return NCCL_SUCCESS;
}

#define COMMON .name = NB_PROFILER_NAME, .stop_event = stop_event, .record_state = record_state, .finalize = finalize

// From version 5 on.
#define FROM_V5(version_)                                                                                              \
    static int init_v##version_(void **ctx, uint64_t comm_id, int *mask, const char *comm_name, int nodes, int ranks,  \
                                int rank, nccl_logger log) {                                                           \
        return opened(ctx, mask,                                                                                       \
                      &(struct nb_profile_about){.version = (version_),                                                \
                                                 .id = comm_id,                                                        \
                                                 .name = comm_name,                                                    \
                                                 .hosts = nodes,                                                       \
                                                 .ranks = ranks,                                                       \
                                                 .rank = rank,                                                         \
                                                 .log = log});                                                         \
    }                                                                                                                  \
    static int start_v##version_(void *ctx, void **handle, void *event) {                                              \
        const struct nccl_event_v5 *v5 = event;                                                                        \
        *handle = nb_profile_start(ctx, (version_), v5->type, event);                                                  \
        return NCCL_SUCCESS;                                                                                           \
    }                                                                                                                  \
    EXPORT const struct nccl_profiler_v5 ncclProfiler_v##version_ = {COMMON, .init = init_v##version_,                 \
                                                                     .start_event = start_v##version_}

// NCCL's names.
EXPORT const struct nccl_profiler_v4 ncclProfiler_v4 = {COMMON, .init = init_v4, .start_event = start_v4};
FROM_V5(5);
FROM_V5(6);
FROM_V5(7);
