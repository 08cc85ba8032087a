// Image: the device code that nvcc made of kernels.cu, in a file of C that the build makes (tools/cbuild.py).
#ifndef NB_CUDA_IMAGE_H
#define NB_CUDA_IMAGE_H

#include <stddef.h>

extern const unsigned char nb_cuda_image_data[];
extern const size_t nb_cuda_image_bytes; // 0: none

#endif
