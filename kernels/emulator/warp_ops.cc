// SPDX-License-Identifier: Apache-2.0
// mma, ldmatrix, shuffles and votes for a whole warp.
#include "kernels/emulator/warp_ops.h"

#include <cstring>

#include "kernels/cuda/tile/types16.h"
#include "kernels/emulator/block.h"

namespace attention::emulator {
namespace {

using tile::bf16;
using tile::bits_to_f32;
using tile::f16;
using tile::to_f32;

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

// Where each register of each lane lies in a matrix with `Pitch` columns, from the formulas above.
// A 16-bit register holds two elements of one row (A) or one column (B).
template <int Registers>
struct Places {
  int offset[kWarp][Registers];
};

template <int Registers>
Places<Registers> places(Position (*position)(int lane, int i), int elements_per_register,
                         int pitch) {
  Places<Registers> p;
  for (int lane = 0; lane < kWarp; ++lane) {
    for (int r = 0; r < Registers; ++r) {
      const Position at = position(lane, r * elements_per_register);
      p.offset[lane][r] = at.row * pitch + at.col;
    }
  }
  return p;
}

constexpr int kM = 16, kN = 8, kMaxK = 16;

const Places<4> a_16bit_places = places<4>(a_16bit, 2, kMaxK);
const Places<2> b_16bit_places = places<2>(b_16bit, 2, kN);
const Places<4> a_tf32_places = places<4>(a_tf32, 1, kMaxK);
const Places<2> b_tf32_places = places<2>(b_tf32, 1, kN);
const Places<2> c_places = places<2>(c_f32, 2, kN);  // pairs of neighbouring columns

struct Matrices {
  float a[kM * kMaxK];  // [m][k]
  float b[kMaxK * kN];  // [k][n]
  float d[kM * kN];     // [m][n]
};

// d += a * b. As a tensor core does, eight products and the accumulator are added in wide
// arithmetic and the sum is rounded once to f32; a tensor core's adder is narrower than double and
// truncates, for which tests leave room. Rows are independent: a few at a time hide the latency of
// the additions.
template <int K>
__attribute__((always_inline)) inline void accumulate(Matrices& m) {
  // One row of d. GCC and Clang split it where the machine's registers are narrower.
  typedef float Row
      __attribute__((vector_size(kN * sizeof(float)), aligned(sizeof(float)), may_alias));
  typedef double WideRow __attribute__((vector_size(kN * sizeof(double))));
  constexpr int kRows = 4;
  constexpr int kStep = 8;  // products in one sum
  const Row* b = reinterpret_cast<const Row*>(m.b);
  for (int i0 = 0; i0 < kM; i0 += kRows) {
    const float* a = m.a + i0 * kMaxK;
    Row* d = reinterpret_cast<Row*>(m.d) + i0;
    for (int k0 = 0; k0 < K; k0 += kStep) {
      WideRow s0 = __builtin_convertvector(d[0], WideRow);
      WideRow s1 = __builtin_convertvector(d[1], WideRow);
      WideRow s2 = __builtin_convertvector(d[2], WideRow);
      WideRow s3 = __builtin_convertvector(d[3], WideRow);
      for (int k = k0; k < k0 + kStep; ++k) {
        const WideRow x = __builtin_convertvector(b[k], WideRow);
        s0 += static_cast<double>(a[0 * kMaxK + k]) * x;
        s1 += static_cast<double>(a[1 * kMaxK + k]) * x;
        s2 += static_cast<double>(a[2 * kMaxK + k]) * x;
        s3 += static_cast<double>(a[3 * kMaxK + k]) * x;
      }
      d[0] = __builtin_convertvector(s0, Row);
      d[1] = __builtin_convertvector(s1, Row);
      d[2] = __builtin_convertvector(s2, Row);
      d[3] = __builtin_convertvector(s3, Row);
    }
  }
}

#if defined(__x86_64__)
// The same bits as the portable build, in half the time.
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

// The tensor core reads the upper 19 bits of a tf32 register.
float tf32_value(u32 bits) { return bits_to_f32(bits & 0xffffe000u); }

template <MmaInput Input>
float low_of(u32 x) {
  const auto bits = static_cast<u16>(x & 0xffffu);
  return Input == MmaInput::kBf16 ? to_f32(bf16{bits}) : to_f32(f16{bits});
}

template <MmaInput Input>
float high_of(u32 x) {
  const auto bits = static_cast<u16>(x >> 16);
  return Input == MmaInput::kBf16 ? to_f32(bf16{bits}) : to_f32(f16{bits});
}

template <MmaInput Input>
void multiply_all(int count, void* const* operands) {
  constexpr bool kWide = Input == MmaInput::kTf32;
  Matrices m;
  for (int lane = 0; lane < kWarp; ++lane) {
    const u32* reg = static_cast<const MmaOperands*>(operands[lane])->a;
    for (int r = 0; r < 4; ++r) {
      if constexpr (kWide) {
        m.a[a_tf32_places.offset[lane][r]] = tf32_value(reg[r]);
      } else {
        float* pair = m.a + a_16bit_places.offset[lane][r];
        pair[0] = low_of<Input>(reg[r]);
        pair[1] = high_of<Input>(reg[r]);
      }
    }
  }
  for (int j = 0; j < count; ++j) {
    for (int lane = 0; lane < kWarp; ++lane) {
      const auto* o = static_cast<const MmaOperands*>(operands[lane]);
      for (int r = 0; r < 2; ++r) {
        const u32 x = o->b[2 * j + r];
        if constexpr (kWide) {
          m.b[b_tf32_places.offset[lane][r]] = tf32_value(x);
        } else {
          float* pair = m.b + b_16bit_places.offset[lane][r];
          pair[0] = low_of<Input>(x);
          pair[kN] = high_of<Input>(x);
        }
        std::memcpy(m.d + c_places.offset[lane][r], o->d + 4 * j + 2 * r, 2 * sizeof(float));
      }
    }
    accumulate_function(m, kWide ? 8 : 16);
    for (int lane = 0; lane < kWarp; ++lane) {
      const auto* o = static_cast<const MmaOperands*>(operands[lane]);
      for (int r = 0; r < 2; ++r) {
        std::memcpy(o->d + 4 * j + 2 * r, m.d + c_places.offset[lane][r], 2 * sizeof(float));
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
