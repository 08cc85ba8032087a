// Algorithm tables: an algorithm that this test adds runs all-reduces like the built-in ones, from rank 0's choice to
// the trace. Each algorithm that a user can choose has a name.
#include <stdint.h>
#include <string.h>

#include "coll/choose.h"
#include "engine/algorithms.h"
#include "engine/communicator.h"
#include "engine/context.h"
#include "engine/operation.h"
#include "job.h"
#include "trace/ring.h"

enum { WORDS = 1000, ROUNDS = 3, ADDED_ID = 77 };

static _Atomic int started;
static _Atomic int recorded;
static _Atomic int prepared;
static _Atomic int released;

static int prepare(struct nb_work *work, struct nb_error *err) {
    prepared++;
    return nb_ring_allreduce.prepare(work, err);
}

static void release(struct nb_work *work) {
    released++;
    nb_ring_allreduce.release(work);
}

static bool possible(const struct nb_work *work) {
    return nb_ring_allreduce.possible(work);
}

static void start(struct nb_work *work, int64_t now_ns) {
    started++;
    nb_ring_allreduce.start(work, now_ns);
}

static enum nb_algorithm_id record(struct nb_work *work, uint64_t *sent, uint64_t *received) {
    recorded++;
    return nb_flows_record(work, sent, received);
}

static const struct nb_algorithm added = {.id = (enum nb_algorithm_id)ADDED_ID,
                                          .possible = possible,
                                          .prepare = prepare,
                                          .release = release,
                                          .start = start,
                                          .cancel = nb_flows_cancel,
                                          .waits_for = nb_flows_wait_for,
                                          .record = record};

static void sums(struct test_rank *me) {
    for (int round = 0; round < ROUNDS; round++) {
        float memory[WORDS];
        struct nb_segment all = {.base = memory, .bytes = sizeof memory};
        for (int i = 0; i < WORDS; i++) {
            memory[i] = (float)(i + me->rank + round);
        }
        test_do(me, test_op("sum", NB_OP_ALLREDUCE, &all));
        for (int i = 0; i < WORDS; i++) {
            float want = (float)(me->size * (i + round) + me->size * (me->size - 1) / 2);
            CHECK(memory[i] == want, "rank %d, round %d, word %d: %g, not %g", me->rank, round, i, memory[i], want);
        }
    }
}

static void test_added_algorithm(void) {
    char file[] = "/tmp/netbottleneck-algorithms-XXXXXX";
    int fd = mkstemp(file);
    CHECK(fd >= 0, "temporary file: %m");
    close(fd);
    struct nb_ring ring;
    struct nb_error err = {0};
    CHECK(nb_ring_open(&ring, file, 1024, 0, &err) == 0, "open ring: %s", err.text);
    struct test_rank template = test_on("tcp");
    template.size = 3;
    template.run = sums;
    template.algorithm = (enum nb_algorithm_id)ADDED_ID;
    template.more = &added;
    template.ring = &ring;
    CHECK(test_job(&template) == 0, "tcp is not available");
    nb_ring_close(&ring);
    unlink(file);
    CHECK(started == 3 * ROUNDS, "started %d times", started);
    CHECK(recorded == ROUNDS, "recorded %d times on the rank with a ring", recorded);
    CHECK(prepared == 3 * ROUNDS && released == prepared, "prepared %d times, released %d times", prepared, released);
}

static void test_names(void) {
    CHECK(nb_algorithm_find("auto") == NB_ALGORITHM_NONE, "auto is not found");
    CHECK(nb_algorithm_find("ring") == NB_ALGORITHM_RING, "ring is not found");
    CHECK(nb_algorithm_find("recursive_doubling") == NB_ALGORITHM_DOUBLING, "recursive_doubling is not found");
    CHECK(nb_algorithm_find("halving_doubling") == NB_ALGORITHM_HALVING, "halving_doubling is not found");
    CHECK(nb_algorithm_find("two_level") == NB_ALGORITHM_TWO_LEVEL, "two_level is not found");
    CHECK(nb_algorithm_find("tree") < 0, "an unknown name is found");
}

int main(void) {
    test_names();
    test_added_algorithm();
    return 0;
}
