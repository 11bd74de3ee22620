# SPDX-License-Identifier: Apache-2.0
"""The shared case base: problems, the float64 reference, the accuracy rule and the backends.

Problems, reference and rule are independent of the package under test: only what runs it
(`run.py`, `flex.py`, `support_matrix.py`) imports jax_ops.
"""
