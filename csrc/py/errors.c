// Errors: the only code that maps error codes to exceptions.
#include "py/core.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

// Maps `code` to a class of errors.py and the errno that it carries. CORE_CLASSES: a ValueError.
static void classify(int code, enum core_class *class, int *number) {
    *number = code > NB_EPEER ? -code : EIO;
    *class = CORE_ERROR;
    switch (code) {
    case NB_EPEER:
        *class = CORE_PEER_ERROR;
        *number = ECONNRESET;
        break;
    case NB_EWIRE:
        *class = CORE_WIRE_ERROR;
        *number = EPROTO;
        break;
    case NB_EAUTH:
        *class = CORE_WIRE_ERROR;
        *number = EACCES;
        break;
    case NB_EMISMATCH:
        *class = CORE_MISMATCH_ERROR;
        *number = EINVAL;
        break;
    case NB_ETIMEOUT:
    case -ETIMEDOUT:
        *class = CORE_DEADLINE_ERROR;
        *number = ETIMEDOUT;
        break;
    case NB_ECLOSED:
        *class = CORE_CLOSED_ERROR;
        *number = ESHUTDOWN;
        break;
    case NB_ENOLIB:
        *number = ENOENT;
        break;
    case -EINVAL:
    case -EEXIST:
        *class = CORE_CLASSES;
        break;
    default:
        break;
    }
}

// Raises class(number, text) with its `peer`.
static void raise_error(PyObject *class, int number, PyObject *text, int peer) {
    PyObject *error = PyObject_CallFunction(class, "iO", number, text);
    if (error == NULL) {
        return;
    }
    PyObject *rank = PyLong_FromLong(peer);
    if (rank != NULL && PyObject_SetAttrString(error, "peer", rank) == 0) {
        PyErr_SetObject(class, error);
    }
    Py_XDECREF(rank);
    Py_DECREF(error);
}

PyObject *core_text(const char *text) {
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

PyObject *core_raise(const struct core_state *state, int code, const struct nb_error *err) {
    bool said = err != NULL && err->code != 0;
    PyObject *text = core_text(said && err->text[0] != '\0' ? err->text : nb_code_name(code));
    if (text == NULL) {
        return NULL;
    }
    enum core_class class;
    int number;
    classify(code, &class, &number);
    if (class == CORE_CLASSES) {
        PyErr_SetObject(PyExc_ValueError, text);
    } else {
        raise_error(state->classes[class], number, text, said ? err->peer : NB_NO_PEER);
    }
    Py_DECREF(text);
    return NULL;
}

int core_here(const struct core_state *state, pid_t pid, const char *what) {
    pid_t now = getpid();
    if (now == pid) {
        return 0;
    }
    PyObject *text =
        PyUnicode_FromFormat("%s made in process %ld, used in process %ld after fork", what, (long)pid, (long)now);
    if (text != NULL) {
        raise_error(state->classes[CORE_ERROR], EPERM, text, NB_NO_PEER);
        Py_DECREF(text);
    }
    return -1;
}
