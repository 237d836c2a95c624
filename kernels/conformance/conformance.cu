#include "conformance/conformance.h"

namespace kdtree::conformance {
namespace {

constexpr uint32_t kFullMask = 0xffffffff;

// a [32, 6]: the four registers of A and the two of B, by lane; b [32, 4]: C; out [32, 4]: C + A B.
__global__ void mma(const uint32_t* a, const uint32_t* b, uint32_t* out, int) {
  const int lane = threadIdx.x;
  uint32_t fragment_a[4], fragment_b[2];
  float d[4];
  for (int i = 0; i < 4; ++i) fragment_a[i] = a[lane * 6 + i];
  for (int i = 0; i < 2; ++i) fragment_b[i] = a[lane * 6 + 4 + i];
  for (int i = 0; i < 4; ++i) d[i] = __uint_as_float(b[lane * 4 + i]);
  mma_m16n8k16_bf16(d, fragment_a, fragment_b);
  for (int i = 0; i < 4; ++i) out[lane * 4 + i] = __float_as_uint(d[i]);
}

struct Rows {
  uint32_t words[32][4];
};

enum class Load { kX4, kX4Trans, kX2 };

// a [32, 8] of 16 bits: rows; b [32]: the row that each lane passes; out [32, registers].
template <Load kLoad>
__global__ void ldmatrix(const uint32_t* a, const uint32_t* b, uint32_t* out, int) {
  KDTREE_DYNAMIC_SHARED(Rows, shared);
  const int lane = threadIdx.x;
  for (int i = 0; i < 4; ++i) shared.words[lane][i] = a[lane * 4 + i];
  __syncwarp();
  const void* row = shared.words[b[lane]];
  if constexpr (kLoad == Load::kX2) {
    uint32_t r[2];
    ldmatrix_x2(r, row);
    for (int i = 0; i < 2; ++i) out[lane * 2 + i] = r[i];
  } else {
    uint32_t r[4];
    if constexpr (kLoad == Load::kX4) {
      ldmatrix_x4(r, row);
    } else {
      ldmatrix_x4_trans(r, row);
    }
    for (int i = 0; i < 4; ++i) out[lane * 4 + i] = r[i];
  }
}

// a [32]: values; b [32]: source lanes, lane masks or distances; out [4, 32]: idx, xor, up, down; n: width.
__global__ void shuffles(const uint32_t* a, const uint32_t* b, uint32_t* out, int n) {
  const int lane = threadIdx.x;
  const int operand = static_cast<int>(b[lane]);
  out[lane] = __shfl_sync(kFullMask, a[lane], operand, n);
  out[32 + lane] = __shfl_xor_sync(kFullMask, a[lane], operand, n);
  out[64 + lane] = __shfl_up_sync(kFullMask, a[lane], b[lane], n);
  out[96 + lane] = __shfl_down_sync(kFullMask, a[lane], b[lane], n);
}

// a [32]: predicates; out [4, 32]: ballot, any, all, and a ballot of each half of the warp on its own.
__global__ void votes(const uint32_t* a, const uint32_t*, uint32_t* out, int) {
  const int lane = threadIdx.x;
  out[lane] = __ballot_sync(kFullMask, a[lane]);
  out[32 + lane] = __any_sync(kFullMask, a[lane]);
  out[64 + lane] = __all_sync(kFullMask, a[lane]);
  if (lane < 16) {
    out[96 + lane] = __ballot_sync(0x0000ffffu, a[lane]);
  } else {
    out[96 + lane] = __ballot_sync(0xffff0000u, a[lane]);
  }
}

// a [32] float32; out [10, 32] float32: sums over 2, 4, 8, 16, 32 lanes, then maxima.
__global__ void reductions(const uint32_t* a, const uint32_t*, uint32_t* out, int) {
  const int lane = threadIdx.x;
  const float value = __uint_as_float(a[lane]);
  const float results[] = {lanes_sum<2>(value),  lanes_sum<4>(value), lanes_sum<8>(value), lanes_sum<16>(value),
                           warp_sum(value),      lanes_max<2>(value), lanes_max<4>(value), lanes_max<8>(value),
                           lanes_max<16>(value), warp_max(value)};
  for (int i = 0; i < 10; ++i) out[i * 32 + lane] = __float_as_uint(results[i]);
}

struct Copies {
  uint32_t wide[32][4];
  uint32_t filled[32][4];
  uint32_t narrow[32];
};

// a [32, 4]: source; b [32]: 1 where cp_async_16_zfill may read; out [32, 9]: by lane the row of the mirrored lane
// copied by cp_async_16, by cp_async_16_zfill, and its first word copied by cp_async_4.
__global__ void copies(const uint32_t* a, const uint32_t* b, uint32_t* out, int) {
  KDTREE_DYNAMIC_SHARED(Copies, shared);
  const int lane = threadIdx.x;
  const int mirrored = 31 - lane;
  cp_async_16(shared.wide[lane], a + lane * 4);
  cp_async_16_zfill(shared.filled[lane], a + lane * 4, b[lane] != 0);
  cp_async_4(&shared.narrow[lane], a + lane * 4);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  for (int i = 0; i < 4; ++i) {
    out[lane * 9 + i] = shared.wide[mirrored][i];
    out[lane * 9 + 4 + i] = shared.filled[mirrored][i];
  }
  out[lane * 9 + 8] = shared.narrow[mirrored];
}

struct Groups {
  uint32_t words[4][32];
};

// a [4, 32]; out [4, 32]: four groups of copies, read one after the other while the later ones are in flight.
__global__ void copy_groups(const uint32_t* a, const uint32_t*, uint32_t* out, int) {
  KDTREE_DYNAMIC_SHARED(Groups, shared);
  const int lane = threadIdx.x;
  for (int group = 0; group < 4; ++group) {
    cp_async_4(&shared.words[group][lane], a + group * 32 + lane);
    cp_async_commit();
  }
  cp_async_wait<3>();
  out[lane] = shared.words[0][lane];
  cp_async_wait<2>();
  out[32 + lane] = shared.words[1][lane];
  cp_async_wait<0>();
  out[64 + lane] = shared.words[2][lane];
  out[96 + lane] = shared.words[3][lane];
}

struct Exchange {
  uint32_t words[128];
};

// a [128]; b [128]: predicates; out [2, 128]: the mirrored thread's value, and __syncthreads_or.
__global__ void block_barriers(const uint32_t* a, const uint32_t* b, uint32_t* out, int) {
  KDTREE_DYNAMIC_SHARED(Exchange, shared);
  const int thread = threadIdx.x;
  shared.words[thread] = a[thread];
  __syncthreads();
  out[thread] = shared.words[127 - thread];
  out[128 + thread] = __syncthreads_or(static_cast<int>(b[thread])) != 0;
}

// a [128]; b [128]: round in which a thread votes; n: rounds; out [128, 1 + n]. Warps 0 and 1 are one group, warps 2
// and 3 the other; each round a thread takes its neighbour's value within the group.
__global__ void group_barriers(const uint32_t* a, const uint32_t* b, uint32_t* out, int n) {
  KDTREE_DYNAMIC_SHARED(Exchange, shared);
  const int thread = threadIdx.x;
  const int group = thread / 64;
  const int neighbour = group * 64 + (thread + 1) % 64;
  uint32_t value = a[thread];
  for (int round = 0; round < n; ++round) {
    shared.words[thread] = value;
    group_sync(1 + group, 64);
    value = shared.words[neighbour];
    out[thread * (n + 1) + 1 + round] = group_sync_or(1 + group, 64, b[thread] == static_cast<uint32_t>(round));
  }
  out[thread * (n + 1)] = value;
}

// a [n] float32; out [3, n]: float_to_bf16, bf16_to_float of it, and pack_bf16x2 of an element and its successor.
__global__ void bf16(const uint32_t* a, const uint32_t*, uint32_t* out, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    const float value = __uint_as_float(a[i]);
    out[i] = float_to_bf16(value);
    out[n + i] = __float_as_uint(bf16_to_float(float_to_bf16(value)));
    out[2 * n + i] = pack_bf16x2(value, __uint_as_float(a[(i + 1) % n]));
  }
}

constexpr Case kCases[] = {
    {"mma", mma, 32, 0},
    {"ldmatrix_x4", ldmatrix<Load::kX4>, 32, sizeof(Rows)},
    {"ldmatrix_x4_trans", ldmatrix<Load::kX4Trans>, 32, sizeof(Rows)},
    {"ldmatrix_x2", ldmatrix<Load::kX2>, 32, sizeof(Rows)},
    {"shuffles", shuffles, 32, 0},
    {"votes", votes, 32, 0},
    {"reductions", reductions, 32, 0},
    {"copies", copies, 32, sizeof(Copies)},
    {"copy_groups", copy_groups, 32, sizeof(Groups)},
    {"block_barriers", block_barriers, 128, sizeof(Exchange)},
    {"group_barriers", group_barriers, 128, sizeof(Exchange)},
    {"bf16", bf16, 128, 0},
};

}  // namespace
}  // namespace kdtree::conformance

// 0, or nonzero with the reason in kdtree_conformance_error(); -1: there is no such case.
KDTREE_CONFORMANCE_API int kdtree_conformance(const char* name, const uint32_t* a, const uint32_t* b, uint32_t* out,
                                              int n, void* stream) {
  return kdtree::conformance::run(kdtree::conformance::kCases, name, a, b, out, n, stream);
}

KDTREE_CONFORMANCE_API const char* kdtree_conformance_error() { return kdtree::launch_error(); }
