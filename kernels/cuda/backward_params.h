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
  i32 stages;
};

}  // namespace attention
