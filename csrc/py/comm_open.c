// Opens a Comm: checks the arguments before any I/O; then join, clock and job, with the GIL released.
#include "coll/choose.h"
#include "py/comm.h"

#include <sched.h>
#include <stdint.h>
#include <string.h>

#include "base/interrupt.h"
#include "bootstrap/bootstrap.h"
#include "transport/transport.h"

struct open_args {
    PyObject *rank;
    PyObject *size;
    PyObject *secret;
    PyObject *listener;
    PyObject *address;
    PyObject *tag;
    PyObject *transport;
    PyObject *streams;
    PyObject *provider;
    PyObject *library;
    PyObject *ifname;
    PyObject *ports;
    PyObject *segment_bytes;
    PyObject *timeout;
    PyObject *start_timeout;
    PyObject *stall;
    PyObject *stall_end;
    PyObject *recorder;
    PyObject *shm;
    PyObject *host;
    PyObject *algorithm;
    PyObject *cpus;
    PyObject *congestion;
    PyObject *cuda_library;
    PyObject *cuda_gather_bytes;
};

// The arguments of the join and the job, in C.
struct open_plan {
    struct nb_boot_config boot;
    struct nb_job_config job;
    const char *address;
    PyObject *listener; // borrowed; NULL: none
    int cpus[CPU_SETSIZE];
};

static int parse(PyObject *args, PyObject *kwargs, struct open_args *in) {
    static const char *const keywords[] = {
        "rank",      "size",        "secret",        "listener",     "address",
        "tag",       "transport",   "streams",       "provider",     "library",
        "ifname",    "ports",       "segment_bytes", "timeout_s",    "start_timeout_s",
        "stall_s",   "stall_end_s", "recorder",      "shm",          "host",
        "algorithm", "cpus",        "congestion",    "cuda_library", "cuda_gather_bytes",
        NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$OOOOOOOOOOOOOOOOOOOOOOO:Comm", (char **)keywords, &in->rank,
                                     &in->size, &in->secret, &in->listener, &in->address, &in->tag, &in->transport,
                                     &in->streams, &in->provider, &in->library, &in->ifname, &in->ports,
                                     &in->segment_bytes, &in->timeout, &in->start_timeout, &in->stall, &in->stall_end,
                                     &in->recorder, &in->shm, &in->host, &in->algorithm, &in->cpus, &in->congestion,
                                     &in->cuda_library, &in->cuda_gather_bytes)) {
        return -1;
    }
    if (in->secret == NULL) {
        PyErr_SetString(PyExc_TypeError, "Comm() needs the keyword argument 'secret'");
        return -1;
    }
    return 0;
}

// Gets the text of a string argument, valid as long as self->strings; `missing` if it is None or not given.
static int get_text(struct core_comm *self, const char *name, PyObject *value, const char *missing, const char **out) {
    *out = missing;
    if (value == NULL || value == Py_None) {
        return 0;
    }
    if (!PyUnicode_Check(value)) {
        PyErr_Format(PyExc_TypeError, "%s must be a string, not %R", name, value);
        return -1;
    }
    Py_ssize_t bytes;
    const char *text = PyUnicode_AsUTF8AndSize(value, &bytes);
    if (text == NULL || PyList_Append(self->strings, value) < 0) {
        return -1;
    }
    if (strlen(text) != (size_t)bytes) {
        PyErr_Format(PyExc_ValueError, "%s must not hold a null character: %R", name, value);
        return -1;
    }
    *out = text;
    return 0;
}

// Raises ValueError naming the available transports.
static int refuse_transport(const char *name) {
    char known[128] = "";
    for (int i = 0; nb_transports[i] != NULL; i++) {
        size_t used = strlen(known);
        PyOS_snprintf(known + used, sizeof known - used, "%s\"%s\"", i > 0 ? ", " : "", nb_transports[i]->name);
    }
    PyErr_Format(PyExc_ValueError, "transport must be one of %s, not \"%s\"", known, name);
    return -1;
}

static int get_algorithm(struct core_comm *self, const struct open_args *in, struct open_plan *plan) {
    const char *name;
    if (get_text(self, "algorithm", in->algorithm, "auto", &name) < 0) {
        return -1;
    }
    int found = nb_algorithm_find(name);
    if (found < 0) {
        char names[128];
        nb_algorithm_names(names, sizeof names);
        PyErr_Format(PyExc_ValueError, "algorithm must be %s, not \"%s\"", names, name);
        return -1;
    }
    plan->job.algorithm = (enum nb_algorithm_id)found;
    return 0;
}

static int get_texts(struct core_comm *self, const struct open_args *in, struct open_plan *plan) {
    if (get_text(self, "address", in->address, NULL, &plan->address) < 0 ||
        get_text(self, "tag", in->tag, "", &plan->boot.tag) < 0 ||
        get_text(self, "transport", in->transport, "tcp", &plan->job.transport) < 0 ||
        get_text(self, "provider", in->provider, NULL, &plan->job.provider) < 0 ||
        get_text(self, "library", in->library, NULL, &plan->job.library) < 0 ||
        get_text(self, "congestion", in->congestion, NULL, &plan->job.congestion) < 0 ||
        get_text(self, "cuda_library", in->cuda_library, NULL, &plan->job.cuda_library) < 0 ||
        get_text(self, "ifname", in->ifname, NULL, &plan->boot.ifname) < 0) {
        return -1;
    }
    plan->job.ifname = plan->boot.ifname;
    self->other_driver = plan->job.cuda_library != NULL;
    if (get_algorithm(self, in, plan) < 0) {
        return -1;
    }
    if (nb_transport_find(plan->job.transport) == NULL) {
        return refuse_transport(plan->job.transport);
    }
    return 0;
}

static int get_sharing(struct core_comm *self, const struct open_args *in, struct open_plan *plan) {
    static const char *const modes[] = {[NB_SHM_OFF] = "0", [NB_SHM_AUTO] = "auto", [NB_SHM_REQUIRED] = "1"};
    const char *mode;
    char *host;
    Py_ssize_t bytes = 0;
    if (get_text(self, "shm", in->shm, "auto", &mode) < 0) {
        return -1;
    }
    int found = NB_SHM_REQUIRED;
    while (found >= 0 && strcmp(modes[found], mode) != 0) {
        found--;
    }
    if (found < 0) {
        PyErr_Format(PyExc_ValueError, "shm must be \"auto\", \"0\" or \"1\", not \"%s\"", mode);
        return -1;
    }
    plan->job.shm = (enum nb_shm_mode)found;
    if (in->host == NULL || in->host == Py_None) {
        plan->job.shm = found == NB_SHM_AUTO ? NB_SHM_OFF : plan->job.shm;
        return 0;
    }
    if (PyBytes_AsStringAndSize(in->host, &host, &bytes) < 0) {
        return -1;
    }
    if (bytes != NB_HOST_BYTES) {
        PyErr_Format(PyExc_ValueError, "host must have %d bytes, not %zd", NB_HOST_BYTES, bytes);
        return -1;
    }
    memcpy(plan->job.host, host, NB_HOST_BYTES);
    return 0;
}

static int optional_long(const char *name, PyObject *value, long high, long *out) {
    *out = 0;
    return value == NULL ? 0 : core_get_long(name, value, 0, high, out);
}

static int optional_timeout(const char *name, PyObject *value, int low_ms, int missing_ms, int *out_ms) {
    *out_ms = missing_ms;
    return value == NULL ? 0 : core_get_timeout(name, value, low_ms, out_ms);
}

static int get_numbers(struct core_comm *self, const struct open_args *in, struct open_plan *plan) {
    long rank;
    long size;
    long streams;
    long segment;
    long gathered;
    if (core_get_long("size", in->size, 1, INT32_MAX, &size) < 0 ||
        core_get_long("rank", in->rank, 0, size - 1, &rank) < 0 ||
        optional_long("streams", in->streams, NB_LANES_MAX, &streams) < 0 ||
        optional_long("segment_bytes", in->segment_bytes, NB_SEGMENT_MAX, &segment) < 0 ||
        optional_long("cuda_gather_bytes", in->cuda_gather_bytes, INT32_MAX, &gathered) < 0 ||
        core_get_ports(in->ports, &plan->boot.ports) < 0 ||
        optional_timeout("timeout_s", in->timeout, 1, 30000, &plan->job.timeout_ms) < 0 ||
        optional_timeout("start_timeout_s", in->start_timeout, 1, plan->job.timeout_ms, &plan->job.start_ms) < 0 ||
        optional_timeout("stall_s", in->stall, 0, 60000, &plan->job.stall_ms) < 0 ||
        optional_timeout("stall_end_s", in->stall_end, 0, 0, &plan->job.stall_end_ms) < 0) {
        return -1;
    }
    self->rank = (int)rank;
    self->size = (int)size;
    plan->boot.rank = self->rank;
    plan->boot.size = self->size;
    plan->job.streams = (int)streams;
    plan->job.segment_bytes = (size_t)segment;
    plan->job.device_gather_bytes = (size_t)gathered;
    plan->job.ports = plan->boot.ports;
    plan->boot.timeout_ms = plan->job.start_ms;
    return 0;
}

static int get_cpus(PyObject *cpus, struct open_plan *plan) {
    long cpu;
    if (cpus == NULL) {
        return 0;
    }
    if (!PyTuple_Check(cpus) || PyTuple_Size(cpus) > CPU_SETSIZE) {
        PyErr_Format(PyExc_TypeError, "cpus must be a tuple of at most %d numbers, not %R", CPU_SETSIZE, cpus);
        return -1;
    }
    plan->job.cpu_count = (int)PyTuple_Size(cpus);
    for (int i = 0; i < plan->job.cpu_count; i++) {
        if (core_get_long("cpus", PyTuple_GetItem(cpus, i), 0, CPU_SETSIZE - 1, &cpu) < 0) {
            return -1;
        }
        plan->cpus[i] = (int)cpu;
    }
    plan->job.cpus = plan->cpus;
    return 0;
}

static int get_secret(struct core_comm *self, PyObject *secret, struct nb_boot_config *config) {
    char *bytes;
    Py_ssize_t count;
    if (PyBytes_AsStringAndSize(secret, &bytes, &count) < 0) {
        return -1;
    }
    if (config->size > 1 && (count < 16 || count > NB_SECRET_MAX)) {
        PyErr_Format(PyExc_ValueError, "secret must have 16 to %d bytes, not %zd", NB_SECRET_MAX, count);
        return -1;
    }
    config->secret = (const unsigned char *)bytes;
    config->secret_bytes = (size_t)count;
    return PyList_Append(self->strings, secret);
}

// Checks that rank 0 passes the listener, and every other rank the address.
static int get_rendezvous(PyObject *listener, const struct core_state *state, struct open_plan *plan) {
    if (listener != NULL && listener != Py_None) {
        if (!Py_IS_TYPE(listener, state->types[CORE_LISTENER])) {
            PyErr_Format(PyExc_TypeError, "listener must be a Listener, not %R", listener);
            return -1;
        }
        plan->listener = listener;
    }
    int rank = plan->boot.rank;
    if (plan->boot.size == 1) {
        plan->listener = NULL;
        plan->address = NULL;
        return 0;
    }
    if (rank == 0 && plan->listener == NULL) {
        PyErr_SetString(PyExc_ValueError, "listener must be given on rank 0 of more than one rank");
        return -1;
    }
    if (rank > 0 && (plan->address == NULL || plan->listener != NULL)) {
        PyErr_Format(PyExc_ValueError, "address of rank 0, and no listener, must be given on rank %d", rank);
        return -1;
    }
    if (rank == 0) {
        plan->address = NULL;
        return 0;
    }
    struct nb_sockaddr addr;
    struct nb_error err = {0};
    int rc = nb_sock_parse(plan->address, &addr, &err);
    if (rc < 0) {
        core_raise(state, rc, &err);
        return -1;
    }
    return 0;
}

static int get_recorder(struct core_comm *self, PyObject *recorder, const struct core_state *state,
                        struct open_plan *plan) {
    if (recorder == NULL || recorder == Py_None) {
        return 0;
    }
    if (!Py_IS_TYPE(recorder, state->types[CORE_RECORDER])) {
        PyErr_Format(PyExc_TypeError, "recorder must be a Recorder, not %R", recorder);
        return -1;
    }
    plan->job.ring = core_recorder_acquire(recorder);
    if (plan->job.ring == NULL) {
        return -1;
    }
    self->recorder = Py_NewRef(recorder);
    self->recording = true;
    return 0;
}

// Joins, measures the clock and opens the job. Runs without the GIL.
static int join(struct core_comm *self, struct open_plan *plan, struct nb_listener *listener, struct nb_error *err) {
    int64_t round_trip_ns = 0;
    struct nb_boot boot = {0};
    int rc = nb_boot_join(&boot, &plan->boot, listener, plan->address, err);
    if (rc < 0) {
        return rc;
    }
    rc = nb_boot_clock(&boot, &self->clock_offset_ns, &round_trip_ns, err);
    if (rc == 0) {
        nb_ring_put(plan->job.ring, NB_EV_CLOCK, 0, (uint64_t)self->clock_offset_ns, (uint64_t)round_trip_ns, 0, 0, 0);
        plan->job.boot = &boot;
        plan->job.clock_offset_ns = self->clock_offset_ns;
        rc = nb_job_open(&self->job, &plan->job, err);
        plan->job.boot = NULL;
    }
    nb_boot_close(&boot); // closes what the job has not taken over
    return rc;
}

// Handling of signals while the ranks join without the GIL.
struct signals {
    PyThreadState *thread;
    bool raised; // a handler has raised: the exception is set
};

// An interrupt of the join: runs Python's signal handlers. True if one has raised.
static bool signals_pending(void *ctx) {
    struct signals *signals = ctx;
    if (!signals->raised) {
        PyEval_RestoreThread(signals->thread);
        signals->raised = PyErr_CheckSignals() < 0;
        signals->thread = PyEval_SaveThread();
    }
    return signals->raised;
}

static int connect_all(struct core_comm *self, struct open_plan *plan, const struct core_state *state) {
    struct signals signals = {.raised = false};
    struct nb_interrupt interrupt = {.pending = signals_pending, .ctx = &signals};
    struct nb_listener *listener = NULL;
    if (plan->listener != NULL) {
        listener = core_listener_acquire(plan->listener);
        if (listener == NULL) {
            return -1;
        }
    }
    struct nb_error err = {0};
    plan->boot.interrupt = &interrupt;
    signals.thread = PyEval_SaveThread();
    int rc = join(self, plan, listener, &err);
    PyEval_RestoreThread(signals.thread);
    plan->boot.interrupt = NULL;
    if (listener != NULL) {
        core_listener_release(plan->listener);
    }
    if (rc < 0 && !signals.raised) {
        core_raise(state, rc, &err);
    }
    return rc < 0 || signals.raised ? -1 : 0;
}

int core_comm_open(struct core_comm *self, PyObject *args, PyObject *kwargs) {
    const struct core_state *state = core_state_of((PyObject *)self);
    struct open_args in = {0};
    struct open_plan plan = {0};
    self->strings = PyList_New(0);
    if (self->strings == NULL || parse(args, kwargs, &in) < 0 || get_numbers(self, &in, &plan) < 0 ||
        get_texts(self, &in, &plan) < 0 || get_sharing(self, &in, &plan) < 0 || get_cpus(in.cpus, &plan) < 0 ||
        get_secret(self, in.secret, &plan.boot) < 0 || get_rendezvous(in.listener, state, &plan) < 0 ||
        get_recorder(self, in.recorder, state, &plan) < 0) {
        return -1;
    }
    int rc = connect_all(self, &plan, state);
    if (rc < 0 && self->recording) {
        self->recording = false;
        core_recorder_release(self->recorder);
    }
    return rc;
}
