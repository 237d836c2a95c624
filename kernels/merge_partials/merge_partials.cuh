// Op merge_partials: the contract is kdtree_merge_partials_args in kdtree/capi.h. The launcher gets checked arguments
// and returns 0, or nonzero with the reason in launch_error().
#pragma once

#include <cstdint>

#include "common/intrinsics.cuh"
#include "kdtree/capi.h"

namespace kdtree {

int64_t merge_partials_shared_bytes();
int launch_merge_partials(const kdtree_merge_partials_args& args, void* stream);

}  // namespace kdtree
