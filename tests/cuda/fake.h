// Fake CUDA driver: controls, for tests. The driver itself is fake_driver.c, a libcuda.so.1 of the calls that the core
// makes. Memory of its devices is closed to the host, streams are threads with seeded delays, and it refuses what CUDA
// refuses.
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

enum { FAKE_DEVICES = 2, FAKE_VERSION = 12040 };

enum fake_kind { FAKE_TO_HOST, FAKE_TO_DEVICE, FAKE_RECORD, FAKE_WAIT, FAKE_KERNEL };

// One operation that a stream has executed, in the order of execution over all streams.
struct fake_entry {
    enum fake_kind kind;
    const struct CUstream_st *stream;
    const struct CUevent_st *event; // of FAKE_RECORD, FAKE_WAIT
    nb_cuda_address address;        // of copies
    size_t bytes;
};

// What exists and was not destroyed.
struct fake_alive {
    int contexts;
    int streams;
    int events;
    int allocations;
    int registrations;
    int modules;
};

struct fake_controls {
    // Ends all streams and forgets all objects, hooks and counts. The delays of each stream come from the seed.
    void (*reset)(uint64_t seed, int64_t delay_max_ns);
    void (*set_version)(int version); // until the next reset
    // The n-th call from now fails without effect; 0: none. Not counted: calls for texts of errors and what polling
    // repeats, cuEventQuery and cuCtxPushCurrent.
    void (*fail_call)(int n, unsigned result);
    // The same for the n-th cuEventQuery or cuCtxPushCurrent.
    void (*fail_poll)(int n, unsigned result);
    // The next call of this name, without `_v2`, in the context of this device fails without effect. NULL: none.
    void (*fail_named)(const char *symbol, int device, unsigned result);
    // The n-th operation that a stream executes from now breaks the device: all later calls fail.
    void (*break_operation)(int n);
    int (*calls)(void); // as fail_call counts them
    int (*operations)(void);
    // Operations that the stream was given and has not executed.
    int (*pending)(const struct CUstream_st *stream);
    // A held stream executes nothing.
    void (*hold)(struct CUstream_st *stream, bool held);
    // The stream says that it is captured into a graph. Threads that are not relaxed may then query no event.
    void (*capture)(struct CUstream_st *stream, bool captured);
    // The clock of the devices, from the next event on: so much faster than the host's, in parts per million.
    void (*set_clock)(int64_t ppm);
    // The n-th cuStreamWaitEvent from now succeeds and makes nothing wait; 0: none.
    void (*drop_wait)(int n);
    // cuEventQuery says that events recorded in this stream are done, whether or not they are; NULL: none.
    void (*hasten)(const struct CUstream_st *stream);
    // Reads and writes device memory at once, beside all streams.
    void (*peek)(void *to, nb_cuda_address from, size_t bytes);
    void (*poke)(nb_cuda_address to, const void *from, size_t bytes);
    // Copies that were not from or to registered memory.
    int (*slow_copies)(void);
    // Copies entries from the n-th on; returns how many there are from there on.
    size_t (*log)(size_t n, struct fake_entry *entries, size_t max);
    struct fake_alive (*alive)(void);
};

// The path of the fake, beside the test's program.
__attribute__((unused)) static const char *fake_path(void) {
    static _Thread_local char path[NB_CUDA_PATH]; // ranks that are threads ask at the same time
    char program[NB_CUDA_PATH - 16];
    ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    CHECK(length > 0, "the program's own path");
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
    CHECK(symbol != NULL, "the fake has no controls");
    memcpy(&get, &symbol, sizeof symbol);
    return get();
}

#endif
