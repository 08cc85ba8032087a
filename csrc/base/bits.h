// Bitmap over 64-bit words.
#ifndef NB_BASE_BITS_H
#define NB_BASE_BITS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

static inline size_t nb_bits_words(size_t bits) {
    return (bits + 63) / 64;
}

static inline bool nb_bits_get(const uint64_t *map, size_t i) {
    return (map[i / 64] >> (i % 64)) & 1;
}

static inline void nb_bits_set(uint64_t *map, size_t i) {
    map[i / 64] |= (uint64_t)1 << (i % 64);
}

static inline void nb_bits_clear(uint64_t *map, size_t i) {
    map[i / 64] &= ~((uint64_t)1 << (i % 64));
}

static inline uint32_t nb_bits_count(const uint64_t *map, size_t bits) {
    uint32_t n = 0;
    for (size_t w = 0; w < nb_bits_words(bits); w++) {
        n += (uint32_t)__builtin_popcountll(map[w]);
    }
    return n;
}

// The first set bit in [from, bits), or `bits`.
static inline size_t nb_bits_next(const uint64_t *map, size_t from, size_t bits) {
    if (from >= bits) {
        return bits;
    }
    size_t w = from / 64;
    uint64_t word = map[w] & (~(uint64_t)0 << (from % 64));
    while (word == 0) {
        if (++w >= nb_bits_words(bits)) {
            return bits;
        }
        word = map[w];
    }
    size_t i = w * 64 + (size_t)__builtin_ctzll(word);
    return i < bits ? i : bits;
}

#endif
