// Collectives with exact results: fills buffers of any layout with small integers, runs one operation, compares the
// result on each rank.
#ifndef NB_TESTS_SUMS_H
#define NB_TESTS_SUMS_H

#include <stdint.h>

#include "base/arena.h"
#include "base/dtype.h"
#include "base/half.h"
#include "job.h"

enum { ARENA_BYTES = 16 << 20, KINDS_COUNT = 9001 };

static inline struct nb_job_info job_info(struct test_rank *me) {
    struct nb_job_info info;
    nb_job_info(me->job, &info);
    return info;
}

// Opens an arena that all ranks have mapped on return. A rank in the second barrier has handled all messages that were
// sent before the first. The arena stays open until the process ends.
static inline char *arena_share(struct test_rank *me) {
    struct nb_error err = {0};
    struct nb_arena arena;
    CHECK(nb_arena_open(&arena, ARENA_BYTES, &err) == 0, "open arena: %s", err.text);
    CHECK(nb_job_map_arena(me->job, &arena, &err) == 0, "map: %s", err.text);
    test_barrier(me, "mapped");
    test_barrier(me, "known");
    return arena.base;
}

static inline uint8_t input_value(int rank, size_t i) {
    return (uint8_t)((i * 3 + (size_t)rank * 5) % 13);
}

// Write and read an element of any type.
static inline void element_put(char *at, int dtype, double value) {
    float f32 = (float)value;
    int64_t contiguous = (int64_t)value;
    uint16_t f16 = nb_f16_narrow(f32);
    uint16_t bf16 = nb_bf16_narrow(f32);
    switch (dtype) {
    case NB_F32:
        memcpy(at, &f32, sizeof f32);
        break;
    case NB_F64:
        memcpy(at, &value, sizeof value);
        break;
    case NB_F16:
        memcpy(at, &f16, sizeof f16);
        break;
    case NB_BF16:
        memcpy(at, &bf16, sizeof bf16);
        break;
    default:
        memcpy(at, &contiguous, nb_dtype_size(dtype)); // little-endian
    }
}

static inline double element_get(const char *at, int dtype) {
    float f32;
    double f64;
    uint16_t half;
    int64_t contiguous = 0;
    switch (dtype) {
    case NB_F32:
        memcpy(&f32, at, sizeof f32);
        return (double)f32;
    case NB_F64:
        memcpy(&f64, at, sizeof f64);
        return f64;
    case NB_F16:
        memcpy(&half, at, sizeof half);
        return (double)nb_f16_widen(half);
    case NB_BF16:
        memcpy(&half, at, sizeof half);
        return (double)nb_bf16_widen(half);
    default:
        memcpy(&contiguous, at, nb_dtype_size(dtype));
        return (double)contiguous;
    }
}

static inline double reduce_inputs(int redop, int size, size_t i) {
    double all = input_value(0, i);
    for (int r = 1; r < size; r++) {
        double next = input_value(r, i);
        all = redop == NB_SUM ? all + next : redop == NB_PRODUCT ? all * next : all;
        all = (redop == NB_MIN && next < all) || (redop == NB_MAX && next > all) ? next : all;
    }
    return all;
}

struct layout {
    int pieces;
    size_t gap; // bytes between two pieces
};

// Splits `bytes` of memory from `base` on into pieces of whole elements.
static inline int split_buffer(char *base, size_t bytes, size_t element, struct layout layout,
                               struct nb_segment *segments) {
    size_t each = bytes / element / (size_t)layout.pieces * element;
    size_t done = 0;
    for (int i = 0; i < layout.pieces; i++) {
        size_t take = i == layout.pieces - 1 ? bytes - done : each;
        segments[i] = (struct nb_segment){.base = base + done + (size_t)i * layout.gap, .bytes = take};
        done += take;
    }
    return layout.pieces;
}

// Elements that repeat with the period of input_value, several times, so that long runs of them take few calls.
enum { PERIOD = 13, REPEATS = 64 };
struct pattern {
    size_t element;
    char bytes[(REPEATS + 1) * PERIOD * sizeof(double)];
};

static inline struct pattern pattern_of(int dtype, const double values[PERIOD]) {
    struct pattern p = {.element = nb_dtype_size(dtype)};
    for (size_t i = 0; i < PERIOD; i++) {
        element_put(p.bytes + i * p.element, dtype, values[i]);
    }
    for (size_t i = 1; i <= REPEATS; i++) {
        memcpy(p.bytes + i * PERIOD * p.element, p.bytes, PERIOD * p.element);
    }
    return p;
}

static inline struct pattern pattern_of_input(int dtype, int rank) {
    double values[PERIOD];
    for (size_t i = 0; i < PERIOD; i++) {
        values[i] = input_value(rank, i);
    }
    return pattern_of(dtype, values);
}

static inline struct pattern pattern_of_result(int dtype, int redop, int size) {
    double values[PERIOD];
    for (size_t i = 0; i < PERIOD; i++) {
        values[i] = reduce_inputs(redop, size, i);
    }
    return pattern_of(dtype, values);
}

// Writes elements [first, end) of a buffer.
static inline void pattern_write(const struct pattern *p, const struct nb_segment *segments, size_t first, size_t end) {
    size_t begin = 0; // of the segment
    for (size_t at = first * p->element, last = end * p->element; at < last; begin += segments->bytes, segments++) {
        size_t stop = begin + segments->bytes < last ? begin + segments->bytes : last;
        for (size_t take; at < stop; at += take) {
            take = stop - at < REPEATS * PERIOD * p->element ? stop - at : REPEATS * PERIOD * p->element;
            memcpy((char *)segments->base + at - begin, p->bytes + at / p->element % PERIOD * p->element, take);
        }
    }
}

// Compares elements [first, end) of a buffer. Returns the first one that differs, else `end`.
static inline size_t pattern_compare(const struct pattern *p, const struct nb_segment *segments, size_t first,
                                     size_t end) {
    size_t begin = 0; // of the segment
    for (size_t at = first * p->element, last = end * p->element; at < last; begin += segments->bytes, segments++) {
        size_t stop = begin + segments->bytes < last ? begin + segments->bytes : last;
        for (size_t take; at < stop; at += take) {
            take = stop - at < REPEATS * PERIOD * p->element ? stop - at : REPEATS * PERIOD * p->element;
            const char *want = p->bytes + at / p->element % PERIOD * p->element;
            const char *got = (const char *)segments->base + at - begin;
            if (memcmp(got, want, take) != 0) {
                size_t same = 0;
                while (got[same] == want[same]) {
                    same++;
                }
                return (at + same) / p->element;
            }
        }
    }
    return end;
}

// Expected element i of a rank's buffer after the operation; -1: not checked.
static inline double expected_value(const struct test_rank *me, const struct nb_op *op, size_t i, size_t count) {
    size_t each = count / (size_t)me->size;
    int part = each > 0 ? (int)(i / each) : 0;
    switch (op->kind) {
    case NB_OP_ALLREDUCE:
        return reduce_inputs(op->redop, me->size, i);
    case NB_OP_REDUCESCATTER:
        return part == me->rank ? reduce_inputs(op->redop, me->size, i) : -1;
    case NB_OP_ALLGATHER:
        return input_value(part, i);
    default:
        return input_value(op->root, i);
    }
}

// Compares a rank's buffer with what the operation leaves there; of a reduce-scatter, only its own part. Returns the first
// element that differs, else `count`.
static inline size_t result_compare(const struct test_rank *me, const struct nb_op *op, size_t count) {
    size_t each = count / (size_t)me->size;
    size_t own = (size_t)me->rank * each;
    struct pattern p = op->kind == NB_OP_BROADCAST ? pattern_of_input(op->dtype, op->root)
                                                   : pattern_of_result(op->dtype, op->redop, me->size);
    if (op->kind == NB_OP_REDUCESCATTER) {
        size_t at = pattern_compare(&p, op->segments, own, own + each);
        return at < own + each ? at : count;
    }
    if (op->kind != NB_OP_ALLGATHER) {
        return pattern_compare(&p, op->segments, 0, count);
    }
    for (int r = 0; r < me->size; r++) {
        size_t end = (size_t)(r + 1) * each;
        p = pattern_of_input(op->dtype, r);
        size_t at = pattern_compare(&p, op->segments, end - each, end);
        if (at < end) {
            return at;
        }
    }
    return count;
}

static inline void check_operation(struct test_rank *me, struct nb_op op, char *base, size_t count,
                                   struct layout layout) {
    struct nb_segment segments[300];
    char name[NB_NAME_MAX];
    size_t element = nb_dtype_size(op.dtype);
    bool parts = op.kind == NB_OP_ALLGATHER || op.kind == NB_OP_REDUCESCATTER;
    count = parts ? count / (size_t)me->size * (size_t)me->size : count;
    if (count == 0) {
        return;
    }
    snprintf(name, sizeof name, "%s %d %s %s %zu", op.name, (int)op.kind, nb_dtype_name(op.dtype),
             nb_redop_name(op.redop), count);
    op.name = name;
    op.segments = segments;
    op.segment_count = split_buffer(base, count * element, element, layout, segments);
    struct pattern p = pattern_of_input(op.dtype, me->rank);
    pattern_write(&p, segments, 0, count);
    test_done(me, test_submit(me, op));
    size_t at = result_compare(me, &op, count);
    CHECK(at == count, "rank %d of %d, %s: [%zu] of %zu is not what the inputs give", me->rank, me->size, name, at,
          count);
}

static const struct layout contiguous = {.pieces = 1};

static inline void check_all_kinds(struct test_rank *me, char *base, const char *where) {
    static const int dtypes[] = {NB_U8, NB_I8, NB_I32, NB_I64, NB_BF16, NB_F32, NB_F64};
    for (size_t d = 0; d < sizeof dtypes / sizeof dtypes[0]; d++) {
        struct nb_op op = {.name = where, .dtype = dtypes[d]};
        bool narrow = dtypes[d] == NB_U8 || dtypes[d] == NB_I8 || dtypes[d] == NB_BF16;
        for (op.redop = 0; op.redop < NB_REDOPS; op.redop++) {
            if (op.redop == NB_PRODUCT && (narrow || me->size > 4)) {
                continue; // the product overflows the type
            }
            op.kind = NB_OP_ALLREDUCE;
            check_operation(me, op, base, KINDS_COUNT, contiguous);
            op.kind = NB_OP_REDUCESCATTER;
            check_operation(me, op, base, KINDS_COUNT, contiguous);
        }
        op.redop = NB_SUM;
        op.kind = NB_OP_ALLGATHER;
        check_operation(me, op, base, KINDS_COUNT, contiguous);
        op.kind = NB_OP_BROADCAST;
        op.root = me->size - 1;
        check_operation(me, op, base, 301, contiguous);
        op.root = 0;
        check_operation(me, op, base + 1, KINDS_COUNT, contiguous);
    }
}

static inline void check_all_sizes(struct test_rank *me, char *base, const char *where) {
    static const size_t counts[] = {1, 2, 5, 63, 1000, 4096, 65537};
    const struct layout cut[] = {{.pieces = 3, .gap = 7 * (size_t)me->rank}, {.pieces = 100, .gap = 12}};
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        struct nb_op op = {.name = where, .kind = NB_OP_ALLREDUCE, .dtype = NB_F32};
        check_operation(me, op, base + 4 * i, counts[i], contiguous);
        check_operation(me, op, base, counts[i], cut[0]);
        check_operation(me, op, base, counts[i], cut[me->rank % 2]);
    }
    // Several rounds and several staging windows.
    for (int kind = NB_OP_ALLREDUCE; kind <= NB_OP_BROADCAST; kind++) {
        struct nb_op op = {.name = where, .kind = (enum nb_op_kind)kind, .dtype = NB_F64, .root = me->size - 1};
        check_operation(me, op, base, 90001 * (size_t)me->size, cut[0]);
    }
}

static inline void check_scale_factors(struct test_rank *me, float *data, const char *where) {
    static const double before[] = {0.5, 1, 0.5, 0, 2};
    static const double after[] = {4, 4, 1, 2, 0};
    for (int round = 0; round < 5; round++) {
        struct nb_segment all = {.base = data, .bytes = KINDS_COUNT * sizeof *data};
        struct nb_op op = test_op(where, NB_OP_ALLREDUCE, &all);
        op.scaled = true;
        op.prescale = before[round];
        op.postscale = after[round];
        double factor = before[round] * after[round];
        for (size_t i = 0; i < KINDS_COUNT; i++) {
            data[i] = input_value(me->rank, i);
        }
        test_done(me, test_submit(me, op));
        for (size_t i = 0; i < KINDS_COUNT; i++) {
            double want = factor * reduce_inputs(NB_SUM, me->size, i);
            CHECK((double)data[i] == want, "rank %d: [%zu] is %g, not %g", me->rank, i, (double)data[i], want);
        }
    }
}

#endif
