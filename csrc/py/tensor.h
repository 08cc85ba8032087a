// Tensor lookup: finds a tensor's memory by one call of a C function of torch, which runs no Python and makes no
// object.
#ifndef NB_PY_TENSOR_H
#define NB_PY_TENSOR_H

#include "py/core.h" // IWYU pragma: export

struct core_tensor;

// The table of C functions that a tensor type has as `__dlpack_c_exchange_api__`: DLPack, version 1, dlpack.h,
// DLPackExchangeAPI. Torch before 2.10 has none.
struct core_tensor_table {
    PyTypeObject *type; // the table serves objects of exactly this type; NULL: none
    int (*look)(void *object, struct core_tensor *out);
    int (*stream)(int32_t type, int32_t number, void **out);
};

struct core_tensor_place {
    void *base;
    size_t bytes;
    uint16_t element; // element type: equal numbers for equal types; 0: not supported
    bool plain;       // host memory, contiguous
    bool contiguous;
    struct core_device device;
};

// Gets the table of an object's type, and owns the type. Empty if there is no table of this version.
void core_tensor_table_open(struct core_tensor_table *table, PyObject *tensor);
void core_tensor_table_close(struct core_tensor_table *table);
// True if the table finds the object's memory, which it writes to `out`. Leaves no exception. A sparse tensor has none.
bool core_tensor_look(const struct core_tensor_table *table, PyObject *object, struct core_tensor_place *out);

// Finds the memory of a tensor on any device, also in a torch without the table. 0, or -1 with an exception: TypeError
// if it is no tensor, ValueError if it is not contiguous.
int core_tensor_find(PyObject *tensor, struct core_tensor_place *out);
// The device of a tensor: 0, or -1 with an exception, as core_tensor_find(), for any strides.
int core_tensor_device(PyObject *tensor, struct core_device *out);

#endif
