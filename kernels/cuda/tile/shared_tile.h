// SPDX-License-Identifier: Apache-2.0
// Swizzled matrices in shared memory, and the loads that turn them into fragments.
//
// A row is a sequence of 16-byte chunks. ldmatrix reads one chunk of 8 consecutive rows at a time,
// and the 8 chunks must lie in 8 different groups of 4 banks (the address modulo 128 bytes). With g
// the largest power of two, at most 8, that divides the chunks per row, chunk c of row r is kept at
// position c ^ ((r * g / 8) % g): any 8 rows starting at a multiple of 8 then meet each bank group
// once, for every row length. The same holds for whole rows written 16 bytes at a time and for
// accumulators written as pairs of 16-bit values.
#pragma once

#include "kernels/cuda/tile/async_copy.h"
#include "kernels/cuda/tile/config.h"
#include "kernels/cuda/tile/memory.h"
#include "kernels/cuda/tile/mma.h"
#include "kernels/cuda/tile/thread.h"

namespace attention::tile {

// Rows x Cols matrix of T in shared memory, row-major with swizzled chunks. Cols is a multiple of
// 16 bytes.
template <typename T_, int Rows, int Cols>
struct SharedTile {
  using T = T_;
  static constexpr int kRows = Rows;
  static constexpr int kCols = Cols;
  static constexpr int kChunk = 16 / static_cast<int>(sizeof(T));  // elements in 16 bytes
  static constexpr int kChunks = Cols / kChunk;                    // chunks in a row
  static constexpr int kSize = Rows * Cols;
  static constexpr int kBytes = shared_bytes<T>(kSize);
  static_assert(Cols % kChunk == 0, "a row is a whole number of 16-byte chunks");

  Shared<T> base;

  ATTENTION_DEVICE static SharedTile take(Smem& smem) { return SharedTile{smem.take<T>(kSize)}; }

  // Largest power of two that divides the chunks per row, at most 8.
  ATTENTION_HOST_DEVICE static constexpr int swizzle_span() {
    const int lowest_bit = kChunks & -kChunks;
    return lowest_bit < 8 ? lowest_bit : 8;
  }

  // Position, in chunks, of chunk `chunk` of row `row`.
  ATTENTION_HOST_DEVICE static constexpr int chunk_position(int row, int chunk) {
    constexpr int kSpan = swizzle_span();
    return row * kChunks + (chunk ^ ((row / (8 / kSpan)) % kSpan));
  }

  // Address of a chunk.
  ATTENTION_DEVICE Shared<T> chunk(int row, int chunk) const {
    return base + chunk_position(row, chunk) * kChunk;
  }

  // Address of an element. Only the elements of one chunk are neighbours.
  ATTENTION_DEVICE Shared<T> at(int row, int col) const {
    return base + (chunk_position(row, col / kChunk) * kChunk + col % kChunk);
  }
};

namespace detail {

// Four 8 x 16-byte matrices: lane l gives the address of row l % 8 of matrix l / 8, and receives in
// reg[i], for each matrix i, the 4 bytes at row lane / 4, byte 4 * (lane % 4).
template <typename T>
ATTENTION_DEVICE void load_matrices(u32 (&reg)[4], Shared<T> row) {
#if ATTENTION_ON_GPU
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(reg[0]), "=r"(reg[1]), "=r"(reg[2]), "=r"(reg[3])
               : "r"(window_address(row))
               : "memory");
#else
  emulator::load_matrices(reg, row.p, false);
#endif
}

// The same with each 8 x 8 matrix of 16-bit elements transposed: reg[i] holds elements (2t, g) and
// (2t+1, g) of matrix i.
template <typename T>
ATTENTION_DEVICE void load_matrices_transposed(u32 (&reg)[4], Shared<T> row) {
  static_assert(sizeof(T) == 2, "ldmatrix.trans moves 16-bit elements");
#if ATTENTION_ON_GPU
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(reg[0]), "=r"(reg[1]), "=r"(reg[2]), "=r"(reg[3])
               : "r"(window_address(row))
               : "memory");
#else
  emulator::load_matrices(reg, row.p, true);
#endif
}

template <typename T>
ATTENTION_DEVICE u32 load_bits(Shared<T> s) {
  return f32_to_bits(shared_load(s)[0]);
}

// k of slot 0 and slot 1 of lane quarter t, for f32 fragments.
template <KOrder Order>
ATTENTION_DEVICE int k_of_slot(int t, int slot) {
  return Order == KOrder::kPaired ? 2 * t + slot : t + 4 * slot;
}

}  // namespace detail

// Operand A from a tile stored [row m][k]: rows m0..m0+15, k0..k0+kMmaK-1. m0 is a multiple of 8,
// k0 of a chunk.
template <typename T, int R, int C>
ATTENTION_DEVICE AFragment<T> load_a(const SharedTile<T, R, C>& tile, int m0, int k0) {
  AFragment<T> a;
  const int lane = lane_index();
  const int matrix = lane / 8;
  detail::load_matrices(a.reg, tile.chunk(m0 + lane % 8 + (matrix % 2) * 8,
                                          k0 / SharedTile<T, R, C>::kChunk + matrix / 2));
  return a;
}

// Two neighbouring B operands from a tile stored [column n][k] (K for q k^T): columns n0..n0+7 and
// n0+8..n0+15.
template <typename T, int R, int C>
ATTENTION_DEVICE void load_b(BFragment<T> (&b)[2], const SharedTile<T, R, C>& tile, int n0,
                             int k0) {
  const int lane = lane_index();
  const int matrix = lane / 8;
  u32 reg[4];
  detail::load_matrices(reg, tile.chunk(n0 + lane % 8 + (matrix / 2) * 8,
                                        k0 / SharedTile<T, R, C>::kChunk + matrix % 2));
  ATTENTION_UNROLL
  for (int i = 0; i < 2; ++i) {
    b[i].reg[0] = reg[2 * i];
    b[i].reg[1] = reg[2 * i + 1];
  }
}

// Two neighbouring B operands from a tile stored [k][column n] (V for p v): columns n0..n0+7 and
// n0+8..n0+15. Its k order is the one of pack_a. f32 has no transposing ldmatrix: it is read
// element by element, without bank conflicts in the paired order.
template <typename T, int R, int C>
ATTENTION_DEVICE void load_b_transposed(BFragment<T, kPackedOrder<T>> (&b)[2],
                                        const SharedTile<T, R, C>& tile, int k0, int n0) {
  const int lane = lane_index();
  if constexpr (sizeof(T) == 2) {
    const int matrix = lane / 8;
    u32 reg[4];
    detail::load_matrices_transposed(reg,
                                     tile.chunk(k0 + lane % 8 + (matrix % 2) * 8,
                                                n0 / SharedTile<T, R, C>::kChunk + matrix / 2));
    ATTENTION_UNROLL
    for (int i = 0; i < 2; ++i) {
      b[i].reg[0] = reg[2 * i];
      b[i].reg[1] = reg[2 * i + 1];
    }
  } else {
    ATTENTION_UNROLL
    for (int i = 0; i < 2; ++i) {
      ATTENTION_UNROLL
      for (int slot = 0; slot < 2; ++slot) {
        b[i].reg[slot] = detail::load_bits(tile.at(
            k0 + detail::k_of_slot<kPackedOrder<T>>(lane % 4, slot), n0 + 8 * i + lane / 4));
      }
    }
  }
}

// Operand A from a tile stored [k][row m]: rows m0..m0+15. Its k order is the one of
// load_b_transposed.
template <typename T, int R, int C>
ATTENTION_DEVICE AFragment<T, kPackedOrder<T>> load_a_transposed(const SharedTile<T, R, C>& tile,
                                                                 int k0, int m0) {
  AFragment<T, kPackedOrder<T>> a;
  const int lane = lane_index();
  if constexpr (sizeof(T) == 2) {
    const int matrix = lane / 8;
    detail::load_matrices_transposed(a.reg,
                                     tile.chunk(k0 + lane % 8 + (matrix / 2) * 8,
                                                m0 / SharedTile<T, R, C>::kChunk + matrix % 2));
  } else {
    ATTENTION_UNROLL
    for (int i = 0; i < 4; ++i) {
      a.reg[i] = detail::load_bits(tile.at(k0 + detail::k_of_slot<kPackedOrder<T>>(lane % 4, i / 2),
                                           m0 + lane / 4 + 8 * (i % 2)));
    }
  }
  return a;
}

// Operand A in the k order of load_b_transposed from a tile stored [row m][k]. The same as load_a
// for 16-bit types; f32 is read 8 bytes at a time (two-way bank conflicts).
template <typename T, int R, int C>
ATTENTION_DEVICE AFragment<T, kPackedOrder<T>> load_a_packed(const SharedTile<T, R, C>& tile,
                                                             int m0, int k0) {
  if constexpr (sizeof(T) == 2) {
    return load_a(tile, m0, k0);
  } else {
    AFragment<T, kPackedOrder<T>> a;
    const int lane = lane_index();
    ATTENTION_UNROLL
    for (int half = 0; half < 2; ++half) {
      const Vec<T, 2> pair = shared_load<2>(tile.at(m0 + lane / 4 + 8 * half, k0 + 2 * (lane % 4)));
      a.reg[half] = f32_to_bits(pair[0]);
      a.reg[2 + half] = f32_to_bits(pair[1]);
    }
    return a;
  }
}

// Writes an accumulator to a tile at (row0, col0), rounded to T: two neighbouring columns at a
// time.
template <typename T, int R, int C, int M, int N>
ATTENTION_DEVICE void store_accumulator(const SharedTile<T, R, C>& tile, int row0, int col0,
                                        const Accumulator<M, N>& acc) {
  using Acc = Accumulator<M, N>;
  ATTENTION_UNROLL
  for (int r = 0; r < Acc::kRowSlots; ++r) {
    ATTENTION_UNROLL
    for (int c = 0; c < Acc::kColSlots; c += 2) {
      const Shared<T> to = tile.at(row0 + Acc::slot_row(r), col0 + Acc::slot_col(c));
      if constexpr (sizeof(T) == 2) {
        shared_store(to.template as<u32>(), pack2<T>(acc.at(r, c), acc.at(r, c + 1)));
      } else {
        shared_store(to, Vec<T, 2>{{acc.at(r, c), acc.at(r, c + 1)}});
      }
    }
  }
}

}  // namespace attention::tile
