// A rank's side of the agreement: what it has submitted, and what rank 0 answers.
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
#include "engine/engine.h"
#include "engine/group.h"
#include "engine/internal.h"
#include "engine/join.h"
#include "engine/local.h"
#include "engine/star.h"
#include "trace/event.h"
#include "trace/ring.h"

// An operation that rank 0 gave a number: it may be named by one bit.
struct cached {
    struct nb_hash_node by_key;
    uint32_t id;
    bool used;
    struct desc desc;
};

struct member {
    struct cached cached[IDS_MAX];
    struct nb_hash by_key;
    uint64_t mask[IDS_MAX / 64];
    size_t mask_words; // of the mask that hold a bit
    struct desc *fresh;
    size_t fresh_count;
    size_t fresh_room;
};

int nb_member_open(struct nb_job *job, struct nb_error *err) {
    job->member = calloc(1, sizeof *job->member);
    if (job->member == NULL) {
        return nb_fail(err, -ENOMEM, "the table of operations");
    }
    nb_hash_init(&job->member->by_key);
    return 0;
}

void nb_member_close(struct nb_job *job) {
    if (job->member != NULL) {
        free(job->member->fresh);
        free(job->member);
    }
}

void nb_member_submit(struct nb_job *job, struct nb_work *work) {
    struct member *m = job->member;
    nb_list_insert(&job->waiting, &work->link);
    struct nb_hash_node *node = nb_hash_get(&m->by_key, work->desc.key);
    struct cached *cached = node != NULL ? NB_CONTAINER(node, struct cached, by_key) : NULL;
    if (cached != NULL && nb_desc_equal(&cached->desc, &work->desc)) {
        if (work->algorithm == NB_ALGORITHM_STAR && job->rank > 0 && nb_star_give(job, work, cached->id)) {
            return;
        }
        nb_bits_set(m->mask, cached->id);
        size_t words = cached->id / 64 + 1;
        m->mask_words = words > m->mask_words ? words : m->mask_words;
        return;
    }
    if (m->fresh_count == m->fresh_room) {
        size_t room = m->fresh_room == 0 ? 64 : 2 * m->fresh_room;
        struct desc *grown = realloc(m->fresh, room * sizeof *grown);
        if (grown == NULL) {
            struct nb_error why = {0};
            nb_fail(&why, -ENOMEM, "%zu operations submitted", room);
            nb_job_fail(job, &why, true);
            return;
        }
        m->fresh = grown;
        m->fresh_room = room;
    }
    m->fresh[m->fresh_count++] = work->desc;
}

void nb_member_flush(struct nb_job *job) {
    struct member *m = job->member;
    if (job->rank == 0) {
        for (size_t i = 0; i < m->fresh_count; i++) {
            nb_agree_submit(job, 0, &m->fresh[i]);
        }
        if (m->mask_words > 0) {
            nb_agree_mask(job, 0, m->mask, m->mask_words);
        }
    } else {
        for (size_t at = 0; at < m->fresh_count; at += SUBMITS_MAX) {
            size_t left = m->fresh_count - at;
            size_t count = left < SUBMITS_MAX ? left : SUBMITS_MAX;
            nb_control_queue(&job->controls[0], CTL_SUBMIT, m->fresh + at, count * sizeof *m->fresh);
        }
        if (m->mask_words > 0) {
            nb_control_queue(&job->controls[0], CTL_MASK, m->mask, m->mask_words * sizeof m->mask[0]);
        }
        if (job->controls[0].out_bytes > 0) {
            nb_control_flush(&job->controls[0]);
        }
    }
    m->fresh_count = 0;
    memset(m->mask, 0, m->mask_words * sizeof m->mask[0]);
    m->mask_words = 0;
}

static struct nb_work *waiting_find(struct nb_job *job, uint64_t key) {
    NB_LIST_EACH(it, &job->waiting) {
        struct nb_work *work = NB_CONTAINER(it, struct nb_work, link);
        if (work->desc.key == key) {
            return work;
        }
    }
    return NULL;
}

static void remember(struct member *m, uint32_t id, const struct desc *desc) {
    struct cached *cached = &m->cached[id];
    if (cached->used) {
        nb_list_remove(&cached->by_key.link);
    }
    cached->used = true;
    cached->id = id;
    cached->desc = *desc;
    nb_hash_put(&m->by_key, &cached->by_key, desc->key);
}

bool nb_member_next(struct nb_job *job, uint64_t seq) {
    bool next = seq > job->last_seq;
    job->last_seq = next ? seq : job->last_seq;
    return next;
}

struct nb_work *nb_member_agreed(struct nb_job *job, const struct wire_go *go) {
    struct nb_work *work = waiting_find(job, go->key);
    if (work == NULL || !nb_member_next(job, go->seq)) {
        nb_job_wire_fail(job, 0, "a start of what was not submitted");
        return NULL;
    }
    if (go->id < IDS_MAX) {
        remember(job->member, go->id, &work->desc);
    }
    work->times.agreed_ns = nb_now_ns();
    nb_ring_put_at(job->config.ring, work->times.agreed_ns, NB_EV_OP_AGREED, go->key, work->round, 0, 0, 0, 0);
    return work;
}

void nb_member_go(struct nb_job *job, const struct wire_go *go) {
    struct nb_error why = {0};
    struct nb_work *work = nb_member_agreed(job, go);
    if (work == NULL) {
        return;
    }
    if (work->desc.kind == NB_OP_JOIN) {
        nb_join_end(work, (int)go->algorithm);
        return;
    }
    bool two_level = go->algorithm == NB_ALGORITHM_TWO_LEVEL;
    bool levels = nb_comm_is_whole(work->comm) && nb_local_hosts(job) > 1 && work->desc.bytes > 0;
    if (!nb_run_possible(work->desc.kind, go->algorithm) || (two_level && !levels)) {
        nb_job_wire_fail(job, 0, "a way to travel that the operation has not");
        return;
    }
    enum nb_algorithm algorithm = (enum nb_algorithm)go->algorithm;
    int rc = algorithm != work->algorithm ? nb_run_prepare(work, algorithm, &why) : 0;
    if (rc < 0 || nb_run_peers(work, &why) < 0) {
        nb_job_fail(job, &why, true);
        return;
    }
    nb_run_start(work, go->seq);
}

void nb_member_refuse(struct nb_job *job, const struct wire_refuse *refuse) {
    struct nb_work *work = waiting_find(job, refuse->key);
    struct nb_error why = {0};
    nb_fail_peer(&why, refuse->code, refuse->peer, "%.*s", NB_ERROR_TEXT - 1, refuse->text);
    if (work != NULL) {
        nb_work_finish(work, &why);
    }
}

static void refusal_heard(struct nb_job *job, const unsigned char *body) {
    struct wire_refuse refuse;
    memcpy(&refuse, body, sizeof refuse);
    bool known = refuse.code == NB_EMISMATCH || refuse.code == NB_ETIMEOUT;
    if (!known || refuse.peer < NB_NO_PEER || refuse.peer >= job->size) {
        nb_job_wire_fail(job, 0, "a refusal that is none");
        return;
    }
    nb_member_refuse(job, &refuse);
}

static void failure_heard(struct nb_job *job, const unsigned char *body) {
    struct wire_failure failure;
    memcpy(&failure, body, sizeof failure);
    failure.text[NB_ERROR_TEXT - 1] = 0;
    if (failure.code >= 0 || failure.code == -EAGAIN) { // -EAGAIN: of an operation that is not over
        nb_job_wire_fail(job, 0, "a failure that is none");
        return;
    }
    bool known = failure.peer >= 0 && failure.peer < job->size;
    struct nb_error why = {0};
    nb_fail_peer(&why, failure.code, known ? failure.peer : NB_NO_PEER, "%s", failure.text);
    nb_job_fail(job, &why, false);
}

static void pong_heard(struct nb_job *job, const unsigned char *body) {
    struct wire_pong pong;
    int64_t now = nb_now_ns();
    memcpy(&pong, body, sizeof pong);
    uint64_t trip = (uint64_t)now - (uint64_t)pong.sent_ns;
    uint64_t offset = (uint64_t)pong.sent_ns + trip / 2 - (uint64_t)pong.here_ns;
    nb_ring_put_at(job->config.ring, now, NB_EV_CLOCK, 0, offset, trip, 0, 0, 0);
}

static void go_heard(struct nb_job *job, const unsigned char *body, size_t bytes) {
    for (size_t at = 0; at + sizeof(struct wire_go) <= bytes && !job->failed; at += sizeof(struct wire_go)) {
        struct wire_go go;
        memcpy(&go, body + at, sizeof go);
        nb_member_go(job, &go);
    }
}

static void total_heard(struct nb_job *job, const unsigned char *body, size_t bytes) {
    struct wire_go go;
    memcpy(&go, body, sizeof go);
    struct nb_work *work = nb_member_agreed(job, &go);
    if (work == NULL) {
        return;
    }
    if (work->desc.kind != NB_OP_ALLREDUCE || work->desc.bytes != bytes - sizeof go) {
        nb_job_wire_fail(job, 0, "a result of another length");
        return;
    }
    nb_star_land(work, go.seq, body + sizeof go);
}

static bool has_joined(const struct nb_job *job) {
    NB_LIST_EACH(it, &job->waiting) {
        if (NB_CONTAINER(it, struct nb_work, link)->desc.kind == NB_OP_JOIN) {
            return true;
        }
    }
    return false;
}

static void stand_in_heard(struct nb_job *job, const unsigned char *body) {
    struct desc desc;
    memcpy(&desc, body, sizeof desc);
    bool spared = has_joined(job) && nb_desc_possible(&desc, job->size) && nb_join_spares(desc.kind);
    if (spared && waiting_find(job, desc.key) == NULL) {
        nb_join_stand_in(job, &desc);
    } else {
        nb_job_wire_fail(job, 0, "an impossible operation to stand in for");
    }
}

static void left_heard(struct nb_job *job, const unsigned char *body) {
    int32_t rank = 0;
    memcpy(&rank, body, sizeof rank);
    if (rank < 0 || rank >= job->size) {
        nb_job_wire_fail(job, 0, "the end of a rank that does not exist");
        return;
    }
    nb_job_peer_left(job, rank);
}

// Whether the length of a message from rank 0 is one that its type has.
static bool length_possible(enum control_type type, size_t bytes) {
    switch (type) {
    case CTL_GO:
        return bytes % sizeof(struct wire_go) == 0;
    case CTL_TOTAL:
        return bytes > sizeof(struct wire_go) && bytes <= sizeof(struct wire_go) + NB_STAR_MAX;
    case CTL_STAND_IN:
        return bytes == sizeof(struct desc);
    case CTL_REFUSE:
        return bytes == sizeof(struct wire_refuse);
    case CTL_ABORT:
        return bytes == sizeof(struct wire_failure);
    case CTL_PONG:
        return bytes == sizeof(struct wire_pong);
    case CTL_BYE:
        return bytes == 0;
    case CTL_LEFT:
        return bytes == sizeof(int32_t);
    case CTL_PROBE:
        return bytes == sizeof(struct wire_probe);
    case CTL_STREAMS:
        return bytes == sizeof(struct wire_streams);
    case CTL_COSTS:
        return bytes == sizeof(struct nb_costs);
    case CTL_STALL:
        return bytes >= sizeof(struct wire_stall) && bytes < sizeof(struct wire_stall) + NB_ERROR_TEXT;
    default:
        return false;
    }
}

static void probe_heard(struct nb_job *job, enum control_type type, const unsigned char *body) {
    struct wire_probe probe;
    struct wire_streams streams;
    if (type == CTL_PROBE) {
        memcpy(&probe, body, sizeof probe);
        nb_probe_run(job, &probe);
    } else {
        memcpy(&streams, body, sizeof streams);
        nb_probe_streams(job, &streams);
    }
}

static void costs_heard(struct nb_job *job, const unsigned char *body) {
    struct nb_costs costs;
    memcpy(&costs, body, sizeof costs);
    if (nb_costs_possible(&costs)) {
        nb_costs_heard(job, &costs);
    } else {
        nb_job_wire_fail(job, 0, "costs that are impossible");
    }
}

void nb_member_message(struct nb_job *job, enum control_type type, const unsigned char *body, size_t bytes) {
    if (job->failed && type != CTL_BYE) {
        return; // what was sent before the failure was known
    }
    if (!length_possible(type, bytes)) {
        nb_job_wire_fail(job, 0, "a control message that is none");
    } else if (type == CTL_GO) {
        go_heard(job, body, bytes);
    } else if (type == CTL_STAND_IN) {
        stand_in_heard(job, body);
    } else if (type == CTL_TOTAL) {
        total_heard(job, body, bytes);
    } else if (type == CTL_REFUSE) {
        refusal_heard(job, body);
    } else if (type == CTL_ABORT) {
        failure_heard(job, body);
    } else if (type == CTL_PONG) {
        pong_heard(job, body);
    } else if (type == CTL_BYE) {
        job->controls[0].left = true;
        nb_job_peer_left(job, 0);
    } else if (type == CTL_LEFT) {
        left_heard(job, body);
    } else if (type == CTL_PROBE || type == CTL_STREAMS) {
        probe_heard(job, type, body);
    } else if (type == CTL_COSTS) {
        costs_heard(job, body);
    } else { // CTL_STALL
        nb_stall_heard(job, body, bytes);
    }
}
