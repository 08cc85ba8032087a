// The job behind a Comm: checks that it may be used, counts the threads that wait on it, and keeps dropped operations.
#include "py/comm.h"
#include "py/tensor.h"

#include <poll.h>
#include <unistd.h>

static struct core_comm *comm_of(PyObject *object) {
    return (struct core_comm *)object;
}

bool core_comm_is_here(PyObject *comm) {
    return comm_of(comm)->pid == getpid();
}

int core_comm_check(PyObject *comm) {
    const struct core_state *state = core_state_of(comm);
    if (core_here(state, comm_of(comm)->pid, "communicator") < 0) {
        return -1;
    }
    if (comm_of(comm)->job == NULL) {
        struct nb_error err = {0};
        core_raise(state, nb_fail(&err, NB_ECLOSED, "communicator is closed"), &err);
        return -1;
    }
    return 0;
}

int core_comm_enter(PyObject *comm) {
    struct core_comm *self = comm_of(comm);
    if (self->closing) {
        return 0;
    }
    if (core_comm_check(comm) < 0) {
        return -1;
    }
    self->waiters++;
    return 1;
}

void core_comm_leave(PyObject *comm) {
    comm_of(comm)->waiters--;
}

void core_comm_failure(PyObject *comm, const struct core_hold *hold, int code, struct nb_error *err) {
    const struct core_comm *self = comm_of(comm);
    if (self->job != NULL) { // the work's own error text lives only as long as the job
        (void)nb_work_wait(hold->work, 0, err);
    } else if (self->failure.code == code) {
        *err = self->failure;
    } else if (code == NB_ECLOSED) {
        nb_fail(err, code, "the communicator was closed before the operation completed");
    } else {
        nb_fail(err, code, "%s; the communicator has been closed", nb_code_name(code));
    }
}

int core_comm_follow(PyObject *comm, const struct core_hold *hold) {
    void *now = NULL;
    struct nb_error err = {0};
    if (hold->device.type == 0) {
        return 0;
    }
    if (hold->device.stream(hold->device.type, hold->device.number, &now) != 0) {
        return -1;
    }
    while (comm_of(comm)->closing) { // last: the call above may run Python, and close it
        PyThreadState *saved = PyEval_SaveThread();
        (void)poll(NULL, 0, 1);
        PyEval_RestoreThread(saved);
        if (PyErr_CheckSignals() < 0) {
            return -1;
        }
    }
    if (comm_of(comm)->job == NULL) { // closed: its copies are over
        return 0;
    }
    int rc = nb_work_follow(hold->work, now, &err);
    if (rc < 0) {
        core_raise(core_state_of(comm), rc, &err);
    }
    return rc < 0 ? -1 : 0;
}

void core_comm_hold(PyObject *comm, struct core_hold *hold) {
    nb_list_insert(&comm_of(comm)->holds, &hold->link);
}

void core_comm_sweep(PyObject *comm) {
    struct nb_list done;
    nb_list_init(&done);
    NB_LIST_EACH_SAFE(it, next, &comm_of(comm)->holds) {
        if (core_hold_done(NB_CONTAINER(it, struct core_hold, link))) {
            nb_list_remove(it);
            nb_list_insert(&done, it);
        }
    }
    while (!nb_list_empty(&done)) {
        struct core_hold *hold = NB_CONTAINER(done.next, struct core_hold, link);
        nb_list_remove(&hold->link);
        core_hold_free(hold);
    }
}

// Writes the device of the memory to op. 0, or -1 with an exception: only the CUDA driver's memory travels. A driver
// that is named in place of the usual one also has torch's PrivateUse1 devices.
static int set_device(struct nb_op *op, const struct core_device *device, bool other_driver) {
    enum { DEVICE_CUDA = 2, DEVICE_EXTENSION = 12 }; // DLPack's
    if (device->type != 0 && device->type != DEVICE_CUDA && !(device->type == DEVICE_EXTENSION && other_driver)) {
        PyErr_Format(PyExc_ValueError, "memory of DLPack's device type %d: only host and CUDA memory travel",
                     (int)device->type);
        return -1;
    }
    op->device = device->type == 0 ? 0 : device->number + 1;
    return 0;
}

// Submits without the GIL: the first use of a device opens it, and one rank waits for its stream.
static int submit_device(struct core_comm *self, struct nb_comm *of, const struct nb_op *op, struct nb_work **work,
                         struct nb_error *err) {
    self->waiters++;
    PyThreadState *saved = PyEval_SaveThread();
    int rc = nb_submit(of, op, work, err);
    PyEval_RestoreThread(saved);
    self->waiters--;
    return rc;
}

int core_comm_submit(PyObject *comm, struct nb_comm *of, const struct nb_op *op, struct core_hold *hold) {
    const struct core_device *device = &hold->device;
    struct nb_op placed = *op;
    if (set_device(&placed, device, comm_of(comm)->other_driver) < 0) {
        return -1;
    }
    struct nb_error err = {0};
    struct nb_work *work = NULL;
    void *now = NULL;
    struct CUstream_st *current;
    if (placed.device != 0 && placed.stream_count == 0) {
        if (device->stream(device->type, device->number, &now) != 0) {
            return -1;
        }
        current = now;
        placed.streams = &current;
        placed.stream_count = 1;
    }
    if (core_comm_check(comm) < 0) { // last: the call above may run Python, and close it
        return -1;
    }
    int rc = placed.device == 0 ? nb_submit(of, &placed, &work, &err)
                                : submit_device(comm_of(comm), of, &placed, &work, &err);
    if (rc < 0) {
        core_raise(core_state_of(comm), rc, &err);
        return -1;
    }
    hold->work = work;
    return 0;
}

int core_comm_log_notices(PyObject *object) {
    struct core_comm *self = (struct core_comm *)object;
    char text[NB_ERROR_TEXT];
    while (self->job != NULL && nb_job_notice(self->job, text, sizeof text)) {
        PyObject *notice = core_text(text);
        PyObject *logging = notice != NULL ? PyImport_ImportModule("logging") : NULL;
        PyObject *logger = logging != NULL ? PyObject_CallMethod(logging, "getLogger", "s", "netbottleneck") : NULL;
        PyObject *done = logger != NULL ? PyObject_CallMethod(logger, "warning", "siiO", "[rank %d/%d] %s", self->rank,
                                                              self->size, notice)
                                        : NULL;
        Py_XDECREF(notice);
        Py_XDECREF(logging);
        Py_XDECREF(logger);
        if (done == NULL) {
            return -1;
        }
        Py_DECREF(done);
    }
    return 0;
}
