// Step schedules (doubling, halving, pairwise), with all ranks in one thread: each rank sends what its peer expects,
// and the result is right.
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "coll/ring_schedule.h"
#include "coll/step_schedule.h"

enum { RANKS_MAX = 17, ELEMENT = 8 };

static uint64_t input_value(int rank, size_t i) {
    return (uint64_t)(rank + 1) * 1000003 + i * 7;
}

static void check_pairs(const struct nb_steps *steps, int size) {
    for (int k = 0; k < steps[0].count; k++) {
        for (int r = 0; r < size; r++) {
            struct nb_step mine = nb_steps_get(&steps[r], k);
            CHECK(steps[r].count == steps[0].count, "ranks 0 and %d: %d and %d steps", r, steps[0].count,
                  steps[r].count);
            CHECK((mine.to == NB_NO_RANK) == (mine.out.bytes == 0) || mine.to >= 0, "rank %d, step %d", r, k);
            if (mine.to == NB_NO_RANK) {
                continue;
            }
            CHECK(mine.to >= 0 && mine.to < size && mine.to != r, "rank %d, step %d: to %d", r, k, mine.to);
            struct nb_step theirs = nb_steps_get(&steps[mine.to], k);
            CHECK(theirs.from == r, "%d ranks, step %d: %d sends to %d, which expects %d", size, k, r, mine.to,
                  theirs.from);
            CHECK(theirs.in.bytes == mine.out.bytes, "%d ranks, step %d: %d sends %zu to %d, which expects %zu", size,
                  k, r, mine.out.bytes, mine.to, theirs.in.bytes);
            CHECK(mine.out.offset % ELEMENT == 0 && mine.out.bytes % ELEMENT == 0, "a range splits an element");
        }
    }
}

// Runs all ranks in lockstep: each step sends the data from before the step.
static void run_lockstep(const struct nb_steps *steps, int size, size_t elements, uint64_t **data) {
    uint64_t *before[RANKS_MAX];
    for (int r = 0; r < size; r++) {
        before[r] = malloc(elements * ELEMENT + 1);
        CHECK(before[r] != NULL, "memory");
    }
    for (int k = 0; k < steps[0].count; k++) {
        for (int r = 0; r < size; r++) {
            memcpy(before[r], data[r], elements * ELEMENT);
        }
        for (int r = 0; r < size; r++) {
            struct nb_step step = nb_steps_get(&steps[r], k);
            if (step.from == NB_NO_RANK) {
                continue;
            }
            struct nb_range out = nb_steps_get(&steps[step.from], k).out;
            const uint64_t *from = before[step.from] + out.offset / ELEMENT;
            uint64_t *to = data[r] + step.in.offset / ELEMENT;
            for (size_t i = 0; i < step.in.bytes / ELEMENT; i++) {
                to[i] = step.reduces ? to[i] + from[i] : from[i];
            }
        }
    }
    for (int r = 0; r < size; r++) {
        free(before[r]);
    }
}

static void test_allreduce(enum nb_steps_kind kind, int size, size_t elements) {
    struct nb_steps steps[RANKS_MAX];
    uint64_t *data[RANKS_MAX];
    for (int r = 0; r < size; r++) {
        nb_steps_init(&steps[r], kind, r, size, elements * ELEMENT);
        data[r] = malloc(elements * ELEMENT + 1);
        CHECK(data[r] != NULL, "memory");
        for (size_t i = 0; i < elements; i++) {
            data[r][i] = input_value(r, i);
        }
    }
    check_pairs(steps, size);
    run_lockstep(steps, size, elements, data);
    for (int r = 0; r < size; r++) {
        for (size_t i = 0; i < elements; i++) {
            uint64_t want = 0;
            for (int q = 0; q < size; q++) {
                want += input_value(q, i);
            }
            CHECK(data[r][i] == want, "kind %d, %d ranks, %zu elements: rank %d is wrong at [%zu]", kind, size,
                  elements, r, i);
        }
        free(data[r]);
    }
}

static void test_alltoall(int size, size_t elements) {
    struct nb_steps steps[RANKS_MAX];
    uint64_t *data[RANKS_MAX];
    size_t half = elements * (size_t)size;
    for (int r = 0; r < size; r++) {
        nb_steps_init(&steps[r], NB_STEPS_PAIRWISE, r, size, 2 * half * ELEMENT);
        data[r] = calloc(2 * half + 1, ELEMENT);
        CHECK(data[r] != NULL, "memory");
        for (size_t i = 0; i < half; i++) {
            data[r][i] = input_value(r, i);
        }
    }
    check_pairs(steps, size);
    run_lockstep(steps, size, 2 * half, data);
    for (int r = 0; r < size; r++) {
        for (size_t i = 0; i < half; i++) {
            int from = (int)(i / elements);
            uint64_t want = from == r ? 0 : input_value(from, (size_t)r * elements + i % elements);
            CHECK(data[r][half + i] == want, "all-to-all of %d ranks: rank %d is wrong at [%zu]", size, r, i);
        }
        free(data[r]);
    }
}

// For a power of two ranks, halving moves no more bytes than a ring. Doubling takes log2(n) steps.
static void test_bytes_and_steps(int size) {
    struct nb_steps halving;
    struct nb_steps doubling;
    size_t bytes = (size_t)size * 64 * 3;
    nb_steps_init(&halving, NB_STEPS_HALVING, 0, size, bytes);
    nb_steps_init(&doubling, NB_STEPS_DOUBLING, 0, size, bytes);
    bool power = (size & (size - 1)) == 0;
    CHECK(!power || nb_steps_bytes_out(&halving) == 2 * bytes / (size_t)size * ((size_t)size - 1),
          "%d ranks: halving sends %zu of %zu bytes", size, nb_steps_bytes_out(&halving), bytes);
    int levels = 0;
    while (2 << levels <= size) {
        levels++;
    }
    CHECK(doubling.count == levels + (power ? 0 : 2), "%d ranks: %d steps", size, doubling.count);
}

int main(void) {
    static const size_t elements[] = {0, 1, 2, 7, 8, 9, 63, 64, 65, 129, 1000, 4099};
    for (int size = 1; size <= RANKS_MAX; size++) {
        for (size_t e = 0; e < sizeof elements / sizeof elements[0]; e++) {
            if (size > 1) {
                test_allreduce(NB_STEPS_DOUBLING, size, elements[e]);
                test_allreduce(NB_STEPS_HALVING, size, elements[e]);
                test_alltoall(size, elements[e]);
            }
        }
        if (size > 1) {
            test_bytes_and_steps(size);
        }
    }
    return 0;
}
