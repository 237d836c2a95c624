// The conformance libraries: small kernels, one an intrinsic, so that both builds can be put to the same checks
// (phases/phase0/conformance.py). Not part of libkdtree.
#ifndef KDTREE_CONFORMANCE_CONFORMANCE_H_
#define KDTREE_CONFORMANCE_CONFORMANCE_H_

#include <cstring>

#include "common/intrinsics.cuh"

#define KDTREE_CONFORMANCE_API extern "C" __attribute__((visibility("default")))

namespace kdtree::conformance {

// Every kernel takes two input arrays, an output array and a number; what they hold is said at the kernel.
using Kernel = void (*)(const uint32_t* a, const uint32_t* b, uint32_t* out, int n);

struct Case {
  const char* name;
  Kernel kernel;
  int threads;
  int shared_bytes;  // kSharedIsN: n
};

constexpr int kSharedIsN = -1;

template <size_t Count>
int run(const Case (&cases)[Count], const char* name, const uint32_t* a, const uint32_t* b, uint32_t* out, int n,
        void* stream) {
  constexpr int kUnknown = -1;
  for (const Case& test : cases) {
    if (std::strcmp(test.name, name) != 0) continue;
    const int shared_bytes = test.shared_bytes == kSharedIsN ? n : test.shared_bytes;
    return launch(test.kernel, dim3(1), dim3(test.threads), shared_bytes, stream, a, b, out, n);
  }
  return kUnknown;
}

}  // namespace kdtree::conformance

#endif  // KDTREE_CONFORMANCE_CONFORMANCE_H_
