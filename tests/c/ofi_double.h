// Test double of libfabric inside this process; it replaces nb_ofi_lib_open (linked with --wrap). Its one provider has
// rules of EFA and verbs that no IP provider has. Memory must be registered before use, bound to its endpoint and
// enabled. The provider chooses the keys. Completion data have 4 bytes. A violation of these rules fails the test.
// Writes overtake each other and messages, completions are delayed, and calls fail on request.
#ifndef NB_TESTS_OFI_DOUBLE_H
#define NB_TESTS_OFI_DOUBLE_H

#include <pthread.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifndef CHECK
#include "check.h"
#endif
#include "transport/ofi_lib.h"

enum { DOUBLE_INJECT = 48, DOUBLE_IOV = 2, DOUBLE_ENTRIES = 4096, DOUBLE_EVENTS_MAX = 48, DOUBLE_NAME = 16 };

enum double_kind { DOUBLE_FABRIC, DOUBLE_DOMAIN, DOUBLE_AV, DOUBLE_CQ, DOUBLE_EP, DOUBLE_MR };

// Calls that can fail on request, by their names in libfabric.
enum double_call {
    DOUBLE_NONE,
    DOUBLE_GETINFO,
    DOUBLE_OPEN, // any object
    DOUBLE_BIND, // of an endpoint
    DOUBLE_ENABLE,
    DOUBLE_MR_BIND,
    DOUBLE_MR_ENABLE,
    DOUBLE_RECV,
    DOUBLE_INSERT,
    DOUBLE_WRITE_DONE, // a write, by its completion
    DOUBLE_CALLS
};

struct double_receive {
    struct double_receive *next;
    void *buf;
    size_t len;
    void *context;
};

struct double_entry {
    struct fi_cq_data_entry entry;
    int code; // 0 or an error
};

struct double_object {
    union {
        struct fid fid;
        struct fid_fabric fabric;
        struct fid_domain domain;
        struct fid_av av;
        struct fid_cq cq;
        struct fid_ep ep;
        struct fid_mr mr;
    } fid;
    enum double_kind kind;
    bool open;
    bool enabled;                // endpoints, memory
    struct double_object *next;  // in the list of all objects, open and closed
    struct double_object *above; // its parent, which must be closed later
    struct double_object *bound; // endpoint: its completion queue. Memory: its endpoint
    struct double_object *av;
    uint64_t id; // endpoint: its address
    struct double_receive *receives;
    struct double_entry *entries; // completion queue
    int count;
    unsigned char *base; // memory
    size_t bytes;
    uint64_t access;
};

struct double_event {
    struct double_event *next;
    struct double_object *from; // NULL: an unauthenticated sender
    uint64_t to;
    bool is_write;
    bool completed; // the sender has its completion
    int delay;
    uint64_t flags;
    void *context; // NULL: no completion requested
    uint64_t data;
    uint64_t addr;
    uint64_t key;
    struct iovec iov[DOUBLE_IOV]; // source memory, read when the write lands
    size_t iov_count;
    size_t bytes;
    unsigned char *copy; // or a copy of the data
};

struct double_state {
    pthread_mutex_t lock;
    bool on; // else the real library is used
    uint64_t random;
    int delay_max;
    bool send_blocked; // sends return -FI_EAGAIN
    size_t data_bytes; // of completion data
    size_t memory_max; // larger memory cannot be registered; 0: no limit
    uint64_t ids;
    enum double_call fail;
    int fail_at; // fails at this call from now on; 0: never
    bool failed;
    uint64_t writes; // writes that have landed
    struct double_object *objects;
    struct double_event *events;
};

static struct double_state double_state = {.lock = PTHREAD_MUTEX_INITIALIZER};

// Replaces libfabric by the double from now on.
static inline void double_begin(uint64_t seed, size_t data_bytes) {
    double_state.on = true;
    double_state.random = seed * 2 + 1;
    double_state.delay_max = (int)(seed % 4) * 3;
    double_state.data_bytes = data_bytes;
    double_state.fail_at = 0;
    double_state.failed = false;
    double_state.memory_max = 0;
    double_state.send_blocked = false;
}

// Larger memory cannot be registered from now on; 0: no limit. May be called while ranks run.
static inline void double_limit_memory(size_t bytes) {
    pthread_mutex_lock(&double_state.lock);
    double_state.memory_max = bytes;
    pthread_mutex_unlock(&double_state.lock);
}

// The nth call of this kind from now on fails.
static inline void double_fail(enum double_call call, int nth) {
    double_state.fail = call;
    double_state.fail_at = nth;
    double_state.failed = false;
}

// Ends the use of the double and checks that every object is closed.
static inline void double_end(void) {
    double_state.on = false;
    double_state.fail_at = 0;
    while (double_state.events != NULL) {
        struct double_event *event = double_state.events;
        double_state.events = event->next;
        free(event->copy);
        free(event);
    }
    while (double_state.objects != NULL) {
        struct double_object *object = double_state.objects;
        CHECK(!object->open, "libfabric object of kind %d is left open", (int)object->kind);
        double_state.objects = object->next;
        while (object->receives != NULL) {
            struct double_receive *receive = object->receives;
            object->receives = receive->next;
            free(receive);
        }
        free(object->entries);
        free(object);
    }
}

static inline uint32_t double_draw(uint32_t below) {
    double_state.random = double_state.random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((double_state.random >> 33) % below);
}

static inline bool double_fails(enum double_call call) {
    if (double_state.fail_at == 0 || double_state.fail != call || --double_state.fail_at > 0) {
        return false;
    }
    double_state.failed = true;
    return true;
}

static inline struct double_object *double_of(void *fid, enum double_kind kind) {
    struct double_object *object = fid;
    CHECK(object != NULL && object->kind == kind && object->open, "object %p is used after it was closed", fid);
    return object;
}

static inline struct double_object *double_find(uint64_t id) {
    struct double_object *at = double_state.objects;
    while (at != NULL && !(at->kind == DOUBLE_EP && at->open && at->enabled && at->id == id)) {
        at = at->next;
    }
    return at;
}

// Adds a completion. Those of sends and writes are reordered at random; those of received messages stay in order.
static inline void double_complete(struct double_object *ep, void *context, uint64_t flags, size_t len, uint64_t data,
                                   int code) {
    struct double_object *cq = ep->bound;
    CHECK(cq->count < DOUBLE_ENTRIES, "the completion queue is full");
    int at = cq->count;
    bool sent = (flags & (FI_RECV | FI_REMOTE_WRITE)) == 0;
    for (; sent && at > 0 && double_draw(2) == 0; at--) {
        cq->entries[at] = cq->entries[at - 1];
    }
    uint64_t mask = double_state.data_bytes >= sizeof data ? UINT64_MAX : UINT32_MAX;
    cq->entries[at].entry =
        (struct fi_cq_data_entry){.op_context = context, .flags = flags, .len = len, .data = data & mask};
    cq->entries[at].code = code;
    cq->count++;
}

static inline void double_report(struct double_event *event, int code) {
    if (event->context != NULL && !event->completed) {
        uint64_t flags = event->is_write ? FI_RMA | FI_WRITE : FI_MSG | FI_SEND;
        double_complete(event->from, event->context, flags, event->bytes, 0, code);
    }
    event->completed = true;
}

// Finds enabled memory of an endpoint by its key. Peers address it by offset, as without FI_MR_VIRT_ADDR.
static inline struct double_object *double_find_memory(const struct double_object *ep, uint64_t key) {
    for (struct double_object *at = double_state.objects; at != NULL; at = at->next) {
        if (at->kind == DOUBLE_MR && at->open && at->enabled && at->bound == ep && at->fid.mr.key == key) {
            return at;
        }
    }
    return NULL;
}

static inline void double_check_local(const struct double_object *ep, const void *desc, const void *buf, size_t len,
                                      uint64_t access) {
    const struct double_object *mr = desc;
    CHECK(mr != NULL && mr->kind == DOUBLE_MR && mr->open && mr->enabled && mr->bound == ep,
          "%zu bytes are used without a registration", len);
    const unsigned char *at = buf;
    CHECK(at >= mr->base && at + len <= mr->base + mr->bytes, "memory outside the registration is used");
    CHECK((mr->access & access) != 0, "memory was registered for %llx, not %llx", (unsigned long long)mr->access,
          (unsigned long long)access);
}

static inline void double_read(const struct double_event *event, unsigned char *to) {
    size_t at = 0;
    if (event->copy != NULL && event->bytes > 0) {
        memcpy(to, event->copy, event->bytes);
        return;
    }
    for (size_t i = 0; i < event->iov_count; i++) {
        memcpy(to + at, event->iov[i].iov_base, event->iov[i].iov_len);
        at += event->iov[i].iov_len;
    }
}

static inline void double_write_lands(struct double_event *event, struct double_object *to) {
    struct double_object *mr = event->bytes > 0 ? double_find_memory(to, event->key) : NULL;
    bool inside = mr != NULL && event->addr <= mr->bytes && event->bytes <= mr->bytes - event->addr;
    if (event->bytes > 0 && (!inside || (mr->access & FI_REMOTE_WRITE) == 0)) {
        double_report(event, FI_EACCES);
        return;
    }
    if (event->from != NULL && event->context != NULL && double_fails(DOUBLE_WRITE_DONE)) {
        double_report(event, FI_EIO);
        return;
    }
    if (event->bytes > 0) {
        double_read(event, mr->base + event->addr);
        double_state.writes++;
    }
    if ((event->flags & FI_REMOTE_CQ_DATA) != 0) {
        double_complete(to, NULL, FI_RMA | FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA, event->bytes, event->data, 0);
    }
    double_report(event, 0);
}

// False: no receive is posted.
static inline bool double_message_lands(struct double_event *event, struct double_object *to) {
    struct double_receive *receive = to->receives;
    if (receive == NULL) {
        return false;
    }
    to->receives = receive->next;
    bool fits = event->bytes <= receive->len;
    if (fits) {
        double_read(event, receive->buf);
    }
    double_complete(to, receive->context, FI_MSG | FI_RECV | (event->flags & FI_REMOTE_CQ_DATA), event->bytes,
                    event->data, fits ? 0 : FI_ETRUNC);
    double_report(event, 0);
    free(receive);
    return true;
}

// True if an earlier message between the same endpoints is still in flight.
static inline bool double_blocked(const struct double_event *event) {
    for (const struct double_event *at = double_state.events; at != event; at = at->next) {
        if (!at->is_write && at->from == event->from && at->to == event->to) {
            return true;
        }
    }
    return false;
}

// Delivers an event if it is due. Returns true if it is finished.
static inline bool double_deliver(struct double_event *event) {
    struct double_object *to = double_find(event->to);
    if (event->delay-- > 0) {
        return false;
    }
    event->delay = 0;
    if (to == NULL) {
        double_report(event, FI_ECONNRESET);
        return true;
    }
    if (event->is_write) {
        double_write_lands(event, to);
        return true;
    }
    return !double_blocked(event) && double_message_lands(event, to);
}

static inline void double_progress(void) {
    for (struct double_event **at = &double_state.events; *at != NULL;) {
        struct double_event *event = *at;
        if (double_deliver(event)) {
            *at = event->next;
            free(event->copy);
            free(event);
        } else {
            at = &event->next;
        }
    }
}

static inline struct double_event *double_event_new(struct double_object *from, uint64_t to, size_t bytes,
                                                    bool copied) {
    struct double_event *event = calloc(1, sizeof *event);
    CHECK(event != NULL, "memory");
    event->from = from;
    event->to = to;
    event->bytes = bytes;
    event->delay = (int)double_draw((uint32_t)double_state.delay_max + 1);
    event->copy = copied ? malloc(bytes + 1) : NULL;
    CHECK(!copied || event->copy != NULL, "memory");
    return event;
}

static inline void double_post(struct double_event *event) {
    struct double_event **end = &double_state.events;
    while (*end != NULL) {
        end = &(*end)->next;
    }
    *end = event;
}

static inline bool double_busy(const struct double_object *ep) {
    int count = 0;
    for (const struct double_event *at = double_state.events; at != NULL; at = at->next) {
        count += at->from == ep;
    }
    return count >= DOUBLE_EVENTS_MAX || double_draw(9) == 0;
}

// Send as an unauthenticated endpoint: an empty write with these completion data, or a message.
static inline void double_arrive(uint64_t to, uint64_t data, uint64_t flags) {
    pthread_mutex_lock(&double_state.lock);
    struct double_event *event = double_event_new(NULL, to, 0, true);
    event->is_write = true;
    event->data = data;
    event->flags = flags;
    double_post(event);
    pthread_mutex_unlock(&double_state.lock);
}

static inline void double_send_message(uint64_t to, const void *data, size_t bytes) {
    pthread_mutex_lock(&double_state.lock);
    struct double_event *event = double_event_new(NULL, to, bytes, true);
    memcpy(event->copy, data, bytes);
    double_post(event);
    pthread_mutex_unlock(&double_state.lock);
}

// Function tables

static inline int double_no_bind(struct fid *fid, struct fid *to, uint64_t flags) {
    (void)fid;
    (void)to;
    (void)flags;
    return -FI_ENOSYS;
}

static inline int double_no_control(struct fid *fid, int command, void *arg) {
    (void)fid;
    (void)command;
    (void)arg;
    return -FI_ENOSYS;
}

static inline int double_close(struct fid *fid) {
    struct double_object *object = (struct double_object *)(void *)fid;
    pthread_mutex_lock(&double_state.lock);
    CHECK(object->open, "a libfabric object of kind %d is closed twice", (int)object->kind);
    for (const struct double_object *at = double_state.objects; at != NULL; at = at->next) {
        bool uses = at->above == object || ((at->bound == object || at->av == object) && object->kind != DOUBLE_EP);
        CHECK(!at->open || !uses, "an object of kind %d is closed before one of kind %d that uses it",
              (int)object->kind, (int)at->kind);
    }
    object->open = false;
    for (struct double_event **at = &double_state.events; *at != NULL && object->kind == DOUBLE_EP;) {
        struct double_event *event = *at;
        if (event->from == object) {
            *at = event->next;
            free(event->copy);
            free(event);
        } else {
            at = &event->next;
        }
    }
    pthread_mutex_unlock(&double_state.lock);
    return 0;
}

static inline struct double_object *double_new(enum double_kind kind, struct double_object *above,
                                               const struct fi_ops *ops) {
    struct double_object *object = calloc(1, sizeof *object);
    CHECK(object != NULL, "memory");
    object->kind = kind;
    object->open = true;
    object->above = above;
    object->fid.fid.ops = (struct fi_ops *)(uintptr_t)ops;
    object->next = double_state.objects;
    double_state.objects = object;
    return object;
}

static const struct fi_ops double_plain_ops = {
    .size = sizeof double_plain_ops, .close = double_close, .bind = double_no_bind, .control = double_no_control};

// Memory

static inline int double_mr_bind(struct fid *fid, struct fid *to, uint64_t flags) {
    (void)flags;
    pthread_mutex_lock(&double_state.lock);
    bool fails = double_fails(DOUBLE_MR_BIND);
    if (!fails) {
        double_of(fid, DOUBLE_MR)->bound = double_of(to, DOUBLE_EP);
    }
    pthread_mutex_unlock(&double_state.lock);
    return fails ? -FI_ENOMEM : 0;
}

static inline int double_mr_control(struct fid *fid, int command, void *arg) {
    (void)arg;
    pthread_mutex_lock(&double_state.lock);
    struct double_object *mr = double_of(fid, DOUBLE_MR);
    CHECK(command == FI_ENABLE && mr->bound != NULL, "memory is enabled before it is bound");
    bool fails = double_fails(DOUBLE_MR_ENABLE);
    mr->enabled = !fails;
    pthread_mutex_unlock(&double_state.lock);
    return fails ? -FI_ENOMEM : 0;
}

static inline int double_mr_reg(struct fid *fid, const void *buf, size_t len, uint64_t access, uint64_t offset,
                                uint64_t requested_key, uint64_t flags, struct fid_mr **mr, void *context) {
    static const struct fi_ops ops = {
        .size = sizeof ops, .close = double_close, .bind = double_mr_bind, .control = double_mr_control};
    (void)offset;
    (void)requested_key; // the provider chooses the keys
    (void)flags;
    (void)context;
    pthread_mutex_lock(&double_state.lock);
    bool fails = (double_state.memory_max > 0 && len > double_state.memory_max) || double_fails(DOUBLE_OPEN);
    if (!fails) {
        struct double_object *made = double_new(DOUBLE_MR, double_of(fid, DOUBLE_DOMAIN), &ops);
        made->base = (unsigned char *)(uintptr_t)buf;
        made->bytes = len;
        made->access = access;
        made->fid.mr.key = 0x1000 + 7 * ++double_state.ids;
        made->fid.mr.mem_desc = made;
        *mr = &made->fid.mr;
    }
    pthread_mutex_unlock(&double_state.lock);
    return fails ? -FI_ENOMEM : 0;
}

// Addresses

static inline int double_av_insert(struct fid_av *av, const void *addr, size_t count, fi_addr_t *fi_addr,
                                   uint64_t flags, void *context) {
    uint64_t id = 0;
    (void)flags;
    (void)context;
    pthread_mutex_lock(&double_state.lock);
    (void)double_of(av, DOUBLE_AV);
    bool fails = double_fails(DOUBLE_INSERT) || count != 1;
    pthread_mutex_unlock(&double_state.lock);
    memcpy(&id, addr, sizeof id);
    *fi_addr = id;
    return fails ? -FI_ENOMEM : 1;
}

static inline int double_av_open(struct fid_domain *domain, struct fi_av_attr *attr, struct fid_av **av,
                                 void *context) {
    static struct fi_ops_av ops = {.size = sizeof ops, .insert = double_av_insert};
    (void)attr;
    (void)context;
    pthread_mutex_lock(&double_state.lock);
    bool fails = double_fails(DOUBLE_OPEN);
    if (!fails) {
        struct double_object *made = double_new(DOUBLE_AV, double_of(domain, DOUBLE_DOMAIN), &double_plain_ops);
        made->fid.av.ops = &ops;
        *av = &made->fid.av;
    }
    pthread_mutex_unlock(&double_state.lock);
    return fails ? -FI_ENOMEM : 0;
}

// Completion queues

static inline ssize_t double_cq_read(struct fid_cq *fid, void *buf, size_t count) {
    struct fi_cq_data_entry *out = buf;
    pthread_mutex_lock(&double_state.lock);
    struct double_object *cq = double_of(fid, DOUBLE_CQ);
    double_progress();
    size_t n = 0;
    bool late = double_state.delay_max > 0 && double_draw(3) == 0;
    while (!late && n < count && (int)n < cq->count && cq->entries[n].code == 0) {
        out[n] = cq->entries[n].entry;
        n++;
    }
    bool bad = !late && n == 0 && cq->count > 0;
    cq->count -= (int)n;
    memmove(cq->entries, cq->entries + n, (size_t)cq->count * sizeof cq->entries[0]);
    pthread_mutex_unlock(&double_state.lock);
    return bad ? -FI_EAVAIL : n > 0 ? (ssize_t)n : -FI_EAGAIN;
}

static inline ssize_t double_cq_readerr(struct fid_cq *fid, struct fi_cq_err_entry *out, uint64_t flags) {
    (void)flags;
    pthread_mutex_lock(&double_state.lock);
    struct double_object *cq = double_of(fid, DOUBLE_CQ);
    bool any = cq->count > 0 && cq->entries[0].code != 0;
    if (any) {
        const struct fi_cq_data_entry *entry = &cq->entries[0].entry;
        *out = (struct fi_cq_err_entry){
            .op_context = entry->op_context, .flags = entry->flags, .len = entry->len, .err = cq->entries[0].code};
        memmove(cq->entries, cq->entries + 1, (size_t)--cq->count * sizeof cq->entries[0]);
    }
    pthread_mutex_unlock(&double_state.lock);
    return any ? 1 : -FI_EAGAIN;
}

static inline int double_cq_open(struct fid_domain *domain, struct fi_cq_attr *attr, struct fid_cq **cq,
                                 void *context) {
    static struct fi_ops_cq ops = {.size = sizeof ops, .read = double_cq_read, .readerr = double_cq_readerr};
    (void)context;
    if (attr->wait_obj != FI_WAIT_NONE) {
        return -FI_ENOSYS; // it must be polled: there is no wait object
    }
    pthread_mutex_lock(&double_state.lock);
    bool fails = double_fails(DOUBLE_OPEN);
    if (!fails) {
        struct double_object *made = double_new(DOUBLE_CQ, double_of(domain, DOUBLE_DOMAIN), &double_plain_ops);
        made->entries = calloc(DOUBLE_ENTRIES, sizeof made->entries[0]);
        CHECK(made->entries != NULL && attr->format == FI_CQ_FORMAT_DATA, "open a completion queue");
        made->fid.cq.ops = &ops;
        *cq = &made->fid.cq;
    }
    pthread_mutex_unlock(&double_state.lock);
    return fails ? -FI_ENOMEM : 0;
}

// Endpoints

static inline int double_ep_bind(struct fid *fid, struct fid *to, uint64_t flags) {
    struct double_object *other = (struct double_object *)(void *)to;
    (void)flags;
    pthread_mutex_lock(&double_state.lock);
    struct double_object *ep = double_of(fid, DOUBLE_EP);
    bool fails = double_fails(DOUBLE_BIND);
    if (!fails && other->kind == DOUBLE_CQ) {
        ep->bound = double_of(to, DOUBLE_CQ);
    } else if (!fails) {
        ep->av = double_of(to, DOUBLE_AV);
    }
    pthread_mutex_unlock(&double_state.lock);
    return fails ? -FI_ENOMEM : 0;
}

static inline int double_ep_control(struct fid *fid, int command, void *arg) {
    (void)arg;
    pthread_mutex_lock(&double_state.lock);
    struct double_object *ep = double_of(fid, DOUBLE_EP);
    CHECK(command == FI_ENABLE && ep->bound != NULL && ep->av != NULL, "an endpoint is enabled before it is bound");
    bool fails = double_fails(DOUBLE_ENABLE);
    ep->enabled = !fails;
    pthread_mutex_unlock(&double_state.lock);
    return fails ? -FI_EIO : 0;
}

static inline int double_getname(fid_t fid, void *addr, size_t *bytes) {
    const struct double_object *ep = double_of(fid, DOUBLE_EP);
    CHECK(*bytes >= DOUBLE_NAME, "the buffer is too small for the name");
    memset(addr, 0, DOUBLE_NAME);
    memcpy(addr, &ep->id, sizeof ep->id);
    *bytes = DOUBLE_NAME;
    return 0;
}

static inline ssize_t double_recv(struct fid_ep *fid, void *buf, size_t len, void *desc, fi_addr_t from,
                                  void *context) {
    (void)from;
    pthread_mutex_lock(&double_state.lock);
    struct double_object *ep = double_of(fid, DOUBLE_EP);
    bool fails = double_fails(DOUBLE_RECV);
    if (!fails) {
        double_check_local(ep, desc, buf, len, FI_RECV);
        struct double_receive *receive = malloc(sizeof *receive);
        CHECK(receive != NULL, "memory");
        *receive = (struct double_receive){.buf = buf, .len = len, .context = context};
        struct double_receive **end = &ep->receives;
        while (*end != NULL) {
            end = &(*end)->next;
        }
        *end = receive;
    }
    pthread_mutex_unlock(&double_state.lock);
    return fails ? -FI_EIO : 0;
}

static inline ssize_t double_send(struct fid_ep *fid, const void *buf, size_t len, void *desc, fi_addr_t to,
                                  void *context) {
    pthread_mutex_lock(&double_state.lock);
    struct double_object *ep = double_of(fid, DOUBLE_EP);
    bool busy = double_state.send_blocked || double_busy(ep);
    if (!busy) {
        double_check_local(ep, desc, buf, len, FI_SEND);
        struct double_event *event = double_event_new(ep, to, len, false);
        event->iov[0] = (struct iovec){.iov_base = (void *)(uintptr_t)buf, .iov_len = len};
        event->iov_count = 1;
        event->context = context;
        double_post(event);
    }
    pthread_mutex_unlock(&double_state.lock);
    return busy ? -FI_EAGAIN : 0;
}

static inline ssize_t double_inject(struct fid_ep *fid, const void *buf, size_t len, fi_addr_t to) {
    pthread_mutex_lock(&double_state.lock);
    struct double_object *ep = double_of(fid, DOUBLE_EP);
    bool busy = double_state.send_blocked || double_busy(ep);
    CHECK(len <= DOUBLE_INJECT, "%zu bytes are injected", len);
    if (!busy) {
        struct double_event *event = double_event_new(ep, to, len, true);
        memcpy(event->copy, buf, len);
        double_post(event);
    }
    pthread_mutex_unlock(&double_state.lock);
    return busy ? -FI_EAGAIN : 0;
}

static inline ssize_t double_writemsg(struct fid_ep *fid, const struct fi_msg_rma *msg, uint64_t flags) {
    pthread_mutex_lock(&double_state.lock);
    struct double_object *ep = double_of(fid, DOUBLE_EP);
    bool busy = double_busy(ep);
    bool landing = (flags & FI_DELIVERY_COMPLETE) != 0;
    size_t bytes = 0;
    CHECK(msg->iov_count <= DOUBLE_IOV && msg->rma_iov_count <= 1, "%zu local pieces", msg->iov_count);
    for (size_t i = 0; i < msg->iov_count; i++) {
        double_check_local(ep, msg->desc[i], msg->msg_iov[i].iov_base, msg->msg_iov[i].iov_len, FI_WRITE);
        bytes += msg->msg_iov[i].iov_len;
    }
    if (!busy) {
        struct double_event *event = double_event_new(ep, msg->addr, bytes, !landing);
        event->is_write = true;
        event->iov_count = msg->iov_count;
        memcpy(event->iov, msg->msg_iov, msg->iov_count * sizeof event->iov[0]);
        if (!landing) { // complete on send: it may land much later
            unsigned char *copy = event->copy;
            event->copy = NULL;
            double_read(event, copy);
            event->copy = copy;
        }
        event->flags = flags;
        event->data = msg->data;
        event->context = msg->context;
        event->addr = msg->rma_iov_count > 0 ? msg->rma_iov[0].addr : 0;
        event->key = msg->rma_iov_count > 0 ? msg->rma_iov[0].key : 0;
        if (!landing) {
            double_report(event, 0);
        }
        double_post(event);
    }
    pthread_mutex_unlock(&double_state.lock);
    return busy ? -FI_EAGAIN : 0;
}

static inline int double_endpoint(struct fid_domain *domain, struct fi_info *info, struct fid_ep **ep, void *context) {
    static const struct fi_ops ops = {
        .size = sizeof ops, .close = double_close, .bind = double_ep_bind, .control = double_ep_control};
    static struct fi_ops_cm cm = {.size = sizeof cm, .getname = double_getname};
    static struct fi_ops_msg msg = {
        .size = sizeof msg, .recv = double_recv, .send = double_send, .inject = double_inject};
    static struct fi_ops_rma rma = {.size = sizeof rma, .writemsg = double_writemsg};
    (void)info;
    (void)context;
    pthread_mutex_lock(&double_state.lock);
    bool fails = double_fails(DOUBLE_OPEN);
    if (!fails) {
        struct double_object *made = double_new(DOUBLE_EP, double_of(domain, DOUBLE_DOMAIN), &ops);
        made->id = ++double_state.ids;
        made->fid.ep.cm = &cm;
        made->fid.ep.msg = &msg;
        made->fid.ep.rma = &rma;
        *ep = &made->fid.ep;
    }
    pthread_mutex_unlock(&double_state.lock);
    return fails ? -FI_ENOMEM : 0;
}

static inline int double_domain(struct fid_fabric *fabric, struct fi_info *info, struct fid_domain **domain,
                                void *context) {
    static struct fi_ops_domain ops = {
        .size = sizeof ops, .av_open = double_av_open, .cq_open = double_cq_open, .endpoint = double_endpoint};
    static struct fi_ops_mr mr = {.size = sizeof mr, .reg = double_mr_reg};
    (void)info;
    (void)context;
    pthread_mutex_lock(&double_state.lock);
    bool fails = double_fails(DOUBLE_OPEN);
    if (!fails) {
        struct double_object *made = double_new(DOUBLE_DOMAIN, double_of(fabric, DOUBLE_FABRIC), &double_plain_ops);
        made->fid.domain.ops = &ops;
        made->fid.domain.mr = &mr;
        *domain = &made->fid.domain;
    }
    pthread_mutex_unlock(&double_state.lock);
    return fails ? -FI_ENOMEM : 0;
}

static inline int double_fabric(struct fi_fabric_attr *attr, struct fid_fabric **fabric, void *context) {
    static struct fi_ops_fabric ops = {.size = sizeof ops, .domain = double_domain};
    (void)attr;
    (void)context;
    pthread_mutex_lock(&double_state.lock);
    bool fails = double_fails(DOUBLE_OPEN);
    if (!fails) {
        struct double_object *made = double_new(DOUBLE_FABRIC, NULL, &double_plain_ops);
        made->fid.fabric.ops = &ops;
        *fabric = &made->fid.fabric;
    }
    pthread_mutex_unlock(&double_state.lock);
    return fails ? -FI_ENOMEM : 0;
}

// The library

// An fi_info and the structures that it points to, in one allocation.
struct double_info {
    struct fi_info info;
    struct fi_tx_attr tx;
    struct fi_rx_attr rx;
    struct fi_ep_attr ep;
    struct fi_domain_attr domain;
    struct fi_fabric_attr fabric;
};

static inline struct fi_info *double_dupinfo(const struct fi_info *from) {
    struct double_info *made = calloc(1, sizeof *made);
    CHECK(made != NULL, "memory");
    if (from != NULL) {
        made->info = *from;
        made->tx = *from->tx_attr;
        made->rx = *from->rx_attr;
        made->ep = *from->ep_attr;
        made->domain = *from->domain_attr;
        made->fabric = *from->fabric_attr;
        made->fabric.prov_name = from->fabric_attr->prov_name != NULL ? strdup(from->fabric_attr->prov_name) : NULL;
    }
    made->info.next = NULL;
    made->info.tx_attr = &made->tx;
    made->info.rx_attr = &made->rx;
    made->info.ep_attr = &made->ep;
    made->info.domain_attr = &made->domain;
    made->info.fabric_attr = &made->fabric;
    return &made->info;
}

static inline void double_freeinfo(struct fi_info *info) {
    free(info->fabric_attr->prov_name);
    free(info);
}

static inline int double_getinfo(uint32_t version, const char *node, const char *service, uint64_t flags,
                                 const struct fi_info *hints, struct fi_info **info) {
    const char *name = hints->fabric_attr->prov_name;
    (void)version;
    (void)node;
    (void)service;
    (void)flags;
    if (double_fails(DOUBLE_GETINFO) || (name != NULL && strcmp(name, "efa") != 0) ||
        hints->domain_attr->cq_data_size > double_state.data_bytes) {
        return -FI_ENODATA;
    }
    *info = double_dupinfo(hints);
    free((*info)->fabric_attr->prov_name);
    (*info)->fabric_attr->prov_name = strdup("efa");
    (*info)->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
    (*info)->domain_attr->mr_key_size = sizeof(uint32_t);
    (*info)->domain_attr->cq_data_size = double_state.data_bytes;
    (*info)->tx_attr->iov_limit = DOUBLE_IOV;
    (*info)->tx_attr->inject_size = DOUBLE_INJECT;
    return 0;
}

static inline uint32_t double_version(void) {
    return FI_VERSION(1, 17);
}

static inline const char *double_strerror(int error) {
    return error == FI_ENOMEM ? "the double's own failure" : "an error";
}

int __real_nb_ofi_lib_open(struct nb_ofi_lib *lib, const char *library, struct nb_error *err);
int __wrap_nb_ofi_lib_open(struct nb_ofi_lib *lib, const char *library, struct nb_error *err);

int __wrap_nb_ofi_lib_open(struct nb_ofi_lib *lib, const char *library, struct nb_error *err) {
    if (!double_state.on) {
        return __real_nb_ofi_lib_open(lib, library, err);
    }
    *lib = (struct nb_ofi_lib){.getinfo = double_getinfo,
                               .freeinfo = double_freeinfo,
                               .dupinfo = double_dupinfo,
                               .fabric = double_fabric,
                               .version = double_version,
                               .strerror = double_strerror,
                               .path = "double"};
    return 0;
}

#endif
