// verify_attn, flash: the same result from row tiles in registers, without a score matrix in memory.
//
//   per key tile:  S = Q K^T,  m' = max(m, rowmax S),  P = 2^(S - m'),  l = l 2^(m - m') + rowsum P,
//                  O = O 2^(m - m') + P V            with S in units of log2 and V = the latent part of K
//   at the end:    out = O / l,  lse = (m + log2 l) ln 2;  splits of a row are merged by their lse
//
// Work split: the (node, head) pairs of a request are its rows, packed as node * num_heads + head, so a key is read
// once for as many rows as a tile holds. Block (row tile, split, request) walks split_tokens keys, 64 at a time, with
// 256 threads. The output tile stays in registers (kRows x d_latent over 256 threads). Q and K stream through the two
// halves of a cp.async ring 64 dimensions at a time, the values 16 keys at a time: neither fits in shared memory whole,
// and L2 serves the second read. For the scores the threads form 128 / kRows groups that each take a part of every
// chunk's dimensions, so that a thread has 4 x 8 scores (12 shared loads for 128 multiply-adds) at every row tile;
// their parts are added through shared memory. A second kernel merges the splits.
//
// Shared memory, largest tile: ring 2 x 34,816 + scores 17,408 + row state 256 = 87,296 of sm_120's 101,376 bytes.
//
// Assumes: 16-byte aligned q, kv, out (checked by the C interface). Keys at or past kv_lens are never read. A key that
// a row does not see is multiplied with weight 0, so a NaN or inf there would reach the sum; such a key always has a
// score that is not finite, the tile's vote finds it, and the tile takes the path that skips zero weights.
//
// A row's bits depend on its own inputs, q_len, num_heads and the split: not on the batch or what other rows hold.
//
// Tried, as share of the float32 FMA peak of one H200 at batch 2, q_len 64, 64 heads, 8,192 keys:
//   42.0 %  ring of three 32-dimension chunks, a barrier every 512 multiply-adds, loader with run-time branches
//   50.1 %  two halves of 64 dimensions, straight-line loaders
//   52.6 %  lanes in pairs (lane_row, lane_column below): 174 million shared-memory wavefronts at batch 1, where the
//           first version had 285
//   54.1 %  the next step's query fragment fetched behind the present one's arithmetic, two steps unrolled; four steps
//           give 53.7 %, one 50.7 %
//   43-47 % 512 threads of 128 registers: half the shared-memory reuse, and spills; lost
//   51-54 % the value product's weights fetched ahead; the mask of the next tile fetched during the softmax; the parts
//           of the groups exchanged by halves; the rescaling skipped where every factor is 1: noise or a loss, left out

#include "verify_attn/verify_attn.cuh"

namespace kdtree {
namespace {

constexpr int kThreads = 256;
constexpr int kKeyTile = kVerifyAttnKeyTile;
constexpr int kScorePitch = kKeyTile + 4;
constexpr int kGroupRows = 128;  // kRows * groups: 32 scores a thread at every row tile
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// Dimensions of a Q/K chunk: 64, or 32 where 64 does not divide the row.
constexpr int chunk_dims(int dim) { return dim % 64 == 0 ? 64 : 32; }

template <int kRows, int kLatent, int kRope>
struct Shared {
  static constexpr int kChunkDims = chunk_dims(kLatent + kRope);
  static constexpr int kChunkPitch = kChunkDims + 4;  // rows four banks apart: eight rows cover all banks
  static constexpr int kValueKeys = 8192 / kLatent;   // keys of a value chunk
  static constexpr int kQk = (kRows + kKeyTile) * kChunkPitch;
  static constexpr int kValues = kValueKeys * kLatent;
  float ring[2][kQk > kValues ? kQk : kValues];
  float scores[kGroupRows / kRows / 2][kRows][kScorePitch];  // partial scores; [0] then holds the weights
  float row_scale[kRows];                                    // 2^(m - m') of the tile, at the end 1 / l
};

// Where the kernel leaves its result: the caller's tensors, or a split's part of the workspace.
struct Output {
  float* out;        // [num_splits, batch, rows, d_latent]
  float* lse;        // [num_splits, batch, rows]
  float lse_factor;  // ln 2 for the caller, 1 for partial results
};

template <int kRows, int kLatent, int kRope>
__global__ void __launch_bounds__(kThreads, 1)
    verify_attn_flash_kernel(kdtree_verify_attn_args args, int64_t split_tokens, unsigned num_row_tiles,
                             Output output) {
  using SharedT = Shared<kRows, kLatent, kRope>;
  constexpr int kDim = kLatent + kRope;
  constexpr int kChunkDims = SharedT::kChunkDims;
  constexpr int kChunkPitch = SharedT::kChunkPitch;
  constexpr int kValueKeys = SharedT::kValueKeys;
  constexpr int kChunks = kDim / kChunkDims;
  constexpr int kValueChunks = kKeyTile / kValueKeys;
  constexpr int kGroups = kGroupRows / kRows;
  // Score tile of a thread: rows row_lane + kRowLanes * i, keys key_lane + 8 * j.
  constexpr int kScoreRows = 4;
  constexpr int kScoreKeys = 8;
  constexpr int kRowLanes = kRows / kScoreRows;
  constexpr int kGroupDims = kChunkDims / kGroups;
  // Output tile of a thread: rows out_row + 8 * i, columns out_column + 16 * j.
  constexpr int kOutRows = kRows / 8;
  constexpr int kOutQuads = kLatent / (8 * 16);
  // Softmax: kRowThreads neighbouring threads share a row.
  constexpr int kRowThreads = kThreads / kRows;
  constexpr int kRowQuads = kKeyTile / (4 * kRowThreads);

  KDTREE_DYNAMIC_SHARED(SharedT, shared);

  const int tid = threadIdx.x;
  const int lane = tid % 32;
  const int warp = tid / 32;
  const int64_t rows = args.q_len * args.num_heads;
  const int64_t batch_idx = blockIdx.y;
  const int64_t split_idx = blockIdx.x / num_row_tiles;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x % num_row_tiles) * kRows;
  const int64_t first_key = split_idx * split_tokens;
  const int64_t used = used_keys(args.kv_lens, batch_idx, args.kv_len);
  const int64_t end_key = used < first_key + split_tokens ? used : first_key + split_tokens;
  const int num_keys = static_cast<int>(end_key > first_key ? end_key - first_key : 0);

  const float* q = args.q + (batch_idx * rows + first_row) * kDim;
  const float* kv = args.kv + (batch_idx * args.kv_len + first_key) * kDim;
  const int live_rows = static_cast<int>(rows - first_row < kRows ? rows - first_row : kRows);

  // Starts the copies of a Q/K chunk (rows, then keys) of the tile at tile_key. Rows and keys past the end become
  // zeros.
  const auto load_qk = [&](float* smem, int tile_key, int chunk) {
    constexpr int kQuads = kChunkDims / 4;
    constexpr int kLoadRows = kThreads / kQuads;
    const int load_row = tid / kQuads;
    const int offset = tid % kQuads * 4;
    smem += load_row * kChunkPitch + offset;
    const float* source = q + load_row * kDim + chunk * kChunkDims + offset;
#pragma unroll
    for (int row = 0; row < kRows; row += kLoadRows) {
      if (kRows % kLoadRows != 0 && row + load_row >= kRows) break;
      cp_async_16_zfill(smem + row * kChunkPitch, source + row * kDim, row + load_row < live_rows);
    }
    smem += kRows * kChunkPitch;
    source = kv + static_cast<int64_t>(tile_key + load_row) * kDim + chunk * kChunkDims + offset;
#pragma unroll
    for (int key = 0; key < kKeyTile; key += kLoadRows) {
      cp_async_16_zfill(smem + key * kChunkPitch, source + key * kDim, tile_key + key + load_row < num_keys);
    }
    cp_async_commit();
  };

  // Starts the copies of kValueKeys values of the tile at tile_key.
  const auto load_values = [&](float* smem, int tile_key, int chunk) {
    constexpr int kQuads = kLatent / 4;
    constexpr int kLoadKeys = kThreads / kQuads;
    const int first = tile_key + chunk * kValueKeys + tid / kQuads;
    const float* source = kv + static_cast<int64_t>(first) * kDim + tid % kQuads * 4;
    smem += tid * 4;
#pragma unroll
    for (int key = 0; key < kValueKeys; key += kLoadKeys) {
      cp_async_16_zfill(smem + key * kLatent, source + key * kDim, first + key < num_keys);
    }
    cp_async_commit();
  };

  // Which lane takes which part of a tile: rows by bits 1-3, keys or columns by bits 0 and 4. A 16-byte shared load is
  // then the same for the lanes of every pair that differs in bit 0 or in bit 1, which halves its wavefronts.
  const int lane_row = lane / 2 % 8;
  const int lane_column = lane % 2 + lane / 16 * 2;
  const int group = tid / (kThreads / kGroups);
  const int row_lane = kRowLanes == 16 ? lane_row + warp % 2 * 8 : lane_row % kRowLanes;
  const int key_lane = kRowLanes == 16  ? lane_column + warp / 2 % 2 * 4
                       : kRowLanes == 8 ? lane_column + warp % 2 * 4
                                        : lane_column + lane_row / 4 * 4;
  const int out_column = warp * (kLatent / 8) + lane_column * 4;
  const int softmax_row = tid / kRowThreads;
  const int softmax_quad = tid % kRowThreads;
  const bool softmax_live = softmax_row < live_rows;
  const uint8_t* mask = nullptr;
  if (args.mask != nullptr && softmax_live) {
    const int64_t node = batch_idx * args.q_len + (first_row + softmax_row) / args.num_heads;
    mask = args.mask + node * args.kv_len + first_key;
  }
  // Mask bytes of this thread's keys 4 * (softmax_quad + kRowThreads * i) + e of a tile, then one bit for each of them.
  const auto load_mask = [&](int tile_key, uint8_t (&bytes)[4 * kRowQuads]) {
#pragma unroll
    for (int i = 0; i < kRowQuads; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = tile_key + 4 * (softmax_quad + kRowThreads * i) + e;
        bytes[4 * i + e] = softmax_live && key < num_keys;
        if (mask != nullptr && key < num_keys) bytes[4 * i + e] = mask[key];
      }
    }
  };
  const auto visible_bits = [](const uint8_t (&bytes)[4 * kRowQuads]) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 4 * kRowQuads; ++i) bits |= static_cast<uint32_t>(bytes[i] != 0) << i;
    return bits;
  };
  const float scale = args.sm_scale * kLog2E;

  float row_max = -INFINITY;  // m; the threads of a row agree on it
  float row_sum = 0.0f;       // this thread's part of l
  float4 acc[kOutRows][kOutQuads];
#pragma unroll
  for (int i = 0; i < kOutRows; ++i) {
#pragma unroll
    for (int j = 0; j < kOutQuads; ++j) acc[i][j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }

  int stage = 0;  // the half of the ring that the next chunk to be used is in
  if (num_keys > 0) load_qk(shared.ring[0], 0, 0);

  for (int tile_key = 0; tile_key < num_keys; tile_key += kKeyTile) {
    uint8_t mask_bytes[4 * kRowQuads];
    load_mask(tile_key, mask_bytes);
    const uint32_t visible = visible_bits(mask_bytes);
    float scores[kScoreRows][kScoreKeys];
#pragma unroll
    for (int i = 0; i < kScoreRows; ++i) {
#pragma unroll
      for (int j = 0; j < kScoreKeys; ++j) scores[i][j] = 0.0f;
    }
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      cp_async_wait<0>();
      __syncthreads();  // the chunk is there for all, and all have left the other stage
      if (chunk + 1 < kChunks) {
        load_qk(shared.ring[stage ^ 1], tile_key, chunk + 1);
      } else {
        load_values(shared.ring[stage ^ 1], tile_key, 0);
      }
      const float* s_q = shared.ring[stage] + group * kGroupDims;
      const float* s_k = s_q + kRows * kChunkPitch;
      stage ^= 1;
      float4 a[kScoreRows];
#pragma unroll
      for (int i = 0; i < kScoreRows; ++i) {
        a[i] = *reinterpret_cast<const float4*>(s_q + (row_lane + kRowLanes * i) * kChunkPitch);
      }
#pragma unroll 2
      for (int d = 0; d < kGroupDims; d += 4) {
        float4 next[kScoreRows];  // of the next step, fetched behind this one's arithmetic; the last one wraps around
#pragma unroll
        for (int j = 0; j < kScoreKeys; ++j) {
          const float4 b = *reinterpret_cast<const float4*>(s_k + (key_lane + 8 * j) * kChunkPitch + d);
          if (j < kScoreRows) {
            next[j] =
                *reinterpret_cast<const float4*>(s_q + (row_lane + kRowLanes * j) * kChunkPitch + (d + 4) % kGroupDims);
          }
#pragma unroll
          for (int i = 0; i < kScoreRows; ++i) {
            scores[i][j] = fmaf(a[i].x, b.x, scores[i][j]);
            scores[i][j] = fmaf(a[i].y, b.y, scores[i][j]);
            scores[i][j] = fmaf(a[i].z, b.z, scores[i][j]);
            scores[i][j] = fmaf(a[i].w, b.w, scores[i][j]);
          }
        }
#pragma unroll
        for (int i = 0; i < kScoreRows; ++i) a[i] = next[i];
      }
    }
    // The upper groups leave their parts, the lower ones add theirs to them.
    float* part = &shared.scores[group % (kGroups / 2)][row_lane][key_lane];
    if (group >= kGroups / 2) {
#pragma unroll
      for (int i = 0; i < kScoreRows; ++i) {
#pragma unroll
        for (int j = 0; j < kScoreKeys; ++j) part[kRowLanes * i * kScorePitch + 8 * j] = scores[i][j];
      }
    }
    __syncthreads();
    if (group < kGroups / 2) {
#pragma unroll
      for (int i = 0; i < kScoreRows; ++i) {
#pragma unroll
        for (int j = 0; j < kScoreKeys; ++j) part[kRowLanes * i * kScorePitch + 8 * j] += scores[i][j];
      }
    }
    __syncthreads();

    float4 p[kRowQuads];
    float tile_max = -INFINITY;
    bool hidden_not_finite = false;
#pragma unroll
    for (int i = 0; i < kRowQuads; ++i) {
      float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int g = 0; g < kGroups / 2; ++g) {
        const float4 part =
            *reinterpret_cast<const float4*>(&shared.scores[g][softmax_row][4 * (softmax_quad + kRowThreads * i)]);
        s[0] += part.x;
        s[1] += part.y;
        s[2] += part.z;
        s[3] += part.w;
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool seen = visible >> (4 * i + e) & 1;
        hidden_not_finite |= !seen && !(fabsf(s[e]) < INFINITY);
        s[e] = seen ? s[e] * scale : -INFINITY;
        tile_max = fmaxf(tile_max, s[e]);
      }
      p[i] = make_float4(s[0], s[1], s[2], s[3]);
    }
    const float new_max = fmaxf(row_max, lanes_max<kRowThreads>(tile_max));
    const float base = new_max == -INFINITY ? 0.0f : new_max;  // -inf - -inf would be NaN
    const float rescale = exp2f(row_max - base);
    row_max = new_max;
    row_sum *= rescale;
#pragma unroll
    for (int i = 0; i < kRowQuads; ++i) {
      p[i] = make_float4(exp2f(p[i].x - base), exp2f(p[i].y - base), exp2f(p[i].z - base), exp2f(p[i].w - base));
      row_sum += (p[i].x + p[i].y) + (p[i].z + p[i].w);
      *reinterpret_cast<float4*>(&shared.scores[0][softmax_row][4 * (softmax_quad + kRowThreads * i)]) = p[i];
    }
    if (softmax_quad == 0) shared.row_scale[softmax_row] = rescale;
    const bool skip_zero_weights = __syncthreads_or(hidden_not_finite);

#pragma unroll
    for (int i = 0; i < kOutRows; ++i) {
      const float factor = shared.row_scale[lane_row + 8 * i];
#pragma unroll
      for (int j = 0; j < kOutQuads; ++j) {
        acc[i][j].x *= factor;
        acc[i][j].y *= factor;
        acc[i][j].z *= factor;
        acc[i][j].w *= factor;
      }
    }
    for (int chunk = 0; chunk < kValueChunks; ++chunk) {
      cp_async_wait<0>();
      __syncthreads();
      if (chunk + 1 < kValueChunks) {
        load_values(shared.ring[stage ^ 1], tile_key, chunk + 1);
      } else if (tile_key + kKeyTile < num_keys) {
        load_qk(shared.ring[stage ^ 1], tile_key + kKeyTile, 0);
      }
      const float* s_v = shared.ring[stage] + out_column;
      stage ^= 1;
      const float* s_p = &shared.scores[0][lane_row][chunk * kValueKeys];
      if (skip_zero_weights) {
        for (int k = 0; k < kValueKeys; ++k) {
#pragma unroll
          for (int i = 0; i < kOutRows; ++i) {
            const float weight = s_p[8 * i * kScorePitch + k];
            if (weight == 0.0f) continue;
#pragma unroll
            for (int j = 0; j < kOutQuads; ++j) {
              const float4 v = *reinterpret_cast<const float4*>(s_v + k * kLatent + 16 * j);
              acc[i][j].x = fmaf(weight, v.x, acc[i][j].x);
              acc[i][j].y = fmaf(weight, v.y, acc[i][j].y);
              acc[i][j].z = fmaf(weight, v.z, acc[i][j].z);
              acc[i][j].w = fmaf(weight, v.w, acc[i][j].w);
            }
          }
        }
        continue;
      }
#pragma unroll 1
      for (int k = 0; k < kValueKeys; k += 4) {
        float4 weights[kOutRows];
#pragma unroll
        for (int i = 0; i < kOutRows; ++i) {
          weights[i] = *reinterpret_cast<const float4*>(s_p + 8 * i * kScorePitch + k);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
#pragma unroll
          for (int j = 0; j < kOutQuads; ++j) {
            const float4 v = *reinterpret_cast<const float4*>(s_v + (k + e) * kLatent + 16 * j);
#pragma unroll
            for (int i = 0; i < kOutRows; ++i) {
              const float weight = e == 0 ? weights[i].x : e == 1 ? weights[i].y : e == 2 ? weights[i].z : weights[i].w;
              acc[i][j].x = fmaf(weight, v.x, acc[i][j].x);
              acc[i][j].y = fmaf(weight, v.y, acc[i][j].y);
              acc[i][j].z = fmaf(weight, v.z, acc[i][j].z);
              acc[i][j].w = fmaf(weight, v.w, acc[i][j].w);
            }
          }
        }
      }
    }
  }

  row_sum = lanes_sum<kRowThreads>(row_sum);
  const int64_t out_row = (split_idx * args.batch + batch_idx) * rows + first_row;
  if (softmax_quad == 0) {
    shared.row_scale[softmax_row] = row_sum == 0.0f ? 0.0f : 1.0f / row_sum;
    if (softmax_live) {
      output.lse[out_row + softmax_row] = row_sum == 0.0f ? -INFINITY : (row_max + log2f(row_sum)) * output.lse_factor;
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kOutRows; ++i) {
    const int row = lane_row + 8 * i;
    if (row >= live_rows) continue;
    const float factor = shared.row_scale[row];
    float* out = output.out + (out_row + row) * kLatent + out_column;
#pragma unroll
    for (int j = 0; j < kOutQuads; ++j) {
      const float4 o = acc[i][j];
      *reinterpret_cast<float4*>(out + 16 * j) = make_float4(o.x * factor, o.y * factor, o.z * factor, o.w * factor);
    }
  }
}

// Merges the splits of a row: lse = log sum_s exp(lse_s), out = sum_s exp(lse_s - lse) out_s, with partial.lse in units
// of log2. Block (row, 128 columns): warp w takes the splits w, w + kMergeWarps, ..., eight in flight, a lane four
// columns; then the warps' sums are added in order. A split that saw no key is not read.
constexpr int kMergeWarps = 8;
constexpr int kMergeColumns = 128;

struct MergeShared {
  float4 acc[kMergeWarps][32];
  float sum[kMergeWarps];
};

__global__ void __launch_bounds__(32 * kMergeWarps)
    verify_attn_flash_merge_kernel(Output partial, int num_splits, int64_t num_rows, int d_latent, float* out,
                                   float* lse) {
  KDTREE_DYNAMIC_SHARED(MergeShared, shared);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int num_warps = blockDim.x / 32;
  const int64_t row = blockIdx.x;
  const int column = blockIdx.y * kMergeColumns + lane * 4;

  float row_max = -INFINITY;
  for (int split = lane; split < num_splits; split += 32) {
    row_max = fmaxf(row_max, partial.lse[split * num_rows + row]);
  }
  row_max = warp_max(row_max);
  const float base = row_max == -INFINITY ? 0.0f : row_max;

  float sum = 0.0f;
  float4 acc = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  constexpr int kInFlight = 4;
  for (int first = warp; first < num_splits; first += num_warps * kInFlight) {
    float weights[kInFlight];
    float4 parts[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int split = first + i * num_warps;
      const float part_lse = split < num_splits ? partial.lse[split * num_rows + row] : -INFINITY;
      weights[i] = exp2f(part_lse - base);
      parts[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (part_lse != -INFINITY) {
        parts[i] = *reinterpret_cast<const float4*>(partial.out + (split * num_rows + row) * d_latent + column);
      }
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      sum += weights[i];
      acc.x = fmaf(weights[i], parts[i].x, acc.x);
      acc.y = fmaf(weights[i], parts[i].y, acc.y);
      acc.z = fmaf(weights[i], parts[i].z, acc.z);
      acc.w = fmaf(weights[i], parts[i].w, acc.w);
    }
  }
  shared.acc[warp][lane] = acc;
  if (lane == 0) shared.sum[warp] = sum;
  __syncthreads();
  if (warp != 0) return;

  for (int other = 1; other < num_warps; ++other) {
    const float4 part = shared.acc[other][lane];
    sum += shared.sum[other];
    acc = make_float4(acc.x + part.x, acc.y + part.y, acc.z + part.z, acc.w + part.w);
  }
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  *reinterpret_cast<float4*>(out + row * d_latent + column) =
      make_float4(acc.x * inverse, acc.y * inverse, acc.z * inverse, acc.w * inverse);
  if (blockIdx.y == 0 && lane == 0) lse[row] = sum == 0.0f ? -INFINITY : (base + log2f(sum)) * kLn2;
}

int row_tile(const kdtree_verify_attn_args& args) {
  const int64_t rows = args.q_len * args.num_heads;
  return rows <= 16 ? 16 : rows <= 32 ? 32 : 64;
}

template <int kRows, int kLatent, int kRope>
int launch_row_tile(const kdtree_verify_attn_args& args, void* stream) {
  const VerifyAttnPlan plan = verify_attn_flash_plan(args);
  const int64_t rows = args.q_len * args.num_heads;
  const auto num_row_tiles = static_cast<unsigned>((rows + kRows - 1) / kRows);
  const int64_t num_rows = args.batch * rows;
  Output output = {args.out, args.lse, kLn2};
  if (plan.num_splits > 1) {
    output.out = static_cast<float*>(args.workspace);
    output.lse = output.out + plan.num_splits * num_rows * kLatent;
    output.lse_factor = 1.0f;
  }
  const dim3 grid(static_cast<unsigned>(num_row_tiles * plan.num_splits), static_cast<unsigned>(args.batch));
  const int failed =
      launch(verify_attn_flash_kernel<kRows, kLatent, kRope>, grid, dim3(kThreads),
             sizeof(Shared<kRows, kLatent, kRope>), stream, args, plan.split_tokens, num_row_tiles, output);
  if (failed != 0 || plan.num_splits == 1) return failed;
  const int64_t merge_warps = plan.num_splits < 4 * kMergeWarps ? (plan.num_splits + 3) / 4 : kMergeWarps;
  return launch(verify_attn_flash_merge_kernel, dim3(static_cast<unsigned>(num_rows), kLatent / kMergeColumns),
                dim3(static_cast<unsigned>(32 * merge_warps)), sizeof(MergeShared), stream, output,
                static_cast<int>(plan.num_splits), num_rows, kLatent, args.out, args.lse);
}

}  // namespace

// Splits the keys so that one request's blocks fill the chip in whole waves: the batch has no say, so a request's bits
// do not depend on its company.
VerifyAttnPlan verify_attn_flash_plan(const kdtree_verify_attn_args& args) {
  const int64_t rows = args.q_len * args.num_heads;
  const int64_t num_row_tiles = (rows + row_tile(args) - 1) / row_tile(args);
  const int64_t num_key_tiles = (args.kv_len + kKeyTile - 1) / kKeyTile;
  int64_t split_tiles = args.split_tokens / kKeyTile;
  if (split_tiles == 0) {
    const int64_t slots = multiprocessor_count() > 0 ? multiprocessor_count() : 1;  // 0 without a device
    int64_t best_waves_tiles = 0;
    for (int64_t splits = 1; splits <= num_key_tiles && splits <= 2 * slots; ++splits) {
      const int64_t tiles = (num_key_tiles + splits - 1) / splits;
      const int64_t waves = (num_row_tiles * splits + slots - 1) / slots;
      constexpr int64_t kSplitCost = 2;  // start, drain and merge of a block, in key tiles
      const int64_t cost = waves * (tiles + kSplitCost);
      if (split_tiles == 0 || cost < best_waves_tiles) {
        best_waves_tiles = cost;
        split_tiles = tiles;
      }
    }
  }
  VerifyAttnPlan plan = {};
  plan.split_tokens = split_tiles * kKeyTile;
  plan.num_splits = (num_key_tiles + split_tiles - 1) / split_tiles;
  if (plan.num_splits > 1) {
    plan.workspace_bytes =
        plan.num_splits * args.batch * rows * (args.d_latent + 1) * static_cast<int64_t>(sizeof(float));
  }
  return plan;
}

int64_t verify_attn_flash_shared_bytes() { return sizeof(Shared<64, 512, 64>); }  // the largest

int launch_verify_attn_flash(const kdtree_verify_attn_args& args, void* stream) {
  return with_geometry(args, [&](auto latent, auto rope) {
    switch (row_tile(args)) {
      case 16:
        return launch_row_tile<16, latent.value, rope.value>(args, stream);
      case 32:
        return launch_row_tile<32, latent.value, rope.value>(args, stream);
      default:
        return launch_row_tile<64, latent.value, rope.value>(args, stream);
    }
  });
}

}  // namespace kdtree
