// Op kv_compact: the contract is kdtree_kv_compact_args in kdtree/capi.h. The launcher gets checked arguments and
// returns 0, or nonzero with the reason in launch_error().
#pragma once

#include <cstdint>

#include "common/intrinsics.cuh"
#include "kdtree/capi.h"

namespace kdtree {

int64_t kv_compact_shared_bytes();
int launch_kv_compact(const kdtree_kv_compact_args& args, void* stream);

}  // namespace kdtree
