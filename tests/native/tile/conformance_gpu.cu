// SPDX-License-Identifier: Apache-2.0
// The primitives on the GPU.
#include <cuda_runtime_api.h>

#include "kernels/common/status.h"
#include "kernels/common/types.h"

namespace attention::conformance {

class DeviceWords {
 public:
  explicit DeviceWords(int count) : bytes_(static_cast<std::size_t>(count) * 4) {
    error_ = cudaMalloc(&p_, bytes_);
    // A word that no kernel writes must not look right by chance.
    if (error_ == cudaSuccess) error_ = cudaMemset(p_, 0xee, bytes_);
  }
  ~DeviceWords() { cudaFree(p_); }
  DeviceWords(const DeviceWords&) = delete;
  DeviceWords& operator=(const DeviceWords&) = delete;

  u32* data() { return static_cast<u32*>(p_); }
  Status upload(const u32* from) {
    if (error_ != cudaSuccess) return status(error_);
    return status(cudaMemcpy(p_, from, bytes_, cudaMemcpyHostToDevice));
  }
  // Waits for the kernel, and returns its error if it failed.
  Status download(u32* to) {
    if (error_ != cudaSuccess) return status(error_);
    return status(cudaMemcpy(to, p_, bytes_, cudaMemcpyDeviceToHost));
  }

 private:
  static Status status(cudaError_t error) {
    if (error == cudaSuccess) return Status();
    return Status::error("CUDA error %d: %s", static_cast<int>(error), cudaGetErrorString(error));
  }
  std::size_t bytes_;
  void* p_ = nullptr;
  cudaError_t error_ = cudaSuccess;
};

}  // namespace attention::conformance

#include "tests/native/tile/conformance_library.h"
