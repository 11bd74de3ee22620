// SPDX-License-Identifier: Apache-2.0
// cp.async: copies from global to shared memory that run beside the arithmetic.
//
// Each thread issues copies, closes a group with async_commit, and waits with async_wait<N> until
// at most its N newest groups are still in flight. Waiting covers the thread's own copies: a
// barrier must follow before other threads read.
#pragma once

#include "kernels/cuda/tile/config.h"
#include "kernels/cuda/tile/memory.h"

namespace attention::tile {

// Starts copying Bytes (4, 8 or 16) of which the first `valid_bytes` come from `from` and the rest
// is filled with zeros. Both addresses are aligned to Bytes; `from` is not read at all when
// valid_bytes is 0. 16-byte copies bypass L1.
template <int Bytes, typename T>
ATTENTION_DEVICE void async_copy(Shared<T> to, const T* from, int valid_bytes) {
  static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "cp.async moves 4, 8 or 16 bytes");
#if ATTENTION_ON_GPU
  if constexpr (Bytes == 16) {
    asm volatile(
        "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(detail::window_address(to)),
        "l"(from), "r"(valid_bytes)
        : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(detail::window_address(to)),
                 "l"(from), "n"(Bytes), "r"(valid_bytes)
                 : "memory");
  }
#else
  emulator::async_copy(to.p, from, Bytes, valid_bytes);
#endif
}

// The whole Bytes, or zeros when !in_bounds.
template <int Bytes, typename T>
ATTENTION_DEVICE void async_copy_or_zero(Shared<T> to, const T* from, bool in_bounds) {
  async_copy<Bytes>(to, from, in_bounds ? Bytes : 0);
}

ATTENTION_DEVICE void async_commit() {
#if ATTENTION_ON_GPU
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  emulator::async_commit();
#endif
}

template <int Pending>
ATTENTION_DEVICE void async_wait() {
#if ATTENTION_ON_GPU
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
#else
  emulator::async_wait(Pending);
#endif
}

}  // namespace attention::tile
