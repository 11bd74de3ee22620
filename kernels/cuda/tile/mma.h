// SPDX-License-Identifier: Apache-2.0
// Register fragments and the warp-wide matrix product d += a * b.
//
// Layouts (PTX ISA, "Matrix fragments for mma.m16n8k16 / mma.m16n8k8"), with g = lane / 4 and t =
// lane % 4:
//   accumulator 16 x 8    c[0], c[1] = row g, columns 2t, 2t+1;  c[2], c[3] = row g+8, the same
//   columns 16-bit A 16 x 16      reg[0] row g, k 2t..2t+1   reg[1] row g+8, same k   reg[2],
//   reg[3] the same at k+8 16-bit B 16 x 8       reg[0] k 2t..2t+1, column g   reg[1] the same at
//   k+8 f32 (tf32) A 16 x 8   reg[0] row g, k t   reg[1] row g+8, k t   reg[2] row g, k t+4 reg[3]
//   row g+8, k t+4 f32 (tf32) B 8 x 8    reg[0] k t, column g   reg[1] k t+4, column g
#pragma once

#include "kernels/cuda/tile/config.h"
#include "kernels/cuda/tile/thread.h"
#include "kernels/cuda/tile/types16.h"

namespace attention::tile {

// Which element of the reduction axis a k slot of a fragment holds. The sum does not depend on the
// order, as long as A and B agree, so it is part of the fragment's type. For f32 an accumulator
// turned into an A operand has k in pairs: slot t holds k = 2t and slot t+4 holds k = 2t+1. 16-bit
// operands have one order only.
enum class KOrder { kNatural, kPaired };

template <typename T>
inline constexpr KOrder kPackedOrder = KOrder::kNatural;
template <>
inline constexpr KOrder kPackedOrder<f32> = KOrder::kPaired;

// Elements of the reduction axis in one fragment.
template <typename T>
inline constexpr int kMmaK = 32 / static_cast<int>(sizeof(T));

inline constexpr int kMmaM = 16;
inline constexpr int kMmaN = 8;

// 16 x kMmaK<T> operand A.
template <typename T, KOrder Order = KOrder::kNatural>
struct AFragment {
  u32 reg[4];
};

// kMmaK<T> x 8 operand B.
template <typename T, KOrder Order = KOrder::kNatural>
struct BFragment {
  u32 reg[2];
};

// 16 x 8 block of an accumulator.
struct AccBlock {
  f32 c[4];
};

// M x N accumulator of one warp, M a multiple of 16 and N of 8.
template <int M, int N>
struct Accumulator {
  static_assert(M % kMmaM == 0 && N % kMmaN == 0, "an accumulator is made of 16 x 8 blocks");
  static constexpr int kRowBlocks = M / kMmaM;
  static constexpr int kColBlocks = N / kMmaN;
  // A thread holds kRowSlots different rows and kColSlots different columns.
  static constexpr int kRowSlots = 2 * kRowBlocks;
  static constexpr int kColSlots = 2 * kColBlocks;

  AccBlock block[kRowBlocks][kColBlocks];

  ATTENTION_DEVICE void fill(f32 x) {
    ATTENTION_UNROLL
    for (int m = 0; m < kRowBlocks; ++m) {
      ATTENTION_UNROLL
      for (int n = 0; n < kColBlocks; ++n) {
        ATTENTION_UNROLL
        for (int i = 0; i < 4; ++i) block[m][n].c[i] = x;
      }
    }
  }

  // Calls f(element, row, column, row_slot, col_slot) for each element that this thread holds;
  // element is a reference. row0 and col0 are the coordinates of the accumulator's first element.
  // The slots are compile-time constants after unrolling, so arrays indexed by them stay in
  // registers.
  template <typename F>
  ATTENTION_DEVICE void each(int row0, int col0, F&& f) {
    const int row = row0 + row_in_block();
    const int col = col0 + col_in_block();
    ATTENTION_UNROLL
    for (int m = 0; m < kRowBlocks; ++m) {
      ATTENTION_UNROLL
      for (int n = 0; n < kColBlocks; ++n) {
        ATTENTION_UNROLL
        for (int i = 0; i < 4; ++i) {
          f(block[m][n].c[i], row + m * kMmaM + (i / 2) * 8, col + n * kMmaN + i % 2, 2 * m + i / 2,
            2 * n + i % 2);
        }
      }
    }
  }

  // Row and column, inside the accumulator, of a slot.
  ATTENTION_DEVICE static int slot_row(int row_slot) {
    return row_in_block() + (row_slot / 2) * kMmaM + (row_slot % 2) * 8;
  }
  ATTENTION_DEVICE static int slot_col(int col_slot) {
    return col_in_block() + (col_slot / 2) * kMmaN + col_slot % 2;
  }

  ATTENTION_DEVICE f32& at(int row_slot, int col_slot) {
    return block[row_slot / 2][col_slot / 2].c[(row_slot % 2) * 2 + col_slot % 2];
  }
  ATTENTION_DEVICE f32 at(int row_slot, int col_slot) const {
    return block[row_slot / 2][col_slot / 2].c[(row_slot % 2) * 2 + col_slot % 2];
  }

 private:
  ATTENTION_DEVICE static int row_in_block() { return lane_index() / 4; }
  ATTENTION_DEVICE static int col_in_block() { return lane_index() % 4 * 2; }
};

// ---- accumulator to operand ----

// The 16 x kMmaK<T> part of an accumulator at row block m and columns k_block * kMmaK<T> as an A
// operand: no data moves between lanes. 16-bit values are rounded to nearest even; f32 keeps all
// its bits.
template <typename T, int M, int N>
ATTENTION_DEVICE AFragment<T, kPackedOrder<T>> pack_a(const Accumulator<M, N>& acc, int m,
                                                      int k_block) {
  AFragment<T, kPackedOrder<T>> a;
  if constexpr (sizeof(T) == 4) {
    const AccBlock& x = acc.block[m][k_block];
    a.reg[0] = f32_to_bits(x.c[0]);
    a.reg[1] = f32_to_bits(x.c[2]);
    a.reg[2] = f32_to_bits(x.c[1]);
    a.reg[3] = f32_to_bits(x.c[3]);
  } else {
    const AccBlock& x = acc.block[m][2 * k_block];
    const AccBlock& y = acc.block[m][2 * k_block + 1];
    a.reg[0] = pack2<T>(x.c[0], x.c[1]);
    a.reg[1] = pack2<T>(x.c[2], x.c[3]);
    a.reg[2] = pack2<T>(y.c[0], y.c[1]);
    a.reg[3] = pack2<T>(y.c[2], y.c[3]);
  }
  return a;
}

// ---- the product ----

// How f32 operands are multiplied on tensor cores. 16-bit operands need no choice: their
// products are exact.
enum class F32Products {
  kTf32,    // operands rounded to 10 mantissa bits: relative error 2^-11 a product
  kTf32x3,  // three products of split operands: about f32 accuracy at a third of the speed
};

namespace detail {

template <typename T>
inline constexpr bool kIsBf16 = false;
template <>
inline constexpr bool kIsBf16<bf16> = true;

// d[j] += a * b[j] for j < Count, one instruction each. f32 operands must already be rounded to
// tf32.
template <typename T, KOrder Order, int Count>
ATTENTION_DEVICE void mma_blocks(AccBlock* d, const AFragment<T, Order>& a,
                                 const BFragment<T, Order>* b) {
#if ATTENTION_ON_GPU
  ATTENTION_UNROLL
  for (int j = 0; j < Count; ++j) {
    f32* c = d[j].c;
    if constexpr (sizeof(T) == 4) {
      asm volatile(
          "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
          "{%8,%9}, {%0,%1,%2,%3};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
          : "r"(a.reg[0]), "r"(a.reg[1]), "r"(a.reg[2]), "r"(a.reg[3]), "r"(b[j].reg[0]),
            "r"(b[j].reg[1]));
    } else if constexpr (kIsBf16<T>) {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
          "{%8,%9}, {%0,%1,%2,%3};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
          : "r"(a.reg[0]), "r"(a.reg[1]), "r"(a.reg[2]), "r"(a.reg[3]), "r"(b[j].reg[0]),
            "r"(b[j].reg[1]));
    } else {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
          "{%8,%9}, {%0,%1,%2,%3};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
          : "r"(a.reg[0]), "r"(a.reg[1]), "r"(a.reg[2]), "r"(a.reg[3]), "r"(b[j].reg[0]),
            "r"(b[j].reg[1]));
    }
  }
#else
  constexpr emulator::MmaInput kInput = sizeof(T) == 4 ? emulator::MmaInput::kTf32
                                        : kIsBf16<T>   ? emulator::MmaInput::kBf16
                                                       : emulator::MmaInput::kF16;
  emulator::mma(kInput, Count, d->c, a.reg, b->reg);
#endif
}

// x = high + low with both parts in tf32; the rest is below 2^-22 of x.
template <typename Fragment>
ATTENTION_DEVICE void split_tf32(const Fragment& x, Fragment& high, Fragment& low) {
  ATTENTION_UNROLL
  for (int i = 0; i < static_cast<int>(sizeof(x.reg) / sizeof(x.reg[0])); ++i) {
    const f32 value = bits_to_f32(x.reg[i]);
    high.reg[i] = round_tf32(value);
    low.reg[i] = round_tf32(value - bits_to_f32(high.reg[i]));
  }
}

template <typename Fragment>
ATTENTION_DEVICE Fragment rounded_tf32(const Fragment& x) {
  Fragment rounded;
  ATTENTION_UNROLL
  for (int i = 0; i < static_cast<int>(sizeof(x.reg) / sizeof(x.reg[0])); ++i) {
    rounded.reg[i] = round_tf32(bits_to_f32(x.reg[i]));
  }
  return rounded;
}

}  // namespace detail

// d[j] += a * b[j] for j < Count: Count neighbouring 16 x 8 blocks of one row of an accumulator.
// f32 fragments hold unrounded values; Products says how they are multiplied and means nothing for
// 16-bit types. Transposed: takes terms in the order that gives the bits of the product b * a.
template <F32Products Products = F32Products::kTf32, bool Transposed = false, int Count, typename T,
          KOrder Order>
ATTENTION_DEVICE void mma(AccBlock* d, const AFragment<T, Order>& a,
                          const BFragment<T, Order> (&b)[Count]) {
  if constexpr (sizeof(T) == 2) {
    detail::mma_blocks<T, Order, Count>(d, a, b);
  } else if constexpr (Products == F32Products::kTf32) {
    BFragment<T, Order> rounded[Count];
    ATTENTION_UNROLL
    for (int j = 0; j < Count; ++j) rounded[j] = detail::rounded_tf32(b[j]);
    detail::mma_blocks<T, Order, Count>(d, detail::rounded_tf32(a), rounded);
  } else {
    AFragment<T, Order> a_high, a_low;
    BFragment<T, Order> b_high[Count], b_low[Count];
    detail::split_tf32(a, a_high, a_low);
    ATTENTION_UNROLL
    for (int j = 0; j < Count; ++j) detail::split_tf32(b[j], b_high[j], b_low[j]);
    // Small terms first; low * low is below the last bit of the result. The sum of this step starts
    // at zero and joins the accumulator in one addition: adding each of the three products to it
    // would round three times at its full size, and tensor cores truncate where they add.
    AccBlock step[Count] = {};
    detail::mma_blocks<T, Order, Count>(step, Transposed ? a_high : a_low,
                                        Transposed ? b_low : b_high);
    detail::mma_blocks<T, Order, Count>(step, Transposed ? a_low : a_high,
                                        Transposed ? b_high : b_low);
    detail::mma_blocks<T, Order, Count>(step, a_high, b_high);
    ATTENTION_UNROLL
    for (int j = 0; j < Count; ++j) {
      ATTENTION_UNROLL
      for (int i = 0; i < 4; ++i) d[j].c[i] += step[j].c[i];
    }
  }
}

}  // namespace attention::tile
