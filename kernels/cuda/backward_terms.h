// SPDX-License-Identifier: Apache-2.0
// Row-terms kernel: what the backward kernels need of each query row, one warp a row. Also what
// they share to read it.
//   pair [b, h, i] = (lse, sum(dO * O) - dlse)
// Rows that see no key, and rows past their length (whose dO may be anything and is not read), get
// (+inf, 0): exp(s - inf) is 0, so they add nothing to any gradient without a mask of their own.
#pragma once

#include "kernels/cuda/backward_params.h"
#include "kernels/cuda/score.h"

namespace attention {

template <typename T>
struct BackwardTerms {
  static constexpr int kThreads = 128;
  static constexpr int kMinBlocks = 1;
  static constexpr int kRows = kThreads / tile::kWarpSize;
  using Params = BackwardParams;

  static constexpr int smem_bytes(const Params&) { return 0; }

  ATTENTION_DEVICE static void run(const Params& params, tile::Smem&) {
    const Problem& p = params.problem;
    const i64 flat = i64{tile::block_index().x} * kRows + tile::warp_index();
    if (flat >= p.batch * p.lq * p.hq) return;
    const i64 h = flat % p.hq;
    const i64 i = flat / p.hq % p.lq;
    const i64 b = flat / p.hq / p.lq;
    const f32 lse = tile::global_load_constant(params.lse + flat)[0];
    tile::Vec<f32, 2> terms{{tile::infinity(), 0.f}};
    if (i < row_mask(p, b).q_len && lse != -tile::infinity()) {
      const T* out = static_cast<const T*>(params.out) + flat * p.dv;
      const T* dout = static_cast<const T*>(params.dout) + flat * p.dv;
      f32 sum = 0.f;
      for (i32 col = tile::lane_index(); col < p.dv; col += tile::kWarpSize) {
        sum += tile::to_f32(tile::global_load_constant(out + col)[0]) *
               tile::to_f32(tile::global_load_constant(dout + col)[0]);
      }
      sum = tile::warp_sum(sum);
      if (params.dlse) sum -= tile::global_load_constant(params.dlse + flat)[0];
      terms = {{lse, sum}};
    }
    if (tile::lane_index() == 0) {
      tile::global_store(params.row_terms + 2 * ((b * p.hq + h) * p.lq + i), terms);
    }
    if (params.turns) prepare_one_kernel(params, b, h, static_cast<i32>(i));
  }

 private:
  // What the one-kernel form (backward_dq.h) finds before it starts: counters at zero, and zeros in
  // the rows of dq of query tiles that no key tile visits. Done here, a launch is saved.
  ATTENTION_DEVICE static void prepare_one_kernel(const Params& params, i64 b, i64 h, i32 i) {
    const Problem& p = params.problem;
    const i32 step = params.tile_rows;
    const i32 tile_row = i % step;
    const int lane = tile::lane_index();
    const i64 tile_index = (b * p.hq + h) * ceil_div<i64>(p.lq, step) + i / step;
    if (tile_row == 0 && lane < params.turns_per_tile) {
      tile::global_store(params.turns + tile_index * params.turns_per_tile + lane, 0u);
    }
    if (tile_index == 0 && tile_row == 0 && lane == 0) tile::global_store(params.ticket, 0u);
    const RowMask mask = row_mask(p, b);
    const i32 first = i - tile_row;
    if (!keys_of_rows(mask, Range{first, min_of(first + step, mask.q_len)}).empty()) return;
    T* row = static_cast<T*>(params.dq) + ((b * p.lq + i) * p.hq + h) * p.d;
    for (i32 col = lane; col < p.d; col += tile::kWarpSize) {
      tile::global_store(row + col, tile::from_f32<T>(0.f));
    }
  }
};

// The pairs of one (batch, head).
ATTENTION_DEVICE const f32* row_terms(const BackwardParams& params, i64 b, i64 h) {
  return params.row_terms + 2 * (b * params.problem.hq + h) * params.problem.lq;
}

// exp(score - lse). kScaleLater: the score is a raw product; otherwise it is in natural units, and
// `scale` means nothing.
//
// lse is rounded in natural units, so only a score that is rounded in natural units cancels it: the
// weight of a dominant key is then 1, whatever the size of the scores. One fused multiply-add in
// log2 units would save two operations, but at scores of 5e4 leave an error of 1 %.
template <bool kScaleLater>
ATTENTION_DEVICE f32 probability(f32 score, f32 lse, f32 scale) {
  if constexpr (kScaleLater) score = tile::multiply(score, scale);
  return tile::exp2_approx((score - lse) * tile::kLog2E);
}

// dS = P (dP - delta). Where P is 0 the product is 0 whatever dP is: it comes from values that this
// row may not see.
ATTENTION_DEVICE f32 score_gradient(f32 p, f32 dp, f32 delta) {
  return p == 0.f ? 0.f : p * (dp - delta);
}

// d(capped score) / d(scaled score) at a raw product.
ATTENTION_DEVICE f32 cap_slope(f32 raw, f32 scale, f32 cap) {
  const f32 t = capped_tanh(raw * scale, cap);
  return 1.f - t * t;
}

}  // namespace attention
