// Bootstrap: joins the ranks of a job. Every rank connects to rank 0, and both sides prove that they know the job's
// secret. The connection stays open and becomes the rank's control connection. Blocking, on the caller's thread, with a
// deadline.
#ifndef NB_BOOTSTRAP_H
#define NB_BOOTSTRAP_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/sha256.h"
#include "base/sock.h"
#include "base/wire.h"

struct nb_interrupt;

enum { NB_SECRET_MAX = 128, NB_BOOT_BLOB_MAX = 64 * 1024 };

struct nb_boot_config {
    int rank;
    int size;
    int timeout_ms;
    const char *ifname;          // NCCL_SOCKET_IFNAME's syntax; NULL: chosen automatically
    struct nb_port_range ports;  // of rank 0's listener
    const unsigned char *secret; // required, at least 16 bytes
    size_t secret_bytes;
    const char *tag; // what all ranks must agree on ("version/transport/provider/…"); differences are named
    // Ends waits of the join and of nb_boot with -EINTR; valid as long as these. NULL: none.
    struct nb_interrupt *interrupt;
};

// Rank 0's listener.
struct nb_listener {
    int fd;
    struct nb_sockaddr addr;
};

struct nb_boot {
    int rank;
    int size;
    int timeout_ms;
    struct nb_interrupt *interrupt;
    int *control;              // rank 0: one descriptor per rank (control[0] = -1); others: control[0] only
    struct nb_sockaddr self;   // the local address of the control connection: the interface that reaches rank 0
    unsigned char session[32]; // random, chosen by rank 0, known to all ranks that joined; the key of every later token
};

// Listens on the chosen interface (`address`, without port; if NULL, by config->ifname) and sets listener->addr.
int nb_listener_open(struct nb_listener *listener, const struct nb_boot_config *config, const char *address,
                     struct nb_error *err);
void nb_listener_close(struct nb_listener *listener);

// Joins the job. Rank 0 passes its listener (which stays open) and address NULL; the others pass the address. A
// connection that does not prove the secret in time is dropped (base/admission.h), and the join continues. Errors:
// -ETIMEDOUT naming the missing ranks; NB_EAUTH; NB_EMISMATCH naming both tags and ranks; two processes that claim one
// rank; a rank outside [0, size); -EINTR if interrupted, in this call or a later one that waits. To the other ranks an
// interrupted rank has left.
int nb_boot_join(struct nb_boot *boot, const struct nb_boot_config *config, struct nb_listener *listener,
                 const char *address, struct nb_error *err);
void nb_boot_close(struct nb_boot *boot);

// All-gather: every rank passes `bytes`; out receives size × bytes, by rank. All ranks make all calls in the same
// order.
int nb_boot_allgather(struct nb_boot *boot, const void *in, size_t bytes, void *out, struct nb_error *err);
int nb_boot_barrier(struct nb_boot *boot, struct nb_error *err);
// Barrier that all ranks also reach if their part of the work failed (rc, and err): then no rank passes it, and all get
// the failure that rank 0 learned of first. A failure that names no rank is this rank's own, and stays. A rank that
// failed waits 2 s at most.
int nb_boot_agree(struct nb_boot *boot, int rc, struct nb_error *err);

// Measures this rank's clock minus rank 0's, in ns, from the exchange with the shortest round trip of several.
int nb_boot_clock(struct nb_boot *boot, int64_t *offset_ns, int64_t *round_trip_ns, struct nb_error *err);

// HMAC, keyed by the session, over `purpose` with its terminator and the bytes: proves this rank to another.
void nb_boot_mac(const struct nb_boot *boot, const char *purpose, const void *data, size_t bytes,
                 unsigned char mac[NB_SHA256_BYTES]);

// Computes a 16-byte token that both sides know: HMAC(session, "purpose" | from | to).
void nb_boot_token(const struct nb_boot *boot, const char *purpose, int from, int to,
                   unsigned char token[NB_TOKEN_BYTES]);

#endif
