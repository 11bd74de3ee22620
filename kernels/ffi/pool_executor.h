// SPDX-License-Identifier: Apache-2.0
// The CPU launchers' Executor on XLA's intra-op thread pool.
//
// Handlers themselves run on that pool, which may have one thread: so the caller works too, and it
// waits for tasks, never for helpers. A helper that starts late finds no task left; the job is
// shared so that it may outlive the call, while `function`, which lives on the caller's stack, is
// reached only through a task that the caller still waits for.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>

#include "kernels/cpu/attention.h"
#include "xla/ffi/api/ffi.h"

namespace attention::ffi {

class PoolExecutor final : public cpu::Executor {
 public:
  // Uses at most `threads` threads, the caller included.
  PoolExecutor(xla::ffi::ThreadPool& pool, i64 threads)
      : pool_(pool),
        threads_(static_cast<int>(max_of<i64>(1, min_of<i64>(threads, pool.num_threads())))) {}

  int threads() const override { return threads_; }

  void run(i64 tasks, int workers, cpu::TaskFunction function) const override {
    const i64 helpers = min_of<i64>(tasks, min_of(workers, threads_)) - 1;
    if (helpers <= 0) {
      for (i64 task = 0; task < tasks; ++task) function(task, 0);
      return;
    }
    const auto job = std::make_shared<Job>(tasks, function);
    try {
      for (int worker = 1; worker <= helpers; ++worker) {
        pool_.Schedule([job, worker] { job->work(worker); });
      }
    } catch (const std::bad_alloc&) {
      // Those that were scheduled work on this call's memory: it must not return before them. Fewer
      // helpers do.
    }
    job->work(0);
    job->wait();
  }

 private:
  class Job {
   public:
    Job(i64 tasks, cpu::TaskFunction function) : tasks_(tasks), function_(function) {}

    void work(int worker) {
      for (;;) {
        const i64 task = next_.fetch_add(1, std::memory_order_relaxed);
        if (task >= tasks_) return;
        function_(task, worker);
        if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == tasks_) {
          // Under the lock, so that the notification cannot fall between the waiter's test and
          // sleep.
          const std::lock_guard<std::mutex> lock(mutex_);
          all_done_.notify_one();
        }
      }
    }

    void wait() {
      // The last tasks usually end within microseconds of each other: try before sleeping.
      for (int i = 0; i < kSpins; ++i) {
        if (finished()) return;
        pause();
      }
      std::unique_lock<std::mutex> lock(mutex_);
      all_done_.wait(lock, [this] { return finished(); });
    }

   private:
    static constexpr int kSpins = 2000;

    bool finished() const { return done_.load(std::memory_order_acquire) == tasks_; }

    static void pause() {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }

    const i64 tasks_;
    const cpu::TaskFunction function_;
    std::atomic<i64> next_{0};
    std::atomic<i64> done_{0};
    std::mutex mutex_;
    std::condition_variable all_done_;
  };

  xla::ffi::ThreadPool& pool_;
  int threads_;
};

}  // namespace attention::ffi
