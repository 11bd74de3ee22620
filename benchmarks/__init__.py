# SPDX-License-Identifier: Apache-2.0
"""Benchmark suites for jax_ops: one thin binary per suite over one shared harness."""
