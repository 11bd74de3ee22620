// SPDX-License-Identifier: Apache-2.0
// What each warp collective computes, from the operands that the 32 lanes left. The layouts are
// written from the PTX ISA's formulas, independently of the kernels' own index arithmetic.
#pragma once

#include "kernels/emulator/device.h"

namespace attention::emulator {

// operands[lane] points to MmaOperands.
void multiply(MmaInput input, int count, void* const* operands);

// operands[lane] points to MatrixOperands.
void load_matrices(bool transposed, void* const* operands);
// Extra passes over the banks that the four matrices need.
int matrix_conflicts(void* const* operands);

// operands[lane] points to ShuffleOperands.
void exchange(void* const* operands);

// operands[lane] points to VoteOperands.
void vote(void* const* operands);

}  // namespace attention::emulator
