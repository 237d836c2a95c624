// Kernels that break a rule, which the host runtime has to report; a device would hang or corrupt memory.
#include "conformance/conformance.h"

namespace kdtree::conformance {
namespace {

constexpr uint32_t kFullMask = 0xffffffff;

struct Words {
  uint32_t words[32][4];
};

struct TooLarge {
  uint32_t words[4096];
};

// Not a fault: out [n / 4] is what shared memory holds before a kernel writes it.
__global__ void fresh_shared(const uint32_t*, const uint32_t*, uint32_t* out, int n) {
  KDTREE_DYNAMIC_SHARED(uint32_t, shared);
  for (int i = threadIdx.x; i < n / 4; i += blockDim.x) out[i] = (&shared)[i];
}

// Not a fault: a copy is looked at before (out [0:32]) and after (out [32:64]) the wait for it.
__global__ void early_read(const uint32_t* a, const uint32_t*, uint32_t* out, int) {
  KDTREE_DYNAMIC_SHARED(Words, shared);
  const int lane = threadIdx.x;
  cp_async_4(&shared.words[0][0] + lane, a + lane);
  cp_async_commit();
  out[lane] = (&shared.words[0][0])[lane];
  cp_async_wait<0>();
  out[32 + lane] = (&shared.words[0][0])[lane];
}

// Not a fault: copies that are not valid must not read, whatever their source is.
__global__ void wild_zfill(const uint32_t*, const uint32_t*, uint32_t* out, int) {
  KDTREE_DYNAMIC_SHARED(Words, shared);
  const int lane = threadIdx.x;
  cp_async_16_zfill(shared.words[lane], reinterpret_cast<const void*>(uintptr_t{16}), false);
  cp_async_commit();
  cp_async_wait<0>();
  for (int i = 0; i < 4; ++i) out[lane * 4 + i] = shared.words[lane][i];
}

__global__ void skipped_barrier(const uint32_t*, const uint32_t*, uint32_t*, int) {
  if (threadIdx.x < 96) __syncthreads();  // line: skipped_barrier
}

__global__ void divergent_barrier(const uint32_t*, const uint32_t*, uint32_t* out, int) {
  if (threadIdx.x < 64) {
    __syncthreads();  // line: divergent_barrier first
    out[threadIdx.x] = 1;
  } else {
    __syncthreads();  // line: divergent_barrier second
    out[threadIdx.x] = 2;
  }
}

__global__ void lane_returned(const uint32_t*, const uint32_t*, uint32_t* out, int) {
  if (threadIdx.x == 5) return;
  out[threadIdx.x] = __shfl_sync(kFullMask, threadIdx.x, 0);  // line: lane_returned
}

__global__ void different_collectives(const uint32_t*, const uint32_t*, uint32_t* out, int) {
  if (threadIdx.x < 16) {
    out[threadIdx.x] = __ballot_sync(kFullMask, 1);  // line: different_collectives first
  } else {
    out[threadIdx.x] = __shfl_sync(kFullMask, threadIdx.x, 0);  // line: different_collectives second
  }
}

__global__ void different_lines(const uint32_t*, const uint32_t*, uint32_t* out, int) {
  if (threadIdx.x < 16) {
    out[threadIdx.x] = __ballot_sync(kFullMask, 1);  // line: different_lines first
  } else {
    out[threadIdx.x] = __ballot_sync(kFullMask, 0);  // line: different_lines second
  }
}

__global__ void mask_without_self(const uint32_t*, const uint32_t*, uint32_t* out, int) {
  out[threadIdx.x] = __ballot_sync(0x0000ffffu, 1);  // line: mask_without_self
}

__global__ void absent_lane(const uint32_t*, const uint32_t*, uint32_t* out, int) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0x0000ffffu, threadIdx.x, 20);  // line: absent_lane
}

__global__ void group_part_of_warp(const uint32_t*, const uint32_t*, uint32_t*, int) {
  if (threadIdx.x % 2 == 0) group_sync(1, 64);  // line: group_part_of_warp
}

__global__ void group_counts_differ(const uint32_t*, const uint32_t*, uint32_t*, int) {
  if (threadIdx.x < 64) {
    group_sync(1, 128);  // line: group_counts_differ first
  } else {
    group_sync(1, 64);  // line: group_counts_differ second
  }
}

__global__ void group_bad_id(const uint32_t*, const uint32_t*, uint32_t*, int n) {
  group_sync(n, 128);  // line: group_bad_id
}

__global__ void misaligned_copy(const uint32_t* a, const uint32_t*, uint32_t*, int) {
  KDTREE_DYNAMIC_SHARED(Words, shared);
  cp_async_16(&shared.words[0][1], a);  // line: misaligned_copy
}

__global__ void copy_outside_shared(const uint32_t* a, const uint32_t*, uint32_t*, int) {
  KDTREE_DYNAMIC_SHARED(Words, shared);
  cp_async_16(&shared + 1, a);  // line: copy_outside_shared
}

__global__ void null_source(const uint32_t*, const uint32_t*, uint32_t*, int) {
  KDTREE_DYNAMIC_SHARED(Words, shared);
  cp_async_16(&shared, nullptr);  // line: null_source
}

__global__ void unawaited_copy(const uint32_t* a, const uint32_t*, uint32_t*, int) {
  KDTREE_DYNAMIC_SHARED(Words, shared);
  cp_async_16(shared.words[threadIdx.x], a);  // line: unawaited_copy
  cp_async_commit();
  cp_async_wait<1>();
}

__global__ void uncommitted_copy(const uint32_t* a, const uint32_t*, uint32_t*, int) {
  KDTREE_DYNAMIC_SHARED(Words, shared);
  cp_async_16(shared.words[threadIdx.x], a);  // line: uncommitted_copy
  cp_async_wait<0>();
}

__global__ void ldmatrix_misaligned(const uint32_t*, const uint32_t*, uint32_t*, int) {
  KDTREE_DYNAMIC_SHARED(Words, shared);
  uint32_t r[2];
  ldmatrix_x2(r, &shared.words[0][2]);  // line: ldmatrix_misaligned
}

__global__ void ldmatrix_outside_shared(const uint32_t* a, const uint32_t*, uint32_t*, int) {
  uint32_t r[2];
  ldmatrix_x2(r, a);  // line: ldmatrix_outside_shared
}

__global__ void type_too_large(const uint32_t*, const uint32_t*, uint32_t* out, int) {
  KDTREE_DYNAMIC_SHARED(TooLarge, shared);  // line: type_too_large
  out[0] = shared.words[4095];
}

// The remaining kernels are for the race checker: those named race_ have one, those named ordered_ have none.

__global__ void race_without_barrier(const uint32_t*, const uint32_t*, uint32_t* out, int) {
  KDTREE_DYNAMIC_SHARED(Words, shared);
  uint32_t* words = shared.words[0];
  words[threadIdx.x] = threadIdx.x;             // line: race_without_barrier first
  out[threadIdx.x] = words[127 - threadIdx.x];  // line: race_without_barrier second
}

// A shuffle makes lanes meet but orders no memory.
__global__ void race_across_shuffle(const uint32_t*, const uint32_t*, uint32_t* out, int) {
  KDTREE_DYNAMIC_SHARED(Words, shared);
  uint32_t* words = shared.words[0];
  words[threadIdx.x] = threadIdx.x;  // line: race_across_shuffle first
  const uint32_t other = __shfl_xor_sync(kFullMask, threadIdx.x, 1);
  out[threadIdx.x] = words[other];  // line: race_across_shuffle second
}

// Lane 0 passes the address of a row that it wrote itself, but lanes 1 to 3 receive parts of it too.
__global__ void race_with_own_row(const uint32_t*, const uint32_t*, uint32_t* out, int) {
  KDTREE_DYNAMIC_SHARED(Words, shared);
  const int lane = threadIdx.x;
  for (int i = 0; i < 4; ++i) shared.words[lane][i] = lane;  // line: race_with_own_row first
  uint32_t r[4];
  ldmatrix_x4(r, shared.words[lane]);  // line: race_with_own_row second
  out[lane] = r[0];
}

// The barrier is among warps 0 and 1; warp 2 reads what warp 0 wrote.
__global__ void race_outside_group(const uint32_t*, const uint32_t*, uint32_t* out, int) {
  KDTREE_DYNAMIC_SHARED(Words, shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == 0) shared.words[lane][0] = lane;  // line: race_outside_group first
  if (warp < 2) group_sync(1, 64);
  if (warp == 2) out[lane] = shared.words[lane][0];  // line: race_outside_group second
}

// Warp 1 joins warp 0 at barrier 1 and then warp 2 at barrier 2, so warp 2 comes after what warp 0 wrote.
__global__ void ordered_through_groups(const uint32_t*, const uint32_t*, uint32_t* out, int) {
  KDTREE_DYNAMIC_SHARED(Words, shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == 0) shared.words[lane][0] = lane;
  if (warp < 2) group_sync(1, 64);
  if (warp == 1 || warp == 2) group_sync_or(2, 64, false);
  if (warp == 2) out[lane] = shared.words[lane][0];
}

__global__ void ordered_in_warp(const uint32_t*, const uint32_t*, uint32_t* out, int) {
  KDTREE_DYNAMIC_SHARED(Words, shared);
  uint32_t* words = shared.words[0];
  words[threadIdx.x] = threadIdx.x;
  __syncwarp();
  out[threadIdx.x] = words[threadIdx.x ^ 1];
}

// Neighbouring bytes belong to different threads.
__global__ void ordered_bytes(const uint32_t*, const uint32_t*, uint32_t* out, int) {
  KDTREE_DYNAMIC_SHARED(Words, shared);
  auto* bytes = reinterpret_cast<uint8_t*>(&shared);
  bytes[threadIdx.x] = static_cast<uint8_t>(threadIdx.x);
  out[threadIdx.x] = bytes[threadIdx.x];
}

constexpr Case kCases[] = {
    {"fresh_shared", fresh_shared, 128, kSharedIsN},
    {"early_read", early_read, 32, sizeof(Words)},
    {"wild_zfill", wild_zfill, 32, sizeof(Words)},
    {"skipped_barrier", skipped_barrier, 128, 0},
    {"divergent_barrier", divergent_barrier, 128, 0},
    {"lane_returned", lane_returned, 32, 0},
    {"different_collectives", different_collectives, 32, 0},
    {"different_lines", different_lines, 32, 0},
    {"mask_without_self", mask_without_self, 32, 0},
    {"absent_lane", absent_lane, 32, 0},
    {"group_part_of_warp", group_part_of_warp, 128, 0},
    {"group_counts_differ", group_counts_differ, 128, 0},
    {"group_bad_id", group_bad_id, 128, 0},
    {"misaligned_copy", misaligned_copy, 32, sizeof(Words)},
    {"copy_outside_shared", copy_outside_shared, 32, sizeof(Words)},
    {"null_source", null_source, 32, sizeof(Words)},
    {"unawaited_copy", unawaited_copy, 32, sizeof(Words)},
    {"uncommitted_copy", uncommitted_copy, 32, sizeof(Words)},
    {"ldmatrix_misaligned", ldmatrix_misaligned, 32, sizeof(Words)},
    {"ldmatrix_outside_shared", ldmatrix_outside_shared, 32, sizeof(Words)},
    {"type_too_large", type_too_large, 32, kSharedIsN},
    {"race_without_barrier", race_without_barrier, 128, sizeof(Words)},
    {"race_across_shuffle", race_across_shuffle, 32, sizeof(Words)},
    {"race_with_own_row", race_with_own_row, 32, sizeof(Words)},
    {"race_outside_group", race_outside_group, 128, sizeof(Words)},
    {"ordered_through_groups", ordered_through_groups, 128, sizeof(Words)},
    {"ordered_in_warp", ordered_in_warp, 32, sizeof(Words)},
    {"ordered_bytes", ordered_bytes, 128, sizeof(Words)},
};

}  // namespace
}  // namespace kdtree::conformance

// As kdtree_conformance.
KDTREE_CONFORMANCE_API int kdtree_fault(const char* name, const uint32_t* a, const uint32_t* b, uint32_t* out, int n,
                                        void* stream) {
  return kdtree::conformance::run(kdtree::conformance::kCases, name, a, b, out, n, stream);
}
