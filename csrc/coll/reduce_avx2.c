// Reduction kernels for x86-64 with AVX2 and F16C. Bit for bit what the generic ones give, which finish the last few
// elements. The target is asked for function by function, so the file needs no flag of its own.
#include "base/dtype.h"
#include <stddef.h>
#if defined(__x86_64__)

#include <immintrin.h>

#include "coll/kernels.h"

#define TARGET __attribute__((target("avx2,f16c")))

static inline TARGET __m256i load_bytes(const void *at) {
    return _mm256_loadu_si256((const __m256i *)at);
}

static inline TARGET void store_bytes(void *at, __m256i value) {
    _mm256_storeu_si256((__m256i *)at, value);
}

static inline TARGET __m256 load_f32(const void *at) {
    return _mm256_loadu_ps((const float *)at);
}

static inline TARGET void store_f32(void *at, __m256 value) {
    _mm256_storeu_ps((float *)at, value);
}

static inline TARGET __m256d load_f64(const void *at) {
    return _mm256_loadu_pd((const double *)at);
}

static inline TARGET void store_f64(void *at, __m256d value) {
    _mm256_storeu_pd((double *)at, value);
}

static inline TARGET __m256 load_f16(const void *at) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
}

static inline TARGET void store_f16(void *at, __m256 value) {
    _mm_storeu_si128((__m128i *)at, _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

static inline TARGET __m256 load_bf16(const void *at) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

static inline TARGET void store_bf16(void *at, __m256 value) {
    __m256i bits = _mm256_castps_si256(value);
    __m256i high = _mm256_srli_epi32(bits, 16);
    __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    __m256i sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i rounded = _mm256_srli_epi32(sum, 16);
    __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    __m256i halves = _mm256_blendv_epi8(rounded, quiet, is_nan);
    __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    _mm_storeu_si128((__m128i *)at, packed);
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

static inline TARGET __m256i min_i64(__m256i a, __m256i b) {
    return _mm256_blendv_epi8(a, b, _mm256_cmpgt_epi64(a, b));
}

static inline TARGET __m256i max_i64(__m256i a, __m256i b) {
    return _mm256_blendv_epi8(b, a, _mm256_cmpgt_epi64(a, b));
}

// `width` elements of `element_bytes` at a time.
#define REDUCE(name, dtype, redop, element_bytes, width, load, store, op)                                              \
    static TARGET void name(void *restrict dst, const void *restrict src, size_t count) {                              \
        char *d = dst;                                                                                                 \
        const char *s = src;                                                                                           \
        size_t left = count;                                                                                           \
        for (; left >= (width); left -= (width)) {                                                                     \
            store(d, op(load(d), load(s)));                                                                            \
            d += (size_t)(width) * (element_bytes);                                                                    \
            s += (size_t)(width) * (element_bytes);                                                                    \
        }                                                                                                              \
        nb_kernels_generic.reduce[dtype][redop](d, s, left);                                                           \
    }

#define SCALE(name, dtype, element_bytes, width, load, store, splat, multiply)                                         \
    static TARGET void name(void *dst, size_t count, double scale) {                                                   \
        char *d = dst;                                                                                                 \
        size_t left = count;                                                                                           \
        for (; left >= (width); left -= (width)) {                                                                     \
            store(d, multiply(load(d), splat));                                                                        \
            d += (size_t)(width) * (element_bytes);                                                                    \
        }                                                                                                              \
        nb_kernels_generic.scale[dtype](d, left, scale);                                                               \
    }

REDUCE(u8_sum, NB_U8, NB_SUM, 1, 32, load_bytes, store_bytes, _mm256_add_epi8)
REDUCE(u8_min, NB_U8, NB_MIN, 1, 32, load_bytes, store_bytes, _mm256_min_epu8)
REDUCE(u8_max, NB_U8, NB_MAX, 1, 32, load_bytes, store_bytes, _mm256_max_epu8)
REDUCE(i8_min, NB_I8, NB_MIN, 1, 32, load_bytes, store_bytes, _mm256_min_epi8)
REDUCE(i8_max, NB_I8, NB_MAX, 1, 32, load_bytes, store_bytes, _mm256_max_epi8)
REDUCE(i32_sum, NB_I32, NB_SUM, 4, 8, load_bytes, store_bytes, _mm256_add_epi32)
REDUCE(i32_min, NB_I32, NB_MIN, 4, 8, load_bytes, store_bytes, _mm256_min_epi32)
REDUCE(i32_max, NB_I32, NB_MAX, 4, 8, load_bytes, store_bytes, _mm256_max_epi32)
REDUCE(i32_product, NB_I32, NB_PRODUCT, 4, 8, load_bytes, store_bytes, _mm256_mullo_epi32)
REDUCE(i64_sum, NB_I64, NB_SUM, 8, 4, load_bytes, store_bytes, _mm256_add_epi64)
REDUCE(i64_min, NB_I64, NB_MIN, 8, 4, load_bytes, store_bytes, min_i64)
REDUCE(i64_max, NB_I64, NB_MAX, 8, 4, load_bytes, store_bytes, max_i64)
REDUCE(f16_sum, NB_F16, NB_SUM, 2, 8, load_f16, store_f16, _mm256_add_ps)
REDUCE(f16_min, NB_F16, NB_MIN, 2, 8, load_f16, store_f16, min_f32)
REDUCE(f16_max, NB_F16, NB_MAX, 2, 8, load_f16, store_f16, max_f32)
REDUCE(f16_product, NB_F16, NB_PRODUCT, 2, 8, load_f16, store_f16, _mm256_mul_ps)
REDUCE(bf16_sum, NB_BF16, NB_SUM, 2, 8, load_bf16, store_bf16, _mm256_add_ps)
REDUCE(bf16_min, NB_BF16, NB_MIN, 2, 8, load_bf16, store_bf16, min_f32)
REDUCE(bf16_max, NB_BF16, NB_MAX, 2, 8, load_bf16, store_bf16, max_f32)
REDUCE(bf16_product, NB_BF16, NB_PRODUCT, 2, 8, load_bf16, store_bf16, _mm256_mul_ps)
REDUCE(f32_sum, NB_F32, NB_SUM, 4, 8, load_f32, store_f32, _mm256_add_ps)
REDUCE(f32_min, NB_F32, NB_MIN, 4, 8, load_f32, store_f32, min_f32)
REDUCE(f32_max, NB_F32, NB_MAX, 4, 8, load_f32, store_f32, max_f32)
REDUCE(f32_product, NB_F32, NB_PRODUCT, 4, 8, load_f32, store_f32, _mm256_mul_ps)
REDUCE(f64_sum, NB_F64, NB_SUM, 8, 4, load_f64, store_f64, _mm256_add_pd)
REDUCE(f64_min, NB_F64, NB_MIN, 8, 4, load_f64, store_f64, min_f64)
REDUCE(f64_max, NB_F64, NB_MAX, 8, 4, load_f64, store_f64, max_f64)
REDUCE(f64_product, NB_F64, NB_PRODUCT, 8, 4, load_f64, store_f64, _mm256_mul_pd)

SCALE(f16_scale, NB_F16, 2, 8, load_f16, store_f16, _mm256_set1_ps((float)scale), _mm256_mul_ps)
SCALE(bf16_scale, NB_BF16, 2, 8, load_bf16, store_bf16, _mm256_set1_ps((float)scale), _mm256_mul_ps)
SCALE(f32_scale, NB_F32, 4, 8, load_f32, store_f32, _mm256_set1_ps((float)scale), _mm256_mul_ps)
SCALE(f64_scale, NB_F64, 8, 4, load_f64, store_f64, _mm256_set1_pd(scale), _mm256_mul_pd)

static TARGET void cast_f32_f16(void *restrict dst, const void *restrict src, size_t count) {
    char *d = dst;
    const char *s = src;
    size_t left = count;
    for (; left >= 8; left -= 8) {
        store_f16(d, load_f32(s));
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
        store_f32(d, load_f16(s));
        d += 32;
        s += 16;
    }
    nb_kernels_generic.f16_f32(d, s, left);
}

const struct nb_kernels nb_kernels_avx2 = {
    .reduce = {[NB_U8] = {u8_sum, u8_min, u8_max, NULL},
               [NB_I8] = {u8_sum, i8_min, i8_max, NULL},
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

typedef int nb_kernels_avx2_is_for_x86_64; // an empty file is no C

#endif
