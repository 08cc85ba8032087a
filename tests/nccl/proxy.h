// Stand-in for NCCL's proxy: calls a net plugin as NCCL does, through the table of any version. For C tests and
// benchmarks.
#ifndef NB_TEST_NCCL_PROXY_H
#define NB_TEST_NCCL_PROXY_H

#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nccl/abi.h"

enum { PROXY_REQUESTS = 32 }; // NCCL's limit of requests in flight on a comm

// One plugin, called through one table.
struct proxy {
    int version; // 6, 8, 10, 11 or 12
    const void *table;
    int traffic_class; // 0: none
    void *ctx;
};

static char proxy_warning[1024]; // the last warning
static char proxy_info[1024];    // the last information

__attribute__((format(printf, 5, 6), unused)) static void proxy_log(int level, unsigned long subsystems,
                                                                    const char *file, int line, const char *fmt, ...) {
    va_list args;
    (void)subsystems;
    (void)file;
    (void)line;
    va_start(args, fmt);
    if (level == NCCL_LOG_WARN) {
        (void)vsnprintf(proxy_warning, sizeof proxy_warning, fmt, args);
        (void)fprintf(stderr, "WARN %s\n", proxy_warning);
    } else if (level == NCCL_LOG_INFO) {
        (void)vsnprintf(proxy_info, sizeof proxy_info, fmt, args);
    }
    va_end(args);
}

static inline const struct nccl_net_v6 *proxy_v6(const struct proxy *proxy) {
    return proxy->table;
}

static inline const struct nccl_net_v8 *proxy_v8(const struct proxy *proxy) {
    return proxy->table;
}

static inline const struct nccl_net_v10 *proxy_v10(const struct proxy *proxy) {
    return proxy->table;
}

// Versions 11 and 12 have the same layout, except for the properties.
static inline const struct nccl_net_v12 *proxy_v12(const struct proxy *proxy) {
    return proxy->table;
}

static inline int proxy_init(struct proxy *proxy, uint64_t comm_id) {
    int traffic_class = proxy->traffic_class != 0 ? proxy->traffic_class : -1;
    if (proxy->version >= 11) {
        return proxy_v12(proxy)->init(&proxy->ctx, comm_id, &traffic_class, proxy_log, NULL);
    }
    return proxy->version == 10 ? proxy_v10(proxy)->init(proxy_log, NULL) : proxy_v6(proxy)->init(proxy_log);
}

static inline int proxy_finalize(struct proxy *proxy) {
    return proxy->version >= 11 ? proxy_v12(proxy)->finalize(proxy->ctx) : NCCL_SUCCESS;
}

static inline int proxy_listen(const struct proxy *proxy, int device, void *handle, void **listener) {
    return proxy->version >= 11 ? proxy_v12(proxy)->listen(proxy->ctx, device, handle, listener)
                                : proxy_v6(proxy)->listen(device, handle, listener);
}

static inline int proxy_connect(const struct proxy *proxy, int device, void *handle, void **comm) {
    int no_traffic_class = -1;
    void *device_comm = NULL;
    switch (proxy->version) {
    case 6:
        return proxy_v6(proxy)->connect(device, handle, comm);
    case 8:
        return proxy_v8(proxy)->connect(device, handle, comm, &device_comm);
    case 10:
        return proxy_v10(proxy)->connect(device, &no_traffic_class, handle, comm, &device_comm);
    default:
        return proxy_v12(proxy)->connect(proxy->ctx, device, handle, comm, &device_comm);
    }
}

static inline int proxy_accept(const struct proxy *proxy, void *listener, void **comm) {
    void *device_comm = NULL;
    switch (proxy->version) {
    case 6:
        return proxy_v6(proxy)->accept(listener, comm);
    case 8:
        return proxy_v8(proxy)->accept(listener, comm, &device_comm);
    case 10:
        return proxy_v10(proxy)->accept(listener, comm, &device_comm);
    default:
        return proxy_v12(proxy)->accept(listener, comm, &device_comm);
    }
}

static inline int proxy_register(const struct proxy *proxy, void *comm, void *data, size_t bytes, void **mhandle) {
    switch (proxy->version) {
    case 6:
        return proxy_v6(proxy)->reg_mr(comm, data, (int)bytes, NCCL_PTR_HOST, mhandle);
    case 8:
        return proxy_v8(proxy)->reg_mr(comm, data, bytes, NCCL_PTR_HOST, mhandle);
    case 10:
        return proxy_v10(proxy)->reg_mr(comm, data, bytes, NCCL_PTR_HOST, mhandle);
    default:
        return proxy_v12(proxy)->reg_mr(comm, data, bytes, NCCL_PTR_HOST, mhandle);
    }
}

static inline int proxy_deregister(const struct proxy *proxy, void *comm, void *mhandle) {
    return proxy->version >= 11 ? proxy_v12(proxy)->dereg_mr(comm, mhandle) : proxy_v6(proxy)->dereg_mr(comm, mhandle);
}

static inline int proxy_isend(const struct proxy *proxy, void *comm, void *data, size_t bytes, void **request) {
    switch (proxy->version) {
    case 6:
    case 8: // isend has the same place and type in both tables
        return proxy_v6(proxy)->isend(comm, data, (int)bytes, 0, NULL, request);
    case 10:
        return proxy_v10(proxy)->isend(comm, data, bytes, 0, NULL, NULL, request);
    default:
        return proxy_v12(proxy)->isend(comm, data, bytes, 0, NULL, NULL, request);
    }
}

static inline int proxy_irecv(const struct proxy *proxy, void *comm, void *data, size_t bytes, void **request) {
    int size = (int)bytes;
    int tag = 0;
    void *mhandle = NULL;
    void *profile = NULL;
    switch (proxy->version) {
    case 6:
    case 8:
        return proxy_v6(proxy)->irecv(comm, 1, &data, &size, &tag, &mhandle, request);
    case 10:
        return proxy_v10(proxy)->irecv(comm, 1, &data, &bytes, &tag, &mhandle, &profile, request);
    default:
        return proxy_v12(proxy)->irecv(comm, 1, &data, &bytes, &tag, &mhandle, &profile, request);
    }
}

// These have the same place in every table.
static inline int proxy_test(const struct proxy *proxy, void *request, int *done, int *bytes) {
    return proxy_v6(proxy)->test(request, done, bytes);
}

static inline int proxy_close_send(const struct proxy *proxy, void *comm) {
    return proxy_v6(proxy)->close_send(comm);
}

static inline int proxy_close_recv(const struct proxy *proxy, void *comm) {
    return proxy_v6(proxy)->close_recv(comm);
}

static inline int proxy_close_listen(const struct proxy *proxy, void *listener) {
    return proxy_v6(proxy)->close_listen(listener);
}

// One direction of a comm: requests in flight, oldest first. Only the oldest is tested.
struct proxy_queue {
    void *comm;
    bool sends;
    void *requests[PROXY_REQUESTS];
    unsigned head;
    unsigned count;
};

// Posts a transfer. False: the queue is full, or the plugin accepts no request now.
static inline bool proxy_post(const struct proxy *proxy, struct proxy_queue *queue, void *data, size_t bytes,
                              int *result) {
    void *request = NULL;
    *result = NCCL_SUCCESS;
    if (queue->count == PROXY_REQUESTS) {
        return false;
    }
    *result = queue->sends ? proxy_isend(proxy, queue->comm, data, bytes, &request)
                           : proxy_irecv(proxy, queue->comm, data, bytes, &request);
    if (*result != NCCL_SUCCESS || request == NULL) {
        return false;
    }
    queue->requests[(queue->head + queue->count++) % PROXY_REQUESTS] = request;
    return true;
}

// Tests the oldest transfer. True: it is done.
static inline bool proxy_poll(const struct proxy *proxy, struct proxy_queue *queue, int *bytes, int *result) {
    int done = 0;
    *result = NCCL_SUCCESS;
    if (queue->count == 0) {
        return false;
    }
    *result = proxy_test(proxy, queue->requests[queue->head], &done, bytes);
    if (*result != NCCL_SUCCESS || !done) {
        return false;
    }
    queue->head = (queue->head + 1) % PROXY_REQUESTS;
    queue->count--;
    return true;
}

#endif
