// spawn_apart: a process that is no child of this one.
#include "py/core.h"

#include "base/spawn.h"

enum { ARGUMENTS_MAX = 15 };

PyObject *core_spawn_apart(PyObject *module, PyObject *args) {
    struct nb_error err = {0};
    char *arguments[ARGUMENTS_MAX + 1] = {NULL};
    PyObject *list;
    pid_t pid = 0;
    int input;
    if (!PyArg_ParseTuple(args, "O!i:spawn_apart", &PyList_Type, &list, &input)) {
        return NULL;
    }
    Py_ssize_t count = PyList_Size(list);
    if (count < 1 || count > ARGUMENTS_MAX) {
        return PyErr_Format(PyExc_ValueError, "%zd arguments: 1 to %d are possible", count, ARGUMENTS_MAX);
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        arguments[i] = PyBytes_AsString(PyList_GetItem(list, i));
        if (arguments[i] == NULL) {
            return NULL;
        }
    }
    int rc = nb_spawn_apart(arguments, input, &pid, &err); // holds the GIL: the list stays as it is
    return rc < 0 ? core_raise(PyModule_GetState(module), rc, &err) : PyLong_FromLong(pid);
}
