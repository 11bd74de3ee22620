// SPDX-License-Identifier: Apache-2.0
// The SIMD vector of the instruction set that this translation unit is compiled for: 16 float lanes
// with AVX-512, 8 with AVX2, 4 with plain compiler vector extensions (any architecture).
//
// Every unit that includes this header defines ATTENTION_CPU_ISA, the name of the namespace that
// keeps its instantiations apart from the other units'. Nothing from std may be called in here: an
// out-of-line copy of such a function, compiled for AVX-512, could be the one that the linker keeps
// for the whole library.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "kernels/common/problem.h"

#if !defined(ATTENTION_CPU_ISA)
#error "define ATTENTION_CPU_ISA, the name of the instruction set"
#endif

namespace attention::cpu::ATTENTION_CPU_ISA {

#define ATTENTION_INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#elif defined(__AVX2__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif

typedef float F __attribute__((vector_size(4 * kLanes)));
typedef i32 I __attribute__((vector_size(4 * kLanes)));
typedef u32 U __attribute__((vector_size(4 * kLanes)));
typedef F UnalignedF __attribute__((aligned(4), may_alias));
typedef I UnalignedI __attribute__((aligned(4), may_alias));

ATTENTION_INLINE F load(const float* p) { return *reinterpret_cast<const UnalignedF*>(p); }
ATTENTION_INLINE void store(float* p, F x) { *reinterpret_cast<UnalignedF*>(p) = x; }
ATTENTION_INLINE I load(const i32* p) { return *reinterpret_cast<const UnalignedI*>(p); }
ATTENTION_INLINE void store(i32* p, I x) { *reinterpret_cast<UnalignedI*>(p) = x; }
// Any 32-bit elements, as the bits of floats.
ATTENTION_INLINE F load(const u32* p) { return *reinterpret_cast<const UnalignedF*>(p); }
ATTENTION_INLINE void store(u32* p, F x) { *reinterpret_cast<UnalignedF*>(p) = x; }
ATTENTION_INLINE F bits_to_float(I x) { return (F)x; }
ATTENTION_INLINE I float_to_bits(F x) { return (I)x; }
ATTENTION_INLINE F to_float(I x) { return __builtin_convertvector(x, F); }

// Lane selection. A mask is a bit per lane with AVX-512 and a vector of 0 / -1 elsewhere.
#if defined(__AVX512F__)
typedef __mmask16 M;
ATTENTION_INLINE F set(float x) { return (F)_mm512_set1_ps(x); }
ATTENTION_INLINE I set(i32 x) { return (I)_mm512_set1_epi32(x); }
ATTENTION_INLINE F fma(F a, F b, F c) {
  return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
// The second argument when either one is NaN.
ATTENTION_INLINE F max(F a, F b) { return (F)_mm512_max_ps((__m512)a, (__m512)b); }
ATTENTION_INLINE F min(F a, F b) { return (F)_mm512_min_ps((__m512)a, (__m512)b); }
ATTENTION_INLINE M less(I a, I b) { return _mm512_cmplt_epi32_mask((__m512i)a, (__m512i)b); }
ATTENTION_INLINE M equal(I a, I b) { return _mm512_cmpeq_epi32_mask((__m512i)a, (__m512i)b); }
ATTENTION_INLINE M equal(F a, F b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_EQ_OQ); }
ATTENTION_INLINE M less(F a, F b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LT_OQ); }
ATTENTION_INLINE M both(M a, M b) { return static_cast<M>(a & b); }
ATTENTION_INLINE F select(M m, F yes, F no) {
  return (F)_mm512_mask_blend_ps(m, (__m512)no, (__m512)yes);
}
ATTENTION_INLINE M mask_of_bits(u32 bits) { return static_cast<M>(bits); }
ATTENTION_INLINE M negative(I x) { return _mm512_movepi32_mask((__m512i)x); }
#else
typedef I M;
#if defined(__AVX2__)
ATTENTION_INLINE F set(float x) { return (F)_mm256_set1_ps(x); }
ATTENTION_INLINE I set(i32 x) { return (I)_mm256_set1_epi32(x); }
ATTENTION_INLINE F fma(F a, F b, F c) {
  return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
ATTENTION_INLINE F max(F a, F b) { return (F)_mm256_max_ps((__m256)a, (__m256)b); }
ATTENTION_INLINE F min(F a, F b) { return (F)_mm256_min_ps((__m256)a, (__m256)b); }
ATTENTION_INLINE F select(M m, F yes, F no) {
  return (F)_mm256_blendv_ps((__m256)no, (__m256)yes, (__m256)m);
}
#else
ATTENTION_INLINE F set(float x) { return F{x, x, x, x}; }
ATTENTION_INLINE I set(i32 x) { return I{x, x, x, x}; }
ATTENTION_INLINE F fma(F a, F b, F c) { return a * b + c; }
ATTENTION_INLINE F select(M m, F yes, F no) { return (F)((m & (I)yes) | (~m & (I)no)); }
ATTENTION_INLINE F max(F a, F b) { return select((M)(a > b), a, b); }
ATTENTION_INLINE F min(F a, F b) { return select((M)(a < b), a, b); }
#endif
ATTENTION_INLINE M less(I a, I b) { return (M)(a < b); }
ATTENTION_INLINE M equal(I a, I b) { return (M)(a == b); }
ATTENTION_INLINE M equal(F a, F b) { return (M)(a == b); }
ATTENTION_INLINE M less(F a, F b) { return (M)(a < b); }
ATTENTION_INLINE M both(M a, M b) { return a & b; }
ATTENTION_INLINE M negative(I x) { return (M)(x >> 31); }
ATTENTION_INLINE M mask_of_bits(u32 bits) {
#if defined(__AVX2__)
  const I lane_bit = {1, 2, 4, 8, 16, 32, 64, 128};
#else
  const I lane_bit = {1, 2, 4, 8};
#endif
  return (M)((set(static_cast<i32>(bits)) & lane_bit) == lane_bit);
}
#endif

ATTENTION_INLINE F zero() { return set(0.f); }
ATTENTION_INLINE F absolute(F x) { return bits_to_float(float_to_bits(x) & set(0x7FFFFFFF)); }

ATTENTION_INLINE bool any_bit(I x) {
  i32 lanes[kLanes], all = 0;
  store(lanes, x);
  for (int i = 0; i < kLanes; ++i) all |= lanes[i];
  return all != 0;
}

ATTENTION_INLINE bool any(M m) {
#if defined(__AVX512F__)
  return m != 0;
#else
  return any_bit(m);
#endif
}

inline constexpr float kLog2E = 1.4426950408889634f;

// 2^f for |f| <= 1/2, highest power first: minimax, relative error 7.5e-8.
inline constexpr float kExp2Polynomial[] = {1.327647129073739e-3f, 9.675540961325169e-3f,
                                            5.550713092088699e-2f, 0.24022120237350464f,
                                            0.6931469440460205f,   1.0f};

inline constexpr float kRounder = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer

// x[i] = 2^(n[i] + x[i]) for |x[i]| <= 1/2 and -127 <= n[i] < 128, 0 for n[i] = -127, given
// shifted[i] = kRounder + n[i]. The chain of one vector is some 40 clocks long and a processor
// looks only some 100 instructions ahead: vectors that advance together, step by step, fill the
// multipliers.
template <int kCount>
ATTENTION_INLINE void exp2_of_parts(const F (&shifted)[kCount], F (&x)[kCount]) {
  F p[kCount];
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) p[i] = set(kExp2Polynomial[0]);
#pragma GCC unroll 8
  for (int k = 1; k < 6; ++k)
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) p[i] = fma(p[i], x[i], set(kExp2Polynomial[k]));
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i)
    x[i] = p[i] * bits_to_float((float_to_bits(shifted[i]) << 23) + set(0x3F800000));
}

// x[i] = e^x[i] for x <= 88; exactly 0 below -87.7 (so also for -inf), NaN for NaN.
// e^x = 2^n 2^f with n = round(x log2 e). The product x log2 e is never rounded: both of its uses
// are fused, which matters for very negative x.
template <int kCount>
ATTENTION_INLINE void exp(F (&x)[kCount]) {
  const F log2e = set(kLog2E), rounder = set(kRounder);
  F shifted[kCount];
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) x[i] = max(set(-88.f), x[i]);
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) shifted[i] = fma(x[i], log2e, rounder);
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) x[i] = fma(x[i], log2e, rounder - shifted[i]);
  exp2_of_parts(shifted, x);
}

// x[i] = 2^x[i] for x < 128; exactly 0 below -126.5, NaN for NaN.
template <int kCount>
ATTENTION_INLINE void exp2(F (&x)[kCount]) {
  const F rounder = set(kRounder);
  F shifted[kCount];
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) {
    x[i] = max(set(-127.f), x[i]);
    shifted[i] = x[i] + rounder;
    x[i] = x[i] - (shifted[i] - rounder);
  }
  exp2_of_parts(shifted, x);
}

ATTENTION_INLINE F exp(F x) {
  F one[1] = {x};
  exp(one);
  return one[0];
}

// Natural logarithm of positive normal numbers, within 0.9 units in the last place: x = 2^n (1 + f)
// with 1 + f in [sqrt(1/2), sqrt(2)], log(1 + f) = f - f^2 / 2 + f^3 P(f), P of degree 8 (minimax),
// and log(2) as the sum of a number of few digits, whose multiples are exact, and a small one.
ATTENTION_INLINE F log(F x) {
  constexpr float kPolynomial[] = {
      -0.11675651371479034f, 0.11888162791728973f, -0.1240558922290802f,  0.14219552278518677f,
      -0.1666799634695053f,  0.2000211924314499f,  -0.25000008940696716f, 0.3333331346511841f};
  const I exponent = (float_to_bits(x) - set(0x3F3504F3)) >> 23;
  const F n = to_float(exponent);
  const F f = bits_to_float(float_to_bits(x) - (exponent << 23)) - set(1.f);
  const F square = f * f;
  F p = set(0.0674663856625557f);
#pragma GCC unroll 8
  for (const float c : kPolynomial) p = fma(p, f, set(c));
  F small = fma(n, set(-2.12194440e-4f), p * f * square);
  small = fma(set(-0.5f), square, small);
  return fma(n, set(0.693359375f), f + small);
}

// tanh by a rational minimax approximation in x^2 (relative error 2.5e-7); 1 or -1 from 9 on, where
// it is so to float32's digits, so that a capped score there has no gradient.
ATTENTION_INLINE F tanh(F x) {
  x = max(set(-9.f), min(set(9.f), x));
  const F u = x * x;
  F n = set(1.3319484182261476e-8f);
  n = fma(n, u, set(2.0583787772920914e-5f));
  n = fma(n, u, set(3.494053613394499e-3f));
  n = fma(n, u, set(0.13379734754562378f));
  n = fma(n, u, set(1.f));
  F d = set(7.762190534776892e-7f);
  d = fma(d, u, set(3.283123660366982e-4f));
  d = fma(d, u, set(2.5871146470308304e-2f));
  d = fma(d, u, set(0.46713048219680786f));
  d = fma(d, u, set(1.f));
  const I sign = float_to_bits(x) & float_to_bits(set(-0.f));
  const F one = bits_to_float(sign | float_to_bits(set(1.f)));
  return select(equal(absolute(x), set(9.f)), one, x * n / d);
}

// The high and low halves of the 32 x 32 bit products a * factor.
ATTENTION_INLINE void multiply_wide(I a, u32 factor, I& high, I& low) {
#if defined(__AVX512F__)
  const __m512i f = _mm512_set1_epi32(static_cast<i32>(factor));
  const __m512i even = _mm512_mul_epu32((__m512i)a, f);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)a, 32), f);
  high = (I)_mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
  low = (I)_mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
#elif defined(__AVX2__)
  const __m256i f = _mm256_set1_epi32(static_cast<i32>(factor));
  const __m256i even = _mm256_mul_epu32((__m256i)a, f);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)a, 32), f);
  high = (I)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
  low = (I)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
#else
  for (int i = 0; i < kLanes; ++i) {
    const u64 product = u64{static_cast<u32>(a[i])} * factor;
    high[i] = static_cast<i32>(product >> 32);
    low[i] = static_cast<i32>(product);
  }
#endif
}

// In-place transpose of a kLanes x kLanes tile.
ATTENTION_INLINE void transpose(F (&r)[kLanes]) {
#if defined(__AVX512F__)
  // log2(16) perfect shuffles of the rows: each stage interleaves row i with row i + 8.
#pragma GCC unroll 4
  for (int stage = 0; stage < 4; ++stage) {
    F t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      t[2 * i] = __builtin_shufflevector(r[i], r[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21,
                                         6, 22, 7, 23);
      t[2 * i + 1] = __builtin_shufflevector(r[i], r[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28,
                                             13, 29, 14, 30, 15, 31);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) r[i] = t[i];
  }
#elif defined(__AVX2__)
  F t[8], u[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    t[i] = (F)_mm256_unpacklo_ps((__m256)r[i], (__m256)r[i + 1]);
    t[i + 1] = (F)_mm256_unpackhi_ps((__m256)r[i], (__m256)r[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    u[i] = (F)_mm256_shuffle_ps((__m256)t[i], (__m256)t[i + 2], 0x44);
    u[i + 1] = (F)_mm256_shuffle_ps((__m256)t[i], (__m256)t[i + 2], 0xEE);
    u[i + 2] = (F)_mm256_shuffle_ps((__m256)t[i + 1], (__m256)t[i + 3], 0x44);
    u[i + 3] = (F)_mm256_shuffle_ps((__m256)t[i + 1], (__m256)t[i + 3], 0xEE);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = (F)_mm256_permute2f128_ps((__m256)u[i], (__m256)u[i + 4], 0x20);
    r[i + 4] = (F)_mm256_permute2f128_ps((__m256)u[i], (__m256)u[i + 4], 0x31);
  }
#else
  const F a = __builtin_shufflevector(r[0], r[2], 0, 4, 1, 5);
  const F b = __builtin_shufflevector(r[0], r[2], 2, 6, 3, 7);
  const F c = __builtin_shufflevector(r[1], r[3], 0, 4, 1, 5);
  const F d = __builtin_shufflevector(r[1], r[3], 2, 6, 3, 7);
  r[0] = __builtin_shufflevector(a, c, 0, 4, 1, 5);
  r[1] = __builtin_shufflevector(a, c, 2, 6, 3, 7);
  r[2] = __builtin_shufflevector(b, d, 0, 4, 1, 5);
  r[3] = __builtin_shufflevector(b, d, 2, 6, 3, 7);
#endif
}

}  // namespace attention::cpu::ATTENTION_CPU_ISA
