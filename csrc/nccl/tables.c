// NCCL's tables, version by version: they adapt arguments and results, and hold no logic. Host memory only, so iflush is
// never called.
#include <errno.h>
#include <limits.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "nccl/abi.h"
#include "nccl/net.h"

#define EXPORT __attribute__((visibility("default")))

enum { COMMS_MAX = 65536, TRANSFERS_OF_ONE_RECV = 1 };

// What version 11 on passes as ctx. NCCL 2.28.3 finalizes that of a communicator, and uses it for others that share its
// resources. So none is freed, and listen and connect look the net up.
struct context {
    struct context *next;
    struct nb_net *net; // NULL: finalized
    enum nb_net_kind kind;
    uint64_t domain; // NCCL's number of the communicator
};

static char name[] = "NetBottleneck"; // not const in NCCL's struct; nothing writes to it
static _Atomic uint64_t queries;
static _Atomic(struct context *) contexts; // all of this process

static int result_of(int code) {
    switch (code) {
    case 0:
        return NCCL_SUCCESS;
    case NB_EPEER:
    case NB_EWIRE:
    case NB_EAUTH:
    case NB_ETIMEOUT:
    case NB_EMISMATCH:
    case NB_ECLOSED:
        return NCCL_REMOTE_ERROR;
    case -EINVAL:
    case -EMSGSIZE:
        return NCCL_INVALID_ARGUMENT;
    case -EPERM:
        return NCCL_INVALID_USAGE;
    default:
        return NCCL_SYSTEM_ERROR;
    }
}

// Writes a failure to the log, unless the log has it already: then err is empty.
static int logged(const struct nb_net *net, int code, const struct nb_error *err) {
    if (err->code != 0) {
        nb_net_log(net, NCCL_LOG_WARN, err->text);
    }
    return result_of(code);
}

static bool usable(const struct nb_net *net) {
    return net != NULL && nb_net_is_mine(net);
}

static int opened(struct nb_net **net, enum nb_net_kind kind, nccl_logger log) {
    struct nb_error err = {0};
    int rc = nb_net_open(net, kind, &nb_comm_up, log, &err);
    if (rc < 0 && log != NULL) {
        log(NCCL_LOG_WARN, NCCL_LOG_INIT_NET, __FILE__, __LINE__, "NET/NetBottleneck : %s", err.text);
    } else if (rc == 0) {
        atomic_fetch_add_explicit(&nb_net_counts[kind].contexts, 1, memory_order_relaxed);
    }
    return result_of(rc);
}

static int devices(int *count) {
    *count = 1;
    return NCCL_SUCCESS;
}

static int listen_on(struct nb_net *net, int device, void *handle, void **listener) {
    struct nb_error err = {0};
    struct nb_net_listener *opened_listener = NULL;
    if (!usable(net) || device != 0) {
        return NCCL_INVALID_USAGE;
    }
    int rc = nb_net_listen(net, handle, &opened_listener, &err);
    *listener = opened_listener;
    return logged(net, rc, &err);
}

static int connect_to(struct nb_net *net, uint64_t domain, int device, void *handle, void **comm) {
    struct nb_error err = {0};
    struct nb_net_comm *connected = NULL;
    if (!usable(net) || device != 0) {
        return NCCL_INVALID_USAGE;
    }
    int rc = nb_net_connect(net, domain, handle, &connected, &err);
    *comm = connected;
    return logged(net, rc, &err);
}

static int accept_from(void *listener, void **comm) {
    struct nb_error err = {0};
    struct nb_net_comm *accepted = NULL;
    struct nb_net_listener *from = listener;
    if (!usable(from->net)) {
        return NCCL_INVALID_USAGE;
    }
    int rc = nb_net_accept(from, &accepted, &err);
    *comm = accepted;
    return logged(from->net, rc, &err);
}

static int reg_mr(void *opaque, void *data, size_t size, int type, void **mhandle) {
    struct nb_net_comm *comm = opaque;
    struct nb_net_memory *memory = NULL;
    struct nb_error err = {0};
    if (type != NCCL_PTR_HOST) {
        return NCCL_INVALID_ARGUMENT;
    }
    if (!usable(comm->net)) {
        return NCCL_INVALID_USAGE;
    }
    int rc = nb_net_register(comm, data, size, &memory, &err);
    *mhandle = memory;
    return logged(comm->net, rc, &err);
}

static int reg_mr_v6(void *comm, void *data, int size, int type, void **mhandle) {
    return reg_mr(comm, data, (size_t)size, type, mhandle);
}

static int dereg_mr(void *comm, void *mhandle) {
    (void)comm;
    if (mhandle != NULL) {
        nb_net_deregister(mhandle);
    }
    return NCCL_SUCCESS;
}

static int isend_bytes(void *opaque, void *data, size_t size, void **request) {
    struct nb_net_comm *comm = opaque;
    struct nb_net_request *begun = NULL;
    struct nb_error err = {0};
    if (!usable(comm->net) || !comm->sends) {
        return NCCL_INVALID_USAGE;
    }
    int rc = nb_net_isend(comm, data, size, &begun, &err);
    *request = begun;
    return logged(comm->net, rc, &err);
}

static int irecv_bytes(void *opaque, int count, void *data, size_t size, void **request) {
    struct nb_net_comm *comm = opaque;
    struct nb_net_request *begun = NULL;
    struct nb_error err = {0};
    if (!usable(comm->net) || comm->sends) {
        return NCCL_INVALID_USAGE;
    }
    if (count != TRANSFERS_OF_ONE_RECV) {
        return NCCL_INVALID_ARGUMENT;
    }
    int rc = nb_net_irecv(comm, data, size, &begun, &err);
    *request = begun;
    return logged(comm->net, rc, &err);
}

static int isend(void *comm, void *data, size_t size, int tag, void *mhandle, void *profile, void **request) {
    (void)tag;
    (void)mhandle;
    (void)profile;
    return isend_bytes(comm, data, size, request);
}

static int irecv(void *comm, int count, void **data, size_t *sizes, int *tags, void **mhandles, void **profiles,
                 void **request) {
    (void)tags;
    (void)mhandles;
    (void)profiles;
    return irecv_bytes(comm, count, data[0], sizes[0], request);
}

static int isend_v6(void *comm, void *data, int size, int tag, void *mhandle, void **request) {
    (void)tag;
    (void)mhandle;
    return size < 0 ? NCCL_INVALID_ARGUMENT : isend_bytes(comm, data, (size_t)size, request);
}

static int irecv_v6(void *comm, int count, void **data, int *sizes, int *tags, void **mhandles, void **request) {
    (void)tags;
    (void)mhandles;
    return sizes[0] < 0 ? NCCL_INVALID_ARGUMENT : irecv_bytes(comm, count, data[0], (size_t)sizes[0], request);
}

static int iflush(void *comm, int count, void **data, int *sizes, void **mhandles, void **request) {
    (void)comm;
    (void)count;
    (void)data;
    (void)sizes;
    (void)mhandles;
    (void)request;
    return NCCL_INTERNAL_ERROR; // for device memory only
}

static int test(void *opaque, int *done, int *sizes) {
    struct nb_net_request *request = opaque;
    size_t bytes = 0;
    struct nb_error err = {0};
    if (!usable(request->comm->net)) {
        return NCCL_INVALID_USAGE;
    }
    int rc = nb_net_test(request, &bytes, &err);
    *done = rc > 0;
    if (rc > 0 && sizes != NULL) {
        *sizes = (int)bytes;
    }
    return logged(request->comm->net, rc < 0 ? rc : 0, &err);
}

static int close_comm(void *comm) {
    nb_net_comm_close(comm);
    return NCCL_SUCCESS;
}

static int close_listen(void *listener) {
    nb_net_listener_close(listener);
    return NCCL_SUCCESS;
}

// Speed and latency are 0, unknown: nothing is measured before NCCL asks.

static int properties_v6(int device, struct nccl_props_v6 *props) {
    atomic_fetch_add_explicit(&queries, 1, memory_order_relaxed);
    *props = (struct nccl_props_v6){
        .name = name, .ptr_support = NCCL_PTR_HOST, .max_comms = COMMS_MAX, .max_recvs = TRANSFERS_OF_ONE_RECV};
    return device == 0 ? NCCL_SUCCESS : NCCL_INVALID_ARGUMENT;
}

static int properties_v8(int device, struct nccl_props_v8 *props) {
    atomic_fetch_add_explicit(&queries, 1, memory_order_relaxed);
    *props = (struct nccl_props_v8){
        .name = name, .ptr_support = NCCL_PTR_HOST, .max_comms = COMMS_MAX, .max_recvs = TRANSFERS_OF_ONE_RECV};
    return device == 0 ? NCCL_SUCCESS : NCCL_INVALID_ARGUMENT;
}

static int properties_v10(int device, struct nccl_props_v10 *props) {
    atomic_fetch_add_explicit(&queries, 1, memory_order_relaxed);
    *props = (struct nccl_props_v10){.name = name,
                                     .ptr_support = NCCL_PTR_HOST,
                                     .max_comms = COMMS_MAX,
                                     .max_recvs = TRANSFERS_OF_ONE_RECV,
                                     .parts = {.count = 1},
                                     .max_p2p_bytes = NB_NET_BYTES_MAX,
                                     .max_coll_bytes = NB_NET_BYTES_MAX};
    return device == 0 ? NCCL_SUCCESS : NCCL_INVALID_ARGUMENT;
}

static int properties_v11(int device, struct nccl_props_v11 *props) {
    props->max_multi_request = TRANSFERS_OF_ONE_RECV;
    return properties_v10(device, &props->v10);
}

static int properties_v12(int device, struct nccl_props_v12 *props) {
    atomic_fetch_add_explicit(&queries, 1, memory_order_relaxed);
    *props = (struct nccl_props_v12){.name = name,
                                     .ptr_support = NCCL_PTR_HOST,
                                     .max_comms = COMMS_MAX,
                                     .max_recvs = TRANSFERS_OF_ONE_RECV,
                                     .parts = {.count = 1},
                                     .max_p2p_bytes = NB_NET_BYTES_MAX,
                                     .max_coll_bytes = NB_NET_BYTES_MAX,
                                     .max_multi_request = TRANSFERS_OF_ONE_RECV,
                                     .rail = -1,
                                     .plane = -1};
    return device == 0 ? NCCL_SUCCESS : NCCL_INVALID_ARGUMENT;
}

// No part of a comm lies on a device.
static void no_device(void **device_comm) {
    if (device_comm != NULL) {
        *device_comm = NULL;
    }
}

// Before version 11: no context. NCCL never says that it is done.

static int init_v6(nccl_logger log) {
    struct nb_net *net = NULL;
    return opened(&net, NB_NET_PLAIN, log);
}

static int init_v10(nccl_logger log, nccl_profiler profile) {
    (void)profile;
    return init_v6(log);
}

static int listen_v6(int device, void *handle, void **listener) {
    return listen_on(nb_net_current(NB_NET_PLAIN), device, handle, listener);
}

static int connect_v6(int device, void *handle, void **comm) {
    return connect_to(nb_net_current(NB_NET_PLAIN), 0, device, handle, comm);
}

static int accept_v6(void *listener, void **comm) {
    return accept_from(listener, comm);
}

static int connect_v8(int device, void *handle, void **comm, void **device_comm) {
    no_device(device_comm);
    return connect_v6(device, handle, comm);
}

static int accept_v8(void *listener, void **comm, void **device_comm) {
    no_device(device_comm);
    return accept_from(listener, comm);
}

static int connect_v10(int device, void *config, void *handle, void **comm, void **device_comm) {
    (void)config;
    return connect_v8(device, handle, comm, device_comm);
}

// From version 11 on.

// config: begins with the traffic class; NULL: none.
static enum nb_net_kind kind_of(const void *config) {
    const int *traffic_class = config;
    for (int kind = NB_NET_PLAIN + 1; traffic_class != NULL && kind < NB_NET_KINDS; kind++) {
        if (*traffic_class == NB_NET_TRAFFIC_CLASS + kind) {
            return (enum nb_net_kind)kind;
        }
    }
    return NB_NET_PLAIN;
}

static int init_v11(void **ctx, uint64_t comm_id, void *config, nccl_logger log, nccl_profiler profile) {
    (void)profile;
    struct context *context = calloc(1, sizeof *context);
    *ctx = NULL;
    if (context == NULL) {
        return NCCL_SYSTEM_ERROR;
    }
    context->kind = kind_of(config);
    context->domain = comm_id;
    int rc = opened(&context->net, context->kind, log);
    if (rc != NCCL_SUCCESS) {
        free(context);
        return rc;
    }
    context->next = atomic_load(&contexts);
    while (!atomic_compare_exchange_weak(&contexts, &context->next, context)) {
    }
    *ctx = context;
    return NCCL_SUCCESS;
}

static int listen_v11(void *ctx, int device, void *handle, void **listener) {
    const struct context *context = ctx;
    return listen_on(nb_net_current(context->kind), device, handle, listener);
}

static int connect_v11(void *ctx, int device, void *handle, void **comm, void **device_comm) {
    const struct context *context = ctx;
    no_device(device_comm);
    return connect_to(nb_net_current(context->kind), context->domain, device, handle, comm);
}

static int finalize_v11(void *ctx) {
    struct context *context = ctx; // NULL: init has failed
    if (context != NULL) {
        nb_net_close(context->net);
        context->net = NULL;
    }
    return NCCL_SUCCESS;
}

#define COMMON                                                                                                         \
    .devices = devices, .dereg_mr = dereg_mr, .iflush = iflush, .test = test, .close_send = close_comm,                \
    .close_recv = close_comm, .close_listen = close_listen
#define COMMON_V11                                                                                                     \
    .init = init_v11, .listen = listen_v11, .connect = connect_v11, .accept = accept_v8, .reg_mr = reg_mr,             \
    .isend = isend, .irecv = irecv, .finalize = finalize_v11

// NCCL's names.
EXPORT const struct nb_net_v6 ncclNetPlugin_v6 = {.table = {.name = name,
                                                            COMMON,
                                                            .init = init_v6,
                                                            .get_properties = properties_v6,
                                                            .listen = listen_v6,
                                                            .connect = connect_v6,
                                                            .accept = accept_v6,
                                                            .reg_mr = reg_mr_v6,
                                                            .isend = isend_v6,
                                                            .irecv = irecv_v6},
                                                  .counters = nb_net_counts,
                                                  .queries = &queries};
EXPORT const struct nccl_net_v8 ncclNetPlugin_v8 = {.name = name,
                                                    COMMON,
                                                    .init = init_v6,
                                                    .get_properties = properties_v8,
                                                    .listen = listen_v6,
                                                    .connect = connect_v8,
                                                    .accept = accept_v8,
                                                    .reg_mr = reg_mr,
                                                    .isend = isend_v6,
                                                    .irecv = irecv_v6};
EXPORT const struct nccl_net_v10 ncclNetPlugin_v10 = {.name = name,
                                                      COMMON,
                                                      .init = init_v10,
                                                      .get_properties = properties_v10,
                                                      .listen = listen_v6,
                                                      .connect = connect_v10,
                                                      .accept = accept_v8,
                                                      .reg_mr = reg_mr,
                                                      .isend = isend,
                                                      .irecv = irecv};
EXPORT const struct nccl_net_v11 ncclNetPlugin_v11 = {
    .name = name, COMMON, COMMON_V11, .get_properties = properties_v11};
EXPORT const struct nccl_net_v12 ncclNetPlugin_v12 = {
    .name = name, COMMON, COMMON_V11, .get_properties = properties_v12};
