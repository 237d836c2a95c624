#include "host/race.h"

#include <algorithm>

#include "host/block.h"

extern "C" void __tsan_init();

namespace kdtree::simt::race {

namespace {

bool instrumented = false;

// Addresses in this library as 32 bits, the distance from one of its functions.
int32_t compress(const void* pc) {
  return static_cast<int32_t>(static_cast<const char*>(pc) - reinterpret_cast<const char*>(&__tsan_init));
}
std::string line_of(int32_t compressed) {
  // A return address may belong to the next line; the byte before it belongs to the call.
  return source_line(reinterpret_cast<const char*>(&__tsan_init) + compressed - 1);
}

[[noreturn]] void report(size_t cell, const char* now, const void* pc, const std::string& before, int32_t before_pc) {
  block->fail(format("race at byte %zu of shared memory: %s at %s, %s at %s, and no barrier between them", cell, now,
                     line_of(compress(pc)).c_str(), before.c_str(), line_of(before_pc).c_str()));
}

}  // namespace

bool enabled() { return instrumented; }

void Shadow::begin(size_t shared_bytes, int num_warps) {
  num_warps_ = num_warps;
  now_ = 1;
  for (auto& row : known_) std::fill(std::begin(row), std::end(row), 0);
  std::fill(std::begin(oldest_), std::end(oldest_), 0);
  write_time_.assign(shared_bytes, 0);
  writer_.assign(shared_bytes, 0);
  write_pc_.assign(shared_bytes, 0);
  reading_warps_.assign(shared_bytes, 0);
  readers_.assign(shared_bytes * num_warps, Readers{});
}

void Shadow::group_barrier(uint32_t warps) {
  uint32_t joined[kMaxWarps] = {};
  const auto for_each = [&](auto&& body) {
    for (int w = 0; w < num_warps_; ++w) {
      if (warps >> w & 1) body(w);
    }
  };
  for_each([&](int w) {
    for (int v = 0; v < num_warps_; ++v) joined[v] = std::max(joined[v], known_[w][v]);
  });
  for_each([&](int w) { joined[w] = now_; });
  for_each([&](int w) {
    std::copy_n(joined, num_warps_, known_[w]);
    oldest_[w] = *std::min_element(joined, joined + num_warps_);
  });
  ++now_;
}

// The last write of a byte, against an access now.
void Shadow::check_write(size_t cell, int thread, int warp, bool is_write, const void* pc) {
  const uint32_t time = write_time_[cell];
  if (time <= oldest_[warp]) return;
  const int other = writer_[cell];
  const char* now = is_write ? "written" : "read";
  if (time == kInFlight) {
    report(cell, now, pc, format("a cp.async of thread %d, not waited for, issued", other), write_pc_[cell]);
  }
  if (other != thread && time > known_[warp][other / kWarpSize]) {
    report(cell, now, pc, format("written by thread %d", other), write_pc_[cell]);
  }
}

// The reads of a byte since its last write, against a write now.
void Shadow::check_readers(size_t cell, int thread, int warp, const void* pc) {
  for (uint32_t warps = reading_warps_[cell]; warps != 0; warps &= warps - 1) {
    const int other = __builtin_ctz(warps);
    const Readers& seen = readers(cell, other);
    if (seen.time <= known_[warp][other]) continue;
    const uint32_t others = other == warp ? seen.lanes & ~(uint32_t{1} << thread % kWarpSize) : seen.lanes;
    if (others == 0) continue;
    report(cell, "written", pc, format("read by thread %d", other * kWarpSize + __builtin_ctz(others)), seen.pc);
  }
}

void Shadow::read(size_t offset, size_t bytes, const void* pc, bool whole_warp) {
  const Thread& self = block->self();
  const int warp = self.warp;
  // A row that ldmatrix reads goes to several lanes: none of them may have written it since the warp's last barrier.
  const int thread = whole_warp ? -1 : self.id;
  const uint32_t lanes = whole_warp ? ~uint32_t{0} : uint32_t{1} << self.lane;
  for (size_t cell = offset; cell < offset + bytes; ++cell) {
    check_write(cell, thread, warp, false, pc);
    Readers& seen = readers(cell, warp);
    if (seen.time <= known_[warp][warp]) {
      seen = {now_, lanes, compress(pc)};
    } else {
      seen.time = now_;
      seen.lanes |= lanes;
    }
    reading_warps_[cell] |= uint32_t{1} << warp;
  }
}

void Shadow::write(size_t offset, size_t bytes, const void* pc) {
  const Thread& self = block->self();
  for (size_t cell = offset; cell < offset + bytes; ++cell) {
    check_write(cell, self.id, self.warp, true, pc);
    check_readers(cell, self.id, self.warp, pc);
    write_time_[cell] = now_;
    writer_[cell] = static_cast<uint16_t>(self.id);
    write_pc_[cell] = compress(pc);
    reading_warps_[cell] = 0;
  }
}

void Shadow::copy_issued(size_t offset, size_t bytes, const void* pc) {
  write(offset, bytes, pc);
  std::fill_n(write_time_.begin() + offset, bytes, kInFlight);
}

void Shadow::copy_landed(size_t offset, size_t bytes) { std::fill_n(write_time_.begin() + offset, bytes, now_); }

namespace {

void access(const void* address, size_t bytes, bool is_write, const void* pc) {
  if (block == nullptr || !block->in_shared(address, bytes)) return;
  const size_t offset = block->shared_offset(address);
  if (is_write) {
    block->shadow().write(offset, bytes, pc);
  } else {
    block->shadow().read(offset, bytes, pc);
  }
}

}  // namespace

}  // namespace kdtree::simt::race

// The compiler's hooks. g++ and clang++ call the same ones, but only clang++ replaces memcpy and its like.
extern "C" {

#define KDTREE_HOOK(name, bytes, is_write) \
  void name(void* address) { kdtree::simt::race::access(address, bytes, is_write, __builtin_return_address(0)); }
#define KDTREE_HOOKS(bytes)                               \
  KDTREE_HOOK(__tsan_read##bytes, bytes, false)           \
  KDTREE_HOOK(__tsan_write##bytes, bytes, true)           \
  KDTREE_HOOK(__tsan_unaligned_read##bytes, bytes, false) \
  KDTREE_HOOK(__tsan_unaligned_write##bytes, bytes, true) \
  KDTREE_HOOK(__tsan_volatile_read##bytes, bytes, false)  \
  KDTREE_HOOK(__tsan_volatile_write##bytes, bytes, true)

KDTREE_HOOKS(1)
KDTREE_HOOKS(2)
KDTREE_HOOKS(4)
KDTREE_HOOKS(8)
KDTREE_HOOKS(16)

void __tsan_init() { kdtree::simt::race::instrumented = true; }
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_read(void**) {}
void __tsan_vptr_update(void**, void*) {}

void __tsan_read_range(void* address, size_t bytes) {
  kdtree::simt::race::access(address, bytes, false, __builtin_return_address(0));
}
void __tsan_write_range(void* address, size_t bytes) {
  kdtree::simt::race::access(address, bytes, true, __builtin_return_address(0));
}

void* __tsan_memcpy(void* target, const void* source, size_t bytes) {
  kdtree::simt::race::access(source, bytes, false, __builtin_return_address(0));
  kdtree::simt::race::access(target, bytes, true, __builtin_return_address(0));
  return std::memcpy(target, source, bytes);
}
void* __tsan_memmove(void* target, const void* source, size_t bytes) {
  kdtree::simt::race::access(source, bytes, false, __builtin_return_address(0));
  kdtree::simt::race::access(target, bytes, true, __builtin_return_address(0));
  return std::memmove(target, source, bytes);
}
void* __tsan_memset(void* target, int value, size_t bytes) {
  kdtree::simt::race::access(target, bytes, true, __builtin_return_address(0));
  return std::memset(target, value, bytes);
}

}  // extern "C"
