// Pair kernels, which write a sum to two destinations: the same bits as the single-destination kernels in sequence.
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "base/dtype.h"
#include "check.h"
#include "coll/kernels.h"
#include "coll/reduce.h"
#include "coll/reduce_pair.h"

enum { BYTES_MAX = 9001, SHIFTS = 66, ROOM = BYTES_MAX + SHIFTS + 8 };

static uint64_t drawn = 0x9e3779b97f4a7c15u;

static uint64_t draw(void) {
    drawn ^= drawn << 13;
    drawn ^= drawn >> 7;
    drawn ^= drawn << 17;
    return drawn;
}

// Bit pattern of infinity by dtype; larger magnitudes are NaN. 0: not a floating-point type.
static const uint64_t infinities[NB_DTYPES] = {
    [NB_F16] = 0x7c00, [NB_BF16] = 0x7f80, [NB_F32] = 0x7f800000, [NB_F64] = 0x7ff0000000000000};

// Random bits, with infinities, NaN, zeros and subnormals of both signs.
static void fill(unsigned char *memory, int dtype, size_t shift) {
    size_t element = nb_dtype_size(dtype);
    uint64_t infinity = infinities[dtype];
    const uint64_t specials[] = {infinity, infinity + 1, infinity | infinity >> 1, 0, 1};
    for (size_t i = 0; i < ROOM; i++) {
        memory[i] = (unsigned char)draw();
    }
    for (size_t i = shift; i + element <= ROOM; i += 7 * element) {
        uint64_t special = specials[draw() % 5] | (draw() & 1) << (8 * element - 1);
        memcpy(memory + i, &special, element);
    }
}

// Equality in which all NaNs are equal, because the operand that a NaN comes from is unspecified.
static bool same(const unsigned char *a, const unsigned char *b, int dtype) {
    size_t element = nb_dtype_size(dtype);
    uint64_t x = 0;
    uint64_t y = 0;
    memcpy(&x, a, element);
    memcpy(&y, b, element);
    uint64_t magnitude = ((uint64_t)1 << (8 * element - 1)) - 1;
    bool number = infinities[dtype] != 0;
    return x == y || (number && (x & magnitude) > infinities[dtype] && (y & magnitude) > infinities[dtype]);
}

struct buffers {
    unsigned char a[ROOM];
    unsigned char b[ROOM];
    unsigned char want[ROOM];
    unsigned char copies[2][ROOM];
};

static void check(nb_pair_fn pair, int dtype, size_t count, size_t shift, double scale, bool in_place) {
    static struct buffers l;
    size_t element = nb_dtype_size(dtype);
    fill(l.a, dtype, shift);
    fill(l.b, dtype, shift);
    memcpy(l.want, l.a, ROOM);
    nb_reduce_kernel(NB_ISA_GENERIC, dtype, NB_SUM)(l.want + shift, l.b + shift, count);
    if (scale != 1) {
        nb_scale_kernel(NB_ISA_GENERIC, dtype)(l.want + shift, count, scale);
    }
    memcpy(l.copies[0], l.a, ROOM);
    memcpy(l.copies[1], l.b, ROOM);
    unsigned char *from[2] = {in_place ? l.copies[0] : l.a, in_place ? l.copies[1] : l.b};
    pair(l.copies[0] + shift, l.copies[1] + shift, from[0] + shift, from[1] + shift, count, scale);
    for (int t = 0; t < 2; t++) {
        const unsigned char *before = t == 0 ? l.a : l.b;
        size_t end = shift + count * element;
        CHECK(memcmp(l.copies[t], before, shift) == 0, "%s: written before the destination", nb_dtype_name(dtype));
        CHECK(memcmp(l.copies[t] + end, before + end, ROOM - end) == 0, "%s: written after the destination",
              nb_dtype_name(dtype));
        for (size_t i = shift; i < end; i += element) {
            CHECK(same(l.copies[t] + i, l.want + i, dtype), "%s, %zu elements from %zu, by %g: byte %zu of %d",
                  nb_dtype_name(dtype), count, shift, scale, i, t);
        }
    }
}

static void check_kernel(nb_pair_fn pair, int dtype) {
    const size_t most = BYTES_MAX / nb_dtype_size(dtype);
    const size_t counts[] = {0, 1, 7, 8, 15, 16, 17, 63, 64, 65, 100, 129, 531, most};
    for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
        for (size_t shift = 0; shift < SHIFTS; shift += 13) {
            check(pair, dtype, counts[c], shift, 1, true);
            check(pair, dtype, counts[c], shift, 1.0 / 3, true);
            check(pair, dtype, counts[c], shift, 0.5, false);
        }
    }
}

int main(void) {
    for (int dtype = 0; dtype < NB_DTYPES; dtype++) {
        CHECK(nb_pair_kernel(dtype, NB_SUM) != NULL, "%s has no kernel", nb_dtype_name(dtype));
        CHECK(nb_pair_kernel(dtype, NB_MAX) == NULL, "%s: there is a kernel for max", nb_dtype_name(dtype));
        check_kernel(nb_pair_generic[dtype], dtype);
        for (int isa = 0; isa < NB_ISAS; isa++) {
            nb_pair_fn own = nb_isa_runs(isa) ? nb_kernels_of(isa)->pair[dtype] : NULL;
            if (own != NULL) {
                check_kernel(own, dtype);
            }
        }
    }
    CHECK(nb_pair_kernel(-1, NB_SUM) == NULL && nb_pair_kernel(NB_DTYPES, NB_SUM) == NULL,
          "there is a kernel for an unknown dtype");
    return 0;
}
