// Rank 0's side of the agreement: who has submitted what, which operations all ranks have submitted, in what order
// they run. Nothing here waits: an operation that some rank never submits is stall.c's to tell of.
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
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

enum { IDLE_MAX = 4096 };

// One key. It stays known between its rounds, so that it can be given a number.
struct entry {
    struct nb_hash_node by_key;
    struct nb_list link; // idle, open (some ranks have submitted) or full (all have)
    struct desc desc;    // of this round, as its first rank submitted it
    struct desc cached;  // of the last round that ran: what a bit of a mask stands for
    uint32_t id;
    uint32_t rounds;
    int first_rank;
    int count;
    const struct nb_group *group; // whose it is; NULL: of all ranks
    bool refused;
    bool told; // a stall notice was given
    int64_t since_ns;
    char refusal[NB_ERROR_TEXT];
    struct parts *parts; // of this round, of an operation that travels with the agreement
    uint64_t have[];
};

struct agree {
    struct nb_hash by_key;
    struct nb_list idle;
    struct nb_list open;
    struct nb_list full;
    int idle_count;
    uint32_t *pending; // by rank: what it has submitted and is not agreed
    struct entry *ids[IDS_MAX];
    uint32_t id_count;
    uint64_t next_seq;
    size_t words;
};

int nb_agree_open(struct nb_job *job, struct nb_error *err) {
    struct agree *a = calloc(1, sizeof *a);
    uint32_t *pending = calloc((size_t)job->size, sizeof *pending);
    if (a == NULL || pending == NULL) {
        free(a);
        free(pending);
        return nb_fail(err, -ENOMEM, "the table of operations");
    }
    a->pending = pending;
    nb_hash_init(&a->by_key);
    nb_list_init(&a->idle);
    nb_list_init(&a->open);
    nb_list_init(&a->full);
    a->next_seq = 1;
    a->words = nb_bits_words((size_t)job->size);
    job->agree = a;
    return 0;
}

static void entry_free(struct nb_job *job, struct entry *entry) {
    nb_star_forget(job, entry->parts);
    free(entry);
}

static void list_free(struct nb_job *job, struct nb_list *head) {
    NB_LIST_EACH_SAFE(it, nx, head) {
        entry_free(job, NB_CONTAINER(it, struct entry, link));
    }
}

void nb_agree_close(struct nb_job *job) {
    if (job->agree != NULL) {
        list_free(job, &job->agree->idle);
        list_free(job, &job->agree->open);
        list_free(job, &job->agree->full);
        free(job->agree->pending);
        free(job->agree);
    }
}

uint64_t nb_agree_next_seq(struct nb_job *job) {
    return job->agree->next_seq++;
}

static struct entry *entry_get(struct nb_job *job, const struct desc *desc) {
    struct agree *a = job->agree;
    struct nb_hash_node *node = nb_hash_get(&a->by_key, desc->key);
    if (node != NULL) {
        return NB_CONTAINER(node, struct entry, by_key);
    }
    struct entry *entry = calloc(1, sizeof *entry + a->words * sizeof entry->have[0]);
    if (entry == NULL) {
        struct nb_error why = {0};
        nb_fail(&why, -ENOMEM, "the record of %s", desc->name);
        nb_job_fail(job, &why, true);
        return NULL;
    }
    entry->id = NO_ID;
    entry->desc = *desc;
    entry->group = nb_groups_find(job, desc->comm);
    nb_hash_put(&a->by_key, &entry->by_key, desc->key);
    nb_list_insert(&a->idle, &entry->link);
    a->idle_count++;
    return entry;
}

static void entry_move(struct agree *a, struct entry *entry, struct nb_list *to) {
    a->idle_count += (to == &a->idle) - (entry->count == 0 && to != &a->idle);
    nb_list_remove(&entry->link);
    nb_list_insert(to, &entry->link);
}

static int members(const struct nb_job *job, const struct entry *entry) {
    return entry->group != NULL ? entry->group->count : job->size;
}

static bool owes(const struct entry *entry, int rank) {
    return nb_group_has(entry->group, rank) && !nb_bits_get(entry->have, (size_t)rank);
}

// Whether all have submitted it that will: those that have joined do not. Nobody waits for more where that ends it.
static bool is_complete(const struct nb_job *job, const struct entry *entry) {
    bool all = entry->count == members(job, entry);
    bool lost = false;
    bool awaited = false;
    if (all || job->joined_count == 0 || entry->count == 0 || entry->desc.kind == NB_OP_JOIN) {
        return all;
    }
    for (int rank = 0; rank < job->size; rank++) {
        bool joined = nb_join_has(job, rank);
        lost = lost || (joined && owes(entry, rank));
        awaited = awaited || (!joined && owes(entry, rank));
    }
    return !awaited || (lost && !nb_join_spares(entry->desc.kind));
}

static void joined(struct nb_job *job, int rank) {
    struct agree *a = job->agree;
    nb_join_add(job, rank);
    NB_LIST_EACH_SAFE(it, nx, &a->open) {
        struct entry *entry = NB_CONTAINER(it, struct entry, link);
        if (is_complete(job, entry)) {
            entry_move(a, entry, &a->full);
        }
    }
}

static void entry_add(struct nb_job *job, struct entry *entry, int rank, const struct desc *desc) {
    struct agree *a = job->agree;
    if (nb_bits_get(entry->have, (size_t)rank)) {
        return;
    }
    if (!nb_group_has(entry->group, rank)) {
        nb_job_wire_fail(job, rank, "an operation of a comm that has it not");
        return;
    }
    a->pending[rank]++;
    if (entry->count == 0) {
        entry_move(a, entry, &a->open);
        entry->desc = *desc;
        entry->first_rank = rank;
        entry->since_ns = nb_now_ns();
    } else if (!entry->refused) {
        nb_desc_differ(&entry->desc, entry->first_rank, desc, rank, entry->refusal, sizeof entry->refusal);
        entry->refused = entry->refusal[0] != 0;
    }
    nb_bits_set(entry->have, (size_t)rank);
    if (nb_group_has(entry->group, 0)) { // else its name is not in this rank's ring
        nb_ring_put(job->config.ring, NB_EV_OP_READY, desc->key, entry->rounds, (uint64_t)rank, desc->comm, desc->kind,
                    0);
    }
    entry->count++;
    if (is_complete(job, entry)) {
        entry_move(a, entry, &a->full);
    }
    if (desc->kind == NB_OP_JOIN) {
        joined(job, rank);
    }
}

void nb_agree_submit(struct nb_job *job, int rank, const struct desc *desc) {
    if (job->agree->pending[rank] >= (uint32_t)job->config.pending_max) {
        struct nb_error why = {0};
        nb_fail_peer(&why, NB_EWIRE, rank, "rank %d submitted '%s' while %d operations of it waited for other ranks",
                     rank, desc->name, job->config.pending_max);
        nb_job_fail(job, &why, true);
        return;
    }
    struct entry *entry = entry_get(job, desc);
    if (entry != NULL) {
        entry_add(job, entry, rank, desc);
    }
}

void nb_agree_mask(struct nb_job *job, int rank, const uint64_t *words, size_t count) {
    struct agree *a = job->agree;
    size_t bits = count * 64 < IDS_MAX ? count * 64 : IDS_MAX;
    for (size_t id = nb_bits_next(words, 0, bits); id < bits; id = nb_bits_next(words, id + 1, bits)) {
        if (a->ids[id] == NULL) {
            nb_job_wire_fail(job, rank, "the number of an operation that has none");
            return;
        }
        entry_add(job, a->ids[id], rank, &a->ids[id]->cached);
    }
}

// Forgets the oldest of the keys that were used once.
static void idle_trim(struct nb_job *job) {
    struct agree *a = job->agree;
    NB_LIST_EACH_SAFE(it, nx, &a->idle) {
        struct entry *entry = NB_CONTAINER(it, struct entry, link);
        if (a->idle_count <= IDLE_MAX) {
            return;
        }
        if (entry->id == NO_ID) {
            nb_list_remove(&entry->link);
            nb_list_remove(&entry->by_key.link);
            entry_free(job, entry);
            a->idle_count--;
        }
    }
}

static void entry_rest(struct nb_job *job, struct entry *entry) {
    struct agree *a = job->agree;
    for (int rank = 0; rank < job->size; rank++) {
        a->pending[rank] -= nb_bits_get(entry->have, (size_t)rank);
    }
    memset(entry->have, 0, a->words * sizeof entry->have[0]);
    nb_star_rest(job, &entry->parts);
    entry->count = 0;
    entry->refused = false;
    entry->told = false;
    entry->refusal[0] = 0;
    nb_list_remove(&entry->link);
    nb_list_insert(&a->idle, &entry->link);
    a->idle_count++;
    idle_trim(job);
}

// Fails it on those that have submitted it.
static void refuse(struct nb_job *job, struct entry *entry, int code, int32_t peer) {
    struct wire_refuse refusal = {.key = entry->desc.key, .code = code, .peer = peer};
    memcpy(refusal.text, entry->refusal, sizeof refusal.text);
    for (int rank = 1; rank < job->size; rank++) {
        if (nb_bits_get(entry->have, (size_t)rank)) {
            nb_control_send(&job->controls[rank], CTL_REFUSE, &refusal, sizeof refusal);
        }
    }
    bool here = nb_bits_get(entry->have, 0);
    entry_rest(job, entry);
    if (here) {
        nb_member_refuse(job, &refusal);
    }
}

// Nobody waits for ranks that have joined: refuses what needs their own data.
static void joined_check(const struct nb_job *job, struct entry *entry) {
    for (int rank = 0; rank < job->size && entry->count < members(job, entry) && !entry->refused; rank++) {
        if (owes(entry, rank)) {
            nb_join_refuse(&entry->desc, rank, entry->refusal, sizeof entry->refusal);
            entry->refused = entry->refusal[0] != 0;
        }
    }
}

// Ranks that have joined learn what they stand in for.
static void joined_tell(struct nb_job *job, const struct entry *entry) {
    for (int rank = 0; rank < job->size && entry->count < members(job, entry); rank++) {
        if (owes(entry, rank) && rank == 0) {
            nb_join_stand_in(job, &entry->desc);
        } else if (owes(entry, rank)) {
            nb_control_send(&job->controls[rank], CTL_STAND_IN, &entry->desc, sizeof entry->desc);
        }
    }
}

static enum nb_algorithm algorithm_for(struct nb_job *job, const struct entry *entry) {
    const struct desc *desc = &entry->desc;
    if (desc->kind != NB_OP_ALLREDUCE) {
        return nb_run_only(desc->kind);
    }
    if (nb_star_complete(job, entry->parts, desc->bytes)) {
        return NB_ALGORITHM_STAR;
    }
    enum nb_algorithm best = nb_costs_choose(job, members(job, entry), desc->bytes);
    return best == NB_ALGORITHM_STAR ? NB_ALGORITHM_DOUBLING : best; // some rank has kept its line
}

static void go(struct nb_job *job, struct entry *entry) {
    struct agree *a = job->agree;
    entry->rounds++;
    if (entry->id == NO_ID && entry->rounds > 1 && a->id_count < IDS_MAX) {
        entry->id = a->id_count++;
        a->ids[entry->id] = entry;
    }
    entry->cached = entry->desc;
    joined_tell(job, entry);
    struct wire_go message = {.seq = nb_agree_next_seq(job),
                              .key = entry->desc.key,
                              .id = entry->id,
                              .algorithm = (uint32_t)algorithm_for(job, entry)};
    if (entry->desc.kind == NB_OP_JOIN) {
        message.algorithm = (uint32_t)nb_join_over(job);
    }
    if (message.algorithm == NB_ALGORITHM_STAR) {
        struct nb_work *work = nb_member_agreed(job, &message);
        if (work != NULL) {
            nb_star_sum(job, work, entry->parts, &message);
        }
        entry_rest(job, entry);
        return;
    }
    for (int rank = 1; rank < job->size; rank++) {
        if (nb_group_has(entry->group, rank)) {
            nb_control_send(&job->controls[rank], CTL_GO, &message, sizeof message);
        }
    }
    bool here = nb_group_has(entry->group, 0);
    entry_rest(job, entry);
    if (here) {
        nb_member_go(job, &message);
    }
}

// The one to run next: the highest priority, and among equals the one that was complete first.
static struct entry *full_best(struct agree *a) {
    struct entry *best = NULL;
    NB_LIST_EACH(it, &a->full) {
        struct entry *entry = NB_CONTAINER(it, struct entry, link);
        if (best == NULL || entry->desc.priority > best->desc.priority) {
            best = entry;
        }
    }
    return best;
}

void nb_agree_release(struct nb_job *job) {
    struct agree *a = job->agree;
    while (!job->failed && !nb_probe_busy(job) && !nb_costs_busy(job) && !nb_list_empty(&a->full)) {
        struct entry *entry = full_best(a);
        bool all = members(job, entry) == job->size; // else some may have left, without whom nothing can be measured
        joined_check(job, entry);
        if (entry->refused) {
            refuse(job, entry, NB_EMISMATCH, NB_NO_PEER);
        } else if (all && nb_probe_wanted(job, entry->desc.bytes)) {
            nb_probe_begin(job);
        } else if (all && nb_costs_wanted(job, &entry->desc)) {
            nb_costs_begin(job);
        } else {
            go(job, entry);
        }
    }
}

static void part_heard(struct nb_job *job, int rank, const unsigned char *body, size_t bytes) {
    struct agree *a = job->agree;
    struct wire_part part;
    memcpy(&part, body, sizeof part);
    struct entry *entry = part.id < a->id_count ? a->ids[part.id] : NULL;
    bool whole = entry != NULL && members(job, entry) == job->size;
    if (!whole || entry->cached.kind != NB_OP_ALLREDUCE || entry->cached.bytes != bytes - sizeof part) {
        nb_job_wire_fail(job, rank, "a line of an operation that it is not of");
        return;
    }
    // Where it cannot be kept, or others' are of another length, the operation travels otherwise, or is refused.
    (void)nb_star_keep(job, &entry->parts, rank, body + sizeof part, bytes - sizeof part);
    entry_add(job, entry, rank, &entry->cached);
}

static void rank_failed(struct nb_job *job, int rank, const unsigned char *body) {
    struct wire_failure failure;
    memcpy(&failure, body, sizeof failure);
    failure.text[NB_ERROR_TEXT - 1] = 0;
    if (failure.code >= 0 || failure.code == -EAGAIN) { // -EAGAIN: of an operation that is not over
        nb_job_wire_fail(job, rank, "a failure that is none");
        return;
    }
    bool known = failure.peer >= 0 && failure.peer < job->size;
    struct nb_error why = {0};
    nb_fail_peer(&why, failure.code, known ? failure.peer : rank, "%s", failure.text);
    nb_job_fail(job, &why, true);
}

// What no rank of this job could have submitted.
static bool desc_possible(const struct nb_job *job, int rank, const struct desc *desc) {
    const struct nb_group *group = nb_groups_find(job, desc->comm);
    bool known = desc->comm == 0 || (group != NULL && nb_group_has(group, rank));
    int size = group != NULL ? group->count : job->size;
    return known && nb_desc_possible(desc, size);
}

static void submits_heard(struct nb_job *job, int rank, const unsigned char *body, size_t bytes) {
    for (size_t at = 0; at < bytes && !job->failed; at += sizeof(struct desc)) {
        struct desc desc;
        memcpy(&desc, body + at, sizeof desc);
        if (!desc_possible(job, rank, &desc)) {
            nb_job_wire_fail(job, rank, "an impossible operation");
            return;
        }
        nb_agree_submit(job, rank, &desc);
    }
}

// Whether the length of a message to rank 0 is one that its type has.
static bool length_possible(enum control_type type, size_t bytes) {
    switch (type) {
    case CTL_SUBMIT:
        return bytes % sizeof(struct desc) == 0 && bytes <= SUBMITS_MAX * sizeof(struct desc);
    case CTL_MASK:
        return bytes % sizeof(uint64_t) == 0 && bytes <= IDS_MAX / 8;
    case CTL_GROUP:
        return bytes % sizeof(int32_t) == 0 && bytes >= 2 * sizeof(int32_t);
    case CTL_PART:
        return bytes > sizeof(struct wire_part) && bytes <= sizeof(struct wire_part) + NB_STAR_MAX;
    case CTL_PING:
        return bytes == sizeof(int64_t);
    case CTL_FAIL:
        return bytes == sizeof(struct wire_failure);
    case CTL_BYE:
        return bytes == 0;
    default:
        return false;
    }
}

void nb_agree_message(struct nb_job *job, int rank, enum control_type type, const unsigned char *body, size_t bytes) {
    if (job->failed && type != CTL_BYE) {
        return; // what was sent before the failure was known
    }
    if (!length_possible(type, bytes)) {
        nb_job_wire_fail(job, rank, "a control message that is none");
    } else if (type == CTL_SUBMIT) {
        submits_heard(job, rank, body, bytes);
    } else if (type == CTL_MASK) {
        uint64_t words[IDS_MAX / 64] = {0};
        memcpy(words, body, bytes);
        nb_agree_mask(job, rank, words, bytes / sizeof words[0]);
    } else if (type == CTL_GROUP) {
        nb_groups_heard(job, rank, body, bytes);
    } else if (type == CTL_PART) {
        part_heard(job, rank, body, bytes);
    } else if (type == CTL_PING) {
        struct wire_pong pong = {.here_ns = nb_now_ns()};
        memcpy(&pong.sent_ns, body, bytes);
        nb_control_send(&job->controls[rank], CTL_PONG, &pong, sizeof pong);
    } else if (type == CTL_FAIL) {
        rank_failed(job, rank, body);
    } else if (type == CTL_BYE) {
        int32_t left = rank;
        job->controls[rank].left = true;
        nb_control_broadcast(job, CTL_LEFT, &left, sizeof left);
        nb_job_peer_left(job, rank);
    }
    nb_agree_release(job);
}

void nb_agree_tick(struct nb_job *job, int64_t now_ns) {
    NB_LIST_EACH_SAFE(it, nx, &job->agree->open) {
        struct entry *entry = NB_CONTAINER(it, struct entry, link);
        int32_t peer;
        const struct stalled stalled = {.desc = &entry->desc,
                                        .round = entry->rounds,
                                        .group = entry->group,
                                        .have = entry->have,
                                        .waited_ns = now_ns - entry->since_ns,
                                        .told = entry->told};
        if (nb_stall_over(job, &stalled, &peer, entry->refusal)) {
            refuse(job, entry, NB_ETIMEOUT, peer);
        } else {
            entry->told = nb_stall_tick(job, &stalled);
        }
    }
}
