#include "host/simt.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <limits>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "host/block.h"

namespace kdtree::simt {

constinit KDTREE_SIMT_THREAD_LOCAL const Indices* indices = nullptr;
constinit KDTREE_SIMT_THREAD_LOCAL Block* block = nullptr;

namespace {

constexpr int kMaxThreads = kWarpSize * kMaxWarps;
constexpr size_t kStackBytes = 128 * 1024;
constexpr int kPoison = 0xff;  // a NaN as float32 and as bf16
// Without a skew all stacks of a warp would start in the same few cache sets, which halves the speed of some kernels.
constexpr size_t kStackSkew = 192;
constexpr size_t kMaxStackSkew = 16 * 1024;

thread_local std::string error;

size_t guard_bytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

}  // namespace

void thread_main();  // where every fiber starts

// ---- One block: its threads take turns on one operating system thread.

void Block::FreeShared::operator()(unsigned char* memory) const { std::free(memory); }

Block::Block() = default;

Block::~Block() {
  if (stacks_ != nullptr) munmap(stacks_, num_stacks_ * (kStackBytes + guard_bytes()));
}

bool Block::reserve(const Launch& launch, const Settings& settings) {
  launch_ = &launch;
  settings_ = &settings;
  num_threads_ = static_cast<int>(launch.block.x * launch.block.y * launch.block.z);
  num_warps_ = (num_threads_ + kWarpSize - 1) / kWarpSize;
  if (num_threads_ > num_stacks_) {
    const size_t stride = kStackBytes + guard_bytes();
    void* memory = mmap(nullptr, num_threads_ * stride, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return false;
    if (stacks_ != nullptr) munmap(stacks_, num_stacks_ * stride);
    stacks_ = static_cast<unsigned char*>(memory);
    num_stacks_ = num_threads_;
    for (int i = 0; i < num_stacks_; ++i) {  // below each stack a page without access, so that an overflow stops there
      if (mprotect(stacks_ + i * stride + guard_bytes(), kStackBytes, PROT_READ | PROT_WRITE) != 0) return false;
    }
    threads_.resize(num_threads_);
  }
  // Exactly the launched size: AddressSanitizer then sees the first byte past it.
  if (launch.shared_bytes != shared_capacity_ || shared_ == nullptr) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 1024, launch.shared_bytes) != 0) return false;
    shared_.reset(static_cast<unsigned char*>(memory));
    shared_capacity_ = launch.shared_bytes;
  }
  return true;
}

bool Block::run(int64_t number) {
  const dim3& grid = launch_->grid;
  const dim3& dims = launch_->block;
  const uint3 index = {static_cast<unsigned>(number % grid.x), static_cast<unsigned>(number / grid.x % grid.y),
                       static_cast<unsigned>(number / grid.x / grid.y)};
  failure_.clear();
  num_exited_ = 0;
  // Spread by a large odd factor so that neighbouring seeds and blocks differ in every bit; never zero, as xorshift
  // needs.
  random_ = (settings_->seed * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(number)) * 0xbf58476d1ce4e5b9u | 1;
  const int before_first = settings_->order == Order::kReverse ? 0 : kWarpSize - 1;
  warp_ = before_first;
  std::fill(std::begin(warps_), std::end(warps_), Warp{});
  std::fill(std::begin(barriers_), std::end(barriers_), Barrier{});
  for (int id = 0; id < num_threads_; ++id) {
    Thread& thread = threads_[id];
    thread.indices = {{id % dims.x, id / dims.x % dims.y, id / dims.x / dims.y}, index, dims, grid};
    thread.id = id;
    thread.warp = id / kWarpSize;
    thread.lane = id % kWarpSize;
    thread.copies.clear();
    thread.commits = 0;
    unsigned char* stack = stacks_ + id * (kStackBytes + guard_bytes()) + guard_bytes();
    thread.context.prepare(stack, kStackBytes, id * kStackSkew % kMaxStackSkew, thread_main);
    Warp& warp = warps_[thread.warp];
    warp.lanes |= uint32_t{1} << thread.lane;
    warp.runnable = warp.lanes;
    warp.cursor = before_first;
  }
  std::memset(shared_.get(), kPoison, launch_->shared_bytes);
  if (race::enabled()) shadow_.begin(launch_->shared_bytes, num_warps_);

  block = this;
  self_ = pick();
  indices = &self_->indices;
  Context::transfer(outside_, self_->context);
  block = nullptr;
  indices = nullptr;
  return failure_.empty();
}

void thread_main() {
  Context::entered();
  block->launch_->call(block->launch_->state);
  block->exit_thread();
}

void Block::exit_thread() {
  if (!self_->copies.empty()) {
    fail(format("returned with %zu cp.async copies never waited for, the first issued at %s", self_->copies.size(),
                to_string(self_->copies.front().at).c_str()));
  }
  Warp& warp = warps_[self_->warp];
  warp.runnable &= ~(uint32_t{1} << self_->lane);
  warp.exited |= uint32_t{1} << self_->lane;
  if (++num_exited_ == num_threads_) leave();
  Thread* next = pick();
  if (next == nullptr) fail(stuck());
  resume(*next, true);
  std::abort();  // not reached: a thread that exited is never resumed
}

void Block::leave() {
  Context::transfer(self_->context, outside_, true);
  std::abort();  // not reached
}

void Block::fail(const std::string& what) {
  const uint3& index = self_->indices.block;
  failure_ = format("block (%u, %u, %u), thread %d: %s", index.x, index.y, index.z, self_->id, what.c_str());
  leave();  // the other threads' fibers are abandoned where they stand; nothing in a kernel needs to be destroyed
}

void Block::resume(Thread& next, bool self_dies) {
  Thread& previous = *self_;
  if (&next == &previous) return;
  self_ = &next;
  indices = &next.indices;
  Context::transfer(previous.context, next.context, self_dies);
}

void Block::suspend() {
  warps_[self_->warp].runnable &= ~(uint32_t{1} << self_->lane);
  Thread* next = pick();
  if (next == nullptr) fail(stuck());
  resume(*next, false);
}

// The next thread to run. A warp runs as far ahead of the others as it can, which is hostile to a missing barrier;
// random order also takes turns within that.
Thread* Block::pick() {
  const bool hop = settings_->order == Order::kRandom && choose(0xff, 0) == 0;
  if (warps_[warp_].runnable == 0 || hop) {
    uint32_t candidates = 0;
    for (int warp = 0; warp < num_warps_; ++warp) {
      candidates |= static_cast<uint32_t>(warps_[warp].runnable != 0) << warp;
    }
    if (candidates == 0) return nullptr;
    warp_ = choose(candidates, warp_);
  }
  Warp& warp = warps_[warp_];
  warp.cursor = choose(warp.runnable, warp.cursor);
  return &threads_[warp_ * kWarpSize + warp.cursor];
}

// One bit of `candidates`, which is not zero: the one after `previous` in the launch's order.
int Block::choose(uint32_t candidates, int previous) {
  int start = previous + 1;
  switch (settings_->order) {
    case Order::kForward:
      break;
    case Order::kReverse:
      return (previous + 31 - std::countl_zero(std::rotr(candidates, previous))) % 32;
    case Order::kRandom:
      random_ ^= random_ << 13;
      random_ ^= random_ >> 7;
      random_ ^= random_ << 17;
      start = static_cast<int>(random_ >> 32 & 31);
  }
  return (start + std::countr_zero(std::rotr(candidates, start))) % 32;
}

void Block::meet(const Collective& collective, uint32_t mask, void* operands, Site at) {
  Thread& thread = *self_;
  Warp& warp = warps_[thread.warp];
  const uint32_t self_bit = uint32_t{1} << thread.lane;
  mask &= warp.lanes;
  if ((mask & self_bit) == 0) {
    fail(format("%s (%s) with mask 0x%08x, which leaves out the calling lane %d", collective.name,
                to_string(at).c_str(), mask, thread.lane));
  }
  Rendezvous& rendezvous = warp.rendezvous[std::countr_zero(mask)];
  if (rendezvous.arrived == 0) {
    rendezvous = {&collective, mask, 0, thread.lane};
  } else {
    const Thread& first = threads_[thread.warp * kWarpSize + rendezvous.first];
    if (rendezvous.collective != &collective || rendezvous.mask != mask || first.site.line() != at.line()) {
      fail(format("divergent warp: lane %d is at %s (%s, mask 0x%08x) while lane %d is at %s (%s, mask 0x%08x)",
                  thread.lane, collective.name, to_string(at).c_str(), mask, first.lane, rendezvous.collective->name,
                  to_string(first.site).c_str(), rendezvous.mask));
    }
  }
  thread.arrive(collective.name, at);
  thread.operands = operands;
  rendezvous.arrived |= self_bit;
  if (rendezvous.arrived != mask) return suspend();

  void* all[kWarpSize] = {};
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if (mask >> lane & 1) all[lane] = threads_[thread.warp * kWarpSize + lane].operands;
  }
  rendezvous.arrived = 0;
  collective.compute(all, mask);
  warp.runnable |= mask;
}

bool Block::wait(int id, int count, const char* name, bool vote, Site at) {
  Thread& thread = *self_;
  Barrier& barrier = barriers_[id];
  if (barrier.arrived == 0) {
    barrier = {.count = count, .name = name, .first = thread.id};
  } else {
    // Group barriers may be written twice, for two kinds of warps; the whole block has to stand on one line.
    const Thread& first = threads_[barrier.first];
    if (barrier.name != name || barrier.count != count || (id == 0 && first.site.line() != at.line())) {
      fail(format("divergent barrier %d: at %s for %d threads (%s) while thread %d is at %s for %d threads (%s)", id,
                  name, count, to_string(at).c_str(), first.id, barrier.name, barrier.count,
                  to_string(first.site).c_str()));
    }
  }
  thread.arrive(name, at);
  barrier.vote |= vote;
  barrier.lanes[thread.warp] |= uint32_t{1} << thread.lane;
  if (++barrier.arrived == barrier.count) {
    open(barrier, id);
  } else {
    suspend();
  }
  return thread.vote;
}

bool Block::group_wait(int id, int count, const char* name, bool vote, Site at) {
  if (id < 1 || id >= kNumBarriers || count < kWarpSize || count % kWarpSize != 0 || count > num_threads_) {
    fail(format("%s(%d, %d) at %s: the id must be 1 to 15, the count a multiple of 32 up to the block's %d threads",
                name, id, count, to_string(at).c_str(), num_threads_));
  }
  return wait(id, count, name, vote, at);
}

void Block::open(Barrier& barrier, int id) {
  uint32_t group = 0;
  for (int w = 0; w < num_warps_; ++w) {
    const uint32_t lanes = barrier.lanes[w];
    if (lanes == 0) continue;
    if (lanes != warps_[w].lanes) {
      fail(format("barrier %d (%s) is full (%d threads) with only a part of warp %d in it, lanes 0x%08x", id,
                  to_string(self_->site).c_str(), barrier.count, w, lanes));
    }
    group |= uint32_t{1} << w;
    warps_[w].runnable |= lanes;
    for (int lane = 0; lane < kWarpSize; ++lane) {
      if (lanes >> lane & 1) threads_[w * kWarpSize + lane].vote = barrier.vote;
    }
  }
  barrier.arrived = 0;
  if (race::enabled()) shadow_.group_barrier(group);
}

bool Block::in_shared(const void* address, size_t bytes) const {
  const auto offset = reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(shared_.get());
  return offset <= launch_->shared_bytes && bytes <= launch_->shared_bytes - offset;
}

std::string Block::stuck() const {
  // Threads in the same place share a line of the report.
  std::vector<std::pair<std::string, std::vector<int>>> places;
  for (int id = 0; id < num_threads_; ++id) {
    const Thread& thread = threads_[id];
    const bool exited = warps_[thread.warp].exited >> thread.lane & 1;
    const std::string place =
        exited ? "returned" : format("wait in %s (%s)", thread.operation, to_string(thread.site).c_str());
    auto entry = std::find_if(places.begin(), places.end(), [&](const auto& known) { return known.first == place; });
    if (entry == places.end()) entry = places.insert(entry, {place, {}});
    entry->second.push_back(id);
  }
  std::string text = "deadlock:";
  for (const auto& [place, ids] : places) text += " threads " + describe_threads(ids) + " " + place + ";";
  text.pop_back();
  return text;
}

std::string Block::describe_threads(const std::vector<int>& ids) const {
  std::string text;
  for (size_t begin = 0, end; begin < ids.size(); begin = end) {
    for (end = begin + 1; end < ids.size() && ids[end] == ids[end - 1] + 1;) ++end;
    if (!text.empty()) text += ", ";
    text += std::to_string(ids[begin]);
    if (end - begin > 1) text += "-" + std::to_string(ids[end - 1]);
  }
  return text;
}

// ---- What kernels call.

void* dynamic_shared(size_t type_bytes, Site at) {
  if (type_bytes > block->shared_bytes()) {
    block->fail(format("the shared memory type at %s has %zu bytes, the launch gave %zu", to_string(at).c_str(),
                       type_bytes, block->shared_bytes()));
  }
  return block->shared_memory();
}

bool block_barrier(const char* name, bool predicate, Site at) {
  return block->wait(0, block->num_threads(), name, predicate, at);
}

// ---- A launch: operating system threads take blocks from a counter.

namespace {

// Null, or what is wrong with the environment.
const char* read_environment(Settings& settings) {
  constexpr const char* kRandom = "random:";
  const auto number = [](const char* text, uint64_t& value) {
    char* end = nullptr;
    value = std::strtoull(text, &end, 10);
    return *text >= '0' && *text <= '9' && *end == '\0';
  };
  if (const char* order = std::getenv("KDTREE_SIMT_ORDER"); order != nullptr && std::strcmp(order, "forward") != 0) {
    if (std::strcmp(order, "reverse") == 0) {
      settings.order = Order::kReverse;
    } else if (std::strncmp(order, kRandom, std::strlen(kRandom)) == 0 &&
               number(order + std::strlen(kRandom), settings.seed)) {
      settings.order = Order::kRandom;
    } else {
      return "KDTREE_SIMT_ORDER must be forward, reverse or random:SEED";
    }
  }
  if (const char* async = std::getenv("KDTREE_SIMT_ASYNC"); async != nullptr && std::strcmp(async, "lazy") != 0) {
    if (std::strcmp(async, "eager") != 0) return "KDTREE_SIMT_ASYNC must be lazy or eager";
    settings.eager = true;
  }
  settings.workers = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  if (const char* threads = std::getenv("KDTREE_SIMT_THREADS"); threads != nullptr) {
    constexpr uint64_t kMaxWorkers = 1024;
    uint64_t value = 0;
    if (!number(threads, value) || value < 1 || value > kMaxWorkers) return "KDTREE_SIMT_THREADS must be 1 to 1024";
    settings.workers = static_cast<int>(value);
  }
  return nullptr;
}

// Empty, or why CUDA would refuse the launch as well.
std::string launch_problem(const Launch& launch) {
  const auto& [kernel, grid, dims, shared_bytes, call, state] = launch;
  constexpr unsigned kMaxGridX = std::numeric_limits<int>::max(), kMaxGridYZ = 65535;
  if (grid.x < 1 || grid.x > kMaxGridX || grid.y < 1 || grid.y > kMaxGridYZ || grid.z < 1 || grid.z > kMaxGridYZ) {
    return format("grid (%u, %u, %u) is outside 1..2147483647, 1..65535, 1..65535", grid.x, grid.y, grid.z);
  }
  if (uint64_t{dims.x} * dims.y * dims.z < 1 || uint64_t{dims.x} * dims.y * dims.z > kMaxThreads || dims.z > 64 ||
      dims.x > kMaxThreads || dims.y > kMaxThreads) {
    return format("block (%u, %u, %u) is outside 1..%d threads", dims.x, dims.y, dims.z, kMaxThreads);
  }
  if (shared_bytes > kSharedLimit) {
    return format("the kernel needs %zu bytes of shared memory, sm_120 offers %d", shared_bytes, kSharedLimit);
  }
  return {};
}

// Blocks keep their stacks from launch to launch: making them costs more than many a kernel.
class BlockPool {
 public:
  std::unique_ptr<Block> take() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) return std::make_unique<Block>();
    std::unique_ptr<Block> block = std::move(free_.back());
    free_.pop_back();
    return block;
  }
  void give(std::unique_ptr<Block> block) {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(block));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Block>> free_;
};

BlockPool& block_pool() {
  static BlockPool& pool = *new BlockPool;  // never destroyed: a launch may outlive static destructors
  return pool;
}

// The blocks of one launch, shared by its workers.
class Grid {
 public:
  Grid(const Launch& launch, const Settings& settings)
      : launch_(launch), settings_(settings), num_blocks_(int64_t{launch.grid.x} * launch.grid.y * launch.grid.z) {}

  int num_workers() const { return static_cast<int>(std::min<int64_t>(settings_.workers, num_blocks_)); }

  void work() noexcept {
    try {
      std::unique_ptr<Block> block = block_pool().take();
      if (!block->reserve(launch_, settings_)) throw std::bad_alloc();
      for (int64_t turn; (turn = next_.fetch_add(1)) < num_blocks_;) {
        const int64_t number = in_order(turn);
        if (!block->run(number)) stop(number, block->failure());
      }
      block_pool().give(std::move(block));
    } catch (const std::exception& exception) {
      stop(0, exception.what());
    }
  }

  // Of the failed block with the lowest number; empty when none failed.
  const std::string& failure() const { return failure_; }

 private:
  int64_t in_order(int64_t turn) const {
    switch (settings_.order) {
      case Order::kReverse:
        return num_blocks_ - 1 - turn;
      case Order::kRandom:
        return static_cast<int64_t>((static_cast<uint64_t>(turn) + settings_.seed) % num_blocks_);
      default:
        return turn;
    }
  }

  void stop(int64_t number, const std::string& failure) {
    next_ = num_blocks_;
    const std::lock_guard lock(mutex_);
    if (failure_.empty() || number < failed_) {
      failure_ = failure;
      failed_ = number;
    }
  }

  const Launch& launch_;
  const Settings& settings_;
  const int64_t num_blocks_;
  std::atomic<int64_t> next_ = 0;
  std::mutex mutex_;
  int64_t failed_ = 0;
  std::string failure_;
};

}  // namespace

int run(const Launch& launch) {
  Settings settings;
  if (const char* problem = read_environment(settings); problem != nullptr) {
    error = problem;
    return 1;
  }
  if (std::string problem = launch_problem(launch); !problem.empty()) {
    error = std::move(problem);
    return 1;
  }
  Grid grid(launch, settings);
  std::vector<std::thread> workers;
  try {
    for (int i = 1; i < grid.num_workers(); ++i) workers.emplace_back(&Grid::work, &grid);
  } catch (const std::exception&) {
    // Fewer threads than wanted run the same blocks.
  }
  grid.work();
  for (std::thread& worker : workers) worker.join();
  if (grid.failure().empty()) return 0;
  error = function_name(launch.kernel) + ", " + grid.failure();
  return 1;
}

}  // namespace kdtree::simt

namespace kdtree {

const char* launch_error() { return simt::error.c_str(); }

void group_sync(int id, int count, simt::Site at) { simt::block->group_wait(id, count, "group_sync", false, at); }

bool group_sync_or(int id, int count, bool p, simt::Site at) {
  return simt::block->group_wait(id, count, "group_sync_or", p, at);
}

}  // namespace kdtree
