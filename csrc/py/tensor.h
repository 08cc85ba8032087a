// Where does a tensor lie? By one call of a C function of torch's own, which runs no Python and makes no object.
#ifndef NB_PY_TENSOR_H
#define NB_PY_TENSOR_H

#include "py/core.h" // IWYU pragma: export

struct core_tensor;

// The table of C functions that a type of tensors has under `__dlpack_c_exchange_api__`: DLPack, version 1, dlpack.h,
// DLPackExchangeAPI. Torch before 2.10 has none.
struct core_tensor_table {
    PyTypeObject *type; // whose objects may be asked: of this type itself; NULL: none
    int (*look)(void *object, struct core_tensor *out);
};

struct core_tensor_place {
    void *base;
    size_t bytes;
    uint16_t element; // what its elements are: the same number for the same type; 0: nothing of ours
    bool plain;       // host memory, contiguous
};

// The table of an object's type, owning the type. An empty one where there is none of this version.
void core_tensor_table_open(struct core_tensor_table *table, PyObject *tensor);
void core_tensor_table_close(struct core_tensor_table *table);
// Whether the table knows where the object lies, and where; no exception is left. A sparse tensor lies nowhere.
bool core_tensor_look(const struct core_tensor_table *table, PyObject *object, struct core_tensor_place *out);

#endif
