// Every type and reduction on 1 to 9 ranks at odd sizes, byte for byte: all-reduce by every algorithm, and
// reduce-scatter. Values are small integers, so no order of additions rounds.
#include <stdint.h>

#include "base/arena.h"
#include "base/dtype.h"
#include "coll/reduce.h"
#include "job.h"

enum { COUNT_MAX = 20011, ITEM_BYTES_MAX = 8 };

static const size_t counts[] = {1, 3, 1021, COUNT_MAX};

// 1 or 2 for products, which would overflow otherwise; else 0 to 13.
static int input_value(int rank, size_t i, int redop) {
    uint32_t mixed = (uint32_t)(i * 2654435761u + (size_t)rank * 40503u) >> 7;
    return redop == NB_PRODUCT ? 1 + (int)(mixed % 2) : (int)(mixed % 14);
}

static int expected(int size, size_t i, int redop) {
    int result = input_value(0, i, redop);
    for (int r = 1; r < size; r++) {
        int check_operation = input_value(r, i, redop);
        switch (redop) {
        case NB_SUM:
            result += check_operation;
            break;
        case NB_MIN:
            result = check_operation < result ? check_operation : result;
            break;
        case NB_MAX:
            result = check_operation > result ? check_operation : result;
            break;
        default:
            result *= check_operation;
            break;
        }
    }
    return result;
}

// Stores an integer from 0 to 512 as the type. uint8 and int8 keep its low 8 bits, because they wrap.
static void store(unsigned char *at, int dtype, int value) {
    float single = (float)value;
    double real = value;
    int32_t word = value;
    int64_t wide = value;
    uint32_t bits;
    memcpy(&bits, &single, sizeof bits);
    uint16_t upper = (uint16_t)(bits >> 16);
    switch (dtype) {
    case NB_U8:
    case NB_I8:
        *at = (unsigned char)value;
        break;
    case NB_I32:
        memcpy(at, &word, sizeof word);
        break;
    case NB_I64:
        memcpy(at, &wide, sizeof wide);
        break;
    case NB_F16:
        nb_cast_f32_f16(at, &single, 1);
        break;
    case NB_BF16:
        memcpy(at, &upper, sizeof upper);
        break;
    case NB_F32:
        memcpy(at, &single, sizeof single);
        break;
    default:
        memcpy(at, &real, sizeof real);
        break;
    }
}

static void check_operation(struct test_rank *me, unsigned char *data, struct nb_op op, size_t count) {
    char name[NB_NAME_MAX];
    size_t item = nb_dtype_size(op.dtype);
    size_t part = count / (size_t)me->size;
    bool scatter = op.kind == NB_OP_REDUCESCATTER;
    struct nb_segment all = {.base = data, .bytes = count * item};
    for (size_t i = 0; i < count; i++) {
        store(data + i * item, op.dtype, input_value(me->rank, i, op.redop));
    }
    snprintf(name, sizeof name, "%d %d %d %zu", op.kind, op.dtype, op.redop, count);
    op.name = name;
    op.segments = &all;
    op.segment_count = 1;
    test_done(me, test_submit(me, op));
    for (size_t i = scatter ? (size_t)me->rank * part : 0; i < (scatter ? (size_t)(me->rank + 1) * part : count); i++) {
        unsigned char right[ITEM_BYTES_MAX];
        store(right, op.dtype, expected(me->size, i, op.redop));
        CHECK(memcmp(data + i * item, right, item) == 0, "rank %d of %d: %s of %s, kind %d, %zu elements: [%zu]",
              me->rank, me->size, nb_redop_name(op.redop), nb_dtype_name(op.dtype), (int)op.kind, count, i);
    }
}

static void check_every_type(struct test_rank *me) {
    bool ring = me->algorithm == NB_ALGORITHM_RING; // the other algorithms are not for large all-reduces
    size_t room = (size_t)COUNT_MAX * ITEM_BYTES_MAX + 1;
    struct nb_arena arena = {.fd = -1};
    struct nb_error err = {0};
    unsigned char *heap = malloc(room);
    CHECK(heap != NULL && nb_arena_open(&arena, room, &err) == 0, "memory: %s", err.text);
    CHECK(me->size == 1 || nb_job_map_arena(me->job, &arena, &err) == 0, "map: %s", err.text);
    for (int dtype = 0; dtype < NB_DTYPES; dtype++) {
        for (int redop = 0; redop < NB_REDOPS; redop++) {
            for (size_t c = 0; c < (ring ? sizeof counts / sizeof counts[0] : 3); c++) {
                struct nb_op op = {.kind = NB_OP_ALLREDUCE, .dtype = dtype, .redop = redop};
                check_operation(me, (dtype + redop) % 2 == 0 ? arena.base : heap, op, counts[c]);
                if (!ring) {
                    continue;
                }
                op.kind = NB_OP_REDUCESCATTER;
                check_operation(me, (dtype + redop) % 2 == 0 ? heap : arena.base, op,
                                counts[c] / (size_t)me->size * (size_t)me->size);
            }
        }
    }
    nb_job_close(me->job);
    me->job = NULL;
    nb_arena_close(&arena);
    free(heap);
}

// Usage: test_types shm|tcp|ofi
int main(int argc, char **argv) {
    static const enum nb_algorithm_id algorithms[] = {NB_ALGORITHM_RING, NB_ALGORITHM_DOUBLING, NB_ALGORITHM_HALVING};
    CHECK(argc == 2, "name one network");
    for (int size = 1; size <= 9; size++) {
        struct test_rank template = test_on(argv[1]);
        template.size = size;
        template.streams = strcmp(argv[1], "shm") == 0 ? 1 : 2;
        template.run = check_every_type;
        for (size_t i = 0; i < sizeof algorithms / sizeof algorithms[0]; i++) {
            template.algorithm = algorithms[i];
            int rc = i > 0 && template.shm == NB_SHM_REQUIRED
                         ? 0
                         : test_job(&template); // shared memory has a single algorithm
            if (rc != 0) {
                return rc;
            }
        }
    }
    return 0;
}
