// Fake CUDA driver: implementation of the controls in fake.h.
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "cuda/driver.h"
#include "fake_state.h"

static void free_streams(void) {
    while (fake.streams != NULL) {
        struct CUstream_st *stream = fake.streams;
        (void)pthread_join(stream->thread, NULL);
        while (stream->first != NULL) {
            struct operation *op = stream->first;
            stream->first = op->next;
            free(op->staged);
            free(op);
        }
        fake.streams = stream->next;
        free(stream);
    }
}

static void free_objects(void) {
    while (fake.events != NULL) {
        struct CUevent_st *event = fake.events;
        fake.events = event->next;
        free(event);
    }
    while (fake.modules != NULL) {
        struct CUmod_st *module = fake.modules;
        fake.modules = module->next;
        free(module);
    }
    while (fake.registrations != NULL) {
        struct registration *registration = fake.registrations;
        fake.registrations = registration->next;
        free(registration);
    }
    while (fake.allocations != NULL) {
        struct allocation *it = fake.allocations;
        (void)munmap(it->base, it->mapped);
        (void)munmap(it->alias, it->mapped);
        fake.allocations = it->next;
        free(it);
    }
    free(fake.log);
}

static void control_reset(uint64_t seed, int64_t delay_max_ns) {
    (void)pthread_mutex_lock(&fake.lock);
    fake.ending = true;
    (void)pthread_cond_broadcast(&fake.changed);
    (void)pthread_mutex_unlock(&fake.lock);
    free_streams();
    (void)pthread_mutex_lock(&fake.lock);
    free_objects();
    fake.log = NULL;
    fake.logged = fake.log_room = 0;
    fake.reported_done = NULL;
    fake.capturing = fake.refusals = 0;
    fake.clock_ppm = 0;
    fake.fail_symbol = NULL;
    memset(fake.contexts, 0, sizeof fake.contexts);
    fake.seed = seed;
    fake.delay_max_ns = delay_max_ns;
    fake.version = FAKE_VERSION;
    fake.calls = fake.poll_calls = fake.fail_poll_in = fake.executed = fake.pageable_copies = fake.fail_in =
        fake.break_in = fake.drop_in = 0;
    fake.initialized = fake.broken = fake.ending = false;
    (void)pthread_mutex_unlock(&fake.lock);
    fake_contexts_forget();
}

static void control_set_version(int version) {
    fake.version = version;
}

static void control_fail_call(int n, unsigned result) {
    (void)pthread_mutex_lock(&fake.lock);
    fake.fail_in = n;
    fake.fail_with = result;
    (void)pthread_mutex_unlock(&fake.lock);
}

static void control_fail_poll(int n, unsigned result) {
    (void)pthread_mutex_lock(&fake.lock);
    fake.fail_poll_in = n;
    fake.fail_with = result;
    (void)pthread_mutex_unlock(&fake.lock);
}

static void control_fail_named(const char *symbol, int device, unsigned result) {
    (void)pthread_mutex_lock(&fake.lock);
    fake.fail_symbol = symbol;
    fake.fail_device = device;
    fake.fail_symbol_with = result;
    (void)pthread_mutex_unlock(&fake.lock);
}

static void control_break_operation(int n) {
    (void)pthread_mutex_lock(&fake.lock);
    fake.break_in = n;
    (void)pthread_mutex_unlock(&fake.lock);
}

static int control_calls(void) {
    (void)pthread_mutex_lock(&fake.lock);
    int calls = fake.calls;
    (void)pthread_mutex_unlock(&fake.lock);
    return calls;
}

static int control_operations(void) {
    (void)pthread_mutex_lock(&fake.lock);
    int executed = fake.executed;
    (void)pthread_mutex_unlock(&fake.lock);
    return executed;
}

static int control_pending(const struct CUstream_st *stream) {
    (void)pthread_mutex_lock(&fake.lock);
    int pending = (int)(stream->submitted - stream->executed);
    (void)pthread_mutex_unlock(&fake.lock);
    return pending;
}

static unsigned long long control_submitted(const struct CUstream_st *stream) {
    (void)pthread_mutex_lock(&fake.lock);
    unsigned long long submitted = stream->submitted;
    (void)pthread_mutex_unlock(&fake.lock);
    return submitted;
}

static int control_priority(const struct CUstream_st *stream) {
    return stream->priority;
}

static void control_hold(struct CUstream_st *stream, bool held) {
    (void)pthread_mutex_lock(&fake.lock);
    stream->held = held;
    (void)pthread_cond_broadcast(&fake.changed);
    (void)pthread_mutex_unlock(&fake.lock);
}

static void control_capture(struct CUstream_st *stream, bool captured) {
    (void)pthread_mutex_lock(&fake.lock);
    fake.capturing += (int)captured - (int)stream->captured;
    stream->captured = captured;
    (void)pthread_mutex_unlock(&fake.lock);
}

static void control_drop_wait(int n) {
    (void)pthread_mutex_lock(&fake.lock);
    fake.drop_in = n;
    (void)pthread_mutex_unlock(&fake.lock);
}

static void control_set_clock(int64_t ppm) {
    (void)pthread_mutex_lock(&fake.lock);
    fake.clock_ppm = ppm;
    (void)pthread_mutex_unlock(&fake.lock);
}

static void control_report_done(const struct CUstream_st *stream) {
    (void)pthread_mutex_lock(&fake.lock);
    fake.reported_done = stream;
    (void)pthread_mutex_unlock(&fake.lock);
}

static void control_peek(void *to, nb_cuda_address from, size_t bytes) {
    (void)pthread_mutex_lock(&fake.lock);
    struct allocation *it = fake_allocation_of(from, bytes);
    if (it == NULL) {
        abort();
    }
    memcpy(to, fake_alias_open(it, from), bytes);
    fake_alias_close(it);
    (void)pthread_mutex_unlock(&fake.lock);
}

static void control_poke(nb_cuda_address to, const void *from, size_t bytes) {
    (void)pthread_mutex_lock(&fake.lock);
    struct allocation *it = fake_allocation_of(to, bytes);
    if (it == NULL) {
        abort();
    }
    memcpy(fake_alias_open(it, to), from, bytes);
    fake_alias_close(it);
    (void)pthread_mutex_unlock(&fake.lock);
}

static int control_refusals(void) {
    (void)pthread_mutex_lock(&fake.lock);
    int count = fake.refusals;
    (void)pthread_mutex_unlock(&fake.lock);
    return count;
}

static int control_pageable_copies(void) {
    (void)pthread_mutex_lock(&fake.lock);
    int count = fake.pageable_copies;
    (void)pthread_mutex_unlock(&fake.lock);
    return count;
}

static size_t control_log(size_t n, struct fake_entry *entries, size_t max) {
    (void)pthread_mutex_lock(&fake.lock);
    size_t available = n < fake.logged ? fake.logged - n : 0;
    size_t take = available < max ? available : max;
    if (take > 0) {
        memcpy(entries, fake.log + n, take * sizeof *entries);
    }
    (void)pthread_mutex_unlock(&fake.lock);
    return available;
}

static struct fake_live_objects control_live_objects(void) {
    struct fake_live_objects live_objects = {0};
    (void)pthread_mutex_lock(&fake.lock);
    for (int i = 0; i < FAKE_DEVICES; i++) {
        live_objects.contexts += fake.contexts[i].retained;
    }
    for (const struct CUstream_st *it = fake.streams; it != NULL; it = it->next) {
        live_objects.streams += !it->destroyed && it != it->context->default_stream;
    }
    for (const struct CUevent_st *it = fake.events; it != NULL; it = it->next) {
        live_objects.events += !it->destroyed;
    }
    for (const struct allocation *it = fake.allocations; it != NULL; it = it->next) {
        live_objects.allocations += !it->freed;
    }
    for (const struct registration *it = fake.registrations; it != NULL; it = it->next) {
        live_objects.registrations++;
    }
    for (const struct CUmod_st *it = fake.modules; it != NULL; it = it->next) {
        live_objects.modules += !it->unloaded;
    }
    (void)pthread_mutex_unlock(&fake.lock);
    return live_objects;
}

FAKE_EXPORT const struct fake_controls *fake_controls(void);
FAKE_EXPORT const struct fake_controls *fake_controls(void) {
    static const struct fake_controls controls = {
        .reset = control_reset,
        .set_version = control_set_version,
        .fail_call = control_fail_call,
        .fail_poll = control_fail_poll,
        .fail_named = control_fail_named,
        .break_operation = control_break_operation,
        .calls = control_calls,
        .polls = fake_polls,
        .operations = control_operations,
        .pending = control_pending,
        .submitted = control_submitted,
        .priority = control_priority,
        .hold = control_hold,
        .capture = control_capture,
        .drop_wait = control_drop_wait,
        .set_clock = control_set_clock,
        .report_done = control_report_done,
        .peek = control_peek,
        .poke = control_poke,
        .refusals = control_refusals,
        .pageable_copies = control_pageable_copies,
        .log = control_log,
        .live_objects = control_live_objects,
    };
    return &controls;
}
