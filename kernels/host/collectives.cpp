// Warp collectives: each lane leaves its operands on its own stack, the last to come computes for all (Block::meet).
#include <algorithm>

#include "host/block.h"

namespace kdtree::simt {

namespace {

constexpr uint32_t kFullMask = 0xffffffff;

// Every lane of a collective stands on the line of the last one to come.
[[noreturn]] void fail_here(const std::string& what) {
  const Thread& self = block->self();
  block->fail(format("%s (%s): %s", self.operation, to_string(self.site).c_str(), what.c_str()));
}

void require_full_warp(uint32_t mask) {
  if (mask != kFullMask) fail_here(format("the warp has only lanes 0x%08x", mask));
}

// Operands of one lane.
struct ShuffleLane {
  Shuffle kind;
  int operand, width;
  uint64_t bits, result;
};

// Shuffles as the PTX instruction shfl.sync defines them.
void compute_shuffle(void* const* operands, uint32_t mask) {
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    auto& own = *static_cast<ShuffleLane*>(operands[lane]);
    const int segment = kWarpSize - own.width;  // mask of the bits that name the group
    const int first = lane & segment;
    const int last = first | (own.width - 1);
    int source = lane;
    switch (own.kind) {
      case Shuffle::kIndex:
        source = first | (own.operand & ~segment & 31);
        break;
      case Shuffle::kXor:
        source = lane ^ (own.operand & 31);
        if (source > last) source = lane;
        break;
      case Shuffle::kUp:
        source = lane - (own.operand & 31);
        if (source < first) source = lane;
        break;
      case Shuffle::kDown:
        source = lane + (own.operand & 31);
        if (source > last) source = lane;
        break;
    }
    if (operands[source] == nullptr) {
      fail_here(format("lane %d reads lane %d, which is not in mask 0x%08x", lane, source, mask));
    }
    own.result = static_cast<ShuffleLane*>(operands[source])->bits;
  }
}

struct BallotLane {
  bool predicate;
  uint32_t result;
};

void compute_ballot(void* const* operands, uint32_t mask) {
  uint32_t votes = 0;
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if (mask >> lane & 1) votes |= static_cast<uint32_t>(static_cast<BallotLane*>(operands[lane])->predicate) << lane;
  }
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if (mask >> lane & 1) static_cast<BallotLane*>(operands[lane])->result = votes;
  }
}

struct ReduceLane {
  bool sum;
  int width;
  float value;
};

// The butterfly of the device code, with its order of operations.
void compute_reduce(void* const* operands, uint32_t mask) {
  require_full_warp(mask);
  const auto [sum, width, ignored] = *static_cast<ReduceLane*>(operands[0]);
  float values[kWarpSize];
  for (int lane = 0; lane < kWarpSize; ++lane) values[lane] = static_cast<ReduceLane*>(operands[lane])->value;
  for (int offset = width / 2; offset > 0; offset /= 2) {
    float partner[kWarpSize];
    for (int lane = 0; lane < kWarpSize; ++lane) partner[lane] = values[lane ^ offset];
    if (sum) {
      for (int lane = 0; lane < kWarpSize; ++lane) values[lane] += partner[lane];
    } else {
      for (int lane = 0; lane < kWarpSize; ++lane) values[lane] = fmaxf(values[lane], partner[lane]);
    }
  }
  for (int lane = 0; lane < kWarpSize; ++lane) static_cast<ReduceLane*>(operands[lane])->value = values[lane];
}

void compute_warp_barrier(void* const*, uint32_t) {
  if (race::enabled()) block->shadow().warp_barrier(block->self().warp);
}

struct LdmatrixLane {
  uint32_t* result;
  const void* row;
  const void* pc;
};

template <int Matrices, bool Transposed>
void compute_ldmatrix(void* const* operands, uint32_t mask) {
  constexpr int kRows = 8, kRowBytes = 16;
  require_full_warp(mask);
  uint16_t elements[Matrices][kRows][kRows];
  for (int lane = 0; lane < Matrices * kRows; ++lane) {
    const auto& own = *static_cast<LdmatrixLane*>(operands[lane]);
    if (!block->in_shared(own.row, kRowBytes)) {
      fail_here(format("the row of lane %d is not in shared memory", lane));
    }
    if (reinterpret_cast<uintptr_t>(own.row) % kRowBytes != 0) {
      fail_here(
          format("the row of lane %d is not 16-byte aligned, its offset is %zu", lane, block->shared_offset(own.row)));
    }
    if (race::enabled()) block->shadow().read(block->shared_offset(own.row), kRowBytes, own.pc, true);
    std::memcpy(elements[lane / kRows][lane % kRows], own.row, kRowBytes);
  }
  for (int lane = 0; lane < kWarpSize; ++lane) {
    uint32_t* result = static_cast<LdmatrixLane*>(operands[lane])->result;
    const int row = lane / 4, column = lane % 4 * 2;
    for (int m = 0; m < Matrices; ++m) {
      const auto& matrix = elements[m];
      const uint32_t lo = Transposed ? matrix[column][row] : matrix[row][column];
      const uint32_t hi = Transposed ? matrix[column + 1][row] : matrix[row][column + 1];
      result[m] = lo | hi << 16;
    }
  }
}

struct MmaLane {
  float* d;
  const uint32_t* a;
  const uint32_t* b;
};

// Float32 accumulation in the order of k; the products of bf16 values are exact. Lane 4 * g + t holds, of a, the rows g
// and g + 8 at k = 2t, 2t + 1, 2t + 8, 2t + 9; of b, column g at the same k; of d, those rows at columns 2t and 2t + 1.
void compute_mma(void* const* operands, uint32_t mask) {
  constexpr int kM = 16, kN = 8, kK = 16;
  require_full_warp(mask);
  float a[kM][kK], b[kK][kN], d[kM][kN];
  const auto lo = [](uint32_t pair) { return std::bit_cast<float>(pair << 16); };
  const auto hi = [](uint32_t pair) { return std::bit_cast<float>(pair & 0xffff0000u); };
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const auto& own = *static_cast<MmaLane*>(operands[lane]);
    const int g = lane / 4, t = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) {
      const int row = g + i % 2 * 8, k = t + i / 2 * 8;
      a[row][k] = lo(own.a[i]);
      a[row][k + 1] = hi(own.a[i]);
      d[g + i / 2 * 8][t + i % 2] = own.d[i];
    }
    for (int i = 0; i < 2; ++i) {
      b[t + i * 8][g] = lo(own.b[i]);
      b[t + i * 8 + 1][g] = hi(own.b[i]);
    }
  }
  for (int row = 0; row < kM; ++row) {
    for (int k = 0; k < kK; ++k) {
      for (int column = 0; column < kN; ++column) d[row][column] += a[row][k] * b[k][column];
    }
  }
  for (int lane = 0; lane < kWarpSize; ++lane) {
    float* result = static_cast<MmaLane*>(operands[lane])->d;
    const int g = lane / 4, t = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) result[i] = d[g + i / 2 * 8][t + i % 2];
  }
}

constexpr Collective kShuffle = {"shuffle", compute_shuffle};
constexpr Collective kBallot = {"ballot", compute_ballot};
constexpr Collective kReduce = {"lanes_reduce", compute_reduce};
constexpr Collective kWarpBarrier = {"__syncwarp", compute_warp_barrier};
constexpr Collective kLdmatrixX4 = {"ldmatrix_x4", compute_ldmatrix<4, false>};
constexpr Collective kLdmatrixX4Trans = {"ldmatrix_x4_trans", compute_ldmatrix<4, true>};
constexpr Collective kLdmatrixX2 = {"ldmatrix_x2", compute_ldmatrix<2, false>};
constexpr Collective kMma = {"mma_m16n8k16_bf16", compute_mma};

}  // namespace

uint64_t shuffle(Shuffle kind, uint32_t mask, uint64_t bits, int operand, int width, Site at) {
  if (width < 1 || width > kWarpSize || (width & (width - 1)) != 0) {
    block->fail(format("a shuffle (%s) of width %d, which is no power of two up to 32", to_string(at).c_str(), width));
  }
  ShuffleLane lane = {kind, operand, width, bits, 0};
  block->meet(kShuffle, mask, &lane, at);
  return lane.result;
}

uint32_t ballot(uint32_t mask, bool predicate, Site at) {
  BallotLane lane = {predicate, 0};
  block->meet(kBallot, mask, &lane, at);
  return lane.result;
}

float lanes_reduce(bool sum, int width, float value, Site at) {
  ReduceLane lane = {sum, width, value};
  block->meet(kReduce, kFullMask, &lane, at);
  return lane.value;
}

void warp_barrier(Site at) { block->meet(kWarpBarrier, kFullMask, nullptr, at); }

}  // namespace kdtree::simt

namespace kdtree {

using simt::block;

void ldmatrix_x4(uint32_t (&r)[4], const void* row, simt::Site at) {
  simt::LdmatrixLane lane = {r, row, __builtin_return_address(0)};
  block->meet(simt::kLdmatrixX4, simt::kFullMask, &lane, at);
}

void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row, simt::Site at) {
  simt::LdmatrixLane lane = {r, row, __builtin_return_address(0)};
  block->meet(simt::kLdmatrixX4Trans, simt::kFullMask, &lane, at);
}

void ldmatrix_x2(uint32_t (&r)[2], const void* row, simt::Site at) {
  simt::LdmatrixLane lane = {r, row, __builtin_return_address(0)};
  block->meet(simt::kLdmatrixX2, simt::kFullMask, &lane, at);
}

void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], simt::Site at) {
  simt::MmaLane lane = {d, a, b};
  block->meet(simt::kMma, simt::kFullMask, &lane, at);
}

}  // namespace kdtree
