// GradHook: the Python type, its methods and attributes.
#include "py/gradhook.h"

#include <stdint.h>
#include <stdlib.h>

static struct core_gradhook *gradhook_of(PyObject *object) {
    return (struct core_gradhook *)object;
}

static PyObject *gradhook_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    struct core_gradhook *self = (struct core_gradhook *)PyType_GenericAlloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->state = core_state_of((PyObject *)self);
    self->prescale = 1.0;
    self->postscale = 1.0;
    self->redop = NB_SUM;
    if (gradhook_open(self, args, kwargs) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int gradhook_traverse(PyObject *object, visitproc visit, void *arg) {
    const struct core_gradhook *self = gradhook_of(object);
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->recorder);
    Py_VISIT(self->target);
    Py_VISIT(self->keep);
    Py_VISIT(self->on_first);
    Py_VISIT(self->uses.count);
    Py_VISIT(self->table.type);
    for (uint32_t i = 0; i < self->param_count; i++) {
        Py_VISIT(self->params[i].parameter);
        Py_VISIT(self->params[i].view);
        Py_VISIT(self->params[i].dtype);
        Py_VISIT(self->params[i].taken);
        Py_VISIT(self->params[i].alias);
    }
    for (uint32_t b = 0; b < self->bucket_count; b++) {
        Py_VISIT(self->buckets[b].future);
        Py_VISIT(self->buckets[b].flags);
    }
    return 0;
}

// The collector calls this before it clears any object of a cycle, and spares what the Comm then refers to.
static void gradhook_finalize(PyObject *object) {
    gradhook_abandon(gradhook_of(object));
}

// Clears all parameters and buckets first, so that a late call finds none.
static int gradhook_clear(PyObject *object) {
    struct core_gradhook *self = gradhook_of(object);
    gradhook_abandon(self);
    uint32_t params = self->param_count;
    uint32_t buckets = self->bucket_count;
    self->param_count = 0;
    self->bucket_count = 0;
    self->pending = 0;
    for (uint32_t i = 0; i < params; i++) {
        Py_CLEAR(self->params[i].parameter);
        Py_CLEAR(self->params[i].view);
        Py_CLEAR(self->params[i].dtype);
        Py_CLEAR(self->params[i].taken);
        Py_CLEAR(self->params[i].alias);
    }
    for (uint32_t b = 0; b < buckets; b++) {
        struct core_hold *hold = self->buckets[b].hold;
        self->buckets[b].hold = NULL;
        if (hold != NULL && core_comm_is_here(self->target)) {
            core_hold_free(hold);
        }
        Py_CLEAR(self->buckets[b].future);
        Py_CLEAR(self->buckets[b].flags);
    }
    Py_CLEAR(self->recorder);
    Py_CLEAR(self->target);
    Py_CLEAR(self->keep);
    Py_CLEAR(self->on_first);
    gradhook_claims_close(self);
    gradhook_uses_close(self);
    core_tensor_table_close(&self->table);
    return 0;
}

static void gradhook_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    struct core_gradhook *self = gradhook_of(object);
    PyObject_GC_UnTrack(object);
    gradhook_clear(object);
    free(self->params);
    free(self->buckets);
    free(self->members);
    free(self->order);
    free(self->last_order);
    PyObject_GC_Del(object);
    Py_DECREF(type);
}

static PyObject *gradhook_hook(PyObject *object, PyObject *index_value) {
    const struct core_gradhook *self = gradhook_of(object);
    long index;
    if (core_get_long("index", index_value, 0, (long)self->param_count - 1, &index) < 0) {
        return NULL;
    }
    return gradhook_hook_new(object, (uint32_t)index);
}

static int check_between_steps(const struct core_gradhook *self, const char *what) {
    if (self->pending > 0) {
        PyErr_Format(PyExc_RuntimeError, "%s may change only between steps: %u buckets are pending", what,
                     self->pending);
        return -1;
    }
    return 0;
}

static PyObject *gradhook_target(PyObject *object, PyObject *args, PyObject *kwargs) {
    static const char *const keywords[] = {"sink", "prescale", "postscale", "op", "group", "limit_s", NULL};
    struct core_gradhook *self = gradhook_of(object);
    PyObject *sink;
    PyObject *prescale_value = NULL;
    PyObject *postscale_value = NULL;
    PyObject *op_value = NULL;
    PyObject *group = NULL;
    PyObject *limit = NULL;
    struct nb_comm *of = NULL;
    int limit_ms = 0;
    double prescale;
    double postscale;
    int redop;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|OOOOO:target", (char **)keywords, &sink, &prescale_value,
                                     &postscale_value, &op_value, &group, &limit) ||
        (limit != NULL && core_get_timeout("limit_s", limit, 0, &limit_ms) < 0) ||
        core_get_scale("prescale", prescale_value, &prescale) < 0 ||
        core_get_scale("postscale", postscale_value, &postscale) < 0 || core_get_redop(op_value, &redop) < 0 ||
        check_between_steps(self, "the target") < 0) {
        return NULL;
    }
    bool native = Py_IS_TYPE(sink, core_state_of(object)->types[CORE_COMM]);
    if (sink != Py_None && !native && !PyCallable_Check(sink)) {
        PyErr_Format(PyExc_TypeError, "sink must be a Comm, a callable or None, not %R", sink);
        return NULL;
    }
    if (native && (of = core_comm_group_of(sink, group)) == NULL) {
        return NULL;
    }
    gradhook_rearm(self);
    PyObject *old = self->target;
    self->target = sink != Py_None ? Py_NewRef(sink) : NULL;
    self->native = native;
    self->of = of;
    self->prescale = prescale;
    self->postscale = postscale;
    self->redop = redop;
    self->limit_ms = limit_ms;
    Py_XDECREF(old);
    Py_RETURN_NONE;
}

static PyObject *gradhook_method_flush(PyObject *object, PyObject *Py_UNUSED(none)) {
    return gradhook_flush(gradhook_of(object)) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *gradhook_method_wait(PyObject *object, PyObject *Py_UNUSED(none)) {
    return gradhook_wait(gradhook_of(object)) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *gradhook_hold(PyObject *object, PyObject *Py_UNUSED(none)) {
    gradhook_of(object)->held = true;
    Py_RETURN_NONE;
}

static PyObject *gradhook_method_discard(PyObject *object, PyObject *Py_UNUSED(none)) {
    return gradhook_discard(gradhook_of(object)) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *gradhook_ready_order(PyObject *object, PyObject *Py_UNUSED(none)) {
    const struct core_gradhook *self = gradhook_of(object);
    PyObject *list = PyList_New(self->last_count);
    for (uint32_t i = 0; list != NULL && i < self->last_count; i++) {
        PyObject *index = PyLong_FromUnsignedLong(self->last_order[i]);
        if (index == NULL || PyList_SetItem(list, i, index) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

static PyObject *gradhook_sparse(PyObject *object, PyObject *Py_UNUSED(none)) {
    const struct core_gradhook *self = gradhook_of(object);
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list != NULL && i < self->param_count; i++) {
        PyObject *index = self->params[i].sparse ? PyLong_FromUnsignedLong(i) : NULL;
        if (self->params[i].sparse && (index == NULL || PyList_Append(list, index) < 0)) {
            Py_CLEAR(list);
        }
        Py_XDECREF(index);
    }
    return list;
}

static PyObject *gradhook_get_passes(PyObject *object, void *Py_UNUSED(closure)) {
    return PyLong_FromUnsignedLong(gradhook_of(object)->passes);
}

static int gradhook_set_passes(PyObject *object, PyObject *value, void *Py_UNUSED(closure)) {
    struct core_gradhook *self = gradhook_of(object);
    long passes;
    if (value == NULL) {
        PyErr_SetString(PyExc_TypeError, "passes cannot be deleted");
        return -1;
    }
    if (core_get_long("passes", value, 1, INT32_MAX, &passes) < 0 || check_between_steps(self, "passes") < 0) {
        return -1;
    }
    if (gradhook_begun(self)) {
        PyErr_SetString(PyExc_RuntimeError, "passes may change only between steps: gradients of a step are complete");
        return -1;
    }
    self->passes = (uint32_t)passes;
    gradhook_rearm(self);
    return 0;
}

static PyObject *gradhook_get_pending(PyObject *object, void *Py_UNUSED(closure)) {
    return PyLong_FromUnsignedLong(gradhook_of(object)->pending);
}

static PyObject *gradhook_get_begun(PyObject *object, void *Py_UNUSED(closure)) {
    return PyBool_FromLong(gradhook_begun(gradhook_of(object)));
}

static PyObject *gradhook_get_paused(PyObject *object, void *Py_UNUSED(closure)) {
    return PyBool_FromLong(gradhook_of(object)->paused);
}

static int gradhook_set_paused(PyObject *object, PyObject *value, void *Py_UNUSED(closure)) {
    int paused = value == NULL ? -1 : PyObject_IsTrue(value);
    if (value == NULL) {
        PyErr_SetString(PyExc_TypeError, "paused cannot be deleted");
    }
    if (paused < 0) {
        return -1;
    }
    gradhook_of(object)->paused = paused;
    return 0;
}

static PyObject *gradhook_get_on_first(PyObject *object, void *Py_UNUSED(closure)) {
    PyObject *call = gradhook_of(object)->on_first;
    return Py_NewRef(call != NULL ? call : Py_None);
}

static int gradhook_set_on_first(PyObject *object, PyObject *value, void *Py_UNUSED(closure)) {
    struct core_gradhook *self = gradhook_of(object);
    if (value != NULL && value != Py_None && !PyCallable_Check(value)) {
        PyErr_Format(PyExc_TypeError, "on_first must be a callable or None, not %R", value);
        return -1;
    }
    PyObject *old = self->on_first;
    self->on_first = value != NULL && value != Py_None ? Py_NewRef(value) : NULL;
    Py_XDECREF(old);
    return 0;
}

#define WITH_KEYWORDS(function) (PyCFunction)(void (*)(void))(function), METH_VARARGS | METH_KEYWORDS

static const char gradhook_doc[] =
    "GradHook(parameters, views, bucket_of, offset, buckets, *, recorder=None, direct_bytes=262144,\n"
    "         passes=1, keep=None, flags=None)\n--\n\n"
    "The gradient hook backend: stamps \"gradient ready\", counts buckets down and submits them, all in C.\n\n"
    "parameters[i] belongs to bucket_of[i], at byte offset[i] of the bucket's memory; views[i] is a tensor over\n"
    "that memory. buckets: (name, dtype, address, bytes, priority) each.\n\n"
    "A parameter's `grad` stays the tensor that autograd or the user put there, and wait() leaves the sum in it. It\n"
    "is copied into the bucket and back; one of at least `direct_bytes` whose memory no other tensor has travels\n"
    "from there, except to a callable. What is not contiguous, sparse, or of another dtype, is copied by torch.\n"
    "Where `grad` is another tensor by the time of wait(), that one is set_() to the first, as by Horovod; where it\n"
    "is None, wait() raises RuntimeError. What is sent is what the hook found: the memory stays until wait(), also\n"
    "where the gradient is resized, swapped, or given other memory by `.data` meanwhile, and it gets the sum all the\n"
    "same. Edits of a gradient that is on its way are lost.\n"
    "Of two parameters with one tensor as `grad`, that one gets the sum of what the later one found in it.\n\n"
    "A hook that fires again before its bucket is submitted replaces that gradient. One that fires while its\n"
    "bucket is on its way raises RuntimeError: autograd has added to memory that is being reduced. After wait()\n"
    "a second backward sends its buckets once more; the result is that of the values the parameters hold, the\n"
    "average of (already averaged + new), as in DDP. Parameters are held weakly; one that is gone counts as zeros.\n\n"
    "flags: a tensor over the end of each bucket's memory, with an element for each of its parameters. A missing\n"
    "gradient is then sent as zeros, and stays None if no rank has that gradient. Without flags it becomes zeros.";

static const PyGetSetDef gradhook_getset[] = {
    {"passes", gradhook_get_passes, gradhook_set_passes,
     "Backward passes after which a gradient is ready; to be set between steps, re-arms.", NULL},
    {"paused", gradhook_get_paused, gradhook_set_paused,
     "While true, gradients are stamped and otherwise left alone: they add up, and nothing is sent.", NULL},
    {"on_first", gradhook_get_on_first, gradhook_set_on_first,
     "None, or what is called without arguments at the first gradient of each pass that is not paused; a pass\n"
     "begins after wait().",
     NULL},
    {"begun", gradhook_get_begun, NULL, "True from the first complete gradient of a step until wait().", NULL},
    {"pending", gradhook_get_pending, NULL, "Buckets submitted and not waited for.", NULL},
    {0},
};

PyTypeObject *core_gradhook_type(PyObject *module) {
    static const PyMethodDef methods[] = {
        {"hook", gradhook_hook, METH_O,
         "hook($self, index, /)\n--\n\n"
         "Return the C callable for a hook of the node that accumulates the gradient of parameters[index]."},
        {"target", WITH_KEYWORDS(gradhook_target),
         "target($self, sink, prescale=1.0, postscale=1.0, op=..., group=0, limit_s=0.0)\n--\n\n"
         "Set where complete buckets go: a Comm, a callable that gets the bucket's index and returns an object\n"
         "with wait(), or None: nowhere. A callable gets them in the order of their index, because its ranks do not\n"
         "negotiate. limit_s: as in Comm.submit. Re-arms; RuntimeError while buckets are pending."},
        {"flush", gradhook_method_flush, METH_NOARGS,
         "flush($self)\n--\n\n"
         "Submit every bucket that is not, with what the parameters' `grad` holds. Where it is None it becomes\n"
         "zeros, unless the buckets have flags."},
        {"wait", gradhook_method_wait, METH_NOARGS,
         "wait($self)\n--\n\n"
         "Wait for all submitted buckets, GIL released, and re-arm them, also where they failed. In the others\n"
         "what was ready must fire again, or is taken by flush().\n\n"
         "Raises the first failure, as Work.wait. A wait that a signal ends leaves the rest pending."},
        {"hold", gradhook_hold, METH_NOARGS,
         "hold($self)\n--\n\n"
         "Send nothing more in this pass before flush(), so that autograd may add to a gradient several times."},
        {"discard", gradhook_method_discard, METH_NOARGS,
         "discard($self)\n--\n\n"
         "End a pass that has failed: flush(), wait for all buckets, and re-arm them. Copied gradients get no sum.\n"
         "Every rank calls it, after any part of the pass. Raises as wait()."},
        {"ready_order", gradhook_ready_order, METH_NOARGS,
         "ready_order($self)\n--\n\n"
         "Return indices of parameters in the order in which they became ready in the last complete step."},
        {"sparse", gradhook_sparse, METH_NOARGS,
         "sparse($self)\n--\n\nReturn indices of parameters of which a gradient was sparse, in rising order."},
        {0},
    };
    static const PyType_Slot slots[] = {
        {Py_tp_doc, (void *)gradhook_doc},
        {Py_tp_new, (void *)gradhook_new},
        {Py_tp_dealloc, (void *)gradhook_dealloc},
        {Py_tp_traverse, (void *)gradhook_traverse},
        {Py_tp_clear, (void *)gradhook_clear},
        {Py_tp_finalize, (void *)gradhook_finalize},
        {Py_tp_methods, (void *)methods},
        {Py_tp_getset, (void *)gradhook_getset},
        {0, NULL},
    };
    static const PyType_Spec spec = {
        .name = "netbottleneck._core.GradHook",
        .basicsize = sizeof(struct core_gradhook),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
        .slots = (PyType_Slot *)slots,
    };
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, (PyType_Spec *)&spec, NULL);
}
