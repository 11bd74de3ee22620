// SPDX-License-Identifier: Apache-2.0
// Copies operands into the float32 scratch that the products read: keys and values row by row at a
// fixed pitch, queries with rows in lanes. Packing is where padding becomes zeros and where values
// that nobody may look at are kept out.
#pragma once

#include "kernels/cpu/convert.h"
#include "kernels/cpu/product.h"
#include "kernels/cpu/rows.h"

namespace attention::cpu::ATTENTION_CPU_ISA {

// dst[r][0 .. width) = src[r * stride ..][0 .. d), zero from d to width (a multiple of kLanes or
// the next one above d). Returns false when any element is not finite.
template <typename T>
inline bool pack_rows(T tag, const typename T::Memory* src, i64 stride, int rows, int d,
                      float* dst) {
  F suspicious = zero();
  const int whole = d / kLanes * kLanes;
  for (int r = 0; r < rows; ++r, src += stride, dst += kPitch) {
    // Rows of one head lie far apart in memory: the hardware prefetcher does not see the pattern.
    __builtin_prefetch(src + 4 * stride);
    __builtin_prefetch(reinterpret_cast<const char*>(src + 4 * stride) + 64);
    for (int c = 0; c < whole; c += kLanes) {
      const F x = load_as(tag, src + c);
      suspicious = fma(x, zero(), suspicious);
      store(dst + c, x);
    }
    if (whole < d) {
      const F x = load_first(tag, src + whole, d - whole);
      suspicious = fma(x, zero(), suspicious);
      store(dst + whole, x);
    }
  }
  return sum_lanes(suspicious) == 0.f;
}

inline void zero_rows(float* dst, int first, int last, int width) {
  for (int r = first; r < last; ++r)
    memset(dst + r * kPitch, 0, sizeof(float) * static_cast<size_t>(width));
}

ATTENTION_INLINE bool row_is_finite(const float* row, int d) {
  float sum = 0.f;
  for (int c = 0; c < d; ++c) sum += row[c] * 0.f;
  return sum == 0.f;
}

// Zeroes the packed rows that hold NaN or infinity and that no row of the block may attend to:
// their weight is 0, but 0 * NaN is not. Rare, so it may be slow.
inline void remove_hidden_values(const RowBlock& block, float* packed, i32 key0, int keys, int d) {
  for (int j = 0; j < keys; ++j) {
    if (row_is_finite(packed + j * kPitch, d)) continue;
    bool seen = false;
    for (int row = 0; row < block.rows && !seen; ++row) seen = entry_allowed(block, row, key0 + j);
    if (!seen) zero_rows(packed, j, j + 1, d);
  }
}

// Packs keys [key0, key0 + keys) of the block's key/value head from a [Bm, Lkv, Hkv, d] operand,
// and zeroes the rows after them up to `padded_keys` (columns too, up to the next multiple of
// kLanes).
inline void pack_keys(const RowBlock& block, const void* operand, BatchMap batch, int d, i32 key0,
                      int keys, int padded_keys, float* dst) {
  const Problem& p = *block.problem;
  bool finite = true;
  with_type(p.dtype, [&](auto tag) {
    using Memory = typename decltype(tag)::Memory;
    const i64 at = ((batch(block.b) * p.lkv + key0) * p.hkv + block.kv_head) * d;
    finite = pack_rows(tag, static_cast<const Memory*>(operand) + at, p.hkv * d, keys, d, dst);
  });
  zero_rows(dst, keys, padded_keys, round_up(d, kLanes));
  if (!finite) remove_hidden_values(block, dst, key0, keys, d);
}

// Rows [row, row + lanes) of a [B, Lq, Hq, d] operand into dst[d][lanes]: rows in lanes. Rows past
// the query length and past the end of the block become zeros: their contents are never used.
template <int kVectors>
inline void pack_lanes(const RowBlock& block, const void* operand, i64 batch_index, int d, int row,
                       float* dst) {
  constexpr int kLd = kVectors * kLanes;
  const Problem& p = *block.problem;
  with_type(p.dtype, [&](auto tag) {
    using Memory = typename decltype(tag)::Memory;
    const Memory* base = static_cast<const Memory*>(operand) + batch_index * p.lq * p.hq * d;
    for (int n = 0; n < kVectors; ++n) {
      const Memory* rows[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) {
        const int r = row + n * kLanes + lane;
        const bool used = r < block.rows && block.query_of(r) < block.mask.q_len;
        rows[lane] = used ? base + (i64{block.query_of(r)} * p.hq + block.head_of(r)) * d : nullptr;
      }
      for (int c = 0; c < d; c += kLanes) {
        F tile[kLanes];
        for (int lane = 0; lane < kLanes; ++lane)
          tile[lane] = rows[lane] ? load_upto(tag, rows[lane] + c, d - c) : zero();
        transpose(tile);
        for (int i = 0; i < kLanes; ++i) store(dst + (c + i) * kLd + n * kLanes, tile[i]);
      }
    }
  });
}

// Packed rows (pitch kPitch, zero up to the next multiple of kLanes) into dst[d][lanes].
template <int kVectors>
inline void rows_to_lanes(const float* rows, int d, float* dst) {
  constexpr int kLd = kVectors * kLanes;
  for (int n = 0; n < kVectors; ++n)
    for (int c = 0; c < d; c += kLanes) {
      F tile[kLanes];
      for (int lane = 0; lane < kLanes; ++lane)
        tile[lane] = load(rows + (n * kLanes + lane) * kPitch + c);
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
      for (int c = 0; c < d; c += kLanes) {
        F tile[kLanes];
        for (int i = 0; i < kLanes; ++i)
          tile[i] = load(src + (c + i) * kLd + n * kLanes) * factor[n];
        transpose(tile);
        for (int lane = 0; lane < count; ++lane)
          store_upto(tag, static_cast<Memory*>(result) + block.index_of(row0 + lane) * d + c,
                     tile[lane], d - c);
      }
    }
  });
}

}  // namespace attention::cpu::ATTENTION_CPU_ISA
