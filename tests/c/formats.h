// Binary floating-point formats, computed from their definition: the reference for conversions and kernels.
#ifndef NB_TEST_FORMATS_H
#define NB_TEST_FORMATS_H

#include <math.h>
#include <stdint.h>

// Decode and encode a binary format of `fraction` stored bits and `exponent` exponent bits.
static inline double decode(uint64_t bits, int fraction, int exponent) {
    int bias = (1 << (exponent - 1)) - 1;
    uint64_t mantissa = bits & (((uint64_t)1 << fraction) - 1);
    int power = (int)(bits >> fraction & (((uint64_t)1 << exponent) - 1));
    double sign = bits >> (fraction + exponent) & 1 ? -1 : 1;
    if (power == (1 << exponent) - 1) {
        return mantissa != 0 ? NAN : sign * INFINITY;
    }
    if (power == 0) {
        return sign * ldexp((double)mantissa, 1 - bias - fraction);
    }
    return sign * ldexp((double)(mantissa | (uint64_t)1 << fraction), power - bias - fraction);
}

static inline uint64_t encode(double value, int fraction, int exponent) {
    int bias = (1 << (exponent - 1)) - 1;
    uint64_t top = ((uint64_t)1 << exponent) - 1;
    uint64_t sign = (uint64_t)(signbit(value) != 0) << (fraction + exponent);
    if (isnan(value)) {
        return sign | top << fraction | (uint64_t)1 << (fraction - 1);
    }
    int power = 0;
    (void)frexp(value, &power);
    power = power - 1 < 1 - bias ? 1 - bias : power - 1;
    double units = fabs(value) <= 0x1p1023 ? rint(ldexp(fabs(value), fraction - power)) : INFINITY; // to nearest even
    double limit = ldexp(2 - ldexp(1, -fraction), bias); // the largest number
    if (!(ldexp(units, power - fraction) <= limit)) {
        return sign | top << fraction;
    }
    uint64_t whole = (uint64_t)units;
    uint64_t stored = (uint64_t)(power + bias - 1)
                      << fraction; // includes the implicit leading one, which a subnormal lacks
    return sign | (whole < (uint64_t)1 << fraction ? whole : stored + whole);
}

#endif
