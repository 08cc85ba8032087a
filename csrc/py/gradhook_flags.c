// Flags of a bucket: tell for each member whether any rank has its gradient. One that no rank has stays None, so that the
// optimizer skips its parameter as without us.
#include "py/gradhook.h"

#include <stdint.h>

int gradhook_flags_open(struct core_gradhook *self, PyObject *flags) {
    PyObject *tuple = PySequence_Tuple(flags);
    if (tuple == NULL) {
        return -1;
    }
    if (PyTuple_Size(tuple) != self->bucket_count) {
        PyErr_Format(PyExc_ValueError, "%u buckets need as many flags, not %zd", self->bucket_count,
                     PyTuple_Size(tuple));
    }
    for (uint32_t b = 0; b < self->bucket_count && PyErr_Occurred() == NULL; b++) {
        struct gradhook_bucket *bucket = &self->buckets[b];
        PyObject *tensor = PyTuple_GetItem(tuple, b);
        Py_ssize_t count = PyObject_Size(tensor);
        if (count >= 0 && count != bucket->member_count) {
            PyErr_Format(PyExc_ValueError, "flags[%u] has %zd elements; bucket \"%s\" has %u parameters", b, count,
                         bucket->name, bucket->member_count);
        }
        bucket->flags = Py_NewRef(tensor);
    }
    Py_DECREF(tuple);
    return PyErr_Occurred() != NULL ? -1 : 0;
}

// tensor[index] = value
static int set_element(PyObject *tensor, uint32_t index, PyObject *value) {
    PyObject *key = PyLong_FromUnsignedLong(index);
    int rc = key != NULL ? PyObject_SetItem(tensor, key, value) : -1;
    Py_XDECREF(key);
    return rc;
}

int gradhook_flags_write(const struct core_gradhook *self, struct gradhook_bucket *bucket) {
    PyObject *zero = PyLong_FromLong(0);
    PyObject *ones = zero != NULL ? PyObject_CallMethod(bucket->flags, "fill_", "i", 1) : NULL;
    int rc = ones != NULL ? 0 : -1;
    for (uint32_t i = 0; i < bucket->member_count && rc == 0; i++) {
        if (self->params[bucket->members[i]].absent) {
            rc = set_element(bucket->flags, i, zero);
        }
    }
    Py_XDECREF(ones);
    Py_XDECREF(zero);
    return rc == 0 ? gradhook_note_stream(self, bucket) : -1;
}

// parameter.grad = view.clone()
static int set_gradient(const struct core_gradhook *self, PyObject *parameter, PyObject *view) {
    PyObject *sum = PyObject_CallMethod(view, "clone", NULL);
    int rc = sum != NULL ? PyObject_SetAttr(parameter, self->state->names[CORE_GRAD], sum) : -1;
    Py_XDECREF(sum);
    return rc;
}

int gradhook_flags_give(const struct core_gradhook *self, const struct gradhook_bucket *bucket, uint32_t member) {
    const struct gradhook_param *param = &self->params[bucket->members[member]];
    PyObject *key = PyLong_FromUnsignedLong(member);
    PyObject *flag = key != NULL ? PyObject_GetItem(bucket->flags, key) : NULL;
    int elsewhere = flag != NULL ? PyObject_IsTrue(flag) : -1;
    Py_XDECREF(flag);
    Py_XDECREF(key);
    if (elsewhere <= 0) {
        return elsewhere;
    }
    PyObject *parameter = PyWeakref_GetObject(param->parameter);
    if (parameter == NULL || parameter == Py_None) {
        return parameter == NULL ? -1 : 0;
    }
    Py_INCREF(parameter);
    int rc = set_gradient(self, parameter, param->view);
    Py_DECREF(parameter);
    return rc;
}
