// Libraries of this host, for `doctor`: libfabric and its providers, the CUDA driver and its devices.
#include "py/core.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/arena.h"
#include "cuda/driver.h"
#include "cuda/kernels.h"
#include "transport/ofi.h"

enum { PROVIDERS_MAX = 64, GPUS_MAX = 64, PINNED_BYTES = 4 * 1024 * 1024 };

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

// What works on a device; the texts are empty where it does. A device that cannot be opened has no name.
struct gpu {
    char name[NB_CUDA_NAME];
    struct nb_error pinning;
    struct nb_error kernels;
};

// Pins as much memory as a chunk of staging has, and lets it go.
static void pin(const struct nb_cuda_device *device, struct nb_error *err) {
    struct nb_arena arena;
    if (nb_arena_open(&arena, PINNED_BYTES, err) < 0) {
        return;
    }
    unsigned result = device->driver->host_register(arena.base, arena.bytes, NB_CUDA_HOST_PORTABLE);
    if (nb_cuda_check(device, result, "cuMemHostRegister", arena.bytes, err) == 0) {
        (void)device->driver->host_unregister(arena.base);
    }
    nb_arena_close(&arena);
}

static void gpu_inspect(const struct nb_cuda_driver *driver, int ordinal, struct gpu *gpu) {
    struct nb_cuda_device device = {0};
    struct nb_cuda_kernels kernels = {0};
    if (nb_cuda_device_open(&device, driver, ordinal, &gpu->pinning) == 0 &&
        nb_cuda_enter(&device, &gpu->pinning) == 0) {
        (void)snprintf(gpu->name, sizeof gpu->name, "%s", device.name);
        pin(&device, &gpu->pinning);
        (void)nb_cuda_kernels_open(&kernels, &device, nb_cuda_image(), &gpu->kernels);
        nb_cuda_kernels_close(&kernels);
        nb_cuda_leave(&device);
    } else {
        gpu->kernels = gpu->pinning;
    }
    nb_cuda_device_close(&device);
}

// Returns the number of devices.
static int gpus_inspect(const char *library, struct nb_cuda_driver *driver, struct gpu *gpus, struct nb_error *err) {
    int count = 0;
    int rc = nb_cuda_driver_open(driver, library, err);
    if (rc == 0 && driver->device_get_count(&count) != NB_CUDA_SUCCESS) {
        rc = nb_fail(err, -EIO, "CUDA: cuDeviceGetCount failed");
    }
    count = count < GPUS_MAX ? count : GPUS_MAX;
    for (int i = 0; rc == 0 && i < count; i++) {
        gpu_inspect(driver, i, &gpus[i]);
    }
    return rc < 0 ? rc : count;
}

PyObject *core_cuda(PyObject *module, PyObject *args, PyObject *kwargs) {
    struct nb_cuda_driver driver = {0};
    struct nb_error err = {0};
    const char *library;
    if (parse(args, kwargs, "|z:cuda", &library) < 0) {
        return NULL;
    }
    struct gpu *gpus = calloc(GPUS_MAX, sizeof *gpus);
    if (gpus == NULL) {
        return PyErr_NoMemory();
    }
    PyThreadState *saved = PyEval_SaveThread();
    int count = gpus_inspect(library, &driver, gpus, &err);
    PyEval_RestoreThread(saved);
    PyObject *list = count < 0 ? core_raise(PyModule_GetState(module), count, &err) : PyList_New(count);
    for (int i = 0; list != NULL && i < count; i++) {
        PyObject *row = Py_BuildValue("(sss)", gpus[i].name, gpus[i].pinning.text, gpus[i].kernels.text);
        if (row == NULL || PyList_SetItem(list, i, row) < 0) {
            Py_CLEAR(list);
        }
    }
    free(gpus);
    return list != NULL ? Py_BuildValue("(siN)", driver.path, driver.version, list) : NULL;
}
