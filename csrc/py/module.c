// The module: its functions, constants and state.
#include "py/core.h"

#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "coll/reduce.h"
#include "coll/reduce_pair.h"
#include "cuda/kernels.h"
#include "engine/engine.h"
#include "transport/transport.h"

#ifndef NB_VERSION
#define NB_VERSION "0+unknown"
#endif
#ifndef NB_HAVE_OFI
#define NB_HAVE_OFI 0
#endif

enum { INTERFACES_MAX = 64, FREE_GIL_BYTES = 64 * 1024 };

struct constant {
    const char *name;
    int value;
};

static const struct constant constants[] = {
    {"UINT8", NB_U8},
    {"INT8", NB_I8},
    {"INT32", NB_I32},
    {"INT64", NB_I64},
    {"FLOAT16", NB_F16},
    {"BFLOAT16", NB_BF16},
    {"FLOAT32", NB_F32},
    {"FLOAT64", NB_F64},
    {"SUM", NB_SUM},
    {"MIN", NB_MIN},
    {"MAX", NB_MAX},
    {"PRODUCT", NB_PRODUCT},
    {"ALLREDUCE", NB_OP_ALLREDUCE},
    {"ALLGATHER", NB_OP_ALLGATHER},
    {"REDUCESCATTER", NB_OP_REDUCESCATTER},
    {"BROADCAST", NB_OP_BROADCAST},
    {"BARRIER", NB_OP_BARRIER},
    {"JOIN", NB_OP_JOIN},
    {"ALLTOALL", NB_OP_ALLTOALL},
    {"MISSING_MAX", NB_MISSING_MAX},
};

#define EVENT(name) {#name, NB_EV_##name}
static const struct constant events[] = {
    EVENT(NONE),
    EVENT(STEP_BEGIN),
    EVENT(STEP_END),
    EVENT(FORWARD_BEGIN),
    EVENT(FORWARD_END),
    EVENT(GRAD_READY),
    EVENT(OPTIMIZER_BEGIN),
    EVENT(OPTIMIZER_END),
    EVENT(WAIT_BEGIN),
    EVENT(WAIT_END),
    EVENT(OP_SUBMIT),
    EVENT(OP_AGREED),
    EVENT(OP_START),
    EVENT(OP_FIRST_BYTE),
    EVENT(OP_DONE),
    EVENT(OP_LANE),
    EVENT(CLOCK),
    EVENT(PROBE),
    EVENT(STALL),
    EVENT(PEER_LOST),
    EVENT(LANE_LOST),
    EVENT(COSTS),
    EVENT(OP_NAME),
    EVENT(OP_READY),
    EVENT(OP_PACK),
    EVENT(NCCL_COMM),
    EVENT(NCCL_TASK),
    EVENT(NCCL_KERNEL),
    EVENT(NCCL_STEP),
    EVENT(GRADS_READY),
    EVENT(CHECKPOINT_BEGIN),
    EVENT(CHECKPOINT_END),
    EVENT(DEVICE_CLOCK),
};

enum { CONSTANTS = sizeof(constants) / sizeof(constants[0]), EVENT_KINDS = sizeof(events) / sizeof(events[0]) };

static PyObject *module_now_ns(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) {
    return PyLong_FromLongLong(nb_now_ns());
}

static PyObject *module_dtype_size(PyObject *Py_UNUSED(module), PyObject *value) {
    int dtype;
    return core_get_dtype(value, &dtype) < 0 ? NULL : PyLong_FromSize_t(nb_dtype_size(dtype));
}

static PyObject *module_name_key(PyObject *Py_UNUSED(module), PyObject *value) {
    const char *name = PyUnicode_AsUTF8AndSize(value, NULL);
    return name != NULL ? PyLong_FromUnsignedLongLong(nb_key(name)) : NULL;
}

static PyObject *module_transports(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) {
    PyObject *list = PyList_New(0);
    for (int i = 0; list != NULL && nb_transports[i] != NULL; i++) {
        PyObject *name = PyUnicode_FromString(nb_transports[i]->name);
        if (name == NULL || PyList_Append(list, name) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(name);
    }
    return list;
}

// (name, address without port).
static PyObject *interface_pair(const char *name, const struct nb_sockaddr *addr) {
    char text[NB_SOCK_TEXT];
    nb_sock_format(addr, text);
    char *port = strrchr(text, ':');
    if (port != NULL) {
        *port = '\0';
    }
    size_t length = strlen(text);
    bool brackets = length >= 2 && text[0] == '[' && text[length - 1] == ']';
    return brackets ? Py_BuildValue("(ss#)", name, text + 1, (Py_ssize_t)(length - 2))
                    : Py_BuildValue("(ss)", name, text);
}

static PyObject *module_interfaces(PyObject *module, PyObject *args, PyObject *kwargs) {
    static const char *const keywords[] = {"spec", NULL};
    const char *spec = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|z:interfaces", (char **)keywords, &spec)) {
        return NULL;
    }
    struct nb_sockaddr addrs[INTERFACES_MAX];
    char names[INTERFACES_MAX][IF_NAMESIZE];
    struct nb_error err = {0};
    int count = nb_sock_interfaces(spec, 0, addrs, names, INTERFACES_MAX, &err);
    if (count < 0) {
        return core_raise(PyModule_GetState(module), count, &err);
    }
    PyObject *list = PyList_New(count);
    for (int i = 0; list != NULL && i < count; i++) {
        PyObject *pair = interface_pair(names[i], &addrs[i]);
        if (pair == NULL || PyList_SetItem(list, i, pair) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

static PyObject *module_isa(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) {
    return PyUnicode_FromString(nb_isa_name((int)nb_reduce_best()));
}

// Finds the set of kernels called `name`; NULL: the best.
static int find_isa(const char *name, enum nb_isa *out) {
    enum nb_isa best = nb_reduce_best();
    if (name == NULL) {
        *out = best;
        return 0;
    }
    for (int i = 0; i < NB_ISAS; i++) {
        if (nb_isa_runs(i) && strcmp(nb_isa_name(i), name) == 0) {
            *out = (enum nb_isa)i;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "isa must be one that this CPU can run (the best is \"%s\"), not \"%s\"",
                 nb_isa_name((int)best), name);
    return -1;
}

// Exactly one of the two fields is set.
struct reduction {
    int dtype;
    nb_reduce_fn kernel;
    nb_pair_fn pair;
};

static int reduce_memory(const struct core_memory *to, const struct core_memory *from, const struct reduction *how) {
    if (to->bytes != from->bytes || to->count > 1 || from->count > 1) {
        PyErr_Format(PyExc_ValueError, "%s has %zu bytes and %s %zu: they must be one piece each, and equal",
                     how->pair != NULL ? "one" : "destination", to->bytes, how->pair != NULL ? "the other" : "source",
                     from->bytes);
        return -1;
    }
    if (to->bytes == 0) {
        return 0;
    }
    size_t count = to->bytes / nb_dtype_size(how->dtype);
    void *a = to->segments[0].base;
    void *b = from->segments[0].base;
    PyThreadState *saved = to->bytes >= FREE_GIL_BYTES ? PyEval_SaveThread() : NULL;
    if (how->pair != NULL) {
        how->pair(a, b, a, b, count, 1);
    } else {
        how->kernel(a, b, count);
    }
    if (saved != NULL) {
        PyEval_RestoreThread(saved);
    }
    return 0;
}

static PyObject *reduce_objects(PyObject *destination, PyObject *source, const struct reduction *how) {
    size_t element = nb_dtype_size(how->dtype);
    struct core_memory to = {0};
    struct core_memory from = {0};
    int rc = core_memory_parse_host(&to, destination, true, element);
    if (rc == 0) {
        rc = core_memory_parse_host(&from, source, how->pair != NULL, element);
    }
    if (rc == 0) {
        rc = reduce_memory(&to, &from, how);
    }
    core_memory_release(&from);
    core_memory_release(&to);
    return rc < 0 ? NULL : Py_NewRef(Py_None);
}

static int no_kernel(int dtype, int op) {
    PyErr_Format(PyExc_ValueError, "dtype %s cannot be reduced by op %s", nb_dtype_name(dtype), nb_redop_name(op));
    return -1;
}

static PyObject *module_reduce(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs) {
    static const char *const keywords[] = {"destination", "source", "dtype", "op", "isa", NULL};
    PyObject *destination;
    PyObject *source;
    PyObject *dtype;
    PyObject *op;
    const char *name = NULL;
    enum nb_isa isa;
    int redop;
    struct reduction how = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOO|z:reduce", (char **)keywords, &destination, &source, &dtype,
                                     &op, &name) ||
        core_get_dtype(dtype, &how.dtype) < 0 || core_get_redop(op, &redop) < 0 || find_isa(name, &isa) < 0) {
        return NULL;
    }
    how.kernel = nb_reduce_kernel(isa, how.dtype, redop);
    return how.kernel == NULL && no_kernel(how.dtype, redop) < 0 ? NULL : reduce_objects(destination, source, &how);
}

static PyObject *module_reduce_pair(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs) {
    static const char *const keywords[] = {"one", "other", "dtype", "op", NULL};
    PyObject *one;
    PyObject *other;
    PyObject *dtype;
    PyObject *op;
    int redop;
    struct reduction how = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOO:reduce_pair", (char **)keywords, &one, &other, &dtype, &op) ||
        core_get_dtype(dtype, &how.dtype) < 0 || core_get_redop(op, &redop) < 0) {
        return NULL;
    }
    how.pair = nb_pair_kernel(how.dtype, redop);
    return how.pair == NULL && no_kernel(how.dtype, redop) < 0 ? NULL : reduce_objects(one, other, &how);
}

static int add_constants(PyObject *module) {
    for (int i = 0; i < CONSTANTS; i++) {
        if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value) < 0) {
            return -1;
        }
    }
    PyObject *kinds = PyDict_New();
    if (kinds == NULL) {
        return -1;
    }
    int rc = 0;
    for (int i = 0; i < EVENT_KINDS && rc == 0; i++) {
        PyObject *value = PyLong_FromLong(events[i].value);
        rc = value != NULL ? PyDict_SetItemString(kinds, events[i].name, value) : -1;
        Py_XDECREF(value);
    }
    if (rc == 0) {
        rc = PyModule_AddObjectRef(module, "EVENTS", kinds);
    }
    Py_DECREF(kinds);
    if (rc < 0 || PyModule_AddStringConstant(module, "VERSION", NB_VERSION) < 0) {
        return -1;
    }
    rc = PyModule_AddObjectRef(module, "HAVE_OFI", NB_HAVE_OFI ? Py_True : Py_False);
    return rc < 0 ? rc
                  : PyModule_AddObjectRef(module, "HAVE_DEVICE_CODE", nb_cuda_image() != NULL ? Py_True : Py_False);
}

static int add_types(PyObject *module, struct core_state *state) {
    static PyTypeObject *(*const makers[CORE_TYPES])(PyObject *) = {
        [CORE_ARENA] = core_arena_type,         [CORE_LISTENER] = core_listener_type,
        [CORE_RECORDER] = core_recorder_type,   [CORE_STAMPER] = core_stamper_type,
        [CORE_OPERATION] = core_operation_type, [CORE_WORK] = core_work_type,
        [CORE_COMM] = core_comm_type,           [CORE_GRADHOOK] = core_gradhook_type,
        [CORE_HOOK] = core_hook_type,
    };
    for (int i = 0; i < CORE_TYPES; i++) {
        state->types[i] = makers[i](module);
        bool hidden = i == CORE_STAMPER || i == CORE_OPERATION || i == CORE_HOOK;
        if (state->types[i] == NULL || (!hidden && PyModule_AddType(module, state->types[i]) < 0)) {
            return -1;
        }
    }
    return 0;
}

static int find_classes(struct core_state *state) {
    static const char *const names[CORE_CLASSES] = {
        [CORE_ERROR] = "Error",
        [CORE_PEER_ERROR] = "PeerError",
        [CORE_WIRE_ERROR] = "WireError",
        [CORE_MISMATCH_ERROR] = "MismatchError",
        [CORE_CLOSED_ERROR] = "ClosedError",
        [CORE_DEADLINE_ERROR] = "DeadlineError",
    };
    PyObject *errors = PyImport_ImportModule("netbottleneck.errors");
    for (int i = 0; errors != NULL && i < CORE_CLASSES; i++) {
        state->classes[i] = PyObject_GetAttrString(errors, names[i]);
        if (state->classes[i] == NULL) {
            Py_CLEAR(errors);
        }
    }
    Py_XDECREF(errors);
    return errors != NULL ? 0 : -1;
}

static int intern_names(struct core_state *state) {
    static const char *const names[CORE_NAMES] = {
        [CORE_GRAD] = "grad",
        [CORE_DATA_PTR] = "data_ptr",
        [CORE_DTYPE] = "dtype",
        [CORE_IS_CONTIGUOUS] = "is_contiguous",
        [CORE_IS_CPU] = "is_cpu",
        [CORE_NBYTES] = "nbytes",
        [CORE_COPY_] = "copy_",
        [CORE_DETACH] = "detach",
        [CORE_IS_SPARSE] = "is_sparse",
        [CORE_TO_DENSE] = "to_dense",
        [CORE_WAIT] = "wait",
        [CORE_LAZY_CLONE] = "_lazy_clone",
        [CORE_REQUIRES_GRAD] = "requires_grad",
    };
    for (int i = 0; i < CORE_NAMES; i++) {
        state->names[i] = PyUnicode_InternFromString(names[i]);
        if (state->names[i] == NULL) {
            return -1;
        }
    }
    return 0;
}

static int module_exec(PyObject *module) {
    struct core_state *state = PyModule_GetState(module);
    if (intern_names(state) < 0 || find_classes(state) < 0 || add_types(module, state) < 0) {
        return -1;
    }
    return add_constants(module);
}

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
    const struct core_state *state = PyModule_GetState(module);
    for (int i = 0; i < CORE_TYPES; i++) {
        Py_VISIT(state->types[i]);
    }
    for (int i = 0; i < CORE_CLASSES; i++) {
        Py_VISIT(state->classes[i]);
    }
    return 0;
}

static int module_clear(PyObject *module) {
    struct core_state *state = PyModule_GetState(module);
    for (int i = 0; i < CORE_TYPES; i++) {
        Py_CLEAR(state->types[i]);
    }
    for (int i = 0; i < CORE_CLASSES; i++) {
        Py_CLEAR(state->classes[i]);
    }
    for (int i = 0; i < CORE_NAMES; i++) {
        Py_CLEAR(state->names[i]);
    }
    return 0;
}

static void module_free(void *module) {
    module_clear(module);
}

#define WITH_KEYWORDS(function) (PyCFunction)(void (*)(void))(function), METH_VARARGS | METH_KEYWORDS

static const PyMethodDef methods[] = {
    {"now_ns", module_now_ns, METH_NOARGS, "now_ns()\n--\n\nCLOCK_MONOTONIC in ns: the clock of every record."},
    {"dtype_size", module_dtype_size, METH_O, "dtype_size(dtype, /)\n--\n\nBytes of one element."},
    {"name_key", module_name_key, METH_O, "name_key(name, /)\n--\n\nThe key of an operation's name, 64-bit FNV-1a."},
    {"transports", module_transports, METH_NOARGS, "transports()\n--\n\nThe networks that were built in."},
    {"spawn_apart", core_spawn_apart, METH_VARARGS,
     "spawn_apart(arguments, input, /)\n--\n\nStart a process that is no child of this one, and return its number.\n\n"
     "Its standard input is the descriptor `input`."},
    {"providers", WITH_KEYWORDS(core_providers),
     "providers(library=None)\n--\n\nReturn (provider, version) of each libfabric provider a lane could use here.\n\n"
     "Raises Error where there is no libfabric."},
    {"libfabric", WITH_KEYWORDS(core_libfabric),
     "libfabric(library=None)\n--\n\nReturn (path, version) of the libfabric that would be used.\n\n"
     "Raises Error naming what was tried."},
    {"cuda", WITH_KEYWORDS(core_cuda),
     "cuda(library=None)\n--\n\nReturn (path, version, devices) of the CUDA driver.\n\n"
     "A device is (name, pinning, kernels): why it cannot pin memory and load the kernels, or empty."},
    {"interfaces", WITH_KEYWORDS(module_interfaces),
     "interfaces(spec=None)\n--\n\nReturn (name, address) of what `spec` (NCCL_SOCKET_IFNAME's syntax) names."},
    {"isa", module_isa, METH_NOARGS, "isa()\n--\n\nThe reduce kernels in use: \"generic\" or \"avx2\"."},
    {"reduce", WITH_KEYWORDS(module_reduce),
     "reduce(destination, source, dtype, op, isa=None)\n--\n\n"
     "destination = destination op source, by the kernel of `isa`: to test and to measure."},
    {"reduce_pair", WITH_KEYWORDS(module_reduce_pair),
     "reduce_pair(one, other, dtype, op)\n--\n\n"
     "one = other = one op other in one pass, as ranks that share memory do it: to test and to measure. SUM alone."},
    {"simulate", core_simulate, METH_VARARGS,
     "simulate(program, plan, cost, result, /)\n--\n\nFill the arrays of `result`, and return how many operations there"
     " were.\n\nRaises ValueError for invalid input."},
    {"collective_shape", core_collective_shape, METH_VARARGS,
     "collective_shape(algorithm, size, ranks_per_host, /)\n--\n\nReturn (steps, bytes out of a host for a byte, steps"
     " inside a host, bytes inside it for a byte)."},
    {"reduce_times", WITH_KEYWORDS(core_reduce_times),
     "reduce_times(destination, source, nbytes, dtype, samples=1, least_ns=0)\n--\n\n"
     "Return (calls, ns) of each sample of additions of nbytes, pieces of the two memories in turn."},
    {"copy_times", WITH_KEYWORDS(core_copy_times),
     "copy_times(destination, source, nbytes, samples=1, least_ns=0)\n--\n\n"
     "Return (calls, ns) of each sample of copies of nbytes, pieces of the two memories in turn."},
    {"kernel_times", WITH_KEYWORDS(core_kernel_times),
     "kernel_times(kernel, device, destination, source, count, samples=1, calls=1, library=None)\n--\n\n"
     "Return the ns of a call, by sample, of a kernel of a GPU on its memory at two addresses."},
    {"staging_times", WITH_KEYWORDS(core_staging_times),
     "staging_times(way, device, address, nbytes, samples=1, library=None)\n--\n\n"
     "Return the ns, by sample, in which memory of a GPU goes to pinned memory, back, or both ways."},
    {"stamp_at", WITH_KEYWORDS(core_stamp_at),
     "stamp_at(recorder, kind, times_ns, keys, spin=False)\n--\n\n"
     "Stamp an event for each key when its time has come, asleep or busy until then."},
    {0},
};

static const PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)module_exec},
    {0, NULL},
};

// CPython keeps its own data in it, so it is the only definition here that cannot be const.
static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "netbottleneck._core",
    .m_doc = "The C core. Every buffer is in place and belongs to the engine until its Work is done.",
    .m_size = sizeof(struct core_state),
    .m_methods = (PyMethodDef *)methods,
    .m_slots = (PyModuleDef_Slot *)slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__core(void);

PyMODINIT_FUNC PyInit__core(void) {
    return PyModuleDef_Init(&definition);
}
