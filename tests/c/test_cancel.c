// Cancelled operations: their flows are removed from the lanes, so that no data of a peer land in their memory, and
// shared memory is revoked. Rank 0 aborts during an operation, before rank 1 starts it.
#include <stdatomic.h>

#include "base/list.h"
#include "engine/context.h"
#include "engine/shared.h"
#include "engine/shared_fold.h"
#include "job.h"
#include "transport/lanes_internal.h"

enum { WORDS = 64 * 1024 };

static sem_t begun;    // rank 0 expects data of rank 1, or shares its memory
static sem_t released; // rank 1 may start

void __real_nb_work_start(struct nb_work *work, uint64_t seq);
void __wrap_nb_work_start(struct nb_work *work, uint64_t seq);
void __real_nb_lanes_add(struct nb_lanes *lanes, struct nb_flow *flow, int64_t now_ns);
void __wrap_nb_lanes_add(struct nb_lanes *lanes, struct nb_flow *flow, int64_t now_ns);

void __wrap_nb_work_start(struct nb_work *work, uint64_t seq) {
    int rank = work->comm->job->rank;
    bool sum = work->desc.kind == NB_OP_ALLREDUCE;
    bool shares = work->algorithm->id == NB_ALGORITHM_SHARED;
    while (sum && rank == 1 && sem_wait(&released) != 0) {
    }
    __real_nb_work_start(work, seq);
    if (sum && rank == 0 && shares) {
        (void)sem_post(&begun);
    }
}

void __wrap_nb_lanes_add(struct nb_lanes *lanes, struct nb_flow *flow, int64_t now_ns) {
    bool expects =
        lanes->config.lane.rank == 0 && flow->dir == NB_FLOW_IN; // read before the call, which may free the flow
    __real_nb_lanes_add(lanes, flow, now_ns);
    if (expects) {
        (void)sem_post(&begun);
    }
}

static void abort_during_operation(struct test_rank *me) {
    static float memory[2][WORDS];
    struct nb_segment all = {.base = memory[me->rank], .bytes = sizeof memory[0]};
    struct nb_error err = {0};
    test_barrier(me, "before");
    struct nb_work *work = test_submit(me, test_op("sum", NB_OP_ALLREDUCE, &all));
    if (me->rank == 1) {
        CHECK(test_finish(work, &err) == NB_EPEER && err.peer == 0, "rank 1: %s", err.text);
        return;
    }
    while (sem_wait(&begun) != 0) {
    }
    nb_job_abort(me->job, "its data are bad");
    CHECK(test_finish(work, &err) == NB_EPEER && err.peer == 0, "rank 0: %s", err.text);
    const struct peer *peer = &me->job->lanes->peers[1];
    CHECK(nb_list_empty(&peer->in), "the lanes still expect data of the operation");
    CHECK(nb_list_empty(&peer->out), "the lanes still send data of the operation");
    if (me->job->shared != NULL) {
        CHECK(atomic_load(&nb_shared_area(me->job->shared, 0)->revoked) != 0,
              "other ranks may still write to its memory");
    }
    (void)sem_post(&released);
}

// Usage: test_cancel shm|tcp|ofi
int main(int argc, char **argv) {
    CHECK(argc == 2, "name one network");
    struct test_rank template = test_on(argv[1]);
    template.size = 2;
    template.streams = 2;
    template.algorithm = NB_ALGORITHM_RING;
    template.run = abort_during_operation;
    CHECK(sem_init(&begun, 0, 0) == 0 && sem_init(&released, 0, 0) == 0, "semaphores: %m");
    return test_job(&template);
}
