// SPDX-License-Identifier: Apache-2.0
// Launching a kernel from host code: on the GPU under nvcc, on the emulator under a host compiler.
// Host code only; device headers do not include it.
#pragma once

#include "kernels/common/status.h"
#include "kernels/cuda/tile/tile.h"

#if ATTENTION_ON_GPU
#include <cuda_runtime_api.h>

#include <atomic>
#include <mutex>
#else
#include "kernels/emulator/launch.h"
#endif

namespace attention {

// A cudaStream_t, or anything at all for the emulator, which runs the kernel before it returns.
using Stream = void*;

namespace tile {

inline constexpr u32 kMaxGridYZ = 65535;
inline constexpr u32 kMaxGridX = 2147483647;

inline Status check_grid(Dim3 grid) {
  if (grid.x > kMaxGridX || grid.y > kMaxGridYZ || grid.z > kMaxGridYZ) {
    return Status::error("grid %u x %u x %u is too large: x may be up to %u, y and z up to %u",
                         grid.x, grid.y, grid.z, kMaxGridX, kMaxGridYZ);
  }
  return Status();
}

#if ATTENTION_ON_GPU

template <typename Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kMinBlocks)
    entry(const __grid_constant__ typename Kernel::Params params) {
  extern __shared__ __align__(1024) unsigned char shared_window[];
  Smem smem(shared_window);
  Kernel::run(params, smem);
}

namespace detail {

inline Status status_of(cudaError_t error) {
  if (error == cudaSuccess) return Status();
  return Status::error("CUDA error %d: %s", static_cast<int>(error), cudaGetErrorString(error));
}

// A kernel needs an opt-in, on each device, before it may use more than 48 KB of shared memory. The
// call is made only when a launch asks for more than any launch before it.
template <typename Kernel>
Status allow_shared_memory(int bytes) {
  if (bytes <= 48 * 1024) return Status();
  constexpr int kMaxDevices = 64;
  static std::atomic<int> allowed[kMaxDevices] = {};
  int device = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return status_of(error);
  const bool known = device < kMaxDevices;
  if (known && allowed[device].load(std::memory_order_acquire) >= bytes) return Status();
  // Another thread may allow more at the same moment: the attribute must not shrink under it.
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (known && allowed[device].load(std::memory_order_acquire) >= bytes) return Status();
  const cudaError_t error =
      cudaFuncSetAttribute(entry<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return status_of(error);
  if (known) allowed[device].store(bytes, std::memory_order_release);
  return Status();
}

}  // namespace detail
#endif

}  // namespace tile

// Runs Kernel on `grid` blocks. An empty grid is a no-op. Errors of the launch itself are returned;
// errors while the kernel runs surface on the stream later (GPU) or here (emulator).
template <typename Kernel>
Status launch(Dim3 grid, Stream stream, const typename Kernel::Params& params) {
  static_assert(Kernel::kThreads % tile::kWarpSize == 0 && Kernel::kThreads <= 1024,
                "a block is whole warps");
  if (Status status = tile::check_grid(grid); !status.ok()) return status;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return Status();
  const int shared_memory = Kernel::smem_bytes(params);
#if ATTENTION_ON_GPU
  if (Status status = tile::detail::allow_shared_memory<Kernel>(shared_memory); !status.ok()) {
    return status;
  }
  void* args[] = {const_cast<typename Kernel::Params*>(&params)};
  return tile::detail::status_of(
      cudaLaunchKernel(reinterpret_cast<const void*>(tile::entry<Kernel>),
                       dim3(grid.x, grid.y, grid.z), dim3(Kernel::kThreads), args,
                       static_cast<std::size_t>(shared_memory), static_cast<cudaStream_t>(stream)));
#else
  (void)stream;
  emulator::Program program;
  program.threads = Kernel::kThreads;
  program.smem_bytes = shared_memory;
  program.grid[0] = grid.x;
  program.grid[1] = grid.y;
  program.grid[2] = grid.z;
  program.params = &params;
  program.run = [](const void* p) {
    tile::Smem smem;
    Kernel::run(*static_cast<const typename Kernel::Params*>(p), smem);
  };
  const char* report = emulator::run(program);
  return report == nullptr ? Status() : Status::error("%s", report);
#endif
}

// Sets `bytes` bytes to zero before whatever is launched on the stream next (counters, accumulated
// gradients).
inline Status zero_async(Stream stream, void* p, u64 bytes) {
#if ATTENTION_ON_GPU
  return tile::detail::status_of(cudaMemsetAsync(p, 0, bytes, static_cast<cudaStream_t>(stream)));
#else
  (void)stream;
  emulator::zero(p, bytes);
  return Status();
#endif
}

}  // namespace attention
