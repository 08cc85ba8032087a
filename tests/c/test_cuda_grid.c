// Device code with CUDA's grid: the code for CUDA, compiled as C, runs the threads of a grid sequentially. Each element
// is handled by one thread. Aligned data, which take a separate code path, give the same results.
#pragma GCC optimize("no-strict-aliasing")

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct dimension {
    unsigned x;
    unsigned y;
};
static struct dimension blockIdx;
static struct dimension threadIdx;
static struct dimension gridDim;
static struct dimension blockDim;
#define __device__
#define __global__ static
#define __CUDACC__
#include "cuda/kernels.cu"
#undef __CUDACC__

#include "base/dtype.h"
#include "check.h"
#include "coll/reduce.h"

enum { COUNT_MAX = 700, ROOM = COUNT_MAX * 8 + 64, GUARD = 0xa5 };

typedef void (*kernel_fn)(uint64_t to, uint64_t from, uint64_t count, double factor);

static const struct {
    unsigned grid_x;
    unsigned grid_y;
    unsigned threads;
} grids[] = {{1, 1, 1}, {1, 1, 32}, {3, 2, 7}, {2, 5, 256}, {40, 1, 64}};
enum { GRIDS = sizeof grids / sizeof grids[0] };

static uint64_t address(const void *memory) {
    return (uint64_t)(uintptr_t)memory;
}

static void launch(int grid, kernel_fn kernel, uint64_t to, uint64_t from, uint64_t count, double factor) {
    gridDim = (struct dimension){grids[grid].grid_x, grids[grid].grid_y};
    blockDim = (struct dimension){grids[grid].threads, 1};
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; blockIdx.y++) {
        for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) {
            for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++) {
                kernel(to, from, count, factor);
            }
        }
    }
}

static const struct {
    int dtype;
    kernel_fn scale;
    kernel_fn add;
    kernel_fn widen;
    kernel_fn narrow;
} types[] = {
    {NB_F16, nb_scale_f16, nb_add_f16, nb_cast_f16_to_f32, nb_cast_f32_to_f16},
    {NB_BF16, nb_scale_bf16, nb_add_bf16, nb_cast_bf16_to_f32, nb_cast_f32_to_bf16},
    {NB_F32, nb_scale_f32, nb_add_f32, NULL, NULL},
    {NB_F64, nb_scale_f64, nb_add_f64, NULL, NULL},
};

// Small integers, whose sums and doubles are exact.
static void fill(unsigned char *at, int dtype, size_t count, unsigned seed) {
    for (size_t i = 0; i < count; i++) {
        float single = (float)((i * 7 + seed) % 50);
        double value = (double)single;
        uint16_t half = dtype == NB_F16 ? nb_f16_narrow(single) : nb_bf16_narrow(single);
        const void *from = dtype == NB_F64 ? (const void *)&value : dtype == NB_F32 ? (const void *)&single : &half;
        memcpy(at + i * nb_dtype_size(dtype), from, nb_dtype_size(dtype));
    }
}

_Alignas(16) static unsigned char got[ROOM];
_Alignas(16) static unsigned char want[ROOM];
_Alignas(16) static unsigned char other[ROOM];

static void check_sum(int grid, size_t type, size_t count, size_t shift) {
    const int dtype = types[type].dtype;
    if (grids[grid].grid_y > 1) {
        return; // only kernels on lists of pieces use blocks along y
    }
    memset(got, GUARD, sizeof got);
    fill(got + shift, dtype, count, 3);
    fill(other + shift / 2, dtype, count, 11);
    memcpy(want, got, sizeof got);
    launch(grid, types[type].add, address(got + shift), address(other + shift / 2), count, 0);
    launch(grid, types[type].scale, address(got + shift), 0, count, 2);
    nb_reduce_kernel(NB_ISA_GENERIC, dtype, NB_SUM)(want + shift, other + shift / 2, count);
    nb_scale_kernel(NB_ISA_GENERIC, dtype)(want + shift, count, 2);
    CHECK(memcmp(got, want, sizeof got) == 0, "%s, %zu at %zu, grid %d", nb_dtype_name(dtype), count, shift, grid);
    if (types[type].widen != NULL) {
        memset(other, GUARD, sizeof other);
        launch(grid, types[type].widen, address(other + shift), address(want + shift), count, 0);
        memset(got, GUARD, sizeof got);
        launch(grid, types[type].narrow, address(got + shift), address(other + shift), count, 0);
        CHECK(memcmp(got, want, sizeof got) == 0, "cast of %s, %zu at %zu", nb_dtype_name(dtype), count, shift);
    }
}

static void test_arithmetic(void) {
    static const size_t counts[] = {0, 1, 31, 32, 33, 257, COUNT_MAX};
    for (int grid = 0; grid < GRIDS; grid++) {
        for (size_t type = 0; type < sizeof types / sizeof types[0]; type++) {
            for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
                for (size_t shift = 0; shift <= 16; shift++) {
                    check_sum(grid, type, counts[c], shift);
                }
            }
        }
    }
}

static void test_pack_and_unpack(void) {
    static const uint64_t sizes[] = {64, 1, 0, 100, 16, 257, 4, 1000};
    enum { PIECES = sizeof sizes / sizeof sizes[0] };
    for (int grid = 0; grid < GRIDS; grid++) {
        for (uint64_t step = 1; step <= 16; step *= 2) { // alignment of the gradients and of their offsets
            struct nb_cuda_piece list[PIECES];
            uint64_t at = 0;
            for (int p = 0; p < PIECES; p++) {
                list[p] = (struct nb_cuda_piece){address(other + at), at, sizes[p]};
                at += (sizes[p] + step - 1) / step * step + step;
            }
            for (size_t i = 0; i < sizeof other; i++) {
                other[i] = (unsigned char)(i * 31 + 7);
            }
            memcpy(want, other, sizeof other);
            memset(got, GUARD, sizeof got);
            launch(grid, nb_pack, address(got), address(list), PIECES, 0);
            for (int p = 0; p < PIECES; p++) {
                const uint64_t place = list[p].offset_bytes;
                CHECK(memcmp(got + place, other + place, sizes[p]) == 0, "piece %d, grid %d", p, grid);
                CHECK(got[place + sizes[p]] == GUARD, "written beyond piece %d, grid %d", p, grid);
                memset(other + place, 0, sizes[p]);
            }
            launch(grid, nb_unpack, address(got), address(list), PIECES, 0);
            CHECK(memcmp(other, want, sizeof other) == 0, "unpack does not restore the gradients, grid %d", grid);
        }
    }
}

int main(void) {
    test_arithmetic();
    test_pack_and_unpack();
    return 0;
}
