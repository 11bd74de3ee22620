// SPDX-License-Identifier: Apache-2.0
// Scalar conversions between double and the element types, written apart from the kernels' own.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/common/problem.h"

namespace attention::testing {

// x rounded to a binary format with `mantissa` explicit bits and the given exponent range, ties to
// even.
inline double round_to(double x, int mantissa, int min_exponent, double largest) {
  if (!(std::fabs(x) < INFINITY) || x == 0) return x;
  int exponent = 0;
  std::frexp(x, &exponent);  // |x| in [2^(exponent - 1), 2^exponent)
  const int lsb = std::max(exponent - 1, min_exponent) - mantissa;
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(x, -lsb)), lsb);
  return std::fabs(rounded) > largest ? std::copysign(INFINITY, x) : rounded;
}

inline double round_to(double x, DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return static_cast<float>(x);
    case DType::kBFloat16:
      return round_to(x, 7, -126, 3.3895313892515355e38);
    case DType::kFloat16:
      return round_to(x, 10, -14, 65504.0);
  }
  return x;
}

inline uint16_t encode16(double x, DType dtype) {
  const float f = static_cast<float>(round_to(x, dtype));
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if (dtype == DType::kBFloat16) return static_cast<uint16_t>((bits >> 16) | (f != f ? 0x40 : 0));
  const uint16_t sign = static_cast<uint16_t>(std::signbit(f) ? 0x8000 : 0);
  if (f != f) return 0x7E00;
  const double size = std::fabs(f);
  if (size > 65504.0) return sign | 0x7C00;
  if (size < std::ldexp(1.0, -14))
    return sign | static_cast<uint16_t>(std::lround(std::ldexp(size, 24)));
  int exponent = 0;
  const double fraction = std::frexp(size, &exponent);
  return static_cast<uint16_t>(
      sign | ((exponent + 14) << 10) |
      static_cast<uint16_t>(std::lround(std::ldexp(fraction * 2 - 1, 10))));
}

inline double decode16(uint16_t x, DType dtype) {
  if (dtype == DType::kBFloat16) {
    const uint32_t bits = uint32_t{x} << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
  }
  const double sign = x & 0x8000 ? -1 : 1;
  const int exponent = (x >> 10) & 31, fraction = x & 0x3FF;
  if (exponent == 31) return fraction ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  return sign * std::ldexp(1024 + fraction, exponent - 25);
}

inline double read(const void* data, DType dtype, i64 index) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[index];
  return decode16(static_cast<const uint16_t*>(data)[index], dtype);
}

inline void write(void* data, DType dtype, i64 index, double x) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(data)[index] = static_cast<float>(x);
  } else {
    static_cast<uint16_t*>(data)[index] = encode16(x, dtype);
  }
}

}  // namespace attention::testing
