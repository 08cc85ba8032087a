// How is the first failure kept and put into words?
#include "base/error.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static void record(struct nb_error *err, int code, int peer, const char *fmt, va_list args) {
    err->code = code;
    err->peer = peer;
    (void)vsnprintf(err->text, sizeof err->text, fmt, args);
}

int nb_fail(struct nb_error *err, int code, const char *fmt, ...) {
    int saved = errno;
    if (err != NULL && err->code == 0) {
        va_list args;
        va_start(args, fmt);
        errno = saved;
        record(err, code, NB_NO_PEER, fmt, args);
        va_end(args);
    }
    errno = saved;
    return code;
}

int nb_fail_peer(struct nb_error *err, int code, int peer, const char *fmt, ...) {
    int saved = errno;
    if (err != NULL && err->code == 0) {
        va_list args;
        va_start(args, fmt);
        errno = saved;
        record(err, code, peer, fmt, args);
        va_end(args);
    }
    errno = saved;
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
