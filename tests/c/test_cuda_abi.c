// CUDA ABI: the core's declarations of types, constants and signatures equal those of the toolkit's cuda.h.
#include "check.h"

#if defined(__has_include) && __has_include("/usr/local/cuda/include/cuda.h")
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpragmas"
#pragma GCC diagnostic ignored "-Wstrict-prototypes"
#include "/usr/local/cuda/include/cuda.h"
#pragma GCC diagnostic pop
#endif

#include <stddef.h>
#include <string.h>

#include "cuda/driver.h"

#ifdef CUDA_VERSION

// A call whose parameters or result differ does not compile.
#define SAME(member, symbol, parameters)                                                                               \
    _Static_assert(                                                                                                    \
        __builtin_types_compatible_p(__typeof__(((struct nb_cuda_driver *)NULL)->member), __typeof__(&(symbol))),      \
        #symbol);
NB_CUDA_CALLS(SAME)

_Static_assert(__builtin_types_compatible_p(nb_cuda_address, CUdeviceptr), "CUdeviceptr");
_Static_assert(__builtin_types_compatible_p(int, CUdevice), "CUdevice");
_Static_assert(__builtin_types_compatible_p(unsigned, CUresult), "CUresult");

static const struct {
    unsigned ours;
    unsigned theirs;
    const char *name;
} constants[] = {
#define CONSTANT(ours, theirs) {ours, theirs, #theirs}
    CONSTANT(NB_CUDA_SUCCESS, CUDA_SUCCESS),
    CONSTANT(NB_CUDA_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE),
    CONSTANT(NB_CUDA_OUT_OF_MEMORY, CUDA_ERROR_OUT_OF_MEMORY),
    CONSTANT(NB_CUDA_NO_DEVICE, CUDA_ERROR_NO_DEVICE),
    CONSTANT(NB_CUDA_INVALID_DEVICE, CUDA_ERROR_INVALID_DEVICE),
    CONSTANT(NB_CUDA_INVALID_IMAGE, CUDA_ERROR_INVALID_IMAGE),
    CONSTANT(NB_CUDA_INVALID_CONTEXT, CUDA_ERROR_INVALID_CONTEXT),
    CONSTANT(NB_CUDA_NO_BINARY_FOR_GPU, CUDA_ERROR_NO_BINARY_FOR_GPU),
    CONSTANT(NB_CUDA_INVALID_HANDLE, CUDA_ERROR_INVALID_HANDLE),
    CONSTANT(NB_CUDA_NOT_FOUND, CUDA_ERROR_NOT_FOUND),
    CONSTANT(NB_CUDA_NOT_READY, CUDA_ERROR_NOT_READY),
    CONSTANT(NB_CUDA_ILLEGAL_ADDRESS, CUDA_ERROR_ILLEGAL_ADDRESS),
    CONSTANT(NB_CUDA_HOST_ALREADY_REGISTERED, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED),
    CONSTANT(NB_CUDA_HOST_NOT_REGISTERED, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED),
    CONSTANT(NB_CUDA_CAPTURE_UNSUPPORTED, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED),
    CONSTANT(NB_CUDA_CAPTURE_IMPLICIT, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT),
    CONSTANT(NB_CUDA_CAPTURED_EVENT, CUDA_ERROR_CAPTURED_EVENT),
    CONSTANT(NB_CUDA_CAPTURE_RELAXED, CU_STREAM_CAPTURE_MODE_RELAXED),
    CONSTANT(NB_CUDA_STREAM_NON_BLOCKING, CU_STREAM_NON_BLOCKING),
    CONSTANT(NB_CUDA_EVENT_DISABLE_TIMING, CU_EVENT_DISABLE_TIMING),
    CONSTANT(NB_CUDA_HOST_PORTABLE, CU_MEMHOSTREGISTER_PORTABLE),
    CONSTANT(NB_CUDA_HOST_MAPPED, CU_MEMHOSTREGISTER_DEVICEMAP),
};

// The versioned symbol that cuda.h selects for a name without a version. CUDA 13 selects cuEventElapsedTime_v2, and its
// driver exports the first version too.
#define TEXT(x) #x
#define EXPANDED(x) TEXT(x)
#define SELECTED(name) EXPANDED(name)

static const struct {
    const char *ours;
    const char *theirs;
} symbols[] = {
    {"cuDriverGetVersion", SELECTED(cuDriverGetVersion)},
    {"cuInit", SELECTED(cuInit)},
    {"cuGetErrorName", SELECTED(cuGetErrorName)},
    {"cuGetErrorString", SELECTED(cuGetErrorString)},
    {"cuDeviceGetCount", SELECTED(cuDeviceGetCount)},
    {"cuDeviceGet", SELECTED(cuDeviceGet)},
    {"cuDeviceGetName", SELECTED(cuDeviceGetName)},
    {"cuDevicePrimaryCtxRetain", SELECTED(cuDevicePrimaryCtxRetain)},
    {"cuDevicePrimaryCtxRelease_v2", SELECTED(cuDevicePrimaryCtxRelease)},
    {"cuCtxPushCurrent_v2", SELECTED(cuCtxPushCurrent)},
    {"cuCtxPopCurrent_v2", SELECTED(cuCtxPopCurrent)},
    {"cuCtxGetStreamPriorityRange", SELECTED(cuCtxGetStreamPriorityRange)},
    {"cuStreamCreate", SELECTED(cuStreamCreate)},
    {"cuStreamCreateWithPriority", SELECTED(cuStreamCreateWithPriority)},
    {"cuStreamDestroy_v2", SELECTED(cuStreamDestroy)},
    {"cuStreamWaitEvent", SELECTED(cuStreamWaitEvent)},
    {"cuStreamSynchronize", SELECTED(cuStreamSynchronize)},
    {"cuStreamIsCapturing", SELECTED(cuStreamIsCapturing)},
    {"cuEventCreate", SELECTED(cuEventCreate)},
    {"cuEventDestroy_v2", SELECTED(cuEventDestroy)},
    {"cuEventRecord", SELECTED(cuEventRecord)},
    {"cuEventQuery", SELECTED(cuEventQuery)},
    {"cuThreadExchangeStreamCaptureMode", SELECTED(cuThreadExchangeStreamCaptureMode)},
    {"cuMemAlloc_v2", SELECTED(cuMemAlloc)},
    {"cuMemFree_v2", SELECTED(cuMemFree)},
    {"cuMemHostRegister_v2", SELECTED(cuMemHostRegister)},
    {"cuMemHostUnregister", SELECTED(cuMemHostUnregister)},
    {"cuMemHostGetDevicePointer_v2", SELECTED(cuMemHostGetDevicePointer)},
    {"cuMemcpyDtoHAsync_v2", SELECTED(cuMemcpyDtoHAsync)},
    {"cuMemcpyHtoDAsync_v2", SELECTED(cuMemcpyHtoDAsync)},
    {"cuModuleLoadData", SELECTED(cuModuleLoadData)},
    {"cuModuleUnload", SELECTED(cuModuleUnload)},
    {"cuModuleGetFunction", SELECTED(cuModuleGetFunction)},
    {"cuLaunchKernel", SELECTED(cuLaunchKernel)},
};

int main(void) {
    for (size_t i = 0; i < sizeof constants / sizeof constants[0]; i++) {
        CHECK(constants[i].ours == constants[i].theirs, "%s is %u, not %u", constants[i].name, constants[i].theirs,
              constants[i].ours);
    }
    for (size_t i = 0; i < sizeof symbols / sizeof symbols[0]; i++) {
        CHECK(strcmp(symbols[i].ours, symbols[i].theirs) == 0, "cuda.h selects %s, not %s", symbols[i].theirs,
              symbols[i].ours);
    }
    return 0;
}

#else

int main(void) {
    SKIP("no cuda.h in /usr/local/cuda/include");
}

#endif
