// SPDX-License-Identifier: Apache-2.0
// Fixed-width names and the host/device annotation. No std header is included, so that device
// headers can be shipped as text to a run-time compiler that has none.
#pragma once

#if defined(__CUDACC__)
#define ATTENTION_HOST_DEVICE __host__ __device__ __forceinline__
#else
// always_inline: a plain `inline` function used by a translation unit that is compiled for AVX-512
// could leave an out-of-line copy there, which the linker may pick for everybody.
#define ATTENTION_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace attention {

using i8 = signed char;
using u8 = unsigned char;
using i16 = short;
using u16 = unsigned short;
using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

static_assert(sizeof(i32) == 4 && sizeof(i64) == 8 && sizeof(i16) == 2,
              "unexpected integer widths");

template <typename T>
ATTENTION_HOST_DEVICE constexpr T min_of(T a, T b) {
  return a < b ? a : b;
}

template <typename T>
ATTENTION_HOST_DEVICE constexpr T max_of(T a, T b) {
  return a > b ? a : b;
}

template <typename T>
ATTENTION_HOST_DEVICE constexpr T clamp_to(T x, T low, T high) {
  return min_of(max_of(x, low), high);
}

// Smallest integer >= a / b, for a >= 0 and b > 0.
template <typename T>
ATTENTION_HOST_DEVICE constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

template <typename T>
ATTENTION_HOST_DEVICE constexpr T round_up(T a, T b) {
  return ceil_div(a, b) * b;
}

}  // namespace attention
