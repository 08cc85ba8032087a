// Somebody who reaches the ports of a libfabric lane and does not know the job's session: an endpoint that writes and
// says what it likes. Shared by test_ofi.c, test_ofi_double.c, test_outsider.c and fuzz_ofi.c.
#ifndef NB_TESTS_OUTSIDER_H
#define NB_TESTS_OUTSIDER_H

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

enum { OUTSIDER_REQUESTS = 32 };

struct outsider {
    struct nb_lane *lane;
    struct nb_boot boot;
    struct nb_request requests[OUTSIDER_REQUESTS];
    bool busy[OUTSIDER_REQUESTS];
    uint64_t sent;     // requests that are over
    uint64_t messages; // that came
    bool lost;
};

static inline void outsider_sent(void *ctx, struct nb_lane *lane, struct nb_request *request, int code) {
    struct outsider *outsider = ctx;
    (void)lane;
    (void)code;
    outsider->busy[request - outsider->requests] = false;
    outsider->sent++;
}

static inline void outsider_message(void *ctx, struct nb_lane *lane, int peer, const void *data, size_t bytes) {
    struct outsider *outsider = ctx;
    (void)lane;
    (void)peer;
    (void)data;
    (void)bytes;
    outsider->messages++;
}

static inline void outsider_lost(void *ctx, struct nb_lane *lane, int peer, const struct nb_error *why) {
    struct outsider *outsider = ctx;
    (void)lane;
    (void)peer;
    (void)why;
    outsider->lost = true;
}

// Says that it is `rank` of `size`. session NULL: one that it made up. 0, or why its endpoint cannot be opened.
static inline int outsider_open(struct outsider *outsider, int index, int rank, int size, const unsigned char *session,
                                struct nb_error *err) {
    static const struct nb_lane_up up = {.place = stub_place,
                                         .landed = stub_landed,
                                         .sent = outsider_sent,
                                         .writable = stub_writable,
                                         .message = outsider_message,
                                         .lost = outsider_lost};
    *outsider = (struct outsider){.boot = {.rank = rank, .size = size}};
    memset(outsider->boot.session, 0x33, sizeof outsider->boot.session);
    if (session != NULL) {
        memcpy(outsider->boot.session, session, sizeof outsider->boot.session);
    }
    struct nb_lane_config config = {.index = index,
                                    .rank = rank,
                                    .size = size,
                                    .boot = &outsider->boot,
                                    .library = getenv("NETBOTTLENECK_LIBFABRIC"),
                                    .provider = getenv("NETBOTTLENECK_PROVIDER"),
                                    .up = &up,
                                    .up_ctx = outsider};
    CHECK(nb_sock_parse("127.0.0.1:0", &config.bind, err) == 0, "%s", err->text);
    return nb_ofi_ops.open(&config, &outsider->lane, err);
}

// Posts a write of nothing to nowhere, whose completion data are what it likes. 0, or -EAGAIN, or the failure.
static inline int outsider_arrive(struct outsider *outsider, int victim, struct nb_frame frame) {
    int free = 0;
    while (free < OUTSIDER_REQUESTS && outsider->busy[free]) {
        free++;
    }
    if (free == OUTSIDER_REQUESTS) {
        return -EAGAIN;
    }
    struct nb_request *request = &outsider->requests[free];
    *request = (struct nb_request){.frame = frame, .peer = victim};
    struct nb_ofi_lane *lane = nb_ofi_lane_of(outsider->lane);
    struct nb_ofi_op *op = (struct nb_ofi_op *)(void *)request->lane_private;
    *op = (struct nb_ofi_op){.kind = NB_OFI_WRITE, .peer = victim};
    struct fi_msg_rma write = {.addr = lane->peers[victim].addr, .context = op, .data = nb_frame_pack(&frame)};
    request->frame.bytes = 0;
    lane->armed = false;
    ssize_t rc = fi_writemsg(lane->ep, &write, FI_REMOTE_CQ_DATA | FI_COMPLETION);
    if (rc == 0) {
        outsider->busy[free] = true;
        nb_list_init(&op->link);
        nb_list_insert(&lane->writes, &op->link);
        lane->peers[victim].under_way++;
    }
    return (int)rc;
}

#endif
