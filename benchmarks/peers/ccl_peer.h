// oneCCL's all-reduce, for mpi_peer.c: its interface is C++'s alone.
#ifndef CCL_PEER_H
#define CCL_PEER_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// After MPI_Init. What fails ends the program with oneCCL's words.
void ccl_open(int rank, int size);
// In place; returns when the sum is there. Types and operations as the benchmark calls them.
void ccl_all_reduce(void *memory, uint64_t count, const char *type, const char *op);
void ccl_close(void);

#ifdef __cplusplus
}
#endif

#endif
