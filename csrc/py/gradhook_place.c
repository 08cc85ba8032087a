// Place of a gradient: brings it to the memory from which its bucket is sent, and records which parameter took which
// gradient, as two parameters may share one. Runs only C code of torch: attributes and methods by interned names.
#include "py/gradhook.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

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

// 0 if the gradient has the parameter's dtype, else -1 with an exception: a sum in the parameter's dtype would lose
// precision or range.
static int check_dtype(const struct core_gradhook *self, const struct gradhook_param *param, PyObject *gradient) {
    PyObject *dtype = PyObject_GetAttr(gradient, self->state->names[CORE_DTYPE]);
    if (dtype != NULL && dtype != param->dtype) {
        PyErr_Format(
            PyExc_RuntimeError,
            "a gradient is of type %S, its parameter of %S: set the parameter's grad_dtype before the optimizer "
            "is made, or use DistributedOptimizer(sparse_as_dense=True), which sends each gradient as it is",
            dtype, param->dtype);
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
    if (gradhook_locate(self, param, gradient, arrived, may_stay(self, param), &found) < 0) {
        return -1;
    }
    if (!found.plain && copy_any(self, param, gradient) < 0) {
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

static int place_of(struct core_gradhook *self, struct gradhook_param *param, PyObject *parameter, PyObject *arrived) {
    PyObject *name = self->state->names[CORE_GRAD];
    PyObject *gradient = PyObject_GetAttr(parameter, name);
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
    if (param->bytes == 0) {
        return 0;
    }
    PyObject *parameter = PyWeakref_GetObject(param->parameter);
    if (parameter == NULL) {
        return -1;
    }
    if (parameter == Py_None) { // the parameter is gone: nobody will read the sum
        memset(param->memory, 0, param->bytes);
        return 0;
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
