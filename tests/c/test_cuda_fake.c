// Fake driver and the calls above it: what the core says of an old driver and of a failed call, what the fake refuses as
// CUDA does, and that streams, events, memory and kernels do what they are for.
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

static void succeed(unsigned got, const char *what) {
    CHECK(got == NB_CUDA_SUCCESS, "%s: %u", what, got);
}

static void refuse(unsigned got, unsigned want, const char *what) {
    CHECK(got == want, "%s: %u, not %u", what, got, want);
}

static void begin(uint64_t seed) {
    struct nb_error err = {0};
    fake->reset(seed, DELAY_NS);
    CHECK(nb_cuda_driver_open(&driver, fake_path(), &err) == 0, "%s", err.text);
    CHECK(nb_cuda_device_open(&device, &driver, 0, &err) == 0, "%s", err.text);
    CHECK(nb_cuda_enter(&device, &err) == 0, "%s", err.text);
}

static void test_an_old_driver(void) {
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
    begin(1);
    err = (struct nb_error){0};
    struct nb_cuda_device other = {0};
    CHECK(nb_cuda_device_open(&other, &driver, FAKE_DEVICES, &err) == -ENODEV, "%s", err.text);
    CHECK(strcmp(err.text, "CUDA: there is no device 2: the driver has 2") == 0, "%s", err.text);
}

static void test_a_failed_call_is_named(void) {
    struct nb_error err = {0};
    begin(1);
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

static void test_device_memory_is_closed_to_the_host(void) {
    begin(1);
    nb_cuda_address address = 0;
    succeed(driver.mem_alloc(&address, 100), "cuMemAlloc");
    int ends[2];
    CHECK(pipe(ends) == 0, "pipe");
    errno = 0;
    CHECK(write(ends[1], (const void *)(uintptr_t)address, 1) < 0 && errno == EFAULT, "the host reads device memory");
    close(ends[0]);
    close(ends[1]);
    succeed(driver.mem_free(address), "cuMemFree");
}

static void test_refusals_of_contexts(void) {
    begin(1);
    struct nb_error err = {0};
    struct CUstream_st *stream = NULL;
    struct CUevent_st *event = NULL;
    nb_cuda_address address = 0;
    struct nb_cuda_device second = {0};
    CHECK(nb_cuda_device_open(&second, &driver, 1, &err) == 0, "%s", err.text);
    succeed(driver.stream_create(&stream, NB_CUDA_STREAM_NON_BLOCKING), "cuStreamCreate");
    succeed(driver.event_create(&event, NB_CUDA_EVENT_DISABLE_TIMING), "cuEventCreate");
    succeed(driver.mem_alloc(&address, sizeof host), "cuMemAlloc");
    CHECK(nb_cuda_enter(&second, &err) == 0, "%s", err.text);
    refuse(driver.event_record(event, stream), NB_CUDA_INVALID_HANDLE, "a stream of another context");
    refuse(driver.copy_to_host(host, address, 4, stream), NB_CUDA_INVALID_HANDLE, "a copy in another context");
    nb_cuda_leave(&second);
    nb_cuda_leave(&device);
    refuse(driver.event_record(event, stream), NB_CUDA_INVALID_CONTEXT, "no context");
    CHECK(nb_cuda_enter(&device, &err) == 0, "%s", err.text);
    nb_cuda_device_close(&second);
    CHECK(fake->alive().contexts == 1, "%d contexts", fake->alive().contexts);
}

static void test_refusals_of_objects(void) {
    begin(1);
    struct CUstream_st *stream = NULL;
    struct CUevent_st *event = NULL;
    nb_cuda_address address = 0;
    succeed(driver.stream_create(&stream, 0), "cuStreamCreate");
    succeed(driver.event_create(&event, 0), "cuEventCreate");
    succeed(driver.mem_alloc(&address, sizeof host), "cuMemAlloc");
    refuse(driver.copy_to_host(host, address + 4, sizeof host, stream), NB_CUDA_INVALID_VALUE, "beyond the end");
    succeed(driver.host_register(host, sizeof host / 2, 0), "cuMemHostRegister");
    refuse(driver.host_register(host, 4, 0), NB_CUDA_HOST_ALREADY_REGISTERED, "registered twice");
    refuse(driver.copy_to_host(host, address, sizeof host, stream), NB_CUDA_INVALID_VALUE, "registered in part");
    succeed(driver.host_unregister(host), "cuMemHostUnregister");
    refuse(driver.host_unregister(host), NB_CUDA_HOST_NOT_REGISTERED, "unregistered twice");
    succeed(driver.event_destroy(event), "cuEventDestroy");
    refuse(driver.event_query(event), NB_CUDA_INVALID_HANDLE, "a destroyed event");
    refuse(driver.event_record(event, stream), NB_CUDA_INVALID_HANDLE, "a destroyed event");
    refuse(driver.stream_wait_event(stream, event, 0), NB_CUDA_INVALID_HANDLE, "a destroyed event");
    succeed(driver.mem_free(address), "cuMemFree");
    refuse(driver.mem_free(address), NB_CUDA_INVALID_VALUE, "freed twice");
    refuse(driver.copy_to_host(host, address, 4, stream), NB_CUDA_INVALID_VALUE, "freed memory");
    succeed(driver.stream_destroy(stream), "cuStreamDestroy");
    refuse(driver.stream_synchronize(stream), NB_CUDA_INVALID_HANDLE, "a destroyed stream");
}

static void begin_with_memory(struct CUstream_st **stream, nb_cuda_address *address) {
    begin(1);
    succeed(driver.stream_create(stream, 0), "cuStreamCreate");
    succeed(driver.mem_alloc(address, sizeof host), "cuMemAlloc");
}

// A copy that runs after its memory was freed breaks the device.
static void test_memory_freed_too_early(void) {
    struct CUstream_st *stream = NULL;
    nb_cuda_address address = 0;
    begin_with_memory(&stream, &address);
    succeed(driver.host_register(host, sizeof host, 0), "cuMemHostRegister");
    fake->hold(stream, true);
    succeed(driver.copy_to_host(host, address, sizeof host, stream), "cuMemcpyDtoHAsync");
    succeed(driver.mem_free(address), "cuMemFree");
    fake->hold(stream, false);
    refuse(driver.stream_synchronize(stream), NB_CUDA_ILLEGAL_ADDRESS, "freed below a copy");
    refuse(driver.mem_alloc(&address, 4), NB_CUDA_ILLEGAL_ADDRESS, "after that");
}

static void test_unregistered_memory_is_slow(void) {
    struct CUstream_st *stream = NULL;
    nb_cuda_address address = 0;
    begin_with_memory(&stream, &address);
    for (int i = 0; i < COUNT; i++) {
        host[i] = (float)i;
    }
    succeed(driver.copy_to_device(address, host, sizeof host, stream), "cuMemcpyHtoDAsync");
    memset(host, 0, sizeof host); // its contents were taken
    succeed(driver.copy_to_host(result, address, sizeof result, stream), "cuMemcpyDtoHAsync");
    CHECK(result[COUNT - 1] == COUNT - 1, "%g", (double)result[COUNT - 1]); // it was copied when the call returned
    CHECK(fake->slow_copies() == 2, "%d slow copies", fake->slow_copies());
}

// One stream writes, another one reads after an event. Returns whether it read what was written.
static bool handed_over(uint64_t seed, bool dropped) {
    begin(seed);
    struct CUstream_st *writer = NULL;
    struct CUstream_st *reader = NULL;
    struct CUevent_st *event = NULL;
    nb_cuda_address address = 0;
    succeed(driver.stream_create(&writer, 0), "cuStreamCreate");
    succeed(driver.stream_create(&reader, 0), "cuStreamCreate");
    succeed(driver.event_create(&event, 0), "cuEventCreate");
    succeed(driver.mem_alloc(&address, sizeof host), "cuMemAlloc");
    succeed(driver.host_register(host, sizeof host, 0), "cuMemHostRegister");
    succeed(driver.host_register(result, sizeof result, 0), "cuMemHostRegister");
    for (int i = 0; i < COUNT; i++) {
        host[i] = (float)(i + (int)seed);
    }
    fake->hold(writer, dropped);
    fake->drop_wait(dropped);
    succeed(driver.event_query(event), "an event that was never recorded is done");
    succeed(driver.copy_to_device(address, host, sizeof host, writer), "cuMemcpyHtoDAsync");
    succeed(driver.event_record(event, writer), "cuEventRecord");
    succeed(driver.stream_wait_event(reader, event, 0), "cuStreamWaitEvent");
    succeed(driver.copy_to_host(result, address, sizeof result, reader), "cuMemcpyDtoHAsync");
    succeed(driver.stream_synchronize(reader), "cuStreamSynchronize");
    bool right = memcmp(host, result, sizeof host) == 0;
    fake->hold(writer, false);
    succeed(driver.stream_synchronize(writer), "cuStreamSynchronize");
    succeed(driver.event_query(event), "cuEventQuery");
    struct fake_entry entries[4];
    CHECK(fake->log(0, entries, 4) == (dropped ? 3 : 4), "operations");
    CHECK(dropped || (entries[0].kind == FAKE_TO_DEVICE && entries[1].kind == FAKE_RECORD &&
                      entries[2].kind == FAKE_WAIT && entries[3].kind == FAKE_TO_HOST),
          "the order of operations");
    return right;
}

static void test_an_event_orders_streams(void) {
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        CHECK(handed_over(seed, false), "seed %d", (int)seed);
    }
    CHECK(!handed_over(1, true), "a dropped wait went unseen");
}

// A wait is for the last record before it, whatever is recorded later.
static void test_a_wait_takes_the_event_as_it_is(void) {
    begin(1);
    struct CUstream_st *first = NULL;
    struct CUstream_st *second = NULL;
    struct CUevent_st *event = NULL;
    succeed(driver.stream_create(&first, 0), "cuStreamCreate");
    succeed(driver.stream_create(&second, 0), "cuStreamCreate");
    succeed(driver.event_create(&event, 0), "cuEventCreate");
    succeed(driver.event_record(event, first), "cuEventRecord");
    succeed(driver.stream_synchronize(first), "cuStreamSynchronize");
    succeed(driver.stream_wait_event(second, event, 0), "cuStreamWaitEvent");
    fake->hold(first, true);
    succeed(driver.event_record(event, first), "cuEventRecord");
    refuse(driver.event_query(event), NB_CUDA_NOT_READY, "a record that is not executed");
    succeed(driver.stream_synchronize(second), "cuStreamSynchronize");
    fake->hold(first, false);
    succeed(driver.stream_synchronize(first), "cuStreamSynchronize");
    succeed(driver.event_query(event), "cuEventQuery");
}

static void launch(const struct nb_cuda_kernels *kernels, struct CUstream_st *stream, const struct nb_cuda_work *work) {
    struct nb_error err = {0};
    CHECK(nb_cuda_launch(kernels, stream, work, &err) == 0, "%s", err.text);
}

static void test_kernels_run_on_device_memory(void) {
    begin(3);
    static const unsigned char image[] = {0x50, 0xed, 0x55, 0xba}; // as a file of nvcc -fatbin begins
    static const unsigned char other[sizeof image] = {0};
    struct nb_cuda_kernels kernels = {0};
    struct nb_error err = {0};
    struct CUstream_st *stream = NULL;
    nb_cuda_address gradients = 0;
    nb_cuda_address buffer = 0;
    nb_cuda_address list = 0;
    CHECK(nb_cuda_kernels_open(&kernels, &device, other, &err) == -EIO, "%s", err.text);
    err = (struct nb_error){0};
    CHECK(nb_cuda_kernels_open(&kernels, &device, image, &err) == 0, "%s", err.text);
    succeed(driver.stream_create(&stream, 0), "cuStreamCreate");
    succeed(driver.mem_alloc(&gradients, sizeof host), "cuMemAlloc");
    succeed(driver.mem_alloc(&buffer, sizeof host), "cuMemAlloc");
    const struct nb_cuda_piece pieces[] = {{gradients, 400, 40}, {gradients + 404, 0, 396}};
    succeed(driver.mem_alloc(&list, sizeof pieces), "cuMemAlloc");
    fake->poke(list, pieces, sizeof pieces);
    for (int i = 0; i < COUNT; i++) {
        host[i] = (float)i;
    }
    fake->poke(gradients, host, sizeof host);
    launch(&kernels, stream, &(struct nb_cuda_work){NB_CUDA_PACK, buffer, list, 2, 0});
    launch(&kernels, stream, &(struct nb_cuda_work){NB_CUDA_SCALE_F32, buffer, 0, 99, 2});
    launch(&kernels, stream, &(struct nb_cuda_work){NB_CUDA_ADD_F32, buffer, gradients, 99, 0});
    launch(&kernels, stream, &(struct nb_cuda_work){NB_CUDA_UNPACK, buffer, list, 2, 0});
    launch(&kernels, stream, &(struct nb_cuda_work){NB_CUDA_ADD_F32, buffer, gradients, 0, 0});
    succeed(driver.stream_synchronize(stream), "cuStreamSynchronize");
    fake->peek(result, gradients, sizeof result);
    for (int i = 0; i < COUNT; i++) {
        float want = i >= 101 && i < 200 ? 2 * host[i] + host[i - 101] : host[i];
        CHECK(result[i] == want, "%d: %g, not %g", i, (double)result[i], (double)want);
    }
    launch(&kernels, stream, &(struct nb_cuda_work){NB_CUDA_SCALE_F32, gradients, 0, COUNT + 1, 2});
    refuse(driver.stream_synchronize(stream), NB_CUDA_ILLEGAL_ADDRESS, "a kernel beyond the end");
}

static void test_injected_failures(void) {
    begin(1);
    struct nb_error err = {0};
    nb_cuda_address address = 0;
    fake->fail_call(2, NB_CUDA_OUT_OF_MEMORY);
    succeed(driver.mem_alloc(&address, 4), "the first call");
    CHECK(nb_cuda_check(&device, driver.mem_alloc(&address, 4), "cuMemAlloc", 4, &err) == -ENOMEM, "%s", err.text);
    succeed(driver.mem_free(address), "the third call");
    struct CUstream_st *stream = NULL;
    struct CUevent_st *event = NULL;
    succeed(driver.stream_create(&stream, 0), "cuStreamCreate");
    succeed(driver.event_create(&event, 0), "cuEventCreate");
    fake->break_operation(2);
    succeed(driver.event_record(event, stream), "cuEventRecord");
    succeed(driver.stream_synchronize(stream), "cuStreamSynchronize");
    succeed(driver.event_record(event, stream), "cuEventRecord");
    refuse(driver.stream_synchronize(stream), NB_CUDA_ILLEGAL_ADDRESS, "the second operation");
}

int main(void) {
    fake = fake_controls_get();
    test_an_old_driver();
    test_no_device();
    test_a_failed_call_is_named();
    test_device_memory_is_closed_to_the_host();
    test_refusals_of_contexts();
    test_refusals_of_objects();
    test_memory_freed_too_early();
    test_unregistered_memory_is_slow();
    test_an_event_orders_streams();
    test_a_wait_takes_the_event_as_it_is();
    test_kernels_run_on_device_memory();
    test_injected_failures();
    fake->reset(0, 0);
    return 0;
}
