// CUDA driver API, loaded at run time: the calls that the core makes, in the core's own words, and a device's primary
// context. A build needs no CUDA header and no CUDA library.
//
// Objects of the driver are named by the driver's own opaque structs. A call returns an `unsigned`, 0 for success.
#ifndef NB_CUDA_DRIVER_H
#define NB_CUDA_DRIVER_H

#include <stdbool.h>
#include <stddef.h>

#include "base/error.h"

struct CUctx_st;
struct CUevent_st;
struct CUfunc_st;
struct CUmod_st;
struct CUstream_st;

// An address of device memory. The host must not dereference it.
typedef unsigned long long nb_cuda_address;

enum {
    NB_CUDA_SUCCESS = 0,
    NB_CUDA_INVALID_VALUE = 1,
    NB_CUDA_OUT_OF_MEMORY = 2,
    NB_CUDA_NO_DEVICE = 100,
    NB_CUDA_INVALID_DEVICE = 101,
    NB_CUDA_INVALID_IMAGE = 200,
    NB_CUDA_INVALID_CONTEXT = 201,
    NB_CUDA_NO_BINARY_FOR_GPU = 209,
    NB_CUDA_INVALID_HANDLE = 400,
    NB_CUDA_NOT_FOUND = 500,
    NB_CUDA_NOT_READY = 600,
    NB_CUDA_ILLEGAL_ADDRESS = 700,
    NB_CUDA_HOST_ALREADY_REGISTERED = 712,
    NB_CUDA_HOST_NOT_REGISTERED = 713,
    NB_CUDA_CAPTURE_UNSUPPORTED = 900, // the first of the results by which a capture refuses a call
    NB_CUDA_CAPTURE_IMPLICIT = 906,
    NB_CUDA_CAPTURED_EVENT = 907, // the last of them
};

enum {
    NB_CUDA_CAPTURE_RELAXED = 2,
    NB_CUDA_STREAM_NON_BLOCKING = 1,
    NB_CUDA_EVENT_DISABLE_TIMING = 2,
    NB_CUDA_HOST_PORTABLE = 1,
    NB_CUDA_HOST_MAPPED = 2,
};

enum { NB_CUDA_VERSION_MIN = 12000, NB_CUDA_PATH = 256, NB_CUDA_NAME = 96 };

// X(member of struct nb_cuda_driver, symbol in the library, parameters)
#define NB_CUDA_CALLS(X)                                                                                               \
    X(driver_get_version, cuDriverGetVersion, (int *version))                                                          \
    X(init, cuInit, (unsigned flags))                                                                                  \
    X(get_error_name, cuGetErrorName, (unsigned result, const char **name))                                            \
    X(get_error_string, cuGetErrorString, (unsigned result, const char **text))                                        \
    X(device_get_count, cuDeviceGetCount, (int *count))                                                                \
    X(device_get, cuDeviceGet, (int *device, int ordinal))                                                             \
    X(device_get_name, cuDeviceGetName, (char *name, int bytes, int device))                                           \
    X(primary_retain, cuDevicePrimaryCtxRetain, (struct CUctx_st * *context, int device))                              \
    X(primary_release, cuDevicePrimaryCtxRelease_v2, (int device))                                                     \
    X(context_push, cuCtxPushCurrent_v2, (struct CUctx_st * context))                                                  \
    X(context_pop, cuCtxPopCurrent_v2, (struct CUctx_st * *context))                                                   \
    X(context_priorities, cuCtxGetStreamPriorityRange, (int *least, int *greatest))                                    \
    X(stream_create, cuStreamCreate, (struct CUstream_st * *stream, unsigned flags))                                   \
    X(stream_create_with_priority, cuStreamCreateWithPriority,                                                         \
      (struct CUstream_st * *stream, unsigned flags, int priority))                                                    \
    X(stream_destroy, cuStreamDestroy_v2, (struct CUstream_st * stream))                                               \
    X(stream_wait_event, cuStreamWaitEvent, (struct CUstream_st * stream, struct CUevent_st * event, unsigned flags))  \
    X(stream_synchronize, cuStreamSynchronize, (struct CUstream_st * stream))                                          \
    X(stream_is_capturing, cuStreamIsCapturing, (struct CUstream_st * stream, unsigned *status))                       \
    X(event_create, cuEventCreate, (struct CUevent_st * *event, unsigned flags))                                       \
    X(event_destroy, cuEventDestroy_v2, (struct CUevent_st * event))                                                   \
    X(event_record, cuEventRecord, (struct CUevent_st * event, struct CUstream_st * stream))                           \
    X(event_query, cuEventQuery, (struct CUevent_st * event))                                                          \
    X(event_elapsed, cuEventElapsedTime, (float *ms, struct CUevent_st *begin, struct CUevent_st *end))                \
    X(exchange_capture_mode, cuThreadExchangeStreamCaptureMode, (unsigned *mode))                                      \
    X(mem_alloc, cuMemAlloc_v2, (nb_cuda_address * address, size_t bytes))                                             \
    X(mem_free, cuMemFree_v2, (nb_cuda_address address))                                                               \
    X(host_register, cuMemHostRegister_v2, (void *memory, size_t bytes, unsigned flags))                               \
    X(host_unregister, cuMemHostUnregister, (void *memory))                                                            \
    X(host_device_address, cuMemHostGetDevicePointer_v2, (nb_cuda_address * address, void *memory, unsigned flags))    \
    X(copy_to_host, cuMemcpyDtoHAsync_v2, (void *to, nb_cuda_address from, size_t bytes, struct CUstream_st *stream))  \
    X(copy_to_device, cuMemcpyHtoDAsync_v2,                                                                            \
      (nb_cuda_address to, const void *from, size_t bytes, struct CUstream_st *stream))                                \
    X(module_load, cuModuleLoadData, (struct CUmod_st * *module, const void *image))                                   \
    X(module_unload, cuModuleUnload, (struct CUmod_st * module))                                                       \
    X(module_get_function, cuModuleGetFunction,                                                                        \
      (struct CUfunc_st * *function, struct CUmod_st * module, const char *name))                                      \
    X(launch, cuLaunchKernel,                                                                                          \
      (struct CUfunc_st * function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,               \
       unsigned block_y, unsigned block_z, unsigned shared_bytes, struct CUstream_st *stream, void **parameters,       \
       void **extra))

struct nb_cuda_driver {
#define NB_CUDA_MEMBER(member, symbol, parameters) unsigned(*member) parameters;
    NB_CUDA_CALLS(NB_CUDA_MEMBER)
#undef NB_CUDA_MEMBER
    int version; // of the CUDA that the driver supports: 12040 is 12.4
    char path[NB_CUDA_PATH];
};

// A GPU and its primary context, which torch uses too. Any thread may use it between nb_cuda_enter and nb_cuda_leave.
struct nb_cuda_device {
    const struct nb_cuda_driver *driver;
    struct CUctx_st *context;
    int ordinal;
    int handle;
    char name[NB_CUDA_NAME];
};

// Loads the driver for good: it has threads of its own, so it is never unloaded. `library`: a path in place of
// libcuda.so.1; NULL: the usual one. Errors: NB_ENOLIB where it cannot be loaded or is older than CUDA 12.0, -ENODEV
// without a GPU.
int nb_cuda_driver_open(struct nb_cuda_driver *driver, const char *library, struct nb_error *err);

// Retains the primary context of GPU `ordinal`. `driver` must outlive the device.
int nb_cuda_device_open(struct nb_cuda_device *device, const struct nb_cuda_driver *driver, int ordinal,
                        struct nb_error *err);
void nb_cuda_device_close(struct nb_cuda_device *device);

// Make the device's context current for this thread, and restore the one before.
int nb_cuda_enter(const struct nb_cuda_device *device, struct nb_error *err);
void nb_cuda_leave(const struct nb_cuda_device *device);

// The same, and allow this thread the calls that are forbidden while any thread captures a CUDA graph, such as the query
// of an event. They touch no captured stream. `mode`: what was allowed before.
int nb_cuda_enter_relaxed(const struct nb_cuda_device *device, unsigned *mode, struct nb_error *err);
void nb_cuda_leave_relaxed(const struct nb_cuda_device *device, unsigned mode);
// True for the handle of the per-thread default stream, which names another stream on each thread.
bool nb_cuda_is_per_thread(const struct CUstream_st *stream);
// 1: the stream is captured into a graph, so its work runs later, perhaps often, or never; 0: it is not; negative: a
// failure.
int nb_cuda_is_captured(const struct nb_cuda_device *device, struct CUstream_st *stream, struct nb_error *err);
// Records an event of the device on a stream. Names the remedy for a stream of a context other than the primary one.
int nb_cuda_record(const struct nb_cuda_device *device, struct CUevent_st *event, struct CUstream_st *stream,
                   struct nb_error *err);
// 1: the device has passed the event; 0: not yet; negative: a failure. After nb_cuda_enter_relaxed().
int nb_cuda_is_passed(const struct nb_cuda_device *device, struct CUevent_st *event, struct nb_error *err);

// Turns the result of a call into 0 or a failure that names the call, its bytes (0: it has none) and the device.
// -EAGAIN (not ready) is returned and not recorded. Others: -ENOMEM, -EINVAL, -ENODEV, -EBUSY (refused because of a
// capture), else -EIO.
int nb_cuda_check(const struct nb_cuda_device *device, unsigned result, const char *call, size_t bytes,
                  struct nb_error *err);

#endif
