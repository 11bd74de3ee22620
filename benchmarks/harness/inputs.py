# SPDX-License-Identifier: Apache-2.0
"""Seeded inputs. Normal values, never zeros: the speed of a matrix unit can depend on the data."""

from __future__ import annotations

import zlib

import ml_dtypes
import numpy as np

from benchmarks.harness.case import Case

Arrays = tuple[np.ndarray, ...]

NUMPY_DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


def seed_of(case: Case) -> int:
    """A seed that depends on the shapes only, so that every dtype and mode sees the same draw."""
    shape = (case.batch, case.lq, case.lkv, case.hq, case.hkv, case.head_dim, case.model_dim)
    return zlib.crc32(repr(shape).encode())


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Standard normals of `shape`, rounded once to `dtype`."""
    return rng.standard_normal(shape, dtype=np.float32).astype(NUMPY_DTYPES[dtype])


def attention_inputs(case: Case) -> Arrays:
    """Returns (q, k, v, cotangent) as numpy arrays in the case's dtype."""
    rng = np.random.default_rng(seed_of(case))
    q_shape = (case.batch, case.lq, case.hq, case.head_dim)
    kv_shape = (case.batch, case.lkv, case.hkv, case.head_dim)
    q, k, v, cotangent = (
        normal(rng, shape, case.dtype) for shape in (q_shape, kv_shape, kv_shape, q_shape)
    )
    return q, k, v, cotangent


def feature_order(count: int, variant: int, back: bool = False) -> np.ndarray:
    """Positions of `count` features in order number `variant`: as they are, reversed, shuffled.

    `back` gives the order that undoes it.
    """
    if variant < 2:
        return np.arange(count)[:: -1 if variant else 1]
    order = np.random.default_rng(variant).permutation(count)
    return np.argsort(order) if back else order


def check_inputs(arrays: Arrays) -> None:
    """Raises ValueError unless every array looks like a draw of non-constant finite values."""
    for index, array in enumerate(arrays):
        # A strided sample is enough to catch zeros, constants and NaN without a pass over GiBs.
        sample = array.reshape(-1)[:: max(1, array.size // 4096)].astype(np.float32)
        if not np.isfinite(sample).all():
            raise ValueError(f"input {index}: holds values that are not finite")
        if array.size > 64 and not sample.std() > 1e-3:
            raise ValueError(f"input {index}: all values are (nearly) equal: not a timing input")
