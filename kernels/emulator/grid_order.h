// SPDX-License-Identifier: Apache-2.0
// Happens-before between the blocks of a run: what a warp knows of other blocks, and how it learns
// it from the counters of grid_sync.h.
#pragma once

#include <map>
#include <mutex>
#include <unordered_map>

#include "kernels/emulator/shared_memory.h"

namespace attention::emulator {

// Up to where the accesses of other blocks happened before: by block, the clocks of its warps.
class OtherBlocks {
 public:
  bool empty() const { return clocks_.empty(); }
  void join(const OtherBlocks& other) {
    for (const auto& [block, clock] : other.clocks_) clocks_[block].join(clock, kMaxWarps);
  }
  void join(u64 block, const VectorClock& clock) { clocks_[block].join(clock, kMaxWarps); }
  bool covers(u64 block, int warp, u32 clock) const {
    const auto found = clocks_.find(block);
    return found != clocks_.end() && clock <= found->second.at[warp];
  }

 private:
  std::map<u64, VectorClock> clocks_;
};

// What was known when each counter was set last, by address. Shared by the host threads of a run.
class GridOrder {
 public:
  // A store that releases: later acquirers learn `known`.
  void release(const u32* counter, const OtherBlocks& known) {
    std::lock_guard<std::mutex> lock(mutex_);
    counters_[counter] = known;
  }
  // A load that acquires.
  void acquire(const u32* counter, OtherBlocks* known) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = counters_.find(counter);
    if (found != counters_.end()) known->join(found->second);
  }
  // An atomic that does both; those before it stay visible to those after it.
  void exchange(const u32* counter, const OtherBlocks& known, OtherBlocks* learnt) {
    std::lock_guard<std::mutex> lock(mutex_);
    OtherBlocks& kept = counters_[counter];
    learnt->join(kept);
    kept.join(known);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const u32*, OtherBlocks> counters_;
};

}  // namespace attention::emulator
