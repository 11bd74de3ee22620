// SPDX-License-Identifier: Apache-2.0
// mma, ldmatrix, shuffles and votes for a whole warp.
#include "kernels/emulator/warp_ops.h"

#include <cstring>

#include "kernels/cuda/tile/types16.h"
#include "kernels/emulator/block.h"

namespace attention::emulator {
namespace {

using tile::host::from_bits;
using tile::host::widen_bf16;
using tile::host::widen_f16;

struct Position {
  int row;
  int col;
};

// PTX ISA, "Matrix fragments for mma.m16n8k16 with floating point type": element i of lane's A, B
// and C fragments.
Position a_16bit(int lane, int i) {
  const int group = lane >> 2, in_group = lane % 4;
  return {(i < 2 || (4 <= i && i < 6)) ? group : group + 8,
          in_group * 2 + (i & 1) + (i < 4 ? 0 : 8)};
}
Position b_16bit(int lane, int i) {
  const int group = lane >> 2, in_group = lane % 4;
  return {in_group * 2 + (i & 1) + (i < 2 ? 0 : 8), group};
}
Position c_f32(int lane, int i) {
  const int group = lane >> 2, in_group = lane % 4;
  return {i < 2 ? group : group + 8, in_group * 2 + (i & 1)};
}

// PTX ISA, "Matrix fragments for mma.m16n8k8", .tf32.
Position a_tf32(int lane, int i) {
  const int group = lane >> 2, in_group = lane % 4;
  return {(i == 0 || i == 2) ? group : group + 8, i < 2 ? in_group : in_group + 4};
}
Position b_tf32(int lane, int i) {
  const int group = lane >> 2, in_group = lane % 4;
  return {i == 0 ? in_group : in_group + 4, group};
}

struct Matrices {
  float a[16][16];  // [m][k]
  float b[16][8];   // [k][n]
  float d[16][8];   // [m][n]
};

// d += a * b with one rounding a product and one an addition, in the order of k. Tensor cores add
// in an order and precision of their own; f32 accumulation is what the ISA promises, and tests
// allow for the difference.
template <int K>
__attribute__((always_inline)) inline void accumulate(Matrices& m) {
  for (int i = 0; i < 16; ++i) {
    float row[8];
    for (int n = 0; n < 8; ++n) row[n] = m.d[i][n];
    for (int k = 0; k < K; ++k) {
      const float x = m.a[i][k];
      for (int n = 0; n < 8; ++n) row[n] += x * m.b[k][n];
    }
    for (int n = 0; n < 8; ++n) m.d[i][n] = row[n];
  }
}

#if defined(__x86_64__)
// Eight lanes at a time and no fused multiply-add: the same bits as the portable build, in half the
// time.
__attribute__((target("avx2"))) void accumulate_avx2(Matrices& m, int k) {
  if (k == 16) {
    accumulate<16>(m);
  } else {
    accumulate<8>(m);
  }
}
#endif

void accumulate_portable(Matrices& m, int k) {
  if (k == 16) {
    accumulate<16>(m);
  } else {
    accumulate<8>(m);
  }
}

using Accumulate = void (*)(Matrices&, int);

Accumulate choose_accumulate() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return accumulate_avx2;
#endif
  return accumulate_portable;
}

const Accumulate accumulate_function = choose_accumulate();

u16 half_of(const u32* reg, int i) { return static_cast<u16>(reg[i / 2] >> (16 * (i % 2))); }

// The tensor core reads the upper 19 bits of a tf32 register.
float tf32_value(u32 bits) { return from_bits(bits & 0xffffe000u); }

template <MmaInput Input>
void multiply_all(int count, void* const* operands) {
  constexpr bool kWide = Input == MmaInput::kTf32;
  Matrices m;
  for (int lane = 0; lane < kWarp; ++lane) {
    const u32* reg = static_cast<const MmaOperands*>(operands[lane])->a;
    if constexpr (kWide) {
      for (int i = 0; i < 4; ++i) {
        const Position p = a_tf32(lane, i);
        m.a[p.row][p.col] = tf32_value(reg[i]);
      }
    } else {
      for (int i = 0; i < 8; ++i) {
        const Position p = a_16bit(lane, i);
        m.a[p.row][p.col] =
            Input == MmaInput::kBf16 ? widen_bf16(half_of(reg, i)) : widen_f16(half_of(reg, i));
      }
    }
  }
  for (int j = 0; j < count; ++j) {
    for (int lane = 0; lane < kWarp; ++lane) {
      const auto* o = static_cast<const MmaOperands*>(operands[lane]);
      const u32* reg = o->b + 2 * j;
      if constexpr (kWide) {
        for (int i = 0; i < 2; ++i) {
          const Position p = b_tf32(lane, i);
          m.b[p.row][p.col] = tf32_value(reg[i]);
        }
      } else {
        for (int i = 0; i < 4; ++i) {
          const Position p = b_16bit(lane, i);
          m.b[p.row][p.col] =
              Input == MmaInput::kBf16 ? widen_bf16(half_of(reg, i)) : widen_f16(half_of(reg, i));
        }
      }
      for (int i = 0; i < 4; ++i) {
        const Position p = c_f32(lane, i);
        m.d[p.row][p.col] = o->d[4 * j + i];
      }
    }
    accumulate_function(m, kWide ? 8 : 16);
    for (int lane = 0; lane < kWarp; ++lane) {
      const auto* o = static_cast<const MmaOperands*>(operands[lane]);
      for (int i = 0; i < 4; ++i) {
        const Position p = c_f32(lane, i);
        o->d[4 * j + i] = m.d[p.row][p.col];
      }
    }
  }
}

}  // namespace

void multiply(MmaInput input, int count, void* const* operands) {
  switch (input) {
    case MmaInput::kBf16:
      multiply_all<MmaInput::kBf16>(count, operands);
      break;
    case MmaInput::kF16:
      multiply_all<MmaInput::kF16>(count, operands);
      break;
    case MmaInput::kTf32:
      multiply_all<MmaInput::kTf32>(count, operands);
      break;
  }
}

// PTX ISA, ldmatrix: threads 8i to 8i+7 give the row addresses of matrix i; thread T holds the
// elements 2 (T % 4) and 2 (T % 4) + 1 of row T / 4, or with .trans those of column T / 4.
void load_matrices(bool transposed, void* const* operands) {
  u16 matrix[4][8][8];
  for (int i = 0; i < 4; ++i) {
    for (int r = 0; r < 8; ++r) {
      std::memcpy(matrix[i][r], static_cast<const MatrixOperands*>(operands[8 * i + r])->row, 16);
    }
  }
  for (int lane = 0; lane < kWarp; ++lane) {
    u32* reg = static_cast<MatrixOperands*>(operands[lane])->reg;
    const int major = lane / 4, minor = 2 * (lane % 4);
    for (int i = 0; i < 4; ++i) {
      const u32 low = transposed ? matrix[i][minor][major] : matrix[i][major][minor];
      const u32 high = transposed ? matrix[i][minor + 1][major] : matrix[i][major][minor + 1];
      reg[i] = low | high << 16;
    }
  }
}

int matrix_conflicts(void* const* operands) {
  int extra = 0;
  for (int i = 0; i < 4; ++i) {
    // 8 rows of 16 bytes: each group of 4 banks must be met once. Equal addresses are one access.
    const void* seen[8][8];
    int count[8] = {};
    int worst = 1;
    for (int r = 0; r < 8; ++r) {
      const void* row = static_cast<const MatrixOperands*>(operands[8 * i + r])->row;
      const auto group = static_cast<int>(reinterpret_cast<std::uintptr_t>(row) / 16 % 8);
      bool again = false;
      for (int s = 0; s < count[group]; ++s) again = again || seen[group][s] == row;
      if (!again) seen[group][count[group]++] = row;
      worst = max_of(worst, count[group]);
    }
    extra += worst - 1;
  }
  return extra;
}

void exchange(void* const* operands) {
  for (int lane = 0; lane < kWarp; ++lane) {
    auto* o = static_cast<ShuffleOperands*>(operands[lane]);
    o->result = static_cast<const ShuffleOperands*>(operands[o->source])->value;
  }
}

void vote(void* const* operands) {
  u32 mask = 0;
  for (int lane = 0; lane < kWarp; ++lane) {
    if (static_cast<const VoteOperands*>(operands[lane])->predicate) mask |= 1u << lane;
  }
  for (int lane = 0; lane < kWarp; ++lane)
    static_cast<VoteOperands*>(operands[lane])->result = mask;
}

}  // namespace attention::emulator
