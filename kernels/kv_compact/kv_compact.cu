// kv_compact: the accepted nodes' cache rows move to the request's first node slots, in all layers.
//
//   pool[layer][slot(k)] = pool[layer][slot(path[k])]   for k < path_len
//
// Work split: a thread a request, layer and sixteen bytes of the row, which it moves for the whole path; no thread
// reads what another writes. A path rises, so path[k] >= k: a thread that goes along it, loading eight rows before it
// stores them, never overwrites a row that it has still to read, and the loads of a group are in flight together. Rows
// at the path's beginning that are in place already are left out.
//
// Assumes: nothing of alignment. Rows, strides and addresses that are multiples of sixteen are moved sixteen bytes at a
// time, else four, else one; the addresses of separate layers are only known here and are looked at here.
//
// Every block checks its request before it moves anything, so that a bad path or slot leaves the whole request alone.

#include "common/indices.cuh"
#include "common/requests.cuh"
#include "kv_compact/kv_compact.cuh"

namespace kdtree {
namespace {

constexpr int kMostNodes = 1025;
constexpr int kThreads = 256;
constexpr int kGroup = 8;

struct Shared {
  int64_t slots[kMostNodes];  // of the nodes
  int path[kMostNodes];
};

// The slot of a node; negative where it has none in the pool.
__device__ __forceinline__ int64_t slot_of(const kdtree_kv_compact_args& args, int64_t request, int64_t row, int node) {
  int64_t slot;
  if (args.node_slots != nullptr) {
    slot = load_index(args.node_slots, args.slots_type, row);
  } else {
    const int64_t position = load_index(args.kv_lens, args.kv_lens_type, request) + node;
    const int64_t column = position / args.page_size;
    if (position < 0 || column >= args.page_table_columns) return -1;
    const int64_t page = load_index(args.page_table, args.slots_type, request * args.page_table_stride + column);
    if (page < 0 || page > args.num_slots / args.page_size) return -1;
    slot = page * args.page_size + position % args.page_size;
  }
  return slot >= 0 && slot < args.num_slots ? slot : -1;
}

template <class Unit>
__device__ void move(unsigned char* base, const Shared& shared, int64_t slot_stride, int from, int length) {
  const auto at = [&](int node) { return reinterpret_cast<Unit*>(base + shared.slots[node] * slot_stride); };
  for (; from < length; from += kGroup) {
    Unit rows[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (from + i < length) rows[i] = *at(shared.path[from + i]);
    }
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (from + i < length) *at(from + i) = rows[i];
    }
  }
}

template <class Unit>
__global__ void __launch_bounds__(kThreads) kv_compact_kernel(kdtree_kv_compact_args args) {
  KDTREE_DYNAMIC_SHARED(Shared, shared);
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t request = blockIdx.y;
  const auto [first, nodes, size_status] = rows_of(args, request);
  int status = size_status;
  int length = args.path_len[request];
  if (length < 0 || length > nodes || length > args.max_path) {
    if (status == KDTREE_REQUEST_OK) status = KDTREE_BAD_PATH;
    length = 0;
  }

  bool bad_path = false, bad_slot = false;
  const int32_t* const path = args.path + request * args.max_path;
  for (int i = thread; i < nodes; i += kThreads) {
    const int64_t slot = slot_of(args, request, first + i, i);
    bad_slot = bad_slot || slot < 0;
    shared.slots[i] = slot;
    if (i < length) {
      const int node = path[i];
      bad_path = bad_path || node >= nodes || (i == 0 ? node != 0 : node <= path[i - 1]);
      shared.path[i] = node;
    }
  }
  if (__syncthreads_or(bad_path ? 1 : 0) != 0) status |= KDTREE_BAD_PATH;
  if (__syncthreads_or(bad_slot ? 1 : 0) != 0) status |= KDTREE_BAD_SLOT;
  if (status != KDTREE_REQUEST_OK) length = 0;

  if (blockIdx.x == 0) {
    const int free = status == KDTREE_REQUEST_OK ? nodes - length : 0;
    for (int step = thread; step < args.max_path; step += kThreads) {
      store_index(args.committed_slots, args.slots_type, request * args.max_path + step,
                  step < length ? shared.slots[step] : -1);
    }
    for (int i = thread; i < args.max_q_len; i += kThreads) {
      store_index(args.free_slots, args.slots_type, request * args.max_q_len + i,
                  i < free ? shared.slots[length + i] : -1);
    }
    if (thread == 0) {
      if (args.num_free != nullptr) args.num_free[request] = free;
      args.status[request] = status;
    }
  }

  int from = 0;
  while (from < length && shared.path[from] == from) ++from;
  const int64_t units = args.row_bytes / static_cast<int64_t>(sizeof(Unit));
  const int64_t index = int64_t{blockIdx.x} * kThreads + thread;
  if (from == length || index >= args.num_layers * units) return;
  const int64_t layer = index / units;
  auto* base = static_cast<unsigned char*>(args.pool);
  base = base != nullptr ? base + layer * args.layer_stride : static_cast<unsigned char*>(args.layer_pools[layer]);
  base += index % units * static_cast<int64_t>(sizeof(Unit));
  if (reinterpret_cast<uintptr_t>(base) % sizeof(Unit) == 0) {
    move<Unit>(base, shared, args.slot_stride, from, length);
  } else {
    for (size_t byte = 0; byte < sizeof(Unit); ++byte) {
      move<unsigned char>(base + byte, shared, args.slot_stride, from, length);
    }
  }
}

template <class Unit>
int launch_units(const kdtree_kv_compact_args& args, void* stream) {
  const int64_t threads = args.num_layers * (args.row_bytes / static_cast<int64_t>(sizeof(Unit)));
  const dim3 grid(static_cast<unsigned>((threads + kThreads - 1) / kThreads), static_cast<unsigned>(args.batch));
  return launch(kv_compact_kernel<Unit>, grid, dim3(kThreads), sizeof(Shared), stream, args);
}

}  // namespace

int64_t kv_compact_shared_bytes() { return sizeof(Shared); }

int launch_kv_compact(const kdtree_kv_compact_args& args, void* stream) {
  const auto address = reinterpret_cast<uintptr_t>(args.pool);
  const int64_t layer_stride = args.pool != nullptr && args.num_layers > 1 ? args.layer_stride : 0;
  const auto fits = [&](int64_t bytes) {
    return args.row_bytes % bytes == 0 && args.slot_stride % bytes == 0 && layer_stride % bytes == 0 &&
           address % static_cast<uintptr_t>(bytes) == 0;
  };
  if (fits(16)) return launch_units<uint4>(args, stream);
  if (fits(4)) return launch_units<uint32_t>(args, stream);
  return launch_units<unsigned char>(args, stream);
}

}  // namespace kdtree
