// How does Python stamp events, and who keeps the ring open?
#include "py/core.h"

#include <stdatomic.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/origin.h"

struct core_recorder {
    PyObject base;
    struct nb_ring ring;
    struct nb_ring none; // what a closed recorder stamps into: nothing
    uint64_t dropped;    // when it was closed
    struct nb_origin origin;
    int users; // communication threads that stamp
    bool open; // for Python
};

static PyObject *recorder_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static const char *const keywords[] = {"path", "capacity", "rank", "timeline", NULL};
    PyObject *path = NULL;
    PyObject *capacity_value;
    PyObject *rank_value;
    long capacity;
    long rank;
    int timeline = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&OO|$p:Recorder", (char **)keywords, PyUnicode_FSConverter, &path,
                                     &capacity_value, &rank_value, &timeline)) {
        return NULL;
    }
    struct core_recorder *self = NULL;
    if (core_get_long("capacity", capacity_value, 1, INT32_MAX, &capacity) == 0 &&
        core_get_long("rank", rank_value, 0, INT32_MAX, &rank) == 0) {
        self = (struct core_recorder *)PyType_GenericAlloc(type, 0);
    }
    if (self != NULL) {
        struct nb_error err = {0};
        int rc = nb_ring_open(&self->ring, PyBytes_AsString(path), (uint64_t)capacity, (int)rank, &err);
        if (rc < 0) {
            core_raise(core_state_of((PyObject *)self), rc, &err);
            Py_CLEAR(self);
        } else {
            self->ring.timeline = timeline != 0;
            self->open = true;
            nb_origin_open(&self->origin);
        }
    }
    Py_DECREF(path);
    return (PyObject *)self;
}

// Cuts the file once nobody stamps. A forked child must not: the parent still writes.
static void shut(struct core_recorder *self) {
    if (self->ring.header != NULL && self->users == 0 && nb_origin_is_here(&self->origin)) {
        self->dropped = nb_ring_dropped(&self->ring);
        nb_ring_close(&self->ring);
    }
}

static void recorder_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    struct core_recorder *self = (struct core_recorder *)object;
    shut(self);
    nb_origin_close(&self->origin);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyObject *recorder_close(PyObject *object, PyObject *Py_UNUSED(none)) {
    struct core_recorder *self = (struct core_recorder *)object;
    self->open = false;
    shut(self);
    Py_RETURN_NONE;
}

struct nb_ring *core_recorder_ring(PyObject *recorder) {
    struct core_recorder *self = (struct core_recorder *)recorder;
    return self->open && nb_origin_is_here(&self->origin) ? &self->ring : &self->none;
}

struct nb_ring *core_recorder_take(PyObject *recorder) {
    struct core_recorder *self = (struct core_recorder *)recorder;
    if (core_here(core_state_of(recorder), self->origin.pid, "recorder") < 0) {
        return NULL;
    }
    if (!self->open) {
        PyErr_SetString(PyExc_ValueError, "recorder is closed");
        return NULL;
    }
    self->users++;
    return &self->ring;
}

void core_recorder_drop(PyObject *recorder) {
    struct core_recorder *self = (struct core_recorder *)recorder;
    self->users--;
    if (!self->open) {
        shut(self);
    }
}

// The arguments of a stamp.
struct stamp {
    int kind;
    uint64_t key;
    uint64_t value[5];
};

static int check_kind(int kind) {
    if (kind <= NB_EV_NONE || kind >= NB_EV_END) {
        PyErr_Format(PyExc_ValueError, "kind must be one of EVENTS, from %d to %d, not %d", NB_EV_NONE + 1,
                     NB_EV_END - 1, kind);
        return -1;
    }
    return 0;
}

static PyObject *put(PyObject *object, int64_t time_ns, const struct stamp *stamp) {
    struct core_recorder *self = (struct core_recorder *)object;
    if (check_kind(stamp->kind) < 0 || core_here(core_state_of(object), self->origin.pid, "recorder") < 0) {
        return NULL;
    }
    const uint64_t *v = stamp->value;
    nb_ring_put_at(core_recorder_ring(object), time_ns, (enum nb_event_kind)stamp->kind, stamp->key, v[0], v[1], v[2],
                   v[3], v[4]);
    Py_RETURN_NONE;
}

static PyObject *recorder_put(PyObject *object, PyObject *args, PyObject *kwargs) {
    static const char *const keywords[] = {"kind", "key", "a", "b", "c", "d", "e", NULL};
    int64_t now_ns = nb_now_ns();
    struct stamp s = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "i|O&O&O&O&O&O&:put", (char **)keywords, &s.kind, core_get_u64,
                                     &s.key, core_get_u64, &s.value[0], core_get_u64, &s.value[1], core_get_u64,
                                     &s.value[2], core_get_u64, &s.value[3], core_get_u64, &s.value[4])) {
        return NULL;
    }
    return put(object, now_ns, &s);
}

static PyObject *recorder_put_at(PyObject *object, PyObject *args, PyObject *kwargs) {
    static const char *const keywords[] = {"time_ns", "kind", "key", "a", "b", "c", "d", "e", NULL};
    long long time_ns;
    struct stamp s = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Li|O&O&O&O&O&O&:put_at", (char **)keywords, &time_ns, &s.kind,
                                     core_get_u64, &s.key, core_get_u64, &s.value[0], core_get_u64, &s.value[1],
                                     core_get_u64, &s.value[2], core_get_u64, &s.value[3], core_get_u64, &s.value[4])) {
        return NULL;
    }
    return put(object, time_ns, &s);
}

struct core_stamper {
    PyObject base;
    PyObject *recorder;
    struct stamp stamp;
};

static PyObject *recorder_stamper(PyObject *object, PyObject *args, PyObject *kwargs) {
    static const char *const keywords[] = {"kind", "key", "a", "b", NULL};
    struct stamp s = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "i|O&O&O&:stamper", (char **)keywords, &s.kind, core_get_u64, &s.key,
                                     core_get_u64, &s.value[0], core_get_u64, &s.value[1]) ||
        check_kind(s.kind) < 0) {
        return NULL;
    }
    PyTypeObject *type = core_state_of(object)->types[CORE_STAMPER];
    struct core_stamper *self = (struct core_stamper *)PyType_GenericAlloc(type, 0);
    if (self != NULL) {
        self->recorder = Py_NewRef(object);
        self->stamp = s;
    }
    return (PyObject *)self;
}

static PyObject *stamper_call(PyObject *object, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs)) {
    const struct core_stamper *self = (struct core_stamper *)object;
    nb_ring_put(core_recorder_ring(self->recorder), (enum nb_event_kind)self->stamp.kind, self->stamp.key,
                self->stamp.value[0], self->stamp.value[1], 0, 0, 0);
    Py_RETURN_NONE;
}

static void stamper_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    Py_XDECREF(((struct core_stamper *)object)->recorder);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyObject *recorder_get_step(PyObject *object, void *Py_UNUSED(closure)) {
    return PyLong_FromUnsignedLong(atomic_load(&((struct core_recorder *)object)->ring.step));
}

static int recorder_set_step(PyObject *object, PyObject *value, void *Py_UNUSED(closure)) {
    long step;
    if (value == NULL) {
        PyErr_SetString(PyExc_TypeError, "step cannot be deleted");
        return -1;
    }
    if (core_get_long("step", value, 0, UINT32_MAX, &step) < 0) {
        return -1;
    }
    atomic_store(&((struct core_recorder *)object)->ring.step, (uint32_t)step);
    return 0;
}

static PyObject *recorder_get_dropped(PyObject *object, void *Py_UNUSED(closure)) {
    const struct core_recorder *self = (struct core_recorder *)object;
    return PyLong_FromUnsignedLongLong(self->ring.header != NULL ? nb_ring_dropped(&self->ring) : self->dropped);
}

PyTypeObject *core_recorder_type(PyObject *module) {
    static const char doc[] = "Recorder(path, capacity, rank, *, timeline=False)\n--\n\n"
                              "A ring file of `capacity` stamps of 64 bytes. Any thread may stamp; stamping never\n"
                              "blocks. Closed, or in a forked child, a stamper does nothing; put() raises Error in a\n"
                              "child. timeline: it takes what only a timeline needs, too: OP_NAME, OP_READY, OP_PACK.";
    static const PyMethodDef methods[] = {
        {"put", (PyCFunction)(void (*)(void))recorder_put, METH_VARARGS | METH_KEYWORDS,
         "put($self, kind, key=0, a=0, b=0, c=0, d=0, e=0)\n--\n\nStamps now."},
        {"put_at", (PyCFunction)(void (*)(void))recorder_put_at, METH_VARARGS | METH_KEYWORDS,
         "put_at($self, time_ns, kind, key=0, a=0, b=0, c=0, d=0, e=0)\n--\n\nStamps a time taken before."},
        {"stamper", (PyCFunction)(void (*)(void))recorder_stamper, METH_VARARGS | METH_KEYWORDS,
         "stamper($self, kind, key=0, a=0, b=0)\n--\n\n"
         "Return a C callable that stamps this event whatever it is called with, and returns None."},
        {"close", recorder_close, METH_NOARGS,
         "close($self)\n--\n\nEnds recording; the file is cut when no Comm stamps any more. May be repeated."},
        {0},
    };
    static const PyGetSetDef getset[] = {
        {"step", recorder_get_step, recorder_set_step, "The step that is stamped into every event.", NULL},
        {"dropped", recorder_get_dropped, NULL, "Events that found the file full.", NULL},
        {0},
    };
    static const PyType_Slot slots[] = {
        {Py_tp_doc, (void *)doc},         {Py_tp_new, (void *)recorder_new}, {Py_tp_dealloc, (void *)recorder_dealloc},
        {Py_tp_methods, (void *)methods}, {Py_tp_getset, (void *)getset},    {0, NULL},
    };
    static const PyType_Spec spec = {
        .name = "netbottleneck._core.Recorder",
        .basicsize = sizeof(struct core_recorder),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
        .slots = (PyType_Slot *)slots,
    };
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, (PyType_Spec *)&spec, NULL);
}

PyTypeObject *core_stamper_type(PyObject *module) {
    static const PyType_Slot slots[] = {
        {Py_tp_doc, (void *)"What Recorder.stamper makes."},
        {Py_tp_dealloc, (void *)stamper_dealloc},
        {Py_tp_call, (void *)stamper_call},
        {0, NULL},
    };
    static const PyType_Spec spec = {
        .name = "netbottleneck._core.Stamper",
        .basicsize = sizeof(struct core_stamper),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
        .slots = (PyType_Slot *)slots,
    };
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, (PyType_Spec *)&spec, NULL);
}
