// Pair sums: by a dedicated kernel if the CPU has one, else block by block.
#include "coll/reduce_pair.h"

#include <stddef.h>
#include <string.h>

#include "base/dtype.h"
#include "coll/kernels.h"
#include "coll/reduce.h"

enum { BLOCK_BYTES = 4096 }; // with its inputs and outputs it stays in the L1 cache

struct pair {
    char *to[2];
    const char *from[2];
    double scale;
};

static void by_blocks(struct pair pair, int dtype, size_t count) {
    enum nb_isa isa = nb_reduce_best();
    nb_reduce_fn add = nb_reduce_kernel(isa, dtype, NB_SUM);
    nb_scale_fn multiply = nb_scale_kernel(isa, dtype);
    size_t element = nb_dtype_size(dtype);
    char sum[BLOCK_BYTES];
    for (size_t left = count * element, take; left > 0; left -= take) {
        take = left < sizeof sum ? left : sizeof sum;
        memcpy(sum, pair.from[0], take);
        add(sum, pair.from[1], take / element);
        if (pair.scale != 1) {
            multiply(sum, take / element, pair.scale);
        }
        for (int i = 0; i < 2; i++) {
            memcpy(pair.to[i], sum, take);
            pair.to[i] += take;
            pair.from[i] += take;
        }
    }
}

#define PAIR(name, dtype)                                                                                              \
    static void name(void *one, void *two, const void *a, const void *b, size_t count, double scale) {                 \
        by_blocks((struct pair){{one, two}, {a, b}, scale}, dtype, count);                                             \
    }

PAIR(u8_pair, NB_U8)
PAIR(i8_pair, NB_I8)
PAIR(i32_pair, NB_I32)
PAIR(i64_pair, NB_I64)
PAIR(f16_pair, NB_F16)
PAIR(bf16_pair, NB_BF16)
PAIR(f32_pair, NB_F32)
PAIR(f64_pair, NB_F64)

const nb_pair_fn nb_pair_generic[NB_DTYPES] = {u8_pair,  i8_pair,   i32_pair, i64_pair,
                                               f16_pair, bf16_pair, f32_pair, f64_pair};

nb_pair_fn nb_pair_kernel(int dtype, int redop) {
    if (dtype < 0 || dtype >= NB_DTYPES || redop != NB_SUM) {
        return NULL;
    }
    nb_pair_fn own = nb_kernels_of((int)nb_reduce_best())->pair[dtype];
    return own != NULL ? own : nb_pair_generic[dtype];
}
