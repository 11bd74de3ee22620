# SPDX-License-Identifier: Apache-2.0
"""Rounding to the precisions in which products are computed, on numpy float arrays."""

from __future__ import annotations

import ml_dtypes
import numpy as np

# What a product's operands hold: the value of a row's `precision` field.
PRECISIONS = ("float32", "tf32", "bfloat16", "float16")


def round_to(array: np.ndarray, precision: str) -> np.ndarray:
    """Rounds to nearest even in `precision`; the result keeps the input's numpy dtype."""
    if precision == "float32":
        return array.astype(np.float32).astype(array.dtype)
    if precision == "tf32":
        return _round_to_tf32(array.astype(np.float32)).astype(array.dtype)
    target = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[precision]
    return array.astype(np.float32).astype(target).astype(array.dtype)


def _round_to_tf32(array: np.ndarray) -> np.ndarray:
    """Keeps 10 of float32's 23 mantissa bits, to nearest even."""
    bits = np.ascontiguousarray(array).view(np.uint32)
    dropped = np.uint32(13)
    half_minus_one = np.uint32((1 << 12) - 1)
    odd = (bits >> dropped) & np.uint32(1)
    rounded = ((bits + half_minus_one + odd) >> dropped) << dropped
    return rounded.view(np.float32)
