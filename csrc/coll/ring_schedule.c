// Ring and chain schedules as arithmetic, without I/O.
#include "coll/ring_schedule.h"
#include <stddef.h>
#include <stdint.h>

enum { PART_ALIGN = 64 };

static size_t round_up(size_t value, size_t unit) {
    return (value + unit - 1) / unit * unit;
}

static void ring_init(struct nb_sched *sched, size_t element_bytes) {
    size_t size = (size_t)sched->size;
    uint32_t hops = (uint32_t)sched->size - 1;
    sched->steps_out = hops;
    sched->part_bytes = sched->bytes / size;
    if (sched->kind == NB_SCHED_RING_ALLREDUCE) {
        size_t elements = sched->bytes / element_bytes;
        sched->part_bytes = round_up((elements + size - 1) / size * element_bytes, PART_ALIGN);
        sched->steps_out = 2 * hops;
    }
    sched->steps_in = sched->steps_out;
    sched->reduce_steps = sched->kind == NB_SCHED_RING_ALLGATHER ? 0 : hops;
}

static void chain_init(struct nb_sched *sched) {
    sched->part_bytes = sched->bytes;
    sched->steps_in = sched->rank == sched->root ? 0 : 1;
    sched->steps_out = sched->to == sched->root ? 0 : 1;
}

void nb_sched_init(struct nb_sched *sched, enum nb_sched_kind kind, int rank, int size, int root, size_t bytes,
                   size_t element_bytes) {
    *sched = (struct nb_sched){.kind = kind, .rank = rank, .size = size, .root = root, .bytes = bytes};
    sched->to = (rank + 1) % size;
    sched->from = (rank + size - 1) % size;
    sched->block_bytes = NB_BLOCK_MIN;
    if (size == 1 || bytes == 0) {
        sched->kind = NB_SCHED_NONE;
    }
    if (sched->kind == NB_SCHED_NONE) {
        return;
    }
    if (sched->kind == NB_SCHED_CHAIN_BROADCAST) {
        chain_init(sched);
    } else {
        ring_init(sched, element_bytes);
    }
    // All ranks must reach the same block size, also those that only send or only receive.
    size_t steps = sched->steps_out > sched->steps_in ? sched->steps_out : sched->steps_in;
    while (steps * ((sched->part_bytes + sched->block_bytes - 1) / sched->block_bytes) > NB_BLOCKS_MAX) {
        sched->block_bytes *= 2;
    }
    sched->per_step = (uint32_t)((sched->part_bytes + sched->block_bytes - 1) / sched->block_bytes);
}

uint32_t nb_sched_blocks_out(const struct nb_sched *sched) {
    return sched->steps_out * sched->per_step;
}

uint32_t nb_sched_blocks_in(const struct nb_sched *sched) {
    return sched->steps_in * sched->per_step;
}

// Returns the part that leaves in a step. The part that arrives is the one before it: the neighbour's outgoing part.
static size_t part_out(const struct nb_sched *sched, uint32_t step) {
    if (sched->kind == NB_SCHED_CHAIN_BROADCAST) {
        return 0;
    }
    size_t size = (size_t)sched->size;
    size_t shift = step + (sched->kind == NB_SCHED_RING_REDUCESCATTER ? 1 : 0);
    return ((size_t)sched->rank + 2 * size - shift) % size;
}

static size_t part_in(const struct nb_sched *sched, uint32_t step) {
    if (sched->kind == NB_SCHED_CHAIN_BROADCAST) {
        return 0;
    }
    size_t size = (size_t)sched->size;
    return (part_out(sched, step) + size - 1) % size;
}

static size_t at_most(size_t value, size_t limit) {
    return value < limit ? value : limit;
}

static struct nb_range part_range(const struct nb_sched *sched, size_t part) {
    size_t begin = at_most(part * sched->part_bytes, sched->bytes);
    size_t end = at_most(begin + sched->part_bytes, sched->bytes);
    return (struct nb_range){begin, end - begin};
}

static struct nb_range run_range(const struct nb_sched *sched, size_t part, uint32_t first, uint32_t count) {
    struct nb_range whole = part_range(sched, part);
    size_t begin = at_most((first % sched->per_step) * sched->block_bytes, whole.bytes);
    size_t end = at_most(begin + count * sched->block_bytes, whole.bytes);
    return (struct nb_range){whole.offset + begin, end - begin};
}

struct nb_range nb_sched_out(const struct nb_sched *sched, uint32_t first, uint32_t count) {
    return run_range(sched, part_out(sched, first / sched->per_step), first, count);
}

struct nb_range nb_sched_in(const struct nb_sched *sched, uint32_t first, uint32_t count) {
    return run_range(sched, part_in(sched, first / sched->per_step), first, count);
}

bool nb_sched_ready(const struct nb_sched *sched, uint32_t block) {
    if (block >= nb_sched_blocks_out(sched)) {
        return false;
    }
    return sched->kind == NB_SCHED_CHAIN_BROADCAST ? sched->rank == sched->root : block < sched->per_step;
}

uint32_t nb_sched_next(const struct nb_sched *sched, uint32_t landed) {
    uint32_t next = sched->kind == NB_SCHED_CHAIN_BROADCAST ? landed : landed + sched->per_step;
    return next < nb_sched_blocks_out(sched) ? next : NB_NO_BLOCK;
}

bool nb_sched_reduces(const struct nb_sched *sched, uint32_t block) {
    return block < sched->reduce_steps * sched->per_step;
}

bool nb_sched_completes(const struct nb_sched *sched, uint32_t block) {
    return nb_sched_reduces(sched, block) && block >= (sched->reduce_steps - 1) * sched->per_step;
}

size_t nb_sched_bytes_out(const struct nb_sched *sched) {
    size_t bytes = 0;
    for (uint32_t step = 0; step < sched->steps_out; step++) {
        bytes += part_range(sched, part_out(sched, step)).bytes;
    }
    return bytes;
}
