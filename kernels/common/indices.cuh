// Arrays of kdtree_index_type.
#ifndef KDTREE_COMMON_INDICES_CUH_
#define KDTREE_COMMON_INDICES_CUH_

#include <cstdint>

#include "common/intrinsics.cuh"
#include "kdtree/capi.h"

namespace kdtree {

__device__ __forceinline__ int64_t load_index(const void* indices, int32_t type, int64_t i) {
  return type == KDTREE_INT64 ? static_cast<const int64_t*>(indices)[i] : static_cast<const int32_t*>(indices)[i];
}

// Does nothing when there is no array.
__device__ __forceinline__ void store_index(void* indices, int32_t type, int64_t i, int64_t value) {
  if (indices == nullptr) return;
  if (type == KDTREE_INT64) {
    static_cast<int64_t*>(indices)[i] = value;
  } else {
    static_cast<int32_t*>(indices)[i] = static_cast<int32_t>(value);
  }
}

}  // namespace kdtree

#endif  // KDTREE_COMMON_INDICES_CUH_
