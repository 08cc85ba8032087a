// The what-if engine over arrays: buffers in, buffers filled.
#include "py/core.h"

#include <errno.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "sim/shape.h"
#include "sim/sim.h"

enum { ARRAYS_MAX = 16, NUMBERS = 11, OP_FIELDS = sizeof(struct nb_sim_op) / sizeof(int64_t) };

struct arrays {
    Py_buffer views[ARRAYS_MAX];
    int count;
};

// Its elements, or NULL with an exception; *count: how many.
static void *take(struct arrays *arrays, PyObject *object, const char *name, size_t element, Py_ssize_t *count) {
    Py_buffer *view = &arrays->views[arrays->count];
    bool writable = count == NULL;
    if (PyObject_GetBuffer(object, view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    arrays->count++;
    if ((size_t)view->len % element != 0 || (uintptr_t)view->buf % element != 0) {
        PyErr_Format(PyExc_ValueError, "%s has %zd bytes, no array of elements of %zu", name, view->len, element);
        return NULL;
    }
    if (count != NULL) {
        *count = view->len / (Py_ssize_t)element;
    }
    return view->buf;
}

static int need(const char *name, Py_ssize_t count, int64_t wanted) {
    if (count >= wanted) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "%s has %zd elements of %lld", name, count, (long long)wanted);
    return -1;
}

static int parse_program(struct arrays *arrays, PyObject *tuple, struct nb_sim_program *program, Py_ssize_t *items) {
    PyObject *object[5];
    Py_ssize_t starts;
    Py_ssize_t codes;
    Py_ssize_t tensors;
    Py_ssize_t kinds;
    if (!PyArg_ParseTuple(tuple, "OOOOOi:program", &object[0], &object[1], &object[2], &object[3], &object[4],
                          &program->steps)) {
        return -1;
    }
    program->starts = take(arrays, object[0], "starts", sizeof(int64_t), &starts);
    program->work_ns = program->starts != NULL ? take(arrays, object[1], "work_ns", sizeof(int64_t), items) : NULL;
    program->codes = program->work_ns != NULL ? take(arrays, object[2], "codes", sizeof(int32_t), &codes) : NULL;
    program->bytes = program->codes != NULL ? take(arrays, object[3], "bytes", sizeof(int64_t), &tensors) : NULL;
    program->kinds = program->bytes != NULL ? take(arrays, object[4], "kinds", sizeof(int32_t), &kinds) : NULL;
    if (program->kinds == NULL || need("starts", starts, 2) < 0 || need("codes", codes, *items) < 0 ||
        need("kinds", kinds, tensors) < 0) {
        return -1;
    }
    if (starts > INT32_MAX || tensors > INT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "too many ranks or tensors");
        return -1;
    }
    program->ranks = (int)starts - 1;
    program->tensors = (int)tensors;
    for (Py_ssize_t i = 0; i < starts; i++) {
        if (program->starts[i] < (i > 0 ? program->starts[i - 1] : 0) || program->starts[i] > *items) {
            PyErr_Format(PyExc_ValueError, "starts[%zd] is %lld, of %zd items", i, (long long)program->starts[i],
                         *items);
            return -1;
        }
    }
    return 0;
}

static int parse_plan(struct arrays *arrays, PyObject *tuple, int tensors, struct nb_sim_plan *plan) {
    PyObject *object;
    Py_ssize_t count;
    int rule;
    long long fusion_bytes;
    long long cycle_ns;
    if (!PyArg_ParseTuple(tuple, "iiiOLL:plan", &rule, &plan->in_flight, &plan->buckets, &object, &fusion_bytes,
                          &cycle_ns)) {
        return -1;
    }
    plan->rule = (enum nb_sim_rule)rule;
    plan->fusion_bytes = fusion_bytes;
    plan->cycle_ns = cycle_ns;
    plan->bucket_of = take(arrays, object, "bucket_of", sizeof(int32_t), &count);
    bool dynamic = plan->rule == NB_SIM_HOROVOD || plan->rule == NB_SIM_PAPER2020;
    return plan->bucket_of == NULL ? -1 : need("bucket_of", count, dynamic ? 0 : tensors);
}

static int parse_cost(struct arrays *arrays, PyObject *tuple, struct nb_sim_cost *cost) {
    PyObject *object[3];
    Py_ssize_t numbers;
    Py_ssize_t sizes;
    Py_ssize_t times;
    int algorithm;
    int flags;
    if (!PyArg_ParseTuple(tuple, "iiiiiOOO:cost", &algorithm, &cost->size, &cost->ranks_per_host, &cost->contention,
                          &flags, &object[0], &object[1], &object[2])) {
        return -1;
    }
    const double *number = take(arrays, object[0], "numbers", sizeof(double), &numbers);
    cost->add.bytes = number != NULL ? take(arrays, object[1], "table bytes", sizeof(double), &sizes) : NULL;
    cost->add.ns = cost->add.bytes != NULL ? take(arrays, object[2], "table ns", sizeof(double), &times) : NULL;
    if (cost->add.ns == NULL || need("numbers", numbers, NUMBERS) < 0 || need("table ns", times, sizes) < 0 ||
        need("table", INT32_MAX - sizes, 0) < 0) {
        return -1;
    }
    cost->algorithm = (enum nb_sim_algorithm)algorithm;
    cost->pipelined = (flags & 1) != 0;
    cost->whole_sums = (flags & 2) != 0;
    cost->add.clamped = (flags & 4) != 0;
    cost->add.count = (int)sizes;
    double *const fields[NUMBERS] = {&cost->alpha_ns,       &cost->host_alpha_ns, &cost->byte_ns,
                                     &cost->host_byte_ns,   &cost->add_byte_ns,   &cost->copy_byte_ns,
                                     &cost->launch_ns,      &cost->ratio,         &cost->encode_byte_ns,
                                     &cost->decode_byte_ns, &cost->fixed_ns};
    for (int i = 0; i < NUMBERS; i++) {
        *fields[i] = number[i];
    }
    return 0;
}

static int room(const struct arrays *arrays, const char *name, size_t element, int64_t wanted) {
    return need(name, arrays->views[arrays->count - 1].len / (Py_ssize_t)element, wanted);
}

static int parse_result(struct arrays *arrays, PyObject *tuple, const struct nb_sim_program *program, Py_ssize_t items,
                        struct nb_sim_result *result) {
    PyObject *object[5];
    int64_t cells = (int64_t)program->steps * program->tensors;
    if (!PyArg_ParseTuple(tuple, "OOOOO:result", &object[0], &object[1], &object[2], &object[3], &object[4])) {
        return -1;
    }
    if (program->steps < 1 || cells > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "%d steps of %d tensors", program->steps, program->tensors);
        return -1;
    }
    result->reached_ns = take(arrays, object[0], "reached_ns", sizeof(int64_t), NULL);
    if (result->reached_ns == NULL || room(arrays, "reached_ns", sizeof(int64_t), items) < 0) {
        return -1;
    }
    result->passed_ns = take(arrays, object[1], "passed_ns", sizeof(int64_t), NULL);
    if (result->passed_ns == NULL || room(arrays, "passed_ns", sizeof(int64_t), items) < 0) {
        return -1;
    }
    result->ops = take(arrays, object[2], "ops", sizeof(int64_t), NULL);
    if (result->ops == NULL || room(arrays, "ops", sizeof(int64_t), cells * OP_FIELDS) < 0) {
        return -1;
    }
    result->op_of = take(arrays, object[3], "op_of", sizeof(int32_t), NULL);
    if (result->op_of == NULL || room(arrays, "op_of", sizeof(int32_t), cells) < 0) {
        return -1;
    }
    result->submit_ns = take(arrays, object[4], "submit_ns", sizeof(int64_t), NULL);
    return result->submit_ns == NULL ? -1 : room(arrays, "submit_ns", sizeof(int64_t), cells * program->ranks);
}

PyObject *core_simulate(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *tuple[4];
    struct arrays arrays = {.count = 0};
    struct nb_sim_program program = {0};
    struct nb_sim_plan plan = {0};
    struct nb_sim_cost cost = {0};
    struct nb_sim_result result = {0};
    struct nb_error err = {0};
    Py_ssize_t items = 0;
    if (!PyArg_ParseTuple(args, "OOOO:simulate", &tuple[0], &tuple[1], &tuple[2], &tuple[3])) {
        return NULL;
    }
    for (int i = 0; i < 4; i++) {
        if (!PyTuple_Check(tuple[i])) {
            PyErr_Format(PyExc_TypeError, "simulate() takes four tuples, not %R", tuple[i]);
            return NULL;
        }
    }
    int rc = -1;
    bool parsed = parse_program(&arrays, tuple[0], &program, &items) == 0 &&
                  parse_plan(&arrays, tuple[1], program.tensors, &plan) == 0 &&
                  parse_cost(&arrays, tuple[2], &cost) == 0 &&
                  parse_result(&arrays, tuple[3], &program, items, &result) == 0;
    if (parsed) {
        PyThreadState *saved = PyEval_SaveThread();
        rc = nb_sim_run(&program, &plan, &cost, &result, &err);
        PyEval_RestoreThread(saved);
        if (rc == -ENOMEM) {
            PyErr_NoMemory();
        } else if (rc < 0) {
            PyErr_SetString(PyExc_ValueError, err.text);
        }
    }
    for (int i = 0; i < arrays.count; i++) {
        PyBuffer_Release(&arrays.views[i]);
    }
    return rc < 0 ? NULL : PyLong_FromLong(result.count);
}

PyObject *core_collective_shape(PyObject *Py_UNUSED(module), PyObject *args) {
    int algorithm;
    int size;
    int inside;
    struct nb_sim_shape shape;
    if (!PyArg_ParseTuple(args, "iii:collective_shape", &algorithm, &size, &inside)) {
        return NULL;
    }
    if (algorithm < 0 || algorithm >= NB_SIM_ALGORITHMS || size < 1 || inside < 1) {
        PyErr_Format(PyExc_ValueError, "algorithm %d of %d ranks, %d on a host", algorithm, size, inside);
        return NULL;
    }
    nb_sim_shape((enum nb_sim_algorithm)algorithm, size, inside, &shape);
    return Py_BuildValue("(dddd)", shape.steps, shape.wire, shape.host_steps, shape.host_wire);
}
