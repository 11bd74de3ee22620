// SPDX-License-Identifier: Apache-2.0
// The functions that the tile layer calls, for the emulated thread that runs now.
#include "kernels/emulator/device.h"

#include "kernels/emulator/block.h"
#include "kernels/emulator/global_memory.h"

namespace attention::emulator {
namespace {

Block& block() { return *self().owner; }

void require(const std::string& wrong) {
  if (!wrong.empty()) block().fail(wrong);
}

}  // namespace

void report_misaligned(const void* p, int bytes, const char* what) {
  block().fail(
      std::string("misaligned ") + what + " of " + std::to_string(bytes) +
      " bytes: address modulo " + std::to_string(bytes) + " is " +
      std::to_string(reinterpret_cast<std::uintptr_t>(p) % static_cast<std::uintptr_t>(bytes)));
}

void check_shared_read(const void* p, int bytes) {
  const Thread& t = block().current();
  require(block().shared().read(p, bytes, t.warp, t.lane));
  block().log_access(__builtin_return_address(0), p, bytes);
}

void check_shared_write(const void* p, int bytes) {
  const Thread& t = block().current();
  require(block().shared().write(p, bytes, t.warp, t.lane));
  block().log_access(__builtin_return_address(0), p, bytes);
}

void check_global_read(const void* p, int bytes, bool constant) {
  require(GlobalMemory::instance().read(p, bytes, constant, block()));
}

void check_global_write(void* p, int bytes) {
  require(GlobalMemory::instance().write(p, bytes, block()));
}

void* shared_take(int index, int bytes, int used) {
  void* p = nullptr;
  require(block().shared().take(index, bytes, used, &p));
  return p;
}

void require_stages(int count, int limit) {
  if (count < 1 || count > limit) {
    block().fail("a ring of " + std::to_string(count) + " stages: 1 to " + std::to_string(limit) +
                 " are possible");
  }
}

void async_copy(void* to, const void* from, int bytes, int valid_bytes) {
  require_aligned(to, bytes, "asynchronous copy to shared memory");
  require_aligned(from, bytes, "asynchronous copy from global memory");
  if (valid_bytes < 0 || valid_bytes > bytes) {
    block().fail("asynchronous copy with " + std::to_string(valid_bytes) + " valid bytes of " +
                 std::to_string(bytes));
  }
  block().issue_copy(PendingCopy{to, from, bytes, valid_bytes});
  if (self().checked) block().log_access(__builtin_return_address(0), to, bytes);
}

void async_commit() { block().commit_copies(); }
void async_wait(int pending) { block().wait_copies(pending); }

void mma(MmaInput input, int count, float* d, const u32* a, const u32* b) {
  MmaOperands operands{d, a, b};
  block().collective(Collective::kMma, static_cast<u32>(input) | static_cast<u32>(count) << 8,
                     &operands);
}

void load_matrices(u32* reg, const void* row, bool transposed) {
  require_aligned(row, 16, "ldmatrix row");
  MatrixOperands operands{reg, row};
  block().collective(Collective::kLoadMatrices, transposed ? 1 : 0, &operands);
}

u32 shuffle(u32 value, int source_lane) {
  ShuffleOperands operands{value, source_lane, 0};
  block().collective(Collective::kShuffle, 0, &operands);
  return operands.result;
}

u32 ballot(bool predicate) {
  VoteOperands operands{predicate, 0};
  block().collective(Collective::kBallot, 0, &operands);
  return operands.result;
}

void sync_warp() { block().collective(Collective::kSyncWarp, 0, nullptr); }

bool block_barrier(int id, int threads, bool predicate) {
  return block().barrier(id, threads, predicate);
}
void barrier_arrive(int id, int threads) { block().arrive(id, threads); }

u32 atomic_add(u32* p, u32 x) {
  require_aligned(p, 4, "atomic");
  if (self().checked) require(GlobalMemory::instance().atomic(p));
  return block().atomic_add(p, x);
}

void fence_grid() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

void store_release(u32* p, u32 x) {
  require_aligned(p, 4, "store");
  if (self().checked) require(GlobalMemory::instance().atomic(p));
  block().store_release(p, x);
}

void wait_until_equal(const u32* p, u32 x) {
  require_aligned(p, 4, "load");
  if (self().checked) require(GlobalMemory::instance().atomic(p));
  block().wait_until_equal(p, x);
}

}  // namespace attention::emulator
