// Handshake: fills in the messages of a join (base/wire.h), and computes their proofs.
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/error.h"
#include "base/sha256.h"
#include "base/wire.h"
#include "bootstrap/bootstrap.h"
#include "bootstrap/internal.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the messages are sent as they lie in memory");

// The label includes its terminator, so that no label is a prefix of another.
static void mac_of(const struct nb_shake *shake, const struct nb_boot_config *config, const char *label,
                   const void *more, size_t more_bytes, unsigned char mac[NB_SHA256_BYTES]) {
    struct nb_hmac hmac;
    nb_hmac_init(&hmac, config->secret, config->secret_bytes);
    nb_hmac_add(&hmac, label, strlen(label) + 1);
    nb_hmac_add(&hmac, &shake->hello, sizeof shake->hello);
    nb_hmac_add(&hmac, &shake->challenge, sizeof shake->challenge);
    nb_hmac_add(&hmac, more, more_bytes);
    nb_hmac_final(&hmac, mac);
}

static int draw(unsigned char nonce[NB_SHA256_BYTES], struct nb_error *err) {
    int rc = nb_random(nonce, NB_SHA256_BYTES);
    if (rc != 0) {
        errno = -rc;
        return nb_fail(err, rc, "getrandom: %m");
    }
    return 0;
}

int nb_shake_hello(struct nb_shake *shake, const struct nb_boot_config *config, struct nb_error *err) {
    const char *tag = config->tag != NULL ? config->tag : "";
    struct wire_join_hello *hello = &shake->hello;
    memset(hello, 0, sizeof *hello);
    memcpy(hello->magic, NB_WIRE_JOIN_MAGIC, sizeof hello->magic);
    hello->version = NB_WIRE_JOIN_VERSION;
    hello->rank = (uint32_t)config->rank;
    hello->size = (uint32_t)config->size;
    hello->tag_bytes = (uint32_t)strnlen(tag, sizeof hello->tag);
    memcpy(hello->tag, tag, hello->tag_bytes);
    return draw(hello->nonce, err);
}

int nb_shake_challenge(struct nb_shake *shake, struct nb_error *err) {
    struct wire_join_challenge *challenge = &shake->challenge;
    memset(challenge, 0, sizeof *challenge);
    memcpy(challenge->magic, NB_WIRE_JOIN_MAGIC, sizeof challenge->magic);
    challenge->version = NB_WIRE_JOIN_VERSION;
    return draw(challenge->nonce, err);
}

void nb_shake_proof(const struct nb_shake *shake, const struct nb_boot_config *config, struct wire_join_proof *proof) {
    mac_of(shake, config, "client", NULL, 0, proof->mac);
}

void nb_shake_answer(const struct nb_shake *shake, const struct nb_boot_config *config,
                     struct wire_join_answer *answer) {
    mac_of(shake, config, "server", answer, offsetof(struct wire_join_answer, mac), answer->mac);
}

void nb_shake_verdict(const struct nb_shake *shake, const struct nb_boot_config *config,
                      struct wire_join_verdict *verdict) {
    mac_of(shake, config, "verdict", verdict, offsetof(struct wire_join_verdict, mac), verdict->mac);
}

void nb_shake_session(const struct nb_boot_config *config, const unsigned char salt[NB_SHA256_BYTES],
                      unsigned char session[NB_SHA256_BYTES]) {
    static const char label[] = "session";
    struct nb_hmac hmac;
    nb_hmac_init(&hmac, config->secret, config->secret_bytes);
    nb_hmac_add(&hmac, label, sizeof label);
    nb_hmac_add(&hmac, salt, NB_SHA256_BYTES);
    nb_hmac_final(&hmac, session);
}
