// SPDX-License-Identifier: Apache-2.0
// Shared memory of an emulated block: allocations with red zones, and shadow state that finds
// races, uninitialised reads and accesses to data that an asynchronous copy still owns.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/common/types.h"

namespace attention::emulator {

inline constexpr int kMaxWarps = 32;
inline constexpr int kAllLanes =
    32;  // an access made by the warp as a whole, or by several of its lanes

// What one warp knows of the progress of each warp.
struct VectorClock {
  u32 at[kMaxWarps] = {};
  void join(const VectorClock& other, int warps) {
    for (int i = 0; i < warps; ++i) at[i] = max_of(at[i], other.at[i]);
  }
};

class SharedMemory {
 public:
  SharedMemory(int bytes, int warps, bool checked);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // Forgets all allocations and starts a new block.
  void reset();

  // Each function returns an empty string, or what is wrong.

  // The index-th allocation; the first thread that asks makes it, the others must ask for the same
  // size.
  std::string take(int index, int bytes, int used, void** p);

  std::string read(const void* p, int bytes, int warp, int lane);
  std::string write(const void* p, int bytes, int warp, int lane);
  // An asynchronous copy into [p, p + bytes) starts (the bytes now belong to the copy) and ends
  // (they hold its data).
  std::string begin_copy(const void* p, int bytes, int warp, int lane);
  void end_copy(const void* p, int bytes, int warp, int lane);

  // Looks at the red zones: finds stores that no check saw.
  std::string damage() const;

  // ---- happens-before, as the race detector sees it ----

  // Later accesses of the warp are no longer covered by what it has released so far.
  void advance(int warp) { ++clock_[warp].at[warp]; }
  VectorClock& clock(int warp) { return clock_[warp]; }
  const VectorClock& clock(int warp) const { return clock_[warp]; }
  int warps() const { return warps_; }

 private:
  enum class State : u8 { kRedZone, kUninitialised, kReady, kCopying };
  struct Allocation {
    int offset;
    int bytes;
    int used;
  };
  // The latest access of a granule by one warp: clock and lane in one word, so that a granule's
  // history stays small.
  struct Access {
    u32 clock = 0;
    u8 lane = 0;
  };
  struct Write {
    u32 clock = 0;
    u8 warp = 0;
    u8 lane = 0;
  };

  std::string locate(const void* p, int bytes, const char* what, std::size_t* first,
                     std::size_t* last) const;
  std::string check_against_write(std::size_t granule, int warp, int lane, const char* what) const;
  std::string check_write(const void* p, int bytes, int warp, int lane, const char* what,
                          State after);
  std::string describe(std::size_t granule) const;
  std::string describe_pointer(const void* p) const;

  const int capacity_;
  const int warps_;
  const bool checked_;
  std::size_t arena_bytes_ = 0;
  char* arena_ = nullptr;
  int offset_ = 0;  // of the next allocation, in the arena
  int taken_ = 0;   // bytes handed out, without red zones
  std::vector<Allocation> allocations_;
  std::vector<State> state_;    // a granule each
  std::vector<Write> written_;  // a granule each
  std::vector<Access> read_;    // a granule and warp each
  VectorClock clock_[kMaxWarps];
};

}  // namespace attention::emulator
