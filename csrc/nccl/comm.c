// Comms: listen, connect, accept, and the transfers of one direction between two processes (see net.h).
#include <errno.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/list.h"
#include "base/loop.h"
#include "base/sha256.h"
#include "base/sock.h"
#include "nccl/abi.h"
#include "nccl/net.h"
#include "nccl/request.h"
#include "transport/lanes.h"

enum {
    HANDLE_MAGIC = 0x4e424e48,
    LINE_BYTES = 128 // of NCCL's protocol LL128
};

// A message over the control connection that arrived before its receive was posted.
struct kept {
    struct nb_list link;
    size_t bytes;
    char data[];
};

// Sending

static struct nb_net_request *oldest(const struct nb_list *requests) {
    return nb_list_empty(requests) ? NULL : NB_CONTAINER(requests->next, struct nb_net_request, link);
}

static void count_inline(struct nb_net_comm *comm) {
    comm->run += comm->run < NB_NET_RUN;
}

static void send_inline(struct nb_net_comm *comm, struct nb_net_request *request) {
    struct nb_link *link = comm->link;
    count_inline(comm);
    nb_link_send(link, comm->id, 0, request->data, request->bytes);
    if (link->failing) {
        return; // it fails with the link
    }
    if (link->out_bytes == 0) {
        nb_request_finish(request, NB_REQUEST_DONE);
        return;
    }
    request->end = link->put_bytes;
    nb_list_remove(&request->link);
    nb_list_insert(&comm->writing, &request->link);
}

static bool over_control(struct nb_link *link, size_t bytes) {
    return bytes <= NB_NET_INLINE || (bytes <= NB_NET_LONE && nb_link_alone(link));
}

// Takes the oldest grant for a send.
static void send_granted(struct nb_net_comm *comm, struct nb_net_request *request) {
    struct nb_link *link = comm->link;
    size_t capacity = comm->grants[comm->grant_head];
    comm->grant_head = (comm->grant_head + 1) % NB_NET_REQUESTS;
    comm->grant_count--;
    if (request->bytes > capacity) {
        struct nb_error why = {0};
        nb_fail(&why, -EMSGSIZE, "a send of %zu bytes to %s exceeds its receive of %zu", request->bytes, link->peer,
                capacity);
        nb_link_fail(link, &why);
    } else if (over_control(link, request->bytes)) {
        send_inline(comm, request);
    } else {
        uint64_t op = ++link->next_op;
        comm->run = 0;
        nb_link_send(link, comm->id, op, NULL, request->bytes);
        nb_request_flow(link, request, op);
    }
}

// Sends what may leave.
static void match(struct nb_net_comm *comm) {
    struct nb_net_request *request = oldest(&comm->waiting);
    while (request != NULL && !comm->link->failing) {
        if (comm->grant_count > 0) {
            send_granted(comm, request);
        } else if (comm->early < NB_NET_EARLY && over_control(comm->link, request->bytes)) {
            comm->early++;
            send_inline(comm, request);
        } else {
            break;
        }
        request = oldest(&comm->waiting);
    }
    if (request != NULL && comm->early < NB_NET_EARLY && comm->run >= NB_NET_RUN && !comm->link->failing) {
        comm->run = 0;
        nb_link_want(comm->link, comm->id);
    }
}

static void grants_release(struct nb_net_comm *comm) {
    for (unsigned i = 0; i < comm->held_back_count; i++) {
        nb_link_grant(comm->link, comm->id, comm->held_back[i], i + 1 < comm->held_back_count);
    }
    comm->held_back_count = 0;
}

// spare: as for nb_link_grant.
static void grant(struct nb_net_comm *comm, size_t bytes, bool spare) {
    if (comm->run < NB_NET_RUN) {
        nb_link_grant(comm->link, comm->id, bytes, spare);
        return;
    }
    comm->held_back[comm->held_back_count++] = bytes;
    if (comm->held_back_count == NB_NET_HELD_BACK) {
        grants_release(comm);
    }
}

// What a link reports

static struct nb_net_comm *comm_find(const struct nb_link *link, uint32_t id) {
    NB_LIST_EACH(it, &link->comms) {
        struct nb_net_comm *comm = NB_CONTAINER(it, struct nb_net_comm, at_link);
        if (comm->id == id) {
            return comm;
        }
    }
    return NULL;
}

static struct nb_net_comm *comm_new(struct nb_net *net, struct nb_link *link, bool sends) {
    struct nb_net_comm *comm = calloc(1, sizeof *comm);
    if (comm == NULL) {
        return NULL;
    }
    comm->net = net;
    comm->link = link;
    comm->sends = sends;
    nb_list_init(&comm->at_listener);
    nb_list_init(&comm->idle);
    nb_list_init(&comm->waiting);
    nb_list_init(&comm->kept);
    nb_list_init(&comm->active);
    nb_list_init(&comm->writing);
    nb_list_init(&comm->memories);
    for (int i = 0; i < NB_NET_REQUESTS; i++) {
        comm->requests[i].comm = comm;
        nb_list_insert(&comm->idle, &comm->requests[i].link);
    }
    nb_list_insert(&link->comms, &comm->at_link);
    return comm;
}

static bool overlaps(const struct nb_net_memory *memory, const char *data, size_t bytes) {
    return data < memory->base + memory->bytes && memory->base < data + bytes;
}

// Another registration on the link that overlaps: with the same base only, or one that is mapped.
static struct nb_net_memory *memory_other(const struct nb_net_memory *memory, bool same_base) {
    NB_LIST_EACH(it, &memory->comm->link->comms) {
        const struct nb_net_comm *comm = NB_CONTAINER(it, const struct nb_net_comm, at_link);
        NB_LIST_EACH(at, &comm->memories) {
            struct nb_net_memory *other = NB_CONTAINER(at, struct nb_net_memory, at_comm);
            bool found =
                same_base ? other->base == memory->base : other->mapped && overlaps(other, memory->base, memory->bytes);
            if (other != memory && found) {
                return other;
            }
        }
    }
    return NULL;
}

// Transfers of memory that is not mapped are copied, which is slower. The log has each reason once.
static void memory_unmapped(struct nb_net *net, size_t bytes, const struct nb_error *why) {
    char text[NB_ERROR_TEXT];
    if (net->unmapped_code == why->code) {
        return;
    }
    net->unmapped_code = why->code;
    if (why->code == -ENOSPC) {
        snprintf(text, sizeof text, "a link has no room to register more memory: transfers of the rest are copied");
    } else {
        snprintf(text, sizeof text,
                 "memory of %zu bytes is not registered, so its transfers are copied (%.300s): is the limit of locked "
                 "memory too low (ulimit -l)?",
                 bytes, why->text);
    }
    nb_net_log(net, NCCL_LOG_INFO, text);
}

// Comms of a link may register the same memory: it is mapped once, and the last one unmaps it.
static void memory_map(struct nb_net_memory *memory) {
    const struct nb_link *link = memory->comm->link;
    struct nb_error why = {0};
    if (link != NULL && !link->failing && memory_other(memory, false) == NULL) {
        memory->mapped = nb_lanes_map(link->lanes, memory->base, memory->bytes, &why) == 0;
    }
    if (why.code != 0) {
        memory_unmapped(memory->net, memory->bytes, &why);
    }
}

static void memory_unmap(struct nb_net_memory *memory) {
    const struct nb_link *link = memory->comm->link;
    struct nb_net_memory *heir = memory->mapped && link != NULL ? memory_other(memory, true) : NULL;
    if (heir != NULL) {
        heir->mapped = true;
    } else if (memory->mapped && link != NULL) {
        nb_lanes_unmap(link->lanes, memory->base);
    }
    nb_list_remove(&memory->at_comm);
    memory->comm = NULL;
}

static void comm_free(struct nb_net_comm *comm) {
    struct nb_link *link = comm->link;
    NB_LIST_EACH_SAFE(it, nx, &comm->memories) {
        memory_unmap(NB_CONTAINER(it, struct nb_net_memory, at_comm));
    }
    nb_list_remove(&comm->at_link);
    nb_list_remove(&comm->at_listener);
    if (link != NULL) {
        nb_link_release(link);
    }
    NB_LIST_EACH_SAFE(it, nx, &comm->kept) {
        free(NB_CONTAINER(it, struct kept, link));
    }
    for (int i = 0; i < NB_NET_REQUESTS; i++) {
        free(comm->requests[i].long_map);
    }
    free(comm);
}

static bool link_opened(struct nb_link *link, uint32_t id, uint64_t listener_id) {
    struct nb_net_listener *listener = nb_links_listener(link->net, listener_id);
    if (comm_find(link, id) != NULL) {
        return false;
    }
    struct nb_net_comm *comm = listener != NULL ? comm_new(link->net, link, false) : NULL;
    if (comm == NULL) {
        nb_link_close_comm(link, id); // NCCL has closed the listening comm meanwhile
        return true;
    }
    comm->id = id;
    listener->failure = (struct nb_error){0};
    nb_list_insert(&listener->incoming, &comm->at_listener);
    return true;
}

static bool link_granted(struct nb_link *link, uint32_t id, uint64_t bytes) {
    struct nb_net_comm *comm = comm_find(link, id);
    if (comm == NULL) {
        return true; // closed here
    }
    if (comm->early > 0) {
        comm->early--; // its send has left
        match(comm);
        return true;
    }
    if (comm->grant_count == NB_NET_REQUESTS) {
        return false;
    }
    comm->grants[(comm->grant_head + comm->grant_count++) % NB_NET_REQUESTS] = bytes;
    match(comm);
    return true;
}

// Copies into memory that a GPU may poll meanwhile. With LL128, the last 8 bytes of a line say that the others are there:
// they are stored after those, and at once.
static void copy_lines(char *to, const char *from, size_t bytes) {
    size_t at = 0;
    for (; (uintptr_t)to % LINE_BYTES == 0 && bytes - at >= LINE_BYTES; at += LINE_BYTES) {
        uint64_t flag;
        uint64_t *end = (void *)(to + at + LINE_BYTES - sizeof flag);
        memcpy(&flag, from + at + LINE_BYTES - sizeof flag, sizeof flag);
        memcpy(to + at, from + at, LINE_BYTES - sizeof flag);
        __atomic_store_n(end, flag, __ATOMIC_RELEASE);
    }
    memcpy(to + at, from + at, bytes - at);
}

static void link_wanted(struct nb_link *link, uint32_t id) {
    struct nb_net_comm *comm = comm_find(link, id);
    if (comm != NULL) {
        comm->run = 0;
        grants_release(comm);
    }
}

// Keeps a message until its receive is posted. False: the peer has sent more than it may.
static bool keep(struct nb_net_comm *comm, const void *data, size_t bytes) {
    if (comm->kept_count == NB_NET_EARLY) {
        return false;
    }
    struct kept *kept = malloc(sizeof *kept + bytes);
    if (kept == NULL) {
        nb_request_no_memory(comm->link, bytes);
        return true;
    }
    kept->bytes = bytes;
    memcpy(kept->data, data, bytes);
    nb_list_insert(&comm->kept, &kept->link);
    comm->kept_count++;
    return true;
}

static void too_long(struct nb_net_comm *comm, const struct nb_net_request *request, size_t bytes) {
    struct nb_error why = {0};
    nb_fail(&why, -EMSGSIZE, "a send of %zu bytes from %s exceeds its receive of %zu", bytes, comm->link->peer,
            request->bytes);
    nb_link_fail(comm->link, &why);
}

// Gives a receive the oldest message that was kept.
static void kept_take(struct nb_net_comm *comm, struct nb_net_request *request) {
    struct kept *kept = NB_CONTAINER(comm->kept.next, struct kept, link);
    nb_list_remove(&kept->link);
    comm->kept_count--;
    if (kept->bytes <= request->bytes) {
        copy_lines(request->data, kept->data, kept->bytes);
        request->bytes = kept->bytes;
        nb_request_finish(request, NB_REQUEST_DONE);
    } else if (comm->link != NULL) {
        too_long(comm, request, kept->bytes);
    } else {
        comm->failure = (struct nb_error){0};
        nb_fail(&comm->failure, -EMSGSIZE, "a send of %zu bytes exceeds its receive of %zu", kept->bytes,
                request->bytes);
        nb_net_log(comm->net, NCCL_LOG_WARN, comm->failure.text);
        comm->logged = true;
        nb_request_finish(request, NB_REQUEST_FAILED);
    }
    free(kept);
}

static bool link_sent(struct nb_link *link, uint32_t id, uint64_t op, size_t bytes, const void *data) {
    struct nb_net_comm *comm = comm_find(link, id);
    if (data == NULL && (op <= link->next_op || bytes == 0)) {
        return false;
    }
    link->next_op = data == NULL ? op : link->next_op;
    if (comm == NULL || comm->ended) {
        return data != NULL || nb_sink_start(link, op, bytes);
    }
    struct nb_net_request *request = oldest(&comm->waiting);
    if (data == NULL) {
        comm->run = 0;
        grants_release(comm);
    } else {
        count_inline(comm);
    }
    if (request == NULL) {
        return data != NULL && keep(comm, data, bytes);
    }
    if (bytes > request->bytes) {
        too_long(comm, request, bytes);
        return true;
    }
    request->bytes = bytes;
    if (data == NULL) {
        nb_request_flow(link, request, op);
        return true;
    }
    copy_lines(request->data, data, bytes);
    nb_request_finish(request, NB_REQUEST_DONE);
    return true;
}

static char *link_arriving(struct nb_link *link, uint32_t id, size_t total, const void *data, size_t bytes) {
    struct nb_net_comm *comm = comm_find(link, id);
    struct nb_net_request *request = comm != NULL && !comm->ended ? oldest(&comm->waiting) : NULL;
    if (request == NULL || total > request->bytes) {
        return NULL;
    }
    request->bytes = total;
    copy_lines(request->data, data, bytes);
    request->flow = (struct nb_flow){.moved_ns = nb_now_ns()}; // no blocks: it is not on the lanes
    nb_list_remove(&request->link);
    nb_list_insert(&comm->active, &request->link);
    comm->arriving = request;
    return request->data + bytes;
}

static void link_arrived(struct nb_link *link, uint32_t id) {
    struct nb_net_comm *comm = comm_find(link, id);
    if (comm != NULL && comm->arriving != NULL) {
        count_inline(comm);
        nb_request_finish(comm->arriving, NB_REQUEST_DONE);
        comm->arriving = NULL;
    }
}

// Fails the receive that an inline send is landing in. The rest is dropped.
static void arriving_abort(struct nb_net_comm *comm) {
    nb_link_drop(comm->link);
    nb_request_finish(comm->arriving, NB_REQUEST_FAILED);
    comm->arriving = NULL;
}

static void requests_fail(struct nb_list *requests) {
    NB_LIST_EACH_SAFE(it, nx, requests) {
        nb_request_finish(NB_CONTAINER(it, struct nb_net_request, link), NB_REQUEST_FAILED);
    }
}

static void link_closed(struct nb_link *link, uint32_t id) {
    struct nb_net_comm *comm = comm_find(link, id);
    if (comm == NULL) {
        return;
    }
    comm->ended = true;
    nb_fail(&comm->failure, NB_EPEER, "%s has closed its end of the connection", link->peer);
    if (!nb_list_empty(&comm->waiting)) {
        nb_net_log(link->net, NCCL_LOG_WARN, comm->failure.text);
        comm->logged = true;
    }
    requests_fail(&comm->waiting); // active ones fail with the link, or end
}

static void link_written(struct nb_link *link) {
    NB_LIST_EACH(it, &link->comms) {
        const struct nb_net_comm *comm = NB_CONTAINER(it, const struct nb_net_comm, at_link);
        struct nb_net_request *request = oldest(&comm->writing);
        while (request != NULL && request->end <= link->put_bytes - link->out_bytes) {
            nb_request_finish(request, NB_REQUEST_DONE);
            request = oldest(&comm->writing);
        }
    }
}

static bool link_all_closed(const struct nb_link *link) {
    NB_LIST_EACH(it, &link->comms) {
        if (!NB_CONTAINER(it, const struct nb_net_comm, at_link)->ended) {
            return false;
        }
    }
    return true;
}

static void link_ended(struct nb_link *link) {
    bool logged = link->failure.code != NB_ECLOSED && (link->flows > 0 || !link_all_closed(link));
    if (logged) {
        nb_net_log(link->net, NCCL_LOG_WARN, link->failure.text); // before any request shows it
    }
    nb_sinks_drop(link);
    NB_LIST_EACH_SAFE(it, nx, &link->comms) {
        struct nb_net_comm *comm = NB_CONTAINER(it, struct nb_net_comm, at_link);
        nb_list_remove(it);
        comm->link = NULL;
        comm->arriving = NULL;
        comm->ended = true;
        comm->logged = comm->logged || logged;
        nb_fail(&comm->failure, link->failure.code == NB_ECLOSED ? (int)NB_EPEER : link->failure.code, "%s",
                link->failure.text);
        requests_fail(&comm->waiting);
        requests_fail(&comm->active);
        requests_fail(&comm->writing);
    }
}

static void link_expire(struct nb_net *net, int64_t now) {
    int64_t limit_ns = (int64_t)net->settings.timeout_ms * 1000000;
    NB_LIST_EACH_SAFE(it, nx, &net->connecting) {
        struct nb_net_comm *comm = NB_CONTAINER(it, struct nb_net_comm, at_listener);
        int64_t asked = comm->asked_ns > net->resumed_ns ? comm->asked_ns : net->resumed_ns;
        if (now - asked > limit_ns) {
            comm_free(comm);
        }
    }
}

static struct nb_link_activity link_activity(const struct nb_link *link) {
    struct nb_link_activity activity = {.first = UINT64_MAX};
    NB_LIST_EACH(it, &link->comms) {
        const struct nb_net_comm *comm = NB_CONTAINER(it, struct nb_net_comm, at_link);
        activity.pending = activity.pending || !nb_list_empty(&comm->waiting) || !nb_list_empty(&comm->active) ||
                           !nb_list_empty(&comm->writing);
        NB_LIST_EACH(at, &comm->active) {
            const struct nb_net_request *request = NB_CONTAINER(at, struct nb_net_request, link);
            int64_t moved = request == comm->arriving ? link->heard_ns : request->flow.moved_ns;
            activity.moved_ns = moved > activity.moved_ns ? moved : activity.moved_ns;
            bool arrives = request->flow.dir == NB_FLOW_IN && request->flow.bytes_moved > 0;
            activity.heard_ns = arrives && moved > activity.heard_ns ? moved : activity.heard_ns;
            if (request->flow.op < activity.first) {
                activity.first = request->flow.op;
                activity.first_moved_ns = moved;
            }
        }
    }
    if (activity.moved_ns != 0 && link->moved_ns > activity.moved_ns) {
        activity.moved_ns = link->moved_ns;
    }
    return activity;
}

const struct nb_link_up nb_comm_up = {.opened = link_opened,
                                      .granted = link_granted,
                                      .wanted = link_wanted,
                                      .sent = link_sent,
                                      .arriving = link_arriving,
                                      .arrived = link_arrived,
                                      .closed = link_closed,
                                      .written = link_written,
                                      .all_closed = link_all_closed,
                                      .ended = link_ended,
                                      .expire = link_expire,
                                      .activity = link_activity};

// Returns the failure of a comm, with its text if that is not in the log yet.
static int comm_failure(struct nb_net_comm *comm, struct nb_error *err) {
    if (!comm->logged) {
        *err = comm->failure;
        comm->logged = true;
    }
    return comm->failure.code;
}

// Keeps the helper thread away for a while.
static void count_call(struct nb_net *net) {
    atomic_fetch_add_explicit(&net->calls, 1, memory_order_relaxed);
}

// Opening

static void handle_set_address(struct nb_net_handle *handle, const struct nb_sockaddr *address) {
    handle->family = address->any.sa_family;
    handle->port = nb_sock_port(address);
    if (address->any.sa_family == AF_INET6) {
        memcpy(handle->address, &address->in6.sin6_addr, sizeof address->in6.sin6_addr);
    } else {
        memcpy(handle->address, &address->in4.sin_addr, sizeof address->in4.sin_addr);
    }
}

int nb_net_listen(struct nb_net *net, void *handle, struct nb_net_listener **out, struct nb_error *err) {
    struct nb_net_listener *listener = calloc(1, sizeof *listener);
    if (listener == NULL) {
        return nb_fail(err, -ENOMEM, "cannot allocate a listening comm");
    }
    struct nb_net_handle mine = {.magic = HANDLE_MAGIC, .process_number = (uint32_t)getpid()};
    listener->net = net;
    nb_list_init(&listener->incoming);
    pthread_mutex_lock(&net->lock);
    int rc = nb_random(listener->token, sizeof listener->token);
    rc = rc < 0 ? nb_fail(err, rc, "no random bytes") : nb_links_listen(net, err);
    if (rc == 0) {
        listener->id = ++net->next_id;
        net->users++;
        nb_list_insert(&net->listeners, &listener->at_net);
        handle_set_address(&mine, &net->address);
        nb_loop_wake(&net->sleep);
    }
    pthread_mutex_unlock(&net->lock);
    if (rc < 0) {
        free(listener);
        return rc;
    }
    mine.listener = listener->id;
    memcpy(mine.process, net->process, sizeof mine.process);
    memcpy(mine.token, listener->token, sizeof mine.token);
    memset(handle, 0, NCCL_HANDLE_BYTES);
    memcpy(handle, &mine, sizeof mine);
    *out = listener;
    return 0;
}

void nb_net_listener_close(struct nb_net_listener *listener) {
    struct nb_net *net = listener->net;
    if (!nb_net_is_mine(net)) {
        return;
    }
    pthread_mutex_lock(&net->lock);
    nb_list_remove(&listener->at_net);
    NB_LIST_EACH_SAFE(it, nx, &listener->incoming) {
        struct nb_net_comm *comm = NB_CONTAINER(it, struct nb_net_comm, at_listener);
        if (comm->link != NULL) {
            nb_link_close_comm(comm->link, comm->id);
        }
        comm_free(comm);
    }
    if (nb_list_empty(&net->listeners)) {
        nb_links_listen_end(net);
    }
    pthread_mutex_unlock(&net->lock);
    free(listener);
    nb_net_close(net);
}

static struct nb_net_comm *connecting_find(const struct nb_net *net, uint64_t number) {
    NB_LIST_EACH(it, &net->connecting) {
        struct nb_net_comm *comm = NB_CONTAINER(it, struct nb_net_comm, at_listener);
        if (number != 0 && comm->connecting == number) {
            return comm;
        }
    }
    return NULL;
}

static int connect_begin(struct nb_net *net, uint64_t domain, const struct nb_net_handle *handle,
                         struct nb_net_comm **out, struct nb_error *err) {
    struct nb_link *link = NULL;
    int rc = nb_link_find(net, domain, handle, &link, err);
    if (rc < 0) {
        return rc;
    }
    struct nb_net_comm *comm = comm_new(net, link, true);
    if (comm == NULL) {
        nb_link_release(link);
        return nb_fail(err, -ENOMEM, "cannot allocate a comm");
    }
    comm->id = ++link->next_comm;
    comm->to = *handle;
    comm->connecting = ++net->next_id;
    nb_list_insert(&net->connecting, &comm->at_listener);
    nb_loop_wake(&net->sleep); // the helper may sleep until something happens
    *out = comm;
    return 0;
}

int nb_net_connect(struct nb_net *net, uint64_t domain, void *opaque, struct nb_net_comm **out, struct nb_error *err) {
    struct nb_net_handle handle;
    memcpy(&handle, opaque, sizeof handle);
    if (handle.magic != HANDLE_MAGIC) {
        return nb_fail(err, -EINVAL, "the handle is not of this plugin: does the peer load it, too?");
    }
    int rc = 0;
    *out = NULL;
    count_call(net);
    pthread_mutex_lock(&net->lock);
    struct nb_net_comm *comm = connecting_find(net, handle.connecting);
    if (comm == NULL) {
        rc = connect_begin(net, domain, &handle, &comm, err);
        handle.connecting = rc == 0 ? comm->connecting : 0;
    }
    if (rc == 0) {
        comm->asked_ns = nb_now_ns();
    }
    nb_links_progress(net);
    if (rc == 0 && comm->ended) {
        rc = comm_failure(comm, err);
        comm_free(comm);
        handle.connecting = 0;
    } else if (rc == 0 && comm->link->state == NB_LINK_READY) {
        nb_link_open_comm(comm->link, comm->id, comm->to.listener);
        nb_list_remove(&comm->at_listener);
        net->users++;
        handle.connecting = 0;
        *out = comm;
    }
    pthread_mutex_unlock(&net->lock);
    memcpy(opaque, &handle, sizeof handle);
    return rc;
}

// Returns why the listener gets no comm: its peer's link has failed, and none has followed in time. 0: it may get one.
static int given_up(struct nb_net_listener *listener, struct nb_error *err) {
    const struct nb_net *net = listener->net;
    int64_t now = nb_now_ns();
    if (listener->failure.code == 0) {
        return 0;
    }
    if (nb_links_opening(net, listener->failed_process)) {
        listener->failed_ns = now;
    }
    int64_t since = listener->failed_ns > net->resumed_ns ? listener->failed_ns : net->resumed_ns;
    if (now - since <= (int64_t)net->settings.timeout_ms * 1000000) {
        return 0;
    }
    if (!listener->logged) {
        *err = listener->failure;
        listener->logged = true;
    }
    return listener->failure.code;
}

int nb_net_accept(struct nb_net_listener *listener, struct nb_net_comm **out, struct nb_error *err) {
    struct nb_net *net = listener->net;
    int rc = 0;
    *out = NULL;
    count_call(net);
    pthread_mutex_lock(&net->lock);
    nb_links_progress(net);
    NB_LIST_EACH_SAFE(it, nx, &listener->incoming) {
        struct nb_net_comm *comm = NB_CONTAINER(it, struct nb_net_comm, at_listener);
        bool ended = comm->link == NULL;
        if (*out == NULL && rc == 0 && ended && nb_list_empty(&comm->kept)) {
            rc = comm_failure(comm, err);
            comm_free(comm);
        } else if (*out == NULL && rc == 0 && (ended || comm->link->state == NB_LINK_READY)) {
            nb_list_remove(it);
            net->users++;
            *out = comm;
        }
    }
    if (*out == NULL && rc == 0 && nb_list_empty(&listener->incoming)) {
        rc = given_up(listener, err);
    }
    pthread_mutex_unlock(&net->lock);
    return rc;
}

// Memory

int nb_net_register(struct nb_net_comm *comm, void *data, size_t bytes, struct nb_net_memory **out,
                    struct nb_error *err) {
    struct nb_net_memory *memory = calloc(1, sizeof *memory);
    if (memory == NULL) {
        return nb_fail(err, -ENOMEM, "cannot allocate a registration");
    }
    *memory = (struct nb_net_memory){.net = comm->net, .comm = comm, .base = data, .bytes = bytes};
    pthread_mutex_lock(&comm->net->lock);
    memory_map(memory);
    nb_list_insert(&comm->memories, &memory->at_comm);
    pthread_mutex_unlock(&comm->net->lock);
    *out = memory;
    return 0;
}

static bool uses(const struct nb_list *requests, const struct nb_net_memory *memory) {
    NB_LIST_EACH(it, requests) {
        const struct nb_net_request *request = NB_CONTAINER(it, const struct nb_net_request, link);
        if (overlaps(memory, request->data, request->bytes)) {
            return true;
        }
    }
    return false;
}

// True if a flow of the comm uses the memory.
static bool on_lanes(const struct nb_net_comm *comm, const struct nb_net_memory *memory) {
    NB_LIST_EACH(it, &comm->active) {
        const struct nb_net_request *request = NB_CONTAINER(it, const struct nb_net_request, link);
        if (request->flow.blocks > 0 && overlaps(memory, request->data, request->bytes)) {
            return true;
        }
    }
    return false;
}

// True if bytes are on their way to or from the memory: on the comm, or, as it is mapped, on any of the link.
static bool in_flight(const struct nb_net_memory *memory) {
    const struct nb_link *link = memory->comm->link;
    if (on_lanes(memory->comm, memory)) {
        return true;
    }
    bool mapped = memory->mapped && link != NULL && memory_other(memory, true) == NULL;
    for (const struct nb_list *it = mapped ? link->comms.next : NULL; mapped && it != &link->comms; it = it->next) {
        if (on_lanes(NB_CONTAINER(it, const struct nb_net_comm, at_link), memory)) {
            return true;
        }
    }
    return false;
}

// Fails the link: its bytes cannot be called back.
static void cut_off(struct nb_net_comm *comm, const char *what) {
    struct nb_error why = {0};
    nb_fail(&why, NB_ECLOSED, "%s with a transfer in flight to or from %s, which ends all connections of that link",
            what, comm->link->peer);
    nb_link_fail(comm->link, &why);
    nb_links_progress(comm->net); // no byte lands after it
}

void nb_net_deregister(struct nb_net_memory *memory) {
    struct nb_net *net = memory->net;
    if (!nb_net_is_mine(net)) {
        return;
    }
    pthread_mutex_lock(&net->lock);
    struct nb_net_comm *comm = memory->comm;
    bool arriving = comm != NULL && comm->link != NULL && comm->arriving != NULL &&
                    overlaps(memory, comm->arriving->data, comm->arriving->bytes);
    if (arriving || (comm != NULL && uses(&comm->waiting, memory))) {
        comm->ended = true;
        nb_fail(&comm->failure, NB_ECLOSED, "the memory of a waiting transfer was deregistered");
        requests_fail(&comm->waiting);
    }
    if (arriving) {
        arriving_abort(comm);
    }
    if (comm != NULL && comm->link != NULL && in_flight(memory)) {
        cut_off(comm, "memory was deregistered");
    }
    if (comm != NULL) {
        memory_unmap(memory);
    }
    pthread_mutex_unlock(&net->lock);
    free(memory);
}

// Transfers

// Takes an idle request; *request NULL: none is idle.
static int request_take(struct nb_net_comm *comm, void *data, size_t bytes, struct nb_net_request **out,
                        struct nb_error *err) {
    *out = NULL;
    if (bytes > NB_NET_BYTES_MAX) {
        return nb_fail(err, -EINVAL, "a message of %zu bytes: at most %d are possible", bytes, NB_NET_BYTES_MAX);
    }
    if (comm->ended && nb_list_empty(&comm->kept)) { // a peer may close its end once its sends are done
        return comm_failure(comm, err);
    }
    struct nb_net_request *request = oldest(&comm->idle);
    if (request != NULL) {
        request->data = data;
        request->bytes = bytes;
        atomic_store_explicit(&request->state, NB_REQUEST_PENDING, memory_order_relaxed);
        nb_list_remove(&request->link);
        nb_list_insert(&comm->waiting, &request->link);
        *out = request;
    }
    return 0;
}

int nb_net_isend(struct nb_net_comm *comm, void *data, size_t bytes, struct nb_net_request **request,
                 struct nb_error *err) {
    count_call(comm->net);
    pthread_mutex_lock(&comm->net->lock);
    int rc = request_take(comm, data, bytes, request, err);
    if (*request != NULL) {
        atomic_fetch_add_explicit(&nb_net_counts[comm->net->kind].bytes, bytes, memory_order_relaxed);
        match(comm);
    }
    pthread_mutex_unlock(&comm->net->lock);
    return rc;
}

int nb_net_irecv(struct nb_net_comm *comm, void *data, size_t bytes, struct nb_net_request **request,
                 struct nb_error *err) {
    count_call(comm->net);
    pthread_mutex_lock(&comm->net->lock);
    bool kept = !nb_list_empty(&comm->kept);
    bool spare = !nb_list_empty(&comm->waiting);
    int rc = request_take(comm, data, bytes, request, err);
    if (*request != NULL && comm->link != NULL && !comm->ended) {
        comm->owed = kept ? (comm->owed + 1) % (NB_NET_EARLY / 2) : 0;
        grant(comm, bytes, spare || comm->owed > 0);
    }
    if (*request != NULL && kept) {
        kept_take(comm, *request);
    }
    pthread_mutex_unlock(&comm->net->lock);
    return rc;
}

int nb_net_test(struct nb_net_request *request, size_t *bytes, struct nb_error *err) {
    struct nb_net_comm *comm = request->comm;
    int state = atomic_load_explicit(&request->state, memory_order_acquire);
    if (state == NB_REQUEST_PENDING) {
        count_call(comm->net);
    }
    if (state == NB_REQUEST_PENDING && pthread_mutex_trylock(&comm->net->lock) == 0) {
        if (comm->link != NULL) {
            nb_link_poll(comm->link);
        }
        if (atomic_load_explicit(&request->state, memory_order_relaxed) == NB_REQUEST_PENDING) {
            nb_links_progress(comm->net);
        }
        pthread_mutex_unlock(&comm->net->lock);
        state = atomic_load_explicit(&request->state, memory_order_acquire);
    }
    if (state == NB_REQUEST_FAILED) {
        pthread_mutex_lock(&comm->net->lock);
        int rc = comm_failure(comm, err);
        pthread_mutex_unlock(&comm->net->lock);
        return rc;
    }
    if (state != NB_REQUEST_DONE) {
        return 0;
    }
    *bytes = request->bytes;
    atomic_store_explicit(&request->state, NB_REQUEST_IDLE, memory_order_relaxed);
    nb_list_insert(&comm->idle, &request->link);
    return 1;
}

void nb_net_comm_close(struct nb_net_comm *comm) {
    struct nb_net *net = comm->net;
    if (!nb_net_is_mine(net)) {
        return;
    }
    pthread_mutex_lock(&net->lock);
    if (comm->link != NULL) {
        nb_link_close_comm(comm->link, comm->id);
    }
    if (comm->link != NULL && comm->arriving != NULL) {
        arriving_abort(comm);
    }
    if (comm->link != NULL && !nb_list_empty(&comm->active)) {
        cut_off(comm, "a connection was closed");
    }
    comm_free(comm);
    pthread_mutex_unlock(&net->lock);
    nb_net_close(net);
}
