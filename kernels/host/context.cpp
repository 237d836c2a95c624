#include "host/context.h"

#include <cstdint>

// Present when AddressSanitizer is in the process, null otherwise: one build of the runtime serves both.
extern "C" {
__attribute__((weak)) void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t size);
__attribute__((weak)) void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom, size_t* size);
__attribute__((weak)) void __asan_unpoison_memory_region(const volatile void* address, size_t size);
}

#ifndef KDTREE_SIMT_UCONTEXT

extern "C" __attribute__((visibility("hidden"))) void kdtree_simt_switch(void** from, void* to);

#define KDTREE_STRING_(x) #x
#define KDTREE_STRING(x) KDTREE_STRING_(x)
#define KDTREE_SYMBOL(name) KDTREE_STRING(__USER_LABEL_PREFIX__) name

// Saves the callee-saved registers on the stack, stores the stack pointer to *from, and undoes that for `to`. The
// floating-point control registers are left alone: no kernel changes them.
#if defined(__x86_64__)
asm(".text\n"
    ".p2align 4\n"
    ".globl " KDTREE_SYMBOL("kdtree_simt_switch") "\n"
    KDTREE_SYMBOL("kdtree_simt_switch") ":\n"
    "  pushq %rbp\n"
    "  pushq %rbx\n"
    "  pushq %r12\n"
    "  pushq %r13\n"
    "  pushq %r14\n"
    "  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n"
    "  popq %r14\n"
    "  popq %r13\n"
    "  popq %r12\n"
    "  popq %rbx\n"
    "  popq %rbp\n"
    "  ret\n");
constexpr int kSavedWords = 6 + 2;  // the registers, the address to return to, and the null return address of entry
constexpr int kEntryWord = 6;
#else
asm(".text\n"
    ".p2align 4\n"
    ".globl " KDTREE_SYMBOL("kdtree_simt_switch") "\n"
    KDTREE_SYMBOL("kdtree_simt_switch") ":\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp, #0]\n"
    "  stp x21, x22, [sp, #16]\n"
    "  stp x23, x24, [sp, #32]\n"
    "  stp x25, x26, [sp, #48]\n"
    "  stp x27, x28, [sp, #64]\n"
    "  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n"
    "  stp d10, d11, [sp, #112]\n"
    "  stp d12, d13, [sp, #128]\n"
    "  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n"
    "  str x9, [x0]\n"
    "  mov sp, x1\n"
    "  ldp x19, x20, [sp, #0]\n"
    "  ldp x21, x22, [sp, #16]\n"
    "  ldp x23, x24, [sp, #32]\n"
    "  ldp x25, x26, [sp, #48]\n"
    "  ldp x27, x28, [sp, #64]\n"
    "  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n"
    "  ldp d10, d11, [sp, #112]\n"
    "  ldp d12, d13, [sp, #128]\n"
    "  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n"
    "  ret\n");
constexpr int kSavedWords = 20;
constexpr int kEntryWord = 11;  // x30
#endif

#endif  // !KDTREE_SIMT_UCONTEXT

namespace kdtree::simt {

namespace {

// The context that the running transfer leaves, for the context it enters. Transfers stay on one operating system
// thread.
constinit thread_local Context* leaving = nullptr;

}  // namespace

void Context::prepare(void* bottom, size_t size, size_t skew, void (*entry)()) {
  bottom_ = bottom;
  size_ = size;
  fake_stack_ = nullptr;
  // What an abandoned fiber left poisoned must not trip its successor.
  if (__asan_unpoison_memory_region != nullptr) __asan_unpoison_memory_region(bottom, size);
#ifdef KDTREE_SIMT_UCONTEXT
  getcontext(&state_);
  state_.uc_stack.ss_sp = bottom;
  state_.uc_stack.ss_size = size - skew;
  state_.uc_link = nullptr;
  makecontext(&state_, entry, 0);
#else
  const uintptr_t top = (reinterpret_cast<uintptr_t>(bottom) + size - skew) & ~uintptr_t{15};
  uintptr_t* frame = reinterpret_cast<uintptr_t*>(top) - kSavedWords;
  for (int i = 0; i < kSavedWords; ++i) frame[i] = 0;
  frame[kEntryWord] = reinterpret_cast<uintptr_t>(entry);
  stack_pointer_ = frame;
#endif
}

void Context::entered() {
  if (__sanitizer_finish_switch_fiber == nullptr) return;
  // The first transfer of all leaves the operating system thread's own stack; this is where its bounds become known.
  __sanitizer_finish_switch_fiber(nullptr, &leaving->bottom_, &leaving->size_);
}

void Context::transfer(Context& from, Context& to, bool from_dies) {
  if (__sanitizer_start_switch_fiber != nullptr) {
    leaving = &from;
    __sanitizer_start_switch_fiber(from_dies ? nullptr : &from.fake_stack_, to.bottom_, to.size_);
  }
#ifdef KDTREE_SIMT_UCONTEXT
  swapcontext(&from.state_, &to.state_);
#else
  kdtree_simt_switch(&from.stack_pointer_, to.stack_pointer_);
#endif
  if (__sanitizer_finish_switch_fiber != nullptr) {
    __sanitizer_finish_switch_fiber(from.fake_stack_, nullptr, nullptr);
  }
}

}  // namespace kdtree::simt
