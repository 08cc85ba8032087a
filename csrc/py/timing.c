// How long do the kernels of this host take? And what happens at a given moment, stamped: for tables and replays.
#include "py/core.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#include "base/clock.h"
#include "coll/reduce.h"

enum { SAMPLES_MAX = 10000, SLICE_NS = 100 * 1000 * 1000, FINEST_SLACK_NS = 1 };

// One kernel, called with pieces of `bytes` that take turns through all of the two memories. kernel NULL: a copy.
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
        __asm__ volatile("" : : "r"(to) : "memory"); // the copy is to be made, though nobody reads it
    }
}

// Calls until least_ns have passed, looking at the clock as seldom as that allows.
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
    (void)take_sample(load, &piece); // pages, caches, clocks of the core
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

// The arguments of both functions, but for the kernel.
struct asked {
    PyObject *to;
    PyObject *from;
    Py_ssize_t bytes;
    long samples;
    long long least_ns;
};

static PyObject *measure_objects(const struct asked *asked, nb_reduce_fn kernel, size_t element) {
    struct core_memory to = {0};
    struct core_memory from = {0};
    PyObject *result = NULL;
    if (asked->bytes <= 0 || (size_t)asked->bytes % element != 0 || asked->samples < 1 ||
        asked->samples > SAMPLES_MAX || asked->least_ns < 0 || asked->least_ns > 1000LL * SLICE_NS) {
        PyErr_Format(PyExc_ValueError,
                     "%zd bytes in %ld samples of %lld ns: must be elements of %zu bytes, 1 to %d, "
                     "0 to %lld",
                     asked->bytes, asked->samples, asked->least_ns, element, SAMPLES_MAX, 1000LL * SLICE_NS);
        return NULL;
    }
    if (core_memory_parse(&to, asked->to, true, 1) == 0 && core_memory_parse(&from, asked->from, false, 1) == 0) {
        size_t least = to.bytes < from.bytes ? to.bytes : from.bytes;
        if (to.count != 1 || from.count != 1 || least < (size_t)asked->bytes) {
            PyErr_Format(PyExc_ValueError, "destination and source must be one piece each, of at least %zd bytes",
                         asked->bytes);
        } else {
            const struct load load = {
                .kernel = kernel,
                .to = to.segments[0].base,
                .from = from.segments[0].base,
                .bytes = (size_t)asked->bytes,
                .elements = (size_t)asked->bytes / element,
                .pieces = least / (size_t)asked->bytes,
                .least_ns = asked->least_ns,
            };
            result = measure(&load, asked->samples);
        }
    }
    core_memory_release(&from);
    core_memory_release(&to);
    return result;
}

PyObject *core_reduce_times(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs) {
    static const char *const keywords[] = {"destination", "source", "nbytes", "dtype", "samples", "least_ns", NULL};
    struct asked asked = {.samples = 1};
    PyObject *dtype;
    int number;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOnO|lL:reduce_times", (char **)keywords, &asked.to, &asked.from,
                                     &asked.bytes, &dtype, &asked.samples, &asked.least_ns) ||
        core_get_dtype(dtype, &number) < 0) {
        return NULL;
    }
    nb_reduce_fn kernel = nb_reduce_kernel(nb_reduce_best(), number, NB_SUM);
    if (kernel == NULL) {
        PyErr_Format(PyExc_ValueError, "dtype %s cannot be added", nb_dtype_name(number));
        return NULL;
    }
    return measure_objects(&asked, kernel, nb_dtype_size(number));
}

PyObject *core_copy_times(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs) {
    static const char *const keywords[] = {"destination", "source", "nbytes", "samples", "least_ns", NULL};
    struct asked asked = {.samples = 1};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOn|lL:copy_times", (char **)keywords, &asked.to, &asked.from,
                                     &asked.bytes, &asked.samples, &asked.least_ns)) {
        return NULL;
    }
    return measure_objects(&asked, NULL, 1);
}

// What is to be stamped, and when.
struct score {
    int kind;
    bool spin;
    Py_ssize_t count;
    int64_t *times_ns;
    uint64_t *keys;
};

static int parse_score(struct score *score, PyObject *times, PyObject *keys) {
    score->count = PySequence_Size(times);
    if (score->count < 0 || PySequence_Size(keys) != score->count) {
        if (PyErr_Occurred() == NULL) {
            PyErr_SetString(PyExc_ValueError, "as many keys as times");
        }
        return -1;
    }
    size_t room = score->count > 0 ? (size_t)score->count : 1;
    score->times_ns = calloc(room, sizeof(*score->times_ns));
    score->keys = calloc(room, sizeof(*score->keys));
    if (score->times_ns == NULL || score->keys == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < score->count; i++) {
        PyObject *time = PySequence_GetItem(times, i);
        PyObject *key = PySequence_GetItem(keys, i);
        score->times_ns[i] = time != NULL ? PyLong_AsLongLong(time) : 0;
        score->keys[i] = key != NULL && PyErr_Occurred() == NULL ? PyLong_AsUnsignedLongLong(key) : 0;
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
            clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL); // EINTR: looks at the clock again
        }
    }
}

// Goes on until the next moment to look for signals, at most SLICE_NS away: the number of stamps so far.
static Py_ssize_t play_slice(const struct score *score, Py_ssize_t at, struct nb_ring *ring) {
    int64_t slice_end = nb_now_ns() + SLICE_NS;
    for (; at < score->count; at++) {
        if (score->times_ns[at] > slice_end) {
            wait_until(slice_end, score->spin);
            return at;
        }
        wait_until(score->times_ns[at], score->spin);
        nb_ring_put(ring, (enum nb_event_kind)score->kind, score->keys[at], 0, 0, 0, 0, 0);
    }
    return at;
}

static int play(const struct score *score, struct nb_ring *ring) {
    int slack = prctl(PR_GET_TIMERSLACK);
    prctl(PR_SET_TIMERSLACK, FINEST_SLACK_NS);
    int rc = 0;
    for (Py_ssize_t at = 0; at < score->count && rc == 0;) {
        PyThreadState *saved = PyEval_SaveThread();
        at = play_slice(score, at, ring);
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
    struct score score = {0};
    const struct core_state *state = PyModule_GetState(module);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!iOO|p:stamp_at", (char **)keywords, state->types[CORE_RECORDER],
                                     &recorder, &score.kind, &times, &keys, &spin)) {
        return NULL;
    }
    score.spin = spin != 0;
    if (score.kind <= NB_EV_NONE || score.kind >= NB_EV_END) {
        return PyErr_Format(PyExc_ValueError, "kind must be one of EVENTS, not %d", score.kind);
    }
    int rc = parse_score(&score, times, keys);
    struct nb_ring *ring = rc == 0 ? core_recorder_take(recorder) : NULL;
    if (ring != NULL) {
        rc = play(&score, ring);
        core_recorder_drop(recorder);
    }
    free(score.times_ns);
    free(score.keys);
    return ring != NULL && rc == 0 ? Py_NewRef(Py_None) : NULL;
}
