// The arithmetic of a reduction at the speed of memory: one pass, by the best kernel this CPU has.
#ifndef NB_COLL_REDUCE_H
#define NB_COLL_REDUCE_H

#include <stdbool.h>
#include <stddef.h>

#include "base/dtype.h"

// dst[i] = dst[i] op src[i]. Any alignment; the two do not overlap. float16 and bfloat16 go through float32 and are
// rounded to nearest even; integers wrap; min and max pass NaN on.
typedef void (*nb_reduce_fn)(void *dst, const void *src, size_t count);

// dst[i] *= scale: floating types in their own arithmetic (16-bit ones in float32), integers in float64 and truncated
// towards zero.
typedef void (*nb_scale_fn)(void *dst, size_t count, double scale);

enum nb_isa { NB_ISA_GENERIC, NB_ISA_AVX2, NB_ISA_AVX512, NB_ISA_NEON, NB_ISAS };

// Whether this build has that set and this CPU can run it. The generic one always runs.
bool nb_isa_runs(int isa);

// The best set of kernels this CPU can run.
enum nb_isa nb_reduce_best(void);
const char *nb_isa_name(int isa);

// NULL for a dtype or op there is no kernel for. The generic one serves where a set has none of its own, and where the
// set does not run here.
nb_reduce_fn nb_reduce_kernel(enum nb_isa isa, int dtype, int redop);
nb_scale_fn nb_scale_kernel(enum nb_isa isa, int dtype);

// dst[i] = float32 -> 16 bits and back, round to nearest even: what a compressed payload needs.
void nb_cast_f32_f16(void *dst, const void *src, size_t count);
void nb_cast_f16_f32(void *dst, const void *src, size_t count);

#endif
