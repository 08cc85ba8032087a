// Preflight check: the ranks exchange their settings before any of them uses a lane. All ranks reach the same result,
// and none waits for a rank that gave up.
#include "engine/preflight.h"

#include <errno.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "bootstrap/bootstrap.h"
#include "engine/context.h"
#include "engine/engine.h"

static int cpus_check(const struct nb_job_config *config, struct nb_error *err) {
    long there = sysconf(_SC_NPROCESSORS_CONF);
    for (int i = 0; i < config->cpu_count; i++) {
        if (config->cpus[i] < 0 || config->cpus[i] >= there) {
            return nb_fail(err, -ENODEV, "CPU %d of a communication thread does not exist: choose 0 to %ld",
                           config->cpus[i], there - 1);
        }
    }
    return 0;
}

// Lane i connects interface i of one rank to interface i of the other, so all ranks need the same number of them.
static int interface_counts_check(const struct preflight_report *all, int size, struct nb_error *err) {
    for (int r = 1; r < size; r++) {
        if (all[r].interfaces != all[0].interfaces) {
            return nb_fail(err, NB_EMISMATCH,
                           "rank 0 spreads its lanes over %d interfaces (%s), rank %d over %d (%s): name the same "
                           "number on every rank with NETBOTTLENECK_IFNAME, in matching order",
                           all[0].interfaces, all[0].names, r, all[r].interfaces, all[r].names);
        }
    }
    return 0;
}

// Local rank of `rank`.
static int local_rank(const struct preflight_report *all, int rank) {
    int before = 0;
    for (int r = 0; r < rank; r++) {
        before += memcmp(all[r].host, all[rank].host, NB_HOST_BYTES) == 0;
    }
    return before;
}

static bool cores_for_all(const struct preflight_report *all, int size, int rank) {
    cpu_set_t cpus;
    int ranks = 0;
    for (int r = 0; r < size; r++) {
        ranks += memcmp(all[r].host, all[rank].host, NB_HOST_BYTES) == 0;
    }
    return sched_getaffinity(0, sizeof cpus, &cpus) == 0 && CPU_COUNT(&cpus) >= ranks;
}

static int cpu_counts_check(const struct preflight_report *all, int size, struct nb_error *err) {
    for (int r = 0; r < size; r++) {
        int place = local_rank(all, r);
        if (all[r].cpus > 0 && place >= all[r].cpus) {
            return nb_fail(err, -ENODEV, "rank %d has local rank %d, but only %d CPU%s named for communication threads",
                           r, place, all[r].cpus, all[r].cpus == 1 ? " is" : "s are");
        }
    }
    return 0;
}

static int all_check(struct preflight_report *all, int size, struct nb_error *err) {
    for (int r = 0; r < size; r++) {
        all[r].names[INTERFACES_TEXT - 1] = 0;
        if (all[r].code < 0) {
            return nb_fail_peer(err, NB_EPEER, r, "rank %d could not open its lanes (%s): see its own message", r,
                                nb_code_name(all[r].code));
        }
    }
    int rc = interface_counts_check(all, size, err);
    return rc == 0 ? cpu_counts_check(all, size, err) : rc;
}

static void names_format(const struct binds *binds, int count, char text[INTERFACES_TEXT]) {
    size_t used = 0;
    for (int i = 0; i < count && used < INTERFACES_TEXT; i++) {
        used += (size_t)snprintf(text + used, INTERFACES_TEXT - used, "%s%s", i > 0 ? "," : "", binds->names[i]);
    }
}

int nb_job_preflight(struct nb_job *job, const struct binds *binds, int rc, struct nb_error *err) {
    const struct nb_job_config *config = &job->config;
    struct preflight_report mine = {.code = rc, .cpus = config->cpu_count};
    struct preflight_report *all = calloc((size_t)job->size, sizeof *all);
    if (rc == 0) {
        rc = mine.code = cpus_check(config, err);
        mine.interfaces = binds->count < job->info.streams_open ? binds->count : job->info.streams_open;
        names_format(binds, mine.interfaces, mine.names);
    }
    memcpy(mine.host, config->host, NB_HOST_BYTES);
    struct nb_error exchange = {0};
    if (all == NULL || nb_boot_allgather(&job->boot, &mine, sizeof mine, all, &exchange) < 0) {
        free(all);
        if (err->code == 0) {
            *err = exchange;
        }
        rc = rc < 0 ? rc : nb_fail(err, -ENOMEM, "cannot allocate a table of %d ranks", job->size);
        return err->code != 0 ? err->code : rc;
    }
    if (rc == 0) {
        rc = all_check(all, job->size, err);
    }
    job->progress.may_spin = rc == 0 && cores_for_all(all, job->size, job->rank);
    if (rc == 0 && config->cpu_count > 0) {
        job->info.cpu = config->cpus[local_rank(all, job->rank)];
    }
    free(all);
    return rc;
}
