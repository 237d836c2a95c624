// tree_accept: the path along which the draft tree agrees with the target, by one or two kernels.
//
//   target[i] = given | argmax_v logits[i][v], of equals the lower v | the first v with sum_{w<=v} p_w > u_i
//   path = 0, then while a child of the last node holds its target: the first such child;  bonus = target[last]
//
// Work split. Targets from logits: a block a row and part of the vocabulary, sixteen bytes a load, several loads in
// flight; each block leaves its best as one 64-bit key that orders by value, then by lower token. Rows are split only
// while there are too few of them for the chip. A draw takes a block a row and three passes, over the largest logit,
// the sum of weights, and the running sum up to the token. The walk: a block a request; all threads load and check the
// tree, warp 0 walks, looking at 32 nodes at a time.
//
// Assumes: 16-byte aligned logits, though not rows (checked by the C interface); at most 1,025 nodes a request.
//
// A logit costs a maximum and a share of a comparison: the first token of eight that may be larger is looked for only
// when their maximum exceeds the thread's best, which happens a few times a row. Sums of weights are float64: in
// float32 the running sum of 160,000 tokens would give tokens to the wrong uniforms.

#include "common/indices.cuh"
#include "common/requests.cuh"
#include "tree_accept/tree_accept.cuh"

namespace kdtree {
namespace {

constexpr int kMostNodes = 1025;
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kChunk = 8;        // logits that a thread looks at together
constexpr int kChunksAhead = 4;  // loaded before the first is looked at
constexpr int kMostSplits = 16;
constexpr int64_t kLeastPart = 4096;  // of the vocabulary, worth a block
constexpr int kWalkThreads = 128;

// The value's order in the upper half, the token's complement in the lower: of equal values the lower token is larger.
__device__ __forceinline__ uint64_t key_of(float value, int64_t token) {
  const uint32_t bits = __float_as_uint(value + 0.0f);  // zeros of both signs are equal
  const uint32_t order = value != value ? 0xffffffffu : bits >> 31 ? ~bits : bits | 0x80000000u;
  return uint64_t{order} << 32 | ~static_cast<uint32_t>(token);
}

__device__ __forceinline__ bool is_number(uint64_t key) { return key >> 32 != 0xffffffffu; }
__device__ __forceinline__ int64_t token_of(uint64_t key) { return ~static_cast<uint32_t>(key); }

constexpr uint64_t kNotANumber = ~uint64_t{0};

// A key stands for NaN whatever token it names.
__device__ __forceinline__ uint64_t warp_max_key(uint64_t key) {
  const auto high = static_cast<uint32_t>(key >> 32);
  const uint32_t top = warp_max(high);
  return uint64_t{top} << 32 | warp_max(high == top ? static_cast<uint32_t>(key) : 0u);
}

// The logits of a row.
template <bool kFloat32>
struct Logits {
  const void* data;  // of the row

  __device__ __forceinline__ float at(int64_t i) const {
    if constexpr (kFloat32) return static_cast<const float*>(data)[i];
    return bf16_to_float(static_cast<const uint16_t*>(data)[i]);
  }

  // Eight from i on, which must be aligned to sixteen bytes.
  struct Chunk {
    uint4 words[kFloat32 ? 2 : 1];

    __device__ __forceinline__ float at(int e) const {
      const uint4& w = words[kFloat32 ? e / 4 : 0];
      if constexpr (kFloat32) {
        return __uint_as_float(e % 4 == 0 ? w.x : e % 4 == 1 ? w.y : e % 4 == 2 ? w.z : w.w);
      }
      const uint32_t pair = e / 2 == 0 ? w.x : e / 2 == 1 ? w.y : e / 2 == 2 ? w.z : w.w;
      return __uint_as_float(e % 2 == 0 ? pair << 16 : pair & 0xffff0000u);
    }
  };

  __device__ __forceinline__ Chunk chunk(int64_t i) const {
    constexpr int kWords = kFloat32 ? 2 : 1;
    const auto* const from =
        reinterpret_cast<const uint4*>(static_cast<const unsigned char*>(data) + i * (kFloat32 ? 4 : 2));
    Chunk chunk;
#pragma unroll
    for (int w = 0; w < kWords; ++w) chunk.words[w] = from[w];
    return chunk;
  }

  // The first index from `begin` on, before `end`, at which a chunk may be loaded.
  __device__ __forceinline__ int64_t aligned(int64_t begin, int64_t end) const {
    constexpr int kBytes = kFloat32 ? 4 : 2;
    const uintptr_t address = reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(begin * kBytes);
    return min(end, begin + static_cast<int64_t>((-address & 15) / kBytes));
  }
};

// The best logit that a thread has seen; it must see them with rising tokens.
struct Best {
  float value;
  int64_t token;

  __device__ __forceinline__ void consider(float v, int64_t at) {
    if (!(v <= value) && value == value) {
      value = v;
      token = at;
    }
  }
};

// Whether a row is a node of some request.
__device__ __forceinline__ bool is_live(const kdtree_tree_accept_args& args, int64_t row) {
  if (args.qo_indptr != nullptr) return row < load_index(args.qo_indptr, args.qo_indptr_type, args.batch);
  if (args.num_nodes == nullptr) return true;
  return row % args.max_q_len < args.num_nodes[row / args.max_q_len];
}

struct ReduceShared {
  uint64_t keys[kWarps];
  double sums[kWarps];
  int64_t token;
};

// The largest key of the block, in every thread.
__device__ uint64_t block_max(ReduceShared& shared, uint64_t key) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  key = warp_max_key(key);
  __syncthreads();  // what was there has been read
  if (threadIdx.x % 32 == 0) shared.keys[warp] = key;
  __syncthreads();
  uint64_t best = shared.keys[0];
  for (int other = 1; other < kWarps; ++other) best = max(best, shared.keys[other]);
  return best;
}

// The sum of the values of the threads before this one; `total` is that of all.
__device__ double block_sum_before(ReduceShared& shared, double value, double& total) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  double running = value;
  for (int offset = 1; offset < 32; offset *= 2) {
    const double below = __shfl_up_sync(0xffffffffu, running, static_cast<unsigned>(offset));
    if (lane >= offset) running += below;
  }
  __syncthreads();
  if (lane == 31) shared.sums[warp] = running;
  __syncthreads();
  double before = 0.0;
  total = 0.0;
  for (int other = 0; other < kWarps; ++other) {
    if (other == warp) before = total;
    total += shared.sums[other];
  }
  const double inclusive = __shfl_up_sync(0xffffffffu, running, 1u);
  return before + (lane == 0 ? 0.0 : inclusive);
}

// The best of logits [begin, end) as a key, in every thread of the block.
template <bool kFloat32>
__device__ uint64_t block_best(ReduceShared& shared, Logits<kFloat32> logits, int64_t begin, int64_t end) {
  const int thread = static_cast<int>(threadIdx.x);
  // Should nothing exceed -inf, the first token is the lowest of equals.
  Best best{-INFINITY, begin};
  const int64_t body = logits.aligned(begin, end);
  const int64_t chunks = (end - body) / kChunk;
  if (begin + thread < body) best.consider(logits.at(begin + thread), begin + thread);
  const auto look = [&](const auto& chunk, int64_t at) {
    float top = chunk.at(0);
#pragma unroll
    for (int e = 1; e < kChunk; ++e) top = max_nan(top, chunk.at(e));
    if (!(top <= best.value) && best.value == best.value) {
#pragma unroll
      for (int e = 0; e < kChunk; ++e) best.consider(chunk.at(e), at + e);
    }
  };
  int64_t c = thread;
  for (; c + (kChunksAhead - 1) * kThreads < chunks; c += kChunksAhead * kThreads) {
    typename Logits<kFloat32>::Chunk loaded[kChunksAhead];
#pragma unroll
    for (int i = 0; i < kChunksAhead; ++i) loaded[i] = logits.chunk(body + (c + i * kThreads) * kChunk);
#pragma unroll
    for (int i = 0; i < kChunksAhead; ++i) look(loaded[i], body + (c + i * kThreads) * kChunk);
  }
  for (; c < chunks; c += kThreads) look(logits.chunk(body + c * kChunk), body + c * kChunk);
  const int64_t tail = body + chunks * kChunk + thread;
  if (tail < end) best.consider(logits.at(tail), tail);
  return block_max(shared, key_of(best.value, best.token));
}

template <bool kFloat32>
__global__ void __launch_bounds__(kThreads) argmax_kernel(kdtree_tree_accept_args args) {
  KDTREE_DYNAMIC_SHARED(ReduceShared, shared);
  allow_successor();
  const int64_t row = blockIdx.x;
  if (!is_live(args, row)) return;
  const int64_t part = (args.vocab_size + gridDim.y - 1) / gridDim.y;
  const int64_t begin = min(args.vocab_size, part * blockIdx.y);
  const int64_t end = min(args.vocab_size, begin + part);
  const int64_t offset = row * args.logits_stride * (kFloat32 ? 4 : 2);
  const Logits<kFloat32> logits{static_cast<const unsigned char*>(args.logits) + offset};
  const uint64_t best = begin < end ? block_best(shared, logits, begin, end) : 0;
  if (threadIdx.x == 0) static_cast<uint64_t*>(args.workspace)[row * gridDim.y + blockIdx.y] = best;
}

template <bool kFloat32>
__global__ void __launch_bounds__(kThreads) sample_kernel(kdtree_tree_accept_args args) {
  KDTREE_DYNAMIC_SHARED(ReduceShared, shared);
  allow_successor();
  const int64_t row = blockIdx.x;
  if (!is_live(args, row)) return;
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t vocab = args.vocab_size;
  const int64_t offset = row * args.logits_stride * (kFloat32 ? 4 : 2);
  const Logits<kFloat32> logits{static_cast<const unsigned char*>(args.logits) + offset};
  auto* const result = static_cast<uint64_t*>(args.workspace) + row;
  const float uniform = args.uniforms[row];
  const uint64_t best = block_best(shared, logits, 0, vocab);
  const float top = is_number(best) ? logits.at(token_of(best)) : NAN;
  if (!(uniform >= 0.0f && uniform < 1.0f) || !(top > -INFINITY && top < INFINITY)) {
    if (thread == 0) *result = kNotANumber;
    return;
  }
  // Below the normal range of float32 devices differ.
  const auto weight = [&](int64_t v) {
    const float w = expf((logits.at(v) - top) / args.temperature);
    return w < 0x1p-126f ? 0.0 : double{w};
  };

  double mine = 0.0, total = 0.0;
  for (int64_t v = thread; v < vocab; v += kThreads) mine += weight(v);
  block_sum_before(shared, mine, total);
  const double wanted = double{uniform} * total;

  // The running sum goes thread by thread in the order of tokens. It was added up in another order than the total, so
  // that it may never exceed what is wanted: then the last token that has a weight is drawn.
  if (thread == 0) shared.token = -1;
  double before = 0.0;
  for (int64_t first = 0; first < vocab; first += kThreads * kChunk) {
    const int64_t from = min(vocab, first + thread * kChunk);
    const int64_t to = min(vocab, from + kChunk);
    double sum = 0.0;
    int64_t last = -1;
    for (int64_t v = from; v < to; ++v) {
      const double w = weight(v);
      sum += w;
      if (w > 0.0) last = v;
    }
    double tile = 0.0;
    double running = before + block_sum_before(shared, sum, tile);
    before += tile;
    const bool exceeds = last >= 0 && running + sum > wanted;
    const auto winner = block_max(shared, exceeds ? static_cast<uint64_t>(kThreads - thread) : 0);
    if (winner != 0) {
      if (static_cast<uint64_t>(kThreads - thread) == winner) {
        for (int64_t v = from; v < to; ++v) {
          const double w = weight(v);
          running += w;
          if (w > 0.0 && running > wanted) {
            last = v;
            break;
          }
        }
        shared.token = last;
      }
      break;
    }
    const uint64_t last_of_all = block_max(shared, static_cast<uint64_t>(last + 1));
    if (thread == 0 && last_of_all != 0) shared.token = static_cast<int64_t>(last_of_all) - 1;
  }
  __syncthreads();
  if (thread == 0) *result = key_of(0.0f, shared.token);
}

struct WalkShared {
  int64_t tokens[kMostNodes];
  int64_t targets[kMostNodes];
  int parents[kMostNodes];       // or first children
  int next_sibling[kMostNodes];  // without parents
  int path[kMostNodes];
  int path_len;
};

// Follows the tree from the root; warp 0. The tree has been checked, so that node numbers rise along the way.
__device__ int walk(WalkShared& shared, int nodes, bool has_parents, int lane) {
  int here = 0, length = 0;
  for (;;) {
    if (lane == 0) shared.path[length] = here;
    ++length;
    const int64_t target = shared.targets[here];
    int child = -1;
    if (has_parents) {
      for (int from = here + 1; from < nodes && child < 0; from += 32) {
        const int node = from + lane;
        const bool match = node < nodes && shared.parents[node] == here && shared.tokens[node] == target;
        const uint32_t lanes = __ballot_sync(0xffffffffu, match);
        if (lanes != 0) child = from + __ffs(static_cast<int>(lanes)) - 1;
      }
    } else {
      child = shared.parents[here];
      while (child >= 0 && shared.tokens[child] != target) child = shared.next_sibling[child];
    }
    if (child < 0) return length;
    here = child;
  }
}

__global__ void __launch_bounds__(kWalkThreads) tree_accept_kernel(kdtree_tree_accept_args args, int splits) {
  KDTREE_DYNAMIC_SHARED(WalkShared, shared);
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t request = blockIdx.x;
  await_predecessor();

  const auto [first, nodes, size_status] = rows_of(args, request);
  int flags = size_status;
  // The padded layout's rows behind the nodes.
  for (int64_t i = nodes + thread; args.qo_indptr == nullptr && i < args.max_q_len; i += kWalkThreads) {
    store_index(args.node_targets, args.token_type, first + i, -1);
    if (args.predicts != nullptr) args.predicts[first + i] = 0;
  }

  bool bad_number = false, bad_tree = false;
  for (int node = thread; node < nodes; node += kWalkThreads) {
    const int64_t row = first + node;
    shared.tokens[node] = load_index(args.tokens, args.token_type, row);
    int64_t target;
    if (args.target == KDTREE_TARGET_TOKENS) {
      target = load_index(args.target_tokens, args.token_type, row);
    } else {
      uint64_t best = 0;
      for (int part = 0; part < splits; ++part) {
        best = max(best, static_cast<const uint64_t*>(args.workspace)[row * splits + part]);
      }
      bad_number = bad_number || !is_number(best);
      target = is_number(best) ? token_of(best) : -1;
    }
    shared.targets[node] = target;
    store_index(args.node_targets, args.token_type, row, target);
    if (args.parents != nullptr) {
      const int parent = args.parents[row];
      bad_tree = bad_tree || (node == 0 ? parent >= 0 : parent < 0 || parent >= node);
      shared.parents[node] = parent;
    } else {
      const int64_t child = load_index(args.retrive_next_token, args.index_type, row);
      const int64_t sibling = load_index(args.retrive_next_sibling, args.index_type, row);
      const auto is_link = [&](int64_t to) { return to == -1 || (to > node && to < nodes); };
      bad_tree = bad_tree || !is_link(child) || !is_link(sibling);
      shared.parents[node] = static_cast<int>(child);
      shared.next_sibling[node] = static_cast<int>(sibling);
    }
    if (args.predicts != nullptr) args.predicts[row] = 0;
  }
  if (__syncthreads_or(bad_number ? 1 : 0) != 0) flags |= KDTREE_NOT_A_NUMBER;
  if (__syncthreads_or(bad_tree ? 1 : 0) != 0) flags |= KDTREE_BAD_TREE;

  if (thread < 32) {
    const int length = nodes > 0 && flags == 0 ? walk(shared, nodes, args.parents != nullptr, thread) : 0;
    if (thread == 0) shared.path_len = length;
  }
  __syncthreads();
  int length = shared.path_len;
  if (length > args.max_path) {
    flags |= KDTREE_PATH_TOO_LONG;
    length = 0;
  }
  for (int step = thread; step < args.max_path; step += kWalkThreads) {
    const int64_t at = request * args.max_path + step;
    const int node = step < length ? shared.path[step] : -1;
    args.path[at] = node;
    if (args.accept_index != nullptr) args.accept_index[at] = node < 0 ? -1 : static_cast<int32_t>(first + node);
    if (args.predicts != nullptr && node >= 0) {
      args.predicts[first + node] = static_cast<int32_t>(shared.targets[node]);
    }
  }
  if (thread == 0) {
    args.path_len[request] = length;
    store_index(args.bonus, args.token_type, request, length > 0 ? shared.targets[shared.path[length - 1]] : -1);
    if (args.accept_token_num != nullptr) args.accept_token_num[request] = max(length - 1, 0);
    args.status[request] = flags;
  }
}

// Parts of the vocabulary that different blocks look at.
int num_splits(const kdtree_tree_accept_args& args) {
  if (args.target != KDTREE_TARGET_ARGMAX) return 1;
  const int64_t resident = int64_t{max(multiprocessor_count(), 1)} * 8;  // 2048 threads a multiprocessor
  const int64_t wanted = min(resident / args.total_q, args.vocab_size / kLeastPart);
  return static_cast<int>(min(max(wanted, int64_t{1}), int64_t{kMostSplits}));
}

}  // namespace

int64_t tree_accept_shared_bytes() { return sizeof(WalkShared); }

int64_t tree_accept_workspace_bytes(const kdtree_tree_accept_args& args) {
  if (args.target == KDTREE_TARGET_TOKENS) return 0;
  return args.total_q * num_splits(args) * static_cast<int64_t>(sizeof(uint64_t));
}

int launch_tree_accept(const kdtree_tree_accept_args& args, void* stream) {
  const int splits = num_splits(args);
  const dim3 walk_grid(static_cast<unsigned>(args.batch));
  if (args.target == KDTREE_TARGET_TOKENS) {
    return launch(tree_accept_kernel, walk_grid, dim3(kWalkThreads), sizeof(WalkShared), stream, args, splits);
  }
  const bool wide = args.logits_type == KDTREE_FLOAT32;
  const auto target = args.target == KDTREE_TARGET_ARGMAX ? (wide ? argmax_kernel<true> : argmax_kernel<false>)
                                                          : (wide ? sample_kernel<true> : sample_kernel<false>);
  const dim3 grid(static_cast<unsigned>(args.total_q), static_cast<unsigned>(splits));
  const int failed = launch(target, grid, dim3(kThreads), sizeof(ReduceShared), stream, args);
  if (failed != 0) return failed;
  return launch_after(tree_accept_kernel, walk_grid, dim3(kWalkThreads), sizeof(WalkShared), stream, args, splits);
}

}  // namespace kdtree
