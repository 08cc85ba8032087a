// Arguments from Python: checks that several types share.
#include "py/core.h"

#include <limits.h>
#include <math.h>
#include <stdint.h>

#include "base/dtype.h"

int core_get_long(const char *name, PyObject *value, long low, long high, long *out) {
    int overflow = 0;
    PyObject *index = PyNumber_Index(value);
    if (index == NULL) {
        PyErr_Format(PyExc_TypeError, "%s must be an integer, not %R", name, value);
        return -1;
    }
    long number = PyLong_AsLongAndOverflow(index, &overflow);
    Py_DECREF(index);
    if (overflow != 0 || number < low || number > high) {
        PyErr_Format(PyExc_ValueError, "%s must be from %ld to %ld, not %R", name, low, high, value);
        return -1;
    }
    *out = number;
    return 0;
}

int core_get_u64(PyObject *value, void *out) {
    int overflow = 0;
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    uint64_t bits = (uint64_t)number;
    if (overflow > 0) {
        bits = PyLong_AsUnsignedLongLong(value);
        overflow = 0;
    }
    if (overflow < 0 || PyErr_Occurred() != NULL) {
        if (overflow < 0 || PyErr_ExceptionMatches(PyExc_OverflowError)) {
            PyErr_Format(PyExc_ValueError, "%R does not fit in 64 bits", value);
        }
        return 0;
    }
    *(uint64_t *)out = bits;
    return 1;
}

int core_get_scale(const char *name, PyObject *value, double *out) {
    double number = 1.0;
    if (value != NULL) {
        number = PyFloat_AsDouble(value);
        if (number == -1.0 && PyErr_Occurred() != NULL) {
            PyErr_Format(PyExc_TypeError, "%s must be a number, not %R", name, value);
            return -1;
        }
    }
    if (!isfinite(number)) {
        PyErr_Format(PyExc_ValueError, "%s must be finite, not %R", name, value);
        return -1;
    }
    *out = number;
    return 0;
}

int core_get_timeout(const char *name, PyObject *value, int low_ms, int *out_ms) {
    double seconds = PyFloat_AsDouble(value);
    if (seconds == -1.0 && PyErr_Occurred() != NULL) {
        PyErr_Format(PyExc_TypeError, "%s must be a number of seconds, not %R", name, value);
        return -1;
    }
    double ms = ceil(seconds * 1e3);
    if (!(ms >= low_ms && ms <= INT_MAX)) {
        PyErr_Format(PyExc_ValueError, "%s must be %s 0 and at most 2147483 seconds, not %R", name,
                     low_ms > 0 ? "more than" : "at least", value);
        return -1;
    }
    *out_ms = (int)ms;
    return 0;
}

int core_get_dtype(PyObject *value, int *out) {
    long number;
    if (core_get_long("dtype", value, 0, NB_DTYPES - 1, &number) < 0) {
        return -1;
    }
    *out = (int)number;
    return 0;
}

int core_get_redop(PyObject *value, int *out) {
    long number = NB_SUM;
    if (value != NULL && core_get_long("op", value, 0, NB_REDOPS - 1, &number) < 0) {
        return -1;
    }
    *out = (int)number;
    return 0;
}

int core_get_ports(PyObject *value, struct nb_port_range *out) {
    long low = 0;
    long high = 0;
    if (value != NULL) {
        if (!PyTuple_Check(value) || PyTuple_Size(value) != 2) {
            PyErr_Format(PyExc_TypeError, "ports must be a tuple (low, high), not %R", value);
            return -1;
        }
        if (core_get_long("ports[0]", PyTuple_GetItem(value, 0), 0, UINT16_MAX, &low) < 0 ||
            core_get_long("ports[1]", PyTuple_GetItem(value, 1), 0, UINT16_MAX, &high) < 0) {
            return -1;
        }
    }
    if (low > high || (low == 0 && high != 0)) {
        PyErr_Format(PyExc_ValueError, "ports must be (0, 0) or a range from low to high, not %R", value);
        return -1;
    }
    out->low = (uint16_t)low;
    out->high = (uint16_t)high;
    return 0;
}
