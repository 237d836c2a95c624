// Op verify_attn_paged: the contract is kdtree_verify_attn_paged_args in kdtree/capi.h. A launcher gets checked
// arguments and returns 0, or nonzero with the reason in launch_error().
#pragma once

#include <cstdint>

#include "common/intrinsics.cuh"
#include "kdtree/capi.h"

namespace kdtree {

// split_tokens is a multiple of it.
constexpr int kVerifyAttnPagedKeyTile = 16;

// From the sizes alone.
int64_t verify_attn_paged_workspace_bytes(const kdtree_verify_attn_paged_args& args);

int64_t verify_attn_flash_paged_shared_bytes();
int launch_verify_attn_flash_paged(const kdtree_verify_attn_paged_args& args, void* stream);

}  // namespace kdtree
