// Listener: rank 0's listening socket as a Python object.
#include "py/core.h"

#include <unistd.h>

struct core_listener {
    PyObject base;
    struct nb_listener listener;
    bool open;
    pid_t pid; // that opened it; a forked child has closed the descriptor, and its number may be reused
    int users; // joins in progress
};

static PyObject *listener_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static const char *const keywords[] = {"address", "ifname", "ports", NULL};
    const char *address = NULL;
    PyObject *ports = NULL;
    // Only the join needs the secret; opening the listener does not use it.
    static const unsigned char unused[16] = {0};
    struct nb_boot_config config = {.size = 1, .secret = unused, .secret_bytes = sizeof unused};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|zzO:Listener", (char **)keywords, &address, &config.ifname,
                                     &ports) ||
        core_get_ports(ports, &config.ports) < 0) {
        return NULL;
    }
    struct core_listener *self = (struct core_listener *)PyType_GenericAlloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    struct nb_error err = {0};
    int rc = nb_listener_open(&self->listener, &config, address, &err);
    if (rc < 0) {
        core_raise(core_state_of((PyObject *)self), rc, &err);
        Py_DECREF(self);
        return NULL;
    }
    self->open = true;
    self->pid = getpid();
    return (PyObject *)self;
}

static void shut(struct core_listener *self) {
    if (self->open) {
        self->open = false;
        if (self->pid == getpid()) {
            nb_listener_close(&self->listener);
        }
    }
}

static void listener_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    shut((struct core_listener *)object);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyObject *listener_close(PyObject *object, PyObject *Py_UNUSED(none)) {
    struct core_listener *self = (struct core_listener *)object;
    if (self->users > 0) {
        PyErr_SetString(PyExc_RuntimeError, "listener is in use by a join of another thread");
        return NULL;
    }
    shut(self);
    Py_RETURN_NONE;
}

static PyObject *listener_get_address(PyObject *object, void *Py_UNUSED(closure)) {
    struct core_listener *self = (struct core_listener *)object;
    char text[NB_SOCK_TEXT];
    nb_sock_format(&self->listener.addr, text);
    return PyUnicode_FromString(text);
}

struct nb_listener *core_listener_acquire(PyObject *listener) {
    struct core_listener *self = (struct core_listener *)listener;
    if (core_here(core_state_of(listener), self->pid, "listener") < 0) {
        return NULL;
    }
    if (!self->open) {
        PyErr_SetString(PyExc_ValueError, "listener is closed");
        return NULL;
    }
    self->users++;
    return &self->listener;
}

void core_listener_release(PyObject *listener) {
    ((struct core_listener *)listener)->users--;
}

PyTypeObject *core_listener_type(PyObject *module) {
    static const char doc[] = "Listener(address=None, ifname=None, ports=(0, 0))\n--\n\n"
                              "Rank 0's listener, to which the other ranks connect. Raises Error (EADDRINUSE, ENODEV) "
                              "naming the port or the interface.";
    static const PyMethodDef methods[] = {
        {"close", listener_close, METH_NOARGS, "close($self)\n--\n\nStops listening; may be repeated."},
        {0},
    };
    static const PyGetSetDef getset[] = {
        {"address", listener_get_address, NULL, "\"host:port\", what the other ranks need.", NULL},
        {0},
    };
    static const PyType_Slot slots[] = {
        {Py_tp_doc, (void *)doc},         {Py_tp_new, (void *)listener_new}, {Py_tp_dealloc, (void *)listener_dealloc},
        {Py_tp_methods, (void *)methods}, {Py_tp_getset, (void *)getset},    {0, NULL},
    };
    static const PyType_Spec spec = {
        .name = "netbottleneck._core.Listener",
        .basicsize = sizeof(struct core_listener),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
        .slots = (PyType_Slot *)slots,
    };
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, (PyType_Spec *)&spec, NULL);
}
