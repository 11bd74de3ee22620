// SPDX-License-Identifier: Apache-2.0
// dbias, from the result's side: a task owns one block of dbias and adds up everything that
// contributes to it (batch entries, heads and, along broadcast axes, all queries or keys) in a
// fixed order. It recomputes P and dS for that, two products of five, and in return needs neither
// float atomics nor a [B, Hq, Lq, Lkv] buffer, whichever axes the bias is broadcast over.
#pragma once

#include "kernels/cpu/gradient_tile.h"

namespace attention::cpu::ATTENTION_CPU_ISA {

template <typename Format>
inline void bias_gradient_block(const BackwardArgs& args, const Plan& plan, i64 index,
                                char* scratch) {
  const Problem& p = args.problem;
  const ScoreOperand& bias = p.bias;
  const BiasBlocks blocks = bias_blocks(p, plan);
  const i32 k_block = static_cast<i32>(index % blocks.k_blocks);
  const i32 q_block = static_cast<i32>(index / blocks.k_blocks % blocks.q_blocks);
  const i64 head = index / blocks.k_blocks / blocks.q_blocks % blocks.heads;
  const i64 batch = index / blocks.k_blocks / blocks.q_blocks / blocks.heads;
  const i32 lq = static_cast<i32>(p.lq), lkv = static_cast<i32>(p.lkv);
  const i32 group = static_cast<i32>(p.group());

  GradientState<Format> state = make_gradient_state<Format>(args, plan, scratch);
  RowBlock& block = state.block;
  float* acc = reinterpret_cast<float*>(scratch + plan.scratch.dbias);
  memset(acc, 0, sizeof(float) * static_cast<size_t>(i64{plan.padded_rows} * state.block_k));

  // Axes that dbias has are cut into blocks, one of which is this task's; the others are walked.
  const i32 q_first = blocks.sums_queries ? 0 : q_block * blocks.block_q;
  const i32 q_last = blocks.sums_queries ? lq : min_of(q_first + blocks.block_q, lq);
  const i32 k_first = blocks.sums_keys ? 0 : k_block * plan.block_k;
  const i32 k_last = blocks.sums_keys ? lkv : min_of(k_first + plan.block_k, lkv);
  for (i64 b = 0; b < p.batch; ++b) {
    if (bias.batch(b) != batch) continue;
    for (i64 h = blocks.sums_heads ? 0 : head; h < (blocks.sums_heads ? p.hq : head + 1); ++h) {
      for (i32 q0 = q_first; q0 < q_last; q0 += blocks.block_q) {
        const i32 queries = min_of(blocks.block_q, q_last - q0);
        view_rows(block, p, b, h / group, static_cast<i32>(h), 1, q0, queries,
                  scratch + plan.scratch.rows, plan.padded_rows);
        fill_rows(block);
        // Whole tiles only: blocks of different size must share one layout of the accumulator.
        block.tiled = round_up(block.rows, kRowTile);
        load_rows(state);
        const Range seen = keys_of_rows(block.mask, {q0, q0 + queries});
        for (i32 begin = k_first; begin < k_last; begin += plan.block_k) {
          const i32 count = min_of(min_of(begin + plan.block_k, k_last), seen.end) - begin;
          if (count <= 0 || begin + count <= seen.begin) continue;
          if (block_mask_hides(block, 0, block.rows, {begin, begin + count})) continue;
          const i32 padded = round_up(count, Format::kFirstStep);
          pack_keys(block, p.k, p.k_batch, state.d, begin, count, padded, state.k);
          pack_keys(block, p.v, p.v_batch, state.dv, begin, count, padded, state.v);
          for_each_row_tile(block.tiled, [&](int row, auto vectors) {
            constexpr int kVectors = decltype(vectors)::value;
            constexpr int kLd = kVectors * kLanes;
            const Range range = gradient_tile<Format, kVectors>(state, row, begin, count);
            const i64 tile = i64{row} * state.block_k;
            for (int at = range.begin * kLd; at < range.end * kLd; at += kLanes)
              store(acc + tile + at, load(acc + tile + at) + load(state.ds + tile + at));
          });
        }
      }
    }
  }

  // Rows of the accumulator lie in lanes of row tiles: [tile][key][lane].
  const int rows = min_of(blocks.block_q, q_last - q_first);
  const int keys = min_of(plan.block_k, k_last - k_first);
  float* result = args.dbias + batch * bias.batch_stride + head * bias.head_stride;
  const auto entry = [&](int row, int j) {
    const int tile = row / kRowTile * kRowTile;
    return acc[i64{tile} * state.block_k + j * kRowTile + (row - tile)];
  };
  if (blocks.sums_queries || blocks.sums_keys) {
    for (int r = 0; r < (blocks.sums_queries ? 1 : rows); ++r)
      for (int j = 0; j < (blocks.sums_keys ? 1 : keys); ++j) {
        float sum = 0.f;
        for (int rr = r; rr < (blocks.sums_queries ? rows : r + 1); ++rr)
          for (int jj = j; jj < (blocks.sums_keys ? keys : j + 1); ++jj) sum += entry(rr, jj);
        result[(q_first + r) * bias.row_stride + (k_first + j) * bias.col_stride] = sum;
      }
    return;
  }
  for (int r = 0; r < rows; ++r) {
    float* row = result + (q_first + r) * bias.row_stride + k_first * bias.col_stride;
    for (int j = 0; j < keys; ++j) row[j * bias.col_stride] = entry(r, j);
  }
}

inline void bias_gradient(const BackwardArgs& args, const Plan& plan, i64 index, char* scratch) {
  with_format(args.problem.dtype, [&](auto format) {
    bias_gradient_block<decltype(format)>(args, plan, index, scratch);
  });
}

}  // namespace attention::cpu::ATTENTION_CPU_ISA
