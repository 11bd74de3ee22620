# SPDX-License-Identifier: Apache-2.0
"""The yardsticks of accuracy, in numpy alone: a float64 reference and a same-precision baseline.

Both run the textbook unfused algorithm, one (batch, kv head) and one block of queries at a time,
so that memory stays bounded. They differ only in arithmetic:

* reference: everything in float64.
* baseline: float32 accumulation and softmax; P and dS rounded to the operand precision before the
  products that consume them, as an unfused implementation of that precision would do; outputs
  rounded to the case's dtype, of which the backward pass sees the output.

Nothing here imports jax or jax_ops: a bug there cannot hide in its own yardstick.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from benchmarks.harness.case import Case
from benchmarks.harness.precision import round_to

# Elements of one score block; 4 Mi float64 are 32 MiB.
_BLOCK_ELEMENTS = 4 << 20


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """How numbers are held: accumulation type, operand precision, output dtype."""

    accumulate: type
    operand: str | None = None
    output: str | None = None

    def product_operand(self, array: np.ndarray) -> np.ndarray:
        return array if self.operand is None else round_to(array, self.operand)

    def result(self, array: np.ndarray) -> np.ndarray:
        return array if self.output is None else round_to(array, self.output)


FLOAT64 = Arithmetic(np.float64)


def baseline_arithmetic(dtype: str, precision: str) -> Arithmetic:
    """The fixed baseline for inputs of `dtype` whose products run in `precision`."""
    return Arithmetic(np.float32, operand=precision, output=dtype)


def attention(
    case: Case,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    cotangent: np.ndarray | None,
    arithmetic: Arithmetic = FLOAT64,
) -> tuple[np.ndarray, ...]:
    """Attention of q [B, Lq, Hq, D] on k, v [B, Lkv, Hkv, D], scale 1 / sqrt(D).

    Returns (out,) without a cotangent, (dq, dk, dv) with one.
    """
    real = arithmetic.accumulate
    scale = 1.0 / math.sqrt(case.head_dim)
    out = np.zeros(q.shape, real)
    grads = None
    if cotangent is not None:
        grads = (np.zeros(q.shape, real), np.zeros(k.shape, real), np.zeros(v.shape, real))
    rows = max(1, min(case.lq, _BLOCK_ELEMENTS // max(1, case.lkv * case.group)))
    for b in range(case.batch):
        for head in range(case.hkv):
            heads = slice(head * case.group, (head + 1) * case.group)
            keys = arithmetic.product_operand(k[b, :, head].astype(real))
            values = arithmetic.product_operand(v[b, :, head].astype(real))
            for start in range(0, case.lq, rows):
                block = slice(start, min(start + rows, case.lq))
                queries = _head_major(q[b, block, heads], arithmetic)
                p = _softmax(case, queries, keys, scale, start)
                p_rounded = arithmetic.product_operand(p)
                if grads is None:
                    out[b, block, heads] = (p_rounded @ values).transpose(1, 0, 2)
                    continue
                d_out = _head_major(cotangent[b, block, heads], arithmetic)
                dp = d_out @ values.T
                mean = _mean_gradient(cotangent[b, block, heads], p_rounded @ values, arithmetic)
                ds = arithmetic.product_operand(p * (dp - mean))
                dq, dk, dv = grads
                dq[b, block, heads] = ((ds @ keys) * real(scale)).transpose(1, 0, 2)
                # Summed over the group and over the queries of the block in one product.
                flat = (-1, case.lkv)
                dk[b, :, head] += (
                    ds.reshape(flat).T @ queries.reshape(-1, case.head_dim) * real(scale)
                )
                dv[b, :, head] += p_rounded.reshape(flat).T @ d_out.reshape(-1, case.head_dim)
    results = (out,) if grads is None else grads
    return tuple(arithmetic.result(array) for array in results)


def _mean_gradient(cotangent: np.ndarray, out: np.ndarray, arithmetic: Arithmetic) -> np.ndarray:
    """sum(p * dp) over the keys as sum(cotangent * out) over the features: [heads, rows, 1].

    From the rounded output, because that is what a training step keeps. Summing p * dp itself
    would cancel exactly where one key has all the weight, which no kernel that forms dp and this
    sum in different places can do.
    """
    kept = arithmetic.result(out).astype(arithmetic.accumulate)
    given = cotangent.astype(arithmetic.accumulate).transpose(1, 0, 2)
    return (given * kept).sum(-1, keepdims=True)


def _head_major(array: np.ndarray, arithmetic: Arithmetic) -> np.ndarray:
    """[rows, heads, D] -> [heads, rows, D] in the working arithmetic."""
    return arithmetic.product_operand(array.astype(arithmetic.accumulate).transpose(1, 0, 2))


def _softmax(
    case: Case, queries: np.ndarray, keys: np.ndarray, scale: float, first_row: int
) -> np.ndarray:
    """Softmax of one block of scores [heads, rows, lkv], causal where the case says so."""
    scores = (queries @ keys.T) * queries.dtype.type(scale)
    if case.causal:
        row = np.arange(first_row, first_row + queries.shape[1]) + (case.lkv - case.lq)
        hidden = np.arange(case.lkv)[None, :] > row[:, None]
        scores[:, hidden] = -np.inf
    top = scores.max(-1, keepdims=True)
    # A row with no allowed key has weight nowhere: its output is zero, never NaN.
    np.subtract(scores, np.where(np.isfinite(top), top, 0), out=scores)
    np.exp(scores, out=scores)
    total = scores.sum(-1, keepdims=True)
    return np.divide(scores, total, out=scores, where=total > 0)
