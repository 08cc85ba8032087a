// Kernels: loads the image and launches.
#include "cuda/kernels.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/error.h"
#include "cuda/driver.h"
#include "cuda/image.h"

// A block has THREADS threads. Each takes about PER_THREAD elements, up to GRID_MAX blocks; then more. A piece of a list
// has a block for each PIECE_BLOCK_BYTES, up to PIECE_BLOCKS: each thread of a block reads the list, perhaps from the host.
enum {
    THREADS = 256,
    PER_THREAD = 4,
    GRID_MAX = 4096,
    PIECE_BLOCKS = 32,
    PIECE_BLOCK_BYTES = 4096,
    PIECES_MAX = 65535
};

static const char *const names[] = {
#define NB_CUDA_NAMED(number, name) [number] = #name,
    NB_CUDA_KERNELS(NB_CUDA_NAMED)
#undef NB_CUDA_NAMED
};

const void *nb_cuda_image(void) {
    return nb_cuda_image_bytes > 0 ? nb_cuda_image_data : NULL;
}

int nb_cuda_kernels_open(struct nb_cuda_kernels *kernels, const struct nb_cuda_device *device, const void *image,
                         struct nb_error *err) {
    if (image == NULL) {
        nb_fail(err, NB_ENOLIB, "CUDA: this build has no device code: build netbottleneck where nvcc is");
        return NB_ENOLIB;
    }
    const struct nb_cuda_driver *driver = device->driver;
    struct nb_cuda_kernels opened = {.device = device};
    int rc = nb_cuda_check(device, driver->module_load(&opened.module, image), "cuModuleLoadData", 0, err);
    if (rc < 0) {
        return rc;
    }
    // With CUDA's lazy loading this loads a kernel, so that no launch does (CUDA C++ Programming Guide, Lazy Loading).
    for (int i = 0; rc == 0 && i < NB_CUDA_KERNEL_COUNT; i++) {
        rc = nb_cuda_check(device, driver->module_get_function(&opened.functions[i], opened.module, names[i]),
                           "cuModuleGetFunction", 0, err);
    }
    if (rc < 0) {
        nb_cuda_kernels_close(&opened);
        return rc;
    }
    *kernels = opened;
    return 0;
}

void nb_cuda_kernels_close(struct nb_cuda_kernels *kernels) {
    if (kernels == NULL || kernels->module == NULL) {
        return;
    }
    (void)kernels->device->driver->module_unload(kernels->module);
    kernels->module = NULL;
}

int nb_cuda_kernel_number(const char *name) {
    for (int i = 0; i < NB_CUDA_KERNEL_COUNT; i++) {
        if (strcmp(name, names[i]) == 0) {
            return i;
        }
    }
    return -1;
}

int nb_cuda_launch(const struct nb_cuda_kernels *kernels, struct CUstream_st *stream, const struct nb_cuda_work *work,
                   struct nb_error *err) {
    if (work->count == 0) {
        return 0;
    }
    const size_t elements_of_block = (size_t)THREADS * PER_THREAD;
    size_t blocks = work->count / elements_of_block + (work->count % elements_of_block != 0);
    unsigned x = blocks < GRID_MAX ? (unsigned)blocks : GRID_MAX;
    unsigned y = 1;
    if (work->kernel == NB_CUDA_PACK || work->kernel == NB_CUDA_UNPACK) {
        blocks = work->piece_bytes / PIECE_BLOCK_BYTES + (work->piece_bytes % PIECE_BLOCK_BYTES != 0);
        x = blocks > 0 && blocks < PIECE_BLOCKS ? (unsigned)blocks : PIECE_BLOCKS;
        y = work->count < PIECES_MAX ? (unsigned)work->count : PIECES_MAX;
    }
    uint64_t to = work->to;
    uint64_t from = work->from;
    uint64_t count = work->count;
    double factor = work->factor;
    void *parameters[] = {&to, &from, &count, &factor};
    unsigned result = kernels->device->driver->launch(kernels->functions[work->kernel], x, y, 1, THREADS, 1, 1, 0,
                                                      stream, parameters, NULL);
    return nb_cuda_check(kernels->device, result, "cuLaunchKernel", 0, err);
}
