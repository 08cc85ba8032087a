// Pair sums: add two ranks' memory and write the sum to both, in one pass, for two ranks that share memory.
#ifndef NB_COLL_REDUCE_PAIR_H
#define NB_COLL_REDUCE_PAIR_H

#include <stddef.h>

// one[i] = two[i] = scaled(a[i] op b[i]), bit for bit as the kernels of reduce.h in sequence. `one` and `two` may be
// `a` and `b`; otherwise nothing overlaps. Any alignment. scale 1: none.
typedef void (*nb_pair_fn)(void *one, void *two, const void *a, const void *b, size_t count, double scale);

// Returns the best kernel for this CPU. NULL: none for this reduction, or unknown dtype.
nb_pair_fn nb_pair_kernel(int dtype, int redop);

#endif
