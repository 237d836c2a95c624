// Op verify_attn: the contract is kdtree_verify_attn_args in kdtree/capi.h. A launcher gets checked arguments and
// returns 0, or nonzero with the reason in launch_error().
#pragma once

#include <cstdint>

#include "common/intrinsics.cuh"
#include "kdtree/capi.h"
#include "verify_attn/geometry.cuh"

namespace kdtree {

// Keys a block takes at once; split_tokens is a multiple of it.
constexpr int kVerifyAttnKeyTile = 64;

// A launcher's choices that its workspace depends on.
struct VerifyAttnPlan {
  int64_t split_tokens;     // keys a block walks alone
  int64_t num_splits;       // blocks that share a row's keys
  int64_t workspace_bytes;  // partial results, 0 without a split
};

// Keys of request `batch_idx` that are in use, whatever the caller's device array holds.
__device__ __forceinline__ int64_t used_keys(const int32_t* kv_lens, int64_t batch_idx, int64_t kv_len) {
  if (kv_lens == nullptr) return kv_len;
  const int64_t used = kv_lens[batch_idx];
  return used < 0 ? 0 : (used > kv_len ? kv_len : used);
}

VerifyAttnPlan verify_attn_flash_plan(const kdtree_verify_attn_args& args);

int64_t verify_attn_shared_bytes();
int launch_verify_attn(const kdtree_verify_attn_args& args, void* stream);

int64_t verify_attn_flash_shared_bytes();
int launch_verify_attn_flash(const kdtree_verify_attn_args& args, void* stream);

}  // namespace kdtree
