// Timing: measures kernels of this host and of its GPU, and stamps at given times; for cost tables and replays.
#include "py/core.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#include "base/clock.h"
#include "coll/reduce.h"
#include "cuda/driver.h"
#include "cuda/kernels.h"

enum { SAMPLES_MAX = 10000, SLICE_NS = 100 * 1000 * 1000, FINEST_SLACK_NS = 1 };

// One kernel, called on pieces of `bytes` that cycle through both buffers. kernel NULL: a copy.
struct load {
    nb_reduce_fn kernel;
    char *to;
    const char *from;
    size_t bytes;
    size_t elements;
    size_t pieces;
    int64_t least_ns;
};

struct sample {
    int64_t calls;
    int64_t ns;
};

static void call(const struct load *load, size_t piece) {
    char *to = load->to + piece * load->bytes;
    const char *from = load->from + piece * load->bytes;
    if (load->kernel != NULL) {
        load->kernel(to, from, load->elements);
    } else {
        memcpy(to, from, load->bytes);
        __asm__ volatile("" : : "r"(to) : "memory"); // makes the compiler keep the copy
    }
}

// Calls the kernel until least_ns have passed, with as few reads of the clock as possible.
static struct sample take_sample(const struct load *load, size_t *piece) {
    struct sample found = {0};
    int64_t begin = nb_now_ns();
    for (int64_t batch = 1; found.ns < load->least_ns || found.calls == 0; batch *= 2) {
        for (int64_t i = 0; i < batch; i++) {
            call(load, *piece);
            *piece = *piece + 1 < load->pieces ? *piece + 1 : 0;
        }
        found.calls += batch;
        found.ns = nb_now_ns() - begin;
    }
    return found;
}

static PyObject *measure(const struct load *load, long samples) {
    struct sample *found = calloc((size_t)samples, sizeof(*found));
    if (found == NULL) {
        return PyErr_NoMemory();
    }
    size_t piece = 0;
    PyThreadState *saved = PyEval_SaveThread();
    (void)take_sample(load, &piece); // warms up pages, caches and the core's frequency
    for (long i = 0; i < samples; i++) {
        found[i] = take_sample(load, &piece);
    }
    PyEval_RestoreThread(saved);
    PyObject *list = PyList_New(samples);
    for (long i = 0; list != NULL && i < samples; i++) {
        PyObject *pair = Py_BuildValue("(LL)", (long long)found[i].calls, (long long)found[i].ns);
        if (pair == NULL || PyList_SetItem(list, i, pair) < 0) {
            Py_CLEAR(list);
        }
    }
    free(found);
    return list;
}

// The arguments of both functions, except the kernel.
struct request {
    PyObject *to;
    PyObject *from;
    Py_ssize_t bytes;
    long samples;
    long long least_ns;
};

static PyObject *measure_objects(const struct request *request, nb_reduce_fn kernel, size_t element) {
    struct core_memory to = {0};
    struct core_memory from = {0};
    PyObject *result = NULL;
    if (request->bytes <= 0 || (size_t)request->bytes % element != 0 || request->samples < 1 ||
        request->samples > SAMPLES_MAX || request->least_ns < 0 || request->least_ns > 1000LL * SLICE_NS) {
        PyErr_Format(PyExc_ValueError,
                     "%zd bytes in %ld samples of %lld ns: must be elements of %zu bytes, 1 to %d, "
                     "0 to %lld",
                     request->bytes, request->samples, request->least_ns, element, SAMPLES_MAX, 1000LL * SLICE_NS);
        return NULL;
    }
    if (core_memory_parse_host(&to, request->to, true, 1) == 0 &&
        core_memory_parse_host(&from, request->from, false, 1) == 0) {
        size_t least = to.bytes < from.bytes ? to.bytes : from.bytes;
        if (to.count != 1 || from.count != 1 || least < (size_t)request->bytes) {
            PyErr_Format(PyExc_ValueError, "destination and source must be one piece each, of at least %zd bytes",
                         request->bytes);
        } else {
            const struct load load = {
                .kernel = kernel,
                .to = to.segments[0].base,
                .from = from.segments[0].base,
                .bytes = (size_t)request->bytes,
                .elements = (size_t)request->bytes / element,
                .pieces = least / (size_t)request->bytes,
                .least_ns = request->least_ns,
            };
            result = measure(&load, request->samples);
        }
    }
    core_memory_release(&from);
    core_memory_release(&to);
    return result;
}

PyObject *core_reduce_times(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs) {
    static const char *const keywords[] = {"destination", "source", "nbytes", "dtype", "samples", "least_ns", NULL};
    struct request request = {.samples = 1};
    PyObject *dtype;
    int number;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOnO|lL:reduce_times", (char **)keywords, &request.to,
                                     &request.from, &request.bytes, &dtype, &request.samples, &request.least_ns) ||
        core_get_dtype(dtype, &number) < 0) {
        return NULL;
    }
    nb_reduce_fn kernel = nb_reduce_kernel(nb_reduce_best(), number, NB_SUM);
    if (kernel == NULL) {
        PyErr_Format(PyExc_ValueError, "dtype %s cannot be added", nb_dtype_name(number));
        return NULL;
    }
    return measure_objects(&request, kernel, nb_dtype_size(number));
}

PyObject *core_copy_times(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs) {
    static const char *const keywords[] = {"destination", "source", "nbytes", "samples", "least_ns", NULL};
    struct request request = {.samples = 1};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOn|lL:copy_times", (char **)keywords, &request.to, &request.from,
                                     &request.bytes, &request.samples, &request.least_ns)) {
        return NULL;
    }
    return measure_objects(&request, NULL, 1);
}

// One kernel of the GPU, called on the same memory each time, on a stream of its own.
struct gpu_load {
    struct nb_cuda_device device;
    struct nb_cuda_kernels kernels;
    struct nb_cuda_work work;
    struct CUstream_st *stream;
    struct CUevent_st *begin;
    struct CUevent_st *end;
};

static int gpu_load_open(struct gpu_load *load, struct nb_error *err) {
    const struct nb_cuda_device *device = &load->device;
    const struct nb_cuda_driver *driver = device->driver;
    int rc = nb_cuda_kernels_open(&load->kernels, device, nb_cuda_image(), err);
    if (rc == 0) {
        rc = nb_cuda_check(device, driver->stream_create(&load->stream, NB_CUDA_STREAM_NON_BLOCKING), "cuStreamCreate",
                           0, err);
    }
    if (rc == 0) {
        rc = nb_cuda_check(device, driver->event_create(&load->begin, 0), "cuEventCreate", 0, err);
    }
    if (rc == 0) {
        rc = nb_cuda_check(device, driver->event_create(&load->end, 0), "cuEventCreate", 0, err);
    }
    return rc;
}

static void gpu_load_close(struct gpu_load *load) {
    const struct nb_cuda_driver *driver = load->device.driver;
    if (load->end != NULL) {
        (void)driver->event_destroy(load->end);
    }
    if (load->begin != NULL) {
        (void)driver->event_destroy(load->begin);
    }
    if (load->stream != NULL) {
        (void)driver->stream_destroy(load->stream);
    }
    nb_cuda_kernels_close(&load->kernels);
}

// Writes the mean ns of a call to `ns`.
static int gpu_sample(const struct gpu_load *load, long calls, double *ns, struct nb_error *err) {
    const struct nb_cuda_device *device = &load->device;
    const struct nb_cuda_driver *driver = device->driver;
    float ms = 0.0F;
    int rc = nb_cuda_check(device, driver->event_record(load->begin, load->stream), "cuEventRecord", 0, err);
    for (long i = 0; rc == 0 && i < calls; i++) {
        rc = nb_cuda_launch(&load->kernels, load->stream, &load->work, err);
    }
    if (rc == 0) {
        rc = nb_cuda_check(device, driver->event_record(load->end, load->stream), "cuEventRecord", 0, err);
    }
    if (rc == 0) {
        rc = nb_cuda_check(device, driver->stream_synchronize(load->stream), "cuStreamSynchronize", 0, err);
    }
    if (rc == 0) {
        rc = nb_cuda_check(device, driver->event_elapsed(&ms, load->begin, load->end), "cuEventElapsedTime", 0, err);
    }
    *ns = 1e6 * (double)ms / (double)calls;
    return rc;
}

// What to time on which device.
struct gpu_request {
    const char *library;
    int device;
    struct nb_cuda_work work;
    long samples;
    long calls; // of a sample
};

static int gpu_measure(const struct gpu_request *request, double *ns, struct nb_error *err) {
    struct nb_cuda_driver driver = {0};
    struct gpu_load load = {.work = request->work};
    int rc = nb_cuda_driver_open(&driver, request->library, err);
    if (rc == 0) {
        rc = nb_cuda_device_open(&load.device, &driver, request->device, err);
    }
    if (rc == 0 && (rc = nb_cuda_enter(&load.device, err)) == 0) {
        rc = gpu_load_open(&load, err);
        if (rc == 0) {
            rc = gpu_sample(&load, 1, &ns[0], err); // loads the kernel
        }
        for (long i = 0; rc == 0 && i < request->samples; i++) {
            rc = gpu_sample(&load, request->calls, &ns[i], err);
        }
        gpu_load_close(&load);
        nb_cuda_leave(&load.device);
    }
    nb_cuda_device_close(&load.device);
    return rc;
}

PyObject *core_floats(const double *values, long count) {
    PyObject *list = PyList_New(count);
    for (long i = 0; list != NULL && i < count; i++) {
        PyObject *each = PyFloat_FromDouble(values[i]);
        if (each == NULL || PyList_SetItem(list, i, each) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

PyObject *core_kernel_times(PyObject *module, PyObject *args, PyObject *kwargs) {
    static const char *const keywords[] = {"kernel",  "device", "destination", "source", "count",
                                           "samples", "calls",  "library",     NULL};
    struct nb_error err = {0};
    struct gpu_request request = {.work.factor = 1.0, .samples = 1, .calls = 1};
    struct nb_cuda_work *work = &request.work;
    const char *kernel;
    Py_ssize_t count;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "siKKn|llz:kernel_times", (char **)keywords, &kernel,
                                     &request.device, &work->to, &work->from, &count, &request.samples, &request.calls,
                                     &request.library)) {
        return NULL;
    }
    const long samples = request.samples;
    const long calls = request.calls;
    int number = nb_cuda_kernel_number(kernel);
    if (number < 0 || count < 1 || samples < 1 || samples > SAMPLES_MAX || calls < 1 || calls > SAMPLES_MAX) {
        return PyErr_Format(PyExc_ValueError,
                            "%s of %zd elements, %ld samples of %ld calls: no such kernel, or not 1 to %d", kernel,
                            count, samples, calls, SAMPLES_MAX);
    }
    work->kernel = (enum nb_cuda_kernel)number;
    work->count = (size_t)count;
    double *ns = calloc((size_t)samples, sizeof(*ns));
    if (ns == NULL) {
        return PyErr_NoMemory();
    }
    PyThreadState *saved = PyEval_SaveThread();
    int rc = gpu_measure(&request, ns, &err);
    PyEval_RestoreThread(saved);
    PyObject *list = rc < 0 ? core_raise(PyModule_GetState(module), rc, &err) : core_floats(ns, samples);
    free(ns);
    return list;
}

// The events to stamp, and their times.
struct schedule {
    int kind;
    bool spin;
    Py_ssize_t count;
    int64_t *times_ns;
    uint64_t *keys;
};

static int parse_schedule(struct schedule *schedule, PyObject *times, PyObject *keys) {
    schedule->count = PySequence_Size(times);
    if (schedule->count < 0 || PySequence_Size(keys) != schedule->count) {
        if (PyErr_Occurred() == NULL) {
            PyErr_SetString(PyExc_ValueError, "keys and times_ns must have the same length");
        }
        return -1;
    }
    size_t room = schedule->count > 0 ? (size_t)schedule->count : 1;
    schedule->times_ns = calloc(room, sizeof(*schedule->times_ns));
    schedule->keys = calloc(room, sizeof(*schedule->keys));
    if (schedule->times_ns == NULL || schedule->keys == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < schedule->count; i++) {
        PyObject *time = PySequence_GetItem(times, i);
        PyObject *key = PySequence_GetItem(keys, i);
        schedule->times_ns[i] = time != NULL ? PyLong_AsLongLong(time) : 0;
        schedule->keys[i] = key != NULL && PyErr_Occurred() == NULL ? PyLong_AsUnsignedLongLong(key) : 0;
        Py_XDECREF(time);
        Py_XDECREF(key);
        if (PyErr_Occurred() != NULL) {
            return -1;
        }
    }
    return 0;
}

static void wait_until(int64_t until_ns, bool spin) {
    const struct timespec at = {until_ns / 1000000000, until_ns % 1000000000};
    while (nb_now_ns() < until_ns) {
        if (!spin) {
            clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL); // EINTR: reads the clock again
        }
    }
}

// Plays until the next check for signals, at most SLICE_NS away. Returns the number of stamps so far.
static Py_ssize_t stamp_slice(const struct schedule *schedule, Py_ssize_t at, struct nb_ring *ring) {
    int64_t slice_end = nb_now_ns() + SLICE_NS;
    for (; at < schedule->count; at++) {
        if (schedule->times_ns[at] > slice_end) {
            wait_until(slice_end, schedule->spin);
            return at;
        }
        wait_until(schedule->times_ns[at], schedule->spin);
        nb_ring_put(ring, (enum nb_event_kind)schedule->kind, schedule->keys[at], 0, 0, 0, 0, 0);
    }
    return at;
}

static int stamp_all(const struct schedule *schedule, struct nb_ring *ring) {
    int slack = prctl(PR_GET_TIMERSLACK);
    prctl(PR_SET_TIMERSLACK, FINEST_SLACK_NS);
    int rc = 0;
    for (Py_ssize_t at = 0; at < schedule->count && rc == 0;) {
        PyThreadState *saved = PyEval_SaveThread();
        at = stamp_slice(schedule, at, ring);
        PyEval_RestoreThread(saved);
        rc = PyErr_CheckSignals();
    }
    prctl(PR_SET_TIMERSLACK, slack);
    return rc;
}

PyObject *core_stamp_at(PyObject *module, PyObject *args, PyObject *kwargs) {
    static const char *const keywords[] = {"recorder", "kind", "times_ns", "keys", "spin", NULL};
    PyObject *recorder;
    PyObject *times;
    PyObject *keys;
    int spin = 0;
    struct schedule schedule = {0};
    const struct core_state *state = PyModule_GetState(module);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!iOO|p:stamp_at", (char **)keywords, state->types[CORE_RECORDER],
                                     &recorder, &schedule.kind, &times, &keys, &spin)) {
        return NULL;
    }
    schedule.spin = spin != 0;
    if (schedule.kind <= NB_EV_NONE || schedule.kind >= NB_EV_END) {
        return PyErr_Format(PyExc_ValueError, "kind must be one of EVENTS, not %d", schedule.kind);
    }
    int rc = parse_schedule(&schedule, times, keys);
    struct nb_ring *ring = rc == 0 ? core_recorder_acquire(recorder) : NULL;
    if (ring != NULL) {
        rc = stamp_all(&schedule, ring);
        core_recorder_release(recorder);
    }
    free(schedule.times_ns);
    free(schedule.keys);
    return ring != NULL && rc == 0 ? Py_NewRef(Py_None) : NULL;
}
