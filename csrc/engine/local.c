// When does an operation in shared memory move on? In the order of starts, as far as others' counters allow.
#include "engine/local.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/list.h"
#include "coll/sched.h"
#include "engine/engine.h"
#include "engine/internal.h"
#include "engine/local_share.h"
#include "trace/event.h"
#include "trace/ring.h"
#include "transport/shm.h"

enum {
    TURN_BYTES = 1024 * 1024, // of a share, before all else on this thread has its turn
    SPIN_NS = 20 * 1000,
    SPIN_TURNS = 16,
    REVOKE_NS = 250 * 1000 * 1000
};

static uint64_t count_of(const struct local *l, int rank, size_t counter) {
    const char *area = (const char *)l->shm->peers[rank].area;
    return atomic_load_explicit((const _Atomic uint64_t *)(const void *)(area + counter), memory_order_acquire);
}

// Of all ranks, this one too.
static uint64_t least(const struct local *l, size_t counter) {
    uint64_t lowest = UINT64_MAX;
    for (int r = 0; r < l->size; r++) {
        uint64_t count = count_of(l, r, counter);
        lowest = count < lowest ? count : lowest;
    }
    return lowest;
}

#define LEAST(local, counter) least(local, offsetof(struct nb_shm_area, counter))

static void advance(const struct local *l, _Atomic uint64_t *counter) {
    uint64_t next = atomic_load_explicit(counter, memory_order_relaxed) + 1;
    atomic_store_explicit(counter, next, memory_order_release);
    nb_shm_wake(l->shm);
}

static struct nb_shm_area *own_area(const struct local *l) {
    return l->shm->peers[l->rank].area;
}

// Into the slot: pieces that follow each other are one.
static void describe(const struct local *l, const struct nb_work *work, struct nb_shm_slot *slot) {
    uint32_t count = 0;
    slot->count = NB_SHM_STAGED;
    for (int i = 0; i < work->piece_count; i++) {
        struct nb_shm_piece piece;
        struct nb_shm_piece *last = count > 0 ? &slot->pieces[count - 1] : NULL;
        if (!nb_shm_find(l->shm, work->pieces[i].base, work->pieces[i].bytes, &piece)) {
            return;
        }
        if (last != NULL && last->arena == piece.arena && last->offset + last->bytes == piece.offset) {
            last->bytes += piece.bytes;
        } else if (count == NB_SHM_PIECES) {
            return;
        } else {
            slot->pieces[count++] = piece;
        }
    }
    slot->count = count;
}

// Tells the others of operations for which there are slots.
static bool describe_next(struct local *l) {
    bool any = false;
    for (struct nb_list *it = l->queue.next; it != &l->queue && l->described < l->started; it = it->next) {
        struct nb_work *work = NB_CONTAINER(it, struct nb_work, local.link);
        if (work->local.stage != NB_LOCAL_QUEUED) {
            continue;
        }
        if (work->local.index >= LEAST(l, done) + NB_SHM_SLOTS) {
            break;
        }
        describe(l, work, &own_area(l)->slots[work->local.index % NB_SHM_SLOTS]);
        work->local.stage = NB_LOCAL_DESCRIBED;
        l->described++;
        advance(l, &own_area(l)->ready);
        any = true;
    }
    return any;
}

// Where a rank's line lies in this process. 1: it goes through staging; negative: what the rank says is impossible.
static int line_find(struct local *l, const struct nb_work *work, int rank) {
    const struct nb_shm_slot *slot = &l->shm->peers[rank].area->slots[work->local.index % NB_SHM_SLOTS];
    struct line_room *room = &l->rooms[rank];
    uint32_t count = slot->count;
    size_t at = 0;
    if (count == NB_SHM_STAGED) {
        return 1;
    }
    if (count > NB_SHM_PIECES) {
        return NB_EWIRE;
    }
    for (uint32_t i = 0; i < count; i++) {
        const struct nb_shm_piece piece = slot->pieces[i];
        room->pieces[i].base = nb_shm_memory(l->shm, rank, &piece);
        room->pieces[i].bytes = piece.bytes;
        room->starts[i] = at;
        if (room->pieces[i].base == NULL || piece.bytes == 0 || piece.bytes % work->element_bytes != 0) {
            return NB_EWIRE;
        }
        at += piece.bytes;
    }
    room->starts[count] = at;
    l->lines[rank] = (struct line){.count = (int)count, .pieces = room->pieces, .starts = room->starts};
    return at == work->starts[work->piece_count] ? 0 : NB_EWIRE;
}

// All ranks have described the operation: they all decide alike how it travels. False: the job has failed.
static bool begin(struct local *l, struct nb_work *work) {
    bool staged = false;
    for (int r = 0; r < l->size; r++) {
        int rc = line_find(l, work, r);
        if (rc < 0) {
            nb_job_wire_fail(l->job, r, "a description of memory that it does not share");
            return false;
        }
        staged = staged || rc > 0;
    }
    if (staged) {
        l->lines[l->rank] = (struct line){.count = work->piece_count, .pieces = work->pieces, .starts = work->starts};
        work->local.window = l->windows;
        work->local.windows = nb_share_windows(l, work);
        l->windows += work->local.windows;
    }
    work->local.staged = staged;
    work->local.stage = NB_LOCAL_RUNS;
    work->in.first_ns = nb_now_ns();
    return true;
}

static void share_done(const struct local *l, struct nb_work *work) {
    work->local.stage = NB_LOCAL_SHARE_DONE;
    advance(l, &own_area(l)->done);
}

static bool direct_step(struct local *l, struct nb_work *work) {
    struct nb_range part = nb_share_part(l, work);
    size_t left = part.bytes - work->local.at;
    size_t take = left < TURN_BYTES ? left : TURN_BYTES;
    if (take > 0) {
        if (!nb_shm_enter(l->shm)) {
            return false; // somebody has given up: the control connection will tell
        }
        nb_share_direct(l, work, (struct nb_range){.offset = part.offset + work->local.at, .bytes = take});
        nb_shm_leave(l->shm);
    }
    work->local.at += take;
    if (work->local.at == part.bytes) {
        share_done(l, work);
    }
    return true;
}

static bool staged_step(struct local *l, struct nb_work *work) {
    struct nb_shm_area *mine = own_area(l);
    uint64_t first = work->local.window;
    uint64_t end = first + work->local.windows;
    uint64_t filled = atomic_load_explicit(&mine->filled, memory_order_relaxed);
    uint64_t reduced = atomic_load_explicit(&mine->reduced, memory_order_relaxed);
    uint64_t emptied = atomic_load_explicit(&mine->emptied, memory_order_relaxed);
    if (emptied < reduced && LEAST(l, reduced) > emptied) {
        nb_share_empty(l, work, emptied - first);
        advance(l, &mine->emptied);
        if (emptied + 1 == end) {
            share_done(l, work);
        }
    } else if (reduced < filled && LEAST(l, filled) > reduced) {
        nb_share_reduce(l, work, reduced - first);
        advance(l, &mine->reduced);
    } else if (filled < end && filled < LEAST(l, emptied) + NB_SHM_STAGES) {
        nb_share_fill(l, work, filled - first);
        advance(l, &mine->filled);
    } else {
        return false;
    }
    atomic_fetch_add_explicit(&mine->pulse, 1, memory_order_relaxed);
    return true;
}

static void finish(struct local *l, struct nb_work *work) {
    struct nb_job *job = l->job;
    nb_list_remove(&work->local.link);
    pthread_mutex_lock(&job->lock);
    job->info.shm_bytes += work->local.bytes_in + work->local.bytes_out;
    job->info.shm_staged_bytes += work->local.staged ? work->local.bytes_in : 0;
    pthread_mutex_unlock(&job->lock);
    nb_work_finish(work, NULL);
}

// What nobody touches any more is over. A staged line is complete with this rank's own share.
static bool finish_next(struct local *l) {
    bool any = false;
    while (!nb_list_empty(&l->queue)) {
        struct nb_work *work = NB_CONTAINER(l->queue.next, struct nb_work, local.link);
        if (work->local.stage != NB_LOCAL_SHARE_DONE || (!work->local.staged && LEAST(l, done) <= work->local.index)) {
            break;
        }
        finish(l, work);
        any = true;
    }
    return any;
}

// The first operation of which this rank's share is not done, or NULL.
static struct nb_work *current(const struct local *l) {
    for (struct nb_list *it = l->queue.next; it != &l->queue; it = it->next) {
        struct nb_work *work = NB_CONTAINER(it, struct nb_work, local.link);
        if (work->local.stage != NB_LOCAL_SHARE_DONE) {
            return work;
        }
    }
    return NULL;
}

static bool turn(struct local *l) {
    bool moved = finish_next(l);
    moved = describe_next(l) || moved;
    struct nb_work *work = current(l);
    if (work == NULL) {
        return moved;
    }
    if (work->local.stage == NB_LOCAL_DESCRIBED && LEAST(l, ready) > work->local.index && !begin(l, work)) {
        return true;
    }
    if (work->local.stage == NB_LOCAL_RUNS && (work->local.staged ? staged_step(l, work) : direct_step(l, work))) {
        work->in.moved_ns = nb_now_ns();
        moved = true;
    }
    return moved;
}

static bool idle(const struct local *l) {
    return l == NULL || nb_list_empty(&l->queue) || l->broken || l->job->failed;
}

bool nb_local_progress(struct nb_job *job) {
    struct local *l = job->local;
    if (idle(l)) {
        return false;
    }
    nb_shm_rouse(l->shm);
    bool moved = turn(l);
    while (!moved && l->spins && nb_now_ns() - l->moved_ns < SPIN_NS) {
        for (int i = 0; i < SPIN_TURNS && !moved; i++) {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
            moved = turn(l);
        }
    }
    l->moved_ns = moved ? nb_now_ns() : l->moved_ns;
    return moved;
}

bool nb_local_arm(struct nb_job *job) {
    struct local *l = job->local;
    if (idle(l)) {
        return true;
    }
    nb_shm_sleep(l->shm);
    bool moved = turn(l);
    if (moved) {
        nb_shm_rouse(l->shm);
        l->moved_ns = nb_now_ns();
    }
    return !moved;
}

bool nb_local_takes(const struct nb_job *job, enum nb_op_kind kind) {
    return job->local != NULL && kind != NB_OP_BARRIER && kind != NB_OP_ALLTOALL;
}

bool nb_local_start(struct nb_work *work) {
    struct nb_job *job = work->comm->job;
    struct local *l = job->local;
    if (!nb_local_takes(job, work->desc.kind) || work->quiet || work->starts[work->piece_count] == 0) {
        return false;
    }
    nb_list_remove(&work->link);
    nb_list_insert(&job->running, &work->link);
    work->running = true;
    work->in.moved_ns = work->times.start_ns;
    work->local = (struct nb_local_op){.taken = true, .index = l->started++};
    nb_list_insert(&l->queue, &work->local.link);
    l->moved_ns = work->times.start_ns;
    (void)describe_next(l);
    return true;
}

void nb_local_cancel(struct nb_work *work) {
    struct local *l = work->comm->job->local;
    nb_list_remove(&work->local.link);
    l->broken = true;
    nb_shm_revoke(l->shm, nb_now_ns() + REVOKE_NS);
}

// A rank that an operation waits for, or NB_NO_PEER.
static int laggard(const struct local *l, const struct nb_work *work) {
    const uint64_t index = work->local.index;
    const struct nb_shm_area *mine = own_area(l);
    for (int r = 0; r < l->size; r++) {
        const struct nb_shm_area *area = l->shm->peers[r].area;
        bool late = atomic_load(&area->ready) <= index;
        if (work->local.stage == NB_LOCAL_RUNS && work->local.staged) {
            late = atomic_load(&area->filled) < atomic_load(&mine->filled) ||
                   atomic_load(&area->reduced) < atomic_load(&mine->reduced) ||
                   atomic_load(&area->emptied) < atomic_load(&mine->emptied);
        } else if (work->local.stage == NB_LOCAL_SHARE_DONE) {
            late = atomic_load(&area->done) <= index;
        }
        if (r != l->rank && late) {
            return r;
        }
    }
    return NB_NO_PEER;
}

void nb_local_tick(struct nb_job *job, int64_t now) {
    struct local *l = job->local;
    uint64_t pulses = 0;
    if (idle(l)) {
        return;
    }
    (void)turn(l); // what a rank did before it left counts
    for (int r = 0; r < l->size; r++) {
        pulses += atomic_load(&l->shm->peers[r].area->pulse);
    }
    NB_LIST_EACH(it, &l->queue) {
        struct nb_work *work = NB_CONTAINER(it, struct nb_work, local.link);
        int peer = laggard(l, work);
        work->in.moved_ns = pulses != l->pulses ? now : work->in.moved_ns;
        work->in.peer = peer != NB_NO_PEER ? peer : work->in.peer;
        work->in.left = peer != NB_NO_PEER;
    }
    l->pulses = pulses;
}

uint64_t nb_local_record(const struct nb_work *work) {
    nb_ring_put(work->comm->job->config.ring, NB_EV_OP_LANE, work->desc.key, work->round, NB_LANE_SHARED,
                work->local.bytes_out, work->local.bytes_in, 0);
    return work->local.staged ? NB_ALGORITHM_STAGED : NB_ALGORITHM_SHARED;
}
