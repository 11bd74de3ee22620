// SPDX-License-Identifier: Apache-2.0
// Functions of f32: its bits, the fast functions of the special-function unit, and the few accurate
// ones that attention needs on top of them.
#pragma once

#include "kernels/cuda/tile/config.h"

namespace attention::tile {

inline constexpr f32 kLog2E = 1.4426950408889634f;
inline constexpr f32 kLn2 = 0.6931471805599453f;

ATTENTION_DEVICE u32 f32_to_bits(f32 x) {
  u32 bits;
  memcpy(&bits, &x, 4);
  return bits;
}

ATTENTION_DEVICE f32 bits_to_f32(u32 bits) {
  f32 x;
  memcpy(&x, &bits, 4);
  return x;
}

ATTENTION_DEVICE f32 infinity() { return bits_to_f32(0x7f800000u); }

// 2^x; error 2 ulp (ex2.approx), 0 for -inf. Subnormal results may be flushed to zero.
ATTENTION_DEVICE f32 exp2_approx(f32 x) {
#if ATTENTION_ON_GPU
  f32 y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return std::exp2(x);
#endif
}

// log2(x); absolute error 2^-22 near 1 (lg2.approx), -inf for 0.
ATTENTION_DEVICE f32 log2_approx(f32 x) {
#if ATTENTION_ON_GPU
  f32 y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return std::log2(x);
#endif
}

// a * b + c in one rounding.
ATTENTION_DEVICE f32 fma(f32 a, f32 b, f32 c) { return fmaf(a, b, c); }

// a * b rounded on its own: the compiler may not make one rounding of it and an addition that
// follows. For products that are formed in two places and have to cancel.
ATTENTION_DEVICE f32 multiply(f32 a, f32 b) {
#if ATTENTION_ON_GPU
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

ATTENTION_DEVICE f32 max_f32(f32 a, f32 b) {
#if ATTENTION_ON_GPU
  return fmaxf(a, b);
#else
  return (a > b || b != b) ? a : b;  // inline, unlike std::fmax; a NaN loses, as in max.f32
#endif
}

ATTENTION_DEVICE f32 min_f32(f32 a, f32 b) {
#if ATTENTION_ON_GPU
  return fminf(a, b);
#else
  return (a < b || b != b) ? a : b;
#endif
}

ATTENTION_DEVICE f32 abs_f32(f32 x) { return fabsf(x); }

// tanh(x) to a few ulp of f32: 1 - 2 / (e^2|x| + 1) cancels for small |x|, where the odd Taylor
// series takes over.
ATTENTION_DEVICE f32 tanh_accurate(f32 x) {
  const f32 a = abs_f32(x);
  if (a < 0.25f) {
    const f32 x2 = x * x;
    f32 p = fma(x2, -1382.0f / 155925.0f, 62.0f / 2835.0f);
    p = fma(x2, p, -17.0f / 315.0f);
    p = fma(x2, p, 2.0f / 15.0f);
    p = fma(x2, p, -1.0f / 3.0f);
    return fma(x * x2, p, x);
  }
  const f32 y = 1.0f - 2.0f / (exp2_approx(2.0f * kLog2E * a) + 1.0f);
  return x < 0.0f ? -y : y;
}

}  // namespace attention::tile
