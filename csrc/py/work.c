// Work: an operation in progress as a Python object. It waits with the GIL released, and may be dropped before it is
// done.
#include "py/core.h"

#include <poll.h>
#include <stdint.h>

#include "base/clock.h"

enum { SLICE_MS = 100 };

struct core_work {
    PyObject base;
    PyObject *comm;
    struct core_hold *hold;
};

// Length of the next slice in ms: 0 if the deadline has passed.
static int slice_ms(int64_t deadline_ns) {
    if (deadline_ns == INT64_MAX) {
        return SLICE_MS;
    }
    int64_t left_ns = deadline_ns - nb_now_ns();
    if (left_ns <= 0) {
        return 0;
    }
    int64_t left_ms = (left_ns + 999999) / 1000000;
    return left_ms < SLICE_MS ? (int)left_ms : SLICE_MS;
}

// The result of a finished operation: 1, or -1 with its failure.
static int outcome(PyObject *comm, const struct core_hold *hold) {
    struct nb_error err = {0};
    int code = 0;
    (void)nb_work_test(hold->work, &code);
    if (code == 0) {
        return core_comm_follow(comm, hold) < 0 ? -1 : 1;
    }
    core_comm_failure(comm, hold, code, &err);
    core_raise(core_state_of(comm), code, &err);
    return -1;
}

int core_hold_wait(PyObject *comm, const struct core_hold *hold, int64_t deadline_ns) {
    while (!core_hold_done(hold)) {
        int timeout_ms = slice_ms(deadline_ns);
        int entered = core_comm_enter(comm);
        if (entered < 0) {
            return -1;
        }
        PyThreadState *saved = PyEval_SaveThread();
        if (entered > 0) {
            (void)nb_work_wait(hold->work, timeout_ms, NULL);
        } else {
            (void)poll(NULL, 0, 1); // the job is closing: pending operations are about to fail
        }
        PyEval_RestoreThread(saved);
        if (entered > 0) {
            core_comm_leave(comm);
        }
        if (core_hold_done(hold)) {
            break;
        }
        if (PyErr_CheckSignals() < 0 || core_comm_log_notices(comm) < 0) {
            return -1;
        }
        if (timeout_ms == 0) {
            return 0;
        }
    }
    return outcome(comm, hold);
}

PyObject *core_work_new(const struct core_state *state, PyObject *comm, struct core_hold *hold) {
    struct core_work *self = (struct core_work *)PyType_GenericAlloc(state->types[CORE_WORK], 0);
    if (self == NULL) {
        core_comm_hold(comm, hold);
        return NULL;
    }
    self->comm = Py_NewRef(comm);
    self->hold = hold;
    return (PyObject *)self;
}

int core_work_done(PyObject *object) {
    const struct core_work *self = (struct core_work *)object;
    return self->hold == NULL || !core_comm_is_here(self->comm) || core_hold_done(self->hold);
}

static int work_traverse(PyObject *object, visitproc visit, void *arg) {
    const struct core_work *self = (struct core_work *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->comm);
    return self->hold != NULL ? core_hold_visit(self->hold, visit, arg) : 0;
}

// Leaves an operation in progress to the Comm. The collector calls this before it clears any object of a cycle, and
// spares what the Comm then refers to.
static void work_finalize(PyObject *object) {
    struct core_work *self = (struct core_work *)object;
    if (self->hold != NULL && core_comm_is_here(self->comm) && !core_hold_done(self->hold)) {
        core_comm_hold(self->comm, self->hold);
        self->hold = NULL;
    }
}

static int work_clear(PyObject *object) {
    struct core_work *self = (struct core_work *)object;
    work_finalize(object);
    struct core_hold *hold = self->hold;
    self->hold = NULL;
    if (hold != NULL && core_comm_is_here(self->comm)) {
        core_hold_free(hold);
    }
    Py_CLEAR(self->comm);
    return 0;
}

static void work_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    work_clear(object);
    PyObject_GC_Del(object);
    Py_DECREF(type);
}

// 1: done; 0: not by the deadline; -1: an exception.
static int wait_until(PyObject *object, int64_t deadline_ns) {
    struct core_work *self = (struct core_work *)object;
    if (self->hold == NULL) { // only a finaliser of the same cycle can see this
        PyErr_SetString(PyExc_RuntimeError, "work was cleared");
        return -1;
    }
    if (!core_comm_is_here(self->comm)) {
        return core_comm_check(self->comm);
    }
    int rc = core_hold_wait(self->comm, self->hold, deadline_ns);
    if (self->hold != NULL && core_hold_done(self->hold)) {
        PyObject *type;
        PyObject *value;
        PyObject *trace;
        PyErr_Fetch(&type, &value, &trace);
        core_hold_settle(self->hold);
        core_comm_sweep(self->comm);
        PyErr_Restore(type, value, trace);
    }
    return rc;
}

static PyObject *work_test(PyObject *object, PyObject *Py_UNUSED(none)) {
    const struct core_work *self = (struct core_work *)object;
    if (self->hold != NULL && core_comm_is_here(self->comm) && !core_hold_done(self->hold)) {
        Py_RETURN_FALSE;
    }
    int rc = wait_until(object, 0);
    return rc < 0 ? NULL : PyBool_FromLong(rc);
}

static PyObject *work_wait(PyObject *object, PyObject *args, PyObject *kwargs) {
    static const char *const keywords[] = {"timeout_s", NULL};
    PyObject *timeout = Py_None;
    int64_t deadline_ns = INT64_MAX;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O:wait", (char **)keywords, &timeout)) {
        return NULL;
    }
    if (timeout != Py_None) {
        int timeout_ms;
        if (core_get_timeout("timeout_s", timeout, 0, &timeout_ms) < 0) {
            return NULL;
        }
        deadline_ns = nb_now_ns() + (int64_t)timeout_ms * 1000000;
    }
    int rc = wait_until(object, deadline_ns);
    return rc < 0 ? NULL : PyBool_FromLong(rc);
}

static PyObject *work_times(PyObject *object, PyObject *Py_UNUSED(none)) {
    const struct core_work *self = (struct core_work *)object;
    struct nb_work_times t = {0};
    if (self->hold != NULL) {
        nb_work_times(self->hold->work, &t);
    }
    return Py_BuildValue("(LLLLL)", (long long)t.submit_ns, (long long)t.agreed_ns, (long long)t.start_ns,
                         (long long)t.first_byte_ns, (long long)t.done_ns);
}

PyTypeObject *core_work_type(PyObject *module) {
    static const char doc[] = "A pending operation. Its memory is kept in place until it is done, also when the\n"
                              "Work is dropped before.";
    static const PyMethodDef methods[] = {
        {"test", work_test, METH_NOARGS,
         "test($self)\n--\n\nReturn True when done. Raises what the operation failed with."},
        {"wait", (PyCFunction)(void (*)(void))work_wait, METH_VARARGS | METH_KEYWORDS,
         "wait($self, timeout_s=None)\n--\n\n"
         "Wait with the GIL released, serving signals; False after timeout_s.\n\n"
         "Raises the operation's failure: PeerError, WireError, MismatchError, ClosedError, DeadlineError."},
        {"times", work_times, METH_NOARGS,
         "times($self)\n--\n\nReturn (submit, agreed, start, first byte, done) in ns of now_ns(); 0: not yet."},
        {0},
    };
    static const PyType_Slot slots[] = {
        {Py_tp_doc, (void *)doc},
        {Py_tp_dealloc, (void *)work_dealloc},
        {Py_tp_traverse, (void *)work_traverse},
        {Py_tp_clear, (void *)work_clear},
        {Py_tp_finalize, (void *)work_finalize},
        {Py_tp_methods, (void *)methods},
        {0, NULL},
    };
    static const PyType_Spec spec = {
        .name = "netbottleneck._core.Work",
        .basicsize = sizeof(struct core_work),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
        .slots = (PyType_Slot *)slots,
    };
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, (PyType_Spec *)&spec, NULL);
}
