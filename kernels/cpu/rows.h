// SPDX-License-Identifier: Apache-2.0
// The rows of one task: `queries` queries of the heads that share one key/value head, laid out as
// row = query * group + head, so that the heads of a GQA group share every packed key. Per-row
// values are kept in arrays that vector code can load lane by lane.
#pragma once

#include "kernels/common/mask.h"
#include "kernels/cpu/plan.h"
#include "kernels/cpu/simd.h"

namespace attention::cpu::ATTENTION_CPU_ISA {

struct RowBlock {
  const Problem* problem = nullptr;
  RowMask mask;
  i64 b = 0, kv_head = 0;
  i32 head0 = 0, group = 1;  // query heads head0 .. head0 + group - 1
  i32 q0 = 0, queries = 0;
  i32 rows = 0;    // queries * group
  i32 tiled = 0;   // rows that tiles are made for: `rows`, or more where whole tiles are wanted
  i32 padded = 0;  // room in the arrays; rows past `rows` repeat the last one

  // Per row: the keys [begin, end) that the affine mask terms allow, i, i', head, segment, slope.
  i32 *begin, *end, *query, *position, *head, *segment;
  float* slope;
  // Per row tile, at the index of its first row: keys of the current block that it computed.
  i32 *tile_first, *tile_last;
  // Softmax state: running maximum and sum (forward); lse, delta and dlse (backward).
  float *maximum, *sum, *lse, *delta, *dlse, *dslope, *dscale;

  float scale = 1.f;

  // Row-major [B, Lq, Hq] index of a row.
  i64 index_of(int row) const { return (b * problem->lq + query[row]) * problem->hq + head[row]; }
};

// Sets the block, over arrays that fill_rows has filled, or will.
inline void view_rows(RowBlock& block, const Problem& p, i64 b, i64 kv_head, i32 head0, i32 group,
                      i32 q0, i32 queries, void* arrays, i32 padded) {
  block.problem = &p;
  block.mask = row_mask(p, b);
  block.b = b;
  block.kv_head = kv_head;
  block.head0 = head0;
  block.group = group;
  block.q0 = q0;
  block.queries = queries;
  block.rows = queries * group;
  block.tiled = block.rows;
  block.padded = padded;
  block.scale = p.scale_array.data ? *p.scale_array.row(b) : p.scale;
  i32* ints = static_cast<i32*>(arrays);
  i32** int_arrays[] = {&block.begin, &block.end,     &block.query,      &block.position,
                        &block.head,  &block.segment, &block.tile_first, &block.tile_last};
  for (i32** array : int_arrays) {
    *array = ints;
    ints += padded;
  }
  float* floats = reinterpret_cast<float*>(ints);
  float** float_arrays[] = {&block.slope, &block.maximum, &block.sum,    &block.lse,
                            &block.delta, &block.dlse,    &block.dslope, &block.dscale};
  for (float** array : float_arrays) {
    *array = floats;
    floats += padded;
  }
}

// Positions, masks and slopes of the block's rows.
inline void fill_rows(RowBlock& block) {
  const Problem& p = *block.problem;
  const i64 b = block.b;
  const i32 q0 = block.q0, head0 = block.head0, group = block.group, padded = block.padded;
  const i32* segments = p.q_segments.data ? p.q_segments.row(b) : nullptr;
  const float* slopes = p.alibi_slopes.data ? p.alibi_slopes.row(b) : nullptr;
  int row = 0;
  for (i32 i = q0; i < q0 + block.queries; ++i) {
    const i32 begin = block.mask.begin(i), end = block.mask.end(i);
    for (i32 h = head0; h < head0 + group; ++h, ++row) {
      block.begin[row] = begin;
      block.end[row] = max_of(begin, end);
      block.query[row] = i;
      block.position[row] = i + block.mask.shift;
      block.head[row] = h;
      block.segment[row] = segments ? segments[i] : 0;
      block.slope[row] = slopes ? slopes[h] : 0.f;
    }
  }
  for (; row < padded; ++row) {
    const int last = block.rows - 1;
    block.begin[row] = block.begin[last];
    block.end[row] = block.end[last];
    block.query[row] = block.query[last];
    block.position[row] = block.position[last];
    block.head[row] = block.head[last];
    block.segment[row] = block.segment[last];
    block.slope[row] = block.slope[last];
  }
}

// Keys that some row of [row, row + count) may see by the affine terms, and keys that all of them
// see.
struct TileRange {
  Range some, all;
};
ATTENTION_INLINE TileRange range_of_rows(const RowBlock& block, int row, int count) {
  i32 low = 0x7FFFFFFF, high = 0, all_begin = 0, all_end = 0x7FFFFFFF;
  for (int r = row; r < row + count; ++r) {
    const i32 begin = block.begin[r], end = block.end[r];
    all_begin = max_of(all_begin, begin);
    all_end = min_of(all_end, end);
    if (begin < end) {
      low = min_of(low, begin);
      high = max_of(high, end);
    }
  }
  return {{low, high}, {all_begin, all_end}};
}

// True when every mask term and the bias let (row, key) through: the definition that the vector
// code in score.h must agree with, used where a single entry matters.
inline bool entry_allowed(const RowBlock& block, int row, i32 j) {
  const Problem& p = *block.problem;
  const i32 i = block.query[row], h = block.head[row];
  const i64 b = block.b;
  if (!block.mask.allows(i, j)) return false;
  if (p.q_segments.data && !same_segment(p.q_segments.row(b)[i], p.kv_segments.row(b)[j]))
    return false;
  if (p.mask.data) {
    const u8* mask = static_cast<const u8*>(p.mask.data) + p.mask.offset(b, h);
    if (!mask[i * p.mask.row_stride + j * p.mask.col_stride]) return false;
  }
  if (p.block_mask.index && !block_mask_allows(p.block_mask, b, h, i, j)) return false;
  if (p.bias.data) {
    const i64 at = p.bias.offset(b, h) + i * p.bias.row_stride + j * p.bias.col_stride;
    const char* bias = static_cast<const char*>(p.bias.data) + at * size_of(p.bias_dtype);
    u32 bits = 0;
    memcpy(&bits, bias, static_cast<size_t>(size_of(p.bias_dtype)));
    const u32 minus_infinity = p.bias_dtype == DType::kFloat32    ? 0xFF800000u
                               : p.bias_dtype == DType::kBFloat16 ? 0xFF80u
                                                                  : 0xFC00u;
    if (bits == minus_infinity) return false;
  }
  return true;
}

// True when no row of the block sees any key of [keys.begin, keys.end) through the block mask;
// false when that is not known to be so.
inline bool block_mask_hides(const RowBlock& block, int row, int count, Range keys) {
  const BlockMaskOperand& m = block.problem->block_mask;
  if (!m.index) return false;
  const i32 first = block.query[row] / kMaskTile, last = block.query[row + count - 1] / kMaskTile;
  const int heads = m.head_stride == 0 ? 1 : block.group;
  for (int g = 0; g < heads; ++g) {
    const i32* index =
        m.index + m.batch(block.b) * m.batch_stride + (block.head0 + g) * m.head_stride;
    for (i32 t = first; t <= last; ++t)
      for (i32 c = keys.begin / kMaskTile; c <= (keys.end - 1) / kMaskTile; ++c)
        if (index[t * m.row_stride + c] != kEmptyTile) return false;
  }
  return true;
}

}  // namespace attention::cpu::ATTENTION_CPU_ISA
