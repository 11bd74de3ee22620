// SPDX-License-Identifier: Apache-2.0
// The kernels for AVX2, FMA and F16C.
#define ATTENTION_CPU_ISA avx2

#include "kernels/cpu/kernel_table.h"

namespace attention::cpu {

const Kernels& avx2_kernels() {
  static constexpr Kernels kKernels = avx2::kernel_table("avx2");
  return kKernels;
}

}  // namespace attention::cpu
