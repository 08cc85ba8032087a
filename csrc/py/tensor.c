// Tensor lookup: finds a tensor's memory by torch's DLPack table. Declares the used part of that ABI.
#include "py/tensor.h"

#include <stddef.h>
#include <stdint.h>

enum { TABLE_MAJOR = 1, DEVICE_CPU = 1, DEVICE_PINNED = 3 };

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

// DLPackExchangeAPI, up to its fifth function.
struct table {
    uint32_t major;
    uint32_t minor;
    const struct table *before;
    void *allocate;
    void *take;
    void *give;
    int (*look)(void *object, struct core_tensor *out);
    int (*stream)(int32_t type, int32_t number, void **out);
};

// torch.cuda.current_stream(NUMBER).cuda_stream, for a torch without the table.
static int stream_slowly(int32_t Py_UNUSED(type), int32_t number, void **out) {
    PyObject *cuda = PyImport_ImportModule("torch.cuda");
    PyObject *stream = cuda != NULL ? PyObject_CallMethod(cuda, "current_stream", "i", (int)number) : NULL;
    PyObject *handle = stream != NULL ? PyObject_GetAttrString(stream, "cuda_stream") : NULL;
    *out = handle != NULL ? PyLong_AsVoidPtr(handle) : NULL;
    Py_XDECREF(handle);
    Py_XDECREF(stream);
    Py_XDECREF(cuda);
    return PyErr_Occurred() != NULL ? -1 : 0;
}

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
        table->stream = found->stream != NULL ? found->stream : stream_slowly;
    }
    PyErr_Clear();
    Py_XDECREF(capsule); // the process owns the table
}

void core_tensor_table_close(struct core_tensor_table *table) {
    PyTypeObject *type = table->type;
    *table = (struct core_tensor_table){0};
    Py_XDECREF((PyObject *)type);
}

static bool is_host(int32_t type) {
    return type == DEVICE_CPU || type == DEVICE_PINNED;
}

static struct core_device device_of(int32_t type, int32_t number,
                                    int (*stream)(int32_t type, int32_t number, void **out)) {
    return (struct core_device){is_host(type) ? 0 : type, is_host(type) ? 0 : number, stream};
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
    return contiguous || next == 0;
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
    out->contiguous = is_contiguous(&tensor, &count) && tensor.lanes == 1;
    out->plain = out->contiguous && is_host(tensor.device);
    out->base = out->contiguous ? (char *)tensor.data + tensor.byte_offset : NULL;
    out->device = device_of(tensor.device, tensor.device_id, table->stream);
    out->bytes = count * (tensor.bits / 8U);
    out->element = tensor.lanes == 1 ? (uint16_t)(tensor.code << 8 | tensor.bits) : 0;
    return true;
}

// tensor.NAME() as a number: 0, or -1 with an exception.
static int method_number(PyObject *tensor, const char *name, size_t *out) {
    PyObject *value = PyObject_CallMethod(tensor, name, NULL);
    *out = value != NULL ? PyLong_AsSize_t(value) : 0;
    Py_XDECREF(value);
    return PyErr_Occurred() != NULL ? -1 : 0;
}

// The memory of a tensor by its methods.
static int find_slowly(PyObject *tensor, struct core_tensor_place *out) {
    size_t contiguous;
    size_t base;
    size_t count;
    size_t element;
    int type = 0;
    int number = 0;
    PyObject *device = PyObject_CallMethod(tensor, "__dlpack_device__", NULL);
    if (device == NULL || !PyArg_ParseTuple(device, "ii", &type, &number) ||
        method_number(tensor, "is_contiguous", &contiguous) < 0 || method_number(tensor, "data_ptr", &base) < 0 ||
        method_number(tensor, "numel", &count) < 0 || method_number(tensor, "element_size", &element) < 0) {
        Py_XDECREF(device);
        return -1;
    }
    Py_DECREF(device);
    *out = (struct core_tensor_place){.base = (void *)base,
                                      .bytes = count * element,
                                      .plain = contiguous != 0 && is_host(type),
                                      .contiguous = contiguous != 0,
                                      .device = device_of(type, number, stream_slowly)};
    return 0;
}

static int find(PyObject *tensor, struct core_tensor_place *out) {
    struct core_tensor_table table;
    core_tensor_table_open(&table, tensor);
    int rc = core_tensor_look(&table, tensor, out) ? 0 : find_slowly(tensor, out);
    core_tensor_table_close(&table);
    return rc;
}

int core_tensor_device(PyObject *tensor, struct core_device *out) {
    struct core_tensor_place found = {0};
    int rc = find(tensor, &found);
    *out = found.device;
    return rc;
}

int core_tensor_find(PyObject *tensor, struct core_tensor_place *out) {
    int rc = find(tensor, out);
    if (rc == 0 && !out->contiguous) {
        PyErr_SetString(PyExc_ValueError, "a tensor must be contiguous");
        rc = -1;
    }
    return rc;
}
