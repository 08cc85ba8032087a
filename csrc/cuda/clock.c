// Device clock: queue of marks, their times after a moving base, and the offset between the clocks by probes.
#include "cuda/clock.h"

#include <errno.h>
#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/error.h"
#include "cuda/driver.h"

enum {
    MARKS_MAX = 8192,             // in the queue
    REBASE_NS = 50 * 1000 * 1000, // a float of 50 ms has a resolution of 4 ns, below the driver's own
    PROBE_NS = 50 * 1000 * 1000,  // between two probes
    COARSE_NS = 100 * 1000,       // an offset that is known less well is probed every
    COARSE_PROBE_NS = 5 * 1000 * 1000,
    PROBE_SPIN_NS = 100 * 1000,
    FIRST_SPIN_NS = 10 * 1000 * 1000,
    RESOLUTION_NS = 500, // cuEventElapsedTime
    DRIFT = 5000,        // two clocks drift apart by at most 1 ns in so many
};

struct queued {
    struct CUevent_st *event;
    struct nb_cuda_mark mark;
    int64_t recorded_ns; // before the call, on the host
    bool in_order;
};

// A moment on both clocks. `gpu_ns` counts from the first base.
struct moment {
    double gpu_ns;
    double host_ns;
    double error_ns;
};

struct nb_cuda_clock {
    const struct nb_cuda_device *device;
    struct CUstream_st *probes; // the stream of probes
    struct CUstream_st *own;    // the stream for the caller, which is kept
    struct CUevent_st *base;
    double base_gpu_ns;
    struct CUevent_st *probe;
    int64_t probe_recorded_ns; // 0: no probe is under way
    int64_t last_probe_ns;     // when it was recorded
    struct moment last;
    struct moment before; // error_ns < 0: none
    int64_t last_time_ns; // of the marks in order
    double worst_ns;      // error since it was last taken
    uint64_t lost;
    struct queued *queue; // circular
    size_t first;
    size_t count;
    struct CUevent_st **unused;
    size_t unused_count;
};

// ---- calls of the driver, after nb_cuda_enter_relaxed()

static int take_event(struct nb_cuda_clock *clock, struct CUevent_st **out, struct nb_error *err) {
    if (clock->unused_count > 0) {
        *out = clock->unused[--clock->unused_count];
        return 0;
    }
    return nb_cuda_check(clock->device, clock->device->driver->event_create(out, 0), "cuEventCreate", 0, err);
}

// There is room: the queue, the base and the probe are all events that exist.
static void return_event(struct nb_cuda_clock *clock, struct CUevent_st *event) {
    clock->unused[clock->unused_count++] = event;
}

static int record(const struct nb_cuda_clock *clock, struct CUevent_st *event, struct CUstream_st *stream,
                  struct nb_error *err) {
    return nb_cuda_record(clock->device, event, stream, err);
}

// Time of an event that the GPU has passed, on the GPU's clock.
static int gpu_time(const struct nb_cuda_clock *clock, struct CUevent_st *event, double *gpu_ns, struct nb_error *err) {
    float ms = 0;
    int rc = nb_cuda_check(clock->device, clock->device->driver->event_elapsed(&ms, clock->base, event),
                           "cuEventElapsedTime", 0, err);
    *gpu_ns = clock->base_gpu_ns + (double)ms * 1e6;
    return rc;
}

// The driver rounds the time between the base and an event to a float.
static double rounding_ns(const struct nb_cuda_clock *clock, double gpu_ns) {
    return (gpu_ns - clock->base_gpu_ns) * FLT_EPSILON / 2;
}

// ---- the offset between the clocks

// True if the moment bounds the offset better than the last one does by now.
static bool is_better(const struct nb_cuda_clock *clock, const struct moment *found) {
    double aged_ns = clock->last.error_ns + (found->host_ns - clock->last.host_ns) / DRIFT;
    return clock->last.error_ns < 0 || found->error_ns <= aged_ns;
}

// Takes over a probe that the GPU has passed by `seen_ns`.
static int take_probe(struct nb_cuda_clock *clock, int64_t seen_ns, struct nb_error *err) {
    struct moment found = {.host_ns = ((double)clock->probe_recorded_ns + (double)seen_ns) / 2,
                           .error_ns = (double)(seen_ns - clock->probe_recorded_ns) / 2 + RESOLUTION_NS};
    int rc = gpu_time(clock, clock->probe, &found.gpu_ns, err);
    found.error_ns += rounding_ns(clock, found.gpu_ns);
    clock->probe_recorded_ns = 0;
    if (rc == 0 && is_better(clock, &found)) {
        clock->before = clock->last;
        clock->last = found;
    }
    return rc;
}

// Spins until the GPU has passed the probe, for at most `spin_ns`.
static int follow_probe(struct nb_cuda_clock *clock, int64_t spin_ns, struct nb_error *err) {
    const int64_t until_ns = nb_now_ns() + spin_ns;
    int rc;
    int64_t seen_ns;
    do {
        rc = nb_cuda_is_passed(clock->device, clock->probe, err);
        seen_ns = nb_now_ns();
    } while (rc == 0 && seen_ns < until_ns);
    return rc > 0 ? take_probe(clock, seen_ns, err) : rc;
}

static bool is_coarse(const struct nb_cuda_clock *clock) {
    return clock->last.error_ns < 0 || clock->last.error_ns > COARSE_NS;
}

// Takes over the probe under way, or takes another one at least `every_ns` after the last.
static int probe(struct nb_cuda_clock *clock, int64_t every_ns, int64_t spin_ns, struct nb_error *err) {
    int rc = clock->probe_recorded_ns != 0 ? follow_probe(clock, 0, err) : 0;
    int64_t now_ns = nb_now_ns();
    if (rc < 0 || clock->probe_recorded_ns != 0 || now_ns - clock->last_probe_ns < every_ns) {
        return rc;
    }
    rc = record(clock, clock->probe, clock->probes, err);
    if (rc < 0) {
        return rc;
    }
    clock->probe_recorded_ns = clock->last_probe_ns = now_ns;
    return follow_probe(clock, spin_ns, err);
}

// Between the last two moments on the line through them, else by the rate of the nearer clock.
static double host_time(const struct nb_cuda_clock *clock, double gpu_ns, double *error_ns) {
    const struct moment *last = &clock->last;
    const struct moment *before = &clock->before;
    double rate = 1;
    double span_ns = last->gpu_ns - before->gpu_ns;
    if (before->error_ns >= 0 && span_ns > 0) {
        rate = (last->host_ns - before->host_ns) / span_ns;
        rate = fmin(fmax(rate, 1 - 1.0 / DRIFT), 1 + 1.0 / DRIFT);
    }
    double away_ns = gpu_ns - last->gpu_ns;
    bool between = before->error_ns >= 0 && away_ns <= 0 && gpu_ns >= before->gpu_ns;
    double drift = fabs(rate - 1) + 1.0 / DRIFT; // errors of the two moments may have turned the rate the wrong way
    *error_ns = between ? fmax(last->error_ns, before->error_ns) : last->error_ns + fabs(away_ns) * drift;
    return last->host_ns + rate * away_ns;
}

// ---- marks

int nb_cuda_clock_mark(struct nb_cuda_clock *clock, struct CUstream_st *stream, const struct nb_cuda_mark *mark,
                       bool in_order, struct nb_error *err) {
    unsigned mode = 0;
    if (clock->count == MARKS_MAX) {
        clock->lost++;
        return 0;
    }
    int rc = nb_cuda_enter_relaxed(clock->device, &mode, err);
    if (rc < 0) {
        return rc;
    }
    rc = nb_cuda_is_captured(clock->device, stream, err);
    struct queued queued = {.mark = *mark, .recorded_ns = nb_now_ns(), .in_order = in_order};
    if (rc > 0) {
        clock->lost++;
        rc = 0;
    } else if (rc == 0 && (rc = take_event(clock, &queued.event, err)) == 0) {
        if ((rc = record(clock, queued.event, stream, err)) == 0) {
            clock->queue[(clock->first + clock->count++) % MARKS_MAX] = queued;
        } else {
            return_event(clock, queued.event);
        }
    }
    nb_cuda_leave_relaxed(clock->device, mode);
    return rc;
}

int nb_cuda_clock_look(struct nb_cuda_clock *clock, struct nb_error *err) {
    unsigned mode = 0;
    int rc = nb_cuda_enter_relaxed(clock->device, &mode, err);
    if (rc == 0) {
        rc = probe(clock, is_coarse(clock) ? COARSE_PROBE_NS : PROBE_NS, PROBE_SPIN_NS, err);
        nb_cuda_leave_relaxed(clock->device, mode);
    }
    return rc;
}

// Makes an event the base if the present one is too old, else returns it.
static void release_mark(struct nb_cuda_clock *clock, struct CUevent_st *event, double gpu_ns) {
    // A probe under way would lie before the new base, which the driver may refuse.
    if (gpu_ns - clock->base_gpu_ns > REBASE_NS && clock->probe_recorded_ns == 0) {
        const double moved_ns = rounding_ns(clock, gpu_ns); // of later times against the moments
        clock->last.error_ns += moved_ns;
        clock->before.error_ns += clock->before.error_ns >= 0 ? moved_ns : 0;
        return_event(clock, clock->base);
        clock->base = event;
        clock->base_gpu_ns = gpu_ns;
    } else {
        return_event(clock, event);
    }
}

// The host's time of a mark: between the call that recorded it and now, and not before the mark in order before it.
static int64_t mark_time(struct nb_cuda_clock *clock, const struct queued *queued, double gpu_ns) {
    double error_ns;
    int64_t time_ns = (int64_t)llround(host_time(clock, gpu_ns, &error_ns));
    clock->worst_ns = fmax(clock->worst_ns, error_ns + rounding_ns(clock, gpu_ns));
    int64_t now_ns = nb_now_ns();
    time_ns = time_ns > now_ns ? now_ns : time_ns < queued->recorded_ns ? queued->recorded_ns : time_ns;
    if (queued->in_order) {
        time_ns = time_ns < clock->last_time_ns ? clock->last_time_ns : time_ns;
        clock->last_time_ns = time_ns;
    }
    return time_ns;
}

int nb_cuda_clock_next(struct nb_cuda_clock *clock, struct nb_cuda_mark *mark, int64_t *time_ns, struct nb_error *err) {
    unsigned mode = 0;
    if (clock->count == 0 || clock->last.error_ns < 0) {
        return 0;
    }
    int rc = nb_cuda_enter_relaxed(clock->device, &mode, err);
    if (rc < 0) {
        return rc;
    }
    const struct queued queued = clock->queue[clock->first];
    double gpu_ns = 0;
    rc = nb_cuda_is_passed(clock->device, queued.event, err);
    if (rc > 0 && (rc = gpu_time(clock, queued.event, &gpu_ns, err)) == 0) {
        *mark = queued.mark;
        *time_ns = mark_time(clock, &queued, gpu_ns);
        clock->first = (clock->first + 1) % MARKS_MAX;
        clock->count--;
        release_mark(clock, queued.event, gpu_ns);
        rc = 1;
    }
    nb_cuda_leave_relaxed(clock->device, mode);
    return rc;
}

int64_t nb_cuda_clock_take_error_ns(struct nb_cuda_clock *clock) {
    double worst_ns = clock->worst_ns;
    clock->worst_ns = 0;
    return (int64_t)ceil(worst_ns);
}

size_t nb_cuda_clock_pending(const struct nb_cuda_clock *clock) {
    return clock->count;
}

uint64_t nb_cuda_clock_lost(const struct nb_cuda_clock *clock) {
    return clock->lost;
}

struct CUstream_st *nb_cuda_clock_stream(const struct nb_cuda_clock *clock) {
    return clock->own;
}

// ---- open and close

static int open_stream(const struct nb_cuda_clock *clock, struct CUstream_st **out, struct nb_error *err) {
    return nb_cuda_check(clock->device, clock->device->driver->stream_create(out, NB_CUDA_STREAM_NON_BLOCKING),
                         "cuStreamCreate", 0, err);
}

// The device's kept stream, made if there is none. The context is retained for it, so that it outlives the device.
static int keep_stream(const struct nb_cuda_clock *clock, struct nb_cuda_kept_streams *kept, struct CUstream_st **out,
                       struct nb_error *err) {
    const struct nb_cuda_device *device = clock->device;
    const int ordinal = device->ordinal;
    struct CUctx_st *context = NULL;
    if (ordinal >= NB_CUDA_DEVICES_MAX) {
        return nb_fail(err, -ENODEV, "CUDA: device %d is beyond the first %d", ordinal, NB_CUDA_DEVICES_MAX);
    }
    int rc = 0;
    if (kept->of[ordinal] == NULL) {
        struct CUstream_st *made = NULL;
        rc = open_stream(clock, &made, err);
        if (rc == 0 && (rc = nb_cuda_check(device, device->driver->primary_retain(&context, device->handle),
                                           "cuDevicePrimaryCtxRetain", 0, err)) < 0) {
            (void)device->driver->stream_destroy(made);
        }
        kept->of[ordinal] = rc == 0 ? made : NULL;
    }
    *out = kept->of[ordinal];
    return rc;
}

// Takes probes until one bounds the offset well, for at most FIRST_SPIN_NS.
static int first_probes(struct nb_cuda_clock *clock, struct nb_error *err) {
    const int64_t until_ns = nb_now_ns() + FIRST_SPIN_NS;
    int rc;
    int64_t left_ns = FIRST_SPIN_NS;
    do {
        rc = probe(clock, 0, left_ns, err);
        left_ns = until_ns - nb_now_ns();
    } while (rc == 0 && is_coarse(clock) && left_ns > 0);
    return rc;
}

// Records the first base, and the first probes behind it.
static int start(struct nb_cuda_clock *clock, struct nb_cuda_kept_streams *kept, struct nb_error *err) {
    int rc;
    if ((rc = open_stream(clock, &clock->probes, err)) < 0 || (rc = keep_stream(clock, kept, &clock->own, err)) < 0 ||
        (rc = take_event(clock, &clock->base, err)) < 0 || (rc = take_event(clock, &clock->probe, err)) < 0 ||
        (rc = record(clock, clock->base, clock->probes, err)) < 0) {
        return rc;
    }
    return first_probes(clock, err);
}

static void destroy(struct nb_cuda_clock *clock) {
    const struct nb_cuda_driver *driver = clock->device->driver;
    for (; clock->count > 0; clock->count--) {
        return_event(clock, clock->queue[clock->first].event);
        clock->first = (clock->first + 1) % MARKS_MAX;
    }
    if (clock->base != NULL) {
        return_event(clock, clock->base);
    }
    if (clock->probe != NULL) {
        return_event(clock, clock->probe);
    }
    while (clock->unused_count > 0) {
        (void)driver->event_destroy(clock->unused[--clock->unused_count]);
    }
    if (clock->probes != NULL) {
        (void)driver->stream_destroy(clock->probes);
    }
}

int nb_cuda_clock_open(struct nb_cuda_clock **out, const struct nb_cuda_device *device,
                       struct nb_cuda_kept_streams *kept, struct nb_error *err) {
    struct nb_cuda_clock *clock = calloc(1, sizeof *clock);
    if (clock == NULL) {
        return nb_fail(err, -ENOMEM, "CUDA: a clock of device %d", device->ordinal);
    }
    clock->device = device;
    clock->last.error_ns = clock->before.error_ns = -1;
    clock->queue = calloc(MARKS_MAX, sizeof *clock->queue);
    clock->unused = calloc(MARKS_MAX + 2, sizeof(*clock->unused)); // those of the queue, the base and the probe
    unsigned mode = 0;
    int rc = clock->queue != NULL && clock->unused != NULL
                 ? nb_cuda_enter_relaxed(clock->device, &mode, err)
                 : nb_fail(err, -ENOMEM, "CUDA: %d marks of device %d", MARKS_MAX, device->ordinal);
    if (rc == 0) {
        rc = start(clock, kept, err);
        nb_cuda_leave_relaxed(clock->device, mode);
    }
    if (rc < 0) {
        nb_cuda_clock_close(clock);
        return rc;
    }
    *out = clock;
    return 0;
}

void nb_cuda_clock_close(struct nb_cuda_clock *clock) {
    struct nb_error ignored = {0};
    unsigned mode = 0;
    if (clock == NULL) {
        return;
    }
    if (clock->queue != NULL && clock->unused != NULL && nb_cuda_enter_relaxed(clock->device, &mode, &ignored) == 0) {
        destroy(clock);
        nb_cuda_leave_relaxed(clock->device, mode);
    }
    free(clock->queue);
    free(clock->unused);
    free(clock);
}
