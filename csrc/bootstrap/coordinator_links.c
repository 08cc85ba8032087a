// Coordinator links: exchanges over the control connections during setup: all-gather, barrier, clock. All go through
// rank 0.
//
// Rank 0 determines which ranks are missing and tells the others, so that every rank names the same one.
#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>

#include "base/bits.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/interrupt.h"
#include "base/sock.h"
#include "base/wire.h"
#include "bootstrap/bootstrap.h"

enum { EXCHANGES = 16, SLACK_MS = 7000 };

static const int64_t MS = 1000000;
static const uint64_t CLOCK_MAX_NS = INT64_MAX / 4; // differences of two clocks, and sums of those, do not overflow

static const char *kind_name(uint32_t kind) {
    static const char *const names[NB_WIRE_EXCHANGE_KINDS] = {"?",     "an all-gather", "a barrier",
                                                              "clock", "clock",         "a failure"};
    return kind < NB_WIRE_EXCHANGE_KINDS ? names[kind] : names[0];
}

// One exchange on this rank: the frame that every rank sends, and where failures are recorded.
struct talk {
    const struct nb_boot *boot;
    struct wire_exchange frame;
    int64_t deadline_ns;
    struct nb_error *err;
};

static struct talk talk_begin(const struct nb_boot *boot, enum wire_exchange_kind kind, size_t bytes,
                              struct nb_error *err) {
    // Rank 0 may begin later, by as long as ranks of its host wait for each other (shared_open.c, 5 s). Its report must
    // arrive before this rank gives up.
    int64_t limit_ms = boot->timeout_ms + (int64_t)(boot->rank == 0 ? 0 : SLACK_MS);
    return (struct talk){boot, {.kind = kind, .value = bytes}, nb_now_ns() + limit_ms * MS, err};
}

static int fail_io(const struct talk *talk, int rc, int peer) {
    const char *what = kind_name(talk->frame.kind);
    if (rc == -ETIMEDOUT) {
        return nb_fail_peer(talk->err, NB_ETIMEOUT, peer, "%s: rank %d did not answer within %g s", what, peer,
                            talk->boot->timeout_ms / 1000.0);
    }
    if (rc == -EINTR) {
        return nb_fail(talk->err, rc, "%s: this rank was interrupted", what);
    }
    errno = -rc;
    return nb_fail_peer(talk->err, NB_EPEER, peer, "%s: rank %d left: %m", what, peer);
}

static int fail_missing(const struct talk *talk, const uint64_t *came) {
    char ranks[NB_RANKS_TEXT];
    int first = nb_ranks_missing(came, talk->boot->size, ranks);
    return nb_fail_peer(talk->err, NB_ETIMEOUT, first, "%s: %s did not arrive within %g s", kind_name(talk->frame.kind),
                        ranks, talk->boot->timeout_ms / 1000.0);
}

static int check_frame(const struct talk *talk, const struct wire_exchange *got, int peer) {
    const struct wire_exchange *wanted = &talk->frame;
    if (got->kind != wanted->kind) {
        return nb_fail_peer(talk->err, NB_EMISMATCH, peer, "rank %d is in %s while this rank is in %s", peer,
                            kind_name(got->kind), kind_name(wanted->kind));
    }
    if (wanted->kind == NB_WIRE_ALLGATHER && got->value != wanted->value) {
        return nb_fail_peer(talk->err, NB_EMISMATCH, peer,
                            "an all-gather of %llu bytes on rank %d, of %llu on this rank",
                            (unsigned long long)got->value, peer, (unsigned long long)wanted->value);
    }
    if (wanted->kind == NB_WIRE_PONG && got->value > CLOCK_MAX_NS) {
        return nb_fail_peer(talk->err, NB_EMISMATCH, peer, "rank %d's clock reads %llu ns: out of range", peer,
                            (unsigned long long)got->value);
    }
    return 0;
}

static int write_framed(const struct talk *talk, int rank, const void *payload, size_t bytes) {
    int fd = talk->boot->control[rank];
    struct nb_interrupt *interrupt = talk->boot->interrupt;
    int rc = nb_sock_write_all(fd, &talk->frame, sizeof talk->frame, talk->deadline_ns, interrupt);
    if (rc == 0) {
        rc = nb_sock_write_all(fd, payload, bytes, talk->deadline_ns, interrupt);
    }
    if (rc != 0) {
        (void)shutdown(fd, SHUT_WR); // the message is incomplete: a later one would be read as its rest
    }
    return rc;
}

// Reads rank 0's next frame. A failure that it reports becomes this rank's.
static int read_frame(const struct talk *talk, struct wire_exchange *got) {
    struct wire_exchange_failure trouble;
    int fd = talk->boot->control[0];
    struct nb_interrupt *interrupt = talk->boot->interrupt;
    size_t rest = sizeof trouble - sizeof trouble.frame;
    int rc = nb_sock_read_all(fd, got, sizeof *got, talk->deadline_ns, interrupt);
    if (rc == 0 && got->kind == NB_WIRE_FAILED && got->code < 0 && got->value == rest) {
        rc = nb_sock_read_all(fd, (char *)&trouble + sizeof trouble.frame, rest, talk->deadline_ns, interrupt);
        if (rc == 0) {
            trouble.text[sizeof trouble.text - 1] = '\0';
            return nb_fail_peer(talk->err, got->code, trouble.peer, "%s", trouble.text);
        }
    }
    return rc == 0 ? check_frame(talk, got, 0) : fail_io(talk, rc, 0);
}

// Reports rank 0's failure, so that the others need not wait for their own deadline. Best effort.
static void tell_others(const struct nb_boot *boot, const struct nb_error *failure) {
    struct wire_exchange_failure trouble = {
        .frame = {NB_WIRE_FAILED, failure->code, sizeof trouble - sizeof trouble.frame}};
    trouble.peer = failure->peer;
    memcpy(trouble.text, failure->text, sizeof trouble.text);
    for (int rank = 1; rank < boot->size; rank++) {
        (void)send(boot->control[rank], &trouble, sizeof trouble, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
}

// Records this rank's failure, and on rank 0 reports it to all ranks; after an interrupt they see rank 0 leave. err may
// already hold an earlier failure.
static int fail_all(const struct nb_boot *boot, const struct nb_error *failure, struct nb_error *err) {
    if (boot->rank == 0 && failure->code != -EINTR) {
        tell_others(boot, failure);
    }
    return nb_fail_peer(err, failure->code, failure->peer, "%s", failure->text);
}

// The bytes received from one rank: the frame, then the payload.
struct inbox {
    struct wire_exchange frame;
    size_t got;
};

// A collection of all ranks' bytes on rank 0.
struct collection {
    const struct talk *talk;
    char *out;
    struct inbox *inboxes; // by rank
    struct pollfd *polled; //
    uint64_t *came;        // bit by rank
};

// Reads what one rank has sent. 1: complete.
static int take(const struct collection *all, int rank) {
    const struct talk *talk = all->talk;
    struct inbox *inbox = &all->inboxes[rank];
    size_t bytes = (size_t)talk->frame.value;
    size_t whole = sizeof inbox->frame + bytes;
    while (inbox->got < whole) {
        char *at = (char *)&inbox->frame + inbox->got;
        size_t left = sizeof inbox->frame - inbox->got;
        if (inbox->got >= sizeof inbox->frame) {
            at = all->out + (size_t)rank * bytes + (inbox->got - sizeof inbox->frame);
            left = whole - inbox->got;
        }
        ssize_t n = recv(talk->boot->control[rank], at, left, 0);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
            return 0;
        }
        if (n <= 0) {
            return fail_io(talk, n < 0 ? -errno : -ECONNRESET, rank);
        }
        inbox->got += (size_t)n;
        int rc = inbox->got == sizeof inbox->frame ? check_frame(talk, &inbox->frame, rank) : 0;
        if (rc != 0) {
            return rc;
        }
    }
    return 1;
}

// Polls once the ranks that are not complete. Returns how many became complete, or a failure.
static int take_round(const struct collection *all) {
    const struct nb_boot *boot = all->talk->boot;
    int finished = 0;
    if (nb_now_ns() >= all->talk->deadline_ns) {
        return fail_missing(all->talk, all->came);
    }
    for (int rank = 0; rank < boot->size; rank++) {
        bool done = nb_bits_get(all->came, (size_t)rank);
        all->polled[rank] = (struct pollfd){.fd = done ? -1 : boot->control[rank], .events = POLLIN};
    }
    int ready = nb_interrupt_poll(all->polled, (nfds_t)boot->size, all->talk->deadline_ns, boot->interrupt);
    if (ready < 0) {
        errno = -ready;
        return nb_fail(all->talk->err, ready, "poll: %m");
    }
    for (int rank = 1; rank < boot->size; rank++) {
        int rc = all->polled[rank].revents != 0 ? take(all, rank) : 0;
        if (rc < 0) {
            return rc;
        }
        if (rc > 0) {
            nb_bits_set(all->came, (size_t)rank);
            finished++;
        }
    }
    return finished;
}

// Rank 0: collects the bytes of all ranks, each at its place in out.
static int collect(const struct talk *talk, char *out) {
    size_t size = (size_t)talk->boot->size;
    struct collection all = {.talk = talk, .out = out};
    int rc = 0;
    all.inboxes = calloc(size, sizeof *all.inboxes);
    all.polled = calloc(size, sizeof *all.polled);
    all.came = calloc(nb_bits_words(size), sizeof *all.came);
    if (all.inboxes == NULL || all.polled == NULL || all.came == NULL) {
        rc = nb_fail(talk->err, -ENOMEM, "cannot allocate memory for %zu ranks", size);
    } else {
        nb_bits_set(all.came, 0);
        for (int count = 1; count < talk->boot->size && rc >= 0; count += rc) {
            rc = take_round(&all);
        }
    }
    free(all.came);
    free(all.polled);
    free(all.inboxes);
    return rc < 0 ? rc : 0;
}

static int exchange_coordinator(const struct talk *talk, char *out) {
    size_t whole = (size_t)talk->boot->size * (size_t)talk->frame.value;
    int rc = collect(talk, out);
    for (int rank = 1; rank < talk->boot->size && rc == 0; rank++) {
        rc = write_framed(talk, rank, out, whole);
        if (rc != 0) {
            rc = fail_io(talk, rc, rank);
        }
    }
    return rc;
}

static int exchange_member(const struct talk *talk, const void *in, char *out) {
    size_t whole = (size_t)talk->boot->size * (size_t)talk->frame.value;
    struct wire_exchange got;
    int rc = write_framed(talk, 0, in, (size_t)talk->frame.value);
    rc = rc == -EINTR ? fail_io(talk, rc, 0) : read_frame(talk, &got); // another failure: rank 0 may have reported why
    if (rc != 0) {
        return rc;
    }
    rc = nb_sock_read_all(talk->boot->control[0], out, whole, talk->deadline_ns, talk->boot->interrupt);
    return rc == 0 ? 0 : fail_io(talk, rc, 0);
}

static int exchange(const struct nb_boot *boot, enum wire_exchange_kind kind, const void *in, size_t bytes, void *out,
                    struct nb_error *err) {
    struct nb_error failure = {0};
    struct talk talk = talk_begin(boot, kind, bytes, &failure);
    int rc;
    if (boot->rank != 0) {
        rc = exchange_member(&talk, in, out);
    } else {
        if (bytes > 0) {
            memmove(out, in, bytes);
        }
        rc = exchange_coordinator(&talk, out);
    }
    return rc == 0 ? 0 : fail_all(boot, &failure, err);
}

int nb_boot_allgather(struct nb_boot *boot, const void *in, size_t bytes, void *out, struct nb_error *err) {
    if (bytes > NB_BOOT_BLOB_MAX) {
        return nb_fail(err, -EINVAL, "an all-gather of %zu bytes: the limit is %d", bytes, NB_BOOT_BLOB_MAX);
    }
    return exchange(boot, NB_WIRE_ALLGATHER, in, bytes, out, err);
}

int nb_boot_barrier(struct nb_boot *boot, struct nb_error *err) {
    return exchange(boot, NB_WIRE_BARRIER, NULL, 0, NULL, err);
}

// Answers every ping of one rank with this clock.
static int serve_clock(const struct talk *talk, int rank) {
    struct talk pong = *talk;
    pong.frame.kind = NB_WIRE_PONG;
    for (int i = 0; i < EXCHANGES; i++) {
        struct wire_exchange ping;
        int rc =
            nb_sock_read_all(talk->boot->control[rank], &ping, sizeof ping, talk->deadline_ns, talk->boot->interrupt);
        if (rc != 0) {
            return fail_io(talk, rc, rank);
        }
        rc = check_frame(talk, &ping, rank);
        if (rc != 0) {
            return rc;
        }
        pong.frame.value = (uint64_t)nb_now_ns();
        rc = write_framed(&pong, rank, NULL, 0);
        if (rc != 0) {
            return fail_io(talk, rc, rank);
        }
    }
    return 0;
}

static int ask_clock(const struct talk *talk, int64_t *offset_ns, int64_t *round_trip_ns) {
    struct talk answer = *talk;
    int64_t offset = 0;
    int64_t least = INT64_MAX;
    answer.frame.kind = NB_WIRE_PONG;
    for (int i = 0; i < EXCHANGES; i++) {
        struct wire_exchange pong = {0};
        int64_t sent_ns = nb_now_ns();
        int rc = write_framed(talk, 0, NULL, 0);
        rc = rc == -EINTR ? fail_io(talk, rc, 0) : read_frame(&answer, &pong); // as in exchange_member()
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

// Rank 0 serves one rank after the other, so that an answer never waits for another rank's.
int nb_boot_clock(struct nb_boot *boot, int64_t *offset_ns, int64_t *round_trip_ns, struct nb_error *err) {
    struct nb_error failure = {0};
    struct talk talk = talk_begin(boot, NB_WIRE_PING, 0, &failure);
    int rc = 0;
    if (boot->rank != 0) {
        rc = ask_clock(&talk, offset_ns, round_trip_ns);
    } else {
        for (int rank = 1; rank < boot->size && rc == 0; rank++) {
            rc = serve_clock(&talk, rank);
        }
        if (rc == 0) {
            *offset_ns = 0;
            *round_trip_ns = 0;
        }
    }
    return rc == 0 ? 0 : fail_all(boot, &failure, err);
}
