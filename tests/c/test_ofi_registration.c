// Registration with libfabric, over a test double: memory that the provider refuses to register travels through
// staging. The provider refuses large memory, as under a low limit of locked memory.
#include "base/clock.h"
#include "sums.h"
#ifdef NB_HAVE_OFI
#include "ofi_double.h"

enum { MEMORY_MAX = 16 << 20, COUNT = (8 << 20) / sizeof(float) };

// The first large all-reduce starts the probe of streams=auto, whose memory is not registered.
static void first_large_allreduce(struct test_rank *me) {
    char notice[NB_ERROR_TEXT];
    float *data = malloc(COUNT * sizeof *data);
    struct nb_segment all = {.base = data, .bytes = COUNT * sizeof *data};
    struct nb_op op = test_op("large", NB_OP_ALLREDUCE, &all);
    struct pattern input = pattern_of_input(NB_F32, me->rank);
    CHECK(data != NULL, "memory");
    pattern_write(&input, &all, 0, COUNT);
    test_do(me, op);
    size_t at = result_compare(me, &op, COUNT);
    CHECK(at == COUNT, "rank %d: [%zu] is %g, which is not the sum", me->rank, at, (double)data[at]);
    CHECK(job_info(me).streams_used > 0, "rank %d: no probe has run", me->rank);
    CHECK(nb_job_notice(me->job, notice, sizeof notice) && strstr(notice, "the double's own failure") != NULL,
          "rank %d: no notice gives the cause", me->rank);
    free(data);
}

// No memory can be registered any more, not even for staging: the operation fails, and says why.
static void allreduce_without_memory(struct test_rank *me) {
    static float data[2][COUNT];
    struct nb_segment all = {.base = data[me->rank], .bytes = sizeof data[me->rank]};
    struct nb_error err = {0};
    test_barrier(me, "open");
    double_limit_memory(1);
    struct nb_work *work = test_submit(me, test_op("large", NB_OP_ALLREDUCE, &all));
    int64_t begin_ns = nb_now_ns();
    CHECK(nb_work_wait(work, TEST_LIMIT_MS, &err) < 0, "rank %d: the all-reduce succeeded", me->rank);
    CHECK(strstr(err.text, "memory for a write") != NULL, "rank %d: %s", me->rank, err.text);
    CHECK(nb_now_ns() - begin_ns < (int64_t)me->timeout_ms * 1000000, "rank %d: only the deadline ended it", me->rank);
    nb_work_release(work);
}

static void run_without_memory(void) {
    struct test_rank template = test_on("ofi");
    template.size = 2;
    template.streams = 1;
    template.timeout_ms = 20000;
    template.run = allreduce_without_memory;
    CHECK(test_job(&template) == 0, "the double is not used");
}

int main(void) {
    struct test_rank template = test_on("ofi");
    double_begin(0, sizeof(uint64_t));
    run_without_memory();
    double_limit_memory(MEMORY_MAX);
    template.size = 2;
    template.streams = NB_STREAMS_AUTO;
    template.run = first_large_allreduce;
    CHECK(test_job(&template) == 0, "the double is not used");
    double_end();
    return 0;
}
#else
int main(void) {
    SKIP("built without libfabric's headers");
}
#endif
