# SPDX-License-Identifier: Apache-2.0
"""Declares the repositories that CUDA targets need; WORKSPACE calls this once."""

load("//bazel/cuda/private:toolkit.bzl", "cuda_toolkit")

def cuda_repositories():
    """Declares @cuda_toolkit. It is fetched when a CUDA target is first built."""
    cuda_toolkit(name = "cuda_toolkit")
