// SPDX-License-Identifier: Apache-2.0
// The body of a backward translation unit: every compiled backward kernel of one dtype and head-dim
// bucket, and their order.
#pragma once

#include "kernels/cuda/backward_bias.h"
#include "kernels/cuda/backward_kv.h"
#include "kernels/cuda/backward_q.h"
#include "kernels/cuda/backward_terms.h"
#include "kernels/cuda/tile/launch.h"
#include "kernels/cuda/unit_types.h"
#include "kernels/cuda/units.h"

namespace attention::cuda {

template <typename Kernel>
Status launch_blocks(i64 blocks, const BackwardLaunch& call) {
  if (blocks > tile::kMaxGridX) {
    return Status::error("attention backward: %lld blocks pass the grid limit of 2147483647",
                         static_cast<long long>(blocks));
  }
  return launch<Kernel>(Dim3{static_cast<u32>(blocks), 1, 1}, call.stream, call.params);
}

template <typename T, tile::F32Products kProducts, int D, int DV, bool kGeneral>
Status launch_gradients(const BackwardLaunch& call) {
  const Problem& p = call.params.problem;
  constexpr i64 kTile = 16 * backward_shape(sizeof(T), D).warps;
  const i64 key_blocks = ceil_div(p.lkv, kTile) * p.hkv * p.batch;
  const i64 row_blocks = ceil_div(p.lq, kTile) * p.hq * p.batch;
  if constexpr (!kGeneral && backward_has_one_kernel(sizeof(T), D)) {
    if (call.form == BackwardForm::kOneKernel) {
      return launch_blocks<BackwardKv<T, kProducts, D, DV, false, true, true, true>>(key_blocks,
                                                                                     call);
    }
  }
  Status status;
  if constexpr (backward_shape(sizeof(T), D).joint) {
    status = launch_blocks<BackwardKv<T, kProducts, D, DV, kGeneral, true, true, false>>(key_blocks,
                                                                                         call);
  } else {
    status = launch_blocks<BackwardKv<T, kProducts, D, DV, kGeneral, true, false, false>>(
        key_blocks, call);
    if (!status.ok()) return status;
    status = launch_blocks<BackwardKv<T, kProducts, D, DV, kGeneral, false, true, false>>(
        key_blocks, call);
  }
  if (!status.ok()) return status;
  return launch_blocks<BackwardQ<T, kProducts, D, DV, kGeneral>>(row_blocks, call);
}

template <typename T, tile::F32Products kProducts, int D, int DV>
Status launch_backward(const BackwardLaunch& call) {
  const Problem& p = call.params.problem;
  const i64 rows = p.batch * p.lq * p.hq;
  Status status =
      launch_blocks<BackwardTerms<T>>(ceil_div<i64>(rows, BackwardTerms<T>::kRows), call);
  if (!status.ok()) return status;
  status = call.lean ? launch_gradients<T, kProducts, D, DV, false>(call)
                     : launch_gradients<T, kProducts, D, DV, true>(call);
  if (!status.ok() || !call.params.dbias) return status;
  using Bias = BackwardBias<T, kProducts, D, DV>;
  return launch_blocks<Bias>(Bias::grid(p).blocks(), call);
}

template <typename T, int D, int DV>
Status backward_unit(const BackwardLaunch& call) {
  if constexpr (sizeof(T) == 4) {
    if (call.params.problem.precision == Precision::kHighest) {
      return launch_backward<T, tile::F32Products::kTf32x3, D, DV>(call);
    }
  }
  return launch_backward<T, tile::F32Products::kTf32, D, DV>(call);
}

#define ATTENTION_BACKWARD_UNIT(dtype, d, dv)                        \
  namespace attention::cuda {                                        \
  Status backward_##dtype##_##d##_##dv(const BackwardLaunch& call) { \
    return backward_unit<unit::dtype, d, dv>(call);                  \
  }                                                                  \
  }

}  // namespace attention::cuda
