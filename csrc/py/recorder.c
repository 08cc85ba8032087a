// Recorder and Stamper: stamp events from Python, and keep the ring open while a thread stamps.
#include "py/core.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#include "base/clock.h"
#include "base/fork_detector.h"
#include "py/device_stamps.h"

enum {
    SETTLE_NS = 100 * 1000 * 1000,
    SETTLE_YIELDS = 100,
    SETTLE_SLEEP_NS = 50 * 1000,
    DEVICE_CLOSE_S = 2 // for the stamps that the device has not passed
};

struct core_recorder {
    PyObject base;
    struct nb_ring ring;
    struct nb_ring none;  // of a closed recorder: ignores stamps
    uint64_t overwritten; // count at close()
    struct nb_fork_detector opener;
    // Of a stamp whose time is not the host's in any case: with the host's time, or with that of `device`.
    void (*stamp)(struct core_recorder *self, const struct nb_event *event);
    struct core_device_stamps *device; // NULL: none is followed
    int users;                         // communication threads that stamp, and those that wait for a device's stamps
    atomic_int pending;                // stampers that settle() waits for
    bool open;                         // for Python
};

static void stamp_host(struct core_recorder *self, const struct nb_event *event);

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
            self->stamp = stamp_host;
            self->open = true;
            nb_fork_detector_open(&self->opener);
        }
    }
    Py_DECREF(path);
    return (PyObject *)self;
}

// Truncates the file after the last user. A forked child must not: the parent still writes.
static void shut(struct core_recorder *self) {
    if (self->ring.header != NULL && self->users == 0 && nb_fork_detector_is_opener(&self->opener)) {
        self->overwritten = nb_ring_overwritten(&self->ring);
        nb_ring_close(&self->ring);
    }
}

// Ends the stamps of a device. A forked child leaves them to its parent.
static void leave_device(struct core_recorder *self, int64_t limit_ns) {
    struct core_device_stamps *device = self->device;
    self->device = NULL;
    self->stamp = stamp_host;
    if (device != NULL && nb_fork_detector_is_opener(&self->opener)) {
        self->users++; // another thread may close the recorder meanwhile
        Py_BEGIN_ALLOW_THREADS;
        core_device_stamps_close(device, &self->ring, limit_ns);
        Py_END_ALLOW_THREADS;
        self->users--;
    }
}

static void recorder_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    struct core_recorder *self = (struct core_recorder *)object;
    leave_device(self, 0);
    shut(self);
    nb_fork_detector_close(&self->opener);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyObject *recorder_close(PyObject *object, PyObject *Py_UNUSED(none)) {
    struct core_recorder *self = (struct core_recorder *)object;
    self->open = false;
    leave_device(self, (int64_t)DEVICE_CLOSE_S * 1000000000);
    shut(self);
    Py_RETURN_NONE;
}

struct nb_ring *core_recorder_ring(PyObject *recorder) {
    struct core_recorder *self = (struct core_recorder *)recorder;
    return self->open && nb_fork_detector_is_opener(&self->opener) ? &self->ring : &self->none;
}

// The arguments of a stamp.
struct stamp {
    int kind;
    int host; // the time is the host's, also where a device is followed
    uint64_t key;
    uint64_t value[5];
};

static void stamp_host(struct core_recorder *self, const struct nb_event *event) {
    nb_ring_put_at(core_recorder_ring((PyObject *)self), event->time_ns, (enum nb_event_kind)event->kind, event->key,
                   event->a, event->b, event->c, event->d, event->e);
}

// Leaves exceptions as they are.
static void stamp_device(struct core_recorder *self, const struct nb_event *event) {
    const struct core_device_stamps *device = self->device;
    struct core_device where;
    if (core_recorder_ring((PyObject *)self)->header == NULL ||
        !core_device_stamps_takes(device, event->kind, &where)) {
        return;
    }
    PyObject *type;
    PyObject *value;
    PyObject *trace;
    PyErr_Fetch(&type, &value, &trace);
    void *stream = NULL;
    bool known = where.stream(where.type, where.number, &stream) == 0; // may run Python, and close the recorder
    PyErr_Clear();
    PyErr_Restore(type, value, trace);
    if (self->device == device) {
        core_device_stamps_put(self->device, core_recorder_ring((PyObject *)self), *event, known ? &stream : NULL);
    }
}

static void stamp_at(PyObject *recorder, const struct stamp *stamp, int64_t time_ns) {
    struct core_recorder *self = (struct core_recorder *)recorder;
    const uint64_t *v = stamp->value;
    const struct nb_event event = {.time_ns = time_ns,
                                   .kind = (uint32_t)stamp->kind,
                                   .key = stamp->key,
                                   .a = v[0],
                                   .b = v[1],
                                   .c = v[2],
                                   .d = v[3],
                                   .e = v[4]};
    (stamp->host ? stamp_host : self->stamp)(self, &event);
}

void core_recorder_stamp(PyObject *recorder, enum nb_event_kind kind, uint64_t key) {
    if (recorder != NULL) {
        stamp_at(recorder, &(struct stamp){.kind = (int)kind, .key = key}, nb_now_ns());
    }
}

struct nb_ring *core_recorder_acquire(PyObject *recorder) {
    struct core_recorder *self = (struct core_recorder *)recorder;
    if (core_here(core_state_of(recorder), self->opener.pid, "recorder") < 0) {
        return NULL;
    }
    if (!self->open) {
        PyErr_SetString(PyExc_ValueError, "recorder is closed");
        return NULL;
    }
    self->users++;
    return &self->ring;
}

void core_recorder_release(PyObject *recorder) {
    struct core_recorder *self = (struct core_recorder *)recorder;
    self->users--;
    if (!self->open) {
        shut(self);
    }
}

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
    if (check_kind(stamp->kind) < 0 || core_here(core_state_of(object), self->opener.pid, "recorder") < 0) {
        return NULL;
    }
    stamp_at(object, stamp, time_ns);
    Py_RETURN_NONE;
}

static PyObject *recorder_put(PyObject *object, PyObject *args, PyObject *kwargs) {
    static const char *const keywords[] = {"kind", "key", "a", "b", "c", "d", "e", "host", NULL};
    int64_t now_ns = nb_now_ns();
    struct stamp s = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "i|O&O&O&O&O&O&$p:put", (char **)keywords, &s.kind, core_get_u64,
                                     &s.key, core_get_u64, &s.value[0], core_get_u64, &s.value[1], core_get_u64,
                                     &s.value[2], core_get_u64, &s.value[3], core_get_u64, &s.value[4], &s.host)) {
        return NULL;
    }
    return put(object, now_ns, &s);
}

static PyObject *recorder_put_at(PyObject *object, PyObject *args, PyObject *kwargs) {
    static const char *const keywords[] = {"time_ns", "kind", "key", "a", "b", "c", "d", "e", NULL};
    long long time_ns;
    struct stamp s = {.host = true};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Li|O&O&O&O&O&O&:put_at", (char **)keywords, &time_ns, &s.kind,
                                     core_get_u64, &s.key, core_get_u64, &s.value[0], core_get_u64, &s.value[1],
                                     core_get_u64, &s.value[2], core_get_u64, &s.value[3], core_get_u64, &s.value[4])) {
        return NULL;
    }
    return put(object, time_ns, &s);
}

// Ready times of a backward pass: a list of ns after its begin. Returns 0 for a parameter without one.
static int64_t ready_offset(PyObject *offsets, Py_ssize_t at) {
    int64_t offset = PyLong_AsLongLong(PyList_GetItem(offsets, at));
    return offset > 0 ? offset : 0;
}

static int64_t ready_last(PyObject *offsets) {
    int64_t last = 0;
    for (Py_ssize_t i = 0; i < PyList_Size(offsets); i++) {
        int64_t offset = ready_offset(offsets, i);
        last = offset > last ? offset : last;
    }
    return last;
}

// The largest offset among a bucket's parameters. -1 with an exception set.
static int64_t bucket_last(PyObject *offsets, PyObject *parameters) {
    int64_t last = 0;
    for (Py_ssize_t i = 0; i < PyTuple_Size(parameters); i++) {
        Py_ssize_t at = PyLong_AsSsize_t(PyTuple_GetItem(parameters, i));
        if (at < 0 || at >= PyList_Size(offsets)) {
            PyErr_Format(PyExc_ValueError, "parameter %zd of a bucket: there are %zd", at, PyList_Size(offsets));
            return -1;
        }
        int64_t offset = ready_offset(offsets, at);
        last = offset > last ? offset : last;
    }
    return last;
}

// The latest begin that lets each bucket be sent after its gradients, and after those of the buckets before it.
static int begin_of(PyObject *offsets, PyObject *sent, int64_t *begin_ns) {
    int64_t last = 0;
    bool known = true;
    Py_ssize_t count = PyList_Size(sent);
    *begin_ns = INT64_MAX;
    for (Py_ssize_t i = 0; i < count; i++) {
        long long sent_ns;
        PyObject *parameters;
        if (!PyArg_ParseTuple(PyList_GetItem(sent, i), "LO!:put_ready", &sent_ns, &PyTuple_Type, &parameters)) {
            return -1;
        }
        known = known && PyTuple_Size(parameters) > 0;
        int64_t own = known ? bucket_last(offsets, parameters) : 0;
        if (own < 0) {
            return -1;
        }
        last = own > last ? own : last;
        last = i == count - 1 ? ready_last(offsets) : last;
        if ((known || i == count - 1) && last > 0 && sent_ns - last < *begin_ns) {
            *begin_ns = sent_ns - last;
        }
    }
    return 0;
}

// Records ten parameters in one event: a step's ready times of a large model then take few pages of the ring, whose
// first touches cost far more than the stores. A time beyond 32 bits has an event of its own.
static void put_ten_ready(struct nb_ring *ring, PyObject *offsets, Py_ssize_t first, int64_t begin_ns) {
    uint64_t packed[NB_GRADS_PER_EVENT / 2] = {0};
    bool any = false;
    for (Py_ssize_t i = 0; i < NB_GRADS_PER_EVENT && first + i < PyList_Size(offsets); i++) {
        int64_t offset = ready_offset(offsets, first + i);
        if (offset > UINT32_MAX) {
            nb_ring_put_at(ring, begin_ns + offset, NB_EV_GRAD_READY, (uint64_t)(first + i), 0, 0, 0, 0, 0);
        } else if (offset > 0) {
            packed[i / 2] |= (uint64_t)offset << (i % 2 * 32);
            any = true;
        }
    }
    if (any) {
        nb_ring_put_at(ring, begin_ns, NB_EV_GRADS_READY, (uint64_t)first, packed[0], packed[1], packed[2], packed[3],
                       packed[4]);
    }
}

static PyObject *recorder_put_ready(PyObject *object, PyObject *args) {
    PyObject *offsets;
    PyObject *sent;
    long long since_ns;
    int64_t begin_ns;
    if (!PyArg_ParseTuple(args, "O!O!L:put_ready", &PyList_Type, &offsets, &PyList_Type, &sent, &since_ns) ||
        begin_of(offsets, sent, &begin_ns) < 0) {
        return NULL;
    }
    if (begin_ns < since_ns || begin_ns == INT64_MAX) {
        return PyLong_FromLong(0);
    }
    for (Py_ssize_t first = 0; first < PyList_Size(offsets); first += NB_GRADS_PER_EVENT) {
        put_ten_ready(core_recorder_ring(object), offsets, first, begin_ns);
    }
    return PyErr_Occurred() != NULL ? NULL : PyLong_FromLongLong(begin_ns);
}

// Of stampers of one event, the first call of which stamps. The GIL guards it.
struct once {
    int users;
    bool stamped;
};

struct core_stamper {
    PyObject base;
    PyObject *recorder;
    struct once *once; // NULL: each call stamps
    struct stamp stamp;
    bool awaited; // counted in recorder->pending until it is freed
};

static PyObject *stamper_new(PyObject *recorder, const struct stamp *stamp, bool awaited) {
    PyTypeObject *type = core_state_of(recorder)->types[CORE_STAMPER];
    struct core_stamper *self = (struct core_stamper *)PyType_GenericAlloc(type, 0);
    if (self != NULL) {
        self->recorder = Py_NewRef(recorder);
        self->stamp = *stamp;
        self->awaited = awaited;
        atomic_fetch_add(&((struct core_recorder *)recorder)->pending, awaited);
    }
    return (PyObject *)self;
}

static PyObject *recorder_stamper(PyObject *object, PyObject *args, PyObject *kwargs) {
    static const char *const keywords[] = {"kind", "key", "a", "b", "awaited", "host", NULL};
    struct stamp s = {0};
    int awaited = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "i|O&O&O&$pp:stamper", (char **)keywords, &s.kind, core_get_u64,
                                     &s.key, core_get_u64, &s.value[0], core_get_u64, &s.value[1], &awaited, &s.host) ||
        check_kind(s.kind) < 0) {
        return NULL;
    }
    return stamper_new(object, &s, awaited != 0);
}

static PyObject *stamper_call(PyObject *object, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs)) {
    const struct core_stamper *self = (struct core_stamper *)object;
    if (self->once == NULL || !self->once->stamped) {
        stamp_at(self->recorder, &self->stamp, nb_now_ns());
    }
    if (self->once != NULL) {
        self->once->stamped = true;
    }
    Py_RETURN_NONE;
}

static PyObject *stamper_twin(PyObject *object, PyObject *Py_UNUSED(none)) {
    struct core_stamper *self = (struct core_stamper *)object;
    if (self->once == NULL) {
        self->once = PyMem_Malloc(sizeof *self->once);
        if (self->once == NULL) {
            return PyErr_NoMemory();
        }
        *self->once = (struct once){.users = 1};
    }
    PyObject *twin = stamper_new(self->recorder, &self->stamp, false);
    if (twin != NULL) {
        ((struct core_stamper *)twin)->once = self->once;
        self->once->users++;
    }
    return twin;
}

static void stamper_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    struct core_stamper *self = (struct core_stamper *)object;
    if (self->awaited) {
        atomic_fetch_sub(&((struct core_recorder *)self->recorder)->pending, 1);
    }
    if (self->once != NULL && --self->once->users == 0) {
        PyMem_Free(self->once);
    }
    Py_XDECREF(self->recorder);
    PyObject_Free(object);
    Py_DECREF(type);
}

// An operation that is repeated, as a bucket is: `turn` numbers its stamps.
struct core_operation {
    PyObject base;
    PyObject *recorder;
    uint64_t key;
    uint64_t bytes;
    uint64_t bucket;
    uint64_t about;
    uint64_t turn;
    int64_t submitted_ns;
};

static PyObject *recorder_operation(PyObject *object, PyObject *args) {
    struct core_operation found = {.turn = UINT64_MAX};
    if (!PyArg_ParseTuple(args, "O&O&O&O&:operation", core_get_u64, &found.key, core_get_u64, &found.bytes,
                          core_get_u64, &found.bucket, core_get_u64, &found.about)) {
        return NULL;
    }
    PyTypeObject *type = core_state_of(object)->types[CORE_OPERATION];
    struct core_operation *self = (struct core_operation *)PyType_GenericAlloc(type, 0);
    if (self != NULL) {
        found.base = self->base;
        *self = found;
        self->recorder = Py_NewRef(object);
    }
    return (PyObject *)self;
}

static PyObject *operation_submitted(PyObject *object, PyObject *Py_UNUSED(none)) {
    struct core_operation *self = (struct core_operation *)object;
    int64_t now_ns = nb_now_ns();
    self->turn++;
    self->submitted_ns = now_ns;
    stamp_at(self->recorder,
             &(struct stamp){.kind = NB_EV_OP_SUBMIT,
                             .key = self->key,
                             .value = {self->turn, self->bytes, self->bucket, 0, self->about}},
             now_ns);
    return PyLong_FromLongLong(now_ns);
}

static PyObject *operation_started(PyObject *object, PyObject *args) {
    const struct core_operation *self = (struct core_operation *)object;
    struct stamp done = {.kind = NB_EV_OP_DONE, .key = self->key, .value = {self->turn}};
    int blocked = 0;
    unsigned long long moved = 0;
    if (!PyArg_ParseTuple(args, "|ppK:started", &done.host, &blocked, &moved)) {
        return NULL;
    }
    int64_t now_ns = blocked ? self->submitted_ns : nb_now_ns();
    uint64_t call_ns = (uint64_t)(now_ns - self->submitted_ns);
    stamp_at(self->recorder,
             &(struct stamp){.kind = NB_EV_OP_START, .key = self->key, .value = {self->turn, call_ns, moved}}, now_ns);
    return stamper_new(self->recorder, &done, true);
}

static void operation_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    Py_XDECREF(((struct core_operation *)object)->recorder);
    PyObject_Free(object);
    Py_DECREF(type);
}

// Waits without the GIL, which the callbacks need.
static PyObject *recorder_settle(PyObject *object, PyObject *Py_UNUSED(none)) {
    struct core_recorder *self = (struct core_recorder *)object;
    if (!nb_fork_detector_is_opener(&self->opener)) {
        Py_RETURN_TRUE;
    }
    if (atomic_load(&self->pending) > 0) {
        Py_BEGIN_ALLOW_THREADS;
        int64_t deadline_ns = nb_now_ns() + SETTLE_NS;
        for (int tries = 0; atomic_load(&self->pending) > 0 && nb_now_ns() < deadline_ns; tries++) {
            if (tries < SETTLE_YIELDS) {
                (void)sched_yield();
            } else {
                (void)nanosleep(&(struct timespec){.tv_nsec = SETTLE_SLEEP_NS}, NULL);
            }
        }
        Py_END_ALLOW_THREADS;
    }
    return PyBool_FromLong(atomic_load(&self->pending) == 0);
}

static PyObject *recorder_follow(PyObject *object, PyObject *args) {
    struct core_recorder *self = (struct core_recorder *)object;
    PyObject *tensor;
    const char *library = NULL;
    if (!PyArg_ParseTuple(args, "O|z:follow", &tensor, &library) ||
        core_here(core_state_of(object), self->opener.pid, "recorder") < 0) {
        return NULL;
    }
    if (self->device != NULL || !self->open) {
        PyErr_SetString(PyExc_ValueError, self->open ? "the recorder follows a device" : "recorder is closed");
        return NULL;
    }
    self->device = core_device_stamps_open(core_state_of(object), tensor, library);
    if (self->device == NULL) {
        return NULL;
    }
    self->stamp = stamp_device;
    Py_RETURN_NONE;
}

static PyObject *recorder_read(PyObject *object, PyObject *Py_UNUSED(none)) {
    const struct core_recorder *self = (struct core_recorder *)object;
    bool reads = self->device != NULL && nb_fork_detector_is_opener(&self->opener);
    Py_ssize_t left =
        reads ? core_device_stamps_read(self->device, core_state_of(object), core_recorder_ring(object)) : 0;
    return left >= 0 ? PyLong_FromSsize_t(left) : NULL;
}

static int recorder_set_detailed(PyObject *object, PyObject *value, void *Py_UNUSED(closure)) {
    const struct core_recorder *self = (struct core_recorder *)object;
    int detailed = value != NULL ? PyObject_IsTrue(value) : 0;
    if (detailed >= 0 && self->device != NULL) {
        core_device_stamps_detail(self->device, detailed != 0);
    }
    return detailed < 0 ? -1 : 0;
}

static PyObject *recorder_get_device_stream(PyObject *object, void *Py_UNUSED(closure)) {
    const struct core_recorder *self = (struct core_recorder *)object;
    return self->device != NULL ? PyLong_FromVoidPtr(core_device_stamps_stream(self->device)) : Py_NewRef(Py_None);
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

static PyObject *recorder_get_overwritten(PyObject *object, void *Py_UNUSED(closure)) {
    const struct core_recorder *self = (struct core_recorder *)object;
    return PyLong_FromUnsignedLongLong(self->ring.header != NULL ? nb_ring_overwritten(&self->ring)
                                                                 : self->overwritten);
}

PyTypeObject *core_recorder_type(PyObject *module) {
    static const char doc[] =
        "Recorder(path, capacity, rank, *, timeline=False)\n--\n\n"
        "A ring file of `capacity` stamps of 64 bytes. Any thread may stamp; stamping never\n"
        "blocks. Closed, or in a forked child, a stamper does nothing; put() raises Error in a\n"
        "child. timeline: also records events that only a timeline needs: OP_NAME, OP_READY, OP_PACK.";
    static const PyMethodDef methods[] = {
        {"put", (PyCFunction)(void (*)(void))recorder_put, METH_VARARGS | METH_KEYWORDS,
         "put($self, kind, key=0, a=0, b=0, c=0, d=0, e=0, *, host=False)\n--\n\n"
         "Stamps now. host: with the host's time, also where a device is followed."},
        {"put_at", (PyCFunction)(void (*)(void))recorder_put_at, METH_VARARGS | METH_KEYWORDS,
         "put_at($self, time_ns, kind, key=0, a=0, b=0, c=0, d=0, e=0)\n--\n\nStamps an earlier time."},
        {"put_ready", recorder_put_ready, METH_VARARGS,
         "put_ready($self, offsets, sent, since_ns, /)\n--\n\n"
         "Stamps when each parameter was ready: its offset after the begin of the pass. Returns that begin, or 0."},
        {"stamper", (PyCFunction)(void (*)(void))recorder_stamper, METH_VARARGS | METH_KEYWORDS,
         "stamper($self, kind, key=0, a=0, b=0, *, awaited=False, host=False)\n--\n\n"
         "Return a C callable that stamps this event for any arguments. awaited: settle() waits until it is freed.\n"
         "host: as put()."},
        {"operation", recorder_operation, METH_VARARGS,
         "operation($self, key, nbytes, bucket, about, /)\n--\n\n"
         "Return what stamps a repeated operation. bucket: its number from 1; about: the last value of OP_SUBMIT."},
        {"settle", recorder_settle, METH_NOARGS,
         "settle($self)\n--\n\n"
         "Wait, at most 0.1 s, until all awaited stampers are freed; return False if some are left. CPython 3.11\n"
         "locks up in a fork's child while a thread unknown to it, which runs a callback, makes its thread state."},
        {"follow", recorder_follow, METH_VARARGS,
         "follow($self, tensor, library=None, /)\n--\n\n"
         "From now on stamps get the time at which the current stream of the tensor's device reaches them, on the\n"
         "host's clock; read() writes them. library: the CUDA driver in place of libcuda.so.1. Raises Error without a\n"
         "driver, ValueError for a tensor in host memory or a recorder that follows a device."},
        {"read", recorder_read, METH_NOARGS,
         "read($self)\n--\n\n"
         "Write the stamps that the device has passed; return the number that it has not. Raises Error for a failed\n"
         "call of the driver, also for one of an earlier stamp."},
        {"close", recorder_close, METH_NOARGS,
         "close($self)\n--\n\nEnds recording; the file is truncated when no Comm records any more. May be repeated."},
        {0},
    };
    static const PyGetSetDef getset[] = {
        {"step", recorder_get_step, recorder_set_step, "The step that is stamped into every event.", NULL},
        {"detailed", NULL, recorder_set_detailed, "False: a device's stamps of single gradients are left out.", NULL},
        {"device_stream", recorder_get_device_stream, NULL,
         "Address of a stream of our own on the device that is followed; None: no device is.", NULL},
        {"overwritten", recorder_get_overwritten, NULL, "Number of events that the file does not keep any more.", NULL},
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
    static const PyMethodDef methods[] = {
        {"twin", stamper_twin, METH_NOARGS,
         "twin($self)\n--\n\n"
         "Return a stamper of the same event that is not awaited. Of all calls of the two, the first stamps."},
        {0},
    };
    static const PyType_Slot slots[] = {
        {Py_tp_doc, (void *)"Made by Recorder.stamper()."},
        {Py_tp_dealloc, (void *)stamper_dealloc},
        {Py_tp_methods, (void *)methods},
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

PyTypeObject *core_operation_type(PyObject *module) {
    static const PyMethodDef methods[] = {
        {"submitted", operation_submitted, METH_NOARGS,
         "submitted($self)\n--\n\nStamp OP_SUBMIT with the next turn; return its time in ns."},
        {"started", operation_started, METH_VARARGS,
         "started($self, host=False, blocked=False, moved=0, /)\n--\n\n"
         "Stamp OP_START; return an awaited stamper of OP_DONE. host: the end is stamped with the host's time. "
         "blocked: it started when it was submitted. moved: 1 + the tensor bytes that travel; 0: those of the "
         "operation; 1: unknown."},
        {0},
    };
    static const PyType_Slot slots[] = {
        {Py_tp_doc, (void *)"Made by Recorder.operation()."},
        {Py_tp_dealloc, (void *)operation_dealloc},
        {Py_tp_methods, (void *)methods},
        {0, NULL},
    };
    static const PyType_Spec spec = {
        .name = "netbottleneck._core.Operation",
        .basicsize = sizeof(struct core_operation),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
        .slots = (PyType_Slot *)slots,
    };
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, (PyType_Spec *)&spec, NULL);
}
