// Vector loops and operations that all instruction sets share. The including file has defined TARGET (the function
// attribute), the types `vector` (of bytes), `floats` and `doubles` of one size, and vector_load and vector_store for
// any address. Where the CPU can, it also defines HAS_PARTS, with part_load and part_store for at most a vector of
// bytes. Its own operations follow, then coll/vector_set.h.
#ifndef NB_COLL_VECTORS_H
#define NB_COLL_VECTORS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { VECTOR = sizeof(vector), HALF = VECTOR / 2 };

typedef uint8_t u8s __attribute__((vector_size(sizeof(vector))));
typedef uint16_t u16s __attribute__((vector_size(sizeof(vector))));
typedef uint32_t u32s __attribute__((vector_size(sizeof(vector))));
typedef uint64_t u64s __attribute__((vector_size(sizeof(vector))));

// The new value of the vector at `to`. Takes addresses, so that an operation can load its halves separately.
typedef vector vector_op(const char *to, const char *from);

#define VECTOR_LOOP static inline __attribute__((always_inline)) TARGET

// Defines operation name##_op: `result` of a (present) and b (arriving).
#define OP(name, type, result)                                                                                         \
    static inline TARGET vector name##_op(const char *to, const char *from) {                                          \
        type a = (type)vector_load(to);                                                                                \
        type b = (type)vector_load(from);                                                                              \
        return (vector)(result);                                                                                       \
    }

#ifndef HAS_PARTS
static inline TARGET vector part_load(const void *at, size_t bytes) {
    vector part = {0};
    memcpy(&part, at, bytes);
    return part;
}

static inline TARGET void part_store(void *at, size_t bytes, vector part) {
    memcpy(at, &part, bytes);
}
#endif

static inline size_t least_of(size_t a, size_t b) {
    return a < b ? a : b;
}

// Returns the bytes before the first aligned vector at an element boundary; 0 if there is none.
static inline size_t head_bytes(const char *d, size_t bytes, size_t element_bytes) {
    size_t head = -(uintptr_t)d & (VECTOR - 1);
    return head % element_bytes != 0 ? 0 : least_of(head, bytes);
}

VECTOR_LOOP void part_reduce(char *d, vector from, size_t bytes, vector_op *op) {
    vector to = part_load(d, bytes);
    part_store(d, bytes, op((const char *)&to, (const char *)&from));
}

// d = op(d, s): partial vectors first and last, whole vectors in between.
VECTOR_LOOP void vectors_reduce(char *d, const char *s, size_t bytes, size_t element_bytes, vector_op *op) {
    size_t done = head_bytes(d, bytes, element_bytes);
    if (done > 0) {
        part_reduce(d, part_load(s, done), done, op);
    }
    for (; bytes - done >= 2 * VECTOR; done += 2 * VECTOR) {
        vector first = op(d + done, s + done);
        vector second = op(d + done + VECTOR, s + done + VECTOR);
        vector_store(d + done, first);
        vector_store(d + done + VECTOR, second);
    }
    for (size_t take; done < bytes; done += take) {
        take = least_of(bytes - done, VECTOR);
        part_reduce(d + done, part_load(s + done, take), take, op);
    }
}

// d = op(d, factor), in the same way.
VECTOR_LOOP void vectors_scale(char *d, vector factor, size_t bytes, size_t element_bytes, vector_op *op) {
    size_t done = head_bytes(d, bytes, element_bytes);
    if (done > 0) {
        part_reduce(d, factor, done, op);
    }
    for (; bytes - done >= VECTOR; done += VECTOR) {
        vector_store(d + done, op(d + done, (const char *)&factor));
    }
    if (done < bytes) {
        part_reduce(d + done, factor, bytes - done, op);
    }
}

// to[0] = to[1] = from[0] + from[1], scaled if factor is not NULL.
VECTOR_LOOP void vectors_pair(char *const to[2], const char *const from[2], size_t bytes, vector_op *sum,
                              vector_op *scale, const vector *factor) {
    size_t done = 0;
    for (; bytes - done >= 2 * VECTOR; done += 2 * VECTOR) {
        vector both[2];
        for (int i = 0; i < 2; i++) {
            size_t at = done + (size_t)i * VECTOR;
            both[i] = sum(from[0] + at, from[1] + at);
            both[i] = factor != NULL ? scale((const char *)&both[i], (const char *)factor) : both[i];
        }
        for (int i = 0; i < 2; i++) {
            vector_store(to[i] + done, both[0]);
            vector_store(to[i] + done + VECTOR, both[1]);
        }
    }
    for (size_t take; done < bytes; done += take) {
        take = least_of(bytes - done, VECTOR);
        vector a = part_load(from[0] + done, take);
        vector b = part_load(from[1] + done, take);
        vector whole = sum((const char *)&a, (const char *)&b);
        whole = factor != NULL ? scale((const char *)&whole, (const char *)factor) : whole;
        part_store(to[0] + done, take, whole);
        part_store(to[1] + done, take, whole);
    }
}

// Sums and products wrap, so they are those of the unsigned type of the same width.
OP(u8_sum, u8s, a + b)
OP(u32_sum, u32s, a + b)
OP(u32_product, u32s, a *b)
OP(u64_sum, u64s, a + b)
OP(u64_product, u64s, a *b)
OP(f32_sum, floats, a + b)
OP(f32_product, floats, a *b)
OP(f64_sum, doubles, a + b)
OP(f64_product, doubles, a *b)

// The low byte of a 16-bit product is that of the low bytes' product; the odd bytes are moved there.
OP(u8_product, u16s, ((a * b) & 0xff) | ((a >> 8) * (b & 0xff00)))

#endif
