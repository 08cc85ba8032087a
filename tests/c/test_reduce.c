// Reduction kernels: every dtype, operation and instruction set against plain arithmetic in float64 and integers.
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "check.h"
#include "coll/kernels.h"
#include "coll/reduce.h"
#include "formats.h"

enum { COUNT_MAX = 1100, ROOM = COUNT_MAX * 8 + 64, GUARD = 0xa5 };

static const size_t sizes[NB_DTYPES] = {1, 1, 4, 8, 2, 2, 4, 8};

static uint64_t draw(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

// The next instruction set after `isa` that runs on this CPU; NB_ISAS: none.
static int next_set(int isa) {
    do {
        isa++;
    } while (isa < NB_ISAS && !nb_isa_runs(isa));
    return isa;
}

static bool is_float(int dtype) {
    return dtype >= NB_F16;
}

static double float_at(const unsigned char *at, int dtype) {
    uint64_t bits = 0;
    memcpy(&bits, at, sizes[dtype]);
    double value;
    memcpy(&value, &bits, sizeof(value));
    return dtype == NB_F64 ? value
                           : decode(bits,
                                    dtype == NB_F16    ? 10
                                    : dtype == NB_BF16 ? 7
                                                       : 23,
                                    dtype == NB_F16 ? 5 : 8);
}

static void float_put(unsigned char *at, int dtype, double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof(bits));
    if (dtype != NB_F64) {
        bits = encode(value, dtype == NB_F16 ? 10 : dtype == NB_BF16 ? 7 : 23, dtype == NB_F16 ? 5 : 8);
    }
    memcpy(at, &bits, sizes[dtype]);
}

static int64_t integer_at(const unsigned char *at, int dtype) {
    uint64_t bits = 0;
    memcpy(&bits, at, sizes[dtype]);
    switch (dtype) {
    case NB_U8:
        return (int64_t)bits;
    case NB_I8:
        return (int8_t)bits;
    case NB_I32:
        return (int32_t)bits;
    default:
        return (int64_t)bits;
    }
}

static double float_op(double a, double b, int redop) {
    switch (redop) {
    case NB_SUM:
        return a + b;
    case NB_PRODUCT:
        return a * b;
    default:
        if (isnan(a) || isnan(b)) {
            return NAN;
        }
        return (redop == NB_MIN) == (a < b) ? a : b;
    }
}

static int64_t integer_op(int64_t a, int64_t b, int redop) {
    switch (redop) {
    case NB_SUM:
        return (int64_t)((uint64_t)a + (uint64_t)b);
    case NB_PRODUCT:
        return (int64_t)((uint64_t)a * (uint64_t)b);
    default:
        return (redop == NB_MIN) == (a < b) ? a : b;
    }
}

static void reduce_reference(unsigned char *dst, const unsigned char *src, size_t count, int dtype, int redop) {
    for (size_t i = 0; i < count; i++) {
        unsigned char *at = dst + i * sizes[dtype];
        const unsigned char *from = src + i * sizes[dtype];
        if (is_float(dtype)) {
            float_put(at, dtype, float_op(float_at(at, dtype), float_at(from, dtype), redop));
        } else {
            int64_t value = integer_op(integer_at(at, dtype), integer_at(from, dtype), redop);
            memcpy(at, &value, sizes[dtype]);
        }
    }
}

// Numeric equality: all NaNs are equal, and the sign of a zero counts only if zero_sign is set.
static bool same(const unsigned char *a, const unsigned char *b, int dtype, bool zero_sign) {
    if (memcmp(a, b, sizes[dtype]) == 0) {
        return true;
    }
    if (!is_float(dtype)) {
        return false;
    }
    double x = float_at(a, dtype);
    double y = float_at(b, dtype);
    return (isnan(x) && isnan(y)) || (!zero_sign && x == y);
}

// Random bits, which give all kinds of numbers; small integers; or small multiples of 0.37.
static void fill(unsigned char *at, size_t count, int dtype, uint64_t *seed) {
    uint64_t style = draw(seed) % 3;
    for (size_t i = 0; i < count; i++) {
        uint64_t bits = draw(seed);
        if (style > 0 && is_float(dtype)) {
            double value = (double)(int64_t)(bits % 31) - 15;
            float_put(at + i * sizes[dtype], dtype, style == 1 ? value : value * 0.37);
        } else {
            memcpy(at + i * sizes[dtype], &bits, sizes[dtype]);
        }
    }
}

struct buffers {
    unsigned char start[ROOM];
    unsigned char src[ROOM];
    unsigned char want[ROOM];
    unsigned char got[NB_ISAS][ROOM];
};

static void check_guards(const struct buffers *b, int isa, size_t offset, size_t bytes) {
    for (size_t i = 0; i < ROOM; i++) {
        bool inside = i >= offset && i < offset + bytes;
        CHECK(inside || b->got[isa][i] == GUARD, "isa %d wrote at %zu, outside of %zu + %zu", isa, i, offset, bytes);
    }
}

static void check_case(struct buffers *b, int dtype, int redop, size_t count, uint64_t *seed) {
    size_t width = sizes[dtype];
    size_t to = draw(seed) % 33;
    size_t from = draw(seed) % 33;
    fill(b->start, count, dtype, seed);
    fill(b->src + from, count, dtype, seed);
    memcpy(b->want, b->start, count * width);
    reduce_reference(b->want, b->src + from, count, dtype, redop);
    for (int isa = next_set(-1); isa < NB_ISAS; isa = next_set(isa)) {
        memset(b->got[isa], GUARD, ROOM);
        memcpy(b->got[isa] + to, b->start, count * width);
        nb_reduce_kernel((enum nb_isa)isa, dtype, redop)(b->got[isa] + to, b->src + from, count);
        check_guards(b, isa, to, count * width);
        for (size_t i = 0; i < count; i++) {
            bool zero_sign = redop == NB_SUM || redop == NB_PRODUCT;
            CHECK(same(b->got[isa] + to + i * width, b->want + i * width, dtype, zero_sign),
                  "%s dtype %d op %d count %zu: element %zu", nb_isa_name(isa), dtype, redop, count, i);
            CHECK(same(b->got[isa] + to + i * width, b->got[0] + to + i * width, dtype, true),
                  "%s dtype %d op %d count %zu: element %zu differs from the generic kernel's", nb_isa_name(isa), dtype,
                  redop, count, i);
        }
    }
}

static void test_every_kernel(struct buffers *b) {
    uint64_t seed = 11;
    for (int dtype = 0; dtype < NB_DTYPES; dtype++) {
        for (int redop = 0; redop < NB_REDOPS; redop++) {
            for (size_t count = 0; count <= 150; count++) {
                check_case(b, dtype, redop, count, &seed);
            }
            for (int i = 0; i < 10; i++) {
                check_case(b, dtype, redop, 151 + draw(&seed) % (COUNT_MAX - 150), &seed);
            }
        }
    }
}

static double scaled_integer(double value, int dtype) {
    static const double low[] = {0, -0x1p7, -0x1p31, -0x1p63};
    static const double high[] = {255, 127, 2147483647.0, 0x1p63};
    return value <= low[dtype] ? low[dtype] : value >= high[dtype] ? high[dtype] : trunc(value);
}

static void check_scale(struct buffers *b, int dtype, double scale, size_t count, uint64_t *seed) {
    size_t width = sizes[dtype];
    size_t to = draw(seed) % 33;
    fill(b->start, count, dtype, seed);
    for (int isa = next_set(-1); isa < NB_ISAS; isa = next_set(isa)) {
        memset(b->got[isa], GUARD, ROOM);
        memcpy(b->got[isa] + to, b->start, count * width);
        nb_scale_kernel((enum nb_isa)isa, dtype)(b->got[isa] + to, count, scale);
        check_guards(b, isa, to, count * width);
        for (size_t i = 0; i < count; i++) {
            unsigned char *got = b->got[isa] + to + i * width;
            if (is_float(dtype)) {
                double factor = dtype == NB_F64 ? scale : (double)(float)scale;
                float_put(b->want, dtype, float_at(b->start + i * width, dtype) * factor);
                CHECK(same(got, b->want, dtype, true), "%s dtype %d scale %g: element %zu", nb_isa_name(isa), dtype,
                      scale, i);
                continue;
            }
            double want = scaled_integer((double)integer_at(b->start + i * width, dtype) * scale, dtype);
            int64_t value = integer_at(got, dtype);
            CHECK(want >= 0x1p63 ? value == INT64_MAX : value == (int64_t)want, "%s dtype %d scale %g: element %zu",
                  nb_isa_name(isa), dtype, scale, i);
        }
    }
}

static void test_every_scale(struct buffers *b) {
    static const double scales[] = {0.25, 1.0 / 3, 3, -1, 1e30, 0};
    uint64_t seed = 12;
    for (int dtype = 0; dtype < NB_DTYPES; dtype++) {
        for (size_t s = 0; s < sizeof(scales) / sizeof(*scales); s++) {
            for (size_t count = 0; count <= 100; count++) {
                check_scale(b, dtype, scales[s], count, &seed);
            }
        }
    }
}

// All 65536 float16 values to float32 and back, whether or not the thread flushes subnormals.
static void check_halves(const struct nb_kernels *set) {
    enum { HALVES = 65536 };
    uint16_t *halves = malloc(HALVES * sizeof(*halves));
    uint16_t *back = malloc(HALVES * sizeof(*back));
    float *floats = malloc(HALVES * sizeof(*floats));
    CHECK(halves && back && floats, "memory");
    for (uint32_t i = 0; i < HALVES; i++) {
        halves[i] = (uint16_t)i;
    }
    set->f16_f32(floats, halves, HALVES);
    set->f32_f16(back, floats, HALVES);
    for (uint32_t i = 0; i < HALVES; i++) {
        bool nan = (i & 0x7fff) > 0x7c00;
        double want = decode(i, 10, 5);
        CHECK(nan ? isnan(floats[i]) : (double)floats[i] == want, "half %04x is not %g", i, (double)floats[i]);
        CHECK((signbit(floats[i]) != 0) == (i >> 15), "half %04x loses its sign", i);
        CHECK(back[i] == (nan ? (i | 0x200) : i), "half %04x converts back to %04x", i, back[i]);
    }
    free(halves);
    free(back);
    free(floats);
}

// Each midpoint between two adjacent float16 values rounds to the even one; the float32 values next to it round to the
// nearer.
static void check_half_ties(const struct nb_kernels *set) {
    for (uint32_t i = 0; i < 0x7c00; i++) {
        double low = decode(i, 10, 5);
        double high = i == 0x7bff ? 65536 : decode(i + 1, 10, 5);
        float tie = (float)((low + high) / 2);
        float in[8] = {tie, -tie, nextafterf(tie, 0), nextafterf(tie, INFINITY), tie, tie, tie, tie};
        uint16_t out[8];
        set->f32_f16(out, in, 8);
        uint32_t even = i % 2 == 0 ? i : i + 1;
        CHECK(out[0] == even && out[1] == (even | 0x8000), "tie above %04x rounds to %04x", i, out[0]);
        CHECK(out[2] == i && out[3] == i + 1, "next to the tie above %04x: %04x, %04x", i, out[2], out[3]);
    }
}

#if defined(__x86_64__)
static void set_float_mode(unsigned long mode) {
    _mm_setcsr((unsigned)mode);
}

// From now on, subnormal float32 inputs and results are flushed to zero. Returns the previous mode.
static unsigned long flush_subnormals(void) {
    unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | 0x8040);
    return mode;
}
#elif defined(__aarch64__)
static void set_float_mode(unsigned long mode) {
    __asm__ volatile("msr fpcr, %0" : : "r"(mode) : "memory");
}

static unsigned long flush_subnormals(void) {
    unsigned long mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode) : : "memory");
    set_float_mode(mode | 1ul << 24);
    return mode;
}
#else
static void set_float_mode(unsigned long mode) {
    (void)mode;
}

static unsigned long flush_subnormals(void) {
    return 0;
}
#endif

static void test_halves(void) {
    for (int isa = next_set(-1); isa < NB_ISAS; isa = next_set(isa)) {
        check_halves(nb_kernels_of(isa));
        check_half_ties(nb_kernels_of(isa));
        unsigned long mode = flush_subnormals();
        check_halves(nb_kernels_of(isa));
        set_float_mode(mode);
    }
    float one = 1;
    uint16_t half = 0;
    nb_cast_f32_f16(&half, &one, 1);
    CHECK(half == 0x3c00, "1.0 is %04x", half);
    one = 0;
    nb_cast_f16_f32(&one, &half, 1);
    CHECK(one == 1, "0x3c00 is %g", (double)one);
}

// Every 16-bit value with one other operand: each set gives the generic result. For min and max, NaNs are the same
// bits, too.
static void check_all_values_with(int dtype, int redop, uint16_t other) {
    enum { ALL = 65536 };
    static uint16_t want[ALL];
    static uint16_t got[ALL];
    static uint16_t others[ALL];
    for (uint32_t i = 0; i < ALL; i++) {
        want[i] = (uint16_t)i;
        others[i] = other;
    }
    nb_reduce_kernel(NB_ISA_GENERIC, dtype, redop)(want, others, ALL);
    for (int isa = next_set(NB_ISA_GENERIC); isa < NB_ISAS; isa = next_set(isa)) {
        for (uint32_t i = 0; i < ALL; i++) {
            got[i] = (uint16_t)i;
        }
        nb_reduce_kernel((enum nb_isa)isa, dtype, redop)(got, others, ALL);
        for (uint32_t i = 0; i < ALL; i++) {
            bool chosen = redop == NB_MIN || redop == NB_MAX;
            CHECK(chosen ? got[i] == want[i] : same((unsigned char *)&got[i], (unsigned char *)&want[i], dtype, true),
                  "%s dtype %d op %d: %04x with %04x gives %04x, not %04x", nb_isa_name(isa), dtype, redop, i, other,
                  got[i], want[i]);
        }
    }
}

// Zeros, the smallest subnormal and normal, the values next to one, the largest, infinity, a quiet and a signalling
// NaN.
static void test_16_bit_values(void) {
    static const uint16_t f16[] = {0x0000, 0x8000, 0x0001, 0x0400, 0x3c01, 0xbc01, 0x7bff, 0x7c00, 0x7e00, 0x7c01};
    static const uint16_t bf16[] = {0x0000, 0x8000, 0x0001, 0x0080, 0x3f81, 0xbf81, 0x7f7f, 0x7f80, 0x7fc0, 0x7f81};
    for (int redop = 0; redop < NB_REDOPS; redop++) {
        for (size_t i = 0; i < sizeof(f16) / sizeof(*f16); i++) {
            check_all_values_with(NB_F16, redop, f16[i]);
            check_all_values_with(NB_BF16, redop, bf16[i]);
        }
    }
}

// Adds the same two bfloat16 values at 145 positions, to cover the vector loop and the elements before and after it.
static void check_bf16(uint16_t a, uint16_t b, uint16_t want) {
    enum { POSITIONS = 145 };
    for (int isa = next_set(-1); isa < NB_ISAS; isa = next_set(isa)) {
        uint16_t dst[POSITIONS];
        uint16_t src[POSITIONS];
        for (int i = 0; i < POSITIONS; i++) {
            dst[i] = a;
            src[i] = b;
        }
        nb_reduce_kernel((enum nb_isa)isa, NB_BF16, NB_SUM)(dst, src, POSITIONS);
        for (int i = 0; i < POSITIONS; i++) {
            CHECK(dst[i] == want, "%s: %04x + %04x gives %04x, not %04x", nb_isa_name(isa), a, b, dst[i], want);
        }
    }
}

static void test_bf16_rounding(void) {
    check_bf16(0x3f80, 0x3b80, 0x3f80); // 1 + 2^-8: a tie, 1 is even
    check_bf16(0x3f81, 0x3b80, 0x3f82); // 1 + 2^-7 + 2^-8: a tie, up to even
    check_bf16(0x3f80, 0x3bc0, 0x3f81); // more than half: up
    check_bf16(0x7f7f, 0x7f7f, 0x7f80); // overflow is infinity
    check_bf16(0x7f80, 0x3f80, 0x7f80); // infinity stays infinity
    check_bf16(0x7fff, 0x3f80, 0x7fff); // a NaN of all ones stays a NaN
    check_bf16(0x7f81, 0x3f80, 0x7fc1); // a signalling NaN becomes quiet
    check_bf16(0xffff, 0x0000, 0xffff);
}

static void test_unknown(void) {
    CHECK(nb_reduce_kernel(NB_ISA_GENERIC, NB_DTYPES, NB_SUM) == NULL, "there is a kernel for an unknown dtype");
    CHECK(nb_reduce_kernel(NB_ISA_GENERIC, -1, NB_SUM) == NULL, "there is a kernel for an unknown dtype");
    CHECK(nb_reduce_kernel(NB_ISA_GENERIC, NB_F32, NB_REDOPS) == NULL, "there is a kernel for an unknown reduction");
    CHECK(nb_scale_kernel(NB_ISA_GENERIC, NB_DTYPES) == NULL, "there is a kernel for an unknown dtype");
    CHECK(strcmp(nb_isa_name(NB_ISA_AVX2), "avx2") == 0 && strcmp(nb_isa_name(7), "?") == 0, "wrong names");
    CHECK(!nb_isa_runs(-1) && !nb_isa_runs(NB_ISAS), "an unknown instruction set runs");
    CHECK(nb_isa_runs(NB_ISA_GENERIC) && nb_isa_runs((int)nb_reduce_best()),
          "the generic or the best set does not run");
    CHECK(nb_kernels_of(NB_ISAS) == &nb_kernels_generic, "an unknown set does not fall back to the generic one");
}

// A set's own kernel is used if it has one, otherwise the generic kernel.
static void test_kernel_fallback(void) {
    for (int isa = 0; isa < NB_ISAS; isa++) {
        const struct nb_kernels *set = nb_kernels_of(isa);
        CHECK(nb_isa_runs(isa) || set == &nb_kernels_generic, "%s is used but does not run on this CPU",
              nb_isa_name(isa));
        for (int dtype = 0; dtype < NB_DTYPES; dtype++) {
            nb_scale_fn scale = set->scale[dtype] != NULL ? set->scale[dtype] : nb_kernels_generic.scale[dtype];
            CHECK(nb_scale_kernel(isa, dtype) == scale, "%s, type %d: scale", nb_isa_name(isa), dtype);
            for (int op = 0; op < NB_REDOPS; op++) {
                nb_reduce_fn own = set->reduce[dtype][op];
                nb_reduce_fn want = own != NULL ? own : nb_kernels_generic.reduce[dtype][op];
                CHECK(want != NULL && nb_reduce_kernel(isa, dtype, op) == want, "%s, type %d, operation %d",
                      nb_isa_name(isa), dtype, op);
            }
        }
    }
}

int main(void) {
    test_kernel_fallback();
    struct buffers *buffers = calloc(1, sizeof(*buffers));
    CHECK(buffers, "memory");
    test_every_kernel(buffers);
    test_every_scale(buffers);
    free(buffers);
    test_halves();
    test_16_bit_values();
    test_bf16_rounding();
    test_unknown();
    printf("kernels checked:");
    for (int isa = next_set(-1); isa < NB_ISAS; isa = next_set(isa)) {
        printf(" %s", nb_isa_name(isa));
    }
    printf("\n");
    return 0;
}
