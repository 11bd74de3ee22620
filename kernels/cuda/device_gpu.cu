// SPDX-License-Identifier: Apache-2.0
// The current GPU, and whether this library has code for it.
#include <cuda_runtime_api.h>

#include <atomic>

#include "kernels/cuda/attention.h"

namespace attention::cuda {
namespace {

// Compiled for the same architectures as every other kernel of the library.
__global__ void probe() {}

// __CUDA_ARCH_LIST__ is nvcc's list of the architectures that this file is compiled for.
#define ATTENTION_TEXT_OF(...) #__VA_ARGS__
#define ATTENTION_EXPANDED_TEXT_OF(...) ATTENTION_TEXT_OF(__VA_ARGS__)
constexpr const char* kBuiltArchitectures = ATTENTION_EXPANDED_TEXT_OF(__CUDA_ARCH_LIST__);

Status examine(int index, Device* device) {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, probe);
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorUnsupportedPtxVersion) {
    cudaGetLastError();  // it would otherwise surface in the next call of somebody else
    int major = 0;
    int minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index);
    return Status::error(
        "attention: the device has compute capability %d.%d; this library was built for the "
        "architectures %s (hundreds are the major version) and runs on newer ones only with a "
        "driver that can compile its PTX",
        major, minor, kBuiltArchitectures);
  }
  if (error != cudaSuccess) return Status::error("attention: %s", cudaGetErrorString(error));
  int bytes = 0;
  if (cudaError_t e =
          cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
      e != cudaSuccess) {
    return Status::error("attention: %s", cudaGetErrorString(e));
  }
  device->shared_memory = bytes;
  return Status();
}

}  // namespace

Status current_device(Device* device) {
  constexpr int kMaxDevices = 64;
  // 0: not examined yet. Launchers call this every time, so the answer is kept.
  static std::atomic<i64> shared_memory[kMaxDevices] = {};
  int index = 0;
  if (cudaError_t error = cudaGetDevice(&index); error != cudaSuccess) {
    return Status::error("attention: no usable CUDA device: %s", cudaGetErrorString(error));
  }
  if (index >= kMaxDevices) return examine(index, device);
  device->shared_memory = shared_memory[index].load(std::memory_order_acquire);
  if (device->shared_memory > 0) return Status();
  const Status status = examine(index, device);
  if (status.ok()) shared_memory[index].store(device->shared_memory, std::memory_order_release);
  return status;
}

}  // namespace attention::cuda
