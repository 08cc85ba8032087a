// Clean shutdown: a closing rank makes progress until its lanes have settled, and only then announces that it leaves.
#include <stdatomic.h>

#include "job.h"
#include "transport/lanes_internal.h"

enum { UNSETTLED = 5 };

static _Atomic int settle_calls;
static _Atomic int leave_calls;

bool __real_nb_lanes_settle(struct nb_lanes *lanes);
bool __wrap_nb_lanes_settle(struct nb_lanes *lanes);
void __real_nb_lanes_announce_leave(struct nb_lanes *lanes);
void __wrap_nb_lanes_announce_leave(struct nb_lanes *lanes);

bool __wrap_nb_lanes_settle(struct nb_lanes *lanes) {
    bool settled = __real_nb_lanes_settle(lanes);
    return lanes->config.lane.rank == 0 ? settled && atomic_fetch_add(&settle_calls, 1) >= UNSETTLED : settled;
}

void __wrap_nb_lanes_announce_leave(struct nb_lanes *lanes) {
    if (lanes->config.lane.rank == 0) {
        CHECK(atomic_load(&settle_calls) > UNSETTLED, "leave announced before the lanes have settled");
        atomic_fetch_add(&leave_calls, 1);
    }
    __real_nb_lanes_announce_leave(lanes);
}

static void sum_and_close(struct test_rank *me) {
    float data[1000] = {0};
    struct nb_segment all = {.base = data, .bytes = sizeof data};
    test_do(me, test_op("sum", NB_OP_ALLREDUCE, &all));
    if (me->rank == 0) {
        nb_job_close(me->job);
        me->job = NULL;
        CHECK(atomic_load(&settle_calls) > UNSETTLED, "it closed after %d checks of lanes that had not settled",
              atomic_load(&settle_calls));
        CHECK(atomic_load(&leave_calls) == 1, "%d leave announcements", atomic_load(&leave_calls));
    }
}

int main(void) {
    struct test_rank template = test_on("tcp");
    template.size = 2;
    template.streams = 2;
    template.run = sum_and_close;
    return test_job(&template);
}
