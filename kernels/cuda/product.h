// SPDX-License-Identifier: Apache-2.0
// Matrix products of one warp over whole tiles: accumulator += A * B, operands in shared memory or
// in an accumulator.
#pragma once

#include "kernels/cuda/tile/tile.h"

namespace attention {

// acc += A B^T with A = rows row0.. of `a` [m][k] and B = rows n0.. of `b` [n][k]; k runs over all
// columns. Scores: queries times keys. kTransposed: keys times queries, with the bits that queries
// times keys give.
template <tile::F32Products kProducts, bool kTransposed = false, int M, int N, typename T, int RA,
          int RB, int C>
ATTENTION_DEVICE void multiply(tile::Accumulator<M, N>& acc, const tile::SharedTile<T, RA, C>& a,
                               int row0, const tile::SharedTile<T, RB, C>& b, int n0) {
  constexpr int kStep = tile::kMmaK<T>;
  ATTENTION_UNROLL
  for (int k = 0; k < C; k += kStep) {
    tile::AFragment<T> left[M / 16];
    ATTENTION_UNROLL
    for (int m = 0; m < M / 16; ++m) left[m] = tile::load_a(a, row0 + 16 * m, k);
    ATTENTION_UNROLL
    for (int n = 0; n < N; n += 16) {
      tile::BFragment<T> right[2];
      tile::load_b(right, b, n0 + n, k);
      ATTENTION_UNROLL
      for (int m = 0; m < M / 16; ++m) {
        tile::mma<kProducts, kTransposed>(&acc.block[m][n / 8], left[m], right);
      }
    }
  }
}

// Bit c of the result: column slot c of the accumulator is non-zero in at least one row of the
// warp.
template <int M, int K>
ATTENTION_DEVICE u32 live_columns(const tile::Accumulator<M, K>& p) {
  using Acc = tile::Accumulator<M, K>;
  static_assert(Acc::kColSlots <= 32, "one bit a column slot");
  u32 live = 0;
  ATTENTION_UNROLL
  for (int c = 0; c < Acc::kColSlots; ++c) {
    bool any = false;
    ATTENTION_UNROLL
    for (int r = 0; r < Acc::kRowSlots; ++r) any = any || p.at(r, c) != 0.f;
    live |= static_cast<u32>(any) << c;
  }
  // Lanes that share lane % 4 hold the other rows of the same columns.
  ATTENTION_UNROLL
  for (int mask = 4; mask < 32; mask *= 2) live |= tile::shuffle_xor(live, mask);
  return live;
}

// The k slots of a B fragment whose column of P is not live, set to zero.
template <typename T>
ATTENTION_DEVICE void clear_dead(tile::BFragment<T, tile::kPackedOrder<T>>& b, u32 live,
                                 int k_block) {
  if constexpr (sizeof(T) == 2) {
    const u32 bits = live >> (4 * k_block);
    b.reg[0] &= (bits & 1u ? 0xFFFFu : 0u) | (bits & 2u ? 0xFFFF0000u : 0u);
    b.reg[1] &= (bits & 4u ? 0xFFFFu : 0u) | (bits & 8u ? 0xFFFF0000u : 0u);
  } else {
    const u32 bits = live >> (2 * k_block);
    b.reg[0] = bits & 1u ? b.reg[0] : 0u;
    b.reg[1] = bits & 2u ? b.reg[1] : 0u;
  }
}

// acc += P B with P an accumulator, rounded to T, and B = rows k0 .. k0+K-1 of `b` [k][n].
//
// kSelect: rows of B whose whole column of P is zero take no part, so that NaN or Inf in a key or
// value that nobody may attend to cannot come through as 0 * NaN.
template <tile::F32Products kProducts, bool kSelect, int M, int N, int K, typename T, int RB, int C>
ATTENTION_DEVICE void multiply_packed(tile::Accumulator<M, N>& acc,
                                      const tile::Accumulator<M, K>& p,
                                      const tile::SharedTile<T, RB, C>& b, int k0) {
  constexpr int kStep = tile::kMmaK<T>;
  const u32 live = kSelect ? live_columns(p) : 0;
  ATTENTION_UNROLL
  for (int k = 0; k < K; k += kStep) {
    tile::AFragment<T, tile::kPackedOrder<T>> left[M / 16];
    ATTENTION_UNROLL
    for (int m = 0; m < M / 16; ++m) left[m] = tile::pack_a<T>(p, m, k / kStep);
    ATTENTION_UNROLL
    for (int n = 0; n < N; n += 16) {
      tile::BFragment<T, tile::kPackedOrder<T>> right[2];
      tile::load_b_transposed(right, b, k0 + k, n);
      if constexpr (kSelect) {
        clear_dead<T>(right[0], live, k / kStep);
        clear_dead<T>(right[1], live, k / kStep);
      }
      ATTENTION_UNROLL
      for (int m = 0; m < M / 16; ++m) {
        tile::mma<kProducts>(&acc.block[m][n / 8], left[m], right);
      }
    }
  }
}

}  // namespace attention
