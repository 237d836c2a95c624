// Two small attention kernels with everything that can go wrong in a large one: tiles in shared memory, rings of
// asynchronous copies, row state and partial sums that warps hand each other. phases/phase0/test_injected_bugs.py takes
// one barrier, wait or check away at a time and expects the host build's tools to notice.
#include "conformance/conformance.h"

namespace kdtree::conformance {
namespace {

constexpr int kThreads = 128;
constexpr int kDim = 64;
constexpr int kRows = 8;    // of a block of attend_float
constexpr int kHeads = 16;  // of attend_paged
constexpr int kKeys = 16;   // of a tile; a page
constexpr float kLog2E = 1.44269504f;

struct FloatShared {
  float row_sum[kRows];
  float weights[kThreads / 32][32];
  alignas(16) float keys[kKeys][kDim];
};

// out [num_rows, kDim] = softmax(q k^T) k, float32; q [num_rows, kDim], k [num_keys, kDim]. A warp does two of a
// block's rows, a lane two of a row's columns.
__global__ void __launch_bounds__(kThreads) attend_float(const float* __restrict__ q, const float* __restrict__ k,
                                                         float* __restrict__ out, int num_rows, int num_keys) {
  KDTREE_DYNAMIC_SHARED(FloatShared, shared);
  constexpr int kRowsPerWarp = 2;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_row = blockIdx.x * kRows + warp * kRowsPerWarp;
  float query[kRowsPerWarp][2], sums[kRowsPerWarp][2] = {}, maximum[kRowsPerWarp];
  for (int r = 0; r < kRowsPerWarp; ++r) {
    maximum[r] = -INFINITY;
    for (int i = 0; i < 2; ++i) query[r][i] = first_row + r < num_rows ? q[(first_row + r) * kDim + i * 32 + lane] : 0;
  }
  if (threadIdx.x < kRows) shared.row_sum[threadIdx.x] = 0;

  for (int first_key = 0; first_key < num_keys; first_key += kKeys) {
    for (int i = threadIdx.x; i < kKeys * kDim / 4; i += kThreads) {
      const int key = i / (kDim / 4), column = i % (kDim / 4) * 4;
      float4 values = make_float4(0, 0, 0, 0);
      if (first_key + key < num_keys) {
        values = *reinterpret_cast<const float4*>(k + (first_key + key) * kDim + column);
      }
      *reinterpret_cast<float4*>(&shared.keys[key][column]) = values;
    }
    __syncthreads();  // the tile is complete
    const float* keys = shared.keys[0];
    for (int r = 0; r < kRowsPerWarp; ++r) {
      float score = -INFINITY;
      for (int key = 0; key < kKeys; ++key) {
        const float* row = keys + key * kDim;
        const float dot = warp_sum(fmaf(query[r][0], row[lane], query[r][1] * row[lane + 32]));
        if (lane == key && first_key + key < num_keys) score = dot;
      }
      const float previous = maximum[r];
      maximum[r] = fmaxf(previous, warp_max(score));
      shared.weights[warp][lane] = exp2f((score - maximum[r]) * kLog2E);
      __syncwarp();  // the weights of all lanes are there
      const float rescale = exp2f((previous - maximum[r]) * kLog2E);
      float total = 0;
      for (int i = 0; i < 2; ++i) sums[r][i] *= rescale;
      for (int key = 0; key < kKeys; ++key) {
        const float weight = shared.weights[warp][key];
        total += weight;
        for (int i = 0; i < 2; ++i) sums[r][i] = fmaf(weight, keys[key * kDim + i * 32 + lane], sums[r][i]);
      }
      float& row_sum = shared.row_sum[warp * kRowsPerWarp + r];
      if (lane == 0) row_sum = fmaf(row_sum, rescale, total);
      __syncwarp();  // the weights have been read by all lanes, and the sum is written
    }
    __syncthreads();  // the tile has been read by all warps
  }
  for (int r = 0; r < kRowsPerWarp; ++r) {
    if (first_row + r >= num_rows) continue;
    const float scale = 1 / shared.row_sum[warp * kRowsPerWarp + r];
    for (int i = 0; i < 2; ++i) out[(first_row + r) * kDim + i * 32 + lane] = sums[r][i] * scale;
  }
}

// Rows are padded by 16 bytes: the eight rows of an 8x8 matrix then lie in different banks.
struct PagedShared {
  alignas(16) uint16_t q[kHeads][kDim + 8];
  alignas(16) uint16_t kv[2][kKeys][kDim + 8];
  alignas(16) uint16_t weights[kHeads][kKeys + 8];
  float partial[4][kHeads][kKeys];
  float row_max[kHeads], row_sum[kHeads], rescale[kHeads];
};

// out [blocks, kHeads, kDim] float32 = softmax(q kv^T) kv; q [blocks, kHeads, kDim] bf16, pool [pages, kKeys, kDim]
// bf16, page_table [blocks, ceil(num_keys / kKeys)]. In S = q kv^T a warp does 16 of the dimensions, in S kv 16 of the
// columns.
__global__ void __launch_bounds__(kThreads)
    attend_paged(const uint16_t* __restrict__ q, const uint16_t* __restrict__ pool,
                 const int32_t* __restrict__ page_table, float* __restrict__ out, int num_keys) {
  KDTREE_DYNAMIC_SHARED(PagedShared, shared);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int num_tiles = (num_keys + kKeys - 1) / kKeys;
  const auto fetch = [&](int tile) {
    if (tile < num_tiles) {
      const int key = thread / 8, column = thread % 8 * 8;
      const int64_t page = page_table[blockIdx.x * num_tiles + tile];
      cp_async_16_zfill(&shared.kv[tile % 2][key][column], pool + (page * kKeys + key) * kDim + column,
                        tile * kKeys + key < num_keys);
    }
    cp_async_commit();
  };

  *reinterpret_cast<uint4*>(&shared.q[thread / 8][thread % 8 * 8]) =
      *reinterpret_cast<const uint4*>(q + (blockIdx.x * kThreads + thread) * 8);
  if (thread < kHeads) {
    shared.row_max[thread] = -INFINITY;
    shared.row_sum[thread] = 0;
  }
  float sums[2][4] = {};
  fetch(0);
  for (int tile = 0; tile < num_tiles; ++tile) {
    fetch(tile + 1);
    cp_async_wait<1>();
    __syncthreads();  // the tile has landed for all warps
    const auto& kv = shared.kv[tile % 2];

    uint32_t a[4], b[4];
    float scores[2][4] = {};
    ldmatrix_x4(a, &shared.q[lane % 16][warp * 16 + lane / 16 * 8]);
    ldmatrix_x4(b, &kv[lane % 8 + lane / 16 * 8][warp * 16 + lane / 8 % 2 * 8]);
    for (int half = 0; half < 2; ++half) {
      const uint32_t keys[2] = {b[2 * half], b[2 * half + 1]};
      mma_m16n8k16_bf16(scores[half], a, keys);
      for (int i = 0; i < 4; ++i) {
        shared.partial[warp][lane / 4 + i / 2 * 8][half * 8 + lane % 4 * 2 + i % 2] = scores[half][i];
      }
    }
    __syncthreads();  // the scores of all dimensions are there

    const int row = thread / 8, first = thread % 8 * 2;
    float score[2];
    for (int i = 0; i < 2; ++i) {
      score[i] = -INFINITY;
      if (tile * kKeys + first + i < num_keys) {
        score[i] = shared.partial[0][row][first + i] + shared.partial[1][row][first + i] +
                   shared.partial[2][row][first + i] + shared.partial[3][row][first + i];
      }
    }
    const float previous = shared.row_max[row];
    const float maximum = fmaxf(previous, lanes_max<8>(fmaxf(score[0], score[1])));
    const float weight[2] = {exp2f((score[0] - maximum) * kLog2E), exp2f((score[1] - maximum) * kLog2E)};
    *reinterpret_cast<uint32_t*>(&shared.weights[row][first]) = pack_bf16x2(weight[0], weight[1]);
    const float total = lanes_sum<8>(weight[0] + weight[1]);
    __syncwarp();  // the old maximum has been read by all lanes of the row
    if (thread % 8 == 0) {
      shared.row_max[row] = maximum;
      shared.rescale[row] = exp2f((previous - maximum) * kLog2E);
      shared.row_sum[row] = fmaf(shared.row_sum[row], shared.rescale[row], total);
    }
    __syncthreads();  // weights and row state are there

    ldmatrix_x4(a, &shared.weights[lane % 16][lane / 16 * 8]);
    ldmatrix_x4_trans(b, &kv[lane % 16][warp * 16 + lane / 16 * 8]);
    for (int half = 0; half < 2; ++half) {
      const uint32_t values[2] = {b[2 * half], b[2 * half + 1]};
      for (int i = 0; i < 4; ++i) sums[half][i] *= shared.rescale[lane / 4 + i / 2 * 8];
      mma_m16n8k16_bf16(sums[half], a, values);
    }
    __syncthreads();  // the tile has been read by all warps, its buffer is free
  }
  for (int half = 0; half < 2; ++half) {
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + i / 2 * 8, column = warp * 16 + half * 8 + lane % 4 * 2 + i % 2;
      out[(blockIdx.x * kHeads + row) * kDim + column] = sums[half][i] / shared.row_sum[row];
    }
  }
}

}  // namespace
}  // namespace kdtree::conformance

// Both return 0, or nonzero with the reason in kdtree_pipeline_error(). Arrays as at the kernels.
KDTREE_CONFORMANCE_API int kdtree_attend_float(const float* q, const float* k, float* out, int num_rows, int num_keys,
                                               void* stream) {
  using namespace kdtree::conformance;
  return kdtree::launch(attend_float, dim3((num_rows + kRows - 1) / kRows), dim3(kThreads), sizeof(FloatShared), stream,
                        q, k, out, num_rows, num_keys);
}

KDTREE_CONFORMANCE_API int kdtree_attend_paged(const uint16_t* q, const uint16_t* pool, const int32_t* page_table,
                                               float* out, int num_blocks, int num_keys, void* stream) {
  using namespace kdtree::conformance;
  return kdtree::launch(attend_paged, dim3(num_blocks), dim3(kThreads), sizeof(PagedShared), stream, q, pool,
                        page_table, out, num_keys);
}

KDTREE_CONFORMANCE_API const char* kdtree_pipeline_error() { return kdtree::launch_error(); }
