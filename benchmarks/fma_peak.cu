// The ceiling of float32 arithmetic: dependent-free fused multiply-adds from registers, nothing else.
//
// Work split: as many 256-thread blocks as the device holds at two an SM, each thread with 64 independent accumulators,
// so that the four-cycle latency of an FFMA is covered many times over. Inputs come from memory and the sum goes back,
// so nothing can be folded away. Flops: blocks * 256 * iterations * 64 * 2.

#include <cuda_runtime.h>

namespace {

constexpr int kThreads = 256;
constexpr int kAccumulators = 64;

__global__ void __launch_bounds__(kThreads, 2) fma_peak_kernel(float* values, int iterations) {
  float acc[kAccumulators];
  const float a = values[threadIdx.x];
  const float b = values[kThreads + threadIdx.x];
#pragma unroll
  for (int i = 0; i < kAccumulators; ++i) acc[i] = a * static_cast<float>(i);
  for (int iteration = 0; iteration < iterations; ++iteration) {
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) acc[i] = fmaf(acc[i], a, b);
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kAccumulators; ++i) sum += acc[i];
  if (sum == 12345.0f) values[blockIdx.x] = sum;
}

}  // namespace

// values: float32 [512] on the device. Returns the flops launched, or -1 when the launch failed.
extern "C" __attribute__((visibility("default"))) double kdtree_benchmark_fma_peak(float* values, int iterations,
                                                                                   void* stream) {
  int device = 0;
  int multiprocessors = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return -1.0;
  if (cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return -1.0;
  const int blocks = 2 * multiprocessors;
  fma_peak_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(values, iterations);
  if (cudaGetLastError() != cudaSuccess) return -1.0;
  return 2.0 * blocks * kThreads * static_cast<double>(iterations) * kAccumulators;
}
