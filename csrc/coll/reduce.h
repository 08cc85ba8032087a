// Reduction arithmetic: one pass over memory, by the best kernel of this CPU.
#ifndef NB_COLL_REDUCE_H
#define NB_COLL_REDUCE_H

#include <stdbool.h>
#include <stddef.h>

#include "base/dtype.h"

// dst[i] = dst[i] op src[i]. Any alignment; the two do not overlap. float16 and bfloat16 are computed in float32 and
// rounded to nearest even. Integers wrap. min and max propagate NaN.
typedef void (*nb_reduce_fn)(void *dst, const void *src, size_t count);

// dst[i] *= scale: floating types in their own arithmetic (16-bit ones in float32), integers in float64 and truncated
// towards zero.
typedef void (*nb_scale_fn)(void *dst, size_t count, double scale);

enum nb_isa { NB_ISA_GENERIC, NB_ISA_AVX2, NB_ISA_AVX512, NB_ISA_NEON, NB_ISAS };

// True if this build has the set and this CPU can run it. The generic set always runs.
bool nb_isa_runs(int isa);

// The best set of kernels this CPU can run.
enum nb_isa nb_reduce_best(void);
const char *nb_isa_name(int isa);

// Returns the kernel of a set, or the generic one if the set has none or cannot run here. NULL for an unknown dtype or
// reduction.
nb_reduce_fn nb_reduce_kernel(enum nb_isa isa, int dtype, int redop);
nb_scale_fn nb_scale_kernel(enum nb_isa isa, int dtype);

// Convert float32 to float16 and back, rounding to nearest even, for compressed payloads.
void nb_cast_f32_f16(void *dst, const void *src, size_t count);
void nb_cast_f16_f32(void *dst, const void *src, size_t count);

#endif
