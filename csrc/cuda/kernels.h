// Kernels: what runs on the GPU. A build with nvcc holds their image, for compute capability 8.0, 9.0 and 10.0, and as
// PTX for later ones. A build without nvcc has none. A driver loads an image if its CUDA has at least the major version of
// the nvcc that made it.
#ifndef NB_CUDA_KERNELS_H
#define NB_CUDA_KERNELS_H

#include <stddef.h>

#include "base/error.h"
#include "cuda/driver.h"

// X(number, name in the image). What each does with (to, from, count, factor):
//   pack    copies `count` pieces, a list at `from` (8-byte aligned), into the buffer at `to`
//   unpack  copies the buffer at `to` back into the pieces of the list at `from`
//   scale   to[i] *= factor; 16-bit types in float32
//   add     to[i] += from[i]; 16-bit types in float32
//   cast    to[i] = from[i], rounded to nearest even
#define NB_CUDA_KERNELS(X)                                                                                             \
    X(NB_CUDA_PACK, nb_pack)                                                                                           \
    X(NB_CUDA_UNPACK, nb_unpack)                                                                                       \
    X(NB_CUDA_SCALE_F16, nb_scale_f16)                                                                                 \
    X(NB_CUDA_SCALE_BF16, nb_scale_bf16)                                                                               \
    X(NB_CUDA_SCALE_F32, nb_scale_f32)                                                                                 \
    X(NB_CUDA_SCALE_F64, nb_scale_f64)                                                                                 \
    X(NB_CUDA_ADD_F16, nb_add_f16)                                                                                     \
    X(NB_CUDA_ADD_BF16, nb_add_bf16)                                                                                   \
    X(NB_CUDA_ADD_F32, nb_add_f32)                                                                                     \
    X(NB_CUDA_ADD_F64, nb_add_f64)                                                                                     \
    X(NB_CUDA_CAST_F32_F16, nb_cast_f32_to_f16)                                                                        \
    X(NB_CUDA_CAST_F16_F32, nb_cast_f16_to_f32)                                                                        \
    X(NB_CUDA_CAST_F32_BF16, nb_cast_f32_to_bf16)                                                                      \
    X(NB_CUDA_CAST_BF16_F32, nb_cast_bf16_to_f32)

enum nb_cuda_kernel {
#define NB_CUDA_NUMBER(number, name) number,
    NB_CUDA_KERNELS(NB_CUDA_NUMBER)
#undef NB_CUDA_NUMBER
        NB_CUDA_KERNEL_COUNT
};

struct nb_cuda_kernels {
    const struct nb_cuda_device *device;
    struct CUmod_st *module;
    struct CUfunc_st *functions[NB_CUDA_KERNEL_COUNT];
};

struct nb_cuda_work {
    enum nb_cuda_kernel kernel;
    nb_cuda_address to;
    nb_cuda_address from;
    size_t count;
    double factor;
    size_t piece_bytes; // pack, unpack: mean size of a piece; 0: not known
};

// The image of this build, or NULL if nvcc was not there to make one.
const void *nb_cuda_image(void);

// Loads an image into the current context, that of `device` (nb_cuda_enter). `image` NULL: NB_ENOLIB.
int nb_cuda_kernels_open(struct nb_cuda_kernels *kernels, const struct nb_cuda_device *device, const void *image,
                         struct nb_error *err);
void nb_cuda_kernels_close(struct nb_cuda_kernels *kernels);

// The number of the kernel with this name in the image; -1: there is none.
int nb_cuda_kernel_number(const char *name);

// Starts a kernel on a stream, in the current context. Work of 0 elements starts nothing.
int nb_cuda_launch(const struct nb_cuda_kernels *kernels, struct CUstream_st *stream, const struct nb_cuda_work *work,
                   struct nb_error *err);

#endif
