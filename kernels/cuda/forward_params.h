// SPDX-License-Identifier: Apache-2.0
// What the forward kernel and the combine kernel are called with.
#pragma once

#include "kernels/common/problem.h"

namespace attention {

struct ForwardParams {
  Problem problem;
  void* out;
  float* lse;
  // With more than one split: [splits, B, Lq, Hq, Dv] and [splits, B, Lq, Hq].
  float* partial_out;
  float* partial_lse;
  i32 row_blocks;  // tiles of query rows a (batch, head block)
  i32 splits;
  i32 pack;     // heads that share a row tile: the GQA group, or 1
  i32 block_k;  // keys in a stage
  i32 stages;
};

struct CombineParams {
  const float* partial_out;
  const float* partial_lse;
  void* out;
  float* lse;
  i64 rows;  // B * Lq * Hq
  i32 dv;
  i32 splits;
};

}  // namespace attention
