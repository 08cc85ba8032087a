// What does a rank read and write for its share of an operation in shared memory?
#include "engine/local_share.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/dtype.h"
#include "coll/reduce_pair.h"
#include "coll/sched.h"
#include "engine/engine.h"
#include "engine/internal.h"
#include "transport/shm.h"

enum { PART_ALIGN = 64 };

static size_t least_of(size_t a, size_t b) {
    return a < b ? a : b;
}

static bool folds(const struct nb_work *work) {
    return work->desc.kind == NB_OP_ALLREDUCE || work->desc.kind == NB_OP_REDUCESCATTER;
}

static size_t part_bytes(const struct local *l, const struct nb_work *work) {
    size_t bytes = work->starts[work->piece_count];
    size_t size = (size_t)l->parts;
    if (work->desc.kind == NB_OP_ALLGATHER || work->desc.kind == NB_OP_REDUCESCATTER) {
        return bytes / size;
    }
    size_t even = (bytes / work->element_bytes + size - 1) / size * work->element_bytes;
    return (even + PART_ALIGN - 1) / PART_ALIGN * PART_ALIGN;
}

static struct nb_range part_of(const struct local *l, const struct nb_work *work, int part) {
    size_t bytes = work->starts[work->piece_count];
    size_t each = part_bytes(l, work);
    size_t begin = least_of((size_t)part * each, bytes);
    return (struct nb_range){.offset = begin, .bytes = least_of(begin + each, bytes) - begin};
}

struct nb_range nb_share_part(const struct local *l, const struct nb_work *work) {
    return part_of(l, work, l->rank);
}

// Whether a part of a rank's line goes into the result, and whether the result goes there.
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

static const struct line *line_of(const struct local *l, const struct nb_work *work, int rank) {
    return &l->lines[nb_line_slot(l, work, rank)];
}

// Memory at an offset of a line, and how much of it lies there in one piece.
static char *line_at(const struct line *line, size_t offset, size_t *room) {
    int low = 0;
    int high = line->count - 1;
    while (low < high) {
        int mid = (low + high + 1) / 2;
        if (line->starts[mid] <= offset) {
            low = mid;
        } else {
            high = mid - 1;
        }
    }
    *room = line->starts[low + 1] - offset;
    return (char *)line->pieces[low].base + (offset - line->starts[low]);
}

// The ends of one step: what is read, in the order of ranks, and what is written, all in one piece each.
struct ends {
    int from_count;
    int to_count;
    const char *from[NB_SHM_RANKS_MAX];
    char *to[NB_SHM_RANKS_MAX];
};

// The sum grows where the first rank's term is, if the result goes there too, else in memory of this rank's own.
static void fold(struct local *l, const struct nb_work *work, const struct ends *ends, size_t bytes) {
    size_t count = bytes / work->element_bytes;
    double before = work->desc.prescale;
    double after = l->hosts == 1 ? work->desc.postscale : 1; // else the sum is not complete
    bool there = ends->to[0] == ends->from[0];
    char *sum = there ? ends->to[0] : l->sum;
    if (sum == NULL || ends->from[0] == NULL) {
        return; // nobody's memory: there is no such operation
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

static void step(struct local *l, const struct nb_work *work, const struct ends *ends, size_t bytes) {
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

void nb_share_direct(struct local *l, struct nb_work *work, struct nb_range range) {
    while (range.bytes > 0) {
        struct ends ends = {0};
        size_t bytes = range.bytes;
        for (int r = 0; r < l->size; r++) {
            bool in = is_read(work, l->rank, r);
            bool out = is_written(work, l->rank, r);
            if (in || out) {
                size_t room;
                char *at = line_at(line_of(l, work, r), range.offset, &room);
                bytes = least_of(bytes, room);
                ends.from[ends.from_count] = at;
                ends.to[ends.to_count] = at;
                ends.from_count += in;
                ends.to_count += out;
            }
        }
        step(l, work, &ends, bytes);
        work->local.bytes_in += (uint64_t)(ends.from_count - is_read(work, l->rank, l->rank)) * bytes;
        work->local.bytes_out += (uint64_t)(ends.to_count - is_written(work, l->rank, l->rank)) * bytes;
        range.offset += bytes;
        range.bytes -= bytes;
    }
}

// Of a window, every part has a block of this size.
size_t nb_share_block_bytes(const struct local *l) {
    return (size_t)NB_SHM_STAGE_BYTES / (size_t)l->parts / PART_ALIGN * PART_ALIGN;
}

uint64_t nb_share_windows(const struct local *l, const struct nb_work *work) {
    return (part_bytes(l, work) + nb_share_block_bytes(l) - 1) / nb_share_block_bytes(l);
}

static struct nb_range block_of(const struct local *l, const struct nb_work *work, int part, uint64_t window) {
    struct nb_range whole = part_of(l, work, part);
    size_t begin = least_of((size_t)window * nb_share_block_bytes(l), whole.bytes);
    size_t end = least_of(begin + nb_share_block_bytes(l), whole.bytes);
    return (struct nb_range){.offset = whole.offset + begin, .bytes = end - begin};
}

struct nb_range nb_share_block(const struct local *l, const struct nb_work *work, uint64_t block) {
    return block_of(l, work, l->rank, block);
}

// Where a rank's staging has a part's block of a window.
static char *stage_at(const struct local *l, const struct nb_work *work, int rank, int part, uint64_t window) {
    unsigned char *stage = l->shm->peers[rank].area->stage[(work->local.window + window) % NB_SHM_STAGES];
    return (char *)stage + (size_t)part * nb_share_block_bytes(l);
}

static void line_copy(const struct line *line, struct nb_range range, char *stage, bool to_line) {
    while (range.bytes > 0) {
        size_t room;
        char *at = line_at(line, range.offset, &room);
        size_t bytes = least_of(range.bytes, room);
        memcpy(to_line ? at : stage, to_line ? stage : at, bytes);
        stage += bytes;
        range.offset += bytes;
        range.bytes -= bytes;
    }
}

void nb_share_fill(struct local *l, struct nb_work *work, uint64_t window) {
    const struct line *mine = line_of(l, work, l->rank);
    for (int part = 0; part < l->parts; part++) {
        // A part that is folded is read by its own rank: this one has it in its line.
        if (is_read(work, part, l->rank) && !(folds(work) && part == l->rank)) {
            line_copy(mine, block_of(l, work, part, window), stage_at(l, work, l->rank, part, window), false);
        }
    }
}

// The result is copied to where the others read it: a kernel that stored there as it adds would wait for each line until
// its readers have let go of it, which takes long where they are behind another cache; a large copy does not.
void nb_share_reduce(struct local *l, struct nb_work *work, uint64_t window) {
    struct nb_range range = block_of(l, work, l->rank, window);
    bool either_way = l->size == 2 && work->desc.redop == NB_SUM; // then it begins with this rank's, to grow in place
    size_t staged = 0;
    while (folds(work) && range.bytes > 0) {
        struct ends ends = {.from_count = l->size, .to_count = 1};
        size_t bytes;
        char *mine = line_at(line_of(l, work, l->rank), range.offset, &bytes);
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
        work->local.bytes_in += (uint64_t)(l->size - 1) * bytes;
        staged += bytes;
        range.offset += bytes;
        range.bytes -= bytes;
    }
}

void nb_share_empty(struct local *l, struct nb_work *work, uint64_t window) {
    for (int part = 0; part < l->parts; part++) {
        int owner = work->desc.kind == NB_OP_BROADCAST ? work->desc.root : part;
        // What a rank has folded or gathered itself is in its line already.
        if (owner != l->rank && is_written(work, part, l->rank)) {
            struct nb_range range = block_of(l, work, part, window);
            line_copy(line_of(l, work, l->rank), range, stage_at(l, work, owner, part, window), true);
            work->local.bytes_in += range.bytes;
        }
    }
}

// The lines of all ranks at an offset, this one's first, and how far all of them lie there in one piece.
static size_t lines_at(struct local *l, const struct nb_work *work, size_t offset, char *at[NB_SHM_RANKS_MAX]) {
    int n = 0;
    size_t least;
    at[n++] = line_at(line_of(l, work, l->rank), offset, &least);
    for (int r = 0; r < l->size; r++) {
        if (r != l->rank) {
            size_t room;
            at[n++] = line_at(line_of(l, work, r), offset, &room);
            least = least_of(least, room);
        }
    }
    return least;
}

// The sum begins with this rank's own term, so that it grows in place.
void nb_share_fold(struct local *l, struct nb_work *work, uint64_t block) {
    struct nb_range range = block_of(l, work, l->rank, block);
    size_t done = 0;
    while (range.bytes > 0) {
        struct ends ends = {.from_count = l->size, .to_count = 1};
        size_t bytes;
        if (work->local.staged) {
            int n = 0;
            ends.to[0] = line_at(line_of(l, work, l->rank), range.offset, &bytes);
            ends.from[n++] = ends.to[0];
            for (int r = 0; r < l->size; r++) {
                if (r != l->rank) {
                    ends.from[n++] = stage_at(l, work, r, l->rank, block) + done;
                }
            }
        } else {
            char *at[NB_SHM_RANKS_MAX];
            bytes = lines_at(l, work, range.offset, at);
            ends.to[0] = at[0];
            memcpy(ends.from, at, (size_t)l->size * sizeof at[0]);
        }
        bytes = least_of(bytes, range.bytes);
        step(l, work, &ends, bytes);
        work->local.bytes_in += (uint64_t)(l->size - 1) * bytes;
        done += bytes;
        range.offset += bytes;
        range.bytes -= bytes;
    }
}

void nb_share_spread(struct local *l, struct nb_work *work, uint64_t block) {
    struct nb_range range = block_of(l, work, l->rank, block);
    if (work->local.staged) {
        line_copy(line_of(l, work, l->rank), range, stage_at(l, work, l->rank, l->rank, block), false);
        work->local.bytes_out += range.bytes;
        return;
    }
    while (range.bytes > 0) {
        char *at[NB_SHM_RANKS_MAX];
        size_t bytes = least_of(lines_at(l, work, range.offset, at), range.bytes);
        for (int i = 1; i < l->size; i++) {
            memcpy(at[i], at[0], bytes);
        }
        work->local.bytes_out += (uint64_t)(l->size - 1) * bytes;
        range.offset += bytes;
        range.bytes -= bytes;
    }
}
