// SPDX-License-Identifier: Apache-2.0
// The body of a forward translation unit: every compiled forward kernel of one dtype and head-dim
// bucket, and the choice among them.
#pragma once

#include "kernels/cuda/combine.h"
#include "kernels/cuda/forward.h"
#include "kernels/cuda/tile/launch.h"
#include "kernels/cuda/unit_types.h"
#include "kernels/cuda/units.h"

namespace attention::cuda {

template <typename T, tile::F32Products kProducts, int D, int DV>
Status launch_forward(const ForwardLaunch& call) {
  const ForwardParams& params = call.params;
  const i64 blocks = i64{params.row_blocks} * params.splits * (params.problem.hq / params.pack) *
                     params.problem.batch;
  if (blocks > tile::kMaxGridX) {
    return Status::error("attention forward: %lld blocks pass the grid limit of 2147483647",
                         static_cast<long long>(blocks));
  }
  const Dim3 grid{static_cast<u32>(blocks), 1, 1};
  if (call.rows == 16) {
    if (call.lean)
      return launch<Forward<T, kProducts, D, DV, 16, false>>(grid, call.stream, params);
    return launch<Forward<T, kProducts, D, DV, 16, true>>(grid, call.stream, params);
  }
  if constexpr (forward_has_128_rows(sizeof(T), D)) {
    if (call.rows == 128) {
      return launch<Forward<T, kProducts, D, DV, 128, false>>(grid, call.stream, params);
    }
  }
  if (call.lean) return launch<Forward<T, kProducts, D, DV, 64, false>>(grid, call.stream, params);
  return launch<Forward<T, kProducts, D, DV, 64, true>>(grid, call.stream, params);
}

template <typename T, int D, int DV>
Status launch_products(const ForwardLaunch& call) {
  if constexpr (sizeof(T) == 4) {
    if (call.params.problem.precision == Precision::kHighest) {
      return launch_forward<T, tile::F32Products::kTf32x3, D, DV>(call);
    }
  }
  return launch_forward<T, tile::F32Products::kTf32, D, DV>(call);
}

template <typename T, int D, int DV>
Status forward_unit(const ForwardLaunch& call) {
  const ForwardParams& params = call.params;
  const Status status = launch_products<T, D, DV>(call);
  if (!status.ok() || params.splits == 1) return status;
  const i64 rows = params.problem.batch * params.problem.lq * params.problem.hq;
  const CombineParams combine{params.partial_out,
                              params.partial_lse,
                              params.out,
                              params.lse,
                              rows,
                              static_cast<i32>(params.problem.dv),
                              params.splits};
  const Dim3 grid{static_cast<u32>(ceil_div<i64>(rows, Combine<T>::kRows)), 1, 1};
  return launch<Combine<T>>(grid, call.stream, combine);
}

#define ATTENTION_FORWARD_UNIT(dtype, d, dv)                       \
  namespace attention::cuda {                                      \
  Status forward_##dtype##_##d##_##dv(const ForwardLaunch& call) { \
    return forward_unit<unit::dtype, d, dv>(call);                 \
  }                                                                \
  }

}  // namespace attention::cuda
