// Fake CUDA driver: implements, with host threads and host memory, the functions that the core calls.
//
// Device memory is a file that is mapped twice. The mapping at the address that the caller gets has no access rights,
// so the host cannot access it. The other mapping is accessible only while an operation of a stream uses it. Destroyed
// objects are kept until a reset, so that their later use is detected.
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "cuda/driver.h"
#include "cuda/kernels.h"
#include "fake_state.h"

static unsigned char *kernel_memory(uint64_t address, uint64_t bytes);
#define NB_KERNEL_AT(address, bytes) kernel_memory(address, bytes)
#include "cuda/kernels.cu"

#define DECLARED(member, symbol, parameters) FAKE_EXPORT unsigned symbol parameters;
NB_CUDA_CALLS(DECLARED)
#undef DECLARED

enum {
    NOT_INITIALIZED = 3,
    CAPTURE_ISOLATION = 905,
    CONTEXTS_MAX = 16,
    OPENED_MAX = 8192,
    GARBAGE = 0xee,
    DELAY_NS = 200000,
    MAPPED_BIT = 62, // of the device's address of registered memory
    MODULE_MAGIC = (int)0xba55ed50
};

struct fake_state fake = {
    .lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER, .version = FAKE_VERSION};

static _Thread_local struct {
    struct CUctx_st *contexts[CONTEXTS_MAX];
    int depth;
    unsigned capture_mode;
    int polls;
    bool captured; // see fake_capture_here
    int records;
} current;

static uint64_t draw(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

// With equal probability: returns at once, yields, or sleeps.
static void delay(struct CUstream_st *stream, int64_t max_ns) {
    uint64_t drawn = draw(&stream->random);
    if (max_ns > 0 && drawn % 3 == 0) {
        const struct timespec pause = {.tv_nsec = (long)(drawn / 3 % (uint64_t)max_ns)};
        (void)nanosleep(&pause, NULL);
    } else if (max_ns > 0 && drawn % 3 == 1) {
        (void)sched_yield();
    }
}

// Memory. The caller holds the lock.

struct allocation *fake_allocation_of(nb_cuda_address address, size_t bytes) {
    for (struct allocation *it = fake.allocations; it != NULL; it = it->next) {
        uintptr_t base = (uintptr_t)it->base;
        if (!it->freed && address >= base && bytes <= it->bytes && address - base <= it->bytes - bytes) {
            return it;
        }
    }
    return NULL;
}

unsigned char *fake_alias_open(struct allocation *it, nb_cuda_address address) {
    if (it->users++ == 0 && mprotect(it->alias, it->mapped, PROT_READ | PROT_WRITE) != 0) {
        abort();
    }
    return it->alias + (address - (uintptr_t)it->base);
}

void fake_alias_close(struct allocation *it) {
    if (--it->users == 0 && mprotect(it->alias, it->mapped, PROT_NONE) != 0) {
        abort();
    }
}

// The registration that has all of this memory.
static const struct registration *registration_of(const void *memory, size_t bytes) {
    const unsigned char *at = memory;
    const struct registration *it = fake.registrations;
    while (it != NULL && (at < it->base || bytes > it->bytes || (size_t)(at - it->base) > it->bytes - bytes)) {
        it = it->next;
    }
    return it;
}

// 1: all of it is registered; 0: none; -1: part of it.
static int pinned(const void *memory, size_t bytes) {
    const unsigned char *at = memory;
    bool touched = false;
    for (const struct registration *it = fake.registrations; it != NULL; it = it->next) {
        touched = touched || (at < it->base + it->bytes && it->base < at + bytes);
    }
    return registration_of(memory, bytes) != NULL ? 1 : touched ? -1 : 0;
}

// Registered memory that a kernel reaches by the device's address of it; NULL: it is none.
static unsigned char *mapped_memory(uint64_t address, uint64_t bytes) {
    const uint64_t bit = (uint64_t)1 << MAPPED_BIT;
    unsigned char *at = (unsigned char *)(uintptr_t)(address & ~bit);
    const struct registration *it = (address & bit) != 0 ? registration_of(at, bytes) : NULL;
    return it != NULL && it->mapped ? at : NULL;
}

// Operations, on a stream's thread. The caller does not hold the lock.

static _Thread_local struct {
    struct allocation *opened[OPENED_MAX];
    int count;
    jmp_buf fault;
} kernel_state;

static unsigned char *kernel_memory(uint64_t address, uint64_t bytes) {
    (void)pthread_mutex_lock(&fake.lock);
    struct allocation *it = fake_allocation_of(address, bytes);
    unsigned char *at = mapped_memory(address, bytes);
    bool right = at != NULL || (it != NULL && kernel_state.count < OPENED_MAX);
    if (right && at == NULL) {
        at = fake_alias_open(it, address);
        kernel_state.opened[kernel_state.count++] = it;
    }
    (void)pthread_mutex_unlock(&fake.lock);
    if (!right) {
        longjmp(kernel_state.fault, 1);
    }
    return at;
}

// Fills the destination of a list of pieces with garbage, which it holds until the kernel runs.
static void spoil(const struct operation *op) {
    const bool packs = op->kernel == NB_CUDA_PACK;
    if (!packs && op->kernel != NB_CUDA_UNPACK) {
        return;
    }
    const struct nb_cuda_piece *list = (const void *)kernel_memory(op->from, op->count * sizeof *list);
    for (uint64_t i = 0; i < op->count; i++) {
        memset(kernel_memory(packs ? op->to + list[i].offset_bytes : list[i].address, list[i].bytes), GARBAGE,
               list[i].bytes);
    }
}

static bool run_kernel(struct CUstream_st *stream, const struct operation *op, int64_t max_ns) {
    static void (*const kernels[])(uint64_t to, uint64_t from, uint64_t count, double factor) = {
#define KERNEL(number, name) [number] = name,
        NB_CUDA_KERNELS(KERNEL)
#undef KERNEL
    };
    kernel_state.count = 0;
    volatile bool right = false;
    if (setjmp(kernel_state.fault) == 0) {
        spoil(op);
        delay(stream, max_ns);
        kernels[op->kernel](op->to, op->from, op->count, op->factor);
        right = true;
    }
    (void)pthread_mutex_lock(&fake.lock);
    for (int i = 0; i < kernel_state.count; i++) {
        fake_alias_close(kernel_state.opened[i]);
    }
    (void)pthread_mutex_unlock(&fake.lock);
    return right;
}

// Copies in two parts. The destination of a copy to the host holds garbage until its part is copied.
static bool run_copy(struct CUstream_st *stream, const struct operation *op, int64_t max_ns) {
    (void)pthread_mutex_lock(&fake.lock);
    struct allocation *it = fake_allocation_of(op->address, op->bytes);
    bool right = it != NULL && (!op->pinned || pinned(op->host, op->bytes) == 1);
    unsigned char *device = right ? fake_alias_open(it, op->address) : NULL;
    (void)pthread_mutex_unlock(&fake.lock);
    if (!right) {
        return false;
    }
    const size_t half = op->bytes / 2;
    unsigned char *host = op->staged != NULL ? op->staged : op->host;
    if (op->kind == FAKE_TO_HOST) {
        memset(host, GARBAGE, op->bytes);
        memcpy(host, device, half);
        delay(stream, max_ns);
        memcpy(host + half, device + half, op->bytes - half);
    } else {
        memcpy(device, host, half);
        delay(stream, max_ns);
        memcpy(device + half, host + half, op->bytes - half);
    }
    (void)pthread_mutex_lock(&fake.lock);
    fake_alias_close(it);
    (void)pthread_mutex_unlock(&fake.lock);
    return true;
}

static bool execute(struct CUstream_st *stream, const struct operation *op, int64_t max_ns) {
    delay(stream, max_ns);
    switch (op->kind) {
    case FAKE_TO_HOST:
    case FAKE_TO_DEVICE:
        return run_copy(stream, op, max_ns);
    case FAKE_KERNEL:
        return run_kernel(stream, op, max_ns);
    case FAKE_RECORD:
    case FAKE_WAIT:
        break;
    }
    return true;
}

static void log_operation(const struct CUstream_st *stream, const struct operation *op) {
    if (fake.logged == fake.log_room) {
        fake.log_room = fake.log_room == 0 ? 256 : 2 * fake.log_room;
        fake.log = realloc(fake.log, fake.log_room * sizeof *fake.log);
        if (fake.log == NULL) {
            abort();
        }
    }
    fake.log[fake.logged++] = (struct fake_entry){op->kind, stream, op->event, op->address, op->bytes};
}

static int64_t device_clock_ns(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    int64_t host_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    return host_ns + host_ns / 1000000 * fake.clock_ppm;
}

static void *stream_main(void *argument) {
    struct CUstream_st *stream = argument;
    (void)pthread_mutex_lock(&fake.lock);
    while (!fake.ending && !(stream->destroyed && stream->first == NULL)) {
        struct operation *op = stream->first;
        bool waits = op != NULL && op->kind == FAKE_WAIT && op->event->completed < op->ticket && !fake.broken;
        if (op == NULL || waits || stream->held) {
            (void)pthread_cond_wait(&fake.changed, &fake.lock);
            continue;
        }
        bool right = true;
        if (!fake.broken) {
            int64_t max_ns = fake.delay_max_ns;
            (void)pthread_mutex_unlock(&fake.lock);
            right = execute(stream, op, max_ns);
            (void)pthread_mutex_lock(&fake.lock);
        }
        fake.executed++;
        fake.broken = fake.broken || !right || (fake.break_in > 0 && --fake.break_in == 0);
        if (!fake.broken) {
            log_operation(stream, op);
        }
        if (op->kind == FAKE_RECORD && op->event->completed < op->ticket) {
            op->event->completed = op->ticket;
            op->event->completed_ns = device_clock_ns();
        }
        stream->first = op->next;
        stream->last = stream->first == NULL ? &stream->first : stream->last;
        stream->executed++;
        free(op->staged);
        free(op);
        (void)pthread_cond_broadcast(&fake.changed);
    }
    (void)pthread_mutex_unlock(&fake.lock);
    return NULL;
}

static void submit(struct CUstream_st *stream, const struct operation *model) {
    struct operation *op = malloc(sizeof *op);
    if (op == NULL) {
        abort();
    }
    *op = *model;
    op->next = NULL;
    *stream->last = op;
    stream->last = &op->next;
    stream->submitted++;
    (void)pthread_cond_broadcast(&fake.changed);
}

static unsigned drain(const struct CUstream_st *stream) {
    const uint64_t until = stream->submitted;
    while (stream->executed < until && !fake.broken) {
        (void)pthread_cond_wait(&fake.changed, &fake.lock);
    }
    return fake.broken ? NB_CUDA_ILLEGAL_ADDRESS : NB_CUDA_SUCCESS;
}

// CUDA calls: each begins with ENTER, which takes the lock, and ends with leave().

#define ENTER_AS(how, symbol)                                                                                          \
    do {                                                                                                               \
        const unsigned refused = how(symbol);                                                                          \
        if (refused != NB_CUDA_SUCCESS) {                                                                              \
            return refused;                                                                                            \
        }                                                                                                              \
    } while (0)
#define ENTER(how) ENTER_AS(how, __func__)

static unsigned leave(unsigned result) {
    (void)pthread_mutex_unlock(&fake.lock);
    return result;
}

static struct CUctx_st *current_context(void) {
    return current.depth > 0 ? current.contexts[current.depth - 1] : NULL;
}

static bool is_selected(const char *symbol) {
    return fake.fail_symbol != NULL && strncmp(symbol, fake.fail_symbol, strlen(fake.fail_symbol)) == 0;
}

// True for the call selected by fail_named: by name without `_v2`, in the context of its device.
static bool fails_by_name(const char *symbol) {
    return is_selected(symbol) && current_context() == &fake.contexts[fake.fail_device];
}

static unsigned enter_counted(const char *symbol, int *calls, int *fail_in) {
    (void)pthread_mutex_lock(&fake.lock);
    ++*calls;
    if (fails_by_name(symbol)) {
        fake.fail_symbol = NULL;
        return leave(fake.fail_symbol_with);
    }
    if (*fail_in > 0 && --*fail_in == 0) {
        return leave(fake.fail_with);
    }
    return fake.broken ? leave(NB_CUDA_ILLEGAL_ADDRESS) : NB_CUDA_SUCCESS;
}

static unsigned check_initialized(unsigned result) {
    return result == NB_CUDA_SUCCESS && !fake.initialized ? leave(NOT_INITIALIZED) : result;
}

void fake_contexts_forget(void) {
    current.depth = 0;
}

int fake_polls(void) {
    return current.polls;
}

static unsigned check_context(unsigned result) {
    bool wrong = current_context() == NULL || current_context()->retained == 0;
    return result == NB_CUDA_SUCCESS && wrong ? leave(NB_CUDA_INVALID_CONTEXT) : result;
}

static unsigned enter_uninitialized(const char *symbol) {
    return enter_counted(symbol, &fake.calls, &fake.fail_in);
}

static unsigned enter_initialized(const char *symbol) {
    return check_initialized(enter_uninitialized(symbol));
}

static unsigned enter(const char *symbol) {
    return check_context(enter_initialized(symbol));
}

static bool is_forbidden(void) {
    return fake.capturing > 0 && current.capture_mode != NB_CUDA_CAPTURE_RELAXED;
}

static unsigned refuse(unsigned result) {
    fake.refusals++;
    return leave(result);
}

static unsigned enter_unsafe(const char *symbol) {
    unsigned result = enter(symbol);
    return result == NB_CUDA_SUCCESS && is_forbidden() ? refuse(NB_CUDA_CAPTURE_UNSUPPORTED) : result;
}

// Calls that polling repeats have their own count, so that the numbers of all other calls are the same in each run.
static unsigned enter_push(const char *symbol) {
    current.polls++;
    return check_initialized(enter_counted(symbol, &fake.poll_calls, &fake.fail_poll_in));
}

static unsigned enter_query(const char *symbol) {
    return check_context(enter_push(symbol));
}

// After ENTER. NULL: no thread can be started.
static struct CUstream_st *make_stream(int priority) {
    struct CUstream_st *made = calloc(1, sizeof *made);
    if (made == NULL) {
        abort();
    }
    made->context = current_context();
    made->last = &made->first;
    made->priority = priority;
    made->random = draw(&fake.seed);
    made->next = fake.streams;
    if (pthread_create(&made->thread, NULL, stream_main, made) != 0) {
        free(made);
        return NULL;
    }
    fake.streams = made;
    return made;
}

// The stream that a caller names. NULL names the default stream of the current context. As all other streams are
// non-blocking, it does not wait for them, nor they for it.
static struct CUstream_st *stream_of(struct CUstream_st *named) {
    struct CUctx_st *context = current_context();
    if (named != NULL) {
        return named;
    }
    if (context->default_stream == NULL) {
        context->default_stream = make_stream(0);
    }
    return context->default_stream;
}

static bool stream_exists(const struct CUstream_st *stream) {
    const struct CUstream_st *it = fake.streams;
    while (it != NULL && it != stream) {
        it = it->next;
    }
    return it != NULL && !it->destroyed;
}

static bool stream_is_valid(const struct CUstream_st *stream) {
    return stream_exists(stream) && stream->context == current_context();
}

static bool event_is_valid(const struct CUevent_st *event) {
    const struct CUevent_st *it = fake.events;
    while (it != NULL && it != event) {
        it = it->next;
    }
    return it != NULL && !it->destroyed;
}

unsigned cuDriverGetVersion(int *version) {
    const char *named = getenv("FAKE_CUDA_VERSION"); // for programs that cannot use the controls, as in cuInit
    *version = named != NULL ? (int)strtol(named, NULL, 10) : fake.version;
    return NB_CUDA_SUCCESS;
}

unsigned cuInit(unsigned flags) {
    ENTER(enter_uninitialized);
    if (!fake.initialized && getenv("FAKE_CUDA_SEED") != NULL) { // for programs that cannot use the controls
        fake.seed = strtoul(getenv("FAKE_CUDA_SEED"), NULL, 10);
        fake.delay_max_ns = DELAY_NS;
    }
    if (!fake.initialized && getenv("FAKE_CUDA_FAIL") != NULL) {
        fake.fail_symbol = getenv("FAKE_CUDA_FAIL");
        fake.fail_symbol_with = NB_CUDA_OUT_OF_MEMORY;
    }
    fake.initialized = fake.initialized || flags == 0;
    return leave(flags == 0 ? NB_CUDA_SUCCESS : NB_CUDA_INVALID_VALUE);
}

static const struct {
    unsigned result;
    const char *name;
    const char *text;
} results[] = {
    {NB_CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {NB_CUDA_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {NB_CUDA_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NB_CUDA_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {NB_CUDA_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {NB_CUDA_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NB_CUDA_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {NB_CUDA_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
};

static const char *result_text(unsigned result, bool name) {
    for (size_t i = 0; i < sizeof results / sizeof results[0]; i++) {
        if (results[i].result == result) {
            return name ? results[i].name : results[i].text;
        }
    }
    return NULL;
}

unsigned cuGetErrorName(unsigned result, const char **name) {
    *name = result_text(result, true);
    return *name != NULL ? NB_CUDA_SUCCESS : NB_CUDA_INVALID_VALUE;
}

unsigned cuGetErrorString(unsigned result, const char **text) {
    *text = result_text(result, false);
    return *text != NULL ? NB_CUDA_SUCCESS : NB_CUDA_INVALID_VALUE;
}

unsigned cuDeviceGetCount(int *count) {
    ENTER(enter_initialized);
    *count = FAKE_DEVICES;
    return leave(NB_CUDA_SUCCESS);
}

unsigned cuDeviceGet(int *device, int ordinal) {
    ENTER(enter_initialized);
    if (ordinal < 0 || ordinal >= FAKE_DEVICES) {
        return leave(NB_CUDA_INVALID_DEVICE);
    }
    *device = ordinal;
    return leave(NB_CUDA_SUCCESS);
}

unsigned cuDeviceGetName(char *name, int bytes, int device) {
    ENTER(enter_initialized);
    (void)snprintf(name, (size_t)bytes, "Fake GPU %d", device);
    return leave(NB_CUDA_SUCCESS);
}

unsigned cuDevicePrimaryCtxRetain(struct CUctx_st **context, int device) {
    ENTER(enter_initialized);
    if (device < 0 || device >= FAKE_DEVICES) {
        return leave(NB_CUDA_INVALID_DEVICE);
    }
    if (device == fake.fail_device && is_selected(__func__)) { // without a context, unlike the others
        return leave(fake.fail_symbol_with);
    }
    fake.contexts[device].retained++;
    *context = &fake.contexts[device];
    return leave(NB_CUDA_SUCCESS);
}

unsigned cuDevicePrimaryCtxRelease_v2(int device) {
    ENTER(enter_initialized);
    if (device < 0 || device >= FAKE_DEVICES || fake.contexts[device].retained == 0) {
        return leave(NB_CUDA_INVALID_CONTEXT);
    }
    fake.contexts[device].retained--;
    return leave(NB_CUDA_SUCCESS);
}

unsigned cuCtxPushCurrent_v2(struct CUctx_st *context) {
    ENTER(enter_push);
    if (context == NULL || context->retained == 0 || current.depth == CONTEXTS_MAX) {
        return leave(NB_CUDA_INVALID_CONTEXT);
    }
    current.contexts[current.depth++] = context;
    return leave(NB_CUDA_SUCCESS);
}

// Not counted: it cannot fail after a push.
unsigned cuCtxPopCurrent_v2(struct CUctx_st **context) {
    if (current.depth == 0) {
        return NB_CUDA_INVALID_CONTEXT;
    }
    *context = current.contexts[--current.depth];
    return NB_CUDA_SUCCESS;
}

unsigned cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    ENTER(enter);
    *least = 0;
    *greatest = FAKE_PRIORITY_GREATEST;
    return leave(NB_CUDA_SUCCESS);
}

// After ENTER.
static unsigned create_stream(struct CUstream_st **stream, unsigned flags, int priority) {
    if ((flags & ~(unsigned)NB_CUDA_STREAM_NON_BLOCKING) != 0) {
        return leave(NB_CUDA_INVALID_VALUE);
    }
    struct CUstream_st *made = make_stream(priority);
    if (made == NULL) {
        return leave(NB_CUDA_OUT_OF_MEMORY);
    }
    *stream = made;
    return leave(NB_CUDA_SUCCESS);
}

unsigned cuStreamCreate(struct CUstream_st **stream, unsigned flags) {
    ENTER(enter);
    return create_stream(stream, flags, 0);
}

unsigned cuStreamCreateWithPriority(struct CUstream_st **stream, unsigned flags, int priority) {
    ENTER(enter);
    return create_stream(stream, flags, priority);
}

unsigned cuStreamDestroy_v2(struct CUstream_st *stream) {
    ENTER(enter);
    if (!stream_is_valid(stream)) {
        return leave(NB_CUDA_INVALID_HANDLE);
    }
    stream->destroyed = true; // its thread ends after its enqueued operations
    (void)pthread_cond_broadcast(&fake.changed);
    return leave(NB_CUDA_SUCCESS);
}

unsigned cuStreamWaitEvent(struct CUstream_st *stream, struct CUevent_st *event, unsigned flags) {
    ENTER(enter);
    stream = stream_of(stream);
    if (!stream_exists(stream) || !event_is_valid(event)) { // they may be of different contexts
        return leave(NB_CUDA_INVALID_HANDLE);
    }
    if (stream->captured) {
        return refuse(CAPTURE_ISOLATION);
    }
    bool drop = fake.drop_in > 0 && --fake.drop_in == 0;
    if (flags == 0 && event->recorded > 0 && !drop) {
        submit(stream, &(struct operation){.kind = FAKE_WAIT, .event = event, .ticket = event->recorded});
    }
    return leave(flags == 0 ? NB_CUDA_SUCCESS : NB_CUDA_INVALID_VALUE);
}

unsigned cuStreamSynchronize(struct CUstream_st *stream) {
    ENTER(enter);
    stream = stream_of(stream);
    return leave(stream_is_valid(stream) ? drain(stream) : NB_CUDA_INVALID_HANDLE);
}

unsigned cuStreamIsCapturing(struct CUstream_st *stream, unsigned *status) {
    ENTER(enter);
    stream = stream_of(stream);
    if (!stream_exists(stream)) {
        return leave(NB_CUDA_INVALID_HANDLE);
    }
    *status = stream->captured || current.captured;
    return leave(NB_CUDA_SUCCESS);
}

// For programs that cannot use the controls: all streams report to this thread that they are captured.
FAKE_EXPORT void fake_capture_here(bool captured);
void fake_capture_here(bool captured) {
    current.captured = captured;
}

// For the same: number of events that this thread has recorded.
FAKE_EXPORT int fake_records_here(void);
int fake_records_here(void) {
    return current.records;
}

unsigned cuEventCreate(struct CUevent_st **event, unsigned flags) {
    ENTER(enter);
    if ((flags & ~(unsigned)NB_CUDA_EVENT_DISABLE_TIMING) != 0) {
        return leave(NB_CUDA_INVALID_VALUE);
    }
    struct CUevent_st *made = calloc(1, sizeof *made);
    if (made == NULL) {
        abort();
    }
    made->context = current_context();
    made->timed = (flags & NB_CUDA_EVENT_DISABLE_TIMING) == 0;
    made->next = fake.events;
    fake.events = made;
    *event = made;
    return leave(NB_CUDA_SUCCESS);
}

unsigned cuEventDestroy_v2(struct CUevent_st *event) {
    ENTER(enter);
    if (!event_is_valid(event)) {
        return leave(NB_CUDA_INVALID_HANDLE);
    }
    event->destroyed = true;
    return leave(NB_CUDA_SUCCESS);
}

unsigned cuEventRecord(struct CUevent_st *event, struct CUstream_st *stream) {
    ENTER(enter);
    stream = stream_of(stream);
    if (!stream_is_valid(stream) || !event_is_valid(event) || event->context != stream->context) {
        return leave(NB_CUDA_INVALID_HANDLE);
    }
    event->recorded++;
    current.records++;
    event->stream = stream;
    submit(stream, &(struct operation){.kind = FAKE_RECORD, .event = event, .ticket = event->recorded});
    return leave(NB_CUDA_SUCCESS);
}

unsigned cuEventQuery(struct CUevent_st *event) {
    ENTER(enter_query);
    if (!event_is_valid(event)) {
        return leave(NB_CUDA_INVALID_HANDLE);
    }
    if (is_forbidden()) {
        return refuse(NB_CUDA_CAPTURE_UNSUPPORTED);
    }
    bool done =
        event->completed >= event->recorded || (fake.reported_done != NULL && event->stream == fake.reported_done);
    return leave(done ? NB_CUDA_SUCCESS : NB_CUDA_NOT_READY);
}

unsigned cuEventElapsedTime(float *ms, struct CUevent_st *begin, struct CUevent_st *end) {
    ENTER(enter);
    if (!event_is_valid(begin) || !event_is_valid(end) || !begin->timed || !end->timed || begin->recorded == 0 ||
        end->recorded == 0) {
        return leave(NB_CUDA_INVALID_HANDLE);
    }
    if (begin->completed < begin->recorded || end->completed < end->recorded) {
        return leave(NB_CUDA_NOT_READY);
    }
    const int64_t resolution_ns = 500;
    int64_t ns = (end->completed_ns - begin->completed_ns) / resolution_ns * resolution_ns;
    *ms = (float)((double)ns / 1e6);
    return leave(NB_CUDA_SUCCESS);
}

// Not counted: polling repeats it.
unsigned cuThreadExchangeStreamCaptureMode(unsigned *mode) {
    const unsigned before = current.capture_mode;
    if (*mode > NB_CUDA_CAPTURE_RELAXED) {
        return NB_CUDA_INVALID_VALUE;
    }
    current.capture_mode = *mode;
    *mode = before;
    return NB_CUDA_SUCCESS;
}

unsigned cuMemAlloc_v2(nb_cuda_address *address, size_t bytes) {
    ENTER(enter_unsafe);
    if (bytes == 0) {
        return leave(NB_CUDA_INVALID_VALUE);
    }
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    struct allocation *made = calloc(1, sizeof *made);
    int fd = memfd_create("fake_device", MFD_CLOEXEC);
    size_t mapped = (bytes + page - 1) / page * page;
    if (made == NULL || fd < 0 || ftruncate(fd, (off_t)mapped) != 0) {
        abort();
    }
    made->base = mmap(NULL, mapped, PROT_NONE, MAP_SHARED, fd, 0);
    made->alias = mmap(NULL, mapped, PROT_NONE, MAP_SHARED, fd, 0);
    (void)close(fd);
    if (made->base == MAP_FAILED || made->alias == MAP_FAILED) {
        abort();
    }
    made->bytes = bytes;
    made->mapped = mapped;
    made->context = current_context();
    made->next = fake.allocations;
    fake.allocations = made;
    *address = (uintptr_t)made->base;
    return leave(NB_CUDA_SUCCESS);
}

unsigned cuMemFree_v2(nb_cuda_address address) {
    ENTER(enter);
    struct allocation *it = fake_allocation_of(address, 1);
    if (it == NULL || (uintptr_t)it->base != address || it->context != current_context()) {
        return leave(NB_CUDA_INVALID_VALUE);
    }
    it->freed = true; // its addresses are not reused before a reset
    return leave(NB_CUDA_SUCCESS);
}

unsigned cuMemHostRegister_v2(void *memory, size_t bytes, unsigned flags) {
    ENTER(enter_unsafe);
    if (memory == NULL || bytes == 0 || (flags & ~((unsigned)NB_CUDA_HOST_PORTABLE | NB_CUDA_HOST_MAPPED)) != 0) {
        return leave(NB_CUDA_INVALID_VALUE);
    }
    if (pinned(memory, bytes) != 0) {
        return leave(NB_CUDA_HOST_ALREADY_REGISTERED);
    }
    struct registration *made = calloc(1, sizeof *made);
    if (made == NULL) {
        abort();
    }
    *made = (struct registration){
        .next = fake.registrations, .base = memory, .bytes = bytes, .mapped = (flags & NB_CUDA_HOST_MAPPED) != 0};
    fake.registrations = made;
    return leave(NB_CUDA_SUCCESS);
}

unsigned cuMemHostUnregister(void *memory) {
    ENTER(enter_unsafe);
    struct registration **at = &fake.registrations;
    while (*at != NULL && (*at)->base != memory) {
        at = &(*at)->next;
    }
    struct registration *found = *at;
    if (found == NULL) {
        return leave(NB_CUDA_HOST_NOT_REGISTERED);
    }
    *at = found->next;
    free(found);
    return leave(NB_CUDA_SUCCESS);
}

unsigned cuMemHostGetDevicePointer_v2(nb_cuda_address *address, void *memory, unsigned flags) {
    ENTER(enter);
    const struct registration *it = registration_of(memory, 1);
    if (flags != 0 || it == NULL || !it->mapped) {
        return leave(NB_CUDA_INVALID_VALUE);
    }
    *address = (uintptr_t)memory | (nb_cuda_address)1 << MAPPED_BIT;
    return leave(NB_CUDA_SUCCESS);
}

// A pageable copy: to the host it blocks; to the device it reads the source before it returns.
static unsigned copy(enum fake_kind kind, nb_cuda_address address, void *host, size_t bytes,
                     struct CUstream_st *stream) {
    ENTER_AS(enter, kind == FAKE_TO_HOST ? "cuMemcpyDtoHAsync" : "cuMemcpyHtoDAsync");
    stream = stream_of(stream);
    if (!stream_is_valid(stream)) {
        return leave(NB_CUDA_INVALID_HANDLE);
    }
    const struct allocation *it = fake_allocation_of(address, bytes);
    const int registered = pinned(host, bytes);
    if (bytes == 0 || it == NULL || it->context != current_context() || registered < 0) {
        return leave(bytes == 0 ? NB_CUDA_SUCCESS : NB_CUDA_INVALID_VALUE);
    }
    struct operation op = {.kind = kind, .address = address, .host = host, .bytes = bytes, .pinned = registered == 1};
    fake.pageable_copies += registered == 0;
    if (registered == 0 && kind == FAKE_TO_DEVICE) {
        op.staged = malloc(bytes);
        if (op.staged == NULL) {
            abort();
        }
        memcpy(op.staged, host, bytes);
    }
    submit(stream, &op);
    return leave(registered == 0 && kind == FAKE_TO_HOST ? drain(stream) : NB_CUDA_SUCCESS);
}

unsigned cuMemcpyDtoHAsync_v2(void *to, nb_cuda_address from, size_t bytes, struct CUstream_st *stream) {
    return copy(FAKE_TO_HOST, from, to, bytes, stream);
}

unsigned cuMemcpyHtoDAsync_v2(nb_cuda_address to, const void *from, size_t bytes, struct CUstream_st *stream) {
    return copy(FAKE_TO_DEVICE, to, (void *)(uintptr_t)from, bytes, stream);
}

unsigned cuModuleLoadData(struct CUmod_st **module, const void *image) {
    ENTER(enter_unsafe);
    int magic = 0;
    memcpy(&magic, image, sizeof magic);
    if (magic != MODULE_MAGIC) {
        return leave(NB_CUDA_INVALID_IMAGE);
    }
    struct CUmod_st *made = calloc(1, sizeof *made);
    if (made == NULL) {
        abort();
    }
    made->context = current_context();
    made->next = fake.modules;
    fake.modules = made;
    *module = made;
    return leave(NB_CUDA_SUCCESS);
}

unsigned cuModuleUnload(struct CUmod_st *module) {
    ENTER(enter);
    if (module == NULL || module->unloaded || module->context != current_context()) {
        return leave(NB_CUDA_INVALID_HANDLE);
    }
    module->unloaded = true;
    return leave(NB_CUDA_SUCCESS);
}

unsigned cuModuleGetFunction(struct CUfunc_st **function, struct CUmod_st *module, const char *name) {
    static const char *const names[] = {
#define NAMED(number, name) [number] = #name,
        NB_CUDA_KERNELS(NAMED)
#undef NAMED
    };
    ENTER(enter);
    if (module == NULL || module->unloaded || module->context != current_context()) {
        return leave(NB_CUDA_INVALID_HANDLE);
    }
    for (int i = 0; i < NB_CUDA_KERNEL_COUNT; i++) {
        if (strcmp(names[i], name) == 0) {
            fake.functions[i].kernel = i;
            *function = &fake.functions[i];
            return leave(NB_CUDA_SUCCESS);
        }
    }
    return leave(NB_CUDA_NOT_FOUND);
}

unsigned cuLaunchKernel(struct CUfunc_st *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared_bytes, struct CUstream_st *stream,
                        void **parameters, void **extra) {
    ENTER(enter);
    stream = stream_of(stream);
    if (!stream_is_valid(stream)) {
        return leave(NB_CUDA_INVALID_HANDLE);
    }
    uint64_t threads = (uint64_t)block_x * block_y * block_z;
    if (function == NULL || extra != NULL || shared_bytes != 0 || grid_x == 0 || grid_y == 0 || grid_z == 0 ||
        grid_y > 65535 || grid_z > 65535 || threads == 0 || threads > 1024) {
        return leave(NB_CUDA_INVALID_VALUE);
    }
    struct operation op = {.kind = FAKE_KERNEL, .kernel = function->kernel};
    memcpy(&op.to, parameters[0], sizeof op.to);
    memcpy(&op.from, parameters[1], sizeof op.from);
    memcpy(&op.count, parameters[2], sizeof op.count);
    memcpy(&op.factor, parameters[3], sizeof op.factor);
    submit(stream, &op);
    return leave(NB_CUDA_SUCCESS);
}
