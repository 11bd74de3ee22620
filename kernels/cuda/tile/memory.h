// SPDX-License-Identifier: Apache-2.0
// Loads and stores of global and shared memory. Kernels reach memory through these functions alone,
// so that the emulator sees every access (bounds, races, uninitialised reads, outputs written
// once).
#pragma once

#include "kernels/cuda/tile/config.h"
#include "kernels/cuda/tile/types16.h"

namespace attention::tile {

// N consecutive elements moved as one access of N * sizeof(T) = 1, 2, 4, 8 or 16 bytes.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vec {
  static_assert(N > 0 && (N & (N - 1)) == 0 && sizeof(T) * N <= 16,
                "one access moves at most 16 bytes");
  T v[N];
  ATTENTION_HOST_DEVICE T& operator[](int i) { return v[i]; }
  ATTENTION_HOST_DEVICE const T& operator[](int i) const { return v[i]; }
};

// Address of a T in shared memory. Supports arithmetic in elements and nothing else: data moves
// through shared_load and shared_store.
template <typename T>
struct Shared {
  T* p;
  ATTENTION_HOST_DEVICE Shared operator+(int n) const { return Shared{p + n}; }
  // The same address seen as another element type.
  template <typename U>
  ATTENTION_HOST_DEVICE Shared<U> as() const {
    return Shared<U>{reinterpret_cast<U*>(p)};
  }
};

#if ATTENTION_ON_GPU
namespace detail {

template <int Bytes>
struct Word;
template <>
struct Word<1> {
  using type = unsigned char;
};
template <>
struct Word<2> {
  using type = unsigned short;
};
template <>
struct Word<4> {
  using type = unsigned int;
};
template <>
struct Word<8> {
  using type = uint2;
};
template <>
struct Word<16> {
  using type = uint4;
};

// Bit copy between a Vec and the machine word that one instruction moves; resolved at compile time
// to registers.
template <typename To, typename From>
ATTENTION_DEVICE To bit_copy(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_copy keeps the size");
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

// 32-bit address of the shared window, as PTX wants it.
template <typename T>
ATTENTION_DEVICE u32 window_address(Shared<T> s) {
  return static_cast<u32>(__cvta_generic_to_shared(s.p));
}

}  // namespace detail
#endif

// ---- global memory ----

// Loads N elements; p is aligned to N * sizeof(T) bytes.
template <int N = 1, typename T>
ATTENTION_DEVICE Vec<T, N> global_load(const T* p) {
#if ATTENTION_ON_GPU
  using W = typename detail::Word<N * sizeof(T)>::type;
  return detail::bit_copy<Vec<T, N>>(*reinterpret_cast<const W*>(p));
#else
  Vec<T, N> value;
  emulator::global_read(&value, p, sizeof(value));
  return value;
#endif
}

// global_load through the read-only cache: only for data that no thread of the grid writes (q, k,
// v, masks, lengths).
template <int N = 1, typename T>
ATTENTION_DEVICE Vec<T, N> global_load_constant(const T* p) {
#if ATTENTION_ON_GPU
  using W = typename detail::Word<N * sizeof(T)>::type;
  return detail::bit_copy<Vec<T, N>>(__ldg(reinterpret_cast<const W*>(p)));
#else
  Vec<T, N> value;
  emulator::global_read_constant(&value, p, sizeof(value));
  return value;
#endif
}

// One element, or `otherwise` without touching memory when !in_bounds.
template <typename T>
ATTENTION_DEVICE T global_load_or(const T* p, bool in_bounds, T otherwise) {
  return in_bounds ? global_load_constant<1>(p)[0] : otherwise;
}

template <int N, typename T>
ATTENTION_DEVICE void global_store(T* p, const Vec<T, N>& value) {
#if ATTENTION_ON_GPU
  using W = typename detail::Word<N * sizeof(T)>::type;
  *reinterpret_cast<W*>(p) = detail::bit_copy<W>(value);
#else
  emulator::global_write(p, &value, sizeof(value));
#endif
}

template <typename T>
ATTENTION_DEVICE void global_store(T* p, T value) {
  global_store(p, Vec<T, 1>{{value}});
}

// ---- shared memory ----

template <int N = 1, typename T>
ATTENTION_DEVICE Vec<T, N> shared_load(Shared<T> s) {
#if ATTENTION_ON_GPU
  using W = typename detail::Word<N * sizeof(T)>::type;
  return detail::bit_copy<Vec<T, N>>(*reinterpret_cast<const W*>(s.p));
#else
  Vec<T, N> value;
  emulator::shared_read(&value, s.p, sizeof(value));
  return value;
#endif
}

template <int N, typename T>
ATTENTION_DEVICE void shared_store(Shared<T> s, const Vec<T, N>& value) {
#if ATTENTION_ON_GPU
  using W = typename detail::Word<N * sizeof(T)>::type;
  *reinterpret_cast<W*>(s.p) = detail::bit_copy<W>(value);
#else
  emulator::shared_write(s.p, &value, sizeof(value));
#endif
}

template <typename T>
ATTENTION_DEVICE void shared_store(Shared<T> s, T value) {
  shared_store(s, Vec<T, 1>{{value}});
}

// ---- the block's shared memory ----

// Alignment of every take: enough for the swizzles of a 128-byte line and for bulk copies.
inline constexpr int kSharedAlign = 128;

// Bytes that take<T>(n) uses. Kernel::smem_bytes() is the sum over its takes.
template <typename T>
ATTENTION_HOST_DEVICE constexpr int shared_bytes(int n) {
  return round_up(n * static_cast<int>(sizeof(T)), kSharedAlign);
}

// Hands out the block's dynamic shared memory. All threads take the same sizes in the same order.
// In the emulator each take is surrounded by red zones and filled with NaN, so take pipeline stages
// one by one.
class Smem {
 public:
#if ATTENTION_ON_GPU
  ATTENTION_DEVICE explicit Smem(unsigned char* base) : base_(base) {}
#else
  Smem() = default;
#endif

  template <typename T>
  ATTENTION_DEVICE Shared<T> take(int n) {
#if ATTENTION_ON_GPU
    unsigned char* p = base_;
    base_ += shared_bytes<T>(n);
    return Shared<T>{reinterpret_cast<T*>(p)};
#else
    return Shared<T>{
        static_cast<T*>(emulator::shared_take(taken_++, shared_bytes<T>(n), n * sizeof(T)))};
#endif
  }

 private:
#if ATTENTION_ON_GPU
  unsigned char* base_;
#else
  int taken_ = 0;
#endif
};

// `count` equal pieces of shared memory: the stages of a pipeline. Each is a take of its own, so
// that the emulator sees an access that runs from one stage into the next.
template <typename T>
class Ring {
 public:
  static constexpr int kMaxStages = 8;

  // Bytes that take() uses.
  ATTENTION_HOST_DEVICE static constexpr int bytes(int count, int elements) {
    return count * shared_bytes<T>(elements);
  }

  ATTENTION_DEVICE static Ring take(Smem& smem, int count, int elements) {
    Ring ring;
#if ATTENTION_ON_GPU
    ring.first_ = smem.take<T>(elements);
    ring.stride_ = shared_bytes<T>(elements) / static_cast<int>(sizeof(T));
    for (int i = 1; i < count; ++i) smem.take<T>(elements);
#else
    emulator::require_stages(count, kMaxStages);
    for (int i = 0; i < count; ++i) ring.stage_[i] = smem.take<T>(elements);
#endif
    return ring;
  }

  // The first element of stage i.
  ATTENTION_DEVICE Shared<T> operator[](int i) const {
#if ATTENTION_ON_GPU
    return first_ + i * stride_;
#else
    return stage_[i];
#endif
  }

 private:
#if ATTENTION_ON_GPU
  Shared<T> first_;
  int stride_;
#else
  Shared<T> stage_[kMaxStages] = {};
#endif
};

}  // namespace attention::tile
