// The what-if engine over arrays: reads input buffers and fills output buffers.
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

// The destination of an array argument: its address and its number of elements; `room`: it is written to.
struct array {
    const char *name;
    size_t element;
    const void **at;
    Py_ssize_t *count;
    bool room;
};

static int take(struct arrays *arrays, PyObject *object, const struct array *array) {
    Py_buffer *view = &arrays->views[arrays->count];
    if (PyObject_GetBuffer(object, view, array->room ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0) {
        return -1;
    }
    arrays->count++;
    if ((size_t)view->len % array->element != 0 || (uintptr_t)view->buf % array->element != 0) {
        PyErr_Format(PyExc_ValueError, "%s has %zd bytes, not a whole number of elements of %zu bytes", array->name,
                     view->len, array->element);
        return -1;
    }
    *array->at = view->buf;
    *array->count = view->len / (Py_ssize_t)array->element;
    return 0;
}

static int take_all(struct arrays *arrays, PyObject *const *objects, const struct array *wanted, int count) {
    for (int i = 0; i < count; i++) {
        if (take(arrays, objects[i], &wanted[i]) < 0) {
            return -1;
        }
    }
    return 0;
}

static int need(const char *name, Py_ssize_t count, int64_t wanted) {
    if (count >= wanted) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "%s has %zd elements, not %lld", name, count, (long long)wanted);
    return -1;
}

static int check_starts(const int64_t *starts, Py_ssize_t count, Py_ssize_t items) {
    for (Py_ssize_t i = 0; i < count; i++) {
        if (starts[i] < (i > 0 ? starts[i - 1] : 0) || starts[i] > items) {
            PyErr_Format(PyExc_ValueError, "starts[%zd] is %lld, but there are %zd items", i, (long long)starts[i],
                         items);
            return -1;
        }
    }
    return 0;
}

static int parse_program(struct arrays *arrays, PyObject *tuple, struct nb_sim_program *program, Py_ssize_t *items) {
    PyObject *object[5];
    Py_ssize_t starts;
    Py_ssize_t codes;
    Py_ssize_t tensors;
    Py_ssize_t kinds;
    const struct array wanted[5] = {{"starts", sizeof(int64_t), (const void **)&program->starts, &starts, false},
                                    {"work_ns", sizeof(int64_t), (const void **)&program->work_ns, items, false},
                                    {"codes", sizeof(int32_t), (const void **)&program->codes, &codes, false},
                                    {"bytes", sizeof(int64_t), (const void **)&program->bytes, &tensors, false},
                                    {"kinds", sizeof(int32_t), (const void **)&program->kinds, &kinds, false}};
    if (!PyArg_ParseTuple(tuple, "OOOOOi:program", &object[0], &object[1], &object[2], &object[3], &object[4],
                          &program->steps) ||
        take_all(arrays, object, wanted, 5) < 0 || need("starts", starts, 2) < 0 || need("codes", codes, *items) < 0 ||
        need("kinds", kinds, tensors) < 0 || check_starts(program->starts, starts, *items) < 0) {
        return -1;
    }
    if (starts > INT32_MAX || tensors > INT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "too many ranks or tensors");
        return -1;
    }
    program->ranks = (int)starts - 1;
    program->tensors = (int)tensors;
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
    const struct array wanted = {"bucket_of", sizeof(int32_t), (const void **)&plan->bucket_of, &count, false};
    return take(arrays, object, &wanted) < 0 ? -1 : need("bucket_of", count, tensors);
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
    const double *number;
    const struct array wanted[3] = {{"numbers", sizeof(double), (const void **)&number, &numbers, false},
                                    {"table bytes", sizeof(double), (const void **)&cost->add.bytes, &sizes, false},
                                    {"table ns", sizeof(double), (const void **)&cost->add.ns, &times, false}};
    if (take_all(arrays, object, wanted, 3) < 0 || need("numbers", numbers, NUMBERS) < 0 ||
        need("table ns", times, sizes) < 0 || need("table", INT32_MAX - sizes, 0) < 0) {
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

static int parse_result(struct arrays *arrays, PyObject *tuple, const struct nb_sim_program *program, Py_ssize_t items,
                        struct nb_sim_result *result) {
    PyObject *object[5];
    Py_ssize_t count[5];
    int64_t cells = (int64_t)program->steps * program->tensors;
    const struct array wanted[5] = {
        {"reached_ns", sizeof(int64_t), (const void **)&result->reached_ns, &count[0], true},
        {"passed_ns", sizeof(int64_t), (const void **)&result->passed_ns, &count[1], true},
        {"ops", sizeof(int64_t), (const void **)&result->ops, &count[2], true},
        {"op_of", sizeof(int32_t), (const void **)&result->op_of, &count[3], true},
        {"submit_ns", sizeof(int64_t), (const void **)&result->submit_ns, &count[4], true},
    };
    if (program->steps < 1 || cells > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "%d steps of %d tensors", program->steps, program->tensors);
        return -1;
    }
    const int64_t room[5] = {items, items, cells * OP_FIELDS, cells, cells * program->ranks};
    if (!PyArg_ParseTuple(tuple, "OOOOO:result", &object[0], &object[1], &object[2], &object[3], &object[4]) ||
        take_all(arrays, object, wanted, 5) < 0) {
        return -1;
    }
    for (int i = 0; i < 5; i++) {
        if (need(wanted[i].name, count[i], room[i]) < 0) {
            return -1;
        }
    }
    return 0;
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
