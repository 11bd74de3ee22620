// SPDX-License-Identifier: Apache-2.0
// The translation units: one function per (operation, dtype, head-dim bucket), each in a generated
// source file of its own (units.bzl), so that they compile in parallel and only what changed is
// compiled again.
#pragma once

#include "kernels/common/planner.h"
#include "kernels/common/status.h"
#include "kernels/cuda/backward_params.h"
#include "kernels/cuda/forward_params.h"

namespace attention::cuda {

struct ForwardLaunch {
  ForwardParams params;
  int rows;   // block_q: 16, 64 or 128
  bool lean;  // causal, window and lengths only, scale > 0, aligned rows
  void* stream;
};

struct BackwardLaunch {
  BackwardParams params;
  bool lean;
  BackwardForm form;
  void* stream;
};

// Declared weak: a build may leave uncommon units out, and the launcher then says so.
#define ATTENTION_DECLARE_UNIT(dtype, d, dv)                                              \
  __attribute__((weak)) Status forward_##dtype##_##d##_##dv(const ForwardLaunch& launch); \
  __attribute__((weak)) Status backward_##dtype##_##d##_##dv(const BackwardLaunch& launch);

#define ATTENTION_FOR_EACH_BUCKET(X, dtype) \
  X(dtype, 32, 32)                          \
  X(dtype, 64, 64)                          \
  X(dtype, 96, 96)                          \
  X(dtype, 128, 128)                        \
  X(dtype, 192, 128)                        \
  X(dtype, 192, 192)                        \
  X(dtype, 256, 256)

ATTENTION_FOR_EACH_BUCKET(ATTENTION_DECLARE_UNIT, f32)
ATTENTION_FOR_EACH_BUCKET(ATTENTION_DECLARE_UNIT, bf16)
ATTENTION_FOR_EACH_BUCKET(ATTENTION_DECLARE_UNIT, f16)

}  // namespace attention::cuda
