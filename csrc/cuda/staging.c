// Staging: chunks of pinned memory as state machines, in queues in the order of the streams.
#include "cuda/staging.h"

#include <assert.h>
#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "base/arena.h"
#include "base/error.h"
#include "base/list.h"
#include "cuda/driver.h"
#include "cuda/kernels.h"
#include "cuda/piece.h"

enum { GATHERED_MAX = 1024 }; // pieces of a chunk that one kernel copies

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
    struct nb_cuda_piece *gathered; // a list for a kernel, in pinned memory
    int gathered_count;
    size_t number; // in its transfer
    size_t slice_bytes;
    uint64_t owner;                       // the number of the transfer that had it last
    struct nb_staging_transfer *transfer; // while LEAVING
};

struct nb_staging {
    const struct nb_cuda_device *device;
    struct nb_staging_config config;
    struct nb_arena arena;
    bool registered;
    struct nb_error unpinned; // why not
    struct nb_cuda_kernels kernels;
    nb_cuda_address mapped;     // the device's address of the arena; 0: kernels are not used
    struct nb_error ungathered; // why not
    bool unseen;                // a copy is under way whose event could not be recorded
    uint64_t transfers;
    struct nb_list free;
    struct nb_list leaving;   // in the order of `out`
    struct nb_list returning; // in the order of `back`
    struct nb_list waiting;   // transfers that have bytes to be granted
    struct nb_error failure;
    unsigned capture_mode; // of the user's thread, inside one of its calls
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
        rc = nb_cuda_enter_relaxed(staging->device, &staging->capture_mode, &staging->failure);
    }
    return rc < 0 ? nb_fail(err, rc, "%s", staging->failure.text) : 0;
}

static int end(struct nb_staging *staging, int rc, struct nb_error *err) {
    nb_cuda_leave_relaxed(staging->device, staging->capture_mode);
    return rc < 0 ? nb_fail(err, rc, "%s", staging->failure.text) : rc;
}

static void move(struct nb_list *list, struct slot *slot) {
    nb_list_remove(&slot->link);
    nb_list_insert(list, &slot->link);
}

// Lists of pieces follow the chunks.
static size_t lists_offset(const struct nb_staging_config *config) {
    const size_t align = sizeof(uint64_t);
    return (config->chunk_bytes * (size_t)config->chunks + align - 1) / align * align;
}

static size_t arena_bytes(const struct nb_staging_config *config) {
    const size_t list = config->gather_bytes > 0 ? GATHERED_MAX * sizeof(struct nb_cuda_piece) : 0;
    return lists_offset(config) + (size_t)config->chunks * list;
}

// Loads the kernels and lets them reach the pinned memory. A failure leaves all copies to the copy engine.
static void prepare_kernels(struct nb_staging *staging) {
    const struct nb_cuda_driver *driver = staging->device->driver;
    struct nb_error *why = &staging->ungathered;
    if (!staging->registered) {
        nb_fail(why, -ENOMEM, "%s", staging->unpinned.text);
        return;
    }
    nb_cuda_address mapped = 0;
    if (nb_cuda_kernels_open(&staging->kernels, staging->device, staging->config.image, why) == 0 &&
        nb_cuda_check(staging->device, driver->host_device_address(&mapped, staging->arena.base, 0),
                      "cuMemHostGetDevicePointer", staging->arena.bytes, why) == 0) {
        staging->mapped = mapped;
    }
}

static int create_events(struct nb_staging *staging) {
    const struct nb_cuda_driver *driver = staging->device->driver;
    struct nb_cuda_piece *lists = (void *)((unsigned char *)staging->arena.base + lists_offset(&staging->config));
    int rc = 0;
    for (int i = 0; rc == 0 && i < staging->config.chunks; i++) {
        struct slot *slot = &staging->slots[i];
        nb_list_init(&slot->link);
        move(&staging->free, slot);
        slot->state = FREE;
        slot->memory = (unsigned char *)staging->arena.base + (size_t)i * staging->config.chunk_bytes;
        slot->gathered = lists + (size_t)i * GATHERED_MAX;
        rc = check(staging, driver->event_create(&slot->copied, NB_CUDA_EVENT_DISABLE_TIMING), "cuEventCreate", 0);
    }
    return rc;
}

// A capture that refuses a call does not show that the memory cannot be pinned or the kernels cannot be loaded.
static int check_refusals(struct nb_staging *staging) {
    const struct nb_error *why = staging->unpinned.code == -EBUSY ? &staging->unpinned : &staging->ungathered;
    return why->code == -EBUSY ? nb_fail(&staging->failure, -EBUSY, "%s", why->text) : 0;
}

static int open_memory(struct nb_staging *staging) {
    struct nb_arena *arena = &staging->arena;
    int rc = nb_arena_open(arena, arena_bytes(&staging->config), &staging->failure);
    // A fork makes private pages copy-on-write. This process would write to new pages, while the device keeps the old.
    if (rc == 0 && arena->fd < 0 && madvise(arena->base, arena->bytes, MADV_DONTFORK) != 0) {
        rc = nb_fail(&staging->failure, -errno, "CUDA: staging memory cannot be kept from forked processes: %m");
    }
    return rc;
}

static int prepare(struct nb_staging *staging) {
    const struct nb_cuda_driver *driver = staging->device->driver;
    unsigned mode = 0;
    int rc = open_memory(staging);
    if (rc < 0 || (rc = nb_cuda_enter_relaxed(staging->device, &mode, &staging->failure)) < 0) {
        return rc;
    }
    const unsigned flags =
        staging->config.gather_bytes > 0 ? NB_CUDA_HOST_PORTABLE | NB_CUDA_HOST_MAPPED : NB_CUDA_HOST_PORTABLE;
    unsigned result = driver->host_register(staging->arena.base, staging->arena.bytes, flags);
    staging->registered =
        nb_cuda_check(staging->device, result, "cuMemHostRegister", staging->arena.bytes, &staging->unpinned) == 0;
    if (staging->config.gather_bytes > 0) {
        prepare_kernels(staging);
    }
    rc = check_refusals(staging);
    rc = rc < 0 ? rc : create_events(staging);
    nb_cuda_leave_relaxed(staging->device, mode);
    return rc;
}

int nb_staging_open(struct nb_staging **staging, const struct nb_cuda_device *device,
                    const struct nb_staging_config *config, struct nb_error *err) {
    if (config->chunks <= 0 || config->chunk_bytes == 0 ||
        config->chunk_bytes > SIZE_MAX / 2 / (size_t)config->chunks) {
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
    unsigned mode = 0;
    bool ours = !staging->registered; // nothing of the device may reach the memory any more
    if (nb_cuda_enter_relaxed(staging->device, &mode, &ignored) == 0) {
        bool idle = nb_list_empty(&staging->leaving) && nb_list_empty(&staging->returning) && !staging->unseen;
        bool settled = idle || settle_streams(staging);
        for (int i = 0; i < staging->config.chunks; i++) {
            if (staging->slots[i].copied != NULL) {
                (void)driver->event_destroy(staging->slots[i].copied);
            }
        }
        if (settled) { // else a kernel may still run
            nb_cuda_kernels_close(&staging->kernels);
        }
        if (staging->registered && settled) {
            ours = driver->host_unregister(staging->arena.base) == NB_CUDA_SUCCESS;
        }
        nb_cuda_leave_relaxed(staging->device, mode);
    }
    if (ours) { // else it is kept for good: a late copy must not reach memory of another use
        nb_arena_close(&staging->arena);
    }
    free(staging);
}

const struct nb_arena *nb_staging_memory(const struct nb_staging *staging) {
    return &staging->arena;
}

const char *nb_staging_unpinned(const struct nb_staging *staging) {
    return staging->registered ? NULL : staging->unpinned.text;
}

const char *nb_staging_ungathered(const struct nb_staging *staging) {
    return staging->ungathered.code < 0 ? staging->ungathered.text : NULL;
}

bool nb_staging_polls(const struct nb_staging *staging) {
    bool copies = !nb_list_empty(&staging->leaving) || !nb_list_empty(&staging->returning);
    return copies || (!nb_list_empty(&staging->waiting) && !nb_list_empty(&staging->free));
}

int nb_staging_cut(struct nb_staging_cut *cut, size_t bytes, int parts, size_t element_bytes, size_t chunk_bytes,
                   struct nb_error *err) {
    const size_t part = bytes / (size_t)parts;
    const size_t most = chunk_bytes / (size_t)parts / element_bytes * element_bytes;
    if (most == 0) {
        return nb_fail(err, -EINVAL, "CUDA: chunks of %zu bytes have no room for %d parts with elements of %zu bytes",
                       chunk_bytes, parts, element_bytes);
    }
    *cut = (struct nb_staging_cut){
        .part_bytes = part, .slice_bytes = part < most ? part : most, .chunks = (part + most - 1) / most};
    return 0;
}

static size_t buffer_bytes(const struct nb_staging_request *request) {
    size_t bytes = 0;
    for (int i = 0; i < request->piece_count; i++) {
        bytes += request->pieces[i].bytes;
    }
    return bytes;
}

int nb_staging_start(struct nb_staging *staging, struct nb_staging_transfer *transfer,
                     const struct nb_staging_request *request, struct nb_error *err) {
    if (staging->failure.code < 0) {
        return nb_fail(err, staging->failure.code, "%s", staging->failure.text);
    }
    struct nb_staging_cut cut = {0};
    int rc = nb_staging_cut(&cut, buffer_bytes(request), request->parts, request->element_bytes,
                            staging->config.chunk_bytes, err);
    if (rc < 0) {
        return rc;
    }
    *transfer = (struct nb_staging_transfer){
        .done = cut.chunks == 0, .number = ++staging->transfers, .request = *request, .cut = cut};
    nb_list_init(&transfer->waiting);
    nb_list_init(&transfer->arrived);
    if (!transfer->done) {
        nb_list_insert(&staging->waiting, &transfer->waiting);
    }
    return 0;
}

static int copy_piece(struct nb_staging *staging, nb_cuda_address at, unsigned char *memory, size_t bytes, bool out) {
    const struct nb_cuda_driver *driver = staging->device->driver;
    unsigned result = out ? driver->copy_to_host(memory, at, bytes, staging->config.out)
                          : driver->copy_to_device(at, memory, bytes, staging->config.back);
    return check(staging, result, out ? "cuMemcpyDtoHAsync" : "cuMemcpyHtoDAsync", bytes);
}

// Starts the copies of a range of the buffer, one for each piece that it touches. Small ones go into the slot's list.
static int copy_range(struct nb_staging *staging, const struct nb_staging_request *request, size_t offset,
                      struct slot *slot, unsigned char *memory, bool out) {
    size_t bytes = slot->slice_bytes;
    int rc = 0;
    for (const struct nb_staging_piece *piece = request->pieces; rc == 0 && bytes > 0; piece++) {
        if (offset >= piece->bytes) {
            offset -= piece->bytes;
            continue;
        }
        const size_t room = piece->bytes - offset;
        const size_t take = room < bytes ? room : bytes;
        const nb_cuda_address at = piece->base + offset;
        if (staging->mapped != 0 && piece->bytes <= staging->config.gather_bytes &&
            slot->gathered_count < GATHERED_MAX) {
            slot->gathered[slot->gathered_count++] =
                (struct nb_cuda_piece){at, (uint64_t)(memory - slot->memory), take};
        } else {
            rc = copy_piece(staging, at, memory, take, out);
        }
        memory += take;
        bytes -= take;
        offset = 0;
    }
    return rc;
}

static nb_cuda_address device_address(const struct nb_staging *staging, const void *memory) {
    return staging->mapped + (size_t)((const unsigned char *)memory - (const unsigned char *)staging->arena.base);
}

// Starts the copies of a slot's list: by a kernel, if there are several.
static int copy_gathered(struct nb_staging *staging, struct slot *slot, bool out) {
    const int count = slot->gathered_count;
    if (count == 1) {
        const struct nb_cuda_piece *piece = slot->gathered;
        return copy_piece(staging, piece->address, slot->memory + piece->offset_bytes, piece->bytes, out);
    }
    size_t bytes = 0;
    for (int i = 0; i < count; i++) {
        bytes += slot->gathered[i].bytes;
    }
    const struct nb_cuda_work work = {.kernel = out ? NB_CUDA_PACK : NB_CUDA_UNPACK,
                                      .to = device_address(staging, slot->memory),
                                      .from = device_address(staging, slot->gathered),
                                      .count = (size_t)count,
                                      .piece_bytes = bytes / (size_t)count};
    return nb_cuda_launch(&staging->kernels, out ? staging->config.out : staging->config.back, &work,
                          &staging->failure);
}

// Starts the copies of a slot's slices of some parts, and records its event after them.
static int copy_parts(struct nb_staging *staging, const struct nb_staging_transfer *transfer, struct slot *slot,
                      bool out) {
    const struct nb_staging_request *request = &transfer->request;
    const struct nb_staging_parts parts = out ? request->out : request->back;
    int rc = 0;
    slot->gathered_count = 0;
    for (int i = 0; rc == 0 && i < parts.count; i++) {
        const size_t part = (size_t)((parts.first + i) % request->parts);
        const size_t offset = part * transfer->cut.part_bytes + slot->number * transfer->cut.slice_bytes;
        rc = copy_range(staging, request, offset, slot, slot->memory + part * slot->slice_bytes, out);
    }
    if (rc == 0 && slot->gathered_count > 0) {
        rc = copy_gathered(staging, slot, out);
    }
    if (rc == 0) {
        unsigned result =
            staging->device->driver->event_record(slot->copied, out ? staging->config.out : staging->config.back);
        rc = check(staging, result, "cuEventRecord", (size_t)parts.count * slot->slice_bytes);
    }
    staging->unseen = staging->unseen || rc < 0;
    return rc;
}

static int grant(struct nb_staging *staging, struct nb_staging_transfer *transfer, struct slot *slot) {
    const size_t rest = transfer->cut.part_bytes - transfer->granted * transfer->cut.slice_bytes;
    slot->number = transfer->granted;
    slot->slice_bytes = rest < transfer->cut.slice_bytes ? rest : transfer->cut.slice_bytes;
    slot->owner = transfer->number;
    slot->transfer = transfer;
    if (transfer->request.out.count > 0) {
        int rc = copy_parts(staging, transfer, slot, true);
        if (rc < 0) {
            return rc;
        }
        step(slot, GRANT);
        move(&staging->leaving, slot);
    } else {
        step(slot, GRANT);
        step(slot, COPIED);
        move(&transfer->arrived, slot);
    }
    transfer->granted++;
    return 0;
}

// Grants memory to transfers in order. Returns how many chunks were granted.
static int grant_all(struct nb_staging *staging) {
    int granted = 0;
    while (!nb_list_empty(&staging->waiting) && !nb_list_empty(&staging->free)) {
        struct nb_staging_transfer *transfer = NB_CONTAINER(staging->waiting.next, struct nb_staging_transfer, waiting);
        int rc = grant(staging, transfer, slot_of(staging->free.next));
        if (rc < 0) {
            return rc;
        }
        granted++;
        if (transfer->granted == transfer->cut.chunks) {
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
        int rc = nb_cuda_is_passed(staging->device, slot->copied, &staging->failure);
        if (rc <= 0) {
            return rc == 0 ? done : rc;
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
        .number = slot->number,
        .slice_bytes = slot->slice_bytes,
        .memory = slot->memory,
    };
    return 1;
}

static int caller_waits(struct nb_staging *staging, struct CUstream_st *caller, const struct slot *slot) {
    int rc = nb_cuda_is_captured(staging->device, caller, &staging->failure);
    if (rc > 0) { // a wait for work outside of the graph would end the capture
        return nb_fail(&staging->failure, -EBUSY, "CUDA: a stream that waits for a copy is captured");
    }
    return rc < 0 ? rc
                  : check(staging, staging->device->driver->stream_wait_event(caller, slot->copied, 0),
                          "cuStreamWaitEvent", 0);
}

// Makes the callers' streams wait for a slot's last copy.
static int callers_wait(struct nb_staging *staging, const struct nb_staging_request *request, const struct slot *slot) {
    int rc = 0;
    for (int i = 0; rc == 0 && i < request->caller_count; i++) {
        rc = caller_waits(staging, request->callers[i], slot);
    }
    return rc;
}

static int give_back(struct nb_staging *staging, struct nb_staging_transfer *transfer, struct slot *slot) {
    const bool copies = transfer->request.back.count > 0;
    int rc = copies ? copy_parts(staging, transfer, slot, false) : 0;
    if (rc < 0) {
        return rc;
    }
    step(slot, RETURN);
    if (!copies) {
        step(slot, COPIED);
    }
    move(copies ? &staging->returning : &staging->free, slot);
    transfer->returned++;
    if (transfer->returned == transfer->cut.chunks && copies) {
        // The last copy's event covers all: copies back are on one stream. A later record of it is behind this copy, and
        // does not change this wait.
        transfer->result = slot->copied;
        rc = callers_wait(staging, &transfer->request, slot);
    }
    transfer->done = rc == 0 && transfer->returned == transfer->cut.chunks;
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

// Makes the callers' streams wait for a transfer's copies. False if the driver refuses.
static bool fence_copies(struct nb_staging *staging, const struct nb_staging_transfer *transfer) {
    bool right = !staging->unseen;
    for (int i = 0; right && i < staging->config.chunks; i++) {
        const struct slot *slot = &staging->slots[i];
        bool copies = slot->state == LEAVING || slot->state == RETURNING;
        if (copies && slot->owner == transfer->number) {
            right = callers_wait(staging, &transfer->request, slot) == 0;
        }
    }
    return right;
}

void nb_staging_cancel(struct nb_staging *staging, struct nb_staging_transfer *transfer) {
    struct nb_error ignored = {0};
    unsigned mode = 0;
    if (transfer->done) {
        return;
    }
    if ((transfer->granted > 0 || staging->unseen) && nb_cuda_enter_relaxed(staging->device, &mode, &ignored) == 0) {
        if (!fence_copies(staging, transfer)) {
            (void)settle_streams(staging);
        }
        nb_cuda_leave_relaxed(staging->device, mode);
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
