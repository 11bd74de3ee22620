// SPDX-License-Identifier: Apache-2.0
// Forward attention over tiles: for a block of rows, a loop over packed blocks of keys with online
// softmax (Milakov and Gimelshein, 2018; FlashAttention, Dao et al., 2022). Rows lie in SIMD lanes,
// so maxima and sums run down the tile and need no horizontal reduction.
#pragma once

#include "kernels/cpu/forward_state.h"
#include "kernels/cpu/forward_tiles.h"

namespace attention::cpu::ATTENTION_CPU_ISA {

// One tile of rows against keys [key0, key0 + keys) of the packed block. kAsks: asks for the rows
// of the next one meanwhile; it is not free, so only where packing takes a good part of the time.
template <typename Format, int kVectors, bool kAsks>
inline void forward_tile(ForwardState<Format>& state, int row, i32 key0, int keys) {
  constexpr int kLd = kVectors * kLanes;
  const RowBlock& block = state.block;
  ScoreTile tile{&block, row, key0, key0 + keys, 0, 0, state.s, state.allow, state.block_k};
  Range all;
  if (!find_keys<Format, kVectors>(&tile, &all)) return;
  const int first = tile.first, last = tile.last;

  const auto ask = [&] {
    if constexpr (kAsks) state.next.step();
  };
  const typename Format::Element* q_t = state.q_t + i64{row} * state.stride_q;
  float* o_t = state.o_t + i64{row} * state.stride_o;
  score_product<Format, kVectors>(state.k.by_d + first * Panel<Format>::kRowPitch, last - first,
                                  state.d, q_t, block.scale, state.s + first * kLd, ask);
  apply_options<kVectors>(tile, all, nullptr);
  F decay[kVectors];
  online_softmax<kVectors>(tile, decay);
  const typename Format::Element* weights = weights_by_key<Format, kVectors>(state.s, first, last);
  value_product<Format, kVectors>(state.v.rows_from(first, state.dv), last - first, state.dims_v,
                                  weights, decay, o_t, ask);
}

// Normalises a tile and writes it: to out and lse, or to this split's partial result.
template <typename Format, int kVectors>
inline void finish_tile(ForwardState<Format>& state, const ForwardTask& task, int row) {
  constexpr int kLd = kVectors * kLanes;
  const RowBlock& block = state.block;
  const float* o_t = state.o_t + i64{row} * state.stride_o;
  if (task.plan->num_splits == 1) {
    F inverse[kVectors];
    float lse[kLd];
    for (int n = 0; n < kVectors; ++n) {
      const F sum = load(block.sum + row + n * kLanes);
      const M empty = equal(sum, zero());
      inverse[n] = select(empty, zero(), set(1.f) / sum);
      store(lse + n * kLanes,
            select(empty, minus_infinity(),
                   fma(load(block.maximum + row + n * kLanes), set(state.unit), log(sum))));
    }
    unpack_lanes<kVectors>(block, o_t, inverse, state.dv, row, task.args->out);
    for (int r = row; r < min_of(row + kLd, block.rows); ++r)
      task.args->lse[block.index_of(r)] = lse[r - row];
    return;
  }
  // Partial layout: [rows][padded Dv] of unnormalised O, then maxima, then sums.
  const int width = state.stride_o;
  float* partial =
      task.partials + task.split * task.plan->partial_stride +
      ((task.b * state.problem->hkv + block.kv_head) * task.plan->q_blocks + task.q_block) *
          i64{block.padded} * (width + 2);
  for (int n = 0; n < kVectors; ++n)
    for (int c = 0; c < width; c += kLanes) {
      F x[kLanes];
      for (int i = 0; i < kLanes; ++i) x[i] = load(o_t + (c + i) * kLd + n * kLanes);
      transpose(x);
      for (int lane = 0; lane < kLanes; ++lane)
        store(partial + i64{row + n * kLanes + lane} * width + c, x[lane]);
    }
  for (int r = row; r < row + kLd; ++r) {
    partial[i64{block.padded} * width + r] = block.maximum[r] * state.unit;
    partial[i64{block.padded} * (width + 1) + r] = block.sum[r];
  }
}

template <typename Format>
inline void forward_blocks(const ForwardTask& task) {
  const Problem& p = task.args->problem;
  const Plan& plan = *task.plan;
  const Scratch& at = plan.scratch;
  ForwardState<Format> state;
  state.problem = &p;
  state.block_k = round_up(plan.block_k, kKeyPad);
  state.d = static_cast<int>(p.d);
  state.dv = static_cast<int>(p.dv);
  state.plain = Format::kTiled && p.soft_cap == 0.f && !p.bias.data && !p.alibi_slopes.data &&
                p.dropout.threshold == 0 && !p.scale_array.data && p.scale > 1e-30f &&
                p.scale < 1e30f;
  state.unit = state.plain ? p.scale : 1.f;
  state.dims_v = round_up(state.dv, kRowStep);
  state.stride_q = lane_stride<Format>(state.d);
  state.stride_o = round_up(state.dv, 16);
  state.k = {task.scratch + at.k, state.block_k};
  state.v = {task.scratch + at.v, state.block_k};
  state.s = reinterpret_cast<float*>(task.scratch + at.s);
  state.allow = reinterpret_cast<u8*>(task.scratch + at.allow);

  const i32 group = static_cast<i32>(p.group());
  const i32 q0 = task.q_block * plan.block_q;
  const i32 queries = min_of(plan.block_q, static_cast<i32>(p.lq) - q0);
  RowBlock& block = state.block;
  // Turns to one of the task's key/value heads, whose rows stay in scratch.
  const auto enter = [&](i32 n) {
    const i64 head = task.kv_head + n, rows = i64{n} * plan.padded_rows;
    view_rows(block, p, task.b, head, static_cast<i32>(head) * group, group, q0, queries,
              task.scratch + at.rows + rows * kRowArrays * i64{sizeof(float)}, plan.padded_rows);
    state.q_t =
        reinterpret_cast<typename Format::Element*>(task.scratch + at.q_t) + rows * state.stride_q;
    state.o_t = reinterpret_cast<float*>(task.scratch + at.o_t) + rows * state.stride_o;
  };
  for (i32 n = 0; n < plan.heads; ++n) {
    enter(n);
    fill_rows(block);
    for (int r = 0; r < block.padded; ++r) {
      block.maximum[r] = -__builtin_inff();
      block.sum[r] = 0.f;
    }
    for_each_row_tile(block.rows, [&](int row, auto vectors) {
      pack_lanes<Format, vectors.value>(block, p.q, p.q_batch(task.b), state.d, row,
                                        state.q_t + i64{row} * state.stride_q);
      memset(state.o_t + i64{row} * state.stride_o, 0,
             sizeof(float) * static_cast<size_t>(state.stride_o * vectors.value * kLanes));
    });
  }

  const auto key_rows = [&](const void* operand, BatchMap batch, int d, i32 key, i32 n) {
    const i64 row = (batch(task.b) * p.lkv + key) * p.hkv + task.kv_head + n;
    return NextRows::Operand{static_cast<const char*>(element(operand, p.dtype, row * d)),
                             p.hkv * d * size_of(p.dtype), d * size_of(p.dtype)};
  };
  // A split is a fixed interval of keys, whatever the rows of this block can see of it.
  Range keys = keys_of_rows(block.mask, {q0, q0 + queries});
  const i32 split_begin = task.split * plan.split_size;
  keys.begin = max_of(keys.begin, split_begin);
  keys.end = static_cast<i32>(min_of<i64>(keys.end, (i64{task.split} + 1) * plan.split_size));
  // Blocks start at multiples of the block size, and what is computed of them at a multiple of
  // kFirstStep from there, so that a row's result does not depend on where the other rows' windows
  // begin. A split beyond the last key has nothing to do.
  if (keys.empty()) keys = {0, 0};
  for (i32 key0 = keys.begin / plan.block_k * plan.block_k; key0 < keys.end; key0 += plan.block_k) {
    const i32 start = max_of(key0, split_begin), skipped = max_of(keys.begin - start, 0);
    const i32 begin = start + skipped / Format::kFirstStep * Format::kFirstStep;
    const i32 count = min_of(key0 + plan.block_k, keys.end) - begin;
    for (i32 n = 0; n < plan.heads; ++n) {
      enter(n);
      if (block_mask_hides(block, 0, block.rows, {begin, begin + count})) continue;
      const i32 padded = round_up(count, Format::kFirstStep);
      pack_keys(block, p.k, p.k_batch, state.d, begin, count, padded, state.k);
      pack_keys(block, p.v, p.v_batch, state.dv, begin, count, padded, state.v);
      pack_by_row<Side::kLeft>(state.v, padded, state.dv);
      if (plan.heads > 1) {
        // The same keys of the next head, or the next keys of the first one.
        const bool same_keys = n + 1 < plan.heads;
        const i32 next_key = same_keys ? begin : key0 + plan.block_k;
        const int steps_of_a_tile = Format::kTiled ? ceil_div(max_of(padded, state.dv), kTileBlock)
                                                   : (padded + state.dv) / kTileRows;
        state.next.begin(key_rows(p.k, p.k_batch, state.d, next_key, same_keys ? n + 1 : 0),
                         key_rows(p.v, p.v_batch, state.dv, next_key, same_keys ? n + 1 : 0),
                         clamp_to(keys.end - next_key, 0, plan.block_k),
                         ceil_div(block.rows, kRowTile) * steps_of_a_tile);
      }
      if constexpr (Format::kTiled) {
        forward_tiles(state, begin, count);
      } else if (plan.heads == 1) {
        for_each_row_tile(block.rows, [&](int row, auto vectors) {
          forward_tile<Format, vectors.value, false>(state, row, begin, count);
        });
      } else {
        for_each_row_tile(block.rows, [&](int row, auto vectors) {
          forward_tile<Format, vectors.value, true>(state, row, begin, count);
        });
      }
    }
  }
  for (i32 n = 0; n < plan.heads; ++n) {
    enter(n);
    for_each_row_tile(block.rows, [&](int row, auto vectors) {
      finish_tile<Format, vectors.value>(state, task, row);
    });
  }
}

inline void forward_tiled(const ForwardTask& task) {
  with_format(task.args->problem.dtype,
              [&](auto format) { forward_blocks<decltype(format)>(task); });
}

// out and lse of one block of rows from the partial results of its splits, in the order of splits.
inline void merge_splits(const ForwardArgs& args, const Plan& plan, const float* partials, i64 b,
                         i64 kv_head, i32 q_block) {
  const Problem& p = args.problem;
  const i32 group = static_cast<i32>(p.group());
  const i32 q0 = q_block * plan.block_q;
  const i32 rows = min_of(plan.block_q, static_cast<i32>(p.lq) - q0) * group;
  const int dv = static_cast<int>(p.dv), width = round_up(dv, 16);
  const i64 padded = plan.padded_rows;
  const float* first =
      partials + ((b * p.hkv + kv_head) * plan.q_blocks + q_block) * padded * (width + 2);
  for (i32 r = 0; r < rows; ++r) {
    float maximum = -__builtin_inff();
    for (i32 split = 0; split < plan.num_splits; ++split)
      maximum = max_of(maximum, first[split * plan.partial_stride + padded * width + r]);
    const float shift = maximum == -__builtin_inff() ? 0.f : maximum;
    float sum = 0.f;
    F acc[kMaxHeadDim / kLanes] = {};
    for (i32 split = 0; split < plan.num_splits; ++split) {
      const float* partial = first + split * plan.partial_stride;
      const float split_sum = partial[padded * (width + 1) + r];
      if (split_sum == 0.f) continue;
      const float weight = __builtin_expf(partial[padded * width + r] - shift);
      sum += weight * split_sum;
      for (int c = 0; c < width; c += kLanes)
        acc[c / kLanes] = fma(set(weight), load(partial + r * width + c), acc[c / kLanes]);
    }
    const float inverse = sum == 0.f ? 0.f : 1.f / sum;
    const i64 index = (b * p.lq + q0 + r / group) * p.hq + kv_head * group + r % group;
    args.lse[index] = sum == 0.f ? -__builtin_inff() : maximum + __builtin_logf(sum);
    with_type(p.dtype, [&](auto tag) {
      using Memory = typename decltype(tag)::Memory;
      Memory* out = static_cast<Memory*>(args.out) + index * p.dv;
      for (int c = 0; c < dv; c += kLanes)
        store_upto(tag, out + c, acc[c / kLanes] * set(inverse), dv - c);
    });
  }
}

}  // namespace attention::cpu::ATTENTION_CPU_ISA
