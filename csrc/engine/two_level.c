// Two-level all-reduce: runs its pieces. Folds, rings and spreads each proceed in the order of pieces.
#include "engine/two_level.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#include "base/bits.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/list.h"
#include "coll/ring_schedule.h"
#include "engine/buffer.h"
#include "engine/context.h"
#include "engine/engine.h"
#include "engine/operation.h"
#include "engine/pipeline.h"
#include "engine/shared.h"
#include "engine/shared_fold.h"
#include "transport/lanes.h"
#include "transport/shm.h"

enum {
    PIECES_OPEN = 8,        // pieces between the start of their fold and the end of their spread
    RING_PART = 128 * 1024, // bytes of a piece per host: large enough for the lanes to be efficient
    ROUNDED = 64,           // rounding of a host's part of a piece to whole elements
    SEGMENTS_PER_BLOCK = 8  // in a network block; a buffer with more would have been fused
};

struct piece {
    struct nb_work *work;
    uint64_t first;  // first block, within the part
    uint64_t blocks; //
    uint64_t folded;
    uint64_t spread;
    bool landed; // the sum of all hosts is in this rank's buffer
    struct nb_work ring;
};

struct rails {
    struct shared *shared;
    int to;
    int from;
    uint64_t piece_blocks;
    size_t segments_max; // of a ring's buffer
    uint64_t begun;      // pieces started, counted over the job
    uint64_t sent;       // of these: folded and given to the lanes
    uint64_t over;
    uint64_t moved; // bytes of finished rings
    struct piece pieces[PIECES_OPEN];
};

static bool is_owner(const struct shared *l) {
    return l->rank < l->parts;
}

// Allocates the memory of a ring, reused for all pieces.
static int ring_alloc(const struct rails *rails, struct nb_work *ring) {
    struct nb_sched most;
    const struct shared *l = rails->shared;
    size_t bytes = rails->piece_blocks * nb_fold_block_bytes(l) + (size_t)l->hosts * ROUNDED;
    nb_sched_init(&most, NB_SCHED_RING_ALLREDUCE, l->host, l->hosts, 0, bytes, 1);
    ring->pieces = calloc(rails->segments_max, sizeof *ring->pieces);
    ring->starts = calloc(rails->segments_max + 1, sizeof *ring->starts);
    ring->in.map = calloc(nb_bits_words(nb_sched_blocks_in(&most)) + 1, sizeof(uint64_t));
    ring->out.map = calloc(nb_bits_words(nb_sched_blocks_out(&most)) + 1, sizeof(uint64_t));
    ring->flow_count = 2;
    ring->in.dir = NB_FLOW_IN;
    ring->in.peer = rails->from;
    ring->out.dir = NB_FLOW_OUT;
    ring->out.peer = rails->to;
    bool all = ring->pieces != NULL && ring->starts != NULL && ring->in.map != NULL && ring->out.map != NULL;
    return all ? 0 : -ENOMEM;
}

int nb_two_level_open(struct shared *l, int to, int from, struct nb_error *err) {
    size_t block = nb_fold_block_bytes(l);
    struct rails *rails = calloc(1, sizeof *rails);
    if (rails == NULL) {
        return nb_fail(err, -ENOMEM, "cannot allocate the rings between %d hosts", l->hosts);
    }
    l->rails = rails;
    rails->shared = l;
    rails->to = to;
    rails->from = from;
    rails->piece_blocks = ((uint64_t)l->hosts * RING_PART + block - 1) / block;
    l->piece_bytes = rails->piece_blocks * block;
    rails->segments_max = (rails->piece_blocks * block / NB_BLOCK_MIN + 2) * SEGMENTS_PER_BLOCK;
    for (int i = 0; i < PIECES_OPEN && is_owner(l); i++) {
        if (ring_alloc(rails, &rails->pieces[i].ring) < 0) {
            return nb_fail(err, -ENOMEM, "cannot allocate pieces between %d hosts", l->hosts);
        }
    }
    int rc = is_owner(l) ? nb_job_peer_ready(l->job, to, err) : 0;
    return rc == 0 && is_owner(l) ? nb_job_peer_ready(l->job, from, err) : rc;
}

void nb_two_level_close(struct shared *l) {
    for (int i = 0; l->rails != NULL && i < PIECES_OPEN; i++) {
        struct nb_work *ring = &l->rails->pieces[i].ring;
        free(ring->pieces);
        free(ring->starts);
        free(ring->in.map);
        free(ring->out.map);
    }
    free(l->rails);
    l->rails = NULL;
}

void nb_two_level_begin(struct shared *l, struct nb_work *work) {
    uint64_t blocks = nb_fold_windows(l, work);
    uint64_t each = l->rails->piece_blocks;
    work->shared.pieces = is_owner(l) ? (blocks + each - 1) / each : 0;
    work->shared.folded = 0;
    work->shared.spread = 0;
}

bool nb_two_level_done(const struct shared *l, const struct nb_work *work) {
    const struct nb_shm_area *mine = nb_shared_area(l, l->rank);
    uint64_t end = work->shared.window + work->shared.windows;
    bool emptied = !work->shared.staged || atomic_load_explicit(&mine->emptied, memory_order_relaxed) >= end;
    return emptied && work->shared.spread == work->shared.pieces;
}

// Returns the operation that a window of staging belongs to, or NULL: none yet.
static struct nb_work *work_of(const struct shared *l, uint64_t window) {
    NB_LIST_EACH(it, &l->queue) {
        struct nb_work *work = NB_CONTAINER(it, struct nb_work, shared.link);
        bool staged = work->shared.stage == NB_SHARED_RUNS && work->shared.staged;
        if (staged && window >= work->shared.window && window < work->shared.window + work->shared.windows) {
            return work;
        }
    }
    return NULL;
}

static bool fill_next(struct shared *l) {
    struct nb_shm_area *mine = nb_shared_area(l, l->rank);
    uint64_t window = atomic_load_explicit(&mine->filled, memory_order_relaxed);
    struct nb_work *work = work_of(l, window);
    if (work == NULL || window >= NB_LEAST(l, l->parts, folded) + NB_SHM_STAGES) {
        return false;
    }
    nb_fold_fill(l, work, window - work->shared.window);
    nb_shared_advance(l, &mine->filled);
    return true;
}

static bool empty_next(struct shared *l) {
    struct nb_shm_area *mine = nb_shared_area(l, l->rank);
    uint64_t window = atomic_load_explicit(&mine->emptied, memory_order_relaxed);
    struct nb_work *work = work_of(l, window);
    if (work == NULL || NB_LEAST(l, l->parts, reduced) <= window) {
        return false;
    }
    nb_fold_empty(l, work, window - work->shared.window);
    nb_shared_advance(l, &mine->emptied);
    return true;
}

// Returns the piece that is being folded, or starts the next one if there is room. NULL: none.
static struct piece *piece_folding(struct shared *l) {
    struct rails *rails = l->rails;
    struct piece *piece = &rails->pieces[rails->sent % PIECES_OPEN];
    if (rails->begun > rails->sent || rails->begun == rails->over + PIECES_OPEN) {
        return rails->begun > rails->sent ? piece : NULL;
    }
    NB_LIST_EACH(it, &l->queue) {
        struct nb_work *work = NB_CONTAINER(it, struct nb_work, shared.link);
        if (work->shared.stage == NB_SHARED_RUNS && work->shared.folded < work->shared.pieces) {
            uint64_t first = work->shared.folded++ * rails->piece_blocks;
            uint64_t left = nb_fold_windows(l, work) - first;
            piece->work = work;
            piece->first = first;
            piece->blocks = left < rails->piece_blocks ? left : rails->piece_blocks;
            piece->folded = 0;
            piece->spread = 0;
            piece->landed = false;
            rails->begun++;
            return piece;
        }
    }
    return NULL;
}

static struct nb_range piece_range(const struct shared *l, const struct piece *piece) {
    struct nb_range range = nb_fold_block(l, piece->work, piece->first);
    struct nb_range last = nb_fold_block(l, piece->work, piece->first + piece->blocks - 1);
    range.bytes = last.offset + last.bytes - range.offset;
    return range;
}

// Sets the ring's buffer to the piece, in this rank's buffer.
static void ring_line(const struct rails *rails, const struct piece *piece, struct nb_work *ring) {
    struct nb_range range = piece_range(rails->shared, piece);
    size_t end = range.offset + range.bytes;
    ring->piece_count = 0;
    ring->starts[0] = 0;
    while (range.bytes > 0 && (size_t)ring->piece_count < rails->segments_max) {
        struct iovec iov[1] = {{0}};
        int at = ring->piece_count++;
        (void)nb_buffer_memory(piece->work, range, iov, 1);
        ring->pieces[at] = (struct nb_segment){.base = iov[0].iov_base, .bytes = iov[0].iov_len};
        ring->starts[at + 1] = ring->starts[at] + iov[0].iov_len;
        range.offset += iov[0].iov_len;
        range.bytes = end - range.offset;
    }
}

static void ring_over(struct nb_work *ring) {
    struct piece *piece = ring->shared.piece;
    struct nb_work *work = piece->work;
    struct nb_job *job = ring->comm->job;
    for (int i = 0; i < job->info.streams_open; i++) {
        work->in.lane_bytes[i] += ring->in.lane_bytes[i];
        work->out.lane_bytes[i] += ring->out.lane_bytes[i];
    }
    work->in.bytes_moved += ring->in.bytes_moved;
    work->out.bytes_moved += ring->out.bytes_moved;
    job->shared->rails->moved += ring->in.bytes_moved + ring->out.bytes_moved;
    piece->landed = true;
}

static void ring_start(struct rails *rails, struct piece *piece) {
    const struct shared *l = rails->shared;
    struct nb_work *ring = &piece->ring;
    const struct nb_work *work = piece->work;
    ring->comm = work->comm;
    ring->on_flows_done = ring_over;
    ring->desc = work->desc;
    ring->desc.prescale = 1;
    ring->element_bytes = work->element_bytes;
    ring->reduce = work->reduce;
    ring->scale = work->scale;
    ring->shared = (struct nb_shared_op){.piece = piece};
    ring->seq = NB_OP_SECOND >> STEP_BITS | rails->sent++;
    ring_line(rails, piece, ring);
    nb_sched_init(&ring->sched, NB_SCHED_RING_ALLREDUCE, l->host, l->hosts, 0, ring->starts[ring->piece_count],
                  ring->element_bytes);
    ring->block_bytes = ring->sched.block_bytes;
    ring->in.blocks = nb_sched_blocks_in(&ring->sched);
    ring->out.blocks = nb_sched_blocks_out(&ring->sched);
    memset(ring->in.map, 0, (nb_bits_words(ring->in.blocks) + 1) * sizeof ring->in.map[0]);
    memset(ring->out.map, 0, (nb_bits_words(ring->out.blocks) + 1) * sizeof ring->out.map[0]);
    if (!nb_pipeline_begin(ring, nb_now_ns())) {
        piece->landed = true; // the piece is empty
    }
}

static bool fold_next(struct shared *l) {
    struct nb_shm_area *mine = nb_shared_area(l, l->rank);
    struct piece *piece = piece_folding(l);
    if (piece == NULL) {
        return false;
    }
    bool staged = piece->work->shared.staged;
    uint64_t window = piece->work->shared.window + piece->first + piece->folded;
    if ((staged && NB_LEAST(l, l->size, filled) <= window) || !nb_shm_write_begin(l->shm, &l->revoker)) {
        return false;
    }
    nb_fold_sum(l, piece->work, piece->first + piece->folded);
    nb_shm_write_end(l->shm);
    piece->folded++;
    if (staged) {
        nb_shared_advance(l, &mine->folded);
    }
    if (piece->folded == piece->blocks) {
        ring_start(l->rails, piece);
    }
    return true;
}

static bool spread_next(struct shared *l) {
    struct rails *rails = l->rails;
    struct nb_shm_area *mine = nb_shared_area(l, l->rank);
    struct piece *piece = &rails->pieces[rails->over % PIECES_OPEN];
    if (rails->over == rails->sent || !piece->landed) {
        return false;
    }
    bool staged = piece->work->shared.staged;
    uint64_t window = piece->work->shared.window + piece->first + piece->spread;
    if ((staged && window >= NB_LEAST(l, l->size, emptied) + NB_SHM_STAGES) ||
        !nb_shm_write_begin(l->shm, &l->revoker)) {
        return false;
    }
    nb_fold_spread(l, piece->work, piece->first + piece->spread);
    nb_shm_write_end(l->shm);
    piece->spread++;
    if (staged) {
        nb_shared_advance(l, &mine->reduced);
    }
    if (piece->spread == piece->blocks) {
        rails->over++;
        piece->work->shared.spread++;
    }
    return true;
}

bool nb_two_level_turn(struct shared *l) {
    bool moved = fold_next(l); // first: the ring that it starts proceeds by itself
    moved = spread_next(l) || moved;
    moved = fill_next(l) || moved;
    return empty_next(l) || moved;
}

static bool is_active(const struct nb_flow *flow) {
    return flow->ops != NULL && !nb_list_empty(&flow->link);
}

void nb_two_level_cancel(struct shared *l, struct nb_work *work) {
    struct rails *rails = l->rails;
    for (uint64_t i = rails->over; i < rails->sent; i++) {
        struct piece *piece = &rails->pieces[i % PIECES_OPEN];
        struct nb_flow *flows[] = {&piece->ring.in, &piece->ring.out};
        for (int f = 0; f < 2 && piece->work == work && !piece->landed; f++) {
            if (is_active(flows[f])) {
                nb_lanes_cancel(l->job->lanes, flows[f]);
            }
        }
    }
}

uint64_t nb_two_level_moved(const struct shared *l) {
    const struct rails *rails = l->rails;
    uint64_t bytes = rails->moved;
    for (uint64_t i = rails->over; i < rails->sent; i++) {
        const struct piece *piece = &rails->pieces[i % PIECES_OPEN];
        bytes += piece->landed ? 0 : piece->ring.in.bytes_moved + piece->ring.out.bytes_moved;
    }
    return bytes;
}

bool nb_two_level_waits(const struct shared *l, struct nb_work *work) {
    const struct rails *rails = l->rails;
    for (uint64_t i = rails->over; i < rails->sent; i++) {
        const struct piece *piece = &rails->pieces[i % PIECES_OPEN];
        bool in = is_active(&piece->ring.in);
        bool out = is_active(&piece->ring.out);
        if (piece->work == work && !piece->landed && (in || out)) {
            work->in.peer = in ? rails->from : rails->to;
            work->out.peer = out ? rails->to : rails->from;
            return true;
        }
    }
    return false;
}
