// The memory of an operation, and the buffers that keep it in place while the operation is in progress.
#include "py/core.h"
#include "py/tensor.h"

#include <stdlib.h>

// True for a pair of integers, which is (address, bytes).
static bool is_pair(PyObject *object) {
    return PyTuple_Check(object) && PyTuple_Size(object) == 2 && PyLong_Check(PyTuple_GetItem(object, 0)) &&
           PyLong_Check(PyTuple_GetItem(object, 1));
}

static int parse_pair(PyObject *pair, Py_ssize_t place, struct nb_segment *segment) {
    segment->base = PyLong_AsVoidPtr(PyTuple_GetItem(pair, 0));
    segment->bytes = PyErr_Occurred() == NULL ? PyLong_AsSize_t(PyTuple_GetItem(pair, 1)) : 0;
    bool bad = PyErr_Occurred() != NULL || (segment->base == NULL && segment->bytes > 0) ||
               segment->bytes > (size_t)PY_SSIZE_T_MAX;
    if (bad) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "memory[%zd] must be (address, bytes), not %R", place, pair);
        return -1;
    }
    return 0;
}

// Replaces the exporter's message by one that names the position.
static void explain_buffer(PyObject *object, Py_ssize_t place, bool writable) {
    PyObject *type;
    PyObject *value;
    PyObject *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *reason = value != NULL ? PyObject_Str(value) : NULL;
    if (reason == NULL) {
        PyErr_Clear();
    }
    bool no_buffer = PyErr_GivenExceptionMatches(type, PyExc_TypeError);
    PyErr_Format(no_buffer ? PyExc_TypeError : PyExc_ValueError,
                 "memory[%zd] must have a %scontiguous buffer or be (address, bytes); %R does not: %V", place,
                 writable ? "writable, " : "", Py_TYPE(object), reason, "no reason given");
    Py_XDECREF(reason);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
}

static bool is_tensor(PyObject *object) {
    return !PyObject_CheckBuffer(object) && PyObject_HasAttrString(object, "__dlpack_device__");
}

static int parse_tensor(struct core_memory *memory, PyObject *tensor, struct nb_segment *segment,
                        struct core_device *device) {
    struct core_tensor_place found;
    if (core_tensor_find(tensor, &found) < 0) {
        return -1;
    }
    *segment = (struct nb_segment){.base = found.base, .bytes = found.bytes};
    *device = found.device;
    memory->views[memory->view_count++].obj = Py_NewRef(tensor); // PyBuffer_Release() drops it
    return 0;
}

// All pieces are on one device.
static int check_device(struct core_memory *memory, const struct core_device *device, Py_ssize_t place) {
    bool same = device->type == memory->device.type && device->number == memory->device.number;
    if (memory->count > 0 && !same) {
        PyErr_Format(PyExc_ValueError, "memory[%zd] is on another device than the pieces before it", place);
        return -1;
    }
    memory->device = *device;
    return 0;
}

static int add(struct core_memory *memory, PyObject *object, Py_ssize_t place, bool writable, size_t element_bytes) {
    struct nb_segment segment;
    struct core_device device = {0};
    if (is_pair(object)) {
        if (parse_pair(object, place, &segment) < 0) {
            return -1;
        }
    } else if (is_tensor(object)) {
        if (parse_tensor(memory, object, &segment, &device) < 0) {
            return -1;
        }
    } else {
        Py_buffer *view = &memory->views[memory->view_count];
        if (PyObject_GetBuffer(object, view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0) {
            explain_buffer(object, place, writable);
            return -1;
        }
        memory->view_count++;
        segment.base = view->buf;
        segment.bytes = (size_t)view->len;
    }
    if (segment.bytes % element_bytes != 0) {
        PyErr_Format(PyExc_ValueError, "memory[%zd] has %zu bytes, not a multiple of the element size %zu", place,
                     segment.bytes, element_bytes);
        return -1;
    }
    if (segment.bytes > (size_t)PY_SSIZE_T_MAX - memory->bytes) {
        PyErr_Format(PyExc_ValueError, "memory has more than %zd bytes", PY_SSIZE_T_MAX);
        return -1;
    }
    if (segment.bytes > 0) {
        if (check_device(memory, &device, place) < 0) {
            return -1;
        }
        memory->segments[memory->count++] = segment;
        memory->bytes += segment.bytes;
    }
    return 0;
}

static int reserve(struct core_memory *memory, Py_ssize_t pieces) {
    if (pieces > NB_SEGMENTS_MAX) {
        PyErr_Format(PyExc_ValueError, "memory has %zd pieces; the limit is %d", pieces, NB_SEGMENTS_MAX);
        return -1;
    }
    size_t room = pieces > 0 ? (size_t)pieces : 1;
    memory->segments = calloc(room, sizeof(*memory->segments));
    memory->views = calloc(room, sizeof(*memory->views));
    if (memory->segments == NULL || memory->views == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

// Parses a list or a tuple that is no pair as a sequence of pieces; anything else as one piece.
static int parse_pieces(struct core_memory *memory, PyObject *object, bool writable, size_t element_bytes) {
    if (is_pair(object) || !(PyTuple_Check(object) || PyList_Check(object))) {
        return reserve(memory, 1) < 0 ? -1 : add(memory, object, 0, writable, element_bytes);
    }
    PyObject *pieces = PySequence_Tuple(object);
    if (pieces == NULL) {
        return -1;
    }
    Py_ssize_t count = PyTuple_Size(pieces);
    int rc = reserve(memory, count);
    for (Py_ssize_t i = 0; i < count && rc == 0; i++) {
        rc = add(memory, PyTuple_GetItem(pieces, i), i, writable, element_bytes);
    }
    Py_DECREF(pieces);
    return rc;
}

int core_memory_parse(struct core_memory *memory, PyObject *object, bool writable, size_t element_bytes) {
    struct core_memory found = {0};
    if (object != Py_None && parse_pieces(&found, object, writable, element_bytes) < 0) {
        PyObject *type;
        PyObject *value;
        PyObject *trace;
        PyErr_Fetch(&type, &value, &trace);
        core_memory_release(&found);
        PyErr_Restore(type, value, trace);
        return -1;
    }
    *memory = found;
    return 0;
}

int core_memory_parse_host(struct core_memory *memory, PyObject *object, bool writable, size_t element_bytes) {
    int rc = core_memory_parse(memory, object, writable, element_bytes);
    if (rc == 0 && memory->device.type != 0) {
        PyErr_Format(PyExc_ValueError, "memory on device %d: it must be memory of the host",
                     (int)memory->device.number);
        rc = -1;
    }
    return rc;
}

void core_memory_release(struct core_memory *memory) {
    struct core_memory old = *memory;
    *memory = (struct core_memory){0};
    for (int i = 0; i < old.view_count; i++) {
        PyBuffer_Release(&old.views[i]);
    }
    free(old.views);
    free(old.segments);
}

int core_memory_visit(const struct core_memory *memory, visitproc visit, void *arg) {
    for (int i = 0; i < memory->view_count; i++) {
        Py_VISIT(memory->views[i].obj);
    }
    return 0;
}

struct core_hold *core_hold_new(void) {
    struct core_hold *hold = calloc(1, sizeof(*hold));
    if (hold == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    nb_list_init(&hold->link);
    return hold;
}

bool core_hold_done(const struct core_hold *hold) {
    int code;
    return hold->work == NULL || nb_work_test(hold->work, &code);
}

void core_hold_settle(struct core_hold *hold) {
    core_memory_release(&hold->memory);
    Py_CLEAR(hold->keep);
}

void core_hold_free(struct core_hold *hold) {
    if (hold == NULL) {
        return;
    }
    if (hold->work != NULL) {
        nb_work_release(hold->work);
    }
    core_hold_settle(hold);
    free(hold);
}

int core_hold_visit(const struct core_hold *hold, visitproc visit, void *arg) {
    Py_VISIT(hold->keep);
    return core_memory_visit(&hold->memory, visit, arg);
}
