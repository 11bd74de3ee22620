# SPDX-License-Identifier: Apache-2.0
"""Fused attention for JAX on GPUs and CPUs."""

from jax_ops import _libraries
from jax_ops._errors import DtypeError, UnsupportedError
from jax_ops.attention import dot_product_attention
from jax_ops.dispatch import available_implementations
from jax_ops.version import __version__

__all__ = [
    "DtypeError",
    "UnsupportedError",
    "__version__",
    "available_implementations",
    "dot_product_attention",
]

_libraries.load_at_import()
