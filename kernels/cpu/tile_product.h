// SPDX-License-Identifier: Apache-2.0
// The matrix products of product.h on matrix tiles: blocks of 32 x 32 sums in four registers, so
// that every loaded operand is used twice. Sizes that are summed over come padded with zeros to
// whole tiles.
#pragma once

#include "kernels/cpu/format.h"
#include "kernels/cpu/tile_registers.h"

namespace attention::cpu::ATTENTION_CPU_ISA {

inline constexpr int kTileBlock = 2 * kTileSide;  // rows or columns of a block of sums

// Elements of 32 packed rows of `d` numbers, in whole tiles.
ATTENTION_INLINE int tile_step(int d) { return round_up(d, kTileSide) * kTileSide; }

// C[kRowTiles * 16][kColumnTiles * 16] in registers 0 to 3, as long as it lives.
template <int kRowTiles, int kColumnTiles>
struct TileBlock {
  static ATTENTION_INLINE void zero() {
    zero_tile<0>();
    if constexpr (kColumnTiles > 1) zero_tile<1>();
    if constexpr (kRowTiles > 1) zero_tile<2>();
    if constexpr (kRowTiles > 1 && kColumnTiles > 1) zero_tile<3>();
  }
  static ATTENTION_INLINE void load(const float* c, i64 pitch) {
    load_tile<0>(c, pitch);
    if constexpr (kColumnTiles > 1) load_tile<1>(c + kTileSide, pitch);
    if constexpr (kRowTiles > 1) load_tile<2>(c + kTileSide * pitch, pitch);
    if constexpr (kRowTiles > 1 && kColumnTiles > 1)
      load_tile<3>(c + kTileSide * pitch + kTileSide, pitch);
  }
  static ATTENTION_INLINE void store(float* c, i64 pitch) {
    store_tile<0>(c, pitch);
    if constexpr (kColumnTiles > 1) store_tile<1>(c + kTileSide, pitch);
    if constexpr (kRowTiles > 1) store_tile<2>(c + kTileSide * pitch, pitch);
    if constexpr (kRowTiles > 1 && kColumnTiles > 1)
      store_tile<3>(c + kTileSide * pitch + kTileSide, pitch);
  }
  // C += A B over 16 pairs. a_next, b_next: from a register's first element to the next one's.
  static ATTENTION_INLINE void multiply(const u32* a, i64 a_pitch, i64 a_next, const u32* b,
                                        i64 b_pitch, i64 b_next) {
    load_tile<6>(b, b_pitch);
    load_tile<4>(a, a_pitch);
    multiply_tiles<0, 4, 6>();
    if constexpr (kColumnTiles > 1) {
      load_tile<7>(b + b_next, b_pitch);
      multiply_tiles<1, 4, 7>();
    }
    if constexpr (kRowTiles > 1) {
      load_tile<5>(a + a_next, a_pitch);
      multiply_tiles<2, 5, 6>();
    }
    if constexpr (kRowTiles > 1 && kColumnTiles > 1) multiply_tiles<3, 5, 7>();
  }
};

// Calls function(first row, number of register rows of tiles) for `rows`, a multiple of 16.
template <typename Function>
ATTENTION_INLINE void for_each_tile_block(int rows, const Function& function) {
  int m = 0;
  for (; m + kTileBlock <= rows; m += kTileBlock) function(m, Constant<2>{});
  if (m < rows) function(m, Constant<1>{});
}

// S^T[key][lane] of the 32 packed rows of K at `k` into `s`, unscaled.
template <int kVectors>
ATTENTION_INLINE void score_tiles(const u32* k, int k_pitch, int d, const u32* q_t, float* s) {
  constexpr int kLd = kVectors * kLanes;
  using Block = TileBlock<2, kVectors>;
  Block::zero();
  for (int pair = 0; 2 * pair < d; pair += kTileSide)
    Block::multiply(k + pair, k_pitch, i64{kTileSide} * k_pitch, q_t + pair * kLd, kLd, kTileSide);
  Block::store(s, kLd);
}

// O^T[d][lane] += sum_key V[key][d] P[key][lane] for `keys`, a multiple of 32, and `dims`, a
// multiple of 16. `v`: tiles of V^T [key / 32][d][16 pairs of keys], `v_step` elements from one 32
// keys to the next.
template <int kVectors>
inline void value_tiles(const u32* v, int v_step, int keys, int dims, const u32* p, float* o_t) {
  constexpr int kLd = kVectors * kLanes;
  for_each_tile_block(dims, [&](int m, auto row_tiles) {
    using Block = TileBlock<decltype(row_tiles)::value, kVectors>;
    Block::load(o_t + m * kLd, kLd);
    for (int chunk = 0; chunk < keys / kTileBlock; ++chunk)
      Block::multiply(v + chunk * v_step + m * kTileSide, kTileSide, kTileElements,
                      p + chunk * kTileSide * kLd, kLd, kTileSide);
    Block::store(o_t + m * kLd, kLd);
  });
}

}  // namespace attention::cpu::ATTENTION_CPU_ISA
