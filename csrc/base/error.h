// Errors: the codes that every function returns, and the record that carries the first failure up to the user.
#ifndef NB_BASE_ERROR_H
#define NB_BASE_ERROR_H

#include <stdint.h>

// A function returns 0 or a count on success, else -errno or one of these. -EAGAIN is not a failure.
enum nb_code {
    NB_EPEER = -2001,     // a peer died or left in the middle of an operation
    NB_EWIRE = -2002,     // a peer sent what the protocol does not allow
    NB_EAUTH = -2003,     // a peer does not know the job's secret
    NB_ETIMEOUT = -2004,  // a peer was silent, or granted bytes did not move, past the deadline
    NB_EMISMATCH = -2005, // ranks submitted different things under one name; the job goes on
    NB_ECLOSED = -2006,   // the job was shut down while the operation waited
    NB_ENOLIB = -2007     // a requested library is missing
};

enum { NB_ERROR_TEXT = 480, NB_NO_PEER = -1 };

// The first failure. Zeroed memory is a valid empty record.
struct nb_error {
    int code;
    int peer; // rank of the peer at fault, NB_NO_PEER if unknown
    char text[NB_ERROR_TEXT];
};

// Records a failure unless the record already holds one. Returns `code`. "%m" is the text of errno.
int nb_fail(struct nb_error *err, int code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

// As nb_fail, and names the peer at fault.
int nb_fail_peer(struct nb_error *err, int code, int peer, const char *fmt, ...) __attribute__((format(printf, 4, 5)));

// A short name for a code: "peer lost", "timed out", or strerror's text.
const char *nb_code_name(int code);

// A remedy, to follow the name of a code: ": see `ulimit -n`", or "" if none is known.
const char *nb_code_remedy(int code);

// "rank 2 of 8", "ranks 2, 5 of 8": the ranks whose bit in `came` is not set. Returns the first of them, or NB_NO_PEER.
enum { NB_RANKS_TEXT = 160 };
int nb_ranks_missing(const uint64_t *came, int size, char text[NB_RANKS_TEXT]);

#endif
