// Device code, compiled as C: all values of 16-bit types against their definition and against the CPU's kernels. Also
// odd sizes and any alignment; nothing is written outside the result.
#include "cuda/kernels.cu"

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/error.h"
#include "check.h"
#include "coll/reduce.h"
#include "cuda/kernels.h"
#include "formats.h"

enum { HALVES = 1 << 16, GUARD = 0xa5, COUNT_MAX = 1100, ROOM = COUNT_MAX * 8 + 64, SPREAD = 8 };

typedef void (*kernel_fn)(uint64_t to, uint64_t from, uint64_t count, double factor);

static uint64_t draw(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static uint64_t address(const void *memory) {
    return (uint64_t)(uintptr_t)memory;
}

static const struct format {
    const char *name;
    int dtype;
    int fraction;
    int exponent;
    kernel_fn widen;
    kernel_fn narrow;
} formats[] = {
    {"float16", NB_F16, 10, 5, nb_cast_f16_to_f32, nb_cast_f32_to_f16},
    {"bfloat16", NB_BF16, 7, 8, nb_cast_bf16_to_f32, nb_cast_f32_to_bf16},
};
enum { FORMATS = sizeof formats / sizeof formats[0] };

// Equality in which NaNs are equal and zeros of different sign differ.
static bool same(float a, double b) {
    return isnan(b) ? isnan(a) : a == (float)b && (signbit(a) != 0) == (signbit(b) != 0);
}

static void test_every_value_widens(const struct format *format) {
    uint16_t *halves = malloc(HALVES * sizeof *halves);
    float *floats = malloc(HALVES * sizeof *floats);
    uint16_t *back = malloc(HALVES * sizeof *back);
    CHECK(halves != NULL && floats != NULL && back != NULL, "memory");
    for (int i = 0; i < HALVES; i++) {
        halves[i] = (uint16_t)i;
    }
    format->widen(address(floats), address(halves), HALVES, 0);
    format->narrow(address(back), address(floats), HALVES, 0);
    for (int i = 0; i < HALVES; i++) {
        double value = decode((uint64_t)i, format->fraction, format->exponent);
        CHECK(same(floats[i], value), "%s %#x widens to %g, not %g", format->name, i, (double)floats[i], value);
        CHECK(isnan(value) || back[i] == i, "%s %#x converts back to %#x", format->name, i, back[i]);
    }
    free(halves);
    free(floats);
    free(back);
}

static void check_narrow(const struct format *format, float value) {
    uint16_t got = 0;
    format->narrow(address(&got), address(&value), 1, 0);
    uint64_t want = encode((double)value, format->fraction, format->exponent);
    if (isnan(value)) {
        CHECK(isnan(decode(got, format->fraction, format->exponent)), "%s: a NaN became %#x", format->name, got);
    } else {
        CHECK(got == want, "%s: %a narrows to %#x, not %#x", format->name, (double)value, got, (unsigned)want);
    }
}

// Every 16-bit value, the midpoint to the next one, and the adjacent float32 values of both.
static void test_every_rounding(const struct format *format) {
    for (int i = 0; i < HALVES; i++) {
        float low = (float)decode((uint64_t)i, format->fraction, format->exponent);
        float high = (float)decode((uint64_t)(i + 1) % HALVES, format->fraction, format->exponent);
        const float around[] = {low, low + (high - low) / 2};
        for (size_t k = 0; k < 2; k++) {
            check_narrow(format, around[k]);
            check_narrow(format, nextafterf(around[k], INFINITY));
            check_narrow(format, nextafterf(around[k], -INFINITY));
        }
    }
    uint64_t state = 7;
    for (int i = 0; i < 1 << 18; i++) {
        uint32_t bits = (uint32_t)draw(&state);
        float value;
        memcpy(&value, &bits, sizeof value);
        check_narrow(format, value);
    }
}

// Products of all values with some factors, and sums of all values with random ones, equal those of the CPU's generic
// kernel.
static void test_16_bit_arithmetic_equals_the_cpu(const struct format *format, kernel_fn scale, kernel_fn add) {
    static const double factors[] = {1, 0.5, -2, 1.0 / 3, 65536, 0x1p-20, 0, INFINITY};
    uint16_t *got = malloc(HALVES * sizeof *got);
    uint16_t *want = malloc(HALVES * sizeof *want);
    uint16_t *other = malloc(HALVES * sizeof *other);
    CHECK(got != NULL && want != NULL && other != NULL, "memory");
    for (size_t k = 0; k < 2 * sizeof factors / sizeof factors[0]; k++) {
        bool adds = k % 2 == 1;
        uint64_t state = k;
        for (int i = 0; i < HALVES; i++) {
            got[i] = want[i] = (uint16_t)i;
            other[i] = (uint16_t)draw(&state);
        }
        if (adds) {
            add(address(got), address(other), HALVES, 0);
            nb_reduce_kernel(NB_ISA_GENERIC, format->dtype, NB_SUM)(want, other, HALVES);
        } else {
            scale(address(got), 0, HALVES, factors[k / 2]);
            nb_scale_kernel(NB_ISA_GENERIC, format->dtype)(want, HALVES, factors[k / 2]);
        }
        for (int i = 0; i < HALVES; i++) {
            bool nans = isnan(decode(got[i], format->fraction, format->exponent)) &&
                        isnan(decode(want[i], format->fraction, format->exponent));
            CHECK(got[i] == want[i] || nans, "%s %#x, case %zu: %#x, not %#x", format->name, i, k, got[i], want[i]);
        }
    }
    free(got);
    free(want);
    free(other);
}

static const struct {
    int dtype;
    kernel_fn scale;
    kernel_fn add;
} arithmetic[] = {
    {NB_F16, nb_scale_f16, nb_add_f16},
    {NB_BF16, nb_scale_bf16, nb_add_bf16},
    {NB_F32, nb_scale_f32, nb_add_f32},
    {NB_F64, nb_scale_f64, nb_add_f64},
};

// Small integers, whose sums and doubles are exact.
static void fill(unsigned char *at, int dtype, size_t count, uint64_t seed) {
    for (size_t i = 0; i < count; i++) {
        double value = (double)(draw(&seed) % 64);
        float single = (float)value;
        uint16_t half = (uint16_t)encode(value, dtype == NB_F16 ? 10 : 7, dtype == NB_F16 ? 5 : 8);
        const void *from = dtype == NB_F64 ? (const void *)&value : dtype == NB_F32 ? (const void *)&single : &half;
        memcpy(at + i * nb_dtype_size(dtype), from, nb_dtype_size(dtype));
    }
}

static void test_sizes_and_alignments(void) {
    static const size_t counts[] = {0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 255, 257, 1023, COUNT_MAX};
    static unsigned char got[ROOM];
    static unsigned char want[ROOM];
    static unsigned char other[ROOM];
    for (size_t k = 0; k < sizeof arithmetic / sizeof arithmetic[0]; k++) {
        const int dtype = arithmetic[k].dtype;
        for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
            for (size_t shift = 0; shift < SPREAD; shift++) {
                memset(got, GUARD, sizeof got);
                fill(got + shift, dtype, counts[c], c);
                fill(other + (shift * 3) % SPREAD, dtype, counts[c], c + 100);
                memcpy(want, got, sizeof got);
                arithmetic[k].add(address(got + shift), address(other + (shift * 3) % SPREAD), counts[c], 0);
                arithmetic[k].scale(address(got + shift), 0, counts[c], 2);
                nb_reduce_kernel(NB_ISA_GENERIC, dtype, NB_SUM)(want + shift, other + (shift * 3) % SPREAD, counts[c]);
                nb_scale_kernel(NB_ISA_GENERIC, dtype)(want + shift, counts[c], 2);
                CHECK(memcmp(got, want, sizeof got) == 0, "%s, %zu elements at %zu", nb_dtype_name(dtype), counts[c],
                      shift);
            }
        }
    }
}

static void test_casts_at_any_alignment(void) {
    static unsigned char floats[ROOM];
    static unsigned char halves[ROOM];
    static unsigned char back[ROOM];
    for (int f = 0; f < FORMATS; f++) {
        for (size_t shift = 0; shift < SPREAD; shift++) {
            const size_t count = COUNT_MAX - shift * 7;
            memset(halves, GUARD, sizeof halves);
            memset(back, GUARD, sizeof back);
            fill(floats + shift, NB_F32, count, shift);
            formats[f].narrow(address(halves + (shift * 5) % SPREAD), address(floats + shift), count, 0);
            formats[f].widen(address(back + shift), address(halves + (shift * 5) % SPREAD), count, 0);
            CHECK(memcmp(back + shift, floats + shift, count * 4) == 0, "%s at %zu", formats[f].name, shift);
            CHECK(halves[(shift * 5) % SPREAD + 2 * count] == GUARD && back[shift + 4 * count] == GUARD,
                  "written outside the result");
        }
    }
}

static void test_pack_and_unpack(void) {
    static const uint64_t sizes[] = {1, 0, 3, 4, 16, 17, 64, 65, 4096, 4099, 2, 128};
    enum { PIECES = sizeof sizes / sizeof sizes[0], BUFFER_BYTES = 16384 };
    static unsigned char gradients[BUFFER_BYTES];
    static unsigned char buffer[BUFFER_BYTES];
    static unsigned char again[BUFFER_BYTES];
    for (size_t shift = 0; shift < 2 * SPREAD; shift++) {
        struct nb_cuda_piece list[PIECES];
        uint64_t packed = shift % 3;
        uint64_t at = shift;
        for (int p = 0; p < PIECES; p++) {
            list[p] = (struct nb_cuda_piece){address(gradients + at), packed, sizes[p]};
            packed += sizes[p] + shift % 2;
            at += sizes[p] + shift % 5;
        }
        uint64_t state = shift;
        for (size_t i = 0; i < sizeof gradients; i++) {
            gradients[i] = again[i] = (unsigned char)draw(&state);
        }
        memset(buffer, GUARD, sizeof buffer);
        nb_pack(address(buffer), address(list), PIECES, 0);
        for (int p = 0; p < PIECES; p++) {
            uint64_t from = list[p].address - address(gradients);
            CHECK(memcmp(buffer + list[p].offset_bytes, gradients + from, sizes[p]) == 0, "piece %d, %zu", p, shift);
            memset(gradients + from, 0, sizes[p]);
        }
        CHECK(buffer[packed] == GUARD, "written beyond the buffer");
        nb_unpack(address(buffer), address(list), PIECES, 0);
        CHECK(memcmp(gradients, again, sizeof gradients) == 0, "unpack does not restore the gradients, %zu", shift);
    }
}

static void test_image_of_the_build(void) {
    struct nb_cuda_kernels kernels = {0};
    const struct nb_cuda_device device = {0};
    struct nb_error err = {0};
    CHECK(nb_cuda_kernels_open(&kernels, &device, NULL, &err) == NB_ENOLIB, "%s", err.text);
    CHECK(strstr(err.text, "nvcc") != NULL, "%s", err.text);
    const unsigned char *image = nb_cuda_image();
    static const unsigned char fat[] = {0x50, 0xed, 0x55, 0xba}; // the magic of nvcc -fatbin
    CHECK(image == NULL || memcmp(image, fat, sizeof fat) == 0, "the image is not a fatbin of nvcc");
}

int main(void) {
    for (int f = 0; f < FORMATS; f++) {
        test_every_value_widens(&formats[f]);
        test_every_rounding(&formats[f]);
        test_16_bit_arithmetic_equals_the_cpu(&formats[f], arithmetic[f].scale, arithmetic[f].add);
    }
    test_sizes_and_alignments();
    test_casts_at_any_alignment();
    test_pack_and_unpack();
    test_image_of_the_build();
    return 0;
}
