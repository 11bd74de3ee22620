// SPDX-License-Identifier: Apache-2.0
// Who am I, warp collectives and barriers.
//
// Every collective uses the full mask: all 32 lanes of a warp (and, for block barriers, all threads
// that take part) must reach the same call, so kernels have no early return before one. The
// emulator reports a warp that breaks this rule.
#pragma once

#include "kernels/cuda/tile/config.h"

namespace attention::tile {

// Blocks are one-dimensional: kThreads is a multiple of 32.
ATTENTION_DEVICE int thread_index() {
#if ATTENTION_ON_GPU
  return static_cast<int>(threadIdx.x);
#else
  return emulator::self().thread;
#endif
}

ATTENTION_DEVICE int lane_index() { return thread_index() & (kWarpSize - 1); }

// Warp number as a value the compiler knows to be the same in all lanes.
ATTENTION_DEVICE int warp_index() {
#if ATTENTION_ON_GPU
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpSize, 0);
#else
  return emulator::self().thread / kWarpSize;
#endif
}

ATTENTION_DEVICE Dim3 block_index() {
#if ATTENTION_ON_GPU
  return Dim3{blockIdx.x, blockIdx.y, blockIdx.z};
#else
  const emulator::ThreadState& t = emulator::self();
  return Dim3{t.block[0], t.block[1], t.block[2]};
#endif
}

ATTENTION_DEVICE Dim3 grid_size() {
#if ATTENTION_ON_GPU
  return Dim3{gridDim.x, gridDim.y, gridDim.z};
#else
  const emulator::ThreadState& t = emulator::self();
  return Dim3{t.grid[0], t.grid[1], t.grid[2]};
#endif
}

// ---- barriers ----

// Waits for all threads of the block; orders their shared and global accesses.
ATTENTION_DEVICE void sync_block() {
#if ATTENTION_ON_GPU
  __syncthreads();
#else
  emulator::block_barrier(0, 0, false);
#endif
}

// sync_block, returning whether any thread passed true: a broadcast without a shared-memory slot.
ATTENTION_DEVICE bool sync_block_or(bool predicate) {
#if ATTENTION_ON_GPU
  return __syncthreads_or(predicate) != 0;
#else
  return emulator::block_barrier(0, 0, predicate);
#endif
}

// Orders memory accesses among the lanes of one warp.
ATTENTION_DEVICE void sync_warp() {
#if ATTENTION_ON_GPU
  __syncwarp();
#else
  emulator::sync_warp();
#endif
}

// Barrier `id` (1 to 15) among `threads` threads (whole warps): waits until that many have arrived.
ATTENTION_DEVICE void named_sync(int id, int threads) {
#if ATTENTION_ON_GPU
  asm volatile("barrier.sync.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
#else
  emulator::block_barrier(id, threads, false);
#endif
}

// Arrives at barrier `id` without waiting; `threads` counts arrivals and waits together.
ATTENTION_DEVICE void named_arrive(int id, int threads) {
#if ATTENTION_ON_GPU
  asm volatile("barrier.arrive.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
#else
  emulator::barrier_arrive(id, threads);
#endif
}

// ---- shuffles ----

ATTENTION_DEVICE u32 shuffle_xor(u32 x, int mask) {
#if ATTENTION_ON_GPU
  return __shfl_xor_sync(0xffffffffu, x, mask);
#else
  return emulator::shuffle(x, (emulator::self().thread ^ mask) & (kWarpSize - 1));
#endif
}

ATTENTION_DEVICE f32 shuffle_xor(f32 x, int mask) {
#if ATTENTION_ON_GPU
  return __shfl_xor_sync(0xffffffffu, x, mask);
#else
  u32 bits;
  std::memcpy(&bits, &x, 4);
  bits = shuffle_xor(bits, mask);
  std::memcpy(&x, &bits, 4);
  return x;
#endif
}

// The value of lane `source` (0 to 31).
ATTENTION_DEVICE u32 shuffle(u32 x, int source) {
#if ATTENTION_ON_GPU
  return __shfl_sync(0xffffffffu, x, source);
#else
  return emulator::shuffle(x, source & (kWarpSize - 1));
#endif
}

ATTENTION_DEVICE i32 shuffle(i32 x, int source) {
  return static_cast<i32>(shuffle(static_cast<u32>(x), source));
}

ATTENTION_DEVICE f32 shuffle(f32 x, int source) {
#if ATTENTION_ON_GPU
  return __shfl_sync(0xffffffffu, x, source);
#else
  u32 bits;
  std::memcpy(&bits, &x, 4);
  bits = shuffle(bits, source);
  std::memcpy(&x, &bits, 4);
  return x;
#endif
}

// Bit i is the predicate of lane i.
ATTENTION_DEVICE u32 ballot(bool predicate) {
#if ATTENTION_ON_GPU
  return __ballot_sync(0xffffffffu, predicate);
#else
  return emulator::ballot(predicate);
#endif
}

ATTENTION_DEVICE bool any_in_warp(bool predicate) { return ballot(predicate) != 0; }
ATTENTION_DEVICE bool all_in_warp(bool predicate) { return ballot(predicate) == 0xffffffffu; }

// ---- reductions ----

// Lanes 4g .. 4g+3 hold one row of an accumulator (mma.h); after these calls all four have the
// row's result. The order of additions is fixed, so results are the same from run to run.
ATTENTION_DEVICE f32 quad_sum(f32 x) {
  x += shuffle_xor(x, 1);
  return x + shuffle_xor(x, 2);
}

ATTENTION_DEVICE f32 quad_max(f32 x) {
  f32 y = shuffle_xor(x, 1);
  x = x > y ? x : y;
  y = shuffle_xor(x, 2);
  return x > y ? x : y;
}

ATTENTION_DEVICE f32 warp_sum(f32 x) {
  ATTENTION_UNROLL
  for (int mask = 16; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
  return x;
}

ATTENTION_DEVICE f32 warp_max(f32 x) {
  ATTENTION_UNROLL
  for (int mask = 16; mask > 0; mask /= 2) {
    const f32 y = shuffle_xor(x, mask);
    x = x > y ? x : y;
  }
  return x;
}

// Sum over the eight lanes that share lane & 3: a column of an accumulator, over its rows.
ATTENTION_DEVICE f32 column_sum(f32 x) {
  ATTENTION_UNROLL
  for (int mask = 4; mask < 32; mask *= 2) x += shuffle_xor(x, mask);
  return x;
}

}  // namespace attention::tile
