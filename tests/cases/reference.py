# SPDX-License-Identifier: Apache-2.0
"""Attention written out in NumPy: result, log-sum-exp, all gradients and tangents.

The score matrix is formed in full, nothing is fused, and every formula is the textbook one, so that
a reader can check it by eye. The same code serves twice:

- in float64 (longdouble for float64 inputs) it is the reference;
- in float32, with matrix-product operands rounded to the input's precision, it is the fixed
  same-precision baseline that the accuracy rule compares with.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from tests.cases.problem import Problem


def _exact(x):
    return x


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """How the formulas are evaluated.

    dtype: the working dtype. round: rounds product operands. stored: rounds the output that the
    forward pass leaves to the backward pass, which takes sum(dout * out) from it; None where the
    backward pass takes the same number from the weights.
    """

    dtype: type = np.float64
    round: Callable = _exact
    stored: Callable | None = None


FLOAT64 = Arithmetic()
LONGDOUBLE = Arithmetic(np.longdouble)


@dataclasses.dataclass(frozen=True)
class Forward:
    """Results and what the derivatives need; everything in the working dtype."""

    out: np.ndarray  # [B, Lq, Hq, Dv]
    lse: np.ndarray  # [B, Lq, Hq]
    weights: np.ndarray  # softmax [B, Hq, Lq, Lkv], before dropout
    dropped: np.ndarray  # weights after dropout, rounded as a product operand
    keep: np.ndarray | None  # dropout factors
    products: np.ndarray  # q . k, before scale
    slope_of_cap: np.ndarray | float  # derivative of the soft cap at each score
    query: np.ndarray  # operands in the working dtype, NaN-free
    key: np.ndarray
    value: np.ndarray


def _heads_last_to_first(x):
    return np.swapaxes(x, 1, 2)


def _scores(problem: Problem, products, dtype):
    scale = problem.scale
    if scale is None:
        # One rounding, as every backend has it: the default scale is a float32 number at most.
        scale = 1 / np.sqrt(dtype(problem.query.shape[-1]))
    s = products * np.asarray(scale).astype(dtype)
    slope = dtype(1)
    if problem.soft_cap is not None:
        t = np.tanh(s / dtype(problem.soft_cap))
        s = dtype(problem.soft_cap) * t
        slope = 1 - t * t
    return s, slope


def _additive(problem: Problem, allowed, dtype):
    """Bias and ALiBi [B, Hq, Lq, Lkv] or scalars that broadcast, 0 where the pair is masked."""
    total = dtype(0)
    if problem.bias is not None:
        bias = np.broadcast_to(np.asarray(problem.bias).astype(dtype), allowed.shape)
        total = total + np.where(allowed, bias, 0)
    if problem.slopes is not None:
        slopes = np.asarray(problem.slopes).astype(dtype)
        total = total - slopes[:, None, None] * problem.distance()[:, None].astype(dtype)
    return total


def forward(problem: Problem, arithmetic: Arithmetic = FLOAT64) -> Forward:
    dtype, rounded = arithmetic.dtype, arithmetic.round
    b, lq, lkv, hq, hkv, *_ = problem.sizes
    group = hq // hkv
    allowed = problem.allowed()

    # What nobody may see is selected away before any arithmetic: 0 * NaN would be NaN.
    row_used = allowed.any(3)
    key_used = allowed.reshape(b, hkv, group, lq, lkv).any((2, 3))
    q = _heads_last_to_first(problem.query).astype(dtype)
    k = _heads_last_to_first(problem.key).astype(dtype)
    v = _heads_last_to_first(problem.value).astype(dtype)
    q = rounded(np.where(row_used[..., None], q, 0))
    k = np.repeat(rounded(np.where(key_used[..., None], k, 0)), group, 1)
    v = np.repeat(rounded(np.where(key_used[..., None], v, 0)), group, 1)

    products = q @ np.swapaxes(k, 2, 3)
    s, slope_of_cap = _scores(problem, products, dtype)
    s = np.where(allowed, s + _additive(problem, allowed, dtype), -np.inf)
    top = s.max(3, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0).astype(dtype)
    e = np.where(allowed, np.exp(s - top), 0).astype(dtype)
    total = e.sum(3, keepdims=True, dtype=dtype)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + top)[..., 0]
    weights = e / np.where(total > 0, total, 1)
    keep = problem.keep()
    dropped = weights if keep is None else weights * keep.astype(dtype)
    dropped = rounded(dropped.astype(dtype))
    out = _heads_last_to_first(dropped @ v)
    return Forward(
        out, np.swapaxes(lse, 1, 2), weights, dropped, keep, products, slope_of_cap, q, k, v
    )


@dataclasses.dataclass(frozen=True)
class Gradient:
    """A gradient, and the magnitude of what was added up to it.

    magnitude: sum of the terms' absolute values, for sums of score gradients; None for products,
    whose error the baseline shows.
    """

    value: np.ndarray
    magnitude: np.ndarray | None = None


def _sum_to(x, shape):
    """Sums x over the axes that an operand of `shape` repeats."""
    lead = x.ndim - len(shape)
    axes = tuple(range(lead)) + tuple(
        lead + a for a, n in enumerate(shape) if n == 1 and x.shape[lead + a] != 1
    )
    return x.sum(axes, dtype=x.dtype, keepdims=True).reshape(shape)


def backward(
    problem: Problem, dout, dlse=None, arithmetic: Arithmetic = FLOAT64
) -> dict[str, Gradient]:
    """Gradients of sum(out * dout) + sum(lse * dlse) for every differentiable operand present.

    Args:
      problem: the inputs and options.
      dout: [B, Lq, Hq, Dv].
      dlse: [B, Lq, Hq], or None for zero.
      arithmetic: how the formulas are evaluated.
    """
    dtype, rounded = arithmetic.dtype, arithmetic.round
    f = forward(problem, arithmetic)
    b, _, lkv, hq, hkv, d, _ = problem.sizes
    group = hq // hkv
    allowed = problem.allowed()
    row_used = allowed.any(3)
    dout = _heads_last_to_first(np.asarray(dout)).astype(dtype)
    dout = rounded(np.where(row_used[..., None], dout, 0))

    d_weights = dout @ np.swapaxes(f.value, 2, 3)
    if f.keep is not None:
        d_weights = d_weights * f.keep.astype(dtype)
    if arithmetic.stored is None:
        mean = (f.weights * d_weights).sum(3, keepdims=True, dtype=dtype)
    else:
        out = _heads_last_to_first(arithmetic.stored(f.out))
        mean = (out * dout).sum(3, keepdims=True, dtype=dtype)
    if dlse is not None:
        mean = mean - np.swapaxes(np.asarray(dlse), 1, 2).astype(dtype)[..., None]
    # d(score after cap and bias); d(lse) / d(score) = weights.
    d_score = np.where(allowed, f.weights * (d_weights - mean), 0).astype(dtype)
    d_scaled = (d_score * f.slope_of_cap).astype(dtype)
    scale = 1 / np.sqrt(dtype(d)) if problem.scale is None else np.asarray(problem.scale)
    scale = scale.astype(dtype)
    left = rounded(d_scaled)

    def per_kv_head(x):
        return _heads_last_to_first(x.reshape(b, hkv, group, lkv, -1).sum(2, dtype=dtype))

    gradients = {
        "query": Gradient(_heads_last_to_first(left @ f.key) * scale),
        "key": Gradient(per_kv_head(np.swapaxes(left, 2, 3) @ f.query) * scale),
        "value": Gradient(per_kv_head(np.swapaxes(f.dropped, 2, 3) @ dout)),
    }
    if problem.bias is not None:
        shape = np.shape(problem.bias)
        gradients["bias"] = Gradient(_sum_to(d_score, shape), _sum_to(np.abs(d_score), shape))
    if problem.slopes is not None:
        terms = -d_score * problem.distance()[:, None].astype(dtype)
        terms = np.swapaxes(terms, 0, 1).reshape(hq, -1)
        gradients["slopes"] = Gradient(terms.sum(1, dtype=dtype), np.abs(terms).sum(1))
    if isinstance(problem.scale, np.ndarray):
        terms = d_scaled * f.products
        gradients["scale"] = Gradient(
            terms.sum(dtype=dtype).reshape(problem.scale.shape),
            np.abs(terms).sum().reshape(problem.scale.shape),
        )
    return gradients


def jvp(problem: Problem, tangents: dict[str, np.ndarray], arithmetic: Arithmetic = FLOAT64):
    """Tangents (out, lse) for tangents of any of the differentiable operands.

    Written in forward order, apart from `backward`, so that each checks the other.
    """
    dtype, rounded = arithmetic.dtype, arithmetic.round
    f = forward(problem, arithmetic)
    *_, hq, hkv, d, _ = problem.sizes
    allowed = problem.allowed()
    scale = 1 / np.sqrt(dtype(d)) if problem.scale is None else np.asarray(problem.scale)
    scale = scale.astype(dtype)

    def tangent(name, repeats):
        t = _heads_last_to_first(np.asarray(tangents[name])).astype(dtype)
        return np.repeat(rounded(t), repeats, 1)

    t_scaled = np.zeros(allowed.shape, dtype)
    if "query" in tangents:
        t_scaled = t_scaled + scale * (tangent("query", 1) @ np.swapaxes(f.key, 2, 3))
    if "key" in tangents:
        t_scaled = t_scaled + scale * (f.query @ np.swapaxes(tangent("key", hq // hkv), 2, 3))
    if "scale" in tangents:
        t_scaled = t_scaled + np.asarray(tangents["scale"]).astype(dtype) * f.products
    t_score = t_scaled * f.slope_of_cap
    if "bias" in tangents:
        t_score = t_score + np.asarray(tangents["bias"]).astype(dtype)
    if "slopes" in tangents:
        slopes = np.asarray(tangents["slopes"]).astype(dtype)
        t_score = t_score - slopes[:, None, None] * problem.distance()[:, None].astype(dtype)
    t_score = np.where(allowed, t_score, 0)
    t_lse = (f.weights * t_score).sum(3, keepdims=True, dtype=dtype)
    t_weights = f.weights * (t_score - t_lse)
    if f.keep is not None:
        t_weights = t_weights * f.keep.astype(dtype)
    t_out = rounded(t_weights.astype(dtype)) @ f.value
    if "value" in tangents:
        t_out = t_out + f.dropped @ tangent("value", hq // hkv)
    return _heads_last_to_first(t_out), np.swapaxes(t_lse[..., 0], 1, 2)
