// SPDX-License-Identifier: Apache-2.0
// Run-time choice of the instruction set, and what the launchers share.
#pragma once

#include "kernels/common/status.h"
#include "kernels/cpu/attention.h"
#include "kernels/cpu/kernels.h"

namespace attention::cpu {

// The kernels of this process; null, with `status` set, when JAX_OPS_CPU_ISA names an instruction
// set that does not exist or that this machine lacks.
const Kernels* select_kernels(Status* status);

// Every instruction set that this machine can run, best first.
struct KernelList {
  static constexpr int kMost = 8;
  const Kernels* entries[kMost] = {};
  int count = 0;
};
KernelList available_kernels();

// The launchers with given kernels.
Status forward_with(const Kernels& kernels, const ForwardArgs& args, const Executor& executor);
Status backward_with(const Kernels& kernels, const BackwardArgs& args, const Executor& executor);

// How many workers a workspace of this size serves, at most `threads`.
Status workers_for(const Plan& plan, i64 workspace_bytes, int threads, int* workers);

}  // namespace attention::cpu
