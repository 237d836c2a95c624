// The race checker: which unordered accesses to shared memory two threads of a block make.
//
// Kernels are compiled with -fsanitize=thread but not linked with its runtime; race.cpp defines the hooks that the
// compiler calls at every load and store. Order is kept by vector clocks: a block runs on one operating system thread,
// so one counter stamps every access, and warps know of each other what the last barrier between them told. Shuffles,
// mma and ldmatrix order nothing, as on the device.
#ifndef KDTREE_HOST_RACE_H_
#define KDTREE_HOST_RACE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kdtree::simt::race {

// Whether a library with instrumented kernels has been loaded.
bool enabled();

// What is known of every byte of a block's shared memory.
class Shadow {
 public:
  void begin(size_t shared_bytes, int num_warps);

  void read(size_t offset, size_t bytes, const void* pc, bool whole_warp = false);
  void write(size_t offset, size_t bytes, const void* pc);

  // An asynchronous copy owns its target from issue until its thread waits; any access in between is a race.
  void copy_issued(size_t offset, size_t bytes, const void* pc);
  void copy_landed(size_t offset, size_t bytes);

  // Barriers: a whole warp, or all warps in the mask.
  void warp_barrier(int warp) { group_barrier(uint32_t{1} << warp); }
  void group_barrier(uint32_t warps);

 private:
  static constexpr int kMaxWarps = 32;
  static constexpr uint32_t kInFlight = UINT32_MAX;  // stamp of a byte that an asynchronous copy owns

  struct Readers {  // of one byte, in one warp, since the warp's last barrier
    uint32_t time;
    uint32_t lanes;
    int32_t pc;
  };

  void check_write(size_t cell, int thread, int warp, bool is_write, const void* pc);
  void check_readers(size_t cell, int thread, int warp, const void* pc);
  Readers& readers(size_t cell, int warp) { return readers_[cell * num_warps_ + warp]; }

  int num_warps_ = 0;
  uint32_t now_ = 1;
  uint32_t known_[kMaxWarps][kMaxWarps] = {};  // [w][v]: w is ordered after all that v did up to this time
  uint32_t oldest_[kMaxWarps] = {};            // minimum of known_[w]
  std::vector<uint32_t> write_time_;
  std::vector<uint16_t> writer_;
  std::vector<int32_t> write_pc_;
  std::vector<uint32_t> reading_warps_;
  std::vector<Readers> readers_;
};

}  // namespace kdtree::simt::race

#endif  // KDTREE_HOST_RACE_H_
