// Tensor lookup: finds a tensor's memory by torch's DLPack table. Declares the used part of that ABI.
#include "py/tensor.h"

#include <stddef.h>
#include <stdint.h>

enum { TABLE_MAJOR = 1, DEVICE_CPU = 1 };

// DLTensor
struct core_tensor {
    void *data;
    int32_t device;
    int32_t device_id;
    int32_t dimensions;
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
    int64_t *shape;
    int64_t *strides; // in elements
    uint64_t byte_offset;
};

// DLPackExchangeAPI, up to its fourth function.
struct table {
    uint32_t major;
    uint32_t minor;
    const struct table *before;
    void *allocate;
    void *take;
    void *give;
    int (*look)(void *object, struct core_tensor *out);
};

void core_tensor_table_open(struct core_tensor_table *table, PyObject *tensor) {
    *table = (struct core_tensor_table){0};
    PyObject *capsule = PyObject_GetAttrString((PyObject *)Py_TYPE(tensor), "__dlpack_c_exchange_api__");
    const struct table *found = capsule != NULL ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : NULL;
    while (found != NULL && found->major > TABLE_MAJOR) {
        found = found->before;
    }
    if (found != NULL && found->major == TABLE_MAJOR && found->look != NULL) {
        table->type = (PyTypeObject *)Py_NewRef((PyObject *)Py_TYPE(tensor));
        table->look = found->look;
    }
    PyErr_Clear();
    Py_XDECREF(capsule); // the process owns the table
}

void core_tensor_table_close(struct core_tensor_table *table) {
    PyTypeObject *type = table->type;
    *table = (struct core_tensor_table){0};
    Py_XDECREF((PyObject *)type);
}

static bool is_contiguous(const struct core_tensor *tensor, size_t *count) {
    int64_t next = 1;
    bool contiguous = true;
    for (int32_t i = tensor->dimensions - 1; i >= 0; i--) {
        bool alone = tensor->shape[i] == 1 || tensor->strides == NULL;
        contiguous = contiguous && (alone || tensor->strides[i] == next);
        next *= tensor->shape[i];
    }
    *count = (size_t)next;
    return contiguous;
}

bool core_tensor_look(const struct core_tensor_table *table, PyObject *object, struct core_tensor_place *out) {
    struct core_tensor tensor;
    if (table->type == NULL || !Py_IS_TYPE(object, table->type)) {
        return false;
    }
    if (table->look(object, &tensor) != 0) {
        PyErr_Clear();
        return false;
    }
    size_t count;
    out->plain = is_contiguous(&tensor, &count) && tensor.device == DEVICE_CPU && tensor.lanes == 1;
    out->base = out->plain ? (char *)tensor.data + tensor.byte_offset : NULL;
    out->bytes = count * (tensor.bits / 8U);
    out->element = tensor.lanes == 1 ? (uint16_t)(tensor.code << 8 | tensor.bits) : 0;
    return true;
}
