// Reduction kernels for x86-64 with AVX-512 (F, BW, DQ, VL). Bit for bit what the generic ones give. A kernel is one
// operation on 64 bytes, whatever elements lie in them. What comes before the first whole cache line of the destination
// and after the last goes through the same operation under a mask.
#include "base/dtype.h"
#include <stddef.h>
#include <stdint.h>
#if defined(__x86_64__)

#include <immintrin.h>

#include "coll/kernels.h"

#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))

typedef __m512i vector;

static inline TARGET vector vector_load(const void *at) {
    return _mm512_loadu_si512(at);
}

static inline TARGET void vector_store(void *at, vector value) {
    _mm512_storeu_si512(at, value);
}

#include "coll/vectors.h"

enum { LINE = sizeof(vector) };

static inline TARGET __m512 f32(vector value) {
    return _mm512_castsi512_ps(value);
}

static inline TARGET __m512d f64(vector value) {
    return _mm512_castsi512_pd(value);
}

// For sums of 16-bit floats. As a multiplication that changes nothing it leaves CPUs that have units for sums and for
// products those units that convert.
static inline TARGET __m512 add_f32(__m512 a, __m512 b) {
    return _mm512_fmadd_ps(a, _mm512_set1_ps(1), b);
}

// The instruction gives its second operand where either is NaN; where the first one is, it stays.
static inline TARGET __m512 min_f32(__m512 a, __m512 b) {
    return _mm512_mask_min_ps(a, _mm512_cmp_ps_mask(a, a, _CMP_ORD_Q), a, b);
}

static inline TARGET __m512 max_f32(__m512 a, __m512 b) {
    return _mm512_mask_max_ps(a, _mm512_cmp_ps_mask(a, a, _CMP_ORD_Q), a, b);
}

static inline TARGET __m512d min_f64(__m512d a, __m512d b) {
    return _mm512_mask_min_pd(a, _mm512_cmp_pd_mask(a, a, _CMP_ORD_Q), a, b);
}

static inline TARGET __m512d max_f64(__m512d a, __m512d b) {
    return _mm512_mask_max_pd(a, _mm512_cmp_pd_mask(a, a, _CMP_ORD_Q), a, b);
}

// 16 halves as floats: half a vector.
static inline TARGET __m512 f16_load(const char *at) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at));
}

static inline TARGET vector f16_join(__m512 one, __m512 other) {
    __m256i low = _mm512_cvtps_ph(one, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256i high = _mm512_cvtps_ph(other, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// The elements of even and of odd number: no element changes its place.
static inline TARGET __m512 bf16_even(vector value) {
    return f32(_mm512_slli_epi32(value, 16));
}

static inline TARGET __m512 bf16_odd(vector value) {
    return f32(_mm512_and_si512(value, _mm512_set1_epi32((int)0xffff0000)));
}

// The upper halves of floats, which go back to where they came from.
static inline TARGET vector bf16_upper(__m512i even, __m512i odd) {
    return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(even, 16), odd);
}

// To nearest even, all 32 at once: the carry of lower half + 0x7fff + (upper half & 1)
// is the top bit of an average. A NaN that arithmetic on bfloat16 gives is quiet, and has
// nothing in its lower half that could round it to another value.
static inline TARGET vector bf16_round(__m512 even, __m512 odd) {
    __m512i upper = bf16_upper(_mm512_castps_si512(even), _mm512_castps_si512(odd));
    __m512i moved = _mm512_slli_epi32(_mm512_castps_si512(odd), 16);
    __m512i lower = _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_castps_si512(even), moved);
    __m512i one = _mm512_and_si512(upper, _mm512_set1_epi16(1));
    __m512i average = _mm512_avg_epu16(lower, _mm512_or_si512(one, _mm512_set1_epi16(0x7ffe)));
    return _mm512_add_epi16(upper, _mm512_srli_epi16(average, 15));
}

// Of floats that are bfloat16 already: a signalling NaN becomes quiet.
static inline TARGET vector bf16_join(__m512 even, __m512 odd) {
    __m512i upper = bf16_upper(_mm512_castps_si512(even), _mm512_castps_si512(odd));
    __m512i magnitude = _mm512_and_si512(upper, _mm512_set1_epi16(0x7fff));
    __mmask32 nan = _mm512_cmpgt_epu16_mask(magnitude, _mm512_set1_epi16(0x7f80));
    return _mm512_mask_mov_epi16(upper, nan, _mm512_or_si512(upper, _mm512_set1_epi16(0x40)));
}

#define OP(name, result)                                                                                               \
    static inline TARGET vector name(const char *to, const char *from) {                                               \
        vector a = vector_load(to);                                                                                    \
        vector b = vector_load(from);                                                                                  \
        return result;                                                                                                 \
    }

OP(u8_sum_op, _mm512_add_epi8(a, b))
OP(u8_min_op, _mm512_min_epu8(a, b))
OP(u8_max_op, _mm512_max_epu8(a, b))
OP(i8_min_op, _mm512_min_epi8(a, b))
OP(i8_max_op, _mm512_max_epi8(a, b))
OP(i32_sum_op, _mm512_add_epi32(a, b))
OP(i32_min_op, _mm512_min_epi32(a, b))
OP(i32_max_op, _mm512_max_epi32(a, b))
OP(i32_product_op, _mm512_mullo_epi32(a, b))
OP(i64_sum_op, _mm512_add_epi64(a, b))
OP(i64_min_op, _mm512_min_epi64(a, b))
OP(i64_max_op, _mm512_max_epi64(a, b))
OP(i64_product_op, _mm512_mullo_epi64(a, b))
OP(f32_sum_op, _mm512_castps_si512(_mm512_add_ps(f32(a), f32(b))))
OP(f32_min_op, _mm512_castps_si512(min_f32(f32(a), f32(b))))
OP(f32_max_op, _mm512_castps_si512(max_f32(f32(a), f32(b))))
OP(f32_product_op, _mm512_castps_si512(_mm512_mul_ps(f32(a), f32(b))))
OP(f64_sum_op, _mm512_castpd_si512(_mm512_add_pd(f64(a), f64(b))))
OP(f64_min_op, _mm512_castpd_si512(min_f64(f64(a), f64(b))))
OP(f64_max_op, _mm512_castpd_si512(max_f64(f64(a), f64(b))))
OP(f64_product_op, _mm512_castpd_si512(_mm512_mul_pd(f64(a), f64(b))))

#define OP_F16(name, op)                                                                                               \
    static inline TARGET vector name(const char *to, const char *from) {                                               \
        return f16_join(op(f16_load(to), f16_load(from)), op(f16_load(to + 32), f16_load(from + 32)));                 \
    }

OP_F16(f16_sum_op, add_f32)
OP_F16(f16_min_op, min_f32)
OP_F16(f16_max_op, max_f32)
OP_F16(f16_product_op, _mm512_mul_ps)

static inline TARGET vector f16_scale_op(const char *to, const char *from) {
    __m512 factor = f32(vector_load(from));
    return f16_join(_mm512_mul_ps(f16_load(to), factor), _mm512_mul_ps(f16_load(to + 32), factor));
}

OP(bf16_sum_op, bf16_round(add_f32(bf16_even(a), bf16_even(b)), add_f32(bf16_odd(a), bf16_odd(b))))
OP(bf16_min_op, bf16_join(min_f32(bf16_even(a), bf16_even(b)), min_f32(bf16_odd(a), bf16_odd(b))))
OP(bf16_max_op, bf16_join(max_f32(bf16_even(a), bf16_even(b)), max_f32(bf16_odd(a), bf16_odd(b))))
OP(bf16_product_op, bf16_round(_mm512_mul_ps(bf16_even(a), bf16_even(b)), _mm512_mul_ps(bf16_odd(a), bf16_odd(b))))
OP(bf16_scale_op, bf16_round(_mm512_mul_ps(bf16_even(a), f32(b)), _mm512_mul_ps(bf16_odd(a), f32(b))))

// The low byte of a product of two 16-bit numbers is that of their low bytes' product; the odd bytes are moved there.
static inline TARGET vector u8_product_op(const char *to, const char *from) {
    vector a = vector_load(to);
    vector b = vector_load(from);
    __m512i even = _mm512_mullo_epi16(a, b);
    __m512i odd = _mm512_mullo_epi16(_mm512_srli_epi16(a, 8), _mm512_andnot_si512(_mm512_set1_epi16(0xff), b));
    return _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaa, even, odd);
}

// 16 integers by a factor, each result the nearest in [low, high] of those that fit, truncated. A NaN becomes `low`.
static inline TARGET __m512i scaled(__m512i value, __m512d factor, double low, double high) {
    __m512d one = _mm512_mul_pd(_mm512_cvtepi32_pd(_mm512_castsi512_si256(value)), factor);
    __m512d other = _mm512_mul_pd(_mm512_cvtepi32_pd(_mm512_extracti64x4_epi64(value, 1)), factor);
    one = _mm512_min_pd(_mm512_max_pd(one, _mm512_set1_pd(low)), _mm512_set1_pd(high));
    other = _mm512_min_pd(_mm512_max_pd(other, _mm512_set1_pd(low)), _mm512_set1_pd(high));
    __m512i result = _mm512_castsi256_si512(_mm512_cvttpd_epi32(one));
    return _mm512_inserti64x4(result, _mm512_cvttpd_epi32(other), 1);
}

#define OP_BYTES_SCALE(name, widen, low, high)                                                                         \
    static inline TARGET vector name(const char *to, const char *from) {                                               \
        __m512d factor = f64(vector_load(from));                                                                       \
        __m128i parts[4];                                                                                              \
        for (int i = 0; i < 4; i++) {                                                                                  \
            __m512i wide = widen(_mm_loadu_si128((const __m128i *)(to + 16 * (ptrdiff_t)i)));                          \
            parts[i] = _mm512_cvtepi32_epi8(scaled(wide, factor, low, high));                                          \
        }                                                                                                              \
        __m512i result = _mm512_inserti32x4(_mm512_castsi128_si512(parts[0]), parts[1], 1);                            \
        return _mm512_inserti32x4(_mm512_inserti32x4(result, parts[2], 2), parts[3], 3);                               \
    }

OP_BYTES_SCALE(u8_scale_op, _mm512_cvtepu8_epi32, 0, UINT8_MAX)
OP_BYTES_SCALE(i8_scale_op, _mm512_cvtepi8_epi32, INT8_MIN, INT8_MAX)
OP(i32_scale_op, scaled(a, f64(b), INT32_MIN, INT32_MAX))

// What is too small, and a NaN, becomes INT64_MIN by the instruction.
static inline TARGET vector i64_scale_op(const char *to, const char *from) {
    __m512d value = _mm512_mul_pd(_mm512_cvtepi64_pd(vector_load(to)), f64(vector_load(from)));
    __mmask8 large = _mm512_cmp_pd_mask(value, _mm512_set1_pd(0x1p63), _CMP_GE_OQ);
    return _mm512_mask_mov_epi64(_mm512_cvttpd_epi64(value), large, _mm512_set1_epi64(INT64_MAX));
}

static inline TARGET __mmask64 mask_of(size_t bytes) {
    return ((__mmask64)1 << bytes) - 1;
}

// Fewer bytes than a vector has.
VECTOR_LOOP void part_reduce(char *d, const char *s, size_t bytes, vector_op *op) {
    __mmask64 mask = mask_of(bytes);
    vector to = _mm512_maskz_loadu_epi8(mask, d);
    vector from = _mm512_maskz_loadu_epi8(mask, s);
    _mm512_mask_storeu_epi8(d, mask, op((const char *)&to, (const char *)&from));
}

VECTOR_LOOP void part_scale(char *d, vector factor, size_t bytes, vector_op *op) {
    __mmask64 mask = mask_of(bytes);
    vector to = _mm512_maskz_loadu_epi8(mask, d);
    _mm512_mask_storeu_epi8(d, mask, op((const char *)&to, (const char *)&factor));
}

// How many bytes lie before the first line that begins at an element; 0 where the destination's own begins there, and
// where no line ever does.
static inline size_t head_bytes(const char *d, size_t bytes, size_t element_bytes) {
    size_t head = -(uintptr_t)d & (LINE - 1);
    return head % element_bytes != 0 ? 0 : head < bytes ? head : bytes;
}

VECTOR_LOOP void reduce(void *dst, const void *src, size_t bytes, size_t element_bytes, vector_op *op) {
    char *d = dst;
    const char *s = src;
    size_t done = head_bytes(d, bytes, element_bytes);
    if (done > 0) {
        part_reduce(d, s, done, op);
    }
    done += vectors_reduce(d + done, s + done, bytes - done, op);
    if (done < bytes) {
        part_reduce(d + done, s + done, bytes - done, op);
    }
}

VECTOR_LOOP void scale(void *dst, vector factor, size_t bytes, size_t element_bytes, vector_op *op) {
    char *d = dst;
    size_t done = head_bytes(d, bytes, element_bytes);
    if (done > 0) {
        part_scale(d, factor, done, op);
    }
    done += vectors_scale(d + done, factor, bytes - done, op);
    if (done < bytes) {
        part_scale(d + done, factor, bytes - done, op);
    }
}

#define KERNEL(name, element_bytes)                                                                                    \
    static TARGET void name(void *restrict dst, const void *restrict src, size_t count) {                              \
        reduce(dst, src, count * (element_bytes), element_bytes, name##_op);                                           \
    }

#define SCALER(name, element_bytes, splat, op)                                                                         \
    static TARGET void name(void *dst, size_t count, double by) {                                                      \
        scale(dst, splat, count * (element_bytes), element_bytes, op);                                                 \
    }

KERNEL(u8_sum, 1)
KERNEL(u8_min, 1)
KERNEL(u8_max, 1)
KERNEL(u8_product, 1)
KERNEL(i8_min, 1)
KERNEL(i8_max, 1)
KERNEL(i32_sum, 4)
KERNEL(i32_min, 4)
KERNEL(i32_max, 4)
KERNEL(i32_product, 4)
KERNEL(i64_sum, 8)
KERNEL(i64_min, 8)
KERNEL(i64_max, 8)
KERNEL(i64_product, 8)
KERNEL(f16_sum, 2)
KERNEL(f16_min, 2)
KERNEL(f16_max, 2)
KERNEL(f16_product, 2)
KERNEL(bf16_sum, 2)
KERNEL(bf16_min, 2)
KERNEL(bf16_max, 2)
KERNEL(bf16_product, 2)
KERNEL(f32_sum, 4)
KERNEL(f32_min, 4)
KERNEL(f32_max, 4)
KERNEL(f32_product, 4)
KERNEL(f64_sum, 8)
KERNEL(f64_min, 8)
KERNEL(f64_max, 8)
KERNEL(f64_product, 8)

SCALER(u8_scale, 1, _mm512_castpd_si512(_mm512_set1_pd(by)), u8_scale_op)
SCALER(i8_scale, 1, _mm512_castpd_si512(_mm512_set1_pd(by)), i8_scale_op)
SCALER(i32_scale, 4, _mm512_castpd_si512(_mm512_set1_pd(by)), i32_scale_op)
SCALER(i64_scale, 8, _mm512_castpd_si512(_mm512_set1_pd(by)), i64_scale_op)
SCALER(f16_scale, 2, _mm512_castps_si512(_mm512_set1_ps((float)by)), f16_scale_op)
SCALER(bf16_scale, 2, _mm512_castps_si512(_mm512_set1_ps(bf16_factor(by))), bf16_scale_op)
SCALER(f32_scale, 4, _mm512_castps_si512(_mm512_set1_ps((float)by)), f32_product_op)
SCALER(f64_scale, 8, _mm512_castpd_si512(_mm512_set1_pd(by)), f64_product_op)

enum { FLOATS = LINE / 4 };

static TARGET void cast_f32_f16(void *restrict dst, const void *restrict src, size_t count) {
    for (size_t i = 0; i < count; i += FLOATS) {
        __mmask16 mask = (__mmask16)mask_of(count - i < FLOATS ? count - i : FLOATS);
        __m512 value = _mm512_maskz_loadu_ps(mask, (const char *)src + i * 4);
        __m256i halves = _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm256_mask_storeu_epi16((char *)dst + i * 2, mask, halves);
    }
}

static TARGET void cast_f16_f32(void *restrict dst, const void *restrict src, size_t count) {
    for (size_t i = 0; i < count; i += FLOATS) {
        __mmask16 mask = (__mmask16)mask_of(count - i < FLOATS ? count - i : FLOATS);
        __m512 value = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, (const char *)src + i * 2));
        _mm512_mask_storeu_ps((char *)dst + i * 4, mask, value);
    }
}

const struct nb_kernels nb_kernels_avx512 = {
    .reduce = {[NB_U8] = {u8_sum, u8_min, u8_max, u8_product},
               [NB_I8] = {u8_sum, i8_min, i8_max, u8_product},
               [NB_I32] = {i32_sum, i32_min, i32_max, i32_product},
               [NB_I64] = {i64_sum, i64_min, i64_max, i64_product},
               [NB_F16] = {f16_sum, f16_min, f16_max, f16_product},
               [NB_BF16] = {bf16_sum, bf16_min, bf16_max, bf16_product},
               [NB_F32] = {f32_sum, f32_min, f32_max, f32_product},
               [NB_F64] = {f64_sum, f64_min, f64_max, f64_product}},
    .scale = {[NB_U8] = u8_scale,
              [NB_I8] = i8_scale,
              [NB_I32] = i32_scale,
              [NB_I64] = i64_scale,
              [NB_F16] = f16_scale,
              [NB_BF16] = bf16_scale,
              [NB_F32] = f32_scale,
              [NB_F64] = f64_scale},
    .f32_f16 = cast_f32_f16,
    .f16_f32 = cast_f16_f32,
};

#else

typedef int nb_kernels_avx512_is_for_x86_64; // an empty file is no C

#endif
