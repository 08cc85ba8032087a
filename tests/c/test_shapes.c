// The engine on buffers of unusual shape: memory cut differently on each rank, empty pieces, one-byte elements at
// odd addresses, parts that are not whole blocks, the smallest and largest segments, nine ranks.
#include <errno.h>
#include <stdint.h>
#include <unistd.h>

#include "job.h"

// Lays a line of `bytes` out as pieces of `piece` bytes with `gap` bytes between them; every third piece has none.
static int split_buffer(unsigned char *memory, size_t bytes, size_t piece, size_t gap, struct nb_segment *segments) {
    int n = 0;
    size_t at = 0;
    for (size_t done = 0; done < bytes; n++) {
        size_t take = n % 3 == 2 ? 0 : bytes - done < piece ? bytes - done : piece;
        segments[n] = (struct nb_segment){.base = take > 0 ? memory + at : NULL, .bytes = take};
        at += take > 0 ? take + gap : 0;
        done += take;
    }
    return n;
}

// Copies the line into the pieces, or the pieces into the line.
static void pieces_copy(const struct nb_segment *segments, int count, unsigned char *line, bool into) {
    for (int i = 0; i < count; i++) {
        if (segments[i].bytes > 0) {
            memcpy(into ? segments[i].base : line, into ? line : segments[i].base, segments[i].bytes);
        }
        line += segments[i].bytes;
    }
}

static unsigned char input_value(int rank, size_t i) {
    return (unsigned char)((i * 3 + (size_t)rank * 5) % 41);
}

static bool even_parts(const struct test_rank *me, enum nb_op_kind kind, size_t bytes) {
    size_t size = (size_t)me->size;
    bool parts = kind == NB_OP_ALLGATHER || kind == NB_OP_REDUCESCATTER;
    return kind == NB_OP_ALLTOALL ? bytes % (2 * size) == 0 : !parts || bytes % size == 0;
}

// An all-to-all over the line of op's pieces.
static void exchange(struct test_rank *me, struct nb_op *op, unsigned char *line, const char *what) {
    char name[NB_NAME_MAX];
    size_t half = 0;
    for (int i = 0; i < op->segment_count; i++) {
        half += op->segments[i].bytes;
    }
    half /= 2;
    size_t part = half / (size_t)me->size;
    for (size_t i = 0; i < half; i++) {
        line[i] = input_value(me->rank, i);
        line[half + i] = 0xee;
    }
    pieces_copy(op->segments, op->segment_count, line, true);
    snprintf(name, sizeof name, "%s.exchange", what);
    op->name = name;
    test_do(me, *op);
    pieces_copy(op->segments, op->segment_count, line, false);
    for (size_t i = 0; i < half; i++) {
        unsigned char want = input_value((int)(i / part), (size_t)me->rank * part + i % part);
        CHECK(line[i] == input_value(me->rank, i), "rank %d, %s: the input's [%zu] has changed", me->rank, name, i);
        CHECK(line[half + i] == want, "rank %d, %s: [%zu] is %d, not %d", me->rank, name, i, line[half + i], want);
    }
}

static void one_layout(struct test_rank *me, size_t bytes, size_t piece, const char *what) {
    size_t room = bytes + (bytes / piece + 2) * 7 + 64;
    unsigned char *memory = calloc(1, room);
    unsigned char *line = malloc(bytes);
    struct nb_segment *segments = calloc(3 * (bytes / piece + 2), sizeof *segments);
    char name[NB_NAME_MAX];
    struct nb_op op = {.dtype = NB_U8, .segments = segments, .name = name};
    op.segment_count = split_buffer(memory + 1, bytes, piece, 7, segments);
    for (int kind = NB_OP_ALLREDUCE; kind < NB_OP_JOIN; kind++) {
        size_t part = bytes / (size_t)me->size;
        op.kind = (enum nb_op_kind)kind;
        op.root = me->size - 1;
        if (kind == NB_OP_BARRIER || !even_parts(me, op.kind, bytes)) {
            continue;
        }
        if (kind == NB_OP_ALLTOALL) {
            exchange(me, &op, line, what);
            continue;
        }
        for (size_t i = 0; i < bytes; i++) {
            bool mine = kind == NB_OP_ALLGATHER ? i / part == (size_t)me->rank : me->rank == op.root;
            bool all = kind == NB_OP_ALLREDUCE || kind == NB_OP_REDUCESCATTER;
            line[i] = all || mine ? input_value(me->rank, i) : 0xee;
        }
        pieces_copy(segments, op.segment_count, line, true);
        snprintf(name, sizeof name, "%s.%d", what, kind);
        test_do(me, op);
        pieces_copy(segments, op.segment_count, line, false);
        for (size_t i = 0; i < bytes; i++) {
            unsigned char sum = 0;
            for (int r = 0; r < me->size; r++) {
                sum = (unsigned char)(sum + input_value(r, i));
            }
            unsigned char want = kind == NB_OP_BROADCAST ? input_value(op.root, i) : sum;
            want = kind == NB_OP_ALLGATHER ? input_value((int)(i / part), i) : want;
            bool mine = kind != NB_OP_REDUCESCATTER || i / part == (size_t)me->rank;
            CHECK(!mine || line[i] == want, "rank %d, %s: [%zu] is %d, not %d", me->rank, name, i, line[i], want);
        }
    }
    free(line);
    free(segments);
    free(memory);
}

static void layouts(struct test_rank *me) {
    static const size_t pieces[] = {1 << 20, 4096, 3001, 5000, 1 << 20};
    size_t mine = pieces[(size_t)me->rank % 5];
    size_t size = (size_t)me->size;
    one_layout(me, 30011 * size, mine, "cut by rank");           // each rank another way
    one_layout(me, 200003, pieces[4 - me->rank % 5], "odd");     // no whole element, block or part
    one_layout(me, 40000 * size, 2500, "many");                  // too many pieces to travel
    one_layout(me, 3 * size, 1, "bytes");                        // pieces of one byte
    one_layout(me, 100 * size, me->rank == 0 ? 100 : 33, "few"); // less than a block
}

static void nothing(struct test_rank *me) {
    static const char *const names[NB_OP_JOIN] = {"reduce", "gather", "scatter", "cast", "barrier", "all to all"};
    struct nb_segment none[3] = {{0}};
    for (int kind = 0; kind < NB_OP_JOIN; kind++) { // a join is never of nothing
        for (int count = 0; count < 4; count += 3) {
            struct nb_op op = {.name = names[kind], .kind = (enum nb_op_kind)kind, .dtype = NB_F64};
            op.segments = none;
            op.segment_count = count;
            op.postscale = 3;
            test_do(me, op);
        }
    }
}

// A large broadcast from each root.
static void casts(struct test_rank *me) {
    size_t n = 700007;
    int32_t *line = malloc(n * sizeof *line);
    struct nb_segment all = {.base = line, .bytes = n * sizeof *line};
    for (int root = 0; root < me->size; root++) {
        for (size_t i = 0; i < n; i++) {
            line[i] = me->rank == root ? (int32_t)(i ^ (size_t)root * 77) : -1;
        }
        struct nb_op op = {.name = "cast", .kind = NB_OP_BROADCAST, .dtype = NB_I32, .root = root};
        op.segments = &all;
        op.segment_count = 1;
        test_do(me, op);
        for (size_t i = 0; i < n; i++) {
            CHECK(line[i] == (int32_t)(i ^ (size_t)root * 77), "rank %d of %d, root %d: [%zu] is %d", me->rank,
                  me->size, root, i, line[i]);
        }
    }
    free(line);
}

static void shapes(struct test_rank *me) {
    nothing(me);
    layouts(me);
}

// Several all-reduces under way at once, of sizes from an element to many blocks, each in its own order of pieces.
static void crowd(struct test_rank *me) {
    enum { CROWD = 24 };
    static const size_t sizes[] = {1, 3, 64, 1000, 5000, 40001};
    struct nb_work *works[CROWD];
    int32_t *lines[CROWD];
    struct nb_error err = {0};
    for (int i = 0; i < CROWD; i++) {
        int which = (i * 7 + me->rank * 5) % CROWD; // each rank in another order
        size_t n = sizes[which % 6];
        char name[32];
        lines[which] = malloc(n * sizeof *lines[which]);
        CHECK(lines[which] != NULL, "memory");
        for (size_t k = 0; k < n; k++) {
            lines[which][k] = (int32_t)(k % 1009) + which + me->rank;
        }
        snprintf(name, sizeof name, "crowd.%d", which);
        struct nb_segment all = {.base = lines[which], .bytes = n * sizeof *lines[which]};
        struct nb_op op = {.name = name, .dtype = NB_I32, .segments = &all, .segment_count = 1, .prescale = 2};
        CHECK(nb_submit(nb_job_world(me->job), &op, &works[which], &err) == 0, "%s: %s", name, err.text);
    }
    for (int i = 0; i < CROWD; i++) {
        CHECK(nb_work_wait(works[i], 30000, &err) == 0, "crowd.%d: %s", i, err.text);
        for (size_t k = 0; k < sizes[i % 6]; k++) {
            int32_t want = 2 * (me->size * ((int32_t)(k % 1009) + i) + me->size * (me->size - 1) / 2);
            CHECK(lines[i][k] == want, "rank %d, crowd.%d: [%zu] is %d, not %d", me->rank, i, k, lines[i][k], want);
        }
        nb_work_release(works[i]);
        free(lines[i]);
    }
}

static int algorithms(struct test_rank template) {
    static const enum nb_algorithm_id each[] = {NB_ALGORITHM_NONE, NB_ALGORITHM_DOUBLING, NB_ALGORITHM_HALVING};
    int rc = 0;
    for (int a = 0; a < 3 && rc == 0; a++) {
        template.algorithm = each[a];
        template.run = shapes;
        rc = test_job(&template);
        template.run = crowd;
        rc = rc == 0 ? test_job(&template) : rc;
    }
    return rc;
}

static int network(const char *transport, size_t segment_bytes, int size) {
    struct test_rank template = test_on(transport);
    template.size = size;
    template.streams = 2;
    template.segment_bytes = segment_bytes;
    int rc = algorithms(template);
    if (rc == 0) {
        template.run = casts;
        rc = test_job(&template);
    }
    return rc;
}

// test_shapes [NETWORK]: one network, or every one that is there.
int main(int argc, char **argv) {
    static const char *const networks[] = {"shm", "tcp", "ofi"};
    int rc = 0;
    for (int i = 0; i < 3 && rc == 0; i++) {
        const char *name = argc > 1 ? argv[1] : networks[i];
        for (int size = 1; size <= 5 && rc == 0; size++) {
            rc = network(name, 0, size);
        }
        rc = rc == 0 ? network(name, 16 * 1024, 3) : rc;
        rc = rc == 0 ? network(name, 2 * 1024 * 1024, 2) : rc;
        rc = rc == 0 && i < 2 ? network(name, 0, 9) : rc;
        i += argc > 1;
    }
    return rc;
}
