// Opening of shared memory: all ranks try, and reach the same result. Memory is shared if it works on all hosts with
// several ranks.
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/fdpass.h"
#include "base/list.h"
#include "bootstrap/bootstrap.h"
#include "engine/context.h"
#include "engine/engine.h"
#include "engine/shared.h"
#include "engine/shared_fold.h"
#include "engine/two_level.h"
#include "transport/shm.h"

enum { RENDEZVOUS_MS = 5000, TEXT_BYTES = 184 };

struct reason { // why memory is not shared
    char text[TEXT_BYTES];
    bool notify; // worth a notice to the user
};

static void why_set(char why[WHY_BYTES], const struct nb_error *err) {
    snprintf(why, WHY_BYTES, "%.*s", WHY_BYTES - 1, err->text);
}

// Maps ranks to hosts. Hosts are numbered in the order of their first rank.
struct hosts {
    int count;
    int *of;    // by rank: its host
    int *index; // by rank: its local rank
    int *size;  // by host: number of ranks
};

static void hosts_free(struct hosts *hosts) {
    free(hosts->of);
    free(hosts->index);
    free(hosts->size);
}

static int hosts_find(struct hosts *hosts, const struct shm_offer *offers, int ranks, struct nb_error *err) {
    *hosts = (struct hosts){.of = calloc((size_t)ranks, sizeof(int)),
                            .index = calloc((size_t)ranks, sizeof(int)),
                            .size = calloc((size_t)ranks, sizeof(int))};
    if (hosts->of == NULL || hosts->index == NULL || hosts->size == NULL) {
        return nb_fail(err, -ENOMEM, "cannot allocate the host table of %d ranks", ranks);
    }
    for (int r = 0; r < ranks; r++) {
        int like = 0;
        while (memcmp(offers[like].host, offers[r].host, NB_HOST_BYTES) != 0) {
            like++;
        }
        hosts->of[r] = like == r ? hosts->count++ : hosts->of[like];
        hosts->index[r] = hosts->size[hosts->of[r]]++;
    }
    return 0;
}

// True if the rank is the only one of its host while other hosts have several: its offer does not matter.
static bool is_alone(const struct hosts *hosts, int rank, int ranks) {
    return hosts->count < ranks && hosts->size[hosts->of[rank]] == 1;
}

// Writes why memory is not shared, or "" if all ranks should try.
static void offers_check(int ranks, struct shm_offer *offers, const struct hosts *hosts, char why[TEXT_BYTES],
                         bool *notify) {
    *why = 0;
    *notify = false;
    for (int r = 0; r < ranks && *why == 0; r++) {
        offers[r].why[WHY_BYTES - 1] = 0;
        offers[r].name[NB_FDPASS_NAME - 1] = 0;
        if (offers[r].mode == NB_SHM_OFF && !is_alone(hosts, r, ranks)) {
            snprintf(why, TEXT_BYTES, "rank %d disables it (NETBOTTLENECK_SHM=0)", r);
        } else if (hosts->count == ranks && r > 0) {
            snprintf(why, TEXT_BYTES, "ranks 0 and %d are on different hosts", r);
        }
    }
    for (int r = 0; r < ranks && *why == 0; r++) {
        if (offers[r].code != 0 && !is_alone(hosts, r, ranks)) {
            snprintf(why, TEXT_BYTES, "rank %d: %s", r, offers[r].why);
            *notify = true;
        } else if (hosts->index[r] == NB_SHM_RANKS_MAX) {
            snprintf(why, TEXT_BYTES, "more than %d ranks are on the host of rank %d", NB_SHM_RANKS_MAX, r);
            *notify = true;
        }
    }
}

static int outcomes_exchange(struct nb_job *job, const struct nb_error *mine, char *why, size_t room,
                             struct nb_error *err) {
    struct shm_outcome own = {.code = mine->code};
    struct shm_outcome *all = calloc((size_t)job->size, sizeof *all);
    why_set(own.why, mine);
    if (all == NULL) {
        return nb_fail(err, -ENOMEM, "cannot allocate a table of %d ranks", job->size);
    }
    int rc = nb_boot_allgather(&job->boot, &own, sizeof own, all, err);
    for (int r = 0; r < job->size && rc == 0 && *why == 0; r++) {
        all[r].why[WHY_BYTES - 1] = 0;
        if (all[r].code != 0) {
            snprintf(why, room, "rank %d: %s", r, all[r].why);
        }
    }
    free(all);
    return rc;
}

// Returns the owner of part `index` on a host, as a rank of the job.
static int owner_on(const struct hosts *hosts, int host, int index) {
    int r = 0;
    while (hosts->of[r] != host || hosts->index[r] != index) {
        r++;
    }
    return r;
}

static int rails_make(struct shared *l, const struct hosts *hosts, struct nb_error *err) {
    int to = NB_NO_PEER;
    int from = NB_NO_PEER;
    for (int h = 0; h < hosts->count; h++) {
        l->parts = hosts->size[h] < l->parts ? hosts->size[h] : l->parts;
    }
    if (l->rank < l->parts) {
        to = owner_on(hosts, (l->host + 1) % l->hosts, l->rank);
        from = owner_on(hosts, (l->host + l->hosts - 1) % l->hosts, l->rank);
    }
    return nb_two_level_open(l, to, from, err);
}

// The job owns `shm` from here on.
static int shared_make(struct nb_job *job, struct nb_shm *shm, const struct hosts *hosts, struct nb_error *err) {
    struct shared *l = calloc(1, sizeof *l);
    if (l == NULL || shm == NULL) {
        free(l);
        nb_shm_close(shm);
        return nb_fail(err, -ENOMEM, "cannot allocate the state of operations in shared memory");
    }
    size_t count = (size_t)shm->size * LOCAL_OPEN;
    job->shared = l;
    l->job = job;
    l->shm = shm;
    l->revoker = -1;
    l->rank = shm->rank;
    l->size = shm->size;
    l->hosts = hosts->count;
    l->host = hosts->of[job->rank];
    l->parts = shm->size;
    l->views = calloc(count, sizeof *l->views);
    l->rooms = calloc(count, sizeof *l->rooms);
    l->sum = aligned_alloc(NB_SHM_LINE, FOLD_BYTES);
    l->term = aligned_alloc(NB_SHM_LINE, FOLD_BYTES);
    nb_list_init(&l->queue);
    if (l->views == NULL || l->rooms == NULL || l->sum == NULL || l->term == NULL) {
        return nb_fail(err, -ENOMEM, "cannot allocate the state of operations in shared memory of %d ranks", l->size);
    }
    int rc = nb_shm_watch(shm, &job->loop, err);
    return rc == 0 && l->hosts > 1 ? rails_make(l, hosts, err) : rc;
}

void nb_shared_close(struct nb_job *job) {
    struct shared *l = job->shared;
    if (l != NULL) {
        nb_two_level_close(l);
        nb_shm_close(l->shm);
        free(l->views);
        free(l->rooms);
        free(l->sum);
        free(l->term);
        free(l);
    }
    job->shared = NULL;
}

// Connects to the other ranks of this host by the names of their sockets. All ranks call this, or none.
static int ranks_connect(struct nb_job *job, struct nb_shm *shm, const struct shm_offer *offers,
                         const struct hosts *hosts, struct nb_error *err) {
    char names[NB_SHM_RANKS_MAX][NB_FDPASS_NAME];
    int ranks[NB_SHM_RANKS_MAX];
    int size = 0;
    int index = 0;
    for (int r = 0; r < job->size; r++) {
        index = r == job->rank ? size : index;
        if (hosts->of[r] == hosts->of[job->rank]) {
            memcpy(names[size], offers[r].name, sizeof names[size]);
            ranks[size++] = r;
        }
    }
    nb_shm_group(shm, ranks, size, index);
    int64_t limit_ms = job->config.start_ms < RENDEZVOUS_MS ? job->config.start_ms : RENDEZVOUS_MS;
    return nb_shm_rendezvous(shm, (const char (*)[NB_FDPASS_NAME])names, &job->boot, job->loop.wake_fd,
                             nb_now_ns() + limit_ms * 1000000, err);
}

// Exchanges the offers of all ranks.
static int offers_exchange(struct nb_job *job, struct nb_shm **shm, struct shm_offer *all, struct nb_error *err) {
    static const unsigned char nowhere[NB_HOST_BYTES];
    struct nb_error why = {0};
    struct shm_offer own = {.mode = job->config.shm};
    memcpy(own.host, job->config.host, sizeof own.host);
    if (own.mode != NB_SHM_OFF) {
        if (memcmp(own.host, nowhere, sizeof nowhere) == 0) {
            own.code = nb_fail(&why, -EINVAL, "its host has no identifier");
        } else {
            own.code = nb_shm_open(shm, job->size < NB_SHM_RANKS_MAX ? job->size : (int)NB_SHM_RANKS_MAX, &why);
        }
    }
    why_set(own.why, &why);
    if (*shm != NULL) {
        memcpy(own.name, (*shm)->name, sizeof own.name);
    }
    return nb_boot_allgather(&job->boot, &own, sizeof own, all, err);
}

static bool required(const struct nb_job *job, const struct shm_offer *offers) {
    for (int r = 0; r < job->size; r++) {
        if (offers[r].mode == NB_SHM_REQUIRED) {
            return true;
        }
    }
    return false;
}

// Maps the memory of this host's ranks into *shm, or sets `met` to the reason: then no other rank of the host has it
// either.
static void host_share(struct nb_job *job, struct nb_shm **shm, const struct shm_offer *offers,
                       const struct hosts *hosts, struct nb_error *met) {
    if (is_alone(hosts, job->rank, job->size)) {
        nb_shm_close(*shm);
        *shm = NULL;
        (void)nb_shm_alone(shm, job->rank, met);
        return;
    }
    (void)ranks_connect(job, *shm, offers, hosts, met);
    if (met->code != 0) {
        nb_shm_close(*shm); // at once: ranks that wait for this one see it
        *shm = NULL;
    }
}

// Tries to share memory. `reason` says why not, or is "".
static int try_sharing(struct nb_job *job, struct shm_offer *offers, struct hosts *hosts, struct reason *reason,
                       struct nb_error *err) {
    struct nb_shm *shm = NULL;
    struct nb_error met = {0};
    int rc = offers_exchange(job, &shm, offers, err);
    rc = rc < 0 ? rc : hosts_find(hosts, offers, job->size, err);
    if (rc == 0) {
        offers_check(job->size, offers, hosts, reason->text, &reason->notify);
    }
    if (rc < 0 || reason->text[0] != 0) {
        nb_shm_close(shm);
        return rc;
    }
    host_share(job, &shm, offers, hosts, &met);
    if (met.code == -EINTR) {
        *err = met;
        return met.code;
    }
    reason->notify = true;
    rc = outcomes_exchange(job, &met, reason->text, TEXT_BYTES, err);
    if (rc == 0 && reason->text[0] == 0) {
        return shared_make(job, shm, hosts, err);
    }
    nb_shm_close(shm);
    return rc;
}

static void report_on(struct nb_job *job) {
    const struct shared *l = job->shared;
    if (l->hosts == 1) {
        snprintf(job->info.shm, sizeof job->info.shm, "on");
    } else {
        snprintf(job->info.shm, sizeof job->info.shm, "on: %d rank%s of this host", l->size, l->size > 1 ? "s" : "");
    }
}

static int report_off(struct nb_job *job, const struct reason *reason, bool must, struct nb_error *err) {
    snprintf(job->info.shm, sizeof job->info.shm, "off: %s", reason->text);
    if (must) {
        return nb_fail(err, -EOPNOTSUPP, "NETBOTTLENECK_SHM=1, but the ranks cannot share memory: %s", reason->text);
    }
    if (reason->notify && job->rank == 0) {
        char text[NB_ERROR_TEXT];
        snprintf(text, sizeof text, "the ranks of one host do not share memory and use the network instead: %s",
                 reason->text);
        nb_job_notify(job, text);
    }
    return 0;
}

int nb_shared_open(struct nb_job *job, struct nb_error *err) {
    struct reason reason = {.notify = false};
    struct hosts hosts = {0};
    struct shm_offer *offers = calloc((size_t)job->size, sizeof *offers);
    if (offers == NULL) {
        return nb_fail(err, -ENOMEM, "cannot allocate a table of %d ranks", job->size);
    }
    int rc = try_sharing(job, offers, &hosts, &reason, err);
    bool must = required(job, offers);
    free(offers);
    hosts_free(&hosts);
    if (rc < 0) {
        return rc;
    }
    if (reason.text[0] != 0) {
        return report_off(job, &reason, must, err);
    }
    report_on(job);
    return 0;
}
