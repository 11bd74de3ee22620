# SPDX-License-Identifier: Apache-2.0
"""Attention written out in NumPy: result, log-sum-exp, all gradients and tangents.

The score matrix is formed in full, nothing is fused, and every formula is the textbook one, so that
a reader can check it by eye. The same code serves twice:

- in float64 (longdouble for float64 inputs) it is the reference;
- in float32, with product operands rounded to the input's precision and every sum taken in order,
  it is the fixed same-precision baseline that the accuracy rule compares with. It depends on no
  BLAS library, so it is the same on every machine.
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

    dtype: the working dtype. round: rounds product operands. order: sums are taken one term after
    the other, from the first (1), from the last (-1), or shuffled (2, 3, ...: the seed); 0: as
    NumPy likes. stored: rounds the output that the forward pass leaves to the backward pass, which
    then takes the weights from lse, and sum(dout * out) from the output, as the memory of a
    training step allows; None: the backward pass uses the weights themselves.
    """

    dtype: type = np.float64
    round: Callable = _exact
    order: int = 0
    stored: Callable | None = None

    def dot(self, a, b):
        """Matrix product a [..., m, n] @ b [..., n, p] in the working dtype."""
        if not self.order:
            return a @ b
        total = np.zeros((*a.shape[:-1], b.shape[-1]), self.dtype)
        for i in self._terms(a.shape[-1]):
            total += a[..., i, None] * b[..., i, None, :]
        return total

    def sum(self, x, axis=-1, keepdims=False):
        """Sum over one axis in the working dtype."""
        if not self.order or x.shape[axis] == 0:
            return x.sum(axis, dtype=self.dtype, keepdims=keepdims)
        x = np.take(x, self._terms(x.shape[axis]), axis)
        total = np.take(np.add.accumulate(x, axis, dtype=self.dtype), -1, axis)
        return np.expand_dims(total, axis) if keepdims else total

    def _terms(self, n):
        """The order in which n terms are added."""
        if self.order > 1:
            return np.random.default_rng([self.order, n]).permutation(n)
        return np.arange(n)[:: self.order]


FLOAT64 = Arithmetic()
LONGDOUBLE = Arithmetic(np.longdouble)


@dataclasses.dataclass(frozen=True)
class Forward:
    """Results and what the derivatives need; everything in the working dtype."""

    out: np.ndarray  # [B, Lq, Hq, Dv]
    lse: np.ndarray  # [B, Lq, Hq]
    scores: np.ndarray  # after scale, cap, bias; -inf where masked
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

    products = arithmetic.dot(q, np.swapaxes(k, 2, 3))
    s, slope_of_cap = _scores(problem, products, dtype)
    s = np.where(allowed, s + _additive(problem, allowed, dtype), -np.inf)
    top = s.max(3, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0).astype(dtype)
    e = np.where(allowed, np.exp(s - top), 0).astype(dtype)
    total = arithmetic.sum(e, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + top)[..., 0]
    weights = e / np.where(total > 0, total, 1)
    keep = problem.keep()
    dropped = weights if keep is None else weights * keep.astype(dtype)
    dropped = rounded(dropped.astype(dtype))
    out = _heads_last_to_first(arithmetic.dot(dropped, v))
    return Forward(
        out, np.swapaxes(lse, 1, 2), s, weights, dropped, keep, products, slope_of_cap, q, k, v
    )


@dataclasses.dataclass(frozen=True)
class Gradient:
    """A gradient; for one that sums what the rows add to it, also the rows' parts.

    rows: like value, with an axis of parts at the end; None where nothing is summed over rows.
    """

    value: np.ndarray
    rows: np.ndarray | None = None


def _bias_gradient(d_score, shape, arithmetic) -> Gradient:
    """Sums score gradients over the axes that a bias of `shape` repeats."""
    full = (1,) * (4 - len(shape)) + tuple(shape)
    if full[3] == 1:
        d_score = arithmetic.sum(d_score, keepdims=True)
    repeated = [a for a in range(3) if full[a] == 1]
    kept = [a for a in range(4) if a not in repeated]
    parts = np.transpose(d_score, kept + repeated)
    parts = parts.reshape(*shape, -1)
    return Gradient(arithmetic.sum(parts), parts)


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
    b, lq, _, hq, hkv, d, _ = problem.sizes
    group = hq // hkv
    allowed = problem.allowed()
    row_used = allowed.any(3)
    given_dout = _heads_last_to_first(np.asarray(dout)).astype(dtype)
    given_dout = np.where(row_used[..., None], given_dout, 0)
    dout = rounded(given_dout)

    d_weights = arithmetic.dot(dout, np.swapaxes(f.value, 2, 3))
    if f.keep is not None:
        d_weights = d_weights * f.keep.astype(dtype)
    weights, dropped = f.weights, f.dropped
    if arithmetic.stored is None:
        mean = arithmetic.sum(weights * d_weights, keepdims=True)
    else:
        lse = np.swapaxes(f.lse, 1, 2)[..., None]
        weights = np.where(allowed, np.exp(f.scores - np.where(allowed, lse, 0)), 0).astype(dtype)
        dropped = rounded(weights if f.keep is None else weights * f.keep.astype(dtype))
        out = _heads_last_to_first(arithmetic.stored(f.out))
        # Last column first: d_weights sums the same products in the other order, and
        # where one key has all the weight the two would cancel without a rounding error, which no
        # kernel that forms them in different places can do.
        mean = arithmetic.sum((out * given_dout)[..., ::-1], keepdims=True)
    if dlse is not None:
        mean = mean - np.swapaxes(np.asarray(dlse), 1, 2).astype(dtype)[..., None]
    # d(score after cap and bias); d(lse) / d(score) = weights.
    d_score = np.where(allowed, weights * (d_weights - mean), 0).astype(dtype)
    d_scaled = (d_score * f.slope_of_cap).astype(dtype)
    scale = 1 / np.sqrt(dtype(d)) if problem.scale is None else np.asarray(problem.scale)
    scale = scale.astype(dtype)
    left = rounded(d_scaled)

    def per_kv_head(rows, x):
        """rows^T @ x, summed over the rows of a group's heads."""
        rows, x = (y.reshape(b, hkv, group * lq, y.shape[-1]) for y in (rows, x))
        return _heads_last_to_first(arithmetic.dot(np.swapaxes(rows, 2, 3), x))

    gradients = {
        "query": Gradient(_heads_last_to_first(arithmetic.dot(left, f.key)) * scale),
        "key": Gradient(per_kv_head(left, f.query) * scale),
        "value": Gradient(per_kv_head(dropped, dout)),
    }
    if problem.bias is not None:
        gradients["bias"] = _bias_gradient(d_score, np.shape(problem.bias), arithmetic)
    if problem.slopes is not None:
        terms = -d_score * problem.distance()[:, None].astype(dtype)
        rows = np.swapaxes(arithmetic.sum(terms), 0, 1).reshape(hq, b * lq)
        gradients["slopes"] = Gradient(arithmetic.sum(rows), rows)
    if isinstance(problem.scale, np.ndarray):
        rows = arithmetic.sum(d_scaled * f.products).reshape(-1)
        gradients["scale"] = Gradient(arithmetic.sum(rows), rows)
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
        t_scaled = t_scaled + scale * arithmetic.dot(tangent("query", 1), np.swapaxes(f.key, 2, 3))
    if "key" in tangents:
        t_scaled = t_scaled + scale * arithmetic.dot(
            f.query, np.swapaxes(tangent("key", hq // hkv), 2, 3)
        )
    if "scale" in tangents:
        t_scaled = t_scaled + np.asarray(tangents["scale"]).astype(dtype) * f.products
    t_score = t_scaled * f.slope_of_cap
    if "bias" in tangents:
        t_score = t_score + np.asarray(tangents["bias"]).astype(dtype)
    if "slopes" in tangents:
        slopes = np.asarray(tangents["slopes"]).astype(dtype)
        t_score = t_score - slopes[:, None, None] * problem.distance()[:, None].astype(dtype)
    t_score = np.where(allowed, t_score, 0)
    t_lse = arithmetic.sum(f.weights * t_score, keepdims=True)
    t_weights = f.weights * (t_score - t_lse)
    if f.keep is not None:
        t_weights = t_weights * f.keep.astype(dtype)
    t_out = arithmetic.dot(rounded(t_weights.astype(dtype)), f.value)
    if "value" in tangents:
        t_out = t_out + arithmetic.dot(f.dropped, tangent("value", hq // hkv))
    return _heads_last_to_first(t_out), np.swapaxes(t_lse[..., 0], 1, 2)
