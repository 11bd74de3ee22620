// SPDX-License-Identifier: Apache-2.0
// One tile of the backward pass: P and dS recomputed from lse, for a tile of rows against a packed
// block of keys.
//   dP = V dO^T,  dS = P * (dP - delta + dlse),  delta = sum_d dO * O
// dlse stays apart from delta: where a row sees one key, dP - delta is exactly 0 and dS exactly
// dlse.
#pragma once

#include "kernels/cpu/kernels.h"
#include "kernels/cpu/pack.h"
#include "kernels/cpu/score.h"

namespace attention::cpu::ATTENTION_CPU_ISA {

struct GradientState {
  const BackwardArgs* args;
  const Problem* problem;
  RowBlock block;
  float *k, *v;       // packed block of keys
  float *q_t, *do_t;  // [tile][d][lanes]
  float *q, *d_out;   // [row][kPitch]
  float *s, *ds;      // [tile][key][lanes]: P and dS
  float* cap;         // [key][lanes] of the current tile
  u8* allow;
  int block_k, d, dv;
  int stride_q, stride_o;  // floats of one row in lanes
};

inline GradientState make_gradient_state(const BackwardArgs& args, const Plan& plan,
                                         char* scratch) {
  const Scratch& at = plan.scratch;
  const auto floats = [&](i64 offset) { return reinterpret_cast<float*>(scratch + offset); };
  GradientState state;
  state.args = &args;
  state.problem = &args.problem;
  state.k = floats(at.k);
  state.v = floats(at.v);
  state.q_t = floats(at.q_t);
  state.do_t = floats(at.do_t);
  state.q = floats(at.q);
  state.d_out = floats(at.d_out);
  state.s = floats(at.s);
  state.ds = floats(at.ds);
  state.cap = args.problem.soft_cap != 0.f ? floats(at.cap) : nullptr;
  state.allow = reinterpret_cast<u8*>(scratch + at.allow);
  state.block_k = plan.block_k;
  state.d = static_cast<int>(args.problem.d);
  state.dv = static_cast<int>(args.problem.dv);
  state.stride_q = round_up(state.d, 16);
  state.stride_o = round_up(state.dv, 16);
  return state;
}

// delta[lane] = sum_d dO * O. The sum runs in the order of V dO^T, so that a row that sees a
// single key, whose O is that V, gets exactly dP - delta = 0.
template <int kVectors>
inline void compute_delta(GradientState& state, int row) {
  constexpr int kLd = kVectors * kLanes;
  RowBlock& block = state.block;
  const BackwardArgs& args = *state.args;
  const float* do_t = state.do_t + i64{row} * state.stride_o;
  with_type(state.problem->dtype, [&](auto tag) {
    using Memory = typename decltype(tag)::Memory;
    const Memory* out = static_cast<const Memory*>(args.out);
    for (int n = 0; n < kVectors; ++n) {
      const int first = row + n * kLanes;
      F sum = zero();
      for (int c = 0; c < state.dv; c += kLanes) {
        F tile[kLanes];
        for (int lane = 0; lane < kLanes; ++lane) {
          const int r = first + lane;
          tile[lane] = r < block.rows
                           ? load_upto(tag, out + block.index_of(r) * state.dv + c, state.dv - c)
                           : zero();
        }
        transpose(tile);
        for (int i = 0; i < min_of(kLanes, state.dv - c); ++i)
          sum = fma(tile[i], load(do_t + (c + i) * kLd + n * kLanes), sum);
      }
      store(block.delta + first, sum);
    }
  });
  for (int r = row; r < row + kLd; ++r) {
    const bool used = block.lse[r] != __builtin_inff();
    if (!used) block.delta[r] = 0.f;
    block.dlse[r] = used && args.dlse ? args.dlse[block.index_of(r)] : 0.f;
  }
}

// Packs Q and dO of the block, as rows and with rows in lanes, and computes lse and delta.
inline void load_rows(GradientState& state) {
  RowBlock& block = state.block;
  const Problem& p = *state.problem;
  const BackwardArgs& args = *state.args;
  const int width_q = round_up(state.d, kLanes), width_o = round_up(state.dv, kLanes);
  with_type(p.dtype, [&](auto tag) {
    using Memory = typename decltype(tag)::Memory;
    const Memory* q = static_cast<const Memory*>(p.q) + p.q_batch(block.b) * p.lq * p.hq * p.d;
    const Memory* d_out = static_cast<const Memory*>(args.dout);
    for (int r = 0; r < block.padded; ++r) {
      float* q_row = state.q + r * kPitch;
      float* do_row = state.d_out + r * kPitch;
      const i64 index = r < block.rows ? block.index_of(r) : 0;
      const bool used = r < block.rows && block.query_of(r) < block.mask.q_len &&
                        args.lse[index] != -__builtin_inff();
      // +inf makes every weight of the row 0. A row that saw nothing contributes nothing, whatever
      // its q, dout and dlse hold.
      block.lse[r] = used ? args.lse[index] : __builtin_inff();
      if (!used) {
        zero_rows(q_row, 0, 1, width_q);
        zero_rows(do_row, 0, 1, width_o);
        continue;
      }
      const i64 row_in_batch = i64{block.query_of(r)} * p.hq + block.head_of(r);
      for (int c = 0; c < state.d; c += kLanes)
        store(q_row + c, load_upto(tag, q + row_in_batch * p.d + c, state.d - c));
      for (int c = 0; c < state.dv; c += kLanes)
        store(do_row + c, load_upto(tag, d_out + index * p.dv + c, state.dv - c));
    }
  });
  for_each_row_tile(block.tiled, [&](int row, auto vectors) {
    rows_to_lanes<vectors.value>(state.q + row * kPitch, state.d,
                                 state.q_t + i64{row} * state.stride_q);
    rows_to_lanes<vectors.value>(state.d_out + row * kPitch, state.dv,
                                 state.do_t + i64{row} * state.stride_o);
    compute_delta<vectors.value>(state, row);
  });
}

// Fills P (after dropout) and dS with respect to the biased scores for one tile of rows against
// keys [key0, key0 + keys) of the packed block. Returns the computed interval of the block, empty
// where the tile sees none of it.
template <int kVectors>
inline Range gradient_tile(GradientState& state, int row, i32 key0, int keys) {
  constexpr int kLd = kVectors * kLanes;
  const RowBlock& block = state.block;
  const Problem& p = *state.problem;
  const TileRange range = range_of_rows(block, row, kLd);
  const i32 low = max_of(range.some.begin, key0), high = min_of(range.some.end, key0 + keys);
  if (low >= high) return {0, 0};
  if (block_mask_hides(block, row, min_of(kLd, block.rows - row), {low, high})) return {0, 0};
  const int first = (low - key0) / 8 * 8, last = round_up(high - key0, kRowStep);

  float* s = state.s + i64{row} * state.block_k;
  float* ds = state.ds + i64{row} * state.block_k;
  score_product<kVectors>(state.k + first * kPitch, last - first, state.d,
                          state.q_t + i64{row} * state.stride_q, block.scale, s + first * kLd);
  const ScoreTile tile{&block, row, key0, key0 + keys, first, last, s, state.allow, state.block_k};
  apply_options<kVectors>(tile, range.all, state.cap);
  score_product<kVectors>(state.v + first * kPitch, last - first, state.dv,
                          state.do_t + i64{row} * state.stride_o, 1.f, ds + first * kLd);

  F lse[kVectors], delta[kVectors], dlse[kVectors];
  for (int n = 0; n < kVectors; ++n) {
    lse[n] = load(block.lse + row + n * kLanes);
    delta[n] = load(block.delta + row + n * kLanes);
    dlse[n] = load(block.dlse + row + n * kLanes);
  }
  // A weight of 0 has no gradient, even where a key that the row may not see made dP infinite.
  const auto gradient = [&](F weight, F dp, int n) {
    return select(equal(weight, zero()), zero(), weight * (dp - delta[n] + dlse[n]));
  };
  if (p.dropout.threshold != 0) {
    const F keep_scale = set(p.dropout.keep_scale);
    for_each_dropout<kVectors>(tile, [&](int offset, int n, M keep) {
      const F weight = exp(load(s + offset) - lse[n]);
      const F dp = select(keep, load(ds + offset) * keep_scale, zero());
      store(ds + offset, gradient(weight, dp, n));
      store(s + offset, select(keep, weight * keep_scale, zero()));
    });
  } else {
    for (int j = first; j < last; ++j)
      for (int n = 0; n < kVectors; ++n) {
        const int offset = j * kLd + n * kLanes;
        const F weight = exp(load(s + offset) - lse[n]);
        store(s + offset, weight);
        store(ds + offset, gradient(weight, load(ds + offset), n));
      }
  }
  return {first, last};
}

// dS with respect to the scaled scores, and the slopes' sums on the way.
template <int kVectors>
inline void chain_options(GradientState& state, int row, i32 key0, Range range) {
  constexpr int kLd = kVectors * kLanes;
  RowBlock& block = state.block;
  float* ds = state.ds + i64{row} * state.block_k;
  if (state.args->dslopes_rows) {
    for (int n = 0; n < kVectors; ++n) {
      const I position = load(block.position + row + n * kLanes);
      F sum = load(block.dslope + row + n * kLanes);
      for (int j = range.begin; j < range.end; ++j)
        sum = fma(-absolute(to_float(position - set(key0 + j))), load(ds + j * kLd + n * kLanes),
                  sum);
      store(block.dslope + row + n * kLanes, sum);
    }
  }
  if (state.cap) {
    for (int at = range.begin * kLd; at < range.end * kLd; at += kLanes) {
      const F t = load(state.cap + at);
      store(ds + at, load(ds + at) * fma(-t, t, set(1.f)));
    }
  }
}

}  // namespace attention::cpu::ATTENTION_CPU_ISA
