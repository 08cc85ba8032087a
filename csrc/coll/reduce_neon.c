// Reduction kernels for 64-bit ARM. Bit for bit what the generic ones give, which finish the last few elements. What is
// used is in every such CPU: the conversions of halves too.
#if defined(__aarch64__)

#include <arm_neon.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "coll/kernels.h"

#define TARGET // nothing to ask for

typedef uint8x16_t vector;

static inline vector vector_load(const void *at) {
    return vld1q_u8(at);
}

static inline void vector_store(void *at, vector value) {
    vst1q_u8(at, value);
}

#include "coll/vectors.h"

static inline int8x16_t i8(vector value) {
    return vreinterpretq_s8_u8(value);
}

static inline int32x4_t i32(vector value) {
    return vreinterpretq_s32_u8(value);
}

static inline int64x2_t i64(vector value) {
    return vreinterpretq_s64_u8(value);
}

static inline float32x4_t f32(vector value) {
    return vreinterpretq_f32_u8(value);
}

static inline float64x2_t f64(vector value) {
    return vreinterpretq_f64_u8(value);
}

// The instructions for this know the sign of a zero, which the comparison does not.
static inline float32x4_t min_f32(float32x4_t a, float32x4_t b) {
    return vbslq_f32(vceqq_f32(a, a), vbslq_f32(vcltq_f32(a, b), a, b), a);
}

static inline float32x4_t max_f32(float32x4_t a, float32x4_t b) {
    return vbslq_f32(vceqq_f32(a, a), vbslq_f32(vcgtq_f32(a, b), a, b), a);
}

static inline float64x2_t min_f64(float64x2_t a, float64x2_t b) {
    return vbslq_f64(vceqq_f64(a, a), vbslq_f64(vcltq_f64(a, b), a, b), a);
}

static inline float64x2_t max_f64(float64x2_t a, float64x2_t b) {
    return vbslq_f64(vceqq_f64(a, a), vbslq_f64(vcgtq_f64(a, b), a, b), a);
}

// 4 halves as floats: half a vector.
static inline float32x4_t f16_load(const char *at) {
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8((const uint8_t *)at)));
}

static inline vector f16_join(float32x4_t one, float32x4_t other) {
    return vreinterpretq_u8_f16(vcvt_high_f16_f32(vcvt_f16_f32(one), other));
}

// The elements of even and of odd number: no element changes its place.
static inline float32x4_t bf16_even(vector value) {
    return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u8(value), 16));
}

static inline float32x4_t bf16_odd(vector value) {
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u8(value), vdupq_n_u32(0xffff0000)));
}

// The upper halves of floats, which go back to where they came from.
static inline uint16x8_t bf16_upper(float32x4_t even, float32x4_t odd) {
    return vreinterpretq_u16_u32(vsriq_n_u32(vreinterpretq_u32_f32(odd), vreinterpretq_u32_f32(even), 16));
}

// To nearest even, all 8 at once: up where lower half + (upper half & 1) is more than half
// a unit. A NaN that arithmetic on bfloat16 gives is quiet, and has
// nothing in its lower half that could round it to another value.
static inline vector bf16_round(float32x4_t even, float32x4_t odd) {
    uint16x8_t upper = bf16_upper(even, odd);
    uint32x4_t lower = vsliq_n_u32(vreinterpretq_u32_f32(even), vreinterpretq_u32_f32(odd), 16);
    uint16x8_t more = vqaddq_u16(vreinterpretq_u16_u32(lower), vandq_u16(upper, vdupq_n_u16(1)));
    return vreinterpretq_u8_u16(vsubq_u16(upper, vcgtq_u16(more, vdupq_n_u16(0x8000))));
}

// Of floats that are bfloat16 already: a signalling NaN becomes quiet.
static inline vector bf16_join(float32x4_t even, float32x4_t odd) {
    uint16x8_t upper = bf16_upper(even, odd);
    uint16x8_t nan = vcgtq_u16(vandq_u16(upper, vdupq_n_u16(0x7fff)), vdupq_n_u16(0x7f80));
    return vreinterpretq_u8_u16(vorrq_u16(upper, vandq_u16(nan, vdupq_n_u16(0x40))));
}

#define OP(name, result)                                                                                               \
    static inline vector name(const char *to, const char *from) {                                                      \
        vector a = vector_load(to);                                                                                    \
        vector b = vector_load(from);                                                                                  \
        return result;                                                                                                 \
    }

OP(u8_sum_op, vaddq_u8(a, b))
OP(u8_min_op, vminq_u8(a, b))
OP(u8_max_op, vmaxq_u8(a, b))
OP(u8_product_op, vmulq_u8(a, b))
OP(i8_min_op, vreinterpretq_u8_s8(vminq_s8(i8(a), i8(b))))
OP(i8_max_op, vreinterpretq_u8_s8(vmaxq_s8(i8(a), i8(b))))
OP(i32_sum_op, vreinterpretq_u8_s32(vaddq_s32(i32(a), i32(b))))
OP(i32_min_op, vreinterpretq_u8_s32(vminq_s32(i32(a), i32(b))))
OP(i32_max_op, vreinterpretq_u8_s32(vmaxq_s32(i32(a), i32(b))))
OP(i32_product_op, vreinterpretq_u8_s32(vmulq_s32(i32(a), i32(b))))
OP(i64_sum_op, vreinterpretq_u8_s64(vaddq_s64(i64(a), i64(b))))
OP(i64_min_op, vreinterpretq_u8_s64(vbslq_s64(vcltq_s64(i64(a), i64(b)), i64(a), i64(b))))
OP(i64_max_op, vreinterpretq_u8_s64(vbslq_s64(vcgtq_s64(i64(a), i64(b)), i64(a), i64(b))))
OP(f32_sum_op, vreinterpretq_u8_f32(vaddq_f32(f32(a), f32(b))))
OP(f32_min_op, vreinterpretq_u8_f32(min_f32(f32(a), f32(b))))
OP(f32_max_op, vreinterpretq_u8_f32(max_f32(f32(a), f32(b))))
OP(f32_product_op, vreinterpretq_u8_f32(vmulq_f32(f32(a), f32(b))))
OP(f64_sum_op, vreinterpretq_u8_f64(vaddq_f64(f64(a), f64(b))))
OP(f64_min_op, vreinterpretq_u8_f64(min_f64(f64(a), f64(b))))
OP(f64_max_op, vreinterpretq_u8_f64(max_f64(f64(a), f64(b))))
OP(f64_product_op, vreinterpretq_u8_f64(vmulq_f64(f64(a), f64(b))))

#define OP_F16(name, op)                                                                                               \
    static inline vector name(const char *to, const char *from) {                                                      \
        return f16_join(op(f16_load(to), f16_load(from)), op(f16_load(to + 8), f16_load(from + 8)));                   \
    }

OP_F16(f16_sum_op, vaddq_f32)
OP_F16(f16_min_op, min_f32)
OP_F16(f16_max_op, max_f32)
OP_F16(f16_product_op, vmulq_f32)

static inline vector f16_scale_op(const char *to, const char *from) {
    float32x4_t factor = f32(vector_load(from));
    return f16_join(vmulq_f32(f16_load(to), factor), vmulq_f32(f16_load(to + 8), factor));
}

OP(bf16_sum_op, bf16_round(vaddq_f32(bf16_even(a), bf16_even(b)), vaddq_f32(bf16_odd(a), bf16_odd(b))))
OP(bf16_min_op, bf16_join(min_f32(bf16_even(a), bf16_even(b)), min_f32(bf16_odd(a), bf16_odd(b))))
OP(bf16_max_op, bf16_join(max_f32(bf16_even(a), bf16_even(b)), max_f32(bf16_odd(a), bf16_odd(b))))
OP(bf16_product_op, bf16_round(vmulq_f32(bf16_even(a), bf16_even(b)), vmulq_f32(bf16_odd(a), bf16_odd(b))))
OP(bf16_scale_op, bf16_round(vmulq_f32(bf16_even(a), f32(b)), vmulq_f32(bf16_odd(a), f32(b))))

REDUCE(u8_sum, NB_U8, NB_SUM, 1)
REDUCE(u8_min, NB_U8, NB_MIN, 1)
REDUCE(u8_max, NB_U8, NB_MAX, 1)
REDUCE(u8_product, NB_U8, NB_PRODUCT, 1)
REDUCE(i8_min, NB_I8, NB_MIN, 1)
REDUCE(i8_max, NB_I8, NB_MAX, 1)
REDUCE(i32_sum, NB_I32, NB_SUM, 4)
REDUCE(i32_min, NB_I32, NB_MIN, 4)
REDUCE(i32_max, NB_I32, NB_MAX, 4)
REDUCE(i32_product, NB_I32, NB_PRODUCT, 4)
REDUCE(i64_sum, NB_I64, NB_SUM, 8)
REDUCE(i64_min, NB_I64, NB_MIN, 8)
REDUCE(i64_max, NB_I64, NB_MAX, 8)
REDUCE(f16_sum, NB_F16, NB_SUM, 2)
REDUCE(f16_min, NB_F16, NB_MIN, 2)
REDUCE(f16_max, NB_F16, NB_MAX, 2)
REDUCE(f16_product, NB_F16, NB_PRODUCT, 2)
REDUCE(bf16_sum, NB_BF16, NB_SUM, 2)
REDUCE(bf16_min, NB_BF16, NB_MIN, 2)
REDUCE(bf16_max, NB_BF16, NB_MAX, 2)
REDUCE(bf16_product, NB_BF16, NB_PRODUCT, 2)
REDUCE(f32_sum, NB_F32, NB_SUM, 4)
REDUCE(f32_min, NB_F32, NB_MIN, 4)
REDUCE(f32_max, NB_F32, NB_MAX, 4)
REDUCE(f32_product, NB_F32, NB_PRODUCT, 4)
REDUCE(f64_sum, NB_F64, NB_SUM, 8)
REDUCE(f64_min, NB_F64, NB_MIN, 8)
REDUCE(f64_max, NB_F64, NB_MAX, 8)
REDUCE(f64_product, NB_F64, NB_PRODUCT, 8)

SCALE(f16_scale, NB_F16, 2, vreinterpretq_u8_f32(vdupq_n_f32((float)by)), f16_scale_op)
SCALE(bf16_scale, NB_BF16, 2, vreinterpretq_u8_f32(vdupq_n_f32(bf16_factor(by))), bf16_scale_op)
SCALE(f32_scale, NB_F32, 4, vreinterpretq_u8_f32(vdupq_n_f32((float)by)), f32_product_op)
SCALE(f64_scale, NB_F64, 8, vreinterpretq_u8_f64(vdupq_n_f64(by)), f64_product_op)

static void cast_f32_f16(void *restrict dst, const void *restrict src, size_t count) {
    char *d = dst;
    const char *s = src;
    size_t left = count;
    for (; left >= 8; left -= 8) {
        vector_store(d, f16_join(f32(vector_load(s)), f32(vector_load(s + 16))));
        d += 16;
        s += 32;
    }
    nb_kernels_generic.f32_f16(d, s, left);
}

static void cast_f16_f32(void *restrict dst, const void *restrict src, size_t count) {
    char *d = dst;
    const char *s = src;
    size_t left = count;
    for (; left >= 8; left -= 8) {
        vector_store(d, vreinterpretq_u8_f32(f16_load(s)));
        vector_store(d + 16, vreinterpretq_u8_f32(f16_load(s + 8)));
        d += 32;
        s += 16;
    }
    nb_kernels_generic.f16_f32(d, s, left);
}

const struct nb_kernels nb_kernels_neon = {
    .reduce = {[NB_U8] = {u8_sum, u8_min, u8_max, u8_product},
               [NB_I8] = {u8_sum, i8_min, i8_max, u8_product},
               [NB_I32] = {i32_sum, i32_min, i32_max, i32_product},
               [NB_I64] = {i64_sum, i64_min, i64_max, NULL},
               [NB_F16] = {f16_sum, f16_min, f16_max, f16_product},
               [NB_BF16] = {bf16_sum, bf16_min, bf16_max, bf16_product},
               [NB_F32] = {f32_sum, f32_min, f32_max, f32_product},
               [NB_F64] = {f64_sum, f64_min, f64_max, f64_product}},
    .scale = {[NB_F16] = f16_scale, [NB_BF16] = bf16_scale, [NB_F32] = f32_scale, [NB_F64] = f64_scale},
    .f32_f16 = cast_f32_f16,
    .f16_f32 = cast_f16_f32,
};

#else

typedef int nb_kernels_neon_is_for_aarch64; // an empty file is no C

#endif
