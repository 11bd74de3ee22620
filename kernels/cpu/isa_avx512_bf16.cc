// SPDX-License-Identifier: Apache-2.0
// The kernels for AVX-512 with its bfloat16 dot products.
#define ATTENTION_CPU_ISA avx512_bf16

#include "kernels/cpu/kernel_table.h"

namespace attention::cpu {

const Kernels& avx512_bf16_kernels() {
  static constexpr Kernels kKernels = avx512_bf16::kernel_table("avx512_bf16");
  return kKernels;
}

}  // namespace attention::cpu
