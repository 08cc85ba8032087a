// Algorithms: the list, and the rule that chooses among them.
#include "engine/algorithms.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "coll/choose.h"
#include "engine/context.h"
#include "engine/engine.h"
#include "engine/shared.h"

static const struct nb_algorithm *const built_in[] = {
    &nb_alone,           &nb_ring_allreduce, &nb_ring_allgather, &nb_ring_reducescatter,
    &nb_chain_broadcast, &nb_doubling,       &nb_halving,        &nb_pairwise,
    &nb_inline,          &nb_join,           &nb_shared,         &nb_two_level};

enum { BUILT_IN = sizeof built_in / sizeof built_in[0] };

int nb_algorithm_find(const char *name) {
    for (int i = 0; i < (int)BUILT_IN; i++) {
        if (built_in[i]->name != NULL && strcmp(built_in[i]->name, name) == 0) {
            return (int)built_in[i]->id;
        }
    }
    return strcmp(name, "auto") == 0 ? (int)NB_ALGORITHM_NONE : -1;
}

void nb_algorithm_names(char *text, size_t room) {
    size_t used = (size_t)snprintf(text, room, "\"auto\"");
    const char *last = NULL;
    for (int i = 0; i < (int)BUILT_IN && used < room; i++) {
        if (last != NULL && built_in[i]->name != NULL) {
            used += (size_t)snprintf(text + used, room - used, ", \"%s\"", last);
        }
        last = built_in[i]->name != NULL ? built_in[i]->name : last;
    }
    if (used < room) {
        snprintf(text + used, room - used, " or \"%s\"", last);
    }
}

const struct nb_algorithm *nb_algorithm_get(const struct nb_job *job, uint32_t id) {
    for (int i = 0; i < (int)BUILT_IN; i++) {
        if (built_in[i]->id == id) {
            return built_in[i];
        }
    }
    const struct nb_algorithm *more = job->config.more;
    return more != NULL && more->id == id ? more : NULL;
}

// The configured algorithm, or the ring if it cannot run the all-reduce.
static enum nb_algorithm_id pinned(const struct nb_job *job, int hosts, size_t bytes) {
    enum nb_algorithm_id configured = job->config.algorithm;
    bool too_long = configured == NB_ALGORITHM_INLINE && (bytes == 0 || bytes > NB_INLINE_MAX);
    bool one_level = configured == NB_ALGORITHM_TWO_LEVEL && (bytes == 0 || hosts == 1);
    return too_long || one_level ? NB_ALGORITHM_RING : configured;
}

static enum nb_algorithm_id choose_allreduce(const struct nb_job *job, const struct nb_costs *costs, int size,
                                             size_t bytes) {
    bool whole = size == job->size;
    int hosts = whole ? nb_shared_hosts(job) : 1;
    enum nb_algorithm_id best =
        job->config.algorithm != NB_ALGORITHM_NONE ? pinned(job, hosts, bytes) : nb_choose(costs, size, hosts, bytes);
    bool configured = job->config.algorithm == NB_ALGORITHM_INLINE && best == NB_ALGORITHM_INLINE && whole;
    if (!configured && whole && bytes > 0 && nb_shared_everywhere(job)) {
        return NB_ALGORITHM_SHARED;
    }
    // Rank 0 computes inline all-reduces, and may not belong to a smaller communicator.
    return best == NB_ALGORITHM_INLINE && !whole ? NB_ALGORITHM_DOUBLING : best;
}

const struct nb_algorithm *nb_algorithm_choose(const struct nb_job *job, const struct nb_costs *costs, int size,
                                               enum nb_op_kind kind, size_t bytes) {
    static const struct {
        const struct nb_algorithm *network;
        bool shared; // in shared memory if all ranks share it
    } only[NB_OP_KINDS] = {
        [NB_OP_ALLGATHER] = {&nb_ring_allgather, true},  [NB_OP_REDUCESCATTER] = {&nb_ring_reducescatter, true},
        [NB_OP_BROADCAST] = {&nb_chain_broadcast, true}, [NB_OP_BARRIER] = {&nb_alone, false},
        [NB_OP_ALLTOALL] = {&nb_pairwise, false},        [NB_OP_JOIN] = {&nb_join, false}};
    if (kind == NB_OP_ALLREDUCE) {
        enum nb_algorithm_id id = size > 1 ? choose_allreduce(job, costs, size, bytes) : NB_ALGORITHM_RING;
        return nb_algorithm_get(job, (uint32_t)id);
    }
    bool shared = only[kind].shared && size == job->size && bytes > 0 && nb_shared_everywhere(job);
    return shared ? &nb_shared : only[kind].network;
}
