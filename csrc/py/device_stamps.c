// Device stamps: marks on the current stream, and their way into the ring.
#include "py/device_stamps.h"

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "cuda/clock.h"
#include "cuda/driver.h"
#include "py/tensor.h"

enum {
    POLL_NS = 500 * 1000,
    STATED_EVENTS = 1000, // the error is stated again after so many events: a full ring overwrites earlier ones
};

_Static_assert(sizeof(struct nb_cuda_mark) == sizeof(struct nb_event), "a mark carries an event");

struct core_device_stamps {
    struct nb_cuda_driver driver;
    struct nb_cuda_device device;
    struct nb_cuda_clock *clock;
    struct core_device where;
    struct nb_error failure; // of a stamp
    bool detailed;
    bool knows_training;
    void *training;          // stream of the last begin of a forward pass or an optimizer; NULL is the default stream
    int64_t stated_error_ns; // as the ring says
    uint64_t stated_lost;
    uint64_t since_stated; // events
};

struct core_device_stamps *core_device_stamps_open(struct core_state *state, PyObject *tensor, const char *library) {
    struct nb_error err = {0};
    struct core_device where = {0};
    if (core_tensor_device(tensor, &where) < 0) {
        return NULL;
    }
    if (where.type == 0) {
        PyErr_SetString(PyExc_ValueError, "the tensor is in host memory: stamps of the host need no device");
        return NULL;
    }
    struct core_device_stamps *self = calloc(1, sizeof *self);
    if (self == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    self->where = where;
    int rc = nb_cuda_driver_open(&self->driver, library, &err);
    if (rc == 0 && (rc = nb_cuda_device_open(&self->device, &self->driver, where.number, &err)) == 0 &&
        (rc = nb_cuda_clock_open(&self->clock, &self->device, &state->kept_streams, &err)) < 0) {
        nb_cuda_device_close(&self->device);
    }
    if (rc < 0) {
        free(self);
        core_raise(state, rc, &err);
        return NULL;
    }
    return self;
}

// The times of the training's stream are in order. Other streams may carry operations, and end them.
static bool is_in_order(struct core_device_stamps *self, const struct nb_event *event, void *stream) {
    bool of_model = event->kind == NB_EV_FORWARD_BEGIN && event->key == 0;
    if (of_model || event->kind == NB_EV_OPTIMIZER_BEGIN) {
        self->training = stream;
        self->knows_training = true;
    }
    return event->kind != NB_EV_OP_DONE && (stream == self->training || !self->knows_training);
}

// True for the kinds of which a reader also needs the host's time.
static bool has_host_time(uint32_t kind) {
    return kind == NB_EV_STEP_BEGIN || kind == NB_EV_STEP_END || kind == NB_EV_OP_START;
}

bool core_device_stamps_takes(const struct core_device_stamps *self, uint32_t kind, struct core_device *where) {
    *where = self->where;
    return self->failure.code == 0 && (kind != NB_EV_GRAD_READY || self->detailed);
}

void core_device_stamps_put(struct core_device_stamps *self, const struct nb_ring *ring, struct nb_event event,
                            void *const *stream) {
    if (stream == NULL) {
        nb_fail(&self->failure, -EIO, "torch does not say which stream of device %d is current", self->where.number);
        return;
    }
    struct nb_cuda_mark mark;
    event.step = nb_ring_step(ring);
    event.e = has_host_time(event.kind) ? (uint64_t)event.time_ns : event.e;
    memcpy(&mark, &event, sizeof mark);
    (void)nb_cuda_clock_mark(self->clock, *stream, &mark, is_in_order(self, &event, *stream), &self->failure);
}

// States the error of the clock when it has grown by a quarter or fallen to half, and the stamps that were lost; both
// again after STATED_EVENTS.
static void state_error(struct core_device_stamps *self, struct nb_ring *ring) {
    int64_t before_ns = self->stated_error_ns;
    int64_t error_ns = nb_cuda_clock_take_error_ns(self->clock);
    uint64_t lost = nb_cuda_clock_lost(self->clock);
    bool other = error_ns > 0 && (error_ns > before_ns + before_ns / 4 || error_ns < before_ns / 2);
    bool again = before_ns > 0 && self->since_stated >= STATED_EVENTS;
    if (other || again || lost > self->stated_lost) {
        self->since_stated = 0;
        self->stated_error_ns = error_ns = other ? error_ns : before_ns;
        self->stated_lost = lost;
        nb_ring_put(ring, NB_EV_DEVICE_CLOCK, 0, (uint64_t)self->where.number, (uint64_t)error_ns, lost, 0, 0);
    }
}

static int read_all(struct core_device_stamps *self, struct nb_ring *ring, struct nb_error *err) {
    struct nb_cuda_mark mark;
    struct nb_event event;
    int64_t time_ns = 0;
    int rc = nb_cuda_clock_look(self->clock, err);
    while (rc >= 0 && (rc = nb_cuda_clock_next(self->clock, &mark, &time_ns, err)) > 0) {
        memcpy(&event, &mark, sizeof event);
        event.e = has_host_time(event.kind) ? (uint64_t)time_ns - event.e : event.e;
        event.time_ns = time_ns;
        nb_ring_put_event(ring, &event);
        self->since_stated++;
    }
    state_error(self, ring);
    return rc;
}

Py_ssize_t core_device_stamps_read(struct core_device_stamps *self, const struct core_state *state,
                                   struct nb_ring *ring) {
    if (self->failure.code == 0) {
        (void)read_all(self, ring, &self->failure);
    }
    if (self->failure.code != 0) {
        core_raise(state, self->failure.code, &self->failure);
        return -1;
    }
    return (Py_ssize_t)nb_cuda_clock_pending(self->clock);
}

void core_device_stamps_close(struct core_device_stamps *self, struct nb_ring *ring, int64_t limit_ns) {
    if (self == NULL) {
        return;
    }
    const struct timespec pause = {.tv_nsec = POLL_NS};
    struct nb_error err = self->failure;
    int64_t until_ns = nb_now_ns() + limit_ns;
    while (err.code == 0 && read_all(self, ring, &err) >= 0 && nb_cuda_clock_pending(self->clock) > 0 &&
           nb_now_ns() < until_ns) {
        (void)nanosleep(&pause, NULL);
    }
    for (size_t left = nb_cuda_clock_pending(self->clock); left > 0; left--) {
        nb_ring_drop(ring);
    }
    nb_cuda_clock_close(self->clock);
    nb_cuda_device_close(&self->device);
    free(self);
}

void core_device_stamps_detail(struct core_device_stamps *self, bool detailed) {
    self->detailed = detailed;
}

void *core_device_stamps_stream(const struct core_device_stamps *self) {
    return nb_cuda_clock_stream(self->clock);
}
