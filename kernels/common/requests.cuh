// Where a request's rows are, in the padded and in the ragged layout of kdtree/capi.h.
#ifndef KDTREE_COMMON_REQUESTS_CUH_
#define KDTREE_COMMON_REQUESTS_CUH_

#include <cstdint>

#include "common/indices.cuh"
#include "common/intrinsics.cuh"
#include "kdtree/capi.h"

namespace kdtree {

struct RequestRows {
  int64_t first;
  int nodes;
  int status;  // KDTREE_SIZE_OUT_OF_RANGE, and then no nodes, where the rows are not within the call's capacities
};

template <class Args>
__device__ __forceinline__ RequestRows rows_of(const Args& args, int64_t request) {
  int64_t first = request * args.max_q_len;
  int64_t count = args.max_q_len;
  if (args.qo_indptr != nullptr) {
    first = load_index(args.qo_indptr, args.qo_indptr_type, request);
    count = load_index(args.qo_indptr, args.qo_indptr_type, request + 1) - first;
  } else if (args.num_nodes != nullptr) {
    count = args.num_nodes[request];
  }
  if (count < 0 || count > args.max_q_len || first < 0 || first > args.total_q - count) {
    return {first, 0, KDTREE_SIZE_OUT_OF_RANGE};
  }
  return {first, static_cast<int>(count), KDTREE_REQUEST_OK};
}

}  // namespace kdtree

#endif  // KDTREE_COMMON_REQUESTS_CUH_
