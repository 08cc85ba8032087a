// A raw libfabric endpoint that posts arbitrary writes and messages to a lane, with or without the job's session.
// Shared by test_ofi.c, test_ofi_double.c, test_ofi_attacker.c and fuzz_ofi.c.
#ifndef NB_TESTS_RAW_ENDPOINT_H
#define NB_TESTS_RAW_ENDPOINT_H

#include <errno.h>
#include <rdma/fi_rma.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifndef CHECK
#include "check.h"
#endif
#include "base/clock.h"
#include "base/loop.h"
#include "lane_stubs.h"
#include "transport/lanes_internal.h"
#include "transport/ofi_lane.h"

enum { RAW_ENDPOINT_REQUESTS = 32 };

struct raw_endpoint {
    struct nb_lane *lane;
    struct nb_boot boot;
    struct nb_request requests[RAW_ENDPOINT_REQUESTS];
    bool busy[RAW_ENDPOINT_REQUESTS];
    uint64_t sent;     // completed requests
    uint64_t landed;   // arrivals that the lane has accepted
    uint64_t messages; // received
    bool lost;
};

static inline void raw_endpoint_sent(void *ctx, struct nb_lane *lane, struct nb_request *request, int code) {
    struct raw_endpoint *endpoint = ctx;
    (void)lane;
    (void)code;
    endpoint->busy[request - endpoint->requests] = false;
    endpoint->sent++;
}

static inline void raw_endpoint_landed(void *ctx, struct nb_lane *lane, int peer, const struct nb_frame *frame) {
    struct raw_endpoint *endpoint = ctx;
    (void)lane;
    (void)peer;
    (void)frame;
    endpoint->landed++;
}

static inline void raw_endpoint_message(void *ctx, struct nb_lane *lane, int peer, const void *data, size_t bytes) {
    struct raw_endpoint *endpoint = ctx;
    (void)lane;
    (void)peer;
    (void)data;
    (void)bytes;
    endpoint->messages++;
}

static inline void raw_endpoint_lost(void *ctx, struct nb_lane *lane, int peer, const struct nb_error *why) {
    struct raw_endpoint *endpoint = ctx;
    (void)lane;
    (void)peer;
    (void)why;
    endpoint->lost = true;
}

// Opens the endpoint as `rank` of `size`. session NULL: an invented one. Returns 0 or the error of opening it.
static inline int raw_endpoint_open(struct raw_endpoint *endpoint, int index, int rank, int size,
                                    const unsigned char *session, struct nb_error *err) {
    static const struct nb_lane_up up = {.place = stub_place,
                                         .landed = raw_endpoint_landed,
                                         .sent = raw_endpoint_sent,
                                         .writable = stub_writable,
                                         .message = raw_endpoint_message,
                                         .lost = raw_endpoint_lost};
    *endpoint = (struct raw_endpoint){.boot = {.rank = rank, .size = size}};
    memset(endpoint->boot.session, 0x33, sizeof endpoint->boot.session);
    if (session != NULL) {
        memcpy(endpoint->boot.session, session, sizeof endpoint->boot.session);
    }
    struct nb_lane_config config = {.index = index,
                                    .rank = rank,
                                    .size = size,
                                    .boot = &endpoint->boot,
                                    .library = getenv("NETBOTTLENECK_LIBFABRIC"),
                                    .provider = getenv("NETBOTTLENECK_PROVIDER"),
                                    .up = &up,
                                    .up_ctx = endpoint};
    CHECK(nb_sock_parse("127.0.0.1:0", &config.bind, err) == 0, "%s", err->text);
    return nb_ofi_ops.open(&config, &endpoint->lane, err);
}

// Posts an empty write with the frame as completion data. Returns 0, -EAGAIN or another error.
static inline int raw_endpoint_write(struct raw_endpoint *endpoint, int peer, struct nb_frame frame) {
    int free = 0;
    while (free < RAW_ENDPOINT_REQUESTS && endpoint->busy[free]) {
        free++;
    }
    if (free == RAW_ENDPOINT_REQUESTS) {
        return -EAGAIN;
    }
    struct nb_request *request = &endpoint->requests[free];
    *request = (struct nb_request){.frame = frame, .peer = peer};
    struct nb_ofi_lane *lane = nb_ofi_lane_of(endpoint->lane);
    struct nb_ofi_op *op = (struct nb_ofi_op *)(void *)request->lane_private;
    *op = (struct nb_ofi_op){.kind = NB_OFI_WRITE, .peer = peer};
    struct fi_msg_rma write = {.addr = lane->peers[peer].addr, .context = op, .data = nb_frame_pack(&frame)};
    request->frame.bytes = 0;
    lane->armed = false;
    lane->reports_arrivals = false; // no message follows: the completion data are the arrival
    ssize_t rc = fi_writemsg(lane->ep, &write, FI_REMOTE_CQ_DATA | FI_COMPLETION);
    if (rc == 0) {
        endpoint->busy[free] = true;
        nb_list_init(&op->link);
        nb_list_insert(&lane->writes, &op->link);
        lane->peers[peer].under_way++;
    }
    return (int)rc;
}

#endif
