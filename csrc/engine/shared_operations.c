// Shared memory: runs operations in the order of their starts, as far as the other ranks' counters allow.
#include "engine/shared.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "base/arena.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/list.h"
#include "coll/choose.h"
#include "coll/ring_schedule.h"
#include "engine/algorithms.h"
#include "engine/communicator.h"
#include "engine/context.h"
#include "engine/engine.h"
#include "engine/operation.h"
#include "engine/pipeline.h"
#include "engine/shared_fold.h"
#include "engine/two_level.h"
#include "trace/event.h"
#include "trace/ring.h"
#include "transport/lanes.h"
#include "transport/shm.h"

enum {
    PASS_BYTES = 1024 * 1024, // of a share per pass, so that other work on this thread runs too
    PASS_STEPS = 16,          // per pass, of an operation that goes through staging
    SPIN_ROUNDS = 16,
    REVOKE_NS = 250 * 1000 * 1000
};

static struct nb_shm_area *own_area(const struct shared *l) {
    return nb_shared_area(l, l->rank);
}

static int job_rank(const struct shared *l, int rank) {
    return l->shm->peers[rank].job_rank;
}

// True if another communicator of this process has detached memory of the operation from the ranks of this host.
static bool is_taken_back(const struct nb_work *work) {
    bool detached = false;
    for (int i = 0; i < work->piece_count; i++) {
        detached = detached || nb_arena_is_detached(work->pieces[i].base, work->pieces[i].bytes);
    }
    return detached;
}

// Describes the operation's memory in the slot. Adjacent pieces become one.
static void describe(const struct shared *l, const struct nb_work *work, struct nb_shm_slot *slot) {
    uint32_t count = 0;
    slot->count = NB_SHM_STAGED;
    if (is_taken_back(work)) {
        return;
    }
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

// Describes operations to the other ranks while slots are free.
static bool describe_next(struct shared *l) {
    bool any = false;
    for (struct nb_list *it = l->queue.next; it != &l->queue && l->described < l->started; it = it->next) {
        struct nb_work *work = NB_CONTAINER(it, struct nb_work, shared.link);
        if (work->shared.stage != NB_SHARED_QUEUED) {
            continue;
        }
        if (work->shared.index >= NB_LEAST(l, l->size, done) + NB_SHM_SLOTS) {
            break;
        }
        describe(l, work, &own_area(l)->slots[work->shared.index % NB_SHM_SLOTS]);
        work->shared.stage = NB_SHARED_DESCRIBED;
        l->described++;
        nb_shared_advance(l, &own_area(l)->ready);
        any = true;
    }
    return any;
}

// Locates a rank's buffer in this process. 1: it goes through staging; negative: the rank's description is invalid.
static int line_find(struct shared *l, const struct nb_work *work, int rank) {
    const struct nb_shm_slot *slot = &nb_shared_area(l, rank)->slots[work->shared.index % NB_SHM_SLOTS];
    size_t place = nb_buffer_slot(l, work, rank);
    struct buffer_view_room *room = &l->rooms[place];
    uint32_t count = *(const volatile uint32_t *)&slot->count; // read once: the rank may change it
    size_t at = 0;
    if (count == NB_SHM_STAGED) {
        return 1;
    }
    if (count > NB_SHM_PIECES) {
        return NB_EWIRE;
    }
    for (uint32_t i = 0; i < count; i++) {
        const struct nb_shm_piece piece = *(const volatile struct nb_shm_piece *)&slot->pieces[i];
        room->pieces[i].base = nb_shm_memory(l->shm, rank, &piece);
        room->pieces[i].bytes = piece.bytes;
        room->starts[i] = at;
        if (room->pieces[i].base == NULL || piece.bytes == 0 || piece.bytes % work->element_bytes != 0) {
            return NB_EWIRE;
        }
        at += piece.bytes;
    }
    room->starts[count] = at;
    l->views[place] = (struct buffer_view){.count = (int)count, .pieces = room->pieces, .starts = room->starts};
    return at == work->starts[work->piece_count] ? 0 : NB_EWIRE;
}

// Begins an operation that all ranks have described; all ranks decide alike how it travels. False: the job has failed.
static bool begin(struct shared *l, struct nb_work *work) {
    bool staged = false;
    for (int r = 0; r < l->size; r++) {
        int rc = line_find(l, work, r);
        if (rc < 0) {
            nb_job_wire_fail(l->job, job_rank(l, r), "a descriptor of memory that it does not share");
            return false;
        }
        staged = staged || (rc > 0 && l->size > 1);
    }
    l->views[nb_buffer_slot(l, work, l->rank)] =
        (struct buffer_view){.count = work->piece_count, .pieces = work->pieces, .starts = work->starts};
    if (staged) {
        work->shared.window = l->windows;
        work->shared.windows = nb_fold_windows(l, work);
        l->windows += work->shared.windows;
    }
    work->shared.staged = staged;
    work->shared.stage = NB_SHARED_RUNS;
    work->in.first_ns = nb_now_ns();
    if (l->rails != NULL) {
        nb_two_level_begin(l, work);
    }
    return true;
}

static void share_done(const struct shared *l, struct nb_work *work) {
    work->shared.stage = NB_SHARED_SHARE_DONE;
    nb_shared_advance(l, &own_area(l)->done);
}

static bool direct_step(struct shared *l, struct nb_work *work) {
    struct nb_range part = nb_fold_part(l, work);
    size_t left = part.bytes - work->shared.at;
    size_t take = left < PASS_BYTES ? left : PASS_BYTES;
    if (take > 0) {
        if (!nb_shm_write_begin(l->shm, &l->revoker)) {
            return false; // a rank has given up: the control connection will report it
        }
        nb_fold_direct(l, work, (struct nb_range){.offset = part.offset + work->shared.at, .bytes = take});
        nb_shm_write_end(l->shm);
    }
    work->shared.at += take;
    if (work->shared.at == part.bytes) {
        share_done(l, work);
    }
    return true;
}

static bool staged_step(struct shared *l, struct nb_work *work) {
    struct nb_shm_area *mine = own_area(l);
    uint64_t first = work->shared.window;
    uint64_t end = first + work->shared.windows;
    uint64_t filled = atomic_load_explicit(&mine->filled, memory_order_relaxed);
    uint64_t reduced = atomic_load_explicit(&mine->reduced, memory_order_relaxed);
    uint64_t emptied = atomic_load_explicit(&mine->emptied, memory_order_relaxed);
    if (emptied < reduced && NB_LEAST(l, l->size, reduced) > emptied) {
        nb_fold_empty(l, work, emptied - first);
        nb_shared_advance(l, &mine->emptied);
        if (emptied + 1 == end) {
            share_done(l, work);
        }
    } else if (reduced < filled && NB_LEAST(l, l->size, filled) > reduced) {
        nb_fold_reduce(l, work, reduced - first);
        nb_shared_advance(l, &mine->reduced);
    } else if (filled < end && filled < NB_LEAST(l, l->size, emptied) + NB_SHM_STAGES) {
        nb_fold_fill(l, work, filled - first);
        nb_shared_advance(l, &mine->filled);
    } else {
        return false;
    }
    atomic_fetch_add_explicit(&mine->pulse, 1, memory_order_relaxed);
    return true;
}

// Runs the staged steps of one pass. Polls between steps, because the other ranks' steps complete soon.
static bool staged_steps(struct shared *l, struct nb_work *work) {
    bool moved = false;
    int patience = l->job->progress.may_spin ? SPIN_ROUNDS : 0;
    for (int i = 0, waited = 0; i < PASS_STEPS && work->shared.stage == NB_SHARED_RUNS;) {
        if (staged_step(l, work)) {
            moved = true;
            waited = 0;
            i++;
        } else if (moved && waited++ < patience) {
            nb_pause();
        } else {
            break;
        }
    }
    return moved;
}

static void finish(struct nb_work *work) {
    nb_list_remove(&work->shared.link);
    nb_work_moved(work);
}

// Finishes operations whose memory no rank uses any more. A staged operation is complete with this rank's own share.
static bool finish_next(struct shared *l) {
    bool any = false;
    while (!nb_list_empty(&l->queue)) {
        struct nb_work *work = NB_CONTAINER(l->queue.next, struct nb_work, shared.link);
        if (work->shared.stage != NB_SHARED_SHARE_DONE ||
            (!work->shared.staged && NB_LEAST(l, l->size, done) <= work->shared.index)) {
            break;
        }
        if (!work->shared.staged && is_taken_back(work)) { // checked last: other ranks' writes have arrived
            struct nb_error why = {0};
            nb_fail(&why, -EBUSY,
                    "memory of this operation was withdrawn from the ranks of this host because one of them did not "
                    "respond in another communicator");
            nb_job_fail(l->job, &why, true);
            return true;
        }
        finish(work);
        any = true;
    }
    return any;
}

// Returns the first operation in which this rank's share is not done, or NULL.
static struct nb_work *current(const struct shared *l) {
    for (struct nb_list *it = l->queue.next; it != &l->queue; it = it->next) {
        struct nb_work *work = NB_CONTAINER(it, struct nb_work, shared.link);
        if (work->shared.stage != NB_SHARED_SHARE_DONE) {
            return work;
        }
    }
    return NULL;
}

// Begins operations that all ranks have described; a few run concurrently. False: the job has failed.
static bool begin_next(struct shared *l) {
    uint64_t open = atomic_load_explicit(&own_area(l)->done, memory_order_relaxed) + LOCAL_OPEN;
    NB_LIST_EACH(it, &l->queue) {
        struct nb_work *work = NB_CONTAINER(it, struct nb_work, shared.link);
        if (work->shared.stage > NB_SHARED_DESCRIBED) {
            continue;
        }
        if (work->shared.stage == NB_SHARED_QUEUED || work->shared.index >= open ||
            NB_LEAST(l, l->size, ready) <= work->shared.index) {
            break;
        }
        if (!begin(l, work)) {
            return false;
        }
    }
    return true;
}

static bool rails_pass(struct shared *l) {
    if (!begin_next(l)) {
        return true;
    }
    bool moved = nb_two_level_turn(l);
    struct nb_work *work = current(l);
    while (work != NULL && work->shared.stage == NB_SHARED_RUNS && nb_two_level_done(l, work)) {
        share_done(l, work);
        moved = true;
        work = current(l);
    }
    return moved;
}

static bool one_pass(struct shared *l) {
    bool moved = finish_next(l);
    moved = describe_next(l) || moved;
    if (l->rails != NULL) {
        return rails_pass(l) || moved;
    }
    struct nb_work *work = current(l);
    if (work == NULL) {
        return moved;
    }
    if (work->shared.stage == NB_SHARED_DESCRIBED && NB_LEAST(l, l->size, ready) > work->shared.index &&
        !begin(l, work)) {
        return true;
    }
    if (work->shared.stage == NB_SHARED_RUNS && (work->shared.staged ? staged_steps(l, work) : direct_step(l, work))) {
        work->in.moved_ns = nb_now_ns();
        moved = true;
    }
    return moved;
}

static bool idle(const struct shared *l) {
    return l == NULL || nb_list_empty(&l->queue) || l->broken || l->job->failed;
}

bool nb_shared_progress(struct nb_job *job) {
    struct shared *l = job->shared;
    if (l != NULL) {
        nb_shm_mark_awake(l->shm);
    }
    if (idle(l)) {
        return false;
    }
    bool moved = one_pass(l);
    while (!moved && l->rails == NULL && nb_job_polls(job, l->moved_ns)) {
        for (int i = 0; i < SPIN_ROUNDS && !moved; i++) {
            nb_pause();
            moved = one_pass(l);
        }
    }
    l->moved_ns = moved ? nb_now_ns() : l->moved_ns;
    return moved;
}

bool nb_shared_arm(struct nb_job *job) {
    struct shared *l = job->shared;
    if (idle(l)) {
        return true;
    }
    nb_shm_mark_asleep(l->shm);
    bool moved = one_pass(l);
    if (moved) {
        nb_shm_mark_awake(l->shm);
        l->moved_ns = nb_now_ns();
    }
    return !moved;
}

static bool is_possible(const struct nb_work *work) {
    enum nb_op_kind kind = (enum nb_op_kind)work->desc.kind;
    bool moves = kind != NB_OP_BARRIER && kind != NB_OP_ALLTOALL && kind != NB_OP_JOIN;
    return moves && work->desc.bytes > 0 && nb_comm_is_whole(work->comm) && nb_shared_everywhere(work->comm->job);
}

static bool is_two_level_possible(const struct nb_work *work) {
    return work->desc.kind == NB_OP_ALLREDUCE && work->desc.bytes > 0 && nb_comm_is_whole(work->comm) &&
           nb_shared_hosts(work->comm->job) > 1;
}

static int prepare(struct nb_work *work, struct nb_error *err) {
    (void)err;
    work->in = (struct nb_flow){.dir = NB_FLOW_IN};
    work->out = (struct nb_flow){.dir = NB_FLOW_OUT};
    work->flow_count = 2; // for the watchdog: the peers that the operation waits for, and since when
    work->block_bytes = 0;
    return 0;
}

static void release(struct nb_work *work) {
    (void)work;
}

// The rings between hosts cut the buffer as the flat ring does.
static int two_level_prepare(struct nb_work *work, struct nb_error *err) {
    return nb_pipeline_prepare(work, NB_SCHED_NONE, err);
}

static void start(struct nb_work *work, int64_t now_ns) {
    struct shared *l = work->comm->job->shared;
    nb_work_set_running(work);
    work->in.moved_ns = now_ns;
    work->in.left = 1; // the deadlines use in.peer
    work->in.peer = job_rank(l, (l->rank + 1) % l->size);
    work->out.peer = work->in.peer;
    work->shared = (struct nb_shared_op){.index = l->started++};
    nb_list_insert(&l->queue, &work->shared.link);
    l->moved_ns = now_ns;
    (void)describe_next(l);
}

// Makes late writes to the memory of a failed operation harmless. A rank that was stopped while it wrote to other
// ranks' memory may resume at that point. It can only write to buffers of operations that are not done, as all ranks
// have finished with the others. So this replaces the pages of these buffers before their owner gets them back. The
// stopped rank then reads old data, of an operation that has failed here. The job's areas and staging need no such
// care: they are unmapped with the job and never reused.
static void take_back(const struct shared *l, const struct nb_work *work) {
    for (int i = 0; work->shared.stage != NB_SHARED_QUEUED && i < work->piece_count; i++) {
        int rc = nb_arena_detach(work->pieces[i].base, work->pieces[i].bytes);
        if (rc < 0) {
            char text[NB_ERROR_TEXT];
            snprintf(text, sizeof text,
                     "a rank of this host that does not respond may still write to the memory of a failed operation, "
                     "which cannot be detached: %s",
                     nb_code_name(rc));
            nb_job_notify(l->job, text);
        }
    }
}

static void cancel(struct nb_work *work) {
    struct shared *l = work->comm->job->shared;
    nb_list_remove(&work->shared.link);
    if (l->rails != NULL) {
        nb_two_level_cancel(l, work);
    }
    if (!l->broken) {
        l->broken = true;
        l->peer_may_write = !nb_shm_revoke(l->shm, nb_now_ns() + REVOKE_NS);
    }
    if (l->peer_may_write) {
        take_back(l, work);
    }
}

static bool may_still_write(const struct shared *l, const struct nb_work *work, int rank) {
    const uint64_t index = work->shared.index;
    const struct nb_shm_area *mine = own_area(l);
    const struct nb_shm_area *area = nb_shared_area(l, rank);
    if (rank == l->revoker) {
        return true; // this rank's share cannot be done any more
    }
    if (work->shared.stage == NB_SHARED_SHARE_DONE) {
        return !work->shared.staged && atomic_load(&area->done) <= index;
    }
    if (work->shared.stage == NB_SHARED_RUNS && work->shared.staged) {
        bool parts = rank < l->parts; // other ranks neither fold nor reduce
        return atomic_load(&area->filled) < atomic_load(&mine->filled) ||
               (parts && atomic_load(&area->folded) < atomic_load(&mine->folded)) ||
               (parts && atomic_load(&area->reduced) < atomic_load(&mine->reduced)) ||
               atomic_load(&area->emptied) < atomic_load(&mine->emptied);
    }
    return atomic_load(&area->ready) <= index;
}

// Sets the peers that an operation waits for: work->in.peer and work->out.peer. This rank itself if no other is late:
// the others may leave.
static void awaited_peers_set(const struct shared *l, struct nb_work *work) {
    if (l->revoker < 0 && l->rails != NULL && nb_two_level_waits(l, work)) {
        return;
    }
    int late = l->rank;
    for (int r = 0; r < l->size && late == l->rank; r++) {
        late = r != l->rank && may_still_write(l, work, r) ? r : late;
    }
    work->in.peer = job_rank(l, late);
    work->out.peer = work->in.peer;
}

void nb_shared_tick(struct nb_job *job, int64_t now) {
    struct shared *l = job->shared;
    uint64_t pulses = 0;
    if (l != NULL && !job->failed) {
        nb_shm_unmap_withdrawn(l->shm);
    }
    if (idle(l)) {
        return;
    }
    (void)one_pass(l); // so that what a rank did before it left counts
    if (l->rails != NULL && nb_two_level_moved(l) != l->rail_bytes) {
        l->rail_bytes = nb_two_level_moved(l);
        atomic_fetch_add_explicit(&own_area(l)->pulse, 1, memory_order_relaxed);
    }
    for (int r = 0; r < l->size; r++) {
        pulses += atomic_load(&nb_shared_area(l, r)->pulse);
    }
    NB_LIST_EACH(it, &l->queue) {
        struct nb_work *work = NB_CONTAINER(it, struct nb_work, shared.link);
        awaited_peers_set(l, work);
        work->in.moved_ns = pulses != l->pulses ? now : work->in.moved_ns;
    }
    l->pulses = pulses;
}

// nb_shared_tick() sets one late rank, or ranks of other hosts: several may be late.
static bool waits_for(struct nb_work *work, int peer, int64_t *moved_ns) {
    const struct shared *l = work->comm->job->shared;
    bool late = work->in.peer == peer || work->out.peer == peer;
    for (int r = 0; r < l->size && !late; r++) {
        late = job_rank(l, r) == peer && r != l->rank && may_still_write(l, work, r);
    }
    bool found = work->in.left > 0 && late;
    *moved_ns = found && work->in.moved_ns > *moved_ns ? work->in.moved_ns : *moved_ns;
    return found;
}

static void record_memory(struct nb_work *work) {
    nb_ring_put(work->ring, NB_EV_OP_LANE, work->desc.key, work->round, NB_LANE_SHARED, work->shared.bytes_out,
                work->shared.bytes_in, 0);
}

static enum nb_algorithm_id record(struct nb_work *work, uint64_t *sent, uint64_t *received) {
    (void)sent;
    (void)received;
    record_memory(work);
    return work->shared.staged ? NB_ALGORITHM_STAGED : NB_ALGORITHM_SHARED;
}

static enum nb_algorithm_id two_level_record(struct nb_work *work, uint64_t *sent, uint64_t *received) {
    (void)nb_flows_record(work, sent, received);
    record_memory(work);
    return NB_ALGORITHM_TWO_LEVEL;
}

const struct nb_algorithm nb_shared = {.id = NB_ALGORITHM_SHARED,
                                       .possible = is_possible,
                                       .prepare = prepare,
                                       .release = release,
                                       .start = start,
                                       .cancel = cancel,
                                       .waits_for = waits_for,
                                       .record = record};

const struct nb_algorithm nb_two_level = {.id = NB_ALGORITHM_TWO_LEVEL,
                                          .name = "two_level",
                                          .possible = is_two_level_possible,
                                          .prepare = two_level_prepare,
                                          .release = nb_pipeline_release,
                                          .start = start,
                                          .cancel = cancel,
                                          .waits_for = waits_for,
                                          .record = two_level_record};
