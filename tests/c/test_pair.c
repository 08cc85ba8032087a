// The kernels that write a sum to two places give what the others give one after the other, bit for bit.
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "coll/reduce.h"
#include "coll/reduce_pair.h"

enum { COUNT = 531, SLACK = 64, ROOM = COUNT * 8 + SLACK };

static uint64_t drawn = 0x9e3779b97f4a7c15u;

static uint64_t draw(void) {
    drawn ^= drawn << 13;
    drawn ^= drawn >> 7;
    drawn ^= drawn << 17;
    return drawn;
}

// Any bits, and among them the special ones.
static void fill(unsigned char *memory, int dtype) {
    static const uint64_t f64s[] = {0x7ff0000000000000, 0xfff0000000000000, 0x7ff8000000000001, 0x8000000000000000, 1};
    static const uint32_t f32s[] = {0x7f800000, 0xff800000, 0x7fc00001, 0x80000000, 1};
    size_t element = nb_dtype_size(dtype);
    for (size_t i = 0; i < ROOM; i++) {
        memory[i] = (unsigned char)draw();
    }
    for (size_t i = 0; i < COUNT; i += 7) {
        size_t which = draw() % 5;
        const void *special = dtype == NB_F64 ? (const void *)&f64s[which] : (const void *)&f32s[which];
        memcpy(memory + i * element, special, element);
    }
}

// A NaN is a NaN: which of two it comes from is open.
static bool same(const unsigned char *a, const unsigned char *b, int dtype) {
    double x;
    double y;
    if (dtype == NB_F32) {
        float narrow[2];
        memcpy(&narrow[0], a, sizeof narrow[0]);
        memcpy(&narrow[1], b, sizeof narrow[1]);
        x = (double)narrow[0];
        y = (double)narrow[1];
    } else {
        memcpy(&x, a, sizeof x);
        memcpy(&y, b, sizeof y);
    }
    return memcmp(a, b, nb_dtype_size(dtype)) == 0 || (x != x && y != y);
}

static void one(int dtype, size_t count, size_t shift, double scale, bool aliased) {
    static unsigned char a[ROOM];
    static unsigned char b[ROOM];
    static unsigned char want[ROOM];
    static unsigned char apart[2][ROOM];
    size_t element = nb_dtype_size(dtype);
    nb_pair_fn pair = nb_pair_kernel(dtype, NB_SUM);
    fill(a, dtype);
    fill(b, dtype);
    memcpy(want, a, sizeof want);
    nb_reduce_kernel(NB_ISA_GENERIC, dtype, NB_SUM)(want + shift, b + shift, count);
    if (scale != 1) {
        nb_scale_kernel(NB_ISA_GENERIC, dtype)(want + shift, count, scale);
    }
    memcpy(apart[0], a, ROOM);
    memcpy(apart[1], b, ROOM);
    unsigned char *to[2] = {aliased ? a : apart[0], aliased ? b : apart[1]};
    pair(to[0] + shift, to[1] + shift, a + shift, b + shift, count, scale);
    for (int t = 0; t < 2; t++) {
        for (size_t i = 0; i < count; i++) {
            CHECK(same(to[t] + shift + i * element, want + shift + i * element, dtype), "%s, %zu from %zu, [%zu]",
                  nb_dtype_name(dtype), count, shift, i);
        }
    }
    CHECK(memcmp(to[0] + shift + count * element, want + shift + count * element, element) == 0, "beyond the end");
}

int main(void) {
    static const int dtypes[] = {NB_F32, NB_F64};
    static const size_t counts[] = {0, 1, 7, 8, 15, 16, 17, 100, COUNT};
    if (nb_pair_kernel(NB_F32, NB_SUM) == NULL) {
        SKIP("this CPU has no kernel that writes to two places");
    }
    CHECK(nb_pair_kernel(NB_F32, NB_MAX) == NULL && nb_pair_kernel(NB_U8, NB_SUM) == NULL, "there are none for others");
    for (size_t d = 0; d < 2; d++) {
        for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
            for (size_t shift = 0; shift < 20; shift += 3) {
                one(dtypes[d], counts[c], shift, 1, true);
                one(dtypes[d], counts[c], shift, 1.0 / 3, true);
                one(dtypes[d], counts[c], shift, 0.5, false);
            }
        }
    }
    return 0;
}
