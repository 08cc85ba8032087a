// The sum of two ranks' memory, written to both, in one pass: what two ranks that share memory need.
#ifndef NB_COLL_REDUCE_PAIR_H
#define NB_COLL_REDUCE_PAIR_H

#include <stddef.h>

// one[i] = two[i] = scaled(a[i] op b[i]): bit for bit what the kernels of reduce.h give one after the other. `one` and
// `two` may be `a` and `b`; apart from that nothing overlaps. Any alignment. scale 1: none.
typedef void (*nb_pair_fn)(void *one, void *two, const void *a, const void *b, size_t count, double scale);

// The best for this CPU. NULL: there is none for the op, or no such dtype.
nb_pair_fn nb_pair_kernel(int dtype, int redop);

#endif
