// Buckets of a GradHook: sends each, waits for it, and re-arms it.
#include "py/gradhook.h"

#include <stddef.h>
#include <stdint.h>

// Builds the bucket's segments: its memory, with the gradients that travel directly in their places. Returns their
// number.
static int build_segments(const struct core_gradhook *self, const struct gradhook_bucket *bucket,
                          struct nb_segment *segments) {
    int count = 0;
    size_t at = 0;
    for (uint32_t i = 0; i < bucket->member_count; i++) {
        const struct gradhook_param *param = &self->params[bucket->members[i]];
        if (!param->direct) {
            continue;
        }
        if (param->offset > at) {
            segments[count++] = (struct nb_segment){.base = bucket->base + at, .bytes = param->offset - at};
        }
        segments[count++] = (struct nb_segment){.base = param->taken_base, .bytes = param->bytes};
        at = param->offset + param->bytes;
    }
    if (bucket->bytes > at) {
        segments[count++] = (struct nb_segment){.base = bucket->base + at, .bytes = bucket->bytes - at};
    }
    return count;
}

static int send_native(struct core_gradhook *self, struct gradhook_bucket *bucket) {
    struct nb_segment segments[NB_SEGMENTS_MAX];
    struct core_hold *hold = core_hold_new();
    if (hold == NULL) {
        return -1;
    }
    struct nb_op op = {
        .name = bucket->name,
        .kind = NB_OP_ALLREDUCE,
        .dtype = bucket->dtype,
        .redop = self->redop,
        .priority = bucket->priority,
        .scaled = true,
        .prescale = self->prescale,
        .postscale = self->postscale,
        .segments = segments,
        .segment_count = build_segments(self, bucket, segments),
        .bucket = (uint32_t)(bucket - self->buckets) + 1,
        .limit_ms = self->limit_ms,
    };
    op.streams = bucket->streams;
    op.stream_count = bucket->stream_count;
    hold->device = self->device;
    self->busy++; // memory of a device is submitted without the GIL
    int rc = core_comm_submit(self->target, self->of, &op, hold);
    self->busy--;
    if (rc < 0) {
        core_hold_free(hold);
        return -1;
    }
    bucket->stream_count = 0;
    bucket->hold = hold;
    return 0;
}

static int send_to_callable(struct core_gradhook *self, struct gradhook_bucket *bucket) {
    PyObject *index = PyLong_FromLong((long)(bucket - self->buckets));
    if (index == NULL) {
        return -1;
    }
    self->busy++;
    PyObject *future = PyObject_CallFunctionObjArgs(self->target, index, NULL);
    self->busy--;
    Py_DECREF(index);
    if (future == NULL) {
        return -1;
    }
    bucket->future = future;
    return 0;
}

// Sends a bucket to the target.
static int send_bucket(struct core_gradhook *self, struct gradhook_bucket *bucket) {
    int rc = bucket->flags != NULL ? gradhook_flags_write(self, bucket) : 0;
    if (rc < 0) {
        return -1;
    }
    if (self->target != NULL && !self->native) {
        rc = send_to_callable(self, bucket);
    } else if (self->native) {
        rc = send_native(self, bucket);
    }
    if (rc == 0) {
        bucket->sent = true;
        bucket->round = true;
        self->pending++;
    }
    return rc;
}

// Sends each complete bucket that has no open one before it.
static int send_in_order(struct core_gradhook *self) {
    if (self->sending) { // another thread, which has released the GIL: it continues with this bucket
        return 0;
    }
    self->sending = true;
    int rc = 0;
    while (rc == 0 && self->turn < self->bucket_count) {
        struct gradhook_bucket *bucket = &self->buckets[self->turn];
        if (!bucket->sent && bucket->left > 0) {
            break;
        }
        rc = bucket->sent ? 0 : send_bucket(self, bucket);
        self->turn += rc == 0;
    }
    self->sending = false;
    return rc;
}

int gradhook_complete(struct core_gradhook *self, struct gradhook_bucket *bucket) {
    bool negotiated = self->target == NULL || self->native;
    return negotiated ? send_bucket(self, bucket) : send_in_order(self);
}

// Resets a bucket to the start of a step.
static void open_bucket(struct core_gradhook *self, struct gradhook_bucket *bucket) {
    bucket->left = bucket->member_count;
    bucket->stream_count = 0;
    for (uint32_t i = 0; i < bucket->member_count; i++) {
        struct gradhook_param *param = &self->params[bucket->members[i]];
        param->left = self->passes;
        gradhook_drop(self, param);
    }
}

// Gives every gradient its sum, also after one has failed. The first failure is raised.
static int give_back(const struct core_gradhook *self, const struct gradhook_bucket *bucket) {
    PyObject *type = NULL;
    PyObject *value = NULL;
    PyObject *trace = NULL;
    for (uint32_t i = 0; i < bucket->member_count; i++) {
        const struct gradhook_param *param = &self->params[bucket->members[i]];
        int rc = param->absent ? gradhook_flags_give(self, bucket, i) : gradhook_give_back(self, param);
        if (rc == 0) {
            continue;
        }
        if (type == NULL) {
            PyErr_Fetch(&type, &value, &trace);
        } else {
            PyErr_Clear();
        }
    }
    if (type == NULL) {
        return 0;
    }
    PyErr_Restore(type, value, trace);
    return -1;
}

static int wait_native(struct core_gradhook *self, struct gradhook_bucket *bucket) {
    self->busy++;
    int rc = core_hold_wait(self->target, bucket->hold, INT64_MAX);
    self->busy--;
    return rc < 0 ? -1 : 0;
}

static int wait_future(struct core_gradhook *self, struct gradhook_bucket *bucket) {
    PyObject *name = self->state->names[CORE_WAIT];
    self->busy++;
    PyObject *done = PyObject_CallMethodObjArgs(bucket->future, name, NULL);
    self->busy--;
    Py_XDECREF(done);
    return done != NULL ? 0 : -1;
}

// Waits for a bucket and re-arms it, also after a failure. It stays sent only if the wait itself was interrupted (by a
// signal, say) and the engine still uses its memory.
static int finish(struct core_gradhook *self, struct gradhook_bucket *bucket) {
    int rc = 0;
    if (self->native && bucket->hold == NULL) { // only a finaliser of the same cycle can see this
        PyErr_SetString(PyExc_RuntimeError, "the GradHook was cleared");
        return -1;
    }
    if (bucket->hold != NULL) {
        if (!core_comm_is_here(self->target)) {
            return core_comm_check(self->target);
        }
        rc = wait_native(self, bucket);
        if (!core_hold_done(bucket->hold)) {
            return -1;
        }
    } else if (bucket->future != NULL) {
        rc = wait_future(self, bucket);
    }
    bool moved = bucket->hold != NULL || bucket->future != NULL;
    if (rc == 0 && moved && !self->drops) {
        rc = give_back(self, bucket);
    }
    struct core_hold *hold = bucket->hold;
    bucket->hold = NULL;
    bucket->sent = false;
    self->pending--;
    PyObject *type;
    PyObject *value;
    PyObject *trace;
    PyErr_Fetch(&type, &value, &trace);
    core_hold_free(hold);
    Py_CLEAR(bucket->future);
    open_bucket(self, bucket);
    PyErr_Restore(type, value, trace);
    return rc;
}

// Only one thread sends the rest or waits at a time; nothing else may change the state meanwhile.
static int check_idle(const struct core_gradhook *self) {
    if (self->busy > 0) {
        PyErr_SetString(PyExc_RuntimeError,
                        "the GradHook is sending buckets or waiting for them, in another thread or in a caller");
        return -1;
    }
    return 0;
}

int gradhook_flush(struct core_gradhook *self) {
    if (check_idle(self) < 0) {
        return -1;
    }
    for (uint32_t b = 0; b < self->bucket_count; b++) {
        struct gradhook_bucket *bucket = &self->buckets[b];
        for (uint32_t i = 0; !bucket->sent && i < bucket->member_count; i++) {
            struct gradhook_param *param = &self->params[bucket->members[i]];
            if (param->left > 0 && gradhook_place(self, param, NULL) < 0) {
                return -1;
            }
        }
        if (!bucket->sent && send_bucket(self, bucket) < 0) {
            return -1;
        }
    }
    return 0;
}

// After every bucket was sent, keeps the order of this step as the last complete one.
static void end_step(struct core_gradhook *self) {
    for (uint32_t b = 0; b < self->bucket_count; b++) {
        if (!self->buckets[b].round) {
            return;
        }
    }
    uint32_t *spare = self->last_order;
    self->last_order = self->order;
    self->last_count = self->order_count;
    self->order = spare;
    self->order_count = 0;
    for (uint32_t b = 0; b < self->bucket_count; b++) {
        self->buckets[b].round = false;
    }
    for (uint32_t i = 0; i < self->param_count; i++) {
        self->params[i].ordered = false;
    }
}

// Waits for all sent buckets, and raises the first failure. Stops early if a wait was interrupted rather than the
// operation ended.
static int finish_all(struct core_gradhook *self) {
    PyObject *type = NULL;
    PyObject *value = NULL;
    PyObject *trace = NULL;
    bool failed = false;
    for (uint32_t b = 0; b < self->bucket_count; b++) {
        struct gradhook_bucket *bucket = &self->buckets[b];
        if (!bucket->sent || finish(self, bucket) == 0) {
            continue;
        }
        if (failed) {
            PyErr_Clear();
        } else {
            PyErr_Fetch(&type, &value, &trace);
            failed = true;
        }
        if (bucket->sent) {
            break;
        }
    }
    if (failed) {
        PyErr_Restore(type, value, trace);
    }
    return failed ? -1 : 0;
}

// In a bucket that was not sent, ready gradients must become ready again or be taken by flush(). The next backward may
// add to them; they must not be in progress by then because the rest of the bucket became ready.
static void reopen_rest(struct core_gradhook *self) {
    for (uint32_t i = 0; i < self->param_count; i++) {
        struct gradhook_param *param = &self->params[i];
        struct gradhook_bucket *bucket = &self->buckets[param->bucket];
        if (!bucket->sent && param->left == 0) {
            param->left = 1;
            bucket->left++;
            gradhook_drop(self, param);
        }
    }
}

bool gradhook_begun(const struct core_gradhook *self) {
    bool begun = self->pending > 0;
    for (uint32_t i = 0; !begun && i < self->param_count; i++) {
        begun = self->params[i].left == 0;
    }
    return begun;
}

static void end_pass(struct core_gradhook *self) {
    self->began = false;
    self->held = false;
    self->turn = 0;
    self->claims.pass++;
}

int gradhook_wait(struct core_gradhook *self) {
    if (check_idle(self) < 0) {
        return -1;
    }
    core_recorder_stamp(self->recorder, NB_EV_WAIT_BEGIN, 0);
    int rc = finish_all(self);
    core_recorder_stamp(self->recorder, NB_EV_WAIT_END, 0);
    reopen_rest(self);
    end_pass(self);
    if (self->pending == 0) {
        end_step(self);
    }
    return rc;
}

void gradhook_rearm(struct core_gradhook *self) {
    for (uint32_t b = 0; b < self->bucket_count; b++) {
        open_bucket(self, &self->buckets[b]);
        self->buckets[b].round = false;
    }
    for (uint32_t i = 0; i < self->param_count; i++) {
        self->params[i].ordered = false;
    }
    self->order_count = 0;
    end_pass(self);
}

int gradhook_discard(struct core_gradhook *self) {
    if (gradhook_flush(self) < 0) {
        return -1;
    }
    self->drops = true;
    int rc = finish_all(self);
    self->drops = false;
    if (self->pending == 0) {
        gradhook_rearm(self);
    }
    return rc;
}

// A new reference to the objects that a bucket in progress needs, or NULL.
static PyObject *keep_of(const struct core_gradhook *self, const struct gradhook_bucket *bucket) {
    PyObject *list = PyList_New(0);
    if (list != NULL && self->keep != NULL && PyList_Append(list, self->keep) < 0) {
        Py_CLEAR(list);
    }
    for (uint32_t i = 0; list != NULL && i < bucket->member_count; i++) {
        const struct gradhook_param *param = &self->params[bucket->members[i]];
        PyObject *memory = param->direct ? param->alias : param->view;
        if (PyList_Append(list, memory) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

static void abandon(struct core_gradhook *self, struct gradhook_bucket *bucket) {
    struct core_hold *hold = bucket->hold;
    if (hold == NULL || !core_comm_is_here(self->target) || core_hold_done(hold)) {
        return;
    }
    bucket->hold = NULL;
    hold->keep = keep_of(self, bucket);
    if (hold->keep == NULL) { // out of memory: leak the gradients rather than free them under the engine
        PyErr_Clear();
        Py_XINCREF(self->keep);
        for (uint32_t i = 0; i < bucket->member_count; i++) {
            Py_INCREF(self->params[bucket->members[i]].view);
            Py_XINCREF(self->params[bucket->members[i]].alias);
        }
    }
    core_comm_hold(self->target, hold);
}

void gradhook_abandon(struct core_gradhook *self) {
    PyObject *type;
    PyObject *value;
    PyObject *trace;
    PyErr_Fetch(&type, &value, &trace);
    for (uint32_t b = 0; b < self->bucket_count && self->buckets != NULL; b++) {
        abandon(self, &self->buckets[b]);
    }
    PyErr_Restore(type, value, trace);
}
