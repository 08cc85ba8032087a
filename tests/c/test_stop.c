// A rank that stops in good order continues until its lanes have settled, and only then announces that it leaves.
#include <stdatomic.h>

#include "job.h"
#include "transport/lanes_internal.h"

enum { UNSETTLED = 5 };

static _Atomic int queries;
static _Atomic int farewells;

bool __real_nb_lanes_settle(struct nb_lanes *lanes);
bool __wrap_nb_lanes_settle(struct nb_lanes *lanes);
void __real_nb_lanes_announce_leave(struct nb_lanes *lanes);
void __wrap_nb_lanes_announce_leave(struct nb_lanes *lanes);

bool __wrap_nb_lanes_settle(struct nb_lanes *lanes) {
    bool settled = __real_nb_lanes_settle(lanes);
    return lanes->config.lane.rank == 0 ? settled && atomic_fetch_add(&queries, 1) >= UNSETTLED : settled;
}

void __wrap_nb_lanes_announce_leave(struct nb_lanes *lanes) {
    if (lanes->config.lane.rank == 0) {
        CHECK(atomic_load(&queries) > UNSETTLED, "leave announced before the lanes have settled");
        atomic_fetch_add(&farewells, 1);
    }
    __real_nb_lanes_announce_leave(lanes);
}

static void sum_and_stop(struct test_rank *me) {
    float data[1000] = {0};
    struct nb_segment all = {.base = data, .bytes = sizeof data};
    test_do(me, test_op("sum", NB_OP_ALLREDUCE, &all));
    if (me->rank == 0) {
        nb_job_close(me->job);
        me->job = NULL;
        CHECK(atomic_load(&queries) > UNSETTLED, "it stopped after %d looks at lanes that had not settled",
              atomic_load(&queries));
        CHECK(atomic_load(&farewells) == 1, "%d leave announcements", atomic_load(&farewells));
    }
}

int main(void) {
    struct test_rank like = test_on("tcp");
    like.size = 2;
    like.streams = 2;
    like.run = sum_and_stop;
    return test_job(&like);
}
