// The loops that the vector sets share. The file that includes this has included coll/kernels.h and defined TARGET (how
// its functions are compiled), the type `vector`, and vector_load and vector_store for any address.
#ifndef NB_COLL_VECTORS_H
#define NB_COLL_VECTORS_H

#include <stddef.h>

// What one vector at `to` becomes. It takes addresses, so that an operation may load its halves one by one.
typedef vector vector_op(const char *to, const char *from);

#define VECTOR_LOOP static inline __attribute__((always_inline)) TARGET

// d = op(d, s) in whole vectors. Returns the bytes done: fewer than a vector are left.
VECTOR_LOOP size_t vectors_reduce(char *d, const char *s, size_t bytes, vector_op *op) {
    size_t done = 0;
    for (; bytes - done >= 2 * sizeof(vector); done += 2 * sizeof(vector)) {
        vector first = op(d + done, s + done);
        vector second = op(d + done + sizeof(vector), s + done + sizeof(vector));
        vector_store(d + done, first);
        vector_store(d + done + sizeof(vector), second);
    }
    for (; bytes - done >= sizeof(vector); done += sizeof(vector)) {
        vector_store(d + done, op(d + done, s + done));
    }
    return done;
}

// d = op(d, factor), likewise.
VECTOR_LOOP size_t vectors_scale(char *d, vector factor, size_t bytes, vector_op *op) {
    size_t done = 0;
    for (; bytes - done >= sizeof(vector); done += sizeof(vector)) {
        vector_store(d + done, op(d + done, (const char *)&factor));
    }
    return done;
}

// A factor for bfloat16. A NaN is one with nothing in its lower half, which sums and products of bfloat16 are too.
static inline float bf16_factor(double by) {
    return by == by ? (float)by : __builtin_nanf("");
}

// The kernel `name` from the operation name_op: whole vectors, then what is left by the generic kernel.
#define REDUCE(name, dtype, redop, element_bytes)                                                                      \
    static TARGET void name(void *restrict dst, const void *restrict src, size_t count) {                              \
        size_t done = vectors_reduce(dst, src, count * (element_bytes), name##_op);                                    \
        nb_kernels_generic.reduce[dtype][redop]((char *)dst + done, (const char *)src + done,                          \
                                                count - done / (element_bytes));                                       \
    }

// `factor` is an expression of `by`.
#define SCALE(name, dtype, element_bytes, factor, op)                                                                  \
    static TARGET void name(void *dst, size_t count, double by) {                                                      \
        size_t done = vectors_scale(dst, factor, count * (element_bytes), op);                                         \
        nb_kernels_generic.scale[dtype]((char *)dst + done, count - done / (element_bytes), by);                       \
    }

#endif
