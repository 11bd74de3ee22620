// SPDX-License-Identifier: Apache-2.0
// Copies operands into the scratch that the products read: keys and values row by row at a fixed
// pitch, queries with rows in lanes. Packing is where padding becomes zeros and where values that
// nobody may look at are kept out.
#pragma once

#include "kernels/cpu/convert.h"
#include "kernels/cpu/product.h"
#include "kernels/cpu/rows.h"

namespace attention::cpu::ATTENTION_CPU_ISA {

// How many rows before its use a row is asked for.
inline constexpr int kRowsAhead = 4;

// Begins to read a row of `d` elements.
template <typename Memory>
ATTENTION_INLINE void prefetch_row(const Memory* row, int d) {
  for (int c = 0; c < d; c += 64 / static_cast<int>(sizeof(Memory))) __builtin_prefetch(row + c);
}

// dst[r] = src[r * stride ..][0 .. d), zero up to the next whole vector of elements. Returns false
// when any number is not finite.
template <typename Format, typename T>
inline bool pack_rows(T tag, const typename T::Memory* src, i64 stride, int rows, int d,
                      typename Format::Element* dst) {
  constexpr int kStep = kLanes * Format::kDepth;
  I suspicious = {};
  const int whole = d / kStep * kStep;
  for (int r = 0; r < rows; ++r, src += stride, dst += Panel<Format>::kRowPitch) {
    // Rows of one head lie far apart in memory: the hardware prefetcher does not see the pattern.
    if (r + kRowsAhead < rows) prefetch_row(src + kRowsAhead * stride, d);
    for (int c = 0; c < whole; c += kStep) {
      const F x = Format::pack(tag, src + c, kStep);
      suspicious |= Format::suspicion(x);
      store(dst + c / Format::kDepth, x);
    }
    if (whole < d) {
      const F x = Format::pack(tag, src + whole, d - whole);
      suspicious |= Format::suspicion(x);
      store(dst + whole / Format::kDepth, x);
    }
  }
  return !any_bit(suspicious);
}

template <typename Format>
inline void zero_rows(typename Format::Element* dst, int first, int last, int d) {
  const int width = round_up(d, kLanes * Format::kDepth) / Format::kDepth;
  for (int r = first; r < last; ++r)
    memset(dst + r * Panel<Format>::kRowPitch, 0, sizeof(*dst) * static_cast<size_t>(width));
}

template <typename Format>
ATTENTION_INLINE bool row_is_finite(const typename Format::Element* row, int d) {
  I suspicious = {};
  for (int c = 0; c < ceil_div(d, Format::kDepth); c += kLanes)
    suspicious |= Format::suspicion(load(row + c));
  return !any_bit(suspicious);
}

// Zeroes the packed rows that hold NaN or infinity and that no row of the block may attend to:
// their weight is 0, but 0 * NaN is not. Rare, so it may be slow.
template <typename Format>
inline void remove_hidden_values(const RowBlock& block, typename Format::Element* packed, i32 key0,
                                 int keys, int d) {
  for (int j = 0; j < keys; ++j) {
    if (row_is_finite<Format>(packed + j * Panel<Format>::kRowPitch, d)) continue;
    bool seen = false;
    for (int row = 0; row < block.rows && !seen; ++row) seen = entry_allowed(block, row, key0 + j);
    if (!seen) zero_rows<Format>(packed, j, j + 1, d);
  }
}

// Packs keys [key0, key0 + keys) of the block's key/value head from a [Bm, Lkv, Hkv, d] operand
// (by_d), and zeroes the rows after them up to `padded_keys` (columns too, up to the next whole
// vector).
template <typename Format>
inline void pack_keys(const RowBlock& block, const void* operand, BatchMap batch, int d, i32 key0,
                      int keys, int padded_keys, const Panel<Format>& dst) {
  const Problem& p = *block.problem;
  bool finite = true;
  Format::with_operand_type(p.dtype, [&](auto tag) {
    using Memory = typename decltype(tag)::Memory;
    const i64 at = ((batch(block.b) * p.lkv + key0) * p.hkv + block.kv_head) * d;
    finite = pack_rows<Format>(tag, static_cast<const Memory*>(operand) + at, p.hkv * d, keys, d,
                               dst.by_d);
  });
  zero_rows<Format>(dst.by_d, keys, padded_keys, d);
  if (!finite) remove_hidden_values<Format>(block, dst.by_d, key0, keys, d);
}

// The side of a product that packed rows stand on.
enum class Side { kLeft, kRight };

// Completes a panel whose `rows` (a multiple of kFirstStep) rows are packed by_d: by_row. For
// matrix tiles the left side (K, V) is [row / 32][d][16 pairs of rows] and the right one (Q, dO)
// [row / 32][d / 16][16 pairs of rows][16].
template <Side kSide, typename Format>
inline void pack_by_row(const Panel<Format>& panel, int rows, int d) {
  if constexpr (Format::kTiled) {
    for (int r = 0; r < rows; r += kTileBlock)
      for (int c = 0; c < d; c += kTileSide) {
        F tile[kLanes];
        for (int i = 0; i < kTileSide; ++i) {
          const u16* row =
              reinterpret_cast<const u16*>(panel.by_d + (r + 2 * i) * Panel<Format>::kRowPitch) + c;
          tile[i] = Format::zip_halves(row, row + 2 * Panel<Format>::kRowPitch);
        }
        if constexpr (kSide == Side::kLeft) transpose(tile);
        u32* dst = panel.rows_from(r, d) + c * kTileSide;
        for (int i = 0; i < kTileSide; ++i) store(dst + i * kTileSide, tile[i]);
      }
  } else if constexpr (Format::kDepth == 2) {
    for (int r = 0; r < rows; r += 2)
      for (int c = 0; c < d; c += kLanes) {
        const u16* row =
            reinterpret_cast<const u16*>(panel.by_d + r * Panel<Format>::kRowPitch) + c;
        store(panel.by_row + r / 2 * kPitch + c,
              Format::zip_halves(row, row + 2 * Panel<Format>::kRowPitch));
      }
  }
}

// Rows [row, row + lanes) of a [B, Lq, Hq, d] operand into dst[d / kDepth][lanes]: rows in lanes.
// Rows past the query length and past the end of the block become zeros: their contents are never
// used.
template <typename Format, int kVectors>
inline void pack_lanes(const RowBlock& block, const void* operand, i64 batch_index, int d, int row,
                       typename Format::Element* dst) {
  constexpr int kLd = kVectors * kLanes, kStep = kLanes * Format::kDepth;
  const Problem& p = *block.problem;
  Format::with_operand_type(p.dtype, [&](auto tag) {
    using Memory = typename decltype(tag)::Memory;
    const Memory* base = static_cast<const Memory*>(operand) + batch_index * p.lq * p.hq * d;
    for (int n = 0; n < kVectors; ++n) {
      const Memory* rows[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) {
        const int r = row + n * kLanes + lane;
        const bool used = r < block.rows && block.query[r] < block.mask.q_len;
        rows[lane] = used ? base + (i64{block.query[r]} * p.hq + block.head[r]) * d : nullptr;
        const int ahead = min_of(r + 2 * kLanes, block.rows - 1);
        prefetch_row(base + (i64{block.query[ahead]} * p.hq + block.head[ahead]) * d, d);
      }
      for (int c = 0; c < d; c += kStep) {
        F tile[kLanes];
        for (int lane = 0; lane < kLanes; ++lane)
          tile[lane] = rows[lane] ? Format::pack(tag, rows[lane] + c, d - c) : zero();
        transpose(tile);
        for (int i = 0; i < kLanes; ++i)
          store(dst + (c / Format::kDepth + i) * kLd + n * kLanes, tile[i]);
      }
    }
  });
}

// Elements of one row in lanes: a head dimension in whole vectors.
template <typename Format>
ATTENTION_INLINE int lane_stride(int d) {
  return round_up(d, 16 * Format::kDepth) / Format::kDepth;
}

// Packed rows (by_d, zero up to the next whole vector) into dst[d / kDepth][lanes].
template <typename Format, int kVectors>
inline void rows_to_lanes(const typename Format::Element* rows, int d,
                          typename Format::Element* dst) {
  constexpr int kLd = kVectors * kLanes;
  for (int n = 0; n < kVectors; ++n)
    for (int c = 0; c < ceil_div(d, Format::kDepth); c += kLanes) {
      F tile[kLanes];
      for (int lane = 0; lane < kLanes; ++lane)
        tile[lane] = load(rows + (n * kLanes + lane) * Panel<Format>::kRowPitch + c);
      transpose(tile);
      for (int i = 0; i < kLanes; ++i) store(dst + (c + i) * kLd + n * kLanes, tile[i]);
    }
}

// The reverse: rows [row, row + lanes) of a [B, Lq, Hq, d] result from src[d][lanes], times
// factor[lane].
template <int kVectors>
inline void unpack_lanes(const RowBlock& block, const float* src, const F (&factor)[kVectors],
                         int d, int row, void* result) {
  constexpr int kLd = kVectors * kLanes;
  const Problem& p = *block.problem;
  with_type(p.dtype, [&](auto tag) {
    using Memory = typename decltype(tag)::Memory;
    for (int n = 0; n < kVectors; ++n) {
      const int row0 = row + n * kLanes;
      const int count = min_of(kLanes, block.rows - row0);
      Memory* rows[kLanes];
      for (int lane = 0; lane < count; ++lane)
        rows[lane] = static_cast<Memory*>(result) + block.index_of(row0 + lane) * d;
      for (int c = 0; c < d; c += kLanes) {
        F tile[kLanes];
        for (int i = 0; i < kLanes; ++i)
          tile[i] = load(src + (c + i) * kLd + n * kLanes) * factor[n];
        transpose(tile);
        if (count == kLanes && d - c >= kLanes) {
          // Nearly always. Without a test a lane, the tile stays in registers.
#pragma GCC unroll 16
          for (int lane = 0; lane < kLanes; ++lane) store_as(tag, rows[lane] + c, tile[lane]);
        } else {
          for (int lane = 0; lane < count; ++lane)
            store_upto(tag, rows[lane] + c, tile[lane], d - c);
        }
      }
    }
  });
}

}  // namespace attention::cpu::ATTENTION_CPU_ISA
