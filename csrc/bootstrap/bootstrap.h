// How ranks find each other: every rank connects to rank 0, both sides prove that they know the job's secret, and the
// connection stays: it becomes the control connection of that rank. Blocking, on the caller's thread, with a deadline.
#ifndef NB_BOOTSTRAP_H
#define NB_BOOTSTRAP_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/sha256.h"
#include "base/sock.h"

enum { NB_SECRET_MAX = 128, NB_BOOT_BLOB_MAX = 64 * 1024 };

struct nb_boot_config {
    int rank;
    int size;
    int timeout_ms;
    const char *ifname;          // NCCL_SOCKET_IFNAME's syntax; NULL: by itself
    struct nb_port_range ports;  // of rank 0's listener
    const unsigned char *secret; // required, at least 16 bytes
    size_t secret_bytes;
    const char *tag; // what all ranks must agree on ("version/transport/provider/…"); differences are named
};

// Rank 0's door.
struct nb_listener {
    int fd;
    struct nb_sockaddr addr;
};

struct nb_boot {
    int rank;
    int size;
    int timeout_ms;
    int *control;              // rank 0: one descriptor per rank (control[0] = -1); others: control[0] only
    struct nb_sockaddr self;   // the local address of the control connection: the interface that reaches rank 0
    unsigned char session[32]; // drawn by rank 0, known to all ranks that joined: the root of every later token
};

// Listens on the chosen interface (`address`, without port, where not NULL; else by config->ifname) and says where.
int nb_listener_open(struct nb_listener *listener, const struct nb_boot_config *config, const char *address,
                     struct nb_error *err);
void nb_listener_close(struct nb_listener *listener);

// Rank 0 gives its listener (which stays open) and address NULL; the others the address. A connection that does not
// prove the secret in time is dropped (base/admission.h), and the join goes on.
// Errors: -ETIMEDOUT naming the ranks that are missing; NB_EAUTH; NB_EMISMATCH naming both tags and ranks; two
// processes that claim one rank; a rank outside [0, size).
int nb_boot_join(struct nb_boot *boot, const struct nb_boot_config *config, struct nb_listener *listener,
                 const char *address, struct nb_error *err);
void nb_boot_close(struct nb_boot *boot);

// Every rank gives `bytes`; out gets size × bytes, by rank. Every call on every rank in the same order.
int nb_boot_allgather(struct nb_boot *boot, const void *in, size_t bytes, void *out, struct nb_error *err);
int nb_boot_barrier(struct nb_boot *boot, struct nb_error *err);

// This rank's clock minus rank 0's, in ns, by the exchange with the least round trip of several.
int nb_boot_clock(struct nb_boot *boot, int64_t *offset_ns, int64_t *round_trip_ns, struct nb_error *err);

// HMAC with the session as key over `purpose`, its terminator included, and the bytes: what one rank proves to another.
void nb_boot_mac(const struct nb_boot *boot, const char *purpose, const void *data, size_t bytes,
                 unsigned char mac[NB_SHA256_BYTES]);

// A 16-byte token both sides can compute: HMAC(session, "purpose" | from | to).
enum { NB_TOKEN_BYTES = 16 };
void nb_boot_token(const struct nb_boot *boot, const char *purpose, int from, int to,
                   unsigned char token[NB_TOKEN_BYTES]);

#endif
