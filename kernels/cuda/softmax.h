// SPDX-License-Identifier: Apache-2.0
// Online softmax of one warp's rows (Milakov and Gimelshein, "Online normalizer calculation for
// softmax", 2018): running maximum and sum per row, output rescaled when the maximum moves.
#pragma once

#include "kernels/cuda/tile/tile.h"

namespace attention {

// 2^((x - base) * unit), with `unit` > 0: log2(e) for scores in natural units, scale * log2(e) for
// raw products. Subtracts first. That costs an operation more an element than x * unit - base *
// unit in one fused multiply-add, but a fused product does not cancel the rounded one: at scores of
// thousands the weight of the maximum would be 1 + 2^-10, which 16-bit weights then round, where 1
// needs no rounding; and finfo.min * log2(e) is -inf.
ATTENTION_DEVICE f32 exponential(f32 x, f32 base, f32 unit) {
  return tile::exp2_approx((x - base) * unit);
}

// The maximum to subtract: a row that has seen no allowed key yet has maximum -inf, and -inf - -inf
// would be NaN.
ATTENTION_DEVICE f32 finite_base(f32 maximum) {
  return maximum == -tile::infinity() ? 0.f : maximum;
}

template <int kRowSlots>
struct OnlineSoftmax {
  f32 maximum[kRowSlots];
  f32 sum[kRowSlots];  // of this thread's columns; the row's sum after finish()
  f32 unit;

  ATTENTION_DEVICE explicit OnlineSoftmax(f32 unit_per_score) : unit(unit_per_score) {
    ATTENTION_UNROLL
    for (int r = 0; r < kRowSlots; ++r) {
      // Not a finite floor: a row of large negative scores must not lose to it.
      maximum[r] = -tile::infinity();
      sum[r] = 0.f;
    }
  }

  // Turns scores into probabilities relative to the new maximum and rescales `out`.
  template <int M, int K, int N>
  ATTENTION_DEVICE void update(tile::Accumulator<M, K>& s, tile::Accumulator<M, N>& out) {
    using Scores = tile::Accumulator<M, K>;
    using Out = tile::Accumulator<M, N>;
    f32 rescale[kRowSlots];
    bool moved = false;
    ATTENTION_UNROLL
    for (int r = 0; r < kRowSlots; ++r) {
      f32 highest = s.at(r, 0);
      ATTENTION_UNROLL
      for (int c = 1; c < Scores::kColSlots; ++c) highest = tile::max_f32(highest, s.at(r, c));
      highest = tile::max_f32(maximum[r], tile::quad_max(highest));
      const f32 base = finite_base(highest);
      rescale[r] = exponential(maximum[r], base, unit);  // exactly 1 where the maximum stays
      moved = moved || highest != maximum[r];
      maximum[r] = highest;
      f32 total = 0.f;
      ATTENTION_UNROLL
      for (int c = 0; c < Scores::kColSlots; ++c) {
        s.at(r, c) = exponential(s.at(r, c), base, unit);
        total += s.at(r, c);
      }
      sum[r] = sum[r] * rescale[r] + total;
    }
    // Where no maximum of the warp moved every factor is 1: skipping changes no bit of the result.
    if (!tile::any_in_warp(moved)) return;
    ATTENTION_UNROLL
    for (int r = 0; r < kRowSlots; ++r) {
      ATTENTION_UNROLL
      for (int c = 0; c < Out::kColSlots; ++c) out.at(r, c) *= rescale[r];
    }
  }

  ATTENTION_DEVICE void finish() {
    ATTENTION_UNROLL
    for (int r = 0; r < kRowSlots; ++r) sum[r] = tile::quad_sum(sum[r]);
  }
};

// Natural logarithm of the softmax denominator; -inf for a row without an allowed key.
// `score_scale`: what turns the maximum into natural units. A row of one weight gets its score,
// rounded as the backward pass rounds it (backward_terms.h).
ATTENTION_DEVICE f32 logsumexp(f32 maximum, f32 sum, f32 score_scale) {
  if (sum == 0.f) return -tile::infinity();
  return tile::multiply(maximum, score_scale) + tile::log2_approx(sum) * tile::kLn2;
}

}  // namespace attention
