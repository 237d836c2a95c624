// One fiber: a stack and a place to resume it. A switch costs about ten nanoseconds, which is what makes a fiber for
// every CUDA thread affordable; ucontext, the fallback, makes a system call at every switch and is some 25 times
// slower.
#ifndef KDTREE_HOST_CONTEXT_H_
#define KDTREE_HOST_CONTEXT_H_

#include <cstddef>

#if !defined(KDTREE_SIMT_UCONTEXT) && !defined(__x86_64__) && !defined(__aarch64__)
#define KDTREE_SIMT_UCONTEXT
#endif

#ifdef KDTREE_SIMT_UCONTEXT
#include <ucontext.h>
#endif

namespace kdtree::simt {

class Context {
 public:
  // The next transfer to this context calls entry, which must not return, on the stack [bottom, bottom + size). Its
  // first frame starts `skew` bytes below the top.
  void prepare(void* bottom, size_t size, size_t skew, void (*entry)());

  // First thing to call in entry: completes the transfer that entered it.
  static void entered();

  // Leaves `from`, which is what runs now, and resumes `to`. A dying context is never resumed.
  static void transfer(Context& from, Context& to, bool from_dies = false);

 private:
#ifdef KDTREE_SIMT_UCONTEXT
  ucontext_t state_;
#else
  void* stack_pointer_ = nullptr;
#endif
  const void* bottom_ = nullptr;  // for AddressSanitizer, which has to know the stack it is on
  size_t size_ = 0;
  void* fake_stack_ = nullptr;
};

}  // namespace kdtree::simt

#endif  // KDTREE_HOST_CONTEXT_H_
