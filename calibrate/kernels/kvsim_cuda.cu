// First-generation KV-cache operations in CUDA C++, behind a plain C interface.
//
// Shapes of the operations follow vLLM 0.7 and the PagedAttention paper (Kwon et al.,
// SOSP 2023): what is launched, over which grid, and what is copied in which order. The
// code is our own. Every function returns a cudaError_t as an int, 0 for success, and
// enqueues on the given stream without waiting.
//
// Cache layout (calibrate/kernels/__init__.py): each plane, the keys or the values of a
// layer, is (num_blocks, block_size, num_kv_heads, head_dim); a page is one block of it.

// NVRTC compiles the kernels alone: without headers, and with names that can be asked for.
#ifdef __CUDACC_RTC__
#define KVSIM_LOCAL kvsim
#define FLT_MAX 3.402823466e+38f
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned;
using int64_t = long long;
struct __half {
  uint16_t bits;
};
struct __nv_bfloat16 {
  uint16_t bits;
};
__device__ inline float __half2float(__half x) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x.bits));
  return value;
}
__device__ inline __half __float2half(float value) {
  __half x;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(x.bits) : "f"(value));
  return x;
}
__device__ inline float __bfloat162float(__nv_bfloat16 x) {
  return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
}
__device__ inline __nv_bfloat16 __float2bfloat16(float value) {
  __nv_bfloat16 x;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(x.bits) : "f"(value));
  return x;
}
#else
#define KVSIM_LOCAL
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cfloat>
#include <cstddef>
#include <cstdint>
#endif

namespace KVSIM_LOCAL {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kPartition = 512;  // tokens of a partition of the second version
constexpr int kVectorBytes = 16;

__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
template <typename T> __device__ inline T from_float(float x);
template <> __device__ inline __half from_float(float x) { return __float2half(x); }
template <> __device__ inline __nv_bfloat16 from_float(float x) {
  return __float2bfloat16(x);
}

__device__ inline float warp_max(float x, int from) {
  for (int mask = 16; mask >= from; mask /= 2)
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, mask));
  return x;
}

__device__ inline float warp_sum(float x, int from, int below) {
  for (int mask = below / 2; mask >= from; mask /= 2)
    x += __shfl_xor_sync(0xffffffffu, x, mask);
  return x;
}

// The same value in every thread; scratch holds kWarps floats.
template <bool kMax> __device__ float block_reduce(float x, float* scratch) {
  x = kMax ? warp_max(x, 1) : warp_sum(x, 1, 32);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  float all = kMax ? -FLT_MAX : 0.0f;
  for (int warp = 0; warp < kWarps; ++warp)
    all = kMax ? fmaxf(all, scratch[warp]) : all + scratch[warp];
  __syncthreads();
  return all;
}

}  // namespace KVSIM_LOCAL

extern "C" {

// Attention of one query token a sequence; strides in elements.
struct KvsimPagedArgs {
  void* out;                    // (num_seqs, num_heads, head_dim)
  const void* query;            // (num_seqs, num_heads, head_dim)
  const void* key_cache;        // (num_blocks, block_size, num_kv_heads, head_dim)
  const void* value_cache;      // as key_cache
  const int32_t* block_tables;  // (num_seqs, max_blocks)
  const int32_t* context_lens;  // (num_seqs,)
  float* partial;               // v2: (num_seqs, num_heads, partitions, head_dim)
  float* sums;                  // v2: (num_seqs, num_heads, partitions)
  float* maxima;                // v2: as sums
  int64_t block_stride;
  int64_t token_stride;
  int64_t head_stride;
  int32_t num_seqs;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;  // 64, 128 or 256
  int32_t block_size;
  int32_t max_blocks;
  int32_t max_context_len;
  float scale;
  int32_t dtype;  // 0 fp16, 1 bf16
};

}  // extern "C"

namespace KVSIM_LOCAL {

// Grid (heads, sequences, partitions). A group of kLanes lanes takes a token, each lane
// sixteen bytes of its head; scores wait in shared memory between the two passes.
template <typename T, int kHeadDim, bool kPartitioned>
__global__ void paged_attention_kernel(const KvsimPagedArgs args) {
  constexpr int kWidth = kVectorBytes / static_cast<int>(sizeof(T));
  constexpr int kLanes = kHeadDim / kWidth;
  constexpr int kTokens = kThreads / kLanes;  // that the block takes at once
  extern __shared__ float scores[];
  __shared__ float scratch[kWarps];
  __shared__ float sums[kWarps][kHeadDim];

  const int head = blockIdx.x, seq = blockIdx.y, part = blockIdx.z;
  const int context_len = args.context_lens[seq];
  const int start = kPartitioned ? part * kPartition : 0;
  const int end = kPartitioned ? min(start + kPartition, context_len) : context_len;
  const int64_t row = static_cast<int64_t>(seq) * args.num_heads + head;
  T* out = static_cast<T*>(args.out) + row * kHeadDim;
  if (start >= end) {  // an empty sequence gives zeros; an empty partition is not read
    if (!kPartitioned && threadIdx.x < kHeadDim) out[threadIdx.x] = from_float<T>(0.0f);
    if (!kPartitioned && threadIdx.x + kThreads < kHeadDim)
      out[threadIdx.x + kThreads] = from_float<T>(0.0f);
    return;
  }

  const int kv_head = head / (args.num_heads / args.num_kv_heads);
  const int lane = threadIdx.x % kLanes, token0 = threadIdx.x / kLanes;
  const int32_t* table = args.block_tables + static_cast<int64_t>(seq) * args.max_blocks;
  const int64_t in_token = kv_head * args.head_stride + lane * kWidth;
  union Vector {
    uint4 words;
    T values[kWidth];
  };
  const auto vector_of = [&](const void* cache, int token) {
    const int64_t block = table[token / args.block_size];
    const int64_t where = block * args.block_stride +
                          (token % args.block_size) * args.token_stride + in_token;
    Vector vector;
    vector.words = *reinterpret_cast<const uint4*>(static_cast<const T*>(cache) + where);
    return vector;
  };

  Vector raw;
  raw.words = *reinterpret_cast<const uint4*>(static_cast<const T*>(args.query) +
                                              row * kHeadDim + lane * kWidth);
  float query[kWidth];
  for (int i = 0; i < kWidth; ++i) query[i] = to_float(raw.values[i]) * args.scale;

  float highest = -FLT_MAX;
  // all lanes of a warp take part in every shuffle, also behind the last token
  for (int first = start; first < end; first += kTokens) {
    const int token = first + token0;
    float dot = 0.0f;
    if (token < end) {
      const Vector key = vector_of(args.key_cache, token);
      for (int i = 0; i < kWidth; ++i) dot += query[i] * to_float(key.values[i]);
    }
    dot = warp_sum(dot, 1, kLanes);
    if (token < end) {
      if (lane == 0) scores[token - start] = dot;
      highest = fmaxf(highest, dot);
    }
  }
  highest = block_reduce<true>(highest, scratch);  // scores are written, too

  float total = 0.0f;
  for (int i = threadIdx.x; i < end - start; i += kThreads) {
    const float weight = __expf(scores[i] - highest);
    scores[i] = weight;
    total += weight;
  }
  total = block_reduce<false>(total, scratch);

  float acc[kWidth] = {};
  for (int token = start + token0; token < end; token += kTokens) {
    const float weight = scores[token - start];
    const Vector value = vector_of(args.value_cache, token);
    for (int i = 0; i < kWidth; ++i) acc[i] += weight * to_float(value.values[i]);
  }
  for (int i = 0; i < kWidth; ++i) {
    acc[i] = warp_sum(acc[i], kLanes, 32);  // over the tokens of a warp
    if (threadIdx.x % 32 < kLanes) sums[threadIdx.x / 32][lane * kWidth + i] = acc[i];
  }
  __syncthreads();
  for (int dim = threadIdx.x; dim < kHeadDim; dim += kThreads) {
    float sum = 0.0f;
    for (int warp = 0; warp < kWarps; ++warp) sum += sums[warp][dim];
    const float result = sum / total;
    if (kPartitioned)
      args.partial[(row * gridDim.z + part) * kHeadDim + dim] = result;
    else
      out[dim] = from_float<T>(result);
  }
  if (kPartitioned && threadIdx.x == 0) {
    args.sums[row * gridDim.z + part] = total;
    args.maxima[row * gridDim.z + part] = highest;
  }
}

// Grid (heads, sequences): the partitions of one head, weighted by their sums.
template <typename T, int kHeadDim>
__global__ void reduce_partitions_kernel(const KvsimPagedArgs args, int stride) {
  const int64_t row = static_cast<int64_t>(blockIdx.y) * args.num_heads + blockIdx.x;
  const int context_len = args.context_lens[blockIdx.y];
  const int used = (context_len + kPartition - 1) / kPartition;
  const float* sums = args.sums + row * stride;
  const float* maxima = args.maxima + row * stride;
  float highest = -FLT_MAX, total = 0.0f;
  for (int part = 0; part < used; ++part) highest = fmaxf(highest, maxima[part]);
  for (int part = 0; part < used; ++part)
    total += sums[part] * __expf(maxima[part] - highest);
  T* out = static_cast<T*>(args.out) + row * kHeadDim;
  for (int dim = threadIdx.x; dim < kHeadDim; dim += kThreads) {
    float sum = 0.0f;
    for (int part = 0; part < used; ++part) {
      const float weight = sums[part] * __expf(maxima[part] - highest);
      sum += weight * args.partial[(row * stride + part) * kHeadDim + dim];
    }
    out[dim] = from_float<T>(used > 0 ? sum / total : 0.0f);
  }
}

// Grid (layers, pairs): keys, then values, in words of type W.
template <typename W>
__global__ void copy_blocks_kernel(void* const* key_caches, void* const* value_caches,
                                   const int64_t* pairs, int64_t page_words) {
  const int layer = blockIdx.x, pair = blockIdx.y;
  const int64_t source = pairs[2 * pair] * page_words;
  const int64_t target = pairs[2 * pair + 1] * page_words;
  W* const keys = static_cast<W*>(key_caches[layer]);
  W* const values = static_cast<W*>(value_caches[layer]);
  for (int64_t i = threadIdx.x; i < page_words; i += blockDim.x)
    keys[target + i] = keys[source + i];
  for (int64_t i = threadIdx.x; i < page_words; i += blockDim.x)
    values[target + i] = values[source + i];
}

#ifndef __CUDACC_RTC__
template <typename W>
int launch_copy_blocks(void* const* keys, void* const* values, int num_layers,
                       const int64_t* pairs, int num_pairs, int64_t page_bytes,
                       cudaStream_t stream) {
  const int64_t words = page_bytes / static_cast<int64_t>(sizeof(W));
  const int threads = static_cast<int>(words < 1024 ? words : 1024);
  copy_blocks_kernel<W><<<dim3(num_layers, num_pairs), threads, 0, stream>>>(
      keys, values, pairs, words);
  return cudaGetLastError();
}

template <typename T, int kHeadDim>
int launch_paged(const KvsimPagedArgs& args, bool partitioned, cudaStream_t stream) {
  if (!partitioned) {
    const size_t bytes = sizeof(float) * static_cast<size_t>(args.max_context_len);
    const auto kernel = paged_attention_kernel<T, kHeadDim, false>;
    const cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    if (error != cudaSuccess) {
      cudaGetLastError();  // or the next launch would report it
      return error;
    }
    kernel<<<dim3(args.num_heads, args.num_seqs, 1), kThreads, bytes, stream>>>(args);
    return cudaGetLastError();
  }
  const int parts = (args.max_context_len + kPartition - 1) / kPartition;
  const dim3 grid(args.num_heads, args.num_seqs, parts > 0 ? parts : 1);
  paged_attention_kernel<T, kHeadDim, true>
      <<<grid, kThreads, sizeof(float) * kPartition, stream>>>(args);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  reduce_partitions_kernel<T, kHeadDim>
      <<<dim3(args.num_heads, args.num_seqs), kThreads, 0, stream>>>(args, grid.z);
  return cudaGetLastError();
}

template <typename T>
int launch_paged(const KvsimPagedArgs& args, bool partitioned, cudaStream_t stream) {
  switch (args.head_dim) {
    case 64: return launch_paged<T, 64>(args, partitioned, stream);
    case 128: return launch_paged<T, 128>(args, partitioned, stream);
    case 256: return launch_paged<T, 256>(args, partitioned, stream);
    default: return cudaErrorInvalidValue;
  }
}

#endif  // __CUDACC_RTC__
}  // namespace KVSIM_LOCAL

#ifndef __CUDACC_RTC__
extern "C" {

const char* kvsim_error_name(int error) {
  return cudaGetErrorName(static_cast<cudaError_t>(error));
}

const char* kvsim_error_string(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

int kvsim_runtime_version() { return CUDART_VERSION; }

int kvsim_driver_version(int* version) { return cudaDriverGetVersion(version); }

int kvsim_device_count(int* count) { return cudaGetDeviceCount(count); }

// One cudaMemcpyAsync a block and plane, plane after plane: keys then values of each
// layer. Planes and pairs lie on the host; to_device says the direction.
int kvsim_swap_blocks_loop(char* const* sources, char* const* targets, int num_planes,
                           const int64_t* pairs, int num_pairs, int64_t page_bytes,
                           int to_device, void* stream) {
  const cudaMemcpyKind kind = to_device ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
  for (int plane = 0; plane < num_planes; ++plane)
    for (int pair = 0; pair < num_pairs; ++pair) {
      const cudaError_t error = cudaMemcpyAsync(
          targets[plane] + pairs[2 * pair + 1] * page_bytes,
          sources[plane] + pairs[2 * pair] * page_bytes, page_bytes, kind,
          static_cast<cudaStream_t>(stream));
      if (error != cudaSuccess) return error;
    }
  return cudaSuccess;
}

int kvsim_has_batch_copy() { return CUDART_VERSION >= 12080; }

// All copies in one call. The stream must not be the legacy default stream (null). A
// driver older than CUDA 12.8 answers cudaErrorCallRequiresNewerDriver or
// cudaErrorNotSupported; a toolkit older than that, cudaErrorNotSupported.
int kvsim_copy_batch(void** targets, void** sources, size_t* sizes, size_t count,
                     void* stream) {
#if CUDART_VERSION >= 12080
  if (count == 0) return cudaSuccess;
  cudaMemcpyAttributes attributes = {};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  size_t first = 0;
#if CUDART_VERSION >= 13000
  return cudaMemcpyBatchAsync(const_cast<const void**>(targets),
                              const_cast<const void**>(sources), sizes, count,
                              &attributes, &first, 1, static_cast<cudaStream_t>(stream));
#else
  size_t failed = 0;
  return cudaMemcpyBatchAsync(targets, sources, sizes, count, &attributes, &first, 1,
                              &failed, static_cast<cudaStream_t>(stream));
#endif
#else
  return cudaErrorNotSupported;
#endif
}

// Copies pairs of blocks in all layers, in one launch. Pointer tables and pairs lie on
// the device; word_bytes is the width of an access: the first generation moved elements.
int kvsim_copy_blocks(void* const* key_caches, void* const* value_caches, int num_layers,
                      const int64_t* pairs, int num_pairs, int64_t page_bytes,
                      int word_bytes, void* stream) {
  if (num_layers == 0 || num_pairs == 0) return cudaSuccess;
  if (word_bytes <= 0 || page_bytes % word_bytes != 0) return cudaErrorInvalidValue;
  const auto at = static_cast<cudaStream_t>(stream);
  switch (word_bytes) {
    case 1:
      return launch_copy_blocks<uint8_t>(key_caches, value_caches, num_layers, pairs,
                                         num_pairs, page_bytes, at);
    case 2:
      return launch_copy_blocks<uint16_t>(key_caches, value_caches, num_layers, pairs,
                                          num_pairs, page_bytes, at);
    case 4:
      return launch_copy_blocks<uint32_t>(key_caches, value_caches, num_layers, pairs,
                                          num_pairs, page_bytes, at);
    case 16:
      return launch_copy_blocks<uint4>(key_caches, value_caches, num_layers, pairs,
                                       num_pairs, page_bytes, at);
    default: return cudaErrorInvalidValue;
  }
}

// version 1: grid (heads, sequences); 2: partitions of 512 tokens and a reduction.
int kvsim_paged_attention(const KvsimPagedArgs* args, int version, void* stream) {
  if (version != 1 && version != 2) return cudaErrorInvalidValue;
  if (args->num_seqs == 0) return cudaSuccess;
  const auto at = static_cast<cudaStream_t>(stream);
  if (args->dtype == 0) return launch_paged<__half>(*args, version == 2, at);
  if (args->dtype == 1) return launch_paged<__nv_bfloat16>(*args, version == 2, at);
  return cudaErrorInvalidValue;
}

}  // extern "C"
#endif  // __CUDACC_RTC__
