// CUDA driver: loads it, opens a device, and turns its results into failures.
#include "cuda/driver.h"

#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"

enum { STREAM_PER_THREAD = 2 }; // CU_STREAM_PER_THREAD

static const char usual_library[] = "libcuda.so.1";

static int code_of(unsigned result) {
    if (result >= NB_CUDA_CAPTURE_UNSUPPORTED && result <= NB_CUDA_CAPTURED_EVENT) {
        return -EBUSY;
    }
    switch (result) {
    case NB_CUDA_SUCCESS:
        return 0;
    case NB_CUDA_NOT_READY:
        return -EAGAIN;
    case NB_CUDA_OUT_OF_MEMORY:
        return -ENOMEM;
    case NB_CUDA_INVALID_VALUE:
        return -EINVAL;
    case NB_CUDA_NO_DEVICE:
    case NB_CUDA_INVALID_DEVICE:
        return -ENODEV;
    default:
        return -EIO;
    }
}

// `where`: "", " on device 0", " of 4096 bytes on device 0".
static int fail_call(const struct nb_cuda_driver *driver, unsigned result, const char *call, const char *where,
                     struct nb_error *err) {
    const char *name = NULL;
    const char *text = NULL;
    if (driver->get_error_name(result, &name) != NB_CUDA_SUCCESS || name == NULL) {
        name = "unknown result";
    }
    if (driver->get_error_string(result, &text) != NB_CUDA_SUCCESS || text == NULL) {
        text = "the driver has no text for it";
    }
    return nb_fail(err, code_of(result), "CUDA: %s%s: %s %u (%s)", call, where, name, result, text);
}

int nb_cuda_check(const struct nb_cuda_device *device, unsigned result, const char *call, size_t bytes,
                  struct nb_error *err) {
    if (result == NB_CUDA_SUCCESS || result == NB_CUDA_NOT_READY) {
        return code_of(result);
    }
    char where[64];
    if (bytes > 0) {
        (void)snprintf(where, sizeof where, " of %zu bytes on device %d", bytes, device->ordinal);
    } else {
        (void)snprintf(where, sizeof where, " on device %d", device->ordinal);
    }
    return fail_call(device->driver, result, call, where, err);
}

static int check_version(void *handle, const char *path, int *version, struct nb_error *err) {
    unsigned (*get_version)(int *version) = NULL;
    void *symbol = dlsym(handle, "cuDriverGetVersion");
    memcpy(&get_version, &symbol, sizeof symbol);
    if (get_version == NULL || get_version(version) != NB_CUDA_SUCCESS) {
        return nb_fail(err, NB_ENOLIB, "CUDA: %s is not a CUDA driver: it tells no version", path);
    }
    if (*version < NB_CUDA_VERSION_MIN) {
        return nb_fail(err, NB_ENOLIB, "CUDA: driver %d.%d is too old: %d.%d or later is needed", *version / 1000,
                       *version % 1000 / 10, NB_CUDA_VERSION_MIN / 1000, NB_CUDA_VERSION_MIN % 1000 / 10);
    }
    return 0;
}

static int load_symbols(struct nb_cuda_driver *driver, void *handle, const char *path, struct nb_error *err) {
    static const struct {
        const char *name;
        size_t offset;
    } symbols[] = {
#define NB_CUDA_SYMBOL(member, symbol, parameters) {#symbol, offsetof(struct nb_cuda_driver, member)},
        NB_CUDA_CALLS(NB_CUDA_SYMBOL)
#undef NB_CUDA_SYMBOL
    };
    for (size_t i = 0; i < sizeof symbols / sizeof symbols[0]; i++) {
        void *symbol = dlsym(handle, symbols[i].name);
        if (symbol == NULL) {
            nb_fail(err, NB_ENOLIB, "CUDA: %s is not a CUDA driver: it has no %s", path, symbols[i].name);
            return NB_ENOLIB;
        }
        memcpy((char *)driver + symbols[i].offset, &symbol, sizeof symbol);
    }
    return 0;
}

int nb_cuda_driver_open(struct nb_cuda_driver *driver, const char *library, struct nb_error *err) {
    const char *path = library != NULL ? library : usual_library;
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL && library == NULL) {
        nb_fail(err, NB_ENOLIB, "CUDA: %s cannot be loaded (no NVIDIA driver here): move the model to the CPU", path);
        return NB_ENOLIB;
    }
    if (handle == NULL) {
        nb_fail(err, NB_ENOLIB, "CUDA: %s cannot be loaded (%s): move the model to the CPU", path, dlerror());
        return NB_ENOLIB;
    }
    struct nb_cuda_driver found = {0};
    int rc;
    if ((rc = check_version(handle, path, &found.version, err)) < 0 ||
        (rc = load_symbols(&found, handle, path, err)) < 0) {
        return rc;
    }
    unsigned result = found.init(0);
    if (result != NB_CUDA_SUCCESS) {
        return fail_call(&found, result, "cuInit", "", err);
    }
    struct link_map *map = NULL;
    if (dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map->l_name[0] != '\0') {
        path = map->l_name;
    }
    (void)snprintf(found.path, sizeof found.path, "%s", path);
    *driver = found;
    return 0;
}

int nb_cuda_device_open(struct nb_cuda_device *device, const struct nb_cuda_driver *driver, int ordinal,
                        struct nb_error *err) {
    struct nb_cuda_device opened = {.driver = driver, .ordinal = ordinal};
    int count = 0;
    int rc = nb_cuda_check(&opened, driver->device_get_count(&count), "cuDeviceGetCount", 0, err);
    if (rc < 0) {
        return rc;
    }
    if (ordinal < 0 || ordinal >= count) {
        return nb_fail(err, -ENODEV, "CUDA: there is no device %d: the driver has %d", ordinal, count);
    }
    if ((rc = nb_cuda_check(&opened, driver->device_get(&opened.handle, ordinal), "cuDeviceGet", 0, err)) < 0 ||
        (rc = nb_cuda_check(&opened, driver->device_get_name(opened.name, NB_CUDA_NAME, opened.handle),
                            "cuDeviceGetName", 0, err)) < 0 ||
        (rc = nb_cuda_check(&opened, driver->primary_retain(&opened.context, opened.handle), "cuDevicePrimaryCtxRetain",
                            0, err)) < 0) {
        return rc;
    }
    *device = opened;
    return 0;
}

void nb_cuda_device_close(struct nb_cuda_device *device) {
    if (device == NULL || device->context == NULL) {
        return;
    }
    (void)device->driver->primary_release(device->handle);
    device->context = NULL;
}

int nb_cuda_enter(const struct nb_cuda_device *device, struct nb_error *err) {
    return nb_cuda_check(device, device->driver->context_push(device->context), "cuCtxPushCurrent", 0, err);
}

void nb_cuda_leave(const struct nb_cuda_device *device) {
    struct CUctx_st *popped = NULL;
    (void)device->driver->context_pop(&popped);
}

int nb_cuda_enter_relaxed(const struct nb_cuda_device *device, unsigned *mode, struct nb_error *err) {
    int rc = nb_cuda_enter(device, err);
    if (rc < 0) {
        return rc;
    }
    *mode = NB_CUDA_CAPTURE_RELAXED;
    rc =
        nb_cuda_check(device, device->driver->exchange_capture_mode(mode), "cuThreadExchangeStreamCaptureMode", 0, err);
    if (rc < 0) {
        nb_cuda_leave(device);
    }
    return rc;
}

void nb_cuda_leave_relaxed(const struct nb_cuda_device *device, unsigned mode) {
    (void)device->driver->exchange_capture_mode(&mode);
    nb_cuda_leave(device);
}

bool nb_cuda_is_per_thread(const struct CUstream_st *stream) {
    return (uintptr_t)stream == STREAM_PER_THREAD;
}

int nb_cuda_is_captured(const struct nb_cuda_device *device, struct CUstream_st *stream, struct nb_error *err) {
    unsigned status = 0;
    unsigned result = device->driver->stream_is_capturing(stream, &status);
    if (status != 0 || result == NB_CUDA_CAPTURE_IMPLICIT) {
        return 1;
    }
    return nb_cuda_check(device, result, "cuStreamIsCapturing", 0, err);
}

int nb_cuda_record(const struct nb_cuda_device *device, struct CUevent_st *event, struct CUstream_st *stream,
                   struct nb_error *err) {
    unsigned result = device->driver->event_record(event, stream);
    if (result == NB_CUDA_INVALID_HANDLE || result == NB_CUDA_INVALID_CONTEXT) {
        return nb_fail(err, -EINVAL,
                       "CUDA: cuEventRecord on device %d: the stream is not of the device's primary context (%u): use "
                       "streams of torch.cuda, outside of green contexts and of contexts that the script makes",
                       device->ordinal, result);
    }
    return nb_cuda_check(device, result, "cuEventRecord", 0, err);
}

int nb_cuda_is_passed(const struct nb_cuda_device *device, struct CUevent_st *event, struct nb_error *err) {
    int rc = nb_cuda_check(device, device->driver->event_query(event), "cuEventQuery", 0, err);
    return rc == -EAGAIN ? 0 : rc < 0 ? rc : 1;
}
