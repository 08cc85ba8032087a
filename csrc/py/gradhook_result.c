// Result of a gradient: writes the sum to the gradient that was taken and to the parameter's `grad`, as Horovod's
// synchronize() does.
#include "py/gradhook.h"

#include <string.h>

// target.NAME(argument)
static int call(PyObject *target, const char *name, PyObject *argument) {
    PyObject *done = argument != NULL ? PyObject_CallMethod(target, name, "(O)", argument) : NULL;
    Py_XDECREF(done);
    return done != NULL ? 0 : -1;
}

// The sum as an existing tensor.
static PyObject *sum_of(const struct gradhook_param *param) {
    return param->direct ? param->alias : param->view;
}

// tensor.zero_().add_(sum.to_sparse(tensor.sparse_dim())): a sparse tensor has no set_().
static int copy_to_sparse(PyObject *tensor, PyObject *sum) {
    PyObject *dims = PyObject_CallMethod(tensor, "sparse_dim", NULL);
    PyObject *sparse = dims != NULL ? PyObject_CallMethod(sum, "to_sparse", "(O)", dims) : NULL;
    PyObject *zero = sparse != NULL ? PyObject_CallMethod(tensor, "zero_", NULL) : NULL;
    int rc = zero != NULL ? call(tensor, "add_", sparse) : -1;
    Py_XDECREF(zero);
    Py_XDECREF(sparse);
    Py_XDECREF(dims);
    return rc;
}

// Copies the sum into a tensor of any layout and dtype; a dense one keeps its memory.
static int copy_any(const struct core_gradhook *self, const struct gradhook_param *param, PyObject *tensor) {
    int sparse = gradhook_is_sparse(self, tensor);
    if (sparse != 0) {
        return sparse < 0 ? -1 : copy_to_sparse(tensor, sum_of(param));
    }
    PyObject *bare = PyObject_CallMethodObjArgs(tensor, self->state->names[CORE_DETACH], NULL);
    int rc = bare != NULL ? call(bare, "copy_", sum_of(param)) : -1;
    Py_XDECREF(bare);
    return rc;
}

// Sets the sum as new memory of a gradient whose memory has changed since it was taken.
static int set_moved(const struct gradhook_param *param) {
    PyObject *sum = param->direct ? Py_NewRef(param->alias) : PyObject_CallMethod(param->view, "clone", NULL);
    int rc = call(param->taken, "set_", sum);
    Py_XDECREF(sum);
    return rc;
}

// A gradient that travelled directly already has its sum, unless its memory has changed. Keeps its own storage where
// possible, so that a view or an array over it sees the sum.
static int give_direct(const struct core_gradhook *self, const struct gradhook_param *param) {
    void *now;
    switch (gradhook_moved(self, param, &now)) {
    case GRADHOOK_STAYED:
        return 0;
    case GRADHOOK_REWRITTEN:
        memcpy(now, param->taken_base, param->bytes);
        return 0;
    case GRADHOOK_REPLACED:
        return set_moved(param);
    case GRADHOOK_UNKNOWN:
        break;
    }
    return -1;
}

static int give_taken(const struct core_gradhook *self, const struct gradhook_param *param) {
    struct gradhook_found found;
    if (param->converted) {
        return copy_any(self, param, param->taken);
    }
    if (param->direct) {
        return give_direct(self, param);
    }
    if (gradhook_look(self, param, param->taken, &found) < 0) {
        return -1;
    }
    if (!found.plain || found.base != param->taken_base) {
        return set_moved(param);
    }
    memcpy(found.base, param->memory, param->bytes);
    return 0;
}

// Handles a `grad` that is another tensor than the one that was taken. Horovod calls current.set_(taken).
static int give_current(const struct core_gradhook *self, const struct gradhook_param *param, PyObject *current) {
    if (current == Py_None) {
        PyErr_Format(PyExc_RuntimeError,
                     "the gradient of parameter %u was deleted while bucket %s was on its way: delete gradients after "
                     "synchronize() or step()",
                     (unsigned)(param - self->params), self->buckets[param->bucket].name);
        return -1;
    }
    int sparse = gradhook_is_sparse(self, current);
    if (sparse < 0) {
        return -1;
    }
    return sparse || param->converted ? copy_any(self, param, current) : call(current, "set_", param->taken);
}

// Gives the sum to what the parameter has as `grad`.
static int give_parameter(const struct core_gradhook *self, const struct gradhook_param *param, PyObject *parameter) {
    PyObject *current = PyObject_GetAttr(parameter, self->state->names[CORE_GRAD]);
    if (current == NULL) {
        return -1;
    }
    int rc = current != param->taken ? give_current(self, param, current) : 0;
    Py_DECREF(current);
    return rc;
}

int gradhook_give_back(const struct core_gradhook *self, const struct gradhook_param *param) {
    if (param->taken == NULL) {
        return 0;
    }
    PyObject *parameter = Py_XNewRef(PyWeakref_GetObject(param->parameter)); // the calls may drop it
    if (parameter == NULL) {
        return -1;
    }
    int rc = give_taken(self, param);
    if (rc == 0 && parameter != Py_None) {
        rc = give_parameter(self, param, parameter);
    }
    Py_DECREF(parameter);
    return rc;
}
