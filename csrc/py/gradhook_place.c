// Place of a gradient: where its memory lies, whether it can stay there while its bucket is sent, and the copy to the
// bucket if not. Records which parameter took which gradient, as two parameters may share one. The user may hold another
// reference to a gradient. Runs only C code of torch: attributes and methods by interned names.
#include "py/gradhook.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

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

// Finds a gradient's memory. may_stay: it may be sent from there if only autograd's own references share it. A gradient
// that is to be sent by a Comm then keeps its memory and contents until gradhook_drop(), even if it is given other
// memory, resized, written to or swapped meanwhile. arrived: as in gradhook_place. 0, or -1 with an exception.
static int locate(const struct core_gradhook *self, struct gradhook_param *param, PyObject *gradient, PyObject *arrived,
                  bool may_stay, struct gradhook_found *out) {
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

// ---- the copy to the bucket

int gradhook_is_sparse(const struct core_gradhook *self, PyObject *tensor) {
    PyObject *answer = PyObject_GetAttr(tensor, self->state->names[CORE_IS_SPARSE]);
    int sparse = answer != NULL ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return sparse;
}

// gradient.detach(), made dense. A new reference, or NULL.
static PyObject *dense_of(const struct core_gradhook *self, struct gradhook_param *param, PyObject *gradient) {
    int sparse = gradhook_is_sparse(self, gradient);
    PyObject *bare = sparse >= 0 ? PyObject_CallMethodObjArgs(gradient, self->state->names[CORE_DETACH], NULL) : NULL;
    if (bare == NULL || sparse == 0) {
        return bare;
    }
    param->sparse = true;
    PyObject *dense = PyObject_CallMethodObjArgs(bare, self->state->names[CORE_TO_DENSE], NULL);
    Py_DECREF(bare);
    return dense;
}

// Sets the exception for a gradient whose dtype is not that of its view. The parameter may have the gradient's by now.
static void refuse_dtype(const struct core_gradhook *self, const struct gradhook_param *param, PyObject *dtype) {
    PyObject *parameter = Py_XNewRef(PyWeakref_GetObject(param->parameter)); // the calls may drop it
    PyObject *now = parameter != NULL ? PyObject_GetAttr(parameter, self->state->names[CORE_DTYPE]) : NULL;
    PyObject *shape = now == dtype ? PyObject_GetAttrString(parameter, "shape") : NULL;
    if (shape != NULL) {
        PyErr_Format(PyExc_RuntimeError,
                     "a parameter of shape %S was of type %S when its optimizer was made (or netbottleneck.profile "
                     "called), and is of %S now: change the model's type before that",
                     shape, param->dtype, dtype);
    } else {
        PyErr_Format(
            PyExc_RuntimeError,
            "a gradient is of type %S, its parameter of %S: set the parameter's grad_dtype before the optimizer "
            "is made, or use DistributedOptimizer(sparse_as_dense=True), which sends each gradient as it is",
            dtype, param->dtype);
    }
    Py_XDECREF(shape);
    Py_XDECREF(now);
    Py_XDECREF(parameter);
}

// 0 if the gradient has the view's dtype, else -1 with an exception: a sum in the view's dtype would lose precision or
// range.
static int check_dtype(const struct core_gradhook *self, const struct gradhook_param *param, PyObject *gradient) {
    PyObject *dtype = PyObject_GetAttr(gradient, self->state->names[CORE_DTYPE]);
    if (dtype != NULL && dtype != param->dtype) {
        refuse_dtype(self, param, dtype);
    }
    Py_XDECREF(dtype);
    return PyErr_Occurred() != NULL ? -1 : 0;
}

// view.copy_(gradient): any layout and device that torch can copy.
static int copy_any(const struct core_gradhook *self, struct gradhook_param *param, PyObject *gradient) {
    PyObject *bare = check_dtype(self, param, gradient) == 0 ? dense_of(self, param, gradient) : NULL;
    if (bare == NULL) {
        return -1;
    }
    PyObject *view = PyObject_CallMethodObjArgs(param->view, self->state->names[CORE_COPY_], bare, NULL);
    Py_DECREF(bare);
    Py_XDECREF(view);
    return view != NULL ? 0 : -1;
}

int gradhook_note_stream(const struct core_gradhook *self, struct gradhook_bucket *bucket) {
    void *now = NULL;
    if (self->device.type == 0) {
        return 0;
    }
    if (self->device.stream(self->device.type, self->device.number, &now) != 0) {
        return -1;
    }
    for (int i = 0; i < bucket->stream_count; i++) {
        if (bucket->streams[i] == now) {
            return 0;
        }
    }
    if (bucket->stream_count == NB_OP_STREAMS_MAX) {
        PyErr_Format(PyExc_RuntimeError, "the gradients of bucket %s come from more than %d streams", bucket->name,
                     NB_OP_STREAMS_MAX);
        return -1;
    }
    bucket->streams[bucket->stream_count++] = now;
    return 0;
}

// zeros(parameter.shape), contiguous, as Horovod makes them. A new reference, or NULL.
static PyObject *make_zeros(PyObject *parameter, PyObject *grad_name) {
    PyObject *shape = PyObject_GetAttrString(parameter, "shape");
    PyObject *zeros = shape != NULL ? PyObject_CallMethod(parameter, "new_zeros", "(O)", shape) : NULL;
    Py_XDECREF(shape);
    if (zeros != NULL && PyObject_SetAttr(parameter, grad_name, zeros) < 0) {
        Py_CLEAR(zeros);
    }
    return zeros;
}

// True for a large gradient: a copy costs more than one more segment.
static bool may_stay(const struct core_gradhook *self, const struct gradhook_param *param) {
    bool takes_segments = self->native || self->target == NULL;
    return takes_segments && param->bytes >= self->direct_bytes &&
           self->buckets[param->bucket].direct < GRADHOOK_DIRECT_MAX;
}

static uint32_t slot_of(const struct gradhook_claims *claims, const void *key) {
    uint64_t mixed = (uint64_t)(uintptr_t)key * 0x9E3779B97F4A7C15U;
    return (uint32_t)(mixed >> 32) & claims->mask;
}

// Makes torch release the lazy clone, so that the gradient's storage is as autograd made it.
static void settle(const struct core_gradhook *self, PyObject *gradient) {
    PyObject *type;
    PyObject *value;
    PyObject *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *name = self->state->names[CORE_DATA_PTR];
    PyObject *address = PyObject_CallMethodObjArgs(gradient, name, NULL);
    Py_XDECREF(address);
    PyErr_Restore(type, value, trace);
}

void gradhook_drop(struct core_gradhook *self, struct gradhook_param *param) {
    PyObject *taken = param->taken;
    PyObject *alias = param->alias;
    self->buckets[param->bucket].direct -= param->direct;
    param->direct = false;
    param->converted = false;
    param->taken = NULL;
    param->alias = NULL;
    Py_XDECREF(alias);
    if (alias != NULL && taken != NULL) {
        settle(self, taken);
    }
    Py_XDECREF(taken);
}

// Records that a parameter has taken a gradient. A parameter that took the same gradient before gets no sum: it would
// be out of date.
static void claim(struct core_gradhook *self, struct gradhook_param *param) {
    struct gradhook_claims *claims = &self->claims;
    const void *key = param->taken_base;
    uint32_t at = slot_of(claims, key);
    for (uint32_t probe = 0; probe <= claims->mask; probe++, at = (at + 1) & claims->mask) {
        struct gradhook_claim *slot = &claims->slots[at];
        bool used = slot->pass == claims->pass;
        if (used && slot->key != key) {
            continue;
        }
        struct gradhook_param *other = &self->params[slot->param];
        if (used && other != param && other->taken != NULL && other->taken_base == key &&
            other->bytes == param->bytes) {
            gradhook_drop(self, other);
        }
        *slot = (struct gradhook_claim){.key = key, .pass = claims->pass, .param = (uint32_t)(param - self->params)};
        return;
    }
}

// Copies the gradient to its bucket, unless it stays where it is.
static int take(struct core_gradhook *self, struct gradhook_param *param, PyObject *gradient, PyObject *arrived) {
    struct gradhook_found found;
    if (locate(self, param, gradient, arrived, may_stay(self, param), &found) < 0) {
        return -1;
    }
    if (!found.plain &&
        (copy_any(self, param, gradient) < 0 || gradhook_note_stream(self, &self->buckets[param->bucket]) < 0)) {
        return -1;
    }
    if (found.plain && !found.stays) {
        memcpy(param->memory, found.base, param->bytes);
    }
    param->taken = Py_NewRef(gradient);
    param->taken_base = found.plain ? found.base : (void *)gradient;
    param->converted = !found.plain;
    param->direct = found.stays;
    self->buckets[param->bucket].direct += found.stays;
    claim(self, param);
    return 0;
}

// view.zero_()
static int place_zeros(struct core_gradhook *self, const struct gradhook_param *param) {
    PyObject *zeros = PyObject_CallMethod(param->view, "zero_", NULL);
    Py_XDECREF(zeros);
    return zeros != NULL ? gradhook_note_stream(self, &self->buckets[param->bucket]) : -1;
}

static int place_of(struct core_gradhook *self, struct gradhook_param *param, PyObject *parameter, PyObject *arrived) {
    PyObject *name = self->state->names[CORE_GRAD];
    PyObject *gradient = PyObject_GetAttr(parameter, name);
    if (gradient == Py_None && self->buckets[param->bucket].flags != NULL) {
        Py_DECREF(gradient);
        param->absent = true;
        return place_zeros(self, param);
    }
    if (gradient == Py_None) {
        Py_DECREF(gradient);
        gradient = make_zeros(parameter, name);
    }
    if (gradient == NULL) {
        return -1;
    }
    int rc = take(self, param, gradient, arrived);
    Py_DECREF(gradient);
    return rc;
}

int gradhook_place(struct core_gradhook *self, struct gradhook_param *param, PyObject *arrived) {
    gradhook_drop(self, param);
    param->absent = false;
    if (param->bytes == 0) {
        return 0;
    }
    PyObject *parameter = PyWeakref_GetObject(param->parameter);
    if (parameter == NULL) {
        return -1;
    }
    if (parameter == Py_None) { // the parameter is gone: nobody will read the sum
        param->absent = self->buckets[param->bucket].flags != NULL;
        return place_zeros(self, param);
    }
    Py_INCREF(parameter);
    int rc = place_of(self, param, parameter, arrived);
    Py_DECREF(parameter);
    return rc;
}

int gradhook_claims_open(struct core_gradhook *self) {
    struct gradhook_claims *claims = &self->claims;
    uint32_t slots = 4;
    while (slots < 4 * (self->param_count + 1)) {
        slots *= 2;
    }
    claims->mask = slots - 1;
    claims->pass = 1;
    claims->slots = calloc(slots, sizeof(*claims->slots));
    if (claims->slots == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

void gradhook_claims_close(struct core_gradhook *self) {
    free(self->claims.slots);
    self->claims = (struct gradhook_claims){0};
}
