// SPDX-License-Identifier: Apache-2.0
// Vectors of float32 from and to memory of any element type. Rounding is to nearest, ties to even.
#pragma once

#include "kernels/cpu/simd.h"

namespace attention::cpu::ATTENTION_CPU_ISA {

// Element types as tags: memory is addressed as u16 for both 16-bit types.
struct Float32 {
  using Memory = float;
};
struct BFloat16 {
  using Memory = u16;
};
struct Float16 {
  using Memory = u16;
};

// Calls function(tag) for the element type.
template <typename Function>
ATTENTION_INLINE void with_type(DType dtype, const Function& function) {
  switch (dtype) {
    case DType::kFloat32:
      return function(Float32{});
    case DType::kBFloat16:
      return function(BFloat16{});
    case DType::kFloat16:
      return function(Float16{});
  }
}

ATTENTION_INLINE const void* element(const void* base, DType dtype, i64 index) {
  return static_cast<const char*>(base) + index * size_of(dtype);
}

#if defined(__AVX512F__)
typedef __m256i Half;  // kLanes 16-bit elements
ATTENTION_INLINE Half load_half(const u16* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
ATTENTION_INLINE void store_half(u16* p, Half x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x);
}
ATTENTION_INLINE F widen(BFloat16, Half x) {
  return (F)_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16);
}
ATTENTION_INLINE F widen(Float16, Half x) { return (F)_mm512_cvtph_ps(x); }
ATTENTION_INLINE Half truncate_lanes(I x) { return _mm512_cvtepi32_epi16((__m512i)x); }
ATTENTION_INLINE Half narrow_float16(F x) {
  return _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif defined(__AVX2__)
typedef __m128i Half;
ATTENTION_INLINE Half load_half(const u16* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
ATTENTION_INLINE void store_half(u16* p, Half x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), x);
}
ATTENTION_INLINE F widen(BFloat16, Half x) {
  return (F)_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16);
}
ATTENTION_INLINE F widen(Float16, Half x) { return (F)_mm256_cvtph_ps(x); }
ATTENTION_INLINE Half truncate_lanes(I x) {
  const __m256i low = _mm256_and_si256((__m256i)x, _mm256_set1_epi32(0xFFFF));
  const __m256i packed = _mm256_packus_epi32(low, low);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}
ATTENTION_INLINE Half narrow_float16(F x) {
  return _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#else
typedef u16 Half __attribute__((vector_size(2 * kLanes)));
typedef Half UnalignedHalf __attribute__((aligned(2), may_alias));
ATTENTION_INLINE Half load_half(const u16* p) { return *reinterpret_cast<const UnalignedHalf*>(p); }
ATTENTION_INLINE void store_half(u16* p, Half x) { *reinterpret_cast<UnalignedHalf*>(p) = x; }
ATTENTION_INLINE F widen(BFloat16, Half x) { return (F)(__builtin_convertvector(x, U) << 16); }
ATTENTION_INLINE F widen(Float16, Half x) {
  const U bits = __builtin_convertvector(x, U);
  const I sign = (I)((bits & 0x8000u) << 16);
  const I magnitude = (I)(bits & 0x7FFFu);
  // A subnormal is a small integer times 2^-24. No step of this is subnormal in float32: XLA's
  // threads flush those to zero.
  const F subnormal = __builtin_convertvector(magnitude, F) * set(0x1p-24f);
  const F normal = bits_to_float((magnitude << 13) + set(112 << 23));
  const F special = bits_to_float((magnitude << 13) | set(0x7F800000));
  const F finite = select(less(magnitude, set(0x0400)), subnormal, normal);
  const F value = select(less(magnitude, set(0x7C00)), finite, special);
  return bits_to_float(float_to_bits(value) | sign);
}
ATTENTION_INLINE Half truncate_lanes(I x) { return __builtin_convertvector((U)x, Half); }
ATTENTION_INLINE Half narrow_float16(F x) {
  const I bits = float_to_bits(x);
  const I sign = (bits >> 16) & set(0x8000);
  const F size = absolute(x);
  // Normal results: round the 13 bits that fall away, to even; the carry may reach the exponent.
  const I abs_bits = float_to_bits(size);
  const I odd = (abs_bits >> 13) & set(1);
  I normal = (abs_bits - set(112 << 23) + set(0xFFF) + odd) >> 13;
  // Subnormal results: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits.
  const I subnormal = float_to_bits(size + set(0.5f)) - float_to_bits(set(0.5f));
  I result = (I)select(less(abs_bits, set(113 << 23)), (F)subnormal, (F)normal);
  result = (I)select(less(abs_bits, set(0x477FF000)), (F)result, (F)set(0x7C00));
  result = (I)select(less(set(0x7F800000), abs_bits), (F)set(0x7E00), (F)result);
  return truncate_lanes(result | sign);
}
#endif

ATTENTION_INLINE Half narrow(Float16, F x) { return narrow_float16(x); }
ATTENTION_INLINE Half narrow(BFloat16, F x) {
#if defined(__AVX512BF16__)
  return (Half)_mm512_cvtneps_pbh((__m512)x);
#else
  const I bits = float_to_bits(x);
  const I rounded = (bits + set(0x7FFF) + ((bits >> 16) & set(1))) >> 16;
  const I quiet_nan = (bits >> 16) | set(0x40);
  return truncate_lanes((I)select(equal(x, x), (F)rounded, (F)quiet_nan));
#endif
}

template <typename T>
ATTENTION_INLINE F load_as(T tag, const typename T::Memory* p) {
  if constexpr (sizeof(typename T::Memory) == 4) {
    (void)tag;
    return load(p);
  } else {
    return widen(tag, load_half(p));
  }
}

template <typename T>
ATTENTION_INLINE void store_as(T tag, typename T::Memory* p, F x) {
  if constexpr (sizeof(typename T::Memory) == 4) {
    (void)tag;
    store(p, x);
  } else {
    store_half(p, narrow(tag, x));
  }
}

// The first n < kLanes elements; the other lanes are 0 and nothing past element n is touched.
template <typename T>
ATTENTION_INLINE F load_first(T tag, const typename T::Memory* p, int n) {
#if defined(__AVX512F__)
  const __mmask16 mask = static_cast<__mmask16>((1u << n) - 1);
  if constexpr (sizeof(typename T::Memory) == 4) {
    (void)tag;
    return (F)_mm512_maskz_loadu_ps(mask, p);
  } else {
    return widen(tag, _mm256_maskz_loadu_epi16(mask, p));
  }
#else
  typename T::Memory buffer[kLanes] = {};
  for (int i = 0; i < n; ++i) buffer[i] = p[i];
  return load_as(tag, buffer);
#endif
}

template <typename T>
ATTENTION_INLINE void store_first(T tag, typename T::Memory* p, F x, int n) {
#if defined(__AVX512F__)
  const __mmask16 mask = static_cast<__mmask16>((1u << n) - 1);
  if constexpr (sizeof(typename T::Memory) == 4) {
    (void)tag;
    _mm512_mask_storeu_ps(p, mask, (__m512)x);
  } else {
    _mm256_mask_storeu_epi16(p, mask, narrow(tag, x));
  }
#else
  typename T::Memory buffer[kLanes];
  store_as(tag, buffer, x);
  for (int i = 0; i < n; ++i) p[i] = buffer[i];
#endif
}

template <typename T>
ATTENTION_INLINE F load_upto(T tag, const typename T::Memory* p, i64 n) {
  return n >= kLanes ? load_as(tag, p) : load_first(tag, p, static_cast<int>(n));
}

template <typename T>
ATTENTION_INLINE void store_upto(T tag, typename T::Memory* p, F x, i64 n) {
  if (n >= kLanes) {
    store_as(tag, p, x);
  } else {
    store_first(tag, p, x, static_cast<int>(n));
  }
}

}  // namespace attention::cpu::ATTENTION_CPU_ISA
