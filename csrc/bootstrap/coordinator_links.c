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

enum {
    EXCHANGES = 16,
    SLACK_MS = 7000,
    VERDICT_MS = 2000, // a rank that failed waits this long for rank 0 to tell the first failure
    REPORTS_MS = 500   // and rank 0, if it failed itself, for reports of the others
};

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
    struct nb_error *told; // receives a failure that another rank reports; NULL: err receives it, too
};

static struct talk talk_begin(const struct nb_boot *boot, enum wire_exchange_kind kind, size_t bytes,
                              struct nb_error *err) {
    // Rank 0 may begin later, by as long as ranks of its host wait for each other (shared_open.c, 5 s). Its report must
    // arrive before this rank gives up.
    int64_t limit_ms = boot->timeout_ms + (int64_t)(boot->rank == 0 ? 0 : SLACK_MS);
    return (struct talk){boot, {.kind = kind, .value = bytes}, nb_now_ns() + limit_ms * MS, err, NULL};
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

static bool is_failure(const struct wire_exchange *frame) {
    return frame->kind == NB_WIRE_FAILED && frame->code < 0 &&
           frame->value == sizeof(struct wire_exchange_failure) - sizeof *frame;
}

// Makes a failure that another rank reports this rank's.
static int fail_as_told(const struct talk *talk, struct wire_exchange_failure *message) {
    bool known = message->peer >= 0 && message->peer < talk->boot->size;
    message->text[sizeof message->text - 1] = '\0';
    return nb_fail_peer(talk->told != NULL ? talk->told : talk->err, message->frame.code,
                        known ? message->peer : NB_NO_PEER, "%s", message->text);
}

// Reads rank 0's next frame.
static int read_frame(const struct talk *talk, struct wire_exchange *got) {
    struct wire_exchange_failure message;
    int fd = talk->boot->control[0];
    struct nb_interrupt *interrupt = talk->boot->interrupt;
    int rc = nb_sock_read_all(fd, got, sizeof *got, talk->deadline_ns, interrupt);
    if (rc == 0 && is_failure(got)) {
        message.frame = *got;
        rc = nb_sock_read_all(fd, (char *)&message + sizeof *got, (size_t)got->value, talk->deadline_ns, interrupt);
        if (rc == 0) {
            return fail_as_told(talk, &message);
        }
    }
    return rc == 0 ? check_frame(talk, got, 0) : fail_io(talk, rc, 0);
}

// Reports a failure: rank 0 to all ranks, so that they need not wait for their own deadline, another rank to rank 0.
// Best effort.
static void report(const struct nb_boot *boot, const struct nb_error *failure) {
    struct wire_exchange_failure message = {
        .frame = {NB_WIRE_FAILED, failure->code, sizeof message - sizeof message.frame}, .peer = failure->peer};
    memcpy(message.text, failure->text, sizeof message.text);
    int first = boot->rank == 0 ? 1 : 0;
    int end = boot->rank == 0 ? boot->size : 1;
    for (int rank = first; rank < end; rank++) {
        (void)send(boot->control[rank], &message, sizeof message, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
}

// Records this rank's failure, and on rank 0 reports it to all ranks; after an interrupt they see rank 0 leave. err may
// already hold an earlier failure.
static int fail_all(const struct nb_boot *boot, const struct nb_error *failure, struct nb_error *err) {
    if (boot->rank == 0 && failure->code != -EINTR) {
        report(boot, failure);
    }
    return nb_fail_peer(err, failure->code, failure->peer, "%s", failure->text);
}

// The bytes received from one rank: the frame, then the payload in `out`, or the rest of a failure.
struct inbox {
    struct wire_exchange_failure message;
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

// Where the next bytes of a rank go, and how many belong there. 0: its message is complete.
static size_t room(const struct collection *all, int rank, char **at) {
    struct inbox *inbox = &all->inboxes[rank];
    size_t head = sizeof inbox->message.frame;
    size_t bytes = (size_t)all->talk->frame.value;
    *at = (char *)&inbox->message + inbox->got;
    if (inbox->got < head) {
        return head - inbox->got;
    }
    if (is_failure(&inbox->message.frame)) {
        return sizeof inbox->message - inbox->got;
    }
    *at = bytes > 0 ? all->out + (size_t)rank * bytes + (inbox->got - head) : NULL;
    return head + bytes - inbox->got;
}

// Reads what one rank has sent. 1: complete.
static int take(const struct collection *all, int rank) {
    const struct talk *talk = all->talk;
    struct inbox *inbox = &all->inboxes[rank];
    const struct wire_exchange *frame = &inbox->message.frame;
    char *at;
    for (size_t left = room(all, rank, &at); left > 0; left = room(all, rank, &at)) {
        ssize_t n = recv(talk->boot->control[rank], at, left, 0);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
            return 0;
        }
        if (n <= 0) {
            return fail_io(talk, n < 0 ? -errno : -ECONNRESET, rank);
        }
        inbox->got += (size_t)n;
        int rc = inbox->got == sizeof *frame && !is_failure(frame) ? check_frame(talk, frame, rank) : 0;
        if (rc != 0) {
            return rc;
        }
    }
    return is_failure(frame) ? fail_as_told(talk, &inbox->message) : 1;
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

int nb_boot_agree(struct nb_boot *boot, int rc, struct nb_error *err) {
    if (rc == 0 || rc == -EINTR) {
        return rc == 0 ? nb_boot_barrier(boot, err) : rc; // an interrupted rank leaves
    }
    struct nb_error told = {0};
    struct nb_error unused = {0}; // why nothing was told
    struct nb_error mine = {0};
    struct talk talk = talk_begin(boot, NB_WIRE_BARRIER, 0, &unused);
    talk.deadline_ns = nb_now_ns() + (boot->rank == 0 ? REPORTS_MS : VERDICT_MS) * MS;
    talk.told = &told;
    nb_fail_peer(&mine, err->code, err->peer, "rank %d: %s", boot->rank, err->text);
    if (boot->rank == 0) {
        (void)collect(&talk, NULL);
        report(boot, told.code != 0 ? &told : &mine);
    } else {
        struct wire_exchange got;
        report(boot, &mine);
        (void)read_frame(&talk, &got);
    }
    if (told.code != 0 && err->peer != NB_NO_PEER) {
        *err = told; // what this rank saw may only have followed from it
    }
    return err->code;
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
