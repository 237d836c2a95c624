// verify_attn, naive: out = softmax(sm_scale * q kv^T | mask) kv[:, :d_latent], one block a row.
//
// Work split: block (row, request) with row = node * num_heads + head. Keys are taken kKeyChunk at a time: a warp
// computes the score of one key (lanes stride over the row, so loads coalesce), the block folds the chunk into a
// running maximum and sum, then each thread adds the chunk's values to its own d_latent / kThreads output columns.
//
// Assumes: 16-byte aligned q and kv (checked by the C interface). A key that the row does not see is neither scored
// nor read, so it may hold anything.
//
// Why it exists: it is the plainest kernel with the right answer. Every row reads every key again, from L2 at best,
// so it says what tiling is worth and gives the fast kernels something of the same precision to be compared with.

#include "verify_attn/verify_attn.cuh"

namespace kdtree {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kKeyChunk = kThreads;  // one score a thread when the chunk is folded
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

struct Shared {
  float q[576];
  float p[kKeyChunk];     // scores, then weights, of the chunk
  float partial[kWarps];  // one value a warp of a block reduction
};

__device__ __forceinline__ float block_max(float value, float* partial) {
  value = warp_max(value);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  float result = partial[0];
  for (int warp = 1; warp < kWarps; ++warp) result = fmaxf(result, partial[warp]);
  __syncthreads();
  return result;
}

__device__ __forceinline__ float block_sum(float value, float* partial) {
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  float result = partial[0];
  for (int warp = 1; warp < kWarps; ++warp) result += partial[warp];
  __syncthreads();
  return result;
}

template <int kLatent, int kRope>
__global__ void __launch_bounds__(kThreads) verify_attn_kernel(kdtree_verify_attn_args args) {
  constexpr int kDim = kLatent + kRope;
  constexpr int kColumns = kLatent / kThreads;
  KDTREE_DYNAMIC_SHARED(Shared, shared);

  const int64_t batch_idx = blockIdx.y;
  const int64_t row = batch_idx * args.q_len * args.num_heads + blockIdx.x;
  const int64_t node = batch_idx * args.q_len + blockIdx.x / args.num_heads;
  const int64_t num_keys = used_keys(args.kv_lens, batch_idx, args.kv_len);
  const float* kv = args.kv + batch_idx * args.kv_len * kDim;
  const uint8_t* mask = args.mask == nullptr ? nullptr : args.mask + node * args.kv_len;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;

  for (int d = threadIdx.x; d < kDim; d += kThreads) shared.q[d] = args.q[row * kDim + d];
  __syncthreads();

  float row_max = -INFINITY;  // in units of log2
  float row_sum = 0.0f;
  float acc[kColumns] = {};
  for (int64_t first = 0; first < num_keys; first += kKeyChunk) {
    const int chunk = static_cast<int>(num_keys - first < kKeyChunk ? num_keys - first : kKeyChunk);
    for (int k = warp; k < chunk; k += kWarps) {
      float score = -INFINITY;
      if (mask == nullptr || mask[first + k] != 0) {
        const float* key = kv + (first + k) * kDim;
        float dot = 0.0f;
        for (int d = lane; d < kDim; d += 32) dot = fmaf(shared.q[d], key[d], dot);
        score = warp_sum(dot) * (args.sm_scale * kLog2E);
      }
      if (lane == 0) shared.p[k] = score;
    }
    __syncthreads();

    const float score = static_cast<int>(threadIdx.x) < chunk ? shared.p[threadIdx.x] : -INFINITY;
    const float new_max = fmaxf(row_max, block_max(score, shared.partial));
    const float base = new_max == -INFINITY ? 0.0f : new_max;  // -inf - -inf would be NaN
    const float weight = exp2f(score - base);
    const float rescale = exp2f(row_max - base);
    row_sum = fmaf(row_sum, rescale, block_sum(weight, shared.partial));
    row_max = new_max;
    shared.p[threadIdx.x] = weight;
    __syncthreads();

    for (int c = 0; c < kColumns; ++c) acc[c] *= rescale;
    for (int k = 0; k < chunk; ++k) {
      const float p = shared.p[k];
      if (p == 0.0f) continue;  // an unseen key's row may hold NaN: 0 * NaN must not reach the sum
      const float* value = kv + (first + k) * kDim;
      for (int c = 0; c < kColumns; ++c) acc[c] = fmaf(p, value[c * kThreads + threadIdx.x], acc[c]);
    }
    __syncthreads();
  }

  const float inverse = row_sum == 0.0f ? 0.0f : 1.0f / row_sum;
  for (int c = 0; c < kColumns; ++c) args.out[row * kLatent + c * kThreads + threadIdx.x] = acc[c] * inverse;
  if (threadIdx.x == 0) args.lse[row] = row_sum == 0.0f ? -INFINITY : (row_max + log2f(row_sum)) * kLn2;
}

}  // namespace

int64_t verify_attn_shared_bytes() { return sizeof(Shared); }

int launch_verify_attn(const kdtree_verify_attn_args& args, void* stream) {
  return with_geometry(args, [&](auto latent, auto rope) {
    const dim3 grid(static_cast<unsigned>(args.q_len * args.num_heads), static_cast<unsigned>(args.batch));
    return launch(verify_attn_kernel<latent.value, rope.value>, grid, dim3(kThreads), sizeof(Shared), stream, args);
  });
}

}  // namespace kdtree
