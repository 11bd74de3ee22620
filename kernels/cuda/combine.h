// SPDX-License-Identifier: Apache-2.0
// Combine kernel: merges the partial results of a split forward pass. One warp a row:
//   lse = log sum_s exp(lse_s),   out = sum_s exp(lse_s - lse) out_s
// Splits without an allowed key have lse_s = -inf and weight 0; a row of only such splits is the
// empty row (0, -inf), never 0 / 0. Sums run in the order of the splits.
#pragma once

#include "kernels/cuda/forward_params.h"
#include "kernels/cuda/rows.h"
#include "kernels/cuda/softmax.h"

namespace attention {

template <typename T>
struct Combine {
  static constexpr int kThreads = 128;
  static constexpr int kMinBlocks = 1;
  static constexpr int kRows = kThreads / tile::kWarpSize;
  using Params = CombineParams;

  static constexpr int smem_bytes(const Params&) { return 0; }

  ATTENTION_DEVICE static void run(const Params& params, tile::Smem&) {
    const i64 row = i64{tile::block_index().x} * kRows + tile::warp_index();
    if (row >= params.rows) return;
    const i32 lane = tile::lane_index();
    const auto partial_lse = [&](i32 split) {
      return tile::global_load_constant(params.partial_lse + split * params.rows + row)[0];
    };

    f32 maximum = -tile::infinity();
    for (i32 s = lane; s < params.splits; s += tile::kWarpSize) {
      maximum = tile::max_f32(maximum, partial_lse(s));
    }
    const f32 base = finite_base(tile::warp_max(maximum));
    f32 sum = 0.f;
    for (i32 s = lane; s < params.splits; s += tile::kWarpSize) {
      sum += exponential(partial_lse(s), base, tile::kLog2E);
    }
    sum = tile::warp_sum(sum);
    if (lane == 0) tile::global_store(params.lse + row, logsumexp(base, sum, 1.f));

    const f32 factor = sum == 0.f ? 0.f : 1.f / sum;
    T* out = static_cast<T*>(params.out) + row * params.dv;
    for (i32 col = 2 * lane; col < params.dv; col += 2 * tile::kWarpSize) {
      f32 x0 = 0.f;
      f32 x1 = 0.f;
      const bool has_second = col + 1 < params.dv;
      for (i32 s = 0; s < params.splits; ++s) {
        const f32 weight = exponential(partial_lse(s), base, tile::kLog2E) * factor;
        const f32* from = params.partial_out + (s * params.rows + row) * params.dv + col;
        x0 += weight * tile::global_load_constant(from)[0];
        x1 += weight * tile::global_load_or(has_second ? from + 1 : from, has_second, 0.f);
      }
      store_pair(out, params.dv, col, x0, x1);
    }
  }
};

}  // namespace attention
