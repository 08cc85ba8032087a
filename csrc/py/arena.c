// How does Python see gradient memory? As an object with the writable buffer protocol.
#include "py/core.h"

#include <stddef.h>

#include "base/arena.h"

struct core_arena {
    PyObject base;
    struct nb_arena arena;
    size_t bytes; // as asked for
};

static PyObject *arena_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static const char *const keywords[] = {"nbytes", NULL};
    PyObject *value;
    long bytes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:Arena", (char **)keywords, &value) ||
        core_get_long("nbytes", value, 1, PY_SSIZE_T_MAX, &bytes) < 0) {
        return NULL;
    }
    struct core_arena *self = (struct core_arena *)PyType_GenericAlloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    struct nb_error err = {0};
    int rc = nb_arena_open(&self->arena, (size_t)bytes, &err);
    if (rc < 0) {
        core_raise(core_state_of((PyObject *)self), rc, &err);
        Py_DECREF(self);
        return NULL;
    }
    self->bytes = (size_t)bytes;
    return (PyObject *)self;
}

static void arena_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    struct core_arena *self = (struct core_arena *)object;
    if (self->bytes > 0) {
        nb_arena_close(&self->arena);
    }
    PyObject_Free(object);
    Py_DECREF(type);
}

static int arena_getbuffer(PyObject *object, Py_buffer *view, int flags) {
    struct core_arena *self = (struct core_arena *)object;
    return PyBuffer_FillInfo(view, object, self->arena.base, (Py_ssize_t)self->bytes, 0, flags);
}

static PyObject *arena_get_address(PyObject *object, void *Py_UNUSED(closure)) {
    return PyLong_FromVoidPtr(((struct core_arena *)object)->arena.base);
}

static PyObject *arena_get_nbytes(PyObject *object, void *Py_UNUSED(closure)) {
    return PyLong_FromSize_t(((struct core_arena *)object)->bytes);
}

static PyObject *arena_get_fd(PyObject *object, void *Py_UNUSED(closure)) {
    return PyLong_FromLong(((struct core_arena *)object)->arena.fd);
}

const struct nb_arena *core_arena_memory(PyObject *arena) {
    return &((struct core_arena *)arena)->arena;
}

PyTypeObject *core_arena_type(PyObject *module) {
    static const char doc[] = "Arena(nbytes)\n--\n\n"
                              "Page-aligned, zeroed memory (memfd where the kernel allows), with the writable buffer\n"
                              "protocol. It is freed when the last buffer and the object are gone.";
    static const PyGetSetDef getset[] = {
        {"address", arena_get_address, NULL, "Where it lies.", NULL},
        {"nbytes", arena_get_nbytes, NULL, "As asked for.", NULL},
        {"fd", arena_get_fd, NULL, "The memfd, -1 for private memory.", NULL},
        {0},
    };
    static const PyType_Slot slots[] = {
        {Py_tp_doc, (void *)doc},
        {Py_tp_new, (void *)arena_new},
        {Py_tp_dealloc, (void *)arena_dealloc},
        {Py_tp_getset, (void *)getset},
        {Py_bf_getbuffer, (void *)arena_getbuffer},
        {0, NULL},
    };
    static const PyType_Spec spec = {
        .name = "netbottleneck._core.Arena",
        .basicsize = sizeof(struct core_arena),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
        .slots = (PyType_Slot *)slots,
    };
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, (PyType_Spec *)&spec, NULL);
}
