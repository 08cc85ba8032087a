// Staging: chunks of pinned memory as state machines, in queues in the order of the streams.
#include "cuda/staging.h"

#include <assert.h>
#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "base/arena.h"
#include "base/error.h"
#include "base/list.h"
#include "cuda/driver.h"

enum state {
    REFUSED, // the table's answer to an event that a state does not allow
    FREE,
    LEAVING,   // copy to the host under way
    DISCARDED, // the same, of a transfer that was cancelled
    ARRIVED,
    TAKEN,     // the user's
    RETURNING, // copy to the device under way
    STATES
};

enum event { GRANT, COPIED, TAKE, RETURN, CANCEL, EVENTS };

static const unsigned char next_state[STATES][EVENTS] = {
    [FREE] = {[GRANT] = LEAVING},
    [LEAVING] = {[COPIED] = ARRIVED, [CANCEL] = DISCARDED},
    [DISCARDED] = {[COPIED] = FREE},
    [ARRIVED] = {[TAKE] = TAKEN, [CANCEL] = FREE},
    [TAKEN] = {[RETURN] = RETURNING, [CANCEL] = FREE},
    [RETURNING] = {[COPIED] = FREE, [CANCEL] = RETURNING},
};

struct slot {
    struct nb_list link; // FREE: free; LEAVING, DISCARDED: leaving; RETURNING: returning; ARRIVED: the transfer's
    enum state state;
    struct CUevent_st *copied; // recorded after the slot's last copy
    unsigned char *memory;
    size_t offset_bytes;
    size_t bytes;
    uint64_t owner;                       // the number of the transfer that had it last
    struct nb_staging_transfer *transfer; // while LEAVING
};

struct nb_staging {
    const struct nb_cuda_device *device;
    struct nb_staging_config config;
    struct nb_arena arena;
    bool registered;
    bool unseen; // a copy is under way whose event could not be recorded
    uint64_t transfers;
    struct nb_list free;
    struct nb_list leaving;   // in the order of `out`
    struct nb_list returning; // in the order of `back`
    struct nb_list waiting;   // transfers that have bytes to be granted
    struct nb_error failure;
    struct slot slots[];
};

static struct slot *slot_of(struct nb_list *link) {
    return NB_CONTAINER(link, struct slot, link);
}

static bool allows(const struct slot *slot, enum event event) {
    return next_state[slot->state][event] != REFUSED;
}

static void step(struct slot *slot, enum event event) {
    assert(allows(slot, event));
    slot->state = (enum state)next_state[slot->state][event];
}

static int check(struct nb_staging *staging, unsigned result, const char *call, size_t bytes) {
    return nb_cuda_check(staging->device, result, call, bytes, &staging->failure);
}

// Begins a function of the user: the failure that sticks, or the context made current.
static int begin(struct nb_staging *staging, struct nb_error *err) {
    int rc = staging->failure.code;
    if (rc == 0) {
        rc = nb_cuda_enter(staging->device, &staging->failure);
    }
    return rc < 0 ? nb_fail(err, rc, "%s", staging->failure.text) : 0;
}

static int end(struct nb_staging *staging, int rc, struct nb_error *err) {
    nb_cuda_leave(staging->device);
    return rc < 0 ? nb_fail(err, rc, "%s", staging->failure.text) : rc;
}

static void move(struct nb_list *list, struct slot *slot) {
    nb_list_remove(&slot->link);
    nb_list_insert(list, &slot->link);
}

static int create_events(struct nb_staging *staging) {
    const struct nb_cuda_driver *driver = staging->device->driver;
    int rc = 0;
    for (int i = 0; rc == 0 && i < staging->config.chunks; i++) {
        struct slot *slot = &staging->slots[i];
        nb_list_init(&slot->link);
        move(&staging->free, slot);
        slot->state = FREE;
        slot->memory = (unsigned char *)staging->arena.base + (size_t)i * staging->config.chunk_bytes;
        rc = check(staging, driver->event_create(&slot->copied, NB_CUDA_EVENT_DISABLE_TIMING), "cuEventCreate", 0);
    }
    return rc;
}

static int prepare(struct nb_staging *staging) {
    const struct nb_cuda_driver *driver = staging->device->driver;
    const size_t bytes = staging->config.chunk_bytes * (size_t)staging->config.chunks;
    int rc = nb_arena_open(&staging->arena, bytes, &staging->failure);
    if (rc < 0 || (rc = nb_cuda_enter(staging->device, &staging->failure)) < 0) {
        return rc;
    }
    rc = check(staging, driver->host_register(staging->arena.base, staging->arena.bytes, NB_CUDA_HOST_PORTABLE),
               "cuMemHostRegister", staging->arena.bytes);
    staging->registered = rc == 0;
    rc = rc < 0 ? rc : create_events(staging);
    nb_cuda_leave(staging->device);
    return rc;
}

int nb_staging_open(struct nb_staging **staging, const struct nb_cuda_device *device,
                    const struct nb_staging_config *config, struct nb_error *err) {
    if (config->chunks <= 0 || config->chunk_bytes == 0 || config->chunk_bytes > SIZE_MAX / (size_t)config->chunks) {
        return nb_fail(err, -EINVAL, "CUDA: staging of %d chunks of %zu bytes", config->chunks, config->chunk_bytes);
    }
    struct nb_staging *made = calloc(1, sizeof *made + (size_t)config->chunks * sizeof made->slots[0]);
    if (made == NULL) {
        return nb_fail(err, -ENOMEM, "CUDA: staging of %d chunks: %m", config->chunks);
    }
    made->device = device;
    made->config = *config;
    nb_list_init(&made->free);
    nb_list_init(&made->leaving);
    nb_list_init(&made->returning);
    nb_list_init(&made->waiting);
    int rc = prepare(made);
    if (rc < 0) {
        nb_fail(err, rc, "%s", made->failure.text);
        nb_staging_close(made);
        return rc;
    }
    *staging = made;
    return 0;
}

// Waits for both streams. False if the driver cannot tell that the device has left the memory alone.
static bool settle_streams(const struct nb_staging *staging) {
    const struct nb_cuda_driver *driver = staging->device->driver;
    bool right = driver->stream_synchronize(staging->config.out) == NB_CUDA_SUCCESS;
    return driver->stream_synchronize(staging->config.back) == NB_CUDA_SUCCESS && right;
}

void nb_staging_close(struct nb_staging *staging) {
    if (staging == NULL) {
        return;
    }
    const struct nb_cuda_driver *driver = staging->device->driver;
    struct nb_error ignored = {0};
    bool ours = !staging->registered; // nothing of the device may reach the memory any more
    if (nb_cuda_enter(staging->device, &ignored) == 0) {
        bool idle = nb_list_empty(&staging->leaving) && nb_list_empty(&staging->returning) && !staging->unseen;
        bool settled = idle || settle_streams(staging);
        for (int i = 0; i < staging->config.chunks; i++) {
            if (staging->slots[i].copied != NULL) {
                (void)driver->event_destroy(staging->slots[i].copied);
            }
        }
        if (staging->registered && settled) {
            ours = driver->host_unregister(staging->arena.base) == NB_CUDA_SUCCESS;
        }
        nb_cuda_leave(staging->device);
    }
    if (ours) { // else it is kept for good: a late copy must not reach memory of another use
        nb_arena_close(&staging->arena);
    }
    free(staging);
}

int nb_staging_start(struct nb_staging *staging, struct nb_staging_transfer *transfer,
                     const struct nb_staging_request *request, struct nb_error *err) {
    if (staging->failure.code < 0) {
        return nb_fail(err, staging->failure.code, "%s", staging->failure.text);
    }
    if (request->fence == NULL) {
        return nb_fail(err, -EINVAL, "CUDA: a transfer of %zu bytes without a fence", request->bytes);
    }
    *transfer =
        (struct nb_staging_transfer){.done = request->bytes == 0, .number = ++staging->transfers, .request = *request};
    nb_list_init(&transfer->waiting);
    nb_list_init(&transfer->arrived);
    if (!transfer->done) {
        nb_list_insert(&staging->waiting, &transfer->waiting);
    }
    return 0;
}

// Records that a slot's copy is under way on a stream.
static int record(struct nb_staging *staging, struct slot *slot, struct CUstream_st *stream) {
    int rc = check(staging, staging->device->driver->event_record(slot->copied, stream), "cuEventRecord", slot->bytes);
    staging->unseen = staging->unseen || rc < 0;
    return rc;
}

static int grant(struct nb_staging *staging, struct nb_staging_transfer *transfer, struct slot *slot) {
    const struct nb_staging_request *request = &transfer->request;
    const size_t rest = request->bytes - transfer->granted_bytes;
    slot->offset_bytes = transfer->granted_bytes;
    slot->bytes = rest < staging->config.chunk_bytes ? rest : staging->config.chunk_bytes;
    slot->owner = transfer->number;
    slot->transfer = transfer;
    unsigned result = staging->device->driver->copy_to_host(slot->memory, request->buffer + slot->offset_bytes,
                                                            slot->bytes, staging->config.out);
    int rc = check(staging, result, "cuMemcpyDtoHAsync", slot->bytes);
    if (rc < 0 || (rc = record(staging, slot, staging->config.out)) < 0) {
        return rc;
    }
    step(slot, GRANT);
    transfer->granted_bytes += slot->bytes;
    move(&staging->leaving, slot);
    return 0;
}

// Grants memory to transfers in order. Returns how many chunks were granted.
static int grant_all(struct nb_staging *staging) {
    int granted = 0;
    while (!nb_list_empty(&staging->waiting) && !nb_list_empty(&staging->free)) {
        struct nb_staging_transfer *transfer = NB_CONTAINER(staging->waiting.next, struct nb_staging_transfer, waiting);
        if (!transfer->fenced) {
            int rc = check(staging, staging->device->driver->event_query(transfer->request.fence), "cuEventQuery", 0);
            if (rc < 0) {
                return rc == -EAGAIN ? granted : rc;
            }
            transfer->fenced = true;
        }
        int rc = grant(staging, transfer, slot_of(staging->free.next));
        if (rc < 0) {
            return rc;
        }
        granted++;
        if (transfer->granted_bytes == transfer->request.bytes) {
            nb_list_remove(&transfer->waiting);
        }
    }
    return granted;
}

// Copies of one stream are done in its order, so the first that is not done ends the search. Returns how many are done.
static int collect(struct nb_staging *staging, struct nb_list *queue) {
    int done = 0;
    while (!nb_list_empty(queue)) {
        struct slot *slot = slot_of(queue->next);
        int rc = check(staging, staging->device->driver->event_query(slot->copied), "cuEventQuery", 0);
        if (rc < 0) {
            return rc == -EAGAIN ? done : rc;
        }
        step(slot, COPIED);
        move(slot->state == ARRIVED ? &slot->transfer->arrived : &staging->free, slot);
        done++;
    }
    return done;
}

int nb_staging_poll(struct nb_staging *staging, struct nb_error *err) {
    int rc = begin(staging, err);
    if (rc < 0) {
        return rc;
    }
    int arrived = collect(staging, &staging->leaving);
    int freed = arrived < 0 ? arrived : collect(staging, &staging->returning);
    int granted = freed < 0 ? freed : grant_all(staging);
    return end(staging, granted < 0 ? granted : arrived + freed + granted, err);
}

int nb_staging_take(struct nb_staging *staging, struct nb_staging_transfer *transfer, struct nb_staging_chunk *chunk,
                    struct nb_error *err) {
    if (staging->failure.code < 0) {
        return nb_fail(err, staging->failure.code, "%s", staging->failure.text);
    }
    if (nb_list_empty(&transfer->arrived)) {
        return 0;
    }
    struct slot *slot = slot_of(transfer->arrived.next);
    nb_list_remove(&slot->link);
    step(slot, TAKE);
    *chunk = (struct nb_staging_chunk){
        .index = (int)(slot - staging->slots),
        .offset_bytes = slot->offset_bytes,
        .bytes = slot->bytes,
        .memory = slot->memory,
    };
    return 1;
}

static int give_back(struct nb_staging *staging, struct nb_staging_transfer *transfer, struct slot *slot) {
    const struct nb_cuda_driver *driver = staging->device->driver;
    const struct nb_staging_request *request = &transfer->request;
    unsigned result =
        driver->copy_to_device(request->buffer + slot->offset_bytes, slot->memory, slot->bytes, staging->config.back);
    int rc = check(staging, result, "cuMemcpyHtoDAsync", slot->bytes);
    if (rc < 0 || (rc = record(staging, slot, staging->config.back)) < 0) {
        return rc;
    }
    step(slot, RETURN);
    move(&staging->returning, slot);
    transfer->returned_bytes += slot->bytes;
    if (transfer->returned_bytes < request->bytes) {
        return 0;
    }
    // The last copy's event stands for all: copies back are on one stream. A later record does not change this wait.
    rc = check(staging, driver->stream_wait_event(request->caller, slot->copied, 0), "cuStreamWaitEvent",
               request->bytes);
    transfer->done = rc == 0;
    return rc;
}

int nb_staging_return(struct nb_staging *staging, struct nb_staging_transfer *transfer, int index,
                      struct nb_error *err) {
    if (index < 0 || index >= staging->config.chunks || !allows(&staging->slots[index], RETURN) ||
        staging->slots[index].owner != transfer->number) {
        return nb_fail(err, -EINVAL, "CUDA: chunk %d was not handed out to this transfer", index);
    }
    int rc = begin(staging, err);
    return rc < 0 ? rc : end(staging, give_back(staging, transfer, &staging->slots[index]), err);
}

// Makes the caller's stream wait for a transfer's copies. False if the driver refuses.
static bool fence_copies(const struct nb_staging *staging, const struct nb_staging_transfer *transfer) {
    bool right = !staging->unseen;
    for (int i = 0; right && i < staging->config.chunks; i++) {
        const struct slot *slot = &staging->slots[i];
        bool copies = slot->state == LEAVING || slot->state == RETURNING;
        if (copies && slot->owner == transfer->number) {
            right = staging->device->driver->stream_wait_event(transfer->request.caller, slot->copied, 0) ==
                    NB_CUDA_SUCCESS;
        }
    }
    return right;
}

void nb_staging_cancel(struct nb_staging *staging, struct nb_staging_transfer *transfer) {
    struct nb_error ignored = {0};
    if (transfer->done) {
        return;
    }
    if (transfer->granted_bytes > 0 && nb_cuda_enter(staging->device, &ignored) == 0) {
        if (!fence_copies(staging, transfer)) {
            (void)settle_streams(staging);
        }
        nb_cuda_leave(staging->device);
    }
    for (int i = 0; i < staging->config.chunks; i++) {
        struct slot *slot = &staging->slots[i];
        if (slot->owner == transfer->number && allows(slot, CANCEL)) {
            step(slot, CANCEL);
            if (slot->state == FREE) {
                move(&staging->free, slot);
            }
        }
    }
    nb_list_remove(&transfer->waiting);
    transfer->done = true;
}
