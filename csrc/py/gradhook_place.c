// Brings one gradient to the memory from which its bucket is sent. Runs only C code of torch: attributes and methods by
// interned names.
#include "py/gradhook.h"

#include <string.h>

// gradient.detach(), made dense. A new reference, or NULL.
static PyObject *dense_of(const struct core_state *state, struct gradhook_param *param, PyObject *gradient) {
    int sparse = gradhook_truth(PyObject_GetAttr(gradient, state->names[CORE_IS_SPARSE]));
    PyObject *bare = sparse >= 0 ? PyObject_CallMethodObjArgs(gradient, state->names[CORE_DETACH], NULL) : NULL;
    if (bare == NULL || sparse == 0) {
        return bare;
    }
    param->sparse = true;
    PyObject *dense = PyObject_CallMethodObjArgs(bare, state->names[CORE_TO_DENSE], NULL);
    Py_DECREF(bare);
    return dense;
}

// 0 if the gradient has the parameter's dtype, else -1 with an exception: a sum in the parameter's dtype would lose
// precision or range.
static int check_dtype(const struct core_state *state, const struct gradhook_param *param, PyObject *gradient) {
    PyObject *dtype = PyObject_GetAttr(gradient, state->names[CORE_DTYPE]);
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
static int copy_any(const struct core_state *state, struct gradhook_param *param, PyObject *gradient) {
    PyObject *bare = check_dtype(state, param, gradient) == 0 ? dense_of(state, param, gradient) : NULL;
    if (bare == NULL) {
        return -1;
    }
    PyObject *view = PyObject_CallMethodObjArgs(param->view, state->names[CORE_COPY_], bare, NULL);
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

static int take_converted(struct core_gradhook *self, struct gradhook_param *param, PyObject *gradient) {
    if (copy_any(core_state_of((PyObject *)self), param, gradient) < 0) {
        return -1;
    }
    param->taken = Py_NewRef(gradient);
    param->taken_base = gradient;
    param->converted = true;
    return 0;
}

// True for a large gradient: a copy costs more than one more segment.
static bool may_stay(const struct core_gradhook *self, const struct gradhook_param *param) {
    bool takes_segments = self->native || self->target == NULL;
    return takes_segments && param->bytes >= self->direct_bytes &&
           self->buckets[param->bucket].direct < GRADHOOK_DIRECT_MAX;
}

// 1: the gradient travels from its own memory. 0, or -1 with an exception.
static int go_direct(struct core_gradhook *self, struct gradhook_param *param, PyObject *gradient, PyObject *arrived) {
    int stays = may_stay(self, param) ? gradhook_is_alone(self, param, gradient, arrived) : 0;
    if (stays > 0 && self->native) {
        stays = gradhook_hold(self, param, gradient);
    }
    if (stays <= 0) {
        return stays;
    }
    param->direct = true;
    self->buckets[param->bucket].direct++;
    return 1;
}

static int take_plain(struct core_gradhook *self, struct gradhook_param *param, PyObject *gradient, PyObject *arrived) {
    int direct = go_direct(self, param, gradient, arrived);
    if (direct < 0) {
        return -1;
    }
    if (direct == 0) {
        memcpy(param->memory, param->taken_base, param->bytes);
    }
    param->taken = Py_NewRef(gradient);
    return 0;
}

static int take(struct core_gradhook *self, struct gradhook_param *param, PyObject *gradient, PyObject *arrived) {
    struct gradhook_found found;
    if (gradhook_look(self, param, gradient, &found) < 0) {
        return -1;
    }
    param->taken_base = found.base;
    int rc = found.plain ? take_plain(self, param, gradient, arrived) : take_converted(self, param, gradient);
    if (rc == 0) {
        gradhook_claim(self, param);
    }
    return rc;
}

static int place_of(struct core_gradhook *self, struct gradhook_param *param, PyObject *parameter, PyObject *arrived) {
    PyObject *name = core_state_of((PyObject *)self)->names[CORE_GRAD];
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
