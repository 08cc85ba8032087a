// Gradient hook: the callable that autograd calls for each gradient. Counts its bucket down until that is complete.
#include "py/gradhook.h"

#include <stddef.h>
#include <stdint.h>

struct core_hook {
    PyObject base;
    PyObject *gradhook;
    uint32_t index;
};

static struct core_gradhook *gradhook_of(PyObject *object) {
    return (struct core_gradhook *)object;
}

// Records the order in which parameters become ready.
static void note_order(struct core_gradhook *self, uint32_t index) {
    if (!self->params[index].ordered) {
        self->params[index].ordered = true;
        self->order[self->order_count++] = index;
    }
}

// Handles the last pass over a parameter.
static int make_ready(struct core_gradhook *self, uint32_t index, PyObject *arrived) {
    struct gradhook_param *param = &self->params[index];
    struct gradhook_bucket *bucket = &self->buckets[param->bucket];
    bool first = param->left > 0;
    param->left = 1;
    if (gradhook_place(self, param, arrived) < 0) {
        if (!first) {
            bucket->left++;
        }
        return -1;
    }
    param->left = 0;
    if (first) {
        bucket->left--;
    }
    note_order(self, index);
    return bucket->left == 0 ? gradhook_complete(self, bucket) : 0;
}

// Handles the first gradient of a pass.
static int begin_pass(struct core_gradhook *self) {
    if (self->began) {
        return 0;
    }
    PyObject *on_first = Py_XNewRef(self->on_first);
    PyObject *done = on_first != NULL ? PyObject_CallNoArgs(on_first) : NULL;
    bool failed = on_first != NULL && done == NULL;
    Py_XDECREF(done);
    Py_XDECREF(on_first);
    self->began = !failed;
    return failed ? -1 : 0;
}

// Handles an accumulated gradient; arrived: as in gradhook_place.
static int fire(struct core_gradhook *self, uint32_t index, PyObject *arrived) {
    struct gradhook_param *param = &self->params[index];
    struct gradhook_bucket *bucket = &self->buckets[param->bucket];
    core_recorder_stamp(self->recorder, NB_EV_GRAD_READY, index);
    if (self->paused) {
        return 0;
    }
    if (begin_pass(self) < 0) {
        return -1;
    }
    if (bucket->sent) { // autograd has added to memory that is being reduced
        PyErr_Format(PyExc_RuntimeError,
                     "parameter %u was added to while its bucket %s is on its way: wait() between two backward passes, "
                     "or set the number of passes of a step",
                     index, bucket->name);
        return -1;
    }
    if (param->left > 1) {
        param->left--;
        return 0;
    }
    if (self->held) {
        note_order(self, index);
        return 0;
    }
    return make_ready(self, index, arrived);
}

// Prefetches the data of the next call. Autograd evicts them from the caches between two gradients, and gradients
// usually become ready in the same order.
static void expect_next(struct core_gradhook *self, const struct core_hook *hook) {
    struct gradhook_param *before = &self->params[self->recent];
    const struct gradhook_param *param = &self->params[hook->index];
    if (before->next != hook->index || before->next_hook != hook) {
        before->next = hook->index;
        before->next_hook = hook;
    }
    self->recent = hook->index;
    __builtin_prefetch(&self->params[param->next], 1);
    __builtin_prefetch(param->next_hook, 1);
}

// The gradient that autograd has just accumulated, a borrowed reference; NULL if unknown. Autograd calls a hook of an
// AccumulateGrad node with its outputs (none) and its inputs (one gradient).
static PyObject *arrived_in(PyObject *args) {
    PyObject *inputs = PyTuple_Size(args) == 2 ? PyTuple_GetItem(args, 1) : NULL;
    bool one = inputs != NULL && PyTuple_Check(inputs) && PyTuple_Size(inputs) == 1;
    return one ? PyTuple_GetItem(inputs, 0) : NULL;
}

// Called by autograd; any other caller may pass any arguments.
static PyObject *hook_call(PyObject *object, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    const struct core_hook *self = (struct core_hook *)object;
    uint32_t index = self->index;
    PyObject *gradhook = self->gradhook;
    if (gradhook == NULL || index >= gradhook_of(gradhook)->param_count) {
        PyErr_SetString(PyExc_RuntimeError, "the GradHook of this hook was cleared");
        return NULL;
    }
    Py_INCREF(gradhook); // the call may remove the hook
    expect_next(gradhook_of(gradhook), self);
    int rc = fire(gradhook_of(gradhook), index, arrived_in(args));
    Py_DECREF(gradhook);
    return rc < 0 ? NULL : Py_NewRef(Py_None);
}

PyObject *gradhook_hook_new(PyObject *gradhook, uint32_t index) {
    PyTypeObject *type = gradhook_of(gradhook)->state->types[CORE_HOOK];
    struct core_hook *hook = (struct core_hook *)PyType_GenericAlloc(type, 0);
    if (hook != NULL) {
        hook->gradhook = Py_NewRef(gradhook);
        hook->index = index;
    }
    return (PyObject *)hook;
}

static int hook_traverse(PyObject *object, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((struct core_hook *)object)->gradhook);
    return 0;
}

static int hook_clear(PyObject *object) {
    Py_CLEAR(((struct core_hook *)object)->gradhook);
    return 0;
}

static void hook_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    hook_clear(object);
    PyObject_GC_Del(object);
    Py_DECREF(type);
}

PyTypeObject *core_hook_type(PyObject *module) {
    static const PyType_Slot slots[] = {
        {Py_tp_doc, (void *)"Made by GradHook.hook()."},
        {Py_tp_dealloc, (void *)hook_dealloc},
        {Py_tp_traverse, (void *)hook_traverse},
        {Py_tp_clear, (void *)hook_clear},
        {Py_tp_call, (void *)hook_call},
        {0, NULL},
    };
    static const PyType_Spec spec = {
        .name = "netbottleneck._core.Hook",
        .basicsize = sizeof(struct core_hook),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
        .slots = (PyType_Slot *)slots,
    };
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, (PyType_Spec *)&spec, NULL);
}
