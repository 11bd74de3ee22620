// SPDX-License-Identifier: Apache-2.0
// What happens to a tile of scores S^T[key][lane] between the two products, one option a pass: soft
// cap, bias, ALiBi, masks, dropout. A tile lies in the first-level cache, so a pass costs little
// more than its arithmetic, and an absent option costs nothing.
#pragma once

#include "kernels/common/dropout.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/product.h"
#include "kernels/cpu/rows.h"

namespace attention::cpu::ATTENTION_CPU_ISA {

ATTENTION_INLINE F minus_infinity() { return set(-__builtin_inff()); }

// Rows row .. row + kVectors * kLanes - 1 of `block` against the keys key0 + first .. key0 + last -
// 1; s[first .. last) are the tile's rows. Keys from `key_end` on are padding.
struct ScoreTile {
  const RowBlock* block;
  int row;
  i32 key0, key_end;
  int first, last;
  float* s;
  u8* allow;  // scratch: [kMaxRowTile / 8][block_k] bytes
  int allow_stride;
};

// s = cap * tanh(s / cap); keeps tanh(s / cap) in `tanh_out` where that is given.
template <int kVectors>
inline void apply_soft_cap(const ScoreTile& tile, float* tanh_out) {
  constexpr int kLd = kVectors * kLanes;
  const float cap = tile.block->problem->soft_cap;
  const F inverse = set(1.f / cap), factor = set(cap);
  for (int at = tile.first * kLd; at < tile.last * kLd; at += kLanes) {
    const F t = tanh(load(tile.s + at) * inverse);
    if (tanh_out) store(tanh_out + at, t);
    store(tile.s + at, t * factor);
  }
}

// s += bias. Rows of the bias are contiguous in keys, the tile in rows: W x W transposes bring them
// together.
template <int kVectors>
inline void add_bias(const ScoreTile& tile) {
  constexpr int kLd = kVectors * kLanes;
  const RowBlock& block = *tile.block;
  const Problem& p = *block.problem;
  const ScoreOperand& bias = p.bias;
  with_type(p.bias_dtype, [&](auto tag) {
    using Memory = typename decltype(tag)::Memory;
    const Memory* data = static_cast<const Memory*>(bias.data);
    const int last = min_of(tile.last, tile.key_end - tile.key0);
    for (int n = 0; n < kVectors; ++n) {
      const Memory* rows[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) {
        const int r = tile.row + n * kLanes + lane;
        rows[lane] = data + bias.offset(block.b, block.head[r]) + block.query[r] * bias.row_stride +
                     tile.key0 * bias.col_stride;
      }
      if (bias.col_stride == 0) {
        float lanes[kLanes];
        for (int lane = 0; lane < kLanes; ++lane) {
          float wide[kLanes];
          store(wide, load_first(tag, rows[lane], 1));
          lanes[lane] = wide[0];
        }
        const F x = load(lanes);
        for (int j = tile.first; j < tile.last; ++j) {
          float* s = tile.s + j * kLd + n * kLanes;
          store(s, load(s) + x);
        }
        continue;
      }
      for (int j = tile.first; j < last; j += kLanes) {
        const int count = min_of(kLanes, last - j);
        F x[kLanes];
        for (int lane = 0; lane < kLanes; ++lane) x[lane] = load_upto(tag, rows[lane] + j, count);
        transpose(x);
        for (int i = 0; i < count; ++i) {
          float* s = tile.s + (j + i) * kLd + n * kLanes;
          store(s, load(s) + x[i]);
        }
      }
    }
  });
}

// s -= slope * |i' - j|.
template <int kVectors>
inline void add_alibi(const ScoreTile& tile) {
  constexpr int kLd = kVectors * kLanes;
  const RowBlock& block = *tile.block;
  for (int n = 0; n < kVectors; ++n) {
    const I position = load(block.position + tile.row + n * kLanes);
    const F slope = load(block.slope + tile.row + n * kLanes);
    for (int j = tile.first; j < tile.last; ++j) {
      float* s = tile.s + j * kLd + n * kLanes;
      store(s, fma(-slope, absolute(to_float(position - set(tile.key0 + j))), load(s)));
    }
  }
}

// Masks keys [first, last) of the tile by the affine interval of each row.
template <int kVectors>
inline void mask_intervals(const ScoreTile& tile, int first, int last) {
  constexpr int kLd = kVectors * kLanes;
  const RowBlock& block = *tile.block;
  for (int n = 0; n < kVectors; ++n) {
    const I below = load(block.begin + tile.row + n * kLanes) - set(1);
    const I end = load(block.end + tile.row + n * kLanes);
    for (int j = first; j < last; ++j) {
      const I key = set(tile.key0 + j);
      float* s = tile.s + j * kLd + n * kLanes;
      store(s, select(both(less(below, key), less(key, end)), load(s), minus_infinity()));
    }
  }
}

template <int kVectors>
inline void mask_segments(const ScoreTile& tile) {
  constexpr int kLd = kVectors * kLanes;
  const RowBlock& block = *tile.block;
  const i32* ids = block.problem->kv_segments.row(block.b) + tile.key0;
  const int last = min_of(tile.last, tile.key_end - tile.key0);
  for (int n = 0; n < kVectors; ++n) {
    const I own = load(block.segment + tile.row + n * kLanes);
    for (int j = tile.first; j < last; ++j) {
      // A negative id is padding: never equal to a valid query's, and a negative query sees
      // nothing.
      const M same = both(equal(own, set(ids[j])), less(set(-1), own));
      float* s = tile.s + j * kLd + n * kLanes;
      store(s, select(same, load(s), minus_infinity()));
    }
  }
}

// 1 in every byte of x that is not 0.
ATTENTION_INLINE u64 nonzero_bytes(u64 x) {
  const u64 low = 0x7F7F7F7F7F7F7F7Full;
  return ((((x & low) + low) | x) >> 7) & 0x0101010101010101ull;
}

// Collects allow bits: byte [g][j] of the tile's scratch has a bit for each of the rows 8g .. 8g
// + 7. row_bytes(row, j, count) gives 8 bytes, one a key, non-zero where the row sees the key.
template <int kVectors, typename RowBytes>
ATTENTION_INLINE void collect_allow_bits(const ScoreTile& tile, const RowBytes& row_bytes) {
  constexpr int kRows = kVectors * kLanes;
  const int last = min_of(tile.last, tile.key_end - tile.key0);
  for (int j = tile.first; j < last; j += 8) {
    const int count = min_of(8, last - j);
    for (int g = 0; g < (kRows + 7) / 8; ++g) {
      u64 bits = 0;
      for (int r = 0; r < min_of(8, kRows); ++r)
        bits |= nonzero_bytes(row_bytes(tile.row + 8 * g + r, j, count)) << r;
      memcpy(tile.allow + g * tile.allow_stride + j, &bits, 8);
    }
  }
}

template <int kVectors>
inline void mask_by_allow_bits(const ScoreTile& tile) {
  constexpr int kLd = kVectors * kLanes;
  const int last = min_of(tile.last, tile.key_end - tile.key0);
  for (int j = tile.first; j < last; ++j)
    for (int n = 0; n < kVectors; ++n) {
      const int lane0 = n * kLanes;
      u32 bits = tile.allow[lane0 / 8 * tile.allow_stride + j];
      if (kLanes > 8) bits |= u32{tile.allow[(lane0 / 8 + 1) * tile.allow_stride + j]} << 8;
      bits >>= lane0 % 8;
      float* s = tile.s + j * kLd + lane0;
      store(s, select(mask_of_bits(bits), load(s), minus_infinity()));
    }
}

// The dense boolean mask.
template <int kVectors>
inline void mask_dense(const ScoreTile& tile) {
  const RowBlock& block = *tile.block;
  const ScoreOperand& mask = block.problem->mask;
  const u8* data = static_cast<const u8*>(mask.data);
  collect_allow_bits<kVectors>(tile, [&](int r, int j, int count) {
    const u8* row = data + mask.offset(block.b, block.head[r]) + block.query[r] * mask.row_stride;
    if (mask.col_stride == 0) return *row ? ~u64{0} : u64{0};
    u64 bytes = 0;
    if (count == 8) {
      memcpy(&bytes, row + tile.key0 + j, 8);
    } else {
      for (int i = 0; i < count; ++i) bytes |= u64{row[tile.key0 + j + i]} << (8 * i);
    }
    return bytes;
  });
  mask_by_allow_bits<kVectors>(tile);
}

// The block mask. key0 + first is a multiple of 8, so 8 keys never straddle two mask tiles.
template <int kVectors>
inline void mask_blocks(const ScoreTile& tile) {
  const RowBlock& block = *tile.block;
  const BlockMaskOperand& mask = block.problem->block_mask;
  collect_allow_bits<kVectors>(tile, [&](int r, int j, int) {
    const i32 i = block.query[r], key = tile.key0 + j;
    const i32 state = block_mask_state(mask, block.b, mask.head_stride ? block.head[r] : 0, i, key);
    if (state < 0) return state == kFullTile ? ~u64{0} : u64{0};
    const i32 column = key % kMaskTile;
    const u32 word =
        mask.bits[(i64{state} * kMaskTile + i % kMaskTile) * (kMaskTile / 32) + column / 32];
    const u64 byte = word >> (column % 32) & 0xFFu;
    return (byte * 0x0101010101010101ull) & 0x8040201008040201ull;
  });
  mask_by_allow_bits<kVectors>(tile);
}

// Everything between S = scale * Q K^T and the softmax.
template <int kVectors>
inline void apply_options(const ScoreTile& tile, Range all, float* tanh_out) {
  const Problem& p = *tile.block->problem;
  if (p.soft_cap != 0.f) apply_soft_cap<kVectors>(tile, tanh_out);
  if (p.bias.data) add_bias<kVectors>(tile);
  if (p.alibi_slopes.data) add_alibi<kVectors>(tile);
  // Only keys outside the interval that every row sees need the comparison.
  const int all_first = clamp_to(all.begin - tile.key0, tile.first, tile.last);
  const int all_last = clamp_to(all.end - tile.key0, all_first, tile.last);
  mask_intervals<kVectors>(tile, tile.first, all_first);
  mask_intervals<kVectors>(tile, all_last, tile.last);
  if (p.q_segments.data) mask_segments<kVectors>(tile);
  if (p.mask.data) mask_dense<kVectors>(tile);
  if (p.block_mask.index) mask_blocks<kVectors>(tile);
}

// Calls function(offset, keep) for every vector of the tile: offset of x[key][lane] in floats, and
// the lanes that dropout keeps. The counter RNG of dropout.h with rows in lanes: one Philox
// evaluation decides about 8 keys of kLanes rows.
template <int kVectors, typename Function>
ATTENTION_INLINE void for_each_dropout(const ScoreTile& tile, const Function& function) {
  constexpr int kLd = kVectors * kLanes;
  const RowBlock& block = *tile.block;
  const Dropout& dropout = block.problem->dropout;
  const u32* seed = dropout.seed.row(block.b);
  const I batch = set(static_cast<i32>(*dropout.batch_index.row(block.b)));
  const I below = set(static_cast<i32>(dropout.threshold) - 1);
  for (int n = 0; n < kVectors; ++n) {
    const int row = tile.row + n * kLanes;
    const I query = load(block.query + row);
    i32 heads[kLanes];
    for (int lane = 0; lane < kLanes; ++lane)
      heads[lane] = static_cast<i32>(dropout.head_index[block.head[row + lane]]);
    const I head = load(heads);
    for (int j = tile.first; j < tile.last; j += 8) {
      I c0 = set((tile.key0 + j) / 8), c1 = query, c2 = head, c3 = batch;
      u32 key0 = seed[0], key1 = seed[1];
      for (int round = 0; round < 10; ++round) {
        I high0, low0, high2, low2;
        multiply_wide(c0, 0xD2511F53u, high0, low0);
        multiply_wide(c2, 0xCD9E8D57u, high2, low2);
        c0 = high2 ^ c1 ^ set(static_cast<i32>(key0));
        c2 = high0 ^ c3 ^ set(static_cast<i32>(key1));
        c1 = low2;
        c3 = low0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
      }
      const I words[4] = {c0, c1, c2, c3};
      for (int i = 0; i < min_of(8, tile.last - j); ++i) {
        const I value = (I)((U)words[i / 2] >> (16 * (i % 2))) & set(0xFFFF);
        function((j + i) * kLd + n * kLanes, n, less(below, value));
      }
    }
  }
}

// P[key][lane] = 0 where dropout drops the entry, else P * keep_scale.
template <int kVectors>
inline void apply_dropout(const ScoreTile& tile) {
  const F factor = set(tile.block->problem->dropout.keep_scale);
  for_each_dropout<kVectors>(tile, [&](int offset, int, M keep) {
    store(tile.s + offset, select(keep, load(tile.s + offset) * factor, zero()));
  });
}

}  // namespace attention::cpu::ATTENTION_CPU_ISA
