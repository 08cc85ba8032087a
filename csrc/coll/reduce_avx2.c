// Reduction kernels for x86-64 with AVX2, FMA and F16C. Bit for bit what the generic ones give, which finish the last
// few elements. The target is asked for function by function, so the file needs no flag of its own.
#include "base/dtype.h"
#include <stddef.h>
#if defined(__x86_64__)

#include <immintrin.h>

#include "coll/kernels.h"

#define TARGET __attribute__((target("avx2,fma,f16c")))

typedef __m256i vector;

static inline TARGET vector vector_load(const void *at) {
    return _mm256_loadu_si256((const __m256i *)at);
}

static inline TARGET void vector_store(void *at, vector value) {
    _mm256_storeu_si256((__m256i *)at, value);
}

#include "coll/vectors.h"

static inline TARGET __m256 f32(vector value) {
    return _mm256_castsi256_ps(value);
}

static inline TARGET __m256d f64(vector value) {
    return _mm256_castsi256_pd(value);
}

// For sums of 16-bit floats. As a multiplication that changes nothing it leaves CPUs that have units for sums and for
// products those units that convert.
static inline TARGET __m256 add_f32(__m256 a, __m256 b) {
    return _mm256_fmadd_ps(a, _mm256_set1_ps(1), b);
}

// The instruction gives its second operand where either is NaN; a NaN in the first one is put back.
static inline TARGET __m256 min_f32(__m256 a, __m256 b) {
    return _mm256_blendv_ps(_mm256_min_ps(a, b), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}

static inline TARGET __m256 max_f32(__m256 a, __m256 b) {
    return _mm256_blendv_ps(_mm256_max_ps(a, b), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}

static inline TARGET __m256d min_f64(__m256d a, __m256d b) {
    return _mm256_blendv_pd(_mm256_min_pd(a, b), a, _mm256_cmp_pd(a, a, _CMP_UNORD_Q));
}

static inline TARGET __m256d max_f64(__m256d a, __m256d b) {
    return _mm256_blendv_pd(_mm256_max_pd(a, b), a, _mm256_cmp_pd(a, a, _CMP_UNORD_Q));
}

// 8 halves as floats: half a vector.
static inline TARGET __m256 f16_load(const char *at) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
}

static inline TARGET vector f16_join(__m256 one, __m256 other) {
    __m128i low = _mm256_cvtps_ph(one, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m128i high = _mm256_cvtps_ph(other, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

// The elements of even and of odd number: no element changes its place.
static inline TARGET __m256 bf16_even(vector value) {
    return f32(_mm256_slli_epi32(value, 16));
}

static inline TARGET __m256 bf16_odd(vector value) {
    return f32(_mm256_and_si256(value, _mm256_set1_epi32((int)0xffff0000)));
}

// The upper halves of floats, which go back to where they came from.
static inline TARGET vector bf16_upper(__m256i even, __m256i odd) {
    return _mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xaa);
}

// To nearest even, all 16 at once: the carry of lower half + 0x7fff + (upper half & 1)
// is the top bit of an average. A NaN that arithmetic on bfloat16 gives is quiet, and has
// nothing in its lower half that could round it to another value.
static inline TARGET vector bf16_round(__m256 even, __m256 odd) {
    __m256i upper = bf16_upper(_mm256_castps_si256(even), _mm256_castps_si256(odd));
    __m256i moved = _mm256_slli_epi32(_mm256_castps_si256(odd), 16);
    __m256i lower = _mm256_blend_epi16(_mm256_castps_si256(even), moved, 0xaa);
    __m256i one = _mm256_and_si256(upper, _mm256_set1_epi16(1));
    __m256i average = _mm256_avg_epu16(lower, _mm256_or_si256(one, _mm256_set1_epi16(0x7ffe)));
    return _mm256_add_epi16(upper, _mm256_srli_epi16(average, 15));
}

// Of floats that are bfloat16 already: a signalling NaN becomes quiet.
static inline TARGET vector bf16_join(__m256 even, __m256 odd) {
    __m256i upper = bf16_upper(_mm256_castps_si256(even), _mm256_castps_si256(odd));
    __m256i magnitude = _mm256_and_si256(upper, _mm256_set1_epi16(0x7fff));
    __m256i nan = _mm256_cmpgt_epi16(magnitude, _mm256_set1_epi16(0x7f80));
    return _mm256_or_si256(upper, _mm256_and_si256(nan, _mm256_set1_epi16(0x40)));
}

#define OP(name, result)                                                                                               \
    static inline TARGET vector name(const char *to, const char *from) {                                               \
        vector a = vector_load(to);                                                                                    \
        vector b = vector_load(from);                                                                                  \
        return result;                                                                                                 \
    }

OP(u8_sum_op, _mm256_add_epi8(a, b))
OP(u8_min_op, _mm256_min_epu8(a, b))
OP(u8_max_op, _mm256_max_epu8(a, b))
OP(i8_min_op, _mm256_min_epi8(a, b))
OP(i8_max_op, _mm256_max_epi8(a, b))
OP(i32_sum_op, _mm256_add_epi32(a, b))
OP(i32_min_op, _mm256_min_epi32(a, b))
OP(i32_max_op, _mm256_max_epi32(a, b))
OP(i32_product_op, _mm256_mullo_epi32(a, b))
OP(i64_sum_op, _mm256_add_epi64(a, b))
OP(i64_min_op, _mm256_blendv_epi8(a, b, _mm256_cmpgt_epi64(a, b)))
OP(i64_max_op, _mm256_blendv_epi8(b, a, _mm256_cmpgt_epi64(a, b)))
OP(f32_sum_op, _mm256_castps_si256(_mm256_add_ps(f32(a), f32(b))))
OP(f32_min_op, _mm256_castps_si256(min_f32(f32(a), f32(b))))
OP(f32_max_op, _mm256_castps_si256(max_f32(f32(a), f32(b))))
OP(f32_product_op, _mm256_castps_si256(_mm256_mul_ps(f32(a), f32(b))))
OP(f64_sum_op, _mm256_castpd_si256(_mm256_add_pd(f64(a), f64(b))))
OP(f64_min_op, _mm256_castpd_si256(min_f64(f64(a), f64(b))))
OP(f64_max_op, _mm256_castpd_si256(max_f64(f64(a), f64(b))))
OP(f64_product_op, _mm256_castpd_si256(_mm256_mul_pd(f64(a), f64(b))))

#define OP_F16(name, op)                                                                                               \
    static inline TARGET vector name(const char *to, const char *from) {                                               \
        return f16_join(op(f16_load(to), f16_load(from)), op(f16_load(to + 16), f16_load(from + 16)));                 \
    }

OP_F16(f16_sum_op, add_f32)
OP_F16(f16_min_op, min_f32)
OP_F16(f16_max_op, max_f32)
OP_F16(f16_product_op, _mm256_mul_ps)

static inline TARGET vector f16_scale_op(const char *to, const char *from) {
    __m256 factor = f32(vector_load(from));
    return f16_join(_mm256_mul_ps(f16_load(to), factor), _mm256_mul_ps(f16_load(to + 16), factor));
}

OP(bf16_sum_op, bf16_round(add_f32(bf16_even(a), bf16_even(b)), add_f32(bf16_odd(a), bf16_odd(b))))
OP(bf16_min_op, bf16_join(min_f32(bf16_even(a), bf16_even(b)), min_f32(bf16_odd(a), bf16_odd(b))))
OP(bf16_max_op, bf16_join(max_f32(bf16_even(a), bf16_even(b)), max_f32(bf16_odd(a), bf16_odd(b))))
OP(bf16_product_op, bf16_round(_mm256_mul_ps(bf16_even(a), bf16_even(b)), _mm256_mul_ps(bf16_odd(a), bf16_odd(b))))
OP(bf16_scale_op, bf16_round(_mm256_mul_ps(bf16_even(a), f32(b)), _mm256_mul_ps(bf16_odd(a), f32(b))))

// The low byte of a product of two 16-bit numbers is that of their low bytes' product; the odd bytes are moved there.
static inline TARGET vector u8_product_op(const char *to, const char *from) {
    vector a = vector_load(to);
    vector b = vector_load(from);
    __m256i low = _mm256_set1_epi16(0xff);
    __m256i even = _mm256_mullo_epi16(a, b);
    __m256i odd = _mm256_mullo_epi16(_mm256_srli_epi16(a, 8), _mm256_andnot_si256(low, b));
    return _mm256_or_si256(_mm256_and_si256(even, low), odd);
}

// From products of 32 bits; that of the two upper halves lies above what is kept.
static inline TARGET vector i64_product_op(const char *to, const char *from) {
    vector a = vector_load(to);
    vector b = vector_load(from);
    __m256i upper_a = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), b);
    __m256i upper_b = _mm256_mul_epu32(a, _mm256_srli_epi64(b, 32));
    __m256i upper = _mm256_slli_epi64(_mm256_add_epi64(upper_a, upper_b), 32);
    return _mm256_add_epi64(_mm256_mul_epu32(a, b), upper);
}

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
REDUCE(i64_product, NB_I64, NB_PRODUCT, 8)
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

SCALE(f16_scale, NB_F16, 2, _mm256_castps_si256(_mm256_set1_ps((float)by)), f16_scale_op)
SCALE(bf16_scale, NB_BF16, 2, _mm256_castps_si256(_mm256_set1_ps(bf16_factor(by))), bf16_scale_op)
SCALE(f32_scale, NB_F32, 4, _mm256_castps_si256(_mm256_set1_ps((float)by)), f32_product_op)
SCALE(f64_scale, NB_F64, 8, _mm256_castpd_si256(_mm256_set1_pd(by)), f64_product_op)

static TARGET void cast_f32_f16(void *restrict dst, const void *restrict src, size_t count) {
    char *d = dst;
    const char *s = src;
    size_t left = count;
    for (; left >= 8; left -= 8) {
        __m128i halves = _mm256_cvtps_ph(f32(vector_load(s)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm_storeu_si128((__m128i *)d, halves);
        d += 16;
        s += 32;
    }
    nb_kernels_generic.f32_f16(d, s, left);
}

static TARGET void cast_f16_f32(void *restrict dst, const void *restrict src, size_t count) {
    char *d = dst;
    const char *s = src;
    size_t left = count;
    for (; left >= 8; left -= 8) {
        vector_store(d, _mm256_castps_si256(f16_load(s)));
        d += 32;
        s += 16;
    }
    nb_kernels_generic.f16_f32(d, s, left);
}

const struct nb_kernels nb_kernels_avx2 = {
    .reduce = {[NB_U8] = {u8_sum, u8_min, u8_max, u8_product},
               [NB_I8] = {u8_sum, i8_min, i8_max, u8_product},
               [NB_I32] = {i32_sum, i32_min, i32_max, i32_product},
               [NB_I64] = {i64_sum, i64_min, i64_max, i64_product},
               [NB_F16] = {f16_sum, f16_min, f16_max, f16_product},
               [NB_BF16] = {bf16_sum, bf16_min, bf16_max, bf16_product},
               [NB_F32] = {f32_sum, f32_min, f32_max, f32_product},
               [NB_F64] = {f64_sum, f64_min, f64_max, f64_product}},
    .scale = {[NB_F16] = f16_scale, [NB_BF16] = bf16_scale, [NB_F32] = f32_scale, [NB_F64] = f64_scale},
    .f32_f16 = cast_f32_f16,
    .f16_f32 = cast_f16_f32,
};

#else

typedef int nb_kernels_avx2_is_for_x86_64; // an empty file is no C

#endif
