// The latent and rotary widths that have kernels, as compile-time constants.
#pragma once

#include "common/intrinsics.cuh"

namespace kdtree {

// Calls launch(IntC<d_latent>, IntC<d_rope>) for the geometry of args; capi.cu has refused all others.
template <int kValue>
struct IntC {
  static constexpr int value = kValue;
  __host__ __device__ constexpr operator int() const { return kValue; }
};

template <class Args, class Launch>
int with_geometry(const Args& args, Launch launch) {
  if (args.d_latent == 512 && args.d_rope == 64) return launch(IntC<512>(), IntC<64>());
  if (args.d_latent == 512 && args.d_rope == 0) return launch(IntC<512>(), IntC<0>());
  if (args.d_latent == 256 && args.d_rope == 64) return launch(IntC<256>(), IntC<64>());
  return launch(IntC<256>(), IntC<32>());
}

}  // namespace kdtree
