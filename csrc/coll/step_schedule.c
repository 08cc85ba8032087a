// Schedules of whole steps: peers and ranges of each step, without I/O.
#include "coll/step_schedule.h"

#include <stdbool.h>
#include <stddef.h>

#include "coll/ring_schedule.h"

enum { CUT_ALIGN = 64 };

void nb_steps_init(struct nb_steps *steps, enum nb_steps_kind kind, int rank, int size, size_t bytes) {
    *steps = (struct nb_steps){.kind = kind, .rank = rank, .size = size, .bytes = bytes};
    if (size == 1 || bytes == 0) {
        steps->kind = NB_STEPS_NONE;
        return;
    }
    if (kind == NB_STEPS_PAIRWISE) {
        steps->count = size - 1;
        return;
    }
    while (2 << steps->levels <= size) {
        steps->levels++;
    }
    steps->folded = size - (1 << steps->levels);
    steps->place = rank - steps->folded;
    if (rank < 2 * steps->folded) {
        steps->place = rank % 2 == 1 ? rank / 2 : NB_NO_RANK;
    }
    int fold = steps->folded > 0;
    int exchanges = kind == NB_STEPS_HALVING ? 2 * steps->levels : steps->levels;
    steps->count = fold + exchanges + fold;
    steps->reducing = fold + steps->levels;
}

// Returns the rank at an index among those that take part in the exchanges.
static int rank_at(const struct nb_steps *steps, int place) {
    return place < steps->folded ? 2 * place + 1 : place + steps->folded;
}

static struct nb_range all(const struct nb_steps *steps) {
    return (struct nb_range){.offset = 0, .bytes = steps->bytes};
}

// Returns one half of a range. The lower half takes the remainder.
static struct nb_range half(struct nb_range range, bool upper) {
    size_t lower = (range.bytes / 2 + CUT_ALIGN - 1) / CUT_ALIGN * CUT_ALIGN;
    lower = lower < range.bytes ? lower : range.bytes;
    if (upper) {
        return (struct nb_range){range.offset + lower, range.bytes - lower};
    }
    return (struct nb_range){range.offset, lower};
}

// Returns the range that a place owns after `times` halvings.
static struct nb_range halved(const struct nb_steps *steps, int place, int times) {
    struct nb_range range = all(steps);
    for (int i = 0; i < times; i++) {
        range = half(range, (place >> i & 1) != 0);
    }
    return range;
}

static const struct nb_step idle = {.to = NB_NO_RANK, .from = NB_NO_RANK};

// The first and the last step if the number of ranks is not a power of two.
static struct nb_step fold_step(const struct nb_steps *steps, bool first) {
    struct nb_step step = idle;
    if (steps->rank >= 2 * steps->folded) {
        return step;
    }
    bool gives = (steps->place == NB_NO_RANK) == first;
    if (gives) {
        step.to = first ? steps->rank + 1 : steps->rank - 1;
        step.out = all(steps);
    } else {
        step.from = first ? steps->rank - 1 : steps->rank + 1;
        step.in = all(steps);
        step.reduces = first;
        step.lower = first;
    }
    return step;
}

static int distance(int level) {
    return level < 31 ? (int)(1u << level) : 0;
}

static struct nb_step exchange_step(const struct nb_steps *steps, int index) {
    struct nb_step step = idle;
    bool back = index >= steps->levels;
    int level = back ? 2 * steps->levels - 1 - index : index;
    if (steps->place == NB_NO_RANK || level < 0) {
        return step;
    }
    int partner = steps->place ^ distance(level);
    step.to = rank_at(steps, partner);
    step.from = step.to;
    step.reduces = !back;
    step.lower = partner < steps->place;
    if (steps->kind == NB_STEPS_DOUBLING) {
        step.out = all(steps);
        step.in = all(steps);
        return step;
    }
    struct nb_range mine = halved(steps, steps->place, level + 1);
    struct nb_range theirs = halved(steps, partner, level + 1);
    step.out = back ? mine : theirs;
    step.in = back ? theirs : mine;
    return step;
}

static struct nb_step pairwise_step(const struct nb_steps *steps, int index) {
    int size = steps->size;
    size_t part = steps->bytes / (2 * (size_t)size);
    struct nb_step step = {.to = (steps->rank + 1 + index) % size, .from = (steps->rank + size - 1 - index) % size};
    step.out = (struct nb_range){(size_t)step.to * part, part};
    step.in = (struct nb_range){((size_t)size + (size_t)step.from) * part, part};
    return step;
}

struct nb_step nb_steps_get(const struct nb_steps *steps, int step) {
    int fold = steps->folded > 0;
    if (steps->kind == NB_STEPS_PAIRWISE) {
        return pairwise_step(steps, step);
    }
    if (fold && (step == 0 || step == steps->count - 1)) {
        return fold_step(steps, step == 0);
    }
    return exchange_step(steps, step - fold);
}

struct nb_range nb_steps_own(const struct nb_steps *steps) {
    if (steps->kind != NB_STEPS_HALVING || steps->place == NB_NO_RANK) {
        return (struct nb_range){0, 0};
    }
    return halved(steps, steps->place, steps->levels);
}

size_t nb_steps_bytes_out(const struct nb_steps *steps) {
    size_t bytes = 0;
    for (int i = 0; i < steps->count; i++) {
        bytes += nb_steps_get(steps, i).out.bytes;
    }
    return bytes;
}
