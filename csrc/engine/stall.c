// What does rank 0 do about an operation that some rank does not submit?
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "base/bits.h"
#include "base/error.h"
#include "engine/engine.h"
#include "engine/group.h"
#include "engine/internal.h"
#include "engine/join.h"
#include "trace/event.h"
#include "trace/ring.h"

static bool beyond(int64_t waited_ns, int limit_ms) {
    return limit_ms > 0 && waited_ns > (int64_t)limit_ms * 1000000;
}

// What it waits for: the ranks that are missing, and in words.
static void describe(const struct nb_job *job, const struct stalled *stalled, struct wire_stall *out,
                     char text[NB_ERROR_TEXT]) {
    *out = (struct wire_stall){.key = stalled->desc->key};
    int n = snprintf(text, NB_ERROR_TEXT,
                     "'%s' waits for %.0f s already. Ranks that have not submitted it:", stalled->desc->name,
                     (double)stalled->waited_ns / 1e9);
    for (int r = 0; r < job->size && n < NB_ERROR_TEXT - 48; r++) {
        bool owes = nb_group_has(stalled->group, r) && !nb_bits_get(stalled->have, (size_t)r);
        if (owes && !nb_join_has(job, r)) {
            n += snprintf(text + n, NB_ERROR_TEXT - (size_t)n, " %d", r);
            if (out->count < NB_MISSING_MAX) {
                out->ranks[out->count++] = r;
            }
        }
    }
}

static void keep(struct nb_job *job, const struct wire_stall *told) {
    pthread_mutex_lock(&job->lock);
    job->stalls[job->stall_count++ % NB_STALLS_KEPT] = *told;
    pthread_mutex_unlock(&job->lock);
}

static void tell(struct nb_job *job, const struct stalled *stalled) {
    struct {
        struct wire_stall what;
        char text[NB_ERROR_TEXT];
    } told;
    uint64_t all = job->size < 64 ? ((uint64_t)1 << job->size) - 1 : ~(uint64_t)0;
    describe(job, stalled, &told.what, told.text);
    nb_ring_put(job->config.ring, NB_EV_STALL, stalled->desc->key, stalled->round, (uint64_t)stalled->waited_ns,
                ~stalled->have[0] & (stalled->group != NULL ? stalled->group->members[0] : all), 0, 0);
    keep(job, &told.what);
    nb_job_notify(job, told.text);
    nb_control_broadcast(job, CTL_STALL, &told, sizeof told.what + strlen(told.text));
}

void nb_stall_heard(struct nb_job *job, const unsigned char *body, size_t bytes) {
    struct wire_stall told;
    char text[NB_ERROR_TEXT] = {0};
    memcpy(&told, body, sizeof told);
    memcpy(text, body + sizeof told, bytes - sizeof told);
    bool possible = told.count >= 0 && told.count <= NB_MISSING_MAX;
    for (int i = 0; possible && i < told.count; i++) {
        possible = told.ranks[i] >= 0 && told.ranks[i] < job->size;
    }
    if (!possible) {
        nb_job_wire_fail(job, 0, "a stall of ranks that are none");
        return;
    }
    keep(job, &told);
    nb_job_notify(job, text);
}

int nb_comm_missing(struct nb_comm *comm, const char *name, int32_t ranks[NB_MISSING_MAX]) {
    struct nb_job *job = comm->job;
    uint64_t key = nb_comm_key(comm, nb_key(name));
    int count = 0;
    pthread_mutex_lock(&job->lock);
    uint32_t kept = job->stall_count < NB_STALLS_KEPT ? job->stall_count : NB_STALLS_KEPT;
    for (uint32_t back = 1; back <= kept && count == 0; back++) {
        const struct wire_stall *told = &job->stalls[(job->stall_count - back) % NB_STALLS_KEPT];
        if (told->key == key) {
            count = told->count;
            memcpy(ranks, told->ranks, sizeof told->ranks);
        }
    }
    pthread_mutex_unlock(&job->lock);
    return count;
}

bool nb_stall_over(const struct nb_job *job, const struct stalled *stalled, int32_t *peer, char text[NB_ERROR_TEXT]) {
    if (!beyond(stalled->waited_ns, stalled->desc->limit_ms)) {
        return false;
    }
    struct wire_stall what;
    describe(job, stalled, &what, text);
    *peer = what.count > 0 ? what.ranks[0] : NB_NO_PEER;
    return true;
}

bool nb_stall_tick(struct nb_job *job, const struct stalled *stalled) {
    if (beyond(stalled->waited_ns, job->config.stall_end_ms)) {
        char text[NB_ERROR_TEXT];
        struct wire_stall what;
        struct nb_error why = {0};
        describe(job, stalled, &what, text);
        nb_fail_peer(&why, NB_ETIMEOUT, what.count > 0 ? what.ranks[0] : NB_NO_PEER, "%s (NETBOTTLENECK_STALL_END_S)",
                     text);
        nb_job_fail(job, &why, true);
    } else if (!stalled->told && beyond(stalled->waited_ns, job->config.stall_ms)) {
        tell(job, stalled);
        return true;
    }
    return stalled->told;
}
