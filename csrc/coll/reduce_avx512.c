// Reduction kernels for x86-64 with AVX-512 (F, BW, DQ, VL), bit for bit equal to the generic ones.
#include <stddef.h>
#include <stdint.h>
#if defined(__x86_64__)

#include <immintrin.h>

#define SET nb_kernels_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))

typedef __m512i vector;
typedef __m512 floats;
typedef __m512d doubles;

static inline TARGET vector vector_load(const void *at) {
    return _mm512_loadu_si512(at);
}

static inline TARGET void vector_store(void *at, vector value) {
    _mm512_storeu_si512(at, value);
}

#define HAS_PARTS

static inline __mmask64 mask_of(size_t bytes) {
    return bytes < sizeof(vector) ? ((__mmask64)1 << bytes) - 1 : ~(__mmask64)0;
}

static inline TARGET vector part_load(const void *at, size_t bytes) {
    return _mm512_maskz_loadu_epi8(mask_of(bytes), at);
}

static inline TARGET void part_store(void *at, size_t bytes, vector value) {
    _mm512_mask_storeu_epi8(at, mask_of(bytes), value);
}

#include "coll/vectors.h"

OP(u8_min, vector, _mm512_min_epu8(a, b))
OP(u8_max, vector, _mm512_max_epu8(a, b))
OP(i8_min, vector, _mm512_min_epi8(a, b))
OP(i8_max, vector, _mm512_max_epi8(a, b))
OP(i32_min, vector, _mm512_min_epi32(a, b))
OP(i32_max, vector, _mm512_max_epi32(a, b))
OP(i64_min, vector, _mm512_min_epi64(a, b))
OP(i64_max, vector, _mm512_max_epi64(a, b))

// The instruction returns its second operand if either is NaN; the mask keeps a NaN of the first.
static inline TARGET floats floats_min(floats a, floats b) {
    return _mm512_mask_min_ps(a, _mm512_cmp_ps_mask(a, a, _CMP_ORD_Q), a, b);
}

static inline TARGET floats floats_max(floats a, floats b) {
    return _mm512_mask_max_ps(a, _mm512_cmp_ps_mask(a, a, _CMP_ORD_Q), a, b);
}

static inline TARGET doubles doubles_min(doubles a, doubles b) {
    return _mm512_mask_min_pd(a, _mm512_cmp_pd_mask(a, a, _CMP_ORD_Q), a, b);
}

static inline TARGET doubles doubles_max(doubles a, doubles b) {
    return _mm512_mask_max_pd(a, _mm512_cmp_pd_mask(a, a, _CMP_ORD_Q), a, b);
}

static inline TARGET floats f16_load(const char *at) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at));
}

static inline TARGET vector f16_join(floats one, floats other) {
    __m256i low = _mm512_cvtps_ph(one, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256i high = _mm512_cvtps_ph(other, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// An add as a fused multiply-add by 1: on CPUs with separate units for both this leaves the conversion units free.
static inline TARGET floats f16_add(floats a, floats b) {
    return _mm512_fmadd_ps(a, _mm512_set1_ps(1), b);
}

// Loads once: the compiler would load again for the other half, which takes longer than the rest.
static inline TARGET vector bf16_load(const char *at) {
    vector value = vector_load(at);
    __asm__("" : "+v"(value));
    return value;
}

// The lower half of each 16 bytes, and the upper half.
static inline TARGET floats bf16_one(vector value) {
    return (floats)_mm512_unpacklo_epi16(_mm512_setzero_si512(), value);
}

static inline TARGET floats bf16_other(vector value) {
    return (floats)_mm512_unpackhi_epi16(_mm512_setzero_si512(), value);
}

// Positions of each element's upper half in those two vectors; its lower half is one before.
static inline TARGET vector bf16_places(void) {
    const __m512i lanes =
        _mm512_set_epi64(0x003f003d003b0039, 0x001f001d001b0019, 0x0037003500330031, 0x0017001500130011,
                         0x002f002d002b0029, 0x000f000d000b0009, 0x0027002500230021, 0x0007000500030001);
    return lanes;
}

static inline TARGET vector bf16_upper(floats one, floats other) {
    return _mm512_permutex2var_epi16((vector)one, bf16_places(), (vector)other);
}

// Rounds to nearest even: up if the lower half is more than one half, or exactly one half and the upper half is odd. A
// NaN from arithmetic on bfloat16 is quiet, and its lower half is zero, so rounding does not change it.
static inline TARGET vector bf16_round(floats one, floats other) {
    vector upper = bf16_upper(one, other);
    vector places = _mm512_sub_epi16(bf16_places(), _mm512_set1_epi16(1));
    vector lower = _mm512_permutex2var_epi16((vector)one, places, (vector)other);
    vector even = _mm512_andnot_si512(upper, _mm512_set1_epi16(1));
    vector least = _mm512_or_si512(even, _mm512_set1_epi16(INT16_MIN));
    return _mm512_mask_sub_epi16(upper, _mm512_cmpge_epu16_mask(lower, least), upper, _mm512_set1_epi16(-1));
}

// Makes a signalling NaN quiet.
static inline TARGET vector bf16_join(floats one, floats other) {
    vector upper = bf16_upper(one, other);
    vector magnitude = _mm512_and_si512(upper, _mm512_set1_epi16(0x7fff));
    __mmask32 nan = _mm512_cmpgt_epu16_mask(magnitude, _mm512_set1_epi16(0x7f80));
    return _mm512_mask_mov_epi16(upper, nan, _mm512_or_si512(upper, _mm512_set1_epi16(0x40)));
}

#define SCALES_INTEGERS

// Scales 16 integers by a factor, clamps to [low, high] and truncates. A NaN becomes `low`.
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
        __m512d factor = (doubles)vector_load(from);                                                                   \
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
OP(i32_scale, vector, scaled(a, (doubles)b, INT32_MIN, INT32_MAX))

// The instruction turns values that are too small, and NaN, into INT64_MIN.
static inline TARGET vector i64_scale_op(const char *to, const char *from) {
    __m512d value = _mm512_mul_pd(_mm512_cvtepi64_pd(vector_load(to)), (doubles)vector_load(from));
    __mmask8 large = _mm512_cmp_pd_mask(value, _mm512_set1_pd(0x1p63), _CMP_GE_OQ);
    return _mm512_mask_mov_epi64(_mm512_cvttpd_epi64(value), large, _mm512_set1_epi64(INT64_MAX));
}

#include "coll/vector_set.h" // IWYU pragma: keep

#else

typedef int nb_kernels_avx512_is_for_x86_64; // C does not allow an empty file

#endif
