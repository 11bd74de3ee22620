// SPDX-License-Identifier: Apache-2.0
// bf16 and f16 storage types and their conversions. On the host the conversions are software, round
// to nearest even, so that the emulated build needs no CUDA header and gives the bits that the GPU
// gives.
#pragma once

#include "kernels/cuda/tile/math.h"

namespace attention::tile {

struct alignas(2) bf16 {
  u16 bits;
};

struct alignas(2) f16 {
  u16 bits;
};

static_assert(sizeof(bf16) == 2 && sizeof(f16) == 2, "16-bit types must have no padding");

#if !ATTENTION_ON_GPU
namespace host {

inline u16 round_bf16(f32 x) {
  const u32 bits = f32_to_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;  // the canonical NaN of cvt.rn.bf16.f32
  return static_cast<u16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline u16 round_f16(f32 x) {
  const u32 bits = f32_to_bits(x);
  const u32 sign = (bits >> 16) & 0x8000u;
  const u32 magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fffu;
  if (magnitude >= 0x477ff000u)
    return static_cast<u16>(sign | 0x7c00u);  // 65520 and above round to infinity
  if (magnitude < 0x38800000u) {
    // Subnormal result: adding 0.5 aligns the ulp of the sum (2^-24) with the ulp of an f16
    // subnormal, so that the float addition itself does the rounding to nearest even.
    const f32 aligned = bits_to_f32(magnitude) + 0.5f;
    return static_cast<u16>(sign | (f32_to_bits(aligned) - 0x3f000000u));
  }
  const u32 rebased = magnitude - 0x38000000u;  // exponent bias 127 -> 15
  return static_cast<u16>(sign | ((rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13));
}

inline f32 widen_f16(u16 bits) {
  const u32 magnitude = bits & 0x7fffu;
  const u32 sign = static_cast<u32>(bits & 0x8000u) << 16;
  if (magnitude >= 0x7c00u) return bits_to_f32(sign | 0x7f800000u | magnitude << 13);  // inf, NaN
  if (magnitude >= 0x0400u) return bits_to_f32(sign | ((magnitude << 13) + 0x38000000u));
  // A subnormal is a small integer times 2^-24. No step of this is subnormal in f32: XLA's threads
  // flush those to zero.
  return bits_to_f32(sign | f32_to_bits(static_cast<f32>(magnitude) * bits_to_f32(0x33800000u)));
}

}  // namespace host
#endif

ATTENTION_DEVICE f32 to_f32(f32 x) { return x; }

ATTENTION_DEVICE f32 to_f32(bf16 x) { return bits_to_f32(static_cast<u32>(x.bits) << 16); }

ATTENTION_DEVICE f32 to_f32(f16 x) {
#if ATTENTION_ON_GPU
  f32 y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
#else
  return host::widen_f16(x.bits);
#endif
}

// Converts with round to nearest even; T is f32, bf16 or f16.
template <typename T>
ATTENTION_DEVICE T from_f32(f32 x);

template <>
ATTENTION_DEVICE f32 from_f32<f32>(f32 x) {
  return x;
}

template <>
ATTENTION_DEVICE bf16 from_f32<bf16>(f32 x) {
#if ATTENTION_ON_GPU
  bf16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
#else
  return bf16{host::round_bf16(x)};
#endif
}

template <>
ATTENTION_DEVICE f16 from_f32<f16>(f32 x) {
#if ATTENTION_ON_GPU
  f16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
#else
  return f16{host::round_f16(x)};
#endif
}

// Two 16-bit values in one register, `low` in the lower half: the order of a fragment and of
// memory.
template <typename T>
ATTENTION_DEVICE u32 pack2(f32 low, f32 high) {
  return static_cast<u32>(from_f32<T>(low).bits) | static_cast<u32>(from_f32<T>(high).bits) << 16;
}

#if ATTENTION_ON_GPU
// One instruction for both.
template <>
ATTENTION_DEVICE u32 pack2<bf16>(f32 low, f32 high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

template <>
ATTENTION_DEVICE u32 pack2<f16>(f32 low, f32 high) {
  u32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
#endif

template <typename T>
ATTENTION_DEVICE f32 unpack_low(u32 packed) {
  return to_f32(T{static_cast<u16>(packed & 0xffffu)});
}

template <typename T>
ATTENTION_DEVICE f32 unpack_high(u32 packed) {
  return to_f32(T{static_cast<u16>(packed >> 16)});
}

// f32 rounded to the 10 mantissa bits of tf32, ties away from zero (cvt.rna.tf32.f32), as a
// register of mma.
ATTENTION_DEVICE u32 round_tf32(f32 x) {
#if ATTENTION_ON_GPU
  u32 y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
#else
  const u32 bits = f32_to_bits(x);
  if ((bits & 0x7f800000u) == 0x7f800000u) return bits;  // infinity and NaN have nothing to round
  return (bits + 0x1000u) & 0xffffe000u;
#endif
}

}  // namespace attention::tile
