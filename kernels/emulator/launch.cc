// SPDX-License-Identifier: Apache-2.0
// Runs the blocks of a grid on host threads.
#include "kernels/emulator/launch.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
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
//
// Deadlock between blocks: a host thread whose blocks all wait notes the value that `progress` had
// before it looked at them. When every host thread has noted the present value, nobody has moved
// since anybody looked, and nobody ever will.
class Grid {
 public:
  Grid(const Program& program, const Options& options, u64 blocks, int host_threads)
      : program_(program),
        options_(options),
        blocks_(blocks),
        stuck_at_(static_cast<std::size_t>(host_threads), kMoving) {}

  // One host thread: keeps up to max_waiting_blocks blocks alive and goes round them.
  void work(std::size_t host_thread);

  const std::string& report() const { return report_; }

 private:
  static constexpr u64 kMoving = ~u64{0};
  static constexpr u64 kGone = ~u64{0} - 1;

  void fail(const std::string& what) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (report_.empty()) report_ = what;
    stop_ = true;
  }

  void set_stuck(std::size_t host_thread, u64 value) {
    std::lock_guard<std::mutex> lock(mutex_);
    stuck_at_[host_thread] = value;
  }

  // True when no host thread can ever go on.
  bool note_stuck(std::size_t host_thread, u64 seen) {
    std::lock_guard<std::mutex> lock(mutex_);
    stuck_at_[host_thread] = seen;
    const u64 now = progress_;
    for (u64 at : stuck_at_) {
      if (at != now && at != kGone) return false;
    }
    return true;
  }

  // Runs a block as far as it goes; returns whether it moved at all.
  bool advance(Block& block, Outcome* outcome) {
    *outcome = block.run();
    if (*outcome == Outcome::kFailed) fail(block.report());
    if (*outcome == Outcome::kWaiting && !block.moved()) return false;
    ++progress_;
    return true;
  }

  const Program& program_;
  const Options& options_;
  const u64 blocks_;
  GridOrder order_;
  const u32 launch_ = GlobalMemory::instance().next_launch();
  std::atomic<u64> next_{0};
  std::atomic<u64> progress_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;  // of what follows
  std::vector<u64> stuck_at_;
  std::string report_;
};

void Grid::work(std::size_t host_thread) {
  std::vector<std::unique_ptr<Block>> spare;
  std::vector<std::unique_ptr<Block>> waiting;
  std::mt19937_64 random(options_.seed + host_thread);
  const auto limit = static_cast<std::size_t>(options_.max_waiting_blocks);
  while (!stop_) {
    Outcome outcome = Outcome::kFinished;
    const u64 index = waiting.size() < limit && next_ < blocks_ ? next_.fetch_add(1) : blocks_;
    if (index < blocks_) {
      if (spare.empty())
        spare.push_back(std::make_unique<Block>(program_, options_, launch_, &order_));
      Block& block = *spare.back();
      block.start(options_.reverse_blocks ? blocks_ - 1 - index : index);
      advance(block, &outcome);
      if (outcome == Outcome::kWaiting) {
        waiting.push_back(std::move(spare.back()));
        spare.pop_back();
      }
      continue;
    }
    if (waiting.empty()) break;
    set_stuck(host_thread, kMoving);
    const u64 seen = progress_;
    bool moved = false;
    if (options_.schedule == Schedule::kRandom) {
      std::shuffle(waiting.begin(), waiting.end(), random);
    } else if (options_.schedule == Schedule::kReverse) {
      std::reverse(waiting.begin(), waiting.end());
    }
    for (std::size_t i = 0; i < waiting.size() && !stop_;) {
      moved = advance(*waiting[i], &outcome) || moved;
      if (outcome == Outcome::kWaiting) {
        ++i;
        continue;
      }
      spare.push_back(std::move(waiting[i]));
      waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(i));
    }
    if (moved || stop_) continue;
    if (note_stuck(host_thread, seen)) {
      fail("deadlock between blocks: " + std::to_string(waiting.size()) +
           " on this host thread wait for others; " + waiting.front()->describe_waiting());
    }
    std::this_thread::yield();
  }
  set_stuck(host_thread, kGone);
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
  int threads = options.host_threads;
  if (static_cast<u64>(threads) > blocks) threads = static_cast<int>(blocks);
  Grid grid(program, options, blocks, threads);
  ThreadState* outer = current_thread;
  if (threads == 1) {
    grid.work(0);
  } else {
    std::vector<std::thread> pool;
    for (int i = 0; i < threads; ++i) {
      pool.emplace_back([&grid, i] { grid.work(static_cast<std::size_t>(i)); });
    }
    for (std::thread& t : pool) t.join();
  }
  current_thread = outer;
  report = grid.report();
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
