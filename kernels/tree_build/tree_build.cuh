// Op tree_build: the contract is kdtree_tree_build_args in kdtree/capi.h. The launcher gets checked arguments and
// returns 0, or nonzero with the reason in launch_error().
#pragma once

#include <cstdint>

#include "common/intrinsics.cuh"
#include "kdtree/capi.h"

namespace kdtree {

int64_t tree_build_shared_bytes();
int launch_tree_build(const kdtree_tree_build_args& args, void* stream);

}  // namespace kdtree
