// Piece: one gradient of a list that a kernel packs into a buffer, or unpacks. Lists of pieces lie in device memory.
#ifndef NB_CUDA_PIECE_H
#define NB_CUDA_PIECE_H

#include <stdint.h>

struct nb_cuda_piece {
    uint64_t address;      // of the gradient, in device memory
    uint64_t offset_bytes; // in the buffer
    uint64_t bytes;
};

#endif
