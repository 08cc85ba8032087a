// Communicators: a rank's own, and rank 0's record of what all ranks have announced.
#include "engine/communicator.h"

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/bits.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/list.h"
#include "engine/context.h"
#include "engine/control.h"
#include "engine/engine.h"

enum { GROUPS_MAX = 64 * 1024 }; // of a rank

int nb_comm_rank(const struct nb_comm *comm) {
    return comm->rank;
}

int nb_comm_size(const struct nb_comm *comm) {
    return comm->size;
}

int nb_comm_peer(const struct nb_comm *comm, int rank) {
    return comm->ranks == NULL || rank < 0 ? rank : comm->ranks[rank];
}

bool nb_comm_is_whole(const struct nb_comm *comm) {
    return comm->size == comm->job->size;
}

bool nb_comm_has(const struct nb_comm *comm, int job_rank) {
    for (int i = 0; comm->ranks != NULL && i < comm->size; i++) {
        if (comm->ranks[i] == job_rank) {
            return true;
        }
    }
    return comm->ranks == NULL;
}

uint64_t nb_comm_key(const struct nb_comm *comm, uint64_t key) {
    return key ^ (uint64_t)comm->id * 0x9e3779b97f4a7c15u;
}

static int ranks_check(const struct nb_job *job, uint32_t id, const int *ranks, int count, struct nb_error *err) {
    bool here = false;
    if (id == 0 || count < 1) {
        return nb_fail(err, -EINVAL, "a communicator needs an id above 0 and at least one rank, not id %u and %d ranks",
                       id, count);
    }
    for (int i = 0; i < count; i++) {
        if (ranks[i] < 0 || ranks[i] >= job->size || (i > 0 && ranks[i] <= ranks[i - 1])) {
            return nb_fail(err, -EINVAL, "rank %d of communicator %u: ranks must increase and be 0 to %d", ranks[i], id,
                           job->size - 1);
        }
        here = here || ranks[i] == job->rank;
    }
    return here ? 0 : nb_fail(err, -EINVAL, "communicator %u does not include this rank, %d", id, job->rank);
}

// With the job's lock.
static struct nb_comm *find(struct nb_job *job, uint32_t id) {
    struct nb_hash_node *node = nb_hash_get(&job->comms.by_id, id);
    return node != NULL ? NB_CONTAINER(node, struct nb_comm, by_id) : NULL;
}

struct nb_comm *nb_comm_find(struct nb_job *job, uint32_t id) {
    if (id == 0) {
        return &job->world;
    }
    pthread_mutex_lock(&job->lock);
    struct nb_comm *comm = find(job, id);
    pthread_mutex_unlock(&job->lock);
    return comm;
}

static struct nb_comm *comm_alloc(struct nb_job *job, uint32_t id, const int *ranks, int count) {
    struct nb_comm *comm = calloc(1, sizeof *comm + (size_t)count * sizeof *ranks);
    if (comm == NULL) {
        return NULL;
    }
    int *kept = (int *)(comm + 1);
    *comm = (struct nb_comm){.job = job, .id = id, .size = count, .ranks = kept};
    for (int i = 0; i < count; i++) {
        kept[i] = ranks[i];
        comm->rank = ranks[i] == job->rank ? i : comm->rank;
    }
    return comm;
}

int nb_comm_make(struct nb_job *job, uint32_t id, const int *ranks, int count, struct nb_error *err) {
    int rc = ranks_check(job, id, ranks, count, err);
    if (rc < 0) {
        return rc;
    }
    struct nb_comm *comm = comm_alloc(job, id, ranks, count);
    if (comm == NULL) {
        return nb_fail(err, -ENOMEM, "cannot allocate communicator %u of %d ranks", id, count);
    }
    pthread_mutex_lock(&job->lock);
    if (find(job, id) != NULL) {
        rc = nb_fail(err, -EEXIST, "communicator %u already exists", id);
    } else if (job->comms.count == GROUPS_MAX) {
        rc = nb_fail(err, -ENOSPC, "communicator %u: a rank can have at most %d", id, GROUPS_MAX);
    } else {
        nb_list_insert(&job->comms.list, &comm->link);
        nb_hash_put(&job->comms.by_id, &comm->by_id, id);
        job->comms.count++;
        job->inbox.filled = true; // announced with the first operation at the latest, so no wake-up is needed
        job->comms.unannounced = true;
    }
    pthread_mutex_unlock(&job->lock);
    if (rc < 0) {
        free(comm);
    }
    return rc;
}

static void announce(struct nb_job *job, const struct nb_comm *comm) {
    int32_t *message = malloc(((size_t)comm->size + 1) * sizeof *message);
    if (message == NULL) {
        struct nb_error why = {0};
        nb_fail(&why, -ENOMEM, "cannot allocate the announcement of communicator %u", comm->id);
        nb_job_fail(job, &why, true);
        return;
    }
    message[0] = (int32_t)comm->id;
    for (int i = 0; i < comm->size; i++) {
        message[i + 1] = comm->ranks[i];
    }
    size_t bytes = ((size_t)comm->size + 1) * sizeof *message;
    if (job->rank == 0) {
        nb_groups_receive(job, 0, (const unsigned char *)message, bytes);
    } else {
        nb_control_queue(&job->controls[0], CTL_GROUP, message, bytes);
    }
    free(message);
}

void nb_groups_announce(struct nb_job *job) {
    pthread_mutex_lock(&job->lock);
    job->comms.unannounced = false;
    struct nb_list *last = job->comms.list.prev; // nothing leaves the list, and new entries go behind this one
    pthread_mutex_unlock(&job->lock);
    for (struct nb_list *it = last; it != &job->comms.list && !job->failed; it = it->prev) {
        struct nb_comm *comm = NB_CONTAINER(it, struct nb_comm, link);
        if (comm->announced) {
            break;
        }
        comm->announced = true;
        announce(job, comm);
    }
}

const struct nb_group *nb_groups_find(struct nb_job *job, uint32_t id) {
    struct nb_hash_node *node = nb_hash_get(&job->comms.groups_by_id, id);
    return node != NULL ? NB_CONTAINER(node, struct nb_group, by_id) : NULL;
}

bool nb_group_has(const struct nb_group *group, int rank) {
    return group == NULL || nb_bits_get(group->members, (size_t)rank);
}

// Reads the ranks into a bitmap. False: no rank of this job could have sent this.
static bool members_read(const struct nb_job *job, int rank, const unsigned char *body, int count, uint64_t *members) {
    for (int i = 0; i < count; i++) {
        int32_t member;
        memcpy(&member, body + (size_t)i * sizeof member, sizeof member);
        if (member < 0 || member >= job->size || nb_bits_get(members, (size_t)member)) {
            return false;
        }
        nb_bits_set(members, (size_t)member);
    }
    return count > 0 && nb_bits_get(members, (size_t)rank);
}

static void differ(struct nb_job *job, const struct nb_group *group, int rank) {
    struct nb_error why = {0};
    nb_fail_peer(&why, NB_EMISMATCH, rank, "communicator %u has different ranks on rank %d and on rank %d", group->id,
                 rank, group->first_rank);
    nb_job_fail(job, &why, true);
}

void nb_groups_receive(struct nb_job *job, int rank, const unsigned char *body, size_t bytes) {
    size_t words = nb_bits_words((size_t)job->size);
    int count = (int)(bytes / sizeof(int32_t)) - 1;
    uint32_t id;
    memcpy(&id, body, sizeof id);
    struct nb_group *announced = calloc(1, sizeof *announced + words * sizeof announced->members[0]);
    if (announced == NULL) {
        struct nb_error why = {0};
        nb_fail(&why, -ENOMEM, "cannot allocate the record of communicator %u", id);
        nb_job_fail(job, &why, true);
        return;
    }
    *announced = (struct nb_group){.id = id, .first_rank = rank, .count = count};
    const struct nb_group *known = nb_groups_find(job, id);
    bool possible = members_read(job, rank, body + sizeof id, count, announced->members) && id != 0;
    bool full = job->comms.group_count == (int64_t)GROUPS_MAX * job->size; // more than all ranks together can make
    if (!possible || (known == NULL && full)) {
        nb_job_wire_fail(job, rank, "an invalid communicator");
    } else if (known != NULL && memcmp(known->members, announced->members, words * sizeof announced->members[0]) != 0) {
        differ(job, known, rank);
    } else if (known == NULL) {
        nb_list_insert(&job->comms.groups, &announced->link);
        nb_hash_put(&job->comms.groups_by_id, &announced->by_id, id);
        job->comms.group_count++;
        return;
    }
    free(announced);
}

void nb_groups_close(struct nb_job *job) {
    NB_LIST_EACH_SAFE(it, nx, &job->comms.list) {
        free(NB_CONTAINER(it, struct nb_comm, link));
    }
    NB_LIST_EACH_SAFE(it, nx, &job->comms.groups) {
        free(NB_CONTAINER(it, struct nb_group, link));
    }
}
