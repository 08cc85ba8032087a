// No memory while a job opens: whichever allocation of the opening thread fails, all ranks fail, each with a reason, and
// nothing is left behind; or all go on without, where a connection is made again or private memory serves.
#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include "bootstrap/bootstrap.h"
#include "job.h"

enum { LEAST = 20, SPARED_MAX = 4 }; // allocations of a rank, and those that it can do without

static int victim;               // rank
static int fails_at;             // number of the allocation
static int spared;               // allocations that the rank could do without
static _Atomic bool failed;      // it was reached
static _Thread_local int left_n; // allocations until then, and 1; 0: not counted

void *__real_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__real_realloc(void *memory, size_t bytes);
void *__wrap_realloc(void *memory, size_t bytes);
void *__real_aligned_alloc(size_t align, size_t bytes);
void *__wrap_aligned_alloc(size_t align, size_t bytes);
int __real_nb_job_open(struct nb_job **job, const struct nb_job_config *config, struct nb_error *err);
int __wrap_nb_job_open(struct nb_job **job, const struct nb_job_config *config, struct nb_error *err);

static bool fails(void) {
    if (left_n == 0 || --left_n > 0) {
        return false;
    }
    atomic_store(&failed, true);
    errno = ENOMEM;
    return true;
}

void *__wrap_malloc(size_t bytes) {
    return fails() ? NULL : __real_malloc(bytes);
}

void *__wrap_calloc(size_t count, size_t bytes) {
    return fails() ? NULL : __real_calloc(count, bytes);
}

void *__wrap_realloc(void *memory, size_t bytes) {
    return fails() ? NULL : __real_realloc(memory, bytes);
}

void *__wrap_aligned_alloc(size_t align, size_t bytes) {
    return fails() ? NULL : __real_aligned_alloc(align, bytes);
}

int __wrap_nb_job_open(struct nb_job **job, const struct nb_job_config *config, struct nb_error *err) {
    left_n = config->boot->rank == victim ? fails_at : 0;
    int rc = __real_nb_job_open(job, config, err);
    left_n = 0;
    nb_boot_close(config->boot); // a failure before the job took it
    return rc;
}

static void all_reduce(struct test_rank *me) {
    float data[4] = {1, 2, 3, (float)me->rank};
    struct nb_segment all = {.base = data, .bytes = sizeof data};
    me->rc = test_try(me, test_op("sum", NB_OP_ALLREDUCE, &all), &me->err);
}

// Returns false if the rank makes fewer allocations.
static bool one_fails(const struct test_rank *template) {
    struct test_rank ranks[TEST_RANKS_MAX];
    atomic_store(&failed, false);
    test_run(template, ranks);
    const struct test_rank *there = &ranks[victim];
    bool reached = atomic_load(&failed);
    CHECK(reached || there->rc == 0, "rank %d: %d %s", victim, there->rc, there->err.text);
    CHECK(there->rc == 0 || strstr(there->err.text, "allocate") != NULL, "rank %d, allocation %d: %d %s", victim,
          fails_at, there->rc, there->err.text);
    for (int r = 0; r < template->size; r++) {
        CHECK((ranks[r].rc == 0) == (there->rc == 0), "rank %d, allocation %d: %d, but rank %d has %d %s", victim,
              fails_at, there->rc, r, ranks[r].rc, ranks[r].err.text);
        CHECK(ranks[r].rc == 0 || ranks[r].err.text[0] != '\0', "rank %d, allocation %d: rank %d gives no reason",
              victim, fails_at, r);
    }
    spared += reached && there->rc == 0;
    return reached;
}

// Usage: test_no_memory_open tcp|shm|hosts|ofi
int main(int argc, char **argv) {
    CHECK(argc == 2, "name one network");
    bool hosts = strcmp(argv[1], "hosts") == 0; // two hosts, whose ranks share memory
    struct test_rank template = test_on(hosts ? "tcp" : argv[1]);
    template.size = hosts ? 3 : 2;
    template.run = all_reduce;
    if (hosts) {
        template.shm = NB_SHM_REQUIRED;
        template.hosts = "aab";
        template.algorithm = NB_ALGORITHM_TWO_LEVEL;
    }
    victim = -1;
    int rc = test_job(&template);
    int victims = hosts ? 1 : template.size; // rank 0 has a part in everything between hosts
    for (victim = 0; victim < victims && rc == 0; victim++) {
        fails_at = 1;
        spared = 0;
        while (one_fails(&template)) {
            fails_at++;
        }
        CHECK(fails_at > LEAST, "rank %d makes %d allocations", victim, fails_at - 1);
        CHECK(spared <= SPARED_MAX, "rank %d can do without %d of %d allocations", victim, spared, fails_at - 1);
    }
    return rc;
}
