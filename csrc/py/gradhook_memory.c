// Memory of a gradient: where it lies, whether anything else uses it, and how it stays while it is being sent. The user
// may hold another reference to a gradient.
#include "py/gradhook.h"

#include <stdint.h>
#include <stdlib.h>

// ---- where it lies

// The truth of the result of a method or an attribute: 1, 0, or -1 with an exception. Steals the reference.
static int truth_of(PyObject *answer) {
    if (answer == NULL) {
        return -1;
    }
    int rc = PyObject_IsTrue(answer);
    Py_DECREF(answer);
    return rc;
}

static int get_size(PyObject *object, PyObject *name, size_t *out) {
    PyObject *value = PyObject_GetAttr(object, name);
    if (value == NULL) {
        return -1;
    }
    *out = PyLong_AsSize_t(value);
    Py_DECREF(value);
    return PyErr_Occurred() != NULL ? -1 : 0;
}

static int get_base(PyObject *gradient, PyObject *name, void **out) {
    PyObject *value = PyObject_CallMethodObjArgs(gradient, name, NULL);
    if (value == NULL) {
        return -1;
    }
    *out = PyLong_AsVoidPtr(value);
    Py_DECREF(value);
    return PyErr_Occurred() != NULL ? -1 : 0;
}

// Finds the gradient's memory. A sparse gradient has no address and no element order, so it is not plain.
static int memory_query(const struct core_state *state, const struct gradhook_param *param, PyObject *gradient,
                        struct gradhook_found *out) {
    PyObject *dtype = PyObject_GetAttr(gradient, state->names[CORE_DTYPE]);
    if (dtype == NULL) {
        return -1;
    }
    bool same = dtype == param->dtype;
    Py_DECREF(dtype);
    if (!same || !param->dense) {
        return 0;
    }
    int host = truth_of(PyObject_GetAttr(gradient, state->names[CORE_IS_CPU]));
    if (host <= 0) {
        return host;
    }
    int contiguous = truth_of(PyObject_CallMethodObjArgs(gradient, state->names[CORE_IS_CONTIGUOUS], NULL));
    if (contiguous < 0 && PyErr_ExceptionMatches(PyExc_RuntimeError)) { // a sparse tensor raises it
        PyErr_Clear();
        return 0;
    }
    if (contiguous <= 0) {
        return contiguous;
    }
    size_t bytes;
    if (get_size(gradient, state->names[CORE_NBYTES], &bytes) < 0 ||
        get_base(gradient, state->names[CORE_DATA_PTR], &out->base) < 0) {
        return -1;
    }
    out->plain = bytes == param->bytes;
    return 0;
}

// As memory_query(), by torch's DLPack table if that knows the tensor.
int gradhook_look(const struct core_gradhook *self, const struct gradhook_param *param, PyObject *gradient,
                  struct gradhook_found *out) {
    struct core_tensor_place found;
    *out = (struct gradhook_found){0};
    if (param->element == 0 || !core_tensor_look(&self->table, gradient, &found)) {
        return memory_query(self->state, param, gradient, out);
    }
    out->base = found.base;
    out->plain = found.plain && param->dense && found.element == param->element && found.bytes == param->bytes;
    return 0;
}

// ---- torch's counts of users

// tensor._use_count(), or -1 with an exception.
static long uses_of_tensor(PyObject *tensor) {
    PyObject *uses = PyObject_CallMethod(tensor, "_use_count", NULL);
    long count = uses != NULL ? PyLong_AsLong(uses) : -1;
    Py_XDECREF(uses);
    return count;
}

// The use count of the tensor's storage, including a Python object of it; or -1 with an exception.
static long uses_of_storage(const struct gradhook_uses *known, PyObject *tensor) {
    PyObject *storage = PyObject_CallMethod(tensor, "untyped_storage", NULL);
    PyObject *address = storage != NULL ? PyObject_GetAttrString(storage, "_cdata") : NULL;
    PyObject *uses = address != NULL ? PyObject_CallFunctionObjArgs(known->count, address, NULL) : NULL;
    long count = uses != NULL ? PyLong_AsLong(uses) : -1;
    Py_XDECREF(uses);
    Py_XDECREF(address);
    Py_XDECREF(storage);
    return count;
}

// Measures the use counts of an unshared tensor as the reference for gradients. 0, or -1 with an exception.
static int calibrate(struct gradhook_uses *known, PyObject *view) {
    PyObject *torch = PyImport_ImportModule("torch._C");
    known->count = torch != NULL ? PyObject_GetAttrString(torch, "_storage_Use_Count") : NULL;
    known->address = known->count != NULL ? PyObject_GetAttrString(torch, "_data_address") : NULL;
    PyObject *alone = known->address != NULL ? PyObject_CallMethod(view, "clone", NULL) : NULL;
    known->tensor_uses = alone != NULL ? uses_of_tensor(alone) + 1 : 0; // a gradient has one owner more
    known->storage_uses = known->tensor_uses > 0 ? uses_of_storage(known, alone) : -1;
    Py_XDECREF(alone);
    Py_XDECREF(torch);
    return known->storage_uses < 0 ? -1 : 0;
}

// Autograd's own references to the memory, besides the gradient itself: the arrived tensor and, if that is a view, its
// base. -1 with an exception; -2: there are others.
static long in_hand(const struct core_gradhook *self, const struct gradhook_param *param, const void *memory,
                    PyObject *arrived) {
    struct gradhook_found found;
    if (arrived == NULL) {
        return 0;
    }
    if (gradhook_look(self, param, arrived, &found) < 0) {
        return -1;
    }
    if (!found.plain || found.base != memory) { // it was copied, or added to an existing gradient
        return 0;
    }
    PyObject *base = PyObject_GetAttrString(arrived, "_base");
    long uses = base != NULL && base != Py_None ? uses_of_tensor(base) : 0;
    long held = base != Py_None ? 2 : 1;
    bool failed = base == NULL || uses < 0;
    Py_XDECREF(base);
    if (failed) {
        return -1;
    }
    return uses <= self->uses.tensor_uses ? held : -2;
}

// 1: only autograd's own references share the gradient's memory; 0: others do, or it is unknown; -1 with an exception.
static int is_alone(const struct core_gradhook *self, const struct gradhook_param *param, const void *memory,
                    PyObject *gradient, PyObject *arrived) {
    const struct gradhook_uses *known = &self->uses;
    if (known->count == NULL) {
        return 0;
    }
    long uses = uses_of_tensor(gradient);
    if (uses != known->tensor_uses) {
        return uses < 0 ? -1 : 0;
    }
    long more = in_hand(self, param, memory, arrived);
    if (more < 0) {
        return more == -2 ? 0 : -1;
    }
    uses = uses_of_storage(known, gradient);
    return uses < 0 ? -1 : uses == known->storage_uses + more;
}

// ---- memory that stays while a gradient is in progress
//
// A tensor object does not keep its memory: `.data =`, set_(), resize_() and a swap with another tensor take it away,
// and a second tensor over the same storage loses it with the storage's resize_(). A lazy clone is a storage of its own
// that also owns the memory. While it exists, a write to the gradient through torch copies the memory first.

// The tensor's storage, only for comparison.
static int storage_of(PyObject *tensor, void **out) {
    PyObject *storage = PyObject_CallMethod(tensor, "untyped_storage", NULL);
    PyObject *address = storage != NULL ? PyObject_GetAttrString(storage, "_cdata") : NULL;
    *out = address != NULL ? PyLong_AsVoidPtr(address) : NULL;
    Py_XDECREF(address);
    Py_XDECREF(storage);
    return PyErr_Occurred() != NULL ? -1 : 0;
}

// Where a tensor's storage begins. data_ptr() and torch's table would count as a write.
static int address_of(const struct gradhook_uses *known, PyObject *tensor, void **out) {
    PyObject *address = PyObject_CallFunctionObjArgs(known->address, tensor, NULL);
    *out = address != NULL ? PyLong_AsVoidPtr(address) : NULL;
    Py_XDECREF(address);
    return PyErr_Occurred() != NULL ? -1 : 0;
}

// Another tensor over memory that torch did not allocate, if that cannot be resized. None: it can.
static PyObject *alias_of_fixed(const struct core_state *state, PyObject *gradient) {
    PyObject *storage = PyObject_CallMethod(gradient, "untyped_storage", NULL);
    PyObject *answer = storage != NULL ? PyObject_CallMethod(storage, "resizable", NULL) : NULL;
    int resizable = answer != NULL ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    Py_XDECREF(storage);
    if (resizable != 0) {
        return resizable < 0 ? NULL : Py_NewRef(Py_None);
    }
    return PyObject_CallMethodObjArgs(gradient, state->names[CORE_DETACH], NULL);
}

// A new reference to a tensor that keeps the memory; None: none can.
static PyObject *alias_of(const struct core_state *state, PyObject *gradient) {
    PyObject *alias = PyObject_CallMethodObjArgs(gradient, state->names[CORE_LAZY_CLONE], NULL);
    bool refused = alias == NULL && (PyErr_ExceptionMatches(PyExc_RuntimeError) || // torch does not own the memory
                                     PyErr_ExceptionMatches(PyExc_AttributeError));
    if (refused) {
        PyErr_Clear();
        alias = alias_of_fixed(state, gradient);
    }
    return alias;
}

// Keeps the memory of a gradient and its contents until gradhook_drop(), even if the gradient is given other memory,
// resized, written to or swapped meanwhile. Records where it lies. 1; 0: it cannot be kept; -1 with an exception.
static int hold(const struct core_gradhook *self, struct gradhook_param *param, PyObject *gradient) {
    const struct core_state *state = self->state;
    PyObject *answer = PyObject_GetAttr(gradient, state->names[CORE_REQUIRES_GRAD]);
    bool graph = answer == Py_True; // its clone would be part of the graph
    Py_XDECREF(answer);
    if (answer == NULL || graph) {
        return answer == NULL ? -1 : 0;
    }
    PyObject *alias = alias_of(state, gradient);
    if (alias == NULL || alias == Py_None) {
        Py_XDECREF(alias);
        return alias == NULL ? -1 : 0;
    }
    if (storage_of(gradient, &param->storage) < 0 || address_of(&self->uses, alias, &param->storage_base) < 0) {
        Py_DECREF(alias);
        return -1;
    }
    param->alias = alias;
    return 1;
}

int gradhook_locate(const struct core_gradhook *self, struct gradhook_param *param, PyObject *gradient,
                    PyObject *arrived, bool may_stay, struct gradhook_found *out) {
    int stays = gradhook_look(self, param, gradient, out);
    if (stays == 0 && out->plain && may_stay) {
        stays = is_alone(self, param, out->base, gradient, arrived);
    }
    if (stays > 0 && self->native) {
        stays = hold(self, param, gradient);
    }
    out->stays = stays > 0;
    return stays < 0 ? -1 : 0;
}

// 1 if the tensor's storage has all bytes of its shape, from `base` on, else 0; -1 with an exception.
static int has_room(PyObject *tensor, const char *base, size_t bytes) {
    PyObject *storage = PyObject_CallMethod(tensor, "untyped_storage", NULL);
    PyObject *start = storage != NULL ? PyObject_CallMethod(storage, "data_ptr", NULL) : NULL;
    PyObject *size = start != NULL ? PyObject_CallMethod(storage, "nbytes", NULL) : NULL;
    const char *from = size != NULL ? PyLong_AsVoidPtr(start) : NULL;
    size_t room = size != NULL ? PyLong_AsSize_t(size) : 0;
    Py_XDECREF(size);
    Py_XDECREF(start);
    Py_XDECREF(storage);
    if (PyErr_Occurred() != NULL) {
        return -1;
    }
    return from != NULL && base >= from && (size_t)(base - from) <= room && bytes <= room - (size_t)(base - from);
}

enum gradhook_moved gradhook_moved(const struct core_gradhook *self, const struct gradhook_param *param, void **now) {
    struct gradhook_found found;
    void *storage;
    if (address_of(&self->uses, param->taken, now) < 0) {
        return GRADHOOK_UNKNOWN;
    }
    if (*now == param->storage_base) {
        return GRADHOOK_STAYED;
    }
    if (storage_of(param->taken, &storage) < 0) {
        return GRADHOOK_UNKNOWN;
    }
    if (storage != param->storage) {
        return GRADHOOK_REPLACED;
    }
    int room = gradhook_look(self, param, param->taken, &found);
    if (room == 0 && found.plain) {
        room = has_room(param->taken, found.base, param->bytes);
    }
    PyErr_Clear(); // torch 2.13 refuses writes to a tensor resized while it had a lazy clone
    *now = found.base;
    return room > 0 ? GRADHOOK_REWRITTEN : GRADHOOK_REPLACED;
}

void gradhook_uses_open(struct core_gradhook *self) {
    if (self->param_count > 0 && calibrate(&self->uses, self->params[0].view) < 0) {
        PyErr_Clear(); // this torch lacks use counts or addresses: copy every gradient
        Py_CLEAR(self->uses.count);
        Py_CLEAR(self->uses.address);
    }
}

void gradhook_uses_close(struct core_gradhook *self) {
    PyObject *count = self->uses.count;
    PyObject *address = self->uses.address;
    self->uses = (struct gradhook_uses){0};
    Py_XDECREF(count);
    Py_XDECREF(address);
}
