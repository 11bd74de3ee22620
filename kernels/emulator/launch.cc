// SPDX-License-Identifier: Apache-2.0
// Runs the blocks of a grid on host threads.
#include "kernels/emulator/launch.h"

#include <atomic>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "kernels/emulator/block.h"
#include "kernels/emulator/global_memory.h"
#include "kernels/emulator/options.h"

namespace attention::emulator {
namespace {

std::mutex counters_mutex;
Counters total;

void add_counters(const Counters& c) {
  std::lock_guard<std::mutex> lock(counters_mutex);
  total.blocks += c.blocks;
  total.mma += c.mma;
  total.ldmatrix += c.ldmatrix;
  total.ldmatrix_conflicts += c.ldmatrix_conflicts;
  total.shared_accesses += c.shared_accesses;
  total.shared_conflicts += c.shared_conflicts;
  total.async_copies += c.async_copies;
  total.barriers += c.barriers;
}

// What the host threads of one run share.
struct Grid {
  Grid(const Program& p, const Options& o, u64 n) : program(p), options(o), blocks(n) {}
  const Program& program;
  const Options& options;
  u64 blocks;
  std::atomic<u64> next{0};
  std::atomic<u64> finished{0};
  std::atomic<bool> stop{false};
  std::mutex mutex;
  std::string report;
  int idle = 0;           // host threads that found nothing to do since...
  u64 idle_finished = 0;  // ...this many blocks had finished

  void fail(const std::string& what) {
    std::lock_guard<std::mutex> lock(mutex);
    if (report.empty()) report = what;
    stop = true;
  }
};

// One host thread: keeps up to max_waiting_blocks blocks alive and goes round them.
void work(Grid& grid, int threads) {
  std::vector<std::unique_ptr<Block>> spare;
  std::deque<std::unique_ptr<Block>> waiting;
  const auto limit = static_cast<std::size_t>(grid.options.max_waiting_blocks);
  bool counted_idle = false;
  std::size_t unlucky = 0;  // waiting blocks looked at in vain since the last progress
  u64 seen_finished = 0;
  while (!grid.stop) {
    std::unique_ptr<Block> block;
    u64 index = grid.blocks;
    if (waiting.size() < limit && grid.next < grid.blocks) index = grid.next.fetch_add(1);
    if (index < grid.blocks) {
      if (spare.empty()) {
        block = std::make_unique<Block>(grid.program, grid.options);
      } else {
        block = std::move(spare.back());
        spare.pop_back();
      }
      block->start(grid.options.reverse_blocks ? grid.blocks - 1 - index : index);
      unlucky = 0;
    } else if (!waiting.empty()) {
      block = std::move(waiting.front());
      waiting.pop_front();
    } else {
      break;
    }
    switch (block->run()) {
      case Outcome::kFinished:
        ++grid.finished;
        spare.push_back(std::move(block));
        unlucky = 0;
        break;
      case Outcome::kFailed:
        grid.fail(block->report());
        spare.push_back(std::move(block));
        break;
      case Outcome::kWaiting:
        waiting.push_back(std::move(block));
        ++unlucky;
        break;
    }
    if (unlucky <= waiting.size() || waiting.empty()) continue;
    // All blocks of this host thread wait. When all host threads are in this state and no block has
    // finished since, nothing can ever change.
    std::lock_guard<std::mutex> lock(grid.mutex);
    const u64 finished = grid.finished;
    if (!counted_idle || seen_finished != finished) {
      if (grid.idle_finished != finished) {
        grid.idle_finished = finished;
        grid.idle = 0;
        counted_idle = false;
      }
      if (!counted_idle) ++grid.idle;
      counted_idle = true;
      seen_finished = finished;
      unlucky = 0;
    } else if (grid.idle >= threads) {
      if (grid.report.empty()) {
        grid.report = "deadlock between blocks: " + std::to_string(waiting.size()) +
                      " wait for others; " + waiting.front()->describe_waiting();
      }
      grid.stop = true;
    } else {
      std::this_thread::yield();
    }
  }
  for (auto& b : spare) add_counters(b->counters());
  for (auto& b : waiting) add_counters(b->counters());
}

}  // namespace

const char* run(const Program& program) {
  thread_local std::string report;
  report.clear();
  Options options;
  report = current_options(&options);
  if (!report.empty()) return report.c_str();
  const u64 blocks = u64{program.grid[0]} * program.grid[1] * program.grid[2];
  Grid grid(program, options, blocks);
  int threads = options.host_threads;
  if (static_cast<u64>(threads) > blocks) threads = static_cast<int>(blocks);
  ThreadState* outer = current_thread;
  if (threads <= 1) {
    work(grid, 1);
  } else {
    std::vector<std::thread> pool;
    for (int i = 0; i < threads; ++i) pool.emplace_back([&grid, threads] { work(grid, threads); });
    for (std::thread& t : pool) t.join();
  }
  current_thread = outer;
  report = grid.report;
  return report.empty() ? nullptr : report.c_str();
}

void zero(void* p, u64 bytes) {
  std::memset(p, 0, bytes);
  GlobalMemory::instance().zeroed(p, bytes);
}

void reset_counters() {
  std::lock_guard<std::mutex> lock(counters_mutex);
  total = Counters{};
}

Counters counters() {
  std::lock_guard<std::mutex> lock(counters_mutex);
  return total;
}

}  // namespace attention::emulator
