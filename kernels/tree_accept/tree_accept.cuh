// Op tree_accept: the contract is kdtree_tree_accept_args in kdtree/capi.h. The launcher gets checked arguments and
// returns 0, or nonzero with the reason in launch_error().
#pragma once

#include <cstdint>

#include "common/intrinsics.cuh"
#include "kdtree/capi.h"

namespace kdtree {

int64_t tree_accept_shared_bytes();
int64_t tree_accept_workspace_bytes(const kdtree_tree_accept_args& args);
int launch_tree_accept(const kdtree_tree_accept_args& args, void* stream);

}  // namespace kdtree
