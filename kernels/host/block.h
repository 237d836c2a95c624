// The state of the block that an operating system thread runs: inside the runtime, not for kernels.
#ifndef KDTREE_HOST_BLOCK_H_
#define KDTREE_HOST_BLOCK_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "host/context.h"
#include "host/race.h"
#include "host/simt.h"

namespace kdtree::simt {

constexpr int kWarpSize = 32;
constexpr int kMaxWarps = 32;
constexpr int kNumBarriers = 16;

enum class Order { kForward, kReverse, kRandom };

// One cp.async in flight. Its source is read at issue; lazy copies land at the wait.
struct Copy {
  void* target;
  int bytes;
  int group;  // number of commits before its own
  Site at;
  alignas(16) unsigned char data[16];
};

// A CUDA thread is a fiber.
struct Thread {
  Context context;
  Indices indices;
  int id = 0;
  int warp = 0;
  int lane = 0;

  const char* operation = nullptr;  // the last barrier or collective that it came to
  Site site;
  void* operands = nullptr;  // of its warp collective; they lie on its stack, the last lane to come works on them
  bool vote = false;         // result of the last barrier

  std::vector<Copy> copies;
  int commits = 0;

  void arrive(const char* name, Site at) {
    operation = name;
    site = at;
  }
};

// What a warp does together. `compute` serves all lanes at once: operands[lane] for every lane in the mask.
struct Collective {
  const char* name;
  void (*compute)(void* const* operands, uint32_t mask);
};

struct Rendezvous {
  const Collective* collective = nullptr;
  uint32_t mask = 0;
  uint32_t arrived = 0;
  int first = 0;  // lane that came first
};

struct Warp {
  uint32_t lanes = 0;  // that exist
  uint32_t runnable = 0;
  uint32_t exited = 0;
  int cursor = 0;                    // lane that ran last
  Rendezvous rendezvous[kWarpSize];  // by the lowest lane of the mask, so that disjoint masks do not meet
};

struct Barrier {
  int arrived = 0;
  int count = 0;
  bool vote = false;
  const char* name = nullptr;
  int first = 0;  // thread that came first
  uint32_t lanes[kMaxWarps] = {};
};

// How to run a launch, from the environment.
struct Settings {
  Order order = Order::kForward;
  uint64_t seed = 0;
  bool eager = false;
  int workers = 1;
};

class Block {
 public:
  Block();
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  // Makes room for the launch's blocks; false when the system has no memory for them.
  bool reserve(const Launch& launch, const Settings& settings);

  // Runs one block to its end; false when it failed, with the reason in failure().
  bool run(int64_t number);
  const std::string& failure() const { return failure_; }

  Thread& self() { return *self_; }
  bool in_shared(const void* address, size_t bytes) const;
  size_t shared_offset(const void* address) const { return static_cast<const unsigned char*>(address) - shared_.get(); }
  void* shared_memory() { return shared_.get(); }
  size_t shared_bytes() const { return launch_->shared_bytes; }
  int num_threads() const { return num_threads_; }
  bool eager() const { return settings_->eager; }
  race::Shadow& shadow() { return shadow_; }

  // Ends the block with this error, on behalf of the thread that runs.
  [[noreturn]] void fail(const std::string& what);

  // The calling lane meets the others of the mask; returns when `collective` has been computed for all.
  void meet(const Collective& collective, uint32_t mask, void* operands, Site at);

  // The calling thread waits at barrier `id` for `count` threads; returns the OR of their votes.
  bool wait(int id, int count, const char* name, bool vote, Site at);

  // The same for a group of warps; refuses what bar.sync does not take.
  bool group_wait(int id, int count, const char* name, bool vote, Site at);

 private:
  friend void thread_main();

  void suspend();
  Thread* pick();
  int choose(uint32_t candidates, int previous);
  void resume(Thread& next, bool self_dies);
  [[noreturn]] void leave();
  [[noreturn]] void exit_thread();
  void open(Barrier& barrier, int id);
  std::string stuck() const;
  std::string describe_threads(const std::vector<int>& ids) const;

  struct FreeShared {
    void operator()(unsigned char* memory) const;
  };

  const Launch* launch_ = nullptr;
  const Settings* settings_ = nullptr;
  int num_threads_ = 0;
  int num_warps_ = 0;
  int num_exited_ = 0;
  uint64_t random_ = 0;
  int warp_ = 0;  // that runs
  Thread* self_ = nullptr;
  Context outside_;
  std::vector<Thread> threads_;
  Warp warps_[kMaxWarps];
  Barrier barriers_[kNumBarriers];
  unsigned char* stacks_ = nullptr;
  int num_stacks_ = 0;
  std::unique_ptr<unsigned char, FreeShared> shared_;
  size_t shared_capacity_ = 0;
  race::Shadow shadow_;
  std::string failure_;
};

// The block that this operating system thread runs; null outside a launch.
extern constinit KDTREE_SIMT_THREAD_LOCAL Block* block;

std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));

// "folder/file.cu:12"
std::string to_string(Site at);

// The source line of an address in a loaded library, or the library and the offset when there is no debug information.
std::string source_line(const void* pc);
std::string function_name(const void* pc);

}  // namespace kdtree::simt

#endif  // KDTREE_HOST_BLOCK_H_
