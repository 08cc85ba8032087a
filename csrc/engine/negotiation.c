// Negotiation, a rank's side: sends what it has submitted, and handles rank 0's answers.
#include "engine/negotiation.h"

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/bits.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/list.h"
#include "coll/choose.h"
#include "engine/algorithms.h"
#include "engine/autotune.h"
#include "engine/communicator.h"
#include "engine/context.h"
#include "engine/control.h"
#include "engine/descriptor.h"
#include "engine/device.h"
#include "engine/engine.h"
#include "engine/inline_allreduce.h"
#include "engine/joined_ranks.h"
#include "engine/operation.h"
#include "engine/shared.h"
#include "engine/stall.h"
#include "engine/watchdog.h"
#include "trace/event.h"
#include "trace/ring.h"
#include "transport/lanes.h"

// An operation that has a number from rank 0: one bit submits it.
struct cached {
    struct nb_hash_node by_key;
    uint32_t id;
    bool used;
    struct op_descriptor desc;
};

struct negotiation {
    struct cached cached[IDS_MAX];
    struct nb_hash by_key;
    uint64_t mask[IDS_MAX / 64];
    size_t mask_words; // words of the mask up to the last set bit
    struct op_descriptor *fresh;
    size_t fresh_count;
    size_t fresh_room;
};

int nb_negotiation_open(struct nb_job *job, struct nb_error *err) {
    job->negotiation = calloc(1, sizeof *job->negotiation);
    if (job->negotiation == NULL) {
        return nb_fail(err, -ENOMEM, "cannot allocate the table of operations");
    }
    return 0;
}

void nb_negotiation_close(struct nb_job *job) {
    if (job->negotiation != NULL) {
        free(job->negotiation->fresh);
        free(job->negotiation);
    }
}

void nb_negotiation_submit(struct nb_job *job, struct nb_work *work) {
    struct negotiation *m = job->negotiation;
    nb_list_insert(&job->ops.waiting, &work->link);
    struct nb_hash_node *node = nb_hash_get(&m->by_key, work->desc.key);
    struct cached *cached = node != NULL ? NB_CONTAINER(node, struct cached, by_key) : NULL;
    if (cached != NULL && work->desc.kind != NB_OP_JOIN && nb_desc_equal(&cached->desc, &work->desc)) {
        if (work->algorithm->announce != NULL && job->rank > 0 && work->algorithm->announce(work, cached->id)) {
            return;
        }
        nb_bits_set(m->mask, cached->id);
        size_t words = cached->id / 64 + 1;
        m->mask_words = words > m->mask_words ? words : m->mask_words;
        return;
    }
    if (m->fresh_count == m->fresh_room) {
        size_t room = m->fresh_room == 0 ? 64 : 2 * m->fresh_room;
        struct op_descriptor *grown = realloc(m->fresh, room * sizeof *grown);
        if (grown == NULL) {
            struct nb_error why = {0};
            nb_fail(&why, -ENOMEM, "cannot allocate a list of %zu submitted operations", room);
            nb_job_fail(job, &why, true);
            return;
        }
        m->fresh = grown;
        m->fresh_room = room;
    }
    m->fresh[m->fresh_count++] = work->desc;
}

struct nb_submitted nb_negotiation_submitted(const struct nb_job *job) {
    const struct negotiation *m = job->negotiation;
    return (struct nb_submitted){m->fresh, m->fresh_count, m->mask, m->mask_words};
}

void nb_negotiation_clear(struct nb_job *job) {
    struct negotiation *m = job->negotiation;
    m->fresh_count = 0;
    memset(m->mask, 0, m->mask_words * sizeof m->mask[0]);
    m->mask_words = 0;
}

void nb_negotiation_flush(struct nb_job *job) {
    const struct negotiation *m = job->negotiation;
    if (m->mask_words > 0) { // first, so that a join, which is never in it, does not overtake it
        nb_control_queue(&job->controls[0], CTL_MASK, m->mask, m->mask_words * sizeof m->mask[0]);
    }
    for (size_t at = 0; at < m->fresh_count; at += SUBMITS_MAX) {
        size_t left = m->fresh_count - at;
        size_t count = left < SUBMITS_MAX ? left : SUBMITS_MAX;
        nb_control_queue(&job->controls[0], CTL_SUBMIT, m->fresh + at, count * sizeof *m->fresh);
    }
    if (job->controls[0].out_bytes > 0) {
        nb_control_flush(&job->controls[0]);
    }
    nb_negotiation_clear(job);
}

static struct nb_work *waiting_find(struct nb_job *job, uint64_t key) {
    NB_LIST_EACH(it, &job->ops.waiting) {
        struct nb_work *work = NB_CONTAINER(it, struct nb_work, link);
        if (work->desc.key == key) {
            return work;
        }
    }
    return NULL;
}

static void remember(struct negotiation *m, uint32_t id, const struct op_descriptor *desc) {
    struct cached *cached = &m->cached[id];
    if (cached->used) {
        nb_hash_remove(&cached->by_key);
    }
    cached->used = true;
    cached->id = id;
    cached->desc = *desc;
    nb_hash_put(&m->by_key, &cached->by_key, desc->key);
}

struct nb_work *nb_negotiation_agreed(struct nb_job *job, const struct wire_go *go) {
    struct nb_work *work = waiting_find(job, go->key);
    if (work == NULL || nb_device_is_unready(work) || !nb_job_accept_seq(job, go->seq)) {
        nb_job_wire_fail(job, 0, "a start of an operation that was not submitted");
        return NULL;
    }
    if (go->id < IDS_MAX) {
        remember(job->negotiation, go->id, &work->desc);
    }
    work->times.agreed_ns = nb_now_ns();
    // Also without work->ring: it ends the negotiation in rank 0's timeline.
    nb_ring_put_at(job->config.ring, work->times.agreed_ns, NB_EV_OP_AGREED, go->key, work->round, 0, 0, 0, 0);
    return work;
}

void nb_negotiation_go(struct nb_job *job, const struct wire_go *go) {
    struct nb_error why = {0};
    struct nb_work *work = nb_negotiation_agreed(job, go);
    if (work == NULL) {
        return;
    }
    const struct nb_algorithm *algorithm = nb_algorithm_get(job, go->algorithm);
    if (algorithm == NULL || !algorithm->possible(work)) {
        nb_job_wire_fail(job, 0, "an algorithm that cannot run the operation");
        return;
    }
    work->detail = go->detail;
    if (nb_device_prepare(work, algorithm, &why) < 0) {
        nb_job_fail(job, &why, true);
        return;
    }
    nb_device_start(work, go->seq);
}

void nb_negotiation_refuse(struct nb_job *job, const struct wire_refuse *refuse) {
    struct nb_work *work = waiting_find(job, refuse->key);
    struct nb_error why = {0};
    nb_fail_peer(&why, refuse->code, refuse->peer, "%.*s", NB_ERROR_TEXT - 1, refuse->text);
    if (work != NULL) {
        nb_work_finish(work, &why);
    }
}

static void refusal_received(struct nb_job *job, const unsigned char *body) {
    struct wire_refuse refuse;
    memcpy(&refuse, body, sizeof refuse);
    bool known = refuse.code == NB_EMISMATCH || refuse.code == NB_ETIMEOUT;
    if (!known || refuse.peer < NB_NO_PEER || refuse.peer >= job->size) {
        nb_job_wire_fail(job, 0, "a refusal without a reason");
        return;
    }
    nb_negotiation_refuse(job, &refuse);
}

static void failure_received(struct nb_job *job, const unsigned char *body) {
    struct wire_failure failure;
    memcpy(&failure, body, sizeof failure);
    failure.text[NB_ERROR_TEXT - 1] = 0;
    if (failure.code >= 0 || failure.code == -EAGAIN) { // -EAGAIN: the operation is not done
        nb_job_wire_fail(job, 0, "a failure without an error code");
        return;
    }
    bool known = failure.peer >= 0 && failure.peer < job->size;
    struct nb_error why = {0};
    nb_fail_peer(&why, failure.code, known ? failure.peer : NB_NO_PEER, "%s", failure.text);
    nb_job_fail(job, &why, false);
}

static void pong_received(struct nb_job *job, const unsigned char *body) {
    struct wire_pong pong;
    int64_t now = nb_now_ns();
    memcpy(&pong, body, sizeof pong);
    uint64_t trip = (uint64_t)now - (uint64_t)pong.sent_ns;
    uint64_t offset = (uint64_t)pong.sent_ns + trip / 2 - (uint64_t)pong.here_ns;
    nb_job_clock_measured(job, now, offset, trip);
}

static void go_received(struct nb_job *job, const unsigned char *body, size_t bytes) {
    for (size_t at = 0; at + sizeof(struct wire_go) <= bytes && !job->failed; at += sizeof(struct wire_go)) {
        struct wire_go go;
        memcpy(&go, body + at, sizeof go);
        nb_negotiation_go(job, &go);
    }
}

static void result_received(struct nb_job *job, const unsigned char *body, size_t bytes) {
    struct wire_go go;
    memcpy(&go, body, sizeof go);
    struct nb_work *work = nb_negotiation_agreed(job, &go);
    if (work == NULL) {
        return;
    }
    bool inlined = work->desc.kind == NB_OP_ALLREDUCE && work->desc.device == 0;
    if (!inlined || work->desc.bytes != bytes - sizeof go) {
        nb_job_wire_fail(job, 0, "a result of the wrong length");
        return;
    }
    nb_inline_finish(work, go.seq, body + sizeof go);
}

static bool has_joined(const struct nb_job *job) {
    NB_LIST_EACH(it, &job->ops.waiting) {
        if (NB_CONTAINER(it, struct nb_work, link)->desc.kind == NB_OP_JOIN) {
            return true;
        }
    }
    return false;
}

static void contribute_received(struct nb_job *job, const unsigned char *body) {
    struct op_descriptor desc;
    memcpy(&desc, body, sizeof desc);
    bool spared = has_joined(job) && nb_desc_possible(&desc, job->size) && nb_join_permits(desc.kind);
    if (spared && waiting_find(job, desc.key) == NULL) {
        nb_join_contribute(job, &desc);
    } else {
        nb_job_wire_fail(job, 0, "an invalid operation for a joined rank");
    }
}

static void left_received(struct nb_job *job, const unsigned char *body) {
    int32_t rank = 0;
    memcpy(&rank, body, sizeof rank);
    if (rank < 0 || rank >= job->size) {
        nb_job_wire_fail(job, 0, "the departure of an unknown rank");
        return;
    }
    nb_watchdog_left(job, rank);
}

// True if a message from rank 0 of this type can have this length.
static bool length_possible(enum control_type type, size_t bytes) {
    static const struct {
        enum control_type type;
        size_t bytes;
    } fixed[] = {{CTL_STAND_IN, sizeof(struct op_descriptor)},
                 {CTL_REFUSE, sizeof(struct wire_refuse)},
                 {CTL_ABORT, sizeof(struct wire_failure)},
                 {CTL_PONG, sizeof(struct wire_pong)},
                 {CTL_BYE, 0},
                 {CTL_DEVICE, 0},
                 {CTL_LEFT, sizeof(int32_t)},
                 {CTL_PROBE, sizeof(struct wire_probe)},
                 {CTL_STREAMS, sizeof(struct wire_streams)},
                 {CTL_COSTS, sizeof(struct nb_costs)}};
    for (size_t i = 0; i < sizeof fixed / sizeof fixed[0]; i++) {
        if (fixed[i].type == type) {
            return bytes == fixed[i].bytes;
        }
    }
    switch (type) {
    case CTL_GO:
        return bytes % sizeof(struct wire_go) == 0;
    case CTL_INLINE_RESULT:
        return bytes > sizeof(struct wire_go) && bytes <= sizeof(struct wire_go) + NB_INLINE_MAX;
    case CTL_STALL:
        return bytes >= sizeof(struct wire_stall) && bytes < sizeof(struct wire_stall) + NB_ERROR_TEXT;
    default:
        return false;
    }
}

static void probe_received(struct nb_job *job, enum control_type type, const unsigned char *body) {
    struct wire_probe probe;
    struct wire_streams streams;
    if (type == CTL_PROBE) {
        memcpy(&probe, body, sizeof probe);
        nb_autotune_run(job, &probe);
    } else {
        memcpy(&streams, body, sizeof streams);
        nb_autotune_streams(job, &streams);
    }
}

static void costs_received(struct nb_job *job, const unsigned char *body) {
    struct nb_costs costs;
    memcpy(&costs, body, sizeof costs);
    if (nb_costs_possible(&costs)) {
        nb_autotune_costs(job, &costs);
    } else {
        nb_job_wire_fail(job, 0, "invalid costs");
    }
}

// What rank 0 has chosen or found out for the operations to come.
static void choice_received(struct nb_job *job, enum control_type type, const unsigned char *body) {
    if (type == CTL_COSTS) {
        costs_received(job, body);
    } else if (type == CTL_DEVICE) {
        nb_lanes_await_starts(job->lanes);
    } else { // CTL_PROBE, CTL_STREAMS
        probe_received(job, type, body);
    }
}

void nb_negotiation_message(struct nb_job *job, int peer, enum control_type type, const unsigned char *body,
                            size_t bytes) {
    (void)peer; // rank 0
    if (job->failed && type != CTL_BYE) {
        return; // sent before the failure was known
    }
    if (!length_possible(type, bytes)) {
        nb_job_wire_fail(job, 0, "an unknown control message");
    } else if (type == CTL_GO) {
        go_received(job, body, bytes);
    } else if (type == CTL_STAND_IN) {
        contribute_received(job, body);
    } else if (type == CTL_INLINE_RESULT) {
        result_received(job, body, bytes);
    } else if (type == CTL_REFUSE) {
        refusal_received(job, body);
    } else if (type == CTL_ABORT) {
        failure_received(job, body);
    } else if (type == CTL_PONG) {
        pong_received(job, body);
    } else if (type == CTL_BYE) {
        job->controls[0].left = true;
        nb_watchdog_left(job, 0);
    } else if (type == CTL_LEFT) {
        left_received(job, body);
    } else if (type == CTL_STALL) {
        nb_stall_receive(job, body, bytes);
    } else {
        choice_received(job, type, body);
    }
}
