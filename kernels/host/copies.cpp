// cp.async: lazy copies land as late as they may, eager ones as early, so that a kernel cannot rely on either.
#include <algorithm>

#include "host/block.h"

extern "C" __attribute__((weak)) void* __asan_region_is_poisoned(void* begin, size_t size);  // null without ASan

namespace kdtree {

using simt::block;

namespace {

void check_addressable(const void* address, size_t bytes, const char* role, simt::Site at) {
  if (__asan_region_is_poisoned == nullptr) return;
  if (__asan_region_is_poisoned(const_cast<void*>(address), bytes) != nullptr) {
    block->fail(simt::format("cp.async (%s): the %zu bytes of its %s at %p may not be accessed",
                             simt::to_string(at).c_str(), bytes, role, address));
  }
}

// A null source copies zeros.
void issue(void* smem, const void* gmem, size_t bytes, const void* pc, simt::Site at) {
  const auto misaligned = [&](const void* address) { return reinterpret_cast<uintptr_t>(address) % bytes != 0; };
  if (misaligned(smem) || misaligned(gmem)) {
    block->fail(simt::format("cp.async (%s): target %p and source %p must be aligned to %zu bytes",
                             simt::to_string(at).c_str(), smem, gmem, bytes));
  }
  if (!block->in_shared(smem, bytes)) {
    block->fail(simt::format("cp.async (%s): its target is not in shared memory", simt::to_string(at).c_str()));
  }
  check_addressable(smem, bytes, "target", at);
  simt::Thread& thread = block->self();
  simt::Copy copy = {smem, static_cast<int>(bytes), thread.commits, at, {}};
  if (gmem != nullptr) {
    check_addressable(gmem, bytes, "source", at);
    std::memcpy(copy.data, gmem, bytes);
  }
  if (simt::race::enabled()) block->shadow().copy_issued(block->shared_offset(smem), bytes, pc);
  if (block->eager()) std::memcpy(smem, copy.data, bytes);
  thread.copies.push_back(copy);
}

}  // namespace

void cp_async_16(void* smem, const void* gmem, simt::Site at) {
  if (gmem == nullptr) block->fail(simt::format("cp.async (%s): its source is null", simt::to_string(at).c_str()));
  issue(smem, gmem, 16, __builtin_return_address(0), at);
}

void cp_async_16_zfill(void* smem, const void* gmem, bool valid, simt::Site at) {
  issue(smem, valid ? gmem : nullptr, 16, __builtin_return_address(0), at);
}

void cp_async_4(void* smem, const void* gmem, simt::Site at) {
  if (gmem == nullptr) block->fail(simt::format("cp.async (%s): its source is null", simt::to_string(at).c_str()));
  issue(smem, gmem, 4, __builtin_return_address(0), at);
}

void cp_async_commit() { ++block->self().commits; }

void simt::cp_async_wait(int groups_in_flight) {
  Thread& thread = block->self();
  const int num_done = thread.commits - groups_in_flight;  // groups
  const auto end = std::find_if(thread.copies.begin(), thread.copies.end(),
                                [&](const Copy& copy) { return copy.group >= num_done; });
  for (auto copy = thread.copies.begin(); copy != end; ++copy) {
    if (!block->eager()) std::memcpy(copy->target, copy->data, copy->bytes);
    if (race::enabled()) block->shadow().copy_landed(block->shared_offset(copy->target), copy->bytes);
  }
  thread.copies.erase(thread.copies.begin(), end);
}

}  // namespace kdtree
