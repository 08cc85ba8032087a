// What do ranks exchange over the control connections while a job is set up? All through rank 0.
//
// Rank 0 finds out who is missing and tells the others, so that every rank names the same one.
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "base/bits.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/sock.h"
#include "bootstrap/bootstrap.h"
#include "bootstrap/internal.h"

enum frame_kind { FRAME_ALLGATHER = 1, FRAME_BARRIER, FRAME_PING, FRAME_PONG, FRAME_FAILED, FRAME_KINDS };

enum { EXCHANGES = 16, SLACK_MS = 2000, POLL_MOST_MS = 60000 };

static const int64_t MS = 1000000;

// Little-endian, before every payload.
struct frame {
    uint32_t kind;
    int32_t code;   // of a failure
    uint64_t value; // bytes that follow, or rank 0's clock
};

struct trouble {
    struct frame frame;
    int32_t peer;
    uint32_t zero;
    char text[NB_ERROR_TEXT];
};

_Static_assert(sizeof(struct frame) == 16, "frame");
_Static_assert(sizeof(struct trouble) == 16 + 8 + NB_ERROR_TEXT, "trouble");

static const char *kind_name(uint32_t kind) {
    static const char *const names[FRAME_KINDS] = {"?", "an all-gather", "a barrier", "clock", "clock", "a failure"};
    return kind < FRAME_KINDS ? names[kind] : names[0];
}

// What went wrong with a peer's connection, in terms of the peer.
static int fail_io(int rc, int peer, const struct nb_boot *boot, uint32_t kind, struct nb_error *err) {
    if (rc == -ETIMEDOUT) {
        return nb_fail_peer(err, NB_ETIMEOUT, peer, "%s: rank %d did not answer within %g s", kind_name(kind), peer,
                            boot->timeout_ms / 1000.0);
    }
    errno = -rc;
    return nb_fail_peer(err, NB_EPEER, peer, "%s: rank %d left: %m", kind_name(kind), peer);
}

static int check_frame(const struct frame *got, const struct frame *wanted, int peer, struct nb_error *err) {
    if (got->kind != wanted->kind) {
        return nb_fail_peer(err, NB_EMISMATCH, peer, "rank %d is at %s where this rank is at %s", peer,
                            kind_name(got->kind), kind_name(wanted->kind));
    }
    if (wanted->kind == FRAME_ALLGATHER && got->value != wanted->value) {
        return nb_fail_peer(err, NB_EMISMATCH, peer, "an all-gather of %llu bytes on rank %d, of %llu on this rank",
                            (unsigned long long)got->value, peer, (unsigned long long)wanted->value);
    }
    return 0;
}

// Rank 0 has failed: the others need not wait for their own deadline. Best effort.
static void tell_others(const struct nb_boot *boot, const struct nb_error *failure) {
    struct trouble trouble = {.frame = {FRAME_FAILED, failure->code, sizeof trouble - sizeof trouble.frame}};
    trouble.peer = failure->peer;
    memcpy(trouble.text, failure->text, sizeof trouble.text);
    for (int rank = 1; rank < boot->size; rank++) {
        (void)send(boot->control[rank], &trouble, sizeof trouble, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
}

// Reads rank 0's next frame. A failure that it reports becomes this rank's.
static int read_frame(const struct nb_boot *boot, const struct frame *wanted, struct frame *got, int64_t deadline_ns,
                      struct nb_error *err) {
    struct trouble trouble;
    int rc = nb_sock_read_all(boot->control[0], got, sizeof *got, deadline_ns);
    if (rc == 0 && got->kind == FRAME_FAILED && got->value == sizeof trouble - sizeof trouble.frame) {
        trouble.frame = *got;
        rc = nb_sock_read_all(boot->control[0], &trouble.peer, sizeof trouble - sizeof trouble.frame, deadline_ns);
        if (rc == 0 && trouble.frame.code < 0) {
            trouble.text[sizeof trouble.text - 1] = '\0';
            return nb_fail_peer(err, trouble.frame.code, trouble.peer, "%s", trouble.text);
        }
    }
    if (rc != 0) {
        return fail_io(rc, 0, boot, wanted->kind, err);
    }
    return check_frame(got, wanted, 0, err);
}

// What has come from one rank: the frame, then its bytes.
struct inbox {
    struct frame frame;
    size_t got;
};

// Takes what is there. 1: all of it has come.
static int take(const struct nb_boot *boot, int rank, struct inbox *inbox, const struct frame *wanted, char *out,
                struct nb_error *err) {
    size_t bytes = (size_t)wanted->value;
    size_t whole = sizeof inbox->frame + bytes;
    while (inbox->got < whole) {
        char *at = (char *)&inbox->frame + inbox->got;
        size_t left = sizeof inbox->frame - inbox->got;
        if (inbox->got >= sizeof inbox->frame) {
            at = out + (size_t)rank * bytes + (inbox->got - sizeof inbox->frame);
            left = whole - inbox->got;
        }
        ssize_t n = recv(boot->control[rank], at, left, 0);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
            return 0;
        }
        if (n <= 0) {
            return fail_io(n < 0 ? -errno : -ECONNRESET, rank, boot, wanted->kind, err);
        }
        inbox->got += (size_t)n;
        if (inbox->got == sizeof inbox->frame) {
            int rc = check_frame(&inbox->frame, wanted, rank, err);
            if (rc != 0) {
                return rc;
            }
        }
    }
    return 1;
}

static int fail_missing(const struct nb_boot *boot, const uint64_t *came, uint32_t kind, struct nb_error *err) {
    char ranks[NB_RANKS_TEXT];
    int first = nb_ranks_missing(came, boot->size, ranks);
    return nb_fail_peer(err, NB_ETIMEOUT, first, "%s: %s did not come within %g s", kind_name(kind), ranks,
                        boot->timeout_ms / 1000.0);
}

// One poll over those that have not given everything yet; returns how many have now, or a failure.
static int take_round(const struct nb_boot *boot, struct inbox *inboxes, struct pollfd *polled, uint64_t *came,
                      const struct frame *wanted, char *out, int64_t deadline_ns, struct nb_error *err) {
    int64_t left_ms = (deadline_ns - nb_now_ns() + MS - 1) / MS;
    int finished = 0;
    if (left_ms <= 0) {
        return fail_missing(boot, came, wanted->kind, err);
    }
    for (int rank = 1; rank < boot->size; rank++) {
        bool done = nb_bits_get(came, (size_t)rank);
        polled[rank] = (struct pollfd){.fd = done ? -1 : boot->control[rank], .events = POLLIN};
    }
    polled[0] = (struct pollfd){.fd = -1};
    int n = poll(polled, (nfds_t)boot->size, (int)(left_ms < POLL_MOST_MS ? left_ms : POLL_MOST_MS));
    if (n < 0) {
        return errno == EINTR ? 0 : nb_fail(err, -errno, "poll: %m");
    }
    for (int rank = 1; rank < boot->size; rank++) {
        int rc = polled[rank].revents != 0 ? take(boot, rank, &inboxes[rank], wanted, out, err) : 0;
        if (rc < 0) {
            return rc;
        }
        if (rc > 0) {
            nb_bits_set(came, (size_t)rank);
            finished++;
        }
    }
    return finished;
}

// Rank 0: everybody's bytes, each at its place in out.
static int collect(const struct nb_boot *boot, const struct frame *wanted, char *out, int64_t deadline_ns,
                   struct nb_error *err) {
    size_t size = (size_t)boot->size;
    struct inbox *inboxes = calloc(size, sizeof *inboxes);
    struct pollfd *polled = calloc(size, sizeof *polled);
    uint64_t *came = calloc(nb_bits_words(size), sizeof *came);
    int rc = 0;
    if (inboxes == NULL || polled == NULL || came == NULL) {
        rc = nb_fail(err, -ENOMEM, "memory for %d ranks", boot->size);
    } else {
        nb_bits_set(came, 0);
        for (int count = 1; count < boot->size && rc >= 0; count += rc) {
            rc = take_round(boot, inboxes, polled, came, wanted, out, deadline_ns, err);
        }
    }
    free(came);
    free(polled);
    free(inboxes);
    return rc < 0 ? rc : 0;
}

static int write_framed(const struct nb_boot *boot, int rank, const struct frame *frame, const void *payload,
                        size_t bytes, int64_t deadline_ns, struct nb_error *err) {
    int fd = boot->control[rank];
    int rc = nb_sock_write_all(fd, frame, sizeof *frame, deadline_ns);
    if (rc == 0) {
        rc = nb_sock_write_all(fd, payload, bytes, deadline_ns);
    }
    if (rc != 0) {
        (void)shutdown(fd, SHUT_RDWR); // cut within a message: what followed would be read as its rest
        return fail_io(rc, rank, boot, frame->kind, err);
    }
    return 0;
}

static int exchange_host(const struct nb_boot *boot, const struct frame *frame, char *out, struct nb_error *err) {
    int64_t deadline_ns = nb_now_ns() + boot->timeout_ms * MS;
    int rc = collect(boot, frame, out, deadline_ns, err);
    for (int rank = 1; rank < boot->size && rc == 0; rank++) {
        rc = write_framed(boot, rank, frame, out, (size_t)boot->size * frame->value, deadline_ns, err);
    }
    return rc;
}

// Rank 0 may have begun a little later, and is heard out before this rank blames it.
static int64_t guest_deadline(const struct nb_boot *boot) {
    return nb_now_ns() + (boot->timeout_ms + (int64_t)SLACK_MS) * MS;
}

static int exchange_guest(const struct nb_boot *boot, const struct frame *frame, const void *in, char *out,
                          struct nb_error *err) {
    int64_t deadline_ns = guest_deadline(boot);
    struct frame got;
    int rc = write_framed(boot, 0, frame, in, (size_t)frame->value, deadline_ns, err);
    if (rc == 0) {
        rc = read_frame(boot, frame, &got, deadline_ns, err);
    }
    if (rc != 0) {
        return rc;
    }
    rc = nb_sock_read_all(boot->control[0], out, (size_t)boot->size * (size_t)frame->value, deadline_ns);
    return rc == 0 ? 0 : fail_io(rc, 0, boot, frame->kind, err);
}

// The failure is rank 0's own and everybody's; err may hold an older one.
static int share_failure(const struct nb_boot *boot, const struct nb_error *failure, struct nb_error *err) {
    if (boot->rank == 0) {
        tell_others(boot, failure);
    }
    return nb_fail_peer(err, failure->code, failure->peer, "%s", failure->text);
}

static int exchange(const struct nb_boot *boot, enum frame_kind kind, const void *in, size_t bytes, char *out,
                    struct nb_error *err) {
    struct nb_error failure = {0};
    struct frame frame = {.kind = kind, .value = bytes};
    int rc = 0;
    if (boot->rank != 0) {
        rc = exchange_guest(boot, &frame, in, out, &failure);
    } else {
        if (bytes > 0) {
            memmove(out, in, bytes);
        }
        rc = exchange_host(boot, &frame, out, &failure);
    }
    return rc == 0 ? 0 : share_failure(boot, &failure, err);
}

int nb_boot_allgather(struct nb_boot *boot, const void *in, size_t bytes, void *out, struct nb_error *err) {
    if (bytes > NB_BOOT_BLOB_MAX) {
        return nb_fail(err, -EINVAL, "an all-gather of %zu bytes: %d are the most", bytes, NB_BOOT_BLOB_MAX);
    }
    return exchange(boot, FRAME_ALLGATHER, in, bytes, out, err);
}

int nb_boot_barrier(struct nb_boot *boot, struct nb_error *err) {
    return exchange(boot, FRAME_BARRIER, NULL, 0, NULL, err);
}

// Answers every ping of one rank with this clock, one rank after the other: no answer waits for another's.
static int serve_clock(const struct nb_boot *boot, int rank, int64_t deadline_ns, struct nb_error *err) {
    const struct frame wanted = {.kind = FRAME_PING};
    for (int i = 0; i < EXCHANGES; i++) {
        struct frame ping;
        int rc = nb_sock_read_all(boot->control[rank], &ping, sizeof ping, deadline_ns);
        if (rc != 0) {
            return fail_io(rc, rank, boot, FRAME_PING, err);
        }
        rc = check_frame(&ping, &wanted, rank, err);
        if (rc != 0) {
            return rc;
        }
        struct frame pong = {.kind = FRAME_PONG, .value = (uint64_t)nb_now_ns()};
        rc = write_framed(boot, rank, &pong, NULL, 0, deadline_ns, err);
        if (rc != 0) {
            return rc;
        }
    }
    return 0;
}

static int ask_clock(const struct nb_boot *boot, int64_t *offset_ns, int64_t *round_trip_ns, struct nb_error *err) {
    const struct frame ping = {.kind = FRAME_PING};
    const struct frame wanted = {.kind = FRAME_PONG};
    int64_t deadline_ns = guest_deadline(boot);
    int64_t offset = 0;
    int64_t least = INT64_MAX;
    for (int i = 0; i < EXCHANGES; i++) {
        struct frame pong;
        int64_t sent_ns = nb_now_ns();
        int rc = write_framed(boot, 0, &ping, NULL, 0, deadline_ns, err);
        if (rc == 0) {
            rc = read_frame(boot, &wanted, &pong, deadline_ns, err);
        }
        if (rc != 0) {
            return rc;
        }
        int64_t trip = nb_now_ns() - sent_ns;
        if (trip < least) {
            least = trip;
            offset = sent_ns + trip / 2 - (int64_t)pong.value;
        }
    }
    *offset_ns = offset;
    *round_trip_ns = least;
    return 0;
}

int nb_boot_clock(struct nb_boot *boot, int64_t *offset_ns, int64_t *round_trip_ns, struct nb_error *err) {
    struct nb_error failure = {0};
    int rc = 0;
    if (boot->rank != 0) {
        rc = ask_clock(boot, offset_ns, round_trip_ns, &failure);
    } else {
        int64_t deadline_ns = nb_now_ns() + boot->timeout_ms * MS;
        for (int rank = 1; rank < boot->size && rc == 0; rank++) {
            rc = serve_clock(boot, rank, deadline_ns, &failure);
        }
        if (rc == 0) {
            *offset_ns = 0;
            *round_trip_ns = 0;
        }
    }
    return rc == 0 ? 0 : share_failure(boot, &failure, err);
}
