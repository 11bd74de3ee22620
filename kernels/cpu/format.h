// SPDX-License-Identifier: Apache-2.0
// What the matrix products multiply: float32 numbers, or, where the instruction set has bfloat16
// dot products, pairs of bfloat16. Kernels are templates over the format; sums are float32 in both.
#pragma once

#include "kernels/cpu/convert.h"
#include "kernels/cpu/tile_registers.h"

namespace attention::cpu::ATTENTION_CPU_ISA {

inline constexpr int kMaxHeadDim = 256;

// A number that a function takes as a type.
template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

// The register tile: kTileRows x 2 vectors of accumulators. 6 x 2 of AVX2's 16 registers leave
// three for operands; 8 x 2 of AVX-512's 32 divide every common head dimension. A row count is a
// multiple of kRowStep; what kTileRows does not divide is done in tiles of kRowStep.
#if defined(__AVX512F__)
inline constexpr int kTileRows = 8, kRowStep = 8;
#elif defined(__AVX2__)
inline constexpr int kTileRows = 6, kRowStep = 4;
#else
inline constexpr int kTileRows = 4, kRowStep = 4;
#endif

// One float32 an element. Takes operands of every type, widened.
struct Singles {
  using Element = float;
  struct Scope {};                       // what a thread holds while it computes
  static constexpr int kDepth = 1;       // numbers, neighbours along the summed axis, in an element
  static constexpr bool kTiled = false;  // whether products run on matrix tiles
  // Products over keys take intervals from a multiple of kFirstStep to one of kLastStep.
  static constexpr int kFirstStep = 8, kLastStep = kRowStep;

  static ATTENTION_INLINE F broadcast(float x) { return set(x); }
  static ATTENTION_INLINE F multiply_add(F a, F b, F sum) { return fma(a, b, sum); }
  // One vector of elements from n numbers; where there are fewer, the rest is 0 and is not read.
  template <typename T>
  static ATTENTION_INLINE F pack(T tag, const typename T::Memory* p, i64 n) {
    return load_upto(tag, p, n);
  }
  // Any bit set: some number is NaN or infinite.
  static ATTENTION_INLINE I suspicion(F x) { return float_to_bits(absolute(x * zero())); }
  template <typename Function>
  static ATTENTION_INLINE void with_operand_type(DType dtype, const Function& function) {
    with_type(dtype, function);
  }
};

#if defined(__AVX512BF16__)
// Two bfloat16 an element, the first in the low half. Takes bfloat16 operands as they are; weights
// (P and dS) are rounded to nearest even. vdpbf16ps adds the product of the high halves and then
// that of the low ones, each sum rounded to float32; it takes subnormal numbers for 0, and makes no
// others, whatever the thread's rounding mode says.
struct Pairs {
  using Element = u32;
  struct Scope {};
  static constexpr int kDepth = 2;
  static constexpr bool kTiled = false;
  static constexpr int kFirstStep = 8, kLastStep = kRowStep;

  static ATTENTION_INLINE F broadcast(u32 x) { return (F)set(static_cast<i32>(x)); }
  static ATTENTION_INLINE F multiply_add(F a, F b, F sum) {
    return (F)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
  static ATTENTION_INLINE F pack(BFloat16, const u16* p, i64 n) {
    if (n >= 2 * kLanes) return (F)_mm512_loadu_si512(p);
    return (F)_mm512_maskz_loadu_epi16(static_cast<__mmask32>((1u << n) - 1), p);
  }
  static ATTENTION_INLINE I suspicion(F x) {
    const __m512i exponent = _mm512_set1_epi16(0x7F80);
    const __mmask32 special =
        _mm512_cmpeq_epi16_mask(_mm512_and_si512((__m512i)x, exponent), exponent);
    return (I)_mm512_maskz_mov_epi16(special, exponent);
  }
  // Pairs (first[i], second[i]) of kLanes bfloat16 each.
  static ATTENTION_INLINE F zip_halves(const u16* first, const u16* second) {
    return (F)((I)_mm512_cvtepu16_epi32(load_half(first)) |
               (I)_mm512_cvtepu16_epi32(load_half(second)) << 16);
  }
  // Two vectors of float32 into one of pairs (first[i], second[i]).
  static ATTENTION_INLINE F zip(F first, F second) {
    const __m512i order =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (F)_mm512_permutexvar_epi16(order,
                                       (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
  }
  // Two vectors of float32 into pairs of neighbouring lanes, the first vector's first.
  static ATTENTION_INLINE F join(F first, F second) {
    return (F)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  }
  template <typename Function>
  static ATTENTION_INLINE void with_operand_type(DType, const Function& function) {
    function(BFloat16{});
  }
};
#endif

#if defined(__AMX_BF16__)
// The same elements, multiplied in matrix tiles (tile_product.h).
struct Tiles : Pairs {
  using Scope = TileRegisters;
  static constexpr bool kTiled = true;
  static constexpr int kFirstStep = 32, kLastStep = 32;
};
#endif

// What a unit multiplies bfloat16 operands as.
#if defined(__AMX_BF16__)
using BFloat16Format = Tiles;
#elif defined(__AVX512BF16__)
using BFloat16Format = Pairs;
#else
using BFloat16Format = Singles;
#endif

// Calls function(format) with the format that a call of this element type is computed in.
template <typename Function>
ATTENTION_INLINE void with_format(DType dtype, const Function& function) {
  if (dtype == DType::kBFloat16) {
    [[maybe_unused]] const typename BFloat16Format::Scope scope;
    function(BFloat16Format{});
  } else {
    function(Singles{});
  }
}

}  // namespace attention::cpu::ATTENTION_CPU_ISA
