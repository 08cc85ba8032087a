// Buffers of unusual shape: memory split differently on each rank, empty pieces, one-byte elements at odd addresses,
// parts that are not whole blocks. Also the smallest and largest segments, and nine ranks.
#include <errno.h>
#include <stdint.h>
#include <sys/uio.h>
#include <unistd.h>

#include "job.h"

enum { PERIOD = 41 }; // of the inputs

// Splits a buffer of `bytes` into pieces of `piece` bytes with `gap` bytes between them; every third piece is empty.
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

// Copies contiguous data into the pieces, or the pieces into contiguous data.
static void pieces_copy(const struct nb_segment *segments, int count, unsigned char *data, bool into) {
    for (int i = 0; i < count; i++) {
        if (segments[i].bytes > 0) {
            memcpy(into ? segments[i].base : data, into ? data : segments[i].base, segments[i].bytes);
        }
        data += segments[i].bytes;
    }
}

static unsigned char input_value(int rank, size_t i) {
    return (unsigned char)((i * 3 + (size_t)rank * 5) % PERIOD);
}

// Writes what a rank has from index `first` on, or the sum over the ranks before `ranks`, to [0, n).
static void write_values(unsigned char *data, size_t n, int rank, int ranks, size_t first) {
    size_t done = n < PERIOD ? n : PERIOD;
    for (size_t i = 0; i < done; i++) {
        data[i] = ranks > 0 ? 0 : input_value(rank, first + i);
        for (int r = 0; r < ranks; r++) {
            data[i] = (unsigned char)(data[i] + input_value(r, first + i));
        }
    }
    for (size_t more; done < n; done += more) { // the period divides what is written
        more = n - done < done ? n - done : done;
        memcpy(data + done, data, more);
    }
}

// Fails at the first byte that differs.
static void check_bytes(const struct test_rank *me, const char *name, const unsigned char *got,
                        const unsigned char *want, size_t n) {
    size_t i = 0;
    while (memcmp(got, want, n) != 0 && got[i] == want[i]) {
        i++;
    }
    CHECK(memcmp(got, want, n) == 0, "rank %d, %s: [%zu] is %d, not %d", me->rank, name, i, got[i], want[i]);
}

static bool even_parts(const struct test_rank *me, enum nb_op_kind kind, size_t bytes) {
    size_t size = (size_t)me->size;
    bool parts = kind == NB_OP_ALLGATHER || kind == NB_OP_REDUCESCATTER;
    return kind == NB_OP_ALLTOALL ? bytes % (2 * size) == 0 : !parts || bytes % size == 0;
}

// All-to-all over the buffer that op's pieces form.
static void check_alltoall(struct test_rank *me, struct nb_op *op, unsigned char *data, const char *what) {
    char name[NB_NAME_MAX];
    size_t half = 0;
    for (int i = 0; i < op->segment_count; i++) {
        half += op->segments[i].bytes;
    }
    half /= 2;
    size_t part = half / (size_t)me->size;
    write_values(data, half, me->rank, 0, 0);
    memset(data + half, 0xee, half);
    pieces_copy(op->segments, op->segment_count, data, true);
    snprintf(name, sizeof name, "%s.exchange", what);
    op->name = name;
    test_do(me, *op);
    pieces_copy(op->segments, op->segment_count, data, false);
    unsigned char *want = malloc(half + 1);
    write_values(want, half, me->rank, 0, 0);
    check_bytes(me, "input", data, want, half);
    for (int r = 0; r < me->size; r++) {
        write_values(want + (size_t)r * part, part, r, 0, (size_t)me->rank * part);
    }
    check_bytes(me, name, data + half, want, half);
    free(want);
}

// Writes what an operation leaves to [0, bytes) of `want`. Returns the range of it that is checked.
static struct iovec expected_result(const struct test_rank *me, const struct nb_op *op, unsigned char *want,
                                    size_t bytes) {
    size_t part = bytes / (size_t)me->size;
    if (op->kind == NB_OP_ALLGATHER) {
        for (int r = 0; r < me->size; r++) {
            write_values(want + (size_t)r * part, part, r, 0, (size_t)r * part);
        }
    } else if (op->kind == NB_OP_BROADCAST) {
        write_values(want, bytes, op->root, 0, 0);
    } else {
        write_values(want, bytes, 0, me->size, 0);
    }
    bool own = op->kind == NB_OP_REDUCESCATTER;
    return (struct iovec){want + (own ? (size_t)me->rank * part : 0), own ? part : bytes};
}

static void check_layout(struct test_rank *me, size_t bytes, size_t piece, const char *what) {
    size_t room = bytes + (bytes / piece + 2) * 7 + 64;
    unsigned char *memory = calloc(1, room);
    unsigned char *data = malloc(bytes);
    unsigned char *want = malloc(bytes);
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
            check_alltoall(me, &op, data, what);
            continue;
        }
        memset(data, 0xee, bytes);
        size_t first = kind == NB_OP_ALLGATHER ? (size_t)me->rank * part : 0;
        size_t given = kind == NB_OP_ALLGATHER ? part : kind == NB_OP_BROADCAST && me->rank != op.root ? 0 : bytes;
        write_values(data + first, given, me->rank, 0, first);
        pieces_copy(segments, op.segment_count, data, true);
        snprintf(name, sizeof name, "%s.%d", what, kind);
        test_do(me, op);
        pieces_copy(segments, op.segment_count, data, false);
        struct iovec checked = expected_result(me, &op, want, bytes);
        check_bytes(me, name, data + ((unsigned char *)checked.iov_base - want), checked.iov_base, checked.iov_len);
    }
    free(want);
    free(data);
    free(segments);
    free(memory);
}

static void all_layouts(struct test_rank *me) {
    static const size_t pieces[] = {1 << 20, 4096, 3001, 5000, 1 << 20};
    size_t mine = pieces[(size_t)me->rank % 5];
    size_t size = (size_t)me->size;
    check_layout(me, 30011 * size, mine, "split by rank");         // differently on each rank
    check_layout(me, 200003, pieces[4 - me->rank % 5], "odd");     // not a multiple of a block or part
    check_layout(me, 40000 * size, 2500, "many");                  // more pieces than a segment can have
    check_layout(me, 3 * size, 1, "bytes");                        // pieces of one byte
    check_layout(me, 100 * size, me->rank == 0 ? 100 : 33, "few"); // smaller than a block
}

static void empty_operations(struct test_rank *me) {
    static const char *const names[NB_OP_JOIN] = {"reduce", "gather", "scatter", "cast", "barrier", "all to all"};
    struct nb_segment none[3] = {{0}};
    for (int kind = 0; kind < NB_OP_JOIN; kind++) { // a join always has a buffer
        for (int count = 0; count < 4; count += 3) {
            struct nb_op op = {.name = names[kind], .kind = (enum nb_op_kind)kind, .dtype = NB_F64};
            op.segments = none;
            op.segment_count = count;
            op.scaled = true;
            op.prescale = 1;
            op.postscale = 3;
            test_do(me, op);
        }
    }
}

// Large broadcasts from each root.
static void large_broadcasts(struct test_rank *me) {
    size_t n = 700007;
    int32_t *data = malloc(n * sizeof *data);
    struct nb_segment all = {.base = data, .bytes = n * sizeof *data};
    for (int root = 0; root < me->size; root++) {
        for (size_t i = 0; i < n; i++) {
            data[i] = me->rank == root ? (int32_t)(i ^ (size_t)root * 77) : -1;
        }
        struct nb_op op = {.name = "cast", .kind = NB_OP_BROADCAST, .dtype = NB_I32, .root = root};
        op.segments = &all;
        op.segment_count = 1;
        test_do(me, op);
        for (size_t i = 0; i < n; i++) {
            CHECK(data[i] == (int32_t)(i ^ (size_t)root * 77), "rank %d of %d, root %d: [%zu] is %d", me->rank,
                  me->size, root, i, data[i]);
        }
    }
    free(data);
}

static void empty_and_odd_shapes(struct test_rank *me) {
    empty_operations(me);
    all_layouts(me);
}

// Concurrent all-reduces, of sizes from one element to many blocks.
static void concurrent_allreduces(struct test_rank *me) {
    enum { CONCURRENT = 24 };
    static const size_t sizes[] = {1, 3, 64, 1000, 5000, 40001};
    struct nb_work *works[CONCURRENT];
    int32_t *buffers[CONCURRENT];
    struct nb_error err = {0};
    for (int i = 0; i < CONCURRENT; i++) {
        int which = (i * 7 + me->rank * 5) % CONCURRENT; // a different order on each rank
        size_t n = sizes[which % 6];
        char name[32];
        buffers[which] = malloc(n * sizeof *buffers[which]);
        CHECK(buffers[which] != NULL, "memory");
        for (size_t k = 0; k < n; k++) {
            buffers[which][k] = (int32_t)(k % 1009) + which + me->rank;
        }
        snprintf(name, sizeof name, "concurrent.%d", which);
        struct nb_segment all = {.base = buffers[which], .bytes = n * sizeof *buffers[which]};
        struct nb_op op = {.name = name, .dtype = NB_I32, .segments = &all, .segment_count = 1};
        op.scaled = true;
        op.prescale = 2;
        op.postscale = 1;
        CHECK(nb_submit(nb_job_world(me->job), &op, &works[which], &err) == 0, "%s: %s", name, err.text);
    }
    for (int i = 0; i < CONCURRENT; i++) {
        CHECK(nb_work_wait(works[i], 30000, &err) == 0, "concurrent.%d: %s", i, err.text);
        for (size_t k = 0; k < sizes[i % 6]; k++) {
            int32_t want = 2 * (me->size * ((int32_t)(k % 1009) + i) + me->size * (me->size - 1) / 2);
            CHECK(buffers[i][k] == want, "rank %d, concurrent.%d: [%zu] is %d, not %d", me->rank, i, k, buffers[i][k],
                  want);
        }
        nb_work_release(works[i]);
        free(buffers[i]);
    }
}

static int test_algorithms(struct test_rank template) {
    static const enum nb_algorithm_id each[] = {NB_ALGORITHM_NONE, NB_ALGORITHM_DOUBLING, NB_ALGORITHM_HALVING};
    int rc = 0;
    for (int a = 0; a < 3 && rc == 0; a++) {
        template.algorithm = each[a];
        template.run = empty_and_odd_shapes;
        rc = test_job(&template);
        template.run = concurrent_allreduces;
        rc = rc == 0 ? test_job(&template) : rc;
    }
    return rc;
}

static int test_network(const char *transport, size_t segment_bytes, int size) {
    struct test_rank template = test_on(transport);
    template.size = size;
    template.streams = 2;
    template.segment_bytes = segment_bytes;
    int rc = test_algorithms(template);
    if (rc == 0) {
        template.run = large_broadcasts;
        rc = test_job(&template);
    }
    return rc;
}

// Usage: test_shapes [NETWORK]. Default: every network that is available.
int main(int argc, char **argv) {
    static const char *const networks[] = {"shm", "tcp", "ofi"};
    int rc = 0;
    for (int i = 0; i < 3 && rc == 0; i++) {
        const char *name = argc > 1 ? argv[1] : networks[i];
        for (int size = 1; size <= 5 && rc == 0; size++) {
            rc = test_network(name, 0, size);
        }
        rc = rc == 0 ? test_network(name, 16 * 1024, 3) : rc;
        rc = rc == 0 ? test_network(name, 2 * 1024 * 1024, 2) : rc;
        rc = rc == 0 && i < 2 ? test_network(name, 0, 9) : rc;
        i += argc > 1;
    }
    return rc;
}
