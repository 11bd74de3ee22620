# SPDX-License-Identifier: Apache-2.0
"""CUDA rules of this workspace.

    load("//bazel/cuda:defs.bzl", "cuda_library", "for_architectures")

cuda_library(name, srcs, hdrs = [], deps = [], copts = [], defines = [], alwayslink = False)
    Compiles each .cu file of `srcs` in an action of its own (mnemonic CudaCompile) with the hermetic nvcc, as C++17 and
    position-independent code, for the architectures of HERMETIC_CUDA_COMPUTE_CAPABILITIES (default sm_80,sm_90,compute_90),
    and links the CUDA run-time statically. `deps` are cc_library and cuda_library targets: their headers, include folders and
    defines are seen. `defines` are passed on to dependents, as in cc_library. `copts` are nvcc's options; those that choose
    architectures, device linking or the host compiler are refused with the reason. Includes are workspace paths. A library
    whose code only dlopen reaches needs alwayslink = True. Nothing of a CUDA installation on the machine is used.

for_architectures(name, target, architectures)
    The files of `target` as they come out when every cuda_library behind it is compiled for `architectures` ("sm_80"), whatever
    the rest of the command is built for. Tests that look at compiled kernels use it, to wait for one architecture and not for all.

Host code that needs the CUDA run-time API's headers depends on "@cuda_toolkit//:headers" (`#include <cuda_runtime_api.h>`), and on
"@cuda_toolkit//:cudart" if it calls the API itself.
"""

load("//bazel/cuda/private:cuda_library.bzl", _cuda_library = "cuda_library")
load("//bazel/cuda/private:for_architectures.bzl", _for_architectures = "for_architectures")

cuda_library = _cuda_library
for_architectures = _for_architectures
