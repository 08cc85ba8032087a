// Join internals: the two sides of a join, and the proofs of its messages (base/wire.h).
#ifndef NB_BOOTSTRAP_INTERNAL_H
#define NB_BOOTSTRAP_INTERNAL_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/sha256.h"
#include "base/wire.h"
#include "bootstrap/bootstrap.h"

// The remedy of a rank 0 that listens at an address which other hosts do not reach.
#define NB_ELSEWHERE "set NETBOTTLENECK_IFNAME, or NETBOTTLENECK_MASTER, to one of rank 0 that all hosts reach"

enum { NB_BOOT_GRACE_MS = 5000 }; // how long a failed join reports the reason to late ranks

// The data that both sides of a connection share; every proof covers it.
struct nb_shake {
    struct wire_join_hello hello;
    struct wire_join_challenge challenge;
};

int nb_shake_hello(struct nb_shake *shake, const struct nb_boot_config *config, struct nb_error *err);
int nb_shake_challenge(struct nb_shake *shake, struct nb_error *err);
void nb_shake_proof(const struct nb_shake *shake, const struct nb_boot_config *config, struct wire_join_proof *proof);
void nb_shake_answer(const struct nb_shake *shake, const struct nb_boot_config *config,
                     struct wire_join_answer *answer);
void nb_shake_verdict(const struct nb_shake *shake, const struct nb_boot_config *config,
                      struct wire_join_verdict *verdict);
void nb_shake_session(const struct nb_boot_config *config, const unsigned char salt[NB_SHA256_BYTES],
                      unsigned char session[NB_SHA256_BYTES]);

// join_server.c, join_client.c: the two sides of a join. They set control, self and session of `boot`; the caller has
// set the rest.
int nb_join_server(struct nb_boot *boot, const struct nb_boot_config *config, const struct nb_listener *listener,
                   struct nb_error *err);
int nb_join_client(struct nb_boot *boot, const struct nb_boot_config *config, const char *address,
                   struct nb_error *err);

#endif
