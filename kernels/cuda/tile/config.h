// SPDX-License-Identifier: Apache-2.0
// Annotations that let one kernel source be device code under nvcc (or NVRTC) and plain C++ under a
// host compiler.
//
// ATTENTION_ON_GPU is 1 while a CUDA compiler reads the file, 0 when the emulator's host build
// does. Nothing outside kernels/cuda/tile may look at it: a kernel that behaves differently on the
// two is not tested by the emulator.
#pragma once

#include "kernels/common/types.h"

#if defined(__CUDACC__)
#define ATTENTION_ON_GPU 1
#define ATTENTION_DEVICE __device__ __forceinline__
#define ATTENTION_UNROLL _Pragma("unroll")
// For bodies so long that copies of them would cost more than the loop.
#define ATTENTION_NO_UNROLL _Pragma("unroll 1")
#else
#define ATTENTION_ON_GPU 0
#define ATTENTION_DEVICE inline
// The host compiler decides for itself; full unrolling would only make the emulated build slow to
// compile.
#define ATTENTION_UNROLL
#define ATTENTION_NO_UNROLL
#endif

#if !ATTENTION_ON_GPU
#include <cmath>
#include <cstring>

#include "kernels/emulator/device.h"
#endif

namespace attention {

using f32 = float;

// Extents or indices of a grid of blocks. A type of our own: the host build has no CUDA header.
struct Dim3 {
  u32 x = 1;
  u32 y = 1;
  u32 z = 1;
};

namespace tile {

inline constexpr int kWarpSize = 32;

}  // namespace tile
}  // namespace attention
