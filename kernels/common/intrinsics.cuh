// The vocabulary of the kernels, and the only file in which the two builds differ: under nvcc it wraps PTX, elsewhere
// it is the host runtime's. A kernel file includes this header and no CUDA header. What a kernel may use is what is
// declared here and in host/simt.h; inline PTX, static __shared__ and <<<>>> are left out on purpose, they would not
// run on a CPU.
//
// Addresses named smem lie in the block's dynamic shared memory, gmem in global memory. Everything but the copies, the
// bf16 conversions and KDTREE_DYNAMIC_SHARED is collective: all 32 lanes of a warp call it together.
#ifndef KDTREE_COMMON_INTRINSICS_CUH_
#define KDTREE_COMMON_INTRINSICS_CUH_

#ifndef __CUDACC__

#define KDTREE_HOST_BUILD 1
#include "host/simt.h"

#else

#define KDTREE_HOST_BUILD 0

#include <cuda_runtime.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <tuple>
#include <utility>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "kdtree kernels need cp.async and bf16 mma.sync: compile for sm_80 or newer"
#endif

// Type& name on the block's dynamic shared memory, 1024-byte aligned: the only shared memory a kernel has.
#define KDTREE_DYNAMIC_SHARED(Type, name)                                                 \
  extern __shared__ __align__(1024) unsigned char kdtree_dynamic_shared[];                \
  static_assert(alignof(Type) <= 1024, "dynamic shared memory is aligned to 1024 bytes"); \
  Type& name = *reinterpret_cast<Type*>(kdtree_dynamic_shared)

namespace kdtree {

static_assert(sizeof(void*) == 8, "addresses are 64-bit");

// threadIdx.x read anew: what is worked out from it stays where it is used, so that a rare path does not hold registers
// of a frequent one.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  __builtin_assume(index >= 0 && index < 1024);
  return index;
}

// The value itself, but the compiler may not look through it: what is added to a pointer later stays an offset, and
// what is worked out from a counter stays in its loop.
template <class T>
__device__ __forceinline__ T* settled(T* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

__device__ __forceinline__ int settled(int counter) {
  asm volatile("" : "+r"(counter));
  return counter;
}

// Addresses of shared memory as numbers, for what pointers cannot do: flip a bit.
using SharedAddress = uint32_t;

__device__ __forceinline__ SharedAddress shared_address(const void* smem) {
  return static_cast<SharedAddress>(__cvta_generic_to_shared(smem));
}

template <class T>
__device__ __forceinline__ T* shared_pointer(SharedAddress address) {
  return static_cast<T*>(__cvta_shared_to_generic(address));
}

// Asynchronous copies to shared memory; the issuing thread sees the bytes after cp_async_wait, others after a barrier
// that follows it.
__device__ __forceinline__ void cp_async_16(void* smem, const void* gmem) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(smem)), "l"(gmem) : "memory");
}

// Writes 16 zero bytes and reads nothing when !valid.
__device__ __forceinline__ void cp_async_16_zfill(void* smem, const void* gmem, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(smem)), "l"(gmem),
               "r"(valid ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void cp_async_4(void* smem, const void* gmem) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(smem)), "l"(gmem) : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Returns when at most the N most recently committed groups of this thread are still in flight.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
  static_assert(N >= 0, "a number of groups");
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// 8x8 matrices of 16-bit elements; lane l passes row l % 8 of matrix l / 8, 16-byte aligned. Lane l receives elements
// (l / 4, 2 * (l % 4) + {0, 1}) of each matrix, or of its transpose.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// The rows of lanes 0 to 15 count.
__device__ __forceinline__ void ldmatrix_x2(uint32_t (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(row))
               : "memory");
}

// d += a * b with a [16, 16], b [16, 8], d [16, 8]; float32 accumulation.
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Barrier `id` (1 to 15; 0 is __syncthreads) among `count` threads, whole warps. It orders their memory accesses.
__device__ __forceinline__ void group_sync(int id, int count) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory");
}

// The same barrier; true for all when p is true for any.
__device__ __forceinline__ bool group_sync_or(int id, int count, bool p) {
  uint32_t any;
  asm volatile(
      "{\n"
      "  .reg .pred mine, all;\n"
      "  setp.ne.u32 mine, %3, 0;\n"
      "  bar.red.or.pred all, %1, %2, mine;\n"
      "  selp.u32 %0, 1, 0, all;\n"
      "}"
      : "=r"(any)
      : "r"(id), "r"(count), "r"(static_cast<uint32_t>(p))
      : "memory");
  return any != 0;
}

// Reductions over aligned groups of Width lanes, result in every lane. Both builds add in this order.
template <int Width>
__device__ __forceinline__ float lanes_sum(float value) {
  static_assert(Width == 2 || Width == 4 || Width == 8 || Width == 16 || Width == 32, "a power of two");
#pragma unroll
  for (int offset = Width / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

template <int Width>
__device__ __forceinline__ float lanes_max(float value) {
  static_assert(Width == 2 || Width == 4 || Width == 8 || Width == 16 || Width == 32, "a power of two");
#pragma unroll
  for (int offset = Width / 2; offset > 0; offset /= 2)
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
}

__device__ __forceinline__ float warp_sum(float value) { return lanes_sum<32>(value); }
__device__ __forceinline__ float warp_max(float value) { return lanes_max<32>(value); }

// Of whole numbers, over the warp.
__device__ __forceinline__ int warp_sum(int value) { return __reduce_add_sync(0xffffffffu, value); }
__device__ __forceinline__ int warp_max(int value) { return __reduce_max_sync(0xffffffffu, value); }
__device__ __forceinline__ uint32_t warp_max(uint32_t value) { return __reduce_max_sync(0xffffffffu, value); }
__device__ __forceinline__ uint32_t warp_min(uint32_t value) { return __reduce_min_sync(0xffffffffu, value); }

// bf16 is a uint16_t. Conversions round to nearest even; a NaN becomes 0x7fff.
__device__ __forceinline__ uint32_t pack_bf16x2(float lo, float hi) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
  return packed;
}

__device__ __forceinline__ uint16_t float_to_bf16(float value) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

__device__ __forceinline__ float bf16_to_float(uint16_t bits) {
  return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

// Pairs of half precision numbers, rounded to nearest even.
__device__ __forceinline__ uint32_t pack_f16x2(float lo, float hi) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
  return packed;
}

__device__ __forceinline__ float2 unpack_f16x2(uint32_t packed) {
  float2 pair;
  asm("{.reg .f16 lo, hi; mov.b32 {lo, hi}, %2; cvt.f32.f16 %0, lo; cvt.f32.f16 %1, hi;}"
      : "=f"(pair.x), "=f"(pair.y)
      : "r"(packed));
  return pair;
}

// The larger; NaN when either is.
__device__ __forceinline__ float max_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

// 2^value to a relative 2^-22; results below the normal range are 0.
__device__ __forceinline__ float exp2_approx(float value) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(value));
  return power;
}

// a / b within two units of the last place, for b in the normal range.
__device__ __forceinline__ float divide_approx(float a, float b) { return __fdividef(a, b); }

// A kernel started by launch_after() may begin before its predecessor in the stream is done: the predecessor lets it
// by allow_successor(), and it reads nothing of the predecessor's before await_predecessor(). Before sm_90 both are
// void and the kernels follow each other.
__device__ __forceinline__ void allow_successor() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void await_predecessor() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

inline thread_local char launch_error_text[256] = "";

// The last failed launch of this thread as one line; never null.
inline const char* launch_error() { return launch_error_text; }

// An attribute of the current device; 0 when there is no usable device.
inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  if (cudaGetDevice(&device) != cudaSuccess || cudaDeviceGetAttribute(&value, attribute, device) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return value;
}

inline int multiprocessor_count() { return device_attribute(cudaDevAttrMultiProcessorCount); }
inline int max_shared_bytes() { return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }

// Null when a kernel on the current device may read `pointer`, else what is wrong with it.
inline const char* pointer_problem(const void* pointer) {
  cudaPointerAttributes attributes;
  if (cudaPointerGetAttributes(&attributes, pointer) != cudaSuccess) {
    cudaGetLastError();
    return "is not known to CUDA";
  }
  if (attributes.type == cudaMemoryTypeUnregistered) return "is host memory";
  if (attributes.devicePointer == nullptr) return "is host memory that is not mapped to the device";
  int device = 0;
  if (attributes.type == cudaMemoryTypeDevice && cudaGetDevice(&device) == cudaSuccess && attributes.device != device) {
    return "is on another device than the current one";
  }
  return nullptr;
}

// Starts `kernel` with programmatic or plain stream order. 0, or nonzero with the reason in launch_error().
template <class... Params, class... Args>
int start(bool overlapping, void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, void* stream,
          Args... args) {
  static_assert(sizeof...(Params) == sizeof...(Args), "one argument for each kernel parameter");
  constexpr size_t kDefaultSharedLimit = 48 * 1024;  // above it a kernel has to ask
  const auto failed = [](const char* call, cudaError_t error) {
    cudaGetLastError();  // not left behind for the caller's next CUDA call
    std::snprintf(launch_error_text, sizeof launch_error_text, "%s: %s", call, cudaGetErrorString(error));
    return static_cast<int>(error);
  };
  if (shared_bytes > kDefaultSharedLimit) {
    const int limit = max_shared_bytes();
    if (shared_bytes > static_cast<size_t>(limit)) {
      std::snprintf(launch_error_text, sizeof launch_error_text,
                    "the kernel needs %zu bytes of shared memory, the device offers %d", shared_bytes, limit);
      return static_cast<int>(cudaErrorInvalidValue);
    }
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (error != cudaSuccess) return failed("cudaFuncSetAttribute", error);
  }
  cudaLaunchAttribute order = {};
  order.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  order.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &order;
  config.numAttrs = overlapping && device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9 ? 1 : 0;
  std::tuple<Params...> params(static_cast<Params>(args)...);
  const cudaError_t error = std::apply(
      [&](auto&... param) {
        void* pointers[] = {static_cast<void*>(&param)..., nullptr};
        return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), pointers);
      },
      params);
  if (error != cudaSuccess) return failed("cudaLaunchKernelExC", error);
  const cudaError_t last = cudaGetLastError();
  return last == cudaSuccess ? 0 : failed("cudaGetLastError", last);
}

// Runs kernel(args...) on grid x block threads, after everything before it in the stream.
template <class... Params, class... Args>
int launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, void* stream, Args... args) {
  return start(false, kernel, grid, block, shared_bytes, stream, args...);
}

// The same, but the kernel may begin when its predecessor allows it; it waits with await_predecessor().
template <class... Params, class... Args>
int launch_after(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, void* stream, Args... args) {
  return start(true, kernel, grid, block, shared_bytes, stream, args...);
}

}  // namespace kdtree

#endif  // __CUDACC__

#endif  // KDTREE_COMMON_INTRINSICS_CUH_
