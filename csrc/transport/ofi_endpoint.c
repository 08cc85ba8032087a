// libfabric endpoint: opens and closes libfabric's objects of one lane, and registers its memory.
#ifdef NB_HAVE_OFI

#include <errno.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/list.h"
#include "base/loop.h"
#include "base/sha256.h"
#include "base/sock.h"
#include "transport/ofi.h"
#include "transport/ofi_lane.h"
#include "transport/ofi_lib.h"
#include "transport/transport.h"

static void close_fid(struct fid *fid) {
    if (fid != NULL) {
        fi_close(fid); // a failure cannot be handled, and its resources are not used again
    }
}

// Closes the endpoint first, so that a peer's data can no longer land; then the memory; then the objects that both use.
void nb_ofi_endpoint_close(struct nb_ofi_lane *lane) {
    if (lane->watch.events != 0) {
        nb_loop_remove(lane->config.loop, &lane->watch);
    }
    lane->watch.fd = -1; // the queue owns it
    close_fid(lane->ep != NULL ? &lane->ep->fid : NULL);
    lane->ep = NULL;
    NB_LIST_EACH(it, &lane->regions) {
        struct nb_ofi_region *region = NB_CONTAINER(it, struct nb_ofi_region, link);
        close_fid(region->mr != NULL ? &region->mr->fid : NULL);
        region->mr = NULL;
    }
    for (int i = 0; i < NB_OFI_BOUNCES; i++) {
        struct nb_ofi_bounce *bounce = &lane->bounces[i];
        close_fid(bounce->mr != NULL ? &bounce->mr->fid : NULL);
        free(bounce->memory);
        *bounce = (struct nb_ofi_bounce){0};
    }
    close_fid(lane->slots_mr != NULL ? &lane->slots_mr->fid : NULL);
    lane->slots_mr = NULL;
    close_fid(lane->cq != NULL ? &lane->cq->fid : NULL);
    lane->cq = NULL;
    close_fid(lane->wait_set != NULL ? &lane->wait_set->fid : NULL);
    lane->wait_set = NULL;
    close_fid(lane->av != NULL ? &lane->av->fid : NULL);
    lane->av = NULL;
    close_fid(lane->domain != NULL ? &lane->domain->fid : NULL);
    lane->domain = NULL;
    close_fid(lane->fabric != NULL ? &lane->fabric->fid : NULL);
    lane->fabric = NULL;
    if (lane->info != NULL) {
        lane->lib.freeinfo(lane->info);
        lane->info = NULL;
    }
}

// Before 1.20 fi_trywait of the tcp code does nothing: a queue's descriptor that became readable stays so, and the
// thread never sleeps. A wait set has the same descriptor and a call that clears it.
static bool needs_wait_set(const struct nb_ofi_lane *lane) {
    const char *provider = lane->info->fabric_attr->prov_name;
    return FI_VERSION_LT(lane->lib.version(), FI_VERSION(1, 20)) &&
           (strcmp(provider, "net") == 0 || strcmp(provider, "tcp") == 0);
}

// Opens a queue that a thread can sleep on.
static int open_waiting_queue(struct nb_ofi_lane *lane, struct fi_cq_attr attr) {
    attr.wait_obj = FI_WAIT_FD;
    if (needs_wait_set(lane)) {
        struct fi_wait_attr set = {.wait_obj = FI_WAIT_FD};
        int rc = lane->fabric->ops->wait_open(lane->fabric, &set, &lane->wait_set);
        if (rc < 0) {
            return rc;
        }
        attr.wait_obj = FI_WAIT_SET;
        attr.wait_set = lane->wait_set;
    }
    int rc = fi_cq_open(lane->domain, &attr, &lane->cq, NULL);
    if (rc < 0) {
        return rc;
    }
    struct fid *waits = lane->wait_set != NULL ? &lane->wait_set->fid : &lane->cq->fid;
    if (fi_control(waits, FI_GETWAIT, &lane->watch.fd) != 0) {
        lane->watch.fd = -1;
    }
    return 0;
}

// Opens a queue that a thread can sleep on, else one that must be polled.
static int open_queue(struct nb_ofi_lane *lane) {
    struct fi_cq_attr attr = {.size = NB_OFI_CQ_SIZE, .format = FI_CQ_FORMAT_DATA, .wait_obj = FI_WAIT_NONE};
    if (lane->config.loop != NULL && open_waiting_queue(lane, attr) == 0) {
        return 0;
    }
    return fi_cq_open(lane->domain, &attr, &lane->cq, NULL);
}

int nb_ofi_queue_arm(struct nb_ofi_lane *lane) {
    if (lane->watch.fd < 0) {
        return -EAGAIN;
    }
    if (lane->wait_set != NULL) {
        return lane->wait_set->ops->wait(lane->wait_set, 0) == -FI_ETIMEDOUT ? 0 : -EAGAIN;
    }
    struct fid *queue = &lane->cq->fid;
    return fi_trywait(lane->fabric, &queue, 1) == 0 ? 0 : -EAGAIN;
}

static int open_objects(struct nb_ofi_lane *lane, const char **step) {
    struct fi_av_attr av = {.type = lane->info->domain_attr->av_type, .count = (size_t)lane->config.size};
    int rc;
    *step = "fi_fabric";
    if ((rc = lane->lib.fabric(lane->info->fabric_attr, &lane->fabric, NULL)) < 0) {
        return rc;
    }
    *step = "fi_domain";
    if ((rc = fi_domain(lane->fabric, lane->info, &lane->domain, NULL)) < 0) {
        return rc;
    }
    *step = "fi_cq_open";
    if ((rc = open_queue(lane)) < 0) {
        return rc;
    }
    *step = "fi_av_open";
    if ((rc = fi_av_open(lane->domain, &av, &lane->av, NULL)) < 0) {
        return rc;
    }
    *step = "fi_endpoint";
    if ((rc = fi_endpoint(lane->domain, lane->info, &lane->ep, NULL)) < 0) {
        return rc;
    }
    *step = "fi_ep_bind";
    if ((rc = fi_ep_bind(lane->ep, &lane->cq->fid, FI_TRANSMIT | FI_RECV)) < 0 ||
        (rc = fi_ep_bind(lane->ep, &lane->av->fid, 0)) < 0) {
        return rc;
    }
    *step = "fi_enable";
    rc = fi_enable(lane->ep);
    if (rc < 0 && strstr(lane->info->fabric_attr->prov_name, "ofi_rxm") != NULL) {
        // ofi_rxm (seen in 2.5) has freed parts of such an endpoint, and would free them again: leak it.
        lane->ep = NULL;
        lane->cq = NULL;
        lane->wait_set = NULL;
        lane->av = NULL;
        lane->domain = NULL;
        lane->fabric = NULL;
    }
    return rc;
}

static void read_info(struct nb_ofi_lane *lane) {
    const struct fi_info *info = lane->info;
    int mode = info->domain_attr->mr_mode;
    // ofi_rxm (1.17 to 2.6) crashes if a connection ends while a write with completion data is arriving: it reads the
    // context of that write, which has none.
    bool layered = strstr(info->fabric_attr->prov_name, "ofi_rxm") != NULL;
    lane->reports_arrivals = info->domain_attr->cq_data_size < sizeof(uint64_t) || (layered && lane->delivery);
    lane->local = (mode & FI_MR_LOCAL) != 0;
    lane->virtual_addr = (mode & FI_MR_VIRT_ADDR) != 0;
    lane->own_keys = (mode & FI_MR_PROV_KEY) == 0;
    lane->endpoint_mr = (mode & FI_MR_ENDPOINT) != 0;
    lane->iov_limit = info->tx_attr->iov_limit;
    lane->inject_max = info->tx_attr->inject_size;
    size_t key_bytes = info->domain_attr->mr_key_size;
    lane->key_mask = key_bytes >= sizeof(uint64_t) ? UINT64_MAX : (UINT64_C(1) << 8 * key_bytes) - 1;
    char version[NB_OFI_NAME];
    nb_ofi_lib_version(&lane->lib, version);
    snprintf(lane->name, sizeof lane->name, "%s/%s", info->fabric_attr->prov_name, version);
}

static int open_at(struct nb_ofi_lane *lane, const char *provider, const struct nb_sockaddr *source,
                   struct nb_error *err) {
    int rc = nb_ofi_info_get(&lane->lib, provider, source, &lane->info, &lane->delivery, err);
    if (rc < 0) {
        return rc;
    }
    read_info(lane);
    const char *step = "";
    rc = open_objects(lane, &step);
    if (rc < 0) {
        char at[NB_SOCK_TEXT];
        nb_sock_format(source, at);
        rc = nb_fail(err, rc, "lane %d: %s of %s at %s: %s", lane->base.index, step, lane->name, at,
                     lane->lib.strerror(-rc));
        nb_ofi_endpoint_close(lane);
    }
    return rc;
}

int nb_ofi_endpoint_open(struct nb_ofi_lane *lane, const struct nb_lane_config *config, struct nb_error *err) {
    struct nb_sockaddr source = config->bind.len != 0 ? config->bind : config->boot->self;
    int rc = -EADDRINUSE;
    struct nb_error why = {0};
    for (uint32_t port = config->ports.low; rc == -EADDRINUSE && port <= config->ports.high; port++) {
        why = (struct nb_error){0};
        nb_sock_set_port(&source, (uint16_t)port);
        rc = open_at(lane, config->provider, &source, &why);
    }
    if (rc == -EADDRINUSE && config->ports.low != 0) {
        return nb_fail(err, rc, "lane %d: no port of %u-%u is free", lane->base.index, config->ports.low,
                       config->ports.high);
    }
    return rc < 0 ? nb_fail(err, rc, "%s", why.text) : 0;
}

static int register_memory(struct nb_ofi_lane *lane, void *base, size_t bytes, uint64_t access, struct fid_mr **mr) {
    int rc = -FI_ENOKEY;
    // Random keys collide only if the provider uses short ones.
    for (int tries = 0; rc == -FI_ENOKEY && tries < 8; tries++) {
        uint64_t key = 0;
        if (lane->own_keys && (rc = nb_random(&key, sizeof key)) < 0) {
            return rc;
        }
        rc = fi_mr_reg(lane->domain, base, bytes, access, 0, key & lane->key_mask, 0, mr, NULL);
    }
    if (rc == 0 && lane->endpoint_mr) {
        rc = fi_mr_bind(*mr, &lane->ep->fid, 0);
        if (rc == 0) {
            rc = fi_mr_enable(*mr);
        }
        if (rc < 0) {
            close_fid(&(*mr)->fid);
            *mr = NULL; // else closing the lane would close it again
        }
    }
    return rc;
}

int nb_ofi_register_local(struct nb_ofi_lane *lane, void *base, size_t bytes, uint64_t access, struct fid_mr **mr,
                          struct nb_error *err) {
    *mr = NULL;
    if (!lane->local) {
        return 0;
    }
    int rc = register_memory(lane, base, bytes, access, mr);
    return rc < 0 ? nb_fail(err, rc, "lane %d: register %zu bytes with %s: %s", lane->base.index, bytes, lane->name,
                            lane->lib.strerror(-rc))
                  : 0;
}

int nb_ofi_map(struct nb_lane *base_lane, void *base, size_t bytes, struct nb_region *region, struct nb_error *err) {
    struct nb_ofi_lane *lane = nb_ofi_lane_of(base_lane);
    if (lane->dead) {
        return nb_fail(err, NB_ECLOSED, "lane %d is closed", lane->base.index);
    }
    struct nb_ofi_region *made = calloc(1, sizeof *made);
    if (made == NULL) {
        return nb_fail(err, -ENOMEM, "lane %d: cannot allocate a region", lane->base.index);
    }
    int rc = register_memory(lane, base, bytes, FI_SEND | FI_RECV | FI_WRITE | FI_REMOTE_WRITE, &made->mr);
    if (rc < 0) {
        free(made);
        return nb_fail(err, rc, "lane %d: map %zu bytes with %s: %s", lane->base.index, bytes, lane->name,
                       lane->lib.strerror(-rc));
    }
    made->desc = fi_mr_desc(made->mr);
    nb_list_init(&made->link);
    nb_list_insert(&lane->regions, &made->link);
    region->handle = made;
    region->key = fi_mr_key(made->mr);
    region->addr = lane->virtual_addr ? (uint64_t)(uintptr_t)base : 0;
    return 0;
}

void nb_ofi_unmap(struct nb_lane *lane, struct nb_region *region) {
    (void)lane;
    struct nb_ofi_region *made = region->handle;
    if (made == NULL) {
        return;
    }
    close_fid(made->mr != NULL ? &made->mr->fid : NULL);
    nb_list_remove(&made->link);
    free(made);
    region->handle = NULL;
}

static int bounce_grow(struct nb_ofi_lane *lane, struct nb_ofi_bounce *bounce, size_t bytes) {
    close_fid(bounce->mr != NULL ? &bounce->mr->fid : NULL);
    free(bounce->memory);
    *bounce = (struct nb_ofi_bounce){0};
    size_t rounded = (bytes + 65535) & ~(size_t)65535;
    void *memory = aligned_alloc(4096, rounded);
    if (memory == NULL) {
        return -ENOMEM;
    }
    struct nb_error why = {0}; // the code is enough: the lane to the peer is lost with it
    int rc = nb_ofi_register_local(lane, memory, rounded, FI_WRITE, &bounce->mr, &why);
    if (rc < 0) {
        free(memory);
        return rc;
    }
    bounce->memory = memory;
    bounce->bytes = rounded;
    return 0;
}

int nb_ofi_bounce_take(struct nb_ofi_lane *lane, const struct nb_request *request, struct nb_ofi_bounce **bounce) {
    struct nb_ofi_bounce *taken = NULL;
    for (int i = 0; i < NB_OFI_BOUNCES && taken == NULL; i++) {
        taken = lane->bounces[i].busy ? NULL : &lane->bounces[i];
    }
    if (taken == NULL) {
        return -EAGAIN;
    }
    size_t bytes = 0;
    for (int i = 0; i < request->iov_count; i++) {
        bytes += request->iov[i].iov_len;
    }
    if (taken->bytes < bytes) {
        int rc = bounce_grow(lane, taken, bytes);
        if (rc < 0) {
            return rc;
        }
    }
    char *to = taken->memory;
    for (int i = 0; i < request->iov_count; i++) {
        memcpy(to, request->iov[i].iov_base, request->iov[i].iov_len);
        to += request->iov[i].iov_len;
    }
    taken->used = bytes;
    taken->busy = true;
    *bounce = taken;
    return 0;
}

#else
typedef int nb_ofi_endpoint_is_empty; // ISO C wants a declaration in every file
#endif
