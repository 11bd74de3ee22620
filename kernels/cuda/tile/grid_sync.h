// SPDX-License-Identifier: Apache-2.0
// Synchronisation between the blocks of a grid: "the last block to arrive combines" and "wait for
// my turn".
//
// Counters live in a workspace and are zero when a kernel starts: an earlier kernel, or zero_async
// in launch.h, has set them. A grid is not resident all at once and its blocks start in no promised
// order, so a block may wait only for work whose owner has already started: take the work index
// from an atomic ticket, not from block_index().
#pragma once

#include "kernels/cuda/tile/config.h"
#include "kernels/cuda/tile/memory.h"
#include "kernels/cuda/tile/thread.h"

namespace attention::tile {

// Adds and returns the old value; releases this thread's writes and acquires those of earlier
// adders (gpu scope).
ATTENTION_DEVICE u32 atomic_add(u32* p, u32 x) {
#if ATTENTION_ON_GPU
  u32 old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(p), "r"(x)
               : "memory");
  return old;
#else
  return emulator::atomic_add(p, x);
#endif
}

// Orders this thread's earlier memory accesses before its later ones, as seen by the whole GPU.
ATTENTION_DEVICE void fence_grid() {
#if ATTENTION_ON_GPU
  __threadfence();
#else
  emulator::fence_grid();
#endif
}

// Ticket of this block: 0 for the first block that asks, 1 for the next one, and so on. Called by
// the whole block; `slot` is a word of shared memory that nothing else uses.
ATTENTION_DEVICE u32 take_ticket(u32* counter, Shared<u32> slot) {
  if (thread_index() == 0) shared_store(slot, atomic_add(counter, 1));
  sync_block();
  const u32 ticket = shared_load(slot)[0];
  sync_block();  // all have read it before a next ticket may be written
  return ticket;
}

// True in the last of `total` blocks that call it with this counter, and there everything that the
// others wrote before their call can be read. Called by the whole block.
ATTENTION_DEVICE bool last_block_arrives(u32* counter, u32 total) {
  fence_grid();
  sync_block();
  bool last = false;
  if (thread_index() == 0) last = atomic_add(counter, 1) == total - 1;
  last = sync_block_or(last);
  fence_grid();
  return last;
}

// Waits until *turn == mine; what the warp that signalled it wrote before can then be read. Called
// by a whole warp, on its own: where what is handed over was written by one warp and is read by one
// warp, a turn needs no barrier of the block.
ATTENTION_DEVICE void wait_turn(const u32* turn, u32 mine) {
#if ATTENTION_ON_GPU
  // Every lane acquires by itself; the address is the same, so it is one access.
  u32 now;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
  } while (now != mine);
#else
  emulator::wait_until_equal(turn, mine);
#endif
  sync_warp();
}

// Sets *turn to next after all earlier writes of the warp. Called by the whole warp.
ATTENTION_DEVICE void signal_turn(u32* turn, u32 next) {
  // Orders the stores of all lanes before the release, which covers what came before it in this
  // sense (PTX ISA, "causality order").
  sync_warp();
  if (lane_index() == 0) {
#if ATTENTION_ON_GPU
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(turn), "r"(next) : "memory");
#else
    emulator::store_release(turn, next);
#endif
  }
}

}  // namespace attention::tile
