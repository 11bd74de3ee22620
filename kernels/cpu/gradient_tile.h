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

template <typename Format>
struct GradientState {
  using Element = typename Format::Element;
  const BackwardArgs* args;
  const Problem* problem;
  RowBlock block;
  Panel<Format> k, v;      // packed block of keys
  Panel<Format> q, d_out;  // packed block of rows
  Element *q_t, *do_t;     // [tile][d / kDepth][lanes]
  float *s, *ds;           // [tile][key][lanes]: P and dS
  float* cap;              // [key][lanes] of the current tile
  u8* allow;
  int block_k, d, dv;
  int stride_q, stride_o;  // elements of one row in lanes
};

template <typename Format>
inline GradientState<Format> make_gradient_state(const BackwardArgs& args, const Plan& plan,
                                                 char* scratch) {
  const Scratch& at = plan.scratch;
  const auto floats = [&](i64 offset) { return reinterpret_cast<float*>(scratch + offset); };
  using Element = typename Format::Element;
  GradientState<Format> state;
  state.args = &args;
  state.problem = &args.problem;
  state.block_k = round_up(plan.block_k, kKeyPad);
  state.k = {scratch + at.k, state.block_k};
  state.v = {scratch + at.v, state.block_k};
  state.q = {scratch + at.q, plan.padded_rows};
  state.d_out = {scratch + at.d_out, plan.padded_rows};
  state.q_t = reinterpret_cast<Element*>(scratch + at.q_t);
  state.do_t = reinterpret_cast<Element*>(scratch + at.do_t);
  state.s = floats(at.s);
  state.ds = floats(at.ds);
  state.cap = args.problem.soft_cap != 0.f ? floats(at.cap) : nullptr;
  state.allow = reinterpret_cast<u8*>(scratch + at.allow);
  state.d = static_cast<int>(args.problem.d);
  state.dv = static_cast<int>(args.problem.dv);
  state.stride_q = lane_stride<Format>(state.d);
  state.stride_o = lane_stride<Format>(state.dv);
  return state;
}

// delta[lane] = sum_d dO * O of kLanes rows. The sum runs in the order of V dO^T, so that a row
// that sees a single key, whose O is that V, gets exactly dP - delta = 0.
template <typename Format, int kLd>
inline void sum_delta(GradientState<Format>& state, int first,
                      const typename Format::Element* do_t) {
  constexpr int kStep = kLanes * Format::kDepth;
  const RowBlock& block = state.block;
  Format::with_operand_type(state.problem->dtype, [&](auto tag) {
    using Memory = typename decltype(tag)::Memory;
    const Memory* out = static_cast<const Memory*>(state.args->out);
    F sum = zero();
    for (int c = 0; c < state.dv; c += kStep) {
      F tile[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) {
        const int r = first + lane;
        tile[lane] = r < block.rows
                         ? Format::pack(tag, out + block.index_of(r) * state.dv + c, state.dv - c)
                         : zero();
      }
      transpose(tile);
      const int at = c / Format::kDepth;
      for (int i = 0; i < min_of(kLanes, ceil_div(state.dv, Format::kDepth) - at); ++i)
        sum = Format::multiply_add(tile[i], load(do_t + (at + i) * kLd), sum);
    }
    store(block.delta + first, sum);
  });
}

// The same on matrix tiles: the diagonal of the product of all rows with each other.
template <typename Format, int kLd>
inline void sum_delta_tiles(GradientState<Format>& state, int first, const u32* do_t) {
  constexpr int kRowPitch = Panel<Format>::kRowPitch;
  using Block = TileBlock<1, 1>;
  const RowBlock& block = state.block;
  alignas(64) u32 rows[kTileSide * kRowPitch];
  alignas(64) float products[kTileElements];
  const u16* out = static_cast<const u16*>(state.args->out);
  for (int lane = 0; lane < kTileSide; ++lane) {
    const int r = first + lane;
    u32* row = rows + lane * kRowPitch;
    if (r < block.rows) {
      pack_rows<Format>(BFloat16{}, out + block.index_of(r) * state.dv, 0, 1, state.dv, row);
    } else {
      zero_rows<Format>(row, 0, 1, state.dv);
    }
  }
  Block::zero();
  for (int pair = 0; 2 * pair < state.dv; pair += kTileSide)
    Block::multiply(rows + pair, kRowPitch, 0, do_t + pair * kLd, kLd, 0);
  Block::store(products, kTileSide);
  for (int lane = 0; lane < kTileSide; ++lane)
    block.delta[first + lane] = products[lane * (kTileSide + 1)];
}

template <typename Format, int kVectors>
inline void compute_delta(GradientState<Format>& state, int row) {
  constexpr int kLd = kVectors * kLanes;
  RowBlock& block = state.block;
  const BackwardArgs& args = *state.args;
  for (int n = 0; n < kVectors; ++n) {
    const auto* do_t = state.do_t + i64{row} * state.stride_o + n * kLanes;
    if constexpr (Format::kTiled) {
      sum_delta_tiles<Format, kLd>(state, row + n * kLanes, do_t);
    } else {
      sum_delta<Format, kLd>(state, row + n * kLanes, do_t);
    }
  }
  for (int r = row; r < row + kLd; ++r) {
    const bool used = block.lse[r] != __builtin_inff();
    if (!used) block.delta[r] = 0.f;
    block.dlse[r] = used && args.dlse ? args.dlse[block.index_of(r)] : 0.f;
  }
}

// Packs Q and dO of the block, as rows and with rows in lanes, and computes lse and delta.
template <typename Format>
inline void load_rows(GradientState<Format>& state) {
  using Element = typename Format::Element;
  RowBlock& block = state.block;
  const Problem& p = *state.problem;
  const BackwardArgs& args = *state.args;
  Format::with_operand_type(p.dtype, [&](auto tag) {
    using Memory = typename decltype(tag)::Memory;
    const Memory* q = static_cast<const Memory*>(p.q) + p.q_batch(block.b) * p.lq * p.hq * p.d;
    const Memory* d_out = static_cast<const Memory*>(args.dout);
    for (int r = 0; r < block.padded; ++r) {
      if (const int ahead = r + kRowsAhead; ahead < block.rows) {
        const i64 index = block.index_of(ahead);
        prefetch_row(q + (i64{block.query[ahead]} * p.hq + block.head[ahead]) * p.d, state.d);
        prefetch_row(d_out + index * p.dv, state.dv);
        prefetch_row(static_cast<const Memory*>(args.out) + index * p.dv, state.dv);
      }
      Element* q_row = state.q.by_d + r * Panel<Format>::kRowPitch;
      Element* do_row = state.d_out.by_d + r * Panel<Format>::kRowPitch;
      const i64 index = r < block.rows ? block.index_of(r) : 0;
      const bool used = r < block.rows && block.query[r] < block.mask.q_len &&
                        args.lse[index] != -__builtin_inff();
      // +inf makes every weight of the row 0. A row that saw nothing contributes nothing, whatever
      // its q, dout and dlse hold.
      block.lse[r] = used ? args.lse[index] : __builtin_inff();
      if (!used) {
        zero_rows<Format>(q_row, 0, 1, state.d);
        zero_rows<Format>(do_row, 0, 1, state.dv);
        continue;
      }
      const i64 row_in_batch = i64{block.query[r]} * p.hq + block.head[r];
      pack_rows<Format>(tag, q + row_in_batch * p.d, 0, 1, state.d, q_row);
      pack_rows<Format>(tag, d_out + index * p.dv, 0, 1, state.dv, do_row);
    }
  });
  pack_by_row<Side::kRight>(state.q, block.padded, state.d);
  pack_by_row<Side::kRight>(state.d_out, block.padded, state.dv);
  for_each_row_tile(block.tiled, [&](int row, auto vectors) {
    const int at = row * Panel<Format>::kRowPitch;
    rows_to_lanes<Format, vectors.value>(state.q.by_d + at, state.d,
                                         state.q_t + i64{row} * state.stride_q);
    rows_to_lanes<Format, vectors.value>(state.d_out.by_d + at, state.dv,
                                         state.do_t + i64{row} * state.stride_o);
    compute_delta<Format, vectors.value>(state, row);
  });
}

// The scores of one tile of rows against keys [key0, key0 + keys) of the packed block: the tile's
// interval [first, last) of the block, empty where the rows see none of it.
template <typename Format, int kVectors>
inline ScoreTile gradient_scores(GradientState<Format>& state, int row, i32 key0, int keys) {
  constexpr int kLd = kVectors * kLanes;
  const RowBlock& block = state.block;
  float* s = state.s + i64{row} * state.block_k;
  ScoreTile tile{&block, row, key0, key0 + keys, 0, 0, s, state.allow, state.block_k};
  Range all;
  if (!find_keys<Format, kVectors>(&tile, &all)) return tile;
  score_product<Format, kVectors>(
      state.k.by_d + tile.first * Panel<Format>::kRowPitch, tile.last - tile.first, state.d,
      state.q_t + i64{row} * state.stride_q, block.scale, s + tile.first * kLd);
  apply_options<kVectors>(tile, all, state.cap);
  if constexpr (Format::kTiled) hide_padding<kVectors>(tile);
  return tile;
}

// dP of the tile, before dropout.
template <typename Format, int kVectors>
inline void gradient_of_weights(const GradientState<Format>& state, const ScoreTile& tile,
                                float* dp) {
  score_product<Format, kVectors>(
      state.v.by_d + tile.first * Panel<Format>::kRowPitch, tile.last - tile.first, state.dv,
      state.do_t + i64{tile.row} * state.stride_o, 1.f, dp + tile.first * kVectors * kLanes);
}

// Fills P (after dropout) and dS with respect to the biased scores for one tile of rows against
// keys [key0, key0 + keys) of the packed block. Returns the computed interval of the block, empty
// where the tile sees none of it.
template <typename Format, int kVectors>
inline Range gradient_tile(GradientState<Format>& state, int row, i32 key0, int keys) {
  constexpr int kLd = kVectors * kLanes;
  const RowBlock& block = state.block;
  const Problem& p = *state.problem;
  const ScoreTile tile = gradient_scores<Format, kVectors>(state, row, key0, keys);
  const int first = tile.first, last = tile.last;
  if (first >= last) return {0, 0};
  float* s = tile.s;
  float* ds = state.ds + i64{row} * state.block_k;
  gradient_of_weights<Format, kVectors>(state, tile, ds);

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
    // Four exponentials together; kRowStep is a multiple of their keys.
    for (int at = first * kLd; at < last * kLd; at += 4 * kLanes) {
      F weight[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) weight[i] = load(s + at + i * kLanes) - lse[i % kVectors];
      exp(weight);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const int offset = at + i * kLanes;
        store(s + offset, weight[i]);
        store(ds + offset, gradient(weight[i], load(ds + offset), i % kVectors));
      }
    }
  }
  return {first, last};
}

// dS with respect to the scaled scores, and the row sums that are gradients of the slopes and of
// the scale on the way.
template <typename Format, int kVectors>
inline void chain_options(GradientState<Format>& state, int row, i32 key0, Range range) {
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
  // The scores without options are not kept: the product is cheaper than a buffer for them. (q . dq
  // would be cheaper still, but the product that dq is made by may round dS to 16 bits.)
  if (state.args->dscale_rows) {
    F sum[kVectors];
    for (int n = 0; n < kVectors; ++n) sum[n] = load(block.dscale + row + n * kLanes);
    weighted_score_sum<Format, kVectors>(
        state.k.by_d + range.begin * Panel<Format>::kRowPitch, range.end - range.begin, state.d,
        state.q_t + i64{row} * state.stride_q, ds + range.begin * kLd, sum);
    for (int n = 0; n < kVectors; ++n) store(block.dscale + row + n * kLanes, sum[n]);
  }
}

}  // namespace attention::cpu::ATTENTION_CPU_ISA
