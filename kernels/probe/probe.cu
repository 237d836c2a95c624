// The probe of phase 0: the three instructions that the tensor-core kernels stand on, in one small kernel.
//
//   d = a b^T    a [16, 16] bf16, b [8, 16] bf16, d [16, 8] float32, all row-major
//
// Work split: one warp. cp.async brings a and b to shared memory (LDGSTS in SASS), ldmatrix makes fragments of them
// (LDSM), mma.sync multiplies (HMMA). Phase 0 builds it for every architecture, looks for the three in the machine
// code, and runs it where there is a GPU.

#include "common/intrinsics.cuh"

namespace kdtree {
namespace {

struct Shared {
  uint16_t a[16][16];
  uint16_t b[8][16];
};

__global__ void probe_kernel(const uint16_t* a, const uint16_t* b, float* d) {
  KDTREE_DYNAMIC_SHARED(Shared, shared);
  const int lane = threadIdx.x;
  cp_async_16(&shared.a[lane / 2][lane % 2 * 8], a + lane * 8);
  if (lane < 16) cp_async_16(&shared.b[lane / 2][lane % 2 * 8], b + lane * 8);
  cp_async_commit();
  cp_async_wait<0>();
  __syncwarp();

  uint32_t a_fragment[4];
  uint32_t b_fragment[2];
  ldmatrix_x4(a_fragment, &shared.a[lane % 16][lane / 16 * 8]);
  ldmatrix_x2(b_fragment, &shared.b[lane % 8][lane / 8 % 2 * 8]);
  float sum[4] = {};
  mma_m16n8k16_bf16(sum, a_fragment, b_fragment);
  for (int i = 0; i < 4; ++i) d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sum[i];
}

}  // namespace
}  // namespace kdtree

// 0, or nonzero with the reason in kdtree_probe_error().
extern "C" __attribute__((visibility("default"))) int kdtree_probe(const uint16_t* a, const uint16_t* b, float* d,
                                                                   void* stream) {
  return kdtree::launch(kdtree::probe_kernel, dim3(1), dim3(32), sizeof(kdtree::Shared), stream, a, b, d);
}

extern "C" __attribute__((visibility("default"))) const char* kdtree_probe_error() { return kdtree::launch_error(); }
