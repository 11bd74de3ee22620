// SPDX-License-Identifier: Apache-2.0
// One block of threads: fibers, their scheduling, and the warp- and block-wide collectives.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/emulator/bank_log.h"
#include "kernels/emulator/device.h"
#include "kernels/emulator/emulator.h"
#include "kernels/emulator/fiber.h"
#include "kernels/emulator/grid_order.h"
#include "kernels/emulator/launch.h"
#include "kernels/emulator/shared_memory.h"

namespace attention::emulator {

inline constexpr int kWarp = 32;
inline constexpr int kMaxBarriers = 16;

// What a lane can be doing together with the rest of its warp.
enum class Collective : u8 {
  kNone,
  kMma,
  kLoadMatrices,
  kShuffle,
  kBallot,
  kSyncWarp,
  kBarrier,
  kArrive
};

// For reports.
const char* name_of(Collective c);
std::string hex(u32 mask);

// Operands that a lane leaves when it arrives at a collective.
struct MmaOperands {
  float* d;
  const u32* a;
  const u32* b;
};
struct MatrixOperands {
  u32* reg;
  const void* row;
};
struct ShuffleOperands {
  u32 value;
  int source;
  u32 result;
};
struct VoteOperands {
  bool predicate;
  u32 result;
};

// A copy that has been issued and not waited for.
struct PendingCopy {
  void* to;
  const void* from;
  int bytes;
  int valid_bytes;
};

struct Thread {
  ThreadState state;
  Fiber fiber;
  int lane = 0;
  int warp = 0;
  bool exited = false;
  const u32* awaited = nullptr;  // the word that wait_until_equal looks at
  u32 awaited_value = 0;
  std::vector<PendingCopy> copies;      // oldest first
  std::vector<std::size_t> group_ends;  // copies.size() at each commit
};

struct Warp {
  u32 runnable = 0;  // lanes that can go on
  u32 arrived = 0;   // lanes at the collective that the warp is gathering for
  u32 exited = 0;    // lanes that have returned from the kernel
  u32 spinning = 0;  // lanes in wait_until_equal
  Collective kind = Collective::kNone;
  u32 detail = 0;     // must be the same in all lanes: barrier id and count, mma shape, ...
  int waits_at = -1;  // barrier that the complete warp waits for, or -1
  void* operands[kWarp] = {};
  BankLog banks;
};

struct Barrier {
  int expected = 0;  // threads
  int arrived = 0;
  bool any = false;  // of the predicates
  bool result = false;
  u32 warps = 0;  // that wait
  VectorClock clock;
  OtherBlocks other_blocks;
};

enum class Outcome { kFinished, kWaiting, kFailed };

// Runs one block at a time; reused for many.
class Block {
 public:
  // launch: number of the run, for the checks of global memory. order: of the run's blocks.
  Block(const Program& program, const Options& options, u32 launch, GridOrder* order);

  // Prepares block `index` (x fastest).
  void start(u64 index);
  // Runs until the block has finished, or all that is left waits for other blocks, or it did
  // something wrong.
  Outcome run();
  // Whether the last run() executed anything.
  bool moved() const { return moved_; }
  const std::string& report() const { return report_; }
  u32 launch() const { return launch_; }
  Counters& counters() { return counters_; }

  // For reports of deadlocks between blocks.
  std::string describe_waiting() const;

  // ---- called by emulated threads ----

  Thread& current() { return *current_; }
  void collective(Collective kind, u32 detail, void* operands);
  bool barrier(int id, int threads, bool predicate);
  void arrive(int id, int threads);
  // Synchronisation with other blocks through a counter. Each may let other blocks go first.
  void wait_until_equal(const u32* p, u32 value);
  void store_release(u32* p, u32 value);
  u32 atomic_add(u32* p, u32 value);
  void issue_copy(const PendingCopy& copy);
  void commit_copies();
  void wait_copies(int pending);
  [[noreturn]] void fail(const std::string& what);
  SharedMemory& shared() { return shared_; }
  // Whether an access of another warp, made at that warp's time `clock`, happened before whatever
  // the current thread does now.
  bool comes_after(u64 block, int warp, u32 clock) const;
  u64 index() const { return index_; }
  u32 clock_of_warp() { return shared_.clock(current_->warp).at[current_->warp]; }
  // Notes a shared access of the current thread for the bank-conflict counters.
  void log_access(const void* site, const void* p, int bytes);
  std::string where() const;  // "block (x, y, z), thread t"

 private:
  static void thread_main(void* thread);
  void finish_thread();
  void block_current();
  void acquire_order(const u32* p);
  OtherBlocks released_order();
  bool pick(int* warp, int* lane);
  void switch_to(Thread& next);
  void execute(Warp& warp);
  void count_conflicts(Warp& warp);
  void arrive_at_barrier(int warp_index, int id, int threads, bool predicate, bool waits);
  void release_barrier(Barrier& barrier);
  std::string describe_deadlock() const;
  u32 random();

  const Program& program_;
  const Options& options_;
  const u32 launch_;
  GridOrder* order_;
  u64 index_ = 0;
  u32 coordinates_[3] = {0, 0, 0};
  int warp_count_;
  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<Warp> warps_;
  std::vector<OtherBlocks> other_blocks_;  // that each warp knows of
  Barrier barriers_[kMaxBarriers];
  Fiber host_;
  Thread* current_ = nullptr;
  u32 ready_warps_ = 0;
  int live_ = 0;
  bool failed_ = false;
  bool moved_ = false;
  bool yields_ = false;  // a thread lets other blocks go first
  std::string report_;
  u64 random_state_ = 1;
  SharedMemory shared_;
  Counters counters_;
};

}  // namespace attention::emulator
