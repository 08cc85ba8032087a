// Stalls: reports of operations that some ranks have not submitted, and their limits.
#include "engine/stall.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "base/bits.h"
#include "base/error.h"
#include "engine/communicator.h"
#include "engine/context.h"
#include "engine/control.h"
#include "engine/engine.h"
#include "engine/joined_ranks.h"
#include "trace/event.h"
#include "trace/ring.h"

static bool exceeds(int64_t waited_ns, int limit_ms) {
    return limit_ms > 0 && waited_ns > (int64_t)limit_ms * 1000000;
}

static bool is_missing(const struct nb_job *job, const struct stalled *stalled, int rank) {
    return nb_group_has(stalled->group, rank) && !nb_bits_get(stalled->have, (size_t)rank) && !nb_join_has(job, rank);
}

// Describes the missing ranks, as numbers and in words.
static void describe(const struct nb_job *job, const struct stalled *stalled, struct wire_stall *out,
                     char text[NB_ERROR_TEXT]) {
    *out = (struct wire_stall){.key = stalled->desc->key};
    int n = snprintf(text, NB_ERROR_TEXT,
                     "'%s' has waited for %.0f s. Ranks that have not submitted it:", stalled->desc->name,
                     (double)stalled->waited_ns / 1e9);
    int missing = 0;
    int named = 0;
    for (int r = 0; r < job->size; r++) {
        if (!is_missing(job, stalled, r)) {
            continue;
        }
        missing++;
        // Leaves room for the number of ranks, and for the name of the variable that set the limit.
        if (n < NB_ERROR_TEXT - 64) {
            n += snprintf(text + n, NB_ERROR_TEXT - (size_t)n, " %d", r);
            named++;
        }
        if (out->count < NB_MISSING_MAX) {
            out->ranks[out->count++] = r;
        }
    }
    if (named < missing) {
        (void)snprintf(text + n, NB_ERROR_TEXT - (size_t)n, " … (%d of %d)", missing,
                       stalled->group != NULL ? stalled->group->count : job->size);
    }
}

static void stamp(const struct nb_job *job, const struct stalled *stalled) {
    uint64_t masks[2] = {0};
    uint64_t count = 0;
    for (int r = 0; r < job->size; r++) {
        if (is_missing(job, stalled, r)) {
            count++;
            if (r < 128) {
                nb_bits_set(masks, (size_t)r);
            }
        }
    }
    nb_ring_put(job->config.ring, NB_EV_STALL, stalled->desc->key, stalled->round, (uint64_t)stalled->waited_ns,
                masks[0], masks[1], count);
}

static void keep(struct nb_job *job, const struct wire_stall *reported) {
    pthread_mutex_lock(&job->lock);
    job->stalls.kept[job->stalls.count++ % NB_STALLS_KEPT] = *reported;
    pthread_mutex_unlock(&job->lock);
}

static void report(struct nb_job *job, const struct stalled *stalled) {
    struct {
        struct wire_stall what;
        char text[NB_ERROR_TEXT];
    } reported;
    describe(job, stalled, &reported.what, reported.text);
    stamp(job, stalled);
    keep(job, &reported.what);
    nb_job_notify(job, reported.text);
    nb_control_broadcast(job, CTL_STALL, &reported, sizeof reported.what + strlen(reported.text));
}

void nb_stall_receive(struct nb_job *job, const unsigned char *body, size_t bytes) {
    struct wire_stall reported;
    char text[NB_ERROR_TEXT] = {0};
    memcpy(&reported, body, sizeof reported);
    memcpy(text, body + sizeof reported, bytes - sizeof reported);
    bool possible = reported.count >= 0 && reported.count <= NB_MISSING_MAX;
    for (int i = 0; possible && i < reported.count; i++) {
        possible = reported.ranks[i] >= 0 && reported.ranks[i] < job->size;
    }
    if (!possible) {
        nb_job_wire_fail(job, 0, "a stall of unknown ranks");
        return;
    }
    keep(job, &reported);
    nb_job_notify(job, text);
}

int nb_comm_missing(struct nb_comm *comm, const char *name, int32_t ranks[NB_MISSING_MAX]) {
    struct nb_job *job = comm->job;
    uint64_t key = nb_comm_key(comm, nb_key(name));
    int count = 0;
    pthread_mutex_lock(&job->lock);
    uint32_t kept = job->stalls.count < NB_STALLS_KEPT ? job->stalls.count : NB_STALLS_KEPT;
    for (uint32_t back = 1; back <= kept && count == 0; back++) {
        const struct wire_stall *reported = &job->stalls.kept[(job->stalls.count - back) % NB_STALLS_KEPT];
        if (reported->key == key) {
            count = reported->count;
            memcpy(ranks, reported->ranks, sizeof reported->ranks);
        }
    }
    pthread_mutex_unlock(&job->lock);
    return count;
}

bool nb_stall_over(const struct nb_job *job, const struct stalled *stalled, int32_t *peer, char text[NB_ERROR_TEXT]) {
    if (!exceeds(stalled->waited_ns, stalled->desc->limit_ms)) {
        return false;
    }
    struct wire_stall what;
    describe(job, stalled, &what, text);
    *peer = what.count > 0 ? what.ranks[0] : NB_NO_PEER;
    return true;
}

bool nb_stall_tick(struct nb_job *job, const struct stalled *stalled) {
    if (exceeds(stalled->waited_ns, job->config.stall_end_ms)) {
        char text[NB_ERROR_TEXT];
        struct wire_stall what;
        struct nb_error why = {0};
        describe(job, stalled, &what, text);
        nb_fail_peer(&why, NB_ETIMEOUT, what.count > 0 ? what.ranks[0] : NB_NO_PEER, "%s (NETBOTTLENECK_STALL_END_S)",
                     text);
        nb_job_fail(job, &why, true);
    } else if (!stalled->reported && exceeds(stalled->waited_ns, job->config.stall_ms)) {
        report(job, stalled);
        return true;
    }
    return stalled->reported;
}
