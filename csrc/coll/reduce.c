// Generic reduction kernels, as loops that the compiler vectorises, and the choice of a set.
#include "coll/reduce.h"

#include "base/dtype.h"
#include "base/half.h"
#include "coll/kernels.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Result for two elements a (present) and b (arriving). A NaN on either side wins min and max.
#define ADD(a, b) ((a) + (b))
#define MULTIPLY(a, b) ((a) * (b))
#define LESSER(a, b) ((a) < (b) ? (a) : (b))
#define GREATER(a, b) ((a) > (b) ? (a) : (b))
#define LESSER_OR_NAN(a, b) ((a) < (b) || (a) != (a) ? (a) : (b))
#define GREATER_OR_NAN(a, b) ((a) > (b) || (a) != (a) ? (a) : (b))
#define AS_IS(value) (value)

// dst = narrow(op(widen(dst), widen(src))), computed in `type`.
#define REDUCE(name, type, element, widen, narrow, op)                                                                 \
    static void name(void *restrict dst, const void *restrict src, size_t count) {                                     \
        element *restrict d = dst;                                                                                     \
        const element *restrict s = src;                                                                               \
        for (size_t i = 0; i < count; i++) {                                                                           \
            const type a = widen(d[i]);                                                                                \
            const type b = widen(s[i]);                                                                                \
            d[i] = (element)narrow(op(a, b));                                                                          \
        }                                                                                                              \
    }

#define SCALE_FLOAT(name, type, element, widen, narrow)                                                                \
    static void name(void *dst, size_t count, double scale) {                                                          \
        element *d = dst;                                                                                              \
        const type factor = (type)scale;                                                                               \
        for (size_t i = 0; i < count; i++) {                                                                           \
            d[i] = narrow(widen(d[i]) * factor);                                                                       \
        }                                                                                                              \
    }

// Values out of range become the nearest in range. `above` is the largest value + 1, which float64 represents exactly.
#define SCALE_INTEGER(name, type, element, smallest, largest, above)                                                   \
    static void name(void *dst, size_t count, double scale) {                                                          \
        element *d = dst;                                                                                              \
        for (size_t i = 0; i < count; i++) {                                                                           \
            double value = (double)d[i] * scale;                                                                       \
            d[i] = value >= (above) ? (largest) : value > (double)(smallest) ? (type)value : (smallest);               \
        }                                                                                                              \
    }

REDUCE(u8_sum, uint8_t, nb_u8_any, AS_IS, AS_IS, ADD)
REDUCE(u8_product, uint8_t, nb_u8_any, AS_IS, AS_IS, MULTIPLY)
REDUCE(u8_min, uint8_t, nb_u8_any, AS_IS, AS_IS, LESSER)
REDUCE(u8_max, uint8_t, nb_u8_any, AS_IS, AS_IS, GREATER)
REDUCE(i8_min, int8_t, nb_i8_any, AS_IS, AS_IS, LESSER)
REDUCE(i8_max, int8_t, nb_i8_any, AS_IS, AS_IS, GREATER)
REDUCE(u32_sum, uint32_t, nb_u32_any, AS_IS, AS_IS, ADD)
REDUCE(u32_product, uint32_t, nb_u32_any, AS_IS, AS_IS, MULTIPLY)
REDUCE(i32_min, int32_t, nb_i32_any, AS_IS, AS_IS, LESSER)
REDUCE(i32_max, int32_t, nb_i32_any, AS_IS, AS_IS, GREATER)
REDUCE(u64_sum, uint64_t, nb_u64_any, AS_IS, AS_IS, ADD)
REDUCE(u64_product, uint64_t, nb_u64_any, AS_IS, AS_IS, MULTIPLY)
REDUCE(i64_min, int64_t, nb_i64_any, AS_IS, AS_IS, LESSER)
REDUCE(i64_max, int64_t, nb_i64_any, AS_IS, AS_IS, GREATER)

#define REDUCE_FLOAT(name, type, element, widen, narrow)                                                               \
    REDUCE(name##_sum, type, element, widen, narrow, ADD)                                                              \
    REDUCE(name##_product, type, element, widen, narrow, MULTIPLY)                                                     \
    REDUCE(name##_min, type, element, widen, narrow, LESSER_OR_NAN)                                                    \
    REDUCE(name##_max, type, element, widen, narrow, GREATER_OR_NAN)                                                   \
    SCALE_FLOAT(name##_scale, type, element, widen, narrow)

REDUCE_FLOAT(f16, float, nb_u16_any, nb_f16_widen, nb_f16_narrow)
REDUCE_FLOAT(bf16, float, nb_u16_any, nb_bf16_widen, nb_bf16_narrow)
REDUCE_FLOAT(f32, float, nb_f32_any, AS_IS, AS_IS)
REDUCE_FLOAT(f64, double, nb_f64_any, AS_IS, AS_IS)

SCALE_INTEGER(u8_scale, uint8_t, nb_u8_any, 0, UINT8_MAX, 0x1p8)
SCALE_INTEGER(i8_scale, int8_t, nb_i8_any, INT8_MIN, INT8_MAX, 0x1p7)
SCALE_INTEGER(i32_scale, int32_t, nb_i32_any, INT32_MIN, INT32_MAX, 0x1p31)
SCALE_INTEGER(i64_scale, int64_t, nb_i64_any, INT64_MIN, INT64_MAX, 0x1p63)

static void cast_f32_f16(void *restrict dst, const void *restrict src, size_t count) {
    nb_u16_any *restrict d = dst;
    const nb_f32_any *restrict s = src;
    for (size_t i = 0; i < count; i++) {
        d[i] = nb_f16_narrow(s[i]);
    }
}

static void cast_f16_f32(void *restrict dst, const void *restrict src, size_t count) {
    nb_f32_any *restrict d = dst;
    const nb_u16_any *restrict s = src;
    for (size_t i = 0; i < count; i++) {
        d[i] = nb_f16_widen(s[i]);
    }
}

const struct nb_kernels nb_kernels_generic = {
    .reduce = NB_KERNELS_REDUCE,
    .scale = {u8_scale, i8_scale, i32_scale, i64_scale, f16_scale, bf16_scale, f32_scale, f64_scale},
    .f32_f16 = cast_f32_f16,
    .f16_f32 = cast_f16_f32,
};

// In the order of enum nb_isa: the last one that runs is the best. NULL: not in this build.
static const struct nb_kernels *const sets[NB_ISAS] = {
    [NB_ISA_GENERIC] = &nb_kernels_generic,
#if defined(__x86_64__)
    [NB_ISA_AVX2] = &nb_kernels_avx2,
    [NB_ISA_AVX512] = &nb_kernels_avx512,
#elif defined(__aarch64__)
    [NB_ISA_NEON] = &nb_kernels_neon,
#endif
};

static const char *const names[NB_ISAS] = {
    [NB_ISA_GENERIC] = "generic",
    [NB_ISA_AVX2] = "avx2",
    [NB_ISA_AVX512] = "avx512",
    [NB_ISA_NEON] = "neon",
};

static bool cpu_runs(int isa) {
#if defined(__x86_64__)
    if (isa == NB_ISA_AVX2) {
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    }
    if (isa == NB_ISA_AVX512) {
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    }
#endif
    (void)isa;
    return true;
}

bool nb_isa_runs(int isa) {
    return isa >= 0 && isa < NB_ISAS && sets[isa] != NULL && cpu_runs(isa);
}

enum nb_isa nb_reduce_best(void) {
    int best = NB_ISAS - 1;
    while (!nb_isa_runs(best)) {
        best--;
    }
    return (enum nb_isa)best;
}

const char *nb_isa_name(int isa) {
    return isa >= 0 && isa < NB_ISAS ? names[isa] : "?";
}

const struct nb_kernels *nb_kernels_of(int isa) {
    return nb_isa_runs(isa) ? sets[isa] : &nb_kernels_generic;
}

nb_reduce_fn nb_reduce_kernel(enum nb_isa isa, int dtype, int redop) {
    if (dtype < 0 || dtype >= NB_DTYPES || redop < 0 || redop >= NB_REDOPS) {
        return NULL;
    }
    nb_reduce_fn own = nb_kernels_of((int)isa)->reduce[dtype][redop];
    return own != NULL ? own : nb_kernels_generic.reduce[dtype][redop];
}

nb_scale_fn nb_scale_kernel(enum nb_isa isa, int dtype) {
    if (dtype < 0 || dtype >= NB_DTYPES) {
        return NULL;
    }
    nb_scale_fn own = nb_kernels_of((int)isa)->scale[dtype];
    return own != NULL ? own : nb_kernels_generic.scale[dtype];
}

void nb_cast_f32_f16(void *dst, const void *src, size_t count) {
    nb_kernels_of((int)nb_reduce_best())->f32_f16(dst, src, count);
}

void nb_cast_f16_f32(void *dst, const void *src, size_t count) {
    nb_kernels_of((int)nb_reduce_best())->f16_f32(dst, src, count);
}
