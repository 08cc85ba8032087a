// Folds: what a rank reads and writes for its share of an operation in shared memory.
#include "engine/shared_fold.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/dtype.h"
#include "coll/reduce_pair.h"
#include "coll/ring_schedule.h"
#include "engine/context.h"
#include "engine/engine.h"
#include "transport/shm.h"

enum { PART_ALIGN = 64 };

static size_t least_of(size_t a, size_t b) {
    return a < b ? a : b;
}

static bool folds(const struct nb_work *work) {
    return work->desc.kind == NB_OP_ALLREDUCE || work->desc.kind == NB_OP_REDUCESCATTER;
}

static size_t part_bytes(const struct shared *l, const struct nb_work *work) {
    size_t bytes = work->starts[work->piece_count];
    size_t size = (size_t)l->parts;
    if (work->desc.kind == NB_OP_ALLGATHER || work->desc.kind == NB_OP_REDUCESCATTER) {
        return bytes / size;
    }
    size_t even = (bytes / work->element_bytes + size - 1) / size * work->element_bytes;
    return (even + PART_ALIGN - 1) / PART_ALIGN * PART_ALIGN;
}

static struct nb_range part_of(const struct shared *l, const struct nb_work *work, int part) {
    size_t bytes = work->starts[work->piece_count];
    size_t each = part_bytes(l, work);
    size_t begin = least_of((size_t)part * each, bytes);
    return (struct nb_range){.offset = begin, .bytes = least_of(begin + each, bytes) - begin};
}

struct nb_range nb_fold_part(const struct shared *l, const struct nb_work *work) {
    return part_of(l, work, l->rank);
}

// True if a part of a rank's buffer is an input (is_read), or receives the result (is_written).
static bool is_read(const struct nb_work *work, int part, int rank) {
    return folds(work) || rank == (work->desc.kind == NB_OP_ALLGATHER ? part : work->desc.root);
}

static bool is_written(const struct nb_work *work, int part, int rank) {
    switch (work->desc.kind) {
    case NB_OP_ALLREDUCE:
        return true;
    case NB_OP_REDUCESCATTER:
        return rank == part;
    default:
        return !is_read(work, part, rank);
    }
}

static const struct buffer_view *view_of(const struct shared *l, const struct nb_work *work, int rank) {
    return &l->views[nb_buffer_slot(l, work, rank)];
}

// Returns the memory at an offset of a buffer, and in `room` the contiguous bytes there.
static char *view_at(const struct buffer_view *view, size_t offset, size_t *room) {
    int low = 0;
    int high = view->count - 1;
    while (low < high) {
        int mid = (low + high + 1) / 2;
        if (view->starts[mid] <= offset) {
            low = mid;
        } else {
            high = mid - 1;
        }
    }
    *room = view->starts[low + 1] - offset;
    return (char *)view->pieces[low].base + (offset - view->starts[low]);
}

// Inputs of one step, in the order of ranks, and its outputs. Each is contiguous.
struct ends {
    int from_count;
    int to_count;
    const char *from[NB_SHM_RANKS_MAX];
    char *to[NB_SHM_RANKS_MAX];
};

// Accumulates in the first input if it is also the first output, else in l->sum.
static void fold(struct shared *l, const struct nb_work *work, const struct ends *ends, size_t bytes) {
    size_t count = bytes / work->element_bytes;
    double before = work->desc.prescale;
    double after = l->hosts == 1 ? work->desc.postscale : 1; // with several hosts the sum is not complete yet
    bool there = ends->to[0] == ends->from[0];
    char *sum = there ? ends->to[0] : l->sum;
    if (sum == NULL || ends->from[0] == NULL) {
        return; // no input: there is no such operation
    }
    if (!there) {
        memcpy(sum, ends->from[0], bytes);
    }
    if (before != 1) {
        work->scale(sum, count, before);
    }
    for (int i = 1; i < ends->from_count; i++) {
        const char *term = ends->from[i];
        if (before != 1) {
            memcpy(l->term, term, bytes);
            work->scale(l->term, count, before);
            term = l->term;
        }
        work->reduce(sum, term, count);
    }
    if (after != 1) {
        work->scale(sum, count, after);
    }
    for (int i = there; i < ends->to_count; i++) {
        memcpy(ends->to[i], sum, bytes);
    }
}

static void step(struct shared *l, const struct nb_work *work, const struct ends *ends, size_t bytes) {
    if (!folds(work)) {
        for (int i = 0; i < ends->to_count; i++) {
            memcpy(ends->to[i], ends->from[0], bytes);
        }
        return;
    }
    bool pair = ends->from_count == 2 && ends->to_count == 2 && work->desc.prescale == 1;
    nb_pair_fn both = pair ? nb_pair_kernel(work->desc.dtype, work->desc.redop) : NULL;
    if (both != NULL) {
        both(ends->to[0], ends->to[1], ends->from[0], ends->from[1], bytes / work->element_bytes, work->desc.postscale);
        return;
    }
    for (size_t at = 0; at < bytes; at += FOLD_BYTES) {
        struct ends here = *ends;
        for (int i = 0; i < here.from_count; i++) {
            here.from[i] += at;
        }
        for (int i = 0; i < here.to_count; i++) {
            here.to[i] += at;
        }
        fold(l, work, &here, least_of(bytes - at, FOLD_BYTES));
    }
}

void nb_fold_direct(struct shared *l, struct nb_work *work, struct nb_range range) {
    while (range.bytes > 0) {
        struct ends ends = {0};
        size_t bytes = range.bytes;
        for (int r = 0; r < l->size; r++) {
            bool in = is_read(work, l->rank, r);
            bool out = is_written(work, l->rank, r);
            if (in || out) {
                size_t room;
                char *at = view_at(view_of(l, work, r), range.offset, &room);
                bytes = least_of(bytes, room);
                ends.from[ends.from_count] = at;
                ends.to[ends.to_count] = at;
                ends.from_count += in;
                ends.to_count += out;
            }
        }
        step(l, work, &ends, bytes);
        work->shared.bytes_in += (uint64_t)(ends.from_count - is_read(work, l->rank, l->rank)) * bytes;
        work->shared.bytes_out += (uint64_t)(ends.to_count - is_written(work, l->rank, l->rank)) * bytes;
        range.offset += bytes;
        range.bytes -= bytes;
    }
}

// Every part has one block of this size in a window.
size_t nb_fold_block_bytes(const struct shared *l) {
    return (size_t)NB_SHM_STAGE_BYTES / (size_t)l->parts / PART_ALIGN * PART_ALIGN;
}

uint64_t nb_fold_windows(const struct shared *l, const struct nb_work *work) {
    return (part_bytes(l, work) + nb_fold_block_bytes(l) - 1) / nb_fold_block_bytes(l);
}

static struct nb_range block_of(const struct shared *l, const struct nb_work *work, int part, uint64_t window) {
    struct nb_range whole = part_of(l, work, part);
    size_t begin = least_of((size_t)window * nb_fold_block_bytes(l), whole.bytes);
    size_t end = least_of(begin + nb_fold_block_bytes(l), whole.bytes);
    return (struct nb_range){.offset = whole.offset + begin, .bytes = end - begin};
}

struct nb_range nb_fold_block(const struct shared *l, const struct nb_work *work, uint64_t block) {
    return block_of(l, work, l->rank, block);
}

// Returns the place of a part's block in a rank's staging.
static char *stage_at(const struct shared *l, const struct nb_work *work, int rank, int part, uint64_t window) {
    unsigned char *stage = l->shm->peers[rank].area->stage[(work->shared.window + window) % NB_SHM_STAGES];
    return (char *)stage + (size_t)part * nb_fold_block_bytes(l);
}

static void view_copy(const struct buffer_view *view, struct nb_range range, char *stage, bool to_view) {
    while (range.bytes > 0) {
        size_t room;
        char *at = view_at(view, range.offset, &room);
        size_t bytes = least_of(range.bytes, room);
        memcpy(to_view ? at : stage, to_view ? stage : at, bytes);
        stage += bytes;
        range.offset += bytes;
        range.bytes -= bytes;
    }
}

void nb_fold_fill(struct shared *l, struct nb_work *work, uint64_t window) {
    const struct buffer_view *mine = view_of(l, work, l->rank);
    for (int part = 0; part < l->parts; part++) {
        // The owner of a folded part reads its own data from its buffer.
        if (is_read(work, part, l->rank) && !(folds(work) && part == l->rank)) {
            view_copy(mine, block_of(l, work, part, window), stage_at(l, work, l->rank, part, window), false);
        }
    }
}

// Copies the result to where the other ranks read it. A kernel that stored there directly would wait for each cache
// line until its readers release it, which takes long across caches. A large copy does not.
void nb_fold_reduce(struct shared *l, struct nb_work *work, uint64_t window) {
    struct nb_range range = block_of(l, work, l->rank, window);
    bool either_way = l->size == 2 && work->desc.redop == NB_SUM; // start with this rank's term, to add in place
    size_t staged = 0;
    while (folds(work) && range.bytes > 0) {
        struct ends ends = {.from_count = l->size, .to_count = 1};
        size_t bytes;
        char *mine = view_at(view_of(l, work, l->rank), range.offset, &bytes);
        bytes = least_of(least_of(bytes, range.bytes), FOLD_BYTES);
        for (int r = 0; r < l->size; r++) {
            const char *term = r == l->rank ? mine : stage_at(l, work, r, l->rank, window) + staged;
            ends.from[either_way ? r != l->rank : r] = term;
        }
        ends.to[0] = mine;
        step(l, work, &ends, bytes);
        if (work->desc.kind == NB_OP_ALLREDUCE) {
            memcpy(stage_at(l, work, l->rank, l->rank, window) + staged, mine, bytes);
        }
        work->shared.bytes_in += (uint64_t)(l->size - 1) * bytes;
        staged += bytes;
        range.offset += bytes;
        range.bytes -= bytes;
    }
}

void nb_fold_empty(struct shared *l, struct nb_work *work, uint64_t window) {
    for (int part = 0; part < l->parts; part++) {
        int owner = work->desc.kind == NB_OP_BROADCAST ? work->desc.root : part;
        // A rank's buffer already has what the rank itself has folded or gathered.
        if (owner != l->rank && is_written(work, part, l->rank)) {
            struct nb_range range = block_of(l, work, part, window);
            view_copy(view_of(l, work, l->rank), range, stage_at(l, work, owner, part, window), true);
            work->shared.bytes_in += range.bytes;
        }
    }
}

// Locates all ranks' buffers at an offset, this rank's first. Returns the bytes for which all are contiguous.
static size_t views_at(struct shared *l, const struct nb_work *work, size_t offset, char *at[NB_SHM_RANKS_MAX]) {
    int n = 0;
    size_t least;
    at[n++] = view_at(view_of(l, work, l->rank), offset, &least);
    for (int r = 0; r < l->size; r++) {
        if (r != l->rank) {
            size_t room;
            at[n++] = view_at(view_of(l, work, r), offset, &room);
            least = least_of(least, room);
        }
    }
    return least;
}

// The sum starts with this rank's own term, to accumulate in place.
void nb_fold_sum(struct shared *l, struct nb_work *work, uint64_t block) {
    struct nb_range range = block_of(l, work, l->rank, block);
    size_t done = 0;
    while (range.bytes > 0) {
        struct ends ends = {.from_count = l->size, .to_count = 1};
        size_t bytes;
        if (work->shared.staged) {
            int n = 0;
            ends.to[0] = view_at(view_of(l, work, l->rank), range.offset, &bytes);
            ends.from[n++] = ends.to[0];
            for (int r = 0; r < l->size; r++) {
                if (r != l->rank) {
                    ends.from[n++] = stage_at(l, work, r, l->rank, block) + done;
                }
            }
        } else {
            char *at[NB_SHM_RANKS_MAX];
            bytes = views_at(l, work, range.offset, at);
            ends.to[0] = at[0];
            memcpy(ends.from, at, (size_t)l->size * sizeof at[0]);
        }
        bytes = least_of(bytes, range.bytes);
        step(l, work, &ends, bytes);
        work->shared.bytes_in += (uint64_t)(l->size - 1) * bytes;
        done += bytes;
        range.offset += bytes;
        range.bytes -= bytes;
    }
}

void nb_fold_spread(struct shared *l, struct nb_work *work, uint64_t block) {
    struct nb_range range = block_of(l, work, l->rank, block);
    if (work->shared.staged) {
        view_copy(view_of(l, work, l->rank), range, stage_at(l, work, l->rank, l->rank, block), false);
        work->shared.bytes_out += range.bytes;
        return;
    }
    while (range.bytes > 0) {
        char *at[NB_SHM_RANKS_MAX];
        size_t bytes = least_of(views_at(l, work, range.offset, at), range.bytes);
        for (int i = 1; i < l->size; i++) {
            memcpy(at[i], at[0], bytes);
        }
        work->shared.bytes_out += (uint64_t)(l->size - 1) * bytes;
        range.offset += bytes;
        range.bytes -= bytes;
    }
}
