// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/backward_unit.h"

ATTENTION_BACKWARD_UNIT(bf16, 32, 32)
