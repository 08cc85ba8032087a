// Reduction kernels for 64-bit ARM, bit for bit equal to the generic ones. Every such CPU has the instructions used,
// including the float16 conversions.
#if defined(__aarch64__)

#include <arm_neon.h>
#include <stddef.h>
#include <stdint.h>

#define SET nb_kernels_neon
#define TARGET // no target attribute needed

typedef uint8x16_t vector;
typedef float32x4_t floats;
typedef float64x2_t doubles;

static inline vector vector_load(const void *at) {
    return vld1q_u8(at);
}

static inline void vector_store(void *at, vector value) {
    vst1q_u8(at, value);
}

#include "coll/vectors.h"

OP(u8_min, vector, vminq_u8(a, b))
OP(u8_max, vector, vmaxq_u8(a, b))
OP(i8_min, int8x16_t, vminq_s8(a, b))
OP(i8_max, int8x16_t, vmaxq_s8(a, b))
OP(i32_min, int32x4_t, vminq_s32(a, b))
OP(i32_max, int32x4_t, vmaxq_s32(a, b))
OP(i64_min, int64x2_t, vbslq_s64(vcltq_s64(a, b), a, b))
OP(i64_max, int64x2_t, vbslq_s64(vcgtq_s64(a, b), a, b))

// Not the min and max instructions: they order -0 before +0, which the comparison does not.
static inline floats floats_min(floats a, floats b) {
    return vbslq_f32(vceqq_f32(a, a), vbslq_f32(vcltq_f32(a, b), a, b), a);
}

static inline floats floats_max(floats a, floats b) {
    return vbslq_f32(vceqq_f32(a, a), vbslq_f32(vcgtq_f32(a, b), a, b), a);
}

static inline doubles doubles_min(doubles a, doubles b) {
    return vbslq_f64(vceqq_f64(a, a), vbslq_f64(vcltq_f64(a, b), a, b), a);
}

static inline doubles doubles_max(doubles a, doubles b) {
    return vbslq_f64(vceqq_f64(a, a), vbslq_f64(vcgtq_f64(a, b), a, b), a);
}

static inline floats f16_load(const char *at) {
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8((const uint8_t *)at)));
}

static inline vector f16_join(floats one, floats other) {
    return vreinterpretq_u8_f16(vcvt_high_f16_f32(vcvt_f16_f32(one), other));
}

static inline floats f16_add(floats a, floats b) {
    return a + b;
}

static inline vector bf16_load(const char *at) {
    return vector_load(at);
}

// The even elements, and the odd ones. No element moves.
static inline floats bf16_one(vector value) {
    return (floats)((u32s)value << 16);
}

static inline floats bf16_other(vector value) {
    return (floats)((u32s)value & 0xffff0000);
}

// Joins the upper halves of the floats, at the places where they came from.
static inline uint16x8_t bf16_upper(floats even, floats odd) {
    return vreinterpretq_u16_u32(vsriq_n_u32(vreinterpretq_u32_f32(odd), vreinterpretq_u32_f32(even), 16));
}

// Rounds to nearest even: up if lower half + (upper half & 1) is more than half a unit. A NaN from arithmetic on
// bfloat16 is quiet, and its lower half is zero, so rounding does not change it.
static inline vector bf16_round(floats even, floats odd) {
    uint16x8_t upper = bf16_upper(even, odd);
    uint32x4_t lower = vsliq_n_u32(vreinterpretq_u32_f32(even), vreinterpretq_u32_f32(odd), 16);
    uint16x8_t more = vqaddq_u16(vreinterpretq_u16_u32(lower), vandq_u16(upper, vdupq_n_u16(1)));
    return vreinterpretq_u8_u16(vsubq_u16(upper, vcgtq_u16(more, vdupq_n_u16(0x8000))));
}

// Makes a signalling NaN quiet.
static inline vector bf16_join(floats even, floats odd) {
    uint16x8_t upper = bf16_upper(even, odd);
    uint16x8_t nan = vcgtq_u16(vandq_u16(upper, vdupq_n_u16(0x7fff)), vdupq_n_u16(0x7f80));
    return vreinterpretq_u8_u16(vorrq_u16(upper, vandq_u16(nan, vdupq_n_u16(0x40))));
}

#include "coll/vector_set.h" // IWYU pragma: keep

#else

typedef int nb_kernels_neon_is_for_aarch64; // C does not allow an empty file

#endif
