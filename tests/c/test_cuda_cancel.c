// Device operations that end while their windows wait for a peer, over the fake CUDA driver.
#include <semaphore.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "../cuda/fake.h"
#include "base/list.h"
#include "engine/context.h"
#include "engine/engine.h"
#include "engine/operation.h"
#include "engine/watchdog.h"
#include "gpu.h"
#include "job.h"

enum { COUNT = 2 * CHUNK / 4 + 1 };

static sem_t begun;               // rank 0 has started a window
static _Atomic bool aged;         // rank 0 sees no byte move from now on
static _Atomic int windows_alive; // of a work of rank 0 that has failed

void __real_nb_work_start(struct nb_work *work, uint64_t seq);
void __wrap_nb_work_start(struct nb_work *work, uint64_t seq);
void __real_nb_work_finish(struct nb_work *work, const struct nb_error *why);
void __wrap_nb_work_finish(struct nb_work *work, const struct nb_error *why);
void __real_nb_watchdog_tick(struct nb_job *job, int64_t now);
void __wrap_nb_watchdog_tick(struct nb_job *job, int64_t now);

void __wrap_nb_work_start(struct nb_work *work, uint64_t seq) {
    // Read before the call, which may free it.
    const bool window = work->whole != NULL && work->comm->job->rank == 0 && strcmp(work->desc.name, "sum") == 0;
    __real_nb_work_start(work, seq);
    if (window) {
        (void)sem_post(&begun);
    }
}

void __wrap_nb_work_finish(struct nb_work *work, const struct nb_error *why) {
    const struct nb_job *job = work->comm->job;
    NB_LIST_EACH(it, &job->ops.running) {
        const bool window = NB_CONTAINER(it, struct nb_work, link)->whole == work;
        atomic_fetch_add(&windows_alive, window && why != NULL && job->rank == 0);
    }
    __real_nb_work_finish(work, why);
}

void __wrap_nb_watchdog_tick(struct nb_job *job, int64_t now) {
    NB_LIST_EACH(it, &job->ops.running) {
        struct nb_work *work = NB_CONTAINER(it, struct nb_work, link);
        for (int i = 0; i < work->flow_count && job->rank == 0 && atomic_load(&aged); i++) {
            struct nb_flow *flow = nb_work_flow(work, i);
            flow->moved_ns -= flow->moved_ns != 0 ? (int64_t)job->config.timeout_ms * 2000000 : 0;
        }
    }
    __real_nb_watchdog_tick(job, now);
}

// Rank 1's copies to the host are held, so that rank 0's windows wait for it.
static void operation_without_the_peers_data(struct test_rank *me) {
    const bool *stuck = me->arg;
    struct gpu gpu;
    struct flight flight;
    struct nb_error err = {0};
    const struct nb_op op = {.kind = NB_OP_ALLREDUCE, .dtype = NB_F32, .name = "sum"};
    gpu_open(&gpu, me);
    collective(me, &gpu, (struct nb_op){.kind = NB_OP_ALLREDUCE, .dtype = NB_F32}, COUNT, 1);
    flight_prepare(me, &gpu, &flight, op, COUNT, 1);
    test_barrier(me, "prepared");
    struct CUstream_st *const out = me->rank == 1 ? engine_stream(&gpu, FAKE_TO_HOST) : NULL;
    if (out != NULL) {
        fake->hold(out, true);
    }
    test_barrier(me, "held");
    flight.work = test_submit(me, flight.op);
    if (me->rank == 0) {
        while (sem_wait(&begun) != 0) {
        }
        atomic_store(&aged, *stuck);
        if (!*stuck) {
            nb_job_abort(me->job, "its data are bad");
        }
    }
    const int rc = test_finish(flight.work, &err);
    if (out != NULL) {
        fake->hold(out, false);
    }
    if (*stuck) {
        CHECK(rc == NB_ETIMEOUT && err.peer == 1, "rank %d: %d, peer %d, %s", me->rank, rc, err.peer, err.text);
        CHECK(strstr(err.text, "'sum': no byte moved between rank 0 and rank 1 for ") == err.text, "%s", err.text);
    } else {
        CHECK(rc == NB_EPEER && err.peer == 0, "rank %d: %d, peer %d, %s", me->rank, rc, err.peer, err.text);
    }
    buffer_close(&gpu, &flight.buffer);
    gpu_close(&gpu);
}

int main(void) {
    fake = fake_controls_get();
    for (int i = 0; i < 2; i++) {
        bool stuck = i == 1;
        struct test_rank template = ranks_on("tcp", 2);
        template.arg = &stuck;
        atomic_store(&windows_alive, 0);
        CHECK(sem_init(&begun, 0, 0) == 0, "semaphore: %m");
        CHECK(run_job(&template, 1, 0, operation_without_the_peers_data) == 0, "open the job");
        CHECK(atomic_load(&windows_alive) == 0, "a work has ended before %d of its windows",
              atomic_load(&windows_alive));
    }
    fake->reset(0, 0);
    return 0;
}
