# SPDX-License-Identifier: Apache-2.0
"""The shared case base: problems, the float64 reference, the accuracy rule and the backends.

It is independent of the package under test: nothing here except `run.py` imports jax_ops.
"""
