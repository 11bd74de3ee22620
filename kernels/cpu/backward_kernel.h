// SPDX-License-Identifier: Apache-2.0
// Backward attention: blocks of rows outside, blocks of keys inside, five products a tile. dQ of a
// block is complete after the inner loop; dK and dV of the whole key axis stay in float32
// accumulators that belong to the task, so that no two tasks add to the same number.
#pragma once

#include "kernels/cpu/forward_state.h"
#include "kernels/cpu/gradient_tile.h"

namespace attention::cpu::ATTENTION_CPU_ISA {

// Where P or dS of a block lies for the sums over rows: the tile of [key][lanes / kDepth] elements
// that begins at `base` + row * block_k, or in the upper half of the room that floats would take
// there.
template <typename Format>
struct RowWeights {
  const typename Format::Element* base;
  bool upper_half;

  template <int kLd>
  ATTENTION_INLINE const typename Format::Element* tile(int row, int block_k) const {
    return base + i64{row} * block_k + (upper_half ? kLd / 2 * block_k : 0);
  }
};

// acc[key][c] += sum_row weight[tile][key][lane] * rows[row][c] for all row tiles of the block:
// dV from P and dO, dK from dS and Q. `width`: padded head dimension, a multiple of 16.
template <typename Format>
inline void accumulate_keys(const GradientState<Format>& state, const RowWeights<Format>& weights,
                            const typename Format::Element* rows, int padded_keys, int width,
                            float* acc_rows) {
  constexpr int kDepth = Format::kDepth;
  const RowBlock& block = state.block;
  const auto strip = [&](int column, auto vectors) {
    constexpr int kVectors = decltype(vectors)::value;
    for_each_tile(padded_keys, [&](int m, auto tile_rows) {
      constexpr int kRows = decltype(tile_rows)::value;
      F acc[kRows][kVectors] = {};
      bool any = false;
      for_each_row_tile(block.rows, [&](int row, auto row_vectors) {
        constexpr int kLd = decltype(row_vectors)::value * kLanes;
        if (m + kRows <= block.tile_first[row] || m >= block.tile_last[row]) return;
        any = true;
        accumulate<Format, kRows, kVectors, kLd / kDepth, 1, kPitch>(
            weights.template tile<kLd>(row, state.block_k) + m * kLd / kDepth,
            rows + row / kDepth * kPitch + column, kLd / kDepth, acc);
      });
      if (!any) return;
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
        for (int n = 0; n < kVectors; ++n) {
          float* c = acc_rows + i64{m + i} * width + column + n * kLanes;
          store(c, load(c) + acc[i][n]);
        }
    });
  };
  int column = 0;
  for (; column + kRowTile <= width; column += kRowTile) strip(column, Constant<2>{});
  if (column < width) strip(column, Constant<1>{});
}

// The same on matrix tiles; `rows` is the right side of a panel (pack_by_row).
template <typename Format>
inline void accumulate_key_tiles(const GradientState<Format>& state,
                                 const RowWeights<Format>& weights, const u32* rows,
                                 int padded_keys, int width, float* acc_rows) {
  const RowBlock& block = state.block;
  for (int m = 0; m < padded_keys; m += kTileBlock)
    for_each_tile_block(width, [&](int column, auto column_tiles) {
      using Block = TileBlock<2, decltype(column_tiles)::value>;
      float* sums = acc_rows + i64{m} * width + column;
      Block::load(sums, width);
      for (int row = 0; row < block.tiled; row += kRowTile) {
        if (m + kTileBlock <= block.tile_first[row] || m >= block.tile_last[row]) continue;
        Block::multiply(weights.template tile<kRowTile>(row, state.block_k) + m * kTileSide,
                        kTileSide, kTileElements,
                        rows + row / kRowTile * tile_step(width) + column * kTileSide, kTileSide,
                        kTileElements);
      }
      Block::store(sums, width);
    });
}

// Register tiles of accumulate_keys may reach over the ends of a row tile's interval: what lies
// there must count as 0.
template <typename Format, int kVectors>
inline void clear_around(float* tile, Range range, int padded_keys) {
  if constexpr (kTileRows != kRowStep) {
    static_assert(Format::kDepth == 1, "the ends of an interval are floats");
    constexpr int kLd = kVectors * kLanes;
    const int before = max_of(range.begin - (kTileRows - 1), 0);
    const int after = min_of(range.end + kTileRows - 1, padded_keys);
    memset(tile + before * kLd, 0,
           sizeof(float) * static_cast<size_t>((range.begin - before) * kLd));
    if (after > range.end)
      memset(tile + range.end * kLd, 0,
             sizeof(float) * static_cast<size_t>((after - range.end) * kLd));
  }
}

// dK and dV rows [first, last) of one (batch, key/value head): the sum over splits, in order.
inline void write_key_gradients(const BackwardArgs& args, const float* partials, i64 stride,
                                int splits, i64 b, i64 kv_head, i32 first, i32 last) {
  const Problem& p = args.problem;
  const float scale = p.scale_array.data ? *p.scale_array.row(b) : p.scale;
  const int d = static_cast<int>(p.d), dv = static_cast<int>(p.dv);
  const int width_k = round_up(d, 16), width_v = round_up(dv, 16);
  const float* partial_v = partials + padded_keys(p.lkv) * width_k;
  with_type(p.dtype, [&](auto tag) {
    using Memory = typename decltype(tag)::Memory;
    const auto write = [&](const float* source, int width, int size, float factor, void* result) {
      for (i64 j = first; j < last; ++j) {
        Memory* row = static_cast<Memory*>(result) + ((b * p.lkv + j) * p.hkv + kv_head) * size;
        for (int c = 0; c < size; c += kLanes) {
          F sum = zero();
          for (int split = 0; split < splits; ++split)
            sum = sum + load(source + split * stride + j * width + c);
          store_upto(tag, row + c, sum * set(factor), size - c);
        }
      }
    };
    write(partials, width_k, d, scale, args.dk);
    write(partial_v, width_v, dv, 1.f, args.dv);
  });
}

inline void reduce_splits(const BackwardArgs& args, const Plan& plan, const float* partials, i64 b,
                          i64 kv_head, i32 first, i32 last) {
  const i64 task = (b * args.problem.hkv + kv_head) * plan.num_splits;
  write_key_gradients(args, partials + task * plan.partial_stride, plan.partial_stride,
                      plan.num_splits, b, kv_head, first, last);
}

// dQ of the block, and the per-row results.
template <typename Format, int kVectors>
inline void finish_rows(const GradientState<Format>& state, const float* dq_t, int row) {
  constexpr int kLd = kVectors * kLanes;
  const RowBlock& block = state.block;
  const BackwardArgs& args = *state.args;
  F factor[kVectors];
  for (int n = 0; n < kVectors; ++n) factor[n] = set(block.scale);
  unpack_lanes<kVectors>(block, dq_t, factor, state.d, row, args.dq);
  const int rows = min_of(kLd, block.rows - row);
  if (args.dscale_rows)
    for (int r = 0; r < rows; ++r)
      args.dscale_rows[block.index_of(row + r)] = block.dscale[row + r];
  if (args.dslopes_rows)
    for (int r = 0; r < rows; ++r)
      args.dslopes_rows[block.index_of(row + r)] = block.dslope[row + r];
}

// Rounds P and dS of one tile, keys `range`, to the elements that sum over rows. Both go to the
// tile's part of s, which the floats of P filled before: P in place, into the lower half, dS into
// the upper one. The floats of dS stay.
template <typename Format, int kVectors>
inline void round_rows(float* s, float* ds, Range range, int block_k) {
  if constexpr (Format::kDepth == 2) {
    constexpr int kLd = kVectors * kLanes;
    const auto by_row = [](const float* tile, int j, u32* dst) {
      const float* x = tile + j * kLd;
      if constexpr (kVectors == 2) {
        store(dst + j * kLd / 2, Format::join(load(x), load(x + kLanes)));
      } else {
        store_half(reinterpret_cast<u16*>(dst + j * kLd / 2), narrow(BFloat16{}, load(x)));
      }
    };
    u32* pairs = reinterpret_cast<u32*>(s);
    for (int j = range.begin; j < range.end; ++j) by_row(s, j, pairs);
    for (int j = range.begin; j < range.end; ++j) by_row(ds, j, pairs + kLd / 2 * block_k);
  }
}

// Calls function(first key, count, padded count) for the blocks of keys that the rows may see.
template <typename Format, typename Function>
inline void for_each_key_block(const GradientState<Format>& state, const Plan& plan,
                               const Function& function) {
  const RowBlock& block = state.block;
  const Range keys = keys_of_rows(block.mask, {block.q0, block.q0 + block.queries});
  for (i32 key0 = keys.begin / plan.block_k * plan.block_k; key0 < keys.end; key0 += plan.block_k) {
    const i32 skipped = max_of(keys.begin - key0, 0);
    const i32 begin = key0 + skipped / Format::kFirstStep * Format::kFirstStep;
    const i32 count = min_of(key0 + plan.block_k, keys.end) - begin;
    if (block_mask_hides(block, 0, block.rows, {begin, begin + count})) continue;
    function(begin, count, round_up(count, Format::kFirstStep));
  }
}

// lse and delta of the rows from the scores and dP as the backward pass sums them up. A forward
// pass that streamed added in another order: of scores of thousands that alone moves exp(s - lse)
// by 1e-3, and out with it, so that P (dP - delta) would no longer cancel. No call that streams has
// dropout, whose dP would be another.
template <typename Format>
inline void recompute_sums(GradientState<Format>& state, const Plan& plan) {
  const Problem& p = *state.problem;
  RowBlock& block = state.block;
  for (int r = 0; r < block.padded; ++r) {
    block.maximum[r] = -__builtin_inff();
    block.sum[r] = 0.f;
    // Of rows that count for nothing lse is +inf.
    if (block.lse[r] != __builtin_inff()) block.delta[r] = 0.f;
  }
  for_each_key_block(state, plan, [&](i32 begin, i32 count, i32 padded) {
    pack_keys(block, p.k, p.k_batch, state.d, begin, count, padded, state.k);
    pack_keys(block, p.v, p.v_batch, state.dv, begin, count, padded, state.v);
    for_each_row_tile(block.tiled, [&](int row, auto vectors) {
      constexpr int kVectors = decltype(vectors)::value;
      constexpr int kLd = kVectors * kLanes;
      const ScoreTile tile = gradient_scores<Format, kVectors>(state, row, begin, count);
      if (tile.first >= tile.last) return;
      float* dp = state.ds + i64{row} * state.block_k;
      gradient_of_weights<Format, kVectors>(state, tile, dp);
      F decay[kVectors], delta[kVectors];
      online_softmax<kVectors>(tile, decay);
      for (int n = 0; n < kVectors; ++n) delta[n] = load(block.delta + row + n * kLanes) * decay[n];
      for (int at = tile.first * kLd; at < tile.last * kLd; at += kLanes) {
        // A weight of 0 counts for nothing, whatever a key that the row may not see made of dP.
        const F weight = load(tile.s + at);
        F& sum = delta[at / kLanes % kVectors];
        sum = select(equal(weight, zero()), sum, fma(weight, load(dp + at), sum));
      }
      for (int n = 0; n < kVectors; ++n) store(block.delta + row + n * kLanes, delta[n]);
    });
  });
  for (int r = 0; r < block.padded; r += kLanes) {
    const F lse = load(block.lse + r), delta = load(block.delta + r), sum = load(block.sum + r);
    const M used = both(less(lse, set(__builtin_inff())), less(zero(), sum));
    store(block.lse + r, select(used, load(block.maximum + r) + log(sum), lse));
    store(block.delta + r, select(used, delta / sum, delta));
  }
}

template <typename Format>
inline void backward_blocks(const BackwardTask& task) {
  using Element = typename Format::Element;
  using Weights = RowWeights<Format>;
  const BackwardArgs& args = *task.args;
  const Problem& p = args.problem;
  const Plan& plan = *task.plan;
  GradientState<Format> state = make_gradient_state<Format>(args, plan, task.scratch);
  RowBlock& block = state.block;
  float* dq_t_all = reinterpret_cast<float*>(task.scratch + plan.scratch.o_t);
  const int width_k = round_up(state.d, 16), width_v = round_up(state.dv, 16);
  [[maybe_unused]] const int dims = round_up(state.d, kRowStep);
  const i64 padded_lkv = padded_keys(p.lkv);
  memset(task.dk, 0, sizeof(float) * static_cast<size_t>(padded_lkv * width_k));
  memset(task.dv, 0, sizeof(float) * static_cast<size_t>(padded_lkv * width_v));

  const i32 group = static_cast<i32>(p.group());
  for (i32 q_block = task.split; q_block < plan.q_blocks; q_block += plan.num_splits) {
    const i32 q0 = q_block * plan.block_q;
    const i32 queries = min_of(plan.block_q, static_cast<i32>(p.lq) - q0);
    view_rows(block, p, task.b, task.kv_head, static_cast<i32>(task.kv_head) * group, group, q0,
              queries, task.scratch + plan.scratch.rows, plan.padded_rows);
    fill_rows(block);
    // Sums over rows run in whole matrix tiles.
    if constexpr (Format::kTiled) block.tiled = round_up(block.rows, kRowTile);
    load_rows(state);
    for (int r = 0; r < block.padded; ++r) block.dslope[r] = block.dscale[r] = 0.f;
    memset(dq_t_all, 0,
           sizeof(float) * static_cast<size_t>(block.padded) * static_cast<size_t>(width_k));

    if (plan.own_sums) recompute_sums(state, plan);
    for_each_key_block(state, plan, [&](i32 begin, i32 count, i32 padded) {
      pack_keys(block, p.k, p.k_batch, state.d, begin, count, padded, state.k);
      pack_by_row<Side::kLeft>(state.k, padded, state.d);
      pack_keys(block, p.v, p.v_batch, state.dv, begin, count, padded, state.v);
      for_each_row_tile(block.tiled, [&](int row, auto vectors) {
        constexpr int kVectors = decltype(vectors)::value;
        const Range range = gradient_tile<Format, kVectors>(state, row, begin, count);
        block.tile_first[row] = range.begin;
        block.tile_last[row] = range.end;
        if (range.empty()) return;
        chain_options<Format, kVectors>(state, row, begin, range);
        float* s = state.s + i64{row} * state.block_k;
        float* ds = state.ds + i64{row} * state.block_k;
        round_rows<Format, kVectors>(s, ds, range, state.block_k);
        const Element* ds_by_key = weights_by_key<Format, kVectors>(ds, range.begin, range.end);
        const Element* k = state.k.rows_from(range.begin, state.d);
        float* dq_t = dq_t_all + i64{row} * width_k;
        if constexpr (Format::kTiled) {
          value_tiles<kVectors>(k, tile_step(state.d), range.end - range.begin, width_k, ds_by_key,
                                dq_t);
        } else {
          F keep[kVectors];
          for (int n = 0; n < kVectors; ++n) keep[n] = set(1.f);
          value_product<Format, kVectors>(k, range.end - range.begin, dims, ds_by_key, keep, dq_t);
        }
        clear_around<Format, kVectors>(s, range, padded);
        clear_around<Format, kVectors>(ds, range, padded);
      });
      const Weights p_by_row{reinterpret_cast<Element*>(state.s), false};
      const Weights ds_by_row = Format::kDepth == 1
                                    ? Weights{reinterpret_cast<Element*>(state.ds), false}
                                    : Weights{reinterpret_cast<Element*>(state.s), true};
      const auto accumulate_rows = [&](const Weights& weights, const Element* rows, int width,
                                       float* acc_rows) {
        if constexpr (Format::kTiled) {
          accumulate_key_tiles(state, weights, rows, padded, width, acc_rows + i64{begin} * width);
        } else {
          accumulate_keys(state, weights, rows, padded, width, acc_rows + i64{begin} * width);
        }
      };
      accumulate_rows(p_by_row, state.d_out.by_row, width_v, task.dv);
      accumulate_rows(ds_by_row, state.q.by_row, width_k, task.dk);
    });
    for_each_row_tile(block.tiled, [&](int row, auto vectors) {
      finish_rows<Format, vectors.value>(state, dq_t_all + i64{row} * width_k, row);
    });
  }
  if (plan.num_splits == 1)
    write_key_gradients(args, task.dk, 0, 1, task.b, task.kv_head, 0, static_cast<i32>(p.lkv));
}

inline void backward(const BackwardTask& task) {
  with_format(task.args->problem.dtype,
              [&](auto format) { backward_blocks<decltype(format)>(task); });
}

}  // namespace attention::cpu::ATTENTION_CPU_ISA
