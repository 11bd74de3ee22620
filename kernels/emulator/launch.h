// SPDX-License-Identifier: Apache-2.0
// Running a kernel on the emulator: what kernels/cuda/tile/launch.h calls on the host.
#pragma once

#include "kernels/common/types.h"

namespace attention::emulator {

struct Program {
  int threads = 0;     // of a block
  int smem_bytes = 0;  // that the kernel asks for
  u32 grid[3] = {1, 1, 1};
  const void* params = nullptr;
  void (*run)(const void* params) = nullptr;  // the kernel, called once by every emulated thread
};

// Runs all blocks and returns nullptr, or a report of what the kernel did wrong; the text is valid
// until the next run that this host thread starts. Options come from emulator.h.
const char* run(const Program& program);

// memset to 0 that the checks know of.
void zero(void* p, u64 bytes);

}  // namespace attention::emulator
