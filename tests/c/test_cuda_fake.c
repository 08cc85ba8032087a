// Fake CUDA driver and the core's wrappers: errors for an old driver, failed calls and invalid calls. Also the
// behaviour of streams, events, memory and kernels.
#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include "../cuda/fake.h"
#include "base/error.h"
#include "check.h"
#include "cuda/driver.h"
#include "cuda/kernels.h"
#include "cuda/piece.h"

enum { SEEDS = 200, COUNT = 1000, DELAY_NS = 50000 };

static const struct fake_controls *fake;
static struct nb_cuda_driver driver;
static struct nb_cuda_device device;
static float host[COUNT];
static float result[COUNT];

static void check_success(unsigned got, const char *what) {
    CHECK(got == NB_CUDA_SUCCESS, "%s: %u", what, got);
}

static void check_error(unsigned got, unsigned want, const char *what) {
    CHECK(got == want, "%s: %u, not %u", what, got, want);
}

static void reset_and_open(uint64_t seed) {
    struct nb_error err = {0};
    fake->reset(seed, DELAY_NS);
    CHECK(nb_cuda_driver_open(&driver, fake_path(), &err) == 0, "%s", err.text);
    CHECK(nb_cuda_device_open(&device, &driver, 0, &err) == 0, "%s", err.text);
    CHECK(nb_cuda_enter(&device, &err) == 0, "%s", err.text);
}

static void test_old_driver(void) {
    struct nb_error err = {0};
    fake->reset(1, 0);
    fake->set_version(11040);
    CHECK(nb_cuda_driver_open(&driver, fake_path(), &err) == NB_ENOLIB, "%s", err.text);
    CHECK(strcmp(err.text, "CUDA: driver 11.4 is too old: 12.0 or later is needed") == 0, "%s", err.text);
}

static void test_no_device(void) {
    struct nb_error err = {0};
    fake->reset(1, 0);
    fake->fail_call(1, NB_CUDA_NO_DEVICE);
    CHECK(nb_cuda_driver_open(&driver, fake_path(), &err) == -ENODEV, "%s", err.text);
    CHECK(strcmp(err.text, "CUDA: cuInit: CUDA_ERROR_NO_DEVICE 100 (no CUDA-capable device is detected)") == 0, "%s",
          err.text);
    reset_and_open(1);
    err = (struct nb_error){0};
    struct nb_cuda_device other = {0};
    CHECK(nb_cuda_device_open(&other, &driver, FAKE_DEVICES, &err) == -ENODEV, "%s", err.text);
    CHECK(strcmp(err.text, "CUDA: there is no device 2: the driver has 2") == 0, "%s", err.text);
}

static void test_error_names_the_call(void) {
    struct nb_error err = {0};
    reset_and_open(1);
    CHECK(nb_cuda_check(&device, NB_CUDA_NOT_READY, "cuEventQuery", 0, &err) == -EAGAIN && err.code == 0, "%s",
          err.text);
    CHECK(nb_cuda_check(&device, NB_CUDA_OUT_OF_MEMORY, "cuMemAlloc", 4096, &err) == -ENOMEM, "%s", err.text);
    CHECK(strcmp(err.text, "CUDA: cuMemAlloc of 4096 bytes on device 0: CUDA_ERROR_OUT_OF_MEMORY 2 (out of memory)") ==
              0,
          "%s", err.text);
    err = (struct nb_error){0};
    CHECK(nb_cuda_check(&device, 9999, "cuEventRecord", 0, &err) == -EIO, "%s", err.text);
    CHECK(strcmp(err.text, "CUDA: cuEventRecord on device 0: unknown result 9999 (the driver has no text for it)") == 0,
          "%s", err.text);
}

static void test_host_cannot_access_device_memory(void) {
    reset_and_open(1);
    nb_cuda_address address = 0;
    check_success(driver.mem_alloc(&address, 100), "cuMemAlloc");
    int fds[2];
    CHECK(pipe(fds) == 0, "pipe");
    errno = 0;
    CHECK(write(fds[1], (const void *)(uintptr_t)address, 1) < 0 && errno == EFAULT, "the host can read device memory");
    close(fds[0]);
    close(fds[1]);
    check_success(driver.mem_free(address), "cuMemFree");
}

static void test_context_errors(void) {
    reset_and_open(1);
    struct nb_error err = {0};
    struct CUstream_st *stream = NULL;
    struct CUevent_st *event = NULL;
    nb_cuda_address address = 0;
    struct nb_cuda_device second = {0};
    CHECK(nb_cuda_device_open(&second, &driver, 1, &err) == 0, "%s", err.text);
    check_success(driver.stream_create(&stream, NB_CUDA_STREAM_NON_BLOCKING), "cuStreamCreate");
    check_success(driver.event_create(&event, NB_CUDA_EVENT_DISABLE_TIMING), "cuEventCreate");
    check_success(driver.mem_alloc(&address, sizeof host), "cuMemAlloc");
    CHECK(nb_cuda_enter(&second, &err) == 0, "%s", err.text);
    check_error(driver.event_record(event, stream), NB_CUDA_INVALID_HANDLE, "a stream of another context");
    check_error(driver.copy_to_host(host, address, 4, stream), NB_CUDA_INVALID_HANDLE, "a copy in another context");
    check_success(driver.stream_wait_event(stream, event, 0), "a wait of a stream of another context");
    nb_cuda_leave(&second);
    nb_cuda_leave(&device);
    check_error(driver.event_record(event, stream), NB_CUDA_INVALID_CONTEXT, "a call without a context");
    CHECK(nb_cuda_enter(&device, &err) == 0, "%s", err.text);
    nb_cuda_device_close(&second);
    CHECK(fake->live_objects().contexts == 1, "%d contexts", fake->live_objects().contexts);
}

static void test_object_errors(void) {
    reset_and_open(1);
    struct CUstream_st *stream = NULL;
    struct CUevent_st *event = NULL;
    nb_cuda_address address = 0;
    check_success(driver.stream_create(&stream, 0), "cuStreamCreate");
    check_success(driver.event_create(&event, 0), "cuEventCreate");
    check_success(driver.mem_alloc(&address, sizeof host), "cuMemAlloc");
    check_error(driver.copy_to_host(host, address + 4, sizeof host, stream), NB_CUDA_INVALID_VALUE,
                "a copy beyond the end");
    check_success(driver.host_register(host, sizeof host / 2, 0), "cuMemHostRegister");
    check_error(driver.host_register(host, 4, 0), NB_CUDA_HOST_ALREADY_REGISTERED, "registered twice");
    check_error(driver.copy_to_host(host, address, sizeof host, stream), NB_CUDA_INVALID_VALUE,
                "a copy to partly registered memory");
    check_success(driver.host_unregister(host), "cuMemHostUnregister");
    check_error(driver.host_unregister(host), NB_CUDA_HOST_NOT_REGISTERED, "unregistered twice");
    check_success(driver.event_destroy(event), "cuEventDestroy");
    check_error(driver.event_query(event), NB_CUDA_INVALID_HANDLE, "a destroyed event");
    check_error(driver.event_record(event, stream), NB_CUDA_INVALID_HANDLE, "a destroyed event");
    check_error(driver.stream_wait_event(stream, event, 0), NB_CUDA_INVALID_HANDLE, "a destroyed event");
    check_success(driver.mem_free(address), "cuMemFree");
    check_error(driver.mem_free(address), NB_CUDA_INVALID_VALUE, "freed twice");
    check_error(driver.copy_to_host(host, address, 4, stream), NB_CUDA_INVALID_VALUE, "freed memory");
    check_success(driver.stream_destroy(stream), "cuStreamDestroy");
    check_error(driver.stream_synchronize(stream), NB_CUDA_INVALID_HANDLE, "a destroyed stream");
}

static void reset_with_memory(struct CUstream_st **stream, nb_cuda_address *address) {
    reset_and_open(1);
    check_success(driver.stream_create(stream, 0), "cuStreamCreate");
    check_success(driver.mem_alloc(address, sizeof host), "cuMemAlloc");
}

// A copy that runs after its memory was freed fails the device.
static void test_memory_freed_before_a_copy(void) {
    struct CUstream_st *stream = NULL;
    nb_cuda_address address = 0;
    reset_with_memory(&stream, &address);
    check_success(driver.host_register(host, sizeof host, 0), "cuMemHostRegister");
    fake->hold(stream, true);
    check_success(driver.copy_to_host(host, address, sizeof host, stream), "cuMemcpyDtoHAsync");
    check_success(driver.mem_free(address), "cuMemFree");
    fake->hold(stream, false);
    check_error(driver.stream_synchronize(stream), NB_CUDA_ILLEGAL_ADDRESS, "memory freed before a copy runs");
    check_error(driver.mem_alloc(&address, 4), NB_CUDA_ILLEGAL_ADDRESS, "a call after the device failed");
}

static void test_pageable_copies(void) {
    struct CUstream_st *stream = NULL;
    nb_cuda_address address = 0;
    reset_with_memory(&stream, &address);
    for (int i = 0; i < COUNT; i++) {
        host[i] = (float)i;
    }
    check_success(driver.copy_to_device(address, host, sizeof host, stream), "cuMemcpyHtoDAsync");
    memset(host, 0, sizeof host); // the call has read it
    check_success(driver.copy_to_host(result, address, sizeof result, stream), "cuMemcpyDtoHAsync");
    CHECK(result[COUNT - 1] == COUNT - 1, "%g", (double)result[COUNT - 1]); // the call has completed the copy
    CHECK(fake->pageable_copies() == 2, "%d pageable copies", fake->pageable_copies());
}

// One stream writes, and another reads after an event. Returns true if it reads the written data.
static bool read_after_event(uint64_t seed, bool dropped) {
    reset_and_open(seed);
    struct CUstream_st *writer = NULL;
    struct CUstream_st *reader = NULL;
    struct CUevent_st *event = NULL;
    nb_cuda_address address = 0;
    check_success(driver.stream_create(&writer, 0), "cuStreamCreate");
    check_success(driver.stream_create(&reader, 0), "cuStreamCreate");
    check_success(driver.event_create(&event, 0), "cuEventCreate");
    check_success(driver.mem_alloc(&address, sizeof host), "cuMemAlloc");
    check_success(driver.host_register(host, sizeof host, 0), "cuMemHostRegister");
    check_success(driver.host_register(result, sizeof result, 0), "cuMemHostRegister");
    for (int i = 0; i < COUNT; i++) {
        host[i] = (float)(i + (int)seed);
    }
    fake->hold(writer, dropped);
    fake->drop_wait(dropped);
    check_success(driver.event_query(event), "an event without a record is not done");
    check_success(driver.copy_to_device(address, host, sizeof host, writer), "cuMemcpyHtoDAsync");
    check_success(driver.event_record(event, writer), "cuEventRecord");
    check_success(driver.stream_wait_event(reader, event, 0), "cuStreamWaitEvent");
    check_success(driver.copy_to_host(result, address, sizeof result, reader), "cuMemcpyDtoHAsync");
    check_success(driver.stream_synchronize(reader), "cuStreamSynchronize");
    bool right = memcmp(host, result, sizeof host) == 0;
    fake->hold(writer, false);
    check_success(driver.stream_synchronize(writer), "cuStreamSynchronize");
    check_success(driver.event_query(event), "cuEventQuery");
    struct fake_entry entries[4];
    CHECK(fake->log(0, entries, 4) == (dropped ? 3 : 4), "wrong number of operations");
    CHECK(dropped || (entries[0].kind == FAKE_TO_DEVICE && entries[1].kind == FAKE_RECORD &&
                      entries[2].kind == FAKE_WAIT && entries[3].kind == FAKE_TO_HOST),
          "wrong order of operations");
    return right;
}

static void test_event_orders_streams(void) {
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        CHECK(read_after_event(seed, false), "seed %d", (int)seed);
    }
    CHECK(!read_after_event(1, true), "a dropped wait has no effect on the result");
}

// A wait is for the last record before it, not for later ones.
static void test_wait_is_for_the_last_record(void) {
    reset_and_open(1);
    struct CUstream_st *first = NULL;
    struct CUstream_st *second = NULL;
    struct CUevent_st *event = NULL;
    check_success(driver.stream_create(&first, 0), "cuStreamCreate");
    check_success(driver.stream_create(&second, 0), "cuStreamCreate");
    check_success(driver.event_create(&event, 0), "cuEventCreate");
    check_success(driver.event_record(event, first), "cuEventRecord");
    check_success(driver.stream_synchronize(first), "cuStreamSynchronize");
    check_success(driver.stream_wait_event(second, event, 0), "cuStreamWaitEvent");
    fake->hold(first, true);
    check_success(driver.event_record(event, first), "cuEventRecord");
    check_error(driver.event_query(event), NB_CUDA_NOT_READY, "a pending record");
    check_success(driver.stream_synchronize(second), "cuStreamSynchronize");
    fake->hold(first, false);
    check_success(driver.stream_synchronize(first), "cuStreamSynchronize");
    check_success(driver.event_query(event), "cuEventQuery");
}

static void launch(const struct nb_cuda_kernels *kernels, struct CUstream_st *stream, const struct nb_cuda_work *work) {
    struct nb_error err = {0};
    CHECK(nb_cuda_launch(kernels, stream, work, &err) == 0, "%s", err.text);
}

static void test_kernels_run_on_device_memory(void) {
    reset_and_open(3);
    static const unsigned char other[sizeof fake_image] = {0};
    struct nb_cuda_kernels kernels = {0};
    struct nb_error err = {0};
    struct CUstream_st *stream = NULL;
    nb_cuda_address gradients = 0;
    nb_cuda_address buffer = 0;
    nb_cuda_address list = 0;
    CHECK(nb_cuda_kernels_open(&kernels, &device, other, &err) == -EIO, "%s", err.text);
    err = (struct nb_error){0};
    CHECK(nb_cuda_kernels_open(&kernels, &device, fake_image, &err) == 0, "%s", err.text);
    check_success(driver.stream_create(&stream, 0), "cuStreamCreate");
    check_success(driver.mem_alloc(&gradients, sizeof host), "cuMemAlloc");
    check_success(driver.mem_alloc(&buffer, sizeof host), "cuMemAlloc");
    const struct nb_cuda_piece pieces[] = {{gradients, 400, 40}, {gradients + 404, 0, 396}};
    check_success(driver.mem_alloc(&list, sizeof pieces), "cuMemAlloc");
    fake->poke(list, pieces, sizeof pieces);
    for (int i = 0; i < COUNT; i++) {
        host[i] = (float)i;
    }
    fake->poke(gradients, host, sizeof host);
    launch(&kernels, stream, &(struct nb_cuda_work){NB_CUDA_PACK, buffer, list, 2, 0, 0});
    launch(&kernels, stream, &(struct nb_cuda_work){NB_CUDA_SCALE_F32, buffer, 0, 99, 2, 0});
    launch(&kernels, stream, &(struct nb_cuda_work){NB_CUDA_ADD_F32, buffer, gradients, 99, 0, 0});
    launch(&kernels, stream, &(struct nb_cuda_work){NB_CUDA_UNPACK, buffer, list, 2, 0, 0});
    launch(&kernels, stream, &(struct nb_cuda_work){NB_CUDA_ADD_F32, buffer, gradients, 0, 0, 0});
    check_success(driver.stream_synchronize(stream), "cuStreamSynchronize");
    fake->peek(result, gradients, sizeof result);
    for (int i = 0; i < COUNT; i++) {
        float want = i >= 101 && i < 200 ? 2 * host[i] + host[i - 101] : host[i];
        CHECK(result[i] == want, "%d: %g, not %g", i, (double)result[i], (double)want);
    }
    launch(&kernels, stream, &(struct nb_cuda_work){NB_CUDA_SCALE_F32, gradients, 0, COUNT + 1, 2, 0});
    check_error(driver.stream_synchronize(stream), NB_CUDA_ILLEGAL_ADDRESS, "a kernel beyond the end");
}

static void test_injected_failures(void) {
    reset_and_open(1);
    struct nb_error err = {0};
    nb_cuda_address address = 0;
    fake->fail_call(2, NB_CUDA_OUT_OF_MEMORY);
    check_success(driver.mem_alloc(&address, 4), "the first call");
    CHECK(nb_cuda_check(&device, driver.mem_alloc(&address, 4), "cuMemAlloc", 4, &err) == -ENOMEM, "%s", err.text);
    check_success(driver.mem_free(address), "the third call");
    struct CUstream_st *stream = NULL;
    struct CUevent_st *event = NULL;
    check_success(driver.stream_create(&stream, 0), "cuStreamCreate");
    check_success(driver.event_create(&event, 0), "cuEventCreate");
    fake->break_operation(2);
    check_success(driver.event_record(event, stream), "cuEventRecord");
    check_success(driver.stream_synchronize(stream), "cuStreamSynchronize");
    check_success(driver.event_record(event, stream), "cuEventRecord");
    check_error(driver.stream_synchronize(stream), NB_CUDA_ILLEGAL_ADDRESS, "the second operation");
}

// NULL names the default stream of the current context: work on it is in order, and other streams can wait for it.
static void test_default_stream(void) {
    struct nb_error err = {0};
    struct nb_cuda_device second = {0};
    struct CUstream_st *other = NULL;
    struct CUevent_st *event = NULL;
    nb_cuda_address address = 0;
    unsigned capturing = 1;
    reset_and_open(1);
    for (int i = 0; i < COUNT; i++) {
        host[i] = (float)i;
    }
    memset(result, 0, sizeof result);
    check_success(driver.stream_create(&other, NB_CUDA_STREAM_NON_BLOCKING), "cuStreamCreate");
    check_success(driver.event_create(&event, 0), "cuEventCreate");
    check_success(driver.mem_alloc(&address, sizeof host), "cuMemAlloc");
    check_success(driver.stream_is_capturing(NULL, &capturing), "cuStreamIsCapturing");
    check_success(driver.copy_to_device(address, host, sizeof host, NULL), "cuMemcpyHtoDAsync");
    check_success(driver.event_record(event, NULL), "cuEventRecord");
    check_success(driver.stream_wait_event(other, event, 0), "cuStreamWaitEvent");
    check_success(driver.copy_to_host(result, address, sizeof result, other), "cuMemcpyDtoHAsync");
    check_success(driver.stream_wait_event(NULL, event, 0), "cuStreamWaitEvent");
    check_success(driver.stream_synchronize(NULL), "cuStreamSynchronize");
    CHECK(capturing == 0 && memcmp(host, result, sizeof host) == 0, "other bytes by way of the default stream");
    CHECK(fake->live_objects().streams == 1, "%d streams", fake->live_objects().streams);
    CHECK(nb_cuda_device_open(&second, &driver, 1, &err) == 0 && nb_cuda_enter(&second, &err) == 0, "%s", err.text);
    check_error(driver.event_record(event, NULL), NB_CUDA_INVALID_HANDLE, "a default stream of another context");
    nb_cuda_leave(&second);
    nb_cuda_device_close(&second);
}

int main(void) {
    fake = fake_controls_get();
    test_old_driver();
    test_no_device();
    test_error_names_the_call();
    test_host_cannot_access_device_memory();
    test_context_errors();
    test_object_errors();
    test_memory_freed_before_a_copy();
    test_pageable_copies();
    test_event_orders_streams();
    test_wait_is_for_the_last_record();
    test_kernels_run_on_device_memory();
    test_injected_failures();
    test_default_stream();
    fake->reset(0, 0);
    return 0;
}
