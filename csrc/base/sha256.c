// SHA-256, HMAC-SHA256 and random bytes: how one rank proves to another that it knows the job's secret.
#include "base/sha256.h"

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/random.h>
#include <sys/types.h>

static const uint32_t start[8] = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
};

static const uint32_t constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static uint32_t rotate(uint32_t x, int n) {
    return x >> n | x << (32 - n);
}

static uint32_t load_be(const unsigned char *at) {
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static void store_be(unsigned char *at, uint32_t x) {
    at[0] = (unsigned char)(x >> 24);
    at[1] = (unsigned char)(x >> 16);
    at[2] = (unsigned char)(x >> 8);
    at[3] = (unsigned char)x;
}

// One round of FIPS 180-4, 6.2.2. Working variable x of a…h is s[(x - i) mod 8]: the values stay in place, and the
// names rotate.
static inline void round_one(uint32_t s[8], uint32_t w, int i) {
    uint32_t a = s[(8 - i) & 7];
    uint32_t b = s[(9 - i) & 7];
    uint32_t c = s[(10 - i) & 7];
    uint32_t e = s[(12 - i) & 7];
    uint32_t f = s[(13 - i) & 7];
    uint32_t g = s[(14 - i) & 7];
    uint32_t t1 = s[(15 - i) & 7] + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) + (g ^ (e & (f ^ g))) + w;
    s[(11 - i) & 7] += t1;
    s[(15 - i) & 7] = t1 + (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + ((a & b) | (c & (a | b)));
}

static void compress(uint32_t state[8], const unsigned char *block) {
    uint32_t w[64];
    uint32_t s[8];
    for (int i = 0; i < 16; i++) {
        w[i] = load_be(block + (size_t)4 * i);
    }
    for (int i = 16; i < 64; i++) {
        uint32_t sigma0 = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3;
        uint32_t sigma1 = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10;
        w[i] = w[i - 16] + sigma0 + w[i - 7] + sigma1;
    }
    memcpy(s, state, sizeof s);
    for (int i = 0; i < 64; i += 8) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            round_one(s, constants[i + j] + w[i + j], j);
        }
    }
    for (int i = 0; i < 8; i++) {
        state[i] += s[i];
    }
}

void nb_sha256_init(struct nb_sha256 *sha) {
    memcpy(sha->state, start, sizeof sha->state);
    sha->bytes = 0;
}

void nb_sha256_add(struct nb_sha256 *sha, const void *data, size_t bytes) {
    const unsigned char *at = data;
    while (bytes > 0) {
        size_t used = sha->bytes % NB_SHA256_BLOCK;
        size_t n = bytes < NB_SHA256_BLOCK - used ? bytes : NB_SHA256_BLOCK - used;
        memcpy(sha->block + used, at, n);
        sha->bytes += n;
        at += n;
        bytes -= n;
        if (used + n == NB_SHA256_BLOCK) {
            compress(sha->state, sha->block);
        }
    }
}

void nb_sha256_final(struct nb_sha256 *sha, unsigned char digest[NB_SHA256_BYTES]) {
    static const unsigned char padding[NB_SHA256_BLOCK] = {0x80};
    uint64_t bits = sha->bytes * 8;
    unsigned char length[8];
    store_be(length, (uint32_t)(bits >> 32));
    store_be(length + 4, (uint32_t)bits);
    size_t used = sha->bytes % NB_SHA256_BLOCK;
    nb_sha256_add(sha, padding, (used < 56 ? 56 : 56 + NB_SHA256_BLOCK) - used);
    nb_sha256_add(sha, length, sizeof length);
    for (int i = 0; i < 8; i++) {
        store_be(digest + (size_t)4 * i, sha->state[i]);
    }
}

void nb_hmac_init(struct nb_hmac *mac, const void *key, size_t key_bytes) {
    unsigned char padded[NB_SHA256_BLOCK] = {0};
    if (key_bytes > sizeof padded) {
        nb_sha256_init(&mac->inner);
        nb_sha256_add(&mac->inner, key, key_bytes);
        nb_sha256_final(&mac->inner, padded);
    } else {
        memcpy(padded, key, key_bytes);
    }
    for (size_t i = 0; i < sizeof padded; i++) {
        padded[i] ^= 0x36;
    }
    nb_sha256_init(&mac->inner);
    nb_sha256_add(&mac->inner, padded, sizeof padded);
    for (size_t i = 0; i < sizeof padded; i++) {
        padded[i] ^= 0x36 ^ 0x5c;
    }
    nb_sha256_init(&mac->outer);
    nb_sha256_add(&mac->outer, padded, sizeof padded);
    explicit_bzero(padded, sizeof padded);
}

void nb_hmac_add(struct nb_hmac *mac, const void *data, size_t bytes) {
    nb_sha256_add(&mac->inner, data, bytes);
}

void nb_hmac_final(struct nb_hmac *mac, unsigned char digest[NB_SHA256_BYTES]) {
    nb_sha256_final(&mac->inner, digest);
    nb_sha256_add(&mac->outer, digest, NB_SHA256_BYTES);
    nb_sha256_final(&mac->outer, digest);
}

bool nb_bytes_equal(const void *a, const void *b, size_t bytes) {
    const volatile unsigned char *x = a;
    const volatile unsigned char *y = b;
    unsigned char differ = 0;
    for (size_t i = 0; i < bytes; i++) {
        differ |= (unsigned char)(x[i] ^ y[i]);
    }
    return differ == 0;
}

int nb_random(void *buf, size_t bytes) {
    unsigned char *at = buf;
    while (bytes > 0) {
        ssize_t n = getrandom(at, bytes, 0);
        if (n < 0 && errno != EINTR) {
            return -errno;
        }
        if (n > 0) {
            at += n;
            bytes -= (size_t)n;
        }
    }
    return 0;
}
