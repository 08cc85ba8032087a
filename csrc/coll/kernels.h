// Reduction kernels: one set for each instruction set, and the conversions that define the results.
#ifndef NB_COLL_KERNELS_H
#define NB_COLL_KERNELS_H

#include <stdint.h>

#include "base/dtype.h"
#include "coll/reduce.h"
#include "coll/reduce_pair.h"

typedef void (*nb_cast_fn)(void *dst, const void *src, size_t count);

// NULL: the set has no own kernel for this; the generic one is used.
struct nb_kernels {
    nb_reduce_fn reduce[NB_DTYPES][NB_REDOPS];
    nb_scale_fn scale[NB_DTYPES];
    nb_pair_fn pair[NB_DTYPES]; // sums only
    nb_cast_fn f32_f16;
    nb_cast_fn f16_f32;
};

extern const struct nb_kernels nb_kernels_generic;
#if defined(__x86_64__)
extern const struct nb_kernels nb_kernels_avx2;
extern const struct nb_kernels nb_kernels_avx512;
#elif defined(__aarch64__)
extern const struct nb_kernels nb_kernels_neon;
#endif

// Pair sums made from the other kernels, one after the other.
extern const nb_pair_fn nb_pair_generic[NB_DTYPES];

// nb_kernels.reduce of a set whose kernels have these names. Sums and products wrap, so they are those of the unsigned
// type of the same width.
#define NB_KERNELS_ROW(ring, order) {ring##_sum, order##_min, order##_max, ring##_product}
#define NB_KERNELS_REDUCE                                                                                              \
    {[NB_U8] = NB_KERNELS_ROW(u8, u8),    [NB_I8] = NB_KERNELS_ROW(u8, i8),    [NB_I32] = NB_KERNELS_ROW(u32, i32),    \
     [NB_I64] = NB_KERNELS_ROW(u64, i64), [NB_F16] = NB_KERNELS_ROW(f16, f16), [NB_BF16] = NB_KERNELS_ROW(bf16, bf16), \
     [NB_F32] = NB_KERNELS_ROW(f32, f32), [NB_F64] = NB_KERNELS_ROW(f64, f64)}
_Static_assert(NB_SUM == 0 && NB_MIN == 1 && NB_MAX == 2 && NB_PRODUCT == 3, "the order of a row");
_Static_assert(NB_U8 == 0 && NB_I8 == 1 && NB_I32 == 2 && NB_I64 == 3 && NB_F16 == 4 && NB_BF16 == 5 && NB_F32 == 6,
               "the order of scales and pairs where they are not named");

// Returns a set by its number; the generic one if this CPU cannot run it.
const struct nb_kernels *nb_kernels_of(int isa);

// Elements at any alignment.
typedef uint8_t nb_u8_any __attribute__((may_alias));
typedef int8_t nb_i8_any __attribute__((may_alias));
typedef uint16_t nb_u16_any __attribute__((aligned(1), may_alias));
typedef uint32_t nb_u32_any __attribute__((aligned(1), may_alias));
typedef int32_t nb_i32_any __attribute__((aligned(1), may_alias));
typedef uint64_t nb_u64_any __attribute__((aligned(1), may_alias));
typedef int64_t nb_i64_any __attribute__((aligned(1), may_alias));
typedef float nb_f32_any __attribute__((aligned(1), may_alias));
typedef double nb_f64_any __attribute__((aligned(1), may_alias));

#endif
