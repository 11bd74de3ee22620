// SPDX-License-Identifier: Apache-2.0
// The table of kernels of the instruction set that this unit is compiled for.
#pragma once

#include "kernels/cpu/backward_kernel.h"
#include "kernels/cpu/bias_gradient_kernel.h"
#include "kernels/cpu/decode_kernel.h"
#include "kernels/cpu/forward_kernel.h"
#include "kernels/cpu/kernels.h"

namespace attention::cpu::ATTENTION_CPU_ISA {

constexpr Kernels kernel_table(const char* name) {
  return {name,     forward_tiled, forward_decode, merge_splits,
          backward, reduce_splits, bias_gradient};
}

}  // namespace attention::cpu::ATTENTION_CPU_ISA
