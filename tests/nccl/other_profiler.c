// Another profiler plugin, with a table of version OTHER, to which ours forwards events. It logs each call to the file
// OTHER_LOG. Its handles are numbers from 1 on. It requests Group, Coll and ProxyStep events, so NCCL also reports
// ProxyOp events. With OTHER_LATE it requests none before other_begin() is called.
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "nccl/profiler_abi.h"

#define EXPORT __attribute__((visibility("default")))
#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)

static FILE *out;
static uintptr_t last;
static int context;
static int *wanted; // the mask of requested events

EXPORT void other_begin(void);
EXPORT void other_begin(void) {
    __atomic_store_n(wanted, NCCL_PROFILE_GROUP | NCCL_PROFILE_COLL | NCCL_PROFILE_PROXY_STEP, __ATOMIC_RELAXED);
}

__attribute__((format(printf, 1, 2))) static void log_call(const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    (void)vfprintf(out, fmt, args);
    (void)fputc('\n', out);
    (void)fflush(out);
    va_end(args);
}

static int init_common(void **ctx, int *mask, uint64_t comm, int rank) {
    out = out != NULL ? out : fopen(getenv("OTHER_LOG"), "w");
    *ctx = &context;
    wanted = mask;
    *wanted = 0;
    if (getenv("OTHER_LATE") == NULL) {
        other_begin();
    }
    log_call("init %llx rank %d", (unsigned long long)comm, rank);
    return NCCL_SUCCESS;
}

static int start_event(void *ctx, void **handle, void *event) {
#if OTHER == 4
    const struct nccl_event_v4 *received = event;
    const void *group = NULL;
#else
    const struct nccl_event_v5 *received = event;
    const void *group = received->type == NCCL_PROFILE_COLL ? received->coll.group : NULL;
#endif
    *handle = (void *)++last;
    log_call("start %llu type %llu parent %lu group %lu%s", (unsigned long long)last,
             (unsigned long long)received->type, (unsigned long)(uintptr_t)received->parent,
             (unsigned long)(uintptr_t)group, ctx == &context ? "" : " no context");
    return NCCL_SUCCESS;
}

static int stop_event(void *handle) {
    log_call("stop %lu", (unsigned long)(uintptr_t)handle);
    return NCCL_SUCCESS;
}

static int record_state(void *handle, int state, union nccl_state_args *args) {
    log_call("state %lu %d bytes %zu", (unsigned long)(uintptr_t)handle, state, args->bytes);
    return NCCL_SUCCESS;
}

static int finalize(void *ctx) {
    log_call("finalize%s", ctx == &context ? "" : " no context");
    return NCCL_SUCCESS;
}

#if OTHER == 4
static int init(void **ctx, int *mask, const char *name, uint64_t comm, int nodes, int ranks, int rank,
                nccl_logger log) {
    (void)name, (void)nodes, (void)ranks, (void)log;
    return init_common(ctx, mask, comm, rank);
}
EXPORT const struct nccl_profiler_v4 ncclProfiler_v4 = {
#else
static int init(void **ctx, uint64_t comm, int *mask, const char *name, int nodes, int ranks, int rank,
                nccl_logger log) {
    (void)name, (void)nodes, (void)ranks, (void)log;
    return init_common(ctx, mask, comm, rank);
}
EXPORT const struct nccl_profiler_v5 JOIN(ncclProfiler_v, OTHER) = {
#endif
    .name = "other", init, start_event, stop_event, record_state, finalize};
