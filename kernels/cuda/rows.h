// SPDX-License-Identifier: Apache-2.0
// Where the rows of q, k, v, out and their gradients lie in memory, and the copy of a tile of rows
// to shared memory.
#pragma once

#include "kernels/common/mask.h"
#include "kernels/cuda/tile/tile.h"

namespace attention {

// Batch entry of an operand. The cases that occur without vmap need no 64-bit division, which costs
// about a hundred instructions.
ATTENTION_DEVICE i64 operand_batch(const BatchMap& map, i64 b) {
  if (map.mod == 1) return 0;
  if (map.div == 1 && b < map.mod) return b;
  return map(b);
}

// The [L, H, width] slice of one batch entry: row l of head h starts at data + (l * heads + h) *
// width.
template <typename T>
struct Rows {
  T* data;
  i64 heads;
  i32 width;
  ATTENTION_DEVICE T* row(i64 l, i64 h) const { return data + (l * heads + h) * width; }
};

template <typename T>
ATTENTION_DEVICE Rows<const T> operand_rows(const void* data, const BatchMap& map, i64 b,
                                            i64 length, i64 heads, i64 width) {
  const T* base = static_cast<const T*>(data);
  return {base + operand_batch(map, b) * length * heads * width, heads, static_cast<i32>(width)};
}

// Full-batch arrays: out, gradients, dout.
template <typename T>
ATTENTION_DEVICE Rows<T> result_rows(T* data, i64 b, i64 length, i64 heads, i64 width) {
  return {data + b * length * heads * width, heads, static_cast<i32>(width)};
}

// Can rows of this width move in 16-byte pieces? Buffers start at a multiple of 16 bytes, so every
// row does when its length is one.
template <typename T>
ATTENTION_HOST_DEVICE constexpr bool rows_are_aligned(i64 width) {
  return width * static_cast<i64>(sizeof(T)) % 16 == 0;
}

// Copies `count` rows to tile rows 0 .. count-1, all columns: row_at(r) is where row r starts, or
// null for a row of zeros, which is then not read at all. Columns past `width` become zeros.
//
// kAligned: width is a whole number of 16-byte chunks (known for the lean kernels). Otherwise,
// where it is not, elements are gathered one by one with ordinary loads: slower, but such widths
// are rare (they are no multiple of 8 in 16-bit types), and a padded copy of q, k and v would cost
// memory. Asynchronous: the caller commits, waits, and puts a barrier before the tile is read.
template <int kThreads, bool kAligned, typename T, int R, int C, typename RowAt>
ATTENTION_DEVICE void copy_rows(const tile::SharedTile<T, R, C>& to, int count, i32 width,
                                RowAt row_at) {
  using Tile = tile::SharedTile<T, R, C>;
  // Each thread keeps one chunk column: the threads past the last whole row of chunks stay idle.
  constexpr int kRowsAtOnce = kThreads / Tile::kChunks;
  static_assert(kRowsAtOnce > 0, "a row has more chunks than the block has threads");
  const int thread = tile::thread_index();
  const int chunk = thread % Tile::kChunks;
  const int col = chunk * Tile::kChunk;
  if (thread >= kRowsAtOnce * Tile::kChunks) return;
  if (kAligned || rows_are_aligned<T>(width)) {
    ATTENTION_UNROLL
    for (int r = thread / Tile::kChunks; r < count; r += kRowsAtOnce) {
      const T* from = row_at(r);
      const bool valid = from != nullptr && col < width;
      tile::async_copy_or_zero<16>(to.chunk(r, chunk), valid ? from + col : from, valid);
    }
  } else {
    for (int r = thread / Tile::kChunks; r < count; r += kRowsAtOnce) {
      const T* from = row_at(r);
      tile::Vec<T, Tile::kChunk> values;
      for (int i = 0; i < Tile::kChunk; ++i) {
        const bool valid = from != nullptr && col + i < width;
        values[i] =
            tile::global_load_or(valid ? from + col + i : from, valid, tile::from_f32<T>(0.f));
      }
      tile::shared_store(to.chunk(r, chunk), values);
    }
  }
}

// Copies positions first .. first+count-1 of one head; those outside `valid` become rows of zeros
// and are not read.
template <int kThreads, bool kAligned, typename T, int R, int C>
ATTENTION_DEVICE void copy_positions(const tile::SharedTile<T, R, C>& to, int count,
                                     const Rows<const T>& rows, i32 head, i32 first, Range valid) {
  copy_rows<kThreads, kAligned>(to, count, rows.width, [&](int r) -> const T* {
    const i32 l = first + r;
    return l >= valid.begin && l < valid.end ? rows.row(l, head) : nullptr;
  });
}

// Writes two neighbouring columns of a result row, rounded to T.
template <typename T>
ATTENTION_DEVICE void store_pair(T* row, i32 width, int col, f32 x0, f32 x1) {
  if (width % 2 == 0) {
    if (col < width) {
      tile::global_store(row + col,
                         tile::Vec<T, 2>{{tile::from_f32<T>(x0), tile::from_f32<T>(x1)}});
    }
  } else {
    // Odd rows start at odd elements: pairs would be misaligned.
    if (col < width) tile::global_store(row + col, tile::from_f32<T>(x0));
    if (col + 1 < width) tile::global_store(row + col + 1, tile::from_f32<T>(x1));
  }
}

// Writes the rows of an accumulator, times `factor(row_slot)`: row_of(tile row) is where a row
// starts, or null for one that does not exist.
template <typename T, int M, int N, typename RowOf, typename Factor>
ATTENTION_DEVICE void store_rows(const tile::Accumulator<M, N>& acc, int row0, i32 width,
                                 RowOf row_of, Factor factor) {
  using Acc = tile::Accumulator<M, N>;
  ATTENTION_UNROLL
  for (int r = 0; r < Acc::kRowSlots; ++r) {
    T* row = row_of(row0 + Acc::slot_row(r));
    if (row == nullptr) continue;
    const f32 x = factor(r);
    ATTENTION_UNROLL
    for (int c = 0; c < Acc::kColSlots; c += 2) {
      store_pair(row, width, Acc::slot_col(c), acc.at(r, c) * x, acc.at(r, c + 1) * x);
    }
  }
}

}  // namespace attention
