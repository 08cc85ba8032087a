// An operation that is cut short leaves nothing behind: its flows are out of the lanes, so that no byte of a peer lands in its memory
// any more, and memory that ranks share is revoked. Rank 0 gives up in the middle, while rank 1 has yet to begin.
#include <stdatomic.h>

#include "base/list.h"
#include "engine/internal.h"
#include "engine/local.h"
#include "engine/local_share.h"
#include "job.h"
#include "transport/lanes_internal.h"

enum { WORDS = 64 * 1024 };

static sem_t begun;    // rank 0 expects bytes of rank 1, or shares its memory
static sem_t released; // rank 1 may go on

bool __real_nb_local_start(struct nb_work *work);
bool __wrap_nb_local_start(struct nb_work *work);
void __real_nb_lanes_add(struct nb_lanes *lanes, struct nb_flow *flow, int64_t now_ns);
void __wrap_nb_lanes_add(struct nb_lanes *lanes, struct nb_flow *flow, int64_t now_ns);

bool __wrap_nb_local_start(struct nb_work *work) {
    int rank = work->comm->job->rank;
    bool sum = work->desc.kind == NB_OP_ALLREDUCE;
    while (sum && rank == 1 && sem_wait(&released) != 0) {
    }
    bool taken = __real_nb_local_start(work);
    if (sum && rank == 0 && taken) {
        (void)sem_post(&begun);
    }
    return taken;
}

void __wrap_nb_lanes_add(struct nb_lanes *lanes, struct nb_flow *flow, int64_t now_ns) {
    bool expects = lanes->config.lane.rank == 0 && flow->dir == NB_FLOW_IN; // else it may be freed behind this
    __real_nb_lanes_add(lanes, flow, now_ns);
    if (expects) {
        (void)sem_post(&begun);
    }
}

static void give_up(struct test_rank *me) {
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
    CHECK(nb_list_empty(&peer->in), "the lanes still expect bytes of the operation");
    CHECK(nb_list_empty(&peer->out), "the lanes still send bytes of the operation");
    if (me->job->local != NULL) {
        CHECK(atomic_load(&nb_local_area(me->job->local, 0)->revoked) != 0, "others may still write to its memory");
    }
    (void)sem_post(&released);
}

int main(void) {
    static const char *const networks[] = {"tcp", "shm", "ofi"};
    for (size_t i = 0; i < sizeof networks / sizeof networks[0]; i++) {
        struct test_rank like = test_on(networks[i]);
        like.size = 2;
        like.streams = 2;
        like.algorithm = NB_ALGORITHM_RING;
        like.run = give_up;
        CHECK(sem_init(&begun, 0, 0) == 0 && sem_init(&released, 0, 0) == 0, "semaphores: %m");
        (void)test_job(&like); // libfabric may not be there
    }
    return 0;
}
