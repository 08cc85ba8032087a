// Comm: the type, close(), and its attributes.
#include "py/comm.h"

#include <poll.h>
#include <string.h>
#include <unistd.h>

static struct core_comm *comm_of(PyObject *object) {
    return (struct core_comm *)object;
}

static PyObject *comm_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    struct core_comm *self = (struct core_comm *)PyType_GenericAlloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    nb_list_init(&self->holds);
    nb_list_init(&self->mappings);
    self->pid = getpid();
    if (core_comm_open(self, args, kwargs) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

// Ports of the lanes that accept TCP connections.
static PyObject *lane_ports(const struct nb_job_info *info) {
    PyObject *ports = PyList_New(0);
    for (int i = 0; ports != NULL && i < info->streams_open; i++) {
        PyObject *port = info->ports[i] != 0 ? PyLong_FromLong(info->ports[i]) : Py_NewRef(Py_None);
        if (port == NULL || (port != Py_None && PyList_Append(ports, port) < 0)) {
            Py_CLEAR(ports);
        }
        Py_XDECREF(port);
    }
    return ports;
}

static PyObject *job_info(const struct core_comm *self) {
    struct nb_job_info info = {0};
    nb_job_info(self->job, &info);
    PyObject *probe = PyList_New(info.probe_count);
    for (int i = 0; probe != NULL && i < info.probe_count; i++) {
        const struct nb_probe_point *p = &info.probe[i];
        PyObject *point = Py_BuildValue("(iKL)", p->lanes, (unsigned long long)p->bytes, (long long)p->ns);
        if (point == NULL || PyList_SetItem(probe, i, point) < 0) {
            Py_CLEAR(probe);
        }
    }
    if (probe == NULL) {
        return NULL;
    }
    PyObject *ports = lane_ports(&info);
    if (ports == NULL) {
        Py_DECREF(probe);
        return NULL;
    }
    PyObject *cpu = info.cpu < 0 ? Py_NewRef(Py_None) : PyLong_FromLong(info.cpu);
    return Py_BuildValue("{s:i,s:i,s:K,s:K,s:K,s:K,s:N,s:L,s:N,s:N,s:N,s:K,s:K,s:(ddddd),s:N}", "streams_open",
                         info.streams_open, "streams_used", info.streams_used, "bytes_out",
                         (unsigned long long)info.bytes_out, "bytes_in", (unsigned long long)info.bytes_in,
                         "lanes_lost", (unsigned long long)info.dropped, "refused", (unsigned long long)info.refused,
                         "provider", core_text(info.provider != NULL ? info.provider : ""), "clock_offset_ns",
                         (long long)self->clock_offset_ns, "probe", probe, "ports", ports, "shm", core_text(info.shm),
                         "shm_bytes", (unsigned long long)info.shm_bytes, "shm_staged_bytes",
                         (unsigned long long)info.shm_staged_bytes, "costs", info.costs.alpha_ns, info.costs.beta_ns,
                         info.costs.gamma_ns, info.costs.levels_ns, info.costs.levels_byte_ns, "cpu", cpu);
}

static PyObject *job_notices(const struct core_comm *self) {
    PyObject *list = PyList_New(0);
    char text[NB_ERROR_TEXT];
    while (list != NULL && self->job != NULL && nb_job_notice(self->job, text, sizeof text)) {
        PyObject *notice = core_text(text); // may run Python, and close it
        if (notice == NULL || PyList_Append(list, notice) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(notice);
    }
    return list;
}

static void mappings_end(struct core_comm *self) {
    NB_LIST_EACH_SAFE(it, next, &self->mappings) {
        core_mapping_end(NB_CONTAINER(it, struct core_mapping, in_comm));
    }
}

// Called when a mapping's arena is gone: the job takes the mapping over, else end_job() releases it.
static void mapping_drop(struct core_mapping *mapping) {
    struct core_comm *self = comm_of(mapping->comm);
    if (self->closing || !core_comm_is_here(mapping->comm) || self->job == NULL) {
        return; // end_job() releases it; a forked child must not touch the engine
    }
    struct nb_error err = {0};
    const struct nb_arena *arena = core_room_memory(mapping->room);
    if (nb_job_unmap(self->job, arena->base, core_room_release, mapping->room, &err) == 0) {
        mapping->room = NULL;
        core_mapping_end(mapping);
    }
}

// Releases the recorder of the clock. The job does not use it any more.
static void clock_release(struct core_comm *self) {
    PyObject *clock = self->clock;
    self->clock = NULL;
    if (clock != NULL) {
        core_recorder_release(clock);
        Py_DECREF(clock);
    }
}

// Ends the job. Waiting threads leave within one slice.
static void end_job(struct core_comm *self) {
    struct nb_job *job = self->job;
    self->job = NULL;
    self->closing = true;
    (void)nb_job_failure(job, &self->failure);
    while (self->waiters > 0) {
        PyThreadState *saved = PyEval_SaveThread();
        (void)poll(NULL, 0, 1);
        PyEval_RestoreThread(saved);
    }
    PyThreadState *saved = PyEval_SaveThread();
    nb_job_close(job);
    PyEval_RestoreThread(saved);
    self->closing = false;
    mappings_end(self);
    if (self->recording) {
        self->recording = false;
        core_recorder_release(self->recorder);
    }
    clock_release(self);
}

static int comm_traverse(PyObject *object, visitproc visit, void *arg) {
    const struct core_comm *self = comm_of(object);
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->recorder);
    Py_VISIT(self->clock);
    Py_VISIT(self->strings);
    Py_VISIT(self->last_info);
    Py_VISIT(self->last_notices);
    NB_LIST_EACH(it, &self->holds) {
        int rc = core_hold_visit(NB_CONTAINER(it, struct core_hold, link), visit, arg);
        if (rc != 0) {
            return rc;
        }
    }
    return 0;
}

// Ends a job that was not closed. The collector calls this before it clears any object of a cycle: nothing is in
// progress when the memory of the operations goes.
static void comm_finalize(PyObject *object) {
    struct core_comm *self = comm_of(object);
    if (self->job != NULL && core_comm_is_here(object)) {
        nb_job_abort(self->job, "its communicator was deleted without close()");
        end_job(self);
    }
}

// In a forked child the engine's memory stays as it is: the child has no engine thread.
static int comm_clear(PyObject *object) {
    struct core_comm *self = comm_of(object);
    if (!core_comm_is_here(object)) {
        mappings_end(self);
        return 0;
    }
    comm_finalize(object);
    core_comm_sweep(object);
    Py_CLEAR(self->recorder);
    Py_CLEAR(self->strings);
    Py_CLEAR(self->last_info);
    Py_CLEAR(self->last_notices);
    return 0;
}

static void comm_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    comm_clear(object);
    PyObject_GC_Del(object);
    Py_DECREF(type);
}

// Keeps info and notices for use after close(), unless the collector runs meanwhile and closes it.
static int keep_last(struct core_comm *self) {
    PyObject *info = job_info(self);
    PyObject *notices = info != NULL ? job_notices(self) : NULL;
    int rc = notices != NULL ? 0 : -1;
    if (rc == 0 && self->job != NULL) {
        self->last_info = Py_NewRef(info);
        self->last_notices = Py_NewRef(notices);
    }
    Py_XDECREF(info);
    Py_XDECREF(notices);
    return rc;
}

static PyObject *comm_close(PyObject *object, PyObject *Py_UNUSED(none)) {
    struct core_comm *self = comm_of(object);
    if (core_here(core_state_of(object), self->pid, "communicator") < 0) {
        return NULL;
    }
    int rc = self->job != NULL ? keep_last(self) : 0;
    PyObject *type;
    PyObject *value;
    PyObject *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (self->job != NULL) {
        end_job(self);
    }
    core_comm_sweep(object);
    PyErr_Restore(type, value, trace);
    return rc < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *comm_abort(PyObject *object, PyObject *args, PyObject *kwargs) {
    static const char *const keywords[] = {"why", NULL};
    const struct core_comm *self = comm_of(object);
    const char *why;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s:abort", (char **)keywords, &why) ||
        core_here(core_state_of(object), self->pid, "communicator") < 0) {
        return NULL;
    }
    if (self->job != NULL) {
        nb_job_abort(self->job, why);
    }
    Py_RETURN_NONE;
}

static PyObject *comm_map(PyObject *object, PyObject *arena) {
    struct core_comm *self = comm_of(object);
    const struct core_state *state = core_state_of(object);
    if (!Py_IS_TYPE(arena, state->types[CORE_ARENA])) {
        PyErr_Format(PyExc_TypeError, "arena must be an Arena, not %R", arena);
        return NULL;
    }
    int fresh = core_comm_check(object) < 0 ? -1 : core_arena_map(arena, object, &self->mappings, mapping_drop);
    if (fresh < 0) {
        return NULL;
    }
    struct nb_error err = {0};
    int rc = fresh > 0 ? nb_job_map_arena(self->job, core_arena_memory(arena), &err) : 0;
    if (rc < 0) {
        core_mapping_end(NB_CONTAINER(self->mappings.prev, struct core_mapping, in_comm));
        return core_raise(state, rc, &err);
    }
    Py_RETURN_NONE;
}

static PyObject *comm_info(PyObject *object, PyObject *Py_UNUSED(none)) {
    const struct core_comm *self = comm_of(object);
    if (core_here(core_state_of(object), self->pid, "communicator") < 0) {
        return NULL;
    }
    if (self->job != NULL) {
        return job_info(self);
    }
    return self->last_info != NULL ? PyDict_Copy(self->last_info) : (core_comm_check(object), NULL);
}

static PyObject *comm_record_clock(PyObject *object, PyObject *recorder) {
    struct core_comm *self = comm_of(object);
    struct core_state *state = core_state_of(object);
    struct nb_ring *ring = NULL;
    if (core_comm_check(object) < 0) {
        return NULL;
    }
    if (recorder != Py_None) {
        if (!Py_IS_TYPE(recorder, state->types[CORE_RECORDER])) {
            PyErr_Format(PyExc_TypeError, "recorder must be a Recorder or None, not %R", recorder);
            return NULL;
        }
        ring = core_recorder_acquire(recorder);
        if (ring == NULL) {
            return NULL;
        }
    }
    nb_job_record_clock(self->job, ring);
    clock_release(self);
    self->clock = ring != NULL ? Py_NewRef(recorder) : NULL;
    Py_RETURN_NONE;
}

static PyObject *comm_notices(PyObject *object, PyObject *Py_UNUSED(none)) {
    struct core_comm *self = comm_of(object);
    if (core_here(core_state_of(object), self->pid, "communicator") < 0) {
        return NULL;
    }
    core_comm_sweep(object);
    if (self->job != NULL) {
        return job_notices(self);
    }
    PyObject *last = self->last_notices;
    self->last_notices = NULL;
    return last != NULL ? last : PyList_New(0);
}

static PyObject *comm_get_rank(PyObject *object, void *Py_UNUSED(closure)) {
    return PyLong_FromLong(comm_of(object)->rank);
}

static PyObject *comm_get_size(PyObject *object, void *Py_UNUSED(closure)) {
    return PyLong_FromLong(comm_of(object)->size);
}

static PyObject *comm_get_failed(PyObject *object, void *Py_UNUSED(closure)) {
    const struct core_comm *self = comm_of(object);
    struct nb_error err = self->failure;
    if (self->job != NULL) {
        (void)nb_job_failure(self->job, &err);
    }
    return PyBool_FromLong(err.code != 0);
}

static const PyGetSetDef getset[] = {
    {"rank", comm_get_rank, NULL, "This rank.", NULL},
    {"size", comm_get_size, NULL, "Number of ranks.", NULL},
    {"failed", comm_get_failed, NULL, "True if a failure ended it, such as a lost rank; close() must still be called.",
     NULL},
    {0},
};

#define WITH_KEYWORDS(function) (PyCFunction)(void (*)(void))(function), METH_VARARGS | METH_KEYWORDS

static const char comm_doc[] =
    "Comm(rank, size, *, secret, listener=None, address=None, tag='', transport='tcp', streams=0,\n"
    "     provider=None, library=None, ifname=None, ports=(0, 0), segment_bytes=0, timeout_s=30.0,\n"
    "     start_timeout_s=..., stall_s=60.0, stall_end_s=0.0, recorder=None, shm='auto', host=None,\n"
    "     algorithm='auto', cpus=(), congestion=None, cuda_library=None, cuda_gather_bytes=0)\n--\n\n"
    "A job's communicator: all ranks. One communication thread, which never touches Python.\n\n"
    "Rank 0 gives its Listener, the others its address; a job of one rank needs neither. Deleted without\n"
    "close() it aborts the job on all ranks. In a forked child every call raises Error.";

PyTypeObject *core_comm_type(PyObject *module) {
    static const PyMethodDef methods[] = {
        {"submit", WITH_KEYWORDS(core_comm_submit_method),
         "submit($self, name, kind, memory, dtype, *, op=..., root=0, prescale=1.0, postscale=1.0,\n"
         "       priority=0, bucket=0, keep=None, awaited=False, group=0, shape=0, limit_s=0.0)\n--\n\n"
         "Start an operation in place and return its Work.\n\n"
         "shape: a number that stands for the shape of what is in `memory`; ranks whose numbers differ are refused.\n"
         "`memory` and `keep` live until it is done; awaited: the caller waits at once. ValueError for an\n"
         "operation that no rank could run, or while one of this name is pending here. limit_s: after which it fails\n"
         "and names the ranks that have not submitted it; 0: never. That of the rank that submits it first counts."},
        {"group", WITH_KEYWORDS(core_comm_group),
         "group($self, number, ranks)\n--\n\n"
         "Create a group of some ranks, this one included, for submit(group=number).\n\n"
         "All its ranks use the same number, above 0. The group lives until close(). ValueError for invalid ranks,\n"
         "or a number in use."},
        {"map", comm_map, METH_O,
         "map($self, arena, /)\n--\n\nRegister an arena for many operations with the lanes, until it is freed."},
        {"exchange", WITH_KEYWORDS(core_comm_exchange),
         "exchange($self, blob, *, limit_s=0.0, name=None, raised=...)\n--\n\n"
         "All-gather equal-length blobs, by rank. Every rank, in the same order.\n\n"
         "limit_s: after which TimeoutError names the missing ranks; 0: never. The communicator stays usable. name:\n"
         "its own, for an exchange that some ranks may leave out: the order of the others stays. raised: a list for "
         "the\n"
         "exceptions of signal handlers, which then do not end the exchange."},
        {"info", comm_info, METH_NOARGS, "info($self)\n--\n\nOpen lanes and bytes moved; also after close()."},
        {"missing", WITH_KEYWORDS(core_comm_missing),
         "missing($self, name, group=0)\n--\n\nRanks (16 at most) without it when its stall was reported."},
        {"record_clock", comm_record_clock, METH_O,
         "record_clock($self, recorder, /)\n--\n\nRecord this rank's clock in a Recorder too; None: no longer."},
        {"notices", comm_notices, METH_NOARGS,
         "notices($self)\n--\n\nNotices for the user since the last call: stalls, lost lanes."},
        {"abort", WITH_KEYWORDS(comm_abort),
         "abort($self, why)\n--\n\nFail pending operations here and on the other ranks, with this reason; close() must "
         "still be called."},
        {"close", comm_close, METH_NOARGS,
         "close($self)\n--\n\nShut down in good order; pending operations fail with ClosedError. May be repeated."},
        {0},
    };
    static const PyType_Slot slots[] = {
        {Py_tp_doc, (void *)comm_doc},
        {Py_tp_new, (void *)comm_new},
        {Py_tp_dealloc, (void *)comm_dealloc},
        {Py_tp_traverse, (void *)comm_traverse},
        {Py_tp_clear, (void *)comm_clear},
        {Py_tp_finalize, (void *)comm_finalize},
        {Py_tp_methods, (void *)methods},
        {Py_tp_getset, (void *)getset},
        {0, NULL},
    };
    static const PyType_Spec spec = {
        .name = "netbottleneck._core.Comm",
        .basicsize = sizeof(struct core_comm),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
        .slots = (PyType_Slot *)slots,
    };
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, (PyType_Spec *)&spec, NULL);
}
