// Device code: pack and unpack lists of gradients, scale, cast, add. The language is what C and CUDA share: nvcc compiles
// this file for GPUs; a test compiles it as C, so that its arithmetic is tested without a GPU.
//
// All kernels have the same parameters, which kernels.h describes. Any alignment is right; elements and pieces at their
// natural alignment are fast. As C, a file that includes this one may define NB_KERNEL_AT, which turns a device address
// and a length into a pointer.
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/half.h"
#include "cuda/piece.h"

#ifdef __CUDACC__
#ifdef __cplusplus
#define NB_EXPORTED extern "C"
#else
#define NB_EXPORTED // a test runs the threads of a grid one after the other
#endif
#define NB_INLINE static __device__ inline
#define NB_KERNEL(name) NB_EXPORTED __global__ void name(uint64_t to, uint64_t from, uint64_t count, double factor)
// Each thread takes its share: elements along x, pieces along y.
#define NB_FIRST_X ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x)
#define NB_STEP_X ((uint64_t)gridDim.x * blockDim.x)
#define NB_FIRST_Y ((uint64_t)blockIdx.y)
#define NB_STEP_Y ((uint64_t)gridDim.y)
#define NB_KERNEL_AT(address, bytes) ((unsigned char *)(uintptr_t)(address))
#define NB_IF_ALIGNED(aligned, statement)                                                                              \
    if (aligned) {                                                                                                     \
        statement;                                                                                                     \
    }
#else
#define NB_INLINE static inline
#define NB_KERNEL(name)                                                                                                \
    __attribute__((unused)) static void name(uint64_t to, uint64_t from, uint64_t count, double factor)
#define NB_FIRST_X ((uint64_t)0)
#define NB_STEP_X ((uint64_t)1)
#define NB_FIRST_Y ((uint64_t)0)
#define NB_STEP_Y ((uint64_t)1)
#ifndef NB_KERNEL_AT
#define NB_KERNEL_AT(address, bytes) ((unsigned char *)(uintptr_t)(address))
#endif
#define NB_IF_ALIGNED(aligned, statement) (void)(aligned);
#endif

#define NB_EACH(i, count) for (uint64_t i = NB_FIRST_X; i < (count); i += NB_STEP_X)

// Runs `body` for each i, where FAST says whether the arrays are aligned. There is a loop for each case: of one loop with
// a branch, nvcc makes loads of single bytes in both cases.
#define NB_LOOPS(aligned, count, ...)                                                                                  \
    if (aligned) {                                                                                                     \
        enum { FAST = 1 };                                                                                             \
        NB_EACH(i, count) {                                                                                            \
            __VA_ARGS__                                                                                                \
        }                                                                                                              \
    } else {                                                                                                           \
        enum { FAST = 0 };                                                                                             \
        NB_EACH(i, count) {                                                                                            \
            __VA_ARGS__                                                                                                \
        }                                                                                                              \
    }

// Loads and stores one element.
#define NB_ELEMENT(type)                                                                                               \
    NB_INLINE type load_##type(const unsigned char *at, int fast) {                                                    \
        type value;                                                                                                    \
        NB_IF_ALIGNED(fast, return *(const type *)at)                                                                  \
        memcpy(&value, at, sizeof value);                                                                              \
        return value;                                                                                                  \
    }                                                                                                                  \
    NB_INLINE void store_##type(unsigned char *at, type value, int fast) {                                             \
        NB_IF_ALIGNED(fast, *(type *)at = value; return)                                                               \
        memcpy(at, &value, sizeof value);                                                                              \
    }

NB_ELEMENT(uint16_t)
NB_ELEMENT(float)
NB_ELEMENT(double)

#define NB_AS_IS(value) (value)

// to[i] = narrow(widen(to[i]) * factor), computed in `type`.
#define NB_SCALE(name, element, type, widen, narrow)                                                                   \
    NB_KERNEL(name) {                                                                                                  \
        unsigned char *at = NB_KERNEL_AT(to, count * sizeof(element));                                                 \
        const type by = (type)factor;                                                                                  \
        (void)from;                                                                                                    \
        NB_LOOPS(to % sizeof(element) == 0, count, {                                                                   \
            const type value = widen(load_##element(at + i * sizeof(element), FAST));                                  \
            store_##element(at + i * sizeof(element), narrow(value * by), FAST);                                       \
        })                                                                                                             \
    }

// to[i] = narrow(widen(to[i]) + widen(from[i])). The two arrays do not overlap.
#define NB_ADD(name, element, type, widen, narrow)                                                                     \
    NB_KERNEL(name) {                                                                                                  \
        unsigned char *sum = NB_KERNEL_AT(to, count * sizeof(element));                                                \
        const unsigned char *term = NB_KERNEL_AT(from, count * sizeof(element));                                       \
        (void)factor;                                                                                                  \
        NB_LOOPS((to | from) % sizeof(element) == 0, count, {                                                          \
            const type a = widen(load_##element(sum + i * sizeof(element), FAST));                                     \
            const type b = widen(load_##element(term + i * sizeof(element), FAST));                                    \
            store_##element(sum + i * sizeof(element), narrow(a + b), FAST);                                           \
        })                                                                                                             \
    }

// to[i] = convert(from[i]). The two arrays do not overlap.
#define NB_CAST(name, target, source, convert)                                                                         \
    NB_KERNEL(name) {                                                                                                  \
        unsigned char *result = NB_KERNEL_AT(to, count * sizeof(target));                                              \
        const unsigned char *value = NB_KERNEL_AT(from, count * sizeof(source));                                       \
        (void)factor;                                                                                                  \
        NB_LOOPS(to % sizeof(target) == 0 && from % sizeof(source) == 0, count, {                                      \
            const source input = load_##source(value + i * sizeof(source), FAST);                                      \
            store_##target(result + i * sizeof(target), convert(input), FAST);                                         \
        })                                                                                                             \
    }

NB_SCALE(nb_scale_f16, uint16_t, float, nb_f16_widen, nb_f16_narrow)
NB_SCALE(nb_scale_bf16, uint16_t, float, nb_bf16_widen, nb_bf16_narrow)
NB_SCALE(nb_scale_f32, float, float, NB_AS_IS, NB_AS_IS)
NB_SCALE(nb_scale_f64, double, double, NB_AS_IS, NB_AS_IS)

NB_ADD(nb_add_f16, uint16_t, float, nb_f16_widen, nb_f16_narrow)
NB_ADD(nb_add_bf16, uint16_t, float, nb_bf16_widen, nb_bf16_narrow)
NB_ADD(nb_add_f32, float, float, NB_AS_IS, NB_AS_IS)
NB_ADD(nb_add_f64, double, double, NB_AS_IS, NB_AS_IS)

NB_CAST(nb_cast_f32_to_f16, uint16_t, float, nb_f16_narrow)
NB_CAST(nb_cast_f16_to_f32, float, uint16_t, nb_f16_widen)
NB_CAST(nb_cast_f32_to_bf16, uint16_t, float, nb_bf16_narrow)
NB_CAST(nb_cast_bf16_to_f32, float, uint16_t, nb_bf16_widen)

struct __attribute__((aligned(16))) unit {
    uint64_t low;
    uint64_t high;
};

// Copies in units of 16 or 4 bytes where both sides are aligned to them, else byte by byte.
NB_INLINE void copy_bytes(unsigned char *to, const unsigned char *from, uint64_t bytes) {
    const uint64_t both = (uint64_t)(uintptr_t)to | (uint64_t)(uintptr_t)from;
    const uint64_t size = both % sizeof(struct unit) == 0 ? sizeof(struct unit) : both % 4 == 0 ? 4 : 1;
    const uint64_t whole = bytes / size * size;
    NB_EACH(i, bytes / size) {
        unsigned char *t = to + i * size;
        const unsigned char *f = from + i * size;
        NB_IF_ALIGNED(size == sizeof(struct unit), *(struct unit *)t = *(const struct unit *)f; continue)
        NB_IF_ALIGNED(size == 4, *(uint32_t *)t = *(const uint32_t *)f; continue)
        memcpy(t, f, (size_t)size);
    }
    NB_EACH(i, bytes - whole) {
        to[whole + i] = from[whole + i];
    }
}

NB_KERNEL(nb_pack) {
    const struct nb_cuda_piece *list =
        (const struct nb_cuda_piece *)(const void *)NB_KERNEL_AT(from, count * sizeof(struct nb_cuda_piece));
    (void)factor;
    for (uint64_t p = NB_FIRST_Y; p < count; p += NB_STEP_Y) {
        copy_bytes(NB_KERNEL_AT(to + list[p].offset_bytes, list[p].bytes), NB_KERNEL_AT(list[p].address, list[p].bytes),
                   list[p].bytes);
    }
}

NB_KERNEL(nb_unpack) {
    const struct nb_cuda_piece *list =
        (const struct nb_cuda_piece *)(const void *)NB_KERNEL_AT(from, count * sizeof(struct nb_cuda_piece));
    (void)factor;
    for (uint64_t p = NB_FIRST_Y; p < count; p += NB_STEP_Y) {
        copy_bytes(NB_KERNEL_AT(list[p].address, list[p].bytes), NB_KERNEL_AT(to + list[p].offset_bytes, list[p].bytes),
                   list[p].bytes);
    }
}
