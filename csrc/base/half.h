// 16-bit floating point: conversions between float16, bfloat16 and float32, rounding to nearest even. They define the
// results of every kernel. They compile as C, and as CUDA for a GPU.
#ifndef NB_BASE_HALF_H
#define NB_BASE_HALF_H

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define NB_HALF static __device__ inline
#else
#define NB_HALF static inline
#endif

NB_HALF uint32_t nb_f32_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

NB_HALF float nb_f32_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

NB_HALF float nb_bf16_widen(uint16_t half) {
    return nb_f32_of_bits((uint32_t)half << 16);
}

// Makes a NaN quiet instead of rounding it: a carry could turn it into an infinity or a zero.
NB_HALF uint16_t nb_bf16_narrow(float value) {
    uint32_t bits = nb_f32_bits(value);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    uint32_t nan = bits >> 16 | 0x40;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

// The results of these two conversions do not depend on subnormal float32 values, which a thread may flush to zero.
NB_HALF float nb_f16_widen(uint16_t half) {
    const uint32_t smallest_normal = 113u << 23; // 2^-14, in float32
    uint32_t magnitude = half & 0x7fffu;
    uint32_t shifted = magnitude << 13;
    uint32_t normal = shifted + (112u << 23);
    uint32_t special = (shifted + (224u << 23)) | (magnitude > 0x7c00 ? 0x400000u : 0);
    uint32_t subnormal = nb_f32_bits(nb_f32_of_bits(smallest_normal + shifted) - nb_f32_of_bits(smallest_normal));
    uint32_t bits = magnitude < 0x400 ? subnormal : magnitude < 0x7c00 ? normal : special;
    return nb_f32_of_bits(bits | (half & 0x8000u) << 16);
}

NB_HALF uint16_t nb_f16_narrow(float value) {
    const uint32_t infinity = 0x7f800000;
    const uint32_t too_large = 0x477ff000;       // 65520: halfway between the largest half and the next step
    const uint32_t smallest_normal = 113u << 23; // 2^-14
    const uint32_t one_half = 126u << 23;        // its unit in the last place is that of a subnormal half
    uint32_t bits = nb_f32_bits(value);
    uint32_t magnitude = bits & 0x7fffffff;
    uint32_t nan = 0x7e00 | (magnitude >> 13 & 0x3ff);
    uint32_t special = magnitude > infinity ? nan : 0x7c00;
    uint32_t normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    float small = nb_f32_of_bits(magnitude < smallest_normal ? magnitude : 0);
    uint32_t subnormal = nb_f32_bits(small + nb_f32_of_bits(one_half)) - one_half;
    uint32_t half = magnitude < smallest_normal ? subnormal : magnitude < too_large ? normal : special;
    return (uint16_t)(half | (bits >> 16 & 0x8000));
}

#endif
