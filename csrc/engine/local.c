// When does an operation in shared memory move on? In the order of starts, as far as others' counters allow.
#include "engine/local.h"

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
#include "coll/sched.h"
#include "engine/engine.h"
#include "engine/group.h"
#include "engine/internal.h"
#include "engine/local_share.h"
#include "engine/twolevel.h"
#include "trace/event.h"
#include "trace/ring.h"
#include "transport/shm.h"

enum {
    TURN_BYTES = 1024 * 1024, // of a share, before all else on this thread has its turn
    TURN_STEPS = 16,          // of an operation that goes through staging
    SPIN_TURNS = 16,
    REVOKE_NS = 250 * 1000 * 1000
};

static struct nb_shm_area *own_area(const struct local *l) {
    return nb_local_area(l, l->rank);
}

static int job_rank(const struct local *l, int rank) {
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

// Into the slot: pieces that follow each other are one.
static void describe(const struct local *l, const struct nb_work *work, struct nb_shm_slot *slot) {
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

// Tells the others of operations for which there are slots.
static bool describe_next(struct local *l) {
    bool any = false;
    for (struct nb_list *it = l->queue.next; it != &l->queue && l->described < l->started; it = it->next) {
        struct nb_work *work = NB_CONTAINER(it, struct nb_work, local.link);
        if (work->local.stage != NB_LOCAL_QUEUED) {
            continue;
        }
        if (work->local.index >= NB_LEAST(l, l->size, done) + NB_SHM_SLOTS) {
            break;
        }
        describe(l, work, &own_area(l)->slots[work->local.index % NB_SHM_SLOTS]);
        work->local.stage = NB_LOCAL_DESCRIBED;
        l->described++;
        nb_local_advance(l, &own_area(l)->ready);
        any = true;
    }
    return any;
}

// Where a rank's line lies in this process. 1: it goes through staging; negative: what the rank says is impossible.
static int line_find(struct local *l, const struct nb_work *work, int rank) {
    const struct nb_shm_slot *slot = &nb_local_area(l, rank)->slots[work->local.index % NB_SHM_SLOTS];
    size_t place = nb_line_slot(l, work, rank);
    struct line_room *room = &l->rooms[place];
    uint32_t count = *(const volatile uint32_t *)&slot->count; // read once: the rank may write to it
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
    l->lines[place] = (struct line){.count = (int)count, .pieces = room->pieces, .starts = room->starts};
    return at == work->starts[work->piece_count] ? 0 : NB_EWIRE;
}

// All ranks have described the operation: they all decide alike how it travels. False: the job has failed.
static bool begin(struct local *l, struct nb_work *work) {
    bool staged = false;
    for (int r = 0; r < l->size; r++) {
        int rc = line_find(l, work, r);
        if (rc < 0) {
            nb_job_wire_fail(l->job, job_rank(l, r), "a description of memory that it does not share");
            return false;
        }
        staged = staged || (rc > 0 && l->size > 1);
    }
    l->lines[nb_line_slot(l, work, l->rank)] =
        (struct line){.count = work->piece_count, .pieces = work->pieces, .starts = work->starts};
    if (staged) {
        work->local.window = l->windows;
        work->local.windows = nb_share_windows(l, work);
        l->windows += work->local.windows;
    }
    work->local.staged = staged;
    work->local.stage = NB_LOCAL_RUNS;
    work->in.first_ns = nb_now_ns();
    if (l->rails != NULL) {
        nb_two_level_begin(l, work);
    }
    return true;
}

static void share_done(const struct local *l, struct nb_work *work) {
    work->local.stage = NB_LOCAL_SHARE_DONE;
    nb_local_advance(l, &own_area(l)->done);
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
    if (emptied < reduced && NB_LEAST(l, l->size, reduced) > emptied) {
        nb_share_empty(l, work, emptied - first);
        nb_local_advance(l, &mine->emptied);
        if (emptied + 1 == end) {
            share_done(l, work);
        }
    } else if (reduced < filled && NB_LEAST(l, l->size, filled) > reduced) {
        nb_share_reduce(l, work, reduced - first);
        nb_local_advance(l, &mine->reduced);
    } else if (filled < end && filled < NB_LEAST(l, l->size, emptied) + NB_SHM_STAGES) {
        nb_share_fill(l, work, filled - first);
        nb_local_advance(l, &mine->filled);
    } else {
        return false;
    }
    atomic_fetch_add_explicit(&mine->pulse, 1, memory_order_relaxed);
    return true;
}

// As many as a turn may hold. What others owe is there in a moment: it is waited for between two steps.
static bool staged_steps(struct local *l, struct nb_work *work) {
    bool moved = false;
    int patience = l->job->spins ? SPIN_TURNS : 0;
    for (int i = 0, turns = 0; i < TURN_STEPS && work->local.stage == NB_LOCAL_RUNS;) {
        if (staged_step(l, work)) {
            moved = true;
            turns = 0;
            i++;
        } else if (moved && turns++ < patience) {
            nb_pause();
        } else {
            break;
        }
    }
    return moved;
}

static void finish(struct nb_work *work) {
    nb_list_remove(&work->local.link);
    if (work->quiet) {
        nb_probe_finished(work->comm->job, work);
        return;
    }
    nb_work_finish(work, NULL);
}

// What nobody touches any more is over. A staged line is complete with this rank's own share.
static bool finish_next(struct local *l) {
    bool any = false;
    while (!nb_list_empty(&l->queue)) {
        struct nb_work *work = NB_CONTAINER(l->queue.next, struct nb_work, local.link);
        if (work->local.stage != NB_LOCAL_SHARE_DONE ||
            (!work->local.staged && NB_LEAST(l, l->size, done) <= work->local.index)) {
            break;
        }
        if (!work->local.staged && is_taken_back(work)) { // looked at last: what others wrote before is here
            struct nb_error why = {0};
            nb_fail(
                &why, -EBUSY,
                "memory of this operation was taken back from the ranks of this host, as one of them did not answer "
                "another communicator");
            nb_job_fail(l->job, &why, true);
            return true;
        }
        finish(work);
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

// Begins operations that all ranks have described; a few move side by side. False: the job has failed.
static bool begin_next(struct local *l) {
    uint64_t open = atomic_load_explicit(&own_area(l)->done, memory_order_relaxed) + LOCAL_OPEN;
    NB_LIST_EACH(it, &l->queue) {
        struct nb_work *work = NB_CONTAINER(it, struct nb_work, local.link);
        if (work->local.stage > NB_LOCAL_DESCRIBED) {
            continue;
        }
        if (work->local.stage == NB_LOCAL_QUEUED || work->local.index >= open ||
            NB_LEAST(l, l->size, ready) <= work->local.index) {
            break;
        }
        if (!begin(l, work)) {
            return false;
        }
    }
    return true;
}

static bool rails_turn(struct local *l) {
    if (!begin_next(l)) {
        return true;
    }
    bool moved = nb_two_level_turn(l);
    struct nb_work *work = current(l);
    while (work != NULL && work->local.stage == NB_LOCAL_RUNS && nb_two_level_done(l, work)) {
        share_done(l, work);
        moved = true;
        work = current(l);
    }
    return moved;
}

static bool turn(struct local *l) {
    bool moved = finish_next(l);
    moved = describe_next(l) || moved;
    if (l->rails != NULL) {
        return rails_turn(l) || moved;
    }
    struct nb_work *work = current(l);
    if (work == NULL) {
        return moved;
    }
    if (work->local.stage == NB_LOCAL_DESCRIBED && NB_LEAST(l, l->size, ready) > work->local.index && !begin(l, work)) {
        return true;
    }
    if (work->local.stage == NB_LOCAL_RUNS && (work->local.staged ? staged_steps(l, work) : direct_step(l, work))) {
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
    if (l != NULL) {
        nb_shm_rouse(l->shm);
    }
    if (idle(l)) {
        return false;
    }
    bool moved = turn(l);
    while (!moved && l->rails == NULL && nb_drive_looks(job, l->moved_ns)) {
        for (int i = 0; i < SPIN_TURNS && !moved; i++) {
            nb_pause();
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

bool nb_local_everywhere(const struct nb_job *job) {
    return job->local != NULL && job->local->rails == NULL;
}

void nb_local_pipes(const struct nb_job *job, int peer, struct nb_shm_pipe **in, struct nb_shm_pipe **out) {
    struct nb_shm_area *area =
        nb_local_area(job->local, peer == 0 ? job->rank : peer); // all ranks: as the job has them
    *in = peer == 0 ? &area->from_first : &area->to_first;
    *out = peer == 0 ? &area->to_first : &area->from_first;
}

void nb_local_wake(const struct nb_job *job, int peer) {
    nb_shm_wake_one(job->local->shm, peer);
}

void nb_local_sleep(const struct nb_job *job) {
    nb_shm_sleep(job->local->shm);
}

int nb_local_hosts(const struct nb_job *job) {
    return job->local != NULL && job->local->rails != NULL ? job->local->hosts : 1;
}

size_t nb_local_piece_bytes(const struct nb_job *job) {
    return nb_local_hosts(job) > 1 ? (size_t)job->local->parts * nb_two_level_piece(job->local) : 0;
}

bool nb_local_takes(const struct nb_comm *comm, enum nb_op_kind kind) {
    return nb_local_everywhere(comm->job) && nb_comm_is_whole(comm) && kind != NB_OP_BARRIER && kind != NB_OP_ALLTOALL;
}

static bool is_taken(const struct nb_work *work) {
    bool bytes = work->starts[work->piece_count] > 0;
    return work->algorithm == NB_ALGORITHM_TWO_LEVEL || (bytes && nb_local_takes(work->comm, work->desc.kind));
}

bool nb_local_start(struct nb_work *work) {
    struct nb_job *job = work->comm->job;
    struct local *l = job->local;
    if (!is_taken(work)) {
        return false;
    }
    nb_list_remove(&work->link);
    nb_list_insert(&job->running, &work->link);
    work->running = true;
    work->in.moved_ns = work->times.start_ns;
    work->in.left = 1; // the deadlines ask for in.peer
    work->in.peer = job_rank(l, (l->rank + 1) % l->size);
    work->out.peer = work->in.peer;
    work->local = (struct nb_local_op){.taken = true, .index = l->started++};
    nb_list_insert(&l->queue, &work->local.link);
    l->moved_ns = work->times.start_ns;
    (void)describe_next(l);
    return true;
}

// A rank that was stopped while it wrote to others' memory goes on where it was. It can only write to lines of operations
// that are not over, as all ranks are done with the others: so the pages of these lines are replaced before their owner
// has them back. What the rank reads then is old, and of an operation that has failed here. Areas and staging of the job
// need no such care: they are unmapped with it, and never used again.
static void take_back(const struct local *l, const struct nb_work *work) {
    for (int i = 0; work->local.stage != NB_LOCAL_QUEUED && i < work->piece_count; i++) {
        int rc = nb_arena_detach(work->pieces[i].base, work->pieces[i].bytes);
        if (rc < 0) {
            char text[NB_ERROR_TEXT];
            snprintf(text, sizeof text,
                     "a rank of this host that does not answer may write to memory of a failed operation, of which no "
                     "copy can be made: %s",
                     nb_code_name(rc));
            nb_job_notify(l->job, text);
        }
    }
}

void nb_local_cancel(struct nb_work *work) {
    struct local *l = work->comm->job->local;
    nb_list_remove(&work->local.link);
    if (l->rails != NULL) {
        nb_two_level_cancel(l, work);
    }
    if (!l->broken) {
        l->broken = true;
        l->late = !nb_shm_revoke(l->shm, nb_now_ns() + REVOKE_NS);
    }
    if (l->late) {
        take_back(l, work);
    }
}

static bool is_late(const struct local *l, const struct nb_work *work, int rank) {
    const uint64_t index = work->local.index;
    const struct nb_shm_area *mine = own_area(l);
    const struct nb_shm_area *area = nb_local_area(l, rank);
    if (work->local.stage == NB_LOCAL_SHARE_DONE) {
        return !work->local.staged && atomic_load(&area->done) <= index;
    }
    if (work->local.stage == NB_LOCAL_RUNS && work->local.staged) {
        bool parts = rank < l->parts; // else it neither folds nor reduces
        return atomic_load(&area->filled) < atomic_load(&mine->filled) ||
               (parts && atomic_load(&area->folded) < atomic_load(&mine->folded)) ||
               (parts && atomic_load(&area->reduced) < atomic_load(&mine->reduced)) ||
               atomic_load(&area->emptied) < atomic_load(&mine->emptied);
    }
    return atomic_load(&area->ready) <= index;
}

// Whom an operation waits for: work->in.peer, and work->out.peer. This rank, where nobody else is late: the others may leave.
static void laggard(const struct local *l, struct nb_work *work) {
    if (l->rails != NULL && nb_two_level_waits(l, work)) {
        return;
    }
    int late = l->rank;
    for (int r = 0; r < l->size && late == l->rank; r++) {
        late = r != l->rank && is_late(l, work, r) ? r : late;
    }
    work->in.peer = job_rank(l, late);
    work->out.peer = work->in.peer;
}

void nb_local_tick(struct nb_job *job, int64_t now) {
    struct local *l = job->local;
    uint64_t pulses = 0;
    if (l != NULL && !job->failed) {
        nb_shm_tidy(l->shm);
    }
    if (idle(l)) {
        return;
    }
    (void)turn(l); // what a rank did before it left counts
    if (l->rails != NULL && nb_two_level_moved(l) != l->rail_bytes) {
        l->rail_bytes = nb_two_level_moved(l);
        atomic_fetch_add_explicit(&own_area(l)->pulse, 1, memory_order_relaxed);
    }
    for (int r = 0; r < l->size; r++) {
        pulses += atomic_load(&nb_local_area(l, r)->pulse);
    }
    NB_LIST_EACH(it, &l->queue) {
        struct nb_work *work = NB_CONTAINER(it, struct nb_work, local.link);
        laggard(l, work);
        work->in.moved_ns = pulses != l->pulses ? now : work->in.moved_ns;
    }
    l->pulses = pulses;
}

uint64_t nb_local_record(const struct nb_work *work) {
    nb_ring_put(work->comm->job->config.ring, NB_EV_OP_LANE, work->desc.key, work->round, NB_LANE_SHARED,
                work->local.bytes_out, work->local.bytes_in, 0);
    if (work->algorithm == NB_ALGORITHM_TWO_LEVEL) {
        return NB_ALGORITHM_TWO_LEVEL;
    }
    return work->local.staged ? NB_ALGORITHM_STAGED : NB_ALGORITHM_SHARED;
}
