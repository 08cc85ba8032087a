// Times every reduction kernel of every set that this CPU runs, each beside memcpy of as many bytes as it writes.
// usage: kernels BYTES ROUNDS     one line a measurement: set dtype operation round kernel_ns memcpy_ns
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/dtype.h"
#include "coll/kernels.h"
#include "coll/reduce.h"
#include "coll/reduce_pair.h"

enum { SPANS = 5, SPAN_NS = 60000, ALIGNMENT = 4096 };

// Called through memory, so that no call is known to be without effect.
static void *(*volatile copy)(void *, const void *, size_t) = memcpy;

static struct {
    unsigned char *to;
    unsigned char *from;
    size_t bytes;
} piece;

static double now_ns(void) {
    struct timespec at;
    (void)clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec * 1e9 + (double)at.tv_nsec;
}

// What is timed: a reduction, a scale, the sum of a pair or, where all are NULL, memcpy.
struct what {
    nb_reduce_fn reduce;
    nb_scale_fn scale;
    nb_pair_fn pair;
    size_t count;
};

enum { SCALE = NB_REDOPS, PAIR, OPS };

static void once(const struct what *what) {
    if (what->reduce != NULL) {
        what->reduce(piece.to, piece.from, what->count);
    } else if (what->scale != NULL) {
        what->scale(piece.to, what->count, 1.0);
    } else if (what->pair != NULL) {
        what->pair(piece.to, piece.from, piece.to, piece.from, what->count, 1.0);
    } else {
        (void)copy(piece.to, piece.from, piece.bytes);
    }
}

// Mean time of a call, over as many as fill a span.
static double span_ns(const struct what *what) {
    double began = now_ns();
    double took = 0;
    long calls = 0;
    for (long more = 1; took < SPAN_NS; more *= 2) {
        for (long i = 0; i < more; i++) {
            once(what);
        }
        calls += more;
        took = now_ns() - began;
    }
    return took / (double)calls;
}

// Of the fastest span: others may use this core too. A call goes before, so that the piece is in the cache.
static double time_ns(const struct what *what) {
    once(what);
    double least = span_ns(what);
    for (int i = 1; i < SPANS; i++) {
        double took = span_ns(what);
        least = took < least ? took : least;
    }
    return least;
}

// One number in every element, the same after each operation: nothing grows beyond what its type holds, or becomes
// subnormal.
static void fill(unsigned char *at, int dtype, int op) {
    static const uint64_t ones[NB_DTYPES] = {
        [NB_U8] = 1,       [NB_I8] = 1,        [NB_I32] = 1,          [NB_I64] = 1,
        [NB_F16] = 0x3c00, [NB_BF16] = 0x3f80, [NB_F32] = 0x3f800000, [NB_F64] = 0x3ff0000000000000};
    uint64_t value = op == PAIR ? 0 : ones[dtype];
    size_t width = nb_dtype_size(dtype);
    for (size_t i = 0; i + width <= piece.bytes; i += width) {
        memcpy(at + i, &value, width);
    }
}

static void measure(int isa, int dtype, int op, int round) {
    struct what what = {.count = piece.bytes / nb_dtype_size(dtype)};
    const char *name = op < NB_REDOPS ? nb_redop_name(op) : op == SCALE ? "scale" : "pair";
    if (op < NB_REDOPS) {
        what.reduce = nb_reduce_kernel((enum nb_isa)isa, dtype, op);
    } else if (op == SCALE) {
        what.scale = nb_scale_kernel((enum nb_isa)isa, dtype);
    } else {
        nb_pair_fn own = nb_kernels_of(isa)->pair[dtype];
        what.pair = own != NULL ? own : nb_pair_generic[dtype];
    }
    fill(piece.to, dtype, op);
    fill(piece.from, dtype, op);
    double kernel_ns = time_ns(&what);
    double memcpy_ns = time_ns(&(struct what){0}) * (op == PAIR ? 2 : 1);
    printf("%s %s %s %d %.1f %.1f\n", nb_isa_name(isa), nb_dtype_name(dtype), name, round, kernel_ns, memcpy_ns);
}

int main(int argc, char **argv) {
    piece.bytes = argc == 3 ? strtoul(argv[1], NULL, 10) : 0;
    long rounds = argc == 3 ? strtol(argv[2], NULL, 10) : 0;
    if (piece.bytes == 0 || piece.bytes % ALIGNMENT != 0 || rounds <= 0) {
        (void)fprintf(stderr, "usage: kernels BYTES ROUNDS, where BYTES is a multiple of %d\n", ALIGNMENT);
        return 2;
    }
    piece.to = aligned_alloc(ALIGNMENT, piece.bytes);
    piece.from = aligned_alloc(ALIGNMENT, piece.bytes);
    if (piece.to == NULL || piece.from == NULL) {
        (void)fprintf(stderr, "no memory for two times %zu bytes\n", piece.bytes);
        return 1;
    }
    for (int round = 0; round < rounds; round++) {
        for (int dtype = 0; dtype < NB_DTYPES; dtype++) {
            for (int op = 0; op < OPS; op++) {
                for (int isa = 0; isa < NB_ISAS; isa++) {
                    if (nb_isa_runs(isa)) {
                        measure(isa, dtype, op, round);
                    }
                }
            }
        }
    }
    return 0;
}
