// How does one gradient get to where its bucket is sent from? Only C of torch runs here: attributes and methods whose
// names were interned once.
#include "py/gradhook.h"

#include <string.h>

// A foreign gradient, and what it lets us do.
struct foreign {
    void *base;
    bool plain; // host memory of the view's dtype and size, contiguous
};

// Whether a method or an attribute says True: 1, 0, or -1 with an exception.
static int truth(PyObject *answer) {
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

// What kind of memory the gradient is. A sparse one has no address and no order: it is not plain.
static int ask(const struct core_state *state, const struct gradhook_param *param, PyObject *gradient,
               struct foreign *out) {
    PyObject *dtype = PyObject_GetAttr(gradient, state->names[CORE_DTYPE]);
    if (dtype == NULL) {
        return -1;
    }
    bool same = dtype == param->dtype;
    Py_DECREF(dtype);
    if (!same || !param->dense) {
        return 0;
    }
    int host = truth(PyObject_GetAttr(gradient, state->names[CORE_IS_CPU]));
    if (host <= 0) {
        return host;
    }
    int contiguous = truth(PyObject_CallMethodObjArgs(gradient, state->names[CORE_IS_CONTIGUOUS], NULL));
    if (contiguous < 0 && PyErr_ExceptionMatches(PyExc_RuntimeError)) { // a sparse one does not know
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

// The same, by torch's own table where that can say it.
static int look(const struct core_gradhook *self, const struct gradhook_param *param, PyObject *gradient,
                struct foreign *out) {
    struct core_tensor_place found;
    *out = (struct foreign){0};
    if (param->element == 0 || !core_tensor_look(&self->table, gradient, &found)) {
        return ask(core_state_of((PyObject *)self), param, gradient, out);
    }
    out->base = found.base;
    out->plain = found.plain && param->dense && found.element == param->element && found.bytes == param->bytes;
    return 0;
}

// gradient.detach(), and dense. A new reference, or NULL.
static PyObject *dense_of(const struct core_state *state, struct gradhook_param *param, PyObject *gradient) {
    int sparse = truth(PyObject_GetAttr(gradient, state->names[CORE_IS_SPARSE]));
    PyObject *bare = sparse >= 0 ? PyObject_CallMethodObjArgs(gradient, state->names[CORE_DETACH], NULL) : NULL;
    if (bare == NULL || sparse == 0) {
        return bare;
    }
    param->sparse = true;
    PyObject *dense = PyObject_CallMethodObjArgs(bare, state->names[CORE_TO_DENSE], NULL);
    Py_DECREF(bare);
    return dense;
}

// view.copy_(gradient): any layout, dtype and device that torch can copy.
static int copy_any(const struct core_state *state, struct gradhook_param *param, PyObject *gradient) {
    PyObject *bare = dense_of(state, param, gradient);
    if (bare == NULL) {
        return -1;
    }
    PyObject *view = PyObject_CallMethodObjArgs(param->view, state->names[CORE_COPY_], bare, NULL);
    Py_DECREF(bare);
    Py_XDECREF(view);
    return view != NULL ? 0 : -1;
}

void gradhook_drop(struct core_gradhook *self, struct gradhook_param *param) {
    PyObject *foreign = param->foreign;
    if (foreign == NULL) {
        return;
    }
    self->buckets[param->bucket].direct -= param->direct;
    param->foreign = NULL;
    param->direct = false;
    Py_DECREF(foreign);
}

// A large gradient stays where autograd put it: a copy would cost more than one segment more.
static bool may_stay(const struct core_gradhook *self, const struct gradhook_param *param) {
    bool takes_segments = self->native || self->target == NULL;
    return takes_segments && param->bytes >= self->direct_bytes &&
           self->buckets[param->bucket].direct < GRADHOOK_DIRECT_MAX;
}

static void keep_foreign(struct gradhook_param *param, PyObject *gradient, void *base) {
    param->foreign = Py_NewRef(gradient);
    param->foreign_base = base;
}

// *shown: the parameter's `grad` is to be the view.
static int place_foreign(struct core_gradhook *self, struct gradhook_param *param, PyObject *gradient, bool *shown) {
    struct foreign found;
    if (look(self, param, gradient, &found) < 0) {
        return -1;
    }
    if (found.plain && found.base == param->memory) {
        return 0;
    }
    if (found.plain && may_stay(self, param)) {
        keep_foreign(param, gradient, found.base);
        param->direct = true;
        self->buckets[param->bucket].direct++;
        return 0;
    }
    *shown = true;
    if (!found.plain) {
        return copy_any(core_state_of((PyObject *)self), param, gradient);
    }
    memcpy(param->memory, found.base, param->bytes);
    if (param->bytes <= GRADHOOK_BACK_MAX) {
        keep_foreign(param, gradient, found.base);
        *shown = false;
    }
    return 0;
}

int gradhook_give_back(const struct core_gradhook *self, const struct gradhook_param *param) {
    struct foreign found;
    if (param->foreign == NULL || param->direct) {
        return 0;
    }
    if (look(self, param, param->foreign, &found) < 0) {
        return -1;
    }
    if (found.plain && found.base == param->foreign_base) { // else the user gave the tensor other memory
        memcpy(found.base, param->memory, param->bytes);
    }
    return 0;
}

static int place_of(struct core_gradhook *self, struct gradhook_param *param, PyObject *parameter) {
    const struct core_state *state = core_state_of((PyObject *)self);
    PyObject *gradient = PyObject_GetAttr(parameter, state->names[CORE_GRAD]);
    if (gradient == NULL) {
        return -1;
    }
    int rc = 0;
    bool shown = false;
    if (gradient == Py_None) {
        memset(param->memory, 0, param->bytes);
        shown = true;
    } else if (gradient != param->view) {
        rc = place_foreign(self, param, gradient, &shown);
    }
    Py_DECREF(gradient);
    return rc == 0 && shown ? PyObject_SetAttr(parameter, state->names[CORE_GRAD], param->view) : rc;
}

int gradhook_place(struct core_gradhook *self, struct gradhook_param *param, PyObject *given) {
    gradhook_drop(self, param);
    if (param->bytes == 0) {
        return 0;
    }
    PyObject *parameter = given == param->identity ? given : PyWeakref_GetObject(param->parameter);
    if (parameter == NULL) {
        return -1;
    }
    if (parameter == Py_None) { // it is gone: nobody will read the sum
        memset(param->memory, 0, param->bytes);
        return 0;
    }
    Py_INCREF(parameter);
    int rc = place_of(self, param, parameter);
    Py_DECREF(parameter);
    return rc;
}
