// Errors: records the first failure, and names codes and ranks.
#include "base/error.h"

#include <errno.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "base/bits.h"

// Records a failure unless `err` is NULL or already holds one. Keeps errno.
static void record(struct nb_error *err, int code, int peer, const char *fmt, va_list args) {
    int saved = errno;
    if (err != NULL && err->code == 0) {
        err->code = code;
        err->peer = peer;
        (void)vsnprintf(err->text, sizeof err->text, fmt, args);
    }
    errno = saved;
}

int nb_fail(struct nb_error *err, int code, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    record(err, code, NB_NO_PEER, fmt, args);
    va_end(args);
    return code;
}

int nb_fail_peer(struct nb_error *err, int code, int peer, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    record(err, code, peer, fmt, args);
    va_end(args);
    return code;
}

const char *nb_code_name(int code) {
    switch (code) {
    case 0:
        return "success";
    case NB_EPEER:
        return "peer lost";
    case NB_EWIRE:
        return "protocol violated";
    case NB_EAUTH:
        return "not authenticated";
    case NB_ETIMEOUT:
        return "timed out";
    case NB_EMISMATCH:
        return "ranks disagree";
    case NB_ECLOSED:
        return "closed";
    case NB_ENOLIB:
        return "library missing";
    default:
        return strerror(code < 0 ? -code : code); // NOLINT(concurrency-mt-unsafe): a constant text for known codes
    }
}

const char *nb_code_remedy(int code) {
    return code == -EMFILE ? ": see `ulimit -n`" : "";
}

int nb_ranks_missing(const uint64_t *came, int size, char text[NB_RANKS_TEXT]) {
    int first = NB_NO_PEER;
    int count = 0;
    size_t used = 0;
    char list[NB_RANKS_TEXT - 40] = "";
    for (int rank = 0; rank < size; rank++) {
        if (nb_bits_get(came, (size_t)rank)) {
            continue;
        }
        first = count == 0 ? rank : first;
        count++;
        if (used + 16 < sizeof list) {
            used += (size_t)snprintf(list + used, sizeof list - used, "%s%d", count > 1 ? ", " : "", rank);
        } else if (used + 5 < sizeof list) {
            used += (size_t)snprintf(list + used, sizeof list - used, ", …");
        }
    }
    (void)snprintf(text, NB_RANKS_TEXT, "%s %s of %d", count == 1 ? "rank" : "ranks", list, size);
    return first;
}
