// SPDX-License-Identifier: Apache-2.0
// Register-tiled matrix products C[m][n] (+)= sum_k A[m][k] B[k][n], with n in SIMD lanes and A
// read by broadcast. A is read in its natural layout through two compile-time strides, so neither K
// nor V is ever transposed.
#pragma once

#include "kernels/cpu/tile_product.h"

namespace attention::cpu::ATTENTION_CPU_ISA {

// Lanes of one row tile of the score matrix: two vectors.
inline constexpr int kRowTile = 2 * kLanes;

// Distance between the rows of packed K, V, Q and dO, in floats: room for the largest head
// dimension, at a compile-time constant, and whole vectors more, 16.5 or 17 cache lines, so that a
// column walk spreads over all cache sets.
inline constexpr int kPitch = kMaxHeadDim + (kLanes == 16 ? 16 : 8);

// Packed rows [row][d], twice where elements hold more than one number: once with neighbours along
// d in an element, for sums over d, once with neighbouring rows, for sums over rows.
//
// For matrix tiles, by_row holds whole tiles: see pack_by_row.
template <typename Format>
struct Panel {
  using Element = typename Format::Element;
  static constexpr int kDepth = Format::kDepth;
  static constexpr int kRowPitch = Format::kTiled ? kMaxHeadDim / 2 + 16 : kPitch / kDepth;

  Panel() = default;
  Panel(void* base, i64 rows)
      : by_d(static_cast<Element*>(base)), by_row(kDepth == 1 ? by_d : by_d + rows * kRowPitch) {}

  // by_row from row `row` on, a multiple of Format::kFirstStep.
  Element* rows_from(int row, int d) const {
    if constexpr (Format::kTiled) return by_row + row / kTileBlock * tile_step(d);
    return by_row + row / kDepth * kPitch;
  }

  Element* by_d = nullptr;    // [row][kRowPitch]
  Element* by_row = nullptr;  // [row / kDepth][kPitch], or tiles
};

// acc[m][n] += sum_k a[m * kAm + k * kAk] * b[k * kLdb + n * kLanes ..], over k elements.
template <typename Format, int kRows, int kVectors, int kAm, int kAk, int kLdb>
ATTENTION_INLINE void accumulate(const typename Format::Element* a,
                                 const typename Format::Element* b, int k,
                                 F (&acc)[kRows][kVectors]) {
#pragma GCC unroll 2
  for (; k > 0; --k) {
    F column[kVectors];
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) column[n] = load(b + n * kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const F broadcast = Format::broadcast(a[m * kAm]);
#pragma GCC unroll 4
      for (int n = 0; n < kVectors; ++n)
        acc[m][n] = Format::multiply_add(broadcast, column[n], acc[m][n]);
    }
    a += kAk;
    b += kLdb;
  }
}

// Splits `rows` (a multiple of kRowStep) into register tiles: function(first row, integral constant
// number of rows).
template <typename Function>
ATTENTION_INLINE void for_each_tile(int rows, const Function& function) {
  int m = 0;
  if constexpr (kTileRows == kRowStep) {
    for (; m < rows; m += kTileRows) function(m, Constant<kTileRows>{});
  } else {
    while (m < rows) {
      const int left = rows - m;
      if (left == kRowStep || left == 2 * kRowStep) {
        function(m, Constant<kRowStep>{});
        m += kRowStep;
      } else {
        function(m, Constant<kTileRows>{});
        m += kTileRows;
      }
    }
  }
}

// Calls function(first row, number of vectors): tiles of two vectors, and one of one vector where
// that is enough for the last rows.
template <typename Function>
ATTENTION_INLINE void for_each_row_tile(int rows, const Function& function) {
  int row = 0;
  for (; rows - row > kLanes; row += kRowTile) function(row, Constant<2>{});
  if (row < rows) function(row, Constant<1>{});
}

// What a product does between its register tiles: nothing.
struct NothingBetween {
  ATTENTION_INLINE void operator()() const {}
};

// S^T[key][lane] = factor * sum_d K[key][d] Q^T[d][lane], for `keys` packed rows of K (by_d).
template <typename Format, int kVectors, typename Between = NothingBetween>
inline void score_product(const typename Format::Element* k, int keys, int d,
                          const typename Format::Element* q_t, float factor, float* s,
                          const Between& between = {}) {
  constexpr int kLd = kVectors * kLanes, kRowPitch = Panel<Format>::kRowPitch;
  if constexpr (Format::kTiled) {
    for (int m = 0; m < keys; m += kTileBlock)
      score_tiles<kVectors>(k + m * kRowPitch, kRowPitch, d, q_t, s + m * kLd);
    if (factor != 1.f)
      for (int at = 0; at < keys * kLd; at += kLanes) store(s + at, load(s + at) * set(factor));
    return;
  }
  const int depth = ceil_div(d, Format::kDepth);
  for_each_tile(keys, [&](int m, auto rows) {
    between();
    F acc[rows.value][kVectors] = {};
    accumulate<Format, rows.value, kVectors, kRowPitch, 1, kLd>(k + m * kRowPitch, q_t, depth, acc);
    const F f = set(factor);
#pragma GCC unroll 16
    for (int i = 0; i < rows.value; ++i)
#pragma GCC unroll 4
      for (int n = 0; n < kVectors; ++n) store(s + (m + i) * kLd + n * kLanes, acc[i][n] * f);
  });
}

// sum[lane] += sum_key weight[key][lane] * sum_d K[key][d] Q^T[d][lane].
template <typename Format, int kVectors>
inline void weighted_score_sum(const typename Format::Element* k, int keys, int d,
                               const typename Format::Element* q_t, const float* weight,
                               F (&sum)[kVectors]) {
  constexpr int kLd = kVectors * kLanes, kRowPitch = Panel<Format>::kRowPitch;
  if constexpr (Format::kTiled) {
    alignas(64) float scores[kTileBlock * kLd];
    for (int m = 0; m < keys; m += kTileBlock) {
      score_tiles<kVectors>(k + m * kRowPitch, kRowPitch, d, q_t, scores);
      for (int at = 0; at < kTileBlock * kLd; at += kLanes)
        sum[at / kLanes % kVectors] =
            fma(load(scores + at), load(weight + m * kLd + at), sum[at / kLanes % kVectors]);
    }
    return;
  }
  const int depth = ceil_div(d, Format::kDepth);
  for_each_tile(keys, [&](int m, auto rows) {
    F acc[rows.value][kVectors] = {};
    accumulate<Format, rows.value, kVectors, kRowPitch, 1, kLd>(k + m * kRowPitch, q_t, depth, acc);
#pragma GCC unroll 16
    for (int i = 0; i < rows.value; ++i)
#pragma GCC unroll 4
      for (int n = 0; n < kVectors; ++n)
        sum[n] = fma(acc[i][n], load(weight + (m + i) * kLd + n * kLanes), sum[n]);
  });
}

// Rounds a tile of weights [first, last) to the elements that sum over keys, in place: the element
// of a vector never lies behind the floats that it is made of.
template <typename Format, int kVectors>
ATTENTION_INLINE typename Format::Element* weights_by_key(float* s, int first, int last) {
  constexpr int kLd = kVectors * kLanes;
  if constexpr (Format::kDepth == 1) {
    return s + first * kLd;
  } else {
    u32* pairs = reinterpret_cast<u32*>(s);
    for (int j = first; j < last; j += 2)
      for (int n = 0; n < kVectors; ++n) {
        const float* p = s + j * kLd + n * kLanes;
        store(pairs + j / 2 * kLd + n * kLanes, Format::zip(load(p), load(p + kLd)));
      }
    return pairs + first / 2 * kLd;
  }
}

// O^T[d][lane] = decay[lane] * O^T[d][lane] + sum_key V[key][d] P[key][lane], for `keys` packed
// rows of V (by_row) and `dims` rows of O^T (head dimension rounded up to kRowStep).
template <typename Format, int kVectors, typename Between = NothingBetween>
inline void value_product(const typename Format::Element* v, int keys, int dims,
                          const typename Format::Element* p, const F (&decay)[kVectors], float* o_t,
                          const Between& between = {}) {
  constexpr int kLd = kVectors * kLanes;
  const int depth = keys / Format::kDepth;
  for_each_tile(dims, [&](int m, auto rows) {
    between();
    F acc[rows.value][kVectors] = {};
    accumulate<Format, rows.value, kVectors, 1, kPitch, kLd>(v + m, p, depth, acc);
#pragma GCC unroll 16
    for (int i = 0; i < rows.value; ++i)
#pragma GCC unroll 4
      for (int n = 0; n < kVectors; ++n) {
        float* c = o_t + (m + i) * kLd + n * kLanes;
        store(c, fma(load(c), decay[n], acc[i][n]));
      }
  });
}

}  // namespace attention::cpu::ATTENTION_CPU_ISA
