# SPDX-License-Identifier: Apache-2.0
"""Mutation test of the CUDA kernels."""
