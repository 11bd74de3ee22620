// SPDX-License-Identifier: Apache-2.0
// The host's 16-bit conversions, bit by bit, against rounding in double precision.
#include "kernels/cuda/tile/types16.h"

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "kernels/cuda/tile/math.h"
#include "tests/native/check/check.h"

namespace attention::tile {
namespace {

// Value of a binary floating-point number with the given field widths, from its definition.
double value_of(u32 bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const u32 mantissa = bits & ((1u << mantissa_bits) - 1);
  const int exponent = static_cast<int>(bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const double sign = (bits >> (exponent_bits + mantissa_bits)) & 1u ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) return mantissa != 0 ? std::nan("") : sign * HUGE_VAL;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1u << mantissa_bits), exponent - bias - mantissa_bits);
}

bool same(double a, double b) {
  return (std::isnan(a) && std::isnan(b)) || (a == b && std::signbit(a) == std::signbit(b));
}

// The 16-bit number nearest to x, ties to an even mantissa, found by search among the neighbours of
// a guess.
u32 nearest(double x, u32 guess, int exponent_bits, int mantissa_bits) {
  u32 best = guess;
  double best_distance = HUGE_VAL;
  for (int step = -2; step <= 2; ++step) {
    const u32 magnitude = guess & 0x7fffu;
    if (static_cast<int>(magnitude) + step < 0) continue;
    const u32 candidate = (guess & 0x8000u) | (magnitude + static_cast<u32>(step));
    double value = value_of(candidate, exponent_bits, mantissa_bits);
    if (std::isnan(value)) continue;
    // Infinity stands for the next power of two when deciding who is nearest.
    const int max_exponent = 1 << (exponent_bits - 1);
    if (std::isinf(value)) value = std::copysign(std::ldexp(1.0, max_exponent), value);
    const double distance = std::fabs(value - x);
    if (distance < best_distance || (distance == best_distance && (candidate & 1u) == 0)) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

f32 float_of(u32 bits) { return bits_to_f32(bits); }

TEST(widening_is_exact_for_every_value) {
  for (u32 bits = 0; bits < 65536; ++bits) {
    EXPECT(same(to_f32(f16{static_cast<u16>(bits)}), value_of(bits, 5, 10)));
    EXPECT(same(to_f32(bf16{static_cast<u16>(bits)}), value_of(bits, 8, 7)));
  }
}

TEST(rounding_gives_back_every_value) {
  for (u32 bits = 0; bits < 65536; ++bits) {
    const f16 h{static_cast<u16>(bits)};
    const bf16 b{static_cast<u16>(bits)};
    if (!std::isnan(to_f32(h))) EXPECT(from_f32<f16>(to_f32(h)).bits == bits);
    if (!std::isnan(to_f32(b))) EXPECT(from_f32<bf16>(to_f32(b)).bits == bits);
  }
}

TEST(rounding_is_to_nearest_even) {
  u32 state = 1;
  for (int i = 0; i < 400000; ++i) {
    state = state * 1664525u + 1013904223u;
    // Half of the samples are exact ties or next to one.
    u32 bits = state;
    if (i % 4 == 1) bits = (bits & 0xffff0000u) | (0x7fffu + (bits & 3u));
    if (i % 4 == 2) bits = (bits & 0xffffe000u) | (0x0fffu + (bits & 3u));
    // Exponents where f16 is subnormal, normal, near overflow.
    if (i % 4 >= 2) bits = (bits & 0x807fffffu) | ((100u + (bits >> 8) % 45u) << 23);
    const f32 x = float_of(bits);
    if (std::isnan(x) || std::isinf(x)) continue;
    const u16 b = from_f32<bf16>(x).bits;
    EXPECT_THAT(b == nearest(x, bits >> 16, 8, 7), "bf16 of " + std::to_string(x));
    const u16 h = from_f32<f16>(x).bits;
    const u32 expected =
        std::fabs(x) >= 131072.0f ? ((bits >> 16 & 0x8000u) | 0x7c00u) : nearest(x, h, 5, 10);
    EXPECT_THAT(h == expected, "f16 of " + std::to_string(x));
    // A wrong h cannot pass as a local optimum: it must be within one part in 2048 (or 2^-25).
    if (std::fabs(x) < 65504.0f) {
      EXPECT(std::fabs(value_of(h, 5, 10) - x) <=
             std::fmax(std::fabs(x) / 2048, std::ldexp(1.0, -25)));
    }
  }
}

TEST(special_values) {
  EXPECT(from_f32<f16>(65519.996f).bits == 0x7bff);
  EXPECT(from_f32<f16>(65520.0f).bits == 0x7c00);
  EXPECT(from_f32<f16>(-infinity()).bits == 0xfc00);
  EXPECT(from_f32<bf16>(float_of(0x7f7fffffu)).bits == 0x7f80);
  EXPECT(std::isnan(to_f32(from_f32<f16>(std::nanf("")))));
  EXPECT(std::isnan(to_f32(from_f32<bf16>(float_of(0x7f800001u)))));
  EXPECT(from_f32<f16>(-0.0f).bits == 0x8000 && from_f32<bf16>(-0.0f).bits == 0x8000);
}

TEST(pairs_keep_their_order) {
  EXPECT(pack2<bf16>(1.0f, -2.0f) == 0xc0003f80u);
  EXPECT(pack2<f16>(1.0f, -2.0f) == 0xc0003c00u);
  EXPECT(unpack_low<bf16>(0xc0003f80u) == 1.0f && unpack_high<bf16>(0xc0003f80u) == -2.0f);
  EXPECT(unpack_low<f16>(0xc0003c00u) == 1.0f && unpack_high<f16>(0xc0003c00u) == -2.0f);
}

TEST(tf32_rounds_ties_away) {
  EXPECT(round_tf32(1.0f) == 0x3f800000u);
  EXPECT(round_tf32(float_of(0x3f800fffu)) == 0x3f800000u);
  EXPECT(round_tf32(float_of(0x3f801000u)) == 0x3f802000u);
  EXPECT(round_tf32(float_of(0xbf801000u)) == 0xbf802000u);
  EXPECT(round_tf32(float_of(0x3f803000u)) == 0x3f804000u);
  EXPECT(round_tf32(infinity()) == 0x7f800000u);
  EXPECT(std::isnan(float_of(round_tf32(std::nanf("")))));
}

TEST(accurate_tanh) {
  double worst = 0.0;
  for (int i = -400000; i <= 400000; ++i) {
    const f32 x = static_cast<f32>(i) * 2.5e-5f;
    const double expected = std::tanh(static_cast<double>(x));
    if (x == 0.0f) {
      EXPECT(tanh_accurate(x) == 0.0f);
      continue;
    }
    worst = std::fmax(worst, std::fabs(tanh_accurate(x) - expected) / std::fabs(expected));
  }
  EXPECT_THAT(worst < 6e-7,
              "relative error of tanh_accurate " + std::to_string(worst * 1e7) + "e-7");
  EXPECT(tanh_accurate(100.0f) == 1.0f && tanh_accurate(-100.0f) == -1.0f);
  EXPECT(tanh_accurate(1e-20f) == 1e-20f);
}

}  // namespace
}  // namespace attention::tile

TEST_MAIN()
