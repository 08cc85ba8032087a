// No memory for an operation that the communication thread prepares: the job fails on all ranks, and nothing else does.
#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include "engine/algorithms.h"
#include "engine/autotune.h"
#include "engine/context.h"
#include "job.h"
#include "transport/lanes.h"

enum { RANKS = 4 }; // several steps, so that a work has more flows than two

static _Atomic bool armed;

void *__real_calloc(size_t count, size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);

void *__wrap_calloc(size_t count, size_t bytes) {
    if (bytes == sizeof(struct nb_flow) && atomic_exchange(&armed, false)) {
        errno = ENOMEM;
        return NULL;
    }
    return __real_calloc(count, bytes);
}

const struct nb_algorithm *__wrap_nb_autotune_guess(struct nb_job *job, int size, enum nb_op_kind kind, size_t bytes);

// A wrong guess, so that the communication thread prepares the work.
const struct nb_algorithm *__wrap_nb_autotune_guess(struct nb_job *job, int size, enum nb_op_kind kind, size_t bytes) {
    (void)job;
    (void)size;
    (void)kind;
    (void)bytes;
    return &nb_ring_allreduce;
}

static void all_reduce_without_memory(struct test_rank *me) {
    static float data[RANKS][1024];
    struct nb_segment all = {.base = data[me->rank], .bytes = sizeof data[0]};
    struct nb_error err = {0};
    CHECK(me->rank > 0 || !atomic_exchange(&armed, true), "armed twice");
    int rc = test_try(me, test_op("sum", NB_OP_ALLREDUCE, &all), &err);
    CHECK(rc == -ENOMEM && strstr(err.text, "sum: cannot allocate ") == err.text, "rank %d: %d, %s", me->rank, rc,
          err.text);
    CHECK(!atomic_load(&armed), "every allocation has succeeded");
}

int main(void) {
    struct test_rank template = {.size = RANKS, .transport = "tcp", .streams = 1, .timeout_ms = 60000};
    template.algorithm = NB_ALGORITHM_HALVING;
    template.shm = NB_SHM_OFF;
    template.run = all_reduce_without_memory;
    test_job(&template);
    return 0;
}
