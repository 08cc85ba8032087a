// What the ranks tell each other before any of them uses a lane: all come to the same answer, and nobody waits for a
// rank that gave up.
#include <errno.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "bootstrap/bootstrap.h"
#include "engine/engine.h"
#include "engine/internal.h"

enum { INTERFACES_TEXT = 64 };

// Crosses the wire.
struct present {
    int32_t code; // why this rank's lanes are not open, or 0
    int32_t interfaces;
    int32_t cpus; // how many are named for communication threads
    char names[INTERFACES_TEXT];
    unsigned char host[NB_HOST_BYTES];
};

static int cpus_check(const struct nb_job_config *config, struct nb_error *err) {
    long there = sysconf(_SC_NPROCESSORS_CONF);
    for (int i = 0; i < config->cpu_count; i++) {
        if (config->cpus[i] < 0 || config->cpus[i] >= there) {
            return nb_fail(err, -ENODEV, "there is no CPU %d for a communication thread: 0 to %ld", config->cpus[i],
                           there - 1);
        }
    }
    return 0;
}

// Lane i goes from interface i of one rank to interface i of the other: with another count it would end elsewhere.
static int interfaces_judge(const struct present *all, int size, struct nb_error *err) {
    for (int r = 1; r < size; r++) {
        if (all[r].interfaces != all[0].interfaces) {
            return nb_fail(err, NB_EMISMATCH,
                           "rank 0 spreads its lanes over %d interfaces (%s), rank %d over %d (%s): name as many on "
                           "every rank with NETBOTTLENECK_IFNAME, in an order such that each reaches its counterpart",
                           all[0].interfaces, all[0].names, r, all[r].interfaces, all[r].names);
        }
    }
    return 0;
}

// Rank r is the how manyth of its host, from 0.
static int place_on_host(const struct present *all, int rank) {
    int before = 0;
    for (int r = 0; r < rank; r++) {
        before += memcmp(all[r].host, all[rank].host, NB_HOST_BYTES) == 0;
    }
    return before;
}

static bool cores_for_all(const struct present *all, int size, int rank) {
    cpu_set_t cpus;
    int ranks = 0;
    for (int r = 0; r < size; r++) {
        ranks += memcmp(all[r].host, all[rank].host, NB_HOST_BYTES) == 0;
    }
    return sched_getaffinity(0, sizeof cpus, &cpus) == 0 && CPU_COUNT(&cpus) >= ranks;
}

static int cpus_judge(const struct present *all, int size, struct nb_error *err) {
    for (int r = 0; r < size; r++) {
        int place = place_on_host(all, r);
        if (all[r].cpus > 0 && place >= all[r].cpus) {
            return nb_fail(err, -ENODEV,
                           "rank %d is number %d of its host, and %d CPU%s named for communication threads", r,
                           place + 1, all[r].cpus, all[r].cpus == 1 ? " is" : "s are");
        }
    }
    return 0;
}

static int all_judge(struct present *all, int size, struct nb_error *err) {
    for (int r = 0; r < size; r++) {
        all[r].names[INTERFACES_TEXT - 1] = 0;
        if (all[r].code < 0) {
            return nb_fail_peer(err, NB_EPEER, r, "rank %d could not open its lanes (%s): see its own message", r,
                                nb_code_name(all[r].code));
        }
    }
    int rc = interfaces_judge(all, size, err);
    return rc == 0 ? cpus_judge(all, size, err) : rc;
}

static void names_write(const struct binds *binds, int count, char text[INTERFACES_TEXT]) {
    size_t used = 0;
    for (int i = 0; i < count && used < INTERFACES_TEXT; i++) {
        used += (size_t)snprintf(text + used, INTERFACES_TEXT - used, "%s%s", i > 0 ? "," : "", binds->names[i]);
    }
}

int nb_job_muster(struct nb_job *job, const struct binds *binds, int rc, struct nb_error *err) {
    const struct nb_job_config *config = &job->config;
    struct present mine = {.code = rc, .cpus = config->cpu_count};
    struct present *all = calloc((size_t)job->size, sizeof *all);
    if (rc == 0) {
        rc = mine.code = cpus_check(config, err);
        mine.interfaces = binds->count < job->info.streams_open ? binds->count : job->info.streams_open;
        names_write(binds, mine.interfaces, mine.names);
    }
    memcpy(mine.host, config->host, NB_HOST_BYTES);
    struct nb_error exchange = {0};
    if (all == NULL || nb_boot_allgather(&job->boot, &mine, sizeof mine, all, &exchange) < 0) {
        free(all);
        if (err->code == 0) {
            *err = exchange;
        }
        rc = rc < 0 ? rc : nb_fail(err, -ENOMEM, "%d ranks", job->size);
        return err->code != 0 ? err->code : rc;
    }
    if (rc == 0) {
        rc = all_judge(all, job->size, err);
    }
    job->spins = rc == 0 && cores_for_all(all, job->size, job->rank);
    if (rc == 0 && config->cpu_count > 0) {
        job->info.cpu = config->cpus[place_on_host(all, job->rank)];
    }
    free(all);
    return rc;
}
