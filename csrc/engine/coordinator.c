// Coordinator: rank 0's side of negotiation. It tracks which rank has submitted what, finds operations that all ranks
// have submitted, and orders them. Nothing here waits: stall.c reports operations that some rank never submits.
#include "engine/coordinator.h"

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
#include "engine/negotiation.h"
#include "engine/shared.h"
#include "engine/stall.h"
#include "engine/watchdog.h"
#include "trace/event.h"
#include "trace/ring.h"

enum { IDLE_MAX = 4096 };

// One key. The entry is kept between rounds, so that the key can get a number.
struct entry {
    struct nb_hash_node by_key;
    struct nb_list link;         // in list idle, open (some ranks have submitted it) or full (all have)
    struct op_descriptor desc;   // of this round, as the first rank submitted it
    struct op_descriptor cached; // of the last round that ran: a bit in a mask refers to this
    uint32_t id;
    uint32_t rounds;
    int first_rank;
    int count;
    const struct nb_group *group; // its communicator; NULL: all ranks
    bool refused;
    bool stall_reported; // a stall was reported
    int64_t since_ns;
    char refusal[NB_ERROR_TEXT];
    struct inline_buffers *parts; // buffers of this round's inline all-reduce
    uint64_t have[];
};

struct coordinator {
    struct nb_hash by_key;
    struct nb_list idle;
    struct nb_list open;
    struct nb_list full;
    int idle_count;
    uint32_t *pending; // by rank: operations that it has submitted and that have not started
    struct entry *ids[IDS_MAX];
    uint32_t id_count;
    size_t words;
};

int nb_coordinator_open(struct nb_job *job, struct nb_error *err) {
    struct coordinator *a = calloc(1, sizeof *a);
    uint32_t *pending = calloc((size_t)job->size, sizeof *pending);
    if (a == NULL || pending == NULL) {
        free(a);
        free(pending);
        return nb_fail(err, -ENOMEM, "cannot allocate the table of operations");
    }
    a->pending = pending;
    nb_list_init(&a->idle);
    nb_list_init(&a->open);
    nb_list_init(&a->full);
    a->words = nb_bits_words((size_t)job->size);
    job->coordinator = a;
    return 0;
}

static void entry_free(struct nb_job *job, struct entry *entry) {
    nb_inline_free(job, entry->parts);
    free(entry);
}

static void list_free(struct nb_job *job, struct nb_list *head) {
    NB_LIST_EACH_SAFE(it, nx, head) {
        entry_free(job, NB_CONTAINER(it, struct entry, link));
    }
}

void nb_coordinator_close(struct nb_job *job) {
    if (job->coordinator != NULL) {
        list_free(job, &job->coordinator->idle);
        list_free(job, &job->coordinator->open);
        list_free(job, &job->coordinator->full);
        free(job->coordinator->pending);
        free(job->coordinator);
    }
}

static struct entry *entry_get(struct nb_job *job, const struct op_descriptor *desc) {
    struct coordinator *a = job->coordinator;
    struct nb_hash_node *node = nb_hash_get(&a->by_key, desc->key);
    if (node != NULL) {
        return NB_CONTAINER(node, struct entry, by_key);
    }
    struct entry *entry = calloc(1, sizeof *entry + a->words * sizeof entry->have[0]);
    if (entry == NULL) {
        struct nb_error why = {0};
        nb_fail(&why, -ENOMEM, "cannot allocate the record of %s", desc->name);
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

static void entry_move(struct coordinator *a, struct entry *entry, struct nb_list *to) {
    a->idle_count += (to == &a->idle) - (entry->count == 0 && to != &a->idle);
    nb_list_remove(&entry->link);
    nb_list_insert(to, &entry->link);
}

static int member_count(const struct nb_job *job, const struct entry *entry) {
    return entry->group != NULL ? entry->group->count : job->size;
}

static bool lacks_submission(const struct entry *entry, int rank) {
    return nb_group_has(entry->group, rank) && !nb_bits_get(entry->have, (size_t)rank);
}

// True if no more submissions are expected: ranks that have joined send none. Also true if the operation is not
// possible without a joined rank, so that it is refused at once.
static bool is_complete(const struct nb_job *job, const struct entry *entry) {
    bool all = entry->count == member_count(job, entry);
    bool lost = false;
    bool awaited = false;
    if (all || job->joined.count == 0 || entry->count == 0 || entry->desc.kind == NB_OP_JOIN) {
        return all;
    }
    for (int rank = 0; rank < job->size; rank++) {
        bool joined = nb_join_has(job, rank);
        lost = lost || (joined && lacks_submission(entry, rank));
        awaited = awaited || (!joined && lacks_submission(entry, rank));
    }
    return !awaited || (lost && !nb_join_permits(entry->desc.kind));
}

static void joined(struct nb_job *job, int rank) {
    struct coordinator *a = job->coordinator;
    nb_join_add(job, rank);
    NB_LIST_EACH_SAFE(it, nx, &a->open) {
        struct entry *entry = NB_CONTAINER(it, struct entry, link);
        if (is_complete(job, entry)) {
            entry_move(a, entry, &a->full);
        }
    }
}

static void entry_add(struct nb_job *job, struct entry *entry, int rank, const struct op_descriptor *desc) {
    struct coordinator *a = job->coordinator;
    if (nb_bits_get(entry->have, (size_t)rank)) {
        return;
    }
    if (!nb_group_has(entry->group, rank)) {
        nb_job_wire_fail(job, rank, "an operation of a communicator without this rank");
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
    if (nb_group_has(entry->group, 0)) { // else this rank's ring does not have its name
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

void nb_coordinator_submit(struct nb_job *job, int rank, const struct op_descriptor *desc) {
    if (job->coordinator->pending[rank] >= (uint32_t)job->config.pending_max) {
        struct nb_error why = {0};
        nb_fail_peer(&why, NB_EWIRE, rank, "rank %d submitted '%s' while %d of its operations waited for other ranks",
                     rank, desc->name, job->config.pending_max);
        nb_job_fail(job, &why, true);
        return;
    }
    struct entry *entry = entry_get(job, desc);
    if (entry != NULL) {
        entry_add(job, entry, rank, desc);
    }
}

void nb_coordinator_mask(struct nb_job *job, int rank, const uint64_t *words, size_t count) {
    struct coordinator *a = job->coordinator;
    size_t bits = count * 64 < IDS_MAX ? count * 64 : IDS_MAX;
    for (size_t id = nb_bits_next(words, 0, bits); id < bits; id = nb_bits_next(words, id + 1, bits)) {
        if (a->ids[id] == NULL) {
            nb_job_wire_fail(job, rank, "an unknown operation number");
            return;
        }
        entry_add(job, a->ids[id], rank, &a->ids[id]->cached);
    }
}

void nb_coordinator_collect(struct nb_job *job) {
    struct nb_submitted submitted = nb_negotiation_submitted(job);
    if (submitted.mask_words > 0) { // in the order of nb_negotiation_flush()
        nb_coordinator_mask(job, 0, submitted.mask, submitted.mask_words);
    }
    for (size_t i = 0; i < submitted.fresh_count; i++) {
        nb_coordinator_submit(job, 0, &submitted.fresh[i]);
    }
    nb_negotiation_clear(job);
}

// Drops the oldest keys that have no number.
static void idle_trim(struct nb_job *job) {
    struct coordinator *a = job->coordinator;
    NB_LIST_EACH_SAFE(it, nx, &a->idle) {
        struct entry *entry = NB_CONTAINER(it, struct entry, link);
        if (a->idle_count <= IDLE_MAX) {
            return;
        }
        if (entry->id == NO_ID) {
            nb_list_remove(&entry->link);
            nb_hash_remove(&entry->by_key);
            entry_free(job, entry);
            a->idle_count--;
        }
    }
}

static void entry_rest(struct nb_job *job, struct entry *entry) {
    struct coordinator *a = job->coordinator;
    for (int rank = 0; rank < job->size; rank++) {
        a->pending[rank] -= nb_bits_get(entry->have, (size_t)rank);
    }
    memset(entry->have, 0, a->words * sizeof entry->have[0]);
    nb_inline_reset(job, &entry->parts);
    entry->count = 0;
    entry->refused = false;
    entry->stall_reported = false;
    entry->refusal[0] = 0;
    nb_list_remove(&entry->link);
    nb_list_insert(&a->idle, &entry->link);
    a->idle_count++;
    idle_trim(job);
}

// Fails the operation on the ranks that have submitted it.
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
        nb_negotiation_refuse(job, &refusal);
    }
}

// Refuses an operation that needs data of ranks that have joined.
static void joined_check(const struct nb_job *job, struct entry *entry) {
    for (int rank = 0; rank < job->size && entry->count < member_count(job, entry) && !entry->refused; rank++) {
        if (lacks_submission(entry, rank)) {
            nb_join_refuse(&entry->desc, rank, entry->refusal, sizeof entry->refusal);
            entry->refused = entry->refusal[0] != 0;
        }
    }
}

// Tells ranks that have joined to take part in the operation with zeros.
static void joined_announce(struct nb_job *job, const struct entry *entry) {
    for (int rank = 0; rank < job->size && entry->count < member_count(job, entry); rank++) {
        if (lacks_submission(entry, rank) && rank == 0) {
            nb_join_contribute(job, &entry->desc);
        } else if (lacks_submission(entry, rank)) {
            nb_control_send(&job->controls[rank], CTL_STAND_IN, &entry->desc, sizeof entry->desc);
        }
    }
}

// `bytes`: of a window.
static const struct nb_algorithm *algorithm_for(struct nb_job *job, const struct entry *entry, size_t bytes) {
    const struct op_descriptor *desc = &entry->desc;
    bool inlined = desc->kind == NB_OP_ALLREDUCE && desc->device == 0;
    if (inlined && nb_inline_complete(job, entry->parts, desc->bytes)) {
        return &nb_inline;
    }
    int size = member_count(job, entry);
    const struct nb_algorithm *best = nb_autotune_choose(job, size, (enum nb_op_kind)desc->kind, bytes);
    return best == &nb_inline ? &nb_doubling : best; // a rank has not sent its data inline
}

// Gives a repeated operation a number, for good: a rank may use it at any time. So half of the numbers are left to
// all-reduces, because other kinds come with many names, as broadcasts of parameters do.
static void number(struct coordinator *a, struct entry *entry) {
    const uint32_t limit = entry->desc.kind == NB_OP_ALLREDUCE ? IDS_MAX : IDS_MAX / 2;
    if (entry->id == NO_ID && entry->rounds > 1 && a->id_count < limit) {
        entry->id = a->id_count++;
        a->ids[entry->id] = entry;
    }
}

static void go(struct nb_job *job, struct entry *entry) {
    entry->rounds++;
    number(job->coordinator, entry);
    entry->cached = entry->desc;
    size_t bytes;
    uint64_t windows = nb_device_windows(job, &entry->desc, member_count(job, entry), &bytes);
    const struct nb_algorithm *algorithm = algorithm_for(job, entry, bytes);
    joined_announce(job, entry);
    if (entry->desc.device != 0) {
        nb_device_announce(job);
    }
    struct wire_go message = {.seq = nb_job_next_seq(job, windows),
                              .key = entry->desc.key,
                              .id = entry->id,
                              .algorithm = (uint32_t)algorithm->id,
                              .detail = entry->desc.kind == NB_OP_JOIN ? (uint32_t)nb_join_over(job) : 0};
    if (algorithm->announce != NULL) { // the answer is the result
        struct nb_work *work = nb_negotiation_agreed(job, &message);
        if (work != NULL) {
            nb_inline_sum(job, work, entry->parts, &message);
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
        nb_negotiation_go(job, &message);
    }
}

// True if `one` starts before `other`, which was complete first. The end of a join is last: joined ranks contribute
// zeros only until then.
static bool overtakes(const struct op_descriptor *one, const struct op_descriptor *other) {
    bool one_joins = one->kind == NB_OP_JOIN;
    bool other_joins = other->kind == NB_OP_JOIN;
    return one_joins != other_joins ? other_joins : one->priority > other->priority;
}

// Returns the entry to start next: the highest priority, then the first to be complete.
static struct entry *full_best(struct coordinator *a) {
    struct entry *best = NULL;
    NB_LIST_EACH(it, &a->full) {
        struct entry *entry = NB_CONTAINER(it, struct entry, link);
        if (best == NULL || overtakes(&entry->desc, &best->desc)) {
            best = entry;
        }
    }
    return best;
}

void nb_coordinator_release(struct nb_job *job) {
    struct coordinator *a = job->coordinator;
    while (!job->failed && !nb_autotune_busy(job) && !nb_list_empty(&a->full)) {
        struct entry *entry = full_best(a);
        bool all =
            member_count(job, entry) == job->size; // else absent ranks may have left, and measuring needs all ranks
        joined_check(job, entry);
        if (entry->refused) {
            refuse(job, entry, NB_EMISMATCH, NB_NO_PEER);
        } else if (!all || !nb_autotune_begin(job, &entry->desc)) {
            go(job, entry);
        }
    }
}

static void inline_received(struct nb_job *job, int rank, const unsigned char *body, size_t bytes) {
    struct coordinator *a = job->coordinator;
    struct wire_inline part;
    memcpy(&part, body, sizeof part);
    struct entry *entry = part.id < a->id_count ? a->ids[part.id] : NULL;
    bool whole = entry != NULL && member_count(job, entry) == job->size;
    bool inlined = whole && entry->cached.kind == NB_OP_ALLREDUCE && entry->cached.device == 0;
    if (!inlined || entry->cached.bytes != bytes - sizeof part) {
        nb_job_wire_fail(job, rank, "data of an operation without this rank");
        return;
    }
    // If the buffer cannot be kept, the operation takes another algorithm, or is refused where sizes differ.
    (void)nb_inline_store(job, &entry->parts, rank, body + sizeof part, bytes - sizeof part);
    entry_add(job, entry, rank, &entry->cached);
}

static void rank_failed(struct nb_job *job, int rank, const unsigned char *body) {
    struct wire_failure failure;
    memcpy(&failure, body, sizeof failure);
    failure.text[NB_ERROR_TEXT - 1] = 0;
    if (failure.code >= 0 || failure.code == -EAGAIN) { // -EAGAIN: the operation is not done
        nb_job_wire_fail(job, rank, "a failure without an error code");
        return;
    }
    bool known = failure.peer >= 0 && failure.peer < job->size;
    struct nb_error why = {0};
    nb_fail_peer(&why, failure.code, known ? failure.peer : rank, "%s", failure.text);
    nb_job_fail(job, &why, true);
}

// False for what this rank could not have submitted.
static bool desc_possible(struct nb_job *job, int rank, const struct op_descriptor *desc) {
    const struct nb_group *group = nb_groups_find(job, desc->comm);
    bool known = desc->comm == 0 || (group != NULL && nb_group_has(group, rank));
    int size = group != NULL ? group->count : job->size;
    return known && nb_desc_possible(desc, size);
}

static void submits_received(struct nb_job *job, int rank, const unsigned char *body, size_t bytes) {
    for (size_t at = 0; at < bytes && !job->failed; at += sizeof(struct op_descriptor)) {
        struct op_descriptor desc;
        memcpy(&desc, body + at, sizeof desc);
        if (!desc_possible(job, rank, &desc)) {
            nb_job_wire_fail(job, rank, "an invalid operation");
            return;
        }
        nb_coordinator_submit(job, rank, &desc);
    }
}

// True if a message to rank 0 of this type can have this length.
static bool length_possible(enum control_type type, size_t bytes) {
    switch (type) {
    case CTL_SUBMIT:
        return bytes % sizeof(struct op_descriptor) == 0 && bytes <= SUBMITS_MAX * sizeof(struct op_descriptor);
    case CTL_MASK:
        return bytes % sizeof(uint64_t) == 0 && bytes <= IDS_MAX / 8;
    case CTL_GROUP:
        return bytes % sizeof(int32_t) == 0 && bytes >= 2 * sizeof(int32_t);
    case CTL_INLINE:
        return bytes > sizeof(struct wire_inline) && bytes <= sizeof(struct wire_inline) + NB_INLINE_MAX;
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

void nb_coordinator_message(struct nb_job *job, int rank, enum control_type type, const unsigned char *body,
                            size_t bytes) {
    if (job->failed && type != CTL_BYE) {
        return; // sent before the failure was known
    }
    if (!length_possible(type, bytes)) {
        nb_job_wire_fail(job, rank, "an unknown control message");
    } else if (type == CTL_SUBMIT) {
        submits_received(job, rank, body, bytes);
    } else if (type == CTL_MASK) {
        uint64_t words[IDS_MAX / 64] = {0};
        memcpy(words, body, bytes);
        nb_coordinator_mask(job, rank, words, bytes / sizeof words[0]);
    } else if (type == CTL_GROUP) {
        nb_groups_receive(job, rank, body, bytes);
    } else if (type == CTL_INLINE) {
        inline_received(job, rank, body, bytes);
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
        nb_watchdog_left(job, rank);
    }
    nb_coordinator_release(job);
}

static bool is_awaited(const struct coordinator *a, int rank) {
    NB_LIST_EACH(it, &a->open) {
        if (lacks_submission(NB_CONTAINER(it, struct entry, link), rank)) {
            return true;
        }
    }
    return false;
}

// Only rank 0 notices that a rank is silent, also if it has no part in the operations that wait for the rank.
static void silence_tick(struct nb_job *job, int64_t now_ns) {
    for (int rank = 1; rank < job->size; rank++) {
        if (nb_watchdog_is_silent(job, rank, now_ns) && is_awaited(job->coordinator, rank)) {
            nb_watchdog_silent(job, rank, now_ns);
        }
    }
}

void nb_coordinator_tick(struct nb_job *job, int64_t now_ns) {
    silence_tick(job, now_ns);
    NB_LIST_EACH_SAFE(it, nx, &job->coordinator->open) {
        struct entry *entry = NB_CONTAINER(it, struct entry, link);
        int32_t peer;
        const struct stalled stalled = {.desc = &entry->desc,
                                        .round = entry->rounds,
                                        .group = entry->group,
                                        .have = entry->have,
                                        .waited_ns = now_ns - entry->since_ns,
                                        .reported = entry->stall_reported};
        if (nb_stall_over(job, &stalled, &peer, entry->refusal)) {
            refuse(job, entry, NB_ETIMEOUT, peer);
        } else {
            entry->stall_reported = nb_stall_tick(job, &stalled);
        }
    }
}
