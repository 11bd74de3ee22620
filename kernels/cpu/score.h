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

// Sets the keys [first, last) of the tile to those of [key0, key_end) that some of its rows see,
// from a multiple of Format::kFirstStep on and up to one of kLastStep, and `all` to the keys that
// all of its rows see. False where no row sees any.
template <typename Format, int kVectors>
ATTENTION_INLINE bool find_keys(ScoreTile* tile, Range* all) {
  constexpr int kLd = kVectors * kLanes;
  const RowBlock& block = *tile->block;
  const TileRange range = range_of_rows(block, tile->row, kLd);
  const i32 low = max_of(range.some.begin, tile->key0);
  const i32 high = min_of(range.some.end, tile->key_end);
  if (low >= high) return false;
  if (block_mask_hides(block, tile->row, min_of(kLd, block.rows - tile->row), {low, high}))
    return false;
  tile->first = (low - tile->key0) / Format::kFirstStep * Format::kFirstStep;
  tile->last = round_up(high - tile->key0, Format::kLastStep);
  *all = range.all;
  return true;
}

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

// 16 bytes, one a key.
typedef u8 KeyBytes __attribute__((vector_size(16)));

// Collects allow bits: byte [g][j] of the tile's scratch has a bit for each of the rows 8g .. 8g
// + 7. row_bytes(row, j, count) gives a byte for each of `count` <= 16 keys, non-zero where the row
// sees it.
template <int kVectors, typename RowBytes>
ATTENTION_INLINE void collect_allow_bits(const ScoreTile& tile, const RowBytes& row_bytes) {
  constexpr int kRows = kVectors * kLanes, kGroupRows = kRows < 8 ? kRows : 8;
  const int last = min_of(tile.last, tile.key_end - tile.key0);
  for (int j = tile.first; j < last; j += 16) {
    const int count = min_of(16, last - j);
    for (int g = 0; g < (kRows + 7) / 8; ++g) {
      KeyBytes bits{};
#pragma GCC unroll 8
      for (int r = 0; r < kGroupRows; ++r) {
        KeyBytes bit;
        memset(&bit, 1 << r, sizeof(bit));
        bits |= (KeyBytes)(row_bytes(tile.row + 8 * g + r, j, count) != KeyBytes{}) & bit;
      }
      // The scratch holds a multiple of 8 keys.
      memcpy(tile.allow + g * tile.allow_stride + j, &bits, j + 16 <= tile.allow_stride ? 16 : 8);
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
  const u8* rows[kVectors * kLanes];
  for (int r = 0; r < kVectors * kLanes; ++r)
    rows[r] = static_cast<const u8*>(mask.data) + mask.offset(block.b, block.head[tile.row + r]) +
              block.query[tile.row + r] * mask.row_stride + tile.key0 * mask.col_stride;
  collect_allow_bits<kVectors>(tile, [&](int r, int j, int count) {
    const u8* row = rows[r - tile.row];
    KeyBytes bytes{};
    if (mask.col_stride == 0) {
      memset(&bytes, *row, 16);
    } else if (count == 16) {
      memcpy(&bytes, row + j, 16);
    } else {
      memcpy(&bytes, row + j, static_cast<size_t>(count));
    }
    return bytes;
  });
  mask_by_allow_bits<kVectors>(tile);
}

// The block mask.
template <int kVectors>
inline void mask_blocks(const ScoreTile& tile) {
  constexpr int kLd = kVectors * kLanes;
  const RowBlock& block = *tile.block;
  const BlockMaskOperand& mask = block.problem->block_mask;
  const i32* rows[kVectors * kLanes];
  for (int r = 0; r < kVectors * kLanes; ++r)
    rows[r] = mask.index + mask.batch(block.b) * mask.batch_stride +
              block.head[tile.row + r] * mask.head_stride +
              block.query[tile.row + r] / kMaskTile * mask.row_stride;
  // Full tiles, most of a block mask, need no bits.
  const i32 first_tile = (tile.key0 + tile.first) / kMaskTile,
            last_tile = (min_of(tile.key0 + tile.last, tile.key_end) - 1) / kMaskTile;
  bool full = true;
  for (int r = 0; r < kVectors * kLanes && full; ++r)
    for (i32 c = first_tile; c <= last_tile; ++c) full = full && rows[r][c] == kFullTile;
  if (full) return;
  // 32 keys at a time: a word of bits for each row in lanes, and each key's bit in turn in the
  // sign.
  const int last = min_of(tile.last, tile.key_end - tile.key0);
  for (int j = tile.first; j < last;) {
    const i32 key = tile.key0 + j, column = key % kMaskTile, bit = column % 32;
    const int count = min_of(32 - bit, last - j);
    for (int n = 0; n < kVectors; ++n) {
      i32 words[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) {
        const int r = n * kLanes + lane;
        const i32 state = rows[r][key / kMaskTile];
        words[lane] = state == kFullTile ? -1 : 0;
        if (state >= 0) {
          const i64 at = i64{state} * kMaskTile + block.query[tile.row + r] % kMaskTile;
          words[lane] = static_cast<i32>(mask.bits[at * (kMaskTile / 32) + column / 32]);
        }
      }
      const I word = load(words);
      float* s = tile.s + j * kLd + n * kLanes;
      for (int i = 0; i < count; ++i, s += kLd)
        store(s, select(negative(word << (31 - bit - i)), load(s), minus_infinity()));
    }
    j += count;
  }
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

// Hides the keys from the end of the block on: where tiles are taller than 8 keys, keys of the next
// block or split, which the rows may see.
template <int kVectors>
inline void hide_padding(const ScoreTile& tile) {
  constexpr int kLd = kVectors * kLanes;
  for (int at = (tile.key_end - tile.key0) * kLd; at < tile.last * kLd; at += kLanes)
    store(tile.s + at, minus_infinity());
}

// The multipliers and key steps of Philox (dropout.h).
inline constexpr u32 kPhiloxC0 = 0xD2511F53u, kPhiloxC2 = 0xCD9E8D57u;
inline constexpr u32 kPhiloxKey0 = 0x9E3779B9u, kPhiloxKey1 = 0xBB67AE85u;

// Calls function(offset, keep) for every vector of the tile: offset of x[key][lane] in floats, and
// the lanes that dropout keeps. The counter RNG of dropout.h with rows in lanes: one Philox
// evaluation decides about 8 keys of kLanes rows.
//
// Its ten rounds are a chain of some 80 clocks: the tile's vectors advance together. The first two
// rounds multiply only numbers that all rows or all keys share: c0 = key / 8 and what it becomes
// are the same for every row, the head and what it becomes for every key.
template <int kVectors, typename Function>
ATTENTION_INLINE void for_each_dropout(const ScoreTile& tile, const Function& function) {
  constexpr int kLd = kVectors * kLanes;
  const RowBlock& block = *tile.block;
  const Dropout& dropout = block.problem->dropout;
  const u32* seed = dropout.seed.row(block.b);
  const u32 batch = *dropout.batch_index.row(block.b);
  const I below = set(static_cast<i32>(dropout.threshold) - 1);
  I head_low[kVectors], query_high[kVectors], query_low[kVectors];
  for (int n = 0; n < kVectors; ++n) {
    const int row = tile.row + n * kLanes;
    i32 heads[kLanes];
    for (int lane = 0; lane < kLanes; ++lane)
      heads[lane] = static_cast<i32>(dropout.head_index[block.head[row + lane]]);
    I head_high;
    multiply_wide(load(heads), kPhiloxC2, head_high, head_low[n]);
    multiply_wide(head_high ^ load(block.query + row) ^ set(static_cast<i32>(seed[0])), kPhiloxC0,
                  query_high[n], query_low[n]);
  }
  for (int j = tile.first; j < tile.last; j += 8) {
    u32 key0 = seed[0] + kPhiloxKey0, key1 = seed[1] + kPhiloxKey1;
    const u64 first = u64{static_cast<u32>(tile.key0 + j) / 8} * kPhiloxC0;
    const u64 second = u64{static_cast<u32>(first >> 32) ^ batch ^ seed[1]} * kPhiloxC2;
    I c[4][kVectors];
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) {
      c[0][n] = head_low[n] ^ set(static_cast<i32>(static_cast<u32>(second >> 32) ^ key0));
      c[1][n] = set(static_cast<i32>(static_cast<u32>(second)));
      c[2][n] = query_high[n] ^ set(static_cast<i32>(static_cast<u32>(first) ^ key1));
      c[3][n] = query_low[n];
    }
#pragma GCC unroll 8
    for (int round = 2; round < 10; ++round) {
      key0 += kPhiloxKey0;
      key1 += kPhiloxKey1;
#pragma GCC unroll 4
      for (int n = 0; n < kVectors; ++n) {
        I high0, low0, high2, low2;
        multiply_wide(c[0][n], kPhiloxC0, high0, low0);
        multiply_wide(c[2][n], kPhiloxC2, high2, low2);
        c[0][n] = high2 ^ c[1][n] ^ set(static_cast<i32>(key0));
        c[2][n] = high0 ^ c[3][n] ^ set(static_cast<i32>(key1));
        c[1][n] = low2;
        c[3][n] = low0;
      }
    }
    const int count = min_of(8, tile.last - j);
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) {
      const I words[4] = {c[0][n], c[1][n], c[2][n], c[3][n]};
      for (int i = 0; i < count; ++i) {
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
