// SHA-256 (FIPS 180-4), HMAC-SHA256 (RFC 2104), and random bytes from the kernel.
#ifndef NB_BASE_SHA256_H
#define NB_BASE_SHA256_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { NB_SHA256_BYTES = 32, NB_SHA256_BLOCK = 64 };

struct nb_sha256 {
    uint32_t state[8];
    uint64_t bytes;
    unsigned char block[NB_SHA256_BLOCK];
};

void nb_sha256_init(struct nb_sha256 *sha);
void nb_sha256_add(struct nb_sha256 *sha, const void *data, size_t bytes);
void nb_sha256_final(struct nb_sha256 *sha, unsigned char digest[NB_SHA256_BYTES]);

struct nb_hmac {
    struct nb_sha256 inner;
    struct nb_sha256 outer;
};

void nb_hmac_init(struct nb_hmac *mac, const void *key, size_t key_bytes);
void nb_hmac_add(struct nb_hmac *mac, const void *data, size_t bytes);
void nb_hmac_final(struct nb_hmac *mac, unsigned char digest[NB_SHA256_BYTES]);

// Compares in a time that does not depend on where the bytes differ.
bool nb_bytes_equal(const void *a, const void *b, size_t bytes);

// From getrandom(); 0 or -errno.
int nb_random(void *buf, size_t bytes);

#endif
