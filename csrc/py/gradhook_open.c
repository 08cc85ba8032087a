// Opens a GradHook: checks every argument and the bucket plan once.
#include "py/gradhook.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"

// The arguments as tuples.
struct lists {
    PyObject *parameters;
    PyObject *views;
    PyObject *bucket_of;
    PyObject *offset;
    PyObject *buckets;
};

// The place of a parameter; in sorted order, these are the members of the buckets.
struct place {
    uint32_t bucket;
    uint32_t index;
    size_t offset;
};

static int parse_bucket(struct gradhook_bucket *bucket, PyObject *item, Py_ssize_t index) {
    const char *name;
    PyObject *dtype;
    PyObject *address;
    PyObject *bytes_value;
    PyObject *priority_value;
    long bytes;
    long priority;
    if (!PyTuple_Check(item) || PyTuple_Size(item) != 5) {
        PyErr_Format(PyExc_TypeError, "buckets[%zd] must be (name, dtype, address, bytes, priority), not %R", index,
                     item);
        return -1;
    }
    if (!PyArg_ParseTuple(item, "sOOOO", &name, &dtype, &address, &bytes_value, &priority_value) ||
        core_get_dtype(dtype, &bucket->dtype) < 0 ||
        core_get_long("a bucket's bytes", bytes_value, 1, PY_SSIZE_T_MAX, &bytes) < 0 ||
        core_get_long("a bucket's priority", priority_value, INT32_MIN, INT32_MAX, &priority) < 0) {
        return -1;
    }
    size_t length = strlen(name);
    if (length == 0 || length >= NB_NAME_MAX) {
        PyErr_Format(PyExc_ValueError, "buckets[%zd] must have a name of 1 to %d bytes, not \"%s\"", index,
                     NB_NAME_MAX - 1, name);
        return -1;
    }
    memcpy(bucket->name, name, length + 1);
    bucket->base = PyLong_AsVoidPtr(address);
    bucket->bytes = (size_t)bytes;
    bucket->priority = (int)priority;
    if (bucket->base == NULL || bucket->bytes % nb_dtype_size(bucket->dtype) != 0) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "buckets[%zd] must have an address and whole elements, not %R", index, item);
        return -1;
    }
    return 0;
}

static int parse_buckets(struct core_gradhook *self, PyObject *list) {
    PyObject *names = PySet_New(NULL);
    int rc = names != NULL ? 0 : -1;
    for (uint32_t i = 0; i < self->bucket_count && rc == 0; i++) {
        PyObject *item = PyTuple_GetItem(list, i);
        rc = parse_bucket(&self->buckets[i], item, i);
        if (rc == 0 && PySet_Contains(names, PyTuple_GetItem(item, 0)) != 0) {
            PyErr_Format(PyExc_ValueError, "buckets[%u] has the name of another bucket, \"%s\"", i,
                         self->buckets[i].name);
            rc = -1;
        }
        if (rc == 0) {
            rc = PySet_Add(names, PyTuple_GetItem(item, 0));
        }
    }
    Py_XDECREF(names);
    return rc;
}

static int method_size(PyObject *object, const char *name, size_t *out) {
    PyObject *value = PyObject_CallMethod(object, name, NULL);
    if (value == NULL) {
        return -1;
    }
    *out = PyLong_AsSize_t(value);
    Py_DECREF(value);
    return PyErr_Occurred() != NULL ? -1 : 0;
}

static int method_truth(PyObject *object, const char *name, bool *out) {
    PyObject *value = PyObject_CallMethod(object, name, NULL);
    int rc = value != NULL ? PyObject_IsTrue(value) : -1;
    Py_XDECREF(value);
    *out = rc > 0;
    return rc < 0 ? -1 : 0;
}

// Checks that all views are on one device.
static int check_device(struct core_gradhook *self, const struct gradhook_param *param, uint32_t index, bool on_host) {
    struct core_device device = {0};
    if (!on_host && core_tensor_device(param->view, &device) < 0) {
        return -1;
    }
    bool same = device.type == self->device.type && device.number == self->device.number;
    if (index > 0 && !same) {
        PyErr_Format(PyExc_ValueError, "views[%u] must be on the device of views[0]", index);
        return -1;
    }
    self->device = device;
    return 0;
}

// Checks that the view lies at the bucket's offset, with elements of the bucket's size.
static int check_view(struct core_gradhook *self, struct gradhook_param *param, uint32_t index) {
    const struct core_state *state = self->state;
    const struct gradhook_bucket *bucket = &self->buckets[param->bucket];
    size_t base;
    size_t element;
    PyObject *host = PyObject_GetAttr(param->view, state->names[CORE_IS_CPU]);
    bool on_host = host == Py_True;
    Py_XDECREF(host);
    if (host == NULL) {
        return -1;
    }
    if (check_device(self, param, index, on_host) < 0) {
        return -1;
    }
    bool dense;
    if (method_size(param->view, "data_ptr", &base) < 0 || method_size(param->view, "element_size", &element) < 0 ||
        method_truth(param->view, "is_contiguous", &dense) < 0) {
        return -1;
    }
    param->dense = dense;
    if (element != nb_dtype_size(bucket->dtype) || param->offset % element != 0) {
        PyErr_Format(PyExc_ValueError, "views[%u] has elements of %zu bytes at offset %zu; bucket \"%s\" is %s", index,
                     element, param->offset, bucket->name, nb_dtype_name(bucket->dtype));
        return -1;
    }
    if (param->offset > bucket->bytes || param->bytes > bucket->bytes - param->offset ||
        (param->bytes > 0 && (char *)base != bucket->base + param->offset)) {
        PyErr_Format(PyExc_ValueError, "views[%u] has %zu bytes at %p, which is not at offset %zu of bucket \"%s\"",
                     index, param->bytes, (void *)base, param->offset, bucket->name);
        return -1;
    }
    param->memory = bucket->base + param->offset;
    struct core_tensor_place place;
    param->element = core_tensor_look(&self->table, param->view, &place) ? place.element : 0;
    return 0;
}

static int parse_param(struct core_gradhook *self, const struct lists *lists, uint32_t index) {
    const struct core_state *state = self->state;
    struct gradhook_param *param = &self->params[index];
    long bucket;
    long offset;
    if (core_get_long("bucket_of", PyTuple_GetItem(lists->bucket_of, index), 0, (long)self->bucket_count - 1, &bucket) <
            0 ||
        core_get_long("offset", PyTuple_GetItem(lists->offset, index), 0, PY_SSIZE_T_MAX, &offset) < 0) {
        return -1;
    }
    param->parameter = PyWeakref_NewRef(PyTuple_GetItem(lists->parameters, index), NULL);
    if (param->parameter == NULL) {
        return -1;
    }
    param->view = Py_NewRef(PyTuple_GetItem(lists->views, index));
    param->bucket = (uint32_t)bucket;
    param->offset = (size_t)offset;
    param->dtype = PyObject_GetAttr(param->view, state->names[CORE_DTYPE]);
    PyObject *bytes = PyObject_GetAttr(param->view, state->names[CORE_NBYTES]);
    if (bytes != NULL) {
        param->bytes = PyLong_AsSize_t(bytes);
        Py_DECREF(bytes);
    }
    return PyErr_Occurred() != NULL ? -1 : check_view(self, param, index);
}

static int parse_params(struct core_gradhook *self, const struct lists *lists) {
    PyObject *seen = PySet_New(NULL);
    int rc = seen != NULL ? 0 : -1;
    if (self->param_count > 0) {
        core_tensor_table_open(&self->table, PyTuple_GetItem(lists->views, 0));
    }
    for (uint32_t i = 0; i < self->param_count && rc == 0; i++) {
        rc = parse_param(self, lists, i);
        PyObject *identity = rc == 0 ? PyLong_FromVoidPtr(PyTuple_GetItem(lists->parameters, i)) : NULL;
        int known = identity != NULL ? PySet_Contains(seen, identity) : -1;
        if (known > 0) {
            PyErr_Format(PyExc_ValueError, "parameters[%u] occurs twice", i);
        }
        rc = known == 0 ? PySet_Add(seen, identity) : -1;
        Py_XDECREF(identity);
    }
    Py_XDECREF(seen);
    return rc;
}

static int by_place(const void *a, const void *b) {
    const struct place *x = a;
    const struct place *y = b;
    if (x->bucket != y->bucket) {
        return x->bucket < y->bucket ? -1 : 1;
    }
    if (x->offset != y->offset) {
        return x->offset < y->offset ? -1 : 1;
    }
    return x->index < y->index ? -1 : 1;
}

// Assigns the sorted places to the buckets.
static int fill_members(struct core_gradhook *self, const struct place *places) {
    for (uint32_t i = 0; i < self->param_count; i++) {
        struct gradhook_bucket *bucket = &self->buckets[places[i].bucket];
        const struct gradhook_param *param = &self->params[places[i].index];
        self->members[i] = places[i].index;
        if (bucket->member_count == 0) {
            bucket->members = &self->members[i];
        } else {
            const struct gradhook_param *before = &self->params[self->members[i - 1]];
            if (before->offset + before->bytes > param->offset) {
                PyErr_Format(PyExc_ValueError, "views[%u] and views[%u] overlap in bucket \"%s\"", places[i - 1].index,
                             places[i].index, bucket->name);
                return -1;
            }
        }
        bucket->member_count++;
    }
    for (uint32_t b = 0; b < self->bucket_count; b++) {
        if (self->buckets[b].member_count == 0) {
            PyErr_Format(PyExc_ValueError, "buckets[%u], \"%s\", has no parameter", b, self->buckets[b].name);
            return -1;
        }
    }
    return 0;
}

static int sort_members(struct core_gradhook *self) {
    struct place *places = calloc((size_t)self->param_count + 1, sizeof(*places));
    if (places == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (uint32_t i = 0; i < self->param_count; i++) {
        places[i] = (struct place){.bucket = self->params[i].bucket, .index = i, .offset = self->params[i].offset};
    }
    qsort(places, self->param_count, sizeof(*places), by_place);
    int rc = fill_members(self, places);
    free(places);
    return rc;
}

static int allocate(struct core_gradhook *self, size_t params, size_t buckets) {
    self->params = aligned_alloc(_Alignof(struct gradhook_param), (params + 1) * sizeof(*self->params));
    self->buckets = calloc(buckets + 1, sizeof(*self->buckets));
    self->members = calloc(params + 1, sizeof(*self->members));
    self->order = calloc(params + 1, sizeof(*self->order));
    self->last_order = calloc(params + 1, sizeof(*self->last_order));
    if (self->params == NULL || self->buckets == NULL || self->members == NULL || self->order == NULL ||
        self->last_order == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    memset(self->params, 0, (params + 1) * sizeof(*self->params));
    self->param_count = (uint32_t)params;
    self->bucket_count = (uint32_t)buckets;
    return 0;
}

static int fill(struct core_gradhook *self, const struct lists *lists) {
    Py_ssize_t params = PyTuple_Size(lists->parameters);
    Py_ssize_t views = PyTuple_Size(lists->views);
    Py_ssize_t bucket_of = PyTuple_Size(lists->bucket_of);
    Py_ssize_t offsets = PyTuple_Size(lists->offset);
    if (views != params || bucket_of != params || offsets != params || params > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "%zd parameters need as many views (%zd), bucket_of (%zd) and offset (%zd)",
                     params, views, bucket_of, offsets);
        return -1;
    }
    if (allocate(self, (size_t)params, (size_t)PyTuple_Size(lists->buckets)) < 0 ||
        parse_buckets(self, lists->buckets) < 0 || parse_params(self, lists) < 0 || sort_members(self) < 0 ||
        gradhook_claims_open(self) < 0) {
        return -1;
    }
    gradhook_uses_open(self);
    gradhook_rearm(self);
    return 0;
}

// Converts each sequence to a tuple.
static int fill_from(struct core_gradhook *self, PyObject *const sequences[5]) {
    PyObject *tuples[5] = {NULL};
    int rc = 0;
    for (int i = 0; i < 5 && rc == 0; i++) {
        tuples[i] = PySequence_Tuple(sequences[i]);
        rc = tuples[i] != NULL ? 0 : -1;
    }
    if (rc == 0) {
        const struct lists lists = {tuples[0], tuples[1], tuples[2], tuples[3], tuples[4]};
        rc = fill(self, &lists);
    }
    for (int i = 0; i < 5; i++) {
        Py_XDECREF(tuples[i]);
    }
    return rc;
}

int gradhook_open(struct core_gradhook *self, PyObject *args, PyObject *kwargs) {
    static const char *const keywords[] = {"parameters",   "views",  "bucket_of", "offset", "buckets", "recorder",
                                           "direct_bytes", "passes", "keep",      "flags",  NULL};
    const struct core_state *state = self->state;
    PyObject *in[5];
    PyObject *recorder = Py_None;
    PyObject *direct = NULL;
    PyObject *passes_value = NULL;
    PyObject *flags = Py_None;
    long bytes = 256L * 1024;
    long passes = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOO|$OOOOO:GradHook", (char **)keywords, &in[0], &in[1], &in[2],
                                     &in[3], &in[4], &recorder, &direct, &passes_value, &self->keep, &flags)) {
        self->keep = NULL;
        return -1;
    }
    Py_XINCREF(self->keep);
    if ((direct != NULL && core_get_long("direct_bytes", direct, 0, PY_SSIZE_T_MAX, &bytes) < 0) ||
        (passes_value != NULL && core_get_long("passes", passes_value, 1, INT32_MAX, &passes) < 0)) {
        return -1;
    }
    if (recorder != Py_None) {
        if (!Py_IS_TYPE(recorder, state->types[CORE_RECORDER])) {
            PyErr_Format(PyExc_TypeError, "recorder must be a Recorder, not %R", recorder);
            return -1;
        }
        self->recorder = Py_NewRef(recorder);
    }
    self->direct_bytes = (size_t)bytes;
    self->passes = (uint32_t)passes;
    if (fill_from(self, in) < 0) {
        return -1;
    }
    return flags != Py_None ? gradhook_flags_open(self, flags) : 0;
}
