// Vector set: a set of kernels, made from one instruction set's operations. A kernel file includes it once, at its end,
// after coll/vectors.h. Before that it defines SET (the set's name) and
//   u8_min_op … i64_max_op              by OP
//   floats_min, floats_max, doubles_min, doubles_max of two vectors
//   f16_load, f16_join, f16_add         half a vector of float16 as floats; two floats as float16; sum of floats
//   bf16_load, bf16_one, bf16_other     a vector of bfloat16; either half of its elements as floats
//   bf16_round, bf16_join               both halves as bfloat16: from floats of any value; from exact bfloat16 values
//   SCALES_INTEGERS, u8_scale_op … i64_scale_op by vectors of float64, if the CPU can
#ifndef NB_COLL_VECTOR_SET_H
#define NB_COLL_VECTOR_SET_H

#include <stddef.h>

#include "base/dtype.h"
#include "coll/kernels.h"
#include "coll/vectors.h"

static inline TARGET floats floats_add(floats a, floats b) {
    return a + b;
}

static inline TARGET floats floats_multiply(floats a, floats b) {
    return a * b;
}

// A factor for bfloat16. A NaN gets a zero lower half, as in sums and products of bfloat16.
static inline float bf16_factor(double by) {
    return by == by ? (float)by : __builtin_nanf("");
}

// Operations on 16-bit types: two operations on float32.
#define OP_F16(name, op)                                                                                               \
    static inline TARGET vector name##_op(const char *to, const char *from) {                                          \
        return f16_join(op(f16_load(to), f16_load(from)), op(f16_load(to + HALF), f16_load(from + HALF)));             \
    }

#define OP_BF16(name, op, narrow)                                                                                      \
    static inline TARGET vector name##_op(const char *to, const char *from) {                                          \
        vector a = bf16_load(to);                                                                                      \
        vector b = bf16_load(from);                                                                                    \
        return narrow(op(bf16_one(a), bf16_one(b)), op(bf16_other(a), bf16_other(b)));                                 \
    }

OP(f32_min, floats, floats_min(a, b))
OP(f32_max, floats, floats_max(a, b))
OP(f64_min, doubles, doubles_min(a, b))
OP(f64_max, doubles, doubles_max(a, b))
OP_F16(f16_sum, f16_add)
OP_F16(f16_min, floats_min)
OP_F16(f16_max, floats_max)
OP_F16(f16_product, floats_multiply)
OP_BF16(bf16_sum, floats_add, bf16_round)
OP_BF16(bf16_min, floats_min, bf16_join)
OP_BF16(bf16_max, floats_max, bf16_join)
OP_BF16(bf16_product, floats_multiply, bf16_round)
OP(f32_scale, floats, a *b)
OP(f64_scale, doubles, a *b)
OP(bf16_scale, vector, bf16_round(bf16_one(a) * (floats)b, bf16_other(a) * (floats)b))

static inline TARGET vector f16_scale_op(const char *to, const char *from) {
    floats factor = (floats)vector_load(from);
    return f16_join(f16_load(to) * factor, f16_load(to + HALF) * factor);
}

#define REDUCE(name, element)                                                                                          \
    static TARGET void name(void *restrict dst, const void *restrict src, size_t count) {                              \
        vectors_reduce(dst, src, count * sizeof(element), sizeof(element), name##_op);                                 \
    }

// The operation gets `value`, computed from `by`, in every element of the type `numbers`.
#define SCALE(name, element, numbers, value)                                                                           \
    static inline TARGET vector name##_factor(double by) {                                                             \
        return (vector)((value) - (numbers){0});                                                                       \
    }                                                                                                                  \
    static TARGET void name(void *dst, size_t count, double by) {                                                      \
        vectors_scale(dst, name##_factor(by), count * sizeof(element), sizeof(element), name##_op);                    \
    }

#define PAIRS(element, sum, scale, factor)                                                                             \
    vectors_pair((char *[]){one, two}, (const char *[]){a, b}, count * sizeof(element), sum, scale, factor)

// A sum is rounded before it is scaled, as with two separate kernels.
#define PAIR(name, element)                                                                                            \
    static TARGET void name##_pair(void *one, void *two, const void *a, const void *b, size_t count, double by) {      \
        vector factor = name##_scale_factor(by);                                                                       \
        if (by == 1) {                                                                                                 \
            PAIRS(element, name##_sum_op, NULL, NULL);                                                                 \
        } else {                                                                                                       \
            PAIRS(element, name##_sum_op, name##_scale_op, &factor);                                                   \
        }                                                                                                              \
    }

#define PAIR_INTEGER(name, dtype, element, sum)                                                                        \
    static TARGET void name##_pair(void *one, void *two, const void *a, const void *b, size_t count, double by) {      \
        if (by == 1) {                                                                                                 \
            PAIRS(element, sum##_op, NULL, NULL);                                                                      \
        } else {                                                                                                       \
            nb_pair_generic[dtype](one, two, a, b, count, by);                                                         \
        }                                                                                                              \
    }

REDUCE(u8_sum, uint8_t)
REDUCE(u8_min, uint8_t)
REDUCE(u8_max, uint8_t)
REDUCE(u8_product, uint8_t)
REDUCE(i8_min, int8_t)
REDUCE(i8_max, int8_t)
REDUCE(u32_sum, uint32_t)
REDUCE(i32_min, int32_t)
REDUCE(i32_max, int32_t)
REDUCE(u32_product, uint32_t)
REDUCE(u64_sum, uint64_t)
REDUCE(i64_min, int64_t)
REDUCE(i64_max, int64_t)
REDUCE(u64_product, uint64_t)

// All kernels of a floating-point type.
#define FLOATING(name, element, numbers, value)                                                                        \
    REDUCE(name##_sum, element)                                                                                        \
    REDUCE(name##_min, element)                                                                                        \
    REDUCE(name##_max, element)                                                                                        \
    REDUCE(name##_product, element)                                                                                    \
    SCALE(name##_scale, element, numbers, value)                                                                       \
    PAIR(name, element)

FLOATING(f16, uint16_t, floats, (float)by)
FLOATING(bf16, uint16_t, floats, bf16_factor(by))
FLOATING(f32, float, floats, (float)by)
FLOATING(f64, double, doubles, by)

PAIR_INTEGER(u8, NB_U8, uint8_t, u8_sum)
PAIR_INTEGER(i8, NB_I8, int8_t, u8_sum)
PAIR_INTEGER(i32, NB_I32, int32_t, u32_sum)
PAIR_INTEGER(i64, NB_I64, int64_t, u64_sum)

#ifdef SCALES_INTEGERS
SCALE(u8_scale, uint8_t, doubles, by)
SCALE(i8_scale, int8_t, doubles, by)
SCALE(i32_scale, int32_t, doubles, by)
SCALE(i64_scale, int64_t, doubles, by)
#endif

// Two vectors of float32 make one of float16.
static TARGET void f32_f16(void *restrict dst, const void *restrict src, size_t count) {
    char *d = dst;
    const char *s = src;
    for (size_t bytes = count * sizeof(float), take; bytes > 0; bytes -= take) {
        take = least_of(bytes, 2 * VECTOR);
        floats low = (floats)part_load(s, least_of(take, VECTOR));
        floats high = (floats)part_load(s + VECTOR, take - least_of(take, VECTOR));
        part_store(d, take / 2, f16_join(low, high));
        s += take;
        d += take / 2;
    }
}

static TARGET void f16_f32(void *restrict dst, const void *restrict src, size_t count) {
    char *d = dst;
    const char *s = src;
    for (size_t bytes = count * sizeof(float), take; bytes > 0; bytes -= take) {
        take = least_of(bytes, VECTOR);
        vector halves = part_load(s, take / 2);
        part_store(d, take, (vector)f16_load((const char *)&halves));
        s += take / 2;
        d += take;
    }
}

const struct nb_kernels SET = {
    .reduce = NB_KERNELS_REDUCE,
    .scale =
        {
            [NB_F16] = f16_scale,
            [NB_BF16] = bf16_scale,
            [NB_F32] = f32_scale,
            [NB_F64] = f64_scale,
#ifdef SCALES_INTEGERS
            [NB_U8] = u8_scale,
            [NB_I8] = i8_scale,
            [NB_I32] = i32_scale,
            [NB_I64] = i64_scale,
#endif
        },
    .pair = {u8_pair, i8_pair, i32_pair, i64_pair, f16_pair, bf16_pair, f32_pair, f64_pair},
    .f32_f16 = f32_f16,
    .f16_f32 = f16_f32,
};

#endif
