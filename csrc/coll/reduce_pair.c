// Kernels that read two lines and write their sum to both, for x86-64 with AVX2: float32 and float64. Other types take
// a sum and a copy.
#include "coll/reduce_pair.h"

#include <stddef.h>

#include "base/dtype.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <string.h>

#include "coll/kernels.h"

#define TARGET __attribute__((target("avx2")))

enum { VECTOR_BYTES = 32, TURN_BYTES = 64 };

// The last few elements, by the kernels that define what all others must give.
static void finish(int dtype, char *const to[2], const char *const from[2], size_t count, double scale) {
    char sum[TURN_BYTES];
    char other[TURN_BYTES];
    size_t bytes = count * nb_dtype_size(dtype);
    if (bytes == 0 || bytes > sizeof sum) {
        return;
    }
    memcpy(sum, from[0], bytes);
    memcpy(other, from[1], bytes);
    nb_kernels_generic.reduce[dtype][NB_SUM](sum, other, count);
    if (scale != 1) {
        nb_kernels_generic.scale[dtype](sum, count, scale);
    }
    memcpy(to[0], sum, bytes);
    memcpy(to[1], sum, bytes);
}

// A line of the cache a turn. The product with 1 is the value itself.
#define PAIR(name, dtype, type, reg, load, store, add, multiply, splat)                                                \
    static TARGET void name(void *one, void *two, const void *a, const void *b, size_t count, double scale) {          \
        const size_t turn = TURN_BYTES / sizeof(type);                                                                 \
        const size_t half = VECTOR_BYTES / sizeof(type);                                                               \
        char *to[2] = {one, two};                                                                                      \
        const char *from[2] = {a, b};                                                                                  \
        const reg factor = splat((type)scale);                                                                         \
        size_t left = count;                                                                                           \
        for (; left >= turn; left -= turn) {                                                                           \
            const type *x = (const type *)(const void *)from[0];                                                       \
            const type *y = (const type *)(const void *)from[1];                                                       \
            reg low = multiply(add(load(x), load(y)), factor);                                                         \
            reg high = multiply(add(load(x + half), load(y + half)), factor);                                          \
            for (int i = 0; i < 2; i++) {                                                                              \
                type *z = (type *)(void *)to[i];                                                                       \
                store(z, low);                                                                                         \
                store(z + half, high);                                                                                 \
                from[i] += TURN_BYTES;                                                                                 \
                to[i] += TURN_BYTES;                                                                                   \
            }                                                                                                          \
        }                                                                                                              \
        finish(dtype, to, from, left, scale);                                                                          \
    }

PAIR(f32_pair, NB_F32, float, __m256, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_add_ps, _mm256_mul_ps, _mm256_set1_ps)
PAIR(f64_pair, NB_F64, double, __m256d, _mm256_loadu_pd, _mm256_storeu_pd, _mm256_add_pd, _mm256_mul_pd, _mm256_set1_pd)

nb_pair_fn nb_pair_kernel(int dtype, int redop) {
    if (redop != NB_SUM || !__builtin_cpu_supports("avx2")) {
        return NULL;
    }
    return dtype == NB_F32 ? f32_pair : dtype == NB_F64 ? f64_pair : NULL;
}

#else

nb_pair_fn nb_pair_kernel(int dtype, int redop) {
    (void)dtype;
    (void)redop;
    return NULL;
}

#endif
