// Fake CUDA driver: controls for tests. The driver is fake_driver.c, a libcuda.so.1 with the functions that the core
// calls. The host cannot access its device memory, streams are threads with seeded delays, and it returns CUDA's errors
// for invalid calls. As with CUDA, NULL names the default stream.
#ifndef NB_TEST_CUDA_FAKE_H
#define NB_TEST_CUDA_FAKE_H

#include <dlfcn.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "cuda/driver.h"

enum { FAKE_DEVICES = 2, FAKE_VERSION = 12040, FAKE_PRIORITY_GREATEST = -5 };

// What the fake driver accepts as an image of the kernels: it begins as nvcc's do.
__attribute__((unused)) static const unsigned char fake_image[] = {0x50, 0xed, 0x55, 0xba};

enum fake_kind { FAKE_TO_HOST, FAKE_TO_DEVICE, FAKE_RECORD, FAKE_WAIT, FAKE_KERNEL };

// One operation that a stream has executed, in the order of execution over all streams.
struct fake_entry {
    enum fake_kind kind;
    const struct CUstream_st *stream;
    const struct CUevent_st *event; // of FAKE_RECORD, FAKE_WAIT
    nb_cuda_address address;        // of copies
    size_t bytes;
};

// Numbers of objects that were created and not destroyed.
struct fake_live_objects {
    int contexts;
    int streams;
    int events;
    int allocations;
    int registrations;
    int modules;
};

struct fake_controls {
    // Ends all streams and frees all objects, faults and counts. The seed determines the delays of each stream.
    void (*reset)(uint64_t seed, int64_t delay_max_ns);
    void (*set_version)(int version); // until the next reset
    // The n-th call from now fails without effect; 0: none. Not counted: calls for error texts, and the calls that
    // polling repeats, cuEventQuery and cuCtxPushCurrent.
    void (*fail_call)(int n, unsigned result);
    // The same for the n-th cuEventQuery or cuCtxPushCurrent.
    void (*fail_poll)(int n, unsigned result);
    // The next call of this name, without `_v2`, in the context of this device fails without effect. NULL: none.
    void (*fail_named)(const char *symbol, int device, unsigned result);
    // The n-th operation that a stream executes from now fails the device: all later calls fail.
    void (*break_operation)(int n);
    int (*calls)(void); // number of calls, counted as by fail_call
    int (*polls)(void); // number of cuEventQuery and cuCtxPushCurrent of this thread
    int (*operations)(void);
    // Number of operations that are enqueued in the stream and not executed.
    int (*pending)(const struct CUstream_st *stream);
    // Number of operations that were enqueued in the stream since its creation.
    unsigned long long (*submitted)(const struct CUstream_st *stream);
    int (*priority)(const struct CUstream_st *stream);
    // A held stream executes nothing.
    void (*hold)(struct CUstream_st *stream, bool held);
    // The stream reports that it is captured into a graph, in the global mode. A thread whose capture mode is not relaxed
    // then cannot query events, allocate or register memory, or load a module. The stream cannot wait for an event.
    void (*capture)(struct CUstream_st *stream, bool captured);
    // Speed of the devices' clock relative to the host's, from the next event on: parts per million faster.
    void (*set_clock)(int64_t ppm);
    // The n-th cuStreamWaitEvent from now succeeds without effect; 0: none.
    void (*drop_wait)(int n);
    // cuEventQuery reports events of this stream as done before they are; NULL: none.
    void (*report_done)(const struct CUstream_st *stream);
    // Read and write device memory at once, regardless of streams.
    void (*peek)(void *to, nb_cuda_address from, size_t bytes);
    void (*poke)(nb_cuda_address to, const void *from, size_t bytes);
    // Number of calls that were refused because of a capture, which such a call ends.
    int (*refusals)(void);
    // Number of copies from or to host memory that is not registered.
    int (*pageable_copies)(void);
    // Copies log entries from the n-th on, at most max. Returns the number of entries from the n-th on.
    size_t (*log)(size_t n, struct fake_entry *entries, size_t max);
    struct fake_live_objects (*live_objects)(void);
};

// Path of the fake library, in the folder of the test's program.
__attribute__((unused)) static const char *fake_path(void) {
    static _Thread_local char path[NB_CUDA_PATH]; // ranks are threads and call this concurrently
    char program[NB_CUDA_PATH - 16];
    ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    CHECK(length > 0, "/proc/self/exe: %m");
    program[length] = '\0';
    *strrchr(program, '/') = '\0';
    (void)snprintf(path, sizeof path, "%s/libcuda.so.1", program);
    return path;
}

__attribute__((unused)) static const struct fake_controls *fake_controls_get(void) {
    const struct fake_controls *(*get)(void) = NULL;
    void *handle = dlopen(fake_path(), RTLD_NOW | RTLD_LOCAL);
    CHECK(handle != NULL, "%s", dlerror());
    void *symbol = dlsym(handle, "fake_controls");
    CHECK(symbol != NULL, "the fake driver exports no controls");
    memcpy(&get, &symbol, sizeof symbol);
    return get();
}

#endif
