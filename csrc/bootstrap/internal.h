// What the files of this room share: the messages of a join, their proofs, and words about ranks.
//
// hello ->, <- challenge, proof ->, <- answer, and when everybody has come (or somebody cannot): <- verdict.
// All are of fixed size and little-endian. Each proof is an HMAC with the secret over a label, the hello, the
// challenge, and what else the message says, so none can be replayed, reflected or altered.
#ifndef NB_BOOTSTRAP_INTERNAL_H
#define NB_BOOTSTRAP_INTERNAL_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/sha256.h"
#include "bootstrap/bootstrap.h"

enum {
    NB_BOOT_PROTOCOL = 1,
    NB_BOOT_TAG_MAX = 256,
    NB_BOOT_MAGIC_BYTES = 8,
    NB_BOOT_GRACE_MS = 5000 // how long latecomers are told why a join failed
};
#define NB_BOOT_MAGIC "NBBOOT\r\n"

struct nb_hello {
    char magic[NB_BOOT_MAGIC_BYTES];
    uint32_t version; // the first 12 bytes are the same in every version
    uint32_t rank;
    uint32_t size;
    uint32_t tag_bytes;
    unsigned char nonce[NB_SHA256_BYTES];
    char tag[NB_BOOT_TAG_MAX]; // not terminated; zero after tag_bytes
};

struct nb_challenge {
    char magic[NB_BOOT_MAGIC_BYTES];
    uint32_t version;
    uint32_t zero;
    unsigned char nonce[NB_SHA256_BYTES];
};

struct nb_proof {
    unsigned char mac[NB_SHA256_BYTES];
};

struct nb_answer {
    uint32_t left_ms; // until rank 0 gives its verdict at the latest
    uint32_t zero;
    unsigned char mac[NB_SHA256_BYTES]; // all zero: the proof was wrong
};

struct nb_verdict {
    int32_t code; // 0: everybody has come
    int32_t peer;
    unsigned char salt[NB_SHA256_BYTES]; // from which the session follows; zero where code is not
    char text[NB_ERROR_TEXT];
    unsigned char mac[NB_SHA256_BYTES];
};

_Static_assert(sizeof(struct nb_hello) == 312, "hello");
_Static_assert(sizeof(struct nb_challenge) == 48, "challenge");
_Static_assert(sizeof(struct nb_proof) == 32, "proof");
_Static_assert(sizeof(struct nb_answer) == 40, "answer");
_Static_assert(sizeof(struct nb_verdict) == 8 + 32 + NB_ERROR_TEXT + 32, "verdict");

// What both sides of one connection know: every proof is over this.
struct nb_shake {
    struct nb_hello hello;
    struct nb_challenge challenge;
};

int nb_shake_hello(struct nb_shake *shake, const struct nb_boot_config *config, struct nb_error *err);
int nb_shake_challenge(struct nb_shake *shake, struct nb_error *err);
void nb_shake_proof(const struct nb_shake *shake, const struct nb_boot_config *config, struct nb_proof *proof);
void nb_shake_answer(const struct nb_shake *shake, const struct nb_boot_config *config, struct nb_answer *answer);
void nb_shake_verdict(const struct nb_shake *shake, const struct nb_boot_config *config, struct nb_verdict *verdict);
void nb_shake_session(const struct nb_boot_config *config, const unsigned char salt[NB_SHA256_BYTES],
                      unsigned char session[NB_SHA256_BYTES]);

// The two sides of a join. They fill boot->control, self and session of a boot that is otherwise set.
int nb_join_host(struct nb_boot *boot, const struct nb_boot_config *config, const struct nb_listener *listener,
                 struct nb_error *err);
int nb_join_guest(struct nb_boot *boot, const struct nb_boot_config *config, const char *address, struct nb_error *err);

// "rank 2 of 8", "ranks 2, 5 of 8": those whose bit is not set in `came`. Returns the first of them, or NB_NO_PEER.
enum { NB_RANKS_TEXT = 160 };
int nb_ranks_missing(const uint64_t *came, int size, char text[NB_RANKS_TEXT]);

#endif
