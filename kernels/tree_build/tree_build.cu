// tree_build: the draft tree of the most probable prefixes, best first (DDTree).
//
//   score(first child of p)  = score(p) + log_probs[depth(p)][0]
//   score(next sibling of c) = score(c) - log_probs[d][rank] + log_probs[d][rank + 1]     in float64, in this order
//
// The heap of the usual formulation is not needed: below a node at most one candidate waits, the sibling after the last
// child that was made. So there is one candidate a node, kept with it, and a step takes the best of all, replaces it by
// its sibling and adds the new node's first child.
//
// Work split: a block a request. All warps check the rows; warp 0 makes the nodes, lane l keeping the candidates of
// nodes l, l + 32, ..., those of the first 64 nodes in registers; all warps write the tree.
//
// A step finds the largest score by a reduction of the upper halves of keys that order as the scores do. When that does
// not settle it, which is rare in practice, lower halves and then rank tuples do, packed seven bits a rank, so that
// words compare as tuples do and a tuple comes before what it begins.
//
// Assumes: at most 1,025 nodes, 32 depths, 64 candidates a depth (checked by the C interface). The order of nodes is a
// chain of as many steps as there are nodes; nothing is sorted in advance, because the rounding of sibling scores may
// lift one above the sibling before it, and then the order of steps is not that of the scores.
//
// History: a step is a chain of about a hundred dependent instructions and costs what they are; nothing else counts.
// With tuples and links kept in the loop, exact comparisons wherever two keys meet, and scores worked out when they
// were needed, the tree of 64 nodes took 40 us on an H200; without them, 20; with the first candidates in
// registers, 17. Past 64 nodes a lane looks through its candidates in shared memory, and a step grows with the tree.

#include "common/indices.cuh"
#include "tree_build/tree_build.cuh"

namespace kdtree {
namespace {

constexpr int kMostNodes = 1025;
constexpr int kSlots = 1088;  // a lane looks at its nodes two by two
constexpr int kMostDepth = 32;
constexpr int kMostWidth = 64;
constexpr int kThreads = 256;

constexpr int kRankBits = 7;
constexpr int kRanksPerWord = 9;
constexpr int kTupleWords = (kMostDepth + kRanksPerWord - 1) / kRanksPerWord;

// A prefix: a parent node, the rank below it, the depth counted from 0, and the sibling before it where there is one.
// Neither node is the last that there may be, so that ten bits hold them. What would run over a field has no score.
struct Prefix {
  uint32_t packed;

  __device__ static Prefix first_child(int parent, int depth) {
    return {static_cast<uint32_t>(parent) | static_cast<uint32_t>(depth) << 16};
  }
  __device__ Prefix next_sibling(int own_node) const {
    return {((packed & 0x1fffff) + (1u << 10)) | static_cast<uint32_t>(own_node) << 21};
  }
  __device__ int parent() const { return static_cast<int>(packed & 0x3ff); }
  __device__ int rank() const { return static_cast<int>(packed >> 10 & 0x3f); }
  __device__ int depth() const { return static_cast<int>(packed >> 16 & 0x1f); }
  __device__ int previous() const { return static_cast<int>(packed >> 21); }
};

struct Shared {
  uint64_t keys[kSlots];                     // of the candidate below a node
  uint64_t tuples[kMostNodes][kTupleWords];  // ranks on the way to a node, of the first num_tuples nodes
  Prefix candidates[kSlots];
  Prefix nodes[kMostNodes];
  int16_t first_child[kMostNodes];
  int16_t next_sibling[kMostNodes];
  double log_probs[kMostDepth + 1][kMostWidth + 1];  // -inf behind the last candidate and below the last row
  int64_t tokens[kMostDepth][kMostWidth];
  int flags[kMostDepth];  // what is wrong with a row
  int num_tuples;
  int num_nodes;
};

// Orders as the scores. A sum that began with 0 is never the negative zero.
__device__ __forceinline__ uint64_t key_of(double score) {
  const auto bits = static_cast<uint64_t>(__double_as_longlong(score));
  return bits >> 63 ? ~bits : bits | uint64_t{1} << 63;
}

__device__ __forceinline__ double score_of(uint64_t key) {
  return __longlong_as_double(static_cast<long long>(key >> 63 ? key ^ uint64_t{1} << 63 : ~key));
}

__device__ __forceinline__ uint32_t upper(uint64_t key) { return static_cast<uint32_t>(key >> 32); }

constexpr uint32_t kNone = 0x000fffff;  // upper half of -inf's key; a key of 0 is below it

__device__ __forceinline__ uint64_t tuple_word(const Shared& shared, Prefix prefix, int word) {
  const int depth = prefix.depth();
  const uint64_t above = shared.tuples[prefix.parent()][word];
  if (depth / kRanksPerWord != word) return above;
  const int shift = kRankBits * (kRanksPerWord - 1 - depth % kRanksPerWord);
  return above | static_cast<uint64_t>(prefix.rank() + 1) << shift;
}

__device__ bool tuple_less(const Shared& shared, Prefix a, Prefix b) {
  for (int word = 0; word < kTupleWords; ++word) {
    const uint64_t left = tuple_word(shared, a, word);
    const uint64_t right = tuple_word(shared, b, word);
    if (left != right) return left < right;
  }
  return false;
}

// The node below which the best of all candidates is, by everything that may settle it; the warp works together. Out of
// line, or the usual step would not fit the instruction cache.
__device__ __attribute__((noinline)) int settle(Shared& shared, int count, int lane) {
  __syncwarp();
  for (int node = shared.num_tuples; node < count; ++node) {
    if (lane < kTupleWords) shared.tuples[node][lane] = tuple_word(shared, shared.nodes[node], lane);
    __syncwarp();
  }
  if (lane == 0) shared.num_tuples = count;

  int best = lane;
  for (int node = lane + 32; node < count; node += 32) {
    const uint64_t key = shared.keys[node], other = shared.keys[best];
    if (key > other || (key == other && tuple_less(shared, shared.candidates[node], shared.candidates[best]))) {
      best = node;
    }
  }
  const uint64_t key = shared.keys[best];
  const uint32_t top = warp_max(upper(key));
  bool among = upper(key) == top;
  const uint32_t top_lower = warp_max(among ? static_cast<uint32_t>(key) : 0u);
  among = among && static_cast<uint32_t>(key) == top_lower;
  for (int half = 0; half < 2 * kTupleWords; ++half) {
    const uint64_t word = among ? tuple_word(shared, shared.candidates[best], half / 2) : ~uint64_t{0};
    const auto part = static_cast<uint32_t>(half % 2 == 0 ? word >> 32 : word);
    const uint32_t least = warp_min(part);
    among = among && part == least;
  }
  const uint32_t lanes = __ballot_sync(0xffffffffu, among);
  return __shfl_sync(0xffffffffu, best, __ffs(static_cast<int>(lanes)) - 1);
}

// What is wrong with a row, as kdtree_request_status; the warp works together. A lane's tokens are those of candidates
// lane and lane + 32.
__device__ int row_flags(int64_t low, int64_t high, const double* log_probs, int width, int lane) {
  int flags = 0;
  for (int c = lane; c < width; c += 32) {
    const double value = log_probs[c];
    if (!(value < INFINITY)) flags |= KDTREE_NOT_A_NUMBER;
    if (c > 0 && value > log_probs[c - 1]) flags |= KDTREE_RISING;
  }
  for (int c = 0; c + 1 < width; ++c) {
    const int64_t other = __shfl_sync(0xffffffffu, c < 32 ? low : high, c % 32);
    if ((lane > c && lane < width && low == other) || (lane + 32 > c && lane + 32 < width && high == other)) {
      flags |= KDTREE_REPEATED_TOKEN;
    }
  }
  int all = 0;
  for (int flag = KDTREE_NOT_A_NUMBER; flag <= KDTREE_REPEATED_TOKEN; flag *= 2) {
    if (__any_sync(0xffffffffu, (flags & flag) != 0)) all |= flag;
  }
  return all;
}

// The candidates of a lane's nodes: the first two in registers, the others in shared memory. And of the best of them
// the keys of what takes its place once it is made.
struct Candidates {
  uint64_t near_keys[2];
  Prefix near[2];
  uint64_t key, sibling, child;
  double own, next, below;  // log-probabilities of the best candidate, its sibling and its first child
  Prefix prefix;
  bool tied;  // the lane has another of this key

  // The candidate below `node`, for the lane that keeps it.
  __device__ __forceinline__ void put(Shared& shared, bool mine, int node, uint64_t its_key, Prefix its_prefix) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      near_keys[i] = mine && node / 32 == i ? its_key : near_keys[i];
      near[i] = mine && node / 32 == i ? its_prefix : near[i];
    }
    if (mine && node >= 64) {
      shared.keys[node] = its_key;
      shared.candidates[node] = its_prefix;
    }
  }

  __device__ __forceinline__ void consider(uint64_t other, Prefix candidate) {
    tied = other == key || (tied && other < key);
    prefix = other > key ? candidate : prefix;
    key = other > key ? other : key;
  }

  // Finds the best below nodes up to `last`.
  __device__ __forceinline__ void find(const Shared& shared, int last, int lane) {
    key = near_keys[0];
    prefix = near[0];
    tied = false;
    consider(near_keys[1], near[1]);
    for (int first = 64; first <= last; first += 64) {
#pragma unroll
      for (int node = first + lane; node < first + lane + 64; node += 32) {
        consider(shared.keys[node], shared.candidates[node]);
      }
    }
    take(shared, key, prefix);
  }

  __device__ __forceinline__ void take(const Shared& shared, uint64_t its_key, Prefix its_prefix) {
    key = its_key;
    prefix = its_prefix;
    const double* const row = shared.log_probs[prefix.depth()];
    own = row[prefix.rank()];
    next = row[prefix.rank() + 1];
    below = row[kMostWidth + 1];
  }

  __device__ __forceinline__ void look_ahead() {
    const double score = score_of(key);
    sibling = key_of(score - own + next);
    child = key_of(score + below);
  }
};

// Makes nodes until `most` are there or no candidate is left; warp 0. The root is there.
__device__ int grow(Shared& shared, int most, int lane) {
  Candidates best{};
  best.put(shared, lane == 0, 0, key_of(0.0 + shared.log_probs[0][0]), Prefix::first_child(0, 0));
  best.find(shared, 0, lane);
  best.look_ahead();
  uint32_t top = warp_max(upper(best.key));
  int count = 1;
  for (; count < most && top > kNone; ++count) {
    const bool among = upper(best.key) == top;
    const uint32_t lanes = __ballot_sync(0xffffffffu, among);
    const uint32_t ties = __ballot_sync(0xffffffffu, among && best.tied);
    int owner = __ffs(static_cast<int>(lanes)) - 1;
    if (((lanes & (lanes - 1)) | ties) != 0) {
      for (int i = 0; i < 2; ++i) {
        shared.keys[lane + 32 * i] = best.near_keys[i];
        shared.candidates[lane + 32 * i] = best.near[i];
      }
      const int node = settle(shared, count, lane);
      owner = node % 32;
      if (lane == owner) {
        best.take(shared, shared.keys[node], shared.candidates[node]);
        best.look_ahead();
      }
    }
    const Prefix made{__shfl_sync(0xffffffffu, best.prefix.packed, owner)};
    const uint64_t child = __shfl_sync(0xffffffffu, best.child, owner);
    const bool keeps = lane == count % 32;
    if (keeps) shared.nodes[count] = made;
    best.put(shared, lane == owner, made.parent(), best.sibling, made.next_sibling(count));
    best.put(shared, keeps, count, child, Prefix::first_child(count, made.depth() + 1));
    best.find(shared, count, lane);
    top = warp_max(upper(best.key));
    best.look_ahead();
  }
  return count;
}

// Zeroes `bytes` bytes; the block works together.
__device__ void fill_zero(void* data, int64_t bytes) {
  auto* const first = static_cast<unsigned char*>(data);
  const int64_t head = min(bytes, static_cast<int64_t>(-reinterpret_cast<uintptr_t>(first) & 15));
  const int64_t vectors = (bytes - head) / 16;
  for (int64_t i = threadIdx.x; i < head; i += kThreads) first[i] = 0;
  auto* const body = reinterpret_cast<uint4*>(first + head);
  for (int64_t i = threadIdx.x; i < vectors; i += kThreads) body[i] = make_uint4(0, 0, 0, 0);
  for (int64_t i = head + vectors * 16 + threadIdx.x; i < bytes; i += kThreads) first[i] = 0;
}

__global__ void __launch_bounds__(kThreads) tree_build_kernel(kdtree_tree_build_args args) {
  KDTREE_DYNAMIC_SHARED(Shared, shared);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int64_t request = blockIdx.x;
  const int capacity = static_cast<int>(args.max_nodes);

  const int budget = args.budgets == nullptr ? capacity - 1 : args.budgets[request];
  int depths = args.num_depths == nullptr ? static_cast<int>(args.max_depth) : args.num_depths[request];
  const int width = args.widths == nullptr ? static_cast<int>(args.max_width) : args.widths[request];
  const bool fits = budget >= 0 && budget < capacity && depths >= 0 && depths <= args.max_depth && width >= 1 &&
                    width <= args.max_width;
  int status = fits ? KDTREE_REQUEST_OK : KDTREE_SIZE_OUT_OF_RANGE;
  if (!fits) depths = 0;

  const int64_t rows = request * args.max_depth;
  const int64_t root_token = load_index(args.root_tokens, args.token_type, request);
  const int64_t seq_len = args.seq_lens == nullptr ? 0 : load_index(args.seq_lens, args.seq_lens_type, request);
  for (int depth = thread / 32; depth < depths; depth += kThreads / 32) {
    const auto token = [&](int c) {
      if (c >= width) return int64_t{0};
      const int64_t id = load_index(args.token_ids, args.token_type, (rows + depth) * args.max_width + c);
      shared.tokens[depth][c] = id;
      return id;
    };
    const int64_t low = token(lane), high = token(lane + 32);
    const float* const log_probs = args.log_probs + (rows + depth) * args.max_width;
    for (int c = lane; c <= width; c += 32) {
      shared.log_probs[depth][c] = c < width ? double{log_probs[c]} : -INFINITY;
    }
    __syncwarp();
    const int flags = row_flags(low, high, shared.log_probs[depth], width, lane);
    if (lane == 0) shared.flags[depth] = flags;
  }
  for (int node = thread; node < min(kSlots, capacity + 63); node += kThreads) {
    shared.keys[node] = 0;
    shared.candidates[node] = Prefix{0};
  }
  for (int node = thread; node < capacity; node += kThreads) {
    shared.first_child[node] = -1;
    shared.next_sibling[node] = -1;
  }
  if (thread < kTupleWords) shared.tuples[0][thread] = 0;
  if (thread == 0) shared.num_tuples = 1;
  __syncthreads();
  for (int depth = 0; depth < depths; ++depth) {
    if (shared.flags[depth] != 0) {
      status |= shared.flags[depth];
      depths = depth;
    }
  }
  if (thread < 32) {
    if (lane == 0) shared.log_probs[depths][0] = -INFINITY;
    __syncwarp();
    const int made = grow(shared, fits ? budget + 1 : 1, lane);
    if (lane == 0) shared.num_nodes = made;
  }

  const int64_t first = request * capacity;
  const int64_t words = (capacity + 63) / 64;
  if (args.visibility != nullptr) fill_zero(args.visibility + first * capacity, int64_t{capacity} * capacity);
  if (args.visibility_bits != nullptr) fill_zero(args.visibility_bits + first * words, capacity * words * 8);
  __syncthreads();

  const int count = shared.num_nodes;
  for (int node = 1 + thread; node < count; node += kThreads) {
    const Prefix prefix = shared.nodes[node];
    int16_t* const link =
        prefix.rank() == 0 ? &shared.first_child[prefix.parent()] : &shared.next_sibling[prefix.previous()];
    *link = static_cast<int16_t>(node);
  }
  __syncthreads();
  for (int node = thread; node < capacity; node += kThreads) {
    const bool below = node > 0 && node < count;
    const Prefix prefix = below ? shared.nodes[node] : Prefix{0};
    const int depth = below ? prefix.depth() + 1 : 0;
    const int64_t row = first + node;
    store_index(args.tokens, args.token_type, row, below ? shared.tokens[depth - 1][prefix.rank()] : root_token);
    args.parents[row] = below ? prefix.parent() : -1;
    if (args.depths != nullptr) args.depths[row] = depth;
    store_index(args.positions, args.index_type, row, seq_len + depth);
    store_index(args.retrive_index, args.index_type, row, row);
    store_index(args.retrive_next_token, args.index_type, row, shared.first_child[node]);
    store_index(args.retrive_next_sibling, args.index_type, row, shared.next_sibling[node]);
    // From the node up to the root; numbers fall on the way, so that a word is complete when it is left.
    uint64_t word = 0;
    for (int seen = node, left = depth;; seen = shared.nodes[seen].parent(), --left) {
      if (args.visibility != nullptr) args.visibility[row * capacity + seen] = 1;
      word |= uint64_t{1} << seen % 64;
      const int next = left > 0 ? shared.nodes[seen].parent() : -1;
      if (args.visibility_bits != nullptr && (next < 0 || next / 64 != seen / 64)) {
        args.visibility_bits[row * words + seen / 64] = word;
        word = 0;
      }
      if (left == 0) break;
    }
  }
  if (thread == 0) {
    args.num_nodes[request] = count;
    args.status[request] = status;
  }
}

}  // namespace

int64_t tree_build_shared_bytes() { return sizeof(Shared); }

int launch_tree_build(const kdtree_tree_build_args& args, void* stream) {
  return launch(tree_build_kernel, dim3(static_cast<unsigned>(args.batch)), dim3(kThreads), sizeof(Shared), stream,
                args);
}

}  // namespace kdtree
