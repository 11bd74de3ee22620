// SPDX-License-Identifier: Apache-2.0
// Fibers: stacks that take turns on one host thread.
#pragma once

#include <cstddef>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace attention::emulator {

// One execution context. The context of a host thread is a Fiber without a stack of its own.
class Fiber {
 public:
  Fiber() = default;
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Gives the fiber a stack; `index` staggers it against its neighbours. Throws std::bad_alloc.
  void allocate(int index);

  // Makes the next switch to this fiber call entry(argument) on an empty stack. entry must not
  // return; it ends by a switch with `final` set. Whatever the fiber ran before is abandoned: no
  // destructor runs.
  void prepare(void (*entry)(void*), void* argument);

  // Continues `to`; returns when something switches back to `from`. final: `from` will not run
  // again before prepare.
  static void switch_to(Fiber& from, Fiber& to, bool final = false);

 private:
  static void trampoline();
  void enter();

  char* stack_ = nullptr;
  std::size_t stack_bytes_ = 0;
  std::size_t stagger_ = 0;
  void (*entry_)(void*) = nullptr;
  void* argument_ = nullptr;
#if defined(__x86_64__)
  void* sp_ = nullptr;
#else
  ucontext_t context_;
#endif
  void* fake_stack_ = nullptr;  // of AddressSanitizer
  const void* host_bottom_ =
      nullptr;  // bounds of a host thread's stack, learnt by the first switch away from it
  std::size_t host_bytes_ = 0;
};

}  // namespace attention::emulator
