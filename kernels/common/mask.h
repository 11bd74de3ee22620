// SPDX-License-Identifier: Apache-2.0
// Mask policies as pure functions: which keys a query may see, and what a whole tile of (query,
// key) positions needs. Shared by every backend, host and device.
#pragma once

#include "kernels/common/problem.h"

namespace attention {

// The mask terms of one batch entry that depend on positions alone ("affine" terms): causal,
// window, lengths, prefix.
struct RowMask {
  i32 q_len = 0;   // rows i >= q_len see nothing
  i32 kv_len = 0;  // keys j >= kv_len are seen by nobody
  i32 shift = 0;   // i' = i + shift
  i32 prefix = 0;  // keys j < prefix are exempt from `causal`
  bool causal = false;
  i32 window_left = -1;
  i32 window_right = -1;

  // Row i sees, of the affine terms, exactly the keys in [begin(i), end(i)), which may be empty.
  ATTENTION_HOST_DEVICE constexpr i32 begin(i32 i) const {
    if (i >= q_len) return kv_len;
    return window_left < 0 ? 0 : clamp_to<i64>(i64{i} + shift - window_left, 0, kv_len);
  }
  ATTENTION_HOST_DEVICE constexpr i32 end(i32 i) const {
    if (i >= q_len) return kv_len;
    i64 last = kv_len;
    if (causal) last = max_of<i64>(min_of<i64>(last, i64{i} + shift + 1), min_of(prefix, kv_len));
    if (window_right >= 0) last = min_of<i64>(last, i64{i} + shift + window_right + 1);
    return clamp_to<i64>(last, 0, kv_len);
  }
  ATTENTION_HOST_DEVICE constexpr bool allows(i32 i, i32 j) const {
    return j >= begin(i) && j < end(i);
  }
};

ATTENTION_HOST_DEVICE constexpr RowMask row_mask(const Problem& p, i64 b) {
  RowMask m;
  m.q_len = p.lq;
  m.kv_len = p.lkv;
  if (p.q_lengths.data) m.q_len = clamp_to<i64>(*p.q_lengths.row(b), 0, p.lq);
  if (p.kv_lengths.data) m.kv_len = clamp_to<i64>(*p.kv_lengths.row(b), 0, p.lkv);
  m.shift = p.bottom_right ? m.kv_len - m.q_len : 0;
  m.causal = p.causal;
  m.prefix = p.prefix_lengths.data ? *p.prefix_lengths.row(b) : 0;
  // A window wider than both sequences cannot mask anything more; clamping keeps 32-bit arithmetic
  // safe.
  const i64 widest = p.lq + p.lkv;
  m.window_left = p.window_left < 0 ? -1 : min_of(p.window_left, widest);
  m.window_right = p.window_right < 0 ? -1 : min_of(p.window_right, widest);
  return m;
}

// Half-open range of positions.
struct Range {
  i32 begin = 0;
  i32 end = 0;
  ATTENTION_HOST_DEVICE constexpr bool empty() const { return begin >= end; }
};

// Keys that at least one row of [rows.begin, rows.end) may see by the affine terms (begin and end
// are monotonic in i).
ATTENTION_HOST_DEVICE constexpr Range keys_of_rows(const RowMask& m, Range rows) {
  const i32 last = min_of(rows.end, m.q_len);
  if (rows.begin >= last) return {0, 0};
  Range r{m.begin(rows.begin), m.end(last - 1)};
  return r.empty() ? Range{0, 0} : r;
}

// Rows that may see at least one key of [keys.begin, keys.end) by the affine terms; a superset
// where it is cheap to be one.
ATTENTION_HOST_DEVICE constexpr Range rows_of_keys(const RowMask& m, Range keys) {
  const i32 last = min_of(keys.end, m.kv_len);
  if (keys.begin >= last) return {0, 0};
  i64 first_row = 0, end_row = m.q_len;
  if (m.causal && keys.begin >= m.prefix)
    first_row = max_of<i64>(first_row, i64{keys.begin} - m.shift);
  if (m.window_right >= 0)
    first_row = max_of<i64>(first_row, i64{keys.begin} - m.shift - m.window_right);
  if (m.window_left >= 0)
    end_row = min_of<i64>(end_row, i64{last} - 1 - m.shift + m.window_left + 1);
  if (first_row >= end_row) return {0, 0};
  return {static_cast<i32>(first_row), static_cast<i32>(end_row)};
}

// True when every (row, key) of the tile is allowed by the affine terms: such a tile takes no mask
// work.
ATTENTION_HOST_DEVICE constexpr bool tile_is_full(const RowMask& m, Range rows, Range keys) {
  return rows.end <= m.q_len && keys.end <= m.kv_len && m.begin(rows.end - 1) <= keys.begin &&
         m.end(rows.begin) >= keys.end;
}

// Negative ids are padding and attend nothing.
ATTENTION_HOST_DEVICE constexpr bool same_segment(i32 q_id, i32 kv_id) {
  return q_id == kv_id && q_id >= 0;
}

// Block-mask state of the tile that holds (i, j), and the entry itself.
ATTENTION_HOST_DEVICE constexpr i32 block_mask_state(const BlockMaskOperand& m, i64 b, i64 h, i32 i,
                                                     i32 j) {
  return m.index[m.batch(b) * m.batch_stride + h * m.head_stride + (i / kMaskTile) * m.row_stride +
                 j / kMaskTile];
}
ATTENTION_HOST_DEVICE constexpr bool block_mask_allows(const BlockMaskOperand& m, i64 b, i64 h,
                                                       i32 i, i32 j) {
  const i32 state = block_mask_state(m, b, h, i, j);
  if (state < 0) return state == kFullTile;
  const i32 col = j % kMaskTile;
  return m.bits[(i64{state} * kMaskTile + i % kMaskTile) * (kMaskTile / 32) + col / 32] >>
             (col % 32) &
         1u;
}

}  // namespace attention
