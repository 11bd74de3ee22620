// SPDX-License-Identifier: Apache-2.0
// The element types under the names that generated units use.
#pragma once

#include "kernels/cuda/tile/types16.h"

namespace attention::cuda::unit {

using f32 = attention::f32;
using bf16 = tile::bf16;
using f16 = tile::f16;

}  // namespace attention::cuda::unit
