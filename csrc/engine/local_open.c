// Do the ranks of this job share memory? All of them try, and all come to the same answer.
#include <errno.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/handover.h"
#include "base/list.h"
#include "bootstrap/bootstrap.h"
#include "engine/engine.h"
#include "engine/internal.h"
#include "engine/local.h"
#include "engine/local_share.h"
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

struct outcome {
    int32_t code;
    char why[WHY_BYTES];
};

static void why_set(char why[WHY_BYTES], const struct nb_error *err) {
    snprintf(why, WHY_BYTES, "%.*s", WHY_BYTES - 1, err->text);
}

// Why no rank needs to try; "" where all shall.
static void offers_judge(const struct nb_job *job, struct offer *offers, char *why, size_t room, bool *loud) {
    *why = 0;
    *loud = false;
    for (int r = 0; r < job->size && *why == 0; r++) {
        offers[r].why[WHY_BYTES - 1] = 0;
        offers[r].name[NB_HANDOVER_NAME - 1] = 0;
        if (offers[r].mode == NB_SHM_OFF) {
            snprintf(why, room, "rank %d was told not to", r);
        } else if (memcmp(offers[r].host, offers[0].host, NB_HOST_BYTES) != 0) {
            snprintf(why, room, "ranks 0 and %d are on different hosts", r);
        }
    }
    for (int r = 0; r < job->size && *why == 0; r++) {
        if (offers[r].code != 0) {
            snprintf(why, room, "rank %d: %s", r, offers[r].why);
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

static bool cores_for(int ranks) {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) >= ranks;
}

static int local_make(struct nb_job *job, struct nb_shm *shm, struct nb_error *err) {
    struct local *l = calloc(1, sizeof *l);
    size_t size = (size_t)job->size;
    if (l == NULL) {
        nb_shm_close(shm);
        return nb_fail(err, -ENOMEM, "operations in shared memory");
    }
    job->local = l;
    l->job = job;
    l->shm = shm;
    l->rank = job->rank;
    l->size = job->size;
    l->spins = cores_for(job->size);
    l->lines = calloc(size, sizeof *l->lines);
    l->rooms = calloc(size, sizeof *l->rooms);
    l->sum = aligned_alloc(NB_SHM_LINE, FOLD_BYTES);
    l->term = aligned_alloc(NB_SHM_LINE, FOLD_BYTES);
    nb_list_init(&l->queue);
    if (l->lines == NULL || l->rooms == NULL || l->sum == NULL || l->term == NULL) {
        return nb_fail(err, -ENOMEM, "operations in shared memory of %d ranks", job->size);
    }
    return nb_shm_watch(shm, &job->loop, err);
}

void nb_local_close(struct nb_job *job) {
    struct local *l = job->local;
    if (l != NULL) {
        nb_shm_close(l->shm);
        free(l->lines);
        free(l->rooms);
        free(l->sum);
        free(l->term);
        free(l);
    }
    job->local = NULL;
}

// Meets the others over the names of their sockets. All ranks come here, or none.
static int ranks_meet(struct nb_job *job, struct nb_shm *shm, const struct offer *offers, struct nb_error *err) {
    char (*names)[NB_HANDOVER_NAME] = calloc((size_t)job->size, sizeof *names);
    int64_t limit_ms = job->config.start_ms < MEET_MS ? job->config.start_ms : MEET_MS;
    if (names == NULL) {
        return nb_fail(err, -ENOMEM, "%d ranks of this host", job->size);
    }
    for (int r = 0; r < job->size; r++) {
        memcpy(names[r], offers[r].name, sizeof names[r]);
    }
    int rc = nb_shm_meet(shm, (const char (*)[NB_HANDOVER_NAME])names, &job->boot, job->loop.wake_fd,
                         nb_now_ns() + limit_ms * 1000000, err);
    free(names);
    return rc;
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
        } else if (job->size > NB_SHM_RANKS_MAX) {
            own.code = nb_fail(&why, -E2BIG, "more than %d ranks", NB_SHM_RANKS_MAX);
        } else {
            own.code = nb_shm_open(shm, job->rank, job->size, &why);
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

// Why memory is not shared, "" where it is; shm belongs to the job then.
static int local_try(struct nb_job *job, struct offer *offers, char *why, bool *loud, struct nb_error *err) {
    struct nb_shm *shm = NULL;
    struct nb_error met = {0};
    int rc = offers_exchange(job, &shm, offers, err);
    if (rc == 0) {
        offers_judge(job, offers, why, TEXT_BYTES, loud);
    }
    if (rc < 0 || *why != 0) {
        nb_shm_close(shm);
        return rc;
    }
    (void)ranks_meet(job, shm, offers, &met);
    if (met.code != 0) {
        nb_shm_close(shm); // at once: whoever waits for this rank sees it
        shm = NULL;
    }
    *loud = true;
    rc = outcomes_exchange(job, &met, why, TEXT_BYTES, err);
    if (rc == 0 && *why == 0) {
        return local_make(job, shm, err);
    }
    nb_shm_close(shm);
    return rc;
}

int nb_local_open(struct nb_job *job, struct nb_error *err) {
    char why[TEXT_BYTES] = "";
    bool loud = false;
    struct offer *offers = calloc((size_t)job->size, sizeof *offers);
    if (offers == NULL) {
        return nb_fail(err, -ENOMEM, "%d ranks", job->size);
    }
    int rc = local_try(job, offers, why, &loud, err);
    bool must = required(job, offers);
    free(offers);
    if (rc < 0) {
        return rc;
    }
    if (*why == 0) {
        snprintf(job->info.shm, sizeof job->info.shm, "on");
        return 0;
    }
    snprintf(job->info.shm, sizeof job->info.shm, "off: %s", why);
    if (must) {
        return nb_fail(err, -EOPNOTSUPP, "NETBOTTLENECK_SHM=1, but the ranks cannot share memory: %s", why);
    }
    if (loud && job->rank == 0) {
        char text[NB_ERROR_TEXT];
        snprintf(text, sizeof text, "the ranks of this host share no memory and use the network between them: %s", why);
        nb_job_notify(job, text);
    }
    return 0;
}

void nb_local_map(struct nb_job *job, void *base, size_t bytes, int fd) {
    struct nb_error err = {0};
    if (fd >= 0 && job->local != NULL && nb_shm_offer(job->local->shm, base, bytes, fd, &err) < 0) {
        nb_job_notify(job, err.text); // it goes through staging
    }
    if (fd >= 0) {
        close(fd);
    }
}
