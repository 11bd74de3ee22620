// SPDX-License-Identifier: Apache-2.0
#include "kernels/emulator/shared_memory.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#include "kernels/emulator/sanitizer.h"

namespace attention::emulator {
namespace {

// The unit of shadow state: the smallest element that kernels keep in shared memory, so that lanes
// which write neighbouring 16-bit elements do not look like a race.
constexpr int kGranule = 2;
constexpr int kArenaAlign = 1024;  // of the window, as on the GPU
constexpr int kAllocationAlign = 128;
constexpr int kRedZone = 256;  // bytes on each side of an allocation
constexpr int kMaxAllocations = 64;
constexpr unsigned char kNanByte = 0xff;  // NaN in f32, bf16 and f16
constexpr unsigned char kGuardByte = 0xa5;

std::string lane_text(int lane) {
  return lane == kAllLanes ? std::string("several lanes") : "lane " + std::to_string(lane);
}

}  // namespace

SharedMemory::SharedMemory(int bytes, int warps, bool checked)
    : capacity_(bytes), warps_(warps), checked_(checked) {
  arena_bytes_ =
      static_cast<std::size_t>(round_up(bytes + (kMaxAllocations + 1) * kRedZone, kArenaAlign));
  arena_ = static_cast<char*>(std::aligned_alloc(kArenaAlign, arena_bytes_));
  if (arena_ == nullptr) throw std::bad_alloc();
  if (checked_) {
    const std::size_t granules = arena_bytes_ / kGranule;
    state_.resize(granules);
    written_.resize(granules);
    read_.resize(granules * static_cast<std::size_t>(warps_));
  }
  reset();
}

SharedMemory::~SharedMemory() {
  unpoison(arena_, arena_bytes_);
  std::free(arena_);
}

void SharedMemory::reset() {
  allocations_.clear();
  offset_ = 0;
  taken_ = 0;
  unpoison(arena_, arena_bytes_);
  if (checked_) std::fill(state_.begin(), state_.end(), State::kRedZone);
  // A new block starts after everything that the shadow remembers: no need to clear it.
  u32 base = 0;
  for (int w = 0; w < warps_; ++w) base = max_of(base, clock_[w].at[w]);
  if (base > 0xf0000000u) {
    std::fill(written_.begin(), written_.end(), Write{});
    std::fill(read_.begin(), read_.end(), Access{});
    base = 0;
  }
  for (int w = 0; w < warps_; ++w) {
    for (int v = 0; v < warps_; ++v) clock_[w].at[v] = base;
    clock_[w].at[w] = base + 1;
  }
}

std::string SharedMemory::take(int index, int bytes, int used, void** p) {
  if (index < static_cast<int>(allocations_.size())) {
    const Allocation& a = allocations_[static_cast<std::size_t>(index)];
    if (a.bytes != bytes || a.used != used) {
      return "take number " + std::to_string(index) + " of shared memory has " +
             std::to_string(used) + " bytes in this thread and " + std::to_string(a.used) +
             " in another";
    }
    *p = arena_ + a.offset;
    return {};
  }
  if (taken_ + bytes > capacity_) {
    return "shared memory: " + std::to_string(taken_ + bytes) + " bytes taken, smem_bytes() is " +
           std::to_string(capacity_);
  }
  if (static_cast<int>(allocations_.size()) == kMaxAllocations) {
    return "more than " + std::to_string(kMaxAllocations) + " takes of shared memory";
  }
  const int offset = round_up(offset_ + kRedZone, kAllocationAlign);
  unpoison(arena_ + offset_, static_cast<std::size_t>(offset - offset_ + bytes) + kRedZone);
  std::memset(arena_ + offset_, kGuardByte, static_cast<std::size_t>(offset - offset_));
  std::memset(arena_ + offset, kNanByte, static_cast<std::size_t>(used));
  std::memset(arena_ + offset + used, kGuardByte,
              static_cast<std::size_t>(bytes - used) + kRedZone);
  poison(arena_ + offset_, static_cast<std::size_t>(offset - offset_));
  poison(arena_ + offset + used, static_cast<std::size_t>(bytes - used) + kRedZone);
  if (checked_) {
    std::fill(state_.begin() + offset / kGranule, state_.begin() + (offset + used + 1) / kGranule,
              State::kUninitialised);
  }
  allocations_.push_back(Allocation{offset, bytes, used});
  offset_ = offset + bytes;
  taken_ += bytes;
  *p = arena_ + offset;
  return {};
}

std::string SharedMemory::describe_pointer(const void* p) const {
  const auto offset = static_cast<long>(static_cast<const char*>(p) - arena_);
  for (std::size_t i = 0; i < allocations_.size(); ++i) {
    const Allocation& a = allocations_[i];
    if (offset >= a.offset && offset < a.offset + a.used) {
      return "byte " + std::to_string(offset - a.offset) + " of take " + std::to_string(i) + " (" +
             std::to_string(a.used) + " bytes)";
    }
  }
  for (std::size_t i = 0; i < allocations_.size(); ++i) {
    const Allocation& a = allocations_[i];
    if (offset >= a.offset + a.used && offset < a.offset + a.bytes + kRedZone) {
      return std::to_string(offset - a.offset - a.used) + " bytes past the end of take " +
             std::to_string(i) + " (" + std::to_string(a.used) + " bytes)";
    }
    if (offset < a.offset && offset >= a.offset - kRedZone) {
      return std::to_string(a.offset - offset) + " bytes before take " + std::to_string(i);
    }
  }
  return "an address outside every take of this block";
}

std::string SharedMemory::describe(std::size_t granule) const {
  return describe_pointer(arena_ + granule * kGranule);
}

std::string SharedMemory::locate(const void* p, int bytes, const char* what, std::size_t* first,
                                 std::size_t* last) const {
  const auto address = reinterpret_cast<std::uintptr_t>(p);
  const auto base = reinterpret_cast<std::uintptr_t>(arena_);
  if (address < base || address + static_cast<std::uintptr_t>(bytes) > base + arena_bytes_) {
    return std::string(what) + " outside the block's shared memory";
  }
  *first = (address - base) / kGranule;
  *last = (address - base + static_cast<std::uintptr_t>(bytes) - 1) / kGranule;
  for (std::size_t g = *first; g <= *last; ++g) {
    if (state_[g] == State::kRedZone) {
      return std::string(what) + " of " + std::to_string(bytes) +
             " bytes out of bounds: it touches " + describe(g);
    }
  }
  return {};
}

std::string SharedMemory::check_against_write(std::size_t granule, int warp, int lane,
                                              const char* what) const {
  const Write& w = written_[granule];
  if (state_[granule] == State::kCopying) {
    return std::string(what) + " of " + describe(granule) +
           ", which an asynchronous copy of warp " + std::to_string(w.warp) + " " +
           lane_text(w.lane) + " still owns: no async_wait and barrier came between";
  }
  const bool ordered = w.warp == warp ? w.clock < clock_[warp].at[warp] || w.lane == lane
                                      : w.clock <= clock_[warp].at[w.warp];
  if (ordered) return {};
  return "race: " + std::string(what) + " of " + describe(granule) + " by warp " +
         std::to_string(warp) + " " + lane_text(lane) + ", written by warp " +
         std::to_string(w.warp) + " " + lane_text(w.lane) + " without a barrier between";
}

std::string SharedMemory::read(const void* p, int bytes, int warp, int lane) {
  std::size_t first = 0, last = 0;
  if (std::string e = locate(p, bytes, "shared load", &first, &last); !e.empty()) return e;
  const u32 now = clock_[warp].at[warp];
  for (std::size_t g = first; g <= last; ++g) {
    if (state_[g] == State::kUninitialised)
      return "read of uninitialised shared memory: " + describe(g);
    if (std::string e = check_against_write(g, warp, lane, "read"); !e.empty()) return e;
    Access& r = read_[g * static_cast<std::size_t>(warps_) + static_cast<std::size_t>(warp)];
    r.lane = static_cast<u8>(r.clock == now && r.lane != lane ? kAllLanes : lane);
    r.clock = now;
  }
  return {};
}

std::string SharedMemory::check_write(const void* p, int bytes, int warp, int lane,
                                      const char* what, State after) {
  std::size_t first = 0, last = 0;
  if (std::string e = locate(p, bytes, "shared store", &first, &last); !e.empty()) return e;
  const u32 now = clock_[warp].at[warp];
  for (std::size_t g = first; g <= last; ++g) {
    if (state_[g] != State::kUninitialised) {
      if (std::string e = check_against_write(g, warp, lane, what); !e.empty()) return e;
      const Access* reads = &read_[g * static_cast<std::size_t>(warps_)];
      for (int v = 0; v < warps_; ++v) {
        const bool ordered = v == warp ? reads[v].clock < now || reads[v].lane == lane
                                       : reads[v].clock <= clock_[warp].at[v];
        if (!ordered) {
          return "race: " + std::string(what) + " of " + describe(g) + " by warp " +
                 std::to_string(warp) + " " + lane_text(lane) + ", read by warp " +
                 std::to_string(v) + " " + lane_text(reads[v].lane) + " without a barrier between";
        }
      }
    }
    written_[g] = Write{now, static_cast<u8>(warp), static_cast<u8>(lane)};
    state_[g] = after;
  }
  return {};
}

std::string SharedMemory::write(const void* p, int bytes, int warp, int lane) {
  return check_write(p, bytes, warp, lane, "write", State::kReady);
}

std::string SharedMemory::begin_copy(const void* p, int bytes, int warp, int lane) {
  return check_write(p, bytes, warp, lane, "asynchronous copy", State::kCopying);
}

void SharedMemory::end_copy(const void* p, int bytes, int warp, int lane) {
  const auto first = static_cast<std::size_t>(static_cast<const char*>(p) - arena_) / kGranule;
  for (std::size_t g = first; g < first + static_cast<std::size_t>(bytes / kGranule); ++g) {
    written_[g] = Write{clock_[warp].at[warp], static_cast<u8>(warp), static_cast<u8>(lane)};
    state_[g] = State::kReady;
  }
}

std::string SharedMemory::damage() const {
  for (std::size_t i = 0; i < allocations_.size(); ++i) {
    const Allocation& a = allocations_[i];
    const int before = i == 0 ? 0 : allocations_[i - 1].offset + allocations_[i - 1].used;
    const int ends[2][2] = {{before, a.offset}, {a.offset + a.used, a.offset + a.bytes + kRedZone}};
    for (const auto& zone : ends) {
      unpoison(arena_ + zone[0], static_cast<std::size_t>(zone[1] - zone[0]));
      for (int j = zone[0]; j < zone[1]; ++j) {
        if (static_cast<unsigned char>(arena_[j]) != kGuardByte) {
          return "shared memory damaged: " + describe_pointer(arena_ + j);
        }
      }
    }
  }
  return {};
}

}  // namespace attention::emulator
