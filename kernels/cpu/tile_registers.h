// SPDX-License-Identifier: Apache-2.0
// AMX: eight registers of 16 rows x 64 bytes, and the product of two of them into a third,
//   C[m][n] += sum over k of A[m][2k] B[k][2n] + A[m][2k + 1] B[k][2n + 1],
// 16 x 16 sums of float32 over 32 bfloat16. B holds pairs of neighbours along the summed axis, as
// the elements of Pairs do. Subnormal numbers count as 0, whatever the thread's rounding mode says.
//
// The compiler's own intrinsics do not say that they read and write memory; these do.
#pragma once

#include "kernels/cpu/simd.h"

namespace attention::cpu::ATTENTION_CPU_ISA {

inline constexpr int kTileSide = 16;  // rows of a register, and its 4-byte columns
inline constexpr int kTileElements = kTileSide * kTileSide;

// Sets all registers to whole tiles for as long as it lives. A thread that keeps its registers in
// use would have them saved at every switch, and another library sets its own shapes.
class TileRegisters {
 public:
  TileRegisters() {
    struct alignas(64) {
      u8 palette = 1, start_row = 0, reserved[14] = {};
      u16 row_bytes[16] = {};
      u8 rows[16] = {};
    } shapes;
    for (int i = 0; i < 8; ++i) {
      shapes.row_bytes[i] = 64;
      shapes.rows[i] = kTileSide;
    }
    asm volatile("ldtilecfg %0" ::"m"(shapes));
  }
  ~TileRegisters() { asm volatile("tilerelease"); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
};

// `pitch`: 4-byte elements from row to row. Rows that begin at multiples of 64 bytes load twice as
// fast as others.
template <int kTile>
ATTENTION_INLINE void load_tile(const void* p, i64 pitch) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(pitch * 4), "i"(kTile) : "memory");
}
template <int kTile>
ATTENTION_INLINE void store_tile(void* p, i64 pitch) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(pitch * 4), "i"(kTile) : "memory");
}
template <int kTile>
ATTENTION_INLINE void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
// C += A B.
template <int kC, int kA, int kB>
ATTENTION_INLINE void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}

}  // namespace attention::cpu::ATTENTION_CPU_ISA
