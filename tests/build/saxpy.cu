// SPDX-License-Identifier: Apache-2.0
// A kernel as small as can be, so that the checks of the CUDA rules do not wait for the real ones.

#include <cuda_runtime_api.h>

namespace {

// In an anonymous namespace on purpose: nvcc puts a hash of the source's path into such names.
__global__ void Saxpy(int n, float a, const float* x, float* y) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] += a * x[i];
}

}  // namespace

extern "C" int fixture_saxpy(int n, float a, const float* x, float* y, cudaStream_t stream) {
  Saxpy<<<(n + 255) / 256, 256, 0, stream>>>(n, a, x, y);
  return static_cast<int>(cudaGetLastError());
}
