// The libfabric providers of this host, for `doctor`.
#include "py/core.h"

#include "transport/ofi.h"

enum { PROVIDERS_MAX = 64 };

static int parse(PyObject *args, PyObject *kwargs, const char *format, const char **library) {
    static const char *const keywords[] = {"library", NULL};
    *library = NULL;
    return PyArg_ParseTupleAndKeywords(args, kwargs, format, (char **)keywords, library) ? 0 : -1;
}

PyObject *core_providers(PyObject *module, PyObject *args, PyObject *kwargs) {
    struct nb_ofi_provider found[PROVIDERS_MAX];
    struct nb_error err = {0};
    const char *library;
    int count;
    if (parse(args, kwargs, "|z:providers", &library) < 0) {
        return NULL;
    }
    PyThreadState *saved = PyEval_SaveThread();
    count = nb_ofi_providers(library, found, PROVIDERS_MAX, &err);
    PyEval_RestoreThread(saved);
    if (count < 0) {
        return core_raise(PyModule_GetState(module), count, &err);
    }
    PyObject *list = PyList_New(count);
    for (int i = 0; list != NULL && i < count; i++) {
        PyObject *pair = Py_BuildValue("(ss)", found[i].name, found[i].version);
        if (pair == NULL || PyList_SetItem(list, i, pair) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

PyObject *core_libfabric(PyObject *module, PyObject *args, PyObject *kwargs) {
    struct nb_ofi_library found;
    struct nb_error err = {0};
    const char *library;
    int rc;
    if (parse(args, kwargs, "|z:libfabric", &library) < 0) {
        return NULL;
    }
    PyThreadState *saved = PyEval_SaveThread();
    rc = nb_ofi_library(library, &found, &err);
    PyEval_RestoreThread(saved);
    return rc < 0 ? core_raise(PyModule_GetState(module), rc, &err) : Py_BuildValue("(ss)", found.path, found.version);
}
