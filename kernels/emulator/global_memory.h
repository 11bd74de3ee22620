// SPDX-License-Identifier: Apache-2.0
// The registered buffers of a run: bounds, write-once outputs, and reads of what nothing wrote.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/common/types.h"
#include "kernels/emulator/emulator.h"

namespace attention::emulator {

class Block;

class GlobalMemory {
 public:
  static GlobalMemory& instance();

  void open(const Session* session);
  void close(const Session* session);
  void add(const Session* session, const std::string& name, const void* p, u64 bytes,
           Access access);
  std::string unwritten(const Session* session, const std::string& name);

  // Each returns an empty string, or what is wrong with the access. Called by several host threads
  // at once.
  // `block` makes the access, in its current thread.
  std::string read(const void* p, int bytes, bool constant, Block& block);
  std::string write(const void* p, int bytes, Block& block);
  std::string atomic(const void* p);
  // Host-side memset: makes workspace bytes readable.
  void zeroed(const void* p, u64 bytes);
  // A number for a run, never 0 or kHost.
  u32 next_launch() { return ++launches_; }

 private:
  struct Stamp {
    u32 launch = 0;  // 0: none
    u32 clock = 0;
    u64 block = 0;
    int warp = 0;
  };
  struct Buffer {
    const Session* session;
    std::string name;
    const char* begin;
    u64 bytes;
    Access access;
    // The launch that wrote each byte last, 0 if none did; no entries for inputs.
    std::unique_ptr<std::atomic<u32>[]> written;
    // Workspaces: the latest accesses of each 4 bytes, for races between the warps of a grid. Of
    // several readers the latest alone is remembered.
    std::mutex mutex;  // of both
    std::vector<Stamp> writers, readers;
  };

  static constexpr u32 kHost = ~u32{0};

  Buffer* find(const void* p, int bytes, std::string* wrong);
  static std::string check_order(Buffer& buffer, const char* p, int bytes, bool write,
                                 Block& block);

  std::atomic<u32> launches_{0};
  // Guards changes; runs only read the list, and sessions do not change during one.
  std::mutex mutex_;
  std::vector<const Session*> sessions_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
};

}  // namespace attention::emulator
