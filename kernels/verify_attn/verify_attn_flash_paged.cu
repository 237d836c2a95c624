// verify_attn, paged: tree-verify attention over a paged latent cache on the tensor cores, bfloat16, ragged batches.
//
//   per key tile:  S = Q K^T,  P = 2^(c S - m),  l += rowsum P,  O += bf16(P) V     c = sm_scale log2(e), V = K[:,
//   :512] at the end:    out = O / rowsum bf16(P),  lse = (m + log2 l) ln 2;  splits of a row are joined by a second
//   kernel
//
// The reference m is not the maximum: it moves only when a score exceeds it by 8 (a factor of 256), which a vote of the
// group finds out, so that the common tile has no shuffle in it. out is divided by the sum of the weights as they were
// rounded, lse takes the exact ones.
//
// Work split: (node, head) pairs of a request are its rows, packed as node * num_heads + head, 64 (or 32, or 16) to a
// block; its keys are cut into pieces, and the pieces of all requests are dealt to one block an SM. Every block makes
// the plan for itself from the index arrays: nothing is read by the host, and a kernel for it would cost more. 256
// threads are two groups of four warps; a warp has its group's 32 rows times a quarter of the 16-dimension steps for
// the scores (queries in 72 registers), which are added through shared memory, and times a quarter of the columns for
// the output (128 registers). Keys come 16 at a time through a ring of four; V is read from the same rows. With 64 rows
// each group has half of them and group 1 is half a tile late, so that one group's softmax meets the other's products;
// with fewer the groups take alternate tiles of the same rows and join at the end. Partial results are half precision,
// scaled for each row and half of its columns.
//
// Shared memory, 512/64: ring 73,728 + exchange of partial scores 16,384 + weights 2,048 + masks, stats, plan = 100,816
// of sm_120's 101,376 bytes; the queries pass through ring and exchange before the loop, the output after it.
//
// Assumes: strides and addresses that are multiples of 16 bytes (checked by the C interface). Index arrays may hold
// anything: a request that does not fit the capacities is left out, a slot outside the pool is a row of zeros, entries
// behind the live part are not read. A hidden key that is not finite is found by its score, and its tile's values are
// then taken as finite: who sees it has a weight that is not.
//
// A request's bits do not depend on the batch when split_tokens is given. Splits are added in eight classes in order.
//
// Tried, on one H200, microseconds at (batch 1, 64 nodes, 64 x 128 heads, 65,536 keys) and (16, 8, 8, 8,192):
//   4,537  119   three row tiles in one kernel: 24 to 384 bytes spilled, queries' registers fight with the other tiles'
//   4,051  112   a kernel for each row tile; loop values in shared memory instead of spilled
//   3,987  115   end of a basic block between the products: K fragments four products ahead instead of none
//   3,529  101   the slot's shift and mask done at the copy, not at the load: 18 % of all samples waited there
//   3,512   94   one straight copy address (a settled pointer) instead of five; bounds read before the barrier
//   3,520   89   through shared memory row by row at the end, half precision partials: code that runs once costs about
//                a dozen clocks an instruction to fetch, and per-accumulator code is a thousand of them
//   3,517   83   full tiles stay in the fast copy to the end of a piece; no rescaling of nothing at the first tile
//   3,707   84   masks of 16 bits a row and tile: the general copy shrinks by 1,900 instructions, short pieces gain,
//   but
//                ptxas lays the loop out worse; kept, since it is what spills on neither architecture
//   4,129   89   one copy of the softmax with branches for masks: blocks too small to hide the exchange's latency; lost
//   3,600-4,005  twenty orderings of the same loop: two instructions' difference moves the time by 10 %

#include "verify_attn/geometry.cuh"
#include "verify_attn/verify_attn_paged.cuh"

namespace kdtree {
namespace {

using Args = kdtree_verify_attn_paged_args;

constexpr int kThreads = 256;
constexpr int kGroupThreads = 128;
constexpr int kTileKeys = kVerifyAttnPagedKeyTile;
constexpr int kMaxBatch = 512;
constexpr int kMaxNodes = 256;
constexpr int kMaskWords = kMaxNodes / 64;
constexpr int kMaskTiles = kMaxNodes / kTileKeys + 1;
constexpr int kMostRows = 64;
constexpr int kRounds = 2;  // a row is finished, kept and joined in two halves of its columns
constexpr int kLineBytes = 128;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
// Weights may exceed 1 by this power of two before a row's reference is moved.
constexpr float kSlackLog2 = 8.0f;

// A request as its device arrays describe it, cut to what the capacities allow.
struct Request {
  int first_token;
  int nodes;
  int prefix;       // keys before the drafts
  int mask_prefix;  // columns before the drafts in a full mask
  int first_index;  // in kv_indices
};

// The part of a request that a block works on.
struct Piece {
  Request request;
  int batch_idx;
  int keys;       // of the whole request
  int first_row;  // of the request's rows, node * num_heads + head
  int live_rows;
  int first_tile;
  int tiles;
  int full_tiles;  // of them, counted from the first: those that neither drafts nor a cap touches
  int fast_end;    // tiles before it are full ones, and so are those that are sent for meanwhile
  int last_key;    // of the prefix
  int mask_tile;   // the first that has a mask, counted from the piece's first
  int partial;     // first row of the partial results, negative: the result itself
};

// How the batch is cut; the same in every block. The two lists stay unused where there is one request.
struct Plan {
  int first_piece[kMaxBatch + 1];  // of each request
  int first_partial[kMaxBatch];    // row of the partial results; requests in one piece have none
  int split_tiles;                 // key tiles of a piece at most
  int next_piece;                  // of this block
};

template <int kLatent_, int kRope_>
struct Geometry {
  static constexpr int kLatent = kLatent_;
  static constexpr int kChunks = (kLatent_ + kRope_) / 8;  // 16-byte pieces of a row
  static constexpr int kLines = (kChunks + 7) / 8;         // its 128-byte lines in shared memory
  static constexpr int kRowBytes = kLines * kLineBytes;
  static constexpr int kTileBytes = kTileKeys * kRowBytes;
  static constexpr int kOutTiles = kLatent_ / 32;  // 8-column tiles of a warp: a quarter of the columns
};

// A row in a round: the first or the second half of what each quarter's warp holds, quarter by quarter.
template <class G>
struct Columns {
  static constexpr int kRound = G::kLatent / kRounds;  // columns of a round
  static constexpr int kQuarter = kRound / 4;          // of them, of a quarter
  static constexpr int kPitch = kRound + 8;            // floats between rows in shared memory: no bank conflict

  // Of the result, for column `place` of a round; eight in a row stay so.
  static __device__ __forceinline__ int column(int round, int place) {
    return place / kQuarter * (G::kLatent / 4) + round * kQuarter + place % kQuarter;
  }
};

// The rows that a block works on: kWide, 64 of them, half by each of its groups; else 16 * kTiles, all by both groups,
// which take alternate key tiles. A time is that of a key tile in microseconds as measured on one H200; only their
// ratios matter, and those to the constants below.
struct WideRows {
  static constexpr bool kWide = true;
  static constexpr int kTiles = 2;  // of 16 rows, a group
  static constexpr int kRows = 64;
  static constexpr float kTime = 0.8f;
};

template <int kTiles_>
struct NarrowRows {
  static constexpr bool kWide = false;
  static constexpr int kTiles = kTiles_;
  static constexpr int kRows = 16 * kTiles_;
  static constexpr float kTime = kTiles_ == 2 ? 0.5f : 0.35f;
};

constexpr float kPieceTime = 4.0f;  // of a piece besides its key tiles
constexpr float kMergeTime = 3.0f;
constexpr float kPartialRowTime = 2 * 1024.0f / 3e6f;  // to write one and read it again

template <class G>
struct Shared {
  unsigned char ring[4][G::kTileBytes];
  unsigned char exchange[2][4][4][512];  // partial scores by group, owner, source
  unsigned char weights[2][4][2][128];   // bf16 8x8 matrices by group, row block, key half
  float row_scale[kMostRows];
  uint16_t tile_masks[kMaskTiles][kMostRows];  // which keys of a tile a row sees, from the first that is not all prefix
  union {
    uint64_t words[kMostRows][kMaskWords];  // at a piece's begin: what its nodes see of each other
    float4 row_stats[kMostRows];            // at its end: reference, sum, divisor; 32 of each group
  };
  Piece piece;  // what is under way; here because it would cost registers
  Plan plan;
};

__device__ __forceinline__ int64_t read_index(const void* indices, int32_t type, int64_t i) {
  return type == KDTREE_INT64 ? static_cast<const int64_t*>(indices)[i] : static_cast<const int32_t*>(indices)[i];
}

__device__ __forceinline__ Request read_request(const Args& args, int b) {
  Request request = {};
  const int64_t begin = read_index(args.qo_indptr, args.qo_indptr_type, b);
  const int64_t end = read_index(args.qo_indptr, args.qo_indptr_type, b + 1);
  int64_t prefix = 0;
  if (args.kv_indptr != nullptr) {
    const int64_t first = read_index(args.kv_indptr, args.kv_indptr_type, b);
    int64_t last = read_index(args.kv_indptr, args.kv_indptr_type, b + 1);
    if (last > args.num_kv_indices) last = args.num_kv_indices;
    if (first >= 0) prefix = last - first;
    request.first_index = static_cast<int>(first);
  } else {
    request.first_index = static_cast<int>(b * args.page_table_stride);
    prefix = read_index(args.kv_lens, args.kv_lens_type, b);
    const int64_t most = args.num_kv_indices * args.page_size;
    if (prefix > most) prefix = most;
  }
  if (begin >= 0 && begin < end && end <= args.total_q && end - begin <= args.max_q_len) {
    request.first_token = static_cast<int>(begin);
    request.nodes = static_cast<int>(end - begin);
    constexpr int64_t kMost = 1 << 24;
    if (prefix < 0) prefix = 0;
    request.mask_prefix = static_cast<int>(prefix < kMost ? prefix : kMost);
    request.prefix = args.skip_prefix ? 0 : request.mask_prefix;
  }
  return request;
}

__device__ __forceinline__ int num_keys(const Args& args, const Request& request) {
  return request.prefix + (args.skip_draft ? 0 : request.nodes);
}

// A request with nodes has at least one tile: its rows are written even where there is no key.
__device__ __forceinline__ int num_key_tiles(const Args& args, const Request& request) {
  const int tiles = (num_keys(args, request) + kTileKeys - 1) / kTileKeys;
  return request.nodes == 0 ? 0 : (tiles > 0 ? tiles : 1);
}

// a / b for 0 <= a < 2^22 and b > 0, in a tenth of the time of the compiler's.
__device__ __forceinline__ int quotient(int a, int b) {
  int q = static_cast<int>(divide_approx(static_cast<float>(a), static_cast<float>(b)));
  const int rest = a - q * b;
  if (rest < 0) --q;
  if (rest >= b) ++q;
  return q;
}

// How a request is cut: row tiles times splits, each a piece for a block.
struct Cut {
  int row_tiles;
  int splits;
  int split_tiles;
};

template <class Rows>
__device__ __forceinline__ Cut cut(int rows, int key_tiles, int split_tiles, bool fixed) {
  Cut result;
  result.row_tiles = (rows + Rows::kRows - 1) / Rows::kRows;
  result.splits = quotient(key_tiles + split_tiles - 1, split_tiles);
  result.split_tiles = split_tiles;
  if (!fixed && result.splits > 1) {
    // Pieces of equal length; the two groups of a narrow block share its tiles, so an even number.
    const int even = quotient(key_tiles + result.splits - 1, result.splits);
    result.split_tiles = Rows::kWide ? even : (even + 1) / 2 * 2;
    result.splits = quotient(key_tiles + result.split_tiles - 1, result.split_tiles);
  }
  return result;
}

// Results over parts of the keys, and the list of what is to be joined, in the workspace. A partial result is out *
// 2^-e in half precision, with e for each row and round such that the largest value is about 2^14: eleven bits wherever
// they count. Its reference and sums are those of the row times 2^e and 2^-e, so that a round is joined as if it were
// all.
struct Partials {
  uint32_t* out;    // [rows, 2 rounds, d_latent / 4], not normalised, in the order of `Columns`
  float4* stats;    // [rows, 2 rounds], reference (in units of log2), sum, divisor, nothing
  int4* merges;     // [batch]: first row here, first row of the result, rows, splits
  int* first_item;  // [batch + 1]: the merge's items before each request
};

constexpr int kMergeClasses = 8;
constexpr int kMergeTogether = 16;  // splits that one warp has in flight; with more, a warp takes one class

struct MergeShared {
  float4 classes[kMergeClasses][2][32];
  float2 sums[kMergeClasses];
};

__device__ __forceinline__ int merge_items(int rows, int splits) {
  const int warps = rows * kRounds;
  return splits <= 1 ? 0 : splits <= kMergeTogether ? (warps + kMergeClasses - 1) / kMergeClasses : warps;
}

// What a plan is expected to take.
__host__ __device__ __forceinline__ float plan_time(int pieces, float longest, int64_t partial_rows, int blocks) {
  const int waves = (pieces + blocks - 1) / blocks;
  const float time = waves * (longest + kPieceTime);
  return partial_rows > 0 ? time + kMergeTime + partial_rows * kPartialRowTime : time;
}

__host__ __device__ __forceinline__ int splits_for_waves(int waves, int units, int blocks) {
  const int splits = units > 0 ? blocks * waves / units : 1;
  return splits > 1 ? splits : 1;
}

// The lane with the smallest time, the first among equals.
__device__ __forceinline__ int cheapest(float time, int lane) {
  return warp_min((__float_as_uint(time) & ~31u) | lane) & 31;
}

// Chooses how the keys are split. Every block does it for itself: a kernel of its own would take longer. 32 ways are
// priced, for one request by the lanes of every warp.
template <class Rows>
__device__ __forceinline__ int plan_one(const Args& args, int64_t partial_rows, int blocks) {
  const int lane = threadIdx.x % 32;
  const Request request = read_request(args, 0);
  const int rows = request.nodes * static_cast<int>(args.num_heads);
  const int tiles = max(num_key_tiles(args, request), 1);
  const int row_tiles = (rows + Rows::kRows - 1) / Rows::kRows;
  const int splits = min(splits_for_waves(lane + 1, row_tiles, blocks), tiles);
  const Cut c = cut<Rows>(rows, tiles, quotient(tiles + splits - 1, splits), false);
  const int split_rows = c.splits > 1 ? c.splits * rows : 0;
  const float time = plan_time(c.row_tiles * c.splits, c.split_tiles * Rows::kTime, split_rows, blocks);
  const int best = cheapest(split_rows > partial_rows ? INFINITY : time, lane);
  const int split_tiles = __shfl_sync(0xffffffffu, c.split_tiles, best);
  // All lanes may have too many rows: then the keys are not split.
  return __shfl_sync(0xffffffffu, split_rows, best) > partial_rows ? tiles : split_tiles;
}

// The same with split_tokens: pieces longer than asked for where contents exceed max_kv_len, since the partial results
// have to fit.
__device__ __forceinline__ int fixed_split_tiles(const Args& args, int64_t partial_rows, int tiles, int rows) {
  const int64_t asked = args.split_tokens / kTileKeys;
  int split_tiles = asked < tiles ? static_cast<int>(asked) : tiles;
  while (split_tiles < tiles && int64_t{quotient(tiles + split_tiles - 1, split_tiles)} * rows > partial_rows) {
    split_tiles *= 2;
  }
  return split_tiles;
}

// For a batch eight ways, one by each warp, its lanes going through the requests. Then a warp lists the pieces.
template <class G, class Rows>
__device__ __forceinline__ void plan_batch(const Args& args, int64_t partial_rows, const Partials& partials,
                                           Shared<G>& shared) {
  const int batch = static_cast<int>(args.batch);
  const int heads = static_cast<int>(args.num_heads);
  int* const rows = reinterpret_cast<int*>(shared.ring[0]);
  int* const tiles = rows + kMaxBatch;
  float* const times = reinterpret_cast<float*>(tiles + kMaxBatch);
  int* const choices = reinterpret_cast<int*>(times + 8);
  const int thread = thread_index();
  const int lane = thread % 32;
  const int warp = thread / 32;
#pragma unroll 1
  for (int b = thread; b < batch; b += kThreads) {
    const Request request = read_request(args, b);
    rows[b] = request.nodes * heads;
    tiles[b] = num_key_tiles(args, request);
  }
  __syncthreads();

  const bool fixed = args.split_tokens > 0;
  int most_tiles = 1;
  int units = 0;
  int work = 0;
#pragma unroll 1
  for (int b = lane; b < batch; b += 32) {
    const int row_tiles = (rows[b] + Rows::kRows - 1) / Rows::kRows;
    most_tiles = max(most_tiles, tiles[b]);
    units += row_tiles;
    work += row_tiles * tiles[b];
  }
  most_tiles = warp_max(most_tiles);
  units = warp_sum(units);
  work = warp_sum(work);
  const int blocks = gridDim.x;
  int split_tiles = most_tiles;  // warp 0: no split, always possible
  if (fixed) {
    split_tiles = static_cast<int>(min(args.split_tokens / kTileKeys, int64_t{most_tiles}));
  } else if (warp >= 4) {
    // For ragged requests: a share of the work that leaves room for rounding, for one wave or for two.
    const float share = warp == 4 ? 1.04f : warp == 5 ? 1.14f : warp == 6 ? 1.3f : 0.6f;
    split_tiles = min(static_cast<int>(work * share / blocks) + 1, most_tiles);
  } else if (warp > 0) {
    // For equal ones: as many pieces as fill whole waves.
    const int splits = min(splits_for_waves(warp, units, blocks), most_tiles);
    split_tiles = quotient(most_tiles + splits - 1, splits);
  }
  for (;;) {
    int pieces = 0;
    int split_rows = 0;
    int longest = 0;
#pragma unroll 1
    for (int b = lane; b < batch; b += 32) {
      const Cut c = cut<Rows>(rows[b], tiles[b], split_tiles, fixed);
      pieces += c.row_tiles * c.splits;
      split_rows += c.splits > 1 ? c.splits * rows[b] : 0;
      longest = max(longest, min(c.split_tiles, tiles[b]));
    }
    split_rows = warp_sum(split_rows);
    if (fixed) {
      if (split_rows <= partial_rows || split_tiles >= most_tiles) break;
      split_tiles *= 2;  // as in fixed_split_tiles
      continue;
    }
    pieces = warp_sum(pieces);
    longest = warp_max(longest);
    if (lane == 0) {
      times[warp] = split_rows > partial_rows ? INFINITY : plan_time(pieces, longest * Rows::kTime, split_rows, blocks);
      choices[warp] = split_tiles;
    }
    __syncthreads();
    split_tiles = choices[cheapest(times[lane % 8], lane) % 8];
    break;
  }

  if (warp != 0) return;
  int3 sums = {0, 0, 0};  // pieces, rows of partial results, items of the merge, of the requests before
#pragma unroll 1
  for (int first = 0; first < batch; first += 32) {
    const int b = first + lane;
    const int my_rows = b < batch ? rows[b] : 0;
    const Cut c = cut<Rows>(my_rows, b < batch ? tiles[b] : 0, split_tiles, fixed);
    const int pieces = c.row_tiles * c.splits;
    const int split_rows = c.splits > 1 ? c.splits * my_rows : 0;
    const int items = merge_items(my_rows, c.splits);
    int3 up_to = {pieces, split_rows, items};
#pragma unroll 1
    for (int offset = 1; offset < 32; offset *= 2) {
      const int below = lane >= offset ? ~0 : 0;
      up_to.x += __shfl_up_sync(0xffffffffu, up_to.x, offset) & below;
      up_to.y += __shfl_up_sync(0xffffffffu, up_to.y, offset) & below;
      up_to.z += __shfl_up_sync(0xffffffffu, up_to.z, offset) & below;
    }
    if (b < batch) {
      shared.plan.first_piece[b] = sums.x + up_to.x - pieces;
      shared.plan.first_partial[b] = sums.y + up_to.y - split_rows;
      if (blockIdx.x == 0) {
        const int first_row = read_request(args, b).first_token * heads;
        partials.merges[b] = make_int4(sums.y + up_to.y - split_rows, first_row, my_rows, c.splits);
        partials.first_item[b] = sums.z + up_to.z - items;
      }
    }
    sums.x += __shfl_sync(0xffffffffu, up_to.x, 31);
    sums.y += __shfl_sync(0xffffffffu, up_to.y, 31);
    sums.z += __shfl_sync(0xffffffffu, up_to.z, 31);
  }
  if (lane == 0) {
    shared.plan.first_piece[batch] = sums.x;
    shared.plan.split_tiles = split_tiles;
    if (blockIdx.x == 0) partials.first_item[batch] = sums.z;
  }
}

// Between pieces the block meets at a barrier with a number, as the groups do within one: compute-sanitizer's racecheck
// loses the plain one once the groups have met apart.
__device__ __forceinline__ void block_barrier() { group_sync(3, kThreads); }

// Puts the block's next piece into shared.piece; false when there is none. What lasts from piece to piece is in shared
// memory, since it would cost registers.
template <class G, class Rows>
__device__ __forceinline__ bool find_piece(const Args& args, Shared<G>& shared) {
  const int index = shared.plan.next_piece;
  const int batch = static_cast<int>(args.batch);
  const int thread = thread_index();
  const int lane = thread % 32;
  int b = 0;
  int first_piece = 0;
  int first_partial = 0;
  if (batch > 1) {
    if (index >= shared.plan.first_piece[batch]) return false;
    int begun = 0;  // requests whose pieces begin at or before this one
    for (int first = 0; first < batch; first += 32) {
      begun += __popc(__ballot_sync(
          0xffffffffu, first + lane < batch && shared.plan.first_piece[min(first + lane, batch)] <= index));
    }
    b = begun - 1;
    first_piece = shared.plan.first_piece[b];
    first_partial = shared.plan.first_partial[b];
  }
  Piece piece;
  piece.batch_idx = b;
  piece.request = read_request(args, b);
  piece.keys = num_keys(args, piece.request);
  const int heads = static_cast<int>(args.num_heads);
  const int rows = piece.request.nodes * heads;
  const int key_tiles = num_key_tiles(args, piece.request);
  const Cut c = cut<Rows>(rows, max(key_tiles, 1), shared.plan.split_tiles, args.split_tokens > 0);
  if (batch == 1 && index >= c.row_tiles * c.splits) return false;
  const int local = index - first_piece;
  const int split = quotient(local, c.row_tiles);
  piece.first_row = (local - split * c.row_tiles) * Rows::kRows;
  piece.live_rows = min(Rows::kRows, rows - piece.first_row);
  piece.first_tile = split * c.split_tiles;
  piece.tiles = min(c.split_tiles, key_tiles - piece.first_tile);
  piece.full_tiles = args.logit_cap > 0.0f ? 0 : min(piece.request.prefix / kTileKeys - piece.first_tile, piece.tiles);
  piece.fast_end = piece.full_tiles == piece.tiles ? piece.tiles + 1 : piece.full_tiles - (Rows::kWide ? 3 : 4);
  piece.last_key = piece.request.prefix - 1;
  piece.mask_tile = piece.request.prefix / kTileKeys - piece.first_tile;
  piece.partial = c.splits > 1 ? first_partial + split * rows + piece.first_row : -1;
  block_barrier();
  if (thread == 0) {
    shared.piece = piece;
    shared.plan.next_piece = index + gridDim.x;
  }
  block_barrier();
  return true;
}

// Visibility of the nodes of a row tile among the nodes of their request, as bits.
template <class G>
__device__ void load_words(const Args& args, Shared<G>& shared) {
  const Piece piece = shared.piece;
  const Request& request = piece.request;
  const int b = piece.batch_idx;
  const int heads = static_cast<int>(args.num_heads);
  const int first_node = piece.first_row / heads;
  const int num_nodes = (piece.first_row + piece.live_rows - 1) / heads - first_node + 1;
  const int nodes = request.nodes;
  const int thread = thread_index();
  const int lane = thread % 32;
  const int warp = thread / 32;
  const bool bytes = args.visibility_type == KDTREE_MASK_BYTES || args.visibility_type == KDTREE_FULL_MASK;
  if (bytes) {
    const auto* mask = static_cast<const uint8_t*>(args.visibility);
    const bool full = args.visibility_type == KDTREE_FULL_MASK;
    int64_t begin = 0;
    if (args.mask_indptr != nullptr) {
      begin = args.mask_indptr[b];
    } else {
      for (int first = 0; first < b; first += 32) {
        int64_t cells = 0;
        if (first + lane < b) {
          const Request other = read_request(args, first + lane);
          cells = static_cast<int64_t>(other.nodes) * (other.nodes + (full ? other.mask_prefix : 0));
        }
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) cells += __shfl_xor_sync(0xffffffffu, cells, offset);
        begin += cells;
      }
    }
    const int64_t pitch = nodes + (full ? request.mask_prefix : 0);
    for (int i = warp; i < num_nodes; i += kThreads / 32) {
      const int64_t cell = begin + (first_node + i) * pitch + (full ? request.mask_prefix : 0);
#pragma unroll
      for (int w = 0; w < kMaskWords; ++w) {
        bool seen[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int j = 64 * w + 32 * half + lane;
          seen[half] = j < nodes && cell + j >= 0 && cell + j < args.mask_size && mask[cell + j] != 0;
        }
        const uint64_t low = __ballot_sync(0xffffffffu, seen[0]);
        const uint64_t high = __ballot_sync(0xffffffffu, seen[1]);
        if (lane == 0) shared.words[i][w] = low | high << 32;
      }
    }
    return;
  }
  for (int i = thread; i < num_nodes; i += kThreads) {
    const int node = first_node + i;
    uint64_t words[kMaskWords] = {};
    if (args.visibility_type == KDTREE_MASK_BITS) {
      const auto* bits = static_cast<const uint64_t*>(args.visibility);
      for (int w = 0; w < kMaskWords; ++w) {
        if (w < args.mask_stride) words[w] = bits[(request.first_token + node) * args.mask_stride + w];
      }
    } else if (args.visibility_type == KDTREE_PARENTS) {
      const int32_t* parents = static_cast<const int32_t*>(args.visibility) + request.first_token;
      int ancestor = node;
      for (int step = 0; step < nodes && ancestor >= 0 && ancestor < nodes; ++step) {
#pragma unroll
        for (int w = 0; w < kMaskWords; ++w) {
          words[w] |= ancestor / 64 == w ? uint64_t{1} << ancestor % 64 : 0;
        }
        ancestor = parents[ancestor];
      }
    } else {
#pragma unroll
      for (int w = 0; w < kMaskWords; ++w) {
        const int count = node + 1 - 64 * w;
        words[w] = count >= 64 ? ~uint64_t{0} : count > 0 ? (uint64_t{1} << count) - 1 : 0;
      }
    }
#pragma unroll
    for (int w = 0; w < kMaskWords; ++w) shared.words[i][w] = words[w];
  }
}

// What the host works out once for the inner loop.
struct Params {
  Args args;
  Partials partials;
  int64_t partial_rows;
  int page_shift;        // log2 of page_size
  uint32_t index_bytes;  // of an entry of kv_indices
  uint32_t kv_bytes;     // between slots
  float scale;           // of a score, to units of log2
};

// From those, what each row sees of the tiles that are not all prefix.
template <class G>
__device__ void make_masks(const Args& args, Shared<G>& shared) {
  const Piece& piece = shared.piece;
  const int heads = static_cast<int>(args.num_heads);
  const int thread = thread_index();
  const int row = thread % kMostRows;
  const int node = (piece.first_row + min(row, piece.live_rows - 1)) / heads - piece.first_row / heads;
  const int prefix = piece.request.prefix;
  const int drafts = piece.keys - prefix;
#pragma unroll 1
  for (int t = thread / kMostRows; prefix / kTileKeys * kTileKeys + t * kTileKeys < max(piece.keys, 1);
       t += kThreads / kMostRows) {
    const int first = t * kTileKeys - prefix % kTileKeys;  // the tile's first key as a draft
    uint32_t seen = 0;
    if (drafts > 0) {
      const uint64_t* const words = shared.words[node];
      const int from = max(first, 0);
      uint64_t window = words[from / 64] >> from % 64;
      if (from % 64 > 64 - kTileKeys && from / 64 + 1 < kMaskWords) window |= words[from / 64 + 1] << (64 - from % 64);
      const int left = drafts - from;
      if (left < kTileKeys) window &= (uint64_t{1} << left) - 1;
      seen = static_cast<uint32_t>(window << (from - first));
    }
    if (first < 0) seen |= (1u << -first) - 1;
    shared.tile_masks[t][row] = static_cast<uint16_t>(seen);
  }
}

// A key's way to its row begins a tile ahead of the copy with an entry: of kv_indices for a prefix key, which names a
// page, or of draft_slots. The entry is not touched before the copy, so that nothing waits for it. Entries are read by
// their lower halves: a slot is below 2^31, and what is not is refused as a slot outside the pool.
__device__ __forceinline__ uint32_t prefix_entry(const Params& params, int first_index, int key) {
  const uint64_t index = static_cast<uint32_t>(first_index + (key >> params.page_shift));
  return *reinterpret_cast<const uint32_t*>(static_cast<const unsigned char*>(params.args.kv_indices) +
                                            index * params.index_bytes);
}

__device__ __forceinline__ uint32_t prefix_slot(const Params& params, uint32_t entry, int key) {
  return (entry << params.page_shift) | (key & ((1 << params.page_shift) - 1));
}

// Of any key; 0 where there is none.
__device__ __forceinline__ uint32_t any_entry(const Params& params, const Piece& piece, int key) {
  const Request& request = piece.request;
  if (key < request.prefix) return prefix_entry(params, request.first_index, key);
  if (key >= piece.keys || params.args.draft_kv != nullptr) return 0;
  const int64_t slot = read_index(params.args.draft_slots, params.args.draft_slots_type,
                                  int64_t{request.first_token} + key - request.prefix);
  return slot >= 0 && slot < params.args.num_slots ? static_cast<uint32_t>(slot) : 0xffffffffu;
}

// Copies 16-byte chunk `chunk` of kCount lines of a row from first_line on; zeros where the row ends or is not valid.
// In shared memory chunk c of line j of a row lies at j * 128 + ((c ^ (row & 7)) << 4): eight lanes write a line
// without a conflict, and ldmatrix reads eight rows without one.
template <class G, int kCount>
__device__ __forceinline__ void copy_lines(unsigned char* to, const void* row, int chunk, int first_line, bool valid) {
  const auto* const from = settled(static_cast<const unsigned char*>(row) + first_line * kLineBytes + chunk * 16);
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const int line = first_line + j;
    if (line >= G::kLines) continue;
    const bool filled = G::kChunks % 8 == 0 || line * 8 + chunk < G::kChunks;
    cp_async_16_zfill(to + line * kLineBytes, from + j * kLineBytes, valid && filled);
  }
}

template <class G, int kCount>
__device__ __forceinline__ void copy_slot(const Params& params, unsigned char* to, uint32_t slot, int chunk,
                                          int first_line, bool valid) {
  const auto* row =
      static_cast<const unsigned char*>(params.args.kv_pool) + static_cast<uint64_t>(slot) * params.kv_bytes;
  copy_lines<G, kCount>(to, row, chunk, first_line, valid && slot < static_cast<uint32_t>(params.args.num_slots));
}

template <class G, int kCount>
__device__ __forceinline__ void copy_key(const Params& params, const Piece& piece, unsigned char* to, int key,
                                         uint32_t entry, int chunk, int first_line) {
  if (key >= piece.request.prefix && key < piece.keys && params.args.draft_kv != nullptr) {
    const auto* row =
        static_cast<const unsigned char*>(params.args.draft_kv) +
        2 * params.args.draft_kv_stride * (int64_t{piece.request.first_token} + key - piece.request.prefix);
    copy_lines<G, kCount>(to, row, chunk, first_line, true);
  } else {
    const uint32_t slot = key < piece.request.prefix ? prefix_slot(params, entry, key) : entry;
    copy_slot<G, kCount>(params, to, slot, chunk, first_line, key < piece.keys);
  }
}

// The pair with 0 in the place of infinities and NaNs.
__device__ __forceinline__ uint32_t finite_bf16x2(uint32_t pair) {
  // An exponent of ones carries into the sign's place.
  const uint32_t carries = ((pair & 0x7f807f80u) + 0x00800080u) & 0x80008000u;
  return pair & ~((carries >> 15) * 0xffffu);
}

// A barrier of the 128 threads of a group; the ids are literal so that tools can follow them.
__device__ __forceinline__ void group_barrier(int group) {
  if (group == 0) {
    group_sync(1, kGroupThreads);
  } else {
    group_sync(2, kGroupThreads);
  }
}

__device__ __forceinline__ bool group_vote(int group, bool p) {
  return group == 0 ? group_sync_or(1, kGroupThreads, p) : group_sync_or(2, kGroupThreads, p);
}

// Four numbers of the result.
__device__ __forceinline__ void store_four(const Args& args, int64_t to, const float* v, float factor) {
  if (args.out_type == KDTREE_FLOAT32) {
    *reinterpret_cast<float4*>(static_cast<float*>(args.out) + to) =
        make_float4(v[0] * factor, v[1] * factor, v[2] * factor, v[3] * factor);
  } else {
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(args.out) + to) =
        make_uint2(pack_bf16x2(v[0] * factor, v[1] * factor), pack_bf16x2(v[2] * factor, v[3] * factor));
  }
}

// Two fours of a row that starts at `row`, 32 places clean in the round.
template <class C>
__device__ __forceinline__ void store_eight(const Args& args, int64_t row, int round, int place, const float (&v)[8],
                                            float factor) {
  store_four(args, row + C::column(round, place), v, factor);
  store_four(args, row + C::column(round, place + 32), v + 4, factor);
}

__device__ __forceinline__ float row_factor(float divisor) { return divisor == 0.0f ? 0.0f : 1.0f / divisor; }

__device__ __forceinline__ float row_lse(float reference, float sum) {
  return sum == 0.0f ? -INFINITY : (reference + log2f(sum)) * kLn2;
}

// The end of a piece: to the result, or to the partial results. The rows go through shared memory a half of their
// columns at a time, so that a warp has a row together: code that runs once costs a dozen clocks an instruction to
// fetch, and what is said for every accumulator would be a thousand of them. A narrow block's groups have seen
// different keys of the same rows, which are added up on the way.
template <class G, class Rows>
__device__ __forceinline__ void finish_piece(const Params& params, Shared<G>& shared,
                                             float (&out)[Rows::kTiles][G::kOutTiles][4], float reference,
                                             float row_sum, float divisor) {
  using C = Columns<G>;
  static_assert(sizeof(float) * kMostRows * C::kPitch <= sizeof(shared.ring) + sizeof(shared.exchange));
  const Args& args = params.args;
  const Piece& piece = shared.piece;
  const int thread = thread_index();
  const int lane = thread % 32;
  const int warp = thread / 32;
  const int quarter = warp % 4;
  const int group = thread / kGroupThreads;
  float* const rows = reinterpret_cast<float*>(shared.ring[0]);  // [64, kPitch]: 32 of each group

  row_sum = lanes_sum<4>(row_sum);
  divisor = lanes_sum<4>(divisor);
  if (lane % 4 == 0 && quarter < 2 * Rows::kTiles) {
    shared.row_stats[32 * group + quarter * 8 + lane / 4] = make_float4(reference, row_sum, divisor, 0.0f);
  }
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    block_barrier();  // the ring is free
    float* const to = rows + (32 * group + lane / 4) * C::kPitch + quarter * C::kQuarter + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < Rows::kTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < G::kOutTiles / kRounds; ++n) {
          const float (&o)[4] = out[m][round * G::kOutTiles / kRounds + n];
          *reinterpret_cast<float2*>(to + (16 * m + 8 * half) * C::kPitch + 8 * n) =
              make_float2(o[2 * half], o[2 * half + 1]);
        }
      }
    }
    block_barrier();
    // Eight lanes take a row, each of them four columns in every 32.
#pragma unroll 1
    for (int row = thread / 8; row < (piece.live_rows + 3) / 4 * 4; row += kThreads / 8) {
      float4 stats = shared.row_stats[row];
      float own = 1.0f;
      float other = 0.0f;
      if (!Rows::kWide) {
        // A NaN sum counts as a sum: it has to reach the result.
        const float4 others = shared.row_stats[32 + row];
        const float top = fmaxf(stats.y == 0.0f ? -INFINITY : stats.x, others.y == 0.0f ? -INFINITY : others.x);
        own = stats.y == 0.0f ? 0.0f : exp2_approx(stats.x - top);
        other = others.y == 0.0f ? 0.0f : exp2_approx(others.x - top);
        stats = make_float4(top, own * stats.y + other * others.y, own * stats.z + other * others.z, 0.0f);
      }
      constexpr int kParts = C::kRound / 64;
      float values[kParts][8];
      float peaks[4] = {};
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int four = 0; four < 2; ++four) {
          const float* const from = rows + row * C::kPitch + 64 * part + lane % 8 * 4 + 32 * four;
          const float4 mine = *reinterpret_cast<const float4*>(from);
          float (&v)[8] = values[part];
          v[4 * four] = mine.x;
          v[4 * four + 1] = mine.y;
          v[4 * four + 2] = mine.z;
          v[4 * four + 3] = mine.w;
          if (!Rows::kWide) {
            const float4 theirs = *reinterpret_cast<const float4*>(from + 32 * C::kPitch);
            v[4 * four] = own * mine.x + other * theirs.x;
            v[4 * four + 1] = own * mine.y + other * theirs.y;
            v[4 * four + 2] = own * mine.z + other * theirs.z;
            v[4 * four + 3] = own * mine.w + other * theirs.w;
          }
#pragma unroll
          for (int e = 0; e < 4; ++e) peaks[e] = fmaxf(peaks[e], fabsf(v[4 * four + e]));
        }
      }
      const float peak = lanes_max<8>(fmaxf(fmaxf(peaks[0], peaks[1]), fmaxf(peaks[2], peaks[3])));
      if (row >= piece.live_rows) continue;
      if (piece.partial >= 0) {
        const int exponent = static_cast<int>(__float_as_uint(peak) >> 23) - 127 - 14;
        const int e = peak == 0.0f ? 0 : min(max(exponent, -98), 113);
        const float factor = __uint_as_float(static_cast<unsigned>(127 - e) << 23);
        const int64_t block = int64_t{piece.partial + row} * kRounds + round;
        auto* const to = reinterpret_cast<uint4*>(params.partials.out) + block * (C::kRound / 8) + lane % 8;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const float (&v)[8] = values[part];
          to[8 * part] = make_uint4(pack_f16x2(v[0] * factor, v[1] * factor), pack_f16x2(v[2] * factor, v[3] * factor),
                                    pack_f16x2(v[4] * factor, v[5] * factor), pack_f16x2(v[6] * factor, v[7] * factor));
        }
        if (lane % 8 == 0) {
          params.partials.stats[block] = make_float4(stats.x + e, stats.y * factor, stats.z * factor, 0.0f);
        }
      } else {
        const int64_t result_row = piece.request.first_token * args.num_heads + piece.first_row + row;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          store_eight<C>(args, result_row * G::kLatent, round, 64 * part + lane % 8 * 4, values[part],
                         row_factor(stats.z));
        }
        if (round == 0 && lane % 8 == 0) args.lse[result_row] = row_lse(stats.x, stats.y);
      }
    }
  }
  block_barrier();  // the next piece begins in the ring
}

// One piece: 64 rows shared by two groups of 32 that take every key tile half a tile clean (kWide), or 16 * kRowTiles
// rows of which the groups take alternate key tiles and join their results at the end.
template <class G, class Rows>
__device__ __forceinline__ void run_piece(const Params& params, Shared<G>& shared) {
  constexpr bool kWide = Rows::kWide;
  constexpr int kRowTiles = Rows::kTiles;
  constexpr int kRows = Rows::kRows;
  constexpr int kSteps = G::kLines;  // of 16 dimensions: step j of a quarter is bytes 32 * quarter.. of line j
  constexpr int kOutTiles = G::kOutTiles;
  constexpr int kRowBlocks = 2 * kRowTiles;
  constexpr int kHalfLines = (G::kLines + 1) / 2;
  const Args& args = params.args;
  const Piece& piece = shared.piece;
  const int thread = thread_index();
  const int lane = thread % 32;
  const int quarter = thread / 32 % 4;
  const int group = thread / kGroupThreads;
  const int lane_row = lane / 4;

  // Loading: thread t of a group, or of both, takes chunk t % 8 of row t / 8 % 16, of all lines or of half of them.
  const int chunk = thread % 8;
  const int load_row = thread / 8 % kTileKeys;
  const int load_offset = load_row * G::kRowBytes + ((chunk ^ (load_row & 7)) << 4);
  const int load_key = piece.first_tile * kTileKeys + load_row;
  constexpr int kLoadLines = kWide ? kHalfLines : G::kLines;
  const auto load_any = [&](int tile, unsigned char* to, uint32_t entry) {
    const int thread = thread_index();
    const int row = thread / 8 % kTileKeys;
    copy_key<G, kLoadLines>(params, piece, to + row * G::kRowBytes + ((thread % 8 ^ (row & 7)) << 4),
                            (piece.first_tile + tile) * kTileKeys + row, entry, thread % 8,
                            kWide ? thread / kGroupThreads * kHalfLines : 0);
  };
  const auto fetch_any = [&](int tile) {
    const int row = thread_index() / 8 % kTileKeys;
    return tile < piece.tiles ? any_entry(params, piece, (piece.first_tile + tile) * kTileKeys + row) : 0;
  };

  // The group's tiles: its u-th is tile first + u * step of the piece.
  const int step = kWide ? 1 : 2;
  const int first = kWide ? 0 : group;
  const auto slot_bytes = [&](int u) { return kWide ? shared.ring[u & 3] : shared.ring[2 * group + (u & 1)]; };

  // Before the first tile: its slots, the query rows, the tile itself, what the nodes see of each other.
  const uint32_t entry = fetch_any(first);
  uint32_t next_entry = fetch_any(first + step);
  const auto query_row = [&](int row) {
    return kWide ? shared.ring[1] + row * G::kRowBytes
                 : shared.ring[1 + row / kTileKeys * 2] + row % kTileKeys * G::kRowBytes;
  };
#pragma unroll
  for (int first_row = 0; first_row < kRows; first_row += kThreads / 8) {
    const int thread = thread_index();
    const int chunk = thread % 8;
    const int row = first_row + thread / 8;
    if (row >= kRows) continue;
    const bool live = row < piece.live_rows;
    const int packed = piece.first_row + (live ? row : 0);
    const int heads = static_cast<int>(args.num_heads);
    const auto* source = static_cast<const uint16_t*>(args.q) +
                         (int64_t{piece.request.first_token} + packed / heads) * args.q_stride_token +
                         packed % heads * args.q_stride_head;
    copy_lines<G, G::kLines>(query_row(row) + ((chunk ^ (row & 7)) << 4), source, chunk, 0, live);
  }
  if (first < piece.tiles) load_any(first, slot_bytes(0), entry);
  cp_async_commit();
  if (piece.tiles > piece.mask_tile) {
    if (!args.skip_draft) load_words(args, shared);
    block_barrier();
    make_masks(args, shared);
  }
  cp_async_wait<0>();
  block_barrier();
  uint32_t query[kSteps][kRowTiles][4];
  {
    const int thread = thread_index();
    const int lane = thread % 32;
    const int group = thread / kGroupThreads;
    const int quarter = thread / 32 % 4;
    const int matrix_row = (lane & 7) + (lane >> 3 & 1) * 8;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      const unsigned char* row = query_row((kWide ? 32 * group : 0) + 16 * m + matrix_row);
      row += ((2 * quarter + (lane >> 4)) ^ (lane & 7)) << 4;
#pragma unroll
      for (int j = 0; j < kSteps; ++j) ldmatrix_x4(query[j][m], row + j * kLineBytes);
    }
  }
  block_barrier();
  if constexpr (kWide) {
    if (piece.tiles > 1) load_any(1, slot_bytes(1), next_entry);
    cp_async_commit();
    next_entry = fetch_any(2);
  }

  float out[kRowTiles][kOutTiles][4];
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) out[m][n][e] = 0.0f;
    }
  }
  // Of the row that this thread owns, one of the row block `quarter` of its group. Scores are compared in units of the
  // product, references kept in units of log2.
  float threshold = -INFINITY;  // scores above it move the reference
  float reference = 0.0f;
  float row_sum = 0.0f;  // this thread's part, as is that of the weights as they are rounded for the product
  float divisor = 0.0f;
  const int owned_row = quarter * 8 + lane_row;
  const bool owner = quarter < kRowBlocks;
  const int flip = lane >> 3 & 1;  // which key half comes first in the exchange, so that its stores do not conflict

  // Where this thread reads and writes, for ring slot 0 and group 0. The ring's slots, and so a row's lines, are
  // 128-byte aligned: chunks of a line differ in bits that can be flipped.
  const SharedAddress ring = shared_address(shared.ring[0]);
  const SharedAddress key_address =
      ring + ((lane & 7) + (lane >> 4) * 8) * G::kRowBytes + (((2 * quarter + flip) ^ (lane & 7)) << 4);
  const SharedAddress value_address =
      ring + ((lane & 7) + flip * 8) * G::kRowBytes + quarter * kOutTiles * 16 + (((lane >> 4) ^ (lane & 7)) << 4);
  const SharedAddress give_address = shared_address(shared.exchange[0][0][quarter]) + lane * 16 + flip * 8;
  const SharedAddress take_address = shared_address(shared.exchange[0][quarter][0]) + lane * 16;
  const SharedAddress weigh_address = shared_address(shared.weights[0][quarter][0]) + lane * 4 + flip * 128;
  const SharedAddress weights_address = shared_address(shared.weights[0][lane >> 3 & 1][lane >> 4]) + (lane & 7) * 16;
  constexpr int kExchangeBytes = sizeof(shared.exchange[0]);
  constexpr int kWeightsBytes = sizeof(shared.weights[0]);
  const auto slot_offset = [&](int group, int u) {
    return static_cast<uint32_t>(kWide ? u & 3 : 2 * group + (u & 1)) * G::kTileBytes;
  };

  // Partial scores of 16 * kRowTiles rows and 16 keys over a quarter of the dimensions, handed to the rows' owners.
  const auto load_keys = [&](auto group, int u, uint32_t (&keys)[2][4]) {
    const SharedAddress from = key_address + slot_offset(group, u);
    ldmatrix_x4(keys[0], shared_pointer<void>(from));
    ldmatrix_x4(keys[1], shared_pointer<void>(from + kLineBytes));
  };
  const auto score = [&](auto group, int u, uint32_t (&keys)[2][4]) {
    const SharedAddress from = key_address + slot_offset(group, u);
    float scores[kRowTiles][2][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) scores[m][n][e] = 0.0f;
      }
    }
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      uint32_t (&now)[4] = keys[j % 2];
      const uint32_t halves[2][2] = {{now[0], now[1]}, {now[2], now[3]}};
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < 2; ++n) mma_m16n8k16_bf16(scores[m][n], query[j][m], halves[n]);
      }
      if (j + 2 < kSteps) ldmatrix_x4(now, shared_pointer<void>(from + (j + 2) * kLineBytes));
    }
    const SharedAddress give = give_address + group * kExchangeBytes;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          *shared_pointer<float2>((give ^ (n * 8)) + (2 * m + half) * 2048) =
              make_float2(scores[m][n][2 * half], scores[m][n][2 * half + 1]);
        }
      }
    }
  };

  // The scores of the thread's row and four keys of tile u, -inf where hidden.
  const auto collect = [&](auto fast, auto group, int u, float (&s)[4], bool& hidden_not_finite, auto overlapped) {
    constexpr bool kFast = decltype(fast)::value != 0;
    float4 parts[4];
#pragma unroll
    for (int source = 0; source < 4; ++source) {
      parts[source] = *shared_pointer<const float4>(take_address + group * kExchangeBytes + source * 512);
    }
    overlapped();
    s[0] = (parts[0].x + parts[1].x) + (parts[2].x + parts[3].x);
    s[1] = (parts[0].y + parts[1].y) + (parts[2].y + parts[3].y);
    s[2] = (parts[0].z + parts[1].z) + (parts[2].z + parts[3].z);
    s[3] = (parts[0].w + parts[1].w) + (parts[2].w + parts[3].w);
    if (kFast) return;
    const int thread = thread_index();
    const int flip = thread >> 3 & 1;
    const int row = thread / 4 % 32 + (kWide ? 32 * group : 0);
    const int tile = first + u * step - piece.mask_tile;
    const uint32_t mask = (tile < 0 ? 0xffffu : shared.tile_masks[tile][row]) >> (thread % 4 * 2);
    const uint32_t halves = flip != 0 ? mask >> 8 | mask << 8 : mask;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool seen = (halves >> (e / 2 * 8 + e % 2) & 1) != 0;
      hidden_not_finite |= !seen && !(fabsf(s[e]) < INFINITY);
      if (args.logit_cap > 0.0f) {
        // cap * tanh(x) = cap - 2 cap / (1 + e^2x), to 2^-22 of the cap
        const float power = exp2_approx(s[e] * (2.0f * kLog2E) * args.sm_scale / args.logit_cap);
        s[e] = args.logit_cap - divide_approx(2.0f * args.logit_cap, 1.0f + power);
      }
      s[e] = seen ? s[e] : -INFINITY;
    }
  };
  const auto weigh = [&](auto group, const float (&s)[4]) {
    float p[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) p[e] = exp2_approx(fmaf(s[e], params.scale, -reference));
    const SharedAddress to = weigh_address + group * kWeightsBytes;
    const uint32_t low = pack_bf16x2(p[0], p[1]);
    const uint32_t high = pack_bf16x2(p[2], p[3]);
    *shared_pointer<uint32_t>(to) = low;
    *shared_pointer<uint32_t>(to ^ 128) = high;
    return make_float2((p[0] + p[1]) + (p[2] + p[3]),
                       (__uint_as_float(low << 16) + __uint_as_float(low & 0xffff0000u)) +
                           (__uint_as_float(high << 16) + __uint_as_float(high & 0xffff0000u)));
  };

  // Softmax of tile u by the rows' owners, `overlapped` in the shadow of their first reads; then out += weights values.
  const auto attend = [&](auto fast, auto group, int u, auto overlapped, auto ahead) {
    constexpr bool kFast = decltype(fast)::value != 0;
    const SharedAddress values = value_address + slot_offset(group, u);
    const auto load_values = [&](uint32_t (&fragments)[4], int v) {
      ldmatrix_x4_trans(fragments, shared_pointer<void>((values ^ (v % 4 * 32)) + v / 4 * kLineBytes));
    };
    bool above = false;
    bool hidden_not_finite = false;
    float2 sum = make_float2(0.0f, 0.0f);
    if (owner) {
      float s[4];
      collect(fast, group, u, s, hidden_not_finite, overlapped);
      above = s[0] > threshold || s[1] > threshold || s[2] > threshold || s[3] > threshold;
      sum = weigh(group, s);
    } else {
      overlapped();
    }
    uint32_t fragments[2][4];
    load_values(fragments[0], 0);
    load_values(fragments[1], 1);
    bool clean = false;
    if (group_vote(group, above || (!kFast && hidden_not_finite))) {
      // Rare after the first tile: rows above the threshold take their maximum as reference.
      if (owner) {
        float s[4];
        collect(fast, group, u, s, hidden_not_finite, [] {});
        const float top = lanes_max<4>(fmaxf(fmaxf(s[0], s[1]), fmaxf(s[2], s[3])));
        float rescale = 1.0f;
        if (top > threshold) {
          rescale = threshold == -INFINITY ? 0.0f : exp2_approx(reference - top * params.scale);
          reference = top * params.scale;
          threshold = top + kSlackLog2 / params.scale;
        }
        if (lane % 4 == 0) shared.row_scale[32 * group + owned_row] = rescale;
        row_sum *= rescale;
        divisor *= rescale;
        sum = weigh(group, s);
      }
      clean = group_vote(group, !kFast && hidden_not_finite);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        if (u == 0) break;  // nothing to scale yet
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float rescale = shared.row_scale[32 * group + 16 * m + 8 * half + lane_row];
#pragma unroll
          for (int n = 0; n < kOutTiles; ++n) {
            out[m][n][2 * half] *= rescale;
            out[m][n][2 * half + 1] *= rescale;
          }
        }
      }
    }
    row_sum += sum.x;
    divisor += sum.y;
    uint32_t weights[kRowTiles][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      ldmatrix_x4(weights[m], shared_pointer<void>(weights_address + group * kWeightsBytes + m * 512));
    }
#pragma unroll
    for (int v = 0; v < kOutTiles / 2; ++v) {
      uint32_t (&now)[4] = fragments[v % 2];
      if (!kFast && clean) {
        // A hidden row of keys holds what is not finite, and 0 times that is NaN. A row that sees it has a weight that
        // is NaN already, so all values may be taken as finite.
#pragma unroll
        for (int r = 0; r < 4; ++r) now[r] = finite_bf16x2(now[r]);
      }
      const uint32_t halves[2][2] = {{now[0], now[1]}, {now[2], now[3]}};
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) mma_m16n8k16_bf16(out[m][2 * v + n], weights[m], halves[n]);
      }
      if (v + 2 < kOutTiles / 2) load_values(now, v + 2);
      if (v == kOutTiles / 2 - 3) ahead();
    }
  };
  const IntC<1> fast;
  const IntC<0> general;
  const IntC<0> early;
  const IntC<1> late;

  // Tiles past the end are copied as zeros and their entries read as the last one's: no branch for them.
  if constexpr (kWide) {
    // Tile i is scored by both groups between the same two barriers; group 1 attends to it one barrier later, so that
    // one group's softmax meets the other's products. Tile i + 2 replaces tile i - 2, which both have left by then.
#pragma unroll 1
    for (int i = 0;; ++i) {
      i = settled(i);
      // Decided before the barrier, which hides what it takes.
      const bool plain = i < piece.fast_end;
      const bool stop = i == piece.tiles;
      const bool more = i + 2 < piece.tiles;
      cp_async_wait<1>();
      __syncthreads();
      i = settled(i);
      const auto load_full = [&](auto group) {
        constexpr int kFirstLine = decltype(group)::value * kHalfLines;
        copy_slot<G, kFirstLine == 0 ? kHalfLines : G::kLines - kHalfLines>(
            params, slot_bytes(i + 2) + load_offset, prefix_slot(params, next_entry, load_key + (i + 2) * kTileKeys),
            chunk, kFirstLine, more);
        cp_async_commit();
        next_entry =
            prefix_entry(params, piece.request.first_index, min(load_key + (i + 3) * kTileKeys, piece.last_key));
      };
      if (!plain || (i == 0 && group == 1)) {
        if (more) load_any(i + 2, slot_bytes(i + 2), next_entry);
        cp_async_commit();
        next_entry = fetch_any(i + 3);
      }
      if (group == 0) {
        if (stop) break;
        uint32_t keys[2][4];
        load_keys(early, i, keys);
        score(early, i, keys);
        group_barrier(early);
        if (!plain) {
          attend(general, early, i, [] {}, [] {});
        } else {
          attend(fast, early, i, [&] { load_full(early); }, [] {});
        }
      } else {
        uint32_t keys[2][4];
        if (i == 0) {
          load_keys(late, i, keys);
          // Its first tile is still to be scored.
        } else if (plain) {
          attend(fast, late, i - 1, [&] { load_full(late); }, [&] { load_keys(late, i, keys); });
        } else {
          attend(general, late, i - 1, [] {}, [&] { load_keys(late, i, keys); });
        }
        if (stop) break;
        score(late, i, keys);
      }
    }
  } else {
    // A group goes through its tiles alone.
#pragma unroll 1
    for (int u = 0, i = first; i < piece.tiles; ++u, i += step) {
      cp_async_wait<0>();
      group_barrier(group);
      if (i < piece.fast_end) {
        copy_slot<G, G::kLines>(params, slot_bytes(u + 1) + load_offset,
                                prefix_slot(params, next_entry, load_key + (i + step) * kTileKeys), chunk, 0,
                                i + step < piece.tiles);
        cp_async_commit();
        next_entry =
            prefix_entry(params, piece.request.first_index, min(load_key + (i + 2 * step) * kTileKeys, piece.last_key));
      } else {
        if (i + step < piece.tiles) load_any(i + step, slot_bytes(u + 1), next_entry);
        cp_async_commit();
        next_entry = fetch_any(i + 2 * step);
      }
      uint32_t keys[2][4];
      load_keys(group, u, keys);
      score(group, u, keys);
      group_barrier(group);
      if (i < piece.full_tiles) {
        attend(fast, group, u, [] {}, [] {});
      } else {
        attend(general, group, u, [] {}, [] {});
      }
    }
  }
  cp_async_wait<0>();

  finish_piece<G, Rows>(params, shared, out, reference, row_sum, divisor);
}

template <class G, class Rows>
__global__ void __launch_bounds__(kThreads, 1) verify_attn_flash_paged_kernel(Params params) {
  KDTREE_DYNAMIC_SHARED(Shared<G>, shared);
  allow_successor();
  if (params.args.batch == 1) {
    int split_tiles;
    if (params.args.split_tokens > 0) {
      const Request request = read_request(params.args, 0);
      split_tiles = fixed_split_tiles(params.args, params.partial_rows, max(num_key_tiles(params.args, request), 1),
                                      request.nodes * static_cast<int>(params.args.num_heads));
    } else {
      split_tiles = plan_one<Rows>(params.args, params.partial_rows, gridDim.x);
    }
    if (threadIdx.x == 0) shared.plan.split_tiles = split_tiles;
  } else {
    plan_batch<G, Rows>(params.args, params.partial_rows, params.partials, shared);
  }
  if (thread_index() == 0) shared.plan.next_piece = blockIdx.x;
  __syncthreads();
#pragma unroll 1
  while (find_piece<G, Rows>(params.args, shared)) run_piece<G, Rows>(params, shared);
}

// Joins the partial results of a row: with M the largest reference, out = sum 2^(m - M) out_m / sum 2^(m - M) l_m. The
// splits are added in eight classes, split % 8, and then the classes in order, whichever way the work is dealt: up to
// 16 splits by a warp alone, more by a block, a class each warp.
template <class G, class Rows>
__global__ void __launch_bounds__(32 * kMergeClasses)
    verify_attn_flash_paged_merge_kernel(Args args, Partials partials, int64_t partial_rows, int blocks) {
  using C = Columns<G>;
  constexpr int kParts = C::kRound / 128;  // of four columns, that a lane has
  KDTREE_DYNAMIC_SHARED(MergeShared, shared);
  const int batch = static_cast<int>(args.batch);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  int4 merge = make_int4(0, 0, 0, 0);
  int items = 0;
  if (batch == 1) {
    // Worked out again while the predecessor ends, instead of read behind it.
    const Request request = read_request(args, 0);
    const int rows = request.nodes * static_cast<int>(args.num_heads);
    const int key_tiles = max(num_key_tiles(args, request), 1);
    const int split_tiles = args.split_tokens > 0 ? fixed_split_tiles(args, partial_rows, key_tiles, rows)
                                                  : plan_one<Rows>(args, partial_rows, blocks);
    const Cut c = cut<Rows>(rows, key_tiles, split_tiles, args.split_tokens > 0);
    merge = make_int4(0, request.first_token * static_cast<int>(args.num_heads), rows, c.splits);
    items = merge_items(rows, c.splits);
  }
  await_predecessor();
  if (batch > 1) items = partials.first_item[batch];
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    int local = item;
    if (batch > 1) {
      int begun = 0;
      for (int first = 0; first < batch; first += 32) {
        begun += __popc(
            __ballot_sync(0xffffffffu, first + lane < batch && partials.first_item[min(first + lane, batch)] <= item));
      }
      merge = partials.merges[begun - 1];
      local = item - partials.first_item[begun - 1];
    }
    const int rows = merge.z;
    const int splits = merge.w;
    const bool alone = splits <= kMergeTogether;
    const int task = alone ? local * kMergeClasses + warp : local;
    const bool live = task < rows * kRounds;
    const int row = live ? task / kRounds : 0;
    const int round = task % kRounds;
    const int64_t block = (int64_t{merge.x} + row) * kRounds + round;
    const int64_t stride = int64_t{rows} * kRounds;  // from split to split
    const float4* const stats = partials.stats + block;
    const auto* const parts = reinterpret_cast<const uint2*>(partials.out) + block * (C::kRound / 4) + lane * kParts;

    // What is read first does not wait for what it will be weighed with. A split is weighed by the lane of its number.
    uint2 part[kMergeTogether][kParts];
#pragma unroll
    for (int i = 0; i < kMergeTogether; ++i) {
      const int split = alone ? i : warp + i * kMergeClasses;
#pragma unroll
      for (int j = 0; j < kParts; ++j) {
        part[i][j] = make_uint2(0, 0);
        if (split < splits && live) part[i][j] = parts[split * stride * (C::kRound / 4) + j];
      }
    }
    constexpr int kHeld = kMergeTogether * kMergeClasses / 32;  // by a lane
    float4 held[kHeld];
    float top = -INFINITY;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int split = lane + 32 * i;
      held[i] = split < splits ? stats[split * stride] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (held[i].y != 0.0f) top = fmaxf(top, held[i].x);
    }
    for (int split = lane + 32 * kHeld; split < splits; split += 32) {
      const float4 stat = stats[split * stride];
      if (stat.y != 0.0f) top = fmaxf(top, stat.x);
    }
    top = warp_max(top);
    const auto weight = [&](float4 stat) { return stat.y == 0.0f ? 0.0f : exp2_approx(stat.x - top); };
    const auto add = [](float (&to)[kParts][4], float factor, const uint2(&part)[kParts]) {
#pragma unroll
      for (int j = 0; j < kParts; ++j) {
        const float2 low = unpack_f16x2(part[j].x);
        const float2 high = unpack_f16x2(part[j].y);
        to[j][0] = fmaf(factor, low.x, to[j][0]);
        to[j][1] = fmaf(factor, low.y, to[j][1]);
        to[j][2] = fmaf(factor, high.x, to[j][2]);
        to[j][3] = fmaf(factor, high.y, to[j][3]);
      }
    };
    float total[kParts][4] = {};
    float2 sum = make_float2(0.0f, 0.0f);  // of the exact weights and of the rounded ones
    if (alone) {
      const float factor = weight(held[0]);
      const float2 part_sum = make_float2(factor * held[0].y, factor * held[0].z);
#pragma unroll
      for (int c = 0; c < kMergeClasses; ++c) {
        float class_total[kParts][4] = {};
        float2 class_sum = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int split = c; split < kMergeTogether; split += kMergeClasses) {
          add(class_total, __shfl_sync(0xffffffffu, factor, split), part[split]);
          class_sum.x += __shfl_sync(0xffffffffu, part_sum.x, split);
          class_sum.y += __shfl_sync(0xffffffffu, part_sum.y, split);
        }
#pragma unroll
        for (int j = 0; j < kParts; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) total[j][e] += class_total[j][e];
        }
        sum.x += class_sum.x;
        sum.y += class_sum.y;
      }
    } else {
      float factors[kHeld];
      float2 part_sums[kHeld];
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        factors[i] = weight(held[i]);
        part_sums[i] = make_float2(factors[i] * held[i].y, factors[i] * held[i].z);
      }
#pragma unroll
      for (int i = 0; i < kMergeTogether; ++i) {
        const int owner = warp + i % 4 * kMergeClasses;
        add(total, __shfl_sync(0xffffffffu, factors[i / 4], owner), part[i]);
        sum.x += __shfl_sync(0xffffffffu, part_sums[i / 4].x, owner);
        sum.y += __shfl_sync(0xffffffffu, part_sums[i / 4].y, owner);
      }
      for (int split = warp + kMergeTogether * kMergeClasses; split < splits; split += kMergeClasses) {
        const float4 stat = stats[split * stride];
        const float factor = weight(stat);
        uint2 more[kParts];
#pragma unroll
        for (int j = 0; j < kParts; ++j) more[j] = parts[split * stride * (C::kRound / 4) + j];
        add(total, factor, more);
        sum.x += factor * stat.y;
        sum.y += factor * stat.z;
      }
      __syncthreads();  // the previous item's classes have been read
#pragma unroll
      for (int j = 0; j < kParts; ++j) {
        shared.classes[warp][j][lane] = make_float4(total[j][0], total[j][1], total[j][2], total[j][3]);
      }
      if (lane == 0) shared.sums[warp] = sum;
      __syncthreads();
      if (warp != 0) continue;
      sum = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int j = 0; j < kParts; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) total[j][e] = 0.0f;
      }
#pragma unroll 1
      for (int c = 0; c < kMergeClasses; ++c) {
#pragma unroll
        for (int j = 0; j < kParts; ++j) {
          const float4 class_total = shared.classes[c][j][lane];
          total[j][0] += class_total.x;
          total[j][1] += class_total.y;
          total[j][2] += class_total.z;
          total[j][3] += class_total.w;
        }
        sum.x += shared.sums[c].x;
        sum.y += shared.sums[c].y;
      }
    }
    if (!live) continue;
    // Sixteen bytes of a partial row are the two fours of a lane there.
    const int64_t to = (int64_t{merge.y} + row) * G::kLatent;
    const float factor = row_factor(sum.y);
    const int bytes = lane * 8 * kParts;
    const int place = bytes / 128 * 64 + bytes % 128 / 16 * 4;
    if constexpr (kParts == 2) {
      store_four(args, to + C::column(round, place), total[0], factor);
      store_four(args, to + C::column(round, place + 32), total[1], factor);
    } else {
      store_four(args, to + C::column(round, place + bytes % 16 * 4), total[0], factor);
    }
    if (round == 0 && lane == 0) args.lse[int64_t{merge.y} + row] = row_lse(top, sum.x);
  }
}

int64_t num_blocks() { return max(multiprocessor_count(), 1); }  // without a device there is none to count

// Rows of partial results that a plan may use: without split_tokens two full tiles a block, which the plan respects.
int64_t partial_rows(const Args& args) {
  const int64_t rows = args.total_q * args.num_heads;
  if (args.split_tokens == 0) return min(2 * num_blocks() * kMostRows, rows * 2 * num_blocks());
  const int64_t splits = (args.max_kv_len + args.max_q_len + args.split_tokens - 1) / args.split_tokens;
  return splits > 1 ? rows * splits : 0;
}

// What a batch of requests of the largest size would take.
template <class Rows>
float expected_time(const Args& args) {
  const int blocks = static_cast<int>(num_blocks());
  const int64_t rows = args.max_q_len * args.num_heads;
  const int units = static_cast<int>(args.batch * ((rows + Rows::kRows - 1) / Rows::kRows));
  const int tiles = static_cast<int>((args.max_kv_len + args.max_q_len + kTileKeys - 1) / kTileKeys);
  float best = INFINITY;
  for (int waves = 1; waves <= 32; ++waves) {
    const int most = min(splits_for_waves(waves, units, blocks), tiles);
    int piece = (tiles + most - 1) / most;
    if (!Rows::kWide) piece = (piece + 1) / 2 * 2;
    const int splits = (tiles + piece - 1) / piece;
    const int64_t split_rows = splits > 1 ? splits * rows * args.batch : 0;
    if (splits > 1 && split_rows > partial_rows(args)) break;
    best = min(best, plan_time(units * splits, piece * Rows::kTime, split_rows, blocks));
  }
  return best;
}

int64_t align(int64_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

int64_t verify_attn_paged_workspace_bytes(const Args& args) {
  const int64_t rows = partial_rows(args);
  return align(rows * args.d_latent * 2) + align(rows * kRounds * 16) + align(args.batch * 16) +
         align((args.batch + 1) * 4);
}

int64_t verify_attn_flash_paged_shared_bytes() { return sizeof(Shared<Geometry<512, 64>>); }  // the largest

int launch_verify_attn_flash_paged(const Args& args, void* stream) {
  return with_geometry(args, [&](auto latent, auto rope) {
    const int64_t rows = partial_rows(args);
    auto* place = static_cast<unsigned char*>(args.workspace);
    const auto take = [&](int64_t bytes) {
      auto* const taken = place;
      place += align(bytes);
      return taken;
    };
    Partials partials;
    partials.out = reinterpret_cast<uint32_t*>(take(rows * latent.value * 2));
    partials.stats = reinterpret_cast<float4*>(take(rows * kRounds * 16));
    partials.merges = reinterpret_cast<int4*>(take(args.batch * 16));
    partials.first_item = reinterpret_cast<int*>(take((args.batch + 1) * 4));
    Params params = {};
    params.args = args;
    params.partials = partials;
    params.partial_rows = rows;
    params.index_bytes = args.kv_indices_type == KDTREE_INT64 ? 8 : 4;
    params.kv_bytes = static_cast<uint32_t>(2 * args.kv_stride);
    params.scale = args.logit_cap > 0.0f ? kLog2E : args.sm_scale * kLog2E;
    while (int64_t{1} << params.page_shift < args.page_size) ++params.page_shift;
    using G = Geometry<latent.value, rope.value>;
    const auto blocks = static_cast<unsigned>(num_blocks());
    const int64_t tasks = args.total_q * args.num_heads * kRounds;
    const auto run = [&](auto kind) {
      using Rows = decltype(kind);
      const int failed = launch(verify_attn_flash_paged_kernel<G, Rows>, dim3(blocks), dim3(kThreads),
                                sizeof(Shared<G>), stream, params);
      if (failed != 0 || rows == 0) return failed;
      return launch_after(verify_attn_flash_paged_merge_kernel<G, Rows>,
                          dim3(static_cast<unsigned>(min(int64_t{4} * blocks, tasks))), dim3(32 * kMergeClasses),
                          sizeof(MergeShared), stream, args, partials, rows, static_cast<int>(blocks));
    };
    // A request's largest size decides, so that its bits do not depend on the batch with split_tokens; without it a
    // batch that has too few key tiles for the chip takes smaller row tiles.
    const int64_t most_rows = args.max_q_len * args.num_heads;
    const bool short_of_tiles = args.split_tokens == 0 && args.max_kv_len > 0 &&
                                expected_time<NarrowRows<2>>(args) < expected_time<WideRows>(args);
    if (most_rows <= 16) return run(NarrowRows<1>());
    if (most_rows <= 32 || short_of_tiles) return run(NarrowRows<2>());
    return run(WideRows());
  });
}

}  // namespace kdtree
