// Reduction kernels for x86-64 with AVX2, FMA and F16C, bit for bit equal to the generic ones. Each function sets its
// target, so the file needs no compiler flag.
#include <stddef.h>
#include <stdint.h>
#if defined(__x86_64__)

#include <immintrin.h>

#define SET nb_kernels_avx2
#define TARGET __attribute__((target("avx2,fma,f16c")))

typedef __m256i vector;
typedef __m256 floats;
typedef __m256d doubles;

static inline TARGET vector vector_load(const void *at) {
    return _mm256_loadu_si256((const __m256i *)at);
}

static inline TARGET void vector_store(void *at, vector value) {
    _mm256_storeu_si256((__m256i *)at, value);
}

#include "coll/vectors.h"

OP(u8_min, vector, _mm256_min_epu8(a, b))
OP(u8_max, vector, _mm256_max_epu8(a, b))
OP(i8_min, vector, _mm256_min_epi8(a, b))
OP(i8_max, vector, _mm256_max_epi8(a, b))
OP(i32_min, vector, _mm256_min_epi32(a, b))
OP(i32_max, vector, _mm256_max_epi32(a, b))
OP(i64_min, vector, _mm256_blendv_epi8(a, b, _mm256_cmpgt_epi64(a, b)))
OP(i64_max, vector, _mm256_blendv_epi8(b, a, _mm256_cmpgt_epi64(a, b)))

// The instruction returns its second operand if either is NaN; this restores a NaN of the first.
static inline TARGET floats floats_min(floats a, floats b) {
    return _mm256_blendv_ps(_mm256_min_ps(a, b), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}

static inline TARGET floats floats_max(floats a, floats b) {
    return _mm256_blendv_ps(_mm256_max_ps(a, b), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}

static inline TARGET doubles doubles_min(doubles a, doubles b) {
    return _mm256_blendv_pd(_mm256_min_pd(a, b), a, _mm256_cmp_pd(a, a, _CMP_UNORD_Q));
}

static inline TARGET doubles doubles_max(doubles a, doubles b) {
    return _mm256_blendv_pd(_mm256_max_pd(a, b), a, _mm256_cmp_pd(a, a, _CMP_UNORD_Q));
}

static inline TARGET floats f16_load(const char *at) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
}

static inline TARGET vector f16_join(floats one, floats other) {
    __m128i low = _mm256_cvtps_ph(one, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m128i high = _mm256_cvtps_ph(other, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

// An add as a fused multiply-add by 1: on CPUs with separate units for both this leaves the conversion units free.
static inline TARGET floats f16_add(floats a, floats b) {
    return _mm256_fmadd_ps(a, _mm256_set1_ps(1), b);
}

static inline TARGET vector bf16_load(const char *at) {
    return vector_load(at);
}

// The even elements, and the odd ones. No element moves.
static inline TARGET floats bf16_one(vector value) {
    return (floats)((u32s)value << 16);
}

static inline TARGET floats bf16_other(vector value) {
    return (floats)((u32s)value & 0xffff0000);
}

// Joins the upper halves of the floats, at the places where they came from.
static inline TARGET vector bf16_upper(floats even, floats odd) {
    return _mm256_blend_epi16(_mm256_srli_epi32((vector)even, 16), (vector)odd, 0xaa);
}

// Rounds to nearest even: the carry of lower half + 0x7fff + (upper half & 1) is the top bit of an average. A NaN from
// arithmetic on bfloat16 is quiet, and its lower half is zero, so rounding does not change it.
static inline TARGET vector bf16_round(floats even, floats odd) {
    vector upper = bf16_upper(even, odd);
    vector lower = _mm256_blend_epi16((vector)even, _mm256_slli_epi32((vector)odd, 16), 0xaa);
    vector one = _mm256_and_si256(upper, _mm256_set1_epi16(1));
    vector average = _mm256_avg_epu16(lower, _mm256_or_si256(one, _mm256_set1_epi16(0x7ffe)));
    return _mm256_add_epi16(upper, _mm256_srli_epi16(average, 15));
}

// Makes a signalling NaN quiet.
static inline TARGET vector bf16_join(floats even, floats odd) {
    vector upper = bf16_upper(even, odd);
    vector magnitude = _mm256_and_si256(upper, _mm256_set1_epi16(0x7fff));
    vector nan = _mm256_cmpgt_epi16(magnitude, _mm256_set1_epi16(0x7f80));
    return _mm256_or_si256(upper, _mm256_and_si256(nan, _mm256_set1_epi16(0x40)));
}

#include "coll/vector_set.h" // IWYU pragma: keep

#else

typedef int nb_kernels_avx2_is_for_x86_64; // C does not allow an empty file

#endif
