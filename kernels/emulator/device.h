// SPDX-License-Identifier: Apache-2.0
// What the tile layer calls when kernel source is compiled for the host. Each function acts for the
// emulated CUDA thread that runs right now.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/common/types.h"

namespace attention::emulator {

class Block;

// The part of an emulated thread that the tile layer reads directly.
struct ThreadState {
  int thread = 0;
  u32 block[3] = {0, 0, 0};
  u32 grid[3] = {1, 1, 1};
  bool checked = false;  // race, bounds and initialisation checks are on
  Block* owner = nullptr;
};

// Initial-exec: a plain load instead of a call, also inside a shared library.
extern thread_local ThreadState* current_thread __attribute__((tls_model("initial-exec")));

inline ThreadState& self() { return *current_thread; }

// ---- memory ----

// Cold paths of the accessors below; `what` names the kind of access in a report.
void report_misaligned(const void* p, int bytes, const char* what);
void check_shared_read(const void* p, int bytes);
void check_shared_write(const void* p, int bytes);
void check_global_read(const void* p, int bytes, bool constant);
void check_global_write(void* p, int bytes);

inline void require_aligned(const void* p, int bytes, const char* what) {
  if (__builtin_expect((reinterpret_cast<std::uintptr_t>(p) & (bytes - 1)) != 0, 0)) {
    report_misaligned(p, bytes, what);
  }
}

inline void global_read(void* to, const void* from, int bytes) {
  require_aligned(from, bytes, "global load");
  if (self().checked) check_global_read(from, bytes, false);
  std::memcpy(to, from, bytes);
}

inline void global_read_constant(void* to, const void* from, int bytes) {
  require_aligned(from, bytes, "global load");
  if (self().checked) check_global_read(from, bytes, true);
  std::memcpy(to, from, bytes);
}

inline void global_write(void* to, const void* from, int bytes) {
  require_aligned(to, bytes, "global store");
  if (self().checked) check_global_write(to, bytes);
  std::memcpy(to, from, bytes);
}

inline void shared_read(void* to, const void* from, int bytes) {
  require_aligned(from, bytes, "shared load");
  if (self().checked) check_shared_read(from, bytes);
  std::memcpy(to, from, bytes);
}

inline void shared_write(void* to, const void* from, int bytes) {
  require_aligned(to, bytes, "shared store");
  if (self().checked) check_shared_write(to, bytes);
  std::memcpy(to, from, bytes);
}

// The `index`-th take of this thread: `bytes` of the block's shared memory, of which `used` may be
// touched.
void* shared_take(int index, int bytes, int used);
// Fails unless 1 <= count <= limit.
void require_stages(int count, int limit);

void async_copy(void* to, const void* from, int bytes, int valid_bytes);
void async_commit();
void async_wait(int pending);

// ---- collectives ----

enum class MmaInput : u32 { kBf16, kF16, kTf32 };

// d[j] += a * b[j] for `count` blocks: d has 4 floats a block, a 4 registers, b 2 registers a
// block.
void mma(MmaInput input, int count, float* d, const u32* a, const u32* b);
void load_matrices(u32* reg, const void* row, bool transposed);
u32 shuffle(u32 value, int source_lane);
u32 ballot(bool predicate);
void sync_warp();
// threads == 0 stands for the whole block. Returns whether any thread passed true.
bool block_barrier(int id, int threads, bool predicate);
void barrier_arrive(int id, int threads);

// ---- between blocks ----

u32 atomic_add(u32* p, u32 x);
void fence_grid();
void store_release(u32* p, u32 x);
void wait_until_equal(const u32* p, u32 x);

}  // namespace attention::emulator
