// SPDX-License-Identifier: Apache-2.0
// The kernels for compiler vector extensions only: any architecture.
#define ATTENTION_CPU_ISA portable

#include "kernels/cpu/kernel_table.h"

namespace attention::cpu {

const Kernels& portable_kernels() {
  static constexpr Kernels kKernels = portable::kernel_table("portable");
  return kKernels;
}

}  // namespace attention::cpu
