// Names and sizes of element types and reductions.
#include "base/dtype.h"

#include <stddef.h>

static const struct {
    const char *name;
    size_t bytes;
} dtypes[NB_DTYPES] = {
    [NB_U8] = {"uint8", 1},    [NB_I8] = {"int8", 1},       [NB_I32] = {"int32", 4},   [NB_I64] = {"int64", 8},
    [NB_F16] = {"float16", 2}, [NB_BF16] = {"bfloat16", 2}, [NB_F32] = {"float32", 4}, [NB_F64] = {"float64", 8},
};

static const char *const redops[NB_REDOPS] = {
    [NB_SUM] = "sum",
    [NB_MIN] = "min",
    [NB_MAX] = "max",
    [NB_PRODUCT] = "product",
};

size_t nb_dtype_size(int dtype) {
    return dtype >= 0 && dtype < NB_DTYPES ? dtypes[dtype].bytes : 0;
}

const char *nb_dtype_name(int dtype) {
    return dtype >= 0 && dtype < NB_DTYPES ? dtypes[dtype].name : "?";
}

const char *nb_redop_name(int redop) {
    return redop >= 0 && redop < NB_REDOPS ? redops[redop] : "?";
}
