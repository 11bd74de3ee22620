// SPDX-License-Identifier: Apache-2.0
// Fiber switch: a few instructions on x86-64, ucontext elsewhere, with annotations for
// AddressSanitizer.
#include "kernels/emulator/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <mutex>
#include <new>
#include <vector>

#include "kernels/emulator/sanitizer.h"

namespace attention::emulator {
namespace {

// Memory is only committed where it is touched. An instrumented or unoptimised kernel needs far
// more than an optimised one.
constexpr std::size_t kStackBytes =
    ATTENTION_ASAN ? (std::size_t{1} << 20) : (std::size_t{256} << 10);

// The fiber that the latest switch leaves and the one that it enters: what the code after a switch
// cannot know otherwise.
thread_local Fiber* entering = nullptr;
thread_local Fiber* leaving = nullptr;

}  // namespace

#if defined(__x86_64__)
// Saves the callee-saved registers on the old stack, its stack pointer in *save, and continues on
// the new stack.
extern "C" void attention_emulator_switch(void** save, void* load);
asm(R"(
.text
.p2align 4
.globl attention_emulator_switch
.hidden attention_emulator_switch
.type attention_emulator_switch, @function
attention_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size attention_emulator_switch, .-attention_emulator_switch
)");
#endif

namespace {

// Stacks that no fiber uses now. Mapping them, and touching their pages for the first time, takes
// longer than running a small kernel, so they are kept until the process ends.
class StackPool {
 public:
  static StackPool& instance() {
    static StackPool* pool = new StackPool();  // never destroyed: fibers may outlive static objects
    return *pool;
  }

  // Lowest address of kStackBytes of memory above a guard page.
  char* take() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!free_.empty()) {
        char* stack = free_.back();
        free_.pop_back();
        return stack;
      }
    }
    const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    void* p = mmap(nullptr, kStackBytes + page, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    // An overflow faults instead of damaging a neighbour.
    if (mprotect(p, page, PROT_NONE) != 0) throw std::bad_alloc();
    return static_cast<char*>(p) + page;
  }

  void give_back(char* stack) {
    unpoison(stack, kStackBytes);  // abandoned frames leave their red zones behind
    std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(stack);
  }

 private:
  std::mutex mutex_;
  std::vector<char*> free_;
};

}  // namespace

Fiber::~Fiber() {
  if (stack_ != nullptr) StackPool::instance().give_back(stack_);
}

void Fiber::allocate(int index) {
  stack_ = StackPool::instance().take();
  stack_bytes_ = kStackBytes;
  // Equal offsets in all stacks would compete for the same few cache sets.
  stagger_ = static_cast<std::size_t>(index % 32) * 1088;
}

void Fiber::enter() {
#if ATTENTION_ASAN
  const void* bottom = nullptr;
  std::size_t bytes = 0;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
  if (leaving->stack_ == nullptr) {
    leaving->host_bottom_ = bottom;
    leaving->host_bytes_ = bytes;
  }
#endif
  entry_(argument_);
}

void Fiber::trampoline() {
  entering->enter();
  __builtin_trap();  // entry returned
}

void Fiber::prepare(void (*entry)(void*), void* argument) {
  entry_ = entry;
  argument_ = argument;
  fake_stack_ = nullptr;
  unpoison(stack_, stack_bytes_);  // abandoned frames leave their red zones behind
#if defined(__x86_64__)
  // As after a call: the stack pointer is 8 modulo 16 when the trampoline starts.
  auto top =
      (reinterpret_cast<std::uintptr_t>(stack_ + stack_bytes_ - stagger_) & ~std::uintptr_t{15}) -
      64;
  auto* frame = reinterpret_cast<std::uintptr_t*>(top);
  for (int i = 0; i < 6; ++i) frame[i] = 0;
  frame[6] = reinterpret_cast<std::uintptr_t>(&Fiber::trampoline);
  frame[7] = 0;
  sp_ = frame;
#else
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack_;
  context_.uc_stack.ss_size = stack_bytes_ - (stagger_ & ~std::size_t{15});
  context_.uc_link = nullptr;
  makecontext(&context_, &Fiber::trampoline, 0);
#endif
}

void Fiber::switch_to(Fiber& from, Fiber& to, bool final) {
  entering = &to;
  leaving = &from;
#if ATTENTION_ASAN
  __sanitizer_start_switch_fiber(final ? nullptr : &from.fake_stack_,
                                 to.stack_ != nullptr ? to.stack_ : to.host_bottom_,
                                 to.stack_ != nullptr ? to.stack_bytes_ : to.host_bytes_);
#else
  (void) final;
#endif
#if defined(__x86_64__)
  attention_emulator_switch(&from.sp_, to.sp_);
#else
  swapcontext(&from.context_, &to.context_);
#endif
#if ATTENTION_ASAN
  const void* bottom = nullptr;
  std::size_t bytes = 0;
  __sanitizer_finish_switch_fiber(from.fake_stack_, &bottom, &bytes);
  if (leaving->stack_ == nullptr) {
    leaving->host_bottom_ = bottom;
    leaving->host_bytes_ = bytes;
  }
#endif
}

}  // namespace attention::emulator
