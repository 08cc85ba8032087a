// Element types and reductions, by the numbers that cross the wire.
#ifndef NB_BASE_DTYPE_H
#define NB_BASE_DTYPE_H

#include <stddef.h>

enum nb_dtype { NB_U8, NB_I8, NB_I32, NB_I64, NB_F16, NB_BF16, NB_F32, NB_F64, NB_DTYPES };

// Average is NB_SUM with postscale 1/size. Adasum is not a kernel.
enum nb_redop { NB_SUM, NB_MIN, NB_MAX, NB_PRODUCT, NB_REDOPS };

// Bytes of one element; 0 for an unknown dtype.
size_t nb_dtype_size(int dtype);

// "float32", "bfloat16", …; "?" for an unknown dtype.
const char *nb_dtype_name(int dtype);

// "sum", "min", …; "?" for an unknown reduction.
const char *nb_redop_name(int redop);

#endif
