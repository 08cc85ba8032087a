// Whose gradient is which memory? Gradients of two parameters may share it, and a user may hold it under another name.
#include "py/gradhook.h"

#include <stdint.h>
#include <stdlib.h>

// ---- torch's counts of users

// tensor._use_count(), or -1 with an exception.
static long uses_of_tensor(PyObject *tensor) {
    PyObject *uses = PyObject_CallMethod(tensor, "_use_count", NULL);
    long count = uses != NULL ? PyLong_AsLong(uses) : -1;
    Py_XDECREF(uses);
    return count;
}

// The users of the tensor's storage, a Python object of it among them; or -1 with an exception.
static long uses_of_storage(const struct gradhook_claims *claims, PyObject *tensor) {
    PyObject *storage = PyObject_CallMethod(tensor, "untyped_storage", NULL);
    PyObject *address = storage != NULL ? PyObject_GetAttrString(storage, "_cdata") : NULL;
    PyObject *uses = address != NULL ? PyObject_CallFunctionObjArgs(claims->count, address, NULL) : NULL;
    long count = uses != NULL ? PyLong_AsLong(uses) : -1;
    Py_XDECREF(uses);
    Py_XDECREF(address);
    Py_XDECREF(storage);
    return count;
}

// Counts the users of a tensor that is shared with nobody, as the measure for gradients. 0, or -1 with an exception.
static int calibrate(struct gradhook_claims *claims, PyObject *view) {
    PyObject *torch = PyImport_ImportModule("torch._C");
    claims->count = torch != NULL ? PyObject_GetAttrString(torch, "_storage_Use_Count") : NULL;
    PyObject *alone = claims->count != NULL ? PyObject_CallMethod(view, "clone", NULL) : NULL;
    claims->tensor_uses = alone != NULL ? uses_of_tensor(alone) + 1 : 0; // Python alone has it: an owner more is usual
    claims->storage_uses = claims->tensor_uses > 0 ? uses_of_storage(claims, alone) : -1;
    Py_XDECREF(alone);
    Py_XDECREF(torch);
    return claims->storage_uses < 0 ? -1 : 0;
}

// What autograd has in hand of the memory, on top of the gradient itself: the tensor that arrived and, of a view, its
// base. -1 with an exception; -2: more than that.
static long in_hand(const struct core_gradhook *self, const struct gradhook_param *param, PyObject *arrived) {
    struct gradhook_found found;
    if (arrived == NULL) {
        return 0;
    }
    if (gradhook_look(self, param, arrived, &found) < 0) {
        return -1;
    }
    if (!found.plain || found.base != param->taken_base) { // it was copied, or added to what was there
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
    return uses <= self->claims.tensor_uses ? held : -2;
}

int gradhook_is_alone(const struct core_gradhook *self, const struct gradhook_param *param, PyObject *gradient,
                      PyObject *arrived) {
    const struct gradhook_claims *claims = &self->claims;
    if (claims->count == NULL) {
        return 0;
    }
    long uses = uses_of_tensor(gradient);
    if (uses != claims->tensor_uses) {
        return uses < 0 ? -1 : 0;
    }
    long more = in_hand(self, param, arrived);
    if (more < 0) {
        return more == -2 ? 0 : -1;
    }
    uses = uses_of_storage(claims, gradient);
    return uses < 0 ? -1 : uses == claims->storage_uses + more;
}

// ---- gradients that are one tensor

static uint32_t slot_of(const struct gradhook_claims *claims, const void *key) {
    uint64_t mixed = (uint64_t)(uintptr_t)key * 0x9E3779B97F4A7C15U;
    return (uint32_t)(mixed >> 32) & claims->mask;
}

void gradhook_claim(struct core_gradhook *self, struct gradhook_param *param) {
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

void gradhook_drop(struct core_gradhook *self, struct gradhook_param *param) {
    self->buckets[param->bucket].direct -= param->direct;
    param->direct = false;
    param->odd = false;
    Py_CLEAR(param->alias);
    Py_CLEAR(param->taken);
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
    if (self->param_count > 0 && calibrate(claims, self->params[0].view) < 0) {
        PyErr_Clear(); // a torch that does not count: every gradient is copied
        Py_CLEAR(claims->count);
    }
    return 0;
}

void gradhook_claims_close(struct core_gradhook *self) {
    struct gradhook_claims *claims = &self->claims;
    PyObject *count = claims->count;
    free(claims->slots);
    *claims = (struct gradhook_claims){0};
    Py_XDECREF(count);
}
