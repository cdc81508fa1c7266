// CUDA on a CPU, as much of it as kvsim_cuda.cu uses: for tests of its arithmetic.
//
// Blocks run one after the other; the threads of a block are coroutines that change over
// at every barrier and shuffle. Memory is the host's, copies are memcpy.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __device__

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline dim3 threadIdx, blockIdx, blockDim, gridDim;

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorNotSupported = 801 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2 };
enum { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum { cudaMemcpySrcAccessOrderStream = 1 };
struct cudaMemcpyAttributes {
  int srcAccessOrder;
};
#define CUDART_VERSION 13000

namespace emulator {
struct Thread {
  ucontext_t context;
  std::vector<char> stack;
  bool done = false;
};
inline std::vector<Thread> threads;
inline ucontext_t scheduler;
inline unsigned current;
inline std::function<void()> body;
inline std::vector<float> shuffled, dynamic;

inline void yield() {
  swapcontext(&threads[current].context, &scheduler);
  threadIdx.x = current;
}
inline void enter() {
  threadIdx.x = current;
  body();
  threads[current].done = true;
  swapcontext(&threads[current].context, &scheduler);
}
inline void run_block(unsigned count) {
  threads.assign(count, {});
  shuffled.assign(count, 0.0f);
  for (auto& thread : threads) {
    thread.stack.resize(64 << 10);
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = thread.stack.size();
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, enter, 0);
  }
  for (bool any = true; any;) {
    any = false;
    for (current = 0; current < count; ++current) {
      if (threads[current].done) continue;
      any = true;
      swapcontext(&scheduler, &threads[current].context);
    }
  }
}
inline void launch(dim3 grid, unsigned count, size_t bytes, std::function<void()> kernel) {
  body = std::move(kernel);
  gridDim = grid;
  blockDim = dim3(count);
  // poisoned, and a guard behind what was asked for
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = dim3(x, y, z);
        dynamic.assign(bytes / sizeof(float) + 1, std::nanf(""));
        dynamic.back() = 12345.0f;
        run_block(count);
        if (dynamic.back() != 12345.0f) std::abort();
      }
}
}  // namespace emulator

inline void __syncthreads() { emulator::yield(); }
inline float __shfl_xor_sync(unsigned, float value, int mask) {
  emulator::shuffled[threadIdx.x] = value;
  emulator::yield();
  const float other = emulator::shuffled[threadIdx.x ^ mask];
  emulator::yield();
  return other;
}
inline float __expf(float x) { return std::exp(x); }
using std::max;
using std::min;

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, int, int bytes) {
  return bytes <= (227 << 10) ? cudaSuccess : cudaErrorInvalidValue;
}
inline const char* cudaGetErrorName(cudaError_t) { return "emulated"; }
inline const char* cudaGetErrorString(cudaError_t) { return "emulated"; }
inline cudaError_t cudaDriverGetVersion(int* v) { return *v = 0, cudaSuccess; }
inline cudaError_t cudaGetDeviceCount(int* n) { return *n = 1, cudaSuccess; }
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind,
                                   cudaStream_t) {
  std::memcpy(to, from, n);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyBatchAsync(const void** to, const void** from,
                                        const size_t* sizes, size_t count,
                                        cudaMemcpyAttributes*, size_t*, size_t,
                                        cudaStream_t stream) {
  if (stream == nullptr) return cudaErrorInvalidValue;
  for (size_t i = 0; i < count; ++i)
    std::memcpy(const_cast<void*>(to[i]), from[i], sizes[i]);
  return cudaSuccess;
}
