// Shared memory of a host's ranks: which ranks share it, how they wake each other, and which arenas are in it.
#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "base/error.h"
#include "base/fork.h"
#include "engine/context.h"
#include "engine/engine.h"
#include "engine/shared.h"
#include "engine/shared_fold.h"
#include "transport/shm.h"

bool nb_shared_everywhere(const struct nb_job *job) {
    return job->shared != NULL && job->shared->rails == NULL;
}

void nb_shared_pipes(const struct nb_job *job, int peer, struct nb_shm_pipe **in, struct nb_shm_pipe **out) {
    struct nb_shm_area *area =
        nb_shared_area(job->shared, peer == 0 ? job->rank : peer); // local ranks are the job's ranks here
    *in = peer == 0 ? &area->from_first : &area->to_first;
    *out = peer == 0 ? &area->to_first : &area->from_first;
}

void nb_shared_wake(const struct nb_job *job, int peer) {
    nb_shm_wake_one(job->shared->shm, peer);
}

void nb_shared_sleep(const struct nb_job *job) {
    nb_shm_mark_asleep(job->shared->shm);
}

int nb_shared_hosts(const struct nb_job *job) {
    return job->shared != NULL && job->shared->rails != NULL ? job->shared->hosts : 1;
}

size_t nb_shared_piece_bytes(const struct nb_job *job) {
    return nb_shared_hosts(job) > 1 ? (size_t)job->shared->parts * job->shared->piece_bytes : 0;
}

void nb_shared_private(struct nb_job *job, size_t bytes, int why) {
    char text[NB_ERROR_TEXT];
    if (job->shared == NULL || job->shared->private_told) {
        return;
    }
    job->shared->private_told = true;
    const char *reason = why == -EFBIG   ? " (ulimit -f is lower)"
                         : why == -EBUSY ? " (a rank that stopped answering still holds it)"
                                         : "";
    snprintf(text, sizeof text,
             "memory of %zu bytes cannot be passed to the other ranks of this host and is copied on its way, which is "
             "slower: %s%s",
             bytes, nb_code_name(why), reason);
    nb_job_notify(job, text);
}

void nb_shared_map(struct nb_job *job, void *base, size_t bytes, int fd) {
    struct nb_error err = {0};
    struct shared *l = job->shared;
    int rc = fd >= 0 && l != NULL ? nb_shm_offer(l->shm, base, bytes, fd, &err) : 0;
    if (rc < 0 && (rc != -ENOSPC || !l->limit_reported)) {
        nb_job_notify(job, err.text); // it goes through staging
    }
    if (rc == -ENOSPC) {
        l->limit_reported = true;
    }
    if (fd >= 0) {
        nb_fork_close(fd);
    }
}

void nb_shared_unmap(struct nb_job *job, const void *base) {
    if (job->shared != NULL && !job->failed) { // after a failure other ranks may still use the memory
        nb_shm_withdraw(job->shared->shm, base);
    }
}
