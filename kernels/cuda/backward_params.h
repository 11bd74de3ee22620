// SPDX-License-Identifier: Apache-2.0
// What the backward kernels are called with.
#pragma once

#include "kernels/common/problem.h"

namespace attention {

struct BackwardParams {
  Problem problem;
  const void* out;
  const float* lse;
  const void* dout;
  const float* dlse;  // null: zero
  void* dq;
  void* dk;
  void* dv;
  float* dbias;
  float* dslopes_rows;
  float* dscale_rows;
  // [B, Hq, Lq] pairs that the row-terms kernel writes and the others read.
  float* row_terms;
  // One-kernel form (backward_dq.h), else null. [B, Hq, query tiles] of: a tile of sums, and a
  // counter for each warp of a block; and the counter that blocks take their number from.
  float* dq_sums;
  u32* turns;
  u32* ticket;
  i32 tile_rows;       // query rows of a tile
  i32 turns_per_tile;  // counters of a tile
  i32 stages;
};

}  // namespace attention
