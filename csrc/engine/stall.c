// What does rank 0 do about an operation that some rank does not submit?
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

// What it waits for, in words; returns the first of the ranks that are missing.
static int describe(const struct nb_job *job, const struct stalled *stalled, char text[NB_ERROR_TEXT]) {
    int first = NB_NO_PEER;
    int n = snprintf(text, NB_ERROR_TEXT,
                     "'%s' waits for %.0f s already. Ranks that have not submitted it:", stalled->desc->name,
                     (double)stalled->waited_ns / 1e9);
    for (int r = 0; r < job->size && n < NB_ERROR_TEXT - 48; r++) {
        bool owes = nb_group_has(stalled->group, r) && !nb_bits_get(stalled->have, (size_t)r);
        if (owes && !nb_join_has(job, r)) {
            n += snprintf(text + n, NB_ERROR_TEXT - (size_t)n, " %d", r);
            first = first == NB_NO_PEER ? r : first;
        }
    }
    return first;
}

static void tell(struct nb_job *job, const struct stalled *stalled) {
    char text[NB_ERROR_TEXT];
    uint64_t all = job->size < 64 ? ((uint64_t)1 << job->size) - 1 : ~(uint64_t)0;
    (void)describe(job, stalled, text);
    nb_ring_put(job->config.ring, NB_EV_STALL, stalled->desc->key, stalled->round, (uint64_t)stalled->waited_ns,
                ~stalled->have[0] & (stalled->group != NULL ? stalled->group->members[0] : all), 0, 0);
    nb_job_notify(job, text);
    nb_control_broadcast(job, CTL_NOTICE, text, strlen(text));
}

bool nb_stall_tick(struct nb_job *job, const struct stalled *stalled) {
    if (beyond(stalled->waited_ns, job->config.stall_end_ms)) {
        char text[NB_ERROR_TEXT];
        struct nb_error why = {0};
        int missing = describe(job, stalled, text);
        nb_fail_peer(&why, NB_ETIMEOUT, missing, "%s (NETBOTTLENECK_STALL_END_S)", text);
        nb_job_fail(job, &why, true);
    } else if (!stalled->told && beyond(stalled->waited_ns, job->config.stall_ms)) {
        tell(job, stalled);
        return true;
    }
    return stalled->told;
}
