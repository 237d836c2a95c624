// The host half of common/intrinsics.cuh: CUDA's names and ours, run by fibers on the CPU (simt.cpp).
//
// Environment, read at every launch:
//   KDTREE_SIMT_ORDER    forward (default), reverse or random:SEED: the order in which threads, warps and blocks run
//   KDTREE_SIMT_ASYNC    lazy (default): cp.async lands at the wait; eager: it lands at once
//   KDTREE_SIMT_THREADS  operating system threads that run blocks; default: one a core
//
// What CUDA leaves undefined is an error here wherever it can be seen: launch() then fails and launch_error() says
// which kernel, block, thread and source line.
#ifndef KDTREE_HOST_SIMT_H_
#define KDTREE_HOST_SIMT_H_

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <source_location>
#include <tuple>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ __inline__ __attribute__((always_inline))
#define __launch_bounds__(...)
// __shared__ stays undefined: static shared memory could be neither poisoned nor watched, so it does not compile.

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct int3 {
  int x, y, z;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct uint3 {
  unsigned x, y, z;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <class T>
constexpr T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
constexpr T max(T a, T b) {
  return a < b ? b : a;
}

namespace kdtree::simt {

using Site = std::source_location;  // where a kernel calls an intrinsic

struct Indices {
  uint3 thread, block;
  dim3 block_dim, grid_dim;
};

// A library that is loaded late may use the fast model for a few bytes of thread-local storage; glibc reserves them.
// Tests that load a dozen libraries into one process would exhaust that reserve and define KDTREE_SIMT_MANY_LIBRARIES.
#if defined(__GLIBC__) && !defined(KDTREE_SIMT_MANY_LIBRARIES)
#define KDTREE_SIMT_THREAD_LOCAL thread_local __attribute__((tls_model("initial-exec")))
#else
#define KDTREE_SIMT_THREAD_LOCAL thread_local
#endif

extern constinit KDTREE_SIMT_THREAD_LOCAL const Indices* indices;  // of the CUDA thread that runs now

void* dynamic_shared(size_t type_bytes, Site at);

enum class Shuffle { kIndex, kXor, kUp, kDown };
uint64_t shuffle(Shuffle kind, uint32_t mask, uint64_t bits, int operand, int width, Site at);
uint32_t ballot(uint32_t mask, bool predicate, Site at);
void warp_barrier(Site at);
bool block_barrier(const char* name, bool predicate, Site at);
float lanes_reduce(bool sum, int width, float value, Site at);

struct Launch {
  const void* kernel;
  dim3 grid, block;
  size_t shared_bytes;
  void (*call)(const void* state);  // runs the kernel once, as the current thread
  const void* state;
};
int run(const Launch& launch);

template <class T>
T shuffle(Shuffle kind, uint32_t mask, T value, int operand, int width, Site at) {
  static_assert(std::is_trivially_copyable_v<T> && (sizeof(T) == 4 || sizeof(T) == 8), "shuffles move 4 or 8 bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = shuffle(kind, mask, bits, operand, width, at);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace kdtree::simt

#define threadIdx (::kdtree::simt::indices->thread)
#define blockIdx (::kdtree::simt::indices->block)
#define blockDim (::kdtree::simt::indices->block_dim)
#define gridDim (::kdtree::simt::indices->grid_dim)

inline void __syncthreads(kdtree::simt::Site at = kdtree::simt::Site::current()) {
  kdtree::simt::block_barrier("__syncthreads", false, at);
}
inline int __syncthreads_or(int predicate, kdtree::simt::Site at = kdtree::simt::Site::current()) {
  return kdtree::simt::block_barrier("__syncthreads_or", predicate != 0, at);
}
inline void __syncwarp(kdtree::simt::Site at = kdtree::simt::Site::current()) { kdtree::simt::warp_barrier(at); }

template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32, kdtree::simt::Site at = kdtree::simt::Site::current()) {
  return kdtree::simt::shuffle(kdtree::simt::Shuffle::kIndex, mask, value, lane, width, at);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32,
                  kdtree::simt::Site at = kdtree::simt::Site::current()) {
  return kdtree::simt::shuffle(kdtree::simt::Shuffle::kXor, mask, value, lane_mask, width, at);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                 kdtree::simt::Site at = kdtree::simt::Site::current()) {
  return kdtree::simt::shuffle(kdtree::simt::Shuffle::kUp, mask, value, static_cast<int>(delta), width, at);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                   kdtree::simt::Site at = kdtree::simt::Site::current()) {
  return kdtree::simt::shuffle(kdtree::simt::Shuffle::kDown, mask, value, static_cast<int>(delta), width, at);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, kdtree::simt::Site at = kdtree::simt::Site::current()) {
  return kdtree::simt::ballot(mask, predicate != 0, at);
}
inline int __any_sync(unsigned mask, int predicate, kdtree::simt::Site at = kdtree::simt::Site::current()) {
  return kdtree::simt::ballot(mask, predicate != 0, at) != 0;
}
inline int __all_sync(unsigned mask, int predicate, kdtree::simt::Site at = kdtree::simt::Site::current()) {
  return kdtree::simt::ballot(mask, predicate == 0, at) == 0;
}

template <class T>
T __ldg(const T* pointer) {
  return *pointer;
}
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline int __float_as_int(float value) { return std::bit_cast<int>(value); }
inline double __longlong_as_double(long long bits) { return std::bit_cast<double>(bits); }
inline long long __double_as_longlong(double value) { return std::bit_cast<long long>(value); }
inline int __popc(unsigned bits) { return std::popcount(bits); }
inline int __popcll(unsigned long long bits) { return std::popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }

#define KDTREE_DYNAMIC_SHARED(Type, name)                                                 \
  static_assert(alignof(Type) <= 1024, "dynamic shared memory is aligned to 1024 bytes"); \
  Type& name = *static_cast<Type*>(::kdtree::simt::dynamic_shared(sizeof(Type), ::kdtree::simt::Site::current()))

namespace kdtree {

inline int thread_index() { return static_cast<int>(threadIdx.x); }

template <class T>
T settled(T value) {
  return value;
}

using SharedAddress = uintptr_t;
inline SharedAddress shared_address(const void* smem) { return reinterpret_cast<SharedAddress>(smem); }
template <class T>
T* shared_pointer(SharedAddress address) {
  return reinterpret_cast<T*>(address);
}

void cp_async_16(void* smem, const void* gmem, simt::Site at = simt::Site::current());
void cp_async_16_zfill(void* smem, const void* gmem, bool valid, simt::Site at = simt::Site::current());
void cp_async_4(void* smem, const void* gmem, simt::Site at = simt::Site::current());
void cp_async_commit();

namespace simt {
void cp_async_wait(int groups_in_flight);
}
template <int N>
void cp_async_wait() {
  static_assert(N >= 0, "a number of groups");
  simt::cp_async_wait(N);
}

void ldmatrix_x4(uint32_t (&r)[4], const void* row, simt::Site at = simt::Site::current());
void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row, simt::Site at = simt::Site::current());
void ldmatrix_x2(uint32_t (&r)[2], const void* row, simt::Site at = simt::Site::current());
void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                       simt::Site at = simt::Site::current());

void group_sync(int id, int count, simt::Site at = simt::Site::current());
bool group_sync_or(int id, int count, bool p, simt::Site at = simt::Site::current());

template <int Width>
float lanes_sum(float value, simt::Site at = simt::Site::current()) {
  static_assert(Width == 2 || Width == 4 || Width == 8 || Width == 16 || Width == 32, "a power of two");
  return simt::lanes_reduce(true, Width, value, at);
}
template <int Width>
float lanes_max(float value, simt::Site at = simt::Site::current()) {
  static_assert(Width == 2 || Width == 4 || Width == 8 || Width == 16 || Width == 32, "a power of two");
  return simt::lanes_reduce(false, Width, value, at);
}
inline float warp_sum(float value, simt::Site at = simt::Site::current()) { return lanes_sum<32>(value, at); }
inline float warp_max(float value, simt::Site at = simt::Site::current()) { return lanes_max<32>(value, at); }

template <class T, class Combine>
T warp_reduce(T value, Combine combine, simt::Site at) {
  for (int offset = 16; offset > 0; offset /= 2) {
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, offset, 32, at));
  }
  return value;
}
inline int warp_sum(int value, simt::Site at = simt::Site::current()) {
  return warp_reduce(value, [](int a, int b) { return a + b; }, at);
}
inline int warp_max(int value, simt::Site at = simt::Site::current()) {
  return warp_reduce(value, [](int a, int b) { return max(a, b); }, at);
}
inline uint32_t warp_max(uint32_t value, simt::Site at = simt::Site::current()) {
  return warp_reduce(value, [](uint32_t a, uint32_t b) { return max(a, b); }, at);
}
inline uint32_t warp_min(uint32_t value, simt::Site at = simt::Site::current()) {
  return warp_reduce(value, [](uint32_t a, uint32_t b) { return min(a, b); }, at);
}

inline float bf16_to_float(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline uint32_t pack_bf16x2(float lo, float hi) {
  return float_to_bf16(lo) | static_cast<uint32_t>(float_to_bf16(hi)) << 16;
}

inline uint16_t float_to_f16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const float size = std::fabs(value);
  if (!(size <= INFINITY)) return 0x7fff;
  if (size >= 65520.0f) return sign | 0x7c00u;  // rounds to infinity
  if (size < 0x1p-14f) {
    // Adding 0.5 leaves a mantissa whose last bit is 2^-24, as that of a number below the normal range.
    return sign | static_cast<uint16_t>(std::bit_cast<uint32_t>(size + 0.5f) - std::bit_cast<uint32_t>(0.5f));
  }
  const uint32_t rebased = (bits & 0x7fffffffu) - (112u << 23);
  return sign | static_cast<uint16_t>((rebased + 0xfffu + (rebased >> 13 & 1u)) >> 13);
}

inline float f16_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t size = bits & 0x7fffu;
  if (size < 0x400u)
    return std::copysign(static_cast<float>(size) * 0x1p-24f, std::bit_cast<float>(sign | 0x3f800000u));
  return std::bit_cast<float>(sign | ((size << 13) + (size < 0x7c00u ? 112u << 23 : 224u << 23)));
}

inline uint32_t pack_f16x2(float lo, float hi) {
  return float_to_f16(lo) | static_cast<uint32_t>(float_to_f16(hi)) << 16;
}

inline float2 unpack_f16x2(uint32_t packed) {
  return {f16_to_float(static_cast<uint16_t>(packed)), f16_to_float(static_cast<uint16_t>(packed >> 16))};
}

inline float max_nan(float a, float b) { return a != a || b != b ? NAN : max(a, b); }

inline float exp2_approx(float value) {
  const float power = std::exp2(value);
  return power < 0x1p-126f ? 0.0f : power;
}

inline float divide_approx(float a, float b) { return a / b; }

// Kernels run one after the other here.
inline void allow_successor() {}
inline void await_predecessor() {}

constexpr int kSharedLimit = 101376;  // bytes a block may have on sm_120, the smallest target

inline int multiprocessor_count() { return 4; }
inline int max_shared_bytes() { return kSharedLimit; }
inline const char* pointer_problem(const void*) { return nullptr; }
const char* launch_error();

template <class... Params, class... Args>
int launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, void* /*stream*/, Args... args) {
  static_assert(sizeof...(Params) == sizeof...(Args), "one argument for each kernel parameter");
  struct State {
    void (*kernel)(Params...);
    std::tuple<Params...> params;
  };
  const State state{kernel, std::tuple<Params...>(static_cast<Params>(args)...)};
  const auto call = [](const void* opaque) {
    const auto& [kernel, params] = *static_cast<const State*>(opaque);
    std::apply(kernel, params);
  };
  return simt::run({reinterpret_cast<const void*>(kernel), grid, block, shared_bytes, call, &state});
}

template <class... Params, class... Args>
int launch_after(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, void* stream, Args... args) {
  return launch(kernel, grid, block, shared_bytes, stream, args...);
}

}  // namespace kdtree

#endif  // KDTREE_HOST_SIMT_H_
