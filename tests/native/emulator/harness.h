// SPDX-License-Identifier: Apache-2.0
// Runs a lambda as a kernel on the emulator: what the emulator's own tests are written with.
#pragma once

#include <functional>
#include <string>

#include "kernels/cuda/tile/launch.h"
#include "kernels/emulator/emulator.h"
#include "tests/native/check/check.h"

namespace attention::emulator {

// A kernel whose body comes from the test.
template <int Threads>
struct Scripted {
  static constexpr int kThreads = Threads;
  static constexpr int kMinBlocks = 1;
  struct Params {
    const std::function<void(tile::Smem&)>* body;
    int smem;
  };
  static int smem_bytes(const Params& p) { return p.smem; }
  static ATTENTION_DEVICE void run(const Params& p, tile::Smem& smem) { (*p.body)(smem); }
};

inline Options checked_options() {
  Options options;
  options.checked = true;
  return options;
}

// Runs `body` in every thread of `blocks` blocks and returns the report, empty if all was well.
template <int Threads>
std::string run_kernel(const Options& options, const std::function<void(tile::Smem&)>& body,
                       int smem = 0, u32 blocks = 1) {
  set_options(options);
  Program program;
  program.threads = Threads;
  program.smem_bytes = smem;
  program.grid[0] = blocks;
  const typename Scripted<Threads>::Params params{&body, smem};
  program.params = &params;
  program.run = [](const void* p) {
    tile::Smem memory;
    Scripted<Threads>::run(*static_cast<const typename Scripted<Threads>::Params*>(p), memory);
  };
  const char* report = run(program);
  return report == nullptr ? std::string() : std::string(report);
}

}  // namespace attention::emulator
