// SPDX-License-Identifier: Apache-2.0
// The kernels for AVX-512 F, BW, DQ and VL.
#define ATTENTION_CPU_ISA avx512

#include "kernels/cpu/kernel_table.h"

namespace attention::cpu {

const Kernels& avx512_kernels() {
  static constexpr Kernels kKernels = avx512::kernel_table("avx512");
  return kKernels;
}

}  // namespace attention::cpu
