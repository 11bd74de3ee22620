// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/forward_unit.h"

ATTENTION_FORWARD_UNIT(bf16, 32, 32)
