// merge_partials: results of attention over disjoint sets of keys become the result over all of them.
//
//   M = max_p lse_p,  w_p = exp(lse_p - M),  out = sum_p w_p out_p / sum_p w_p,  lse = M + log sum_p w_p
//
// Work split: a warp a row, eight rows a block, rows in strides of the grid. A lane has eight columns in every 256,
// which it reads sixteen bytes at a time. The parts are added in order, in float32.
//
// Assumes: 16-byte aligned outs and out (checked by the C interface), so that every row is too. A part with lse = -inf
// has seen nothing: it is not read, since it may hold anything.
//
// A row's bits depend on its own parts alone. It is bound by memory; nothing else was tried.

#include "merge_partials/merge_partials.cuh"

namespace kdtree {
namespace {

constexpr int kWarps = 8;
constexpr int64_t kMostBlocks = 8192;

// Eight numbers from element `from` on.
template <bool kFloat32>
__device__ __forceinline__ void load_eight(const void* data, int64_t from, float (&v)[8]) {
  if constexpr (kFloat32) {
    const auto* const fours = reinterpret_cast<const float4*>(static_cast<const float*>(data) + from);
    const float4 low = fours[0];
    const float4 high = fours[1];
    v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
    v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
  } else {
    const uint4 pairs = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(data) + from);
    const uint32_t words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[2 * i] = __uint_as_float(words[i] << 16);
      v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
}

template <bool kFloat32>
__device__ __forceinline__ void store_eight(void* data, int64_t to, const float (&v)[8]) {
  if constexpr (kFloat32) {
    auto* const fours = reinterpret_cast<float4*>(static_cast<float*>(data) + to);
    fours[0] = make_float4(v[0], v[1], v[2], v[3]);
    fours[1] = make_float4(v[4], v[5], v[6], v[7]);
  } else {
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(data) + to) =
        make_uint4(pack_bf16x2(v[0], v[1]), pack_bf16x2(v[2], v[3]), pack_bf16x2(v[4], v[5]), pack_bf16x2(v[6], v[7]));
  }
}

template <int kLatent, bool kFloat32In, bool kFloat32Out>
__global__ void __launch_bounds__(32 * kWarps) merge_partials_kernel(kdtree_merge_partials_args args) {
  constexpr int kEights = kLatent / 256;  // of a lane
  const int lane = threadIdx.x % 32;
  const int64_t stride = int64_t{gridDim.x} * kWarps;
  for (int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; row < args.num_rows; row += stride) {
    float top = -INFINITY;
    for (int64_t part = lane; part < args.num_parts; part += 32) {
      top = fmaxf(top, args.lses[part * args.num_rows + row]);
    }
    top = warp_max(top);
    const float base = top == -INFINITY ? 0.0f : top;  // -inf - -inf would be NaN
    float total[kEights][8] = {};
    float sum = 0.0f;
    for (int64_t part = 0; part < args.num_parts; ++part) {
      const float lse = args.lses[part * args.num_rows + row];
      if (lse == -INFINITY) continue;
      const float weight = expf(lse - base);
      sum += weight;
#pragma unroll
      for (int i = 0; i < kEights; ++i) {
        float v[8];
        load_eight<kFloat32In>(args.outs, (part * args.num_rows + row) * kLatent + i * 256 + lane * 8, v);
#pragma unroll
        for (int e = 0; e < 8; ++e) total[i][e] = fmaf(weight, v[e], total[i][e]);
      }
    }
#pragma unroll
    for (int i = 0; i < kEights; ++i) {
#pragma unroll
      for (int e = 0; e < 8; ++e) total[i][e] = sum == 0.0f ? 0.0f : total[i][e] / sum;
      store_eight<kFloat32Out>(args.out, row * kLatent + i * 256 + lane * 8, total[i]);
    }
    if (args.lse != nullptr && lane == 0) args.lse[row] = sum == 0.0f ? -INFINITY : base + logf(sum);
  }
}

}  // namespace

int64_t merge_partials_shared_bytes() { return 0; }

int launch_merge_partials(const kdtree_merge_partials_args& args, void* stream) {
  const auto run = [&](auto kernel) {
    const int64_t blocks = min((args.num_rows + kWarps - 1) / kWarps, kMostBlocks);
    return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(32 * kWarps), 0, stream, args);
  };
  const bool in = args.in_type == KDTREE_FLOAT32;
  const bool out = args.out_type == KDTREE_FLOAT32;
  if (args.d_latent == 512) {
    return in    ? out ? run(merge_partials_kernel<512, true, true>) : run(merge_partials_kernel<512, true, false>)
           : out ? run(merge_partials_kernel<512, false, true>)
                 : run(merge_partials_kernel<512, false, false>);
  }
  return in    ? out ? run(merge_partials_kernel<256, true, true>) : run(merge_partials_kernel<256, true, false>)
         : out ? run(merge_partials_kernel<256, false, true>)
               : run(merge_partials_kernel<256, false, false>);
}

}  // namespace kdtree
