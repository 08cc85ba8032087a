// Operations of a Comm: checks their arguments and submits them; an all-gather of byte strings on top.
#include "py/comm.h"

#include <stdint.h>
#include <string.h>

#include "base/dtype.h"

struct submit_args {
    const char *name;
    PyObject *kind;
    PyObject *memory;
    PyObject *dtype;
    PyObject *op;
    PyObject *root;
    PyObject *prescale;
    PyObject *postscale;
    PyObject *priority;
    PyObject *bucket;
    PyObject *keep;
    PyObject *group;
    PyObject *shape;
    PyObject *limit;
    int awaited;
    int limit_ms;
};

static int optional_long(const char *name, PyObject *value, long low, long high, long *out) {
    *out = 0;
    return value == NULL ? 0 : core_get_long(name, value, low, high, out);
}

static int parse_numbers(const struct submit_args *in, int size, struct nb_op *op) {
    long kind;
    long root;
    long priority;
    long bucket;
    if (core_get_long("kind", in->kind, 0, NB_OP_KINDS - 1, &kind) < 0 || core_get_dtype(in->dtype, &op->dtype) < 0 ||
        core_get_redop(in->op, &op->redop) < 0 || optional_long("root", in->root, 0, size - 1, &root) < 0 ||
        core_get_scale("prescale", in->prescale, &op->prescale) < 0 ||
        core_get_scale("postscale", in->postscale, &op->postscale) < 0 ||
        optional_long("priority", in->priority, INT32_MIN, INT32_MAX, &priority) < 0 ||
        optional_long("bucket", in->bucket, 0, UINT32_MAX, &bucket) < 0) {
        return -1;
    }
    if (in->shape != NULL) {
        op->shape = PyLong_AsUnsignedLongLongMask(in->shape);
        if (PyErr_Occurred() != NULL) {
            return -1;
        }
    }
    op->limit_ms = in->limit_ms;
    if (in->limit != NULL && core_get_timeout("limit_s", in->limit, 0, &op->limit_ms) < 0) {
        return -1;
    }
    if (in->name[0] == '\0') {
        PyErr_SetString(PyExc_ValueError, "name must not be empty");
        return -1;
    }
    op->name = in->name;
    op->scaled = true;
    op->kind = (enum nb_op_kind)kind;
    op->root = (int)root;
    op->priority = (int)priority;
    op->bucket = (uint32_t)bucket;
    op->awaited = in->awaited != 0;
    return 0;
}

// Parses the arguments into op and hold.
static int parse_submit(const struct submit_args *in, int size, struct nb_op *op, struct core_hold *hold) {
    if (parse_numbers(in, size, op) < 0) {
        return -1;
    }
    size_t element = nb_dtype_size(op->dtype);
    if (core_memory_parse(&hold->memory, in->memory, true, element) < 0) {
        return -1;
    }
    bool parts = op->kind == NB_OP_ALLGATHER || op->kind == NB_OP_REDUCESCATTER;
    if (parts && hold->memory.bytes % ((size_t)size * element) != 0) {
        PyErr_Format(PyExc_ValueError,
                     "memory of \"%s\" has %zu bytes, which %d ranks cannot share equally in "
                     "elements of %zu",
                     op->name, hold->memory.bytes, size, element);
        return -1;
    }
    hold->device = hold->memory.device;
    op->segments = hold->memory.segments;
    op->segment_count = hold->memory.count;
    hold->keep = Py_XNewRef(in->keep);
    return 0;
}

struct nb_comm *core_comm_group_of(PyObject *object, PyObject *number) {
    long id;
    if (optional_long("group", number, 0, UINT32_MAX, &id) < 0 || core_comm_check(object) < 0) {
        return NULL;
    }
    struct nb_comm *comm = nb_comm_find(((struct core_comm *)object)->job, (uint32_t)id);
    if (comm == NULL) {
        PyErr_Format(PyExc_ValueError, "group=%ld does not exist on this rank: create it with Comm.group()", id);
    }
    return comm;
}

static PyObject *submit(PyObject *object, const struct submit_args *in) {
    struct core_hold *hold = core_hold_new();
    if (hold == NULL) {
        return NULL;
    }
    struct nb_op op = {0};
    struct nb_comm *comm = core_comm_group_of(object, in->group);
    if (comm == NULL || parse_submit(in, nb_comm_size(comm), &op, hold) < 0 ||
        core_comm_submit(object, comm, &op, hold) < 0) {
        PyObject *type;
        PyObject *value;
        PyObject *trace;
        PyErr_Fetch(&type, &value, &trace);
        core_hold_free(hold);
        PyErr_Restore(type, value, trace);
        return NULL;
    }
    return core_work_new(core_state_of(object), object, hold);
}

PyObject *core_comm_submit_method(PyObject *object, PyObject *args, PyObject *kwargs) {
    static const char *const keywords[] = {"name",     "kind",      "memory",   "dtype",  "op",   "root",
                                           "prescale", "postscale", "priority", "bucket", "keep", "awaited",
                                           "group",    "shape",     "limit_s",  NULL};
    struct submit_args in = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sOOO|$OOOOOOOpOOO:submit", (char **)keywords, &in.name, &in.kind,
                                     &in.memory, &in.dtype, &in.op, &in.root, &in.prescale, &in.postscale, &in.priority,
                                     &in.bucket, &in.keep, &in.awaited, &in.group, &in.shape, &in.limit)) {
        return NULL;
    }
    if (core_comm_check(object) < 0) {
        return NULL;
    }
    core_comm_sweep(object);
    return submit(object, &in);
}

// Returns memory that the caller frees; NULL: an exception is set.
static int *ranks_parse(PyObject *ranks, int *count) {
    PyObject *list = PySequence_List(ranks);
    Py_ssize_t n = list != NULL ? PyList_Size(list) : 0;
    int *out = list != NULL && n <= INT32_MAX ? PyMem_Malloc((size_t)(n + 1) * sizeof *out) : NULL;
    if (list != NULL && out == NULL) {
        PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; out != NULL && i < n; i++) {
        long rank;
        if (core_get_long("rank", PyList_GetItem(list, i), 0, INT32_MAX, &rank) < 0) {
            PyMem_Free(out);
            out = NULL;
        } else {
            out[i] = (int)rank;
        }
    }
    Py_XDECREF(list);
    *count = (int)n;
    return out;
}

PyObject *core_comm_group(PyObject *object, PyObject *args, PyObject *kwargs) {
    static const char *const keywords[] = {"number", "ranks", NULL};
    PyObject *number;
    PyObject *list;
    long id;
    int count;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO:group", (char **)keywords, &number, &list) ||
        core_get_long("number", number, 1, UINT32_MAX, &id) < 0) {
        return NULL;
    }
    int *ranks = ranks_parse(list, &count);
    if (ranks == NULL) {
        return NULL;
    }
    if (core_comm_check(object) < 0) { // last: the arguments may run Python, and close it
        PyMem_Free(ranks);
        return NULL;
    }
    struct nb_error err = {0};
    int rc = nb_comm_make(((struct core_comm *)object)->job, (uint32_t)id, ranks, count, &err);
    PyMem_Free(ranks);
    if (rc < 0) {
        return core_raise(core_state_of(object), rc, &err);
    }
    Py_RETURN_NONE;
}

PyObject *core_comm_missing(PyObject *object, PyObject *args, PyObject *kwargs) {
    static const char *const keywords[] = {"name", "group", NULL};
    const char *name;
    PyObject *number = NULL;
    int32_t ranks[NB_MISSING_MAX];
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s|O:missing", (char **)keywords, &name, &number)) {
        return NULL;
    }
    struct nb_comm *comm = core_comm_group_of(object, number);
    if (comm == NULL) {
        return NULL;
    }
    int count = nb_comm_missing(comm, name, ranks);
    PyObject *list = PyList_New(count);
    for (int i = 0; list != NULL && i < count; i++) {
        PyObject *rank = PyLong_FromLong(ranks[i]);
        if (rank == NULL || PyList_SetItem(list, i, rank) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

// Moves the exception of a signal handler to a list. Returns -1 with the exception set if that fails.
static int put_by(PyObject *raised) {
    PyObject *type;
    PyObject *value;
    PyObject *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (trace != NULL) {
        (void)PyException_SetTraceback(value, trace);
    }
    if (PyList_Append(raised, value) < 0) {
        PyErr_Restore(type, value, trace);
        return -1;
    }
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return 0;
}

// Waits for a work. raised: a list for the exceptions of signal handlers, which then end no wait; NULL: they end it.
static int wait_for(PyObject *object, PyObject *work, PyObject *raised) {
    for (;;) {
        PyObject *done = PyObject_CallMethod(work, "wait", NULL);
        if (done != NULL) {
            Py_DECREF(done);
            break;
        }
        if (raised == NULL || core_work_done(work) || put_by(raised) < 0 || core_comm_check(object) < 0) {
            return -1;
        }
    }
    // A handler that runs after the return would hide the answer.
    return raised != NULL && PyErr_CheckSignals() < 0 ? put_by(raised) : 0;
}

// Submits the all-gather of a buffer in which this rank's part is filled in, and waits. given: name; NULL: by number.
// raised: as wait_for.
static int gather(PyObject *object, PyObject *buffer, int limit_ms, const char *given, PyObject *raised) {
    struct core_comm *self = (struct core_comm *)object;
    char numbered[NB_NAME_MAX];
    const char *name = given;
    if (name == NULL) {
        PyOS_snprintf(numbered, sizeof numbered, "netbottleneck.exchange.%llu", (unsigned long long)self->exchanges++);
        name = numbered;
    }
    PyObject *kind = PyLong_FromLong(NB_OP_ALLGATHER);
    PyObject *dtype = PyLong_FromLong(NB_U8);
    PyObject *work = NULL;
    if (kind != NULL && dtype != NULL) {
        const struct submit_args in = {
            .name = name, .kind = kind, .memory = buffer, .dtype = dtype, .awaited = 1, .limit_ms = limit_ms};
        work = submit(object, &in);
    }
    Py_XDECREF(kind);
    Py_XDECREF(dtype);
    int rc = work != NULL ? wait_for(object, work, raised) : -1;
    Py_XDECREF(work);
    return rc;
}

static PyObject *split(const char *buffer, Py_ssize_t bytes, int size) {
    PyObject *list = PyList_New(size);
    for (int i = 0; list != NULL && i < size; i++) {
        PyObject *part = PyBytes_FromStringAndSize(buffer + i * bytes, bytes);
        if (part == NULL || PyList_SetItem(list, i, part) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

PyObject *core_comm_exchange(PyObject *object, PyObject *args, PyObject *kwargs) {
    static const char *const keywords[] = {"blob", "limit_s", "name", "raised", NULL};
    const struct core_comm *self = (struct core_comm *)object;
    PyObject *blob;
    PyObject *raised = NULL;
    PyObject *limit = NULL;
    int limit_ms = 0;
    const char *name = NULL;
    char *data;
    Py_ssize_t bytes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$OzO!:exchange", (char **)keywords, &blob, &limit, &name,
                                     &PyList_Type, &raised)) {
        return NULL;
    }
    if (limit != NULL && core_get_timeout("limit_s", limit, 0, &limit_ms) < 0) {
        return NULL;
    }
    if (PyBytes_AsStringAndSize(blob, &data, &bytes) < 0 || core_comm_check(object) < 0) {
        return NULL;
    }
    if (bytes > PY_SSIZE_T_MAX / self->size) {
        PyErr_Format(PyExc_ValueError, "blob of %zd bytes is too large for %d ranks", bytes, self->size);
        return NULL;
    }
    core_comm_sweep(object);
    PyObject *buffer = PyByteArray_FromStringAndSize(NULL, bytes * self->size);
    if (buffer == NULL) {
        return NULL;
    }
    char *base = PyByteArray_AsString(buffer);
    memset(base, 0, (size_t)(bytes * self->size));
    memcpy(base + bytes * self->rank, data, (size_t)bytes);
    PyObject *parts = gather(object, buffer, limit_ms, name, raised) == 0 ? split(base, bytes, self->size) : NULL;
    Py_DECREF(buffer);
    return parts;
}
