// SPDX-License-Identifier: Apache-2.0
// The score policy of one block: what happens to q . k before the softmax (scale, soft cap, bias,
// ALiBi, mask) and to the probabilities after it (dropout), on the accumulator of one warp.
//
// A tile has queries on one axis and keys on the other; the dK/dV kernel computes the transposed
// tile, so every function takes kKeysAreRows. Each term is one pass over the accumulator with a
// uniform branch around it: a template for every combination would not build in reasonable time.
// Values that depend on the query alone or on the key alone are fetched once per row or column
// (compilers do not hoist those loads out of the element loop).
#pragma once

#include "kernels/common/dropout.h"
#include "kernels/common/mask.h"
#include "kernels/cuda/rows.h"

namespace attention {

// What all threads of a block agree on. Query rows of the block are numbered through: row r is
// position r / pack of head head0 + r % pack.
template <bool kPacked>
struct ScoreContext {
  const Problem* problem;
  i64 batch;
  i32 head0;
  i32 pack;
  RowMask mask;
  f32 scale;

  ATTENTION_DEVICE i32 position(i32 r) const { return kPacked ? r / pack : r; }
  ATTENTION_DEVICE i32 head(i32 r) const { return kPacked ? head0 + r % pack : head0; }
  // Positions of rows begin .. end-1.
  ATTENTION_DEVICE Range positions(Range rows) const {
    return {position(rows.begin), position(rows.end - 1) + 1};
  }
};

template <bool kPacked>
ATTENTION_DEVICE ScoreContext<kPacked> score_context(const Problem& p, i64 batch, i32 head0,
                                                     i32 pack) {
  ScoreContext<kPacked> ctx{&p, batch, head0, pack, row_mask(p, batch), p.scale};
  if (p.scale_array.data) ctx.scale = tile::global_load_constant(p.scale_array.row(batch))[0];
  return ctx;
}

// Calls f(x, of_query(q), of_key(k)) for each element of the accumulator whose first element is
// (query q0, key k0).
template <bool kKeysAreRows, int M, int N, typename OfQuery, typename OfKey, typename F>
ATTENTION_DEVICE void visit(tile::Accumulator<M, N>& s, i32 q0, i32 k0, OfQuery of_query,
                            OfKey of_key, F f) {
  using Acc = tile::Accumulator<M, N>;
  if constexpr (kKeysAreRows) {
    decltype(of_key(0)) keys[Acc::kRowSlots];
    ATTENTION_UNROLL
    for (int r = 0; r < Acc::kRowSlots; ++r) keys[r] = of_key(k0 + Acc::slot_row(r));
    ATTENTION_UNROLL
    for (int c = 0; c < Acc::kColSlots; ++c) {
      const auto query = of_query(q0 + Acc::slot_col(c));
      ATTENTION_UNROLL
      for (int r = 0; r < Acc::kRowSlots; ++r) f(s.at(r, c), query, keys[r]);
    }
  } else {
    decltype(of_query(0)) queries[Acc::kRowSlots];
    ATTENTION_UNROLL
    for (int r = 0; r < Acc::kRowSlots; ++r) queries[r] = of_query(q0 + Acc::slot_row(r));
    ATTENTION_UNROLL
    for (int c = 0; c < Acc::kColSlots; ++c) {
      const auto key = of_key(k0 + Acc::slot_col(c));
      ATTENTION_UNROLL
      for (int r = 0; r < Acc::kRowSlots; ++r) f(s.at(r, c), queries[r], key);
    }
  }
}

// visit without per-query and per-key values.
template <int M, int N, typename F>
ATTENTION_DEVICE void transform(tile::Accumulator<M, N>& s, F f) {
  using Acc = tile::Accumulator<M, N>;
  ATTENTION_UNROLL
  for (int r = 0; r < Acc::kRowSlots; ++r) {
    ATTENTION_UNROLL
    for (int c = 0; c < Acc::kColSlots; ++c) f(s.at(r, c));
  }
}

// Causal, window, lengths and prefix: entries that they forbid become -inf (also where the score is
// NaN: a select, no addition).
template <bool kKeysAreRows, bool kPacked, int M, int N>
ATTENTION_DEVICE void mask_positions(tile::Accumulator<M, N>& s, const ScoreContext<kPacked>& ctx,
                                     i32 q0, i32 k0) {
  const f32 minus_infinity = -tile::infinity();
  visit<kKeysAreRows>(
      s, q0, k0,
      [&](i32 q) {
        const i32 i = ctx.position(q);
        return Range{ctx.mask.begin(i), ctx.mask.end(i)};
      },
      [](i32 k) { return k; },
      [&](f32& x, Range keys, i32 k) {
        if (k < keys.begin || k >= keys.end) x = minus_infinity;
      });
}

namespace detail {

// One element of a floating operand whose dtype is known at run time. One pass with this branch in
// it compiles in a third of the time of a pass for each dtype.
ATTENTION_DEVICE f32 load_as_f32(const u8* p, DType dtype) {
  if (dtype == DType::kFloat32) {
    return tile::global_load_constant(reinterpret_cast<const f32*>(p))[0];
  }
  const u16 bits = tile::global_load_constant(reinterpret_cast<const u16*>(p))[0];
  return dtype == DType::kBFloat16 ? tile::to_f32(tile::bf16{bits}) : tile::to_f32(tile::f16{bits});
}

template <bool kKeysAreRows, bool kPacked, int M, int N>
ATTENTION_DEVICE void add_bias(tile::Accumulator<M, N>& s, const ScoreContext<kPacked>& ctx, i32 q0,
                               i32 k0) {
  const ScoreOperand& bias = ctx.problem->bias;
  const DType dtype = ctx.problem->bias_dtype;
  const i64 size = size_of(dtype);
  const u8* base = static_cast<const u8*>(bias.data) +
                   operand_batch(bias.batch, ctx.batch) * bias.batch_stride * size;
  const f32 minus_infinity = -tile::infinity();
  visit<kKeysAreRows>(
      s, q0, k0,
      [&](i32 q) -> const u8* {
        const i32 i = ctx.position(q);
        if (i >= ctx.mask.q_len) return nullptr;
        return base + (ctx.head(q) * bias.head_stride + i * bias.row_stride) * size;
      },
      [&](i32 k) { return k < ctx.mask.kv_len ? k * bias.col_stride * size : i64{-1}; },
      [&](f32& x, const u8* row, i64 col) {
        if (row == nullptr || col < 0) return;
        const f32 value = load_as_f32(row + col, dtype);
        // -inf is a mask: it also wins over a NaN score.
        x = value == minus_infinity ? minus_infinity : x + value;
      });
}

template <bool kKeysAreRows, bool kPacked, int M, int N>
ATTENTION_DEVICE void apply_dense_mask(tile::Accumulator<M, N>& s, const ScoreContext<kPacked>& ctx,
                                       i32 q0, i32 k0) {
  const ScoreOperand& mask = ctx.problem->mask;
  const u8* base =
      static_cast<const u8*>(mask.data) + operand_batch(mask.batch, ctx.batch) * mask.batch_stride;
  const f32 minus_infinity = -tile::infinity();
  visit<kKeysAreRows>(
      s, q0, k0,
      [&](i32 q) -> const u8* {
        const i32 i = ctx.position(q);
        if (i >= ctx.mask.q_len) return nullptr;
        return base + ctx.head(q) * mask.head_stride + i * mask.row_stride;
      },
      [&](i32 k) { return k < ctx.mask.kv_len ? k * mask.col_stride : i64{-1}; },
      [&](f32& x, const u8* row, i64 col) {
        if (row == nullptr || col < 0) return;
        if (tile::global_load_constant(row + col)[0] == 0) x = minus_infinity;
      });
}

template <bool kKeysAreRows, bool kPacked, int M, int N>
ATTENTION_DEVICE void apply_segments(tile::Accumulator<M, N>& s, const ScoreContext<kPacked>& ctx,
                                     i32 q0, i32 k0) {
  const i32* q_ids = ctx.problem->q_segments.row(ctx.batch);
  const i32* kv_ids = ctx.problem->kv_segments.row(ctx.batch);
  const f32 minus_infinity = -tile::infinity();
  visit<kKeysAreRows>(
      s, q0, k0,
      [&](i32 q) {
        const i32 i = ctx.position(q);
        const bool valid = i < ctx.mask.q_len;
        return tile::global_load_or(q_ids + (valid ? i : 0), valid, -1);
      },
      [&](i32 k) {
        const bool valid = k < ctx.mask.kv_len;
        return tile::global_load_or(kv_ids + (valid ? k : 0), valid, -1);
      },
      [&](f32& x, i32 q_id, i32 kv_id) {
        if (!same_segment(q_id, kv_id)) x = minus_infinity;
      });
}

// The tile lies inside one column of mask tiles: accumulators are at most 64 keys wide and start at
// a multiple of their width. (Transposed, keys are rows: 16 a warp, same argument.)
template <bool kKeysAreRows, bool kPacked, int M, int N>
ATTENTION_DEVICE void apply_block_mask(tile::Accumulator<M, N>& s, const ScoreContext<kPacked>& ctx,
                                       i32 q0, i32 k0) {
  static_assert(kMaskTile % (kKeysAreRows ? M : N) == 0, "a tile may not cross a mask tile");
  const BlockMaskOperand& m = ctx.problem->block_mask;
  if (k0 >= ctx.mask.kv_len) return;
  const i32* index = m.index + operand_batch(m.batch, ctx.batch) * m.batch_stride + k0 / kMaskTile;
  const f32 minus_infinity = -tile::infinity();
  // The 64 bits of a query's row of its mask tile.
  struct RowBits {
    u32 low, high;
  };
  visit<kKeysAreRows>(
      s, q0, k0,
      [&](i32 q) {
        const i32 i = ctx.position(q);
        if (i >= ctx.mask.q_len) return RowBits{0, 0};
        const i32 state = tile::global_load_constant(index + ctx.head(q) * m.head_stride +
                                                     i / kMaskTile * m.row_stride)[0];
        if (state == kFullTile) return RowBits{~0u, ~0u};
        if (state < 0) return RowBits{0, 0};
        const auto bits = tile::global_load_constant<2>(
            m.bits + (i64{state} * kMaskTile + i % kMaskTile) * (kMaskTile / 32));
        return RowBits{bits[0], bits[1]};
      },
      [](i32 k) { return k % kMaskTile; },
      [&](f32& x, RowBits bits, i32 bit) {
        const u32 word = bit < 32 ? bits.low : bits.high;
        if ((word >> (bit % 32) & 1u) == 0) x = minus_infinity;
      });
}

template <bool kKeysAreRows, bool kPacked, int M, int N>
ATTENTION_DEVICE void add_alibi(tile::Accumulator<M, N>& s, const ScoreContext<kPacked>& ctx,
                                i32 q0, i32 k0) {
  const f32* slopes = ctx.problem->alibi_slopes.row(ctx.batch);
  struct Query {
    f32 slope;
    i32 position;
  };
  visit<kKeysAreRows>(
      s, q0, k0,
      [&](i32 q) {
        const i32 i = ctx.position(q);
        const bool valid = i < ctx.mask.q_len;
        return Query{tile::global_load_or(slopes + ctx.head(q), valid, 0.f), i + ctx.mask.shift};
      },
      [](i32 k) { return k; },
      [](f32& x, Query query, i32 k) {
        x -= query.slope * tile::abs_f32(static_cast<f32>(query.position - k));
      });
}

}  // namespace detail

// Tanh of the capped score. 16-bit inputs tolerate the hardware's approximation (2^-11 relative)
// no more than f32 ones do: its error would be scaled by the cap, so the accurate one is used.
ATTENTION_DEVICE f32 capped_tanh(f32 scaled, f32 cap) { return tile::tanh_accurate(scaled / cap); }

// The general policy: q . k in, the masked score (natural units) out. `masked`: this tile needs the
// mask terms at all.
template <bool kKeysAreRows, bool kPacked, int M, int N>
ATTENTION_DEVICE void apply_score(tile::Accumulator<M, N>& s, const ScoreContext<kPacked>& ctx,
                                  i32 q0, i32 k0, bool masked) {
  const Problem& p = *ctx.problem;
  // The forward and the backward pass must agree on the score to the bit (backward_terms.h).
  transform(s, [&](f32& x) { x = tile::multiply(x, ctx.scale); });
  if (p.soft_cap > 0.f) {
    const f32 cap = p.soft_cap;
    transform(s, [&](f32& x) { x = cap * capped_tanh(x, cap); });
  }
  if (p.bias.data) detail::add_bias<kKeysAreRows>(s, ctx, q0, k0);
  if (p.alibi_slopes.data) detail::add_alibi<kKeysAreRows>(s, ctx, q0, k0);
  if (!masked) return;
  mask_positions<kKeysAreRows>(s, ctx, q0, k0);
  if (p.q_segments.data) detail::apply_segments<kKeysAreRows>(s, ctx, q0, k0);
  if (p.mask.data) detail::apply_dense_mask<kKeysAreRows>(s, ctx, q0, k0);
  if (p.block_mask.index) detail::apply_block_mask<kKeysAreRows>(s, ctx, q0, k0);
}

// Can a key be forbidden to all queries by a term that is not a range of positions? Then products
// with keys and values have to leave such keys out (product.h, kSelect).
ATTENTION_HOST_DEVICE constexpr bool has_scattered_mask(const Problem& p) {
  return p.mask.data || p.block_mask.index || p.q_segments.data || p.bias.data;
}

// The keep decisions of a thread's elements: bit row_slot * kColSlots + col_slot.
template <typename Acc>
struct KeepBits {
  static_assert(Acc::kRowSlots * Acc::kColSlots <= 64, "one bit an element");
  u64 bits = ~u64{0};
  ATTENTION_DEVICE bool operator()(int r, int c) const {
    return bits >> (r * Acc::kColSlots + c) & 1u;
  }
};

// One Philox call decides about 8 neighbouring keys of one query. Not transposed, they are the 8
// columns of a block, two of which are this thread's; transposed, the rows of 8 lanes, which all
// make the same call. The calls are a loop that collects bits: unrolled, they would be most of the
// kernel's code.
template <bool kKeysAreRows, typename Acc, bool kPacked>
ATTENTION_DEVICE KeepBits<Acc> dropout_keep(const ScoreContext<kPacked>& ctx, i32 q0, i32 k0) {
  const Dropout& dropout = ctx.problem->dropout;
  KeepBits<Acc> keep;
  if (dropout.threshold == 0) return keep;
  const auto seed = tile::global_load_constant<2>(dropout.seed.row(ctx.batch));
  const u32 batch_index = tile::global_load_constant(dropout.batch_index.row(ctx.batch))[0];
  constexpr int kPairs = kKeysAreRows ? 1 : 2;  // keys of a call that this thread holds
  constexpr int kCallsPerRow = Acc::kColSlots / kPairs;
  keep.bits = 0;
  ATTENTION_NO_UNROLL
  for (int call = 0; call < Acc::kRowSlots * kCallsPerRow; ++call) {
    const int r = call / kCallsPerRow;
    const int c = call % kCallsPerRow * kPairs;
    const i32 q = q0 + (kKeysAreRows ? Acc::slot_col(c) : Acc::slot_row(r));
    const u32 k = static_cast<u32>(k0 + (kKeysAreRows ? Acc::slot_row(r) : Acc::slot_col(c)));
    const u32 head_index = tile::global_load_constant(dropout.head_index + ctx.head(q))[0];
    const Philox words =
        dropout_words(seed.v, batch_index, head_index, static_cast<u32>(ctx.position(q)), k);
    for (int i = 0; i < kPairs; ++i) {
      const u64 kept = dropout_keeps(words, k + i, dropout.threshold);
      keep.bits |= kept << (r * Acc::kColSlots + c + i);
    }
  }
  return keep;
}

// Zeroes the entries that are dropped. The factor 1 / (1 - rate) is applied to sums.
template <int M, int N>
ATTENTION_DEVICE void apply_dropout(tile::Accumulator<M, N>& p,
                                    const KeepBits<tile::Accumulator<M, N>>& keep) {
  using Acc = tile::Accumulator<M, N>;
  ATTENTION_UNROLL
  for (int r = 0; r < Acc::kRowSlots; ++r) {
    ATTENTION_UNROLL
    for (int c = 0; c < Acc::kColSlots; ++c) {
      if (!keep(r, c)) p.at(r, c) = 0.f;
    }
  }
}

}  // namespace attention
