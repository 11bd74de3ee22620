// SPDX-License-Identifier: Apache-2.0
#include "kernels/emulator/global_memory.h"

#include <algorithm>

#include "kernels/emulator/block.h"

namespace attention::emulator {

GlobalMemory& GlobalMemory::instance() {
  static GlobalMemory memory;
  return memory;
}

void GlobalMemory::open(const Session* session) {
  std::lock_guard<std::mutex> lock(mutex_);
  sessions_.push_back(session);
}

void GlobalMemory::close(const Session* session) {
  std::lock_guard<std::mutex> lock(mutex_);
  sessions_.erase(std::remove(sessions_.begin(), sessions_.end(), session), sessions_.end());
  buffers_.erase(std::remove_if(buffers_.begin(), buffers_.end(),
                                [&](const auto& b) { return b->session == session; }),
                 buffers_.end());
}

void GlobalMemory::add(const Session* session, const std::string& name, const void* p, u64 bytes,
                       Access access) {
  auto buffer = std::make_unique<Buffer>();
  buffer->session = session;
  buffer->name = name;
  buffer->begin = static_cast<const char*>(p);
  buffer->bytes = bytes;
  buffer->access = access;
  if (access != Access::kInput) {
    buffer->written = std::make_unique<std::atomic<u32>[]>(bytes);
    for (u64 i = 0; i < bytes; ++i) buffer->written[i].store(0, std::memory_order_relaxed);
  }
  if (access == Access::kWorkspace) {
    buffer->writers.resize(bytes / 4 + 1);
    buffer->readers.resize(bytes / 4 + 1);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  buffers_.push_back(std::move(buffer));
}

std::string GlobalMemory::unwritten(const Session* session, const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& b : buffers_) {
    if (b->session != session || b->name != name) continue;
    if (b->written == nullptr) return name + " is an input";
    for (u64 i = 0; i < b->bytes; ++i) {
      if (b->written[i].load(std::memory_order_relaxed) == 0) {
        return name + ": byte " + std::to_string(i) + " of " + std::to_string(b->bytes) +
               " was never written";
      }
    }
    return {};
  }
  return "no buffer " + name + " in this session";
}

GlobalMemory::Buffer* GlobalMemory::find(const void* p, int bytes, std::string* wrong) {
  const char* begin = static_cast<const char*>(p);
  const Buffer* nearest = nullptr;
  for (const auto& b : buffers_) {
    if (begin >= b->begin && begin + bytes <= b->begin + b->bytes) return b.get();
    if (begin + bytes > b->begin && begin < b->begin + b->bytes + 4096) nearest = b.get();
  }
  if (sessions_.empty()) return nullptr;
  *wrong = "global access of " + std::to_string(bytes) + " bytes outside every registered buffer";
  if (nearest != nullptr) {
    *wrong += ": it starts at byte " + std::to_string(begin - nearest->begin) + " of " +
              nearest->name + ", which has " + std::to_string(nearest->bytes);
  }
  return nullptr;
}

std::string GlobalMemory::check_order(Buffer& buffer, const char* p, int bytes, bool write,
                                      Block& block) {
  const auto first = static_cast<std::size_t>(p - buffer.begin) / 4;
  const auto last = static_cast<std::size_t>(p - buffer.begin + bytes - 1) / 4;
  const Stamp now{block.launch(), block.clock_of_warp(), block.index(), block.current().warp};
  const auto race = [&](const Stamp& earlier, const char* what, std::size_t word) {
    if (earlier.launch != now.launch ||
        block.comes_after(earlier.block, earlier.warp, earlier.clock)) {
      return std::string();
    }
    return std::string("race between warps of the grid: ") + (write ? "write to" : "read of") +
           " byte " + std::to_string(4 * word) + " of " + buffer.name + ", " + what + " by warp " +
           std::to_string(earlier.warp) + " of block " + std::to_string(earlier.block) +
           " and not handed over";
  };
  std::lock_guard<std::mutex> lock(buffer.mutex);
  for (std::size_t word = first; word <= last; ++word) {
    if (std::string wrong = race(buffer.writers[word], "written", word); !wrong.empty()) {
      return wrong;
    }
    if (!write) {
      buffer.readers[word] = now;
      continue;
    }
    if (std::string wrong = race(buffer.readers[word], "read", word); !wrong.empty()) return wrong;
    buffer.writers[word] = now;
  }
  return {};
}

std::string GlobalMemory::read(const void* p, int bytes, bool constant, Block& block) {
  std::string wrong;
  Buffer* b = find(p, bytes, &wrong);
  if (b == nullptr || b->access == Access::kInput) return wrong;
  const char* begin = static_cast<const char*>(p);
  const std::string place = "byte " + std::to_string(begin - b->begin) + " of " + b->name;
  if (b->access == Access::kOutput) return "read of " + place + ", which is an output";
  for (int i = 0; i < bytes; ++i) {
    const u32 writer = b->written[begin - b->begin + i].load(std::memory_order_acquire);
    if (writer == 0) return "read of " + place + ", which nothing has written";
    if (constant && writer == block.launch()) {
      return "global_load_constant of " + place + ", which the same grid has written";
    }
  }
  return check_order(*b, begin, bytes, false, block);
}

std::string GlobalMemory::write(const void* p, int bytes, Block& block) {
  std::string wrong;
  Buffer* b = find(p, bytes, &wrong);
  if (b == nullptr) return wrong;
  const char* begin = static_cast<const char*>(p);
  const std::string place = "byte " + std::to_string(begin - b->begin) + " of " + b->name;
  if (b->access == Access::kInput) return "write to " + place + ", which is an input";
  for (int i = 0; i < bytes; ++i) {
    const u32 before =
        b->written[begin - b->begin + i].exchange(block.launch(), std::memory_order_acq_rel);
    if (before != 0 && b->access == Access::kOutput) return place + " is written twice";
  }
  return b->access == Access::kWorkspace ? check_order(*b, begin, bytes, true, block)
                                         : std::string();
}

std::string GlobalMemory::atomic(const void* p) {
  std::string wrong;
  const Buffer* b = find(p, 4, &wrong);
  if (b == nullptr || b->access == Access::kWorkspace) return wrong;
  return "atomic access to " + b->name + ", which is no workspace";
}

void GlobalMemory::zeroed(const void* p, u64 bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  const char* begin = static_cast<const char*>(p);
  for (const auto& b : buffers_) {
    if (b->access != Access::kWorkspace) continue;
    for (u64 i = 0; i < b->bytes; ++i) {
      if (b->begin + i >= begin && b->begin + i < begin + bytes)
        b->written[i].store(kHost, std::memory_order_release);
    }
  }
}

Session::Session() { GlobalMemory::instance().open(this); }
Session::~Session() { GlobalMemory::instance().close(this); }

void Session::add(const std::string& name, const void* p, std::uint64_t bytes, Access access) {
  GlobalMemory::instance().add(this, name, p, bytes, access);
}

std::string Session::unwritten(const std::string& name) const {
  return GlobalMemory::instance().unwritten(this, name);
}

}  // namespace attention::emulator
