// Ring and chain schedules, simulated for all ranks with blocks that arrive in random order. The simulation reads a
// block from the sender's memory when it arrives, so a block that is overwritten too early gives a wrong result.
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "coll/ring_schedule.h"

enum { RANKS_MAX = 9 };

struct rank {
    struct nb_sched sched;
    unsigned char *buffer;
    unsigned char *available; // per outgoing block: how often it became available
    unsigned char *delivered; // per outgoing block
};

struct world {
    enum nb_sched_kind kind;
    int size;
    int root;
    size_t bytes;
    size_t element;
    uint64_t seed;
    struct rank ranks[RANKS_MAX];
    size_t in_flight_count;
    struct flight {
        int rank;
        uint32_t block;
    } *in_flight;
};

static uint64_t draw(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

// A rank's input element: a small number that depends on rank and index.
static uint64_t input(int rank, size_t index) {
    return (index * 7 + (size_t)rank * 13 + index / 251) % 23 + 1;
}

static uint64_t load(const unsigned char *at, size_t element) {
    uint64_t value = 0;
    memcpy(&value, at, element);
    return value;
}

static void store(unsigned char *at, size_t element, uint64_t value) {
    memcpy(at, &value, element);
}

static void make_available(struct world *world, int rank, uint32_t block) {
    struct rank *at = &world->ranks[rank];
    CHECK(block < nb_sched_blocks_out(&at->sched), "block %u is not an outgoing block of rank %d", block, rank);
    CHECK(++at->available[block] == 1, "rank %d block %u became available twice", rank, block);
    world->in_flight[world->in_flight_count++] = (struct flight){rank, block};
}

// An arrival may overwrite a range only after this rank has sent all earlier blocks from it.
static void check_not_needed(const struct rank *at, uint32_t landed) {
    const struct nb_sched *sched = &at->sched;
    struct nb_range in = nb_sched_in(sched, landed, 1);
    for (uint32_t block = 0; block < nb_sched_blocks_out(sched) && block / sched->per_step <= landed / sched->per_step;
         block++) {
        struct nb_range out = nb_sched_out(sched, block, 1);
        bool overlap =
            out.bytes > 0 && in.bytes > 0 && out.offset < in.offset + in.bytes && in.offset < out.offset + out.bytes;
        bool becomes = block == nb_sched_next(sched, landed); // the block that forwards this arrival
        CHECK(!overlap || becomes || at->delivered[block], "rank %d: arrival %u overwrites outgoing block %u",
              sched->rank, landed, block);
    }
}

static void deliver(struct world *world, struct flight flight) {
    struct rank *from = &world->ranks[flight.rank];
    struct rank *to = &world->ranks[from->sched.to];
    struct nb_range out = nb_sched_out(&from->sched, flight.block, 1);
    struct nb_range in = nb_sched_in(&to->sched, flight.block, 1);
    CHECK(out.offset == in.offset && out.bytes == in.bytes, "block %u differs between rank %d and %d", flight.block,
          flight.rank, from->sched.to);
    CHECK(out.bytes % world->element == 0 && out.offset + out.bytes <= world->bytes, "block %u splits an element",
          flight.block);
    const unsigned char *source = from->buffer + out.offset;
    unsigned char *target = to->buffer + in.offset;
    if (nb_sched_reduces(&to->sched, flight.block)) {
        for (size_t at = 0; at < out.bytes; at += world->element) {
            store(target + at, world->element, load(source + at, world->element) + load(target + at, world->element));
        }
    } else {
        check_not_needed(to, flight.block);
        memcpy(target, source, out.bytes);
    }
    from->delivered[flight.block] = 1;
    uint32_t next = nb_sched_next(&to->sched, flight.block);
    if (next != NB_NO_BLOCK) {
        struct nb_range on = nb_sched_out(&to->sched, next, 1);
        CHECK(on.offset == in.offset && on.bytes == in.bytes, "block %u does not forward arrival %u", next,
              flight.block);
        make_available(world, from->sched.to, next);
    }
}

static void check_blocks(const struct nb_sched *sched) {
    uint32_t out = nb_sched_blocks_out(sched);
    CHECK(out <= NB_BLOCKS_MAX && nb_sched_blocks_in(sched) <= NB_BLOCKS_MAX, "%u blocks", out);
    CHECK(sched->block_bytes >= NB_BLOCK_MIN && (sched->block_bytes & (sched->block_bytes - 1)) == 0, "%zu byte blocks",
          sched->block_bytes);
    size_t total = 0;
    uint32_t stride = out > 4096 ? 257 : 1; // checks only a sample of long schedules
    for (uint32_t block = 0; block < out; block += stride) {
        uint32_t left = sched->per_step - block % sched->per_step;
        struct nb_range run = nb_sched_out(sched, block, left);
        size_t sum = 0;
        for (uint32_t i = 0; i < left && stride == 1; i++) {
            struct nb_range one = nb_sched_out(sched, block + i, 1);
            CHECK(one.bytes == 0 || one.offset == run.offset + sum, "block %u is not contiguous with its predecessor",
                  block + i);
            sum += one.bytes;
        }
        CHECK(stride > 1 || sum == run.bytes, "blocks from %u: %zu bytes, but the run has %zu", block, sum, run.bytes);
        total += nb_sched_out(sched, block, 1).bytes;
    }
    CHECK(stride > 1 || total == nb_sched_bytes_out(sched), "the blocks have %zu bytes, the schedule %zu", total,
          nb_sched_bytes_out(sched));
}

static uint64_t expected(const struct world *world, int rank, size_t index, bool *defined) {
    size_t per_rank = world->bytes / world->element / (size_t)world->size;
    size_t part = per_rank > 0 ? index / per_rank : 0;
    *defined = true;
    uint64_t sum = 0;
    switch (world->kind) {
    case NB_SCHED_RING_ALLGATHER:
        return input((int)part, index);
    case NB_SCHED_CHAIN_BROADCAST:
        return input(world->root, index);
    case NB_SCHED_RING_REDUCESCATTER:
        *defined = part == (size_t)rank;
        break;
    default:
        break;
    }
    for (int other = 0; other < world->size; other++) {
        sum += input(other, index);
    }
    return sum;
}

static void check_result(const struct world *world) {
    for (int rank = 0; rank < world->size; rank++) {
        const struct rank *at = &world->ranks[rank];
        for (uint32_t block = 0; block < nb_sched_blocks_out(&at->sched); block++) {
            CHECK(at->available[block] == 1 && at->delivered[block] == 1, "rank %d block %u was not sent", rank, block);
        }
        for (size_t index = 0; index < world->bytes / world->element; index++) {
            bool defined = false;
            unsigned char want[8];
            uint64_t value = world->size == 1 ? input(0, index) : expected(world, rank, index, &defined);
            store(want, world->element, value);
            CHECK(!(defined || world->size == 1) ||
                      memcmp(at->buffer + index * world->element, want, world->element) == 0,
                  "kind %d size %d bytes %zu element %zu: rank %d is wrong at %zu", (int)world->kind, world->size,
                  world->bytes, world->element, rank, index);
        }
    }
}

static void world_open(struct world *world) {
    size_t flight_count = 1;
    for (int rank = 0; rank < world->size; rank++) {
        struct rank *at = &world->ranks[rank];
        nb_sched_init(&at->sched, world->kind, rank, world->size, world->root, world->bytes, world->element);
        check_blocks(&at->sched);
        size_t blocks = nb_sched_blocks_out(&at->sched);
        flight_count += blocks;
        at->buffer = calloc(world->bytes + 1, 1);
        at->available = calloc(blocks + 1, 1);
        at->delivered = calloc(blocks + 1, 1);
        CHECK(at->buffer && at->available && at->delivered, "memory");
        for (size_t index = 0; index < world->bytes / world->element; index++) {
            store(at->buffer + index * world->element, world->element, input(rank, index));
        }
    }
    world->in_flight = calloc(flight_count, sizeof(*world->in_flight));
    CHECK(world->in_flight, "memory");
}

static void world_close(struct world *world) {
    for (int rank = 0; rank < world->size; rank++) {
        free(world->ranks[rank].buffer);
        free(world->ranks[rank].available);
        free(world->ranks[rank].delivered);
    }
    free(world->in_flight);
}

static void simulate(struct world *world) {
    world_open(world);
    for (int rank = 0; rank < world->size; rank++) {
        const struct nb_sched *sched = &world->ranks[rank].sched;
        const struct nb_sched *neighbour = &world->ranks[sched->to].sched;
        CHECK(nb_sched_blocks_out(sched) == nb_sched_blocks_in(neighbour),
              "rank %d sends %u blocks, rank %d expects %u", rank, nb_sched_blocks_out(sched), sched->to,
              nb_sched_blocks_in(neighbour));
        CHECK(neighbour->from == rank, "rank %d's neighbour expects data from rank %d", rank, neighbour->from);
        for (uint32_t block = 0; block < nb_sched_blocks_out(sched); block++) {
            if (nb_sched_ready(sched, block)) {
                make_available(world, rank, block);
            }
        }
    }
    while (world->in_flight_count > 0) {
        size_t choice = draw(&world->seed) % world->in_flight_count;
        struct flight flight = world->in_flight[choice];
        world->in_flight[choice] = world->in_flight[--world->in_flight_count];
        deliver(world, flight);
    }
    check_result(world);
    world_close(world);
}

// A range is scaled once, on the rank that completes its sum, and never in the all-gather phase.
static void test_completed_ranges(void) {
    struct nb_sched sched;
    nb_sched_init(&sched, NB_SCHED_RING_ALLREDUCE, 2, 4, 0, 4 * 64 * 1600, 4);
    size_t completed = 0;
    for (uint32_t block = 0; block < nb_sched_blocks_in(&sched); block++) {
        bool last = block / sched.per_step == 2;
        CHECK(nb_sched_completes(&sched, block) == last, "block %u", block);
        CHECK(nb_sched_reduces(&sched, block) == (block / sched.per_step < 3), "block %u", block);
        completed += last ? nb_sched_in(&sched, block, 1).bytes : 0;
    }
    CHECK(completed == sched.part_bytes, "%zu bytes completed of a part of %zu", completed, sched.part_bytes);
    nb_sched_init(&sched, NB_SCHED_RING_ALLGATHER, 0, 4, 0, 400000, 4);
    CHECK(!nb_sched_completes(&sched, 0) && !nb_sched_reduces(&sched, 0), "an all-gather reduces");
    nb_sched_init(&sched, NB_SCHED_CHAIN_BROADCAST, 1, 4, 0, 400000, 4);
    CHECK(!nb_sched_completes(&sched, 0) && !nb_sched_reduces(&sched, 0), "a broadcast reduces");
}

// With equal parts, a ring all-reduce sends 2(n-1)/n of the buffer. Parts begin at cache lines.
static void test_bytes_sent(void) {
    for (int size = 2; size <= 8; size++) {
        size_t bytes = (size_t)size * 64 * 4096;
        for (int rank = 0; rank < size; rank++) {
            struct nb_sched sched;
            nb_sched_init(&sched, NB_SCHED_RING_ALLREDUCE, rank, size, 0, bytes, 4);
            size_t want = 2 * (size_t)(size - 1) * bytes / (size_t)size;
            CHECK(nb_sched_bytes_out(&sched) == want, "rank %d of %d sends %zu, not %zu", rank, size,
                  nb_sched_bytes_out(&sched), want);
            nb_sched_init(&sched, NB_SCHED_RING_ALLREDUCE, rank, size, 0, bytes + 4, 4);
            CHECK(sched.part_bytes % 64 == 0, "parts of %zu bytes", sched.part_bytes);
        }
    }
}

static void test_empty_schedules(void) {
    static const enum nb_sched_kind kinds[] = {NB_SCHED_NONE, NB_SCHED_RING_ALLREDUCE, NB_SCHED_CHAIN_BROADCAST};
    for (size_t i = 0; i < sizeof(kinds) / sizeof(*kinds); i++) {
        for (int size = 1; size <= 3; size++) {
            struct nb_sched sched;
            nb_sched_init(&sched, kinds[i], 0, size, 0, kinds[i] == NB_SCHED_NONE || size == 1 ? 4096 : 0, 4);
            CHECK(nb_sched_blocks_out(&sched) == 0 && nb_sched_blocks_in(&sched) == 0, "kind %d size %d", (int)kinds[i],
                  size);
            CHECK(nb_sched_bytes_out(&sched) == 0 && !nb_sched_ready(&sched, 0), "kind %d size %d", (int)kinds[i],
                  size);
            CHECK(nb_sched_next(&sched, 0) == NB_NO_BLOCK, "kind %d size %d", (int)kinds[i], size);
        }
    }
}

static void test_block_limit_of_long_buffers(void) {
    for (int size = 2; size <= 64; size = size * 2 + 1) {
        for (size_t bytes = (size_t)1 << 28; bytes <= (size_t)1 << 44; bytes *= 16) {
            struct nb_sched sched;
            nb_sched_init(&sched, NB_SCHED_RING_ALLREDUCE, size - 1, size, 0, bytes + 8, 8);
            check_blocks(&sched);
            nb_sched_init(&sched, NB_SCHED_CHAIN_BROADCAST, 0, size, 0, bytes + 8, 8);
            check_blocks(&sched);
        }
    }
}

int main(void) {
    static const size_t counts[] = {0, 1, 2, 3, 7, 9, 15, 16, 17, 63, 64, 65, 1000, 4097, 16384, 16385, 40009};
    static const size_t elements[] = {1, 2, 4, 8};
    uint64_t seed = 1;
    for (int size = 1; size <= RANKS_MAX; size++) {
        for (size_t c = 0; c < sizeof(counts) / sizeof(*counts); c++) {
            for (size_t e = 0; e < sizeof(elements) / sizeof(*elements); e++) {
                if (counts[c] > 5000 && e != c % 4) {
                    continue; // long buffers with one element size each
                }
                struct world world = {.size = size, .element = elements[e], .seed = seed++};
                world.bytes = counts[c] * elements[e];
                world.kind = NB_SCHED_RING_ALLREDUCE;
                simulate(&world);
                world.kind = NB_SCHED_CHAIN_BROADCAST;
                world.root = (int)(seed % (uint64_t)size);
                simulate(&world);
                world.bytes = counts[c] / (size_t)size * (size_t)size * elements[e];
                world.kind = NB_SCHED_RING_ALLGATHER;
                simulate(&world);
                world.kind = NB_SCHED_RING_REDUCESCATTER;
                simulate(&world);
            }
        }
    }
    test_completed_ranges();
    test_bytes_sent();
    test_empty_schedules();
    test_block_limit_of_long_buffers();
    return 0;
}
