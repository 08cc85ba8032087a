// Do the ranks of each host share memory? All of them try, and all come to the same answer: it is yes where all hosts with
// several ranks can.
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/fork.h"
#include "base/handover.h"
#include "base/list.h"
#include "bootstrap/bootstrap.h"
#include "engine/engine.h"
#include "engine/internal.h"
#include "engine/local.h"
#include "engine/local_share.h"
#include "engine/twolevel.h"
#include "transport/shm.h"

enum { MEET_MS = 5000, WHY_BYTES = 160, TEXT_BYTES = 184 };

// What each rank says before, and after. Crosses the wire.
struct offer {
    unsigned char host[NB_HOST_BYTES];
    char name[NB_HANDOVER_NAME];
    int32_t mode; // enum nb_shm_mode
    int32_t code; // why it cannot, or 0
    char why[WHY_BYTES];
};

struct reason { // why memory is not shared
    char text[TEXT_BYTES];
    bool loud; // somebody should be told
};

struct outcome {
    int32_t code;
    char why[WHY_BYTES];
};

static void why_set(char why[WHY_BYTES], const struct nb_error *err) {
    snprintf(why, WHY_BYTES, "%.*s", WHY_BYTES - 1, err->text);
}

// Which rank is on which host. Hosts are numbered as they come, and so are the ranks of each.
struct hosts {
    int count;
    int *of;    // by rank
    int *index; // by rank: among those of its host
    int *size;  // by host: how many ranks it has
};

static void hosts_free(struct hosts *hosts) {
    free(hosts->of);
    free(hosts->index);
    free(hosts->size);
}

static int hosts_find(struct hosts *hosts, const struct offer *offers, int ranks, struct nb_error *err) {
    *hosts = (struct hosts){.of = calloc((size_t)ranks, sizeof(int)),
                            .index = calloc((size_t)ranks, sizeof(int)),
                            .size = calloc((size_t)ranks, sizeof(int))};
    if (hosts->of == NULL || hosts->index == NULL || hosts->size == NULL) {
        return nb_fail(err, -ENOMEM, "the hosts of %d ranks", ranks);
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

// Whether a rank has nobody to share with, while others have: whatever it says, it is in nobody's way.
static bool is_alone(const struct hosts *hosts, int rank, int ranks) {
    return hosts->count < ranks && hosts->size[hosts->of[rank]] == 1;
}

// Why no rank needs to try; "" where all shall.
static void offers_judge(int ranks, struct offer *offers, const struct hosts *hosts, char why[TEXT_BYTES], bool *loud) {
    *why = 0;
    *loud = false;
    for (int r = 0; r < ranks && *why == 0; r++) {
        offers[r].why[WHY_BYTES - 1] = 0;
        offers[r].name[NB_HANDOVER_NAME - 1] = 0;
        if (offers[r].mode == NB_SHM_OFF && !is_alone(hosts, r, ranks)) {
            snprintf(why, TEXT_BYTES, "rank %d was told not to", r);
        } else if (hosts->count == ranks && r > 0) {
            snprintf(why, TEXT_BYTES, "ranks 0 and %d are on different hosts", r);
        }
    }
    for (int r = 0; r < ranks && *why == 0; r++) {
        if (offers[r].code != 0 && !is_alone(hosts, r, ranks)) {
            snprintf(why, TEXT_BYTES, "rank %d: %s", r, offers[r].why);
            *loud = true;
        } else if (hosts->index[r] == NB_SHM_RANKS_MAX) {
            snprintf(why, TEXT_BYTES, "more than %d ranks are on the host of rank %d", NB_SHM_RANKS_MAX, r);
            *loud = true;
        }
    }
}

static int outcomes_exchange(struct nb_job *job, const struct nb_error *mine, char *why, size_t room,
                             struct nb_error *err) {
    struct outcome own = {.code = mine->code};
    struct outcome *all = calloc((size_t)job->size, sizeof *all);
    why_set(own.why, mine);
    if (all == NULL) {
        return nb_fail(err, -ENOMEM, "%d ranks", job->size);
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

// The owner of this rank's part on another host, in ranks of the job.
static int owner_on(const struct hosts *hosts, int host, int index) {
    int r = 0;
    while (hosts->of[r] != host || hosts->index[r] != index) {
        r++;
    }
    return r;
}

static int rails_make(struct local *l, const struct hosts *hosts, struct nb_error *err) {
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

// The memory is the job's from here.
static int local_make(struct nb_job *job, struct nb_shm *shm, const struct hosts *hosts, struct nb_error *err) {
    struct local *l = calloc(1, sizeof *l);
    if (l == NULL || shm == NULL) {
        free(l);
        nb_shm_close(shm);
        return nb_fail(err, -ENOMEM, "operations in shared memory");
    }
    size_t lines = (size_t)shm->size * LOCAL_OPEN;
    job->local = l;
    l->job = job;
    l->shm = shm;
    l->rank = shm->rank;
    l->size = shm->size;
    l->hosts = hosts->count;
    l->host = hosts->of[job->rank];
    l->parts = shm->size;
    l->lines = calloc(lines, sizeof *l->lines);
    l->rooms = calloc(lines, sizeof *l->rooms);
    l->sum = aligned_alloc(NB_SHM_LINE, FOLD_BYTES);
    l->term = aligned_alloc(NB_SHM_LINE, FOLD_BYTES);
    nb_list_init(&l->queue);
    if (l->lines == NULL || l->rooms == NULL || l->sum == NULL || l->term == NULL) {
        return nb_fail(err, -ENOMEM, "operations in shared memory of %d ranks", l->size);
    }
    int rc = nb_shm_watch(shm, &job->loop, err);
    return rc == 0 && l->hosts > 1 ? rails_make(l, hosts, err) : rc;
}

void nb_local_close(struct nb_job *job) {
    struct local *l = job->local;
    if (l != NULL) {
        nb_two_level_close(l);
        nb_shm_close(l->shm);
        free(l->lines);
        free(l->rooms);
        free(l->sum);
        free(l->term);
        free(l);
    }
    job->local = NULL;
}

// Meets the others of this host over the names of their sockets. All ranks come here, or none.
static int ranks_meet(struct nb_job *job, struct nb_shm *shm, const struct offer *offers, const struct hosts *hosts,
                      struct nb_error *err) {
    char names[NB_SHM_RANKS_MAX][NB_HANDOVER_NAME];
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
    int64_t limit_ms = job->config.start_ms < MEET_MS ? job->config.start_ms : MEET_MS;
    return nb_shm_meet(shm, (const char (*)[NB_HANDOVER_NAME])names, &job->boot, job->loop.wake_fd,
                       nb_now_ns() + limit_ms * 1000000, err);
}

// The offers of all ranks, this one's among them.
static int offers_exchange(struct nb_job *job, struct nb_shm **shm, struct offer *all, struct nb_error *err) {
    static const unsigned char nowhere[NB_HOST_BYTES];
    struct nb_error why = {0};
    struct offer own = {.mode = job->config.shm};
    memcpy(own.host, job->config.host, sizeof own.host);
    if (own.mode != NB_SHM_OFF) {
        if (memcmp(own.host, nowhere, sizeof nowhere) == 0) {
            own.code = nb_fail(&why, -EINVAL, "its host has no name");
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

static bool required(const struct nb_job *job, const struct offer *offers) {
    for (int r = 0; r < job->size; r++) {
        if (offers[r].mode == NB_SHM_REQUIRED) {
            return true;
        }
    }
    return false;
}

// Has the memory of this host's ranks in *shm, or why not in `met`: then nobody else has it either.
static void host_share(struct nb_job *job, struct nb_shm **shm, const struct offer *offers, const struct hosts *hosts,
                       struct nb_error *met) {
    if (is_alone(hosts, job->rank, job->size)) {
        nb_shm_close(*shm);
        *shm = NULL;
        (void)nb_shm_alone(shm, job->rank, met);
        return;
    }
    (void)ranks_meet(job, *shm, offers, hosts, met);
    if (met->code != 0) {
        nb_shm_close(*shm); // at once: whoever waits for this rank sees it
        *shm = NULL;
    }
}

// Why memory is not shared, "" where it is.
static int local_try(struct nb_job *job, struct offer *offers, struct hosts *hosts, struct reason *reason,
                     struct nb_error *err) {
    struct nb_shm *shm = NULL;
    struct nb_error met = {0};
    int rc = offers_exchange(job, &shm, offers, err);
    rc = rc < 0 ? rc : hosts_find(hosts, offers, job->size, err);
    if (rc == 0) {
        offers_judge(job->size, offers, hosts, reason->text, &reason->loud);
    }
    if (rc < 0 || reason->text[0] != 0) {
        nb_shm_close(shm);
        return rc;
    }
    host_share(job, &shm, offers, hosts, &met);
    reason->loud = true;
    rc = outcomes_exchange(job, &met, reason->text, TEXT_BYTES, err);
    if (rc == 0 && reason->text[0] == 0) {
        return local_make(job, shm, hosts, err);
    }
    nb_shm_close(shm);
    return rc;
}

static void tell_on(struct nb_job *job) {
    const struct local *l = job->local;
    if (l->hosts == 1) {
        snprintf(job->info.shm, sizeof job->info.shm, "on");
    } else {
        snprintf(job->info.shm, sizeof job->info.shm, "on: %d rank%s of this host", l->size, l->size > 1 ? "s" : "");
    }
}

static int tell_off(struct nb_job *job, const struct reason *reason, bool must, struct nb_error *err) {
    snprintf(job->info.shm, sizeof job->info.shm, "off: %s", reason->text);
    if (must) {
        return nb_fail(err, -EOPNOTSUPP, "NETBOTTLENECK_SHM=1, but the ranks cannot share memory: %s", reason->text);
    }
    if (reason->loud && job->rank == 0) {
        char text[NB_ERROR_TEXT];
        snprintf(text, sizeof text, "the ranks of one host share no memory and use the network between them: %s",
                 reason->text);
        nb_job_notify(job, text);
    }
    return 0;
}

int nb_local_open(struct nb_job *job, struct nb_error *err) {
    struct reason reason = {.loud = false};
    struct hosts hosts = {0};
    struct offer *offers = calloc((size_t)job->size, sizeof *offers);
    if (offers == NULL) {
        return nb_fail(err, -ENOMEM, "%d ranks", job->size);
    }
    int rc = local_try(job, offers, &hosts, &reason, err);
    bool must = required(job, offers);
    free(offers);
    hosts_free(&hosts);
    if (rc < 0) {
        return rc;
    }
    if (reason.text[0] != 0) {
        return tell_off(job, &reason, must, err);
    }
    tell_on(job);
    return 0;
}

void nb_local_private(struct nb_job *job, size_t bytes, int why) {
    char text[NB_ERROR_TEXT];
    if (job->local == NULL || job->local->private_told) {
        return;
    }
    job->local->private_told = true;
    const char *reason = why == -EFBIG   ? " (ulimit -f is lower)"
                         : why == -EBUSY ? " (a rank that stopped answering still holds it)"
                                         : "";
    snprintf(text, sizeof text,
             "memory of %zu bytes cannot be passed to the other ranks of this host and is copied on its way, which is "
             "slower: %s%s",
             bytes, nb_code_name(why), reason);
    nb_job_notify(job, text);
}

void nb_local_map(struct nb_job *job, void *base, size_t bytes, int fd) {
    struct nb_error err = {0};
    struct local *l = job->local;
    int rc = fd >= 0 && l != NULL ? nb_shm_offer(l->shm, base, bytes, fd, &err) : 0;
    if (rc < 0 && (rc != -ENOSPC || !l->limit_told)) {
        nb_job_notify(job, err.text); // it goes through staging
    }
    if (rc == -ENOSPC) {
        l->limit_told = true;
    }
    if (fd >= 0) {
        nb_fork_close(fd);
    }
}

void nb_local_unmap(struct nb_job *job, const void *base) {
    if (job->local != NULL && !job->failed) { // else others may be at operations that have failed here
        nb_shm_withdraw(job->local->shm, base);
    }
}
