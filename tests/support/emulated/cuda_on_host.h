// CUDA C++ kernels compiled by g++: the parts of the language that they use, and a loop over the grid. Threads run to
// completion one after another, so kernels must not wait for each other's threads (shared memory, barriers, warps).
#pragma once

#include <math.h>
#include <cstddef>
#include <type_traits>
#include <utility>

#define __global__ __attribute__((visibility("hidden")))
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

struct HostDim3 {
    unsigned x, y, z;
};

static thread_local HostDim3 threadIdx, blockIdx, blockDim, gridDim;

template <class... Arguments, std::size_t... Numbers>
static void run_grid(void (*kernel)(Arguments...), int blocks, int rows, int threads, void **parameters,
                     std::index_sequence<Numbers...>) {
    gridDim = {unsigned(blocks), unsigned(rows), 1};
    blockDim = {unsigned(threads), 1, 1};
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
            for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x)
                kernel(*static_cast<std::remove_reference_t<Arguments> *>(parameters[Numbers])...);
}

template <class... Arguments>
static void run_grid(void (*kernel)(Arguments...), int blocks, int rows, int threads, void **parameters) {
    run_grid(kernel, blocks, rows, threads, parameters, std::index_sequence_for<Arguments...>{});
}

template <class... Arguments>
static int sizes_of(void (*)(Arguments...), int *sizes) {
    int at = 0;
    (void(sizes[at++] = int(sizeof(std::remove_reference_t<Arguments>))), ...);
    return at;
}

#define HOST_ENTRY(name)                                                                      \
    extern "C" void name##__host(int blocks, int rows, int threads, void **parameters) {      \
        run_grid(name, blocks, rows, threads, parameters);                                    \
    }                                                                                         \
    extern "C" int name##__sizes(int *sizes) { return sizes_of(name, sizes); }
