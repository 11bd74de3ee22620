// SPDX-License-Identifier: Apache-2.0
// The kernels for AVX-512 with matrix tiles of bfloat16 (AMX).
#define ATTENTION_CPU_ISA amx

#include "kernels/cpu/kernel_table.h"

namespace attention::cpu {

const Kernels& amx_kernels() {
  static constexpr Kernels kKernels = amx::kernel_table("amx");
  return kKernels;
}

}  // namespace attention::cpu
